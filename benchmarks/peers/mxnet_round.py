"""One process of push-and-pull rounds with MXNet 1.9.1 and its ps-lite: MODEL ROUNDS list|keys|priorities.

The role comes from DMLC_*.
"""

from __future__ import annotations

import sys
import time

import mxnet as mx  # serves and exits here if DMLC_ROLE is server or scheduler
import shapes
from report import WARM_UP, report, sent, summed

model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
kv = mx.kv.create("dist_sync")
gradients = [mx.nd.ones(shape) for shape in shapes.MODELS[model]()]
outs = [mx.nd.zeros(array.shape) for array in gradients]
keys = list(range(len(gradients)))
kv.init(keys, gradients)
times = []
for number in range(1, rounds + WARM_UP + 1):
    # MXNet lends the pushed array to the store as its receive buffer, so that a pull overwrites it.
    for key, gradient in enumerate(gradients):
        gradient[:] = sent(key, kv.rank, number)
    mx.nd.waitall()
    kv._barrier()
    begin = time.perf_counter()
    if form == "list":
        kv.pushpull(keys, gradients, out=outs)
    elif form == "two":
        kv.push(keys, gradients)
        kv.pull(keys, out=outs)
    else:
        for key in keys:
            priority = -key if form == "priorities" else 0
            kv.push(key, gradients[key], priority)
            kv.pull(key, outs[key], priority)
    for out in outs:
        out.wait_to_read()
    times.append(time.perf_counter() - begin)
    for key, out in enumerate(outs):
        if not (out.asnumpy() == summed(key, kv.num_workers, number)).all():
            sys.exit("mxnet_round.py: round %d, key %d: %r" % (number, key, out))
report("mxnet", model, kv.rank, times)
kv._barrier()
