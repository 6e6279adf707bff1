"""The engine of a server: the arithmetic on its shards. Arrays are touched here and nowhere else on a server.

Work is done in the order in which it is given. It comes a message at a time: what lies next to each other in an arena
is added, updated and lent by one call. A shard goes by itself where it must: rows, encoded payloads, rules that need
norms or are the user's.

A buffer that is lent to a reply is not written until the reply has left: an update meanwhile writes another side of
the arena.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from distrun_runtime.arrays.arena import Run, runs
from distrun_runtime.arrays.device import Buffer, Device
from distrun_runtime.arrays.dtypes import Array, narrow, widen, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import NormRule
from distrun_runtime.ops.reduce import Contribution, Dense, How, Sum, read, scaled, spread
from distrun_runtime.protocol.message import DTYPES, Flag, Kind, Message, Payload, payloads_of, rows_of
from distrun_runtime.ps import checks, role, statefile, work
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.replies import failed, refusal
from distrun_runtime.ps.shards import SYNC, Store
from distrun_runtime.ps.stats import Counters
from distrun_runtime.ps.values import Given, Half, Round, Values
from distrun_runtime.transport import base as transport

_HELD_IN_ARENA, _HELD_BY_SHARD = -1, -2
"""Where the sum of a shard's round is, in place of the number of a held contribution."""

_JOINED_FRAMES = 16
_JOINED_BYTES = 64 * 1024
"""A reply of more frames than this is joined to one if it has fewer bytes than that a frame."""


