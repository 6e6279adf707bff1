"""Hands output on from a thread of its own, so that a slow reader keeps nobody from hearing the hosts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

ROOM = 8 * 1024 * 1024
"""Bytes that may wait for the reader before no more is asked for; agents keep the rest on their disks."""

OnOutput = Callable[[str, str, bytes], None]


class Relay:
    """A queue and the thread that calls `on_output` for each piece, in order."""

    def __init__(self, on_output: OnOutput, on_room: Callable[[], None]) -> None:
        """`on_room` is called, by the thread, when there is room again."""
        self._on_output = on_output
        self._on_room = on_room
        self._pieces: queue.SimpleQueue[tuple[str, str, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    @property
    def has_room(self) -> bool:
        """Whether more may be asked for."""
        with self._lock:
            return self._waiting < ROOM

    def put(self, host: str, stream: str, data: bytes) -> None:
        """Queue a piece; never waits."""
        with self._lock:
            self._waiting += len(data)
        self._pieces.put((host, stream, data))

    def join(self) -> None:
        """Wait until all is handed on, as long as the reader takes; raise what `on_output` raised."""
        self._pieces.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            piece = self._pieces.get()
            if piece is None:
                return
            if self._error is None:
                try:
                    self._on_output(*piece)
                except Exception as err:  # the caller's: it is raised where the caller is
                    self._error = err
            with self._lock:
                was_full = self._waiting >= ROOM
                self._waiting -= len(piece[2])
                has_room = self._waiting < ROOM
            if was_full and has_room:
                self._on_room()
