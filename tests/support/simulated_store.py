"""A simulated store: a scheduler or a server as shipped, on a virtual clock, and nodes that answer by a script.

`SimulatedStore` has a scheduler in its loop (`ps.loop`), and workers and servers that register and pass barriers.
`SimulatedServer` has one server with its arithmetic, and workers that push and pull. Both speak in real bytes, the
handshake included; what is not there is the transport.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from cluster import TOKEN, config, loop_of, server_loop
from simulation import LATENCY_S, Clock, Phases

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.protocol import handshake, message
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import DTYPE_CODES, Entry, Kind, Message, Payload
from distrun_runtime.ps import role
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.transport.base import COPIED, Arrived, Down, Event, Lease, Up


class _Network:
    """The transport of the one node that is not simulated."""

    def __init__(self, clock: Clock) -> None:
        self.sent: Counter[str] = Counter()
        """Messages, by kind."""
        self.sent_bytes: Counter[str] = Counter()
        self.nodes: dict[str, _Node] = {}
        """By the link on which the node under test knows them."""
        self._clock = clock
        self._arrived: list[Event] = []

    def arrive(self, event: Event) -> None:
        """Something reaches the node under test in LATENCY_S."""
        self._clock.after(LATENCY_S, lambda: self._arrived.append(event))

    def poll(self, timeout_s: float) -> list[Event]:
        self._clock.pause()
        until = self._clock.now + timeout_s
        self._clock.happen(self._clock.now)
        while not self._arrived and self._clock.happen(until):
            pass
        events, self._arrived = self._arrived, []
        self._clock.go_on()
        return events

    def send(self, link: str, frames: Sequence[Buffer]) -> Lease:
        self._clock.pause()
        kind = message.decode([frames[0], b""]).kind.name if len(frames) < 3 else "data"
        self.sent[kind] += 1
        self.sent_bytes[kind] += sum(memoryview(frame).nbytes for frame in frames)
        # A roster is long, there is one for each node, and nobody here reads it.
        kept = [frames[0], b""] if kind == "ROSTER" else frames
        self._clock.after(LATENCY_S, lambda: self.nodes[link].hear(kept))
        self._clock.go_on()
        return COPIED

    def connect(self, link: str, endpoint: str) -> None:
        self.arrive(Up(link))

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        return 9091

    def shares(self, link: str) -> bool:
        return False

    def disconnect(self, link: str, linger_s: float = 0.0) -> None: ...
    def admitted(self, link: str) -> None: ...
    def proven(self, link: str) -> None: ...
    def refused(self, link: str) -> None: ...
    def wake(self) -> None: ...
    def close(self, linger_s: float = 0.0) -> None: ...


class _Node:
    """A simulated node that calls the one under test: it proves itself, and then does what its script says."""

    def __init__(
        self, network: _Network, link: str, who: NodeIdentity, script: Callable[[_Node, Kind, bool], None]
    ) -> None:
        self.link = link
        self.who = who
        self.step = 0
        """How far the script is."""
        self._network = network
        self._script = script
        self._requests = 0
        self._opener = handshake.Opener(who, TOKEN, "%032x" % len(network.nodes))
        network.nodes[link] = self

    def begin(self) -> None:
        """Connect."""
        self.say(self._opener.hello())

    def say(self, what: Message) -> None:
        """Send a message."""
        self._requests += 1
        numbered = replace(what, request=self._requests)
        self._network.arrive(Arrived(self.link, message.encode(numbered)))

    def hear(self, frames: Sequence[Buffer]) -> None:
        head = message.decode([frames[0], b"", *frames[2:]])
        if head.kind is Kind.CHALLENGE:
            proof = self._opener.answer(message.decode(frames))
            assert isinstance(proof, Message), proof
            self.say(proof)
            return
        if head.kind is Kind.ROSTER and self.who.role == "server":
            answer = Message(Kind.ROSTER, is_reply=True, request=head.request)
            self._network.arrive(Arrived(self.link, message.encode(answer)))
            return
        assert head.kind is not Kind.REFUSED, message.decode(frames).body
        assert not head.is_error or head.kind is not Kind.BARRIER, message.decode(frames).body
        self._script(self, head.kind, head.is_reply)


def _identity(kind: str, rank: int, workers: int, servers: int) -> NodeIdentity:
    host = "n%05d" % rank
    address = "tcp://10.%d.%d.%d:40000" % (rank // 65536, rank // 256 % 256, rank % 256)
    return NodeIdentity("test-job", kind, rank, 0, host, 1000 + rank, address, workers, servers)


class SimulatedStore:
    """A job's scheduler in its loop, `workers` workers and `servers` servers, one a host.

    All nodes connect at once. Each worker creates a store, passes `barriers` barriers and says BYE.

    Args:
        fails: worker 0 dies in place of the first barrier, and the others end by the error that this is to them.
        leaves: after the barriers all say BYE. Otherwise the scheduler is told to end.
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        clock: Clock,
        barriers: int = 3,
        *,
        fails: bool = False,
        leaves: bool = True,
    ) -> None:
        self.clock = clock
        self.phases = Phases(clock)
        """`register` (to the last ROSTER), `create`, `barrier` (one of them), `end`."""
        self.network = _Network(clock)
        self._barriers = barriers
        self._fails = fails
        self._leaves = leaves
        self._there = 0
        """Nodes that have finished the present step."""
        own = config("scheduler", workers=workers, servers=servers, stays=False)
        self.scheduler = Scheduler(own, "tcp://10.0.0.1:9091")
        self._loop = loop_of(self.scheduler, self.network, clock=clock.monotonic, out=io.StringIO())
        for kind, count in (("server", servers), ("worker", workers)):
            for rank in range(count):
                who = _identity(kind, rank, workers, servers)
                node = _Node(self.network, "in:%s%d" % (kind[0], rank), who, self._hear)
                # Not in one instant: what arrives together is taken together.
                clock.after(1e-5 * rank, node.begin)
        self._workers = workers

    def run(self) -> role.Finish:
        """Run the scheduler to its end."""
        self.clock.go_on()
        finish = self._loop.run()
        self.clock.pause()
        self.phases.end("end")
        return finish

    def _hear(self, node: _Node, kind: Kind, is_reply: bool) -> None:
        if node.who.role != "worker":
            return
        if kind is Kind.ROSTER:
            self._go_on(node, "register", Message(Kind.OPEN, store=1, body={"number": 0, "type": "dist_sync"}))
        elif kind is Kind.OPEN and self._fails:
            self._there += 1
            if self._there == self._workers:
                self.phases.end("create")
                self.network.arrive(Down("in:w0", "its connection closed"))
        elif kind is Kind.LOST and not node.step:
            node.step = 1
            error = Message(Kind.ABORT, body={"reason": "PeerLost: worker-0@n00000 (pid 1000) is lost"})
            self.clock.after(0.01, lambda: node.say(error))
        elif kind in (Kind.OPEN, Kind.BARRIER):
            node.step += 1
            more = node.step <= self._barriers
            body = {"number": node.step}
            what = Message(Kind.BARRIER, store=1, body=body) if more else Message(Kind.BYE)
            name = "create" if kind is Kind.OPEN else "barrier"
            self._go_on(node, name if name == "create" or not more else "", what)

    def _go_on(self, node: _Node, phase: str, what: Message) -> None:
        """Send the next message of a node; the last one ends a phase."""
        if phase:
            self._there += 1
            if self._there == self._workers:
                self._there = 0
                self.phases.end(phase, self._barriers if phase == "barrier" else 1)
                if phase == "barrier" and not self._leaves:
                    self._loop.tell(15)
        if what.kind is not Kind.BYE or self._leaves:
            node.say(what)


