"""`distrun launch`: from options to a job, and from its outcome to an exit code."""

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

from distrun import backends, formats, placement
from distrun.cli import common
from distrun.cli.common import GIVEN, JobCommand, current_folder, placed, report, takes
from distrun.cli.console import ERRORS, Console
from distrun.client import Detached
from distrun.errors import UsageError
from distrun.options import BY_KEY, COPYING, MERGED, ROWS, Layer, Sourced, members
from distrun.planning import QueuedJob, device_notes, device_warnings
from distrun.request import (
    FILED,
    EngineOptions,
    JobRequest,
    Needs,
    Setting,
    forwarded,
    parse_env,
    parse_env_file,
    parse_role_env,
    read_text,
    without_secrets,
)
from distrun.request import given as given_to
from distrun_runtime.contract import daemon, environ, facts, process
from distrun_runtime.contract.plan import ROLES, SERVER, WORKER, Limits

if TYPE_CHECKING:
    from distrun.hosts import Inventory
    from distrun.planning import PlannedJob
    from distrun.sync.rules import CopyRules
    from distrun_runtime.contract.plan import Plan
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.jobstore import JobStore

FULL_TRACEBACKS = 2
"""From this verbosity on workers print whole tracebacks."""


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
    env = environ.snapshot()
    if options["quiet"] and options["verbosity"]:
        raise UsageError("-q and -v contradict each other")
    given: Layer = ctx.meta[GIVEN]
    command = options.pop("command")
    if "run" in given:
        command, options["shell"] = (given["run"].value,), True
    elif not command and "command" in given:
        command = given["command"].value
    level = "error" if options["quiet"] else "debug" if options["verbosity"] else "info"
    console = Console(env, prefix=not options["no_prefix"], level=level, shows=options["shows"])
    try:
        return _launch(ctx, command, options, env, console)
    finally:
        console.close()


def _launch(
    ctx: click.Context, command: tuple[str, ...], options: Mapping[str, Any], env: Mapping[str, str], console: Console
) -> int:
    from distrun import launching
    from distrun.planning import plan_job
    from distrun_runtime.coordinator.jobstore import JobStore

    launcher, found = _launcher(options, env, console)
    for warning in found.warnings if found else ():
        console.say(warning, "warning")  # before anything else can fail: it may be why
    misplaced = ""
    if len(command) > 1:
        from distrun.cli import hints

        misplaced = hints.misplaced(command, ctx)
    if misplaced:
        console.say(misplaced)
    for note in placement.notes(found, options["placement"], options["gpus_per_worker"]) if found else ():
        console.say(note)
    store = JobStore()
    given = _recordable(ctx.meta[GIVEN], found, console)
    request = _request(command, options, console, launcher=launcher, found=found, env=env, given=given)
    if options["print_config"]:
        from distrun import jobfile

        console.write_out(jobfile.write({key: Sourced(value, "") for key, value in given.items()}))
        return 0
    if len(command) > 1:
        from distrun.cli import scriptcheck

        warning = scriptcheck.check(request)
        if warning:
            console.say(warning, "warning")
    job = plan_job(request, store)
    if not isinstance(job, QueuedJob):
        if options["shows"]:
            from distrun.jobs import choose

            tasks = [{"name": task.name, "role": task.role} for task in job.plan.tasks]
            choose(tasks, [each for each in options["shows"] if each != ERRORS])
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
        from distrun.cli import hostwait

        argv = hostwait.question(options, found, env)
        hostwait.wait([host.name for host in job.plan.hosts], argv, request.wait_for_hosts_s, console.say)
    folder = launching.create(store, job)
    counts = (0, 0) if isinstance(job, QueuedJob) else (len(job.plan.all_places), len(job.plan.tasks))
    console.attach(folder.log_path, folder.id, lambda: counts if counts[0] else placed(folder), time.monotonic())
    console.say(f"job {folder.id} ({_where(job, options['launcher'])})")
    console.say(f"job {folder.id}: logs in {folder.path / 'logs'}", "debug")
    outcome = launching.launch(job, folder, console, options["verbosity"])
    if isinstance(outcome, Detached):
        return _leave(outcome, store, folder, job, console)
    console.end_output()
    if not outcome.exit_code and not options["as_json"]:
        return 0
    tail = report(outcome, folder, options["as_json"], console)
    if outcome.exit_code and not misplaced:
        from distrun.cli import hints

        hint = hints.afterwards(command, outcome, tail, ctx)
        if hint:
            console.write_err(f"distrun: hint: {hint}\n")
    return outcome.exit_code


