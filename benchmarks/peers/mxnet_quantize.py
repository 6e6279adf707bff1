"""MXNet's 2-bit quantisation by its own profiler: BYTES TOTAL_BYTES REPEATS. Prints one JSON line.

A `device` store with gradient compression quantises, dequantises and sums each pushed array on the CPU. The profiler
tells the time within the engine's operators `QuantizeCPU` and `DequantizeCPU`, so without the store's own work. One
thread does it (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

os.environ["OMP_NUM_THREADS"] = os.environ["MXNET_CPU_WORKER_NTHREADS"] = "1"

import mxnet as mx
import numpy as np


def main() -> None:
    """Push arrays of BYTES bytes, TOTAL_BYTES in all, REPEATS times, and print seconds of each operator a push."""
    with tempfile.TemporaryDirectory() as folder:
        measure(folder, *(int(word) for word in sys.argv[1:4]))


def measure(folder: str, size: int, total: int, repeats: int) -> None:
    """As `main`; the profiler's file goes into the folder."""
    elements, count = size // 4, total // size
    # A file of its own: the profiler removes what it is given and writes another, also where that is a device.
    mx.profiler.set_config(profile_all=True, aggregate_stats=True, filename=os.path.join(folder, "profile.json"))
    store = mx.kv.create("device")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    rng = np.random.default_rng(0)
    arrays = [mx.nd.array(rng.normal(0, 0.3, elements).astype(np.float32)) for _ in range(count)]
    keys = list(range(count))
    store.init(keys, [mx.nd.zeros(elements) for _ in keys])
    found: dict[str, list[float]] = {"QuantizeCPU": [], "DequantizeCPU": []}
    for number in range(repeats + 1):
        mx.profiler.dumps(reset=True)
        mx.profiler.set_state("run")
        store.push(keys, [[array] for array in arrays])
        mx.nd.waitall()
        mx.profiler.set_state("stop")
        stats = json.loads(mx.profiler.dumps(reset=True, format="json"))
        for name, times in found.items():
            operator = stats["Time"]["operator"][name]
            assert operator["Count"] == count, operator
            if number:  # the first push makes the residuals
                times.append(operator["Total"] / 1e3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
