"""Starts the tasks of this host, forwards what they write and publish, and reaps them.

Every string that reaches a task is bytes here: arguments and values reach the program exactly as they were typed,
whatever this host's locale is.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Set,
    Tuple,
    TypedDict,
)

from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.share import cannot_run_in, exact, programs, words
from distrun_runtime.contract import process
from distrun_runtime.contract.agent_messages import Exited, Output, Published, Started, Warned
from distrun_runtime.contract.facts import EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND
from distrun_runtime.contract.plan import Task
from distrun_runtime.contract.process import Identity, Process

if TYPE_CHECKING:
    from typing_extensions import Concatenate  # typing has it since Python 3.10

    from distrun_runtime.agent.channel import P

# Forwards the output of tasks to the coordinator through an on-disk spool with flow control.
#
# Everything is spooled first, and sent as far as the window allows. So a task does not wait for a slow launcher (only
# if the disk is full as well, or SPOOL_BYTES wait), and at most `WINDOW` bytes of a stream are in flight.


WINDOW = 1024 * 1024
"""Bytes of one stream that may be sent and not yet acknowledged."""
READ_BYTES = 64 * 1024
SEND_BYTES = 256 * 1024
DRAIN_BYTES = 4 * 1024 * 1024
"""At most so much is read in one go from the pipe of a task that ended; more than any pipe holds."""
SPOOL_BYTES = 1024 * 1024 * 1024
"""Bytes of one stream that may wait for the coordinator. Past it the task waits."""
SEGMENT_BYTES = 8 * 1024 * 1024
"""Size of a file on the disk."""
MEMORY_BYTES = 1024 * 1024
"""What may wait in memory where the disk is full."""


class TaskPipe:
    """Reading end of a pipe of one task, non-blocking."""

    def __init__(self, task: str, descriptor: int) -> None:
        self.task = task
        self.descriptor: Optional[int] = descriptor
        """None once it is closed."""
        self._selector: Optional[selectors.BaseSelector] = None
        """What waits for it."""

    def watch(self, selector: selectors.BaseSelector, call: Callable[[], None]) -> None:
        """Have a selector call when there is something to read, until `unwatch` or the end. May be repeated."""
        if self.descriptor is not None and self._selector is None:
            self._selector = selector
            selector.register(self.descriptor, selectors.EVENT_READ, call)

    def unwatch(self) -> None:
        """Have nothing called any more."""
        if self.descriptor is not None and self._selector is not None:
            self._selector.unregister(self.descriptor)
            self._selector = None

    def take(self) -> Optional[bytes]:
        """Read once; return None if nothing is there, nothing at the end. Closes it then."""
        if self.descriptor is None:
            return None
        try:
            data = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.close()
        return data

    def close(self) -> None:
        """Close the pipe."""
        self.unwatch()  # the next pipe may be given the same number
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class Outlet(TaskPipe):
    """One stream ("out" or "err") of one task."""

    def __init__(self, task: str, stream: str, descriptor: int, spool: StreamSpool, attempt: int = 0) -> None:
        super().__init__(task, descriptor)
        self.attempt = attempt
        self.stream = stream
        self.spool = spool
        self.sent = 0
        self.acked = 0
        self.is_mid_line = False
        """What was read last does not end a line."""
        self.read_at = 0.0
        """When something was read last, wall clock; 0: never."""

    @property
    def total(self) -> int:
        """Bytes that the task wrote, as far as they were read."""
        return self.spool.end

    @property
    def is_sent(self) -> bool:
        """Everything read so far is on its way."""
        return self.sent >= self.spool.end

    def read(self) -> bool:
        """Read once from the pipe; return False when nothing was there. Closes it at its end."""
        data = self.take()
        if not data:
            return False
        self.spool.append(data)
        self.is_mid_line = not data.endswith(b"\n")
        self.read_at = time.time()
        return True

    def drain(self) -> None:
        """Read what the pipe holds, without waiting; a process that still writes cannot keep us here."""
        end = self.total + DRAIN_BYTES
        while self.total < end and self.read():
            pass

    def pump(self, send: Callable[[int, bytes], None], takes_more: Callable[[], bool], window: int) -> None:
        """Send what the window allows while `takes_more()`. `send(offset, data)` takes a piece."""
        while self.sent < self.spool.end and self.sent - self.acked < window and takes_more():
            limit = min(SEND_BYTES, window - (self.sent - self.acked))
            data = self.spool.read(self.sent, limit)
            if not data:
                # The disk lost it. What follows keeps its true offset, so the gap is seen by the coordinator.
                self.sent = self.spool.end
                return
            send(self.sent, data)
            self.sent += len(data)

    def acknowledge(self, offset: int) -> None:
        """Note that the coordinator has everything before `offset`."""
        self.acked = max(self.acked, min(offset, self.sent))
        self.spool.forget(self.acked)

    def discard(self) -> None:
        """Forget everything: the coordinator is gone for good."""
        self.sent = self.acked = self.spool.end
        self.spool.forget(self.spool.end)


class StreamSpool:
    """Bytes `begin` to `end` of one stream of a task, on this host's disk, addressed by byte offset.

    It is kept in segments, so that what the coordinator has acknowledged can be removed from the disk. If the disk is
    full, the stream continues in memory. `is_full` says that no more should be read from the task.
    """

    def __init__(self, path: str) -> None:
        self.begin = 0
        self.end = 0
        self.failure = ""
        """Why nothing is written to disk any more; empty while it is."""
        self._path = path
        self._segments: List[_SpoolFile] = []
        self._count = 0
        self._memory: Deque[bytes] = deque()
        self._in_memory = 0

    @property
    def is_full(self) -> bool:
        """Nothing more fits: the disk failed and memory is at its bound, or so much waits that no more is taken."""
        return self._in_memory >= MEMORY_BYTES or self.end - self.begin >= SPOOL_BYTES

    def append(self, data: bytes) -> None:
        """Keep `data` at the end, on disk or, when that fails, in memory (whatever the bound)."""
        view = memoryview(data)
        while view and not self.failure:
            try:
                written = self._write(view)
            except OSError as err:
                self.failure = f"{self._path}: {err.strerror or err}"
                break
            self.end += written
            view = view[written:]
        if view:
            self._memory.append(bytes(view))
            self._in_memory += len(view)
            self.end += len(view)

    def read(self, offset: int, limit: int) -> bytes:
        """Return up to `limit` bytes from `offset`; empty at the end, or if the disk lost them."""
        for segment in self._segments:
            if segment.start <= offset < segment.end:
                try:
                    return os.pread(segment.descriptor, min(limit, segment.end - offset), offset - segment.start)
                except OSError as err:
                    self.failure = f"{segment.path}: {err.strerror or err}"
                    return b""
        start = self.end - self._in_memory
        for piece in self._memory:
            if start <= offset < start + len(piece):
                return piece[offset - start : offset - start + limit]
            start += len(piece)
        return b""

    def forget(self, offset: int) -> None:
        """Give back what lies before `offset`."""
        self.begin = max(self.begin, min(offset, self.end))
        while self._segments and self._segments[0].end <= self.begin and not self._is_growing(self._segments[0]):
            self._segments.pop(0).remove()
        while self._memory and self.end - self._in_memory + len(self._memory[0]) <= self.begin:
            self._in_memory -= len(self._memory.popleft())

    def close(self) -> None:
        """Remove everything."""
        for segment in self._segments:
            segment.remove()
        self._segments = []
        self._memory.clear()
        self._in_memory = 0

    def _is_growing(self, segment: _SpoolFile) -> bool:
        return segment is self._segments[-1] and segment.length < SEGMENT_BYTES and not self.failure

    def _write(self, view: memoryview) -> int:
        if not self._segments or self._segments[-1].length >= SEGMENT_BYTES:
            self._segments.append(_SpoolFile(f"{self._path}.{self._count}", self.end))
            self._count += 1
        segment = self._segments[-1]
        left = SEGMENT_BYTES - segment.length
        written = os.pwrite(segment.descriptor, view[:left], segment.length)
        segment.length += written
        return written


class _SpoolFile:
    def __init__(self, path: str, start: int) -> None:
        self.path = path
        self.start = start
        self.length = 0
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    @property
    def end(self) -> int:
        return self.start + self.length

    def remove(self) -> None:
        os.close(self.descriptor)
        with contextlib.suppress(OSError):  # the folder may be gone already
            os.unlink(self.path)


JOB = ""
"""Owner of processes that belong to the job, but to no known task."""
LINE_LIMIT = 64 * 1024
"""Bytes of a published line."""
STOPPED_S = 5.0
"""A task that has been stopped (SIGSTOP) for so long is told of, once."""


class TaskRunner:
    """The tasks of this host: their pipes in the selector, their ends as messages. Never waits."""

    def __init__(self, channel: Channel, selector: selectors.BaseSelector) -> None:
        self.tasks: Dict[str, RunningTask] = {}
        """Every task that was started, those that ended included."""
        self.on_other: Callable[[int, int], None] = lambda pid, status: None
        """Called with the process id and wait status of each child that is no task's first process."""
        self.on_ending: Callable[[List[str]], object] = lambda tasks: None
        """Called with the names of tasks that have ended, before that is said."""
        self.discards_output = False
        """What tasks write from now on is thrown away."""
        self._channel = channel
        self._selector = selector
        self._said: Dict[str, List[Tuple[Callable[..., object], Dict[str, Any]]]] = {}
        self._has_warned_of_disk = False

    def spawn(self, task: Task, env: Dict[bytes, bytes], spool_folder: str, attempt: int = 0) -> bool:
        """Start a task and say `started`, or say `exited` with the reason; return which."""
        try:
            running = start(task, env, spool_folder, attempt)
        except CannotStart as err:
            how: ExitFacts = {"code": err.code, "signal": None, "max_rss_kb": 0, "cpu_s": 0.0}
            why, now, name = str(err), time.time(), task.name
            self._say(Exited, task=name, attempt=attempt, time=now, reason=why, stopped=False, out=0, err=0, **how)
            return False
        self.tasks[task.name] = running
        for outlet in running.outlets:
            self._watch(running, outlet)
        running.publisher.watch(self._selector, lambda: self._on_publish(running))
        leader, started = running.leader, running.started
        self._say(Started, task=task.name, attempt=attempt, pid=leader.pid, start=leader.start, time=started)
        return True

    def repeat(self, name: str, attempt: int) -> bool:
        """If that attempt of a task was spawned before, say again how it started and ended; return whether it was."""
        said = self._said.get(name, [])
        if not said:
            return False
        if any(members["attempt"] != attempt for _, members in said):
            self._channel.say(Warned, text=f"`spawn` was ignored: {name} was started before, as another attempt")
            return True
        for message, members in said:
            self._channel.say(message, **members)
        return True

    def _say(self, message: Callable[Concatenate[str, P], object], /, *none: P.args, **members: P.kwargs) -> None:
        """Say how a task started or ended, and remember it for `repeat`."""
        self._said.setdefault(str(members["task"]), []).append((message, members))
        self._channel.say(message, *none, **members)

    def reap(self) -> int:
        """Reap every child that ended and return how many did; say `exited` for tasks."""
        count, ended = 0, []
        for pid, status, usage in reaped():
            running = next(
                (each for each in self.tasks.values() if each.leader.pid == pid and not each.is_reaped), None
            )
            if os.WIFSTOPPED(status):
                if running is not None:
                    running.look_at = min(running.look_at, time.monotonic() + STOPPED_S)
                continue
            count += 1
            if running is None:
                self.on_other(pid, status)
                continue
            running.processes.is_reaped = True
            running.child.returncode = status  # Popen must not wait for it once more
            ended.append((running, time.time(), exit_facts(status, usage)))
        if ended:
            self.on_ending([running.task.name for running, _, _ in ended])
        for running, now, facts in ended:
            self._on_end(running, now, facts)
        return count

    @property
    def look_at(self) -> float:
        """When `look` has something to do (monotonic clock); infinite: never."""
        return min((running.look_at for running in self.tasks.values() if not running.is_reaped), default=math.inf)

    def look(self, now: float) -> None:
        """Warn of tasks that were stopped (SIGSTOP) STOPPED_S ago and still are; nothing else shows that they wait."""
        for running in self.tasks.values():
            if running.look_at > now or running.is_reaped:
                continue
            running.look_at = math.inf
            pid = running.leader.pid
            if running.is_told_stopped or not any(row.state.startswith("T") for row in process.table([pid])):
                continue
            running.is_told_stopped = True
            text = f"{running.task.name} is stopped, as by SIGSTOP; to let it go on, there: kill -CONT {pid}"
            self._channel.say(Warned, text=text)

    def read_published(self) -> None:
        """Pass on what tasks have published so far."""
        for running in self.tasks.values():
            self._on_publish(running)

    def signal(self, names: Iterable[str], number: int) -> None:
        """Give a signal to the first process of tasks that run, to do with it what they want."""
        for name in names:
            running = self.tasks.get(name)
            if running is not None and not running.is_reaped:  # until then its id is its own
                with contextlib.suppress(OSError):  # another user's by now (set-user-id)
                    os.kill(running.leader.pid, number)

    def acknowledge(self, name: str, stream: str, offset: int) -> None:
        """Note what of a task's output has arrived; unknown tasks are ignored. Raises ValueError: no such stream."""
        number = ("out", "err").index(stream)
        if name in self.tasks:
            outlet = self.tasks[name].outlets[number]
            outlet.acknowledge(offset)
            self._watch(self.tasks[name], outlet)

    def pump(self, whole: bool = False) -> bool:
        """Queue output as far as the channel takes it; return whether that is all. `whole`: also beyond the window."""
        outlets = self._outlets()
        for outlet in outlets:
            if not outlet.is_sent:
                self._pump(outlet, sys.maxsize if whole else WINDOW)
        return all(outlet.is_sent for outlet in outlets)

    def drain(self) -> None:
        """Read what is left in the pipes, for the last time."""
        for running in self.tasks.values():
            running.publisher.close()
            for outlet in running.outlets:
                outlet.drain()
                outlet.close()

    def close(self) -> None:
        """Remove the spools, after `drain`."""
        for outlet in self._outlets():
            outlet.spool.close()

    def _on_end(self, running: RunningTask, now: float, facts: ExitFacts) -> None:
        for outlet in sorted(running.outlets, key=lambda outlet: not outlet.is_mid_line):
            outlet.drain()
            self._pump(outlet)
        self._on_publish(running)
        out, err = (outlet.total for outlet in running.outlets)
        name, stopped = running.task.name, running.was_signalled
        self._say(Exited, task=name, attempt=running.attempt, time=now, stopped=stopped, out=out, err=err, **facts)

    def _on_output(self, running: RunningTask, outlet: Outlet) -> None:
        # An unfinished line goes first, such as a progress bar on stderr: what came on stdout came after its end.
        for other in running.outlets:
            if other is not outlet and other.is_mid_line and not other.spool.is_full:
                self._forward(other)
        if outlet.descriptor is not None:
            self._forward(outlet)

    def _forward(self, outlet: Outlet) -> None:
        """Read once from a task's pipe and send it on."""
        outlet.read()
        if self.discards_output:
            outlet.discard()
        if outlet.spool.failure and not self._has_warned_of_disk:
            self._has_warned_of_disk = True
            text = "output cannot be kept on this host's disk; tasks wait while you do not take it: "
            self._channel.say(Warned, text=text + outlet.spool.failure)
        if outlet.spool.is_full:
            outlet.unwatch()
        self._pump(outlet)

    def _on_publish(self, running: RunningTask) -> None:
        objects, wrong = running.publisher.read()
        for values in objects:
            stopped = running.was_signalled
            self._channel.say(Published, task=running.task.name, values=values, time=time.time(), stopped=stopped)
        for text in wrong:
            self._channel.say(Warned, text=text)

    def _watch(self, running: RunningTask, outlet: Outlet) -> None:
        """Read from a task's pipe, for the first time or again."""
        if not outlet.spool.is_full:
            outlet.watch(self._selector, lambda: self._on_output(running, outlet))

    def _pump(self, outlet: Outlet, window: int = WINDOW) -> None:
        def send(offset: int, data: bytes) -> None:
            name, attempt = outlet.task, outlet.attempt
            self._channel.say(Output, data=data, task=name, stream=outlet.stream, attempt=attempt, offset=offset)

        outlet.pump(send, self._channel.takes_output, window)

    def _outlets(self) -> List[Outlet]:
        return [outlet for running in self.tasks.values() for outlet in running.outlets]


