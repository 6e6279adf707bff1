"""One job's folder.

    plan.json      the plan, as it was made                    launcher.json   who runs it: pid, start, host
    state.json     how the job and its tasks stand             outcome.json    how it ended; absent before
    events.jsonl   what happened, one object a line            logs/TASK.log   what the tasks wrote
    kill.json      `distrun kill` asked for its end; absent before

Every JSON file is replaced as a whole by a rename, so that a reader sees the old or the new one; each carries
"version". No secret is in any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import socket
import time
from pathlib import Path
from typing import Any, Dict, Iterable, List, Mapping, Optional

from distrun_runtime.contract import plan as plans
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Plan
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator import spool
from distrun_runtime.coordinator.outcome import Outcome, TaskResult
from distrun_runtime.errors import JobStoreError

VERSION = 1
SCHEMA = "distrun.job/1"
OUTCOME_SCHEMA = "distrun.outcome/1"

LIVE = (ends.STARTING, ends.RUNNING, ends.STOPPING)
"""States of a job that a launcher runs."""
_UNFINISHED = (ends.PENDING, ends.STARTING, ends.RUNNING, ends.LOST)


class JobFolder:
    """Reads a job's folder from any process, and writes it in the one that runs the job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.logs = path / "logs"
        self._plan: Optional[Plan] = None
        self._created = ""

    @classmethod
    def make(cls, path: Path, plan: Plan) -> JobFolder:
        """Fill an empty folder: plan, this process as launcher, state starting. Raises OSError."""
        folder = cls(path)
        folder._plan = plan
        folder._created = rfc3339(time.time())
        folder.logs.mkdir()
        who = process.identity(os.getpid())
        _replace(path / "plan.json", plans.to_json(plan))
        launcher = {"version": VERSION, "pid": who.pid, "start": who.start, "host": socket.gethostname()}
        _replace(path / "launcher.json", launcher)
        tasks = [TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks]
        folder.write_state(ends.STARTING, tasks)
        return folder

    def exists(self) -> bool:
        """Whether there is a whole job here."""
        return os.path.exists(str(self.path / "state.json"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobFolder) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    # ------------------------------------------------------------------ writing

    def write_state(self, state: str, tasks: Iterable[TaskResult], outcome: Optional[Outcome] = None) -> None:
        """Replace state.json. Raises OSError."""
        plan = self.plan()
        value: Dict[str, Any] = {
            "schema": SCHEMA,
            "version": VERSION,
            "id": plan.job,
            "name": plan.name,
            "backend": plan.backend,
            "state": state,
            "command": list(plan.command),
            "cwd": plan.cwd,
            "hosts": [host.name for host in plan.hosts],
            "created": self.created(),
            "updated": rfc3339(time.time()),
            "finished": None,
            "exit_code": None,
            "reason": None,
            "message": None,
            "tasks": [self._task(task) for task in tasks],
        }
        if outcome is not None:
            value.update(finished=value["updated"], exit_code=outcome.exit_code, reason=outcome.reason)
            value.update(message=outcome.message)
        _replace(self.path / "state.json", value)

    @property
    def is_finished(self) -> bool:
        """Whether the job's end was written."""
        return (self.path / "outcome.json").exists()

    def finish(self, outcome: Outcome) -> None:
        """Write the end: outcome.json, then state.json. The loop does; raises OSError."""
        outcome = self.explained(outcome)
        _replace(self.path / "outcome.json", self.outcome_json(outcome))
        self.write_state(outcome.job_state, outcome.tasks, outcome)

    def touch(self) -> None:
        """Note that the job lives, while nothing of it changes: state.json gets a new time. Raises OSError."""
        os.utime(str(self.path / "state.json"))

    def ask_to_end(self) -> None:
        """Note, before the launcher gets its SIGTERM, that `distrun kill` sends it. Raises OSError."""
        _replace(self.path / "kill.json", {"version": VERSION, "pid": os.getpid(), "time": rfc3339(time.time())})

    def explained(self, outcome: Outcome) -> Outcome:
        """Return an outcome that says "stopped by distrun kill" if that is what the launcher's SIGTERM was."""
        if outcome.reason != ends.TERMINATED or not (self.path / "kill.json").exists():
            return outcome
        return dataclasses.replace(outcome, message="stopped by distrun kill")

    def bury(self, survivors: Iterable[str]) -> None:
        """Write the end of a lost job whose processes `distrun kill` has ended, but for `survivors`.

        A job that is not lost is left as it is. Raises OSError, JobStoreError.
        """
        state = self.state()
        if state["state"] != ends.LOST:
            return
        now = time.time()
        tasks = tuple(_stopped(_result(task), now) for task in state["tasks"])
        code = ends.exit_code(None, "TERM")
        message = "its launcher was gone; distrun kill ended what was left"
        self.finish(Outcome(code, ends.TERMINATED, message, tasks=tasks, survivors=tuple(survivors)))

    def outcome_json(self, outcome: Outcome) -> Dict[str, Any]:
        """Return the outcome as JSON-able values: what outcome.json holds and `launch --json` prints."""
        culprit = None
        if outcome.culprit is not None:
            culprit = dataclasses.asdict(outcome.culprit)
            culprit["time"] = rfc3339(outcome.culprit.time)
            culprit["log"] = str(self.log_path(outcome.culprit.task)) if outcome.culprit.task else None
        return {
            "schema": OUTCOME_SCHEMA,
            "version": VERSION,
            "id": self.id,
            "exit_code": outcome.exit_code,
            "reason": outcome.reason,
            "message": outcome.message,
            "culprit": culprit,
            "problems": [dataclasses.asdict(problem) for problem in outcome.problems],
            "survivors": list(outcome.survivors),
            "tasks": [self._task(task) for task in outcome.tasks],
            "folder": str(self.path),
        }

    def record(self, kind: str, /, **facts: Any) -> None:
        """Append one line to events.jsonl. Raises OSError."""
        line = json.dumps(dict(facts, version=VERSION, time=rfc3339(time.time()), event=kind))
        with open(str(self.path / "events.jsonl"), "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _task(self, task: TaskResult) -> Dict[str, Any]:
        value = dict(vars(task))
        value["started"] = None if task.started is None else rfc3339(task.started)
        value["ended"] = None if task.ended is None else rfc3339(task.ended)
        value["log"] = str(self.log_path(task.name))
        return value

    # ------------------------------------------------------------------ reading

    def log_path(self, task: str) -> Path:
        """Return where the log of `task` is, or will be."""
        return spool.log_path(self.logs, task)

    def tail(self, task: str, lines: int) -> List[str]:
        """Return the last lines of a task's log, decoded, without newlines; [] if there is none."""
        return spool.tail(self.log_path(task), lines)

    def plan(self) -> Plan:
        """Read plan.json. Raises JobStoreError, ContractError."""
        if self._plan is None:
            self._plan = plans.from_json(_load(self.path / "plan.json", plans.VERSION))
        return self._plan

    def state(self) -> Dict[str, Any]:
        """Read state.json; "state" is "lost" when the launcher died before the job was finished.

        Then tasks that had not ended are "lost" as well, and "heard" says when anything of the job was last written.

        Raises:
            JobStoreError: it cannot be read.
        """
        value = _load(self.path / "state.json")
        if value.get("state") in LIVE and not self.has_launcher():
            # It may have finished between the two looks.
            value = _load(self.path / "state.json")
            if value.get("state") in LIVE:
                value["state"] = ends.LOST
                value["heard"] = self._heard(str(value["updated"]))
                for task in value["tasks"]:
                    if task["state"] in _UNFINISHED:
                        task["state"] = ends.LOST
        return value

    def outcome(self) -> Optional[Dict[str, Any]]:
        """Read outcome.json; None while the job is not over. Raises JobStoreError."""
        path = self.path / "outcome.json"
        return _load(path) if path.exists() else None

    def launcher(self) -> Dict[str, Any]:
        """Read launcher.json: {"pid", "start", "host", "version"}. Raises JobStoreError."""
        return _load(self.path / "launcher.json")

    def has_launcher(self) -> bool:
        """Whether the launcher still runs, as far as this machine can know (yes, if it is another's)."""
        try:
            who = self.launcher()
            if who["host"] != socket.gethostname():
                return True
            return process.is_alive(process.Identity(int(who["pid"]), str(who["start"])))
        except (JobStoreError, KeyError, ValueError):
            return False

    def _heard(self, updated: str) -> str:
        """Return when the state was last written or touched, or an event or a task's output written (RFC 3339)."""
        times = [updated]
        for path in (self.path / "state.json", self.path / "events.jsonl", *self.logs.glob("*.log")):
            with contextlib.suppress(OSError):
                times.append(rfc3339(os.stat(str(path)).st_mtime))
        return max(times)

    def created(self) -> str:
        """Return when it was created (RFC 3339), "" where that cannot be read."""
        if not self._created:
            self._created = self._text("created")
        return self._created

    def name(self) -> str:
        """Return what the user called it; may be empty."""
        return self._text("name")

    def _text(self, member: str) -> str:
        try:
            return str(_load(self.path / "state.json").get(member) or "")
        except JobStoreError:
            return ""


def rfc3339(when: float) -> str:
    """Return a wall-clock time as `2026-01-31T12:00:00.000Z`."""
    moment = datetime.datetime.fromtimestamp(when, datetime.timezone.utc)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + "%03dZ" % (moment.microsecond // 1000)


def _seconds(text: Optional[str]) -> Optional[float]:
    if text is None:
        return None
    moment = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%S.%fZ")
    return moment.replace(tzinfo=datetime.timezone.utc).timestamp()


def _result(task: Mapping[str, Any]) -> TaskResult:
    """Return a task of state.json as the value that it was written from."""
    members = {each.name: task[each.name] for each in dataclasses.fields(TaskResult) if each.name in task}
    return TaskResult(**dict(members, started=_seconds(task["started"]), ended=_seconds(task["ended"])))


def _stopped(task: TaskResult, now: float) -> TaskResult:
    if task.state not in _UNFINISHED:
        return task
    return dataclasses.replace(task, state=ends.STOPPED, ended=None if task.started is None else now)


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    temporary = "%s.%d.tmp" % (path, os.getpid())
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(_text(value))
        os.replace(temporary, str(path))
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def _text(value: Mapping[str, Any]) -> str:
    """Return JSON with a line for each member, and for each element of a list of objects.

    Not json's own indent: that is written by Python and takes a tenth of a second for a thousand tasks.
    """
    lines = []
    for key, member in value.items():
        text = json.dumps(member)
        if isinstance(member, list) and member and isinstance(member[0], dict):
            text = "[\n  %s\n ]" % ",\n  ".join(json.dumps(each) for each in member)
        lines.append(" %s: %s" % (json.dumps(key), text))
    return "{\n%s\n}\n" % ",\n".join(lines)


def _load(path: Path, version: int = VERSION) -> Dict[str, Any]:
    try:
        with open(str(path), encoding="utf-8") as file:
            value = json.load(file)
    except OSError as err:
        raise JobStoreError("cannot read %s: %s" % (path, err.strerror or err)) from err
    except ValueError as err:
        raise JobStoreError("%s is no JSON of ours: %s" % (path, err)) from err
    if not isinstance(value, dict) or value.get("version") != version:
        found = value.get("version") if isinstance(value, dict) else value
        raise JobStoreError("%s has version %.40r; this program knows version %d" % (path, found, version))
    return value
