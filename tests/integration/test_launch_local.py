"""Real `distrun launch` runs on this machine: what is started, what comes back, what is shown."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from distrun_cli import Distrun, processes, wait_until
from slowness import scaled

LIMIT_S = 60.0
SHOW_ENV = "import json,os;print(json.dumps(dict(os.environ)),flush=True)"
SHOW_ARGV = "import os,sys;sys.stdout.buffer.write(b'|'.join(map(os.fsencode,sys.argv[1:]))+b'\\n')"


def script(distrun: Distrun, text: str, name: str = "task.sh") -> str:
    path = distrun.work / name
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return "./" + name


def environment(distrun: Distrun, task: str) -> dict[str, str]:
    return json.loads(distrun.log(task))


def said(result: subprocess.CompletedProcess[bytes]) -> list[str]:
    """Return the lines of stderr, without those that a busy machine adds while the job starts."""
    return [line for line in result.stderr.decode().splitlines() if not line.startswith("distrun: waiting for ")]


# ---------------------------------------------------------------- what the shell leaves to a launch


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_streams_that_the_shell_closed_end_no_job(closed: tuple[int, ...], distrun: Distrun) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    result = distrun.launch("-n", "1", "-s", "0", "sh", "-c", "echo hi; sleep 1; exit 7", preexec_fn=close)
    assert result.returncode == 7, result.stderr
    assert distrun.log("worker-0") == b"hi\n"
    assert result.stdout.endswith(b"" if 1 in closed else b" | hi\n")


def test_a_launch_hears_a_signal_that_its_parent_blocks_and_children_whose_end_it_ignores(distrun: Distrun) -> None:
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    launcher = distrun.begin("-n", "1", "-s", "0", "sh", "-c", "touch up; exec sleep 300", preexec_fn=block)
    try:
        wait_until((distrun.work / "up").exists, LIMIT_S, "the worker is up")
        launcher.terminate()
        assert launcher.wait(scaled(LIMIT_S)) == 143, (distrun.home / "err").read_text()
    finally:
        launcher.kill()
        launcher.wait()


INTERRUPTED = """\
import os, signal, sys

who = sys.argv.pop(1)

def fork(fork=os.fork):
    os.fork = fork
    pid = fork()
    if bool(pid) == (who == "client"):
        os.kill(os.getpid(), signal.SIGINT)
    return pid

os.fork = fork
from distrun.cli import main
main()
"""
"""Runs distrun, and interrupts the process of the client, or of the coordinator, at the moment when both begin."""


@pytest.mark.parametrize(("who", "words"), [("client", ()), ("coordinator", ()), ("client", ("--detach",))])
def test_a_launch_that_is_interrupted_while_its_coordinator_begins_ends_with_130(
    who: str, words: tuple[str, ...], distrun: Distrun
) -> None:
    argv = [sys.executable, "-c", INTERRUPTED, who, "launch", "--launcher", "local", "-n", "1", "-s", "0", *words]
    result = subprocess.run(
        [*argv, "sleep", "300"], env=distrun.env, cwd=distrun.work, capture_output=True, check=False
    )
    assert result.returncode == 130, result.stderr
    assert result.stderr.count(b"distrun: interrupted") <= 1
    assert "--detach" in words or not distrun.left()  # a detached one may still be ending: `distrun` waits for that


# ---------------------------------------------------------------- foreign programs

PS_LITE = """
import os, zmq
peer = zmq.Context().socket(zmq.DEALER)  # as ps-lite makes it
peer.connect("tcp://%s:%s" % (os.environ["DMLC_PS_ROOT_URI"], os.environ["DMLC_PS_ROOT_PORT"]))
peer.send(b"ADD_NODE")
peer.recv()
"""


@pytest.mark.slow
def test_a_foreign_parameter_server_program_is_recognised_and_ends_at_the_start_deadline(distrun: Distrun) -> None:
    """It hung for ever."""
    (distrun.work / "train.py").write_text(PS_LITE)
    result = distrun.launch("-n", "2", "-s", "1", "--start-timeout", "6", sys.executable, "train.py")
    assert result.returncode == 1
    words = result.stderr.decode()
    assert words.count("this looks like ps-lite (MXNet, BytePS)") >= 1
    last = words.splitlines()[-1]
    assert last.startswith("distrun: error: scheduler on ")
    assert "no worker has opened a store for 6 s, and a program at " in last
    assert last.endswith("fix: distrun launch --ps command ...")


# ---------------------------------------------------------------- signals for tasks

SAVES = """
import os, signal, time
from pathlib import Path
from distrun_runtime import kvstore

