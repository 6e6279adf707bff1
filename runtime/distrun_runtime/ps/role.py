"""What the three roles share: their configuration, the events they are told and the actions they answer with.

A role decides and never acts: `handle(event, now)` and `tick(now)` return actions, the loop performs
them. None of this touches a socket, a clock or an array.
"""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Union

from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.contract import facts, gpus
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import RuntimeFault, TimedOut
from distrun_runtime.ops.reduce import PLAIN, How
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.shards import Notes, Store, Turn

if TYPE_CHECKING:
    from distrun_runtime.transport.base import Form, Heartbeat
    from distrun_runtime.transport.faults import Faults

Link = str

SCHEDULER_LINK = "scheduler"


def signal_name(number: int) -> str:
    """Return the name of a signal, `SIGTERM`; its number where it has none. No side effects."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# What a node knows before it says anything: `node.read` reads it from the environment.


@dataclass(frozen=True)
class Config:
    """One node's start conditions."""

    role: str
    rank: int
    """-1: the scheduler gives one."""
    job: str
    workers: int
    servers: int
    root: str
    """The scheduler's address; empty for a scheduler that publishes its own."""
    root_port: int
    """0 for a scheduler that binds any port."""
    address: str
    """The address this node binds and tells its peers."""
    host: str
    token: bytes
    incarnation: int
    heartbeat: Heartbeat
    start_timeout_s: float
    op_timeout_s: float
    bigarray_bound: int
    """Elements from which a value is cut over all servers, if they are placed as MXNet does."""
    verbose: int
    faults: Faults
    """What is to go wrong on purpose with what this node receives."""
    partition: str = "size"
    """How the scheduler places values: `size`, or `mxnet`."""
    ports: tuple[int, ...] = ()
    """Ports that may be bound; empty: any."""
    stays: bool = False
    """The agent that started this scheduler or server also stops it: when all workers have ended it forgets them
    and waits for others, so that one job can run several scripts after each other."""
    server_imports: tuple[str, ...] = ()
    """Modules that users' rules may come from (servers)."""
    server_device: str = gpus.AUTO
    """Where a server keeps values: `auto`, `cpu`, `gpu` or `gpu:N`."""
    server_gpu_bytes: int = 0
    """Memory of a GPU that a server takes at most; 0: it decides."""
    local_rank: int = 0
    """Index of this server among those of its host or place, as far as a launcher says it."""
    worker_addresses: tuple[str, ...] = ()
    """Addresses of the hosts with workers (schedulers that a launcher started)."""
    paths: str = "segments"
    """How large values may travel beside messages: `segments` (shared memory), or `none`."""
    relays: int = 0
    """Servers of the job beyond `servers`, ranked behind them, that keep no values (`relay`)."""
    host_sums: bool = True
    """Whether workers of one host add what they push before it leaves the host (schedulers; they tell the workers)."""
    stages: bool = False
    """Whether a worker measures where the time of its calls goes."""
    resend_s: float = 0.0
    """How long an acknowledgement may take until a message is sent again; 0: none is expected."""

    @property
    def root_endpoint(self) -> str:
        """Where the scheduler listens, `tcp://address:port`."""
        from distrun_runtime.transport.base import endpoint  # not before there is a job

        return endpoint(self.root, self.root_port)

    def identity(self, endpoint: str, rank: int | None = None) -> NodeIdentity:
        """Return how this node introduces itself."""
        return NodeIdentity(
            job=self.job,
            role=self.role,
            rank=self.rank if rank is None else rank,
            incarnation=self.incarnation,
            host=self.host,
            pid=os.getpid(),
            endpoint=endpoint,
            workers=self.workers,
            servers=self.servers,
            resends=self.resend_s > 0,
        )


# What a server asks of its engine: work on arrays, done in the order in which it is asked for.


@dataclass(frozen=True, eq=False)
class Batch:
    """What one message brings to some shards of a store."""

    store: Store
    shards: Array
    """int64, each once."""
    message: Message
    entries: Array
    """Of the message, or those of the bucket that it names: one for each shard, unless `at` says which."""
    how: How = PLAIN
    at: Array | None = None
    """Which entries are those of `shards`; None: all, in their order."""


