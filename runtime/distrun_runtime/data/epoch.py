"""Epochs of a fixed number of batches, so that all workers of a synchronous job make equally many steps."""

from __future__ import annotations

from typing import Generic, Iterable, Iterator, TypeVar

from distrun_runtime.data.whole import whole

Batch = TypeVar("Batch")


def epoch_size(num_examples: int, batch_size: int, num_workers: int = 1) -> int:
    """Return how many batches each worker takes in an epoch: num_examples / batch_size / num_workers, rounded down.

    Arguments:
        num_examples: examples of the whole data set, all workers' parts together.
        batch_size: examples that one worker takes for a step.
        num_workers: `kv.num_workers` for dist_sync. A dist_async worker needs no fixed size.

    Raises:
        ValueError: a number is not at least 1, or not even one step of all workers is there.

    Source: MXNet's tutorial on distributed training.
    """
    num_examples, batch_size = whole(num_examples, "num_examples"), whole(batch_size, "batch_size")
    num_workers = whole(num_workers, "num_workers")
    if min(num_examples, batch_size, num_workers) < 1:
        raise ValueError(
            "expected numbers of at least 1, found num_examples=%d batch_size=%d num_workers=%d"
            % (num_examples, batch_size, num_workers)
        )
    size = num_examples // (batch_size * num_workers)
    if not size:
        raise ValueError(
            "%d examples are not one batch of %d for each of %d workers; use a smaller batch size"
            % (num_examples, batch_size, num_workers)
        )
    return size


class Epochs(Generic[Batch]):
    """Data that is iterated in epochs of exactly `size` batches, whatever their number in the data.

    Data that ends earlier is started again; data that does not is gone on with in the next epoch, so every batch has
    its turn. An epoch that is broken off counts as far as it came.

    Arguments:
        data: anything that can be iterated again and again: a list, a reader, a torch DataLoader.
        size: batches in an epoch, at least 1. None: one iteration of the data is an epoch.

    Raises:
        ValueError: the size is not at least 1; when iterated, data that gives no batch when it is started.
        TypeError: a size that is not a whole number, such as a quotient; data that cannot be iterated.

    Source: `epoch_size` of MXNet's FeedForward.

    Examples:
        >>> epochs = Epochs("abc", size=2)
        >>> list(epochs), list(epochs)
        (['a', 'b'], ['c', 'a'])
    """

    def __init__(self, data: Iterable[Batch], size: int | None = None) -> None:
        hint = "data.epoch_size(num_examples, batch_size, num_workers) gives one"
        size = None if size is None else whole(size, "epoch_size", hint)
        if size is not None and size < 1:
            raise ValueError("expected an epoch of at least 1 batch, found %d" % size)
        if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
            raise TypeError("data is what can be iterated, batch by batch, not %.60r" % (data,))
        self._data = data
        self._size = size
        self._rest: Iterator[Batch] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        if self._size is None:
            yield from self._data
            return
        for _ in range(self._size):
            yield self._next()

    def _next(self) -> Batch:
        for batch in self._rest:
            return batch
        self._rest = iter(self._data)
        for batch in self._rest:
            return batch
        raise ValueError(
            "the data, a %s, gives no batch when it is started; an epoch of %s batches needs data that can be iterated"
            " again and again: a list or a reader, not a generator" % (type(self._data).__name__, self._size)
        )
