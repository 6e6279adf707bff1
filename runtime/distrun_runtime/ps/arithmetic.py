"""A server's arithmetic: contributions, sums of rounds, updates, and norms that servers exchange.

What lies next to each other in an arena is added by one call. Encoded payloads are decoded straight into the sums. A
shard goes by itself where it must: rows, encoded values of float64, and all of a deterministic store, whose sums are
made in the order of ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, cast

import numpy as np

from distrun_runtime.arrays.device import CpuDevice, DeviceArray, Run, runs
from distrun_runtime.arrays.dtypes import Array, Buffer, work_dtype
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import NormRule
from distrun_runtime.ops.reduce import OPS, Contribution, Dense, How, Rows, Sum, read, scaled, spread, widened
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import DTYPES, Message, Payload, payloads_of
from distrun_runtime.ps import checks, role
from distrun_runtime.ps.shards import SYNC, Failure, Store, Turn
from distrun_runtime.ps.values import Layout, LayoutRuns, OpenUpdate, PushedValues, Round, ShardSet, Values

SUM_IN_ARENA, SUM_BY_SHARD = -1, -2
"""Where the sum of a shard's round is, in place of the number of a held contribution."""
_JOINED_ELEMENTS = 1 << 14
"""Encoded shards of fewer elements are joined."""


LAYOUTS = 1024
"""So many layouts of messages are kept for a store, and of so many the rule's steps."""
SHARED_ELEMENTS = 1 << 23
"""Threads share steps over so many elements: sums that are copied for them take no more memory."""
GPU_STEPS = 64
"""So many lists of the addresses of parts are kept of each."""


# What messages bring


def given_by(values: Values, batch: role.Batch) -> list[tuple[int, PushedValues]]:
    """Return what a batch of plain payloads brings, by code of dtype."""
    codes = values.codes(batch.shards)
    packed = len(batch.entries) > 0 and batch.entries["payload"][0] == Payload.PACKED
    if len(codes) == 1 and packed and batch.at is None:
        return [(codes[0][0], _packed(values, batch, codes[0][0]))]
    given = []
    frames = payloads_of(batch.entries, batch.message.payloads)
    entries = range(len(batch.entries)) if batch.at is None else batch.at.tolist()
    for code, shards, at in codes:
        mine = list(entries) if at is None else [entries[place] for place in at.tolist()]
        sizes = batch.entries["length"] * np.uint64(DTYPES[code].itemsize)
        # Without a frame, as in a declaration, they are zeros.
        given_of = (bytes(sizes[number]) if frames[number] is None else frames[number] for number in mine)
        parts = [_elements(values, cast(Buffer, frame), code, batch.how.scale) for frame in given_of]
        alone = runs(values.at[shards], values.store.length[shards], range(1, len(shards)))
        given.append((code, PushedValues(shards, alone, parts)))
    return given


def _elements(values: Values, frame: Buffer, code: int, scale: float) -> DeviceArray:
    """Return the elements of bytes, times a number: in the dtype, or in its work dtype if the number is not 1."""
    elements = values.device.elements(frame, DTYPES[code])
    return elements if scale == 1 else scaled(widened(elements), scale)


def _packed(values: Values, batch: role.Batch, code: int) -> PushedValues:
    frames = [_elements(values, frame, code, batch.how.scale) for frame in batch.message.payloads]
    _, found, places = layout(values, batch.shards, tuple(map(len, frames)))
    return PushedValues(batch.shards, found, [frames[number][begin:end] for number, begin, end in places])


def layout(values: Values, shards: Array, sizes: tuple[int, ...]) -> Layout:
    """Return where the elements of shards are that came in frames of these sizes.

    A bucket comes again in every step, with the same array of shards: what it leads to is kept."""
    known = values.layouts.get((id(shards), sizes))
    if known is not None and known.shards is shards:
        return known
    lengths = values.store.length[shards]
    limits = np.cumsum(sizes)
    cuts = np.searchsorted(np.cumsum(lengths), limits, side="right")[:-1].tolist() if len(sizes) > 1 else ()
    found = LayoutRuns(runs(values.at[shards], lengths, cuts))
    places, number, begin = [], 0, 0
    for run in found:
        while number < len(sizes) - 1 and run.offset >= limits[number]:
            begin = int(limits[number])
            number += 1
        places.append((number, run.offset - begin, run.offset - begin + run.end - run.begin))
    made = values.layouts[id(shards), sizes] = Layout(shards, found, places)
    while len(values.layouts) > LAYOUTS:
        del values.layouts[next(iter(values.layouts))]
    return made


