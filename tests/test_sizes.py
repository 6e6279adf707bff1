"""The two sizes of a test run (tests/support/sizes.py), seen from outside."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import slowness

SUPPORT = Path(__file__).resolve().parent / "support"

CONFTEST = """\
import pytest
from sizes import *
from slowness import pytest_runtest_makereport

@pytest.fixture
def sshd():
    pass

@pytest.fixture(params=["here", "there", "everywhere"])
def job(request):
    pass

@pytest.fixture(params=["size", "mxnet"])
def placement(request):
    pass
"""
TESTS = """\
import pytest
import sizes

def test_small():
    pass

@pytest.mark.slow
def test_large():
    pass

def test_real(sshd):
    sizes.require("ssh")

def test_forgotten():
    sizes.require("peers")

@pytest.mark.engine
def test_queue():
    pass
"""
JOBS = """\
import pytest

def test_one(job, placement):
    pass

@pytest.mark.parametrize("servers", [1, 2])
def test_two(job, placement, servers):
    pass

@pytest.mark.parametrize("rule", ["a", "b", "c", "d"])
def test_four(job, placement, rule):
    pass

def test_alone(placement):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_slow(job, placement, servers):
    pass
"""
LIMITS = """\
import pytest
from slowness import scaled

@pytest.mark.timeout(9)
def test_own(request):
    assert request.node.get_closest_marker("timeout").args == (scaled(9),) == (27,)

def test_usual(request):
    assert request.node.get_closest_marker("timeout").args == (scaled(7),) == (21,)
"""
SLOW_TO_TELL = """\
import pytest, time

@pytest.mark.timeout(0.3)
def test_failing(request):
    request.node.repr_failure = lambda excinfo: time.sleep(0.5) or "failed"
    assert False

def test_next():
    pass
"""
MARKERS = "".join("    %s: a marker\n" % name for name in ("engine", "lab", "package", "peers", "slow", "ssh"))


def run(folder: Path, *words: str, tests: str = TESTS) -> tuple[int, str]:
    """Run tests of the above by pytest; return its exit code and what it prints."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_these.py").write_text(tests)
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --strict-markers\npythonpath = %s\nmarkers =\n" % shlex.quote(str(SUPPORT))
    )
    with (folder / "pytest.ini").open("a") as file:
        file.write(MARKERS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "xdist", "-v", *words]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # to load all plugins takes longer than these tests
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def variants(out: str, name: str) -> list[list[str]]:
    """Return the parameters of each variant of a test that passed."""
    passed = [line.split("::")[1].split(" ")[0] for line in out.splitlines() if "PASSED" in line]
    return [word.partition("[")[2].rstrip("]").split("-") for word in passed if word.startswith(name + "[")]


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_a_quick_run_says_how_many_tests_it_left_out_and_what_runs_them(
    processes: tuple[str, ...], tmp_path: Path
) -> None:
    code, out = run(tmp_path, "--quick", "-k", "not forgotten", *processes)
    assert code == 0, out
    assert "1 passed" in out
    assert "left out: 2 tests marked lab, package, peers, slow, ssh" in out
    assert "scripts/test --all" in out


def test_any_other_run_has_them_all_and_leaves_out_nothing(tmp_path: Path) -> None:
    code, out = run(tmp_path, "-k", "not forgotten")
    assert code == 0, out
    assert "3 passed" in out
    assert "left out" not in out


def test_tests_on_engines_run_alone_and_only_when_they_are_asked_for(tmp_path: Path) -> None:
    code, out = run(tmp_path, "--engines")
    assert code == 0, out
    assert "test_queue PASSED" in out
    assert "1 passed" in out


def test_a_quick_run_of_a_job_in_threads_has_each_path_placement_and_case_once(tmp_path: Path) -> None:
    """A path each, and these have both placements and both cases; for a test with four cases a variant each."""
    code, out = run(tmp_path, "--quick", tests=JOBS)
    assert code == 0, out
    for name, count, each in (
        ("test_one", 3, [3, 2]),
        ("test_two", 3, [3, 2, 2]),
        ("test_four", 4, [3, 2, 4]),
        ("test_alone", 2, [2]),
    ):
        found = variants(out, name)
        assert len(found) == count
        assert sorted(len(set(column)) for column in zip(*found, strict=True)) == sorted(each), found
    assert "test_slow" not in out
    assert "left out: %d tests" % (3 + 9 + 20 + 12) in out
    code, out = run(tmp_path, tests=JOBS)
    assert code == 0, out
    assert "56 passed" in out


def test_a_run_of_pairs_has_each_pair_of_a_path_a_placement_and_a_case_and_what_a_quick_run_has(tmp_path: Path) -> None:
    _, quick = run(tmp_path, "--quick", tests=JOBS)
    code, out = run(tmp_path, "--pairs", tests=JOBS)
    assert code == 0, out
    left_out = 56 - out.count(" PASSED")
    assert left_out > 0
    assert (
        "left out: %d variants of jobs in threads, beyond each pair; to run them too:  .venv/bin/pytest" % left_out
        in out
    )
    for name, most, values in (
        ("test_one", 6, [3, 2]),
        ("test_two", 8, [3, 2, 2]),
        ("test_four", 14, [3, 2, 4]),
        ("test_slow", 8, [3, 2, 2]),
    ):
        found = variants(out, name)
        assert len(found) <= most
        assert all(each in found for each in variants(quick, name))
        for one, other in combinations(range(len(values)), 2):
            assert len({(each[one], each[other]) for each in found}) == values[one] * values[other]


def test_a_fixture_sets_the_marker_that_an_option_selects_by(tmp_path: Path) -> None:
    code, out = run(tmp_path, "-m", "ssh")
    assert code == 0, out
    assert "test_real PASSED" in out
    assert "1 passed" in out


def test_a_test_without_the_marker_of_what_it_uses_fails_and_is_told_which(tmp_path: Path) -> None:
    code, out = run(tmp_path, "-k", "forgotten")
    assert code == 1, out
    assert "mark this test:  @pytest.mark.peers" in out


def test_time_limits_grow_by_what_was_measured_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(slowness.VARIABLE, "3.0")
    code, out = run(tmp_path, "-p", "timeout", "-o", "timeout=7", "-n", "2", tests=LIMITS)
    assert code == 0, out
    assert 1 <= slowness.measured() <= slowness.MOST


def test_a_limit_that_comes_while_a_failure_is_reported_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(slowness.VARIABLE, "1.0")
    code, out = run(tmp_path, "-p", "timeout", "-o", "timeout=60", tests=SLOW_TO_TELL)
    assert (code, "1 failed, 1 passed" in out) == (1, True), out
