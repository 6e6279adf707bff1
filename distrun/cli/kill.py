"""`distrun kill` and `distrun gc`: end a job and what jobs left on hosts; remove the folders of jobs that are over.

`kill` has three forms: jobs by name, which were launched on this machine; all my jobs on hosts (-H, --stale), found by
agents' records and marks; and, for emergencies, my processes by their command lines (--match with --any-process).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import click

from distrun import formats
from distrun.cli.common import (
    SURVEY_S,
    agree,
    engine_of,
    hosts_as_json,
    hosts_of,
    my_jobs,
    survey,
    takes,
    tell_problems,
    tell_warnings,
)
from distrun.cli.console import print_err, print_json, print_out, styled, width
from distrun.errors import UsageError
from distrun.fleet import Fleet, questions
from distrun.fleet.questions import HostAnswer, HostJob
from distrun.hosts.ranges import fold
from distrun.options import HOSTS, LABELS, LAUNCHER, SITE, count, seconds, text
from distrun.requesting import find_hosts
from distrun_runtime.contract import environ, facts, process
from distrun_runtime.contract.plan import Host, Limits
from distrun_runtime.coordinator.failures import Problem

if TYPE_CHECKING:
    from distrun.backends.base import Backend
    from distrun.jobs import Job
    from distrun.killing import RemovedJob
    from distrun_runtime.coordinator.jobfolder import JobFolder

SCHEMA = "distrun.kill/1"
SHOWN = 5
"""Jobs that are named if none was, at most."""
SLACK_S = 20.0
"""What ending a job may take beyond twice its grace time."""

Found = Mapping[str, HostAnswer | Problem]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[JOB]...", nargs=-1)
@takes(*HOSTS, LAUNCHER._replace(help="With --stale: what dead launchers left in this engine (slurm, sge ...)."), *SITE)
@takes(
    text("--name", "Stop all jobs that run and whose names are like PATTERN ('x-*').", "PATTERN"),
    LABELS._replace(help="Stop all jobs that run and have this label. Repeatable."),
)
@click.option("--stale", is_flag=True, help="Only abandoned jobs: agent dead, stopped, or past its lease.")
@click.option("--dry-run", is_flag=True, help="Show what would be ended, and end nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@takes(seconds("--grace", "Seconds between SIGTERM and SIGKILL. [default: the job's]", low=0))
@click.option("--match", metavar="REGEX", help="With --any-process: end my processes with such a command line.")
@click.option("--any-process", is_flag=True, help="With --match: also processes that no job started. Check the list!")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def kill(names: tuple[str, ...], **options: Any) -> int:
    """Stop JOB (an id, the beginning of one, or a name) and everything that it started.

    \b
    Examples:
      distrun kill calm-otter                 # a job that was launched here, on all its hosts
      distrun kill --name 'sweep-*' -y        # all jobs of such names that run
      distrun kill -H hosts                   # all my jobs on these hosts
      distrun kill -H hosts --stale -y        # what dead launchers left there
      distrun kill --stale --dry-run          # on this machine
      distrun kill --launcher slurm --stale   # cancel what dead launchers left in Slurm
      distrun kill --launcher slurm --stale --hosts n1,n2   # processes left on these nodes, found by srun

    If a name fits several jobs, a running one is preferred. distrun asks the job's launcher to stop it. If the launcher
    is gone, distrun finds the job's processes by what was recorded of them, never by program names, and never another
    user's. They get SIGTERM, and SIGKILL after the grace time. The exit code is 1 if a process did not end, 3 if a host
    cannot be reached.
    """
    if options["name"] or options["labels"]:
        others = ("launcher", "hostfile", "hosts", "match", "stale")
        if names or any(options[each] for each in others):
            raise UsageError("--name and --label choose among the jobs of this machine", "leave JOB, -H and others out")
        going = [job.refresh() for job in my_jobs().list(0, options["name"], options["labels"])]
        if not going:
            raise UsageError("no job that runs has such a name and such labels", "distrun status lists the jobs")
        return _stop(going, options)
    if options["launcher"]:
        return _in_engine(names, options)
    is_elsewhere = options["hostfile"] is not None or options["hosts"] is not None
    if bool(options["match"]) != options["any_process"]:
        raise UsageError(
            "--match and --any-process go together: they may end what no job of distrun started",
            "without both, distrun kill ends only what distrun has started",
        )
    if options["match"]:
        if names or options["stale"]:
            raise UsageError("--match takes neither a JOB nor --stale")
        return _by_match(options)
    if is_elsewhere or options["stale"]:
        # Hosts of the environment are where jobs are launched, not where things are killed: that has to be said.
        _, backend, hosts = hosts_of(options, {})
        return _sweep(backend, hosts, names, options)
    if not names:
        living = [job.id for job in my_jobs().list(0)]
        first = f"distrun kill {living[0]}" if living else "distrun status lists the jobs"
        there = f"these go on: {facts.listed(living, SHOWN)}" if living else "none of your jobs goes on"
        raise UsageError(f"which job? {there}", f"{first}; -H FILE means all of mine on these hosts")
    return _by_name(names, options)


# ---------------------------------------------------------------------- jobs that were launched here


def _by_name(names: Sequence[str], options: Mapping[str, Any]) -> int:
    """Stop jobs that were launched on this machine; return the exit code."""
    jobs = my_jobs()
    found = {(job := jobs.get(name, prefers_living=True)).id: job.refresh() for name in names}
    return _stop(list(found.values()), options)


def _stop(found: Sequence[Job], options: Mapping[str, Any]) -> int:
    """Stop jobs, after a question if there are several; return the exit code."""
    if options["dry_run"]:
        return _preview([job.folder for job in found], options)
    if len(found) > 1:
        listed = ", ".join(job.id for job in found)
        agree(f"Stop {listed}?", options["yes"])
    code = 0
    told = []
    for job in found:
        killed = job.stop(options["grace"])
        code = facts.EXIT_LEFT if killed.left else code or (facts.EXIT_PREFLIGHT if killed.unasked else 0)
        told.append({"job": job.id, "done": killed.lines, "left": killed.left, "unasked": killed.unasked})
        if not options["as_json"]:
            print_out("".join(f"{job.id}: {line}\n" for line in killed.lines))
    if options["as_json"]:
        print_json(SCHEMA, dry_run=False, exit_code=code, jobs=told)
    return code


def _preview(folders: Sequence[JobFolder], options: Mapping[str, Any]) -> int:
    """Show what is there of jobs that were launched here, on all their hosts; return the exit code."""
    from distrun import backends

    code, told = 0, []
    for folder in folders:
        plan, state = folder.plan(), folder.standing()
        with Fleet(backends.load(plan.backend), plan.hosts) as fleet:
            found, every = survey(fleet)
        chosen = [each for each in every if (each.job, each.nonce) == (plan.job, plan.nonce)]
        result = Result(found, chosen, is_dry=True)
        code = max(code, result.code)
        told.append({"job": folder.id, "state": state, "hosts": _rows_as_json(result)})
        if not options["as_json"]:
            print_out(f"{folder.id}: {state}\n")
            _show_jobs(found, chosen)
            _tell(result, f"no process of it is {result.where}")
    if options["as_json"]:
        print_json(SCHEMA, dry_run=True, exit_code=code, jobs=told)
    return code


# ---------------------------------------------------------------------- all my jobs on hosts


@dataclass(frozen=True)
class Result:
    """What was found on the hosts, what of it was meant, and what was done about it."""

    found: Found
    chosen: Sequence[HostJob]
    swept: Found = field(default_factory=dict)
    is_dry: bool = False

    @property
    def problems(self) -> dict[str, Problem]:
        """The hosts that did not answer, and why."""
        answers = [*self.found.items(), *self.swept.items()]
        return {host: each for host, each in answers if isinstance(each, Problem)}

    @property
    def done(self) -> dict[str, Any]:
        """What hosts say of what they ended, by job; processes that matched are those of the job ""."""
        return {host: each.value for host, each in self.swept.items() if isinstance(each, HostAnswer)}

    @property
    def where(self) -> str:
        """The end of a sentence that says that nothing was found: where that is so."""
        if not self.problems:
            return "there"
        return "on the other hosts" if len(self.problems) < len(self.found) else "known of"

    @property
    def code(self) -> int:
        """The exit code."""
        left = any(report["left"] for by_job in self.done.values() for report in by_job.values())
        return facts.EXIT_LEFT if left else facts.EXIT_PREFLIGHT if self.problems else 0


def _swept(
    backend: Backend,
    hosts: Sequence[Host],
    options: Mapping[str, Any],
    look: Callable[[Fleet], tuple[Found, Sequence[HostJob]]],
    end: Callable[[Fleet, Sequence[HostJob]], Found],
) -> Result:
    """Show what `look` finds on hosts, and let `end` end it, if the user agrees."""
    with Fleet(backend, hosts) as fleet:
        found, chosen = look(fleet)
        is_ending = bool(chosen) and not options["dry_run"]
        if is_ending and options["yes"]:
            return Result(found, chosen, end(fleet, chosen))
    if not is_ending:
        return Result(found, chosen, is_dry=options["dry_run"])
    agree(f"End these {sum(len(each.processes) for each in chosen)} processes?", False)
    names = {each.host for each in chosen}
    with Fleet(backend, [host for host in hosts if host.name in names]) as fleet:
        return Result(found, chosen, end(fleet, chosen))


def _sweep(backend: Backend, hosts: Sequence[Host], wanted: Sequence[str], options: Mapping[str, Any]) -> int:
    """End jobs of mine, found by agents' records and marks, on hosts; return the exit code."""

    def look(fleet: Fleet) -> tuple[Found, Sequence[HostJob]]:
        found, chosen = survey(fleet, wanted, options["stale"])
        if not options["as_json"]:
            _show_jobs(found, chosen)
        return found, chosen

    result = _swept(backend, hosts, options, look, lambda fleet, chosen: end_jobs(fleet, chosen, options["grace"]))
    if options["as_json"]:
        print_json(SCHEMA, dry_run=result.is_dry, exit_code=result.code, hosts=_rows_as_json(result))
    else:
        _tell(result, f"{'no stale job' if options['stale'] else 'no job of mine'} is {result.where}")
    return result.code


