"""Connects the agents of a launch by ssh, and carries what they and the coordinator say.

A `Connector` opens the connections of a launch: not too many at a time, with one memory for keys, passwords and jump
hosts. An `SshChannel` is the coordinator's channel to the agent on one host, over one connection after another.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from distrun.ssh.ask import Abort, Aborted, Asker
from distrun.ssh.failure import (
    BUSY,
    SshFailure,
    Where,
    classify,
    proxy_failed,
    timeout,
    too_many_jumps,
    too_many_keys,
    unforeseen,
)
from distrun.ssh.openssh import OpensshLink, ProxyProgram
from distrun.ssh.resolve import GONE, JUMPS, OPENSSH, RELAY, Resolved, Target, hop, many, remote_command, resolve
from distrun_runtime.contract import session
from distrun_runtime.contract.agent_messages import StartFailed, Warned
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator.channel import ByteStream, Greeting, Put, SessionChannel
from distrun_runtime.errors import WireError

if TYPE_CHECKING:
    import fabric

    from distrun.ssh.login import KeyCache, Login

WINDOW = 32
"""Connections that are being made at a time."""
WINDOW_A_SSHD = 8
"""The same for one sshd (several names, or a jump host); from 10 on it drops some by default (MaxStartups)."""
LOGINS = 4
"""Connections that the keys of one user are spread over, if the host hangs up after some."""
RETRIES = 3
"""Further attempts where the host dropped the connection before the key exchange."""
TURN_S = 15.0
"""An agent that has not greeted by then (a slow disk, a shell that waits) does not hold up other hosts any more."""
PAUSE_S = 0.5
"""Before the first further attempt, give or take half; doubled each time."""
PAUSE_LIMIT_S = 5.0
"""The longest pause while an agent is dialled again."""
SILENCE = 3
"""A connection is given up for another one when nothing came for this part of the lease."""
_POLL_S = 0.2
CHANCE = random.SystemRandom()
"""Spreads pauses. The numbers of `random` itself are the program's that uses distrun, which may have given a seed."""
_FAMILIES = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}


class Link(ByteStream, Protocol):
    """One command on one host. `finish` returns the last lines of its stderr."""

    def explain(self, stderr: str, stdout: str) -> SshFailure:
        """Return why there was no agent, after `finish`, from what it wrote to stderr and stdout."""


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

    def open(self, target: Target, command: str, abort: Abort, warn: Callable[[str], None] = lambda text: None) -> Link:
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
                        raise (proxy_failed(resolved.where, stderr) if stderr and err.kind == BUSY else err) from err
                    abort.check()
        raise too_many_keys(resolved.where)

    def _reach(
        self, resolved: Resolved, abort: Abort, warn: Callable[[str], None], depth: int
    ) -> tuple[Any, ProxyProgram | None]:
        if resolved.jump:
            from distrun.ssh import fabric_link

            if depth >= JUMPS:
                raise too_many_jumps(resolved.where.host, JUMPS)
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
                    raise SshFailure(err.kind, text, err.fix) from err
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


# The coordinator's channel to an agent on another host.


