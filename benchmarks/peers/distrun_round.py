"""One worker of push-and-pull rounds with distrun's dist_sync store: MODEL ROUNDS FORM (those of `round.Work`)."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
import shapes
from report import WARM_UP, report, sent, summed

from distrun_runtime import kvstore


def check(results: Sequence[np.ndarray], workers: int, number: int) -> None:
    """Read every element of a round's results; end the process if one is wrong."""
    for key, result in enumerate(results):
        if not (result == summed(key, workers, number)).all():
            sys.exit("distrun_round.py: round %d, key %d: %r" % (number, key, result))


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    with kvstore.create("dist_sync") as kv:
        gradients = [np.ones(shape, np.float32) for shape in shapes.named(model)]
        if form in {"empty", "view"}:
            gradients = [kv.empty(shape) for shape in shapes.named(model)]
            for gradient in gradients:
                gradient.fill(1)
        outs = [kv.empty(each.shape) if form == "empty" else np.zeros_like(each) for each in gradients]
        keys = list(range(len(gradients)))
        kv.init(keys, gradients)
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, kv.rank, number))
            kv.barrier()
            begin = time.perf_counter()
            if form == "view":
                pushed = kv.push(keys, gradients, wait=False)
                with kv.view(keys) as seen:
                    times.append(time.perf_counter() - begin)
                    check(seen, kv.num_workers, number)
                begin = time.perf_counter()
                pushed.wait()
                times[-1] += time.perf_counter() - begin
                continue
            if form in {"list", "empty"}:
                kv.pushpull(keys, gradients, out=outs)
            elif form == "two":
                kv.push(keys, gradients)
                kv.pull(keys, out=outs)
            elif form == "loop":
                for key in keys:
                    kv.push(key, gradients[key], -key)
                    kv.pull(key, outs[key], -key)
            else:
                pending = []
                for key in keys:
                    priority = -key if form == "priorities" else 0
                    pending.append(kv.push(key, gradients[key], priority, wait=False))
                    pending.append(kv.pull(key, outs[key], priority, wait=False))
                for each in pending:
                    each.wait()
            times.append(time.perf_counter() - begin)
            check(outs, kv.num_workers, number)
        report("distrun", model, kv.rank, times)


if __name__ == "__main__":
    main()
