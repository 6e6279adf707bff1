"""One scenario for both transports; then what only ZeroMQ can meet: processes that stop, frames that are too big."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ports import free_port

from distrun_runtime.transport.inproc import InprocNetwork
from distrun_runtime.transport.zeromq import Arrived, Down, Event, Heartbeat, Up, ZmqTransport

HOST = "127.0.0.1"
BEAT = Heartbeat(0.5, 4.0)
"""Where somebody is to be lost; a healthy peer may still be slow for a while."""
PATIENT = Heartbeat(0.5, 60.0)
"""Where nobody is."""
DEADLINE_S = 60.0

Make = Callable[[], Any]


@pytest.fixture(params=["zmq", "inproc"])
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes transports of one kind that can reach each other; closes them at the end."""
    network = InprocNetwork()
    made: list[Any] = []

    def one() -> Any:
        made.append(ZmqTransport(PATIENT) if request.param == "zmq" else network.transport())
        return made[-1]

    yield one
    for transport in made:
        transport.close()


def until(transport: Any, found: Callable[[list[Event]], bool], *others: Any, seconds: float = DEADLINE_S) -> list[Any]:
    """Poll (and let the others run) until `found`; return all events."""
    events: list[Event] = []
    deadline = time.monotonic() + seconds
    while not found(events):
        assert time.monotonic() < deadline, "only this happened: %r" % events
        events += transport.poll(0.02)
        for other in others:
            other.poll(0)
    return events


def has(kind: type[Any], count: int = 1) -> Callable[[list[Event]], bool]:
    return lambda events: sum(isinstance(event, kind) for event in events) >= count


def endpoint(port: int) -> str:
    return "tcp://%s:%d" % (HOST, port)


def frames_of(event: Arrived) -> list[bytes]:
    return [bytes(frame) for frame in event.frames]


def linked(make: Make) -> tuple[Any, Any, str]:
    """Return (acceptor, opener, the acceptor's name of the link) of a connection that has carried a message."""
    acceptor, opener = make(), make()
    opener.connect("server-0", endpoint(acceptor.bind(HOST)))
    assert until(opener, has(Up), acceptor) == [Up("server-0")]
    opener.send("server-0", [b"hello", b""])
    arrived = until(acceptor, has(Arrived), opener)[0]
    assert frames_of(arrived) == [b"hello", b""]
    acceptor.proven(arrived.link)
    return acceptor, opener, arrived.link


def test_a_connection_comes_up_and_carries_frames_both_ways(make: Make) -> None:
    acceptor, opener, link = linked(make)
    assert link.startswith("in:")
    acceptor.send(link, [b"one", b"", b"three"])
    [arrived] = until(opener, has(Arrived), acceptor)
    assert arrived.link == "server-0"
    assert frames_of(arrived) == [b"one", b"", b"three"]


def test_messages_of_a_connection_keep_their_order(make: Make) -> None:
    acceptor, opener, _ = linked(make)
    for number in range(600):
        opener.send("server-0", [b"%d" % number, b""])
    arrived = until(acceptor, has(Arrived, 600), opener)
    assert [frames_of(event)[0] for event in arrived] == [b"%d" % number for number in range(600)]


def test_several_openers_are_told_apart(make: Make) -> None:
    acceptor = make()
    port = acceptor.bind(HOST)
    openers = [make() for _ in range(3)]
    for opener in openers:
        opener.connect("s", endpoint(port))
        until(opener, has(Up), acceptor)
    for number, opener in enumerate(openers):
        opener.send("s", [b"%d" % number, b""])
    arrived = until(acceptor, has(Arrived, 3), *openers)
    links = {frames_of(event)[0]: event.link for event in arrived}
    assert len(set(links.values())) == 3
    for mark, link in links.items():
        acceptor.send(link, [mark, b""])
    for number, opener in enumerate(openers):
        answers = until(opener, has(Arrived))
        assert [frames_of(event)[0] for event in answers if isinstance(event, Arrived)] == [b"%d" % number]


def test_big_frames_arrive_whole_and_are_lent_until_they_have_left(make: Make) -> None:
    acceptor, opener, _ = linked(make)
    big = [bytearray(os.urandom(1 << 20)) * 8, bytearray(b"x" * 100_000)]
    lease = opener.send("server-0", [b"head", b"", *big])
    [arrived] = until(acceptor, has(Arrived), opener)
    assert frames_of(arrived) == [b"head", b"", *big]
    del arrived
    deadline = time.monotonic() + DEADLINE_S
    while not lease.is_over:
        assert time.monotonic() < deadline
        opener.poll(0.01)


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


def test_what_was_sent_before_the_end_is_heard_before_the_end(make: Make) -> None:
    acceptor, opener, link = linked(make)
    acceptor.send(link, [b"last words", b""])
    acceptor.close(linger_s=60)
    events = until(opener, has(Down))
    assert [type(event) for event in events] == [Arrived, Down]
    assert frames_of(events[0])[0] == b"last words"


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


def test_a_wake_from_another_thread_ends_a_poll(make: Make) -> None:
    transport = make()
    started = time.monotonic()
    timer = threading.Timer(0.1, transport.wake)
    timer.start()
    assert transport.poll(60) == []
    assert time.monotonic() - started < 30
    timer.join()


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


# In-process only: accidents on request


