"""`distrun launch`: from options to a job, and from its outcome to an exit code."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from distrun import hosts, shell
from distrun.cli.console import Console
from distrun.cli.options import HOSTS_VARIABLES, collect_env, launch_options
from distrun.errors import UsageError
from distrun.job import Job
from distrun_runtime.contract import environ
from distrun_runtime.contract.plan import ROLES, Limits

if TYPE_CHECKING:
    from distrun.driver import Prepared
    from distrun_runtime.coordinator.jobstore import JobFolder, JobStore
    from distrun_runtime.coordinator.outcome import Outcome

TAIL_LINES = 20
NOT_FOUND = 127


@click.command(context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]})
@launch_options
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(ctx: click.Context, /, command: tuple[str, ...], **options: Any) -> int:
    """Run COMMAND as a distributed job and wait for its end.

    \b
    Examples:
      distrun launch -n 2 python train.py --kv-store dist_sync
      distrun launch -n 4 -s 2 --env OMP_NUM_THREADS=4 python train.py
      distrun launch -n 2 -s 0 "python ddp.py > out-\\$RANK.txt"

    Options of distrun end at the first word of COMMAND. Several words are executed exactly, without a shell; a
    single word with blanks or shell characters is run by bash -c. The exit code is 0 if all workers succeeded, else
    that of the first task that failed (128 + n for signal n).
    """
    ctx.obj.verbosity = options["verbosity"]
    env = environ.snapshot()
    console = Console(env, prefix=not options["no_prefix"], level=_level(options["quiet"], options["verbosity"]))
    try:
        return _launch(command, options, env, console)
    finally:
        console.close()


def _launch(command: tuple[str, ...], options: Mapping[str, Any], env: Mapping[str, str], console: Console) -> int:
    from distrun import driver
    from distrun_runtime.coordinator.jobstore import JobStore

    launcher = _launcher(options, env, console)
    job = _job(command, options, env, console)
    store, run_dir = JobStore(), options["run_dir"]
    ready = driver.prepare(job, launcher, env=env, store=store, run_dir=run_dir, dry_run=options["dry_run"])
    if options["dry_run"]:
        _show(ready, options["as_json"], console)
        return 0
    folder = _create(store, ready, run_dir)
    console.attach(folder.log_path, folder.id)
    console.say("job %s (%s)" % (folder.id, _where(ready, options["launcher"])))
    console.say("job %s: logs in %s" % (folder.id, folder.path / "logs"), "debug")
    outcome = driver.launch(ready, folder, console, options["verbosity"])
    _report(outcome, folder, options["as_json"], console)
    if outcome.exit_code == NOT_FOUND:
        _hint_at_order(command, console)
    return outcome.exit_code


def _job(command: tuple[str, ...], options: Mapping[str, Any], env: Mapping[str, str], console: Console) -> Job:
    by_role = {role: options["env_" + role] for role in ROLES}
    settings, notes = collect_env(options["env"], options["env_files"], by_role, env)
    for note in notes:
        console.say(note, "warning")
    start_s = options["start_timeout"]
    limits = Limits(grace_s=options["grace"], timeout_s=options["timeout"])
    if start_s is not None:
        limits = dataclasses.replace(limits, start_s=start_s)
    given = {setting.name: setting.value for setting in settings if not setting.role}
    return Job(
        command=command,
        workers=options["workers"],
        servers=options["workers"] if options["servers"] is None else options["servers"],
        cwd=_cwd(),
        ps=options["ps"],
        shell=options["shell"],
        name=options["name"],
        settings=settings,
        python=options["python"],
        interface=options["interface"] or environ.text("DMLC_INTERFACE", {**env, **given}),
        subnet=options["subnet"],
        port_range=options["port_range"],
        scheduler_host=options["scheduler_host"],
        limits=limits,
        op_timeout_s=options["op_timeout"],
        start_timeout_s=start_s,
        keep_outer_env=options["keep_outer_env"],
    )


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError as err:
        raise UsageError("the current directory does not exist any more", "cd to one that does") from err


def _launcher(options: Mapping[str, Any], env: Mapping[str, str], console: Console) -> str:
    """Return the backend's name: the one that was named; ssh when hosts are given; else local."""
    named: str | None = options["launcher"]
    hostfile = options["hostfile"]
    if hostfile is not None:
        hosts.read(hostfile)
    if named is None:
        given = {"-H/--hostfile": hostfile, "--hosts": options["hosts"]}
        given.update((name, environ.text(name, env) or None) for name in HOSTS_VARIABLES)
        source = next((name for name, value in given.items() if value is not None), None)
        return "local" if source is None else _ssh(source)
    if named == "local":
        for option, given in (("-H/--hostfile", hostfile), ("--hosts", options["hosts"])):
            if given is not None:
                console.say("%s is ignored: --launcher local runs on this machine" % option)
        if options["sync_dst_dir"] is not None:
            console.say("--sync-dst-dir is ignored: --launcher local runs in the current directory")
    return named


