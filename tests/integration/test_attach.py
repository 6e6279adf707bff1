"""Real jobs that are left, followed from elsewhere, waited for and stopped: attach, detach, wait, launch --detach."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import Distrun, wait_until
from slowness import scaled
from terminal import Session

from distrun_runtime.contract import process

LIMIT_S = 60.0
GO = "until [ -e go ]; do sleep 0.02; done"
WAITS = f"echo up; {GO}; echo over"
"""A task that ends when the test makes the file `go`."""
FAILS = f"echo up; {GO}; echo over; touch over-$RANK; until [ -e over-0 ] && [ -e over-1 ]; do sleep 0.02; done; exit 3"
"""One of two that fail when both have said all."""

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for leftovers in /proc")


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    """The command; at the end no process of a job, no socket and no folder of one is left."""
    made = Distrun(tmp_path)
    yield made
    (made.work / "go").touch()
    paths = [
        json.loads((job / "control.json").read_text())["path"] for job in made.jobs if (job / "control.json").exists()
    ]
    try:
        wait_until(lambda: not made.left() and not any(map(os.path.exists, paths)), LIMIT_S, "nothing is left")
        assert not [job for job in made.jobs if os.path.exists(f"/var/tmp/distrun-{os.geteuid()}/{job.name}")]
    finally:
        for line in made.left():
            os.kill(int(line.split()[0]), signal.SIGKILL)


class Terminal(Session):
    """A terminal in which `distrun WORDS` runs, or `argv`."""

    def __init__(self, distrun: Distrun, *words: str, argv: list[str] | None = None, **env: str) -> None:
        super().__init__(argv or distrun.argv(*words), {**distrun.env, **env}, distrun.work)


def begin(distrun: Distrun, text: str = WAITS, *words: str, **more: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start an attached job of two workers; return its launch and its id when both have said `up`."""
    launch = distrun.begin("-n", "2", "-s", "0", "--grace", "2", *words, "bash", "-c", text, **more)
    wait_until(lambda: (distrun.home / "out").read_bytes().count(b"up") >= 2, LIMIT_S, "the workers are up")
    return launch, distrun.job.name


def detached(distrun: Distrun, text: str = WAITS, *words: str) -> str:
    """Start a detached job of two workers; return its id."""
    done = distrun.launch("--detach", "-n", "2", "-s", "0", "--grace", "2", *words, "bash", "-c", text)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def go(distrun: Distrun) -> None:
    (distrun.work / "go").touch()


def is_over(distrun: Distrun) -> bool:
    return (distrun.job / "outcome.json").exists()


def control(distrun: Distrun) -> dict[str, Any]:
    return json.loads((distrun.job / "control.json").read_text())


def lines(output: bytes) -> list[str]:
    return sorted(output.decode().splitlines())


def printed(distrun: Distrun, *words: str) -> list[str]:
    host = distrun.job_host()
    return sorted(f"worker-{rank}@{host} | {word}" for rank in (0, 1) for word in words)


# ---------------------------------------------------------------------- attach


def test_attach_prints_what_launch_prints_and_ends_with_the_jobs_code(distrun: Distrun) -> None:
    launch, job = begin(distrun, FAILS)
    attached = distrun.start("attach", "--since-start", job, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert f"attached to job {job}".encode() in attached.stderr.readline()
    go(distrun)
    out, err = attached.communicate(timeout=scaled(LIMIT_S))
    assert attached.returncode == launch.wait(scaled(LIMIT_S)) == 3
    assert lines(out) == lines((distrun.home / "out").read_bytes()) == printed(distrun, "up", "over")
    assert err.decode().splitlines()[-1] == (distrun.home / "err").read_text().splitlines()[-1]


def test_attach_to_a_task_shows_only_what_it_prints(distrun: Distrun) -> None:
    launch, job = begin(distrun, f"for i in 1 2 3; do echo line $i of $RANK; done; echo up; {GO}; echo over $RANK")
    words = ("attach", "--task", "worker-1", "--tail", "2", "-q", "--no-prefix", job)
    attached = distrun.start(*words, stdout=subprocess.PIPE, bufsize=0)
    assert attached.stdout.readline() == b"line 3 of 1\n"
    go(distrun)
    assert attached.communicate(timeout=scaled(LIMIT_S))[0] == b"up\nover 1\n"
    assert launch.wait(scaled(LIMIT_S)) == attached.returncode == 0


def control_clients(distrun: Distrun) -> list[str]:
    """The connections to the job's control socket, as the kernel lists them."""
    path = control(distrun)["path"]
    table = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in table if line.endswith(path) and line.split()[5] == "03"]


