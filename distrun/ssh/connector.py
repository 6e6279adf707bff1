"""Opens connections for one launch: not too many at a time, with one memory for keys, passwords and jump hosts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from distrun.ssh.ask import Abort, Aborted, Asker
from distrun.ssh.failure import OTHER, SshFailure, Where, classify, proxy_failed, timeout, too_many_keys
from distrun.ssh.openssh import OpensshLink, ProxyProgram
from distrun.ssh.resolve import JUMPS, OPENSSH, Resolved, Target, hop, many, resolve

if TYPE_CHECKING:
    import fabric

    from distrun.ssh.login import KeyCache, Login

WINDOW = 32
"""Connections that are being made at a time."""
WINDOW_A_SSHD = 8
"""The same for one sshd (several names, or a jump host); from 10 on it drops some by default (MaxStartups)."""
LOGINS = 4
"""Connections that the keys of one user are spread over, if the host hangs up after some."""
_POLL_S = 0.2
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


class Link(Protocol):
    """One command on one host. `read` and `finish` are for one thread, `write` and `end_input` for another."""

    def read(self) -> bytes | None:
        """Return what its stdout says next, empty at its end; None if it says nothing for a second."""

    def write(self, data: bytes) -> int:
        """Write to its stdin, waiting at most a second; return how many bytes went.

        Raises:
            OSError: it takes no more.
        """

    def end_input(self) -> None:
        """Let it see the end of its stdin."""

    def kill(self) -> None:
        """End the connection now. Any thread; does not wait."""

    def finish(self) -> str:
        """Free everything; return the last lines of its stderr."""

    def explain(self, stderr: str, stdout: str) -> SshFailure:
        """Return why there was no agent, after `finish`, from what it wrote to stderr and stdout."""


def _ignore(text: str) -> None:
    pass


class Connector:
    """What the connections of one launch share. Of any thread's use."""

    def __init__(self, asker: Asker | None = None) -> None:
        self.asker = asker or Asker()
        """Knows what the user typed."""
        self._window = threading.BoundedSemaphore(WINDOW)
        self._lock = threading.Lock()
        self._sshds: dict[tuple[str, int], threading.BoundedSemaphore] = {}
        self._key_cache: KeyCache | None = None
        self._jumps: dict[Target, _Jump] = {}
        self._alike = many()

    @contextlib.contextmanager
    def turn(self, abort: Abort) -> Iterator[None]:
        """Wait until fewer than WINDOW connections are being made.

        Raises:
            Aborted: it was given up meanwhile.
        """
        with _held(self._window, abort):
            yield

    def open(self, target: Target, command: str, abort: Abort, warn: Callable[[str], None] = _ignore) -> Link:
        """Return `command`, started on `target`. With the `ssh` program failures show only when it is read.

        Args:
            target: where.
            command: for the login shell there.
            abort: gives up.
            warn: is told what the user should know though it works.

        Raises:
            SshFailure: the host cannot be reached, or does not let us in.
            Aborted: it was given up.
        """
        resolved = resolve(target, self._alike)
        abort.check()
        if target.transport == OPENSSH:
            return OpensshLink(resolved, command)
        connection, sock, program = self._enter(resolved, abort, warn)
        from distrun.ssh.fabric_link import FabricLink

        abort.on(lambda: _shut(sock))
        link = FabricLink(resolved, connection, sock, command, program)
        if abort.is_set:
            link.finish()
        abort.check()
        return link

    def close(self) -> None:
        """Leave the hosts in between."""
        with self._lock:
            jumps, self._jumps = self._jumps, {}
        for jump in jumps.values():
            jump.close()

    def _enter(
        self, resolved: Resolved, abort: Abort, warn: Callable[[str], None], depth: int = 0
    ) -> tuple[fabric.Connection, Any, Any]:
        """Connect and log in, over as many connections as the host wants for the keys there are."""
        login: Login | None = None
        with _held(self._sshd_window(resolved), abort):
            for _ in range(LOGINS):
                # Before the libraries are imported: the hosts set to work in the tenth of a second that this takes.
                sock, program = self._reach(resolved, abort, warn, depth)
                from distrun.ssh import fabric_link
                from distrun.ssh.login import Login, TooManyTries

                login = login or Login(resolved, self._keys(), self.asker, abort)
                try:
                    return fabric_link.log_in(resolved, sock, login, abort, warn), sock, program
                except (TooManyTries, Aborted, SshFailure) as err:
                    stderr = program.end() if program is not None else ""
                    if isinstance(err, SshFailure):
                        raise (proxy_failed(resolved.where, stderr) if stderr and err.is_passing else err) from err
                    abort.check()
        raise too_many_keys(resolved.where)

    def _reach(
        self, resolved: Resolved, abort: Abort, warn: Callable[[str], None], depth: int
    ) -> tuple[Any, ProxyProgram | None]:
        if resolved.jump:
            from distrun.ssh import fabric_link

            if depth >= JUMPS:
                raise SshFailure(OTHER, f"more than {JUMPS} hosts in between (ProxyJump in a circle?)")
            jump = self._jump(hop(resolved)).get(lambda way: self._enter(way, abort, warn, depth + 1), abort)
            return fabric_link.tunnel(jump, resolved), None
        if resolved.proxy_command:
            program = ProxyProgram(resolved.proxy_command)
            return program.sock, program
        return connect(resolved.where, resolved.family, resolved.connect_s, abort), None

    def _jump(self, target: Target) -> _Jump:
        with self._lock:
            return self._jumps.setdefault(target, _Jump(target))

    def _sshd_window(self, resolved: Resolved) -> threading.BoundedSemaphore:
        with self._lock:
            key = (resolved.hostname, resolved.port)
            return self._sshds.setdefault(key, threading.BoundedSemaphore(WINDOW_A_SSHD))

    def _keys(self) -> KeyCache:
        from distrun.ssh.login import KeyCache

        with self._lock:
            self._key_cache = self._key_cache or KeyCache()
            return self._key_cache


