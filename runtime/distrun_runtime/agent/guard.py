"""Starts the agent of a host and stays as its parent, the guard, which ends all tasks if the agent dies or freezes.

The guard is a subreaper, so it inherits every process that the agent started. It leaves the channel to the agent. The
agent beats over a pipe. If the guard hears no beat for the lease, it kills the agent, and ends the tasks. If the guard
dies first, the agent notices that a pipe between them was closed, and ends its tasks.

The agent's first frame leaves before most of the agent is imported, so that the coordinator need not wait for that.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import time
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from distrun_runtime.agent.channel import Channel, Connection, Descriptors, MakeReconnector
from distrun_runtime.contract import facts, process, session, streams
from distrun_runtime.contract.process import Identity, Process
from distrun_runtime.errors import WireError

TERMINAL_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Signals of a terminal. The launcher gets them and tells the agent what to do."""
SHORTEST_BEAT_S = 0.5
LONGEST_BEAT_S = 5.0
RECORD = "agent.json"
"""`share.RECORD`: all that is known of `share` before the first frame."""
KILLED_S = 3.0
"""How long the end of an agent that was killed is waited for. One that waits for a dead disk does not end."""


def serve(
    run_agent: Callable[[Start], int],
    first: bytes = b"",
    idle: Callable[[], None] = lambda: None,
    connection: Optional[Connection] = None,
    make_reconnector: Optional[MakeReconnector] = None,
) -> int:
    """Serve as guard and agent; return the exit code (in both processes).

    Args:
        run_agent: what the agent's process does once it has said hello; returns its exit code.
        first: bytes that were read ahead from the connection.
        idle: called once in the guard, which has nothing else to do then. Must neither wait nor raise.
        connection: to the coordinator, both sides of which have proved who they are. None: standard input and output;
            then the agent begins with its first line.
        make_reconnector: how the agent gets another connection; None: it waits for one if the plan says `hold`.
    """
    streams.open_streams()
    set_signals()
    _own_session()
    is_subreaper = process.become_subreaper()
    alive, guard_lives = os.pipe()
    notes, agent_notes = os.pipe()
    guard = process.identity(os.getpid())
    agent = os.fork()
    if agent == 0:
        os.close(guard_lives)
        os.close(notes)
        return _serve_as_agent(run_agent, GuardLink(guard, alive, agent_notes), first, connection, make_reconnector)
    os.close(alive)
    os.close(agent_notes)
    _leave_standard_streams()
    if connection is not None:
        connection.close()
    return _watch(agent, notes, idle, is_subreaper)


def set_signals(heard: Iterable[int] = ()) -> None:
    """Ignore signals of the terminal and those for tasks, let `heard` wake the process, and reset all others.

    What this process inherited as ignored or blocked would reach every task through exec, so it is undone. For the same
    reason a signal is ignored by a handler that does nothing: exec resets a handler to the default.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pythons_own = {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}  # Popen restores these two
    of_tasks = {signal.Signals["SIG" + name] for name in process.TASKS_SIGNALS}
    for number in signal.Signals:
        if number not in pythons_own and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, process.do_nothing if number in of_tasks else signal.SIG_DFL)
    for each in [getattr(signal, name) for name in TERMINAL_SIGNALS] + list(heard):
        signal.signal(each, process.do_nothing)
    process.outlive_tasks_signals()


class GuardLink(NamedTuple):
    """The guard, as the agent sees it."""

    identity: Identity
    alive: int
    """Pipe that is closed when the guard ends."""
    notes: int
    """Pipe for what the guard must know if the agent dies, and then for the agent's beats."""


class Start(NamedTuple):
    """What an agent has when it has said hello."""

    channel: Channel
    guard: GuardLink
    me: Identity
    wakeup: Wakeup
    is_subreaper: bool
    make_reconnector: Optional[MakeReconnector]
    """How it gets another connection; None: it waits for one if the plan says `hold`."""
    first: bytes
    """Bytes that were read ahead from the channel."""