def test_without_a_terminal_ctrl_c_detaches(distrun: Distrun) -> None:
    launch, job = begin(distrun)
    attached = distrun.start("attach", "--since-start", job, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    attached.stdout.readline()
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=scaled(LIMIT_S))
    assert attached.returncode == 130
    assert f"distrun attach {job}".encode() in err
    assert launch.poll() is None
    go(distrun)
    assert launch.wait(scaled(LIMIT_S)) == 0


def test_attach_ends_when_nobody_reads_it_any_more_and_the_job_goes_on(distrun: Distrun) -> None:
    job = detached(distrun, f"seq 100000; {GO}")
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        attached = distrun.start("attach", "--since-start", job, stdout=pipe)
    os.read(reading, 10)
    os.close(reading)
    assert attached.wait(scaled(LIMIT_S)) == 141
    assert distrun.state()["state"] == "running"
    go(distrun)
    assert distrun.run("wait", job).returncode == 0


def test_g_goes_on_and_nothing_is_lost_meanwhile(distrun: Distrun) -> None:
    launch, job = begin(distrun)
    terminal = Terminal(distrun, "attach", "--since-start", job)
    terminal.expect("up", 2)
    terminal.type("\x03")
    terminal.expect("[g]o on?")
    go(distrun)
    wait_until(lambda: is_over(distrun), LIMIT_S)
    terminal.type("xg")  # other keys mean nothing
    assert terminal.ends() == 0
    assert terminal.shown.count("over") == 2
    assert launch.wait(scaled(LIMIT_S)) == 0


@pytest.mark.parametrize("second", ["s", "\x03"], ids=["s", "Ctrl-C again"])
def test_s_or_another_ctrl_c_stops_the_job_as_launch_does(second: str, distrun: Distrun) -> None:
    launch, job = begin(distrun, f"trap 'echo saved; exit 0' INT; echo up; {GO}")
    terminal = Terminal(distrun, "attach", "--since-start", job)
    terminal.expect("up", 2)
    terminal.type("\x03")
    terminal.expect("[s]top")
    terminal.type(second)
    assert terminal.ends() == 130
    assert launch.wait(scaled(LIMIT_S)) == 130
    assert terminal.shown.count("saved") == 2


def test_whatever_ends_a_client_the_job_goes_on(distrun: Distrun) -> None:
    job = detached(distrun)
    ends = [signal.SIGHUP, signal.SIGTERM, signal.SIGKILL, signal.SIGQUIT, signal.SIGALRM, signal.SIGSEGV]
    ignored = [each for each in ends if signal.getsignal(each) == signal.SIG_IGN]  # by a script's `&`: QUIT is
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        clients = [distrun.start("attach", "--since-start", job, stdout=subprocess.PIPE) for _ in ends]
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
    for number, attached in zip(ends, clients, strict=True):
        attached.stdout.readline()
        attached.send_signal(number)
        is_caught = number in (signal.SIGHUP, signal.SIGTERM)
        assert attached.wait(scaled(LIMIT_S)) == (128 + number if is_caught else -number)
        attached.stdout.close()
        assert not is_over(distrun), number
    wait_until(lambda: not control_clients(distrun), LIMIT_S, "the coordinator has noticed")
    assert not is_over(distrun)
    go(distrun)
    assert distrun.run("wait", job).returncode == 0


