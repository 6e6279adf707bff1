"""The command `distrun`: lazy subcommands, and the one place where an error becomes an exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import click

from distrun import __version__
from distrun.cli.console import print_err
from distrun.cli.lazy import LazyGroup
from distrun.errors import DistrunError, HostsError
from distrun_runtime.contract import facts


@dataclass
class Settings:
    """What the commands tell `main`."""

    verbosity: int = 0


COMMANDS = {
    "launch": ("distrun.cli.launch:launch", "Run a distributed job and wait for its end."),
    "hosts": ("distrun.cli.hosts:hosts", "Show what a hosts file says; fold and expand node lists."),
    "status": ("distrun.cli.status:status", "Show my jobs, or the tasks of one."),
    "logs": ("distrun.cli.logs:logs", "Show what a job's tasks printed."),
    "kill": ("distrun.cli.kill:kill", "Stop a job, or all that jobs left on hosts."),
    "sync": ("distrun.cli.sync:sync", "Copy the current directory to all hosts."),
    "exec": ("distrun.cli.exec:execute", "Run a command on all hosts, equal outputs folded."),
    "doctor": ("distrun.cli.doctor:doctor", "Check hosts: reachable, complete, able to reach each other."),
}


@click.group(
    cls=LazyGroup,
    commands_table=COMMANDS,
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

    distrun COMMAND -h says more.
    """
    if ctx.invoked_subcommand is None:
        print_err(ctx.get_help() + "\n")
        ctx.exit(facts.EXIT_USAGE)


def main() -> NoReturn:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run the command line `argv`; return the exit code. Every error ends here, as one line of text."""
    settings = Settings()
    try:
        code = cli.main(args=list(argv), prog_name="distrun", standalone_mode=False, obj=settings)
    except click.exceptions.Exit as err:
        return err.exit_code
    except click.ClickException as err:
        return _click_error(err)
    except (KeyboardInterrupt, click.exceptions.Abort):
        print_err("distrun: interrupted\n")
        return facts.EXIT_INTERRUPTED
    except BrokenPipeError:
        return 0
    except HostsError as err:
        print_err(str(err) + "\n")  # unchanged, so that editors find the places
        count = "" if err.count == 1 else "s"
        return _fail("%d error%s in the hosts given" % (err.count, count), err.hint, err.exit_code, settings)
    except DistrunError as err:
        return _fail(str(err), err.hint, err.exit_code, settings)
    except Exception as err:
        return _other(err, settings)
    return code if isinstance(code, int) else 0


def _click_error(err: click.ClickException) -> int:
    hint = ""
    if isinstance(err, click.UsageError) and err.ctx is not None:
        hint = f"{err.ctx.command_path} -h shows the options"
    message = err.format_message()
    if isinstance(err, click.NoSuchOption) and err.ctx is not None:
        from distrun.cli import hints  # for a mistake only

        message = f"No such option {err.option_name}. {hints.no_such_option(err)}"
    if isinstance(err, click.MissingParameter):
        from distrun.cli import hints

        hint = hints.missing(err) or hint
    return _fail(_one_line(message), hint, err.exit_code, Settings())


def _other(err: Exception, settings: Settings) -> int:
    from distrun_runtime.errors import JobStoreError, NoSuchJob, RuntimeFault

    if isinstance(err, NoSuchJob):
        return _fail(str(err), "distrun status lists the jobs", facts.EXIT_USAGE, settings)
    if isinstance(err, JobStoreError):
        hint = "distrun status lists the jobs; a folder that is damaged, and of no job that runs, can go: rm -r"
        return _fail(str(err), hint, facts.EXIT_USAGE, settings)
    if isinstance(err, RuntimeFault):
        return _fail(str(err), "", facts.EXIT_INTERNAL, settings)
    text = f"{type(err).__name__}: {err}"
    return _fail("internal error: " + text, "please report it, with what -vv prints", facts.EXIT_INTERNAL, settings)


def _fail(message: str, hint: str, code: int, settings: Settings) -> int:
    if settings.verbosity >= 2:
        import traceback

        print_err(traceback.format_exc())
    lines = message.splitlines() or [""]
    print_err("".join(f"distrun: error: {line}\n" for line in lines))
    if hint:
        print_err(f"distrun: hint: {hint}\n")
    return code


def _one_line(text: str) -> str:
    return " ".join(text.split())