def contributions(values: Values, batch: role.Batch) -> Iterator[tuple[int, Contribution]]:
    """Yield each shard of a batch with what it brings, one by one."""
    frames = payloads_of(batch.entries, batch.message.payloads)
    entries = range(len(batch.entries)) if batch.at is None else batch.at.tolist()
    codecs_of = batch.entries["codec"].tolist()
    for shard, number in zip(batch.shards.tolist(), entries, strict=True):
        one = values.store.shard(shard)
        payload = frames[number]
        how = how_of(batch, codecs_of[number])
        given = b"" if payload is None else payload
        yield shard, read(given, one.length, DTYPES[one.dtype], one.row_size, how, device=values.device)


# Sums of rounds


def add(values: Values, what: role.Add) -> None:
    """Add contributions to the sums of a round."""
    of = values.round_of(what.round)
    batch = what.batch
    # 0: nothing came yet for this shard (`values.Round.where`).
    of.open += int(np.count_nonzero(of.where[batch.shards] == 0))
    try:
        if values.store.is_deterministic:
            for shard, contribution in contributions(values, batch):
                of.by_rank.setdefault(shard, []).append((what.rank, contribution))
                of.where[shard] = SUM_BY_SHARD
        elif values.store.op[batch.shards].any():
            for shard, contribution in contributions(values, batch):
                _sum_of(values, of, shard).add(contribution)
        elif is_plain(batch):
            for code, given in given_by(values, batch):
                add_given(values, of, code, given)
        elif not _add_encoded(values, of, batch):
            for shard, contribution in contributions(values, batch):
                _sum_of(values, of, shard).add(contribution)
    except Exception as err:
        # Mostly this push was acknowledged: the workers that pull the round are told.
        of.where[batch.shards[of.where[batch.shards] == 0]] = SUM_IN_ARENA
        values.lose(what.round, batch.shards, err, traceback.format_exc())
        raise


def add_given(values: Values, of: Round, code: int, given: PushedValues) -> None:
    """Add plain contributions to shards of one dtype. The first of a round is only kept: mostly it needs no copy."""
    where = of.where[given.shards]
    first = int(where[0])
    if not (where == first).all():
        for each in np.unique(where):
            add_given(values, of, code, given.take(np.flatnonzero(where == each), values))
    elif first == 0:
        of.hold(given.shards, given)
    elif first == SUM_BY_SHARD:
        for run, part in zip(given.runs, given.parts, strict=True):
            for shard, _, [piece] in values.apart(given.shards, run, [part]):
                _sum_of(values, of, shard).add(Dense(widened(piece), False))
    elif first > 0 and of.held[first].is_like(given):
        _sum_runs(values, of, code, given.runs, (of.held[first].parts, given.parts))
        of.where[given.shards] = SUM_IN_ARENA
        del of.held[first]
    else:
        fold(values, of, code, first)
        sums = values.sums(of, code)
        there = [sums.view(run.begin, run.end) for run in given.runs]
        values.device.sums([(pair, pair[0]) for pair in zip(there, given.parts, strict=True)])


def _sum_runs(
    values: Values, of: Round, code: int, found: Sequence[Run], parts: Sequence[Sequence[DeviceArray]]
) -> None:
    """Write the sums of parts to the sums of a round: those of all runs at once.

    Arguments:
        parts: of the first contribution for each run its elements, then of the next one.
    """
    sums = values.sums(of, code)
    values.device.sums([(some, sums.view(run.begin, run.end)) for run, *some in zip(found, *parts, strict=True)])


def apply_alike(values: Values, number: int, of: ShardSet, addends: Sequence[Sequence[DeviceArray]]) -> bool:
    """Do what `apply` does for shards that are updated together, by a flat rule or none, and of which no answer is
    encoded; False: replies read only some of them, and nothing was done.

    Arguments:
        addends: all contributions of the round to each run.
    """
    side = of.progress.side
    is_lent = values.lending > 0 and (side < 0 or not of.has(values.lent[side], 0))
    is_lent = is_lent and (side >= 0 or bool(values.lent[:, of.index].any()))
    if is_lent and (side < 0 or not values.lent[side, of.index].all()):
        return False
    if values.rule is not None:
        _update(values, of.code, of.shards, of.layout.runs, addends, turn=(SYNC, number), result=UpdateResult())
        of.progress.side = values.side_of(of)
        return True
    if side < 0:
        values.gather(of.shards)
        side = of.progress.side = values.side_of(of)
    values.write_alike(of, addends, values.free_side(side, of.index) if is_lent else side)
    return True


