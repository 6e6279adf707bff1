"""Measures how long a shell waits for a completion, with 1,000 jobs in the store, beside a bare `python -c pass`.

    python benchmarks/completion.py --write

The questions and the bare start take turns. A row has the medians of the differences.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import report

HEADING = "Completion"
GOAL_MS = 60.0
JOBS = 1000
WORK = {
    "options": ("launch", "--"),
    "launchers": ("launch", "--launcher", ""),
    "jobs": ("status", ""),
    "jobs that are not over": ("kill", ""),
    "jobs by the begin of a name": ("status", "name-99"),
    "tasks of a job": ("logs", "name-999", ""),
    "hosts": ("launch", "-H", "hosts", "--hosts", ""),
}
TEXT = """\
Measured by `benchmarks/completion.py`: what a shell waits for when Tab is pressed, with 1,000 jobs in the store, half
of them with names, 16 tasks in each, and 100 hosts. Milliseconds above a bare `python -c pass`: wall time, and
processor time. The goal is 60 ms.

| work | above a bare start | processor time |
|---|---|---|
%s

%s"""


def fill(folder: Path) -> None:
    """Make the job store, and a hosts file."""
    (folder / "hosts").write_text("".join(f"host{number:03d} slots=2\n" for number in range(100)))
    tasks = [{"name": f"worker-{rank}", "role": "worker", "host": "h1"} for rank in range(16)]
    for number in range(JOBS):
        named = number % 2
        job = folder / "distrun" / "jobs" / (f"name-{number}-7f3" if named else f"calm-otter-{number:03x}")
        job.mkdir(parents=True)
        (job / "request.json").write_text(json.dumps({"name": f"name-{number}" if named else ""}))
        (job / "state.json").write_text(json.dumps({"tasks": tasks}))
        if number % 3:
            (job / "outcome.json").touch()


def run(argv: Sequence[str], env: Mapping[str, str]) -> tuple[float, float]:
    """Run it without its output; return wall and processor time in milliseconds."""
    begin = time.perf_counter()
    null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    pid = os.posix_spawn(sys.executable, [sys.executable, *argv], env, file_actions=null)
    _, status, used = os.wait4(pid, 0)
    assert status == 0, argv
    return (time.perf_counter() - begin) * 1e3, (used.ru_utime + used.ru_stime) * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--write", action="store_true", help="write the section of docs/benchmarks.md")
    options = parser.parse_args(argv)
    rows, worst = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        os.chdir(folder)
        env = {**os.environ, "XDG_STATE_HOME": folder}
        for name, words in WORK.items():
            asked = ["-m", "distrun", "_complete", "zsh", *words]
            runs = [(run(["-c", "pass"], env), run(asked, env)) for _ in range(options.runs)]
            above = [[ours[at] - bare[at] for bare, ours in runs] for at in range(2)]
            wall_ms, processor_ms = map(statistics.median, above)
            worst = max(worst, wall_ms)
            rows.append(f"| {name} | {wall_ms:.0f} ms | {processor_ms:.0f} ms |")
            print(rows[-1], flush=True)
        os.chdir(report.ROOT)
    if options.write:
        report.write(HEADING, TEXT % ("\n".join(rows), report.circumstances("completion.py")))
    return 0 if worst <= GOAL_MS else 1


if __name__ == "__main__":
    sys.exit(main())
