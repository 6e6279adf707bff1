"""Connections to hosts that cannot be made, and some that are given up while they are made."""

from __future__ import annotations

import queue
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from slowness import scaled

from distrun.ssh import connector
from distrun.ssh.connector import Abort, Connector, SshChannel
from distrun.ssh.failure import SshFailure, Where
from distrun.ssh.resolve import Target
from distrun_runtime.contract.agent_messages import StartFailed

LIMIT_S = 60.0


def test_a_host_whose_name_is_unknown_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*of: Any, **more: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(SshFailure, match="h1"):
        connector.connect(Where("h1"), "", LIMIT_S, Abort())


def test_a_connection_that_comes_about_after_its_channel_was_killed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def open_late(*of: Any) -> Any:
        channel.kill()
        return SimpleNamespace(finish=lambda: closed.append(True))

    shared = Connector()
    monkeypatch.setattr(shared, "open", open_late)
    channel = SshChannel("h1", Target("h1"), "true", b"", shared)
    channel.start(said.put)
    found = said.get(timeout=scaled(LIMIT_S))
    assert isinstance(found, StartFailed)
    assert "given up before its agent had answered" in found.reason
    assert closed == [True]
    assert channel.join(scaled(LIMIT_S))
