"""The GPUs of this process: each device is made once, and arrays of other libraries on them are borrowed here."""

from __future__ import annotations

import threading

from distrun_runtime.arrays.borrowing import Borrowing
from distrun_runtime.arrays.cuda import Cuda
from distrun_runtime.arrays.gpu import GpuDevice
from distrun_runtime.arrays.gpumemory import PageLocked
from distrun_runtime.arrays.queues import StreamOrdering
from distrun_runtime.arrays.segments import Blocks
from distrun_runtime.errors import KVError

__all__ = ["Gpus"]


class Gpus:
    """The devices of a process: each is made once. Threads: any.

    Arguments:
        wait_s: seconds that the host waits for a GPU at most.
        has_peers: copy directly between GPUs that allow it.
        blocks: shared memory that is page-locked once a device is used; None: none is.
    """

    def __init__(self, cuda: Cuda, *, wait_s: float, has_peers: bool = True, blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self._has_peers = has_peers
        self.order = StreamOrdering(cuda, wait_s=wait_s)
        self.locked = PageLocked(self.order)
        self.borrowing = Borrowing(self.order, self.get)
        """Arrays of other libraries on these devices."""
        self._devices: dict[str, GpuDevice] = {}
        self._lock = threading.Lock()

    def made(self) -> list[GpuDevice]:
        """Return the devices that were asked for so far."""
        with self._lock:
            return list(self._devices.values())

    def get(self, physical: int, part: int | None = None) -> GpuDevice:
        """Return `gpu:N`, or `gpu:N/M` for a part.

        Raises:
            KVError: CUDA sees no such GPU.
        """
        name = f"gpu:{physical}" if part is None else f"gpu:{physical}/{part}"
        self.order.cuda.check()
        with self._lock:
            is_first = not self._devices
            if name not in self._devices:
                count = self.order.cuda.count()
                if not 0 <= physical < count:
                    seen = ("none", "only gpu:0")[count] if count < 2 else "gpu:0 to gpu:%d" % (count - 1)
                    raise KVError(
                        f"no device gpu:{physical}: this process sees {seen} (CUDA_VISIBLE_DEVICES may hide others)"
                    )
                self._devices[name] = GpuDevice(self.order, physical, name, self.locked, has_peers=self._has_peers)
            device = self._devices[name]
        if is_first and self._blocks is not None:
            self._blocks.watch(self.locked)  # Page-locks what is there, which takes long.
        return device
