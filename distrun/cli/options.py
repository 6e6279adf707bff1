"""The options of `distrun launch`, one table in groups; and what is read from the files that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from distrun.errors import UsageError
from distrun.job import BUNDLED, Setting, parse_env, parse_env_file, parse_role_env
from distrun_runtime.contract.plan import ROLES, Limits


class LauncherOption(click.Option):
    """--launcher, whose help lists the backends there are, registered ones included, when it is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's two cells in the help."""
        from distrun import backends

        self.help = "How tasks are started: %s." % ", ".join(backends.names())
        return super().get_help_record(ctx)


Function = TypeVar("Function", bound=Callable[..., Any])

HOSTS_VARIABLES = ("DEEPLEARNING_WORKERS_PATH", "DISTRUN_HOSTFILE")
"""Hosts files named by the environment, when neither -H nor --hosts is given."""

_LIMITS = Limits()


def _path(**more: Any) -> click.Path:
    return click.Path(path_type=Path, **more)


_OPTIONS: tuple[Callable[[Function], Function], ...] = (
    # Size
    click.option("-n", "--num-workers", "workers", type=int, required=True, metavar="N", help="Number of workers."),
    click.option(
        "-s", "--num-servers", "servers", type=int, metavar="N", help="Number of servers; 0: none. [default: as -n]"
    ),
    # Where
    click.option("--launcher", "--backend", "launcher", metavar="NAME", cls=LauncherOption),
    click.option("-H", "--hostfile", "hostfile", metavar="FILE", help="Hosts file (ssh)."),
    click.option("--hosts", "hosts", metavar="A,B", help="Hosts, instead of a file (ssh)."),
    click.option("--scheduler-host", default="", metavar="HOST", help="Host of the scheduler. [default: the first]"),
    click.option("--sync-dst-dir", metavar="DIR", help="Copy the current directory there on each host (ssh)."),
    # Command
    click.option("--shell/--no-shell", "shell", default=None, help="Run the command by bash -c, or never do."),
    click.option(
        "--ps",
        default=BUNDLED,
        show_default=True,
        metavar="bundled|command",
        help="Who serves: our servers, or your command in every role (MXNet, ps-lite, BytePS).",
    ),
    click.option("--python", default="", metavar="PATH", help="Python of the bundled servers. [default: this one]"),
    # Environment
    click.option("--env", "env", multiple=True, metavar="K=V|K|PFX*", help="Set or forward variables. Repeatable."),
    click.option("--env-file", "env_files", multiple=True, metavar="FILE", help="KEY=VALUE lines; values stay hidden."),
    *(
        click.option("--env-" + role, multiple=True, metavar="K=V", help="Set a variable for the %s role only." % role)
        for role in reversed(ROLES)
    ),
    click.option("--keep-outer-env", is_flag=True, help="Keep variables of an outer job (SLURM_*, OMPI_*, RANK ...)."),
    # Network
    click.option("--interface", default="", metavar="NAME", help="Network interface for data, found on each host."),
    click.option("--subnet", default="", metavar="CIDR", help="Network for data, found on each host."),
    click.option("--port-range", default="", metavar="A-B", help="Ports that scheduler, servers and workers may bind."),
    # Time
    click.option(
        "--grace",
        type=float,
        default=_LIMITS.grace_s,
        show_default=True,
        metavar="S",
        help="Seconds between asking a task to end and killing it.",
    ),
    click.option("--timeout", type=float, metavar="S", help="End the job after so many seconds (exit code 124)."),
    click.option("--start-timeout", type=float, metavar="S", help="Seconds until all have started. [default: 120]"),
    click.option("--op-timeout", type=float, metavar="S", help="Seconds that one store call may take. [default: 1800]"),
    # Output
    click.option("--name", default="", help="A name for the job."),
    click.option("--run-dir", type=_path(), metavar="DIR", help="Keep the job's folder below DIR."),
    click.option("--no-prefix", is_flag=True, help="Print tasks' output unchanged."),
    click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing."),
    click.option("--json", "as_json", is_flag=True, help="The dry run, or the outcome (last line), as JSON on stdout."),
    click.option("-q", "--quiet", is_flag=True, help="Print errors only, and the tasks' output."),
    click.option("-v", "--verbose", "verbosity", count=True, help="Say more; -vv: also every protocol message."),
)


def launch_options(function: Function) -> Function:
    """Add the options of `launch` to a command, in the order of the table."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def collect_env(
    words: Sequence[str], files: Sequence[str], by_role: Mapping[str, Sequence[str]], outer: Mapping[str, str]
) -> tuple[tuple[Setting, ...], list[str]]:
    """Return all settings in the order of precedence, files first, and notes for the user. Reads the files.

    Raises:
        UsageError: a file that cannot be read, a malformed line or word, a name that is distrun's.
    """
    settings: list[Setting] = []
    for path in files:
        settings += parse_env_file(_text(path), path)
    given, notes = parse_env(words, outer)
    settings += given
    for role, pairs in by_role.items():
        settings += parse_role_env(role, pairs)
    return tuple(settings), notes


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as err:
        raise UsageError("--env-file: cannot read %r: %s" % (path, getattr(err, "strerror", None) or err)) from err
