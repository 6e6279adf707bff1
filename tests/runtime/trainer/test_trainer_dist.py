"""The trainer with a distributed store, a whole job in threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from cluster import Cluster, open_store
from linear import RATE, Linear, examples, trained

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError, PeerLost
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer, agreement
from distrun_runtime.trainer.updates import StoreUpdates

UPDATES = pytest.mark.parametrize("update_on_kvstore", [True, False])


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def run(script, type_name: str = "dist_sync", workers: int = 2, **changes: object) -> list:
    with Cluster(workers, over="inproc", **changes) as job:
        return job.run(script, type_name)


# --- rows of MXNet's tests/nightly/dist_sync_kvstore.py and dist_async_kvstore.py


@pytest.mark.parametrize("workers", [1, 2, 4])
@UPDATES
def test_gluon_step_cpu(workers: int, update_on_kvstore: bool) -> None:
    """Row: one SGD step lr 1, grad rank + 1: x = 1 - n(n+1)/2."""

    def script(kv: KVStore) -> float:
        one = Parameter(ones(10, 1), np.full((10, 1), kv.rank + 1, np.float32), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        trainer.step(1)
        assert (one.data == one.data[0]).all()
        return float(one.data[0, 0])

    assert run(script, workers=workers) == [1 - workers * (workers + 1) / 2] * workers


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("stype", ["default", "row_sparse"])
def test_gluon_sparse_step_cpu(workers: int, stype: str) -> None:
    """Row: the same through a row-sparse weight and its rows; and a dense weight with row-sparse gradients."""

    def script(kv: KVStore) -> list[float]:
        table = Parameter(ones(3, 4), name="x", stype=stype, grad_stype="row_sparse")
        trainer = Trainer([table], "sgd", {"learning_rate": 1.0}, kvstore=kv)
        table.grad = RowSparse(np.full((1, 4), kv.rank + 1, np.float32), [1], (3, 4))
        trainer.step(1)
        if stype == "row_sparse":
            trainer.pull_rows("x", [1, 2])
        return list(table.data[:, 0])

    assert run(script, workers=workers) == [[1, 1 - workers * (workers + 1) / 2, 1]] * workers


@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async", "dist_device_sync", "dist_device_async"])
def test_gluon_type_cpu(type_name: str) -> None:
    """Rows: gluon_type_cpu, dist_async's trainer, test_gluon_trainer_type: what update_on_kvstore comes to."""
    stypes = [("default", "default"), ("default", "row_sparse"), ("row_sparse", "row_sparse")]

    def script(session: NodeSession) -> None:
        for stype, grad_stype in stypes:
            for asked in (None, True, False):
                kv = open_store(type_name, session)
                one = Parameter(ones(2, 3), name="x", stype=stype, grad_stype=grad_stype)
                options = {"kvstore": kv, "update_on_kvstore": asked}
                if asked is False and ("async" in type_name or grad_stype != "default"):
                    with pytest.raises(ValueError, match="update_on_kvstore="):
                        Trainer([one], "sgd", {"learning_rate": 1.0}, **options)
                else:
                    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, **options)
                    assert trainer.update_on_kvstore is (asked is not False), (stype, grad_stype, asked)

    with Cluster(2, servers=1, over="inproc") as job:
        job.run_sessions(script)


def test_a_parameter_of_a_distributed_store_cannot_be_reset_by_one_worker() -> None:
    """Row: invalid_cpu / trainer reset: loading parameters is a RuntimeError; `assign` does it for all."""

    def script(kv: KVStore) -> tuple[float, float]:
        one = Parameter(ones(2), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv)
        with pytest.raises(RuntimeError, match=r"'x' is kept in the distributed store .*trainer.assign\(\) on all"):
            one.set_data(np.zeros(2))
        assert list(one.data) == [1, 1]
        one.data[...] = 10 * (kv.rank + 1)
        trainer.assign()
        assigned = float(one.data[0])
        one.grad = ones(2)
        trainer.step(1)
        return assigned, float(one.data[0])

    assert run(script) == [(10, 8)] * 2


