"""The interface between a KVStore and the kind of store behind it, and what they pass to each other.

`kvstore.KVStore` has the public calls. It brings arguments to one form, checks them against what `init` recorded, and
calls its `StoreBackend`, which does the work: `local.LocalBackend` in this process, `dist.DistBackend` on the servers.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, Union

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import DeviceArray
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.contract.process import own_pid
from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol.message import Kind
from distrun_runtime.store.keys import TYPES, Key, KeyRecord, named
from distrun_runtime.store.pending import CompletedCall, Late, Line, Pending
from distrun_runtime.store.values import First, Value, apart

if TYPE_CHECKING:
    from importlib import metadata

    from distrun_runtime.store.compress import Compression
    from distrun_runtime.store.reducer import Reducer


Contribution = tuple[KeyRecord, list[Value]]
"""A key's record and its values, one for each device: arrays, or RowSparse if the key is row-sparse."""

RowsItem = tuple[KeyRecord, Array, Callable[[Array], None]]
"""A record, the rows that are asked for (int64, ascending, each once), and what takes their values in that order."""

RowsTarget = tuple[KeyRecord, Callable[[Array, Array], None]]
"""A record of a row-sparse key, and what takes the values (n, *shape[1:]) and numbers (n,) of its rows, ascending."""

Updater = Callable[[Any, Array, Array], object]
"""updater(key, received, stored): changes `stored` in place."""


@dataclass(frozen=True)
class CallOptions:
    """How a data call is to be made."""

    priority: int = 0
    """Higher goes first, if there is a choice."""
    lent: bool = False
    """The values stay as they are until the Pending is done, so that they may be sent from where they are. Else they
    may be overwritten when the call returns, and are copied before."""
    own: bool = False
    """The values are lent, and the store's own: they are never written, so nothing has to be released."""
    scale: float = 1.0
    """What a contribution is multiplied by where it is summed, after it was compressed."""
    waits: bool = True
    """Whether the script passed wait=True. A push does not wait even then; but what follows it in the script may be
    taken to belong to it."""


def missing(key: Key, known: Iterable[Key]) -> str:
    """Return what is said of a key that was never initialised; names the keys most like it."""
    import difflib  # for a mistake only

    by_text = {str(name): name for name in known}
    near = ", ".join(repr(by_text[word]) for word in difflib.get_close_matches(str(key), list(by_text), n=3))
    like = f" (near: {near})" if near else ""
    return f"key {key!r} was never initialised in this store of {len(by_text)} keys{like}; call init first"


class Lifetime:
    """Whether a store may be used, and the calls of it that are under way. Shared by a KVStore and its backend.

    Threads: any.
    """

    def __init__(self, type_name: str) -> None:
        self.type = type_name
        """The name that the store was created with, in lower case."""
        self._lock = threading.Lock()
        self._pid = own_pid()
        self._ended = ""
        self.uses_gpus = False
        """Whether a call was given arrays in GPU memory."""
        self.late = Late()
        """Errors of calls that were not waited for."""
        self.line = Line(f"distrun-{type_name}-calls")
        """Runs calls that wait for all workers, if the caller does not."""

    @property
    def is_over(self) -> bool:
        """Whether the store was closed, left, or replaced."""
        return bool(self._ended)

    @property
    def is_own(self) -> bool:
        """Whether this is the process that created the store, not a forked child."""
        return own_pid() == self._pid

    def check(self) -> None:
        """Return if the store can be used.

        Raises:
            StoreClosed: closed, left, replaced, or inherited by a forked child.
            KVError: a GPU that it was given arrays of has failed for good.
        """
        if own_pid() != self._pid:
            self.check_process()
        if self.uses_gpus:
            # What a call had done when it failed is not known, and the other workers may wait for the rest.
            devices.gpus()
        if self._ended:
            raise StoreClosed(
                f"the {self.type!r} store {self._ended}; create another one with kvstore.create({self.type!r})"
            )

    def check_process(self) -> None:
        """Return if this is the process that created the store.

        Raises:
            StoreClosed: it is a forked child.
        """
        if not self.is_own:
            raise StoreClosed(
                f"the {self.type!r} store belongs to process {self._pid}, this is its forked child"
                f" {own_pid()}: use it in the parent, or start children with the 'spawn' method and create"
                " a store there"
            )

    def retire(self, how: str) -> None:
        """Let no further call be made, except closing; `how` is for the error, such as "was left"."""
        with self._lock:
            self._ended = self._ended or how

    def close(self) -> bool:
        """Mark the store as closed. Return whether it was not closed before."""
        with self._lock:
            before, self._ended = self._ended, "was closed"
        return before != self._ended


