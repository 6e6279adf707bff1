"""A job's output for one client of its coordinator: read from the logs, as frames."""

from __future__ import annotations

from typing import Dict, List

from distrun_runtime.contract import control
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.logreader import READ_LIMIT, LogReader

TAIL_LIMIT = 64 * 1024 * 1024
"""Lines before the end are looked for in so many bytes: meanwhile other clients wait."""


class LoggedOutput:
    """An `OutputReader` of `service`, over `LogReader`. Raises JobStoreError (an OSError) where logs cannot be read."""

    def __init__(self, folder: JobFolder, wanted: control.OutputWanted) -> None:
        self._folder = folder
        self._hosts: Dict[str, str] = {}
        """By task; read when there is output: a job that waits in a queue has no plan yet."""
        self._reader = LogReader(folder.logs)
        try:
            self.cursor = begin(self._reader, wanted)
        except BaseException:
            self._reader.close()
            raise

    def read(self, limit: int) -> bytes:
        """Return frames with about `limit` bytes of output; empty: there is nothing new now."""
        found = self._reader.read(self.cursor, limit)
        while not found.pieces and not found.gap and found.cursor != self.cursor:
            self.cursor = found.cursor
            found = self._reader.read(self.cursor, limit)
        frames = [control.gap(found.gap, found.cursor)] if found.gap else []
        if found.pieces and not self._hosts:
            self._hosts = {task.name: task.host for task in self._folder.plan().tasks}
        ends = [piece.cursor for piece in found.pieces[1:]] + [found.cursor]
        for piece, end in zip(found.pieces, ends):
            host = self._hosts.get(piece.task, "")
            chunk = control.Chunk(piece.task, host, piece.stream, piece.at, len(piece.data), piece.data, end)
            frames.append(control.output(chunk))
        self.cursor = found.cursor
        return b"".join(frames)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


def begin(reader: LogReader, wanted: control.OutputWanted) -> int:
    """Return the cursor at which a client's output begins."""
    if wanted.cursor is not None:
        return max(reader.begin(), min(wanted.cursor, reader.end()))
    return reader.end() if wanted.tail is None else _lines_back(reader, wanted.tail)


def _lines_back(reader: LogReader, lines: int) -> int:
    """Return a cursor with `lines` lines after it, or so, but no further back than TAIL_LIMIT."""
    stop, left = reader.end(), lines + 1  # the newline before the first of these lines
    first = reader.cursor_back(TAIL_LIMIT)
    while stop > first:
        start = max(first, stop - READ_LIMIT)
        ends: List[int] = []
        cursor = start
        while cursor < stop:
            found = reader.read(cursor, stop - cursor)
            if found.cursor == cursor:
                break
            for piece in found.pieces:
                at = -1
                while (at := piece.data.find(b"\n", at + 1)) >= 0:
                    ends.append(piece.cursor + at + 1)
            cursor = found.cursor
        if len(ends) >= left:
            return ends[-left]
        left -= len(ends)
        stop = start
    return stop
