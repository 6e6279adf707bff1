"""KVStore: what a training script calls, whatever kind of store is behind it.

The public methods bring their arguments to one form, check them against what `init` recorded, and then call one
hook of the subclass (`hooks.Hooks`), which does the work. A hook never sees a key or value that does not fit, a
closed store or a forked child; nothing is changed when a check fails.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Union

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.store import values
from distrun_runtime.store.contract import KVStoreBase
from distrun_runtime.store.hooks import Call, RowsItem, Updater, Value
from distrun_runtime.store.keyed import Contribution, Keyed, named
from distrun_runtime.store.lookup import Lookup, apart, wanted
from distrun_runtime.store.pending import Pending, Settled
from distrun_runtime.store.record import Record
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

__all__ = ["Array", "Call", "KVStore", "Key", "Keys", "Record", "RowsItem", "Updater", "Value"]

Keys = Union[Key, Sequence[Key]]
"""One key, or a list of keys."""

Item = tuple[Record, Value]


class KVStore(Keyed, KVStoreBase):
    """Arrays by key, shared by the workers of a job: `push` adds up, `pull` reads.

    Keys are int or str (one kind a store). Every data call takes one key with one array or a list of arrays (one for
    each device), or a list of keys with a list of as many of these; a key repeated in one call is one key with all
    its arrays. Arrays have any shape, any strides, and a dtype of `arrays.dtypes.NAMES`; what is pulled into must be
    a writable numpy array or a torch tensor in host memory. A key that `init` got a RowSparse for is row-sparse.

    Every data call returns a Pending. With wait=True (the default) the call is made when it returns, and the Pending
    is of no use; with wait=False it goes on, and the arrays are lent to the store until the Pending was waited for.

    Every call raises KVError if its arguments do not fit, StoreClosed after `close` or `leave` or in a forked child,
    and the error of an earlier call that nobody waited for. May be called from any thread. As a context manager it
    closes itself.
    """

    def __repr__(self) -> str:
        return "<%s %r: %d keys%s>" % (type(self).__name__, self._type, len(self._records), self._ended and ", closed")

    def __enter__(self) -> KVStore:
        """Return the store."""
        self._ready()
        return self

    def init(self, key: Keys, value: object, *, wait: bool = True) -> Pending:
        """Give keys their first value, shape and dtype; the arrays are copied. Once a key.

        Distributed: every worker calls it with the same keys, shapes and dtypes; rank 0's values are taken. It is
        done when all workers have called it. One call with a list of keys costs one round trip, not one a key.

        Arguments:
            value: a RowSparse makes its key row-sparse; rows that it lacks are zero.

        Raises:
            KVError: the key was initialised before, or the workers disagree.
        """
        self._ready()
        items = values.initial(key, value)
        return self._begin(items, "init", wait) if items else Settled("init of no keys")

    def broadcast(self, key: Keys, value: object, out: object, priority: int = 0, *, wait: bool = True) -> Pending:
        """`init`, then `pull` into `out`: every worker ends with rank 0's value. Once a key."""
        self._ready()
        first = values.initial(key, value)
        targets = values.outputs(key, out)
        # Before anything is stored: what does not fit now could not be corrected, as init works once.
        shapes = {name: Record.of(name, 0, array) for name, array in first}
        for name, arrays in targets:
            for array in arrays:
                shapes[name].fit(array, "output")
        call = _call((), priority, wait)

        def hand_out() -> None:
            self._pull([(self._records[name], arrays) for name, arrays in targets], call).wait()

        return self._begin(first, "broadcast", wait, hand_out) if first else Settled("broadcast of no keys")

    def assign(self, key: Keys, value: object, *, wait: bool = True) -> Pending:
        """Replace what keys hold by rank 0's values: `init` for keys that exist. Rule state and rounds go on.

        All workers call it, with the same keys.

        Raises:
            KVError: a key was never initialised, its shape or dtype is another, or the workers disagree.
        """
        self._ready()
        given = [(name, [one]) for name, one in values.initial(key, value)]
        items = [
            (record, one.to_dense() if isinstance(one, RowSparse) else one)
            for record, (one,) in self._fitting(given, "assigned value")
        ]
        if not items:
            return Settled("assign of no keys")
        return self._together(_what("assign", items), lambda ticket: self._assign(items, ticket), wait)

    def push(self, key: Keys, value: object, priority: int = 0, *, wait: bool = True, scale: float = 1.0) -> Pending:
        """Contribute the sum of the given values of each key; they may be overwritten when this returns.

        Without optimizer or updater the stored value becomes the sum (of all workers' sums, in a synchronous store);
        with one, that sum is what it receives. The pushed arrays themselves are never written to.

        Arguments:
            value: an array or RowSparse for each device. A RowSparse for a dense key is its dense value; an array
                for a row-sparse key has all rows.
            priority: higher goes first, if there is a choice.
            scale: what this contribution is multiplied by where it is summed.
        """
        self._ready()
        items = self._fitting(values.contributions(key, value))
        call = _call(items, priority, wait, scale)
        if not items:
            return Settled("push of no keys")
        sums, call = self._reduced(items, call)
        pending = self._push(sums, call)
        # Never waits for the others; but what is already known to be wrong is raised here.
        return self._awaited(pending, wait and pending.is_done)

    def pull(self, key: Keys, out: object, priority: int = 0, *, wait: bool = True) -> Pending:
        """Write the stored value of each key into all its outputs.

        After pushes of this worker it includes them (synchronous: exactly the round of the last one).

        Raises:
            KVError: an output does not fit, or the outputs of two keys share memory.
        """
        self._ready()
        items = self._targets(values.outputs(key, out))
        call = _call((), priority, wait)
        return self._awaited(self._pull(items, call), wait) if items else Settled("pull of no keys")

    def pushpull(
        self,
        key: Keys,
        value: object,
        out: object = None,
        priority: int = 0,
        *,
        wait: bool = True,
        scale: float = 1.0,
    ) -> Pending:
        """Push, then pull the result into `out`; without `out`, into the pushed arrays themselves."""
        self._ready()
        items = self._fitting(values.contributions(key, value))
        targets = dict(self._targets(values.outputs(key, value if out is None else out)))
        call = _call(items, priority, wait, scale)
        if not items:
            return Settled("pushpull of no keys")
        sums, call = self._reduced(items, call)
        return self._awaited(self._pushpull([(record, total, targets[record]) for record, total in sums], call), wait)

    def skip_round(self, key: Keys, note: Mapping[str, Any], *, wait: bool = True) -> Pending:
        """Contribute nothing to the next round of keys, and have all workers skip it: the values stay as they are.

        For trainers. It is done when the round is over. This call, and each worker's `pushpull` of that round, tells
        what the workers said (`Pending.skipped`), and writes nothing into outputs. Without rounds (one process, or
        dist_async) nothing happens.

        Arguments:
            note: JSON, for the other workers.
        """
        self._ready()
        records = [self._record(name) for name in values.keys_of(key)]
        return self._awaited(self._skip(records, note), wait) if records else Settled("skip_round of no keys")

    def check_push(self, key: Keys, value: object) -> None:
        """Return if compression would take what is to be pushed; nothing is sent. For trainers, which push in parts.

        Raises:
            KVError: a gradient has an element that is not finite; names key and element.
        """
        self._ready()
        if self._compresses:
            self._check(self._fitting(values.contributions(key, value)))

    def companion(self) -> KVStore:
        """Return another store of the same workers, with rounds and without a rule. All call it. For trainers."""
        raise KVError("a %r store has no other workers" % self.type)

    def row_sparse_pull(
        self, key: Keys, out: object, priority: int = 0, row_ids: object = None, *, wait: bool = True
    ) -> Pending:
        """Write some rows of row-sparse keys into outputs; only these travel.

        Arguments:
            out: a RowSparse of the key's shape, which gets the rows in ascending order, each once; or an array of
                shape (*row_ids.shape, *shape[1:]) or (row_ids.size, *shape[1:]), which gets a row for each number.
                As for `pull`, also lists of these.
            row_ids: whole numbers from 0 to shape[0] - 1 in an array of any shape and dtype, or a list of numbers,
                in any order, also repeated or none, for all outputs; or a list of these in the form of `out`.

        Raises:
            KVError: a key is not row-sparse, a row is out of range, an output does not fit, or outputs share memory.
        """
        self._ready()
        lookups = [
            (record, Lookup(record, pairs))
            for record, pairs in ((self._record(name), pairs) for name, pairs in wanted(key, out, row_ids))
        ]
        apart([(record.key, lookup) for record, lookup in lookups])
        items: list[RowsItem] = [(record, lookup.rows, lookup.take) for record, lookup in lookups]
        call = _call((), priority, wait)
        return self._awaited(self._pull_rows(items, call), wait) if items else Settled("pull of no rows")

    def _reduced(self, items: list[Contribution], call: Call) -> tuple[list[Item], Call]:
        """Return each key's sum over its devices, and the call to make with these sums."""
        sums = self._reducer.reduce(items)
        own = all(total is not given for total, (_, each) in zip(sums, items, strict=True) for given in each)
        # Sums are the store's own, which nobody else will write: they need no further copy.
        summed = [(record, total) for total, (record, _) in zip(sums, items, strict=True)]
        return summed, replace(call, lent=call.lent or own)


def _call(items: Iterable[Contribution], priority: int, wait: bool, scale: float = 1.0) -> Call:
    try:
        number = operator.index(priority)
    except TypeError:
        raise KVError("priority is an int, not %s" % type(priority).__name__) from None
    try:
        factor = operator.truediv(scale, 1)
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor):
        raise KVError("scale is a finite number, not %.60r" % (scale,))
    for record, _ in items:
        if factor != 1 and not dtypes.is_float(record.dtype):
            raise KVError(
                "key %r: %s values are pushed with scale 1, not %g" % (record.key, dtypes.name_of(record.dtype), factor)
            )
    return Call(number, lent=not wait, scale=factor)


def _what(call: str, items: Sequence[Item]) -> str:
    return "%s of %s" % (call, named(record.key for record, _ in items))