_SHAPE, _DTYPE, _BASE = map(operator.attrgetter, ("shape", "dtype", "base"))
_IS_WRITEABLE = operator.attrgetter("flags.writeable")


class Selection:
    """The keys of a data call, in order, with what has to be looked at in every call.

    Training calls with the same keys in every step: a store makes the selection of a list of keys once.
    """

    def __init__(self, records: Iterable[KeyRecord]) -> None:
        self.records = tuple(records)
        self.keys = [record.key for record in self.records]
        self.named = named(self.keys)
        """The keys, for people."""
        self.size_bytes = sum(record.size * record.dtype.itemsize for record in self.records)
        """Of all values."""
        self.has_rows = any(record.is_sparse for record in self.records)
        """Whether a key is row-sparse."""
        self.kept: Any = None
        """What the backend keeps of it."""
        self.pulled_next = 0
        """How often in a row a push of these keys was followed by their pull; below 0: when that was not so."""
        self.shapes = [record.shape for record in self.records]
        self.dtypes = [record.dtype for record in self.records]

    def fits(self, arrays: Any) -> bool:
        """Whether this is a list or tuple of numpy arrays of the records' shapes and dtypes, and the keys are dense.

        If not, they may fit all the same.
        """
        if self.has_rows or not (type(arrays) is tuple or type(arrays) is list) or len(arrays) != len(self.records):
            return False
        if len(arrays) == 1:
            one = arrays[0]
            return type(one) is np.ndarray and one.shape == self.shapes[0] and bool(one.dtype == self.dtypes[0])
        # All at once: a statement for each array would cost several times as much. The very type: a class derived from
        # it need not behave as an array does.
        if set(map(type, arrays)) != {np.ndarray}:
            return False
        return list(map(_SHAPE, arrays)) == self.shapes and list(map(_DTYPE, arrays)) == self.dtypes

    def takes(self, arrays: Sequence[Any]) -> bool:
        """Whether arrays that fit may be the outputs, one for each key.

        Raises:
            KVError: two of them share memory; names the keys.
        """
        if len(arrays) == 1 and (flags := arrays[0].flags).c_contiguous:
            return bool(flags.writeable)
        if not all(map(_IS_WRITEABLE, arrays)):
            return False
        own_memory = all(map(operator.is_, map(_BASE, arrays), itertools.repeat(None)))
        if not own_memory or len(set(map(id, arrays))) < len(arrays):
            apart([(record.key, None, array) for record, array in zip(self.records, arrays, strict=True)])
        return True


