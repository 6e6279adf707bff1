"""Envelopes, windows, what the transport does at each event (inner transport and clock are told), and whole jobs."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_transport import Held, Script, check_calls

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.errors import PeerLost, Refused
from distrun_runtime.kvstore import KVStore
from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.transport.base import Arrived, Down, Event, PathChosen, Released, Up
from distrun_runtime.transport.faults import Faults
from distrun_runtime.transport.resend import (
    ACK,
    BATCH,
    DATA,
    LIMIT,
    Envelope,
    Incoming,
    Outgoing,
    Resending,
    kind_of,
    read,
)

WELCOME = message.encode(Message(Kind.WELCOME))
PUSH = message.encode(Message(Kind.PUSH))


# --- envelopes


def test_the_bytes_are_fixed() -> None:
    assert Envelope(DATA, 1, 7).encode() == bytes.fromhex("44525253 01 000000 01000000 0700000000000000")
    assert Envelope(ACK, 0, 7, (9,)).encode() == bytes.fromhex(
        "44525253 02 000000 00000000 0700000000000000 0900000000000000"
    )


@pytest.mark.parametrize(
    "frames",
    [
        PUSH,
        [b"", b""],
        [Envelope(DATA, 0, 1).encode()],
        [Envelope(DATA, 0, 1).encode() + b"x", *PUSH],
        [Envelope(DATA, 0, 1).encode()[:-1], *PUSH],
        [Envelope(ACK, 0, 1).encode(), *PUSH],
        [Envelope(ACK, 0, 1).encode() + b"1234"],
        [Envelope(3, 0, 1).encode()],
    ],
)
def test_what_is_no_right_envelope_is_none(frames: list[bytes]) -> None:
    assert read(frames) is None


def test_the_kind_of_a_message_is_known_in_and_out_of_its_envelope() -> None:
    assert kind_of(PUSH) is Kind.PUSH
    assert kind_of([Envelope(DATA, 0, 1).encode(), *PUSH]) is Kind.PUSH
    assert kind_of([Envelope(ACK, 0, 1).encode()]) is None
    assert kind_of([b"", b""]) is None
    assert kind_of([b"short"]) is None
    assert kind_of([b"DRKV\x01\x00\xff" + bytes(41), b""]) is None


# --- windows


def test_a_message_is_sent_again_after_the_timeout_and_then_each_time_later() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    out.put("a", 0.0)
    sent = [(0.9, []), (1.0, [(1, "a")]), (2.9, []), (3.0, [(1, "a")]), (5.9, []), (6.0, [(1, "a")])]
    for now, expected in sent:
        assert out.due(now) == expected, now


def test_what_was_acknowledged_is_not_sent_again() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    for item in "abcde":
        out.put(item, 0.0)
    assert out.acknowledge(2, (4,)) == ["a", "b", "d"]
    assert out.due(1.0) == [(3, "c"), (5, "e")]
    assert out.acknowledge(2, (4, 9)) == []
    assert out.acknowledge(5) == ["c", "e"]
    assert out.is_empty
    assert out.next_due == float("inf")
    assert out.due(100.0) == []


def test_only_so_many_are_sent_again_at_once_and_the_others_wait_as_long_again() -> None:
    out: Outgoing[int] = Outgoing(1.0)
    for number in range(BATCH + 5):
        out.put(number, 0.0)
    assert [number for number, _ in out.due(1.0)] == list(range(1, BATCH + 1))
    assert out.due(1.0) == []
    assert [number for number, _ in out.due(2.0)] == list(range(BATCH + 1, BATCH + 6))


def test_when_time_is_short_everything_is_due_soon() -> None:
    out: Outgoing[str] = Outgoing(10.0)
    out.put("a", 0.0)
    out.hasten(1.0, 0.5)
    assert out.due(1.5) == [(1, "a")]
    assert out.next_due == 2.5


@pytest.mark.parametrize(("window", "window_bytes"), [(3, 1000), (100, 20)])
def test_what_is_too_far_ahead_is_taken_as_lost(window: int, window_bytes: int) -> None:
    into: Incoming[int] = Incoming(window, window_bytes)
    for number in (2, 3, 4, 5):
        into.take(number, number, 10)
    through, others = into.acknowledged
    assert through == 0
    assert others == (2, 3)
    assert into.take(1, 1, 10) == [1, 2, 3]
    assert into.take(4, 4, 10) == [4]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), loss=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_whatever_is_lost_doubled_or_exchanged_all_arrives_in_order_once(count: int, loss: int, seed: int) -> None:
    chance = random.Random(seed)
    out: Outgoing[int] = Outgoing(1.0)
    into: Incoming[int] = Incoming(window=8)
    on_the_way = [(out.put(item, 0.0), item) for item in range(count)]
    delivered: list[int] = []
    now = 0.0
    for _ in range(10_000):
        chance.shuffle(on_the_way)
        for number, item in on_the_way + on_the_way[: len(on_the_way) // 3]:
            if chance.random() * 100 >= loss:
                delivered += into.take(number, item)
                if chance.random() * 100 >= loss:
                    out.acknowledge(*into.acknowledged)
        if out.is_empty:
            break
        now = out.next_due
        on_the_way = out.due(now)
    assert delivered == list(range(count))
    assert out.is_empty


# --- the transport


def plain(number: int, kind: Kind = Kind.PUSH) -> list[Buffer]:
    return message.encode(Message(kind, request=number))


def data(number: int, request: int | None = None, incarnation: int = 0) -> Arrived:
    frames = plain(number if request is None else request)
    return Arrived("server-0", [Envelope(DATA, incarnation, number).encode(), *frames])


def ack(through: int, *others: int) -> Arrived:
    return Arrived("server-0", [Envelope(ACK, 0, through, others).encode()])


def welcomed() -> tuple[Resending, Script]:
    """Return a wrapper whose connection to server-0 is welcome, and what is inside."""
    script = Script()
    made = Resending(script, 1.0, incarnation=3, clock=lambda: script.now)
    script.coming.append([Up("server-0"), Arrived("server-0", WELCOME)])
    assert made.poll(0) == [Up("server-0"), Arrived("server-0", WELCOME)]
    return made, script


def envelopes(script: Script) -> list[Envelope]:
    """Return the envelopes that were sent since the last time."""
    found = [envelope for _, frames in script.sent if (envelope := read(frames)) is not None]
    script.sent.clear()
    return found


def requests(events: list[Event]) -> list[int]:
    return [message.decode(event.frames).request for event in events if isinstance(event, Arrived)]


def test_the_handshake_travels_without_an_envelope_and_what_follows_with_one() -> None:
    script = Script()
    made = Resending(script, 1.0)
    hello = plain(0, Kind.HELLO)
    made.send("in:1", hello)
    made.send("in:1", WELCOME)
    made.send("in:1", plain(1))
    made.send("in:1", plain(2))
    assert [frames for _, frames in script.sent[:2]] == [hello, WELCOME]
    assert [frames[1:] for _, frames in script.sent[2:]] == [plain(1), plain(2)]
    assert envelopes(script) == [Envelope(DATA, 0, 1), Envelope(DATA, 0, 2)]


def test_an_envelope_before_welcome_is_not_opened() -> None:
    script = Script()
    made = Resending(script, 1.0)
    script.coming.append([data(1)])
    assert made.poll(0) == [data(1)]
    assert script.sent == []


def test_a_connection_that_has_chosen_a_path_goes_on_being_numbered() -> None:
    script = Script()
    made = Resending(script, 1.0)
    made.send("in:1", WELCOME)
    made.send("in:1", plain(1))
    script.coming.append([PathChosen("in:1", "segments")])
    assert made.poll(0) == [PathChosen("in:1", "segments")]
    made.send("in:1", plain(2))
    assert envelopes(script) == [Envelope(DATA, 0, 1), Envelope(DATA, 0, 2)]


def test_messages_are_heard_in_order_once_and_acknowledged_together() -> None:
    made, script = welcomed()
    script.coming += [[data(2)], [data(1), data(2), data(3)], [data(1)]]
    assert requests(made.poll(0)) == []
    assert envelopes(script) == [Envelope(ACK, 3, 0, (2,))]
    assert requests(made.poll(0)) == [1, 2, 3]
    assert envelopes(script) == [Envelope(ACK, 3, 3)]
    assert requests(made.poll(0)) == []
    assert envelopes(script) == [Envelope(ACK, 3, 3)]


def test_messages_of_another_incarnation_are_dropped() -> None:
    made, script = welcomed()
    script.coming += [[data(1)], [data(2, incarnation=1)]]
    assert requests(made.poll(0)) == [1]
    script.sent.clear()
    assert requests(made.poll(0)) == []
    assert script.sent == []


def test_a_garbled_envelope_is_left_to_whoever_decodes_it() -> None:
    made, script = welcomed()
    garbled = Arrived("server-0", [b"DRRS\x09", *plain(1)])
    script.coming.append([garbled])
    assert made.poll(0) == [garbled]


def test_what_is_not_acknowledged_is_sent_again_and_the_poll_wakes_for_it() -> None:
    made, script = welcomed()
    made.send("server-0", plain(1))
    made.send("server-0", plain(2))
    envelopes(script)
    made.poll(30.0)
    assert script.waits[-1] == 1.0
    script.now = 0.5
    script.coming.append([ack(0, 2)])
    made.poll(30.0)
    assert script.waits[-1] == 0.5
    script.now = 1.0
    assert made.poll(30.0) == []
    assert envelopes(script) == [Envelope(DATA, 3, 1)]
    assert made.repeats == 1
    script.coming.append([ack(2)])
    made.poll(30.0)
    script.now = 9.0
    made.poll(30.0)
    assert script.waits[-1] == 30.0
    assert envelopes(script) == []


@pytest.mark.parametrize("ended", ["down", "disconnect", "connect"])
def test_the_end_of_a_connection_forgets_what_was_sent_on_it(ended: str) -> None:
    made, script = welcomed()
    lease = made.send("server-0", plain(1))
    if ended == "down":
        script.coming.append([Down("server-0", "died")])
        assert made.poll(0) == [Down("server-0", "died"), Released(lease)]
    elif ended == "disconnect":
        made.disconnect("server-0")
    else:
        made.connect("server-0", "tcp://127.0.0.1:1")
    assert lease.is_over
    envelopes(script)
    script.now = 100.0
    made.poll(0)
    assert envelopes(script) == []
    # A new connection counts from 1 again.
    script.coming.append([Up("server-0"), Arrived("server-0", WELCOME)])
    made.poll(0)
    made.send("server-0", plain(2))
    assert envelopes(script) == [Envelope(DATA, 3, 1)]


def test_a_connection_that_acknowledges_nothing_is_given_up_with_what_was_tried() -> None:
    made, script = welcomed()
    lease = made.send("server-0", plain(1, Kind.PULL))
    events: list[Event] = []
    while not events:
        script.now += 1.0
        events = made.poll(0)
    reason = "it did not acknowledge a message (PULL) that was sent %d times in 66.0 s" % (LIMIT + 1)
    assert events == [Down("server-0", reason), Released(lease)]
    script.coming += [[data(1)], [Down("server-0", "closed")], [Up("server-0")]]
    assert [made.poll(0) for _ in range(3)] == [[], [], [Up("server-0")]]


def test_a_send_or_an_acknowledgement_to_a_connection_that_is_gone() -> None:
    made, script = welcomed()
    made.send("server-0", plain(1))
    script.gone.add("server-0")
    with pytest.raises(ConnectionError, match="server-0 is gone"):
        made.send("server-0", plain(2))
    script.coming.append([data(1)])
    assert requests(made.poll(0)) == [1]
    script.now = 1.0
    assert made.poll(0) == []


def test_closing_waits_until_all_has_arrived_but_not_longer_than_it_may() -> None:
    made, script = welcomed()
    made.send("server-0", plain(1))
    script.coming.append([ack(1)])
    made.close(2.0)
    assert script.closed == [2.0]
    assert len(script.coming) == 0

    made, script = welcomed()
    made.send("server-0", plain(1))
    times = iter(range(1000))
    made._clock = lambda: next(times) * 0.05
    envelopes(script)
    made.close(2.0)
    assert script.closed == [2.0]
    assert len(envelopes(script)) >= 3


def test_closing_waits_for_nothing_if_it_is_told_so() -> None:
    made, script = welcomed()
    made.send("server-0", plain(1))
    polled = len(script.waits)
    made.close(0.0)
    assert len(script.waits) == polled


def test_a_peer_whose_messages_have_not_left_yet_is_not_given_up() -> None:
    script, held = Script(), Held()
    script.lease = held
    made = Resending(script, 1.0, clock=lambda: script.now)
    script.coming.append([Arrived("server-0", WELCOME)])
    made.poll(0)
    made.send("server-0", plain(1))
    for script.now in range(200):
        assert made.poll(0) == []
    assert [each.number for each in envelopes(script)] == [1]
    held.is_over = True
    script.now = 201.0
    made.poll(0)
    assert [each.number for each in envelopes(script)] == [1]
    assert made.repeats == 1


def test_buffers_are_released_when_they_have_left_and_are_acknowledged() -> None:
    made, script = welcomed()
    acknowledged_last, left_last = Held(), Held()
    script.lease = acknowledged_last
    one = made.send("server-0", plain(1))
    script.lease = left_last
    two = made.send("server-0", plain(2))
    acknowledged_last.is_over = True
    script.coming.append([Released(acknowledged_last)])
    assert made.poll(0) == []
    script.coming.append([ack(2)])
    assert made.poll(0) == [Released(one)]
    assert (one.is_over, two.is_over) == (True, False)
    left_last.is_over = True
    script.coming.append([Released(left_last)])
    assert made.poll(0) == [Released(two)]
    assert two.is_over


def test_buffers_of_a_message_of_the_handshake_are_released_when_they_have_left() -> None:
    script, held = Script(), Held()
    script.lease = held
    made = Resending(script, 1.0)
    assert made.send("server-0", plain(0, Kind.HELLO)) is held
    held.is_over = True
    script.coming.append([Released(held)])
    assert made.poll(0) == [Released(held)]


def test_buffers_of_messages_that_are_given_up_are_released() -> None:
    made, _ = welcomed()
    lease = made.send("server-0", plain(1))
    made.disconnect("server-0")
    assert made.poll(0) == [Released(lease)]


def test_every_other_call_goes_to_the_inner_transport() -> None:
    script = Script()
    check_calls(Resending(script, 1.0), script)


# --- whole jobs


BAD = Faults.parse("drop=5,duplicate=5,reorder=5,delay=2:5ms,seed=7")


def forty_rounds(kv: KVStore) -> list[list[float]]:
    """Push to a small and a cut key, and read the sums."""
    kv.init(["small", "cut"], [np.zeros(3, np.float32), np.zeros((50, 3), np.float32)])
    small, cut = np.zeros(3, np.float32), np.zeros((50, 3), np.float32)
    seen = []
    for number in range(1, 41):
        grad = np.full(3, (kv.rank + 1) * number, np.float32)
        kv.push(["small", "cut"], [grad, np.tile(grad, (50, 1))])
        kv.pull(["small", "cut"], out=[small, cut])
        assert (cut == small).all()
        seen.append(small.tolist())
    kv.barrier()
    kv.close()
    return seen


@pytest.mark.parametrize("over", ["inproc", "zmq"])
def test_forty_rounds_on_a_network_that_loses_doubles_and_exchanges_are_exact(over: str) -> None:
    with Cluster(over=over, resend_s=0.05, faults=BAD, bigarray_bound=20, partition="mxnet") as cluster:
        results = cluster.run(forty_rounds)
        servers = [cluster.transports["server-%d" % rank] for rank in range(2)]
    assert results == [[[3.0 * number] * 3 for number in range(1, 41)]] * 2
    assert sum(server.repeats for server in servers) > 5
    assert set(cluster.codes.values()) == {0}


def test_without_faults_nothing_is_sent_again() -> None:
    with Cluster(over="inproc", resend_s=20.0, bigarray_bound=20, partition="mxnet") as cluster:
        results = cluster.run(forty_rounds)
        assert results[0] == results[1]
        assert all(transport.repeats == 0 for transport in cluster.transports.values())


def test_a_server_that_hears_no_push_is_lost_by_name() -> None:
    def script(kv: KVStore) -> None:
        kv.init("a", np.zeros(3))
        kv.push("a", np.ones(3))
        kv.pull("a", out=np.zeros(3))

    deaf = Faults.parse("drop=100,kinds=PUSH")
    cluster = Cluster(workers=1, servers=1, over="inproc", resend_s=0.005, faults=deaf)
    with pytest.raises(PeerLost, match=r"server-0.*did not acknowledge a message \(PUSH\) that was sent 11 times"):
        cluster.run(script)
    cluster.finish()


def test_a_worker_that_is_set_otherwise_is_refused_and_told_so() -> None:
    refused: list[Any] = []
    with Cluster(workers=1, servers=1, over="inproc", resend_s=1.0) as cluster:

        def join() -> None:
            session = cluster.session(0, resend_s=0.0)
            try:
                session.open()
            except Refused as err:
                refused.append(err)
                session.note_crash(err)
            finally:
                session.end()

        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(DEADLINE_S)
        cluster.run(lambda kv: kv.close())
    assert "worker-0@here" in str(refused[0])
    assert "runs with PS_RESEND=0 and scheduler with PS_RESEND=1: set it alike for all nodes" in str(refused[0])
