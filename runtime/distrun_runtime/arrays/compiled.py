"""Compiled loops over the elements of arrays: numba's where it is installed and was asked for, else none.

For each loop there is a numpy version beside its caller, which gives the same bytes. numpy goes over the elements once
for each step of a calculation; a compiled loop goes over them once.

numba is not imported until `prepare` or `prepare_soon` names a loop, because the import takes about 0.4 s and 80 MB.
Compiled loops are kept on disk where numba finds a folder that it may write (`NUMBA_CACHE_DIR`). If numba is missing,
fails or is switched off (`NUMBA_DISABLE_JIT=1`), `call` runs nothing and its caller goes on with numpy.

The bodies of the loops are plain Python within numba's limits. Integers are brought back to 32 bits after each step,
because numba widens them to 64 and the processor's vector instructions would take half as many at once.
"""

from __future__ import annotations

import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Loop = Callable[..., Any]

_FLOATS, _FLOATS_OUT, _HALVES, _HALVES_OUT, _BYTES, _BYTES_OUT, _FLOAT, _BOOL = range(8)
"""Kinds of arguments: C-contiguous arrays of float32, float16's bits and bytes, read or written, and scalars."""


# The loops. Each returns a number that is not None: `call` returns None if it ran nothing.


def are_finite(values: Array, residual: Array) -> int:
    """Return 1 if all sums of values and residual are finite, else 0; an empty residual: of the values."""
    wrong, has_residual = np.uint32(0), residual.size > 0
    for i in range(values.size):
        total = values[i] + residual[i] if has_residual else values[i]
        wrong |= np.uint32(not abs(total) < np.float32(np.inf))
    return 0 if wrong else 1


