"""The codecs' program for GPUs, compiled for this machine: its payloads and residuals are those of the codecs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cxx
import numpy as np
import numpy.typing as npt
import pytest
from hardfloats import floats
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays import gpu_programs
from distrun_runtime.ops import compression, quantize

Array = npt.NDArray[Any]

LENGTHS = [*range(41), 1000, 4099]
CODECS = [
    ("2bit", {"threshold": 0.5}),
    ("2bit", {"threshold": 1e-40}),
    ("1bit", {"threshold": 0.5}),
    ("1bit", {"threshold": 0.0}),
    ("1bit_scaled", {}),
    ("fp16", {}),
]
FILL = 0xA5


def placed(values: Array, offset: int) -> Array:
    """Return a copy that begins `offset` elements behind a multiple of 16 bytes."""
    room = np.zeros(values.nbytes + 64 + offset * values.itemsize, np.uint8)
    begin = -room.ctypes.data % 16 + offset * values.itemsize
    result = room[begin : begin + values.nbytes].view(values.dtype)
    result[...] = values
    return result


def run(kernel: str, *arguments: Array | np.generic, n: int) -> None:
    """Run a kernel; it gets the addresses of arrays."""
    given_to = [each.ctypes.data if isinstance(each, np.ndarray) else each for each in arguments]
    cxx.compiled(gpu_programs.codecs())(kernel, given_to, n)


def encode(name: str, values: Array, residual: Array | None, params: dict[str, float], out: Array) -> None:
    """Encode as a device with these kernels does it."""
    n, kept = len(values), "" if residual is None else "_keeping"
    arrays = [values] if residual is None else [values, residual]
    if name == "2bit":
        run("two_bit_encode" + kept, *arrays, np.float32(params["threshold"]), out, n=n)
    elif name == "1bit":
        scalars = np.float32(params["threshold"]), np.float32(1), np.uint32(0)
        run("one_bit_encode" + kept, *arrays, *scalars, out, n=n)
    elif name == "1bit_scaled":
        sums = np.empty(16)
        run("magnitudes" + kept, *arrays, sums, np.int64(len(sums)), n=n)
        scale = np.float32(sums.sum() / n if n else 0.0)
        out[:4].view(np.float32)[...] = scale
        run("one_bit_encode" + kept, *arrays, np.float32(0), scale, np.uint32(1), out[4:], n=n)
    else:
        run("half_encode", values, out, n=n)


def decode(name: str, payload: Array, out: Array, params: dict[str, float], adds: bool) -> None:
    kind, adding = ("half" if name == "fp16" else "two_bit" if name == "2bit" else "one_bit"), "_adding" * adds
    if name == "1bit_scaled":
        scalars, payload = [payload[:4].view(np.float32)[0]], payload[4:]
    else:
        scalars = {"2bit": [np.float32(params.get("threshold", 0))], "1bit": [np.float32(1)], "fp16": []}[name]
    run("%s_decode%s" % (kind, adding), payload, *scalars, out, n=len(out))


def assert_same(found: Array, expected: Array) -> None:
    """Check that both have the same bytes, NaN's aside."""
    nans = np.isnan(expected)
    assert (np.isnan(found) == nans).all()
    assert found[~nans].tobytes() == expected[~nans].tobytes()


def same_size(values: Array) -> Array:
    """Return numbers of one power of two: then the sum of magnitudes is exact, and the same in any order."""
    return np.round(np.clip(values, -2, 2) * 64) / np.float32(64)


