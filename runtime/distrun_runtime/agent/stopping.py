"""Stops tasks and every process that belongs to them, of this agent or of jobs whose agent is gone (the sweep).

The agent's loop calls `Stopping.step` when `next_at` has come, or when a child died. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Pattern, Set, Tuple

from distrun_runtime.agent import share
from distrun_runtime.agent.share import Record
from distrun_runtime.agent.tasks import JOB, RunningTask, owners
from distrun_runtime.contract import facts, private, process
from distrun_runtime.contract.facts import GIVE_UP_S, GRACE_S
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER
from distrun_runtime.contract.process import Identity, Process
from distrun_runtime.errors import ContractError

LOOK_S = 0.5
"""Interval of looks at the process table while something is being stopped (a child's death makes it sooner)."""
PORTABLE_LOOK_S = 0.25
_SHORTEST_LOOK_S = 0.01
"""The shortest interval, however fast children die."""
KILL = "KILL"
REPEAT_S = 0.25
"""KILL is repeated at this interval until nothing is left: what was being forked may have escaped it."""

_ORDER = (WORKER, SERVER, SCHEDULER)


class Stopping:
    """The tasks that are being stopped, each with its stop sequence."""

    def __init__(self, marks: Mapping[str, str], tasks: Dict[str, RunningTask], is_subreaper: bool) -> None:
        """`tasks`: every task that was started, by name. `marks`: what processes of the job are known by here."""
        self.left: List[Process] = []
        """What still existed at the last look and should not have."""
        self._marks = marks
        self._tasks = tasks
        self._is_subreaper = is_subreaper
        self._sequences: Dict[str, StopSequence] = {}
        self._named: Set[str] = set()
        self._owes_report = False
        self._look_at = math.inf
        self._looked_at = -math.inf
        self._interval_s = LOOK_S if is_subreaper else PORTABLE_LOOK_S

    @property
    def next_at(self) -> float:
        """When `step` should be called next."""
        return min([self._look_at] + [sequence.next_at for sequence in self._sequences.values()])

    @property
    def is_over(self) -> bool:
        """Nothing is being stopped."""
        return not self._sequences

    def stop(self, names: Iterable[str], sequence: StopSequence) -> None:
        """Stop tasks (those that run, and what those that ended left behind).

        A task that is being stopped already keeps its sequence unless the new one kills earlier. When every task that
        was ever started has been named, the whole job is stopped here, with processes of no task, and a report is owed.
        """
        for name in names:
            if name in self._tasks:
                self._sequences[name] = harsher(self._sequences.get(name), sequence)
                self._named.add(name)
        if self._named >= set(self._tasks):
            self._sequences[JOB] = harsher(self._sequences.get(JOB), sequence)
            self._owes_report = True
        self._look_at = -math.inf

    def hurry(self) -> None:
        """Look at the process table at the next step: a child died."""
        if self._sequences:
            self._look_at = self._looked_at + _SHORTEST_LOOK_S

    def step(self, now: float) -> Optional[List[Process]]:
        """Send what is due; return, once after a stop of the whole job, what is left of it (nothing, as a rule)."""
        if not self._sequences or now < self.next_at:
            return None
        owned = self.look()
        self._looked_at, self._look_at = now, now + self._interval_s
        last = max(sequence.gives_up_at for sequence in self._sequences.values())
        for name in sorted(self._sequences, key=self._turn):
            self._sequences[name], number = self._sequences[name].due(now)
            if number is not None:
                deliver(self._tasks.get(name), owned.get(name, []), number)
            if name != JOB and self._tasks[name].is_reaped and not owned.get(name):
                del self._sequences[name]
        self.left = [row for name in self._named | {JOB} for row in owned.get(name, [])]
        is_reaped = all(self._tasks[name].is_reaped for name in self._named)
        if JOB in self._sequences:
            if (self.left or not is_reaped or len(self._sequences) > 1) and now < last:
                return None
            self._sequences.clear()
        elif now >= last:
            self._sequences.clear()
        if not self._sequences:
            self._look_at = math.inf
            if self._owes_report:
                self._owes_report = False
                return self.left
        return None

    def look(self) -> Dict[str, List[Process]]:
        """Return every living process of the job on this host, by task."""
        has_any = not self._is_subreaper or process.has_children()
        rows = process.table() if has_any else []
        me = os.getpid()
        not_ours = process.ancestors(me, rows) | {me}
        if self._is_subreaper:
            others = process.descendants([me], rows)
        else:
            others = process.marked(self._marks, [row for row in rows if row.pid not in not_ours])
        families = [task.processes for task in self._tasks.values()]
        return owners(rows, families, others, lambda row: self.task_of(row.pid), not_ours)

    def _turn(self, name: str) -> int:
        """Return when it is the turn of `name`: workers before what they need, processes of no task last."""
        return len(_ORDER) if name == JOB else _ORDER.index(self._tasks[name].task.role)

    def task_of(self, pid: int) -> str:
        """Return the task that a process's environment names; empty if none."""
        env = process.environ_of(pid)
        if not process.has_marks(env, self._marks):
            return ""
        for name, running in self._tasks.items():
            if (running.task.role, str(running.task.rank)) == (env.get("DISTRUN_ROLE"), env.get("DISTRUN_RANK")):
                return name
        return ""


def deliver(task: Optional[RunningTask], rows: Iterable[Process], number: int) -> None:
    """Send a signal once to each of `rows` and, in one go, to the task's group; continue what is stopped."""
    group = None
    if task is not None and not task.is_reaped:
        # Until it is reaped its id is its own, and so is its group's: the signal reaches even what is being forked.
        group = task.leader.pid
        task.was_signalled = True
    rows = list(rows)
    for each in (number,) if number == signal.SIGKILL else (number, signal.SIGCONT):
        if group is not None:
            with contextlib.suppress(OSError):  # it has gone
                os.killpg(group, each)
        for row in rows:
            if row.pgid != group:
                with contextlib.suppress(OSError):  # another user's by now (set-user-id): it is reported as left
                    process.send_signal(row.identity, each)


class StopSequence(NamedTuple):
    """Signals and when they are sent. No clock and no side effects: the caller passes the time."""

    steps: Tuple[Tuple[str, float], ...]
    """(name without SIG, seconds until the next step)."""
    began: float
    sent: int = 0
    """Steps that were sent already; a repeated KILL counts each time."""

    @property
    def kill_at(self) -> float:
        """When the first KILL is sent; infinite if none is."""
        at = self.began
        for name, wait_s in self.steps:
            if name == KILL:
                return at
            at += wait_s
        return math.inf

    @property
    def next_at(self) -> float:
        """When the next signal is due; infinite after a last step that is not KILL."""
        if self.sent < len(self.steps):
            return self.began + sum(wait_s for _, wait_s in self.steps[: self.sent])
        if self.steps[-1][0] == KILL:
            return self.kill_at + (self.sent - len(self.steps) + 1) * REPEAT_S
        return math.inf

    @property
    def gives_up_at(self) -> float:
        """When the wait for what is left ends."""
        last = self.began + sum(wait_s for _, wait_s in self.steps)
        return self.kill_at + GIVE_UP_S if self.kill_at < math.inf else last

    def due(self, now: float) -> Tuple[StopSequence, Optional[int]]:
        """Return the sequence after this step, and the number of the signal to send now, if one is due.

        If several steps are overdue, only the last of them is sent.
        """
        sequence, name = self, None
        while sequence.next_at <= now:
            name = sequence.steps[min(sequence.sent, len(sequence.steps) - 1)][0]
            sent = sequence.sent + 1
            if sequence.sent >= len(sequence.steps):
                # Repeats that were missed are skipped.
                sent = max(sent, len(sequence.steps) + int((now - sequence.kill_at) / REPEAT_S))
            sequence = sequence._replace(sent=sent)
        return sequence, None if name is None else signal_number(name)


def parse(steps: Iterable[Any], now: float) -> StopSequence:
    """Return the stop sequence of `[["TERM", 10.0], ["KILL", 0]]`, beginning now.

    Raises:
        ContractError: no step, an unknown signal, or a time that is not a number of seconds.
    """
    try:
        checked = tuple((_signal(name).name[3:], float(wait_s)) for name, wait_s in steps)
    except (TypeError, ValueError) as err:
        raise ContractError(f"a stop sequence is [[SIGNAL, seconds], ...]: {err}") from err
    if not checked or any(not wait_s >= 0 for _, wait_s in checked):
        raise ContractError(f"a stop sequence has at least one step and no negative time: {checked!r}")
    return StopSequence(checked, now)


def gentle(grace_s: float, now: float) -> StopSequence:
    """Return TERM, `grace_s` seconds, KILL."""
    return StopSequence((("TERM", grace_s), (KILL, 0.0)), now)


def kill(now: float) -> StopSequence:
    """Return KILL."""
    return StopSequence(((KILL, 0.0),), now)


def harsher(current: Optional[StopSequence], new: StopSequence) -> StopSequence:
    """Return the one whose KILL comes first."""
    return new if current is None or new.kill_at < current.kill_at else current


def signal_number(name: Any) -> int:
    """Return the number of a signal that is given by name, with or without SIG.

    Raises:
        ContractError: this system has no such signal.
    """
    return int(_signal(name))


def _signal(name: Any) -> signal.Signals:
    text = str(name).upper()
    try:
        return signal.Signals[text if text.startswith("SIG") else "SIG" + text]
    except KeyError:
        raise ContractError(f"no signal is called {name!r} here; write it as TERM, INT or KILL") from None


# Finds and ends what jobs run on this host: by the records of agents, by descent, and by marks in environments.
#
# `survey` tells of all jobs, `sweep` ends what a job left, `match` finds processes by a pattern of their command line.
# The guard uses this if the agent died, and `distrun kill` if both did.
#
# Only processes of the calling user count, also for root. A signal goes to a process whose identity was just verified;
# never by name, never to this process or its ancestors. What runs in another container (pid namespace) of this machine
# belongs to another host: its records cannot be seen from here.


POLL_S = 0.05
AGENT = "import binascii,json,os,sys,zlib"
"""Stands in the command line of every agent and guard: how their program begins."""
NAMES = ("distrun's agent", "distrun's guard")
"""What the two are called in a report: their command lines say nothing to a reader."""
DAEMONS = ("sshd", "sshd-session", "sshd-auth")
"""No record names it, and none is above the tasks: only marks tell of the job."""
_WHOLE = 100000
"""Characters of a command line that are looked at."""

Key = Tuple[str, str, str]
"""A job, its nonce, and what it calls this host."""


# Ending what a job left


class SweepReport(NamedTuple):
    """What a sweep did. Processes are (pid, command)."""

    ended: List[Tuple[int, str]]
    """What existed and was ended."""
    left: List[Tuple[int, str]]
    """What did not die, or belongs to another user by now."""


def sweep(job: str, grace_s: Optional[float], nonce: str = "") -> SweepReport:
    """End every process of a job of the calling user on this machine, and remove its private folders.

    A job of another store by the same id has another nonce, and is left alone.

    A living agent is asked to do it (SIGTERM, and SIGCONT in case it is frozen) and gets `grace_s` and two seconds.
    Then, or without an agent, everything recorded or marked gets TERM, `grace_s`, KILL. Nothing to end is no error.
    Waits until it is over. `grace_s` None: the job's own, as recorded.
    """
    folders = share.folders_of(job, nonce)
    records = [found for found in map(share.find_record, folders) if found is not None]
    if grace_s is None:
        grace_s = max((found.grace_s for found in records), default=GRACE_S)
    ours = {who: name for found in records for who, name in zip((found.agent, found.guard), NAMES)}

    def find() -> List[Process]:
        return process.mine(belongings(records, process.marks(job, nonce)))

    there = {row.identity: _named(row.identity, ours) for row in find()}
    for folder in folders:
        share.note_kill(folder)
    agents = [found.agent for found in records if process.is_alive(found.agent)]
    for agent in agents:
        _send(agent, signal.SIGTERM)
        _send(agent, signal.SIGCONT)
    _await_end(agents, grace_s + 2.0)
    more, left = end_all(find, grace_s)
    there.update((who, command) for who, command in more.items() if who not in there)
    _await_end([found.guard for found in records], 1.0)
    for folder in folders if not left else ():
        share.remove_folder(folder)
    for root in private.owned(private.lasting_root()):
        private.remove_dead(private.socket_path(job, root))  # if a coordinator died here
    stuck = {row.identity for row in left}
    return SweepReport(
        [(who.pid, text) for who, text in there.items() if who not in stuck],
        [(row.pid, process.command_of(row.pid)) for row in left],
    )


def _await_end(processes: List[Identity], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while any(map(process.is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def belongings(
    records: Iterable[Record],
    marks: Dict[str, str],
    below: Iterable[int] = (),
    is_fresh: bool = False,
    seen: Optional[ProcessSnapshot] = None,
) -> List[Process]:
    """Return the living processes of a job: recorded, marked, below the processes `below`, and all beneath those.

    Args:
        records: of the job's agents here. The agents and guards themselves count.
        marks: what the environment of the job's processes holds.
        below: process ids whose descendants all belong to the job.
        is_fresh: the records were true a moment ago, so that groups count even when their leader is dead.
        seen: the processes to look among; None: those that there are now.
    """
    seen = seen or ProcessSnapshot()
    living, by_pid = _without_us(seen.rows), {row.pid: row for row in seen.rows}
    seeds = seen.marked(marks)
    for found in records:
        leaders = [who for _, who in found.tasks if is_fresh or process.is_among(who, by_pid)]
        groups = {who.pid for who in leaders}
        recorded = set(leaders) | set(found.known) | {found.agent, found.guard}
        recorded_ids = {who.pid for who in recorded if process.is_among(who, by_pid)}
        seeds += [row for row in living if row.pid in recorded_ids or row.pgid in groups or row.sid in groups]
    seeds += process.descendants(list(below), living)
    every = seeds + process.descendants([row.pid for row in seeds], living)
    return list({row.pid: row for row in every}.values())


def end_all(
    find: Callable[[], List[Process]], grace_s: float, reap: Callable[[], object] = lambda: None
) -> Tuple[Dict[Identity, str], List[Process]]:
    """Send TERM to what `find` returns, KILL after `grace_s` until nothing is found, for at most GIVE_UP_S more.

    `reap` is called before each look. A look may take long where ps is used, so times count from when it has ended.
    Returns what was signalled (with its command) and what is left. Waits.
    """
    signalled: Dict[Identity, str] = {}
    kill_at = give_up_at = math.inf
    while True:
        reap()
        found = find()
        now = time.monotonic()
        if not found or now >= give_up_at:
            return signalled, found
        kill_at = min(kill_at, now + grace_s)
        for row in found:
            is_new = row.identity not in signalled
            if is_new:
                signalled[row.identity] = process.command_of(row.pid)
            if now >= kill_at:
                _send(row.identity, signal.SIGKILL)
            elif is_new:
                _send(row.identity, signal.SIGTERM)
                _send(row.identity, signal.SIGCONT)
        if now >= kill_at:
            give_up_at = min(give_up_at, time.monotonic() + GIVE_UP_S)
        time.sleep(POLL_S)


def is_ours(pid: int) -> bool:
    """Return whether a process is an agent or a guard."""
    return AGENT in process.command_of(pid, len(AGENT) + 1000)


def _named(who: Identity, ours: Mapping[Identity, str]) -> str:
    """Return what a process is called in a report; `ours`: agents and guards by their records."""
    return ours.get(who) or (" or ".join(NAMES) if is_ours(who.pid) else process.command_of(who.pid))


def _send(who: Identity, number: int) -> None:
    with contextlib.suppress(OSError):  # another user's: it stays, and is reported
        process.send_signal(who, number)


# What runs here


class RecordedJob(NamedTuple):
    """A job on this host that has a record."""

    record: Record
    folder: str
    written: float
    """When the agent last wrote it, wall clock."""


class ProcessSnapshot:
    """The processes of this host at one moment. Without /proc each look at them is a run of ps: one serves all jobs."""

    def __init__(self) -> None:
        self.rows = process.table()
        self._mine = process.mine(_without_us(self.rows))
        found = process.environs_of([each.pid for each in self._mine])
        self.environs = {pid: env for pid, env in found.items() if env.get("DISTRUN_JOB_ID")}
        """By pid, of the calling user's processes that carry a job's mark."""

    def mine(self, rows: Iterable[Process]) -> List[Process]:
        """Return the processes of `rows` that the calling user started."""
        pids = {each.pid for each in self._mine}
        return [each for each in rows if each.pid in pids]

    def marked(self, marks: Mapping[str, str]) -> List[Process]:
        """Return the calling user's processes whose environment has all `marks`."""
        return [each for each in self._mine if process.has_marks(self.environs.get(each.pid, {}), marks)]

    def jobs(self) -> List[Key]:
        """Return the jobs whose mark a process of this container carries."""
        containers = ("", _namespace(os.getpid()))
        found = [env for pid, env in self.environs.items() if _namespace(pid) in containers]
        return sorted({(env["DISTRUN_JOB_ID"], env.get("DISTRUN_JOB_NONCE", ""), _place(env)) for env in found})


def survey() -> Dict[str, Any]:
    """Return all jobs of the calling user on this host, the ones with most processes last."""
    kept = {(each.record.job, each.record.nonce, each.record.host): each for each in _kept()}
    seen = ProcessSnapshot()
    keys = list(dict.fromkeys([*kept, *seen.jobs()]))
    return {
        "jobs": [_job(key, kept.get(key), seen) for key in keys],
        "uid": os.geteuid(),
        "hostname": os.uname().nodename,
    }


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


def described(each: Process, task: str = "") -> Dict[str, Any]:
    """Return a process as answers describe it."""
    age = age_s(each.start)
    return {
        "pid": each.pid,
        "start": each.start,
        "command": process.command_of(each.pid),
        "task": task,
        "age_s": None if age is None else round(age, 1),
        "state": each.state,
    }


def _job(key: Key, found: Optional[RecordedJob], seen: ProcessSnapshot) -> Dict[str, Any]:
    marks = process.marks(key[0], key[1])
    records = [found.record] if found else []
    environs = seen.environs
    every = belongings(records, dict(marks, DISTRUN_PLACE=key[2]) if key[2] else marks, seen=seen)
    if key[2]:  # agents, guards and what older versions started are marked with their host only
        known = {each.pid for each in every}
        every += [each for each in belongings([], dict(marks, DISTRUN_HOST=key[2]), seen=seen) if each.pid not in known]
    # A host may have several places, and a mark without a name means just that, not any of them.
    processes = [each for each in seen.mine(every) if _place(environs.get(each.pid, {}), key[2]) == key[2]]
    rows = {each.pid: each for each in seen.rows}
    agent, guard = (found.record.agent, found.record.guard) if found else _above(processes, rows)
    names = _names(records)
    return {
        "job": key[0],
        "nonce": key[1],
        "host": key[2],
        "agent": _state(agent, rows),
        "guard": _state(guard, rows),
        "quiet_s": max(0.0, round(time.time() - found.written, 1)) if found else None,
        "lease_s": found.record.lease_s if found else None,
        "grace_s": found.record.grace_s if found else None,
        "processes": [
            described(each, names.get(each.identity) or _task(environs.get(each.pid, {}))) for each in processes
        ],
        "folder": found.folder if found else "",
    }


def _place(env: Mapping[str, str], unmarked: str = "") -> str:
    """Return the place that a process's marks name; `unmarked` if it has none."""
    return (env.get("DISTRUN_PLACE") or env.get("DISTRUN_HOST", "")) if env else unmarked


def _names(records: Iterable[Record]) -> Dict[Identity, str]:
    names: Dict[Identity, str] = {}
    for each in records:
        names.update({who: name for name, who in each.tasks})
        names.update({each.agent: "agent", each.guard: "guard"})
    return names


def _task(env: Mapping[str, str]) -> str:
    return facts.task_name(env.get("DISTRUN_ROLE", ""), env.get("DISTRUN_RANK", ""))


def _above(processes: List[Process], rows: Mapping[int, Process]) -> Tuple[Optional[Identity], Optional[Identity]]:
    """Return agent and guard of a job whose record is lost (/tmp was cleaned), by what they run.

    The agent is the nearest such process above the tasks, the guard its parent.
    """
    for each in processes:
        above = rows.get(each.ppid)
        while above is not None and above.pid > 1:
            if is_ours(above.pid):
                guard = rows.get(above.ppid)
                return above.identity, guard.identity if guard else None
            above = rows.get(above.ppid)
    return None, None


def _state(who: Optional[Identity], rows: Mapping[int, Process]) -> str:
    if who is None:
        return facts.AGENT_NONE
    if not process.is_among(who, rows):
        return facts.AGENT_DEAD
    # T: a signal stopped it; t: a debugger did.
    return facts.AGENT_STOPPED if rows[who.pid].state in "Tt" else facts.AGENT_ALIVE


def _kept() -> List[RecordedJob]:
    found = []
    for folder in share.all_folders():
        with contextlib.suppress(OSError, ContractError, ValueError):
            written = os.stat(os.path.join(folder, share.RECORD)).st_mtime
            found.append(RecordedJob(share.load_record(folder), folder, written))
    return found


def _without_us(rows: List[Process]) -> List[Process]:
    """Return the living processes except this one and its ancestors."""
    spared = process.ancestors(os.getpid(), rows) | {os.getpid()}
    return [each for each in rows if not each.is_dead and each.pid not in spared]


def _namespace(pid: int) -> str:
    """Return the container (pid namespace) of a process; empty where that is not known."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


# By a pattern, whichever program started it


def match(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the processes in whose command line the pattern is found, and end them if that is wanted.

    Never the first process, this one or those above it, an agent, a guard, or an ssh daemon. Arguments: `regex`;
    `kill`, whether to end them; `grace_s`, seconds between TERM and KILL; `only`, pairs of pid and start: of those
    found only these; `spare`, such pairs that are left alone.

    Raises:
        ContractError: the pattern is not a regular expression.
    """
    try:
        pattern = re.compile(str(args["regex"]))
    except re.error as err:
        raise ContractError(f"--match {args['regex']}: this is not a regular expression: {err}") from None
    found = matching(process.table(), pattern, _identities(args.get("spare")))
    if args.get("only") is not None:
        only = _identities(args["only"])
        found = [each for each in found if each.identity in only]
    rows = [described(each) for each in found]
    if not args.get("kill"):
        return {"found": rows, "ended": [], "left": []}
    chosen = {each.identity for each in found}

    def find() -> List[Process]:
        return [
            each for each in process.table([who.pid for who in chosen]) if each.identity in chosen and not each.is_dead
        ]

    signalled, left = end_all(find, float(args.get("grace_s") or 0.0))
    remaining = {each.pid for each in left}
    return {
        "found": rows,
        "ended": [[who.pid, text] for who, text in signalled.items() if who.pid not in remaining],
        "left": [[each.pid, process.command_of(each.pid)] for each in left],
    }


def matching(rows: List[Process], pattern: Pattern[str], spare: Set[Identity]) -> List[Process]:
    """Return the processes of the calling user in `rows` that match the pattern and may be ended."""
    spared = process.ancestors(os.getpid(), rows) | {os.getpid(), 1}
    candidates = [each for each in rows if not each.is_dead and each.pid not in spared and each.identity not in spare]
    found = []
    for each in process.mine(candidates):
        command = process.command_of(each.pid, _WHOLE)
        if AGENT not in command and not is_daemon(command) and pattern.search(command):
            found.append(each)
    return found


def is_daemon(command: str) -> bool:
    """Return whether a command line is one of the ssh server's."""
    first = command.partition(" ")[0].rstrip(":").strip("[]")
    return os.path.basename(first) in DAEMONS


def _identities(pairs: Any) -> Set[Identity]:
    return {Identity(int(pid), str(start)) for pid, start in pairs or ()}
