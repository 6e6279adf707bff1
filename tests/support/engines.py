"""Runs a module's tests twice: with servers whose engine does its work at once, and with ones that do it later."""

from __future__ import annotations

from collections.abc import Iterator

import cluster
import pytest


@pytest.fixture(scope="module", params=["at once", "later"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let the servers of all jobs of a module work in each of the two ways.

    How much work there is decides it in a real job: servers do both, and what they answer must not depend on it.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "later":
            patch.setattr(cluster, "MUCH_BYTES", 0)
        yield str(request.param)
