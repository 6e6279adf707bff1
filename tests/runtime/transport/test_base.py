"""What `transport.base` promises, for each transport: alone, inside `resend`, and inside `faults` that injects none."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from inproc import InprocNetwork
from ports import free_port
from slowness import scaled
from transports import DEADLINE_S, HOST, LONG, agree, endpoint, frames_of, has, until, welcomed

from distrun_runtime.arrays.shared_memory import Pool
from distrun_runtime.transport import base, zeromq
from distrun_runtime.transport.base import Arrived, Down, Event, Released, Transport, Up
from distrun_runtime.transport.direct import DirectTransport
from distrun_runtime.transport.faults import Faults, Faulty
from distrun_runtime.transport.host_paths import BulkTransport
from distrun_runtime.transport.resend import Resending
from distrun_runtime.transport.zeromq import ZmqTransport

Make = Callable[[], Transport]

AROUND: dict[str, Callable[[Transport], Transport]] = {
    "alone": lambda inner: inner,
    "resend": lambda inner: Resending(inner, 30.0),
    "faults": lambda inner: Faulty(inner, Faults(), "worker-0"),
    "resend-faults": lambda inner: Resending(Faulty(inner, Faults(), "worker-0"), 30.0),
}


@pytest.fixture(params=["inproc", "zeromq", "bulk", "direct"])
def inner(request: pytest.FixtureRequest) -> Make:
    """Makes transports that can reach each other."""
    if request.param == "bulk":
        return lambda: BulkTransport(ZmqTransport(LONG), b"", [Pool()], large_bytes=1)
    if request.param == "direct":
        return lambda: BulkTransport(DirectTransport(ZmqTransport(LONG), b""), b"", [Pool()], large_bytes=1)
    return InprocNetwork().transport if request.param == "inproc" else lambda: ZmqTransport(LONG)


@pytest.fixture(params=list(AROUND))
def make(request: pytest.FixtureRequest, inner: Make, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes transports of one kind; closes them at the end."""
    monkeypatch.setattr(zeromq, "PROBE_S", 0.1)  # an acceptor sees by its probes that a connection has ended
    made: list[Transport] = []

    def one() -> Transport:
        made.append(AROUND[request.param](inner()))
        return made[-1]

    one.paths = {"bulk": 1, "direct": 2}.get(request.node.callspec.params["inner"], 0)  # type: ignore[attr-defined]
    yield one
    for transport in made:
        transport.close()


def linked(make: Make) -> tuple[Transport, Transport, str]:
    """Return (acceptor, opener, the acceptor's name of the connection) of a connection that has chosen its paths."""
    acceptor, opener = make(), make()
    link = welcomed(acceptor, opener)
    opener.proven("server-0")
    agree(acceptor, opener, getattr(make, "paths", 0))
    return acceptor, opener, link


def arrived(transport: Transport, count: int, *others: Transport) -> list[Arrived]:
    """Return the next messages, at least so many."""
    return [event for event in until(transport, has(Arrived, count), *others) if isinstance(event, Arrived)]


def test_a_connection_comes_up_and_carries_frames_both_ways(make: Make) -> None:
    acceptor, opener, link = linked(make)
    assert link.startswith("in:")
    opener.send("server-0", [b"request", b""])
    [request] = arrived(acceptor, 1, opener)
    assert (request.link, frames_of(request)) == (link, [b"request", b""])
    acceptor.send(link, [b"one", b"", bytearray(b"three"), memoryview(b"four")])
    [answer] = arrived(opener, 1, acceptor)
    assert (answer.link, frames_of(answer)) == ("server-0", [b"one", b"", b"three", b"four"])


def test_a_message_of_many_frames_arrives_whole(make: Make) -> None:
    acceptor, opener, _ = linked(make)
    frames = [b"%d" % number * (number % 7) for number in range(3000)]
    opener.send("server-0", [b"head", *frames])
    [request] = arrived(acceptor, 1, opener)
    assert frames_of(request) == [b"head", *frames]


