"""Direct connections: how they come about, who is turned away, and that nothing is lost, repeated or out of order."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from slowness import scaled
from transports import (
    DEADLINE_S,
    HELLO,
    HOST,
    LONG,
    SHORT,
    WELCOME,
    agree,
    closed_at_the_end,
    endpoint,
    frames_of,
    has,
    until,
    welcomed,
)

from distrun_runtime.transport import direct
from distrun_runtime.transport.base import COPIED, Arrived, Down, Event, PathChosen, Released, Stranger, Up
from distrun_runtime.transport.direct import (
    AWAY_S,
    FIRST_LOOK_S,
    KEPT_S,
    LOOK_S,
    SHARED_WAITS,
    SLEPT_WAITS,
    DirectTransport,
    Looking,
    TurnLock,
)
from distrun_runtime.transport.host_segments import is_shared
from distrun_runtime.transport.zeromq import ZmqTransport

TOKEN = b"a secret of this job"
BY_TCP = {"socket": ""}
"""What is changed in an offer to have a stream over TCP."""


class Pair:
    """An acceptor and an opener in this process, which have welcomed each other."""

    def __init__(self, change: dict[str, Any] | None = None, ports: tuple[int, ...] = (0,), host: str = HOST) -> None:
        self.acceptor, self.opener = (DirectTransport(ZmqTransport(LONG, TOKEN), TOKEN, ports) for _ in range(2))
        if change is not None:
            say = self.acceptor._say
            self.acceptor._say = lambda link, kind, body: say(link, kind, {**body, **change} if body else body)  # type: ignore[method-assign]
        if host == HOST:
            self.link = welcomed(self.acceptor, self.opener)
        else:
            self.opener.connect("server-0", "tcp://[%s]:%d" % (host, self.acceptor.bind(host)))
            until(self.opener, has(Up), self.acceptor)
            self.opener.send("server-0", HELLO)
            [arrived] = until(self.acceptor, has(Arrived), self.opener)
            self.link = arrived.link
            self.acceptor.send(self.link, WELCOME)
            self.acceptor.proven(self.link)
            until(self.opener, has(Arrived), self.acceptor)

    def agree(self) -> list[PathChosen]:
        """Let both agree; return what the opener has chosen."""
        self.opener.proven("server-0")
        return agree(self.acceptor, self.opener)

    def offer(self) -> tuple[str, int, bytes]:
        """Return the acceptor's socket, its port and the nonce that it gave to the opener."""
        proofs = self.acceptor._pairs[self.link].proofs
        return str(self.acceptor._offer["socket"]), int(str(self.acceptor._offer["port"])), proofs[0]

    def close(self) -> None:
        self.opener.close()
        self.acceptor.close()


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    with closed_at_the_end(Pair) as make:
        yield make


WAYS = [pytest.param(None, "unix", id="unix"), pytest.param(BY_TCP, "tcp", id="tcp")]


@pytest.mark.parametrize(("change", "path"), WAYS)
def test_all_messages_travel_by_stream_once_both_have_agreed(
    pair: Callable[..., Pair], change: dict[str, Any] | None, path: str
) -> None:
    one = pair(change)
    assert one.agree() == [PathChosen("server-0", path)]
    assert one.opener.is_open("server-0")
    assert one.acceptor.is_open(one.link)
    by_zeromq: list[str] = []
    for side in (one.opener, one.acceptor):
        side._inner.send = lambda link, frames: by_zeromq.append(link)  # type: ignore[method-assign,assign,func-returns-value]
    one.opener.send("server-0", [b"request", b"", b"x" * 300_000])
    [request] = until(one.acceptor, has(Arrived), one.opener)
    one.acceptor.send(one.link, [b"answer", b""])
    [answer] = [event for event in until(one.opener, has(Arrived), one.acceptor) if isinstance(event, Arrived)]
    assert (request.link, frames_of(request)) == (one.link, [b"request", b"", b"x" * 300_000])
    assert (answer.link, frames_of(answer)) == ("server-0", [b"answer", b""])
    assert not by_zeromq


@given(st.lists(st.integers(0, 3 * direct.TOLD_BYTES), min_size=1, max_size=6), st.data())
@settings(max_examples=40, deadline=None)
def test_messages_over_tcp_that_come_in_pieces_of_any_size_are_not_waited_for_in_vain(
    sizes: list[int], data: st.DataObject
) -> None:
    """What is waited for at once is never more than what the sender still has to send."""
    with closed_at_the_end(Pair) as make:
        one = make(BY_TCP)
        one.agree()
        sent = [[b"request %d" % number, b"", b"x" * size] for number, size in enumerate(sizes)]
        whole = b"".join(bytes(part) for frames in sent for part in (_table(frames), *frames))
        connection, at, came = one.opener._streams["server-0"].connection, 0, list[Event]()
        while at < len(whole):
            with contextlib.suppress(BlockingIOError):
                at += connection.send(whole[at : at + data.draw(st.integers(1, 2 * direct.TOLD_BYTES))])
            came += one.acceptor.poll(0)
        while len(came) < len(sent):
            came += (more := one.acceptor.poll(DEADLINE_S))
            assert more, "it waited in vain"
        assert [frames_of(event) for event in came if isinstance(event, Arrived)] == sent


