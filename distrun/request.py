"""The validated request of a launch, and the variables that the user gives to its tasks. No side effects."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distrun.errors import UsageError
from distrun.options import BY_KEY, ROWS
from distrun_runtime.contract import environ
from distrun_runtime.contract.dataclass import dataclass, written
from distrun_runtime.contract.plan import ROLES, SCHEDULER, Limits

if TYPE_CHECKING:
    from distrun.hosts import Inventory
    from distrun.sync.rules import CopyRules

BUNDLED, COMMAND = BY_KEY["ps"].choices
"""Who runs servers: distrun's own servers and scheduler; the user's command in every role, as launch.py did."""

FORWARDED_PREFIXES = (
    "BYTEPS_",
    "DMLC_",
    "GLOO_",
    "JAX_",
    "KMP_",
    "MXNET_",
    "NCCL_",
    "OMP_",
    "PS_",
    "TORCH_",
    "UCX_",
    "XLA_",
)
"""Beginnings of the names that are forwarded; and the tuning rows of the table of variables."""

JOINED = ("LD_LIBRARY_PATH",)
"""Lists of folders: they do not replace what a host has (`Plan.joined`)."""
FORWARDED_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", *JOINED)
"""What launch.py gave its tasks over ssh besides; with the session token, without which temporary keys do not work."""

FILED = r"([A-Za-z_]\w*)@(.+)\Z"
"""A word of `--env` that names a file with the variable's value."""

_MERGED = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "PYTHONPATH", "PYTHONUNBUFFERED")
"""Variables that distrun sets with the user's value in mind, so that giving them is no mistake."""


class Setting(NamedTuple):
    """One variable that the user gives to tasks."""

    name: str
    value: str
    role: str = ""
    """The role it is for; empty: every role."""
    hidden: bool = False
    """The value travels in `Secrets` and is never shown: a secret-looking name, a forwarded or a filed value."""
    joins: bool = False
    """It is a list of folders that is joined with what the host has."""


class Needs(NamedTuple):
    """What each task of a role asks an engine for. What is not given is left to the engine."""

    cores: int = 0
    """0: not given; counted as one."""
    memory: int = 0
    """Bytes."""
    gpus: int = 0


class EngineOptions(NamedTuple):
    """What the user said to the engine (kubernetes, mpi, sge, slurm, yarn) that finds room for the job."""

    queue: str = ""
    time_s: float | None = None
    """How long the engine lets the job run."""
    project: str = ""
    """The account or project that is charged."""
    args: tuple[str, ...] = ()
    """`--engine-arg`: words that are handed to the engine's own command, or its kind of options, as they are."""
    worker: Needs = Needs()
    server: Needs = Needs()
    own: Mapping[str, Any] = {}
    """Options of one engine only, by name without dashes: `pe`, `yarn_rm`, `volume` ... Texts, or several texts."""
    config: Mapping[str, str] = {}
    """The engine's section of the configuration file."""

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> EngineOptions:
        """Return what `written` gave. Raises TypeError, KeyError."""
        needs = {role: Needs(**value[role]) for role in ("worker", "server")}
        return EngineOptions(**{**value, "args": tuple(value["args"]), **needs})


