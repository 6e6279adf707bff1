"""Push and pull every tensor of a model, beside MXNet and gloo on the same machine, and write the table.

    scripts/install peers                       # once: the peers' virtual environments
    python benchmarks/round.py --write          # all systems that are there; docs/benchmarks.md

A round is what a training step moves: a gradient from every worker, the sum back to every worker. All systems are
started by `distrun launch --launcher local`, by turns: run 1 of every system, then run 2 of every system, so that
a disturbance of the machine meets all of them. A run's value is the median of its rounds; a table's the median of
the runs.
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
SCRIPTS = ROOT / "benchmarks" / "peers"
OURS = "distrun"
MODELS = ("resnet50", "vgg16", "one", "small")
RUN_TIMEOUT_S = 600


@dataclass(frozen=True)
class System:
    """One column of the table: how a round of it is started."""

    name: str
    python: str
    script: str
    launch: tuple[str, ...]
    """What `distrun launch` needs to know: who serves."""
    arguments: tuple[str, ...] = ()


def systems(peers: Path, servers: int) -> list[System]:
    """Return ours and those peers whose environment is there; say which are left out."""
    serve = ("-s", str(servers))
    known = [
        System(OURS, sys.executable, "distrun_round.py", serve),
        System("mxnet", str(peers / "mxnet/bin/python"), "mxnet_round.py", (*serve, "--ps", "command")),
        System("gloo", str(peers / "torch/bin/python"), "gloo_round.py", ("-s", "0"), ("plain",)),
        System("gloo-bucket", str(peers / "torch/bin/python"), "gloo_round.py", ("-s", "0"), ("bucket",)),
    ]
    for system in known:
        if not os.access(system.python, os.X_OK):
            say("%s is left out: no %s. To have it:  scripts/install peers" % (system.name, system.python))
    return [system for system in known if os.access(system.python, os.X_OK)]


def measure(system: System, model: str, options: argparse.Namespace) -> float | None:
    """Run `system` once and return its median seconds a round; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += [
        "-n",
        str(options.workers),
        *system.launch,
        "--timeout",
        str(RUN_TIMEOUT_S),
        "--env",
        "OMP_NUM_THREADS=1",
    ]
    command += [system.python, str(SCRIPTS / system.script), model, str(options.rounds), *system.arguments]
    # A job store of its own: a benchmark is nobody's job.
    with tempfile.TemporaryDirectory() as state:
        env = {**os.environ, "XDG_STATE_HOME": state}
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode != 0 or len(lines) != 1:
        say("%s, %s: exit code %d from:  %s" % (system.name, model, result.returncode, shlex.join(command)))
        say(result.stderr[-2000:])
        return None
    return float(json.loads(lines[0])["median_s"])


def measure_all(columns: list[System], options: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Return the median of the runs' medians, seconds, by (model, system); what failed is absent."""
    values: dict[tuple[str, str], list[float]] = {}
    for model in options.models:
        for run in range(options.runs):
            for system in columns:
                seconds = measure(system, model, options)
                if seconds is not None:
                    values.setdefault((model, system.name), []).append(seconds)
                    say("%s, run %d, %s: %.1f ms a round" % (model, run + 1, system.name, seconds * 1e3))
    return {cell: statistics.median(runs) for cell, runs in values.items()}


def table(columns: list[System], models: list[str], medians: dict[tuple[str, str], float]) -> str:
    """Return milliseconds a round, and in brackets ours divided by the peer's (below 1: we are faster)."""

    def cell(model: str, name: str) -> str:
        seconds, ours = medians.get((model, name)), medians.get((model, OURS))
        if seconds is None:
            return "failed"
        return "%.1f" % (seconds * 1e3) + ("" if ours is None or name == OURS else " (%.2f)" % (ours / seconds))

    names = [system.name for system in columns]
    rows = ["| model | %s |" % " | ".join(names), "|---" * (len(names) + 1) + "|"]
    rows += ["| %s | %s |" % (model, " | ".join(cell(model, name) for name in names)) for model in models]
    return "\n".join(rows)


HEADING = "A round of push and pull"
SECTION = """\
Measured by `benchmarks/round.py`. A round moves every tensor of a model (float32) from every worker to the sum
and back: `resnet50` 161 tensors, 102 MB; `vgg16` 32 tensors, 553 MB; `one` a tensor of 67 MB; `small` 1,000 tensors
of 1 KB. distrun and MXNet 1.9.1 (`dist_sync`, ps-lite) push and pull through servers; gloo (torch.distributed)
reduces among the workers, tensor by tensor or in buckets of 25 MB. Every process runs on this one machine, and a
system that needs more processes than the machine has cores is slowed by that.

Milliseconds a round, and in brackets distrun's time divided by that system's (below 1.00: distrun is faster).

%s

%s
* %d workers, %d servers; median of %d runs, each the median of %d rounds after the warm-up; the systems take turns.
%s"""


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("round.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--systems", nargs="+", help="only these columns (default: all that are there)")
    parser.add_argument("--rounds", type=int, default=8, help="rounds a run (default 8, after 2 to warm up)")
    parser.add_argument("--runs", type=int, default=3, help="runs of every system (default 3)")
    parser.add_argument("-n", "--workers", type=int, default=2)
    parser.add_argument("-s", "--servers", type=int, default=2)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    columns = [s for s in systems(options.peers, options.servers) if not options.systems or s.name in options.systems]
    medians = measure_all(columns, options)
    text = table(columns, options.models, medians)
    print(text)
    if options.write:
        import page

        counts = (options.workers, options.servers, options.runs, options.rounds)
        note = "* %s\n" % options.note if options.note else ""
        page.write(HEADING, SECTION % (text, page.circumstances("round.py", "--peers", "--note"), *counts, note))
    # What failed stands in the table and was said; the run as a whole did not succeed then.
    sys.exit(0 if len(medians) == len(columns) * len(options.models) else 1)


if __name__ == "__main__":
    main()
