"""Starts a process on this host that goes on without the connection, and the login, by which it is started.

It is a daemon (`contract.daemon`) with no descriptor of ours. Where a logout ends a user's processes, it is started
below the user's own service manager.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from typing import Dict, List, Mapping, Sequence

from distrun_runtime.agent.share import private_root
from distrun_runtime.contract import daemon, environ
from distrun_runtime.errors import ContractError

PYTHON = "{python}"
"""Word of an argument list that stands for the interpreter of the agent."""
WORDS_BYTES = 4096
"""Of what it wrote to stderr, the last bytes are in the error if it fails."""


def start(argv: Sequence[str], data: bytes, env: Mapping[str, str], limit_s: float) -> str:
    """Start a process, and return the first line that it prints, which says that all is well.

    Args:
        argv: its arguments; the program by its path, or PYTHON.
        data: its standard input.
        env: variables that are added to ours.
        limit_s: how long the line is waited for; 0: it prints none, and is not waited for.

    Raises:
        ContractError: it would not survive a logout, it ended without a line, or the line did not come in time.
        OSError: the system refused something.
    """
    words = _surviving([sys.executable if word == PYTHON else word for word in argv])
    every = {**environ.snapshot(), **env}
    given, said = _file(data), _file(b"")
    reading, writing = os.pipe()
    try:
        if not daemon.fork(keep=(given, writing, said)):
            _become(words, every, (given, writing, said))
        os.close(writing)
        writing = -1
        return _first_line(reading, said, limit_s) if limit_s else ""
    finally:
        for fd in (given, said, reading, writing):
            if fd >= 0:
                os.close(fd)


def _surviving(argv: List[str]) -> List[str]:
    if not daemon.ends_at_logout():
        return argv
    line = daemon.needs_linger()
    if line is not None:
        raise ContractError(f"{daemon.WHY}; allow yours to go on, once: {line}")
    return ["systemd-run", *daemon.SCOPE, *argv]


def _file(data: bytes) -> int:
    """Return a descriptor of a file that has no name, at its beginning: what is in it may be secret."""
    path = os.path.join(private_root(), "input-" + os.urandom(8).hex())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.unlink(path)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _become(argv: List[str], env: Dict[str, str], streams: Sequence[int]) -> None:
    """Be the process, in the daemon; never returns."""
    try:
        for to, fd in enumerate([os.dup(fd) for fd in streams]):
            os.dup2(fd, to)
        os.execvpe(argv[0], argv, env)
    except BaseException as err:
        with contextlib.suppress(OSError):
            os.write(2, f"{argv[0]}: {err}\n".encode("utf-8", "replace"))
    finally:
        os._exit(127)


def _first_line(fd: int, said: int, limit_s: float) -> str:
    until = time.monotonic() + limit_s
    found = b""
    while b"\n" not in found:
        left_s = until - time.monotonic()
        if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
            raise ContractError(f"it did not get ready within {limit_s:g} s{_words(said)}")
        data = os.read(fd, 65536)
        if not data:
            raise ContractError(f"it ended at once{_words(said)}")
        found += data
    return found.partition(b"\n")[0].decode("utf-8", "replace")


def _words(said: int) -> str:
    size = os.fstat(said).st_size
    text = os.pread(said, WORDS_BYTES, max(0, size - WORDS_BYTES)).decode("utf-8", "replace").strip()
    return f": {text}" if text else ""
