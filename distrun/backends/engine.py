"""What one queue system or launcher of processes (an engine) must be able to do, and the values that pass.

An engine is asked for room, and starts one agent at each place of the job by the bootstrap, which dials the
coordinator. It decides nothing about the job: environment, logs, ranks, failures and the end are one code path for all
backends. `queue.QueueBackend` makes a backend of it. Nothing of the user's is in a script, a spec or an argument.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import operator
import os
import re
import subprocess
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from distrun.backends.bootstrap import Bootstrap
from distrun.errors import SubmitError, UsageError
from distrun.request import EngineOptions, Needs
from distrun.templates import folder
from distrun_runtime.contract.plan import SERVER, Resources
from distrun_runtime.coordinator.listener import OPEN

if TYPE_CHECKING:
    from distrun.hosts import Inventory

QUEUED = "queued"
RUNNING = "running"
"""All places of the job have their nodes."""
ENDED = "ended"

SECRET = "{secret}"
"""Stands for the enrolment secret where a script is only shown."""
MARK = "distrun-"
"""Every marker begins so."""
MIB = 1 << 20
SHOWN = 20
"""Names that a message lists at most."""


class EngineError(SubmitError):
    """The engine does not answer, or refuses what it is asked. What it said is in the message."""


@dataclass(frozen=True)
class RoleGroup:
    """The tasks of one role. The scheduler has no group: it runs beside the first task of the job."""

    role: str
    count: int
    needs: Needs
    """What each task asks for."""


@dataclass(frozen=True)
class Preparation:
    """What `Engine.prepare` has found. Engines add fields of their own."""

    note: str = ""
    """What the user is told before the job is submitted."""
    kind: str = ""
    """What the job is in the engine, in the engine's word, if there are several kinds. -v tells it."""


@dataclass(frozen=True)
class Submission:
    """A job that an engine is asked to find room for: all that its script depends on."""

    job: str
    marker: str
    """What the job is called in the engine, by which it is found again: `distrun-JOB-NONCE`, at most 56 characters, of
    a-z, 0-9 and `-`."""
    groups: tuple[RoleGroup, ...]
    """Servers, if there are any, then workers."""
    options: EngineOptions
    bootstrap: Bootstrap
    folder: Path
    """On this machine, mode 0700: script and secret are written there. Nodes may not see it."""
    cwd: str
    """Where tasks will start; nodes may not have it yet."""
    python: str = "python3"
    """Interpreter of the agents on the nodes, 3.8 or newer."""
    secret: str = field(default=SECRET, repr=False)
    """The enrolment secret. Into a file or a script that only the user and the engine can read; never an argument."""
    hosts: Inventory | None = None
    """The hosts that the user named, for engines that are given them."""
    outer: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment of the launching process: an outer allocation is in it."""
    found: Any = Preparation()
    """What `Engine.prepare` has found: a `Preparation` of that engine's."""
    oversubscribe: bool = False
    """Hosts that are given may get more tasks than they have slots."""
    is_dry: bool = False
    """It is only shown."""

    @property
    def secret_file(self) -> Path:
        """A file of mode 0600 with the secret, which is there when `Engine.submit` is called."""
        return self.folder / "secret"

    @property
    def tasks(self) -> int:
        """Servers and workers."""
        return sum(group.count for group in self.groups)

    @property
    def servers(self) -> int:
        """The servers alone."""
        return sum(group.count for group in self.groups if group.role == SERVER)


class Script(NamedTuple):
    """What will be submitted; the dry run shows it."""

    files: Mapping[str, str] = {}
    """Text by name: written into `Submission.folder` with mode 0700 before `commands` are executed."""
    commands: tuple[tuple[str, ...], ...] = ()
    """Exactly what is executed, or, for an engine that is spoken to by HTTP, method and address."""


class Handle(NamedTuple):
    """A job in an engine. It survives JSON, in the job's folder."""

    engine: str
    id: str
    """What the engine calls it."""
    more: Mapping[str, Any] = {}
    """JSON-able values of the engine's own."""


