"""What takes long to make and is the same until a source changes: kept in the user's cache, never needed.

Files are named by what they were made from and are read only from a folder that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from distrun_runtime.contract import environ

COPIES = 4
"""So many files of a kind stay: a user may have several versions of distrun."""


def folder() -> Path:
    """Return where things are kept: `$XDG_CACHE_HOME/distrun/launcher`, ~/.cache without that variable."""
    named = environ.text("XDG_CACHE_HOME")
    home = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "distrun" / "launcher"


def kept(name: str, suffix: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned when it was last called for this `name`, or call it.

    Args:
        name: a digest of everything that `make` depends on.
        suffix: of which kind it is; COPIES files of a kind stay.
        make: never returns nothing.
    """
    place = folder()
    path = place / (name + suffix)
    with contextlib.suppress(OSError):
        if _is_private(place) and _is_private(path):
            data = path.read_bytes()
            if data:
                return data
    data = make()
    with contextlib.suppress(OSError):  # a full or read-only disk: it is made again next time
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        if _is_private(place):
            _write(path, data)
            _thin_out(place, suffix)
    return data


def _is_private(path: Path) -> bool:
    found = path.lstat()
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, data: bytes) -> None:
    fd, fresh = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(data)
        os.replace(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise


def _thin_out(place: Path, suffix: str) -> None:
    found = sorted(place.glob("*" + suffix), key=lambda path: path.stat().st_mtime)
    for path in found[:-COPIES]:
        path.unlink()
