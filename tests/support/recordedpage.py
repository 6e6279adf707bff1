"""A dashboard in a browser of a recorded job that runs, with what its scripts report."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path

import snapshots
from fakecoordinator import Coordinator
from sample_plan import sample_plan

from distrun.dashboard.web import DashboardPort
from distrun_runtime.contract import session
from distrun_runtime.contract.dataclass import rfc3339, seconds
from distrun_runtime.coordinator.jobstore import JobStore

JOB = "calm-otter-7f3"
TASKS = 6
_WAVES = [0.05 * math.sin(number) for number in range(61)]
_LOSS = [[10 * at, 11.8 * at, 2.3 * math.exp(-at / 35) + wave] for at, wave in enumerate(_WAVES)]
REPORTS = {
    "loss": _LOSS,
    "accuracy": [[step, at, 1 - value / 2.5] for step, at, value in _LOSS],
    "learning rate": [[step, at, 0.1 * 0.5 ** (step // 200)] for step, at, _ in _LOSS],
    "<b>gradient</b>": [[None, at, "nan" if step == 300 else 3 * value] for step, at, value in _LOSS],
}


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[DashboardPort]:
    """Serve the page of the job. `folder`: for the job store."""
    late_s = time.time() - snapshots.NOW

    def encode(value: object) -> bytes:
        """Return a frame whose times are as if the record were of now."""
        text = re.sub(r'(?<=")2026-09-21T[^"]+', lambda found: rfc3339(seconds(found[0]) + late_s), json.dumps(value))
        return session.encode(json.loads(text))

    def answers(kind: str) -> list[bytes]:
        if kind != "subscribe":
            return []
        events = [encode({"type": "event", "event": each}) for each in snapshots.events()]
        metrics = {"type": "metrics", "metrics": {**snapshots.metrics(TASKS), "reports": REPORTS}}
        return [encode({"type": "state", "state": snapshots.state(TASKS)}), *events, encode(metrics)]

    store = JobStore(folder)
    job = store.create(sample_plan(job=JOB))
    job.write_control(str(folder / "socket"))
    job.log_path("worker-1").parent.mkdir(exist_ok=True)
    job.log_path("worker-1").write_text("step 600 loss 0.0412\n" + "".join(line + "\n" for line in snapshots.ERROR))
    for number, wave in enumerate(_WAVES):
        values = {"cpu": 4.8 + 6 * wave, "rss": (1 + number / 100) * 2**30, "net_rx": (1 + wave) * 5e7, "net_tx": 4e7}
        at = rfc3339(time.time() - 12 * (len(_WAVES) - number))
        job.append_sample(json.dumps({"time": at, "push_s": 80 + 60 * wave, "pull_s": 82 + 50 * wave, **values}))
    Coordinator(folder / "socket", JOB, answers)
    port = DashboardPort(list, store.find)
    port.start()
    try:
        yield port
    finally:
        port.close()
