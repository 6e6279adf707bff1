"""A two-way channel to one agent: a session over a connection that may be replaced.

`AgentChannel` is what the loop needs of a transport. `SessionChannel` is what all of them are made of: threads read and
write its connection, so that an agent that does not read, or sends rubbish, never makes the loop wait. `StreamChannel`
serves a child process's pipes.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple, Type

from distrun_runtime.contract import session
from distrun_runtime.contract.agent_messages import Bye, Holding, Pong, StartFailed, Warned
from distrun_runtime.contract.session import Session, Source
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import AgentLost, Cut, Event, Resumed
from distrun_runtime.errors import RuntimeFault, WireError

# Connections that carry the session of an agent for a while, as their two threads use them: one reads, one writes.
#
# `Pipes` and `SocketConnection` are the coordinator's own; `distrun.ssh.link.Link` is another.


READ_SIZE = 256 * 1024
CHECK_MS = 500
"""How long `read` and `write` wait at most."""


class ByteStream(Protocol):
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
        """One thread at a time may use a TLS connection. It does not block while it holds this."""
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


Put = Callable[[Event], None]

MAGIC = re.compile(rb"DISTRUN/\d+ ")
"""Begins the first line of an agent; what comes before it is noise of the host's shell. `hello` has the version too,
and there it is checked."""
NOISE_LIMIT = 64 * 1024
ENDED = "its connection ended"
WRITE_SIZE = 256 * 1024
SIGN_S = 1.0


class AgentChannel(Protocol):
    """One agent's channel, as the loop uses it. No method waits."""

    @property
    def host(self) -> str:
        """`Host.name` of the plan."""

    def start(self, put: Put) -> None:
        """Connect if that is still to be done, and from now on put what arrives, from any thread.

        Put `StartFailed` when there is no agent, `AgentLost` once when the channel ends, `Cut` and `Resumed` when its
        connection ends and another takes its place.
        """

    def send(self, frame: session.Frame) -> None:
        """Send a frame, in order, some time soon."""

    def send_large(self, header: Dict[str, Any], source: Source) -> None:
        """Send a large body in chunks, which frames overtake; it is read from its source as they leave."""

    def close(self) -> None:
        """Let the agent see the end of its input once everything sent before is written. May be repeated."""

    def kill(self) -> None:
        """Free everything that the channel holds, at once. The agent, if it lives, sees the end of its input.

        The loop leaves alone the channels of agents that said `bye`: their end, which is the guard's, is waited for by
        the maker of the channel.
        """


class Greeting:
    """Finds the agent's first line in what arrives, and keeps the noise before it. No side effects."""

    def __init__(self) -> None:
        self.nonce = ""
        self.noise: List[str] = []
        self._buffer = b""
        self._seen = 0

    def feed(self, data: bytes) -> Optional[bytes]:
        """Add what arrived; return what follows the first line, or None while that has not come.

        Raises:
            WireError: too much came that is no first line.
        """
        self._buffer += data
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                self._check(len(self._buffer))
                return None
            found = MAGIC.search(line)
            if found is not None:  # noise without a newline may stand in front of it
                if found.start():
                    self.noise.append(line[: found.start()].decode("utf-8", "replace"))
                self.nonce = line[found.end() :].decode("ascii", "replace").strip()
                return rest
            self._seen += len(line) + 1
            self._check(0)
            self.noise.append(line.decode("utf-8", "replace").rstrip("\r"))
            self._buffer = rest

    @property
    def rest(self) -> str:
        """The line that has not ended yet."""
        return self._buffer.decode("utf-8", "replace")

    def _check(self, waiting: int) -> None:
        if self._seen + waiting > NOISE_LIMIT:
            raise WireError(f"more than {NOISE_LIMIT} bytes came that are not an agent's greeting")


class Inlet:
    """What an agent says, from its first byte on: bytes in, events out. Every channel has one. No side effects."""

    def __init__(self, host: str, session: Session, greets: bool = True) -> None:
        self.greeted = not greets
        """The agent's first line has come: there is an agent."""
        self.said_bye = False
        """Its last frame has come: the end of the stream is no loss."""
        self.has_refused = False
        """It cannot take its part; no task ran there."""
        self._host = host
        self._greeting = Greeting()
        self._session = session
        self._sign_at = 0.0

    @property
    def is_leaving(self) -> bool:
        """It said that it ends by itself: `bye`, or `refused`."""
        return self.said_bye or self.has_refused

    @property
    def noise(self) -> str:
        """What came that is no agent's, in one short line."""
        return _brief(self._greeting.noise + ([] if self.greeted else [self._greeting.rest]))

    def feed(self, data: bytes, now: float) -> List[Event]:
        """Add what arrived at `now` (wall clock, seconds) and return the events that are whole.

        Whatever comes is a sign of life: if nothing else does, a part of a long frame makes a `Pong` each SIGN_S.

        Raises:
            WireError, ContractError: this is no agent of ours; the stream cannot be resumed.
        """
        found: List[Event] = []
        if not self.greeted:
            rest = self._greeting.feed(data)
            if rest is None:
                return []
            self.greeted, data = True, rest
            if self._greeting.noise and self.noise:
                found.append(Warned(self._host, f"its shell printed before the agent: {self.noise}"))
        for frame in self._session.feed(data):
            found.append(messages.to_event(self._host, frame, now))
        for event in found:  # only now: if a frame is wrong, the events before it are dropped
            self.said_bye = self.said_bye or isinstance(event, Bye)
            self.has_refused = self.has_refused or isinstance(event, StartFailed)
        if data and not found and abs(now - self._sign_at) >= SIGN_S:
            found.append(Pong(self._host))
        if found:
            self._sign_at = now
        return found


