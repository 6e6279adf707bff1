"""What went wrong in MXNet's distributed store, done again here: whole jobs in threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

pytestmark = pytest.mark.usefixtures("placement")

SHAPE = (2, 3)
WIDE = (40, 40)
BOUND = 1000
"""Elements from which values are cut over all servers here: `WIDE` is."""


def full(value: float, shape: tuple[int, ...] = SHAPE) -> Any:
    return np.full(shape, value, "float32")


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = SHAPE) -> Any:
    out = full(-1, shape)
    kv.pull(key, out)
    return out


def test_int_keys_that_agree_in_32_bits_are_two_keys() -> None:
    """There keys were C ints: 2 ** 32 + 2 was 2."""
    keys = [2, 2**32 + 2, 2**62, -7]

    def script(kv: KVStore) -> None:
        kv.init(keys, [full(number) for number in range(4)])
        kv.push(keys, [full(10 * number) for number in range(4)])
        assert [pulled(kv, key)[0, 0] for key in keys] == [0, 20, 40, 60]

    with Cluster(servers=3, over="inproc") as job:
        job.run(script)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("call", ["init", "broadcast"])
def test_a_second_init_of_an_int_key_is_an_error_and_no_gradient(workers: int, call: str) -> None:
    """There it was pushed as a gradient: one worker lost the weight, two waited for each other."""

    def script(kv: KVStore) -> None:
        kv.init([3, 4], [full(7), full(7, WIDE)])
        kv.set_optimizer("test", rescale_grad=1)
        for key, shape in ((3, SHAPE), (4, WIDE)):
            with pytest.raises(KVError, match="%d" % key):
                if call == "init":
                    kv.init(key, full(10, shape))
                else:
                    kv.broadcast(key, full(10, shape), full(0, shape))
            assert (pulled(kv, key, shape) == 7).all()
            kv.push(key, full(1, shape))
            assert (pulled(kv, key, shape) == 7 + workers).all()

    with Cluster(workers, over="inproc", bigarray_bound=BOUND) as job:
        job.run(script)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_an_int_key_that_was_never_initialised_takes_no_push_and_no_pull(kind: str) -> None:
    """There the first push became its value, and a pull ended the server."""

    def script(kv: KVStore) -> None:
        kv.init(1, full(0))
        kv.set_optimizer("test", rescale_grad=1)
        for call in (
            lambda: kv.push(43, full(5)),
            lambda: kv.pull(43, full(5)),
            lambda: kv.pushpull(43, full(5)),
            lambda: kv.row_sparse_pull(43, full(5), row_ids=[0, 1]),
        ):
            with pytest.raises(KVError, match="43"):
                call()
        kv.init(43, full(2))
        assert (pulled(kv, 43) == 2).all()

    with Cluster(over="inproc") as job:
        job.run(script, kind)
    assert set(job.codes.values()) == {0}


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("wait", [True, False])
def test_a_pull_after_twenty_pushes_has_all_of_them(kind: str, wait: bool) -> None:
    """There it was ordered after the last push only, and gave a value with some of them."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "wide"], [full(0), full(0, WIDE)])
        kv.set_optimizer("test", rescale_grad=1)
        kv.barrier()
        for _ in range(20):
            kv.push(["w", "wide"], [full(1), full(1, WIDE)], wait=wait)
        for key, shape in (("w", SHAPE), ("wide", WIDE)):
            out = pulled(kv, key, shape)
            if kind == "dist_sync":
                assert (out == 40).all(), out
            else:
                assert out.min() >= 20, "at least those of this worker"
        kv.barrier()
        assert (pulled(kv, "wide", WIDE) == 40).all()

    with Cluster(over="zmq", bigarray_bound=BOUND) as job:
        job.run(script, kind)


@pytest.mark.parametrize("out", [np.zeros(SHAPE, "float16"), np.zeros(SHAPE, "float64"), np.zeros((4, 3), "float32")])
def test_an_output_of_another_size_in_a_workers_first_pull_is_an_error_and_nobody_ends(out: Any) -> None:
    """There it aborted the process of every worker but the first."""

    def script(kv: KVStore) -> None:
        kv.init("w", full(3))
        with pytest.raises(KVError, match="'w'"):
            kv.pull("w", np.copy(out))
        assert (pulled(kv, "w") == 3).all()

    with Cluster(over="inproc") as job:
        job.run(script)
    assert set(job.codes.values()) == {0}


def test_a_hundred_commands_reach_all_servers_each_before_its_call_returns() -> None:
    """Row: ps-lite's test_simple_app, a hundred commands to all nodes; ours have names and answers."""

    def script(kv: KVStore) -> None:
        kv.init("wide", full(0, WIDE))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.barrier()  # Or the other worker's set_optimizer may come after our change, and differ from it.
        value = 0.0
        for number in range(1, 101):
            if kv.rank == number % 2:
                kv.set_learning_rate(number / 128)
            kv.barrier()
            if number % 20 == 0:  # every server has a part of it
                kv.push("wide", full(1, WIDE))
                value -= kv.num_workers * number / 128
                assert (pulled(kv, "wide", WIDE) == value).all(), number

    with Cluster(2, 3, over="inproc", bigarray_bound=BOUND) as job:
        job.run(script)


def test_a_job_starts_and_stops_again_and_again() -> None:
    """Row: ps-lite's test_connection; all its tests are run four times, with two workers and two servers."""

    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        kv.pushpull("w", full(1), out := full(0))
        assert (out == 2).all()

    for _ in range(4):
        with Cluster(2, 2, over="zmq") as job:
            job.run(script)
        assert set(job.codes.values()) == {0}


def test_small_values_are_compressed_too_if_asked_and_the_setting_can_be_taken_away() -> None:
    """There four elements were always compressed, the setting came before init, and stayed."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0)])
        for setting, expected in (
            ({"type": "2bit", "threshold": 0.5}, 2 * 0.4),  # below the least size: as it is
            ({"type": "2bit", "threshold": 0.5, "min_size": 0}, 0.0),
            ({"type": "none"}, 2 * 0.4),
        ):
            kv.set_gradient_compression(setting)
            kv.barrier()
            kv.push("w", full(0.4))
            assert np.allclose(pulled(kv, "w"), expected), setting
            kv.barrier()

    with Cluster(over="inproc") as job:
        job.run(script)
