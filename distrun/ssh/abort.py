"""Gives up a connection at once: whatever it waits for registers how it is woken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator


class Aborted(Exception):
    """The connection is not wanted any more."""


class Abort:
    """Set once, from any thread; wakes all waiting threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was given up."""
        return self._event.is_set()

    def now(self) -> None:
        """Give up. What is registered is called in this thread and must not wait."""
        with self._lock:
            self._event.set()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def wait(self, seconds: float) -> None:
        """Sleep so long.

        Raises:
            Aborted: it was given up before or meanwhile.
        """
        if self._event.wait(seconds):
            raise Aborted

    def check(self) -> None:
        """Raise Aborted if it was given up."""
        if self._event.is_set():
            raise Aborted

    def on(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when it is given up: now, if it was already."""
        with self._lock:
            if not self._event.is_set():
                self._wakers.append(wake)
                return
        wake()

    @contextlib.contextmanager
    def calling(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called if it is given up within the block; then the block ends with Aborted."""
        self.on(wake)
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)
        self.check()