class SessionChannel:
    """A channel whose session outlives its connections: `serve` or `attach` gives it one, and later another.

    A connection has two threads: the one that serves it reads, another writes. `send` does not block.

    Args:
        host: `Host.name` of the plan.
        holds: the agent goes on without a connection until its lease ends. So the end of one is a `Cut`, not the
            `AgentLost` of a channel that does not hold; who owns the channel sees to the next.
        greets: the agent's first line is still to come on the first connection, and noise may come before it.
        is_eager: frames are written before that line has come.
    """

    def __init__(self, host: str, *, holds: bool = False, greets: bool = True, is_eager: bool = False) -> None:
        self.changed = threading.Condition()
        """Guards everything here, and is notified when there is something to write, or the channel ends."""
        self.is_over = False
        """The other side has closed its end, or was given up because of what it sent."""
        self.is_killed = False
        self.heard_at = time.monotonic()
        """When the last bytes came."""
        self.waiting_at = ""
        """Where on its host the agent waits for another connection; empty: nowhere."""
        self.host = host
        self._holds = holds
        self._greets = greets
        self._is_eager = is_eager
        self._session = Session()
        self.inlet = Inlet(host, self._session, greets)
        """What the agent has said."""
        self._put: Optional[Put] = None
        self._diverted: Tuple[Tuple[type, ...], Optional[Put]] = ((), None)
        self._connection: Optional[ByteStream] = None
        self._is_closing = False
        self.was_used = False
        """Anything was sent."""

    @property
    def holds(self) -> bool:
        """Whether a cut is not the end: so if it was asked for, and the agent was there and does not leave."""
        if not self._holds or not self.inlet.greeted:
            return False
        return not (self.is_over or self.inlet.is_leaving or self._is_closing or self.is_killed)

    @property
    def is_connected(self) -> bool:
        """Whether the agent has a connection just now."""
        return self._connection is not None

    @property
    def is_idle(self) -> bool:
        """Whether no connection is there, and nothing waits for one."""
        with self.changed:
            return self._connection is None and self._session.is_idle

    def start(self, put: Put) -> None:
        """From now on put what arrives."""
        with self.changed:
            self._put = put
            self.changed.notify_all()

    def divert(self, kinds: Tuple[type, ...], put: Put) -> None:
        """From now on put events of these types there, and not where `start` said. It is called from any thread."""
        with self.changed:
            self._diverted = (kinds, put)

    def send(self, frame: session.Frame) -> None:
        """Have a frame sent, after those before it. If the agent does not take them, it is given up."""
        with self.changed:
            if self._is_closing:
                return
            self.was_used = True
            try:
                self._session.say(frame.header, frame.body)
            except WireError as err:
                self._give_up(err)
            self.changed.notify_all()

    def _give_up(self, err: WireError) -> None:
        """End the channel, because more than can be kept was not taken."""
        self._say(AgentLost(self.host, f"it does not read what we send: {err}", time.time()))
        self.kill()

    def send_large(self, header: Dict[str, Any], source: Source) -> None:
        """Have a large body sent in chunks, read as they leave; frames overtake them. See `Session.send_large`.

        The source is used by the thread that writes, under `changed`: reading from it must not wait for long.
        """
        with self.changed:
            if not self._is_closing:
                self.was_used = True
                self._session.send_large(header, source)
                self.changed.notify_all()

    def close(self) -> None:
        """Let the agent see the end of its input when everything sent before is written."""
        with self.changed:
            if self._is_closing:
                return
            if self._holds and self.inlet.greeted and not self.inlet.is_leaving:
                with contextlib.suppress(WireError):
                    self._session.say({"type": "leave"})  # it would take the end of its input for a cut
            self._is_closing = True
            self.changed.notify_all()

    def kill(self) -> None:
        """Cut the connection, and forget what was not written."""
        with self.changed:
            if self.is_killed:
                return
            self.is_killed = self._is_closing = True
            connection = self._connection
            self.changed.notify_all()
        if connection is not None:
            connection.kill()

    # Connections

    def restart(self) -> None:
        """Forget a connection on which no agent answered: the next one is the first of the session."""
        with self.changed:
            session = self._session
            if self._connection is None and not self.inlet.greeted and session.is_idle:
                self._session = Session()
                self.inlet = Inlet(self.host, self._session, self._greets)

    def attach(self, connection: ByteStream, ahead: bytes = b"") -> None:
        """Serve a connection in a thread of its own. `ahead`: what was read from it already.

        It takes the place of one that is still there. Any thread; does not wait.
        """
        threading.Thread(target=self._attached, args=(connection, ahead), name=f"read {self.host}", daemon=True).start()

    def _attached(self, connection: ByteStream, ahead: bytes, program: bytes = b"") -> None:
        reason = self.serve(connection, program, ahead)
        when = time.time()
        self.ended(reason, connection.finish(), when)

    def ended(self, reason: str, words: str = "", when: float = 0.0) -> None:
        """Put what the end of a connection means, when `serve` has returned `reason`; empty: nothing.

        `words`: what else is known of it. `when`: wall clock, seconds.
        """
        if reason:
            kind = Cut if self.holds else AgentLost
            self._say(kind(self.host, f"{reason}: {words}" if words else reason, when))

    def serve(
        self,
        connection: ByteStream,
        program: bytes = b"",
        ahead: bytes = b"",
        check: Optional[Callable[[], None]] = None,
    ) -> str:
        """Carry the session over a connection until that ends, and return why it did; empty: another took its place.

        Blocks; waits for `start` first. The caller then calls `connection.finish()`.

        Args:
            connection: the process at its other end has proved its identity.
            program: what the other side reads before the first frame.
            ahead: what was read from it already.
            check: called after each read, about once a second at least. What it raises ends the connection.
        """
        with self.changed:
            while self._put is None and not self.is_killed:
                self.changed.wait()
            before, self._connection = self._connection, connection
            self._session.connect()
            self.heard_at = time.monotonic()
            self.changed.notify_all()
            is_killed = self.is_killed
        if before is not None:
            before.kill()
        if is_killed:
            connection.kill()
        writer = threading.Thread(
            target=self._write, args=(connection, program), name=f"write {self.host}", daemon=True
        )
        writer.start()
        reason = ENDED
        try:
            self._hear(connection, ahead)
            while True:
                data = connection.read()
                if data == b"":
                    break
                self._hear(connection, data or b"")
                if check is not None:
                    check()
            self.is_over = not self.holds and not self.is_killed
        except RuntimeFault as err:  # nothing that comes after this could be understood
            reason, self.is_over = str(err), True
            connection.kill()
        except (OSError, EOFError) as err:
            reason = str(err) or reason
            connection.kill()
        finally:
            with self.changed:
                is_ours = self._connection is connection
                if is_ours:
                    self._connection = None
                    self._session.cut()
                self.changed.notify_all()
        return reason if is_ours else ""

    def _hear(self, connection: ByteStream, data: bytes) -> None:
        """Put what came."""
        with self.changed:
            if not data or self._connection is not connection:
                return
            self.heard_at = time.monotonic()
            had_greeted, was_resumed = self.inlet.greeted, self._session.is_resumed
            found = self.inlet.feed(data, time.time())
            if self._session.is_resumed and not was_resumed:
                self._say(Resumed(self.host))
            kinds, diverted = self._diverted
            for event in found:
                if isinstance(event, Holding):
                    self.waiting_at = event.path
                elif diverted is not None and isinstance(event, kinds):
                    diverted(event)
                else:
                    self._say(event)
            if self._session.is_ready or had_greeted != self.inlet.greeted:
                self.changed.notify_all()

    def _say(self, event: Event) -> None:
        if self._put is not None:
            self._put(event)

    def _write(self, connection: ByteStream, program: bytes) -> None:
        """Write `program` and then frames, until the connection is not ours any more, or everything is written."""
        try:
            data = program or self._next(connection)
            while data:
                rest = memoryview(data)
                while rest and self._connection is connection and not self.is_killed:
                    rest = rest[connection.write(bytes(rest[:WRITE_SIZE])) :]
                data = self._next(connection)
        except OSError:
            pass  # It takes no more. The reading thread sees why.
        except WireError as err:
            self._give_up(err)
        connection.end_input()

    def _next(self, connection: ByteStream) -> bytes:
        """Wait until there is something to write, and return it; nothing if there never will be."""
        with self.changed:
            while self._connection is connection and not self.is_killed:
                if self._is_eager or self.inlet.greeted:
                    data = self._session.next()
                    if data or (self._is_closing and self._session.is_idle):
                        return data
                self.changed.wait()
        return b""


class StreamChannel(SessionChannel):
    """A channel over two descriptors, ends of two pipes, which it owns from `start` on.

    `explain` is called once when the agent's output has ended, in the reading thread, and may wait a moment: its
    text is added to the reason (exit code, last words on stderr). `program` is what the agent reads first.
    """

    def __init__(
        self,
        host: str,
        read_fd: int,
        write_fd: int,
        *,
        program: bytes = b"",
        explain: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(host, is_eager=True)
        self._pipes = Pipes(read_fd, write_fd, explain)
        self._program = program

    def start(self, put: Put) -> None:
        """Start the two threads."""
        super().start(put)
        args = self._pipes, b"", self._program
        threading.Thread(target=self._attached, args=args, name=f"read {self.host}", daemon=True).start()


def _brief(lines: List[str]) -> str:
    text = " | ".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= 300 else text[:300] + "..."
