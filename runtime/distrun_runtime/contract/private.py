"""Folders that are this user's alone, and what is kept in them: the cache, and the control sockets of jobs.

The cache is `$XDG_CACHE_HOME/distrun/KIND`, or below ~/.cache. Its files can be made again:

    runtime/            the bundled runtime (`agent.cache`)
    agent/, launcher/   what the launcher sends and makes (`distrun/shipping.py`)
    cubins/             programs compiled for GPUs (`arrays.cupy_driver`)
    data/               blocks of objects of object stores (`data.remote`)

Only folders of it that belong to this user and that only this user can write to are used. If others can write to a
folder of this user, its mode is corrected: they cannot have put files of this user there.

`/var/tmp/distrun-UID` is left alone by a logout. Clients find the coordinator of a job at `ID.s` there. The job's own
folder would not do: its path may be longer than a socket's may be, or be on NFS. The folder is this user's alone: mode
0700, no link. If another user has made a folder of that name, ours has a random suffix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from typing import Callable, Iterator, Mapping, Optional

from distrun_runtime.contract import environ
from distrun_runtime.errors import ContractError

SOCKET_SUFFIX = ".s"
LOCK_S = 5.0
"""How long another process's judgement of the folder's sockets is awaited; it needs milliseconds."""
_UCRED = struct.Struct("3i")
"""Linux: pid, uid, gid."""
_XUCRED = struct.Struct("2I")
"""macOS, the beginning of `struct xucred`: version, uid."""
_XUCRED_SIZE = 76
_LOCAL_PEERCRED = 1
_SOL_LOCAL = 0
FRESH = ".new-"
"""How the name of a file in the cache begins that is not whole yet."""
HEAD_BYTES = 65
"""What a file in the cache has before its content: a digest and the end of a line."""


def is_ours(info: os.stat_result, kind: Callable[[int], bool] = stat.S_ISDIR, rights: int = 0o022) -> bool:
    """Return whether this is a folder (or of another `kind`) of this user's on which others have none of `rights`."""
    return kind(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & rights


def check(folder: str, closes: bool = False) -> None:
    """Check that a folder is this user's alone. `closes`: rights that others have on it are taken, not refused.

    Raises:
        ContractError: another user could have made it, or others have rights on it.
        OSError: it is not there.
    """
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode):
        raise ContractError(f"{folder} is not a folder (a link?); remove it")
    if info.st_uid != os.geteuid():
        raise ContractError(f"{folder} belongs to user {info.st_uid}, expected {os.geteuid()}; have it removed")
    if not is_ours(info, rights=0o077):
        if not closes:
            raise ContractError(f"{folder} has mode {stat.S_IMODE(info.st_mode):04o}; fix: chmod 700 {folder}")
        os.chmod(folder, 0o700)


# The cache


