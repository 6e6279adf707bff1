"""What the three roles share: the events they are told and the actions they answer with.

A role decides and never acts: `handle(event, now)` and `tick(now)` return actions, the loop performs
them. None of this touches a socket, a clock or an array.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Protocol, Union

from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import RuntimeFault
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Message

Link = str

SCHEDULER_LINK = "scheduler"


def signal_name(number: int) -> str:
    """Return the name of a signal, `SIGTERM`; its number where it has none. Pure."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Welcomed:
    """A connection is proven: `peer` is who is there."""

    link: Link
    peer: NodeIdentity | None
    """None on a connection that we opened: we knew whom we called."""


@dataclass(frozen=True)
class TurnedAway:
    """The other side refused us, or could not prove itself; the connection is closed."""

    link: Link
    reason: str


@dataclass(frozen=True)
class Denied:
    """Somebody who wanted to join was turned away, by this node."""

    reason: str
    address: str = ""
    """Where from; empty: `reason` says who it was."""
    is_foreign: bool = False
    """It speaks ZeroMQ, but another protocol: ps-lite, most likely."""
    is_same_user: bool | None = None
    """Whether it is a process of this user on this machine; None: not known, or another machine."""


@dataclass(frozen=True)
class Broken:
    """A proven connection ended."""

    link: Link
    reason: str


@dataclass(frozen=True)
class MessageReceived:
    """A message came in on a proven connection."""

    link: Link
    message: Message


@dataclass(frozen=True)
class CallSubmitted:
    """The process's own threads want something (workers only): a `worker.Ask` or a `worker.Goodbye`."""

    what: Any


@dataclass(frozen=True)
class WorkDone:
    """The engine has done `work`; `error` is what it raised, else `value` what it returned."""

    work: Any
    error: BaseException | None = None
    traceback: str = ""
    value: Any = None


@dataclass(frozen=True)
class SignalReceived:
    """The process was told to stop, by a signal."""

    signal: int


@dataclass(frozen=True)
class Failing:
    """This process cannot go on: the engine cannot use its device any more."""

    reason: str


Event = Union[Welcomed, TurnedAway, Denied, Broken, MessageReceived, CallSubmitted, WorkDone, SignalReceived, Failing]


@dataclass(frozen=True)
class Connect:
    """Open a connection and prove ourselves on it; `Welcomed` or `TurnedAway` follows."""

    link: Link
    endpoint: str


@dataclass(frozen=True)
class Send:
    """Send a message on a proven connection."""

    link: Link
    message: Message


@dataclass(frozen=True)
class Log:
    """One line for whoever watches; `level` is a name of the logging module."""

    level: str
    text: str


@dataclass(frozen=True)
class Publish:
    """Tell the agent facts about this task."""

    facts: Mapping[str, str]


@dataclass(frozen=True)
class Work:
    """Something for the engine: it touches arrays.

    Work is done in the order in which it was asked for, and reported in that order.
    """

    what: Any
    reports: bool = field(default=False, kw_only=True)
    """Whether the role is told what came of it, at once or later, by `Done`."""
    holds: Link = field(default="", kw_only=True)
    """A connection whose later events depend on what comes of the work: the role is told of them behind `Done`."""


@dataclass(frozen=True)
class Resolve:
    """A request (`request.Request`) was answered or failed: whoever waits for it gets `replies`, or `error` raised."""

    request: Any
    replies: tuple[Message, ...] = ()
    error: RuntimeFault | None = None


@dataclass(frozen=True)
class Note:
    """Tell a request what it waits for."""

    request: Any
    text: str
    awaited: tuple[str, ...] = ()
    """The tasks that it waits for."""
    key: str = ""


@dataclass(frozen=True)
class Finish:
    """The role's part is over; the process ends with this code once what was sent has left."""

    code: int
    reason: str = ""


@dataclass(frozen=True)
class Resume:
    """Go on with what happened on a connection while work held it. The loop itself says so."""

    link: Link


Action = Union[Connect, Send, Log, Publish, Work, Resolve, Note, Finish, Resume]


class Role(Protocol):
    """A scheduler, server or worker as the loop sees it."""

    @property
    def me(self) -> NodeIdentity:
        """Who this node is; its rank may become known later."""
        ...

    def start(self, now: float) -> list[Action]:
        """Return what to do first."""
        ...

    def admit(self, peer: NodeIdentity) -> str:
        """Return why a proven peer may not come in; empty: it may."""
        ...

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, any epoch) and return what follows from it."""
        ...

    def tick(self, now: float) -> list[Action]:
        """Return what the passing of time demands; called at least every second."""
        ...


@dataclass
class Deadline:
    """A moment that, once set, is due exactly once."""

    at: float | None = None

    def set(self, at: float) -> None:
        """Be due at `at`, unless it is set already."""
        if self.at is None:
            self.at = at

    def is_due(self, now: float) -> bool:
        """Whether it passed; true once."""
        if self.at is None or now < self.at:
            return False
        self.at = None
        return True


FIRST_NOTE_S = 2.0
"""How long a wait lasts until whoever waits is told, quietly, what for."""
WAITING_S = 30.0
"""How often it is told so from then on, and says it."""


@dataclass
class WaitNotice:
    """When somebody who waits is to be told what for."""

    since: float
    told: float | None = None

    @property
    def next(self) -> float:
        """When it is time."""
        return self.since + FIRST_NOTE_S if self.told is None else self.told + WAITING_S

    def is_due(self, now: float) -> bool:
        """Whether it is time; true once in every period."""
        if now < self.next:
            return False
        self.told = now
        return True


@dataclass
class Interval:
    """Something to do every `every_s` seconds, first that long after the first asking."""

    every_s: float
    next: float | None = field(default=None)

    def is_due(self, now: float) -> bool:
        """Whether it is time; true once in every period."""
        if self.next is None:
            self.next = now + self.every_s
            return False
        if now < self.next:
            return False
        self.next = now + self.every_s
        return True