def _add_encoded(values: Values, of: Round, batch: role.Batch) -> bool:
    """Decode payloads into the sums of a round, or add them; tell whether that was possible.

    It is if all have one codec and the sums are float32, none of them made by shard.
    """
    number = batch.how.codec
    entries = batch.entries if batch.at is None else batch.entries[batch.at]
    if not codecs.NONE < number < codecs.ROWS or not (entries["codec"] == number).all():
        return False
    codes = values.codes(batch.shards)
    where = of.where[batch.shards]
    if len(codes) != 1 or work_dtype(DTYPES[codes[0][0]]) != np.float32 or (where == SUM_BY_SHARD).any():
        return False
    code = codes[0][0]
    codec, params, scale = codecs.numbered(number), dict(batch.how.params), batch.how.scale
    if scale != 1 and (scaled := codec.scaled(params, scale)) is not None:
        params, scale = scaled, 1
    codec.prepare(values.device, waits=False)
    for held in np.unique(where[where > 0]).tolist():
        fold(values, of, code, held)
    every = payloads_of(batch.entries, batch.message.payloads)
    frames = every if batch.at is None else [every[at] for at in batch.at.tolist()]
    sums = values.sums(of, code)
    lengths = values.store.length[batch.shards]
    # Small payloads that lie end to end are decoded by one call, where the codec allows it.
    alone = (lengths >= _JOINED_ELEMENTS) | (lengths % codec.joins != 0) if codec.joins else np.ones(len(lengths), bool)
    is_new = where == 0
    breaks = np.flatnonzero(alone[1:] | alone[:-1] | (is_new[1:] != is_new[:-1])) + 1
    for run in runs(values.at[batch.shards], lengths, breaks.tolist()):
        some = [b"" if frame is None else frame for frame in frames[run.first : run.last]]
        there = sums.view(run.begin, run.end)
        adds = not is_new[run.first]
        payload = some[0] if len(some) == 1 else b"".join(some)
        if scale == 1:
            codec.read(payload, there, params, adds=adds)
        elif adds:
            more = values.device.empty((len(there),), there.dtype)
            codec.read(payload, more, params)
            values.device.scale(more, scale)
            values.device.sum([there, more], there)
        else:
            codec.read(payload, there, params)
            values.device.scale(there, scale)
        of.where[batch.shards[run.first : run.last]] = SUM_IN_ARENA
    return True


def fold(values: Values, of: Round, code: int, number: int) -> None:
    """Copy a contribution that was held to the sums; nothing if they are there already."""
    given = of.held.pop(number, None)
    if given is None:
        return
    _sum_runs(values, of, code, given.runs, (given.parts,))
    shards = given.shards
    of.where[shards[of.where[shards] == number]] = SUM_IN_ARENA


def keep_copies(values: Values) -> None:
    """Copy all contributions that are only referred to, so that their senders may write their memory."""
    if not values.is_on_host:
        return  # they are copies, or memory of a GPU that stays as it is until it was read
    for of in values.rounds.values():
        for number, given in list(of.held.items()):
            fold(values, of, int(values.store.dtype[given.shards[0]]), number)
        for total in of.by_shard.values():
            if total.dense is not None:
                total.dense = _own(total.dense)
        for shard, known in of.by_rank.items():
            of.by_rank[shard] = [(rank, _own(one) if isinstance(one, Dense) else one) for rank, one in known]


def _own(dense: Dense) -> Dense:
    return dense if dense.is_own else Dense(dense.values.copy(), is_own=True)


