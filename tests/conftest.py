"""Fixtures that every test may ask for."""

import os
from collections.abc import Iterator

import pytest
from lab import lab, lab_of_session, pytest_pyfunc_call

__all__ = ["cache_of_session", "lab", "lab_of_session", "pytest_pyfunc_call"]


@pytest.fixture(scope="session", autouse=True)
def cache_of_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What agents keep between jobs is kept for one run of the tests, and not in the home of who runs them."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
