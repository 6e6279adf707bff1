"""Where the output of tasks and the coordinator's own messages go, and how much of it may wait for a slow reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Callable, Deque, List, Mapping, Optional, Protocol

from distrun_runtime.contract.dataclass import dataclass

if TYPE_CHECKING:
    from distrun_runtime.coordinator.messages import Event

QUEUE_LIMIT = 8 * 1024 * 1024
"""Bytes of output that wait in memory for one reader. Past it, only their places in the log files are kept."""
UNLOGGED_LIMIT = 64 * 1024 * 1024
"""The same for output that is in no log file (disk full). What comes then is counted and dropped."""


class Sink(Protocol):
    """Called by the loop's thread only, and must never make it wait."""

    def output(self, task: str, host: str, stream: str, data: bytes, at: Optional[int]) -> None:
        """Take bytes that a task wrote to `stream` ("out" or "err").

        They begin at byte `at` of the task's log file (`JobFolder.log_path(task)`), so that a full printer may
        remember the place instead of the bytes; None: they did not get there (disk full).
        """

    def say(self, text: str, level: str) -> None:
        """Take one message of distrun's own. `level`: debug, info, warning or error; the sink filters."""

    def toggle_pause(self) -> None:
        """Ctrl-Z was pressed: stop printing, or go on."""


class Watcher(Protocol):
    """Is told what happens to a job. Called by the loop's thread only, and must never make it wait."""

    def opened(self, put: Callable[[Event], None]) -> None:
        """Take note that the job's loop begins, and how any thread has it handle an event."""

    def event(self, value: Mapping[str, Any]) -> None:
        """Take what is a line of events.jsonl."""

    def state(self, value: Mapping[str, Any]) -> None:
        """Take the job's new state: what state.json holds."""

    def stack(self, number: int, members: Mapping[str, Any]) -> None:
        """Take an answer to the question `number` (`events.StackWanted`), as `control.stack` has it."""

    def metrics(self, value: Mapping[str, Any]) -> None:
        """Take a snapshot of the job's numbers, as was asked for by `events.MetricsWanted`."""


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
