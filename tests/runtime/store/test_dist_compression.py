"""Compression on a distributed store: MXNet's numbers, in push and pushpull, both ways, key by key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster, open_store, run_job, shards_of

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops import compression as codec
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store import transfers
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import KeyRecord

pytestmark = pytest.mark.usefixtures("placement")

SMALL, WIDE, ODD = (2, 3), (40, 40), (41, 37)
SHAPES = {"small": SMALL, "wide": WIDE, "odd": ODD}
BOUND = 1000
"""Elements from which values are cut over all servers here: `wide` and `odd` are."""
RATE = 2


def full(value: float, shape: tuple[int, ...]) -> Any:
    return np.full(shape, value, "float32")


def start(kv: KVStore, **setting: Any) -> None:
    """Keys of ones, compressed from the first element on, under the rule of the tests."""
    kv.set_gradient_compression({"min_size": 0, **setting})
    kv.init(list(SHAPES), [full(1, shape) for shape in SHAPES.values()])
    kv.set_optimizer("test", rescale_grad=RATE)


def pulled(kv: KVStore, key: str) -> Any:
    out = full(-1, SHAPES[key])
    kv.pull(key, out)
    return out


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_compressed_cpu_2bit(workers: int) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, compressed_cpu_2bit: init, zeros, residuals, thresholds."""
    t = 0.5
    step = t * RATE * workers

    def script(kv: KVStore) -> None:
        start(kv, type="2bit", threshold=t)
        for key, shape in SHAPES.items():
            value = 1.0
            assert (pulled(kv, key) == value).all(), "init is not compressed"
            for pushed, moves in ((0.4, 0), (t - 0.4, 1), (0.2, 0), (t - 0.2, 1), (0.0, 0), (t, 1)):
                kv.push(key, full(pushed, shape))
                value += moves * step
                assert np.allclose(pulled(kv, key), value, rtol=1e-6), pushed

    run_job(script, workers, 2, bigarray_bound=BOUND)


