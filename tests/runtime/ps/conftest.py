"""Fixtures of the parameter server's tests: a job on every path, and a server's scripted history."""

from __future__ import annotations

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


@pytest.fixture(params=sorted(PATHS))
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cluster]:
    """Makes a job whose messages take one of the paths; the arguments are `Cluster`'s.

    On the path within the process, stores of all workers are those of a group (`cluster.AS_GROUP`).

    Its nodes are interrupted where that may do harm (`delays`); each test has a seed of its own. Not where a
    module says that it COUNTS_MESSAGES: what is gathered into one message depends on who is first. There, too, calls
    that are planned and others come in any order.
    """
    if not getattr(request.module, "COUNTS_MESSAGES", False):
        delay(monkeypatch, request.node.nodeid)
        alternate(request.node.nodeid, monkeypatch.setattr)
    monkeypatch.setattr(cluster, "AS_GROUP", request.param == "inproc")
    return partial(Cluster, over=PATHS[request.param])


@pytest.fixture
def serving() -> Iterator[Callable[..., History]]:
    """Makes servers of scripted histories (`History`), and ends them."""
    with ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> History:
            return stack.enter_context(History(*arguments, **more))

        yield make