def two_bit_encode(values: Array, residual: Array, quantum: np.float32, out: Array) -> int:
    """Write the codes of values + residual; leave the rest in the residual. An empty residual: none."""
    whole, has_residual = values.size // 4, residual.size > 0
    for at in range(whole):
        packed = 0
        for i in range(4 * at, 4 * at + 4):
            total = values[i] + residual[i] if has_residual else values[i]
            sent, code = np.float32(0), np.uint8(0)
            if total >= quantum:
                sent, code = quantum, np.uint8(3)
            elif total <= -quantum:
                sent, code = -quantum, np.uint8(2)
            if has_residual:
                residual[i] = total - sent
            packed = (packed << 2) | code
        out[at] = packed
    packed = 0
    for i in range(4 * whole, values.size):
        total = values[i] + residual[i] if has_residual else values[i]
        sent, code = np.float32(0), np.uint8(0)
        if total >= quantum:
            sent, code = quantum, np.uint8(3)
        elif total <= -quantum:
            sent, code = -quantum, np.uint8(2)
        if has_residual:
            residual[i] = total - sent
        packed |= code << (6 - 2 * (i - 4 * whole))
    if 4 * whole < values.size:
        out[whole] = packed
    for at in range((values.size + 3) // 4, out.size):
        out[at] = 0
    return 1


def two_bit_decode(payload: Array, quantum: np.float32, out: Array, adds: bool) -> int:
    """Write the elements of codes, or add them to `out`."""
    whole = out.size // 4
    for at in range(whole):
        packed = payload[at]
        for place in range(4):
            code = (packed >> (6 - 2 * place)) & 3
            value = quantum if code == 3 else -quantum if code == 2 else np.float32(0)
            i = 4 * at + place
            out[i] = out[i] + value if adds else value
    for i in range(4 * whole, out.size):
        code = (payload[whole] >> (6 - 2 * (i - 4 * whole))) & 3
        value = quantum if code == 3 else -quantum if code == 2 else np.float32(0)
        out[i] = out[i] + value if adds else value
    return 1


def one_bit_encode(values: Array, residual: Array, threshold: np.float32, kind: Array, out: Array) -> int:
    """Write 1 where values + residual is above the threshold; leave the rest in the residual.

    Arguments:
        kind: float32. The first is by how much an element moves; the second is 1 where elements that are equal to the
            threshold count as above it, else 0.
    """
    step, is_inclusive = kind[0], kind[1] != 0
    whole = values.size // 8
    has_residual = residual.size > 0
    for at in range(whole):
        packed = 0
        for i in range(8 * at, 8 * at + 8):
            total = values[i] + residual[i] if has_residual else values[i]
            is_set = total >= threshold if is_inclusive else total > threshold
            if has_residual:
                residual[i] = total - (step if is_set else -step)
            packed = (packed << 1) | (np.uint8(1) if is_set else np.uint8(0))
        out[at] = packed
    packed = 0
    for i in range(8 * whole, values.size):
        total = values[i] + residual[i] if has_residual else values[i]
        is_set = total >= threshold if is_inclusive else total > threshold
        if has_residual:
            residual[i] = total - (step if is_set else -step)
        packed |= (np.uint8(1) if is_set else np.uint8(0)) << (7 - (i - 8 * whole))
    if 8 * whole < values.size:
        out[whole] = packed
    for at in range((values.size + 7) // 8, out.size):
        out[at] = 0
    return 1


def one_bit_decode(payload: Array, step: np.float32, out: Array, adds: bool) -> int:
    """Write +step for 1 and -step for 0, or add them to `out`."""
    whole = out.size // 8
    for at in range(whole):
        packed = payload[at]
        for place in range(8):
            value = step if (packed >> (7 - place)) & 1 else -step
            i = 8 * at + place
            out[i] = out[i] + value if adds else value
    for i in range(8 * whole, out.size):
        value = step if (payload[whole] >> (7 - (i - 8 * whole))) & 1 else -step
        out[i] = out[i] + value if adds else value
    return 1


def narrow_half(values: Array, out: Array) -> int:
    """Write float32 as bits of float16, to nearest even; NaN stays a quiet NaN with its sign."""
    for i in range(values.size):
        value = values[i]
        bits = np.float32(value).view(np.uint32)
        size = np.uint32(bits & np.uint32(0x7FFFFFFF))
        odd = np.uint32((size >> np.uint32(13)) & np.uint32(1))
        # 0xC8000FFF: the exponent's bias goes from 127 to 15, and just less than half of the last bit is added.
        half = np.uint32(np.uint32(size + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))
        if size < np.uint32(0x38800000):  # below 2^-14: 0.5 has the quantum of float16's subnormal numbers
            half = np.uint32(np.float32(abs(value) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000))
        if size >= np.uint32(0x47800000):  # from 2^16 on: infinite
            half = np.uint32(0x7C00)
        if size > np.uint32(0x7F800000):
            half = np.uint32(((size >> np.uint32(13)) & np.uint32(0x3FF)) | np.uint32(0x7E00))
        out[i] = np.uint16(half | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)))
    return 1


def widen_half(halves: Array, out: Array, adds: bool) -> int:
    """Write bits of float16 as float32, or add them to `out`."""
    for i in range(halves.size):
        half = halves[i]
        size = np.uint32(half & np.uint16(0x7FFF))
        bits = np.uint32(np.uint32(size << np.uint32(13)) + np.uint32(0x38000000))
        if size >= np.uint32(0x7C00):  # infinite or NaN
            bits = np.uint32(bits + np.uint32(0x38000000))
        if size < np.uint32(0x400):  # subnormal
            bits = np.float32(np.float32(size) * np.float32(2.0**-24)).view(np.uint32)
        sign = np.uint32(np.uint32(half & np.uint16(0x8000)) << np.uint32(16))
        value = np.uint32(bits | sign).view(np.float32)
        out[i] = out[i] + value if adds else value
    return 1


LOOPS: dict[str, tuple[Loop, tuple[int, ...]]] = {
    loop.__name__: (loop, arguments)
    for loop, arguments in (
        (are_finite, (_FLOATS, _FLOATS)),
        (two_bit_encode, (_FLOATS, _FLOATS_OUT, _FLOAT, _BYTES_OUT)),
        (two_bit_decode, (_BYTES, _FLOAT, _FLOATS_OUT, _BOOL)),
        (one_bit_encode, (_FLOATS, _FLOATS_OUT, _FLOAT, _FLOATS, _BYTES_OUT)),
        (one_bit_decode, (_BYTES, _FLOAT, _FLOATS_OUT, _BOOL)),
        (narrow_half, (_FLOATS, _HALVES_OUT)),
        (widen_half, (_HALVES, _FLOATS_OUT, _BOOL)),
    )
}


