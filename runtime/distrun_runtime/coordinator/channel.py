"""A two-way pipe to one agent, and its form over a pair of file descriptors.

`Channel` is what the loop needs of a transport. `StreamChannel` serves a child process's pipes. It owns two
threads, one reading and one writing, so that an agent that does not read, or sends rubbish, never makes the loop
wait.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque
from typing import Callable, Deque, List, Optional, Protocol

from distrun_runtime.contract import wire
from distrun_runtime.coordinator import frames
from distrun_runtime.coordinator.events import AgentLost, Bye, Event, StartFailed, Warned
from distrun_runtime.errors import RuntimeFault, WireError

Put = Callable[[Event], None]

MAGIC = re.compile(rb"DISTRUN/\d+ ")
"""Begins the first line of an agent; what comes before it is noise of the host's shell. `hello` has the version too,
and there it is checked."""
NOISE_LIMIT = 64 * 1024
WRITE_LIMIT = 64 * 1024 * 1024
"""Bytes that may wait for an agent to read them; past that it is lost."""
READ_SIZE = 256 * 1024
GLANCE_MS = 500
"""How often a thread that waits for a descriptor looks whether the channel was killed."""


class Channel(Protocol):
    """One agent's channel, as the loop uses it. No method waits."""

    @property
    def host(self) -> str:
        """`Host.name` of the plan."""

    def start(self, put: Put) -> None:
        """Connect if that is still to be done, and from now on put what arrives, from any thread.

        Put `StartFailed` when there is no agent, `AgentLost` once when the channel ends.
        """

    def send(self, data: bytes) -> None:
        """Send bytes (whole frames), in order, some time soon."""

    def close(self) -> None:
        """Let the agent see the end of its input once everything sent before is written. May be repeated."""

    def kill(self) -> None:
        """Free everything that the channel holds, at once. The agent, if it lives, sees the end of its input.

        The loop leaves alone the channels of agents that said `bye`: their end, which is the guard's, is waited for by
        whoever made the channel.
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

    def __init__(self, host: str) -> None:
        self.greeted = False
        """The agent's first line has come: there is an agent."""
        self.said_bye = False
        """Its last frame has come: the end of the stream is no loss."""
        self.is_leaving = False
        """It said that it ends by itself: `bye`, or `refused`."""
        self._host = host
        self._greeting = Greeting()
        self._decoder = wire.Decoder()

    @property
    def noise(self) -> str:
        """What came that is no agent's, in one short line."""
        return _brief(self._greeting.noise + ([] if self.greeted else [self._greeting.rest]))

    def feed(self, data: bytes, now: float) -> List[Event]:
        """Add what arrived at `now` (wall clock, seconds) and return the events that are whole.

        Raises:
            WireError, ContractError: this is no agent of ours; the stream cannot be resumed.
        """
        found: List[Event] = []
        if not self.greeted:
            rest = self._greeting.feed(data)
            if rest is None:
                return []
            self.greeted, data = True, rest
            if any(line.strip() for line in self._greeting.noise):
                found.append(Warned(self._host, f"its shell printed before the agent: {self.noise}"))
        found += [frames.to_event(self._host, frame, now) for frame in self._decoder.feed(data)]
        self.said_bye = self.said_bye or any(isinstance(event, Bye) for event in found)
        refused = any(isinstance(event, StartFailed) for event in found)
        self.is_leaving = self.is_leaving or self.said_bye or refused
        return found


