"""distrun_runtime.report: what is sent of what a script reports, and that it never disturbs the script."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slowness import scaled

from distrun_runtime import kvstore, reporting
from distrun_runtime.contract import metrics
from distrun_runtime.reporting import Reporter

LIMIT_S = scaled(20.0)


class Now:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> float:
        return self.s


class Sent:
    """A sender that keeps what it is given."""

    def __init__(self) -> None:
        self.members: list[dict[str, Any]] = []
        self.is_full = False

    def send(self, kind: str, /, **members: Any) -> bool:
        assert kind == metrics.REPORT
        if self.is_full:
            return False
        self.members.append({**members, "values": dict(members["values"])})
        return True


class Rig:
    """A reporter without a thread, on a clock that a test sets."""

    def __init__(self) -> None:
        self.now, self.sent = Now(), Sent()
        self.reporter = Reporter(self.sent, self.now, has_thread=False)  # type: ignore[arg-type]

    def report(self, step: object = None, total: object = None, **values: object) -> None:
        self.reporter.report(step, total, values)

    @property
    def last(self) -> dict[str, Any]:
        return self.sent.members[-1]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / metrics.SOCKET))
        listening.settimeout(LIMIT_S)
        yield listening


def told(agent: socket.socket, kind: str = metrics.REPORT) -> dict[str, Any]:
    """Return the next datagram of a kind."""
    while True:
        found = metrics.decode(agent.recv(metrics.LIMIT))
        if found is not None and found["kind"] == kind:
            return found


def run(agent: socket.socket | None, code: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DISTRUN_")}
    if agent is not None:
        env.update(DISTRUN_METRICS_SOCKET=agent.getsockname(), DISTRUN_ROLE="worker", DISTRUN_RANK="1")
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return subprocess.run(command, env=env, check=True, text=True, capture_output=True, timeout=LIMIT_S).stdout


def test_what_is_reported_is_sent_and_what_is_not_given_stays() -> None:
    rig = Rig()
    rig.report(1, 10, loss=0.5)
    assert rig.last == {"step": 1, "total": 10, "values": {"loss": 0.5}}
    rig.now.s += 1
    rig.report(2, accuracy=0.25)
    assert rig.last == {"step": 2, "total": 10, "values": {"loss": 0.5, "accuracy": 0.25}}


def test_ten_reports_a_second_are_sent_and_always_the_last_one() -> None:
    rig = Rig()
    for step in range(1001):
        rig.now.s = 100 + step / 1000
        rig.report(step)
    assert [each["step"] for each in rig.sent.members] == pytest.approx(range(0, 1001, 100), abs=11)
    assert len(rig.sent.members) <= 11
    rig.report(1001)
    rig.reporter.flush()
    assert rig.last["step"] == 1001
    rig.reporter.flush()
    assert rig.last["step"] == 1001
    assert len(rig.sent.members) <= 12, "nothing was reported since"


def test_report_that_could_not_be_sent_is_sent_later() -> None:
    rig = Rig()
    rig.sent.is_full = True
    rig.report(7)
    assert not rig.reporter.flush()
    rig.sent.is_full = False
    assert rig.reporter.flush()
    assert rig.last["step"] == 7


def test_signal_handler_may_report_while_its_thread_reports() -> None:
    rig = Rig()

    class Interrupted:
        def item(self) -> float:
            rig.report(2)
            return 0.5

    rig.report(1, loss=Interrupted())
    rig.reporter.flush()
    assert rig.last["values"] == {"loss": 0.5}


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (np.float32(0.5), 0.5),
        (np.array(0.25), 0.25),
        (np.int64(3), 3),
        (np.array([7.0]), 7.0),
        (True, 1),
        (float("inf"), math.inf),
        ("0.5", 0.5),
    ],
    ids=repr,
)
def test_scalars_of_libraries_are_numbers(value: object, sent: float) -> None:
    rig = Rig()
    rig.report(loss=value)
    assert rig.last["values"] == {"loss": sent}
    assert type(rig.last["values"]["loss"]) in (int, float)


def test_nan_passes() -> None:
    rig = Rig()
    rig.report(loss=np.float32("nan"))
    assert math.isnan(rig.last["values"]["loss"])


def test_a_tensor_elsewhere_is_read_only_if_it_is_sent_at_once() -> None:
    class Tensor:
        device = "cuda:0"
        reads = 0

        def detach(self) -> Tensor:
            return self

        def item(self) -> float:
            Tensor.reads += 1
            return 0.5

    rig = Rig()
    rig.report(1, loss=Tensor())
    assert (Tensor.reads, rig.last["values"]) == (1, {"loss": 0.5})
    for _ in range(5):
        rig.report(2, loss=Tensor())
    assert Tensor.reads == 1
    rig.now.s += 1
    rig.report(3)
    assert (Tensor.reads, rig.last["values"]) == (2, {"loss": 0.5})


def test_many_values_and_long_names_are_cut() -> None:
    rig = Rig()
    rig.report(**{"name%d" % number: number for number in range(20)})
    assert list(rig.last["values"]) == ["name%d" % number for number in range(4, 20)]
    rig.now.s += 1
    rig.report(**{"x" * 100: 1})
    assert list(rig.last["values"])[-1] == "x" * 32


@pytest.mark.parametrize(
    "odd", [object(), "many", [1, 2], np.zeros(3), None], ids=["object", "text", "list", "array", "none"]
)
def test_nothing_that_is_given_raises(agent: socket.socket, monkeypatch: pytest.MonkeyPatch, odd: object) -> None:
    monkeypatch.setenv("DISTRUN_METRICS_SOCKET", agent.getsockname())
    monkeypatch.setattr(reporting, "_reporters", reporting._Reporters())
    monkeypatch.setattr(reporting, "offer_stacks", lambda: None)
    reporting.report(step=2, total=odd, loss=odd, good=1)
    assert (found := told(agent))["step"] == 2
    assert found["values"] == {"good": 1}
    reporting.report(step=odd)


def test_outside_a_job_it_does_nothing_and_starts_no_thread() -> None:
    code = """
        import sys, threading
        import distrun_runtime
        for step in range(100):
            distrun_runtime.report(step=step, total=100, loss=object())
        print(threading.active_count(), "numpy" in sys.modules)
    """
    assert run(None, code) == "1 False\n"


def test_the_last_report_of_a_burst_arrives_though_the_script_goes_on_without_another(agent: socket.socket) -> None:
    code = """
        import sys, time, distrun_runtime
        for step in range(1, 101):
            distrun_runtime.report(step=step, total=100)
        time.sleep(1)  # within which the thread has sent it
        import os
        os._exit(0)
    """
    run(agent, code)
    first, last = told(agent), told(agent)
    assert (first["task"], first["step"], first["total"]) == ("worker-1", 1, 100)
    assert last["step"] == 100


def test_the_last_report_arrives_though_the_script_ends_at_once(agent: socket.socket) -> None:
    run(agent, "import distrun_runtime\nfor n in range(1, 4): distrun_runtime.report(step=n)")
    assert [told(agent)["step"], told(agent)["step"]] == [1, 3]


def test_a_store_reports_also_when_it_is_closed(agent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_METRICS_SOCKET", agent.getsockname())
    monkeypatch.setattr(reporting, "_reporters", reporting._Reporters())
    monkeypatch.setattr(reporting, "offer_stacks", lambda: None)
    with kvstore.create("local") as kv:
        kv.report(step=1, total=2, loss=np.float32(0.5))
    kv.report(step=2)
    assert told(agent)["values"] == {"loss": 0.5}


def test_a_forked_child_reports_for_itself(agent: socket.socket) -> None:
    code = """
        import os, distrun_runtime
        distrun_runtime.report(step=1)
        child = os.fork()
        if not child:
            distrun_runtime.report(step=2)
            os._exit(0)
        os.waitpid(child, 0)
    """
    run(agent, code)
    assert [told(agent)["step"], told(agent)["step"]] == [1, 2]
