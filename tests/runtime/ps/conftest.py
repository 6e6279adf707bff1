"""Fixtures of the parameter server's tests: a job on every path, and a server's scripted history."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from cluster import PATHS, Cluster
from history_server import History


@pytest.fixture(params=sorted(PATHS))
def job(request: pytest.FixtureRequest) -> Callable[..., Cluster]:
    """Makes a job whose messages take one of the paths; the arguments are `Cluster`'s."""
    return partial(Cluster, over=PATHS[request.param])


@pytest.fixture
def serving() -> Iterator[Callable[..., History]]:
    """Makes servers of scripted histories (`History`), and ends them."""
    with ExitStack() as stack:

        def make(*arguments: Any, **more: Any) -> History:
            return stack.enter_context(History(*arguments, **more))

        yield make
