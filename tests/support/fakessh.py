"""An `ssh` program that does what a test says in place of reaching a host. It has no configuration (`ssh -G`)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

LOGIN = "ssh d1"
"""What a user would type to reach the host."""
RUNS = 'shift $(($# - 1)); exec sh -c "$1"\n'
"""Runs the command here."""
DROPS = "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by 10.0.0.1 port 22\r"


class FakeSsh:
    """Puts it first on PATH; then `does` says what it does."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "bin"
        self._folder.mkdir()
        self._calls = folder / "calls"
        self._calls.touch()
        monkeypatch.setenv("PATH", f"{self._folder}{os.pathsep}{os.environ['PATH']}")

    def does(self, text: str = RUNS) -> str:
        """Have it do shell text, in which $CALLS is the file with a line for each call; return `LOGIN`."""
        path = self._folder / "ssh"
        begin = f'case " $* " in *" -G "*) exit 0 ;; esac\nCALLS={shlex.quote(str(self._calls))}\n'
        path.write_text(f'#!/bin/sh\n{begin}echo "$*" | head -1 >>"$CALLS"\n{text}')
        path.chmod(0o755)
        return LOGIN

    def fails(self, times: int, words: str = DROPS) -> str:
        """Have it fail so often with some words, then run the command here; return `LOGIN`."""
        fails = f"echo {shlex.quote(words)} >&2; exit 255"
        return self.does(f'[ $(wc -l <"$CALLS") -gt {times} ] || {{ {fails}; }}\n{RUNS}')

    @property
    def calls(self) -> list[str]:
        """The arguments of each call."""
        return self._calls.read_text().splitlines()
