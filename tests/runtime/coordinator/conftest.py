"""What several tests of the coordinator ask for."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType

import pytest


@pytest.fixture
def signals() -> Iterator[list[str]]:
    """The signals that this process was sent; the end of a launching client is SIGHUP."""
    seen: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(signal.Signals(number).name)

    names = ("SIGINT", "SIGTERM", "SIGHUP")
    before = {name: signal.signal(getattr(signal, name), note) for name in names}
    yield seen
    for name, handler in before.items():
        signal.signal(getattr(signal, name), handler)