class Outbox:
    """What is to be written to one agent, within WRITE_LIMIT.

    Threads: any may put; `changed` is notified at every change, and holding it one may look at several things at once.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.is_closing = False
        """Nothing more is taken in."""
        self._queue: Deque[bytes] = deque()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, data: bytes) -> bool:
        """Queue bytes, unless it is closing; return whether too much waits: the agent does not read."""
        with self.changed:
            if self.is_closing:
                return False
            self._queue.append(data)
            self._waiting += len(data)
            self.changed.notify_all()
            return self._waiting > WRITE_LIMIT

    def close(self) -> None:
        """Take nothing more in."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def drop(self) -> None:
        """Close, and forget what is not written."""
        with self.changed:
            self._queue.clear()
            self.close()

    def take(self) -> bytes:
        """Return what is to be written next; nothing when there is nothing."""
        with self.changed:
            return self._queue.popleft() if self._queue else b""

    def written(self, size: int) -> None:
        """So many bytes of what was taken have left."""
        with self.changed:
            self._waiting -= size


class StreamChannel:
    """A channel over two descriptors, ends of two pipes, which it owns from `start` on.

    `explain` is called once when the agent's output has ended, in the reading thread, and may wait a moment: its
    text is added to the reason (exit code, last words on stderr). `on_kill` is called by `kill`.
    """

    def __init__(
        self,
        host: str,
        read_fd: int,
        write_fd: int,
        *,
        explain: Callable[[], str] = lambda: "",
        on_kill: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._explain = explain
        self._on_kill = on_kill
        self._put: Put = lambda event: None
        self._outbox = Outbox()
        self._killed = False
        self._inlet = Inlet(host)
        self.is_over = False
        """The other side has closed its end, or was given up because of what it sent."""

    @property
    def host(self) -> str:
        """`Host.name` of the plan."""
        return self._host

    @property
    def said_bye(self) -> bool:
        """Whether the agent's last frame has come."""
        return self._inlet.said_bye

    def start(self, put: Put) -> None:
        """Start the two threads."""
        self._put = put
        for name, work in (("read", self._read), ("write", self._write)):
            threading.Thread(target=work, name=f"{name} {self._host}", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Queue bytes for the writing thread. Past WRITE_LIMIT the agent is given up."""
        if self._outbox.put(data):
            self._put(AgentLost(self._host, "it does not read what we send", time.time()))
            self.kill()

    def close(self) -> None:
        """Close the agent's input when everything before is written."""
        self._outbox.close()

    def kill(self) -> None:
        """Forget what is not written, close, and call `on_kill`."""
        with self._outbox.changed:
            if self._killed:
                return
            self._killed = True
            self._outbox.drop()
        self._on_kill()

    def _read(self) -> None:
        reason = "its connection ended"
        try:
            self._read_frames()
        except (RuntimeFault, OSError) as err:
            reason, self.is_over = str(err), True
            self.kill()
        os.close(self._read_fd)
        when = time.time()
        more = self._explain()
        self._put(AgentLost(self._host, f"{reason}: {more}" if more else reason, when))

    def _read_frames(self) -> None:
        while True:
            while not _is_ready(self._read_fd, select.POLLIN):
                if self._killed:
                    return
            data = os.read(self._read_fd, READ_SIZE)
            if not data:
                self.is_over = True
                return
            for event in self._inlet.feed(data, time.time()):
                self._put(event)

    def _write(self) -> None:
        try:
            os.set_blocking(self._write_fd, False)  # a full pipe must not keep `kill` from closing it
            while True:
                with self._outbox.changed:
                    while not self._outbox and not self._outbox.is_closing:
                        self._outbox.changed.wait()
                    data = memoryview(self._outbox.take())
                size = len(data)
                if not size:
                    return
                while data and not self._killed:
                    if _is_ready(self._write_fd, select.POLLOUT):
                        data = data[os.write(self._write_fd, data) :]
                self._outbox.written(size)
        except OSError:
            # The agent reads no more. The reading thread sees the end and says so; nothing is left to do here.
            self._outbox.drop()
        finally:
            os.close(self._write_fd)


def _is_ready(fd: int, what: int) -> bool:
    poll = select.poll()
    poll.register(fd, what)
    return bool(poll.poll(GLANCE_MS))


def _brief(lines: List[str]) -> str:
    text = " | ".join(line.strip() for line in lines if line.strip())
    return text if len(text) <= 300 else text[:300] + "..."
