"""The copy to real hosts: `distrun sync`, and `distrun launch --sync-dst-dir`."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakehosts import tree, write
from lab import Done, Site, wait_until
from slowness import scaled
from sshd import USER, key, running

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
NO_RC: dict[str, object] = {"SetEnv": "SHLVL=9"}
"""With it bash takes no session for a first one, and reads no .bashrc of whoever runs these tests."""


def noise(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))


def on_host(lab: Site, host: str, folder: str) -> dict[str, str]:
    """Return the files of a host's folder: path -> content."""
    files = "find . -type f ! -name .distrun-sync ! -path './.distrun-part-*'"
    script = "cd %s && %s -exec sh -c 'echo \"$1=$(cat \"$1\")\"' - {} ';'" % (folder, files)
    lines = lab[host].exec("sh", "-c", script).splitlines()
    return dict(line.removeprefix("./").split("=", 1) for line in lines)


def of(done: Done, code: int = 0) -> str:
    assert done.code == code, done.out + done.err
    return done.err


def test_a_failed_host_is_exit_code_4_and_the_others_have_it(lab: Site) -> None:
    write(lab.work, x="1")
    lab["h2"].exec("sh", "-c", "mkdir -p /tmp/at && touch /tmp/at/job")
    err = of(lab.distrun("sync", "--hosts", "h1,h2,h3", "--sync-dst-dir", "/tmp/at/job"), 4)
    assert "the files did not reach 1 of 3 hosts" in err
    assert "h2: cannot make /tmp/at/job: /tmp/at/job: Not a directory" in err
    for host in ("h1", "h3"):
        assert on_host(lab, host, "/tmp/at/job") == {"x": "1"}


