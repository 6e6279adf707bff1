"""Events of a job (lines of events.jsonl) as the dashboard shows them: when, who, what happened and why.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from distrun.dashboard import read, text
from distrun_runtime.contract import facts

DONE = "exit code 0"


@dataclass(frozen=True)
class Event:
    """One line of the panel of events."""

    time: float
    """Wall clock, seconds."""
    words: str
    style: str = text.PLAIN
    is_message: bool = False
    """It is told nowhere else: a message, or what happened to a host."""
    stalled: str = ""
    """Of a message that tasks are stalled: the first of them."""


class EventReader:
    """Reads the events of one job in their order, so that each thing that happened is shown once."""

    def __init__(self) -> None:
        self._left: frozenset[str] = frozenset()
        """Hosts whose agents have said goodbye."""
        self._ended: frozenset[str] = frozenset()
        """Tasks and hosts that failed or were lost, or whose loss was told by others."""
        self._failures: list[str] = []
        """How messages that repeat a failure begin."""
        self._stalled: frozenset[str] = frozenset()

    def take(self, event: Mapping[str, object]) -> Event | None:
        """Return how the next event reads; None: it says nothing to a user, or nothing new."""
        kind, host, task = (read.text(event.get(name)) for name in ("event", "host", "task"))
        if kind == "bye":
            self._left |= {host}
        elif kind == "ready":
            self._left -= {host}
        is_repeated = self.is_end_of_connection(event) or self._is_repeated(kind, event)
        if kind == "exited" and not event.get("stopped") and _how(event) != DONE:
            self._ended |= {task}
            self._failures.append(f"{_where(event)}: {_how(event)}")
        elif kind == "lost":
            self._ended |= {host}
            self._failures.append(f"lost {host}")
        elif kind == "published":
            values = read.members(event.get("values"))
            self._ended |= {task if values.get("failed") else read.text(values.get("lost_peer"))} - {""}
        elif kind == "condition" and event.get("condition") == facts.STALLED:
            self._stalled |= {task}
        found = None if is_repeated else describe(event)
        if found is None or kind != "said":
            return found
        first = found.words.partition(" ")[0].rstrip(",")
        return replace(found, stalled=first) if first in self._stalled and "stalled" in found.words else found

    def is_end_of_connection(self, event: Mapping[str, object]) -> bool:
        """Return whether an event only is the end of a connection after a goodbye, as at a job's end."""
        return event.get("event") == "lost" and read.text(event.get("host")) in self._left

    def _is_repeated(self, kind: str, event: Mapping[str, object]) -> bool:
        if kind == "said":
            said = read.text(event.get("text"))
            return any(said.startswith((f"{words};", f"{words} (")) for words in self._failures)
        lost = read.text(read.members(event.get("values")).get("lost_peer"))
        return kind == "published" and (bool(event.get("stopped")) or lost in self._ended)


def describe(event: Mapping[str, object]) -> Event | None:
    """Return how an event reads; None: it says nothing to a user."""
    how = _READERS.get(read.text(event.get("event")))
    found = None if how is None else how(event)
    if found is None:
        return None
    words, style = found
    is_message = event.get("event") in _MESSAGES
    return Event(read.moment(event.get("time")) or 0.0, text.clean(" ".join(words.split())), style, is_message)


Described = tuple[str, str] | None


def _where(event: Mapping[str, object]) -> str:
    task, host = read.text(event.get("task")), read.text(event.get("host"))
    return f"{task} on {host}" if task and host else task or host


def _how(event: Mapping[str, object]) -> str:
    signal, code = read.text(event.get("signal")), read.whole(event.get("code"))
    return f"signal {signal}" if signal else f"exit code {code}" if code is not None else "ended"


def _exited(event: Mapping[str, object]) -> Described:
    how, reason = _how(event), read.text(event.get("reason"))
    more = f": {reason}" if reason else ""
    if event.get("stopped"):
        return f"{_where(event)}: stopped ({how}){more}", text.DIM
    return f"{_where(event)}: {how}{more}", text.GREEN if how == DONE else text.RED


def _published(event: Mapping[str, object]) -> Described:
    values = read.members(event.get("values"))
    message = read.text(values.get("message")) or read.text(values.get("failed"))
    return (f"{_where(event)}: {message}", text.RED) if message else None


def _said(event: Mapping[str, object]) -> Described:
    style = {"error": text.RED, "warning": text.YELLOW}.get(read.text(event.get("level")), text.PLAIN)
    return (read.text(event.get("text")), style) if event.get("level") != "debug" else None


def _finished(event: Mapping[str, object]) -> Described:
    code = read.whole(event.get("exit_code"))
    style = text.GREEN if code == 0 else text.RED
    return f"job over, exit code {code}: {read.text(event.get('message'))}", style


def _reasoned(what: str, style: str) -> Callable[[Mapping[str, object]], Described]:
    def describe_one(event: Mapping[str, object]) -> Described:
        reason = read.text(event.get("text")) or read.text(event.get("reason"))
        return f"{_where(event)}: {what}" + (f": {reason}" if reason else ""), style

    return describe_one


def _condition(event: Mapping[str, object]) -> Described:
    word = read.text(event.get("condition"))
    if word != "straggler":
        return None  # of a stall there is a message; that tasks wait, and wait no more, is how a store works
    why = read.text(event.get("why"))
    return f"{_where(event)}: {word}" + (f": {why}" if why else ""), text.YELLOW


def _started(event: Mapping[str, object]) -> Described:
    attempt = read.whole(event.get("attempt")) or 0
    what = f"started again ({attempt})" if attempt else "started"
    return f"{_where(event)}: {what}, pid {read.whole(event.get('pid'))}", text.PLAIN


_MESSAGES = ("said", "warning", "ending", "cut", "resumed", "lost", "claimed_twice", "interrupt", "prepare_failed")
_READERS: Mapping[str, Callable[[Mapping[str, object]], Described]] = {
    "ready": _reasoned("host is ready", text.PLAIN),
    "prepare_failed": _reasoned("cannot be used", text.RED),
    "start_failed": _reasoned("did not start", text.RED),
    "started": _started,
    "published": _published,
    "exited": _exited,
    "warning": _reasoned("warning", text.YELLOW),
    "ending": _reasoned("its agent ends", text.YELLOW),
    "cut": _reasoned("connection lost", text.YELLOW),
    "resumed": _reasoned("connection is back", text.GREEN),
    "lost": _reasoned("host lost", text.RED),
    "claimed_twice": _reasoned("two agents for one place", text.RED),
    "interrupt": lambda event: (f"the job was sent SIG{read.text(event.get('signal'))}", text.YELLOW),
    "state": lambda event: (f"job is {read.text(event.get('state'))}", text.BOLD),
    "said": _said,
    "finished": _finished,
    "condition": _condition,
}