class StoreBackend(Protocol):
    """A kind of store, behind a KVStore. Arguments are checked and of one form; any thread may call.

    A backend never sees a key or value that does not fit, or a forked child. The store may be closed by another thread
    while it is called; `lifetime` tells.

    A call that returns a Pending does not wait for other nodes; `wait` of that Pending does. A call raises at once only
    what is known at once.

    What a method does here is right for a store that no other worker shares.
    """

    @property
    def rank(self) -> int:
        """This worker's index, from 0."""

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""

    @property
    def members(self) -> Sequence[int]:
        """Their ranks in the job, ascending."""
        return range(self.num_workers)

    lifetime: Lifetime
    """What the backend shares with its KVStore."""
    reducer: Reducer
    """Sums the values of a worker's devices; `push` and `pushpull` get these sums."""
    is_shared: bool = True
    """Collective calls wait for other workers; else they are done when they return, also with wait=False."""

    @property
    def type(self) -> str:
        """The name that the store was created with, in lower case."""
        return self.lifetime.type

    def companion(self) -> StoreBackend:
        """Return another store of the same workers, with rounds and without a rule. All workers call it."""
        raise KVError(f"a {self.type!r} store has no other workers")

    # Data

    def exclusive(self) -> AbstractContextManager[object]:
        """Return what is held around a collective call, if no other call of the process may be made meanwhile."""
        return nullcontext()

    def agree(self, facts: Mapping[str, str], of: str) -> None:
        """Compare facts by name with those of the other workers; `of` says what has them. All call it, and it waits."""

    def label(self, labels: Mapping[Key, str]) -> None:
        """Take note of what this worker calls keys; their `init` compares it where several workers share the store."""

    def reserve(self) -> int:
        """Take the next place in the order of collective calls; `init` and `assign` get it."""
        return 0

    def init(self, items: list[tuple[Key, First]], call_number: int) -> list[KeyRecord]:
        """Store a copy of each value; return the records, in that order.

        A RowSparse makes the key row-sparse; Zeros do not travel. Waits for all workers. May be called by a thread of
        the store's own, while other calls are made.
        """

    def assign(self, items: list[tuple[KeyRecord, Array]], call_number: int) -> None:
        """Replace what is stored by rank 0's values; rule state and rounds go on. Waits for all workers."""

    def delete(self, records: list[KeyRecord], call_number: int) -> None:
        """Forget keys, which may then be new ones. Waits for all workers, and for what was pushed."""

    def push(self, keys: Selection, values: Sequence[Value], call: CallOptions) -> Pending:
        """Take one summed value for each key; never write to it. If not `call.lent`, copy it before returning.

        Arrays of a GPU are borrowed from the program, as the outputs of a pull: they may be used until the Pending is
        done; of a call that is not `lent`, values until it returns.
        """

    def pull(self, keys: Selection, outs: Sequence[Sequence[DeviceArray]], call: CallOptions) -> Pending:
        """Write each stored value into all its outputs: writable, of the record's shape and dtype, of any strides if in
        the host's memory."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return a new array of undefined content, in the memory that this store moves fastest."""
        return np.empty(shape, dtype)

    def view(self, keys: Selection) -> Sequence[Array]:
        """Return the stored values, read-only, each as long as it is referred to; waits as a pull does."""
        outs = [np.empty(record.shape, record.dtype) for record in keys.records]
        self.pull(keys, [(out,) for out in outs], CallOptions()).wait()
        for out in outs:
            out.flags.writeable = False
        return outs

    def pull_rows(self, items: list[RowsItem], call: CallOptions) -> Pending:
        """Hand the values (n, *shape[1:]) of each item's rows to its function, once; the function owns them."""

    def pushpull(
        self, keys: Selection, values: Sequence[Value], outs: Sequence[Sequence[DeviceArray]], call: CallOptions
    ) -> Pending:
        """Push, then write the result into the outputs, which may share memory with the value."""

    def pushpull_rows(
        self, keys: Selection, values: Sequence[Value], items: list[RowsTarget], call: CallOptions
    ) -> Pending:
        """Push, then hand the rows that any worker pushed in the round, with what the store has of them then, to each
        item's function."""

    def steady(
        self, kind: Kind, key: Any, values: Any, outs: Any, *, priority: object, scale: object = 1.0
    ) -> Pending | None:
        """Make a push, pull or pushpull that waits, if it is as one before; None: it is not, and nothing was done.

        Arguments:
            key, values, outs: as the script gave them; None: the call has no values, or no outputs.
        """
        return None

    def meet(self) -> Pending:
        """As `barrier`, and it may wait."""
        return self.barrier()

    def planned(
        self, keys: Selection, given: Sequence[Any] | None, outs: Sequence[Any] | None, scale: float
    ) -> Callable[[], object] | None:
        """Make a push, a pull or both of arrays as the script gave them, if there is a plan for it; None: there is not.

        Returns what lets the program's streams that are then current wait for it; those that are now do.

        Arguments:
            given, outs: for each key an array or a list of arrays; nothing is known of them.
        """
        return None

    def exchange(
        self,
        keys: Selection,
        values: Sequence[Value],
        asked: Selection,
        outs: Sequence[Sequence[DeviceArray]],
        call: CallOptions,
    ) -> Pending:
        """Push, and write the result of other dense keys into the outputs; to those that are not among the keys that
        are pushed nothing is contributed. All of it is begun, or nothing."""
        raise KVError(f"exchange: a {self.type!r} store has no other workers")

    def skip(self, records: list[KeyRecord], note: Mapping[str, Any]) -> Pending:
        """Have the next round of keys skipped. Does nothing in a store without rounds."""
        return CompletedCall("skip_round")

    @property
    def compresses(self) -> bool:
        """Whether anything that is pushed may be compressed."""
        return False

    def check(self, items: list[Contribution]) -> None:
        """Return if a push would compress the sums of these values; else raise KVError and change nothing."""

    # What a push does

    def set_rule(self, spec: RuleSpec, replace: bool | None) -> None:
        """Install a rule. An equal repeat keeps all state. `replace` is None where it is a trainer's."""

    def change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the installed rule, as `RuleSpec.changed` takes them."""

    def set_updater(self, updater: Updater | None) -> None:
        """Install the user's function, or remove it and any rule."""

    def compress(self, setting: Compression, keys: list[Key] | None) -> None:
        """Compress what these keys (None: all that have no setting of their own) send from now on."""

    # States and facts

    def save(self, folder: str) -> None:
        """Write weights, rule states, rounds and residuals into the folder. All workers call it."""

    def load(self, folder: str) -> None:
        """Take up what `save` wrote. All workers call it."""

    def stats(self) -> list[dict[str, Any]]:
        """Return counters, one dict for each server."""

    def profile(self, folder: str) -> AbstractContextManager[None]:
        """Return what records a trace from its entry to its exit, and then writes it into the folder."""

    def num_dead(self, mask: int) -> int:
        """Return how many nodes of these roles (1 scheduler, 2 servers, 4 workers) are lost."""
        return 0

    # Membership

    def barrier(self) -> Pending:
        """Be done when all workers have called it."""
        return CompletedCall("barrier")

    def join(self) -> None:
        """Count as a zero contribution to all later rounds; return when all workers have joined."""

    def leave(self) -> None:
        """End this worker's membership."""

    def close(self) -> None:
        """Flush, say goodbye, free. One of `close`, `abort` and `give_up` is called, once, never in a forked child."""

    def abort(self, error: BaseException) -> None:
        """Close because `error` left the `with` block: tell the others, wait for nothing."""
        self.close()

    def give_up(self, error: BaseException) -> None:
        """Close because `error` came before the store could be used: tell the workers that wait for this one."""
        self.close()


