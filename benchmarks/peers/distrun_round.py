"""One worker of push-and-pull rounds with distrun's dist_sync store: MODEL ROUNDS list|two|keys|priorities."""

from __future__ import annotations

import sys
import time

import numpy as np
import shapes
from report import WARM_UP, report, sent, summed

from distrun_runtime import kvstore


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with kvstore.create("dist_sync") as kv:
        gradients = [np.ones(shape, np.float32) for shape in shapes.MODELS[model]()]
        outs = [np.zeros_like(gradient) for gradient in gradients]
        keys = list(range(len(gradients)))
        kv.init(keys, gradients)
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, kv.rank, number))
            kv.barrier()
            begin = time.perf_counter()
            if form == "list":
                kv.pushpull(keys, gradients, out=outs)
            elif form == "two":
                kv.push(keys, gradients)
                kv.pull(keys, out=outs)
            else:
                pending = []
                for key in keys:
                    priority = -key if form == "priorities" else 0
                    pending.append(kv.push(key, gradients[key], priority, wait=False))
                    pending.append(kv.pull(key, outs[key], priority, wait=False))
                for each in pending:
                    each.wait()
            times.append(time.perf_counter() - begin)
            for key, out in enumerate(outs):
                if not (out == summed(key, kv.num_workers, number)).all():
                    sys.exit("distrun_round.py: round %d, key %d: %r" % (number, key, out))
        report("distrun", model, kv.rank, times)


if __name__ == "__main__":
    main()
