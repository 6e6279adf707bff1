"""What a server asks of its executor: descriptors of array work, done in order for each slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import numpy as np

from distrun_runtime.protocol.message import Buffer, Message

DType = np.dtype[Any]


class SlotId(NamedTuple):
    """Names one piece of one value."""

    store: int
    key: int
    offset: int


Notes = Mapping[int, Optional[Mapping[str, Any]]]
"""By rank, what the workers of a skipped round said: the note of one that skipped it, None of one that contributed."""

SYNC = -1
"""In place of a rank: an update that is a round of all workers."""


class Turn(NamedTuple):
    """Names one update of one key: a round (rank SYNC), or in async a worker's push."""

    store: int
    key: int
    rank: int
    round: int


@dataclass(frozen=True)
class How:
    """How a payload becomes elements, and by what these are multiplied."""

    codec: int = 0
    params: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0


PLAIN = How()
"""The payload is the elements."""


@dataclass(frozen=True)
class Fill:
    """The slot's first value."""

    slot: SlotId
    payload: Buffer
    dtype: DType
    key: Any = None
    """The user's key."""
    shape: tuple[int, ...] = ()
    """Of the whole value; for people."""
    row_size: int = 0
    """Elements of a row; 0: the value is not row-sparse."""


@dataclass(frozen=True)
class TryFill:
    """Find out whether the store's rule takes the values of an INIT, and change nothing."""

    link: str
    message: Message


@dataclass(frozen=True)
class Assign:
    """Another value for the slot; the rule's state and rounds go on."""

    slot: SlotId
    payload: Buffer
    dtype: DType


@dataclass(frozen=True)
class Check:
    """Look whether the payloads of a push or pull can be read, before anything of it is done."""

    link: str
    rank: int
    message: Message
    slots: tuple[SlotId, ...]


@dataclass(frozen=True)
class Add:
    """Add a contribution to the sum of a round."""

    slot: SlotId
    round: int
    payload: Buffer
    dtype: DType
    how: How = PLAIN


@dataclass(frozen=True)
class Apply:
    """A round is complete: apply the rule to its sum, or assign it where there is no rule.

    The result is None, or sums of squares: the rule waits for norms, and Finish or Drop follows.
    """

    slot: SlotId
    round: int
    skip: bool = False
    """A worker skipped the round: forget its sum and leave the value as it is."""


@dataclass(frozen=True)
class Steps:
    """Apply the rule to each payload of an async push, one slot after the other.

    The result is a dict: for each slot that waits for norms its sums of squares.
    """

    link: str
    message: Message
    slots: tuple[SlotId, ...]
    rank: int = -1


@dataclass(frozen=True)
class Finish:
    """The norms of a turn are known: finish the slot's update."""

    slot: SlotId
    turn: Turn
    totals: tuple[float, ...]


@dataclass(frozen=True)
class Drop:
    """The slot's update that waits for norms is not to be."""

    slot: SlotId
    turn: Turn


@dataclass(frozen=True)
class Lend:
    """Keep the slot's present buffer for entry `number` of the pull `ticket`; later rounds go to another.

    With `rows` (a payload of row numbers) or a codec, what is kept is made of it.
    """

    ticket: int
    number: int
    slot: SlotId
    rows: Buffer | None = None
    how: How = PLAIN


@dataclass(frozen=True)
class Deliver:
    """Answer the pull `ticket` with all that was lent to it."""

    ticket: int
    link: str
    message: Message
    skipped: Mapping[int, Notes] = field(default_factory=dict)
    """Key number to the notes of its round, for the keys whose round was skipped."""


@dataclass(frozen=True)
class Discard:
    """The pull `ticket` failed: give back what was lent to it."""

    ticket: int


@dataclass(frozen=True)
class Clear:
    """Forget all slots and rules: the job's next script begins anew."""


@dataclass(frozen=True)
class TryRule:
    """Find out whether the store could have the rule of `spec`, and change nothing."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True)
class SetRule:
    """Make the rule of `spec` (JSON of an `ops.optimizers.RuleSpec`) the store's; None: it has none from now on."""

    store: int
    spec: Mapping[str, Any] | None
    message: Message


@dataclass(frozen=True)
class Save:
    """Write the store's slots as `ps.states` does; the result is what the manifest says of them."""

    store: int
    message: Message


@dataclass(frozen=True)
class Load:
    """Read the store's slots as `ps.states` does."""

    store: int
    message: Message
