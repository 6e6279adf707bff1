"""Programs for GPUs, compiled for this machine: each kernel is called on addresses in host memory.

A compiled program is kept under the system's temporary folder, in one that is ours alone, by the hash of its source:
all processes of a test run, and the next runs, share it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Union

import numpy as np
import pytest
from slowness import scaled

from distrun_runtime.arrays.gpu_programs import Access, Kernel, Program

Number = Union[int, float, np.generic]

OPTIONS = (
    *("-x", "c++", "-std=c++14", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"),
    *("-fno-strict-aliasing", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
)

TYPES = {
    **{"i8": ctypes.c_int8, "i16": ctypes.c_int16, "i32": ctypes.c_int32, "i64": ctypes.c_int64},
    **{"u8": ctypes.c_uint8, "u16": ctypes.c_uint16, "u32": ctypes.c_uint32, "u64": ctypes.c_uint64},
    **{"f16": ctypes.c_uint16, "bf16": ctypes.c_uint16, "f32": ctypes.c_float, "f64": ctypes.c_double},
}


class Compiled:
    """The kernels of a program, by name."""

    def __init__(self, library: Path, program: Program) -> None:
        self._library = ctypes.CDLL(str(library))
        self._functions = {kernel.name: self._function(kernel) for kernel in program.kernels}

    def _function(self, kernel: Kernel) -> Callable[..., None]:
        function = self._library[kernel.name]
        function.restype = None
        function.argtypes = [
            TYPES[each.kind] if each.access is Access.SCALAR else ctypes.c_void_p for each in kernel.parameters
        ] + [ctypes.c_int64]
        return function

    def __call__(self, kernel: str, arguments: Sequence[Number], n: int) -> None:
        """Run a kernel for `n` elements; arguments are addresses and numbers, without `n`."""
        function = self._functions[kernel]
        if len(arguments) != len(function.argtypes) - 1:
            raise TypeError("%s takes %d arguments and n" % (kernel, len(function.argtypes) - 1))
        function(*(each.item() if isinstance(each, np.generic) else each for each in arguments), n)


@functools.lru_cache(maxsize=1)
def compiler() -> str | None:
    """Return the path of a C++ compiler; None: there is none here."""
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


@functools.cache
def compiled(program: Program) -> Compiled:
    """Return a program's kernels; without a compiler, skip the test."""
    path = compiler()
    if path is None:
        pytest.skip("there is no C++ compiler; to have one:  apt-get install g++")
    text = "\0".join([path, *OPTIONS, program.source])
    library = folder() / ("%s-%s.so" % (program.name, hashlib.sha256(text.encode()).hexdigest()[:32]))
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder()) as room:
            made = Path(room, "made.so")
            command = [path, *OPTIONS, "-o", str(made), "-"]
            result = subprocess.run(
                command, input=program.source, capture_output=True, text=True, timeout=scaled(100), check=False
            )
            assert result.returncode == 0, result.stderr
            os.replace(made, library)  # of several processes that compile it, the last one's stays
    return Compiled(library, program)


def folder() -> Path:
    """Return the folder of compiled programs, which nobody else can write."""
    path = Path(tempfile.gettempdir(), "distrun-tests-cxx-%d" % os.getuid())
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    assert stat.S_ISDIR(found.st_mode), "%s is no folder" % path
    assert found.st_uid == os.getuid(), "%s is not ours" % path
    assert not found.st_mode & 0o077, "%s: others may enter it" % path
    return path
