"""The trainer with tensors on GPUs: they go to the store as they are, with the bytes of the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from fakearrays import Device, Tensor, put
from gpukit import Machine, gpus_of_process
from gputensors import GpuTensor, Torch
from realgpus import ON_REAL

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.arrays.dtypes import BFLOAT16, Array, narrow, work_dtype
from distrun_runtime.arrays.gpu import ListLaunch
from distrun_runtime.arrays.gpu_devices import Borrowing
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, KVStoreBase
from distrun_runtime.trainer import Parameter, Trainer, trainer

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
    work = work_dtype(np.dtype(dtype))
    return [narrow(random.normal(size=shape).astype(work), np.dtype(dtype)) for shape in SHAPES]


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


DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=str)


@DTYPES
@UPDATES
@pytest.mark.parametrize("kind", ["device", "local"])
def test_a_store_gives_gpus_the_weights_of_the_host(
    torch: Torch, kind: str, update_on_kvstore: bool, dtype: Any
) -> None:
    found = [train(Model(where, dtype), kind, update_on_kvstore=update_on_kvstore) for where in (None, torch)]
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


@pytest.mark.parametrize("type_name", ["device", "dist_device_sync", "dist_sync"])
def test_gradients_that_are_compressed_are_checked_on_their_gpu(
    torch: Torch, type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights(where: Torch | None) -> list[bytes]:
        def script(kv: KVStore | str) -> list[bytes]:
            return train(Model(where), kv, compression_params={"type": "2bit", "threshold": 0.5})

        if type_name == "device":
            return script(type_name)
        with Cluster(1, over="inproc") as job:
            found: list[bytes] = job.run(script, type_name)[0]
        return found

    def refuse(*_: object) -> Array:
        raise AssertionError("a gradient was copied to the host")

    expected = weights(None)
    monkeypatch.setattr(Borrowing, "host", refuse)
    assert weights(torch) == expected


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


@pytest.mark.parametrize("kind", ["device", None])
def test_no_step_of_the_trainers_waits_for_a_compiler(machine: Machine, torch: Torch, kind: str | None) -> None:
    model = Model(torch, np.float16)
    trainer = Trainer(model.params, "adam", kvstore=kind, update_on_kvstore=kind and False)
    loaded = machine.standin.calls["load"]
    assert loaded
    for step in range(2):
        model.backward(step)
        trainer.step(2)
        trainer.set_learning_rate(0.5)
    assert machine.standin.calls["load"] == loaded


# --- overlap


def in_thread(work: Callable[[], None]) -> None:
    """Do work in a thread of its own, as torch has one for the backward of each device."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(work).result()


ROWS, TURNED = (2, 1), (1, 2)
"""Strides."""


def overlapping(
    torch: Torch,
    places: list[list[int]],
    backward: Callable[[list[list[GpuTensor]]], None],
    strides: tuple[int, int] = ROWS,
    **options: Any,
) -> list[list[float]]:
    """Return the weights after a step of parameters (2, 2) on some devices, which are sent one by one."""

    def made(device: int) -> GpuTensor:
        result = GpuTensor(torch, (2, 2), np.dtype(np.float32), device, strides=strides)
        result.set(np.zeros(4))
        return result

    def script(kv: KVStore) -> list[list[float]]:
        tensors = [[made(device) for device in each] for each in places]
        trainer = Trainer(tensors, "sgd", {"learning_rate": 1.0}, kv, overlap=True, **options)
        backward(tensors)
        trainer.step()
        for _ in range(100):  # the stand-in's events are not done when they are asked first
            devices.gpus().borrowing.keeper.collect()
        return [tensor.get().reshape(-1).tolist() for each in tensors for tensor in each]

    with Cluster(1, over="inproc") as job:
        found: list[list[float]] = job.run(script, "dist_device_sync")[0]
    return found


@UPDATES
@pytest.mark.parametrize("strides", [ROWS, TURNED])
def test_gradients_that_threads_wrote_on_streams_of_their_own_are_sent_as_they_became(
    torch: Torch, monkeypatch: pytest.MonkeyPatch, update_on_kvstore: bool, strides: tuple[int, int]
) -> None:
    monkeypatch.setattr(trainer, "GROUP_BYTES", 32)

    def backward(tensors: list[list[GpuTensor]]) -> None:
        streams = [torch.new_stream(device) for device in range(2)]
        for device, stream in enumerate(streams):
            stream.wait_stream(torch.cuda.current_stream(device))

        def on_device(device: int) -> None:
            with torch.stream(streams[device]):
                for each in reversed(tensors):
                    each[device].backward(np.full(4, device + 1))

        for device in range(2):
            in_thread(lambda device=device: on_device(device))
        # The end of torch's backward.
        for device, stream in enumerate(streams):
            torch.cuda.current_stream(device).wait_stream(stream)

    found = overlapping(torch, [[0, 1]] * 3, backward, strides, update_on_kvstore=update_on_kvstore)
    assert found == [[-1.5] * 4] * 6


