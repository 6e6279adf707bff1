"""The thread that writes output to stdout and stderr. It has a queue, so callers never wait for a slow reader.

What cannot be written yet is queued. Past `QUEUE_LIMIT`, only its position in the task's log file is kept, and it is
read back from there. So a slow reader costs no memory, a job never waits for it, and no line is lost.

On a terminal the thread also owns the region at the bottom (`region`): progress bars and the line of the job. Output
scrolls above it: one write erases the region, prints, and draws it again.
"""

from __future__ import annotations

import itertools
import operator
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from distrun.cli.region import DRAW_S, Region, StreamBars, chosen
from distrun_runtime.coordinator.clients import Backlog, OutputPiece, encoded
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.cli.screen import Feed

LAST_BYTES = 64 * 1024
"""Output that waits for a reader after `leave_out`, at most: the last words of tasks that are being stopped."""
STUCK_S = 10.0
"""At the end, a terminal that takes nothing for this time is given up."""
READ_SIZE = 256 * 1024
WRITE_SIZE = 64 * 1024
"""Bytes that are gathered before they are written, at most."""
PACE_S = 0.03
"""Time for which output above a region is gathered, because each write draws the region again."""
LOOK_S = 0.1
"""While output arrives without a pause, interval of checks for what other tasks have to show."""
ASK_S = 0.02
"""After output has arrived, minimum time between two checks when the streams have something to print."""
RESIZE_S = 1.0
"""How often it is looked whether the terminal has another size, while nothing else happens."""
HIDE_S = 1.0
"""How long a question waits until the region is gone. A terminal that is stuck must not hold it up."""


ENDS_OUTPUT = OutputPiece()
"""Tasks will write nothing more: what they did not end with a newline is printed now."""


