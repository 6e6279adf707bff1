"""Memory of a GPU that two processes share: when that is agreed on, who waits for whom, and who survives whom."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cudastandin import Mistake
from gpukit import Machine, gpus_of_process
from slowness import scaled
from transports import LONG, WELCOME, endpoint, welcomed

from distrun_runtime.arrays.cuda import SHARED_UNIT, CudaError, DriverError
from distrun_runtime.arrays.gpu_frames import IN_USE, array_of, place_of, readable
from distrun_runtime.arrays.gpu_sharing import Arrival, GpuExports, ReadExports, frames_of
from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.errors import KVError
from distrun_runtime.transport.base import Arrived, Down, Event, PathChosen
from distrun_runtime.transport.gpu_segments import GpuPeer
from distrun_runtime.transport.host_paths import BulkKind, BulkTransport
from distrun_runtime.transport.host_segments import SharedLease, _Peer
from distrun_runtime.transport.zeromq import ZmqTransport

TOKEN = b"a secret of this job"
SIZE = 20_000
MORE = 17 * 1024 * 1024
"""Bytes for which a second segment is made."""
HEAD = (b"", b"")
"""What the host reads of a message."""
SUPPORT = Path(__file__).resolve().parents[2] / "support"


class Pair:
    """A server and a worker, both in this process and on its one GPU."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.gpu = machine.gpus.get(0)
        self.server, self.worker = (BulkTransport(ZmqTransport(LONG, TOKEN), TOKEN, [Pool()]) for _ in range(2))
        self.links = {self.server: welcomed(self.server, self.worker), self.worker: "server-0"}
        self.worker.proven("server-0")
        self.chosen: list[PathChosen] = []
        self.arrived: list[Arrived] = []

    def poll(self) -> list[Event]:
        events = [*self.server.poll(0.01), *self.worker.poll(0.01)]
        for event in events:
            self.chosen += [event] if isinstance(event, PathChosen) else []
            self.arrived += [event] if isinstance(event, Arrived) else []
        return events

    def until(self, done: Any) -> None:
        deadline = time.monotonic() + scaled(20)
        while not done():
            assert time.monotonic() < deadline, self.chosen
            self.poll()

    def agree(self, path: str = "gpu", times: int = 2) -> list[str]:
        """Let the server offer memory; return the reasons of what was chosen then."""
        self.until(lambda: len(self.chosen) == 2)
        self.server.share_gpu(self.gpu)
        self.until(lambda: [each.path for each in self.chosen[2:]] == [path] * times)
        return [each.reason for each in self.chosen[2:]]

    def send(self, sender: BulkTransport, value: float) -> Any:
        """Send an array of a GPU; return its lease."""
        exports = sender.exports_to([self.links[sender]], self.gpu)
        array = None if exports is None else exports.empty((SIZE,), np.dtype(np.float32))
        assert array is not None
        self.gpu.clear(array)
        self.gpu.sum([array, self.gpu.put(np.full(SIZE, value, np.float32))], array)
        return sender.send(self.links[sender], [*HEAD, *frames_of([array[: SIZE // 2], array[SIZE // 2 :]])])

    def exports(self) -> ReadExports:
        """Return the server's memory that the worker reads."""
        found = self.server.exports_to([self.links[self.server]], self.gpu)
        assert found is not None
        return found

    def down(self) -> list[str]:
        """Return the reasons of connections that end in the next moments."""
        return [each.reason for _ in range(20) for each in self.poll() if isinstance(each, Down)]

    def receive(self) -> Any:
        self.until(lambda: self.arrived)
        return self.arrived.pop(0).frames[2]

    def close(self) -> None:
        self.arrived.clear()
        self.worker.close()
        self.server.close()


@pytest.fixture(params=[0])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with gpus_of_process(Machine(2, seed=request.param)) as machine:
        one = Pair(machine)
        yield one
        one.close()
        del IN_USE[:]
        machine.finish()


def test_values_on_a_gpu_are_read_where_they_are_when_they_are_there(pair: Pair) -> None:
    assert pair.agree() == ["", ""]
    for sender in (pair.server, pair.worker):
        pair.send(sender, 3.0)
        frame = pair.receive()
        found = array_of(frame, np.dtype(np.float32))
        assert found is not None
        assert place_of(frame) is not None
        assert set(pair.gpu.host(found).tolist()) == {3.0}
        assert bytes(readable(frame)) == np.full(SIZE, 3.0, np.float32).tobytes()


def test_another_gpu_has_the_values_by_way_of_the_host(pair: Pair) -> None:
    pair.agree()
    pair.send(pair.worker, 3.0)
    other, found = pair.machine.gpus.get(1), array_of(pair.receive(), np.dtype(np.float32))
    out, exports = (
        other.zeros((SIZE // 2,), np.dtype(np.float32)),
        pair.server.exports_to([pair.links[pair.server]], pair.gpu),
    )
    other.sums([([found], out)])
    assert exports is not None
    into = exports.empty(out.shape, out.dtype)
    assert into is not None
    pair.gpu.write(into, out)
    assert set(other.host(out).tolist()) == set(pair.gpu.host(into).tolist()) == {3.0}


def test_an_event_is_not_believed_when_its_maker_has_ended(pair: Pair) -> None:
    pair.agree()
    pair.send(pair.worker, 3.0)
    frame = pair.receive()
    pair.worker.close()
    with pytest.raises(KVError, match="has ended before its values were known to be on the GPU"):
        array_of(frame, np.dtype(np.float32))


@pytest.mark.parametrize("ends_at", [1, 2])
def test_who_ends_while_its_event_is_asked_is_not_believed(pair: Pair, ends_at: int) -> None:
    asked, event = itertools.count(1), pair.machine.cuda.event(0)  # It was never recorded, so it has completed.
    arrival = Arrival("the process at in:1", event, lambda: next(asked) >= ends_at)
    with pytest.raises(KVError, match="the process at in:1, or the connection with it, has ended"):
        arrival.wait(pair.machine.gpus.order)
    Arrival("", event, lambda: False).wait(pair.machine.gpus.order)


def test_a_process_has_ended_though_a_child_of_it_keeps_the_socket() -> None:
    program = (
        "import os,socket,sys; one=socket.socket(fileno=int(sys.argv[1])); one.connect('\\0'+sys.argv[2]); input();"
    )
    program += "os.fork() or sys.stdin.read()"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(b"")
        listener.listen()
        argv = [sys.executable, "-c", program, str(client.fileno()), listener.getsockname()[1:].decode()]
        with subprocess.Popen(argv, pass_fds=[client.fileno()], stdin=subprocess.PIPE, text=True) as other:
            client.close()
            one = _Peer(listener.accept()[0], Any, Any)
            assert not one.has_ended()
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
            other.wait()
            assert not select.select([one.socket], [], [], 0)[0]
            assert one.has_ended()
            one.socket.close()


def test_an_error_of_anothers_event_is_that_messages_and_a_failed_gpu_is_told(pair: Pair) -> None:
    pair.agree()
    for code in (999, 719):
        pair.send(pair.worker, 3.0)
        frame = pair.receive()
        pair.machine.standin.fail("query", code=code)
        with pytest.raises(CudaError) as caught:
            array_of(frame, np.dtype(np.float32))
        assert caught.value.is_sticky == (pair.machine.cuda.failed is not None) == (code == 719)
    pair.machine.cuda.__init__(pair.machine.standin)  # type: ignore[misc]
    pair.machine.standin.dead = None


@pytest.mark.parametrize("call", ["copy", "record"])
def test_a_segment_that_cannot_be_marked_is_given_back(pair: Pair, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    made, share, used = list[tuple[int, int]](), pair.machine.standin.share, pair.machine.standin.used
    monkeypatch.setattr(pair.machine.standin, "share", lambda *told: made.append(share(*told)) or made[-1])
    pair.machine.standin.fail(call, code=1)
    with pytest.raises(CudaError):
        GpuExports(pair.gpu, pair.machine.gpus.order, lambda: None)._made(SHARED_UNIT)
    assert pair.machine.standin.used == used
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0][1])


def test_a_frame_that_begins_within_an_element_is_refused(pair: Pair) -> None:
    pair.agree()
    array = pair.exports().empty((SIZE,), np.dtype(np.uint8))
    assert array is not None
    pair.gpu.clear(array)
    pair.server.send(pair.links[pair.server], [*HEAD, frames_of([array])[0][2:402]])
    with pytest.raises(KVError, match="begins at byte 4098, which is no multiple of 4"):
        array_of(pair.receive(), np.dtype(np.float32))


def test_what_ended_connections_had_announced_is_not_waited_for(pair: Pair) -> None:
    pair.agree()
    pair.send(pair.worker, 3.0)
    frame = pair.receive()
    pair.server.disconnect(pair.links[pair.server])
    with pytest.raises(KVError, match="has ended before"):
        array_of(frame, np.dtype(np.float32))


def test_messages_for_which_there_is_no_event_have_copies_on_the_host(pair: Pair) -> None:
    pair.machine.standin.fail("share_event", 4, code=2)  # The first one is the segment's.
    pair.server.share_gpu(pair.gpu)
    pair.until(lambda: [each.path for each in pair.chosen].count("gpu") == 2)
    assert any("share_event on gpu:0 failed" in each.reason for each in pair.chosen)
    for _ in range(4):
        pair.send(pair.server, 3.0)
    frames = [pair.receive() for _ in range(4)]
    assert [place_of(each) is not None for each in frames] == [True, True, False, False]
    assert {bytes(readable(each)) for each in frames} == {np.full(SIZE, 3.0, np.float32).tobytes()[: len(frames[0])]}


def test_an_event_that_cannot_be_recorded_is_not_relied_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: GpuExports, event: Any) -> None:
        raise CudaError("record", 0, 2, "cudaErrorMemoryAllocation", "out of memory")

    pair.agree()
    monkeypatch.setattr(GpuExports, "record", record)
    pair.send(pair.server, 3.0)
    assert set(np.frombuffer(pair.receive(), np.float32).tolist()) == {3.0}


def test_memory_is_lent_until_the_other_gpu_is_known_to_have_read_it(pair: Pair) -> None:
    pair.agree()
    lease = pair.send(pair.worker, 3.0)
    found = array_of(pair.receive(), np.dtype(np.float32))
    total = pair.gpu.empty((SIZE,), np.dtype(np.float32))
    pair.gpu.sum([found, found], total)
    assert not lease.is_over
    del found
    assert not lease.is_over, "the sum may not have been made yet"
    pair.until(lambda: lease.is_over)
    assert set(pair.gpu.host(total).tolist()) == {6.0}


@pytest.mark.parametrize(
    ("owner", "name", "value", "mistake"),
    [
        (Arrival, "wait", lambda *_: None, "reads memory of another process before that is known to have written it"),
        (SharedLease, "is_over", True, "overwrites memory before another process is known to have read it"),
    ],
)
def test_the_stand_in_finds_a_wait_that_is_missing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, value: Any, mistake: str
) -> None:
    pair.agree()
    monkeypatch.setattr(owner, name, value)
    other, kept = pair.machine.gpus.get(0, 1), []
    with pytest.raises(Mistake):
        for _ in range(3):
            pair.send(pair.worker, 3.0)
            kept.append(other.put(array_of(pair.receive(), np.dtype(np.float32))))
            pair.poll()
        pair.machine.finish()
    assert mistake in str(pair.machine.standin.mistakes[0])
    pair.machine.standin.mistakes.clear()


@pytest.mark.parametrize("pair", range(1, 7), indirect=True)
def test_rounds_in_any_order_have_the_values_that_were_sent(pair: Pair) -> None:
    pair.agree()
    chance, held = random.Random(pair.machine.standin.seed), list[tuple[float, Any]]()
    for number in range(12):
        pair.send(chance.choice([pair.server, pair.worker]), float(number))
        held.append((float(number), array_of(pair.receive(), np.dtype(np.float32))))
        while held and chance.random() < 0.5:
            value, found = held.pop(chance.randrange(len(held)))
            assert set(pair.gpu.host(found).tolist()) == {value}
            del found
    held.clear()
    pair.until(lambda: not pair.server._in_use and not pair.worker._in_use)
    pair.exports().all.trim()
    assert len(pair.exports().all.segments) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_head_or_body_on_a_gpu_ends_the_connection(pair: Pair, number: int) -> None:
    pair.agree()
    array = pair.exports().empty((SIZE,), np.dtype(np.float32))
    assert array is not None
    pair.server.send(pair.links[pair.server], [*HEAD[:number], *frames_of([array])])
    assert f"frame {number} of its message is on a GPU" in str(pair.down())
    assert not pair.arrived


def test_a_driver_without_such_memory_is_told_and_asked_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int, nbytes: int) -> Any:
        raise DriverError(801, "CUDA_ERROR_NOT_SUPPORTED", "memory as a descriptor")

    monkeypatch.setattr(pair.machine.standin, "share", refuse)
    assert "CUDA_ERROR_NOT_SUPPORTED" in pair.agree("segments", 1)[0]
    pair.server.share_gpu(pair.gpu)
    pair.poll()
    assert len(pair.chosen) == 3


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        ("open_shared", 801, "open_shared on gpu:0 failed: cudaErrorNotSupported"),
        ("open_shared", 999, "open_shared on gpu:0 failed: cudaErrorUnknown"),
        ("open_event", 999, "open_event on gpu:0 failed: cudaErrorUnknown"),
        ("open_event", 400, "open_event on gpu:0 failed: cudaErrorInvalidResourceHandle"),
        ("open_event:9", 2, "open_event on gpu:0 failed: cudaErrorMemoryAllocation"),
        ("", 0, "this process does not use the GPU of UUID"),
    ],
)
def test_where_it_does_not_work_the_hosts_path_is_used_and_the_reason_is_told(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, call: str, code: int, reason: str
) -> None:
    if call:
        name, _, nth = call.partition(":")
        pair.machine.standin.fail(name, int(nth or 1), code=code)
    else:
        uuids, known = itertools.count(), pair.machine.cuda.properties
        monkeypatch.setattr(pair.machine.cuda, "properties", lambda gpu: replace(known(gpu), uuid=str(next(uuids))))
    assert reason in pair.agree("segments", 1)[0]
    pair.gpu.synchronize()
    assert pair.server.exports_to([pair.links[pair.server]], pair.gpu) is None


def test_a_segment_that_was_refused_is_given_back_as_any_other(pair: Pair) -> None:
    pair.agree()
    pair.machine.standin.fail("open_shared", code=2)
    pair.exports().empty((MORE,), np.dtype(np.uint8))
    pair.until(lambda: len(pair.chosen) == 5)
    assert "open_shared" in pair.chosen[4].reason
    assert pair.exports().empty((MORE,), np.dtype(np.uint8)) is None
    assert len(pair.exports().all.segments) == 2
    pair.exports().all.trim()
    assert len(pair.exports().all.segments) == 1
    assert not pair.down()


@pytest.mark.parametrize("told", [{"size": -2 << 20}, {"size": 3}, {"size": "2097152"}, {"nonce": "00"}, {"event": ""}])
def test_an_offer_that_makes_no_sense_ends_its_connection_when_it_comes(pair: Pair, told: dict[str, Any]) -> None:
    pair.until(lambda: len(pair.chosen) == 2)
    right = {"number": 7, "size": 2 << 20, "uuid": "of another GPU", "nonce": "00" * 16, "event": "00" * 64}
    pair.worker._say("server-0", BulkKind.GPU_OFFER, {"gpu": {**right, **told}})
    assert "no segment" in str(pair.down())


def test_a_descriptor_that_comes_twice_is_closed(pair: Pair) -> None:
    pair.agree()
    ours, known = pair.worker._segments.peers["server-0"].socket, len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        socket.send_fds(ours, [b"gpu 99"], [ours.fileno()])
    pair.worker._say("server-0", BulkKind.SEGMENTS, {"segments": {"numbers": [98]}})
    assert "a segment cannot be mapped" in str(pair.down())
    assert len(os.listdir("/proc/self/fd")) <= known


def test_an_array_is_only_made_where_the_other_side_is_known_to_read_it(pair: Pair) -> None:
    pair.agree()
    assert pair.exports().empty((MORE,), np.dtype(np.uint8)) is None
    pair.until(lambda: len(pair.chosen) == 5)
    found = pair.exports().empty((MORE,), np.dtype(np.uint8))
    assert found is not None
    assert pair.exports().has(pair.exports().all.bytes_of(found))


def test_the_driver_is_asked_for_a_uuid_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.agree()
    calls, known = list[int](), pair.machine.cuda.properties
    monkeypatch.setattr(pair.machine.cuda, "properties", lambda gpu: calls.append(gpu) or known(gpu))
    for _ in range(10):
        pair.server.wake()
        pair.poll()
    assert not calls


def test_no_descriptor_is_sent_of_a_segment_that_was_given_back_meanwhile(pair: Pair) -> None:
    pair.agree()
    exports, (one, other) = pair.server._segments.gpu.exports, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert exports is not None
    exports.empty((MORE,), np.dtype(np.uint8))
    fd, offers = exports.segments[1].fd, pair.server._segments.gpu.offers(GpuPeer(), one)
    assert next(offers)["number"] == exports.segments[0].number
    exports.trim()
    os.dup2(other.fileno(), fd)  # Its number is another descriptor's now.
    assert not list(offers)
    os.close(fd)
    one.close()
    other.close()


def test_a_process_that_shares_no_more_has_its_gpus_memory_back(pair: Pair) -> None:
    pair.agree()
    exports = pair.exports().all
    array = exports.empty((SIZE,), np.dtype(np.uint8))
    size = pair.gpu.pool.size
    pair.server.close()
    assert exports.segments, "one is in use"
    del array
    pair.gpu.pool.trim()
    assert not exports.segments
    assert pair.gpu.pool.size <= size - (16 << 20)


PROGRAM = textwrap.dedent(
    """
    import sys
    sys.path[:0] = %r
    import cupy, numpy as np
    from transports import HELLO, LONG, endpoint
    from distrun_runtime.arrays import device
    from distrun_runtime.arrays.gpu_frames import readable
    from distrun_runtime.arrays.gpu_sharing import frames_of
    from distrun_runtime.arrays.shared_memory import Pool
    from distrun_runtime.transport.base import Arrived, Up
    from distrun_runtime.transport.host_paths import BulkTransport
    from distrun_runtime.transport.zeromq import ZmqTransport
    gpu, one, is_told = device.get("gpu:0"), BulkTransport(ZmqTransport(LONG, %r), %r, [Pool()]), False
    one.connect("server-0", endpoint(int(sys.argv[1])))
    while True:
        for event in one.poll(0.01):
            if isinstance(event, Up):
                one.send("server-0", HELLO)
            elif isinstance(event, Arrived) and not is_told:
                is_told = True
                one.proven("server-0")
            elif isinstance(event, Arrived):
                assert set(np.frombuffer(readable(event.frames[2]), np.float32)) == {float(bytes(event.frames[0]))}
        event = None
        exports = one.exports_to(["server-0"], gpu)
        array = None if exports is None else exports.empty((20000,), np.dtype(np.float32))
        if array is not None:
            gpu.write(array, np.full(20000, 5, np.float32))
            one.send("server-0", [b"5", b"", *frames_of([array])])
        array = None
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(3, 143, 7))
def test_a_process_that_is_killed_at_any_moment_leaves_the_other_one_its_gpu(moment: int) -> None:
    with gpus_of_process(Machine(1)) as machine:
        gpu, server, number = machine.gpus.get(0), BulkTransport(ZmqTransport(LONG, TOKEN), TOKEN, [Pool()]), 0
        argv = [sys.executable, "-c", PROGRAM % ([str(SUPPORT / "gpustandin"), str(SUPPORT)], TOKEN, TOKEN)]
        env = {**os.environ, "STANDIN_FAULT": "kill:%d" % moment}
        with subprocess.Popen([*argv, endpoint(server.bind("127.0.0.1")).rpartition(":")[2]], env=env) as other:
            server.share_gpu(gpu)
            total, link, is_down = gpu.zeros((SIZE,), np.dtype(np.float32)), "", False
            deadline = time.monotonic() + scaled(30)
            while not is_down and time.monotonic() < deadline:
                has_ended, events = other.poll() is not None, server.poll(0.01)
                if has_ended and not link and not events:
                    break  # It had no link yet.
                for event in events:
                    is_down |= isinstance(event, Down)
                    if isinstance(event, Arrived) and not link:
                        link = event.link
                        server.admitted(link)
                        server.send(link, WELCOME)
                        server.proven(link)
                    elif isinstance(event, Arrived):
                        with contextlib.suppress(KVError):  # It has ended before its values were there.
                            found = array_of(event.frames[2], np.dtype(np.float32))
                            gpu.sum([total, found], total)
                            number += 1
                    event = found = None
                exports = server.exports_to([link], gpu)
                array = None if exports is None else exports.empty((SIZE,), np.dtype(np.float32))
                if array is not None and not is_down:
                    gpu.sum([gpu.put(np.full(SIZE, number, np.float32))], array)
                    with contextlib.suppress(ConnectionError):
                        server.send(link, [str(number).encode(), b"", *frames_of([array])])
            assert other.wait() == -signal.SIGKILL
        assert set(gpu.host(total).tolist()) == {5.0 * number}
        while server._in_use and time.monotonic() < deadline:
            server.poll(0.01)
        assert not server._in_use
        server.close()
        del IN_USE[:]
        machine.finish()