def test_a_stopped_client_costs_nothing(distrun: Distrun) -> None:
    """40 MB of output while it is stopped: the job and its launch end as if it were not there."""
    text = f"echo up; {GO}; head -c 20000000 /dev/zero | tr '\\0' x | fold -w 100; echo; echo over"
    launch, job = begin(distrun, text)
    attached = distrun.start("attach", "--since-start", "-q", job, stdout=subprocess.PIPE)
    attached.stdout.readline()
    attached.send_signal(signal.SIGSTOP)
    coordinator = process.Identity(control(distrun)["pid"], control(distrun)["start"])
    go(distrun)
    peak = 0
    while launch.poll() is None:
        peak = max(peak, _memory_kb(coordinator.pid))
        time.sleep(0.02)
    assert launch.returncode == 0
    assert not process.is_alive(coordinator)
    assert peak < 200_000
    attached.send_signal(signal.SIGCONT)
    out, _ = attached.communicate(timeout=scaled(LIMIT_S))
    assert attached.returncode == 0  # what it missed is in the job's logs
    assert out.count(b"x") == 40_000_000


def _memory_kb(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:")), 0)


def test_a_terminal_goes_on_where_it_stood(distrun: Distrun) -> None:
    """A shell in a terminal: attached twice, it sees each line once."""
    launch, job = begin(distrun, f"echo up; until [ -e more ]; do sleep 0.02; done; echo more; {GO}; echo over")
    attach = " ".join(distrun.argv("attach"))
    script = distrun.work / "twice.sh"
    script.write_text(f"{attach} --since-start {job}; echo left $?; touch more; {attach} {job}; echo ended $?\n")
    terminal = Terminal(distrun, argv=["bash", str(script)])
    terminal.expect("up", 2)
    terminal.type("\x03")
    terminal.expect("[d]etach")
    terminal.type("d")
    terminal.expect("detached; the job goes on")
    terminal.expect("left 0")
    terminal.expect("| more", 2)
    go(distrun)
    terminal.expect("ended 0")
    terminal.ends()
    assert [terminal.shown.count(f"| {word}") for word in ("up", "more", "over")] == [2, 2, 2]
    assert launch.wait(scaled(LIMIT_S)) == 0


def test_a_job_that_is_over_says_so_and_gives_its_code(distrun: Distrun) -> None:
    launch, job = begin(distrun, FAILS)
    go(distrun)
    assert launch.wait(scaled(LIMIT_S)) == 3
    done = distrun.run("attach", job)
    assert done.returncode == 3
    assert f"job {job} is over".encode() in done.stderr
    assert f"distrun logs {job}".encode() in done.stderr
    assert distrun.run("wait", job).returncode == 3


# ---------------------------------------------------------------------- detach


def test_detach_lets_launch_go_and_its_end_means_nothing(distrun: Distrun) -> None:
    launch, job = begin(distrun)
    done = distrun.run("detach", job)
    assert done.returncode == 0
    assert done.stdout.decode() == f"{job}: goes on without its terminal; to come back: distrun attach {job}\n"
    assert launch.wait(scaled(LIMIT_S)) == 0
    assert f"job {job} goes on without this terminal" in (distrun.home / "err").read_text()
    again = distrun.run("detach", job)
    assert again.stdout.decode().startswith(f"{job}: had been detached before")
    assert not is_over(distrun)
    go(distrun)
    assert distrun.run("wait", job).returncode == 0
    assert distrun.state()["state"] == "succeeded"


def test_closing_the_terminal_ends_an_attached_job_and_not_a_detached_one(distrun: Distrun) -> None:
    for is_detached in (True, False):
        (distrun.work / "go").unlink(missing_ok=True)
        terminal = Terminal(distrun, "launch", "-n", "1", "-s", "0", "--launcher", "local", "bash", "-c", WAITS)
        terminal.expect("| up")
        job = distrun.jobs[-1]
        if is_detached:
            assert distrun.run("detach", job.name).returncode == 0
        terminal.close()  # the kernel sends SIGHUP to what is left there
        terminal.process.wait(scaled(LIMIT_S))
        if is_detached:
            assert not (job / "outcome.json").exists()
            go(distrun)
        assert distrun.run("wait", job.name).returncode == (0 if is_detached else 129)


def test_a_detached_job_is_of_no_terminal(distrun: Distrun) -> None:
    launch, job = begin(distrun)
    assert distrun.run("detach", job).returncode == 0
    launch.wait(scaled(LIMIT_S))
    pid = control(distrun)["pid"]
    for fd in (0, 1, 2):
        assert os.readlink(f"/proc/{pid}/fd/{fd}") in (os.devnull, str(distrun.job / "coordinator.log"))
    assert (distrun.job / "coordinator.log").read_bytes() == b""


# ---------------------------------------------------------------------- wait


def test_wait_gives_up_when_its_time_is_over(distrun: Distrun) -> None:
    job = detached(distrun)
    done = distrun.run("wait", "--timeout", "0.3", job)
    assert done.returncode == 124
    assert done.stderr.decode() == f"distrun: job {job} is not over after 0.3 s\n"
    go(distrun)
    assert distrun.run("wait", job).returncode == 0


# ---------------------------------------------------------------------- launch --detach


def test_launch_detach_prints_the_id_alone_when_all_tasks_run(distrun: Distrun) -> None:
    done = distrun.launch("--detach", "-n", "2", "-s", "1", "bash", "-c", WAITS)
    assert done.returncode == 0, done.stderr.decode()
    job = done.stdout.decode()
    assert job == distrun.job.name + "\n"
    assert f"to follow them: distrun attach {job.strip()}" in done.stderr.decode()
    assert distrun.state()["state"] == "running"
    assert {task["state"] for task in distrun.state()["tasks"]} == {"running"}
    go(distrun)
    assert distrun.run("wait", job.strip()).returncode == 0


def test_a_detached_job_that_ends_before_all_run_gives_its_code_and_report(distrun: Distrun) -> None:
    done = distrun.launch("--detach", "-n", "2", "-s", "0", "no-such-command")
    assert done.returncode == 127
    assert done.stdout == b""
    assert b"there is no program no-such-command on " in done.stderr


def test_the_coordinator_of_a_detached_job_is_a_daemon(distrun: Distrun) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    words = ("launch", "--launcher", "local", "--detach", "-n", "1", "-s", "0", "bash", "-c", f"umask >mask; {WAITS}")
    done = subprocess.run(
        ["bash", "-c", 'umask 027; exec "$@"', "bash", *distrun.argv(*words)],
        env=distrun.env,
        cwd=distrun.work,
        pass_fds=[write],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 0, done.stderr.decode()
    assert os.read(read, 1) == b""  # nobody holds the other end
    os.close(read)
    pid = control(distrun)["pid"]
    (row,) = process.table([pid])
    assert row.sid not in (pid, os.getsid(0))  # it leads no session, so that it never gets a terminal
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert "00000001" in _status(pid, "SigIgn") or int(_status(pid, "SigIgn"), 16) & 1
    assert int(_status(pid, "Umask"), 8) == 0o027
    wait_until((distrun.work / "mask").exists, LIMIT_S)
    os.kill(pid, signal.SIGHUP)
    assert distrun.run("wait", "--timeout", "0.2", distrun.job.name).returncode == 124
    go(distrun)
    assert distrun.run("wait", distrun.job.name).returncode == 0
    assert (distrun.work / "mask").read_text() == "0027\n"


def _status(pid: int, name: str) -> str:
    text = Path(f"/proc/{pid}/status").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith(name + ":"))


def test_a_logout_that_removes_the_runtime_folder_harms_no_detached_job(distrun: Distrun) -> None:
    job = detached(
        distrun, f"cat $DISTRUN_TOKEN_FILE >/dev/null || exit 9; echo up; {GO}; cat $DISTRUN_TOKEN_FILE", "-s", "1"
    )
    shutil.rmtree(distrun.home / "run")
    go(distrun)
    done = distrun.run("wait", job)
    assert done.returncode == 0


def test_interrupting_launch_detach_before_all_run_ends_the_job(distrun: Distrun) -> None:
    """With --activate the job is being started for as long as we want."""
    started = distrun.begin("--detach", "-n", "1", "-s", "0", "--activate", f"touch activating; {GO}", "true")
    wait_until((distrun.work / "activating").exists, LIMIT_S)
    started.send_signal(signal.SIGINT)
    assert started.wait(scaled(LIMIT_S)) == 130
    assert distrun.state()["state"] == "killed"
    assert (distrun.home / "out").read_bytes() == b""


# ---------------------------------------------------------------------- a coordinator that is gone


def test_attach_and_wait_say_what_to_type_when_the_coordinator_is_lost(distrun: Distrun) -> None:
    job = detached(distrun, WAITS, "--lost-after", "2", "--suspect-after", "1")
    attached = distrun.start("attach", "--since-start", job, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    waiting = distrun.start("wait", job, stderr=subprocess.PIPE)
    wait_until(lambda: len(control_clients(distrun)) == 2, LIMIT_S)
    attached.stdout.readline()
    pid = control(distrun)["pid"]
    os.kill(pid, signal.SIGKILL)
    for client in (attached, waiting):
        _, err = client.communicate(timeout=scaled(LIMIT_S))
        assert client.returncode == 7
        assert f"job {job}: its coordinator (pid {pid} on {socket.gethostname()}) is gone" in err.decode()
        assert f"distrun kill {job}" in err.decode()
    done = distrun.run("attach", job)
    assert (done.returncode, b"is gone" in done.stderr) == (7, True)
    assert distrun.run("detach", job).returncode == 7
    assert distrun.run("kill", job).returncode == 0
    assert distrun.run("attach", job).returncode == 143


def test_a_control_socket_that_was_removed_is_named_and_kill_does_without_it(distrun: Distrun) -> None:
    job = detached(distrun)
    path = control(distrun)["path"]
    os.unlink(path)
    done = distrun.run("attach", job)
    assert done.returncode == 7
    assert f"cannot be reached: {path}: No such file or directory" in done.stderr.decode()
    assert f"distrun kill {job}" in done.stderr.decode()
    assert distrun.run("kill", job).returncode == 0
    assert (distrun.state()["state"], distrun.state()["message"]) == ("killed", "stopped by distrun kill")


# ---------------------------------------------------------------------- from another machine


def ssh_stand_in(distrun: Distrun, text: str = 'shift $(($# - 1)); exec sh -c "$1"') -> dict[str, str]:
    """Return variables with which `ssh` is a script: it has no configuration (-G), and runs the command here."""
    folder = distrun.home / "bin"
    folder.mkdir()
    path = folder / "ssh"
    begin = 'case " $* " in *" -G "*) exit 0 ;; esac'
    path.write_text('#!/bin/sh\n%s\necho "$@" >%s\n%s\n' % (begin, distrun.home / "asked", text))
    path.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def move_away(distrun: Distrun) -> None:
    """Have the job be of another machine."""
    path = distrun.job / "control.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))


def test_ctrl_c_on_a_terminal_does_not_end_the_agent_there(distrun: Distrun) -> None:
    job = detached(distrun)
    move_away(distrun)
    terminal = Terminal(distrun, "attach", "--since-start", job, **ssh_stand_in(distrun))
    terminal.expect("up", 2)
    terminal.type("\x03")
    terminal.expect("[g]o on?")
    terminal.type("g")
    go(distrun)
    assert terminal.ends() == 0
    assert terminal.shown.count("| over") == 2
