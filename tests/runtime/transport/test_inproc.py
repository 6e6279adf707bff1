"""What only the in-process transport can do: delay messages and cut connections when it is told to."""

from __future__ import annotations

import time

from inproc import InprocNetwork
from transports import DEADLINE_S, HOST, endpoint, frames_of, has, until

from distrun_runtime.transport.base import Arrived, Down, Up


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
