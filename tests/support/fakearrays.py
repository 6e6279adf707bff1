"""Modules that look like the parts of torch, cupy and jax by which their arrays are recognized.

Signatures are those of torch 2.13, cupy 14 and jax 0.4 and later. A test compares cupy's and torch's names with the
real ones where these are installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cudastandin import Mistake

from distrun_runtime.arrays import dlpack
from distrun_runtime.arrays.cuda import Cuda, HostMemory, Pointer, Stream
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.shared_memory import address_of


@dataclass
class Memory:
    """What a fake array on a GPU has: an address, and no elements that the host can see."""

    shape: tuple[int, ...] = (2, 3)
    dtype: str = "float32"
    device: int = 0
    address: int = 0x1000
    strides: tuple[int, ...] | None = None
    """In elements; None: row by row."""

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize

    @property
    def steps(self) -> tuple[int, ...]:
        return self.strides if self.strides is not None else np.empty(self.shape, np.int8).strides

    @property
    def is_contiguous(self) -> bool:
        made = np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), self.shape, self.steps)
        return bool(made.flags.c_contiguous)

    def copied(self) -> Memory:
        """Return other memory for the same elements, without gaps."""
        return Memory(self.shape, self.dtype, self.device, self.address + 0x100000)

    @property
    def byte_steps(self) -> tuple[int, ...]:
        return tuple(step * self.itemsize for step in self.steps)


# torch


@dataclass(frozen=True)
class Device:
    """torch.device."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


