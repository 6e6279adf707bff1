"""`distrun detach`: lets a job go on without the terminal that launched it."""

from __future__ import annotations

import click

from distrun.cli.common import fetched
from distrun.cli.console import print_out
from distrun.errors import UsageError
from distrun_runtime.contract import facts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
def detach(job: str) -> int:
    """Let JOB (an id, the beginning of one, or a name) go on without the terminal that launched it.

    Its `distrun launch` ends with exit code 0. From then on the end of that terminal, or of that process, means nothing
    to the job. It stays where it is: the machine that launched it has to stay up.
    """
    from distrun import client
    from distrun_runtime.coordinator.jobstore import JobStore

    folder = fetched(JobStore().find_living(job))
    state = folder.state()["state"]
    if state in facts.OVER:
        raise UsageError(f"job {folder.id} is over: {state}", f"what it printed: distrun logs {folder.id}")
    with client.connect(folder) as connection:
        client.check_version(connection, folder)
        answer = connection.ask("detach")
    with client.reading():
        if answer.type == "refused":
            raise UsageError(f"job {folder.id}: {answer.header['message']}", answer.header["hint"])
        told = "goes on without its terminal" if answer.header["released"] else "had been detached before"
    print_out(f"{folder.id}: {told}; to come back: distrun attach {folder.id}\n")
    return 0
