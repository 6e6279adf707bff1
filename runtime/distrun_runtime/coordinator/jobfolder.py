"""One job's folder.

    request.json   what was asked for; secrets by name         launcher.json   who runs it: pid, start, host, boot
    allocation.json  which task runs on which host             plan.json       the plan, as it was made
    state.json     how the job and its tasks stand             outcome.json    how it ended; absent before
    events.jsonl   what happened, one object a line            logs/TASK.log   what the tasks wrote
    events.1.jsonl what happened before, in a job with very many events
    metrics.jsonl  a sample of its numbers a minute; absent in a job that nothing was measured of
    reports.json   how what its scripts report went on, over the whole run; absent where nothing was reported
    control.json   where its coordinator is: host, boot id, pid, start, path of the control socket
    engine.json    what the job is called in its engine; absent if it has none
    kill.json      who asked for its end, such as `distrun kill`; absent before
    reserve        room for outcome.json, should the disk be full at the end; absent afterwards
    coordinator.log  what the coordinator's process wrote to its stderr; empty unless it failed

Every JSON file is replaced as a whole by a rename, so that a reader sees the old or the new one; each carries
"version". No secret is in any of them. The folder may be on a file system that several hosts share: one process writes
it, and readers elsewhere know that it lives by the time of state.json, which it touches every few seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Mapping, Optional, Tuple

from distrun_runtime.contract import facts, process
from distrun_runtime.contract.dataclass import read, rfc3339, written
from distrun_runtime.coordinator import stored
from distrun_runtime.errors import ContractError, JobStoreError

if TYPE_CHECKING:
    from distrun_runtime.contract.plan import Plan
    from distrun_runtime.coordinator.failures import Outcome, Survivor, TaskResult

# The clock of the machine that keeps a folder's files.
#
# On a shared file system a file's time is the server's, and the clock of this machine may be hours away from it. Ages
# of files are measured with the server's own clock: by the time of a file that was just touched.


KEPT_S = 60.0
"""How long the difference of two clocks is believed."""

_known: Dict[int, Tuple[float, float]] = {}
"""By device: when it was measured (monotonic), and how far the server's clock is ahead of the monotonic one."""


def now(folder: Path) -> float:
    """Return the present time by the clock that the files of `folder` get their times from, in seconds since 1970.

    Where nothing can be written, this machine's clock has to do.
    """
    here = time.monotonic()
    try:
        device = os.stat(str(folder)).st_dev
        measured, ahead = _known.get(device, (-KEPT_S, 0.0))
        if here - measured >= KEPT_S:
            ahead = _touched(folder) - time.monotonic()
            _known[device] = here, ahead
    except OSError:
        return time.time()
    return time.monotonic() + ahead


def _touched(folder: Path) -> float:
    """Return the time of a file that is made in the folder for this. Raises OSError."""
    path = str(folder / (".clock.%s.%d" % (socket.gethostname(), os.getpid())))
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    try:
        os.utime(path)  # no time is sent along, so the server takes its own
        return os.stat(path).st_mtime
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)


VERSION = 1
SCHEMA = "distrun.job/1"
KILL = "distrun kill"
"""Who stops a job if its `stop` gives no name."""
OUTCOME_SCHEMA = "distrun.outcome/1"
REQUEST_SCHEMA = "distrun.request/1"
ALLOCATION_SCHEMA = "distrun.allocation/1"
ENGINE_SCHEMA = "distrun.engine/1"
REPORTS_SCHEMA = "distrun.reports/1"
REPORTS_LIMIT = 1024 * 1024
"""Bytes of reports.json that is read: it has a tenth of that."""
RESERVE = "reserve"
EVENTS = "events.jsonl"
OLDER_EVENTS = "events.1.jsonl"
EVENTS_BYTES = 8 * 1024 * 1024
"""Past it, EVENTS takes the place of OLDER_EVENTS, and a new one begins."""
_RESERVE_BYTES = 32 * 1024
_RESERVE_A_TASK = 3 * 1024
"""What outcome.json may need: two reasons of a task have 1000 characters each."""
_UNFINISHED = (facts.PENDING, facts.STARTING, facts.RUNNING, facts.LOST)


