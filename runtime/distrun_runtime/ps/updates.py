"""The updates of a server: a round's sum, or one push, changes the weights by the store's rule.

Shards that lie next to each other are updated by one call where the rule works element by element. A shard goes by
itself with rules that need norms or are the user's, and where its value has rows. A value that a reply still reads is
not written: its update goes to another side of the arena.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from distrun_runtime.arrays.arena import Run, runs
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import update
from distrun_runtime.ops.optimizers import NormRule
from distrun_runtime.ops.reduce import Contribution, Dense, spread, widened
from distrun_runtime.ps import work
from distrun_runtime.ps.shards import SYNC
from distrun_runtime.ps.sums import (
    SUM_BY_SHARD,
    SUM_IN_ARENA,
    add,
    add_given,
    contributions,
    fold,
    given_by,
    is_plain,
    total_of,
)
from distrun_runtime.ps.values import Given, OpenUpdate, Values


@dataclass
class Applied:
    """What came of an Apply."""

    failed: dict[int, tuple[BaseException, str]] = field(default_factory=dict)
    """Shard to what its rule raised, and the traceback."""
    squares: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Shard to its sums of squares: it waits for norms."""


def apply(values: Values, what: work.Apply) -> Applied:
    """Apply the rule to the sums of a round, or assign them."""
    result = Applied()
    if what.skip:
        values.forget_sums(what.round, what.shards)
        return result
    values.note_writes(what.shards)
    if what.last is not None and (values.store.is_deterministic or not is_plain(what.last)):
        add(values, work.Add(what.rank, what.round, what.last))
        last: work.Batch | None = None
    else:
        last = what.last
    givens = {} if last is None else dict(given_by(values, last))
    for code, at in values.codes(what.shards):
        shards = what.shards if at is None else what.shards[at]
        _apply_some(values, what.round, code, shards, given=givens.get(code), result=result)
    values.forget_sums(what.round, what.shards)
    return result


def _apply_some(values: Values, number: int, code: int, shards: Array, *, given: Given | None, result: Applied) -> None:
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
            total = total_of(of, shard, int(values.store.row_size[shard]))
            _update_alone(values, shard, total, (SYNC, number), result)
        return
    if first > 0:
        held = of.held[first]
        is_all = len(held.shards) == len(shards) and np.array_equal(held.shards, shards)
        if given is None and is_all:
            given = of.held.pop(first)
        elif given is not None and held.is_like(given):
            both = [[one, other] for one, other in zip(held.parts, given.parts, strict=True)]
            del of.held[first]
            _update(values, code, shards, given.runs, both, turn=(SYNC, number), result=result)
            return
        else:
            fold(values, of, code, first)
            first = SUM_IN_ARENA
    if first == SUM_IN_ARENA:
        sums = values.sums(of, code)
        found = given.runs if given is not None else runs(values.at[shards], values.store.length[shards])
        more = [[part] for part in given.parts] if given is not None else [[] for _ in found]
        parts = [[sums.view(run.begin, run.end), *rest] for run, rest in zip(found, more, strict=True)]
        _update(values, code, shards, found, parts, turn=(SYNC, number), result=result)
    elif given is not None:
        _update(values, code, shards, given.runs, [[p] for p in given.parts], turn=(SYNC, number), result=result)


def _update(
    values: Values,
    code: int,
    shards: Array,
    found: Sequence[Run],
    parts: Sequence[Sequence[DeviceArray]],
    *,
    turn: tuple[int, int],
    result: Applied,
) -> None:
    """Update shards of one dtype by the sums of the parts of each run."""
    arena = values.arenas[code]
    by_shard = values.rule is not None and (values.store.row_size[shards].any() or not values.is_flat(code))
    if by_shard:
        for run, given in zip(found, parts, strict=True):
            at = 0
            for shard in shards[run.first : run.last].tolist():
                length = int(values.store.length[shard])
                total = _total(values, [part[at : at + length] for part in given])
                _update_alone(values, shard, total, turn, result)
                at += length
        return
    steps: list[tuple[Array, update.Item]] = []
    for here, piece, addends, side in values.cut(shards, found, parts):
        target = arena.view(piece.begin, piece.end, side)
        if values.rule is None:
            values.device.sum(addends, target)
            values.side[here] = side
            continue
        present = int(values.side[here[0]])
        if side != present:
            values.device.sum([arena.view(piece.begin, piece.end, present)], target)
            values.side[here] = side
        steps += _steps_of(values, code, here, piece, weight=target, parts=addends)
        if values.is_on_host:  # while they are in the processor's cache
            _step_all(values, steps)
            steps = []
    _step_all(values, steps)


