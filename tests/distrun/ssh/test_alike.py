"""Hosts that the user's ssh configuration does not tell apart are asked for twice, not each."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from distrun.ssh.resolve import Alike, Answer, Target, many, parse, patterns, renamed, resolve, ssh_flags

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the ssh program")


class Program:
    """Stands for `ssh -G`: counts what it is asked."""

    def __init__(self, tmp_path: Path, config: str, answer: Callable[[str], Answer] | None = None) -> None:
        self.file = tmp_path / "config"
        self.file.write_text(config)
        self.asked: list[str] = []
        self._answer = answer or (lambda host: {"host": [host], "hostname": [host], "user": ["me"]})

    def alike(self) -> Alike:
        return Alike(self._ask, lambda target: f"debug1: Reading configuration data {self.file}\n", few=0)

    def _ask(self, target: Target) -> Answer:
        self.asked.append(target.host)
        return self._answer(target.host)


def hosts(alike: Alike, *names: str) -> list[Answer]:
    return [alike.options(Target(name)) for name in names]


def test_of_many_hosts_that_match_the_same_patterns_two_are_asked_for(tmp_path: Path) -> None:
    program = Program(tmp_path, "Host *\n  User me\n")
    found = hosts(program.alike(), *(f"n{i}" for i in range(10)))
    assert program.asked == ["n0", "n1"]
    assert found[9] == {"host": ["n9"], "hostname": ["n9"], "user": ["me"]}


def test_hosts_that_match_other_patterns_are_asked_for_themselves(tmp_path: Path) -> None:
    program = Program(tmp_path, 'host gpu? !gpu3\n User a\nHOST = "cpu*"\n User b\n')
    hosts(program.alike(), "gpu1", "gpu2", "gpu4", "cpu1", "cpu22", "cpu3", "gpu3", "other")
    assert program.asked == ["gpu1", "gpu2", "cpu1", "cpu22", "gpu3", "other"]


def test_targets_with_other_options_are_asked_for_themselves(tmp_path: Path) -> None:
    program = Program(tmp_path, "Host *\n")
    alike = program.alike()
    hosts(alike, "n1", "n2", "n3")
    alike.options(dataclasses.replace(Target("n4"), port=2222))
    assert program.asked == ["n1", "n2", "n4"]


@pytest.mark.parametrize("line", ["Match host n*", "match exec true", "  Match all"])
def test_a_match_line_has_every_host_asked_for(tmp_path: Path, line: str) -> None:
    program = Program(tmp_path, line + "\n")
    hosts(program.alike(), "n1", "n2", "n3")
    assert program.asked == ["n1", "n2", "n3"]


@pytest.mark.parametrize(
    "more",
    [
        lambda host: {"hostname": [host + ".example.com"]},
        lambda host: {"identityfile": ["/keys/" + host]},
        lambda host: {"canonicalizehostname": ["true"]},
    ],
)
def test_answers_that_differ_in_more_than_the_name_have_every_host_asked_for(
    tmp_path: Path, more: Callable[[str], Answer]
) -> None:
    program = Program(tmp_path, "Host *\n", lambda host: {"host": [host], "hostname": [host], **more(host)})
    found = hosts(program.alike(), "n1", "n2", "n3")
    assert program.asked == ["n1", "n2", "n3"]
    assert found[2] == {"host": ["n3"], "hostname": ["n3"], **more("n3")}


def test_the_same_host_twice_says_nothing_of_others(tmp_path: Path) -> None:
    program = Program(tmp_path, "Host *\n")
    hosts(program.alike(), "n1", "n1", "n2", "n3")
    assert program.asked == ["n1", "n1", "n2"]


def test_names_with_capitals_are_asked_for(tmp_path: Path) -> None:
    program = Program(tmp_path, "Host *\n")
    hosts(program.alike(), "N1", "N2", "N3")
    assert program.asked == ["N1", "N2", "N3"]


def test_where_nobody_knows_which_files_count_every_host_is_asked_for(tmp_path: Path) -> None:
    assert patterns("") is None
    assert patterns(f"debug1: Reading configuration data {tmp_path / 'missing'}\n") is None


def test_the_path_of_a_control_socket_is_left_out() -> None:
    assert renamed("a", {"host": ["a"], "controlpath": ["/tmp/a"]}, "b") == {"host": ["b"]}


def test_a_few_hosts_are_asked_for_at_once(tmp_path: Path) -> None:
    said: list[Target] = []
    asked: list[Target] = []

    def ask(target: Target) -> Answer:
        asked.append(target)
        return {}

    def read(target: Target) -> str:
        said.append(target)
        return ""

    hosts(Alike(ask, read), "n1", "n2", "n3", "n4")
    assert (len(asked), said) == (4, [])


@needs_ssh
def test_the_answers_are_those_of_the_program(tmp_path: Path) -> None:
    config = tmp_path / "config"
    (tmp_path / "more").write_text("Host n1? m*\n  Port 2200\n")
    config.write_text(
        f"Include {tmp_path}/mo*\nHost n* !n7\n  User bob\n  ControlPath /tmp/%C\n  IdentityFile ~/.ssh/%h_key\n"
        "Host x*\n  HostName %h.example.com\n"
    )
    alike = many()
    for name in ("n1", "n2", "n3", "n7", "n11", "n12", "n13", "m1", "m2", "m3", "x1", "x2", "x3", "localhost"):
        target = Target(name, config=str(config))
        argv = ["ssh", "-G", *ssh_flags(target), name]
        expected = parse(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
        found = resolve(target, alike)
        assert found == resolve(target)
        found_options = {key: list(values) for key, values in found.options.items() if key != "controlpath"}
        assert found_options == {key: values for key, values in expected.items() if key != "controlpath"}
