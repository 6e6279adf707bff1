"""The one table of the options of `distrun launch`, what each may be, and which of several sources decides its value.

A row says an option's name, kind, range, default, environment variable, help, the launchers that it is for, and the
member of the request that it becomes. From it are made click's options (`cli/common.py`), the keys of job files
(`jobfile.py`), what a request takes of them, its JSON and its checks (`request.py`), and `docs/options.md`
(`scripts/render-options`). A new option needs a row here
and, if it is for the job, a member with a type in the request.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from distrun import formats
from distrun.errors import UsageError
from distrun_runtime.contract import environ, facts, process

TEXT, WORDS, FLAG, SWITCH, TIMES = "text", "texts", "flag", "yes or no", "how often"
"""Kinds: a text; texts, one each time it is given; whether it is given; with a name for no; how often it is given."""
COUNT, SECONDS, SIZE = "whole number", "seconds", "size"
_EMPTY: Mapping[str, Any] = {TEXT: "", WORDS: (), FLAG: False, TIMES: 0, SIZE: 0}
"""What an option is that is not given, if its row does not say it. Others: None."""

ENGINES = "engines"
"""Launchers: those that find room for the job themselves."""
NO_ENGINES = "no engines"

MOST = 65_536
"""Workers, or servers, of a job at most: as many as a job may have hosts."""
SHOWN = 40
"""Characters of a wrong number that a message shows."""


class Option(NamedTuple):
    """One row of the table."""

    name: str
    """As it is typed; several names, or the name for no, with `/` between."""
    key: str
    """What the commands call it."""
    kind: str
    help: str
    member: str
    """The member of the request that it becomes, such as `limits.grace_s`; empty: none of its own."""
    default: Any
    value: str = ""
    """How its value is named in the help."""
    low: float | None = None
    """The least number; None: of seconds any more than 0."""
    high: int = MOST
    choices: tuple[str, ...] = ()
    reads: Callable[[str, str], Any] | None = None
    """Given the name and a text, what that means. Raises UsageError."""
    variable: str = ""
    """The variable that it becomes in tasks, or that holds if it is not given; of a time the range, too."""
    launchers: str = ""
    """The launchers that it is for: ENGINES, NO_ENGINES or the only one; empty: all."""
    required: bool = False
    hidden: bool = False
    is_path: bool = False
    """It names files here; in a file, relative ones are below that file's folder."""
    typed_only: bool = False
    """It is an option of the command line only: no file and no variable can set it."""

    @property
    def path(self) -> tuple[str, ...]:
        """Its place in a job file: `("workers",)`; `("worker", "cores")` is `cores` in the table `worker`."""
        if self.key in ("workers", "servers"):
            return (self.key,)
        name = self.name[self.name.index("--") + 2 :].partition("/")[0]
        role, dash, rest = name.partition("-")
        if role == "env" and rest in facts.ROLES:
            return rest, role
        return (role, rest) if dash and role in facts.ROLES else (name,)

    def read(self, value: Any) -> Any:
        """Return what a text that was typed means; a number, a text or texts of a request are only checked.

        Raises:
            UsageError: it is not what the option takes.
        """
        if value == self.default:
            return value
        if self.kind == COUNT:
            return _count(self.name, value, int(self.low or 0), self.high)
        if self.kind == SECONDS:
            return seconds_of(self.name, value, self.low)
        if self.kind == SIZE:
            return 0 if value == "all" else formats.parse_size(self.name, value, int(self.low or 0))
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.name}: expected {' or '.join(self.choices)}, found {value!r}")
        if self.reads is None:
            return value
        if self.kind == WORDS:
            return tuple(self.reads(self.name, each) for each in value)
        return self.reads(self.name, value)

    def of(self, request: object) -> Any:
        """Return what a request has of it."""
        for name in self.member.split("."):
            request = request.get(name, "") if isinstance(request, Mapping) else getattr(request, name)
        return request

    def check(self, request: object) -> None:
        """Check what a request has of it. Raises UsageError."""
        value = self.of(request)
        if isinstance(value, str) or self.kind in (COUNT, SECONDS, WORDS):
            self.read(value)


