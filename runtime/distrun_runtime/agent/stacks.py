"""Gets the Python stacks of tasks for the frame `stack`. Needs no help of the task and never blocks.

If py-spy is installed beside the task's interpreter, on the task's PATH or on the agent's, the agent runs `py-spy dump
--nonblocking`. Otherwise it sends SIGURG, but only to a process that offered it (`contract.metrics`, `stacks`), which
is identified by process id and start time. It sends no other signal, because a process that does not handle SIGUSR1
dies of it. If neither is possible, the answer says why and how to fix it.

The agent's loop drives `StackReader`. The selector reads the programs that it starts; each has a deadline.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import stat
import time
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, NamedTuple

from distrun_runtime.agent.commands import TIMED_OUT, Command, CommandResult, RunningCommand
from distrun_runtime.contract import environ, metrics, process
from distrun_runtime.contract.process import Identity

if TYPE_CHECKING:
    from distrun_runtime.agent.tasks import RunningTask

PY_SPY = "py-spy"
PY_SPY_S = 5.0
"""How long py-spy may take."""
SIGNAL_S = 3.0
"""How long a process may take to write its stacks."""
SETTLED_S = 0.1
"""The stacks are complete if nothing was added for this time."""
LOOK_S = 0.05
TEXT_BYTES = 64 * 1024
"""Longer stacks are cut."""
READ_BYTES = 4 * TEXT_BYTES
"""faulthandler writes the thread last that matters most."""
OFFERS = 64
"""So many processes of a task are remembered."""

BY_PY_SPY = "py-spy"
BY_SIGNAL = "faulthandler"


class StackAnswer(NamedTuple):
    """What the coordinator is told."""

    task: str
    text: str = ""
    how: str = ""
    """`py-spy` or `faulthandler`; empty: there are no stacks."""
    error: str = ""
    fix: str = ""
    """What would help."""


Give = Callable[[StackAnswer], None]


class StackReader:
    """Gets the stacks of tasks.

    Arguments:
        folder: the agent's own, in which processes write.
        tasks: those that were started here, by name.
    """

    def __init__(self, folder: str, tasks: Mapping[str, RunningTask], selector: selectors.BaseSelector) -> None:
        self._folder = folder
        self._tasks = tasks
        self._selector = selector
        self._offers: Dict[str, Dict[int, Identity]] = {}
        """Task to the processes that write their stacks on the signal, the one that said so last at the end."""
        self._spies: List[RunningCommand] = []
        self._dumps: List[_Dump] = []

    def heard(self, task: str, told: Mapping[str, object]) -> None:
        """Take a datagram `stacks` of a task."""
        pid, start, how = told.get("pid"), told.get("start"), told.get("how")
        if not isinstance(pid, int) or not isinstance(start, str) or task not in self._tasks:
            return
        known = self._offers.setdefault(task, {})
        known.pop(pid, None)
        if how == metrics.BY_SIGURG:
            known[pid] = Identity(pid, start)
        while len(known) > OFFERS:
            del known[next(iter(known))]

    @property
    def next_at(self) -> float:
        """When `tick` has something to do (monotonic clock); infinite: never."""
        dues = [spy.deadline for spy in self._spies] + [dump.next_at for dump in self._dumps]
        return min(dues, default=float("inf"))

    def ask(self, task: str, give: Give) -> None:
        """Have the stacks of a task given, now or later."""
        running = self._tasks.get(task)
        if running is None or running.is_reaped:
            give(StackAnswer(task, error=f"{task} {'does not run on this host' if running is None else 'has ended'}"))
            return
        target = self._target(task, running)
        program = self._find(target)
        if not program:
            self._by_signal(task, target, "", give)
            return
        words = (program, "dump", "--nonblocking", "--pid", str(target.pid))
        env = environ.snapshot_bytes()
        command = Command(tuple(map(os.fsencode, words)), env, b"", PY_SPY_S, prints_result=True)

        def done(told: CommandResult) -> None:
            self._spies.remove(spy)
            text = told.result.decode("utf-8", "replace").strip("\n")[:TEXT_BYTES]
            if told.code == 0 and text:
                give(StackAnswer(task, text, BY_PY_SPY))
            else:
                why = f"did not answer within {PY_SPY_S:g} s" if told.fault == TIMED_OUT else told.first_line
                self._by_signal(task, target, f"{program}: {why or f'exit code {told.code}'}", give)

        spy = RunningCommand(command, self._selector, done)
        self._spies.append(spy)
        spy.start()

    def reaped(self, pid: int, status: int) -> None:
        """Take note that a child of the agent has ended."""
        for spy in list(self._spies):
            spy.reaped(pid, status)

    def tick(self, now: float) -> None:
        """Do what is due."""
        for spy in list(self._spies):
            if now >= spy.deadline:
                spy.expire()
        for dump in list(self._dumps):
            if now >= dump.next_at and dump.look(now):
                self._dumps.remove(dump)

    def close(self) -> None:
        """End the programs that were started. Pending questions get no answer."""
        for spy in self._spies:
            spy.cancel()
        self._spies, self._dumps = [], []

    # Which process

    def _target(self, task: str, running: RunningTask) -> Identity:
        """Return the process of a task whose stacks are wanted: one that has offered them, else its first Python."""
        rows = process.table()
        mine = [row for row in rows if row.pid == running.leader.pid]
        mine += process.descendants([running.leader.pid], rows)
        mine += [row for row in rows if row.sid == running.leader.pid and row not in mine]
        living = [row.identity for row in mine if not row.is_dead]
        offered = self._offers.get(task, {})
        found = [who for who in living if offered.get(who.pid) == who]
        found += [who for who in living if _is_python(who.pid)]
        return found[0] if found else running.leader

    def _find(self, target: Identity) -> str:
        """Return the path of py-spy; empty: it is not installed where it is looked for."""
        folders = process.environ_of(target.pid).get("PATH", "")
        argv0 = process.command_of(target.pid).partition(" ")[0]
        beside = os.path.dirname(argv0) if os.path.isabs(argv0) else ""
        for path in (beside, folders):
            found = shutil.which(PY_SPY, path=path) if path else None
            if found:
                return found
        return shutil.which(PY_SPY) or ""

    def _by_signal(self, task: str, target: Identity, before: str, give: Give) -> None:
        """Have the process write its stacks. `before`: what went wrong with py-spy."""
        if self._offers.get(task, {}).get(target.pid) != target:
            give(_unknown(task, target, before))
            return
        try:
            dump = _Dump(task, target, os.path.join(self._folder, metrics.STACKS_FILE % target.pid), before, give)
        except OSError as err:
            why = f"its stacks cannot be read: {err}"
            give(StackAnswer(task, error=f"{before}; {why}" if before else why))
        else:
            self._dumps.append(dump)


def program_first(text: str) -> str:
    """Return what faulthandler wrote with the thread that took the signal, the main one, before the others."""
    threads = text.split("\n\n")
    threads.sort(key=lambda thread: not thread.startswith("Current thread"))
    return "\n\n".join(threads)


def _unknown(task: str, target: Identity, before: str) -> StackAnswer:
    """Return the answer if neither way can be gone."""
    command = process.command_of(target.pid, 60)
    if not _is_python(target.pid):
        return StackAnswer(
            task, error=f"process {target.pid} is no Python: {command}", fix=f"gdb -p {target.pid}, there"
        )
    why = before or "py-spy is not installed where the task runs"
    no_offer = "has not used distrun_runtime, or handles SIGURG itself"
    error = f"{why}, and process {target.pid} {no_offer}: {command}"
    fix = f"sudo py-spy dump --pid {target.pid}, there" if before else "pip install py-spy, in the task's environment"
    return StackAnswer(task, error=error, fix=f"{fix}; or call distrun_runtime.report in the script")


def _is_python(pid: int) -> bool:
    try:
        name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        name = os.path.basename(process.command_of(pid).partition(" ")[0])
    return "python" in name.lower() or name.startswith("pypy")


class _Dump:
    """A process that was sent the signal, and the file to which it writes.

    Raises:
        OSError: the file is not there, or is none of ours.
    """

    def __init__(self, task: str, target: Identity, path: str, before: str, give: Give) -> None:
        self._task = task
        self._target = target
        self._path = path
        self._before = before
        self._give = give
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise OSError(f"{path} is not a file of this user")
            os.ftruncate(descriptor, 0)  # what an earlier question has brought; the process only appends
        finally:
            os.close(descriptor)
        now = time.monotonic()
        self._until = now + SIGNAL_S
        self._size = 0
        self._changed_at = now
        self.next_at = now + LOOK_S
        if not process.send_signal(target, signal.SIGURG):
            self._until = now  # it has ended; `look` says so

    def look(self, now: float) -> bool:
        """See whether the stacks are there, and give them; return whether it is over."""
        self.next_at = now + LOOK_S
        try:
            size = os.stat(self._path).st_size
        except OSError:
            size = 0
        if size != self._size:
            self._size, self._changed_at = size, now
        is_whole = size > 0 and now >= self._changed_at + SETTLED_S
        if not is_whole and now < self._until:
            return False
        text = self._read() if size else ""
        self._give(StackAnswer(self._task, text, BY_SIGNAL) if text else self._none())
        return True

    def _read(self) -> str:
        try:
            with open(self._path, "rb") as file:
                text = file.read(READ_BYTES).decode("utf-8", "replace").strip("\n")
                return program_first(text)[:TEXT_BYTES]
        except OSError:
            return ""

    def _none(self) -> StackAnswer:
        pid = self._target.pid
        rows = [row for row in process.table([pid]) if row.identity == self._target]
        if not rows or rows[0].is_dead:
            return StackAnswer(self._task, error=f"process {pid} has ended")
        before = f"{self._before}, and " if self._before else ""
        if rows[0].state.upper().startswith("T"):
            return StackAnswer(self._task, error=f"{before}process {pid} is stopped", fix=f"kill -CONT {pid}, there")
        error = f"{before}process {pid} did not write its stacks within {SIGNAL_S:g} s"
        return StackAnswer(self._task, error=error, fix=f"sudo py-spy dump --pid {pid}, there (pip install py-spy)")
