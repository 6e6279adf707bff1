"""Web services on the loopback address whose answers a test says: the fixture `servers` makes them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Reply = tuple[int, bytes, dict[str, str]]


class Server:
    """A web service whose answers a test says. `asked` is what came: method, path, body and headers."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes, dict[str, str]]] = []
        self.answer: Callable[[str, str, dict[str, str]], Reply] = lambda method, path, headers: (200, b"{}", {})
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                headers = dict(self.headers.items())
                server.asked.append((self.command, self.path, body, headers))
                status, said, more = server.answer(self.command, self.path, headers)
                self.send_response(status)
                for name, text in {"Content-Length": str(len(said)), **more}.items():
                    self.send_header(name, text)
                with contextlib.suppress(ConnectionError):  # a client may have read enough
                    self.end_headers()
                    self.wfile.write(said)

            do_GET = do_PUT = do_POST = do_DELETE = do

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


@pytest.fixture
def servers() -> Iterator[Callable[[], Server]]:
    made: list[Server] = []

    def make() -> Server:
        made.append(Server())
        return made[-1]

    yield make
    for each in made:
        each.close()
