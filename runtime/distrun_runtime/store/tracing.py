"""Traces: what this worker and the servers did, as files for Chrome's trace viewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distrun_runtime.errors import KVError
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.profile import prepare, write
from distrun_runtime.store.link import StoreLink

__all__ = ["profile"]


@contextmanager
def profile(link: StoreLink, folder: str) -> Iterator[None]:
    """Record until the block ends, then write `worker-R.json`, and in rank 0 also `server-I.json` of every server.

    Servers record from when rank 0 begins until it ends.

    Raises:
        KVError: the folder cannot be made, which is tried before anything is recorded; or a profile is under way.
    """
    recorder = link.node.recorder
    if recorder.is_on:
        raise KVError("worker-%d is being profiled already: one profile at a time" % link.rank)
    prepare(folder)
    if link.rank == 0:
        link.servers("profile", Kind.PROFILE, {"action": "start"})
    recorder.start()
    try:
        yield
    finally:
        events = recorder.stop("worker-%d@%s" % (link.rank, link.node.config.host))
        # Before anything is written: what cannot be must not leave the servers recording.
        stopped = link.servers("profile", Kind.PROFILE, {"action": "stop"}) if link.rank == 0 else []
        write(folder, "worker-%d.json" % link.rank, events)
        for server, body in enumerate(stopped):
            write(folder, "server-%d.json" % server, body["events"])
