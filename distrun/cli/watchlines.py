"""`distrun status --watch --json`: prints a JSON object a line for each change of a job, or of the list of jobs.

A watch begins with a `snapshot`. An `update` line has what is new: the state, the metrics, an event. `gap` means that
something was missed; the next state is complete. `end` has the outcome. If the reader closes its end, the watch ends
silently.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun import client, jobviews
from distrun.cli.console import copy_out, is_read
from distrun.errors import DistrunError
from distrun_runtime.contract import facts
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.jobfolder import rfc3339
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.jobviews import JobView
    from distrun_runtime.contract import wire
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.outcome import Outcome

SCHEMA = "distrun.watch/1"
POLL_S = 1.0
"""Interval of polls for what no connection reports; also how soon a closed stdout is noticed."""
THERE_S = 5.0
"""The same where a look takes an ssh connection."""
STATEFUL = ("ready", "started", "exited", "published", "state", "lost", "finished", "failed")
"""Events after which the state may be another."""

Show = Callable[["JobView", float], Mapping[str, Any]]
"""Returns a job as JSON, given the time."""


class Closed(Exception):
    """The reader of stdout has closed its end."""


class _Lines:
    """Writes lines, each at once."""

    def write(self, kind: str, job: str = "", /, **members: Any) -> None:
        """Write a line of type `kind`, about a job if one is named.

        Raises:
            Closed: nobody reads any more.
        """
        who = {"job": job} if job else {}
        value = {"schema": SCHEMA, "type": kind, "time": rfc3339(time.time()), **who, **members}
        if not copy_out(json.dumps(value).encode() + b"\n"):
            raise Closed

    def pause(self, seconds: float) -> None:
        """Wait. Raises Closed as soon as the reader has closed its end."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
            self.check()

    def check(self) -> None:
        """Raise Closed if the reader has closed its end."""
        if not is_read():
            raise Closed


# ---------------------------------------------------------------------- the list of jobs


def jobs(read: Callable[[], Sequence[JobView]], show: Show) -> int:
    """Write how the list of jobs changes, until the reader closes its end; return the exit code."""
    lines = _Lines()
    try:
        views = read()
        shown = {view.id: show(view, time.time()) for view in views}
        lines.write("snapshot", jobs=list(shown.values()))
        while True:
            lines.pause(POLL_S if all(view.is_here for view in views) else THERE_S)
            views = read()
            now = {view.id: show(view, time.time()) for view in views}
            for job, value in now.items():
                if _lasting(value) != _lasting(shown.get(job, {})):
                    lines.write("update", job, state=value)
            for job in shown.keys() - now.keys():
                lines.write("update", job, state=None)
            shown = now
    except Closed:
        return 0


def _lasting(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what counts as a change."""
    return {name: each for name, each in value.items() if name not in ("seen", "updated", "heard")}


# ---------------------------------------------------------------------- one job


def job(first: JobView, show: Show, exit_code: Callable[[Mapping[str, Any]], int]) -> int:
    """Write how a job changes, until it is over or the reader closes its end; return the exit code.

    Args:
        first: how it stands.
        show: returns a job's state as JSON.
        exit_code: returns that of a state.
    """
    watch = _Watch(first, show)
    try:
        outcome = watch.run()
    except Closed:
        return 0
    if outcome is not None:
        return 0 if outcome.job_state == facts.SUCCEEDED else 1
    return exit_code(watch.state) or int(watch.has_failed)


class _Watch:
    """Follows one job by a connection to its coordinator, and by its folder while there is none."""

    def __init__(self, first: JobView, show: Show) -> None:
        self._folder: JobFolder = first.folder
        self._view = first
        self._show = show
        self._lines = _Lines()
        self._was_connected = False
        self._is_asked = False
        """A state is on its way."""
        self._has_gap = False
        """Something was missed, and no state has been told since."""
        self.state = first.state
        self.has_failed = False
        """Its coordinator has failed, so that it has no outcome."""

    def run(self) -> Outcome | None:
        """Write all lines; return the outcome, None if there is none.

        Raises:
            Closed: nobody reads any more.
        """
        view = self._view
        shown = self._show(view, time.time())
        self._lines.write("snapshot", view.id, state=shown, metrics=view.metrics, events=list(view.events))
        while self.state["state"] in facts.GOING:
            told = self._follow()
            if told is not None:
                return self._end(told)
            self._look()
        return self._end(None)

    def _follow(self) -> wire.Frame | None:
        """Follow the job by a connection; return its last frame, None if there is no connection any more."""
        try:
            connection = client.connect(self._folder, may_ask=False)
        except (DistrunError, JobStoreError):
            self._lines.pause(POLL_S if self._view.is_here else THERE_S)
            return None
        with connection:
            try:
                client.check_version(connection, self._folder)
            except DistrunError:
                self._lines.pause(POLL_S)
                return None
            if self._was_connected:
                self._lines.write("gap", self._view.id, missed=None)
                self._has_gap = True
            self._was_connected = True
            connection.send("subscribe", events=True, metrics=True)
            self._ask(connection)
            while True:
                try:
                    frame = connection.receive(POLL_S)
                except TimeoutError:
                    self._lines.check()
                    continue
                if frame is None:
                    break
                if frame.type in ("outcome", "failed"):
                    return frame
                with client.reading():
                    self._take(frame, connection)
        self._lines.pause(POLL_S)
        return None

    def _ask(self, connection: client.ControlConnection) -> None:
        if not self._is_asked:
            self._is_asked = True
            connection.send("state")

    def _take(self, frame: wire.Frame, connection: client.ControlConnection) -> None:
        header = frame.header
        if frame.type == "state":
            self._is_asked = self._is_asked and bool(header.get("missed"))
            if header.get("missed"):
                self._lines.write("gap", self._view.id, missed=header["missed"])
            self._tell(header["state"], self._has_gap or bool(header.get("missed")))
            self._has_gap = False
        elif frame.type == "event":
            self._lines.write("update", self._view.id, event=header["event"])
            if header["event"].get("event") in STATEFUL:
                self._ask(connection)
        elif frame.type == "metrics":
            self._lines.write("update", self._view.id, metrics=header["metrics"])

    def _look(self) -> None:
        """Read how the job stands without a connection."""
        self._is_asked = False
        (self._view,) = jobviews.look([self._folder])
        self._tell(self._view.state)

    def _tell(self, state: Mapping[str, Any], is_wanted: bool = False) -> None:
        """Write the state if it has changed, or is wanted in any case."""
        if not is_wanted and _lasting(state) == _lasting(self.state):
            return
        self.state = state
        shown = self._show(jobviews.with_state(self._view, state), time.time())
        self._lines.write("update", self._view.id, state=shown)

    def _end(self, told: wire.Frame | None) -> Outcome | None:
        """Write the last line; return the outcome, None if there is none."""
        outcome, value, error = None, None, None
        if told is not None and told.type == "outcome":
            with client.reading():
                outcome = ends.from_json(told.header["outcome"])
            assert outcome is not None
            value = self._folder.outcome_json(self._folder.explained(outcome))
        elif told is not None:
            self.has_failed = True
            error = {"message": told.header["message"], "hint": told.header["hint"]}
        else:
            try:
                value = self._folder.outcome()
            except JobStoreError as err:
                error = {"message": str(err), "hint": ""}
        self._lines.write("end", self._view.id, outcome=value, error=error)
        return outcome
