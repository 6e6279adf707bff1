"""Real agents: what they sample, and what their tasks report."""

from __future__ import annotations

import binascii
import os
import resource
import signal
import zlib
from pathlib import Path
from typing import Any

import agentkit
import pytest
from agentkit import AgentDriver, agent, leftovers, poll, python, shell

from distrun import shipping
from distrun_runtime.agent import stopping
from distrun_runtime.agent.helper import NAME
from distrun_runtime.contract import process
from distrun_runtime.contract.process import Identity

RUNTIME = str(Path(__file__).resolve().parent.parent.parent / "runtime")
REPORT = f"""\
import sys, time
sys.path.insert(0, {RUNTIME!r})
from distrun_runtime.contract.metrics import Sender
sender = Sender()
"""


def sampled(driver: AgentDriver, name: str = "worker-0") -> dict[str, Any]:
    return driver.wait("metrics").header["tasks"].get(name, {})


def reported(driver: AgentDriver) -> Any:
    return sampled(driver).get("report", {}).get("step")


def test_an_agent_measures_as_often_as_begin_says() -> None:
    with agent(shell("exec sleep 600")) as driver:
        driver.begin(sample_s=0.1)
        first, second = driver.wait("metrics").header, driver.wait("metrics").header
        assert 0.09 < second["clock"] - first["clock"] < 30
        assert first["tasks"] == {}


def test_nothing_is_sampled_until_it_is_asked_for_and_after_it_is_not_any_more() -> None:
    with agent(shell("echo on; exec sleep 600"), env={"DISTRUN_METRICS_SOCKET": "/outer"}) as driver:
        driver.begin()
        driver.spawn()
        driver.hear_until(driver.text, "the task runs")
        driver.say("ping", n=1)
        driver.wait("pong", n=1)
        assert not [frame for frame in driver.frames if frame.type == "metrics"]
        driver.say("sample", interval_s=0.1)
        first, second = driver.wait("metrics").header, driver.wait("metrics").header
        assert "seq" not in first, "it is lost in a cut"
        assert second["clock"] - first["clock"] > 0.09
        assert second["host"]["cpu_s"] >= first["host"]["cpu_s"] > 0
        used = second["tasks"]["worker-0"]
        assert (used["processes"], used["rss"] > 0, used["cpu_s"] >= 0) == (1, True, True)
        assert abs(used["output_at"] - second["time"]) < 60
        driver.say("sample", interval_s=0)
        for n in (2, 3):
            driver.say("ping", n=n)
            driver.wait("pong", n=n)
            driver.frames = [frame for frame in driver.frames if frame.type != "metrics"] if n == 2 else driver.frames
        assert not [frame for frame in driver.frames if frame.type == "metrics"]
        assert driver.finish() == 0


def test_a_task_that_reports_to_a_stopped_agent_goes_on_and_its_last_values_arrive(tmp_path: Path) -> None:
    code = f"""{REPORT}
print("ready", flush=True)
open(sys.argv[1]).readline()
sent = sum(sender.send("report", step=step, total=10000) for step in range(1, 10001))
print("took", time.process_time(), sent, file=open(sys.argv[2], "w"), flush=True)
while not sender.send("report", step=10000, total=10000):
    time.sleep(0.01)
time.sleep(600)
"""
    folder = tmp_path
    os.mkfifo(folder / "go")
    one = python(code)
    with agent(one._replace(argv=(*one.argv, str(folder / "go"), str(folder / "took")))) as driver:
        driver.begin()
        driver.spawn()
        driver.hear_until(driver.text, "the task runs")
        driver.say("sample", interval_s=0.1)
        sampled(driver)
        pid = driver.agent_pid()
        os.kill(pid, signal.SIGSTOP)
        (folder / "go").write_text("\n")
        poll((folder / "took").exists, "the task goes on though its agent is stopped", 20.0)
        poll(lambda: (folder / "took").read_text().endswith("\n"), "it has written", 20.0)
        _, cpu_s, sent = (folder / "took").read_text().split()
        assert float(cpu_s) < 5.0
        assert int(sent) < 10000, "what finds no room is dropped"
        os.kill(pid, signal.SIGCONT)
        driver.hear_until(lambda: _last(driver) == 10000, "the last values have arrived")
        assert driver.finish() == 0


def test_what_a_task_reports_last_is_told_before_its_end_without_another_sample() -> None:
    code = f"{REPORT}for step in range(3):\n    sender.send('report', step=step, values={{'loss': 0.5}})\n"
    with agent(python(code)) as driver:
        driver.begin(sample_s=600.0)
        driver.spawn()
        first = driver.wait("metrics", "exited")
        assert first.header["ended"]["worker-0"]["step"] == 2
        assert not {"host", "tasks"} & first.header.keys()
        driver.exited()
        assert driver.finish() == 0


