"""A request in flight: a thread of the user waits for it, the node's thread completes it."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence

from distrun_runtime.contract.facts import duration
from distrun_runtime.errors import RuntimeFault, TimedOut
from distrun_runtime.protocol.message import Message


class Waits:
    """For which request the script's main thread waits at the moment: it sets both, the node's thread reads them."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self.since = 0.0
        """Wall clock."""


class Request:
    """One request of this node: messages that went out, and all their replies when these are there.

    What a store's call returns to the user, a `store.pending.Pending`, has one or more of these.

    Threads: any may wait; the node's thread resolves, once.
    """

    def __init__(
        self,
        what: str,
        on_error: Callable[[RuntimeFault], None] | None = None,
        limit: str = "",
        waits: Waits | None = None,
    ) -> None:
        self._waits = waits
        self._limit = limit
        """Where its deadline comes from, for people."""
        self.what = what
        """What was asked, for people: `pull of key 'w'`."""
        self.note = ""
        """What it waits for, as the other side last said."""
        self.awaited: tuple[str, ...] = ()
        """The tasks that the other side waits for, as it last said."""
        self.awaited_key = ""
        self.missing: dict[int, str] = {}
        """Its messages that are not answered, by their numbers, and to whom each went. The node's thread's."""
        self._lock = threading.Lock()
        self._followers: list[Callable[[RuntimeFault | None], None]] | None = []
        """What to call when it is done; None once that was done."""
        if on_error is not None:
            self.then(lambda error: None if error is None else on_error(error))
        self._is_done = threading.Event()
        self._replies: tuple[Message, ...] = ()
        self._error: RuntimeFault | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done.is_set()

    def resolve(self, replies: tuple[Message, ...], error: RuntimeFault | None) -> None:
        """Complete it with its replies, or with what went wrong."""
        with self._lock:
            self._replies, self._error = replies, error
            followers, self._followers = self._followers or [], None
        for follow in followers:
            follow(error)
        # Last: who has waited for it finds what followed done.
        self._is_done.set()

    def then(self, follow: Callable[[RuntimeFault | None], None]) -> None:
        """Call `follow` with the error, or None, when it is done: now, or in the thread that resolves it."""
        with self._lock:
            if self._followers is not None:
                self._followers.append(follow)
                return
        follow(self._error)

    def wait(self, timeout_s: float, limit: str | None = None) -> tuple[Message, ...]:
        """Return the replies.

        Arguments:
            limit: where this deadline comes from, for people, if it is not the request's own.

        Raises:
            TimedOut: not done after `timeout_s` seconds; the message says who has not answered, and what for.
            RuntimeFault: what went wrong, of its own class (KVError, PeerLost ...).
        """
        started = time.monotonic()
        if not self._waited(min(timeout_s, threading.TIMEOUT_MAX)):
            waited_s = time.monotonic() - started
            waited_s = round(waited_s, 1 if waited_s < 10 else 0)
            note = ", " + self.note if self.note else ""
            where = self._limit if limit is None else limit
            limit = f" ({where})" if where else ""
            names = ", ".join(sorted(set(self.missing.copy().values())))
            whose = " from " + names if names else ""
            raise TimedOut(f"{self.what}: no answer{whose} for {duration(waited_s)}{note}{limit}")
        if self._error is not None:
            # A fresh exception each time: several threads may raise it, and a traceback belongs to one.
            raise copy.copy(self._error)
        return self._replies

    def _waited(self, timeout_s: float) -> bool:
        """Wait until it is done, and let the node know that the script does; return whether it is done."""
        if self._is_done.is_set():
            return True
        waits = self._waits
        if waits is None or threading.current_thread() is not threading.main_thread():
            return self._is_done.wait(timeout_s)
        waits.since = time.time()
        waits.request = self
        try:
            return self._is_done.wait(timeout_s)
        finally:
            waits.request = None

    @property
    def replies(self) -> tuple[Message, ...]:
        """The replies, once it is done without an error; none after `forget`."""
        return self._replies

    def forget(self) -> None:
        """Let go of the replies: their memory may be the servers'. Call when nobody will ask for them."""
        self._replies = ()


def when_done(requests: Sequence[Request], act: Callable[[], None]) -> None:
    """Call `act` once all of these are done, well or not: now, or in the thread that resolves the last one."""
    missing = len(requests)
    lock = threading.Lock()

    def one_less(error: RuntimeFault | None) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            act()

    if not requests:
        act()
    for request in requests:
        request.then(one_less)
