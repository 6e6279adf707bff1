from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codec

Floats = npt.NDArray[np.float32]

FEEDBACK = [name for name, found in codec.CODECS.items() if found.has_residual]

# Sixteenths: sums and differences of them are exact in float32, so that residuals can be compared to the last bit.
SIXTEENTHS = st.integers(-64, 64).map(lambda number: number / 16)
GRADIENTS = arrays.arrays(np.float32, st.integers(0, 70), elements=SIXTEENTHS)


def floats(*values: float) -> Floats:
    return np.array(values, np.float32)


def sent(name: str, values: Floats, residual: Floats | None = None, **params: float) -> bytes:
    found = codec.named(name)
    return bytes(found.encode(values, residual, found.check(params)))


def received(name: str, payload: bytes, n: int, **params: float) -> Floats:
    found = codec.named(name)
    return found.decode(payload, n, found.check(params))


# --- golden bytes


def test_two_bit_payload_and_residual_are_mxnets_byte_for_byte() -> None:
    residual = np.zeros(5, np.float32)
    payload = sent("2bit", floats(0.6, -0.7, 0.1, 0.5, -0.5), residual)
    assert payload == bytes.fromhex("e3800000")
    np.testing.assert_allclose(residual, [0.1, -0.2, 0.1, 0, 0], atol=1e-6)
    assert received("2bit", payload, 5).tolist() == [0.5, -0.5, 0, 0.5, -0.5]


def test_one_bit_payload_and_residual_are_mxnets_byte_for_byte() -> None:
    residual = np.zeros(9, np.float32)
    payload = sent("1bit", floats(0.3, -0.2, 2, 0, -3, 0.1, 0.1, 0.1, 0.7), residual, threshold=0)
    assert payload == bytes.fromhex("a7800000")
    np.testing.assert_allclose(residual, [-0.7, 0.8, 1, 1, -2, -0.9, -0.9, -0.9, -0.3], atol=1e-6)
    assert received("1bit", payload, 9, threshold=0).tolist() == [1, -1, 1, -1, -1, 1, 1, 1, 1]


def test_fp16_payload_is_little_endian_halves() -> None:
    assert sent("fp16", floats(1.0, -2.0, 1e9)) == struct.pack("<3e", 1.0, -2.0, math.inf)
    assert received("fp16", struct.pack("<2e", 0.5, -2.0), 2).tolist() == [0.5, -2.0]


def test_topk_payload_is_places_and_then_values() -> None:
    residual = floats(0.0, 0.0, 1.0, 0.0)
    payload = sent("topk", floats(0.5, -3.0, 1.5, 0.0), residual, ratio=0.5)
    assert payload == struct.pack("<2I2f", 1, 2, -3.0, 2.5)
    assert residual.tolist() == [0.5, 0, 0, 0]
    assert received("topk", payload, 4, ratio=0.5).tolist() == [0, -3, 2.5, 0]


def test_topk_sends_the_first_of_equal_magnitudes() -> None:
    for ratio, places in ((0.2, [1]), (0.4, [1, 2]), (0.6, [1, 2, 3]), (0.8, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 4])):
        payload = sent("topk", floats(-1.0, 2.0, -2.0, 2.0, 1.0), ratio=ratio)
        assert struct.unpack_from("<%dI" % len(places), payload) == tuple(places)
    n = 3000
    values = np.where(np.arange(n) % 2, np.float32(0.25), np.float32(-0.25))
    payload = sent("topk", values, np.zeros(n, np.float32), ratio=0.1)
    assert struct.unpack_from("<300I", payload) == tuple(range(300))


def test_scaled_one_bit_payload_is_the_mean_magnitude_and_then_bits() -> None:
    residual = np.zeros(4, np.float32)
    payload = sent("1bit_scaled", floats(1.0, -2.0, 4.0, -1.0), residual)
    assert payload == struct.pack("<f", 2.0) + bytes.fromhex("a0000000")
    assert residual.tolist() == [-1, 0, 2, 1]
    assert received("1bit_scaled", payload, 4).tolist() == [2, -2, 2, -2]


def test_code_01_of_two_bit_is_zero() -> None:
    assert received("2bit", bytes.fromhex("40000000"), 1).tolist() == [0]