class Grant(NamedTuple):
    """A place that an engine gives to the job: one agent."""

    place: str
    """What the bootstrap there claims: unique in the job."""
    node: str
    """The name of the machine. Several places may be on one."""
    takes: Mapping[str, int] = {}
    """How many tasks of a role it takes; a role that is missing: none. Empty: any role, `cores` say how many."""
    cores: int = 0
    """0: not said; then it takes any number of tasks."""
    resources: Resources = Resources()
    most: int = 0
    """What `cores` may come to where places are oversubscribed; 0: no limit."""


class QueueStatus(NamedTuple):
    """The state of a job in its engine."""

    state: str
    """QUEUED, RUNNING or ENDED."""
    text: str = ""
    """Why it waits or how it ended, a few words: `position 3 in all.q`."""
    grants: tuple[Grant, ...] = ()
    """Of a job that is RUNNING: all its places."""
    gone: Mapping[str, str] = {}
    """Places whose process or node is known to be gone, and why."""
    why: Explanation | None = None
    """Of a job that has ENDED before it was RUNNING, if that is known: its time was over, it was cancelled."""


class Explanation(NamedTuple):
    """Why an engine ended a job or a place."""

    code: int
    """137 out of memory, 124 time limit, 143 cancelled from outside, 7 preempted or node lost."""
    text: str
    """`Slurm: out of memory (MaxRSS 2.1 GiB of 2 GiB); raise --worker-memory`."""
    lost: str = ""
    """What failed, a node or the engine's own process: it is the cause, whatever task or agent ended first. Empty: not
    known, or nothing of that kind."""


class FoundJob(NamedTuple):
    """A job of this user that `Engine.find` found."""

    handle: Handle
    marker: str
    state: str
    """In the engine's words."""


class CheckResult(NamedTuple):
    """What `distrun doctor --launcher X` says of one thing."""

    ok: bool
    text: str
    """What was looked for, and what was found."""
    fix: str = ""
    """What to type, or whom to ask for what. Shown only where it is not `ok`."""


class Engine(ABC):
    """One queue system. Methods that talk to it may take `ANSWER_S`; each call may come from another thread."""

    name: str
    """As in `--launcher NAME`."""
    needs_hosts: bool = False
    """The user must say which hosts, with -H or --hosts."""
    takes_hosts: bool = False
    """The user may say which hosts."""
    takes: tuple[str, ...] = ()
    """Options of other engines, such as `--docker-image`, that it takes, too: `EngineOptions.own` has them."""

    options: EngineOptions = EngineOptions()
    """For `find` and `examine`, where there is no submission: what the user said, and the configuration file."""
    keeps_ended: bool = False
    """Whether it keeps a job that has ended until `cancel` removes that."""
    dial_s: float | None = None
    """How long its agents may take to reach the coordinator once all places are there; None: as long as to start."""
    unreachable: str = OPEN
    """What to do where they do not."""
    shows: str = ""
    """A pattern of variables of outer jobs, `SLURM_*`, that tasks of this engine get all the same, but for `hides`."""
    hides: tuple[str, ...] = ()
    """Names and `PREFIX*` patterns that say which process of the engine the agent is: tasks do not get them."""

    def prepare(self, submission: Submission) -> Preparation:
        """Ask the engine what the script depends on, and refuse what it cannot do. Changes nothing anywhere.

        Called for a dry run, too (`is_dry`): then an engine that is not here is no error, and names stand for answers.

        Raises:
            UsageError: an unknown queue, more memory than any node has ...: what was found, and what to type.
            EngineError: the engine does not answer.
        """
        return Preparation()

    @abstractmethod
    def render(self, submission: Submission) -> Script:
        """Return what `submit` will execute. No side effects."""

    def submit(self, submission: Submission, script: Script) -> Handle:
        """Submit the job; `script` is what `render` gave, its files are written.

        By default the script's commands are executed one after another, and the job is called by its marker.

        Raises:
            EngineError: it was refused; nothing of it is left in the engine.
        """
        handle = Handle(self.name, submission.marker)
        try:
            for argv in script.commands:
                ask(argv)
        except EngineError:
            with contextlib.suppress(EngineError):  # what was said first counts
                self.cancel(handle)
            raise
        return handle

    @abstractmethod
    def look(self, handle: Handle) -> QueueStatus:
        """Return how the job stands. Called every few seconds. A job that the engine does not know has ENDED.

        Raises:
            EngineError: the engine does not answer just now.
        """

    def handle(self, submission: Submission) -> Handle | None:
        """Return what a job will be called; None: that is known only when it has been submitted."""
        return None

    def is_gone(self, handle: Handle) -> bool:
        """Return whether the engine keeps nothing of a job that `cancel` would remove. Raises EngineError."""
        return self.look(handle).state == ENDED

    @abstractmethod
    def cancel(self, handle: Handle) -> None:
        """Have the engine end the job; one that has ended or is unknown is no error. Raises EngineError."""

    def explain(self, handle: Handle, place: str) -> Explanation | None:
        """Return why the engine ended `place` (empty: the job); None: it records nothing of that. At most 5 s."""
        return None

    def on_node(self, node: str, argv: Sequence[str]) -> tuple[str, ...]:
        """Return what runs a program on a node with our standard streams, in a job of its own; empty: nothing can."""
        return ()

    @abstractmethod
    def find(self) -> Sequence[FoundJob]:
        """Return this user's jobs that are queued or run and whose marker begins with MARK. Raises EngineError."""

    @abstractmethod
    def examine(self) -> Iterable[CheckResult]:
        """Return or yield what is there of what a launch needs, and what is missing. See `examined`.

        Raises:
            UsageError, EngineError: the rest cannot be looked for.
        """


