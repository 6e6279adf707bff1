"""Which of several misfortunes ended the job: the first in time, but no consequence beside a cause. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Mapping, Optional, Sequence

from distrun_runtime.contract.plan import WORKER
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.outcome import Culprit, Outcome, TaskResult


@dataclass(frozen=True)
class Cause:
    """Something for which a job can end, other than success."""

    reason: str
    """One of `outcome.REASONS`."""
    exit_code: int
    time: float
    """Wall clock, seconds, on our clock as well as we know it."""
    text: str
    task: str = ""
    host: str = ""
    code: Optional[int] = None
    signal: Optional[str] = None
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether a task or a host failed (and not: somebody or a clock ended the job)."""
        return self.reason in (ends.TASK_FAILED, ends.HOST_LOST)


def task_failed(task: TaskResult) -> Cause:
    """Return the cause that a task is which ended by itself with a code or a signal."""
    code = ends.exit_code(task.code, task.signal)
    if task.reason and task.signal is None:
        text = "%s on %s could not run: %s (exit code %d)" % (task.name, task.host, _one_line(task.reason), code)
    elif task.signal is not None:
        text = "%s on %s was ended by signal %s" % (task.name, task.host, task.signal)
    else:
        text = "%s on %s failed with exit code %d" % (task.name, task.host, code)
    return _of_task(task, code, text)


def ended_early(task: TaskResult) -> Cause:
    """Return the cause that a server or scheduler is which ended with 0 while workers went on."""
    text = "%s on %s ended before the workers did (it said 0; the job's exit code is 1)" % (task.name, task.host)
    return _of_task(task, 1, text)


def _of_task(task: TaskResult, code: int, text: str) -> Cause:
    return Cause(
        reason=ends.TASK_FAILED,
        exit_code=code,
        time=task.ended or 0.0,
        text=text,
        task=task.name,
        host=task.host,
        code=task.code,
        signal=task.signal,
        detail=task.reason,
    )


def host_lost(host: str, why: str, time: float) -> Cause:
    """Return the cause that a host is which can no longer be heard."""
    text = "lost %s: %s" % (host, _one_line(why))
    return Cause(ends.HOST_LOST, ends.EXIT_HOST_LOST, time, text, host=host, detail=why)


def start_failed(text: str, time: float, host: str = "") -> Cause:
    """Return the cause that agents or tasks are which did not start."""
    return Cause(ends.START_FAILED, ends.EXIT_START_FAILED, time, _one_line(text), host=host, detail=text)


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
        self.background: List[Cause] = []
        """What is no failure yet, but better believed than a consequence: see `choose`."""

    def hear(self, cause: Cause, now: float) -> None:
        """Add a cause. The first one sets the time until which others, of earlier stamp, may still be told."""
        if self._until is None:
            self._until = now + self._verdict_s
        if now <= self._until:
            self._causes.append(cause)

    def outcome(self, tasks: Mapping[str, TaskResult], survivors: Sequence[str]) -> Outcome:
        """Return the verdict."""
        return outcome_of(choose(self._causes, tasks, self.background), tasks, survivors)


def is_consequence(cause: Cause, tasks: Mapping[str, TaskResult]) -> bool:
    """Whether the cause is a task that said, before it died, that it lost a peer."""
    return bool(cause.task) and bool(tasks[cause.task].lost_peer)


def outcome_of(cause: Optional[Cause], tasks: Mapping[str, TaskResult], survivors: Sequence[str]) -> Outcome:
    """Return the job's outcome for the cause that was chosen."""
    results = tuple(tasks.values())
    if cause is None:
        return Outcome(0, ends.SUCCEEDED, "all workers succeeded", tasks=results, survivors=tuple(survivors))
    text = cause.text
    culprit = None
    if cause.task or cause.host:
        consequence = is_consequence(cause, tasks)
        peer = tasks[cause.task].lost_peer if consequence else ""
        if consequence:
            text += " after it lost %s; no other failure is known" % peer
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
    return Outcome(cause.exit_code, cause.reason, text, culprit, results, tuple(survivors))


def _one_line(text: str) -> str:
    """Return the first and the last line: of a traceback, where it stands and what it says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))


def _when(cause: Cause) -> float:
    return cause.time
