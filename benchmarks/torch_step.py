"""Measure training steps of torch with distrun beside DistributedDataParallel, and write the table.

    scripts/install peers                           # once: torch
    python benchmarks/torch_step.py --write         # docs/benchmarks.md

A step is forward, backward and update of a perceptron on each rank's own batch. All systems take turns, as in
`benchmarks/round.py`, and a step takes as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from round import reports_of, slowest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "benchmarks" / "peers"
RUN_TIMEOUT_S = 300
MODELS = ("1M", "10M", "25M", "300 small")
SYSTEMS = {
    "DistributedOptimizer": "opt",
    "DistributedOptimizer, overlap": "opt-overlap",
    "trainer": "trainer",
    "trainer, overlap": "overlap",
    "DDP, distrun": "ddp-distrun",
    "DDP": "ddp",
    "one rank alone": "none",
}
"""Each with its form in the script."""
OTHERS = ("DDP", "one rank alone")
"""They have no servers."""
FOLDER = "/tmp/distrun-torch-step"
"""Where the script is on other hosts."""

Found = dict[tuple[str, str], list[float]]


def measure(system: str, model: str, options: argparse.Namespace) -> float | None:
    """Run `system` once and return its median seconds a step; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix"]
    command += ["--hosts", options.hosts, "--sync-dst-dir", FOLDER] if options.hosts else ["--launcher", "local"]
    command += ["-n", str(options.workers), "-s", "0" if system in OTHERS else str(options.servers)]
    command += ["--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    python = str(options.peers / "torch" / "bin" / "python")
    script = "torch_step.py" if options.hosts else str(SCRIPTS / "torch_step.py")
    command += [python, script, model, str(options.steps), SYSTEMS[system]]
    reports = reports_of(command, "%s, %s" % (system, model), options.workers, bool(options.hosts))
    return None if reports is None else slowest([each["times_s"] for each in reports])


def measure_all(options: argparse.Namespace) -> Found:
    """Return seconds of a step by model and system; the systems take turns."""
    found: Found = {}
    for model in options.models:
        for run in range(options.runs):
            for system in options.systems:
                seconds = measure(system, model, options)
                if seconds is not None:
                    found.setdefault((model, system), []).append(seconds)
                    say("%s, run %d, %s: %.1f ms a step" % (model, run + 1, system, seconds * 1e3))
    return found


def table(models: list[str], systems: list[str], found: Found) -> str:
    """Return milliseconds a step, and in brackets that time divided by DDP's, the median of the runs' ratios."""
    rows = ["| model | %s |" % " | ".join(systems), "|---" * (len(systems) + 1) + "|"]
    for model in models:
        cells = []
        for system in systems:
            times, others = found.get((model, system), []), found.get((model, "DDP"), [])
            if not times:
                cells.append("failed")
                continue
            text = "%.1f" % (statistics.median(times) * 1e3)
            if system not in OTHERS and len(others) == len(times):
                ratios = [mine / theirs for mine, theirs in zip(times, others, strict=True)]
                text += " (%.2f, %.2f-%.2f)" % (statistics.median(ratios), min(ratios), max(ratios))
            cells.append(text)
        rows.append("| %s | %s |" % (model, " | ".join(cells)))
    return "\n".join(rows)


HEADING = "A step of torch"
SECTION = """\
Measured by `benchmarks/torch_step.py`. A step of a perceptron of torch: forward and backward of a batch of 16, one
thread each rank, and the update (sgd with momentum). `1M`: 4 layers, 1.1 million parameters; `10M`: 10 layers, 10.5
million; `25M`: 24 layers, 25 million; `300 small`: 150 layers, 300 tensors of 16 or 256 numbers. DistributedOptimizer
has torch's SGD, whose gradients it averages through %d servers. trainer is distrun's `Trainer` with `dist_sync`, whose
servers update the weights. `overlap`: with `overlap=True`. DDP is torch's DistributedDataParallel over gloo, whose
ranks update by themselves; `DDP, distrun`: the same over the process group `distrun`. `one rank alone`: the same steps
without communication, by as many processes.

Milliseconds a step, and in brackets the time divided by DDP's (below 1.00: distrun is faster): the median of the ratios
of the runs, and their range.

%s

%s
* %d ranks%s; %d runs, in which the systems take turns. A run's time is the median of %d steps after the warm-up; a step
  takes as long as its slowest rank.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("torch_step.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="rows (default: all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="columns (default: all)")
    parser.add_argument("--steps", type=int, default=20, help="steps a run (default 20, after 6 to warm up)")
    parser.add_argument("--runs", type=int, default=5, help="runs of every system (default 5)")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--hosts", help="H1,H2...: between hosts that ssh reaches, which have .venv and .peers as here")
    parser.add_argument("--links", default="", help="with --hosts: what limits them, for the heading of the section")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    found = measure_all(options)
    text = table(options.models, options.systems, found)
    print(text)
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("torch_step.py", "--peers", "--note")
        hosts = len(options.hosts.split(",")) if options.hosts else 0
        links = ", " + options.links if options.links else ""
        where = " on %d hosts%s" % (hosts, links) if hosts else ""
        counts = (options.workers, where, options.runs, options.steps)
        report.write(HEADING + where, SECTION % (options.servers, text, circumstances, *counts, note))
    sys.exit(1 if "failed" in text else 0)


if __name__ == "__main__":
    main()