class SimulatedServer:
    """Server 0 of `servers` in its loop, with its arithmetic, and `workers` workers that push and pull its share.

    Each round every worker sends one message, with the values of all `shards` of `floats` float32 (PUSHPULL, by a
    bucket from the second round on), and gets one answer.

    Args:
        spread_s: between the first and the last message of a round.
    """

    def __init__(
        self,
        workers: int,
        servers: int,
        shards: int,
        floats: int,
        clock: Clock,
        rounds: int = 3,
        spread_s: float = 0.01,
    ) -> None:
        self.clock = clock
        self.phases = Phases(clock)
        """`register`, `round` (one of them, without the first)."""
        self.network = _Network(clock)
        self._workers, self._rounds, self._spread_s = workers, rounds, spread_s
        self._round = self._answers = self._welcomed = 0
        self._entries = message.entries_of(
            Entry(key, 0, floats, 1, DTYPE_CODES[np.dtype(np.float32)], 0, Payload.PACKED) for key in range(shards)
        )
        self._values = np.ones(shards * floats, np.float32).view(np.uint8).data
        self._acceptor = handshake.Acceptor(replace(config("scheduler").identity(""), rank=-1), TOKEN, "00")
        self._nodes = [_identity("server", rank, workers, servers) for rank in range(servers)]
        self._nodes += [_identity("worker", rank, workers, servers) for rank in range(workers)]
        own = config("server", rank=0, workers=workers, servers=servers, host="n00000")
        self._loop = server_loop(own, self.network, "tcp://10.0.0.1:40000", clock=clock.monotonic)
        self.network.nodes[role.SCHEDULER_LINK] = self  # type: ignore[assignment]  # it hears as one does
        self._links = ["in:w%d" % rank for rank in range(workers)]

    def run(self) -> role.Finish:
        """Run the server until the last round is over."""
        self.clock.go_on()
        finish = self._loop.run()
        self.clock.pause()
        return finish

    def hear(self, frames: Sequence[Buffer]) -> None:
        """Be the scheduler."""
        head = message.decode(frames)
        if head.kind is Kind.HELLO:
            self._order(self._acceptor.challenge(head))
        elif head.kind is Kind.PROOF:
            self._order(self._acceptor.verdict(head, lambda peer: ""))
            body: Mapping[str, Any] = {"nodes": [asdict(node) for node in self._nodes], "rank": 0, "host_sums": True}
            self._order(Message(Kind.ROSTER, body=body))
            for number, link in enumerate(self._links):
                who = next(iter(self._nodes[len(self._nodes) - self._workers + number :]))
                self.clock.after(0.001, _Node(self.network, link, who, self._heard).begin)

    def _order(self, what: Message) -> None:
        self.network.arrive(Arrived(role.SCHEDULER_LINK, message.encode(what)))

    def _heard(self, node: _Node, kind: Kind, is_reply: bool) -> None:
        if kind is Kind.WELCOME:
            self._welcomed += 1
            if self._welcomed == self._workers:
                self.phases.end("register")
                body = {"type": "dist_sync", "names": [[number, number] for number in range(len(self._entries))]}
                first = self._entries.copy()
                first["round"] = 0
                self.network.nodes["in:w0"].say(
                    Message(Kind.INIT, store=1, entries=first, payloads=[self._values], body=body)
                )
        elif kind is Kind.INIT:
            self._begin_round()
        elif kind is Kind.PUSHPULL:
            self._answers += 1
            if self._answers == self._workers:
                self._answers = 0
                if self._round == 1:
                    self.phases.end("first round")
                if self._round <= self._rounds:
                    self._begin_round()
                else:
                    self.phases.end("round", self._rounds)
                    self._order(Message(Kind.STOP, body={"code": 0, "reason": "enough"}))

    def _begin_round(self) -> None:
        self._round += 1
        entries = self._entries if self._round == 1 else message.NO_ENTRIES
        what = Message(Kind.PUSHPULL, store=1, bucket=1, step=self._round - 1, entries=entries, payloads=[self._values])
        for number, link in enumerate(self._links):
            node = self.network.nodes[link]
            self.clock.after(self._spread_s * number / self._workers, lambda node=node: node.say(what))
