"""What is known of one job, kept up to date: its model, and its logs as far as they are shown."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from distrun import remote_jobs, report
from distrun.dashboard import text
from distrun.dashboard.model import Model
from distrun.dashboard.source import FrameSource, string
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator.jobfolder import JobFolder

FAST_S = 0.5
"""Interval of requests for the job's state, for a time after an event: the coordinator writes it a moment later."""
STATE_S = 10.0
"""The same at other times."""
CHANGED_S = 2.0
"""That time after an event."""
LOOK_S = 2.0
"""Minimum time between two messages that say which hosts are looked at."""
OUTPUT_SIZE = 128 * 1024
"""Bytes of a task's output that are kept, if its log is on another machine."""
OUTPUT_LINES = 200
"""Lines of the job's output that are asked for there."""


class JobFeed:
    """One job.

    Arguments:
        folder: the job's folder on this machine.
        source: gives frames.
    """

    def __init__(self, folder: JobFolder, source: FrameSource) -> None:
        self.model = Model(folder.id)
        self.source = source
        self._folder = folder
        self._is_elsewhere = remote_jobs.is_elsewhere(folder)
        """Until the job is over its logs are on another machine, and its coordinator sends them."""
        self._error_stamp: object = None
        self._output: dict[str, bytes] = {}
        """What tasks printed, where their logs are elsewhere."""
        self._changed_until = 0.0
        self._asked_state = self._told_look = 0.0

    def take(self) -> list[Frame]:
        """Take the frames that have come; return those that are not for the model: what answers a user."""
        others = []
        for frame in self.source.take():
            header = frame.header
            if self.model.take(frame.type, header, time.time()):
                if frame.type == "event":
                    self._changed_until = time.monotonic() + CHANGED_S
            elif frame.type == "link":
                self.model.link = string(header.get("why"))
            elif frame.type == "failed":
                self.model.link = string(header.get("message"))
            elif frame.type == "output":
                task = string(header.get("task"))
                self._output[task] = (self._output.get(task, b"") + frame.body)[-OUTPUT_SIZE:]
            else:
                others.append(frame)
        return others

    def ask(self, hosts: Sequence[str] = (), wants_output: bool = False) -> None:
        """Ask the coordinator for what changes rarely, and tell it what is looked at.

        Args:
            hosts: those that are looked at.
            wants_output: a log is looked at, besides that of the first error.
        """
        if self.model.job.is_over:
            return
        now = time.monotonic()
        if now >= self._asked_state + (FAST_S if now < self._changed_until else STATE_S):
            self._asked_state = now
            self.source.send("state")
        if now >= self._told_look + LOOK_S:
            self._told_look = now
            wanted: dict[str, object] = {"events": True, "metrics": True, "look": list(hosts)}
            if self._is_elsewhere and (wants_output or self.model.first_error is not None):
                wanted["output"] = {"tail": OUTPUT_LINES}
            self.source.subscribe(**wanted)

    def hurry(self) -> None:
        """Let the next `ask` tell at once what is looked at."""
        self._told_look = float("-inf")

    def settle(self) -> float:
        """Bring the model up to date with what was taken, and with the log of the first error; return the time."""
        wall = time.time()
        self.model.settle(wall)
        error = self.model.first_error
        if error is not None and (stamp := self.stamp(error.name)) != self._error_stamp:
            self._error_stamp = stamp
            lines = [text.clean(line) for line in self.tail(error.name, report.READ_LINES)]
            self.model.set_error(report.excerpt(lines))
            self.model.settle(wall)
        return wall

    @property
    def _has_logs(self) -> bool:
        return not self._is_elsewhere or self.model.job.is_over

    def stamp(self, task: str) -> object:
        """Return what changes when the log of a task does."""
        if not self._has_logs:
            said = self._output.get(task, b"")
            return task, len(said), hash(said[-256:])
        try:
            found = os.stat(self._folder.log_path(task))
        except OSError:
            return task
        return task, found.st_size, found.st_mtime_ns

    def tail(self, task: str, lines: int) -> Sequence[str]:
        """Return the last lines of the log of a task."""
        if self._has_logs:
            return self._folder.tail(task, lines)
        found = self._output.get(task, b"").decode("utf-8", "replace").splitlines()
        return [line.rstrip("\r").rpartition("\r")[2] for line in found[-lines:]]