def test_several_openers_are_told_apart(make: Make) -> None:
    acceptor = make()
    port = acceptor.bind(HOST)
    openers = [make() for _ in range(3)]
    for opener in openers:
        opener.connect("s", endpoint(port))
        until(opener, has(Up), acceptor)
    for number, opener in enumerate(openers):
        opener.send("s", [b"%d" % number, b""])
    links = {frames_of(event)[0]: event.link for event in arrived(acceptor, 3, *openers)}
    assert len(set(links.values())) == 3
    for mark, link in links.items():
        acceptor.send(link, [mark, b""])
    for number, opener in enumerate(openers):
        assert [frames_of(event)[0] for event in arrived(opener, 1)] == [b"%d" % number]


def test_large_frames_arrive_whole_and_their_release_is_told_once(make: Make) -> None:
    """At once, by the lease that `send` returns, or later by an event with that lease."""
    acceptor, opener, _ = linked(make)
    large = [bytearray(os.urandom(1 << 20)) * 8, bytearray(b"x" * 100_000)]
    lease = opener.send("server-0", [b"head", b"", *large])
    expected = [] if lease.is_over else [lease]
    is_here = False
    events: list[Event] = []
    deadline = time.monotonic() + DEADLINE_S
    while not (is_here and has(Released, len(expected))(events)):
        assert time.monotonic() < deadline
        for request in acceptor.poll(0.01):
            assert isinstance(request, Arrived)
            assert frames_of(request) == [b"head", b"", *large]
            is_here = True
            del request  # It may be in the opener's memory.
        events += opener.poll(0.01)
    assert lease.is_over
    for _ in range(5):
        events += opener.poll(0.01)
    assert [event.lease for event in events if isinstance(event, Released)] == expected


def test_a_buffer_that_is_written_after_its_release_arrives_as_it_was_sent(make: Make) -> None:
    acceptor, opener, _ = linked(make)
    buffer = bytearray(1 << 20)
    marks = [bytes([number]) for number in range(20)]
    got: list[Event] = []
    for mark in marks:
        buffer[:] = mark * len(buffer)
        lease = opener.send("server-0", [b"head", buffer])
        while not lease.is_over:
            got += acceptor.poll(0.01)
            opener.poll(0)
    got += arrived(acceptor, len(marks) - len(got), opener)
    assert [set(frames_of(event)[1]) for event in got if isinstance(event, Arrived)] == [set(mark) for mark in marks]


def test_an_opener_that_comes_first_is_connected_when_somebody_listens(make: Make) -> None:
    port = free_port()
    opener, acceptor = make(), make()
    opener.connect("late", endpoint(port))
    assert opener.poll(0.05) == []
    acceptor.bind(HOST, (port,))
    assert until(opener, has(Up), acceptor)[-1] == Up("late")


def test_the_end_of_the_opener_is_seen_by_the_acceptor(make: Make) -> None:
    acceptor, opener, link = linked(make)
    opener.close()
    [down] = until(acceptor, has(Down))
    assert down.link == link
    assert "its connection closed" in down.reason
    with pytest.raises(ConnectionError):
        acceptor.send(link, [b"too late", b""])


def test_the_end_of_the_acceptor_is_seen_by_the_opener(make: Make) -> None:
    acceptor, opener, _ = linked(make)
    acceptor.close()
    [down] = until(opener, has(Down))
    assert down.link == "server-0"
    assert "its connection closed" in down.reason


def test_a_connection_that_we_close_is_seen_by_the_other_side_only(make: Make) -> None:
    acceptor, opener, link = linked(make)
    opener.disconnect("server-0")
    [down] = until(acceptor, has(Down), opener)
    assert down.link == link
    assert opener.poll(0.05) == []
    with pytest.raises(ConnectionError, match="server-0"):
        opener.send("server-0", [b"", b""])


def test_all_that_was_sent_before_the_end_arrives_before_the_end(make: Make) -> None:
    acceptor, opener, link = linked(make)
    for number in range(1000):
        acceptor.send(link, [b"%d" % number, b""])
    closing = threading.Thread(target=acceptor.close, args=(60,))
    closing.start()
    # One waits for acknowledgements, the other until the socket takes it all.
    if not (isinstance(acceptor, Resending) or getattr(make, "paths", 0) == 2):
        closing.join()
    *messages, end = until(opener, has(Down))
    closing.join()
    assert [frames_of(event)[0] for event in messages] == [b"%d" % number for number in range(1000)]
    assert end.link == "server-0"