wanted = []
signal.signal(signal.SIGUSR1, lambda number, frame: wanted.append(number))
with kvstore.create("dist_sync"):  # all nodes are there
    Path("up-%d" % os.getpid()).touch()
    while not wanted or not Path("go").exists():
        time.sleep(0.02)
print("saved", flush=True)
"""


def test_signals_for_tasks_end_no_process_of_distrun_and_reach_workers_if_that_is_wanted(distrun: Distrun) -> None:
    (distrun.work / "train.py").write_text(SAVES)
    words = ("--forward-signal", "USR1", sys.executable, "train.py")
    launch = distrun.begin("-n", "2", "-s", "1", *words)
    try:
        wait_until(lambda: len(list(distrun.work.glob("up-*"))) == 2, LIMIT_S, "both workers run")
        workers = {int(path.name[3:]) for path in distrun.work.glob("up-*")}
        others = {int(line.split()[0]) for line in distrun.left()} - workers
        assert len(others) >= 4, "guard, agent, scheduler and server"
        for pid in (*others, distrun.coordinator(), launch.pid):
            os.kill(pid, signal.SIGUSR2)
        launch.send_signal(signal.SIGUSR1)
        (distrun.work / "go").touch()
        assert launch.wait(scaled(LIMIT_S)) == 0
    finally:
        launch.kill()
        launch.wait()
    assert all(b"saved" in distrun.log("worker-%d" % i) for i in (0, 1))


# ---------------------------------------------------------------- exit codes


def test_all_workers_well_is_0(distrun: Distrun) -> None:
    result = distrun.launch("-n", "2", "-s", "0", "true")
    assert result.returncode == 0, result.stderr.decode()
    assert said(result) == ["distrun: job %s (on this machine)" % distrun.job.name]
    state = distrun.state()
    assert (state["state"], state["exit_code"]) == ("succeeded", 0)
    assert [task["state"] for task in state["tasks"]] == ["exited", "exited"]


@pytest.mark.parametrize(
    ("text", "code", "why"),
    [("exit 255", 255, "failed with exit code 255"), ("kill -SEGV $$", 139, "was ended by signal SEGV")],
)
def test_a_failing_worker_gives_its_code_or_128_and_its_signal(
    text: str, code: int, why: str, distrun: Distrun
) -> None:
    result = distrun.launch("-n", "1", "-s", "0", script(distrun, "echo last words\n" + text))
    assert result.returncode == code
    report = result.stderr.decode()
    assert "worker-0 on %s %s" % (distrun.job_host(), why) in report
    assert "last words" in report
    assert str(distrun.job / "logs" / "worker-0.log") in report
    assert report.splitlines()[-1].startswith("distrun: error: ")
    assert distrun.state()["state"] == "failed"


def test_first_failing_task_gives_the_exit_code(distrun: Distrun) -> None:
    """Rank 1 fails first; rank 0 dies of it with another code a moment later: when rank 1's process has gone."""
    text = """
    if [ $DMLC_RANK = 1 ]; then echo $$ >new; mv new failed; exit 5; fi
    until [ -e failed ]; do sleep 0.01; done
    while kill -0 $(cat failed) 2>/dev/null; do sleep 0.01; done; exit 6
    """
    result = distrun.launch("-n", "2", "-s", "0", script(distrun, text))
    assert result.returncode == 5
    assert b"first failure: worker-1" in result.stderr


def test_a_foreign_server_that_dies_fails_the_job(distrun: Distrun) -> None:
    text = "[ $DMLC_ROLE = server ] && exit 9\nsleep 60"
    result = distrun.launch("-n", "1", "-s", "1", "--ps", "command", script(distrun, text))
    assert result.returncode == 9
    assert b"first failure: server-0" in result.stderr


