"""Rows of dense values: steps, many keys, several devices, broadcast and pushpull as of custom stores, traces."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.kvstore import KVStore

RATE = 2
SMALL, BIG = (2, 3), (1200, 1200)
JUST_BIG = (1000, 1000)
"""As many elements as are cut over all servers: a hundred of these are much already."""
DEVICES = 2


def pulled(kv: KVStore, key: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    """Return what is stored; the output holds nothing of the kind before."""
    out = np.full(shape, -1, dtype)
    kv.pull(key, out)
    return out


def default_cpu() -> KVStore:
    """check_default_keys: float32 and float16, with and without masters, small and on all servers."""
    for multi_precision in (False, True):
        kv = kvstore.create("dist_sync")
        keys = {"3": SMALL, "5": SMALL, "7": SMALL, "99": BIG, "fp16": SMALL, "fp16big": BIG}
        dtypes = {key: "float16" if key.startswith("fp16") else "float32" for key in keys}
        kv.init(list(keys), [np.ones(shape, dtypes[key]) for key, shape in keys.items()])
        kv.set_optimizer("test", rescale_grad=RATE, multi_precision=multi_precision)
        for step in range(3):
            for key, shape in keys.items():
                kv.push(key, np.full(shape, kv.rank + 1, dtypes[key]))
            expected = 1 + RATE * total(kv) * (step + 1)
            for key, shape in keys.items():
                out = pulled(kv, key, shape, dtypes[key])
                assert (out == expected).all(), (key, step, out.ravel()[0], expected)
        kv.close()
    return kv


def total(kv: KVStore) -> float:
    """Return the sum of rank + 1 over the workers."""
    return kv.num_workers * (kv.num_workers + 1) / 2


def many_keys_of_init() -> KVStore:
    """init_gpu and test_sync_init: a hundred small and a hundred large keys, half of them float16."""
    for kind in ("dist_sync", "dist_device_sync"):
        kv = kvstore.create(kind)
        sizes = {"small": SMALL, "big": JUST_BIG} if kind == "dist_sync" else {"small": SMALL}
        for size, shape in sizes.items():
            for number in range(100):
                # Only rank 0's value counts: the others bring one that must not be seen.
                value = number if kv.rank == 0 else -1
                kv.init("%s-%d" % (size, number), np.full(shape, value, ("float32", "float16")[number % 2]))
            # Three workers look at each large key: 2.8 GB are enough.
            for number in range(100) if shape == SMALL else range(kv.rank % 3, 100, 3):
                out = pulled(kv, "%s-%d" % (size, number), shape, ("float32", "float16")[number % 2])
                assert (out == number).all(), (size, number, out.ravel()[0])
        kv.barrier()
        kv.close()
    return kv


def device_push_pull() -> KVStore:
    """test_sync_push_pull: two buffers a worker, push and pull and pushpull, small and large."""
    kv = kvstore.create("dist_device_sync")
    keys = {"a": SMALL, "b": BIG}
    kv.init([key + way for key in keys for way in "12"], [np.ones(shape) for shape in keys.values() for _ in "12"])
    kv.set_optimizer("test", rescale_grad=RATE)
    for step in range(3):
        expected = 1 + RATE * total(kv) * DEVICES * (step + 1)
        for key, shape in keys.items():
            values = [np.full(shape, kv.rank + 1.0) for _ in range(DEVICES)]
            outs = [np.zeros(shape) for _ in range(2 * DEVICES)]
            kv.push(key + "1", values)
            kv.pull(key + "1", outs[:DEVICES])
            kv.pushpull(key + "2", values, outs[DEVICES:])
            assert all((out == expected).all() for out in outs), (key, step, [out.ravel()[0] for out in outs], expected)
    return kv


def custom_broadcast_pushpull() -> KVStore:
    """dist_device_sync_kvstore_custom.py, and what its siblings for BytePS and Horovod have in common with it."""
    kv = kvstore.create("dist_device_sync")
    assert kv.type == "dist_device_sync"
    sizes = [SMALL if number % 20 else BIG for number in range(400)]
    keys = ["key-%d" % number for number in range(400)]
    values = [np.full(shape, number if kv.rank == 0 else -1, "float32") for number, shape in enumerate(sizes)]
    outs = [[np.zeros(shape, "float32") for _ in range(DEVICES)] for shape in sizes]
    kv.broadcast(keys, values, outs)
    assert all((out == number).all() for number, pair in enumerate(outs) for out in pair)
    del values, outs
    for key, shape in (("key-1", SMALL), ("key-0", BIG)):
        for step in range(3):
            pair = [np.full(shape, kv.rank + 1, "float32") for _ in range(DEVICES)]
            kv.pushpull(key, pair)
            assert all((out == total(kv) * DEVICES).all() for out in pair), (key, step, pair[0].ravel()[0])
    return kv


def profiled() -> KVStore:
    """test_server_profiling.py: a push and a pull of a value on all servers leave a trace of each worker and server."""
    kv = kvstore.create("dist_sync")
    kv.init("99", np.ones(BIG, "float32"))
    folder = Path(os.environ["TRACES"])
    kv.barrier()
    with kv.profile(folder):
        kv.push("99", np.ones(BIG, "float32"))
        pulled(kv, "99", BIG)
        kv.barrier()
    kv.barrier()
    names = ["%s-%d.json" % (role, rank) for role in ("worker", "server") for rank in range(kv.num_workers)]
    for name in names:
        trace = json.loads((folder / name).read_text("utf-8"))
        assert any(event.get("ph") == "X" for event in trace["traceEvents"]), (name, trace)
    return kv


PARTS = {
    "default_cpu": default_cpu,
    "many_keys_of_init": many_keys_of_init,
    "device_push_pull": device_push_pull,
    "custom_broadcast_pushpull": custom_broadcast_pushpull,
    "profiled": profiled,
}
