"""The key-value store of a training script: `from distrun_runtime import kvstore`, then `kvstore.create(...)`.

```python
with kvstore.create("dist_sync") as kv:
    kv.init("w", weight)
    kv.push("w", gradient)
    kv.pull("w", out=weight)
```
"""

# All public calls of a store are in this file. Each brings its arguments to one form and checks them against what
# `init` recorded; then the store's backend (`store.base.StoreBackend`) does the work. If a check fails, nothing was
# changed.

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Type, Union, cast, overload
from weakref import WeakKeyDictionary

import numpy as np

from distrun_runtime import reporting
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.device import DeviceArray, is_on_host
from distrun_runtime.contract import environ, streams
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.ops.params import did_you_mean
from distrun_runtime.protocol.message import GROUP_LETTERS, PULL, PUSH, PUSHPULL
from distrun_runtime.store import values
from distrun_runtime.store.base import (
    CallOptions,
    Contribution,
    KVStoreBase,
    RowsItem,
    RowsTarget,
    Selection,
    StoreBackend,
    Updater,
    find_type,
    missing,
    registered,
)
from distrun_runtime.store.collectives import Collectives
from distrun_runtime.store.compress import Compression
from distrun_runtime.store.keys import TYPES, BuiltIn, Key, KeyRecord, Zeros, is_async, is_dist, named, twice
from distrun_runtime.store.pending import BackgroundCall, BorrowedArrays, CompletedCall, Pending, awaited
from distrun_runtime.store.reducer import is_gpu_array
from distrun_runtime.store.values import First, Lookup, RowSparse, Value

__all__ = ["TYPES", "KVStore", "KVStoreBase", "Pending", "RowSparse", "create", "schedule"]

Keys = Union[Key, Sequence[Key]]
"""One key, or a list of keys."""

Folder = Union[str, "os.PathLike[str]"]

Joiner = Callable[[Callable[[], None]], None]
"""joiner(join): makes a worker join, where that takes more than the store's own `join`."""

Item = tuple[KeyRecord, Value]

SELECTED_KEYS = 1 << 20
"""Selections of keys are forgotten when they have more keys than this together."""


@overload
def create(
    name: BuiltIn = ...,
    *,
    staleness: int | None = ...,
    deterministic: bool = ...,
    group: str | None = ...,
    members: Iterable[int] | None = ...,
) -> KVStore: ...
@overload
def create(
    name: str,
    *,
    staleness: int | None = ...,
    deterministic: bool = ...,
    group: str | None = ...,
    members: Iterable[int] | None = ...,
) -> Any: ...
def create(
    name: str = "local",
    *,
    staleness: int | None = None,
    deterministic: bool = False,
    group: str | None = None,
    members: Iterable[int] | None = None,
) -> Any:
    """Return a new store; a distributed one when all nodes of the job are there.

    In a process whose DMLC_ROLE is server or scheduler a `dist` store serves, then ends the process (SystemExit 0),
    so that one command can be started by hand in every role.

    Arguments:
        name: in any case. `local` (this process only) or `dist_sync`, `dist` (rounds: a pull waits for all workers)
            or `dist_async` (each push is applied on arrival) sum a worker's device values on the host; `device`,
            `dist_device_sync`, `dist_sync_device`, `dist_device_async` and `dist_async_device` on one of the devices.
            Or the name of a registered store (`KVStoreBase`).
        staleness: for asynchronous stores: a pull waits until every other worker has pushed the key at most so many
            times less often than this one. None: no bound.
        deterministic: for synchronous stores: sums are made in the order of ranks, not as contributions arrive. Equal
            contributions then give bit-equal sums, at the price of memory for all of a round's contributions. All
            workers say the same.
        group: for distributed stores: a name for the workers that share the store, and no others. They alone create
            it; to each of them `rank`, `num_workers` and all calls mean the group. None: all workers of the job.
        members: their ranks in the job, each once, in any order; a worker's rank in the group is its place among them
            in ascending order. All members name the same. None: as in the group's first store in this process.

    Returns:
        A KVStore for the names above; a registered store is what its class makes, a KVStoreBase.

    Raises:
        TypeError: the name is not a str.
        KVError: no such kind of store, or staleness or a group is not for it. Members that are not ranks of the job,
            or not those that others name, or without this worker.
        ContractError: the variables of a job (DMLC_...) are missing or wrong, for a distributed store.
    """
    _report_crashes(name)
    reporting.offer_stacks()
    if not isinstance(name, str):
        raise TypeError(f"a store is created by name ({', '.join(TYPES)}), not by {type(name).__name__}")
    kind = name.lower()
    found = None if kind in TYPES else find_type(kind)
    if kind not in TYPES and found is None:
        known = [*TYPES, *registered()]
        if kind in foreign.MXNET_KINDS:
            fix = foreign.MXNET_KINDS[kind]
            raise KVError(f"store type {name!r} is MXNet's; fix: {fix}; known are {', '.join(known)}")
        raise KVError(f"unknown store type {name!r}{did_you_mean(kind, known)}; known are {', '.join(known)}")
    _check_options(kind, staleness, deterministic)
    ranks = _checked_members(kind, group, members)
    # Imported here, each of them: only the kind that is asked for is loaded.
    if is_dist(kind) and found is None:
        streams.open_streams()
        from distrun_runtime.store.dist import create_dist

        return KVStore(create_dist(kind, staleness, deterministic, group, ranks))
    _only_on_workers(kind)
    if found is not None:
        return _foreign(kind, found)
    from distrun_runtime.store.local import LocalBackend

    return KVStore(LocalBackend(kind))


