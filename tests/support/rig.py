"""A server's decisions as a scripted history: messages go in, what was sent and done comes out. No socket, no array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from cluster import config
from distrun_runtime.ps.executor import Executor

from distrun_runtime.protocol.handshake import Identity
from distrun_runtime.protocol.message import Entry, Flag, Kind, Message, Payload
from distrun_runtime.ps import role, work
from distrun_runtime.ps.profile import Recorder
from distrun_runtime.ps.server import Server
from distrun_runtime.ps.stats import Counters
from distrun_runtime.ps.work import SlotId

A, B = SlotId(1, 0, 0), SlotId(1, 1, 0)
VALUE = bytes(8)


def node(kind: str, rank: int) -> Identity:
    return Identity("test-job", kind, rank, 0, "d1", 5, "tcp://10.0.0.%d:1" % (rank + 1), 2, 1)


class Rig:
    """A server that two workers (`w0`, `w1`) are connected to, with keys 0 (`a`) and 1 (`b`) of two float32 each.

    Work is done at once, as the loop does it; while `is_held`, it piles up until `release`. With more servers
    than one, the link `s1` is one that server 1 opened. `facts` are added to the body of the first INIT.
    """

    counters: Counters | None = None
    recorder: Recorder | None = None

    def __init__(self, type_name: str = "dist_sync", workers: int = 2, servers: int = 1, **facts: Any) -> None:
        own = config("server", rank=0, workers=workers, servers=servers)
        self.server = Server(own, "tcp://127.0.0.1:7", self.counters, self.recorder)
        self.facts = facts
        self.logs: list[role.Log] = []
        self.called: list[str] = []
        """Servers that were called."""
        self.value: Callable[[Any], Any] = lambda what: None
        """What a piece of work that reports results in."""
        self.now = 0.0
        self.done: list[Any] = []
        """Every piece of work, in order."""
        self.held: list[role.Work] = []
        self.is_held = False
        self.error: BaseException | None = None
        """What the next work that reports fails with."""
        self.requests = 100
        self.server.start(0)
        self.server.handle(role.Welcomed(role.SCHEDULER_LINK, None), 0)
        nodes = [node("server", rank) for rank in range(servers)] + [node("worker", rank) for rank in range(workers)]
        self.scheduler(Kind.ROSTER, nodes=[asdict(each) for each in nodes], rank=0)
        for rank in range(workers):
            self.server.handle(role.Welcomed("w%d" % rank, node("worker", rank)), 0)
        for rank in range(1, servers):
            self.server.handle(role.Welcomed("s%d" % rank, node("server", rank)), 0)
        self.init(type_name)
        self.done.clear()

    def init(self, type_name: str = "dist_sync", *keys: int) -> list[tuple[str, Message]]:
        entries = tuple(Entry(key, 0, 2, payload=Payload.FRAME) for key in keys or (0, 1))
        body = {"type": type_name, "names": [[0, "a"], [1, "b"]], **self.facts}
        return self.hear("w0", Message(Kind.INIT, body=body, entries=entries, payloads=[VALUE] * len(entries)))

    def hear(self, link: str, message: Message) -> list[tuple[str, Message]]:
        """Let a message arrive and return what was sent then; a Deliver counts as its reply."""
        self.requests += 1
        message = replace(message, store=message.store or 1, request=message.request or self.requests)
        return self.perform(self.server.handle(role.Heard(link, message), self.now))

    def scheduler(self, kind: Kind, request: int = 0, **body: Any) -> list[tuple[str, Message]]:
        message = Message(kind, store=1, request=request, body=body)
        return self.perform(self.server.handle(role.Heard(role.SCHEDULER_LINK, message), self.now))

    def push(self, rank: int, number: int, *keys: int, **changes: Any) -> list[tuple[str, Message]]:
        entries = tuple(
            replace(Entry(key, 0, 2, number, payload=Payload.FRAME), **changes) for key in (keys or (0,))
        )  # fmt: skip
        return self.hear("w%d" % rank, Message(Kind.PUSH, entries=entries, payloads=[VALUE] * len(entries)))

    def pull(self, rank: int, number: int, *keys: int, **changes: Any) -> list[tuple[str, Message]]:
        entries = tuple(replace(Entry(key, 0, 2, number), **changes) for key in (keys or (0,)))
        return self.hear("w%d" % rank, Message(Kind.PULL, entries=entries))

    def perform(self, actions: list[role.Action]) -> list[tuple[str, Message]]:
        sent: list[tuple[str, Message]] = []
        queue = list(actions)
        while queue:
            action = queue.pop(0)
            if isinstance(action, role.Send):
                sent.append((action.link, action.message))
            elif isinstance(action, role.Work) and isinstance(action.what, work.Deliver):
                self.done.append(action.what)
                sent.append((action.what.link, self._deliver(action.what)))
            elif isinstance(action, role.Work) and self.is_held and action.reports:
                self.held.append(action)
            elif isinstance(action, role.Work):
                queue = [*self._do(action), *queue]
            elif isinstance(action, role.Connect):
                self.called.append(action.link)
            elif isinstance(action, role.Log):
                self.logs.append(action)
        return sent

    def release(self) -> list[tuple[str, Message]]:
        """Finish the oldest work that was held."""
        return self.perform(self._do(self.held.pop(0)))

    def _deliver(self, what: work.Deliver) -> Message:
        return Message(what.message.kind, Flag.REPLY, request=what.message.request)

    def _do(self, action: role.Work) -> list[role.Action]:
        self.done.append(action.what)
        if not action.reports:
            return []
        error, self.error = self.error, None
        trace = "Traceback of the server" if error else ""
        done = role.Done(action.what, error, trace, None if error else self.value(action.what))
        return self.server.handle(done, self.now)


class Live(Rig):
    """A rig with a real executor: what is pushed is summed, and replies carry values."""

    def __init__(self, type_name: str = "dist_sync", workers: int = 2, servers: int = 1, **facts: Any) -> None:
        self.counters, self.recorder = Counters(), Recorder()
        self.executor = Executor(self.counters, self.recorder)
        super().__init__(type_name, workers, servers, **facts)

    def _deliver(self, what: work.Deliver) -> Message:
        return self.executor.deliver(what)[0]

    def _do(self, action: role.Work) -> list[role.Action]:
        self.done.append(action.what)
        result = self.executor.do(action.what)
        assert result.error is None or action.reports, result.traceback
        return self.server.handle(result, self.now) if action.reports else []


def kinds(sent: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(link, message.kind.name + ("!" if message.is_error else "")) for link, message in sent]


def works(rig: Rig) -> list[str]:
    """What was done, shortly: `add a1` adds to round 1 of key a."""
    short = []
    for what in rig.done:
        name = type(what).__name__.lower()
        if isinstance(what, work.Finish):
            short.append("finish %s%d" % ("ab"[what.slot.key], what.turn.round))
        elif isinstance(what, (work.Add, work.Apply)):
            short.append("%s %s%d" % (name, "ab"[what.slot.key], what.round))
        else:
            short.append(name)
    rig.done.clear()
    return short


def reason(sent: list[tuple[str, Message]]) -> str:
    [(_, message)] = sent
    assert message.is_error
    return str(message.body["reason"])
