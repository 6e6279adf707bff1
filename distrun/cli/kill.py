"""`distrun kill`: stop a job from any terminal."""

from __future__ import annotations

import sys

import click

from distrun.backends.base import STAYED
from distrun.cli.console import print_out
from distrun.errors import UsageError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask before several jobs are stopped.")
@click.option("--grace", type=click.FloatRange(min=0), metavar="S", help="Seconds before killing. [default: the job's]")
def kill(jobs: tuple[str, ...], yes: bool, grace: float | None) -> int:
    """Stop JOB (an id, the beginning of one, or a name) and everything that it started.

    Jobs that run come before jobs that are over. Its launcher is asked to stop it. If the launcher is gone, what is
    left of the job is found by what was recorded of it, never by the names of programs. The exit code is 1 if a
    process would not end.
    """
    from distrun import driver
    from distrun_runtime.coordinator.jobstore import JobStore

    store = JobStore()
    folders = list(dict.fromkeys(store.find_living(job) for job in jobs))
    if len(folders) > 1 and not yes:
        if not sys.stdin.isatty():
            raise UsageError("several jobs are stopped only with -y where nobody can be asked")
        click.confirm("Stop %s?" % ", ".join(folder.id for folder in folders), abort=True, err=True)
    code = 0
    for folder in folders:
        for line in driver.kill(folder, grace):
            print_out("%s: %s\n" % (folder.id, line))
            if line.endswith(STAYED):
                code = 1
    return code
