"""Connections that carry the session of an agent for a while, as their two threads use them: one reads, one writes.

`Pipes` and `SocketConnection` are the coordinator's own; `distrun.ssh.link.Link` is another.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from typing import Callable, Optional, Protocol, Tuple, Type

READ_SIZE = 256 * 1024
CHECK_MS = 500
"""How long `read` and `write` wait at most."""


class Connection(Protocol):
    """Two-way bytes. `read` and `finish` are for one thread, `write` and `end_input` for another."""

    def read(self) -> Optional[bytes]:
        """Return what came, waiting at most about a second: empty at the end, None if nothing came.

        Raises:
            OSError, EOFError: it broke.
        """

    def write(self, data: bytes) -> int:
        """Write some of `data`, waiting at most about a second; return how many bytes went.

        Raises:
            OSError: it takes no more.
        """

    def end_input(self) -> None:
        """Let the other side see the end of its input. May be repeated."""

    def kill(self) -> None:
        """End it now. Any thread; does not wait. The other side sees the end of its input."""

    def finish(self) -> str:
        """Free everything, after the last `read`; return what else is known of its end, for a report."""


class Pipes:
    """A connection over two descriptors, ends of two pipes, which it owns.

    `explain` is called by `finish` and may wait a moment: exit code, last words on stderr.
    """

    def __init__(self, read_fd: int, write_fd: int, explain: Callable[[], str] = lambda: "") -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._explain = explain
        self._writing = threading.Lock()
        self._is_open = True
        self._is_killed = False
        os.set_blocking(write_fd, False)  # a full pipe must not keep `kill` from closing it

    def read(self) -> Optional[bytes]:
        """Return what came."""
        if not _is_ready(self._read_fd, select.POLLIN):
            return b"" if self._is_killed else None
        return os.read(self._read_fd, READ_SIZE)

    def write(self, data: bytes) -> int:
        """Write to the agent's input."""
        with self._writing:
            if self._is_killed or not self._is_open:
                raise BrokenPipeError("the connection is closed")
            try:
                return os.write(self._write_fd, data) if _is_ready(self._write_fd, select.POLLOUT) else 0
            except BlockingIOError:
                return 0

    def end_input(self) -> None:
        """Close the agent's input."""
        with self._writing:
            if self._is_open:
                self._is_open = False
                os.close(self._write_fd)

    def kill(self) -> None:
        """Have both threads end; the one that writes closes the agent's input."""
        self._is_killed = True

    def finish(self) -> str:
        """Close both descriptors."""
        self.end_input()
        os.close(self._read_fd)
        return self._explain()


class SocketConnection:
    """A connection over a socket, plain or TLS, which it owns and makes non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._using = threading.Lock()
        """One thread at a time may use a TLS connection. Nobody waits while it holds this."""
        self._is_killed = False
        self._waits: Tuple[Type[OSError], ...] = (BlockingIOError,)
        if hasattr(sock, "pending"):
            import ssl  # its caller has imported it

            self._waits = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def read(self) -> Optional[bytes]:
        """Return what came."""
        data = self._receive()
        if data is None and not self._is_killed and _is_ready(self._sock.fileno(), select.POLLIN):
            data = self._receive()
        return b"" if data is None and self._is_killed else data

    def write(self, data: bytes) -> int:
        """Write to the agent."""
        for _ in range(2):
            if self._is_killed:
                raise BrokenPipeError("the connection is closed")
            with self._using, contextlib.suppress(*self._waits):
                return self._sock.send(data)
            _is_ready(self._sock.fileno(), select.POLLOUT)
        return 0

    def end_input(self) -> None:
        """Shut the way to the agent."""
        self._shut(socket.SHUT_WR)

    def kill(self) -> None:
        """Shut both ways, which wakes both threads."""
        self._is_killed = True
        self._shut(socket.SHUT_RDWR)

    def finish(self) -> str:
        """Close the socket."""
        with self._using:
            self._sock.close()
        return ""

    def _shut(self, how: int) -> None:
        with contextlib.suppress(OSError):
            # That of a TLS socket would have the other thread go on without TLS.
            socket.socket.shutdown(self._sock, how)

    def _receive(self) -> Optional[bytes]:
        with self._using:
            try:
                return self._sock.recv(READ_SIZE)
            except self._waits:
                return None


def _is_ready(fd: int, what: int) -> bool:
    if fd < 0:
        return True  # closed: using it says so
    poll = select.poll()
    poll.register(fd, what)
    return bool(poll.poll(CHECK_MS))
