"""A store that only notes what its hooks were given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from distrun_runtime.store.base import Call, Key, KVStore, Record, Updater, Value
from distrun_runtime.store.pending import Pending, Settled
from distrun_runtime.store.sparse import RowSparse


class Later(Pending):
    """An outcome that a test decides."""

    def __init__(self, is_done: bool = False, error: Exception | None = None) -> None:
        self.what = "a call"
        self.done = is_done
        self.error = error
        self.waits: list[float | None] = []

    @property
    def is_done(self) -> bool:
        return self.done

    def wait(self, timeout_s: float | None = None) -> None:
        self.waits.append(timeout_s)
        if self.error:
            raise self.error


class Noting(KVStore):
    """Notes each hook that was called, with its arguments."""

    def __init__(self) -> None:
        super().__init__("noting")
        self.calls: list[tuple[Any, ...]] = []
        self.tickets = 0
        self.fail: Exception | None = None
        self.during_init: Callable[[], None] | None = None
        self.outcome: Callable[[], Pending] = lambda: Settled("noted")

    rank = property(lambda self: 0)  # type: ignore[assignment]
    num_workers = property(lambda self: 1)  # type: ignore[assignment]

    def _reserve(self) -> int:
        self.calls.append(("reserve",))
        self.tickets += 1
        return self.tickets

    def _init(self, items: list[tuple[Key, Value]], ticket: int) -> list[Record]:
        self.calls.append(("init", items, ticket))
        if self.during_init:
            self.during_init()
        if self.fail:
            raise self.fail
        return [Record.of(key, n, value) for n, (key, value) in enumerate(items)]

    def _noted(self, *call: Any) -> Pending:
        self.calls.append(call)
        return self.outcome()

    def _assign(self, items: Any, ticket: int) -> None:
        self.calls.append(("assign", items, ticket))

    def _push(self, items: Any, call: Call) -> Pending:
        return self._noted("push", items, call)

    def _pull(self, items: Any, call: Call) -> Pending:
        return self._noted("pull", items, call)

    def _pull_rows(self, items: Any, call: Call) -> Pending:
        return self._noted("rows", items, call)

    def _pushpull(self, items: Any, call: Call) -> Pending:
        return self._noted("pushpull", items, call)

    def _barrier(self) -> Pending:
        return self._noted("barrier")

    def _set_rule(self, spec: Any, replace: bool) -> None:
        self.calls.append(("rule", spec, replace))

    def _change_rule(self, change: Any) -> None:
        self.calls.append(("change", change))

    def _set_updater(self, updater: Updater | None) -> None:
        self.calls.append(("updater", updater))

    def _compress(self, setting: Any, keys: Any) -> None:
        self.calls.append(("compress", setting, keys))

    def _save(self, folder: str) -> None:
        self.calls.append(("save", folder))

    def _load(self, folder: str) -> None:
        self.calls.append(("load", folder))

    def _stats(self) -> list[dict[str, Any]]:
        return [{"keys": 2}]

    def _profile(self, folder: str) -> AbstractContextManager[None]:
        self.calls.append(("profile", folder))
        return nullcontext()

    def _num_dead(self, mask: int) -> int:
        return mask

    def _join(self) -> None:
        self.calls.append(("join",))

    def _leave(self) -> None:
        self.calls.append(("leave",))

    def _close(self) -> None:
        self.calls.append(("close",))

    def _abort(self, error: BaseException) -> None:
        self.calls.append(("abort", error))


def noted() -> Noting:
    """Return a store with keys `a` (2 float32), `b` (an int64) and `t` (row-sparse, 4 rows of 2 float32)."""
    kv = Noting()
    kv.init(["a", "b", "t"], [np.zeros(2, np.float32), np.zeros((), np.int64), RowSparse.empty((4, 2))])
    kv.calls.clear()
    kv.tickets = 0
    return kv
