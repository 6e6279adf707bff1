"""Try on this machine how processes can share memory of its GPU, and what is left of it when one of them is killed.

    python benchmarks/gpu_sharing.py

Another process makes memory, fills it, and passes it on in both of CUDA's ways: by a descriptor (`cuMemCreate`), which
distrun uses, and by `cudaIpcGetMemHandle`; with an interprocess event, which it records again and again. This one reads
both, kills the other while it has work before the event, asks for the event all the same, and reads the first memory
again. Exit code 0: memory by a descriptor can be used, and outlives its maker; 1: not; 2: no GPU.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np

from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays.cuda import SHARED_UNIT, Cuda, Event, HostMemory, Pointer, Stream
from distrun_runtime.errors import KVError

NBYTES, BYTE, WAIT_S = 4096, 7, 20.0
RECORDS, ASKS, FILLS = 1000, 1000, 2000


def share(one: socket.socket) -> None:
    """Make memory, fill it and pass it on; then wait to be killed."""
    cuda = cupy_driver.of_process()
    stream, (memory, fd), old = cuda.stream(0), cuda.share(0, SHARED_UNIT), cuda.alloc(0, SHARED_UNIT)
    event, name = cuda.share_event(0)
    for each in (memory, old):
        cuda.fill(each, BYTE, NBYTES, stream)
    cuda.record(event, stream)
    try:
        handle = bytes(sys.modules["cupy"].cuda.runtime.ipcGetMemHandle(old.address))
    except Exception as err:  # this way may not be there
        handle = b"no " + repr(err).encode()
    socket.send_fds(one, [name.ljust(64, b"\0") + handle], [fd])
    one.recv(1)
    for _ in range(RECORDS):
        cuda.record(event, stream)
    work = cuda.alloc(0, 512 * SHARED_UNIT)
    for _ in range(FILLS):  # far more than is done before the kill
        cuda.fill(work, BYTE, work.nbytes, stream)
    cuda.record(event, stream)
    one.send(b"busy")
    time.sleep(10 * WAIT_S)


def read(cuda: Cuda, memory: Pointer, stream: Stream) -> bool:
    """Tell whether memory has what the other process has written."""
    out, event = np.zeros(NBYTES, np.uint8), cuda.event(0)
    cuda.copy(HostMemory(int(out.ctypes.data), NBYTES), memory, NBYTES, stream)
    cuda.record(event, stream)
    cuda.synchronize(event)
    return bool((out == BYTE).all())


def has_completed(cuda: Cuda, event: Event) -> bool:
    """Tell whether an event of the other process completes in time."""
    deadline = time.monotonic() + WAIT_S
    while not (is_over := cuda.query(event)) and time.monotonic() < deadline:
        time.sleep(0.001)
    return is_over


def said_of(cuda: Cuda, event: Event) -> str:
    """Return what is said of an event of the other process when it is asked often."""
    said: set[str] = set()
    for _ in range(ASKS):
        try:
            said.add("has completed" if cuda.query(event) else "has not completed")
        except KVError as err:
            said.add(str(err))
    return ", ".join(sorted(said))


def by_handle(cuda: Cuda, handle: bytes, stream: Stream) -> str:
    """Return what comes of the memory whose handle the other process has sent."""
    if handle.startswith(b"no "):
        return handle.decode(errors="replace")
    runtime: Any = sys.modules["cupy"].cuda.runtime
    try:
        runtime.setDevice(0)
        address = runtime.ipcOpenMemHandle(handle)
    except Exception as err:  # whatever its library raises
        return "no %r" % err
    found = read(cuda, Pointer(address, 0, SHARED_UNIT), stream)
    runtime.ipcCloseMemHandle(address)  # before the other process ends
    return "works" if found else "other values"


def main() -> int:
    """Try, print what was found, and return the exit code."""
    if len(sys.argv) > 1:
        share(socket.socket(fileno=int(sys.argv[1])))
        return 0
    cuda = cupy_driver.of_process()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(3 * WAIT_S)
    command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as other:
        try:
            theirs.close()
            data, fds, _, _ = socket.recv_fds(ours, 1024, 1)
            if not fds:
                print("the other process could not share memory by a descriptor")
                return 1
            begin = time.perf_counter()
            event, memory = cuda.open_event(0, data[:64]), cuda.open_shared(0, fds[0], SHARED_UNIT)
            opened_ms, stream = (time.perf_counter() - begin) * 1e3, cuda.stream(0)
            works = has_completed(cuda, event) and read(cuda, memory, stream)
            print("by a descriptor: %s; opened in %.1f ms" % ("works" if works else "other values", opened_ms))
            print("by cudaIpcGetMemHandle: %s" % by_handle(cuda, data[64:], stream))
            ours.send(b"1")
            ours.recv(4)
            print("its event while it has work: %s" % said_of(cuda, event))
        finally:
            other.send_signal(signal.SIGKILL)
    print("its event after the kill: %s" % said_of(cuda, event))
    works &= read(cuda, memory, stream)
    print("after kill -9 of the other process: %s" % ("its memory and this GPU are there" if works else "not usable"))
    return 0 if works else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVError as err:
        print("gpu_sharing.py: %s" % err, file=sys.stderr)
        sys.exit(2)
