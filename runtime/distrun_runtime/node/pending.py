"""A request in flight: a thread of the user waits for it, the node's thread completes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from distrun_runtime.errors import RuntimeFault, TimedOut
from distrun_runtime.net.message import Message


class Pending:
    """The outcome of one request, when it is there.

    Threads: any may wait; the node's thread resolves, once.
    """

    def __init__(self, what: str, on_error: Callable[[RuntimeFault], None] | None = None, limit: str = "") -> None:
        self._limit = limit
        """Where its deadline comes from, for people."""
        self.what = what
        """What was asked, for people: `pull of key 'w'`."""
        self.note = ""
        """What it waits for, as the other side last said."""
        self._on_error = on_error
        self._is_done = threading.Event()
        self._replies: tuple[Message, ...] = ()
        self._error: RuntimeFault | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_done.is_set()

    def resolve(self, replies: tuple[Message, ...], error: RuntimeFault | None) -> None:
        """Complete it with its replies, or with what went wrong."""
        self._replies, self._error = replies, error
        self._is_done.set()
        if error is not None and self._on_error is not None:
            self._on_error(error)

    def wait(self, timeout_s: float) -> tuple[Message, ...]:
        """Return the replies.

        Raises:
            TimedOut: not done after `timeout_s` seconds; the message says what it waited for.
            RuntimeFault: what went wrong, of its own class (KVError, PeerLost ...).
        """
        started = time.monotonic()
        if not self._is_done.wait(min(timeout_s, threading.TIMEOUT_MAX)):
            waited_s = time.monotonic() - started
            note = ", " + self.note if self.note else ""
            limit = " (%s)" % self._limit if self._limit else ""
            raise TimedOut("%s: no answer for %.0f s%s%s" % (self.what, waited_s, note, limit))
        if self._error is not None:
            # A fresh exception each time: several threads may raise it, and a traceback belongs to one.
            raise self._error.with_traceback(None)
        return self._replies