@pytest.mark.parametrize(("name", "per_word"), [("2bit", 16), ("1bit", 32)])
def test_words_are_filled_up_with_zero_bits(name: str, per_word: int) -> None:
    for n in (0, 1, per_word - 1, per_word, per_word + 1, 3 * per_word):
        payload = sent(name, np.full(n, 9, np.float32))
        assert len(payload) == 4 * -(-n // per_word)
        ones = n * 32 // per_word
        assert int.from_bytes(payload, "big") == ((1 << ones) - 1) << (8 * len(payload) - ones)


# --- what a codec promises


@pytest.mark.parametrize("name", sorted(codec.CODECS))
@settings(max_examples=40, deadline=None)
@given(values=GRADIENTS)
def test_size_is_what_encode_returns_and_decode_gives_as_many_float32(name: str, values: Floats) -> None:
    found = codec.named(name)
    params = found.check({})
    payload = found.encode(values, None, params)
    assert len(payload) == found.size(len(values), params)
    decoded = found.decode(payload, len(values), params)
    assert (decoded.dtype, decoded.shape) == (np.float32, values.shape)
    decoded += 1  # its own memory, to be changed


@pytest.mark.parametrize("name", FEEDBACK)
@settings(max_examples=40, deadline=None)
@given(rounds=st.integers(0, 40).flatmap(
    lambda n: st.lists(arrays.arrays(np.float32, n, elements=SIXTEENTHS), min_size=1, max_size=6)
))  # fmt: skip
def test_what_was_decoded_and_the_residual_add_up_to_what_was_put_in(name: str, rounds: list[Floats]) -> None:
    found = codec.named(name)
    params = found.check({"ratio": 0.3} if name == "topk" else {})
    residual = np.zeros_like(rounds[0])
    total = np.zeros_like(rounds[0])
    for values in rounds:
        total += found.decode(found.encode(values, residual, params), len(values), params)
    # The scale of 1bit_scaled is a mean, which float32 rounds; everything else is exact here.
    tolerance = 1e-4 if name == "1bit_scaled" else 0
    np.testing.assert_allclose(total + residual, sum(rounds), atol=tolerance, rtol=0)


def test_fp16_leaves_a_residual_alone() -> None:
    residual = floats(1.0, 2.0)
    assert sent("fp16", floats(0.5, 0.5), residual) == struct.pack("<2e", 0.5, 0.5)
    assert residual.tolist() == [1, 2]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 200), ratio=st.floats(0.001, 1.0))
def test_topk_sends_the_ratio_rounded_up_and_the_largest(n: int, ratio: float) -> None:
    values = np.random.default_rng(n).permutation(np.arange(1, n + 1)).astype(np.float32)
    decoded = received("topk", sent("topk", values, ratio=ratio), n, ratio=ratio)
    count = min(n, max(1, math.ceil(ratio * n)))
    assert sorted(decoded[decoded != 0].tolist()) == list(range(n - count + 1, n + 1))
    assert (decoded[decoded != 0] == values[decoded != 0]).all()


# --- numbers of MXNet's tests, at the level of one worker


@pytest.mark.parametrize(("name", "threshold"), [("2bit", 0.5), ("2bit", 0.3), ("1bit", 0.0), ("1bit", 0.5)])
def test_seven_rounds_of_random_gradients_equal_the_formula_element_by_element(name: str, threshold: float) -> None:
    """Also of a value of several of the blocks in which codecs work."""
    source, t = np.random.default_rng(11), np.float32(threshold)
    for n in (6, 85, 100_003):
        residual, model = np.zeros(n, np.float32), np.zeros(n, np.float32)
        for _ in range(7):
            values = source.standard_normal(n, np.float32)
            decoded = received(name, sent(name, values, residual, threshold=threshold), n, threshold=threshold)
            model += values
            if name == "2bit":
                expected = np.where(model >= t, t, np.where(model <= -t, -t, np.float32(0)))
            else:
                expected = np.where(model > t, np.float32(1), np.float32(-1))
            model -= expected
            np.testing.assert_array_equal(decoded, expected)
            np.testing.assert_array_equal(residual, model)


# --- what is refused


