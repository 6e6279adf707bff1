"""The ssh backend with real sshds: what is left after agents died, and how fast output comes."""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agentkit import new_job, poll, shell
from slowness import scaled
from sshd import Sshd, running

from distrun.backends import ssh
from distrun.backends.ssh import Ssh
from distrun.ssh.ask import Abort
from distrun.ssh.connector import Connector, SshChannel
from distrun.ssh.resolve import FABRIC, OPENSSH, Target
from distrun_runtime.agent import share, stopping
from distrun_runtime.contract import agent_messages, process
from distrun_runtime.contract.plan import Host, Limits, Plan, Reach, Secrets
from distrun_runtime.contract.process import Identity
from distrun_runtime.coordinator import messages

WAIT_S = 60.0


@pytest.fixture(name="sshd")
def running_sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running(tmp_path / "sshd") as server:
        yield server


def wait(found: queue.SimpleQueue[messages.Event], kind: type) -> Any:
    until = time.monotonic() + scaled(WAIT_S)
    while True:
        event = found.get(timeout=max(until - time.monotonic(), 0.001))
        if isinstance(event, kind):
            return event
        assert not isinstance(event, (agent_messages.StartFailed, messages.AgentLost)), event


def begin(
    sshd: Sshd,
    backend: Ssh,
    script: str,
    transport: str = FABRIC,
    found: queue.SimpleQueue[messages.Event] | None = None,
) -> tuple[Plan, SshChannel, Any, Any]:
    """Start a job of one task; return its plan, channel, hello and Started. What comes then is put into `found`."""
    host = Host("here", "127.0.0.1", reach=Reach({"host": "d1", "config": sshd.config(), "transport": transport}))
    plan = Plan(new_job(), "", "ssh", ("true",), "/", (host,), (shell(script),), Limits(grace_s=2.0))
    (channel,) = backend.connect(plan.hosts, plan.job)
    found = queue.SimpleQueue() if found is None else found
    channel.start(found.put)
    hello = wait(found, agent_messages.AgentHello)
    channel.send(messages.begin(plan, Secrets(token="ab"), "here"))
    wait(found, agent_messages.AgentReady)
    channel.send(messages.to_frame(messages.Spawn("here", "worker-0", {})))
    started = wait(found, agent_messages.Started)
    assert isinstance(channel, SshChannel)
    return plan, channel, hello, started


def test_a_sweep_ends_a_job_whose_launcher_and_agents_are_gone(sshd: Sshd) -> None:
    backend = Ssh()
    plan, channel, hello, started = begin(sshd, backend, "sleep 1000")
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGSTOP)
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGKILL)
    assert channel.join(scaled(WAIT_S))
    swept = Ssh().sweep(plan, 1.0)["here"]
    assert not swept.problem
    assert any("sleep" in text for text in swept.ended)
    assert swept.left == ()
    assert not process.is_alive(Identity(started.pid, started.start))
    assert Ssh().sweep(plan, 1.0)["here"].lines() == ["all its processes have ended"]


def finish(channel: SshChannel, found: queue.SimpleQueue[messages.Event]) -> None:
    """End a job well, as the loop does."""
    channel.send(messages.to_frame(messages.EndAgent("here")))
    wait(found, agent_messages.Bye)
    channel.close()


def test_a_frozen_guard_whose_record_is_lost_is_found_by_its_marks(sshd: Sshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssh, "GUARD_S", 0.5)
    backend = Ssh()
    found: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
    plan, channel, hello, _ = begin(sshd, backend, "sleep 1000", found=found)
    guard = Identity(**hello.facts["guard"])
    os.kill(guard.pid, signal.SIGSTOP)
    finish(channel, found)
    left = backend.release((channel,), WAIT_S)
    for folder in share.folders_of(plan.job):
        share.remove_folder(folder)  # as when somebody tidies up
    assert [each["job"] for each in stopping.survey()["jobs"]].count(plan.job) == 1
    swept = backend.sweep(plan, 1.0, left)["here"]
    assert swept.ended == ("pid %d (distrun's agent or distrun's guard)" % guard.pid,)
    assert not process.is_alive(guard)


@pytest.mark.parametrize("transport", [FABRIC, OPENSSH])
def test_a_job_that_ends_well_leaves_nothing_to_a_sweep(transport: str, sshd: Sshd) -> None:
    backend = Ssh()
    found: queue.SimpleQueue[messages.Event] = queue.SimpleQueue()
    plan, channel, hello, _ = begin(sshd, backend, "sleep 1000", transport, found)
    finish(channel, found)
    assert backend.release((channel,), WAIT_S) == ()
    poll(lambda: not process.is_alive(Identity(**hello.facts["guard"])), "the guard has ended", 5)
    assert share.folders_of(plan.job) == []


@pytest.mark.parametrize("transport", [FABRIC, OPENSSH])
def test_a_hundred_megabytes_come_through_whole(sshd: Sshd, transport: str) -> None:
    size = 100 * 1024 * 1024
    connector = Connector()
    link = connector.open(
        Target("d1", config=sshd.config(), transport=transport), "head -c %d /dev/zero" % size, Abort()
    )
    got = 0
    while (data := link.read()) != b"":
        got += len(data or b"")
    link.finish()
    connector.close()
    assert got == size
