"""The clients of a job's coordinator: what waits for each of them, and the control socket by which they come.

`contract.private` says where the socket is. Only this user and root are let in, by what the kernel says of the other
end. The socket of a coordinator that died is replaced by the next job of that id, and removed by any later coordinator.
The socket of one that lives never is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Callable, Deque, List, Optional, Tuple

from distrun_runtime.contract import private
from distrun_runtime.contract.dataclass import dataclass

if TYPE_CHECKING:
    from distrun_runtime.coordinator.logreader import LoggedOutput  # most jobs have one client, which needs it not

QUEUE_LIMIT = 8 * 1024 * 1024
"""Bytes of output that wait in memory for one reader. Past it, only their places in the log files are kept."""
UNLOGGED_LIMIT = 64 * 1024 * 1024
"""The same for output that is in no log file (disk full). What comes then is counted and dropped."""
MAIL_LIMIT = 1024 * 1024
"""Bytes of events and messages that wait for one client."""


@dataclass
class OutputPiece:
    """A piece of what is to be shown: output of a task, as bytes or as a place in its log file, or other bytes."""

    data: bytes = b""
    task: str = ""
    """Empty: the bytes are no task's, and are never dropped."""
    host: str = ""
    stream: str = ""
    at: Optional[int] = None
    """Where the output begins in the log file; None: it is not there."""
    length: int = 0

    @property
    def is_place(self) -> bool:
        """Whether the bytes are only in the log file."""
        return bool(self.task) and not self.data and self.at is not None


class Backlog:
    """Pieces that wait for a reader, in a bounded amount of memory.

    A slow reader neither delays a job nor loses output: what does not fit is read from the log file later.

    Not locked: the caller holds a lock of its own.
    """

    def __init__(self) -> None:
        self.skipped = 0
        """Bytes that were dropped."""
        self._pieces: Deque[OutputPiece] = deque()
        self._size = 0
        self._length = 0
        """Bytes of output that the pieces stand for."""

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, piece: OutputPiece) -> None:
        """Add a piece, or only its place in the log file, or nothing."""
        size = len(piece.data)
        if piece.task and self._size + size > QUEUE_LIMIT:
            if piece.at is None:
                if self._size + size > UNLOGGED_LIMIT:
                    self.skipped += size
                    return
            elif self._extends_last(piece):
                self._length += piece.length
                return
            else:
                piece.data, size = b"", 0
        self._pieces.append(piece)
        self._size += size
        self._length += _length(piece)

    def take(self) -> Optional[OutputPiece]:
        """Return the piece that has waited longest; None: there is none."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._size -= len(piece.data)
        self._length -= _length(piece)
        return piece

    def drop(self, keep: int) -> List[OutputPiece]:
        """Drop output of tasks, the oldest first, until at most `keep` bytes wait; return what was dropped."""
        dropped: List[OutputPiece] = []
        others: List[OutputPiece] = []
        while self._length > keep:
            piece = self._pieces.popleft()
            self._size -= len(piece.data)
            self._length -= _length(piece)
            (dropped if piece.task else others).append(piece)
        self._size += sum(len(piece.data) for piece in others)
        self._pieces.extendleft(reversed(others))
        return dropped

    def _extends_last(self, piece: OutputPiece) -> bool:
        last = self._pieces[-1] if self._pieces else None
        if (
            last is None
            or not last.is_place
            or piece.at != (last.at or 0) + last.length
            or (last.task, last.stream) != (piece.task, piece.stream)
        ):
            return False
        last.length += piece.length
        return True


def _length(piece: OutputPiece) -> int:
    """Return for how many bytes of a task's output a piece stands."""
    return piece.length if piece.task else 0


def encoded(text: str) -> bytes:
    """Return the bytes that a word stood for (os.fsdecode made surrogates of what is not UTF-8)."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # other surrogates stand for no bytes
        return text.encode("utf-8", "backslashreplace")


class Client:
    """One client: what it said, and what waits for it."""

    def __init__(self, connection: socket.socket, is_launcher: bool) -> None:
        # With the messages of clients: commands import this module for what they print.
        from distrun_runtime.contract import control, session

        self.socket = connection
        self.is_launcher = is_launcher
        self.conversation = control.Conversation(is_launcher)
        self.decoder = session.Decoder()
        self.since = time.monotonic()
        self.progress = self.since
        self.backlog = Backlog()
        """For the launching client: all that waits, in order."""
        self.replies: Deque[bytes] = deque()
        self.mail: Deque[bytes] = deque()
        self.mail_size = 0
        self.missed = 0
        """Events and messages that were left out."""
        self.wants = control.Subscribe()
        self.has_subscribed = False
        self.reader: Optional[LoggedOutput] = None
        self.rest = memoryview(b"")
        """What is being sent."""
        self.is_waiting = False
        """It takes nothing more at the moment."""
        self.snapshot: Optional[Callable[[], bytes]] = None
        """What encodes the snapshot of the job's numbers that it got last."""
        self.may_read = False
        """There may be something new in the logs for it."""
        self.is_last = False
        """Nothing is added any more; when all is sent, the connection ends."""
        self.is_gone = False

    def reply(self, data: bytes) -> None:
        """Queue an answer, which is never left out."""
        if self.is_launcher:
            self.backlog.put(OutputPiece(data))
        else:
            self.replies.append(data)

    def post(self, data: bytes) -> None:
        """Queue an event or a message, or count it; for the launching client all wait."""
        if self.is_launcher:
            self.backlog.put(OutputPiece(data))
            return
        if self.missed or self.mail_size + len(data) > MAIL_LIMIT:
            self.missed += 1
            return
        self.mail.append(data)
        self.mail_size += len(data)

    @property
    def is_busy(self) -> bool:
        """Whether it has so much to take that it may not ask for more."""
        return sum(map(len, self.replies)) > MAIL_LIMIT


# The control socket.


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
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(folder) if name.endswith(private.SOCKET_SUFFIX))
        for name in names[:STALE_LIMIT]:
            private.unlink_dead(os.path.join(folder, name))
