"""Measure how CPU time grows with workers, servers and keys, and how much memory servers take; write the tables.

    python benchmarks/growth.py --write         # docs/benchmarks.md; Linux

The CPU time is that of all processes of a job, workers, servers and scheduler, between two barriers. What the workers
need to rewrite their gradients and to compare every element of every result is taken off.
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "peers" / "growth_round.py"
RUN_TIMEOUT_S = 300
SHARES = 100_000
"""So many times a worker exchanges a key, about, are measured in a run."""
LEAST, MOST = 4, 400
"""Rounds of a run."""


@dataclass(frozen=True)
class Case:
    """One row."""

    workers: int = 2
    servers: int = 2
    keys: int = 1000
    floats: int = 256

    @property
    def rounds(self) -> int:
        """Rounds that are measured."""
        return max(LEAST, min(MOST, SHARES // (self.keys * self.workers)))


@dataclass(frozen=True)
class Run:
    """What a job took."""

    cpu_s: float
    """Between the barriers, without preparing and checking."""
    bytes: int
    """Of the parameters."""
    before: int
    """Bytes of memory of all servers, before the first parameter."""
    peak: int
    read_in_place: int
    """Bytes of that which are memory of the workers."""


SERIES = {
    "workers": [Case(workers=count) for count in (1, 2, 4, 8)],
    "servers": [Case(servers=count) for count in (1, 2, 4, 8)],
    "keys": [Case(keys=count) for count in (1, 10, 100, 1000)],
    "small keys": [Case(keys=count, floats=4) for count in (1000, 10_000, 100_000)],
}
SMALLEST = {name: cases[:2] for name, cases in SERIES.items()}
MEMORY_WORKERS, MEMORY_SERVERS, MEMORY_ROUNDS = 2, 2, 5


def measure(workers: int, servers: int, words: list[str]) -> Run | None:
    """Run one job; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(workers), "-s", str(servers), "--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
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
    (first,) = [line for line in lines if line["rank"] == 0]
    cpu_s = first["cpu_s"] - sum(line["own_s"] for line in lines)
    return Run(cpu_s, first["bytes"], sum(first["before"]), sum(first["peak"]), sum(first["read_in_place"]))


def measure_all(series: dict[str, list[Case]], runs: int, most: int) -> dict[Case, list[float]]:
    """Return CPU microseconds for a worker, key and round by case; the cases take turns. What failed is absent.

    Arguments:
        most: at most so many rounds a run.
    """
    found: dict[Case, list[float]] = {}
    cases = dict.fromkeys(case for cases in series.values() for case in cases)
    for number in range(runs):
        for case in cases:
            rounds = min(most, case.rounds)
            words = ["%dx%d" % (case.keys, case.floats), str(rounds), "none"]
            run = measure(case.workers, case.servers, words)
            if run is not None:
                each = run.cpu_s / (rounds * case.workers * case.keys) * 1e6
                found.setdefault(case, []).append(each)
                say("run %d, %s: %.1f us" % (number + 1, case, each))
    return found


def table(series: dict[str, list[Case]], found: dict[Case, list[float]]) -> str:
    """Return the medians, and how each has grown: divided by the least of the rows above it in its series."""
    rows = ["| series | workers | servers | keys | floats | CPU us | range | growth |", "|---" * 8 + "|"]
    for name, cases in series.items():
        least: float | None = None
        for case in cases:
            cells = [name, *map(str, (case.workers, case.servers, case.keys, case.floats))]
            values = found.get(case)
            if values:
                median = statistics.median(values)
                growth = "" if least is None else "%.2f" % (median / least)
                least = median if least is None else min(least, median)
                cells += ["%.1f" % median, "%.1f-%.1f" % (min(values), max(values)), growth]
            else:
                cells += ["failed", "", ""]
            rows.append("| %s |" % " | ".join(cells))
    return "\n".join(rows)


def memory_table(run: Run | None) -> str:
    """Return what the servers took beyond what they had before the first parameter, beside the goal's bound."""
    rows = ["| | MB | times the parameters |", "|---|---|---|"]
    if run is None:
        return "\n".join([*rows, "| failed | | |"])
    parts = {
        "parameters": run.bytes,
        "all servers, before the first parameter": run.before,
        "all servers, at most": run.peak,
        "of that, memory of workers that servers read in place": run.read_in_place,
        "the servers' own, without what they had before": run.peak - run.before - run.read_in_place,
        "bound: 2 x parameters, momentum, one sum": 4 * run.bytes,
        "bound, with the gradients of all workers": (3 + MEMORY_WORKERS) * run.bytes,
    }
    rows += ["| %s | %.0f | %.2f |" % (name, part / 1e6, part / run.bytes) for name, part in parts.items()]
    return "\n".join(rows)


HEADING = "Growth"
SECTION = """\
Measured by `benchmarks/growth.py`. A worker pushes all keys in one call and pulls them in another. CPU us: user and
system time of all processes of the job (workers, servers, scheduler) in %d to %d rounds, without what the workers take
to rewrite their gradients and to compare the results; divided by rounds x workers x keys. So it is what one key costs
one worker in one round, on all sides. Growth: that figure divided by the least of the rows above it in its series; the
goal is at most 1.5. With few keys it is the cost of the messages, which more keys share. `keys` has values of 256
floats, `small keys` of 4, so that only rows of one series are to be compared.

%s

Memory of the servers, for resnet50 with sgd and momentum, %d workers and %d servers, %d rounds: the greatest resident
memory (VmHWM) of each, added up. On one host servers read what workers send where it is, in memory that workers have
anyway to send from; that is the workers'. The goal counts two times the parameters, the state of the rule and one
round; a round is one sum at least, and the gradients of all workers if they are held until it is complete.

%s

%s
* Medians of %d runs, with their ranges.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("growth.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the tables, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of every row (default 3)")
    parser.add_argument("--series", nargs="+", choices=list(SERIES), default=list(SERIES), help="(default: all)")
    parser.add_argument("--smallest", action="store_true", help="only the first two rows of each series, of few rounds")
    parser.add_argument("--memory", default="resnet50", metavar="SHAPES", help="a model, or KEYSxFLOATS")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    chosen = {name: (SMALLEST if options.smallest else SERIES)[name] for name in options.series}
    found = measure_all(chosen, options.runs, LEAST if options.smallest else MOST)
    first = table(chosen, found)
    print(first)
    memory = measure(MEMORY_WORKERS, MEMORY_SERVERS, [options.memory, str(MEMORY_ROUNDS), "sgd"])
    second = memory_table(memory)
    print(second)
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        job = (MEMORY_WORKERS, MEMORY_SERVERS, MEMORY_ROUNDS)
        circumstances = report.circumstances("growth.py", "--note")
        report.write(HEADING, SECTION % (LEAST, MOST, first, *job, second, circumstances, options.runs, note))
    counts = [len(found.get(case, [])) for cases in chosen.values() for case in cases]
    sys.exit(0 if memory is not None and set(counts) == {options.runs} else 1)


if __name__ == "__main__":
    main()
