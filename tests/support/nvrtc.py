"""NVIDIA's compiler for GPUs as a library; it needs no driver and no GPU. `scripts/install peers` brings it."""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

from peers import folder_of

from distrun_runtime.arrays.gpu_programs import OPTIONS, Program


@functools.lru_cache(maxsize=1)
def _library(folder: Path) -> ctypes.CDLL | None:
    files = sorted(folder.glob("lib/python3*/site-packages/nvidia/cuda_nvrtc/lib/libnvrtc.so.*"))
    return ctypes.CDLL(str(files[0])) if files else None


def library() -> ctypes.CDLL:
    """Return the compiler; without it, skip the test, or fail on CI."""
    found = _library(folder_of("nvrtc"))
    assert found is not None, "there is no libnvrtc in %s" % folder_of("nvrtc")
    return found


@functools.cache
def compile(program: Program, architecture: int, *options: str) -> tuple[bytes, str]:
    """Return machine code (cubin) and assembly (PTX) of a program.

    Arguments:
        architecture: 75 for sm_75 and so on.

    Raises:
        AssertionError: the compiler refuses it, or warns of something; has its log.
    """
    nvrtc = library()
    handle, source = ctypes.c_void_p(), program.source.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(handle), source, program.name.encode() + b".cu", 0, None, None))
    try:
        words = [b"--gpu-architecture=sm_%d" % architecture, *(word.encode() for word in (*OPTIONS, *options))]
        code = nvrtc.nvrtcCompileProgram(handle, len(words), (ctypes.c_char_p * len(words))(*words))
        log = _output(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle).rstrip(b"\0").decode().strip()
        assert code == 0, log
        assert not log, log
        cubin = _output(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
        ptx = _output(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, handle).rstrip(b"\0").decode()
        return cubin, ptx
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(handle))


def functions(ptx: str) -> dict[str, str]:
    """Return the assembly of each kernel by its name."""
    return dict(re.findall(r"^\.visible \.entry (\w+)\((.*?)^}", ptx, re.MULTILINE | re.DOTALL))


def _output(size_of: ctypes._NamedFuncPointer, get: ctypes._NamedFuncPointer, handle: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    _check(size_of(handle, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    _check(get(handle, text))
    return text.raw


def _check(code: int) -> None:
    assert code == 0, "NVRTC's error %d" % code
