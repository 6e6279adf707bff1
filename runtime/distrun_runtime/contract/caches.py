"""The folders of what is kept but can be made again: `$XDG_CACHE_HOME/distrun/KIND`, or below ~/.cache.

    runtime/            the bundled runtime (`agent.cache`)
    agent/, launcher/   what the launcher sends and makes (`distrun/backends/`)
    cubins/             programs compiled for GPUs (`arrays.cubins`)

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