def _sum_of(values: Values, of: Round, shard: int) -> Sum:
    """Return the sum of one shard's round, as one that goes by shard from now on."""
    total = of.by_shard.get(shard)
    if total is None:
        total = of.by_shard[shard] = Sum(int(values.store.row_size[shard]), OPS[values.store.op[shard]])
        where = int(of.where[shard])
        code = int(values.store.dtype[shard])
        if where > 0:
            fold(values, of, code, where)
        if of.where[shard] == SUM_IN_ARENA:
            there = values.sums(of, code).view(*values.span(shard))
            total.add(Dense(values.device.put(there), is_own=True))
        of.where[shard] = SUM_BY_SHARD
    return total


def total_of(of: Round, shard: int, store: Store) -> Contribution:
    """Return the sum of a shard that goes by itself; of a deterministic store in the order of ranks."""
    if shard not in of.by_rank:
        return of.by_shard[shard].total()
    total = Sum(int(store.row_size[shard]), OPS[store.op[shard]])
    for _, contribution in sorted(of.by_rank[shard], key=lambda pair: pair[0]):
        total.add(contribution)
    return total.total()


def how_of(batch: role.Batch, codec: int) -> How:
    """Return how payloads of a codec become elements."""
    how = batch.how
    return how if codec == how.codec else How(codec, checks.params_of(batch.message, codec), how.scale)


def is_plain(batch: role.Batch) -> bool:
    """Whether all payloads are the elements themselves."""
    return batch.how.codec == codecs.NONE and not batch.entries["codec"].any()


# The updates of a server: a round's sum, or one push, changes the weights by the store's rule.
#
# Shards that lie next to each other are updated by one call where the rule works element by element. A shard goes by
# itself with rules that need norms or are the user's, and where its value has rows. A value that a reply still reads is
# not written: its update goes to another side of the arena.


@dataclass
class UpdateResult:
    """What came of an Apply."""

    failed: dict[int, tuple[BaseException, str]] = field(default_factory=dict)
    """Shard to what its rule raised, and the traceback."""
    squares: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Shard to its sums of squares: it waits for norms."""


def apply(values: Values, what: role.Apply) -> UpdateResult:
    """Apply the rule to the sums of a round, or assign them."""
    result = UpdateResult()
    lost = values.lost(what.round, what.shards)
    try:
        if lost is not None:
            # A contribution is missing: the sum must not be taken for that of all workers.
            result.failed = dict.fromkeys(what.shards.tolist(), lost)
        elif not what.skip:
            values.note_writes(what.shards)
            last = what.last
            is_special = values.store.is_deterministic or values.store.op[what.shards].any()
            if last is not None and (is_special or not is_plain(last)):
                add(values, role.Add(what.rank, what.round, last))
                last = None
            givens = {} if last is None else dict(given_by(values, last))
            for code, shards, _ in values.codes(what.shards):
                _apply_some(values, what.round, code, shards, given=givens.get(code), result=result)
    finally:
        values.forget_sums(what.round, what.shards)
    return result


def _apply_some(
    values: Values, number: int, code: int, shards: Array, *, given: PushedValues | None, result: UpdateResult
) -> None:
    """Apply the round of shards of one dtype; `given`: their last contributions."""
    of = values.round_of(number)
    where = of.where[shards]
    first = int(where[0])
    if not (where == first).all():
        for each in np.unique(where):
            some = np.flatnonzero(where == each)
            part = None if given is None else given.take(some, values)
            _apply_some(values, number, code, shards[some], given=part, result=result)
        return
    if first == SUM_BY_SHARD:
        if given is not None:
            add_given(values, of, code, given)
        for shard in shards.tolist():
            total = total_of(of, shard, values.store)
            _update_alone(values, shard, total, (SYNC, number), result)
        return
    whole = [] if given is None else [given]
    if first > 0:
        held = of.held[first]
        if held.is_like(given) if given is not None else np.array_equal(held.shards, shards):
            whole.insert(0, of.held.pop(first))
        else:
            fold(values, of, code, first)
            first = SUM_IN_ARENA
    found = whole[0].runs if whole else runs(values.at[shards], values.store.length[shards])
    sums = values.sums(of, code) if first == SUM_IN_ARENA else None
    parts: list[list[DeviceArray]] = []
    for at, run in enumerate(found):
        parts.append([] if sums is None else [sums.view(run.begin, run.end)])
        for each in whole:
            parts[-1].append(each.parts[at])
    if first or whole:
        _update(values, code, shards, found, parts, turn=(SYNC, number), result=result)


def _update(
    values: Values,
    code: int,
    shards: Array,
    found: Sequence[Run],
    parts: Sequence[Sequence[DeviceArray]],
    *,
    turn: tuple[int, int],
    result: UpdateResult,
) -> None:
    """Update shards of one dtype by the sums of the parts of each run."""
    by_shard = values.rule is not None and (values.store.row_size[shards].any() or not values.is_flat(code))
    if by_shard:
        for run, given in zip(found, parts, strict=True):
            for shard, _, pieces in values.apart(shards, run, given):
                _update_alone(values, shard, _total(values, pieces), turn, result)
        return
    values.gather(shards)
    _update_runs(values, code, shards, found, parts)


def _update_runs(
    values: Values, code: int, shards: Array, found: Sequence[Run], parts: Iterable[Sequence[DeviceArray]]
) -> None:
    """Update dense shards of one dtype by a flat rule or by none.

    Arguments:
        parts: those of a run are asked for when those before it are used.
    """
    if values.rule is None:
        values.write_sums(code, shards, found, parts)
    elif not _step_together(values, code, shards, found, parts):
        _step_by_side(values, code, shards, found, parts)


def _step_by_side(
    values: Values, code: int, shards: Array, found: Sequence[Run], parts: Iterable[Sequence[DeviceArray]]
) -> None:
    """Make the steps of shards of which some are lent, or which are on several sides."""
    arena = values.arenas[code]

    def steps() -> Iterator[tuple[Array, update.WeightStep]]:
        for here, piece, addends, side in values.cut(shards, found, parts):
            target, present = arena.view(piece.begin, piece.end, side), int(values.side[here[0]])
            if side != present:
                values.device.sum([arena.view(piece.begin, piece.end, present)], target)
                values.side[here] = side
            yield from steps_of(values, code, here, piece, weight=target, parts=addends)

    if values.is_on_host:
        _step_in_turn(values, found, steps())
    else:
        step_all(values, list(steps()))


@dataclass(eq=False)
class _StepPlan:
    """The rule's steps over shards whose values are on one side, where no reply reads them."""

    shards: Array
    found: Sequence[Run]
    side: int
    counts: bytes
    """How many updates each shard has had."""
    steps: list[list[tuple[int, int, Array, update.WeightStep]]]
    """For each run its steps: first and last element in it, the shards, and the step without parts."""
    on_gpu: dict[Any, update.GpuSteps] = field(default_factory=dict)
    """By where the parts are."""


