"""Large frames in shared memory: when that is agreed on, what travels then, and when the memory is free again."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupts import interrupted
from transports import DEADLINE_S, LONG, closed_at_the_end, endpoint, has, until, welcomed

from distrun_runtime.arrays.shared_memory import Pool, seal
from distrun_runtime.transport import host_paths, host_segments
from distrun_runtime.transport.base import Arrived, Down, PathChosen, Released
from distrun_runtime.transport.direct import DirectTransport
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.host_segments import NotShared, Segments
from distrun_runtime.transport.zeromq import ZmqTransport

TOKEN = b"a secret of this job"


class Seen(ZmqTransport):
    """Keeps what really travels as messages."""

    def __init__(self) -> None:
        super().__init__(LONG, TOKEN)
        self.sent: list[list[bytes]] = []

    def send(self, link: str, frames: Any) -> Any:
        self.sent.append([bytes(frame) for frame in frames])
        return super().send(link, frames)


class Pair:
    """An acceptor and an opener in this process, which have welcomed each other."""

    def __init__(self, *, streams: bool = False, **more: Any) -> None:
        self.pools = Pool(), Pool()
        self.wires = Seen(), Seen()
        inner: Any = [DirectTransport(wire, TOKEN) for wire in self.wires] if streams else self.wires
        self.acceptor, self.opener = (
            BulkTransport(wire, TOKEN, [pool], **more) for wire, pool in zip(inner, self.pools, strict=True)
        )
        self.link = welcomed(self.acceptor, self.opener)

    def agree(self) -> list[PathChosen]:
        """Let both choose their paths; return what each has chosen."""
        self.opener.proven("server-0")
        acceptor, opener = [], []
        deadline = time.monotonic() + DEADLINE_S
        while not (acceptor and opener):
            assert time.monotonic() < deadline
            acceptor += [event for event in self.acceptor.poll(0.02) if isinstance(event, PathChosen)]
            opener += [event for event in self.opener.poll(0.02) if isinstance(event, PathChosen)]
        return [*acceptor, *opener]

    def array(self, size: int = 100_000, value: float = 1.0, pool: int = 1) -> Any:
        """Return an array in the shared memory of the opener (1) or acceptor (0)."""
        array = self.pools[pool].empty((size,), np.dtype(np.float32))
        array[...] = value
        return array

    def pass_on(self, *frames: Any) -> tuple[Any, Arrived]:
        """Send from opener to acceptor; return the lease, and what arrived."""
        lease = self.opener.send("server-0", list(frames))
        [arrived] = [event for event in until(self.acceptor, has(Arrived), self.opener) if isinstance(event, Arrived)]
        return lease, arrived

    def close(self) -> None:
        self.opener.close()
        self.acceptor.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    with closed_at_the_end(Pair) as make:
        yield make


@pytest.fixture
def one(pair: Callable[..., Pair]) -> Pair:
    """A pair that has agreed to share memory."""
    made = pair()
    made.agree()
    return made


def bytes_of(array: Any) -> memoryview:
    data: memoryview = array.reshape(-1).view(np.uint8).data
    return data


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_large_frame_in_shared_memory_is_read_where_it_is(one: Pair, way: str) -> None:
    sender, receiver, link = (
        (one.opener, one.acceptor, "server-0") if way == "out" else (one.acceptor, one.opener, one.link)
    )
    array = one.array(pool=1 if way == "out" else 0)
    sender.send(link, [b"head", bytes_of(array), b"tail"])
    [arrived] = [event for event in until(receiver, has(Arrived), sender) if isinstance(event, Arrived)]
    head, frame, tail = arrived.frames
    assert (bytes(head), bytes(tail)) == (b"head", b"tail")
    values = np.frombuffer(frame, np.float32)
    assert np.array_equal(values, array)
    array[17] = 42.0
    assert values[17] == 42.0, "it was copied"
    assert memoryview(frame).readonly
    assert host_segments.is_shared(frame)
    assert max(len(each) for each in one.wires[1 if way == "out" else 0].sent[-1]) < 200


def test_who_takes_messages_before_they_arrive_gets_them_whole(pair: Callable[..., Pair]) -> None:
    one = pair(streams=True)
    one.opener.proven("server-0")
    until(one.acceptor, has(PathChosen, 2), one.opener)
    until(one.opener, lambda events: one.opener.shares("server-0"), one.acceptor)
    taken: list[Any] = []

    def sink(link: str, frames: Any) -> Any:
        return taken.append(frames) if frames[0] == b"known" else frames

    one.acceptor.pour(sink, lambda link, data: False)
    for head in (b"known", b"odd"):
        one.opener.send("server-0", [head, b"", bytes_of(one.array())])
    [arrived] = until(one.acceptor, has(Arrived), one.opener)
    for frames in (*taken, arrived.frames):
        assert host_segments.is_shared(frames[2])
        assert np.array_equal(np.frombuffer(frames[2], np.float32), one.array())
    assert [bytes(frames[0]) for frames in (*taken, arrived.frames)] == [b"known", b"odd"]


def test_memory_is_lent_until_its_receiver_has_dropped_it(one: Pair) -> None:
    first, second = one.array(), one.array()
    lease, arrived = one.pass_on(b"", bytes_of(first), bytes_of(second))
    assert not lease.is_over
    kept = np.frombuffer(arrived.frames[2], np.float32)[5:]
    del arrived
    gc.collect()
    assert not lease.is_over
    del kept
    gc.collect()
    assert lease.is_over
    assert until(one.opener, has(Released), one.acceptor) == [Released(lease)]


def test_memory_that_is_lent_stays_so_if_a_later_send_is_interrupted_anywhere(one: Pair) -> None:
    lease, arrived = one.pass_on(b"", bytes_of(one.array()))
    array, at = one.array(), 1
    while interrupted(lambda: one.opener.send("server-0", [b"", bytes_of(array)]), at):
        at += 1
        assert lease in one.opener._in_use
    assert at > 10
    del arrived


def test_a_send_that_is_interrupted_anywhere_keeps_nothing_unless_its_message_has_left(
    pair: Callable[..., Pair],
) -> None:
    one = pair(streams=True)
    one.opener.proven("server-0")
    is_ready = [one.opener.shares, one.opener.direct.is_open]
    until(one.opener, lambda events: all(each("server-0") for each in is_ready), one.acceptor)
    array, at, free = one.array(), 1, one.opener._segments.peers["server-0"].free
    count = len(free)
    while interrupted(lambda: one.opener.send("server-0", [bytearray(b"head"), bytes_of(array)]), at):
        at += 1
        for each in (one.acceptor, one.opener):
            each.poll(0.0)
    one.opener.send("server-0", [b"last", bytes_of(array)])
    until(one.acceptor, lambda events: any(bytes(each.frames[0]) == b"last" for each in events), one.opener)
    gc.collect()
    one.opener.poll(0.0)
    assert at > 10
    assert one.opener._in_use == []
    assert len(free) == len(set(free)) == count


def test_a_frame_is_not_taken_for_one_that_had_its_id_before(one: Pair) -> None:
    first, second = bytes_of(one.array(value=3.0)), bytes_of(one.array(value=9.0))
    one.pass_on(b"", first)
    found = one.opener._segments._found
    found[id(second)] = found[id(first)]  # as if nobody had heard of the end of that one
    _, arrived = one.pass_on(b"", second)
    assert (np.frombuffer(arrived.frames[1], np.float32) == 9.0).all()


def test_memory_that_is_lent_is_not_given_to_anybody_else(one: Pair) -> None:
    array = one.array(value=3.0)
    lease, arrived = one.pass_on(b"", bytes_of(array))
    del array
    gc.collect()
    others = [one.array(value=9.0) for _ in range(20)]
    assert (np.frombuffer(arrived.frames[1], np.float32) == 3.0).all()
    del arrived
    gc.collect()
    assert lease.is_over
    assert len({each.__array_interface__["data"][0] for each in others}) == 20


def test_small_frames_and_frames_of_other_memory_travel_as_bytes(one: Pair) -> None:
    small, private = one.array(host_paths.LARGE_BYTES // 4 - 1), np.ones(100_000, np.float32)
    _, arrived = one.pass_on(b"", bytes_of(small), bytes_of(private))
    assert [memoryview(frame).nbytes for frame in arrived.frames] == [0, small.nbytes, private.nbytes]
    assert [len(frame) for frame in one.wires[1].sent[-1]] == [0, small.nbytes, private.nbytes]


def test_messages_keep_their_order_and_contents_whatever_way_their_frames_go(pair: Callable[..., Pair]) -> None:
    one = pair(large_bytes=1)
    one.agree()
    chance = random.Random(5)
    expected, kept = [], []
    for number in range(200):
        frames: list[Any] = [b"%d" % number]
        for _ in range(chance.randrange(5)):
            data = chance.randbytes(chance.choice([0, 1, 7, 4096, 70_000]))
            if chance.random() < 0.6 and data:
                array = one.pools[1].empty((len(data),), np.dtype(np.uint8))
                array[...] = np.frombuffer(data, np.uint8)
                kept.append(array)
                frames.append(array.data)
            else:
                frames.append(data)
        expected.append([bytes(frame) for frame in frames])
        one.opener.send("server-0", frames)
    events = until(one.acceptor, has(Arrived, 200), one.opener)
    assert [[bytes(frame) for frame in event.frames] for event in events if isinstance(event, Arrived)] == expected


def test_more_messages_than_there_are_slots_travel_as_bytes(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_segments, "SLOTS", host_segments.GPU_SLOTS + 3)
    one = pair()
    one.agree()
    array = one.array(value=2.0)
    kept = [one.pass_on(b"", bytes_of(array)) for _ in range(5)]
    assert all((np.frombuffer(arrived.frames[1], np.float32) == 2.0).all() for _, arrived in kept)
    assert [len(frames[-1]) for frames in one.wires[1].sent[-5:]] == [0, 0, 0, array.nbytes, array.nbytes]
    del kept
    gc.collect()
    one.opener.poll(0)
    one.pass_on(b"", bytes_of(array))
    assert len(one.wires[1].sent[-1][-1]) == 0


def mapped_by(one: Pair, way: str) -> dict[int, Any]:
    """Return the segments of the opener that the acceptor has mapped (`out`), or the other way round."""
    side, link = (one.acceptor, one.link) if way == "out" else (one.opener, "server-0")
    return side._segments.peers[link].mapped


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("way", ["in", "out"])
def test_segments_that_were_reserved_are_mapped_before_a_message_names_them(
    pair: Callable[..., Pair], way: str, is_early: bool
) -> None:
    one = pair()
    pool = one.pools[1 if way == "out" else 0]
    if is_early:
        assert pool.reserve(1 << 20)
    one.agree()
    if not is_early:
        one.array(pool=1 if way == "out" else 0)  # by need: it is not announced
        assert not mapped_by(one, way)
        assert pool.reserve(1 << 25)
    deadline = time.monotonic() + DEADLINE_S
    while not mapped_by(one, way):
        assert time.monotonic() < deadline
        one.opener.poll(0.01)
        one.acceptor.poll(0.01)
    mapped = dict(mapped_by(one, way))
    assert set(mapped) == {segment.number for segment in pool.ahead}
    if way == "out":
        array = one.array(1 << 18, value=2.0)
        arrived = one.pass_on(b"", bytes_of(array))[1]
        assert (np.frombuffer(arrived.frames[1], np.float32) == 2.0).all()
        assert mapped_by(one, way) == mapped


def test_a_peer_that_announces_segments_which_it_did_not_send_is_disconnected(one: Pair) -> None:
    one.opener._say("server-0", host_paths.BulkKind.SEGMENTS, {"segments": {"numbers": [1 << 20]}})
    [down] = [event for event in until(one.acceptor, has(Down), one.opener) if isinstance(event, Down)]
    assert "the descriptor of a segment did not come" in down.reason


def test_a_process_that_cannot_share_says_why_and_goes_on_with_messages(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    one = pair()
    chosen = one.agree()
    assert {event.path for event in chosen} == {"messages"}
    assert all("no shared memory of the kind" in event.reason for event in chosen)
    array = np.ones(100_000, np.float32)
    assert np.array_equal(np.frombuffer(one.pass_on(b"", bytes_of(array))[1].frames[1], np.float32), array)


def test_a_socket_that_is_out_of_reach_is_another_place(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a process in another network namespace."""
    offer = Segments.offer
    monkeypatch.setattr(Segments, "offer", lambda self, link: {**offer(self, link), "socket": "distrun-elsewhere"})
    chosen = pair().agree()
    assert {event.path for event in chosen} == {"messages"}
    assert all("its socket cannot be reached from here" in event.reason for event in chosen)


