"""A scripted history of one scheduler: messages of workers and servers go in, what it answers comes out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cluster import config

from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.handshake import NodeIdentity
from distrun_runtime.protocol.message import GROUP_STORES, Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.scheduler import Scheduler


def node(kind: str, rank: int = -1, host: str = "d1", pid: int = 1, **changes: Any) -> NodeIdentity:
    usual = NodeIdentity("test-job", kind, rank, 0, host, pid, "tcp://10.0.0.1:1", 2, 1)
    return replace(usual, **changes)


OF_A_STORE = (
    Kind.KEYS,
    Kind.BARRIER,
    Kind.SAVE,
    Kind.LOAD,
    Kind.INIT,
    Kind.RULE,
    Kind.JOIN,
    Kind.LEFT,
    Kind.CLOSE,
    Kind.PULL,
)


class Job:
    """A scheduler, and what it was told and said; links are `w0`, `w1`, `s0`."""

    def __init__(self, workers: int = 2, servers: int = 1, *, is_open: bool = True, **changes: Any) -> None:
        self.counts = {"workers": workers, "servers": servers}
        self.scheduler = Scheduler(config("scheduler", **self.counts, **changes), "tcp://127.0.0.1:9")
        self.now = 0.0
        self.requests = 0
        self.scheduler.start(0)
        if is_open:
            for rank in range(servers):
                self.register("s%d" % rank, "server", rank)
            for rank in range(workers):
                actions = self.register("w%d" % rank, "worker", rank)
            self.answer(actions)
            self.requests = 0

    def register(self, link: str, kind: str, rank: int = -1, host: str = "d1") -> list[role.Action]:
        peer = node(kind, rank, host, **self.counts)
        assert self.scheduler.admit(peer) == ""
        return self.scheduler.handle(role.Welcomed(link, peer), self.now)

    def hear(
        self, link: str, kind: Kind, is_reply: bool = False, is_error: bool = False, **body: Any
    ) -> list[role.Action]:
        if kind in OF_A_STORE and not is_reply and "group" not in body:
            self.open_store(body.get("store", 1))
        self.requests += 1
        request = body.pop("request", self.requests)
        store = body.pop("store", 1)
        message = Message(kind, store=store, request=request, body=body, is_reply=is_reply, is_error=is_error)
        return self.scheduler.handle(role.MessageReceived(link, message), self.now)

    def open_store(self, number: int) -> None:
        """Let all workers create a store, unless one has done so: no other call of it is taken before."""
        if number < GROUP_STORES and number not in self.scheduler._calls._stores:
            message = Message(Kind.OPEN, store=number, body={"type": "dist_sync", "number": 0})
            for worker in self.scheduler._roster.of_role("worker"):
                self.scheduler.handle(role.MessageReceived(worker.link, message), self.now)

    def answer(self, actions: list[role.Action], error: str = "", **more: Any) -> list[role.Action]:
        """Let the servers answer what was sent to them; `more` is in their replies."""
        found: list[role.Action] = []
        for link, sent in sends(actions):
            if link.startswith("s"):
                body = {**({"reason": error} if error else {}), **more}
                found += self.hear(link, sent.kind, True, bool(error), request=sent.request, **body)
        return found

    def settle(self, actions: list[role.Action]) -> list[role.Action]:
        """Let the servers say yes to everything; return what is sent to workers meanwhile."""
        told: list[role.Action] = []
        while actions:
            told += [each for each in actions if not (isinstance(each, role.Send) and each.link.startswith("s"))]
            actions = self.answer(actions)
        return told

    def tick(self, now: float) -> list[role.Action]:
        self.now = now
        return self.scheduler.tick(now)


def sends(actions: list[role.Action]) -> list[tuple[str, Message]]:
    return [(action.link, action.message) for action in actions if isinstance(action, role.Send)]


def to(actions: list[role.Action]) -> list[tuple[str, str]]:
    """Return (link, kind) of every message, `KIND!` for a refusal."""
    return [(link, sent.kind.name + ("!" if sent.is_error else "")) for link, sent in sends(actions)]


def reasons(actions: list[role.Action]) -> dict[str, str]:
    return {link: str(sent.body["reason"]) for link, sent in sends(actions) if "reason" in sent.body}


def finish(actions: list[role.Action]) -> role.Finish | None:
    return next((action for action in actions if isinstance(action, role.Finish)), None)


def logs(actions: list[role.Action]) -> list[str]:
    return [action.text for action in actions if isinstance(action, role.Log)]


def record(key: object, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> dict[str, Any]:
    return {"key": key, "shape": list(shape), "dtype": dtype}


def init(job: Job, number: int, *keys: object) -> list[role.Action]:
    """Declare keys in all workers, fill the servers, and return what the others hear then."""
    for rank in range(job.counts["workers"]):
        job.hear("w%d" % rank, Kind.KEYS, number=number, records=[record(key) for key in keys])
    return job.hear("w0", Kind.INIT, number=number)


def spec(name: str = "sgd", **params: Any) -> dict[str, Any]:
    return dict(RuleSpec.of(name, params).to_json())


def rule(job: Job, link: str, name: str = "sgd", replace: bool = False, **params: Any) -> list[role.Action]:
    return job.hear(link, Kind.RULE, spec=spec(name, **params), replace=replace)