def update_by(values: Values, code: int, shards: Array, sizes: tuple[int, ...], arrays: Iterable[DeviceArray]) -> None:
    """Update dense shards of one dtype, of which no reply reads any, by a flat rule or by none.

    Arguments:
        arrays: flat ones of these sizes, which have the shards' sums end to end; each is asked for when those before it
            are used.
    """
    _, found, places = layout(values, shards, sizes)
    _update_runs(values, code, shards, found, _cut(places, arrays))


def update_whole(values: Values, shard: int, weight: Array, given: Contribution) -> None:
    """Update a shard that is all of its value, by itself; what its rule raises is raised.

    Arguments:
        weight: its value, flat and in host memory, which no reply reads.
    """
    if values.rule is None:
        values.device.sum([spread(given, len(weight)).values], weight)
    else:
        _step_alone(values, shard, values.rule, weight, given)


def _cut(places: Sequence[tuple[int, int, int]], arrays: Iterable[DeviceArray]) -> Iterator[list[DeviceArray]]:
    there, at, array = iter(arrays), -1, cast(Any, None)
    for number, begin, end in places:
        while at < number:
            at, array = at + 1, next(there)
        yield [array[begin:end]]


def _step_together(
    values: Values, code: int, shards: Array, found: Sequence[Run], parts: Iterable[Sequence[DeviceArray]]
) -> bool:
    """Make the steps of shards of which none is lent; False: some are, or they are on several sides."""
    sides, counts = values.side[shards], values.steps[shards].tobytes()
    side = int(sides[0])
    if (sides != side).any() or values.lent[side, shards].any():
        return False
    # Kept again when all steps are made: one that was interrupted has other counts than the shards.
    plan: _StepPlan | None = values.step_plans.pop(id(found), None)
    if plan is None or plan.shards is not shards or plan.side != side or plan.counts != counts:
        plan = _StepPlan(shards, found, side, counts, [])
        for run in found:
            weight, begin = values.arenas[code].view(run.begin, run.end, side), 0
            plan.steps.append([])
            for some, one in steps_of(values, code, shards[run.first : run.last], run, weight=weight, parts=()):
                end = begin + len(one.weight)
                plan.steps[-1].append((begin, end, some, one))
                begin = end
    if values.is_on_host:
        _step_in_turn(values, found, _steps_by(plan, parts))
    else:
        _step_on_gpu(values, plan, list(parts))
    if isinstance(found, LayoutRuns):
        if found.are_used:
            plan.counts = values.steps[shards].tobytes()
            values.step_plans[id(found)] = plan
        found.are_used = True
    while len(values.step_plans) > LAYOUTS:
        del values.step_plans[next(iter(values.step_plans))]
    return True


