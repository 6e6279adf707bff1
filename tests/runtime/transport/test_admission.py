"""What a peer without the job's token can do to a node: nothing that costs it much."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from slowness import scaled
from zmtp import COMMAND, MORE, Peer, command, frame, greeting, hello

from distrun_runtime.transport import admission
from distrun_runtime.transport.admission import UNPROVEN_BYTES, credentials, judge, refusal
from distrun_runtime.transport.base import Arrived, Event, Heartbeat, Rejected, Stranger, Up
from distrun_runtime.transport.zeromq import ZmqTransport

TOKEN = b"2b7e151628aed2a6abf7158809cf4f3c"
LIMIT_S = scaled(60.0)
FLOOD = 20_000_000
"""Bytes that a flood tries to send."""
GROWTH = 60_000_000
"""How much a node may grow in the meantime; before there were limits it grew by a gigabyte."""

NODE = """
import sys
from distrun_runtime.transport.base import Heartbeat
from distrun_runtime.transport.zeromq import ZmqTransport
node = ZmqTransport(Heartbeat(2.0, 60.0), bytes.fromhex(sys.argv[1]))
print(node.bind("127.0.0.1"), flush=True)
while True:
    for event in node.poll(0.1):
        print(type(event).__name__, getattr(event, "reason", ""), flush=True)
