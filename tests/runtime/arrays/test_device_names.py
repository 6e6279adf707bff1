from __future__ import annotations

import importlib.util
import os

import fakecupy
import numpy as np
import pytest
from fakearrays import FakeCupyArrays, FakeTorch, put
from gpukit import Machine, gpus_of_process

from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays import device as devices
from distrun_runtime.errors import KVError


def test_cpu_devices_are_found_by_number() -> None:
    assert [devices.get(name).name for name in ("cpu", "cpu:0", "cpu:7")] == ["cpu:0", "cpu:0", "cpu:7"]


@pytest.mark.parametrize("name", ["gpu:0", "cuda:1", "gpu", "gpu:0/1"])
def test_without_cupy_a_gpu_is_refused_with_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(KVError, match=r"cupy, which is not installed. fix: pip install 'distrun\[cuda12\]'"):
        devices.get(name)


def test_a_gpu_is_one_device_and_its_parts_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fakecupy.install(monkeypatch, 2)
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(devices, "_gpus", [])
    assert [devices.get(name).name for name in ("gpu", "cuda:1", "gpu:0/1")] == ["gpu:0", "gpu:1", "gpu:0/1"]
    assert devices.get("gpu:0") is devices.get("cuda:0")
    assert devices.get("gpu:0/0") is not devices.get("gpu:0")
    with pytest.raises(KVError, match="no device gpu:2: this process sees gpu:0 to gpu:1"):
        devices.get("gpu:2")


def test_a_machine_can_be_that_of_the_process_for_a_while() -> None:
    before = list(devices._gpus), list(cupy_driver._opened)
    with gpus_of_process(Machine(2)) as machine:
        assert devices.get("gpu:1") is machine.gpus.get(1)
        assert cupy_driver.of_process() is machine.cuda
    assert (devices._gpus, cupy_driver._opened) == before


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:-1", "tpu:0", "cpu:0 ", "cpu:0/1", "gpu:", "gpu:1/"])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(KVError, match="no device"):
        devices.get(name)


def test_gpus_in_use_are_those_that_were_asked_for_or_the_one_that_a_library_works_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = FakeTorch()
    put(monkeypatch, torch)
    with gpus_of_process(Machine(3)) as machine:
        assert devices.in_use() == []
        torch.is_used, torch.device = True, 2
        assert [gpu.name for gpu in devices.in_use()] == ["gpu:2"]
        torch.device = 1
        assert [gpu.name for gpu in devices.in_use()] == ["gpu:2"]
        devices.get("gpu:0")
        assert [gpu.name for gpu in devices.in_use()] == ["gpu:2", "gpu:0"]
        assert machine.gpus.made() == devices.in_use()


def test_a_program_that_uses_no_gpu_opens_none_when_it_is_asked_for_those_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(monkeypatch, FakeTorch(), FakeCupyArrays())
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(devices, "_gpus", [])
    monkeypatch.setattr(devices, "gpus", None)
    assert devices.in_use() == []


def test_without_cupy_no_gpu_is_in_use_whatever_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = FakeTorch()
    put(monkeypatch, torch)
    torch.is_used = True
    monkeypatch.setattr(cupy_driver, "_opened", [])
    monkeypatch.setattr(devices, "_gpus", [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert devices.in_use() == []


def test_in_a_forked_child_no_gpu_is_in_use() -> None:
    with gpus_of_process(Machine(1)) as machine:
        gpu = machine.gpus.get(0)
        assert devices.in_use() == [gpu]
        child = os.fork()
        if not child:
            found: object = None
            try:
                found = devices.in_use()
            finally:
                os._exit(0 if found == [] else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_gpu_that_has_failed_is_told_to_whoever_asks_for_those_in_use() -> None:
    with gpus_of_process(Machine(1)) as machine:
        gpu = machine.gpus.get(0)
        machine.standin.fail("alloc", code=700)
        for ask in (lambda: gpu.empty((3,), np.dtype(np.float32)), devices.in_use):
            with pytest.raises(KVError, match="cannot use the GPU any more"):
                ask()
