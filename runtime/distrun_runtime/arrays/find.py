"""Devices by name: `cpu:0`, `gpu:0`. GPUs, and cupy with them, are looked for when one is asked for."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from distrun_runtime.arrays import foreign
from distrun_runtime.arrays.cpu import CpuDevice, Threads
from distrun_runtime.arrays.device import Device
from distrun_runtime.arrays.segments import BLOCKS, Pool
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError, StoreClosed

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_devices import Gpus

__all__ = ["get", "gpu", "gpus", "in_use"]

WAIT_OF_CALL = 0.5
"""Of the time for a store's call, a wait for a GPU takes at most: whose GPU hangs says so before its peers give up."""

_gpus: list[Gpus] = []
"""Those of this process, once one was asked for."""
_lock = threading.Lock()


def get(name: str, threads: Threads | None = None, memory: Pool | None = None) -> Device:
    """Return the device of a name: `cpu:0`, `cpu:1` ..., `gpu:0` ... (`cpu` is `cpu:0`, and `cuda:0` is `gpu:0`).

    A GPU is one device for the whole process. `gpu:0/0`, `gpu:0/1` are two devices on one GPU, for tests.

    Arguments:
        threads: who shares a cpu device's work on large arrays; None: the caller's thread does all.
        memory: where arrays of a cpu device are that are often sent to other processes; None: as all others.

    Raises:
        KVError: there is no such device; for a GPU it says what is missing.
    """
    found = re.fullmatch(r"(?:cpu(?::(\d+))?|(gpu|cuda)(?::(\d+)(?:/(\d+))?)?)", name)
    if found is None:
        raise KVError(f"no device {name!r}; there are cpu:0, cpu:1 ... and gpu:0, gpu:1 ...")
    if found.group(2) is None:
        return CpuDevice(int(found.group(1) or 0), threads, memory)
    return gpu(int(found.group(3) or 0), None if found.group(4) is None else int(found.group(4)))


def gpu(number: int, part: int | None = None) -> GpuDevice:
    """Return a GPU.

    Arguments:
        part: for tests, a device that is only a part of it.

    Raises:
        KVError: cupy, a driver or this GPU is missing.
        StoreClosed: the process was forked from one that uses GPUs.
    """
    return gpus().get(number, part)


def gpus() -> Gpus:
    """Return the GPUs of this process.

    Raises:
        KVError: cupy, a driver or a GPU is missing.
        StoreClosed: the process was forked from one that uses GPUs.
    """
    from distrun_runtime.arrays import cupydriver  # most processes use no GPU
    from distrun_runtime.arrays.gpu_devices import Gpus

    opened = cupydriver.of_process()
    with _lock:
        if not _gpus:
            wait_s = environ.read("DISTRUN_OP_TIMEOUT") * WAIT_OF_CALL
            has_peers = environ.read("MXNET_ENABLE_GPU_P2P")
            _gpus.append(Gpus(opened, wait_s=wait_s, has_peers=has_peers, blocks=BLOCKS))
    return _gpus[0]


def in_use() -> list[GpuDevice]:
    """Return the GPUs that this process is known to use: what a call will need there can be prepared.

    These are the devices that were asked for so far, as for the values of a call; if there are none, the one on which
    torch or cupy works in the calling thread. A program that uses no GPU opens none by it.

    Raises:
        KVError: a GPU has failed for good.
    """
    if not _gpus and foreign.current_device() is None:
        return []
    from distrun_runtime.arrays.cuda import CudaMissing  # most processes use no GPU

    try:
        found = gpus()
    except (CudaMissing, StoreClosed):  # others use it, or the process that this one was forked from
        return []
    made = found.made()
    if made:
        return made
    current = foreign.current_device()
    return [] if current is None else [found.get(current)]
