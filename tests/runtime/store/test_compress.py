from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpukit import Machine

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import on_host
from distrun_runtime.arrays.dtypes import BFLOAT16, narrow
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codec
from distrun_runtime.ops.partition import Shard
from distrun_runtime.ops.reduce import How
from distrun_runtime.protocol.message import DTYPE_CODES
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.routing import Portion, portions_of
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.values import RowSparse

ALWAYS = {"type": "2bit", "min_size": 0}


def record(key: str = "w", size: int = 6, dtype: Any = np.float32) -> KeyRecord:
    return KeyRecord.of(key, 0, np.zeros(size, dtype))


def values(*numbers: float, dtype: Any = np.float32) -> Any:
    return np.array(numbers, dtype)


def compressor(**given: object) -> Compressor:
    made = Compressor()
    made.set(Compression.of({**ALWAYS, **given}))
    return made


# --- settings


@pytest.mark.parametrize(
    "given",
    [
        {"type": "none"},
        {"type": "2bit", "threshold": 2},
        {"type": "topk", "ratio": 0.1, "two_way": True, "min_size": 7},
    ],
)
def test_a_setting_travels_as_json(given: dict[str, object]) -> None:
    setting = Compression.of(given)
    assert Compression.of(setting.to_json()) == setting
    for name, value in given.items():
        assert setting.to_json()[name] == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "needs a 'type': one of none, 1bit, 1bit_scaled, 2bit, fp16, topk"),
        ({"threshold": 0.5}, "needs a 'type'"),
        ({"type": "4bit"}, "unknown compression type '4bit'; known are none, 1bit"),
        ({"type": 2}, "unknown compression type 2; known"),
        ({"type": ["2bit"]}, "unknown compression type"),
        (
            {"type": "2bit", "treshold": 1},
            r"'2bit' has no member 'treshold' \(did you mean 'threshold'\?\); it has min_size, threshold, two",
        ),
        ({"type": "topk", "threshold": 1}, "'topk' has no member 'threshold'; it has min_size, ratio, two_way, type"),
        ({"type": "none", "threshold": 1}, "'none' has no member 'threshold'"),
        ({"type": "2bit", "threshold": 0}, "threshold=0: expected a finite number .float32. above 0"),
        ({"type": "2bit", "threshold": -0.5}, "above 0"),
        ({"type": "2bit", "min_size": -1}, "min_size=-1: expected a number of bytes"),
        ({"type": "2bit", "min_size": 1.5}, "min_size=1.5: expected"),
        ({"type": "2bit", "two_way": 1}, "two_way=1: expected True or False"),
        ("2bit", "as a dictionary such as .*, not str"),
    ],
)
def test_what_is_wrong_is_refused_with_what_is_known(given: Any, message: str) -> None:
    with pytest.raises(KVError, match=message):
        Compression.of(given)


# --- which values


def test_only_dense_float_values_of_the_least_size_are_compressed() -> None:
    setting = Compression.of({"type": "fp16", "min_size": 40})
    assert setting.applies(record(size=10))
    assert not setting.applies(record(size=9))
    assert setting.applies(record(size=5, dtype=np.float64))
    assert setting.applies(record(size=20, dtype=BFLOAT16))
    assert not setting.applies(record(size=10, dtype=np.int32))
    assert not setting.applies(KeyRecord.of("w", 0, RowSparse.empty((10, 10))))
    assert not Compression.of({"type": "fp16", "min_size": 0}).applies(record(size=0))
    assert not Compression().applies(record(size=10**6))


# --- residuals


def test_16_bit_floats_are_compressed_from_float32_and_come_back_in_their_type() -> None:
    for dtype in (np.dtype(np.float16), BFLOAT16):
        made = compressor()
        flat = narrow(values(0.75, -1.0), dtype)
        got = made.through(record(size=2, dtype=dtype), flat)
        assert got.tobytes() == narrow(values(0.5, -0.5), dtype).tobytes()
        assert made.residuals()["w"].tolist() == [0.25, -0.5]


def test_a_new_setting_keeps_residuals_and_none_drops_them() -> None:
    made = compressor()
    made.through(record("a", 1), values(0.3))
    made.through(record("b", 1), values(0.3))
    made.set(Compression.of({"type": "topk", "ratio": 1, "min_size": 0}))
    assert made.through(record("a", 1), values(0.0)).tolist() == [np.float32(0.3)]
    made.set(Compression(), ["b"])
    assert list(made.residuals()) == ["a"]


