"""What commands other than `launch` do with engines: examine one, find and cancel what it has of mine."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from distrun import backends
from distrun.doctor.checks import BAD, HERE, OK, CheckRow
from distrun.errors import UsageError
from distrun.options import SITE, configured
from distrun.request import EngineOptions
from distrun_runtime.contract import address, facts
from distrun_runtime.coordinator.jobstore import JobStore

if TYPE_CHECKING:
    from distrun.backends.engine import FoundJob
    from distrun.backends.queue import QueueBackend


def engine_of(name: str, options: Mapping[str, Any], env: Mapping[str, str]) -> QueueBackend | None:
    """Return the backend of an engine, told what the options and the configuration file say; None if it is none.

    Raises:
        UsageError: there is no such launcher, or the file cannot be read.
    """
    backend = backends.load(name) if name else None
    if backend is None or not backend.is_engine:
        return None
    found = cast("QueueBackend", backend)
    own = {row.key: options[row.key] for row in SITE if options[row.key]}
    found.engine.options = EngineOptions(own=own, config=configured(name, env))
    return found


def rows(backend: QueueBackend) -> list[CheckRow]:
    """Return what is there of what a launch by an engine needs."""
    from distrun.backends.engine import CheckResult, EngineError

    try:
        findings = backend.engine.examine()
    except EngineError as err:
        findings = [CheckResult(False, str(err), err.hint)]
    found = [
        CheckRow(HERE, backend.name, OK, each.text)
        if each.ok
        else CheckRow(HERE, backend.name, BAD, each.text, each.fix or "see the page on it")
        for each in findings
    ]
    own = address.own()
    text = f"agents reach this machine at {', '.join(own)}" if own else "this machine has no address but its own"
    fix = "" if own else "--coordinator-address A, an address at which the nodes reach it"
    return [*found, CheckRow(HERE, "coordinator", OK if own else BAD, text, fix)]


def abandoned(found: Sequence[FoundJob], store: JobStore) -> list[FoundJob]:
    """Return the jobs of an engine whose coordinator does not live, as far as this machine's job store says.

    Raises:
        JobStoreError: the note of a job that goes on is damaged.
    """
    from distrun.backends import engine, queue

    living = {queue.recorded_marker(job.path) for job in store.list() if job.standing() in facts.GOING}
    return [each for each in found if each.marker.startswith(engine.MARK) and each.marker not in living]


def nodes_of_lost(backend: QueueBackend, store: JobStore) -> list[str]:
    """Return the nodes on which jobs of an engine may have left processes, as far as this machine's job store says.

    These are jobs whose coordinator is lost, that lost a node, or that ended with processes that were left. There are
    none if the engine starts no program on a node that it is told.
    """
    from distrun_runtime.errors import JobStoreError

    found: dict[str, None] = {}
    for job in store.list() if backend.engine.on_node("node", ("true",)) else ():
        with contextlib.suppress(JobStoreError, KeyError):
            if job.standing() in facts.GOING or job.is_unplanned or job.plan().backend != backend.name:
                continue
            outcome = job.outcome()
            if outcome is None or outcome["reason"] == facts.HOST_LOST or outcome["survivors"]:
                found.update(dict.fromkeys(host.name for host in job.plan().hosts))
    return list(found)


def cancel(backend: QueueBackend, chosen: Sequence[FoundJob]) -> dict[str, str]:
    """Cancel jobs; return what went wrong, by marker."""
    from distrun.backends.engine import EngineError

    problems: dict[str, str] = {}
    for each in chosen:
        try:
            backend.cancelled(each.handle)
        except EngineError as err:
            problems[each.marker] = str(err)
    return problems


def need(name: str, backend: QueueBackend | None) -> QueueBackend:
    """Return the backend. Raises UsageError if it is not an engine's."""
    if backend is None:
        raise UsageError(
            f"--launcher {name} is no engine: its hosts are asked", "distrun kill -H FILE --stale, without --launcher"
        )
    return backend
