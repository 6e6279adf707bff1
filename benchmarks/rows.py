"""Pull rows of a row-sparse table beside as many values of a dense key, in the same rounds of one job.

python benchmarks/rows.py --write         # docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks" / "peers" / "rows_round.py"
RUN_TIMEOUT_S = 600

HEADING = "Pulling rows"
SECTION = """\
Measured by `benchmarks/rows.py`. Every worker of a `dist_sync` store pulls half of the rows of a table, %d rows of 16
float32, by `row_sparse_pull`: into a RowSparse or into an array, with row numbers in ascending order or shuffled. In
the same rounds it pulls as many values of a dense key.

Milliseconds a pull, and in brackets that time divided by the dense pull's of the same run: the median of the ratios of
the runs, and their range.

%s

%s
* %d workers, %d servers; %d runs. A run's time is the median of %d rounds after the warm-up; a pull takes as long as
  its slowest worker.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("rows.py: " + text, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, float] | None:
    """Run one job and return its median seconds of each kind of pull; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(options.workers), "-s", str(options.servers), "--timeout", str(RUN_TIMEOUT_S)]
    command += [sys.executable, str(SCRIPT), str(options.rows), str(options.rounds)]
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    reports = [json.loads(each) for each in re.findall(r"\{[^{}]*\}", result.stdout)]
    if result.returncode != 0 or len(reports) != options.workers:
        say("exit code %d: %s" % (result.returncode, result.stderr[-2000:]))
        return None
    return {
        kind: statistics.median(map(max, zip(*(each[kind] for each in reports), strict=True))) for kind in reports[0]
    }


def table(runs: list[dict[str, float]]) -> str:
    """Return milliseconds a pull, and in brackets its time divided by the dense one's."""
    rows = ["| pull | ms |", "|---|---|"]
    for kind in runs[0]:
        ratios = [run[kind] / run["dense"] for run in runs]
        text = "%.1f" % (statistics.median(run[kind] for run in runs) * 1e3)
        text += "" if kind == "dense" else " (%.1f, %.1f-%.1f)" % (statistics.median(ratios), min(ratios), max(ratios))
        rows.append("| %s | %s |" % (kind, text))
    return "\n".join(rows)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=600_000, help="of the table (default 600000)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds a run (default 8, after 6 to warm up)")
    parser.add_argument("--runs", type=int, default=5, help="runs (default 5)")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    runs = [found for found in (measure(options) for _ in range(options.runs)) if found is not None]
    if not runs:
        sys.exit(1)
    text = table(runs)
    print(text)
    if options.write:
        import report

        counts = (options.workers, options.servers, len(runs), options.rounds)
        note = "* %s\n" % options.note if options.note else ""
        report.write(HEADING, SECTION % (options.rows, text, report.circumstances("rows.py", "--note"), *counts, note))
    sys.exit(0 if len(runs) == options.runs else 1)


if __name__ == "__main__":
    main()
