"""Reaches the host of a job's coordinator by the `ssh` program: commands there, and a relay to the control socket.

`ssh HOST` runs a few lines of Python there that connect its standard streams to the socket. An sshd that has too many
logins at a time drops new connections before it has said a word (MaxStartups, by default some from the tenth on).
`is_dropped` recognizes that, and `pauses` says how long to wait between attempts.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO

from distrun.ssh.failure import LastLines, Where, classify

ANSWER_S = 10.0
"""How long a host may take to answer."""
ALIVE_S = 5
ALIVE_COUNT = 3
END_S = 5.0
"""How long the end of the ssh program is awaited."""
RETRY_S = 30.0
"""How long all pauses between attempts take, when a host drops connections."""
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 4.0
IGNORING_KEYS = 'trap "" INT QUIT TSTP; exec "$@"'
"""Shell text that runs a program to which the terminal's keys mean nothing: they are for us."""
OWN_FAILURE = 255
"""Exit code of the ssh program when it failed itself."""
NOBODY = 3
"""Exit code of the relay: nobody listens at the socket."""
RELAY = f"""
import os, socket, sys, threading
peer = socket.socket(socket.AF_UNIX)
try:
    peer.connect(sys.argv[1])
except OSError as err:
    sys.exit({NOBODY})
def copy(read, write, end):
    try:
        while True:
            data = read(65536)
            if not data:
                break
            while data:
                data = data[write(data):]
    except OSError:
        pass
    end()
def leave():
    os._exit(0)
threading.Thread(target=copy, args=(lambda n: os.read(0, n), peer.send, leave), daemon=True).start()
copy(peer.recv, lambda data: os.write(1, data), leave)
"""


def ssh_argv(login: str, command: str, connect_s: float = ANSWER_S, may_ask: bool = True) -> list[str]:
    """Return how to run a command on a host whose loss is noticed within ALIVE_S * ALIVE_COUNT seconds. Pure.

    Args:
        login: what a user types before a command to run it there: `ssh -p 2222 ann@d1`.
        command: for the login shell there.
        connect_s: how long connecting may take, whole seconds.
        may_ask: ssh may ask the user, for a password or about a host key.
    """
    program, *flags, host = shlex.split(login)
    limits = {"ConnectTimeout": connect_s, "ServerAliveInterval": ALIVE_S, "ServerAliveCountMax": ALIVE_COUNT}
    options = [word for name, value in limits.items() for word in ("-o", f"{name}={value:.0f}")]
    quiet = [] if may_ask else ["-o", "BatchMode=yes"]
    return [program, "-T", *options, *quiet, *flags, "--", host, command]


def is_dropped(code: int | None, said: str) -> bool:
    """Return whether a host dropped the connection because it has too many, so that it may take the next one.

    Args:
        code: exit code of the ssh program.
        said: what it wrote to stderr.
    """
    return code == OWN_FAILURE and classify(said, Where("")).is_passing


def pauses() -> Iterator[float]:
    """Give the seconds to wait before each further attempt; in all they are at most RETRY_S.

    They grow, and are random, so that many clients that were dropped together do not come back together.
    """
    import random  # only needed here, and its import takes long

    left_s, longest_s = RETRY_S, FIRST_PAUSE_S
    while left_s > 0:
        pause_s = min(left_s, random.uniform(longest_s / 2, longest_s))
        left_s -= pause_s
        longest_s = min(LONGEST_PAUSE_S, longest_s * 2)
        yield pause_s


def retried(attempt: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Return what an attempt comes to that the host did not drop, or, after RETRY_S, the last one.

    Args:
        attempt: runs the ssh program; returns its exit code and what it wrote to stderr.
    """
    left = pauses()
    while True:
        code, said = attempt()
        pause_s = next(left, None) if is_dropped(code, said) else None
        if pause_s is None:
            return code, said
        time.sleep(pause_s)


class Relay:
    """The `ssh` program, whose standard input and output are a connection to a socket on another host.

    What it writes to stderr goes to ours. Only how it says that the host dropped the connection is held until `show`:
    there may be another attempt, of which the user need not read. If ssh may not ask the user, nothing of it is shown.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, login: str, path: str, may_ask: bool = True) -> None:
        command = shlex.join(["python3", "-I", "-c", RELAY, path])
        argv = ["sh", "-c", IGNORING_KEYS, "sh", *ssh_argv(login, command, may_ask=may_ask)]
        self.socket, its = socket.socketpair()
        try:
            self._child = subprocess.Popen(argv, stdin=its.fileno(), stdout=its.fileno(), stderr=subprocess.PIPE)
        except OSError:
            self.socket.close()
            raise
        finally:
            its.close()
        assert self._child.stderr is not None  # asked for above
        self._last_lines = LastLines()
        self._held: list[bytes] | None = []
        self._is_shown = may_ask
        self._reader = threading.Thread(target=self._read, args=(self._child.stderr,), name="ssh-stderr", daemon=True)
        self._reader.start()

    def ended(self, limit_s: float) -> int | None:
        """Wait, at most so long, for its end; return its exit code, None if it goes on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(limit_s)
            self._reader.join(limit_s)  # a master connection that it left behind (ControlPersist) may hold stderr
        return self._child.returncode

    @property
    def said(self) -> str:
        """The last lines that it wrote to stderr."""
        return self._last_lines.text

    def show(self) -> None:
        """Hold nothing of what it says from now on, and show what was held."""
        held, self._held = self._held or [], None
        for line in held if self._is_shown else ():
            os.write(2, line)

    def close(self) -> None:
        """End it."""
        self._child.terminate()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _read(self, stderr: IO[bytes]) -> None:
        with stderr, contextlib.suppress(OSError):
            for line in stderr:
                self._last_lines.feed(line)
                if self._held is not None and classify(line.decode("utf-8", "replace"), Where("")).is_passing:
                    self._held.append(line)
                elif self._is_shown:
                    os.write(2, line)
