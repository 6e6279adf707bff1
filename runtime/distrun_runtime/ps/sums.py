"""What messages bring to the shards of a server, and the sums of rounds.

What lies next to each other in an arena is added by one call. Encoded payloads are decoded straight into the sums. A
shard goes by itself where it must: rows, encoded values of float64, and all of a deterministic store, whose sums are
made in the order of ranks.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

import numpy as np

from distrun_runtime.arrays.arena import Run, runs
from distrun_runtime.arrays.device import Buffer, DeviceArray
from distrun_runtime.arrays.dtypes import Array, work_dtype
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops.reduce import Contribution, Dense, How, Sum, read, scaled, widened
from distrun_runtime.protocol.message import DTYPES, Payload, payloads_of
from distrun_runtime.ps import checks, work
from distrun_runtime.ps.values import Given, Layout, Round, Values

SUM_IN_ARENA, SUM_BY_SHARD = -1, -2
"""Where the sum of a shard's round is, in place of the number of a held contribution."""
_JOINED_ELEMENTS = 1 << 14
"""Encoded shards of fewer elements are joined."""


LAYOUTS = 1024
"""So many layouts of messages are kept for a store."""


# What messages bring


def given_by(values: Values, batch: work.Batch) -> list[tuple[int, Given]]:
    """Return what a batch of plain payloads brings, by code of dtype."""
    codes = values.codes(batch.shards)
    packed = len(batch.entries) > 0 and batch.entries["payload"][0] == Payload.PACKED
    if len(codes) == 1 and packed and batch.at is None:
        return [(codes[0][0], _packed(values, batch, codes[0][0]))]
    given = []
    frames = payloads_of(batch.entries, batch.message.payloads)
    entries = range(len(batch.entries)) if batch.at is None else batch.at.tolist()
    for code, at in codes:
        shards = batch.shards if at is None else batch.shards[at]
        mine = list(entries) if at is None else [entries[place] for place in at.tolist()]
        parts = [_elements(values, frames[number] or b"", code, batch.how.scale) for number in mine]
        alone = runs(values.at[shards], values.store.length[shards], range(1, len(shards)))
        given.append((code, Given(shards, alone, parts)))
    return given


def _elements(values: Values, frame: Buffer, code: int, scale: float) -> DeviceArray:
    """Return the elements of bytes, times a number: in the dtype, or in its work dtype if the number is not 1."""
    elements = values.device.elements(frame, DTYPES[code])
    return elements if scale == 1 else scaled(widened(elements), scale)


def _packed(values: Values, batch: work.Batch, code: int) -> Given:
    frames = [_elements(values, frame, code, batch.how.scale) for frame in batch.message.payloads]
    found, places = _layout(values, batch.shards, tuple(map(len, frames)))
    return Given(batch.shards, found, [frames[number][begin:end] for number, begin, end in places])


def _layout(values: Values, shards: Array, sizes: tuple[int, ...]) -> tuple[list[Run], list[tuple[int, int, int]]]:
    """Return the runs of shards whose elements came in frames of these sizes, and where each run's are: frame, begin,
    end. A bucket comes again in every step, with the same array of shards: what it leads to is kept."""
    known = values.layouts.get((id(shards), sizes))
    if known is not None and known.shards is shards:
        return known.runs, known.places
    lengths = values.store.length[shards]
    limits = np.cumsum(sizes)
    cuts = np.searchsorted(np.cumsum(lengths), limits, side="right")[:-1].tolist() if len(sizes) > 1 else ()
    found = runs(values.at[shards], lengths, cuts)
    places, number, begin = [], 0, 0
    for run in found:
        while number < len(sizes) - 1 and run.offset >= limits[number]:
            begin = int(limits[number])
            number += 1
        places.append((number, run.offset - begin, run.offset - begin + run.end - run.begin))
    values.layouts[id(shards), sizes] = Layout(shards, found, places)
    while len(values.layouts) > LAYOUTS:
        del values.layouts[next(iter(values.layouts))]
    return found, places


def contributions(values: Values, batch: work.Batch) -> Iterator[tuple[int, Contribution]]:
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


