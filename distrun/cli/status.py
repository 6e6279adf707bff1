"""`distrun status`: all jobs of the user, or one job in detail, as text or JSON.

Jobs come from this machine's job store or, with -H, from the agents of hosts, wherever the jobs were launched. All
queries have a time limit: what does not answer in time is shown as unknown.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import found_job
from distrun.cli.console import print_err, print_out, render, width
from distrun.cli.reach import host_options, hosts_of, tell_warnings
from distrun.cli.statustables import heading, hosts_table, jobs_table, tasks_table
from distrun.dashboard.text import clean_lines
from distrun.errors import UsageError
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.jobfolder import rfc3339

if TYPE_CHECKING:
    from collections.abc import Sequence

    from distrun.fleet import Problem
    from distrun.fleet.jobs import HostJob
    from distrun.jobviews import JobView
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.jobstore import JobStore

SCHEMA = "distrun.status/1"
SHOWN = 20
"""Jobs that are over and listed without --all."""
SURVEY_S = 30.0
"""How long a host may take to say which jobs it has."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.option("-w", "--watch", is_flag=True, help="Show it live (also: distrun top). q leaves, ? shows the keys.")
@click.option("--plain", is_flag=True, help="With -w: print a line for each change, until the job is over.")
@click.option("--ascii", "is_ascii", is_flag=True, help="With -w: draw with ASCII characters only.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help=f"List all jobs, not only the {SHOWN} newest that are over."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object; with --watch one a line for each change.")
@host_options
def status(
    job: str | None,
    *,
    watch: bool = False,
    plain: bool = False,
    is_ascii: bool = False,
    everything: bool = False,
    as_json: bool = False,
    **options: Any,
) -> int:
    """Show my jobs: those that run, then the newest others; or JOB (an id, the beginning of one, or a name) in detail.

    \b
    Examples:
      distrun status
      distrun status calm-otter
      distrun status calm-otter -w
      distrun status --json | jq -r '.jobs[] | select(.state == "running") | .id'
      distrun status -H hosts          # what of mine is on these hosts, launched from any machine

    With JOB the exit code is 1 if it failed, was killed, lost or is unknown, 2 if its files cannot be read, else 0.
    With -H it is 3 if a host cannot be asked. Hosts of coordinators are asked by ssh, which asks you nothing; what does
    not answer within 2 s is unknown.
    """
    if (plain or is_ascii) and not watch:
        raise UsageError("--plain and --ascii say how -w shows a job", "add -w")
    if options.get("hostfile") is not None or options.get("hosts") is not None:
        if watch:
            raise UsageError("-w/--watch shows jobs of this machine only", "leave it out, or leave -H out")
        return _on_hosts(job, as_json, options)
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    watched = _watched(store, job, everything, plain, is_ascii) if watch and not as_json else None
    if watched is not None:
        return watched
    if job is None:
        return _list(store, watch, everything, as_json)
    folder = found_job(store, job)
    if watch and as_json:
        from distrun.cli import watchlines

        return watchlines.job(_looked(folder), view_as_json, exit_code)
    return _one(folder, as_json)


def exit_code(state: Mapping[str, Any]) -> int:
    """Return the exit code that says how a job stands: 0 if it runs or succeeded."""
    from distrun.dashboard import model

    return model.exit_code(str(state["state"]))


def _watched(store: JobStore, job: str | None, everything: bool, plain: bool, is_ascii: bool) -> int | None:
    """Show a job, or all, live; return the exit code. None: nothing can be drawn, so it is shown once."""
    from distrun.cli import top

    if not plain and not top.is_drawn(plain):
        return None
    folder = found_job(store, job) if job is not None else top.only_running(store)
    if folder is not None:
        ended = top.watch_one(folder, plain, is_ascii)
        if ended.signal is None and not plain:
            state = _looked(folder).state
            print_out(heading(state) + render(tasks_table(state, time.time(), width())))
        return top.code_of(ended)
    if plain:
        return None
    from distrun import jobviews

    known = jobviews.Background(lambda: jobviews.listed(store.list(), None if everything else SHOWN))
    ended = top.watch_all(store, known.states, is_ascii)
    if ended.signal is None:
        _list(store, False, everything, False)
    return top.code_of(ended)


# ---------------------------------------------------------------------- my jobs