def examined(engine: Engine) -> Iterator[CheckResult]:
    """Yield what `examine` finds; what it raises is the last finding."""
    try:
        yield from engine.examine()
    except (EngineError, UsageError) as err:
        yield CheckResult(False, str(err), err.hint)


ANSWER_S = 20.0
"""How long an engine may take to answer one question."""


def tries(limit_s: float) -> Iterator[None]:
    """Yield at once, and again after pauses that grow from 0.1 s to 1 s, until `limit_s` seconds are over."""
    until = time.monotonic() + limit_s
    pause_s = 0.1
    yield
    while (left_s := until - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 1.0)
        yield


class Answer(NamedTuple):
    """How a command of an engine has ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """What it has said of a failure, in one line."""
        return " ".join(self.err.split()) or f"exit code {self.code}"


def one_line(text: str, most: int = 400) -> str:
    """Return what an engine has said in one line, which ends with `...` if it would be longer than `most`."""
    return textwrap.shorten(text, most, placeholder="...")


def execute(
    argv: Sequence[str],
    hint: str = "",
    *,
    text: str = "",
    env: Mapping[str, str] | None = None,
    limit_s: float = ANSWER_S,
) -> Answer:
    """Execute a command of an engine and return how it ended.

    Args:
        hint: what to do where the command is missing.
        text: its standard input.
        env: its whole environment; None: this process's.

    Raises:
        EngineError: it is not there, or does not answer within `limit_s` seconds.
    """
    try:
        done = subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", env=env, timeout=limit_s, check=False
        )
    except FileNotFoundError:
        raise EngineError(f"{argv[0]} is not on this machine", hint) from None
    except OSError as err:
        raise EngineError(
            f"{argv[0]} cannot be executed: {err.strerror}", f"see what it is: ls -l $(command -v {argv[0]})"
        ) from err
    except subprocess.TimeoutExpired:
        words = " ".join(argv[:3])
        fix = "it may be busy: type that command by hand, and launch again when it answers"
        raise EngineError(f"{words}: no answer within {limit_s:g} s", fix) from None
    return Answer(done.returncode, done.stdout, done.stderr)


def ask(argv: Sequence[str], hint: str = "") -> str:
    """Return what a command of an engine prints. Raises EngineError with what it says if it fails, and with `hint`."""
    told = execute(argv, hint)
    if told.code:
        raise EngineError(f"{argv[0]} says: {told.said}", hint)
    return told.out


def text_of(path: Path | str, size: int = 1 << 20) -> str:
    """Return the last `size` bytes of what was written to a file; empty: there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def hint_of(said: str, hints: Mapping[str, str]) -> str:
    """Return what to do about what an engine has said: the first of the hints whose words (lower case) are in it."""
    return next((hint for words, hint in hints.items() if words in said.lower()), "")


