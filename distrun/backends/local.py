"""Jobs on this machine: one agent, a child process, started from the same blob as on any host."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any

from distrun import shipping
from distrun.backends.base import GUARD_S, Backend, Rendered, Swept, marks
from distrun.hosts import Inventory, named
from distrun_runtime.contract import environ, facts, process
from distrun_runtime.contract.plan import Host, Plan

if TYPE_CHECKING:
    from distrun_runtime.contract.session import Frame, Source
    from distrun_runtime.coordinator.channel import AgentChannel, Put, StreamChannel

LOOPBACK = "127.0.0.1"
ENDED_WELL = (0, facts.EXIT_START_FAILED, facts.EXIT_TERMINATED)
"""Exit codes of an agent that has seen to its tasks: it was told to end, refused to begin, or was left alone."""
END_S = 1.0
"""Between the end of an agent's stderr and that of its process."""
SLICE_S = 0.5
"""How long a wait for stderr is before the process is looked at: a task may have the agent's stderr and outlive it."""
LAST_WORDS = 20
"""Lines of the agent's stderr that are kept for the report of its death."""


class Local(Backend):
    """One host: this machine."""

    name = "local"
    needs_hosts = False
    inherits_env = True
    ships_runtime = False

    def __init__(self) -> None:
        self._started: tuple[AgentChannel, ...] = ()
        """Channels to agents that have been started, and that nothing has asked for yet."""

    def inventory(self, found: Inventory | None) -> Inventory:
        """Return this machine, by its short name, whatever hosts are named."""
        return named([short_name(socket.gethostname())], "this machine")

    def addresses(self, hosts: Sequence[str]) -> Mapping[str, str]:
        """Return the loopback address: peers of a local job are on this machine."""
        return dict.fromkeys(hosts, LOOPBACK)

    def render(self, plan: Plan) -> Rendered:
        """Return the agent's command."""
        return Rendered({host.name: _argv() for host in plan.hosts}, "the agent's modules, then frames")

    def connect(
        self, hosts: Sequence[Host], job: str = "", nonce: str = "", holds_s: float = 0.0
    ) -> tuple[AgentChannel, ...]:
        """Return the channel to the one agent."""
        return tuple(ChildChannel(host.name, _argv(), marks(job, nonce, host.name)) for host in hosts)

    def start_agents(self, plan: Plan) -> None:
        """Start the agent's process: its interpreter starts while our caller imports what serves it."""
        self._started = super().channels(plan)
        for channel in self._started:
            if isinstance(channel, ChildChannel):
                channel.boot()

    def channels(self, plan: Plan) -> tuple[AgentChannel, ...]:
        """Return the channel to the one agent, which may have been started before."""
        started, self._started = self._started, ()
        return started or super().channels(plan)

    def release(self, channels: Sequence[AgentChannel], limit_s: float) -> tuple[str, ...]:
        """Wait for the end of agent and guard, so that nothing of a job is left when its launcher has ended.

        So also of what `start_agents` began, if `channels` has not been called since.
        """
        left = []
        for channel in (*channels, *self._started):
            # Only a guard whose agent was killed has tasks to end. One whose agent has said `bye` has nothing left to
            # do, and one whose agent still holds the channel, which we have closed, was given up because it froze.
            if isinstance(channel, ChildChannel):
                wait_s = limit_s if channel.is_over and not channel.said_bye else GUARD_S
                if channel.join(wait_s) not in ENDED_WELL:
                    left.append(channel.host)
        return tuple(left)

    def sweep(self, plan: Plan, grace_s: float, hosts: Sequence[str] | None = None) -> Mapping[str, Swept]:
        """End the job's processes on this machine."""
        from distrun_runtime.agent import stopping

        report = stopping.sweep(plan.job, grace_s, plan.nonce)
        return {plan.hosts[0].name: Swept.of(report.ended, report.left)}


