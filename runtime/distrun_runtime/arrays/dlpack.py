"""Reads DLPack capsules: where the elements of another library's array are, and its request to be told of the end.

The capsule is read here, by ctypes, and not by cupy.from_dlpack: that orders the producer's work before cupy's current
stream instead of ours, and knows bfloat16 only where ml_dtypes is installed. numpy's own capsules have the same layout,
so the tests read real ones without a GPU.

Source: DLPack 1.x, dlpack.h, and "Python Specification for DLPack". Both capsules are read: `dltensor` (before 1.0) and
`dltensor_versioned`.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any

from distrun_runtime.contract.dataclass import dataclass

CPU, CUDA, CUDA_HOST, ROCM_HOST, CUDA_MANAGED = 1, 2, 3, 11, 13
"""DLDeviceType."""
HOSTS = (CPU, CUDA_HOST, ROCM_HOST)
"""Memory of the host."""

_DEVICES = {
    **{CPU: "CPU", CUDA: "CUDA", CUDA_HOST: "pinned CUDA host memory", CUDA_MANAGED: "CUDA managed memory"},
    **{4: "OpenCL", 7: "Vulkan", 8: "Metal", 9: "VPI", 10: "ROCm", ROCM_HOST: "pinned ROCm host memory"},
    **{12: "an extension device", 14: "oneAPI", 15: "WebGPU", 16: "Hexagon", 17: "MAIA"},
}
_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
"""DLDataTypeCode."""
_VERSION = (1, 0)
"""The newest version of the layout that is read; newer minor versions keep it."""


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


# A capsule keeps the pointer to its name: these bytes live as long as the module.
_PLAIN, _USED_PLAIN = b"dltensor", b"used_dltensor"
_NEW, _USED_NEW = b"dltensor_versioned", b"used_dltensor_versioned"

_api = ctypes.pythonapi
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", _api))
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
"""Called without the interpreter's lock: a deleter takes it where it needs it."""


class ProducerMemory:
    """Keeps a producer's memory: the producer is told once, when nothing refers to this any more.

    A forked child never tells: the producer's memory is its parent's, and the call may be one of CUDA.
    """

    def __init__(self, managed: int, deleter: int | None) -> None:
        # Not at the end of the process: the producer may be gone before.
        weakref.finalize(self, _end, os.getpid(), managed, deleter).atexit = False


def _end(pid: int, managed: int, deleter: int | None) -> None:
    if deleter and os.getpid() == pid:
        _Deleter(deleter)(managed)


@dataclass(frozen=True, eq=False)
class Tensor:
    """What a capsule says. `owner` keeps the memory."""

    address: int
    dtype: str
    """Such as `float32` or `bfloat16`; `float32x4` of several lanes."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    owner: ProducerMemory


def name_of(device_type: int) -> str:
    """Return what a type of device is called in messages."""
    return _DEVICES.get(device_type, f"a device of type {device_type}")


def device_of(value: Any) -> tuple[int, int] | None:
    """Return DLPack's type and number of the device that holds an array; None if it does not tell."""
    try:
        kind, number = value.__dlpack_device__()
        return int(kind), int(number)
    # Sharded, traced or deleted arrays have the method, and raise whatever their library likes.
    except Exception:
        return None


def compact_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides, in bytes, of an array whose elements lie row by row without a gap."""
    return tuple(math.prod(shape[axis + 1 :]) * itemsize for axis in range(len(shape)))


def export(value: Any, stream: int) -> Tensor:
    """Return an array by its `__dlpack__`. The producer lets `stream`, a CUDA stream of ours, wait for its own work.

    Raises:
        BufferError, TypeError, ValueError, RuntimeError: what the producer raises.
    """
    try:
        capsule = value.__dlpack__(stream=stream, max_version=_VERSION)
    except TypeError:  # a producer from before 1.0 does not know the argument
        capsule = value.__dlpack__(stream=stream)
    return read(capsule)


def read(capsule: object) -> Tensor:
    """Return what a capsule says, and take it over: it cannot be read again.

    Raises:
        BufferError: it is no capsule of DLPack that was not used, or one of a newer layout.
    """
    if _is_valid(capsule, _NEW):
        address = _pointer(capsule, _NEW)
        versioned = _Versioned.from_address(address)
        _set_name(capsule, _USED_NEW)
        owner = ProducerMemory(address, versioned.deleter)
        if versioned.major != _VERSION[0]:
            raise BufferError(f"DLPack {versioned.major}.{versioned.minor}: expected {_VERSION[0]}.x")
        return _tensor(versioned.tensor, owner)
    if _is_valid(capsule, _PLAIN):
        address = _pointer(capsule, _PLAIN)
        managed = _Managed.from_address(address)
        _set_name(capsule, _USED_PLAIN)
        return _tensor(managed.tensor, ProducerMemory(address, managed.deleter))
    raise BufferError(f"expected a DLPack capsule that was not used yet, found {capsule!r:.80}")


def _tensor(found: _DLTensor, owner: ProducerMemory) -> Tensor:
    shape = tuple(found.shape[axis] for axis in range(found.ndim))
    itemsize = (found.bits * found.lanes + 7) // 8
    if found.strides:
        strides = tuple(found.strides[axis] * itemsize for axis in range(found.ndim))
    else:
        strides = compact_strides(shape, itemsize)
    dtype = f"{_KINDS.get(found.code, f'type {found.code} of ')}{found.bits}"
    if dtype == "bool8":
        dtype = "bool"
    if found.lanes != 1:
        dtype += f"x{found.lanes}"
    return Tensor((found.data or 0) + found.byte_offset, dtype, shape, strides, owner)