def _list(store: JobStore, watch: bool, everything: bool, as_json: bool) -> int:
    """Show the jobs of the store; return the exit code."""
    from distrun import jobviews

    def read() -> list[JobView]:
        return jobviews.look(jobviews.listed(store.list(), None if everything else SHOWN))

    def table(views: Sequence[JobView]) -> Any:
        return jobs_table([each.state for each in views], time.time(), width(), {each.id: each for each in views})

    if watch and as_json:
        from distrun.cli import watchlines

        return watchlines.jobs(read, view_as_json)
    if as_json:
        now = time.time()
        jobs = [view_as_json(each, now) for each in read()]
        print_out(json.dumps({"schema": SCHEMA, "time": rfc3339(now), "jobs": jobs}, indent=2) + "\n")
    else:
        views = read()
        print_out(render(table(views)))
        _tell_unasked(views)
    return 0


def _tell_unasked(views: Sequence[JobView]) -> None:
    """Say, once for each host, why coordinators could not be asked."""
    told = {each.problem: each.fix for each in views if each.problem}
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


def _one(folder: JobFolder, as_json: bool) -> int:
    """Show one job in detail; return the exit code.

    Raises:
        JobStoreError: it is damaged.
    """
    from distrun.cli import detail

    view = _looked(folder)
    now = time.time()
    if as_json:
        told = {"schema": SCHEMA, "time": rfc3339(now), "job": view.state, **_standing(view, now)}
        more = {"metrics": view.metrics, "events": list(view.events), "error": detail.error_as_json(view)}
        print_out(json.dumps({**told, **more}, indent=2) + "\n")
    else:
        print_out(detail.text(view, now, width()))
    _tell_unasked([view])
    return exit_code(view.state)


def _looked(folder: JobFolder) -> JobView:
    """Return how a job stands. If it has ended on another host, everything is fetched from there, once."""
    from distrun import elsewhere, jobviews

    (view,) = jobviews.look([folder], with_events=True)
    if view.state["state"] == facts.DAMAGED:
        folder.state()  # raises what is wrong
    if view.state["state"] in facts.OVER and elsewhere.is_elsewhere(folder):
        try:
            elsewhere.refresh(folder, may_ask=False)
        except elsewhere.NotAsked as err:
            print_err(f"distrun: warning: {err}; {err.hint}\n")
        (view,) = jobviews.look([folder], with_events=True)
    return view


# ---------------------------------------------------------------------- jobs on hosts


def _on_hosts(wanted: str | None, as_json: bool, options: Mapping[str, Any]) -> int:
    """Show my jobs on hosts; return the exit code."""
    from distrun.fleet import Fleet, Problem, jobs

    inventory, backend, hosts = hosts_of(options, {})
    tell_warnings(inventory)
    with Fleet(backend, hosts) as fleet:
        answers = fleet.ask("survey", {}, SURVEY_S)
    problems = {host: each for host, each in answers.items() if isinstance(each, Problem)}
    every = [
        job for host, each in answers.items() if not isinstance(each, Problem) for job in jobs.read(host, each.value)
    ]
    found = jobs.chosen(every, [wanted] if wanted is not None else ())
    code = facts.EXIT_PREFLIGHT if problems else 0
    if as_json:
        rows = [_host_as_json(host, problems.get(host), found) for host in answers]
        print_out(
            json.dumps({"schema": SCHEMA, "time": rfc3339(time.time()), "exit_code": code, "hosts": rows}, indent=2)
            + "\n"
        )
        return code
    if found:
        print_out(render(hosts_table(found, width(), problems)))
    elif len(problems) < len(answers):
        print_out("no job of mine is there\n" if not problems else "no job of mine is on the other hosts\n")
    for host, problem in problems.items():
        print_err(f"distrun: error: {host}: cannot be asked: {problem.text}\n")
        for line in problem.fix.splitlines():
            print_err(f"distrun: hint: {line}\n")
    return code


def _host_as_json(host: str, problem: Problem | None, found: Sequence[HostJob]) -> dict[str, Any]:
    from dataclasses import asdict

    mine = [
        {
            **{"job": job.job, "nonce": job.nonce, "agent": job.agent, "guard": job.guard, "stale": job.is_stale},
            **{"age_s": job.age_s, "quiet_s": job.quiet_s, "lease_s": job.lease_s, "tasks": list(job.tasks)},
        }
        for job in found
        if job.host == host
    ]
    return {"host": host, "problem": None if problem is None else asdict(problem), "jobs": mine}
