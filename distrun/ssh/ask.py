"""Gives up a connection at once, and asks the user for what it needs to log in: what connections wait for.

Whatever a connection waits for registers how it is woken when the connection is given up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import select
import termios
import threading
import time
from collections.abc import Callable, Iterator


class Aborted(Exception):
    """The connection is not wanted any more."""


class Abort:
    """Set once, from any thread; wakes all waiting threads."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it was given up."""
        return self._event.is_set()

    def now(self) -> None:
        """Give up. What is registered is called in this thread and must not wait."""
        with self._lock:
            self._event.set()
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def wait(self, seconds: float) -> None:
        """Sleep so long.

        Raises:
            Aborted: it was given up before or meanwhile.
        """
        if self._event.wait(seconds):
            raise Aborted

    def check(self) -> None:
        """Raise Aborted if it was given up."""
        if self._event.is_set():
            raise Aborted

    def on(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when it is given up: now, if it was already."""
        with self._lock:
            if not self._event.is_set():
                self._wakers.append(wake)
                return
        wake()

    @contextlib.contextmanager
    def calling(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called if it is given up within the block; then the block ends with Aborted."""
        self.on(wake)
        try:
            yield
        except Exception:
            self.check()
            raise
        finally:
            with self._lock:
                if wake in self._wakers:
                    self._wakers.remove(wake)
        self.check()


# Prompts for passwords and passphrases on the user's terminal. What is typed is kept in memory only, for one launch.


TERMINAL = "/dev/tty"
LIMIT_S = 60.0
"""How long an answer is waited for."""
TRIES = 3
"""How often one question is asked: a typing error gets another chance."""
_POLL_S = 0.2


Read = Callable[[str, float, Callable[[], None]], "str | None"]
"""Gives the answer to a prompt within so many seconds, or None; calls its third argument again and again, which raises
`Aborted` when no answer is wanted any more."""


class Asker:
    """Asks one question at a time, each once for all hosts. Of any thread's use."""

    def __init__(self, terminal: str = TERMINAL, limit_s: float = LIMIT_S) -> None:
        self._read: Read = functools.partial(read_secret, terminal)
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._answers: dict[str, str] = {}
        self._asked: dict[str, int] = {}
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Asker({len(self._answers)} answers)"

    def by(self, read: Read) -> None:
        """Have another than this process's terminal read the answers."""
        self._read = read

    def recall(self, about: str) -> str | None:
        """Return the answer about something, if there was one; does not ask. It may have been a wrong one."""
        return self._answers.get(about)

    def ask(self, about: str, prompt: str, abort: Abort, refused: str | None = None) -> str | None:
        """Return the answer to `prompt`, from memory if `about` was answered before.

        Args:
            about: what it is the answer for, `password of ubuntu`.
            prompt: what the terminal shows.
            abort: gives up.
            refused: an answer that was tried and is wrong.

        Returns:
            None if there is no terminal, no answer in time, or it was asked TRIES times.

        Raises:
            Aborted: it was given up.
        """
        while not self._lock.acquire(timeout=_POLL_S):
            abort.check()
        try:
            abort.check()
            known = self._answers.get(about)
            if known is not None and known != refused:
                return known
            if self._is_closed or self._asked.get(about, 0) >= TRIES:
                return None
            self._asked[about] = self._asked.get(about, 0) + 1
            said = "" if refused is None else "Not accepted; please try again.\r\n"
            answer = self._read(said + prompt, self._limit_s, abort.check)
            if answer is None:
                self._is_closed = True  # no user is there: the other hosts do not wait for an answer
            else:
                self._answers[about] = answer
            return answer
        finally:
            self._lock.release()


def read_secret(terminal: str, prompt: str, limit_s: float, check: Callable[[], None]) -> str | None:
    """Return a line typed at the terminal, which does not show it; None: no terminal of ours, or no answer.

    Raises:
        Aborted: it was given up.
    """
    try:
        fd = os.open(terminal, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if not _is_in_front(fd):
            return None
        before = termios.tcgetattr(fd)
        silent = list(before)
        silent[3] &= ~(termios.ECHO | termios.ECHOE | termios.ECHOK)

        def restore() -> None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(fd, termios.TCSANOW, before)

        atexit.register(restore)  # this thread does not outlive the process; a terminal without echo would
        try:
            termios.tcsetattr(fd, termios.TCSAFLUSH, silent)
            os.write(fd, prompt.encode())
            return _line(fd, limit_s, check)
        finally:
            restore()
            atexit.unregister(restore)
            with contextlib.suppress(OSError):
                os.write(fd, b"\r\n")
    except (termios.error, OSError):
        return None
    finally:
        os.close(fd)


def _is_in_front(fd: int) -> bool:
    """Return whether this process may read the terminal; one in the background would be stopped."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return os.isatty(fd)


def _line(fd: int, limit_s: float, check: Callable[[], None]) -> str | None:
    until = time.monotonic() + limit_s
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    typed = b""
    while time.monotonic() < until:
        check()
        if not poll.poll(_POLL_S * 1000):
            continue
        piece = os.read(fd, 1024)
        if not piece:
            return None
        typed += piece
        line, newline, _ = typed.partition(b"\n")
        if newline:
            return line.decode("utf-8", "replace").rstrip("\r")
    return None
