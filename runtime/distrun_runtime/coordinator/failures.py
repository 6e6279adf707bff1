"""Failure analysis: decides which failure ended the job.

The first failure in time counts, but never a consequence beside its cause. Where only consequences are known, the
chain of who lost whom leads to the cause: a silent host, a server or scheduler that ended early, or a task that ran
and did not answer. No side effects.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from distrun_runtime.contract import facts, gpus
from distrun_runtime.contract.dataclass import Time, dataclass, read
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import WORKER

# How a job, and each of its tasks, stands or ended. Frozen values; `JobFolder.outcome_json` makes JSON of them.


@dataclass(frozen=True)
class TaskResult:
    """One task as it stands, or ended."""

    name: str
    role: str
    rank: int
    host: str
    state: str = facts.PENDING
    pid: Optional[int] = None
    code: Optional[int] = None
    signal: Optional[str] = None
    started: Optional[Time] = None
    ended: Optional[Time] = None
    reason: str = ""
    """Why it could not run, of what it failed or how it was lost, in words; else empty."""
    own_failure: str = ""
    """What it said it fails of, before anybody had signalled it; it may have been stopped before it had ended."""
    lost_peer: str = ""
    """The peer whose loss it died of: then it is a consequence."""
    max_rss_kb: int = 0
    cpu_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """It ran, and runs no more as far as anybody can know."""
        return self.state in (facts.EXITED, facts.FAILED, facts.STOPPED)

    @property
    def how(self) -> str:
        """How it ended: `exit code 3`, `signal KILL`."""
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"


@dataclass(frozen=True)
class Problem:
    """Why one host cannot be used."""

    host: str
    kind: str
    """What is wrong with it before anything is started there: dns, refused, timeout, unreachable, busy,
    hostkey, auth, password, python, folder, disk, clock, module, activation, interface, gpus, program, import,
    protocol, or other."""
    text: str
    """What was found."""
    fix: str = ""
    """What to type, or to do, next."""


@dataclass(frozen=True)
class Culprit:
    """What ended a job that did not succeed. `task` is empty when a whole host was lost or did not start."""

    task: str
    host: str
    code: Optional[int] = None
    signal: Optional[str] = None
    time: Time = 0.0
    reason: str = ""
    consequence: bool = False
    """It died of a lost peer; nothing else is known to have failed."""
    lost_peer: str = ""
    missing: bool = False
    """It did not fail; others lost it, or waited for it in vain."""


class Survivor(NamedTuple):
    """A process that may still run. As text: `pid 123 (sleep) on d2`."""

    what: str
    host: str

    def __str__(self) -> str:
        return f"{self.what} on {self.host}"


@dataclass(frozen=True)
class Outcome:
    """The end of a job."""

    exit_code: int
    reason: str
    """One of `facts.REASONS`."""
    message: str
    """One line: what happened, where, and what to do if that is known."""
    culprit: Optional[Culprit] = None
    tasks: Tuple[TaskResult, ...] = ()
    survivors: Tuple[Survivor, ...] = ()
    job: str = ""
    """The job's id; may be empty."""
    problems: Tuple[Problem, ...] = ()
    """PREFLIGHT: every host that cannot be used, in the plan's order."""

    @property
    def job_state(self) -> str:
        """The job's last state: succeeded, failed or killed."""
        return last_state(self.reason)


def last_state(reason: str) -> str:
    """Return the last state of a job that ended for a reason (`facts.REASONS`): succeeded, failed or killed."""
    if reason == facts.SUCCEEDED:
        return facts.SUCCEEDED
    return facts.KILLED if reason in (facts.INTERRUPTED, facts.TERMINATED) else facts.FAILED


def ended(state: Mapping[str, Any], outcome: Mapping[str, Any], finished: str) -> Dict[str, Any]:
    """Return the members of state.json of a job whose outcome.json has the members of `outcome`."""
    known = {name: outcome[name] for name in ("exit_code", "reason", "message")}
    known.update(state=last_state(outcome["reason"]), finished=finished, tasks=outcome["tasks"] or state["tasks"])
    return {**state, **known}


