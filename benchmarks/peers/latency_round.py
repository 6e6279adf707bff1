"""One process of small blocking rounds: SYSTEM WORK=ROUNDS...

SYSTEM is distrun, gloo, gloo-bucket or mxnet. WORK is `barrier`, the bytes of one key, or `SHAPES:FORM` with SHAPES of
`shapes.named` and FORM one of:

    list    one call for all keys, which waits
    each    calls for each key that wait (MXNet's never do: it waits at the end), as in the loop of the documents
    later   calls for each key that do not wait; all are waited for at the end

Rounds follow each other at once. Every gradient is rewritten before a round, and the first and last element of every
result are compared after it, outside the measured time; all elements are compared after the last round. Each rank
prints a JSON line for each work: its seconds of each round.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import shapes
from report import sent, summed

WARM_UP = 10
"""Rounds at the beginning that are not counted: buckets are registered, memory is mapped, code is warm."""
ITEM = 4
"""Bytes of a float32."""


class System:
    """What one system does with the arrays of a work. Numbers of keys go on from work to work."""

    rank = 0
    workers = 1

    def __init__(self) -> None:
        self._keys = 0

    def numbers(self, count: int) -> range:
        """Return new keys."""
        self._keys += count
        return range(self._keys - count, self._keys)

    def arrays(self, keys: Sequence[int], forms: Sequence[shapes.Shape]) -> Tuple[List[Any], List[Any]]:
        """Return gradients and results of new keys."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Wait for all workers."""
        raise NotImplementedError

    def round(self, form: str, keys: Sequence[int], gradients: List[Any], results: List[Any]) -> None:
        """Sum the gradients of all workers into the results, and wait until they are there."""
        raise NotImplementedError

    def settle(self) -> None:
        """Wait until what the gradients were given is written."""

    def flat(self, result: Any) -> Any:
        """Return the elements of a result as numpy's."""
        return result.reshape(-1)

    def close(self) -> None:
        """Leave the job."""


class Distrun(System):
    """A dist_sync store."""

    def __init__(self) -> None:
        import numpy as np

        from distrun_runtime import kvstore

        super().__init__()
        self._ones, self._zeros = np.ones, np.zeros
        self._store = kvstore.create("dist_sync")
        self.rank, self.workers = self._store.rank, self._store.num_workers
        self.close = self._store.close  # type: ignore[method-assign]

    def barrier(self) -> None:
        """See System."""
        self._store.barrier()

    def arrays(self, keys: Sequence[int], forms: Sequence[shapes.Shape]) -> Tuple[List[Any], List[Any]]:
        """See System."""
        gradients = [self._ones(each, "float32") for each in forms]
        self._store.init(list(keys), gradients)
        return gradients, [self._zeros(each, "float32") for each in forms]

    def round(self, form: str, keys: Sequence[int], gradients: List[Any], results: List[Any]) -> None:
        """See System."""
        store = self._store
        if form == "one":
            store.pushpull(keys[0], gradients[0], out=results[0])
        elif form == "list":
            store.pushpull(list(keys), gradients, out=results)
        elif form == "each":
            for key, gradient, result in zip(keys, gradients, results, strict=True):
                store.push(key, gradient)
                store.pull(key, out=result)
        else:
            pending = []
            for key, gradient, result in zip(keys, gradients, results, strict=True):
                pending.append(store.push(key, gradient, wait=False))
                pending.append(store.pull(key, out=result, wait=False))
            for call in pending:
                call.wait()