def _in_engine(names: Sequence[str], options: Mapping[str, Any]) -> int:
    """Cancel my jobs in an engine whose launchers are gone; return the exit code."""
    from distrun import killing
    from distrun.backends.engine import EngineError

    if names or not options["stale"]:
        raise UsageError(
            f"--launcher {options['launcher']} goes with --stale, and with no JOB",
            "a job that was launched here is killed by its name alone: distrun kill JOB",
        )
    backend = engine_of(options["launcher"], options, environ.snapshot())
    if backend is None:
        raise UsageError(
            f"--launcher {options['launcher']} is no engine: its hosts are asked",
            "distrun kill -H FILE --stale, without --launcher",
        )
    named = find_hosts(options, {})
    if named is not None:
        tell_warnings(named)
        return _sweep(backend, [Host(spec.name) for spec in named.specs], (), options)
    store = my_jobs().store
    chosen = killing.abandoned(backend.engine.find(), store)
    if not options["as_json"]:
        cells = [(each.handle.id, each.marker, each.state) for each in chosen]
        _print_cells(("JOB", "MARKER", "STATE"), cells)
    problems: dict[str, str] = {}
    if chosen and not options["dry_run"]:
        agree(f"Cancel {len(chosen)} in {backend.name}?", options["yes"])
        for each in chosen:
            try:
                backend.cancelled(each.handle)
            except EngineError as err:
                problems[each.marker] = str(err)
    code = facts.EXIT_LEFT if problems else 0
    if options["as_json"]:
        rows = [
            {"id": each.handle.id, "marker": each.marker, "state": each.state, "problem": problems.get(each.marker)}
            for each in chosen
        ]
        print_json(SCHEMA, dry_run=options["dry_run"], exit_code=code, engine=backend.name, jobs=rows)
        return code
    for each in chosen if not options["dry_run"] else ():
        if each.marker in problems:
            print_err(f"distrun: error: {each.marker}: {problems[each.marker]}\n")
        else:
            print_out(f"{backend.name}: ended {each.handle.id} ({each.marker})\n")
    if not chosen:
        print_out(f"no abandoned job of mine is in {backend.name}\n")
    elif options["dry_run"]:
        print_out("nothing was ended (--dry-run)\n")
    nodes = killing.nodes_of_lost(backend, store)
    if not nodes:
        return code
    print_out(f"looking for what lost jobs have left on {fold(nodes)}\n")
    return code or _sweep(backend, [Host(name) for name in nodes], (), options)


