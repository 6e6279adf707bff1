"""Which of several misfortunes ended the job: the first in time, but no consequence beside a cause. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from distrun_runtime.contract.plan import WORKER
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.outcome import Culprit, Outcome, Problem, TaskResult

COULD_NOT_RUN = (126, 127)
"""With a reason of the agent: the command was never started."""
_NAMED = 8
"""So many of a list are named in a message."""


@dataclass(frozen=True)
class Cause:
    """Something for which a job can end, other than success."""

    reason: str
    """One of `outcome.REASONS`."""
    exit_code: int
    time: float
    """Wall clock, seconds, on our clock as well as we know it."""
    text: str
    short: str = ""
    """What is said while the job is being stopped; `text` is for its last line."""
    task: str = ""
    host: str = ""
    code: Optional[int] = None
    signal: Optional[str] = None
    detail: str = ""
    problems: Tuple[Problem, ...] = ()

    @property
    def is_failure(self) -> bool:
        """Whether a task or a host failed (and not: somebody or a clock ended the job)."""
        return self.reason in (ends.TASK_FAILED, ends.HOST_LOST)


def task_failed(task: TaskResult) -> Cause:
    """Return the cause that a task is which ended by itself with a code or a signal."""
    code = ends.exit_code(task.code, task.signal)
    where = "%s on %s" % (task.name, task.host)
    short = "%s: %s" % (where, "exit code %d" % code if task.signal is None else "signal %s" % task.signal)
    if task.lost_peer:
        how = "ended with code %d" % code if task.signal is None else "was ended by signal %s" % task.signal
        text = "%s %s after it lost %s" % (where, how, task.lost_peer)
        short += " (it lost %s)" % task.lost_peer
    elif task.signal is not None:
        text = "%s was ended by signal %s" % (where, task.signal)
    elif code in COULD_NOT_RUN and task.reason and not task.own_failure:
        text = "%s could not run (exit code %d): %s" % (where, code, _one_line(task.reason))
    else:
        text = "%s failed with exit code %d" % (where, code)
    if task.own_failure:
        text += ": " + _one_line(task.own_failure)
    return _of_task(task, code, text, short)


def task_failing(task: TaskResult, time: float) -> Cause:
    """Return the cause that a task is which said at `time` that it fails, and did not end by itself, or with 0."""
    how = "yet it ended with 0" if task.state == ends.EXITED else "it was stopped before it had ended"
    text = "%s on %s failed: %s; %s" % (task.name, task.host, _one_line(task.own_failure), how)
    short = "%s on %s said that it fails" % (task.name, task.host)
    return dataclasses.replace(_of_task(task, 1, text, short), time=time, code=None, signal=None)


def ended_early(task: TaskResult) -> Cause:
    """Return the cause that a server or scheduler is which ended with 0 while workers went on."""
    text = "%s on %s ended before the workers did (it said 0; the job's exit code is 1)" % (task.name, task.host)
    return _of_task(task, 1, text, "%s on %s ended before the workers did" % (task.name, task.host))


def _of_task(task: TaskResult, code: int, text: str, short: str) -> Cause:
    return Cause(
        reason=ends.TASK_FAILED,
        exit_code=code,
        time=task.ended or 0.0,
        text=text,
        short=short,
        task=task.name,
        host=task.host,
        code=task.code,
        signal=task.signal,
        detail=task.reason,
    )


def host_lost(host: str, why: str, time: float, lease_s: Optional[float] = None) -> Cause:
    """Return the cause that a host is which can no longer be heard.

    `lease_s`: tasks run there, perhaps, and its agent lets them go on for so long without a word from us.
    """
    text = "lost %s: %s" % (host, _one_line(why))
    if lease_s is not None:
        text += "; if that machine still runs, its own agent ends the tasks there within %g s" % lease_s
    return Cause(ends.HOST_LOST, ends.EXIT_HOST_LOST, time, text, "lost %s" % host, host=host, detail=why)


def no_agent(host: str, why: str, time: float) -> Cause:
    """Return the cause that a host is whose agent never answered."""
    short = "no agent on %s" % host
    text = "%s: %s" % (short, _one_line(why))
    return Cause(ends.START_FAILED, ends.EXIT_START_FAILED, time, text, short, host=host, detail=why)


def bad_host(host: str, why: str, time: float) -> Cause:
    """Return the cause that a host is of which it is known why it cannot be used."""
    return Cause(ends.PREFLIGHT, ends.EXIT_PREFLIGHT, time, "", "%s cannot be used" % host, host=host, detail=why)


def unusable(problems: Sequence[Problem], hosts: int, time: float, first: str) -> Cause:
    """Return the cause that all hosts are, of `hosts` in the job, which cannot be used. `first`: first in time."""
    detail = next(problem.text for problem in problems if problem.host == first)
    if len(problems) == 1:
        short = "%s cannot be used" % first
        text = "%s: %s" % (short, _one_line(detail))
    else:
        short = "%d of %d hosts cannot be used" % (len(problems), hosts)
        text = "%s: %s" % (short, listed(["%s (%s)" % (problem.host, problem.kind) for problem in problems]))
    return Cause(ends.PREFLIGHT, ends.EXIT_PREFLIGHT, time, text, short, host=first, detail=detail)


def not_prepared(host: str, why: str, time: float, detail: str) -> Cause:
    """Return the cause that a host is which the files did not reach (or, without a host, that the copying is)."""
    short = "the files did not reach %s" % (host or "the hosts")
    text = "%s: %s" % (short, _one_line(why))
    return Cause(ends.SYNC, ends.EXIT_SYNC, time, text, short, host=host, detail=detail or why)


def start_too_slow(limit_s: float, missing: Sequence[str], time: float) -> Cause:
    """Return the cause that agents or tasks are which did not start in time."""
    text = "not started within %g s (--start-timeout): %s" % (limit_s, listed(missing))
    return Cause(ends.START_FAILED, ends.EXIT_START_FAILED, time, text, "the start took too long")


def timed_out(limit_s: float, time: float) -> Cause:
    """Return the cause that the whole job's time limit is."""
    text = "the job was not done within %g s (--timeout)" % limit_s
    return Cause(ends.TIMEOUT, ends.EXIT_TIMEOUT, time, text)