def _row(kind: str, name: str, help: str, value: str = "", *, key: str = "", **more: Any) -> Option:
    key = key or name.rpartition("--")[2].replace("-", "_")
    if "variable" in more and kind == SECONDS:
        more["low"] = environ.BY_NAME[more["variable"]].low
    return Option(name, key, kind, help, value=value, **{"default": _EMPTY.get(kind), "member": key, **more})


text, words, flag = partial(_row, TEXT), partial(_row, WORDS), partial(_row, FLAG)
switch, times = partial(_row, SWITCH), partial(_row, TIMES)
count, seconds, size = (
    partial(_row, COUNT, value="N"),
    partial(_row, SECONDS, value="S"),
    partial(_row, SIZE, value="SIZE"),
)


def _limit(name: str, member: str, help: str, default: float | None, **more: Any) -> Option:
    return seconds(name, help, default=default, member=f"limits.{member}", **more)


def _engine(make: Callable[..., Option], name: str, *words: str, member: str, **more: Any) -> Option:
    return make(name, *words, member=f"engine.{member}", **{"launchers": ENGINES, **more})


def _own(name: str, value: str, launcher: str, help: str, make: Callable[..., Option] | None = None) -> Option:
    return _engine(make or text, name, help, value, member=f"own.{name[2:].replace('-', '_')}", launchers=launcher)


def _needs(role: str) -> tuple[Option, ...]:
    return (
        _engine(count, f"--{role}-cores", f"Cores for each {role}.", member=f"{role}.cores", low=1, default=0),
        _engine(size, f"--{role}-memory", f"Memory for each {role} (512M, 8G).", member=f"{role}.memory", low=1),
        _engine(count, f"--{role}-gpus", f"GPUs for each {role}.", member=f"{role}.gpus", low=0, default=0),
    )


def parse_addresses(option: str, text: str) -> tuple[str, ...]:
    """Return the addresses and host names of `A[,B...]`. No side effects.

    Raises:
        UsageError: one of them is neither.
    """
    import ipaddress  # not for every launch

    found = tuple(each.strip() for each in text.split(",")) if text else ()
    for each in found:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(each)
            continue
        if not re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?", each):
            raise UsageError(
                f"{option}: expected addresses or host names with commas between, found {each!r}",
                "the port is chosen by --port-range",
            )
    return tuple(dict.fromkeys(found))


def parse_signals(option: str, text: str) -> tuple[str, ...]:
    """Return the names of `USR1[,USR2]`. No side effects.

    Raises:
        UsageError: another signal; distrun itself acts on it.
    """
    found = tuple(each.strip().upper().removeprefix("SIG") for each in text.split(",")) if text else ()
    for each in found:
        if each not in process.TASKS_SIGNALS:
            known = ", ".join(process.TASKS_SIGNALS)
            raise UsageError(
                f"{option}: expected some of {known} with commas between, found {each!r}",
                "Ctrl-C and SIGTERM reach tasks anyway: they end the job",
            )
    return tuple(dict.fromkeys(found))


def _ports(option: str, text: str) -> str:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if match is None or not 1 <= int(match.group(1)) <= int(match.group(2)) <= 65535:
        raise UsageError(f"{option}: expected FIRST-LAST within 1-65535, found {text!r}")
    return text


def _address(option: str, text: str, is_network: bool = False) -> str:
    import ipaddress

    try:
        ipaddress.ip_network(text, strict=False) if is_network else ipaddress.ip_address(text)
    except ValueError as err:
        what = "a network such as 10.0.0.0/8 or fd00::/8" if is_network else "an address such as 0.0.0.0 or ::1"
        raise UsageError(f"{option}: expected {what}, found {text!r}") from err
    return text


