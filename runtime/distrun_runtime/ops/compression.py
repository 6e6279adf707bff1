"""Codecs: how the float elements of one piece become fewer bytes, and come back. By name, number and JSON parameters.

A codec keeps nothing itself. What it could not send stays in a residual that its caller holds for each value and
hands in with the next one (error feedback): the decoded values of all payloads and the residual add up to what was
put in, but for float32's rounding. Decoding needs no state.

Elements, residuals and what is decoded are in the host's memory or on a GPU, all on one device; the bytes are the same
(`1bit_scaled`: but for the rounding of the scale). Payloads are in the host's memory, where messages have them. What
stays on a GPU may have its payload there, too.

The numbers are those of the wire (an entry's `codec`); none is ever used again for another codec. The formats are
fixed byte by byte in `docs/compression.md`, and golden bytes are tests.

Source: `1bit` and `2bit` are those of MXNet's gradient compression; the others are ours (`ops.quantize`).
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar, Dict, cast

import numpy as np

from distrun_runtime.arrays import compiled
from distrun_runtime.arrays.device import Device, DeviceArray, is_on_host
from distrun_runtime.arrays.dtypes import Array, Buffer, DType, narrow, widen, work_dtype
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import params as parameters
from distrun_runtime.ops import quantize
from distrun_runtime.ops.params import Json, Param

Params = Dict[str, float]
"""A codec's parameters, complete and checked; JSON."""

NONE = 0
"""The number of an entry whose payload is the elements themselves."""
ROWS = 16
"""The number of an entry whose payload is rows (`algo.rows`)."""

_FLOAT32 = np.dtype(np.float32)
_CHECKED = 1 << 18
"""So many elements of other types are brought to float32 at once, when they are checked."""


@dataclass(frozen=True)
class Knob(Param):
    """One parameter of a codec. As float32, in which it is compared, it must be of its range, too."""

    def range_text(self) -> str:
        """Return what values are right, in words."""
        return super().range_text().replace("number", "number (float32)")

    def read(self, value: object) -> Json:
        """Return the value as float; errors as of `Param`."""
        number = super().read(value)
        with np.errstate(over="ignore"):
            super().read(float(np.float32(cast(float, number))))
        return number