def _leave(
    detached: Detached, store: JobStore, folder: JobFolder, job: PlannedJob | QueuedJob, console: Console
) -> int:
    """Say that the job goes on without this terminal; return the exit code."""
    if job.request.detach:
        is_queued = isinstance(job, QueuedJob)
        how = f"{job.backend.name} has it; to follow it" if is_queued else "all tasks run; to follow them"
        console.say(f"{how}: distrun attach {folder.id}")
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


def _request(
    command: tuple[str, ...],
    options: Mapping[str, Any],
    console: Console,
    *,
    launcher: str,
    found: Inventory | None,
    env: Mapping[str, str],
    given: Mapping[str, Any],
) -> JobRequest:
    settings, notes = _collect_env(options, env)
    for note in notes:
        console.say(note, "warning")
    if not options["no_forward"] and not backends.load(launcher).inherits_env:
        # First: what the user gives by name wins.
        settings = (*forwarded(env), *settings)
    if options["verbosity"] >= FULL_TRACEBACKS:
        settings = (Setting("DISTRUN_TRACEBACK", "full"), *settings)
    named = given_to(settings, "").get("DMLC_INTERFACE")
    interface = options["interface"] or (environ.text("DMLC_INTERFACE", env) if named is None else named.value)
    asked = members(options)
    engine = asked.pop("engine")
    asked.update(
        launcher=launcher,
        servers=options["workers"] if options["servers"] is None else options["servers"],
        interface=interface,
        sync_dst_dir="" if launcher == "local" else options["sync_dst_dir"],
        limits=_limits(asked["limits"], options["start_timeout"]),
    )
    if options["activate"] or options["setup"]:
        from distrun import activation

        asked["activate"] = activation.script(options["activate"], setup=options["setup"])
        asked["activated"] = None if options["setup"] else activation.folders(options["activate"])
    return JobRequest(
        **asked,
        command=command,
        hosts=found,
        reach=common.reach_options(options),
        outer=env,
        cwd=current_folder(),
        settings=settings,
        sync_rules=_rules(options),
        engine=_engine(engine, launcher, env),  # after all that was typed: it may read a site's file
        # The command that examines the hosts of a launch, and can make what their servers lack (--fix).
        doctor=""
        if backends.load(launcher).is_engine
        else formats.join(["distrun", "doctor", *common.typed(options, found, (*common.REACH, *common.PYTHON))]),
        given=given,
        dry_run=options["dry_run"],
    )


def _recordable(given: Layer, found: Inventory | None, console: Console) -> dict[str, Any]:
    """Return what was given in a form that may be written and launched again elsewhere: no secrets, whole paths."""
    record: dict[str, Any] = {}
    for key, (value, origin) in given.items():
        row = BY_KEY.get(key)
        if row is None:
            record[key] = value
        elif key in MERGED:
            record[key], lost = without_secrets(key, map(_whole_file, value) if key == "env" else value)
            if lost and key != "env":
                names = ", ".join(lost)
                console.say(f"{row.name}: the value of {names} is not recorded; for a rerun, give it again", "debug")
        elif key == "hostfile" and value == "-":
            listed = found.as_list() if found is not None else ""  # what was on standard input has been read
            record["hosts" if listed else key] = listed or value
        elif not row.typed_only and origin not in environ.BY_NAME:
            record[key] = _whole(value) if row.is_path else value
    if "hosts" in record and "hostfile" in given:
        record.pop("hostfile_format", None)  # it was that of the file
    return record


def _whole_file(word: str) -> str:
    """Return a word of --env with the whole path of the file that it names, if it names one."""
    filed = re.match(FILED, word, re.DOTALL)
    return f"{filed[1]}@{os.path.abspath(filed[2])}" if filed else word


def _whole(paths: Any) -> Any:
    return os.path.abspath(paths) if isinstance(paths, str) else tuple(map(os.path.abspath, paths))


