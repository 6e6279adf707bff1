"""What of distrun runs on this host: jobs by their records and by the marks in environments, and their processes.

Only what the calling user started, also for root. What runs in another container (pid namespace) of this machine is
another host's business: its records cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from distrun_runtime.agent import record, sweep
from distrun_runtime.agent.record import Record
from distrun_runtime.contract import process, ps
from distrun_runtime.contract.process import Identity, Process
from distrun_runtime.errors import ContractError

ALIVE = "alive"
DEAD = "dead"
STOPPED = "stopped"
NONE = "none"
"""No record names it, and none is above the tasks: only marks tell of the job."""
Key = Tuple[str, str]
"""A job and what it calls this host."""


class Found(NamedTuple):
    """A job on this host that has a record."""

    record: Record
    folder: str
    written: float
    """When the agent last wrote it, wall clock."""


def survey() -> Dict[str, Any]:
    """Return all jobs of the calling user on this host, the ones with most processes last."""
    rows = process.table()
    kept = {(each.record.job, each.record.host): each for each in _kept()}
    environs = _environs(_near(process.mine(_others(rows))))
    marked = [(env["DISTRUN_JOB_ID"], env.get("DISTRUN_HOST", "")) for env in environs.values()]
    keys = list(dict.fromkeys([*kept, *sorted(marked)]))
    return {
        "jobs": [_job(key, kept.get(key), environs) for key in keys],
        "uid": os.geteuid(),
        "hostname": socket.gethostname(),
    }


def end_all(jobs: Iterable[str], grace_s: Optional[float]) -> Dict[str, Any]:
    """End several jobs here, one after the other, each as `end` does; return what it returns for each."""
    return {job: end(job, grace_s) for job in jobs}


def end(job: str, grace_s: Optional[float]) -> Dict[str, Any]:
    """End a job here, as `sweep.sweep` does. Waits until it is over."""
    report = sweep.sweep(job, grace_s)
    return {"ended": [list(each) for each in report.ended], "left": [list(each) for each in report.left]}


def age_s(start: str) -> Optional[float]:
    """Return the age in seconds of a process with this start (`Identity.start`); None if that does not tell."""
    kind, _, rest = start.partition(":")
    try:
        if kind == "proc":
            ticks = float(rest.rpartition(":")[2])
            return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
        return max(0.0, time.time() - float(rest)) if kind == "ps" else None
    except (ValueError, OSError, AttributeError):
        return None


def row(each: Process, task: str = "") -> Dict[str, Any]:
    """Return what is told of a process."""
    age = age_s(each.start)
    return {
        "pid": each.pid,
        "start": each.start,
        "command": process.command_of(each.pid),
        "task": task,
        "age_s": None if age is None else round(age, 1),
        "state": each.state,
    }


def _job(key: Key, found: Optional[Found], environs: Dict[int, Dict[str, str]]) -> Dict[str, Any]:
    marks = {"DISTRUN_JOB_ID": key[0]}
    if key[1]:
        marks["DISTRUN_HOST"] = key[1]
    records = [found.record] if found else []
    # A job without a name for its host is not one with any name.
    members = [
        each
        for each in process.mine(sweep.belongings(records, marks))
        if key[1] or "DISTRUN_HOST" not in environs.get(each.pid, {})
    ]
    agent, guard = (found.record.agent, found.record.guard) if found else _above(members)
    names = _names(records)
    return {
        "job": key[0],
        "host": key[1],
        "agent": _state(agent),
        "guard": _state(guard),
        "quiet_s": max(0.0, round(time.time() - found.written, 1)) if found else None,
        "lease_s": found.record.lease_s if found else None,
        "grace_s": found.record.grace_s if found else None,
        "processes": [row(each, names.get(each.identity) or _task(environs.get(each.pid, {}))) for each in members],
        "folder": found.folder if found else "",
    }


def _names(records: Iterable[Record]) -> Dict[Identity, str]:
    names: Dict[Identity, str] = {}
    for each in records:
        names.update({who: name for name, who in each.tasks})
        names.update({each.agent: "agent", each.guard: "guard"})
    return names


def _task(env: Dict[str, str]) -> str:
    role, rank = env.get("DISTRUN_ROLE", ""), env.get("DISTRUN_RANK", "")
    return "%s-%s" % (role, rank) if role and rank else ""


def _above(members: List[Process]) -> Tuple[Optional[Identity], Optional[Identity]]:
    """Return agent and guard of a job whose record is lost (somebody tidied up /tmp), by what they run.

    The agent is the nearest such process above the tasks, the guard its parent.
    """
    rows = {each.pid: each for each in process.table()}
    for each in members:
        above = rows.get(each.ppid)
        while above is not None and above.pid > 1:
            if sweep.is_ours(above.pid):
                guard = rows.get(above.ppid)
                return above.identity, guard.identity if guard else None
            above = rows.get(above.ppid)
    return None, None


def _state(who: Optional[Identity]) -> str:
    if who is None:
        return NONE
    if not process.is_alive(who):
        return DEAD
    # T: a signal stopped it; t: a debugger did.
    return STOPPED if any(each.state in "Tt" for each in process.table([who.pid])) else ALIVE


def _kept() -> List[Found]:
    found = []
    for job in record.jobs():
        for folder in record.folders(job):
            with contextlib.suppress(OSError, ContractError, ValueError):
                written = os.stat(os.path.join(folder, record.RECORD)).st_mtime
                found.append(Found(record.load(folder), folder, written))
    return found


def _others(rows: List[Process]) -> List[Process]:
    """Return the living processes but us and those above us."""
    spared = process.ancestors(os.getpid(), rows) | {os.getpid()}
    return [each for each in rows if not each.is_dead and each.pid not in spared]


def _near(rows: List[Process]) -> List[Process]:
    """Return the processes of our own container."""
    ours = _namespace(os.getpid())
    return [each for each in rows if _namespace(each.pid) in ("", ours)]


def _namespace(pid: int) -> str:
    try:
        return os.readlink("/proc/%d/ns/pid" % pid)
    except OSError:
        return ""


def _environs(rows: List[Process]) -> Dict[int, Dict[str, str]]:
    """Return the environments of those of `rows` that carry a job's mark, by pid."""
    pids = [each.pid for each in rows]
    found = ps.environs(pids) if process.is_portable() else {pid: process.environ_of(pid) for pid in pids}
    return {pid: env for pid, env in found.items() if env.get("DISTRUN_JOB_ID")}
