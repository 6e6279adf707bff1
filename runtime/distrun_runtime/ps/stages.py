"""Where the time of pushes and pulls goes, stage by stage, for `DISTRUN_STAGES=1`.

A worker measures its copies and how long it is until servers have answered a pull. A server says in the answer how
long it had the pull, and how much of that it added or ran the rule. So no two clocks are compared.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from distrun_runtime.protocol.message import Message

ASKED = "stages"
"""Member of a pull's body that asks for a server's times, and of the answer's body that has them."""

COPY_OUT, WIRE, WAIT, ADD, RULE, COPY_IN = STAGES = ("copy out", "wire", "wait", "add", "rule", "copy in")
_KEPT = 256
"""A server remembers so many pieces of work; a round has fewer."""


class Stages:
    """The times of one worker.

    Threads: any.
    """

    def __init__(self, is_on: bool = False) -> None:
        self.is_on = is_on
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._answers = 0

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        """Add the time of the block to a stage."""
        began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._seconds[stage] += time.monotonic() - began

    def answered(self, seconds: float, replies: Sequence[Message]) -> None:
        """Take in the answers to a pull, which came `seconds` after it was sent.

        Of several servers that answer, the one counts that had it longest: the worker waited for that one.
        """
        told = [reply.body[ASKED] for reply in replies if ASKED in reply.body]
        if not told:
            return
        held, add, rule = max((float(each["held"]), float(each[ADD]), float(each[RULE])) for each in told)
        with self._lock:
            self._answers += 1
            self._seconds[ADD] += add
            self._seconds[RULE] += rule
            self._seconds[WAIT] += max(0.0, held - add - rule)
            self._seconds[WIRE] += max(0.0, seconds - held)

    def text(self, name: str) -> str:
        """Return the times for people, or "" if there are none.

        Arguments:
            name: of the worker.
        """
        with self._lock:
            seconds, answers = dict(self._seconds), self._answers
        if not answers:
            return ""
        whole = sum(seconds.values()) or 1.0
        parts = ", ".join(
            "%s %.2f ms (%.0f %%)" % (stage, seconds[stage] / answers * 1e3, seconds[stage] / whole * 100)
            for stage in STAGES
        )
        return "%s: %d pulls answered, of each on average: %s" % (name, answers, parts)


class Worked:
    """When a server's engine has added and run the rule. Threads: one at a time."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, float, float]] = deque(maxlen=_KEPT)

    def note(self, stage: str, began: float, ended: float) -> None:
        """Note a piece of work."""
        self._spans.append((stage, began, ended))

    def since(self, began: float, now: float) -> dict[str, float]:
        """Return what an answer says of a pull that came at `began`: seconds in all, and of them those of each work."""
        seconds = {ADD: 0.0, RULE: 0.0}
        for stage, first, last in self._spans:
            seconds[stage] += max(0.0, last - max(first, began))
        return {"held": now - began, **seconds}
