"""The tasks of this host while they run: their pipes in the selector, their ends as messages."""

from __future__ import annotations

import selectors
import sys
import time
from typing import Callable, Dict, List, Mapping, Optional

from distrun_runtime.agent import tasks
from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.outlet import Outlet
from distrun_runtime.agent.reaper import exit_facts, reaped
from distrun_runtime.agent.tasks import CannotStart, Running
from distrun_runtime.contract.plan import Task


class Crew:
    """Starts tasks, passes on what they write and publish, reaps them. Never waits."""

    def __init__(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        self.running: Dict[str, Running] = {}
        """Every task that was started, those that are over included."""
        self.on_other: Callable[[int, int], None] = lambda pid, status: None
        """Told the process id and wait status of each child that is no task's first process."""
        self.is_nobody_listening = False
        """What tasks write is thrown away from now on."""
        self._channel = channel
        self._selector = selector
        self._has_warned_of_disk = False

    def spawn(self, task: Task, env: Dict[bytes, bytes], spool_folder: str) -> bool:
        """Start a task and say `started`, or say `exited` with the reason; return which."""
        try:
            running = tasks.start(task, env, spool_folder)
        except CannotStart as err:
            nothing = {"signal": None, "stopped": False, "out": 0, "err": 0, "max_rss_kb": 0, "cpu_s": 0.0}
            self._say("exited", task=task.name, code=err.code, reason=str(err), time=time.time(), **nothing)
            return False
        self.running[task.name] = running
        for outlet in running.outlets:
            self._watch(running, outlet)
        self._selector.register(
            running.publisher.descriptor or 0, selectors.EVENT_READ, lambda: self._on_publish(running)
        )
        leader = running.leader
        self._say("started", task=task.name, pid=leader.pid, start=leader.start, time=running.started)
        return True

    def reap(self) -> int:
        """Bury every child that is over and return how many; a task's end is told, an orphan's is not."""
        count = 0
        for pid, status, usage in reaped():
            now = time.time()
            count += 1
            for running in self.running.values():
                if running.leader.pid == pid and not running.is_reaped:
                    running.family.is_reaped = True
                    # Popen must not wait for it once more.
                    running.child.returncode = status
                    self._on_end(running, now, exit_facts(status, usage))
                    break
            else:
                self.on_other(pid, status)
        return count

    def hear(self) -> None:
        """Pass on what tasks have published so far."""
        for running in self.running.values():
            self._on_publish(running)

    def acknowledge(self, name: str, stream: str, offset: int) -> None:
        """Note what of a task's output has arrived; unknown tasks are no matter. Raises ValueError: no such stream."""
        number = ("out", "err").index(stream)
        if name in self.running:
            outlet = self.running[name].outlets[number]
            outlet.acknowledge(offset)
            self._watch(self.running[name], outlet)

    def pump(self, whole: bool = False) -> bool:
        """Queue output as far as there is room, `whole`: also beyond the window; return whether all is queued."""
        outlets = self._outlets()
        for outlet in outlets:
            if not outlet.is_sent:
                self._pump(outlet, **({"window": sys.maxsize} if whole else {}))
        return all(outlet.is_sent for outlet in outlets)

    def drain(self) -> None:
        """Read what is left in the pipes."""
        for outlet in self._outlets():
            outlet.drain()

    def close(self) -> None:
        """Close the pipes and remove the spools."""
        for running in self.running.values():
            running.publisher.close()
            for outlet in running.outlets:
                outlet.close()
                outlet.spool.close()

    def _on_end(self, running: Running, now: float, facts: Mapping[str, object]) -> None:
        for outlet in sorted(running.outlets, key=lambda outlet: not outlet.is_mid_line):
            descriptor = outlet.descriptor
            outlet.drain()
            self._unwatch_if_closed(descriptor, outlet.descriptor)
            self._pump(outlet)
        self._on_publish(running)
        out, err = (outlet.total for outlet in running.outlets)
        stopped = running.was_signalled
        self._say("exited", task=running.task.name, time=now, stopped=stopped, out=out, err=err, **facts)

    def _on_output(self, running: Running, outlet: Outlet) -> None:
        # A line that was begun goes on first, such as a progress bar on stderr: what came on stdout came after its end.
        for other in running.outlets:
            if other is not outlet and other.is_mid_line and not other.spool.is_full:
                self._take(other)
        if outlet.descriptor is not None:
            self._take(outlet)

    def _take(self, outlet: Outlet) -> None:
        """Read once from a task's pipe and send it on."""
        descriptor = outlet.descriptor
        outlet.read()
        self._unwatch_if_closed(descriptor, outlet.descriptor)
        if self.is_nobody_listening:
            outlet.discard()
        if outlet.spool.failure and not self._has_warned_of_disk:
            self._has_warned_of_disk = True
            text = "output cannot be kept on this host's disk; tasks wait while you do not take it: "
            self._say("warning", text=text + outlet.spool.failure)
        if outlet.spool.is_full and outlet.descriptor is not None:
            self._selector.unregister(outlet.descriptor)
        self._pump(outlet)

    def _on_publish(self, running: Running) -> None:
        descriptor = running.publisher.descriptor
        objects, wrong = running.publisher.read()
        for values in objects:
            stopped = running.was_signalled
            self._say("published", task=running.task.name, values=values, time=time.time(), stopped=stopped)
        for text in wrong:
            self._say("warning", text=text)
        self._unwatch_if_closed(descriptor, running.publisher.descriptor)

    def _watch(self, running: Running, outlet: Outlet) -> None:
        """Read from a task's pipe, for the first time or again."""
        readable = outlet.descriptor is not None and not outlet.spool.is_full
        if readable and outlet.descriptor not in self._selector.get_map():
            self._selector.register(
                outlet.descriptor or 0, selectors.EVENT_READ, lambda: self._on_output(running, outlet)
            )

    def _unwatch_if_closed(self, before: Optional[int], after: Optional[int]) -> None:
        # At once: the next pipe may be given the same number.
        if before is not None and after is None and before in self._selector.get_map():
            self._selector.unregister(before)

    def _pump(self, outlet: Outlet, **window: int) -> None:
        def send(offset: int, data: bytes) -> None:
            header = {"type": "output", "task": outlet.task, "stream": outlet.stream, "offset": offset}
            self._channel.send(header, data)

        outlet.pump(send, self._channel.has_room, **window)

    def _say(self, kind: str, **members: object) -> None:
        self._channel.send(dict(members, type=kind))

    def _outlets(self) -> List[Outlet]:
        return [outlet for running in self.running.values() for outlet in running.outlets]
