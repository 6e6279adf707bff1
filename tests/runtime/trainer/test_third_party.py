"""Stores from other packages under a trainer: two workers that share one in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from slowness import scaled

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStoreBase
from distrun_runtime.store.values import RowSparse
from distrun_runtime.trainer import Parameter, Trainer


class Shared(KVStoreBase):
    """Sums over devices and workers behind a barrier; only what the contract asks for."""

    type = "shared"

    def __init__(self, rank: int, room: dict[Any, Any], barrier: threading.Barrier) -> None:
        self._rank, self._room, self._barrier = rank, room, barrier
        self.compression: object = None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_workers(self) -> int:
        return self._barrier.parties

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        if self.rank == 0:
            self._room[key] = np.array(value)
        self._barrier.wait()
        for one in out:
            one[...] = self._room[key]

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self._room[key, self.rank] = sum(value)
        self._barrier.wait()
        total = sum(self._room[key, rank] for rank in range(self.num_workers))
        self._barrier.wait()
        for one in out:
            one[...] = total

    def is_capable(self, capability: str) -> bool:
        return False

    def set_gradient_compression(self, params: Any) -> None:
        self.compression = params


def run(script: Any) -> list[Any]:
    room: dict[Any, Any] = {}
    barrier = threading.Barrier(2)

    def work(rank: int) -> Any:
        try:
            return script(Shared(rank, room, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(2) as pool:
        return [ended.result(scaled(60)) for ended in [pool.submit(work, rank) for rank in range(2)]]


def test_workers_of_another_makers_store_get_rank_0s_weights_and_one_sum() -> None:
    def script(store: Shared) -> list[float]:
        one = Parameter([np.full(2, store.rank + 5.0), np.zeros(2)], name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=store, compression_params={"type": "2bit"})
        assert store.compression == {"type": "2bit"}
        one.grad = [np.ones(2), np.ones(2)]
        trainer.step(4)
        trainer.allreduce_grads(ignore_stale_grad=True)
        return [float(data[0]) for data in one.list_data()]

    assert run(script) == [[4, 4]] * 2


def test_unequal_data_and_rows_are_beyond_its_contract() -> None:
    def script(store: Shared) -> None:
        one = Parameter(np.zeros((2, 2)), name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=store)
        with pytest.raises(KVError, match="store 'shared' cannot go on without a worker that has no more data"):
            trainer.join()
        one.grad = RowSparse(np.ones((1, 2)), [0], (2, 2))
        with pytest.raises(KVError, match="cannot take the row-sparse gradient of parameter 'x'"):
            trainer.step(1)

    assert run(script) == [None, None]


class Tensor:
    """As much of a torch tensor as a buffer needs."""

    device = "cpu"

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, "torch.%s" % array.dtype

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> np.ndarray:
        return self.array


class Module:
    """As much of a torch module as a trainer needs."""

    def __init__(self, mean: float, count: int) -> None:
        self.weight = Parameter(np.zeros(2), name="weight")
        self.buffers = {"mean": Tensor(np.full(2, mean)), "count": Tensor(np.array(count))}

    def named_parameters(self) -> list[tuple[str, Parameter]]:
        return [("weight", self.weight)]

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return list(self.buffers.items())

    def state_dict(self) -> dict[str, Tensor]:
        return self.buffers


def test_buffers_are_rank_0s_and_can_be_averaged() -> None:
    def script(store: Shared) -> list[float]:
        net = Module(1.0 + store.rank, 5 + store.rank)
        trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, kvstore=store)
        found = [float(net.buffers["mean"].array[0]), int(net.buffers["count"].array)]
        net.buffers["mean"].array[...] = store.rank
        net.buffers["count"].array[...] = store.rank
        trainer.average_buffers()
        return [*found, float(net.buffers["mean"].array[0]), int(net.buffers["count"].array)]

    assert run(script) == [[1, 5, 0.5, 0], [1, 5, 0.5, 1]]


def test_it_cannot_skip_a_step() -> None:
    def script(store: Shared) -> None:
        trainer = Trainer([Parameter(np.zeros(2), name="x")], "sgd", {"learning_rate": 1.0}, kvstore=store)
        with pytest.raises(KVError, match="store 'shared' cannot have the other workers skip a step; let all of them"):
            trainer.skip_step()

    assert run(script) == [None, None]


def test_a_mean_is_divided_by_its_workers_and_devices() -> None:
    def script(store: Shared) -> float:
        one = Parameter([np.zeros(2), np.zeros(2)], name="x")
        trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, kvstore=store)
        one.grad = [np.full(2, 1.0 + store.rank), np.full(2, 3.0 + store.rank)]
        trainer.step()
        return float(one.data[0])

    assert run(script) == [-2.5, -2.5]
