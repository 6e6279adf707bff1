"""python -m distrun_runtime.calling MODULE:NAME: calls a function on a worker, as `distrun.launch_function` wants it.

The arguments are in DISTRUN_CALL. The result, or the exception, goes to stdout in lines of its own,

    distrun-result NUMBER/COUNT BASE64

which together are an object of `store.objects`, compressed: JSON values and arrays, of which nothing is unpickled. A
line is shorter than PIPE_BUF (4096 on Linux), so it does not mix with what other threads and processes write.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import re
import sys
import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from distrun_runtime import reporting
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.store import objects

CALL = "DISTRUN_CALL"
"""Variable with the arguments: a list and a dict."""
_LINE = re.compile(rb"distrun-result (\d+)/(\d+) ([A-Za-z0-9+/=]+)\n")
_LINE_SIZE = 3000
"""Characters of a result in a line."""


def pack(value: object, what: str) -> str:
    """Return an object as text of base64. Raises KVError: it is none that JSON and arrays can hold."""
    return base64.b64encode(zlib.compress(objects.encode(value, what), 1)).decode()


def unpack(text: str | bytes, what: str) -> Any:
    """Return the object of a text that `pack` made. Raises KVError: it is none."""
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), 2 * objects.OBJECT_BYTES)
    except (ValueError, zlib.error) as err:
        raise KVError(f"{what}: found text that is no object") from err
    if not inflater.eof:
        raise KVError(f"{what}: found a text that is cut, or too large")
    return objects.decode(data, what)


class ResultReader:
    """Finds the result in what one task writes to stdout."""

    def __init__(self) -> None:
        self._rest = b""
        self._lines: list[bytes] = []
        self._count = 0

    def feed(self, data: bytes) -> None:
        """Take what comes next."""
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-2 * _LINE_SIZE :]  # of a long line, the end is enough
        for line in lines:
            match = _LINE.search(line + b"\n")
            if match is None:
                continue
            number, self._count = int(match[1]), int(match[2])
            if number == 1:
                self._lines.clear()
            if number == len(self._lines) + 1:
                self._lines.append(match[3])

    def text(self) -> bytes | None:
        """Return the result's text; None: it has not come as a whole."""
        return b"".join(self._lines) if 0 < len(self._lines) == self._count else None


def resolve(name: str) -> Callable[..., Any]:
    """Return the function `MODULE:NAME`. Imports its module."""
    module, _, path = name.partition(":")
    found: Callable[..., Any] = attrgetter(path)(importlib.import_module(module))
    return found


def main(name: str) -> None:
    """Call a function and tell what it returned or raised; what it raised is raised."""
    reporting.watch()
    stdout = os.dup(1)  # the function may do with its own what it likes
    try:
        args, kwargs = unpack(environ.text(CALL) or "", f"the arguments of {name}")
        text = pack({"value": resolve(name)(*args, **kwargs)}, f"the result of {name}")
    except (Exception, SystemExit) as err:
        told = {"type": type(err).__name__, "text": str(err), "traceback": reporting.printed(err)}
        _tell(stdout, pack({"error": told}, "an exception"))
        raise
    _tell(stdout, text)


def _tell(stdout: int, text: str) -> None:
    with contextlib.suppress(Exception):  # whatever the function has left there
        sys.stdout.flush()
    pieces = [text[at : at + _LINE_SIZE] for at in range(0, len(text), _LINE_SIZE)]
    for number, piece in enumerate(pieces, 1):
        line = f"distrun-result {number}/{len(pieces)} {piece}\n".encode()
        while line:
            line = line[os.write(stdout, line) :]


if __name__ == "__main__":
    main(sys.argv[1])
