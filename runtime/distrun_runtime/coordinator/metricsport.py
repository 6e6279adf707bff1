"""Serves `GET /metrics` for Prometheus on a port of the coordinator (`launch --metrics-port`).

Access is read-only and needs no password. One thread serves at most CLIENTS connections at a time; for one more, the
oldest of those that have sent no request is dropped, or else the oldest. A client has REQUEST_S to send its request and
ANSWER_S to take the reply. The metrics are requested from the job's loop when a client reads them, and are reused for
FRESH_S.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from typing import Any, Callable, Dict, Mapping, Optional

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import prometheus
from distrun_runtime.coordinator.events import Event, MetricsAsked

CLIENTS = 16
"""Connections at a time."""
REQUEST_LIMIT = 8192
"""Bytes of a request."""
REQUEST_S = 5.0
ANSWER_S = 20.0
LOOP_S = 5.0
"""Time limit for the job's loop to return its metrics."""
CLOSE_S = 5.0
FRESH_S = 1.0
BACKLOG = 128
READ_SIZE = 4096


class _Reader:
    """One connection."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.socket = connection
        self.until = until
        self.request = b""
        self.is_waiting = False
        """It has asked, and the numbers are to come."""
        self.has_asked = False
        self.has_body = True
        self.rest = memoryview(b"")
        self.is_answered = False


class MetricsPort:
    """Listens at a port of the plan's `metrics_address` from the call on; answers from `start` to `close`.

    Arguments:
        plan: of the job.
        port: 0: any free one.
        put: has the job's loop handle an event.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, plan: Plan, port: int, put: Callable[[Event], None]) -> None:
        self._plan = plan
        self._put = put
        self._listener = _listen(plan.metrics_address or facts.LOOPBACK, port)
        host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._readers: Dict[int, _Reader] = {}
        self._page = b""
        self._made_at = float("-inf")
        self._asked_at: Optional[float] = None
        """When the loop was asked, while it has not answered."""
        self._given: Optional[Mapping[str, Any]] = None
        self._lock = threading.Lock()
        """Guards what the loop's thread gives."""
        self._is_closing = False
        self._wakeup, self._waking = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waking, False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and drop all connections. Waits CLOSE_S at most."""
        with self._lock:
            self._is_closing = True
            self._wake()
        self._thread.join(CLOSE_S)
        with self._lock:
            os.close(self._waking)
            self._waking = -1

    def give(self, snapshot: Mapping[str, Any]) -> None:
        """Take the numbers that were asked for; the loop's thread calls it."""
        with self._lock:
            self._given = snapshot
            self._wake()

    def _wake(self) -> None:
        """Have the thread look; the lock is held."""
        if self._waking >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._waking, b"w")

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._is_closing:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Reader):
                        self._attend(key.data)
                    elif key.fileobj is self._listener:
                        self._let_in()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wakeup, READ_SIZE)
                self._take_given()
                self._drop_late(time.monotonic())
        except Exception:
            import traceback

            traceback.print_exc()  # to coordinator.log; the job goes on
        finally:
            for reader in list(self._readers.values()):
                self._drop(reader)
            self._selector.close()
            self._listener.close()
            os.close(self._wakeup)

    def _wait_s(self) -> Optional[float]:
        due = [reader.until for reader in self._readers.values()]
        if self._asked_at is not None:
            due.append(self._asked_at + LOOP_S)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor
            time.sleep(0.05)
            return
        connection.setblocking(False)
        if len(self._readers) >= CLIENTS:
            self._drop(min(self._readers.values(), key=lambda each: each.has_asked))  # the first one: the oldest
        reader = _Reader(connection, time.monotonic() + REQUEST_S)
        self._readers[connection.fileno()] = reader
        self._selector.register(connection, selectors.EVENT_READ, reader)
        self._attend(reader)  # a request may be there already

    def _attend(self, reader: _Reader) -> None:
        try:
            if reader.rest:
                self._send(reader)
                return
            data = reader.socket.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or reader.is_answered:
            self._drop(reader)
            return
        if reader.is_waiting:
            return  # whatever it says more is not read as a request
        reader.request += data
        if b"\r\n\r\n" in reader.request or b"\n\n" in reader.request:
            self._take(reader)
        elif len(reader.request) > REQUEST_LIMIT:
            self._answer(reader, "431 Request Header Fields Too Large")

    def _take(self, reader: _Reader) -> None:
        reader.has_asked = True
        words = reader.request.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._answer(reader, "400 Bad Request")
        elif words[0] not in (b"GET", b"HEAD"):
            self._answer(reader, "405 Method Not Allowed", more="Allow: GET, HEAD\r\n")
        elif words[1].split(b"?", 1)[0] != b"/metrics":
            self._answer(reader, "404 Not Found", b"this is /metrics of a distrun job\n")
        else:
            reader.has_body = words[0] == b"GET"
            reader.is_waiting = True
            reader.until = time.monotonic() + ANSWER_S
            self._ask()

    def _ask(self) -> None:
        """Answer those who wait, with fresh numbers: have the loop give them, unless some are there."""
        now = time.monotonic()
        if now < self._made_at + FRESH_S:
            self._answer_all()
        elif self._asked_at is None:
            self._asked_at = now
            self._put(MetricsAsked(self.give))

    def _take_given(self) -> None:
        with self._lock:
            given, self._given = self._given, None
        if given is not None:
            self._page = prometheus.page(self._plan, given).encode("utf-8", "replace")
            self._made_at, self._asked_at = time.monotonic(), None
            self._answer_all()
        elif self._asked_at is not None and time.monotonic() >= self._asked_at + LOOP_S:
            self._asked_at = None
            for reader in [each for each in self._readers.values() if each.is_waiting]:
                self._answer(reader, "503 Service Unavailable", b"the job is busy, or over\n")

    def _answer_all(self) -> None:
        for reader in [each for each in self._readers.values() if each.is_waiting]:
            self._answer(reader, "200 OK", self._page, prometheus.CONTENT_TYPE)

    def _answer(
        self, reader: _Reader, status: str, body: bytes = b"", kind: str = "text/plain; charset=utf-8", more: str = ""
    ) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}"
        head += "Connection: close\r\n\r\n"
        reader.is_waiting = False
        reader.until = time.monotonic() + ANSWER_S
        reader.rest = memoryview(head.encode("ascii") + (body if reader.has_body else b""))
        self._selector.modify(reader.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, reader)

    def _send(self, reader: _Reader) -> None:
        reader.rest = reader.rest[reader.socket.send(reader.rest) :]
        if not reader.rest:
            reader.is_answered = True
            self._selector.modify(reader.socket, selectors.EVENT_READ, reader)
            reader.socket.shutdown(socket.SHUT_WR)  # what it has not read yet must not be cut off by a reset

    def _drop_late(self, now: float) -> None:
        for reader in [each for each in self._readers.values() if now >= each.until]:
            self._drop(reader)

    def _drop(self, reader: _Reader) -> None:
        self._readers.pop(reader.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader.socket)
        reader.socket.close()


def _listen(address: str, port: int) -> socket.socket:
    family, kind, number, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
