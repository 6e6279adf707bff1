"""What trainers that update must have alike on all workers: a difference is an error to all, which names the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.trainer import Parameter, Trainer
from distrun_runtime.trainer.agreement import chosen, fingerprint

RATE = {"learning_rate": 1.0}


def run(script: Any, workers: int = 2, **changes: object) -> list[Any]:
    """Run script(kv, parameter, trainer) in every worker of a job whose trainers update."""

    def work(kv: KVStore) -> Any:
        one = Parameter(np.zeros(3), np.ones(3), name="x")
        return script(kv, one, Trainer([one], "sgd", RATE, kvstore=kv, update_on_kvstore=False))

    with Cluster(workers, over="inproc", **changes) as job:
        return job.run(work)


def refused(act: Any) -> str:
    with pytest.raises(KVError) as caught:
        act()
    return str(caught.value)


def with_other_rates(kv: KVStore, one: Parameter, trainer: Trainer) -> tuple[str, float]:
    """Step at rates that differ, then at one; return what was said, and a weight."""
    trainer.step(3)
    trainer.set_learning_rate(0.5 if kv.rank == 1 else 0.25)
    said = refused(lambda: trainer.step(3))
    assert refused(lambda: trainer.step(3)) == said, "as long as they differ"
    assert (one.data == -1).all()
    trainer.set_learning_rate(2.0)
    assert trainer.step(3)
    return said, float(one.data[0])


def refused_on_all(found: Any) -> None:
    """Check what `with_other_rates` returned on three workers."""
    assert found == [found[0]] * 3
    said, weight = found[0]
    assert weight == -3
    assert "learning_rate is 0.25 on worker-0, worker-2, 0.5 on worker-1" in said
    assert "fix: make the same changes (set_learning_rate, " in said


def test_another_learning_rate_is_refused_by_rank_and_nothing_is_updated() -> None:
    refused_on_all(run(with_other_rates, workers=3))


def test_trainers_that_differ_in_their_rules_are_told_when_they_are_made() -> None:
    def script(kv: KVStore) -> str:
        one = Parameter(np.zeros(3), np.ones(3), name="x", wd_mult=kv.rank)
        rule = {"learning_rate": 1.0 + kv.rank, "momentum": 0.5 * kv.rank, "wd": 0.1}
        return refused(lambda: Trainer([one], "sgd", rule, kvstore=kv, update_on_kvstore=False))

    with Cluster(2, over="inproc") as job:
        for said in job.run(script):
            assert "learning_rate is 1.0 on worker-0, 2.0 on worker-1" in said
            assert "momentum is 0.0 on worker-0, 0.5 on worker-1" in said
            assert "wd_mult of parameter 'x' is 0.0 on worker-0, not set on worker-1" in said
            assert "wd is" not in said.partition("fix:")[0]


def test_other_batch_sizes_in_update_are_refused_by_the_next_step() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> tuple[str, float]:
        trainer.allreduce_grads()
        trainer.update(2 + 2 * kv.rank)
        one.grad = np.ones(3)
        said = refused(trainer.allreduce_grads)
        trainer.assign()
        one.grad = np.ones(3)
        assert trainer.allreduce_grads()
        trainer.update(2)
        return said, float(one.data[0])

    for said, weight in run(script):
        assert "the batch_size of the last update is 2 on worker-0, 4 on worker-1" in said
        assert "call trainer.assign() on all workers" in said
        assert weight == -2


def test_workers_that_step_in_different_ways_are_refused() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> str:
        return refused(trainer.allreduce_grads if kv.rank else lambda: trainer.step(1))

    for said in run(script, workers=3):
        assert "2 of 3 workers call allreduce_grads and update, the others call step" in said


def test_a_worker_out_of_data_compares_too() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> str:
        if kv.rank == 0:
            return refused(trainer.join)
        trainer.set_learning_rate(0.5)
        return refused(lambda: trainer.step(1))

    for said in run(script):
        assert "learning_rate is 1.0 on worker-0, 0.5 on worker-1" in said


def test_a_weight_that_one_worker_sets_is_refused_on_all() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> tuple[str, float]:
        if kv.rank:
            one.set_data(np.full(3, 5.0))
        said = refused(lambda: trainer.step(1))
        if not kv.rank:
            one.set_data(np.full(3, 5.0))
        one.grad[...] = 1  # the refused step has left its sum there
        assert trainer.step(2)
        return said, float(one.data[0])

    for said, weight in run(script):
        assert "parameter 'x' on worker-1 and not on worker-0" in said
        assert "Each worker updates its own weights, so they would differ from now on" in said
        assert weight == 4


def test_states_that_one_worker_loads_are_refused_on_all(tmp_path: Any) -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> tuple[str, float]:
        trainer.set_optimizer_params(momentum=0.5)
        trainer.step(2)
        path = tmp_path / ("states-%d" % kv.rank)
        trainer.save_states(path)
        trainer.step(2)
        if kv.rank:
            trainer.load_states(path)
        said = refused(lambda: trainer.step(2))
        if not kv.rank:
            trainer.load_states(path)
        assert trainer.step(2)
        return said, float(one.data[0])

    for said, weight in run(script):
        assert "weights or states of the optimizer differ after load_states on worker-1" in said
        assert "fix: call load_states on all workers" in said
        assert weight == -2.5


def test_only_the_momentum_may_differ_after_a_load(tmp_path: Any) -> None:
    """The weights are alike: the states are compared too."""

    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> str:
        trainer.set_optimizer_params(momentum=0.5)
        trainer.save_states(tmp_path / ("states-%d" % kv.rank))
        trainer.step(2)
        if kv.rank:
            weight = one.data.copy()
            trainer.load_states(tmp_path / "states-1")
            one.set_data(weight)
        return refused(lambda: trainer.step(2))

    for said in run(script):
        assert "weights or states of the optimizer differ after load_states on worker-1" in said


def test_nothing_more_is_sent_while_all_is_alike() -> None:
    """Ten steps of a parameter and the counter: 20 pushes and 20 pulls of each worker, and no other round."""

    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> int:
        for _ in range(10):
            trainer.step(2)
        kv.barrier()
        return int(max(each["rounds"] for each in kv.stats()))

    assert run(script) == [10, 10]


@settings(deadline=None)
@given(st.lists(st.sampled_from(range(4)), min_size=1, max_size=9))
def test_the_sums_of_fingerprints_and_of_their_squares_show_any_difference(facts: list[int]) -> None:
    marks = [fingerprint({"fact": fact}) for fact in facts]
    assert all(0 <= part < 2**24 for mark in marks for part in mark)
    alike = all(
        len(facts) * sum(mark[place] ** 2 for mark in marks) == sum(mark[place] for mark in marks) ** 2
        for place in range(2)
    )
    assert alike is (len(set(facts)) == 1)


def test_a_message_names_three_settings_that_differ_and_counts_the_rest() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> str:
        own = 0.25 + 0.5 * kv.rank
        trainer.set_optimizer_params(learning_rate=own, momentum=own, wd=own, clip_gradient=own)
        one.lr_mult = own
        return refused(lambda: trainer.step(1))

    for said in run(script):
        named, _, _ = said.partition(". fix:")
        assert named.count(" on worker-0, ") == 3
        assert named.endswith("; and 2 more")


def test_a_message_names_three_weights_that_only_one_worker_changed_and_counts_the_rest() -> None:
    def script(kv: KVStore) -> str:
        params = [Parameter(np.zeros(3), np.ones(3), name=name) for name in "abcde"]
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, update_on_kvstore=False)
        for one in [] if kv.rank else params:
            one.set_data(np.ones(3))
        return refused(lambda: trainer.step(1))

    with Cluster(2, over="inproc") as job:
        for said in job.run(script):
            assert "parameter 'c' on worker-0 and not on worker-1 and 2 more. Each worker updates" in said


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ({0: {"changed": [2, 0]}, 1: {"changed": [0, 2]}}, [0, 2]),
        ({0: {"changed": []}, 1: {"changed": []}}, []),
        ({0: {"changed": [1]}, 1: {"changed": []}}, "parameter 'b' on worker-0 and not on worker-1"),
        ({0: None, 1: {"changed": [0, 1]}}, "parameter 'a' on worker-1 and not on worker-0; parameter 'b' on worker-1"),
        ({1: {"changed": [0]}}, r"parameter 'a' on worker-1; worker-0 takes no part in steps now \(it has joined or"),
        ({1: {"changed": [0]}}, r"fix: undo the change; make it on all workers when all of them make steps again"),
        ({0: {"changed": [0]}, 1: {"changed": [0], "wrong": "another shape"}}, "worker-1: another shape"),
    ],
)
def test_weights_of_rank_0_are_taken_if_all_workers_changed_them(notes: Any, expected: Any) -> None:
    if isinstance(expected, list):
        assert chosen(notes, range(2), ["a", "b", "c"], "") == expected
    else:
        with pytest.raises(KVError, match=expected):
            chosen(notes, range(2), ["a", "b", "c"], "")


# --- where the store updates


def run_on_store(script: Any, workers: int = 2, type_name: str = "dist_sync") -> list[Any]:
    """Run script(kv, parameter, trainer) in every worker of a job whose store updates."""

    def work(kv: KVStore) -> Any:
        one = Parameter(np.zeros(3), np.ones(3), name="x")
        return script(kv, one, Trainer([one], "sgd", RATE, kvstore=kv))

    with Cluster(workers, over="inproc") as job:
        return job.run(work, type_name)


def test_different_learning_rates_are_refused_on_all_workers_where_the_store_updates() -> None:
    """The last worker's counted, whichever that was."""

    refused_on_all(run_on_store(with_other_rates, workers=3))


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_learning_rate_that_only_one_worker_changes_is_refused_where_the_store_updates(goes_back: bool) -> None:
    """Worker 1 takes it back, or worker 0 follows; it had made no change when it heard of it."""

    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> tuple[str, list[float]]:
        if kv.rank == 1:
            trainer.set_learning_rate(0.5)
        said = refused(lambda: trainer.step(2))
        if goes_back == (kv.rank == 1):
            trainer.set_learning_rate(1.0 if goes_back else 0.5)
        assert trainer.step(2)
        assert trainer.step(2)
        return said, one.data.tolist()

    for said, weights in run_on_store(script):
        assert "learning_rate is 1.0 on worker-0, 0.5 on worker-1" in said
        assert weights == [-2 if goes_back else -1] * 3