@dataclass(frozen=True)
class JobRequest:
    """What the user asked for: the options of `distrun launch`, and what it found on the submitting machine.

    Raises:
        UsageError: a count, time, name or range that is wrong, or no command.
    """

    command: tuple[str, ...]
    """The words that the user typed."""
    workers: int
    servers: int
    cwd: str
    launcher: str = "local"
    """Name of the backend."""
    hosts: Inventory | None = None
    """The hosts that the user named; None: none."""
    reach: Mapping[str, str] = field(default_factory=dict)
    """The user's options for reaching hosts, as `Backend.reach` takes them."""
    outer: Mapping[str, str] = field(default_factory=dict)
    """The environment of this process."""
    ps: str = BUNDLED
    shell: bool | None = None
    """--shell, --no-shell, or None: decided by the command."""
    check_imports: bool = False
    """Agents look for the modules that the script imports."""
    name: str = ""
    labels: tuple[str, ...] = ()
    """`K=V` each."""
    settings: tuple[Setting, ...] = ()
    """In the order of precedence: a later one wins, one for a role wins over one for all."""
    python: str = ""
    """Interpreter of the bundled servers; empty: the one that runs distrun."""
    interface: str = ""
    subnet: str = ""
    port_range: str = ""
    coordinator_addresses: tuple[str, ...] = ()
    """Where agents that dial back reach the coordinator; empty: at any address of its machine."""
    coordinator_host: str = ""
    """Host on which the coordinator of a detached job runs; empty: the first of the job."""
    server_imports: tuple[str, ...] = ()
    """Modules with the user's update rules, which our servers import."""
    server_device: str = ""
    """Where our servers keep values: `auto`, `cpu`, `gpu` or `gpu:N`; empty: they decide."""
    scheduler_host: str = ""
    limits: Limits = field(default_factory=Limits)
    reconnect: bool = False
    """Tasks of a host whose connection is cut go on until its agent's lease ends, and the connection is made again."""
    wait_for_hosts_s: float = 0.0
    """How long hosts that are not up yet are waited for."""
    op_timeout_s: float | None = None
    start_timeout_s: float | None = None
    """For the stores; `limits.start_s` is the launcher's own."""
    keep_outer_env: bool = False
    placement: str = BY_KEY["placement"].default
    oversubscribe: bool = False
    gpus_per_worker: int = 0
    """How many GPUs each worker sees, which no other worker does; 0: all that the hosts file gives its host."""
    forward_signals: tuple[str, ...] = ()
    """Signals that workers are given (`Plan.forward_signals`)."""
    activate: str = ""
    """Shell text whose environment the tasks get, run once on each host."""
    activated: tuple[str, ...] | None = ()
    """Folders of environments that it activates; None: they are unknown (`activation.folders`)."""
    sync_dst_dir: str = ""
    """Folder on each host that the current directory is copied to, and where tasks then start; empty: no copy."""
    sync_rules: CopyRules | None = None
    """What of `cwd` is copied; None: nothing."""
    sync_delete: bool = False
    """Files that only a host has are deleted there."""
    run_dir: Path | None = None
    """Folder for the job's folder; None: the job store's."""
    log_limit: int = 0
    """Bytes that are kept of each task's log, about; 0: all."""
    metrics_port: int | None = None
    """Port at which the coordinator answers Prometheus; 0: any free one; None: it does not."""
    metrics_address: str = ""
    """The address for that; empty: the loopback address."""
    engine: EngineOptions = field(default_factory=EngineOptions)
    """For launchers that are engines."""
    doctor: str = ""
    """What the user types to have the hosts examined, for messages."""
    detach: bool = False
    """The job goes on without the terminal that launches it."""
    given: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """The options that were given, by key, as `distrun rerun` takes them; without the values of secrets."""
    dry_run: bool = False
    """The plan gets a placeholder for its id and no token, and nothing is written."""

    def to_json(self) -> dict[str, Any]:
        """Return what request.json holds: JSON-able values. Hidden variables are named, and their values left out."""
        variables = [
            {"name": each.name, "role": each.role, "value": None if each.hidden else each.value}
            for each in self.settings
        ]
        rules = self.sync_rules
        engine = {} if self.engine == EngineOptions() else {"engine": written(self.engine)}
        plain = {row.member: getattr(self, row.member) for row in ROWS if row.member and "." not in row.member}
        return {
            **engine,
            "command": list(self.command),
            "cwd": self.cwd,
            "hosts": None if self.hosts is None else list(self.hosts.names),
            "reach": dict(self.reach),
            "variables": variables,
            "limits": self.limits._asdict(),
            "activate": self.activate,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()},
            "sync_dst_dir": self.sync_dst_dir if rules is not None else "",
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "given": dict(self.given),
        }

    def __post_init__(self) -> None:
        if not self.command or not self.command[0]:
            typed = f"distrun launch -n {max(1, self.workers)} python train.py"
            raise UsageError("there is no command to run", f'{typed}; in a job file: command = ["python", "train.py"]')
        for row in ROWS:
            if row.member:
                row.check(self)
        BY_KEY["start_timeout"].read(self.limits.start_s)
        for is_broken, text, fix in RULES:
            if is_broken(self):
                raise UsageError(text.format(self), fix.format(self))
        for word in self.command:
            if "\0" in word:
                raise UsageError(f"the command holds a NUL character in {word!r}; no program can be given one")

    @property
    def has_servers(self) -> bool:
        """Whether the job has servers, and so a scheduler."""
        return self.servers > 0

    @property
    def has_bundled_servers(self) -> bool:
        """Whether its servers are distrun's own."""
        return self.servers > 0 and self.ps == BUNDLED

    @property
    def adds_on_hosts(self) -> bool:
        """Whether workers of one host add what they push before it leaves the host."""
        if not self.has_bundled_servers:
            return False
        given = {each.name: each.value for each in self.settings if each.role in ("", SCHEDULER)}
        return bool(environ.read("DISTRUN_HOST_SUMS", given))