def _job_name(option: str, text: str) -> str:
    if not re.fullmatch(r"[\w.+@:-]{1,64}", text):
        raise UsageError(f"{option}: expected up to 64 letters, digits or . _ + @ : -, found {text!r}")
    return text


def parse_label(option: str, text: str) -> str:
    """Return a label, `K=V`. No side effects.

    Raises:
        UsageError: it is none.
    """
    if not re.fullmatch(r"[\w./-]{1,64}=[\w.+@:/-]{0,64}", text):
        raise UsageError(f"{option}: expected KEY=VALUE, up to 64 letters, digits or . _ - / each, found {text!r}")
    return text


def _module(option: str, text: str) -> str:
    if not all(part.isidentifier() for part in text.split(".")) or text.endswith(".py"):
        raise UsageError(
            f"{option}: expected a module's name as `import` takes it, such as my_rules; found {text!r}",
            "leave .py and folders out: servers start in the job's directory and import from there",
        )
    return text


def _device(option: str, text: str) -> str:
    from distrun_runtime.contract import gpus  # not for every command

    found = gpus.server_device(text)
    if not found:
        raise UsageError(f"{option}: expected {gpus.DEVICES}, found {text!r}")
    return found


def _count(option: str, value: str | int, low: int, high: int) -> int:
    if value == "p" and option.startswith("-n/"):
        raise UsageError("there is no option -np", "it is mpirun's; type -n N")
    try:
        number = int(value)
    except ValueError:  # also one of thousands of digits
        number = low - 1
    if not low <= number <= high:
        raise UsageError(f"{option}: expected a whole number from {low} to {high}, found {_shown(value)}")
    return number


