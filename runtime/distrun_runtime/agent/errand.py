"""A program that the agent runs for itself before a job begins: watched by the loop, never waited for.

What it has to tell comes over a pipe of its own, whose number it is given; stdout and stderr are words for people.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

FD = b"@distrun-fd@"
"""In an argument of a command: the number of the pipe that its result goes to."""
SCRIPT = b"@distrun-script@"
"""In an argument of a command: the number of the descriptor that its script is read from."""
NOT_FOUND = "not found"
NOT_STARTED = "not started"
TIMED_OUT = "timed out"

RESULT_LIMIT = 8 * 1024 * 1024
WORDS_LIMIT = 4096
"""Bytes of the last words that are kept."""
GLANCE_S = 0.02
_READ_BYTES = 64 * 1024


class Command(NamedTuple):
    """What to run."""

    argv: Tuple[bytes, ...]
    """With FD where the number of the result's pipe belongs, SCRIPT where that of the script does."""
    env: Mapping[bytes, bytes]
    cwd: bytes
    """Empty: where the agent is."""
    limit_s: float
    script: bytes = b""
    """Text that no process list may show, with FD as in `argv`. It is read from a file without a name."""


class Done(NamedTuple):
    """How it ended."""

    code: Optional[int]
    """Exit code, or minus the signal's number; None: see `fault`."""
    result: bytes = b""
    words: str = ""
    """The end of what it printed; of one that could not be started, why."""
    fault: str = ""
    """NOT_FOUND: there is no such program. NOT_STARTED. TIMED_OUT: it was ended. Else empty."""

    @property
    def last_lines(self) -> str:
        """The last few lines of its words."""
        lines = [line.rstrip() for line in self.words.splitlines() if line.strip()]
        return "\n".join(lines[-10:])


def run(command: Command) -> Done:
    """Run a command and return how it ended. It blocks, at most as long as the command may take."""
    found: List[Done] = []
    with selectors.PollSelector() as selector:
        errand = Errand(command, selector, found.append)
        errand.start()
        while not found:
            for key, _ in selector.select(GLANCE_S):
                key.data()
            if time.monotonic() >= errand.deadline:
                errand.expire()
            else:
                errand.look()
    return found[0]


class Errand:
    """One run of a command. `on_done` is called once: from `reaped` or `expire`, or from `start` if it cannot start."""

    def __init__(self, command: Command, selector: selectors.BaseSelector, on_done: Callable[[Done], None]) -> None:
        self.deadline = time.monotonic() + command.limit_s
        self._command = command
        self._selector = selector
        self._on_done = on_done
        self._heard: Dict[int, bytearray] = {}
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._result = self._words = -1

    def start(self) -> None:
        """Start it."""
        command = self._command
        self._result, result = os.pipe()
        self._words, words = os.pipe()
        theirs = [result, words]
        try:
            script = self._script(result) if command.script else -1
            theirs += [script] if command.script else []
            own = b"%d" % script
            self._child = subprocess.Popen(
                [word.replace(FD, b"%d" % result).replace(SCRIPT, own) for word in command.argv],
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                pass_fds=[each for each in theirs if each != words],
                cwd=command.cwd or None,
                env=command.env,
                start_new_session=True,
            )
        except (OSError, ValueError) as err:
            os.close(self._result)
            os.close(self._words)
            fault = NOT_FOUND if is_missing(err, command.argv[0], command.env) else NOT_STARTED
            self._on_done(Done(None, words=str(err), fault=fault))
            return
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._result, self._words):
            os.set_blocking(descriptor, False)
            self._heard[descriptor] = bytearray()
            self._watch(descriptor)

    def _script(self, result: int) -> int:
        """Return a descriptor of the script, to be closed. Raises OSError."""
        import tempfile

        try:
            with tempfile.TemporaryFile() as file:
                file.write(self._command.script.replace(FD, b"%d" % result))
                file.seek(0)
                return os.dup(file.fileno())
        except FileNotFoundError as err:  # there is no folder for it; the program may well be there
            raise OSError(str(err)) from None

    def reaped(self, pid: int, status: int) -> None:
        """Take note of a child's end, if it is ours: what it left running in the background is not waited for."""
        if self._child is None or pid != self._child.pid:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        self._child.returncode = code  # Popen must not wait for it once more
        self._finish(code)

    def look(self) -> None:
        """Reap the child if it has ended, where no one else does."""
        if self._child is not None:
            pid, status = os.waitpid(self._child.pid, os.WNOHANG)
            if pid:
                self.reaped(pid, status)

    def expire(self) -> None:
        """Its time is over: end it and say so."""
        self.kill()
        self._finish(None, TIMED_OUT)

    def kill(self) -> None:
        """End it, and whatever it started that did not leave its group. Nothing is told."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def cancel(self) -> None:
        """End it without a word to anybody."""
        self.kill()
        self._close()

    def _finish(self, code: Optional[int], fault: str = "") -> None:
        if self._child is None:
            return
        for descriptor in list(self._heard):
            while self._read(descriptor):
                pass
        result, words = bytes(self._heard[self._result]), bytes(self._heard[self._words])
        self._close()
        self._on_done(Done(code, result, words.decode("utf-8", "replace"), fault))

    def _watch(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(descriptor))

    def _read(self, descriptor: int) -> bool:
        """Read once; return whether something was there."""
        heard = self._heard[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            return False
        if not data:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            return False
        heard += data
        if descriptor == self._words:
            del heard[:-WORDS_LIMIT]
        elif len(heard) > RESULT_LIMIT:
            self.kill()
            return False
        return True

    def _close(self) -> None:
        if self._child is None:
            return
        # Popen complains of a child that was not waited for; the agent's loop reaps it.
        self._child.returncode = self._child.returncode if self._child.returncode is not None else 0
        self._child = None
        for descriptor in self._heard:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            os.close(descriptor)


def is_missing(err: Exception, program: bytes, env: Mapping[bytes, bytes]) -> bool:
    """Return whether a program could not be started because it is in no folder of PATH.

    A folder of PATH that may not be entered makes the system say "permission denied" of a program that is nowhere.
    """
    if not isinstance(err, PermissionError) or b"/" in program:
        return isinstance(err, FileNotFoundError)
    folders = env.get(b"PATH", os.fsencode(os.defpath)).split(b":")
    return not any(os.path.exists(os.path.join(folder, program)) for folder in folders)
