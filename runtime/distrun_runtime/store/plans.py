"""Plans of data calls: what a call over the same keys needs at every step, worked out once.

Training calls with the same keys, shapes and dtypes in every step. A plan holds the heads of such a call's messages,
encoded, and where values and answers lie in memory of the store's own. A steady call checks that the arrays are alike,
writes rounds into the heads, copies, and sends and receives in the calling thread (`NodeSession.exchange`).

What is not steady takes the path without a plan (`store.dist`), which says the same by the same bytes: rows, encoded
values, GPUs, several values of a key, relays, groups, asynchronous stores, calls that do not wait, or follow others
that were not answered yet.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer, copy
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import ENTRY, HEAD_BYTES, STEP_AT, Kind, Payload
from distrun_runtime.ps.routing import Portion, Route, step_of
from distrun_runtime.ps.session import PlannedSend
from distrun_runtime.store.base import Selection
from distrun_runtime.store.keys import Key

PLANNED_BYTES = 16 * 1024 * 1024
"""Calls of more bytes are not planned: copies take their time, and the memory of a plan stays."""
STAGED_BYTES = 32 * 1024
"""Messages of fewer bytes do not go by shared memory: a reference costs as much as the copies."""
PLANNED_KEYS = 1 << 16
"""The plans of a store have so many keys together (64 lists of 1,024); the least recently used one goes."""

_STEP = struct.Struct("<I")
_PAYLOAD_AT = HEAD_BYTES + ENTRY.fields["payload"][1]  # type: ignore[index]
_PACKED = bytes([Payload.PACKED])
_LINE = 64
"""What lies side by side in memory begins at a multiple of so many bytes."""

Name = tuple[Kind, tuple[Key, ...], int, float]
"""Kind, keys as they were given, priority, scale."""


class PlannedMessage:
    """One message of a planned call."""

    def __init__(self, portion: Portion, head: bytes, staging: Pool | None) -> None:
        self.portion = portion
        self.bucket = portion.bucket
        self.size_bytes = portion.size * portion.dtype.itemsize
        self.is_staged = staging is not None
        """Whether the server reads its values where they are."""
        self.values: Array | None = None
        """Where values are joined, if the server does not."""
        self.into: memoryview | None = None
        """Where the answer is received, if it comes as bytes."""
        self._pieces: list[tuple[int, slice | None, Array]] = []
        """The same by key: its place in the call, the run of its value (None: all of it), and the elements."""
        self.renew(head)

    def renew(self, head: Buffer) -> None:
        """Go on with a copy of a head: the present one may still be sent."""
        self.head = bytearray(head)
        self._rounds = np.frombuffer(self.head, ENTRY, offset=HEAD_BYTES)["round"] if not self.bucket else None

    def use(self, memory: Array) -> None:
        """Have values and the answer in two halves of some bytes."""
        self.values, answer = (half.view(self.portion.dtype) for half in np.split(memory[: 2 * self.size_bytes], 2))
        self.into = answer.view(np.uint8).data
        self._pieces = [*self.portion.views(answer)]

    def is_at(self, rounds: Array) -> bool:
        """Write the rounds of the call's keys into the head; tell whether a server understands it."""
        if self._rounds is not None:
            self._rounds[...] = rounds[self.portion.items]
            return not self.portion.bucket
        step = step_of(self.portion, rounds) if self.bucket == self.portion.bucket else -1
        if step >= 0:
            _STEP.pack_into(self.head, STEP_AT, step)
        return step >= 0

    def is_answered(self, frames: Sequence[Buffer]) -> bool:
        """Whether an answer has the values and says nothing else."""
        if len(frames[1]) or bytes(frames[0][_PAYLOAD_AT :: ENTRY.itemsize]).strip(_PACKED):
            return False
        return sum(memoryview(frame).nbytes for frame in frames[2:]) == self.size_bytes

    def write(self, frames: Sequence[Buffer], outs: Sequence[Array]) -> None:
        """Write the values of an answer to outputs, by place."""
        if frames[2] is not self.into:
            self.portion.scatter(frames[2:], outs)
            return
        for item, run, values in self._pieces:
            if run is None:
                outs[item][...] = values
            else:
                copy(values, outs[item].reshape(-1)[run])


