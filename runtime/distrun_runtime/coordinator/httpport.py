"""A read-only HTTP server for a few clients, whose threads, memory and time are bounded.

At most CLIENTS connections are served at a time, each by a thread; for one more, the oldest of those that have sent no
request is dropped, or else the oldest. A connection carries one request. A client has REQUEST_S to send it and ANSWER_S
to take the reply.
"""

from __future__ import annotations

import contextlib
import io
import socket
import socketserver
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any, Dict, Tuple, Type

CLIENTS = 16
"""Connections at a time."""
REQUEST_S = 5.0
ANSWER_S = 20.0
CHECK_S = 0.2
"""Between two looks whether a client has used up its time."""
REQUEST_SIZE = 16 * 1024
"""Bytes of a request at most, with its headers."""
READ_SIZE = 4096


class HttpAnswer(BaseHTTPRequestHandler):
    """One connection. `answer` is to reply to GET and HEAD."""

    server: HttpPort
    default_request_version = "HTTP/1.0"  # an error has a status line, whatever was asked
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(explain)s\n"

    def answer(self) -> None:
        """Send the reply."""
        raise NotImplementedError

    def setup(self) -> None:
        """Read the request, so that no more than REQUEST_SIZE of it is ever kept."""
        super().setup()
        told = b""
        while len(told) <= REQUEST_SIZE and b"\n\r\n" not in told and b"\n\n" not in told:
            data = self.connection.recv(READ_SIZE)
            if not data:
                break
            told += data
        self._is_too_large = len(told) > REQUEST_SIZE
        self.rfile = io.BufferedReader(io.BytesIO(told))

    def parse_request(self) -> bool:
        """Return whether there is a request to reply to; else an error was sent."""
        if self._is_too_large:
            self.command, self.requestline, self.request_version = "", "", self.default_request_version
            self.send_error(431, explain=f"a request may have {REQUEST_SIZE} bytes")
            return False
        if not super().parse_request():
            return False
        if self.command in ("GET", "HEAD"):
            return True
        self.send_response(405)
        self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Length", "0")
        self.end_headers()
        return False

    def do_GET(self) -> None:
        """Reply."""
        self.server.await_client(self.connection, ANSWER_S)
        self.answer()

    def do_HEAD(self) -> None:
        """Send what comes before the body."""
        self.do_GET()

    def send(self, status: int, content_type: str, body: bytes) -> None:
        """Send a reply with its headers."""
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def finish(self) -> None:
        """Wait until the client has read the reply: what is sent to a closed socket would cut it off by a reset."""
        super().finish()
        self.connection.shutdown(socket.SHUT_WR)
        while self.connection.recv(READ_SIZE):
            pass

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class HttpPort(socketserver.ThreadingTCPServer):
    """Listens at an address from the call on; replies from `start` to `close`.

    Arguments:
        address: a numeric IP address.
        port: 0: any free one.
        answer: replies to a request.

    Raises:
        OSError: it cannot listen there.
    """

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, address: str, port: int, answer: Type[HttpAnswer]) -> None:
        numeric = socket.AI_NUMERICHOST | socket.AI_PASSIVE
        found: Any = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=numeric)[0]
        self.address_family = found[0]
        super().__init__(found[4], answer)  # with the scope of a link-local address
        self.socket.settimeout(CHECK_S)  # a client that has gone meanwhile does not keep `close` waiting
        host, self.port = self.socket.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/"
        self._readers: Dict[socket.socket, Tuple[bool, float]] = {}
        """Connections, the oldest first: whether it has sent its request, and until when it is waited for."""

    def start(self) -> None:
        """Start the thread that lets clients in."""
        threading.Thread(target=self.serve_forever, args=(CHECK_S,), name="http", daemon=True).start()

    def close(self) -> None:
        """Listen no more, and drop all connections."""
        self.shutdown()
        self.server_close()
        for reader in list(self._readers):
            self._drop(reader)

    def has(self, reader: socket.socket) -> bool:
        """Return whether a connection has not been dropped."""
        return reader in self._readers

    def await_client(self, reader: socket.socket, limit_s: float, has_asked: bool = True) -> None:
        """Drop a client if it has not done its part `limit_s` from now."""
        self._readers[reader] = has_asked, time.monotonic() + limit_s

    def get_request(self) -> Tuple[socket.socket, Any]:
        """Accept a connection."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(CHECK_S)  # there may be no descriptor for some time
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own."""
        readers = list(self._readers.items())  # threads of others may end meanwhile
        if len(readers) >= CLIENTS:
            self._drop(min(readers, key=lambda each: each[1][0])[0])  # the first one: the oldest
        self.await_client(request, REQUEST_S, has_asked=False)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Drop those that have used up their time."""
        for reader, (_, until) in list(self._readers.items()):
            if time.monotonic() >= until:
                self._drop(reader)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self._readers.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write what failed to stderr (a coordinator's is its log), unless the client has gone; the server goes on."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def _drop(self, reader: socket.socket) -> None:
        """Have the thread of a connection end it."""
        self._readers.pop(reader, None)
        with contextlib.suppress(OSError):
            reader.shutdown(socket.SHUT_RDWR)
