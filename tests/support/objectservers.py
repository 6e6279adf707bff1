"""Object stores on the loopback address: moto's S3 behind a counter of bytes that makes faults."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

Fault = Callable[[dict[str, Any], Any], "Iterable[bytes] | None"]


class ObjectServer:
    """moto's S3. `sent` has the bytes of each key that went out, `fault` may answer in its place.

    A fault takes the request's WSGI environment and `start_response`; None lets moto answer.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self.sent: Counter[str] = Counter()
        self.asked: list[tuple[str, str, str, str]] = []
        """Method, path, range and access key of each request."""
        self.fault: Fault = lambda environ, start_response: None
        self._store = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        with self._lock:
            signed = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
            key = signed[1] if signed else ""
            self.asked.append((environ["REQUEST_METHOD"], path, environ.get("HTTP_RANGE", ""), key))
            instead = self.fault(environ, start_response)
        body = b"".join(self._store(environ, start_response)) if instead is None else instead
        if isinstance(body, bytes):
            with self._lock:
                self.sent[path] += len(body) if environ["REQUEST_METHOD"] == "GET" else 0
            body = [body]
        return body

    def put(self, bucket: str, key: str, content: bytes) -> str:
        """Store an object and return its address."""
        s3 = self.client()
        s3.create_bucket(Bucket=bucket)
        s3.put_object(Bucket=bucket, Key=key, Body=content)
        return f"s3://{bucket}/{key}"

    def client(self) -> Any:
        """Return boto's client of this server."""
        import boto3

        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, **keys)

    def ranges(self, key: str, access_key: str = "") -> list[tuple[int, int]]:
        """Return the ranges of an object that were asked for, without the single byte of each opening."""
        asked = [each for _, path, each, who in self.asked if path.endswith("/" + key) and access_key in ("", who)]
        found = [re.fullmatch(r"bytes=(\d+)-(\d+)", each) for each in asked]
        return [(int(each[1]), int(each[2]) + 1) for each in found if each and each[0] != "bytes=0-0"]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def refusal(status: str, code: str, message: str = "", region: str = "") -> Fault:
    """Answer with an error of S3."""

    def fault(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        where = f"<Region>{region}</Region>" if region else ""
        body = f"<Error><Code>{code}</Code><Message>{message}</Message>{where}</Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    return fault


def times(count: int, fault: Fault) -> Fault:
    """Make a fault for the first requests only."""
    left = iter(range(count))
    return lambda environ, start_response: None if next(left, None) is None else fault(environ, start_response)


def cut(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """Begin an answer and close the connection."""
    begin, end = map(int, environ["HTTP_RANGE"][6:].split("-"))
    size = end + 1 - begin
    start_response(
        "206 Partial Content",
        [("Content-Length", str(size)), ("Content-Range", f"bytes {begin}-{end}/{end + 1}"), ("ETag", '"x"')],
    )
    return [bytes(size // 2)]


def slow(seconds: float) -> Fault:
    """Answer nothing for so long."""

    def fault(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        def body() -> Iterator[bytes]:
            time.sleep(seconds)
            yield from refusal("500 Internal Server Error", "InternalError")(environ, start_response) or ()

        return body()

    return fault


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[ObjectServer]:
    """An empty S3, of which the environment says where it is and who may read it."""
    pytest.importorskip("moto", reason="S3 is moto's server: pip install 'moto[server]' s3fs")
    for name, text in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, text)
    import fsspec
    from moto.moto_api._internal import moto_api_backend

    moto_api_backend.reset()  # what is stored is of the process
    fsspec.filesystem("s3").clear_instance_cache()  # a client keeps the service's address
    server = ObjectServer()
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    yield server
    server.close()