def end_jobs(fleet: Fleet, chosen: Sequence[HostJob], grace_s: float | None) -> Found:
    """End jobs, on all hosts at once; return what each host's agent says of each job.

    Without a `grace_s` each job has its own, which its agent has recorded.
    """
    by_host: dict[str, dict[str, float]] = {}
    for each in chosen:
        own_s = Limits().grace_s if each.grace_s is None else each.grace_s
        by_host.setdefault(each.host, {})[each.mark] = own_s if grace_s is None else grace_s
    more = {} if grace_s is None else {"grace_s": grace_s}
    return fleet.ask(
        "sweeps",
        lambda host: {"jobs": list(by_host[host]), **more},
        max(sum(2 * each + SLACK_S for each in of_host.values()) for of_host in by_host.values()),
        list(by_host),
    )


def _show_jobs(found: Found, chosen: Sequence[HostJob]) -> None:
    rows: dict[str, list[Sequence[str]]] = {}
    names = questions.names(chosen)
    for job in chosen:
        which = names[job.mark], job.state()
        rows.setdefault(job.host, []).extend(
            [(*which, row.task, str(row.pid), formats.age(row.age_s), questions.shown(row)) for row in job.processes]
            or [(*which, "", "", "", "only its folder is left")]
        )
    _print_table(("HOST", "JOB", "AGENT", "TASK", "PID", "AGE", "COMMAND"), found, rows)