def _table(frames: list[bytes]) -> bytes:
    return direct.form_of(frames)[0]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_a_stream_between_ipv6_addresses_comes_about(pair: Callable[..., Pair]) -> None:
    try:
        one = pair(BY_TCP, host="::1")
    except OSError:
        pytest.skip("no IPv6 loopback")
    assert one.agree() == [PathChosen("server-0", "tcp")]


def test_the_second_port_is_of_the_range_as_well(pair: Callable[..., Pair]) -> None:
    ports = tuple(free_port() for _ in range(3))
    one = pair(BY_TCP, ports)
    assert one.agree() == [PathChosen("server-0", "tcp")]
    assert one.offer()[1] in ports


def test_messages_go_on_over_zeromq_where_nothing_can_be_reached(pair: Callable[..., Pair]) -> None:
    one = pair({**BY_TCP, "port": free_port()})
    one.opener.proven("server-0")
    [chosen] = until(one.opener, has(PathChosen), one.acceptor)
    assert (chosen.path, "127.0.0.1 cannot be reached directly: Connection refused") == ("zeromq", chosen.reason)
    one.opener.send("server-0", [b"request", b""])
    [request] = until(one.acceptor, has(Arrived), one.opener)
    assert frames_of(request) == [b"request", b""]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), is_tcp=st.booleans())
def test_no_message_is_lost_repeated_or_overtaken_whenever_the_connection_changes(seed: int, is_tcp: bool) -> None:
    chance = random.Random(seed)
    one = Pair(BY_TCP if is_tcp else None)
    sides = {"out": (one.opener, "server-0"), "in": (one.acceptor, one.link)}
    sent: dict[str, list[list[bytes]]] = {"out": [], "in": []}
    came: dict[str, list[list[bytes]]] = {"out": [], "in": []}
    begins = chance.randrange(20)
    try:
        for step in range(120):
            if step == begins:
                one.opener.proven("server-0")
            way = chance.choice(["out", "in"])
            side, link = sides[way]
            if chance.random() < 0.6:
                sizes = [chance.choice([0, 1, 4, 52, 4096, 100_000]) for _ in range(chance.randrange(1, 6))]
                frames = [b"%d" % step, *(chance.randbytes(size) for size in sizes)]
                sent[way].append(frames)
                side.send(link, frames)
            else:
                collect(side.poll(0.001 * chance.random()), came["in" if way == "out" else "out"])
        deadline = time.monotonic() + DEADLINE_S
        while came != sent or not (one.opener.is_open("server-0") and one.acceptor.is_open(one.link)):
            assert time.monotonic() < deadline, {way: (len(sent[way]), len(came[way])) for way in sent}
            collect(one.opener.poll(0.01), came["in"])
            collect(one.acceptor.poll(0.01), came["out"])
    finally:
        one.close()


def collect(events: list[Event], into: list[list[bytes]]) -> None:
    for event in events:
        assert not isinstance(event, (Down, Stranger)), event
        if isinstance(event, Arrived):
            into.append(frames_of(event))


# Who comes


def test_a_wrong_proof_is_turned_away_and_told(pair: Callable[..., Pair]) -> None:
    one = pair()
    _, port, proof = one.offer()
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(proof[:-1] + bytes([proof[-1] ^ 1]))
        [told] = until(one.acceptor, has(Stranger))
        assert told == Stranger(HOST, "it gave a wrong proof, or one that was used (direct connection)")
        assert stranger.recv(1) == b""
    assert one.agree() == [PathChosen("server-0", "unix")]


def test_a_proof_is_good_for_one_connection(pair: Callable[..., Pair]) -> None:
    one = pair()
    _, port, proof = one.offer()
    one.agree()
    with socket.create_connection((HOST, port)) as thief:
        thief.sendall(proof)
        until(one.acceptor, has(Stranger))
        assert thief.recv(1) == b""
    one.opener.send("server-0", [b"still", b""])
    assert has(Arrived)(until(one.acceptor, has(Arrived), one.opener))


def test_nothing_but_the_proof_is_read_of_a_connection_that_has_not_proven_itself(pair: Callable[..., Pair]) -> None:
    one = pair()
    _, port, proof = one.offer()
    with socket.create_connection((HOST, port)) as stranger:
        stranger.sendall(b"x" * 1000)
        until(one.acceptor, has(Stranger))
        with pytest.raises(ConnectionError):  # what was not read makes it a reset
            while stranger.recv(1000):
                pass
            raise ConnectionResetError
    assert len(proof) == direct.PROOF_BYTES


