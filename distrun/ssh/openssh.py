"""The transport by the `ssh` program: a child process with three pipes, for what paramiko cannot do."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
from typing import IO

from distrun.ssh.child import Child, read_rest
from distrun.ssh.failure import OTHER, SshFailure, classify, no_agent, proxy_failed
from distrun.ssh.link import LastWords
from distrun.ssh.program import PROGRAM
from distrun.ssh.resolve import Resolved, shell

OWN_FAILURE = 255
"""Exit code of the program when it failed itself; also, alas, of a command that said 255."""
END_S = 1.0
"""How long the program may take to end after its output has."""
_READ_SIZE = 256 * 1024
_GLANCE_MS = 1000


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
            raise SshFailure(OTHER, "cannot run %s: %s" % (PROGRAM, err.strerror), "install OpenSSH") from err
        self._child = Child(popen)
        self._in, self._out, self._err = (_pipe(each) for each in (popen.stdin, popen.stdout, popen.stderr))
        os.set_blocking(self._in.fileno(), False)
        self._writing = threading.Lock()
        self._words = LastWords()
        self._poll = select.poll()
        for pipe in (self._out, self._err):
            self._poll.register(pipe, select.POLLIN)

    def read(self) -> bytes | None:
        """Return what its stdout says next."""
        for fd, _ in self._poll.poll(_GLANCE_MS):
            if fd == self._err.fileno():
                self._hear()
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
            if not poll.poll(_GLANCE_MS):
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
        self._child.kill()

    def finish(self) -> str:
        """Wait a moment for the program's end, then make it end; return its last words."""
        self._child.end(END_S)
        self.end_input()  # only now: whoever is writing is woken by the program's end
        # Not to its end: a master connection that it left behind (ControlPersist) holds it open.
        self._words.feed(read_rest(self._err, END_S))
        self._out.close()
        self._err.close()
        return self._words.text

    def explain(self, words: str, noise: str) -> SshFailure:
        """Return why there was no agent: by what the program said if it failed itself, else by what the host said."""
        found = no_agent(self._resolved.where, words, noise)
        if found.kind == OTHER and self._child.code == OWN_FAILURE:
            found = classify(words, self._resolved.where)
            if self._resolved.proxy_command and found.is_passing:
                return proxy_failed(self._resolved.where, words)
        return found

    def _hear(self) -> bool:
        data = os.read(self._err.fileno(), _READ_SIZE)
        self._words.feed(data)
        if not data:
            with contextlib.suppress(KeyError):
                self._poll.unregister(self._err)
        return bool(data)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None  # asked for above
    return pipe
