"""`distrun kill -H hosts` and `--stale`: my jobs on many hosts, found by their agents' records and marks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from distrun import backends
from distrun.cli import tables
from distrun.cli.consent import SCHEMA, agree, exit_code, tell_problems
from distrun.cli.console import print_out
from distrun.cli.reach import hosts_of, tell_warnings
from distrun.fleet import Answer, Fleet, Problem, jobs
from distrun.fleet.jobs import HostJob
from distrun_runtime.contract.plan import Limits

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobstore import JobFolder

SURVEY_S = 30.0
SLACK_S = 20.0
"""What ending a job may take beyond twice its grace time."""
HEADINGS = ("HOST", "JOB", "AGENT", "TASK", "PID", "AGE", "COMMAND")

Found = Mapping[str, Answer | Problem]


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
        every = [*self.found.items(), *self.swept.items()]
        return {name: each for name, each in every if isinstance(each, Problem)}

    @property
    def done(self) -> dict[str, Any]:
        """What hosts say of what they ended, by job."""
        return {name: each.value for name, each in self.swept.items() if isinstance(each, Answer)}

    @property
    def code(self) -> int:
        """The exit code."""
        left = any(report["left"] for by_job in self.done.values() for report in by_job.values())
        return exit_code(left, self.problems)


def on_hosts(wanted: Sequence[str], options: Mapping[str, Any]) -> int:
    """End my jobs on the hosts that the options name, on this machine if they name none; return the exit code."""
    # Hosts of the environment are where jobs are launched, not where things are killed: that has to be said.
    inventory, backend, hosts = hosts_of(options, {})
    tell_warnings(inventory)
    grace_s: float | None = options["grace"]
    with Fleet(backend, hosts) as fleet:
        found = fleet.ask("survey", {}, SURVEY_S)
        chosen = _choose(found, wanted, options["stale"])
        if not options["as_json"]:
            _show(found, chosen)
        if not chosen or options["dry_run"]:
            return _report(Result(found, chosen, is_dry=options["dry_run"]), options)
        if options["yes"]:
            return _report(Result(found, chosen, _end(fleet, chosen, grace_s)), options)
    count = sum(len(each.processes) for each in chosen)
    agree("End these %d processes?" % count, False, "processes on hosts are ended")
    names = {each.host for each in chosen}
    with Fleet(backend, [host for host in hosts if host.name in names]) as fleet:
        return _report(Result(found, chosen, _end(fleet, chosen, grace_s)), options)


def preview(folders: Sequence[JobFolder], options: Mapping[str, Any]) -> int:
    """Show what is there of jobs that were launched here, on all their hosts; return the exit code."""
    code, told = 0, []
    for folder in folders:
        plan, state = folder.plan(), folder.standing()
        with Fleet(backends.load(plan.backend), plan.hosts) as fleet:
            found = fleet.ask("survey", {}, SURVEY_S)
        chosen = [each for each in _choose(found, (), False) if each.job == plan.job]
        result = Result(found, chosen, is_dry=True)
        code = max(code, result.code)
        told.append({"job": folder.id, "state": state, "hosts": _rows_as_json(result)})
        if not options["as_json"]:
            print_out("%s: %s\n" % (folder.id, state))
            _show(found, chosen)
            _tell(result, "no process of it")
    if options["as_json"]:
        print_out(json.dumps({"schema": SCHEMA, "dry_run": True, "exit_code": code, "jobs": told}, indent=2) + "\n")
    return code


def _choose(found: Found, wanted: Sequence[str], stale: bool) -> list[HostJob]:
    read = [job for name, each in found.items() if isinstance(each, Answer) for job in jobs.read(name, each.value)]
    return jobs.chosen(read, wanted, stale)


def _end(fleet: Fleet, chosen: Sequence[HostJob], grace_s: float | None) -> Found:
    """End them, all hosts at once; return what each host's agent says of each job.

    Without a `grace_s` each job has its own, which its agent has recorded.
    """
    by_host: dict[str, dict[str, float]] = {}
    for each in chosen:
        own_s = Limits().grace_s if each.grace_s is None else each.grace_s
        by_host.setdefault(each.host, {})[each.job] = own_s if grace_s is None else grace_s
    more = {} if grace_s is None else {"grace_s": grace_s}
    return fleet.ask(
        "sweeps",
        lambda host: {"jobs": list(by_host[host]), **more},
        max(sum(2 * each + SLACK_S for each in jobs.values()) for jobs in by_host.values()),
        list(by_host),
    )


def _show(found: Found, chosen: Sequence[HostJob]) -> None:
    rows: list[tuple[str, ...]] = []
    for name, each in found.items():
        if isinstance(each, Problem):
            rows.append((name, "", "", "", "", "", "cannot be asked: " + each.text))
        for job in chosen:
            if job.host == name:
                rows += _rows(job) or [(name, job.job, job.state(), "", "", "", "only its folder is left")]
    if rows:
        print_out(tables.text(HEADINGS, rows))


def _rows(job: HostJob) -> list[tuple[str, ...]]:
    return [
        (job.host, job.job, job.state(), each.task, str(each.pid), jobs.age(each.age_s), jobs.shown(each))
        for each in job.processes
    ]


def _report(result: Result, options: Mapping[str, Any]) -> int:
    """Say what was done, host by host; return the exit code."""
    if options["as_json"]:
        told = {"schema": SCHEMA, "dry_run": result.is_dry, "exit_code": result.code, "hosts": _rows_as_json(result)}
        print_out(json.dumps(told, indent=2) + "\n")
    else:
        _tell(result, "no stale job" if options["stale"] else "no job of mine")
    return result.code


def _tell(result: Result, nothing: str) -> None:
    for host, by_job in result.done.items():
        for job, report in by_job.items():
            ended = "ended %s" % _processes(len(report["ended"])) if report["ended"] else "nothing had to be ended"
            print_out("%s: %s: %s\n" % (host, job, ended))
            for pid, command in report["left"]:
                print_out("%s: %s: pid %d (%s) did not end\n" % (host, job, pid, command))
    tell_problems(result.problems)
    if not result.chosen:
        where = "there"
        if result.problems:
            where = "on the other hosts" if len(result.problems) < len(result.found) else "known of"
        print_out("%s is %s\n" % (nothing, where))
    elif result.is_dry:
        print_out("nothing was ended (--dry-run)\n")


def _rows_as_json(result: Result) -> list[dict[str, Any]]:
    rows = []
    for name in result.found:
        problem = result.problems.get(name)
        mine = [
            {
                "job": each.job,
                "agent": each.agent,
                "guard": each.guard,
                "stale": each.is_stale,
                "processes": [asdict(row) for row in each.processes],
                **result.done.get(name, {}).get(each.job, {"ended": [], "left": []}),
            }
            for each in result.chosen
            if each.host == name
        ]
        rows.append({"host": name, "problem": None if problem is None else asdict(problem), "jobs": mine})
    return rows


def _processes(count: int) -> str:
    return "%d process%s" % (count, "" if count == 1 else "es")
