"""Sessions: whatever is cut, what was said arrives once and in order; a large body is never far ahead."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.contract import session
from distrun_runtime.contract.session import Session
from distrun_runtime.errors import WireError

COORDINATOR, AGENT = 0, 1
LARGE = bytes(range(23))
EVERYTHING = 1 << 40


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks and windows of a few bytes, so that a small conversation has all that a large one has."""
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CHUNK", 3)
    monkeypatch.setattr(session, "WINDOW", 7)
    monkeypatch.setattr(session, "ACK_FRAMES", 2)


class Pair:
    """Both ends of a session, and a wire between them that can be cut."""

    def __init__(self) -> None:
        self.ends = (Session(), Session())
        self.heard: tuple[list[session.Frame], list[session.Frame]] = ([], [])
        self.on_frame: Callable[[int, session.Frame], None] = lambda end, frame: None
        self.sent = [0, 0]
        """Bytes on the present connection, by who sent them."""
        self.connect()

    def connect(self) -> None:
        for end in self.ends:
            end.connect()
        self.sent = [0, 0]

    def cut(self) -> None:
        for end in self.ends:
            end.cut()

    def run(self, limits: Sequence[int] = (EVERYTHING, EVERYTHING)) -> bool:
        """Carry what is said until nothing is left to be carried (True), or an end has sent so many bytes (False)."""
        while any(end.is_ready for end in self.ends):
            for number, end in enumerate(self.ends):
                data = end.next()
                whole = self.sent[number] + len(data) <= limits[number]
                arrives = data[: max(0, limits[number] - self.sent[number])]
                self.sent[number] += len(arrives)
                for frame in self.ends[1 - number].feed(arrives):
                    self.heard[1 - number].append(frame)
                    self.on_frame(1 - number, frame)
                if not whole:
                    return False
        return True

    def kinds(self, end: int) -> list[str]:
        return [frame.type for frame in self.heard[end] if "chunk" not in frame.header]

    def large(self, end: int) -> bytes:
        """The large bodies that an end heard, one after the other; each chunk must be where it belongs."""
        found = b""
        offset = 0
        for frame in self.heard[end]:
            if "chunk" in frame.header:
                assert frame.header["chunk"] == offset
                offset = 0 if frame.header.get("last") else offset + len(frame.body)
                found += frame.body
        return found


def conversation() -> Pair:
    """A small one: commands, answers to them, output, a large body, and nobody who waits for the other."""
    pair = Pair()
    coordinator, agent = pair.ends

    def answer(end: int, frame: session.Frame) -> None:
        if frame.type == "spawn":
            agent.say({"type": "started", "task": frame.header["task"]})
            agent.say({"type": "output"}, b"out of " + frame.header["task"].encode())
        elif frame.type == "output":
            coordinator.say({"type": "ack"})
        elif frame.type == "ping":
            agent.say({"type": "pong"})

    pair.on_frame = answer
    coordinator.send_large({"type": "runtime"}, LARGE)
    coordinator.say({"type": "begin"})
    coordinator.say({"type": "spawn", "task": "a"})
    coordinator.say({"type": "ping"})
    coordinator.say({"type": "spawn", "task": "b"})
    agent.say({"type": "hello"})
    return pair


def check(pair: Pair) -> None:
    """Everything has arrived, once and in order."""
    assert [kind for kind in pair.kinds(AGENT) if kind not in ("ack", "ping")] == ["begin", "spawn", "spawn"]
    assert pair.kinds(AGENT).count("ack") == 2
    assert [kind for kind in pair.kinds(COORDINATOR) if kind != "pong"] == [
        "hello",
        *("started", "output", "started", "output"),
    ]
    assert [frame.body for frame in pair.heard[COORDINATOR] if frame.body] == [b"out of a", b"out of b"]
    assert pair.large(AGENT) == LARGE
    for end in (COORDINATOR, AGENT):
        numbers = [frame.header["seq"] for frame in pair.heard[end] if "seq" in frame.header]
        assert numbers == list(range(1, len(numbers) + 1))


def lengths() -> tuple[int, int]:
    """How many bytes each end sends if nothing is cut."""
    pair = conversation()
    assert pair.run()
    check(pair)
    return pair.sent[0], pair.sent[1]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("end", [COORDINATOR, AGENT])
def test_a_cut_at_any_byte_loses_nothing_and_repeats_nothing(end: int) -> None:
    for at in range(lengths()[end] + 1):
        pair = conversation()
        limits = [EVERYTHING, EVERYTHING]
        limits[end] = at
        pair.run(limits)
        pair.connect()
        assert pair.run()
        check(pair)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 700)), max_size=12))
