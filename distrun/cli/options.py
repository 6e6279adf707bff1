"""The options of `distrun launch`, one table in groups; and what is read from the files that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from distrun import formats
from distrun.cli.common import HOST_OPTIONS, count, seconds, size
from distrun.errors import UsageError
from distrun.placement import POLICIES
from distrun.request import BUNDLED, EngineOptions, Needs, Setting, parse_env, parse_env_file, parse_role_env
from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import ROLES, SERVER, WORKER, Limits


class LauncherOption(click.Option):
    """--launcher, whose help lists the backends there are, registered ones included, when it is asked for."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option's two cells in the help."""
        from distrun import backends

        self.help = f"How tasks are started: {', '.join(backends.names())}."
        return super().get_help_record(ctx)


Function = TypeVar("Function", bound=Callable[..., Any])

_LIMITS = Limits()
LOG_LIMIT = 1024 * 1024
"""The least that --log-limit may keep: several chunks of output."""


def _path(**more: Any) -> click.Path:
    return click.Path(path_type=Path, **more)


def _needs(role: str) -> tuple[Callable[[Function], Function], ...]:
    return (
        count(f"--{role}-cores", low=1, help=f"Cores for each {role}."),
        size(f"--{role}-memory", low=1, help=f"Memory for each {role} (512M, 8G)."),
        count(f"--{role}-gpus", low=0, help=f"GPUs for each {role}."),
    )


_YARN: tuple[Callable[[Any], Any], ...] = (
    click.option("--yarn-rm", default="", metavar="URL", help="ResourceManager (yarn). [default: $HADOOP_CONF_DIR's]"),
    click.option("--yarn-hdfs", default="", metavar="URL", help="WebHDFS (yarn). [default: $HADOOP_CONF_DIR's]"),
)
_MPI: tuple[Callable[[Any], Any], ...] = (
    click.option(
        "--mpi-flavor",
        default="",
        metavar="NAME",
        help="Make of mpirun: openmpi4, openmpi5, mpich, intel. [default: asked]",
    ),
    click.option("--mpirun", default="", metavar="PATH", help="The mpirun program (mpi)."),
)
_SITE = ("yarn_rm", "yarn_hdfs", "mpi_flavor", "mpirun")
"""Options that say which engine is meant, of all commands that speak to one."""
_OWN = ("pe", "node_label", "docker_image", *_SITE)
"""Options of one engine only."""


def site_options(function: Function) -> Function:
    """Add the options to a command that say which engine is meant."""
    for option in reversed((*_YARN, *_MPI)):
        function = option(function)
    return function


def site_engine_options(launcher: str, options: Mapping[str, Any], env: Mapping[str, str]) -> EngineOptions:
    """Return what these options, and the configuration file, say to an engine. Reads the file.

    Raises:
        UsageError: the file cannot be read.
    """
    from distrun import config  # with its parser: for engines only

    own = {name: options[name] for name in _SITE if options[name]}
    return EngineOptions(own=own, config=config.section(launcher, env))


ENGINE_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--queue", default="", metavar="NAME", help="Queue, or partition, of the engine."),
    click.option("--time", "engine_time", default="", metavar="T", help="How long the engine lets it run (90m, 2h)."),
    click.option("--project", default="", metavar="NAME", help="Project, or account, that is charged."),
    *_needs(WORKER),
    *_needs(SERVER),
    click.option(
        "--engine-arg", "engine_args", multiple=True, metavar="ARG", help="Hand ARG to the engine as it is. Repeatable."
    ),
    click.option("--pe", default="", metavar="NAME", help="Parallel environment (sge). [default: the one that fits]"),
    *_YARN,
    click.option("--node-label", default="", metavar="NAME", help="Label of the nodes (yarn)."),
    click.option("--docker-image", default="", metavar="IMAGE", help="Image of the containers (yarn)."),
    *_MPI,
)


