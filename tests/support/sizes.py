"""The sizes of a test run: `--quick` leaves out the tests with one of the markers in `LEFT_OUT`.

`scripts/test` passes `--quick`, `scripts/test --all` does not, and neither does a plain `pytest`. Tests marked `engine`
are a part of their own: `--engines` runs them and no others.
"""

from __future__ import annotations

from typing import Any

import pytest

LEFT_OUT = ("lab", "package", "peers", "slow", "ssh")
BY_FIXTURE = {"lab_of_session": "lab", "run_by_peer": "peers", "sshd": "ssh"}
"""A test that uses one of these fixtures, directly or through another one, gets the marker."""

ENGINE = "engine"

COUNT = pytest.StashKey[int]()

_markers: set[str] = set()
"""The markers of the test that runs."""


def require(marker: str) -> None:
    """Fail a test that uses what its marker is for and does not have it."""
    assert marker in _markers, "mark this test:  @pytest.mark.%s" % marker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests marked %s" % ", ".join(LEFT_OUT))
    parser.addoption("--engines", action="store_true", help=f"run the tests marked {ENGINE}, and no others")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Set markers before `-m` selects by them."""
    for fixture, marker in BY_FIXTURE.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(marker)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not quick, of what the other options selected; else run files with such tests first.

    These files take longest, and at the end of a run one process would wait for another one's.
    """
    others = [item for item in items if bool(item.get_closest_marker(ENGINE)) != config.getoption("engines")]
    if others:
        config.hook.pytest_deselected(items=others)
        left = set(others)
        items[:] = [item for item in items if item not in left]
    marked = {item for item in items if any(item.get_closest_marker(name) for name in LEFT_OUT)}
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=list(marked))
        items[:] = [item for item in items if item not in marked]
        config.stash[COUNT] = len(marked)
    else:
        paths = {item.path for item in marked}
        items.sort(key=lambda item: item.path not in paths)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _markers.clear()
    _markers.update(marker.name for marker in item.iter_markers())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of `-n` tells the one that prints the summary."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(COUNT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Every process of `-n` collects all tests, so each counts the same."""
    if "left_out" in getattr(node, "workeroutput", {}):
        node.config.stash[COUNT] = node.workeroutput["left_out"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    left_out = config.stash.get(COUNT, 0)
    if left_out:
        terminalreporter.write_line(
            "left out: %d tests marked %s; to run them too:  scripts/test --all" % (left_out, ", ".join(LEFT_OUT))
        )
