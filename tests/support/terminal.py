"""A terminal, and somebody who types."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Iterator

import pytest

WAIT_S = 60.0


class Terminal:
    """A terminal, and somebody who types."""

    def __init__(self) -> None:
        self._ours, self._its = pty.openpty()
        self.path = os.ttyname(self._its)
        self.shown = ""

    def expect(self, text: str, times: int = 1) -> None:
        until = time.monotonic() + WAIT_S
        while self.shown.count(text) < times:
            assert time.monotonic() < until, self.shown
            if select.select([self._ours], [], [], 0.1)[0]:
                self.shown += os.read(self._ours, 4096).decode()

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_rest(self) -> str:
        while select.select([self._ours], [], [], 0.1)[0]:
            self.shown += os.read(self._ours, 4096).decode()
        return self.shown

    def close(self) -> None:
        os.close(self._ours)
        os.close(self._its)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal."""
    given = Terminal()
    yield given
    given.close()
