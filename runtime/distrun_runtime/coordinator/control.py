"""The control socket of a job: `/var/tmp/distrun-UID/ID.s`, where clients find the coordinator.

The job's own folder would not do: its path may be longer than a socket's may be, or be on NFS. The folder of the
sockets is this user's alone (mode 0700, no link), and only this user and root are let in, by what the kernel says of
the other end.

The socket of a coordinator that died is replaced by the next job of that id, and removed by any later coordinator. The
socket of one that lives never is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import sys
import time
from typing import Iterator, List, Optional, Tuple

from distrun_runtime.errors import ContractError

SUFFIX = ".s"
BACKLOG = 64
STALE_LIMIT = 64
"""Sockets of dead coordinators that one coordinator removes."""
PAUSE_S = 0.05
"""Without a descriptor for a client that waits, it is looked so often whether there is one."""
LOCK_S = 5.0
"""How long another coordinator's judgement of the folder is awaited; it needs milliseconds."""
_UCRED = struct.Struct("3i")
"""Linux: pid, uid, gid."""
_XUCRED = struct.Struct("2I")
"""macOS, the beginning of `struct xucred`: version, uid."""
_XUCRED_SIZE = 76
_LOCAL_PEERCRED = 1
_SOL_LOCAL = 0


def default_folder() -> str:
    """Return where the sockets of this user's jobs are. It survives a logout, other than $XDG_RUNTIME_DIR."""
    return f"/var/tmp/distrun-{os.geteuid()}"


class ControlSocket:
    """The listening socket of one job.

    Raises:
        ContractError: the folder is not this user's alone.
        OSError: it cannot be made.
    """

    def __init__(self, job: str, folder: str = "") -> None:
        self._folder = folder or default_folder()
        make_private(self._folder)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _locked(self._folder):  # until it listens, it looks like that of a dead one
                _remove_stale(self._folder)
                self.path = self._bind(job)
                os.chmod(self.path, 0o600)
                self.socket.listen(BACKLOG)
            found = os.lstat(self.path)
            self._inode = (found.st_dev, found.st_ino)
            self.socket.setblocking(False)
        except BaseException:
            self.socket.close()
            raise

    def _bind(self, job: str) -> str:
        """Bind to a name of this job; another job of that id, of another store, may live."""
        for name in (job, f"{job}.{os.getpid()}"):
            path = os.path.join(self._folder, name + SUFFIX)
            try:
                self.socket.bind(path)
                return path
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
            if not is_live(path):
                os.unlink(path)
                self.socket.bind(path)
                return path
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)

    def accept(self) -> Tuple[Optional[socket.socket], str]:
        """Return the next client that waits, or None and why: empty if none waits, else whom it was refused to."""
        try:
            connection, _ = self.socket.accept()
        except OSError as err:  # none waits, or it has gone
            if err.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE_S)  # it waits until there is a descriptor
            return None, ""
        uid = peer_uid(connection)
        if uid not in (0, os.geteuid()):
            connection.close()
            return None, f"a client of user {uid} was refused"
        connection.setblocking(False)
        return connection, ""

    def close(self) -> None:
        """Remove the socket, if it is still this one."""
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)
        self.socket.close()


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


def is_live(path: str) -> bool:
    """Return whether somebody listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full, or it is not ours to ask
            return True
    return True


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
def _locked(folder: str) -> Iterator[None]:
    """Let no other coordinator judge or make sockets meanwhile: both could take the same dead one's place."""
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


def _remove_stale(folder: str) -> None:
    """Remove sockets of dead coordinators, so that they do not pile up."""
    for name in _names(folder)[:STALE_LIMIT]:
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not is_live(path):
                os.unlink(path)


def remove_stale(path: str) -> None:
    """Remove the socket of a job if its coordinator is dead. Errors are ignored."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError, ContractError):
        if folder != default_folder() or not path.endswith(SUFFIX):
            return
        make_private(folder)
        with _locked(folder):
            if stat.S_ISSOCK(os.lstat(path).st_mode) and not is_live(path):
                os.unlink(path)


def _names(folder: str) -> List[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(SUFFIX))
    except OSError:
        return []
