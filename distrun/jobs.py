"""The user's jobs, on this machine or on hosts: how they stand, what they print, and their end.

    job = Jobs().launch(Request(["python", "train.py"], workers=2, servers=2))
    for job in Jobs().list():
        print(job.id, job.state)
    job = Jobs().get("calm-otter")
    for piece in job.logs("worker-0", follow=True):
        sys.stdout.buffer.write(piece.data)
    print(job.wait(), job.outcome)

This can be used from a notebook and from any thread: no signal handler is set, no process is forked, and
nothing is printed.

`look` returns the current status of jobs: their state and, if they run, their metrics. Each query has a time limit.
The job store is read at once. Coordinators on this machine are asked for metrics through their control sockets, all in
parallel. Coordinators elsewhere are asked through one connection per host, also in parallel: an agent there sends the
states of the jobs and forwards the replies of their control sockets. No password is asked for. If a coordinator does
not answer in time, its job is `unknown`; other jobs are not affected.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import selectors
import shlex
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from distrun.errors import DistrunError, UsageError
from distrun.formats import grouped
from distrun_runtime.contract import facts
from distrun_runtime.contract.dataclass import dataclass, seconds
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator import jobfolder
from distrun_runtime.coordinator.jobfolder import JobFolder, events_of
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.errors import JobStoreError, NoSuchJob, WireError

if TYPE_CHECKING:
    from distrun.client import ControlConnection
    from distrun.fetching import HostFetch
    from distrun.killing import Killed, RemovedJob
    from distrun.request import JobRequest
    from distrun.requesting import Request
    from distrun_runtime.contract import session
    from distrun_runtime.coordinator.logreader import LogPiece, LogReader

HERE_S = 0.3
"""Total time limit for the coordinators on this machine, in seconds."""
THERE_S = 2.0
"""As above, for coordinators on other hosts."""
METRICS_S = 0.5
"""How long the metrics of a coordinator elsewhere are waited for when its host has answered. It may have none."""
EVENTS_SIZE = 16 * 1024
"""Bytes from the end of events.jsonl that are read."""
END_S = 0.2
"""How much longer the answers of other hosts are waited for, to be taken in."""
STACK = ("task", "text", "how", "error", "fix")
STACK_S = 15.0
"""How long the stacks of a task are waited for: agents have 10 s."""
POLL_S = 0.1
"""How often new output is looked for."""
READ_SIZE = 256 * 1024


AnyJob = TypeVar("AnyJob", bound="Job")


# ---------------------------------------------------------------------- jobs


class JobOver(UsageError):
    """What is asked of a coordinator comes too late: the job is over."""


def _warn(text: str, level: str) -> None:
    if level == "warning":
        warnings.warn(text, stacklevel=4)


class Jobs:
    """The jobs that this machine's job store knows.

    Args:
        store: the job store; None: the user's.
        say: takes what a user should know besides what is returned, with its level, "info" or "warning". By default
            warnings are those of Python, and the rest is dropped.
    """

    def __init__(self, store: JobStore | None = None, say: Callable[[str, str], None] = _warn) -> None:
        self.store = store or JobStore()
        self.say = say

    def launch(self, request: Request | JobRequest) -> Job:
        """Launch a job, and return it when its coordinator has it; its tasks may not have started.

        The coordinator is a process of its own. It stops the job when this process ends, unless the request says
        `detach`: then this returns when all tasks run, or when an engine has the job, which goes on. What the
        coordinator has to say goes to `say`. It asks no questions: ssh logs in by keys.

        The job is a context manager: leaving its block stops the job, unless it is over or detached.

        Args:
            request: what is to run, and where. `dry_run` means nothing here: see `planning.plan_job`.

        Raises:
            UsageError: the request cannot be fulfilled as it is.
            PreflightError: hosts are not up after `wait_for_hosts`.
            DistrunError: the coordinator could not be started, or could not start the job.
        """
        from distrun import hostwait, launching, planning, scriptcheck
        from distrun.requesting import Request
        from distrun_runtime.contract import daemon

        asked = request.resolve(self.say) if isinstance(request, Request) else request
        warnings = [scriptcheck.check(asked)]
        job = planning.plan_job(asked, self.store)
        if isinstance(job, planning.PlannedJob):
            warnings += planning.device_warnings(job.plan)
            warnings += job.tree.warnings() if job.tree is not None else ()
        if asked.detach and not job.is_hosted and daemon.ends_at_logout():
            warnings.append("a logout here ends the job all the same (KillUserProcesses of systemd-logind)")
        for warning in filter(None, warnings):
            self.say(warning, "warning")
        if asked.wait_for_hosts_s and asked.hosts is not None and isinstance(job, planning.PlannedJob):
            hostwait.wait(asked, [host.name for host in job.plan.hosts], self.say)
        folder = launching.create(self.store, job)
        launching.spawn(job, folder, self.say)
        return Job(folder, self.say, is_owned=not asked.detach)

    def list(self, most: int | None = None, name: str = "", labels: Sequence[str] = ()) -> Sequence[Job]:
        """Return the jobs, newest first: those that go on, then others, of which there are at most `most`.

        Args:
            most: see above; None: all.
            name: only jobs whose name is like this pattern (`x-*`); empty: all.
            labels: only jobs that have all of these (`K=V`).
        """
        return [Job(folder, self.say) for folder in self._listed(most, name, labels)]

    def views(self, most: int | None = None, labels: Sequence[str] = ()) -> Sequence[JobView]:
        """Return how the jobs of `list` stand now; all are asked at once, for about 2 s at most."""
        return look(self._listed(most, "", labels))

    def _listed(self, most: int | None, name: str, labels: Sequence[str]) -> Sequence[JobFolder]:
        folders = self.store.list()
        if name:
            folders = [folder for folder in folders if fnmatch.fnmatchcase(folder.name(), name)]
        if labels:
            folders = [folder for folder in folders if has_labels(folder, labels)]
        return listed(folders, most)

    def get(self, wanted: str | None, prefers_living: bool = False) -> Job:
        """Return the job of an id, the beginning of one, or a name; of several of one name the newest, and say so.

        Args:
            wanted: the id or name; None: the latest job, which is said, too.
            prefers_living: jobs that run come before those that are over.

        Raises:
            NoSuchJob: there is none, or several ids begin so.
        """
        if wanted is None:
            folders = self.store.list()
            if not folders:
                raise NoSuchJob(f"there are no jobs in {self.store.jobs}")
            going = (each for each in folders if each.standing() in facts.GOING) if prefers_living else iter(())
            folder = next(going, folders[0])
            self.say(f"job {folder.id}, the latest", "info")
            return Job(folder, self.say)
        if prefers_living:
            return Job(self.store.find_living(wanted), self.say)
        folder = self.store.find(wanted)
        count = len(self.store.named(wanted)) if folder.id != wanted else 0
        if count > 1:
            self.say(f"{wanted}: the newest of {count} jobs of that name, {folder.id}", "info")
        return Job(folder, self.say)

    def gc(
        self,
        names: Sequence[str] = (),
        *,
        older_s: float | None = None,
        keep: int = 0,
        has_lost: bool = False,
        is_dry: bool = False,
    ) -> tuple[Sequence[RemovedJob], Sequence[str]]:
        """Remove the folders of jobs that are over; return what became of each, and what went wrong, a line each.

        Args:
            names: ids, beginnings of them, or names: only these jobs, damaged ones, too. Empty: all that are over, lost
                ones with `has_lost`.
            older_s: only jobs that ended so long ago, seconds; None: `killing.OLDER_S`, and any that is named.
            keep: so many of the newest jobs stay, however old they are.
            has_lost: also jobs whose launcher died. One that is named needs it, too.
            is_dry: remove nothing, and return what would be removed.

        Raises:
            UsageError: a job that is named is not over, as far as this machine knows, or is lost, without `has_lost`.
            NoSuchJob: there is none of that name.
        """
        from distrun import killing

        every = self.store.list()
        states = {folder: folder.shown() for folder in (map(self.store.find, names) if names else every)}
        for folder, state in states.items() if names else ():
            killing.check_is_over(folder, state["state"], has_lost)
        wanted = (*facts.OVER, facts.LOST) if has_lost else facts.OVER  # of those that are not named
        least_s = older_s if older_s is not None else 0.0 if names else killing.OLDER_S
        kept, now = set(every[:keep]), time.time()
        problems = [] if is_dry else killing.finish(self.store)
        silent: dict[str, str] = {}
        removed = []
        for folder, state in states.items():
            last = state["finished"] or state.get("heard") or state["updated"]  # it ended, was heard of, or changed
            age_s = now - (seconds(last) if last else 0.0)
            if (names or state["state"] in wanted) and age_s >= least_s and folder not in kept:
                done, wrong = killing.remove(folder, state["state"], silent, is_dry)
                removed.append(done)
                problems += wrong
        return removed, problems


class Job:
    """One job. What it tells is read from its folder each time.

    What is known here of a job whose coordinator is on another host is of the last `refresh`. Several threads may use
    one object; each call of `attach` and `logs` opens a connection or files of its own.

    Args:
        folder: the job's folder.
        say: as for `Jobs`.
        is_owned: leaving a `with` block stops it.
    """

    def __init__(self, folder: JobFolder, say: Callable[[str, str], None] = _warn, is_owned: bool = False) -> None:
        self.folder = folder
        self.say = say
        self.is_owned = is_owned
        self._ended: Mapping[str, Any] | None = None
        """The outcome that the coordinator told, which is perhaps not yet in the folder here."""

    def __enter__(self: AnyJob) -> AnyJob:
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_owned and not self.is_over:
            self.stop()

    @property
    def id(self) -> str:
        """The job's id."""
        return self.folder.id

    @property
    def state(self) -> str:
        """How it stands: "running", "succeeded" ..."""
        return str(self.folder.state()["state"])

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.state in facts.OVER

    @property
    def tasks(self) -> Sequence[Mapping[str, Any]]:
        """Its tasks, as in `distrun status --json`: name, role, host, state ... None before it has a place."""
        found: Sequence[Mapping[str, Any]] = self.folder.state()["tasks"]
        return found

    @property
    def outcome(self) -> Mapping[str, Any] | None:
        """How it ended: exit_code, reason, message ...; None while it is not over."""
        return self.folder.outcome() or self._ended

    @property
    def is_elsewhere(self) -> bool:
        """Whether what is known of it has to be fetched from one of its hosts."""
        from distrun import remote_jobs

        return remote_jobs.is_elsewhere(self.folder)

    def refresh(self, may_ask: bool = True) -> Job:
        """Fetch what its coordinator's host knows of it, if that has to be fetched; return itself.

        If that host cannot be asked, this is said. `may_ask`: the user may be asked for a password.
        """
        from distrun import remote_jobs

        warning = remote_jobs.refreshed(self.folder, may_ask)
        if warning:
            self.say(warning, "warning")
        return self

    def view(self) -> JobView:
        """Return how it stands now; its coordinator is asked, for about 2 s at most, and the user nothing.

        If it has ended on another host, everything is fetched from there, once.

        Raises:
            JobStoreError: its files are damaged.
        """
        (view,) = look([self.folder], with_events=True)
        if view.state["state"] == facts.DAMAGED:
            self.folder.state()  # raises what is wrong
        if view.state["state"] in facts.OVER and self.is_elsewhere:
            self.refresh(may_ask=False)
            (view,) = look([self.folder], with_events=True)
        return view

    def attach(self, may_ask: bool = True) -> ControlConnection:
        """Return a connection to its coordinator, by which it can be followed; it is a context manager.

        Raises:
            JobOver: it is over; perhaps it has ended just now.
            UsageError: the coordinator cannot be asked, or is of another version.
            CoordinatorLost: it is gone, or does not answer.
        """
        from distrun import client, remote_jobs

        try:
            return client.connect(self.folder, may_ask)
        except client.CoordinatorUnreachable:
            raise  # nor can its files be fetched; the user would be asked for a password again
        except client.CoordinatorLost as err:
            remote_jobs.refreshed(self.folder, may_ask)  # what it warns of, `err` says
            if self.folder.outcome() is None:
                raise
            raise self._over() from err

    def _over(self) -> JobOver:
        return JobOver(f"job {self.id} is over: {self.state}", f"what it printed: distrun logs {self.id}")

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it is over; return its exit code.

        Raises:
            TimeoutError: it is not over after `timeout_s`.
            CoordinatorLost: its coordinator is gone.
        """
        from distrun.client import CoordinatorLost

        recorded = self.folder.outcome()
        if recorded is None:
            try:
                return self._follow(timeout_s)
            except (JobOver, CoordinatorLost):
                recorded = self.refresh().folder.outcome()  # it may have ended between the two looks
                if recorded is None:
                    raise
        return int(recorded["exit_code"])

    def _follow(self, timeout_s: float | None) -> int:
        """Wait by a connection to the coordinator; as `wait`."""
        from distrun import client
        from distrun_runtime.coordinator import failures

        until = None if timeout_s is None else time.monotonic() + timeout_s
        with self.attach() as connection, client.reading():
            connection.send("subscribe")
            while frame := connection.receive(None if until is None else max(0.001, until - time.monotonic())):
                if frame.type == "outcome":
                    outcome = failures.from_json(frame.header["outcome"])
                    self._ended = self.folder.outcome_json(outcome)
                    return outcome.exit_code
                if frame.type == "failed":
                    return int(frame.header["exit_code"])
        raise client.gone(self.folder)

    def detach(self) -> bool:
        """Let it go on without the terminal that launched it; return whether it had one.

        Raises:
            UsageError: it is over, or cannot be detached.
            CoordinatorLost: its coordinator is gone.
        """
        is_released = bool(self._ask("detach", {}, members=("released",))[0]["released"])
        self.is_owned = False
        return is_released

    def stack(self, *tasks: str) -> Sequence[Mapping[str, Any]]:
        """Return where tasks stand, each once: task, text, how; error and fix where there is no text.

        Args:
            *tasks: names or roles; all workers if there are none.

        Raises:
            UsageError: it is over, or the coordinator refuses.
            CoordinatorLost: its coordinator is gone.
        """
        self.choose(tasks)
        found = self._ask("stack", *({"task": each} for each in tasks or ("",)), members=STACK, limit_s=STACK_S)
        return list({str(answer["task"]): answer for answer in found}.values())

    def _ask(
        self, kind: str, *each: Mapping[str, Any], members: Sequence[str], limit_s: float = 10.0
    ) -> list[Mapping[str, Any]]:
        """Ask the coordinator of a job that runs once with each of these; return the members of what it answers."""
        from distrun import client

        if self.is_over:
            raise self._over()
        answers: list[Mapping[str, Any]] = []
        with self.attach() as connection, client.reading():
            for question in each:
                left = True
                connection.send(kind, **question)
                while left:
                    frame = connection.answer(kind, limit_s)
                    if frame.type == "refused":
                        refused = frame.header
                        raise UsageError(f"job {self.id}: {refused['message']}", str(refused.get("hint", "")))
                    answers.append({name: frame.header[name] for name in members})
                    left = bool(frame.header.get("left"))
        return answers

    def choose(self, wanted: Sequence[str]) -> Sequence[Mapping[str, Any]]:
        """Return the tasks of these names and roles, in the order of the job; all, if none is named.

        Raises:
            UsageError: there is none of one; lists near ones.
        """
        return choose(self.tasks, wanted)

    def logs(self, *tasks: str, follow: bool = False) -> Iterator[LogPiece]:
        """Give what tasks printed, stdout and stderr, in the order in which it came.

        Args:
            *tasks: names or roles; all tasks if there are none.
            follow: go on until the job is over.

        Raises:
            UsageError: there is no such task.
            CoordinatorLost: the coordinator, on another host, is lost.
        """
        from distrun_runtime.coordinator.logreader import LogReader

        names = [str(row["name"]) for row in self.choose(tasks)]
        with contextlib.ExitStack() as stack:
            output: RecordedOutput | ForwardedOutput
            is_elsewhere = self.is_elsewhere
            if is_elsewhere:
                output = stack.enter_context(ForwardedOutput(self, names, {"cursor": 0}, follow))
            else:
                reader = stack.enter_context(contextlib.closing(LogReader(self.folder.logs)))
                output = RecordedOutput(self, reader, names if tasks else None)
            while (follow or is_elsewhere) and output.goes_on():
                yield from output.pieces()
                time.sleep(POLL_S)
            yield from output.pieces()
            yield from output.last()

    def fetch(self, *paths: str, to: str = "", source: str = "") -> Sequence[HostFetch]:
        """Copy files of its hosts here: to `to/HOST/PATH`, or to `to/PATH` if all hosts have one folder.

        Args:
            *paths: patterns (`out/*`), seen from the folder in which its tasks start; without any: those of --fetch.
            to: a folder here; empty: one that is called as the job, in the current folder.
            source: another folder on the hosts.

        Returns:
            What came from each host.

        Raises:
            SyncError: not all files came; the others are here.
            UsageError: a path is not below that folder, none is given, or the hosts cannot be asked.
        """
        from distrun import fetching
        from distrun.options import parse_fetched

        given = (self.folder.request() or {}).get("given") or {}
        wanted = [parse_fetched("PATH", path) for path in paths or given.get("fetch", ())]
        if not wanted:
            raise UsageError("no files are named", f"distrun fetch {self.id} 'out/*'")
        return fetching.fetch(self.folder, wanted, to, source, self.say)

    def stop(self, grace_s: float | None = None) -> Killed:
        """Stop it and everything that it started; return what was done. See `killing.kill`."""
        from distrun import killing

        return killing.kill(self.folder, grace_s)


def has_labels(folder: JobFolder, labels: Sequence[str]) -> bool:
    """Return whether a job has all these labels; a damaged one has none."""
    try:
        return set(labels) <= set((folder.request() or {}).get("labels", ()))
    except JobStoreError:
        return False


def choose(tasks: Sequence[Mapping[str, Any]], wanted: Sequence[str], option: str = "") -> Sequence[Mapping[str, Any]]:
    """Return the tasks of these names and roles, in the order of the job; all, if none is named.

    `option`: begins the error.

    Raises:
        UsageError: there is none of one; lists near ones.
    """
    for word in wanted:
        if not any(word in (task["name"], task["role"]) for task in tasks):
            import difflib

            names = [str(task["name"]) for task in tasks]
            if not names:
                raise UsageError(
                    f"no task {word!r} in this job: it has none yet", "distrun status JOB says what it waits for"
                )
            near = difflib.get_close_matches(word, names, n=3) or names[:8]
            raise UsageError(f"{option}no task {word!r} in this job; there is: {', '.join(near)}")
    return [task for task in tasks if not wanted or task["name"] in wanted or task["role"] in wanted]


class RecordedOutput:
    """What tasks printed, in the order in which it came, from the job's logs on this machine.

    Args:
        job: the job.
        reader: reads its logs.
        names: names of tasks; None: all.
    """

    def __init__(self, job: Job, reader: LogReader, names: Collection[str] | None) -> None:
        self.job = job
        self.reader = reader
        self.names = names
        self.cursor = 0
        """Where reading goes on."""
        self.since = 0.0
        """Only what came then or later is given by `last`; seconds since 1970."""

    def begin_at(self, cursor: int | None, begin: Mapping[str, Any]) -> None:
        """Begin at a cursor; if that is None, where `begin` says, as `control.OutputWanted` has it."""
        from distrun_runtime.contract.control import OutputWanted
        from distrun_runtime.coordinator import logreader

        if cursor is None:
            tasks = None if self.names is None else tuple(self.names)
            cursor = logreader.begin(self.reader, OutputWanted(**{**begin, "tasks": tasks}))
        self.cursor = cursor

    def goes_on(self) -> bool:
        """Return whether more may come. Asked before `pieces`: what was written before the end is then given."""
        return self.job.state in facts.GOING

    def pieces(self) -> Iterator[LogPiece]:
        """Give what has come since the last call."""
        while True:
            found = self.reader.read(self.cursor, READ_SIZE, self.names)
            yield from found.pieces
            if found.cursor == self.cursor:
                return
            self.cursor = found.cursor

    def last(self) -> Iterator[LogPiece]:
        """Give, after the last of `pieces`, what else there is of a job that is over."""
        if self.job.state in facts.LIVE:
            return
        names = [str(row["name"]) for row in self.job.tasks] if self.names is None else self.names
        said = False
        for piece in self.reader.rest(names):
            if piece.time >= self.since:
                if not said:
                    self.job.say("the order of the last lines is not known: their record was not written", "info")
                    said = True
                yield piece


class ForwardedOutput(contextlib.AbstractContextManager["ForwardedOutput"]):
    """What tasks print of a job whose coordinator, with the logs, is on another host; the coordinator sends it.

    Args:
        job: the job.
        names: names of tasks.
        begin: where it begins, as `control.OutputWanted` has it.
        follow: go on until the job is over; else until what there is now.
    """

    def __init__(self, job: Job, names: Sequence[str], begin: Mapping[str, Any], follow: bool = True) -> None:
        self._job = job
        self._names = names
        self._begin = begin
        self._follow = follow
        self._cursor: int | None = None
        self._connection: ControlConnection | None = None
        with contextlib.suppress(JobOver):
            self._connection = job.attach()
            wanted = {"tasks": list(names) if len(names) < len(job.tasks) else None, "until": "" if follow else "now"}
            self._connection.send("subscribe", output={**begin, **wanted})
        self._heard_at = time.monotonic()
        """When it was last heard, or asked for a sign of life."""
        self._silences = 0
        """How often it has not answered that."""

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def __exit__(self, *error: object) -> None:
        self._close()

    def goes_on(self) -> bool:
        """Return whether more may come."""
        return self._connection is not None

    def pieces(self) -> Iterator[LogPiece]:
        """Give what has come since the last call; does not wait for more.

        Raises:
            CoordinatorLost: the coordinator has gone, and the job is not over; or it does not send what there is.
            UsageError: the coordinator refuses.
        """
        from distrun import client
        from distrun_runtime.coordinator.logreader import LogPiece

        while self._connection is not None:
            try:
                frame = self._connection.receive(0.001)
            except TimeoutError:
                if not self._follow:
                    self._ask_for_a_sign(self._connection)
                return
            self._heard_at, self._silences = time.monotonic(), 0
            if frame is None or frame.type in ("outcome", "failed"):
                self._close()
                if self._job.refresh().folder.outcome() is None and frame is None:
                    raise client.gone(self._job.folder)
                return
            with client.reading():
                header = frame.header
                if frame.type == "refused":
                    raise UsageError(f"job {self._job.id}: {header['message']}", str(header.get("hint", "")))
                self._cursor = header.get("cursor", self._cursor)
                if frame.type == "output":
                    place = self._cursor or 0, float(header["time"]), str(header["task"]), str(header["stream"])
                    yield LogPiece(*place, int(header["attempt"]), int(header["at"]), frame.body)
                elif frame.type == "output_end":
                    self._close()
                elif frame.type == "said" and not self._follow and header["level"] == "warning":
                    self._job.say(str(header["text"]), "warning")  # as a rule why the logs cannot be read

    def _ask_for_a_sign(self, connection: ControlConnection) -> None:
        """Ask a silent coordinator for the job's state from time to time: it may be searching long logs.

        Raises:
            CoordinatorLost: it has not answered.
        """
        from distrun import client

        if time.monotonic() < self._heard_at + client.ANSWER_S / client.PROBES:
            return
        self._silences += 1
        if self._silences >= client.PROBES:  # not the clock: this process may have been stopped
            raise client.unanswering(self._job.folder, client.ANSWER_S)
        connection.send("state")
        self._heard_at = time.monotonic()

    def last(self) -> Iterator[LogPiece]:
        """Give what the coordinator did not send at the end: it waits for no client that is slow."""
        from distrun_runtime.coordinator.logreader import LogReader

        if self._job.folder.is_finished:
            with contextlib.closing(LogReader(self._job.folder.logs)) as reader:
                rest = RecordedOutput(self._job, reader, self._names)
                rest.begin_at(self._cursor, self._begin)
                yield from rest.pieces()


# ---------------------------------------------------------------------- how jobs stand


@dataclass(frozen=True)
class JobView:
    """How one job stands."""

    folder: JobFolder
    state: Mapping[str, Any]
    """As `JobFolder.shown`; the state is `unknown` if its coordinator's host has not answered."""
    host: str = ""
    """Where its coordinator is, or was; empty: not known."""
    is_here: bool = True
    """That is this machine."""
    metrics: Mapping[str, Any] | None = None
    """What the coordinator measures (`distrun.metrics/1`); None: nothing is known."""
    events: Sequence[Mapping[str, Any]] = ()
    """The last events, the oldest first, if they were asked for."""
    seen_s: float | None = None
    """How long ago it was heard of; None: just now, or it is over."""
    problem: str = ""
    """Why its coordinator's host has not answered."""
    fix: str = ""
    """What to type then."""

    @property
    def id(self) -> str:
        """The job's id."""
        return self.folder.id

    @property
    def is_going(self) -> bool:
        """Whether it goes on, as far as is known."""
        return self.state["state"] in facts.GOING

    @property
    def progress(self) -> Mapping[str, Any] | None:
        """The job's progress, if its script reports it."""
        found = (self.metrics or {}).get("progress")
        return found if isinstance(found, Mapping) else None

    @property
    def reports(self) -> Mapping[str, Any]:
        """What its script has reported so far (`reports` of `distrun.metrics/1`), or until its end."""
        found = (self.metrics or {}).get("reports")
        return found if isinstance(found, Mapping) else self.folder.reports()