class EngineWork:
    """What `WorkEngine.do` takes. Its `match` says how each is done, that of `Server._done` what follows."""


@dataclass(frozen=True, eq=False)
class Fill(EngineWork):
    """The first values of shards."""

    batch: Batch
    link: str = ""


@dataclass(frozen=True, eq=False)
class TryFill(EngineWork):
    """Find out whether the store's rule, if it has one, takes the values of an INIT, and change nothing."""

    link: str
    store: Store
    message: Message


@dataclass(frozen=True, eq=False)
class Assign(EngineWork):
    """Other values for shards; the rule's state and rounds go on."""

    batch: Batch
    link: str = ""
    """Of the worker that is told when it is done; empty: a relay is."""


@dataclass(frozen=True, eq=False)
class Forget(EngineWork):
    """Let go of shards whose keys are deleted."""

    batch: Batch
    link: str = ""
    """As for Assign."""


@dataclass(frozen=True, eq=False)
class Check(EngineWork):
    """Look whether the payloads of a push or pull can be read, before anything of it is done."""

    link: str
    rank: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class Add(EngineWork):
    """Add contributions to the sums of a round."""

    rank: int
    round: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class Apply(EngineWork):
    """A round of some shards is complete: apply the rule to its sums, or assign them where there is no rule.

    The result is an `arithmetic.UpdateResult`: which shards failed, and which wait for norms (FinishUpdate or
    DropUpdate follows).
    """

    store: Store
    round: int
    shards: Array
    skip: bool = False
    """A worker skipped the round: forget the sums and leave the values as they are."""
    rank: int = -1
    last: Batch | None = None
    """The last contributions, by worker `rank`, of just these shards; they are not in the sums yet."""


@dataclass(frozen=True, eq=False)
class Step(EngineWork):
    """Apply the rule to each payload of an async push, one shard after the other.

    The result is a dict: for each shard that waits for norms its sums of squares.
    """

    link: str
    rank: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class FinishUpdate(EngineWork):
    """The norms of a turn are known: finish the shard's update."""

    store: Store
    shard: int
    turn: Turn
    totals: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class DropUpdate(EngineWork):
    """The shard's update that waits for norms is not to be."""

    store: Store
    shard: int
    turn: Turn


@dataclass(frozen=True, eq=False)
class Lend(EngineWork):
    """Keep the present values of some shards for entries of the pull `ticket`; later rounds go to other buffers."""

    ticket: int
    store: Store
    shards: Array
    at: Array
    """The number of each shard's entry in the pull."""
    codec: int = 0
    """The codec that the values are answered in; a codec's or rows' values are made at once."""
    params: Mapping[str, float] = field(default_factory=dict)
    rows: tuple[Buffer, ...] = ()
    """For each shard the payload that says which rows are wanted; empty: whole values."""


@dataclass(frozen=True, eq=False)
class Deliver(EngineWork):
    """Make the answer of the pull `ticket` from all that was lent to it; the result is an `engine.Reply`."""

    ticket: int
    link: str
    message: Message
    entries: Array
    skipped: Mapping[int, Notes] = field(default_factory=dict)
    """Key number to the notes of its round, for the keys whose round was skipped."""
    since: float = 0.0
    """When the pull came."""


@dataclass(frozen=True, eq=False)
class Discard(EngineWork):
    """The pull `ticket` failed: give back what was lent to it."""

    ticket: int


@dataclass(frozen=True, eq=False)
class Reserve(EngineWork):
    """Make places for shards whose values come later."""

    store: Store
    shards: Array


@dataclass(frozen=True, eq=False)
class Forward(EngineWork):
    """Give `message` the values that were lent to `ticket` as its payloads; the result is an `engine.Reply`."""

    ticket: int
    store: Store
    link: str
    message: Message


@dataclass(frozen=True, eq=False)
class Clear(EngineWork):
    """Forget all shards and rules, as the job's next script begins anew (STOP), or those of one store (CLOSE)."""

    message: Message

    @property
    def store(self) -> int | None:
        """The store that is forgotten; None: all are."""
        return self.message.store if self.message.kind is Kind.CLOSE else None


