"""The lab itself: hosts are hosts, what no job would miss does what it says, nothing stays."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hostlab import Lab, LabError, Options, Process, Unavailable, cgroups
from lab import ROOT, Site, shared_folders, wait_until
from slowness import scaled

pytestmark = pytest.mark.lab

LIMIT_S = 60.0
"""For what takes a moment on a machine that has nothing else to do."""
EMPTY = "".join(name + "\n" for name in sorted({path.parts[2] for path in shared_folders() if path.parts[1] == "tmp"}))
"""What `ls /tmp` shows on a host that was just booted: where a checkout below /tmp is mounted."""


def end_all(processes: list[Process]) -> None:
    """Kill what is not a host's first process."""
    for process in processes:
        if process.inner != 1:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def test_hosts_see_nothing_of_this_checkout_but_what_is_shared(lab: Site) -> None:
    assert lab["h1"].exec("ls", str(ROOT)) == ""
    assert lab["h1"].exec(sys.executable, "-c", "import numpy; print('yes')") == "yes\n"
    assert not (lab["h1"].root / str(lab.work).lstrip("/")).exists()


def test_hosts_are_reached_by_every_name_with_their_keys_checked(lab: Site) -> None:
    for name in ("h1", "h1-eth1", lab["h1"].address, "alice@h1"):
        done = lab.run("ssh", "-o", "StrictHostKeyChecking=yes", name, "hostname")
        assert (done.code, done.out) == (0, "h1\n"), done.err
    assert lab.run("rsync", "-a", "/etc/passwd", "h1:/tmp/copied").code == 0
    assert (lab["h1"].root / "tmp/copied").exists()


def test_a_password_lets_its_user_in_where_sshd_says_so(lab: Site) -> None:
    code = (
        "import paramiko, sys\n"
        "client = paramiko.SSHClient(); client.load_system_host_keys()\n"
        "client.connect('h3', username='bob', password='open-sesame', look_for_keys=False, allow_agent=False)\n"
        "print(client.exec_command('id -un')[1].read().decode()); client.close()\n"
    )
    assert "bob" not in lab.run(sys.executable, "-c", code).out
    lab["h3"].restart_sshd({"PasswordAuthentication": "yes"})
    done = lab.run(sys.executable, "-c", code)
    assert done.out.split() == ["bob"], done.err


def test_options_of_a_host_hold_from_its_boot_until_the_test_ends(lab: Site) -> None:
    lab["h1"].boot(Options({"Port": "2222"}, noisy=True, python=False))
    done = lab.run("ssh", "-p", "2222", "-o", "StrictHostKeyChecking=accept-new", "h1", "command -v python3; echo done")
    assert done.out.split("\n")[:2] == ["Welcome to h1, have a nice day", "done"]
    assert "quota" in done.err
    lab.restore()
    assert lab.run("ssh", "h1", "command -v python3").out == "/usr/bin/python3\n"


def test_packets_are_lost_and_delayed(lab: Site) -> None:
    ping = ("ping", "-c", "1", "-W")
    lab["h2"].loss(100)
    assert lab.run(*ping, "1", "h2").code == 1
    lab["h2"].clear()
    lab["h2"].delay(200)
    assert float(re.findall(r"time=([\d.]+) ms", lab.run(*ping, "60", "h2").out)[0]) >= 200


def test_a_killed_session_leaves_what_ran_in_it(lab: Site) -> None:
    session = lab.spawn("ssh", "h2", "echo up; exec sleep 300")
    wait_until(lambda: "up" in session.out, LIMIT_S)
    lab["h2"].kill_sessions()
    assert session.wait(LIMIT_S) == 255
    wait_until(lambda: [process.name for process in lab.strangers()] == ["sleep"], LIMIT_S)
    end_all(lab.strangers())


def test_a_limit_of_processor_time_holds(lab: Site) -> None:
    lab["h2"].cpu(10)
    code = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    done = lab.run("ssh", "h2", "/usr/bin/python3 -c '%s'" % code)
    assert float(done.out) < 0.5


def test_processes_of_a_job_are_found_wherever_they_hide(lab: Site) -> None:
    script = (
        "(DISTRUN_JOB_ID=j-one setsid sleep 300 >/dev/null 2>&1 </dev/null &) ; (setsid sleep 301 >/dev/null 2>&1 &)"
    )
    assert lab.run("ssh", "h3", script).code == 0
    wait_until(lambda: [process.name for process in lab.strangers()] == ["sleep"] * 2, LIMIT_S)
    (found,) = lab.marked("j-one")
    assert (found.host, found.name) == ("h3", "sleep")
    assert lab.marked("j-two") == []
    assert {process.host for process in lab.leftovers()} == {"h3"}
    end_all(lab.strangers())


def test_verbs_on_a_host_that_is_off_or_unknown_say_so(lab: Site) -> None:
    lab["h2"].kill()
    with pytest.raises(LabError, match="h2 is off"):
        lab["h2"].exec("true")
    with pytest.raises(LabError, match="no host h99"):
        lab.fault("down", "h99")


def test_without_root_or_programs_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="needs root"):
        Lab.up(1)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("hostlab.lab.search_path", lambda: "/nowhere")
    with pytest.raises(Unavailable, match=r"packages .*openssh-server"):
        Lab.up(1)


