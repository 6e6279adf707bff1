"""End what a job left on this machine: by the record of its agent, by descent, and by the mark in environments.

Used by the guard when the agent died, and by `distrun kill` when both did. Each signal goes to a process whose
identity was just verified; never by name, never to this process or its ancestors.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from distrun_runtime.agent import record
from distrun_runtime.agent.ladder import GIVE_UP_S
from distrun_runtime.agent.record import Record
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Limits
from distrun_runtime.contract.process import Identity, Process
from distrun_runtime.errors import ContractError

POLL_S = 0.05
AGENT = "import binascii,json,os,sys,zlib"
"""Stands in the command line of every agent and guard: how their program begins."""
NAMES = ("distrun's agent", "distrun's guard")
"""What the two are called in a report: their command lines say nothing to a reader."""


class Report(NamedTuple):
    """What a sweep did. Processes are (pid, command)."""

    job: str
    ended: Tuple[Tuple[int, str], ...]
    """What was there and is no more."""
    left: Tuple[Tuple[int, str], ...]
    """What would not die, or is not ours to signal."""
    folders: Tuple[str, ...]
    """The job's private folders that were removed."""


def sweep(job: str, grace_s: Optional[float]) -> Report:
    """End every process of a job of the calling user on this machine, and remove its private folders.

    A living agent is asked to do it (SIGTERM, and SIGCONT in case it is frozen) and has `grace_s` and two seconds;
    then, or without one, everything recorded or marked gets TERM, `grace_s`, KILL. Nothing to end is no error. Waits
    until it is over.
    Without a `grace_s` it is the job's own, as recorded.
    """
    folders = record.folders(job)
    records = [found for found in map(_load, folders) if found is not None]
    if grace_s is None:
        grace_s = max((found.grace_s for found in records), default=Limits().grace_s)
    ours = {who: name for found in records for who, name in zip((found.agent, found.guard), NAMES)}

    def find() -> List[Process]:
        return process.mine(belongings(records, {"DISTRUN_JOB_ID": job}))

    there = {row.identity: _named(row.identity, ours) for row in find()}
    for folder in folders:
        record.note_kill(folder)
    agents = [found.agent for found in records if process.is_alive(found.agent)]
    for agent in agents:
        _send(agent, signal.SIGTERM)
        _send(agent, signal.SIGCONT)
    deadline = time.monotonic() + grace_s + 2.0
    while any(process.is_alive(agent) for agent in agents) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    more, left = end_all(find, grace_s)
    there.update((who, command) for who, command in more.items() if who not in there)
    guards = [found.guard for found in records if process.is_alive(found.guard)]
    deadline = time.monotonic() + 1.0
    while any(process.is_alive(guard) for guard in guards) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    gone = [folder for folder in folders if not left]
    for folder in gone:
        record.remove(folder)
    remaining = tuple((row.pid, process.command_of(row.pid)) for row in left)
    stuck = {row.identity for row in left}
    ended = tuple((who.pid, text) for who, text in there.items() if who not in stuck)
    return Report(job, ended, remaining, tuple(gone))


def belongings(
    records: Iterable[Record],
    marks: Dict[str, str],
    below: Iterable[int] = (),
    is_fresh: bool = False,
) -> List[Process]:
    """Return the living processes of a job: recorded, marked, below the processes `below`, and all beneath those.

    Args:
        records: of the job's agents here. The agents and guards themselves count.
        marks: what the environment of the job's processes holds.
        below: process ids whose descendants all belong to the job.
        is_fresh: the records were true a moment ago, so that groups count even when their leader is dead.
    """
    rows = process.table()
    me = os.getpid()
    not_ours = process.ancestors(me, rows) | {me}
    living = [row for row in rows if not row.is_dead and row.pid not in not_ours]
    seeds = process.marked(marks, living)
    for found in records:
        leaders = [who for _, who in found.tasks if is_fresh or process.is_alive(who)]
        groups = {who.pid for who in leaders}
        recorded = set(leaders) | set(found.known) | {found.agent, found.guard}
        recorded_ids = {who.pid for who in recorded if process.is_alive(who)}
        seeds += [row for row in living if row.pid in recorded_ids or row.pgid in groups or row.sid in groups]
    seeds += process.descendants(list(below), living)
    every = seeds + process.descendants([row.pid for row in seeds], living)
    return list({row.pid: row for row in every}.values())


def end_all(
    find: Callable[[], List[Process]], grace_s: float, reap: Callable[[], object] = lambda: None
) -> Tuple[Dict[Identity, str], List[Process]]:
    """Send TERM to what `find` returns, KILL after `grace_s` until nothing is found, for at most GIVE_UP_S more.

    `reap` is called before each look. Returns what was signalled (with its command) and what is left. Waits.
    """
    signalled: Dict[Identity, str] = {}
    kill_at = time.monotonic() + grace_s
    while True:
        reap()
        found = find()
        now = time.monotonic()
        if not found or now >= kill_at + GIVE_UP_S:
            return signalled, found
        for row in found:
            if now >= kill_at:
                signalled.setdefault(row.identity, process.command_of(row.pid))
                _send(row.identity, signal.SIGKILL)
            elif row.identity not in signalled:
                signalled[row.identity] = process.command_of(row.pid)
                _send(row.identity, signal.SIGTERM)
                _send(row.identity, signal.SIGCONT)
        time.sleep(POLL_S)


def is_ours(pid: int) -> bool:
    """Return whether a process is an agent or a guard."""
    return AGENT in process.command_of(pid, len(AGENT) + 1000)


def _named(who: Identity, ours: Mapping[Identity, str]) -> str:
    """Return what a process is called in a report; `ours`: agents and guards by their records."""
    return ours.get(who) or (" or ".join(NAMES) if is_ours(who.pid) else process.command_of(who.pid))


def _send(who: Identity, number: int) -> None:
    with contextlib.suppress(OSError):  # not ours to signal: it stays, and is reported
        process.send_signal(who, number)


def _load(folder: str) -> Optional[Record]:
    try:
        return record.load(folder)
    except (OSError, ContractError, ValueError):
        return None
