"""One worker of a job whose threads are measured: SHAPES ROUNDS list|pushpull. Linux.

    distrun launch --launcher local -n 2 -s 2 python benchmarks/peers/threads_round.py 1000x256 300 list

Rank 0 prints for each process of the job and each of its threads, for one round: CPU time, how long it waited for a
processor, and how often it was switched away from, by itself and by the kernel. Every rank prints its milliseconds.
A round includes the worker's own preparing and checking, and a barrier; the milliseconds do not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Dict, List, NamedTuple

import numpy as np
import shapes
from growth_round import tasks
from report import sent, summed

from distrun_runtime import kvstore

WARM_UP = 10


class Thread(NamedTuple):
    """What one thread has taken so far."""

    cpu_us: float
    queued_us: float
    left: int
    """Switches because it had nothing to do."""
    driven_out: int


def threads(processes: List[Path]) -> Dict[Path, Thread]:
    """Return the threads of some processes, by their folders in /proc."""
    found = {}
    for process in processes:
        for folder in (process / "task").iterdir():
            try:
                cpu_ns, queued_ns, _ = map(int, (folder / "schedstat").read_text().split())
                status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
            except OSError:  # it has ended meanwhile
                continue
            switches = int(status["voluntary_ctxt_switches"]), int(status["nonvoluntary_ctxt_switches"])
            found[folder] = Thread(cpu_ns / 1e3, queued_ns / 1e3, *switches)
    return found


def role(process: Path) -> str:
    words = (process / "cmdline").read_bytes().split(b"\0")
    return next((name for name in ("server", "scheduler") if name.encode() in words), "worker")


def show(before: Dict[Path, Thread], after: Dict[Path, Thread], rounds: int) -> None:
    print("%-24s %-16s %8s %8s %6s %6s" % ("process", "thread", "CPU us", "queue us", "left", "driven"))
    for folder in sorted(after, key=lambda each: (role(each.parent.parent), str(each))):
        old = before.get(folder, Thread(0, 0, 0, 0))
        used = [(new - was) / rounds for new, was in zip(after[folder], old, strict=True)]
        process = folder.parent.parent
        name = "main" if folder.name == process.name else (folder / "comm").read_text().strip()
        if used[0] >= 1:
            where = "%s %s" % (role(process), process.name)
            print("%-24s %-16s %8.0f %8.0f %6.1f %6.1f" % (where, name, *used))


def main() -> None:
    names, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with kvstore.create("dist_sync") as kv:
        gradients = [np.ones(shape, np.float32) for shape in shapes.named(names)]
        outs = [np.zeros_like(gradient) for gradient in gradients]
        keys = list(range(len(gradients)))
        kv.init(keys, gradients)
        processes = tasks() if kv.rank == 0 else []
        before: Dict[Path, Thread] = {}
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            if number == WARM_UP + 1:
                before = threads(processes)
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, kv.rank, number))
            kv.barrier()
            begin = time.perf_counter()
            if form == "pushpull":
                kv.pushpull(keys, gradients, outs)
            else:
                kv.push(keys, gradients)
                kv.pull(keys, out=outs)
            times.append(time.perf_counter() - begin)
            for key, out in enumerate(outs):
                if not (out == summed(key, kv.num_workers, number)).all():
                    sys.exit("threads_round.py: round %d, key %d: %r" % (number, key, out))
        kv.barrier()
        if kv.rank == 0:
            show(before, threads(processes), rounds)
        kv.barrier()
        low, middle, high = np.percentile(np.array(times[WARM_UP:]) * 1e3, (10, 50, 90))
        print("rank %d: %.2f ms a round (10%%: %.2f, 90%%: %.2f)" % (kv.rank, middle, low, high), flush=True)


if __name__ == "__main__":
    main()