def _total(values: Values, parts: Sequence[DeviceArray]) -> Dense:
    if len(parts) == 1:
        return Dense(widened(parts[0]), False)
    out = values.device.empty((len(parts[0]),), work_dtype(parts[0].dtype))
    values.device.sum(parts, out)
    return Dense(out, is_own=True)


def _steps_of(
    values: Values, code: int, shards: Array, run: Run, *, weight: DeviceArray, parts: Sequence[DeviceArray]
) -> Iterator[tuple[Array, update.Item]]:
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
        state.update((name, arena.view(begin, end)) for name, arena in arenas.items())
        knobs = values.knobs_of(int(here[0]))
        given = [part[piece] for part in parts]
        yield here, update.Item(weight[piece], given, state, knobs)
        first, at = last, at + size


def _step_all(values: Values, steps: Sequence[tuple[Array, update.Item]]) -> None:
    """Make the rule's steps of some shards."""
    if not steps:
        return
    assert values.rule is not None
    try:
        update.step_all(values.rule, [item for _, item in steps], device=values.device)
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


def _update_alone(values: Values, shard: int, given: Contribution, turn: tuple[int, int], result: Applied) -> None:
    """Update one shard; what its rule raises is noted."""
    try:
        if values.rule is not None:
            squares = _step_alone(values, shard, given, turn)
            if squares is not None:
                result.squares[shard] = squares
            return
        dense = spread(given, int(values.store.length[shard]))
        values.device.sum([dense.values], values.own(shard, keep=False))
    except Exception as err:
        # A user's rule may raise anything.
        result.failed[shard] = (err, traceback.format_exc())


def _step_alone(values: Values, shard: int, given: Contribution, turn: tuple[int, int]) -> tuple[float, ...] | None:
    """Do one update of a shard; with a rule that needs norms, the first half of it."""
    rule = values.rule
    assert rule is not None
    knobs = values.knobs_of(shard)
    if values.goes_flat(shard):
        run = Run(0, 1, *values.span(shard), 0)
        dense = spread(given, int(values.store.length[shard]))
        weight = values.own(shard)
        code = int(values.store.dtype[shard])
        _step_all(values, list(_steps_of(values, code, np.array([shard]), run, weight=weight, parts=[dense.values])))
        return None
    if shard not in values.state:
        values.state[shard] = cast(dict[str, Any], rule.new_state(values.weight(shard)))
    state = values.state[shard]
    if isinstance(rule, NormRule):
        dense = spread(given, int(values.store.length[shard]))
        prepared = rule.prepare(values.weight(shard), dense.values, state, knobs)
        values.open_updates.setdefault(shard, {})[turn] = OpenUpdate(rule, knobs, prepared)
        return prepared.squares
    weight = values.own(shard)
    if isinstance(given, Dense):
        update.update(rule, weight, given.values, state, knobs)
    else:
        width = int(values.store.row_size[shard])
        update.update(rule, weight.reshape(-1, width), given.values, state, knobs, rows=given.rows)
    return None


def step(values: Values, what: work.Step) -> Mapping[int, tuple[float, ...]]:
    """Apply the rule to each payload of an async push; return the sums of squares of shards that wait for norms."""
    batch = what.batch
    if values.rule is None:
        raise KVError("store %d has no rule" % batch.store.number)
    values.note_writes(batch.shards)
    result = Applied()
    turns = batch.entries["round"].tolist()
    numbers = turns if batch.at is None else [turns[at] for at in batch.at.tolist()]
    try:
        by_shard = values.rule.needs_norms or values.store.row_size[batch.shards].any()
        if by_shard or not is_plain(batch) or len(set(numbers)) > 1:
            for (shard, given), number in zip(contributions(values, batch), numbers, strict=True):
                squares = _step_alone(values, shard, given, (what.rank, number))
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


def finish(values: Values, what: work.FinishUpdate) -> None:
    """Finish an update whose norms are known."""
    half = values.open_updates[what.shard].pop((what.turn.rank, what.turn.round))
    if what.shard not in values.state:
        values.state[what.shard] = cast(dict[str, Any], half.rule.new_state(values.weight(what.shard)))
    weight = values.own(what.shard)
    half.rule.finish(weight, half.prepared, what.totals, values.state[what.shard], half.knobs)


def drop(values: Values, what: work.DropUpdate) -> None:
    """Forget an update that waits for norms."""
    open_updates = values.open_updates.get(what.shard, {})
    open_updates.pop((what.turn.rank, what.turn.round), None)
