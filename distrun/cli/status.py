"""`distrun status` and `distrun top`: all jobs of the user, or one in detail, as text, as JSON, or live.

Jobs come from this machine's job store or, with -H, from the agents of hosts, wherever the jobs were launched. All
queries have a time limit: what does not answer in time is shown as unknown.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import hosts_as_json, hosts_of, my_jobs, survey, takes, tell_problems
from distrun.cli.console import (
    can_draw,
    has_symbols,
    is_read,
    print_err,
    print_json,
    print_out,
    styled,
    wants_colour,
    width,
)
from distrun.errors import UsageError
from distrun.options import HOSTS, LABELS
from distrun_runtime.contract import environ, facts
from distrun_runtime.contract.dataclass import rfc3339
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.dashboard.source import FrameSource
    from distrun.dashboard.terminal import Appearance
    from distrun.jobs import Job, Jobs, JobView
    from distrun_runtime.contract import session
    from distrun_runtime.coordinator.failures import Outcome


SCHEMA = "distrun.status/1"
SHOWN = 20
"""Jobs that are over and listed without --all."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it live (also: distrun top). q leaves, ? shows the keys.")
@click.option("--plain", is_flag=True, help="With -w: print a line for each change, until the job is over.")
@click.option("--ascii", "is_ascii", is_flag=True, help="With -w: draw with ASCII characters only.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help=f"List all jobs, not only the {SHOWN} newest that are over."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line for each change.")
@click.option("-o", "--output", type=click.Choice(["json", "name"]), help="As --json, or the ids only, one a line.")
@takes(LABELS, *HOSTS)
def status(
    job: str | None,
    *,
    watch: bool = False,
    plain: bool = False,
    is_ascii: bool = False,
    everything: bool = False,
    as_json: bool = False,
    output: str | None = None,
    labels: tuple[str, ...] = (),
    **options: Any,
) -> int:
    """Show my jobs: those that run, then the newest others; or JOB (an id, the beginning of one, or a name) in detail.

    \b
    Examples:
      distrun status
      distrun status calm-otter
      distrun status calm-otter -w
      distrun status -l team=vision -o name
      distrun status --json | jq -r '.jobs[] | select(.state == "running") | .id'
      distrun status -H hosts          # what of mine is on these hosts, launched from any machine

    With JOB the exit code is 1 if it failed, was killed, lost or is unknown, 2 if its files cannot be read, else 0.
    With -H it is 3 if a host cannot be asked. Hosts of coordinators are asked by ssh, which asks you nothing; what does
    not answer within 2 s is unknown.
    """
    if (plain or is_ascii) and not watch:
        raise UsageError("--plain and --ascii say how -w shows a job", "add -w")
    as_json = as_json or output == "json"
    is_elsewhere = options.get("hostfile") is not None or options.get("hosts") is not None
    if (labels or output == "name") and (watch or is_elsewhere or (labels and job is not None)):
        raise UsageError("-l and -o name are for the list of jobs of this machine", "leave -w, -H and JOB out")
    if is_elsewhere:
        if watch:
            raise UsageError("-w/--watch shows jobs of this machine only", "leave it out, or leave -H out")
        return _on_hosts(job, as_json, options)
    jobs = my_jobs()
    most = None if everything else SHOWN
    if output == "name":
        print_out("".join(f"{each.id}\n" for each in ([jobs.get(job)] if job else jobs.list(most, labels=labels))))
        return 0
    watched = _watched(jobs, job, most, plain, is_ascii) if watch and not as_json else None
    if watched is not None:
        return watched
    if job is None:
        return _list(jobs, most, watch, as_json, labels)
    found = jobs.get(job)
    if watch and as_json:
        return follow_job(found)
    return _one(found, as_json)


