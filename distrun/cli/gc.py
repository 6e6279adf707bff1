"""`distrun gc`: removes the folders of jobs that are over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from distrun.cli.common import my_jobs, takes
from distrun.cli.console import print_err, print_json, print_out
from distrun.errors import UsageError
from distrun.formats import seconds_of, size
from distrun.options import count
from distrun_runtime.contract import facts

if TYPE_CHECKING:
    from distrun.killing import RemovedJob

SCHEMA = "distrun.gc/1"


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    found = None if value is None else seconds_of(value)
    if value is not None and found is None:
        raise UsageError(f"--older-than: expected a time such as 30d, 12h or 90m, found {value!r}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", metavar="[JOB]...", nargs=-1)
@click.option(
    "--older-than", callback=_age, metavar="TIME", help="Only jobs that ended longer ago (12h, 7d). [default: 30d]"
)
@takes(count("--keep", "Keep the N newest jobs, however old they are.", low=0))
@click.option("--lost", is_flag=True, help="Also jobs whose launcher died. First: distrun kill JOB.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def gc(names: tuple[str, ...], **options: Any) -> int:
    """Remove the folders of jobs that are over: logs, plan, events, and what tasks left in DISTRUN_RUN_DIR.

    \b
    Examples:
      distrun gc --dry-run                # what ended more than 30 days ago
      distrun gc --older-than 7d --keep 20
      distrun gc calm-otter               # this one, whenever it ended

    A job that runs, or may still run on a host, is never removed. A lost job is removed only with --lost, a damaged one
    only if you name it. Of a job with --run-dir only the link in the job store is removed. If the coordinator of a job
    was on a host, its folder there is removed, too, by ssh. The exit code is 1 if something could not be removed.
    """
    removed, problems = my_jobs().gc(
        names,
        older_s=options["older_than"],
        keep=options["keep"] or 0,
        has_lost=options["lost"],
        is_dry=options["dry_run"],
    )
    code = facts.EXIT_LEFT if problems else 0
    if options["as_json"]:
        told = {"jobs": [each._asdict() for each in removed], "problems": problems}
        print_json(SCHEMA, dry_run=options["dry_run"], exit_code=code, size=sum(each.size for each in removed), **told)
    else:
        _tell(removed, options["dry_run"])
        for problem in problems:
            print_err(f"distrun: error: {problem}\n")
    return code


def _tell(removed: Sequence[RemovedJob], dry_run: bool) -> None:
    done = [each for each in removed if not each.problem]
    for each in done:
        kept = f"; its folder stays: {each.kept}" if each.kept else ""
        what = "only the link to it" if each.kept else size(each.size)
        there = f"; also its folder on {each.host}" if each.host else ""
        print_out(f"{each.job}: {each.state}, {what}{there}{kept}\n")
    if not done:
        print_out("there is nothing to remove\n" if not removed else "")
        return
    jobs = "1 job" if len(done) == 1 else f"{len(done)} jobs"
    verb = "would be removed (--dry-run)" if dry_run else "removed"
    print_out(f"{jobs} {verb}, {size(sum(each.size for each in done))}\n")