class Gloo(System):
    """torch.distributed's all_reduce with gloo, key by key or, with `is_bucket`, in one tensor."""

    def __init__(self, is_bucket: bool) -> None:
        import torch
        import torch.distributed as dist

        super().__init__()
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self._torch, self._dist, self._is_bucket = torch, dist, is_bucket
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.barrier = dist.barrier  # type: ignore[method-assign]
        self.close = dist.destroy_process_group  # type: ignore[method-assign]

    def arrays(self, keys: Sequence[int], forms: Sequence[shapes.Shape]) -> Tuple[List[Any], List[Any]]:
        """See System."""
        gradients = [self._torch.ones(each) for each in forms]
        return gradients, gradients

    def round(self, form: str, keys: Sequence[int], gradients: List[Any], results: List[Any]) -> None:
        """See System."""
        reduce = self._dist.all_reduce
        if self._is_bucket:
            flat = self._torch.cat([each.reshape(-1) for each in gradients])
            reduce(flat)
            parts = flat.split([each.numel() for each in gradients])
            for gradient, part in zip(gradients, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        elif form in {"one", "each"}:
            for gradient in gradients:
                reduce(gradient)
        else:
            for work in [reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()

    def flat(self, result: Any) -> Any:
        """See System."""
        return result.numpy().reshape(-1)


class MXNet(System):
    """MXNet's dist_sync store. A process that serves ends here."""

    def __init__(self) -> None:
        import mxnet

        super().__init__()
        self._mxnet = mxnet
        self._store = mxnet.kv.create("dist_sync")
        self.rank, self.workers = self._store.rank, self._store.num_workers
        self.barrier = self.close = self._store._barrier  # type: ignore[method-assign]

    def arrays(self, keys: Sequence[int], forms: Sequence[shapes.Shape]) -> Tuple[List[Any], List[Any]]:
        """See System."""
        gradients = [self._mxnet.nd.ones(each) for each in forms]
        self._store.init(list(keys), gradients)
        return gradients, [self._mxnet.nd.zeros(each) for each in forms]

    def round(self, form: str, keys: Sequence[int], gradients: List[Any], results: List[Any]) -> None:
        """See System."""
        if form in {"one", "list"}:
            self._store.pushpull(list(keys), gradients, out=results)
        else:
            for key, gradient, result in zip(keys, gradients, results, strict=True):
                self._store.push(key, gradient)
                self._store.pull(key, out=result)
        for result in results:
            result.wait_to_read()

    def settle(self) -> None:
        """See System."""
        self._mxnet.nd.waitall()

    def flat(self, result: Any) -> Any:
        """See System."""
        return result.asnumpy().reshape(-1)


SYSTEMS: Dict[str, Callable[[], System]] = {
    "distrun": Distrun,
    "gloo": lambda: Gloo(is_bucket=False),
    "gloo-bucket": lambda: Gloo(is_bucket=True),
    "mxnet": MXNet,
}


def parsed(text: str) -> Tuple[List[shapes.Shape], str]:
    """Return the shapes and the form of a WORK other than `barrier`."""
    if text.isdigit():
        return [(int(text) // ITEM,)], "one"
    names, _, form = text.partition(":")
    return shapes.named(names), form


def measured(system: System, work: str, rounds: int) -> List[float]:
    """Run the rounds of a work, the warm-up before them, and return the seconds of each; end where a sum is wrong."""
    times: List[float] = []
    if work == "barrier":
        for _ in range(rounds + WARM_UP):
            begin = time.perf_counter()
            system.barrier()
            times.append(time.perf_counter() - begin)
        return times[WARM_UP:]
    forms, form = parsed(work)
    keys = system.numbers(len(forms))
    gradients, results = system.arrays(keys, forms)
    system.barrier()
    warm_up = min(rounds, WARM_UP)  # Long rounds need fewer.
    for number in range(1, rounds + warm_up + 1):
        for key, gradient in enumerate(gradients):
            gradient[:] = sent(key, system.rank, number)
        system.settle()
        begin = time.perf_counter()
        system.round(form, keys, gradients, results)
        times.append(time.perf_counter() - begin)
        for key, result in enumerate(results):
            flat, expected = system.flat(result), summed(key, system.workers, number)
            is_last = number == rounds + warm_up
            if not (flat[0] == flat[-1] == expected and (not is_last or (flat == expected).all())):
                sys.exit(
                    "latency_round.py: %s, round %d, key %d: expected %r, found %r"
                    % (work, number, key, expected, result)
                )
    return times[warm_up:]


def main() -> None:
    """Measure each work and print a line for it."""
    name, *works = sys.argv[1:]
    system = SYSTEMS[name]()
    for each in works:
        work, _, rounds = each.rpartition("=")
        print(
            json.dumps({"rank": system.rank, "work": work, "times_s": measured(system, work, int(rounds))}), flush=True
        )
    system.close()


if __name__ == "__main__":
    main()