def _collect_env(options: Mapping[str, Any], outer: Mapping[str, str]) -> tuple[tuple[Setting, ...], list[str]]:
    """Return all settings in the order of precedence, files first, and notes for the user. Reads the files."""
    settings: list[Setting] = []
    for path in options["env_files"]:
        settings += parse_env_file(read_text("--env-file", path), path)
    named, notes = parse_env(options["env"], outer)
    settings += named
    for role in ROLES:
        if options["env_" + role]:
            settings += parse_role_env(role, options["env_" + role])
    return tuple(settings), notes


def _engine(asked: Mapping[str, Any], launcher: str, env: Mapping[str, str]) -> EngineOptions:
    """Return what the options, and the configuration file, say to an engine. Reads the file if it is one."""
    parts = {
        WORKER: Needs(**asked[WORKER]),
        SERVER: Needs(**asked[SERVER]),
        "own": {name: value for name, value in asked["own"].items() if value},
        "config": {},
    }
    if launcher not in ("local", "ssh"):
        from distrun import jobfile

        parts["config"] = jobfile.configured(launcher, env, common.engines)
    return EngineOptions(**{**asked, **parts})


def _limits(asked: Mapping[str, Any], start_s: float | None) -> Limits:
    limits = Limits(**asked)
    return limits._replace(
        suspect_s=min(limits.suspect_s, limits.lost_s),
        lease_s=facts.LEASE_FACTOR * limits.lost_s,
        start_s=limits.start_s if start_s is None else start_s,
    )


def _rules(options: Mapping[str, Any]) -> CopyRules | None:
    if not options["sync_dst_dir"]:
        for row in COPYING[1:]:
            if options[row.key]:
                raise UsageError(
                    f"{row.name}: nothing is copied without --sync-dst-dir", "add --sync-dst-dir DIR, or leave it out"
                )
        return None
    from distrun.sync.rules import check_folder, make_rules

    check_folder(options["sync_dst_dir"])
    return make_rules(
        [*_private([*options["env_files"], *_filed(options["env"])], current_folder()), *options["sync_exclude"]],
        options["sync_gitignore"],
        options["sync_extra"],
        cwd=current_folder(),
        delete=options["sync_delete"],
    )


def _filed(words: Sequence[str]) -> list[str]:
    """Return the files that words of --env name."""
    return [match[2] for word in words if (match := re.match(FILED, word, re.DOTALL))]


def _private(paths: Sequence[str], cwd: str) -> list[str]:
    """Return patterns that keep --env-file files below `cwd` from being copied: their values are to stay hidden."""
    from distrun.sync.rules import literal

    names = [os.path.relpath(os.path.realpath(path), os.path.realpath(cwd)) for path in paths]
    return ["/" + literal(name) for name in names if not name.startswith("..")]


def _launcher(options: Mapping[str, Any], env: Mapping[str, str], console: Console) -> tuple[str, Inventory | None]:
    """Return the backend's name and the hosts: the one that was named; ssh when hosts are given; else local."""
    named: str = options["launcher"]
    if named == "local":
        if options["hostfile"] not in (None, "-"):
            from distrun.hosts import parse

            parse.read(options["hostfile"])  # one that is not there is a mistake all the same
        for option, given in (("-H/--hostfile", options["hostfile"]), ("--hosts", options["hosts"])):
            if given is not None:
                console.say(f"{option} is ignored: --launcher local runs on this machine")
        if options["sync_dst_dir"]:
            console.say("--sync-dst-dir is ignored: --launcher local runs in the current directory")
        return named, None
    backend = backends.load(named) if named else None
    if backend is not None and backend.is_engine and not backend.needs_hosts:
        # What the environment says of an outer job is the engine's own business.
        return backend.name, common.find_hosts(options, {})
    found = common.find_hosts(options, env)
    launcher = named or ("local" if found is None else "ssh")
    if found is None and (backend or backends.load(launcher)).needs_hosts:
        raise UsageError(f"--launcher {launcher}: no hosts are given", "name some with -H FILE or --hosts A,B")
    if found is None and options["sync_dst_dir"]:
        console.say("--sync-dst-dir is ignored: without hosts, the job runs in the current directory")
    return launcher, found


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
    count = len(job.plan.hosts)
    return f"on {count} host{'' if count == 1 else 's'}: {used}{source}"


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
