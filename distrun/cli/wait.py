"""`distrun wait`: waits for the end of a job, and takes its exit code."""

from __future__ import annotations

import time

import click

from distrun.cli.common import fetched, seconds
from distrun.cli.console import print_err
from distrun_runtime.contract import facts
from distrun_runtime.contract.duration import duration


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
@seconds("--timeout", help="Wait at most so long (exit code 124).")
def wait(job: str, timeout: float | None) -> int:
    """Wait until JOB (an id, the beginning of one, or a name) is over; the exit code is the job's.

    A job that is over gives its code at once. The exit code is 124 if --timeout ends the wait, and 7 if the job's
    coordinator is lost. Ctrl-C ends the wait only.
    """
    from distrun import client
    from distrun_runtime.coordinator.jobstore import JobStore

    folder = fetched(JobStore().find_living(job))
    outcome = client.recorded(folder)
    if outcome is not None:
        return outcome.exit_code
    until = None if timeout is None else time.monotonic() + timeout
    with client.connect(folder) as connection:
        client.check_version(connection, folder)
        connection.send("subscribe")
        while True:
            try:
                frame = connection.receive(None if until is None else max(0.001, until - time.monotonic()))
            except TimeoutError:
                print_err(f"distrun: job {folder.id} is not over after {duration(timeout or 0.0)}\n")
                return facts.EXIT_TIMEOUT
            if frame is None:
                break
            if frame.type == "outcome":
                return int(frame.header["outcome"]["exit_code"])
            if frame.type == "failed":
                return int(frame.header["exit_code"])
    outcome = client.recorded(folder)
    if outcome is not None:
        return outcome.exit_code
    where = folder.control()
    assert where is not None  # we were connected
    raise client.gone(folder, where)