class RunningTask:
    """A task that was started."""

    def __init__(
        self,
        task: Task,
        leader: Identity,
        *,
        outlets: Tuple[Outlet, Outlet],
        publisher: Publisher,
        started: float,
        child: subprocess.Popen[bytes],
        attempt: int = 0,
    ) -> None:
        self.task = task
        self.leader = leader
        """Its first process."""
        self.processes = TaskProcesses(task.name, leader)
        self.outlets = outlets
        self.publisher = publisher
        self.started = started
        self.child = child
        self.attempt = attempt
        """How often it was started before."""
        self.was_signalled = False
        """The agent sent it a signal, so its end is no failure of its own."""
        self.look_at = math.inf
        """When to look whether it is still stopped."""
        self.is_told_stopped = False

    @property
    def is_reaped(self) -> bool:
        """Its first process ended and was waited for."""
        return self.processes.is_reaped

    @property
    def output_at(self) -> float:
        """When it wrote last, wall clock; 0: it has not."""
        return max(outlet.read_at for outlet in self.outlets)


# Starting


class CannotStart(Exception):
    """A task could not be started. `code` is the exit code that a shell would give."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def start(task: Task, env: Dict[bytes, bytes], spool_folder: str, attempt: int = 0) -> RunningTask:
    """Start a task in a session of its own, with no input, and return it.

    Its pipes are non-blocking; `env` gets DISTRUN_PUBLISH_FD and DISTRUN_PUBLISH_PIPE.

    Raises:
        CannotStart: with the exit code (126, 127) and the reason.
    """
    argv = words(task)
    _check(task, argv, env)
    ours: List[int] = []
    theirs: List[int] = []
    try:
        for _ in range(3):
            reading, writing = os.pipe()
            ours.append(reading)
            theirs.append(writing)
            os.set_blocking(reading, False)
        env[b"DISTRUN_PUBLISH_FD"] = b"%d" % theirs[2]
        env[b"DISTRUN_PUBLISH_PIPE"] = process.pipe_identity(theirs[2]).encode()
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=theirs[0],
            stderr=theirs[1],
            pass_fds=(theirs[2],),
            cwd=os.path.expanduser(exact(task.cwd)) or None,
            env=env,
            start_new_session=True,
        )
        started = time.time()
    except (OSError, ValueError) as err:
        for descriptor in ours:
            os.close(descriptor)
        raise _why(task, argv, err) from err
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    try:
        leader = process.identity(child.pid)
    except ProcessLookupError:
        leader = Identity(child.pid, "")  # ps could not be run; a child cannot lose its id before it is reaped
    outlets = (
        Outlet(task.name, "out", ours[0], StreamSpool(os.path.join(spool_folder, f"{task.name}.out")), attempt),
        Outlet(task.name, "err", ours[1], StreamSpool(os.path.join(spool_folder, f"{task.name}.err")), attempt),
    )
    publisher = Publisher(task.name, ours[2])
    return RunningTask(
        task, leader, outlets=outlets, publisher=publisher, started=started, child=child, attempt=attempt
    )


def _check(task: Task, argv: List[bytes], env: Mapping[bytes, bytes]) -> None:
    """Raise CannotStart for what exec would report ambiguously."""
    if not argv or not argv[0]:
        raise CannotStart(EXIT_NOT_FOUND, f"{task.name} has an empty command")
    why = cannot_run_in(os.path.expanduser(exact(task.cwd)), " on this host") if task.cwd else ""
    if why:
        raise CannotStart(EXIT_NOT_EXECUTABLE, f"the working folder {task.cwd} {why}")
    found = [path for path in programs(argv[0], task.cwd, env) if os.path.exists(path)]
    if not found:
        where = "" if b"/" in argv[0] else " (in no folder of the task's PATH)"
        word, equals, _ = _text(argv[0]).partition("=")  # of an assignment only the name: its value may be a secret
        raise CannotStart(EXIT_NOT_FOUND, f"command not found: {word}{'=...' if equals else ''}{where}")
    if not any(os.path.isfile(path) and os.access(path, os.X_OK) for path in found):
        what = "is a folder" if os.path.isdir(found[0]) else "is not executable; chmod +x it or name its interpreter"
        raise CannotStart(EXIT_NOT_EXECUTABLE, f"{_text(found[0])} {what}")


def _why(task: Task, argv: List[bytes], err: Exception) -> CannotStart:
    number = err.errno if isinstance(err, OSError) else None
    if number == errno.ENOENT:
        # The file is there (it was checked): what its first line names is not.
        return CannotStart(EXIT_NOT_EXECUTABLE, f"{_text(argv[0])}: the interpreter in its first line does not exist")
    if number == errno.ENOEXEC:
        what = "is neither a program of this machine nor a script with a #! line"
        return CannotStart(EXIT_NOT_EXECUTABLE, f"{_text(argv[0])} {what}")
    text = process.why(err) if isinstance(err, OSError) and number == errno.EMFILE else str(err)
    return CannotStart(EXIT_NOT_EXECUTABLE, f"{task.name} cannot be started: {text}")


def _text(word: bytes) -> str:
    return word.decode("utf-8", "replace")


# What tasks publish


class Publisher(TaskPipe):
    """Reads what one task publishes: one JSON object a line, on the pipe DISTRUN_PUBLISH_FD."""

    def __init__(self, task: str, descriptor: int) -> None:
        super().__init__(task, descriptor)
        self._rest = b""

    def read(self) -> Tuple[List[Dict[str, str]], List[str]]:
        """Return the objects that arrived, and what was wrong with other lines."""
        data = self.take()
        if data is None:
            return [], []
        data = data or (b"\n" if self._rest else b"")
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        objects, wrong = [], []
        if len(self._rest) > LINE_LIMIT:
            self._rest = b""
            wrong.append(f"{self.task} published a line of more than {LINE_LIMIT} bytes; it was dropped")
        for line in lines:
            value = _object(line)
            if value is not None:
                objects.append(value)
            elif line.strip():
                what = "published a line that is not a JSON object of texts and numbers"
                wrong.append(f"{self.task} {what}: {line!r:.200}")
        return objects, wrong


def _object(line: bytes) -> Optional[Dict[str, str]]:
    try:
        value = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):  # the latter: brackets without end
        return None
    if not isinstance(value, dict) or not all(isinstance(fact, (str, int, float)) for fact in value.values()):
        return None
    return {
        _writable(name): _writable(fact if isinstance(fact, str) else json.dumps(fact)) for name, fact in value.items()
    }


def _writable(text: str) -> str:
    """Return text that can be written: JSON can name halves of a character, which are shown as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


