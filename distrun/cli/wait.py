"""`distrun wait`: waits for the end of a job, and takes its exit code."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import fetched, seconds
from distrun.cli.console import print_err, print_out
from distrun_runtime.contract import facts
from distrun_runtime.contract.duration import duration

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobfolder import JobFolder

SCHEMA = "distrun.wait/1"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
@seconds("--timeout", help="Wait at most so long (exit code 124).")
@click.option("--json", "as_json", is_flag=True, help="At the end one JSON object, with the job's outcome.")
def wait(job: str, timeout: float | None, as_json: bool) -> int:
    """Wait until JOB (an id, the beginning of one, or a name) is over; the exit code is the job's.

    A job that is over gives its code at once. The exit code is 124 if --timeout ends the wait, and 7 if the job's
    coordinator is lost. Ctrl-C ends the wait only.
    """
    from distrun_runtime.coordinator.jobstore import JobStore

    folder = fetched(JobStore().find_living(job))
    code, outcome = _wait(folder, timeout)
    is_late = code is None
    if is_late:
        code = facts.EXIT_TIMEOUT
        print_err(f"distrun: job {folder.id} is not over after {duration(timeout or 0.0)}\n")
    if as_json:
        from distrun_runtime.coordinator.jobfolder import rfc3339

        told = {"schema": SCHEMA, "time": rfc3339(time.time()), "job": folder.id, "exit_code": code}
        print_out(json.dumps({**told, "timed_out": is_late, "outcome": outcome}, indent=2) + "\n")
    return code or 0


def _wait(folder: JobFolder, timeout: float | None) -> tuple[int | None, Mapping[str, Any] | None]:
    """Return the job's exit code, None if it is not over in time; and its outcome as JSON, if it has one.

    Raises:
        CoordinatorLost: its coordinator is gone.
    """
    from distrun import elsewhere
    from distrun.client import CoordinatorLost

    recorded = folder.outcome()
    if recorded is None:
        try:
            return _follow(folder, timeout)
        except CoordinatorLost:
            elsewhere.refreshed(folder)
            recorded = folder.outcome()  # the job may have ended between the two looks
            if recorded is None:
                raise
    return int(recorded["exit_code"]), recorded


def _follow(folder: JobFolder, timeout: float | None) -> tuple[int | None, Mapping[str, Any] | None]:
    """Wait by a connection to the coordinator; as `_wait`."""
    from distrun import client
    from distrun_runtime.coordinator import outcome as ends

    until = None if timeout is None else time.monotonic() + timeout
    with client.connect(folder) as connection, client.reading():
        client.check_version(connection, folder)
        connection.send("subscribe")
        while True:
            try:
                frame = connection.receive(None if until is None else max(0.001, until - time.monotonic()))
            except TimeoutError:
                return None, None
            if frame is None:
                break
            if frame.type == "outcome":
                outcome = ends.from_json(frame.header["outcome"])
                return outcome.exit_code, folder.outcome_json(folder.explained(outcome))
            if frame.type == "failed":
                return int(frame.header["exit_code"]), None
    where = folder.control()
    assert where is not None  # we were connected
    raise client.gone(folder, where)
