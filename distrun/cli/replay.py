"""Turns pieces of a job's output into what is printed, by the times at which they came. No side effects.

`launch` prints by the clock: a progress bar once a second, a line without its end after a moment. `Replay` does the
same by the clock of the record, so that what was printed is printed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from distrun.cli.lines import Feed, in_order, prefix, short_prefix
from distrun.cli.region import Group
from distrun.units import size as size_text
from distrun_runtime.coordinator.jobfolder import rfc3339
from distrun_runtime.coordinator.logindex import NOTE
from distrun_runtime.coordinator.logreader import Piece

SCHEMA = "distrun.log/1"

Key = tuple[str, str]
"""Task and stream."""


@dataclass(frozen=True)
class Style:
    """How lines are shown."""

    hosts: Mapping[str, str]
    """Host of each task."""
    prefixed: bool = True
    """Without: bytes unchanged, the streams of a task together."""
    coloured: bool = False
    terminal: bool = False
    live: bool = False
    """Progress bars are drawn in place by the caller."""
    pattern: re.Pattern[bytes] | None = None
    """Only lines in which it is found."""
    as_json: bool = False

    @property
    def is_raw(self) -> bool:
        """Whether bytes go through unchanged."""
        return not (self.prefixed or self.as_json or self.pattern is not None)

    def prefix(self, task: str, stream: str) -> bytes:
        """Return what stands before each line; never empty unless `is_raw`."""
        if self.is_raw:
            return b""
        if not self.prefixed or self.as_json:
            return b"|"  # marks the lines, and is not shown
        return prefix(task, self.hosts.get(task, ""), stream == "err", self.coloured)


@dataclass
class Replay:
    """Turns pieces into what is printed.

    Its methods return what is to be printed now: a list of lines, or, without prefixes, of any bytes.
    """

    style: Style
    from_start: bool = True
    """Whether the first piece of each task should be its first; if it is not, what is gone is said."""
    clock: float = 0.0
    _ends: dict[str, int] = field(default_factory=dict)
    """By task where its last piece ended in its log."""
    _feeds: dict[Key, Feed] = field(default_factory=dict)
    _due: dict[Key, float] = field(default_factory=dict)
    """When a feed may have something although nothing more comes."""
    _fed: set[Key] = field(default_factory=set)
    """Whose feeds have got something since `begin`."""
    _attempts: dict[Key, int] = field(default_factory=dict)

    def add(self, piece: Piece) -> list[bytes]:
        """Take a piece."""
        printed = self.advance(piece.time)
        printed += self._check_place(piece)
        key = piece.task, "" if self.style.is_raw else piece.stream
        feed = self._feeds.get(key)
        if feed is None:
            before, live = self.style.prefix(*key), self.style.live
            feed = self._feeds[key] = Feed(before, terminal=self.style.terminal, live=live)
        self._fed.add(key)
        self._attempts[key] = piece.attempt
        data = piece.data
        if piece.stream == NOTE and not self.style.is_raw:
            data = data.strip(b"\n") + b"\n"  # its first newline ends what stands before it in the file
        printed += self._shown(key, feed.feed(data, self.clock))
        self._note_due(key, feed)
        return printed

    def advance(self, time: float) -> list[bytes]:
        """Let the clock go on to `time`, if that is later."""
        printed: list[bytes] = []
        while self._due:
            when = min(self._due.values())
            if when > time:
                break
            # A bit later: the sum of two floats may be just below what the feed waits for.
            self.clock = max(self.clock, when + 1e-6)
            for key in [key for key, due in self._due.items() if due <= self.clock]:
                feed = self._feeds[key]
                printed += self._shown(key, feed.due(self.clock))
                self._note_due(key, feed)
        self.clock = max(self.clock, time)
        return printed

    def bars(self) -> list[Group]:
        """Return the running progress bars of each stream."""
        keys = sorted(self._feeds, key=lambda key: in_order(*key))
        feeds = [(task, self._feeds[task, stream]) for task, stream in keys]
        return [Group(feed.prefix, short_prefix(task), feed.bars(self.clock)) for task, feed in feeds]

    def begin(self) -> None:
        """What was taken so far is not shown; of lines that have begun, only those are that go on after this."""
        self._fed.clear()

    def flush(self) -> list[bytes]:
        """Return what is left of lines that have no end."""
        printed: list[bytes] = []
        for key in sorted(self._fed, key=lambda key: in_order(*key)):
            printed += self._shown(key, self._feeds[key].flush())
        self._due.clear()
        return printed

    def _note_due(self, key: Key, feed: Feed) -> None:
        wait_s = feed.wait_s(self.clock)
        if wait_s is None:
            self._due.pop(key, None)
        else:
            self._due[key] = self.clock + wait_s

    def _check_place(self, piece: Piece) -> list[bytes]:
        """Say how much of the task's output before this piece is gone."""
        missing = piece.at - self._ends.get(piece.task, 0 if self.from_start else piece.at)
        self._ends[piece.task] = piece.at + len(piece.data)
        if missing <= 0:
            return []
        key = piece.task, NOTE
        text = f"[distrun: {size_text(missing)} before this are gone: --log-limit]\n".encode()
        return self._shown(key, self.style.prefix(*key) + text)

    def _shown(self, key: Key, data: bytes) -> list[bytes]:
        style = self.style
        if not data or style.is_raw or (style.prefixed and style.pattern is None and not style.as_json):
            return [data] if data else []
        before = style.prefix(*key)
        lines = [line[len(before) :] for line in data.split(b"\n")[:-1]]
        wanted = [line for line in lines if style.pattern is None or style.pattern.search(line)]
        if style.as_json:
            return [self._json(key, line) for line in wanted]
        return [(before if style.prefixed else b"") + line + b"\n" for line in wanted]

    def _json(self, key: Key, line: bytes) -> bytes:
        task, stream = key
        value = {
            "schema": SCHEMA,
            "time": rfc3339(self.clock) if stream else None,
            "task": task,
            "host": self.style.hosts.get(task),
            "stream": stream or None,
            "attempt": self._attempts.get(key, 0),
            "text": line.decode("utf-8", "replace"),
        }
        return json.dumps(value, ensure_ascii=False).encode() + b"\n"