def test_a_residual_of_another_size_is_not_used() -> None:
    made = compressor()
    made.restore({"w": np.ones(3, np.float32)})
    made.check(record(size=1), values(0.1))
    assert made.through(record(size=1), values(0.1)).tolist() == [0]


# --- the values of a message at once

SIZES = [256, 32, 7, 64, 64, 33, 400, 96]
"""Some are encoded together; 7 and 33 end within a word, and 400 has two shards."""


def message_of(records: list[KeyRecord], setting: Compression) -> Portion:
    """Return what one message carries: all shards of some values, each of at most 256 elements."""
    shards = [
        (item, Shard(0, begin, min(256, one.size - begin), item, DTYPE_CODES[one.dtype]))
        for item, one in enumerate(records)
        for begin in range(0, one.size, 256)
    ]
    how = How(setting.number, setting.params)
    (portion,) = portions_of(shards, [one.shape for one in records], [how] * len(records))
    return portion


def gradients(number: int, dtype: Any = np.float32) -> list[Any]:
    rng = np.random.default_rng(number)
    return [rng.normal(0, 0.7, size).astype(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("kind", sorted(codec.CODECS))
def test_values_of_a_message_become_the_payloads_of_each_by_itself(kind: str, dtype: Any) -> None:
    records = [record("k%d" % number, size, dtype) for number, size in enumerate(SIZES)]
    together, residuals = compressor(type=kind), {one.key: np.zeros(one.size, np.float32) for one in records}
    portion = message_of(records, together.setting("k0"))
    alone, params = codec.named(kind), codec.named(kind).check({})

    for number in range(5):
        given = gradients(number, dtype)
        expected = []
        for item, shard in portion.shards():
            run = slice(shard.offset, shard.end)
            expected.append(bytes(alone.encode(given[item][run], residuals[records[item].key][run], params)))
        if number == 2:  # states are loaded: the residuals lie elsewhere then
            together.restore(together.residuals())
        if number == 3:  # arrays of any strides
            given = [np.repeat(each, 2)[::2] for each in given]
        found = together.encode_all(portion, records, given)
        assert [bytes(each) for each in found] == expected
        assert sum(map(len, found)) > 0
    ours = together.residuals()
    assert ours.keys() == (residuals.keys() if alone.has_residual else set())
    assert all(ours[key].tobytes() == residuals[key].tobytes() for key in ours)


def test_payloads_stay_as_they_are_until_their_push_is_done_and_then_their_memory_is_used_again() -> None:
    records = [record("k%d" % number, size) for number, size in enumerate(SIZES)]
    one = compressor()
    portion = message_of(records, one.setting("k0"))
    first = one.encode_all(portion, records, gradients(0))
    portion.carried_by = NodeRequest("push")
    before = [bytes(each) for each in first]
    second = one.encode_all(portion, records, gradients(1))
    assert [bytes(each) for each in first] == before
    portion.carried_by.resolve((), None)
    third = one.encode_all(portion, records, gradients(2))
    assert np.shares_memory(np.frombuffer(second[0], np.uint8), np.frombuffer(third[0], np.uint8))


def test_residuals_of_keys_that_were_pushed_alone_are_used_with_others() -> None:
    """Values that are encoded together have residuals that lie end to end, unless they were there before."""
    records = [record("k%d" % number, 32) for number in range(4)]
    one, other = compressor(), compressor()
    given = [np.full(32, 0.3, np.float32)] * 4
    first = message_of([records[1]], one.setting("k0"))
    one.encode_all(first, [records[1]], given[:1])
    assert [bytes(each) for each in one.encode_all(message_of(records, one.setting("k0")), records, given)] == [
        bytes(8),
        b"\xff" * 8,
        bytes(8),
        bytes(8),
    ]
    both = message_of(records, other.setting("k0"))
    other.encode_all(both, records, given)
    other.encode_all(both, records, given)
    assert other.residuals()["k3"] == pytest.approx(0.1)
    other.set(Compression(), ["k2"])  # drops a residual between others
    assert sorted(other.residuals()) == ["k0", "k1", "k3"]


def test_check_of_a_large_value_of_another_type_names_the_element() -> None:
    one = compressor()
    wrong = np.zeros(600_000, np.float64)
    wrong[500_000] = np.nan
    with pytest.raises(KVError, match=r"key 'w': .*element 500000 is nan"):
        one.check(record(size=600_000, dtype=np.float64), wrong)


# --- values on GPUs


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("kind", ["2bit", "fp16", "topk"])
def test_a_message_of_values_on_the_host_and_on_gpus_has_the_payloads_of_the_host(kind: str, dtype: Any) -> None:
    machine = Machine(2)
    places = [None, machine.gpus.get(0), machine.gpus.get(1)]
    records = [record("k%d" % number, size, dtype) for number, size in enumerate(SIZES)]
    there, here = compressor(type=kind), compressor(type=kind)
    portion = message_of(records, here.setting("k0"))
    for turn in range(4):
        given = gradients(turn, dtype)
        chosen = [places[(turn // 2 + number // 2) % 3] for number in range(len(given))]
        pushed = [each if place is None else place.put(each) for each, place in zip(given, chosen, strict=True)]
        there.check_all((one, value, 0) for one, value in zip(records, pushed, strict=True))
        expected = [bytes(each) for each in here.encode_all(portion, records, given)]
        assert [bytes(each) for each in there.encode_all(portion, records, pushed)] == expected, turn
    ours, theirs = there.residuals(), here.residuals()
    assert ours.keys() == theirs.keys()
    assert all(ours[key].tobytes() == theirs[key].tobytes() for key in theirs)
    machine.finish()


def test_a_residual_moves_along_between_the_host_and_gpus() -> None:
    machine = Machine(2)
    one, gpu, other = compressor(), machine.gpus.get(0), machine.gpus.get(1)
    given, sums = values(0.3, -0.2), np.zeros(2, np.float32)
    for push in (
        lambda: given,
        lambda: gpu.put(given),
        lambda: other.put(given),
        lambda: given,
        lambda: gpu.put(given),
    ):
        pushed = push()
        got = one.through(record(size=2), pushed)
        assert type(got) is type(pushed)
        sums += on_host(got)
    np.testing.assert_allclose(sums + one.residuals()["w"], 5 * given, rtol=1e-6)
    machine.finish()


def test_residuals_of_several_gpus_are_saved_and_put_back_on_each() -> None:
    machine = Machine(2)
    gpus = [machine.gpus.get(0), machine.gpus.get(1)]
    made, again, host = compressor(), compressor(), compressor()
    for device, gpu in enumerate(gpus):
        made.through(record(size=2), gpu.put(values(0.1, 0.2)), device)
        host.through(record(size=2), values(0.1, 0.2), device)
    again.restore(made.residuals())
    for device, gpu in enumerate(gpus):
        pushed = values(0.45, 0.3)
        expected = host.through(record(size=2), pushed, device)
        np.testing.assert_array_equal(gpu.host(again.through(record(size=2), gpu.put(pushed), device)), expected)
    np.testing.assert_array_equal(again.residuals()["w"], host.residuals()["w"])


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float64)])
@pytest.mark.parametrize("kind", sorted(codec.CODECS))
def test_through_on_a_gpu_gives_what_the_host_gets_in_the_keys_type(kind: str, dtype: Any) -> None:
    gpu = Machine(1).gpus.get(0)
    flat = narrow(values(0.75, -1.0, 0.5, -0.75).astype(dtypes.work_dtype(dtype)), dtype)
    one, other = compressor(type=kind), compressor(type=kind)
    for _ in range(2):
        got = one.through(record(size=4, dtype=dtype), gpu.put(flat))
        assert gpu.host(got).tobytes() == other.through(record(size=4, dtype=dtype), flat).tobytes()


def test_check_of_values_on_gpus_names_the_key_and_changes_nothing() -> None:
    machine = Machine(2)
    gpu, other, made = machine.gpus.get(0), machine.gpus.get(1), compressor()
    made.through(record("b", 2), gpu.put(values(0.25, 0.25)))
    fine = [(record("a", 2), gpu.put(values(1, 2)), 0), (record("b", 2), other.put(values(1, 2)), 0)]
    made.check_all(fine)
    wrong = (record("c", 2), other.put(values(0, np.nan)), 1)
    with pytest.raises(KVError, match="key 'c': compression '2bit': element 1 is nan"):
        made.check_all([*fine, wrong, (record("d", 2), values(1, 2), 0)])
    with pytest.raises(KVError, match="key 'd': compression '2bit': element 0 is inf"):
        made.check_all([*fine, (record("d", 2), values(np.inf, 2), 0)])
    assert made.residuals()["b"].tolist() == [0.25, 0.25]
    Compressor().check_all([wrong])
