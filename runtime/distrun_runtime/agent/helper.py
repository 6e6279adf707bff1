"""The agent's end of its helper, the process that looks at what may block: disks of a dead server, GPUs, `ps`.

There is one at a time. It is asked one thing after the other, and killed if it does not answer within ANSWER_S; what it
was asked for then is left alone for a while. It ends with its input, so also if the agent dies. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
from typing import Any, Dict, List, Mapping, Optional

ANSWER_S = 10.0
RESTART_S = 60.0
"""A new helper is started so long after the last one was, at the earliest."""
HUNG_S = 600.0
"""What had no answer is not asked for again for so long."""
ANSWER_BYTES = 8 * 1024 * 1024
"""A longer answer is none."""
NAME = "distrun-helper"
"""Stands in its command line."""
PROGRAM = "distrun_runtime.agent.hardware"
# The program comes by standard input: a command line is for people to read.
_BOOT = "import json, sys; exec(compile(json.loads(sys.stdin.readline()), '<distrun helper>', 'exec'))"


class Helper:
    """What is wanted, when, and the last answer to each.

    `pythons`: interpreters, the best first. `folder`: whose disk is looked at; empty: that of the home directory.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        pythons: List[bytes],
        env: Mapping[bytes, bytes],
        folder: str = "",
        *,
        answer_s: float = ANSWER_S,
        restart_s: float = RESTART_S,
    ) -> None:
        self.answers: Dict[str, Any] = {}
        """The last value of each thing that was asked for; absent while there is none."""
        self._selector = selector
        self._pythons = [*pythons, os.fsencode(sys.executable)]
        self._env = env
        self._folder = folder
        self._answer_s, self._restart_s = answer_s, restart_s
        self._wanted: Dict[str, _Wanted] = {}
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._unreaped = -1
        """Process id of the last one, until it has ended."""
        self._has_answered = False
        self._start_at = -math.inf
        self._asked = ""
        self._deadline = math.inf
        self._received = bytearray()

    def want(self, what: str, every_s: float, now: float) -> None:
        """Ask for something from now on, each `every_s` seconds (infinite: once)."""
        self._wanted.setdefault(what, _Wanted({"what": what, "path": self._folder}, now)).every_s = every_s

    def tick(self, now: float) -> None:
        """Ask for what is due; kill a helper that does not answer."""
        if self._asked and now >= self._deadline:
            self._wanted[self._asked].not_before = now + HUNG_S
            self._end()
        if self._asked or not self._wanted:
            return
        wanted = min(self._wanted.values(), key=lambda each: each.due)
        if now < wanted.due:
            return
        if self._child is None:
            # One that cannot die (its disk is dead) is not joined by others.
            if self._unreaped >= 0 or now < self._start_at:
                return
            self._start(now)
            if self._child is None:
                return
        self._asked, self._deadline = str(wanted.request["what"]), now + self._answer_s
        wanted.asked_at = now
        self._send(json.dumps(wanted.request).encode())

    def reaped(self, pid: int) -> None:
        """Note a child's end."""
        if pid == self._unreaped:
            self._unreaped = -1
            self._end()

    def close(self) -> None:
        """End the helper, if there is one. `tick` starts another if it is called again."""
        self._end()

    def _start(self, now: float) -> None:
        self._start_at = now + self._restart_s
        try:
            self._child = subprocess.Popen(
                [self._pythons[0], "-c", _BOOT, NAME],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                cwd="/",
                env=self._env,
                start_new_session=True,
            )
        except (OSError, ValueError):
            self._give_up_python()
            return
        self._unreaped = self._child.pid
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        os.set_blocking(self._child.stdout.fileno(), False)
        self._selector.register(self._child.stdout.fileno(), selectors.EVENT_READ, self._on_answer)
        self._send(json.dumps(source()).encode())

    def _send(self, line: bytes) -> None:
        """Write a line. A pipe takes more than the helper is ever sent before it answers."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.write(line + b"\n")

    def _on_answer(self) -> None:
        assert self._child is not None
        assert self._child.stdout is not None
        try:
            data = os.read(self._child.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
                self._take(json.loads(line.decode("utf-8", "replace")))
        if not data or len(rest) > ANSWER_BYTES:
            self._end()

    def _take(self, answer: Mapping[str, Any]) -> None:
        if answer["what"] == self._asked:
            self.answers[self._asked] = answer["value"]
            self._has_answered = True
            self._asked, self._deadline = "", math.inf

    def _end(self) -> None:
        """Let go of the helper, and kill it if it has not ended."""
        child, self._child = self._child, None
        self._asked, self._deadline = "", math.inf
        self._received = bytearray()
        if child is None:
            return
        assert child.stdin is not None
        assert child.stdout is not None
        self._selector.unregister(child.stdout.fileno())
        child.stdin.close()
        child.stdout.close()
        if self._unreaped == child.pid:
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGKILL)
        child.returncode = 0  # the agent's loop reaps it
        if not self._has_answered:
            self._give_up_python()

    def _give_up_python(self) -> None:
        """Take the next interpreter from now on: this one does not work."""
        self._pythons = self._pythons[1:] or self._pythons


class _Wanted:
    def __init__(self, request: Dict[str, Any], now: float) -> None:
        self.request = request
        self.every_s = math.inf
        self.asked_at = -math.inf
        self.not_before = now

    @property
    def due(self) -> float:
        """When it is to be asked for next."""
        first = self.asked_at == -math.inf
        return self.not_before if first else max(self.asked_at + self.every_s, self.not_before)


def source() -> str:
    """Return the source of the program: in the agent's blob, or in its file."""
    from distrun_runtime.agent import hardware

    loader: Any = hardware.__spec__.loader if hardware.__spec__ is not None else None
    return str(loader.get_source(PROGRAM))
