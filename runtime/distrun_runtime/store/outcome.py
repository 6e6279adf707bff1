"""What becomes of a call that was sent to servers: its replies, taken in by whoever waits for them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from distrun_runtime.protocol.message import Message
from distrun_runtime.ps.request import Request
from distrun_runtime.ps.shards import Notes
from distrun_runtime.ps.stages import COPY_IN
from distrun_runtime.store.link import StoreLink
from distrun_runtime.store.pending import Late, Pending, check_process, check_seconds

Take = Callable[["tuple[Message, ...]"], Notes]
"""Takes the replies in: fills the outputs, and returns what is to be known of a skipped round."""


class SentCall(Pending):
    """A request of a store. Outputs are filled by the first `wait` that finds all replies there.

    Arguments:
        left: called by `left_waiting`.
        settle: called by `wait` when all replies are there; may wait for servers, never for workers.
    """

    def __init__(
        self,
        request: Request,
        link: StoreLink,
        late: Late,
        take: Take | None = None,
        left: Callable[[], None] = lambda: None,
        *,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.what = request.what
        self._request = request
        self._link = link
        self._late = late
        self._take = take
        self._left = left
        self._settle = settle
        self._is_left = False
        self._is_over = False
        """Whether a `wait` has returned: there is nothing more to be told."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    @property
    def is_done(self) -> bool:
        """Whether all replies are there, or an error is."""
        return self._request.is_done

    def left_waiting(self) -> None:
        """Note that the call which made it has stopped waiting before it was done; no later call raises its error."""
        self._is_left = True
        self._left()

    def fill(self, take: Take) -> None:
        """Let `wait` take the replies in so. Before anybody waits."""
        self._take = take

    def disregard(self) -> None:
        """Note that nobody wants its replies; what goes wrong is told all the same."""
        self._request.then(lambda error: self._request.forget())

    def watch(self) -> None:
        """Let the store's next call raise its error, unless `wait` does before."""
        self._request.then(lambda error: None if error is None or self._is_left else self._late.add(self, error))

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done; raise what went wrong, with this call or with an earlier push of the store."""
        check_process(self._pid, self.what)
        timeout_s = check_seconds(timeout_s)
        if self._is_over:
            return
        with self._link.span("wait", call=self.what):
            with self._late.told(self):
                if timeout_s is None:
                    replies = self._request.wait(self._link.limit_s)
                else:
                    replies = self._request.wait(timeout_s, "as long as wait was to wait")
            self._finish(replies)
            self._settle()
        self._is_over = True

    def _finish(self, replies: tuple[Message, ...]) -> None:
        if self._take is None:
            return
        # An earlier push may have been refused: then the servers answered that first, and this is not its result.
        self._late.raise_first()
        with self._lock:
            if self._take is not None:
                with self._link.stage(COPY_IN):
                    self.skipped = self._take(replies)
            # Last: one that was interrupted is to be waited for again.
            self._take = None
            self._request.forget()


class Both(Pending):
    """A push and what follows it, as one call."""

    def __init__(self, what: str, push: Pending, then: Pending) -> None:
        self.what = what
        self._push = push
        self._then = then

    @property
    def is_done(self) -> bool:
        """Whether both are."""
        return self._push.is_done and self._then.is_done

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when both are done; raise the push's error rather than that of what followed."""
        timeout_s = check_seconds(timeout_s)
        started = time.monotonic()
        self._push.wait(timeout_s)
        self._then.wait(None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started)))
        self.skipped = self._then.skipped
