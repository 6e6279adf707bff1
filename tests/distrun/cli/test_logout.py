"""Processes that survive a terminal and a logout. The system's files are a test's own."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from distrun.cli.launch import outlive_logout
from distrun.errors import UsageError
from distrun_runtime.contract import daemon

USER = pwd.getpwuid(os.geteuid()).pw_name
LOGIN = "0::/user.slice/user-1000.slice/session-3.scope\n"
SERVICE = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-1.scope\n"
KILLS = "[Login]\n#KillUserProcesses=no\nKillUserProcesses=yes\nKillExcludeUsers=nobody\n"


def machine(root: Path, cgroup: str = LOGIN, **files: str) -> str:
    """Make the files of a system; `files` by their names with `_` for `/`, below /etc/systemd."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "etc/systemd" / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("cgroup", "files", "ends"),
    [
        (LOGIN, {}, False),
        (LOGIN, {"logind_conf": KILLS}, True),
        (SERVICE, {"logind_conf": KILLS}, False),
        ("12:pids:/user.slice/user-0.slice/session-1.scope\n0::/\n", {"logind_conf": KILLS}, True),
        (LOGIN, {"logind_conf": KILLS, "logind_conf_d__10_conf": "[Login]\nKillUserProcesses=no\n"}, False),
        (LOGIN, {"logind_conf_d__10_conf": "[Login]\nKillUserProcesses = true\nKillExcludeUsers=\n"}, True),
        (LOGIN, {"logind_conf": KILLS + "KillExcludeUsers=root " + USER + "\n"}, False),
        (LOGIN, {"logind_conf": KILLS + "KillOnlyUsers=somebody\n"}, False),
    ],
)
def test_whether_a_logout_ends_processes_is_read_from_the_system(
    cgroup: str, files: dict[str, str], ends: bool, tmp_path: Path
) -> None:
    assert daemon.ends_at_logout(machine(tmp_path, cgroup, **files)) is ends


def test_where_it_does_not_nothing_is_done(tmp_path: Path) -> None:
    outlive_logout(["launch"], machine(tmp_path))


def test_without_linger_it_is_refused_with_the_line_to_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="KillUserProcesses") as caught:
        outlive_logout(["launch"], machine(tmp_path, logind_conf=KILLS))
    assert caught.value.hint.endswith(f"loginctl enable-linger {USER}")
    assert caught.value.exit_code == 2


def test_with_linger_it_goes_on_below_the_users_manager(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", logind_conf=KILLS)
    linger = tmp_path / "root/var/lib/systemd/linger"
    linger.mkdir(parents=True)
    (linger / USER).touch()
    stand_in = tmp_path / "bin/systemd-run"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    stand_in.chmod(0o755)
    code = f"from distrun.cli import launch; launch.outlive_logout(['launch', '--in-scope', '-n', '2'], {root!r})"
    env = {**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    words = ["--user", "--scope", "--quiet", "--collect", "--", sys.executable, "-m", "distrun"]
    assert done.stdout == "|".join([*words, "launch", "--in-scope", "-n", "2", ""])


def test_without_systemd_run_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, logind_conf=KILLS)
    (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
    (tmp_path / "var/lib/systemd/linger" / USER).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="there is no systemd-run"):
        outlive_logout(["launch"], root)


def test_a_daemon_has_no_descriptor_but_those_that_are_kept(tmp_path: Path) -> None:
    code = """
import json, os, signal
from distrun_runtime.contract import daemon
read, write = os.pipe()
other = os.open('/dev/null', os.O_RDONLY)
pid = daemon.fork(keep=[write])
if pid:
    os.close(write)
    told = json.loads(os.fdopen(read).read())
    assert told.pop('pid') == pid
    print(json.dumps(told))
else:
    fds = []
    for fd in range(256):
        try:
            os.fstat(fd)
            fds.append(fd)
        except OSError:
            pass
    told = dict(pid=os.getpid(), fds=fds == [0, 1, 2, write], leads=os.getsid(0) == os.getpid(), cwd=os.getcwd())
    told['hup'] = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    os.write(write, json.dumps(told).encode())
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == '{"fds": true, "leads": false, "cwd": "/", "hup": true}', done.stderr