class SshChannel(SessionChannel):
    """One host: connects, starts the agent, and carries frames. Two threads of its own, one reads and one writes.

    If the agent holds, it is dialled again when its connection is cut, until it leaves or the channel is killed.

    Args:
        host: `Host.name` of the plan.
        target: how it is reached.
        command: starts the agent there.
        program: what the agent reads first.
        connector: shared by the channels of a launch.
        holds_s: how long the agent goes on without a connection; 0: its end is the agent's.
    """

    def __init__(
        self, host: str, target: Target, command: str, program: bytes, connector: Connector, *, holds_s: float = 0.0
    ) -> None:
        super().__init__(host, holds=holds_s > 0)
        self._silence_s = holds_s / SILENCE if holds_s else math.inf
        self._key = secrets.token_hex(32) if holds_s else ""
        self._target = target
        self._command = command
        self._program = program
        self._connector = connector
        self._abort = Abort()
        self._ended = False
        self._reader: threading.Thread | None = None

    @property
    def ended_well(self) -> bool:
        """Nothing can be left on the host: no agent was given work there, or agent and guard have ended by themselves.

        What tells is the end of the connection: the guard holds it open until it has ended.
        """
        return not (self.inlet.greeted and self.was_used) or self._ended

    @property
    def holds(self) -> bool:
        """Whether the agent can be reached again when this connection ends."""
        return super().holds and bool(self.waiting_at)

    def send(self, frame: Frame) -> None:
        """Send a frame. The agent is told by what it will know another connection."""
        if self._key and frame.type == "begin":
            frame = Frame(dict(frame.header, resume_key=self._key), frame.body)
        super().send(frame)

    def start(self, put: Put) -> None:
        """Connect, in a thread of its own."""
        super().start(put)
        self._reader = threading.Thread(target=self._run, name=f"ssh {self.host}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Close the agent's input when everything before is written; with nothing to write, stop connecting."""
        super().close()
        if self.is_idle:
            self._abort.now()

    def kill(self) -> None:
        """Cut the connection, or stop making it. The agent sees the end of its input."""
        super().kill()
        self._abort.now()

    def join(self, limit_s: float) -> bool:
        """Wait, at most so long, until the connection has ended; return whether it has."""
        if self._reader is not None:
            self._reader.join(max(limit_s, 0.0))
        return self._reader is None or not self._reader.is_alive()

    def _run(self) -> None:
        pause_s = PAUSE_S
        for attempt in range(RETRIES + 1):
            try:
                self._serve()
                break
            except Aborted:
                self._say(StartFailed(self.host, "it was given up before its agent had answered", time.time()))
                return
            except Exception as err:  # whatever it is, the job must hear of it
                err = err if isinstance(err, SshFailure) else unforeseen(err)
                if err.kind != BUSY or attempt == RETRIES or self._abort.is_set:
                    event = StartFailed(self.host, err.text, time.time(), kind=err.kind, fix=err.fix)
                    self._say(event)
                    return
            try:
                self._abort.wait(pause_s * CHANCE.uniform(0.5, 1.5))
            except Aborted:
                continue
            pause_s *= 2
        self._redial()

    def _serve(self) -> None:
        """Make one connection and serve it to its end.

        Raises:
            SshFailure: there is no agent.
            Aborted: it was given up.
        """
        self._abort.check()
        self.restart()
        with contextlib.ExitStack() as turn:
            turn.enter_context(self._connector.turn(self._abort))
            link = self._connector.open(
                self._target, self._command, self._abort, lambda text: self._say(Warned(self.host, text))
            )
            if self.is_killed:
                link.finish()
                raise Aborted
            turn_until = time.monotonic() + TURN_S

            def check() -> None:
                if self.inlet.greeted or time.monotonic() >= turn_until:
                    turn.close()
                self._check_silence()

            try:
                reason = self.serve(link, self._program, check=check)
            except Exception as err:
                reason = unforeseen(err).text
        self._end(link, reason)

    def _check_silence(self) -> None:
        """Give up a connection that brings nothing, where another can be made: it may be cut where we do not see it."""
        silence_s = time.monotonic() - self.heard_at
        if silence_s >= self._silence_s and self.holds:
            raise OSError(f"nothing came for {silence_s:.0f} s")

    def _redial(self) -> None:
        """Make one connection after another while the agent holds."""
        pause_s = PAUSE_S
        is_cut = False
        with contextlib.suppress(Aborted):
            while self.holds:
                is_cut = True
                self._abort.wait(pause_s * CHANCE.uniform(0.75, 1.25))
                is_cut = not self._return()
                pause_s = min(2 * pause_s, PAUSE_LIMIT_S) if is_cut else PAUSE_S
        if is_cut:
            self.ended("it was given up while its connection was cut", when=time.time())

    def _return(self) -> bool:
        """Make one connection to the agent that waits, and serve it to its end; return whether one could be made.

        It is also True if there is no agent any more. What followed was put.

        Raises:
            Aborted: it was given up.
        """
        command = remote_command(RELAY, self._target.python, [self.waiting_at])
        with self._connector.turn(self._abort):
            try:
                link = self._connector.open(self._target, command, self._abort)
            except Aborted:
                raise
            except Exception:  # whatever it is this time, the next time may be another
                return False
            ahead, fault = b"", ""
            try:
                ahead = prove(link, self._key, TURN_S, self._abort)
            except Exception as err:
                fault = str(err) or type(err).__name__
        if fault:
            words = link.finish()
            self._abort.check()
            if GONE in words:
                self.is_over = True
                self.ended("its agent ended while its connection was cut", when=time.time())
                return True
            return False
        try:
            reason = self.serve(link, ahead=ahead, check=self._check_silence)
        except Exception as err:
            reason = unforeseen(err).text
        self._end(link, reason)
        return True

    def _end(self, link: Link, reason: str) -> None:
        now = time.time()
        was_ours = self.is_killed
        words = link.finish()
        if not self.inlet.greeted:
            if was_ours:
                raise Aborted
            raise link.explain(words, self.inlet.noise)
        # After `bye` only the end of the connection tells of the guard's, and we cut it. Who refused started nothing.
        self._ended = self.inlet.is_leaving and (not was_ours or not self.inlet.said_bye or self.inlet.has_refused)
        if not self.holds:
            self.close()
        self.ended(reason, words, now)


def prove(link: Link, key: str, limit_s: float, abort: Abort) -> bytes:
    """Prove over a relay that we know the key of the session, and check that its agent does; return what came after.

    Raises:
        WireError: it is not our agent, or it did not answer within `limit_s`.
        OSError: the connection broke.
        Aborted: it was given up.
    """
    until = time.monotonic() + limit_s
    greeting = Greeting()

    def read() -> bytes:
        data = link.read()
        abort.check()
        if data == b"":
            raise EOFError("the relay ended")
        if not data and time.monotonic() >= until:
            raise WireError("its agent does not answer")
        return data or b""

    rest = None
    while rest is None:
        rest = greeting.feed(read())
    nonce = secrets.token_hex(16)
    proof = session.proof(key, session.COORDINATOR, greeting.nonce, nonce)
    data = session.encode({"type": "prove", "nonce": nonce, "proof": proof})
    while data:
        data = data[link.write(data) :]
        abort.check()
    frame, rest = session.first(rest)
    while frame is None:
        frame, rest = session.first(rest + read())
    given = str(frame.header.get("proof", ""))
    if not session.is_proof(given, key, session.AGENT, greeting.nonce, nonce):
        raise WireError("it is not the agent of this job that answers")
    return rest
