"""Measure what an update rule adds to a round on a server, beside a copy of the bytes that the rule reads and writes.

    python benchmarks/rules.py --write          # docs/benchmarks.md

One process does what a server does with all shards of a model: it adds up the gradients of two workers and makes one
step of the rule. The same sum without a rule, and the copy, take turns with it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent / "peers"))  # behind this folder: both have a module `report`

import shapes

from distrun_runtime.arrays.device import CpuDevice
from distrun_runtime.ops import optimizers, update

WORKERS = 2
SHARD = 1 << 18
"""Elements of a shard: 1 MiB, as servers have it."""
FLOAT = np.dtype(np.float32)
LR = 0.01
RULES: dict[str, tuple[str, dict[str, object]]] = {
    "sgd, momentum": ("sgd", {"learning_rate": LR, "momentum": 0.9}),
    "sgd, momentum, wd": ("sgd", {"learning_rate": LR, "momentum": 0.9, "wd": 1e-4}),
    "adam": ("adam", {}),
    "adam, wd": ("adam", {"wd": 1e-4}),
}

Way = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """CPU seconds, one a repetition."""

    rule: list[float]
    """The sum of the gradients and the step."""
    plain: list[float]
    """The sum alone."""
    copy: list[float]

    def ratios(self) -> list[float]:
        """Return what the rule adds, divided by the copy."""
        return [(rule - plain) / copy for rule, plain, copy in zip(self.rule, self.plain, self.copy, strict=True)]

    def wholes(self) -> list[float]:
        """Return rule and sum, divided by the copy."""
        return [rule / copy for rule, copy in zip(self.rule, self.copy, strict=True)]


def ways(name: str, model: str) -> list[Way]:
    """Return what is measured: a round with the rule, one without, and the copy."""
    kind, params = RULES[name]
    rule, device, rng = optimizers.RULES[kind](params), CpuDevice(), np.random.default_rng(0)
    size = sum(math.prod(shape) for shape in shapes.MODELS[model]())
    weight: Any = rng.normal(0, 0.1, size).astype(FLOAT)
    gradients = [rng.normal(0, 0.01, size).astype(FLOAT) for _ in range(WORKERS)]
    state = rule.new_state(weight)
    arrays = {each: value for each, value in state.items() if isinstance(value, np.ndarray)}
    shards = [slice(begin, min(begin + SHARD, size)) for begin in range(0, size, SHARD)]
    # The rule reads and writes the weight and each array of its state, and reads the gradient. A copy of n bytes reads
    # n and writes n; so half as many make it as much memory in all.
    moved = size * (2 * (1 + len(arrays)) + 1) // 2
    source, target, total = np.ones(moved, FLOAT), np.ones(moved, FLOAT), np.ones(size, FLOAT)

    def with_rule() -> None:
        updates = state["updates"]
        for run in shards:
            part: optimizers.State = {"updates": updates, **{each: value[run] for each, value in arrays.items()}}
            given = [gradient[run] for gradient in gradients]
            update.step(rule, weight[run], given, part, optimizers.Knobs(), device=device)
        state["updates"] = part["updates"]

    def without_rule() -> None:
        for run in shards:
            device.sum([gradient[run] for gradient in gradients], total[run])

    return [with_rule, without_rule, lambda: np.copyto(target, source)]


def measure(name: str, model: str, repeats: int) -> Times:
    """Let the three take turns; the first turn is not counted."""
    three = ways(name, model)
    turns = [[timed(way) for way in three] for _ in range(repeats + 1)][1:]
    return Times(*(list(each) for each in zip(*turns, strict=True)))


def timed(way: Way) -> float:
    """Return the CPU seconds that a call takes: other processes of the machine are not in them."""
    begin = time.thread_time()
    way()
    return time.thread_time() - begin


def table(found: dict[str, Times]) -> str:
    """Return milliseconds, and medians of the ratios with their ranges."""
    rows = ["| rule | sum and rule | sum alone | copy | rule / copy | sum and rule / copy |", "|---" * 6 + "|"]
    for name, times in found.items():
        cells = ["%.1f" % (statistics.median(each) * 1e3) for each in (times.rule, times.plain, times.copy)]
        cells += ["%.2f (%.2f-%.2f)" % spread(each) for each in (times.ratios(), times.wholes())]
        rows.append("| %s | %s |" % (name, " | ".join(cells)))
    return "\n".join(rows)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, least and greatest."""
    return statistics.median(values), min(values), max(values)


HEADING = "What a rule adds on a server"
SECTION = """\
Measured by `benchmarks/rules.py`, in one process with one thread. The tensors of `%s` (float32) are in shards of 1 MiB.
For each shard the gradients of two workers are added up, and the rule makes a step of weight and state. The sum alone
is what a server does without a rule. The copy is numpy's, of two arrays that are so large that it reads and writes as
many bytes in all as the rule does: weight and state once each way, and the gradient once.

Milliseconds of CPU time, and ratios: rule / copy is what the rule adds to the sum, divided by the copy; the goal is at
most 1.5 for sgd with momentum and 2 for adam. Medians of %d repetitions, which take turns, with their ranges.

%s

%s
%s"""


def main() -> None:
    """Measure, print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(shapes.MODELS), default="resnet50")
    parser.add_argument("--repeats", type=int, default=15, help="repetitions (default 15, after 1 to warm up)")
    parser.add_argument("--note", default="", help="a line for the page: what else the machine did")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    options = parser.parse_args()

    text = table({name: measure(name, options.model, options.repeats) for name in RULES})
    print(text)
    if options.write:
        import report

        note = "* %s\n" % options.note if options.note else ""
        circumstances = report.circumstances("rules.py", "--note")
        report.write(HEADING, SECTION % (options.model, options.repeats, text, circumstances, note))


if __name__ == "__main__":
    main()
