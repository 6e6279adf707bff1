"""Opens connections for one launch: not too many at a time, with one memory for keys, passwords and jump hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from distrun.ssh import dial
from distrun.ssh.abort import Abort, Aborted
from distrun.ssh.ask import Asker
from distrun.ssh.failure import OTHER, SshFailure, proxy_failed, too_many_keys
from distrun.ssh.link import Link
from distrun.ssh.openssh import OpensshLink
from distrun.ssh.resolve import JUMPS, Resolved, hop, many, resolve
from distrun.ssh.target import OPENSSH, Target

if TYPE_CHECKING:
    import fabric

    from distrun.ssh.login import KeyRing, Login

WINDOW = 32
"""Connections that are being made at a time."""
WINDOW_A_SSHD = 8
"""The same for one sshd (several names, or a jump host); from 10 on it drops some by default (MaxStartups)."""
LOGINS = 4
"""Connections that the keys of one user are spread over, if the host hangs up after some."""
_GLANCE_S = 0.2


def _ignore(text: str) -> None:
    pass


class Connector:
    """What the connections of one launch share. Of any thread's use."""

    def __init__(self, asker: Asker | None = None) -> None:
        self.asker = asker or Asker()
        """Knows what the user typed."""
        self._window = threading.BoundedSemaphore(WINDOW)
        self._lock = threading.Lock()
        self._doors: dict[tuple[str, int], threading.BoundedSemaphore] = {}
        self._ring: KeyRing | None = None
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
        with _held(self._door(resolved), abort):
            for _ in range(LOGINS):
                # Before the libraries are imported: the hosts set to work in the tenth of a second that this takes.
                sock, program = self._reach(resolved, abort, warn, depth)
                from distrun.ssh import fabric_link
                from distrun.ssh.login import Login, ThrownOut

                login = login or Login(resolved, self._keys(), self.asker, abort)
                try:
                    return fabric_link.log_in(resolved, sock, login, abort, warn), sock, program
                except (ThrownOut, Aborted, SshFailure) as err:
                    words = program.end() if program is not None else ""
                    if isinstance(err, SshFailure):
                        raise (proxy_failed(resolved.where, words) if words and err.is_passing else err) from err
                    abort.check()
        raise too_many_keys(resolved.where)

    def _reach(
        self, resolved: Resolved, abort: Abort, warn: Callable[[str], None], depth: int
    ) -> tuple[Any, dial.Program | None]:
        if resolved.jump:
            from distrun.ssh import fabric_link

            if depth >= JUMPS:
                raise SshFailure(OTHER, "more than %d hosts in between (ProxyJump in a circle?)" % JUMPS)
            jump = self._jump(hop(resolved)).get(lambda way: self._enter(way, abort, warn, depth + 1), abort)
            return fabric_link.tunnel(jump, resolved), None
        if resolved.proxy_command:
            program = dial.Program(resolved.proxy_command)
            return program.sock, program
        return dial.connect(resolved.where, resolved.family, resolved.connect_s, abort), None

    def _jump(self, target: Target) -> _Jump:
        with self._lock:
            return self._jumps.setdefault(target, _Jump(target))

    def _door(self, resolved: Resolved) -> threading.BoundedSemaphore:
        with self._lock:
            key = (resolved.hostname, resolved.port)
            return self._doors.setdefault(key, threading.BoundedSemaphore(WINDOW_A_SSHD))

    def _keys(self) -> KeyRing:
        from distrun.ssh.login import KeyRing

        with self._lock:
            self._ring = self._ring or KeyRing()
            return self._ring


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
                    text = "through %s: %s" % (self._target.host, err.text)
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
    while not lock.acquire(timeout=_GLANCE_S):
        abort.check()
    try:
        yield
    finally:
        lock.release()


def _shut(sock: Any) -> None:
    from distrun.ssh.fabric_link import shut

    shut(sock)
