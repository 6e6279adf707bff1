"""Translates what distrun says: every word of messages, causes, explanations and failures becomes another one.

As a program it translates and then is `distrun`, with the coordinator that this forks.
"""

from __future__ import annotations

from typing import Any

from distrun.backends import engine
from distrun.backends.base import Swept
from distrun.ssh.failure import SshFailure
from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.control import CopyProgress
from distrun_runtime.coordinator import failures, messages

WORDS: dict[type, tuple[str, ...]] = {
    engine.Explanation: ("text",),
    engine.QueueStatus: ("text", "gone"),
    Swept: ("ended", "left", "problem"),
    SshFailure: ("text", "fix"),
    CopyProgress: ("detail",),
    failures.Cause: ("text", "short", "detail"),
    failures.Culprit: ("reason",),
    failures.Outcome: ("message",),
    failures.Problem: ("text", "fix"),
    failures.Survivor: ("what",),
    failures.TaskResult: ("reason", "own_failure"),
    messages.AgentLost: ("reason",),
    messages.Announce: ("text",),
    agent_messages.StartFailed: ("reason", "fix"),
}
"""Kinds of values that are shown to a user, and which of their fields are words."""


def translated(value: Any) -> Any:
    """Return other words, the same for the same words and for words that were translated before."""
    if isinstance(value, dict):
        return {name: translated(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(translated, value))
    return value.upper() if isinstance(value, str) else value


def translate(patch: Any = setattr) -> None:
    """Have all values that are made from now on say other words. `patch` sets an attribute."""
    for kind, names in WORDS.items():
        patch(kind, *(_of_tuple if issubclass(kind, tuple) else _of_object)(kind, names))


def _of_tuple(kind: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    make = kind.__new__

    def new(cls: Any, *args: Any, **members: Any) -> Any:
        made = make(cls, *args, **members)
        return made._replace(**{name: translated(getattr(made, name)) for name in names})

    return "__new__", new


def _of_object(kind: Any, names: tuple[str, ...]) -> tuple[str, Any]:
    make = kind.__init__

    def init(self: Any, *args: Any, **members: Any) -> None:
        make(self, *args, **members)
        for name in names:
            object.__setattr__(self, name, translated(getattr(self, name)))

    return "__init__", init


if __name__ == "__main__":
    translate()
    from distrun.cli import main

    main()