class Writer:
    """A queue and the thread that empties it."""

    def __init__(
        self,
        fds: Mapping[str, int],
        make_feed: Callable[[OutputPiece], Feed],
        find_log: Callable[[str], Path | None],
        on_broken: Callable[[int, OSError], None] = lambda fd, err: None,
        region: Region | None = None,
        *,
        last_words: Callable[[], str] = lambda: "",
    ) -> None:
        """`fds`: where each stream ("out", "err") is written; `region`: at the bottom of the terminal of "err".

        `last_words`: called at the end, returns what is printed then.
        """
        self._fds = fds
        self._region = region
        self._status = b""
        self._is_drawn_late = self._is_closed = False
        self._drawn_at = self._looked_at = self._written_at = float("-inf")
        self._gathered: list[tuple[int, bytes]] = []
        self._size = 0
        self._is_mid_line = False
        self._make_feed = make_feed
        self._on_broken = on_broken
        self._find_log = find_log
        self._feeds: dict[tuple[int, str, str], Feed] = {}
        self._due_at = self._asked_at = float("-inf")
        """When a feed has something to print although nothing comes, as of `_asked_at`."""
        self._has_fed = True
        """A feed has changed since then."""
        self._queue = Backlog()
        self._is_paused = self._ending = False
        self._last_words = last_words
        self._leaves_out = False
        self.left_out = 0
        """Bytes of output that were not printed, since `leave_out`."""
        self._cut: dict[tuple[str, str], bool] = {}
        """Task and stream of which something was left out since the last piece; and whether that ended in a line."""
        self._holds = 0
        self._is_hidden = False
        """Nothing is printed, the region is gone."""
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
            if self._leaves_out:
                self._drop(LAST_BYTES)
            self._changed.notify()

    def leave_out(self) -> None:
        """Print nothing of the output that waits, and from now on only what the reader takes as it comes."""
        with self._changed:
            self._leaves_out = True
            self._drop(0)

    def _drop(self, keep: int) -> None:
        for piece in self._queue.drop(keep):
            self._note_left_out(piece, piece.length)

    def _note_left_out(self, piece: OutputPiece, length: int) -> None:
        self.left_out += length
        self._cut[piece.task, piece.stream] = bool(piece.data) and not piece.data.endswith(b"\n")

    def end_output(self) -> None:
        """Say that no task will write anything more."""
        self.put(ENDS_OUTPUT)

    def show_status(self, line: bytes) -> None:
        """Show a line below the progress bars, in place of the one before; empty: none."""
        with self._changed:
            if line != self._status and self._region is not None and not self._is_closed:
                self._status, self._is_drawn_late = line, True
                self._changed.notify()

    def toggle_pause(self) -> bool:
        """Pause or go on; return whether it is paused now."""
        with self._changed:
            self._is_paused = not self._is_paused
            self._changed.notify_all()
            if self._is_paused:
                self._await_hidden()
            return self._is_paused

    def hold(self) -> None:
        """Stop for a question on the terminal, until `release`. Returns when the region is gone."""
        with self._changed:
            self._holds += 1
            self._changed.notify_all()
            self._await_hidden()

    def release(self) -> None:
        """Go on after a question; a pause of the user's stays one."""
        with self._changed:
            self._holds = max(0, self._holds - 1)
            self._changed.notify_all()

    def _await_hidden(self) -> None:
        if self._region is not None and threading.current_thread() is not self._thread:
            self._changed.wait_for(lambda: self._is_hidden or not self._is_silent, HIDE_S)

    def resume(self) -> None:
        """Go on, if it is paused."""
        with self._changed:
            self._is_paused, self._holds = False, 0
            self._changed.notify_all()

    def end(self) -> None:
        """Say that nothing more will come."""
        with self._changed:
            self._ending, self._is_paused, self._holds = True, False, 0
            self._progress = time.monotonic()
            self._changed.notify_all()

    def join(self, limit_s: float | None = None) -> None:
        """Wait until all is printed, until a terminal has taken nothing for STUCK_S, or any reader for `limit_s`."""
        while self._thread.is_alive():
            self._thread.join(0.2)
            stuck_s = time.monotonic() - self._progress
            if limit_s is not None and stuck_s > limit_s:
                return
            if stuck_s > STUCK_S and os.isatty(self._writing):
                return

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                piece = self._next()
                is_silent = self._is_silent
                is_over = piece is None and self._ending and not is_silent
            if is_silent:
                self._hide()
            elif piece is not None:
                self._print(piece)
                now = time.monotonic()
                if now >= self._looked_at + LOOK_S:
                    self._print_due(now)
            elif is_over:
                self._finish()
                return
            else:
                self._print_due(time.monotonic())

    def _next(self) -> OutputPiece | None:
        """Wait for a piece, or for something else to do; the lock is held."""
        while True:
            if self._is_silent:
                if not self._is_hidden:
                    return None
                self._changed.wait()
                continue
            self._is_hidden = False
            if self._queue or self._ending:
                return self._queue.take()
            wait_s = self._next_due()
            if wait_s is not None and wait_s <= 0:
                return None
            self._changed.wait(wait_s)

    @property
    def _is_silent(self) -> bool:
        return self._is_paused or self._holds > 0

    def _hide(self) -> None:
        """Write what was gathered, and take the region away, before others write to the terminal."""
        self._flush(draws=False)
        with self._changed:
            self._is_hidden = True
            self._is_drawn_late = self._region is not None
            self._changed.notify_all()

    def _next_due(self) -> float | None:
        """Return how long there is nothing to do unless something comes; None: forever."""
        now = time.monotonic()
        waits = [self._feeds_due(now) - now]
        if self._gathered:
            waits.append(self._flush_at - now)
        if self._is_drawn_late:
            waits.append(self._drawn_at + DRAW_S - now)
        elif self._region is not None and self._region.is_drawn:
            waits.append(self._drawn_at + RESIZE_S - now)
        wait_s = min(waits)
        return wait_s if wait_s < float("inf") else None

    def _feeds_due(self, now: float) -> float:
        """Return when feeds may have something to print, or are to be asked again; infinite: never."""
        if self._has_fed and now < self._asked_at + ASK_S:
            return self._asked_at + ASK_S
        if self._has_fed:
            self._has_fed, self._asked_at = False, now
            waits = [wait_s for wait_s in (feed.wait_s(now) for feed in self._feeds.values()) if wait_s is not None]
            self._due_at = now + min(waits, default=float("inf"))
        return self._due_at

    @property
    def _flush_at(self) -> float:
        """When what was gathered is written: at once, unless that would draw a region all the time."""
        return self._written_at + PACE_S if self._region is not None and self._region.is_drawn else float("-inf")

    def _print_due(self, now: float) -> None:
        self._looked_at, self._has_fed = now, True
        for (fd, _, _), feed in self._feeds.items():
            data = feed.due(now)
            if data:
                self._write(fd, data)
        if self._gathered and now >= self._flush_at:
            self._flush()
        elif self._region is not None and now >= self._drawn_at + (DRAW_S if self._is_drawn_late else RESIZE_S):
            self._draw(now)

    def _draw(self, now: float, before: bytes = b"") -> None:
        """Show the progress bars and the job's line in place, after `before`."""
        assert self._region is not None
        self._drawn_at, self._is_drawn_late = now, False
        lines: list[bytes] = []
        columns, rows = self._terminal_size()
        if not self._is_mid_line and not self._is_closed:
            groups = []
            for (_, task, _), feed in self._feeds.items():
                bars = feed.bars(now)
                # What has just come may be half of a state.
                self._is_drawn_late = self._is_drawn_late or (feed.live and feed.wait_s(now) is not None)
                if bars:
                    from distrun.cli.screen import short_prefix

                    groups.append(StreamBars(feed.prefix, short_prefix(task), bars))
            lines = chosen(groups, self._status, columns, rows)
        self._send(self._fds["err"], before + self._region.draw(lines, columns))

    def _terminal_size(self) -> tuple[int, int]:
        try:
            columns, rows = os.get_terminal_size(self._fds["err"])
        except OSError:
            columns, rows = 0, 0
        return columns or 80, rows or 24

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
            from distrun.cli.screen import in_order  # with its patterns: when there is something to show

            feed = self._feeds[key] = self._make_feed(piece)
            self._feeds = dict(sorted(self._feeds.items(), key=lambda item: in_order(*item[0][1:])))
        self._has_fed = True
        if feed.live:
            self._is_drawn_late = True
        if (piece.task, piece.stream) in self._cut:
            self._begin_line(piece, feed)
        if piece.is_place:
            self._print_from_log(piece, feed)
        else:
            self._write(fd, feed.feed(piece.data, time.monotonic()))

    def _begin_line(self, piece: OutputPiece, feed: Feed) -> None:
        """End the line before a gap, and go on with the first whole one after it."""
        self._write(self._fds[piece.stream], feed.flush())
        before, newline, after = piece.data.partition(b"\n")
        with self._changed:
            is_mid_line = self._cut.pop((piece.task, piece.stream))
            if is_mid_line and newline:
                self.left_out += len(before) + 1
                piece.data = after

    def _print_from_log(self, piece: OutputPiece, feed: Feed) -> None:
        fd = self._fds[piece.stream]
        path = self._find_log(piece.task)
        at, left = piece.at or 0, piece.length
        try:
            if path is None:
                raise FileNotFoundError(2, "no log file")
            from distrun_runtime.coordinator.logs import LogFile  # for slow readers only

            with LogFile(path) as log:
                while left and fd not in self._broken:
                    if self._leaves_out:
                        with self._changed:
                            self._note_left_out(piece, left)
                        return
                    data = log.read(at, min(left, READ_SIZE))
                    gone = min(left, log.begin() - at) if not data else 0
                    if gone > 0:
                        self._write(fd, _not_shown(gone, path, "they are gone: --log-limit"))
                    elif not data:
                        raise EOFError("it is shorter than it was")
                    self._write(fd, feed.feed(data, time.monotonic()))
                    at, left = at + len(data) + gone, left - len(data) - gone
        except (OSError, EOFError, JobStoreError) as err:
            self._write(fd, _not_shown(left, path, err))

    def _flush_feeds(self) -> None:
        """Print what tasks have left unended, and take the region away for good."""
        with self._changed:
            self._is_closed, self._status = True, b""
        for (fd, _, _), feed in self._feeds.items():
            self._write(fd, feed.flush())
        self._flush(draws=False)

    def _finish(self) -> None:
        self._flush_feeds()
        if self._queue.skipped:
            text = f"distrun: warning: {self._queue.skipped} bytes of output were not shown\n"
            self._write(self._fds["err"], encoded(text))
        self._write(self._fds["err"], encoded(self._last_words()))
        self._flush(draws=False)

    def _write(self, fd: int, data: bytes) -> None:
        """Gather bytes, and write them if they are many."""
        if not data:
            return
        self._gathered.append((fd, data))
        self._size += len(data)
        if self._size >= WRITE_SIZE:
            self._flush()

    def _flush(self, draws: bool = True) -> None:
        """Write what was gathered, and draw the region again below it (`draws`) or take it away."""
        gathered, self._gathered, self._size = self._gathered, [], 0
        region = self._region
        if region is None:
            for fd, pieces in itertools.groupby(gathered, operator.itemgetter(0)):
                self._send(fd, b"".join([data for _, data in pieces]))
            return
        # Both streams are one place where there is a region: what came first is written first.
        self._written_at = time.monotonic()
        data = b"".join([data for _, data in gathered])
        if data:
            self._is_mid_line = not data.endswith(b"\n")
        before = region.erase(self._terminal_size()[0]) + data
        if draws:
            self._draw(self._written_at, before)
        else:
            self._send(self._fds["err"], before)

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
            except OSError as err:
                # The reader is gone (`| head -1`), or the terminal, or a disk is full: the job's logs are files.
                self._broken.add(fd)
                self._on_broken(fd, err)


def _not_shown(count: int, path: Path | None, why: object) -> bytes:
    return encoded(f"distrun: warning: {count} bytes not shown: {path}: {why}\n")
