"""CUDA's calls for memory that processes share, on a library that notes them, and by cupy's driver."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import fakecupy
import pytest

from distrun_runtime.arrays import cuda_virtual
from distrun_runtime.arrays.cuda import SHARED_UNIT, Cuda, CudaError, DriverError, Pointer
from distrun_runtime.arrays.cuda_virtual import VirtualMemory
from distrun_runtime.arrays.cupy_driver import CupyDriver

FD = os.open(os.devnull, os.O_RDONLY)
OUTPUTS = {
    **{"cuDeviceGetAttribute": 1, "cuMemGetAllocationGranularity": SHARED_UNIT, "cuMemCreate": 11},
    **{"cuMemExportToShareableHandle": FD, "cuMemImportFromShareableHandle": 12, "cuMemAddressReserve": 0x7000},
}
"""What calls write to their first argument."""


class Library:
    """libcuda. `failing` are calls that fail, with their codes."""

    def __init__(self, **failing: int) -> None:
        self.failing = failing
        self.outputs = dict(OUTPUTS)
        self.calls: list[str] = []
        self.missing = ""

    def __getitem__(self, name: str) -> Any:
        if name == self.missing:
            raise AttributeError(name)

        def called(first: Any, *rest: Any) -> int:
            self.calls.append(name)
            if name in self.outputs and name not in self.failing:
                first._obj.value = self.outputs[name]
            return self.failing.get(name, 0)

        return called


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(cuda_virtual.VirtualMemory.__init__, "__defaults__", (lambda name: made,))
    return made


def test_memory_is_made_exported_and_mapped_and_only_its_mapping_keeps_it(library: Library) -> None:
    os.set_inheritable(FD, True)
    assert VirtualMemory().create(0, SHARED_UNIT) == (0x7000, FD)
    assert not os.get_inheritable(FD)
    assert library.calls[2:] == [
        *("cuMemCreate", "cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"),
        "cuMemRelease",
    ]
    VirtualMemory().unmap(0x7000, SHARED_UNIT)
    assert library.calls[-2:] == ["cuMemUnmap", "cuMemAddressFree"]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemExportToShareableHandle", ["cuMemRelease"]),
        ("cuMemAddressReserve", ["cuMemRelease"]),
        ("cuMemMap", ["cuMemAddressFree", "cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
    ],
)
def test_what_was_made_before_a_call_fails_is_undone(library: Library, failing: str, undone: list[str]) -> None:
    library.failing[failing] = 2
    fd = library.outputs["cuMemExportToShareableHandle"] = os.open(os.devnull, os.O_RDONLY)
    with pytest.raises(DriverError, match="of %s" % failing):
        VirtualMemory().create(0, SHARED_UNIT)
    if failing == "cuMemExportToShareableHandle":
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert [each for each in library.calls if each in undone] == undone


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("cuDeviceGetAttribute", 0, "memory as a descriptor$"), ("cuMemGetAllocationGranularity", 3 << 20, "multiples")],
)
def test_a_driver_without_such_memory_is_told(library: Library, name: str, value: int, text: str) -> None:
    library.outputs[name] = value
    with pytest.raises(DriverError, match=text) as caught:
        VirtualMemory().create(0, SHARED_UNIT)
    assert caught.value.code == 801


def test_an_old_or_missing_library_is_told() -> None:
    old = Library()
    old.missing = "cuDeviceGetAttribute"
    with pytest.raises(DriverError, match="this driver has no cuDeviceGetAttribute"):
        VirtualMemory(lambda name: old).create(0, SHARED_UNIT)

    def load(name: str) -> Any:
        raise OSError("%s: cannot open shared object file" % name)

    with pytest.raises(DriverError, match="cannot open shared object file"):
        VirtualMemory(load).create(0, SHARED_UNIT)


def test_structures_have_cudas_sizes() -> None:
    assert (ctypes.sizeof(cuda_virtual._Wanted), ctypes.sizeof(cuda_virtual._Rights)) == (32, 12)


def test_an_event_that_gets_no_name_is_destroyed(library: Library) -> None:
    cupy = fakecupy.FakeCupy(1)
    cupy.answers.update({"eventCreateWithFlags": 9})
    cupy.statuses["ipcGetEventHandle"] = 2
    with pytest.raises(CudaError, match="share_event"):
        Cuda(CupyDriver(cupy)).share_event(0)
    assert ("eventDestroy", (9,), 0) in cupy.calls


def test_cupy_shares_events_by_name_and_memory_by_descriptors(library: Library) -> None:
    cupy = fakecupy.FakeCupy(2)
    cupy.answers.update({"eventCreateWithFlags": 9, "ipcGetEventHandle": bytes(64), "ipcOpenEventHandle": 10})
    cuda = Cuda(CupyDriver(cupy))
    event, name = cuda.share_event(1)
    assert (event.handle, name, cuda.open_event(1, name).handle) == (9, bytes(64), 10)
    assert ("eventCreateWithFlags", (1 | 2 | 4,), 1) in cupy.calls
    assert cuda.share(0, SHARED_UNIT) == (Pointer(0x7000, 0, SHARED_UNIT), FD)
    assert cuda.open_shared(0, 5, SHARED_UNIT) == Pointer(0x7000, 0, SHARED_UNIT)
    cuda.close_shared(Pointer(0x7000, 0, SHARED_UNIT))
