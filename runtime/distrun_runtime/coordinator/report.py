"""The failure report: what failed first, where, how, and its last lines. Pure text."""

from __future__ import annotations

from typing import Sequence

from distrun_runtime.coordinator.outcome import Outcome


def failure(outcome: Outcome, tail: Sequence[str] = (), log: str = "") -> str:
    """Return the report of a job that did not succeed, several lines without a final newline; "" if it succeeded.

    `tail` is the end of the culprit's log (`JobFolder.tail(task, 20)`), `log` the path of that file.
    The one-line summary for `distrun: error: ...` is `outcome.message`. SKELETON.
    """
    raise NotImplementedError