def _steps_by(plan: _StepPlan, parts: Iterable[Sequence[DeviceArray]]) -> Iterator[tuple[Array, update.WeightStep]]:
    """Yield the shards and the step of a plan, by the parts of each run."""
    for steps, given in zip(plan.steps, parts, strict=True):
        for begin, end, some, (weight, _, state, knobs) in steps:
            yield some, update.WeightStep(weight, [part[begin:end] for part in given], state, knobs)


def _step_in_turn(values: Values, found: Sequence[Run], steps: Iterable[tuple[Array, update.WeightStep]]) -> None:
    """Make steps in host memory, each while its sum is in the processor's cache, or some together by threads."""
    assert isinstance(values.device, CpuDevice)
    most = SHARED_ELEMENTS if values.device.shares(sum(run.end - run.begin for run in found)) else 0
    some: list[tuple[Array, update.WeightStep]] = []
    waiting = 0
    for shards, one in steps:
        some.append((shards, one))
        waiting += len(one.weight)
        if waiting >= most:
            step_all(values, some)
            some, waiting = [], 0
    step_all(values, some)


def _step_on_gpu(values: Values, plan: _StepPlan, parts: Sequence[Sequence[DeviceArray]]) -> None:
    from distrun_runtime.arrays.gpu_devices import Borrowed

    assert values.rule is not None
    # Their use, as memory at the same address may be another block.
    where = tuple((part.address, id(part.memory.uses)) for its in parts for part in its)
    steps = plan.on_gpu.get(where)
    if steps is None:
        shards, items = zip(*_steps_by(plan, parts), strict=True)
        steps = update.GpuSteps(values.rule, items, [some.tolist() for some in shards])
        if not any(
            isinstance(part.memory, Borrowed) for its in parts for part in its
        ):  # These come anew with each call.
            if len(plan.on_gpu) >= GPU_STEPS:
                plan.on_gpu.clear()
            plan.on_gpu[where] = steps
    steps.make(values.steps)


def _total(values: Values, parts: Sequence[DeviceArray]) -> Dense:
    if len(parts) == 1:
        return Dense(widened(parts[0]), False)
    out = values.device.empty((len(parts[0]),), work_dtype(parts[0].dtype))
    values.device.sum(parts, out)
    return Dense(out, is_own=True)


def steps_of(
    values: Values, code: int, shards: Array, run: Run, *, weight: DeviceArray, parts: Sequence[DeviceArray]
) -> Iterator[tuple[Array, update.WeightStep]]:
    """Yield the rule's steps over neighbouring shards: one where they have as many updates and the same multipliers."""
    assert values.rule is not None
    first, at = 0, 0
    lengths = values.store.length[shards].tolist()
    for last in _alike(values, shards):
        size = sum(lengths[first:last])
        here, piece = shards[first:last], slice(at, at + size)
        begin, end = run.begin + at, run.begin + at + size
        if values.steps[here[0]] < 0:
            values.start_state(code, here, begin, end, weight[piece])
        arenas = values.flat_state.get(code, {})
        state: rules.State = {"updates": int(values.steps[here[0]])}
        for name, arena in arenas.items():
            state[name] = arena.view(begin, end)
        knobs = values.knobs_of(int(here[0]))
        given = [part[piece] for part in parts]
        yield here, update.WeightStep(weight[piece], given, state, knobs)
        first, at = last, at + size


def step_all(values: Values, steps: Sequence[tuple[Array, update.WeightStep]]) -> None:
    """Make the rule's steps of some shards."""
    if not steps:
        return
    assert values.rule is not None
    _, items = zip(*steps, strict=True)
    try:
        update.step_all(values.rule, items, device=values.device)
    finally:
        for shards, item in steps:
            values.steps[shards] = cast(int, item.state["updates"])


