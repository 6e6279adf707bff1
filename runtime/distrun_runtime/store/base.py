"""KVStore: what a training script calls, whatever kind of store is behind it.

The public methods bring their arguments to one form, check them against what `init` recorded, and then call one
hook of the subclass (`_init`, `_push`, ...), which does the work. A hook never sees a key or array that does not
fit, a closed store or a forked child; nothing is changed when a check fails.
"""

from __future__ import annotations

import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Type, Union

from distrun_runtime.algo import rules
from distrun_runtime.algo.reduce import Array, total
from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.store import values
from distrun_runtime.store.record import Record, missing, twice
from distrun_runtime.store.values import Key

__all__ = ["Array", "KVStore", "Key", "Keys", "Record", "Updater"]

Keys = Union[Key, Sequence[Key]]
"""One key, or a list of keys."""

Updater = Callable[[Any, Array, Array], object]
"""updater(key, received, stored): changes `stored` in place."""


class KVStore(ABC):
    """Arrays by key, shared by the workers of a job: `push` adds up, `pull` reads.

    Keys are int or str (one kind a store). Every data call takes one key with one array or a list of arrays (one for
    each device), or a list of keys with a list of as many of these; a key repeated in one call is one key with all
    its arrays. Arrays have any shape, any strides, and float16/32/64 or signed or unsigned integers of 8 to 64 bits;
    what is pulled into must be a writable numpy array.

    Every call raises KVError if its arguments do not fit, and StoreClosed after `close` or `leave` or in a forked
    child. May be called from any thread. As a context manager it closes itself.
    """

    def __init__(self, type_name: str) -> None:
        self._type = type_name
        self._records: dict[Key, Record] = {}
        self._starting: dict[Key, None] = {}  # keys whose init is under way, in order
        self._registry = threading.Lock()
        self._pid = os.getpid()
        self._ended = ""

    def __repr__(self) -> str:
        return "<%s %r: %d keys%s>" % (type(self).__name__, self._type, len(self._records), self._ended and ", closed")

    @property
    def type(self) -> str:
        """The name that the store was created with, in lower case."""
        return self._type

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's index, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that share the store."""

    # --- data

    def init(self, key: Keys, value: object) -> None:
        """Give keys their first value, shape and dtype; the arrays are copied. Once a key.

        Distributed: every worker calls it with the same keys, shapes and dtypes; rank 0's values are taken. It
        returns when all workers have called it. One call with a list of keys costs one round trip, not one a key.

        Raises:
            KVError: the key was initialised before, or the workers disagree.
        """
        self._ready()
        self._init_checked(values.initial(key, value))

    def push(self, key: Keys, value: object, priority: int = 0) -> None:
        """Contribute the sum of the given arrays of each key; they may be overwritten when this returns.

        Without optimizer or updater the stored value becomes the sum (of all workers' sums, in a synchronous store);
        with one, that sum is what it receives. The pushed arrays themselves are never written to.

        Arguments:
            priority: higher goes first, if there is a choice.
        """
        self._ready()
        items = self._summed(key, value)
        if items:
            self._push(items, _whole(priority))

    def pull(self, key: Keys, out: object, priority: int = 0) -> None:
        """Write the stored value of each key into all its outputs; it is there when this returns.

        After pushes of this worker it includes them (synchronous: exactly the round of the last one).
        """
        self._ready()
        items = self._targets(values.outputs(key, out))
        if items:
            self._pull(items, _whole(priority))

    def pushpull(self, key: Keys, value: object, out: object = None, priority: int = 0) -> None:
        """Push, then pull the result into `out`; without `out`, into the pushed arrays themselves."""
        self._ready()
        sums = self._summed(key, value)
        targets = dict(self._targets(values.outputs(key, value if out is None else out)))
        if sums:
            self._pushpull([(record, array, targets[record]) for record, array in sums], _whole(priority))

    def broadcast(self, key: Keys, value: object, out: object, priority: int = 0) -> None:
        """`init`, then `pull` into `out`: every worker ends with rank 0's value. Once a key."""
        self._ready()
        first = values.initial(key, value)
        targets = values.outputs(key, out)
        # Before anything is stored: what does not fit now could not be corrected, as init works once.
        shapes = {name: Record.of(name, 0, array) for name, array in first}
        for name, arrays in targets:
            for array in arrays:
                shapes[name].fit(array, "output")
        number = _whole(priority)
        self._init_checked(first)
        if targets:
            self._pull([(self._records[name], arrays) for name, arrays in targets], number)

    def barrier(self) -> None:
        """Return when all workers have called it."""
        self._ready()
        self._barrier()

    # --- what a push does

    def set_optimizer(self, name: str, *, replace: bool = False, **params: object) -> None:
        """Update weights where they are stored: a push is then a gradient, a pull reads the weight.

        Any worker may call it. An equal repeat changes nothing and keeps the state (momentum, ...). With
        `replace`, what state both rules know by the same name goes on - after a new learning rate the momentum stays.

        Arguments:
            name: `sgd`, `adam` or `test` (w += rescale_grad * g), as in `distrun_runtime.algo.rules`.
            params: the rule's parameters by name, for instance learning_rate=0.1, momentum=0.9.

        Raises:
            KVError: unknown name or parameter; a different rule, or an updater, is in place and `replace` is False.
        """
        self._ready()
        rule = rules.make(name, params)
        self._set_rule(rule.name, dict(rule.params), bool(replace))

    def set_updater(self, updater: Updater | None) -> None:
        """Let a function of yours update what is stored, in place of a rule; None removes either.

        Arguments:
            updater: `updater(key, received, stored)`, called with your own key for each key of a push; it changes
                `stored` in place. `received` is its own to change or keep. What it raises, the push raises.

        Raises:
            KVError: it cannot be called; or the store is distributed (no code is sent to servers).
        """
        self._ready()
        if updater is not None and not callable(updater):
            raise KVError("an updater is a function (key, received, stored), not %s" % updater.__class__.__name__)
        self._set_updater(updater)

    # --- membership

    def join(self) -> None:
        """Contribute nothing to all later rounds; return when all workers have joined. For a worker out of data."""
        self._ready()
        self._join()

    def leave(self) -> None:
        """End this worker's membership: the others go on without it. Only `close` may follow."""
        self._ready()
        self._leave()
        self._ended = self._ended or "was left"

    def close(self) -> None:
        """Finish what is under way and give everything back. A second close does nothing."""
        self._own_process()
        if self._end():
            self._close()

    def __enter__(self) -> KVStore:
        """Return the store."""
        self._ready()
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; after an error, tell the other workers and wait for nothing. Nothing in a forked child."""
        if os.getpid() != self._pid or not self._end():
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._close()
        else:
            self._abort(error)

    # --- hooks: what a kind of store does. Arguments are checked; any thread of the user's may call.

    @abstractmethod
    def _init(self, items: list[tuple[Key, Array]]) -> list[Record]:
        """Store a copy of each value (never keep the array); return the records, in the order of `items`."""

    @abstractmethod
    def _push(self, items: list[tuple[Record, Array]], priority: int) -> None:
        """Take one summed value a key. The array may be the caller's own: copy it before returning, never write."""

    @abstractmethod
    def _pull(self, items: list[tuple[Record, list[Array]]], priority: int) -> None:
        """Write each stored value into all its outputs: writable, of the record's shape and dtype, any strides."""

    @abstractmethod
    def _pushpull(self, items: list[tuple[Record, Array, list[Array]]], priority: int) -> None:
        """Push, then write the result into the outputs, which may share memory with the value."""

    @abstractmethod
    def _barrier(self) -> None:
        """Return when all workers have called it."""

    @abstractmethod
    def _set_rule(self, name: str, params: dict[str, Any], replace: bool) -> None:
        """Install a rule (params: complete and checked, as `Rule.params`). An equal repeat keeps all state."""

    @abstractmethod
    def _set_updater(self, updater: Updater | None) -> None:
        """Install the user's function, or remove it and any rule."""

    @abstractmethod
    def _join(self) -> None:
        """Count as a zero contribution to all later rounds; return when all have joined."""

    @abstractmethod
    def _leave(self) -> None:
        """End this worker's membership."""

    @abstractmethod
    def _close(self) -> None:
        """Flush, say goodbye, free. Called at most once (or `_abort` is), never in a forked child."""

    def _abort(self, error: BaseException) -> None:
        """Close because `error` left the `with` block: say so to the others, wait for nothing."""
        self._close()

    # --- checks

    def _ready(self) -> None:
        """Return if the store can be used.

        Raises:
            StoreClosed: closed, left, or inherited by a forked child.
        """
        self._own_process()
        if self._ended:
            raise StoreClosed(
                "the %r store %s; create another one with kvstore.create(%r)" % (self._type, self._ended, self._type)
            )

    def _own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(
                "the %r store belongs to process %d, this is its forked child %d: use it in the parent, or start"
                " children with the 'spawn' method and create a store there" % (self._type, self._pid, os.getpid())
            )

    def _end(self) -> bool:
        """Mark the store as closed; tell whether it was not before."""
        with self._registry:
            before, self._ended = self._ended, "was closed"
        return before != self._ended

    def _init_checked(self, items: list[tuple[Key, Array]]) -> None:
        names = [name for name, _ in items]
        with self._registry:
            known = next(iter(self._records), next(iter(self._starting), None))
            values.one_kind(names, known)
            for name in names:
                if name in self._records or name in self._starting:
                    raise KVError(twice(name, self._records.get(name)))
            self._starting.update(dict.fromkeys(names))
        records: list[Record] = []
        try:
            records = self._init(items)
        finally:
            with self._registry:
                for name in names:
                    self._starting.pop(name, None)
                self._records.update((record.key, record) for record in records)

    def _record(self, key: Key) -> Record:
        """Return the record of an initialised key."""
        record = self._records.get(key)
        if record is None:
            values.one_kind([key], next(iter(self._records), None))
            raise KVError(missing(key, self._records))
        return record

    def _summed(self, key: Keys, value: object) -> list[tuple[Record, Array]]:
        """Return each key's record with the sum of its arrays; a single array as it is."""
        items = [(self._record(name), arrays) for name, arrays in values.contributions(key, value)]
        for record, arrays in items:
            for array in arrays:
                record.fit(array, "pushed value")
        return [(record, arrays[0] if len(arrays) == 1 else total(arrays)) for record, arrays in items]

    def _targets(self, outs: list[tuple[Key, list[Array]]]) -> list[tuple[Record, list[Array]]]:
        items = [(self._record(name), arrays) for name, arrays in outs]
        for record, arrays in items:
            for array in arrays:
                record.fit(array, "output")
        return items


def _whole(priority: int) -> int:
    try:
        return operator.index(priority)
    except TypeError:
        raise KVError("priority is an int, not %s" % type(priority).__name__) from None
