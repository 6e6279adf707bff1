"""The metrics of a job for Prometheus: its text format, version 0.0.4, and the port that serves it.

The labels are job, role, rank, host and gpu. There is no series for single keys of the store. A task has at most SERIES
series; values that the task reported come last.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
import time
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import SCHEDULER, Plan
from distrun_runtime.coordinator.httpport import CHECK_S, HttpAnswer, HttpPort
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
_TASK_REPORT = _Metric("", "report", "Reported by the tasks themselves.")
_JOB_REPORT = _Metric("", "job_report", "Mean of what the ranks report.")


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
    progress = snapshot.get("progress") or {}
    found.all(_JOB, progress, [job])
    _add_values(found, _JOB_REPORT, progress.get("values") or {}, [job], SERIES)
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
            _add_values(found, _TASK_REPORT, report["values"], labels, SERIES - count)
    return found.text()


def _add_values(found: _Page, metric: _Metric, values: Mapping[str, Any], labels: Labels, left: int) -> None:
    """Add what tasks report themselves: a metric for each name, of which no two may become the same."""
    used = set()
    for value_name, value in values.items():
        name = re.sub(r"[^a-zA-Z0-9_]", "_", value_name)
        if left > 0 and name and name not in used:
            used.add(name)
            left -= found.add(metric._replace(name=f"{metric.name}_{name}"), value, labels)


def _number(value: object) -> str:
    """Return a number as the format has it; empty: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return ""
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(value, "") if isinstance(value, str) else repr(value)


# Serves `GET /metrics` for Prometheus on a port of the coordinator (`launch --metrics-port`).
#
# Access is read-only and needs no password. The metrics are requested from the job's loop when a client reads them, and
# are reused for FRESH_S.


LOOP_S = 5.0
"""Time limit for the job's loop to return its metrics."""
FRESH_S = 1.0


class _Scrape(HttpAnswer):
    """One connection."""

    server: MetricsPort

    def answer(self) -> None:
        """Send the page."""
        if len(self.requestline.split()) != 3:
            self.send_error(400)
        elif self.path.partition("?")[0] != "/metrics":
            self.send_error(404, explain="this is /metrics of a distrun job")
        else:
            body = self.server.page(self.connection)
            if body is not None:
                self.send(200, CONTENT_TYPE, body)
            else:
                self.send_error(503, explain="the job is busy, or over")


class MetricsPort(HttpPort):
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
        super().__init__(plan.metrics_address or facts.LOOPBACK, port, _Scrape)
        self.url += "metrics"
        self._page = b""
        self._made_at = float("-inf")
        self._making = threading.Lock()

    def page(self, reader: socket.socket) -> Optional[bytes]:
        """Return the metrics, at most FRESH_S old; None: the job's loop does not give them."""
        until = time.monotonic() + LOOP_S
        while not self._making.acquire(timeout=CHECK_S):
            if not self.has(reader) or time.monotonic() >= until:  # one that was dropped waits for nothing
                return None
        try:
            if time.monotonic() >= self._made_at + FRESH_S:
                given: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
                self._put(MetricsAsked(given.put))
                try:
                    self._page = page(self._plan, given.get(timeout=LOOP_S)).encode("utf-8", "replace")
                except queue.Empty:
                    return None
                self._made_at = time.monotonic()
            return self._page
        finally:
            self._making.release()
