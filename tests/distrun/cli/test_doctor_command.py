"""`distrun doctor` on the command line: its options, and what is asked before anything is made."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import venv
from pathlib import Path

import click
import pytest
import wheels
from distrun_cli import Distrun
from slowness import scaled

from distrun.cli.doctor import doctor
from distrun.cli.launch import launch
from distrun.hosts.parse import parse
from distrun.options import HOSTS
from distrun.requesting import typed

LIMIT_S = scaled(120.0)
SHARED = {"launcher", "activate", "python", "interface", "subnet", "port_range"}
"""Options of `launch` that say how hosts are reached and what is activated there, but for those of HOSTS."""


def options(command: click.Command) -> dict[str, tuple[list[str], str, bool]]:
    return {
        str(each.name): (sorted([*each.opts, *each.secondary_opts]), str(each.type), each.multiple)
        for each in command.params
        if isinstance(each, click.Option)
    }


def test_doctor_takes_every_option_of_reaching_and_activating_that_launch_takes() -> None:
    assert len(HOSTS) > 5
    names = SHARED | {name for name in options(launch) if name in TYPED}
    assert len(names) == len(SHARED) + len(HOSTS)
    ours, theirs = options(doctor), options(launch)
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


TYPED: dict[str, object] = {
    "hostfile": None,
    "hosts": None,
    "hostfile_format": "auto",
    "transport": "fabric",
    "strict_host_keys": False,
    "ssh_config": "",
    "connect_timeout": 10.0,
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, []),
        ({"hostfile": "my hosts"}, ["-H", "my hosts"]),
        ({"hostfile": "-"}, ["--hosts", "h[1-2]"]),
        ({"hosts": "h1,h2", "launcher": "ssh"}, ["--hosts", "h1,h2", "--launcher", "ssh"]),
        (
            {"hostfile_format": "mpich", "transport": "openssh", "ssh_config": "c", "strict_host_keys": True},
            ["--hostfile-format", "mpich", "--transport", "openssh", "--strict-host-keys", "--ssh-config", "c"],
        ),
        ({"connect_timeout": 2.5}, ["--connect-timeout", "2.5"]),
    ],
)
def test_what_is_typed_next_reaches_hosts_in_the_same_way(changes: dict[str, object], words: list[str]) -> None:
    assert typed({**TYPED, **changes}, parse("h1\nh2\n", "hosts")) == words


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A Python without numpy and pyzmq."""
    venv.create(tmp_path / "bare", with_pip=False)
    return tmp_path / "bare" / "bin" / "python"


def env(distrun: Distrun, tmp_path: Path) -> dict[str, str]:
    wheels.make(tmp_path / "wheels")
    found = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "XDG_DATA_HOME": str(tmp_path / "data")}
    return {**distrun.env, **found}


@pytest.mark.slow
def test_nothing_is_made_that_was_not_agreed_to(distrun: Distrun, bare: Path, tmp_path: Path) -> None:
    argv = distrun.argv("doctor", "--python", str(bare), "--fix")
    for answer, code in ((b"n\n", 130), (b"y\n", 0)):
        assert not (tmp_path / "data").exists()
        ours, theirs = pty.openpty()
        os.write(ours, answer)
        done = subprocess.run(
            argv,
            env=env(distrun, tmp_path),
            cwd=tmp_path,
            stdin=theirs,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        os.close(ours)
        os.close(theirs)
        assert b"to do on" in done.stdout
        assert b"Make this environment?" in done.stderr
        assert done.returncode == code, done
    assert list((tmp_path / "data" / "distrun" / "servers").iterdir())


@pytest.mark.slow
def test_json_does_not_ask_and_this_machine_uses_what_was_made(distrun: Distrun, bare: Path, tmp_path: Path) -> None:
    words = ("--python", str(bare))
    refused = distrun.run("doctor", *words, "--fix", "--json")
    assert (refused.returncode, b"add -y" in refused.stderr) == (2, True)
    more = {name: value for name, value in env(distrun, tmp_path).items() if distrun.env.get(name) != value}
    launch = ("launch", "--launcher", "local", "-n", "1", "-s", "1", *words, sys.executable, "-c", "pass")
    before = distrun.run(*launch, env=more)
    assert before.returncode == 3
    assert b"add -s 0 if the command does not use the store" in before.stderr
    assert b"--fix" in before.stderr
    made = distrun.run("doctor", *words, "--fix", "-y", "--json", env=more)
    assert made.returncode == 0, made.stderr
    assert distrun.run(*launch, env=more).returncode == 0


def test_fix_is_refused_for_an_engine_whose_nodes_ssh_does_not_reach(distrun: Distrun) -> None:
    done = distrun.run("doctor", "--launcher", "slurm", "--fix")
    assert done.returncode == 2
    assert b"--fix is not for --launcher slurm" in done.stderr
    assert b"--activate venv:~/venv" in done.stderr
