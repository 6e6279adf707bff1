"""Quantisers on GPUs: the functions of `ops.quantize`, by their names, for arrays in a GPU's memory.

Elements and residuals are flat GpuArrays of float32 on one device. A payload is uint8: in the host's memory, where it
may be read and overwritten when the call returns, or on that device, at a multiple of 4 bytes. A call does not wait for
the GPU otherwise, but for what `scaled` and `top` have to know of the elements.

If an encoder fails before its last kernel was launched, the residual is as it was; `top_encode` writes it only when the
payload is there. If the others fail after that kernel, as they bring the payload to the host's memory, the residual has
what that payload left out, and what it carried is lost: nothing counts twice.

The bytes are those of `ops.quantize`. Only the scale of `scaled` may differ from it, by the rounding of its last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Union

import numpy as np

from distrun_runtime.arrays import gpu_programs
from distrun_runtime.arrays.cuda import Argument, Read, Update, Write
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice

Payload = Union[Array, GpuArray]
"""Flat, uint8."""

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)

_SUMS = 1 << 16
"""So many threads add up magnitudes."""
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""The bits of a magnitude, the highest first: how many are below those that one pass counts, and how many it counts."""
_LOOKED_THROUGH = 1 << 20
"""So many elements are copied to the host at once to find the one that is not finite."""


def prepare(device: GpuDevice) -> None:
    """Compile and load what the codecs need on a device: seconds, if nothing was compiled before."""
    device.prepare([F32])
    device.load(gpu_programs.codecs())


def cast(array: GpuArray, dtype: DType) -> GpuArray:
    """Return an array of a float type in another one, rounded to nearest even; itself if that is its dtype.

    One of the two is float32.
    """
    if array.dtype == dtype:
        return array
    device = array.device
    out = device.empty(array.shape, dtype)
    if F64 in (array.dtype, dtype):
        kernel = "double_narrow" if dtype == F32 else "double_widen"
        arguments = [array.argument(Read), out.argument(Write)]
        device.launch(gpu_programs.codecs(), kernel, arguments, array.size, reads=[array], writes=[out])
    else:
        device.sum([array.reshape(-1)], out.reshape(-1))
    return out


def are_finite(pairs: Iterable[tuple[GpuArray, GpuArray | None]]) -> bool:
    """Tell whether all sums of values and residuals are finite; one wait for each device."""
    flags: dict[GpuDevice, GpuArray] = {}
    for values, residual in pairs:
        device, given = values.device, [values] if residual is None else [values, residual]
        kernel = "check_finite" + ("" if residual is None else "_keeping")
        is_new = device not in flags
        if is_new:
            flags[device] = device.empty((1,), np.dtype(np.uint32))
        wrong = [flags[device]]
        arguments = [*(each.argument(Read) for each in given), wrong[0].argument(Update)]
        zeroed = wrong if is_new else []
        device.launch(gpu_programs.codecs(), kernel, arguments, values.size, reads=given, writes=wrong, zeroed=zeroed)
    return not any(device.host(flag)[0] for device, flag in flags.items())


def first_not_finite(values: GpuArray, residual: GpuArray | None) -> int:
    """Return the place of the first sum of both that is not finite; -1: all are."""
    if are_finite([(values, residual)]):
        return -1
    for begin in range(0, values.size, _LOOKED_THROUGH):
        run = slice(begin, begin + _LOOKED_THROUGH)
        total = values.device.host(values[run])
        with np.errstate(over="ignore", invalid="ignore"):
            if residual is not None:
                total = total + residual.device.host(residual[run])
        wrong = np.flatnonzero(~np.isfinite(total))
        if len(wrong):
            return begin + int(wrong[0])
    raise AssertionError("a kernel found an element that is not finite, and there is none")


def two_bit_encode(values: GpuArray, residual: GpuArray | None, threshold: float, out: Payload) -> None:
    """Write 11 for elements of at least the threshold, 10 for those of at most its negative, else 00."""
    _encode("two_bit_encode", values, residual, [np.float32(threshold)], out)