def _watched(jobs: Jobs, job: str | None, most: int | None, plain: bool, is_ascii: bool) -> int | None:
    """Show a job, or all, live; return the exit code. None: nothing can be drawn, so it is shown once."""
    if not plain and not (sys.stdin.isatty() and can_draw(1, environ.snapshot())):
        return None
    found = jobs.get(job) if job is not None else None
    if found is None:
        going = [each for each in jobs.list() if each.folder.standing() in facts.GOING]
        found = going[0] if len(going) == 1 else None
        if found is None and plain:
            return None
    import shutil  # not for every status: bz2, lzma and the like take a while

    from distrun.cli import tables
    from distrun.dashboard import jobs as table
    from distrun.dashboard import loop

    if found is not None:
        ended = loop.follow(found.folder, print_out) if plain else loop.watch(found.folder, look(is_ascii))
    else:
        known = table.Background(lambda: [each.folder for each in jobs.list(most)])
        ended = table.watch(
            lambda: [tables.model_of(each, time.time()) for each in known.views()],
            lambda wanted: jobs.get(wanted).folder,
            look(is_ascii),
        )
    if ended.signal is not None:
        return facts.exit_code(None, ended.signal.name)
    if found is None:
        _list(jobs, most, watch=False, as_json=False)
    elif not plain:
        view = found.view()
        room = max(1, shutil.get_terminal_size().lines - 4)  # with a heading, and a prompt below
        print_out(tables.heading(view.state) + styled(tables.tasks_table(view, time.time(), width(), room)))
    return ended.exit_code


def look(is_ascii: bool) -> Appearance:
    """Return how to draw on this terminal: by `--ascii`, the locale, NO_COLOR and the like."""
    from distrun.dashboard.terminal import Appearance

    env = environ.snapshot()
    return Appearance(has_colour=wants_colour(1, env), is_ascii=is_ascii or not has_symbols(env))


# ---------------------------------------------------------------------- my jobs


def _list(jobs: Jobs, most: int | None, watch: bool, as_json: bool, labels: Sequence[str] = ()) -> int:
    """Show the jobs of the store, `most` of those that are over; return the exit code."""
    if watch and as_json:
        return follow_jobs(jobs, most)
    views, now = jobs.views(most, labels), time.time()
    if as_json:
        print_json(SCHEMA, time=rfc3339(now), jobs=[view_as_json(each, now) for each in views])
        return 0
    from distrun.cli.tables import jobs_table

    print_out(styled(jobs_table(views, now, width())))
    _tell_unasked(views)
    return 0


def _tell_unasked(views: Sequence[JobView]) -> None:
    """Say, once for each host, why coordinators could not be asked."""

    told = {each.problem: each.fix for each in views if each.problem}
    if told:
        from distrun.dashboard.text import clean_lines
    for problem, fix in told.items():
        print_err(f"distrun: warning: {clean_lines(problem)}\n")  # the host's ssh may have said it
        if fix:
            print_err(f"distrun: hint: try: {fix}\n")


def view_as_json(view: JobView, now: float) -> dict[str, Any]:
    """Return a job as one of a list: its state, where its coordinator is, its progress. `now`: wall clock, seconds."""
    return {**view.state, **_standing(view, now), "progress": view.progress}


def _standing(view: JobView, now: float) -> dict[str, Any]:
    return {
        "coordinator": {"host": view.host or None, "here": view.is_here},
        "seen": None if view.seen_s is None else rfc3339(now - view.seen_s),
        "problem": view.problem,
    }


# ---------------------------------------------------------------------- one job


def _one(job: Job, as_json: bool) -> int:
    """Show one job in detail; return the exit code.

    Raises:
        JobStoreError: it is damaged.
    """
    from distrun.cli import tables
    from distrun.dashboard.model import exit_code
    from distrun.dashboard.text import ASCII, UNICODE

    view = job.view()
    now = time.time()
    if as_json:
        metrics = view.metrics and {name: each for name, each in view.metrics.items() if name != "reports"}
        more = {"metrics": metrics, "reports": view.reports, "events": list(view.events)}
        more["error"] = tables.error_as_json(view)
        print_json(SCHEMA, time=rfc3339(now), job=view.state, **_standing(view, now), **more)
    else:
        print_out(tables.text(view, now, width(), UNICODE if has_symbols(environ.snapshot()) else ASCII))
    _tell_unasked([view])
    return exit_code(str(view.state["state"]))


# ---------------------------------------------------------------------- jobs on hosts


