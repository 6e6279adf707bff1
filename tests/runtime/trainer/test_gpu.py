"""The trainer with tensors on GPUs of the stand-in: they go to the store as they are, with the bytes of the host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from fakearrays import put
from gpukit import Machine, gpus_of_process
from gputensors import GpuTensor, Torch

from distrun_runtime.arrays import find
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.arrays.dtypes import BFLOAT16, Array, narrow
from distrun_runtime.kvstore import KVStore, KVStoreBase
from distrun_runtime.trainer import Parameter, Trainer

SHAPES = ((5, 3), (7,), (), (0, 4))
STEPS = 3
UPDATES = pytest.mark.parametrize("update_on_kvstore", [True, False])


@pytest.fixture
def machine() -> Iterator[Machine]:
    with gpus_of_process(Machine(2)) as machine:
        yield machine
        machine.finish()


@pytest.fixture
def torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch(machine)
    put(monkeypatch, torch)
    return torch


def values(seed: int, dtype: Any) -> list[Array]:
    random = np.random.default_rng(seed)
    return [narrow(random.normal(size=shape).astype(np.float32), np.dtype(dtype)) for shape in SHAPES]


class Model:
    """Parameters on two devices: of the host (`torch` is None), or GPUs 0 and 1."""

    def __init__(self, torch: Torch | None, dtype: Any = np.float32, devices: int = 2) -> None:
        self.torch, self.dtype, self.devices = torch, dtype, devices
        self.tensors: list[list[GpuTensor]] = []
        self.params: list[Parameter] = []
        for value in values(0, dtype):
            if torch is None:
                self.params.append(Parameter([value.copy() for _ in range(devices)]))
            else:
                self.tensors.append([torch.tensor(value, device) for device in range(devices)])
                self.params.append(Parameter(self.tensors[-1]))

    def backward(self, seed: int) -> None:
        for device in range(self.devices):
            for number, grad in reversed(list(enumerate(values(seed + device, self.dtype)))):
                if self.torch is None:
                    self.params[number].replicas[device].set_grad(grad)
                else:
                    self.tensors[number][device].backward(grad)

    def weights(self) -> list[bytes]:
        """The weights of the devices, which are alike."""
        arrays = [[one if self.torch is None else one.get() for one in each.list_data()] for each in self.params]
        for first, *others in arrays:
            assert all(first.tobytes() == other.tobytes() for other in others)
        return [each[0].tobytes() for each in arrays]


def train(model: Model, kv: KVStore | str | None, rank: int = 0, rule: str = "adam", **options: Any) -> list[bytes]:
    trainer = Trainer(model.params, rule, {"learning_rate": 0.1}, kv, **options)
    moves = 0 if model.torch is None else model.torch.moves
    for step in range(STEPS):
        model.backward(100 * rank + 10 * step)
        trainer.step()
    assert model.torch is None or model.torch.moves == moves, "a step went through the host"
    return model.weights()


DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float32", "float16", "bfloat16"])


@DTYPES
@UPDATES
def test_a_device_store_gives_gpus_the_weights_of_the_host(torch: Torch, update_on_kvstore: bool, dtype: Any) -> None:
    found = [train(Model(where, dtype), "device", update_on_kvstore=update_on_kvstore) for where in (None, torch)]
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["local", None])
@DTYPES
def test_a_step_of_one_gpu_is_made_there_with_the_bytes_of_the_host(torch: Torch, kind: str | None, dtype: Any) -> None:
    found = [train(Model(where, dtype, devices=1), kind) for where in (None, torch)]
    assert found[0] == found[1]


@pytest.mark.parametrize("type_name", ["dist_device_sync", "dist_sync"])
@UPDATES
def test_workers_with_gpus_have_the_weights_of_workers_without(
    torch: Torch, type_name: str, update_on_kvstore: bool
) -> None:
    def weights(where: Torch | None) -> list[bytes]:
        def script(kv: KVStore) -> list[bytes]:
            return train(Model(where), kv, kv.rank, update_on_kvstore=update_on_kvstore)

        with Cluster(over="inproc") as job:
            first, second = job.run(script, type_name)
        assert first == second
        return first

    assert weights(torch) == weights(None)


def test_a_gradient_that_is_changed_after_the_sum_counts_as_it_is_then(torch: Torch) -> None:
    model = Model(torch)
    trainer = Trainer(model.params, "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    model.backward(0)
    trainer.allreduce_grads()
    for tensors in model.tensors:
        for tensor in tensors:
            assert tensor.grad is not None
            tensor.grad.set(np.full(tensor.shape, 2))
    trainer.update(1)
    expected = [value - np.float32(2) for value in values(0, np.float32)]
    assert model.weights() == [each.tobytes() for each in expected]


def test_torch_is_told_that_a_weight_was_written_and_nobody_counts_as_having_changed_it(torch: Torch) -> None:
    for kind in ("device", None):
        model = Model(torch, devices=1)
        with Trainer(model.params, "sgd", kvstore=kind, update_on_kvstore=kind and True) as trainer:
            before = [tensors[0]._version for tensors in model.tensors]
            model.backward(0)
            trainer.step()
            assert all(tensors[0]._version > count for tensors, count in zip(model.tensors, before, strict=True))
            assert not any(one.written_devices() for one in trainer.params)


@UPDATES
def test_weights_and_gradients_with_gaps_or_in_another_order_are_written_by_way_of_the_gpu(
    torch: Torch, update_on_kvstore: bool
) -> None:
    turned = GpuTensor(torch, (2, 3), np.dtype(np.float32), 0, strides=(1, 2))
    turned.set(np.arange(6))
    trainer = Trainer([turned], "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=update_on_kvstore)
    moves = torch.moves
    turned.backward(np.arange(6) * 2)
    trainer.step(1)
    assert torch.moves == moves
    assert turned.get().reshape(-1).tolist() == [0, -1, -2, -3, -4, -5]
    if not update_on_kvstore:
        assert turned.grad is not None
        assert turned.grad.get().reshape(-1).tolist() == [0, 2, 4, 6, 8, 10]


# --- what is made on the host


@pytest.mark.parametrize("rule", ["lamb", "rules_of_users:Sign"])
@UPDATES
def test_rules_that_no_kernel_makes_are_made_on_the_host(torch: Torch, rule: str, update_on_kvstore: bool) -> None:
    found = []
    for where in (None, torch):
        model = Model(where)
        with Trainer(model.params, rule, kvstore="device", update_on_kvstore=update_on_kvstore) as trainer:
            for step in range(STEPS):
                model.backward(10 * step)
                trainer.step()
        found.append(model.weights())
    assert found[0] == found[1]


def test_another_rate_keeps_the_state_on_the_gpu_and_weights_of_the_users_renew_their_masters(torch: Torch) -> None:
    found = []
    for where in (None, torch):
        model = Model(where, np.float16, devices=1)
        options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": True}
        with Trainer(model.params, "sgd", options, kvstore=None) as trainer:
            for step in range(STEPS):
                model.backward(10 * step)
                moves = torch.moves
                trainer.set_learning_rate(0.1 + step)
                trainer.step()
                assert torch.moves == moves or step == 1
                if step == 0:
                    trainer.params[0].set_data(np.full(SHAPES[0], 2))
        found.append(model.weights())
    assert found[0] == found[1]


def test_row_sparse_gradients_go_through_the_host(torch: Torch) -> None:
    weight = torch.tensor(np.ones((4, 2), np.float32))
    one = Parameter(weight, name="table", grad_stype="row_sparse")
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, "local", update_on_kvstore=True)
    weight.backward(np.ones((4, 2)))
    trainer.step(1)
    assert not weight.get().any()


def test_a_store_from_another_package_gets_arrays_of_the_host(torch: Torch) -> None:
    class Summing(KVStoreBase):
        type, rank, num_workers = "summing", 0, 1

        def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
            for one in out:
                one[...] = value

        def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
            total = sum(value)
            for one in out:
                one[...] = total

        def is_capable(self, capability: str) -> bool:
            return False

    model = Model(torch)
    trainer = Trainer(model.params, "sgd", {"learning_rate": 1.0}, Summing())
    model.backward(0)
    trainer.step(1)
    expected = Model(None)
    other = Trainer(expected.params, "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    expected.backward(0)
    other.step(1)
    assert model.weights() == expected.weights()


def test_without_cupy_gpus_are_trained_through_the_host(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudaMissing("a GPU needs cupy, which is not installed")

    expected = train(Model(torch), "device")
    model = Model(torch)
    monkeypatch.setattr(find, "gpus", missing)
    with Trainer(model.params, "adam", {"learning_rate": 0.1}, "device") as trainer:
        for step in range(STEPS):
            model.backward(10 * step)
            trainer.step()
    assert model.weights() == expected


# --- saved states


@pytest.mark.parametrize("kind", ["device", None])
@pytest.mark.parametrize("saves_on_gpu", [True, False])
def test_states_saved_on_a_gpu_go_on_on_the_host_and_the_other_way(
    torch: Torch, tmp_path: Path, kind: str | None, saves_on_gpu: bool
) -> None:
    path = tmp_path / "states"
    found = []
    for is_saved in (False, True):
        places = [torch, None] if saves_on_gpu else [None, torch]
        for turn, where in enumerate(places if is_saved else [None]):
            model = Model(where, np.float16, devices=1)
            options = {"learning_rate": 0.1, "multi_precision": True}
            with Trainer(model.params, "adam", options, kind, update_on_kvstore=kind and True) as trainer:
                if turn:
                    trainer.load_states(path)
                for step in range(2) if is_saved else range(4):
                    model.backward(10 * (step + 2 * turn))
                    trainer.step()
                if is_saved and not turn:
                    trainer.save_states(path)
        found.append(model.weights())
    assert found[0] == found[1]
