"""Files that are kept but can be made again, in `$XDG_CACHE_HOME/distrun/KIND`, or below ~/.cache.

    runtime/            the bundled runtime (`agent.cache`)
    agent/, launcher/   what the launcher sends and makes (`distrun/backends/`)
    cubins/             programs compiled for GPUs (`arrays.cupy_driver`)

Only folders that belong to this user and that only this user can write to are used. If others can write to a folder of
this user, its mode is corrected: they cannot have put files of this user there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Mapping, Optional

from distrun_runtime.contract import environ


def base(env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of everything that is kept; `env` None: of this process."""
    named = environ.text("XDG_CACHE_HOME", env)
    cache = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "distrun")


def folder(kind: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of one kind, if it is there and this user's alone.

    Raises:
        OSError: it is not.
    """
    top = base(env)
    for each in (top, os.path.join(top, kind)):
        _mend(each)
    return os.path.join(top, kind)


def make(kind: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of one kind, made where it is missing.

    Raises:
        OSError: it cannot be made, or is not this user's.
    """
    top = base(env)
    os.makedirs(os.path.dirname(top), mode=0o700, exist_ok=True)
    for each in (top, os.path.join(top, kind)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
    return folder(kind, env)


def is_private(path: str) -> bool:
    """Whether it is a folder to which only this user may write. Raises OSError."""
    info = os.lstat(path)
    return _is_ours(info) and not info.st_mode & 0o022


def _is_ours(info: os.stat_result) -> bool:
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()


def _mend(path: str) -> None:
    """Let only this user write to a folder. Raises OSError: it is no folder, or not this user's."""
    info = os.lstat(path)
    if not _is_ours(info):
        raise OSError(f"{path} is not a folder that only this user can write")
    if info.st_mode & 0o022:
        os.chmod(path, stat.S_IMODE(info.st_mode) & ~0o022)


# Files that can be made again: written whole or not at all, and believed only if they are whole and this user's own.
#
# A file begins with a digest of its name and its content. One that is damaged, bears another's name, or that others may
# write to, is removed when it is read. The folder is the caller's affair: `folder` above.


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
