"""Measure a model whose layers are on two devices beside the model on one, and write the table.

    scripts/install peers                       # once: torch
    python benchmarks/pipeline.py --write       # docs/benchmarks.md

The model is the language model of `examples/lstm_ptb.py`; a device is one CPU thread. All rows take turns. What more
stages would give is computed from the measured times of the layers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from round import reports_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "runtime"))

from distrun_runtime.parallel import partition  # noqa: E402  # of this checkout

SCRIPT = ROOT / "benchmarks" / "peers" / "pipeline_step.py"
RUN_TIMEOUT_S = 300
LAYERS = 8
"""LSTM layers of the script's model, between an embedding and a decoder."""


@dataclass(frozen=True)
class Row:
    """A row of the table: how many stages, cut how, run how."""

    name: str
    stages: int
    placement: str = "balanced"
    schedule: str = "threads"

    is_whole: bool = False
    """Whether the batch is not cut."""

    @property
    def workers(self) -> int:
        """Processes that take part."""
        return 1 if self.schedule == "threads" else self.stages


ONE = Row("one device", 1, is_whole=True)
PARTS = Row("one device, in micro-batches", 1)
ROWS = (
    ONE,
    PARTS,
    Row("two threads", 2),
    Row("two threads, naive", 2, "naive"),
    Row("two workers, GPipe", 2, schedule="gpipe"),
    Row("two workers, 1F1B", 2, schedule="1f1b"),
)


def run(row: Row, seconds: list[float], options: argparse.Namespace) -> list[dict[str, Any]] | None:
    """Run a row once; return what each process reports; None, and a word why, if it failed."""
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local"]
    command += ["-n", str(row.workers), "-s", "0", "--timeout", str(RUN_TIMEOUT_S), "--env", "OMP_NUM_THREADS=1"]
    command += ["--env", f"PYTHONPATH={ROOT / 'runtime'}"]
    if seconds:
        command += ["--env", "LAYER_SECONDS=" + ",".join(map(str, seconds))]
    command += [str(options.peers / "torch" / "bin" / "python"), str(SCRIPT), str(row.stages), row.placement]
    command += [str(1 if row.is_whole else options.parts), str(options.steps), row.schedule]
    return reports_of(command, row.name, row.workers, False)


def idle_share(reports: list[dict[str, Any]], stages: int) -> float:
    """Return the share of the stages' time in which they did not compute."""
    busy_s = sum(sum(map(sum, report["busy_s"])) for report in reports)
    return 1 - busy_s / (
        stages * sum(max(each) for each in zip(*(report["times_s"] for report in reports), strict=True))
    )


def step_s(stage_s: list[float], parts: int) -> float:
    """Return how long a step takes if stages compute as long as this for a part, and nothing else costs time.

    The first part passes all stages; each further one ends as much later as the slowest stage takes.
    """
    return sum(stage_s) + (parts - 1) * max(stage_s)


