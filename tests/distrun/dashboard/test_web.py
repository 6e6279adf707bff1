"""Who may ask the server of the page, and what it replies."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from distrun_cli import wait_until
from sample_plan import sample_plan
from slowness import scaled

from distrun import client
from distrun.dashboard import source, web
from distrun.dashboard.model import Model
from distrun.dashboard.page import RowChoice
from distrun.dashboard.web import DashboardPort
from distrun_runtime.contract import facts
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.httpport import REQUEST_SIZE
from distrun_runtime.coordinator.jobstore import JobStore

JOB = "calm-otter-7f3"
LIMIT_S = 20.0


@pytest.fixture
def port(tmp_path: Path) -> Iterator[DashboardPort]:
    store = JobStore(tmp_path)
    for job in (JOB, *(f"job-{number}" for number in range(web.WATCHED + 2))):
        store.create(sample_plan(job=job)).finish(Outcome(1, facts.TASK_FAILED, "worker-0 failed"))
    made = DashboardPort(lambda: [Model(each.id) for each in store.list()], store.find)
    made.start()
    yield made
    made.close()


Headers = list[tuple[str, str]]


def ask(port: DashboardPort, path: str, headers: Headers | None = None, method: str = "GET", token: str = "") -> int:
    return reply(port, path, headers, method, token)[0]


def reply(
    port: DashboardPort, path: str, headers: Headers | None = None, method: str = "GET", token: str = ""
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Ask as the page does, unless told otherwise."""
    made = http.client.HTTPConnection(facts.LOOPBACK, port.port, timeout=scaled(LIMIT_S))
    made.putrequest(method, path, skip_host=True)
    headers = headers if headers is not None else [("Host", f"127.0.0.1:{port.port}")]
    for name, value in [*headers, ("Authorization", f"Bearer {token or port.token}")]:
        made.putheader(name, value)
    made.endheaders()
    with contextlib.closing(made), made.getresponse() as answer:
        return answer.status, answer.headers, answer.read()


def test_it_listens_on_the_loopback_address_only_and_each_has_another_long_token(port: DashboardPort) -> None:
    assert port.socket.getsockname()[0] == "127.0.0.1"
    with contextlib.closing(DashboardPort(list, JobStore().find).socket) as other:
        assert other.getsockname()[0] == "127.0.0.1"
    assert len(port.token) >= 43


@pytest.mark.parametrize("token", ["wrong", "\xe4" * 43, "x" * 5000])
def test_a_wrong_token_gets_nothing(port: DashboardPort, token: str) -> None:
    assert ask(port, "/api/jobs", token=token) == 401
    assert ask(port, f"/api/jobs?token={port.token}", token=token) == 401
    assert ask(port, "/api/jobs") == 200


@pytest.mark.parametrize(
    "hosts", [[], ["evil.example"], ["127.0.0.1.evil.example"], ["127.0.0.1:80@evil.example"], ["127.0.0.1"] * 2]
)
@pytest.mark.parametrize("path", ["/", "/api/jobs"])
def test_another_name_that_was_made_to_mean_this_machine_gets_nothing(
    port: DashboardPort, path: str, hosts: list[str]
) -> None:
    assert ask(port, path, [("Host", host) for host in hosts]) == 403


def test_a_forwarded_port_may_be_another_one(port: DashboardPort) -> None:
    for host in ("localhost:1", "127.0.0.1", "[::1]:65535"):
        assert ask(port, "/api/jobs", [("Host", host), ("Origin", f"http://{host}")]) == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Origin", "http://evil.example"),
        ("Origin", "null"),
        ("Origin", "https://localhost:1"),
        ("Origin", "http://localhost:2"),
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Site", "same-site"),
    ],
)
def test_the_page_of_another_site_gets_nothing(port: DashboardPort, name: str, value: str) -> None:
    assert ask(port, "/api/jobs", [("Host", "localhost:1"), (name, value)]) in (401, 403)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_can_be_changed(port: DashboardPort, method: str) -> None:
    status, headers, _ = reply(port, "/api/jobs", method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/", "/dashboard.js", "/api/jobs", "/nothing", "/api/job?id=nothing"])
def test_every_reply_lets_a_browser_run_and_keep_nothing_else(port: DashboardPort, path: str) -> None:
    _, headers, _ = reply(port, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self';" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        *("/../web.py", "/%2e%2e/web.py", "/page/index.html", "/uplot/LICENSE", "//etc/passwd", "/api", "/api/"),
        *("/api/jobs/..", "/api/job", "/api/job?id=../../x", "/api/job?id=%00", "/api/job?" + "a=b&" * 500),
    ],
)
def test_there_is_nothing_at_other_paths(port: DashboardPort, path: str) -> None:
    assert ask(port, path) == 404


