"""The guard: parent of the agent, and there for one case only - the agent dies first.

Then it inherits every process that the agent started (it is a subreaper) and ends them. It leaves the channel to
the agent from the start. The other way round, the agent notices a dead guard by the end of their link.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import Callable, Dict, List, Optional

from distrun_runtime.agent import reaper, record, sweep
from distrun_runtime.agent.agent import Agent
from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.record import Record
from distrun_runtime.contract import process, wire
from distrun_runtime.contract.process import Process
from distrun_runtime.errors import ContractError


def serve(first: bytes = b"", idle: Callable[[], None] = lambda: None) -> int:
    """Serve as guard and agent over standard input and output; return the exit code (in both processes).

    Args:
        first: bytes that were read ahead from standard input.
        idle: called once in the guard, which has nothing else to do then; must neither wait nor raise.
    """
    reaper.set_signals()
    _own_session()
    process.become_subreaper()
    guard = process.identity(os.getpid())
    ours, theirs = socket.socketpair()
    agent = os.fork()
    if agent == 0:
        ours.close()
        reaper.set_signals([signal.SIGTERM, signal.SIGCHLD])
        _own_session()
        is_subreaper = process.become_subreaper()
        channel = Channel(os.dup(0), os.dup(1))
        _leave_standard_streams()
        return Agent(channel, guard, theirs, is_subreaper).run(os.urandom(8).hex(), first)
    theirs.close()
    _leave_standard_streams()
    return _watch(agent, ours, idle)


def _watch(agent: int, link: socket.socket, idle: Callable[[], None]) -> int:
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
    _clean_up(_last_words(link))
    return reaper.exit_code(status)


def _clean_up(facts: Dict[str, object]) -> None:
    folder = str(facts.get("folder", ""))
    found = _load(folder)
    records: List[Record] = [found] if found is not None else []
    marks = {"DISTRUN_JOB_ID": str(facts.get("job", "")), "DISTRUN_HOST": str(facts.get("host", ""))}

    def find() -> List[Process]:
        return sweep.belongings(records, marks, below=[os.getpid()], is_fresh=True)

    def reap() -> None:
        for _ in reaper.reaped():
            pass

    if facts:
        sweep.end_all(find, float(str(facts["grace_s"])), reap)
        record.remove(folder)


def _last_words(link: socket.socket) -> Dict[str, object]:
    """Return what the agent said when the job began; empty if it never did."""
    link.setblocking(False)
    try:
        frames = wire.Decoder().feed(link.recv(65536))
    except OSError:
        return {}
    return frames[0].header if frames else {}


def _load(folder: str) -> Optional[Record]:
    try:
        return record.load(folder) if folder else None
    except (OSError, ContractError, ValueError):
        return None


def _own_session() -> None:
    """Leave the terminal's session, so that its Ctrl-C reaches the launcher only."""
    with contextlib.suppress(OSError):  # already the leader of one
        os.setsid()


def _leave_standard_streams() -> None:
    """Point standard input and output at nothing: they are the channel, and stray words must not reach it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    os.close(nothing)