def from_json(value: Mapping[str, Any]) -> Outcome:
    """Return the outcome that outcome.json holds, or a coordinator tells by the same members.

    Raises:
        LookupError, TypeError, ValueError: `value` does not describe an outcome.
    """
    return read(Outcome, value, job=value["id"])


COULD_NOT_RUN = (facts.EXIT_NOT_EXECUTABLE, facts.EXIT_NOT_FOUND)
"""With a reason of the agent: the command was never started."""
ANSWERS_S = 15.0
"""After the first unusable host, the answers of the others are awaited for so long."""
OTHER = "other"
"""Kind of a problem of which nothing more is known."""
_NAMED = 8
"""So many of a list are named in a message."""


@dataclass(frozen=True)
class Cause:
    """Something for which a job can end, other than success."""

    reason: str
    """One of `facts.REASONS`."""
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
    is_missing: bool = False
    """The task did not fail; others lost it, or waited for it in vain."""
    repeats: str = ""
    """The task or host whose end is the failure: an event says what `short` says."""

    @property
    def is_failure(self) -> bool:
        """Whether a task or a host failed (and the job was not stopped by a user or a time limit)."""
        return self.reason in (facts.TASK_FAILED, facts.HOST_LOST)


def task_failed(task: TaskResult) -> Cause:
    """Return the cause that a task is which ended by itself with a code or a signal."""
    code = facts.exit_code(task.code, task.signal)
    where = f"{task.name} on {task.host}"
    short = f"{where}: {task.how}"
    if task.lost_peer:
        how = f"ended with code {code}" if task.signal is None else f"was ended by signal {task.signal}"
        text = f"{where} {how} after it lost {task.lost_peer}"
        short += f" (it lost {task.lost_peer})"
    elif task.signal is not None:
        text = f"{where} was ended by signal {task.signal}"
    elif code in COULD_NOT_RUN and task.reason and not task.own_failure:
        text = f"{where} could not run (exit code {code}): {_one_line(task.reason)}"
    else:
        text = f"{where} failed with exit code {code}"
    if task.own_failure:
        text += ": " + _one_line(task.own_failure)
    return _of_task(task, code, text, short, repeats=task.name)


def task_failing(task: TaskResult, time: float) -> Cause:
    """Return the cause that a task is which said at `time` that it fails, and did not end by itself, or with 0."""
    how = "yet it ended with 0" if task.state == facts.EXITED else "it was stopped before it had ended"
    text = f"{task.name} on {task.host} failed: {_one_line(task.own_failure)}; {how}"
    short = f"{task.name} on {task.host} said that it fails"
    return _of_task(task, 1, text, short, time=time, code=None, signal=None)


def ended_early(task: TaskResult) -> Cause:
    """Return the cause that a server or scheduler is which ended with 0 while workers went on."""
    text = f"{task.name} on {task.host} ended before the workers did (it said 0; the job's exit code is 1)"
    if task.reason and not task.lost_peer:
        text += ": " + _one_line(task.reason)
    return _of_task(task, 1, text, f"{task.name} on {task.host} ended before the workers did")


def _of_task(task: TaskResult, exit_code: int, text: str, short: str, **changes: Any) -> Cause:
    """Return the cause that a task is, as it ended but for the `changes`."""
    who = (task.name, task.host, task.code, task.signal, task.reason)
    cause = Cause(facts.TASK_FAILED, exit_code, task.ended or 0.0, text, short, *who)
    return dataclasses.replace(cause, **changes)


def disk_filled(task: TaskResult, what: str, time: float) -> Cause:
    """Return the cause that a task is whose output has filled the disk of the job's logs."""
    text = f"{task.name} on {task.host} {what}"
    return _of_task(task, facts.EXIT_OUTPUT, text, text, time=time, code=None, signal=None)