@pytest.mark.parametrize("threshold", [-0.5, 0.0, 0.5])
@pytest.mark.parametrize("workers", [1, 2, 7])
def test_compressed_cpu_1bit(workers: int, threshold: float) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py, compressed_cpu_1bit: ones, -ones, the residuals of 2, 0, -2."""
    step = RATE * workers

    def script(kv: KVStore) -> None:
        start(kv, type="1bit", threshold=threshold)
        for key, shape in SHAPES.items():
            value = 1.0
            assert (pulled(kv, key) == value).all()
            for pushed in (1, 1, 1, -1, -1, -1):
                kv.push(key, full(pushed, shape))
                value += pushed * step
                assert (pulled(kv, key) == value).all()
            for pushed, moves in ((2, 1), (0, 1), (-2, -1)):
                kv.push(key, full(pushed, shape))
                value += moves * step
                assert (pulled(kv, key) == value).all(), pushed

    run_job(script, workers, 2, bigarray_bound=BOUND)


@pytest.mark.parametrize("kind", ["1bit", "2bit", "topk", "1bit_scaled", "fp16"])
def test_random_gradients_move_the_value_as_a_simulated_quantiser_says(kind: str) -> None:
    """Rows: compressed_cpu_1bit and _2bit, random against simulation; 7 rounds, residuals carried, and our own."""
    workers = 2
    params = {"1bit": {"threshold": 0.0}, "2bit": {"threshold": 0.5}, "topk": {"ratio": 0.1}}.get(kind, {})

    def gradient(rank: int, step: int, shape: tuple[int, ...]) -> Any:
        return np.random.default_rng([rank, step, shape[0]]).normal(size=shape).astype("float32")

    def script(kv: KVStore) -> None:
        start(kv, type=kind, **params)
        coder = codec.named(kind)
        checked = coder.check(params)
        for key, shape in SHAPES.items():
            expected = np.ones(shape, "float32").reshape(-1)
            residuals = [np.zeros(expected.size, "float32") for _ in range(workers)]
            for step in range(7):
                kv.push(key, gradient(kv.rank, step, shape))
                for rank in range(workers):
                    flat = gradient(rank, step, shape).reshape(-1)
                    for piece in shards_of(kv, key):
                        run = slice(piece.offset, piece.end)
                        payload = coder.encode(flat[run], residuals[rank][run], checked)
                        expected[run] += RATE * coder.decode(payload, piece.length, checked)
                assert np.allclose(pulled(kv, key).reshape(-1), expected, rtol=1e-5, atol=1e-5)

    run_job(script, workers, 3, bigarray_bound=BOUND)


def test_big_values_are_cut_by_words_of_their_codec(placement: str) -> None:
    """1211 * 1211 elements on three servers; placed as MXNet does, they are cut as its workers cut them."""

    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit"})
        kv.init(["w", "later"], [np.zeros(1466521, "float32"), np.zeros(7, "float32")])
        assert all(shard.offset % 16 == 0 for shard in shards_of(kv, "w"))
        if placement == "size":
            return
        held = [0, 0, 0]
        for piece in shards_of(kv, "w"):
            held[piece.server] += piece.length
        assert held == [488848, 488832, 488841]

    run_job(script, 1, 3)


def test_pushpull_is_compressed_too() -> None:
    """In MXNet it was an error, so that a Trainer could not compress on a dist store."""

    def script(kv: KVStore) -> None:
        start(kv, type="2bit")
        out = full(0, WIDE)
        kv.pushpull("wide", full(0.4, WIDE), out)
        assert (out == 1).all()
        value = full(0.2, WIDE)
        kv.pushpull("wide", value, wait=False).wait()
        assert np.allclose(value, 1 + 0.5 * RATE * 2)

    run_job(script, bigarray_bound=BOUND)


def test_bytes_on_the_wire_shrink() -> None:
    def script(kv: KVStore) -> tuple[int, int]:
        kv.set_gradient_compression({"type": "2bit"}, keys=["less"])
        kv.init(["all", "less"], [full(0, WIDE), full(0, WIDE)])
        sizes = []
        for key in ("all", "less"):
            before = sum(facts["bytes_in"] for facts in kv.stats())
            kv.push(key, full(1, WIDE)).wait()
            sizes.append(sum(facts["bytes_in"] for facts in kv.stats()) - before)
        return sizes[0], sizes[1]

    assert run_job(script, 1, 2, bigarray_bound=BOUND) == [(6400, 400)]


def test_small_values_other_types_and_rows_travel_as_they_are() -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "min_size": 100})
        kv.init(["small", "ints", "wide"], [full(0, SMALL), np.zeros(WIDE, "int64"), full(0, WIDE)])
        out, ints, wide = full(0, SMALL), np.zeros(WIDE, "int64"), full(0, WIDE)
        kv.pushpull(["small", "ints", "wide"], [full(0.3, SMALL), np.full(WIDE, 7), full(0.3, WIDE)], [out, ints, wide])
        assert np.allclose(out, 0.6)
        assert (ints == 14).all()
        assert (wide == 0).all()

    run_job(script, bigarray_bound=BOUND)


def test_each_key_may_have_a_setting_of_its_own_and_lose_it() -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "min_size": 0})
        kv.set_gradient_compression({"type": "1bit", "min_size": 0}, keys="small")
        kv.set_gradient_compression({"type": "none"}, keys=["odd"])
        kv.init(list(SHAPES), [full(0, shape) for shape in SHAPES.values()])
        outs = [full(0, shape) for shape in SHAPES.values()]
        kv.pushpull(list(SHAPES), [full(0.6, shape) for shape in SHAPES.values()], outs)
        for out, value in zip(outs, (2, 1, 1.2), strict=True):
            assert np.allclose(out, value)
        kv.set_gradient_compression({"type": "none"})
        kv.pushpull("wide", full(0.25, WIDE), outs[1])
        assert np.allclose(outs[1], 0.5)

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("kind", ["fp16", "2bit", "1bit_scaled"])
def test_a_round_is_compressed_on_the_way_back_and_all_workers_get_the_same(kind: str) -> None:
    def script(kv: KVStore) -> list[Any]:
        kv.set_gradient_compression({"type": kind, "min_size": 0, "two_way": True})
        kv.init("wide", full(0, WIDE))
        outs = []
        for step in range(4):
            out = full(0, WIDE)
            random = np.random.default_rng([kv.rank, step])
            kv.pushpull("wide", random.normal(size=WIDE).astype("float32"), out)
            outs.append(out)
        assert all(facts["bytes_out"] < 4 * 2 * 2 * 1600 * 4 for facts in kv.stats())
        return outs

    one, two = run_job(script, 2, 2, bigarray_bound=BOUND)
    for left, right in zip(one, two, strict=True):
        assert (left == right).all()
        assert left.any()


def test_a_weight_under_a_rule_comes_back_in_half_precision_only() -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "fp16", "two_way": True})
        kv.init("wide", full(1, WIDE))
        kv.set_optimizer("sgd", learning_rate=0.1)
        out = full(0, WIDE)
        kv.pushpull("wide", full(1 / 3, WIDE), out)
        assert (out == np.float32(np.float16(1 - np.float32(0.1) * (2 * np.float32(np.float16(1 / 3)))))).all()

    run_job(script, bigarray_bound=BOUND)


def test_other_codecs_on_the_way_back_are_refused_under_a_rule_and_before_the_first_round_nothing_is_lost() -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "two_way": True})
        kv.init("wide", full(0.3, WIDE))
        assert (pulled(kv, "wide") == np.float32(0.3)).all()
        kv.barrier()
        kv.set_optimizer("test", rescale_grad=1)
        kv.push("wide", full(0.5, WIDE))
        with pytest.raises(KVError, match="fp16, not as 2bit"):
            pulled(kv, "wide")
        kv.set_gradient_compression({"type": "2bit"})
        assert np.allclose(pulled(kv, "wide"), 1.3)

    run_job(script, bigarray_bound=BOUND)


def test_an_answer_of_another_type_is_refused_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "fp16", "two_way": True})
        kv.init("wide", full(1, WIDE))
        monkeypatch.setattr(transfers, "DTYPES", [np.dtype(np.float64)] * len(transfers.DTYPES))
        with pytest.raises(KVError, match="server-0 answered with values of float64, expected float32"):
            pulled(kv, "wide")

    run_job(script, 1, 1)


def test_what_is_not_finite_is_refused_and_changes_nothing() -> None:
    def script(kv: KVStore) -> None:
        start(kv, type="2bit")
        bad = full(0.6, WIDE)
        bad[3, 3] = np.nan
        with pytest.raises(KVError, match=r"'wide'.*finite"):
            kv.push(["odd", "wide"], [full(0.6, ODD), bad])
        kv.push(["odd", "wide"], [full(0.4, ODD), full(0.4, WIDE)])
        assert (pulled(kv, "odd") == 1).all()
        assert (pulled(kv, "wide") == 1).all()

    run_job(script, bigarray_bound=BOUND)


def test_the_sum_of_devices_is_compressed_once() -> None:
    """Row of dist_*_device types: no double compression."""

    def script(kv: KVStore) -> None:
        start(kv, type="2bit")
        kv.push("wide", [full(0.3, WIDE), full(0.3, WIDE)])
        assert (pulled(kv, "wide") == 1 + 0.5 * RATE * 2).all()
        residuals = kv._backend._compressor.residuals()
        assert list(residuals) == ["wide"]
        assert np.allclose(residuals["wide"], 0.1)

    run_job(script, type_name="dist_device_sync", bigarray_bound=BOUND)


MANY = {"a": (256,), "b": (16, 3), "c": (7,), "d": (64,), "e": (33,), "f": (300, 300), "g": (32,)}
"""Values that are encoded together, some that are not because they end within a word, and one of several shards."""


def sixteenths(key: str, rank: int, number: int, dtype: str = "float32") -> Any:
    """Numbers whose sums and products with a half are exact in every float type."""
    rng = np.random.default_rng([ord(key), rank, number])
    return (rng.integers(-32, 33, MANY[key]) / 16).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_workers_with_other_settings_add_up_in_one_round(dtype: str, scale: float, deterministic: bool) -> None:
    """What is packed, what each codec makes of many keys, and what goes by shard meet in the same sums."""
    kinds = ["none", "2bit", "fp16", "none", "1bit", "topk"]

    def script(session: NodeSession) -> None:
        kv = open_store("dist_sync", session, deterministic=deterministic)
        keys = list(MANY)
        kv.init(keys, [np.zeros(shape, dtype) for shape in MANY.values()])
        models = []
        for kind in kinds:
            model = Compressor()
            model.set(Compression.of({"type": kind, "min_size": 0}))
            models.append(model)
        kv.set_gradient_compression({"type": kinds[kv.rank], "min_size": 0})
        records = {key: KeyRecord.of(key, 0, np.zeros(shape, dtype)) for key, shape in MANY.items()}
        for number in range(4):
            kv.push(keys, [sixteenths(key, kv.rank, number, dtype) for key in keys], scale=scale)
            outs = [np.empty(shape, dtype) for shape in MANY.values()]
            kv.pull(keys, out=outs)
            for key, out in zip(keys, outs, strict=True):
                if key == "f" and number:
                    continue  # topk chooses within a shard, the model within the value
                given = [sixteenths(key, rank, number, dtype).reshape(-1) for rank in range(len(kinds))]
                sent = [model.through(records[key], each) for model, each in zip(models, given, strict=True)]
                if key == "f":
                    sent.pop()
                    assert np.abs(out.reshape(-1) - scale * sum(sent)).max() <= 4
                    continue
                np.testing.assert_array_equal(out.reshape(-1), scale * sum(sent), err_msg=key)

    with Cluster(len(kinds), 2, over="inproc", bigarray_bound=BOUND) as job:
        job.run_sessions(script)


@pytest.mark.parametrize("kind", ["2bit", "1bit_scaled", "fp16", "topk"])
def test_a_skipped_and_an_assigned_value_leave_nothing_of_an_encoded_round(kind: str) -> None:
    """Sums are made in memory that former rounds have used."""

    def script(kv: KVStore) -> None:
        keys = list(MANY)
        kv.set_gradient_compression({"type": kind, "min_size": 0})
        kv.init(keys, [full(0, shape) for shape in MANY.values()])
        if kv.rank:
            kv.push(keys, [full(3, shape) for shape in MANY.values()])
        else:
            kv.skip_round(keys, {})
        kv.barrier()
        kv.assign(keys, [full(7, shape) for shape in MANY.values()])
        outs = [full(-1, shape) for shape in MANY.values()]
        kv.pull(keys, out=outs)
        assert all((out == 7).all() for out in outs)
        if kind == "fp16":
            kv.pushpull(keys, [full(2, shape) for shape in MANY.values()], out=outs)
            assert all((out == 2 * kv.num_workers).all() for out in outs)

    run_job(script, 2, 2, bigarray_bound=BOUND)
