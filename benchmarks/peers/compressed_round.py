"""One worker of push-and-pull rounds with compression: COMPRESSION MAGNITUDE ROUNDS [MODEL].

COMPRESSION is `none` or a type of `set_gradient_compression`; MAGNITUDE is the standard deviation of the gradients;
MODEL is one of `shapes.MODELS` (default: `one`) or KEYSxFLOATS. All tensors are pushed by one call and pulled by
another. Rank 0 prints the report line. There are so many rounds to warm up that servers have their compiled loops
ready.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import shapes
from report import WARM_UP, report

from distrun_runtime import kvstore


def main() -> None:
    """Run the rounds, check every one, and print the report."""
    compression, magnitude, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    model = sys.argv[4] if len(sys.argv) > 4 else "one"
    with kvstore.create("dist_sync") as kv:
        kv.set_gradient_compression({"type": compression})
        rng = np.random.default_rng(0)
        # The same on all workers: then every sum is a multiple of what one of them sends.
        gradients = [rng.normal(0, magnitude, shape).astype(np.float32) for shape in shapes.named(model)]
        sent = [each.astype(np.float16).astype(np.float32) if compression == "fp16" else each for each in gradients]
        # The values that are too small to be compressed travel as they are.
        sent = [each if given.nbytes >= 1024 else given for each, given in zip(sent, gradients, strict=True)]
        outs, keys = [np.empty_like(each) for each in gradients], list(range(len(gradients)))
        kv.init(keys, gradients)
        warm_up = 10 if sum(each.nbytes for each in gradients) > 10e6 else 100
        times = []
        for number in range(1, rounds + warm_up + 1):
            for out in outs:
                out.fill(0)
            kv.barrier()
            begin = time.perf_counter()
            kv.push(keys, gradients)
            kv.pull(keys, out=outs)
            times.append(time.perf_counter() - begin)
            if compression in ("none", "fp16"):
                for key, (given, out) in enumerate(zip(sent, outs, strict=True)):
                    if not np.array_equal(out, given * kv.num_workers):
                        sys.exit("compressed_round.py: round %d, key %d: not the sum of what was sent" % (number, key))
        if kv.rank == 0:
            report("distrun", compression, kv.rank, times[warm_up - WARM_UP :])


if __name__ == "__main__":
    main()