def _ssh(source: str) -> str:
    from distrun import backends

    if "ssh" not in backends.names():
        raise UsageError(
            "%s means the ssh launcher, which this version does not have" % source,
            "run on this machine with --launcher local",
        )
    return "ssh"


def _create(store: JobStore, ready: Prepared, run_dir: Path | None) -> JobFolder:
    from distrun_runtime.errors import JobStoreError

    try:
        return store.create(ready.plan, run_dir)
    except JobStoreError as err:
        raise UsageError(str(err)) from err


def _where(ready: Prepared, named: str | None) -> str:
    """Return on which machines the job runs, in words."""
    if not ready.backend.needs_hosts:
        return "on this machine" + ("; no hosts given" if named is None else "")
    count = len(ready.plan.hosts)
    return "on %d host%s" % (count, "" if count == 1 else "s")


def misplaced(command: Sequence[str]) -> str:
    """Return the first option of ours, with its value, behind a command that looks like shell text; or "". Pure."""
    if " " not in command[0]:
        return ""
    takes = {
        name: isinstance(option, click.Option) and not option.is_flag and not option.count
        for option in launch.params
        for name in (*option.opts, *option.secondary_opts)
        if name.startswith("-")
    }
    for index, word in enumerate(command):
        name, equals, _ = word.partition("=")
        if index and name in takes:
            return shell.join(command[index : index + (2 if takes[name] and not equals else 1)])
    return ""


def _hint_at_order(command: Sequence[str], console: Console) -> None:
    found = misplaced(command)
    if found:
        console.write_err(
            "distrun: hint: `%s` stands after the command and belongs to it; options of distrun come before it\n"
            % found
        )


def _show(ready: Prepared, as_json: bool, console: Console) -> None:
    from distrun.cli import dryrun

    rendered = ready.rendered()
    if as_json:
        console.write_out(json.dumps(dryrun.as_json(ready.plan, rendered), indent=2) + "\n")
    else:
        console.write_out(dryrun.as_text(ready.plan, rendered))


def _report(outcome: Outcome, folder: JobFolder, as_json: bool, console: Console) -> None:
    from distrun_runtime.coordinator import report

    if outcome.exit_code:
        task = outcome.culprit.task if outcome.culprit else ""
        tail = folder.tail(task, TAIL_LINES) if task else []
        text = report.failure(outcome, tail, str(folder.log_path(task)) if task else "")
        console.write_err(text + "\n" if text else "")
        console.write_err("distrun: error: %s\n" % outcome.message)
    if as_json:
        console.write_out(json.dumps(folder.outcome_json(outcome)) + "\n")


def _level(quiet: bool, verbosity: int) -> str:
    if quiet and verbosity:
        raise UsageError("-q and -v contradict each other")
    return "error" if quiet else "debug" if verbosity else "info"
