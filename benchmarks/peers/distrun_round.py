"""One worker of a push-and-pull round with distrun's dist_sync store: MODEL ROUNDS."""

from __future__ import annotations

import sys
import time

import numpy as np
import shapes
from report import WARM_UP, report

from distrun_runtime import kvstore


def main() -> None:
    """Run the rounds, check every one, and print the report on rank 0."""
    model, rounds = sys.argv[1], int(sys.argv[2])
    with kvstore.create("dist_sync") as kv:
        gradients = [np.ones(shape, np.float32) for shape in shapes.MODELS[model]()]
        outs = [np.zeros_like(gradient) for gradient in gradients]
        keys = list(range(len(gradients)))
        kv.init(keys, gradients)
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            for gradient in gradients:
                gradient.fill(number)
            kv.barrier()
            begin = time.perf_counter()
            kv.push(keys, gradients)
            kv.pull(keys, out=outs)
            times.append(time.perf_counter() - begin)
            for key in keys:
                found = outs[key].flat[0], outs[key].flat[-1], gradients[key].flat[0]
                if found != (number * kv.num_workers, number * kv.num_workers, number):
                    sys.exit("distrun_round.py: round %d, key %d: %r" % (number, key, found))
        if kv.rank == 0:
            report("distrun", model, kv.num_workers, sum(gradient.nbytes for gradient in gradients), times)


if __name__ == "__main__":
    main()
