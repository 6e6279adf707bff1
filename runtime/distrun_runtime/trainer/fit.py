"""fit: a whole training loop, alone or with other workers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from distrun_runtime import reporting
from distrun_runtime.data.sampling import Epochs, whole
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStoreBase
from distrun_runtime.store.keys import is_async, is_dist
from distrun_runtime.trainer.trainer import Trainer, scale_of

Batch = TypeVar("Batch")


def fit(  # noqa: PLR0917  # as the trainer
    step: Callable[[Batch], object],
    params: object,
    data: Iterable[Batch],
    kvstore: str | KVStoreBase | None = "local",
    optimizer: str = "sgd",
    optimizer_params: Mapping[str, object] | None = None,
    *,
    epochs: int = 1,
    epoch_size: float | None = None,
    batch_size: float | None = None,
    compression_params: Mapping[str, object] | None = None,
    update_on_kvstore: bool | None = None,
    ignore_stale_grad: bool = False,
    after_epoch: Callable[[int, Trainer], object] | None = None,
) -> Trainer:
    """Train: for every batch, `step(batch)` computes gradients, and all weights are updated. Return the trainer.

    A program for one machine becomes one for many by two lines: `kv = kvstore.create("dist_sync")`, and `kvstore=kv`
    here. With n workers in `dist_sync` and batches of b, gradients are divided by n * b, with the same result as
    with batches of n * b on one machine; in `dist_async` by b.

    Every step is reported (`distrun_runtime.report`), for `distrun status`.

    Arguments:
        step: computes the gradients of the sum of a batch's losses into `params`; gradients of the step before have
            been taken away. If it returns a number, that is reported as the step's loss.
        params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore: as for `Trainer`.
        data: what can be iterated once an epoch: a list, a reader, a torch DataLoader. Each worker has its own part.
        epoch_size: an epoch is exactly so many batches (a quotient is rounded down): data that ends earlier starts
            again, other data goes on in the next epoch. None: an epoch is one iteration, and a worker
            whose data ends before the others' takes part in their steps without gradients (`Trainer.join`).
        batch_size: examples in a batch; None counts them in each batch: the length of what the batch is, or of its
            first part.
        after_epoch: called as after_epoch(epoch, trainer), epochs counted from 0, with the weights of all.

    Returns:
        The trainer, still open: to save its states, or to `close` it.

    Raises:
        KVError: as `Trainer`; data that cannot be iterated a second time; data without a batch, if this is the only
            worker.
        TypeError: epochs that are no whole number, or epoch_size that is no number; data that cannot be iterated.
        ValueError: data without a batch, with `epoch_size`.
    """
    if not callable(step):
        raise KVError(f"step is a function of a batch, not {step!r:.60}")
    if whole(epochs, "epochs") < 0:
        raise KVError(f"epochs is a number from 0, not {epochs}")
    if epochs > 1 and epoch_size is None and isinstance(data, Iterator):
        raise KVError(f"{epochs} epochs need data that can be iterated again, not a {type(data).__name__}")
    # Here, not in the first step: in a job, a trainer is made by all workers.
    if batch_size is not None:
        scale_of(batch_size)
    if after_epoch is not None and not callable(after_epoch):
        raise KVError(f"after_epoch is a function of an epoch and the trainer, not {after_epoch!r:.60}")
    batches = Epochs(data, epoch_size)
    trainer = Trainer(params, optimizer, optimizer_params, kvstore, compression_params, update_on_kvstore)
    try:
        store = trainer.kvstore
        # Without rounds, each worker's batch makes a step of its own, and no worker waits before the end.
        has_rounds = store is not None and not is_async(store.type)
        workers = store.num_workers if store is not None and has_rounds else 1
        steps, length = itertools.count(1), batches.size or _length_of(data)
        total = epochs * length if length else None
        for epoch in range(epochs):
            is_empty = True
            for batch in batches:
                is_empty = False
                trainer.zero_grad()
                loss = step(batch)
                examples = _size_of(batch) if batch_size is None else batch_size
                trainer.step(examples * workers, ignore_stale_grad)
                reporting.report(step=next(steps), total=total, loss=loss)
            if is_empty and (store is None or store.num_workers == 1):
                raise KVError(f"the data, a {type(data).__name__}, gave no batch in epoch {epoch}")
            if store is not None and is_dist(store.type) and (has_rounds or epoch == epochs - 1):
                trainer.join()
            if after_epoch is not None:
                after_epoch(epoch, trainer)
    except BaseException as err:
        trainer.__exit__(type(err), err, err.__traceback__)
        raise
    return trainer


def _size_of(batch: Any) -> int:
    """Return the number of examples in a batch: its length, or that of the first part of a list, tuple or dict."""
    first = batch
    while isinstance(first, (list, tuple, Mapping)) and len(first):
        part = next(iter(first.values() if isinstance(first, Mapping) else first))
        if not hasattr(part, "__len__"):
            break
        first = part
    try:
        return len(first)
    except TypeError:
        raise KVError(f"a batch of type {type(batch).__name__} has no length; give batch_size") from None


def _length_of(data: object) -> int | None:
    """Return how many batches an epoch has; None: that is not known."""
    try:
        return len(data)  # type: ignore[arg-type]
    except Exception:  # a data set's own: whatever it raises, the number is only shown
        return None