def check_codec(name: str, params: dict[str, float], n: int, offsets: tuple[int, int, int], seed: int) -> None:
    found = compression.named(name)
    complete = found.check(params)
    is_aligned = name != "fp16"  # payloads of bytes may begin anywhere
    for keeps in (False, True) if found.has_residual else (False,):
        values = floats(n, seed, found.has_residual)
        left = floats(n, seed + 1)
        if name == "1bit_scaled":
            values, left = same_size(values), same_size(left)
        values, residual = placed(values, offsets[0]), placed(left, offsets[1]) if keeps else None
        expected_rest = left.copy() if keeps else None
        size = found.size(n, complete)
        expected = np.frombuffer(found.encode(values, expected_rest, complete), np.uint8)
        before, begin = values.copy(), offsets[2] if is_aligned and name != "1bit_scaled" else 0
        room = np.full(begin + size + 5, FILL, np.uint8)
        payload = room[begin : begin + size]
        encode(name, values, residual, complete, payload)
        assert set(room[:begin].tobytes() + room[begin + size :].tobytes()) == {FILL}, "written outside"
        assert values.tobytes() == before.tobytes()
        if name == "fp16":
            assert_same(payload.view(np.float16), expected.view(np.float16))
        else:
            assert payload.tobytes() == expected.tobytes()
        if residual is not None and expected_rest is not None:
            assert residual.tobytes() == expected_rest.tobytes()
        for adds in (False, True):
            present = floats(n, seed + 2, finite=False)
            wanted, out = present.copy(), placed(present, offsets[0])
            found.read(expected.data, wanted, complete, adds=adds)
            decode(name, payload, out, complete, adds)
            assert_same(out, wanted)


@pytest.mark.parametrize(("name", "params"), CODECS)
def test_payloads_residuals_and_what_they_mean_are_the_codecs(name: str, params: dict[str, float]) -> None:
    for n in LENGTHS:
        check_codec(name, params, n, (0, 0, 0), seed=n)
        check_codec(name, params, n, (n % 4, n % 3, n % 7), seed=n)


@settings(max_examples=20, deadline=None, database=None)
@given(
    case=st.sampled_from(CODECS),
    n=st.integers(0, 300),
    offsets=st.tuples(*[st.integers(0, 5)] * 3),
    seed=st.integers(0, 1 << 20),
)
def test_payloads_are_the_codecs_at_any_addresses(
    case: tuple[str, dict[str, float]], n: int, offsets: tuple[int, int, int], seed: int
) -> None:
    check_codec(*case, n, offsets, seed)


def wrong_ones() -> Iterator[tuple[Array, Array]]:
    """Yield values and residuals of which one sum is not finite."""
    for n in (1, 3, 8, 1001):
        for at in {0, n // 2, n - 1}:
            for value, rest in ((np.inf, 0), (np.nan, 0), (0, -np.inf), (3e38, 3e38)):
                values, residual = np.zeros(n, np.float32), np.zeros(n, np.float32)
                values[at], residual[at] = value, rest
                yield values, residual


@pytest.mark.parametrize("offset", [0, 1])
def test_what_is_not_finite_is_found_wherever_it_is(offset: int) -> None:
    for values, residual in wrong_ones():
        n, wrong = len(values), np.zeros(2, np.uint32)
        values, residual = placed(values, offset), placed(residual, offset)
        run("check_finite", values, wrong[:1], n=n)
        run("check_finite_keeping", values, residual, wrong[1:], n=n)
        assert wrong.tolist() == [quantize.first_not_finite(values, rest) >= 0 for rest in (None, residual)]
    for n in (0, 1, 7, 1001):
        values, wrong = placed(floats(n, 1), offset), np.zeros(1, np.uint32)
        run("check_finite_keeping", values, values, wrong, n=n)
        assert wrong[0] == 0


def test_magnitudes_add_up_to_the_codecs_within_the_rounding_of_float64() -> None:
    for n, number in ((0, 3), (5, 8), (4099, 64)):
        values, residual, sums = floats(n, 1), floats(n, 2), np.full(number, np.nan)
        run("magnitudes_keeping", values, residual, sums, np.int64(number), n=n)
        expected = np.abs(values + residual).astype(np.float64).sum()
        assert sums.sum() == pytest.approx(expected, rel=1e-14)


def test_the_largest_elements_are_added_at_their_places() -> None:
    found = compression.named("topk")
    params = found.check({"ratio": 0.3})
    payload = np.frombuffer(found.encode(floats(100, 1), None, params), np.uint8)
    present = floats(100, 2)
    expected, out = present.copy(), present.copy()
    found.read(payload.data, expected, params, adds=True)
    places = quantize.top_places(payload)
    run("top_decode_adding", places, payload[len(payload) // 2 :], out, n=len(places))
    assert out.tobytes() == expected.tobytes()
