"""The engine of a server: does the work that the server's decisions ask for, in that order, on a device's arrays.

Little work is done at once. Much work is done by the engine's own thread, so that the loop goes on receiving; `do`
returns None then, and `result` has what came of it later. While such work is under way all other work waits for its
turn, also if it is little: results come in the order of the work.

What the work consists of is in `arithmetic` and `replies`, over the arrays of `values`. An arena has one or more
sides, which are laid out alike; for each shard one of them has its present value. A value that is lent to a reply is
not written until the reply has left, and until a receiver on this host has read it: an update meanwhile writes a side
that no reply reads, and there is one more if all of them are read.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from distrun_runtime.arrays.cores import give_way
from distrun_runtime.arrays.device import CpuDevice, Device, DeviceArray, on_host
from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.arrays.gpu_frames import IN_USE, place_of
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import reduce
from distrun_runtime.ops.compression import numbered
from distrun_runtime.ops.reduce import read
from distrun_runtime.protocol.message import DTYPES, Kind, Message, payloads_of, rows_of, size_of
from distrun_runtime.ps import arithmetic, checks, replies, role, statefile
from distrun_runtime.ps import counters as stages
from distrun_runtime.ps.counters import Counters
from distrun_runtime.ps.device_choice import Placement
from distrun_runtime.ps.replies import failed
from distrun_runtime.ps.routing import MESSAGE_BYTES, ROUNDS_AT_ONCE, SHARED_MESSAGE_BYTES
from distrun_runtime.ps.shards import Store, relayed
from distrun_runtime.ps.trace import Recorder
from distrun_runtime.ps.values import ShardSet, Values
from distrun_runtime.transport import base as transport
from distrun_runtime.transport.host_segments import is_shared

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_sharing import ReadExports

MUCH_BYTES = 1024 * 1024
"""Work on at least so many bytes is done by the engine's thread. For less, handing it over would take as long."""
PLAIN = 4
"""Times so much where values are only added: what a message has takes less than to decide anew and to hand it over."""
SHARED = SHARED_MESSAGE_BYTES // MUCH_BYTES
"""Times so much, all that a message has, where it comes in shared memory: nothing has to be received meanwhile."""
QUEUE_BYTES = 64 * 1024 * 1024
"""With more than this in the queue nothing more is received until the engine has caught up."""
CLOSE_S = 2.0
"""How long the end of a node waits for work that is under way; a rule of the user's may take any time."""


@dataclass(frozen=True)
class Reply:
    """The answer to a pull (or a message of a relay), to be sent; what was `lent` is given back when it has left."""

    link: str
    message: Message
    lent: Sequence[replies.ReplyValues] = ()