def of_the_machine() -> tuple[list[str], list[str]]:
    """What a lab must not leave: mounts and links of the machine."""
    mounts = sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return mounts, sorted(name for _, name in socket.if_nameindex())


def groups_of(lab: Lab) -> list[str]:
    """Its control groups, which it must not leave either. (Other labs of the machine have others.)"""
    return [folder for folder, _, _ in os.walk("/sys/fs/cgroup") if lab.groups.group in os.path.basename(folder)]


@contextmanager
def kept_space(lab: Lab) -> Iterator[str]:
    """A lab's network namespace. Open, so that no other is given its number when the lab has ended."""
    with open("/proc/%d/ns/net" % lab.pid, "rb") as file:
        yield os.readlink("/proc/self/fd/%d" % file.fileno())


def users_of(space: str) -> list[str]:
    """Processes in a network namespace."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns/net") == space:
                found.append(entry.name)
        except OSError:
            continue
    return found


@contextmanager
def made() -> Iterator[Lab]:
    """A lab of its own, of two hosts."""
    lab = Lab.up(2, hide=[ROOT], share=shared_folders())
    try:
        yield lab
    finally:
        lab.down()


def test_two_labs_are_up_at_once_and_leave_nothing() -> None:
    before = of_the_machine()
    hosts = Path("/etc/hosts").read_text(), socket.gethostname()
    with made() as one, made() as two:
        assert one["h1"].address == two["h1"].address
        one["h1"].exec("touch", "/tmp/one")
        assert two["h1"].exec("ls", "/tmp") == EMPTY
        assert "one" in one["h1"].exec("ls", "/tmp").split()
        one["h1"].stop()
        two["h2"].mem(100)
        assert (Path("/etc/hosts").read_text(), socket.gethostname()) == hosts
        assert groups_of(one) or not cgroups.unified(cgroups.MACHINE), "only in a chroot they are out of sight"
        with kept_space(one) as first, kept_space(two) as second:
            one.down()
            two.down()
            assert users_of(first) == users_of(second) == []
    assert of_the_machine() == before
    assert groups_of(one) == groups_of(two) == []


def test_killing_the_keeper_ends_everything() -> None:
    before = of_the_machine()
    with made() as lab, kept_space(lab) as space:
        hosts = [host.pid for host in lab.hosts.values()]
        lab["h1"].stop()
        os.kill(lab.pid, signal.SIGKILL)
        wait_until(lambda: not users_of(space) and not any(Path("/proc/%d" % pid).exists() for pid in hosts), LIMIT_S)
    wait_until(lambda: of_the_machine() == before and not groups_of(lab), LIMIT_S)


def test_killing_its_maker_ends_a_lab() -> None:
    script = (
        "import json, os, sys, time; from hostlab import Lab; lab = Lab.up(2)\n"
        "print(json.dumps([lab.pid, lab.warden]), flush=True); time.sleep(300)"
    )
    maker = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests" / "lab")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    line = maker.stdout.readline()
    if not line:
        words = maker.communicate(timeout=scaled(LIMIT_S))[1].decode()
        pytest.skip(words.strip().splitlines()[-1])
    pids = json.loads(line)
    with open("/proc/%d/ns/net" % pids[0], "rb") as kept:
        space = os.readlink("/proc/self/fd/%d" % kept.fileno())
        maker.kill()
        maker.communicate(timeout=scaled(LIMIT_S))
        wait_until(lambda: not users_of(space) and not any(Path("/proc/%d" % pid).exists() for pid in pids), LIMIT_S)


def test_the_command_makes_uses_and_ends_a_lab(tmp_path: Path) -> None:
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(ROOT / "scripts" / "lab"), "--name", "test-%d" % os.getpid(), *words]
        # Without the environment of this checkout, as in a fresh shell.
        env = {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    done = command("up", "2")
    if "lab needs" in done.stderr or "no lab can be made" in done.stderr:
        pytest.skip(done.stderr.strip())
    try:
        assert done.returncode == 0, done.stderr
        assert "/run/distrun-lab/hosts" in done.stdout
        # The line that it prints works as it stands.
        (line,) = [line.split() for line in done.stdout.splitlines() if " distrun launch " in line]
        launched = command(*line[line.index("shell") :])
        assert launched.returncode == 0, launched.stderr
        assert sorted(launched.stdout.split()[2::3]) == ["h1", "h1", "h2", "h2"]
        assert command("up", "2").returncode == 2
        assert command("shell", "sh", "-c", "pwd; ssh h2 hostname; exit 7").stdout.split() == [str(tmp_path), "h2"]
        assert command("shell", "sh", "-c", "exit 7").returncode == 7
        assert command("exec", "h1", "hostname").stdout == "h1\n"
        assert command("fault", "kill", "h2").returncode == 0
        assert "h2 is off" in command("exec", "h2", "true").stderr
        assert command("fault", "boot", "h2").returncode == 0
        assert "sshd" in command("fault", "ps", "h2").stdout
    finally:
        assert command("down").returncode == 0
    assert "no lab is up" in command("shell", "true").stderr