def test_a_connection_that_proves_nothing_is_closed_in_time(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "UNPROVEN_S", 0.2)
    monkeypatch.setattr(direct, "LOOK_S", 0.05)
    one = pair()
    with socket.create_connection((HOST, one.offer()[1])) as silent:
        [told] = until(one.acceptor, has(Stranger))
        assert "it had proven nothing for 0.2 s" in told.reason
        assert silent.recv(1) == b""


def test_many_connections_that_prove_nothing_keep_no_node_away(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "UNPROVEN", 5)
    one = pair(BY_TCP)
    crowd = [socket.create_connection((HOST, one.offer()[1])) for _ in range(12)]
    events = until(one.acceptor, has(Stranger, 7))
    assert all("more than 5 connections" in event.reason for event in events)
    assert one.agree() == [PathChosen("server-0", "tcp")]
    for each in crowd:
        each.close()


def test_an_acceptor_with_a_wrong_proof_gets_no_message(pair: Callable[..., Pair]) -> None:
    impostor = socket.create_server((HOST, 0))
    one = pair({**BY_TCP, "port": impostor.getsockname()[1]})
    one.opener.proven("server-0")
    until(one.opener, lambda events: bool(one.opener._pairs["server-0"].dialled), one.acceptor)
    impostor.settimeout(DEADLINE_S)
    connection, _ = impostor.accept()
    connection.sendall(b"x" * direct.PROOF_BYTES)
    [chosen] = until(one.opener, has(PathChosen), one.acceptor)
    assert chosen.path == "zeromq"
    assert "its proof is wrong" in chosen.reason
    one.opener.send("server-0", [b"request", b""])
    assert has(Arrived)(until(one.acceptor, has(Arrived), one.opener))
    connection.settimeout(DEADLINE_S)
    assert len(connection.recv(1000)) == direct.PROOF_BYTES
    connection.close()
    impostor.close()


def test_a_peer_that_accepts_and_says_nothing_holds_up_no_message(pair: Callable[..., Pair]) -> None:
    half_open = socket.create_server((HOST, 0))
    one = pair({**BY_TCP, "port": half_open.getsockname()[1]})
    one.opener.proven("server-0")
    for number in range(20):
        one.opener.send("server-0", [b"%d" % number, b""])
        one.opener.poll(0.01)
    assert len(until(one.acceptor, has(Arrived, 20), one.opener)) == 20
    assert not one.opener.is_open("server-0")
    half_open.close()


def test_a_message_over_zeromq_behind_the_mark_ends_the_connection(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    one.opener._inner.send("server-0", [b"late", b""])
    [down] = until(one.acceptor, has(Down), one.opener)
    assert "behind its mark" in down.reason


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'{"nonce": 3}', b'{"nonce": "00", "socket": "", "port": "x"}', b"\xff\xfe"]
)
def test_an_offer_that_makes_no_sense_ends_the_connection(pair: Callable[..., Pair], body: bytes) -> None:
    one = pair()
    one.opener._early["server-0"] = [one.opener._early["server-0"][0], body] if one.opener._early else []
    if not one.opener._early["server-0"]:
        one.opener._early["server-0"] = [direct._HEAD.pack(direct.MAGIC, 1, direct.DirectKind.OFFER), body]
    one.opener.proven("server-0")
    [down] = until(one.opener, has(Down), one.acceptor)
    assert "cannot be read" in down.reason


@pytest.mark.parametrize(
    "data",
    [bytes(8), b"\xff" * 16, direct._table(1).pack(1, direct.FRAME_LIMIT + 1)],
    ids=["no frames", "too many frames", "too large a frame"],
)
def test_bytes_that_are_no_messages_end_the_connection(pair: Callable[..., Pair], data: bytes) -> None:
    one = pair()
    one.agree()
    one.opener._streams["server-0"].connection.sendall(data)
    [down] = until(one.acceptor, has(Down), one.opener)
    assert "what it sent cannot be read" in down.reason


# Full buffers, ends


@pytest.mark.parametrize("change", [None, BY_TCP], ids=["unix", "tcp"])
def test_send_never_waits_and_what_is_left_goes_with_later_polls(
    pair: Callable[..., Pair], change: dict[str, Any] | None
) -> None:
    one = pair(change)
    one.agree()
    payloads = [os.urandom(1 << 20) for _ in range(24)]
    leases = [one.opener.send("server-0", [b"%d" % at, b"", each]) for at, each in enumerate(payloads)]
    assert not leases[-1].is_over
    late = [lease for lease in leases if lease is not COPIED]
    came: list[list[bytes]] = []
    released: list[Event] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(came) < len(payloads) or len(released) < len(late):
        assert time.monotonic() < deadline
        released += [event for event in one.opener.poll(0.01) if isinstance(event, Released)]
        collect(one.acceptor.poll(0.01), came)
    assert came == [[b"%d" % at, b"", each] for at, each in enumerate(payloads)]
    assert [event.lease for event in released if isinstance(event, Released)] == late
    assert all(lease.is_over for lease in leases)