def look(
    folders: Iterable[JobFolder], here_s: float = HERE_S, there_s: float = THERE_S, with_events: bool = False
) -> list[JobView]:
    """Return how jobs stand, in their order.

    Coordinators on this machine are waited for `here_s` seconds at most, those elsewhere `there_s`. Damaged jobs are
    shown as such.
    """
    jobs = [_JobQuery(folder, with_events) for folder in folders]
    waiting = [job for job in jobs if job.is_asked_here or job.is_asked_there]
    if waiting:
        _ask(waiting, here_s, there_s)
    return [job.view() for job in jobs]


class _JobQuery:
    """What is known of one job, and how its coordinator is asked."""

    def __init__(self, folder: JobFolder, with_events: bool) -> None:
        self.folder = folder
        self.with_events = with_events
        self.state = folder.shown()
        self.where: Mapping[str, Any] = {}
        with contextlib.suppress(JobStoreError):
            self.where = folder.control() or {}
        self.is_here = not self.where or jobfolder.is_here(self.where)
        is_fetched = bool(self.where.get("folder"))
        is_going = self.state["state"] in facts.GOING
        self.is_asked_there = bool(self.where.get("path")) and is_going and not self.is_here
        self.is_asked_here = bool(self.where.get("path")) and is_going and self.is_here
        self.is_owned_there = self.is_asked_there and is_fetched and not folder.is_finished
        """What is here is a copy of what is on the coordinator's host."""
        self.has_state = not self.is_owned_there
        """What is known of its state is of now."""
        self.metrics: Mapping[str, Any] | None = None
        self.events: bytes | None = None
        self.problem = ""
        self.fix = ""
        self._decoder: session.Decoder | None = None

    @property
    def login(self) -> str:
        """What a user types before a command to run it on the coordinator's host."""
        return str(self.where.get("login") or shlex.join(["ssh", str(self.where["host"])]))

    def feed(self, data: bytes) -> bool:
        """Take what the control socket says; return whether more is wanted."""
        from distrun_runtime.contract import session

        self._decoder = self._decoder or session.Decoder()
        try:
            for frame in self._decoder.feed(data):
                if frame.type == "metrics" and isinstance(frame.header.get("metrics"), dict):
                    self.metrics = frame.header["metrics"]
                elif frame.type == "hello" and frame.header.get("job") != self.folder.id:
                    return False  # another job has its socket
                elif frame.type in ("refused", "outcome", "failed"):
                    return False
        except WireError:
            return False
        return self.metrics is None

    def take(self, name: str, age_s: float, data: bytes) -> bool:
        """Take what a host sent; return whether more is wanted."""
        from distrun import remote_jobs

        if name == "frames":
            return self.feed(data)
        if name == "events.jsonl":
            self.events = data
        elif name == "state.json" and self.is_owned_there:
            try:
                remote_jobs.save(self.folder, name, age_s, [data])
                self.state = self.folder.shown()
                self.has_state = True
            except OSError as err:
                self.problem = f"what {self.where['host']} sent cannot be written to {self.folder.path}: {err.strerror}"
        return bool(name) and self.state["state"] in facts.GOING

    def note_unanswered(self, why: str) -> None:
        """Note why its host did not answer, unless it did or that is known."""
        if not self.has_state and not self.problem:
            self.problem = f"{self.where['host']} cannot be asked: {why}"
            self.fix = f"{self.login} true"

    def view(self) -> JobView:
        state = self.state if self.has_state else {**self.state, "state": facts.UNKNOWN}
        seen_s = self._silent_s(state) if state["state"] == facts.UNKNOWN else None
        events: Sequence[Mapping[str, Any]] = ()
        if self.with_events:
            events = self.folder.last_events(EVENTS_SIZE) if self.events is None else events_of(self.events)
        host = str(self.where.get("host") or "")
        problem, fix = ("", "") if self.has_state or not self.problem else (self.problem, self.fix)
        return JobView(self.folder, state, host, self.is_here, self.metrics, events, seen_s, problem, fix)

    def _silent_s(self, state: Mapping[str, Any]) -> float | None:
        """Return how long ago the coordinator was heard of."""
        if not self.has_state:
            with contextlib.suppress(OSError):
                return max(0.0, time.time() - os.stat(str(self.folder.path / "state.json")).st_mtime)
        heard = state.get("heard") or state["updated"]
        return max(0.0, time.time() - seconds(heard)) if heard else None