def test_a_process_without_the_token_is_not_taken_in(pair: Callable[..., Pair]) -> None:
    """It has seen the offer, but cannot prove that it belongs to the job."""
    one = pair()
    one.opener._segments._token = b"another secret"
    chosen = one.agree()
    assert [event.path for event in chosen] == ["messages", "messages"]
    assert chosen[0].reason == "no process with the right proof came to the socket"


def test_strangers_at_the_socket_get_nothing_and_keep_nobody_out(pair: Callable[..., Pair]) -> None:
    one = pair()
    acceptor = one.acceptor._segments
    offer = acceptor.offer("in:00")
    strangers = []
    for said in (b"", b"x" * 64, b"\xff" * 300, b"GET / HTTP/1.1"):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stranger.connect(b"\0" + offer["socket"].encode())
        if said:
            stranger.send(said)
        strangers.append((said, stranger))
    assert [event.path for event in one.agree()] == ["segments", "segments"]
    for said, stranger in strangers:
        stranger.settimeout(DEADLINE_S)
        assert not said or stranger.recv(10) == b"", "who has said something wrong is sent off"
        stranger.close()


def test_who_has_connected_and_not_proven_itself_yet_is_waited_for(pair: Callable[..., Pair]) -> None:
    """The answer of another process may come in between."""
    one = pair()
    acceptor, fast = one.acceptor._segments, Segments(TOKEN, [Pool()])
    first, second = acceptor.offer("in:aa"), acceptor.offer("in:bb")
    between = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    between.connect(b"\0" + first["socket"].encode())
    fast.take("server-1", second)
    acceptor.taken("in:bb")
    board = host_segments._Board.made(bytes.fromhex(first["nonce"]))
    host_segments._tell(between, acceptor._proof(bytes.fromhex(first["nonce"])), board.fd)
    acceptor.taken("in:aa")
    assert acceptor.is_open("in:aa")
    between.close()
    fast.close()