@pytest.mark.parametrize("change", [None, BY_TCP], ids=["unix", "tcp"])
def test_what_had_arrived_comes_before_the_end(pair: Callable[..., Pair], change: dict[str, Any] | None) -> None:
    one = pair(change)
    one.agree()
    for number in range(100):
        one.acceptor.send(one.link, [b"%d" % number, b"", b"x" * number])
    one.acceptor.close()
    *messages, end = until(one.opener, has(Down))
    assert [frames_of(event)[0] for event in messages] == [b"%d" % number for number in range(100)]
    assert end.link == "server-0"
    assert end.reason.startswith("its connection closed")
    with pytest.raises(ConnectionError):
        one.opener.send("server-0", [b"too late", b""])


def test_a_lease_is_over_when_its_connection_has_ended(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    lease = one.opener.send("server-0", [b"", b"", bytes(16 << 20)])
    assert not lease.is_over
    one.acceptor.close()
    events = until(one.opener, has(Released))
    assert lease.is_over
    events += until(one.opener, lambda found: has(Down)([*events, *found]))
    assert [event for event in events if not isinstance(event, Released)] == [
        Down("server-0", "its connection closed")
    ] or ("its connection" in next(event.reason for event in events if isinstance(event, Down)))


@pytest.mark.parametrize("change", [None, BY_TCP], ids=["unix", "tcp"])
def test_an_end_is_told_also_if_zeromq_has_connected_again_meanwhile(
    pair: Callable[..., Pair], change: dict[str, Any] | None
) -> None:
    """It does so by itself: both may be news of one poll."""
    one = pair(change)
    one.agree()
    one.acceptor.send(one.link, [b"last", b""])
    news: list[Event] = [Down("server-0", "silent"), Up("server-0")]
    poll = one.opener._inner.poll

    def both(timeout_s: float) -> list[Event]:
        return [news.pop(0) for _ in list(news)] or poll(timeout_s)

    one.opener._inner.poll = both  # type: ignore[method-assign]
    arrived, *rest = until(one.opener, has(Down))
    assert frames_of(arrived)[0] == b"last"
    assert rest == [Down("server-0", "silent")]


def test_a_long_message_that_was_received_by_an_interrupted_thread_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setblocking(False)
    stream, other = direct._DirectStream("server-0", here), direct._DirectStream("in:", there)
    payload = os.urandom(2 * direct.CHUNK_BYTES)

    def interrupted(message: direct._LongMessage) -> None:
        if sum(message.counts) == len(message.target):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(direct._LongMessage, "whole", interrupted)
        frames = [b"head", b"", payload]
        other.send(frames, direct.form_of(frames))
        with pytest.raises(KeyboardInterrupt):
            while True:
                stream.read()
                other.flush()
    stream.read()
    assert not stream.end
    assert [bytes(frame) for frame in stream.received[0][0]] == [b"head", b"", payload]
    stream.close()
    other.close()


def test_both_sides_see_the_end_if_the_kernel_takes_nothing_more(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()

    def full(buffers: Any) -> int:
        raise OSError(errno.ENOBUFS, "no buffer space available")

    one.opener._streams["server-0"]._sendmsg = full
    one.opener.send("server-0", [b"lost", b""])
    assert has(Down)(until(one.acceptor, has(Down)))
    assert has(Down)(until(one.opener, has(Down)))


def test_messages_go_on_over_zeromq_if_no_socket_can_be_made(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair()

    def none_left(family: int) -> socket.socket:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(direct, "_stream_socket", none_left)
    one.opener.proven("server-0")
    [chosen] = until(one.opener, has(PathChosen), one.acceptor)
    assert (chosen.path, chosen.reason) == ("zeromq", "no socket for a direct connection: too many open files")
    one.opener.send("server-0", [b"request", b""])
    assert has(Arrived)(until(one.acceptor, has(Arrived), one.opener))


def test_a_stream_between_hosts_is_tried_as_often_as_the_heartbeats(pair: Callable[..., Pair]) -> None:
    one = pair(BY_TCP)
    one.agree()
    stream = one.opener._streams["server-0"].connection
    assert stream.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    every_s = stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    silence_s = every_s * (stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) + 1)
    assert LONG.timeout_s - every_s < silence_s <= LONG.timeout_s


PEER = """
import os, sys, time
from distrun_runtime.transport.base import Arrived, Heartbeat, PathChosen
from distrun_runtime.transport.direct import DirectTransport
from distrun_runtime.transport.zeromq import ZmqTransport
sys.path.insert(0, %r)
from transports import WELCOME
node = DirectTransport(ZmqTransport(Heartbeat(0.5, 60.0), %r), %r)
print(node.bind("127.0.0.1"), flush=True)
link = None
while True:
    for event in node.poll(1):
        if isinstance(event, Arrived) and link is None:
            link = event.link
            node.admitted(link)
            node.send(link, WELCOME)
            node.proven(link)
        elif isinstance(event, PathChosen):
            node.send(link, [b"ready", b""])
            if sys.argv[1] == "fork" and not os.fork():
                time.sleep(60)
                os._exit(0)
            print("chosen", flush=True)
"""


@pytest.fixture
def peer() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts an acceptor in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def start(how: str) -> subprocess.Popen[str]:
        code = PEER % (str(Path(__file__).parent.parent.parent / "support"), TOKEN, TOKEN)
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code, how], stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        )
        return started[-1]

    yield start
    for child in started:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def opened(child: subprocess.Popen[str], heartbeat: Any = LONG) -> DirectTransport:
    """Return a transport that has a direct connection to a process, `server-0`, whose first message has come."""
    assert child.stdout is not None
    opener = DirectTransport(ZmqTransport(heartbeat, TOKEN), TOKEN)
    opener.connect("server-0", endpoint(int(child.stdout.readline())))
    until(opener, has(Up))
    opener.send("server-0", HELLO)
    until(opener, has(Arrived))
    opener.proven("server-0")
    until(opener, lambda events: has(PathChosen)(events) and has(Arrived)(events))
    assert child.stdout.readline() == "chosen\n"
    return opener