def marker(job: str, nonce: str) -> str:
    """Return what a job is called in an engine. No side effects."""
    return f"{MARK}{re.sub('[^a-z0-9]+', '-', job.lower()).strip('-')[:30].strip('-')}-{nonce}"


def template(name: str, options: EngineOptions) -> str:
    """Return the text of the template `name`: the user's own (`template =` of the engine's section in the
    configuration file), else the one that comes with distrun.

    Raises:
        UsageError: the user's cannot be read.
    """
    own = options.config.get("template", "")
    if own:
        try:
            return Path(own).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as err:
            raise UsageError(f"template = {own}: it cannot be read: {err}", "correct the configuration file") from err
    path = folder() / name
    if not path.is_file():
        raise UsageError(f"the template {name} is missing from this installation", "install distrun again")
    return path.read_text(encoding="utf-8")


def refuse_queue_options(
    options: EngineOptions, why: str, instead: str, more: Mapping[str, object] = MappingProxyType({})
) -> None:
    """Raise UsageError for --queue, --project and the options of `more`, if they are given. No side effects."""
    given = {"--queue": options.queue, "--project": options.project, **more}
    for option, value in given.items():
        if value:
            raise UsageError(f"{option} has no meaning here: {why}", f"leave {option} out, or {instead}")


def merged(spec: Mapping[str, Any], args: Sequence[str], example: str) -> dict[str, Any]:
    """Return a spec in JSON with the objects of --engine-arg laid over it.

    `example`: what could be typed, for messages. Raises UsageError: one is no object in JSON.
    """
    for arg in args:
        try:
            more = json.loads(arg)
        except ValueError as err:
            raise UsageError(f"--engine-arg {arg}: expected JSON: {err}", example) from None
        if not isinstance(more, dict):
            raise UsageError(f"--engine-arg {arg}: expected a JSON object", example)
        spec = _over(spec, more)
    return dict(spec)


def _over(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        name: _over(one[name], value) if isinstance(value, dict) and isinstance(one.get(name), dict) else value
        for name, value in other.items()
    }
    return {**one, **both}


def check_known(option: str, what: str, name: str, known: Sequence[str]) -> None:
    """Check a name that the user gave an engine. `what`: how an unknown one is told of, `Slurm has no partition`.

    Raises:
        UsageError: it is not among those that the engine knows, of which the first SHOWN are told.
    """
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        shown = ", ".join(known[:SHOWN]) or "none"
        guess = f"did you mean {near[0]}?" if near else f"name another with {option}"
        raise UsageError(f"{option} {name}: {what} {name}; it has: {shown}", guess)


def fits(needs: Needs, nodes: Iterable[Needs]) -> bool:
    """Return whether one of the nodes has as much as is needed."""
    return any(all(map(operator.le, needs, node)) for node in nodes)


def check_size(groups: Sequence[RoleGroup], nodes: Sequence[Needs], where: str, hint: str) -> None:
    """Check that for each role there is a node that has room for one task, if all else were free.

    Args:
        groups: the roles.
        nodes: what each node has in all; none: it is not known.
        where: what the nodes are, for messages: `node of debug`.
        hint: what the user can do.

    Raises:
        UsageError: a task asks for more than any node has.
    """
    for group in groups if nodes else ():
        most = Needs(*map(max, zip(*nodes, strict=True)))
        for option, asked, found in zip(("cores", "memory", "gpus"), group.needs, most, strict=True):
            if asked > found:
                number, limit = (f"{-(-n // MIB)} MiB" if option == "memory" else n for n in (asked, found))
                text = f"--{group.role}-{option}: {number} asked for, but no {where} has more than {limit}"
                raise UsageError(text, hint)
        if not fits(group.needs, nodes):
            text = f"no {where} has the cores, the memory and the GPUs that one {group.role} asks for together"
            raise UsageError(text, hint)