def missing(task: TaskResult, consequence: Cause, why: str) -> Cause:
    """Return the failure of a task that did not fail by itself, but was missing.

    Arguments:
        task: what others lost or waited for. It still ran, or had ended with 0.
        consequence: the first task that failed because of it; its exit code becomes the job's.
        why: what that task, or another, said about the loss, and which one.
    """
    where = f"{task.name} on {task.host}"
    if task.state == facts.EXITED:
        text, code = f"{where} ended with 0 while others still needed it", task.code
    elif task.state in (facts.PENDING, facts.STARTING):
        text, code = f"{where} had not started", None
    else:
        text = f"{where} did not answer the other tasks, although it ran (frozen, still busy, or cut off from them?)"
        code = None
    short = f"{where} does not answer the other tasks"
    text += ": " + _one_line(why)
    changes = {"time": consequence.time, "code": code, "signal": None, "detail": why, "is_missing": True}
    return _of_task(task, consequence.exit_code, text, short, **changes)


def host_lost(host: str, why: str, time: float) -> Cause:
    """Return the failure of a host that can no longer be heard."""
    text = f"lost {host}: {_one_line(why)}"
    short = f"lost {host}"
    return Cause(facts.HOST_LOST, facts.EXIT_HOST_LOST, time, text, short, host=host, detail=why, repeats=host)


def host_silent(host: str, silence_s: float, time: float) -> Cause:
    """Return the failure of a host that has been silent for `silence_s` while tasks elsewhere lost those on it."""
    cause = host_lost(host, f"silent for {rounded(silence_s)}", time)
    short = f"{host} has been silent for {rounded(silence_s)}, and tasks on other hosts lost those on it"
    return dataclasses.replace(cause, short=short, repeats="")


def agent_ended(host: str, why: str, by_user: bool, time: float) -> Cause:
    """Return why a job ends whose agent on `host` began to end its tasks without being told by us.

    `by_user`: `distrun kill -H` (or `--stale`) on that host asked it to.
    """
    if not by_user:
        return host_lost(host, why, time)
    text = f"stopped by distrun kill on {host}"
    return Cause(facts.TERMINATED, facts.exit_code(None, "TERM"), time, text, text)


def no_agent(host: str, why: str, time: float) -> Cause:
    """Return the cause that a host is whose agent never answered."""
    short = f"no agent on {host}"
    text = f"{short}: {_one_line(why)}"
    return Cause(facts.START_FAILED, facts.EXIT_START_FAILED, time, text, short, host=host, detail=why)


def bad_host(host: str, why: str, time: float) -> Cause:
    """Return the cause that a host is of which it is known why it cannot be used."""
    return Cause(facts.PREFLIGHT, facts.EXIT_PREFLIGHT, time, "", f"{host} cannot be used", host=host, detail=why)


_TYPED = {
    gpus.KIND: facts.EXIT_USAGE,
    facts.IMPORT: facts.EXIT_USAGE,
    facts.SCRIPT: facts.EXIT_USAGE,
    facts.PROGRAM: facts.EXIT_NOT_FOUND,
}
"""Kinds of problems that are mistakes in what was typed, as in the command or the hosts file, and their exit codes."""


def unusable(problems: Sequence[Problem], hosts: int, time: float, first: str) -> Cause:
    """Return the cause that all hosts are, of `hosts` in the job, which cannot be used. `first`: first in time."""
    detail = next(problem.text for problem in problems if problem.host == first)
    kinds = {problem.kind for problem in problems}
    what = "cannot run the command" if kinds <= {facts.PROGRAM, facts.SCRIPT, facts.IMPORT} else "cannot be used"
    if len(problems) == 1:
        short = f"{first} {what}"
        text = f"{short}: {_one_line(detail)}"
    else:
        short = f"{len(problems)} of {hosts} hosts {what}"
        text = f"{short}: {listed([f'{problem.host} ({problem.kind})' for problem in problems])}"
    codes = {_TYPED.get(kind, facts.EXIT_PREFLIGHT) for kind in kinds}
    code = codes.pop() if len(codes) == 1 else facts.EXIT_PREFLIGHT
    return Cause(facts.PREFLIGHT, code, time, text, short, host=first, detail=detail)