def _alike(values: Values, shards: Array) -> Iterator[int]:
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


def _update_alone(values: Values, shard: int, given: Contribution, turn: tuple[int, int], result: UpdateResult) -> None:
    """Update one shard; what its rule raises is noted."""
    if values.store.row_size[shard]:
        values.round_rows[shard] = given.rows if isinstance(given, Rows) else None
    try:
        squares = _update_or_prepare(values, shard, given, turn)
    except Exception as err:
        # A user's rule may raise anything.
        result.failed[shard] = (err, traceback.format_exc())
    else:
        if squares is not None:
            result.squares[shard] = squares


def _update_or_prepare(
    values: Values, shard: int, given: Contribution, turn: tuple[int, int]
) -> tuple[float, ...] | None:
    """Do one update of a shard; with a rule that needs norms, the first half of it: return its sums of squares."""
    rule, length = values.rule, int(values.store.length[shard])
    if rule is None or values.goes_flat(shard):
        run = Run(0, 1, *values.span(shard), 0)
        parts = [[spread(given, length).values]]
        _update_runs(values, int(values.store.dtype[shard]), np.array([shard]), [run], parts)
        return None
    if isinstance(rule, NormRule):
        weight, knobs = values.weight(shard), values.knobs_of(shard)
        state = _own_state(values, shard, rule, weight)
        prepared = rule.prepare(weight, spread(given, length).values, state, knobs)
        values.open_updates.setdefault(shard, {})[turn] = OpenUpdate(rule, knobs, prepared)
        return prepared.squares
    _step_alone(values, shard, rule, values.own(shard), given)
    return None


def _own_state(values: Values, shard: int, rule: rules.Rule, weight: DeviceArray) -> dict[str, Any]:
    """Return what a rule that goes by shard remembers of one, to be changed."""
    if shard not in values.state:
        values.state[shard] = cast(dict[str, Any], rule.new_state(weight))
    return values.state[shard]


def _step_alone(values: Values, shard: int, rule: rules.Rule, weight: DeviceArray, given: Contribution) -> None:
    """Make the step of a rule that goes by shard, on a weight that no reply reads."""
    state, knobs = _own_state(values, shard, rule, weight), values.knobs_of(shard)
    if isinstance(given, Dense):
        update.update(rule, weight, given.values, state, knobs)
    else:
        width = int(values.store.row_size[shard])
        update.update(rule, weight.reshape(-1, width), given.values, state, knobs, rows=given.rows)


def step(values: Values, what: role.Step) -> Mapping[int, tuple[float, ...]]:
    """Apply the rule to each payload of an async push; return the sums of squares of shards that wait for norms."""
    batch = what.batch
    if values.rule is None:
        raise KVError(f"store {batch.store.number} has no rule")
    values.note_writes(batch.shards)
    result = UpdateResult()
    turns = batch.entries["round"].tolist()
    numbers = turns if batch.at is None else [turns[at] for at in batch.at.tolist()]
    try:
        by_shard = values.rule.needs_norms or values.store.row_size[batch.shards].any()
        if by_shard or not is_plain(batch) or len(set(numbers)) > 1:
            for (shard, given), number in zip(contributions(values, batch), numbers, strict=True):
                squares = _update_or_prepare(values, shard, given, (what.rank, number))
                if squares is not None:
                    result.squares[shard] = squares
        else:
            for code, some in given_by(values, batch):
                parts = [[part] for part in some.parts]
                _update(values, code, some.shards, some.runs, parts, turn=(what.rank, numbers[0]), result=result)
            for error, _ in result.failed.values():
                raise error
    except Exception:
        for shard, number in zip(batch.shards.tolist(), numbers, strict=True):
            values.open_updates.get(shard, {}).pop((what.rank, number), None)
        raise
    return result.squares


def finish(values: Values, what: role.FinishUpdate) -> None:
    """Finish an update whose norms are known."""
    half = values.open_updates[what.shard].pop((what.turn.rank, what.turn.round))
    weight = values.own(what.shard)
    state = _own_state(values, what.shard, half.rule, weight)
    half.rule.finish(weight, half.prepared, what.totals, state, half.knobs)