def test_a_proof_is_good_for_one_connection(pair: Callable[..., Pair]) -> None:
    """Who has overheard one cannot come a second time with it."""
    one = pair()
    acceptor, opener = one.acceptor._segments, Segments(TOKEN, [Pool()])
    offer = acceptor.offer("in:aa")
    opener.take("server-1", offer)
    replay = Segments(TOKEN, [Pool()])
    replay.take("server-1", offer)
    acceptor.taken("in:aa")
    opener.ready("server-1", "")
    with pytest.raises(NotShared, match="board"):
        replay.ready("server-1", "")
    later = Segments(TOKEN, [Pool()])
    later.take("server-1", offer)
    acceptor.offer("in:bb")
    with pytest.raises(NotShared, match="no process with the right proof"):
        acceptor.taken("in:bb")
    for each in (opener, replay, later):
        each.close()


def test_holes_in_what_a_peer_sends_are_not_filled_before_they_are_read(one: Pair) -> None:
    """The memory would be that of this process."""
    fd = os.memfd_create("sparse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 1 << 20)
    seal(fd, is_read_only=True)
    host_segments._tell(one.opener._segments.peers["server-0"].socket, "999 1048576", fd)
    one.acceptor._segments.map(one.link, [999])
    assert os.fstat(fd).st_blocks == 0
    os.close(fd)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@contextlib.contextmanager
def another_user(program: str, *words: str) -> Iterator[str]:
    """Let another user run a program on, from the line that it prints; what is imported, root imports before."""
    code = "import distrun_runtime.transport.host_segments, numpy, os; os.setgid(65534); os.setuid(65534)\n"
    command = [sys.executable, "-c", code + textwrap.dedent(program), *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as other:
        yield other.stdout.readline()
        other.stdin.close()


@only_root
def test_another_user_at_the_socket_gets_nothing_even_with_the_right_proof(pair: Callable[..., Pair]) -> None:
    acceptor = pair().acceptor._segments
    offer = acceptor.offer("in:00")
    program = """
        import sys
        from distrun_runtime.transport import host_segments
        from distrun_runtime.arrays.shared_memory import Pool
        host_segments.check_user = lambda one: None
        host_segments.Segments(%r, [Pool()]).take("server-0", {"socket": sys.argv[1], "nonce": sys.argv[2]})
        print("sent", flush=True)
        sys.stdin.read()
        """
    with another_user(program % TOKEN, offer["socket"], offer["nonce"]) as said:
        assert said == "sent\n"
        with pytest.raises(NotShared, match="no process with the right proof"):
            acceptor.taken("in:00")


@only_root
def test_connections_of_another_user_to_the_socket_take_no_shared_memory_away_from_later_workers(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fill the queue of connections that nobody has accepted, until the next worker comes."""
    monkeypatch.setattr(host_segments, "ACCEPT_S", 0.0)
    monkeypatch.setattr(host_paths, "LOOK_S", 0.0)
    one = pair()
    one.agree()
    acceptor = one.acceptor._segments
    knock = """
        import socket, sys
        kept = []
        try:
            while len(kept) < 1000:
                kept.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                kept[-1].setblocking(False)
                kept[-1].connect(b"\\0" + sys.argv[1].encode())
        except BlockingIOError:
            print("full", flush=True)
        sys.stdin.read()
        """
    with another_user(knock, acceptor._name.decode()) as said:
        assert said == "full\n"
        one.acceptor.poll(0)
        later = Segments(TOKEN, [Pool()])
        later.take("server-0", acceptor.offer("in:bb"))
        acceptor.taken("in:bb")
        later.ready("server-0", "")
        assert later.is_open("server-0")
        later.close()


GARBLED = {
    "a segment that was never handed over": struct.pack("<IIQQ", 1, 0xFFFFFFFF, 0, 8),
    "bytes behind the end of a segment": struct.pack("<IIQQ", 1, 1, 1 << 40, 8),
    "a frame that the message does not have": struct.pack("<IIQQ", 7, 1, 0, 8),
    "half a reference": b"\0" * 7,
}


@pytest.mark.parametrize("what", GARBLED)
def test_a_reference_that_is_wrong_ends_the_connection_and_not_the_node(one: Pair, what: str) -> None:
    array = one.array()
    one.pass_on(b"", bytes_of(array))
    table = GARBLED[what].replace(struct.pack("<II", 1, 1), struct.pack("<II", 1, next(iter(_peer(one).mapped))))
    head = struct.pack("<4sBBHII", b"DRKB", 1, 4, 1, 0, 1) + table
    one.wires[1].send("server-0", [head, b"", b""])
    [down] = [event for event in until(one.acceptor, has(Down)) if isinstance(event, Down)]
    assert down.link == one.link
    assert down.reason.startswith("what it sent cannot be read: ")
    assert not one.acceptor.shares(one.link)
    [down] = [event for event in until(one.opener, has(Down), one.acceptor) if isinstance(event, Down)]
    assert down.link == "server-0"
    assert down.reason.startswith("the other side says: what it sent cannot be read: ")
    with pytest.raises(ConnectionError):
        one.opener.send("server-0", [b"more"])


def _peer(one: Pair) -> Any:
    return one.acceptor._segments.peers[one.link]


@pytest.mark.parametrize("kind", [1, 2, 3, 4, 9])
def test_nobody_is_heard_before_it_has_proven_itself(kind: int) -> None:
    """What a stranger says as one of these messages reaches the loop, which refuses it as bad bytes."""
    acceptor, opener = (BulkTransport(ZmqTransport(LONG, TOKEN), TOKEN, [Pool()]) for _ in range(2))
    said = [struct.pack("<4sBBHII", b"DRKB", 1, kind, 0, 0, 0), b'{"segments": {}}']
    opener.connect("server-0", endpoint(acceptor.bind("127.0.0.1")))
    opener.send("server-0", said)
    [arrived] = [event for event in until(acceptor, has(Arrived), opener) if isinstance(event, Arrived)]
    assert [bytes(frame) for frame in arrived.frames] == said
    opener.close()
    acceptor.close()


PROGRAM = textwrap.dedent(
    """
    import os, sys, time
    import numpy as np
    sys.path[:0] = %r
    from transports import LONG, HOST, endpoint, HELLO
    from distrun_runtime.arrays.shared_memory import Pool
    from distrun_runtime.transport.base import Arrived, PathChosen, Up
    from distrun_runtime.transport.host_paths import BulkTransport
    from distrun_runtime.transport.zeromq import ZmqTransport
    pool = Pool()
    one = BulkTransport(ZmqTransport(LONG, %r), %r, [pool])
    one.connect("server-0", endpoint(int(sys.argv[1])))
    kept, is_told = [], False
    while True:
        for event in one.poll(0.05):
            if isinstance(event, Up):
                one.send("server-0", HELLO)
            elif isinstance(event, Arrived) and not is_told:
                is_told = True
                one.proven("server-0")
            elif isinstance(event, Arrived):
                kept.append(event)
                if bytes(event.frames[0]) == b"fork":
                    child = os.fork()
                    if not child:
                        kept.clear()  # The child drops what its parent still reads.
                        os._exit(0)
                    os.waitpid(child, 0)
                if bytes(event.frames[0]) == b"drop":
                    kept.clear()
                    del event
                one.send("server-0", [b"seen"])
            elif isinstance(event, PathChosen):
                array = pool.empty((50000,), np.dtype(np.float32))
                array[...] = 5.0
                one.send("server-0", [event.path.encode(), array.view(np.uint8).data])
    """
)


class Other:
    """An opener in another process, which keeps what it is sent."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.here = BulkTransport(ZmqTransport(LONG, TOKEN), TOKEN, [self.pool])
        here = Path(__file__).resolve().parents[2] / "support"
        program = PROGRAM % ([str(here)], TOKEN, TOKEN)
        port = self.here.bind("127.0.0.1")
        self.process = subprocess.Popen([sys.executable, "-c", program, str(port)])
        [hello] = self.arrived()
        self.link = hello.link
        self.here.admitted(self.link)
        self.here.send(self.link, [b"welcome"])
        self.here.proven(self.link)
        [self.first] = self.arrived()

    def arrived(self) -> list[Arrived]:
        return [event for event in until(self.here, has(Arrived)) if isinstance(event, Arrived)]

    def lend(self, word: bytes = b"") -> Any:
        """Send it an array; return the lease when it has seen it."""
        array = self.pool.empty((100_000,), np.dtype(np.float32))
        assert array is not None
        lease = self.here.send(self.link, [word, bytes_of(array)])
        self.arrived()
        return lease

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.here.close()


@pytest.fixture
def other() -> Iterator[Other]:
    made = Other()
    yield made
    made.end()


def test_what_a_killed_process_has_sent_stays_whole_and_what_it_read_is_free_again(other: Other) -> None:
    assert bytes(other.first.frames[0]) == b"segments"
    lease = other.lend()
    assert not lease.is_over
    other.process.kill()
    until(other.here, has(Down))
    until(other.here, lambda events: lease.is_over)
    assert (np.frombuffer(other.first.frames[1], np.float32) == 5.0).all()


def test_memory_that_a_stopped_process_reads_stays_lent_after_its_connection_was_given_up(other: Other) -> None:
    """It may go on, and must not find other values in it then."""
    lease = other.lend()
    os.kill(other.process.pid, 19)
    other.here.disconnect(other.link)
    for _ in range(20):
        other.here.poll(0.01)
    assert not lease.is_over
    other.process.kill()
    until(other.here, lambda events: lease.is_over)


def test_a_forked_child_that_drops_what_its_parent_reads_releases_nothing(other: Other) -> None:
    lease = other.lend(b"fork")
    other.here.poll(0.05)
    assert not lease.is_over
    other.lend(b"drop")
    until(other.here, lambda events: lease.is_over)


def test_nothing_is_left_behind() -> None:
    """No descriptor, no mapping, no name of a socket."""

    def left() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), Path("/proc/self/maps").read_text().count("distrun")

    before, names = left(), []
    for _ in range(3):
        one = Pair()
        one.agree()
        array = one.array()
        one.pass_on(b"", bytes_of(array))
        names.append("@" + one.acceptor._segments._name.decode())
        assert names[-1] in Path("/proc/net/unix").read_text()
        one.close()
        del one, array
    assert left() == before
    assert not any(name in Path("/proc/net/unix").read_text() for name in names)


@pytest.mark.parametrize("way", ["named", "announced", "told"])
def test_a_segment_that_was_given_back_is_unmapped_by_who_had_it(
    pair: Callable[..., Pair], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distrun_runtime.arrays.shared_memory.FIRST_BYTES", 1 << 16)
    one = pair()
    one.agree()
    pool, mapped = one.pools[1], one.acceptor._segments.peers[one.link].mapped
    first = one.array(100)
    if way == "named":
        lease, arrived = one.pass_on(b"", bytes_of(one.array()))
        pool.trim()
        one.opener.poll(0)
        assert len(pool.numbers) == len(mapped) + 1 == 2, "it is read"
        del arrived
        gc.collect()
        assert lease.is_over
    elif way == "announced":
        assert pool.reserve(1 << 20)
        pool.unreserve()
    else:  # Its descriptor was sent, and no message has named it yet.
        assert one.opener._segments.refer("server-0", bytes_of(one.array())) is not None
    pool.trim()
    lease, arrived = one.pass_on(b"", bytes_of(one.array(30_000)))
    assert len(pool.numbers) == 2
    deadline = time.monotonic() + DEADLINE_S
    while not set(mapped) < pool.numbers and time.monotonic() < deadline:
        one.opener.poll(0.02)
        one.acceptor.poll(0.02)
    assert len(mapped) == 1
    assert set(mapped) < pool.numbers
    assert np.array_equal(np.frombuffer(arrived.frames[1], np.float32), np.ones(30_000, np.float32))
    assert (first == 1).all()