def test_a_killed_process_is_down_at_once(peer: Callable[..., subprocess.Popen[str]]) -> None:
    child = peer("plain")
    opener = opened(child)
    child.kill()
    started = time.monotonic()
    [down] = until(opener, has(Down))
    assert down.link == "server-0"
    assert time.monotonic() - started < scaled(10), "the heartbeat's limit is 60 s"
    opener.close()


def test_a_killed_process_whose_child_has_the_socket_is_down_by_the_heartbeats(
    peer: Callable[..., subprocess.Popen[str]],
) -> None:
    child = peer("fork")
    opener = opened(child, SHORT)
    child.kill()
    [down] = until(opener, has(Down), seconds=30)
    assert down.link == "server-0"
    opener.close()


def test_a_forked_child_that_ends_ends_no_connection(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    one.opener.send("server-0", [b"still", b""])
    [arrived] = until(one.acceptor, has(Arrived), one.opener)
    assert frames_of(arrived) == [b"still", b""]


# Messages that are taken before they arrive


def test_what_is_taken_is_no_event_and_the_poll_goes_on(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    taken: list[bytes] = []

    def sink(link: str, frames: Any) -> Any:
        assert link == one.link
        if frames[0].startswith(b"known"):
            taken.append(frames[0])
            one.opener.send("server-0", [b"odd" if len(taken) == 2 else b"known again", b""])
            return None
        return [*frames, b"seen"]

    one.acceptor.sink = sink
    one.opener.send("server-0", [b"known", b""])
    [arrived] = one.acceptor.poll(DEADLINE_S)  # in one wait: what was taken brought the next message
    assert taken == [b"known", b"known again"]
    assert frames_of(arrived) == [b"odd", b"", b"seen"]


def test_what_is_known_as_it_is_received_is_no_event_and_all_else_arrives(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    known = [b"known", b"", b"12345678"]
    whole, given = direct.form_of(known)[0] + b"".join(known), list[bytes]()

    def taken(link: str, data: bytes) -> bool:
        given.append(data)
        return data == whole

    one.acceptor.sink, one.acceptor.known = lambda link, frames: frames, taken
    for _ in range(2):
        one.opener.send("server-0", known)
        assert one.acceptor.poll(0.0) == []
    connection = one.opener._streams["server-0"].connection
    connection.sendall(whole[:20])
    assert one.acceptor.poll(0.0) == []
    connection.sendall(whole[20:] + whole)
    events = until(one.acceptor, has(Arrived, 2), one.opener)
    assert [frames_of(event) for event in events] == [known, known]
    assert given == [whole, whole, whole[:20]]  # nothing behind a part
    one.opener.close()
    assert has(Down)(until(one.acceptor, has(Down)))


def test_what_was_made_before_is_sent_at_once_and_else_behind_what_waits(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    made = [b"made", b"", bytes(50_000)]
    leases = []
    while not leases or leases[-1] is COPIED:
        leases.append(one.acceptor.send(one.link, made, direct.form_of(made)))
    leases.append(one.acceptor.send(one.link, [b"last", b""], direct.form_of([b"last", b""])))
    assert not any(lease.is_over for lease in leases[-2:])
    events = until(one.opener, has(Arrived, len(leases)), one.acceptor)
    came = [frames_of(event) for event in events if isinstance(event, Arrived)]
    assert came == [*[made] * (len(leases) - 1), [b"last", b""]]
    assert all(lease.is_over for lease in leases)


def test_nothing_is_taken_before_what_arrived_earlier(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    one.acceptor.sink = lambda link, frames: frames if frames[0] == b"odd" else None
    for head in (b"known", b"odd", b"known"):
        one.opener.send("server-0", [head, b""])
    events = until(one.acceptor, has(Arrived, 2), one.opener)
    assert [frames_of(event)[0] for event in events] == [b"odd", b"known"]


def test_a_wake_ends_a_poll_whose_messages_are_taken(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    one.acceptor.sink = lambda link, frames: one.acceptor.wake()
    one.opener.send("server-0", [b"known", b""])
    assert one.acceptor.poll(DEADLINE_S) == []


# Turns


def test_a_thread_with_the_turn_receives_on_the_links_that_it_has_taken(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    turn = one.opener.turn()
    polled: list[Event] = []

    def loop() -> None:
        with turn.lock:
            while not any(isinstance(event, Arrived) for event in polled):
                polled.extend(one.opener.poll(0.25))

    thread = threading.Thread(target=loop)
    thread.start()
    with turn.lock:
        turn.begin()
        one.opener.take(("server-0",))
        one.acceptor.send(one.link, [b"mine", b""])
        assert one.opener.wait(DEADLINE_S)
        assert one.opener.inbox("server-0") == [[b"mine", b""]]
        one.opener.give_back(("server-0",), drops=True)
    assert not polled
    one.acceptor.send(one.link, [b"for all", b""])
    thread.join(DEADLINE_S)
    assert [frames_of(event) for event in polled if isinstance(event, Arrived)] == [[b"for all", b""]]


def test_a_link_that_is_taken_again_and_again_changes_the_epoll_once_until_the_next_poll(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair()
    one.agree()
    turn, watched = one.opener.turn(), list[int]()
    wait_for = one.opener._wait_for
    monkeypatch.setattr(one.opener, "_wait_for", lambda fd, mask: (watched.append(mask), wait_for(fd, mask)))
    for polls in range(2):
        with turn.lock:
            for _ in range(3):
                one.opener.take(("server-0",))
                one.acceptor.send(one.link, [b"mine", b""])
                assert one.opener.wait(DEADLINE_S)
                one.opener.give_back(("server-0",), drops=True)
            assert watched == [0, select.EPOLLIN] * polls + [0]
            one.acceptor.send(one.link, [b"for all", b""])
            [arrived] = until(one.opener, has(Arrived))
            assert frames_of(arrived) == [b"for all", b""]


def test_what_was_not_removed_is_delivered_by_the_next_poll(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    turn = one.opener.turn()
    with turn.lock:
        one.opener.take(("server-0",))
        one.acceptor.send(one.link, [b"left", b""])
        assert one.opener.wait(DEADLINE_S)
        one.acceptor.close()
        while one.opener.inbox("server-0") is not None:
            one.opener.wait(DEADLINE_S)
        one.opener.give_back(("server-0",))
        [arrived, down] = until(one.opener, has(Down))
    assert frames_of(arrived) == [b"left", b""]
    assert isinstance(down, Down)


def test_a_thread_that_wants_the_turn_ends_the_wait_of_the_one_that_has_it(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    turn = one.opener.turn()
    with turn.lock:
        turn.begin()
        one.opener.take(("server-0",))
        timer = threading.Timer(0.05, turn.want)
        timer.start()
        started = time.monotonic()
        assert not one.opener.wait(DEADLINE_S)
        assert time.monotonic() - started < 30
        timer.join()
        turn.begin()  # It is forgotten: the next wait takes its time.
        assert not one.opener.wait(0.02)
        one.opener.give_back(("server-0",))


def test_a_wish_for_the_turn_that_came_late_ends_one_wait_only(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    turn = one.opener.turn()
    os.eventfd_write(turn.fd, 1)  # `begin` looked for it a moment before.
    with turn.lock:
        turn.begin()
        one.opener.take(("server-0",))
        assert not one.opener.wait(DEADLINE_S)
        turn.begin()
        one.acceptor.send(one.link, [b"answer", b""])
        assert one.opener.wait(DEADLINE_S)
        one.opener.give_back(("server-0",))


def test_each_long_payload_is_received_at_a_place_of_its_own_where_it_is_wanted(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    sizes = (1 << 20, 3 << 19, 1 << 20, 1 << 20)
    wanted, sent = [bytearray(size) for size in sizes[:3]], [os.urandom(size) for size in sizes]
    turn = one.opener.turn()
    with turn.lock:
        one.opener.take(("server-0",))
        for each in wanted:
            one.opener.expect("server-0", memoryview(each))
        for data in sent:
            one.acceptor.send(one.link, [b"head", b"", data])
        while len(came := one.opener.inbox("server-0") or []) < len(sent):
            one.opener.wait(DEADLINE_S)
            one.acceptor.poll(0)
        found = [(bytes(head), bytes(body), bytes(payload)) for head, body, payload in came]
        places = [getattr(payload, "obj", None) for _, _, payload in came]
        one.opener.give_back(("server-0",), drops=True)
    assert found == [(b"head", b"", data) for data in sent]
    # The first of this size that is free; when none is left, memory of its own.
    assert [next((at for at, each in enumerate(wanted) if each is place), -1) for place in places] == [0, 1, 2, -1]


def test_a_long_payload_that_came_by_stream_is_not_taken_for_memory_of_its_sender(pair: Callable[..., Pair]) -> None:
    one = pair()
    one.agree()
    data = os.urandom(1 << 20)
    one.acceptor.send(one.link, [b"head", b"", data])
    [arrived] = [event for event in until(one.opener, has(Arrived), one.acceptor) if isinstance(event, Arrived)]
    payload = arrived.frames[2]
    assert bytes(payload) == data
    assert not is_shared(payload)


def test_a_turn_that_nobody_has_is_not_asked_for() -> None:
    turn = TurnLock()
    turn.want()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(turn.fd)


# Looking before sleeping

SHORT_S, LONG_S = LOOK_S / 2, LOOK_S * 2
"""Waits that looking shortens, and others."""


def looks_after(*waits_s: float, cores: float = 2, workers: int = 2) -> float:
    """Return how long a thread looks after these waits."""
    looking = Looking(cores, workers)
    for each in waits_s:
        looking.learn(each)
    return looking.time_s


def test_a_thread_looks_longer_while_answers_come_soon_and_never_longer_than_the_limit() -> None:
    assert looks_after() == 0
    assert looks_after(SHORT_S) == FIRST_LOOK_S
    assert looks_after(SHORT_S, SHORT_S) == 2 * FIRST_LOOK_S
    assert looks_after(*[LOOK_S] * 50) == LOOK_S


def test_one_long_wait_halves_the_time_and_several_end_the_looking() -> None:
    assert looks_after(*[SHORT_S] * 50, LONG_S) == LOOK_S / 2
    assert looks_after(*[SHORT_S] * 50, LONG_S, SHORT_S) == LOOK_S
    assert looks_after(*[SHORT_S] * 50, *[LONG_S] * 6) == 0


@given(st.lists(st.booleans(), max_size=60))
def test_looking_costs_less_than_the_limit_for_each_short_wait(history: list[bool]) -> None:
    looking, lost_s = Looking(2, 2), 0.0
    for is_short in history:
        lost_s += 0 if is_short else looking.time_s
        looking.learn(SHORT_S if is_short else LONG_S)
    assert lost_s <= LOOK_S * sum(history)


@pytest.mark.parametrize(("cores", "workers", "looks"), [(2, 2, True), (2, 3, False), (1.5, 2, False), (16, 2, True)])
def test_workers_that_are_more_than_the_cores_never_look(cores: float, workers: int, looks: bool) -> None:
    assert (looks_after(*[1e-6] * 50, cores=cores, workers=workers) > 0) == looks


Wait = tuple[float, float, float]
"""How long, and for how long of the looking the thread and others had the core."""
SHARED: Wait = SHORT_S, KEPT_S, AWAY_S
ALONE: Wait = SHORT_S, SHORT_S, 0.0
GIVEN_AWAY: Wait = SHORT_S, KEPT_S / 2, AWAY_S
"""Others had the core at once."""


def looks_in_each(*waits: Wait) -> list[bool]:
    """Return in which of these waits a thread looks that has had only short ones before, and whether in the next."""
    looking, found = Looking(2, 2), list[bool]()
    for _ in range(50):
        looking.learn(*ALONE)
    for each in waits:
        found.append(looking.time_s > 0)
        looking.learn(*each)
    return [*found, looking.time_s > 0]


def test_a_thread_that_keeps_its_core_from_others_sleeps_at_once_for_some_waits_and_tries_again() -> None:
    shared = looks_in_each(*[SHARED] * (SHARED_WAITS + SLEPT_WAITS + 1))
    assert shared == [True] * SHARED_WAITS + [False] * SLEPT_WAITS + [True, False]


@pytest.mark.parametrize("other", [ALONE, GIVEN_AWAY])
def test_a_thread_that_keeps_its_core_from_nobody_goes_on_looking(other: Wait) -> None:
    waits = [SHARED] * (SHARED_WAITS + SLEPT_WAITS) + [other] + [SHARED] * (SHARED_WAITS - 1)
    assert all(looks_in_each(*waits)[SHARED_WAITS + SLEPT_WAITS :])
    assert all(looks_in_each(*([SHARED] * (SHARED_WAITS - 1) + [other]) * 5))


def test_after_a_long_wait_a_thread_may_be_on_another_core_and_looks_again() -> None:
    *_, slept, again = looks_in_each(*[SHARED] * (SHARED_WAITS + 3), (LONG_S, 0.0, 0.0))
    assert (slept, again) == (False, True)


class _Looks(Looking):
    """Looks for so long that a test ends before."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self._time_s = 10 * DEADLINE_S
        self.learnt: list[Wait] = []
        self.forgotten = 0

    def learn(self, waited_s: float, worked_s: float = 0.0, away_s: float = 0.0) -> None:
        """Note it."""
        super().learn(waited_s, worked_s, away_s)
        self.learnt.append((waited_s, worked_s, away_s))

    def forget_core(self) -> None:
        """Note it."""
        super().forget_core()
        self.forgotten += 1


@pytest.fixture
def looks(pair: Callable[..., Pair]) -> Iterator[tuple[Pair, TurnLock]]:
    """Return a pair whose opener, of which a link is taken, looks for news and never sleeps; it has the turn."""
    one = pair()
    one.agree()
    turn = one.opener.turn(_Looks())
    with turn.lock:
        turn.owner = threading.get_ident()
        one.opener.take(("server-0",))
        yield one, turn
        one.opener.give_back(("server-0",))


def test_a_thread_that_looks_finds_what_comes(looks: tuple[Pair, TurnLock]) -> None:
    one, _ = looks
    timer = threading.Timer(0.05, one.acceptor.send, (one.link, [b"answer", b""]))
    timer.start()
    assert one.opener.wait(DEADLINE_S)
    assert one.opener.inbox("server-0") == [[b"answer", b""]]
    timer.join()


def test_a_thread_does_not_look_for_the_answer_to_a_large_call_nor_learn_from_it(
    looks: tuple[Pair, TurnLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers need its core meanwhile."""
    one, turn = looks
    monkeypatch.setattr(os, "sched_yield", lambda: pytest.fail("it looked"))
    one.acceptor.send(one.link, [b"answer", b""])
    assert one.opener.wait(DEADLINE_S, looks=False)
    assert one.opener.inbox("server-0") == [[b"answer", b""]]
    assert turn._looking.time_s == 10 * DEADLINE_S
    assert isinstance(turn._looking, _Looks)
    assert turn._looking.forgotten == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
def test_a_thread_that_looks_learns_for_how_long_it_and_another_process_had_its_core(
    looks: tuple[Pair, TurnLock],
) -> None:
    one, turn = looks
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    work = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with subprocess.Popen(work, stdout=subprocess.PIPE) as busy:  # on the same core
        try:
            assert busy.stdout is not None
            assert busy.stdout.read(1)
            assert not one.opener.wait(0.2)
        finally:
            busy.kill()
            os.sched_setaffinity(0, before)
    assert isinstance(turn._looking, _Looks)
    [(waited_s, worked_s, away_s)] = turn._looking.learnt
    assert worked_s >= KEPT_S
    assert away_s >= AWAY_S
    assert worked_s + away_s <= waited_s


def test_a_thread_that_looks_ends_at_the_deadline(looks: tuple[Pair, TurnLock]) -> None:
    assert not looks[0].opener.wait(0.02)


def test_a_thread_that_looks_ends_when_another_wants_the_turn(looks: tuple[Pair, TurnLock]) -> None:
    one, turn = looks
    timer = threading.Timer(0.05, turn.want)
    timer.start()
    assert not one.opener.wait(DEADLINE_S)
    timer.join()


@pytest.fixture
def interrupts() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Return what has a function called by a signal handler in a moment."""
    before = signal.getsignal(signal.SIGALRM)

    def soon(act: Callable[[], None]) -> None:
        signal.signal(signal.SIGALRM, lambda number, frame: act())
        signal.setitimer(signal.ITIMER_REAL, 0.05)

    yield soon
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_interrupts_a_thread_that_looks(
    looks: tuple[Pair, TurnLock], interrupts: Callable[[Callable[[], None]], None]
) -> None:
    one, turn = looks

    def interrupt() -> None:
        assert turn.is_waiting
        raise KeyboardInterrupt

    interrupts(interrupt)
    with pytest.raises(KeyboardInterrupt):
        one.opener.wait(DEADLINE_S)
    assert not turn.is_waiting
    one.acceptor.send(one.link, [b"answer", b""])
    assert one.opener.wait(DEADLINE_S)


def test_a_signal_handler_gives_away_the_turn_of_a_thread_that_looks(
    looks: tuple[Pair, TurnLock], interrupts: Callable[[Callable[[], None]], None]
) -> None:
    one, turn = looks
    me = turn.owner
    interrupts(turn.give_away)
    assert not one.opener.wait(DEADLINE_S)
    assert turn.owner == me
    assert turn.lock.locked()
