"""The agent's end of the session with its coordinator, over a connection that may be replaced. Nothing here waits."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Protocol

from distrun_runtime.contract import session
from distrun_runtime.contract.session import Session
from distrun_runtime.errors import WireError

if TYPE_CHECKING:
    import selectors
    import socket  # most agents have pipes, and say hello before it is imported

    from typing_extensions import Concatenate, ParamSpec  # typing has them since Python 3.10

    P = ParamSpec("P")

QUEUE_BYTES = 1024 * 1024
"""If more is queued, the output of tasks waits in its spool."""
HELD_BYTES = 8 * 1024 * 1024
"""The same for what the coordinator has not said to have."""
READ_BYTES = 256 * 1024


class Connection(Protocol):
    """A non-blocking byte stream to the coordinator, which has proved who it is."""

    reading: int
    """Descriptor that is readable when there is something to receive."""
    writing: int
    """Descriptor that is writable when something can be sent; may be the same."""

    def receive(self) -> Optional[bytes]:
        """Return all that is there and `reading` would not show again; empty at the end, None if nothing is there.

        Raises:
            OSError: it broke.
        """

    def send(self, data: memoryview) -> int:
        """Send some of `data`; return how many bytes went, 0 if it takes nothing now.

        Raises:
            OSError: it broke.
        """

    def close(self) -> None:
        """Free its descriptors."""


class Reconnector(Protocol):
    """How the agent of a plan with `on_eof: hold` gets another connection when one has ended."""

    @property
    def next_at(self) -> float:
        """When `tick` has something to do (monotonic clock); infinite: never."""

    def begin(self) -> None:
        """See to another connection: the last one has ended, or is silent. It may be called again before one comes."""

    def tick(self, now: float) -> None:
        """Do what is due."""

    def close(self) -> None:
        """Free everything; no connection is wanted any more."""


OnConnection = Callable[[Connection, bytes], None]
"""Takes a connection whose other end has proved who it is, and the bytes that were read ahead from it."""
MakeReconnector = Callable[["selectors.BaseSelector", OnConnection], Reconnector]
"""Makes a `Return`. That registers callbacks without arguments in the selector, and calls what it is given in one."""


class Descriptors:
    """A connection over two descriptors (pipes), which it owns and makes non-blocking."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading = reading
        self.writing = writing
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

    def receive(self) -> Optional[bytes]:
        """Return what is there."""
        try:
            return os.read(self.reading, READ_BYTES)
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        """Send some of `data`."""
        try:
            return os.write(self.writing, data)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        """Close both."""
        os.close(self.reading)
        os.close(self.writing)


class StreamSocket:
    """A connection over a socket, plain or TLS, which it owns and makes non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.reading = self.writing = sock.fileno()
        self._sock = sock
        self._waits: Any = BlockingIOError
        if hasattr(sock, "pending"):
            import ssl  # imported when this socket was made

            self._waits = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def receive(self) -> Optional[bytes]:
        """Return what is there; of a TLS socket all that was read ahead too, which `reading` does not show."""
        found = bytearray()
        try:
            while True:
                data = self._sock.recv(READ_BYTES)
                found += data
                if not data or (len(found) >= READ_BYTES and not self._pending()):
                    return bytes(found)
        except self._waits:
            return bytes(found) or None

    def send(self, data: memoryview) -> int:
        """Send some of `data`."""
        try:
            return self._sock.send(data)
        except self._waits:
            return 0

    def close(self) -> None:
        """Close it."""
        self._sock.close()

    def _pending(self) -> int:
        pending = getattr(self._sock, "pending", None)
        return pending() if pending is not None else 0


class Channel:
    """Carries the session over one connection after another."""

    def __init__(self, connection: Optional[Connection] = None) -> None:
        self.connection: Optional[Connection] = None
        """None between two connections."""
        self.is_over = False
        """The coordinator closed its end of the connection (or sent what is no frame): nothing will arrive there."""
        self.is_broken = False
        """Nothing can be sent any more on the connection."""
        self.fault = ""
        """Why the session cannot go on, if the connection was not simply closed."""
        self.written = 0
        """Bytes in the whole session."""
        self._session = Session()
        self._rest = memoryview(b"")
        if connection is not None:
            self.attach(connection)

    def attach(self, connection: Connection) -> None:
        """Go on over a connection. One that is still there is closed: no thread may wait for its descriptors."""
        self.cut()
        self.connection = connection
        self._session.connect()

    def cut(self) -> None:
        """Close the connection, if there is one. What was said is kept for the next."""
        if self.connection is not None:
            self.connection.close()
        self.connection = None
        self.is_over = self.is_broken = False
        self._rest = memoryview(b"")
        self._session.cut()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits to be written to the connection."""
        return self.connection is not None and not self.is_broken and bool(self._rest or self._session.is_ready)

    @property
    def is_acknowledged(self) -> bool:
        """Whether the coordinator has said that it has everything."""
        return self._session.is_acknowledged

    def takes_output(self) -> bool:
        """Return whether more output of tasks should be queued now."""
        session = self._session
        return session.unsent < QUEUE_BYTES and session.held < HELD_BYTES and not self.is_broken

    def takes_metrics(self) -> bool:
        """Return whether a frame of how things are now would leave soon, so that older ones do not pile up."""
        return self.connection is not None and not self.is_broken and not self.is_over and not self._session.is_behind

    def greet(self, line: bytes) -> None:
        """Queue the first line, which is no frame, before everything else."""
        self._rest = memoryview(line)

    def say(self, message: Callable[Concatenate[str, P], object], /, *none: P.args, **members: P.kwargs) -> None:
        """Have a message sent that `contract.agent_messages` declares. Its `host` is not: its reader knows it."""
        from distrun_runtime.contract.agent_messages import TYPES  # not before the hello

        assert not none, "members are named"
        header: Dict[str, Any] = dict(members, type=TYPES[message])
        self.send(header, header.pop("data", b""))

    def send(self, header: Dict[str, Any], body: bytes = b"") -> None:
        """Have a frame sent: one whose members no class declares, or before classes are imported."""
        try:
            self._session.say(header, body)
        except WireError as err:
            self.is_broken = True
            self.fault = str(err)

    def flush(self) -> None:
        """Write what can be written without waiting."""
        connection = self.connection
        while connection is not None and not self.is_broken:
            self._rest = self._rest or memoryview(self._session.next())
            if not self._rest:
                break
            try:
                written = connection.send(self._rest)
            except OSError:
                self.is_broken = True
                self._rest = memoryview(b"")
                break
            if not written:
                break
            self.written += written
            self._rest = self._rest[written:]
        if self.is_over:
            self._session.forget_sent()  # nothing will say that it came

    def feed(self, data: bytes) -> List[session.Frame]:
        """Return the frames that `data` completes; a stream that is not ours ends the channel."""
        try:
            return self._session.feed(data)
        except WireError as err:
            self.is_over = True
            self.fault = str(err)
            return []

    def receive(self) -> List[session.Frame]:
        """Return the frames that have arrived, without waiting."""
        try:
            data = self.connection.receive() if self.connection is not None else None
        except OSError:
            data = b""
        if data is None:
            return []
        if not data:
            self.is_over = True
            return []
        return self.feed(data)
