"""Which workers train together, and the store that they share: one for all that this package does in a process."""

from __future__ import annotations

import threading

from distrun_runtime import kvstore
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError

_lock = threading.Lock()
_shared: list[kvstore.KVStore] = []
"""None or one."""


def store() -> kvstore.KVStore:
    """Return the store that the workers share, without a rule: `dist_sync` in a job, else `local`.

    The first call in a process makes it, and so waits for all workers; after it was closed, so does the next call.
    Programs that use it make the same collective calls in the same order on every worker.

    Raises:
        KVError: the job has several workers and no servers.
        ContractError, TimedOut, PeerLost: the job cannot be joined, and why (`kvstore.create`).
    """
    with _lock:
        if not _shared or _shared[0].is_closed:
            _shared[:] = [kvstore.create("dist_sync" if _is_in_job() else "local")]
        return _shared[0]


def _is_in_job() -> bool:
    """Whether this process is one of several that train together, or of a job that has servers."""
    if environ.text("DMLC_PS_ROOT_URI") or environ.text("DMLC_ROLE") in ("server", "scheduler"):
        return True
    workers = environ.text("WORLD_SIZE") or "1"
    if workers.strip() != "1":
        raise KVError(
            f"this process is one of {workers} workers (WORLD_SIZE), whose job has no servers to exchange gradients"
            " through; fix: distrun launch -s 1"
        )
    return False


def rank() -> int:
    """Return this worker's rank, from 0; 0 of a program that runs by itself."""
    return store().rank


def world_size() -> int:
    """Return the number of workers; 1 of a program that runs by itself."""
    return store().num_workers
