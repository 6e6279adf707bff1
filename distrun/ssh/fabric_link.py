"""The transport by fabric and paramiko: one connection a host, no process, no program needed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import fabric
import paramiko
from paramiko.ssh_exception import SSHException

from distrun.ssh import failure, known_hosts
from distrun.ssh.ask import Abort, Aborted
from distrun.ssh.failure import LastLines, SshFailure, classify
from distrun.ssh.login import Login, TooManyTries, strategy
from distrun.ssh.openssh import ProxyProgram
from distrun.ssh.resolve import Resolved

AUTH_S = 30.0
"""How long a host may think about one proof of who we are."""
OPEN_S = 30.0
"""How long it may take to start a command."""
KEEPALIVE_S = 15
WINDOW = 4 * 1024 * 1024
"""Bytes of a task's output that may be on their way to us."""
_READ_SIZE = 256 * 1024
_WRITE_SIZE = 32 * 1024
_WAIT_S = 1.0
Warn = Callable[[str], None]
_RSA = ("rsa-sha2-512", "rsa-sha2-256")

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what it has to say, we say


class _Policy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko has no types
    """Checks every host key by the user's files; paramiko's own books stay empty."""

    def __init__(self, resolved: Resolved, warn: Warn) -> None:
        self._resolved = resolved
        self._warn = warn

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        known_hosts.check_host_key(self._resolved, key.get_name(), key.asbytes(), key.get_base64(), self._warn)


def log_in(resolved: Resolved, sock: Any, login: Login, abort: Abort, warn: Warn) -> fabric.Connection:
    """Return a connection over `sock` in which the user is logged in. `sock` is closed if that fails.

    Raises:
        SshFailure: the host is not the one it should be, or does not let the user in.
        TooManyTries: there are more keys to offer, over another connection.
        Aborted: it was given up.
    """
    config = fabric.Config(
        ssh_config=paramiko.SSHConfig(),
        overrides={"load_ssh_configs": False, "authentication": {"strategy_class": strategy(login)}},
        lazy=True,
    )
    connection = fabric.Connection(
        resolved.hostname,
        user=resolved.user,
        port=resolved.port,
        config=config,
        forward_agent=resolved.forward_agent,
        connect_timeout=max(1, round(resolved.connect_s)),
        connect_kwargs={
            "sock": sock,
            "banner_timeout": resolved.connect_s,
            "auth_timeout": AUTH_S,
            "channel_timeout": OPEN_S,
            "transport_factory": lambda sock, disabled_algorithms=None: _transport(resolved, sock),
        },
    )
    connection.client.set_missing_host_key_policy(_Policy(resolved, warn))
    try:
        with abort.calling(lambda: shut(sock)):
            connection.open()
    except (SshFailure, TooManyTries, Aborted):
        _drop(connection, sock)
        raise
    except (SSHException, OSError, EOFError, ValueError) as err:
        _drop(connection, sock)
        raise classify(err, resolved.where) from err
    connection.transport.set_keepalive(KEEPALIVE_S)
    return connection


def _transport(resolved: Resolved, sock: Any) -> Any:
    transport = paramiko.Transport(sock, default_window_size=WINDOW)
    transport.handshake_timeout = resolved.connect_s
    found = known_hosts.read([*resolved.user_known_hosts, *resolved.global_known_hosts])
    wanted: list[str] = []
    for kind in known_hosts.recorded_kinds(found, resolved.known_name):
        wanted += _RSA if kind == "ssh-rsa" else (kind,)
    security = transport.get_security_options()
    usual = list(security.key_types)
    first = [kind for kind in wanted if kind in usual]
    security.key_types = [*first, *(kind for kind in usual if kind not in first)]
    return transport


def shut(sock: Any) -> None:
    """Wake the threads that wait for a socket, or for a channel used as one; does not wait."""
    with contextlib.suppress(OSError, EOFError, SSHException):
        sock.shutdown(socket.SHUT_RDWR)


def _drop(connection: Any, sock: Any) -> None:
    with contextlib.suppress(SSHException, OSError, EOFError):
        connection.client.close()
    with contextlib.suppress(OSError, EOFError, SSHException):
        sock.close()


def tunnel(jump: fabric.Connection, resolved: Resolved) -> Any:
    """Return a channel through `jump` to the host, as a socket.

    Raises:
        SshFailure: the host in between cannot reach it.
    """
    try:
        return jump.transport.open_channel(
            "direct-tcpip", (resolved.hostname, resolved.port), ("127.0.0.1", 0), timeout=resolved.connect_s
        )
    except (SSHException, OSError, EOFError) as err:
        if not jump.transport.is_active():
            raise failure.unreachable(resolved.where, "the host in between is gone") from err
        why = getattr(err, "text", "") or str(err)
        raise failure.unreachable(resolved.where, f"{why.lower()}, through {resolved.jump}") from err


class FabricLink:
    """A command on a host, over a connection of its own."""

    def __init__(
        self,
        resolved: Resolved,
        connection: fabric.Connection,
        sock: Any,
        command: str,
        program: ProxyProgram | None = None,
    ) -> None:
        self._resolved = resolved
        self._connection = connection
        self._sock = sock
        self._program = program
        self._last_lines = LastLines()
        # Paramiko waits for the answer to "exec" without a limit.
        late = threading.Timer(OPEN_S, shut, (sock,))
        late.daemon = True
        late.start()
        try:
            self._channel = connection.create_session()
            self._channel.exec_command(command)
        except (SSHException, OSError, EOFError) as err:
            self._end()
            raise classify(err, resolved.where) from err
        finally:
            late.cancel()
        self._channel.settimeout(_WAIT_S)

    def read(self) -> bytes | None:
        """Return what its stdout says next."""
        try:
            data: bytes = self._channel.recv(_READ_SIZE)
        except TimeoutError:
            return None
        finally:
            self._read_stderr()
        return data

    def write(self, data: bytes) -> int:
        """Write to its stdin."""
        try:
            sent = int(self._channel.send(data[:_WRITE_SIZE]))
        except TimeoutError:
            return 0
        except (SSHException, EOFError) as err:
            raise BrokenPipeError(str(err)) from err
        if sent == 0:
            raise BrokenPipeError("the connection is closed")
        return sent

    def end_input(self) -> None:
        """Close its stdin."""
        with contextlib.suppress(OSError, EOFError, SSHException):
            self._channel.shutdown_write()

    def kill(self) -> None:
        """Cut the connection; paramiko's thread sees that and ends."""
        shut(self._sock)

    def finish(self) -> str:
        """Close the connection; return the last lines of stderr."""
        self._read_stderr()
        self._end()
        return self._last_lines.text

    def explain(self, stderr: str, stdout: str) -> SshFailure:
        """Return why there was no agent."""
        return failure.no_agent(self._resolved.where, stderr, stdout)

    def _read_stderr(self) -> None:
        while self._channel.recv_stderr_ready():
            self._last_lines.feed(self._channel.recv_stderr(_READ_SIZE))

    def _end(self) -> None:
        with contextlib.suppress(SSHException, OSError, EOFError):
            self._connection.close()
        _drop(self._connection, self._sock)
        if self._program is not None:
            self._program.end()
