"""Files that can be made again: written whole or not at all, and believed only if they are whole and this user's own.

A file begins with a digest of its name and its content. One that is damaged, bears another's name, or that others may
write to, is removed when it is read. The folder is the caller's affair: `contract.caches`.
"""

from __future__ import annotations

import contextlib
import os
import stat

FRESH = ".new-"
"""How the name of a file begins that is not whole yet."""


def read(path: str) -> bytes:
    """Return a file's content; nothing if it cannot be believed: it is removed then.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    if _is_private(path):
        with open(path, "rb") as file:
            digest, _, data = file.read().partition(b"\n")
        if data and digest == _digest(path, data):
            return data
    os.unlink(path)
    return b""


def write(path: str, data: bytes) -> None:
    """Write a file, for which others may be doing the same. Raises OSError."""
    import tempfile  # where nothing was kept

    handle, fresh = tempfile.mkstemp(prefix=FRESH, dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.write(_digest(path, data) + b"\n" + data)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def _digest(path: str, data: bytes) -> bytes:
    """Return what tells whether a file is whole, and what its name says."""
    import hashlib

    return hashlib.sha256(os.fsencode(os.path.basename(path)) + b"\0" + data).hexdigest().encode("ascii")


def _is_private(path: str) -> bool:
    found = os.lstat(path)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
