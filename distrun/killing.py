"""Ends jobs from the machine that launched them, and removes the folders of jobs that are over."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, List, NamedTuple

from distrun import backends, client, remote_jobs
from distrun.backends.base import Swept
from distrun.client import CoordinatorLost
from distrun.errors import DistrunError, UsageError
from distrun_runtime.contract import facts, process
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator.failures import Survivor
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.backends.engine import FoundJob
    from distrun.backends.queue import QueueBackend

POLL_S = 0.05


@dataclass(frozen=True)
class Killed:
    """What `kill` did, and what came of it."""

    done: tuple[str, ...]
    """What was done before the sweep, a line each."""
    swept: Mapping[str, Swept] = field(default_factory=dict)
    """By host."""
    is_quiet: bool = False
    """The job was over already: where nothing was left, nothing is said."""

    @property
    def left(self) -> list[str]:
        """The processes that did not end, a line each."""
        return self._told(lambda each: each.told_left)

    @property
    def unasked(self) -> list[str]:
        """The hosts that did not answer, a line each."""
        return self._told(lambda each: each.told_problem)

    @property
    def lines(self) -> list[str]:
        """All that is to be told, a line each."""

        def told(each: Swept) -> list[str]:
            return [] if self.is_quiet and each == Swept() else each.lines()

        return [*self.done, *self._told(told)]

    def _told(self, of: Callable[[Swept], list[str]]) -> list[str]:
        """Return lines about each host; it is named where there are several."""
        found = [(host, line) for host, each in self.swept.items() for line in of(each)]
        return [f"{host}: {line}" if len(self.swept) > 1 else line for host, line in found]


def kill(folder: JobFolder, grace_s: float | None = None, wait_s: float = 10.0) -> Killed:
    """Stop a job, from any terminal of its machine; return what was done.

    Its launcher is asked, by the control socket or else by SIGTERM, and given the grace time and `wait_s`. Then what is
    left is found by what was recorded and by the job's mark, and ended. Never by name. A job that had lost its launcher
    is then `killed`, unless a host could not be asked: it stays `lost`, so that this can be tried again.

    A job whose files are damaged is ended as far as they can be read.

    Raises:
        UsageError: the job was launched on another machine, which cannot be asked; or its plan cannot be read.
    """
    state = folder.standing()
    if state in facts.OVER:
        if folder.is_unplanned:
            return Killed((f"is over already: {state}",), is_quiet=True)
        # Its end may have left something that would not die then.
        swept = backends.load(folder.plan().backend).sweep(folder.plan(), grace_s or 0.0)
        return Killed((f"is over already: {state}",), swept, is_quiet=True)
    plan, launcher, done = _read(folder)
    if grace_s is None:
        grace_s = facts.GRACE_S if plan is None else plan.limits.grace_s
    here = socket.gethostname()
    if launcher.get("host", here) != here:
        return _kill_elsewhere(folder, plan, launcher["host"], grace_s, wait_s)
    who = process.Identity(launcher.get("pid", 0), launcher.get("start", ""))
    if launcher and process.is_alive(who):
        with _connected(folder) as connection:
            if not _is_heard(connection, "stop"):
                with contextlib.suppress(OSError):  # it is for a message only
                    folder.ask_to_end()
                process.send_signal(who, signal.SIGTERM)
            done.append(f"asked its launcher (pid {who.pid}) to stop the job")
            has_ended = _wait_gone(who, grace_s + wait_s) or (_is_heard(connection, "kill") and _wait_gone(who, wait_s))
        if has_ended:
            done.append("the launcher has ended")
        else:
            process.send_signal(who, signal.SIGKILL)
            _wait_gone(who, wait_s)
            done.append(f"killed the launcher, which did not end within {duration(grace_s + wait_s)}")
    elif launcher:
        done.append(f"its launcher (pid {who.pid}) is gone")
    if folder.is_unplanned:
        withdrawn = backends.load((folder.request() or {})["launcher"]).withdraw(folder.path)
        if not any(each.problem for each in withdrawn.values()):
            done += _buried(folder, withdrawn)
        return Killed(tuple(done), withdrawn)
    if plan is None:
        raise UsageError(
            f"job {folder.id}: {'; '.join(done)}",
            f"to end what may be left of it: distrun kill -H FILE {folder.id}, where FILE names its hosts (without -H "
            "and with --stale: this machine)",
        )
    swept = backends.load(plan.backend).sweep(plan, grace_s)
    client.forget(folder)
    if state != facts.DAMAGED and not any(each.problem for each in swept.values()):
        done += _buried(folder, swept)
    return Killed(tuple(done), swept)


def _buried(folder: JobFolder, swept: Mapping[str, Swept], is_gone: bool = False) -> list[str]:
    """Write the end of a job that had lost its launcher; return what went wrong, a line each."""
    try:
        folder.bury((Survivor(left, host) for host, each in swept.items() for left in each.left), is_gone)
    except OSError as err:
        return [f"its end could not be recorded: {err}"]
    return []


def _connected(folder: JobFolder) -> AbstractContextManager[client.ControlConnection | None]:
    """Return a connection to a job's coordinator by its control socket, if it has one and answers."""
    try:
        return client.connect(folder, any_version=True)
    except (DistrunError, JobStoreError, OSError):
        return contextlib.nullcontext()