def cache_root(env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of everything that is kept; `env` None: of this process."""
    named = environ.text("XDG_CACHE_HOME", env)
    cache = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "distrun")


def cache_folder(kind: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of one kind, if it is there and this user's; then only this user can write to it.

    Raises:
        OSError: it is no folder, or not this user's.
    """
    top = cache_root(env)
    for each in (top, os.path.join(top, kind)):
        info = os.lstat(each)
        if not is_ours(info, rights=0):
            raise OSError(f"{each} is no folder, or not this user's")
        if not is_ours(info):  # others can write to it
            os.chmod(each, stat.S_IMODE(info.st_mode) & ~0o022)
    return os.path.join(top, kind)


def make_cache(kind: str, env: Optional[Mapping[str, str]] = None) -> str:
    """Return the folder of one kind, made where it is missing.

    Raises:
        OSError: it cannot be made, or is not this user's.
    """
    top = cache_root(env)
    os.makedirs(os.path.dirname(top), mode=0o700, exist_ok=True)
    for each in (top, os.path.join(top, kind)):
        with contextlib.suppress(FileExistsError):
            os.mkdir(each, 0o700)
    return cache_folder(kind, env)


# Files that can be made again: written whole or not at all, and believed only if they are whole and this user's own.
#
# A file begins with a digest of its name and its content. One that is damaged, bears another's name, or that others may
# write to, is removed when it is read. The folder is the caller's affair: `cache_folder` above.


def read_cached(path: str) -> bytes:
    """Return a file's content; nothing if it cannot be believed: it is removed then.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    if is_ours(os.lstat(path), stat.S_ISREG):
        with open(path, "rb") as file:
            digest, _, data = file.read().partition(b"\n")
        if data and digest == _digest(path, data):
            return data
    os.unlink(path)
    return b""


def write_cached(path: str, data: bytes, rename: Callable[[str, str], None] = os.replace) -> None:
    """Write a file, for which others may be doing the same. Raises OSError.

    Arguments:
        rename: gives the whole file its name, or raises.
    """
    import tempfile  # where nothing was kept

    handle, fresh = tempfile.mkstemp(prefix=FRESH, dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.write(_digest(path, data) + b"\n" + data)
        rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def _digest(path: str, data: bytes) -> bytes:
    """Return what tells whether a file is whole, and what its name says."""
    import hashlib

    return hashlib.sha256(os.fsencode(os.path.basename(path)) + b"\0" + data).hexdigest().encode("ascii")


# The folder that a logout leaves alone, and the control sockets in it


def lasting_root() -> str:
    """Return the folder's name. It survives a logout, other than $XDG_RUNTIME_DIR."""
    return f"/var/tmp/distrun-{os.geteuid()}"


def owned(path: str) -> Iterator[str]:
    """Give where a folder of this user's in a folder that all users share may be.

    It is `path`, unless that is another user's, or what `own` made in place of it.
    """
    if _owner(path) in (None, os.geteuid()):
        yield path
    parent, name = os.path.split(path)
    with contextlib.suppress(OSError):
        for each in sorted(os.listdir(parent)):
            if each.startswith(name + "-") and _owner(os.path.join(parent, each)) == os.geteuid():
                yield os.path.join(parent, each)


def own(path: str) -> str:
    """Return the first of `owned`. If `path` is another user's, one is made with a random suffix. Raises OSError."""
    for found in owned(path):
        return found
    import tempfile  # another user keeps us from our folder

    return tempfile.mkdtemp(prefix=os.path.basename(path) + "-", dir=os.path.dirname(path))


def _owner(path: str) -> Optional[int]:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def socket_path(name: str, folder: str) -> str:
    """Return the path of a control socket. `name`: the job's id, unless another store's job of that id has it."""
    return os.path.join(folder, name + SOCKET_SUFFIX)


def make_lasting(folder: str) -> None:
    """Make the folder of the sockets, or check the one that is there.

    Raises:
        ContractError: it is a link, or others may write into it or replace it.
        OSError: it cannot be made.
    """
    parent = os.path.dirname(folder)
    found = os.stat(parent)
    is_shared = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if found.st_uid not in (0, os.geteuid()) or (is_shared and not found.st_mode & stat.S_ISVTX):
        raise ContractError(f"{parent} is not safe: others could replace {folder}; on that machine: chmod +t {parent}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    check(folder)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Let no other process judge or make sockets meanwhile: both could take the same dead one's place."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    until = time.monotonic() + LOCK_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it ends with its holder
                break
            except BlockingIOError:
                if time.monotonic() >= until:  # the holder is stopped: better a small risk than no job
                    break
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def is_live(path: str) -> bool:
    """Return whether a process listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full, or it is not ours to ask
            return True
    return True


def unlink_dead(path: str) -> None:
    """Remove a socket at which no process listens. Only while the folder is `locked`. Errors are ignored."""
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not is_live(path):
            os.unlink(path)


def remove_dead(path: str) -> None:
    """Remove the control socket of a job if its coordinator is dead. Errors are ignored."""
    folder = os.path.dirname(path)
    if folder not in owned(lasting_root()) or not path.endswith(SOCKET_SUFFIX) or not os.path.lexists(path):
        return
    with contextlib.suppress(OSError, ContractError):
        make_lasting(folder)
        with locked(folder):
            unlink_dead(path)


# Who is at the other end of a socket


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket, -1 if the system does not tell."""
    try:
        if hasattr(socket, "SO_PEERCRED"):
            data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            return int(_UCRED.unpack(data)[1])
        if sys.platform == "darwin":
            data = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_SIZE)
            return int(_XUCRED.unpack_from(data)[1])
    except (OSError, struct.error):
        pass
    return -1
