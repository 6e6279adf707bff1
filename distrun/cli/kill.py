"""`distrun kill`: stop a job from any terminal; end what jobs left on hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from distrun.cli.consent import SCHEMA, agree
from distrun.cli.console import print_out
from distrun.cli.reach import host_options
from distrun.cli.values import seconds
from distrun.errors import UsageError
from distrun_runtime.contract import facts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@host_options
@click.option("--stale", is_flag=True, help="Only abandoned jobs: agent dead, stopped, or past its lease.")
@click.option("--dry-run", is_flag=True, help="Show what would be ended, and end nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@seconds("--grace", low=0, help="Seconds before killing. [default: the job's]")
@click.option("--match", metavar="REGEX", help="With --any-process: end my processes with such a command line.")
@click.option("--any-process", is_flag=True, help="With --match: also processes that no job started. Check the list!")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def kill(jobs: tuple[str, ...], **options: Any) -> int:
    """Stop JOB (an id, the beginning of one, or a name) and everything that it started.

    \b
    Examples:
      distrun kill calm-otter                 # a job that was launched here, on all its hosts
      distrun kill -H hosts                   # all my jobs on these hosts
      distrun kill -H hosts --stale -y        # what dead launchers left there
      distrun kill --stale --dry-run          # on this machine

    A running job is preferred to one that has ended. distrun asks the job's launcher to stop it. If the launcher is
    gone, distrun finds the job's processes by what was recorded of them, never by program names, and never another
    user's. They get SIGTERM, and SIGKILL after the grace time. The exit code is 1 if a process did not end, 3 if a host
    cannot be reached.
    """
    is_elsewhere = options["hostfile"] is not None or options["hosts"] is not None
    if bool(options["match"]) != options["any_process"]:
        raise UsageError(
            "--match and --any-process go together: they may end what no job of distrun started",
            "without both, distrun kill ends only what distrun has started",
        )
    if options["match"]:
        if jobs or options["stale"]:
            raise UsageError("--match takes neither a JOB nor --stale")
        from distrun.cli import killmatch

        return killmatch.by_match(options)
    if is_elsewhere or options["stale"]:
        from distrun.cli import killhosts

        return killhosts.on_hosts(jobs, options)
    if not jobs:
        raise UsageError("which job?", "distrun status lists the jobs; -H FILE means all of mine on these hosts")
    return _by_name(jobs, options)


def _by_name(jobs: tuple[str, ...], options: Mapping[str, Any]) -> int:
    from distrun import ending
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    folders = list(dict.fromkeys(store.find_living(job) for job in jobs))
    if options["dry_run"]:
        from distrun.cli import killhosts

        return killhosts.preview(folders, options)
    if len(folders) > 1:
        agree("Stop %s?" % ", ".join(folder.id for folder in folders), options["yes"], "several jobs are stopped")
    code = 0
    told = []
    for folder in folders:
        killed = ending.kill(folder, options["grace"])
        code = facts.EXIT_LEFT if killed.left else code or (facts.EXIT_PREFLIGHT if killed.unasked else 0)
        told.append({"job": folder.id, "done": killed.lines, "left": killed.left, "unasked": killed.unasked})
        if not options["as_json"]:
            print_out("".join("%s: %s\n" % (folder.id, line) for line in killed.lines))
    if options["as_json"]:
        print_out(json.dumps({"schema": SCHEMA, "exit_code": code, "jobs": told}, indent=2) + "\n")
    return code