@dataclass
class Applied:
    """What came of an Apply."""

    failed: dict[int, tuple[BaseException, str]] = field(default_factory=dict)
    """Shard to what its rule raised, and the traceback."""
    squares: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Shard to its sums of squares: it waits for norms."""


@dataclass(eq=False)
class Lease:
    """Buffers of one store that are out."""

    values: Values
    held: list[tuple[Array, Array]]
    """(Sides, shards) that may not be written."""

    def release(self) -> None:
        """The buffers may be written again."""
        for sides, shards in self.held:
            self.values.lent[sides, shards] -= 1
        self.held = []


@dataclass(frozen=True)
class Reply:
    """The answer to a pull, to be sent; `lease` covers its payloads."""

    link: str
    message: Message
    lease: Lease | None = None


@dataclass(eq=False)
class _Lent:
    """What one Lend holds for a pull."""

    values: Values
    shards: Array
    at: Array
    """Numbers of the entries."""
    sides: Array
    codec: int
    payloads: list[Buffer] | None = None
    """For each shard what was made of it; None: the values themselves go out."""
    error: str = ""


class Engine:
    """Does a server's work on the arrays of a device.

    Arguments:
        imports: modules that users' rules may come from.

    Threads: one at a time.
    """

    def __init__(
        self,
        device: Device,
        counters: Counters | None = None,
        recorder: Recorder | None = None,
        imports: Sequence[str] = (),
    ) -> None:
        self._device = device
        self._counters = counters or Counters()
        self._recorder = recorder or Recorder()
        self._imports = tuple(imports)
        self._values: dict[int, Values] = {}
        self._rules: dict[int, tuple[rules.Rule, rules.RuleSpec]] = {}
        """By store; also of stores that have no values yet."""
        self._lent: dict[int, list[_Lent]] = {}
        self._out: dict[transport.Lease, Lease] = {}
        """Replies that have not left yet."""
        self._staged: dict[int, rules.RuleSpec | None] = {}
        """Stores whose saved states are being loaded, with the rule that these were read for."""
        self._does: dict[type[Any], Callable[[Any], Any]] = {
            work.Fill: self._fill,
            work.TryFill: self._try_fill,
            work.Assign: self._assign,
            work.Check: self._check,
            work.Add: self._add,
            work.Apply: self._apply,
            work.Step: self._step,
            work.Finish: self._finish,
            work.Drop: self._drop,
            work.Lend: self._lend,
            work.Deliver: self._deliver,
            work.Discard: self._discard,
            work.Clear: self._clear,
            work.TryRule: self._try_rule,
            work.SetRule: self._set_rule,
            work.Save: self._save,
            work.Load: self._load,
        }

    def do(self, what: work.Work) -> role.Done:
        """Do one piece of work; what it raises is in the result."""
        try:
            if self._recorder.is_on:
                with self._recorder.span(type(what).__name__.lower(), "work", **_about(what)):
                    value = self._does[type(what)](what)
            else:
                value = self._does[type(what)](what)
        except Exception as err:
            # A user's rule may raise anything; the caller gets it with this traceback, the server lives.
            return role.Done(what, err, traceback.format_exc())
        return role.Done(what, value=value)

    def sent(self, lease: Lease, by: transport.Lease | None) -> None:
        """A reply was given to the transport; None: it was not sent."""
        if by is None or by.is_over:
            lease.release()
        else:
            self._out[by] = lease

    def released(self, by: transport.Lease) -> None:
        """A message has left the transport: the buffers of a reply, if it was one, may be written again."""
        lease = self._out.pop(by, None)
        if lease is not None:
            lease.release()

    def _reap(self) -> None:
        """Release the buffers of replies that have left and of which the loop was not told yet."""
        for by in [by for by in self._out if by.is_over]:
            self.released(by)

    # Values

    def _values_of(self, store: Store) -> Values:
        found = self._values.get(store.number)
        if found is None:
            found = self._values[store.number] = Values(store, self._device)
            if store.number in self._rules:
                found.rule, found.spec = self._rules[store.number]
        return found

    def _fill(self, what: work.Fill) -> None:
        values = self._values_of(what.batch.store)
        for code, at in values.codes(what.batch.shards):
            values.place(what.batch.shards if at is None else what.batch.shards[at], code)
        self._write(values, what.batch)

    def _write(self, values: Values, batch: work.Batch) -> None:
        for code, given in self._given(values, batch):
            arena = values.arenas[code]
            for run, part in zip(given.runs, given.parts, strict=True):
                for shards, piece, (elements,), side in values.cut(given.shards, run, [part]):
                    self._device.sum([elements], arena.view(piece.begin, piece.end, side))
                    values.side[shards] = side

    def _try_fill(self, what: work.TryFill) -> None:
        message = what.message
        rule, names = self._rules[message.store][0], dict(message.body.get("names", ()))
        for entry, payload in zip(
            rows_of(message.entries), payloads_of(message.entries, message.payloads), strict=True
        ):
            try:
                weight = self._device.elements(payload or b"", DTYPES[entry.dtype])
                rule.check(weight.dtype)
                _try(rule, weight)
            except KVError as err:
                raise KVError("key %r: %s" % (names.get(entry.key, entry.key), err)) from None

    def _assign(self, what: work.Assign) -> None:
        self._reap()
        values = self._values_of(what.batch.store)
        self._write(values, what.batch)
        values.forget_encoded(what.batch.shards)
        if values.rule is not None:
            for shard in what.batch.shards.tolist():
                state = values.state_of(shard)
                if state is not None:
                    rules.renew_master(values.weight(shard), state)

    def _clear(self, what: work.Clear) -> None:
        self._values.clear()
        self._rules.clear()
        self._lent.clear()
        self._staged.clear()

    # What messages bring

    def _given(self, values: Values, batch: work.Batch) -> list[tuple[int, Given]]:
        """Return what a batch of plain payloads brings, by code of dtype."""
        codes = values.codes(batch.shards)
        packed = len(batch.entries) > 0 and batch.entries["payload"][0] == Payload.PACKED
        if len(codes) == 1 and packed and batch.at is None:
            return [(codes[0][0], self._packed(values, batch, codes[0][0]))]
        given = []
        frames = payloads_of(batch.entries, batch.message.payloads)
        entries = range(len(batch.entries)) if batch.at is None else batch.at.tolist()
        for code, at in codes:
            shards = batch.shards if at is None else batch.shards[at]
            mine = list(entries) if at is None else [entries[place] for place in at.tolist()]
            parts = [self._elements(frames[number] or b"", code, batch.how.scale) for number in mine]
            alone = runs(values.at[shards], values.store.length[shards], range(1, len(shards)))
            given.append((code, Given(shards, alone, parts)))
        return given

    def _elements(self, frame: Buffer, code: int, scale: float) -> Array:
        """Return the elements of bytes, times a number: in the dtype, or in its work dtype if the number is not 1."""
        elements: Array = self._device.elements(frame, DTYPES[code])
        return elements if scale == 1 else scaled(widen(elements), scale)

    def _packed(self, values: Values, batch: work.Batch, code: int) -> Given:
        frames = [self._elements(frame, code, batch.how.scale) for frame in batch.message.payloads]
        lengths = values.store.length[batch.shards]
        ends = np.cumsum(lengths)
        edges = np.cumsum([len(frame) for frame in frames])
        cuts = np.searchsorted(ends, edges, side="right")[:-1].tolist() if len(frames) > 1 else ()
        found = runs(values.at[batch.shards], lengths, cuts)
        if len(frames) == 1:
            frame = frames[0]
            return Given(batch.shards, found, [frame[run.offset : run.offset + run.end - run.begin] for run in found])
        parts = []
        number, begin = 0, 0
        limits = edges.tolist()
        for run in found:
            while number < len(limits) - 1 and run.offset >= limits[number]:
                begin = limits[number]
                number += 1
            parts.append(frames[number][run.offset - begin : run.offset - begin + run.end - run.begin])
        return Given(batch.shards, found, parts)

    def _contributions(self, values: Values, batch: work.Batch) -> Iterator[tuple[int, Contribution]]:
        """Yield each shard of a batch with what it brings, one by one."""
        frames = payloads_of(batch.entries, batch.message.payloads)
        entries = range(len(batch.entries)) if batch.at is None else batch.at.tolist()
        codecs_of = batch.entries["codec"].tolist()
        for shard, number in zip(batch.shards.tolist(), entries, strict=True):
            one = values.store.shard(shard)
            payload = frames[number]
            how = batch.how if codecs_of[number] == batch.how.codec else _how(batch, codecs_of[number])
            yield shard, read(b"" if payload is None else payload, one.length, DTYPES[one.dtype], one.row_size, how)

    def _check(self, what: work.Check) -> None:
        batch = what.batch
        values, message = self._values[batch.store.number], batch.message
        frames = payloads_of(batch.entries, message.payloads)
        for shard, payload, codec in zip(batch.shards.tolist(), frames, batch.entries["codec"].tolist(), strict=True):
            if payload is None or codec not in checks.READ_FIRST:
                continue
            one = values.store.shard(shard)
            try:
                if message.kind is Kind.PULL:
                    rowcodec.decode_rows(payload, values.row_count(shard))
                else:
                    how = batch.how if codec == batch.how.codec else _how(batch, codec)
                    read(payload, one.length, DTYPES[one.dtype], one.row_size, how)
            except KVError as err:
                first = "; row 0 here is row %d of the value" % (one.offset // one.row_size) if one.offset else ""
                raise KVError("%s: %s%s" % (self._named(values, shard), err, first)) from None

    def _named(self, values: Values, shard: int) -> str:
        key = int(values.store.key[shard])
        return "key %r of shape %s" % (values.store.name(key), values.store.shapes.get(key, ()))

    # Sums of rounds

    def _add(self, what: work.Add) -> None:
        values = self._values[what.batch.store.number]
        of = values.round_of(what.round)
        batch = what.batch
        of.open += int(np.count_nonzero(of.where[batch.shards] == 0))
        if values.store.is_deterministic:
            for shard, contribution in self._contributions(values, batch):
                of.by_rank.setdefault(shard, []).append((what.rank, contribution))
                of.where[shard] = _HELD_BY_SHARD
        elif not _is_plain(batch):
            for shard, contribution in self._contributions(values, batch):
                self._sum_of(values, of, shard).add(contribution)
        else:
            for code, given in self._given(values, batch):
                self._add_given(values, of, code, given)

    def _add_given(self, values: Values, of: Round, code: int, given: Given) -> None:
        where = of.where[given.shards]
        first = int(where[0])
        if not (where == first).all():
            for each in np.unique(where):
                self._add_given(values, of, code, given.take(np.flatnonzero(where == each), values))
        elif first == 0:
            number = max(of.held, default=0) + 1
            of.held[number] = given
            of.where[given.shards] = number
        elif first == _HELD_BY_SHARD:
            for run, part in zip(given.runs, given.parts, strict=True):
                for shard, piece in self._apart(values, given.shards, run, part):
                    self._sum_of(values, of, shard).add(Dense(widen(piece), False))
        elif first > 0 and of.held[first].is_like(given):
            sums = values.sums(of, code)
            for run, one, other in zip(given.runs, of.held[first].parts, given.parts, strict=True):
                self._device.sum([one, other], sums.view(run.begin, run.end))
            of.where[given.shards] = _HELD_IN_ARENA
            del of.held[first]
        else:
            self._fold(values, of, code, first)
            sums = values.sums(of, code)
            for run, part in zip(given.runs, given.parts, strict=True):
                there = sums.view(run.begin, run.end)
                self._device.sum([there, part], there)

    def _fold(self, values: Values, of: Round, code: int, number: int) -> None:
        """Copy a contribution that was held to the sums; nothing if they are there already."""
        given = of.held.pop(number, None)
        if given is None:
            return
        sums = values.sums(of, code)
        for run, part in zip(given.runs, given.parts, strict=True):
            self._device.sum([part], sums.view(run.begin, run.end))
        shards = given.shards
        of.where[shards[of.where[shards] == number]] = _HELD_IN_ARENA

    def _sum_of(self, values: Values, of: Round, shard: int) -> Sum:
        """Return the sum of one shard's round, as one that goes by shard from now on."""
        total = of.by_shard.get(shard)
        if total is None:
            total = of.by_shard[shard] = Sum(int(values.store.row_size[shard]))
            where = int(of.where[shard])
            code = int(values.store.dtype[shard])
            if where > 0:
                self._fold(values, of, code, where)
            if of.where[shard] == _HELD_IN_ARENA:
                there = values.sums(of, code).view(*values.span(shard))
                total.add(Dense(there.copy(), is_own=True))
            of.where[shard] = _HELD_BY_SHARD
        return total

    def _apart(self, values: Values, shards: Array, run: Run, part: Array) -> Iterator[tuple[int, Array]]:
        """Yield the shards of a run with the elements of each."""
        at = 0
        for shard in shards[run.first : run.last].tolist():
            length = int(values.store.length[shard])
            yield shard, part[at : at + length]
            at += length

    # Updates

    def _apply(self, what: work.Apply) -> Applied:
        values = self._values[what.store.number]
        result = Applied()
        if what.skip:
            values.forget_sums(what.round, what.shards)
            return result
        self._reap()
        values.forget_encoded(what.shards)
        if what.last is not None and (values.store.is_deterministic or not _is_plain(what.last)):
            self._add(work.Add(what.rank, what.round, what.last))
            last: work.Batch | None = None
        else:
            last = what.last
        givens = {} if last is None else dict(self._given(values, last))
        for code, at in values.codes(what.shards):
            shards = what.shards if at is None else what.shards[at]
            self._apply_some(values, what.round, code, shards, given=givens.get(code), result=result)
        values.forget_sums(what.round, what.shards)
        return result

    def _apply_some(
        self, values: Values, number: int, code: int, shards: Array, *, given: Given | None, result: Applied
    ) -> None:
        """Apply the round of shards of one dtype; `given`: their last contributions."""
        of = values.round_of(number)
        where = of.where[shards]
        first = int(where[0])
        if not (where == first).all():
            for each in np.unique(where):
                some = np.flatnonzero(where == each)
                part = None if given is None else given.take(some, values)
                self._apply_some(values, number, code, shards[some], given=part, result=result)
            return
        if first == _HELD_BY_SHARD:
            if given is not None:
                self._add_given(values, of, code, given)
            for shard in shards.tolist():
                total = _in_order(of, shard, int(values.store.row_size[shard]))
                self._update_alone(values, shard, total, (SYNC, number), result)
            return
        if first > 0:
            held = of.held[first]
            is_all = len(held.shards) == len(shards) and np.array_equal(held.shards, shards)
            if given is None and is_all:
                given = of.held.pop(first)
            elif given is not None and held.is_like(given):
                both = [[one, other] for one, other in zip(held.parts, given.parts, strict=True)]
                del of.held[first]
                self._update(values, code, shards, given.runs, both, turn=(SYNC, number), result=result)
                return
            else:
                self._fold(values, of, code, first)
                first = _HELD_IN_ARENA
        if first == _HELD_IN_ARENA:
            sums = values.sums(of, code)
            found = given.runs if given is not None else runs(values.at[shards], values.store.length[shards])
            more = [[part] for part in given.parts] if given is not None else [[] for _ in found]
            parts = [[sums.view(run.begin, run.end), *rest] for run, rest in zip(found, more, strict=True)]
            self._update(values, code, shards, found, parts, turn=(SYNC, number), result=result)
        elif given is not None:
            self._update(
                values, code, shards, given.runs, [[p] for p in given.parts], turn=(SYNC, number), result=result
            )

    def _update(
        self,
        values: Values,
        code: int,
        shards: Array,
        found: Sequence[Run],
        parts: Sequence[Sequence[Array]],
        *,
        turn: tuple[int, int],
        result: Applied,
    ) -> None:
        """Update shards of one dtype by the sums of the parts of each run."""
        arena = values.arenas[code]
        by_shard = values.rule is not None and (values.store.row_size[shards].any() or not values.is_flat(code))
        for run, given in zip(found, parts, strict=True):
            if by_shard:
                at = 0
                for shard in shards[run.first : run.last].tolist():
                    length = int(values.store.length[shard])
                    total = self._total([part[at : at + length] for part in given])
                    self._update_alone(values, shard, total, turn, result)
                    at += length
                continue
            for here, piece, addends, side in values.cut(shards, run, given):
                target = arena.view(piece.begin, piece.end, side)
                if values.rule is None:
                    self._device.sum(addends, target)
                    values.side[here] = side
                    continue
                present = int(values.side[here[0]])
                if side != present:
                    self._device.sum([arena.view(piece.begin, piece.end, present)], target)
                    values.side[here] = side
                self._step_run(values, code, here, piece, weight=target, parts=addends)

    def _total(self, parts: Sequence[Array]) -> Dense:
        if len(parts) == 1:
            return Dense(widen(parts[0]), False)
        out = self._device.empty((len(parts[0]),), work_dtype(parts[0].dtype))
        self._device.sum(parts, out)
        return Dense(out, is_own=True)

    def _step_run(
        self, values: Values, code: int, shards: Array, run: Run, *, weight: Array, parts: Sequence[Array]
    ) -> None:
        """Step the rule over neighbouring shards: together where they have as many updates and the same multipliers."""
        assert values.rule is not None
        first, at = 0, 0
        lengths = values.store.length[shards].tolist()
        for last in self._alike(values, shards):
            size = sum(lengths[first:last])
            here, piece = shards[first:last], slice(at, at + size)
            begin, end = run.begin + at, run.begin + at + size
            if values.steps[here[0]] < 0:
                values.start_state(code, here, begin, end, weight[piece])
            arenas = values.flat_state.get(code, {})
            state: rules.State = {"updates": int(values.steps[here[0]])}
            state.update((name, arena.view(begin, end)) for name, arena in arenas.items())
            knobs = values.knobs_of(int(here[0]))
            given = [part[piece] for part in parts]
            scratch = values.scratch(code)
            update.step(values.rule, weight[piece], given, state, knobs, device=self._device, scratch=scratch)
            values.steps[here] = cast(int, state["updates"])
            first, at = last, at + size

    def _alike(self, values: Values, shards: Array) -> Iterator[int]:
        """Yield the ends of groups of shards that one step can be made over."""
        assert values.spec is not None
        steps = values.steps[shards]
        is_uniform = (steps == steps[0]).all()
        if is_uniform and not values.spec.lr_mult and not values.spec.wd_mult:
            yield len(shards)
            return
        labels = []
        for shard, count in zip(shards.tolist(), steps.tolist(), strict=True):
            knobs = values.knobs_of(shard)
            labels.append((count, knobs.lr_mult, knobs.wd_mult))
        for end in range(1, len(labels)):
            if labels[end] != labels[end - 1]:
                yield end
        yield len(labels)

    def _update_alone(
        self, values: Values, shard: int, given: Contribution, turn: tuple[int, int], result: Applied
    ) -> None:
        """Update one shard; what its rule raises is noted."""
        try:
            if values.rule is not None:
                squares = self._step_alone(values, shard, given, turn)
                if squares is not None:
                    result.squares[shard] = squares
                return
            dense = spread(given, int(values.store.length[shard]))
            self._device.sum([dense.values], values.own(shard, keep=False))
        except Exception as err:
            # A user's rule may raise anything.
            result.failed[shard] = (err, traceback.format_exc())

    def _step_alone(
        self, values: Values, shard: int, given: Contribution, turn: tuple[int, int]
    ) -> tuple[float, ...] | None:
        """Do one update of a shard; with a rule that needs norms, the first half of it."""
        rule = values.rule
        assert rule is not None
        knobs = values.knobs_of(shard)
        if values.goes_flat(shard):
            run = Run(0, 1, *values.span(shard), 0)
            dense = spread(given, int(values.store.length[shard]))
            weight = values.own(shard)
            code = int(values.store.dtype[shard])
            self._step_run(values, code, np.array([shard]), run, weight=weight, parts=[dense.values])
            return None
        if shard not in values.state:
            values.state[shard] = cast(dict[str, Any], rule.new_state(values.weight(shard)))
        state = values.state[shard]
        if isinstance(rule, NormRule):
            dense = spread(given, int(values.store.length[shard]))
            prepared = rule.prepare(values.weight(shard), dense.values, state, knobs)
            values.halves.setdefault(shard, {})[turn] = Half(rule, knobs, prepared)
            return prepared.squares
        weight = values.own(shard)
        if isinstance(given, Dense):
            update.update(rule, weight, given.values, state, knobs)
        else:
            width = int(values.store.row_size[shard])
            update.update(rule, weight.reshape(-1, width), given.values, state, knobs, rows=given.rows)
        return None

    def _step(self, what: work.Step) -> Mapping[int, tuple[float, ...]]:
        batch = what.batch
        values = self._values[batch.store.number]
        if values.rule is None:
            raise KVError("store %d has no rule" % batch.store.number)
        self._reap()
        values.forget_encoded(batch.shards)
        result = Applied()
        turns = batch.entries["round"].tolist()
        numbers = turns if batch.at is None else [turns[at] for at in batch.at.tolist()]
        try:
            by_shard = values.rule.needs_norms or values.store.row_size[batch.shards].any()
            if by_shard or not _is_plain(batch) or len(set(numbers)) > 1:
                for (shard, given), number in zip(self._contributions(values, batch), numbers, strict=True):
                    squares = self._step_alone(values, shard, given, (what.rank, number))
                    if squares is not None:
                        result.squares[shard] = squares
            else:
                for code, some in self._given(values, batch):
                    parts = [[part] for part in some.parts]
                    self._update(
                        values, code, some.shards, some.runs, parts, turn=(what.rank, numbers[0]), result=result
                    )
                for error, _ in result.failed.values():
                    raise error
        except Exception:
            for shard, number in zip(batch.shards.tolist(), numbers, strict=True):
                values.halves.get(shard, {}).pop((what.rank, number), None)
            raise
        return result.squares

    def _finish(self, what: work.Finish) -> None:
        self._reap()
        values = self._values[what.store.number]
        half = values.halves[what.shard].pop((what.turn.rank, what.turn.round))
        if what.shard not in values.state:
            values.state[what.shard] = cast(dict[str, Any], half.rule.new_state(values.weight(what.shard)))
        weight = values.own(what.shard)
        half.rule.finish(weight, half.prepared, what.totals, values.state[what.shard], half.knobs)

    def _drop(self, what: work.Drop) -> None:
        halves = self._values[what.store.number].halves.get(what.shard, {})
        halves.pop((what.turn.rank, what.turn.round), None)

    # Answers

    def _lend(self, what: work.Lend) -> None:
        values = self._values[what.store.number]
        lent = _Lent(values, what.shards, what.at, values.side[what.shards], what.codec)
        self._lent.setdefault(what.ticket, []).append(lent)
        if not what.rows and what.codec == codecs.NONE:
            values.lent[lent.sides, what.shards] += 1
            return
        lent.payloads = []
        for number, shard in enumerate(what.shards.tolist()):
            try:
                if what.rows:
                    wanted = rowcodec.decode_rows(what.rows[number], values.row_count(shard))
                    table = values.weight(shard).reshape(-1, int(values.store.row_size[shard]))
                    lent.payloads.append(self._device.frame(table[wanted].reshape(-1)))
                else:
                    lent.payloads.append(_encoded(values, shard, how=How(what.codec, what.params)))
            except KVError as err:
                lent.error = lent.error or "%s: %s" % (self._named(values, shard), err)

    def _deliver(self, what: work.Deliver) -> Reply:
        """Whatever is wrong with the pull is said in the reply, and nothing raised."""
        lent = self._lent.pop(what.ticket, [])
        held = [(each.sides, each.shards) for each in lent if each.payloads is None]
        lease = Lease(lent[0].values, held) if lent else None
        try:
            message = self._answer(what, lent)
        except Exception as err:
            message = failed(what.message, role.Done(what, err, traceback.format_exc()))
        if message.is_error and lease is not None:
            lease.release()
        self._counters.sent(sum(memoryview(payload).nbytes for payload in message.payloads))
        return Reply(what.link, message, None if message.is_error else lease)

    def _answer(self, what: work.Deliver, lent: Sequence[_Lent]) -> Message:
        for each in lent:
            if each.error:
                return refusal(what.message, each.error)
        body: dict[str, Any] = {"codec": dict(what.message.body["codec"])} if "codec" in what.message.body else {}
        if what.skipped:
            body["skipped"] = {
                str(key): {str(rank): note for rank, note in notes.items()} for key, notes in what.skipped.items()
            }
        entries = what.entries.copy()
        is_packed = all(each.payloads is None for each in lent) and _is_one_dtype(entries)
        entries["payload"] = Payload.PACKED if is_packed else Payload.FRAME
        for each in lent:
            entries["codec"][each.at] = each.codec
        one = is_packed and len(lent) == 1
        payloads = self._frames(lent[0]) if one else self._frames_in_order(lent, len(entries))
        is_bucket = what.message.bucket and not len(what.message.entries) and not entries["codec"].any()
        return Message(
            what.message.kind,
            Flag.REPLY,
            store=what.message.store,
            request=what.message.request,
            bucket=what.message.bucket if is_bucket else 0,
            step=what.message.step if is_bucket else 0,
            entries=what.message.entries if is_bucket else entries,
            body=body,
            payloads=payloads,
        )

    def _frames(self, lent: _Lent) -> list[Buffer]:
        """Return values of one dtype, end to end in the order of the entries, in as few frames as they allow."""
        values, shards, sides = lent.values, lent.shards, lent.sides
        cuts = (np.flatnonzero(sides[1:] != sides[:-1]) + 1).tolist()
        arena = values.arenas[int(values.store.dtype[shards[0]])]
        found = [
            self._device.frame(arena.view(run.begin, run.end, int(sides[run.first])))
            for run in runs(values.at[shards], values.store.length[shards], cuts)
        ]
        size = sum(memoryview(each).nbytes for each in found)
        if len(found) > _JOINED_FRAMES and size < _JOINED_BYTES * len(found):
            return [b"".join(found)]
        return found

    def _frames_in_order(self, lent: Sequence[_Lent], count: int) -> list[Buffer]:
        payloads: list[Buffer] = [b""] * count
        for each in lent:
            lent_now = each.payloads
            if lent_now is None:
                sides = zip(each.shards.tolist(), each.sides.tolist(), strict=True)
                lent_now = [self._device.frame(each.values.view(shard, side)) for shard, side in sides]
            for at, payload in zip(each.at.tolist(), lent_now, strict=True):
                payloads[at] = payload
        return payloads

    def _discard(self, what: work.Discard) -> None:
        for each in self._lent.pop(what.ticket, []):
            if each.payloads is None:
                each.values.lent[each.sides, each.shards] -= 1

    # Rules and saved states

    def _try_rule(self, what: work.TryRule) -> None:
        if what.spec is None:
            return
        rule = self._made(what.store, rules.RuleSpec.from_json(what.spec))
        values = self._values.get(what.store)
        for shard in range(values.store.count if values is not None and rule.name not in rules.RULES else 0):
            assert values is not None
            _try(rule, values.weight(shard))

    def _made(self, store: int, spec: rules.RuleSpec) -> rules.Rule:
        rule = rules.rule_of(spec, self._imports)
        values = self._values.get(store)
        if values is not None:
            table = values.store
            first = {(int(table.key[shards[0]]), int(table.dtype[shards[0]])) for shards in table.by_key.values()}
            rules.check_keys(rule, ((table.name(key), DTYPES[code]) for key, code in sorted(first)))
        return rule

    def _set_rule(self, what: work.SetRule) -> bool:
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
            values.set_rule(rule, spec)
        self._rules[what.store] = rule, spec
        return rule.needs_norms

    def _save(self, what: work.Save) -> dict[str, Any]:
        values = self._values.get(what.store)
        return statefile.save(what.message.body, values.saved() if values is not None else ())

    def _load(self, what: work.Load) -> None:
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
            self._reap()
            values.restore()