class ChildChannel:
    """A channel to an agent that is our child process, started by `boot`, or by `start` at the latest."""

    def __init__(self, host: str, argv: tuple[str, ...], env: Mapping[str, str] = MappingProxyType({})) -> None:
        """`env`: variables that are added to ours."""
        self.host = host
        """`Host.name` of the plan."""
        self._argv = argv
        self._env = env
        self._inner: StreamChannel | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._program = b""
        """What of the agent's program is still to be sent."""
        self._words: deque[str] = deque(maxlen=LAST_WORDS)
        self._listener: threading.Thread | None = None

    def boot(self) -> None:
        """Start the agent's process and give it what its pipe takes of its program. `start` tells of a failure.

        Raises:
            OSError, ValueError: there is no program (`shipping.agent`). The process is gone then.
        """
        try:
            self._child = subprocess.Popen(
                self._argv,
                env={**environ.snapshot(), **self._env},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as err:
            self._failure = err
            return
        try:
            self._program = shipping.agent(with_origin=True)  # while the interpreter starts
        except BaseException:
            self.kill()
            self._child.kill()
            self._child.wait()
            self._child = None
            raise
        assert self._child.stdin is not None  # a pipe
        fd = self._child.stdin.fileno()
        with contextlib.suppress(OSError):  # it has ended: `start` hears why
            os.set_blocking(fd, False)
            if hasattr(fcntl, "F_SETPIPE_SZ"):  # Linux: the pipe takes all of it at once
                fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, len(self._program))
            self._program = self._program[os.write(fd, self._program) :]

    def start(self, put: Put) -> None:
        """Send the agent its own modules, and from now on put what arrives."""
        # Not needed before: the agent's interpreter starts while these are imported.
        from distrun_runtime.contract.agent_messages import StartFailed
        from distrun_runtime.coordinator.channel import StreamChannel

        if self._child is None and self._failure is None:
            self.boot()
        child = self._child
        if child is None:
            why = "" if self._failure is None else process.why(self._failure)
            put(StartFailed(self.host, f"cannot start {self._argv[0]}: {why}", time.time()))
            return
        self._listener = threading.Thread(target=self._listen, args=(child.stderr,), name="agent stderr", daemon=True)
        self._listener.start()
        # The channel owns these two descriptors and closes them itself.
        ends = []
        for pipe in (child.stdout, child.stdin):
            assert pipe is not None  # both were asked for
            ends.append(os.dup(pipe.fileno()))
            pipe.close()
        inner = StreamChannel(self.host, ends[0], ends[1], program=self._program, explain=self._explain)
        try:
            inner.start(put)
        except BaseException:  # no thread can be started; the agent ends at the end of its input
            for end in ends:
                os.close(end)
            raise
        self._inner = inner

    @property
    def said_bye(self) -> bool:
        """Whether the agent's last frame has come."""
        return self._inner is not None and self._inner.inlet.said_bye

    @property
    def is_over(self) -> bool:
        """Whether the agent has closed its end."""
        return self._inner is None or self._inner.is_over

    def send(self, frame: Frame) -> None:
        """Queue a frame for the agent."""
        if self._inner is not None:
            self._inner.send(frame)

    def send_large(self, header: dict[str, Any], source: Source) -> None:
        """Queue a large body for the agent."""
        if self._inner is not None:
            self._inner.send_large(header, source)

    def close(self) -> None:
        """Let the agent see the end of its input."""
        if self._inner is not None:
            self._inner.close()
        elif self._child is not None and self._child.stdin is not None:
            self._child.stdin.close()

    def kill(self) -> None:
        """Free the pipes. The agent is not killed: at the end of its input it ends its tasks and goes."""
        if self._inner is not None:
            self._inner.kill()
        elif self._child is not None:
            for pipe in (self._child.stdin, self._child.stdout, None if self._listener else self._child.stderr):
                if pipe is not None:
                    pipe.close()

    def join(self, limit_s: float) -> int | None:
        """Wait for the agent's end, at most so long and END_S for its process; free a channel that was never started.

        Returns its exit code, 0 of one that was never started and so had no tasks; None if it is still there.
        """
        if self._child is None:
            return 0
        if self._listener is None:
            self.kill()
        else:
            # Agent and guard have stderr, and its end wakes us at once; `Popen.wait` looks 20 times a second. Not in
            # one piece: where a thread's end is waited for without signals (macOS), Ctrl-C has to get its turn.
            until, is_there = time.monotonic() + limit_s, True
            while is_there and self._listener.is_alive() and (rest_s := until - time.monotonic()) > 0:
                self._listener.join(min(SLICE_S, rest_s))
                is_there = self._child.poll() is None
            limit_s = 0.0 if self._listener.is_alive() else END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._child.wait(limit_s)
            return 0 if self._listener is None else code
        return None

    def _listen(self, stderr: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in stderr:
                self._words.append(line.decode("utf-8", "replace").rstrip("\n"))
        stderr.close()

    def _explain(self) -> str:
        if self._child is None or self._listener is None:
            return ""
        code = self.join(END_S)
        if code is None:
            how = f"its process (pid {self._child.pid}) still ran a second later"
        else:
            how = f"it was ended by signal {-code}" if code < 0 else f"it ended with code {int(code)}"
        return "\n".join([how, *self._words])


def short_name(hostname: str) -> str:
    """Return what the job calls a machine: its host name up to the first dot. No side effects."""
    return hostname.partition(".")[0] or "localhost"


def _argv() -> tuple[str, ...]:
    return shipping.command(sys.executable)