@dataclass(eq=False)
class CallPlan:
    """What a call needs at every step."""

    name: Name
    keys: Selection
    route: Route
    messages: list[PlannedMessage]
    body: Mapping[str, float]
    """Of all messages."""
    text: bytes
    """Its JSON."""
    _memory: Array | None = None

    @property
    def what(self) -> str:
        """The call, for people."""
        return f"{self.name[0].name.lower()} of {self.keys.named}"

    def fits(self, values: Any, outs: Any) -> bool:
        """Whether arrays, as they were given for the keys, are as the plan has them.

        Raises:
            KVError: outputs of two keys share memory.
        """
        kind = self.name[0]
        if kind is not Kind.PULL and not self._are_alike(values):
            return False
        if kind is Kind.PUSH:
            return True
        return (
            ((kind is Kind.PUSHPULL and outs is values) or self._are_alike(outs))
            and self.keys.takes(outs)
            and all(outs[item].flags.c_contiguous for item in self.route.runs)
        )

    def _are_alike(self, arrays: Any) -> bool:
        return (type(arrays) is tuple or type(arrays) is list) and self.keys.fits(arrays)

    @property
    def size_bytes(self) -> int:
        """Bytes of memory for values and answers."""
        return sum(2 * -(-each.size_bytes // _LINE) * _LINE for each in self.messages if not each.is_staged)

    def use(self, memory: Array) -> None:
        """Have values and answers in some bytes: at least `size_bytes`."""
        if memory is self._memory:
            return
        self._memory, at = memory, 0
        for each in self.messages:
            if not each.is_staged:
                each.use(memory[at:])
                at += 2 * -(-each.size_bytes // _LINE) * _LINE

    def renew(self) -> None:
        """Write nothing any more that may still be sent."""
        self._memory = None
        for each in self.messages:
            each.renew(each.head)

    def sends(
        self,
        rounds: Array,
        values: Sequence[Array],
        staging: Callable[[Portion], Pool | None],
        in_place: frozenset[int],
    ) -> list[PlannedSend] | None:
        """Return the messages at some rounds; None: the plan has come to its end, as servers expect others now.

        Arguments:
            staging: returns memory that a portion's server reads where it is.
            in_place: places of values that servers read where they are.
        """
        found = []
        for each in self.messages:
            pool = staging(each.portion)
            if not each.is_at(rounds) or (pool is not None) != each.is_staged:
                return None
            frames: list[Buffer] = [each.head, self.text]
            if self.name[0] is not Kind.PULL:
                frames += (
                    each.portion.gather(values, False, pool, in_place)
                    if each.values is None
                    else [each.portion.join(values, each.values)]
                )
            found.append(PlannedSend(each.portion.link, frames, each.into))
        return found

    def take(self, answers: Sequence[Sequence[Buffer]], outs: Sequence[Array]) -> bool:
        """Write what came to outputs; return False if there is more in the answers, and write nothing."""
        pairs = list(zip(self.messages, answers, strict=True))
        if not all(each.is_answered(frames) for each, frames in pairs):
            return False
        for each, frames in pairs:
            each.write(frames, outs)
        return True


class PlannedCall(NamedTuple):
    """A call that is made by a plan."""

    plan: CallPlan
    rounds: Array
    """Of each key."""
    sends: list[PlannedSend]


class CallPlans:
    """The plans of one store, by name. Not thread-safe."""

    def __init__(self) -> None:
        self._plans: OrderedDict[Name, CallPlan] = OrderedDict()
        self._keys = 0

    def find(self, kind: Kind, key: Any, priority: object, scale: object) -> CallPlan | None:
        """Return the plan of a call, by its arguments as they were given; None: it has none."""
        if type(key) is str or type(key) is int:
            names: tuple[Any, ...] = (key,)
        elif type(key) is list or type(key) is tuple:
            names = tuple(key)
        else:
            return None
        try:
            found = self._plans.get((kind, names, priority, scale))  # type: ignore[arg-type]
        except TypeError:  # Something that is no key or number.
            return None
        if found is None or type(priority) is not int:
            return None
        # Equal keys may be of other types: True, numpy's integers.
        if type(found.name[1][0]) is int and set(map(type, names)) != {int}:
            return None
        self._plans.move_to_end(found.name)
        return found

    def keep(self, plan: CallPlan) -> None:
        """Take in a plan."""
        self.drop(plan)
        self._plans[plan.name] = plan
        self._keys += len(plan.name[1])
        while self._keys > PLANNED_KEYS and len(self._plans) > 1:
            self.drop(next(iter(self._plans.values())))

    def drop(self, plan: CallPlan) -> None:
        """Forget a plan, if there is one of its name."""
        if self._plans.pop(plan.name, None) is not None:
            self._keys -= len(plan.name[1])

    def clear(self) -> None:
        """Forget all."""
        self._plans.clear()
        self._keys = 0