def test_equal_changes_of_the_rate_and_of_multipliers_cost_a_round_and_no_error() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> float:
        for rate in (1.0, 0.5, 0.5, 0.25):
            trainer.set_learning_rate(rate)
            assert trainer.step(2)
        one.lr_mult = 0.0
        assert trainer.step(2)
        return float(one.data[0])

    assert run_on_store(script) == [-2.25, -2.25]


def test_a_changed_rate_and_a_skipped_step_and_a_changed_weight_come_together() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> list[bool]:
        trainer.set_learning_rate(0.5)
        if kv.rank == 0:
            trainer.skip_step()
            first = False
        else:
            first = trainer.step(2)
        return [first, trainer.step(2), float(one.data[0]) == -0.5]

    assert run_on_store(script) == [[False, True, True]] * 2


def test_the_rate_of_a_worker_that_has_joined_is_compared_when_it_is_back() -> None:
    def script(kv: KVStore, one: Parameter, trainer: Trainer) -> str:
        if kv.rank == 0:
            trainer.join()
        else:
            trainer.set_learning_rate(0.5)
            assert trainer.step(1)
            trainer.join()
        assert one.data[0] == -0.5
        if kv.rank == 0:
            trainer.set_learning_rate(0.25)
            said = refused(lambda: trainer.step(2))
            trainer.set_learning_rate(0.5)
        else:
            said = refused(lambda: trainer.step(2))
        assert trainer.step(2)
        assert one.data[0] == -1
        return said

    for said in run_on_store(script):
        assert "learning_rate is 0.25 on worker-0, 0.5 on worker-1" in said
