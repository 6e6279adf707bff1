"""One worker of a push-and-pull round of one large tensor: COMPRESSION MAGNITUDE ROUNDS.

COMPRESSION is `none` or a type of `set_gradient_compression`; MAGNITUDE is the standard deviation of the gradients.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import shapes
from report import WARM_UP, report

from distrun_runtime import kvstore


def main() -> None:
    """Run the rounds, check every one, and print the report on rank 0."""
    compression, magnitude, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    (shape,) = shapes.MODELS["one"]()
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": compression})
        # The same on all workers: then every sum is a multiple of what one of them sends.
        gradient = np.random.default_rng(0).normal(0, magnitude, shape).astype(np.float32)
        sent = gradient.astype(np.float16) if compression == "fp16" else gradient
        expected, out = sent.astype(np.float32) * kv.num_workers, np.empty_like(gradient)
        kv.init(0, gradient)
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            out.fill(0)
            kv.barrier()
            begin = time.perf_counter()
            kv.push(0, gradient)
            kv.pull(0, out=out)
            times.append(time.perf_counter() - begin)
            if compression in ("none", "fp16") and not np.array_equal(out, expected):
                sys.exit("compressed_round.py: round %d: the sum is not that of what was sent" % number)
        if kv.rank == 0:
            report("distrun", compression, kv.rank, times)


if __name__ == "__main__":
    main()