def engine_options(launcher: str, options: Mapping[str, Any], env: Mapping[str, str]) -> EngineOptions:
    """Return what the options, and the configuration file, say to an engine. Reads the file if it is one.

    Raises:
        UsageError: the file cannot be read, or a time is none.
    """
    from distrun import config  # with its parser: for engines only

    def needs(role: str) -> Needs:
        return Needs(*(options[f"{role}_{what}"] or 0 for what in ("cores", "memory", "gpus")))

    return EngineOptions(
        queue=options["queue"],
        time_s=formats.lasting("--time", options["engine_time"]) if options["engine_time"] else None,
        project=options["project"],
        args=tuple(options["engine_args"]),
        worker=needs(WORKER),
        server=needs(SERVER),
        own={name: options[name] for name in _OWN if options[name]},
        config={} if launcher in ("local", "ssh") else config.section(launcher, env),
    )


_OPTIONS: tuple[Callable[[Function], Function], ...] = (
    # Size
    count("-n", "--num-workers", "workers", low=1, required=True, help="Number of workers."),
    count("-s", "--num-servers", "servers", low=0, help="Number of servers; 0: none. [default: as -n]"),
    # Where
    click.option("--launcher", "--backend", "launcher", metavar="NAME", cls=LauncherOption),
    *HOST_OPTIONS,
    click.option(
        "--placement",
        type=click.Choice(POLICIES),
        default=POLICIES[0],
        show_default=True,
        help="Servers, then workers, on the hosts in turn as launch.py does; or filling slots; or spreading over them.",
    ),
    click.option("--oversubscribe", is_flag=True, help="Place more tasks on a host than it has slots."),
    count(
        "--gpus-per-worker",
        low=1,
        help="Let each worker see so many GPUs of its own, numbered from 0. [default: all that gpus= gives its host]",
    ),
    click.option("--scheduler-host", default="", metavar="HOST", help="Host of the scheduler. [default: the first]"),
    # Engines
    *ENGINE_OPTIONS,
    # Sync
    click.option("--sync-dst-dir", default="", metavar="DIR", help="Copy the current directory to DIR on each host."),
    click.option("--sync-exclude", multiple=True, metavar="PATTERN", help="Do not copy what matches. Repeatable."),
    click.option("--sync-gitignore", is_flag=True, help="Copy what git would add, and nothing else."),
    click.option("--sync-extra", multiple=True, metavar="SRC[:DST]", help="Copy this too, into DIR. Repeatable."),
    click.option("--sync-delete", is_flag=True, help="Delete files that only a host has, in a DIR that distrun made."),
    # Command
    click.option("--shell/--no-shell", "shell", default=None, help="Always or never run the command with bash -c."),
    click.option(
        "--ps",
        default=BUNDLED,
        show_default=True,
        metavar="bundled|command",
        help="Who runs servers: distrun's own, or your command in every role (MXNet, ps-lite, BytePS).",
    ),
    click.option(
        "--python",
        default="",
        metavar="PATH",
        help="Python of the bundled servers. [default: this one; over ssh the command's, else python3]",
    ),
    click.option(
        "--server-import",
        "server_imports",
        multiple=True,
        metavar="MODULE",
        help="Module with your update rules, which the bundled servers import. Repeatable.",
    ),
    click.option(
        "--server-device",
        default="",
        metavar="auto|cpu|gpu[:N]",
        help="Where the bundled servers keep values. gpu: on the host's GPUs in turn; gpu:N: on the N-th that they see."
        " auto: a GPU for dist_device_* stores that fit. [default: auto; with --gpus-per-worker, cpu]",
    ),
    click.option(
        "--forward-signal",
        "forward_signals",
        default="",
        metavar="USR1[,USR2]",
        help="Give workers these signals, which reach distrun launch or come from the engine, such as a warning before"
        " the time limit.",
    ),
    click.option(
        "--activate",
        multiple=True,
        metavar="WHAT",
        help="venv:PATH, conda:ENV, module:NAME or shell text, run once on each host. Repeatable.",
    ),
    # Environment
    click.option("--env", "env", multiple=True, metavar="K=V|K|PFX*", help="Set or forward variables. Repeatable."),
    click.option("--env-file", "env_files", multiple=True, metavar="FILE", help="KEY=VALUE lines; hidden, not copied."),
    *(
        click.option("--env-" + role, multiple=True, metavar="K=V", help=f"Set a variable for the {role} role only.")
        for role in reversed(ROLES)
    ),
    click.option(
        "--no-forward", is_flag=True, help="Do not forward DMLC_*, PS_*, OMP_*, LD_LIBRARY_PATH, AWS keys ... (ssh)."
    ),
    click.option("--keep-outer-env", is_flag=True, help="Keep variables of an outer job (SLURM_*, OMPI_*, RANK ...)."),
    # Network
    click.option("--interface", default="", metavar="NAME", help="Network interface for data, found on each host."),
    click.option("--subnet", default="", metavar="CIDR", help="Network for data, found on each host."),
    click.option("--port-range", default="", metavar="A-B", help="Ports that scheduler, servers and workers may bind."),
    click.option(
        "--coordinator-address",
        default="",
        metavar="A[,B...]",
        help="Where agents that dial back reach this machine. [default: all its addresses]",
    ),
    click.option(
        "--coordinator-host",
        default="",
        metavar="HOST",
        help="Host on which the coordinator of a detached job runs. [default: the first]",
    ),
    # Time
    seconds(
        "--grace",
        low=0,
        default=_LIMITS.grace_s,
        show_default=True,
        help="Seconds between asking a task to end and killing it.",
    ),
    seconds("--timeout", help="End the job after so many seconds (exit code 124)."),
    seconds(
        "--start-timeout",
        variable="DISTRUN_START_TIMEOUT",
        help="Seconds until all have started. [default: 120]",
    ),
    seconds(
        "--suspect-after",
        default=_LIMITS.suspect_s,
        show_default=True,
        help="Silence after which a host is reported as suspect.",
    ),
    seconds(
        "--lost-after",
        default=_LIMITS.lost_s,
        show_default=True,
        help="Silence after which a host is lost (exit code 7); its own tasks end half as long after.",
    ),
    seconds(
        "--stall-after",
        low=0,
        default=_LIMITS.stall_after_s,
        show_default=True,
        help="Seconds without a sign of life after which a worker is said to be stalled; 0: never.",
    ),
    click.option(
        "--reconnect",
        is_flag=True,
        help="Connect again to a host whose connection is cut; its tasks go on for 1.5 times --lost-after meanwhile.",
    ),
    seconds(
        "--op-timeout",
        variable="DISTRUN_OP_TIMEOUT",
        help="Seconds that one store call may take. [default: 1800]",
    ),
    # Life
    click.option(
        "--detach", is_flag=True, help="Print the job's id on stdout when all tasks run, and leave it: distrun attach."
    ),
    click.option("--in-scope", is_flag=True, hidden=True),
    # Output
    click.option("--name", default="", help="A name for the job."),
    click.option("--run-dir", type=_path(), metavar="DIR", help="Keep the job's folder below DIR."),
    size(
        "--log-limit",
        low=LOG_LIMIT,
        default="1G",
        help="Keep about so much of each task's log, its beginning and its end (100M, 2G, all). [default: 1G]",
    ),
    count(
        "--metrics-port", low=0, high=65535, help="Answer Prometheus at this port of the coordinator; 0: any free one."
    ),
    click.option(
        "--metrics-address", default="", metavar="A", help=f"The address for that. [default: {facts.LOOPBACK}]"
    ),
    click.option(
        "--show",
        "shows",
        multiple=True,
        metavar="WHAT",
        help="Print only what this task (worker-0) or role writes, or errors: all stderr. Logs keep all; repeatable.",
    ),
    click.option("--no-prefix", is_flag=True, help="Print tasks' output unchanged."),
    click.option("--dry-run", is_flag=True, help="Show what would be started, and start nothing; -v shows each task."),
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
        raise UsageError(f"--env-file: cannot read {path!r}: {getattr(err, 'strerror', None) or err}") from err