def seconds_of(option: str, value: str | float, low: float | None = None) -> float:
    """Return a time in seconds, from `low` (more than 0 if it is None) to a year. No side effects.

    Raises:
        UsageError: it is none, or out of that range.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (number > 0 if low is None else low <= number) or not number <= environ.LONGEST_S:
        least = "more than 0, at most" if low is None else f"from {low:g} to"
        unit = re.fullmatch(r"([0-9.]+) ?s(?:ec)?", str(value))
        raise UsageError(
            f"{option}: expected a time in seconds, {least} {environ.LONGEST_S} (a year), found {_shown(value)}",
            f"without the unit: {option} {unit[1]}" if unit else "",
        )
    return number


def _shown(value: str | float) -> str:
    text = value if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)
    return repr(text) if len(text) <= SHOWN else repr(text[:SHOWN]) + "..."


def parse_fetched(option: str, text: str) -> str:
    """Return a pattern of files to fetch, seen from a folder of the hosts. No side effects.

    Raises:
        UsageError: it leads out of that folder.
    """
    if not text or text[0] in "/~" or ".." in text.split("/") or "\0" in text:
        raise UsageError(
            f"{option}: expected a path below the job's folder, such as 'out/*', found {text!r}",
            "files of another folder: distrun fetch JOB --from DIR PATH",
        )
    return text


LABELS = words("-l/--label", "Only jobs with this label. Repeatable.", "K=V", key="labels", reads=parse_label)
"""By which commands choose among jobs."""
COPYING = (
    text("--sync-dst-dir", "Copy the current directory to DIR on each host.", "DIR"),
    words("--sync-exclude", "Do not copy what matches. Repeatable.", "PATTERN", member=""),
    flag("--sync-gitignore", "Copy what git would add, and nothing else.", member=""),
    words("--sync-extra", "Copy this too, into DIR. Repeatable.", "SRC[:DST]", member=""),
    flag("--sync-delete", "Delete files that only a host has, in a DIR that distrun made."),
)
LAUNCHER = text(
    "--launcher/--backend",
    "How tasks are started: {launchers}. [default: ssh if there are hosts, else local]",
    "NAME",
    key="launcher",
)
HOSTS = (
    text("-H/--hostfile", "Hosts file; - reads standard input.", "FILE", default=None, member="", is_path=True),
    text("--hosts", "Hosts, instead of a file: names, user@host, gpu[01-08].", "A,B", default=None, member=""),
    text("--hostfile-format", "How the hosts file is read. [default: auto]", "FORM", default="auto", member=""),
    text(
        "--transport",
        "SSH client: the built-in library, or the ssh program (GSSAPI, FIDO keys, ControlMaster).",
        choices=("fabric", "openssh"),
        default="fabric",
        member="",
    ),
    flag("--strict-host-keys", "Refuse hosts whose key is not known yet.", member=""),
    text("--ssh-config", "ssh configuration. [default: ~/.ssh/config]", "FILE", member="", is_path=True),
    seconds("--connect-timeout", "Seconds that one connection may take.", default=10.0, member=""),
)
_YARN = (
    _own("--yarn-rm", "URL", "yarn", "ResourceManager (yarn). [default: $HADOOP_CONF_DIR's]"),
    _own("--yarn-hdfs", "URL", "yarn", "WebHDFS (yarn). [default: $HADOOP_CONF_DIR's]"),
)
_MPI = (
    _own("--mpi-flavor", "NAME", "mpi", "Make of mpirun: openmpi4, openmpi5, mpich, intel. [default: asked]"),
    _own("--mpirun", "PATH", "mpi", "The mpirun program (mpi)."),
)
_KUBERNETES = (_own("--namespace", "NAME", "kubernetes", "Namespace (kubernetes). [default: kubectl's]"),)
SITE = (*_YARN, *_MPI, *_KUBERNETES)
"""Options that say which engine is meant, of all commands that speak to one."""

SOURCES = (
    text("-f/--file", "Job file: what is not typed is taken from it.", "FILE", member="", typed_only=True),
    text("--profile", "Profile of the job file, pyproject.toml or config.toml.", "NAME", member="", typed_only=True),
)
"""Options that say where other options come from."""

TABLE: Mapping[str, tuple[Option, ...]] = {
    "Job file": (
        *SOURCES,
        flag("--print-config", "Print this launch as a job file, and start nothing.", member="", typed_only=True),
    ),
    "Size": (
        count("-n/--num-workers", "Number of workers.", key="workers", low=1, required=True),
        count("-s/--num-servers", "Number of servers; 0: none. [default: as -n]", key="servers", low=0),
    ),
    "Where": (
        LAUNCHER,
        *HOSTS,
        text(
            "--placement",
            "Servers, then workers, on the hosts in turn as launch.py does; or filling slots; or spreading over them.",
            choices=("cycle", "pack", "spread"),
            default="cycle",
        ),
        flag("--oversubscribe", "Place more tasks on a host than it has slots."),
        count(
            "--gpus-per-worker",
            "Let each worker see so many GPUs of its own, numbered from 0. [default: all that gpus= gives its host]",
            low=1,
            default=0,
        ),
        text("--scheduler-host", "Host of the scheduler. [default: the first]", "HOST", launchers=NO_ENGINES),
    ),
    "Engines": (
        _engine(text, "--queue", "Queue, or partition, of the engine.", "NAME", member="queue"),
        _engine(
            text,
            "--time",
            "How long the engine lets it run (90m, 2h).",
            "T",
            key="engine_time",
            member="time_s",
            default=None,
            reads=lambda option, text: formats.lasting(option, text) if text else None,
        ),
        _engine(text, "--project", "Project, or account, that is charged.", "NAME", member="project"),
        *_needs(facts.WORKER),
        *_needs(facts.SERVER),
        _engine(words, "--engine-arg", "Hand ARG to the engine as it is. Repeatable.", "ARG", member="args"),
        _own("--pe", "NAME", "sge", "Parallel environment (sge). [default: the one that fits]"),
        *_YARN,
        _own("--node-label", "NAME", "yarn", "Label of the nodes (yarn)."),
        _own("--docker-image", "IMAGE", "yarn", "Image of the containers (yarn)."),
        *_MPI,
        _own("--image", "IMAGE", "kubernetes", "Image of the pods; it has python3 (kubernetes)."),
        *_KUBERNETES,
        _own("--image-pull-secret", "NAME", "kubernetes", "Secret with which the image is pulled (kubernetes)."),
        _own(
            "--volume",
            "SOURCE:DIR[:ro]",
            "kubernetes",
            "Mount pvc/NAME, configmap/NAME, a node's /FOLDER, empty or memory at DIR (kubernetes). Repeatable.",
            words,
        ),
        _own("--gpu-resource", "NAME", "kubernetes", "What GPUs are called (kubernetes). [default: nvidia.com/gpu]"),
        _own("--node-selector", "KEY=VALUE", "kubernetes", "Label of the nodes (kubernetes). Repeatable.", words),
        _own(
            "--toleration",
            "KEY[=VALUE][:EFFECT]",
            "kubernetes",
            "Taint of nodes that is tolerated (kubernetes). Repeatable.",
            words,
        ),
    ),
    "Copying code": COPYING,
    "Results": (
        words(
            "--fetch",
            "When the job is over, copy these files of the hosts here ('out/*'). Repeatable.",
            "PATH",
            member="",
            reads=parse_fetched,
        ),
        text("--fetch-to", "Where to. [default: a folder here, called as the job]", "DIR", member="", is_path=True),
    ),
    "Command": (
        flag("--check-imports", "Look first whether the job's Python has the modules that the script imports."),
        switch("--shell/--no-shell", "Always or never run the command with bash -c.", key="shell"),
        text(
            "--ps",
            "Who runs servers: distrun's own, or your command in every role (MXNet, ps-lite, BytePS).",
            "bundled|command",
            choices=("bundled", "command"),
            default="bundled",
        ),
        text(
            "--python",
            "Python of the bundled servers. [default: this one; over ssh the command's, else python3]",
            "PATH",
        ),
        words(
            "--server-import",
            "Module with your update rules, which the bundled servers import. Repeatable.",
            "MODULE",
            key="server_imports",
            reads=_module,
        ),
        text(
            "--server-device",
            "Where the bundled servers keep values. gpu: on the host's GPUs in turn; gpu:N: on the N-th that they see."
            " auto: a GPU for dist_device_* stores that fit. [default: auto; with --gpus-per-worker, cpu]",
            "auto|cpu|gpu[:N]",
            reads=_device,
        ),
        text(
            "--forward-signal",
            "Give workers these signals, which reach distrun launch or come from the engine, such as a warning before"
            " the time limit.",
            "USR1[,USR2]",
            key="forward_signals",
            default=(),
            reads=parse_signals,
        ),
        words(
            "--activate",
            "venv:PATH, conda:ENV, module:NAME or shell text, run once on each host. Repeatable.",
            "WHAT",
            member="",
        ),
        text(
            "--setup", "Shell text that is run once on each host before the tasks, after --activate.", "TEXT", member=""
        ),
    ),
    "Environment": (
        words(
            "--env",
            "Set or forward variables; K@FILE: FILE holds the value, which stays hidden. Repeatable.",
            "K=V|K|PFX*|K@FILE",
            member="",
        ),
        words("--env-file", "KEY=VALUE lines; hidden, not copied.", "FILE", key="env_files", member="", is_path=True),
        words("--env-worker", "Set a variable for the worker role only.", "K=V", member=""),
        words("--env-server", "Set a variable for the server role only.", "K=V", member=""),
        words("--env-scheduler", "Set a variable for the scheduler role only.", "K=V", member=""),
        flag("--no-forward", "Do not forward DMLC_*, PS_*, OMP_*, LD_LIBRARY_PATH, AWS keys ... (ssh).", member=""),
        flag("--keep-outer-env", "Keep variables of an outer job (SLURM_*, OMPI_*, RANK ...)."),
    ),
    "Network": (
        text("--interface", "Network interface for data, found on each host.", "NAME", variable="DMLC_INTERFACE"),
        text("--subnet", "Network for data, found on each host.", "CIDR", reads=partial(_address, is_network=True)),
        text(
            "--port-range",
            "Ports that scheduler, servers and workers may bind.",
            "A-B",
            reads=_ports,
            variable="DISTRUN_PORT_RANGE",
        ),
        text(
            "--coordinator-address",
            "Where agents that dial back reach this machine. [default: all its addresses]",
            "A[,B...]",
            key="coordinator_addresses",
            default=(),
            reads=parse_addresses,
        ),
        text(
            "--coordinator-host",
            "Host on which the coordinator of a detached job runs. [default: the first]",
            "HOST",
            launchers=NO_ENGINES,
        ),
    ),
    "Time": (
        _limit("--grace", "grace_s", "Seconds between asking a task to end and killing it.", facts.GRACE_S, low=0),
        _limit("--timeout", "timeout_s", "End the job after so many seconds (exit code 124).", None),
        seconds(
            "--start-timeout",
            "Seconds until all have started. [default: 120]",
            variable="DISTRUN_START_TIMEOUT",
            member="start_timeout_s",
        ),
        seconds(
            "--wait-for-hosts",
            "Seconds to wait for hosts that are not up yet, before anything is copied. [default: none]",
            member="wait_for_hosts_s",
            low=0,
            default=0.0,
            launchers=NO_ENGINES,
        ),
        _limit("--suspect-after", "suspect_s", "Silence after which a host is reported as suspect.", facts.SUSPECT_S),
        _limit(
            "--lost-after",
            "lost_s",
            "Silence after which a host is lost (exit code 7); its own tasks end half as long after.",
            facts.LOST_S,
        ),
        _limit(
            "--stall-after",
            "stall_after_s",
            "Seconds without a sign of life after which a worker is said to be stalled; 0: never.",
            facts.STALL_AFTER_S,
            low=0,
        ),
        flag(
            "--reconnect",
            "Connect again to a host whose connection is cut; its tasks go on for 1.5 times --lost-after meanwhile.",
        ),
        seconds(
            "--op-timeout",
            "Seconds that one store call may take. [default: 1800]",
            variable="DISTRUN_OP_TIMEOUT",
            member="op_timeout_s",
        ),
    ),
    "Leaving it": (
        flag("--detach", "Print the job's id on stdout when all tasks run, and leave it: distrun attach."),
        flag("--in-scope", "", member="", hidden=True, typed_only=True),
    ),
    "Output": (
        text("--name", "A name for the job.", reads=_job_name),
        words(
            "--label",
            "Label of the job, by which status and kill choose. Repeatable.",
            "K=V",
            key="labels",
            reads=parse_label,
        ),
        text(
            "--run-dir",
            "Keep the job's folder below DIR.",
            "DIR",
            default=None,
            reads=lambda _, text: Path(text),
            is_path=True,
        ),
        size(
            "--log-limit",
            "Keep about so much of each task's log, its beginning and its end (100M, 2G, all). [default: 1G]",
            low=1024**2,  # several chunks of output
            default=1024**3,
        ),
        count(
            "--metrics-port", "Answer Prometheus at this port of the coordinator; 0: any free one.", low=0, high=65535
        ),
        text("--metrics-address", f"The address for that. [default: {facts.LOOPBACK}]", "A", reads=_address),
        words(
            "--show",
            "Print only what this task (worker-0) or role writes, or errors: all stderr. Logs keep all; repeatable.",
            "WHAT",
            key="shows",
            member="",
        ),
        flag("--no-prefix", "Print tasks' output unchanged.", member=""),
        flag(
            "--dry-run",
            "Show what would be started, and start nothing; -v shows each task.",
            member="",
            typed_only=True,
        ),
        flag("--json", "The dry run, or the outcome (last line), as JSON on stdout.", key="as_json", member=""),
        flag("-q/--quiet", "Print errors only, and the tasks' output.", member=""),
        times("-v/--verbose", "Say more; -vv: also every protocol message.", key="verbosity", member=""),
    ),
}
"""All rows in the order of the help, by group."""
ROWS = tuple(itertools.chain.from_iterable(TABLE.values()))
BY_KEY: Mapping[str, Option] = {row.key: row for row in ROWS}


def members(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the options say of the members of a request, those of its parts (`limits`) in dicts of their own."""
    found: dict[str, Any] = {}
    for row in ROWS:
        *parts, name = row.member.split(".")
        part = found
        for each in parts:
            part = part.setdefault(each, {})
        if name:
            part[name] = options[row.key]
    return found


