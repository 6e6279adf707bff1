"""One worker whose rounds are made beside something else: async|overlap|busy and its arguments; prints a JSON line.

    async SECONDS SLOWER    pushes and pulls in dist_async for some seconds; rank 0 computes SLOWER times as long
    overlap STEPS           steps that compute as long as they communicate, one after the other and at the same time
    busy ROUNDS yes|no      rounds in a thread; `yes`: the main thread runs Python code meanwhile

Computing takes a time and no processor: it stands for an accelerator, which is given one layer after the other.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from typing import Callable, Dict, List

import numpy as np
import shapes
from report import WARM_UP

from distrun_runtime import kvstore

COMPUTE_S = 0.02
LAYERS, LAYER_FLOATS = 16, 1_000_000
FORWARD = 1 / 3
"""The part of the computing that comes before the backward."""


def asynchronous(kv: kvstore.KVStore, seconds: float, slower: float) -> Dict[str, object]:
    """Return how many rounds a second this worker makes, while all are making rounds."""
    weight, out = np.zeros(100_000, np.float32), np.empty(100_000, np.float32)
    kv.set_optimizer("sgd", learning_rate=0.1)
    kv.init("w", weight)
    compute_s = COMPUTE_S * (slower if kv.rank == 0 else 1)
    kv.barrier()
    begin, made = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        time.sleep(compute_s)
        kv.push("w", weight)
        kv.pull("w", out=out)
        made += 1
    took_s = time.monotonic() - begin
    kv.barrier()
    return {"rate": made / took_s}


def overlapping(kv: kvstore.KVStore, steps: int) -> Dict[str, object]:
    """Return seconds of the communication alone, of the computing alone, and of steps with both."""
    keys = list(range(LAYERS))
    gradients = [np.ones(LAYER_FLOATS, np.float32) for _ in keys]
    outs = [np.empty(LAYER_FLOATS, np.float32) for _ in keys]
    kv.init(keys, gradients)

    def timed(step: Callable[[], None]) -> float:
        times = []
        for _ in range(steps + WARM_UP):
            kv.barrier()
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        return statistics.median(times[WARM_UP:])

    def communicate() -> None:
        calls = [kv.pushpull(key, gradients[key], out=outs[key], priority=-key, wait=False) for key in reversed(keys)]
        for call in calls:
            call.wait()

    # All ranks compute as long as the slowest one communicates.
    communication_s = timed(communicate)
    total, most = np.zeros(kv.num_workers), np.zeros(kv.num_workers)
    total[kv.rank] = communication_s
    kv.init(LAYERS, most)
    kv.pushpull(LAYERS, total, out=most)
    compute_s = float(most.max())
    forward_s, backward_s = compute_s * FORWARD / LAYERS, compute_s * (1 - FORWARD) / LAYERS
    pending: Dict[int, kvstore.Pending] = {}
    waited: List[float] = []

    device_s = time.perf_counter()
    """Until then the accelerator has something to compute."""

    def both() -> None:
        nonlocal device_s
        for key in keys:
            if key in pending:
                begin = time.perf_counter()
                pending.pop(key).wait()
                waited.append(time.perf_counter() - begin)
            device_s = max(device_s, time.perf_counter()) + forward_s
        for key in reversed(keys):
            device_s += backward_s
            time.sleep(max(0.0, device_s - time.perf_counter()))
            pending[key] = kv.pushpull(key, gradients[key], out=outs[key], priority=-key, wait=False)

    times = []
    for _ in range(steps + WARM_UP):
        begin = time.perf_counter()
        both()
        times.append(time.perf_counter() - begin)
    step_s = statistics.median(times[WARM_UP:])
    for call in pending.values():
        call.wait()
    steps_waited = np.array(waited).reshape(-1, LAYERS)[WARM_UP:]
    by_layer = np.median(steps_waited, axis=0).tolist()
    return {"communication_s": communication_s, "computing_s": compute_s, "step_s": step_s, "waited_s": by_layer}


def busy(kv: kvstore.KVStore, rounds: int, is_busy: bool) -> Dict[str, object]:
    """Return the median seconds of a round of resnet50."""
    gradients = [np.ones(shape, np.float32) for shape in shapes.MODELS["resnet50"]()]
    outs = [np.empty_like(gradient) for gradient in gradients]
    keys = list(range(len(gradients)))
    kv.init(keys, gradients)
    times: List[float] = []

    def make_rounds() -> None:
        for _ in range(rounds + WARM_UP):
            begin = time.perf_counter()
            kv.pushpull(keys, gradients, out=outs)
            times.append(time.perf_counter() - begin)

    thread = threading.Thread(target=make_rounds)
    thread.start()
    count = 0
    while is_busy and thread.is_alive():
        count += 1
    thread.join()
    return {"round_s": statistics.median(times[WARM_UP:])}


def main() -> None:
    what, *arguments = sys.argv[1:]
    with kvstore.create("dist_async" if what == "async" else "dist_sync") as kv:
        if what == "async":
            found = asynchronous(kv, float(arguments[0]), float(arguments[1]))
        elif what == "overlap":
            found = overlapping(kv, int(arguments[0]))
        else:
            found = busy(kv, int(arguments[0]), arguments[1] == "yes")
        print(json.dumps({"rank": kv.rank, **found}), flush=True)


if __name__ == "__main__":
    main()
