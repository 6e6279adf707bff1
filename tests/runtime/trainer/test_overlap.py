"""Gradients that are sent before `step`: as they are assigned here, by torch's backward in test_torch.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from distrun_runtime.arrays.cores import Threads
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.trainer import Parameter, Trainer, trainer
from distrun_runtime.trainer.exchange import StoreExchange

UPDATES = pytest.mark.parametrize("update_on_kvstore", [True, False])
RATE = {"learning_rate": 1.0}
GROUP_BYTES = 100
"""In place of 4 MiB: two parameters of 12 float64 are a group."""


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "GROUP_BYTES", GROUP_BYTES)


def run(script: Any, type_name: str = "dist_sync", workers: int = 2, over: str = "inproc") -> list[Any]:
    with Cluster(workers, over=over) as job:
        return job.run(script, type_name)


def parameters(count: int = 5) -> list[Parameter]:
    return [Parameter(np.zeros(12), name="w%d" % number) for number in range(count)]


def backward(params: list[Parameter], value: float) -> None:
    """Assign gradients in the order in which backward comes to them."""
    for number, one in reversed(list(enumerate(params))):
        one.grad = np.full(12, float(value * (number + 1)))


def first(params: list[Parameter]) -> list[float]:
    return [float(one.data[0]) for one in params]


def rounds(kv: KVStore) -> int:
    return max(int(each["rounds"]) for each in kv.stats())


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(KVError) as caught:
        call()
    return str(caught.value)


@UPDATES
@pytest.mark.parametrize("over", ["inproc", "zmq", "segments"])
def test_gradients_travel_as_they_are_assigned_and_weights_change_in_step(update_on_kvstore: bool, over: str) -> None:
    def script(kv: KVStore) -> tuple[int, list[float], list[float]]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore, overlap=True)
        backward(params, kv.rank + 1)
        kv.barrier()
        # All workers have pushed: their round is over before anybody has called step.
        before = rounds(kv), first(params)
        assert trainer.step()
        return *before, first(params)

    weights = [-1.5 * (number + 1) for number in range(5)]
    assert run(script, over=over) == [(1, [0.0] * 5, weights)] * 2


def test_beside_backward_gradients_are_copied_by_half_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    send = StoreExchange.send

    def counted(exchange: StoreExchange, *arguments: Any) -> Any:
        counts.append(Threads(6).count())
        return send(exchange, *arguments)

    monkeypatch.setattr(StoreExchange, "send", counted)

    def script(kv: KVStore) -> None:
        params = parameters(3)
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        backward(params, 1)
        assert trainer.step()

    run(script, workers=1)
    assert counts == [3]  # the last group is sent by `step`, when backward is over


@UPDATES
@pytest.mark.parametrize("kind", ["dist_sync", "local"])
@pytest.mark.parametrize("workers", [1, 3])
def test_weights_are_those_of_a_trainer_that_sends_in_step(update_on_kvstore: bool, kind: str, workers: int) -> None:
    def script(kv: KVStore, is_early: bool) -> list[list[float]]:
        params = parameters()
        rule = {"learning_rate": 0.5, "momentum": 0.9}
        trainer = Trainer(params, "sgd", rule, kvstore=kv, update_on_kvstore=update_on_kvstore, overlap=is_early)
        seen = []
        for step in range(6):
            backward(params, (step + 1) * (kv.rank + 1))
            trainer.step()
            seen.append(first(params))
        return seen

    early, late = (run(lambda kv, each=each: script(kv, each), kind, workers) for each in (True, False))
    for mine, others in zip(early, late, strict=True):
        np.testing.assert_allclose(mine, others, rtol=1e-12)  # Workers' gradients are added as they come.


@UPDATES
def test_a_second_gradient_before_step_is_refused_by_name(update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> str:
        params = parameters()
        Trainer(params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore, overlap=True)
        backward(params, 1.0)
        return refusal(lambda: backward(params, 5.0))

    for text in run(script):
        assert "parameter 'w4' got another gradient before step" in text
        assert "overlap=False" in text


def test_the_parameters_that_come_last_are_left_to_step() -> None:
    def script(kv: KVStore) -> list[int]:
        params = parameters(3)
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        backward(params, 1.0)
        kv.barrier()
        before = sum(int(each["updates"]) for each in kv.stats())
        kv.barrier()
        trainer.step()
        return [before, sum(int(each["updates"]) for each in kv.stats())]

    assert run(script) == [[2, 3]] * 2


def test_a_batch_size_is_refused_as_gradients_are_divided_when_they_are_sent() -> None:
    def script(kv: KVStore) -> str:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        backward(params, 1.0)
        text = refusal(lambda: trainer.step(8))
        assert trainer.step()
        return text

    for text in run(script):
        assert text.startswith("step(8): with overlap=True gradients are sent before step is called")


@UPDATES
def test_a_step_that_another_worker_skips_changes_nothing_although_gradients_were_sent(update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> tuple[bool, list[float], list[float]]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore, overlap=True)
        made = False
        if kv.rank == 1:
            trainer.skip_step()
        else:
            backward(params, 7.0)
            made = trainer.step()
        kept = first(params)
        backward(params, 1.0)
        trainer.step()
        return made, kept, first(params)

    assert run(script) == [(False, [0.0] * 5, [-1.0, -2.0, -3.0, -4.0, -5.0])] * 2


def test_what_would_meet_half_a_step_is_refused_until_step() -> None:
    def script(kv: KVStore) -> list[str]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        backward(params, 1.0)
        calls: list[Callable[[], object]] = [
            trainer.skip_step,
            trainer.join,
            trainer.assign,
            lambda: trainer.set_learning_rate(0.5),
            lambda: trainer.save_states("states"),
            lambda: trainer.load_states("states"),
        ]
        texts = [refusal(call) for call in calls]
        assert trainer.step()
        trainer.set_learning_rate(0.5)
        return texts

    for texts in run(script):
        names = [text.partition(":")[0] for text in texts]
        assert names == ["skip_step", "join", "assign", "a change of the rule", "save_states", "load_states"]
        assert all("call step first" in text for text in texts)


@UPDATES
def test_a_parameter_without_a_gradient_is_named_and_the_step_may_go_on_without_it(update_on_kvstore: bool) -> None:
    def script(kv: KVStore) -> tuple[str, list[float]]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, update_on_kvstore=update_on_kvstore, overlap=True)
        for number in (4, 3, 1, 0):
            params[number].grad = np.ones(12)
        text = refusal(trainer.step)
        assert trainer.step(ignore_stale_grad=True)
        return text, first(params)

    for text, weights in run(script):
        assert "parameter 'w2' has no new gradient" in text
        assert weights == [-1.0, -1.0, 0.0, -1.0, -1.0]


def test_gradients_in_buffers_and_rows_are_sent_by_step() -> None:
    def script(kv: KVStore) -> list[float]:
        buffered = Parameter(np.zeros(12), np.ones(12), name="buffered")
        rows = Parameter(np.zeros((6, 2)), name="rows", stype="row_sparse")
        params = [buffered, rows, *parameters()]
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        backward(params[2:], 1.0)
        rows.grad = np.full((6, 2), 2.0)
        assert trainer.step()
        trainer.pull_rows(rows)
        return [float(buffered.data[0]), float(rows.data[0, 0]), *first(params[2:])]

    assert run(script) == [[-1.0, -2.0, -1.0, -2.0, -3.0, -4.0, -5.0]] * 2


def test_multipliers_that_are_set_after_a_part_was_sent_hold_from_the_next_step_on() -> None:
    def script(kv: KVStore) -> list[list[float]]:
        params = parameters(3)
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        seen = []
        for _ in range(2):
            backward(params, 1.0)
            params[2].lr_mult = 10.0
            trainer.step()
            seen.append(first(params))
        return seen

    assert run(script) == [[[-1.0, -2.0, -3.0], [-2.0, -4.0, -33.0]]] * 2


def test_a_closed_trainer_sends_nothing_more() -> None:
    def script(kv: KVStore) -> int:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE, kvstore=kv, overlap=True)
        trainer.close()
        backward(params, 1.0)
        kv.barrier()
        return rounds(kv)

    assert run(script) == [0, 0]


def test_what_is_neither_true_nor_false_is_refused() -> None:
    assert refusal(lambda: Trainer(parameters(), "sgd", RATE, kvstore=None, overlap=4)) == (  # type: ignore[arg-type]
        "overlap is True or False, not 4"
    )
