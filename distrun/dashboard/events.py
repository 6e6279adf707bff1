"""Events of a job (lines of events.jsonl) as the dashboard shows them: when, who, what happened and why.

No side effects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from distrun.dashboard import read, text


@dataclass(frozen=True)
class Event:
    """One line of the panel of events."""

    time: float
    """Wall clock, seconds."""
    words: str
    style: str = text.PLAIN
    is_message: bool = False
    """It is told nowhere else: a message, or what happened to a host."""


def describe(event: Mapping[str, object]) -> Event | None:
    """Return how an event reads; None: it says nothing to a user."""
    how = _READERS.get(read.text(event.get("event")))
    found = None if how is None else how(event)
    if found is None:
        return None
    words, style = found
    is_message = event.get("event") in _MESSAGES
    return Event(read.moment(event.get("time")) or 0.0, text.clean(" ".join(words.split())), style, is_message)


def told(found: Iterable[Mapping[str, object]]) -> Iterator[Mapping[str, object]]:
    """Return events without those that only seem bad: a connection's end after its agent said goodbye."""
    left: frozenset[str] = frozenset()
    for event in found:
        left = gone(left, event)
        if not is_end_of(left, event):
            yield event


def gone(left: frozenset[str], event: Mapping[str, object]) -> frozenset[str]:
    """Return the hosts whose agents have said goodbye, given those that had before an event."""
    kind, host = event.get("event"), read.text(event.get("host"))
    return left | {host} if kind == "bye" else left - {host} if kind == "ready" else left


def is_end_of(left: frozenset[str], event: Mapping[str, object]) -> bool:
    """Return whether an event only is the end of a connection after a goodbye, as at a job's end."""
    return event.get("event") == "lost" and read.text(event.get("host")) in left


Described = tuple[str, str] | None


def _where(event: Mapping[str, object]) -> str:
    task, host = read.text(event.get("task")), read.text(event.get("host"))
    return f"{task} on {host}" if task and host else task or host


def _exited(event: Mapping[str, object]) -> Described:
    signal, code = read.text(event.get("signal")), read.whole(event.get("code"))
    how = f"signal {signal}" if signal else f"exit code {code}" if code is not None else "ended"
    reason = read.text(event.get("reason"))
    more = f": {reason}" if reason else ""
    if event.get("stopped"):
        return f"{_where(event)}: stopped ({how}){more}", text.DIM
    return f"{_where(event)}: {how}{more}", text.GREEN if code == 0 and not signal else text.RED


def _published(event: Mapping[str, object]) -> Described:
    values = read.members(event.get("values"))
    message = read.text(values.get("message")) or read.text(values.get("error"))
    if not message:
        return None
    return f"{_where(event)}: {message}", text.DIM if event.get("stopped") else text.RED


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
