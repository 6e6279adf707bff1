"""One worker of rounds from arrays on a GPU: MODEL ROUNDS STORE COPIES ARRAYS DEVICE.

STORE is `dist_sync` or `dist_device_sync`, COPIES how many arrays of each key a worker has (one for each device),
ARRAYS is `cupy` or `numpy`, and DEVICE where the servers must have the values, or `any`. A round is one `pushpull` of
all keys, until the results are in the arrays.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np
import shapes
from report import WARM_UP, report, sent, summed

from distrun_runtime import kvstore


class Library:
    """Makes arrays of a library, and waits for its work."""

    def __init__(self, name: str) -> None:
        self._module = importlib.import_module(name)
        self._is_numpy = name == "numpy"

    def made(self, values: np.ndarray) -> Any:
        """Return a copy of numpy's array."""
        return values.copy() if self._is_numpy else self._module.asarray(values)

    def put(self, array: Any, values: np.ndarray) -> None:
        """Write numpy's elements into an array."""
        if self._is_numpy:
            array[...] = values
        else:
            array.set(values)

    def host(self, array: Any) -> np.ndarray:
        """Return an array as numpy's."""
        return array if self._is_numpy else array.get()

    def wait(self) -> None:
        """Return when the memory is as the program has it."""
        if not self._is_numpy:
            self._module.cuda.get_current_stream().synchronize()


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, store, device = (sys.argv[at] for at in (1, 3, 6))
    rounds, copies, library = int(sys.argv[2]), int(sys.argv[4]), Library(sys.argv[5])
    with kvstore.create(store) as kv:
        hosts = [np.zeros(shape, np.float32) for shape in shapes.named(model)]
        gradients, outs = ([[library.made(each) for _ in range(copies)] for each in hosts] for _ in range(2))
        keys = list(range(len(hosts)))
        kv.init(keys, [each[0] for each in gradients])
        times = []
        for number in range(1, rounds + WARM_UP + 1):
            for key, arrays in enumerate(gradients):
                hosts[key].fill(sent(key, kv.rank, number))
                for each in arrays:
                    library.put(each, hosts[key])
            library.wait()
            kv.barrier()
            begin = time.perf_counter()
            kv.pushpull(keys, gradients, out=outs)
            library.wait()
            times.append(time.perf_counter() - begin)
            for key, arrays in enumerate(outs):
                expected = copies * summed(key, kv.num_workers, number)
                for each in arrays:
                    if not (library.host(each) == expected).all():
                        sys.exit("gpu_round.py: round %d, key %d: %r" % (number, key, library.host(each)))
        found = {each["device"] for each in kv.stats() if each["keys"]}
        if device != "any" and found != {device}:
            sys.exit("gpu_round.py: expected values on %s, found them on %s" % (device, ", ".join(sorted(found))))
        report(store, model, kv.rank, times)


if __name__ == "__main__":
    main()
