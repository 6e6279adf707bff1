"""One store's side of this process's connection to the job: what it asks of the scheduler and of the servers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from distrun_runtime.net.message import Kind, Message
from distrun_runtime.node.pending import Pending as Request
from distrun_runtime.node.role import SCHEDULER_LINK
from distrun_runtime.node.session import Session
from distrun_runtime.store.requests import Packed


class Link:
    """Asks in the name of one store.

    Threads: any.
    """

    def __init__(self, node: Session) -> None:
        self.node = node
        self.store = node.next_store()
        """The store's number in messages."""
        self._lock = threading.Lock()
        self._calls = 0

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.node.rank

    @property
    def workers(self) -> int:
        """Number of workers of the job."""
        return self.node.config.workers

    @property
    def limit_s(self) -> float:
        """How long a call may wait for living nodes."""
        return self.node.config.op_timeout_s

    def span(self, name: str, **args: object) -> AbstractContextManager[None]:
        """Return what records how long a block takes, while the store is profiled."""
        return self.node.recorder.span(name, "store", **args)

    def next_call(self) -> int:
        """Return the number of this worker's next call that all workers of the store make together."""
        with self._lock:
            self._calls += 1
            return self._calls

    def send(self, what: str, packed: Sequence[Packed]) -> Request:
        """Send messages to servers; `what` is the call, for people."""
        return self.node.ask(what, [(one.link, one.message) for one in packed])

    def call(self, what: str, kind: Kind, body: dict[str, Any], after: Sequence[Request] = ()) -> Request:
        """Ask the scheduler, once `after` are done."""
        return self.node.ask(what, [(SCHEDULER_LINK, Message(kind, store=self.store, body=body))], after=after)

    def scheduler(self, what: str, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """Ask the scheduler and return what it answers."""
        with self.span(what):
            (reply,) = self.call(what, kind, body).wait(self.limit_s)
        return dict(reply.body)

    def together(self, what: str, kind: Kind, **body: object) -> dict[str, Any]:
        """Make a call that all workers make, and return what the scheduler answers to all."""
        return self.scheduler(what, kind, {"number": self.next_call(), **body})

    def servers(
        self, what: str, kind: Kind, body: dict[str, Any] | None = None, ranks: Iterable[int] | None = None
    ) -> list[dict[str, Any]]:
        """Ask servers - all, or those of these ranks - and return what each answers, in order."""
        message = Message(kind, store=self.store, body=body or {})
        links = ["server-%d" % rank for rank in (range(self.node.num_servers) if ranks is None else ranks)]
        replies = self.node.ask(what, [(link, message) for link in links]).wait(self.limit_s)
        return [dict(reply.body) for reply in replies]
