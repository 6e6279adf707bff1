"""One worker of rounds over a link whose bytes are counted: MODEL ROUNDS COMPRESSION FORM.

FORM is `pushpull`: all keys in one call; or `push`: all keys, then a barrier. COMPRESSION is `none` or a type of
`set_gradient_compression`. Every result of `pushpull` without compression is compared.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import shapes
from distrun_round import check
from report import WARM_UP, link_bytes, moved_since, report, sent

from distrun_runtime import kvstore


def main() -> None:
    """Run the rounds, check them, and print the report."""
    model, rounds, compression, form = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": compression})
        gradients = [np.ones(shape, np.float32) for shape in shapes.MODELS[model]()]
        outs = [np.zeros_like(each) for each in gradients]
        keys = list(range(len(gradients)))
        kv.init(keys, gradients)
        times, begun = [], (0, 0)
        warm_up = WARM_UP if compression == "none" else 10  # until compiled loops are ready
        for number in range(1, rounds + warm_up + 1):
            for key, gradient in enumerate(gradients):
                gradient.fill(sent(key, kv.rank, number))
            kv.barrier()
            if number == warm_up + 1:
                begun = link_bytes()
            begin = time.perf_counter()
            if form == "push":
                kv.push(keys, gradients)
                kv.barrier()
            else:
                kv.pushpull(keys, gradients, out=outs)
            times.append(time.perf_counter() - begin)
            if form != "push" and compression == "none":
                check(outs, kv.num_workers, number)
        kv.barrier()
        report("distrun", model, kv.rank, times[warm_up - WARM_UP :], moved_since(begun, rounds))


if __name__ == "__main__":
    main()