class WorkEngine:
    """Does a server's work on the arrays of its devices.

    Arguments:
        device: where arrays are, but for stores that `placement` has elsewhere.
        placement: None: all stores are on `device`.
        imports: modules that users' rules may come from.
        much_bytes: from how many bytes on work is done by the engine's thread.

    Threads: one at a time, that of the node's loop.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters | None = None,
        recorder: Recorder | None = None,
        imports: Sequence[str] = (),
        *,
        placement: Placement | None = None,
        much_bytes: int = MUCH_BYTES,
    ) -> None:
        self._device = device
        self._placement = placement or Placement(device)
        self._placement.let_go = self._drop_spares
        self._counters = counters or Counters()
        self._recorder = recorder or Recorder()
        self._imports = tuple(imports)
        self.much_bytes = much_bytes
        self._values: dict[int, Values] = {}
        self._rules: dict[int, tuple[rules.Rule, rules.RuleSpec]] = {}
        """By store; also of stores that have no values yet."""
        self._lent: dict[int, list[replies.ReplyValues]] = {}
        """By the pull's ticket."""
        self._staged: dict[int, rules.RuleSpec | None] = {}
        """Stores whose saved states are being loaded, with the rule that these were read for."""
        self._out: dict[transport.Lease, Sequence[replies.ReplyValues]] = {}
        """What replies carry that have not left yet."""
        self._returned: deque[Sequence[replies.ReplyValues]] = deque()
        """What replies carried that have left; the next work gives it back."""
        self.under_way = 0
        """How much work was handed to the thread whose result was not taken yet."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[tuple[role.EngineWork, int]] = deque()
        self._queued_bytes = 0
        self._results: deque[role.WorkDone] = deque()
        self._worked = stages.Worked()
        self._thread: threading.Thread | None = None
        self._wake: Callable[[], None] = lambda: None
        self._is_closed = False
        self.share_gpu: Callable[[GpuDevice], None] = lambda gpu: None
        self.exports_to: Callable[[Sequence[str], GpuDevice], ReadExports | None] = lambda links, gpu: None
        """Of the transport (`host_paths.BulkTransport`)."""

    # The order of work

    def do(self, what: role.EngineWork) -> role.WorkDone | None:
        """Do one piece of work; what it raises is in the result. None: it is done later, and `result` has it then."""
        size = _size_of(what)
        if not self.under_way and isinstance(what, (role.Deliver, role.Forward)):
            # With work that is open this waits its turn in any case, and what is lent is the thread's.
            for each in self._lent.get(what.ticket, ()):
                size += each.copied_bytes
        if not self.under_way and (size < self.much_bytes or isinstance(what, role.ALONE)):
            return self._do(what)
        self.under_way += 1
        with self._changed:
            while self._queued_bytes >= QUEUE_BYTES:
                self._changed.wait()
            self._queue.append((what, size))
            self._queued_bytes += size
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="distrun-engine", daemon=True)
            self._thread.start()
        return None

    @property
    def failed(self) -> KVError | None:
        """The error after which this process cannot use its device any more; None: there was none."""
        gpu = self._placement.gpu
        return self._placement.failed if gpu is None else gpu.failed

    def result(self, waits: bool = False) -> role.WorkDone | None:
        """Return what came of the first work that was left for later; None: it is not done yet.

        Arguments:
            waits: return when it is done.
        """
        with self._changed:
            if waits and self.under_way:
                self._changed.wait_for(lambda: self._results)
            if not self._results:
                return None
            self.under_way -= 1
            return self._results.popleft()

    # What is done while nothing is under way (`ps.steady`)

    @property
    def values(self) -> Mapping[int, Values]:
        """The arrays of all stores, by their numbers."""
        return self._values

    @property
    def is_profiled(self) -> bool:
        """Whether a profile is made of work."""
        return self._recorder.is_on

    def is_much(self, values: Values, nbytes: int, frame: Buffer) -> bool:
        """Whether a contribution is so much work that the engine's thread does it.

        Arguments:
            frame: the largest that brings it.
        """
        if nbytes <= self.much_bytes:
            return False
        times = SHARED if is_shared(frame) else PLAIN if values.rule is None else 1
        return nbytes > self.much_bytes * times

    def completes(self, values: Values, number: int, of: ShardSet, addends: Sequence[Sequence[DeviceArray]]) -> bool:
        """Do an Apply (`arithmetic.apply_alike`) of all contributions of a round; False: it was not done.

        If it fails, the next Apply of these shards does.
        """
        self.give_back()
        give_way(of.size)
        try:
            return arithmetic.apply_alike(values, number, of, addends)
        except Exception as err:
            values.lose(number, of.shards, err, traceback.format_exc())
            return False

    def completes_small(self, values: Values, number: int, of: ShardSet, addends: Sequence[Sequence[Array]]) -> bool:
        """As `completes`, for few values of one run, without a rule, in the dtype that sums have, of which no reply
        reads any. numpy must not warn in this thread."""
        try:
            [parts], [target] = addends, values.targets(of, of.progress.side)
            if len(parts) == 2:
                np.add(parts[0], parts[1], target)
            else:
                target[...] = parts[0]
        except Exception as err:
            values.lose(number, of.shards, err, traceback.format_exc())
            return False
        return True

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake` when there are results to be taken. It is called by the engine's thread."""
        self._wake = wake

    def close(self) -> None:
        """End the thread. What was not begun is not done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_closed:
                    self._changed.wait()
                if self._is_closed:
                    return
                what, size = self._queue.popleft()
            try:
                done = self._do(what)
            except BaseException as err:
                # A user's rule may ask for the end of the process: the loop's thread hears of it.
                done = role.WorkDone(what, err, traceback.format_exc())
            with self._changed:
                is_first = not self._results
                self._results.append(done)
                self._queued_bytes -= size
                self._changed.notify_all()
            del what, done  # They may be the last that refers to a store's arrays, and this thread may wait for long.
            if is_first:
                self._wake()

    def _do(self, what: role.EngineWork) -> role.WorkDone:
        self.give_back()
        try:
            if self._recorder.is_on:
                with self._recorder.span(type(what).__name__.lower(), "work", **_about(what)):
                    value = self._value_of(what)
            else:
                value = self._value_of(what)
        except Exception as err:
            # A user's rule may raise anything; the caller gets it with this traceback, the server lives.
            return role.WorkDone(what, err, traceback.format_exc())
        return role.WorkDone(what, value=value)

    def _value_of(self, what: role.EngineWork) -> Any:
        """Do what `what` asks for and return its result; note how long work on sums took."""
        match what:
            case role.Add() | role.Step():
                values = self._of(what.batch.store)
            case role.Apply() | role.FinishUpdate():
                values = self._of(what.store)
            case _:
                return self._OTHER_WORK[type(what)](self, what)
        began = time.monotonic()
        result = _ON_SUMS[type(what)](values, what)
        # A round's last contributions are added as the rule goes over them.
        is_sum = values.rule is None or isinstance(what, role.Add)
        self._worked.note(stages.ADD if is_sum else stages.RULE, began, time.monotonic())
        return result

    # Replies that are on their way

    def sent(self, lent: Sequence[replies.ReplyValues], by: transport.Lease | None) -> None:
        """A reply was given to the transport; None: it was not sent."""
        with self._lock:
            if by is None or by.is_over:
                self._returned.append(lent)
            else:
                self._out[by] = lent

    def released(self, by: transport.Lease) -> None:
        """A message has left the transport: the buffers of a reply, if it was one, may be written again."""
        with self._lock:
            lent = self._out.pop(by, None)
            if lent is not None:
                self._returned.append(lent)
        if lent is not None and not self.under_way:
            self.give_back()  # There may be no more work, and they keep the arrays of their store.

    def give_back(self) -> None:
        """Give back what replies carried that have left, also those of which the loop was not told yet."""
        if not self._out and not self._returned:
            return
        with self._lock:
            for by in list(self._out):
                if by.is_over:
                    self._returned.append(self._out.pop(by))
            while self._returned:
                for each in self._returned.popleft():
                    each.give_back()

    # Values

    def _of(self, store: Store) -> Values:
        """Return the arrays of a store; the first one who asks makes their place."""
        found = self._values.get(store.number)
        if found is None:
            found = self._values[store.number] = Values(store, self._device)
            if store.number in self._rules:
                found.rule, found.spec = self._rules[store.number]
        return found

    def _settle(self, values: Values, rule: rules.Rule | None) -> None:
        """Have a store's arrays where they belong, with this rule."""
        device = self._placement.place(values, rule)
        if device.is_gpu:
            self.share_gpu(cast("GpuDevice", device))
        if device is values.device:
            return
        try:
            values.move(device)
        except KVError as err:
            if not device.is_gpu or not self._placement.give_up(values, err):
                raise
        self._placement.trim()

    def _drop_spares(self) -> None:
        for values in self._values.values():
            values.spare_sums.clear()

    def _reserve(self, what: role.Reserve) -> None:
        self._place(self._of(what.store), what.shards)

    def _fill(self, what: role.Fill) -> None:
        batch = what.batch
        values = self._of(batch.store)
        before = values.extent()
        try:
            self._place(values, batch.shards)
            try:
                self._write(values, batch)
            except KVError as err:
                if not values.device.is_gpu or not self._placement.give_up(values, err):
                    raise
                values.move(self._device)
                self._placement.trim()
                self._write(values, batch)
        except BaseException:
            values.take_back(before, batch.shards)
            raise
        if values.device.is_gpu and isinstance(self._device, CpuDevice):
            # Answers are copied there, once for all workers: page-locked before a round needs it.
            self._device.reserve(*_answered(batch), ROUNDS_AT_ONCE, store=batch.store.number)

    def _place(self, values: Values, shards: Array) -> None:
        """Give new shards places, and have the store where it belongs with them."""
        for code, its, _ in values.codes(shards):
            values.place(its, code)
        self._settle(values, values.rule)

    def _write(self, values: Values, batch: role.Batch) -> None:
        for code, given in arithmetic.given_by(values, batch):
            values.write_sums(code, given.shards, given.runs, [[part] for part in given.parts])

    def _try_fill(self, what: role.TryFill) -> None:
        message = what.message
        if message.store not in self._rules:
            return
        rule, names = self._rules[message.store][0], dict(message.body.get("names", ()))
        for entry, payload in zip(
            rows_of(message.entries), payloads_of(message.entries, message.payloads), strict=True
        ):
            try:
                dtype = DTYPES[entry.dtype]
                weight = self._device.elements(
                    bytes(entry.length * dtype.itemsize) if payload is None else payload, dtype
                )
                rule.check(weight.dtype)
                if rule.name not in rules.RULES:
                    rule.new_state(weight)
            except KVError as err:
                raise KVError(f"key {names.get(entry.key, entry.key)!r}: {err}") from None

    def _assign(self, what: role.Assign) -> None:
        values = self._of(what.batch.store)
        self._write(values, what.batch)
        values.note_writes(what.batch.shards)
        if values.rule is not None:
            for shard in what.batch.shards.tolist():
                values.renew_master(shard)

    def _forget(self, what: role.Forget) -> None:
        self._of(what.batch.store).forget(what.batch.shards)

    def _clear(self, what: role.Clear) -> None:
        if what.store is None:
            for known in (self._values, self._rules, self._lent, self._staged):
                known.clear()
        else:
            for number in (what.store, relayed(what.store)):
                self._values.pop(number, None)
            self._rules.pop(what.store, None)
            self._staged.pop(what.store, None)
        self._placement.forget(what.store)
        if isinstance(self._device, CpuDevice):
            self._device.unreserve(what.store)

    def _check(self, what: role.Check) -> None:
        batch = what.batch
        values, message = self._values[batch.store.number], batch.message
        frames = payloads_of(batch.entries, message.payloads)
        for shard, payload, codec in zip(batch.shards.tolist(), frames, batch.entries["codec"].tolist(), strict=True):
            if payload is None or codec not in checks.READ_FIRST:
                continue
            one = values.store.shard(shard)
            try:
                if message.kind is Kind.PULL and payload == reduce.ROUND_ROWS:
                    continue
                if message.kind is Kind.PULL:
                    reduce.decode_rows(payload, values.row_count(shard))
                else:
                    read(payload, one.length, DTYPES[one.dtype], one.row_size, arithmetic.how_of(batch, codec))
            except KVError as err:
                first = f"; row 0 here is row {one.offset // one.row_size} of the value" if one.offset else ""
                raise KVError(f"{values.named(shard)}: {err}{first}") from None

    def _release(self, what: role.Release) -> None:
        for number in (what.message.store, relayed(what.message.store)):
            values = self._values.get(number)
            if values is not None:
                arithmetic.keep_copies(values)

    # Answers

    def _lend(self, what: role.Lend) -> None:
        values = self._of(what.store)
        if what.codec and not values.has_residuals and not what.rows and numbered(what.codec).has_residual:
            values.has_residuals = True
            self._settle(values, values.rule)
        self._lent.setdefault(what.ticket, []).append(replies.lend(values, what))

    def _deliver(self, what: role.Deliver) -> Reply:
        """Whatever is wrong with the pull is said in the reply, and nothing raised."""
        lent = self._lent.pop(what.ticket, [])
        try:
            found, wanted = sum(len(each.at) for each in lent), len(what.entries)
            if found != wanted:
                raise KVError(
                    f"{wanted - found} of {wanted} values could not be made ready; this server's log says why"
                )
            gpu = lent[0].values.device if IN_USE and lent else self._device
            exports = self.exports_to([what.link], cast("GpuDevice", gpu)) if gpu.is_gpu else None
            message = replies.reply_of(what, lent, exports)
            if stages.ASKED in what.message.body:
                held = self._worked.since(what.since, time.monotonic())
                message = replace(message, body={**message.body, stages.ASKED: held})
        except Exception as err:
            message = failed(what.message, role.WorkDone(what, err, traceback.format_exc()))
        if message.is_error or not all(each.values.is_on_host for each in lent):
            for each in lent:  # the reply carries copies of what is on a GPU
                each.give_back()
            lent = []
        self._counters.bytes_out += message.size
        return Reply(what.link, message, lent)

    def _forward(self, what: role.Forward) -> Reply:
        lent = self._lent.pop(what.ticket)
        payloads = replies.frames_of(lent[0])
        self._counters.bytes_out += size_of(payloads)
        return Reply(what.link, replace(what.message, payloads=payloads), lent)

    def _discard(self, what: role.Discard) -> None:
        for each in self._lent.pop(what.ticket, []):
            each.give_back()

    # Rules and saved states

    def _try_rule(self, what: role.TryRule) -> None:
        """Have a user's rule say whether it likes the weights, before any server has it."""
        if what.spec is None:
            return
        rule = self._made(what.store, rules.RuleSpec.from_json(what.spec))
        values = self._values.get(what.store)
        if values is not None and rule.name not in rules.RULES:
            for shard in range(values.store.count):
                rule.new_state(on_host(values.weight(shard)))

    def _made(self, store: int, spec: rules.RuleSpec) -> rules.Rule:
        rule = rules.rule_of(spec, self._imports)
        values = self._values.get(store)
        if values is not None:
            table = values.store
            first = {(int(table.key[shards[0]]), int(table.dtype[shards[0]])) for shards in table.by_key.values()}
            rules.check_keys(rule, ((table.name(key), DTYPES[code]) for key, code in sorted(first)))
        return rule

    def _set_rule(self, what: role.SetRule) -> bool:
        """Return whether the new rule needs norms."""
        values = self._values.get(what.store)
        if what.spec is None:
            self._rules.pop(what.store, None)
            if values is not None:
                values.set_rule(None, None)
            return False
        spec = rules.RuleSpec.from_json(what.spec)
        rule = self._made(what.store, spec)
        if values is not None:
            self._settle(values, rule)
            values.set_rule(rule, spec)
        self._rules[what.store] = rule, spec
        return rule.needs_norms

    def _save(self, what: role.Save) -> dict[str, Any]:
        values = self._values.get(what.store)
        return statefile.save(what.message.body, values.saved() if values is not None else ())

    def _load(self, what: role.Load) -> None:
        body, values = what.message.body, self._values.get(what.store)
        present = self._rules.get(what.store, (None, None))[1]
        if body["action"] == "stage":
            spec = None if body["spec"] is None else rules.RuleSpec.from_json(body["spec"])
            rule = None if spec is None else self._made(what.store, spec)
            if values is not None:
                values.staged = statefile.stage(body, values.saved(), rule)
            self._staged[what.store] = spec
        elif body["action"] == "drop":
            if values is not None:
                values.staged = []
        elif self._staged.pop(what.store, None) != present:
            # The same on all servers: the scheduler changes rules one at a time.
            raise KVError("the rule was changed while states were being loaded; nothing was loaded, load them again")
        elif values is not None:
            staged, values.staged = values.staged, []
            values.restore(enumerate(staged))

    def _drop(self, what: role.DropUpdate) -> None:
        arithmetic.drop(self._of(what.store), what)

    _OTHER_WORK: ClassVar[Mapping[type, Callable[[WorkEngine, Any], Any]]] = {
        role.DropUpdate: _drop,
        role.Lend: _lend,
        role.Deliver: _deliver,
        role.Check: _check,
        role.Assign: _assign,
        role.Forget: _forget,
        role.Forward: _forward,
        role.Discard: _discard,
        role.Fill: _fill,
        role.TryFill: _try_fill,
        role.Reserve: _reserve,
        role.Release: _release,
        role.TryRule: _try_rule,
        role.SetRule: _set_rule,
        role.Save: _save,
        role.Load: _load,
        role.Clear: _clear,
    }