def not_prepared(host: str, why: str, time: float, detail: str) -> Cause:
    """Return the cause that a host is which the files did not reach (or, without a host, that the copying is)."""
    short = "the files did not reach %s" % (host or "the hosts")
    text = f"{short}: {_one_line(why)}"
    return Cause(facts.SYNC, facts.EXIT_SYNC, time, text, short, host=host, detail=detail or why)


def claimed_twice(place: str, first: str, second: str, time: float) -> Cause:
    """Return the cause that a second agent for a place is. It is unknown which of the two is right."""
    short = f"two agents claim place {place}"
    text = (
        f"{short}: one from {first}, and another from {second}, which knows this job's secret too;"
        " it was started twice, or another person has the secret"
    )
    return Cause(facts.START_FAILED, facts.EXIT_START_FAILED, time, text, short, host=place)


def start_too_slow(limit_s: float, missing: str, time: float) -> Cause:
    """Return the cause that agents or tasks are which did not start in time."""
    text = f"not started within {duration(limit_s)} (--start-timeout): {missing}"
    return Cause(facts.START_FAILED, facts.EXIT_START_FAILED, time, text, "the start took too long")


def timed_out(limit_s: float, time: float, unfinished: Sequence[str], missing: str = "") -> Cause:
    """Return the cause that the whole job's time limit is.

    Arguments:
        unfinished: the tasks that had not ended, a few words each.
        missing: what the start still waited for, in words; empty: all tasks had started.
    """
    short = f"the job did not end within {duration(limit_s)} (--timeout)"
    what = f"it still waited for {missing}" if missing else f"{listed(unfinished)} had not ended"
    text = f"{short}: {what}" if missing or unfinished else short
    return Cause(facts.TIMEOUT, facts.EXIT_TIMEOUT, time, text, short)


def interrupted(signal: str, time: float) -> Cause:
    """Return the cause that INT, TERM, HUP or PIPE to the launcher is; empty: its end without one of them."""
    reason, text = {
        "INT": (facts.INTERRUPTED, "interrupted (SIGINT)"),
        "TERM": (facts.TERMINATED, "terminated (SIGTERM)"),
        "HUP": (facts.TERMINATED, "terminated (SIGHUP, as when the terminal closes)"),
        "PIPE": (facts.TERMINATED, "stdout is closed (SIGPIPE)"),
        "": (facts.TERMINATED, "distrun launch was killed or crashed"),
    }[signal]
    return Cause(reason, facts.exit_code(None, signal or "HUP"), time, text)


def workers_done(tasks: Iterable[TaskResult]) -> Optional[float]:
    """Return when the last worker ended, if all ended by themselves with 0; else None."""
    workers = [task for task in tasks if task.role == WORKER]
    if not all(task.state == facts.EXITED for task in workers):
        return None
    return max((task.ended or 0.0 for task in workers), default=None)


def root_of(name: str, tasks: Mapping[str, TaskResult], lost_at: Mapping[str, float]) -> str:
    """Return where the chain of losses that begins at `name` ends: the task that itself lost no peer.

    Where the chain runs in a circle, as with two tasks that lost each other, the one counts that most others lost: a
    task that was cut off loses its peers too, and is alone with that. Of equals, the one that was lost first.

    Arguments:
        name: of a task that lost a peer.
        tasks: each with the peer that it lost.
        lost_at: when each of them said so, by its name; wall clock, seconds.
    """
    path: List[str] = []
    while name in tasks and tasks[name].lost_peer:
        if name in path:
            circle = path[path.index(name) :]
            first = min(circle, key=lambda each: (_not_missed(tasks[each].lost_peer, tasks), lost_at.get(each, 0.0)))
            return tasks[first].lost_peer
        path.append(name)
        name = tasks[name].lost_peer
    return name


def _not_missed(name: str, tasks: Mapping[str, TaskResult]) -> Tuple[int, int]:
    """Return less, the more others lost a task: by hosts that lost its host, then by tasks that lost it."""
    host = tasks[name].host
    lost = [
        task for task in tasks.values() if task.lost_peer in tasks and tasks[task.lost_peer].host == host != task.host
    ]
    return -len({task.host for task in lost}), -sum(task.lost_peer == name for task in tasks.values())


