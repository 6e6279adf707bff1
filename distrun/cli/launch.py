"""`distrun launch`, `rerun` and `config`: from options to a job, and from its outcome to an exit code."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distrun import formats, placement, requesting
from distrun.cli import common
from distrun.cli.common import GIVEN, JobCommand, placed, report, takes
from distrun.cli.console import ERRORS, Console, print_out
from distrun.client import Detached
from distrun.errors import DistrunError, UsageError
from distrun.options import BY_KEY, MERGED, ROWS, SOURCES, Layer, Sourced
from distrun.planning import QueuedJob, device_notes, device_warnings
from distrun_runtime.contract import daemon, environ, facts, process

if TYPE_CHECKING:
    from distrun.hosts import Inventory
    from distrun.planning import PlannedJob
    from distrun_runtime.contract.plan import Plan
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.jobstore import JobStore

NOT_BEGUN = (facts.PREFLIGHT, facts.SYNC, facts.SUBMIT, facts.START_FAILED)
"""Reasons of the end of a job whose tasks have written nothing."""


@click.command(
    cls=JobCommand,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help", "--help-all"]},
)
@takes(*ROWS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(ctx: click.Context, /, **options: Any) -> int:
    """Run COMMAND as a distributed job and wait for its end.

    \b
    Examples:
      distrun launch -n 2 -s 0 'echo worker $RANK of $WORLD_SIZE'
      distrun launch -n 4 -s 2 -H hosts --sync-dst-dir '~/job' python3 train.py
      distrun launch -f job.toml

    Options come before COMMAND. Several words are executed as they are, without a shell; one word with blanks or shell
    characters is run with bash -c. Options that are not typed are taken from variables DISTRUN_..., the job file (-f),
    [tool.distrun] of pyproject.toml and ~/.config/distrun/config.toml, in this order.

    The exit code is 0 if all workers succeeded, else that of the first task that failed: distrun help exit-codes.
    """
    process.outlive_tasks_signals()
    ctx.obj["verbosity"] = options["verbosity"]
    if options["quiet"] and options["verbosity"]:
        raise UsageError("-q and -v contradict each other")
    level = "error" if options["quiet"] else "debug" if options["verbosity"] else "info"
    console = Console(environ.snapshot(), prefix=not options["no_prefix"], level=level, shows=options["shows"])
    try:
        return _launch(ctx, options, console)
    finally:
        console.close()


def _launch(ctx: click.Context, options: Mapping[str, Any], console: Console) -> int:
    from distrun import launching
    from distrun.planning import plan_job
    from distrun_runtime.coordinator.jobstore import JobStore

    command, misplaced = requesting.command_of(ctx.meta[GIVEN]), ""
    if len(command) > 1:
        from distrun.cli import hints

        misplaced = hints.misplaced(command, ctx)
    if misplaced:
        console.say(misplaced)  # before anything else can fail: it may be why
    store = JobStore()
    request = requesting.resolve(ctx.meta[GIVEN], options, console.say)
    found = request.hosts
    for note in placement.notes(found, options["placement"], options["gpus_per_worker"]) if found else ():
        console.say(note)
    if options["print_config"]:
        from distrun import jobfile

        console.write_out(jobfile.write({key: Sourced(value, "") for key, value in request.given.items()}))
        return 0
    program = next(iter(formats.python_words(command, request.shell)), "")
    if request.check_imports or re.match(formats.PYTHON, program):
        from distrun import scriptcheck

        warning = scriptcheck.check(request)
        if warning:
            console.say(warning, "warning")
    job = plan_job(request, store)
    if not isinstance(job, QueuedJob):
        if options["shows"]:
            from distrun.jobs import choose

            tasks = [{"name": task.name, "role": task.role} for task in job.plan.tasks]
            choose(tasks, [each for each in options["shows"] if each != ERRORS], "--show: ")
        notes = _unused(job.plan, found) if found else []
        if job.plan.gpus_per_worker:
            notes += device_notes(job.plan)
        for note in notes:
            console.say(note)
        for warning in device_warnings(job.plan):
            console.say(warning, "warning")
    if job.tree is not None:
        console.say(f"to copy to each host: {job.tree.text()}")
        for warning in job.tree.warnings():
            console.say(warning, "warning")
    if options["detach"] and not (job.is_hosted or options["in_scope"] or options["dry_run"]):
        words = ctx.obj[common.TYPED]
        first = 1 if ctx.info_name == "rerun" else 0  # the job
        outlive_logout([str(ctx.info_name), *words[:first], "--in-scope", *words[first:]])
    if job.request.dry_run:
        _show(job, options["as_json"], options["verbosity"] > 0, console)
        return 0
    if request.wait_for_hosts_s and found is not None and not isinstance(job, QueuedJob):
        from distrun import hostwait

        hostwait.wait(request, [host.name for host in job.plan.hosts], console.say)
    folder = launching.create(store, job)
    counts = (0, 0) if isinstance(job, QueuedJob) else (len(job.plan.all_places), len(job.plan.tasks))
    console.attach(folder.log_path, folder.id, lambda: counts if counts[0] else placed(folder), time.monotonic())
    console.say(f"job {folder.id} ({_where(job, options['launcher'])})")
    console.say(f"job {folder.id}: logs in {folder.path / 'logs'}", "debug")
    outcome = launching.launch(job, folder, console, options["verbosity"])
    if isinstance(outcome, Detached):
        return _leave(outcome, store, folder, job, console)
    console.end_output()
    fetched = 0
    if options["fetch"] and outcome.reason not in NOT_BEGUN and not folder.is_unplanned:
        fetched = _fetch(folder, options, console)
    if not outcome.exit_code and not options["as_json"]:
        return fetched
    tail = report(outcome, folder, options["as_json"], console)
    if outcome.exit_code and not misplaced:
        from distrun.cli import hints

        hint = hints.afterwards(command, outcome, tail, ctx)
        if hint:
            console.write_err(f"distrun: hint: {hint}\n")
    return outcome.exit_code or fetched


def _fetch(folder: JobFolder, options: Mapping[str, Any], console: Console) -> int:
    """Copy files of the hosts here; return the exit code."""
    from distrun.jobs import Job

    try:
        Job(folder, console.say).fetch(*options["fetch"], to=options["fetch_to"])
    except (DistrunError, OSError, KeyboardInterrupt) as err:
        for line in (str(err) or f"interrupted; to go on: distrun fetch {folder.id}").splitlines():
            console.say(f"--fetch: {line}", "error")
        return facts.EXIT_INTERRUPTED if isinstance(err, KeyboardInterrupt) else facts.EXIT_SYNC
    return 0


def _leave(
    detached: Detached, store: JobStore, folder: JobFolder, job: PlannedJob | QueuedJob, console: Console
) -> int:
    """Say that the job goes on without this terminal; return the exit code."""
    if job.request.detach:
        is_queued = isinstance(job, QueuedJob)
        how = f"{job.backend.name} has it; to follow it" if is_queued else "all tasks run; to follow them"
        console.say(f"{how}: distrun attach {folder.id}")
        if job.request.given.get("fetch"):
            console.say(f"--fetch is for you to do, when it is over: distrun fetch {folder.id}")
        console.write_out(folder.id + "\n")
        return 0
    if detached.cursor is not None:
        from distrun.cli.attach import OutputPlace

        OutputPlace(store.root, folder.id).write(detached.cursor)
    console.say(f"job {folder.id} goes on without this terminal; to come back: distrun attach {folder.id}")
    if daemon.ends_at_logout():
        text = "a logout here ends it all the same (KillUserProcesses of systemd-logind); launch --detach survives one"
        console.say(text, "warning")
    return 0


def _where(job: PlannedJob | QueuedJob, named: str) -> str:
    """Return on which machines the job runs, in words."""
    if isinstance(job, QueuedJob):
        return f"where {job.backend.name} finds room"
    if not job.backend.needs_hosts:
        return "on this machine" + ("; no hosts given" if not named else "")
    from distrun.hosts.ranges import fold

    used = fold([host.name for host in job.plan.hosts])
    found = job.request.hosts
    source = "" if found is None else f", from {found.source}"
    return f"on {formats.number_of(len(job.plan.hosts), 'host')}: {used}{source}"


def _unused(plan: Plan, found: Inventory) -> list[str]:
    """Return a note on hosts that get no task: they were not checked."""
    used = {host.name for host in plan.hosts}
    names = [name for name in found.names if name not in used]
    if not names:
        return []
    from distrun.hosts.ranges import fold

    count = f"{len(names)} of {len(used) + len(names)} hosts get" if len(names) > 1 else "one host gets"
    return [f"{count} no task: {fold(names)}"]


def _show(job: PlannedJob | QueuedJob, as_json: bool, whole: bool, console: Console) -> None:
    from distrun.cli import dryrun

    told: str | dict[str, Any]
    if isinstance(job, QueuedJob):
        shown = job.backend.script(job.request, job.setup.job_id, job.setup.nonce, Path("{folder}"))
        told = dryrun.queued_as_json(job, *shown) if as_json else dryrun.queued_as_text(job, *shown)
    else:
        rendered = job.backend.render(job.plan)
        told = dryrun.as_json(job.plan, rendered) if as_json else dryrun.as_text(job.plan, rendered, whole)
    console.write_out(told if isinstance(told, str) else json.dumps(told, indent=2) + "\n")


# Some systems end a user's processes at logout, daemons too (KillUserProcesses of systemd-logind). There a detached job
# is started below the user's own service manager, which must go on without a login ("linger").


def outlive_logout(argv: Sequence[str], root: str = "") -> None:
    """Make sure that what this process starts survives a logout. May replace this process by `argv` in another place.

    Arguments:
        argv: the arguments of distrun that make it do what it is about to do, and do not lead here again.
        root: where the system's files are looked for; for tests.

    Raises:
        UsageError: it would not survive; the hint has the line to type.
    """
    if not daemon.ends_at_logout(root):
        return
    line = daemon.needs_linger(root)
    if line is not None:
        raise UsageError(f"--detach: {daemon.WHY}", f"allow yours to go on, once: {line}")
    import shutil  # with all its formats of archives

    found = shutil.which("systemd-run")
    if found is None:
        raise UsageError(
            f"--detach: {daemon.WHY}, and there is no systemd-run", "launch it without --detach, in tmux or so"
        )
    try:
        os.execv(found, [found, *daemon.SCOPE, sys.executable, "-m", "distrun", *argv])
    except OSError as err:
        raise UsageError(f"--detach: cannot run {found}: {err.strerror}") from err


# `distrun rerun`: a launch whose options come from the record of a job, in its request.json, where none are typed.


JOB = "distrun.job"
"""Key of click's `ctx.meta`: the job that is launched again."""
RERUN_HELP = """\
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
        folder = common.my_jobs().get(ctx.meta[JOB]).folder
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
    help=RERUN_HELP,
    context_settings=launch.context_settings,
    options_metavar="JOB [OPTIONS]",
)


# `distrun config`: the options that files and variables give to launches, and where each was given.


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
    from distrun import jobfile
    from distrun.request import without_secrets

    shown = {}
    for key, given in ctx.meta[GIVEN].items():
        if key in MERGED:
            shown[key] = given._replace(value=tuple(without_secrets(key, given.value)[0]))
        elif key not in BY_KEY or not BY_KEY[key].typed_only:
            shown[key] = given
    print_out(jobfile.write(shown, has_origins=show_origin))
    return 0
