"""Connections that a program makes: the `ssh` program, for what paramiko cannot do, and a ProxyCommand of the user's.

Each program runs in a session of its own, and is ended with whatever it has started.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from typing import IO

from distrun.ssh.failure import BUSY, OTHER, LastLines, SshFailure, classify, no_agent, proxy_failed
from distrun.ssh.resolve import PROGRAM, Resolved, shell

OWN_FAILURE = 255
"""Exit code of the program when it failed itself; a command that ended with 255 looks the same."""
END_S = 1.0
"""How long the program may take to end after its output has."""
KILLED_S = 5.0
"""How long a killed program may take to go; one that the system holds longer is left to it."""
_CHECK_S = 0.02
_READ_SIZE = 256 * 1024
_WAIT_MS = 1000


class Child:
    """A running program. It must have its own session (`start_new_session`), else `signal` does nothing.

    `signal` is for any thread.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self._reaping = threading.Lock()

    @property
    def code(self) -> int | None:
        """Its exit code; None before `end`."""
        return self._popen.returncode

    def signal(self, number: int = signal.SIGKILL) -> None:
        """Signal it and all in its process group; nothing once it was reaped, as its number may be another's then."""
        with self._reaping:
            if self._popen.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._popen.pid, number)

    def end(self, limit_s: float) -> None:
        """Wait for its end, at most so long; kill what is left of its group, and reap it."""
        until = time.monotonic() + limit_s
        while self.status() is None and time.monotonic() < until:
            time.sleep(_CHECK_S)
        self.signal()
        with self._reaping, contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(KILLED_S)

    def status(self) -> int | None:
        """Return its exit code, or the number of the signal that ended it, if possible without reaping it.

        None: it runs.
        """
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return None if ended is None else ended.si_status
        return self._popen.poll()


def read_rest(pipe: IO[bytes], limit_s: float = 1.0) -> bytes:
    """Return what a pipe holds, without waiting for its end: another process may hold it open for long."""
    found: list[bytes] = []
    until = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    with contextlib.suppress(OSError):
        while poll.poll(0) and time.monotonic() < until:
            data = os.read(pipe.fileno(), _READ_SIZE)
            if not data:
                break
            found.append(data)
    return b"".join(found)


class ProxyProgram:
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
                raise SshFailure(
                    OTHER, f"the ProxyCommand cannot be run: {err}", "correct it in ~/.ssh/config"
                ) from err

    def end(self) -> str:
        """Make sure that it ends; return the last line that it wrote to stderr."""
        self.sock.close()
        child, stderr = Child(self._child), self._child.stderr
        assert stderr is not None  # asked for above
        child.end(0.5)
        rest = b"" if stderr.closed else read_rest(stderr)
        lines = rest.decode("utf-8", "replace").strip().splitlines()
        stderr.close()
        return lines[-1] if lines else ""


class OpensshLink:
    """A command on a host, through the `ssh` program."""

    def __init__(self, resolved: Resolved, command: str) -> None:
        self._resolved = resolved
        argv = [*shell(resolved), "--", resolved.target.host, command]
        try:
            # A session of its own: a Ctrl-C at the terminal is the coordinator's business.
            popen = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as err:
            raise SshFailure(OTHER, f"cannot run {PROGRAM}: {err.strerror}", "install OpenSSH") from err
        self._child = Child(popen)
        self._in, self._out, self._err = (_pipe(each) for each in (popen.stdin, popen.stdout, popen.stderr))
        os.set_blocking(self._in.fileno(), False)
        self._writing = threading.Lock()
        self._last_lines = LastLines()
        self._poll = select.poll()
        for pipe in (self._out, self._err):
            self._poll.register(pipe, select.POLLIN)

    def read(self) -> bytes | None:
        """Return what its stdout says next."""
        for fd, _ in self._poll.poll(_WAIT_MS):
            if fd == self._err.fileno():
                self._read_stderr()
            else:
                return os.read(fd, _READ_SIZE)
        return None

    def write(self, data: bytes) -> int:
        """Write to its stdin."""
        with self._writing:
            if self._in.closed:
                raise BrokenPipeError("it takes no more input")
            poll = select.poll()
            poll.register(self._in, select.POLLOUT)
            if not poll.poll(_WAIT_MS):
                return 0
            try:
                return os.write(self._in.fileno(), data)
            except BlockingIOError:
                return 0

    def end_input(self) -> None:
        """Close its stdin."""
        with self._writing, contextlib.suppress(OSError):
            self._in.close()

    def kill(self) -> None:
        """Kill the program and what it has started; the agent sees the end of its input."""
        self._child.signal()

    def finish(self) -> str:
        """Wait a moment for the program's end, then make it end; return the last lines of its stderr."""
        self._child.end(END_S)
        self.end_input()  # only now: a writing thread is woken by the program's end
        # Not to its end: a master connection that it left behind (ControlPersist) holds it open.
        self._last_lines.feed(read_rest(self._err, END_S))
        self._out.close()
        self._err.close()
        return self._last_lines.text

    def explain(self, stderr: str, stdout: str) -> SshFailure:
        """Return why there was no agent: by what the program said if it failed itself, else by what the host said."""
        found = no_agent(self._resolved.where, stderr, stdout)
        if found.kind == OTHER and self._child.code == OWN_FAILURE:
            found = classify(stderr, self._resolved.where)
            if self._resolved.proxy_command and found.kind == BUSY:
                return proxy_failed(self._resolved.where, stderr)
        return found

    def _read_stderr(self) -> None:
        data = os.read(self._err.fileno(), _READ_SIZE)
        self._last_lines.feed(data)
        if not data:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._err)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # asked for above
    return pipe
