"""The metrics of a job for Prometheus: its text format, version 0.0.4, and the port that serves it.

The labels are job, role, rank, host and gpu. There is no series for single keys of the store. A task has at most SERIES
series; values that the task reported come last.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import SCHEDULER, Plan
from distrun_runtime.coordinator.messages import Event, MetricsAsked

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SERIES = 50
"""Of one task at most."""
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

Labels = Sequence[Tuple[str, str]]


class _Metric(NamedTuple):
    """A member of a snapshot and the metric that it becomes."""

    member: str
    name: str
    help: str


_TASK = (
    _Metric("cpu", "task_cpu_cores", "Cores that the task and its children use."),
    _Metric("rss", "task_memory_bytes", "Memory of the task and its children."),
    _Metric("limit", "task_memory_limit_bytes", "Memory that the task may use."),
    _Metric("processes", "task_processes", "Processes of the task."),
    _Metric("read", "task_read_bytes_per_second", "What the task reads from disks."),
    _Metric("write", "task_write_bytes_per_second", "What the task writes to disks."),
    _Metric("gpu", "task_gpu_ratio", "Use of the GPUs of the task, 0 to 1."),
    _Metric("gpu_mem", "task_gpu_memory_bytes", "Memory of GPUs that the task uses."),
    _Metric("output_age_s", "task_output_age_seconds", "Time since the task wrote its last output."),
)
_REPORT = (
    _Metric("step", "task_step", "Step that the task has reported."),
    _Metric("total", "task_steps", "Steps that the task is to do, as it has reported."),
    _Metric("age_s", "task_report_age_seconds", "Time since the task reported."),
)
_SERVER = (
    _Metric("keys", "server_keys", "Keys that the server holds."),
    _Metric("bytes", "server_value_bytes", "Bytes of the values that the server holds."),
    _Metric("rounds", "server_rounds_total", "Rounds that the server has finished."),
    _Metric("push_s", "server_pushes_per_second", "Pushes that the server takes."),
    _Metric("pull_s", "server_pulls_per_second", "Pulls that the server answers."),
    _Metric("in_s", "server_received_bytes_per_second", "What the server receives."),
    _Metric("out_s", "server_sent_bytes_per_second", "What the server sends."),
    _Metric("queue", "server_queue", "Messages that wait for the server."),
    _Metric("waiting", "server_waiting_pulls", "Pulls that wait for a round."),
    _Metric("staleness_max", "server_staleness_max", "Largest staleness of a push, in updates."),
    _Metric("staleness_mean", "server_staleness_mean", "Mean staleness of pushes, in updates."),
)
_SCHEDULER = (
    _Metric("members", "scheduler_members", "Nodes of the job that have registered."),
    _Metric("barriers", "scheduler_barriers_total", "Barriers that all ranks have passed."),
    _Metric("barrier_waiting", "scheduler_barrier_waiting", "Ranks that a barrier waits for."),
)
_HOST = (
    _Metric("cpu", "host_cpu_ratio", "Use of all cores of the host, 0 to 1."),
    _Metric("cores", "host_cores", "Cores of the host."),
    _Metric("load", "host_load1", "Load average of the host over a minute."),
    _Metric("mem_used", "host_memory_used_bytes", "Memory of the host in use."),
    _Metric("mem_total", "host_memory_bytes", "Memory of the host."),
    _Metric("disk_free", "host_disk_free_bytes", "Free space where the tasks work."),
    _Metric("disk_total", "host_disk_bytes", "Space where the tasks work."),
    _Metric("net_rx", "host_receive_bytes_per_second", "What the host receives."),
    _Metric("net_tx", "host_transmit_bytes_per_second", "What the host sends."),
    _Metric("heard_s", "host_heard_age_seconds", "Time since the host's agent sent its numbers."),
)
_GPU = (
    _Metric("util", "gpu_ratio", "Use of the GPU, 0 to 1."),
    _Metric("mem_used", "gpu_memory_used_bytes", "Memory of the GPU in use."),
    _Metric("mem_total", "gpu_memory_bytes", "Memory of the GPU."),
)
_JOB = (
    _Metric("step", "job_step", "Step of the slowest rank."),
    _Metric("total", "job_steps", "Steps that the slowest rank is to do."),
    _Metric("fraction", "job_progress_ratio", "Progress of the slowest rank, 0 to 1."),
    _Metric("eta_s", "job_eta_seconds", "Time until the slowest rank is done."),
    _Metric("rate", "job_steps_per_second", "Steps of the slowest rank."),
    _Metric("loss", "job_loss", "Mean of the loss that ranks report."),
)


class _Page:
    """The text, in which all samples of a metric stand together."""

    def __init__(self) -> None:
        self._metrics: Dict[str, List[str]] = {}

    def add(self, metric: _Metric, value: object, labels: Labels) -> bool:
        """Add a sample; return whether there is a value."""
        shown = _number(value)
        if not shown:
            return False
        name = "distrun_" + metric.name
        if name not in self._metrics:
            kind = "counter" if metric.member and name.endswith("_total") else "gauge"
            self._metrics[name] = [f"# HELP {name} {metric.help}", f"# TYPE {name} {kind}"]
        pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels)
        self._metrics[name].append(f"{name}{{{pairs}}} {shown}")
        return True

    def all(self, metrics: Sequence[_Metric], values: Mapping[str, Any], labels: Labels) -> int:
        """Add a sample for each metric that has a value; return how many."""
        return sum(self.add(metric, values.get(metric.member), labels) for metric in metrics)

    def text(self) -> str:
        """Return all of it."""
        return "".join(line + "\n" for lines in self._metrics.values() for line in lines)


def page(plan: Plan, snapshot: Mapping[str, Any]) -> str:
    """Return what Prometheus reads of a snapshot (`measuring.Measuring.snapshot`)."""
    found = _Page()
    job = ("job", plan.job)
    found.all(_JOB, snapshot.get("progress") or {}, [job])
    for name, host in snapshot["hosts"].items():
        found.all(_HOST, host, [job, ("host", name)])
        for gpu in host["gpus"]:
            index = gpu["index"] if gpu["index"] is not None else gpu["uuid"]
            found.all(_GPU, gpu, [job, ("host", name), ("gpu", str(index))])
    store = snapshot.get("store") or {"servers": {}, "scheduler": None}
    told = snapshot["tasks"]
    for task in plan.tasks:
        if task.name not in told:
            continue
        labels = [job, ("role", task.role), ("rank", str(task.rank)), ("host", task.host)]
        numbers = told[task.name]
        count = found.all(_TASK, numbers, labels)
        for condition in facts.CONDITIONS:
            metric = _Metric("", f"task_{condition}", f"Whether the task is {condition}, 0 or 1.")
            count += found.add(metric, int(numbers["condition"] == condition), labels)
        count += found.all(_SERVER, store["servers"].get(task.name, {}), labels)
        if store["scheduler"] is not None and task.role == SCHEDULER:
            count += found.all(_SCHEDULER, store["scheduler"], labels)
        report = numbers.get("report")
        if report is not None:
            count += found.all(_REPORT, report, labels)
            _add_values(found, report["values"], labels, SERIES - count)
    return found.text()


def _add_values(found: _Page, values: Mapping[str, Any], labels: Labels, left: int) -> None:
    """Add what a task reports itself: a metric for each name, of which no two may become the same."""
    used = set()
    for value_name, value in values.items():
        name = re.sub(r"[^a-zA-Z0-9_]", "_", value_name)
        if left > 0 and name and name not in used:
            used.add(name)
            left -= found.add(_Metric("", f"report_{name}", "Reported by the tasks themselves."), value, labels)


def _number(value: object) -> str:
    """Return a number as the format has it; empty: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return ""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(value, "") if isinstance(value, str) else repr(value)