# ---------------------------------------------------------------------- which source decides


class Sourced(NamedTuple):
    """A value, as it would be typed, and where it was given."""

    value: Any
    """A text; of WORDS and the command a tuple of texts, of flags a bool, of TIMES an int."""
    origin: str
    places: tuple[tuple[Any, tuple[str, ...]], ...] = ()
    """Where files give it, the best source last: what has read the file (of `jobfile`), and the key with its tables."""


Layer = Mapping[str, Sourced]
"""What one source gives: values by the keys of options; and `command`, the words, or `run`, a script in their place."""

MERGED = ("env", "env_worker", "env_server", "env_scheduler")
"""Variables of tasks: those of all sources hold together, one by one."""
_SILENCED: Mapping[str, tuple[str, ...]] = {
    "hostfile": ("hosts",),
    "hosts": ("hostfile",),
    "quiet": ("verbosity",),
    "verbosity": ("quiet",),
    "command": ("run",),
    "run": ("command",),
    "shell": ("command", "run"),
}
"""By key: what does not count any more if a better source gives one of these."""


def user_path(env: Mapping[str, str]) -> str:
    """Return where the user's configuration file is, or would be. No side effects."""
    base = env.get("XDG_CONFIG_HOME", "")
    return os.path.join(base if os.path.isabs(base) else os.path.expanduser("~/.config"), "distrun", "config.toml")