def drop(values: Values, what: role.DropUpdate) -> None:
    """Forget an update that waits for norms."""
    values.open_updates.get(what.shard, {}).pop((what.turn.rank, what.turn.round), None)


# Norms of whole values for rules that need them: each server adds up its pieces and tells the others. No side effects.
#
# A rule such as LAMB scales its step by norms of the whole weight, which lies in pieces on several servers. Each
# server squares and sums its own pieces of a key (`Part`), sends these sums to the others (NORMS), and goes on when
# the parts it has cover the value. All servers add the parts up in the order of their offsets, so all get the very
# same totals. Parts, not elements, are what is known here.


class Part(NamedTuple):
    """One piece's sums of squares."""

    offset: int
    length: int
    squares: tuple[float, ...]


@dataclass
class _Exchange:
    """What is known of one update of one key."""

    parts: dict[int, Part] = field(default_factory=dict)
    """By offset, ours and others'."""
    shards: dict[int, int] = field(default_factory=dict)
    """Ours that wait for the totals, with their offsets."""
    failure: Failure | None = None


class Norms:
    """The updates of a server that wait for norms."""

    def __init__(self) -> None:
        self.open: dict[Turn, _Exchange] = {}
        """Turns of which anything is known, until all our shards are through."""

    def mine(self, turn: Turn, shard: int, offset: int, length: int, squares: tuple[float, ...]) -> list[Part]:
        """Enter a shard of ours that is ready for this turn; return our parts so far."""
        exchange = self.open.setdefault(turn, _Exchange())
        exchange.shards[shard] = offset
        exchange.parts[offset] = Part(offset, length, squares)
        ours = set(exchange.shards.values())
        return [part for at, part in sorted(exchange.parts.items()) if at in ours]

    def theirs(self, turn: Turn, parts: list[Part]) -> None:
        """Enter the parts of another server."""
        exchange = self.open.setdefault(turn, _Exchange())
        exchange.parts.update((part.offset, part) for part in parts)

    def fail(self, turn: Turn, failure: Failure) -> None:
        """The update of this turn fails, here and for shards that are not ready yet; the first reason counts."""
        exchange = self.open.setdefault(turn, _Exchange())
        exchange.failure = exchange.failure or failure

    def settled(self, turn: Turn, size: int) -> tuple[list[int], tuple[float, ...] | Failure] | None:
        """Return our shards that may go on, and with what: totals or a failure; None: parts are missing.

        Arguments:
            size: elements of the whole value.
        """
        exchange = self.open.get(turn)
        if exchange is None:
            return None
        parts = [part for _, part in sorted(exchange.parts.items())]
        if exchange.failure is None:
            if sum(part.length for part in parts) < size:
                return None
            if len({len(part.squares) for part in parts}) > 1:
                exchange.failure = Failure("the servers applied different rules")
        shards, exchange.shards = list(exchange.shards), {}
        return shards, exchange.failure or tuple(map(sum, zip(*(part.squares for part in parts), strict=True)))


class Peers:
    """The other servers of the job: connected to when there is something to tell them.

    A connection carries messages one way, from the side that opened it; the other side opens its own.
    """

    def __init__(self) -> None:
        self._endpoints: dict[str, str] = {}
        self.called: set[role.Link] = set()
        """The names of those that we opened a connection to."""

    def learn(self, nodes: Sequence[NodeIdentity], rank: int) -> None:
        """Take in the job's roster; `rank` is ours."""
        self._endpoints = {node.name: node.endpoint for node in nodes if node.role == "server" and node.rank != rank}

    def __len__(self) -> int:
        return len(self._endpoints)

    def tell(self, message: Message) -> list[role.Action]:
        """Send a message to all of them."""
        actions: list[role.Action] = []
        for name in self._endpoints:
            actions += [*self.call(name), role.Send(name, message)]
        return actions

    def call(self, name: str) -> list[role.Action]:
        """Connect to a server by its name, `server-1`, unless that was done. What is sent before its WELCOME waits at
        the loop."""
        if name in self.called:
            return []
        self.called.add(name)
        return [role.Connect(name, self._endpoints[name])]

    def lost(self, link: role.Link) -> str:
        """A connection ended or was refused; return the endpoint of the server that it led to, if it was ours."""
        if link not in self.called:
            return ""
        self.called.remove(link)
        return self._endpoints[link]
