"""The way to an sshd before ssh begins: a TCP connection, or a program that makes one (ProxyCommand)."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import subprocess
import threading
import time
from typing import Any

from distrun.ssh.abort import Abort
from distrun.ssh.child import Child, read_rest
from distrun.ssh.failure import OTHER, SshFailure, Where, classify, timeout

GLANCE_S = 0.2
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


def connect(where: Where, family: str, limit_s: float, abort: Abort) -> socket.socket:
    """Return a socket connected to `where`, its addresses tried in turn.

    Raises:
        SshFailure: there is no such name, or nobody answers.
        Aborted: it was given up.
    """
    until = time.monotonic() + limit_s
    addresses = _addresses(where, _FAMILIES.get(family, socket.AF_UNSPEC), until, abort)
    failure: SshFailure | None = None
    for done, (kind, address) in enumerate(addresses):
        share = (until - time.monotonic()) / (len(addresses) - done)
        try:
            return _connect(kind, address, max(share, 0.1), abort)
        except OSError as err:
            failure = classify(err, where)
    raise failure or timeout(where)


def _addresses(where: Where, family: int, until: float, abort: Abort) -> list[tuple[int, Any]]:
    """Look the name up in a thread of its own: a resolver cannot be interrupted, and may take minutes."""
    found: list[tuple[int, Any]] = []
    failed: list[OSError] = []
    done = threading.Event()

    def look() -> None:
        try:
            rows = socket.getaddrinfo(where.address or where.host, where.port, family, socket.SOCK_STREAM)
            found.extend(dict.fromkeys((row[0], row[4]) for row in rows))
        except (OSError, UnicodeError) as err:
            failed.append(err if isinstance(err, OSError) else socket.gaierror(str(err)))
        done.set()

    if _is_numeric(where.address or where.host):
        look()
    else:
        threading.Thread(target=look, name="look up %s" % where.host, daemon=True).start()
    while not done.wait(GLANCE_S):
        abort.check()
        if time.monotonic() >= until:
            raise timeout(where, "get an address from the name service")
    if failed:
        raise classify(failed[0], where)
    return found


def _is_numeric(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, name.partition("%")[0])
            return True
    return False


def _connect(family: int, address: Any, limit_s: float, abort: Abort) -> socket.socket:
    until = time.monotonic() + limit_s
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            while not poll.poll(GLANCE_S * 1000):
                abort.check()
                if time.monotonic() >= until:
                    raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.setblocking(True)
        return sock
    except BaseException:
        sock.close()
        raise


class Program:
    """A ProxyCommand: a program of the user's whose stdin and stdout are the connection."""

    def __init__(self, command: str) -> None:
        ours, its = socket.socketpair()
        self.sock = ours
        """Our end of it."""
        with its:
            try:
                self._child = subprocess.Popen(
                    ["/bin/sh", "-c", "exec " + command],
                    stdin=its.fileno(),
                    stdout=its.fileno(),
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as err:
                ours.close()
                raise SshFailure(OTHER, "the ProxyCommand cannot be run: %s" % err) from err

    def end(self) -> str:
        """Make sure that it ends; return the last words that it wrote to stderr."""
        self.sock.close()
        child, stderr = Child(self._child), self._child.stderr
        assert stderr is not None  # asked for above
        child.end(0.5)
        words = b"" if stderr.closed else read_rest(stderr)
        lines = words.decode("utf-8", "replace").strip().splitlines()
        stderr.close()
        return lines[-1] if lines else ""