def test_a_connection_that_was_refused_carries_the_answer_first(make: Make) -> None:
    acceptor, opener = make(), make()
    opener.connect("server-0", endpoint(acceptor.bind(HOST)))
    until(opener, has(Up), acceptor)
    opener.send("server-0", [b"who", b""])
    [request] = arrived(acceptor, 1, opener)
    acceptor.send(request.link, [b"refused", b""])
    acceptor.refused(request.link)
    [answer] = arrived(opener, 1, acceptor)
    assert frames_of(answer)[0] == b"refused"


def test_a_taken_port_is_named(make: Make) -> None:
    first, second = make(), make()
    port = first.bind(HOST)
    with pytest.raises(OSError, match="cannot listen on 127.0.0.1, port %d: .*in use" % port) as caught:
        second.bind(HOST, (port,))
    assert caught.value.errno is not None
    assert "port %d" % port in caught.value.strerror


def test_a_range_of_ports_gives_the_next_free_one(make: Make) -> None:
    first, second, third = make(), make(), make()
    taken = first.bind(HOST)
    free = second.bind(HOST)
    second.close()
    assert third.bind(HOST, (taken, taken, free)) == free
    with pytest.raises(OSError, match="any of 2 ports"):
        make().bind(HOST, (taken, free))


def test_an_unknown_connection_cannot_be_sent_on(make: Make) -> None:
    transport = make()
    for link in ("server-9", "in:00ff"):
        with pytest.raises(ConnectionError):
            transport.send(link, [b"", b""])


def test_a_wake_before_the_poll_is_not_lost(make: Make) -> None:
    transport = make()
    transport.wake()
    transport.wake()
    started = time.monotonic()
    transport.poll(60)
    assert time.monotonic() - started < 30
    started = time.monotonic()
    transport.poll(0.05)  # both were heard
    assert time.monotonic() - started >= 0.04


def test_no_wake_is_missed_whether_the_poll_waits_already_or_is_about_to(make: Make) -> None:
    """Each of them is needed: the other thread goes on when what it left was taken."""
    transport = make()
    left: list[int] = []
    taken = threading.Semaphore(0)

    def leave() -> None:
        for number in range(300):
            left.append(number)
            transport.wake()
            if not taken.acquire(timeout=scaled(30)):
                return

    thread = threading.Thread(target=leave)
    thread.start()
    for number in range(300):
        while not left:
            started = time.monotonic()
            transport.poll(60)
            assert time.monotonic() - started < 30, "wake %d was missed" % number
        left.clear()
        taken.release()
    thread.join()


def test_what_arrived_before_something_was_sent_is_not_missed(make: Make) -> None:
    """To send takes in the connection's news, so that nothing may be left that ends a wait."""
    acceptor, opener, link = linked(make)
    for number in range(50):
        opener.send("server-0", [b"%d" % number, b""])
        arrived(acceptor, 1)
        acceptor.send(link, [b"answer", b""])
        if number % 5 == 0:
            time.sleep(0.01)  # mostly the answer is here then: each order is tried
        opener.send("server-0", [b"more", b""])
        answers: list[Event] = []
        while not has(Arrived)(answers):
            started = time.monotonic()
            answers += opener.poll(60)
            assert time.monotonic() - started < 30, "answer %d was missed" % number
        arrived(acceptor, 1)


def test_more_messages_than_one_poll_gives_are_given_by_the_next_ones(make: Make) -> None:
    acceptor, opener, link = linked(make)
    for number in range(1000):
        acceptor.send(link, [b"%d" % number, b""])
    acceptor.send(link, [b"last", b""])
    found: list[bytes] = []
    while not found or found[-1] != b"last":
        started = time.monotonic()
        acceptor.poll(0)
        events = opener.poll(60)
        assert time.monotonic() - started < 30
        found += [frames_of(event)[0] for event in events if isinstance(event, Arrived)]
    assert found == [*(b"%d" % number for number in range(1000)), b"last"]


def test_a_wake_after_the_end_does_nothing(make: Make) -> None:
    transport = make()
    transport.close()
    transport.wake()


def test_the_port_of_an_ipv6_endpoint_is_told_from_its_address() -> None:
    assert base.endpoint("10.0.0.1", 5000) == "tcp://10.0.0.1:5000"
    assert base.endpoint("fd00::1", "*") == "tcp://[fd00::1]:*"