def _tell(result: Result, nothing: str) -> None:
    """Say what was ended, or `nothing` if nothing was found."""
    names = questions.names(result.chosen)
    for host, by_job in result.done.items():
        for mark, report in by_job.items():
            count = formats.number_of(len(report["ended"]), "process")
            ended = [f"ended {count}" if report["ended"] else "nothing had to be ended"]
            if not mark:
                ended = [f"ended pid {pid} ({command})" for pid, command in report["ended"]]
            left = [f"pid {pid} ({command}) did not end" for pid, command in report["left"]]
            before = f"{host}: {names.get(mark, mark)}: " if mark else f"{host}: "
            print_out("".join(f"{before}{line}\n" for line in (*ended, *left)))
    tell_problems(result.problems)
    if not result.chosen:
        print_out(f"{nothing}\n")
    elif result.is_dry:
        print_out("nothing was ended (--dry-run)\n")


def _rows_as_json(result: Result) -> list[dict[str, Any]]:
    def more(job: HostJob) -> dict[str, Any]:
        done = result.done.get(job.host, {}).get(job.mark, {"ended": [], "left": []})
        return {"processes": [asdict(row) for row in job.processes], **done}

    return hosts_as_json({**result.found, **result.problems}, result.chosen, more)


# ---------------------------------------------------------------------- processes by their command lines