# Compiling and calling

_compiled: dict[str, Loop | None] = {}
"""By name; None: it cannot be compiled here."""
_asked: dict[str, object] = {}
"""Loops that a thread compiles, or has compiled."""
_one_at_a_time = threading.Lock()
"""Held while compiling, never by `call`: a forked child must not meet a lock that is never released."""


def call(name: str, *arguments: Any) -> Any:
    """Run a loop; return None if it did not run: it was not prepared, or an array is strided or not aligned."""
    loop = _compiled.get(name)
    if loop is None:
        return None
    try:
        return loop(*arguments)
    except TypeError:  # numba has compiled it for other kinds of arrays
        return None


def is_installed() -> bool:
    """Whether numba is there and not switched off; it may still fail."""
    return importlib.util.find_spec("numba") is not None


def prepare(names: Iterable[str]) -> None:
    """Compile loops, or read them from disk; return when they are ready, or cannot be.

    Warns:
        RuntimeWarning: numba is installed and fails; says how. Once a process.
    """
    for name in names:
        if name in _compiled:
            continue
        with _one_at_a_time:
            error = _prepare(name)
        if error is not None:
            warnings.warn(
                (
                    f"numba is installed but cannot be used ({type(error).__name__}: {error}); compression goes on"
                    " with numpy, more slowly. fix: pip install --upgrade 'distrun[fast]', or uninstall numba"
                ),
                RuntimeWarning,
                stacklevel=2,
            )


def prepare_soon(names: Iterable[str]) -> None:
    """Compile loops in another thread, so that no call waits for them; the same for loops of former calls."""
    for name in names:
        mark = object()
        if name in _compiled or _asked.setdefault(name, mark) is not mark:
            continue
        if not is_installed():
            _compiled[name] = None
            continue
        # Not a daemon: the interpreter must not end while LLVM is at work.
        threading.Thread(target=_prepare_later, args=(name,), name="distrun-kernels", daemon=False).start()


def _prepare_later(name: str) -> None:
    with _one_at_a_time:
        if threading.main_thread().is_alive():  # else the process ends, and waits for this thread
            _prepare(name)


def _prepare(name: str) -> Exception | None:
    """Compile one loop unless it is there; return why it cannot be, the first time."""
    if name in _compiled:
        return None
    has_failed = None in _compiled.values()
    loop, error = None, None
    if not has_failed and is_installed():
        try:
            loop = _compile(*LOOPS[name])
        except Exception as err:  # numba's errors are of many kinds, and so are those of a broken installation
            error = err
    _compiled[name] = loop
    return error


def _compile(loop: Loop, arguments: tuple[int, ...]) -> Loop | None:
    import numba
    from numba import types

    if vars(numba.config)["DISABLE_JIT"]:
        return None

    def array(dtype: Any, is_read: bool) -> Any:
        return types.Array(dtype, 1, "C", readonly=is_read)

    kinds = {
        _FLOATS: array(types.float32, True),
        _FLOATS_OUT: array(types.float32, False),
        _HALVES: array(types.uint16, True),
        _HALVES_OUT: array(types.uint16, False),
        _BYTES: array(types.uint8, True),
        _BYTES_OUT: array(types.uint8, False),
        _FLOAT: types.float32,
        _BOOL: types.boolean,
    }
    signature = types.int64(*(kinds[each] for each in arguments))

    def compiled(is_cached: bool) -> Loop:
        result: Loop = numba.njit(signature, nogil=True, error_model="numpy", cache=is_cached)(loop)
        return result

    try:
        return compiled(True)
    except (RuntimeError, OSError):  # no folder for the cache, or one that cannot be written
        return compiled(False)
