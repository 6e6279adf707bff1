"""Devices by name: `cpu:0`. One room for each kind; `gpu:N` has its place here when it comes."""

from __future__ import annotations

import re

from distrun_runtime.arrays.cpu import CpuDevice, Threads
from distrun_runtime.arrays.device import Device
from distrun_runtime.arrays.segments import Pool
from distrun_runtime.errors import KVError

__all__ = ["get"]


def get(name: str, threads: Threads | None = None, memory: Pool | None = None) -> Device:
    """Return the device of a name: `cpu:0`, `cpu:1` ... (`cpu` is `cpu:0`).

    Arguments:
        threads: who shares its work on large arrays; None: the caller's thread does all.
        memory: where arrays are that are often sent to other processes; None: they are as all others.

    Raises:
        KVError: there is no such device, or not in this version.
    """
    found = re.fullmatch(r"(cpu|gpu|cuda)(?::(\d+))?", name)
    if found is None:
        raise KVError("no device %r; there are cpu:0, cpu:1 ..." % (name,))
    if found.group(1) != "cpu":
        raise KVError("device %r: GPU aggregation is not in this version; there are cpu:0, cpu:1 ..." % name)
    return CpuDevice(int(found.group(2) or 0), threads, memory)
