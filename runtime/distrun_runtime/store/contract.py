"""KVStoreBase: the least that a store has to do, so that stores of other packages can be used in place of ours.

Source: MXNet's contract of the same name: broadcast, pushpull, is_capable, type, rank and num_workers are all that a
Trainer needs for dense parameters; everything else may be left out and then raises NotImplementedError.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, Union

from distrun_runtime.store import registry

__all__ = ["KVStoreBase"]

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
        registry.add(kind)
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
        raise NotImplementedError("a %r store has no %s" % (self.type, call))