def _on_hosts(wanted: str | None, as_json: bool, options: Mapping[str, Any]) -> int:
    """Show my jobs on hosts; return the exit code."""
    from distrun.fleet import Fleet
    from distrun_runtime.coordinator.failures import Problem

    _, backend, hosts = hosts_of(options, {})
    with Fleet(backend, hosts) as fleet:
        answers, found = survey(fleet, [wanted] if wanted is not None else ())
    problems = {host: each for host, each in answers.items() if isinstance(each, Problem)}
    code = facts.EXIT_PREFLIGHT if problems else 0
    if as_json:
        rows = hosts_as_json(
            answers, found, lambda job: {name: getattr(job, name) for name in ("age_s", "quiet_s", "lease_s", "tasks")}
        )
        print_json(SCHEMA, time=rfc3339(time.time()), exit_code=code, hosts=rows)
        return code
    if found:
        from distrun.cli.tables import hosts_table

        print_out(styled(hosts_table(found, width(), problems)))
    elif len(problems) < len(answers):
        print_out("no job of mine is there\n" if not problems else "no job of mine is on the other hosts\n")
    tell_problems(problems, "cannot be asked: ")
    return code


# `distrun top`, the same as `distrun status -w`.


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("--plain", is_flag=True, help="Print a line for each change, until the job is over.")
@click.option("--ascii", "is_ascii", is_flag=True, help="Draw with ASCII characters only.")
@click.pass_context
def top(ctx: click.Context, job: str | None, plain: bool, is_ascii: bool) -> int:
    """Show JOB live: progress, tasks, hosts, store, events; without JOB the one of mine that runs, or a table of jobs.

    The same as `distrun status -w`. Keys: q leaves, ? shows the others. The exit code is that of `distrun status`.
    """

    given = {"watch": True, "plain": plain, "is_ascii": is_ascii}
    code: int = ctx.invoke(status, job=job, **given)
    return code


# `distrun status --watch --json`: prints a JSON object a line for each change of a job, or of the list of jobs.
#
# A watch begins with a `snapshot`. An `update` line has what is new: the state, the metrics, an event. `gap` means that
# something was missed; the next state is complete. `end` has the outcome. If the reader closes its end, the watch ends
# silently.


WATCH_SCHEMA = "distrun.watch/1"
POLL_S = 1.0
"""Interval of polls for what no connection reports; also how soon a closed stdout is noticed."""
THERE_S = 5.0
"""The same where a look takes an ssh connection."""
STATEFUL = ("ready", "started", "exited", "published", "state", "lost", "finished", "failed")
"""Events after which the state may be another."""


class Closed(Exception):
    """The reader of stdout has closed its end."""


def _write(kind: str, job: str = "", /, **members: Any) -> None:
    """Write a line of type `kind`, about a job if one is named, at once.

    Raises:
        Closed: stdout is closed.
    """
    who = {"job": job} if job else {}
    value = {"schema": WATCH_SCHEMA, "type": kind, "time": rfc3339(time.time()), **who, **members}
    if not print_out(json.dumps(value) + "\n"):
        raise Closed


def _pause(seconds: float) -> None:
    """Wait. Raises Closed as soon as the reader has closed its end."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, POLL_S))
        _check()


def _check() -> None:
    """Raise Closed if the reader has closed its end."""
    if not is_read():
        raise Closed


# ---------------------------------------------------------------------- the list of jobs


def follow_jobs(jobs: Jobs, most: int | None) -> int:
    """Write how the list of jobs changes, until the reader closes its end; return the exit code."""
    shown: dict[str, dict[str, Any]] | None = None
    try:
        while True:
            views = jobs.views(most)
            now = {view.id: view_as_json(view, time.time()) for view in views}
            if shown is None:
                _write("snapshot", jobs=list(now.values()))
                shown = now
            for job, value in now.items():
                if _lasting(value) != _lasting(shown.get(job, {})):
                    _write("update", job, state=value)
            for job in shown.keys() - now.keys():
                _write("update", job, state=None)
            shown = now
            _pause(POLL_S if all(view.is_here for view in views) else THERE_S)
    except Closed:
        return 0


def _lasting(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts as a change."""
    return {name: each for name, each in value.items() if name not in ("seen", "updated", "heard")}