def _report_crashes(name: object) -> None:
    """Have the agent, and the job's other nodes, told why the script ends; also if the store cannot be created."""
    if environ.text("DISTRUN_PUBLISH_FD") or (isinstance(name, str) and is_dist(name.lower())):
        reporting.watch()


def _check_options(kind: str, staleness: object, deterministic: object) -> None:
    """Return if a kind of store takes these. In one process sums are in the order of devices in any case."""
    if staleness is not None and (kind not in TYPES or not is_async(kind)):
        raise KVError(f"staleness bounds a dist_async store; a {kind!r} store has none")
    if staleness is not None and (isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0):
        raise KVError(f"staleness is a number of pushes, a whole number from 0, not {staleness!r:.60}")
    if not isinstance(deterministic, bool):
        raise KVError(f"deterministic is True or False, not {deterministic!r:.60}")
    if deterministic and (kind not in TYPES or is_async(kind)):
        raise KVError(f"a {kind!r} store has no sums of rounds that deterministic=True could order")


def _checked_members(kind: str, group: object, members: Iterable[int] | None) -> list[int] | None:
    """Return the ranks of a group's members as ints, if any are named; which ranks the job has is checked later."""
    if (group is not None or members is not None) and (kind not in TYPES or not is_dist(kind)):
        raise KVError(f"a group shares a distributed store, not a {kind!r} store; fix: create('dist_sync', group=...)")
    if group is None and members is not None:
        raise KVError("members are those of a group, which has a name; fix: create(..., group='stage-0', members=...)")
    if group is not None and not (isinstance(group, str) and 0 < len(group.strip()) == len(group) <= GROUP_LETTERS):
        raise KVError(f"a group has a name of 1 to {GROUP_LETTERS} letters, no blanks around it, not {group!r:.160}")
    if members is None:
        return None
    try:
        ranks = [operator.index(each) for each in members]
    except TypeError:
        raise KVError(f"members of a group are ranks of workers, such as [0, 2], not {members!r:.60}") from None
    if not ranks or min(ranks) < 0:
        raise KVError(f"members of a group are ranks of workers, one or more from 0, not {ranks!r:.60}")
    twice_named = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice_named:
        raise KVError(
            f"members of group {group!r}: worker-{twice_named[0]} is named {ranks.count(twice_named[0])} times"
        )
    return ranks


def _only_on_workers(kind: str) -> None:
    role = environ.text("DMLC_ROLE").strip()
    if role in ("server", "scheduler"):
        raise KVError(
            f"this process is a {role} (DMLC_ROLE), which has no use for a {kind!r} store; it serves where the"
            " script creates a 'dist' store"
        )


def _foreign(kind: str, found: type[Any]) -> KVStoreBase:
    if not (isinstance(found, type) and issubclass(found, KVStoreBase)):
        raise KVError(f"store type {kind!r} is {found!r}, which is not derived from KVStoreBase")
    return found()


