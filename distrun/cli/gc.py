"""`distrun gc`: removes the folders of jobs that are over."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import takes
from distrun.cli.console import print_err, print_json, print_out
from distrun.errors import UsageError
from distrun.formats import size
from distrun.options import count
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import stored
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobfolder import JobFolder

SCHEMA = "distrun.gc/1"
OLDER_S = 30 * 86400.0
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True)
class StoredJob:
    """A job of the store, as far as it matters here."""

    folder: JobFolder
    state: str
    ended: float
    """When it ended or was last heard of, or its folder last changed; seconds since 1970."""


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return an option's time in seconds: `30d`, `12h`, `90m`, or seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhdw]?)", value)
    if match is None:
        raise UsageError(f"--older-than: expected a time such as 30d, 12h or 90m, found {value!r}")
    return float(match.group(1)) * _UNITS[match.group(2) or "s"]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[JOB]...", nargs=-1)
@click.option("--older-than", callback=_age, metavar="TIME", help="Only jobs that ended so long ago. [default: 30d]")
@takes(count("--keep", "Keep the N newest jobs, however old they are.", low=0))
@click.option("--lost", is_flag=True, help="Also jobs whose launcher died. First: distrun kill JOB.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gc(names: tuple[str, ...], **options: Any) -> int:
    """Remove the folders of jobs that are over: logs, plan, events, and what tasks left in DISTRUN_RUN_DIR.

    \b
    Examples:
      distrun gc --dry-run                # what ended more than 30 days ago
      distrun gc --older-than 7d --keep 20
      distrun gc calm-otter               # this one, whenever it ended

    A job that runs, or of which this machine cannot know whether it runs, is never removed. A lost job is removed with
    --lost, a damaged one if it is named. Of a job with --run-dir only the link in the job store goes. A job whose
    coordinator was on a host has a folder there, too, which is removed by ssh. The exit code is 1 if something could
    not be removed.
    """
    from distrun import killing
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    if names:
        named = [_job(folder) for folder in dict.fromkeys(store.find(name) for name in names)]
        _refuse(named, options["lost"])
        chosen = _old(named, options["older_than"] or 0.0, time.time())
    else:
        older_s = OLDER_S if options["older_than"] is None else options["older_than"]
        chosen = _old(removable(map(_job, store.list()), options["lost"]), older_s, time.time())
    kept = set(store.list()[: options["keep"] or 0])
    chosen = [job for job in chosen if job.folder not in kept]
    problems = [] if options["dry_run"] else killing.finish(store)
    act = killing.measure if options["dry_run"] else killing.remove
    rows = []
    there = _There(options["dry_run"])
    for job in chosen:
        host = there.remove(job.folder)
        done = act(job.folder)
        about = {"job": job.folder.id, "state": job.state, "folder": str(job.folder.path), "host": host}
        rows.append({**about, **done._asdict()})
    problems += there.problems
    problems += [str(row["problem"]) for row in rows if row["problem"]]
    code = facts.EXIT_LEFT if problems else 0
    if options["as_json"]:
        total = sum(row["size"] for row in rows)
        print_json(SCHEMA, dry_run=options["dry_run"], exit_code=code, size=total, jobs=rows, problems=problems)
    else:
        _tell(rows, options["dry_run"])
        for problem in problems:
            print_err(f"distrun: error: {problem}\n")
    return code


class _There:
    """Removes the folders that jobs have on the hosts that had their coordinators, and keeps what went wrong."""

    def __init__(self, dry_run: bool) -> None:
        self.problems: list[str] = []
        self._dry_run = dry_run
        self._silent: dict[str, str] = {}
        """Why a host cannot be asked, by what reaches it: it is asked once."""

    def remove(self, folder: JobFolder) -> str:
        """Remove a job's folder on such a host; return the host if there is one and this was done (or would be)."""
        from distrun import remote_jobs

        try:
            where = folder.control()
        except JobStoreError:
            return ""
        if where is None or not where.get("folder"):
            return ""
        login, host = str(where["login"]), str(where["host"])
        if self._dry_run:
            return host
        try:
            if login in self._silent:
                raise remote_jobs.NotAsked(self._silent[login])
            remote_jobs.remove(folder, login, str(where["folder"]))
        except (remote_jobs.NotAsked, remote_jobs.NotRemoved) as err:
            if isinstance(err, remote_jobs.NotAsked):
                self._silent[login] = str(err)
            stays = f"job {folder.id}: its folder on {host} stays: {err}"
            self.problems.append(f"{stays}; fix: {login} {shlex.join(['rm', '-r', str(where['folder'])])}")
            return ""
        return host


def removable(jobs: Iterable[StoredJob], lost: bool) -> list[StoredJob]:
    """Return the jobs that may be removed without being named: those that are over, lost ones if so."""
    states = (*facts.OVER, facts.LOST) if lost else facts.OVER
    return [job for job in jobs if job.state in states]


def _old(jobs: Sequence[StoredJob], older_s: float, now: float) -> list[StoredJob]:
    return [job for job in jobs if now - job.ended >= older_s]


def _job(folder: JobFolder) -> StoredJob:
    state = folder.shown()
    ended = state["finished"] or state.get("heard") or state["updated"]
    return StoredJob(folder, str(state["state"]), stored.seconds(ended) if ended else 0.0)


def _refuse(named: Sequence[StoredJob], lost: bool) -> None:
    """Refuse to remove a job that was named and is not over.

    Raises:
        UsageError: there is one.
    """
    for job in named:
        name = job.folder.id
        if job.state in facts.LIVE:
            raise UsageError(f"job {name} is {job.state}", f"first: distrun kill {name}")
        if job.state == facts.UNKNOWN:
            host = job.folder.launcher()["host"]
            raise UsageError(
                f"job {name} may still run: it was launched on {host}", f"on {host}: distrun status {name}"
            )
        if job.state == facts.DAMAGED and job.folder.has_launcher():
            raise UsageError(f"job {name} is damaged, and its launcher runs", f"first: distrun kill {name}")
        if job.state == facts.LOST and not lost:
            text = f"job {name} lost its launcher, and may have left processes"
            raise UsageError(text, f"first: distrun kill {name}; or add --lost")


def _tell(rows: Sequence[dict[str, Any]], dry_run: bool) -> None:
    for row in rows:
        if row["problem"]:
            continue
        kept = f"; its folder stays: {row['kept']}" if row["kept"] else ""
        what = "only the link to it" if row["kept"] else size(row["size"])
        there = f"; also its folder on {row['host']}" if row["host"] else ""
        print_out(f"{row['job']}: {row['state']}, {what}{there}{kept}\n")
    done = [row for row in rows if not row["problem"]]
    if not done:
        print_out("there is nothing to remove\n" if not rows else "")
        return
    jobs = "1 job" if len(done) == 1 else f"{len(done)} jobs"
    verb = "would be removed (--dry-run)" if dry_run else "removed"
    print_out(f"{jobs} {verb}, {size(sum(row['size'] for row in done))}\n")
