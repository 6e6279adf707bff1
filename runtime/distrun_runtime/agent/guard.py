"""Starts the agent of a host and stays as its parent, the guard, which ends all tasks if the agent dies.

The guard is a subreaper, so it inherits every process that the agent started. It leaves the channel to the agent. If
the guard dies first, the agent notices that a pipe between them was closed, and ends its tasks.

The agent's first frame leaves before most of the agent is imported, so that the coordinator need not wait for that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, NamedTuple, Optional

from distrun_runtime.agent.channel import Channel, Connection, Descriptors
from distrun_runtime.contract import process, wire
from distrun_runtime.contract.process import Identity, Process

if TYPE_CHECKING:
    from distrun_runtime.agent.agent import Returns

TERMINAL_SIGNALS = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTSTP", "SIGTTIN", "SIGTTOU")
"""Signals of a terminal. The launcher gets them and tells the agent what to do."""


def serve(
    first: bytes = b"",
    idle: Callable[[], None] = lambda: None,
    connection: Optional[Connection] = None,
    returns: Optional[Returns] = None,
) -> int:
    """Serve as guard and agent; return the exit code (in both processes).

    Args:
        first: bytes that were read ahead from the connection.
        idle: called once in the guard, which has nothing else to do then. Must neither wait nor raise.
        connection: to the coordinator, both sides of which have proved who they are. None: standard input and output;
            then the agent begins with its first line.
        returns: how the agent gets another connection; None: it waits for one if the plan says `hold`.
    """
    set_signals()
    _own_session()
    process.become_subreaper()
    alive, guard_lives = os.pipe()
    notes, agent_notes = os.pipe()
    guard = process.identity(os.getpid())
    agent = os.fork()
    if agent == 0:
        os.close(guard_lives)
        os.close(notes)
        return _serve_as_agent(GuardLink(guard, alive, agent_notes), first, connection, returns)
    os.close(alive)
    os.close(agent_notes)
    _leave_standard_streams()
    if connection is not None:
        connection.close()
    return _watch(agent, notes, idle)


def set_signals(heard: Iterable[int] = ()) -> None:
    """Ignore the terminal's signals, let `heard` wake the process, and reset every other signal to its default.

    What this process inherited as ignored or blocked would reach every task through exec, so it is undone. For the same
    reason a signal is ignored by a handler that does nothing: exec resets a handler to the default.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    pythons_own = {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}  # Popen restores these two
    for number in signal.Signals:
        if number not in pythons_own and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    for each in [getattr(signal, name) for name in TERMINAL_SIGNALS] + list(heard):
        signal.signal(each, _do_nothing)


class GuardLink(NamedTuple):
    """The guard, as the agent sees it."""

    identity: Identity
    alive: int
    """Pipe that is closed when the guard ends."""
    notes: int
    """Pipe for what the guard must know if the agent dies. It is written once, then closed."""


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
    guard: GuardLink, first: bytes, connection: Optional[Connection], returns: Optional[Returns]
) -> int:
    set_signals([signal.SIGTERM, signal.SIGCHLD])
    wakeup = Wakeup()
    _own_session()
    is_subreaper = process.become_subreaper()
    me = process.identity(os.getpid())
    channel = Channel(connection or Descriptors(os.dup(0), os.dup(1)))
    _leave_standard_streams()
    if connection is None:
        channel.greet(b"DISTRUN/%d %s\n" % (wire.VERSION, os.urandom(8).hex().encode("ascii")))
    channel.say(
        "hello",
        version=wire.VERSION,
        agent=me._asdict(),
        guard=guard.identity._asdict(),
        host=os.uname().nodename,
        python=sys.version.split()[0],
        platform=sys.platform,
        capabilities={
            "procfs": not process.is_portable(),
            "subreaper": is_subreaper,
            "pidfd": process.has_pidfd(),
        },
        time=time.time(),
    )
    channel.flush()
    from distrun_runtime.agent.agent import Agent

    return Agent(channel, guard, me, wakeup, is_subreaper, returns=returns).run(first)


def _watch(agent: int, notes: int, idle: Callable[[], None]) -> int:
    """Wait for the agent's end, then for the end of everything it started."""

    def pass_on(number: int, frame: object) -> None:
        del frame
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, number)

    # The child is ours until it is waited for, so its id cannot have become another's before that.
    signal.signal(signal.SIGTERM, pass_on)
    idle()
    status = 0
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == agent:
            break
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note = _note(notes)
    if note is not None:
        _clean_up(note)
    return exit_code(status)


def exit_code(status: int) -> int:
    """Return a wait status as a shell's exit code: 128 + number for a signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _note(notes: int) -> Optional[Dict[str, Any]]:
    """Return what the agent noted for the guard when the job began; None if no job began."""
    os.set_blocking(notes, False)  # a process that the agent left behind may hold the other end
    try:
        frames = wire.Decoder().feed(os.read(notes, 65536))
    except OSError:
        return None
    return frames[0].header if frames else None


def _clean_up(note: Dict[str, Any]) -> None:
    """End what the agent started and left, and remove the job's folder."""
    from distrun_runtime.agent import record, sweep  # not before the first frame; their code is in memory

    folder = str(note["folder"])
    found = record.find(folder)
    records = [] if found is None else [found]
    marks = dict(note["marks"])

    def find() -> List[Process]:
        return sweep.belongings(records, marks, below=[os.getpid()], is_fresh=True)

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    sweep.end_all(find, float(note["grace_s"]), reap)
    record.remove(folder)


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


def _do_nothing(number: int, frame: object) -> None:
    del number, frame