def _in_order(of: Round, shard: int, row_size: int) -> Contribution:
    """Return the sum of a shard that goes by itself; of a deterministic store in the order of ranks."""
    if shard not in of.by_rank:
        return of.by_shard[shard].total()
    total = Sum(row_size)
    for _, contribution in sorted(of.by_rank[shard], key=lambda pair: pair[0]):
        total.add(contribution)
    return total.total()


def _how(batch: work.Batch, codec: int) -> How:
    """Return how payloads of another codec than that of the first entry become elements."""
    return How(codec, checks.params_of(batch.message, codec), batch.how.scale)


def _is_plain(batch: work.Batch) -> bool:
    return batch.how.codec == codecs.NONE and not batch.entries["codec"].any()


def _is_one_dtype(entries: Array) -> bool:
    return not len(entries) or bool((entries["dtype"] == entries["dtype"][0]).all())


def _encoded(values: Values, shard: int, how: How) -> Buffer:
    """Return a value by a codec; the first who asks in a round makes it, and the residual takes the rest."""
    name = (how.codec, *sorted(how.params.items()))
    known = values.encoded.setdefault(shard, {})
    if name not in known:
        codec = codecs.numbered(how.codec)
        weight = values.weight(shard)
        if codec.has_residual and shard not in values.residual:
            values.residual[shard] = np.zeros(len(weight), np.float32)
        wide = narrow(widen(weight), np.dtype(np.float32))
        residual = values.residual[shard] if codec.has_residual else None
        known[name] = codec.encode(wide, residual, dict(how.params))
    return known[name]


def _about(what: work.Work) -> dict[str, object]:
    batch = getattr(what, "batch", None)
    shards = getattr(batch, "shards", None) if batch is not None else getattr(what, "shards", None)
    return {} if shards is None else {"shards": len(shards)}


def _try(rule: rules.Rule, weight: Array) -> None:
    """Return if a rule that takes the weight's dtype takes the weight too; else raise what it says."""
    if rule.name not in rules.RULES:
        # A user's rule may not like a weight, and is to say so before any server has it.
        rule.new_state(weight)
