"""What a node tells its agent."""

from __future__ import annotations

import json
import os
import select

import pytest

from distrun_runtime.ps.publish import publish


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
