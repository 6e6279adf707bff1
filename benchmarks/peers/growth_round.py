"""One worker of a job whose CPU time and memory are measured: SHAPES ROUNDS none|sgd [list|empty].

SHAPES: a model, or KEYSxFLOATS. Every worker prints what its own preparing and checking took; rank 0 also what all
processes of the job took, and the memory of the servers. All of them are children of one agent (local launcher).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Dict, List

import numpy as np
import shapes
from report import KINDS, WARM_UP, sent, summed

from distrun_runtime import kvstore

RATE, MOMENTUM = 1e-4, 0.9
TICKS = os.sysconf("SC_CLK_TCK")


def tasks() -> List[Path]:
    """Return the /proc folders of the job's processes: those of this one's parent."""
    parent = str(os.getppid())
    return [path for path in Path("/proc").glob("[0-9]*") if stat(path)[1:2] == [parent]]


def stat(path: Path) -> List[str]:
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended meanwhile
        return []


def cpu_s(processes: List[Path]) -> float:
    """Return user and system time of the processes."""
    return sum(int(number) for path in processes for number in stat(path)[11:13]) / TICKS


def servers_of(processes: List[Path]) -> List[Path]:
    return [path for path in processes if (path / "cmdline").read_bytes().endswith(b"\0server\0")]


def peaks(processes: List[Path]) -> List[int]:
    """Return the greatest resident memory of each server so far, in bytes."""
    files = [path / "status" for path in servers_of(processes)]
    lines = [line for file in files for line in file.read_text().splitlines() if "VmHWM" in line]
    return [int(line.split()[1]) * 1024 for line in lines]


def read_in_place(processes: List[Path]) -> List[int]:
    """Return the bytes of each server's resident memory that other processes share with it: what workers send."""
    found = []
    for path in servers_of(processes):
        found.append(0)
        is_others = False
        for line in (path / "smaps").read_text().splitlines():
            if "/memfd:distrun-" in line:
                is_others = "/memfd:distrun-%s " % path.name not in line
            elif line.startswith("Rss:") and is_others:
                found[-1] += int(line.split()[1]) * 1024
                is_others = False
    return found


class Expected:
    """The elements of each key's value after each round; there are as many different ones as `KINDS`."""

    def __init__(self, rule: str, workers: int) -> None:
        self._rule, self._workers = rule, workers
        self.weight: Dict[int, float] = dict.fromkeys(range(KINDS), 1.0)
        self._velocity: Dict[int, float] = dict.fromkeys(range(KINDS), 0.0)

    def round(self, number: int) -> None:
        """Take in the gradients of all workers."""
        for kind in range(KINDS):
            gradient = summed(kind, self._workers, number)
            self._velocity[kind] = MOMENTUM * self._velocity[kind] - RATE * gradient
            self.weight[kind] = gradient if self._rule == "none" else self.weight[kind] + self._velocity[kind]


def main() -> None:
    names, rounds, rule = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with kvstore.create("dist_sync") as kv:
        # `empty`: arrays that servers read where they are.
        make = kv.empty if sys.argv[4:] == ["empty"] else np.empty
        gradients = [make(shape, np.float32) for shape in shapes.named(names)]
        outs = [make(gradient.shape, np.float32) for gradient in gradients]
        for gradient, out in zip(gradients, outs, strict=True):
            gradient.fill(1)
            out.fill(0)
        keys = list(range(len(gradients)))
        kv.barrier()
        processes = tasks()
        before = peaks(processes)
        kv.init(keys, gradients)
        if rule == "sgd":
            kv.set_optimizer("sgd", learning_rate=RATE, momentum=MOMENTUM)
        expected = Expected(rule, kv.num_workers)
        own = begin = 0.0
        for number in range(1, rounds + WARM_UP + 1):
            if number == WARM_UP + 1:
                kv.barrier()
                own, begin = 0.0, cpu_s(processes)
                kv.barrier()
            start = time.thread_time()
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, kv.rank, number))
            own += time.thread_time() - start
            kv.push(keys, gradients)
            kv.pull(keys, out=outs)
            start = time.thread_time()
            expected.round(number)
            for key, out in enumerate(outs):
                weight = expected.weight[key % KINDS]
                if not (np.abs(out - np.float32(weight)) <= 1e-4 * abs(weight)).all():
                    sys.exit("growth_round.py: round %d, key %d: expected %r, found %r" % (number, key, weight, out))
            own += time.thread_time() - start
        kv.barrier()
        line: Dict[str, object] = {"rank": kv.rank, "own_s": own}
        if kv.rank == 0:
            line["cpu_s"] = cpu_s(processes) - begin
            line["bytes"] = sum(gradient.nbytes for gradient in gradients)
            line["before"], line["peak"] = before, peaks(processes)
            line["read_in_place"] = read_in_place(processes)
        kv.barrier()
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
