"""Waits for another connection of the coordinator, on the Unix socket `agent.s` in the job's private folder.

The connection comes from a relay that the coordinator starts on this host (`distrun/ssh/connector.py`). The socket can
be reached by this user only, the kernel says who connects, and both sides prove that they know the key of `begin`:

    agent:        DISTRUN/3 NONCE
    coordinator:  prove {nonce, proof}
    agent:        proven {proof}

Then the session goes on. Nothing here waits: each connection has its callback in the agent's selector.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import socket
import time
from typing import Callable, Dict, Iterator

from distrun_runtime.agent.channel import Connection, StreamSocket
from distrun_runtime.contract import private, session
from distrun_runtime.errors import WireError

NAME = "agent.s"
PROOF_S = 10.0
"""How long a connection may take to prove who it is."""
PROOF_BYTES = 4096
"""What it may send until then."""
GUESTS = 8
"""Connections that are proving themselves; a further one takes the place of the oldest."""
PATH_BYTES = 100
"""A longer path does not fit into a socket's address everywhere."""


class RedialListener:
    """Listens for one job. `on_connection` gets each connection that has proved itself, and what was read ahead."""

    def __init__(
        self,
        folder: str,
        key: str,
        selector: selectors.BaseSelector,
        on_connection: Callable[[Connection, bytes], None],
    ) -> None:
        self.path = os.path.join(folder, NAME)
        self._key = key
        self._selector = selector
        self._on_connection = on_connection
        self._guests: Dict[int, _Guest] = {}
        self._socket = _listen(folder)
        self._selector.register(self._socket.fileno(), selectors.EVENT_READ, self._accept)

    next_at = math.inf

    def begin(self) -> None:
        """Do nothing: who wants to come comes."""

    def tick(self, now: float) -> None:
        """Do nothing: nothing is ever due."""

    def close(self) -> None:
        """Stop listening."""
        self._selector.unregister(self._socket.fileno())
        self._socket.close()
        for guest in list(self._guests.values()):
            self._dismiss(guest)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # it has gone again
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if len(self._guests) >= GUESTS or now >= guest.until:
                self._dismiss(guest)
        guest = _Guest(connection, now + PROOF_S)
        self._guests[guest.descriptor] = guest
        self._selector.register(guest.descriptor, selectors.EVENT_READ, lambda: self._hear(guest))
        # -1: the system does not tell; the folder's mode and the proof are what there is.
        is_of_this_user = private.peer_uid(connection) in (os.geteuid(), 0, -1)
        if not is_of_this_user or not guest.send(b"DISTRUN/%d %s\n" % (session.VERSION, guest.nonce.encode())):
            self._dismiss(guest)

    def _hear(self, guest: _Guest) -> None:
        """Take what a connection sends to prove itself."""
        try:
            answer = guest.hear(self._key)
        except (WireError, OSError, LookupError, TypeError, ValueError):
            self._dismiss(guest)
            return
        if answer and guest.send(answer):
            self._selector.unregister(guest.descriptor)
            del self._guests[guest.descriptor]
            self._on_connection(StreamSocket(guest.socket), guest.rest)
        elif answer:
            self._dismiss(guest)

    def _dismiss(self, guest: _Guest) -> None:
        self._selector.unregister(guest.descriptor)
        del self._guests[guest.descriptor]
        guest.socket.close()


class _Guest:
    """A connection that has not proved yet who it is."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.descriptor = connection.fileno()
        self.until = until
        self.nonce = os.urandom(16).hex()
        self.rest = b""
        """What it sent after its proof."""
        self._received = b""

    def send(self, data: bytes) -> bool:
        """Send a few bytes; return whether they went."""
        try:
            return self.socket.send(data) == len(data)
        except OSError:
            return False

    def hear(self, key: str) -> bytes:
        """Take what came; return the answer to the proof, nothing while it is not whole.

        Raises:
            WireError, OSError, LookupError, TypeError, ValueError: it is none, or a wrong one.
        """
        try:
            data = self.socket.recv(PROOF_BYTES)
        except BlockingIOError:
            return b""
        self._received += data
        if not data or len(self._received) > PROOF_BYTES:
            raise WireError("it does not prove who it is")
        frame, self.rest = session.first(self._received)
        if frame is None:
            return b""
        theirs = str(frame.header["nonce"])
        if frame.type != "prove" or not session.is_proof(
            str(frame.header["proof"]), key, session.COORDINATOR, self.nonce, theirs
        ):
            raise WireError("a wrong proof")
        return session.encode({"type": "proven", "proof": session.proof(key, session.AGENT, self.nonce, theirs)})


def _listen(folder: str) -> socket.socket:
    """Return a socket that listens in `folder`, for this user only. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, NAME))  # of an earlier agent of the same job
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with reached(folder) as path:
            listening.bind(path)
            os.chmod(path, 0o600)  # the folder lets no other user in anyway
        listening.listen(GUESTS)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


@contextlib.contextmanager
def reached(folder: str) -> Iterator[str]:
    """Give a path of the socket in `folder` that is short enough for a socket's address."""
    path = os.path.join(folder, NAME)
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield path
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
