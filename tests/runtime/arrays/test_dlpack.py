"""DLPack's capsules, numpy's own among them: what they say, and that their producer is told once."""

from __future__ import annotations

import gc
import os
import sys
import warnings

import numpy as np
import pytest
from fakearrays import Memory, capsule

from distrun_runtime.arrays import dlpack

VERSIONS = pytest.mark.parametrize("version", [None, (1, 0)])


def exported(array: np.ndarray, version: tuple[int, int] | None) -> object:
    return array.__dlpack__() if version is None else array.__dlpack__(max_version=version)


@VERSIONS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint8", "uint32", "bool"])
def test_numpys_capsules_say_what_numpy_says(dtype: str, version: tuple[int, int] | None) -> None:
    array = np.zeros((3, 4), dtype)[::2, ::-1]
    found = dlpack.read(exported(array, version))
    assert found.address == array.__array_interface__["data"][0]
    assert (found.shape, found.strides, found.dtype) == (array.shape, array.strides, dtype)
    empty = dlpack.read(exported(np.zeros((), dtype), version))
    assert (empty.shape, empty.strides) == ((), ())


@VERSIONS
def test_the_producer_is_told_once_when_the_last_reference_goes(version: tuple[int, int] | None) -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    held = exported(array, version)
    found = dlpack.read(held)
    assert "used_dltensor" in repr(held)
    with pytest.raises(BufferError, match="not used yet"):
        dlpack.read(held)
    del held
    gc.collect()
    assert sys.getrefcount(array) == before + 1  # the capsule has left it to us
    owner = found.owner
    del found
    assert sys.getrefcount(array) == before + 1
    del owner
    assert sys.getrefcount(array) == before


def test_a_capsule_that_nobody_reads_is_ended_by_its_producer() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    for version in (None, (1, 0)):
        exported(array, version)
    assert sys.getrefcount(array) == before


def test_a_newer_layout_is_refused_and_its_producer_told() -> None:
    array = np.zeros(3)
    before = sys.getrefcount(array)
    with pytest.raises(BufferError, match=r"DLPack 2\.0: expected 1\.x") as caught:
        dlpack.read(capsule(Memory(), version=(1, 0), major=2, of=array))
    del caught
    assert sys.getrefcount(array) == before
    for wrong in (object(), None, np.zeros(2)):
        with pytest.raises(BufferError, match="expected a DLPack capsule"):
            dlpack.read(wrong)


@VERSIONS
def test_addresses_offsets_lanes_and_missing_strides_are_understood(version: tuple[int, int] | None) -> None:
    memory = Memory((2, 3, 4), "int16", device=3, address=0x7000)
    found = dlpack.read(capsule(memory, version=version, offset=64, compact=True))
    assert found.address == 0x7000
    assert found.strides == (24, 8, 2)
    assert dlpack.read(capsule(Memory(dtype="bfloat16"), version=version)).dtype == "bfloat16"
    wide = dlpack.read(capsule(Memory((2,)), version=version, lanes=4))
    assert (wide.dtype, wide.strides) == ("float32x4", (16,))


def test_a_forked_child_does_not_tell_the_producer() -> None:
    array = np.zeros(3)
    found = dlpack.read(array.__dlpack__())
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:  # the count is that of the child's copy
        before = sys.getrefcount(array)
        del found
        os.write(write, bytes([sys.getrefcount(array) == before]))
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"\1"
    os.close(read)
    os.close(write)
    before = sys.getrefcount(array)
    del found
    assert sys.getrefcount(array) == before - 1


def test_what_cannot_say_its_device_says_none() -> None:
    class Traced:
        def __dlpack_device__(self) -> tuple[int, int]:
            raise NotImplementedError("traced")

    assert dlpack.device_of(np.zeros(1)) == (dlpack.CPU, 0)
    assert dlpack.device_of(Traced()) is None
    assert dlpack.device_of("text") is None
