"""`distrun config`: the options that files and variables give to launches, and where each was given."""

from __future__ import annotations

import click

from distrun import jobfile
from distrun.cli.common import GIVEN, JobCommand, takes
from distrun.cli.console import print_out
from distrun.options import BY_KEY, MERGED, SOURCES
from distrun.request import without_secrets


@click.command(cls=JobCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--show-origin", is_flag=True, help="Say of each value where it was given.")
@takes(*SOURCES)
@click.pass_context
def config(ctx: click.Context, show_origin: bool, file: str, profile: str) -> int:
    """Show, as a job file, the options that a launch in this folder has without being given any.

    \b
    Examples:
      distrun config --show-origin
      distrun config -f job.toml --profile lab

    The sources, the best first: variables DISTRUN_..., the job file, the profile, [tool.distrun] of the nearest
    pyproject.toml, ~/.config/distrun/config.toml. distrun launch --print-config shows what is typed, too.
    """
    shown = {}
    for key, given in ctx.meta[GIVEN].items():
        if key in MERGED:
            shown[key] = given._replace(value=tuple(without_secrets(key, given.value)[0]))
        elif key not in BY_KEY or not BY_KEY[key].typed_only:
            shown[key] = given
    print_out(jobfile.write(shown, has_origins=show_origin))
    return 0
