"""Frames of messages that are in a GPU's memory, which another process of the host shares (`gpu_sharing`).

Such a frame is a buffer at the device's address: in CUDA's one address space nothing else is there. It has its size and
its place, and can be cut like any other, so what routes, counts and checks frames does not know of it. But the host
cannot read it: that would end the process. So code that reads a frame asks first, if this process has any (`IN_USE`).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from distrun_runtime.arrays.dtypes import Array, Buffer, DType, owner_of
from distrun_runtime.contract.dataclass import dataclass

if TYPE_CHECKING:
    from distrun_runtime.arrays.cuda import Event

IN_USE: list[bool] = []
"""Not empty in a process that shares memory of a GPU with others."""


class FramePlace(Protocol):
    """What is known of some memory of a GPU that frames lie in."""

    segment: int
    """Number of the segment of this process that it is a part of; -1: it is another process's."""
    offset: int
    """Where it begins there."""
    address: int

    def array(self, frame: Buffer, begin: int, dtype: DType) -> Any:
        """Return the elements of a frame that begins at so many bytes of this memory: a `gpu.GpuArray`, no copy.

        Raises:
            KVError: the process that was to write them has ended, or does not get on with it.
        """


@dataclass(eq=False)
class SegmentOffer:
    """A segment of a GPU that another process has offered."""

    number: int
    size: int
    uuid: str
    """Of its GPU."""
    nonce: bytes
    event_name: bytes
    event: Event | None = None
    """Behind the nonce; None: not opened yet."""


def frames_at(place: FramePlace, nbytes: int) -> Array:
    """Return bytes of a GPU as an array whose views can be frames. They keep it, and it keeps the place."""
    memory = (ctypes.c_uint8 * nbytes).from_address(place.address)
    memory.place = place  # type: ignore[attr-defined]
    found: Array = np.frombuffer(cast(Any, memory), np.uint8)
    found.flags.writeable = False
    return found


def place_of(frame: Buffer | Array) -> FramePlace | None:
    """Return the place of a frame, or of an array that is a view of one; None: it is in host memory."""
    found: FramePlace | None = getattr(owner_of(frame), "place", None)
    return found


def array_of(frame: Buffer, dtype: DType) -> Any:
    """Return the elements of a frame where they are on a GPU, as a `gpu.GpuArray`; None: it is in host memory.

    Raises:
        KVError: the process that was to write them has ended, or does not get on with it; or a GPU has failed.
    """
    place = place_of(frame)
    if place is None:
        return None
    address = np.frombuffer(frame, np.uint8).__array_interface__["data"][0]
    return place.array(frame, address - place.address, dtype)


def readable(frame: Buffer) -> Buffer:
    """Return a frame that the host can read: itself, or a copy. Raises as `array_of`."""
    found = array_of(frame, np.dtype(np.uint8))
    return frame if found is None else found.device.frame(found)
