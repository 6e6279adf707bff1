"""`distrun kill --match REGEX --any-process`: the explicit old way, by command lines. Own user only, shown first."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from distrun.cli import tables
from distrun.cli.consent import SCHEMA, agree, exit_code, tell_problems
from distrun.cli.console import print_out
from distrun.cli.killhosts import SLACK_S, SURVEY_S, Found
from distrun.cli.reach import hosts_of, tell_warnings
from distrun.fleet import Answer, Fleet, Problem, jobs
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Limits

HEADINGS = ("HOST", "PID", "AGE", "COMMAND")


def by_match(options: Mapping[str, Any]) -> int:
    """End what matches on the hosts that the options name, on this machine if they name none; return the exit code."""
    inventory, backend, hosts = hosts_of(options, {})
    tell_warnings(inventory)
    grace_s = Limits().grace_s if options["grace"] is None else options["grace"]
    asked = {"regex": options["match"], "kill": False, "spare": spared()}
    with Fleet(backend, hosts) as fleet:
        found = fleet.ask("match", asked, SURVEY_S)
    chosen = {
        name: jobs.processes(each.value["found"])
        for name, each in found.items()
        if isinstance(each, Answer) and each.value["found"]
    }
    if not options["as_json"]:
        _show(found, chosen)
    if not chosen or options["dry_run"]:
        return _report(found, chosen, {}, options)
    count = sum(map(len, chosen.values()))
    agree("End these %d processes?" % count, options["yes"], "processes are ended by their command line")
    only = {name: [[each.pid, each.start] for each in rows] for name, rows in chosen.items()}
    with Fleet(backend, [host for host in hosts if host.name in chosen]) as fleet:
        swept = fleet.ask(
            "match",
            # Exactly what was shown: something else may match by now.
            lambda host: {**asked, "kill": True, "grace_s": grace_s, "only": only[host]},
            grace_s + SLACK_S,
        )
    return _report(found, chosen, swept, options)


def spared() -> list[list[Any]]:
    """Return this process and those above it: one of the hosts may be this machine."""
    pids = {os.getpid(), *process.ancestors(os.getpid())}
    return [list(row.identity) for row in process.table(pids)]


def _show(found: Found, chosen: Mapping[str, Sequence[jobs.Process]]) -> None:
    rows = []
    for name, each in found.items():
        if isinstance(each, Problem):
            rows.append((name, "", "", "cannot be asked: " + each.text))
        rows += [(name, str(row.pid), jobs.age(row.age_s), row.command) for row in chosen.get(name, ())]
    if rows:
        print_out(tables.text(HEADINGS, rows))


def _report(
    found: Found, chosen: Mapping[str, Sequence[jobs.Process]], swept: Found, options: Mapping[str, Any]
) -> int:
    problems = {name: each for each_of in (found, swept) for name, each in each_of.items() if isinstance(each, Problem)}
    done = {name: each.value for name, each in swept.items() if isinstance(each, Answer)}
    code = exit_code(any(report["left"] for report in done.values()), problems)
    if options["as_json"]:
        rows = [
            {
                "host": name,
                "problem": asdict(problems[name]) if name in problems else None,
                "found": [asdict(row) for row in chosen.get(name, ())],
                "ended": done.get(name, {}).get("ended", []),
                "left": done.get(name, {}).get("left", []),
            }
            for name in found
        ]
        told = {"schema": SCHEMA, "dry_run": options["dry_run"], "exit_code": code, "hosts": rows}
        print_out(json.dumps(told, indent=2) + "\n")
        return code
    for name, report in done.items():
        for pid, command in report["ended"]:
            print_out("%s: ended pid %d (%s)\n" % (name, pid, command))
        for pid, command in report["left"]:
            print_out("%s: pid %d (%s) did not end\n" % (name, pid, command))
    tell_problems(problems)
    if not chosen:
        print_out("nothing matches %r\n" % options["match"])
    elif options["dry_run"]:
        print_out("nothing was ended (--dry-run)\n")
    return code
