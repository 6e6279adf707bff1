"""Keeps in the user's cache what takes long to make and is the same until a source changes. Nothing needs the cache.

Files are named by what they were made from, begin with a digest of name and content, and are read only from a folder
that nobody else can write to. What is damaged is removed and made again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from distrun_runtime.contract import caches

KIND = "launcher"
COPIES = 4
"""So many files of a kind stay: a user may have several versions of distrun."""


def kept(name: str, suffix: str, make: Callable[[], bytes]) -> bytes:
    """Return what `make` returned when it was last called for this `name`, or call it.

    Args:
        name: a digest of everything that `make` depends on.
        suffix: of which kind it is; COPIES files of a kind stay.
        make: never returns nothing.
    """
    file = name + suffix
    with contextlib.suppress(OSError):
        data = _read(Path(caches.folder(KIND)) / file)
        if data:
            return data
    data = make()
    with contextlib.suppress(OSError):  # a full or read-only disk: it is made again next time
        path = Path(caches.make(KIND)) / file
        _write(path, data)
        _thin_out(path.parent, suffix)
    return data


def _read(path: Path) -> bytes:
    """Return what was kept; nothing if it cannot be believed. It is removed then."""
    if _is_private(path):
        digest, _, data = path.read_bytes().partition(b"\n")
        if data and digest == _digest(path, data):
            return data
    path.unlink()
    return b""


def _digest(path: Path, data: bytes) -> bytes:
    """Return what tells whether a file is whole, and what its name says."""
    import hashlib

    return hashlib.sha256(os.fsencode(path.name) + b"\0" + data).hexdigest().encode("ascii")


def _is_private(path: Path) -> bool:
    found = path.lstat()
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(path: Path, data: bytes) -> None:
    import tempfile  # where nothing was kept

    fd, fresh = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            file.write(_digest(path, data) + b"\n" + data)
        os.replace(fresh, path)
    except OSError:
        os.unlink(fresh)
        raise


def _thin_out(place: Path, suffix: str) -> None:
    found = sorted(place.glob("*" + suffix), key=lambda path: path.stat().st_mtime)
    for path in found[:-COPIES]:
        path.unlink()