def add(values: Values, what: work.Add) -> None:
    """Add contributions to the sums of a round."""
    of = values.round_of(what.round)
    batch = what.batch
    # 0: nothing came yet for this shard (`values.Round.where`).
    of.open += int(np.count_nonzero(of.where[batch.shards] == 0))
    try:
        _add_batch(values, of, what)
    except Exception as err:
        # Mostly this push was acknowledged: whoever pulls the round is told.
        of.where[batch.shards[of.where[batch.shards] == 0]] = SUM_IN_ARENA
        values.lose(what.round, batch.shards, err, traceback.format_exc())
        raise


def _add_batch(values: Values, of: Round, what: work.Add) -> None:
    batch = what.batch
    if values.store.is_deterministic:
        for shard, contribution in contributions(values, batch):
            of.by_rank.setdefault(shard, []).append((what.rank, contribution))
            of.where[shard] = SUM_BY_SHARD
    elif not is_plain(batch):
        if not _add_encoded(values, of, batch):
            for shard, contribution in contributions(values, batch):
                _sum_of(values, of, shard).add(contribution)
    else:
        for code, given in given_by(values, batch):
            add_given(values, of, code, given)


def add_given(values: Values, of: Round, code: int, given: Given) -> None:
    """Add plain contributions to shards of one dtype. The first of a round is only kept: mostly it needs no copy."""
    where = of.where[given.shards]
    first = int(where[0])
    if not (where == first).all():
        for each in np.unique(where):
            add_given(values, of, code, given.take(np.flatnonzero(where == each), values))
    elif first == 0:
        number = max(of.held, default=0) + 1
        of.held[number] = given
        of.where[given.shards] = number
    elif first == SUM_BY_SHARD:
        for run, part in zip(given.runs, given.parts, strict=True):
            for shard, piece in apart(values, given.shards, run, part):
                _sum_of(values, of, shard).add(Dense(widened(piece), False))
    elif first > 0 and of.held[first].is_like(given):
        sums = values.sums(of, code)
        for run, one, other in zip(given.runs, of.held[first].parts, given.parts, strict=True):
            values.device.sum([one, other], sums.view(run.begin, run.end))
        of.where[given.shards] = SUM_IN_ARENA
        del of.held[first]
    else:
        fold(values, of, code, first)
        sums = values.sums(of, code)
        for run, part in zip(given.runs, given.parts, strict=True):
            there = sums.view(run.begin, run.end)
            values.device.sum([there, part], there)


def _add_encoded(values: Values, of: Round, batch: work.Batch) -> bool:
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
    sums = values.sums(of, code)
    for run, part in zip(given.runs, given.parts, strict=True):
        values.device.sum([part], sums.view(run.begin, run.end))
    shards = given.shards
    of.where[shards[of.where[shards] == number]] = SUM_IN_ARENA


def keep_copies(values: Values) -> None:
    """Copy all contributions that are only referred to, so that their senders may write their memory."""
    if not values.is_on_host:
        return  # they are copies
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
        total = of.by_shard[shard] = Sum(int(values.store.row_size[shard]))
        where = int(of.where[shard])
        code = int(values.store.dtype[shard])
        if where > 0:
            fold(values, of, code, where)
        if of.where[shard] == SUM_IN_ARENA:
            there = values.sums(of, code).view(*values.span(shard))
            total.add(Dense(values.device.put(there), is_own=True))
        of.where[shard] = SUM_BY_SHARD
    return total


def apart(values: Values, shards: Array, run: Run, part: DeviceArray) -> Iterator[tuple[int, DeviceArray]]:
    """Yield the shards of a run with the elements of each."""
    at = 0
    for shard in shards[run.first : run.last].tolist():
        length = int(values.store.length[shard])
        yield shard, part[at : at + length]
        at += length


def total_of(of: Round, shard: int, row_size: int) -> Contribution:
    """Return the sum of a shard that goes by itself; of a deterministic store in the order of ranks."""
    if shard not in of.by_rank:
        return of.by_shard[shard].total()
    total = Sum(row_size)
    for _, contribution in sorted(of.by_rank[shard], key=lambda pair: pair[0]):
        total.add(contribution)
    return total.total()


def how_of(batch: work.Batch, codec: int) -> How:
    """Return how payloads of a codec become elements."""
    how = batch.how
    return how if codec == how.codec else How(codec, checks.params_of(batch.message, codec), how.scale)


def is_plain(batch: work.Batch) -> bool:
    """Whether all payloads are the elements themselves."""
    return batch.how.codec == codecs.NONE and not batch.entries["codec"].any()
