"""Steps that a worker has skipped: no weight is updated on any worker, and all stay in the same round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops.schedules import Factor
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer

UPDATES = pytest.mark.parametrize("update_on_kvstore", [True, False])
RATE = {"learning_rate": 1.0}


def run(script: Any, type_name: str = "dist_sync", workers: int = 2, over: str = "inproc") -> list[Any]:
    with Cluster(workers, over=over) as job:
        return job.run(script, type_name)


@UPDATES
@pytest.mark.parametrize("over", ["inproc", "zmq"])
def test_a_step_that_one_worker_skips_is_skipped_by_all(update_on_kvstore: bool, over: str) -> None:
    def script(kv: KVStore) -> tuple[list[bool], float]:
        one = Parameter(np.zeros(3), name="x")
        rule = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer([one], "sgd", rule, kvstore=kv, update_on_kvstore=update_on_kvstore)
        made = []
        for step in range(4):
            one.grad = np.ones(3)
            if step == 1 and kv.rank == 2:
                trainer.skip_step()
                made.append(False)
            else:
                made.append(trainer.step(3))
        return made, float(one.data[0])

    # Three steps with momentum: 1, then 1.5, then 1.75.
    assert run(script, workers=3, over=over) == [([True, False, True, True], -4.25)] * 3


@UPDATES
@pytest.mark.parametrize("size", [10, 300_000], ids=["in one call", "in two calls"])
def test_a_gradient_that_cannot_be_compressed_is_refused_before_anything_is_sent(
    update_on_kvstore: bool, size: int
) -> None:
    """Large parameters are pushed by calls of their own: the first must not be sent if the second is refused."""

    def script(kv: KVStore) -> tuple[str, list[float]]:
        params = [Parameter(np.zeros(size, np.float32), name=name) for name in "ab"]
        compression = {"type": "2bit", "threshold": 0.5, "min_size": 0}
        trainer = Trainer(params, "sgd", RATE, kv, compression_params=compression, update_on_kvstore=update_on_kvstore)
        said, seen = "", []
        for step in range(4):
            for one in params:
                one.grad = np.full(size, 0.5, np.float32)
            if step == 1 and kv.rank == 1:
                params[1].grad[5] = np.nan
                with pytest.raises(KVError) as caught:
                    trainer.step(1)
                said = str(caught.value)
                trainer.skip_step()
            else:
                assert trainer.step(1) is (step != 1)
            seen.append(float(params[0].data[0]))
            assert params[0].data[0] == params[1].data[0]
        return said, seen

    found = run(script)
    assert [seen for _, seen in found] == [[-1, -1, -2, -3]] * 2
    assert "element 5 is nan" in found[1][0]
    assert "fix: push zeros instead" in found[1][0]
    assert "call trainer.skip_step() instead of step" in found[1][0]
    assert "(key 1 is parameter 'b')" in found[1][0]


def test_a_gradient_of_one_device_that_cannot_be_compressed_is_refused_before_any_update() -> None:
    size = 300_000
    params = [Parameter([np.zeros(size, np.float32) for _ in range(2)], name=name) for name in "ab"]
    trainer = Trainer(params, "sgd", RATE, "device", compression_params={"type": "2bit"}, update_on_kvstore=True)
    for one in params:
        one.grad = [np.ones(size, np.float32) for _ in range(2)]
    params[1].list_grad()[1][7] = np.inf
    with pytest.raises(KVError, match=r"key 1: compression '2bit': element 7 is inf.*key 1 is parameter 'b'"):
        trainer.step(1)
    assert not any(array.any() for one in params for array in one.list_data())
    trainer.skip_step()
    for one in params:
        one.grad = [np.ones(size, np.float32) for _ in range(2)]
    assert trainer.step(1)
    assert all((array == -1).all() for one in params for array in one.list_data())


@pytest.mark.parametrize("sums_first", [False, True])
def test_without_a_store_a_skipped_step_costs_no_other(sums_first: bool) -> None:
    one = Parameter(np.zeros(3), name="x")
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=None)
    made: list[object] = []
    for step in range(4):
        one.grad = np.ones(3)
        if step == 1:
            trainer.skip_step()
        elif sums_first:
            trainer.allreduce_grads()
        if step != 1 or sums_first:
            made.append(trainer.update(1))
    assert made == ([True, False, True, True] if sums_first else [True, True, True])
    assert one.data.tolist() == [-3.0] * 3


@UPDATES
def test_a_worker_out_of_data_follows_steps_that_are_skipped(update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> tuple[float, float]:
        one = Parameter(np.zeros(3), name="x")
        rule = {"learning_rate": 1.0, "lr_scheduler": Factor(1, 0.5)}
        trainer = Trainer([one], "sgd", rule, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for step in range(4 * kv.rank):
            one.grad = np.ones(3)
            trainer.skip_step() if step % 2 else trainer.step(1)
        trainer.join()
        return float(one.data[0]), trainer.learning_rate

    # Two updates; the schedule is where these left it.
    assert run(script) == [(-1.5, 0.5)] * 2


@UPDATES
def test_a_skipped_step_is_no_step_of_the_schedule_nor_of_saved_states(tmp_path: Any, update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> list[float]:
        one = Parameter(np.zeros(3), name="x")
        rule = {"learning_rate": 1.0, "lr_scheduler": Factor(1, 0.5)}
        trainer = Trainer([one], "sgd", rule, kvstore=kv, update_on_kvstore=update_on_kvstore)
        path = tmp_path / ("states" if update_on_kvstore else "states-%d" % kv.rank)
        rates = []
        for step in range(4):
            one.grad = np.ones(3)
            trainer.skip_step() if step % 2 and kv.rank else trainer.step(2)
            rates.append(trainer.learning_rate)
        trainer.save_states(path)
        trainer.load_states(path)
        rates.append(trainer.learning_rate)
        one.grad = np.ones(3)
        trainer.step(2)
        return [*rates, trainer.learning_rate, float(one.data[0])]

    assert run(script) == [[1.0, 1.0, 0.5, 0.5, 0.5, 0.25, -1.75]] * 2


def test_a_step_in_two_halves_can_be_skipped() -> None:
    def script(kv: KVStore) -> tuple[list[Any], float]:
        one = Parameter(np.zeros(3), name="x")
        trainer = Trainer([one], "sgd", RATE, kvstore=kv, update_on_kvstore=False)
        made: list[Any] = []
        for step in range(3):
            one.grad = np.ones(3)
            if step == 1 and kv.rank:
                trainer.skip_step()
            else:
                made.append(trainer.allreduce_grads())
            made.append(trainer.update(2))
        return made, float(one.data[0])

    assert run(script) == [
        ([True, True, False, False, True, True], -2.0),
        ([True, True, False, True, True], -2.0),
    ]


def test_row_sparse_gradients_are_skipped_too() -> None:
    def script(kv: KVStore) -> list[Any]:
        table = Parameter(np.zeros((4, 2)), name="table", stype="row_sparse")
        dense = Parameter(np.zeros(2), name="dense", grad_stype="row_sparse")
        trainer = Trainer([table, dense], "sgd", RATE, kvstore=kv)
        for step in range(2):
            table.grad = RowSparse(np.ones((1, 2)), [1], (4, 2))
            dense.grad = RowSparse(np.ones(1), [1], (2,))
            trainer.skip_step() if step == 0 and kv.rank else trainer.step(2)
        trainer.pull_rows(table)
        return [*table.data[:, 0], *dense.data]

    assert run(script) == [[0, -1, 0, 0, 0, -1]] * 2


def test_without_rounds_only_the_own_gradients_are_dropped() -> None:
    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(2), np.ones(2), name="x")
        trainer = Trainer([one], "sgd", RATE, kvstore=kv)
        if kv.rank:
            trainer.skip_step()
        else:
            assert trainer.step(1)
        kv.barrier()
        out = np.zeros(2)
        kv.pull(0, out=out)
        return float(out[0])

    assert run(script, "dist_async") == [-1, -1]


@pytest.mark.parametrize("kind", [None, "local"])
def test_alone_the_gradients_are_dropped(kind: str | None) -> None:
    one = Parameter([np.zeros(2), np.zeros(2)] if kind else np.zeros(2), name="x")
    trainer = Trainer([one], "sgd", RATE, kvstore=kind)
    one.grad = np.ones(2)
    trainer.skip_step()
    with pytest.raises(KVError, match="parameter 'x' has no new gradient since the last step"):
        trainer.step(1)
    assert not one.data.any()