RULES: tuple[tuple[Callable[[JobRequest], object], str, str], ...] = (
    (
        lambda asked: asked.limits.lost_s < asked.limits.suspect_s,
        "--suspect-after {0.limits.suspect_s:g} is more than --lost-after {0.limits.lost_s:g}",
        "a host is first suspect, then lost: lower --suspect-after, or raise --lost-after",
    ),
    (
        lambda asked: asked.reconnect and asked.launcher == "local",
        "--reconnect: a job on this machine has no connections that could be cut",
        "leave it out, or name hosts with -H FILE or --hosts a,b",
    ),
    (
        lambda asked: asked.server_imports and not asked.has_bundled_servers,
        "--server-import: this job has no servers of distrun's own that could import {0.server_imports[0]}",
        "leave it out, or have some (-s 1 or more, and no --ps command)",
    ),
    (
        lambda asked: asked.server_device and asked.ps != BUNDLED,
        "--server-device {0.server_device}: with --ps {0.ps} the servers are your program's, which chooses for itself",
        "leave it out",
    ),
    (
        lambda asked: asked.server_device and not asked.has_servers,
        "--server-device {0.server_device}: this job has no servers (-s 0)",
        "leave it out, or have some (-s 1 or more)",
    ),
    (
        lambda asked: asked.metrics_address and asked.metrics_port is None,
        "--metrics-address: nothing is served without --metrics-port",
        "add --metrics-port 0, or leave it out",
    ),
    (
        lambda asked: asked.launcher not in ("local", "ssh") and 0 < asked.engine.worker.gpus < asked.gpus_per_worker,
        "--gpus-per-worker {0.gpus_per_worker}: each worker is to get {0.engine.worker.gpus} from the engine"
        " (--worker-gpus {0.engine.worker.gpus})",
        "--worker-gpus {0.gpus_per_worker}, or --gpus-per-worker {0.engine.worker.gpus}",
    ),
)
"""What options may not be together: whether a request breaks the rule, the error and the hint, `{0}` is the request."""


def given(settings: Sequence[Setting], role: str) -> dict[str, Setting]:
    """Return what the user gives to tasks of `role`, by name; one for the role wins over one for all."""
    return {setting.name: setting for wanted in ("", role) for setting in settings if setting.role == wanted}


