"""What watching a job costs: processor time of `distrun top` while every number of every task changes twice a second.

A process plays the coordinator: it sends metrics twice a second over a socket. Another one is the dashboard as shipped,
on a pseudo terminal that takes all it is given. Starting it is not counted.

    python benchmarks/dashboard.py --write
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "support"))

import report  # noqa: E402
import snapshots  # noqa: E402

from distrun.client import ControlConnection  # noqa: E402
from distrun.dashboard.loop import Dashboard, Signals  # noqa: E402
from distrun.dashboard.source import FrameSource  # noqa: E402
from distrun.dashboard.terminal import Terminal  # noqa: E402
from distrun_runtime.contract import session  # noqa: E402

HEADING = "Watching a job"
GOAL = 5.0
"""Percent of a core, at 200 tasks."""
WARM_S = 3.0
TEXT = """\
Measured by `benchmarks/dashboard.py`. `distrun top` of a job all of whose numbers change twice a second: frames of
metrics and, once a second, of the job's state are read and decoded, and a picture is drawn on a pseudo terminal that
takes everything. The goal is 5 %% of a core with 200 tasks.

| tasks | hosts | terminal | part of a core | bytes a second to the terminal |
|---|---|---|---|---|
%s

%s"""


class Folder:
    """What the dashboard needs of a job's folder."""

    id = "calm-otter-7f3"
    path = Path("/nonexistent")
    is_finished = False

    def __init__(self, tasks: int, hosts: int) -> None:
        self._state = snapshots.state(tasks, hosts)

    def state(self) -> dict[str, Any]:
        """Return what state.json holds."""
        return self._state

    def tail(self, task: str, lines: int) -> list[str]:
        """Return the end of a log."""
        return list(snapshots.ERROR)

    def log_path(self, task: str) -> Path:
        """Return where a log is."""
        return self.path


def feed(stream: socket.socket, tasks: int, hosts: int) -> None:
    """Send frames until the other side has gone."""
    number = 0
    try:
        while True:
            metrics = snapshots.metrics(tasks, hosts)
            metrics["time"] = time.time()
            for at, each in enumerate(metrics["tasks"].values()):
                each.update(cpu=(at + number) % 10 / 10, rss=(at + number) * 2**20, output_age_s=float(number % 7))
            stream.sendall(session.encode({"type": "metrics", "metrics": metrics}))
            if number % 2 == 0:
                stream.sendall(session.encode({"type": "state", "state": snapshots.state(tasks, hosts)}))
            number += 1
            time.sleep(0.5)
    except OSError:
        os._exit(0)


def show(stream: socket.socket, tasks: int, hosts: int) -> None:
    """Be the dashboard."""
    folder: Any = Folder(tasks, hosts)
    connection = ControlConnection(stream)
    with Signals() as signals, Terminal() as terminal:
        source = FrameSource(folder, lambda found: connection)
        source.start(connection)
        Dashboard(folder, source, terminal, signals).run()


def seconds_of(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(tasks: int, size: tuple[int, int], seconds: float) -> tuple[float, float]:
    """Return percent of a core, and bytes a second."""
    hosts = max(1, tasks // 8)
    ours, its = socket.socketpair()
    feeder = os.fork()
    if feeder == 0:
        its.close()
        feed(ours, tasks, hosts)
    ours.close()
    pid, screen = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        try:
            show(its, tasks, hosts)
        finally:
            os._exit(0)
    its.close()
    taken = 0
    began, used = time.monotonic() + WARM_S, 0.0
    while time.monotonic() < began + seconds:
        if used == 0.0 and time.monotonic() >= began:
            used, taken = seconds_of(pid), 0
        if select.select([screen], [], [], 0.05)[0]:
            taken += len(os.read(screen, 65536))
    spent = seconds_of(pid) - used
    for each in (pid, feeder):
        os.kill(each, signal.SIGKILL)
        os.waitpid(each, 0)
    return spent / seconds * 100, taken / seconds


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="measured time of each row")
    parser.add_argument("--tasks", type=int, nargs="*", default=[8, 40, 200])
    parser.add_argument("--write", action="store_true", help="write the section of docs/benchmarks.md")
    options = parser.parse_args(argv)
    rows, worst = [], 0.0
    for tasks in options.tasks:
        for size in ((80, 24), (200, 50)):
            percent, rate = measure(tasks, size, options.seconds)
            worst = max(worst, percent) if tasks <= 200 else worst
            rows.append(f"| {tasks} | {max(1, tasks // 8)} | {size[0]}x{size[1]} | {percent:.1f} % | {rate:.0f} |")
            print(rows[-1], flush=True)
    if options.write:
        report.write(HEADING, TEXT % ("\n".join(rows), report.circumstances("dashboard.py")))
    return 0 if worst <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
