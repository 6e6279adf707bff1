"""The help of launch in parts, the topics of `distrun help`, and commands of other programs."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
from distrun_cli import Distrun
from lab import Site

from distrun.cli.help import COMMON, TOPICS
from distrun.cli.launch import launch
from distrun.options import ROWS, TABLE
from distrun_runtime.contract import facts

GOLDEN = Path(__file__).parent / "golden"
UPDATE = os.environ.get("DISTRUN_UPDATE_GOLDEN") == "1"
"""Golden files change only on purpose: DISTRUN_UPDATE_GOLDEN=1 pytest tests/distrun/cli/test_help.py"""


def printed(distrun: Distrun, *words: str, code: int = 0) -> str:
    result = distrun.answer(*words, env={"COLUMNS": "80"})
    assert result.returncode == code, result.stderr
    return (result.stderr if code else result.stdout).decode()


@pytest.mark.parametrize("words", ["launch -h", "launch --help-all", "launch -h slurm", "help"])
def test_the_help_is_what_it_always_was(words: str, distrun: Distrun) -> None:
    shown = printed(distrun, *words.split())
    golden = GOLDEN / (words.replace(" ", "").replace("--", "-") + ".txt")
    if UPDATE:
        golden.write_text(shown)
    assert shown == golden.read_text(), "it changed; if on purpose: DISTRUN_UPDATE_GOLDEN=1"


def test_the_short_help_has_twenty_options_in_seventy_lines(distrun: Distrun) -> None:
    shown = printed(distrun, "launch", "-h")
    assert sum(map(len, COMMON.values())) == 20
    assert len(shown.splitlines()) <= 70
    assert shown == printed(distrun, "launch", "-h", "python", "train.py") == printed(distrun, "help", "launch")


def test_every_option_is_in_the_whole_help_and_in_that_of_its_group(distrun: Distrun) -> None:
    whole = printed(distrun, "launch", "--help-all")
    groups = [title.lower().replace(" ", "-") for title in TABLE]
    parts = "".join(printed(distrun, "launch", "-h", group) for group in groups)
    for row in ROWS:
        name = row.name.split("/")[0]
        assert (f"  {name}" in whole) == (f"  {name}" in parts) == (not row.hidden), name
    assert "--engine-arg" in (kubernetes := printed(distrun, "launch", "-h", "kubernetes"))
    assert "--pe " not in kubernetes


def test_a_group_that_is_misspelt_is_an_error(distrun: Distrun) -> None:
    assert "did you mean engines?" in printed(distrun, "launch", "-h", "engine", code=2)


def examples() -> list[list[str]]:
    lines = (launch.help or "").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("      distrun launch")]


def test_the_examples_of_the_help_run_here(distrun: Distrun) -> None:
    (distrun.work / "job.toml").write_text('workers = 1\nservers = 0\ncommand = ["echo", "from a file"]\n')
    first, _, last = examples()
    assert b"| worker 1 of 2\n" in distrun.run(*first).stdout
    assert b"| from a file\n" in distrun.run(*last).stdout


def test_the_example_with_hosts_runs_on_hosts(lab: Site) -> None:
    (lab.work / "hosts").write_text("h1\nh2\n")
    (lab.work / "train.py").write_text("print('trains')\n")
    pythons = [host.root / "usr/local/bin/python3" for host in lab.hosts.values()]
    try:
        for path in pythons:  # one with numpy and pyzmq, for the servers
            path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
            path.chmod(0o755)
        done = lab.distrun(*examples()[1])
    finally:
        for path in pythons:
            path.unlink(missing_ok=True)
    assert done.code == 0, done.err
    assert done.out.count("| trains\n") == 4


@pytest.mark.parametrize("topic", TOPICS)
def test_each_topic_is_explained_in_lines_that_a_terminal_has(topic: str, distrun: Distrun) -> None:
    lines = printed(distrun, "help", topic).splitlines()
    assert len(lines) > 10
    assert all(len(line) < 80 or line.startswith("    ") for line in lines)


def test_every_exit_code_is_explained(distrun: Distrun) -> None:
    shown = printed(distrun, "help", "exit-codes").replace(",", "").split()
    codes = {str(value) for name, value in vars(facts).items() if name.startswith("EXIT_")}
    assert codes <= set(shown)


def test_help_shows_that_of_a_command_and_says_what_there_is(distrun: Distrun) -> None:
    assert printed(distrun, "help", "kill") == printed(distrun, "kill", "-h")
    assert "did you mean hosts?" in printed(distrun, "help", "host", code=2)
    assert "topics: exit-codes, hosts" in printed(distrun, "help", "zzz", code=2)


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("ps", "distrun status"),
        ("ls -a", "distrun status"),
        ("run -n 2 true", "distrun launch"),
        ("cancel calm-otter", "distrun kill calm-otter"),
        ("stop", "distrun kill JOB"),
        ("tail -n 3 calm-otter", "distrun logs JOB -f"),
    ],
)
def test_what_is_typed_elsewhere_is_answered_with_the_command_for_it(typed: str, told: str, distrun: Distrun) -> None:
    name = typed.split(maxsplit=1)[0]
    assert f"error: No such command {name!r}. Type: {told}\n" in printed(distrun, *typed.split(), code=2)
