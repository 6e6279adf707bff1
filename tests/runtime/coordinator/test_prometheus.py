"""What Prometheus reads of a job, as its own client understands it; and who may read it, and how long."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from measured import WALL, MeasuredJob
from prometheus_client.parser import text_string_to_metric_families
from sample_plan import sample_plan
from slowness import scaled

from distrun_runtime.contract import agent_messages, facts
from distrun_runtime.coordinator import httpport, messages, prometheus
from distrun_runtime.coordinator.prometheus import MetricsPort

LIMIT_S = scaled(20.0)


def busy_job() -> MeasuredJob:
    """A job of which everything has been measured."""
    job = MeasuredJob(sample_plan(2, 1, ("d1", "d2")))
    job.report("worker-0", 5, 10, loss=math.nan, **{f"value.{number}": number for number in range(40)})
    everything = {"read": 0, "write": 0, "limit": 1 << 30, "gpu": 0.5, "gpu_mem": 5, "output_at": WALL}
    for name in job.more:
        job.more[name].update(everything)
    names = (*("keys", "bytes", "bytes_in", "bytes_out", "rounds", "pushes", "pulls", "updates"),)
    gauges = (*("queue", "waiting", "staleness_max", "staleness_mean"),)
    lags = {str(rank): [0.1, 12, 0.5, 1.0] for rank in range(60)}
    counters = {"role": "server", "values": dict.fromkeys((*names, *gauges), 7), "lags": lags}
    job.more["server-0"]["counters"] = counters
    job.more["scheduler"]["counters"] = {"values": {"members": 4, "barriers": 2, "barrier_waiting": 1}}
    return job.run_to(3)


def samples(text: str) -> list[Any]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def test_prometheus_understands_every_line() -> None:
    job = busy_job()
    text = prometheus.page(job.plan, job.snapshot())
    found = samples(text)
    assert len(found) == sum(not line.startswith("#") for line in text.splitlines())
    assert {name for sample in found for name in sample.labels} <= {"job", "role", "rank", "host", "gpu"}
    of = {(sample.name, sample.labels.get("role"), sample.labels.get("rank")): sample for sample in found}
    cpu = of["distrun_task_cpu_cores", "worker", "1"]
    assert cpu.value == 0.5
    assert cpu.labels == {"job": "calm-otter-7f3", "role": "worker", "rank": "1", "host": "d2"}
    assert of["distrun_server_keys", "server", "0"].value == 7
    assert of["distrun_server_rounds_total", "server", "0"].value == 7
    assert of["distrun_scheduler_barriers_total", "scheduler", "0"].value == 2
    assert of["distrun_task_step", "worker", "0"].value == 5
    assert of["distrun_task_stalled", "worker", "0"].value == 0
    assert math.isnan(of["distrun_job_loss", None, None].value)
    assert of["distrun_job_progress_ratio", None, None].value == 0.5
    assert of["distrun_job_report_value_7", None, None].value == of["distrun_report_value_7", "worker", "0"].value == 7


def test_no_task_has_more_than_50_series_and_no_key_has_one() -> None:
    job = busy_job()
    found = samples(prometheus.page(job.plan, job.snapshot()))
    for task in job.plan.tasks:
        labels = {"job": job.plan.job, "role": task.role, "rank": str(task.rank), "host": task.host}
        count = sum(sample.labels == labels for sample in found)
        assert 12 <= count <= prometheus.SERIES


def test_names_and_labels_are_safe_whatever_a_task_reports() -> None:
    job = MeasuredJob(sample_plan(1, 0, ('a"b\\c',)))
    values = {"loss": 1.0, "a.b": 2.0, "a_b": 3.0, 'x"} 1\nevil': 4.0, "inf": math.inf, "": 5.0}
    job.report("worker-0", 1, 2, **values)
    found = samples(prometheus.page(job.plan, job.run_to(3).snapshot()))
    reported = {sample.name: sample.value for sample in found if sample.name.startswith("distrun_report_")}
    assert reported["distrun_report_loss"] == 1.0
    assert reported["distrun_report_a_b"] == 2.0
    assert reported["distrun_report_inf"] == math.inf
    assert len(reported) == 4
    assert {sample.labels["host"] for sample in found if "host" in sample.labels} == {'a"b\\c'}


def test_gpus_have_a_label() -> None:
    job = MeasuredJob(sample_plan(1, 0, ("d1",)))
    gpus = [{"uuid": "GPU-1", "index": 3, "name": "H100", "util": 0.5, "mem_used": 1, "mem_total": 2}]
    job.tell(agent_messages.Measured("d1", {**job.frame("d1"), "gpus": gpus}, WALL))
    found = [sample for sample in samples(prometheus.page(job.plan, job.snapshot())) if "gpu" in sample.labels]
    assert {(sample.name, sample.labels["gpu"]) for sample in found} >= {("distrun_gpu_ratio", "3")}


# ---------------------------------------------------------------------- the port


class Loop:
    """The job's loop, as far as the port knows it: it answers at once, or not."""

    def __init__(self) -> None:
        self.job = busy_job()
        self.asked = 0
        self.answers = True

    def put(self, event: messages.Event) -> None:
        assert isinstance(event, messages.MetricsAsked)
        self.asked += 1
        if self.answers:
            threading.Thread(target=event.give, args=(self.job.snapshot(),)).start()


