"""Batches of sequences of about the same length: for each length limit a *bucket*, and in a batch only one bucket's.

Source: MXNet's BucketSentenceIter and the `bucket_io` of its example/model-parallel. There, a bucket's last sequences
that do not fill a batch are left out, longer ones than the largest bucket too, and each bucket has an executor. Here
they are kept unless the caller wants them dropped, and the next element is the label without a column more: a sequence
of n elements is n - 1 to read and n - 1 to predict. torch needs nothing for each shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.sampling import Positions, which_part, whole

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class PaddedSequences:
    """The sequences of a bucket, padded to its length."""

    length: int
    data: Integers
    """(sequences + 1, length); the last row is padding, for batches that are not full."""
    label: Integers
    filled: int
    """Elements that are no padding."""

    @property
    def count(self) -> int:
        """Number of sequences."""
        return len(self.data) - 1


class BucketReader:
    """Batches of sequences of whole numbers, such as words of sentences: `BucketReader(sentences, 32, buckets=4)`.

    Each iteration is an epoch, in an order of its own, and yields numpy arrays (data, label), int64, all sequences of a
    batch padded to the length of their bucket. The order follows from seed and epoch alone, so workers with the same
    seed are at the same bucket in each step: parts of a batch are equally large, and stages of a pipeline see the same
    batch.

    Arguments:
        sequences: each a list or array (n,) of whole numbers.
        batch_size: sequences of a batch, for one part.
        buckets: lengths of the buckets; or how many to make, by quantiles of the lengths, so that all have about
            equally many sequences. A sequence is in the shortest bucket that it fits into.
        labels: for each sequence equally many whole numbers. None: the label of an element is the next one, for
            language models; a sequence is one element shorter then, and so are the lengths of which `buckets` speaks.
        num_parts, part_index: number of parts of each batch, and which of them to read, from 0:
            `kv.num_workers` and `kv.rank`, or replicas of a pipeline. A step of all parts takes
            num_parts x batch_size sequences of one bucket.
        layout: `TN`: arrays are (length, batch_size), time first, as torch's recurrent layers take them; `NT`:
            (batch_size, length).
        pad: the number that fills data up.
        ignore: the number that fills labels up; torch's cross entropy does not count -100.
        remainder: `pad`: a bucket's last batch is filled with sequences of nothing but padding, so that an epoch has
            each sequence once; `drop`: it is left out, with other sequences in each epoch. With `pad`, a part of a
            batch may be padding alone, over which torch's mean loss is nan: divide the sum by the number of labels.
        too_long: what to do with a sequence that is longer than the largest bucket: `error`, `drop` it, or `cut` its
            end off.
        shuffle: draw an order of the sequences of a bucket, and of the batches, for each epoch. Otherwise the buckets
            come by length, their sequences as they were given.
        seed: of the orders; all workers give the same.

    Raises:
        ValueError: a number out of its range, no sequences, one that is too long or has nothing to predict, no full
            batch with `drop`; labels of another length.
        TypeError: a number that is no whole one, a sequence of something else.

    Not thread-safe.

    Examples:
        >>> reader = BucketReader([[1, 2, 3], [4, 5], [6, 7, 8]], 2, buckets=[1, 2], layout="NT", shuffle=False)
        >>> [data.tolist() for data, label in reader]
        [[[4], [0]], [[1, 2], [6, 7]]]
    """

    num_dropped: int
    """Sequences that were left out because they are too long."""

    def __init__(
        self,
        sequences: Sequence[Any],
        batch_size: int,
        *,
        buckets: int | Sequence[int] = 8,
        labels: Sequence[Any] | None = None,
        num_parts: int = 1,
        part_index: int = 0,
        layout: str = "TN",
        pad: int = 0,
        ignore: int = -100,
        remainder: str = "pad",
        too_long: str = "error",
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self._batch_size = whole(batch_size, "batch_size", least=1)
        self._num_parts, self._part_index = which_part(whole(num_parts, "num_parts", least=1), part_index)
        known = (("layout", layout, ("TN", "NT")), ("remainder", remainder, ("pad", "drop")))
        for name, given, values in (*known, ("too_long", too_long, ("error", "drop", "cut"))):
            if given not in values:
                raise ValueError(f"unknown {name} {given!r}; known are {', '.join(values)}")
        self._is_time_first, self._drops = layout == "TN", remainder == "drop"
        pairs = _pairs(sequences, labels)
        limits = _limits(buckets, [len(data) for data, _ in pairs])
        pairs, self.num_dropped = _fitted(pairs, limits[-1], too_long)
        self._buckets = _filled(pairs, limits, whole(pad, "pad"), whole(ignore, "ignore"))
        self._shuffle, self._epoch = shuffle, 0
        self._seed = whole(seed, "seed", "all workers give the same, such as 0", least=0)
        if not len(self):
            most = max(bucket.count for bucket in self._buckets)
            raise ValueError(
                f"no bucket has the {self._step} sequences of a batch of all parts, at most {most}; use a smaller batch"
                " size, fewer buckets, or remainder='pad'"
            )

    @property
    def buckets(self) -> list[int]:
        """Lengths of the buckets that have sequences, ascending."""
        return [bucket.length for bucket in self._buckets]

    @property
    def padding(self) -> float:
        """Share of the elements of an epoch's batches that are padding, all parts together.

        With `drop` the mean of all epochs: which sequences are left out differs.
        """
        total = sum(self._batches(bucket) * self._step * bucket.length for bucket in self._buckets)
        filled = sum(
            bucket.filled * min(1.0, self._batches(bucket) * self._step / bucket.count) for bucket in self._buckets
        )
        return 1 - filled / total

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be that of epoch number `epoch`, from 0: to go on with a run that was stopped."""
        self._epoch = whole(epoch, "epoch", least=0)

    def __len__(self) -> int:
        """Return the batches of an epoch."""
        return sum(map(self._batches, self._buckets))

    def __iter__(self) -> Iterator[Batch]:
        rng = np.random.default_rng((self._seed, self._epoch))
        self._epoch += 1
        orders = [np.arange(bucket.count, dtype=np.int64) for bucket in self._buckets]
        batches = [(i, place) for i, bucket in enumerate(self._buckets) for place in range(self._batches(bucket))]
        if self._shuffle:
            orders = [rng.permutation(order) for order in orders]
            batches = [batches[i] for i in rng.permutation(len(batches))]
        for i, place in batches:
            yield self._batch(self._buckets[i], orders[i][place * self._step : (place + 1) * self._step])

    @property
    def _step(self) -> int:
        """Sequences of a step of all parts."""
        return self._batch_size * self._num_parts

    def _batches(self, bucket: PaddedSequences) -> int:
        return (bucket.count + (0 if self._drops else self._step - 1)) // self._step

    def _batch(self, bucket: PaddedSequences, positions: Positions) -> Batch:
        """Return this part's share of the sequences of a step, filled up by the row of padding."""
        # Dealt in turn: if a step is not full, all parts have about equally many.
        own = positions[self._part_index :: self._num_parts]
        rows = np.full(self._batch_size, bucket.count, np.int64)
        rows[: len(own)] = own
        data, label = bucket.data[rows], bucket.label[rows]
        return (np.ascontiguousarray(data.T), np.ascontiguousarray(label.T)) if self._is_time_first else (data, label)


