"""A real agent over pipes, driven by a test: what a coordinator does, by hand."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from distrun_cli import wait_until
from slowness import scaled

from distrun import shipping
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import process, session
from distrun_runtime.contract.plan import Host, Limits, Plan, Task
from distrun_runtime.contract.process import Identity
from distrun_runtime.contract.session import Session
from distrun_runtime.coordinator import messages

WAIT_S = 60.0
HOST = "here"


def new_job() -> str:
    return "t" + uuid.uuid4().hex[:10]


def shell(script: str, name: str = "worker-0", cwd: str = "/", **more: object) -> Task:
    return task(["sh", "-c", script], name, cwd, **more)


def python(code: str, name: str = "worker-0", cwd: str = "/", **more: object) -> Task:
    return task([sys.executable, "-I", "-S", "-c", code], name, cwd, **more)


def task(argv: Sequence[str], name: str = "worker-0", cwd: str = "/", **more: object) -> Task:
    role, _, rank = name.rpartition("-")
    return Task(name=name, role=role, rank=int(rank), host=HOST, argv=tuple(argv), cwd=cwd, **more)  # type: ignore[arg-type]


def poll(condition: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
    """Wait until `condition()` is true; fail with `what` after `limit_s`."""
    wait_until(condition, limit_s, what)


class AgentDriver:
    """One agent process and its frames."""

    def __init__(
        self,
        *tasks: Task,
        job: str = "",
        limits: Limits | None = None,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        with_origin: bool = True,
        unset: Sequence[str] = (),
        ports: Sequence[str] = (),
        on_eof: str = plans.STOP,
        **plan_members: object,
    ) -> None:
        self.job = job or new_job()
        self.plan = Plan(
            job=self.job,
            name="",
            backend="local",
            command=("x",),
            cwd="/",
            hosts=(Host(HOST, "127.0.0.1", tuple(ports)),),
            tasks=tasks,
            limits=limits or Limits(grace_s=5.0),
            on_eof=on_eof,
            unset=tuple(unset),
            **plan_members,  # type: ignore[arg-type]
        )
        self.frames: list[session.Frame] = []
        self.output: dict[tuple[str, str], bytearray] = {}
        self.acks = True
        """Acknowledge output as it arrives."""
        self.banner = b""
        self._taken = 0
        self._sock: socket.socket | None = None
        """Another connection than the pipes."""
        self._session = Session()
        self._session.connect()
        self.child = subprocess.Popen(
            shipping.command(python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=None if env is None else dict(os.environ, **env),
        )
        assert self.child.stdin is not None
        self._send(shipping.agent(with_origin))

    # Saying

    def say(self, kind: str, **members: object) -> None:
        self.send(session.Frame(dict(members, type=kind)))

    def begin(self, token: str = "c0ffee", **members: object) -> session.Frame:
        self.say_begin(token, **members)
        return self.wait("ready", "refused")

    def say_begin(self, token: str = "c0ffee", **members: object) -> None:
        fields: dict[str, object] = {
            "version": session.VERSION,
            "plan": plans.to_json(self.plan),
            "token": token,
            "secret_env": {},
            "host": HOST,
        }
        fields.update(members)
        self.say("begin", **fields)

    def send(self, message: session.Frame | messages.Large) -> None:
        """Send a frame, or a large body as far as the agent takes it: the rest leaves as it is heard."""
        if isinstance(message, messages.Large):
            self._session.send_large(*message)
        else:
            self._session.say(*message)
        self._flush()

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._send(data)

    def spawn(self, name: str = "worker-0", **env: str) -> session.Frame:
        self.say("spawn", task=name, env=env)
        return self.wait("started", "exited", task=name)

    def stop(self, *names: str, steps: Sequence[tuple[str, float]] = (("TERM", 5.0), ("KILL", 0))) -> None:
        self.say("stop", tasks=names, steps=steps)

    def cut(self) -> None:
        """End the connection; what was said is kept for another."""
        for pipe in (self.child.stdin, self.child.stdout):
            pipe.close()
        self._session.cut()
        self._sock = None

    def resume(self, sock: socket.socket) -> None:
        """Go on over another connection."""
        if self._sock is not None:
            self._sock.close()
        self._sock = sock
        self._session.connect()
        self._flush()

    def close_input(self) -> None:
        self.child.stdin.close()

    def close(self) -> None:
        """Close every end of ours."""
        if self._sock is not None:
            self._sock.close()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()

    # Hearing

    def wait(self, *kinds: str, limit_s: float = WAIT_S, **members: object) -> session.Frame:
        """Return the first frame of one of these kinds (with these members) that was not returned before."""
        deadline = time.monotonic() + scaled(limit_s)
        seen = 0
        while True:
            for index in range(seen, len(self.frames)):
                frame = self.frames[index]
                if frame.type in kinds and all(frame.header.get(name) == value for name, value in members.items()):
                    del self.frames[index]
                    return frame
            seen = len(self.frames)
            left = deadline - time.monotonic()
            assert left > 0, "no %s %s within %g s; got %s" % (kinds, members, limit_s, self.frames[-8:])
            assert self.hear(left), "the agent said no %s %s before its end; got %s" % (
                kinds,
                members,
                self.frames[-8:],
            )

    def hear(self, limit_s: float) -> bool:
        """Take what arrives next; return False at the end of the stream. Waits up to `limit_s`."""
        source = self._sock.fileno() if self._sock is not None else self.child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return True
        data = os.read(source, 1 << 20)
        if not data:
            return False
        if b"\n" not in self.banner:
            self.banner += data
            head, newline, data = self.banner.partition(b"\n")
            if not newline:
                return True
            self.banner = head + newline
        found = self._session.feed(data)
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._flush()
        for frame in found:
            if frame.type == "output":
                self._keep(frame)
            else:
                self.frames.append(frame)
        return True

    def hear_until(self, condition: Callable[[], object], what: str, limit_s: float = WAIT_S) -> None:
        """Take what arrives until `condition()` is true."""
        deadline = time.monotonic() + scaled(limit_s)
        while not condition():
            assert time.monotonic() < deadline, "after %g s still not: %s" % (limit_s, what)
            assert self.hear(0.1), "the agent ended before: %s" % what

    def text(self, name: str = "worker-0", stream: str = "out") -> bytes:
        return bytes(self.output.get((name, stream), b""))

    def exited(self, name: str = "worker-0", limit_s: float = WAIT_S) -> dict[str, object]:
        """Return the `exited` message of a task, once all its output has arrived too."""
        header = self.wait("exited", task=name, limit_s=limit_s).header
        deadline = time.monotonic() + scaled(limit_s)
        while any(len(self.output.get((name, stream), b"")) < int(header[stream]) for stream in ("out", "err")):
            assert time.monotonic() < deadline, "output of %s is missing" % name
            assert self.hear(1.0), "the agent ended before all output had come"
        return header

    def finish(self, limit_s: float = WAIT_S) -> int:
        """Say `end`, hear `bye`, and return the agent's exit code."""
        self.say("end")
        self.wait("bye", limit_s=limit_s)
        return self.child.wait(scaled(limit_s))

    # The processes

    @property
    def guard(self) -> Identity:
        return process.identity(self.child.pid)

    def hello(self) -> dict[str, object]:
        return self.wait("hello").header

    def agent_pid(self) -> int:
        """The agent's process id: the guard's only child."""
        return next(row.pid for row in process.table() if row.ppid == self.child.pid)

    def leftovers(self) -> list[str]:
        return leftovers(self.job)

    def _keep(self, frame: session.Frame) -> None:
        name, stream = str(frame.header["task"]), str(frame.header["stream"])
        kept = self.output.setdefault((name, stream), bytearray())
        assert frame.header["offset"] == len(kept), "a gap or a repetition in %s.%s" % (name, stream)
        kept += frame.body
        if self.acks:
            with contextlib.suppress(BrokenPipeError, ValueError):
                self.say("ack", task=name, stream=stream, offset=len(kept))

    def _flush(self) -> None:
        while self._session.is_ready:
            self._send(self._session.next())

    def _send(self, data: bytes) -> None:
        if self._sock is not None:
            self._sock.sendall(data)
            return
        view = memoryview(data)
        while view:
            view = view[self.child.stdin.write(view) :]


def leftovers(job: str) -> list[str]:
    """The living processes that carry the mark of `job`, whatever mode the agent ran in."""
    rows = [row for row in process.table() if not row.is_dead]
    return [
        "%d %s" % (row.pid, process.command_of(row.pid))
        for row in rows
        if process.environ_of(row.pid).get("DISTRUN_JOB_ID") == job
    ]


@contextlib.contextmanager
def agent(*tasks: Task, **members: object) -> Iterator[AgentDriver]:
    """A started agent that has said hello; whatever happens, nothing of its job outlives the test."""
    driver = AgentDriver(*tasks, **members)  # type: ignore[arg-type]
    try:
        driver.wait("hello")
        yield driver
    finally:
        driver.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.child.wait(scaled(30))
        for row in process.table():
            if process.environ_of(row.pid).get("DISTRUN_JOB_ID") == driver.job:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(row.pid, signal.SIGKILL)
        if driver.child.poll() is None:
            driver.child.kill()
            driver.child.wait()