def _is_heard(connection: client.ControlConnection | None, what: str) -> bool:
    """Ask the coordinator to `stop` the job, or to `kill` all tasks at once; return whether it has heard that."""
    try:
        return connection is not None and connection.ask(what).type == what
    except CoordinatorLost:
        return False


def _kill_elsewhere(folder: JobFolder, plan: Plan | None, host: str, grace_s: float, wait_s: float) -> Killed:
    """Stop a job whose coordinator is on another machine, which shares our store or is one of its hosts.

    Raises:
        UsageError: it cannot be asked, or does not end.
    """
    problem = UsageError(
        f"job {folder.id} was launched on {host}",
        f"type this command there; or name the job's hosts: distrun kill -H FILE {folder.id}",
    )
    with _connected(folder) as connection:
        limit_s = grace_s + wait_s
        if connection is None or not _is_heard(connection, "stop"):
            if plan is None or not (folder.control() or {}).get("login"):  # else its host is one of the job's hosts
                raise problem
            swept = backends.load(plan.backend).sweep(plan, grace_s)
            done = [f"its coordinator on {host} does not answer"]
            if not any(each.problem for each in swept.values()):
                done += _buried(folder, swept, is_gone=True)
            return Killed(tuple(done), swept)
        done = [f"asked its coordinator on {host} to stop the job"]
        if not connection.ends(limit_s):
            _is_heard(connection, "kill")
            if not connection.ends(limit_s):
                raise problem
            done.append(f"asked it to kill the tasks, which did not end within {duration(limit_s)}")
    remote_jobs.refreshed(folder)
    return Killed((*done, "the coordinator has ended"))


def _read(folder: JobFolder) -> tuple[Plan | None, dict[str, Any], list[str]]:
    """Return a job's plan and launcher, None or empty where they cannot be read, and what is wrong, a line each."""
    plan: Plan | None = None
    launcher: dict[str, Any] = {}
    wrong = []
    try:
        plan = None if folder.is_unplanned else folder.plan()
    except JobStoreError as err:
        wrong.append(str(err))
    try:
        launcher = folder.launcher()
    except JobStoreError as err:
        wrong.append(str(err))
    return plan, launcher, wrong