# Serves `GET /metrics` for Prometheus on a port of the coordinator (`launch --metrics-port`).
#
# Access is read-only and needs no password. One thread serves at most CLIENTS connections at a time; for one more, the
# oldest of those that have sent no request is dropped, or else the oldest. A client has REQUEST_S to send its request
# and ANSWER_S to take the reply. The metrics are requested from the job's loop when a client reads them, and are reused
# for FRESH_S.


CLIENTS = 16
"""Connections at a time."""
REQUEST_LIMIT = 8192
"""Bytes of a request."""
REQUEST_S = 5.0
ANSWER_S = 20.0
LOOP_S = 5.0
"""Time limit for the job's loop to return its metrics."""
CLOSE_S = 5.0
FRESH_S = 1.0
BACKLOG = 128
READ_SIZE = 4096


class _Scraper:
    """One connection."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self.socket = connection
        self.until = until
        self.request = b""
        self.is_waiting = False
        """It has asked, and the numbers are to come."""
        self.has_asked = False
        self.has_body = True
        self.rest = memoryview(b"")
        self.is_answered = False


class MetricsPort:
    """Listens at a port of the plan's `metrics_address` from the call on; answers from `start` to `close`.

    Arguments:
        plan: of the job.
        port: 0: any free one.
        put: has the job's loop handle an event.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, plan: Plan, port: int, put: Callable[[Event], None]) -> None:
        self._plan = plan
        self._put = put
        self._listener = _listen(plan.metrics_address or facts.LOOPBACK, port)
        host, self.port = self._listener.getsockname()[:2]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"
        self._readers: Dict[int, _Scraper] = {}
        self._page = b""
        self._made_at = float("-inf")
        self._asked_at: Optional[float] = None
        """When the loop was asked, while it has not answered."""
        self._given: Optional[Mapping[str, Any]] = None
        self._lock = threading.Lock()
        """Guards what the loop's thread gives."""
        self._is_closing = False
        self._wakeup, self._waking = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._waking, False)
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and drop all connections. Waits CLOSE_S at most."""
        with self._lock:
            self._is_closing = True
            self._wake()
        self._thread.join(CLOSE_S)
        with self._lock:
            os.close(self._waking)
            self._waking = -1

    def give(self, snapshot: Mapping[str, Any]) -> None:
        """Take the numbers that were asked for; the loop's thread calls it."""
        with self._lock:
            self._given = snapshot
            self._wake()

    def _wake(self) -> None:
        """Have the thread look; the lock is held."""
        if self._waking >= 0:
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(self._waking, b"w")

    # ------------------------------------------------------------------ the thread

    def _serve(self) -> None:
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while not self._is_closing:
                for key, _ in self._selector.select(self._wait_s()):
                    if isinstance(key.data, _Scraper):
                        self._attend(key.data)
                    elif key.fileobj is self._listener:
                        self._let_in()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self._wakeup, READ_SIZE)
                self._take_given()
                self._drop_late(time.monotonic())
        except Exception:
            import traceback

            traceback.print_exc()  # to coordinator.log; the job goes on
        finally:
            for reader in list(self._readers.values()):
                self._drop(reader)
            self._selector.close()
            self._listener.close()
            os.close(self._wakeup)

    def _wait_s(self) -> Optional[float]:
        due = [reader.until for reader in self._readers.values()]
        if self._asked_at is not None:
            due.append(self._asked_at + LOOP_S)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _let_in(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has gone, or there is no descriptor
            time.sleep(0.05)
            return
        connection.setblocking(False)
        if len(self._readers) >= CLIENTS:
            self._drop(min(self._readers.values(), key=lambda each: each.has_asked))  # the first one: the oldest
        reader = _Scraper(connection, time.monotonic() + REQUEST_S)
        self._readers[connection.fileno()] = reader
        self._selector.register(connection, selectors.EVENT_READ, reader)
        self._attend(reader)  # a request may be there already

    def _attend(self, reader: _Scraper) -> None:
        try:
            if reader.rest:
                self._send(reader)
                return
            data = reader.socket.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or reader.is_answered:
            self._drop(reader)
            return
        if reader.is_waiting:
            return  # whatever it says more is not read as a request
        reader.request += data
        if b"\r\n\r\n" in reader.request or b"\n\n" in reader.request:
            self._take(reader)
        elif len(reader.request) > REQUEST_LIMIT:
            self._answer(reader, "431 Request Header Fields Too Large")

    def _take(self, reader: _Scraper) -> None:
        reader.has_asked = True
        words = reader.request.split(b"\n", 1)[0].split()
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            self._answer(reader, "400 Bad Request")
        elif words[0] not in (b"GET", b"HEAD"):
            self._answer(reader, "405 Method Not Allowed", more="Allow: GET, HEAD\r\n")
        elif words[1].split(b"?", 1)[0] != b"/metrics":
            self._answer(reader, "404 Not Found", b"this is /metrics of a distrun job\n")
        else:
            reader.has_body = words[0] == b"GET"
            reader.is_waiting = True
            reader.until = time.monotonic() + ANSWER_S
            self._ask()

    def _ask(self) -> None:
        """Answer those who wait, with fresh numbers: have the loop give them, unless some are there."""
        now = time.monotonic()
        if now < self._made_at + FRESH_S:
            self._answer_all()
        elif self._asked_at is None:
            self._asked_at = now
            self._put(MetricsAsked(self.give))

    def _take_given(self) -> None:
        with self._lock:
            given, self._given = self._given, None
        if given is not None:
            self._page = page(self._plan, given).encode("utf-8", "replace")
            self._made_at, self._asked_at = time.monotonic(), None
            self._answer_all()
        elif self._asked_at is not None and time.monotonic() >= self._asked_at + LOOP_S:
            self._asked_at = None
            for reader in [each for each in self._readers.values() if each.is_waiting]:
                self._answer(reader, "503 Service Unavailable", b"the job is busy, or over\n")

    def _answer_all(self) -> None:
        for reader in [each for each in self._readers.values() if each.is_waiting]:
            self._answer(reader, "200 OK", self._page, CONTENT_TYPE)

    def _answer(
        self, reader: _Scraper, status: str, body: bytes = b"", kind: str = "text/plain; charset=utf-8", more: str = ""
    ) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}"
        head += "Connection: close\r\n\r\n"
        reader.is_waiting = False
        reader.until = time.monotonic() + ANSWER_S
        reader.rest = memoryview(head.encode("ascii") + (body if reader.has_body else b""))
        self._selector.modify(reader.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, reader)

    def _send(self, reader: _Scraper) -> None:
        reader.rest = reader.rest[reader.socket.send(reader.rest) :]
        if not reader.rest:
            reader.is_answered = True
            self._selector.modify(reader.socket, selectors.EVENT_READ, reader)
            reader.socket.shutdown(socket.SHUT_WR)  # what it has not read yet must not be cut off by a reset

    def _drop_late(self, now: float) -> None:
        for reader in [each for each in self._readers.values() if now >= each.until]:
            self._drop(reader)

    def _drop(self, reader: _Scraper) -> None:
        self._readers.pop(reader.socket.fileno(), None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(reader.socket)
        reader.socket.close()


def _listen(address: str, port: int) -> socket.socket:
    family, kind, number, _, where = socket.getaddrinfo(
        address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, number)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener
