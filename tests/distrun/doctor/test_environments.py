"""What `distrun doctor --fix` makes on a host: the program that makes it, and what is said of how it went."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import wheels
from distrun_cli import wait_until
from slowness import scaled

from distrun.doctor import examine, making
from distrun.doctor.checks import ExaminedHost
from distrun.doctor.examine import EnvironmentSpec, outcome, wanted
from distrun.fleet.commands import Ran
from distrun_runtime.coordinator.failures import Problem

LIMIT_S = 120.0
WANTED = EnvironmentSpec("h1", "/usr/bin/python3", "3.11.2", "/data/distrun/servers/python3.11-x86_64")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "data" / "distrun" / "servers" / "python3.11-x86_64"


def argv(place: Path, *requirements: str) -> list[str]:
    return [sys.executable, "-I", "-c", Path(making.__file__).read_text(), "run", str(place), *requirements]


def env(tmp_path: Path, *names: str) -> dict[str, str]:
    """The environment in which pip finds wheels of these (numpy and pyzmq without any) and nothing else."""
    wheels.make(tmp_path / "wheels", *names)
    return {**os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "HOME": str(tmp_path)}


def make(tmp_path: Path, place: Path, *names: str) -> tuple[int, dict[str, str], str]:
    """Make an environment; return exit code, what was told, and what was said meanwhile."""
    done = subprocess.run(
        argv(place, *examine.REQUIREMENTS),
        env=env(tmp_path, *names),
        capture_output=True,
        text=True,
        timeout=scaled(LIMIT_S),
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_an_environment_has_what_servers_need_and_is_made_once(tmp_path: Path, place: Path) -> None:
    code, told, said = make(tmp_path, place)
    assert code == 0, told
    assert told["path"] == str(place)
    assert "making a virtual environment" in said
    python = place / "bin" / "python"
    shown = subprocess.check_output([python, "-I", "-c", "import numpy, zmq; print(numpy.__version__)"])
    assert shown.decode().strip() == told["numpy"]
    assert place.parent.stat().st_mode & 0o077 == 0
    before = os.readlink(place)
    code, again, said = make(tmp_path, place)
    assert (code, again, said) == (0, told, "")
    assert os.readlink(place) == before
    # One that has come to harm is replaced.
    python.unlink()
    assert make(tmp_path, place)[:2] == (0, told)
    assert sorted(os.listdir(place.parent)) == sorted([place.name, os.readlink(place)])


@pytest.mark.slow
def test_hosts_that_share_the_folder_make_it_once(tmp_path: Path, place: Path) -> None:
    command, variables = argv(place, *examine.REQUIREMENTS), env(tmp_path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, env=variables, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    ended = [child.communicate(timeout=scaled(LIMIT_S)) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], ended
    assert len({out for out, _ in ended}) == 1
    assert sum(said.count("making a virtual environment") for _, said in ended) == 1
    assert sorted(os.listdir(place.parent)) == sorted([place.name, os.readlink(place)])


def test_who_waits_for_a_host_that_could_not_make_it_says_so(tmp_path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True)
    mark = place.with_name(place.name + ".run")
    mark.symlink_to("h9")
    child = subprocess.Popen(
        argv(place, *examine.REQUIREMENTS), env=env(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stderr.readline() == b"waiting for h9, which has the same folder and makes it there\n"
    mark.unlink()
    out = child.communicate(timeout=scaled(LIMIT_S))[0]
    assert json.loads(out) == {"step": "shared", "words": "h9, which has the same folder, could not make it"}
    assert os.listdir(place.parent) == []


@pytest.mark.slow
def test_what_pip_cannot_find_is_told_and_nothing_is_left(tmp_path: Path, place: Path) -> None:
    code, told, _ = make(tmp_path, place, "numpy")
    assert (code, told["step"]) == (1, "pip")
    assert "pyzmq" in told["words"]
    assert os.listdir(place.parent) == []


def test_a_folder_that_is_not_the_users_own_is_refused(tmp_path: Path, place: Path) -> None:
    place.parent.parent.mkdir(parents=True)
    (tmp_path / "other").mkdir()
    place.parent.symlink_to(tmp_path / "other")
    code, told, _ = make(tmp_path, place)
    assert (code, told["step"]) == (1, "folder")
    assert "does not belong to this user" in told["words"]
    assert os.listdir(tmp_path / "other") == []


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, place: Path) -> None:
    (tmp_path / "data").write_text("a file")
    code, told, _ = make(tmp_path, place)
    assert (code, told["step"]) == (1, "folder")
    assert str(tmp_path / "data") in told["words"]


def test_one_that_is_ended_half_way_leaves_nothing_that_is_used(tmp_path: Path, place: Path) -> None:
    child = subprocess.Popen(
        argv(place, *examine.REQUIREMENTS), env=env(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    wait_until(lambda: place.parent.is_dir() and bool(os.listdir(place.parent)), LIMIT_S, "it has begun")
    child.send_signal(signal.SIGTERM)
    out = child.communicate(timeout=scaled(LIMIT_S))[0]
    assert (child.returncode, out) == (128 + signal.SIGTERM, b"")
    assert os.listdir(place.parent) == []


@pytest.mark.slow
def test_what_was_begun_long_ago_goes_the_next_time(tmp_path: Path, place: Path) -> None:
    old = place.parent / (place.name + ".killed")
    new = place.parent / (place.name + ".now")
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (1.0, 1.0))
    assert make(tmp_path, place)[0] == 0
    assert not old.exists()
    assert new.exists(), "another may be making it"


def examined(**changes: object) -> ExaminedHost:
    python = {"version": "3.11.2", "path": "/usr/bin/python3", "numpy": "", "zmq": "", "lacks": [], "environment": {}}
    facts = {"python": {**python, "place": WANTED.place, **changes}, "debian": True, "uid": 0}
    return ExaminedHost("h1", facts, is_met=True)


@pytest.mark.parametrize(
    ("changes", "is_wanted"),
    [
        ({}, True),
        ({"numpy": "2"}, True),
        ({"numpy": "2", "zmq": "27"}, False),
        ({"environment": {"path": "/x"}}, False),
        ({"version": "3.9.2"}, False),
        ({"error": "there is no program python3"}, False),
        ({"lacks": ["ensurepip"]}, False),
    ],
)
def test_an_environment_is_made_where_modules_are_missing_and_it_can_be(
    changes: dict[str, object], is_wanted: bool
) -> None:
    assert wanted([examined(**changes), ExaminedHost("h2")]) == ([WANTED] if is_wanted else [])


def test_how_it_went_is_told_with_what_to_do() -> None:
    def told(**value: str) -> Ran:
        return Ran(code=1, out=bytearray(json.dumps(value).encode()))

    made = outcome(WANTED, told(path="/p", version="3.11.2", numpy="2", zmq="27"))
    assert (made.is_made, made.text) == (True, "/p (Python 3.11.2, numpy 2, zmq 27)")
    words = "WARNING: Retrying ([Errno -2] Name or service not known)\nERROR: No matching distribution found for numpy"
    failed = outcome(WANTED, told(step="pip", words=words))
    assert failed.text.splitlines() == [
        "pip failed:",
        "[Errno -2] Name or service not known",
        "ERROR: No matching distribution found for numpy",
    ]
    assert "package index" in failed.fix
    assert 'python3 -m venv "$at"' in failed.script
    assert "no space" in outcome(WANTED, told(step="venv", words="no space")).text
    killed = outcome(WANTED, Ran(code=137, err=bytearray(b"installing\n")))
    assert killed.text == "it did not end well (exit code 137)\ninstalling"
    assert "15 min" in outcome(WANTED, Ran(code=124, is_late=True)).text
    lost = outcome(WANTED, Problem("h1", "other", "lost h1"))
    assert (lost.is_made, lost.text, lost.fix) == (False, "lost h1", "type the same again")
