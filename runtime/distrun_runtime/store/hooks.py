"""What the kinds of store differ in: the hooks that a store's public calls come down to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Union

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.store.compress import Setting
from distrun_runtime.store.pending import Pending, Settled
from distrun_runtime.store.record import Record
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

__all__ = ["Call", "Hooks", "RowsItem", "Updater", "Value"]

Value = Union[Array, RowSparse]
"""What is pushed to one key: a RowSparse for row-sparse keys, an array for the others."""

RowsItem = tuple[Record, Array, Callable[[Array], None]]
"""A record, the rows that are asked for (int64, ascending, each once), and who takes their values in that order."""

Updater = Callable[[Any, Array, Array], object]
"""updater(key, received, stored): changes `stored` in place."""


@dataclass(frozen=True)
class Call:
    """How a data call is to be made."""

    priority: int = 0
    """Higher goes first, if there is a choice."""
    lent: bool = False
    """The values stay as they are until the Pending is done: no copy has to be made before the hook returns."""
    scale: float = 1.0
    """What a contribution is multiplied by where it is summed, after it was compressed."""


class Hooks(ABC):
    """What a kind of store does. Arguments are checked and of one form; any thread of the user's may call.

    A hook that returns a Pending does not wait for other nodes; `wait` of that Pending does. A hook raises at once
    only what is known at once.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """This worker's index, from 0."""

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """Number of workers that share the store."""

    # --- data

    def _reserve(self) -> int:
        """Take the next place in the order of calls that all workers make together; `_init` and `_assign` get it."""
        return 0

    @abstractmethod
    def _init(self, items: list[tuple[Key, Value]], ticket: int) -> list[Record]:
        """Store a copy of each value (a RowSparse makes the key row-sparse); return the records, in that order.

        It waits for all workers. It may be called by a thread of the store's own, while other calls are made.
        """

    @abstractmethod
    def _assign(self, items: list[tuple[Record, Array]], ticket: int) -> None:
        """Replace what is stored by rank 0's values; rule state and rounds go on. It waits for all workers."""

    @abstractmethod
    def _push(self, items: list[tuple[Record, Value]], call: Call) -> Pending:
        """Take one summed value a key; never write to it. If not `call.lent`, copy it before returning."""

    @abstractmethod
    def _pull(self, items: list[tuple[Record, list[Array]]], call: Call) -> Pending:
        """Write each stored value into all its outputs: writable, of the record's shape and dtype, any strides."""

    @abstractmethod
    def _pull_rows(self, items: list[RowsItem], call: Call) -> Pending:
        """Hand the values (n, *shape[1:]) of each item's rows to its function, once; they are the function's own."""

    @abstractmethod
    def _pushpull(self, items: list[tuple[Record, Value, list[Array]]], call: Call) -> Pending:
        """Push, then write the result into the outputs, which may share memory with the value."""

    def _skip(self, records: list[Record], note: Mapping[str, Any]) -> Pending:
        """Have the next round of keys skipped. Where there are no rounds, nobody waits: nothing is to be done."""
        return Settled("skip_round")

    @property
    def _compresses(self) -> bool:
        """Whether anything that is pushed may be compressed."""
        return False

    def _check(self, items: list[tuple[Record, list[Value]]]) -> None:  # noqa: B027  # most compress nothing
        """Return if `_push` would compress the sums of these values; else raise KVError and change nothing."""

    # --- what a push does

    @abstractmethod
    def _set_rule(self, spec: RuleSpec, replace: bool) -> None:
        """Install a rule. An equal repeat keeps all state."""

    @abstractmethod
    def _change_rule(self, change: Mapping[str, Any]) -> None:
        """Change parameters or multipliers of the rule that is installed, as `RuleSpec.changed` takes them."""

    @abstractmethod
    def _set_updater(self, updater: Updater | None) -> None:
        """Install the user's function, or remove it and any rule."""

    @abstractmethod
    def _compress(self, setting: Setting, keys: list[Key] | None) -> None:
        """Compress what these keys (None: all that have no setting of their own) send from now on."""

    # --- states and facts

    @abstractmethod
    def _save(self, folder: str) -> None:
        """Write weights, rule states, rounds and residuals into the folder. All workers call it."""

    @abstractmethod
    def _load(self, folder: str) -> None:
        """Take up what `_save` wrote. All workers call it."""

    @abstractmethod
    def _stats(self) -> list[dict[str, Any]]:
        """Return counters, one dict a server."""

    @abstractmethod
    def _profile(self, folder: str) -> AbstractContextManager[None]:
        """Return what records a trace from its entry to its exit, and then writes it into the folder."""

    @abstractmethod
    def _num_dead(self, mask: int) -> int:
        """Return how many nodes of these roles (1 scheduler, 2 servers, 4 workers) are lost."""

    # --- membership

    @abstractmethod
    def _barrier(self) -> Pending:
        """Be done when all workers have called it."""

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

    def _give_up(self, error: BaseException) -> None:
        """Close because `error` came before the store could be used: say so to those who wait for this worker."""
        self._close()