def naive(stages: int) -> list[int]:
    """Return layers of each stage as MXNet's lstm_ptb.py cut them: equally many LSTM layers, and the ends."""
    counts = [0] * stages
    for layer in range(LAYERS):
        counts[layer * stages // LAYERS] += 1
    counts[0] += 1
    counts[-1] += 1
    return counts


def computed(seconds: list[float], parts: int) -> str:
    """Return the table of what is computed: by how much more stages are faster than one."""
    one = parts * sum(seconds)
    lines = []
    for stages in (2, 4, 8):
        found = []
        for counts in (partition(seconds, stages), naive(stages)):
            ends = list(itertools.accumulate(counts, initial=0))
            stage_s = [sum(seconds[begin:end]) for begin, end in itertools.pairwise(ends)]
            found.append(f"{one / step_s(stage_s, parts):.2f} ({max(stage_s) * stages / sum(stage_s):.2f})")
        bubble = (stages - 1) / (parts + stages - 1)
        lines.append(f"| {stages} | {' | '.join(found)} | {stages * (1 - bubble):.2f} |")
    return "\n".join(lines)


HEADING = "A model over several devices"
SECTION = """\
Measured by `benchmarks/pipeline.py`. A step (forward, backward, SGD) of a language model: an embedding of 10,000 words,
8 LSTM layers and a decoder, 256 wide; 32 sentences of 32 words, in {parts} micro-batches. A device is one thread on one
core of this machine. `threads` is `Pipeline`, `workers` is `WorkerPipeline` over gloo, each worker a process;
`naive`: 4 LSTM layers for each stage, as in MXNet's example; otherwise cut by measured times.

| | ms a step | time of one device / this | idle | (S - 1) / (M + S - 1) | memory, MB, by process |
|---|---|---|---|---|---|
{rows}

Idle: the share of the stages' time in which they did not compute: by the times of the layers where stages are threads,
by processor time where they are workers. Memory: the most that a process had during the steps, above what it had before
the model was made; where stages are threads it is that of both.

**Computed**, not measured: from the times of the layers for a micro-batch, as if copies and Python cost nothing. Speed
against one device, and in brackets the slowest stage's time divided by the mean; with equal stages it would be the last
column.

| stages | balanced | naive | equal stages |
|---|---|---|---|
{computed}

No two GPUs were to be had: what they would give is not known.

{circumstances}
* {runs} runs, in which the rows take turns, of {steps} steps each after the warm-up; medians.
"""


def rows_of(found: dict[Row, list[list[dict[str, Any]]]], options: argparse.Namespace) -> str:
    """Return the rows of the measured table."""
    lines = []
    for row in ROWS:
        times = [slowest(reports) for reports in found[row]]
        ratios = [slowest(one) / slowest(own) for one, own in zip(found[ONE], found[row], strict=False)]
        idle = formula = "-"
        if row.stages > 1:
            formula = f"{(row.stages - 1) / (options.parts + row.stages - 1):.2f}"
            idle = f"{statistics.median(idle_share(reports, row.stages) for reports in found[row]):.2f}"
        memory = [statistics.median(each) for each in zip(*(sizes(reports) for reports in found[row]), strict=True)]
        cells = (
            row.name,
            f"{statistics.median(times) * 1e3:.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            idle,
            formula,
            " + ".join(f"{size:.0f}" for size in memory),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def slowest(reports: list[dict[str, Any]]) -> float:
    """Return the median of the steps, each of which takes as long as its slowest process."""
    return statistics.median(map(max, zip(*(report["times_s"] for report in reports), strict=True)))


def sizes(reports: list[dict[str, Any]]) -> list[float]:
    """Return what the processes needed, the largest first: the order of their lines is not that of the stages."""
    return sorted((report["memory_mb"] for report in reports), reverse=True)


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=int, default=4, help="micro-batches (default 4)")
    parser.add_argument("--steps", type=int, default=8, help="steps a run (default 8, after 6 to warm up)")
    parser.add_argument("--runs", type=int, default=3, help="runs of every row (default 3)")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where scripts/install made them")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()
    first = run(PARTS, [], options)
    if first is None:
        sys.exit(1)
    seconds: list[float] = first[0]["seconds"]
    found: dict[Row, list[list[dict[str, Any]]]] = {row: [] for row in ROWS}
    for number, row in itertools.product(range(options.runs), ROWS):
        reports = run(row, seconds, options)
        if reports is None:
            sys.exit(1)
        found[row].append(reports)
        print(f"pipeline.py: {row.name}, run {number + 1}: {slowest(reports) * 1e3:.0f} ms a step", file=sys.stderr)
    import report

    text = SECTION.format(
        rows=rows_of(found, options),
        computed=computed(seconds, options.parts),
        circumstances=report.circumstances("pipeline.py", "--peers"),
        **{name: getattr(options, name) for name in ("parts", "runs", "steps")},
    )
    print(text)
    if options.write:
        report.write(HEADING, text)


if __name__ == "__main__":
    main()
