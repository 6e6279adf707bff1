"""What a training script imports: `from distrun_runtime import kvstore`, then `kvstore.create(...)`.

```python
with kvstore.create("dist_sync") as kv:
    kv.init("w", weight)
    kv.push("w", gradient)
    kv.pull("w", out=weight)
```
"""

from __future__ import annotations

from typing import Any, Literal, overload

from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.ops.params import did_you_mean
from distrun_runtime.store import kinds, registry
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.contract import KVStoreBase
from distrun_runtime.store.kinds import TYPES
from distrun_runtime.store.pending import Pending
from distrun_runtime.store.sparse import RowSparse

__all__ = ["TYPES", "KVStore", "KVStoreBase", "Pending", "RowSparse", "create", "schedule"]


_BuiltIn = Literal[
    "local",
    "device",
    "dist",
    "dist_sync",
    "dist_async",
    "dist_device_sync",
    "dist_sync_device",
    "dist_device_async",
    "dist_async_device",
]
"""`TYPES`, for type checkers."""


@overload
def create(name: _BuiltIn = ..., *, staleness: int | None = ...) -> KVStore: ...
@overload
def create(name: str, *, staleness: int | None = ...) -> Any: ...
def create(name: str = "local", *, staleness: int | None = None) -> Any:
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

    Returns:
        A KVStore for the names above; a registered store is what its class makes, a KVStoreBase.

    Raises:
        TypeError: the name is not a str.
        KVError: no such kind of store, or staleness is not for it.
        ContractError: the variables of a job (DMLC_...) are missing or wrong, for a distributed store.
    """
    _report_crashes(name)
    if not isinstance(name, str):
        raise TypeError("a store is created by name (%s), not by %s" % (", ".join(TYPES), type(name).__name__))
    kind = name.lower()
    found = None if kind in TYPES else registry.find(kind)
    if kind not in TYPES and found is None:
        known = [*TYPES, *registry.names()]
        raise KVError("unknown store type %r%s; known are %s" % (name, did_you_mean(kind, known), ", ".join(known)))
    bound = _staleness(kind, staleness)
    # Imported here, each of them: only the kind that is asked for is loaded.
    if kinds.is_dist(kind) and found is None:
        from distrun_runtime.store.dist import create_dist

        return create_dist(kind, **bound)
    _only_on_workers(kind)
    if found is not None:
        return _foreign(kind, found)
    from distrun_runtime.store.local import LocalStore

    return LocalStore(kind)


def _report_crashes(name: object) -> None:
    """Have the agent, and the job's other nodes, told why the script ends; also if the store cannot be created."""
    if environ.text("DISTRUN_PUBLISH_FD") or (isinstance(name, str) and kinds.is_dist(name.lower())):
        from distrun_runtime.ps import crash

        crash.watch()


def _staleness(kind: str, staleness: object) -> dict[str, Any]:
    if staleness is None:
        return {}
    if kind not in TYPES or not kinds.is_async(kind):
        raise KVError("staleness bounds a dist_async store; a %r store has none" % kind)
    if isinstance(staleness, bool) or not isinstance(staleness, int) or staleness < 0:
        raise KVError("staleness is a number of pushes, a whole number from 0, not %.60r" % (staleness,))
    return {"staleness": staleness}


def _only_on_workers(kind: str) -> None:
    role = environ.text("DMLC_ROLE").strip()
    if role in ("server", "scheduler"):
        raise KVError(
            "this process is a %s (DMLC_ROLE), which has no use for a %r store; it serves where the script"
            " creates a 'dist' store" % (role, kind)
        )


def _foreign(kind: str, found: type[Any]) -> KVStoreBase:
    if not (isinstance(found, type) and issubclass(found, KVStoreBase)):
        raise KVError("store type %r is %r, which is not derived from KVStoreBase" % (kind, found))
    return found()