@pytest.mark.parametrize("name", sorted(codec.CODECS))
def test_a_payload_of_another_length_is_refused_with_both_lengths(name: str) -> None:
    payload = sent(name, np.ones(40, np.float32))
    for wrong in (payload[:-1], payload + b"\0", b""):
        message = "%r: expected %d bytes for 40 elements, found %d bytes" % (name, len(payload), len(wrong))
        with pytest.raises(KVError, match=message):
            received(name, wrong, 40)


@pytest.mark.parametrize("name", FEEDBACK)
def test_residuals_and_payloads_of_another_length_are_refused(name: str) -> None:
    found, values = codec.named(name), np.ones(40, np.float32)
    params = found.check({})
    with pytest.raises(ValueError, match="another length"):
        found.encode(values, np.zeros(39, np.float32), params)
    with pytest.raises(ValueError, match="another length"):
        found.write(values, None, params, np.zeros(1, np.uint8))


@pytest.mark.parametrize("places", [(1, 4), (2, 1), (1, 1), (0, 2**32 - 1)])
def test_topk_places_that_are_not_ascending_or_too_large_are_refused(places: tuple[int, int]) -> None:
    payload = struct.pack("<2I2f", *places, 1.0, 1.0)
    with pytest.raises(KVError, match="expected ascending places below 4, found"):
        received("topk", payload, 4, ratio=0.5)


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused_and_the_residual_kept(name: str, wrong: float) -> None:
    residual = floats(1.0, 2.0, 3.0)
    with pytest.raises(KVError, match="element 1 is %g" % wrong):
        sent(name, floats(0.0, wrong, 0.0), residual)
    assert residual.tolist() == [1, 2, 3]


def test_a_sum_beyond_float32_is_refused() -> None:
    largest = float(np.finfo(np.float32).max)
    with pytest.raises(KVError, match="and inf with what was left out before"):
        sent("2bit", floats(largest), floats(largest))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("2bit", {"threshold": 0}, "'2bit': threshold=0: expected a finite number .float32. above 0"),
        ("2bit", {"threshold": -1.0}, "above 0"),
        ("2bit", {"threshold": 1e-60}, "above 0"),
        ("2bit", {"threshold": "0.5"}, "threshold='0.5': expected"),
        ("2bit", {"threshold": True}, "threshold=True: expected"),
        ("1bit", {"threshold": math.nan}, "threshold=nan: expected a finite number"),
        ("1bit", {"threshold": 1e300}, "expected a finite number"),
        ("topk", {"ratio": 0}, "above 0 and at most 1"),
        ("topk", {"ratio": 1.5}, "above 0 and at most 1"),
        (
            "2bit",
            {"treshold": 0.5},
            "'2bit' has no parameter 'treshold' .did you mean 'threshold'.+ it has threshold",
        ),
        ("fp16", {"threshold": 0.5}, "'fp16' has no parameter 'threshold'; it has none"),
    ],
)
def test_wrong_parameters_are_refused_with_what_is_right(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(KVError, match=message):
        codec.named(name).check(params)


def test_parameters_that_are_not_given_have_their_defaults() -> None:
    assert codec.named("2bit").check({}) == {"threshold": 0.5}
    assert codec.named("1bit").check({"threshold": -3}) == {"threshold": -3.0}
    assert codec.named("topk").check({}) == {"ratio": 0.01}
    assert codec.named("fp16").check({}) == codec.named("1bit_scaled").check({}) == {}


def test_numbers_on_the_wire_are_fixed() -> None:
    assert {number: found.name for number, found in codec.BY_NUMBER.items()} == {
        1: "2bit",
        2: "1bit",
        3: "fp16",
        4: "topk",
        5: "1bit_scaled",
    }
    assert codec.numbered(4) is codec.named("topk")
    assert (codec.NONE, codec.ROWS) == (0, 16)


def test_unknown_names_and_numbers_list_the_known_ones() -> None:
    with pytest.raises(KVError, match="'3bit'; known are none, 1bit, 1bit_scaled, 2bit, fp16, topk"):
        codec.named("3bit")
    with pytest.raises(KVError, match=r"codec number 9; known are 1 \(2bit\), 2 \(1bit\)"):
        codec.numbered(9)
