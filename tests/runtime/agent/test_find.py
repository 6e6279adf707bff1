"""The tool `find`: which files of a folder patterns name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from distrun_runtime.agent import query


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "job"
    for name in ("a.txt", "out/b.txt", "out/.meta", "out/deep/c.txt", "out/deep/er/d.txt", ".distrun-sync"):
        (found / name).parent.mkdir(parents=True, exist_ok=True)
        (found / name).write_text(name)
    (tmp_path / "secret.txt").touch()
    os.symlink("../secret.txt", found / "away.txt")
    os.symlink("..", found / "up")
    os.symlink("out/deep", found / "in")
    os.symlink("out/b.txt", found / "alias.txt")
    os.mkfifo(found / "fifo.txt")
    return found


def find(folder: Path, *patterns: str, host: str = "h1") -> tuple[set[str], set[str]]:
    """Return the names that are found, and those that are left out."""
    args = {"folder": str(folder), "patterns": patterns, "mark": ".distrun-part-x.on", "host": host}
    found = query.answer("find", args)
    return {row[0] for row in found["files"]}, {name for name, _ in found["left_out"]}


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.txt", {"a.txt", "alias.txt"}),
        ("out", {"out/b.txt", "out/.meta", "out/deep/c.txt", "out/deep/er/d.txt"}),
        ("out/*", {"out/b.txt", "out/.meta", "out/deep/c.txt", "out/deep/er/d.txt"}),
        ("./out//?.txt", {"out/b.txt"}),
        ("out/**/*.txt", {"out/b.txt", "out/deep/c.txt", "out/deep/er/d.txt"}),
        ("**/d*", {"out/deep/c.txt", "out/deep/er/d.txt"}),
        ("in/*.txt", {"in/c.txt"}),
        ("none", set()),
        ("up/**", set()),
    ],
)
def test_patterns_name_files_and_folders_below_the_folder(folder: Path, pattern: str, names: set[str]) -> None:
    assert find(folder, pattern)[0] == names


def test_what_leads_out_and_what_is_no_file_is_left_out(folder: Path) -> None:
    found, left_out = find(folder, "**")
    assert left_out == {"away.txt", "fifo.txt", "in", "up"}
    assert found == {"a.txt", "alias.txt", "out/b.txt", "out/.meta", "out/deep/c.txt", "out/deep/er/d.txt"}
    assert find(folder, "up/secret.txt") == (set(), {"up"})


def test_one_of_hosts_that_share_a_folder_lists_its_files_and_nothing_stays_there(folder: Path) -> None:
    assert find(folder, "a.txt")[0] == {"a.txt"}
    assert find(folder, "a.txt", host="h2")[0] == set()
    query.end()
    assert find(folder, "a.txt", host="h2")[0] == {"a.txt"}
    query.end()
    assert not list(folder.glob(".distrun-part-*"))