class Codec(ABC):
    """One way to write float32 elements; it holds no state.

    Threads: any may call, as long as no two share a residual.
    """

    name: ClassVar[str]
    number: ClassVar[int]
    """Its number in messages."""
    has_residual: ClassVar[bool] = True
    """Whether it leaves something out, which a residual must keep."""
    factor: ClassVar[int] = 1
    """Elements in one 4-byte word for the codecs whose big values MXNet cuts by words; 1 for all others."""
    knobs: ClassVar[tuple[Knob, ...]] = ()
    joins: ClassVar[int] = 0
    """Payloads of runs of a multiple of this many elements, end to end, are the payload of these runs end to end.
    0: they never are."""
    loops: ClassVar[tuple[str, ...]] = ()
    """Its compiled loops (`arrays.compiled`), where numba is installed."""

    def check(self, params: Mapping[str, object]) -> Params:
        """Return every parameter, as given or else by default.

        Raises:
            KVError: one that the codec does not have, or a value that is not right; says what is.
        """
        return cast(Params, parameters.complete(f"compression {self.name!r}", self.knobs, params))

    def size(self, n: int, params: Params) -> int:
        """Return how many bytes `n` elements become: whole words, where the codec does not say otherwise."""
        return quantize.words_size(n, self.factor)

    def encode(self, values: DeviceArray, residual: DeviceArray | None, params: Params) -> Buffer:
        """Return the payload of `values`, in the host's memory.

        Arguments:
            values: of shape (n,), only read; of a float type, whose elements are brought to float32.
            residual: float32 of shape (n,) on the same device, what former payloads left out; it is added to the
                values, and replaced in place by what this payload leaves out. None: nothing before, nothing kept.
            params: as `check` returned them.

        Raises:
            KVError: a value, or its sum with the residual, is not finite; the residual is as it was.
        """
        flat, payload = floats(values), np.empty(self.size(len(values), params), np.uint8)
        self.check_finite(flat, residual)
        self.write(flat, residual, params, payload)
        return payload.data

    def write(self, values: DeviceArray, residual: DeviceArray | None, params: Params, out: DeviceArray) -> None:
        """Write the payload of `values` to `out`; arguments as for `encode`, and `check_finite` has taken them.

        Arguments:
            out: uint8 of shape (size(n),), in the host's memory, of any alignment; or on the GPU of the values, at a
                multiple of 4 bytes (of `fp16`: 2).
        """
        if not self.has_residual:
            residual = None
        # Compiled loops look at no bounds.
        if len(out) != self.size(len(values), params) or (residual is not None and len(residual) != len(values)):
            raise ValueError(f"compression {self.name!r}: residual or payload of another length")
        self._write(floats(values), residual, out, params)

    def check_finite(self, values: DeviceArray, residual: DeviceArray | None) -> None:
        """Return if `encode` takes these values; nothing is changed.

        Arguments:
            values, residual: as for `encode`.

        Raises:
            KVError: an element is not finite. A residual would keep it for ever, and the training not learn of it.
        """
        if residual is not None and len(residual) != len(values):
            raise ValueError(f"compression {self.name!r}: residual of another length")
        if not self.has_residual:
            return
        if values.dtype == _FLOAT32:
            self._check(values, residual, 0)
            return
        for begin in range(0, len(values), _CHECKED):
            run = slice(begin, begin + _CHECKED)
            self._check(floats(values[run]), None if residual is None else residual[run], begin)

    def _check(self, values: DeviceArray, residual: DeviceArray | None, first: int) -> None:
        at = _by(values).first_not_finite(values, residual)
        if at < 0:
            return
        value = _element(values, at)
        with np.errstate(over="ignore", invalid="ignore"):
            total = value if residual is None else value + _element(residual, at)
        raise KVError(
            f"compression {self.name!r}: element {first + at} is {value:g}, and {total:g} with what was left out"
            " before; only finite values can be compressed. fix: push zeros instead (a push that is left out"
            " would put this worker one round behind the others for good), with a trainer call"
            " trainer.skip_step() instead of step, or turn compression of this key off"
        )

    def decode(self, payload: Buffer, n: int, params: Params) -> Array:
        """Return the `n` elements of a payload as a new float32 array of the host; errors as `read`."""
        out = np.empty(n, np.float32)
        self.read(payload, out, params)
        return out

    def read(self, payload: Buffer | DeviceArray, out: DeviceArray, params: Params, *, adds: bool = False) -> None:
        """Write the elements of a payload to `out`, or add them to what is there.

        Arguments:
            payload: bytes; or what `write` wrote on a GPU.
            out: float32 of shape (n,), C-contiguous, in the host's memory or on a GPU.

        Raises:
            KVError: it is not a payload of `n` elements; says what was expected. `out` is as it was.
        """
        n = len(out)
        given: Any = payload
        if isinstance(payload, (bytes, bytearray, memoryview)):
            given = memoryview(payload)
        expected, found = self.size(n, params), given.nbytes
        if found != expected:
            raise KVError(f"compression {self.name!r}: expected {expected} bytes for {n} elements, found {found} bytes")
        if n:
            self._read(np.frombuffer(given, np.uint8) if isinstance(given, memoryview) else given, out, adds, params)

    def scaled(self, params: Params, scale: float) -> Params | None:
        """Return the parameters with which payloads are read as `scale` times their elements; None: there are none."""
        return None

    def prepare(self, device: Device | None = None, *, waits: bool = True) -> None:
        """Have ready what this codec runs, so that no round waits for it.

        Arguments:
            device: where its arrays will be. On GPUs kernels are compiled and loaded. None or a cpu device: loops are
                compiled where numba is installed.
            waits: for the loops; otherwise a thread compiles them.
        """
        if device is not None and device.is_gpu:
            _on_gpus().prepare(device)
        else:
            (compiled.prepare if waits else compiled.prepare_soon)(self.loops)

    @abstractmethod
    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        """Write the payload of values + residual to `out`, and leave in the residual what the payload leaves out."""

    @abstractmethod
    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        """Write or add the elements of a payload (uint8) of the right size; at least one element."""


class TwoBit(Codec):
    """+threshold, -threshold or 0: a sixteenth of the bytes. At most one threshold an element and payload."""

    name, number, factor = "2bit", 1, 16
    joins = 16
    loops = ("are_finite", "two_bit_encode", "two_bit_decode")
    knobs = (Knob("threshold", 0.5, low=0.0, open_low=True),)

    def scaled(self, params: Params, scale: float) -> Params | None:
        """Return a threshold `scale` times as large: an element is that, or its negative, or 0."""
        with np.errstate(over="ignore"):
            return {"threshold": float(np.float32(params["threshold"]) * np.float32(scale))}

    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        _by(values).two_bit_encode(values, residual, params["threshold"], out)

    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        _by(out).two_bit_decode(payload, params["threshold"], out, adds)


class OneBit(Codec):
    """+1 or -1, whatever the threshold: a thirty-second of the bytes. Every element moves with each payload."""

    name, number, factor = "1bit", 2, 32
    joins = 32
    loops = ("are_finite", "one_bit_encode", "one_bit_decode")
    knobs = (Knob("threshold", 0.5),)

    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        _by(values).one_bit_encode(values, residual, params["threshold"], out)

    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        _by(out).one_bit_decode(payload, out, adds)


