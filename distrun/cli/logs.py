"""`distrun logs`: what the tasks of a job printed, one task after the other or in the order in which it came."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from distrun.cli.common import job_and_tasks, my_jobs, say, takes
from distrun.cli.console import can_draw, print_out, wants_colour
from distrun.cli.screen import Feed, Region, StreamBars, chosen, in_order, prefix, short_prefix
from distrun.errors import UsageError
from distrun.formats import point_in_time
from distrun.formats import size as size_text
from distrun.jobs import ForwardedOutput, Job, RecordedOutput
from distrun.options import count
from distrun_runtime.contract import environ, facts
from distrun_runtime.contract.dataclass import rfc3339
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.logreader import LogPiece, LogReader
from distrun_runtime.coordinator.logs import NOTE, LogFile

# Turns pieces of a job's output into what is printed, by the times at which they came. No side effects.
#
# `launch` prints by the clock: a progress bar once a second, a line without its end after a moment. `Replay` does the
# same by the clock of the record, so that what was printed is printed again.


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

    def add(self, piece: LogPiece) -> list[bytes]:
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

    def bars(self) -> list[StreamBars]:
        """Return the running progress bars of each stream."""
        keys = sorted(self._feeds, key=lambda key: in_order(*key))
        feeds = [(task, self._feeds[task, stream]) for task, stream in keys]
        return [StreamBars(feed.prefix, short_prefix(task), feed.bars(self.clock)) for task, feed in feeds]

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

    def _check_place(self, piece: LogPiece) -> list[bytes]:
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


POLL_S = 0.1
READ_SIZE = 256 * 1024
SHOWN = 8
"""Tasks that are named, at most."""
MOST_LINES = 1_000_000_000
WARM_BYTES = 256 * 1024
"""Output before the first that is shown that is looked at: lines may have begun there."""
LINE_BYTES = 256
"""How long a line is taken to be when the last lines are looked for."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("job", required=False)
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job is over.")
@click.option("--merge", is_flag=True, help="All tasks in the order in which they printed, as launch shows them.")
@click.option(
    "--since", metavar="TIME", help="Only what came since: 10m (ago), 10:00, 2026-11-24T10:00. Implies --merge."
)
@click.option("--grep", metavar="REGEX", help="Only lines in which this Python regular expression is found.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line: time, task, text ... Implies --merge.")
@takes(count("-n/--lines", "Only the last N lines: of each task, or of all with --merge.", low=0, high=MOST_LINES))
def logs(
    job: str | None,
    tasks: tuple[str, ...],
    *,
    follow: bool,
    merge: bool,
    since: str | None,
    grep: str | None,
    as_json: bool,
    lines: int | None,
) -> int:
    """Show what JOB's tasks printed, stdout and stderr together. Without JOB: the latest job's.

    TASK is a name (worker-0) or a role (worker). The log of a single task is shown unchanged, several with prefixes,
    one task after the other; with --merge in the order in which they printed.
    """
    found, tasks = job_and_tasks(my_jobs(), job, tasks)
    folder = found.refresh().folder
    rows = [] if found.is_over and not found.tasks else found.choose(tasks)
    pattern = _pattern(grep)
    start = None if since is None else point_in_time("--since", since, time.time())
    env = environ.snapshot()
    prefixed = merge or len(rows) > 1
    region = Region() if follow and prefixed and not as_json and grep is None and can_draw(1, env) else None
    style = Style(
        hosts={str(row["name"]): str(row["host"]) for row in rows},
        prefixed=prefixed,
        coloured=wants_colour(1, env),
        terminal=os.isatty(1) and not as_json,
        live=region is not None,
        pattern=pattern,
        as_json=as_json,
    )
    names = [str(row["name"]) for row in rows]
    if found.is_elsewhere:
        begin = {"cursor": 0} if start is None and lines is None else {"since": start, "tail": lines}
        with ForwardedOutput(found, names, begin, follow) as forwarded:
            _LogPrinter(forwarded, Replay(style, from_start="cursor" in begin), region).show(forwarded.goes_on)
        _tell_unstarted(found, names)
        return 0

    def goes_on() -> bool:
        return follow and found.state in facts.GOING

    with contextlib.closing(LogReader(folder.logs)) as reader:
        if not (merge or as_json or start is not None):
            source: PieceSource = _LogFiles(folder, names, lines)
            _LogPrinter(source, Replay(style, from_start=lines is None), region).show(goes_on)
        else:
            ordered = _Ordered(found, reader, names)
            replay = ordered.begin(style, start, lines)
            _LogPrinter(ordered, replay, region, lines).show(goes_on)
    _tell_unstarted(found, names)
    return 0


def _tell_unstarted(job: Job, names: Sequence[str]) -> None:
    """Say which of these tasks were not started in a job that is over, why, and what to do."""
    if (outcome := job.outcome) is None:
        return
    waiting = [str(row["name"]) for row in job.tasks if row["name"] in names and row["started"] is None]
    left = [name for name in waiting if not job.folder.log_path(name).exists()]
    if left or not job.tasks:
        say(f"not started: {facts.listed(left, SHOWN) or 'any task'}; {outcome['message']}", "info")
        fixes = dict.fromkeys(problem["fix"] for problem in outcome["problems"] if problem["fix"])
        for line in [*"\n".join(fixes).splitlines(), f"to launch it again: distrun rerun {job.id}"]:
            say(line, "hint")