@UPDATES
def test_what_reads_weights_and_gradients_between_backward_and_step_sees_them_as_they_were(
    torch: Torch, monkeypatch: pytest.MonkeyPatch, update_on_kvstore: bool
) -> None:
    monkeypatch.setattr(trainer, "GROUP_BYTES", 16)
    kept: list[GpuTensor] = []

    def backward(tensors: list[list[GpuTensor]]) -> None:
        for (tensor,) in reversed(tensors):
            tensor.backward(np.full(4, 2))
        for (tensor,) in tensors:
            assert tensor.grad is not None
            kept.extend([tensor.clone(), tensor.grad.clone()])

    # `step` sends those of the first device only.
    found = overlapping(torch, [[0], [1], [1]], backward, update_on_kvstore=update_on_kvstore)
    assert found == [[-2] * 4] * 3
    assert [tensor.get().reshape(-1).tolist() for tensor in kept] == [[0] * 4, [2] * 4] * 3


# --- what is made on the host


def test_no_copy_of_a_gpus_weight_is_kept_on_the_host(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Tensor]] = []
    cpu = GpuTensor.cpu

    def noted(self: GpuTensor) -> Tensor:
        found = cpu(self)
        copies.append(weakref.ref(found))
        return found

    monkeypatch.setattr(GpuTensor, "cpu", noted)
    model = Model(torch)
    with Trainer(model.params, "lamb", kvstore="device", update_on_kvstore=False) as trainer:
        model.backward(0)
        trainer.step()
        assert copies
        assert not any(copy() for copy in copies)


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


class SparseGradient(GpuTensor):
    """A sparse tensor: rows 1 and 3 of a table."""

    def __init__(self, torch: Torch, rows: Array) -> None:
        super().__init__(torch, (4, 2), np.dtype(np.float32), 0)
        self.layout, self._rows = "torch.sparse_coo", rows

    def detach(self) -> SparseGradient:
        return self

    def cpu(self) -> Any:
        return SimpleNamespace(
            is_sparse=True,
            device=Device("cpu"),
            shape=self.shape,
            detach=self.cpu,
            sparse_dim=lambda: 1,
            _indices=lambda: [Tensor(array=np.array([1, 3]))],
            _values=lambda: Tensor(array=self._rows),
        )


@pytest.mark.parametrize("kind", ["local", None])
def test_sparse_gradients_go_through_the_host_before_and_after_others(torch: Torch, kind: str | None) -> None:
    weight = torch.tensor(np.zeros((4, 2), np.float32))
    options = {"learning_rate": 1.0, "momentum": 0.5}
    trainer = Trainer([weight], "sgd", options, kind, update_on_kvstore=kind and True)
    dense = np.ones((4, 2), np.float32)
    expected, momentum = np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)
    for step in range(4):
        given = dense
        if step % 2:
            weight.grad = SparseGradient(torch, 2 * dense[:2])
            given = np.array([[0, 0], [2, 2], [0, 0], [2, 2]], np.float32)
        else:
            weight.grad = None
            weight.backward(dense)
        trainer.step(1)
        rows = slice(None) if step % 2 == 0 or kind else [1, 3]
        momentum[rows] = np.float32(0.5) * momentum[rows] + given[rows]
        expected[rows] -= momentum[rows]
    assert weight.get().tolist() == expected.tolist()


def test_row_sparse_gradients_go_through_the_host(torch: Torch) -> None:
    weight = torch.tensor(np.ones((4, 2), np.float32))
    one = Parameter(weight, name="table", grad_stype="row_sparse")
    trainer = Trainer([one], "sgd", {"learning_rate": 1.0}, "local", update_on_kvstore=True)
    weight.backward(np.ones((4, 2)))
    trainer.step(1)
    assert not weight.get().any()


class Summing(KVStoreBase):
    """A store of another package, for one worker, or for worker 1 of several whose worker 0 gives these weights."""

    type, rank, num_workers = "summing", 0, 1

    def __init__(self, weights: float | None = None) -> None:
        self.weights = weights

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        for one in out:
            one[...] = value if self.weights is None else self.weights

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        total = sum(value)
        for one in out:
            one[...] = total

    def is_capable(self, capability: str) -> bool:
        return False


def test_a_store_from_another_package_gets_arrays_of_the_host(torch: Torch) -> None:
    model = Model(torch)
    trainer = Trainer(model.params, "sgd", {"learning_rate": 1.0}, Summing())
    model.backward(0)
    trainer.step(1)
    expected = Model(None)
    other = Trainer(expected.params, "sgd", {"learning_rate": 1.0}, "device", update_on_kvstore=False)
    expected.backward(0)
    other.step(1)
    assert model.weights() == expected.weights()