def test_an_interface_that_is_not_there_is_3_and_the_message_lists_those_that_are(distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", "--interface", "nosuch9", "true")
    assert result.returncode == 3
    assert b"no interface 'nosuch9'" in result.stderr
    assert b"127.0.0.1" in result.stderr


# ---------------------------------------------------------------- output


def test_no_prefix_leaves_the_bytes_unchanged(distrun: Distrun) -> None:
    data = bytes(range(256)) * 40 + b"\r\n50%\r100%\nno newline"
    (distrun.work / "data").write_bytes(data)
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", "cat", "data")
    assert result.stdout == data
    assert distrun.log("worker-0") == data


@pytest.mark.parametrize(
    ("shows", "out", "err"),
    [
        (("worker-1",), [b"out 1"], [b"err 1"]),
        (("errors",), [], [b"err 0", b"err 1"]),
        (("worker-1", "errors"), [b"out 1"], [b"err 0", b"err 1"]),
        (("worker",), [b"out 0", b"out 1"], [b"err 0", b"err 1"]),
    ],
)
def test_what_is_to_be_shown_is_printed_and_the_logs_keep_everything(
    shows: tuple[str, ...], out: list[bytes], err: list[bytes], distrun: Distrun
) -> None:
    words = [word for each in shows for word in ("--show", each)]
    result = distrun.launch("-n", "2", "-s", "0", "-q", "--no-prefix", *words, "echo out $RANK; echo err $RANK >&2")
    assert sorted(result.stdout.splitlines()) == out
    assert sorted(result.stderr.splitlines()) == err
    assert sorted(distrun.log("worker-0").splitlines()) == [b"err 0", b"out 0"]


def test_a_task_to_be_shown_that_no_job_would_have_starts_nothing(distrun: Distrun) -> None:
    result = distrun.launch("-n", "2", "-s", "0", "--show", "worker-7", "touch", "started")
    assert result.returncode == 2
    assert b"no task 'worker-7' in this job; there is: worker-" in result.stderr
    assert not (distrun.work / "started").exists()


def test_lines_appear_when_they_are_printed(distrun: Distrun) -> None:
    """PYTHONUNBUFFERED: a Python worker's line is here while it still sleeps."""
    child = distrun.begin("-n", "1", "-s", "0", sys.executable, "-c", "print('now'); import time; time.sleep(60)")
    wait_until(lambda: b"| now\n" in (distrun.home / "out").read_bytes(), LIMIT_S)
    child.terminate()
    assert child.wait(scaled(LIMIT_S)) == 143


def test_the_jobs_id_and_place_are_said_at_the_start_unless_quiet(distrun: Distrun) -> None:
    result = distrun.run("launch", "-n", "1", "-s", "0", "true")
    assert said(result) == ["distrun: job %s (on this machine; no hosts given)" % distrun.job.name]
    assert distrun.run("launch", "-q", "-n", "1", "-s", "0", "true").stderr == b""


def test_verbose_says_where_the_logs_are_and_vv_every_message(distrun: Distrun) -> None:
    said = distrun.launch("-v", "-n", "1", "-s", "0", "true").stderr.decode()
    assert str(distrun.job / "logs") in said
    traced = distrun.launch("-vv", "-n", "1", "-s", "0", "--env", "API_KEY=s3cret", "true").stderr.decode()
    assert "Exited" in traced or "exited" in traced
    assert "s3cret" not in traced


def test_the_local_launcher_takes_hosts_and_sync_with_a_note(distrun: Distrun) -> None:
    (distrun.work / "hosts").write_text("h1\nh2\n")
    result = distrun.launch("-n", "1", "-s", "0", "-H", "hosts", "--sync-dst-dir", "/tmp/x", "pwd")
    assert result.returncode == 0
    assert result.stdout.endswith(b" | %s\n" % os.fsencode(distrun.work))
    assert b"-H/--hostfile is ignored" in result.stderr
    assert b"--sync-dst-dir is ignored" in result.stderr


def test_a_reader_that_stops_reading_does_not_stall_the_job(distrun: Distrun) -> None:
    """40 MB go to a pipe that nobody reads; the worker is done all the same."""
    read, write = os.pipe()
    text = "head -c 40000000 /dev/zero | tr '\\0' 'x' | fold -w 1000\ntouch done\n"
    child = distrun.begin("-n", "1", "-s", "0", script(distrun, text), stdout=write)
    os.close(write)
    wait_until((distrun.work / "done").exists, LIMIT_S)
    size = 0
    while data := os.read(read, 1 << 20):
        size += len(data.replace(b"\n", b""))
    os.close(read)
    assert child.wait(scaled(LIMIT_S)) == 0
    host = distrun.state()["hosts"][0]
    assert size == 40_000_000 + 40_000 * len("worker-0@%s | " % host)


def test_a_reader_that_goes_away_ends_the_job_as_sigpipe_would(distrun: Distrun) -> None:
    """`distrun launch ... | head -1`."""
    text = "trap 'touch ended; exit 0' TERM; while :; do echo y; done"
    piped = "%s | head -1; exit ${PIPESTATUS[0]}"
    words = shlex.join(distrun.argv("launch", "--launcher", "local", "-n", "1", "-s", "0", script(distrun, text)))
    result = subprocess.run(
        ["bash", "-c", piped % words],
        env=distrun.env,
        cwd=distrun.work,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 141, result.stderr
    assert result.stdout.endswith(b"| y\n")
    assert "stdout is closed (SIGPIPE)" in result.stderr.decode()
    assert (distrun.work / "ended").exists()
    assert json.loads((distrun.job / "outcome.json").read_text())["exit_code"] == 141


def test_a_stderr_whose_reader_has_gone_ends_no_job(distrun: Distrun) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        child = distrun.begin("-n", "1", "-s", "0", "echo one >&2; echo two; exit 3", stderr=pipe)
    assert child.wait(scaled(LIMIT_S)) == 3
    assert (distrun.home / "out").read_bytes().endswith(b"| two\n")


def test_ctrl_c_silences_a_task_that_floods_the_terminal(distrun: Distrun) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        text = "trap 'echo saved; exit 0' INT; yes & wait"
        child = distrun.begin("-n", "1", "-s", "0", "--grace", "5", text, stdout=pipe)
    wait_until(lambda: distrun.jobs and (distrun.job / "logs/worker-0.log").exists(), LIMIT_S)
    wait_until(lambda: (distrun.job / "logs/worker-0.log").stat().st_size > 30_000_000, LIMIT_S)
    child.send_signal(signal.SIGINT)
    wait_until((distrun.job / "outcome.json").exists, LIMIT_S)
    size = 0
    while data := os.read(reading, 1 << 20):
        size += len(data)
    os.close(reading)
    assert child.wait(scaled(LIMIT_S)) == 130
    assert size < 8_000_000, "what the pipe held, and the last words"
    *_, last = (distrun.home / "err").read_text().splitlines()
    assert re.fullmatch(f"distrun: .*iB of output are not shown: distrun logs {distrun.job.name}", last)


# ---------------------------------------------------------------- command and environment

STRANGE = [
    "two words",
    "it's",
    'say "hi"',
    "$HOME `id` $(id) \\",
    "a\nb\tc",
    "ü漢🚀",
    "",
    "*?[x]{a,b}~!#",
    "-n",
    "--",
    "\\n",
]


def test_arguments_arrive_byte_for_byte(distrun: Distrun) -> None:
    words = [*STRANGE, os.fsdecode(b"\xff\xfe")]
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", sys.executable, "-c", SHOW_ARGV, *words)
    assert result.stdout == b"|".join(map(os.fsencode, words)) + b"\n"


def test_environment_values_arrive_byte_for_byte(distrun: Distrun) -> None:
    given = {"V%d" % number: word for number, word in enumerate([*STRANGE, os.fsdecode(b"\xff=\xfe")])}
    options = [word for name, value in given.items() for word in ("--env", "%s=%s" % (name, value))]
    outer = {"OUTER": "it's\n$x ü"}
    result = distrun.launch("-n", "1", "-s", "0", *options, sys.executable, "-c", SHOW_ENV, env=outer)
    assert result.returncode == 0, result.stderr.decode()
    got = environment(distrun, "worker-0")
    assert {name: got[name] for name in given} == given
    assert got["OUTER"] == outer["OUTER"]


def test_what_looks_like_our_options_reaches_the_program(distrun: Distrun) -> None:
    words = ["--queue", "q", "-n", "8", "--launcher", "ssh", "--", "-h", "--env", "X=1"]
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", script(distrun, 'echo "$@"'), *words)
    assert result.stdout.decode() == " ".join(words) + "\n"


def test_tasks_start_in_the_current_folder_with_nothing_on_stdin(distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", "bash", "-c", "pwd; cat; echo end")
    assert result.stdout.decode() == "%s\nend\n" % distrun.work


def test_variables_of_an_outer_job_are_removed(distrun: Distrun) -> None:
    outer = {"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_RANK": "3", "DMLC_PS_ROOT_URI": "1.2.3.4", "DMLC_SERVER_ID": "4"}
    outer.update({"DMLC_TRACKER_URI": "1.2.3.4", "RANK": "9", "PET_NNODES": "2", "DISTRUN_JOB_ID": "old", "MINE": "1"})
    distrun.launch("-n", "1", "-s", "0", sys.executable, "-c", SHOW_ENV, env=outer)
    got = environment(distrun, "worker-0")
    gone = ("SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "DMLC_PS_ROOT_URI", "DMLC_SERVER_ID", "DMLC_TRACKER_URI")
    assert not [name for name in (*gone, "PET_NNODES") if name in got]
    assert (got["RANK"], got["DISTRUN_JOB_ID"], got["MINE"]) == ("0", distrun.job.name, "1")


def test_every_task_knows_what_it_is(distrun: Distrun) -> None:
    """One job of all roles by --ps command, and the rows of the table as they arrive."""
    result = distrun.launch(
        *("-n", "2", "-s", "1", "--ps", "command", "--env", "ALL=1", "--env-worker", "ONLY=w"),
        *("--env-server", "ONLY:s", "--env-scheduler", "ONLY=d", sys.executable, "-c", SHOW_ENV),
    )
    assert result.returncode == 0, result.stderr.decode()
    got = {name: environment(distrun, name) for name in ("scheduler", "server-0", "worker-0", "worker-1")}
    ports = {env["DMLC_PS_ROOT_PORT"] for env in got.values()}
    assert len(ports) == 1
    assert 0 < int(ports.pop()) < 65536
    for env in got.values():
        assert env["DMLC_PS_ROOT_URI"] == env["DMLC_NODE_HOST"] == env["DISTRUN_ADDR"] == "127.0.0.1"
        assert (env["DMLC_NUM_WORKER"], env["DMLC_NUM_SERVER"], env["ALL"]) == ("2", "1", "1")
        assert Path(env["DISTRUN_RUN_DIR"]) == distrun.job
        assert env["DISTRUN_JOB_ID"] == distrun.job.name
        assert "DISTRUN_TOKEN_FILE" in env
    assert [got[name]["ONLY"] for name in sorted(got)] == ["d", "s", "w", "w"]
    assert [got["worker-%d" % i]["RANK"] for i in (0, 1)] == ["0", "1"]
    first, second = got["worker-0"], got["worker-1"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != first["DMLC_PS_ROOT_PORT"]
    assert first["JAX_COORDINATOR_ADDRESS"] == second["JAX_COORDINATOR_ADDRESS"]
    assert first["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert "RANK" not in got["server-0"]


def test_held_ports_can_be_bound_by_the_program_that_they_are_for(distrun: Distrun) -> None:
    code = (
        "import os,socket\ns=socket.socket();s.setsockopt(socket.SOL_SOCKET,socket.SO_REUSEADDR,1)\n"
        "s.bind(('127.0.0.1',int(os.environ['MASTER_PORT'])));s.listen();print('bound')"
    )
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", sys.executable, "-c", code)
    assert result.stdout == b"bound\n", result.stderr.decode()


def test_the_runtime_can_be_imported_by_any_worker(distrun: Distrun) -> None:
    code = "import sys,distrun_runtime;print(distrun_runtime.__file__)"
    result = distrun.launch("-n", "1", "-s", "0", "--no-prefix", sys.executable, "-S", "-c", code)
    assert result.returncode == 0, result.stderr.decode()


def test_from_site_packages_workers_get_the_runtime_without_its_neighbours(distrun: Distrun) -> None:
    """Installed beside other packages, the runtime must not put those in front of the user's own."""
    site = distrun.home / "site-packages"
    for package in ("distrun", "distrun_runtime"):
        source = Path(importlib.import_module(package).__file__ or "").parent
        shutil.copytree(source, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    (site / "neighbour.py").touch()
    code = (
        "import os,sys;sys.path=[p for p in sys.path if 'site-packages' not in p];import distrun_runtime\n"
        "print(distrun_runtime.__file__)\ntry: import neighbour\nexcept ImportError: print('alone')"
    )
    words = ("-n", "1", "-s", "0", "--no-prefix", sys.executable, "-c", code)
    cache = distrun.home / "cache"
    result = distrun.launch(*words, env={"PYTHONPATH": str(site), "XDG_CACHE_HOME": str(cache)})
    assert result.returncode == 0, result.stderr.decode()
    where, alone = result.stdout.decode().splitlines()
    assert where.startswith(str(cache / "distrun" / "runtime"))
    assert alone == "alone"


def test_secrets_are_on_no_command_line_in_no_file_and_in_no_output(distrun: Distrun) -> None:
    (distrun.home / "my.env").write_text("FILED=filed-s3cret\n")
    words = ["-n", "1", "-s", "0", "-v", "--env", "MY_TOKEN", "--env-file", str(distrun.home / "my.env")]
    text = 'echo "$MY_TOKEN $FILED" | md5sum > seen; cat $DISTRUN_TOKEN_FILE > token; touch here; sleep 60'
    child = distrun.begin(*words, script(distrun, text), env={"MY_TOKEN": "outer-s3cret"})
    wait_until((distrun.work / "here").exists, LIMIT_S)
    token = (distrun.work / "token").read_bytes().strip()
    assert len(token) >= 32
    secrets = (b"outer-s3cret", b"filed-s3cret", token)
    lines = b"".join(command for _, _, command in processes())
    assert not [secret for secret in secrets if secret in lines]
    child.terminate()
    assert child.wait(scaled(LIMIT_S)) == 143
    files = [path for path in distrun.job.rglob("*") if path.is_file()] + [distrun.home / "out", distrun.home / "err"]
    assert not [(path, s) for path in files for s in secrets if s in path.read_bytes()]
    seen = subprocess.run(["md5sum"], input=b"outer-s3cret filed-s3cret\n", stdout=subprocess.PIPE, check=True).stdout
    assert (distrun.work / "seen").read_bytes() == seen
    assert b'"MY_TOKEN"' in (distrun.job / "plan.json").read_bytes()


# ---------------------------------------------------------------- with the bundled servers


def test_a_script_that_opens_no_store_ends_with_0_beside_servers(distrun: Distrun) -> None:
    result = distrun.launch("-n", "2", "echo", "hello")
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.count(b"hello") == 2
    states = {task["name"]: task["state"] for task in distrun.state()["tasks"]}
    assert set(states) == {"scheduler", "server-0", "server-1", "worker-0", "worker-1"}
    assert states["server-0"] in ("stopped", "exited")


def test_two_workers_add_through_two_servers(distrun: Distrun) -> None:
    code = (
        "import numpy as np\nfrom distrun_runtime import kvstore\n"
        "kv = kvstore.create('dist_sync'); kv.init(3, np.zeros(4)); kv.push(3, np.ones(4) * (kv.rank + 1))\n"
        "out = np.empty(4); kv.pull(3, out=out); print(kv.rank, out.tolist()); kv.close()"
    )
    result = distrun.launch("-n", "2", "-s", "2", "--no-prefix", sys.executable, "-c", code)
    assert result.returncode == 0, result.stderr.decode()
    assert sorted(result.stdout.decode().splitlines()) == ["0 [3.0, 3.0, 3.0, 3.0]", "1 [3.0, 3.0, 3.0, 3.0]"]


# ---------------------------------------------------------------- status, logs, run dir


def test_status_logs_and_names(distrun: Distrun) -> None:
    # The one that fails waits for the other, which would be stopped.
    text = "seq 3; touch said-$DMLC_RANK; until [ -e said-0 ] && [ -e said-1 ]; do sleep 0.02; done"
    distrun.launch("-n", "2", "-s", "0", "--name", "digits", script(distrun, text + "; exit $((DMLC_RANK * 2))"))
    job = distrun.job.name
    assert job.startswith("digits-")
    table = distrun.run("status").stdout.decode()
    assert job in table
    assert "failed" in table
    one = distrun.run("status", "digits")
    assert one.returncode == 1
    assert "worker-1" in one.stdout.decode()
    assert json.loads(distrun.run("status", job, "--json").stdout)["job"]["exit_code"] == 2
    assert [each["id"] for each in json.loads(distrun.run("status", "--json").stdout)["jobs"]] == [job]
    assert distrun.run("logs", job, "worker-0").stdout == b"1\n2\n3\n"
    assert distrun.run("logs", job[:-1], "worker-0", "-n", "1").stdout == b"3\n"
    both = distrun.run("logs", "digits", "worker", "-n", "2").stdout.decode().splitlines()
    assert [line.partition(" | ")[2] for line in both] == ["2", "3", "2", "3"]
    wrong = distrun.run("logs", job, "worker-7")
    assert wrong.returncode == 2
    assert b"no task 'worker-7'" in wrong.stderr


def test_kill_stops_a_running_job(distrun: Distrun) -> None:
    child = distrun.begin("-n", "2", "-s", "0", script(distrun, "touch up-$DMLC_RANK; sleep 60"))
    wait_until(lambda: len(list(distrun.work.glob("up-*"))) == 2, LIMIT_S)
    coordinator, job = distrun.coordinator(), distrun.job.name
    said = distrun.run("kill", job)
    assert said.returncode == 0
    assert said.stdout.decode().splitlines() == [
        "%s: asked its launcher (pid %d) to stop the job" % (job, coordinator),
        "%s: the launcher has ended" % job,
        "%s: all its processes have ended" % job,
    ]
    assert child.wait(scaled(LIMIT_S)) == 143
    assert distrun.left() == []
    assert (distrun.home / "err").read_bytes().endswith(b"distrun: error: stopped by distrun kill\n")
    assert distrun.state()["message"] == "stopped by distrun kill"
    assert distrun.state()["state"] == "killed"
    assert b"is over already" in distrun.run("kill", distrun.job.name).stdout


def test_run_dir_keeps_the_jobs_folder_there(distrun: Distrun) -> None:
    result = distrun.launch("-n", "1", "-s", "0", "--run-dir", "runs", "bash", "-c", "touch $DISTRUN_RUN_DIR/mine")
    assert result.returncode == 0, result.stderr.decode()
    (folder,) = (distrun.work / "runs").iterdir()
    assert (folder / "mine").exists()
    assert (folder / "state.json").exists()
    assert folder.name in distrun.run("status").stdout.decode()


def test_a_job_store_that_cannot_be_written_is_said(distrun: Distrun) -> None:
    (distrun.home / "file").write_text("")
    result = distrun.launch("-n", "1", "-s", "0", "true", env={"XDG_STATE_HOME": str(distrun.home / "file")})
    assert result.returncode == 2
    assert b"cannot make the job's folder" in result.stderr
    assert b"XDG_STATE_HOME" in result.stderr
    result = distrun.launch("-n", "1", "-s", "0", "--run-dir", str(distrun.home / "file"), "true")
    assert result.returncode == 2
    assert b"set --run-dir to a place that can be written" in result.stderr
