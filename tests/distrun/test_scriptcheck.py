"""A script that is not there, or has a syntax error, is told before anything is started, copied or submitted."""

from __future__ import annotations

import sys

import pytest
from distrun_cli import Distrun

LOCAL = ("launch", "-n", "1", "-s", "0", "--launcher", "local")
COPIED = ("launch", "-n", "1", "-s", "0", "--hosts", "d1", "--sync-dst-dir", "/x")


@pytest.fixture
def folder(distrun: Distrun) -> Distrun:
    (distrun.work / "train.py").write_text("print('trained')\n")
    (distrun.work / "wrong.py").write_text("import os\nif x = 1:\n    pass\n")
    return distrun


@pytest.mark.parametrize("words", [LOCAL, COPIED])
def test_a_script_that_is_not_there_is_told_with_one_of_a_near_name(words: tuple[str, ...], folder: Distrun) -> None:
    done = folder.answer(*words, sys.executable, "-u", "-W", "ignore", "trian.py", "--lr", "1")
    assert done.returncode == 2
    assert b"there is no trian.py in " in done.stderr
    assert b"did you mean train.py?" in done.stderr
    assert not folder.jobs


def test_a_syntax_error_is_told_with_its_place(folder: Distrun) -> None:
    done = folder.answer(*LOCAL, sys.executable, "wrong.py")
    assert done.returncode == 2
    assert done.stderr.startswith(b"wrong.py:2:4: SyntaxError: invalid syntax")
    assert b"\n  if x = 1:\n     ^\ndistrun: error: 1 error in the script\n" in done.stderr
    assert not folder.jobs


def test_what_another_python_may_take_is_a_warning(folder: Distrun) -> None:
    done = folder.answer(*COPIED, "--dry-run", "python3", "wrong.py")
    assert done.returncode == 0
    assert b"warning: wrong.py:2:4: SyntaxError: invalid syntax" in done.stderr


def test_what_an_activated_python_or_a_folder_beside_the_copy_may_have_is_no_error(folder: Distrun) -> None:
    (folder.work / "venv" / "bin").mkdir(parents=True)
    done = folder.answer(*LOCAL, "--activate", "venv:venv", "--dry-run", "python3", "wrong.py")
    assert b"(by this Python)" in done.stderr
    assert b"there is no" not in folder.answer(*COPIED, "--dry-run", "python3", "../new.py").stderr


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "print('trained')", "nothing.py"),
        (sys.executable, "-m", "train"),
        (sys.executable, "train.py", "nothing.py"),
        ("sh", "-c", "cp train.py new.py; exec python3 new.py"),
    ],
)
def test_other_commands_are_not_looked_at(command: tuple[str, ...], folder: Distrun) -> None:
    done = folder.run(*LOCAL, "--no-prefix", *command)
    assert (done.returncode, done.stdout) == (0, b"trained\n")


def test_a_script_that_setup_brings_is_not_missed(folder: Distrun) -> None:
    done = folder.run(*LOCAL, "--no-prefix", "--setup", "cp train.py new.py", sys.executable, "new.py")
    assert (done.returncode, done.stdout) == (0, b"trained\n"), done.stderr
