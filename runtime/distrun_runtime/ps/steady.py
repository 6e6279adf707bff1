"""Messages that come again in every step: a server knows them by their bytes, and does at once what they ask for.

In training, a worker sends the same messages in every step. In their heads only the number of the request and the round
differ. What all the rest leads to is worked out when such a message has come twice, and kept (`_Steps`). From then on
the message is known by a look-up and a comparison: a small contribution to one key even before what was received is
cut into frames (`take_bytes`).

Known messages of a round are kept (`Server.kept`) until its last contribution comes: then they are one sum, and answers
whose heads were made before and refer to the arenas. If anything else happens before, the server first decides on what
is kept as if it came now, so nobody can tell that it was. All tables (`shards.Store`, `values.Values`, counters) are
left as `server.Server` and the engine leave them, and the same bytes are sent. So messages that are known and others
may alternate at will, as long as all that `_look` has found of a set of shards holds: it is asked again after any other
event, and after a message for another set of some of them. `take` returns None, and has changed nothing, for what is
not known, is not in step, or comes while anything unusual is under way in its store.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer, DType, work_dtype
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError
from distrun_runtime.ops.compression import ROWS
from distrun_runtime.protocol import message as wire
from distrun_runtime.protocol.message import DTYPES, NO_ENTRIES, PULL, PUSH, PUSHPULL, Kind, Message, Payload
from distrun_runtime.ps import arithmetic, role
from distrun_runtime.ps.counters import Counters, Lags
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.loop import ROLE_CODES
from distrun_runtime.ps.replies import ReplyValues, failed, frames_of
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.values import Index, ShardProgress, ShardSet, Values
from distrun_runtime.transport.base import Form
from distrun_runtime.transport.direct import form_of
from distrun_runtime.transport.host_segments import is_shared

Actions = list[role.Action]
KNOWN, KNOWN_BYTES, ROUNDS = 16384, 64 * 1024 * 1024, 1 << 62
"""So many messages of a store are known, in about so much memory, and rounds before this one."""
REFUSED = 8 * KNOWN
"""When so many were not taken in because as many as can be are known, those are forgotten that have not come since."""
LONG_BYTES, KEPT_BYTES = 64 * 1024, 64 * 1024 * 1024
"""Contributions of at least so many bytes, if they were received, are kept up to so many together."""
_KINDS = frozenset(map(int, (PUSH, PULL, PUSHPULL)))
_HEAD, _NEXT = wire.HEAD_BYTES, wire.NUMBER_AT + wire.NUMBER.size
_STORE, _FRONT = slice(wire.STORE_AT, wire.STORE_AT + 2), slice(wire.NUMBER_AT)
"""Places in a head: the store; all before the number of the request."""
_REQUEST, _LISTED, _STEP = slice(wire.NUMBER_AT, _NEXT), slice(_NEXT, wire.STEP_AT), slice(wire.STEP_AT, _HEAD)
"""The number; how many entries there are, and the bucket; the step."""
_ROUND_AT: int = wire.ENTRY.fields["round"][1]  # type: ignore[index]
"""The last member of an entry."""
_ONE, _ROUND = slice(_NEXT, _HEAD + _ROUND_AT), slice(_HEAD + _ROUND_AT, _HEAD + wire.ENTRY.itemsize)
"""With one entry: all between the number and the round, and that."""
_TABLE = len(form_of([b""] * 3)[0])
"""Bytes of the table that a message of three frames is received with."""
_HEAD_RECEIVED, _NUMBER_RECEIVED = slice(_TABLE, _TABLE + _ROUND.stop), _TABLE + wire.NUMBER_AT
_STORE_RECEIVED, _ONE_RECEIVED, _ROUND_RECEIVED = (
    slice(_TABLE + a.start, _TABLE + a.stop) for a in (_STORE, _ONE, _ROUND)
)
"""Places in such a message, with its table, if it has one entry."""
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
    row: int
    """Of the worker in the tables of the store."""
    entries: Array
    """Those of a message; their rounds are the last ones that were asked for."""
    answered: Array
    """Those of an answer, likewise; none if it names the bucket."""
    answer: tuple[bytes, bytes]
    """The head of an answer: what is before the number of the request, and what is between that and the step; with a
    single entry, and its round."""
    kind: Kind
    dtype: DType
    """Of the shards."""
    form: Form | None
    """Of the message and of its answer, if it brings a small value of one shard, in the dtype that sums have, and asks
    for the result."""
    version: int = -1
    """Of the server, when nothing unusual was under way."""
    lags: Lags | None = None
    """What notes when such messages come, if it is noted of them."""

    def round_in(self, head: bytes) -> int:
        """Return the round that a message is about; -1: it differs in more than that."""
        if self.bucket is not None:
            return self.first + int.from_bytes(head[_STEP], "little")
        number = int.from_bytes(head[_ROUND], "little")
        if len(self.entries) > 1:
            self.entries["round"] = number
            if head[_STEP] != bytes(4) or head[_ROUND.stop :] != self.entries[1:].tobytes():
                return -1
        return number

    def parts_of(self, payloads: Sequence[Buffer]) -> list[Array]:
        """Return what the payloads of a message bring to each run of the shards."""
        dtype = DTYPES[self.subset.code]
        places = self.subset.layout.places
        if len(payloads) == len(places) == 1:
            return [np.frombuffer(payloads[0], dtype)]
        arrays = [np.frombuffer(payload, dtype) for payload in payloads]
        return [arrays[at][begin:end] for at, begin, end in places]

    def batch_of(self, head: bytes, number: int, payloads: Sequence[Buffer] = ()) -> role.Batch:
        """Return what a message is about, as the server takes it in that does not know it."""
        entries = self.entries.copy()
        entries["round"] = number
        own = {"request": int.from_bytes(head[_REQUEST], "little"), "step": int.from_bytes(head[_STEP], "little")}
        told = {**vars(self.batch.message), **own, "payloads": payloads}
        told["entries"] = NO_ENTRIES if self.bucket is not None else entries
        return role.Batch(self.batch.store, self.subset.shards, Message(**told), entries)


class _KeptMessage(NamedTuple):
    """A known message of a round that is open (`server.UndecidedMessage`)."""

    steps: _Steps
    head: bytes
    payloads: Sequence[Buffer]
    number: int
    """The round."""
    now: float

    def decided_by(self, accept: Callable[[str, int, role.Batch], Actions]) -> Actions:
        """Return what follows from it that was not done when it came."""
        steps = self.steps
        actions = accept(steps.link, steps.rank, steps.batch_of(self.head, self.number, self.payloads))
        return actions[:-1] if steps.kind is PUSH else actions  # the last one is the answer


class Steady:
    """Does at once what messages ask for that a server knows. Threads: the loop's, while the engine is not busy."""

    def __init__(self, server: Server, engine: WorkEngine, counters: Counters) -> None:
        self._server = server
        self._engine = engine
        self._counters = counters
        self._values = engine.values
        self._kept = cast("dict[int, _KeptMessage]", server.kept)
        self._count = 0
        """How many messages were kept so far."""
        self._kept_bytes = 0
        """Of those that are kept now, were received and have `LONG_BYTES`."""

    def take(self, link: str, frames: Sequence[Buffer], now: float) -> Actions | None:
        """Return what follows from a message at time `now`; None: it is not known, and nothing was done."""
        if self._server.gone:
            self._forget()
        is_on_gpu = IN_USE and any(map(place_of, frames))
        if is_on_gpu or len(frames) < 2 or len(frames[1]):  # known messages have no body
            return None
        head = bytes(frames[0])
        values = self._values.get(int.from_bytes(head[_STORE], "little"))
        if values is None or values.device.is_gpu:
            return None
        size = len(head)
        if size == _ROUND.stop:
            fixed = head[_ONE]
        else:
            fixed = head[_LISTED] + (_fixed_in(head) if size > _ROUND.stop else head[_HEAD:])
        name = (link, head[_FRONT], fixed, size, *map(len, frames[2:]))
        steps = values.plans.get(name)
        if not isinstance(steps, _Steps):
            is_cut = size < _HEAD or bool((size - _HEAD) % _FIXED.itemsize)
            # Rows have another size in each step, and would take the place of others.
            if is_cut or head[wire.KIND_AT] not in _KINDS or head[_CODEC_AT : _CODEC_AT + 1] == _ROWS:
                return None
            steps = self._meet(name, values, link, frames)
        number = -1 if steps is None else steps.round_in(head)
        if steps is None or not 0 <= number < ROUNDS:
            return None
        if steps.version != self._server.version:
            is_usual = self._server.is_usual(link, steps.rank, steps.batch, steps.bucket)
            if not is_usual or self._engine.is_profiled:
                if not self._server.is_named(steps.rank, steps.batch, steps.bucket):
                    _drop(values, [name])  # the number is another bucket's now
                return None
            steps.version = self._server.version
            steps.lags = None if steps.kind is PULL else self._server.lags_of(steps.batch)
        subset = steps.subset
        progress = subset.progress
        message = _KeptMessage(steps, head, frames[2:], number, now)
        is_its_own = bool(progress.kept) or subset.has(values.store.progress, progress.number)
        if not (is_its_own and progress.version == steps.version):
            if self._kept and (others := self._keeping(subset, values)):
                return self._pull_of_some(others, message)
            if not self._look(subset, values):
                return None
        return self._pull(values, message) if steps.kind is PULL else self._push(values, message)

    def take_bytes(self, link: str, data: bytes, now: float) -> Actions | None:
        """As `take`, for what was received from a link at once: a message with a `_Steps.form`, and nothing else."""
        values = self._values.get(int.from_bytes(data[_STORE_RECEIVED], "little"))
        if values is None or self._server.gone:
            return None
        steps = values.plans.get((link, data[:_NUMBER_RECEIVED], data[_ONE_RECEIVED]))
        if steps is None or steps.form[1] != len(data) or steps.version != self._server.version:
            return None
        subset, row, store = steps.subset, steps.row, values.store
        progress, number = subset.progress, int.from_bytes(data[_ROUND_RECEIVED], "little")
        is_its_own = bool(progress.kept) or store.progress.item(subset.first) == progress.number
        is_in_step = progress.version == steps.version and number == progress.done + 1 and row not in progress.came
        if not (is_its_own and is_in_step) or values.rule is not None or progress.side < 0:
            return None
        if values.lending:
            self._engine.give_back()
            if values.lending:
                return None
        payload = memoryview(data)[_HEAD_RECEIVED.stop :]
        message = _KeptMessage(steps, data[_HEAD_RECEIVED], [payload], number, now)
        return self._add(values, message, [np.frombuffer(payload, steps.dtype)], self._engine.completes_small)

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
        if steps is not None and steps.form is not None:
            received = _received_name(name, steps.form)
            values.plans[received] = steps
            values.plan_bytes += _bytes_of(received, steps)
        values.plan_bytes += _bytes_of(name, steps) - (_bytes_of(name, times) if times > 1 else 0)
        return steps

    def _forget(self) -> None:
        """Forget what came by links that have ended."""
        for values in self._engine.values.values():
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
        has_its_values = bool(sizes) == (message.kind is not PULL)
        are_dense_sums = not (store.row_size[batch.shards].any() or store.op[batch.shards].any())
        has_its_step = bucket is not None or not message.step
        if not (are_alike and is_packed and is_whole and has_its_values and has_its_step and are_dense_sums):
            return None
        subset = self._shard_set(values, batch.shards, sizes)
        if not subset.size:
            return None
        answered = (entries if bucket is None else NO_ENTRIES).copy()
        answered["payload"] = Payload.PACKED
        reply = Message(message.kind, store=store.number, bucket=message.bucket, entries=answered, is_reply=True)
        me = self._server.me
        head = bytes(wire.encode(reply, (ROLE_CODES["server"], me.rank, me.incarnation))[0])
        row, first = int(store.row[rank]), int(rounds[0]) - message.step
        about = role.Batch(store, batch.shards, replace(batch.message, entries=NO_ENTRIES), NO_ENTRIES)
        answer = head[_FRONT], head[_NEXT : _ROUND.start] if len(answered) == 1 else head[_LISTED]
        kind, dtype = message.kind, DTYPES[subset.code]
        is_small = len(entries) == len(sizes) == 1 and bucket is None and kind is PUSHPULL and subset.size < LONG_BYTES
        form = form_of(frames) if is_small and work_dtype(dtype) == dtype else None
        made = entries.copy(), answered, answer, kind, dtype, form
        return _Steps(link, rank, about, first, bucket, subset, row, *made)

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
            values.plans[progress.number,] = progress
            found = ShardSet(shards, first, code, index, layout, size * itemsize, progress)
            values.plans[name, lengths] = found
            values.plan_bytes += 4 * shards.nbytes
        return found

    def _look(self, subset: ShardSet, values: Values) -> bool:
        """Look how far the shards are, and whether nothing has come for them since their last round."""
        store, progress = values.store, subset.progress
        progress.begin_round(values)
        done = store.done.item(subset.first)
        is_usual = not values.encoded and (values.rule is None or values.is_flat(subset.code))
        is_even = subset.has(store.done, done) and subset.has(store.ordered, done)
        has_more = (store.last[:, subset.shards] != done).any() or store.owed[:, subset.shards].any()
        if has_more or not (is_usual and is_even):
            return False
        progress.done, progress.side, progress.version = done, values.side_of(subset), self._server.version
        store.progress[subset.index] = progress.number
        return True

    def _keeping(self, subset: ShardSet, values: Values) -> list[ShardProgress | None]:
        """Return what sets were looked at last with each of the shards, if any of them keeps messages."""
        numbers = np.unique(values.store.progress[subset.shards]).tolist()
        last = [values.plans.get((number,)) for number in numbers]
        return last if any(one is not None and one.kept and one.kept[0] in self._kept for one in last) else []

    # What messages ask for

    def _push(self, values: Values, message: _KeptMessage) -> Actions | None:
        """Take in a contribution to the round that is open."""
        steps, head, payloads, number, _ = message
        subset = steps.subset
        progress, row = subset.progress, steps.row
        if number != progress.done + 1 or row in progress.came:
            return None
        is_last = len(progress.came) == len(values.store.last) - 1
        is_long = subset.size >= LONG_BYTES or subset.size > self._engine.much_bytes
        if is_long and not self._takes(values, subset, payloads, is_last=is_last):
            return None
        told: Actions = []
        if steps.kind is PUSH:
            told = [role.SendFrames(steps.link, [steps.answer[0] + head[_REQUEST] + bytes(12), b""])]
        added = self._add(values, message, steps.parts_of(payloads), self._engine.completes)
        return None if added is None else [*added, *told]

    def _add(
        self, values: Values, message: _KeptMessage, parts: list[Array], completes: Callable[..., bool]
    ) -> Actions | None:
        """Keep a contribution with its parts, or if it is the last one, do what `completes` the round."""
        steps, head, _, number, now = message
        subset, progress = steps.subset, steps.subset.progress
        if steps.lags is not None and steps.lags.wants(number, now):
            self._server.sample((steps.rank,), steps.batch, (number,), now)
        progress.version = -1  # until all is done
        if len(progress.came) < len(values.store.last) - 1:
            progress.add(values, subset, parts)
            progress.came.add(steps.row)
            self._counters.bytes_in += subset.size
            self._keep(progress, message)
            progress.version = steps.version
            return []
        if not completes(values, number, subset, progress.addends(values, subset, parts)):
            return None
        return self._completed(values, steps, head, number)

    def _completed(self, values: Values, steps: _Steps, head: bytes, number: int) -> Actions:
        """A round is over: note it, and answer those who wait for it; who sent the last contribution is the last."""
        store, subset, counters = values.store, steps.subset, self._counters
        progress, index = subset.progress, subset.index
        store.last[:, index] = store.ordered[index] = store.done[index] = progress.done = number
        store.fresh[index] = False
        side, kept = progress.side, [*map(self._kept.pop, progress.kept)]
        progress.begin_round(values)
        progress.version = self._server.version
        answers = [
            self._answer(values, each.steps, each.head, number, side) for each in kept if each.steps.kind is not PUSH
        ]
        if steps.kind is not PUSH:
            answers.append(self._answer(values, steps, head, number, side))
        counters.bytes_in += subset.size
        counters.pushes += len(store.last)
        counters.pulls += len(answers)
        counters.updates += len(subset.shards)
        return answers

    def _pull(self, values: Values, message: _KeptMessage) -> Actions | None:
        """Answer a pull of the worker's last round, or keep it with the round that is open."""
        progress = message.steps.subset.progress
        if progress.side < 0 or message.number != progress.done + (message.steps.row in progress.came):
            return None
        if progress.done == message.number:
            self._counters.pulls += 1
            return [self._answer(values, message.steps, message.head, message.number, progress.side)]
        self._keep(progress, message)
        return []

    def _pull_of_some(self, others: Sequence[ShardProgress | None], message: _KeptMessage) -> Actions | None:
        """Keep a pull of some shards of a set whose round is open."""
        steps, progress = message.steps, others[0]
        if progress is None or len(others) > 1 or progress.version != steps.version or steps.kind is not PULL:
            return None
        if message.number != progress.done + 1 or steps.row not in progress.came:
            return None
        self._keep(progress, message)
        return []

    def _keep(self, progress: ShardProgress, message: _KeptMessage) -> None:
        self._count += 1
        self._kept[self._count] = message
        progress.kept.append(self._count)

    def _takes(self, values: Values, subset: ShardSet, payloads: Sequence[Buffer], *, is_last: bool) -> bool:
        """Whether a long contribution is not too much work, and can be kept if it is not the last one: it is memory of
        its sender, or not too much with what is kept."""
        frame = max(payloads, key=len)
        if self._engine.is_much(values, subset.size, frame):
            return False
        if is_last or is_shared(frame):
            return True
        self._kept_bytes = subset.size + self._kept_bytes * bool(self._kept)
        return self._kept_bytes <= KEPT_BYTES

    def _answer(self, values: Values, steps: _Steps, head: bytes, number: int, side: int) -> role.Action:
        """Return the answer with the values of a round, which are on one side of their arena."""
        subset, index, (front, middle) = steps.subset, steps.subset.index, steps.answer
        try:
            frames = subset.frames.get(side)
            if frames is None:
                shards = subset.shards
                frames = frames_of(ReplyValues(values, shards, shards, values.side[shards], 0))
                if not isinstance(frames[0], bytes):  # else they are copies
                    subset.frames[side] = frames
            if len(steps.answered) == 1:
                made = front + head[_REQUEST] + middle + head[_ROUND]
            else:
                steps.answered["round"] = number
                made = front + head[_REQUEST] + middle + head[_STEP] + steps.answered.tobytes()
            answer = role.SendFrames(steps.link, [made, b"", *frames], (values, index, index, side, 0), steps.form)
        except Exception as err:  # as `WorkEngine` refuses a Deliver
            event = role.WorkDone(role.Discard(0), err, traceback.format_exc())
            return role.Send(steps.link, failed(steps.batch_of(head, number).message, event))
        self._counters.bytes_out += subset.size
        return answer


def _fixed_in(head: bytes) -> bytes:
    """Return all of the entries but the rounds."""
    whole = len(head) - (len(head) - _HEAD) % _FIXED.itemsize
    return np.frombuffer(head[_HEAD:whole], _FIXED)["fixed"].tobytes()


def _received_name(name: tuple[Any, ...], form: Form) -> tuple[Any, ...]:
    """Return the name by which `take_bytes` finds a message, by that of its frames and its form."""
    link, front, one, *_ = name
    return link, form[0] + front, one


def _bytes_of(name: tuple[Any, ...], known: Any) -> int:
    """Return about how much memory it takes to know a message, without what others share."""
    arrays = known.entries.nbytes + known.answered.nbytes if isinstance(known, _Steps) else 0
    return len(name[2]) + 8 * len(name) + arrays


def _drop(values: Values, names: Iterable[tuple[Any, ...]]) -> None:
    for name in names:
        values.plan_bytes -= _bytes_of(name, values.plans.pop(name))