def forwarded(outer: Mapping[str, str]) -> list[Setting]:
    """Return what goes to every task on another host from the environment `outer`, by name. No side effects.

    Over ssh a task starts with what its host's login gives it. What tunes a parameter server, a collective library or a
    thread pool is set where the job is launched, so it is forwarded, and so is what launch.py gave its tasks. Other
    variables that say where things are on this machine (PATH, HOME) are not, and neither are other secrets: those are
    forwarded only by name, with --env.

    Put them before the user's own settings, so that those win. Values are hidden: they travel beside the plan and
    are never shown. Left out: secrets but for those of `FORWARDED_NAMES`, what distrun sets itself, and what describes
    one task of an outer job.
    """
    return [
        Setting(name, outer[name], hidden=True, joins=name in JOINED) for name in sorted(outer) if is_forwarded(name)
    ]


def is_forwarded(name: str) -> bool:
    """Return whether a variable of that name is forwarded without being named. No side effects."""
    if name in FORWARDED_NAMES:
        return True
    row = environ.BY_NAME.get(name)
    wanted = name.startswith(FORWARDED_PREFIXES) or (row is not None and row.group == "tuning")
    is_stale = any(fnmatch.fnmatchcase(name, pattern) for pattern in environ.STALE)
    return wanted and not (is_stale or is_ours(name) or is_secret(name))


def parse_env(words: Iterable[str], outer: Mapping[str, str]) -> tuple[list[Setting], list[str]]:
    """Return the settings of `--env` words (`K=V`, `K`, `PFX*`, `K@FILE`) and notes for the user. Reads the files.

    `outer` is the environment that `K` and `PFX*` are taken from. A pattern never picks a name that distrun sets. What
    a file holds is hidden; the end of its last line is no part of it.

    Raises:
        UsageError: an empty name, or one that distrun sets itself; a file that cannot be read.
    """
    settings: list[Setting] = []
    notes: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        pair = re.match(r"([A-Za-z_]\w*):(.*)\Z", word, re.DOTALL)
        if pair and not equals and not fnmatch.filter(outer, name):
            shown = "..." if is_secret(pair[1]) else pair[2]
            raise UsageError(
                f"--env: expected NAME=VALUE, NAME or PREFIX*, found {f'{pair[1]}:{shown}'!r}",
                f"type --env {shlex.quote(f'{pair[1]}={shown}')}",
            )
        if filed := re.match(FILED, word, re.DOTALL):
            settings.append(
                setting("--env", filed[1], read_text(f"--env {filed[1]}", filed[2]).rstrip("\r\n"), hidden=True)
            )
        elif equals:
            settings.append(setting("--env", name, value))
        elif "*" in name:
            names = sorted(n for n in outer if fnmatch.fnmatchcase(n, name) and not is_ours(n))
            settings += [Setting(n, outer[n], hidden=True) for n in names]
            if not names:
                notes.append(f"--env {name!r}: no variable here has such a name")
        elif name in outer:
            settings.append(setting("--env", name, outer[name], hidden=True))
        else:
            setting("--env", name, "")
            notes.append(f"--env {name}: it is not set here, so there is nothing to forward")
    return settings, notes


def read_text(option: str, path: str) -> str:
    """Return what a file holds that an option names; stray bytes as Python's file names have them.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return Path(path).read_bytes().decode("utf-8", "surrogateescape")
    except (OSError, ValueError) as err:
        raise UsageError(f"{option}: cannot read {path!r}: {getattr(err, 'strerror', None) or err}") from err


def without_secrets(key: str, words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return words of `--env` or `--env-ROLE` that may be written to a file, and the names they lost. No side effects.

    Of a variable whose name looks like a secret's, the value is left out: it is forwarded from where the job is
    launched, or, if it is for one role, has to be given again.
    """
    kept, lost = [], []
    for word in words:
        name = re.split("[=:]" if key != "env" else "=", word, maxsplit=1)[0]
        if name == word or "@" in name or not is_secret(name):
            kept.append(word)
            continue
        lost.append(name)
        if key == "env":
            kept.append(name)
    return kept, lost


