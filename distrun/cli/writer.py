"""The thread that writes to one place, behind a queue, so that nobody waits for a slow reader.

What cannot be written yet is queued; past `QUEUE_LIMIT` only its place in the task's log file is kept and it is read
back from there. So a slow reader costs no memory, a job never waits for it, and no line is lost.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from distrun.cli.lines import DRAW_S, Feed, Live, in_order
from distrun_runtime.coordinator.output import Backlog, OutputPiece, encoded
from distrun_runtime.errors import JobStoreError

STUCK_S = 10.0
"""At the end, a terminal that takes nothing for so long is given up."""
READ_SIZE = 256 * 1024
LOOK_S = 0.1
"""While output comes without a pause, it is looked so often for what other tasks have to show."""


ENDS_OUTPUT = OutputPiece()
"""Tasks will write nothing more: what they did not end with a newline is printed now."""


class Writer:
    """A queue and the thread that empties it."""

    def __init__(
        self,
        fds: Mapping[str, int],
        make_feed: Callable[[OutputPiece], Feed],
        find_log: Callable[[str], Path | None],
        on_broken: Callable[[int], None] = lambda fd: None,
        live: Live | None = None,
    ) -> None:
        """`fds`: where each stream ("out", "err") is written; `live`: draws progress bars in place, on a terminal."""
        self._fds = fds
        self._live = live
        self._live_fd = -1
        self._is_drawn_late = self._must_forget = False
        self._drawn_at = self._looked_at = float("-inf")
        self._make_feed = make_feed
        self._on_broken = on_broken
        self._find_log = find_log
        self._feeds: dict[tuple[int, str, str], Feed] = {}
        self._queue = Backlog()
        self._paused = self._held = self._ending = False
        self._broken: set[int] = set()
        self._writing = -1
        self._progress = time.monotonic()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def put(self, piece: OutputPiece) -> None:
        """Queue a piece; never waits."""
        with self._changed:
            self._queue.put(piece)
            self._changed.notify()

    def end_output(self) -> None:
        """Say that no task will write anything more."""
        self.put(ENDS_OUTPUT)

    def toggle_pause(self) -> bool:
        """Pause or go on; return whether it is paused now."""
        with self._changed:
            self._paused = not self._paused
            self._must_forget = True  # others write to the terminal meanwhile
            self._changed.notify()
            return self._paused

    def hold(self, is_held: bool) -> None:
        """Stop for a question on the terminal, or go on after it; a pause of the user's stays one."""
        with self._changed:
            self._held = is_held
            self._must_forget = True  # the question stands there
            self._changed.notify()

    def resume(self) -> None:
        """Go on, if it is paused."""
        with self._changed:
            self._paused = self._held = False
            self._changed.notify()

    def end(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._ending, self._paused, self._held = True, False, False
            self._progress = time.monotonic()
            self._changed.notify()

    def join(self) -> None:
        """Wait until all is printed, or until a terminal has taken nothing for STUCK_S."""
        while self._thread.is_alive():
            self._thread.join(0.2)
            stuck_s = time.monotonic() - self._progress
            if stuck_s > STUCK_S and os.isatty(self._writing):
                return

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._is_silent or not (self._queue or self._ending):
                    wait_s = self._next_due()
                    self._changed.wait(wait_s)
                    if wait_s is not None and not self._queue and not self._is_silent:
                        break
                piece = self._queue.take()
                over = piece is None and self._ending
            if piece is not None:
                self._print(piece)
                if time.monotonic() >= self._looked_at + LOOK_S:
                    self._print_due()
            elif over:
                self._finish()
                return
            else:
                self._print_due()

    @property
    def _is_silent(self) -> bool:
        return self._paused or self._held

    def _next_due(self) -> float | None:
        now = time.monotonic()
        waits = [wait_s for wait_s in (feed.wait_s(now) for feed in self._feeds.values()) if wait_s is not None]
        if self._is_drawn_late:
            waits.append(max(0.0, self._drawn_at + DRAW_S - now))
        return min(waits, default=None)

    def _print_due(self) -> None:
        self._looked_at = now = time.monotonic()
        for (fd, _, _), feed in self._feeds.items():
            self._write(fd, feed.due(now))
        self._draw(now)

    def _draw(self, now: float) -> None:
        """Show the progress bars in place, unless that was done a moment ago."""
        if self._live is None or self._live_fd < 0:
            return
        self._is_drawn_late = now < self._drawn_at + DRAW_S
        if self._is_drawn_late:
            return
        self._drawn_at = now
        if self._must_forget:
            self._must_forget = False
            self._live.forget()
        bars = [
            bar
            for _, feed in sorted(self._feeds.items(), key=lambda item: in_order(*item[0][1:]))
            for bar in feed.bars(now)
        ]
        try:
            columns, rows = os.get_terminal_size(self._live_fd)
        except OSError:
            columns, rows = 0, 0
        self._send(self._live_fd, self._live.draw(bars, columns or 80, rows or 24))

    def _print(self, piece: OutputPiece) -> None:
        if piece is ENDS_OUTPUT:
            self._flush_feeds()
            return
        fd = self._fds[piece.stream]
        if not piece.task:
            self._write(fd, piece.data)
            return
        key = (fd, piece.task, piece.stream)
        feed = self._feeds.get(key)
        if feed is None:
            feed = self._feeds[key] = self._make_feed(piece)
        if feed.live:
            self._live_fd, self._is_drawn_late = fd, True
        if piece.is_place:
            self._print_from_log(piece, feed)
        else:
            self._write(fd, feed.feed(piece.data, time.monotonic()))

    def _print_from_log(self, piece: OutputPiece, feed: Feed) -> None:
        fd = self._fds[piece.stream]
        path = self._find_log(piece.task)
        at, left = piece.at or 0, piece.length
        try:
            if path is None:
                raise FileNotFoundError(2, "no log file")
            from distrun_runtime.coordinator.logfiles import LogFile  # for slow readers only

            with LogFile(path) as log:
                while left and fd not in self._broken:
                    data = log.read(at, min(left, READ_SIZE))
                    if not data:
                        raise EOFError(
                            "they are gone: --log-limit" if log.begin() > at else "it is shorter than it was"
                        )
                    self._write(fd, feed.feed(data, time.monotonic()))
                    at, left = at + len(data), left - len(data)
        except (OSError, EOFError, JobStoreError) as err:
            self._write(fd, encoded("distrun: warning: %d bytes not shown: %s: %s\n" % (left, path, err)))

    def _flush_feeds(self) -> None:
        if self._live is not None and self._live_fd >= 0 and not self._must_forget:
            self._send(self._live_fd, self._live.erase())
        for (fd, _, _), feed in sorted(self._feeds.items(), key=lambda item: in_order(*item[0][1:])):
            self._write(fd, feed.flush())

    def _finish(self) -> None:
        self._flush_feeds()
        if self._queue.skipped:
            text = f"distrun: warning: {self._queue.skipped} bytes of output were not shown\n"
            self._write(self._fds["err"], encoded(text))

    def _write(self, fd: int, data: bytes) -> None:
        if not data:
            return
        if self._live is not None and not self._must_forget:
            erase = self._live.erase()
            self._is_drawn_late = self._is_drawn_late or bool(erase)
            data = erase + data
        self._send(fd, data)

    def _send(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        self._writing = fd
        while view and fd not in self._broken:
            try:
                # Short writes, so that a slow reader is seen to make progress.
                view = view[os.write(fd, view[:65536]) :]
                self._progress = time.monotonic()
            except BlockingIOError:
                select.select([], [fd], [], 1.0)
            except OSError:
                # The reader is gone (`| head -1`), or the terminal: the job goes on, its logs are files.
                self._broken.add(fd)
                self._on_broken(fd)
