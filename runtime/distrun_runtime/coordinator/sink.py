"""Where a job's output and the coordinator's words go. The terminal printer implements it."""

from __future__ import annotations

from typing import Optional, Protocol


class Sink(Protocol):
    """Called by the loop's thread only, and must never make it wait."""

    def output(self, task: str, host: str, stream: str, data: bytes, at: Optional[int]) -> None:
        """Take bytes that a task wrote to `stream` ("out" or "err").

        They begin at byte `at` of the task's log file (`JobFolder.log_path(task)`), so that a full printer may
        remember the place instead of the bytes; None: they did not get there (disk full).
        """

    def say(self, text: str, level: str) -> None:
        """Take one message of distrun's own. `level`: debug, info, warning or error; the sink filters."""

    def toggle_pause(self) -> None:
        """Ctrl-Z was pressed: stop printing, or go on."""


class Silent:
    """A sink that drops everything (a detached job: its logs are files)."""

    def output(self, task: str, host: str, stream: str, data: bytes, at: Optional[int]) -> None:
        """Drop it."""

    def say(self, text: str, level: str) -> None:
        """Drop it."""

    def toggle_pause(self) -> None:
        """Do nothing."""
