"""Measure DDP with a hook that compresses beside DDP over gloo, on a slow link between hosts: time and accuracy.

    scripts/lab up 2
    scripts/lab fault rate h1 1000000; scripts/lab fault rate h2 1000000        # kbit/s
    scripts/lab shell python benchmarks/ddp_hook.py --hosts h1,h2 --links "1 Gbit/s" --write

The systems take turns, run by run. A step takes as long as its slowest rank. Accuracies are those of whole trainings
on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path
from typing import Any

from round import reports_of, slowest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "/tmp/distrun-ddp-hook"
"""Where the script is on the hosts."""
RUN_TIMEOUT_S = 600
STEPS, WARM_UP, WHOLE = 26, 6, 300
"""Steps of a run that is timed, the first of them, which are not (`peers/report.py`), and steps of a whole training."""
DATA = ("digits", "colours")
SYSTEMS = ("gloo", "fp16", "2bit", "topk")

Times = dict[tuple[str, str], list[float]]
"""Seconds a step of each run: the median; by data and system."""


def measure(data: str, system: str, steps: int, where: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train once, on hosts or here; return what the ranks report, or end the program with a word why it failed."""
    hosts = len(options.hosts.split(","))
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", *where]
    command += ["-n", str(hosts), "-s", str(0 if system == "gloo" else hosts)]
    command += ["--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    command += [str(options.peers / "torch" / "bin" / "python"), "ddp_hook.py", data, str(steps), system]
    reports = reports_of(command, f"{system}, {data}", hosts, on_hosts=True)
    if reports is None:
        sys.exit(1)
    return reports


def measure_times(options: argparse.Namespace) -> Times:
    """Return the times of all runs; the systems take turns."""
    where = ["--hosts", options.hosts, "--sync-dst-dir", FOLDER]
    found: Times = {}
    for number, data, system in itertools.product(range(options.runs), options.data, SYSTEMS):
        reports = measure(data, system, STEPS, where, options)
        seconds = slowest([each["times_s"] for each in reports])
        found.setdefault((data, system), []).append(seconds)
        say(f"run {number + 1}, {data}, {system}: {seconds * 1e3:.1f} ms a step")
    return found


def measure_accuracies(options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Return the accuracy after a whole training, by data and system: one run, here, as links change no numbers."""
    found = {}
    for data, system in itertools.product(options.data, SYSTEMS):
        found[data, system] = measure(data, system, WHOLE, ["--launcher", "local"], options)[0]["accuracy"]
        say(f"whole training, {data}, {system}: accuracy {found[data, system]:.3f}")
    return found


def table(data: list[str], times: Times, accuracies: dict[tuple[str, str], float]) -> str:
    """Return milliseconds a step, gloo's time divided by them, and the accuracy."""
    rows = [f"| images | {' | '.join(SYSTEMS)} |", "|---" * (len(SYSTEMS) + 1) + "|"]
    for name in data:
        cells = []
        for system in SYSTEMS:
            runs, theirs = times[name, system], times[name, "gloo"]
            text = f"{statistics.median(runs) * 1e3:.1f}"
            if system != "gloo":
                ratios = [other / run for run, other in zip(runs, theirs, strict=True)]
                text += f" ({statistics.median(ratios):.2f}, {min(ratios):.2f}-{max(ratios):.2f})"
            cells.append(f"{text}; {accuracies[name, system]:.3f}")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


HEADING = "DDP with compressed gradients over links of %s, %d hosts"
SECTION = """\
Measured by `benchmarks/ddp_hook.py`. The hosts are those of `scripts/lab`: network namespaces of one machine, so all
processes share its cores; each sends at most %s. On each host are a worker and a server. `gloo`: torch's
DistributedDataParallel as it is; the others: with distrun's `ddp_hook`, `topk` with a ratio of 0.01. numba is
installed. Batches of 16 a worker, plain SGD. gloo moves 34 MB a step out of each host and as much in.

* `digits`: scikit-learn's, 1437 to train with and 360 to test, a perceptron of 8.5 million parameters; a learning rate
  of 0.3, a threshold of 0.001 for `2bit`.
* `colours`: made images of 3 x 32 x 32 in 10 classes, 2400 to train with and 800 to test, two convolutions and two full
  layers with 8.4 million parameters; a learning rate of 0.1, a threshold of 0.02.

The rates, with gloo, and then the thresholds were chosen by the accuracy on a fifth of the images to train with, which
was left out of these trainings.

Milliseconds a step; in brackets gloo's time divided by them, the median of the runs' ratios and their range (the goal
for `2bit` is 4); and the accuracy on the test images after %d steps, of one training.

%s

%s
* %d runs, in which the systems take turns. A run's time is the median of %d steps.
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
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA), help="rows (default: all)")
    parser.add_argument("--runs", type=int, default=3, help="runs of every system (default 3)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    text = table(options.data, measure_times(options), measure_accuracies(options))
    print(text)
    if options.write:
        import report

        heading = HEADING % (options.links, len(options.hosts.split(",")))
        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("ddp_hook.py", "--peers", "--note")
        body = (WHOLE, text, circumstances, options.runs, STEPS - WARM_UP, note)
        report.write(heading, SECTION % (options.links, *body))


if __name__ == "__main__":
    main()