def parse_role_env(role: str, words: Iterable[str]) -> list[Setting]:
    """Return the settings of `--env-ROLE` words, `K=V` or launch.py's `K:V`. No side effects.

    Raises:
        UsageError: no value, an empty name, or one that distrun sets itself.
    """
    option = "--env-" + role
    settings = []
    for word in words:
        match = re.match(r"([^=:]*)[=:](.*)\Z", word, re.DOTALL)
        if match is None:
            raise UsageError(f"{option}: expected NAME=VALUE, found {word!r}")
        settings.append(setting(option, match.group(1), match.group(2), role=role))
    return settings


def parse_env_file(text: str, path: str) -> list[Setting]:
    """Return the settings of an env file: `KEY=VALUE` lines, `# comments`, `export`, quotes. No side effects.

    Unquoted values end at ` #` and lose white space at the end; 'single' quotes keep all; "double" quotes know
    backslash-n, -t, -r, -quote, -backslash and -$. Nothing is expanded. Values are not shown anywhere.

    Raises:
        UsageError: with file and line.
    """
    settings = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{path}:{number}"
        body = re.sub(r"\A\s*(export\s+)?", "", line)
        if not body or body.startswith("#"):
            continue
        name, equals, value = body.partition("=")
        if not equals:
            raise UsageError(f"{where}: expected KEY=VALUE, found {name.strip()!r}")
        settings.append(setting(where, name.strip(), _unquote(value.strip(), where), hidden=True))
    return settings


def setting(option: str, name: str, value: str, role: str = "", hidden: bool = False) -> Setting:
    """Return a checked setting. `option` is where it was given, for the message. No side effects.

    Raises:
        UsageError: a name that is empty, malformed or set by distrun itself; a NUL character.
    """
    if not name or re.search(r"[\s=\0]", name):
        raise UsageError(f"{option}: expected a variable's name, found {name!r}")
    if "\0" in value:
        raise UsageError(f"{option}: the value of {name} holds a NUL character")
    if is_ours(name):
        row = environ.BY_NAME[name]
        raise UsageError(
            f"{option}: {name} is set by distrun itself ({row.doc.rstrip('.')})",
            "leave it out; the other variables are yours",
        )
    return Setting(name, value, role, hidden or is_secret(name))


def is_ours(name: str) -> bool:
    """Return whether distrun sets this variable in tasks whatever the user says. No side effects."""
    row = environ.BY_NAME.get(name)
    return row is not None and row.use in (environ.GIVEN, environ.BOTH) and name not in _MERGED


def is_secret(name: str) -> bool:
    """Return whether a variable's name looks like a secret's. No side effects."""
    return any(word in name.upper() for word in environ.SECRET_WORDS)


def check_tuning(settings: Sequence[Setting], outer: Mapping[str, str]) -> None:
    """Check the tuning variables that tasks will see, in `outer` and in what the user gives.

    Raises:
        UsageError: one line for each wrong value: variable, value, host, what would be right.
    """
    wrong: dict[str, None] = {}
    for role in ROLES:
        seen = dict(outer)
        for name, chosen in given(settings, role).items():
            seen[name] = chosen.value
        wrong.update(dict.fromkeys(environ.check(seen)))
    if wrong:
        raise UsageError("\n".join(wrong))


def _unquote(value: str, where: str) -> str:
    quote = value[:1]
    if quote not in ("'", '"'):
        return re.sub(r"(\A|\s+)#.*\Z", "", value)
    pattern = r"'([^']*)'" if quote == "'" else r'"((?:[^"\\]|\\.)*)"'
    match = re.fullmatch(pattern + r"\s*(?:#.*)?", value)
    if match is None:
        # The value may be a secret: it is not repeated here.
        raise UsageError(f"{where}: the value's {quote} is not closed, or something follows it")
    if quote == "'":
        return match.group(1)
    known = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\(.)", lambda found: known.get(found.group(1), found.group(1)), match.group(1))