def _causes_of(causes: Sequence[Cause], tasks: Mapping[str, TaskResult]) -> List[Cause]:
    """Return the causes that are no consequences."""
    return [cause for cause in causes if not is_consequence(cause, tasks)]


class FailureAnalysis:
    """Collects what may have ended a job, and decides which of it did.

    Reports of an earlier stamp may arrive late: after `start_deadline` they are awaited for `wait_s` seconds.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._until: Optional[float] = None
        self._causes: List[Cause] = []
        self._said: Dict[str, float] = {}
        self._lost_at: Dict[str, float] = {}
        """When tasks said that they lost a peer, by name; wall clock, seconds."""
        self.background: List[Cause] = []
        """What is no failure by itself, but explains more than a consequence: a server that ended early with 0."""

    def add(self, cause: Cause, now: float) -> None:
        """Add a cause, unless `start_deadline` was called and the time for reports of earlier stamp is over."""
        if self._until is None or now <= self._until:
            said = self._said.get(cause.task, cause.time)
            self._causes.append(dataclasses.replace(cause, time=min(cause.time, said)))

    def note_failing(self, task: str, time: float) -> None:
        """Note when a task said that it fails: that counts like its end, whatever becomes of it."""
        self._said.setdefault(task, time)

    def note_loss(self, task: str, time: float) -> None:
        """Note when a task said that it lost a peer."""
        self._lost_at.setdefault(task, time)

    def roots(self, tasks: Mapping[str, TaskResult]) -> Sequence[str]:
        """Return the tasks that are at the root of what failed tasks lost, as far as is known now."""
        names = [cause.task for cause in self._causes if is_consequence(cause, tasks)]
        found = dict.fromkeys(root_of(name, tasks, self._lost_at) for name in names)
        return [name for name in found if name in tasks]

    def first_early(self, tasks: Mapping[str, TaskResult]) -> Cause:
        """Return the first of `background`, of which there is one; a cause rather than its consequence."""
        return (_causes_of(self.background, tasks) or self.background)[0]

    def note_denied(self, task: TaskResult) -> None:
        """Note that a task which said that it fails ended with 0."""
        self.background.append(task_failing(task, self._said[task.name]))

    def start_deadline(self, now: float) -> None:
        """The job is being stopped: from the first call on, reports are awaited for `wait_s` only."""
        if self._until is None:
            self._until = now + self._wait_s

    def choose(self, tasks: Mapping[str, TaskResult], silent: Mapping[str, float]) -> Optional[Cause]:
        """Return what ended the job as far as is known now, or None: it succeeded.

        The earliest by stamp. A task that died of a lost peer counts only if nothing else failed; then what it lost is
        followed to its cause. What came after all workers had ended with 0 changes nothing any more.

        Args:
            tasks: as they stand.
            silent: hosts that were silent when consequences came, and for how many seconds at most.
        """
        if not self._causes and not self._said:  # as in most jobs: nothing has gone wrong
            return None
        told = {cause.task for cause in self._causes}
        done = workers_done(tasks.values())
        if done is None:
            failing = [name for name in self._said if name not in told and tasks[name].state != facts.EXITED]
            causes = self._causes + [task_failing(tasks[name], self._said[name]) for name in failing]
        else:
            causes = [cause for cause in self._causes if cause.time <= done]
        roots = _causes_of(causes, tasks)
        if not any(cause.is_failure for cause in roots):
            consequences = sorted((cause for cause in causes if is_consequence(cause, tasks)), key=_when)
            if consequences:
                roots.append(self._explain(consequences, tasks, silent))
        return min(roots, key=_when, default=None)

    def _explain(
        self, consequences: Sequence[Cause], tasks: Mapping[str, TaskResult], silent: Mapping[str, float]
    ) -> Cause:
        """Return what consequences, in the order of time, come from; the first of them if that is not known."""
        first = consequences[0]
        names = [root_of(cause.task, tasks, self._lost_at) for cause in consequences]
        roots = [tasks[name] for name in names if name in tasks]
        early = _causes_of(self.background, tasks)
        lost = [tasks[task.lost_peer] for task in tasks.values() if task.lost_peer in tasks]
        hosts = [task.host for task in [*roots, *lost] if task.host in silent]
        if not hosts and early:
            return min(early, key=_when)
        if hosts:
            # Silence is a fact, whichever of its tasks was lost first.
            return host_silent(hosts[0], silent[hosts[0]], first.time)
        if not roots:
            return first
        root = roots[0]
        if root.state == facts.FAILED and not root.lost_peer:
            return task_failed(root)  # it was told too late to count by itself
        lost_it = [task for task in tasks.values() if task.lost_peer == root.name and task.reason]
        witness = min(lost_it, key=lambda task: self._lost_at.get(task.name, 0.0), default=None)
        if witness is None:
            return missing(root, first, f"{first.task} on {first.host} lost it")
        return missing(root, first, f"{witness.name} on {witness.host} says: {witness.reason}")

    def outcome(
        self, job: str, tasks: Mapping[str, TaskResult], survivors: Sequence[Survivor], silent: Mapping[str, float]
    ) -> Outcome:
        """Return how the job ended. `silent`: as for `choose`."""
        cause = self.choose(tasks, silent)
        results, left = tuple(tasks.values()), tuple(survivors)
        if cause is None:
            return Outcome(0, facts.SUCCEEDED, "all workers succeeded", None, results, left, job)
        text, culprit = cause.text, None
        if cause.task or cause.host or cause.detail:
            consequence = is_consequence(cause, tasks)
            if consequence:
                text += "; no other failure is known"
            who = (cause.task, cause.host, cause.code, cause.signal, cause.time, cause.detail)
            lost = tasks[cause.task].lost_peer if consequence else ""
            culprit = Culprit(*who, consequence, lost, missing=cause.is_missing)
        return Outcome(cause.exit_code, cause.reason, text, culprit, results, left, job, cause.problems)


class UnusableHosts:
    """Collects the hosts that did not get ready, so that all of them are reported at once.

    Arguments:
        hosts: all hosts of the job.
        now: when the first of them that is bad was heard of; `add` follows.
    """

    def __init__(self, hosts: Sequence[str], now: float) -> None:
        self.until = now + ANSWERS_S
        """When the others are not waited for any more."""
        self._hosts = tuple(hosts)
        self._causes: List[Cause] = []
        self._problems: List[Problem] = []

    def add(self, cause: Cause, kind: str = "", fix: str = "") -> None:
        """Note that `cause.host` is bad. `kind`, `fix`: as in `Problem`."""
        self._causes.append(cause)
        self._problems.append(Problem(cause.host, kind or OTHER, cause.detail, fix))

    def cause(self, waiting: Sequence[str] = ()) -> Cause:
        """Return what ends the job: all bad hosts in one. `waiting`: hosts that have not answered yet."""
        order = {name: number for number, name in enumerate(self._hosts)}
        problems = tuple(sorted(self._problems, key=lambda problem: order[problem.host]))
        first = min(self._causes, key=lambda cause: cause.time)
        if any(cause.reason == facts.PREFLIGHT for cause in self._causes):
            first = unusable(problems, len(self._hosts), first.time, first.host)
        if waiting:
            first = dataclasses.replace(first, text=f"{first.text}; not heard of by then: {listed(waiting)}")
        return dataclasses.replace(first, problems=problems)


def is_consequence(cause: Cause, tasks: Mapping[str, TaskResult]) -> bool:
    """Whether the cause is a task that said, before it died, that it lost a peer."""
    return bool(cause.task) and not cause.is_missing and bool(tasks[cause.task].lost_peer)


def listed(names: Sequence[str]) -> str:
    """Return names with commas between them, and no more of them than a line should have."""
    return facts.listed(names, _NAMED)


def rounded(time_s: float) -> str:
    """Return a duration in whole seconds, or in tenths below 1."""
    return duration(round(time_s, 0 if time_s >= 1 else 1))


def _one_line(text: str) -> str:
    """Return the first and the last line: of a traceback, where it stands and what it says."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(lines if len(lines) < 2 else (lines[0], lines[-1]))


def _when(cause: Cause) -> float:
    return cause.time
