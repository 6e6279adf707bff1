"""Where a terminal stood in a job's output, so that `distrun attach` goes on there.

It is kept in the user's state folder, not in the job's: `terminals/JOB.KEY`, a number, where KEY stands for the
terminal and the session that runs in it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from distrun_runtime.contract import process

_KEPT_S = 7 * 24 * 3600.0
"""What is older is removed: its terminal is hardly there any more."""


class OutputPlace:
    """The place of this terminal in a job's output. Without a terminal there is none. Errors are ignored."""

    def __init__(self, root: Path, job: str) -> None:
        """`root`: the user's state folder."""
        self._folder = root / "terminals"
        key = _terminal()
        self._path = self._folder / f"{job}.{key}" if key else None

    def read(self) -> int | None:
        """Return the cursor at which this terminal left the job; None: it was not here."""
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError):
                return int(self._path.read_text("ascii"))
        return None

    def write(self, cursor: int) -> None:
        """Remember a cursor, and forget what is old."""
        if self._path is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._path.write_text(str(cursor), "ascii")
            for path in self._folder.iterdir():
                if path.stat().st_mtime < time.time() - _KEPT_S:
                    path.unlink()

    def forget(self) -> None:
        """Forget it: the job is over."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()


def _terminal() -> str:
    """Return what tells this terminal, as it is used now, from others; empty: there is none."""
    import hashlib  # not for every launch: OpenSSL takes a while

    for fd in (0, 2, 1):
        with contextlib.suppress(OSError):
            name = os.ttyname(fd)
            session = os.getsid(0)
            start = ""
            with contextlib.suppress(OSError):
                start = process.identity(session).start
            return hashlib.sha256(f"{name} {session} {start}".encode()).hexdigest()[:16]
    return ""