# Reaping


def reaped() -> Iterator[Tuple[int, int, resource.struct_rusage]]:
    """Yield (pid, wait status, resources used) of each child that ended or was stopped, without waiting."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status, usage


class ExitFacts(TypedDict):
    """Members of `Exited`."""

    code: Optional[int]
    signal: Optional[str]
    max_rss_kb: int
    cpu_s: float


def exit_facts(status: int, usage: resource.struct_rusage) -> ExitFacts:
    """Return how a child ended."""
    # macOS counts bytes, other systems kibibytes (getrusage(2)).
    rss_kb = usage.ru_maxrss // 1024 if sys.platform == "darwin" else usage.ru_maxrss
    return {
        "code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": _signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None,
        "max_rss_kb": int(rss_kb),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 6),
    }


def _signal_name(number: int) -> str:
    """Return a signal's name without SIG; real-time signals have only a number."""
    try:
        return signal.Signals(number).name[3:]
    except ValueError:
        return str(number)


# Which processes belong to which task


class TaskProcesses:
    """What is known of one task's processes."""

    def __init__(self, name: str, leader: Identity) -> None:
        self.name = name
        self.leader = leader
        self.is_reaped = False
        """The leader was waited for: from then on its id may be given to another process."""
        self.is_scattered = False
        """Reaped, and nothing was left in its group and session: these ids mean nothing any more."""
        self.known: Set[Identity] = set()
        """Everything that was ever seen to belong to it and was alive at the last look."""


