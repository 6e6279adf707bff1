"""Measure float16: our conversions beside numpy's casts, and rounds with `fp16` compression beside rounds without.

    python benchmarks/halves.py --write         # docs/benchmarks.md

Gradients become small while a training goes on, and numpy's cast from float32 to float16 takes many times as long for
numbers below 6.1e-5 (float16's subnormal range) as for others. So everything is measured at several magnitudes.
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
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from distrun_runtime.arrays.dtypes import narrow, widen

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "peers" / "compressed_round.py"
MAGNITUDES = (1.0, 1e-3, 1e-4, 1e-6)
SIZE = 1_000_000
REPEATS = 9
"""Calls a run; its value is their median."""
RUN_TIMEOUT_S = 600
HALF = np.dtype(np.float16)

Casts = dict[tuple[float, str], float]
Rounds = dict[tuple[float, str], float]


def casts(runs: int) -> Casts:
    """Return seconds by magnitude and conversion: medians of the runs' medians, numpy and ours by turns."""
    found: dict[tuple[float, str], list[float]] = {}
    for _ in range(runs):
        for magnitude in MAGNITUDES:
            single = np.random.default_rng(0).normal(0, magnitude, SIZE).astype(np.float32)
            half = narrow(single, HALF)
            ways: dict[str, Callable[[], object]] = {
                "numpy to float16": lambda values=single: values.astype(HALF),
                "to float16": lambda values=single: narrow(values, HALF),
                "numpy to float32": lambda values=half: values.astype(np.float32),
                "to float32": lambda values=half: widen(values),
            }
            for name, way in ways.items():
                found.setdefault((magnitude, name), []).append(statistics.median(map(timed, [way] * REPEATS)))
    return {cell: statistics.median(values) for cell, values in found.items()}


def timed(way: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def rounds(magnitudes: list[float], options: argparse.Namespace) -> Rounds:
    """Return seconds a round by magnitude and compression, medians of the runs; what failed is absent."""
    found: dict[tuple[float, str], list[float]] = {}
    for run in range(options.runs):
        for magnitude in magnitudes:
            for compression in ("none", "fp16"):
                seconds = measure(compression, magnitude, options)
                if seconds is not None:
                    found.setdefault((magnitude, compression), []).append(seconds)
                    say("%s at %g, run %d: %.1f ms a round" % (compression, magnitude, run + 1, seconds * 1e3))
    return {cell: statistics.median(values) for cell, values in found.items()}


def measure(compression: str, magnitude: float, options: argparse.Namespace) -> float | None:
    """Run one job and return its median seconds a round; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(options.workers), "-s", str(options.servers), "--timeout", str(RUN_TIMEOUT_S)]
    command += [sys.executable, str(SCRIPT), compression, repr(magnitude), str(options.rounds), options.model]
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or len(lines) != 1:
        say("%s: exit code %d from:  %s" % (compression, result.returncode, shlex.join(command)))
        say(result.stderr[-2000:])
        return None
    return statistics.median(json.loads(lines[0])["times_s"])


def cast_table(found: Casts) -> str:
    """Return milliseconds a conversion of a million elements, and in brackets ours divided by numpy's."""
    rows = ["| magnitude | numpy to float16 | to float16 | numpy to float32 | to float32 |", "|---|---|---|---|---|"]
    for magnitude in sorted({magnitude for magnitude, _ in found}, reverse=True):
        cells = ["%g" % magnitude]
        for name in ("to float16", "to float32"):
            theirs, ours = found[magnitude, "numpy " + name], found[magnitude, name]
            cells += ["%.2f" % (theirs * 1e3), "%.2f (%.2f)" % (ours * 1e3, ours / theirs)]
        rows.append("| %s |" % " | ".join(cells))
    return "\n".join(rows)


def round_table(magnitudes: list[float], found: Rounds) -> str:
    """Return milliseconds a round, and in brackets `fp16` divided by no compression."""
    rows = ["| magnitude | none | fp16 |", "|---|---|---|"]
    for magnitude in magnitudes:
        none, half = found.get((magnitude, "none")), found.get((magnitude, "fp16"))
        cells = [
            "failed" if none is None else "%.1f" % (none * 1e3),
            "failed" if half is None else "%.1f" % (half * 1e3),
        ]
        if none is not None and half is not None:
            cells[1] += " (%.2f)" % (half / none)
        rows.append("| %g | %s |" % (magnitude, " | ".join(cells)))
    return "\n".join(rows)


HEADING = "float16"
SECTION = """\
Measured by `benchmarks/halves.py`. Values are normally distributed; the magnitude is their standard deviation.

Milliseconds to convert 1,000,000 elements, and in brackets distrun's time divided by that of numpy's cast.

%s

Milliseconds a round of one tensor of 67 MB in a `dist_sync` store, without compression and with `{"type": "fp16"}`, and
in brackets the second divided by the first. All processes share one machine, whose loopback is faster than any
network: this is what compression costs, not what it saves.

%s

%s
* %d workers, %d servers; medians of %d runs, each the median of %d conversions or of %d rounds after the warm-up.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("halves.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the tables, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, help="runs of everything (default 5)")
    parser.add_argument("--rounds", type=int, default=6, help="rounds a run (default 6, after 6 to warm up)")
    parser.add_argument("--magnitudes", nargs="*", type=float, default=[1.0, 1e-6], help="of the rounds' gradients")
    parser.add_argument("--model", default="one", help="a model, or KEYSxFLOATS; the page has `one` (default)")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    first = cast_table(casts(options.runs))
    print(first)
    found = rounds(options.magnitudes, options)
    second = round_table(options.magnitudes, found)
    print(second)
    if options.write:
        import report

        counts = (options.workers, options.servers, options.runs, REPEATS, options.rounds)
        note = "* %s\n" % options.note if options.note else ""
        report.write(HEADING, SECTION % (first, second, report.circumstances("halves.py", "--note"), *counts, note))
    sys.exit(0 if len(found) == 2 * len(options.magnitudes) else 1)


if __name__ == "__main__":
    main()
