"""A transport that says what a test tells it to, and a clock that the test sets."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from slowness import scaled

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.transport.base import COPIED, Event, Lease

STEP_S = scaled(60.0)
"""How long a step of a loop may take, on a busy machine."""


class Script:
    """Gives at each poll the next of `coming`, and writes down what is sent and how long is waited."""

    def __init__(self) -> None:
        self.now = 0.0
        self.coming: deque[list[Event]] = deque()
        self.sent: list[tuple[str, list[Buffer]]] = []
        self.waits: list[float] = []
        self.gone: set[str] = set()
        self.closed: list[float] = []
        self.calls: list[tuple[object, ...]] = []
        """What else was called."""
        self.lease: Lease = COPIED
        """What `send` returns."""

    def poll(self, timeout_s: float) -> list[Event]:
        self.waits.append(timeout_s)
        return self.coming.popleft() if self.coming else []

    def send(self, link: str, frames: Sequence[Buffer]) -> Lease:
        if link in self.gone:
            raise ConnectionError("%s is gone" % link)
        self.sent.append((link, list(frames)))
        return self.lease

    def disconnect(self, link: str, linger_s: float = 0.0) -> None:
        self.calls.append(("disconnect", link, linger_s))

    def connect(self, link: str, endpoint: str) -> None:
        self.calls.append(("connect", link, endpoint))

    def admitted(self, link: str) -> None:
        self.calls.append(("admitted", link))

    def proven(self, link: str) -> None:
        self.calls.append(("proven", link))

    def shares(self, link: str) -> bool:
        return False

    def refused(self, link: str) -> None:
        self.calls.append(("refused", link))

    def bind(self, address: str, ports: Sequence[int] = ()) -> int:
        self.calls.append(("bind", address, tuple(ports)))
        return 7

    def wake(self) -> None:
        self.calls.append(("wake",))

    def close(self, linger_s: float = 0.0) -> None:
        self.closed.append(linger_s)


def check_calls(made: Any, script: Script) -> None:
    """Check that a transport around a script hands on the calls with which it has nothing to do."""
    assert made.bind("127.0.0.1", (1, 2)) == 7
    made.connect("s", "tcp://127.0.0.1:1")
    made.admitted("in:1")
    made.proven("in:1")
    made.refused("in:2")
    made.wake()
    made.disconnect("s", 0.5)
    assert script.calls == [
        ("bind", "127.0.0.1", (1, 2)),
        ("connect", "s", "tcp://127.0.0.1:1"),
        ("admitted", "in:1"),
        ("proven", "in:1"),
        ("refused", "in:2"),
        ("wake",),
        ("disconnect", "s", 0.5),
    ]


class Stepped(Script):
    """Runs a loop step by step: the test gives events, the loop takes them in, and the test goes on when it is idle.

    The loop runs in a thread of its own and is stopped in `poll` while the test runs. What a step sends is complete
    when `step` returns: everything that follows from the events has been done, the tick of that turn included. What a
    server's engine does later is part of it, unless `waits_for_engine` is false.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[str, str]] = []
        """Links that were opened, with their endpoints, in order."""
        self.make_lease: Callable[[], Any] = lambda: COPIED
        """What `send` returns."""
        self.is_busy: Callable[[], bool] = lambda: False
        """Whether something is under way that will wake the loop: it is not idle then."""
        self.waits_for_engine = True
        self._turn = threading.Condition()
        self._given: list[Event] | None = None
        self._is_woken = False
        self._is_idle = False
        self._has_ended = False

    def poll(self, timeout_s: float) -> list[Event]:
        with self._turn:
            if self._given is None and not self._is_woken:
                self._is_idle = not (self.waits_for_engine and self.is_busy())
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._given is not None or self._is_woken)
                self._is_idle = False
            given, self._given, self._is_woken = self._given or [], None, False
            return given

    def step(self, *events: Event) -> None:
        """Let events happen (none: only time passes) and return when the loop waits again, or has ended."""
        with self._turn:
            if self._has_ended:
                return
            self._given, self._is_idle = list(events), False
            self._turn.notify_all()
            assert self._turn.wait_for(lambda: self._is_idle or self._has_ended, STEP_S), "the loop does not return"

    def settle(self) -> None:
        """Return when the loop waits or has ended."""
        with self._turn:
            assert self._turn.wait_for(self._is_settled, STEP_S), "the loop does not return"

    def end(self) -> None:
        """The loop has ended."""
        with self._turn:
            self._has_ended = True
            self._turn.notify_all()

    def _is_settled(self) -> bool:
        return self._has_ended or (self._is_idle and not self._is_woken)

    def send(self, link: str, frames: Sequence[Buffer]) -> Any:
        lease = self.make_lease()
        # Who does not read any more has its own copy: the memory may be written from now on.
        is_over = getattr(lease, "is_over", True)
        super().send(link, [bytes(frame) for frame in frames] if is_over else frames)
        return lease

    def connect(self, link: str, endpoint: str) -> None:
        self.opened.append((link, endpoint))

    def admitted(self, link: str) -> None: ...
    def proven(self, link: str) -> None: ...
    def shares(self, link: str) -> bool:
        return False

    def refused(self, link: str) -> None: ...

    def wake(self) -> None:
        with self._turn:
            self._is_woken = True
            self._turn.notify_all()


class Held:
    """The lease of buffers that are in use until the test says otherwise."""

    def __init__(self) -> None:
        self.is_over = False
