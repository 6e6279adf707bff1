"""The sizes of a test run: `--quick` leaves out the tests with one of the markers in `LEFT_OUT`.

`scripts/test` passes `--quick`, `scripts/test --all` passes `--pairs`, a plain `pytest` neither. Tests marked `engine`
are a part of their own: `--engines` runs them and no others.

Tests of whole jobs in threads run on every path (`job`), with every placement of values (`placement`) and with values
in every kind of memory (`server_device`). With their own parameters that makes up to 288 variants of a test. A quick
run has a few that show each of these once; the others are slow. A run with `--pairs` has so many that each of these
meets each other one once, since a mistake that needs three of them at a time is rare. A plain `pytest` has all.
The end of a quick run and of one with `--pairs` says how many were left out, and what runs them.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from itertools import combinations
from typing import Any

import pytest
import slowness

LEFT_OUT = ("lab", "package", "peers", "slow", "ssh")
BY_FIXTURE = {"lab_of_session": "lab", "run_by_peer": "peers", "sshd": "ssh"}
"""A test that uses one of these fixtures, directly or through another one, gets the marker."""

LONG = ("test_gpu_guards.py",)
"""Files of quick tests that take a minute, and several in a process that has run thousands of other tests."""

DEVICE = "server_device"
"""The fixture that runs a test once for each kind of memory that servers may keep values in."""

WAYS = ("placement", "engine")
"""Fixtures that run a test once for each of several ways in which servers may work; `job` does so for paths."""

ENGINE = "engine"

COUNT = pytest.StashKey[int]()

_markers: set[str] = set()
"""The markers of the test that runs."""


def require(marker: str) -> None:
    """Fail a test that uses what its marker is for and does not have it."""
    assert marker in _markers, "mark this test:  @pytest.mark.%s" % marker


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests marked %s" % ", ".join(LEFT_OUT))
    parser.addoption("--pairs", action="store_true", help="of the variants of a job in threads, show each pair once")
    parser.addoption("--engines", action="store_true", help=f"run the tests marked {ENGINE}, and no others")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Set markers before `-m` selects by them."""
    slowness.lengthen(item)
    for fixture, marker in BY_FIXTURE.items():
        if fixture in getattr(item, "fixturenames", ()):
            item.add_marker(marker)


def few_of(variants: Mapping[str, Collection[Hashable]], chosen: Collection[str] = ()) -> set[str]:
    """Return the names of a few variants that have among them everything that any variant has, `chosen` included.

    A hash of the name decides between equals, so that in several tests things meet in different pairs.
    """
    few = set(chosen)
    missing = {thing for things in variants.values() for thing in things}
    missing.difference_update(*(variants[name] for name in chosen))
    while missing:
        best = max(variants, key=lambda name: (len(missing.intersection(variants[name])), zlib.crc32(name.encode())))
        few.add(best)
        missing.difference_update(variants[best])
    return few


def _mark_variants(items: list[pytest.Item]) -> set[pytest.Item]:
    """Mark the variants of a job in threads that are not needed to show everything once.

    Variants that a quick run leaves out for another reason are a test of their own here.

    Return those that are not needed either to show each pair of things once.
    """
    tests: defaultdict[Any, dict[str, list[Hashable]]] = defaultdict(dict)
    of_name = {item.nodeid: item for item in items}
    for name, item in of_name.items():
        own = dict(getattr(getattr(item, "callspec", None), "params", {}))
        if "job" in own or "placement" in own:
            path, device, ways = own.pop("job", ""), own.pop(DEVICE, ""), [own.pop(way, "") for way in WAYS]
            things = [("path", path), ("device", device), ("ways", *ways), ("own", repr(own))]
            tests[name.partition("[")[0], _is_left_out(item)][name] = things
    beyond_pairs: set[str] = set()
    for variants in tests.values():
        few = few_of(variants)
        for name in variants.keys() - few:
            of_name[name].add_marker("slow")
        pairs = {name: list(combinations(things, 2)) for name, things in variants.items()}
        beyond_pairs |= variants.keys() - few - few_of(pairs, few)
    return {of_name[name] for name in beyond_pairs}


def _is_left_out(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in LEFT_OUT)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not quick, of what the other options selected; else run their files first, and `LONG`.

    These files take longest, and at the end of a run one process would wait for another one's.
    """
    others = [item for item in items if bool(item.get_closest_marker(ENGINE)) != config.getoption("engines")]
    if others:
        config.hook.pytest_deselected(items=others)
        left = set(others)
        items[:] = [item for item in items if item not in left]
    beyond_pairs = _mark_variants(items)
    if config.getoption("pairs"):
        config.hook.pytest_deselected(items=list(beyond_pairs))
        items[:] = [item for item in items if item not in beyond_pairs]
        config.stash[COUNT] = len(beyond_pairs)
    marked = {item for item in items if _is_left_out(item)}
    if config.getoption("quick"):
        config.hook.pytest_deselected(items=list(marked))
        items[:] = [item for item in items if item not in marked]
        config.stash[COUNT] = len(marked)
    else:
        long = {item.path for item in items if item in marked or item.path.name in LONG}
        items.sort(key=lambda item: item.path not in long)


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
    if left_out and config.getoption("quick"):
        what, how = "tests marked %s" % ", ".join(LEFT_OUT), "scripts/test --all"
    else:
        what, how = "variants of jobs in threads, beyond each pair", ".venv/bin/pytest"
    if left_out:
        terminalreporter.write_line("left out: %d %s; to run them too:  %s" % (left_out, what, how))
