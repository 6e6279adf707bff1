"""The user's input to the dashboard: turns keys into changes of the view and actions.

No side effects. `User.press` takes keys as `terminal.KeyDecoder` returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from distrun.dashboard.rows import SORTS

MAIN, DETAIL, LOG, STACK, HELP = "main", "detail", "log", "stack", "help"
PANELS = ("all", "reports", "hosts", "store", "events", "error", "none")
"""Panels below the table; Tab goes to the next choice."""
FILTER, STOP = "filter", "stop"
CONFIRMED = "yes"
ANSWERS = (*CONFIRMED, "enter", "backspace")
"""Keys by which the stop is confirmed; any other cancels it."""


# ---------------------------------------------------------------------- what it wants done


class Action(Enum):
    """What is to be done; tasks are those that are chosen then."""

    LEAVE = "end the dashboard"
    STOP_JOB = "stop the job"
    STACK = "ask for the stack of the task"
    LOG = "follow the log of the task, or no more"
    REDRAW = "draw all lines again"


# ---------------------------------------------------------------------- what it looks at


@dataclass(frozen=True)
class ViewSelection:
    """What of the job is looked at, and how."""

    mode: str = MAIN
    order: str = SORTS[0]
    wanted: str = ""
    """Words by which tasks and hosts are filtered."""
    is_folded: bool = False
    panel: str = PANELS[0]
    is_paused: bool = False
    chosen: str = ""
    """The task that is chosen; empty: the first row, whichever it is."""
    first: int = 0
    """First visible row of the table; of a text, lines above its end (log) or below its start."""
    prompt: str = ""
    """FILTER or STOP while the user types an answer."""
    typed: str = ""
    message: str = ""


@dataclass(frozen=True)
class VisibleRows:
    """What the last picture showed, so that keys mean what the user sees."""

    keys: Sequence[str] = ()
    """Tasks of all rows, in their order; hidden ones, too."""
    page: int = 10
    """Rows that are visible."""
    lines: int = 0
    """Of a text: how many lines it has."""


MOVES = ("up", "k", "down", "j", "pgup", "pgdn", "home", "end")


def moved(key: str, at: int, last: int, page: int) -> int:
    """Return where one of MOVES leads from a row. `last`: the last one."""
    steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -page, "pgdn": page, "home": -at}
    return max(0, min(last, at + steps.get(key, last)))


class User:
    """The state of the user's view."""

    def __init__(self, look: ViewSelection | None = None) -> None:
        self.look = look or ViewSelection()
        self._has_just_asked = False
        """The question whether to stop came up in this read of keys."""

    def say(self, message: str) -> None:
        """Show a message until the next key."""
        self.look = replace(self.look, message=message)

    def press(self, key: str, shown: VisibleRows, *, is_next: bool = False) -> list[Action]:
        """Take a key; return what is to be done.

        An answer to the question whether to stop that comes in the same read as the key that asked was pasted, not
        typed, and is dropped.

        Args:
            key: its name.
            shown: what the last picture showed.
            is_next: it came in the same read as the key before.
        """
        was_asking = self.look.prompt == STOP
        self._has_just_asked = self._has_just_asked and is_next
        if self._has_just_asked and was_asking and key in ANSWERS:
            return []
        actions = self._press(key, shown)
        self._has_just_asked |= self.look.prompt == STOP and not was_asking
        return actions

    def _press(self, key: str, shown: VisibleRows) -> list[Action]:
        look = self.look = replace(self.look, message="")
        if key == "ctrl-l":
            return [Action.REDRAW]
        if look.prompt == STOP:
            return self._confirm(key)
        if look.prompt == FILTER:
            self._type(key)
            return []
        if look.mode != MAIN:
            return self._press_in_text(key, shown)
        return self._press_in_main(key, shown)

    def _press_in_main(self, key: str, shown: VisibleRows) -> list[Action]:
        look = self.look
        if key == "q":
            return [Action.LEAVE]
        if key in MOVES:
            self._move(key, shown)
        elif key in ("enter", "l", "S") and shown.keys:
            return self._open(key, look.chosen if look.chosen in shown.keys else shown.keys[0])
        elif key in ("tab", "backtab"):
            step = 1 if key == "tab" else -1
            self.look = replace(look, panel=PANELS[(PANELS.index(look.panel) + step) % len(PANELS)])
        elif key == "s":
            order = SORTS[(SORTS.index(look.order) + 1) % len(SORTS)]
            self.look = replace(look, order=order, chosen="", first=0)
        else:
            changes: dict[str, dict[str, Any]] = {
                "/": {"prompt": FILTER, "typed": look.wanted},
                "f": {"is_folded": not look.is_folded, "first": 0},
                "p": {"is_paused": not look.is_paused},
                "?": {"mode": HELP, "first": 0},
                "h": {"mode": HELP, "first": 0},
                "x": {"prompt": STOP, "typed": ""},
                "esc": {"wanted": "", "chosen": "", "first": 0},
            }
            self.look = replace(look, **changes.get(key, {"message": f"no such key: {key}; ? shows them"}))
        return []

    def _open(self, key: str, task: str) -> list[Action]:
        mode = {"enter": DETAIL, "l": LOG, "S": STACK}[key]
        self.look = replace(self.look, mode=mode, chosen=task, first=0)
        return {LOG: [Action.LOG], STACK: [Action.STACK]}.get(mode, [])

    def _press_in_text(self, key: str, shown: VisibleRows) -> list[Action]:
        look = self.look
        if key in ("q", "esc", "left", "backspace") or (key == "enter" and look.mode == DETAIL):
            self.look = replace(look, mode=MAIN, first=0)
            return [Action.LOG] if look.mode == LOG else []
        if key == "x":
            self.look = replace(look, prompt=STOP, typed="")
            return []
        if key == "p":
            self.look = replace(look, is_paused=not look.is_paused)
            return []
        if look.mode != HELP and key in ("l", "S"):
            ends: list[Action] = [Action.LOG] if look.mode == LOG and key != "l" else []
            return ends + self._open(key, look.chosen)
        most = max(0, shown.lines - shown.page)
        key, first = {" ": "pgdn", "g": "home", "G": "end"}.get(key, key), min(look.first, most)
        if key in MOVES and look.mode == LOG:  # it is counted from its end, which it follows
            self.look = replace(look, first=most - moved(key, most - first, most, shown.page))
        elif key in MOVES:
            self.look = replace(look, first=moved(key, first, most, shown.page))
        return []

    def _move(self, key: str, shown: VisibleRows) -> None:
        if not shown.keys:
            return
        at = shown.keys.index(self.look.chosen) if self.look.chosen in shown.keys else 0
        last, page = len(shown.keys) - 1, max(1, shown.page)
        at = moved(key, at, last, page)
        # At the top the first row is chosen whichever task that is: what turns into a problem is then in sight.
        self.look = replace(self.look, chosen="" if at == 0 else shown.keys[at])

    def _type(self, key: str) -> None:
        look = self.look
        if key == "enter":
            self.look = replace(look, prompt="", typed="", wanted=look.typed.strip(), chosen="", first=0)
        elif key == "esc":
            self.look = replace(look, prompt="", typed="")
        elif key == "backspace":
            self.look = replace(look, typed=look.typed[:-1])
        elif len(key) == 1:
            self.look = replace(look, typed=look.typed + key)

    def _confirm(self, key: str) -> list[Action]:
        """Take a key of the answer to the question whether to stop the job."""
        look = self.look
        if key == "enter" and look.typed == CONFIRMED:
            self.look = replace(look, prompt="", typed="", message="asked the coordinator to stop the job")
            return [Action.STOP_JOB]
        typed = look.typed[:-1] if key == "backspace" else look.typed + key
        if (len(key) == 1 and CONFIRMED.startswith(typed)) or (key == "backspace" and look.typed):
            self.look = replace(look, typed=typed)
        else:
            self.look = replace(look, prompt="", typed="", message="the job goes on")
        return []
