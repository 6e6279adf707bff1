"""Measure DDP with a hook that compresses beside DDP over gloo, on a slow link between hosts: time and accuracy.

    scripts/lab up 2
    scripts/lab fault rate h1 1000000; scripts/lab fault rate h2 1000000        # kbit/s
    scripts/lab shell python benchmarks/ddp_hook.py --hosts h1,h2 --links "1 Gbit/s" --write

The systems take turns, run by run. A step takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from round import reports_of, slowest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "/tmp/distrun-ddp-hook"
"""Where the script is on the hosts."""
RUN_TIMEOUT_S = 600
EPOCHS = {"digits": 20, "colours": 8}
SYSTEMS = ("gloo", "fp16", "2bit", "topk")


class Run(NamedTuple):
    """What one run has found."""

    seconds: float
    """A step: the median."""
    accuracy: float


Found = dict[tuple[str, str], list[Run]]


def measure(data: str, system: str, options: argparse.Namespace) -> Run:
    """Train once; end the program with a word why if that failed."""
    hosts = len(options.hosts.split(","))
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--hosts", options.hosts]
    command += ["--sync-dst-dir", FOLDER, "-n", str(hosts), "-s", str(0 if system == "gloo" else hosts)]
    command += ["--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    command += [str(options.peers / "torch" / "bin" / "python"), "ddp_hook.py", data, str(EPOCHS[data]), system]
    reports = reports_of(command, f"{system}, {data}", hosts, on_hosts=True)
    if reports is None:
        sys.exit(1)
    return Run(slowest([each["times_s"] for each in reports]), reports[0]["accuracy"])


def measure_all(options: argparse.Namespace) -> Found:
    """Return the runs by data and system; the systems take turns."""
    found: Found = {}
    for data in options.data:
        for number in range(options.runs):
            for system in SYSTEMS:
                run = measure(data, system, options)
                found.setdefault((data, system), []).append(run)
                say(f"run {number + 1}, {data}, {system}: {run.seconds * 1e3:.1f} ms a step, {run.accuracy:.3f}")
    return found


def table(data: list[str], found: Found) -> str:
    """Return milliseconds a step, gloo's time divided by them, and the accuracy."""
    rows = [f"| images | {' | '.join(SYSTEMS)} |", "|---" * (len(SYSTEMS) + 1) + "|"]
    for name in data:
        cells = []
        for system in SYSTEMS:
            runs, theirs = found[name, system], found[name, "gloo"]
            text = f"{statistics.median(run.seconds for run in runs) * 1e3:.1f}"
            if system != "gloo":
                ratios = [other.seconds / run.seconds for run, other in zip(runs, theirs, strict=True)]
                text += f" ({statistics.median(ratios):.2f}, {min(ratios):.2f}-{max(ratios):.2f})"
            cells.append(f"{text}; {statistics.median(run.accuracy for run in runs):.3f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


HEADING = "DDP with compressed gradients over links of %s, %d hosts"
SECTION = """\
Measured by `benchmarks/ddp_hook.py`. The hosts are those of `scripts/lab`: network namespaces of one machine, so all
processes share its cores; each sends at most %s. On each host are a worker and a server. `gloo`: torch's
DistributedDataParallel as it is; the others: with distrun's `ddp_hook`, `2bit` with a threshold of 0.003 (digits) or
0.01, `topk` with a ratio of 0.01. Batches of 16 a worker, plain SGD. `digits`: scikit-learn's, %d epochs, a perceptron
of 1.1 million parameters; `colours`: made images of 3 x 32 x 32 in 10 classes, %d epochs, two convolutions and two full
layers with 2.1 million parameters.

Milliseconds a step; in brackets gloo's time divided by them, the median of the runs' ratios and their range (the goal
for `2bit` is 4); and the accuracy on images that were not trained with.

%s

%s
* %d runs, in which the systems take turns. A run's time is the median of its steps.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("ddp_hook.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--hosts", required=True, help="H1,H2...: hosts that ssh reaches, with .venv and .peers as here"
    )
    parser.add_argument("--links", required=True, help="what limits them, for the heading of the section")
    parser.add_argument("--data", nargs="+", choices=list(EPOCHS), default=list(EPOCHS), help="rows (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="runs of every system (default 3)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    text = table(options.data, measure_all(options))
    print(text)
    if options.write:
        import report

        heading = HEADING % (options.links, len(options.hosts.split(",")))
        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("ddp_hook.py", "--peers", "--note")
        body = (text, circumstances, options.runs, note)
        report.write(heading, SECTION % (options.links, EPOCHS["digits"], EPOCHS["colours"], *body))


if __name__ == "__main__":
    main()
