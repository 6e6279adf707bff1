"""What became of the copy to one host, in words. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from distrun.errors import SyncError
from distrun.sync import remote, tool
from distrun.sync.transfer import Ended
from distrun.sync.units import count, size_text

_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_SUMS = ("rsync error:", "rsync: connection unexpectedly closed", "rsync warning:")
_RACES = ("File exists", "No such file or directory", "file has vanished", "Directory not empty", "non-empty directory")
TIMEOUTS = (30, 35)
PARTLY = (23, 24)
INTERRUPTED = "the copy was interrupted; the hosts that were not done have what they had before"
PYTHON = "install one there, or name it by python=PATH in the hosts file"
ROOM = "make room there, or give another directory"


@dataclass(frozen=True)
class Result:
    """The copy to one host."""

    host: str
    names: tuple[str, ...] = ()
    """All the names by which the job knows it, `host` first."""
    files: int = 0
    """Files that were sent."""
    size: int = 0
    """Bytes of these files."""
    seconds: float = 0.0
    same: bool = False
    """The folder there is the source itself, so there was nothing to do."""
    code: int = 0
    """rsync's, or 0."""
    reason: str = ""
    """Why it failed, in one line; empty: it did not."""
    fix: str = ""
    words: tuple[str, ...] = ()
    """The last words of rsync and ssh."""
    cancelled: bool = False

    @property
    def ok(self) -> bool:
        """Whether everything has arrived."""
        return not self.reason and not self.cancelled

    def line(self) -> str:
        """Return it as one line."""
        if self.cancelled:
            return "%s: not finished" % self.host
        if self.reason:
            return "%s: %s" % (self.host, self.reason)
        if self.same:
            return "%s: the same directory" % self.host
        return "%s: %s, %s in %.1f s" % (self.host, count(self.files, "file"), size_text(self.size), self.seconds)

    def lines(self) -> list[str]:
        """Return a failure in lines: the reason, the last words, what to do."""
        words = [word for word in self.words if word not in self.reason]
        return [
            self.line(),
            *("    " + word for word in words),
            *("    fix: " + line for line in self.fix.splitlines()),
        ]


def failure(ended: Ended, host: str, *, answer_s: float = 0.0, stall_s: float = 0.0) -> tuple[str, str]:
    """Return why a run failed, and what to do about it; two empty texts if it did not. Pure."""
    says, meaning = ended.says, tool.meaning(ended.code)
    last = _telling(ended.words)
    if ended.code == 0:
        return "", ""
    if ended.overdue:
        return "it has not answered within %g s" % answer_s, "distrun doctor --hosts %s" % host
    if remote.NO_RSYNC in says:
        return "there is no rsync on it", "on that host: " + tool.INSTALL
    if remote.NO_PYTHON in says:
        return "a python3 of 3.8 or newer is needed there: %s" % says[remote.NO_PYTHON], PYTHON
    if remote.UNFIT in says:
        text, fix = json.loads(says[remote.UNFIT])
        return str(text), str(fix)
    if ended.code in TIMEOUTS:
        return "nothing has moved for %g s: %s" % (stall_s, meaning), "look at the network, or at the disk of that host"
    if not says:
        return "ssh did not get there: %s" % (last or meaning), "distrun doctor --hosts %s" % host
    if any(sign in word for word in ended.words for sign in _FULL):
        return "its disk is full: %s" % meaning, ROOM
    return "rsync: %s: %s" % (meaning, last) if last else "rsync: %s" % meaning, ""


def met_another(ended: Ended) -> bool:
    """Return whether a run failed only for what another copy into the same folder does meanwhile. Pure.

    So may a file that went away here while it was copied. The next run will do, or say what is wrong.
    """
    plain = [word for word in ended.words if not word.startswith(_SUMS)]
    return ended.code in PARTLY and bool(plain) and all(any(race in word for race in _RACES) for word in plain)


def _telling(words: Sequence[str]) -> str:
    """Return the line that says most: not the sums that rsync ends with, nor that a pipe broke."""
    plain = [word for word in words if not word.startswith(_SUMS) and "Broken pipe" not in word]
    return (plain or list(words) or [""])[-1]


def told(results: Sequence[Result]) -> tuple[str, str, str]:
    """Return the host that failed first in the list, why in one line, and more lines; empty texts if none did. Pure."""
    failed = [each for each in results if each.reason]
    if not failed:
        return "", INTERRUPTED if any(each.cancelled for each in results) else "", ""
    first, *others = failed
    nor = " (nor %s)" % ", ".join(each.host for each in others) if others else ""
    lines = first.lines()[1:] if not others else [line for each in failed for line in each.lines()]
    return first.host, first.reason + nor, "\n".join(line.strip() if not others else line for line in lines)


def error(results: Sequence[Result]) -> SyncError | None:
    """Return the error that says which hosts failed, and why; None if none did. Pure."""
    failed = [result for result in results if not result.ok and not result.cancelled]
    unfinished = [result for result in results if result.cancelled]
    if not failed:
        return SyncError(INTERRUPTED) if unfinished else None
    total = sum(len(result.names) or 1 for result in results)
    lines = ["the files did not reach %d of %s" % (sum(len(r.names) or 1 for r in failed), count(total, "host"))]
    for result in failed:
        lines += result.lines()
    if unfinished:
        lines.append("not finished: %s" % ", ".join(result.host for result in unfinished))
    return SyncError("\n".join(lines))
