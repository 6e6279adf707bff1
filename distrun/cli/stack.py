"""`distrun stack`: prints the Python stacks of the tasks of a running job."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from distrun.cli.common import job_and_tasks, my_jobs
from distrun.cli.console import print_err, print_json, print_out
from distrun.dashboard.text import clean_lines
from distrun.errors import DistrunError
from distrun.formats import grouped

SCHEMA = "distrun.stack/1"


class NoStacks(DistrunError):
    """Not one stack could be had."""

    exit_code = 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: a member for each task.")
def stack(job: str | None, tasks: tuple[str, ...], as_json: bool) -> int:
    """Show where JOB's tasks stand: the Python stacks of all their threads. Nothing is stopped.

    Without JOB: of the latest job that runs.

    TASK is a name (worker-0) or a role (server). Without one: all workers. Equal stacks are shown once.

    py-spy is used where a task runs if it is installed there; otherwise a task that uses distrun_runtime writes its own
    stacks. The exit code is 1 if there is no stack at all.
    """
    found, tasks = job_and_tasks(my_jobs(), job, tasks, prefers_living=True)
    answers = found.refresh().stack(*tasks)
    if as_json:
        from distrun_runtime.contract.dataclass import rfc3339

        print_json(SCHEMA, time=rfc3339(time.time()), job=found.id, tasks=answers)
    else:
        for text in shown([answer for answer in answers if answer["text"]]):
            print_out(text + "\n")
    missing = [answer for answer in answers if not answer["text"]]
    for line in [] if as_json else complaints(missing, found.id):
        print_err(line + "\n")
    if len(missing) == len(answers):
        if not as_json:
            raise NoStacks("there is no stack to show")
        return NoStacks.exit_code
    return 0


def shown(answers: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what is printed: each stack below the names of the tasks that have it. No side effects."""
    groups = grouped((_comparable(str(answer["text"])), answer) for answer in answers)
    return [
        f"{named([str(each['task']) for each in group])} ({group[0]['how']})\n"
        f"{clean_lines(str(group[0]['text'])).rstrip()}\n"
        for group in groups.values()
    ]


def named(names: Sequence[str]) -> str:
    """Return tasks for a heading: all of a few, else the first and how many more. No side effects."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} others"


def complaints(missing: Sequence[Mapping[str, Any]], job: str) -> list[str]:
    """Return why tasks have no stack, once a reason, with what would help. No side effects."""
    groups = grouped(((str(each["error"]), str(each["fix"])), str(each["task"])) for each in missing)
    lines = []
    for (error, fix), names in groups.items():
        lines.append(f"distrun: {named(names)}: {error}" if names[0] else f"distrun: {error}")
        if fix:
            lines.append(f"distrun: hint: {fix.replace('JOB', job)}")
    return [clean_lines(line) for line in lines]


def _comparable(text: str) -> str:
    """Return a stack without what is another one in each process: ids of processes and threads."""
    text = re.sub(r"0x[0-9a-fA-F]+", "0x", text)
    text = re.sub(r"(?m)^Process \d+: .*$", "Process", text)
    return re.sub(r"(?m)^Thread \d+ \([^)]*\)", "Thread", text)