# --- P7: n workers with batches of b are one with batches of n * b


@UPDATES
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_n_workers_train_as_one_with_n_times_the_batch(workers: int, devices: int, update_on_kvstore: bool) -> None:
    """The last batch is shorter."""
    x, y = examples(40)
    batches = [(0, 16), (16, 32), (32, 40)]

    def script(kv: KVStore) -> list[np.ndarray]:
        model = Linear(devices, seed=3 + kv.rank)  # rank 0's weights are taken
        trainer = Trainer(model.params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for first, last in batches:
            each = (last - first) // workers // devices
            for device in range(devices):
                start = first + (kv.rank * devices + device) * each
                model.backward(x[start : start + each], y[start : start + each], device)
            trainer.step(each * devices * kv.num_workers)
        return model.weights

    reference = trained([(x[first:last], y[first:last]) for first, last in batches])
    expected = [one for one in reference for _ in range(devices)]
    for weights in run(script, workers=workers, bigarray_bound=5, partition="mxnet"):
        for got, one in zip(weights, expected, strict=True):
            # float64; only the order of additions differs
            np.testing.assert_allclose(got, one, rtol=1e-11)


@UPDATES
def test_workers_with_batches_of_different_sizes_stay_alike(update_on_kvstore: bool) -> None:
    """Each divides its own gradients by what it passes; all have one weight afterwards."""

    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(2), np.ones(2), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        trainer.step(2 if kv.rank else 4)
        return float(one.data[0])

    assert run(script) == [-0.75, -0.75]


@UPDATES
@pytest.mark.parametrize("call", ["trainer.join", "kv.join"])
def test_a_worker_out_of_data_joins_and_all_end_alike(call: str, update_on_kvstore: bool) -> None:
    """Rank r makes r + 1 steps an epoch, two epochs; with momentum, which goes on in steps without its gradients."""

    def script(kv: KVStore) -> tuple[float, float]:
        one = Parameter(np.zeros(3), name="x")
        options = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer([one], "sgd", options, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for _ in range(2):
            for _ in range(kv.rank + 1):
                one.grad = np.ones(3)
                trainer.step(1)
            trainer.join() if call == "trainer.join" else kv.join()
        return float(one.data[0]), trainer.learning_rate

    expected, momentum = 0.0, 0.0
    for _ in range(2):
        for count in (3, 2, 1):
            momentum = 0.5 * momentum - count
            expected += momentum
    assert run(script, workers=3) == [(expected, 1.0)] * 3


def test_a_store_whose_trainer_was_closed_joins_by_itself() -> None:
    """Rank 1 pushes once more; the trainer's own way of joining would leave that round open."""

    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(2), name="x")
        with Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=False):
            kv.init(7, np.zeros(2))
        out = np.zeros(2)
        if kv.rank:
            kv.pushpull(7, np.ones(2), out=out)
        kv.join()
        return float(out[0])

    assert run(script) == [0.0, 1.0]


@pytest.mark.parametrize("halves", [True, False])
def test_a_worker_that_joins_makes_the_updates_of_the_others(halves: bool) -> None:
    """Rank 1 has two batches more; `halves`: by allreduce_grads and update."""

    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(3), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=False)
        for _ in range(1 + 2 * kv.rank):
            one.grad = np.full(3, 4.0)
            if halves:
                trainer.allreduce_grads()
                trainer.update(4)
            else:
                trainer.step(4)
        trainer.join()
        return float(one.data[0])

    assert run(script) == [-4.0, -4.0]


def test_a_worker_that_cannot_know_what_others_divide_by_is_told() -> None:
    def script(kv: KVStore) -> None:
        one = Parameter(np.zeros(3), name="x")
        trainer = Trainer([one], "sgd", kvstore=kv, update_on_kvstore=False)
        if kv.rank:
            one.grad = np.ones(3)
            trainer.allreduce_grads()
        else:
            with pytest.raises(KVError, match="give every worker a batch"):
                trainer.join()

    run(script)