def test_a_late_message_arrives_late_and_in_order() -> None:
    network = InprocNetwork(lambda endpoint, frames: 0.2 if bytes(frames[0]) == b"slow" else 0.0)
    acceptor, opener = network.transport(), network.transport()
    opener.connect("s", endpoint(acceptor.bind(HOST)))
    opener.poll(0)
    sent = time.monotonic()
    opener.send("s", [b"slow", b""])
    opener.send("s", [b"quick", b""])
    arrived = until(acceptor, has(Arrived, 2))
    assert time.monotonic() - sent >= 0.2
    assert [frames_of(event)[0] for event in arrived] == [b"slow", b"quick"]


def test_waiting_behind_a_late_message_costs_no_time_of_the_processor() -> None:
    network = InprocNetwork(lambda endpoint, frames: 0.3 if bytes(frames[0]) == b"slow" else 0.0)
    acceptor, opener = network.transport(), network.transport()
    opener.connect("s", endpoint(acceptor.bind(HOST)))
    for text in (b"slow", b"quick"):
        opener.send("s", [text, b""])
    before = time.thread_time()
    assert len(acceptor.poll(DEADLINE_S)) == 2
    assert time.thread_time() - before < 0.1


def test_a_cut_breaks_every_connection_of_one_node() -> None:
    network = InprocNetwork()
    server, scheduler, worker = network.transport(), network.transport(), network.transport()
    worker.connect("server-0", endpoint(server.bind(HOST)))
    server.connect("scheduler", endpoint(scheduler.bind(HOST)))
    network.cut(server, "power cut")
    assert until(worker, has(Down)) == [Up("server-0"), Down("server-0", "power cut")]
    assert [event.reason for event in until(scheduler, has(Down))] == ["power cut"]


# ZeroMQ only: other processes

PEER = """
import sys, time
from distrun_runtime.transport.zeromq import Heartbeat, Up, ZmqTransport
node = ZmqTransport(Heartbeat(0.5, 4.0))
if sys.argv[1] == "open":
    node.connect("s", sys.argv[2])
    while not any(isinstance(event, Up) for event in node.poll(1)):
        pass
    node.send("s", [b"hello", b""])
else:
    print(node.bind("127.0.0.1"), flush=True)
if sys.argv[3:] == ["hold"]:  # the interpreter's lock, not the sockets
    while True:
        sum(range(10**7))
while True:
    node.poll(1)
"""


@pytest.fixture
def peers() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts peer processes and ends them."""
    started: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PEER, *words]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


@pytest.fixture
def node() -> Iterator[ZmqTransport]:
    transport = ZmqTransport(BEAT)
    yield transport
    transport.close()


@pytest.fixture
def patient() -> Iterator[ZmqTransport]:
    transport = ZmqTransport(PATIENT, frame_limit=1 << 20)
    yield transport
    transport.close()


def test_a_stopped_process_that_connected_to_us_is_lost_in_time(
    peers: Callable[..., subprocess.Popen[str]], node: ZmqTransport
) -> None:
    child = peers("open", endpoint(node.bind(HOST)))
    [arrived] = until(node, has(Arrived))
    child.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    [down] = until(node, has(Down))
    assert down == Down(arrived.link, "its connection closed, or it was silent for 4 s")
    assert time.monotonic() - stopped < 4 + 3  # the machine may be busy


def test_a_stopped_process_that_we_connected_to_is_lost_in_time(
    peers: Callable[..., subprocess.Popen[str]], node: ZmqTransport
) -> None:
    child = peers("bind", "-")
    assert child.stdout is not None
    node.connect("server-0", endpoint(int(child.stdout.readline())))
    until(node, has(Up))
    child.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    [down] = until(node, has(Down))
    assert down.link == "server-0"
    assert time.monotonic() - stopped < 4 + 3


def test_a_killed_process_is_lost_at_once(peers: Callable[..., subprocess.Popen[str]], patient: ZmqTransport) -> None:
    child = peers("open", endpoint(patient.bind(HOST)))
    until(patient, has(Arrived))
    child.kill()
    killed = time.monotonic()
    until(patient, has(Down))
    assert time.monotonic() - killed < 10  # by its silence it would be after 60 s


def test_a_process_that_holds_the_interpreters_lock_is_alive(
    peers: Callable[..., subprocess.Popen[str]], node: ZmqTransport
) -> None:
    """libzmq's own thread beats."""
    peers("open", endpoint(node.bind(HOST)), "hold")
    until(node, has(Arrived))
    end = time.monotonic() + 7
    while time.monotonic() < end:
        assert not has(Down)(node.poll(0.2))


def test_a_frame_over_the_limit_never_arrives_and_the_node_lives(patient: ZmqTransport) -> None:
    """MAXMSGSIZE: libzmq cuts the connection before it would allocate."""
    node = patient
    port = node.bind(HOST)
    rude, polite = ZmqTransport(PATIENT), ZmqTransport(PATIENT)
    try:
        for opener in (rude, polite):
            opener.connect("s", endpoint(port))
            until(opener, has(Up), node)
        rude.send("s", [b"head", b"", bytes((1 << 20) + 1)])
        until(rude, has(Down), node)
        polite.send("s", [b"fine", b""])
        arrived = [event for event in until(node, has(Arrived), rude, polite) if isinstance(event, Arrived)]
        assert [frames_of(event)[0] for event in arrived] == [b"fine"]
    finally:
        rude.close()
        polite.close()


def test_bytes_of_another_protocol_do_no_harm(patient: ZmqTransport) -> None:
    node = patient
    port = node.bind(HOST)
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        node.poll(0.2)
    good = ZmqTransport(PATIENT)
    try:
        good.connect("s", endpoint(port))
        until(good, has(Up), node)
        good.send("s", [b"fine", b""])
        assert frames_of(until(node, has(Arrived), good)[0])[0] == b"fine"
    finally:
        good.close()
