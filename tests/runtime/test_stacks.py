"""What a process does so that its agent can see its stacks, and what it leaves alone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from distrun_runtime import reporting
from distrun_runtime.contract import metrics, process

LIMIT_S = scaled(20.0)

STUCK = """
    import time, distrun_runtime
    {before}
    distrun_runtime.report(step=1)
    def stuck_in_the_test():
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    stuck_in_the_test()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / metrics.SOCKET))
        listening.settimeout(LIMIT_S)
        yield listening


def start(agent: socket.socket, before: str = "") -> subprocess.Popen[str]:
    env = {**os.environ, "DISTRUN_METRICS_SOCKET": agent.getsockname(), "DISTRUN_ROLE": "worker", "DISTRUN_RANK": "0"}
    code = textwrap.dedent(STUCK).format(before=before)
    child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait(LIMIT_S)
    assert child.stdout is not None
    child.stdout.close()


def told(agent: socket.socket) -> dict[str, Any]:
    found = metrics.decode(agent.recv(metrics.LIMIT))
    assert found is not None
    return found


def test_a_process_says_where_its_stacks_go_and_writes_them_there_on_the_signal(
    agent: socket.socket, tmp_path: Path
) -> None:
    child = start(agent)
    try:
        found = told(agent)
        path = tmp_path / ("stacks-%d.txt" % child.pid)
        who = process.identity(child.pid)
        expected = {"kind": "stacks", "pid": child.pid, "start": who.start, "how": "sigurg", "path": str(path)}
        assert expected.items() <= found.items()
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.read_text() == ""
        child.send_signal(signal.SIGURG)
        until = time.monotonic() + LIMIT_S
        while "in <module>" not in path.read_text():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert "in stuck_in_the_test" in path.read_text()
        assert child.poll() is None
    finally:
        end(child)


@pytest.mark.parametrize(
    "before",
    [
        "import signal; signal.signal(signal.SIGURG, print)",
        "import signal; signal.signal(signal.SIGURG, signal.SIG_IGN)",
    ],
    ids=["handled", "ignored"],
)
def test_a_process_that_uses_the_signal_itself_is_left_alone(agent: socket.socket, tmp_path: Path, before: str) -> None:
    child = start(agent, before)
    try:
        assert told(agent)["kind"] == "report", "nothing was said of stacks"
        assert list(tmp_path.glob("stacks*")) == []
    finally:
        end(child)


def test_handlers_that_a_library_has_set_are_seen(tmp_path: Path) -> None:
    status = tmp_path / "status"
    for name in ("SigCgt", "SigIgn", "SigBlk"):
        status.write_text("Name:\tpython\n%s:\t%016x\n" % (name, 1 << (signal.SIGURG - 1)))
        assert reporting.is_handled(signal.SIGURG, str(status))
    status.write_text("SigCgt:\t%016x\nSigQ:\t1/2\n" % (1 << signal.SIGURG))
    assert not reporting.is_handled(signal.SIGURG, str(status))


class Sent:
    def __init__(self) -> None:
        self.how: list[str] = []

    def send(self, kind: str, /, **members: Any) -> bool:
        assert kind == metrics.STACKS
        self.how.append(members["how"])
        return True


def test_the_agent_is_told_again_and_told_when_the_script_takes_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = Sent()
    with open(tmp_path / "file", "wb") as file:
        offer = reporting.Offer(sent, file, "path")  # type: ignore[arg-type]
        for now in (100.0, 105.0, 110.0):
            offer.tell(now)
        assert sent.how == ["sigurg", "sigurg"]
        monkeypatch.setattr(signal, "getsignal", lambda number: print)
        offer.tell(120.0)
    assert sent.how == ["sigurg", "sigurg", ""]


def test_the_agent_may_trace_where_only_ancestors_could(tmp_path: Path) -> None:
    yama = tmp_path / "ptrace_scope"
    assert not reporting.let_trace(str(tmp_path), str(yama)), "a kernel without Yama"
    yama.write_text("0\n")
    assert not reporting.let_trace(str(tmp_path), str(yama))
    yama.write_text("1\n")
    assert not reporting.let_trace(str(tmp_path), str(yama)), "no record of an agent"
    (tmp_path / "agent.json").write_text(json.dumps({"agent": {"pid": os.getppid()}}))
    has_yama = os.path.exists(reporting.YAMA)
    assert reporting.let_trace(str(tmp_path), str(yama)) == has_yama
