"""From the bytes of one stream to what is printed: whole prefixed lines, or the bytes unchanged. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LINE_LIMIT = 1024 * 1024
"""A line is cut after so many bytes; what follows is a line of its own."""
HOLD_S = 0.2
"""How long bytes without a newline are held back when nothing may be changed, so that lines stay whole."""
PROGRESS_S = 1.0
"""How often a progress bar (carriage returns without a newline) is shown on a terminal."""

_RESET = b"\x1b[0m"


@dataclass
class Feed:
    """One stream of one task.

    With a `prefix` each line gets it, and a line that was overwritten by carriage returns is printed as a terminal
    would show it in the end. Without one, the bytes go through unchanged.
    """

    prefix: bytes
    terminal: bool = False
    _tail: bytes = b""
    _held_since: float = 0.0
    _shown_at: float = float("-inf")

    def feed(self, data: bytes, now: float) -> bytes:
        """Add what arrived; return what is to be printed now."""
        if not self._tail:
            self._held_since = now
        whole, newline, tail = (self._tail + data).rpartition(b"\n")
        self._tail = tail
        if newline:
            self._held_since = now
        printed = self._lines(whole) if newline else b""
        return printed + self._long_tail() + self.due(now)

    def due(self, now: float) -> bytes:
        """Return what must not wait longer: held bytes, or the state of a progress bar."""
        if not self._tail:
            return b""
        if not self.prefix:
            return self._take() if now >= self._held_since + HOLD_S else b""
        segments = self._tail.split(b"\r")
        if len(segments) > 1:
            last = next((part for part in reversed(segments) if part), b"")
            # What was overwritten is forgotten here (the log file has it), so that a bar needs no memory.
            self._tail = b"\r" + last
            if self.terminal and last and now >= self._shown_at + PROGRESS_S:
                self._shown_at = now
                return self._line(last)
        return b""

    def wait_s(self, now: float) -> float | None:
        """Return how long until `due` may have something; None: not before more arrives."""
        if not self._tail:
            return None
        if not self.prefix:
            return max(0.0, self._held_since + HOLD_S - now)
        if self.terminal and b"\r" in self._tail:
            return max(0.0, self._shown_at + PROGRESS_S - now)
        return None

    def flush(self) -> bytes:
        """Return what is left when the stream is over; a last line without a newline gets one with a prefix."""
        tail = self._take()
        if not self.prefix:
            return tail
        return self._line(tail) if tail.strip(b"\r") else b""

    def _take(self) -> bytes:
        tail, self._tail = self._tail, b""
        return tail

    def _long_tail(self) -> bytes:
        if len(self._tail) <= LINE_LIMIT:
            return b""
        return self._line(self._take()) if self.prefix else self._take()

    def _lines(self, whole: bytes) -> bytes:
        if not self.prefix:
            return whole + b"\n"
        return b"".join([self._line(line) for line in whole.split(b"\n")])

    def _line(self, line: bytes) -> bytes:
        if b"\r" in line:
            line = next((part for part in reversed(line.split(b"\r")) if part), b"")
        if self.terminal and b"\x1b" in line:
            line += _RESET
        return self.prefix + line + b"\n"
