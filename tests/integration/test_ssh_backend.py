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
from sshd import Sshd, running

from distrun.backends.ssh import Ssh
from distrun.ssh.abort import Abort
from distrun.ssh.channel import SshChannel
from distrun.ssh.connector import Connector
from distrun.ssh.target import TRANSPORTS, Target
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import Host, Limits, Plan, Secrets
from distrun_runtime.contract.process import Identity
from distrun_runtime.coordinator import actions, events, frames

WAIT_S = 60.0


@pytest.fixture(name="sshd")
def running_sshd(tmp_path: Path) -> Iterator[Sshd]:
    with running(tmp_path / "sshd") as server:
        yield server


def wait(found: queue.SimpleQueue[events.Event], kind: type) -> Any:
    until = time.monotonic() + WAIT_S
    while True:
        event = found.get(timeout=max(until - time.monotonic(), 0.001))
        if isinstance(event, kind):
            return event
        assert not isinstance(event, (events.StartFailed, events.AgentLost)), event


def begin(sshd: Sshd, backend: Ssh, script: str) -> tuple[Plan, SshChannel, Any, Any]:
    """Start a job of one task; return its plan, channel, hello and Started."""
    host = Host("here", "127.0.0.1", reach={"host": "d1", "config": sshd.config()})
    plan = Plan(new_job(), "", "ssh", ("true",), "/", (host,), (shell(script),), Limits(grace_s=2.0))
    (channel,) = backend.connect(plan.hosts)
    found: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
    channel.start(found.put)
    hello = wait(found, events.AgentHello)
    channel.send(frames.begin(plan, Secrets(token="ab"), "here"))
    wait(found, events.AgentReady)
    channel.send(frames.spawn(actions.Spawn("here", "worker-0", {})))
    started = wait(found, events.Started)
    assert isinstance(channel, SshChannel)
    return plan, channel, hello, started


def test_a_host_whose_agent_and_guard_were_killed_is_swept_when_the_job_is_over(sshd: Sshd) -> None:
    backend = Ssh()
    plan, channel, hello, started = begin(sshd, backend, "trap '' TERM HUP; while :; do sleep 1; done")
    task = Identity(started.pid, started.start)
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGSTOP)  # so that neither sees the other die
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGKILL)
    # The task holds none of the connection's pipes, so that it ends with the agent.
    poll(lambda: channel.was_cut, "the connection's end is seen")
    assert process.is_alive(task)
    backend.release(plan, (channel,), WAIT_S)
    assert not process.is_alive(task)


def test_a_sweep_ends_a_job_whose_launcher_and_agents_are_gone(sshd: Sshd) -> None:
    backend = Ssh()
    plan, channel, hello, started = begin(sshd, backend, "sleep 1000")
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGSTOP)
    for who in ("guard", "agent"):
        os.kill(int(hello.facts[who]["pid"]), signal.SIGKILL)
    assert channel.join(WAIT_S)
    swept = Ssh().sweep(plan, 1.0)["here"]
    assert not swept.problem
    assert any("sleep" in text for text in swept.ended)
    assert swept.left == ()
    assert not process.is_alive(Identity(started.pid, started.start))
    assert Ssh().sweep(plan, 1.0)["here"].lines() == ["all its processes have ended"]


def test_a_host_that_cannot_be_asked_is_said_to_be_so(sshd: Sshd) -> None:
    plan, channel, _, _ = begin(sshd, Ssh(), "true")
    channel.kill()
    assert channel.join(WAIT_S)
    sshd.stop()
    assert "refuses connections" in Ssh().sweep(plan, 0.1)["here"].problem


def test_cutting_the_connection_ends_the_tasks(sshd: Sshd) -> None:
    backend = Ssh()
    plan, channel, _, started = begin(sshd, backend, "sleep 1000")
    channel.kill()
    assert channel.join(WAIT_S)
    poll(lambda: not process.is_alive(Identity(started.pid, started.start)), "the task has ended")
    backend.release(plan, (channel,), WAIT_S)
    assert not channel.was_cut


@pytest.mark.parametrize("transport", TRANSPORTS)
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