def decide(layers: Sequence[Layer]) -> dict[str, Sourced]:
    """Return each value that some source gives, and its origin. No side effects.

    The first source wins. What is not given by any is not in the answer.
    """
    found: dict[str, Sourced] = {}
    for layer in layers:
        better = frozenset(found)
        for key, given in layer.items():
            if key in MERGED and key in better:  # later words win
                known = found[key]
                words, places = (*given.value, *known.value), (*given.places, *known.places)
                found[key] = Sourced(words, f"{given.origin}, {known.origin}", places)
            elif better.isdisjoint((key, *_SILENCED.get(key, ()))):
                found[key] = given
    return found


def of_environment(env: Mapping[str, str]) -> Layer:
    """Return what the variables `DISTRUN_...` give; the name of each is the origin. No side effects.

    Variables of the table `environ`, such as DISTRUN_OP_TIMEOUT, take effect by themselves: their values are no more
    than a reason not to take others.

    Raises:
        UsageError: one is not what its option takes.
    """
    found: dict[str, Sourced] = {}
    for row in ROWS:
        name = row.variable or "DISTRUN_" + "_".join(row.path).replace("-", "_").upper()
        known = environ.BY_NAME.get(name)
        text = env.get(name, "")
        if not text or row.typed_only or row.kind == WORDS or (known and known.use != environ.READ):
            continue
        value: Any = text
        if known is None:  # else who acts on it checks it
            if row.kind in (FLAG, SWITCH, TIMES):
                most = 9 if row.kind == TIMES else 1
                number = _count(name, text, 0, most)
                value = number if row.kind == TIMES else bool(number)
            else:
                row._replace(name=name).read(text)
        found[row.key] = Sourced(value, name)
    return found
