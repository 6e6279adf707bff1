"""The command `distrun`: lazy subcommands, and the one place where an error becomes an exit code."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from distrun import __version__
from distrun.cli.console import Stdout, print_err, unwritten
from distrun.errors import DistrunError, PlacedError
from distrun_runtime.contract import facts, streams

GARBAGE = 20_000
"""New objects after which Python looks for garbage, in place of 700. Nearly all that a launch makes stays: modules,
classes, connections. To look at it again and again took a twentieth of a small job's processor time."""


COMMANDS = {
    "launch": ("distrun.cli.launch:launch", "Run a distributed job and wait for its end."),
    "rerun": ("distrun.cli.launch:rerun", "Launch a job again, as it was or with other options."),
    "config": ("distrun.cli.launch:config", "Show the options that files and variables give to launches."),
    "hosts": ("distrun.cli.hosts:hosts", "Show what a hosts file says; fold and expand node lists."),
    "status": ("distrun.cli.status:status", "Show my jobs, or the tasks of one."),
    "top": ("distrun.cli.status:top", "Show a job live, or all my jobs."),
    "dashboard": ("distrun.cli.dashboard:dashboard", "Show jobs in a browser, live, with plots."),
    "logs": ("distrun.cli.logs:logs", "Show what a job's tasks printed."),
    "attach": ("distrun.cli.attach:attach", "Show a running job as launch does, from any terminal."),
    "stack": ("distrun.cli.stack:stack", "Show where a running job's tasks stand: their Python stacks."),
    "wait": ("distrun.cli.attach:wait", "Wait for a job's end; the exit code is the job's."),
    "detach": ("distrun.cli.attach:detach", "Let a job go on without the terminal that launched it."),
    "fetch": ("distrun.cli.fetch:fetch", "Copy files of a job's hosts to this machine."),
    "kill": ("distrun.cli.kill:kill", "Stop a job, or all that jobs left on hosts."),
    "gc": ("distrun.cli.kill:gc", "Remove the folders of jobs that are over."),
    "sync": ("distrun.cli.sync:sync", "Copy the current directory to all hosts."),
    "exec": ("distrun.cli.exec:execute", "Run a command on all hosts, equal outputs folded."),
    "template": (
        "distrun.cli.template:template",
        "Write files that make a cluster: containers, machines, clouds.",
    ),
    "doctor": ("distrun.cli.doctor:doctor", "Check hosts: reachable, complete, able to reach each other."),
    "demo": ("distrun.cli.start:demo", "Train a small network here, to see a job."),
    "init": ("distrun.cli.start:init", "Write an example: a program, a job file and a hosts file."),
    "help": ("distrun.cli.help:explain", "Explain exit codes, hosts files, placement and other topics."),
    "completion": ("distrun.cli.help:completion", "Print the script by which a shell completes distrun."),
}


class LazyGroup(click.Group):
    """Commands by a table, COMMANDS: name -> ("module:attribute", short help)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names.

        Raises:
            click.UsageError: there is none; says which one may have been meant.
        """
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            from distrun.cli import hints  # for a mistake only

            raise click.UsageError(f"No such command {name!r}. {hints.no_such_command(args, COMMANDS)}", ctx)
        from distrun.cli.common import TYPED  # with all options: not for help

        ctx.ensure_object(dict)[TYPED] = args[1:]
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    invoke_without_command=True,
)
@click.version_option(__version__, "-V", "--version", message="distrun %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Launch distributed training jobs; push and pull through a bundled parameter server.

    \b
    Examples:
      distrun launch -n 2 python train.py --kv-store dist_sync
      distrun launch -n 2 -H hosts --sync-dst-dir '~/job' python3 train.py --kv-store dist_sync
      distrun launch -n 2 -s 0 python ddp.py       # no parameter servers
      distrun launch -n 2 --dry-run python train.py
      distrun status

    distrun COMMAND -h says more; distrun help lists topics.
    """
    if ctx.invoked_subcommand is None:
        print_err(ctx.get_help() + "\n")
        ctx.exit(facts.EXIT_USAGE)


def main() -> NoReturn:
    """Run the command line and exit."""
    streams.open_streams()
    # Ignored signals stay ignored (nohup), but for this one: without it the end of a child goes unnoticed.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.set_threshold(GARBAGE)
    code = run(sys.argv[1:])
    gc.freeze()  # else the interpreter looks for garbage among all that, to end with it
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run the command line `argv`; return the exit code. Every error ends here, as one line of text."""
    unwritten.clear()
    with contextlib.redirect_stdout(Stdout()):
        code = _run(argv)
    if not unwritten:
        return code
    print_err(f"distrun: error: stdout cannot be written: {unwritten[0]}\n")
    return code or facts.EXIT_OUTPUT


def _run(argv: Sequence[str]) -> int:
    # click's `ctx.obj`: the command is told there what was typed (TYPED), and says how much is printed of an error.
    told: dict[str, Any] = {"verbosity": 0}
    try:
        code = cli.main(args=list(argv), prog_name="distrun", standalone_mode=False, obj=told)
    except click.exceptions.Exit as err:
        return err.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        print_err("distrun: interrupted\n")
        return facts.EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0
    except Exception as err:
        message, hint, code = _explained(err)
        if told["verbosity"] >= 2:
            import traceback

            print_err(traceback.format_exc())
        print_err("".join(f"distrun: error: {line}\n" for line in message.splitlines() or [""]))
        if hint:
            print_err(f"distrun: hint: {hint}\n")
    return code if isinstance(code, int) else 0


def _explained(err: Exception) -> tuple[str, str, int]:
    """Return the message of an error, a hint and the exit code."""
    from distrun_runtime.errors import JobStoreError, NoSuchJob, RuntimeFault

    match err:
        case click.ClickException():
            return _of_click(err)
        case PlacedError():
            from distrun.formats import number_of

            print_err(str(err) + "\n")  # unchanged, so that editors find the places
            return f"{number_of(err.count, 'error')} in {err.what}", err.hint, err.exit_code
        case DistrunError():
            return str(err), err.hint, err.exit_code
        case NoSuchJob():
            return str(err), "distrun status lists the jobs", facts.EXIT_USAGE
        case JobStoreError():
            hint = "distrun status lists the jobs; a folder that is damaged, and of no job that runs, can go: rm -r"
            return str(err), hint, facts.EXIT_USAGE
        case RuntimeFault():
            return str(err), "", facts.EXIT_INTERNAL
        case OSError(errno=errno.EMFILE):
            from distrun_runtime.contract import process

            return process.why(err), "", facts.EXIT_INTERNAL
    text = f"internal error: {type(err).__name__}: {err}"
    return text, "please report it, with what -vv prints", facts.EXIT_INTERNAL


def _of_click(err: click.ClickException) -> tuple[str, str, int]:
    from distrun.cli import hints  # for a mistake only

    message, hint = err.format_message(), ""
    if isinstance(err, click.UsageError) and err.ctx is not None:
        hint = f"{err.ctx.command_path} -h shows the options"
    if isinstance(err, click.NoSuchOption) and err.ctx is not None:
        message = f"No such option {err.option_name}. {hints.no_such_option(err)}"
    if isinstance(err, click.MissingParameter):
        hint = hints.missing(err) or hint
    return " ".join(message.split()), hint, err.exit_code