def _pairs(sequences: Sequence[Any], labels: Sequence[Any] | None) -> list[tuple[Integers, Integers]]:
    """Return the data and the labels of each sequence, equally long and not empty."""
    if not len(sequences):
        raise ValueError("expected at least one sequence, found none")
    found = [_integers(sequence, f"sequence {i}") for i, sequence in enumerate(sequences)]
    least = 2 if labels is None else 1
    for i, sequence in enumerate(found):
        if len(sequence) < least:
            why = "an element and one to predict" if labels is None else "an element"
            raise ValueError(f"sequence {i}: expected at least {least}, {why}, found {len(sequence)}; leave it out")
    if labels is None:
        return [(sequence[:-1], sequence[1:]) for sequence in found]
    if len(labels) != len(found):
        raise ValueError(f"{len(found)} sequences, but labels for {len(labels)}")
    pairs = list(zip(found, (_integers(label, f"labels {i}") for i, label in enumerate(labels)), strict=True))
    for i, (sequence, label) in enumerate(pairs):
        if len(sequence) != len(label):
            raise ValueError(f"sequence {i} has {len(sequence)} elements, but {len(label)} labels")
    return pairs


def _integers(values: Any, name: str) -> Integers:
    array = np.asarray(values)
    if array.shape != (0,) and (array.ndim != 1 or array.dtype.kind not in "iu"):  # an empty list has floats
        raise TypeError(f"{name} is a list of whole numbers, not {array.dtype} of shape {array.shape}")
    return array.astype(np.int64, copy=False)


def _limits(buckets: int | Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Return the lengths of the buckets, ascending."""
    if isinstance(buckets, (Sequence, np.ndarray)):
        limits = sorted({whole(length, "a bucket's length", least=1) for length in buckets})
        if not limits:
            raise ValueError("expected at least one bucket, found none")
        return limits
    shares = np.arange(1, whole(buckets, "buckets", "or a list of lengths", least=1) + 1) / buckets
    return sorted({int(limit) for limit in np.quantile(lengths, shares, method="higher")})


def _fitted(
    pairs: list[tuple[Integers, Integers]], most: int, too_long: str
) -> tuple[list[tuple[Integers, Integers]], int]:
    """Return the sequences that fit the largest bucket, and how many were dropped."""
    for i, (data, _) in enumerate(pairs):
        if len(data) > most and too_long == "error":
            raise ValueError(
                f"sequence {i} has {len(data)} elements to read, the largest bucket {most}; give a longer bucket, or"
                " too_long='drop' or 'cut'"
            )
    if too_long == "cut":
        return [(data[:most], label[:most]) for data, label in pairs], 0
    kept = [pair for pair in pairs if len(pair[0]) <= most]
    if not kept:
        raise ValueError(f"all {len(pairs)} sequences are longer than the largest bucket, {most}")
    return kept, len(pairs) - len(kept)


def _filled(pairs: list[tuple[Integers, Integers]], limits: list[int], pad: int, ignore: int) -> list[PaddedSequences]:
    """Return the buckets that have sequences."""
    places = np.searchsorted(limits, [len(data) for data, _ in pairs])
    buckets = []
    for place in np.unique(places):
        own = [pairs[i] for i in np.flatnonzero(places == place)]
        data = np.full((len(own) + 1, limits[place]), pad, np.int64)
        label = np.full_like(data, ignore)
        for row, (elements, labels) in enumerate(own):
            data[row, : len(elements)], label[row, : len(labels)] = elements, labels
        buckets.append(PaddedSequences(limits[place], data, label, sum(len(elements) for elements, _ in own)))
    return buckets