class Wakeup:
    """Signals as bytes on a descriptor that a selector can wait for."""

    def __init__(self) -> None:
        self.descriptor, self._writing = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writing, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)

    def read(self) -> bytes:
        """Return the numbers of the signals that arrived since the last call."""
        try:
            return os.read(self.descriptor, 4096)
        except BlockingIOError:
            return b""


def _serve_as_agent(
    run_agent: Callable[[Start], int],
    guard: GuardLink,
    first: bytes,
    connection: Optional[Connection],
    make_reconnector: Optional[MakeReconnector],
) -> int:
    set_signals([signal.SIGTERM, signal.SIGCHLD])
    wakeup = Wakeup()
    _own_session()
    is_subreaper = process.become_subreaper()
    me = process.identity(os.getpid())
    channel = Channel(connection or Descriptors(os.dup(0), os.dup(1)))
    _leave_standard_streams()
    if connection is None:
        channel.greet(b"DISTRUN/%d %s\n" % (session.VERSION, os.urandom(8).hex().encode("ascii")))
    channel.send(
        {
            "type": "hello",
            "version": session.VERSION,
            "agent": me._asdict(),
            "guard": guard.identity._asdict(),
            "host": os.uname().nodename,
            "python": sys.version.split()[0],
            "platform": sys.platform,
            "capabilities": {
                "procfs": not process.is_portable(),
                "subreaper": is_subreaper,
                "pidfd": process.has_pidfd(),
            },
            "time": time.time(),
        }
    )
    channel.flush()
    return run_agent(Start(channel, guard, me, wakeup, is_subreaper, make_reconnector, first))


class Silence:
    """How long the agent has not beaten, in time during which the guard itself ran. No clock, no side effects.

    After a machine was suspended, or the guard stopped, the agent has to get its turn before it is judged: however
    long a wait took, it counts as two intervals at most.
    """

    def __init__(self) -> None:
        self._limit_s = math.inf
        self._silent_s = 0.0
        self._looked_at = 0.0

    @property
    def interval_s(self) -> float:
        """Seconds until the next look at the latest; infinite before the first beat."""
        return math.inf if self._limit_s == math.inf else beat_s(self._limit_s)

    def beat(self, limit_s: float, now: float) -> None:
        """Note a beat. The next one has to come within `limit_s` seconds."""
        self._limit_s, self._silent_s, self._looked_at = limit_s, 0.0, now

    def is_over(self, now: float) -> bool:
        """Return whether the agent has been silent for too long."""
        self._silent_s += min(now - self._looked_at, 2 * self.interval_s)
        self._looked_at = now
        return self._silent_s >= self._limit_s


def beat_s(lease_s: float) -> float:
    """Return how often an agent beats, in seconds."""
    return max(SHORTEST_BEAT_S, min(LONGEST_BEAT_S, lease_s / 10))


class _Notes:
    """What the agent writes to the guard: a note of its job, then beats."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe
        self.job: Optional[Dict[str, Any]] = None
        """What must be known to do the agent's work; None until a job begins."""
        self._decoder = session.Decoder()
        os.set_blocking(pipe, False)

    def read(self) -> Optional[float]:
        """Take what has come; return the time limit of the last beat, None if there was none."""
        limit_s = None
        with contextlib.suppress(OSError, WireError):
            while data := os.read(self.pipe, 65536):
                for frame in self._decoder.feed(data):
                    if frame.type == "begin":
                        self.job = frame.header
                    else:
                        limit_s = float(frame.header["limit_s"])
        return limit_s