def test_a_worker_without_a_batch_joins_those_that_call_step() -> None:
    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(3), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=False)
        if kv.rank:
            one.grad = np.full(3, 4.0)
            trainer.step(4)
        trainer.join()
        return float(one.data[0])

    assert run(script) == [-1.0, -1.0]


@UPDATES
def test_a_parameter_that_only_some_workers_used_gets_their_gradients(update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> float:
        used, rare = Parameter(ones(2), name="used"), Parameter(ones(2), name="rare")
        trainer = Trainer([used, rare], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        used.grad = ones(2)
        if kv.rank:
            rare.grad = ones(2)
        else:
            with pytest.raises(KVError, match="parameter 'rare' has no new gradient"):
                trainer.step(1)
        trainer.step(1, ignore_stale_grad=True)
        return float(rare.data[0])

    assert run(script) == [0, 0]


def test_without_rounds_a_missing_gradient_is_not_sent() -> None:
    def script(kv: KVStore) -> float:
        used, rare = Parameter(ones(2), ones(2), name="used"), Parameter(ones(2), name="rare")
        trainer = Trainer([used, rare], "sgd", {"learning_rate": 1.0, "wd": 1.0}, kvstore=kv)
        trainer.step(1, ignore_stale_grad=True)
        return float(rare.data[0])

    assert run(script, "dist_async") == [1, 1]  # not even its decay


# --- what the store keeps


@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async"])
def test_rates_and_multipliers_change_on_the_servers(type_name: str) -> None:
    def script(kv: KVStore) -> list[float]:
        one = Parameter(np.zeros(2), name="x", lr_mult=0.5)
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv)
        seen = []

        def step() -> None:
            one.grad = np.ones(2)
            trainer.step(1)
            kv.barrier()
            seen.append(float(one.data[0]))

        step()
        trainer.set_learning_rate(2.0)
        step()
        one.lr_mult = 0.25
        step()
        return seen

    assert run(script, type_name, workers=1) == [[-0.5, -1.5, -2.0]]
    if type_name == "dist_sync":
        assert run(script, type_name) == [[-1.0, -3.0, -4.0]] * 2


@UPDATES
def test_saved_states_go_on_where_they_were(tmp_path, update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> list[float]:
        model = Parameter(np.zeros(3), name="x")
        options = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer([model], "sgd", options, kvstore=kv, update_on_kvstore=update_on_kvstore)
        path = tmp_path / ("states" if update_on_kvstore else "states-%d" % kv.rank)

        def steps(count: int) -> float:
            for _ in range(count):
                model.grad = np.ones(3)
                trainer.step(2)
            return float(model.data[0])

        steps(2)
        trainer.save_states(path)
        gone_on = steps(3)
        trainer.set_learning_rate(7.0)
        trainer.load_states(path)
        assert trainer.learning_rate == 1.0
        return [gone_on, steps(3)]

    for gone_on, again in run(script):
        assert gone_on == again


def test_compression_works_through_a_trainer() -> None:
    """There it never did (pushpull refused compression). Ones with threshold 0.5 arrive as 0.5, twice."""

    def script(kv: KVStore) -> float:
        one = Parameter(np.zeros(100, np.float32), name="x")
        compression = {"type": "2bit", "threshold": 0.5, "min_size": 0}
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, compression_params=compression)
        for grad in (1.0, 0.0, 0.0):
            one.grad = np.full(100, grad, np.float32)
            trainer.step(4)
        return float(one.data[0])

    assert run(script) == [-2 * (0.5 + 0.5) / 4] * 2


def test_workers_that_disagree_on_who_updates_are_told() -> None:
    def script(kv: KVStore) -> str:
        with pytest.raises(KVError) as caught:
            Trainer([Parameter(ones(2), name="x")], "sgd", kvstore=kv, update_on_kvstore=kv.rank == 0)
        return str(caught.value)

    for said in run(script):
        assert "update_on_kvstore is True on worker-0, False on worker-1" in said


def test_what_a_step_waits_for_is_named_by_the_parameter() -> None:
    def script(kv: KVStore) -> str:
        used, rare = Parameter(ones(2), ones(2), name="used"), Parameter(ones(2), ones(2), name="rare")
        trainer = Trainer([used, rare], "sgd", {"learning_rate": 1.0}, kvstore=kv)
        if kv.rank:
            return ""
        with pytest.raises(PeerLost) as caught:
            trainer.step(1)
        return str(caught.value)

    said = run(script)[0]
    assert "without pushing round 1" in said
    assert said.endswith(" (key 0 is parameter 'used', key 1 is parameter 'rare')")


def test_pushes_and_pulls_of_big_parameters_may_share_memory() -> None:
    """The trainer updates: sums come back into the gradients while these are still being sent."""
    size = 300_000

    def script(kv: KVStore) -> None:
        params = [Parameter(np.zeros(size), np.zeros(size), name=str(number)) for number in range(2)]
        trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=False)
        expected = np.zeros(size)
        for step in range(3):
            for one in params:
                one.grad[...] = np.arange(size) % 97 + kv.rank + step
            trainer.step(2)
            expected -= np.arange(size) % 97 + step + 0.5
            for one in params:
                assert np.array_equal(one.data, expected)

    with Cluster(2, over="zmq", bigarray_bound=50_000, partition="mxnet") as job:
        job.run(script)