# ---------------------------------------------------------------------- asking


def asked() -> bytes:
    """Return what a coordinator is sent: it answers with its metrics at once."""
    from distrun_runtime.contract import control, session

    return control.client_hello() + session.encode({"type": "subscribe", "metrics": True})


def _ask(jobs: Sequence[_JobQuery], here_s: float, there_s: float) -> None:
    """Ask all coordinators at the same time."""
    began = time.monotonic()
    there = [job for job in jobs if job.is_asked_there]
    threads = [
        threading.Thread(
            target=_ask_there,
            args=({job.folder.id: job for job in of_host}, began + there_s),
            name="host-query",
            daemon=True,
        )
        for of_host in grouped((job.login, job) for job in there).values()
    ]
    for thread in threads:
        thread.start()
    here = [job for job in jobs if job.is_asked_here]
    if here:
        _ask_here(here, began + here_s)
    for thread in threads:
        thread.join(max(0.0, began + there_s - time.monotonic()) + END_S)
    for job in there:
        job.note_unanswered(f"no answer within {duration(round(there_s, 1))}")


def _ask_here(jobs: Sequence[_JobQuery], until: float) -> None:
    """Ask coordinators on this machine; `until`: monotonic time."""
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for job in jobs:
            peer = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            peer.setblocking(False)
            with contextlib.suppress(OSError):  # gone, or so busy that its queue of connections is full
                peer.connect(job.where["path"])
                peer.sendall(asked())
                selector.register(peer, selectors.EVENT_READ, (peer, job))
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                peer, job = key.data
                try:
                    data = peer.recv(READ_SIZE)
                except BlockingIOError:
                    continue
                except OSError:
                    data = b""
                if not data or not job.feed(data):
                    selector.unregister(peer)