_ON_SUMS: Mapping[type, Callable[[Values, Any], Any]] = {
    role.Add: arithmetic.add,
    role.Apply: arithmetic.apply,
    role.Step: arithmetic.step,
    role.FinishUpdate: arithmetic.finish,
}


def _answered(batch: role.Batch) -> tuple[int, int]:
    """Return how many bytes all shards of a batch have, and in how many pieces answers may have them.

    The part of a pull whose round is over first is often copied before the rest: one piece more.
    """
    table, nbytes, pieces = batch.store, 0, 0
    for code in np.unique(table.dtype[batch.shards]).tolist():
        size = int(table.length[batch.shards[table.dtype[batch.shards] == code]].sum()) * DTYPES[code].itemsize
        nbytes, pieces = nbytes + size, pieces + 1 + size // MESSAGE_BYTES
    return nbytes, pieces + 1


_WORD_BYTES = 4
"""Of an element: most are float32."""


def _size_of(what: role.EngineWork) -> int:
    """Return about how many bytes work goes over; 0 for work that touches no elements."""
    batch = getattr(what, "batch", None) or getattr(what, "last", None)
    if IN_USE and batch is not None and any(map(place_of, batch.message.payloads)):
        return max(MUCH_BYTES, int(batch.message.size))  # Another process's GPU is waited for.
    match what:
        case role.Fill() | role.Assign() | role.Check() | role.Add() | role.Step():
            return what.batch.message.size
        case role.Apply(skip=False):
            return _WORD_BYTES * int(what.store.length[what.shards].sum())
        case role.FinishUpdate():
            return _WORD_BYTES * int(what.store.length[what.shard])
        case role.Lend() if what.codec:
            return _WORD_BYTES * int(what.store.length[what.shards].sum())
    return 0


def _about(what: role.EngineWork) -> dict[str, object]:
    batch = getattr(what, "batch", None)
    shards = getattr(batch, "shards", None) if batch is not None else getattr(what, "shards", None)
    return {} if shards is None else {"shards": len(shards)}
