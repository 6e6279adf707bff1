"""What comes of a fault of metrics or stacks: the job goes on, and it is tried again."""

from __future__ import annotations

import selectors
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distrun_runtime.agent import measuring
from distrun_runtime.agent.measuring import AGAIN_S, TRIES, Hooks, HostMeasurement
from distrun_runtime.contract.agent_messages import TYPES


class Host:
    """Measuring on a host whose clock is moved by hand; `broken`: samples fail."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.now = 1000.0
        self.broken = False
        channel: Any = SimpleNamespace(say=self.say, send=self.send, takes_metrics=lambda: True)
        hooks = Hooks(channel, lambda pid: "", lambda: False)
        share: Any = SimpleNamespace(folder=str(folder))
        self.measuring = HostMeasurement(share, {}, selectors.SelectSelector(), hooks, lambda: self.now)
        self.measuring.set_interval(1.0, self.now)
        look = measuring.Metrics._look

        def looked(*args: Any) -> Any:
            if self.broken:
                raise KeyError("cpu")
            return look(*args)

        monkeypatch.setattr(measuring.Metrics, "_look", looked)

    def say(self, message: type, **members: Any) -> None:
        self.send({"type": TYPES[message], **members})

    def send(self, header: dict[str, Any]) -> None:
        self.said.append((header["type"], header))

    def wait(self, seconds: float) -> list[str]:
        """Let time pass; return the types of frames that were sent."""
        self.said, until = [], self.now + seconds
        while self.now < until:
            self.now = min(until, max(self.now + 0.001, self.measuring.next_at))
            self.measuring.tick(self.now)
        return [kind for kind, _ in self.said]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def test_after_a_fault_it_measures_again_and_has_said_so_once(host: Host) -> None:
    assert host.wait(1.5) == ["metrics"]
    host.broken = True
    assert host.wait(2.0) == ["warning"]
    assert host.said[0][1]["text"] == (
        "the agent itself failed to measure: KeyError: 'cpu'; it tries again after 1 min, 4 times at most"
    )
    assert host.wait(AGAIN_S) == []
    host.broken = False
    assert "metrics" in host.wait(AGAIN_S + 1.5)
    assert host.wait(1.0) == ["metrics"]


def test_after_some_faults_it_measures_no_more(host: Host) -> None:
    host.broken = True
    host.wait((AGAIN_S + 2.0) * TRIES)
    host.broken = False
    assert host.measuring.next_at == float("inf")
    host.measuring.set_interval(0.1, host.now)
    assert host.wait(AGAIN_S * 2) == []


def test_an_interval_that_is_set_meanwhile_counts_after_the_pause(host: Host) -> None:
    host.broken = True
    host.wait(1.5)
    host.broken = False
    host.measuring.set_interval(10.0, host.now)
    assert host.wait(AGAIN_S + 5.0) == []
    assert host.wait(20.0) == ["metrics"] * 2


def test_stacks_are_refused_only_until_it_tries_again(host: Host) -> None:
    found: list[Any] = []
    host.broken = True
    host.wait(1.5)
    host.measuring.ask_stack("worker-0", found.append)
    host.wait(AGAIN_S)
    host.measuring.ask_stack("worker-0", found.append)
    assert [each.error for each in found] == [
        "the agent itself has failed to measure",
        "worker-0 does not run on this host",
    ]