class KVStore(KVStoreBase):
    """Arrays by key, shared by the workers of a job: `push` adds up, `pull` reads. Made by `create`.

    Keys are int or str (one kind a store). Every data call takes one key with one array or a list of arrays (one for
    each device), or a list of keys with a list of as many of these; a key repeated in one call is one key with all
    its arrays. Arrays have any shape, any strides, and a dtype of `arrays.dtypes.NAMES`; what is pulled into must be
    a writable numpy array, a torch tensor, or a contiguous array of torch, cupy or others in GPU memory. A key that
    `init` got a RowSparse for is row-sparse.

    Every data call returns a Pending. With wait=True (the default) the call is made when it returns, and the Pending
    is of no use; with wait=False it goes on, and the arrays are lent to the store until the Pending was waited for.

    Of arrays in GPU memory a call waits for what was queued before it on the stream that is current in this thread, of
    the array's library; and what is queued there after the call, or after its Pending was waited for, waits for it. So
    a call may return before the GPU has read or written the array.

    Every call raises KVError if its arguments do not fit, StoreClosed after `close` or `leave` or in a forked child,
    and the error of an earlier push that was not waited for. May be called from any thread. As a context manager it
    closes itself.
    """

    def __init__(self, backend: StoreBackend) -> None:
        self._backend = backend
        self._lifetime = backend.lifetime
        self._lock = threading.Lock()
        """Guards what follows."""
        self._records: dict[Key, KeyRecord] = {}
        self._starting: dict[Key, BackgroundCall] = {}
        """Keys whose init is under way, in order."""
        self._reserved = ""
        """Why no keys may be initialised beside those that are there."""
        self._joiner: Joiner | None = None
        self._whole: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
        """What needs every worker in all rounds, and what to tell a worker that joins or leaves."""
        self._selections: dict[tuple[Key, ...], Selection] = {}
        """Keys as they were given in one call to what is known of them; dense keys only."""
        self._selected_keys = 0
        self._opening = threading.Lock()
        """Held while the store is made that collective calls without keys go through; and those calls."""
        self._collectives: Collectives | None = None
        self._through: KVStore | None = None

    if not TYPE_CHECKING:  # for type checkers, names that are not there stay errors

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; it says what one of MXNet's names is called here."""
            now = f"; MXNet's {name} is {foreign.MXNET_MEMBERS[name]} here" if name in foreign.MXNET_MEMBERS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{now}", name=name, obj=self)

    def __repr__(self) -> str:
        ended = ", closed" if self.is_closed else ""
        return f"<{type(self).__name__} {self.type!r}: {len(self._records)} keys{ended}>"

    @property
    def type(self) -> str:
        """The name that the store was created with, in lower case."""
        return self._backend.type

    @property
    def rank(self) -> int:
        """This worker's index among those that share the store, from 0: its rank, or that in the store's group."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return self._backend.num_workers

    @property
    def members(self) -> list[int]:
        """Ranks in the job of the workers that share the store, ascending: `members[rank]` is this worker's."""
        return list(self._backend.members)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, left, or replaced: no call can be made any more."""
        return self._lifetime.is_over

    # Data

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
        return self._begin(items, "init", wait) if items else CompletedCall("init of no keys")

    def declare(self, key: Keys, shape: object, dtype: object = "float32", *, wait: bool = True) -> Pending:
        """Give keys a shape and dtype, and zeros as their first value: as `init`, but no value travels.

        Arguments:
            shape: for all keys; or, for a list of keys, a list of as many: `(2, 3)` is a shape, `[2, 3]` are two.
            dtype: by name, or as numpy's or torch's; for all keys, or a list of as many.

        Raises:
            KVError: as `init`.
        """
        self._ready()
        items = values.declared(key, shape, dtype)
        return self._begin(items, "declare", wait) if items else CompletedCall("declare of no keys")

    def broadcast(
        self,
        key: Keys | None,
        value: object,
        out: object = None,
        priority: int = 0,
        *,
        root: int = 0,
        wait: bool = True,
    ) -> Any:
        """Give every worker the value of worker `root`.

        Arguments:
            key: is initialised with the value, once: `init`, then `pull` into `out`. None: nothing is kept; then it is
                a collective call as `allreduce`, and returns what that does.
            root: of a call with keys and another root than 0, it waits for the workers also with wait=False.
        """
        if key is None:
            return self._calls().broadcast(value, out, root, wait)
        self._ready()
        first = values.initial(key, value)
        targets = values.outputs(key, out)
        if root != 0:
            with self._lock:
                self._check_new([name for name, _ in first])
            arrays = [one.to_dense() if isinstance(one, (RowSparse, Zeros)) else np.array(one) for _, one in first]
            self._calls().broadcast(arrays, arrays, root, True)
            first = [(name, array) for (name, _), array in zip(first, arrays, strict=True)]
        # Before anything is stored: what does not fit now could not be corrected, as init works once.
        shapes = {name: KeyRecord.of(name, 0, array) for name, array in first}
        for name, arrays in targets:
            for array in arrays:
                shapes[name].fit(array, "output")
        call = CallOptions(_numbers(priority)[0])

        def hand_out() -> None:
            keys = Selection(self._records[name] for name, _ in targets)
            self._backend.pull(keys, [arrays for _, arrays in targets], call).wait()

        if not first:
            return CompletedCall("broadcast of no keys")
        with BorrowedArrays() as borrowed:
            self._borrow(borrowed, (arrays for _, arrays in targets))
            return awaited(borrowed.until(self._begin(first, "broadcast", wait, hand_out)), wait)

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
            return CompletedCall("assign of no keys")
        what = f"assign of {named((record.key for record, _ in items))}"
        return self._together(what, lambda call_number: self._backend.assign(items, call_number), wait)

    def delete(self, key: Keys, *, wait: bool = True) -> Pending:
        """Forget keys with their values, rule states and residuals; they may be initialised anew, with other shapes.

        All workers call it, with the same keys, when each has what it has pulled.

        Raises:
            KVError: a key was never initialised, a round of it is open, or the workers disagree.
        """
        self._ready()
        records = [self._record(name) for name in values.keys_of(key)]

        def body(call_number: int) -> None:
            self._backend.delete(records, call_number)
            with self._lock:
                self._selections, self._selected_keys = {}, 0
                for record in records:
                    self._records.pop(record.key, None)

        what = f"delete of {named(record.key for record in records)}"
        return self._together(what, body, wait) if records else CompletedCall("delete of no keys")

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
        if wait:
            steady = self._backend.steady(PUSH, key, value, None, priority=priority, scale=scale)
            if steady is not None:
                return steady if type(steady) is CompletedCall else awaited(steady, steady.is_done)
        self._ready()
        number, factor = _numbers(priority, scale)
        if self._lifetime.uses_gpus and (made := self._planned("push", key, value, None, wait=wait, scale=factor)):
            return made
        with BorrowedArrays() as borrowed:
            keys, given, own = self._given(key, value, factor, borrowed)
            call = CallOptions(number, lent=own or not wait, own=own, scale=factor, waits=wait)
            if not keys.records:
                return CompletedCall("push of no keys")
            pending = borrowed.until(self._backend.push(keys, given, call))
            if wait:
                borrowed.give_back()
            # Never waits for the others; but what is already known to be wrong is raised here.
            return awaited(pending, wait and pending.is_done)

    def pull(self, key: Keys, out: object, priority: int = 0, *, wait: bool = True) -> Pending:
        """Write the stored value of each key into all its outputs.

        After pushes of this worker it includes them (synchronous: exactly the round of the last one).

        Raises:
            KVError: an output does not fit, or the outputs of two keys share memory.
        """
        if wait and (steady := self._backend.steady(PULL, key, None, out, priority=priority)) is not None:
            return steady if type(steady) is CompletedCall else awaited(steady, True)
        self._ready()
        number = _numbers(priority)[0]
        if self._lifetime.uses_gpus and (made := self._planned("pull", key, None, out, wait=wait)):
            return made
        with BorrowedArrays() as borrowed:
            keys, outs = self._outputs(key, out, borrowed)
            call = CallOptions(number, waits=wait)
            if not keys.records:
                return CompletedCall("pull of no keys")
            return awaited(borrowed.until(self._backend.pull(keys, outs, call)), wait)

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
        """Push, then pull the result into `out`; without `out`, into the pushed arrays themselves.

        Where `out` is a RowSparse, of a row-sparse key, it gets the rows that any worker pushed in this round. Not of
        asynchronous stores.
        """
        given_out = value if out is None else out
        if wait:
            steady = self._backend.steady(PUSHPULL, key, value, given_out, priority=priority, scale=scale)
            if steady is not None:
                return steady if type(steady) is CompletedCall else awaited(steady, True)
        self._ready()
        number, factor = _numbers(priority, scale)
        outs = value if out is None else out
        if self._lifetime.uses_gpus and (made := self._planned("pushpull", key, value, outs, wait=wait, scale=factor)):
            return made
        with BorrowedArrays() as borrowed:
            keys, given, _ = self._given(key, value, factor, borrowed)
            if rows := values.row_outputs(key, given_out):
                items: list[RowsTarget] = [(self._sparse(name, target), target.fill) for name, target in rows]
                order = [record.key for record in keys.records]
                items.sort(key=lambda item: order.index(item[0].key))
                call = CallOptions(number, lent=True, scale=factor, waits=wait)
                return awaited(self._backend.pushpull_rows(keys, given, items, call), wait)
            targets, outs = self._outputs(key, given_out, borrowed)
            if targets is not keys and targets.records != keys.records:
                by_key = dict(zip((record.key for record in targets.records), outs, strict=True))
                outs = [by_key[record.key] for record in keys.records]
            # Lent also when it waits: it returns when the result is there.
            call = CallOptions(number, lent=True, scale=factor, waits=wait)
            if not keys.records:
                return CompletedCall("pushpull of no keys")
            return awaited(borrowed.until(self._backend.pushpull(keys, given, outs, call)), wait)

    def empty(self, shape: int | Sequence[int], dtype: object = "float32") -> Any:
        """Return a new array of undefined content in the memory that this store moves fastest.

        Servers on this host read such an array where it is, without a copy. From `push` with wait=False until its
        Pending was waited for, and during a `pushpull`, it is lent to the store and must not be written. If a call
        is interrupted, that holds until its round is over. In every other way it is an ordinary array; where memory
        cannot be shared it is one in this way, too. It stays usable when the store is closed.

        A forked child may read it, and must not write it.

        Arguments:
            dtype: as `init` takes it, by name, or as numpy's; or torch's, then it is a tensor.

        Raises:
            KVError: no such dtype.
        """
        self._ready()
        array = self._backend.empty(values.shape_of(shape, "empty"), values.dtype_of(dtype, "empty"))
        return foreign.tensor_over(array) if foreign.is_torch_dtype(dtype) else array

    @contextmanager
    def view(self, key: Keys) -> Iterator[Any]:
        """Read stored values where they are: `with kv.view(keys) as arrays`.

        As `pull`, it gives the values of this worker's last push, and waits for them as `pull` does. The arrays are
        read-only, one for each key (for one key that is no list: the array itself), in the servers' own memory where
        they are on this host. They must not be used after the block; until then an update goes to other memory.

        Raises:
            KVError: a key was never initialised, or comes twice.
        """
        self._ready()
        keys = self._known(key)
        if keys is None:
            names = values.keys_of(key)
            if isinstance(key, (list, tuple)) and len(names) < len(key):
                raise KVError(f"view: each key once, not {len(key) - len(names)} of {len(key)} twice")
            keys = self._selected(key, [self._record(name) for name in names])
        # Never writable: to write a private mapping of the same memory costs a page fault a page, 120 ms for 40 MiB
        # where a copy takes 2 ms.
        found = list(self._backend.view(keys)) if keys.records else []
        try:
            yield found if isinstance(key, (list, tuple)) else found[0]
        finally:
            found.clear()

    # Collective calls without keys

    def allreduce(self, value: Any, out: Any = None, *, op: str = "sum", wait: bool = True) -> Any:
        """Return the sum of all workers' arrays, or their mean, minimum or maximum, element by element.

        As all collective calls: all workers make it, in the same order, with the same shapes and dtypes. It has nothing
        to do with keys, optimizers and compression of this store, and works beside them. Several with wait=False may be
        under way; the first with such arrays waits for the other workers all the same.

        Arguments:
            value: an array (of numpy, torch or cupy, of any dtype of the store, or bool), or a list of arrays.
            out: as `value`: arrays for the result; may be `value` itself. None: new arrays of the same library.
            op: `sum` (of bool: whether any is true), `mean` (of floats), `min` or `max`.
            wait: False: it needs `out`, and returns a Pending.

        Raises:
            KVError: arrays that do not fit, or the workers disagree on the call, its shapes or dtypes.
        """
        return self._calls().allreduce(value, out, op, wait)

    def allgather(self, value: Any, out: Any = None, *, wait: bool = True) -> Any:
        """Return the arrays of all workers, in the order of ranks: of shape (num_workers, *shape). See `allreduce`."""
        return self._calls().allgather(value, out, wait)

    def reduce_scatter(self, value: Any, out: Any = None, *, op: str = "sum", wait: bool = True) -> Any:
        """Return this worker's part of what `allreduce` would return.

        Arguments:
            value: of shape (num_workers, *shape): part `r` is for worker `r`, who gets an array of shape `shape`.
        """
        return self._calls().reduce_scatter(value, out, op, wait)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the object that worker `root` gives, on every worker; what the others give does not matter.

        Arguments:
            value: None, a bool, number, str or bytes, an array of numpy or torch, or a list or dict (with keys of type
                str) of these, up to 64 MiB and 100 deep. Tuples come as lists, tensors on the host. Nothing is pickled.

        Raises:
            KVError: on every worker, if there is something else in it.
        """
        return self._calls().broadcast_object(value, root)

    def allgather_object(self, value: Any) -> list[Any]:
        """Return the objects of all workers, in the order of ranks; `value` as for `broadcast_object`."""
        return self._calls().allgather_object(value)

    def exchange(
        self, key: Keys, value: object, asked: Keys, out: object, *, wait: bool = True, scale: float = 1.0
    ) -> Pending:
        """Contribute values of keys to their next round, and write the round of the keys `asked` for into `out`.

        To those that are not among the first keys, this worker contributes nothing. For collective calls; of a
        synchronous store without a rule.
        """
        self._ready()
        with BorrowedArrays() as borrowed:
            targets, outs = self._outputs(asked, out, borrowed)
            keys, given, own = self._given(key, value, scale, borrowed)
            call = CallOptions(lent=own, own=own, scale=scale)
            return awaited(borrowed.until(self._backend.exchange(keys, given, targets, outs, call)), wait)

    def _calls(self) -> Collectives:
        """Return the collective calls without keys; the first time, all workers call it."""
        if self._collectives is None:
            with self._opening:
                self._ready()
                if self._collectives is None:
                    if self.num_workers > 1:
                        self._through = self.companion()
                        self._through._lifetime.late = self._lifetime.late
                    self._collectives = Collectives(self.rank, self.num_workers, self._through)
        self._ready()
        return self._collectives

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
        asked = [(self._record(name), pairs) for name, pairs in values.wanted(key, out, row_ids)]
        lookups = [(record, Lookup(record, pairs)) for record, pairs in asked]
        values.apart_in_rows(
            [(record.key, target, rows) for record, lookup in lookups for target, rows in lookup.outputs]
        )
        items: list[RowsItem] = [(record, lookup.rows, lookup.take) for record, lookup in lookups]
        call = CallOptions(_numbers(priority)[0])
        return awaited(self._backend.pull_rows(items, call), wait) if items else CompletedCall("pull of no rows")

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
        return awaited(self._backend.skip(records, note), wait) if records else CompletedCall("skip_round of no keys")

    def check_push(self, key: Keys, value: object) -> None:
        """Return if compression would take what is to be pushed; nothing is sent. For trainers, which push in parts.

        Raises:
            KVError: a gradient has an element that is not finite; names key and element.
        """
        self._ready()
        if self._backend.compresses:
            with BorrowedArrays() as borrowed:
                items = self._fitting(values.contributions(key, value))
                self._borrow(borrowed, (each for _, each in items))
                self._backend.check(items)
                borrowed.give_back()

    def agree(self, facts: Mapping[str, str], of: str = "trainers") -> None:
        """Compare facts by name with those of the other workers, which all call this. For trainers.

        Arguments:
            of: what has these facts, for the error.

        Raises:
            KVError: they differ; names the facts, both workers and both values.
        """
        self._settled()
        self._backend.agree(facts, of)

    def reserve(self, why: str) -> None:
        """Let only the next `init` bring keys; later ones are refused, as `why` says. For trainers.

        Arguments:
            why: empty: all may.

        Raises:
            KVError: a key is there already.
        """
        with self._lock:
            there = next(iter([*self._records, *self._starting]), None)
            if why and there is not None:
                raise KVError(f"key {there!r}: {why}")
            self._reserved = why

    def label(self, labels: Mapping[Key, str]) -> None:
        """Say what this worker calls keys that it is about to initialise: `init` compares that too. For trainers."""
        self._backend.label(labels)

    def companion(self) -> KVStore:
        """Return another store of the same workers, with rounds and without a rule. All call it. For trainers."""
        return KVStore(self._backend.companion())

    # What a push does

    def set_optimizer(
        self,
        name: str,
        *,
        replace: bool | None = False,
        param_idx2name: Mapping[Key, str] | None = None,
        **params: object,
    ) -> None:
        """Update weights where they are stored: a push is then a gradient, a pull reads the weight.

        Any worker may call it. An equal repeat changes nothing and keeps the state (momentum, ...). With
        `replace`, what state both rules know by the same name goes on - after a new learning rate the momentum stays.

        Arguments:
            name: a rule of `distrun_runtime.ops.optimizers` (`sgd`, `adam`, ...), or `module:Class` for one of yours.
            replace: None is False, for a trainer, which has no such argument.
            param_idx2name: key to name, as MXNet's optimizers take it: keys whose names do not end in _weight or _gamma
                then have no weight decay (`set_multipliers(wd={key: 0})`).
            params: the rule's parameters by name, for instance learning_rate=0.1, momentum=0.9. torch's names are
                understood as well: lr, weight_decay, betas, eps.

        Raises:
            KVError: unknown name or parameter; a different rule, or an updater, is in place and `replace` is False.
        """
        self._ready()
        spec = rules.RuleSpec.of(name, params)
        decays = rules.decays_by_name(name, param_idx2name or {})
        self._backend.set_rule(spec, None if replace is None else bool(replace))
        if decays:
            self._backend.change_rule(rules.change_of(wd_mult=decays))

    def set_optimizer_params(self, **params: object) -> None:
        """Change parameters of the rule that is in place; its state stays. All servers have them when it returns.

        Raises:
            KVError: there is no rule, or it has no such parameter or range.
        """
        self._ready()
        self._backend.change_rule(rules.change_of(params=params))

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate of the rule that is in place: `set_optimizer_params(learning_rate=lr)`."""
        self.set_optimizer_params(learning_rate=lr)

    def set_multipliers(self, lr: Mapping[Key, float] | None = None, wd: Mapping[Key, float] | None = None) -> None:
        """Give keys factors of their own on the rule's learning rate and weight decay; other keys keep theirs.

        Arguments:
            lr, wd: key to factor, at least 0; 1 takes the factor back. The keys need no value yet.
        """
        self._ready()
        for given in (lr, wd):
            if not isinstance(given or {}, Mapping):
                raise KVError(f"multipliers are a dict of key to number, not {type(given).__name__}")
        factors = [{values.key_of(key): number for key, number in (given or {}).items()} for given in (lr, wd)]
        self._backend.change_rule(rules.change_of({}, *factors))

    def set_updater(self, updater: Updater | None) -> None:
        """Let a function of yours update what is stored, in place of a rule; None removes either.

        Arguments:
            updater: `updater(key, received, stored)`, called with your own key for each key of a push; it changes
                `stored` in place. `received` is its own to change or keep. What it raises, the push raises.
                Distributed: a function that every server can import from a module named at launch.

        Raises:
            KVError: it cannot be called; or the servers cannot import it.
        """
        self._ready()
        if updater is not None and not callable(updater):
            raise KVError(f"an updater is a function (key, received, stored), not {updater.__class__.__name__}")
        self._backend.set_updater(updater)

    def set_gradient_compression(self, params: Mapping[str, object], keys: object = None) -> None:
        """Compress what is sent from now on, with what was lost added to the next push (error feedback).

        Call it before `init`, on all workers alike.

        Arguments:
            params: `{"type": "2bit", "threshold": 0.5}`; types, parameters, `min_size` and `two_way` are those of
                docs/compression.md. `{"type": "none"}` ends it.
            keys: a key or a list of keys; None means all that have no setting of their own.

        Raises:
            KVError: unknown type or parameter; or a `local` store, in which nothing is sent.
        """
        self._ready()
        setting = Compression.of(params)
        self._backend.compress(setting, None if keys is None else values.keys_of(keys))

    def is_capable(self, capability: str) -> bool:
        """Tell whether the store has a capability; the only one with a name is `optimizer`: True.

        Raises:
            KVError: a capability without a name here.
        """
        if capability != "optimizer":
            raise KVError(f"no capability {capability!r} is known; there is 'optimizer'")
        return True

    # States and facts

    def save_states(self, folder: Folder) -> None:
        """Write weights, rule states, rounds and residuals into a folder, all or nothing. All workers call it.

        Raises:
            KVError: a round is open: some worker has pushed a key more often than others.
        """
        self._settled()
        self._backend.save(_path(folder))

    def load_states(self, folder: Folder) -> None:
        """Take up what `save_states` wrote, also with another number of servers. All workers call it after `init`.

        Raises:
            KVError: the folder is not whole, or its keys do not fit the store's.
        """
        self._settled()
        self._backend.load(_path(folder))

    def stats(self) -> list[dict[str, Any]]:
        """Return counters since the start, one dict a server: bytes, keys, rounds, queue, updates, staleness."""
        self._ready()
        return self._backend.stats()

    def profile(self, folder: Folder) -> AbstractContextManager[None]:
        """Return a context manager that records what workers and servers do, as Chrome trace files in `folder`.

        All workers enter and leave it.
        """
        self._ready()
        return self._backend.profile(_path(folder))

    def num_dead_node(self, node_id: int = 7, timeout: float = 60) -> int:
        """Return the number of lost nodes among the roles of `node_id`: 1 scheduler + 2 servers + 4 workers.

        Arguments:
            timeout: taken for MXNet's sake; how long a node may be silent is PS_HEARTBEAT_TIMEOUT's to say.
        """
        self._ready()
        mask = operator.index(node_id) if hasattr(node_id, "__index__") else 0
        if not 0 < mask < 8:
            raise KVError(f"node_id is a sum of 1 (scheduler), 2 (servers), 4 (workers), not {node_id!r:.60}")
        return self._backend.num_dead(mask)

    # Progress

    def report(self, *, step: object = None, total: object = None, **values: object) -> None:
        """Report how far this worker is: `distrun_runtime.report`, for scripts that have a store at hand.

        It never raises and never waits, whatever is given and whatever became of the store.

        Arguments:
            step: number of steps that are done.
            total: number of steps to do.
            values: numbers by name, such as `loss=0.3`.
        """
        reporting.report(step=step, total=total, **values)

    # Membership

    def barrier(self, *, wait: bool = True) -> Pending:
        """Wait until all workers have called it; what this worker pushed has reached the servers before.

        With wait=False the Pending is done then. Calls that all workers make together are finished first.
        """
        self._settled()
        return awaited(self._backend.meet() if wait else self._backend.barrier(), wait)

    def join(self) -> None:
        """Contribute nothing to all later rounds; return when all workers have joined. For a worker out of data.

        The store of an open trainer does what `Trainer.join` does: its weights are those of all workers afterwards.
        """
        self._check_whole("join")
        if self._joiner is None:
            self._join()
        else:
            self._joiner(self._join)

    def _join(self) -> None:
        if self._through is None:
            self._backend.join()
            return
        # Both at once: others may go on with either until they join.
        line = self._through._lifetime.line
        other = BackgroundCall("join", self._through.join, self._lifetime.late)
        line.put(other)
        self._backend.join()
        other.wait()

    def joins_by(self, joiner: Joiner | None) -> None:
        """Let the trainer that keeps weights in this store make `join`; None: by the store alone."""
        self._joiner = joiner

    def needs_all(self, user: object, why: str) -> None:
        """Let no worker join or leave while `user` is there: KVError, which says `why`. For trainers."""
        self._whole[user] = why

    def _check_whole(self, call: str) -> None:
        self._settled()
        for why in self._whole.values():
            raise KVError(f"{call}: {why}")

    def leave(self) -> None:
        """End this worker's membership: the others go on without it. Only `close` may follow."""
        self._check_whole("leave")
        if self._through is not None:
            self._through.leave()
        self._backend.leave()
        self._lifetime.retire("was left")

    def close(self) -> None:
        """Finish what is under way and give everything back. A second close does nothing.

        Raises:
            RuntimeFault: the error of a call that was not waited for. The store is closed all the same.
        """
        self._lifetime.check_process()
        # Before it counts as closed: what was begun may need the store as it is.
        self._lifetime.line.finish()
        try:
            if self._through is not None:
                self._through.close()
        finally:
            if self._lifetime.close():
                with self._lock:
                    self._selections.clear()
                self._backend.close()
                self._lifetime.late.raise_first()

    def give_up(self, error: BaseException) -> None:
        """Close a store that cannot be used, because of `error`; the process stays in the job.

        The next call that all workers make together raises the error on the others. Then all may make another store.
        """
        if self._lifetime.is_own and self._lifetime.close():
            if self._through is not None:
                self._through.give_up(error)
            self._backend.give_up(error)

    def __enter__(self) -> KVStore:
        """Return the store."""
        self._ready()
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; after an error, tell the other workers and wait for nothing. Nothing in a forked child."""
        if not self._lifetime.is_own:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._lifetime.close():
            self._backend.abort(error)

    # Whether a call may be made

    def _ready(self) -> None:
        """Return if the store can be used.

        Raises:
            StoreClosed: closed, left, or inherited by a forked child.
            RuntimeFault: the error of an earlier call that was not waited for.
        """
        self._lifetime.check()
        self._lifetime.late.raise_first()

    def _settled(self) -> None:
        """Return if the store can be used, when the collective calls that were begun are done."""
        self._ready()
        self._lifetime.line.finish()

    # Collective calls

    def _begin(
        self, items: Sequence[tuple[Key, First]], call: str, wait: bool, then: Callable[[], None] | None = None
    ) -> Pending:
        """Initialise keys, then call `then`."""

        def body(call_number: int) -> None:
            self._start(items, call_number)
            if then is not None:
                then()

        names = [name for name, _ in items]
        # In this thread: libraries have a current device in each.
        self._backend.reducer.prepare(KeyRecord.of(name, 0, value) for name, value in items)
        return self._together(f"{call} of {named(names)}", body, wait, names)

    def _together(self, what: str, body: Callable[[int], None], wait: bool, new: Sequence[Key] = ()) -> Pending:
        """Make a call that all workers make in the same order; `new` are the keys that it initialises."""
        line = self._lifetime.line
        with self._backend.exclusive():
            with self._lock:
                self._check_new(new)
                call_number = self._backend.reserve()
                task = BackgroundCall(what, lambda: body(call_number), self._lifetime.late)
                self._starting.update(dict.fromkeys(new, task))
                # Behind those that are under way, so that all workers make them in one order.
                queued = self._backend.is_shared and not (wait and line.is_idle)
                if queued:
                    line.put(task)
            if not queued:
                with self._lifetime.late.told(task) if wait else nullcontext():
                    task.run()
            return awaited(task, wait)

    def _check_new(self, names: Sequence[Key]) -> None:
        known = next(iter(self._records), next(iter(self._starting), None))
        values.one_kind(names, known)
        if names and self._reserved and known is not None:
            raise KVError(f"{named(names)}: {self._reserved}")
        for name in names:
            if name in self._records or name in self._starting:
                raise KVError(twice(name, self._records.get(name)))

    def _start(self, items: Sequence[tuple[Key, First]], call_number: int) -> None:
        records: list[KeyRecord] = []
        try:
            records = self._backend.init(list(items), call_number)
        finally:
            with self._lock:
                for name, _ in items:
                    self._starting.pop(name, None)
                self._records.update((record.key, record) for record in records)

    # Whether values fit their keys

    def _record(self, key: Key) -> KeyRecord:
        """Return the record of a key; of one whose init is under way, when that is done."""
        with self._lock:
            record, starting = self._records.get(key), self._starting.get(key)
            first = next(iter(self._records), None)
        if record is None and starting is not None:
            starting.wait()
            record = self._records.get(key)
        if record is None:
            values.one_kind([key], first)
            raise KVError(missing(key, self._records))
        return record

    def _sparse(self, key: Key, out: RowSparse) -> KeyRecord:
        """Return the record of a row-sparse key that the output fits."""
        record = self._record(key)
        record.fit(out, "output")
        if not record.is_sparse:
            raise KVError(f"key {key!r} is not row-sparse: its result goes to an array")
        return record

    def _fitting(self, given: Iterable[tuple[Key, list[Value]]], noun: str = "pushed value") -> list[Contribution]:
        """Return each key's record with its values, of the key's storage kind.

        Raises:
            KVError: a key was never initialised, or a value has another shape or dtype; `noun` is what it is.
        """
        items = [(self._record(name), each) for name, each in given]
        for record, each in items:
            try:
                for value in each:
                    record.fit(value, noun)
            except KVError as err:
                hint = values.list_hint(each, dtypes.name_of(record.dtype)) if record.shape else ""
                raise KVError(f"{err}{hint}") from None
        return [(record, [_stored_as(record, value) for value in each]) for record, each in items]

    def _planned(
        self, call: str, key: Keys, value: object, out: object, *, wait: bool, scale: float = 1.0
    ) -> Pending | None:
        """Make a call with arrays on GPUs, if the store has a plan for it; None: it has none."""
        known = self._known(key)
        if known is None:
            return None
        given, outs = (None if each is None else _listed(key, each) for each in (value, out))
        what = f"{call} of {known.named}"
        try:
            made = self._backend.planned(known, given, outs, scale)
        except KVError as err:
            return awaited(CompletedCall(what, err, self._lifetime.late), wait)
        return None if made is None else CompletedCall(what, then=None if wait else made)

    def _given(
        self, key: Keys, value: object, scale: float, borrowed: BorrowedArrays
    ) -> tuple[Selection, Sequence[Value], bool]:
        """Return the keys of a push, each one's sum over its devices, and whether these are the store's own arrays."""
        known, given = self._known(key), _listed(key, value)
        if known is not None and known.fits(given) and not self._backend.compresses:
            _scalable(known.records, scale)
            return known, given, False
        items = self._fitting(values.contributions(key, value))
        _scalable((record for record, _ in items), scale)
        self._borrow(borrowed, (each for _, each in items))
        sums = self._backend.reducer.reduce(items)
        own = all(total is not given for total, (_, each) in zip(sums, items, strict=True) for given in each)
        return self._selected(key, [record for record, _ in items]), sums, own

    def _outputs(
        self, key: Keys, out: object, borrowed: BorrowedArrays
    ) -> tuple[Selection, Sequence[Sequence[DeviceArray]]]:
        """Return the keys of a pull, and the outputs of each."""
        known, given = self._known(key), _listed(key, out)
        if known is not None and known.fits(given) and known.takes(given):
            return known, list(zip(given, strict=False))
        items = [(self._record(name), arrays) for name, arrays in values.outputs(key, out)]
        for record, arrays in items:
            for array in arrays:
                record.fit(array, "output")
        self._borrow(borrowed, (arrays for _, arrays in items))
        return self._selected(key, [record for record, _ in items]), [arrays for _, arrays in items]

    def _borrow(self, borrowed: BorrowedArrays, given: Iterable[Sequence[Value]]) -> None:
        """Borrow the arrays that are in GPU memory."""
        arrays = [each for some in given for each in some if is_gpu_array(each)]
        if arrays:
            self._lifetime.uses_gpus = True
            borrowed.take(arrays)

    def _known(self, key: Keys) -> Selection | None:
        """Return the selection of keys that were used before; None: they have to be looked at one by one."""
        if type(key) is str or type(key) is int:
            return self._selections.get((key,))
        if type(key) is not list and type(key) is not tuple:
            return None
        names = tuple(key)
        try:
            found = self._selections.get(names)
        except TypeError:  # Something that is no key.
            return None
        if found is None or type(found.records[0].key) is str:
            return found
        # Equal keys may be of other types: True, numpy's integers.
        return found if set(map(type, names)) == {int} else None

    def _selected(self, key: Keys, records: list[KeyRecord]) -> Selection:
        """Return the selection of these records, and keep it if it is that of the keys as they were given."""
        keys = Selection(records)
        names = tuple(key) if isinstance(key, (list, tuple)) else (key,)
        if records and len(names) == len(records) and set(map(type, names)) == {type(records[0].key)}:
            with self._lock:
                if self._selected_keys > SELECTED_KEYS:
                    self._selections, self._selected_keys = {}, 0
                keys = self._selections.setdefault(cast("tuple[Key, ...]", names), keys)
                self._selected_keys += len(names)
        return keys


def _listed(key: Keys, given: object) -> Sequence[Any]:
    """Return what was given for a list of keys, or for one key, as a list; empty: in no such form."""
    if type(key) is str or type(key) is int:
        return (given,)
    return given if type(given) is list or type(given) is tuple else ()


def _numbers(priority: int, scale: float = 1.0) -> tuple[int, float]:
    """Return priority and scale of a call as numbers that can be used."""
    try:
        number = operator.index(priority)
    except TypeError:
        raise KVError(f"priority is an int, not {type(priority).__name__}") from None
    try:
        factor = operator.truediv(scale, 1)
    except (TypeError, ValueError):
        factor = math.nan
    if not math.isfinite(factor):
        raise KVError(f"scale is a finite number, not {scale!r:.60}")
    return number, factor


def _scalable(records: Iterable[KeyRecord], scale: float) -> None:
    """Return if values of all these records can be multiplied by a scale."""
    for record in records if scale != 1 else ():
        if not dtypes.is_float(record.dtype):
            raise KVError(
                f"key {record.key!r}: {dtypes.name_of(record.dtype)} values are pushed with scale 1, not {scale:g}"
            )


def _path(folder: Folder) -> str:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise KVError(f"a folder is a path, such as 'states' or a pathlib.Path, not {folder!r:.60}")
    return os.fspath(folder)


def _stored_as(record: KeyRecord, value: Value) -> Value:
    """Return a value in the form in which the key's values are pushed."""
    if record.is_sparse:
        if isinstance(value, RowSparse):
            return value
        table = value if is_on_host(value) else devices.gpus().borrowing.host(value)
        return RowSparse(table, np.arange(record.shape[0]), record.shape)
    return value.to_dense() if isinstance(value, RowSparse) else value
