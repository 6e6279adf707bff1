"""The agent's interface to its helper, a process that runs what may block: disks of a dead server, GPUs, `ps`.

There is one helper at a time, with one request at a time. If it does not answer within ANSWER_S, the agent kills it and
does not repeat that request for HUNG_S. The helper ends when its input ends, also if the agent dies. Nothing here
blocks.
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
from typing import TYPE_CHECKING, Any, Dict, Generator, List, Mapping, Optional

from distrun_runtime.agent.commands import FD, SCRIPT, TIMED_OUT, Command, CommandResult
from distrun_runtime.contract import environ, gpus
from distrun_runtime.contract.plan import WORKER
from distrun_runtime.errors import PreflightFailure

if TYPE_CHECKING:
    from distrun_runtime.agent.share import Share


ANSWER_S = 10.0
RESTART_S = 60.0
"""Minimum time between the starts of two helpers."""
HUNG_S = 600.0
"""Time until a request without an answer is repeated."""
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
    ) -> None:
        self.answers: Dict[str, Any] = {}
        """The last value of each thing that was asked for; absent while there is none."""
        self._selector = selector
        self._pythons = [*pythons, os.fsencode(sys.executable)]
        self._env = env
        self._folder = folder
        self._wanted: Dict[str, _HelperRequest] = {}
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
        self._wanted.setdefault(what, _HelperRequest(what, now)).every_s = every_s

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
        self._asked, self._deadline = wanted.what, now + ANSWER_S
        wanted.asked_at = now
        self._send(json.dumps({"what": wanted.what, "path": self._folder}).encode())

    def reaped(self, pid: int) -> None:
        """Note a child's end."""
        if pid == self._unreaped:
            self._unreaped = -1
            self._end()

    def close(self) -> None:
        """End the helper, if there is one. `tick` starts another if it is called again."""
        self._end()

    def _start(self, now: float) -> None:
        self._start_at = now + RESTART_S
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


class _HelperRequest:
    def __init__(self, what: str, now: float) -> None:
        self.what = what
        self.every_s = math.inf
        self.asked_at = -math.inf
        self.not_before = now

    @property
    def due(self) -> float:
        """When the next request is due."""
        first = self.asked_at == -math.inf
        return self.not_before if first else max(self.asked_at + self.every_s, self.not_before)


def source() -> str:
    """Return the source of the program: in the agent's blob, or in its file."""
    from distrun_runtime.agent import hardware

    loader: Any = hardware.__spec__.loader if hardware.__spec__ is not None else None
    return str(loader.get_source(PROGRAM))


# The GPUs of this agent's place: asks the driver, and decides which of them the tasks may see.
#
# The driver may hang, so it is asked in a process of its own (`hardware.py`), once, before the first task; and only if
# the plan gives tasks some of the GPUs.


LIMIT_S = 25.0
"""How long the driver may take: its library, or two calls of nvidia-smi."""


def looked(share: Share) -> Generator[Command, CommandResult, Share]:
    """Ask the driver; return the share with what it tells, and with the GPUs that tasks may see.

    Raises:
        PreflightFailure: kind gpus: the host has not what the hosts file says, or too few for its workers.
    """
    return chosen(share._replace(devices=told((yield command(share.marks)))))


def command(marks: Mapping[str, str]) -> Command:
    """Return the command that asks the driver; `told` reads its result. `marks`: variables that identify it."""
    env = environ.snapshot_bytes()
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in {**marks, "LC_ALL": "C"}.items())
    argv = (os.fsencode(sys.executable), b"-I", b"-S", b"/dev/fd/" + SCRIPT, b"devices", FD)
    return Command(argv, env, b"/", LIMIT_S, source().encode())


def told(done: CommandResult) -> gpus.HostGpus:
    """Return what the driver tells."""
    if done.code == 0:
        try:
            return gpus.found_of(json.loads(done.result.decode("utf-8", "replace")))
        except ValueError:
            pass
    how = f"did not answer within {LIMIT_S:g} s" if done.fault == TIMED_OUT else "cannot be asked"
    return gpus.HostGpus(error=f"NVIDIA's driver {how}")


def chosen(share: Share) -> Share:
    """Return the share with the GPUs that tasks may see, in the environment they will start from. No side effects.

    Raises:
        PreflightFailure: as `looked`.
    """
    plan, found = share.plan, share.devices
    if found is None:
        return share
    base = share.base.get(os.fsencode(gpus.VISIBLE))
    inherited = None if base is None else os.fsdecode(base)
    host = next(each for each in plan.hosts if each.name == share.host)
    try:
        seen = gpus.view(host.gpus, inherited, found, host.name, host.named)
        workers = sum(task.role == WORKER and task.gpus is not None for task in plan.tasks)
        if plan.gpus_per_worker and workers:
            if not seen.source:
                raise gpus.GpusUnfit(
                    f"it is unknown how many GPUs {host.name} has: {found.error or gpus.NO_DRIVER}",
                    "leave --gpus-per-worker out, or name them: gpus= in the hosts file, or CUDA_VISIBLE_DEVICES there",
                )
            gpus.check_room(host.name, workers, plan.gpus_per_worker, seen)
    except gpus.GpusUnfit as err:
        raise PreflightFailure(gpus.KIND, str(err), err.fix) from None
    return share._replace(sees=seen)


def report(share: Share) -> Dict[str, Any]:
    """Return what `ready` says of the GPUs; nothing if no task gets any."""
    found, seen = share.devices, share.sees
    if found is None or seen is None:
        return {}
    told = {"how": found.how, "driver": found.driver, "kinds": found.kinds, "error": found.error}
    return {**told, "visible": list(seen.names)}