# Stores of other packages: classes derived from `KVStoreBase`. One is known by registering the class in this process,
# or by an entry point of an installed distribution.
#
# Source: the methods of KVStoreBase are MXNet's. broadcast, pushpull, is_capable, type, rank and num_workers are all
# that a Trainer needs for dense parameters; a class may leave out the other methods, which then raise
# NotImplementedError.


StoreClass = TypeVar("StoreClass", bound="type[KVStoreBase]")


class KVStoreBase(ABC):  # no Protocol: that would keep `super().__init__()` from a user's other base classes
    """A store of your own: derive from it, and register the class.

    In the same process `@KVStoreBase.register` does it; from a package of its own, an entry point in the group
    `distrun.kvstores`. `kvstore.create(name)` then calls the class without arguments.
    """

    OPTIMIZER = "optimizer"
    """A capability: the store updates weights itself."""

    @staticmethod
    def register(kind: StoreClass) -> StoreClass:
        """Make a class known to `kvstore.create` by its name in lower case. A class decorator.

        Raises:
            KVError: a built-in kind has that name, or another class was registered by it. The same class, defined
                again, takes its own place.
        """
        name = kind.__name__.lower()
        if name in TYPES:
            raise KVError(f"store type {name!r} is built in; give class {kind.__qualname__} another name")
        with _lock:
            there = _classes.setdefault(name, kind)
            if (there.__module__, there.__qualname__) != (kind.__module__, kind.__qualname__):
                raise KVError(
                    f"store type {name!r} is {there.__module__}.{there.__qualname__} already; give"
                    f" {kind.__module__}.{kind.__qualname__} another name"
                )
            _classes[name] = kind
        return kind

    @abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Any:
        """Give keys their value, rank 0's, and write it into `out` on every worker.

        Arguments:
            key: an int or str; a Trainer gives ints.
            value: an array.
            out: an array, or a list of arrays, one for each device; a Trainer gives a list.
            priority: higher goes first, if there is a choice.
        """

    @abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Write the sum of all workers' and devices' values into `out`; without `out`, into the values.

        Arguments:
            key, priority: as for `broadcast`.
            value, out: an array, or a list of arrays, one for each device; a Trainer gives lists.
        """

    @abstractmethod
    def is_capable(self, capability: str) -> bool:
        """Tell whether the store has a capability, such as `OPTIMIZER`."""

    @property
    @abstractmethod
    def type(self) -> str:
        """The name of the kind."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's index, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that share the store."""

    # What a store may leave out

    def init(self, key: Any, value: Any) -> Any:
        """Give keys their first value."""
        self._lacks("init")

    def push(self, key: Any, value: Any, priority: int = 0) -> Any:
        """Contribute the sum of the given arrays."""
        self._lacks("push")

    def pull(self, key: Any, out: Any, priority: int = 0) -> Any:
        """Write the stored value into `out`."""
        self._lacks("pull")

    def row_sparse_pull(self, key: Any, out: Any, priority: int = 0, row_ids: Any = None) -> Any:
        """Write some rows into `out`."""
        self._lacks("row_sparse_pull")

    def barrier(self) -> Any:
        """Wait for all workers."""
        self._lacks("barrier")

    def set_optimizer(self, name: str, **params: Any) -> Any:
        """Update weights where they are stored."""
        self._lacks("set_optimizer")

    def set_gradient_compression(self, params: Mapping[str, object]) -> Any:
        """Compress what is sent."""
        self._lacks("set_gradient_compression")

    def save_states(self, folder: Union[str, os.PathLike[str]]) -> Any:
        """Write weights and rule states into a folder."""
        self._lacks("save_states")

    def load_states(self, folder: Union[str, os.PathLike[str]]) -> Any:
        """Take up what `save_states` wrote."""
        self._lacks("load_states")

    def join(self) -> Any:
        """Contribute nothing to later rounds."""
        self._lacks("join")

    def close(self) -> None:  # noqa: B027  # most stores have nothing to do
        """Give everything back."""

    def give_up(self, error: BaseException) -> None:
        """Close a store that was made for a trainer which could not be made because of `error`."""
        self.close()

    def _lacks(self, call: str) -> NoReturn:
        raise NotImplementedError(f"a {self.type!r} store has no {call}")