def test_a_disk_that_gets_full_leaves_the_tree_of_before(lab: Site) -> None:
    lab["h2"].disk(8, "/tmp")
    write(lab.work, **{"train.py": "1"})
    command = ("sync", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/full")
    of(lab.distrun(*command))
    write(lab.work, **{"train.py": "22"})
    noise(lab.work / "data", 12 * MIB)
    err = of(lab.distrun(*command), 4)
    assert "h2: its disk is full: " in err
    assert "No space left on device" in err
    assert on_host(lab, "h2", "/tmp/full") == {"train.py": "1"}
    assert lab["h2"].exec("find", "/tmp/full", "-name", ".distrun-part-*") == ""
    (lab.work / "data").unlink()
    of(lab.distrun(*command))
    assert on_host(lab, "h2", "/tmp/full") == {"train.py": "22"}
    # An empty folder is known to be too small before anything is sent.
    noise(lab.work / "data", 12 * MIB)
    err = of(lab.distrun("sync", "--hosts", "h2", "--sync-dst-dir", "/tmp/small"), 4)
    assert "too little room in /tmp/small: " in err
    assert "free, 12 MiB needed" in err


SHOWN = re.compile(r"sync 0/2: \d+%, \d+ files?, [\d.]+ [KM]?i?B sent, [\d.]+ [KM]iB/s, 0:\d\d:\d\d left")


def test_progress_of_a_big_file_is_said_in_lines_where_there_is_no_terminal(lab: Site) -> None:
    noise(lab.work / "big", 8 * MIB)
    for host in ("h1", "h2"):
        lab[host].rate(4000)
    done = lab.distrun("launch", "-n", "2", "-s", "0", "--hosts", "h1,h2", "--sync-dst-dir", "~/big", "true")
    assert SHOWN.search(of(done)), done.err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_launcher_that_is_ended_midway_leaves_no_process_and_the_tree_of_before(lab: Site, number: int) -> None:
    write(lab.work, **{"train.py": "1"})
    folder = "/tmp/ended-%d" % number
    command = ("sync", "--hosts", "h1,h2", "--sync-dst-dir", folder)
    of(lab.distrun(*command))
    write(lab.work, **{"train.py": "22"})
    noise(lab.work / "data", 8 * MIB)
    for host in ("h1", "h2"):
        lab[host].rate(4000)
    running = lab.start(*command)
    wait_until(lambda: all("rsync --server" in lab[host].ps() for host in ("h1", "h2")), 60, "rsync runs on the hosts")
    os.kill(running.pid, number)
    running.wait()
    wait_until(lambda: not lab.leftovers(), 60, "no rsync is left")
    wait_until(lambda: not [p for p in lab.processes("launcher") if "rsync" in str(p)], 60, "nor here")
    for host in ("h1", "h2"):
        assert on_host(lab, host, folder) == {"train.py": "1"}


def test_a_job_runs_what_was_just_copied_and_a_failed_copy_starts_nothing(lab: Site) -> None:
    write(lab.work, **{"train.py": "import os; print('one', os.getcwd())"})
    command = ("launch", "-n", "2", "-s", "0", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/sync_job/")
    done = lab.distrun(*command, "python3", "train.py")
    err = of(done)
    assert done.out.count("one /tmp/sync_job") == 2
    assert "rsync %s/ -> h1:/tmp/sync_job/" % lab.work in err
    write(lab.work, **{"train.py": "print('and two')"})
    assert lab.distrun(*command, "python3", "train.py").out.count("and two") == 2
    # A host on which a file cannot be replaced: no task runs, anywhere.
    write(lab.work, **{"train.py": "print('and three')"})
    lab["h2"].exec("sh", "-c", "cd /tmp/sync_job && rm train.py && mkdir train.py && touch train.py/mine")
    done = lab.distrun(*command, "python3", "train.py")
    err = of(done, 4)
    assert "three" not in done.out
    assert "h2: rsync: some files were not copied (code 23): " in err
    assert on_host(lab, "h2", "/tmp/sync_job") == {"train.py/mine": ""}


def test_what_makes_the_environment_may_come_with_the_files(lab: Site) -> None:
    """--activate and --python, or python= of the hosts file, name what is only in the tree that is copied."""
    train = "import os\nfrom distrun_runtime import kvstore\nkv = kvstore.create('dist_sync')\n"
    train += "print('A is', os.environ['A'], kv.num_workers)\n"
    wrapper = '#!/bin/sh\necho "$2" >> /tmp/in-tree/used\nexec %s "$@"\n' % shlex.quote(sys.executable)
    write(lab.work, **{"train.py": train, "env.sh": "export A=$PWD PATH=$PWD/bin:$PATH\n", "bin/its-py": wrapper})
    (lab.work / "bin" / "its-py").chmod(0o755)
    (lab.work / "named").write_text("h1 python=its-py\nh2 python=its-py\n")
    command = ("launch", "-n", "2", "-s", "1", "--sync-dst-dir", "/tmp/in-tree", "--activate", "source ./env.sh")
    tasks = (sys.executable, "train.py")
    for more in (("--hosts", "h1,h2", "--python", "./bin/its-py"), ("-H", "named")):
        done = lab.distrun(*command, *more, *tasks)
        of(done)
        assert done.out.count("A is /tmp/in-tree 2") == 2
        assert "distrun_runtime" in lab["h1"].exec("cat", "/tmp/in-tree/used")
        lab["h1"].exec("rm", "/tmp/in-tree/used")
    write(lab.work, **{"env.sh": "echo no luck; false\n"})
    done = lab.distrun(*command, "-H", "named", *tasks)
    err = of(done, 3)
    assert "A is" not in done.out
    assert "no luck" in err
    assert "2 of 2 hosts cannot be used: h1 (activation), h2 (activation)" in err


def test_a_job_that_is_interrupted_while_it_copies_ends_at_once_and_starts_nothing(lab: Site) -> None:
    write(lab.work, **{"train.py": "print('never')"})
    noise(lab.work / "data", 8 * MIB)
    lab["h2"].rate(4000)
    job = ("launch", "-n", "2", "-s", "0", "--hosts", "h1,h2", "--sync-dst-dir", "/tmp/interrupted")
    running = lab.start(*job, "python3", "train.py")
    wait_until(lambda: "rsync --server" in lab["h2"].ps(), 60, "rsync runs on h2")
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.err
    assert "never" not in running.out
    wait_until(lambda: not lab.leftovers(), 60, "nothing is left")


THEIRS = """
mkdir -p %(at)s; chmod %(mode)s %(at)s
echo 'open("/root/bob-was-here", "w")' >%(at)s/numpy.py
chown -R -h bob:bob %(at)s
"""
"""What bob prepares on a host, with a module of his that a job would import."""


@pytest.mark.parametrize(
    ("given", "prepared", "said"),
    [
        ("/tmp/bobs", THEIRS % {"at": "/tmp/bobs", "mode": "755"}, "/tmp/bobs{on} is owned by bob"),
        (
            "/tmp/bobs-link/job",
            "mkdir -p /root/inner/job; ln -s /root/inner /tmp/bobs-link; chown -h bob:bob /tmp/bobs-link",
            "/tmp/bobs-link/job{on}: the link /tmp/bobs-link is owned by bob",
        ),
        (
            "/root/with-bobs",
            THEIRS % {"at": "/root/with-bobs", "mode": "755"} + "chown root:root /root/with-bobs",
            "/root/with-bobs{on} has files that others own or can change, and the job could run them: "
            "numpy.py (owned by bob)",
        ),
    ],
)
def test_a_folder_in_which_another_user_has_a_hand_takes_no_job(
    lab: Site, given: str, prepared: str, said: str
) -> None:
    write(lab.work, **{"train.py": "import numpy"})
    lab["h2"].exec("sh", "-c", prepared)
    err = of(lab.distrun("sync", "--hosts", "h2", "--sync-dst-dir", given), 4)
    assert "h2: " + said.format(on="") in err
    assert "fix: " in err
    job = ("launch", "-n", "1", "-s", "0", "--hosts", "h2", "--sync-dst-dir", given, "/usr/bin/python3", "train.py")
    err = of(lab.distrun(*job), 3)
    assert said.format(on=" on h2") in err
    assert "such as --sync-dst-dir '~/job'" in err
    lines = lab.distrun("doctor", "--hosts", "h2", "--sync-dst-dir", given).out.splitlines()
    assert any("sync folder" in line and said.format(on="") in line for line in lines), lines
    assert lab["h2"].exec("sh", "-c", "ls /root/bob-was-here /root/inner/job/train.py 2>/dev/null; true") == ""


def test_a_folder_of_the_users_own_at_home_takes_a_job(lab: Site) -> None:
    write(lab.work, **{"train.py": "import os; print('in', os.getcwd())"})
    words = ("-n", "2", "-s", "0", "--hosts", "h1,alice@h2", "--sync-dst-dir", "~/a job")
    done = lab.distrun("launch", *words, "/usr/bin/python3", "train.py")
    of(done)
    assert "in /root/a job" in done.out
    assert "in %s/a job" % lab["h2"].exec("sh", "-c", "echo ~alice").strip() in done.out


def test_a_group_that_the_user_belongs_to_may_write_and_that_is_said(lab: Site) -> None:
    write(lab.work, x="1")
    lab["h1"].exec("sh", "-c", "mkdir /srv/proj; chgrp users /srv/proj; chmod 2775 /srv/proj; usermod -aG users alice")
    err = of(lab.distrun("sync", "--hosts", "alice@h1", "--sync-dst-dir", "/srv/proj/job"))
    assert "warning: h1: /srv/proj/job: the members of your group users can change /srv/proj\n" in err
    err = of(lab.distrun("sync", "--hosts", "h1", "--sync-dst-dir", "/srv/proj/job2"), 4)
    assert "/srv/proj is writable by the group users (mode 2775)" in err


def sync(*words: str, cwd: Path, env: dict[str, str] | None = None) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "distrun", "sync", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": "%s:%s/runtime" % (ROOT, ROOT), **(env or {})},
        capture_output=True,
        text=True,
        timeout=scaled(100),
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.mark.ssh
def test_rsync_goes_by_the_users_own_ssh_configuration(tmp_path: Path) -> None:
    source = write(tmp_path / "source dir", x="1")
    with running(tmp_path / "sshd", **NO_RC) as server:
        config = server.folder / "config"
        config.write_text(
            "Host d1\n    HostName 127.0.0.1\n    port %d\n    user %s\n    IdentityFile %s\n    IdentitiesOnly yes\n"
            "    UserKnownHostsFile %s\n" % (server.port, USER, server.id, server.known_hosts)
        )
        done = sync(
            "--hosts", "d1", "--ssh-config", str(config), "--sync-dst-dir", str(tmp_path / "it's there"), cwd=source
        )
        of(done)
        assert tree(tmp_path / "it's there") == {"x": "1"}
        # The source itself, by way of ssh.
        err = of(
            sync("--hosts", "d1", "--ssh-config", str(config), "--sync-dst-dir", str(source), "--delete", cwd=source)
        )
        assert "d1: the same directory" in err
        assert tree(source) == {"x": "1"}


@pytest.mark.ssh
def test_a_host_that_lets_nobody_in_is_said_and_never_asks(tmp_path: Path) -> None:
    source = write(tmp_path / "source", x="1")
    with running(tmp_path / "sshd", **NO_RC) as server:
        wrong = key(tmp_path / "wrong")
        config = server.config("IdentityFile %s" % wrong, "IdentitiesOnly yes", identity=False)
        done = sync("--hosts", "d1", "--ssh-config", config, "--sync-dst-dir", str(tmp_path / "x"), cwd=source)
        err = of(done, 4)
        assert "Permission denied" in err
        assert not (tmp_path / "x").exists()


@pytest.fixture
def full_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An ssh-agent that holds eight keys which no host wants; the folder of its socket."""
    socket = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.DEVNULL)
    try:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
        # 2: no connection. The file is there a moment before somebody listens.
        wait_until(lambda: subprocess.run(["ssh-add", "-l"], check=False).returncode != 2, 60, "the agent listens")
        keys = [str(key(tmp_path / ("wrong%d" % number))) for number in range(8)]
        subprocess.run(["ssh-add", "-q", *keys], check=True)
        yield tmp_path
    finally:
        agent.kill()
        agent.wait()


def arrives(tmp_path: Path, host: str, config: str) -> None:
    source = write(tmp_path / "source", x="1")
    (tmp_path / "hosts").write_text(host + "\n")
    of(
        sync(
            "-H", str(tmp_path / "hosts"), "--ssh-config", config, "--sync-dst-dir", str(tmp_path / "there"), cwd=source
        )
    )
    assert tree(tmp_path / "there") == {"x": "1"}


@pytest.mark.ssh
@pytest.mark.parametrize("way", ["hosts", "config", "public"])
def test_a_key_that_was_named_gets_in_however_many_others_an_agent_holds(full_agent: Path, way: str) -> None:
    with running(full_agent / "sshd", **NO_RC) as server:
        named = server.id
        if way == "public":  # only its public half is a file, the rest is in the agent
            subprocess.run(["ssh-add", "-q", str(named)], check=True)
            named.unlink()
        lines = [] if way == "hosts" else ["IdentityFile %s" % named]
        config = server.config(*lines, identity=False)
        arrives(full_agent, "d1" if lines else "d1 identity=%s" % named, config)


@pytest.mark.ssh
def test_a_key_that_only_the_agent_has_gets_in_though_another_was_named(tmp_path: Path, full_agent: Path) -> None:
    with running(tmp_path / "sshd", **NO_RC) as server:
        subprocess.run(["ssh-add", "-q", "-D"], check=True)
        subprocess.run(["ssh-add", "-q", str(server.id)], check=True)
        arrives(tmp_path, "d1", server.config("IdentityFile %s" % key(tmp_path / "other"), identity=False))