@dataclass(frozen=True, eq=False)
class TryRule(EngineWork):
    """Find out whether the store could have the rule of `spec`, and change nothing."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True, eq=False)
class SetRule(EngineWork):
    """Make the rule of `spec` (JSON of an `ops.optimizers.RuleSpec`) the store's; None: it has none from now on."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True, eq=False)
class Save(EngineWork):
    """Write the store's shards as `ps.statefile` does; the result is what the manifest says of them."""

    store: int
    message: Message


@dataclass(frozen=True, eq=False)
class Load(EngineWork):
    """Read the store's shards as `ps.statefile` does."""

    store: int
    message: Message


@dataclass(frozen=True, eq=False)
class Release(EngineWork):
    """Read no memory of workers any more for the rounds of a store that are open: copy what is still needed."""

    link: str
    message: Message


ALONE = (TryFill, Fill, TryRule, SetRule, Save, Load, Clear)
"""Work that begins when all before it is done and reported, and before anything else is decided."""


# What the threads of a process ask of its node.


class Waits:
    """For which request the script's main thread waits at the moment: it sets both, the node's thread reads them."""

    def __init__(self) -> None:
        self.request: NodeRequest | None = None
        self.since = 0.0
        """Wall clock."""


class NodeRequest:
    """A request in flight: messages that went out, and all their replies when these are there.

    What a store's call returns to the user, a `store.pending.Pending`, has one or more of these.

    Threads: any may wait; the node's thread resolves, once.
    """

    def __init__(self, what: str, limit: str = "", waits: Waits | None = None) -> None:
        self._waits = waits
        self._limit = limit
        """Where its deadline comes from, for people."""
        self.what = what
        """What was asked, for people: `pull of key 'w'`."""
        self.keys: Collection[int] = ()
        """Numbers of the keys that it is about, if it is a data call."""
        self.note = ""
        """What it waits for, as the other side last said."""
        self.awaited: tuple[str, ...] = ()
        """The tasks that the other side waits for, as it last said."""
        self.awaited_key = ""
        self.missing: dict[int, str] = {}
        """Its messages that are not answered, by their numbers, and to whom each went. The node's thread's."""
        self.is_taken_in = False
        """The node's thread has it: one that was interrupted may be handed in twice."""
        self._lock = threading.Lock()
        self._followers: list[tuple[Callable[[RuntimeFault | None], object], bool]] | None = []
        """What to call when it is done, and whether only after an error; None once that was done."""
        self.is_done = False
        """Whether `wait` would return at once."""
        self._done = threading.Event()
        self.replies: tuple[Message, ...] = ()
        """The replies, once it is done without an error; none after `forget`."""
        self.error: RuntimeFault | None = None
        """What went wrong, once it is done."""

    def resolve(self, replies: tuple[Message, ...], error: RuntimeFault | None) -> None:
        """Complete it with its replies, or with what went wrong."""
        with self._lock:
            self.replies, self.error = replies, error
            followers, self._followers = self._followers or [], None
        for follow, only_errors in followers:
            if error is not None or not only_errors:
                follow(error)
        # Last: who has waited for it finds what followed done.
        self.is_done = True
        self._done.set()

    def then(self, follow: Callable[[RuntimeFault | None], object], *, only_errors: bool = False) -> None:
        """Call `follow` with the error, or None, when it is done: now, or in the thread that resolves it.

        Arguments:
            only_errors: call it only if there is an error.
        """
        with self._lock:
            if self._followers is not None:
                self._followers.append((follow, only_errors))
                return
        if self.error is not None or not only_errors:
            follow(self.error)

    def wait(self, timeout_s: float, limit: str | None = None) -> tuple[Message, ...]:
        """Return the replies.

        Arguments:
            limit: where this deadline comes from, for people, if it is not the request's own.

        Raises:
            TimedOut: not done after `timeout_s` seconds; the message says who has not answered, and what for.
            RuntimeFault: what went wrong, of its own class (KVError, PeerLost ...).
        """
        started = time.monotonic()
        if not (self.is_done or self._waited(min(timeout_s, threading.TIMEOUT_MAX))):
            waited_s = time.monotonic() - started
            waited_s = round(waited_s, 1 if waited_s < 10 else 0)
            note = ", " + self.note if self.note else ""
            where = self._limit if limit is None else limit
            limit = f" ({where})" if where else ""
            names = ", ".join(sorted(set(self.missing.copy().values())))
            whose = " from " + names if names else ""
            raise TimedOut(f"{self.what}: no answer{whose} for {facts.duration(waited_s)}{note}{limit}")
        if self.error is not None:
            # A fresh exception each time: several threads may raise it, and a traceback belongs to one.
            raise copy.copy(self.error)
        return self.replies

    def _waited(self, timeout_s: float) -> bool:
        """Wait until it is done, and let the node know that the script does; return whether it is done."""
        waits = self._waits
        if waits is None or threading.current_thread() is not threading.main_thread():
            return self._done.wait(timeout_s)
        waits.since = time.time()
        waits.request = self
        try:
            return self._done.wait(timeout_s)
        finally:
            waits.request = None

    def forget(self) -> None:
        """Let go of the replies: their memory may be the servers'. Call when they will not be asked for."""
        self.replies = ()


