"""Plans of data calls: what a call over the same keys needs at every step, worked out once.

Training calls with the same keys, shapes and dtypes in every step. A plan holds the heads of such a call's messages,
encoded. A steady call checks that the arrays are alike, writes rounds into the heads, copies, and sends and receives
in the calling thread (`NodeSession.exchange`).

What is not steady takes the path without a plan (`store.dist`), which says the same by the same bytes: rows, encoded
values, GPUs, several values of a key, relays, groups, asynchronous stores, calls that do not wait, or follow others
that were not answered yet.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import ENTRY, HEAD_BYTES, PULL, PUSH, PUSHPULL, STEP_AT, Kind, Payload, size_of
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import Portion, Route, step_of
from distrun_runtime.ps.session import PlannedSend, PlannedSends
from distrun_runtime.store.base import Selection
from distrun_runtime.store.keys import Key
from distrun_runtime.store.pending import CompletedCall
from distrun_runtime.transport.direct import form_of
from distrun_runtime.transport.host_paths import LARGE_BYTES

PLANNED_BYTES = 16 * 1024 * 1024
"""Calls of more bytes are not planned: copies take their time, and the memory that answers come to stays."""
STAGED_BYTES = LARGE_BYTES
"""Messages of fewer bytes do not go by shared memory."""
PLANS, PLANNED_KEYS, KEYS_OF_ONE = 64, 1 << 18, 8
"""A store keeps so many plans, and more while all have at most so many keys; one counts as at least so many. A key
takes some 200 bytes. Plans for push and pull of each of 10,000 keys fit, three for each."""

_STEP = struct.Struct("<I")
_PAYLOADS = slice(HEAD_BYTES + ENTRY.fields["payload"][1], None, ENTRY.itemsize)  # type: ignore[index]
"""Where a head has the kind of each entry's payload."""
_PACKED = bytes([Payload.PACKED])

LOOKED_BYTES = 1024 * 1024
"""For more, servers need the cores."""
SPARE_BYTES = 32 * 1024 * 1024
"""So much shared memory stays with a store."""

Name = tuple[Kind, tuple[Key, ...], int, float]
"""Kind, keys as they were given, priority, scale."""


class SpareMemory:
    """Shared memory of messages whose answers are here, for the next of their sizes: where it is need not be looked up
    again, and some of it may be in the processor's cache. Threads: one at a time."""

    def __init__(self) -> None:
        self._free: dict[int, list[memoryview]] = {}
        """By bytes."""
        self._kept_bytes = 0

    def take(self, size_bytes: int, pool: Pool) -> memoryview | None:
        """Return memory for so many bytes; None: there is none."""
        if spare := self._free.get(size_bytes):
            self._kept_bytes -= size_bytes
            return spare.pop()
        made = pool.empty((size_bytes,), np.dtype(np.uint8))
        return None if made is None else made.data

    def give_back(self, memory: memoryview) -> None:
        """Nobody reads it any more."""
        size_bytes = memory.nbytes
        if self._kept_bytes + size_bytes <= SPARE_BYTES:
            self._kept_bytes += size_bytes
            self._free.setdefault(size_bytes, []).append(memory)


class PlannedMessage:
    """One message of a planned call."""

    def __init__(self, portion: Portion, head: bytes, has_answer: bool) -> None:
        self.portion = portion
        self.size_bytes = portion.size * portion.dtype.itemsize
        self.is_small = max(self.size_bytes, len(head)) < STAGED_BYTES
        self._bucket = portion.bucket
        self._has_answer = has_answer
        self._sent: PlannedSend | None = None
        """What was sent last, if it may be sent again; and its payload."""
        self._payloads: Sequence[Buffer] = ()
        self.into: memoryview | None = None
        """Where a large answer is received, if it comes as bytes: memory that is there already."""
        self.head = bytearray(head)
        self.renew()

    def renew(self) -> None:
        """Write no memory any more that may still be in use."""
        self.into = self._sent = None
        self.head = bytearray(self.head)
        self._rounds = np.frombuffer(self.head, ENTRY, offset=HEAD_BYTES)["round"] if not self._bucket else None

    def is_at(self, rounds: Array) -> bool:
        """Write the rounds of the call's keys into the head; tell whether its server understands it."""
        if self._bucket != self.portion.bucket:
            return False
        if self._rounds is not None:
            self._rounds[:] = rounds[self.portion.at]
            return True
        step = step_of(self.portion, rounds)
        if step >= 0:
            _STEP.pack_into(self.head, STEP_AT, step)
        return step >= 0

    def send(self, text: bytes, payloads: Sequence[Buffer], is_staged: bool) -> PlannedSend:
        """Return the message to be sent; `is_staged`: its answer is in memory that is shared."""
        if self._has_answer and self.into is None and not (self.is_small or is_staged):
            self.into = memoryview(bytearray(self.size_bytes))
        last = self._sent
        if last is None or payloads is not self._payloads or last.into is not self.into:
            frames = [self.head, text, *payloads]
            form = form_of(frames) if self.is_small else None
            last = PlannedSend(self.portion.link, frames, form, self.into, self._has_answer)
            # Of memory that is shared there is other memory each time.
            self._sent, self._payloads = (last, payloads) if self.is_small else (None, ())
        return last

    def is_answered(self, frames: Sequence[Buffer]) -> bool:
        """Whether an answer has the values and says nothing else."""
        size_bytes = len(frames[2]) if len(frames) == 3 else size_of(frames[2:])
        return size_bytes == self.size_bytes and not (len(frames[1]) or bytes(frames[0][_PAYLOADS]).strip(_PACKED))