def tail_offset(path: Path, lines: int) -> int:
    """Return where the last `lines` lines of a log begin, an absolute offset; the first one if it is not there."""
    with contextlib.closing(LogFile(path)) as log:
        begin, end = log.begin(), log.end()
        if lines == 0:
            return end
        stop = end - 1  # the newline that ends the last line begins nothing
        while stop > begin:
            start = max(begin, stop - READ_SIZE)
            data = _between(log, start, stop)
            count = data.count(b"\n")
            if count >= lines:
                at = len(data)
                for _ in range(lines):
                    at = data.rfind(b"\n", 0, at)
                return start + at + 1
            lines -= count
            stop = start
        return begin


def _between(log: LogFile, start: int, stop: int) -> bytes:
    parts = []
    while start < stop and (data := log.read(start, stop - start)):
        parts.append(data)
        start += len(data)
    return b"".join(parts)


def _pattern(grep: str | None) -> re.Pattern[bytes] | None:
    try:
        return None if grep is None else re.compile(os.fsencode(grep))
    except re.error as err:
        raise UsageError(
            f"--grep: {grep!r} is no regular expression of Python: {err}", "write \\ before characters with a meaning"
        ) from None


class _LogFiles:
    """The log files of tasks, one after the other."""

    def __init__(self, folder: JobFolder, names: Sequence[str], lines: int | None) -> None:
        paths = {name: folder.log_path(name) for name in names}
        self._next = {name: 0 if lines is None else tail_offset(path, lines) for name, path in paths.items()}
        self._paths = paths

    def pieces(self) -> Iterator[LogPiece]:
        for name, path in self._paths.items():
            # Opened each time: there may be more tasks than files that a process may open.
            with contextlib.closing(LogFile(path)) as log:
                at = self._next[name]
                while True:
                    data = log.read(at, READ_SIZE)
                    if data:
                        yield LogPiece(0, time.time(), name, "", 0, at, data)
                        at += len(data)
                        self._next[name] = at
                        continue
                    begin = log.begin() if log.end() > at else 0
                    if begin <= at:
                        break
                    at = begin

    def last(self) -> Iterator[LogPiece]:
        return iter(())


class _Ordered(RecordedOutput):
    """The output of tasks in the order of the index, from a place that is looked for."""

    def begin(self, style: Style, since: float | None, lines: int | None) -> Replay:
        """Go to where the lines since `since`, or at least the last `lines`, begin.

        Return a replay that has seen the output before, so that a line that began there is whole.
        """
        first = 0 if since is None else self.reader.cursor_at(since)
        self.since = since or 0.0
        size = LINE_BYTES * lines + WARM_BYTES if lines is not None else 0
        while lines is not None and self.reader.end() - size > first:
            replay = self._warmed(style, self.reader.end() - size)
            found = [part.count(b"\n") for piece in self.pieces() for part in replay.add(piece)]
            if sum(found) >= lines:
                return self._warmed(style, self.reader.end() - size)
            size *= 8
        return self._warmed(style, first)

    def _warmed(self, style: Style, cursor: int) -> Replay:
        """Go to a cursor; return what has seen the output just before it."""
        replay = Replay(style, from_start=cursor <= 0)
        self.cursor = max(0, cursor - (0 if style.is_raw else WARM_BYTES))
        for piece in self.reader.between(self.cursor, cursor, self.names):
            replay.add(piece)
        self.cursor = cursor
        replay.begin()
        return replay


PieceSource = _LogFiles | RecordedOutput | ForwardedOutput


class _LogPrinter:
    """Prints what a source gives. `lines`: only so many of the last lines of what is there at the beginning."""

    def __init__(self, source: PieceSource, replay: Replay, region: Region | None, lines: int | None = None) -> None:
        self._source = source
        self._replay = replay
        self._region = region
        self._kept: deque[bytes] | None = None if lines is None else deque(maxlen=lines)
        self._waiting: list[bytes] = []
        self._size = 0

    def show(self, goes_on: Callable[[], bool]) -> None:
        """Print until `goes_on` says no, or stdout is closed."""
        while True:
            # Asked before reading: what was written before the end is then shown.
            is_last = not goes_on()
            if not self._print_all(self._source.pieces()):
                return
            if is_last:
                break
            if not self._release():
                return
            if self._region is not None:
                columns, rows = shutil.get_terminal_size()
                print_out(self._region.draw(chosen(self._replay.bars(), b"", columns, rows), columns))
            time.sleep(POLL_S)
            self._take(self._replay.advance(self._replay.clock + POLL_S))
        if self._print_all(self._source.last()):
            self._take(self._replay.flush())
            self._release()

    def _print_all(self, pieces: Iterator[LogPiece]) -> bool:
        """Print pieces; return whether anybody reads."""
        for piece in pieces:
            self._take(self._replay.add(piece))
            if self._kept is None and self._size >= READ_SIZE and not self._write():
                return False
        return self._kept is not None or self._write()

    def _take(self, parts: list[bytes]) -> None:
        if self._kept is None:
            self._waiting += parts
            self._size += sum(map(len, parts))
        else:
            for part in parts:
                whole, newline, rest = part.rpartition(b"\n")
                self._kept.extend(line + b"\n" for line in (whole.split(b"\n") if newline else ()))
                self._kept.extend([rest] if rest else ())

    def _release(self) -> bool:
        """Print the last lines that were kept, and from now on everything."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self._take(list(kept))
        return self._write()

    def _write(self) -> bool:
        data = b"".join(self._waiting)
        self._waiting, self._size = [], 0
        if data and self._region is not None:
            data = self._region.erase() + data
        return print_out(data) if data else True
