"""Quantisers: float32 elements to bits and back, byte for byte, without loops in Python.

Each `*_encode` takes the elements and what former payloads left out (`residual`), writes the payload into `out`, and
leaves in the residual what this payload leaves out. Without a residual nothing is added and nothing kept. Each
`*_decode` takes a payload of the right length and writes the elements into `out`, or adds them to it.

The arrays are flat: elements and residuals float32, payloads uint8. The sums of elements and residual are finite
(`first_not_finite`). A compiled loop does the work where there is one (`arrays.compiled`). Otherwise numpy does it in
blocks, so that intermediate results stay in the processor's cache. Both give the same bytes; so do the functions of
`arrays.gpu_codecs`, which have the same names, for arrays on GPUs.

Source: the layouts of `2bit` and `1bit` are MXNet's: element after element from the most significant bit of a byte
on, filled up with zero bits to whole 4-byte words. The scaled one is that of 1-bit SGD with one scale for a piece.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator

import numpy as np

from distrun_runtime.arrays import compiled
from distrun_runtime.arrays.dtypes import Array, from_half, to_half

WORD_BYTES = 4

_BLOCK = 1 << 15
"""Elements that numpy encodes or decodes before the next: a multiple of what a word holds."""
_NO_RESIDUAL = np.empty(0, np.float32)

_CODES = np.array([0, 0, -1, 1], np.float32)[(np.arange(256)[:, None] >> np.array([6, 4, 2, 0])) & 3]
"""A byte to the multiples of the threshold that its four codes mean: 11 is +1, 10 is -1, the others are 0."""
_BITS = ((np.arange(256)[:, None] >> np.arange(7, -1, -1)) & 1).astype(np.bool_)
"""A byte to its eight bits, from the most significant one on."""
_FOUR_TO_ONE = np.uint32(1 << 30 | 1 << 20 | 1 << 10 | 1)
"""Times this, a word of four codes, one in each byte, has all four in its highest byte, the first one uppermost."""


class _Scratch(threading.local):
    """A thread's room for intermediate results of a block."""

    def __init__(self) -> None:
        self.floats = np.empty(_BLOCK, np.float32)
        self.more = np.empty(_BLOCK, np.float32)
        self.doubles = np.empty(_BLOCK, np.float64)
        self.flags = np.empty((2, _BLOCK), np.bool_)
        self.words = np.empty(_BLOCK // 4, np.uint32)


_room = _Scratch()


def first_not_finite(values: Array, residual: Array | None) -> int:
    """Return the place of the first sum of both that is not finite; -1: all are."""
    found = compiled.call("are_finite", values, _NO_RESIDUAL if residual is None else residual)
    if found:
        return -1
    with np.errstate(over="ignore", invalid="ignore"):
        for run in _blocks(len(values)):
            total, flags = values[run], _room.flags[0, : run.stop - run.start]
            if residual is not None:
                total = np.add(total, residual[run], out=_room.floats[: run.stop - run.start])
            np.isfinite(total, out=flags)
            if not flags.all():
                return int(run.start + np.argmin(flags))
    return -1


def words_size(n: int, factor: int) -> int:
    """Return the bytes of the words that hold `n` elements, `factor` of them in each."""
    return WORD_BYTES * -(-n // factor)


def two_bit_encode(values: Array, residual: Array | None, threshold: float, out: Array) -> None:
    """Write 11 for elements of at least the threshold, 10 for those of at most its negative, else 00."""
    quantum = np.float32(threshold)
    if compiled.call("two_bit_encode", values, _NO_RESIDUAL if residual is None else residual, quantum, out):
        return
    table = _CODES * quantum
    for run, total in _totals(values, residual):
        size = len(total)
        whole = -(-size // 4)
        plus, minus = (each[: 4 * whole] for each in _room.flags)
        plus[size:] = minus[size:] = False
        np.greater_equal(total, quantum, out=plus[:size])
        np.less_equal(total, -quantum, out=minus[:size])
        # No element is both: the code is 3 of one and 2 of the other.
        codes, other = minus.view(np.uint8), plus.view(np.uint8)
        codes += other
        codes += codes
        codes += other
        words = np.multiply(codes.view("<u4"), _FOUR_TO_ONE, out=_room.words[:whole])
        words >>= np.uint32(24)
        packed = out[run.start // 4 : run.start // 4 + whole]
        packed[...] = words
        if residual is not None:
            total -= _looked_up(table, packed, _room.more)[:size]
    out[-(-len(values) // 4) :] = 0


def two_bit_decode(payload: Array, threshold: float, out: Array, adds: bool) -> None:
    """Write or add the elements: +threshold, -threshold or 0."""
    quantum = np.float32(threshold)
    if not compiled.call("two_bit_decode", payload, quantum, out, adds):
        _decode(_CODES * quantum, payload, out, adds)


def one_bit_encode(values: Array, residual: Array | None, threshold: float, out: Array) -> None:
    """Write 1 for elements above the threshold, else 0."""
    _bits_encode(values, residual, threshold, out, step=1.0, is_inclusive=False)


def one_bit_decode(payload: Array, out: Array, adds: bool) -> None:
    """Write or add the elements: +1 or -1."""
    _bits_decode(payload, 1.0, out, adds)


def half_encode(values: Array, out: Array) -> None:
    """Write the elements as float16, rounded to nearest even."""
    to_half(values, out.view(np.float16))
    if sys.byteorder == "big":
        out.view(np.uint16).byteswap(inplace=True)


def half_decode(payload: Array, out: Array, adds: bool) -> None:
    """Write or add the elements."""
    from_half(payload.view("<f2").astype(np.float16, copy=False), out, adds)


def scaled_encode(values: Array, residual: Array | None, out: Array) -> None:
    """Write the mean absolute value as float32, then 1 for elements of at least 0, else 0."""
    size = 0.0
    for run in _blocks(len(values)):
        total, doubles = values[run], _room.doubles[: run.stop - run.start]
        if residual is not None:
            total = np.add(total, residual[run], out=_room.floats[: len(total)])
        doubles[...] = np.abs(total, out=_room.more[: len(total)])
        size += float(np.add.reduce(doubles))
    scale = np.float32(size / len(values) if len(values) else 0.0)
    out[:4] = np.frombuffer(scale.astype("<f4").tobytes(), np.uint8)
    _bits_encode(values, residual, 0.0, out[4:], step=float(scale), is_inclusive=True)


def scaled_decode(payload: Array, out: Array, adds: bool) -> None:
    """Write or add the elements: +scale or -scale."""
    _bits_decode(payload[4:], float(np.frombuffer(payload[:4].tobytes(), "<f4")[0]), out, adds)


def top_count(n: int, ratio: float) -> int:
    """Return how many of `n` elements are sent: ceil(ratio n), at least one if there is any."""
    return min(n, max(1, math.ceil(ratio * n)))


def top_encode(values: Array, residual: Array | None, out: Array) -> None:
    """Write the places (uint32, ascending) and then the values of the elements of largest magnitude.

    As many as `out` has room for. Of those of equal magnitude the first are written.
    """
    total = values if residual is None else np.add(residual, values, out=residual)
    count = len(out) // 8
    if count == len(total):
        places = np.arange(count)
    else:
        # By their bits magnitudes have the same order; NaN, which a program may write meanwhile, comes last there.
        sizes = np.abs(total).view(np.uint32)
        least = np.partition(sizes, len(total) - count)[len(total) - count]
        above = np.flatnonzero(sizes > least)
        equal = np.flatnonzero(sizes == least)[: count - len(above)]
        places = np.sort(np.concatenate([above, equal]))
    out[: 4 * count].view("<u4")[...] = places
    out[4 * count :].view("<f4")[...] = total[places]
    if residual is not None:
        residual[places] = 0.0


def top_places(payload: Array) -> Array:
    """Return the places that a payload names."""
    return payload[: len(payload) // 2].view("<u4")


def top_decode(payload: Array, out: Array, adds: bool) -> None:
    """Write or add the elements: those named, all others 0."""
    values = payload[len(payload) // 2 :].view("<f4")
    if adds:
        out[top_places(payload)] += values  # no place comes twice
    else:
        out[...] = 0
        out[top_places(payload)] = values


def _blocks(size: int) -> Iterator[slice]:
    for begin in range(0, size, _BLOCK):
        yield slice(begin, min(begin + _BLOCK, size))


def _totals(values: Array, residual: Array | None) -> Iterator[tuple[slice, Array]]:
    """Yield each block with its elements: values + residual in the residual's memory, where there is one."""
    for run in _blocks(len(values)):
        if residual is None:
            yield run, values[run]
        else:
            yield run, np.add(values[run], residual[run], out=residual[run])


def _bits_encode(
    values: Array, residual: Array | None, threshold: float, out: Array, *, step: float, is_inclusive: bool
) -> None:
    """Write 1 for elements above the threshold, or equal to it if it is inclusive, else 0; they move by the step."""
    bound, moved = np.float32(threshold), np.float32(step)
    given, kind = _NO_RESIDUAL if residual is None else residual, np.array([step, is_inclusive], np.float32)
    if compiled.call("one_bit_encode", values, given, bound, kind, out):
        return
    table = np.where(_BITS, moved, -moved)
    for run, total in _totals(values, residual):
        flags = _room.flags[0, : len(total)]
        (np.greater_equal if is_inclusive else np.greater)(total, bound, out=flags)
        packed = np.packbits(flags)
        out[run.start // 8 : run.start // 8 + len(packed)] = packed
        if residual is not None:
            total -= _looked_up(table, packed, _room.more)[: len(total)]
    out[-(-len(values) // 8) :] = 0


def _bits_decode(payload: Array, step: float, out: Array, adds: bool) -> None:
    moved = np.float32(step)
    if not compiled.call("one_bit_decode", payload, moved, out, adds):
        _decode(np.where(_BITS, moved, -moved), payload, out, adds)


def _decode(table: Array, payload: Array, out: Array, adds: bool) -> None:
    """Write or add what the table has for each byte; surplus bits at the end are left alone."""
    width = table.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        for run in _blocks(len(out)):
            packed = payload[run.start // width : -(-run.stop // width)]
            size = run.stop - run.start
            if adds:
                out[run] += _looked_up(table, packed, _room.more)[:size]
            elif size == width * len(packed):
                _looked_up(table, packed, out[run])
            else:
                out[run] = _looked_up(table, packed, _room.more)[:size]


def _looked_up(table: Array, packed: Array, out: Array) -> Array:
    """Return what the table has for each byte, written to the begin of `out`."""
    width = table.shape[1]
    found = out[: width * len(packed)]
    np.take(table, packed, axis=0, out=found.reshape(-1, width), mode="clip")  # any byte is in the table
    return found
