"""The clock of the machine that keeps a folder's files.

On a shared file system a file's time is the server's, and the clock of this machine may be hours away from it. Ages of
files are measured with the server's own clock: by the time of a file that was just touched.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Dict, Tuple

KEPT_S = 60.0
"""How long the difference of two clocks is believed."""

_known: Dict[int, Tuple[float, float]] = {}
"""By device: when it was measured (monotonic), and how far the server's clock is ahead of the monotonic one."""


def now(folder: Path) -> float:
    """Return the present time by the clock that the files of `folder` get their times from, in seconds since 1970.

    Where nothing can be written, this machine's clock has to do.
    """
    here = time.monotonic()
    try:
        device = os.stat(str(folder)).st_dev
        measured, ahead = _known.get(device, (-KEPT_S, 0.0))
        if here - measured >= KEPT_S:
            ahead = _touched(folder) - time.monotonic()
            _known[device] = here, ahead
    except OSError:
        return time.time()
    return time.monotonic() + ahead


def _touched(folder: Path) -> float:
    """Return the time of a file that is made in the folder for this. Raises OSError."""
    path = str(folder / (".clock.%s.%d" % (socket.gethostname(), os.getpid())))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        os.utime(path)  # no time is sent along, so the server takes its own
        return os.stat(path).st_mtime
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
