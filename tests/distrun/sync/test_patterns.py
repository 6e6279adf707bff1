"""Which files of a host `--sync-delete` leaves alone where no rsync says so: what rsync would leave alone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distrun.sync.rules import CopyRules, Extra, filters, is_kept, keep_rules
from distrun_runtime.agent.unpack import Unpacking
from distrun_runtime.contract.agent_messages import Copied, Copying, FolderFound
from distrun_runtime.contract.folder import MARKER, PARTIAL
from distrun_runtime.contract.plan import Host, Plan, Sync

pytestmark = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")

NAMES = (
    "a",
    "a.py",
    "b.pyc",
    "log/1",
    "log/2.txt",
    "x/log/1",
    "x/y/a.py",
    "x/y/z/b",
    "x/y.d/c",
    "foo/bar/baz",
    "q/foo/bar/baz",
    "foo/bar",
    "e[1]",
    "e1",
    "back\\slash",
    "-dash",
    "bc/]",
    "bc/^",
    "bc/d7",
    "bc/é",
    ".git/config",
    "sub/.git/config",
    "venv/bin/python",
    "sub/venv",
    "foobar/x",
    ".distrun-part-1/x",
    "lib/mx.so",
    "lib/other",
)

PATTERNS = (
    "a",
    "*.py",
    "/a",
    "/a.py",
    "log/",
    "/log/",
    "log",
    "x/y",
    "y/z",
    "/x/*",
    "/x/**",
    "x/**",
    "x/***",
    "/x/***",
    "**/y",
    "**/log/",
    "**y**",
    "foo/**/baz",
    "foo/bar",
    "/foo/bar",
    "foo/*",
    "foo**",
    "**",
    "*",
    "?",
    "??",
    "e[1]",
    "e\\[1]",
    "e[0-9]",
    "bc/[]]",
    "bc/[^a-z]",
    "bc/[!a-z]",
    "[[:alpha:]]",
    "[[:nope:]]",
    "bc/d[[:digit:]]",
    "bc/[a-",
    "back\\slash",
    "back\\\\sla*",
    "-dash",
    "bc/??",
    "y.d",
    "x/y.?/c",
    "//x",
    "/",
    "x//",
)


def make(folder: Path) -> None:
    for name in NAMES:
        path = folder / name
        if path.parent.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_dir():
            path.touch()
    (folder / MARKER).touch()


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def compare(options: list[str], tmp_path: Path) -> None:
    options = [*options, f"--exclude={PARTIAL}*"]  # those of other copies, which nobody touches
    source, theirs, ours = (tmp_path / name for name in ("source", "theirs", "ours"))
    source.mkdir()
    for folder in (theirs, ours):
        folder.mkdir(mode=0o755)
        make(folder)
    paths = [path for path in sorted(ours.rglob("*")) if path.is_file() and not path.name.startswith(".distrun-")]
    made = [str(path.relative_to(ours)) for path in paths]
    command = ["rsync", "-r", "--delete", *options, f"{source}/", f"{theirs}/"]
    subprocess.run(command, check=True, capture_output=True)
    said: list[type] = []
    channel: Any = SimpleNamespace(say=lambda message, **members: said.append(message))
    rules = [list(rule) for rule in keep_rules(options)]
    plan = Plan("j", "", "fake", ("x",), str(ours), (Host("h1"),), (), sync=Sync("/nowhere", delete=True))
    copy = Unpacking(plan, "", "1", rules, channel)
    copy.begin()
    assert copy.take("1", bytes(1024), True, "")
    while copy.is_placing:
        copy.proceed()
    assert [each for each in said if each is not Copying] == [FolderFound, Copied]
    assert left(ours) == left(theirs)
    assert [name for name in made if is_kept(keep_rules(options), name)] == [
        each for each in made if each in left(ours)
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_keeps_what_rsync_would_keep(pattern: str, tmp_path: Path) -> None:
    compare([f"--exclude=/{MARKER}", f"--exclude={pattern}"], tmp_path)


@pytest.mark.parametrize(
    "patterns",
    [
        ("+ a.py", "*.py"),
        ("*.py", "+ a.py"),
        ("+ /x/", "+ /x/y/", "- /x/*", "x/y/z/"),
        ("+ b", "**"),
        ("log/", "!", "foo/"),
    ],
)
def test_the_first_pattern_that_fits_decides(patterns: tuple[str, ...], tmp_path: Path) -> None:
    compare([*(f"--exclude={each}" for each in patterns), f"--exclude=/{MARKER}"], tmp_path)


def test_the_rules_of_a_copy_keep_what_they_keep_by_rsync(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / ".distrunignore").write_text("# mine\n+ .git\nfoo/bar\n")
    rules = CopyRules(("*.txt",), extra=(Extra("/lib/mx.so", "lib/mx.so"), Extra("/bc", "bc")))
    compare(filters(rules, str(tmp_path / "rules")), tmp_path)


def test_patterns_match_bytes(tmp_path: Path) -> None:
    odd = os.fsdecode(b"odd\xff")
    assert keep_rules([f"--exclude={odd}"])[0].pattern == ".*/odd\xff"
