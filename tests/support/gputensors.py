"""Tensors in the memory of stand-in GPUs, with as much of torch as a trainer uses: gradients, versions, hooks, streams.

Elements are made and moved on the stream that is current in the calling thread, as torch does it, so the stand-in finds
what a trainer or a store does not order with them. `Torch.moves` counts what goes to the host or comes from it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
from cudastandin import Mistake, outside_of_locks
from fakearrays import FakeTorch, Memory, Tensor
from gpukit import Machine

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.cuda import CudaError, HostMemory, Pointer, Stream
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.arrays.shared_memory import address_of


class GpuStream:
    """torch.cuda.Stream."""

    def __init__(self, torch: Torch, stream: Stream) -> None:
        self._torch, self.stream, self.cuda_stream = torch, stream, stream.handle

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GpuStream) and other.stream == self.stream

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def wait_stream(self, other: GpuStream) -> None:
        cuda = self._torch.cuda_calls
        event = cuda.event(other.stream.device)
        cuda.record(event, other.stream)
        cuda.wait(self.stream, event)


class Torch(FakeTorch):
    """The module, on the devices of a machine."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.cuda_calls = machine.cuda
        self.moves = 0
        """Copies from and to the host so far, by torch."""
        self._usual = [GpuStream(self, machine.cuda.stream(device)) for device in range(machine.cuda.count())]
        self._here = threading.local()
        self.cuda.current_stream = self._current
        self.autograd = SimpleNamespace(graph=SimpleNamespace(increment_version=_increment))

    def _current(self, device: int | None = None) -> GpuStream:
        assert device is not None
        found: GpuStream = getattr(self._here, "streams", {}).get(device, self._usual[device])
        return found

    @contextlib.contextmanager
    def stream(self, stream: GpuStream) -> Iterator[None]:
        """Let a stream be the current one of its device, in this thread."""
        before = dict(getattr(self._here, "streams", {}))
        self._here.streams = {**before, stream.stream.device: stream}
        try:
            yield
        finally:
            self._here.streams = before

    def new_stream(self, device: int) -> GpuStream:
        """Return another stream."""
        return GpuStream(self, self.cuda_calls.stream(device))

    def tensor(self, array: Any, device: int = 0, **options: Any) -> GpuTensor:
        """Return a tensor with an array's elements."""
        given = np.asarray(array)
        result = GpuTensor(self, given.shape, given.dtype, device, **options)
        result.set(given)
        return result


def _increment(tensor: GpuTensor) -> None:
    tensor._counted[0] += 1