def test_a_request_that_is_too_large_is_refused(port: DashboardPort) -> None:
    assert ask(port, "/", [("Host", "localhost"), *[("X", "x" * 1000)] * (1 + REQUEST_SIZE // 1000)]) == 431


def test_a_job_that_has_ended_is_shown_with_its_message(port: DashboardPort) -> None:
    found = json.loads(reply(port, f"/api/job?id={JOB}")[2])
    assert (found["state"], found["is_over"], found["notes"]) == ("failed", True, [["worker-0 failed", "red"]])


def test_browsers_that_are_slow_or_idle_hold_up_no_other_one(port: DashboardPort) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(60):
            slow = stack.enter_context(socket.create_connection((facts.LOOPBACK, port.port), timeout=scaled(LIMIT_S)))
            slow.sendall(b"GET /uplot/uPlot.js HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n" * (number % 2))
        assert ask(port, "/api/jobs") == 200


def test_few_jobs_are_followed_and_none_that_nobody_looks_at(
    port: DashboardPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(web.WATCHED + 2):
        assert ask(port, f"/api/job?id=job-{number}") == 200
    assert len(port._watched) == web.WATCHED
    assert "job-0" not in port._watched
    monkeypatch.setattr(web, "UNWATCHED_S", 0.0)
    wait_until(lambda: not port._watched, LIMIT_S, "no job is followed")


def test_a_job_that_is_followed_no_more_leaves_nothing_open(
    port: DashboardPort, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "END_S", 0.0)
    monkeypatch.setattr(client, "ANSWER_S", 1.0)
    store = JobStore(tmp_path)
    store.create(sample_plan(job="damaged-1x1")).path.joinpath("control.json").write_text("{")
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "silent"))
        silent.listen()
        store.create(sample_plan(job="silent-1x1")).write_control(silent.getsockname())
        assert (ask(port, "/api/job?id=damaged-1x1"), ask(port, "/api/job?id=silent-1x1")) == (500, 200)
        found = port._watched["silent-1x1"]
        port._forget(["silent-1x1"])
        assert found.page(RowChoice())["state"] == "starting", "a browser that asked meanwhile gets what is known"
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, LIMIT_S, "descriptors are closed")


def test_output_that_no_browser_takes_is_dropped_and_events_are_kept(tmp_path: Path) -> None:
    made = source.FrameSource(JobStore(tmp_path).create(sample_plan(job=JOB)))
    for number in range(200):
        made._put(Frame({"type": "event", "event": {"number": number}}))
        made._put(Frame({"type": "output", "task": "worker-0"}, b"%08d" % number * 2**14))
    made.start(None)
    found = made.take()
    output = [frame.body for frame in found if frame.type == "output"]
    assert (len(output), output[-1][:8]) == (source.WAITING_OUTPUT // 2**17, b"00000199")
    assert len([frame for frame in found if frame.type == "event"]) == 200
    made.close()


def test_a_fault_of_ours_is_shown_in_the_page_and_its_traceback_in_the_terminal(
    port: DashboardPort, capfd: pytest.CaptureFixture[str]
) -> None:
    port._read = lambda: {}["x"]
    status, _, text = reply(port, "/api/jobs")
    assert (status, text) == (500, b"internal error: KeyError: 'x'\n")
    wait_until(lambda: "KeyError" in capfd.readouterr().err, LIMIT_S, "a traceback is written")


def test_a_request_waits_for_another_one_only_for_a_time(port: DashboardPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WAIT_S", 0.1)
    for lock, path in ((port._listing, "/api/jobs"), (port._lock, f"/api/job?id={JOB}")):
        with lock:
            status, _, text = reply(port, path)
        assert status == 500
        assert json.loads(text)["error"].endswith("has not answered for 0.1 s")


def test_a_list_whose_reading_takes_long_is_shown_for_longer(
    port: DashboardPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = port._read, []
    port._read = lambda: calls.append(1) or read()
    monkeypatch.setattr(web, "FRESH_S", 0.0)
    for share, count in ((1e9, 1), (1e-9, 2), (1e-9, 2)):
        monkeypatch.setattr(web, "BUSY", share)
        assert ask(port, "/api/jobs") == 200
        assert len(calls) == count


def test_the_page_loads_files_of_its_own_only(port: DashboardPort) -> None:
    _, _, html = reply(port, "/")
    named = re.findall(r'(?:src|href)="([^"#]+)"', html.decode())
    assert len(named) >= 5
    assert {ask(port, f"/{name}") for name in named} == {200}
    assert not re.search(r"<script>|<style|\son\w+=|style=|https?:", html.decode())


def test_uplot_is_the_one_that_is_recorded_with_its_license() -> None:
    folder = web.FOLDER / "uplot"
    recorded = dict(re.findall(r"\| `(\S+)` \| `(\w{64})` \|", (folder / "README.md").read_text()))
    assert recorded == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.min.*")}
    assert len(recorded) == 2
    assert "MIT License" in (folder / "LICENSE").read_text()