def _last(driver: AgentDriver) -> Any:
    frames = [frame for frame in driver.frames if frame.type == "metrics"]
    return frames[-1].header["tasks"]["worker-0"].get("report", {}).get("step") if frames else None


def test_a_subprocess_counts_for_its_task_and_a_report_of_no_task_for_none() -> None:
    code = f"""{REPORT}
import subprocess
sender.send("report", step=3, values={{"loss": float("nan")}})
Sender(task="worker-9").send("report", step=9)
subprocess.run(["sh", "-c", "sleep 600; :"])
"""
    with agent(python(code)) as driver:
        driver.begin()
        driver.say("sample", interval_s=0.1)
        driver.spawn()
        driver.hear_until(lambda: _last(driver) == 3, "it has reported")
        while sampled(driver)["processes"] < 3:
            pass
        frame = driver.wait("metrics").header
        assert set(frame["tasks"]) == {"worker-0"}
        assert frame["tasks"]["worker-0"]["report"]["values"]["loss"] != 0
        assert driver.finish() == 0
        assert driver.leftovers() == []


@pytest.fixture
def quick_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents start their helper at once, and ask it often."""
    importer, modules = shipping.agent().split()
    text = zlib.decompress(binascii.a2b_base64(importer)).decode()
    at = text.index(shipping.START_AGENT)
    sooner = "from distrun_runtime.agent import measuring\nmeasuring.HELPER_AFTER_S = 0.0\nmeasuring.SMI_S = 0.1\n"
    changed = binascii.b2a_base64(zlib.compress((text[:at] + sooner + text[at:]).encode()), newline=False)
    monkeypatch.setattr(agentkit.shipping, "agent", lambda with_origin=False: changed + b" " + modules + b"\n")


def helpers(job: str) -> list[Identity]:
    rows = [row for row in process.table() if process.environ_of(row.pid).get("DISTRUN_JOB_ID") == job]
    return [row.identity for row in rows if NAME in process.command_of(row.pid)]


@pytest.mark.usefixtures("quick_helper")
@pytest.mark.parametrize("how", ["end", "stop", "agent killed", "both killed"])
def test_the_helper_ends_with_its_agent(how: str) -> None:
    with agent(shell("exec sleep 600")) as driver:
        driver.begin()
        driver.spawn()
        driver.say("sample", interval_s=0.1)
        while "disk_free" not in driver.wait("metrics").header["host"]:
            pass
        [helper] = helpers(driver.job)
        [job] = [each for each in stopping.survey()["jobs"] if each["job"] == driver.job]
        assert {row["task"] for row in job["processes"]} >= {"helper", "agent", "worker-0"}
        if how == "stop":
            driver.stop("worker-0")
            assert driver.wait("cleared").header["left"] == []
            assert not process.is_alive(helper)
        elif how == "agent killed":
            os.kill(driver.agent_pid(), signal.SIGKILL)
        elif how == "both killed":
            for pid in (driver.agent_pid(), driver.child.pid):
                os.kill(pid, signal.SIGKILL)
        if how in ("end", "stop"):
            assert driver.finish() == 0
        poll(lambda: not process.is_alive(helper), "the helper has ended")
        if how != "both killed":
            poll(lambda: not leftovers(driver.job), "nothing is left")


@pytest.mark.portable
@pytest.mark.usefixtures("quick_helper")
def test_without_proc_ps_tells() -> None:
    with agent(shell("exec sleep 600"), env={"DISTRUN_PORTABLE": "1"}) as driver:
        driver.begin()
        driver.spawn()
        driver.say("sample", interval_s=0.1)
        while not sampled(driver).get("rss"):
            pass
        assert driver.finish() == 0
        assert driver.leftovers() == []


def test_agent_that_cannot_measure_says_so_and_the_job_goes_on() -> None:
    with agent(shell("echo on; exec sleep 600")) as driver:
        driver.begin()
        driver.spawn()
        driver.hear_until(driver.text, "the task runs")
        pid = driver.agent_pid()
        used = max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        driver.say("sample", interval_s=0.1)
        assert "failed to measure" in driver.wait("warning").header["text"]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        driver.say("sample", interval_s=0.1)
        driver.say("ping", n=1)
        driver.wait("pong", n=1)
        driver.say("stack", id=7, task="worker-0")
        assert "failed to measure" in driver.wait("stack", id=7).header["error"]
