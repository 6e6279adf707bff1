"""The control socket of a job, where clients find the coordinator (`contract.private` says where it is).

Only this user and root are let in, by what the kernel says of the other end.

The socket of a coordinator that died is replaced by the next job of that id, and removed by any later coordinator. The
socket of one that lives never is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from typing import List, Optional, Tuple

from distrun_runtime.contract import private

BACKLOG = 64
STALE_LIMIT = 64
"""Sockets of dead coordinators that one coordinator removes."""
PAUSE_S = 0.05
"""Without a descriptor for a client that waits, it is looked so often whether there is one."""
_UCRED = struct.Struct("3i")
"""Linux: pid, uid, gid."""
_XUCRED = struct.Struct("2I")
"""macOS, the beginning of `struct xucred`: version, uid."""
_XUCRED_SIZE = 76
_LOCAL_PEERCRED = 1
_SOL_LOCAL = 0


class ControlSocket:
    """The listening socket of one job.

    Raises:
        ContractError: the folder is not this user's alone.
        OSError: it cannot be made.
    """

    def __init__(self, job: str, folder: str = "") -> None:
        self._folder = folder or private.own(private.lasting_root())
        private.make_lasting(self._folder)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with private.locked(self._folder):  # until it listens, it looks like that of a dead one
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
            path = private.socket_path(name, self._folder)
            try:
                self.socket.bind(path)
                return path
            except OSError as err:
                if err.errno != errno.EADDRINUSE:
                    raise
            if not private.is_live(path):
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


def _remove_stale(folder: str) -> None:
    """Remove sockets of dead coordinators, so that they do not pile up."""
    for name in _names(folder)[:STALE_LIMIT]:
        private.unlink_dead(os.path.join(folder, name))


def _names(folder: str) -> List[str]:
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(private.SOCKET_SUFFIX))
    except OSError:
        return []
