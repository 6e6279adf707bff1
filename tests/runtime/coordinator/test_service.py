"""The coordinator's connection to its client, over a real socket pair."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from serviceclient import LIMIT_S, ServiceClient

from distrun_runtime.contract import session
from distrun_runtime.contract.control import JobEnded
from distrun_runtime.coordinator import clients, service
from distrun_runtime.coordinator.service import Service


@pytest.fixture
def pair(signals: list[str]) -> Iterator[tuple[Service, ServiceClient]]:
    ours, its = socket.socketpair()
    connection = Service(ours)
    connection.start()
    with its:
        yield connection, ServiceClient(its)
        connection.close()  # so that no signal comes later


def wait_for(seen: list[str], count: int = 1) -> list[str]:
    end = time.monotonic() + LIMIT_S
    while len(seen) < count and time.monotonic() < end:
        time.sleep(0.01)
    return seen


def test_output_messages_and_outcome_arrive_in_order(pair: tuple[Service, ServiceClient]) -> None:
    connection, client = pair
    connection.output("worker-0", "h1", "out", b"hello\n", 0)
    connection.say("2 hosts are up", "info")
    connection.finish(JobEnded({"exit_code": 3}))
    connection.close()
    first, second, third = client.rest()
    names = {"task": "worker-0", "host": "h1", "stream": "out", "at": 0, "length": 6}
    assert first == ({"type": "output", "size": 6, **names}, b"hello\n")
    assert second.header == {"type": "said", "text": "2 hosts are up", "level": "info"}
    assert third.header == {"type": "outcome", "outcome": {"exit_code": 3}}


def test_a_slow_client_gets_places_in_the_log_and_every_message(
    pair: tuple[Service, ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "QUEUE_LIMIT", 100_000)
    connection, client = pair
    for number in range(300):
        connection.output("worker-0", "h1", "out", b"x" * 10_000, number * 10_000)
    connection.say("after", "info")
    threading.Thread(target=connection.close).start()
    *pieces, said = client.rest()
    assert said.header["text"] == "after"
    places = [piece.header for piece in pieces if not piece.body]
    assert places, "all was sent as bytes"
    at = 0
    for piece in pieces:  # nothing twice, nothing left out
        assert piece.header["at"] == at
        at += piece.header["length"]
    assert at == 3_000_000


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_a_signal_of_the_client_is_a_signal_to_the_coordinator(
    name: str, pair: tuple[Service, ServiceClient], signals: list[str]
) -> None:
    _, client = pair
    client.send("signal", name=name)
    assert wait_for(signals) == ["SIG" + name]


def test_the_end_of_the_client_hangs_up(pair: tuple[Service, ServiceClient], signals: list[str]) -> None:
    connection, client = pair
    assert not connection.has_lost_launcher
    client.socket.close()
    assert wait_for(signals) == ["SIGHUP"]
    assert connection.has_lost_launcher
    connection.say("nobody hears it", "info")
    connection.close()


def test_the_end_of_the_client_terminates_where_hangups_are_ignored(
    pair: tuple[Service, ServiceClient], signals: list[str]
) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pair[1].socket.close()
    assert wait_for(signals) == ["SIGTERM"]


@pytest.mark.parametrize(
    "wrong",
    [
        b"\xff" * 8,
        session.encode({"type": "signal", "name": "KILL"}),
        session.encode({"type": "signal"}),
        session.encode({"type": "spawn"}),
        session.encode({"type": "answer", "id": "x"}),
    ],
    ids=["no frame", "another signal", "no signal", "another type", "no number"],
)
def test_a_client_that_sends_anything_else_is_gone(
    wrong: bytes, pair: tuple[Service, ServiceClient], signals: list[str]
) -> None:
    _, client = pair
    client.socket.sendall(wrong)
    assert wait_for(signals) == ["SIGHUP"]


def test_after_the_outcome_the_end_of_the_client_is_no_hangup(
    pair: tuple[Service, ServiceClient], signals: list[str]
) -> None:
    connection, client = pair
    connection.finish(JobEnded({}))
    connection.close()
    client.socket.close()
    assert signals == []


class Asking(threading.Thread):
    """A call of `ask` in a thread of its own."""

    def __init__(self, connection: Service, limit_s: float = LIMIT_S) -> None:
        super().__init__()
        self.wanted = True
        self.answer: str | None = "nothing yet"
        self.error: Exception | None = None
        self._connection = connection
        self._limit_s = limit_s
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._connection.ask("Password: ", self._limit_s, self._check)
        except RuntimeError as err:
            self.error = err

    def _check(self) -> None:
        if not self.wanted:
            raise RuntimeError("no longer wanted")

    def ended(self) -> Asking:
        self.join(LIMIT_S)
        assert not self.is_alive()
        return self


def test_a_question_is_answered_by_its_number(pair: tuple[Service, ServiceClient]) -> None:
    connection, client = pair
    first = Asking(connection)
    one = client.next().header
    assert one == {"type": "prompt", "id": 1, "text": "Password: ", "limit_s": LIMIT_S}
    second = Asking(connection)
    two = client.next().header
    client.send("answer", b"b", id=two["id"], given=True)
    client.send("answer", "ä".encode(), id=one["id"], given=True)
    assert (first.ended().answer, second.ended().answer) == ("ä", "b")


def test_an_empty_answer_is_one_and_none_is_none(pair: tuple[Service, ServiceClient]) -> None:
    connection, client = pair
    for given, expected in ((True, ""), (False, None)):
        asking = Asking(connection)
        client.send("answer", id=client.next().header["id"], given=given)
        assert asking.ended().answer == expected


def test_a_question_that_is_not_wanted_any_more_is_withdrawn(pair: tuple[Service, ServiceClient]) -> None:
    connection, client = pair
    asking = Asking(connection)
    number = client.next().header["id"]
    asking.wanted = False
    assert client.next().header == {"type": "withdrawn", "id": number}
    assert str(asking.ended().error) == "no longer wanted"


def test_a_question_ends_with_the_client(pair: tuple[Service, ServiceClient], signals: list[str]) -> None:
    connection, client = pair
    asking = Asking(connection)
    client.next()
    client.socket.close()
    assert asking.ended().answer is None
    assert wait_for(signals) == ["SIGHUP"]


def test_a_client_that_takes_nothing_is_given_up_at_the_end(
    pair: tuple[Service, ServiceClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "END_S", 0.3)
    connection, client = pair
    connection.output("worker-0", "h1", "out", b"x" * 4_000_000, 0)
    begun = time.monotonic()
    connection.close()
    assert 0.3 <= time.monotonic() - begun < LIMIT_S
    with contextlib.suppress(ConnectionError):
        assert len(client.rest()) == 0
