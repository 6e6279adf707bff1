"""Order and lifetime of GPU arrays that belong to others: our stream waits for theirs, theirs for ours, and a reference
is kept until the GPU is done with the memory.

A call of a store that reads such an array:

    view = foreign.device_array(value, cuda, ours)     in the thread that called the store
    before_read(cuda, [view], stream)                  our stream comes after what theirs has to do so far
    ... copies and kernels on our stream ...
    cuda.record(event, stream)
    after_use(cuda, [view], event, keeper)             their stream comes after our event

and the same for one that writes it. The host waits only where a library does not tell its stream.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence

from distrun_runtime.arrays.cuda import Cuda, Event, Stream, never_freed
from distrun_runtime.arrays.foreign import DeviceView

__all__ = ["Keeper", "after_use", "before_read"]


class Keeper:
    """References that are kept until an event has completed. It never waits. Threads: any."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._kept: list[tuple[Event, object]] = []
        never_freed(self._kept)  # a forked child ends with a copy of it; in this process it is emptied by `drop`

    def keep(self, owners: Iterable[object], event: Event) -> None:
        """Keep references until an event, as it is recorded now or later, has completed."""
        if os.getpid() != self._pid:  # a forked child: nothing was queued, and the lock may be held for ever
            return
        with self._lock:
            self._kept += [(event, owner) for owner in owners]

    def drop(self) -> int:
        """Drop what is not needed any more; return how many references are left.

        Raises:
            CudaError: an event cannot be asked; its references are kept.
        """
        if os.getpid() != self._pid:
            return len(self._kept)
        is_done: dict[Event, bool] = {}
        # What is dropped is freed when the lock is not held: a destructor may come back here.
        with self._lock:
            for event, _ in self._kept:
                if event not in is_done:
                    is_done[event] = self._cuda.query(event)
            over = [pair for pair in self._kept if is_done[pair[0]]]
            self._kept[:] = [pair for pair in self._kept if not is_done[pair[0]]]
            left = len(self._kept)
        del over
        return left


def before_read(cuda: Cuda, views: Sequence[DeviceView], ours: Stream) -> None:
    """Let our stream wait for what the callers of these arrays have queued so far, also before it writes them.

    Call it in the thread in which the views were made: the per-thread default stream is that of the calling thread.
    """
    for stream in _streams(views):
        event = cuda.event(stream.device)
        cuda.record(event, stream)
        cuda.wait(ours, event)


def after_use(cuda: Cuda, views: Sequence[DeviceView], event: Event, keeper: Keeper) -> None:
    """Let later work of the callers wait for our event, and keep the arrays until it has completed.

    Where a caller's stream is not known, return when the event has completed: the array may be overwritten then, too.
    Call it in the thread in which the views were made.
    """
    # First of all: if a wait fails, our work is queued nevertheless.
    keeper.keep([view.owner for view in views], event)
    for stream in _streams(views):
        cuda.wait(stream, event)
    if any(view.stream is None and not view.is_immutable for view in views):
        cuda.synchronize(event)


def _streams(views: Sequence[DeviceView]) -> list[Stream]:
    """Return the callers' streams that are known, each once. They are not ours: nothing ends them."""
    found = {(view.device, view.stream) for view in views if view.stream is not None}
    return [Stream(device, handle) for device, handle in sorted(found)]
