"""One worker of rounds from arrays on a GPU: MODEL ROUNDS STORE COPIES ARRAYS.

STORE is `dist_sync` or `dist_device_sync`, COPIES how many arrays of each key a worker has (one for each device), and
ARRAYS `cupy` or `numpy`. A round is one `pushpull` of all keys, until the results are in the arrays.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

import shapes
from report import WARM_UP, report, sent, summed

from distrun_runtime import kvstore


def ways_of(library: str) -> tuple[Any, Callable[[], None]]:
    """Return a module that makes arrays, and what waits until their memory is as the program has it."""
    module = importlib.import_module(library)
    if library == "numpy":
        return module, lambda: None
    return module, module.cuda.get_current_stream().synchronize


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, rounds, store, copies, library = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    module, wait = ways_of(library)
    with kvstore.create(store) as kv:
        sizes = shapes.named(model)
        gradients = [[module.ones(shape, "float32") for _ in range(copies)] for shape in sizes]
        outs = [[module.zeros(shape, "float32") for _ in range(copies)] for shape in sizes]
        keys = list(range(len(sizes)))
        kv.init(keys, [each[0] for each in gradients])
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, arrays in enumerate(gradients):
                for each in arrays:
                    each.fill(sent(key, kv.rank, number))
            wait()
            kv.barrier()
            begin = time.perf_counter()
            kv.pushpull(keys, gradients, out=outs)
            wait()
            times.append(time.perf_counter() - begin)
            for key, arrays in enumerate(outs):
                expected = copies * summed(key, kv.num_workers, number)
                for each in arrays:
                    if not bool((each == expected).all()):
                        sys.exit("gpu_round.py: round %d, key %d: %r" % (number, key, each))
        report(store, model, kv.rank, times)


if __name__ == "__main__":
    main()
