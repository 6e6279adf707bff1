"""The kinds of store: the built-in names and what they mean, and stores of other packages.

A store of another package is a class derived from `KVStoreBase`. It is known by registering the class in this process,
or by an entry point of an installed distribution.

Source: the built-in names and the methods of KVStoreBase are MXNet's. There, any name that contains `dist`, `device` or
`_async` is taken; here only these. broadcast, pushpull, is_capable, type, rank and num_workers are all that a Trainer
needs for dense parameters; a class may leave out the other methods, which then raise NotImplementedError.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, Union

from distrun_runtime.errors import KVError

if TYPE_CHECKING:
    from importlib import metadata

__all__ = [
    "GROUP",
    "TYPES",
    "KVStoreBase",
    "canonical",
    "find_type",
    "is_async",
    "is_dist",
    "names",
    "on_devices",
]

TYPES = (
    *("local", "device", "dist", "dist_sync", "dist_async"),
    *("dist_device_sync", "dist_sync_device", "dist_device_async", "dist_async_device"),
)
"""The built-in kinds, as `kvstore.create` takes them."""


def is_dist(name: str) -> bool:
    """Tell whether its values are on the servers of a job."""
    return name.startswith("dist")


def is_async(name: str) -> bool:
    """Tell whether each push is applied on arrival, without rounds."""
    return "async" in name


def on_devices(name: str) -> bool:
    """Tell whether a worker's device values are summed on a device rather than by the host's threads."""
    return "device" in name


def canonical(name: str) -> str:
    """Return what a kind means to the servers and to other workers: `local`, `dist_sync` or `dist_async`.

    `dist_device_sync` is `dist_sync` to them: only how a worker sums its own devices differs, and the sums are equal.
    So workers of both kinds may share a store. If one of them is of the kind `dist_device_*`, servers may keep it on a
    GPU (`ps.placement`).
    """
    if not is_dist(name):
        return "local"
    return "dist_async" if is_async(name) else "dist_sync"


Kind = TypeVar("Kind", bound="type[KVStoreBase]")


class KVStoreBase(ABC):
    """A store of your own: derive from it, and register the class.

    In the same process `@KVStoreBase.register` does it; from a package of its own, an entry point in the group
    `distrun.kvstores`. `kvstore.create(name)` then calls the class without arguments.
    """

    OPTIMIZER = "optimizer"
    """A capability: the store updates weights itself."""

    @staticmethod
    def register(kind: Kind) -> Kind:
        """Make a class known to `kvstore.create` by its name in lower case. A class decorator.

        Raises:
            KVError: a built-in kind has that name, or another class was registered by it.
        """
        _add(kind)
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

    def _lacks(self, call: str) -> NoReturn:
        raise NotImplementedError(f"a {self.type!r} store has no {call}")


GROUP = "distrun.kvstores"
"""The group of entry points: name of the kind to `module:Class`."""

_classes: dict[str, type[Any]] = {}
_lock = threading.Lock()


def _add(kind: type[Any]) -> None:
    """Make a class known by its name in lower case. The same class, defined again, takes its own place.

    Raises:
        KVError: the name is a built-in kind's or another class's.
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


def names() -> list[str]:
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
