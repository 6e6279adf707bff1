"""The clients of a job's coordinator: what waits for each of them."""

from __future__ import annotations

import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Callable, Deque, List, Optional

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
    """Bytes of a task's output that it stands for; 0 if it is no task's."""

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
        self._length += piece.length

    def take(self) -> Optional[OutputPiece]:
        """Return the piece that has waited longest; None: there is none."""
        if not self._pieces:
            return None
        piece = self._pieces.popleft()
        self._size -= len(piece.data)
        self._length -= piece.length
        return piece

    def drop(self, keep: int) -> List[OutputPiece]:
        """Drop output of tasks, the oldest first, until at most `keep` bytes wait; return what was dropped."""
        dropped: List[OutputPiece] = []
        others: List[OutputPiece] = []
        while self._length > keep and (piece := self.take()) is not None:
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
    def is_full(self) -> bool:
        """Whether it has so much to take that it may not ask for more."""
        return sum(map(len, self.replies)) > MAIL_LIMIT