@pytest.fixture
def loop() -> Loop:
    return Loop()


@pytest.fixture
def port(loop: Loop) -> Iterator[MetricsPort]:
    made = MetricsPort(loop.job.plan, 0, loop.put)
    made.start()
    yield made
    made.close()


def ask(port: MetricsPort, path: str = "/metrics", method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(facts.LOOPBACK, port.port, timeout=LIMIT_S)
    connection.request(method, path)
    return connection.getresponse()


def test_the_port_answers_on_the_loopback_address(port: MetricsPort) -> None:
    assert port.url == f"http://127.0.0.1:{port.port}/metrics"
    answer = ask(port)
    assert (answer.status, answer.headers["Content-Type"]) == (200, prometheus.CONTENT_TYPE)
    assert {sample.name for sample in samples(answer.read().decode())} >= {"distrun_task_cpu_cores"}


def test_numbers_are_made_when_somebody_reads_and_serve_all_for_a_second(
    port: MetricsPort, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loop.asked == 0
    monkeypatch.setattr(prometheus, "FRESH_S", 1000.0)
    for _ in range(5):
        assert ask(port).status == 200
    assert loop.asked == 1
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    assert ask(port).status == 200
    assert loop.asked == 2


def test_head_has_no_body(port: MetricsPort) -> None:
    answer = ask(port, method="HEAD")
    assert answer.status == 200
    assert int(answer.headers["Content-Length"]) > 1000
    assert answer.read() == b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 70000, b"431"),
    ],
)
def test_other_requests_are_refused(port: MetricsPort, request_: bytes, status: bytes) -> None:
    with socket.create_connection((facts.LOOPBACK, port.port), timeout=LIMIT_S) as client:
        client.sendall(request_)
        assert client.recv(65536).split()[1] == status


def dropped(client: socket.socket) -> bool:
    client.settimeout(LIMIT_S)
    with contextlib.suppress(ConnectionError):
        return client.recv(1) == b""
    return True


def test_a_client_that_does_not_ask_is_dropped_and_holds_up_nobody(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpport, "REQUEST_S", 0.3)
    with socket.create_connection((facts.LOOPBACK, port.port)) as slow:
        slow.sendall(b"GET /metr")
        assert ask(port).status == 200
        assert dropped(slow)


def test_a_client_that_asks_byte_by_byte_has_no_longer(port: MetricsPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpport, "REQUEST_S", 0.3)
    until = time.monotonic() + LIMIT_S
    with socket.create_connection((facts.LOOPBACK, port.port)) as slow, contextlib.suppress(ConnectionError):
        while time.monotonic() < until:
            slow.sendall(b"G")
            slow.settimeout(0.05)
            with contextlib.suppress(TimeoutError):
                if not slow.recv(1):
                    return
    assert time.monotonic() < until


def test_a_client_that_does_not_read_is_dropped(port: MetricsPort, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpport, "ANSWER_S", 0.3)
    monkeypatch.setattr(prometheus, "page", lambda plan, snapshot: "x" * 50_000_000)
    with socket.create_connection((facts.LOOPBACK, port.port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        until = time.monotonic() + LIMIT_S
        while port._readers or not loop.asked:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_scraper_is_answered_while_400_idle_connections_are_open(port: MetricsPort) -> None:
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((facts.LOOPBACK, port.port), timeout=LIMIT_S))
            for _ in range(400)
        ]
        for _ in range(3):
            assert ask(port).status == 200
        assert len(port._readers) <= httpport.CLIENTS
        assert dropped(idle[0]), "of those that have not asked, the oldest goes first"


def test_of_clients_that_have_all_asked_and_do_not_read_the_oldest_goes(
    port: MetricsPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = prometheus.page
    monkeypatch.setattr(prometheus, "page", lambda plan, snapshot: page(plan, snapshot) + "x" * 20_000_000)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * httpport.CLIENTS):
            client = stack.enter_context(socket.create_connection((facts.LOOPBACK, port.port), timeout=LIMIT_S))
            client.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert ask(port).status == 200


def test_a_loop_that_does_not_answer_is_said_to_be_busy(
    port: MetricsPort, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "LOOP_S", 0.2)
    loop.answers = False
    assert ask(port).status == 503
    loop.answers = True
    assert ask(port).status == 200


def test_a_port_in_use_is_an_error(port: MetricsPort, loop: Loop) -> None:
    with pytest.raises(OSError, match="in use"):
        MetricsPort(loop.job.plan, port.port, loop.put)


def test_the_address_may_be_of_ipv6(loop: Loop) -> None:
    try:
        made = MetricsPort(loop.job.plan._replace(metrics_address="::1"), 0, loop.put)
    except OSError:
        pytest.skip("no IPv6 here")
    made.start()
    try:
        assert made.url.startswith("http://[::1]:")
    finally:
        made.close()
