"""Messages that come again in every step: a server knows them by their bytes, and does at once what they ask for.

In training, a worker sends the same messages in every step. In their heads only the number of the request and the round
differ. What all the rest leads to is worked out when such a message has come twice, and kept (`_Steps`). From then on
the message is known by a look-up and a comparison: its values are kept, or complete the sum of their round, and the
answers have heads that were made before and refer to the arenas.

All tables (`shards.Store`, `values.Values`, pulls that wait, counters) are left as `server.Server` and the engine leave
them, and the same bytes are sent. So messages that are known and others may alternate at will, as long as all that
`_look` has found of a set of shards holds: it is asked again after any other event, after a message for another set of
some of them, and when a round is over that a worker still waits for. `take` returns None, and
has changed nothing, for what is not known, is not in step, or comes while anything unusual is under way in its store.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError
from distrun_runtime.ops.compression import ROWS
from distrun_runtime.protocol import message as wire
from distrun_runtime.protocol.message import BYTES, DTYPES, NO_ENTRIES, VIEW, Kind, Message, Payload
from distrun_runtime.ps import arithmetic, role
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import ROLE_CODES
from distrun_runtime.ps.pulls import Pull, opened
from distrun_runtime.ps.replies import ReplyValues, failed, frames_of
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.values import Index, PushedValues, ShardProgress, ShardSet, Values

Actions = list[role.Action]
KNOWN, KNOWN_BYTES, ROUNDS = 16384, 64 * 1024 * 1024, 1 << 62
"""So many messages of a store are known, in about so much memory, and rounds before this one."""
REFUSED = 8 * KNOWN
"""When so many were not taken in because as many as can be are known, those are forgotten that have not come since."""
_KINDS = frozenset(map(int, (Kind.PUSH, Kind.PULL, Kind.PUSHPULL)))
_HEAD, _NEXT = wire.HEAD_BYTES, wire.NUMBER_AT + wire.NUMBER.size
_STORE, _FRONT = slice(wire.STORE_AT, wire.STORE_AT + 2), slice(wire.NUMBER_AT)
"""Places in a head: the store; all before the number of the request."""
_REQUEST, _LISTED, _STEP = slice(wire.NUMBER_AT, _NEXT), slice(_NEXT, wire.STEP_AT), slice(wire.STEP_AT, _HEAD)
"""The number; how many entries there are, and the bucket; the step."""
_ROUND_AT: int = wire.ENTRY.fields["round"][1]  # type: ignore[index]
"""The last member of an entry."""
_FIRST, _ROUND = slice(_HEAD, _HEAD + _ROUND_AT), slice(_HEAD + _ROUND_AT, _HEAD + wire.ENTRY.itemsize)
"""Of the first entry all before the round, and that."""
_ROWS, _CODEC_AT = bytes([ROWS]), _HEAD + wire.ENTRY.fields["codec"][1]  # type: ignore[index]
"""Of the first entry its codec."""
_FIXED = np.dtype({"names": ["fixed"], "formats": [f"V{_ROUND_AT}"], "itemsize": wire.ENTRY.itemsize})
"""Of an entry all before the round."""
_NUMBERS = itertools.count(1)
"""Of the sets of shards that are known in this process."""


@dataclass(eq=False)
class _Steps:
    """What a message leads to that comes again and again: all but the values, the round and its number."""

    link: str
    rank: int
    batch: role.Batch
    """What it is about, without entries."""
    first: int
    """The round at step 0, if it names a bucket."""
    bucket: object
    """What the server knows of the bucket that it names; None: it has entries."""
    subset: ShardSet
    """The shards that it is about."""
    place: tuple[int, Index]
    """Row of the worker, and index of the shards, in the tables of the store."""
    entries: Array
    """Those of a message; their rounds are the last ones that were asked for."""
    answered: Array
    """Those of an answer, likewise; none if it names the bucket."""
    answer: tuple[bytes, bytes]
    """The head of an answer: what is before the number of the request, and what is between that and the step; with a
    single entry, and its round."""
    version: int = -1
    """Of the server, when nothing unusual was under way."""

    def round_in(self, head: bytes) -> int:
        """Return the round that a message is about; -1: it differs in more than that."""
        if self.bucket is not None:
            return self.first + int.from_bytes(head[_STEP], "little")
        number = int.from_bytes(head[_ROUND], "little")
        is_same = head[_STEP] == bytes(4)
        if len(self.entries) > 1:
            self.entries["round"] = number
            is_same = is_same and head[_ROUND.stop :] == self.entries[1:].tobytes()
        return number if is_same else -1

    def given(self, frames: Sequence[Buffer]) -> PushedValues:
        """Return what the frames of a message bring."""
        dtype = DTYPES[self.subset.code]
        _, found, places = self.subset.layout
        if len(frames) == 3 and len(places) == 1:
            return PushedValues(self.subset.shards, found, [np.frombuffer(frames[2], dtype)])
        arrays = [np.frombuffer(frame, dtype) for frame in frames[2:]]
        return PushedValues(self.subset.shards, found, [arrays[at][begin:end] for at, begin, end in places])

    def pulled(self, head: bytes, number: int) -> role.Batch:
        """Return what a message asks for, without what it brings."""
        entries = self.entries.copy()
        entries["round"] = number
        own = {"request": int.from_bytes(head[_REQUEST], "little"), "step": int.from_bytes(head[_STEP], "little")}
        asked = {**vars(self.batch.message), **own, "entries": NO_ENTRIES if self.bucket is not None else entries}
        return role.Batch(self.batch.store, self.subset.shards, Message(**asked), entries)

    def answer_to(self, head: bytes, number: int, values: Values, side: int) -> role.SendFrames:
        """Return the answer with the values of a round, which are on one side of their arena."""
        front, middle = self.answer
        shards = self.subset.shards
        frames = self.subset.frames.get(side)
        if frames is None:
            frames = frames_of(ReplyValues(values, shards, shards, values.side[shards], 0))
            if not isinstance(frames[0], bytes):  # else they are copies
                self.subset.frames[side] = frames
        if len(self.answered) == 1:
            made = front + head[_REQUEST] + middle + head[_ROUND]
        else:
            self.answered["round"] = number
            made = front + head[_REQUEST] + middle + head[_STEP] + self.answered.tobytes()
        index = self.subset.index
        return role.SendFrames(self.link, [made, b"", *frames], (values, index, index, side, 0))


class _Waiting(Pull):
    """A pull by a message that is known. What only others look at is made when they do."""

    def __init__(self, steps: _Steps, head: bytes, number: int, now: float) -> None:
        self.prepared, self.now = (steps, head, number), now
        self.link, self.rank, self.place = steps.link, steps.rank, steps.place
        self.store, self.shards = steps.batch.store, steps.subset.shards

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        steps, head, number = self.prepared
        made = vars(opened(self.link, (self.rank,), steps.pulled(head, number), self.now, self.ticket))
        vars(self).update({**made, **vars(self)})
        return vars(self)[name]

    def is_alike(self, shards: Array, number: int) -> bool:
        """See Pull."""
        wants_it = self.prepared[2] == number and (self.shards is shards or np.array_equal(self.shards, shards))
        was_answered_in_part = "owed" in vars(self) and (self.passed or not self.owed.all())
        return wants_it and not was_answered_in_part


class Steady:
    """Does at once what messages ask for that a server knows. Threads: the loop's, while the engine is not busy."""

    def __init__(self, server: Server, engine: WorkEngine, counters: Counters) -> None:
        self._server = server
        self._engine = engine
        self._counters = counters

    def take(self, link: str, frames: Sequence[Buffer], now: float) -> Actions | None:
        """Return what follows from a message at time `now`; None: it is not known, and nothing was done."""
        if self._server.gone:
            self._forget()
        is_on_gpu = IN_USE and any(map(place_of, frames))
        if is_on_gpu or len(frames) < 2 or len(frames[1]):  # known messages have no body
            return None
        head = bytes(frames[0])
        values = self._engine.values(int.from_bytes(head[_STORE], "little"))
        if values is None:
            return None
        fixed = _fixed_in(head) if len(head) > _ROUND.stop else head[_FIRST]
        sizes = map(BYTES, map(VIEW, frames[2:])) if len(frames) != 3 else (VIEW(frames[2]).nbytes,)
        name = (link, head[_FRONT], head[_LISTED], fixed, len(head), *sizes)
        steps = values.plans.get(name)
        if not isinstance(steps, _Steps):
            is_cut = len(head) < _HEAD or bool((len(head) - _HEAD) % _FIXED.itemsize)
            # Rows have another size in each step, and would take the place of others.
            if is_cut or head[wire.KIND_AT] not in _KINDS or head[_CODEC_AT : _CODEC_AT + 1] == _ROWS:
                return None
            steps = self._meet(name, values, link, frames)
        number = -1 if steps is None else steps.round_in(head)
        if steps is None or not 0 <= number < ROUNDS:
            return None
        if steps.version != self._server.version:
            if not self._server.is_usual(link, steps.rank, steps.batch, steps.bucket):
                if not self._server.is_named(steps.rank, steps.batch, steps.bucket):
                    _drop(values, [name])  # the number is another bucket's now
                return None
            steps.version = self._server.version
        subset = steps.subset
        progress = subset.progress
        is_in_step = progress.version == steps.version and subset.has(values.store.progress, progress.number)
        if not (is_in_step or self._look(subset, values)):
            return None
        if steps.batch.message.kind is Kind.PULL:
            return self._pull(steps, values, head, number, now)
        return self._push(steps, values, [head, *frames[1:]], number, now)

    # What is known

    def _meet(self, name: tuple[Any, ...], values: Values, link: str, frames: Sequence[Buffer]) -> _Steps | None:
        """Note that a message came; at the second, fourth, eighth ... time, work out what it leads to."""
        if (len(values.plans) >= KNOWN and name not in values.plans) or values.plan_bytes >= KNOWN_BYTES:
            values.plans_refused += 1
            if values.plans_refused >= REFUSED:
                self._forget_unused(values)
            return None
        times = values.plans.pop(name, 0) + 1
        steps = self._worked_out(values, link, frames) if times > 1 and not times & (times - 1) else None
        values.plans[name] = steps or times
        values.plan_bytes += _bytes_of(name, steps) - (_bytes_of(name, times) if times > 1 else 0)
        return steps

    def _forget(self) -> None:
        """Forget what came by links that have ended."""
        for values in self._engine.all_values:
            _drop(values, [name for name in values.plans if name[0] in self._server.gone])
        self._server.gone.clear()

    def _forget_unused(self, values: Values) -> None:
        """Forget messages that have not come for long, such as lists of keys of which each is another one."""
        unused = [
            name
            for name, known in values.plans.items()
            if isinstance(known, int) or (isinstance(known, _Steps) and known.version < values.plans_since)
        ]
        _drop(values, unused)
        values.plans_refused, values.plans_since = 0, self._server.version

    def _worked_out(self, values: Values, link: str, frames: Sequence[Buffer]) -> _Steps | None:
        try:
            message = wire.decode(frames)
        except WireError:
            return None
        found = self._server.plain(link, message)
        if found is None:
            return None
        rank, batch, bucket = found
        store, entries = batch.store, batch.entries
        rounds, codes = entries["round"], entries["dtype"]
        are_alike = bool((rounds == rounds[0]).all() and (codes == codes[0]).all())
        is_packed = not frames[2:] or len(entries) == 1 or entries["payload"][0] == Payload.PACKED
        sizes = [memoryview(frame).nbytes for frame in frames[2:]]
        is_whole = not any(size % DTYPES[codes[0]].itemsize for size in sizes)
        has_its_values = bool(sizes) == (message.kind is not Kind.PULL)
        are_dense_sums = not (store.row_size[batch.shards].any() or store.op[batch.shards].any())
        if not (are_alike and is_packed and is_whole and has_its_values and are_dense_sums):
            return None
        subset = self._shard_set(values, batch.shards, sizes)
        if not subset.size:
            return None
        answered = (entries if bucket is None else NO_ENTRIES).copy()
        answered["payload"] = Payload.PACKED
        reply = Message(message.kind, store=store.number, bucket=message.bucket, entries=answered, is_reply=True)
        me = self._server.me
        head = bytes(wire.encode(reply, (ROLE_CODES["server"], me.rank, me.incarnation))[0])
        place, first = (int(store.row[rank]), subset.index), int(rounds[0]) - message.step
        about = role.Batch(store, batch.shards, replace(batch.message, entries=NO_ENTRIES), NO_ENTRIES)
        answer = head[_FRONT], head[_NEXT : _ROUND.start] if len(answered) == 1 else head[_LISTED]
        return _Steps(link, rank, about, first, bucket, subset, place, entries.copy(), answered, answer)

    def _shard_set(self, values: Values, shards: Array, sizes: Sequence[int]) -> ShardSet:
        """Return the one object for shards that come in frames of some sizes; those that are pulled, as in one."""
        first, code = int(shards[0]), int(values.store.dtype[shards[0]])
        itemsize = DTYPES[code].itemsize
        size = int(values.store.length[shards].sum())
        lengths = tuple(each // itemsize for each in sizes) or (size,)
        name = shards.tobytes()
        found = values.plans.get((name, lengths))
        if found is None:
            index: Index = slice(first, first + len(shards)) if (np.diff(shards) == 1).all() else shards
            index = first if len(shards) == 1 else index
            layout = arithmetic.layout(values, shards, lengths)
            progress = values.plans.setdefault((name,), ShardProgress(next(_NUMBERS)))
            found = ShardSet(shards, first, code, index, layout, size * itemsize, progress)
            values.plans[name, lengths] = found
            values.plan_bytes += 4 * shards.nbytes
        return found

    def _look(self, subset: ShardSet, values: Values) -> bool:
        """Look how far the shards are, and whether they are in step."""
        store, progress = values.store, subset.progress
        done = store.done.item(subset.first)
        if not (subset.has(store.done, done) and subset.has(store.ordered, done)):
            return False
        ahead = store.last[:, subset.shards] - done
        came = ahead[:, 0] == 1
        if (ahead != came[:, None]).any() or store.owed[:, subset.shards][~came].any():
            return False
        progress.done, progress.came = done, set(np.flatnonzero(came).tolist())
        progress.side, progress.version = values.side_of(subset), self._server.version
        store.progress[subset.index] = progress.number
        return True

    # What messages ask for

    def _push(self, steps: _Steps, values: Values, frames: Sequence[Any], number: int, now: float) -> Actions | None:
        """Take in a contribution to the round that is open."""
        subset, store, server = steps.subset, steps.batch.store, self._server
        progress, (row, index) = subset.progress, steps.place
        if number != progress.done + 1 or row in progress.came:
            return None
        is_last = len(progress.came) == len(store.last) - 1
        waiting = server.pulls.alike(store, subset.shards, number) if is_last else []
        if waiting is None:
            return None
        frame = frames[2] if len(frames) == 3 else max(frames[2:], key=len)
        progress.version = -1  # until all is done
        if not self._engine.does_now(values, number, subset, steps.given(frames), frame=frame, is_last=is_last):
            return None
        store.last[steps.place] = number
        self._counters.bytes_in += subset.size
        self._counters.pushes += 1
        server.sample((steps.rank,), steps.batch, (number,), now)
        actions: Actions = []
        is_owed = False
        if is_last:
            store.ordered[index] = store.done[index] = number
            store.fresh[index] = False
            progress.done = number
            progress.came.clear()
            self._counters.updated(len(subset.shards))
            others_wait = server.pulls.answered(waiting, subset.first)
            # Those for more than these shards may still want this round: before the next push it is looked again.
            is_owed = others_wait and bool(store.owed[:, index].any())
            actions = [self._answer(values, *pull.prepared) for pull in waiting]
        else:
            progress.came.add(row)
        progress.version = -1 if is_owed else server.version
        if steps.batch.message.kind is Kind.PUSH:
            told = steps.answer[0] + frames[0][_REQUEST] + bytes(12)
            return [*actions, role.SendFrames(steps.link, [told, b""])]
        return [*actions, *self._pulled(steps, values, frames[0], number, now)]

    def _pull(self, steps: _Steps, values: Values, head: bytes, number: int, now: float) -> Actions | None:
        """Answer a pull of the worker's last round, or let it wait for the one that is open."""
        progress = steps.subset.progress
        if progress.side < 0 or number != progress.done + (steps.place[0] in progress.came):
            return None
        return self._pulled(steps, values, head, number, now)

    def _pulled(self, steps: _Steps, values: Values, head: bytes, number: int, now: float) -> Actions:
        self._counters.pulls += 1
        if steps.subset.progress.done == number:
            return [self._answer(values, steps, head, number)]
        return self._server.pulls.wait(_Waiting(steps, head, number, now), steps.subset.first, now)

    def _answer(self, values: Values, steps: _Steps, head: bytes, number: int) -> role.Action:
        try:
            made = steps.answer_to(head, number, values, steps.subset.progress.side)
        except Exception as err:  # as `WorkEngine` refuses a Deliver
            event = role.WorkDone(role.Discard(0), err, traceback.format_exc())
            return role.Send(steps.link, failed(steps.pulled(head, number).message, event))
        self._counters.bytes_out += steps.subset.size
        return made


def _fixed_in(head: bytes) -> bytes:
    """Return all of the entries but the rounds."""
    whole = len(head) - (len(head) - _HEAD) % _FIXED.itemsize
    return np.frombuffer(head[_HEAD:whole], _FIXED)["fixed"].tobytes()


def _bytes_of(name: tuple[Any, ...], known: Any) -> int:
    """Return about how much memory it takes to know a message, without what others share."""
    arrays = known.entries.nbytes + known.answered.nbytes if isinstance(known, _Steps) else 0
    return len(name[3]) + 8 * len(name) + arrays


def _drop(values: Values, names: Iterable[tuple[Any, ...]]) -> None:
    for name in names:
        values.plan_bytes -= _bytes_of(name, values.plans.pop(name))
