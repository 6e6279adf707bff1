"""A peer that speaks ZMTP by hand (RFC 37), to send what no ZeroMQ library sends."""

from __future__ import annotations

import contextlib
import socket
import struct
import time

from slowness import scaled

MORE, LONG, COMMAND = 1, 2, 4


def greeting(mechanism: bytes = b"NULL", version: bytes = b"\x03\x01") -> bytes:
    """The first 64 bytes of ZMTP 3."""
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + struct.pack(">Q", len(body)) + body


def command(name: bytes, body: bytes = b"") -> bytes:
    return frame(bytes((len(name),)) + name + body, COMMAND)


def hello(user: bytes, password: bytes) -> bytes:
    """PLAIN's first command (RFC 24)."""
    return command(b"HELLO", bytes((len(user),)) + user + bytes((len(password),)) + password)


def metadata(**properties: bytes) -> bytes:
    pairs = ((name.replace("_", "-").encode(), value) for name, value in properties.items())
    return b"".join(bytes((len(name),)) + name + struct.pack(">I", len(value)) + value for name, value in pairs)


READY = metadata(Socket_Type=b"DEALER", Identity=b"")


class Peer:
    """One TCP connection to a node."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30)
        self.socket.settimeout(scaled(30))
        self.sent = 0
        self.is_closed = False
        """The node has closed it."""

    def send(self, data: bytes) -> None:
        """Send what the node takes; it may close the connection meanwhile."""
        try:
            self.socket.sendall(data)
            self.sent += len(data)
        except (ConnectionError, TimeoutError):
            self.is_closed = True

    def receive(self, size: int) -> bytes:
        """Return the next bytes; fewer when the node closes the connection first."""
        got = b""
        with contextlib.suppress(ConnectionError):
            while len(got) < size and (part := self.socket.recv(size - len(got))):
                got += part
        self.is_closed = self.is_closed or len(got) < size
        return got

    def command(self) -> bytes:
        """Return the next command or message of the node."""
        flags, size = self.receive(1), 0
        if flags:
            size = struct.unpack(">Q", self.receive(8))[0] if flags[0] & LONG else self.receive(1)[0]
        return self.receive(size)

    def enter_as_plain(self, user: bytes, password: bytes) -> bytes:
        """Go through the ZMTP handshake; return the node's last command: READY, or ERROR."""
        self.send(greeting(b"PLAIN"))
        self.receive(64)
        self.send(hello(user, password))
        answer = self.command()
        if not answer.startswith(b"\x07WELCOME"):
            return answer
        self.send(command(b"INITIATE", READY))
        return self.command()

    def flood(self, part: bytes, total: int, until: float) -> None:
        """Send `part` again and again, `total` bytes or until the node closes the connection."""
        block = part * max(1, 65536 // len(part))
        while self.sent < total and not self.is_closed and time.monotonic() < until:
            self.send(block)

    def close(self) -> None:
        self.socket.close()
