"""Calls that a thread of the script carries out by itself, and what becomes of those that it cannot finish."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, Cluster, open_store

from distrun_runtime.errors import KVError, PeerLost, StoreClosed
from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, entries_of, rows_of
from distrun_runtime.ps import role, session
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.session import Asked, NodeSession, PlannedSend, PlannedSends, answers_to

COUNTS_MESSAGES = True
SIZE = 1000


class Script:
    """A worker with a store of one key a server, which counts: each push adds 1 to its weight."""

    def __init__(self, node: NodeSession) -> None:
        self.node = node
        self.kv = open_store("dist_sync", node)
        self.servers = node.config.servers
        self.keys = [str(each) for each in range(self.servers)]
        self.kv.init(self.keys, [np.zeros(SIZE, np.float32) for _ in self.keys])
        self.kv.set_optimizer("sgd", learning_rate=1.0 / node.config.workers, wd=0.0)
        self.begun: list[NodeRequest] = []
        self.heads: dict[tuple[str, int], bytearray] = {}
        """By link and size: each is written again, as that of a `PlannedMessage`."""
        self.said: list[str] = []
        self.sends = PlannedSends()
        """Of the last round."""
        self.rounds = 0
        self.places = self._places()

    def _places(self) -> dict[str, tuple[int, int]]:
        """Return the store and the key number of the first key of each server."""
        seen: list[Any] = []
        ask = self.node.ask

        def spying(*arguments: Any, **more: Any) -> NodeRequest:
            seen.extend(arguments[1])
            return ask(*arguments, **more)

        self.node.ask = spying  # type: ignore[method-assign]
        try:
            self.kv.pull(self.keys, out=[np.empty(SIZE, np.float32) for _ in self.keys])
        finally:
            self.node.ask = ask  # type: ignore[method-assign]
        return {link: (each.store, rows_of(each.entries)[0].key) for link, each in seen if each.kind is Kind.PULL}

    def messages(self, kind: Kind = Kind.PUSHPULL, **more: Any) -> list[tuple[str, Message]]:
        """Return the messages of the next round, one to each server."""
        found = []
        for link, (store, key) in sorted(self.places.items()):
            payload = Payload.NONE if kind is Kind.PULL else Payload.PACKED
            entries = entries_of([Entry(key, 0, SIZE, self.rounds + (kind is not Kind.PULL), payload=payload)])
            payloads = [] if kind is Kind.PULL else [np.full(SIZE, -1, np.float32).data.cast("B")]
            found.append((link, Message(kind, store=store, entries=entries, payloads=payloads, **more)))
        return found

    def exchange(self, kind: Kind = Kind.PUSHPULL, **more: Any) -> list[Any] | NodeRequest:
        """Carry out the next round."""
        messages = self.messages(kind, **more)
        sends = self.sends = PlannedSends()
        for link, each in messages:
            now, *rest = message.encode(each, self.node.sender)
            head = self.heads.setdefault((link, len(now)), bytearray(now))
            head[:] = now
            sends.append(PlannedSend(link, [head, *rest]))
        return self.node.exchange(
            sends, lambda: Asked("a round", messages), self.begun.append, lambda: self.said.append("sent")
        )

    def round(self) -> bool:
        """Make a round; return whether this thread did it all by itself."""
        found = self.exchange()
        self.rounds += 1
        if isinstance(found, NodeRequest):
            assert self.begun[-1] is found
            found.wait(DEADLINE_S)
            return False
        for frames in found:
            answer = message.decode(frames)
            assert answer.is_reply
            assert (np.frombuffer(answer.payloads[0], np.float32) == self.rounds).all()
        return True

    def ahead(self, late: threading.Event) -> NodeRequest | None:
        """Begin a round that worker 1 joins when `late` is set; return what it becomes. None: this is worker 1."""
        self.settle()
        if self.node.rank == 1:
            assert late.wait(DEADLINE_S)
            self.round()
            return None
        found = self.exchange()
        self.rounds += 1
        assert isinstance(found, NodeRequest)
        return found

    def settle(self) -> None:
        """Wait until this worker has a direct connection to each server."""
        assert self.node._direct is not None
        deadline = time.monotonic() + DEADLINE_S
        while not all(map(self.node._direct.is_open, [*self.places, "scheduler"])):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def weight(self) -> float:
        """Return how many rounds the servers have counted."""
        outs = [np.empty(SIZE, np.float32) for _ in self.keys]
        self.kv.pull(self.keys, out=outs)
        assert len({float(out[0]) for out in outs}) == 1
        return float(outs[0][0])


def run(
    script: Callable[[Script], Any], workers: int = 1, servers: int = 2, over: str = "direct", **more: Any
) -> list[Any]:
    with Cluster(workers, servers, over=over, **more) as job:
        return job.run_sessions(lambda node: script(Script(node)))


def test_a_steady_round_is_sent_and_received_by_the_calling_thread() -> None:
    def script(made: Script) -> None:
        made.settle()
        found = [made.round() for _ in range(20)]
        assert found.count(True) >= 15, "only what meets a tick of the node's thread may be another's"
        assert made.said == ["sent"] * 20
        assert len(made.begun) == found.count(False)

    run(script)


def test_calls_by_either_way_alternate_in_one_order() -> None:
    def script(made: Script) -> None:
        made.settle()
        for number in range(30):
            if number % 2:
                made.round()
            else:
                made.node.ask("a round", made.messages()).wait(DEADLINE_S)
                made.rounds += 1
        assert made.weight() == 30

    run(script)


def test_a_barrier_with_the_scheduler_is_exchanged_as_well() -> None:
    def script(made: Script) -> None:
        made.settle()
        for _ in range(3):
            made.kv.barrier()

    run(script, workers=2)


@pytest.mark.parametrize("over", ["zmq", "segments", "inproc"])
def test_without_direct_connections_the_nodes_thread_does_it(over: str) -> None:
    def script(made: Script) -> None:
        assert not any(made.round() for _ in range(3))
        assert len(made.begun) == len(made.said) == 3

    run(script, over=over)


@pytest.mark.parametrize("more", [{"verbose": 2}, {"resend_s": 5.0}, {"stages": True}], ids=lambda more: str(*more))
def test_what_is_traced_measured_or_sent_again_is_done_by_the_nodes_thread(
    more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run(lambda made: [made.round() for _ in range(3)], **more)
    assert run(lambda made: any(made.round() for _ in range(3)), **more) == [False]


def test_nothing_is_overtaken_while_a_request_is_in_flight() -> None:
    """The first round waits for the other worker; what follows is queued behind it."""
    gate = threading.Barrier(2)

    def script(made: Script) -> None:
        made.settle()
        if made.node.rank == 0:
            first = made.node.ask("a round", made.messages())
            made.rounds += 1
            found = made.exchange()
            made.rounds += 1
            assert isinstance(found, NodeRequest)
            gate.wait(DEADLINE_S)
            first.wait(DEADLINE_S)
            found.wait(DEADLINE_S)
        else:
            gate.wait(DEADLINE_S)
            made.round()
            made.round()
        assert made.weight() == 2

    run(script, workers=2)


def test_a_round_that_others_are_late_for_becomes_a_request_that_goes_on() -> None:
    late = threading.Event()

    def script(made: Script) -> None:
        found = made.ahead(late)
        if found is None:
            return
        late.set()
        replies = found.wait(DEADLINE_S)
        assert [(np.frombuffer(each.payloads[0], np.float32) == 1).all() for each in replies] == [True, True]

    run(script, workers=2)


def test_a_note_of_what_is_waited_for_ends_the_wait_of_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(role, "FIRST_NOTE_S", 0.2)
    late = threading.Event()

    def script(made: Script) -> None:
        found = made.ahead(late)
        if found is None:
            return
        deadline = time.monotonic() + DEADLINE_S
        while "worker-1" not in found.note:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        late.set()
        found.wait(DEADLINE_S)

    run(script, workers=2, servers=1)


def test_an_error_is_raised_by_the_request_that_it_becomes() -> None:
    def script(made: Script) -> None:
        made.settle()
        places = made.places
        made.places = {link: (store, 1 << 20) for link, (store, _) in places.items()}
        found = made.exchange()
        assert isinstance(found, NodeRequest)
        with pytest.raises(KVError, match="a round"):
            found.wait(DEADLINE_S)
        made.places = places
        made.round()

    run(script)


def test_a_message_whose_bucket_is_not_known_is_sent_again() -> None:
    def script(made: Script) -> None:
        made.settle()
        messages = [
            (link, Message(Kind.PUSHPULL, store=each.store, bucket=77, step=1, payloads=each.payloads))
            for link, each in made.messages()
        ]
        known = [each.entries for _, each in made.messages()]
        sends = PlannedSends()
        for link, each in messages:
            head, *rest = message.encode(each, made.node.sender)
            sends.append(PlannedSend(link, [bytearray(head), *rest]))
        asked = Asked("a round", messages, (), lambda number: known[number])
        found = made.node.exchange(sends, lambda: asked, made.begun.append, lambda: None)
        made.rounds += 1
        assert isinstance(found, NodeRequest)
        assert [each.payloads[0] is not None for each in found.wait(DEADLINE_S)] == [True, True]
        assert made.weight() == 1

    run(script)


def test_a_server_that_ends_in_the_middle_ends_the_call_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", DEADLINE_S)
    with Cluster(2, 1, over="direct") as job:

        def script(node: NodeSession) -> None:
            made = Script(node)
            made.settle()
            made.kv.barrier()
            if node.rank == 1:
                return  # It leaves while the other one waits for its push.
            threading.Timer(0.3, lambda: job.transports["server-0"].wake() or stop("server-0")).start()
            started = time.monotonic()
            found = made.exchange()
            assert isinstance(found, NodeRequest)
            with pytest.raises((PeerLost, KVError, StoreClosed)):
                found.wait(DEADLINE_S)
            assert time.monotonic() - started < 30

        def stop(name: str) -> None:
            [loop] = [loop for thread, loop in job._loops.items() if thread.name == name]
            loop.tell(15)

        job.run_sessions(script)


def test_another_thread_that_asks_does_not_wait_for_one_that_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", DEADLINE_S)
    gate = threading.Barrier(2)

    def script(made: Script) -> None:
        made.settle()
        if made.node.rank == 1:
            gate.wait(DEADLINE_S)  # The other worker has its answer: its round is not complete.
            made.round()
            return
        waiting = threading.Thread(target=made.round)
        waiting.start()
        deadline = time.monotonic() + DEADLINE_S
        while made.node._exchange is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        started = time.monotonic()
        store = next(iter(made.places.values()))[0]
        made.node.ask("statistics", [("server-0", Message(Kind.STATS, store=store))]).wait(DEADLINE_S)
        assert time.monotonic() - started < 30
        gate.wait(DEADLINE_S)
        waiting.join(DEADLINE_S)
        assert not waiting.is_alive()

    run(script, workers=2, servers=1)


class Interrupt(BaseException):
    """What a signal handler raises."""


def interrupted(call: Callable[[], Any], at: int) -> tuple[Any, bool]:
    """Call, and raise `Interrupt` before the `at`-th line of the modules under test.

    Return what the call returned, and whether it was not interrupted.
    """
    left = at

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        name = frame.f_code.co_filename
        if not name.endswith(("ps/session.py", "transport/direct.py", "transport/host_paths.py", "ps/worker.py")):
            return None
        if frame.f_code.co_name == "exchange":
            return (
                trace  # No signal is handled between the end of a `with` block and its exit, but this is called there.
            )
        if event == "line":
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        result = call()
    except Interrupt:
        return None, False
    finally:
        sys.settrace(None)
    return result, True


@pytest.mark.parametrize(("servers", "over"), [(1, "direct"), (2, "direct"), (2, "inproc")])
def test_a_call_that_is_interrupted_at_any_line_is_made_once_or_not_at_all(servers: int, over: str) -> None:
    def script(made: Script) -> int:
        if over == "direct":
            made.settle()
        at = 1
        whole = 0
        while whole < 3:
            made.round()
            before = len(made.begun)
            result, is_whole = interrupted(made.exchange, at)
            whole += is_whole
            at += 1
            request = made.begun[-1] if len(made.begun) > before else None
            if request is not None:
                request.wait(DEADLINE_S)
                made.rounds += 1
            elif is_whole:
                assert not isinstance(result, NodeRequest)
                made.rounds += 1
            else:
                # Nothing was sent, or all of it and the answers were here.
                made.rounds += made.sends.is_begun
            assert made.weight() == made.rounds, "interrupted at line %d" % at
        return at

    assert run(script, servers=servers, over=over)[0] > (60 if over == "direct" else 20)


def test_a_signal_at_any_moment_leaves_calls_made_once_or_not_at_all() -> None:
    chance, main = random.Random(7), threading.get_ident()

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    with Cluster(1, 1, over="direct") as job:
        node = job.session(0)
        node.open()
        made = Script(node)
        made.settle()
        before = signal.signal(signal.SIGUSR1, handle)
        try:
            for number in range(150):
                known = len(made.begun)
                timer = threading.Timer(0.002 * chance.random(), signal.pthread_kill, (main, signal.SIGUSR1))
                try:
                    timer.start()
                    made.exchange()
                    timer.join()
                    time.sleep(0.01)
                except Interrupt:
                    timer.join()
                for request in made.begun[known:]:
                    request.wait(DEADLINE_S)
                    assert not request.error
                made.rounds = int(made.weight())
                assert made.rounds <= number + 1
            assert made.round() in (True, False)
            assert made.weight() == made.rounds >= 100
        finally:
            signal.signal(signal.SIGUSR1, before)
            node.end()


def test_a_signal_handler_may_use_the_store_while_its_thread_waits_for_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ANSWER_S", DEADLINE_S)
    found: list[float] = []
    with Cluster(2, 1, over="direct") as job:
        nodes = [job.session(rank) for rank in range(2)]
        late, gate = threading.Thread(target=lambda: other(nodes[1])), threading.Event()

        def other(node: NodeSession) -> None:
            node.open()
            made = Script(node)
            gate.wait(DEADLINE_S)
            made.round()
            node.end()

        def interrupt() -> None:
            deadline = time.monotonic() + DEADLINE_S
            while nodes[0]._turn is None or not nodes[0]._turn.is_waiting:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            signal.pthread_kill(main, signal.SIGUSR1)

        def handle(number: int, frame: FrameType | None) -> None:
            store = next(iter(made.places.values()))[0]
            nodes[0].ask("statistics", [("server-0", Message(Kind.STATS, store=store))]).wait(DEADLINE_S)
            found.append(made.rounds)
            gate.set()
            made.rounds = 1
            for _ in range(3):
                answers = made.exchange(Kind.PULL)
                if isinstance(answers, NodeRequest):
                    answers.wait(DEADLINE_S)
            found.append(made.rounds)
            made.rounds = 0

        main = threading.get_ident()
        before = signal.signal(signal.SIGUSR1, handle)
        late.start()
        try:
            nodes[0].open()
            made = Script(nodes[0])
            made.settle()
            signalling = threading.Thread(target=interrupt)
            signalling.start()
            request = made.exchange()
            assert isinstance(request, NodeRequest)
            request.wait(DEADLINE_S)
            made.rounds = 1
            signalling.join(DEADLINE_S)
            assert found == [0, 1]
            late.join(DEADLINE_S)
            assert made.weight() == 1
        finally:
            gate.set()
            signal.signal(signal.SIGUSR1, before)
            nodes[0].end()


def test_a_signal_handler_that_uses_the_store_in_the_middle_of_sending_is_told_so() -> None:
    def script(made: Script) -> None:
        made.settle()
        turn, gradients = made.node._turn, [np.full(SIZE, -1, np.float32) for _ in made.keys]
        assert turn is not None
        with turn.lock:
            turn.owner = threading.get_ident()
            with pytest.raises(KVError, match="a signal handler used a store"):
                made.exchange()
            with pytest.raises(KVError, match="a signal handler used a store"):
                made.kv.push(made.keys, gradients)
            turn.owner = 0
        made.kv.push(made.keys, gradients)
        assert made.weight() == 1, "the round of the push that was refused is that of the next one"

    run(script, op_timeout_s=10.0)


def test_answers_are_put_in_the_order_of_the_requests_and_others_are_none() -> None:
    def frames(kind: Kind, number: int, **more: Any) -> list[Any]:
        head, *rest = message.encode(Message(kind, request=number, **more))
        return [bytes(head), *rest]

    sends = [PlannedSend("server-%d" % each, [bytearray(frames(Kind.PUSH, each)[0]), b""]) for each in (1, 2)]
    good = [frames(Kind.PUSH, number, is_reply=True) for number in (2, 1)]
    assert answers_to(sends, good) == good[::-1]
    for wrong in (
        frames(Kind.PUSH, 1, is_reply=True, is_error=True),
        frames(Kind.PUSH, 3, is_reply=True),
        frames(Kind.PULL, 1, is_reply=True),
        frames(Kind.WAITING, 1, is_reply=True),
        frames(Kind.LOST, 1),
        [b"", b""],
    ):
        assert answers_to(sends, [good[0], wrong]) is None
        assert answers_to(sends, [*good, wrong]) is None
    assert answers_to(sends, good[:1]) is None
