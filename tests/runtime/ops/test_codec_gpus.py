"""Codecs with arrays on GPUs: payloads, residuals and errors are those of arrays in the host's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cudastandin import StandIn
from gpukit import Machine, values
from hardfloats import floats

from distrun_runtime.arrays import gpu_programs
from distrun_runtime.arrays.cuda import Driver, Loaded, Pointer
from distrun_runtime.arrays.dtypes import BFLOAT16, Array
from distrun_runtime.arrays.gpu import GpuDevice
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression

SIZES = [0, 1, 31, 32, 33, 1000]
CASES: list[tuple[str, dict[str, float]]] = [
    *(("2bit", {}), ("1bit", {}), ("1bit", {"threshold": 0.0}), ("1bit_scaled", {}), ("fp16", {})),
    *(("topk", {"ratio": ratio}) for ratio in (0.01, 0.3, 1.0)),
]
EACH_CASE = pytest.mark.parametrize(("name", "given"), CASES)


@pytest.fixture
def device() -> GpuDevice:
    return Machine(1).gpus.get(0)


def gradients(name: str, n: int, seed: int) -> Array:
    """Return hard numbers; those whose mean is exact in any order where a mean is sent."""
    if name != "1bit_scaled":
        return np.clip(floats(n, seed), -1e20, 1e20)
    return np.round(np.random.default_rng(seed).normal(0, 1, n) * 64).astype(np.float32) / 64


def moved(payload: bytes, offset: int) -> memoryview:
    """Return the bytes at an odd address, in memory that others are in, too."""
    return memoryview(bytes(offset) + payload + b"more")[offset : offset + len(payload)]


def written(codec: compression.Codec, values: Any, residual: Any, params: dict[str, float]) -> bytes:
    """Return a payload of values that are not checked."""
    out = np.empty(codec.size(len(values), params), np.uint8)
    codec.write(values, residual, params, out)
    return out.tobytes()


@EACH_CASE
@pytest.mark.parametrize("keeps", [False, True])
def test_payloads_and_residuals_of_some_rounds_are_those_of_the_host(
    device: GpuDevice, name: str, given: dict[str, float], keeps: bool
) -> None:
    codec = compression.named(name)
    params = codec.check(given)
    for n in SIZES:
        left = np.zeros(n, np.float32) if keeps and codec.has_residual else None
        there = None if left is None else device.put(left)
        for turn in range(3):
            pushed = gradients(name, n, 10 * n + turn)
            room = np.full(codec.size(n, params) + 5, 0xA5, np.uint8)
            expected = bytes(codec.encode(pushed, left, params))
            codec.write(device.put(pushed), there, params, room[turn : turn + len(expected)])
            assert room[turn : turn + len(expected)].tobytes() == expected, (n, turn)
            assert set(room[:turn].tobytes() + room[turn + len(expected) :].tobytes()) == {0xA5}
            if left is not None:
                assert device.host(there).tobytes() == left.tobytes(), (n, turn)


@EACH_CASE
@pytest.mark.parametrize("adds", [False, True])
def test_elements_of_payloads_at_any_address_are_those_of_the_host(
    device: GpuDevice, name: str, given: dict[str, float], adds: bool
) -> None:
    codec = compression.named(name)
    params = codec.check(given)
    for n in SIZES:
        payload = bytes(codec.encode(gradients(name, n, n), None, params))
        present = floats(n, n + 1)
        expected, out = present.copy(), device.put(present)
        codec.read(payload, expected, params, adds=adds)
        codec.read(moved(payload, n % 4), out, params, adds=adds)
        assert device.host(out).tobytes() == expected.tobytes(), n


@EACH_CASE
def test_a_payload_can_stay_on_the_gpu(device: GpuDevice, name: str, given: dict[str, float]) -> None:
    codec = compression.named(name)
    params, pushed = codec.check(given), gradients(name, 100, 1)
    packed = device.empty((codec.size(100, params),), np.dtype(np.uint8))
    codec.write(device.put(pushed), None, params, packed)
    payload = codec.encode(pushed, None, params)
    assert device.host(packed).tobytes() == bytes(payload)
    out = device.empty((100,), np.dtype(np.float32))
    codec.read(packed, out, params)
    assert device.host(out).tobytes() == codec.decode(payload, 100, params).tobytes()


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float64)])
def test_elements_of_other_types_are_brought_to_float32_and_back_as_on_the_host(device: GpuDevice, dtype: Any) -> None:
    codec, pushed = compression.named("2bit"), values((99,), dtype, 1)
    params = codec.check({})
    left, there = values((99,), np.dtype(np.float32), 2), device.put(values((99,), np.dtype(np.float32), 2))
    assert bytes(codec.encode(device.put(pushed), there, params)) == bytes(codec.encode(pushed, left, params))
    assert device.host(there).tobytes() == left.tobytes()
    back = compression.from_floats(compression.floats(device.put(pushed)), dtype)
    expected = compression.from_floats(compression.floats(pushed), dtype)
    assert device.host(back).tobytes() == expected.tobytes()
    large = np.array([1e300, -1e300, 1e-300, 1 + 2.0**-25])
    assert device.host(compression.floats(device.put(large))).tobytes() == compression.floats(large).tobytes()


@pytest.mark.parametrize("at", [0, 7, 99])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_is_refused_in_the_words_of_the_host(device: GpuDevice, at: int, dtype: Any) -> None:
    codec = compression.named("topk")
    params = codec.check({})
    for value, rest in ((np.nan, 1.0), (-np.inf, 0.0), (3e38, 3e38)):
        pushed, left = np.zeros(100, dtype), np.zeros(100, np.float32)
        pushed[at:], left[at:] = value, rest
        with pytest.raises(KVError) as expected:
            codec.encode(pushed, left, params)
        there = device.put(left)
        with pytest.raises(KVError) as found:
            codec.encode(device.put(pushed), there, params)
        assert str(found.value) == str(expected.value)
        assert "element %d is" % at in str(found.value)
        assert device.host(there).tobytes() == left.tobytes()


def hard_to_choose(n: int) -> list[Array]:
    """Return arrays of which many elements are alike: zeros of both signs, subnormal numbers, equal magnitudes."""
    rng = np.random.default_rng(n)
    tiny = np.array([0, 1, 1, 2, 0x80000001, 0x80000000, 0x007FFFFF], np.uint32).view(np.float32)
    return [
        np.zeros(n, np.float32),
        np.full(n, -0.0, np.float32),
        rng.choice(np.array([-1, 1], np.float32), n),
        rng.choice(tiny, n),
        rng.choice(np.array([-2, -1, -0.0, 0, 1, 2, 3e38, -3e38], np.float32), n),
        np.where(np.arange(n) == n - 1, 5, 1).astype(np.float32),
    ]


def first_of_the_largest(elements: Array, count: int) -> Array:
    """Return places by the rule: larger magnitudes first, of equal ones the first; then ascending."""
    order = sorted(range(len(elements)), key=lambda place: (-abs(float(elements[place])), place))
    return np.sort(order[:count]).astype(np.uint32)


@pytest.mark.parametrize("keeps", [False, True])
def test_topk_takes_the_first_of_equal_magnitudes_on_the_host_and_on_gpus(device: GpuDevice, keeps: bool) -> None:
    codec = compression.named("topk")
    for n, ratio in ((1, 1.0), (40, 0.25), (700, 0.5), (gpu_programs.TOP_PIECE + 100, 0.9)):
        params = codec.check({"ratio": ratio})
        for pushed in hard_to_choose(n):
            left = np.zeros(n, np.float32) if keeps else None
            total = pushed + left if left is not None else pushed
            there = None if left is None else device.put(left)
            payload = bytes(codec.encode(pushed, left, params))
            places = first_of_the_largest(total, len(payload) // 8)
            assert payload == places.tobytes() + total[places].tobytes()
            assert bytes(codec.encode(device.put(pushed), there, params)) == payload
            if left is not None:
                total[places] = 0
                assert left.tobytes() == total.tobytes() == device.host(there).tobytes()


def test_topk_of_several_pieces_takes_as_many_of_each_as_belong_to_the_largest(device: GpuDevice) -> None:
    codec, n = compression.named("topk"), 3 * gpu_programs.TOP_PIECE + 17
    rng = np.random.default_rng(0)
    for pushed in (rng.normal(0, 1, n), rng.integers(-3, 4, n), np.repeat([1, 1, 2, 1], -(-n // 4))[:n]):
        for ratio in (1e-4, 0.1, 0.6):
            params, given = codec.check({"ratio": ratio}), pushed.astype(np.float32)
            left = rng.normal(0, 1, n).astype(np.float32)
            there, shifted = device.put(left), device.put(np.append(np.float32(9), given))[1:]
            without = codec.encode(shifted, None, params)  # not at a multiple of 16 bytes
            assert bytes(without) == bytes(codec.encode(given, None, params))
            assert bytes(codec.encode(shifted, there, params)) == bytes(codec.encode(given, left, params))
            assert device.host(there).tobytes() == left.tobytes()


@pytest.mark.parametrize("call", ["launch", "copy", "memory"])
def test_topk_that_fails_leaves_the_residual_and_is_repeated_with_the_same_bytes(call: str) -> None:
    machine = Machine(1)
    device, codec, n = machine.gpus.get(0), compression.named("topk"), 700
    params, pushed, left = codec.check({"ratio": 0.5}), floats(n, 1), floats(n, 2)
    pushed, left = np.clip(pushed, -1e20, 1e20), np.clip(left, -1e20, 1e20)
    given, there, rest = device.put(pushed), device.put(left), left.copy()
    expected, failures = bytes(codec.encode(pushed, rest, params)), 0
    limit = device.pool.size
    while True:
        if call == "memory":
            device.pool.trim()
            device.pool.limit = limit + 512 * failures
        else:
            machine.standin.fail(call, failures + 1, code=1)
        out = np.empty(len(expected), np.uint8)
        try:
            codec.write(given, there, params, out)
        except KVError:
            failures += 1
        else:
            break
        machine.standin.faults.clear()
        device.pool.limit = None
        assert device.host(there).tobytes() == left.tobytes(), failures
    machine.standin.faults.clear()
    assert failures > 3
    assert out.tobytes() == expected
    assert device.host(there).tobytes() == rest.tobytes()


class Writing:
    """A driver; before it launches a kernel of a name, the program writes into the memory of an array."""

    def __init__(self, standin: StandIn, kernel: str) -> None:
        self._standin = standin
        self._kernel = kernel
        self.place: Pointer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standin, name)

    def launch(self, loaded: Loaded, kernel: str, *rest: Any) -> None:
        if kernel == self._kernel and self.place is not None:
            block, begin = self._standin._found(self.place, self.place.nbytes)
            block.data[begin : begin + self.place.nbytes].view(np.float32)[...] = 9
        self._standin.launch(loaded, kernel, *rest)


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("kernel", ["find_top", "take_top"])
def test_topk_of_an_array_that_is_written_meanwhile_sends_what_was_counted(kernel: str, keeps: bool) -> None:
    drivers: list[Writing] = []

    def writing(standin: StandIn) -> Driver:
        drivers.append(Writing(standin, kernel))
        driver: Any = drivers[0]
        return driver

    machine, codec, n = Machine(1, driver=writing), compression.named("topk"), 300
    device, params, pushed = machine.gpus.get(0), codec.check({"ratio": 0.1}), np.arange(n, dtype=np.float32)
    left = np.ones(n, np.float32) if keeps else None
    given, there = device.put(pushed), None if left is None else device.put(left)
    drivers[0].place = given.pointer
    payload = written(codec, given, there, params)
    assert (device.host(given) == 9).all()
    assert payload == bytes(codec.encode(pushed, left, params))
    if left is not None:
        assert device.host(there).tobytes() == left.tobytes()
    machine.finish()


@pytest.mark.parametrize("keeps", [False, True])
def test_topk_sends_what_became_nan_after_it_was_checked(device: GpuDevice, keeps: bool) -> None:
    codec, n = compression.named("topk"), 100
    params, pushed = codec.check({"ratio": 0.1}), np.arange(n, dtype=np.float32)
    pushed[:11] = np.nan
    left = np.ones(n, np.float32) if keeps else None
    there = None if left is None else device.put(left)
    payload = written(codec, pushed, left, params)
    assert written(codec, device.put(pushed), there, params) == payload
    assert np.isnan(np.frombuffer(payload, np.float32)[10:]).all()
    assert np.frombuffer(payload, np.uint32)[:10].tolist() == list(range(10))
    if left is not None:
        assert device.host(there).tobytes() == left.tobytes()


def test_places_of_a_message_are_checked_before_anything_is_written(device: GpuDevice) -> None:
    codec = compression.named("topk")
    out = device.zeros((4,), np.dtype(np.float32))
    for places in ((1, 4), (2, 1), (1, 1)):
        payload = np.array(places, "<u4").tobytes() + np.ones(2, "<f4").tobytes()
        with pytest.raises(KVError, match="expected ascending places below 4"):
            codec.read(payload, out, codec.check({"ratio": 0.5}))
    with pytest.raises(KVError, match="expected 16 bytes for 4 elements, found 8"):
        codec.read(bytes(8), out, codec.check({"ratio": 0.5}))
    assert not device.host(out).any()


def test_the_scale_is_that_of_the_host_within_its_last_bit(device: GpuDevice) -> None:
    codec, pushed = compression.named("1bit_scaled"), np.random.default_rng(0).normal(0, 1, 70_001).astype(np.float32)
    expected, found = (
        np.frombuffer(codec.encode(each, None, {}), np.float32, 1)[0] for each in (pushed, device.put(pushed))
    )
    assert abs(found - expected) <= np.spacing(expected)


def test_a_gpu_has_the_kernels_of_a_codec_once_it_was_prepared() -> None:
    machine = Machine(1)
    device = machine.gpus.get(0)
    for codec in compression.CODECS.values():
        codec.prepare(device)
    before = machine.standin.calls["load"]
    for name, given in CASES:
        codec = compression.named(name)
        codec.encode(device.put(np.ones(50, np.float32)), device.zeros((50,), np.dtype(np.float32)), codec.check(given))
    assert machine.standin.calls["load"] == before
    machine.finish()