"""

TOKENS = pytest.mark.parametrize("token", [TOKEN, b""], ids=["token", "open"])


class Node:
    """A node in a process of its own, whose memory can be looked at."""

    def __init__(self, token: bytes) -> None:
        command = [sys.executable, "-c", NODE, token.hex()]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = int(self.process.stdout.readline())
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.before = self.resident()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def resident(self) -> int:
        pages = Path("/proc/%d/statm" % self.process.pid).read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def until(self, words: str) -> None:
        wait(lambda: any(words in line for line in list(self.lines)), "%r in %r" % (words, self.lines))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()


@pytest.fixture
def node(token: bytes) -> Iterator[Node]:
    made = Node(token)
    yield made
    made.close()


def wait(found: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not found():
        assert time.monotonic() < deadline, "never: %s" % what
        time.sleep(0.01)


needs_statm = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


def flood(node: Node, begin: Callable[[Peer], object], part: bytes) -> Peer:
    """Send to a node as a stranger until it closes the connection; return the connection."""
    peer = Peer(node.port)
    begin(peer)
    peer.flood(part, FLOOD, time.monotonic() + LIMIT_S)
    return peer


def enter_by(mechanism: bytes, version: bytes = b"\x03\x01") -> Callable[[Peer], object]:
    def begin(peer: Peer) -> None:
        peer.send(greeting(mechanism, version))
        if mechanism == b"NULL":
            peer.send(command(b"READY"))

    return begin


BEGINNINGS = {
    "a mechanism without a password": enter_by(b"NULL"),
    "the old protocol 2.0": lambda peer: peer.send(b"\xff" + bytes(8) + b"\x7f\x01\x05\0\0"),
    "the old protocol 1.0": lambda peer: peer.send(b"\x01\0"),
    "a wrong password": lambda peer: peer.enter_as_plain(b"token", b"0" * 64),
    "the password of open jobs": lambda peer: peer.enter_as_plain(*credentials(b"")),
    "no handshake at all": lambda peer: None,
}


@needs_statm
@TOKENS
@pytest.mark.parametrize("begin", list(BEGINNINGS))
def test_a_message_that_never_ends_costs_a_node_nothing(node: Node, begin: str) -> None:
    peer = flood(node, BEGINNINGS[begin], frame(b"x", MORE))
    assert peer.is_closed
    assert node.resident() - node.before < GROWTH
    peer.close()


@needs_statm
@TOKENS
def test_a_command_that_never_ends_costs_a_node_nothing(node: Node) -> None:
    def begin(peer: Peer) -> None:
        peer.send(greeting(b"PLAIN"))
        peer.send(bytes((COMMAND | 2,)) + (60_000_000).to_bytes(8, "big"))

    peers = [flood(node, begin, bytes(65536)) for _ in range(10)]
    for peer in peers:
        while peer.receive(1):
            pass  # the node's greeting, then the end
    assert node.resident() - node.before < GROWTH
    node.until("it sent more than %d bytes before it had proven anything" % UNPROVEN_BYTES)
    for peer in peers:
        peer.close()


@TOKENS
def test_a_node_whose_own_thread_is_busy_is_protected_too(token: bytes) -> None:
    with listening(token) as (_, port):
        peer = Peer(port)
        peer.enter_as_plain(*credentials(token))  # as one that has overheard the password
        peer.flood(frame(b"x", MORE), FLOOD, time.monotonic() + LIMIT_S)
        assert peer.is_closed
        peer.close()


@TOKENS
def test_connections_that_prove_nothing_are_closed_in_time(token: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNPROVEN_S", 0.3)
    with listening(token) as (node, port):
        peer = Peer(port)
        peer.enter_as_plain(*credentials(token))
        assert peer.receive(1) == b""
        peer.close()
        strangers = until(node, Stranger)
        assert [each.reason for each in strangers] == ["it had proven nothing for 0.3 s"]
        assert strangers[0].address == "127.0.0.1"


@TOKENS
def test_of_too_many_unproven_connections_the_oldest_go(token: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "UNPROVEN_CONNECTIONS", 3)
    with listening(token) as (_, port):
        peers = []
        for _ in range(5):
            peers.append(Peer(port))
            assert peers[-1].enter_as_plain(*credentials(token)).startswith(b"\x05READY")
        assert [peer.receive(1) for peer in peers[:2]] == [b"", b""]
        for peer in peers[2:]:
            peer.socket.settimeout(0.2)
            with pytest.raises(TimeoutError):
                peer.socket.recv(1)
        for peer in peers:
            peer.close()


@contextlib.contextmanager
def listening(token: bytes = TOKEN) -> Iterator[tuple[ZmqTransport, int]]:
    """A node in this process, and its port."""
    node = ZmqTransport(Heartbeat(2.0, 60.0), token)
    try:
        yield node, node.bind("127.0.0.1")
    finally:
        node.close()


def until(transport: ZmqTransport, kind: type[object]) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + LIMIT_S
    while not any(isinstance(event, kind) for event in events):
        assert time.monotonic() < deadline, "only this happened: %r" % events
        events += transport.poll(0.05)
    return [event for event in events if isinstance(event, kind)]


@contextlib.contextmanager
def pair(token: bytes, theirs: bytes) -> Iterator[tuple[ZmqTransport, ZmqTransport]]:
    acceptor, opener = ZmqTransport(Heartbeat(2.0, 60.0), token), ZmqTransport(Heartbeat(2.0, 60.0), theirs)
    try:
        opener.connect("scheduler", "tcp://127.0.0.1:%d" % acceptor.bind("127.0.0.1"))
        yield acceptor, opener
    finally:
        opener.close()
        acceptor.close()


@TOKENS
def test_no_limit_holds_once_the_other_side_is_proven(token: bytes) -> None:
    with pair(token, token) as (acceptor, opener):
        until(opener, Up)
        opener.send("scheduler", [b"hello", b""])
        [arrived] = until(acceptor, Arrived)
        acceptor.admitted(arrived.link)
        for _ in range(20):
            opener.send("scheduler", [bytes(UNPROVEN_BYTES), b""])
        got = 0
        deadline = time.monotonic() + LIMIT_S
        while got < 20:
            assert time.monotonic() < deadline
            got += sum(isinstance(event, Arrived) for event in acceptor.poll(0.05))


def test_who_is_refused_hears_why_and_then_loses_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LAST_WORDS_S", 0.2)
    with listening() as (node, port):
        peer = Peer(port)
        peer.enter_as_plain(*credentials(TOKEN))
        peer.send(frame(b"hello"))
        [arrived] = until(node, Arrived)
        node.send(arrived.link, [b"no"])
        node.refused(arrived.link)
        said = peer.command() or peer.command()  # the first may be a probe
        assert said == b"no"
        assert peer.receive(1) == b""
        assert not [event for event in node.poll(0) if isinstance(event, Stranger)]
        peer.close()


@pytest.mark.parametrize(
    ("token", "theirs", "here", "there"),
    [
        (TOKEN, b"another", "it does not know this job's token", "the other side does not know this job's token"),
        (TOKEN, b"", "it runs open (no token), and this job has a token", "the other side has a token"),
        (b"", TOKEN, "it has a token, and this job runs open", "the other side runs open (no token)"),
    ],
)
def test_both_sides_are_told_whose_token_is_wrong(token: bytes, theirs: bytes, here: str, there: str) -> None:
    with pair(token, theirs) as (acceptor, opener):
        [rejected] = until(opener, Rejected)
        [stranger] = until(acceptor, Stranger)
        assert rejected.link == "scheduler"
        assert there in rejected.reason
        assert here in stranger.reason
        assert (stranger.address, stranger.is_foreign) == ("127.0.0.1", False)


@pytest.mark.parametrize(
    "said", [b"", b"\xff", b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01" + bytes(100), b"SSH-2.0-x\r\n"]
)
def test_what_does_not_speak_zeromq_at_all_is_not_taken_for_ps_lite(said: bytes) -> None:
    with listening() as (node, port):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as knocker:
                knocker.sendall(said)
        assert [event for _ in range(10) for event in node.poll(0.05)] == []


@TOKENS
def test_a_program_with_another_protocol_is_recognised_and_its_user_too(token: bytes) -> None:
    with listening(token) as (node, port), zmq.Context() as context, context.socket(zmq.DEALER) as foreign:
        foreign.linger = 0
        foreign.connect("tcp://127.0.0.1:%d" % port)  # as ps-lite does it
        # It tries again and again; at times it is gone before its user could be looked up.
        deadline = time.monotonic() + LIMIT_S
        found: list[Stranger] = []
        while not any(each.is_same_user for each in found):
            assert time.monotonic() < deadline, found
            found += [event for event in node.poll(0.05) if isinstance(event, Stranger)]
        assert {each.reason for each in found} == {"it speaks ZeroMQ, but not as a node of distrun does"}
        assert all(each.is_foreign for each in found)


@pytest.fixture
def accepted() -> Iterator[socket.socket]:
    """A corked connection that came in."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        admission._cork(listener.fileno(), True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as one:
            yield one


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_connection_is_kept_by_a_descriptor_of_its_own_and_let_go_on(accepted: socket.socket) -> None:
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 1
    entry = admission._look(accepted.fileno(), accepted.getsockname()[1], 100.0)
    assert entry.held.fileno() != accepted.fileno()
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 0
    assert (entry.address, entry.is_same_user, entry.cut_at) == ("127.0.0.1", True, 100.0 + admission.UNPROVEN_S)
    entry.held.close()