def test_any_cuts_in_both_directions_lose_nothing_and_repeat_nothing(cuts: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shrink(monkeypatch)
        pair = conversation()
        for limits in cuts:
            pair.run(limits)
            pair.connect()
        assert pair.run()
        check(pair)


@pytest.mark.usefixtures("small")
def test_what_is_said_without_a_connection_is_sent_on_the_next() -> None:
    pair = Pair()
    assert pair.run()
    pair.cut()
    pair.ends[AGENT].say({"type": "exited"})
    pair.ends[AGENT].say({"type": "pong"})
    assert not pair.ends[AGENT].is_ready
    pair.connect()
    assert pair.run()
    assert pair.kinds(COORDINATOR) == ["exited"], "pings are of their moment"


def test_an_end_whose_first_connection_never_reached_the_other_goes_on() -> None:
    pair = Pair()
    pair.ends[AGENT].say({"type": "hello"})
    pair.ends[AGENT].next()  # lost
    pair.ends[AGENT].connect()  # the other end heard of nothing yet: for it, this is the first connection
    pair.ends[COORDINATOR].say({"type": "begin"})
    assert pair.run()
    assert (pair.kinds(COORDINATOR), pair.kinds(AGENT)) == (["hello"], ["begin"])


def test_frames_and_pings_overtake_a_large_body_in_their_order() -> None:
    pair = Pair()
    coordinator = pair.ends[COORDINATOR]
    coordinator.send_large({"type": "runtime"}, bytes(5 * session.WINDOW))
    for _ in range(2):
        pair.ends[AGENT].feed(coordinator.next())
    coordinator.say({"type": "spawn"})
    coordinator.say({"type": "stop"})
    coordinator.say({"type": "ping"})
    order = [session.Decoder().feed(coordinator.next())[0].type for _ in range(4)]
    assert order == ["ping", "spawn", "stop", "runtime"]


def test_no_more_of_a_large_body_leaves_than_the_credit_allows() -> None:
    coordinator, agent = Session(), Session()
    coordinator.connect()
    agent.connect()
    coordinator.send_large({"type": "runtime"}, bytes(10 * session.WINDOW))
    size = 0
    while coordinator.is_ready:
        data = coordinator.next()
        size += len(session.Decoder().feed(data)[0].body)
        agent.feed(data)
    assert size == session.WINDOW
    assert coordinator.held < session.WINDOW + 10_000, "a large body is read as it leaves"
    while agent.is_ready:
        coordinator.feed(agent.next())
    assert coordinator.is_ready
    assert coordinator.held == 0


@pytest.mark.parametrize("size", [0, 1, session.CHUNK, session.CHUNK + 1, 3 * session.CHUNK])
def test_a_large_body_comes_from_memory_a_file_or_pieces(size: int) -> None:
    body = bytes(index % 251 for index in range(size))
    for source in (body, io.BytesIO(body), [body[:10], b"", body[10:]]):
        pair = Pair()
        pair.ends[COORDINATOR].send_large({"type": "runtime", "digest": "ab"}, source)
        assert pair.run()
        assert pair.large(AGENT) == body
        last = pair.heard[AGENT][-1].header
        assert (last["last"], last["digest"]) == (True, "ab")
        assert not any("last" in frame.header for frame in pair.heard[AGENT][:-1])
        assert pair.ends[COORDINATOR].is_idle


def test_the_other_side_hears_that_a_source_cannot_be_read_on() -> None:
    def broken() -> Iterator[bytes]:
        yield b"first"
        raise OSError("the disk is gone")

    pair = Pair()
    pair.ends[COORDINATOR].send_large({"type": "runtime"}, broken())
    pair.ends[COORDINATOR].send_large({"type": "runtime"}, b"next")
    assert pair.run()
    first, second = pair.heard[AGENT]
    assert (first.body, first.header["last"], first.header["fault"]) == (b"first", True, "the disk is gone")
    assert second.body == b"next"


def test_what_the_other_side_does_not_take_is_kept_up_to_a_limit_that_the_error_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "LIMIT", 1000)
    end = Session()
    end.connect()
    end.say({"type": "output"}, bytes(600))
    end.next()
    with pytest.raises(WireError, match=r"6\d\d bytes in 1 frames are kept, and 'output' .* limit of 1000"):
        end.say({"type": "output"}, bytes(600))
    assert end.held < 1000


