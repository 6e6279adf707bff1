"""The guides: each command that they show with its output prints that output, given the files of the page."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import folderqueue
import pytest
from distrun_cli import leaving_nothing
from lab import Site
from peers import python_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
LIMIT = 1000
"""Words of a guide."""
GUIDES = ("first-job", "several-hosts", "queue-systems", "training", "when-something-fails")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARYING = (
    (r"\b[a-z]+-[a-z]+-[0-9a-f]{3}\b", "JOB"),
    (r"-(\d+)@[\w.]+", r"-\1@HOST"),
    (r"\bd1\b|\b%s\b" % re.escape(socket.gethostname().partition(".")[0]), "HOST"),
    (r"pid \d+", "pid N"),
    (r"\d:\d\d:\d\d|\d\d-\d\d \d\d:\d\d", "TIME"),
    (r" +", " "),
)
"""What differs from run to run, and what stands in its place when outputs are compared."""


def page(guide: str) -> str:
    return (DOCS / f"{guide}.md").read_text("utf-8")


def write_files(guide: str, folder: Path) -> None:
    """Write the files that a guide shows: blocks that begin with a comment that is a name."""
    for _, text in BLOCK.findall(page(guide)):
        if name := re.match(r"# ([\w.]+)\n", text):
            (folder / name[1]).write_text(text)


def plain(text: str) -> list[str]:
    for pattern, stands_for in VARYING:
        text = re.sub(pattern, stands_for, text)
    return [line.strip() for line in text.splitlines()]


def check(guide: str, run: Callable[[str], str], *changes: tuple[str, str]) -> None:
    """Run all commands of a guide after these changes; each prints at least the lines that the guide shows."""
    shown = "".join(text for language, text in BLOCK.findall(page(guide)) if language == "console")
    pairs = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    assert pairs
    for command, expected in pairs:
        for old, new in changes:
            command = command.replace(old, new)
        printed = run(command)
        assert [line for line in plain(expected) if line not in plain(printed)] == [], f"{command}\n{printed}"


@pytest.mark.parametrize("guide", GUIDES)
def test_a_guide_is_short(guide: str) -> None:
    assert len(page(guide).split()) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["first-job", "queue-systems", "when-something-fails"])
def test_commands_of_a_guide_print_what_it_shows(guide: str, tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        distrun.env.update(folderqueue.install(tmp_path))
        for each in ("first-job", guide):
            write_files(each, distrun.work)
        run_here(guide, distrun.env, distrun.work, ("--launcher slurm", "--launcher folderqueue"))


@pytest.mark.peers
def test_programs_of_the_training_guide_learn(tmp_path: Path) -> None:
    with leaving_nothing(tmp_path) as distrun:
        write_files("training", distrun.work)
        changed = ("python train_torch.py", f"{python_of('torch')} train_torch.py")
        run_here("training", {**distrun.env, "OMP_NUM_THREADS": "1"}, distrun.work, changed)


def run_here(guide: str, env: dict[str, str], folder: Path, *changes: tuple[str, str]) -> None:
    env = {**env, "PATH": os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            env=env,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout

    check(guide, run, *changes)


def test_commands_of_the_guide_to_hosts_print_what_it_shows(lab: Site) -> None:
    for each in ("first-job", "several-hosts"):
        write_files(each, lab.work)

    def run(command: str) -> str:
        done = lab.run("bash", "-c", command)
        return done.out + done.err

    ours = (
        ("distrun launch", f"{sys.executable} -m distrun launch"),
        ("--activate venv:~/venv python3 train.py", f"{sys.executable} train.py"),
    )
    check("several-hosts", run, *ours)
