"""Quantisers: float32 elements to bits and back, byte for byte. Pure numpy, no loops over elements.

Each `*_encode` takes the elements with all that former payloads left out (`total`), returns the payload and leaves in
`total` what this payload leaves out. Each `*_decode` gets a payload of the right length and returns a new array.

Source: the layouts of `2bit` and `1bit` are MXNet's: element after element from the most significant bit of a byte
on, filled up with zero bits to whole 4-byte words. The scaled one is that of 1-bit SGD with one scale for a piece.
"""

from __future__ import annotations

import math

import numpy as np

from distrun_runtime.arrays.dtypes import Array

WORD_BYTES = 4

_PAIRS = ((np.arange(256)[:, None] >> np.array([6, 4, 2, 0])) & 3).astype(np.uint8)
"""A byte to its four codes, from the most significant pair on."""
_QUANTA = np.array([0.0, 0.0, -1.0, 1.0], np.float32)
"""A code to its multiple of the threshold: 11 is +1, 10 is -1, the others are 0."""
_BITS = ((np.arange(256)[:, None] >> np.arange(7, -1, -1)) & 1).astype(np.uint8)
"""A byte to its eight bits, from the most significant one on."""


def words_size(n: int, factor: int) -> int:
    """Return the bytes of the words that hold `n` elements, `factor` of them in each."""
    return WORD_BYTES * -(-n // factor)


def two_bit_encode(total: Array, threshold: float) -> bytes:
    """Write 11 for elements of at least the threshold, 10 for those of at most its negative, else 00."""
    quantum = np.float32(threshold)
    plus = total >= quantum
    moved = total <= -quantum
    # The sign is exact and the product is 0 or a quantum: the subtraction is the one rounding there is.
    total -= quantum * np.subtract(plus, moved, dtype=np.float32)
    np.logical_or(moved, plus, out=moved)
    bits = np.empty((len(total), 2), np.bool_)
    bits[:, 0] = moved
    bits[:, 1] = plus
    return _padded(np.packbits(bits), words_size(len(total), 16))


def two_bit_decode(payload: Array, n: int, threshold: float) -> Array:
    """Return the elements: +threshold, -threshold or 0."""
    table = (_QUANTA * np.float32(threshold))[_PAIRS]
    values: Array = table[payload[: -(-n // 4)]].reshape(-1)[:n]
    return values


def one_bit_encode(total: Array, threshold: float) -> bytes:
    """Write 1 for elements above the threshold, else 0."""
    bits = total > np.float32(threshold)
    _move(total, bits, 1.0)
    return _padded(np.packbits(bits), words_size(len(total), 32))


def one_bit_decode(payload: Array, n: int) -> Array:
    """Return the elements: +1 or -1."""
    return _signs(payload, n, 1.0)


def scaled_encode(total: Array) -> bytes:
    """Write the mean absolute value as float32, then 1 for elements of at least 0, else 0."""
    scale = np.float32(np.abs(total).mean(dtype=np.float64)) if len(total) else np.float32(0)
    bits = total >= 0
    _move(total, bits, float(scale))
    head = np.array(scale, "<f4").tobytes()
    return head + _padded(np.packbits(bits), words_size(len(total), 32))


def scaled_decode(payload: Array, n: int) -> Array:
    """Return the elements: +scale or -scale."""
    scale = payload[:4].view("<f4")[0]
    return _signs(payload[4:], n, float(scale))


def top_count(n: int, ratio: float) -> int:
    """Return how many of `n` elements are sent: ceil(ratio n), at least one if there is any."""
    return min(n, max(1, math.ceil(ratio * n)))


def top_encode(total: Array, count: int) -> bytes:
    """Write the places (uint32, ascending) and then the values of the `count` elements of largest magnitude."""
    if count == len(total):
        places = np.arange(count)
    else:
        places = np.sort(np.argpartition(np.abs(total), len(total) - count)[len(total) - count :])
    values = total[places]
    total[places] = 0.0
    return places.astype("<u4").tobytes() + values.astype("<f4", copy=False).tobytes()


def top_places(payload: Array) -> Array:
    """Return the places that a payload names."""
    return payload[: len(payload) // 2].view("<u4")


def top_decode(payload: Array, n: int) -> Array:
    """Return the elements: those named, all others 0."""
    result = np.zeros(n, np.float32)
    result[top_places(payload)] = payload[len(payload) // 2 :].view("<f4")
    return result


def _move(total: Array, bits: Array, scale: float) -> None:
    """Subtract +scale where a bit is set and -scale where it is not."""
    step = np.float32(scale)
    total -= np.array([-step, step], np.float32)[bits.view(np.uint8)]


def _signs(payload: Array, n: int, scale: float) -> Array:
    step = np.float32(scale)
    table = np.array([-step, step], np.float32)[_BITS]
    values: Array = table[payload[: -(-n // 8)]].reshape(-1)[:n]
    return values


def _padded(packed: Array, size: int) -> bytes:
    return packed.tobytes().ljust(size, b"\0")