def test_frames_are_kept_until_they_are_acknowledged_which_a_ping_brings_about() -> None:
    pair = Pair()
    coordinator, agent = pair.ends
    agent.say({"type": "hello"}, bytes(5000))
    assert pair.run()
    assert agent.held > 5000
    coordinator.say({"type": "ping"})
    agent.say({"type": "pong"})
    assert pair.run()
    assert agent.held == 0
    assert agent.is_acknowledged


def test_the_last_frame_is_acknowledged_at_once() -> None:
    pair = Pair()
    pair.ends[AGENT].say({"type": "bye"})
    assert pair.run()
    assert pair.ends[AGENT].is_acknowledged


def test_many_frames_are_acknowledged_without_a_ping() -> None:
    pair = Pair()
    for _ in range(20):
        pair.ends[AGENT].say({"type": "output"}, bytes(64 * 1024))
        assert pair.run()
        assert pair.ends[AGENT].held <= session.ACK_BYTES + 64 * 1024 + 1000


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ({"type": "spawn", "seq": 2}, "frame 2 of the session; the last one was 0"),
        ({"type": "spawn", "seq": "1"}, "frame '1'"),
        ({"type": "received", "seq": 1}, "frame 1 is said to have come"),
        ({"type": "received"}, "malformed 'received'"),
        ({"type": "credit", "bytes": "x"}, "malformed 'credit'"),
        ({"type": "resume", "received": 0}, "malformed 'resume'"),
    ],
)
def test_frames_that_fit_no_session_are_refused(frame: dict[str, object], words: str) -> None:
    end = Session()
    end.connect()
    with pytest.raises(WireError, match=words):
        end.feed(session.encode(frame))


def test_what_is_no_whole_frame_yet_waits_and_what_is_too_long_is_refused() -> None:
    ping = session.encode({"type": "ping"})
    assert session.first(ping[:-1]) == (None, ping[:-1])
    assert session.first(ping + b"x")[1] == b"x"
    with pytest.raises(WireError, match=r"a frame header of \d+ bytes is over the limit"):
        session.encode({"type": "text", "text": "x" * session.HEADER_LIMIT})


def test_a_frame_that_comes_twice_is_taken_once_and_acknowledged_again() -> None:
    end = Session()
    end.connect()
    frame = session.encode({"type": "spawn", "seq": 1})
    assert [len(end.feed(frame)) for _ in range(2)] == [1, 0]
    assert session.first(end.next())[0] == session.Frame({"type": "received", "seq": 1})


def test_of_pings_that_cannot_leave_the_newest_are_kept_and_nothing_leaves_without_a_connection() -> None:
    end = Session()
    assert end.next() == b""
    end.connect()
    for number in range(session.WAITING + 5):
        end.say({"type": "ping", "number": number})
    (oldest,) = Session().feed(end.next())
    assert oldest.header["number"] == 5


def test_an_end_that_lost_its_memory_cannot_go_on() -> None:
    pair = Pair()
    pair.ends[AGENT].say({"type": "bye"})
    assert pair.run()
    other = Session()
    other.connect()
    pair.ends[AGENT].connect()
    for _ in range(2):
        other.feed(pair.ends[AGENT].next())
    with pytest.raises(WireError, match="frames after 0 are asked for; those up to 1"):
        pair.ends[AGENT].feed(other.next())


def frame(header: bytes) -> bytes:
    return struct.pack(">I", len(header)) + header


def test_golden_frames_of_the_session() -> None:
    """docs/protocol.md shows these bytes."""
    end = Session()
    end.connect()
    end.feed(session.encode({"type": "hello", "seq": 1}) + session.encode({"type": "ping", "n": 1}))
    assert end.next() == frame(b'{"seq":1,"type":"received"}')
    end.say({"type": "spawn", "task": "worker-0"})
    assert end.next() == frame(b'{"seq":1,"task":"worker-0","type":"spawn"}')
    end.connect()
    assert end.next() == frame(b'{"credit":1048576,"received":1,"type":"resume"}')
    end.feed(session.encode({"type": "resume", "received": 0, "credit": 1048576}))
    assert end.next() == frame(b'{"seq":1,"task":"worker-0","type":"spawn"}')
    end.send_large({"type": "runtime", "digest": "ab"}, b"PK")
    assert end.next() == frame(b'{"chunk":0,"digest":"ab","last":true,"seq":2,"size":2,"type":"runtime"}') + b"PK"
    proof = session.proof("key", session.AGENT, "00", "11")
    assert proof == "ff52a65232f1e6227f800d5b7e2085ca7b3e862dc3213737a096ff4ed88efb7c"
    assert session.is_proof(proof, "key", session.AGENT, "00", "11")
    assert not session.is_proof(proof, "key", session.COORDINATOR, "00", "11")
