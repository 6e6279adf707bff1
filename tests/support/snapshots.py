"""A recorded job for tests of the dashboard: its state, events and metrics, as a coordinator sends them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

NOW = 1_790_000_000.0
"""The time of the record: 2026-09-21T13:33:20Z."""
WORDS: dict[int, str] = {1: "failed", 3: "stalled", 4: "straggler", 5: "waiting"}
"""Workers that are not as they should be."""


def moment(when: float) -> str:
    from distrun_runtime.contract.dataclass import rfc3339

    return rfc3339(when)


def task(name: str, host: str, state: str, **more: Any) -> dict[str, Any]:
    role, _, rank = name.partition("-")
    value = {
        **{"name": name, "role": role, "rank": int(rank or 0), "host": host, "state": state, "pid": 4000, "code": None},
        **{"signal": None, "started": moment(NOW - 723.0), "ended": None, "reason": "", "own_failure": ""},
        **{"lost_peer": "", "max_rss_kb": 0, "cpu_s": 0.0, "log": f"/jobs/logs/{name}.log"},
    }
    return {**value, **more}


def names(workers: int, servers: int = 2) -> list[str]:
    return ["scheduler", *(f"server-{rank}" for rank in range(servers)), *(f"worker-{rank}" for rank in range(workers))]


def host_of(name: str, hosts: int) -> str:
    role, _, rank = name.partition("-")
    return f"gpu{int(rank) % hosts + 1:02}" if role == "worker" else "gpu01"


def state(workers: int, hosts: int = 4, **more: Any) -> dict[str, Any]:
    tasks = []
    for number, name in enumerate(names(workers)):
        fails = name == "worker-1"
        how: dict[str, Any] = {"code": 1, "ended": moment(NOW - 62.0)} if fails else {}
        tasks.append(task(name, host_of(name, hosts), "failed" if fails else "running", pid=4000 + number, **how))
    value = {
        **{
            "schema": "distrun.job/1",
            "version": 1,
            "id": "calm-otter-7f3",
            "state": "running",
            "name": "",
            "cwd": "/w",
        },
        **{"backend": "ssh", "command": ["python", "train.py", "--kv-store", "dist_sync"]},
        **{"hosts": [f"gpu{number + 1:02}" for number in range(hosts)], "created": moment(NOW - 730.0)},
        **{"updated": moment(NOW - 1.0), "finished": None, "exit_code": None, "reason": None, "message": None},
        "tasks": tasks,
    }
    return {**value, **more}


def task_metrics(name: str, number: int) -> dict[str, Any]:
    value: dict[str, Any] = {
        **{"cpu": 0.5 + number % 5 / 10, "rss": (200 + number) * 2**20, "limit": 2 * 2**30, "processes": 2},
        **{"read": 1000.0, "write": 20000.0, "output_age_s": float(number % 9), "condition": "", "why": ""},
    }
    role, _, rank = name.partition("-")
    if role != "worker":
        return value
    value.update(gpu=0.8, gpu_mem=3 * 2**30, report={"step": 610 + number, "total": 1000, "values": {"loss": 0.41}})
    word = WORDS.get(int(rank), "")
    if word == "stalled":
        value.update(condition=word, cpu=0.0, output_age_s=340.0, why="no output, step, store call or CPU for 5m40s")
    elif word == "straggler":
        value.update(condition=word, why="last in 14 of 20 rounds, 0.31 s behind")
    elif word == "waiting":
        value.update(condition=word, why="for worker-3 (pull of fc1.weight, 12 s)")
    return value


def metrics(workers: int, hosts: int = 4) -> dict[str, Any]:
    every = [name for name in names(workers) if name != "worker-1"]
    host = {
        **{"heard_s": 0.4, "cores": 64, "cpu": 0.31, "load": 20.5, "mem_used": 100 * 2**30, "mem_total": 512 * 2**30},
        **{"disk_free": 800 * 2**30, "disk_total": 2**40, "net_rx": 12e6, "net_tx": 11e6, "clock_offset_s": 0.002},
        "gpus": [{"uuid": "GPU-1", "index": 0, "name": "H100", "util": 0.8, "mem_used": 3e9, "mem_total": 80e9}],
    }
    servers = {
        f"server-{rank}": {
            **{"keys": 12, "bytes": 5e7, "rounds": 610, "push_s": 40.0, "pull_s": 41.0, "in_s": 4e6, "out_s": 4.1e6},
            **{"queue": rank, "waiting": 3, "staleness_max": 0, "staleness_mean": 0.0, "lags": {"4": 0.31, "0": 0.01}},
        }
        for rank in range(2)
    }
    wave = [float(number % 7) for number in range(30)]
    return {
        "schema": "distrun.metrics/1",
        "time": NOW,
        "progress": {
            **{"step": 610, "total": 1000, "phase": 0, "fraction": 0.61, "eta_s": 462.0, "rate": 0.84},
            **{"loss": 0.4123, "values": {"loss": 0.4123}, "slowest": "worker-4"},
        },
        "hosts": {f"gpu{number + 1:02}": host for number in range(hosts)},
        "tasks": {name: task_metrics(name, number) for number, name in enumerate(every)},
        "store": {
            **{"servers": servers, "scheduler": {"members": workers + 3, "barriers": 3, "barrier_waiting": 0}},
            **{"push_s": 80.0, "pull_s": 82.0, "round_s": 0.84},
        },
        "history": {"cpu": wave, "net": wave, "push_s": wave, "pull_s": wave},
        "reports": {
            "loss": [[10 * number, 12.0 * number, 2.3 / (1 + number / 5)] for number in range(62)],
            "accuracy": [[50 * number, 60.0 * number, number / 14] for number in range(13)],
        },
    }


def events() -> Iterable[dict[str, Any]]:
    yield {"event": "state", "state": "running", "time": moment(NOW - 723.0)}
    yield {
        **{"event": "exited", "task": "worker-1", "host": "gpu02", "code": 1, "signal": None, "stopped": False},
        **{"reason": "", "time": moment(NOW - 62.0)},
    }
    yield {"event": "said", "level": "warning", "text": "gpu03: disk nearly full", "time": moment(NOW - 30.0)}


ERROR = (
    "Traceback (most recent call last):",
    '  File "train.py", line 88, in <module>',
    "    main()",
    "RuntimeError: CUDA out of memory",
)
