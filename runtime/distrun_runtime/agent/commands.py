"""Runs the agent's own commands (activation, checks of interpreters) without blocking its loop.

A command writes its result to a pipe whose number it is given. Its stdout and stderr are text for people.
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
TEXT_LIMIT = 4096
"""Bytes of the end of the text that are kept."""
POLL_S = 0.02
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
    prints_result: bool = False
    """Its result is what it writes to stdout."""


class CommandResult(NamedTuple):
    """How a command ended."""

    code: Optional[int]
    """Exit code, or minus the signal's number; None: see `fault`."""
    result: bytes = b""
    text: str = ""
    """The end of what it printed, or why it could not be started."""
    fault: str = ""
    """NOT_FOUND: there is no such program. NOT_STARTED. TIMED_OUT: it was killed. Else empty."""

    @property
    def last_lines(self) -> str:
        """The last few lines of its text."""
        return "\n".join(self._lines[-10:])

    @property
    def first_line(self) -> str:
        """The first line of its text; empty: it has none."""
        return "".join(self._lines[:1]).strip()

    @property
    def _lines(self) -> List[str]:
        return [line.rstrip() for line in self.text.splitlines() if line.strip()]


def run(command: Command) -> CommandResult:
    """Run a command and return how it ended. Waits for it, at most for its `limit_s`."""
    found: List[CommandResult] = []
    with selectors.PollSelector() as selector:
        running = RunningCommand(command, selector, found.append)
        running.start()
        while not found:
            for key, _ in selector.select(POLL_S):
                key.data()
            if time.monotonic() >= running.deadline:
                running.expire()
            else:
                running.look()
    return found[0]


class RunningCommand:
    """A command that runs. `on_done` is called once: by `reaped` or `expire`, or by `start` if it cannot start."""

    def __init__(
        self, command: Command, selector: selectors.BaseSelector, on_done: Callable[[CommandResult], None]
    ) -> None:
        self.deadline = time.monotonic() + command.limit_s
        self._command = command
        self._selector = selector
        self._on_done = on_done
        self._received: Dict[int, bytearray] = {}
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._result = self._text = -1

    def start(self) -> None:
        """Start it."""
        command = self._command
        self._result, result = os.pipe()
        self._text, text = os.pipe()
        theirs = [result, text]
        try:
            script = self._script(result) if command.script else -1
            theirs += [script] if command.script else []
            own = b"%d" % script
            self._child = subprocess.Popen(
                [word.replace(FD, b"%d" % result).replace(SCRIPT, own) for word in command.argv],
                stdin=subprocess.DEVNULL,
                stdout=result if command.prints_result else text,
                stderr=text,
                pass_fds=[each for each in theirs if each != text],
                cwd=command.cwd or None,
                env=command.env,
                start_new_session=True,
            )
        except (OSError, ValueError) as err:
            os.close(self._result)
            os.close(self._text)
            fault = NOT_FOUND if is_missing(err, command.argv[0], command.env) else NOT_STARTED
            self._on_done(CommandResult(None, text=getattr(err, "strerror", None) or str(err), fault=fault))
            return
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._result, self._text):
            os.set_blocking(descriptor, False)
            self._received[descriptor] = bytearray()
            self._watch(descriptor)

    def _script(self, result: int) -> int:
        """Return a descriptor of the script, to be closed. Raises OSError."""
        import tempfile  # only for scripts

        try:
            with tempfile.TemporaryFile() as file:
                file.write(self._command.script.replace(FD, b"%d" % result))
                file.seek(0)
                return os.dup(file.fileno())
        except FileNotFoundError as err:  # there is no folder for it; the program may well be there
            raise OSError(str(err)) from None

    def reaped(self, pid: int, status: int) -> None:
        """Note a child's end, if it is this command's. What it left in the background is not waited for."""
        if self._child is None or pid != self._child.pid:
            return
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        self._child.returncode = code  # Popen must not wait for it once more
        self._finish(code)

    def look(self) -> None:
        """Reap the child if it has ended, for a caller that reaps no children itself."""
        if self._child is not None:
            pid, status = os.waitpid(self._child.pid, os.WNOHANG)
            if pid:
                self.reaped(pid, status)

    def expire(self) -> None:
        """Kill it, because its time is over, and report that."""
        self.kill()
        self._finish(None, TIMED_OUT)

    def kill(self) -> None:
        """Kill it, and whatever it started that did not leave its group. Nothing is reported."""
        if self._child is not None and self._child.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def cancel(self) -> None:
        """Kill it and forget it. Nothing is reported."""
        self.kill()
        self._close()

    def _finish(self, code: Optional[int], fault: str = "") -> None:
        if self._child is None:
            return
        for descriptor in list(self._received):
            while self._read(descriptor):
                pass
        result, text = bytes(self._received[self._result]), bytes(self._received[self._text])
        self._close()
        self._on_done(CommandResult(code, result, text.decode("utf-8", "replace"), fault))

    def _watch(self, descriptor: int) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(descriptor))

    def _read(self, descriptor: int) -> bool:
        """Read once; return whether something was there."""
        received = self._received[descriptor]
        try:
            data = os.read(descriptor, _READ_BYTES)
        except OSError:
            return False
        if not data:
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
            return False
        received += data
        if descriptor == self._text:
            del received[:-TEXT_LIMIT]
        elif len(received) > RESULT_LIMIT:
            self.kill()
            return False
        return True

    def _close(self) -> None:
        if self._child is None:
            return
        # Popen complains of a child that was not waited for; the agent's loop reaps it.
        self._child.returncode = self._child.returncode if self._child.returncode is not None else 0
        self._child = None
        for descriptor in self._received:
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