@pytest.mark.parametrize("has_cupy", [True, False])
def test_a_store_from_another_package_gives_the_weights_of_worker_0(
    torch: Torch, has_cupy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise CudaMissing("a GPU needs cupy, which is not installed")

    if not has_cupy:
        monkeypatch.setattr(devices, "gpus", missing)
    replicas = [torch.tensor(np.zeros((2, 2), np.float32), device) for device in range(2)]
    Trainer([Parameter(replicas)], "sgd", {"learning_rate": 1.0}, Summing(7))
    assert [each.get().tolist() for each in replicas] == [[[7, 7], [7, 7]]] * 2


@pytest.mark.parametrize("strides", [None, (1, 2)], ids=["by rows", "by columns"])
@pytest.mark.parametrize("scale", [1, 2])
def test_weights_and_states_agree_after_a_step_that_another_parameter_fails(
    torch: Torch, strides: tuple[int, int] | None, scale: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [GpuTensor(torch, (2, 3), np.dtype(np.float32), device, strides=strides) for device in (0, 1, 0, 1)]
    for each in tensors:
        each.set(np.zeros(6))
    params = [Parameter(tensors[:2], name="good"), Parameter(tensors[2:], name="bad")]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0, "momentum": 0.5}, "device", update_on_kvstore=False)
    # A multiplier of its own, so that it has a kernel launch of its own.
    params[1].lr_mult = 2.0
    for each in tensors:
        each.backward(np.ones(6))
    run, launched = ListLaunch.run, []

    def fails(self: ListLaunch, *args: Any) -> None:
        if self._kernel.startswith("sgd"):
            launched.append(self._kernel)
            if len(launched) == 2:
                raise KVError("no more launches")
        run(self, *args)

    monkeypatch.setattr(ListLaunch, "run", fails)
    before = [each._version for each in tensors]
    with pytest.raises(KVError, match="parameters 'good', 'bad': no more launches"):
        trainer.step(scale)
    monkeypatch.undo()
    saved = trainer._updates._rule.saved_state  # type: ignore[attr-defined]
    assert [saved((index, 0))["updates"] for index in (0, 1)] == [1, 0]
    assert [each.get().any() for each in tensors] == [True, True, False, False]
    assert [each._version != was for each, was in zip(tensors, before, strict=True)] == [True, True, False, False]


def test_without_cupy_gpus_are_trained_through_the_host(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CudaMissing("a GPU needs cupy, which is not installed")

    expected = train(Model(torch), "device")
    model = Model(torch)
    monkeypatch.setattr(devices, "gpus", missing)
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


# --- on a real GPU


@ON_REAL
@UPDATES
@pytest.mark.parametrize("kind", ["device", "local", None])
def test_real_tensors_have_the_weights_of_the_host(kind_of_gpu: str, kind: str | None, update_on_kvstore: bool) -> None:
    torch = pytest.importorskip("torch")
    found = []
    for device in ("cpu", "cuda:0"):

        def tensors(seed: int, device: str = device) -> list[list[Any]]:
            """Two of each, and two that are not contiguous."""
            plain = [torch.tensor(np.asarray(value), device=device) for value in values(seed, np.float32)]
            image = torch.tensor(values(seed, np.float32)[0].reshape(1, 5, 3, 1), device=device)
            plain.append(image.expand(2, 5, 3, 4).clone(memory_format=torch.channels_last))
            return [[one, one.clone()] for one in plain]

        params = [[one.requires_grad_() for one in both] for both in tensors(0)]
        options = {"learning_rate": 0.1, "wd": 0.01}
        with Trainer(params, "adam", options, kind, update_on_kvstore=kind and update_on_kvstore) as trainer:
            for step in range(STEPS):
                for both, grads in zip(params, tensors(step + 1), strict=True):
                    for tensor, grad in zip(both, grads, strict=True):
                        tensor.grad = grad
                trainer.step()
        found.append([one.detach().cpu().contiguous().numpy().tobytes() for both in params for one in both])
    assert found[0] == found[1]


@ON_REAL
@UPDATES
def test_real_gradients_are_sent_from_backwards_threads(
    kind_of_gpu: str, monkeypatch: pytest.MonkeyPatch, update_on_kvstore: bool
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(trainer, "GROUP_BYTES", 4000)

    def script(kv: KVStore) -> None:
        params = [torch.zeros(1000, device="cuda:0", requires_grad=True) for _ in range(4)]
        options = {"learning_rate": 1.0}
        trainer = Trainer(params, "sgd", options, kv, update_on_kvstore=update_on_kvstore, overlap=True)
        for step in range(STEPS):
            trainer.zero_grad()
            stream, usual = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(usual)
            with torch.cuda.stream(stream):
                sum((one * (number + 1)).sum() for number, one in enumerate(params)).backward()
            usual.wait_stream(stream)
            before = [one.detach().clone() for one in params]
            trainer.step()
            for number, (one, kept) in enumerate(zip(params, before, strict=True)):
                assert set(kept.tolist()) == {-float(step * (number + 1))}
                assert set(one.tolist()) == {-float((step + 1) * (number + 1))}

    with Cluster(1, over="inproc") as job:
        job.run(script, "dist_device_sync")
