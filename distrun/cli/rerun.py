"""`distrun rerun`: a launch whose options come from the record of a job, in its request.json, where none are typed."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

from distrun.cli.common import JobCommand, my_jobs
from distrun.cli.launch import launch
from distrun.errors import UsageError
from distrun.options import SOURCES, Layer, Sourced

JOB = "distrun.job"
"""Key of click's `ctx.meta`: the job that is launched again."""
HELP = """\
Launch JOB (an id, the beginning of one, or a name) again, in the folder where it was launched.

\b
Examples:
  distrun rerun calm-otter
  distrun rerun calm-otter -n 8 --detach
  distrun rerun calm-otter python train.py --lr 0.01

Options are those of launch, and take the place of the job's own; so does a command. Variables of --env are added.
Files, such as hosts files, are read again. Values of secrets are not recorded: they are forwarded from here.
"""


class RecordCommand(JobCommand):
    """A launch that takes a job in front of its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the job off the words, then do as for a launch."""
        if not args:
            raise click.UsageError("Missing argument 'JOB'.", ctx)
        if not args[0].startswith("-"):
            ctx.meta[JOB], *args = args
        elif args[0] not in ctx.help_option_names:
            raise click.UsageError("The job comes first: distrun rerun JOB [OPTIONS] [COMMAND]...", ctx)
        return super().parse_args(ctx, args)

    def layers(self, ctx: click.Context, typed: Layer) -> Sequence[Layer]:
        """Return what was given to the job, and go to the folder in which it was launched.

        Raises:
            UsageError: nothing was recorded, or that folder is gone.
            JobStoreError: there is no such job, or it is damaged.
        """
        folder = my_jobs().get(ctx.meta[JOB]).folder
        record = folder.request() or {}
        given = record.get("given")
        if not given:
            text = f"job {folder.id} has no record of options: it was not launched by the command line"
            raise UsageError(text, "launch it again as it was launched")
        try:
            os.chdir(record["cwd"])
        except OSError as err:
            text = f"job {folder.id} was launched in {record['cwd']}: {err.strerror}"
            raise UsageError(text, "make that folder again, or type the launch anew in another one") from err
        return [
            {key: Sourced(tuple(each) if isinstance(each, list) else each, folder.id) for key, each in given.items()}
        ]


rerun = RecordCommand(
    "rerun",
    callback=launch.callback,
    params=[param for param in launch.params if param.name not in {row.key for row in SOURCES}],
    help=HELP,
    context_settings=launch.context_settings,
    options_metavar="JOB [OPTIONS]",
)
