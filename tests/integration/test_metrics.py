"""The numbers of real jobs: what Prometheus reads, and what the job's folder keeps."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from typing import Any

import pytest
import schemas
from distrun_cli import Distrun, wait_until
from prometheus_client.parser import text_string_to_metric_families
from slowness import scaled

LIMIT_S = 60.0
TRAIN = """
import os, time
import distrun_runtime
deadline = time.monotonic() + 60
step = 0
while not os.path.exists("enough") and time.monotonic() < deadline:
    step += 1
    distrun_runtime.report(step=step, total=1000, loss=1 / step)
    time.sleep(0.1)
distrun_runtime.report(final=7)
"""


def page(url: str) -> list[Any]:
    with urllib.request.urlopen(url, timeout=scaled(LIMIT_S)) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_prometheus_reads_a_running_job_and_its_folder_keeps_a_sample(distrun: Distrun) -> None:
    (distrun.work / "train.py").write_text(TRAIN)
    job = distrun.begin("-n", "2", "-s", "0", "--metrics-port", "0", sys.executable, "train.py")
    url: list[str] = []

    def is_said() -> bool:
        url[:] = re.findall(r"metrics: (http://127\.0\.0\.1:\d+/metrics)\n", (distrun.home / "err").read_text())
        return bool(url)

    wait_until(is_said, LIMIT_S, "the port is said")
    found: dict[tuple[str, str | None], float] = {}

    def is_measured() -> bool:
        found.update({(sample.name, sample.labels.get("rank")): sample.value for sample in page(url[0])})
        names = ("distrun_task_memory_bytes", "distrun_task_cpu_cores", "distrun_task_step", "distrun_report_loss")
        return (
            all((name, rank) in found for name in names for rank in "01")
            and ("distrun_job_eta_seconds", None) in found
            and ("distrun_job_report_loss", None) in found
        )

    wait_until(is_measured, LIMIT_S, "both workers are measured")
    assert found["distrun_task_memory_bytes", "0"] > 1 << 20
    assert 0 < found["distrun_job_progress_ratio", None] < 1
    assert found["distrun_host_cores", None] >= 1
    (distrun.work / "enough").touch()
    assert job.wait(scaled(LIMIT_S)) == 0
    [line] = (distrun.jobs[0] / "metrics.jsonl").read_text().splitlines()
    kept = json.loads(line)
    schemas.check(kept, "sample")
    assert kept["progress"]["total"] == 1000
    reports = json.loads((distrun.jobs[0] / "reports.json").read_text())
    schemas.check(reports, "reports")
    assert reports["reports"]["final"][-1][2] == kept["progress"]["values"]["final"] == 7
    assert reports["reports"]["loss"][0][0] < reports["reports"]["loss"][-1][0]
    shown = distrun.answer("status", distrun.jobs[0].name).stdout.decode()
    assert "\nfinal 7   step " in shown
    events = [json.loads(each) for each in (distrun.jobs[0] / "events.jsonl").read_text().splitlines()]
    assert [each["url"] for each in events if each["event"] == "metrics_port"] == url
    with pytest.raises(OSError, match="refused"):
        page(url[0])


def test_a_port_that_is_taken_is_said_and_the_job_runs(distrun: Distrun) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = distrun.launch("-n", "1", "-s", "0", "--metrics-port", str(port), "true")
    assert result.returncode == 0
    assert f"metrics: cannot listen at 127.0.0.1 port {port}: Address already in use" in result.stderr.decode()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--metrics-port", "70000"], "--metrics-port: expected a whole number from 0 to 65535, found '70000'"),
        (
            ["--metrics-port", "0", "--metrics-address", "here"],
            "--metrics-address: expected an address such as 0.0.0.0",
        ),
        (["--metrics-address", "::1"], "--metrics-address: nothing is served without --metrics-port"),
        (["--stall-after", "-1"], "--stall-after: expected a time in seconds, from 0 to"),
    ],
)
def test_what_is_typed_wrongly_is_refused(options: list[str], message: str, distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", *options, "true")
    assert result.returncode == 2
    assert message in result.stderr.decode()


@pytest.mark.slow
def test_nothing_is_said_of_stalls_while_tasks_are_stopped(distrun: Distrun) -> None:
    script = "trap '' TERM; [ $DMLC_WORKER_ID = 0 ] && exit 3; exec sleep 100"
    result = distrun.launch("-n", "2", "-s", "0", "--stall-after", "1", "--grace", "7", script)
    assert result.returncode == 3
    assert b"stalled" not in result.stderr