def two_bit_decode(payload: Payload, threshold: float, out: GpuArray, adds: bool) -> None:
    """Write or add the elements: +threshold, -threshold or 0."""
    _decode("two_bit_decode", payload, [np.float32(threshold)], out, adds)


def one_bit_encode(values: GpuArray, residual: GpuArray | None, threshold: float, out: Payload) -> None:
    """Write 1 for elements above the threshold, else 0."""
    _encode("one_bit_encode", values, residual, [np.float32(threshold), np.float32(1), np.uint32(0)], out)


def one_bit_decode(payload: Payload, out: GpuArray, adds: bool) -> None:
    """Write or add the elements: +1 or -1."""
    _decode("one_bit_decode", payload, [np.float32(1)], out, adds)


def half_encode(values: GpuArray, out: Payload) -> None:
    """Write the elements as float16."""
    _encode("half_encode", values, None, [], out)


def half_decode(payload: Payload, out: GpuArray, adds: bool) -> None:
    """Write or add the elements."""
    _decode("half_decode", payload, [], out, adds)


def scaled_encode(values: GpuArray, residual: GpuArray | None, out: Payload) -> None:
    """Write the mean absolute value as float32, then 1 for elements of at least 0, else 0."""
    scale, n = np.float32(0), values.size
    if n:
        device, given = values.device, [values] if residual is None else [values, residual]
        sums = device.empty((min(n, _SUMS),), F64)
        arguments = [*(each.argument(Read) for each in given), sums.argument(Write), np.int64(sums.size)]
        kernel = "magnitudes" + ("" if residual is None else "_keeping")
        device.launch(gpu_programs.codecs(), kernel, arguments, n, reads=given, writes=[sums])
        scale = np.float32(device.host(sums).sum() / n)
    head = np.frombuffer(scale.astype("<f4").tobytes(), np.uint8)
    if isinstance(out, GpuArray):
        out.device.write(out[:4], head)
    else:
        out[:4] = head
    _encode("one_bit_encode", values, residual, [np.float32(0), scale, np.uint32(1)], out[4:])


def scaled_decode(payload: Payload, out: GpuArray, adds: bool) -> None:
    """Write or add the elements: +scale or -scale."""
    head = payload.device.host(payload[:4]) if isinstance(payload, GpuArray) else payload[:4]
    _decode("one_bit_decode", payload[4:], [np.frombuffer(head.tobytes(), "<f4")[0]], out, adds)