# ---------------------------------------------------------------------- one job


def follow_job(job: Job) -> int:
    """Write how a job changes, until it is over or the reader closes its end; return the exit code."""
    from distrun.dashboard.model import exit_code

    watch = _JobFollower(job)
    try:
        outcome = watch.run()
    except Closed:
        return 0
    if outcome is not None:
        return exit_code(outcome.job_state)
    return exit_code(str(watch.state["state"])) or int(watch.has_failed)


class _JobFollower:
    """Follows one job by the frames that a dashboard gets, too."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._view = job.view()
        self._was_connected = False
        self._is_asked = False
        """A state is on its way."""
        self._has_gap = False
        """Something was missed, and no state has been told since."""
        self.state = self._view.state
        self.has_failed = False
        """Its coordinator has failed, so that it has no outcome."""

    def run(self) -> Outcome | None:
        """Write all lines; return the outcome, None if there is none.

        Raises:
            Closed: stdout is closed.
        """
        from distrun import client
        from distrun.dashboard.source import FrameSource

        view = self._view
        shown = view_as_json(view, time.time())
        _write("snapshot", view.id, state=shown, metrics=view.metrics, events=list(view.events))
        if view.is_going:
            source = FrameSource(self._job.folder)
            source.start(None, has_events=False)
            with contextlib.closing(source):
                while self.state["state"] in facts.GOING:
                    if not select.select([source.wakeup], [], [], POLL_S)[0]:
                        _check()
                    for frame in source.take():
                        if frame.type in ("outcome", "failed"):
                            return self._end(frame)
                        with client.reading():
                            self._take(frame, source)
        return self._end(None)

    def _take(self, frame: session.Frame, source: FrameSource) -> None:
        header = frame.header
        if frame.type == "state":
            self._is_asked = self._is_asked and bool(header.get("missed"))
            if header.get("missed"):
                _write("gap", self._view.id, missed=header["missed"])
            self._tell(header["state"], self._has_gap or bool(header.get("missed")))
            self._has_gap = False
        elif frame.type == "event":
            _write("update", self._view.id, event=header["event"])
            if header["event"].get("event") in STATEFUL and not self._is_asked:
                self._is_asked = source.send("state")
        elif frame.type == "metrics":
            _write("update", self._view.id, metrics=header["metrics"])
        elif frame.type == "link" and header["why"]:
            from distrun import jobs

            (self._view,) = jobs.look([self._job.folder])
            self._tell(self._view.state)
        elif frame.type == "link":
            if self._was_connected:
                _write("gap", self._view.id, missed=None)
            self._has_gap, self._was_connected, self._is_asked = self._was_connected, True, True
        elif frame.type == "failed_here":
            raise RuntimeError(header["error"])

    def _tell(self, state: Mapping[str, Any], is_wanted: bool = False) -> None:
        """Write the state if it has changed, or is wanted in any case."""
        if not is_wanted and _lasting(state) == _lasting(self.state):
            return
        self.state = state
        told = replace(self._view, state=state, seen_s=None, problem="", fix="")  # by its coordinator, just now
        shown = view_as_json(told, time.time())
        _write("update", self._view.id, state=shown)

    def _end(self, told: session.Frame | None) -> Outcome | None:
        """Write the last line; return the outcome, None if there is none."""
        from distrun import client
        from distrun_runtime.coordinator import failures

        outcome, value, error = None, None, None
        if told is not None and told.type == "outcome":
            with client.reading():
                outcome = failures.from_json(told.header["outcome"])
            assert outcome is not None
            value = self._job.folder.outcome_json(outcome)
            if self.state["state"] in facts.GOING:  # the coordinator may end before it answers for the last state
                self._tell(failures.ended(self.state, value, rfc3339(time.time())))
        elif told is not None:
            self.has_failed = True
            error = {"message": told.header["message"], "hint": told.header["hint"]}
        else:
            try:
                value = self._job.folder.outcome()
            except JobStoreError as err:
                error = {"message": str(err), "hint": ""}
        _write("end", self._view.id, outcome=value, error=error)
        return outcome