def test_a_descriptor_that_was_used_again_is_left_alone(accepted: socket.socket) -> None:
    reading, writing = os.pipe()
    before = descriptors()
    port = accepted.getsockname()[1]
    for fd in (reading, accepted.fileno()):
        assert admission._look(fd, port + 1, 0.0).held is None
    assert descriptors() == before
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 1
    os.close(reading)
    os.close(writing)


def test_a_connection_goes_on_if_this_process_has_no_descriptor_left(
    accepted: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(fd: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", dup)
    assert admission._look(accepted.fileno(), 0, 0.0).held is None
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_CORK) == 0


def test_a_connection_that_is_gone_belongs_to_no_user(accepted: socket.socket) -> None:
    here, there = accepted.getsockname(), accepted.getpeername()
    assert admission._is_same_user(there, here)
    assert admission._is_same_user(("127.0.0.1", 1), ("127.0.0.1", 2)) is False


def test_where_the_system_does_not_tell_users_of_connections_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with listening() as (node, port):
        with socket.create_connection(("127.0.0.1", port)) as knocker:
            knocker.sendall(greeting(b"NULL"))
            found = until(node, Stranger)
        assert {(each.is_foreign, each.is_same_user) for each in found if isinstance(each, Stranger)} == {(True, None)}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user too")
def test_a_program_of_another_user_is_told_apart() -> None:
    knock = (
        "import os, sys, zmq; os.setuid(65534); peer = zmq.Context().socket(zmq.DEALER);"
        " peer.connect('tcp://127.0.0.1:' + sys.argv[1]); zmq.select([peer], [], [])"
    )
    found: list[Event] = []
    with listening() as (node, port):
        for _ in range(3):
            process = subprocess.Popen([sys.executable, "-c", knock, str(port)])
            found += until(node, Stranger)
            process.kill()
            process.wait()
    assert all(isinstance(event, Stranger) and not event.is_same_user for event in found)


def test_a_flood_of_connections_is_told_in_few_words() -> None:
    with listening() as (node, port):
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", port)) as knocker:
                knocker.sendall(greeting(b"NULL"))
                with contextlib.suppress(ConnectionError):
                    while knocker.recv(64):
                        pass
        told = 0
        deadline = time.monotonic() + LIMIT_S
        while told < 300:
            assert time.monotonic() < deadline, told
            events = node.poll(0.05)
            assert len(events) <= 65
            for event in events:
                assert isinstance(event, Stranger)
                more = re.match(r"(\d+) more connections were closed", event.reason)
                told += int(more[1]) if more else 1
        assert told == 300
        assert [event for _ in range(4) for event in node.poll(0.05)] == []


def test_the_password_is_made_of_the_token_and_does_not_show_it() -> None:
    user, password = credentials(TOKEN)
    assert user == b"token"
    assert len(password) == 64
    assert TOKEN not in password
    assert credentials(b"another")[1] != password
    assert credentials(b"") == (b"open", b"open")


def test_what_is_no_password_is_turned_away() -> None:
    own = credentials(TOKEN)
    assert judge(own, *own) == ("200", "")
    assert judge(own, b"token", b"")[0] == "400"
    assert judge(own, b"", b"")[0] == "500"
    assert judge(credentials(b""), *own)[0] == "500"
    assert "another job" in refusal(TOKEN, 400)


def test_a_password_that_was_split_over_frames_is_none() -> None:
    with listening() as (_, port):
        peer = Peer(port)
        peer.send(greeting(b"PLAIN"))
        peer.receive(64)
        peer.send(hello(*credentials(TOKEN))[:-8])
        peer.send(b"\xff" * 8)
        assert not peer.command().startswith(b"\x07WELCOME")
        peer.close()