class GpuTensor(Tensor):
    """torch.Tensor."""

    is_leaf = True

    def __init__(
        self,
        torch: Torch,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int,
        *,
        strides: tuple[int, ...] | None = None,
        of: GpuTensor | None = None,
    ) -> None:
        self.torch = torch
        self.kind = np.dtype(dtype)
        room = max(1, int(np.prod(shape, dtype=int)) * self.kind.itemsize)
        self.pointer = torch.cuda_calls.alloc(device, room) if of is None else of.pointer
        self._counted = [0] if of is None else of._counted
        self._of = of
        self.hooks: list[Callable[[Any], None]] = []
        self._grad: GpuTensor | None = None
        if 0 in shape:  # numpy has zeros as the strides of nothing
            strides = np.empty([max(1, length) for length in shape], np.int8).strides
        super().__init__(
            Memory(shape, dtypes.name_of(self.kind), device, self.pointer.address, strides), requires_grad=of is None
        )
        self._streams: set[GpuStream] = {torch.cuda.current_stream(device)} if of is None else of._streams
        """That were told to work on the memory."""
        if of is None:
            weakref.finalize(self, _free, torch, self.pointer, self._streams).atexit = False

    @property
    def _version(self) -> int:
        return self._counted[0]

    @property
    def grad(self) -> GpuTensor | None:
        return self._grad

    @grad.setter
    def grad(self, value: GpuTensor | None) -> None:
        self._grad = value

    # What backward and the program do

    def set(self, array: Any) -> None:
        """Write elements, in the order of the memory, on the current stream."""
        given = np.ascontiguousarray(array, self.kind)
        if given.nbytes:
            cuda = self.torch.cuda_calls
            cuda.copy(self.pointer, HostMemory(address_of(given), given.nbytes), given.nbytes, self._stream)
        _increment(self)

    def get(self) -> Array:
        """Return the elements, in the order of the memory, as the current stream finds them."""
        result = np.empty(self.shape, self.kind)
        if result.nbytes:
            cuda = self.torch.cuda_calls
            cuda.copy(HostMemory(address_of(result), result.nbytes), self.pointer, result.nbytes, self._stream)
        return result

    def backward(self, gradient: Any) -> None:
        """Let this be the gradient, in memory that is there already or new, and tell who wants to know."""
        if self._grad is None:
            assert self.memory is not None
            self._grad = GpuTensor(self.torch, self.shape, self.kind, self.memory.device, strides=self.memory.strides)
        self._grad.set(gradient)
        for hook in self.hooks:
            hook(self)

    # What a trainer calls

    def detach(self) -> GpuTensor:
        assert self.memory is not None
        return GpuTensor(self.torch, self.shape, self.kind, self.memory.device, strides=self.memory.strides, of=self)

    def cpu(self) -> Tensor:
        self.torch.moves += 1
        found = self.get()
        assert self.memory is not None
        if self.memory.strides is not None:
            found = np.lib.stride_tricks.as_strided(found.reshape(-1), self.shape, self.memory.byte_steps)
        return Tensor(array=found)

    def record_stream(self, stream: GpuStream) -> None:
        self._streams.add(stream)

    def copy_(self, other: Tensor) -> None:
        assert self.memory is not None
        if isinstance(other, GpuTensor):
            self._take(other)
            return
        self.torch.moves += 1
        elements = other.numpy()
        there = np.empty(self.size, self.kind)
        np.copyto(np.lib.stride_tricks.as_strided(there, self.shape, self.memory.byte_steps), elements)
        self.set(there)

    def contiguous(self) -> GpuTensor:
        assert self.memory is not None
        result = GpuTensor(self.torch, self.shape, self.kind, self.memory.device)
        result._take(self)
        return result

    def clone(self) -> GpuTensor:
        """Return a copy, which the current stream makes when it comes to it."""
        assert self.memory is not None
        result = GpuTensor(self.torch, self.shape, self.kind, self.memory.device, strides=self.memory.strides)
        self.torch.cuda_calls.copy(result.pointer, self.pointer, self.pointer.nbytes, self._stream)
        return result

    def new_zeros(self, shape: tuple[int, ...]) -> GpuTensor:
        assert self.memory is not None
        return self.torch.tensor(np.zeros(shape, self.kind), self.memory.device)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        self.hooks.append(hook)
        return SimpleNamespace(remove=lambda: self.hooks.remove(hook))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    def _take(self, other: GpuTensor) -> None:
        """Copy the elements of a tensor of the same device and shape, on the current stream."""
        for index in np.ndindex(*self.shape):
            into, source = (one._element(index) for one in (self, other))
            self.torch.cuda_calls.copy(into, source, self.kind.itemsize, self._stream)
        _increment(self)

    def _element(self, index: tuple[int, ...]) -> Pointer:
        assert self.memory is not None
        offset = sum(place * step for place, step in zip(index, self.memory.byte_steps, strict=True))
        return self.pointer.at(offset, self.kind.itemsize)

    @property
    def _stream(self) -> Stream:
        assert self.memory is not None
        found: Stream = self.torch.cuda.current_stream(self.memory.device).stream
        return found


GpuTensor.__module__ = "torch"


def _finish(torch: Torch, stream: Stream) -> None:
    event = torch.cuda_calls.event(stream.device)
    torch.cuda_calls.record(event, stream)
    torch.cuda_calls.synchronize(event)


def _free(torch: Torch, pointer: Pointer, streams: set[GpuStream]) -> None:
    """End memory that its streams are done with: torch uses it again for later work of the one that it was made on."""
    # The garbage collector may come to it within any lock. `finish` raises a mistake.
    with outside_of_locks(), contextlib.suppress(CudaError, Mistake):
        for each in streams:
            _finish(torch, each.stream)
        torch.cuda_calls.free(pointer)
