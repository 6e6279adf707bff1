"""The kinds of store: their names, what each means, and which mean the same. Pure.

Source: the names are MXNet's. There any name that contains `dist`, `device`, `_async` is taken; here only these.
"""

from __future__ import annotations

__all__ = ["TYPES", "canonical", "is_async", "is_dist", "on_devices"]

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
    So workers of both kinds may share a store.
    """
    if not is_dist(name):
        return "local"
    return "dist_async" if is_async(name) else "dist_sync"
