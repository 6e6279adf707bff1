"""A transport that says what a test tells it to, and a clock that the test sets."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from distrun_runtime.protocol.message import Buffer
from distrun_runtime.transport.zeromq import Event, Lease


class Script:
    """Gives at each poll the next of `coming`, and writes down what is sent and how long is waited."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coming: deque[list[Event]] = deque()
        self.sent: list[tuple[str, list[Buffer]]] = []
        self.waits: list[float] = []
        self.gone: set[str] = set()
        self.closed: list[float] = []

    def poll(self, timeout_s: float) -> list[Event]:
        self.waits.append(timeout_s)
        return self.coming.popleft() if self.coming else []

    def send(self, link: str, frames: Sequence[Buffer]) -> Lease:
        if link in self.gone:
            raise ConnectionError("%s is gone" % link)
        self.sent.append((link, list(frames)))
        return Lease(())

    def disconnect(self, link: str, linger_s: float = 0.0) -> None: ...
    def connect(self, link: str, endpoint: str) -> None: ...
    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        return 7

    def wake(self) -> None: ...
    def close(self, linger_s: float = 0.0, last: str | None = None) -> None:
        self.closed.append(linger_s)
