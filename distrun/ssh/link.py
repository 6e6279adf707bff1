"""A command that runs on another host, as its byte streams: what both transports offer."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from distrun.ssh.failure import SshFailure

WORDS = 20
"""Lines of stderr that are kept for a report."""
WORDS_BYTES = 16 * 1024


class Link(Protocol):
    """One command on one host. `read` and `finish` are for one thread, `write` and `end_input` for another."""

    def read(self) -> bytes | None:
        """Return what its stdout says next, empty at its end; None if it says nothing for a second."""

    def write(self, data: bytes) -> int:
        """Write to its stdin, waiting at most a second; return how many bytes went.

        Raises:
            OSError: it takes no more.
        """

    def end_input(self) -> None:
        """Let it see the end of its stdin."""

    def kill(self) -> None:
        """End the connection now. Any thread; does not wait."""

    def finish(self) -> str:
        """Free everything; return the last lines of its stderr."""

    def explain(self, words: str, noise: str) -> SshFailure:
        """Return why there was no agent, after `finish`. `words`: its stderr; `noise`: its stdout."""


class LastWords:
    """Keeps the last lines of a stream."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=WORDS)
        self._open = b""

    def feed(self, data: bytes) -> None:
        """Add what came."""
        *lines, self._open = (self._open + data).split(b"\n")
        self._lines.extend(line.decode("utf-8", "replace").rstrip("\r") for line in lines)
        self._open = self._open[-WORDS_BYTES:]

    @property
    def text(self) -> str:
        """The lines."""
        last = self._open.decode("utf-8", "replace").rstrip("\r")
        return "\n".join([*self._lines, *([last] if last else [])])