class JobFolder:
    """Reads a job's folder from any process, and writes it in the one that runs the job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.logs = path / "logs"
        self._plan: Optional[Plan] = None
        self._request: Optional[Dict[str, Any]] = None
        self._created = ""
        self._written: Dict[str, Any] = {}

    @classmethod
    def make(
        cls,
        path: Path,
        plan: Plan,
        request: Optional[Mapping[str, Any]] = None,
        allocation: Optional[Mapping[str, Any]] = None,
    ) -> JobFolder:
        """Fill an empty folder of a job that is planned already, this process as its launcher. Raises OSError."""
        folder = cls(path)
        folder._begin(request)
        if allocation is not None:
            folder.allocate(allocation)
        folder.start(plan)
        return folder

    @classmethod
    def submit(cls, path: Path, request: Mapping[str, Any]) -> JobFolder:
        """Fill an empty folder of a job that waits for its allocation: state submitting. Raises OSError.

        `request`: JSON-able values, among them `name`, `launcher`, `command` and `cwd`; no secret.
        """
        folder = cls(path)
        folder._begin(request)
        folder.write_state(facts.SUBMITTING, ())
        return folder

    def _begin(self, request: Optional[Mapping[str, Any]]) -> None:
        self._created = rfc3339(time.time())
        self.logs.mkdir()
        # First: a folder without state.json whose launcher lives is not damaged, but being made.
        self.take_over()
        if request is not None:
            self._request = self._headed(REQUEST_SCHEMA, request)
            _replace(self.path / "request.json", self._request)

    def allocate(self, allocation: Mapping[str, Any]) -> None:
        """Write where the job's tasks run, as JSON-able values. Raises OSError."""
        _replace(self.path / "allocation.json", self._headed(ALLOCATION_SCHEMA, allocation))

    def note_engine(self, marker: str, handle: Optional[Mapping[str, Any]] = None) -> None:
        """Write what the job is called in its engine. It is on the disk when this returns. Raises OSError.

        `marker`: known before the job is submitted; `handle`: JSON-able, what the engine calls it, known afterwards.
        """
        value = self._headed(ENGINE_SCHEMA, {"marker": marker, "handle": handle})
        _replace(self.path / "engine.json", value, is_synced=True)

    def start(self, plan: Plan) -> None:
        """Write the plan, which is made when the allocation is known: state starting. Raises OSError."""
        from distrun_runtime.contract import plan as plans
        from distrun_runtime.coordinator.failures import TaskResult

        self._plan = plan
        _replace(self.path / "plan.json", plans.to_json(plan))
        with open(str(self.path / RESERVE), "wb") as file:
            file.write(bytes(_RESERVE_BYTES + _RESERVE_A_TASK * len(plan.tasks)))
        tasks = [TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks]
        self.write_state(facts.STARTING, tasks)

    def _headed(self, schema: str, value: Mapping[str, Any]) -> Dict[str, Any]:
        return {"schema": schema, "version": VERSION, "id": self.id, "time": rfc3339(time.time()), **value}

    def exists(self) -> bool:
        """Whether there is a job here, whole or damaged; not whether one is being made."""
        names = ("state.json", "plan.json", "request.json")
        state, *others = (os.path.lexists(str(self.path / name)) for name in names)
        return state or (any(others) and not self.has_launcher())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    # ------------------------------------------------------------------ writing

    def take_over(self) -> None:
        """Make this process the one that runs the job. Raises OSError."""
        _replace(self.path / "launcher.json", _this_process())

    def write_state(
        self, state: str, tasks: Iterable[TaskResult], outcome: Optional[Outcome] = None, message: Optional[str] = None
    ) -> None:
        """Replace state.json. `message`: what a job waits for that has no outcome. Raises OSError."""
        value: Dict[str, Any] = {
            "schema": SCHEMA,
            "version": VERSION,
            "id": self.id,
            "state": state,
            **self._asked(),
            "created": self.created(),
            "updated": rfc3339(time.time()),
            "finished": None,
            "exit_code": None,
            "reason": None,
            "message": message,
            "tasks": [{**written(task), "log": str(self.log_path(task.name))} for task in tasks],
        }
        if outcome is not None:
            value.update(finished=value["updated"], exit_code=outcome.exit_code, reason=outcome.reason)
            value.update(message=outcome.message)
        self._written = value
        _replace(self.path / "state.json", value)

    @property
    def written(self) -> Dict[str, Any]:
        """What was last written, or should have been, into state.json: by this process, or by the one before it.

        Raises:
            JobStoreError: as `state`.
        """
        self._written = self._written or self._read_state()
        return self._written

    @property
    def is_unplanned(self) -> bool:
        """Whether the job never got an allocation, so that nothing of it can have been started."""
        names = ("request.json", "plan.json")
        request, plan = (os.path.lexists(str(self.path / name)) for name in names)
        return request and not plan

    def _asked(self) -> Dict[str, Any]:
        """Return what state.json repeats of the request and of the plan, if there is one."""
        is_unplanned = self._plan is None and self.is_unplanned
        try:
            request = self.request() or {}
        except JobStoreError:
            if is_unplanned:
                raise
            request = {}  # a job that runs goes on without it
        labels, command = (list(request.get(name, ())) for name in ("labels", "command"))
        if is_unplanned:
            known = {name: request.get(name, "") for name in ("name", "cwd")}
            return {**known, "labels": labels, "backend": request.get("launcher", ""), "command": command, "hosts": []}
        plan = self.plan()
        known = {"name": plan.name, "backend": plan.backend, "command": list(plan.command), "cwd": plan.cwd}
        return {**known, "labels": labels, "hosts": [host.name for host in plan.hosts]}

    @property
    def is_finished(self) -> bool:
        """Whether the job's end was written."""
        return (self.path / "outcome.json").exists()

    def finish(self, outcome: Outcome) -> None:
        """Write the end: outcome.json, also to a full disk, then state.json. The loop does; raises OSError."""
        outcome = self.explained(outcome)
        reserve = self.path / RESERVE
        try:
            _replace(self.path / "outcome.json", self.outcome_json(outcome))
        except OSError as err:
            if err.errno not in (errno.ENOSPC, errno.EDQUOT) or not reserve.exists():
                raise
            try:
                self._finish_in_reserve(outcome, reserve)
            except OSError:  # a file system that writes elsewhere what is written again: then its room is free now
                os.unlink(str(reserve))
                _replace(self.path / "outcome.json", self.outcome_json(outcome))
        with contextlib.suppress(OSError):
            os.unlink(str(reserve))
        self.write_state(outcome.job_state, outcome.tasks, outcome)

    def _finish_in_reserve(self, outcome: Outcome, reserve: Path) -> None:
        """Write outcome.json into the blocks of a file that is there already: the disk has no others."""
        room = reserve.stat().st_size
        bare = tuple(dataclasses.replace(task, reason="", own_failure="") for task in outcome.tasks)
        for tasks in (outcome.tasks, bare, ()):
            text = _text(self.outcome_json(dataclasses.replace(outcome, tasks=tasks))).encode("utf-8")
            if len(text) <= room:
                break
        with open(str(reserve), "r+b") as file:
            file.write(text)
            file.truncate()
        os.replace(str(reserve), str(self.path / "outcome.json"))

    def touch(self) -> None:
        """Note that the job lives, while nothing of it changes: state.json gets a new time. Raises OSError."""
        os.utime(str(self.path / "state.json"))

    def ask_to_end(self, by: str = "") -> None:
        """Record who stops the job, before the coordinator gets its SIGTERM.

        Args:
            by: who, and with what; empty: `distrun kill`.

        Raises:
            OSError: the file cannot be written.
        """
        times = {"version": VERSION, "pid": os.getpid(), "time": rfc3339(time.time())}
        _replace(self.path / "kill.json", {**times, "by": by or KILL})

    def explained(self, outcome: Outcome) -> Outcome:
        """Return an outcome that says who stopped the job, if the coordinator's SIGTERM came from a client."""
        path = self.path / "kill.json"
        if outcome.reason != facts.TERMINATED or not path.exists():
            return outcome
        try:
            by = stored.load(path, VERSION).get("by")
        except JobStoreError:  # it is for a message only
            by = KILL
        return dataclasses.replace(outcome, message=f"stopped by {by or KILL}")

    def bury(self, survivors: Iterable[Survivor], is_gone: bool = False) -> None:
        """Write the end of a lost job whose processes `distrun kill` has ended, but for `survivors`.

        A job that is not lost is left as it is, unless it is known that its coordinator `is_gone`.
        Raises OSError, JobStoreError.
        """
        from distrun_runtime.coordinator.failures import Outcome, TaskResult

        state = self.state()
        if state["state"] != facts.LOST and not is_gone:
            return
        now = time.time()
        tasks = tuple(_stopped(read(TaskResult, task), now) for task in state["tasks"])
        code = facts.exit_code(None, "TERM")
        message = "its launcher was gone; distrun kill ended what was left"
        self.finish(Outcome(code, facts.TERMINATED, message, tasks=tasks, survivors=tuple(survivors)))

    def outcome_json(self, outcome: Outcome) -> Dict[str, Any]:
        """Return the outcome as JSON-able values: what outcome.json holds and `launch --json` prints."""
        head = {"schema": OUTCOME_SCHEMA, "version": VERSION, "id": self.id, "folder": str(self.path)}
        value: Dict[str, Any] = {**head, **written(outcome)}
        del value["job"]
        if outcome.culprit is not None:
            value["culprit"]["log"] = str(self.log_path(outcome.culprit.task)) if outcome.culprit.task else None
        for task in value["tasks"]:
            task["log"] = str(self.log_path(task["name"]))
        return value

    def append(self, event: Mapping[str, Any]) -> None:
        """Append an event (`event`) to events.jsonl. Raises OSError."""
        line = json.dumps(event) + "\n"
        path = self.path / EVENTS
        with contextlib.suppress(FileNotFoundError):
            if os.stat(str(path)).st_size + len(line) > EVENTS_BYTES:
                os.replace(str(path), str(self.path / OLDER_EVENTS))
        with open(str(path), "a", encoding="utf-8") as file:
            file.write(line)

    def last_events(self, size: int) -> List[Dict[str, Any]]:
        """Return the events in the last `size` bytes of the job's, the oldest first; none if they cannot be read."""
        data = b""
        for name in (EVENTS, OLDER_EVENTS):
            with contextlib.suppress(OSError, JobStoreError), stored.opened(self.path / name) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - (size - len(data))))
                data = file.read() + data
            if len(data) >= size:
                break
        return events_of(data)

    def append_sample(self, line: str) -> None:
        """Append one line to metrics.jsonl. Raises OSError."""
        with open(str(self.path / "metrics.jsonl"), "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def keep_reports(self, reports: Mapping[str, Any]) -> None:
        """Replace reports.json. `reports`: as a snapshot of metrics has them. Raises OSError."""
        _replace(self.path / "reports.json", self._headed(REPORTS_SCHEMA, {"reports": reports}))

    def samples(self) -> List[Dict[str, Any]]:
        """Return the samples of metrics.jsonl, the oldest first; none if they cannot be read."""
        with contextlib.suppress(OSError, JobStoreError), stored.opened(self.path / "metrics.jsonl") as file:
            return [value for value in _objects(file.read()) if isinstance(value.get("time"), str)]
        return []

    # ------------------------------------------------------------------ reading

    def log_path(self, task: str) -> Path:
        """Return where the log of `task` is, or will be."""
        from distrun_runtime.coordinator import logs

        return logs.log_path(self.logs, task)

    def tail(self, task: str, lines: int) -> List[str]:
        """Return the last lines of a task's log, decoded, without newlines; [] if there is none."""
        from distrun_runtime.coordinator import logs

        return logs.tail(self.log_path(task), lines)

    def reports(self) -> Mapping[str, Any]:
        """Return what was last kept by `keep_reports`; {} if that is nothing, or cannot be read."""
        with contextlib.suppress(JobStoreError, OSError):
            if os.path.getsize(str(self.path / "reports.json")) <= REPORTS_LIMIT:
                found = self._load("reports.json", {}).get("reports")
                return found if isinstance(found, dict) else {}
        return {}

    def request(self) -> Optional[Dict[str, Any]]:
        """Read request.json; None if there is none. Raises JobStoreError."""
        if self._request is None:
            self._request = self._read("request.json", stored.REQUEST)
        return self._request

    def allocation(self) -> Optional[Dict[str, Any]]:
        """Read allocation.json; None before the job has one. Raises JobStoreError."""
        return self._read("allocation.json", stored.ALLOCATION)

    def engine(self) -> Optional[Dict[str, Any]]:
        """Read engine.json: `marker` and `handle`; None: the job was never to be submitted. Raises JobStoreError."""
        return self._read("engine.json", stored.ENGINE)

    def _read(self, name: str, members: stored.Members) -> Optional[Dict[str, Any]]:
        return self._load(name, members) if os.path.lexists(str(self.path / name)) else None

    def _load(self, name: str, members: stored.Members, version: int = VERSION, job: str = "id") -> Dict[str, Any]:
        """Read a file that must be there. `job`: the member that names its job, if it has it."""
        path = self.path / name
        value = stored.load(path, version)
        stored.check(path, value, members)
        if value.get(job, self.id) != self.id:
            raise stored.damaged(path, f"it is of job {value[job]}")
        return value

    def plan(self) -> Plan:
        """Read plan.json. Raises JobStoreError."""
        from distrun_runtime.contract import plan as plans  # not to list jobs

        if self._plan is None:
            value = self._load("plan.json", stored.PLAN, plans.VERSION, "job")
            try:
                plan = plans.from_json(value)
            except ContractError as err:
                raise stored.damaged(self.path / "plan.json", str(err)) from err
            hosts = {host.name for host in plan.hosts}
            stray = next((f"of hosts has task {task.name}" for task in plan.tasks if task.host not in hosts), "")
            if stray or not hosts:
                raise stored.damaged(self.path / "plan.json", f"no host {stray or 'is there'}")
            self._plan = plan
        return self._plan

    def state(self) -> Dict[str, Any]:
        """Read state.json; "state" is "lost" when the launcher died before the job was finished.

        Then tasks that had not ended are "lost" as well, and "heard" says when anything of the job was last written.
        The state is "unknown" where the launcher is on another host, which has not updated the job for 30 s.
        A job whose end is only in outcome.json, because the disk was full, has ended as that says.

        Raises:
            JobStoreError: it cannot be read, or is damaged.
        """
        value = self._read_state()
        absence = self._absence() if value["state"] in facts.LIVE else ""
        if absence:
            # It may have finished between the two looks.
            value = self._read_state()
            if value["state"] in facts.LIVE and not self._take_outcome(value):
                value["state"] = absence
                value["heard"] = self._heard(value["updated"])
                for task in value["tasks"]:
                    if absence == facts.LOST and task["state"] in _UNFINISHED:
                        task["state"] = facts.LOST
        return value

    def standing(self) -> str:
        """Return the job's state, `damaged` if it cannot be read."""
        try:
            return str(self.state()["state"])
        except JobStoreError:
            return facts.DAMAGED

    def shown(self) -> Dict[str, Any]:
        """Return what `state` does or, for a damaged job, the same members without content, and what is wrong."""
        try:
            return self.state()
        except JobStoreError as err:
            nothing: Dict[str, Any] = dict.fromkeys(("finished", "exit_code", "reason"))
            created = self.created()
            times = {"created": created, "updated": created}
            who = {"schema": SCHEMA, "version": VERSION, "id": self.id, "name": self.name(), "state": facts.DAMAGED}
            empty: Dict[str, Any] = {name: [] for name in ("labels", "command", "hosts", "tasks")}
            return {**who, **times, **nothing, "message": str(err), **empty}

    def _read_state(self) -> Dict[str, Any]:
        return self._load("state.json", stored.STATE)

    def _take_outcome(self, state: Dict[str, Any]) -> bool:
        """Bring a state up to date with outcome.json; return whether there is one that can be read."""
        from distrun_runtime.coordinator.failures import ended

        found = None
        with contextlib.suppress(JobStoreError):
            found = self.outcome()
        if found is not None:
            state.update(ended(state, found, rfc3339(os.stat(str(self.path / "outcome.json")).st_mtime)))
        return found is not None

    def outcome(self) -> Optional[Dict[str, Any]]:
        """Read outcome.json; None while the job is not over. Raises JobStoreError."""
        return self._read("outcome.json", stored.OUTCOME)

    def ended(self) -> Optional[Outcome]:
        """Read outcome.json as the value that it was written from; None while the job is not over. As `outcome`."""
        from distrun_runtime.coordinator import failures

        found = self.outcome()
        return None if found is None else failures.from_json(found)

    def launcher(self) -> Dict[str, Any]:
        """Read launcher.json: {"pid", "start", "host", "boot", "version"}. Raises JobStoreError."""
        value = self._load("launcher.json", stored.LAUNCHER)
        if value["pid"] <= 0:
            raise stored.damaged(self.path / "launcher.json", f"pid: expected one from 1, found {int(value['pid'])}")
        return value

    def write_control(self, path: str, login: str = "") -> None:
        """Write control.json: this process is the coordinator, and `path` its control socket. Raises OSError.

        Args:
            path: the control socket.
            login: what a user types before a command to run it on this host; empty: `ssh` with the host's name.
        """
        _replace(self.path / "control.json", {**_this_process(), "path": path, "login": login})

    def place_elsewhere(self, told: Mapping[str, Any], host: str, login: str) -> None:
        """Note that the coordinator runs on another host, which has the job's real folder. Raises OSError.

        Args:
            told: `pid`, `start`, `boot`, `path` of the control socket and `folder`, as it told them.
            host: its host, as the job calls it.
            login: what a user types before a command to run it there.
        """
        who = {"version": VERSION, "pid": told["pid"], "start": told["start"], "boot": told["boot"], "host": host}
        where = {**who, "path": told["path"], "folder": told["folder"], "login": login}
        _replace(self.path / "control.json", where)
        _replace(self.path / "launcher.json", who)

    def control(self) -> Optional[Dict[str, Any]]:
        """Read control.json: {"host", "boot", "pid", "start", "path", "login", "version"}; None: there is none.

        "folder", the job's real folder, is there if that is another one, on the coordinator's host.

        Raises:
            JobStoreError: it cannot be read, or is damaged.
        """
        return self._read("control.json", stored.CONTROL)

    def has_launcher(self) -> bool:
        """Whether the launcher still runs, as far as this machine can know."""
        return not self._absence()

    def _absence(self) -> str:
        """Return `lost` if the launcher is gone; `unknown` if it is another host's, and silent; "" if it runs."""
        try:
            who = self.launcher()
        except JobStoreError:
            return facts.LOST
        if who["host"] != socket.gethostname():
            return facts.UNKNOWN if self._silent_s() > facts.UNKNOWN_S else ""
        if who["boot"] != process.boot_id():
            return facts.LOST  # this machine was started again
        return "" if process.is_alive(process.Identity(who["pid"], who["start"])) else facts.LOST

    def _silent_s(self) -> float:
        """Return how long ago the launcher wrote or touched state.json, by the clock of the file's server."""
        folder = Path(os.path.realpath(str(self.path)))
        for name in ("state.json", "launcher.json"):
            with contextlib.suppress(OSError, JobStoreError):
                with stored.opened(folder / name) as file:  # opening asks the server, where stat may remember
                    written = os.fstat(file.fileno()).st_mtime
                return now(folder.parent) - written
        return 0.0

    def _heard(self, updated: str) -> str:
        """Return when the state was last written or touched, or an event or a task's output written (RFC 3339)."""
        times = [updated]
        for path in (self.path / "state.json", self.path / "events.jsonl", *self.logs.glob("*.log")):
            with contextlib.suppress(OSError):
                times.append(rfc3339(os.stat(str(path)).st_mtime))
        return max(times)

    def created(self) -> str:
        """Return when it was created (RFC 3339); of a damaged job when its folder last changed, "" if that is gone."""
        if not self._created:
            self._created = self._member("created", stored.TIME)
        if not self._created:
            with contextlib.suppress(OSError):
                return rfc3339(os.stat(str(self.path)).st_mtime)
        return self._created

    def name(self) -> str:
        """Return what the user called it; may be empty."""
        return self._member("name", stored.TEXT)

    def _member(self, member: str, kind: stored.MemberType) -> str:
        """Return a text of state.json, "" where that cannot be read."""
        try:
            value = stored.load(self.path / "state.json", VERSION).get(member)
        except JobStoreError:
            return ""
        return str(value) if kind.fits(value) else ""


def event(kind: str, /, **facts: Any) -> Dict[str, Any]:
    """Return what is a line of events.jsonl, with the time now."""
    return dict(facts, version=VERSION, time=rfc3339(time.time()), event=kind)


def is_here(where: Mapping[str, Any]) -> bool:
    """Return whether control.json, as `where`, names this machine."""
    return bool(where["host"] == socket.gethostname())


def _this_process() -> Dict[str, Any]:
    """Return the members of launcher.json and control.json that name this process."""
    who, boot = process.identity(os.getpid()), process.boot_id()
    return {"version": VERSION, "host": socket.gethostname(), "boot": boot, "pid": who.pid, "start": who.start}


def events_of(data: bytes) -> List[Dict[str, Any]]:
    """Return the events of a piece of events.jsonl. What is no event, such as half a line, is left out."""
    found = _objects(data)
    return [each for each in found if isinstance(each.get("event"), str) and isinstance(each.get("time"), str)]


def _objects(data: bytes) -> List[Dict[str, Any]]:
    found = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(line.decode("utf-8", "replace"))
            if isinstance(value, dict):
                found.append(value)
    return found


def _stopped(task: TaskResult, now: float) -> TaskResult:
    if task.state not in _UNFINISHED:
        return task
    return dataclasses.replace(task, state=facts.STOPPED, ended=None if task.started is None else now)


def _replace(path: Path, value: Mapping[str, Any], is_synced: bool = False) -> None:
    """Write a file as a whole; `is_synced`: its content and its name are on the disk when this returns."""
    temporary = f"{path}.{socket.gethostname()}.{os.getpid()}.tmp"  # hosts that share the folder have alike pids
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_text(value))
            if is_synced:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, str(path))
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    if is_synced:
        folder = os.open(str(path.parent), os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _text(value: Mapping[str, Any]) -> str:
    """Return JSON with a line for each member, and for each element of a list of objects.

    Not json's own indent: that is written by Python and takes a tenth of a second for a thousand tasks.
    """
    lines = []
    for key, member in value.items():
        text = json.dumps(member)
        if isinstance(member, list) and member and isinstance(member[0], dict):
            text = "[\n  {}\n ]".format(",\n  ".join(map(json.dumps, member)))
        lines.append(f" {json.dumps(key)}: {text}")
    return "{{\n{}\n}}\n".format(",\n".join(lines))