@UPDATES
def test_the_noise_of_sgld_is_alike_on_all_workers_and_wherever_the_weights_are_updated(
    update_on_kvstore: bool,
) -> None:
    def script(kv: KVStore) -> np.ndarray:
        names = ["x", "y"]
        params = [Parameter(ones(5, 4), name=name) for name in names]
        trainer = Trainer(params, "sgld", {"seed": 3}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for _ in range(3):
            for one in params:
                one.grad = ones(5, 4)
            trainer.step(2)
        return np.stack([one.data for one in params])

    found = run(script, servers=2, bigarray_bound=4, partition="mxnet")
    assert np.array_equal(found[0], found[1])
    alone = [Parameter(ones(5, 4), name=name) for name in ("x", "y")]
    trainer = Trainer(alone, "sgld", {"seed": 3}, kvstore=None)
    for _ in range(3):
        for one in alone:
            one.grad = ones(5, 4)
        trainer.step(1)
    np.testing.assert_allclose(found[0], np.stack([one.data for one in alone]), rtol=1e-6)
    assert len(np.unique(found[0])) == found[0].size


# --- names of parameters


@UPDATES
def test_another_order_of_the_parameters_is_refused_with_both_ranks_and_names(update_on_kvstore: bool) -> None:
    """Their shapes are alike: without names the weights of two layers would be mixed."""

    def script(kv: KVStore) -> str:
        names = ["body.weight", "head.weight"][:: 1 if kv.rank == 0 else -1]
        params = [(name, Parameter(np.zeros(3), name=name)) for name in names]
        with pytest.raises(KVError) as caught:
            Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        return str(caught.value)

    for said in run(script):
        assert "worker-0 has parameter 'body.weight' of shape (3,) float64" in said
        assert "worker-1 has parameter 'head.weight' of shape (3,) float64" in said
        assert "fix: give the parameters in the same order on all workers" in said


# --- trainers with different rules, and trainers that are made after an error


def test_different_rules_are_refused_on_all_workers_with_ranks_and_values() -> None:
    def script(kv: KVStore) -> str:
        rule = {"learning_rate": 0.1 * (1 + kv.rank), "momentum": 0.9}
        with pytest.raises(KVError) as caught:
            Trainer([Parameter(np.zeros(3), name="x")], "sgd", rule, kvstore=kv)
        one = Parameter(np.zeros(3), np.ones(3), name="x")
        Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv).step(1)
        assert one.data.tolist() == [-2, -2, -2]
        return str(caught.value)

    for said in run(script):
        assert "learning_rate is 0.1 on worker-0, 0.2 on worker-1" in said
        assert "fix: give the trainers of all workers the same optimizer and optimizer_params" in said
        assert "momentum" not in said
        assert "replace=True" not in said


