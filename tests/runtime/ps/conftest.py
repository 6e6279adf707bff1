"""Fixtures of the parameter server's tests: a job on every path, and a server's scripted history."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import cluster
import pytest
from alternation import alternate
from cluster import PATHS, Cluster
from delays import delay
from history_server import History

from distrun_runtime.ps.steady import Steady


@pytest.fixture(params=sorted(PATHS))
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    """Makes a job whose messages take one of the paths; the arguments are `Cluster`'s.

    On the path within the process, stores of all workers are those of a group (`cluster.AS_GROUP`). There and over TCP,
    the servers know every second message by its bytes (`ps.steady`), else all that they can.

    Its nodes are interrupted where that may do harm (`delays`); each test has a seed of its own. Not where a
    module says that it COUNTS_MESSAGES: what is gathered into one message depends on who is first. There, too, calls
    that are planned and others come in any order.
    """
    if not getattr(request.module, "COUNTS_MESSAGES", False):
        delay(monkeypatch, request.node.nodeid)
        alternate(request.node.nodeid, monkeypatch.setattr)
    monkeypatch.setattr(cluster, "AS_GROUP", request.param == "inproc")
    if request.param in ("inproc", "tcp"):
        know_every_second(monkeypatch)
    return partial(Cluster, over=PATHS[request.param])


@pytest.fixture
def run(job: Callable[..., Cluster]) -> Callable[..., list[Any]]:
    """Runs `script(kv)` in every worker of a job on one of the paths, as `cluster.run_job` does."""

    def run(script: Any, *counts: int, type_name: str = "dist_sync", **settings: Any) -> list[Any]:
        with job(*counts, **settings) as made:
            return made.run(script, type_name)

    return run


@pytest.fixture
def run_sessions(job: Callable[..., Cluster]) -> Callable[..., list[Any]]:
    """Runs `script(session)` in every worker of a job on one of the paths."""

    def run(script: Any, *counts: int, **settings: Any) -> list[Any]:
        with job(*counts, **settings) as made:
            return made.run_sessions(script)

    return run


def know_every_second(patch: pytest.MonkeyPatch) -> None:
    """Have servers know only every second of the messages that they know by their bytes."""
    take, number = Steady.take, itertools.count()

    def take_or_not(self: Steady, *arguments: Any) -> Any:
        return take(self, *arguments) if next(number) % 2 else None

    patch.setattr(Steady, "take", take_or_not)


@pytest.fixture
def serving() -> Iterator[Callable[..., History]]:
    """Makes servers of scripted histories (`History`), and ends them."""
    with ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> History:
            return stack.enter_context(History(*arguments, **more))

        yield make


@pytest.fixture
def server(serving: Callable[..., History]) -> History:
    """A server of two workers with the keys `a` and `b`."""
    return serving()
