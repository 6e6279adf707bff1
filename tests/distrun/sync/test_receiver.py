from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest
from pythons import TOO_OLD, VERSIONS, need

from distrun.errors import UsageError
from distrun.sync import receiver, rsync
from distrun.sync.rules import check_folder
from distrun_runtime.contract import folder as folder_contract


@pytest.mark.parametrize(
    ("folder", "words", "hint"),
    [
        ("", "expected a directory on the hosts", ""),
        ("~a b/x", "expected ~/DIR or ~USER/DIR", "./~a b/x is a name"),
        ("$HOME/x", "variables are not expanded on the hosts", "write ~/x"),
        ("${HOME}", "variables are not expanded", "write ~"),
        ("$SCRATCH/x", "variables are not expanded", "./$SCRATCH/x is a name"),
        ("/", "cannot take copies", "like ~/job"),
        ("//.", "cannot take copies", ""),
        ("..", "cannot take copies", ""),
    ],
)
def test_a_destination_that_cannot_be_meant_is_refused(folder: str, words: str, hint: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_folder(folder)
    assert hint in caught.value.hint


@pytest.mark.parametrize("folder", ["/srv/job", "job", "./$x", "~/job", "~ann/job", "/a b/ü", "../job", "-x"])
def test_other_destinations_are_taken(folder: str) -> None:
    check_folder(folder)


def run(command: str, home: Path) -> subprocess.CompletedProcess[str]:
    env = {"HOME": str(home), "PATH": "%s:/usr/bin:/bin" % home}
    return subprocess.run(["sh", "-c", command], env=env, cwd=home, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_program_on_the_host_runs_under_every_python_that_is_here(version: str, tmp_path: Path) -> None:
    program = tmp_path / "rsync"
    program.write_text('#!/bin/sh\npwd; echo "$@"; exit 7\n')
    program.chmod(0o755)
    done = run(rsync.rsync_path("~/a 'b'", partial="p", python=need(version)) + " --server . ./", tmp_path)
    assert (done.returncode, done.stdout) == (7, "%s/a 'b'\n--server . ./\n" % tmp_path)
    assert done.stderr.splitlines()[0] == "distrun-sync: begin"
    assert re.fullmatch(r"distrun-sync: shell /\S+", done.stderr.splitlines()[1])
    assert [path.name for path in (tmp_path / "a 'b'").iterdir()] == [".distrun-sync"]


def test_a_host_that_comes_late_is_told_who_got_the_files_and_not_who_asks_at_the_same_time(tmp_path: Path) -> None:
    """d1 has copied; d2 has come late as well, and its link is there until it has read that."""
    (tmp_path / folder_contract.MARKER).touch()
    folder_contract.note_copy(str(tmp_path), "p", "d1")
    (tmp_path / ("p" + folder_contract.ON)).symlink_to("d2")
    done = run(rsync.rsync_path(str(tmp_path), partial="p", host="d3") + " --server . ./", tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (0, "distrun-sync: shared d1")


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_python_that_is_too_old_is_named(version: str, tmp_path: Path) -> None:
    done = run(rsync.rsync_path("~/job", python=need(version)), tmp_path)
    assert done.returncode == 127
    assert "distrun-sync: nopython " in done.stderr
    assert " is Python %s." % version in done.stderr


def test_a_host_without_python_is_said(tmp_path: Path) -> None:
    command = rsync.rsync_path("~/job").replace("python3", "no-such-python")
    done = run(command, tmp_path)
    assert done.returncode == 127
    assert "distrun-sync: nopython there is no " in done.stderr


def test_the_program_on_the_host_keeps_to_python_3_8_and_imports_only_what_is_sent() -> None:
    tree = ast.parse(Path(receiver.__file__).read_text("utf-8"), feature_version=(3, 8))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if str(name).startswith("distrun")} == {"distrun_runtime.contract.folder"}
    contract = ast.parse(Path(folder_contract.__file__).read_text("utf-8"), feature_version=(3, 8))
    imported = {node.module for node in ast.walk(contract) if isinstance(node, ast.ImportFrom)}
    assert not any(str(name).startswith("distrun") for name in imported)
