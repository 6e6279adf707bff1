"""`distrun fetch`: copies files of a job's hosts to this machine."""

from __future__ import annotations

import click

from distrun.cli.common import my_jobs


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job")
@click.argument("paths", metavar="[PATH]...", nargs=-1)
@click.option("--to", default="", metavar="DIR", help="Where to. [default: a folder here, called as the job]")
@click.option("--from", "source", default="", metavar="DIR", help="Folder on the hosts. [default: that of the tasks]")
def fetch(job: str, paths: tuple[str, ...], to: str, source: str) -> int:
    """Copy files of the hosts of JOB (an id, the beginning of one, or a name) to DIR, while it runs or later.

    \b
    Examples:
      distrun fetch calm-otter 'out/*'
      distrun fetch calm-otter model.npz 'logs/**/*.txt' --to results
      distrun fetch calm-otter --from /scratch/ann run1

    PATH is seen from the folder in which tasks start. * and ? do not go over a /, ** goes over any number of folders; a
    folder stands for all that is in it. Put patterns in quotes. Without PATH: those of `launch --fetch`.

    Files come to DIR/HOST/PATH, and to DIR/PATH if the job has one host, or one folder that all hosts share. The exit
    code is 4 if a host cannot be reached or files are missing; those of the other hosts come all the same.
    """
    my_jobs().get(job).fetch(*paths, to=to, source=source)
    return 0