def top_encode(values: GpuArray, residual: GpuArray | None, out: Payload) -> None:
    """Write the places (uint32, ascending) and then the values of the elements of largest magnitude.

    As many as `out` has room for. Of those of equal magnitude the first are written.
    """
    device, count, n = values.device, out.size // 8, values.size
    if not count:
        return
    # In memory of its own: the program may write the values meanwhile, and what is taken has to be what was
    # counted. Nor in the residual: what follows may fail, and a repeat would count the values twice.
    total = device.empty(values.shape, F32)
    device.sum([values] if residual is None else [residual, values], total)
    bound = _bound(total, count)
    found = device.empty((-(-n // gpu_programs.TOP_PIECE),), np.dtype(np.uint32))
    _search("find_top", total, [total.argument(Read), bound, found.argument(Write)], writes=[found])
    pieces = device.host(found)
    above, equal = np.cumsum(pieces >> 16, dtype=np.int64), np.cumsum(pieces & 0xFFFF, dtype=np.int64)
    # Of those that equal the bound the first are taken: how many of them, up to the end of each piece.
    taken = np.minimum(equal, count - above[-1])
    starts, quotas = np.concatenate([[0], (above + taken)[:-1]]), np.diff(taken, prepend=0)
    shares = device.put(np.stack([starts, quotas], axis=1))
    packed = _room(out, device)
    kept = [packed[: 4 * count], packed[4 * count :]]
    arguments = [total.argument(Update), bound, shares.argument(Read), *(each.argument(Write) for each in kept)]
    # The kernel writes the total, too: all that uses it is given to the same queue.
    _search("take_top", total, arguments, reads=[shares], writes=[packed])
    _bring(packed, out)
    if residual is not None:
        device.write(residual, total)


def _bound(total: GpuArray, count: int) -> np.uint32:
    """Return the bits of the magnitude that is the last of the `count` largest."""
    prefix, above = 0, 0
    for shift, width in _DIGITS:
        counts = total.device.empty((gpu_programs.BINS,), np.dtype(np.uint64))
        arguments = [total.argument(Read), *map(np.uint32, (prefix, shift, width)), counts.argument(Update)]
        _search("count_sizes", total, arguments, writes=[counts], zeroed=[counts])
        # From the largest value of these bits on: how many have it, and how many have it or a larger one.
        numbers = total.device.host(counts[: 1 << width]).astype(np.int64)[::-1]
        as_large = np.cumsum(numbers)
        assert as_large[-1] >= count - above, "kernels have counted too few elements"
        place = int(np.searchsorted(as_large, count - above))
        above += int(as_large[place] - numbers[place])
        prefix = prefix << width | ((1 << width) - 1 - place)
    bound: np.uint32 = np.uint32(prefix)
    return bound


def _search(
    kernel: str,
    total: GpuArray,
    arguments: list[Argument],
    *,
    reads: Sequence[GpuArray] = (),
    writes: Sequence[GpuArray],
    zeroed: Sequence[GpuArray] = (),
) -> None:
    """Launch a kernel over all elements of `total`."""
    reads = [total, *reads]
    total.device.launch(gpu_programs.codecs(), kernel, arguments, total.size, reads=reads, writes=writes, zeroed=zeroed)


def top_decode(payload: Payload, out: GpuArray, adds: bool) -> None:
    """Write or add the elements: those named, all others 0."""
    device, packed = out.device, _here(payload, out.device)
    half = packed.size // 2
    arguments = [packed[:half].argument(Read), packed[half:].argument(Read), out.argument(Update)]
    kernel, zeroed = "top_decode" + "_adding" * adds, [] if adds else [out]
    device.launch(gpu_programs.codecs(), kernel, arguments, half // 4, reads=[packed], writes=[out], zeroed=zeroed)


def _encode(
    kernel: str, values: GpuArray, residual: GpuArray | None, scalars: list[np.generic[Any]], out: Payload
) -> None:
    if not out.size:
        return
    device, packed = values.device, _room(out, values.device)
    arguments: list[Argument] = [values.argument(Read), *scalars, packed.argument(Write)]
    writes = [packed]
    if residual is not None:
        kernel += "_keeping"
        arguments.insert(1, residual.argument(Update))
        writes.append(residual)
    device.launch(gpu_programs.codecs(), kernel, arguments, values.size, reads=[values], writes=writes)
    _bring(packed, out)


def _room(out: Payload, device: GpuDevice) -> GpuArray:
    """Return where a kernel writes a payload."""
    return out if isinstance(out, GpuArray) else device.empty(out.shape, out.dtype)


def _bring(packed: GpuArray, out: Payload) -> None:
    """Bring a payload from there to `out`."""
    if not isinstance(out, GpuArray):
        packed.device.read(packed, out)


def _decode(kernel: str, payload: Payload, scalars: list[np.generic[Any]], out: GpuArray, adds: bool) -> None:
    device, packed = out.device, _here(payload, out.device)
    arguments = [packed.argument(Read), *scalars, out.argument(Update if adds else Write)]
    device.launch(gpu_programs.codecs(), kernel + "_adding" * adds, arguments, out.size, reads=[packed], writes=[out])


def _here(payload: Payload, device: GpuDevice) -> GpuArray:
    return payload if isinstance(payload, GpuArray) and payload.device is device else device.put(payload)