def test_another_rule_than_the_store_has_is_refused_with_advice_that_exists_for_a_trainer() -> None:
    def script(kv: KVStore) -> str:
        kv.set_optimizer("sgd", learning_rate=0.5)
        with pytest.raises(KVError) as caught:
            Trainer([Parameter(np.zeros(3), name="x")], "adam", kvstore=kv)
        return str(caught.value)

    for said in [*run(script), script(kvstore.create("local"))]:
        assert "sgd, not adam" in said
        assert "fix: give the trainer the store's rule, or another store" in said
        assert "replace=True" not in said


@pytest.fixture
def stores_by_name(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Let a trainer in a worker's thread make a store by its name; what is returned gets the thread's `session`."""
    mine = threading.local()
    monkeypatch.setattr(agreement.kvstore, "create", lambda name: open_store(name, mine.session))
    return mine


@pytest.mark.parametrize("why", ["rules differ", "one worker fails"])
def test_a_second_trainer_after_a_caught_error_is_not_a_retry_of_the_first(
    why: str, stores_by_name: threading.local, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 went on with its second model in the store where worker 0 waited with its first: weights were mixed."""
    start = StoreUpdates.start

    def fail(updates: StoreUpdates) -> None:
        if why == "one worker fails" and updates.spec.params["learning_rate"] == 1.0 and stores_by_name.session.rank:
            raise KVError("no room")
        start(updates)

    monkeypatch.setattr(StoreUpdates, "start", fail)

    def script(session: NodeSession) -> list[float]:
        stores_by_name.session = session
        rate = 1.0 if why == "one worker fails" else 1.0 + session.rank
        with pytest.raises(KVError, match=r"no room|learning_rate is 1.0 on worker-0"):
            Trainer([Parameter(np.zeros(2))], "sgd", {"learning_rate": rate}, kvstore="dist_sync")
        second = Parameter(np.full(2, 5.0), np.ones(2))
        Trainer([second], "sgd", {"learning_rate": 2.0}, kvstore="dist_sync").step(1)
        return second.data.tolist()

    with Cluster(2, 1, over="inproc") as job:
        assert job.run_sessions(script) == [[1, 1]] * 2


def test_gradients_clipped_between_the_halves_of_a_step_train_as_one_process_does() -> None:
    """Clipped before `step`, each worker's gradient would have its own norm."""
    gradients = [np.array([3.0, 0.0]), np.array([0.0, 400.0])]

    def clip(grad: np.ndarray, limit: float) -> np.ndarray:
        return grad * min(1.0, limit / float(np.linalg.norm(grad)))

    def script(kv: KVStore) -> list[float]:
        one = Parameter(np.zeros(2), gradients[kv.rank].copy())
        trainer = Trainer([one], "torch_sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=False)
        trainer.allreduce_grads()
        one.grad[...] = clip(one.grad, 1.0 * kv.num_workers)
        trainer.update()
        return one.data.tolist()

    expected = -clip(sum(gradients) / 2, 1.0)
    for weights in run(script):
        np.testing.assert_allclose(weights, expected, rtol=1e-12)


# --- in groups of workers


@UPDATES
def test_trainers_of_groups_train_beside_each_other_and_name_workers_as_the_job_does(update_on_kvstore: bool) -> None:
    def script(session: NodeSession) -> float:
        name = ("even", "odd")[session.rank % 2]
        kv = open_store("dist_sync", session, group=name, members=[session.rank % 2, session.rank % 2 + 2])
        one = Parameter(ones(3), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=kv, update_on_kvstore=update_on_kvstore)
        for _ in range(2):
            one.grad = np.full(3, session.rank + 1, np.float32)
            trainer.step(1)
        found = float(one.data[0])
        if session.rank == 3:
            trainer.set_learning_rate(0.5)
        if name == "odd":
            one.grad = ones(3)
            with pytest.raises(KVError, match=r"learning_rate is 1\.0 on worker-1, 0\.5 on worker-3"):
                trainer.step(1)
        return found

    with Cluster(4, over="inproc") as job:
        assert job.run_sessions(script) == [1 - 2 * 4, 1 - 2 * 6, 1 - 2 * 4, 1 - 2 * 6]
