"""How a task is asked to end, and then made to: signals with times between them.

Pure: no clock, no signal. The agent's loop asks `due` what to send now and `next_at` when to ask again.
"""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass
from typing import Any, Iterable, Optional, Tuple

from distrun_runtime.errors import ContractError

KILL = "KILL"
REPEAT_S = 0.25
"""A KILL is repeated so often until nothing is left: what was being forked may have escaped it."""
GIVE_UP_S = 3.0
"""What is still there so long after the first KILL (uninterruptible, or somebody else's) is reported and left."""


@dataclass(frozen=True)
class Ladder:
    """Signals and when they go out."""

    steps: Tuple[Tuple[str, float], ...]
    """(name without SIG, seconds until the next step)."""
    began: float
    sent: int = 0
    """Steps that went out already; a repeated KILL counts each time."""

    @property
    def kill_at(self) -> float:
        """When the first KILL goes out; infinite if none does."""
        at = self.began
        for name, wait_s in self.steps:
            if name == KILL:
                return at
            at += wait_s
        return math.inf

    @property
    def next_at(self) -> float:
        """When the next signal is due; infinite after a last step that is no KILL."""
        if self.sent < len(self.steps):
            return self.began + sum(wait_s for _, wait_s in self.steps[: self.sent])
        if self.steps[-1][0] == KILL:
            return self.kill_at + (self.sent - len(self.steps) + 1) * REPEAT_S
        return math.inf

    @property
    def gives_up_at(self) -> float:
        """When what is left is no longer waited for."""
        last = self.began + sum(wait_s for _, wait_s in self.steps)
        return self.kill_at + GIVE_UP_S if self.kill_at < math.inf else last


def make(steps: Iterable[Any], now: float) -> Ladder:
    """Return the ladder of `[["TERM", 10.0], ["KILL", 0]]`, beginning now.

    Raises:
        ContractError: no step, an unknown signal, or a time that is not a number of seconds.
    """
    try:
        checked = tuple((signal_name(name), float(wait_s)) for name, wait_s in steps)
    except (TypeError, ValueError) as err:
        raise ContractError("a stop sequence is [[SIGNAL, seconds], ...]: %s" % err) from err
    if not checked or any(not wait_s >= 0 for _, wait_s in checked):
        raise ContractError("a stop sequence has at least one step and no negative time: %r" % (checked,))
    return Ladder(checked, now)


def gentle(grace_s: float, now: float) -> Ladder:
    """Return TERM, `grace_s` seconds, KILL."""
    return Ladder((("TERM", grace_s), (KILL, 0.0)), now)


def at_once(now: float) -> Ladder:
    """Return KILL."""
    return Ladder(((KILL, 0.0),), now)


def due(ladder: Ladder, now: float) -> Tuple[Ladder, Optional[str]]:
    """Return the signal to send now, if one is due, and the ladder after it.

    When the loop was late for several steps, only the last of them is sent.
    """
    name = None
    while ladder.next_at <= now:
        name = ladder.steps[min(ladder.sent, len(ladder.steps) - 1)][0]
        late = ladder.sent >= len(ladder.steps)
        sent = ladder.sent + 1
        if late:
            # Repeats that were missed are not made up for.
            sent = max(sent, len(ladder.steps) + int((now - ladder.kill_at) / REPEAT_S))
        ladder = Ladder(ladder.steps, ladder.began, sent)
    return ladder, name


def harsher(current: Optional[Ladder], new: Ladder) -> Ladder:
    """Return the ladder that counts when `new` is asked for: the one whose KILL comes first."""
    return new if current is None or new.kill_at < current.kill_at else current


def signal_name(name: Any) -> str:
    """Return a signal's name without SIG.

    Raises:
        ContractError: this system has no such signal.
    """
    text = str(name).upper()
    text = text[3:] if text.startswith("SIG") else text
    if not isinstance(getattr(signal, "SIG" + text, None), signal.Signals):
        raise ContractError("no signal is called %r here; write it as TERM, INT or KILL" % (name,))
    return text


def signal_number(name: str) -> int:
    """Return a signal's number. Raises ContractError as `signal_name` does."""
    return int(getattr(signal, "SIG" + signal_name(name)))
