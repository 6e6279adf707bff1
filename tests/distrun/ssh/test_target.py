"""Targets, and the command that starts an agent."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distrun import shipping
from distrun.hosts import HostSpec
from distrun.ssh.resolve import Target, remote_command


def test_a_target_survives_the_plan() -> None:
    full = Target("d1", "me", 2222, "/k", "jump", "/cfg", "openssh", True, 2.5, "/py")
    assert Target.parse(full.texts()) == full
    assert all(isinstance(value, str) and value for value in full.texts().values())
    assert Target("d1").texts() == {"host": "d1"}
    assert Target.parse({"host": "d1", "user": "", "somebody_elses": "x"}) == Target("d1")


def test_a_line_of_the_hosts_file_wins_over_options_for_all_hosts() -> None:
    spec = HostSpec("d1", user="me", port=2222, jump="j", python="/py")
    found = Target.of(spec, jump="all", identity="/k", transport="openssh", strict="yes", connect_s="3")
    assert found == Target("d1", "me", 2222, "/k", "j", "", "openssh", True, 3.0, "/py")


@pytest.mark.parametrize("shell", ["sh", "bash", "dash", "ksh", "zsh", "csh", "tcsh", "fish"])
@pytest.mark.parametrize("python", ["", sys.executable, "~/odd 'name/python3"])
def test_any_login_shell_hands_the_agent_on_as_it_is(shell: str, python: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip("no %s here" % shell)
    done = subprocess.run(
        [shell, "-c", remote_command(shipping.BOOT, python)], input=b"", capture_output=True, check=False
    )
    assert done.stderr.strip() == b"distrun: standard input ended before the agent had arrived"


def test_a_python_that_is_named_comes_first_and_the_usual_ones_after_it(tmp_path: Path) -> None:
    (tmp_path / "my python").write_text("#!/bin/sh\necho mine\n")
    (tmp_path / "my python").chmod(0o755)
    env = {**os.environ, "HOME": str(tmp_path)}
    for named in ("~/my python", str(tmp_path / "my python")):
        command = remote_command(shipping.BOOT, named)
        done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False, env=env)
        assert done.stdout == b"mine\n"
    command = remote_command(shipping.BOOT, "only-when-activated")
    done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False, env=env)
    assert b"before the agent had arrived" in done.stderr
    command = command.replace("python3", "python3-nowhere")
    done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False, env=env)
    assert done.returncode == 127
    assert b"there is no python3-nowhere on this host, nor only-when-activated (looked along PATH=/" in done.stderr


def test_without_python3_the_host_says_where_it_was_looked_for() -> None:
    command = remote_command(shipping.BOOT).replace("python3", "python3-nowhere")
    done = subprocess.run(["sh", "-c", command], input=b"", capture_output=True, check=False)
    assert done.returncode == 127
    assert b"distrun: there is no python3-nowhere on this host (looked along PATH=/" in done.stderr
