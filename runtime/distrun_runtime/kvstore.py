"""What a training script imports: `from distrun_runtime import kvstore`, then `kvstore.create(...)`.

with kvstore.create("dist_sync") as kv:
    kv.init("w", weight)
    kv.push("w", gradient)
    kv.pull("w", out=weight)
"""

from __future__ import annotations

from distrun_runtime.algo.params import did_you_mean
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.store.base import KVStore

__all__ = ["TYPES", "KVStore", "create"]

TYPES = ("local", "dist", "dist_sync", "dist_async")
"""The kinds of store; `dist` is `dist_sync`."""

LATER = (
    "device",
    "dist_device_sync",
    "dist_sync_device",
    "dist_device_async",
    "dist_async_device",
)
"""Names that are known but not in this version, each with GPU arrays."""


def create(name: str = "local") -> KVStore:
    """Return a new store; a distributed one when all nodes of the job are there.

    In a process whose DMLC_ROLE is server or scheduler a `dist` store serves, then ends the process (SystemExit 0),
    so that one command can be started by hand in every role.

    Arguments:
        name: `local` (this process only), `dist_sync` or `dist` (rounds: a pull waits for all workers), `dist_async`
            (each push is applied on arrival); in any case.

    Raises:
        TypeError: the name is not a str.
        KVError: no such kind of store.
        ContractError: the variables of a job (DMLC_...) are missing or wrong, for a distributed store.
    """
    if not isinstance(name, str):
        raise TypeError("a store is created by name (%s), not by %s" % (", ".join(TYPES), type(name).__name__))
    kind = name.lower()
    if kind not in TYPES:
        raise KVError(_unknown(name, kind))
    if kind == "local":
        role = environ.text("DMLC_ROLE").strip()
        if role in ("server", "scheduler"):
            raise KVError(
                "this process is a %s (DMLC_ROLE), which has no use for a 'local' store; it serves where the script"
                " creates a 'dist' store" % role
            )
        # Imported here, as the other one: only the kind that is asked for is loaded.
        from distrun_runtime.store.local import LocalStore

        return LocalStore(kind)
    from distrun_runtime.store.dist import create_dist

    return create_dist(kind)


def _unknown(name: str, kind: str) -> str:
    known = ", ".join(TYPES)
    if kind in LATER:
        instead = "local" if kind == "device" else "dist_async" if "async" in kind else "dist_sync"
        return "store type %r (arrays on GPUs) is not in this version; use %r with numpy arrays (known: %s)" % (
            name,
            instead,
            known,
        )
    return "unknown store type %r%s; known are %s" % (name, did_you_mean(kind, TYPES + LATER), known)
