"""The dense part of MXNet's nightly/dist_sync_kvstore.py as a training script: run by every worker of a real job."""

from __future__ import annotations

import sys

import numpy as np

from distrun_runtime import kvstore

RATE = 2
REPEAT = 3
SMALL, BIG = (2, 3), (1200, 1200)

kv = kvstore.create(sys.argv[1])
keys = {"3": SMALL, "5": SMALL, "7": SMALL, "99": BIG, "fp16": SMALL, "fp16big": BIG}
dtypes = {key: "float16" if key.startswith("fp16") else "float32" for key in keys}
kv.init(list(keys), [np.ones(shape, dtypes[key]) for key, shape in keys.items()])
kv.set_optimizer("test", rescale_grad=RATE)
n = kv.num_workers
for step in range(REPEAT):
    for key, shape in keys.items():
        kv.push(key, np.full(shape, kv.rank + 1, dtypes[key]))
    for key, shape in keys.items():
        out = np.zeros(shape, dtypes[key])
        kv.pull(key, out)
        expected = 1 + RATE * n * (n + 1) / 2 * (step + 1)
        assert (out == expected).all(), (key, step, out.ravel()[0], expected)
kv.barrier()
print("worker %d of %d: %d steps exact" % (kv.rank, n, REPEAT), flush=True)
