"""Measure what a slow worker, computing, a busy thread and the size of values do to rounds; write the tables.

python benchmarks/conditions.py --write         # docs/benchmarks.md; Linux
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import growth

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "peers" / "condition_round.py"
RUN_TIMEOUT_S = 300
SLOWER = 5
SECONDS = 4
STEPS = 12
ROUNDS = 10
SIZES = (16, 4096, 16384, 262144, 4194304, 67108864, 268435456)
"""Floats of a value; from 64 KiB on its cost a byte is to be flat."""
FLAT_FROM = 16384
BYTES = 4 << 30
"""So many bytes are pushed in a run, about."""
PATHS = {"shared memory": "segments", "messages over TCP": "none"}

Report = dict[str, Any]


def run(workers: int, servers: int, paths: str, *words: str) -> list[Report] | None:
    """Run one job and return what each worker reports, by rank; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(workers), "-s", str(servers), "--timeout", str(RUN_TIMEOUT_S)]
    command += ["--env", "OMP_NUM_THREADS=1", "--env", "DISTRUN_DATA_PATHS=%s" % paths]
    command += [sys.executable, str(SCRIPT), *words]
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or len(lines) != workers:
        say("exit code %d from:  %s" % (result.returncode, shlex.join(command)))
        say(result.stderr[-2000:])
        return None
    return sorted(lines, key=lambda line: int(line["rank"]))


def repeated(runs: int, what: str, once: Callable[[], float | None], shown: str = "%.2f") -> list[float]:
    """Return what several runs have found, without those that failed."""
    found = []
    for number in range(runs):
        value = once()
        if value is not None:
            found.append(value)
            say("%s, run %d: %s" % (what, number + 1, shown % value))
    return found


def cell(values: Sequence[float], shown: str = "%.2f") -> str:
    """Return the median of values, and their range."""
    if not values:
        return "failed"
    median, least, most = (shown % each for each in (statistics.median(values), min(values), max(values)))
    return "%s (%s-%s)" % (median, least, most)


def slow_worker() -> float | None:
    """Return how fast the others are beside a slow one, as a part of what they are without."""
    even, uneven = (run(4, 2, "segments", "async", str(SECONDS), str(slower)) for slower in (1, SLOWER))
    if even is None or uneven is None:
        return None
    return min(float(b["rate"]) / float(a["rate"]) for a, b in zip(even[1:], uneven[1:], strict=True))


def hidden(paths: str) -> float | None:
    """Return which part of the communication is hidden behind computing, on the worker where it is least."""
    found = run(2, 2, paths, "overlap", str(STEPS))
    if found is None:
        return None
    return min(1 - (each["step_s"] - each["computing_s"]) / each["communication_s"] for each in found)


def beside_python(paths: str) -> float | None:
    """Return the rate of rounds beside a busy main thread, as a part of that beside an idle one."""
    idle, busy = (run(2, 2, paths, "busy", str(ROUNDS), each) for each in ("no", "yes"))
    if idle is None or busy is None:
        return None
    return max(each["round_s"] for each in idle) / max(each["round_s"] for each in busy)


def a_byte(floats: int, form: str) -> float | None:
    """Return nanoseconds of CPU time of all processes for each KB that a worker pushes and pulls."""
    rounds = max(3, min(200, BYTES // (2 * 4 * floats)))
    found = growth.measure(2, 2, ["1x%d" % floats, str(rounds), "none", form])
    return None if found is None else found.cpu_s / (rounds * 2 * 4 * floats / 1000) * 1e9


def size_table(runs: int) -> str:
    """Return the table of values of all sizes; the sizes take turns."""
    found: dict[tuple[int, str], list[float]] = {}
    for number in range(runs):
        for floats in SIZES:
            for form in ("list", "empty"):
                value = a_byte(floats, form)
                if value is not None:
                    found.setdefault((floats, form), []).append(value)
                    say("%d floats, %s, run %d: %.0f ns a KB" % (floats, form, number + 1, value))
    rows = [
        "| bytes of the value | ordinary arrays | growth | arrays of `kv.empty` | growth |",
        "|---|---|---|---|---|",
    ]
    for floats in SIZES:
        cells = []
        for form in ("list", "empty"):
            flat = [
                statistics.median(found[size, form]) for size in SIZES if size >= FLAT_FROM and (size, form) in found
            ]
            mine = found.get((floats, form), [])
            is_compared = floats >= FLAT_FROM and mine and flat
            cells += [cell(mine, "%.0f"), "%.2f" % (statistics.median(mine) / min(flat)) if is_compared else ""]
        rows.append("| %d | %s |" % (4 * floats, " | ".join(cells)))
    return "\n".join(rows)


def table(runs: int) -> str:
    """Return the table of what is done beside the rounds."""
    rows = ["| what | found | goal |", "|---|---|---|"]
    name = "dist_async, 4 workers, one computes %d times as long: rate of the others / without it" % SLOWER
    rows.append("| %s | %s | 0.9 |" % (name, cell(repeated(runs, "slow worker", slow_worker))))
    for way, paths in PATHS.items():
        values = repeated(runs, "hidden, %s" % way, lambda paths=paths: hidden(paths))
        rows.append("| computing as long as communicating, %s: hidden part | %s | 0.9 |" % (way, cell(values)))
    for (way, paths), goal in zip(PATHS.items(), ("0.5", "0.15"), strict=True):
        values = repeated(runs, "busy, %s" % way, lambda paths=paths: beside_python(paths))
        rows.append("| resnet50 beside a busy Python thread, %s: rate / idle | %s | %s |" % (way, cell(values), goal))
    return "\n".join(rows)


HEADING = "What else goes on"
SECTION = """\
Measured by `benchmarks/conditions.py`, all processes on one machine. Medians of the runs, with their ranges; the goal
is the least that is wanted.

%s

Computing takes a time and no processor, as an accelerator does. **Hidden**: %d keys of 4 MB. A step gives the
accelerator its forward by layer, as soon as that layer's key was waited for, then the backward; when a layer's backward
is over, its key is pushed and the pull begun (`pushpull(..., priority=-key, wait=False)`). Hidden is
1 - (step - computing) / communication; communication is the time of all keys with nothing else to do, and computing is
made as long. **Busy**: rounds of `resnet50` in one call, by a thread;
the main thread runs a loop in Python meanwhile.

Values of all sizes: nanoseconds of CPU time of all processes (2 workers, 2 servers) for each KB that a worker pushes
and pulls; growth is divided by the least from 64 KiB on, and is to be at most 1.5 there. Ordinary arrays are copied
into shared memory by the worker that pushes them; those of `kv.empty` are there already: the difference is what that
copy costs.

%s

%s
* Medians of %d runs, with their ranges.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("conditions.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the tables, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of every row (default 3)")
    parser.add_argument("--parts", nargs="+", choices=("beside", "sizes"), default=["beside", "sizes"])
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    first = table(options.runs) if "beside" in options.parts else ""
    second = size_table(options.runs) if "sizes" in options.parts else ""
    print(first, second, sep="\n\n")
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("conditions.py", "--note")
        report.write(HEADING, SECTION % (first, 16, second, circumstances, options.runs, note))
    sys.exit(1 if "failed" in first + second else 0)


if __name__ == "__main__":
    main()
