"""What a server asks of its executor: descriptors of array work, done in order for each slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime.net.message import Buffer, Message

DType = np.dtype[Any]


class SlotId(NamedTuple):
    """Names one piece of one value."""

    store: int
    key: int
    offset: int


@dataclass(frozen=True)
class Fill:
    """The slot's first value."""

    slot: SlotId
    payload: Buffer
    dtype: DType


@dataclass(frozen=True)
class Add:
    """Add a contribution to the sum of a round."""

    slot: SlotId
    round: int
    payload: Buffer
    dtype: DType


@dataclass(frozen=True)
class Apply:
    """A round is complete: apply the rule to its sum, or assign it where there is no rule."""

    slot: SlotId
    round: int


@dataclass(frozen=True)
class Steps:
    """Apply the rule to each payload of an async push, one slot after the other."""

    link: str
    message: Message
    slots: tuple[SlotId, ...]


@dataclass(frozen=True)
class Lend:
    """Keep the slot's present buffer for entry `number` of the pull `ticket`; later rounds go to another."""

    ticket: int
    number: int
    slot: SlotId


@dataclass(frozen=True)
class Deliver:
    """Answer the pull `ticket` with all that was lent to it."""

    ticket: int
    link: str
    message: Message


@dataclass(frozen=True)
class Discard:
    """The pull `ticket` failed: give back what was lent to it."""

    ticket: int


@dataclass(frozen=True)
class Clear:
    """Forget all slots and rules: the job's next script begins anew."""


@dataclass(frozen=True)
class SetRule:
    """Make `name` with `params` the store's rule."""

    store: int
    name: str
    params: Mapping[str, Any]
    message: Message
