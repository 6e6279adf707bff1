"""What a server asks of its engine: descriptors of work on arrays, done in the order in which they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Union

from distrun_runtime.arrays.device import Buffer
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.ops.reduce import PLAIN, How
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.shards import Notes, Store, Turn


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


@dataclass(frozen=True, eq=False)
class Fill:
    """The first values of shards."""

    batch: Batch
    link: str = ""


@dataclass(frozen=True, eq=False)
class TryFill:
    """Find out whether the store's rule, if it has one, takes the values of an INIT, and change nothing."""

    link: str
    message: Message


@dataclass(frozen=True, eq=False)
class Assign:
    """Other values for shards; the rule's state and rounds go on."""

    batch: Batch
    link: str = ""
    """Of the worker that is told when it is done; empty: a relay is."""


@dataclass(frozen=True, eq=False)
class Check:
    """Look whether the payloads of a push or pull can be read, before anything of it is done."""

    link: str
    rank: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class Add:
    """Add contributions to the sums of a round."""

    rank: int
    round: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class Apply:
    """A round of some shards is complete: apply the rule to its sums, or assign them where there is no rule.

    The result is an `updates.Applied`: which shards failed, and which wait for norms (FinishUpdate or DropUpdate
    follows).
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
class Step:
    """Apply the rule to each payload of an async push, one shard after the other.

    The result is a dict: for each shard that waits for norms its sums of squares.
    """

    link: str
    rank: int
    batch: Batch


@dataclass(frozen=True, eq=False)
class FinishUpdate:
    """The norms of a turn are known: finish the shard's update."""

    store: Store
    shard: int
    turn: Turn
    totals: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class DropUpdate:
    """The shard's update that waits for norms is not to be."""

    store: Store
    shard: int
    turn: Turn


@dataclass(frozen=True, eq=False)
class Lend:
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
class Deliver:
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
class Discard:
    """The pull `ticket` failed: give back what was lent to it."""

    ticket: int


@dataclass(frozen=True, eq=False)
class Reserve:
    """Make places for shards whose values come later."""

    store: Store
    shards: Array


@dataclass(frozen=True, eq=False)
class Forward:
    """Give `message` the values that were lent to `ticket` as its payloads; the result is an `engine.Reply`."""

    ticket: int
    store: Store
    link: str
    message: Message


@dataclass(frozen=True, eq=False)
class Clear:
    """Forget all shards and rules, as the job's next script begins anew (STOP), or those of one store (CLOSE)."""

    message: Message

    @property
    def store(self) -> int | None:
        """The store that is forgotten; None: all are."""
        return self.message.store if self.message.kind is Kind.CLOSE else None


@dataclass(frozen=True, eq=False)
class TryRule:
    """Find out whether the store could have the rule of `spec`, and change nothing."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True, eq=False)
class SetRule:
    """Make the rule of `spec` (JSON of an `ops.optimizers.RuleSpec`) the store's; None: it has none from now on."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True, eq=False)
class Save:
    """Write the store's shards as `ps.statefile` does; the result is what the manifest says of them."""

    store: int
    message: Message


@dataclass(frozen=True, eq=False)
class Load:
    """Read the store's shards as `ps.statefile` does."""

    store: int
    message: Message


@dataclass(frozen=True, eq=False)
class Release:
    """Read no memory of workers any more for the rounds of a store that are open: copy what is still needed."""

    link: str
    message: Message


Work = Union[
    Fill,
    TryFill,
    Assign,
    Check,
    Add,
    Apply,
    Step,
    FinishUpdate,
    DropUpdate,
    Lend,
    Deliver,
    Discard,
    Reserve,
    Forward,
    Clear,
    TryRule,
    SetRule,
    Save,
    Load,
    Release,
]
"""What `Engine.do` takes."""

_WORD_BYTES = 4
"""Of an element: most are float32."""

ALONE = (TryFill, Fill, TryRule, SetRule, Save, Load, Clear)
"""Work that begins when all before it is done and reported, and before anything else is decided."""


def size_of(what: Work) -> int:
    """Return about how many bytes work goes over; 0 for work that touches no elements."""
    if isinstance(what, (Fill, Assign, Check, Add, Step)):
        return sum(memoryview(each).nbytes for each in what.batch.message.payloads)
    if isinstance(what, Apply):
        return 0 if what.skip else _WORD_BYTES * int(what.store.length[what.shards].sum())
    if isinstance(what, FinishUpdate):
        return _WORD_BYTES * int(what.store.length[what.shard])
    if isinstance(what, Lend) and what.codec:
        return _WORD_BYTES * int(what.store.length[what.shards].sum())
    return 0