def interrupted(signal: str, time: float) -> Cause:
    """Return the cause that INT, TERM or HUP to the launcher is."""
    reason, text = {
        "INT": (ends.INTERRUPTED, "interrupted (SIGINT)"),
        "TERM": (ends.TERMINATED, "terminated (SIGTERM)"),
        "HUP": (ends.TERMINATED, "terminated (SIGHUP: the terminal went away)"),
    }[signal]
    return Cause(reason, ends.exit_code(None, signal), time, text)


def workers_done(tasks: Iterable[TaskResult]) -> Optional[float]:
    """Return when the last worker ended, if all ended by themselves with 0; else None."""
    workers = [task for task in tasks if task.role == WORKER]
    if not all(task.state == ends.EXITED for task in workers):
        return None
    return max((task.ended or 0.0 for task in workers), default=None)


def choose(
    causes: Sequence[Cause], tasks: Mapping[str, TaskResult], background: Sequence[Cause] = ()
) -> Optional[Cause]:
    """Return what ended the job, or None: it succeeded.

    The earliest by stamp. A task that died of a lost peer counts only when nothing else failed; then `background`
    (a server that ended early with 0, a host that has been silent) is believed before it. What came after all
    workers had ended with 0 changes nothing any more.
    """
    done = workers_done(tasks.values())
    if done is not None:
        causes = [cause for cause in causes if cause.time <= done]
    roots = [cause for cause in causes if not is_consequence(cause, tasks)]
    if not any(cause.is_failure for cause in roots):
        consequences = [cause for cause in causes if is_consequence(cause, tasks)]
        if consequences:
            roots.append(min(background or consequences, key=_when))
    return min(roots, key=_when, default=None)


class Inquest:
    """Collects what may have ended a job, until the verdict is due."""

    def __init__(self, verdict_s: float) -> None:
        self._verdict_s = verdict_s
        self._until: Optional[float] = None
        self._causes: List[Cause] = []
        self._said: Dict[str, float] = {}
        self.background: List[Cause] = []
        """What is no failure yet, but better believed than a consequence: see `choose`."""

    def hear(self, cause: Cause, now: float) -> None:
        """Add a cause, unless `close` was called and the time for reports of earlier stamp is over."""
        if self._until is None or now <= self._until:
            said = self._said.get(cause.task, cause.time)
            self._causes.append(dataclasses.replace(cause, time=min(cause.time, said)))

    def hear_failing(self, task: str, time: float) -> None:
        """Note when a task said that it fails: that counts like its end, whatever becomes of it."""
        self._said.setdefault(task, time)

    def hear_recanted(self, task: TaskResult) -> None:
        """Note that a task which said that it fails ended with 0."""
        self.background.append(task_failing(task, self._said[task.name]))

    def close(self, now: float) -> None:
        """The job is being stopped: from the first call on, reports are awaited for `verdict_s` only."""
        if self._until is None:
            self._until = now + self._verdict_s

    def choose(self, tasks: Mapping[str, TaskResult]) -> Optional[Cause]:
        """Return what ended the job as far as is known now."""
        told = {cause.task for cause in self._causes}
        failing = [
            task_failing(tasks[name], time)
            for name, time in self._said.items()
            if name not in told and tasks[name].state != ends.EXITED and workers_done(tasks.values()) is None
        ]
        return choose(self._causes + failing, tasks, self.background)

    def outcome(self, job: str, tasks: Mapping[str, TaskResult], survivors: Sequence[str]) -> Outcome:
        """Return the verdict."""
        return dataclasses.replace(outcome_of(self.choose(tasks), tasks, survivors), job=job)


def is_consequence(cause: Cause, tasks: Mapping[str, TaskResult]) -> bool:
    """Whether the cause is a task that said, before it died, that it lost a peer."""
    return bool(cause.task) and bool(tasks[cause.task].lost_peer)


def outcome_of(cause: Optional[Cause], tasks: Mapping[str, TaskResult], survivors: Sequence[str]) -> Outcome:
    """Return the job's outcome for the cause that was chosen."""
    results = tuple(tasks.values())
    if cause is None:
        return Outcome(0, ends.SUCCEEDED, "all workers succeeded", None, results, tuple(survivors))
    text = cause.text
    culprit = None
    if cause.task or cause.host or cause.detail:
        consequence = is_consequence(cause, tasks)
        peer = tasks[cause.task].lost_peer if consequence else ""
        if consequence:
            text += "; no other failure is known"
        culprit = Culprit(
            task=cause.task,
            host=cause.host,
            code=cause.code,
            signal=cause.signal,
            time=cause.time,
            reason=cause.detail,
            consequence=consequence,
            lost_peer=peer,
        )
    return Outcome(cause.exit_code, cause.reason, text, culprit, results, tuple(survivors), problems=cause.problems)


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them, and no more of them than a line should have."""
    more = " and %d more" % (len(names) - _NAMED) if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _one_line(text: str) -> str:
    """Return the first and the last line: of a traceback, where it stands and what it says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))


def _when(cause: Cause) -> float:
    return cause.time