def owners(
    rows: Iterable[Process],
    tasks: Iterable[TaskProcesses],
    others: Iterable[Process],
    mark_of: Callable[[Process], str],
    not_ours: Set[int],
) -> Dict[str, List[Process]]:
    """Return the living processes of each task; under `JOB` those of the job that belong to no known task.

    A task is a session of its own. A process that left the session is found as a descendant, or was seen as one before,
    or (reparented to the agent by then) names the task in its environment.

    Args:
        rows: the process table.
        tasks: what is known of each; their `known` and `is_scattered` are updated.
        others: processes that are the job's for another reason (below the agent, or marked).
        mark_of: the task that a process's environment names; empty if none.
        not_ours: ids of processes that belong to no task: the agent, its guard, its ancestors.
    """
    living = [row for row in rows if not row.is_dead and row.pid not in not_ours]
    owned: Dict[str, List[Process]] = {JOB: []}
    taken: Set[int] = set()
    for task in tasks:
        mine = _with_descendants([row for row in living if _is_seed(row, task)], living, taken)
        owned[task.name] = mine
    for row in others:
        if row.pid in taken or row.is_dead or row.pid in not_ours:
            continue
        mark = mark_of(row)
        owned[mark if mark in owned else JOB].extend(_with_descendants([row], living, taken))
    for task in tasks:
        mine = owned[task.name]
        task.known = {row.identity for row in mine}
        if task.is_reaped and not any(task.leader.pid in (row.pgid, row.sid) for row in mine):
            task.is_scattered = True
    return owned


def _is_seed(row: Process, task: TaskProcesses) -> bool:
    if row.identity in task.known:
        return True
    if task.is_scattered:
        return False
    return task.leader.pid in (row.pgid, row.sid) or (row.pid == task.leader.pid and not task.is_reaped)


def _with_descendants(seeds: List[Process], living: List[Process], taken: Set[int]) -> List[Process]:
    """Return `seeds` and all below them, each once, and note them in `taken`."""
    both = seeds + process.descendants([row.pid for row in seeds], living)
    mine = []
    for row in both:
        if row.pid not in taken:
            taken.add(row.pid)
            mine.append(row)
    return mine
