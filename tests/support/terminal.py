"""A terminal, and somebody who types."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from slowness import scaled

WAIT_S = scaled(60.0)


class Terminal:
    """A terminal, and somebody who types."""

    def __init__(self) -> None:
        self._ours, self._its = pty.openpty()
        self.path = os.ttyname(self._its)
        self.shown = ""

    def expect(self, text: str, times: int = 1) -> None:
        until = time.monotonic() + WAIT_S
        while self.shown.count(text) < times:
            assert time.monotonic() < until, self.shown
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_rest(self) -> str:
        while select.select([self._ours], [], [], 0.1)[0]:
            self.shown += os.read(self._ours, 4096).decode()
        return self.shown

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._its)


class Session:
    """A terminal with a process in a session of its own, as a shell's foreground job."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        leads: bool = True,
        *,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Start it.

        Arguments:
            leads: the process is the session's first; otherwise what it starts makes the session (`setsid --ctty`).
            size: columns and rows; None: the terminal does not say.
        """
        self._ours, its = pty.openpty()
        if size is not None:
            self.resize(*size)
        self.shown = ""
        # A read may end within a character; and Ctrl-Z drops what the terminal has not taken yet.
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=its,
            stdout=its,
            stderr=its,
            preexec_fn=_own_terminal if leads else os.setsid,  # noqa: PLW1509 - the job control of a shell
        )
        os.close(its)

    def expect(self, text: str, times: int = 1) -> None:
        until = time.monotonic() + WAIT_S
        while self.shown.count(text) < times:
            assert time.monotonic() < until, self.shown
            self._read(0.1)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def ends(self) -> int:
        until = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < until, self.shown
            self._read(0.05)
        while self._read(0.05):
            pass
        self.close()
        return self.process.returncode

    def _read(self, limit_s: float) -> bool:
        if not select.select([self._ours], [], [], limit_s)[0]:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # its last process has gone
            return False
        self.shown += self._characters.decode(data)
        return bool(data)

    def close(self) -> None:
        """Close the terminal: the kernel sends SIGHUP to what is left there."""
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def kill(self) -> None:
        """Close the terminal, and kill the process if it goes on."""
        self.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _own_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal."""
    given = Terminal()
    yield given
    given.close()