def _wait_gone(who: process.Identity, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while process.is_alive(who):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True


# What jobs of an engine have left, as far as this machine's job store says.


def abandoned(found: Sequence[FoundJob], store: JobStore) -> list[FoundJob]:
    """Return the jobs of an engine whose coordinator does not live.

    Raises:
        JobStoreError: the note of a job that goes on is damaged.
    """
    from distrun.backends import engine, queue

    living = {queue.recorded_marker(job.path) for job in store.list() if job.standing() in facts.GOING}
    return [each for each in found if each.marker.startswith(engine.MARK) and each.marker not in living]


def nodes_of_lost(backend: QueueBackend, store: JobStore) -> list[str]:
    """Return the nodes on which jobs of an engine may have left processes.

    These are jobs whose coordinator is lost, that lost a node, or that ended with processes that were left. There are
    none if the engine starts no program on a node that it is told.
    """
    found: dict[str, None] = {}
    for job in store.list() if backend.engine.on_node("node", ("true",)) else ():
        with contextlib.suppress(JobStoreError, KeyError):
            if job.standing() in facts.GOING or job.is_unplanned or job.plan().backend != backend.name:
                continue
            outcome = job.outcome()
            if outcome is None or outcome["reason"] == facts.HOST_LOST or outcome["survivors"]:
                found.update(dict.fromkeys(host.name for host in job.plan().hosts))
    return list(found)


# Removes folders of jobs that are over.
#
# Nothing outside the job store is touched: links in a folder are removed, not followed. A job with --run-dir has only a
# link in the store; the link goes, and the folder that the user named stays.


OLDER_S = 30 * 86400.0
"""Jobs that ended so long ago are removed, unless the user says otherwise."""


class RemovedJob(NamedTuple):
    """What became of a job, or would."""

    job: str
    """Its id."""
    state: str
    folder: str
    """Its path in the store."""
    host: str
    """The host from which its folder was removed, too; empty: it has none there, or that stays."""
    size: int
    """Bytes that were freed, or would be."""
    kept: str = ""
    """The folder outside the store that was left."""
    problem: str = ""
    """Why something of it is still there."""


def check_is_over(folder: JobFolder, state: str, has_lost: bool) -> None:
    """Refuse to remove a job that was named and is not over.

    Raises:
        UsageError: it is not.
    """
    if state in facts.LIVE:
        raise UsageError(f"job {folder.id} is {state}", f"first: distrun kill {folder.id}")
    if state == facts.UNKNOWN:
        host = folder.launcher()["host"]
        raise UsageError(
            f"job {folder.id} may still run: it was launched on {host}", f"on {host}: distrun status {folder.id}"
        )
    if state == facts.DAMAGED and folder.has_launcher():
        raise UsageError(f"job {folder.id} is damaged, and its launcher runs", f"first: distrun kill {folder.id}")
    if state == facts.LOST and not has_lost:
        text = f"job {folder.id} lost its launcher, and may have left processes"
        raise UsageError(text, f"first: distrun kill {folder.id}; or add --lost")


def remove(folder: JobFolder, state: str, silent: dict[str, str], is_dry: bool) -> tuple[RemovedJob, list[str]]:
    """Remove the folder of a job, and the one on the host that had its coordinator.

    Whether the job is over, and this is wanted, was seen to before.

    Args:
        folder: the job's.
        state: how it stands.
        silent: why a host cannot be asked, by what reaches it; it is asked once.
        is_dry: only say what would become of it.

    Returns:
        What became of it, and what went wrong, a line each.
    """
    host, why = _remove_there(folder, silent, is_dry)
    path = str(folder.path)
    size, kept = (0, os.path.realpath(path)) if os.path.islink(path) else (_size(path), "")
    found = RemovedJob(folder.id, state, path, host, size, kept)
    done = found if is_dry else _remove_here(found)
    return done, [each for each in (why, done.problem) if each]


def _remove_there(folder: JobFolder, silent: dict[str, str], is_dry: bool) -> tuple[str, str]:
    """Remove the folder that a job has on the host that had its coordinator.

    Return the host if there is one and this was done (or would be), and why its folder stays.
    """
    try:
        where = folder.control()
    except JobStoreError:
        return "", ""
    if where is None or not where.get("folder"):
        return "", ""
    login, host = str(where["login"]), str(where["host"])
    if is_dry:
        return host, ""
    try:
        why = silent.get(login) or remote_jobs.remove(folder, where)
    except remote_jobs.NotAsked as err:
        why = silent[login] = str(err)
    fix = f"{login} {shlex.join(['rm', '-r', where['folder']])}"
    return ("", f"job {folder.id}: its folder on {host} stays: {why}; fix: {fix}") if why else (host, "")


def _remove_here(found: RemovedJob) -> RemovedJob:
    """Remove a folder of the store."""
    parent, name = os.path.split(found.folder)
    doomed = os.path.join(parent, facts.REMOVED + name)
    try:
        if found.kept:
            os.unlink(found.folder)
            return found
        # At once for all readers; should this process end meanwhile, the next run goes on.
        os.rename(found.folder, doomed)
    except FileNotFoundError:  # a host that shares the store has removed it meanwhile
        return found._replace(size=0, kept="")
    except OSError as err:
        return found._replace(size=0, problem=f"cannot remove {found.folder}: {err.strerror or err}")
    problem = _delete(doomed)
    return found._replace(size=max(0, found.size - _size(doomed)), problem=problem) if problem else found


def finish(store: JobStore) -> List[str]:
    """Remove what an earlier run could not remove, or left when it was ended; return what is wrong, a line each."""
    try:
        names = [name for name in os.listdir(str(store.jobs)) if name.startswith(facts.REMOVED)]
    except OSError:
        return []
    return [problem for problem in (_delete(str(store.jobs / name)) for name in names) if problem]


def _delete(path: str) -> str:
    """Remove a folder of the store; return why something of it is left, "" if nothing is."""
    problems: List[str] = []

    def note(function: object, where: str, error: object) -> None:
        del function
        err = error[1] if isinstance(error, tuple) else error
        problems.append(f"cannot remove {where}: {getattr(err, 'strerror', None) or err}")

    # It holds folders open while it goes down, so that a link that is put in one's place is not followed.
    shutil.rmtree(path, onerror=note)
    return problems[0] if problems and os.path.lexists(path) else ""


def _size(path: str) -> int:
    """Return what a folder takes on the disk, in bytes, without following links; 0 for what cannot be read."""
    total = 0
    for folder, folders, files in os.walk(path):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total
