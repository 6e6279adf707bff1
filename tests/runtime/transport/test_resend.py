"""What the wrapper does at each event, with a transport and a clock that are told; then whole jobs on bad networks."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster
from scripted_transport import Script

from distrun_runtime.errors import PeerLost, Refused
from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Buffer, Kind, Message
from distrun_runtime.store.dist import DistStore
from distrun_runtime.transport.envelope import ACK, DATA, Envelope, read
from distrun_runtime.transport.faults import Faults
from distrun_runtime.transport.resend import Resending
from distrun_runtime.transport.window import LIMIT
from distrun_runtime.transport.zeromq import Arrived, Down, Event, Lease, Up

WELCOME = message.encode(Message(Kind.WELCOME))


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


def test_buffers_are_lent_until_their_message_was_acknowledged() -> None:
    made, script = welcomed()
    lease = made.send("server-0", plain(1))
    assert not lease.is_over
    script.coming.append([ack(1)])
    made.poll(0)
    assert lease.is_over


@pytest.mark.parametrize("ended", ["down", "disconnect", "connect"])
def test_the_end_of_a_connection_forgets_what_was_sent_on_it(ended: str) -> None:
    made, script = welcomed()
    lease = made.send("server-0", plain(1))
    if ended == "down":
        script.coming.append([Down("server-0", "died")])
        assert made.poll(0) == [Down("server-0", "died")]
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
    made.send("server-0", plain(1, Kind.PULL))
    events: list[Event] = []
    while not events:
        script.now += 1.0
        events = made.poll(0)
    reason = "it did not acknowledge a message (PULL) that was sent %d times in 66.0 s" % (LIMIT + 1)
    assert events == [Down("server-0", reason)]
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


@pytest.mark.parametrize(("linger_s", "waits"), [(2.0, True), (0.0, False)])
def test_closing_waits_as_long_as_it_is_told_for_what_has_not_arrived(linger_s: float, waits: bool) -> None:
    made, script = welcomed()
    made.send("server-0", plain(1))
    polled = len(script.waits)
    times = iter(range(1000))
    made._clock = lambda: next(times) * 0.05
    made.close(linger_s)
    assert (len(script.waits) > polled) is waits


# --- whole jobs


BAD = Faults.parse("drop=5,duplicate=5,reorder=5,delay=2:5ms,seed=7")


def forty_rounds(kv: DistStore) -> list[list[float]]:
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
    with Cluster(over=over, resend_s=0.05, faults=BAD, bigarray_bound=20) as cluster:
        results = cluster.run(forty_rounds)
        servers = [cluster.transports["server-%d" % rank] for rank in range(2)]
    assert results == [[[3.0 * number] * 3 for number in range(1, 41)]] * 2
    assert sum(server.repeats for server in servers) > 5
    assert set(cluster.codes.values()) == {0}


def test_without_faults_nothing_is_sent_again() -> None:
    with Cluster(over="inproc", resend_s=20.0, bigarray_bound=20) as cluster:
        results = cluster.run(forty_rounds)
        assert results[0] == results[1]
        assert all(transport.repeats == 0 for transport in cluster.transports.values())


def test_a_server_that_hears_no_push_is_lost_by_name() -> None:
    def script(kv: DistStore) -> None:
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


class Queue(Script):
    """A transport that keeps what it is given until it is told that it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.lease = Held()

    def send(self, link: str, frames: Any) -> Lease:
        super().send(link, frames)
        return self.lease


class Held(Lease):
    def __init__(self) -> None:
        super().__init__(())
        self.is_out = True

    @property
    def is_over(self) -> bool:
        return not self.is_out


def test_a_peer_whose_messages_have_not_left_yet_is_not_given_up() -> None:
    script = Queue()
    made = Resending(script, 1.0, clock=lambda: script.now)
    script.coming.append([Arrived("server-0", WELCOME)])
    made.poll(0)
    made.send("server-0", plain(1))
    for script.now in range(200):
        assert made.poll(0) == []
    assert [each.number for each in envelopes(script)] == [1]
    script.lease.is_out = False
    script.now = 201.0
    made.poll(0)
    assert [each.number for each in envelopes(script)] == [1]
    assert made.repeats == 1