def when_done(requests: Sequence[NodeRequest], act: Callable[[], None]) -> None:
    """Call `act` once all of these are done, well or not: now, or in the thread that resolves the last one."""
    missing = len(requests)
    lock = threading.Lock()

    def one_less(error: RuntimeFault | None) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            act()

    if not requests:
        act()
    for request in requests:
        request.then(one_less)


# Events


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
    """This node refused a node that wanted to join."""

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

    work: EngineWork
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


# Actions


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


class SendFrames(NamedTuple):
    """Send a message whose frames are made already."""

    link: Link
    frames: Sequence[Buffer]
    lent: Sequence[Any] = ()
    """The members of the `replies.ReplyValues` that the frames refer to: kept if the transport reads on."""
    form: Form | None = None
    """What `form_of` says of the frames, if all are small."""


@dataclass(frozen=True)
class Log:
    """One line of the log; `level` is a name of the logging module."""

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

    what: EngineWork
    reports: bool = field(default=False, kw_only=True)
    """Whether the role is told what came of it, at once or later, by `WorkDone`."""
    holds: Link = field(default="", kw_only=True)
    """A connection whose later events depend on what comes of the work: the role is told of them behind `WorkDone`."""


@dataclass(frozen=True)
class Resolve:
    """A request was answered or failed: the waiting thread gets `replies`, or `error` raised."""

    request: NodeRequest
    replies: tuple[Message, ...] = ()
    error: RuntimeFault | None = None


@dataclass(frozen=True)
class Note:
    """Tell a request what it waits for."""

    request: NodeRequest
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


Action = Union[Connect, Send, SendFrames, Log, Publish, Work, Resolve, Note, Finish, Resume]


class Role(Protocol):
    """A scheduler, server or worker as the loop sees it."""

    @property
    def me(self) -> NodeIdentity:
        """Who this node is; its rank may become known later."""

    def start(self, now: float) -> list[Action]:
        """Return what to do first."""

    def admit(self, peer: NodeIdentity) -> str:
        """Return why a proven peer may not come in; empty: it may."""

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event at time `now` (seconds, any epoch) and return what follows from it."""

    def tick(self, now: float) -> list[Action]:
        """Return what the passing of time demands; called at least every second."""


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
"""How long a wait lasts until the waiting node is told, quietly, what for."""
WAITING_S = 30.0
"""How often it is told so from then on, and says it."""


@dataclass
class WaitNotice:
    """When a waiting node is told what for."""

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


NAMED = 16
"""So many of a list of nodes are named in a message."""


def tasks_of(ranks: Iterable[int]) -> list[str]:
    """Return the names of workers."""
    return [f"worker-{rank}" for rank in ranks]


def worker_rank(name: str) -> int | None:
    """Return the rank of a worker by its name; None: it is no worker's."""
    kind, _, rank = name.rpartition("-")
    return int(rank) if kind == "worker" and rank.isdecimal() else None


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks as a list, and no more of them than a line should have: `[0, 1, 2]`."""
    more = f", ... {ranks[-1]}] ({len(ranks)} workers)" if len(ranks) > NAMED else "]"
    return f"[{', '.join(map(str, ranks[:NAMED]))}{more}"


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them, and no more of them than a line should have."""
    return facts.listed(names, NAMED)