def _by_match(options: Mapping[str, Any]) -> int:
    """End my processes that match on the hosts that the options name, else on this machine; return the exit code."""
    _, backend, hosts = hosts_of(options, {})
    grace_s = Limits().grace_s if options["grace"] is None else options["grace"]
    asked = {"regex": options["match"], "kill": False, "spare": _spared()}

    def look(fleet: Fleet) -> tuple[Found, Sequence[HostJob]]:
        found = fleet.ask("match", asked, SURVEY_S)
        answers = {host: each.value["found"] for host, each in found.items() if isinstance(each, HostAnswer)}
        none = facts.AGENT_NONE
        chosen = [HostJob(host, "", none, none, questions.processes(each)) for host, each in answers.items() if each]
        if not options["as_json"]:
            rows = {
                each.host: [(str(row.pid), formats.age(row.age_s), row.command) for row in each.processes]
                for each in chosen
            }
            _print_table(("HOST", "PID", "AGE", "COMMAND"), found, rows)
        return found, chosen

    def end(fleet: Fleet, chosen: Sequence[HostJob]) -> Found:
        # Exactly what was shown: something else may match by now.
        only = {each.host: [[row.pid, row.start] for row in each.processes] for each in chosen}
        more = {**asked, "kill": True, "grace_s": grace_s}
        found = fleet.ask("match", lambda host: {**more, "only": only[host]}, grace_s + SLACK_S, list(only))
        return {
            host: HostAnswer({"": each.value}) if isinstance(each, HostAnswer) else each for host, each in found.items()
        }

    result = _swept(backend, hosts, options, look, end)
    if not options["as_json"]:
        _tell(result, f"nothing matches {options['match']!r}")
        return result.code
    problems, chosen = result.problems, {each.host: each.processes for each in result.chosen}
    told = [
        {
            "host": host,
            "problem": asdict(problems[host]) if host in problems else None,
            "found": [asdict(row) for row in chosen.get(host, ())],
            **{name: result.done.get(host, {"": {}})[""].get(name, []) for name in ("ended", "left")},
        }
        for host in result.found
    ]
    print_json(SCHEMA, dry_run=result.is_dry, exit_code=result.code, hosts=told)
    return result.code


def _spared() -> list[list[Any]]:
    """Return this process and those above it: one of the hosts may be this machine."""
    pids = {os.getpid(), *process.ancestors(os.getpid())}
    return [list(row.identity) for row in process.table(pids)]


# ---------------------------------------------------------------------- answers and output


def _print_table(headings: Sequence[str], found: Found, rows: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Print the rows of each host, and why a host did not answer; nothing without either."""
    cells: list[Sequence[str]] = []
    for host, each in found.items():
        if isinstance(each, Problem):
            cells.append((host, *[""] * (len(headings) - 2), "cannot be asked: " + each.text))
        cells += [(host, *row) for row in rows.get(host, ())]
    _print_cells(headings, cells)


def _print_cells(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    if cells:
        from distrun.dashboard.rows import of_texts

        print_out(styled(of_texts(headings, cells, width())))


# `distrun gc`: removes the folders of jobs that are over.


GC_SCHEMA = "distrun.gc/1"


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    found = None if value is None else formats.seconds_of(value)
    if value is not None and found is None:
        raise UsageError(f"--older-than: expected a time such as 30d, 12h or 90m, found {value!r}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[JOB]...", nargs=-1)
@click.option(
    "--older-than", callback=_age, metavar="TIME", help="Only jobs that ended longer ago (12h, 7d). [default: 30d]"
)
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

    A job that runs, or may still run on a host, is never removed. A lost job is removed only with --lost, a damaged one
    only if you name it. Of a job with --run-dir only the link in the job store is removed. If the coordinator of a job
    was on a host, its folder there is removed, too, by ssh. The exit code is 1 if something could not be removed.
    """
    removed, problems = my_jobs().gc(
        names,
        older_s=options["older_than"],
        keep=options["keep"] or 0,
        has_lost=options["lost"],
        is_dry=options["dry_run"],
    )
    code = facts.EXIT_LEFT if problems else 0
    if options["as_json"]:
        size, jobs = sum(each.size for each in removed), [each._asdict() for each in removed]
        print_json(GC_SCHEMA, dry_run=options["dry_run"], exit_code=code, size=size, jobs=jobs, problems=problems)
    else:
        _tell_removed(removed, options["dry_run"])
        for problem in problems:
            print_err(f"distrun: error: {problem}\n")
    return code


def _tell_removed(removed: Sequence[RemovedJob], dry_run: bool) -> None:
    done = [each for each in removed if not each.problem]
    for each in done:
        kept = f"; its folder stays: {each.kept}" if each.kept else ""
        what = "only the link to it" if each.kept else formats.size(each.size)
        there = f"; also its folder on {each.host}" if each.host else ""
        print_out(f"{each.job}: {each.state}, {what}{there}{kept}\n")
    if not done:
        print_out("there is nothing to remove\n" if not removed else "")
        return
    verb = "would be removed (--dry-run)" if dry_run else "removed"
    print_out(f"{formats.number_of(len(done), 'job')} {verb}, {formats.size(sum(each.size for each in done))}\n")