class Tensor:
    """torch.Tensor."""

    def __init__(
        self,
        memory: Memory | None = None,
        *,
        array: np.ndarray | None = None,
        device: Device | None = None,
        dtype: str = "",
        layout: str = "torch.strided",
        is_quantized: bool = False,
        negative: bool = False,
        conjugate: bool = False,
        requires_grad: bool = False,
        made: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.memory = memory
        self.array = array
        place = Device("cuda", memory.device) if memory is not None else Device("cpu")
        self.device = device or place
        kind = memory.dtype if memory is not None else "float32" if array is None else array.dtype.name
        self.dtype: Any = f"torch.{dtype or kind}"
        self.layout: Any = layout
        self.is_quantized = is_quantized
        self.requires_grad = requires_grad
        self.shape = memory.shape if memory is not None else () if array is None else array.shape
        self._bits = (negative, conjugate)
        self._made = made
        self.base: Tensor | None = None

    @property
    def is_sparse(self) -> bool:
        return self.layout == "torch.sparse_coo"

    def _like(self, **changes: Any) -> Tensor:
        options: dict[str, Any] = {
            **{"array": self.array, "device": self.device, "dtype": self.dtype.rpartition(".")[2]},
            **{"layout": self.layout, "is_quantized": self.is_quantized, "made": self._made},
            **{"negative": self._bits[0], "conjugate": self._bits[1], "requires_grad": self.requires_grad},
        }
        result = type(self)(changes.pop("memory", self.memory), **{**options, **changes})
        result.base = self
        return result

    def detach(self) -> Tensor:
        return self._like(requires_grad=False)

    def cpu(self) -> Tensor:
        assert self._made is not None
        return self._made(self)

    def is_neg(self) -> bool:
        return self._bits[0]

    def is_conj(self) -> bool:
        return self._bits[1]

    def resolve_neg(self) -> Tensor:
        if not self._bits[0]:
            return self
        if self._made is not None:
            return self._made(self)
        assert self.array is not None
        return self._like(array=-self.array, negative=False)

    def resolve_conj(self) -> Tensor:
        return self._like(conjugate=False, array=None if self.array is None else self.array.conj())

    def data_ptr(self) -> int:
        return self.memory.address

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index

    def is_contiguous(self) -> bool:
        return self.memory is None or self.memory.is_contiguous

    def contiguous(self) -> Tensor:
        return self._like(memory=self.memory.copied())

    def stride(self) -> tuple[int, ...]:
        return self.memory.steps

    def numpy(self) -> np.ndarray:
        if self.device.type != "cpu":
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy ...")
        if self.layout != "torch.strided":
            raise TypeError(f"can't convert {self.layout} layout tensor to numpy. Use Tensor.to_dense() first.")
        if self.is_quantized:
            raise TypeError(f"Got unsupported ScalarType {self.dtype}")
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        if self._bits[1]:
            raise RuntimeError("Can't call numpy() on Tensor that has conjugate bit set. Use resolve_conj().")
        if self._bits[0]:
            raise RuntimeError("Can't call numpy() on Tensor that has negative bit set. Use resolve_neg().")
        assert self.array is not None
        return self.array

    def to_sparse_coo(self) -> Tensor:
        return self


@dataclass
class TorchStream:
    """torch.cuda.Stream."""

    cuda_stream: int


class FakeTorch(ModuleType):
    """The module. `streams` has the current stream's handle by device, `capturing` the devices whose one captures."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.Tensor = Tensor
        self.strided = "torch.strided"
        self.bfloat16 = "torch.bfloat16"
        self.version = SimpleNamespace(hip=None)
        self.streams: dict[int, int] = {}
        self.capturing: set[int] = set()
        self.device = 0
        """The current one."""
        self.is_used = False
        """Whether torch has opened CUDA."""
        self.cuda = SimpleNamespace(
            is_initialized=lambda: self.is_used,
            current_device=self._current_device,
            current_stream=self._current_stream,
            device=self._device,
            is_current_stream_capturing=lambda: self.device in self.capturing,
        )

    @contextlib.contextmanager
    def _device(self, number: int) -> Iterator[None]:
        before, self.device = self.device, number
        yield
        self.device = before

    def _current_device(self) -> int:
        assert self.is_used, "torch opens CUDA for it"
        return self.device

    def _current_stream(self, device: int | None = None) -> TorchStream:
        assert device is not None
        return TorchStream(self.streams.get(device, 0))


# cupy


@dataclass
class CupyDevice:
    """cupy.cuda.Device: the current one in a block."""

    id: int
    entered: int = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None:
        pass


class CupyArray:
    """cupy.ndarray."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.shape = memory.shape
        self.dtype = np.dtype(ml_dtypes.bfloat16 if memory.dtype == "bfloat16" else memory.dtype)
        self.strides = memory.byte_steps
        self.device = CupyDevice(memory.device)
        self.flags = SimpleNamespace(c_contiguous=memory.is_contiguous)
        self.data = SimpleNamespace(ptr=memory.address)

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to ...")

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, self.memory.device


CupyArray.__module__, CupyArray.__name__ = "cupy", "ndarray"


class CupyDriverError(RuntimeError):
    """cupy.cuda.driver.CUDADriverError."""


class FakeCupyArrays(ModuleType):
    """The module. `streams` has the current stream's handle by device, for this thread."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.ndarray = CupyArray
        self.streams: dict[int, int] = {}
        self.capturing: set[int] = set()
        self.device = 0
        """The current one."""
        self.context: int | None = None
        """That of the thread: 0 if it has none; None: the driver is not initialised."""
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(is_hip=False, getDevice=self._get_device),
            driver=SimpleNamespace(ctxGetCurrent=self._context, CUDADriverError=CupyDriverError),
            get_current_stream=self._get_current_stream,
        )

    def _get_device(self) -> int:
        assert self.context, "the runtime opens CUDA for it"
        return self.device

    def _context(self) -> int:
        if self.context is None:
            raise CupyDriverError("CUDA_ERROR_NOT_INITIALIZED: initialization error")
        return self.context

    def ascontiguousarray(self, array: CupyArray) -> CupyArray:
        assert array.device.entered == 1
        return CupyArray(array.memory.copied())

    def _get_current_stream(self, device_id: int = -1) -> Any:
        assert device_id >= 0
        return SimpleNamespace(ptr=self.streams.get(device_id, 0), is_capturing=lambda: device_id in self.capturing)


# DLPack and jax


def capsule(memory: Memory, kind: int = dlpack.CUDA, version: tuple[int, int] | None = None, **flags: Any) -> object:
    """Return numpy's own capsule of an array of the shape, with device, address and dtype changed in place."""
    dtype = np.dtype("uint16" if memory.dtype == "bfloat16" else memory.dtype)
    made = (
        flags["of"]
        if "of" in flags
        else np.lib.stride_tricks.as_strided(np.zeros(1, dtype), memory.shape, memory.byte_steps)
    )
    found: object = made.__dlpack__() if version is None else made.__dlpack__(max_version=version)
    name = b"dltensor" if version is None else b"dltensor_versioned"
    layout = dlpack._Managed if version is None else dlpack._Versioned
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    managed = layout.from_address(pointer(found, name))
    managed.tensor.device_type, managed.tensor.device_id = kind, memory.device
    managed.tensor.data, managed.tensor.byte_offset = memory.address - flags.get("offset", 0), flags.get("offset", 0)
    if memory.dtype == "bfloat16":
        managed.tensor.code = 4
    if flags.get("compact"):
        managed.tensor.strides = None
    managed.tensor.lanes = flags.get("lanes", 1)
    if "major" in flags:
        managed.major = flags["major"]
    return found


@dataclass(eq=False)
class Exporter:
    """An array that only has DLPack."""

    memory: Memory
    kind: int = dlpack.CUDA
    is_old: bool = False
    """A producer from before DLPack 1.0: it does not know `max_version`."""
    before: Callable[[int], None] | None = None
    """Called with the consumer's stream, which the producer orders its own work before."""
    asked: list[int] = field(default_factory=list)
    """Streams that were given."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, self.memory.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> object:
        if self.is_old and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        assert stream is not None
        self.asked.append(stream)
        if self.before is not None:
            self.before(stream)
        return capsule(self.memory, self.kind, None if self.is_old else options["max_version"])


class JaxArray(Exporter):
    """jax.Array on a GPU."""


JaxArray.__module__, JaxArray.__name__ = "jaxlib._jax", "ArrayImpl"


class FakeJax(ModuleType):
    """The module."""

    def __init__(self) -> None:
        super().__init__("jax")
        self.Array = JaxArray


# Others


@dataclass(eq=False)
class Interface:
    """An array that only has the CUDA array interface."""

    memory: Memory
    version: int = 3
    stream: int | None = None
    is_readonly: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        found = {
            "shape": self.memory.shape,
            "typestr": np.dtype(self.memory.dtype).str,
            "data": (self.memory.address, self.is_readonly),
            "version": self.version,
            **({"stream": self.stream} if self.version >= 3 else {}),
            **({} if self.memory.strides is None else {"strides": self.memory.byte_steps}),
        }
        return {**found, **self.more}


NBYTES = 24
"""Of the arrays of a Library."""


def filled(byte: int) -> Array:
    return np.full(NBYTES, byte, np.uint8).view(np.float32).reshape(2, 3)


class Library:
    """Plays a library by a stream of the stand-in: makes arrays (2, 3) of float32, fills them and reads them.

    Arguments:
        kind: `torch`, `cupy`, `jax`; `interface`, `no stream`: what tells its stream, or does not.
        modules: the fakes, by name.
    """

    def __init__(self, kind: str, cuda: Cuda, modules: dict[str, Any]) -> None:
        self.kind = kind
        self.cuda = cuda
        self.stream = cuda.stream(0)
        self.memory = cuda.alloc(0, NBYTES)
        self.modules = modules

    def array(self) -> Any:
        """Return a new array (2, 3) that its stream fills with 7; it is freed with the last reference."""
        pointer = self.cuda.alloc(0, NBYTES)
        self.fill(pointer, 7)
        made = self.lent(pointer)
        weakref.finalize(made, self._free, pointer).atexit = False
        return made

    def lent(self, pointer: Pointer) -> Any:
        """Return an array in some memory."""
        made = self._lent(Memory((2, 3), address=pointer.address))
        made.pointer = pointer
        return made

    def works_on(self, stream: Stream) -> None:
        """Let another stream be the current one."""
        self.stream = stream
        for module in ("torch", "cupy"):
            self.modules[module].streams[0] = stream.handle

    def _lent(self, memory: Memory) -> Any:
        if self.kind in ("torch", "cupy"):
            self.works_on(self.stream)
            return Tensor(memory) if self.kind == "torch" else CupyArray(memory)
        if self.kind == "jax":
            written = self.cuda.event(0)
            self.cuda.record(written, self.stream)
            return JaxArray(memory, before=lambda ours: self.cuda.wait(Stream(0, ours), written))
        if self.kind == "no stream":  # then its work has to be done
            self.wait()
            return Interface(memory)
        return Interface(memory, stream=self.stream.handle)

    def _free(self, pointer: Pointer) -> None:
        # A mistake in a destructor would only be printed: `finish` raises it.
        with contextlib.suppress(Mistake):
            self.cuda.free(pointer)

    def fill(self, pointer: Pointer, byte: int) -> None:
        self.cuda.fill(pointer, byte, NBYTES, self.stream)

    def read(self, pointer: Pointer) -> None:
        self.cuda.copy(self.memory, pointer, NBYTES, self.stream)

    def found(self) -> Array:
        """Return what its stream has read."""
        result = np.empty((2, 3), np.float32)
        self.cuda.copy(HostMemory(address_of(result), NBYTES), self.memory, NBYTES, self.stream)
        return result

    def wait(self) -> None:
        event = self.cuda.event(0)
        self.cuda.record(event, self.stream)
        self.cuda.synchronize(event)


Tensor.__module__ = "torch"


def put(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Let these be the only ones of the three libraries that are loaded."""
    for name in ("torch", "cupy", "jax"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
