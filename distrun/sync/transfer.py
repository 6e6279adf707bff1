"""One run of rsync to one host: started, watched, ended.

rsync and its ssh run in a process group of their own, together with a guard that waits on a pipe from this process:
when the pipe closes, because the run is over or because this process was killed, the guard ends the group.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from distrun.sync import remote

GLANCE_S = 0.1
LAST_WORDS_S = 2.0
"""How long the host's words are waited for after a run that failed."""
KILL_AFTER_S = 1.0
"""Between asking a run to end and killing it."""
RATE_S = 6.0
LEAST_S = 2.0
"""Less than so long says little of a rate."""
SAMPLE_S = 0.2
WORDS = 8
"""Lines of rsync's last words that are kept."""

_GUARD = (
    'exec 3<&0; { trap "" TERM; cat <&3 >/dev/null; kill -TERM 0; sleep 1; kill -KILL 0; } >/dev/null 2>&1 & '
    'exec "$@" 3<&- </dev/null'
)

_PROGRESS = re.compile(rb"\s*([\d,.]+)\s+\d+%.*?(?:\(xfe?r#(\d+), (?:to|ir)-chk=(\d+)/(\d+)\)\s*)?")
_FILES = re.compile(rb"Number of (?:regular )?files transferred: ([\d,.]+)")
_BYTES = re.compile(rb"Total transferred file size: ([\d,.]+)")


@dataclass
class Progress:
    """What has been sent so far."""

    files: int = 0
    size: int = 0
    """Bytes."""
    done: int = 0
    """Bytes of all files up to the present one, those included that the host had already."""


class Rate:
    """How fast a number grows, measured over the last RATE_S: rsync says only once a second what it has sent."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, number: int) -> None:
        """Note the number at a moment (seconds, growing). What comes soon after the one before is left out."""
        if not self._seen or now >= self._seen[-1][0] + SAMPLE_S:
            self._seen.append((now, number))
            while self._seen[0][0] < now - RATE_S:
                self._seen.popleft()

    def value(self) -> float | None:
        """Return the growth in a second; None: it was not seen for long enough."""
        grown = [each for each in self._seen if each[1]]
        if not grown or grown[-1][0] < grown[0][0] + LEAST_S:
            return None
        (first, before), (last, after) = grown[0], grown[-1]
        return max(0, after - before) / (last - first)


@dataclass
class Ended:
    """How a run ended."""

    code: int
    """rsync's exit code; negative: the signal that ended it."""
    words: list[str] = field(default_factory=list)
    """Its last words, and ssh's."""
    says: dict[str, str] = field(default_factory=dict)
    """What the text on the host said: word -> detail."""
    files: int = 0
    size: int = 0
    """What was sent: files, and their bytes."""
    overdue: bool = False
    """The host did not answer in time, and it was ended."""
    cancelled: bool = False


