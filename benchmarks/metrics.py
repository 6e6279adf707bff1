"""Measure what it costs to see a job: how much of a core its agents need; print the tables.

    python benchmarks/metrics.py agent          # Linux, a second core

Processes that do nothing are made for it, and ended with it. The figures are CPU time as the kernel counts it
(`/proc/PID/schedstat`), so it matters little what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

AGENT_HEADING = "Metrics: an agent"
AGENT_LIMIT = 0.003
"""Of a core, with TASKS tasks on a host of PROCESSES processes."""
TASKS, PROCESSES = 8, 1000
INTERVALS_S = (0.0, 1.0, 10.0)
"""0: the agent is not asked for samples."""
SETTLE_S = 8.0
"""From the first sample to the measurement: the helper starts, and all processes were seen."""
TASK = """\
import sys, time
sys.path.insert(0, sys.argv[1])
from distrun_runtime.contract.metrics import Sender
sender = Sender()
values = {"loss": 0.25, "accuracy": 0.75}
counters = {name: 12345678 for name in ("keys", "bytes", "bytes_in", "bytes_out", "rounds", "pushes", "pulls", "queue")}
for step in range(10**9):
    sender.send("report", step=step, total=10**9, values=values)
    sender.send("counters", role="server", values=counters)
    time.sleep(1.0)
"""
IDLE = """\
import os, signal, sys
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        signal.pause()
print("ready", flush=True)
sys.stdin.read()
os.killpg(0, signal.SIGKILL)
"""


@contextlib.contextmanager
def idle(count: int) -> Iterator[None]:
    """Have so many processes that do nothing."""
    command = [sys.executable, "-I", "-S", "-c", IDLE, str(count)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen(command, **pipes, start_new_session=True)  # type: ignore[call-overload]
    try:
        child.stdout.readline()
        yield
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()


def cpu_s(pids: list[int]) -> float:
    """Return the CPU time of processes, all threads of which are their first ones."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def measure_agent(interval_s: float, seconds: float) -> dict[str, float]:
    """Return shares of a core of the agent (and its guard) and of its helper, and the longest wait for an answer."""
    from agentkit import agent, python

    tasks = [python(TASK, f"worker-{rank}") for rank in range(TASKS)]
    tasks = [task._replace(argv=(*task.argv, str(ROOT / "runtime"))) for task in tasks]
    with agent(*tasks) as driver:
        driver.begin()
        for task in tasks:
            driver.spawn(task.name)
        if interval_s:
            driver.say("sample", interval_s=interval_s)
        listen(driver, SETTLE_S + interval_s)
        pids = [driver.agent_pid(), driver.child.pid]
        helpers = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_helper(int(name), pids[0])]
        before, before_helper, began = cpu_s(pids), cpu_s(helpers), time.monotonic()
        driver.frames.clear()
        waits = listen(driver, seconds)
        took = time.monotonic() - began
        found = {
            "agent": (cpu_s(pids) - before) / took,
            "helper": (cpu_s(helpers) - before_helper) / took,
            "wait_ms": max(waits) * 1000,
            "frames": sum(frame.type == "metrics" for frame in driver.frames),
        }
        driver.finish()
        return found


def is_helper(pid: int, parent: int) -> bool:
    """Return whether a process is the helper of an agent."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(words[1]) == parent and b"distrun-helper" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def listen(driver: Any, seconds: float) -> list[float]:
    """Take what an agent says for so long, and ping it every 5 s as a coordinator does; return how long it took."""
    waits: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        next_at = time.monotonic() + 5.0
        asked = time.monotonic()
        driver.say("ping", n=len(waits))
        driver.wait("pong", n=len(waits))
        waits.append(time.monotonic() - asked)
        while time.monotonic() < min(next_at, until):
            driver.hear(min(next_at, until) - time.monotonic())
    return waits


def agent_table(runs: int, seconds: float) -> tuple[str, bool]:
    """Measure, and return the table and whether the limit is kept."""
    rows = ["| samples | frames | agent and guard | helper | longest answer |", "|---|---|---|---|---|"]
    is_kept = True
    with idle(PROCESSES):
        for interval_s in INTERVALS_S:
            found = [measure_agent(interval_s, seconds) for _ in range(runs)]
            middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
            name = f"every {interval_s:g} s" if interval_s else "none"
            rows.append(
                f"| {name} | {middle['frames']:.0f} | {middle['agent']:.3%} | {middle['helper']:.3%}"
                f" | {middle['wait_ms']:.1f} ms |"
            )
            is_kept = is_kept and middle["agent"] + middle["helper"] <= AGENT_LIMIT
    return "\n".join(rows), is_kept


def main() -> None:
    """Measure a part, and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parts = parser.add_subparsers(dest="part", required=True)
    one = parts.add_parser("agent", help=f"{TASKS} tasks on a host of {PROCESSES} processes")
    one.add_argument("--seconds", type=float, default=60.0, help="of each run (default 60)")
    one.add_argument("--runs", type=int, default=3, help="of each row (default 3)")
    options = parser.parse_args()
    text, is_kept = agent_table(options.runs, options.seconds)
    print(text)
    print(f"limit: {AGENT_LIMIT:.1%} of a core, the helper included: {'kept' if is_kept else 'NOT kept'}")
    sys.exit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
