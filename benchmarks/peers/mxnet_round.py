"""One process of a push-and-pull round with MXNet 1.9.1 and its ps-lite: MODEL ROUNDS. The role comes from DMLC_*."""

from __future__ import annotations

import sys
import time

import mxnet as mx  # serves and exits here if DMLC_ROLE is server or scheduler
import shapes
from report import WARM_UP, report

model, rounds = sys.argv[1], int(sys.argv[2])
kv = mx.kv.create("dist_sync")
gradients = [mx.nd.ones(shape) for shape in shapes.MODELS[model]()]
outs = [mx.nd.zeros(array.shape) for array in gradients]
keys = list(range(len(gradients)))
kv.init(keys, gradients)
times = []
for _ in range(rounds + WARM_UP):
    kv._barrier()
    begin = time.perf_counter()
    for key in keys:
        kv.push(key, gradients[key], priority=-key)
        kv.pull(key, out=outs[key], priority=-key)
    for out in outs:
        out.wait_to_read()
    times.append(time.perf_counter() - begin)
# MXNet lends the pushed array to the store as its receive buffer, so each round multiplies by the workers.
expected = kv.num_workers ** (rounds + WARM_UP)
for array in (outs[0], outs[-1]):
    found = array.reshape(-1)[:1].asnumpy()[0]
    if found != expected:
        sys.exit("mxnet_round.py: pulled %r, expected %r" % (found, expected))
if kv.rank == 0:
    report("mxnet", model, kv.num_workers, sum(array.size * 4 for array in gradients), times)
kv._barrier()