class Fp16(Codec):
    """float16, rounded to nearest even: half of the bytes. What is too large becomes infinite: loss scaling sees it."""

    name, number, has_residual = "fp16", 3, False
    joins = 1
    loops = ("narrow_half", "widen_half")

    def size(self, n: int, params: Params) -> int:
        """Return how many bytes `n` elements become."""
        return 2 * n

    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        _by(values).half_encode(values, out)

    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        _by(out).half_decode(payload, out, adds)


class TopK(Codec):
    """The elements of largest magnitude, `ratio` of all, with their places: 8 bytes each."""

    name, number = "topk", 4
    loops = ("are_finite",)
    knobs = (Knob("ratio", 0.01, low=0.0, high=1.0, open_low=True),)

    def size(self, n: int, params: Params) -> int:
        """Return how many bytes `n` elements become."""
        return 8 * quantize.top_count(n, params["ratio"])

    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        _by(values).top_encode(values, residual, out)

    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        if is_on_host(payload):  # it may come from anyone
            n, places = len(out), quantize.top_places(payload)
            if int(places[-1]) >= n or not (places[1:] > places[:-1]).all():
                raise KVError(f"compression 'topk': expected ascending places below {n}, found {_shown(places)}")
        _by(out).top_decode(payload, out, adds)


class ScaledOneBit(Codec):
    """+scale or -scale, where scale is the piece's mean magnitude: a thirty-second of the bytes, and four more."""

    name, number = "1bit_scaled", 5
    loops = ("are_finite", "one_bit_encode", "one_bit_decode")

    def size(self, n: int, params: Params) -> int:
        """Return how many bytes `n` elements become."""
        return 4 + quantize.words_size(n, 32)

    def _write(self, values: DeviceArray, residual: DeviceArray | None, out: DeviceArray, params: Params) -> None:
        _by(values).scaled_encode(values, residual, out)

    def _read(self, payload: DeviceArray, out: DeviceArray, adds: bool, params: Params) -> None:
        _by(out).scaled_decode(payload, out, adds)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (TwoBit(), OneBit(), Fp16(), TopK(), ScaledOneBit())}
"""The codecs by name."""

BY_NUMBER: dict[int, Codec] = {codec.number: codec for codec in CODECS.values()}
"""The same by their number on the wire."""


def named(name: object) -> Codec:
    """Return the codec of this name.

    Raises:
        KVError: there is none; lists those that there are.
    """
    codec = CODECS.get(name) if isinstance(name, str) else None
    if codec is None:
        raise KVError(f"unknown compression type {name!r}; known are none, {', '.join(sorted(CODECS))}")
    return codec


def numbered(number: int) -> Codec:
    """Return the codec of this number on the wire.

    Raises:
        KVError: there is none; lists those that there are.
    """
    codec = BY_NUMBER.get(number)
    if codec is None:
        known = ", ".join(f"{known} ({BY_NUMBER[known].name})" for known in sorted(BY_NUMBER))
        raise KVError(f"unknown codec number {number}; known are {known}")
    return codec


def floats(array: DeviceArray) -> DeviceArray:
    """Return the elements of an array of a float type as float32, where they are; the array itself if it is that."""
    if array.dtype == _FLOAT32:
        return array
    if not is_on_host(array):
        return _on_gpus().cast(array, _FLOAT32)
    with np.errstate(over="ignore", invalid="ignore"):
        return widen(array).astype(np.float32, copy=False)


def from_floats(array: DeviceArray, dtype: DType) -> DeviceArray:
    """Return float32 elements in another float type, where they are; the array itself if that is float32."""
    if not is_on_host(array):
        return _on_gpus().cast(array, dtype)
    return narrow(array.astype(work_dtype(dtype), copy=False), dtype)


def are_finite(pairs: Iterable[tuple[DeviceArray, DeviceArray | None]]) -> bool:
    """Tell whether `check_finite` takes all values and residuals, which are on GPUs; one wait for each of these."""
    found: bool = _on_gpus().are_finite((floats(values), residual) for values, residual in pairs)
    return found


def _by(array: DeviceArray) -> ModuleType:
    """Return the functions for arrays that are where this one is."""
    return quantize if is_on_host(array) else _on_gpus()


def _on_gpus() -> ModuleType:
    # A process with an array on a GPU has imported it all; no other process needs it.
    return importlib.import_module("distrun_runtime.arrays.gpu_codecs")


def _element(array: DeviceArray, at: int) -> np.float32:
    found: Array = array[at : at + 1] if is_on_host(array) else array.device.host(array[at : at + 1])
    element: np.float32 = found[0]
    return element


def _shown(places: Array) -> str:
    return np.array2string(places, threshold=8, separator=", ")
