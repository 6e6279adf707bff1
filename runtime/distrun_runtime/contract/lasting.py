"""The folder of this user's jobs that a logout leaves alone, `/var/tmp/distrun-UID`, and the control sockets in it.

Clients find the coordinator of a job at `ID.s` there. The job's own folder would not do: its path may be longer than a
socket's may be, or be on NFS. The folder is this user's alone: mode 0700, no link. If another user has made a folder of
that name, ours has a random suffix.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import time
from typing import Iterator, List, Optional

from distrun_runtime.errors import ContractError

SOCKET_SUFFIX = ".s"
LOCK_S = 5.0
"""How long another process's judgement of the folder's sockets is awaited; it needs milliseconds."""


def root() -> str:
    """Return the folder's name. It survives a logout, other than $XDG_RUNTIME_DIR."""
    return f"/var/tmp/distrun-{os.geteuid()}"


def owned(path: str) -> List[str]:
    """Return where a folder of this user's in a folder that all users share may be.

    It is `path`, unless that is another user's, or what `own` made in place of it.
    """
    found = [] if _owner(path) not in (None, os.geteuid()) else [path]
    parent, name = os.path.split(path)
    with contextlib.suppress(OSError):
        others = (os.path.join(parent, each) for each in sorted(os.listdir(parent)) if each.startswith(name + "-"))
        found += [each for each in others if _owner(each) == os.geteuid()]
    return found


def own(path: str) -> str:
    """Return the first of `owned`. If `path` is another user's, one is made with a random suffix. Raises OSError."""
    found = owned(path)
    if found:
        return found[0]
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


def make_private(folder: str) -> None:
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
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise ContractError(f"{folder} is not a directory; remove it")
    if found.st_uid != os.geteuid():
        raise ContractError(f"{folder} belongs to user {found.st_uid}, expected {os.geteuid()}; have it removed")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ContractError(f"{folder} has mode {stat.S_IMODE(found.st_mode):04o}; fix: chmod 700 {folder}")


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
    if folder not in owned(root()) or not path.endswith(SOCKET_SUFFIX) or not os.path.lexists(path):
        return
    with contextlib.suppress(OSError, ContractError):
        make_private(folder)
        with locked(folder):
            unlink_dead(path)
