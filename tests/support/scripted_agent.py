"""A fake agent on the other ends of two pipes: it speaks frames, and does what its script says."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from slowness import scaled

from distrun_runtime.contract import session
from distrun_runtime.coordinator.channel import StreamChannel

Script = Callable[["ScriptedAgent"], None]
LIMIT_S = scaled(60.0)


class ScriptedAgent:
    """Runs `script(agent)` in a thread. `agent.channel` is the coordinator's side."""

    def __init__(self, script: Script, host: str = "d1", greeting: bytes = b"DISTRUN/1 abc\n") -> None:
        self._in, theirs_out = os.pipe()
        theirs_in, self._out = os.pipe()
        self.channel = StreamChannel(host, theirs_in, theirs_out)
        self.heard: list[session.Frame] = []
        self.error: BaseException | None = None
        self._script = script
        self._greeting = greeting
        self._seq = 0
        self._decoder = session.Decoder()
        self._ready: list[session.Frame] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, kind: str, /, body: bytes = b"", **members: Any) -> None:
        """Send one frame."""
        self._seq += 1
        self.raw(session.encode({"type": kind, "seq": self._seq, **members}, body))

    def raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        while data:
            data = data[os.write(self._out, data) :]

    def hear(self) -> session.Frame:
        """Return the next frame; EOFError at the end of input, TimeoutError when none comes."""
        until = time.monotonic() + LIMIT_S
        while not self._ready:
            readable, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise TimeoutError("no frame came; heard %s" % [frame.type for frame in self.heard])
            data = os.read(self._in, 65536)
            if not data:
                raise EOFError
            self._ready += [frame for frame in self._decoder.feed(data) if frame.type not in ("received", "credit")]
        frame = self._ready.pop(0)
        self.heard.append(frame)
        return frame

    def wait(self, kind: str) -> session.Frame:
        """Return the next frame of a kind; pings on the way are answered."""
        while True:
            frame = self.hear()
            if frame.type == "ping":
                self.say("pong", n=frame.header["n"])
            if frame.type == kind:
                return frame

    def until_end(self, answer: bool = False) -> None:
        """Read until the end of input; answer pings, or nothing at all."""
        with contextlib.suppress(EOFError):
            while True:
                if answer:
                    self.wait("ping")
                else:
                    self.hear()

    def begin(self) -> session.Frame:
        """Say hello, take the plan, say ready."""
        self.say("hello", version=session.VERSION, host="d1", time=time.time(), agent={"pid": 1}, guard={"pid": 2})
        frame = self.wait("begin")
        self.say("ready", address="127.0.0.1", ports={})
        return frame

    def spawn(self, pid: int = 100) -> str:
        """Start the task that is asked for next; return its name."""
        task = str(self.wait("spawn").header["task"])
        self.say("started", task=task, pid=pid, start="x", time=time.time())
        return task

    def work(self) -> str:
        """Begin and start the first task; return its name."""
        self.begin()
        return self.spawn()

    def ends(self, *tasks: str, **how: Any) -> None:
        """Say that tasks ended, and obey; `how` is `exited`'s."""
        for task in tasks:
            self.exited(task, **how)
        self.finish(*tasks)

    def exited(self, task: str, code: int | None = 0, **more: Any) -> None:
        """Say that a task ended."""
        members: dict[str, Any] = {"signal": None, "stopped": False, "out": 0, "err": 0, "time": time.time(), **more}
        self.say("exited", task=task, code=code, **members)

    def finish(self, *ended: str) -> None:
        """Obey a stop, as an agent whose tasks go at once, and leave; those that have ended are not ended again."""
        for task in sorted(set(self.wait("stop").header["tasks"]) - set(ended)):
            self.exited(task, None, signal="TERM", stopped=True)
        self.leave()

    def leave(self) -> None:
        """Say that nothing is left, and goodbye when it is asked for."""
        self.say("cleared", left=[])
        self.wait("end")
        self.say("bye")

    def join(self) -> None:
        """Wait for the script; raise what it raised."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the scripted agent hangs; heard %s" % [frame.type for frame in self.heard]
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self.raw(self._greeting)
            self._script(self)
        except BaseException as err:
            self.error = err
        finally:
            os.close(self._out)
            os.close(self._in)