def _ask_there(jobs: Mapping[str, _JobQuery], until: float) -> None:
    """Ask a host with coordinators by one connection.

    `jobs`: by id. `until`: monotonic time, when it is given up.
    """
    from distrun import remote_jobs
    from distrun_runtime.contract.agent_messages import AnswerPiece
    from distrun_runtime.coordinator.stored import SIZE_LIMIT

    first, limit_s = next(iter(jobs.values())), until - time.monotonic()
    about = [[job, str(each.where.get("folder") or ""), str(each.where["path"])] for job, each in jobs.items()]
    events = [("events.jsonl", EVENTS_SIZE)] if any(each.with_events for each in jobs.values()) else []
    args = {"jobs": about, "files": [*events, ("state.json", 0)], "asked": asked().hex()}
    left = set(jobs)
    try:
        fleet, found = remote_jobs.ask(first.folder, first.where, args, False, limit_s)
        with contextlib.closing(fleet):
            while isinstance(found, AnswerPiece):
                if found.job not in jobs:
                    raise remote_jobs.NotAsked(f"it sent a file of a job that it was not asked for: {found.job!r}")
                data = b"".join(remote_jobs.content(fleet, found, SIZE_LIMIT, until))
                if not jobs[found.job].take(found.name, found.age_s, data):
                    left.discard(found.job)
                if not left:
                    break
                wait_s = METRICS_S if all(job.has_state for job in jobs.values()) else limit_s
                found = fleet.next(min(wait_s, until - time.monotonic()))
        why = remote_jobs.why(found, limit_s)
    except (OSError, DistrunError) as err:
        why = str(err)
    for job in jobs.values():
        job.note_unanswered(why)


# ---------------------------------------------------------------------- order


def listed(folders: Sequence[JobFolder], most: int | None) -> list[JobFolder]:
    """Return the jobs of a list, newest first, in the order in which they are shown: those that go on, then others.

    Of those that are over there are at most `most`; None: all.
    """
    going: list[JobFolder] = []
    others: list[JobFolder] = []
    for folder in folders:
        if not folder.is_finished and folder.standing() in facts.GOING:
            going.append(folder)
        elif most is None or len(others) < most:
            others.append(folder)
    return going + others
