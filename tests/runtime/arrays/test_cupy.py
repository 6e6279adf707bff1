"""cupy has what is used of it, by these names and with these arguments. Run by the interpreter that has cupy, without a
GPU: what the tests' stand-in of cupy is like is held against cupy itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import fakecupy
import pytest
from peers import python_of
from slowness import scaled

pytestmark = pytest.mark.peers

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = (
    fakecupy.SAME_ARGUMENTS
    + """
import inspect

import cupyx.scipy.sparse
from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays.cuda import CudaMissing
from distrun_runtime.arrays.foreign import LEGACY, PER_THREAD
from distrun_runtime.arrays.gpu_programs import OPTIONS

assert issubclass(cupy.cuda.compiler.CompileException, Exception)
assert runtime.CUDARuntimeError(700).status == 700
assert str(runtime.CUDARuntimeError(700)).startswith("cudaErrorIllegalAddress: ")
constants = ("streamNonBlocking", "eventBlockingSync", "eventDisableTiming", "memcpyDefault", "hostAllocPortable")
assert [getattr(runtime, each) for each in constants] == [1, 1, 2, 4, 1]
assert {"load", "get_function"} <= set(dir(cupy.cuda.function.Module))
assert callable(cupy.cuda.nvrtc.getVersion)
inspect.signature(cupy.cuda.compiler.compile_using_nvrtc).bind("", OPTIONS, None, cache_in_memory=True)
try:
    cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)((1,), (1,), (), 0, stream=None, nonsense=1)
except TypeError as err:
    assert "nonsense" in str(err), err
else:
    raise AssertionError("a kernel takes any argument")
assert issubclass(cupy.cuda.driver.CUDADriverError, RuntimeError)

for name in ("data", "device", "dtype", "shape", "strides", "flags", "__dlpack_device__", "get", "set"):
    assert hasattr(cupy.ndarray, name), name
assert runtime.is_hip is False
assert "get_current_stream(int device_id=-1)" in cupy.cuda.get_current_stream.__doc__
assert callable(cupy.cuda.Stream.is_capturing)
assert callable(cupy.ascontiguousarray)
assert hasattr(cupy.cuda.Device, "__enter__")
assert cupy.cuda.Stream.null.ptr == 0
assert (runtime.streamLegacy, runtime.streamPerThread) == (LEGACY, PER_THREAD)
assert hasattr(runtime.PointerAttributes, "device")
assert cupyx.scipy.sparse.csr_matrix.__module__.startswith("cupyx.")
assert hasattr(cupyx.scipy.sparse.csr_matrix, "get")

# Without a GPU the error says what was found, and what to look at.
try:
    cupy_driver.open_cupy()
except CudaMissing as err:
    assert "finds no GPU here" in str(err), err
"""
)


def test_cupy_has_the_functions_that_are_used_with_these_arguments() -> None:
    signatures = json.dumps({**fakecupy.SIGNATURES, **fakecupy.DRIVER_SIGNATURES})
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "runtime")}
    argv = [python_of("cupy"), "-c", SCRIPT, signatures]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr
