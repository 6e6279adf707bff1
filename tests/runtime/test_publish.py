"""What a node tells its agent."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from distrun_runtime.contract.process import pipe_identity
from distrun_runtime.reporting import publish


@pytest.mark.parametrize("reason", ["short", "é" * 5000, "語" * 5000, "\U0001f600" * 5000, "\ud83d" * 5000])
def test_a_line_is_short_enough_to_be_written_at_once(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    try:
        monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(writing))
        publish({"lost_peer": "server-0", "message": reason})
        line = os.read(reading, 1 << 20)
    finally:
        os.close(reading)
        os.close(writing)
    assert len(line) <= select.PIPE_BUF
    facts = json.loads(line)
    assert facts["lost_peer"] == "server-0"
    assert facts["message"]
    assert reason.startswith(facts["message"])


def test_a_grandchild_without_the_descriptor_writes_into_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below `subprocess.run`: it has the variables, and the number is that of a file that it opened itself."""
    reading, writing = os.pipe()
    other_reading, other = os.pipe()
    try:
        monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(writing))
        monkeypatch.setenv("DISTRUN_PUBLISH_PIPE", pipe_identity(writing))
        script = (
            "import os, sys\nfrom distrun_runtime.reporting import publish\n"
            "fd = int(os.environ['DISTRUN_PUBLISH_FD'])\n"
            "os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), fd)\npublish({'address': 'x'})\n"
            "os.dup2(int(sys.argv[2]), fd)\npublish({'address': 'x'})\n"
        )
        mine = tmp_path / "mine"
        subprocess.run([sys.executable, "-c", script, mine, str(other)], check=True, pass_fds=[other])
        os.close(other)
        assert (mine.read_bytes(), os.read(other_reading, 100)) == (b"", b"")
        publish({"address": "y"})
        assert json.loads(os.read(reading, 100)) == {"address": "y"}
    finally:
        for each in (reading, writing, other_reading):
            os.close(each)


def test_what_is_no_pipe_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing names the pipe: the agent is of an older version."""
    with open(tmp_path / "mine", "wb") as mine:
        monkeypatch.setenv("DISTRUN_PUBLISH_FD", str(mine.fileno()))
        monkeypatch.delenv("DISTRUN_PUBLISH_PIPE", raising=False)
        publish({"address": "x"})
    assert (tmp_path / "mine").read_bytes() == b""
