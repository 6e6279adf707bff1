"""CUDA's memory that processes share by descriptors, by the driver's library: cupy's thin layer does not have it.

Memory is made (cuMemCreate), mapped to a run of addresses, and exported as a descriptor. The driver counts who has it:
it is there until it is mapped nowhere and the last descriptor is closed, also when its maker was killed before.
That is why it is not CUDA's older way (`cudaIpcGetMemHandle`), whose memory must not go before its users have closed
it, cannot be a part of a block, and cannot be used in the process that made it.

Source: CUDA Driver API, "Virtual Memory Management".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

from distrun_runtime.arrays.cuda import SHARED_UNIT, DriverError

LIBRARY = "libcuda.so.1"
_PINNED, _OF_DEVICE, _DESCRIPTOR, _MINIMUM, _READ_WRITE = 1, 1, 1, 0, 3
"""CU_MEM_ALLOCATION_TYPE_PINNED, LOCATION_TYPE_DEVICE, HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, ALLOC_GRANULARITY_MINIMUM,
ACCESS_FLAGS_PROT_READWRITE."""
_NOT_SUPPORTED, _CAN_EXPORT = 801, 103
"""CUDA_ERROR_NOT_SUPPORTED; CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED."""


class _Wanted(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *(("type", ctypes.c_int), ("handles", ctypes.c_int), ("place", ctypes.c_int), ("device", ctypes.c_int)),
        *(("win32", ctypes.c_void_p), ("flags", ctypes.c_uint64)),
    )


class _Rights(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("place", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


class VirtualMemory:
    """The driver's calls for shared memory, made with a device's context current. Each raises DriverError."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._load = load

    def create(self, device: int, nbytes: int) -> tuple[int, int]:
        """Return the address of new memory, and a descriptor of it."""
        can_export, unit, handle, fd = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_int(-1)
        self._call("cuDeviceGetAttribute", ctypes.byref(can_export), ctypes.c_int(_CAN_EXPORT), ctypes.c_int(device))
        wanted = _Wanted(_PINNED, _DESCRIPTOR, _OF_DEVICE, device, None, 0)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(wanted), ctypes.c_int(_MINIMUM))
        text = "" if can_export.value else "memory as a descriptor"
        if can_export.value and nbytes % unit.value:
            text = f"memory as a descriptor, in multiples of {unit.value} bytes of which {SHARED_UNIT} is none"
        if text:
            raise DriverError(_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", text)
        zero = ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(nbytes), ctypes.byref(wanted), zero)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_DESCRIPTOR), zero)
        except DriverError:
            self._call("cuMemRelease", handle)
            raise
        os.set_inheritable(fd.value, False)
        try:
            return self.map(device, handle, nbytes), fd.value
        except DriverError:
            os.close(fd.value)  # It would keep the memory.
            raise

    def received(self, fd: int) -> ctypes.c_uint64:
        """Return the handle of memory that came as a descriptor."""
        handle = ctypes.c_uint64()
        given = (ctypes.c_void_p(fd), ctypes.c_int(_DESCRIPTOR))
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), *given)
        return handle

    def map(self, device: int, handle: ctypes.c_uint64, nbytes: int) -> int:
        """Return the address at which memory is mapped; its handle is released, since the mapping keeps it."""
        address, size, zero = ctypes.c_uint64(), ctypes.c_size_t(nbytes), ctypes.c_uint64(0)
        access = _Rights(_OF_DEVICE, device, _READ_WRITE)
        is_mapped = False
        try:
            self._call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
            self._call("cuMemMap", address, size, ctypes.c_size_t(0), handle, zero)
            is_mapped = True
            self._call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
        except DriverError:
            if is_mapped:
                self._call("cuMemUnmap", address, size)
            if address.value:
                self._call("cuMemAddressFree", address, size)
            raise
        finally:
            self._call("cuMemRelease", handle)
        return address.value

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap memory, and give its addresses back."""
        for name in ("cuMemUnmap", "cuMemAddressFree"):
            self._call(name, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    @cached_property
    def _library(self) -> Any:
        try:
            return self._load(LIBRARY)
        except OSError as err:
            raise DriverError(_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", str(err)) from err

    def _call(self, name: str, *arguments: object) -> None:
        try:
            function = self._library[name]
        except AttributeError as err:
            raise DriverError(_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", f"this driver has no {name}") from err
        code = int(function(*arguments))
        if code:
            text = ctypes.c_char_p()
            self._library["cuGetErrorName"](ctypes.c_int(code), ctypes.byref(text))
            said = (text.value or b"unknown error").decode(errors="replace")
            raise DriverError(code, said, f"of {name}")