@dataclass(eq=False)
class CallPlan:
    """What a call needs at every step."""

    name: Name
    keys: Selection
    route: Route
    messages: list[PlannedMessage]
    text: bytes
    """The body of all messages."""

    def __post_init__(self) -> None:
        self.asking = (PUSHPULL, *self.name[1:])
        """The name of the plan that asks for the result of a push, too."""
        self.key_count = max(len(self.name[1]), KEYS_OF_ONE)
        """For how many keys it counts."""
        self.done = CompletedCall(f"{self.name[0].name.lower()} of {self.keys.named}")
        """The outcome of a call that was made, and of which nothing more is to be told."""

    def fits(self, kind: Kind, values: Any, outs: Any) -> bool:
        """Whether arrays, as they were given for the keys, are as the plan has them.

        Raises:
            KVError: outputs of two keys share memory.
        """
        is_fit = kind is PULL or self.keys.fits(values)
        if kind is PUSH or not is_fit:
            return is_fit
        if not ((kind is PUSHPULL and outs is values) or self.keys.fits(outs)) or not self.keys.takes(outs):
            return False
        for item in self.route.runs:  # noqa: SIM110  # a generator would take several times as long
            if not outs[item].flags.c_contiguous:
                return False
        return True

    def renew(self) -> None:
        """Write no memory any more that may still be in use."""
        for each in self.messages:
            each.renew()

    def take(self, answers: Sequence[Sequence[Buffer]], outs: Sequence[Array]) -> bool:
        """Write what came to outputs; return False if there is more in the answers, and write nothing."""
        if not all(map(PlannedMessage.is_answered, self.messages, answers)):
            return False
        for each, frames in zip(self.messages, answers, strict=True):
            each.portion.scatter(frames[2:], outs)
        return True


@dataclass(eq=False)
class PlannedCall:
    """A call that is made by a plan."""

    plan: CallPlan
    rounds: Array
    """Of each key."""
    sends: PlannedSends
    requests: list[NodeRequest] = field(default_factory=list)
    """What it has become, if it has."""
    staged: list[memoryview] = field(default_factory=list)
    """What is nobody's when the answers are here."""
    ahead: object = None
    """Of a push that asked for its result, too: the `CallUnderWay` that has it, or a request."""


class CallPlans(OrderedDict[Name, CallPlan]):
    """The plans of one store, by name: those that were used last. Not thread-safe."""

    _keys = 0
    """For how many all plans count."""

    def find(self, kind: Kind, key: Any, priority: object, scale: object) -> CallPlan | None:
        """Return the plan of a call, by its arguments as they were given; None: it has none."""
        if type(key) is str or type(key) is int:
            names: tuple[Any, ...] = (key,)
        elif type(key) is list or type(key) is tuple:
            names = tuple(key)
        else:
            return None
        try:
            found = self.get((kind, names, priority, scale))  # type: ignore[arg-type]
        except TypeError:  # Something that is no key or number.
            return None
        if found is None or type(priority) is not int:
            return None
        # Equal keys may be of other types: True, numpy's integers.
        if names[0] is not key and type(found.name[1][0]) is int and set(map(type, names)) != {int}:
            return None
        self.move_to_end(found.name)
        return found

    def asking(self, plan: CallPlan) -> CallPlan:
        """Return the plan that asks for the result of a push, too; that of the push if there is none."""
        found = self.get(plan.asking)
        if found is None:
            return plan
        self.move_to_end(plan.asking)
        return found

    def keep(self, plan: CallPlan) -> None:
        """Take in a plan. If there are too many, those go that were not used for longest."""
        self.drop(plan.name)
        self[plan.name] = plan
        self._keys += plan.key_count
        while len(self) > PLANS and self._keys > PLANNED_KEYS:
            self.drop(next(iter(self)))

    def drop(self, name: Name) -> None:
        """Forget a plan, if it is there."""
        if (plan := self.pop(name, None)) is not None:
            self._keys -= plan.key_count

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        self._keys = 0
