"""A client of a coordinator's service, as a test: it reads when it is told to."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from slowness import scaled

from distrun_runtime.contract import session

LIMIT_S = scaled(20.0)


class ServiceClient:
    """The other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.settimeout(LIMIT_S)
        self._decoder = session.Decoder()
        self._frames: list[session.Frame] = []

    def send(self, kind: str, body: bytes = b"", **members: Any) -> None:
        self.socket.sendall(session.encode({"type": kind, **members}, body))

    def next(self) -> session.Frame:
        """Return the next frame; fail if none comes."""
        while not self._frames:
            data = self.socket.recv(65536)
            assert data, "the connection has ended"
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def rest(self) -> list[session.Frame]:
        """Return all frames until the end of the connection."""
        with contextlib.suppress(ConnectionError):
            while data := self.socket.recv(65536):
                self._frames += self._decoder.feed(data)
        found, self._frames = self._frames, []
        return found

    def ask(self, kind: str, **members: Any) -> session.Frame:
        self.send(kind, **members)
        return self.next()