def _watch(agent: int, pipe: int, idle: Callable[[], None], is_subreaper: bool) -> int:
    """Wait for the agent's end, or kill it if it no longer beats; then end everything that it started."""
    import select  # not before the first frame

    def pass_on(number: int, frame: object) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    # The child is ours until it is waited for, so its id cannot have become another's before that.
    passed_on = [int(signal.SIGTERM), *process.outlive_tasks_signals(pass_on)]
    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGCHLD, process.do_nothing)
    wakeup = Wakeup()
    notes, silence = _Notes(pipe), Silence()
    poller = select.poll()
    poller.register(wakeup.descriptor, select.POLLIN)
    poller.register(pipe, select.POLLIN)
    idle()
    status = _reaped(agent)
    while status is None:
        wait_s = silence.interval_s
        for descriptor, event in poller.poll(None if wait_s == math.inf else wait_s * 1000):
            if descriptor == wakeup.descriptor:
                wakeup.read()
            elif event & select.POLLIN:
                limit_s = notes.read()
                if limit_s is not None:
                    silence.beat(limit_s, time.monotonic())
            else:
                poller.unregister(pipe)  # the agent ends
        status = _reaped(agent)
        if status is None and silence.is_over(time.monotonic()):
            status = _kill(agent)
    for each in passed_on:
        signal.signal(each, signal.SIG_IGN)
    notes.read()
    if notes.job is not None and not (is_subreaper and _removed_if_clean(notes.job)):
        _clean_up(notes.job)
    return facts.exit_code_of(status)


def _reaped(agent: int) -> Optional[int]:
    """Reap what has ended; return the agent's wait status, None while it runs."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in (0, agent):
            return status if pid else None


def _kill(agent: int) -> int:
    """Kill an agent that is frozen or hangs; return its wait status. It stays if it cannot end now (a dead disk)."""
    with contextlib.suppress(OSError):  # for the coordinator, which shows it if it still listens
        os.write(2, b"distrun's guard: the agent froze or hangs; it is killed, and its tasks are ended\n")
    os.kill(agent, signal.SIGKILL)
    until = time.monotonic() + KILLED_S
    status = _reaped(agent)
    while status is None and time.monotonic() < until:
        time.sleep(0.01)
        status = _reaped(agent)
    return int(signal.SIGKILL) if status is None else status


def _removed_if_clean(note: Dict[str, Any]) -> bool:
    """Remove the job's folder if the agent left nothing but its record, as a rule it does; return whether that is done.

    That spares `_clean_up`, which costs more than all else that a guard does.
    """
    if process.has_children():
        return False
    # What has the marks need not be below us: `at` gives its jobs the environment of the user's command. Only our
    # user's processes are looked at: root can read everybody's, and one that waits for a dead disk would hold us.
    for pid in process.ids():
        with contextlib.suppress(OSError):  # it is gone
            is_looked_at = pid != os.getpid() and os.stat(f"/proc/{pid}").st_uid == os.geteuid()
            if is_looked_at and process.has_marks(process.environ_of(pid), note["marks"]):
                return False
    folder = str(note["folder"])
    try:
        if os.listdir(folder) != [RECORD]:  # there is more if the agent was killed
            return False
        os.unlink(os.path.join(folder, RECORD))
        os.rmdir(folder)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # another host of the job lives on this machine
        os.rmdir(os.path.dirname(folder))
    return True


def _clean_up(note: Dict[str, Any]) -> None:
    """End what the agent started and left, and remove the job's folder."""
    from distrun_runtime.agent import share, stopping  # not before the first frame; their code is in memory

    folder = str(note["folder"])
    found = share.find_record(folder)
    records = [] if found is None else [found]
    marks: Dict[str, str] = note["marks"]

    def find() -> List[Process]:
        return stopping.belongings(records, marks, below=[os.getpid()], is_fresh=True)

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    stopping.end_all(find, float(note["grace_s"]), reap)
    share.remove_folder(folder)


def _own_session() -> None:
    """Leave the terminal's session, so that its Ctrl-C reaches the launcher only."""
    with contextlib.suppress(OSError):  # already the leader of one
        os.setsid()


def _leave_standard_streams() -> None:
    """Point standard input and output at /dev/null: they are the channel, and stray output must not reach it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
