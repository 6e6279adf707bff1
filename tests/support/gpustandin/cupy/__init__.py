"""`cupy` for processes whose GPUs are stand-ins: a folder of PYTHONPATH in place of cupy and a GPU.

Every process has a stand-in of its own (`cudastandin`), on which distrun's CUDA and the arrays of this module are. A
mistake that it finds, also a call in a forked child, gives the process exit code 70.

Variables, of the process:

    STANDIN_GPUS        how many devices; 1 if it is not set
    STANDIN_MEMORY      bytes of each
    STANDIN_UUID        number of the first device's UUID; 0 if it is not set
    STANDIN_FAULT       `kill:30`: the process is killed at the 30th call of all;
                        `free:3:700`: the third call of a name fails with a code; `operation:3`: the third operation
                        that is done accesses an illegal address; `hang`: nothing is ever known to be over
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import cxx
import standinsharing
from cudastandin import StandIn, outside_of_locks

from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays.cuda import DriverError, Event, HostMemory, Pointer, Stream
from distrun_runtime.arrays.shared_memory import address_of

__version__ = "14.0.0 (a stand-in)"

standin = StandIn(
    int(os.environ.get("STANDIN_GPUS", "1")),
    memory=int(os.environ.get("STANDIN_MEMORY", str(1 << 26))),
    uuid=int(os.environ.get("STANDIN_UUID", "0")),
    compiled=cxx.compiled,
)
cupy_driver.CupyDriver = lambda cupy: standin  # type: ignore[assignment, misc]

_lock = threading.Lock()
_streams: dict[int, Stream] = {}
"""On which this module works, by device."""


def _stream(device: int) -> Stream:
    with _lock:
        if device not in _streams:
            _streams[device] = Stream(device, standin.make_stream(device))
        return _streams[device]


class ndarray:
    """An array on the first device, made by this module's functions."""

    def __init__(self, shape: Any, dtype: Any = np.float32) -> None:
        self._host = np.empty(shape, dtype)
        """Gives shape, strides and flags; its elements are of no use."""
        self.shape, self.strides, self.flags = self._host.shape, self._host.strides, self._host.flags
        self.dtype, self.size, self.nbytes = self._host.dtype, self._host.size, self._host.nbytes
        self.device = SimpleNamespace(id=0)
        room = max(1, self.nbytes)
        self._pointer = Pointer(standin.alloc(0, room), 0, room)
        self.data = SimpleNamespace(ptr=self._pointer.address)
        weakref.finalize(self, _free, self._pointer).atexit = False

    def set(self, values: Any) -> None:
        """Copy elements of the host here, on this module's stream."""
        given = np.ascontiguousarray(values, self.dtype).reshape(self.shape)
        if self.nbytes:
            standin.copy(self._pointer, HostMemory(address_of(given), self.nbytes), self.nbytes, _stream(0))

    def get(self) -> Any:
        """Return a copy in the host's memory."""
        result = np.empty(self.shape, self.dtype)
        if self.nbytes:
            standin.copy(HostMemory(address_of(result), self.nbytes), self._pointer, self.nbytes, _stream(0))
        return result

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one")


def _free(pointer: Pointer) -> None:
    """Free memory after all that this module's stream has to do, and waits for: cupy's pool keeps that order, too."""
    if os.getpid() == standin.pid and standin.dead is None:
        with contextlib.suppress(DriverError), outside_of_locks():  # a pool makes no call
            _synchronize(_stream(0))
            standin.free(pointer)


def _synchronize(stream: Stream) -> None:
    event = Event(stream.device, standin.make_event(stream.device))
    standin.record(event, stream)
    standin.synchronize(event)


def empty(shape: Any, dtype: Any = np.float32) -> ndarray:
    return ndarray(shape, dtype)


def asarray(values: Any) -> ndarray:
    given = np.asarray(values)
    result = ndarray(given.shape, given.dtype)
    result.set(given)
    return result


def _current_stream(device_id: int = -1) -> Any:
    stream = _stream(max(0, device_id))
    return SimpleNamespace(ptr=stream.handle, is_capturing=lambda: False, synchronize=lambda: _synchronize(stream))


cuda = SimpleNamespace(
    runtime=SimpleNamespace(is_hip=False, getDevice=lambda: 0),
    driver=SimpleNamespace(ctxGetCurrent=lambda: len(_streams), CUDADriverError=DriverError),
    get_current_stream=_current_stream,
)


def _finish() -> None:
    standinsharing.ENDING.append(True)
    with contextlib.suppress(DriverError, AssertionError):  # of a device that is of no use any more; it is noted
        if os.getpid() == standin.pid:
            standin.finish()
    if standin.mistakes:
        print("stand-in: %s" % standin.mistakes[0], file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(70)


atexit.register(_finish)

_fault = os.environ.get("STANDIN_FAULT", "").split(":")
if _fault[0] == "operation":
    standin.fail_operation(int(_fault[1]))
elif _fault[0] == "kill":
    standin.kill_at = int(_fault[1])
elif _fault[0] == "hang":
    standin.query = lambda event: False  # type: ignore[method-assign]
    standin.synchronize = lambda event: threading.Event().wait()  # type: ignore[method-assign]
elif _fault[0]:
    standin.fail(_fault[0], int(_fault[1]), int(_fault[2]))