class _Jump:
    """One host in between; all hosts behind it share the connection to it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._connection: Any = None
        self._sock: Any = None
        self._program: Any = None

    def get(self, enter: Any, abort: Abort) -> fabric.Connection:
        with _held(self._lock, abort):
            if self._connection is None or not self._connection.is_connected:
                try:
                    self._connection, self._sock, self._program = enter(resolve(self._target))
                except SshFailure as err:
                    text = f"through {self._target.host}: {err.text}"
                    raise SshFailure(err.kind, text, err.fix, is_passing=err.is_passing) from err
            return self._connection

    def close(self) -> None:
        if self._connection is not None:
            _shut(self._sock)
            self._connection.client.close()
            self._sock.close()
        if self._program is not None:
            self._program.end()


@contextlib.contextmanager
def _held(lock: threading.Lock | threading.BoundedSemaphore, abort: Abort) -> Iterator[None]:
    while not lock.acquire(timeout=_POLL_S):
        abort.check()
    try:
        yield
    finally:
        lock.release()


def _shut(sock: Any) -> None:
    from distrun.ssh.fabric_link import shut

    shut(sock)


def connect(where: Where, family: str, limit_s: float, abort: Abort) -> socket.socket:
    """Return a socket connected to `where`, its addresses tried in turn.

    Raises:
        SshFailure: there is no such name, or no answer.
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

    def look(flags: int = 0) -> None:
        name = where.address or where.host
        try:
            rows = socket.getaddrinfo(name, where.port, family, socket.SOCK_STREAM, flags=flags)
            found.extend(dict.fromkeys((row[0], row[4]) for row in rows))
        except (OSError, UnicodeError) as err:
            failed.append(err if isinstance(err, OSError) else socket.gaierror(str(err)))

    look(socket.AI_NUMERICHOST)
    if not found:  # it is no address
        failed.clear()
        looking = threading.Thread(target=look, name=f"look up {where.host}", daemon=True)
        looking.start()
        while looking.is_alive():
            looking.join(_POLL_S)
            abort.check()
            if looking.is_alive() and time.monotonic() >= until:
                raise timeout(where, "get an address from the name service")
    if failed:
        raise classify(failed[0], where)
    return found


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
            while not poll.poll(_POLL_S * 1000):
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
