"""KVStore: what a training script calls, whatever kind of store is behind it.

The public methods bring their arguments to one form, check them against what `init` recorded, and then call one
hook of the subclass (`_init`, `_push`, ...), which does the work. A hook never sees a key that does not fit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Type

import numpy as np

from distrun_runtime.store.values import Array, Key

Updater = Callable[[Any, Array, Array], object]
"""updater(key, received, stored): changes `stored` in place."""


@dataclass(frozen=True)
class Record:
    """What a store knows of one key since its `init`."""

    key: Key
    index: int
    """Placement number: an int key itself; a str key's position in the order of `init` (rank 0's, if distributed)."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int
    """Elements."""


class KVStore(ABC):
    """A store of arrays by key."""

    def __init__(self, type_name: str) -> None:
        self._type = type_name

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

    def init(self, key: Key | Sequence[Key], value: object) -> None:
        """Skeleton."""
        raise NotImplementedError

    def push(self, key: Key | Sequence[Key], value: object, priority: int = 0) -> None:
        """Skeleton."""
        raise NotImplementedError

    def pull(self, key: Key | Sequence[Key], out: object, priority: int = 0) -> None:
        """Skeleton."""
        raise NotImplementedError

    def pushpull(self, key: Key | Sequence[Key], value: object, out: object = None, priority: int = 0) -> None:
        """Skeleton."""
        raise NotImplementedError

    def broadcast(self, key: Key | Sequence[Key], value: object, out: object, priority: int = 0) -> None:
        """Skeleton."""
        raise NotImplementedError

    def barrier(self) -> None:
        """Skeleton."""
        raise NotImplementedError

    def set_optimizer(self, name: str, *, replace: bool = False, **params: object) -> None:
        """Skeleton."""
        raise NotImplementedError

    def set_updater(self, updater: Updater | None) -> None:
        """Skeleton."""
        raise NotImplementedError

    def join(self) -> None:
        """Skeleton."""
        raise NotImplementedError

    def leave(self) -> None:
        """Skeleton."""
        raise NotImplementedError

    def close(self) -> None:
        """Skeleton."""
        raise NotImplementedError

    def __enter__(self) -> KVStore:
        """Skeleton."""
        return self

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Skeleton."""
        raise NotImplementedError

    # --- hooks: what a kind of store does. Called with checked arguments, from any thread of the user's.

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
        """Install the user's function, or remove it."""

    @abstractmethod
    def _join(self) -> None:
        """Count as a zero contribution to all later rounds; return when all have joined."""

    @abstractmethod
    def _leave(self) -> None:
        """End this worker's membership."""

    @abstractmethod
    def _close(self) -> None:
        """Flush, say goodbye, free. Called at most once, never in a forked child."""

    def _abort(self, error: BaseException) -> None:
        """Close because `error` left the `with` block: say so to the others, wait for nothing."""
        self._close()