class Transfer:
    """A run. `run` is called once; `cancel` from any thread."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], *, answer_s: float, sums: Sequence[int] = ()
    ) -> None:
        """`sums` are those of the tree (`listing.sums`), for `Progress.done`."""
        self._sums = sums
        self._passed = self._sent_then = 0
        self._argv = list(argv)
        self._env = env
        self._answer_s = answer_s
        self._cancelled = False
        self._out = b""
        self._err = b""
        self._open: dict[int, Callable[[bytes], None]] = {}
        self.progress = Progress()
        self._ended = Ended(0)

    def cancel(self) -> None:
        """End it soon."""
        self._cancelled = True

    def run(self) -> Ended:
        """Run it to its end. Blocks; ends in any case: rsync has its own timeout once the host has answered.

        Raises:
            OSError: it cannot be started.
        """
        with contextlib.ExitStack() as stack:
            guarded, guard = os.pipe()
            stack.callback(os.close, guard)
            try:
                child = subprocess.Popen(
                    ["sh", "-c", _GUARD, "distrun-guard", *self._argv],
                    env=dict(self._env),
                    stdin=guarded,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            finally:
                os.close(guarded)
            assert child.stdout is not None
            assert child.stderr is not None
            stack.enter_context(child.stdout)
            stack.enter_context(child.stderr)
            try:
                self._watch(child, child.stdout.fileno(), child.stderr.fileno())
            finally:
                _end_group(child, signal.SIGKILL)  # the guard, and whatever rsync may have left
                child.wait()
        return self._finish(child.returncode)

    def _watch(self, child: subprocess.Popen[bytes], out: int, err: int) -> None:
        started = time.monotonic()
        asked = 0.0
        self._open = {out: self._take_out, err: self._take_err}
        for fd in self._open:
            os.set_blocking(fd, False)
        while not _is_over(child):
            self._read(GLANCE_S)
            now = time.monotonic()
            self._ended.overdue = self._ended.overdue or (not self._ended.says and now > started + self._answer_s)
            if self._cancelled or self._ended.overdue:
                if not asked:
                    asked = now
                    _end_group(child, signal.SIGTERM)
                elif now > asked + KILL_AFTER_S:
                    _end_group(child, signal.SIGKILL)
        # Not until the end of the streams: a connection that ssh keeps for others would hold them open. But where it
        # failed, what the host says of that may come after rsync's own end here.
        until = time.monotonic() + (LAST_WORDS_S if _has_failed(child) else 0.0)
        while self._read(0.0) or (self._open and time.monotonic() < until):
            time.sleep(0.005)

    def _read(self, wait_s: float) -> bool:
        """Read what there is, after waiting for it at most so long; return whether there was any."""
        if not self._open:
            time.sleep(wait_s)
            return False
        poll = select.poll()
        for fd in self._open:
            poll.register(fd, select.POLLIN)
        got = False
        for fd, _ in poll.poll(wait_s * 1000):
            with contextlib.suppress(BlockingIOError):
                data = os.read(fd, 65536)
                got = got or bool(data)
                self._open[fd](data)
                if not data:
                    del self._open[fd]
        return got

    def _take_out(self, data: bytes) -> None:
        *lines, self._out = re.split(rb"[\r\n]", self._out + data)
        for line in lines:
            if match := _PROGRESS.fullmatch(line):
                self._note_progress(match)
            elif match := _FILES.match(line):
                self.progress.files = _number(match.group(1))
            elif match := _BYTES.match(line):
                self.progress.size = _number(match.group(1))

    def _note_progress(self, match: re.Match[bytes]) -> None:
        progress = self.progress
        progress.size = _number(match.group(1))
        if match.group(2):
            progress.files = int(match.group(2))
            if self._sums:
                entries = int(match.group(4)) - int(match.group(3))
                self._passed = self._sums[min(entries, len(self._sums) - 1)]
                self._sent_then = progress.size
        progress.done = self._passed + progress.size - self._sent_then

    def _take_err(self, data: bytes) -> None:
        *lines, self._err = (self._err + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        text = line.decode("utf-8", "surrogateescape").rstrip("\r")
        if text.startswith(remote.SAYS):
            word, _, detail = text[len(remote.SAYS) :].partition(" ")
            self._ended.says[word] = detail
        elif text.strip():
            self._ended.words = [*self._ended.words, text][-WORDS:]

    def _finish(self, code: int) -> Ended:
        self._hear(self._err)
        self._ended.code = code
        self._ended.files, self._ended.size = self.progress.files, self.progress.size
        self._ended.cancelled = self._cancelled
        return self._ended


def _is_over(child: subprocess.Popen[bytes]) -> bool:
    """Return whether it has ended, without reaping it: its process group cannot be another's until then."""
    if hasattr(os, "waitid"):
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return child.poll() is not None


def _has_failed(child: subprocess.Popen[bytes]) -> bool:
    if child.returncode is not None:
        return child.returncode != 0
    ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return ended is not None and ended.si_status != 0


def _end_group(child: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


def _number(digits: bytes) -> int:
    return int(re.sub(rb"\D", b"", digits) or b"0")