GROUP = "distrun.kvstores"
"""The group of entry points: name of the kind to `module:Class`."""

_classes: dict[str, type[Any]] = {}
_lock = threading.Lock()


def find_type(name: str) -> type[Any] | None:
    """Return the class of a kind that is not built in, loaded; None if there is none.

    Raises:
        KVError: it cannot be loaded, several distributions have that name, or one claims a built-in name.
    """
    with _lock:
        if name in _classes:
            return _classes[name]
    found = _points().get(name, [])
    if not found:
        return None
    if len({point.value for point in found}) > 1:
        raise KVError(f"store type {name!r} is registered more than once: {' and '.join(map(_origin, found))}")
    try:
        kind: type[Any] = found[0].load()
    # Whatever an import raises: it is another package's.
    except Exception as err:
        raise KVError(f"store type {name!r} ({_origin(found[0])}) cannot be loaded: {err}") from err
    return kind


def registered() -> list[str]:
    """Return the names of all kinds that are not built in, sorted.

    Raises:
        KVError: a distribution claims a built-in name.
    """
    with _lock:
        return sorted({*_classes, *_points()})


def _points() -> dict[str, list[metadata.EntryPoint]]:
    """Return the entry points of our group by name in lower case."""
    from importlib import metadata  # with its messages of e-mail a sixth of the import of the store

    result: dict[str, list[metadata.EntryPoint]] = {}
    for point in metadata.entry_points(group=GROUP):
        name = point.name.lower()
        if name in TYPES:
            raise KVError(f"store type {name!r} is built in, but {_origin(point)} claims it too; remove that")
        result.setdefault(name, []).append(point)
    return result


def _origin(point: metadata.EntryPoint) -> str:
    where = point.dist.name if point.dist is not None else "an unnamed distribution"
    return f"{point.value} of {where}"
