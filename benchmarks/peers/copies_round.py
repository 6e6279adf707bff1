"""The copies and additions that a round on one host needs, and nothing else: MODEL ROUNDS list|empty|view.

`list`: each worker copies its gradients into shared memory, the sums are made there, and each worker copies them out.
`empty`: the gradients are in shared memory already. `view`: the sums are read where they are, too. Each of the workers
adds its part of the elements, as servers would. Rank 0 forks the workers, so that they have memory in common; the other
ranks of the job do nothing.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import time
from typing import List

import numpy as np
import shapes
from report import WARM_UP, report, sent, summed

ITEM = 4
"""Bytes of a float32."""


def shared(size: int) -> np.ndarray:
    """Return an array that forked children have too."""
    return np.frombuffer(mmap.mmap(-1, size * ITEM), np.float32)


def main() -> None:
    """Run the rounds, check every sum, and print a report for each worker."""
    model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    workers = int(os.environ["DISTRUN_WORLD_SIZE"])
    if int(os.environ["DISTRUN_RANK"]) != 0:
        return
    sizes = [int(np.prod(shape)) for shape in shapes.MODELS[model]()]
    ends = np.cumsum(sizes).tolist()
    begins = [0, *ends[:-1]]
    contributions = [shared(ends[-1]) for _ in range(workers)]
    total = shared(ends[-1])
    barrier = multiprocessing.get_context("fork").Barrier(workers)

    def work(rank: int) -> None:
        mine = contributions[rank]
        own = np.zeros(ends[-1], np.float32)
        out = np.zeros(ends[-1], np.float32)
        gradients = mine if form != "list" else own
        result = total if form == "view" else out
        keys = list(zip(begins, ends, strict=True))
        part = slice(ends[-1] * rank // workers, ends[-1] * (rank + 1) // workers)
        times: List[float] = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, (begin, end) in enumerate(keys):
                gradients[begin:end] = sent(key, rank, number)
            barrier.wait()
            started = time.perf_counter()
            if form == "list":
                for begin, end in keys:
                    mine[begin:end] = own[begin:end]
                barrier.wait()
            np.add(contributions[0][part], contributions[-1][part], out=total[part])
            for other in contributions[1:-1]:
                np.add(total[part], other[part], out=total[part])
            barrier.wait()
            if form != "view":
                for begin, end in keys:
                    out[begin:end] = total[begin:end]
            times.append(time.perf_counter() - started)
            for key, (begin, end) in enumerate(keys):
                if not (result[begin:end] == summed(key, workers, number)).all():
                    sys.exit("copies_round.py: round %d, key %d is wrong" % (number, key))
        report("copies", model, rank, times)

    context = multiprocessing.get_context("fork")
    others = [context.Process(target=work, args=(rank,)) for rank in range(workers)]
    for process in others:
        process.start()
    for process in others:
        process.join()
    sys.exit(max(process.exitcode or 0 for process in others))


if __name__ == "__main__":
    main()
