"""A real agent over pipes, driven as a coordinator does, in the Linux way and in the portable way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import agentkit
import pytest
from agentkit import WAIT_S, AgentDriver, agent, poll, python, shell, task
from slowness import scaled

from distrun_runtime.agent import share, stopping
from distrun_runtime.contract import facts, process
from distrun_runtime.contract.plan import Limits
from distrun_runtime.contract.process import Identity

LINUX = sys.platform.startswith("linux")
WAYS = [
    pytest.param({}, id="linux", marks=pytest.mark.skipif(not LINUX, reason="needs Linux")),
    pytest.param({"DISTRUN_PORTABLE": "1"}, id="portable", marks=pytest.mark.portable),
]
both_ways = pytest.mark.parametrize("way", WAYS)
on_linux = pytest.mark.skipif(not LINUX, reason="needs /proc and a subreaper")

DEAF = (
    "import signal,time\n"
    "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
    "print('deaf', flush=True)\n"
    "time.sleep(600)\n"
)
DOUBLE_FORK = (
    "import os,time\n"
    "if os.fork() == 0:\n"
    " os.setsid()\n"
    " if os.fork() == 0:\n"
    "  print('apart', flush=True)\n"
    "  time.sleep(600)\n"
    " os._exit(0)\n"
    "os.wait()\n"
    "time.sleep(600)\n"
)
ORPHAN = (
    "import os,time\n"
    "if os.fork() == 0:\n"
    " os.setsid()\n"
    " if os.fork() == 0:\n"
    "  os.setsid()\n"
    "  print('orphan', flush=True)\n"
    "  time.sleep(606)\n"
    " os._exit(0)\n"
    "os.wait()\n"
)
DEAF_CHILD = 'trap "" TERM; sleep 600 & echo ready; sleep 600; sleep 600'
STUBBORN = (
    python(DEAF, "worker-0"),
    shell("setsid sleep 601 & echo ready; wait", "worker-1"),
    python(DOUBLE_FORK, "worker-2"),
    shell("nohup sleep 603 2>&1 & echo ready; wait", "worker-3"),
    shell("echo ready; kill -STOP $$; sleep 604", "worker-4"),
    shell(DEAF_CHILD, "worker-5"),
    python(ORPHAN, "worker-6"),
)
"""Ignores SIGTERM; in a new session; forked twice; under nohup; stopped; with deaf children; parent already gone."""

SHORT = Limits(grace_s=0.5)


def run(driver: AgentDriver, name: str = "worker-0") -> None:
    """Begin, start one task and wait for its first words."""
    driver.begin()
    driver.spawn(name)
    driver.hear_until(lambda: driver.text(name), "the task's first words")


def nothing_left(driver: AgentDriver, limit_s: float = agentkit.WAIT_S) -> None:
    poll(lambda: not driver.leftovers(), "all of the job's processes ended: %s" % driver.leftovers(), limit_s)


# How tasks end


@both_ways
def test_exit_code_of_a_task_or_the_signal_that_ends_it_arrives(way: Mapping[str, str]) -> None:
    ends: list[tuple[str, int | None, str | None]] = [("exit %d" % code, code, None) for code in (0, 1, 7, 255)]
    ends += [("kill -%s $$" % name, None, name) for name in ("KILL", "SEGV", "TERM")]
    tasks = [shell(text, "worker-%d" % rank) for rank, (text, _, _) in enumerate(ends)]
    with agent(*tasks, env=way) as driver:
        driver.begin()
        for one, (text, code, name) in zip(tasks, ends, strict=True):
            driver.spawn(one.name)
            exited = driver.exited(one.name)
            assert (exited["code"], exited["signal"], exited["stopped"]) == (code, name, False), text
        assert driver.finish() == 0


def test_task_that_cannot_start_says_why() -> None:
    wrong = (
        (["no-such-program-here"], 127, "command not found: no-such-program-here (in no folder of the"),
        (["/no/such/program"], 127, "command not found: /no/such/program"),
        (["AWS_SECRET_ACCESS_KEY=hunter2"], 127, "command not found: AWS_SECRET_ACCESS_KEY=... (in no folder"),
        (["/etc/passwd"], 126, "is not executable"),
        (["/etc"], 126, "is a folder"),
    )
    tasks = [task(argv, "worker-%d" % rank) for rank, (argv, _, _) in enumerate(wrong)]
    with agent(*tasks) as driver:
        driver.begin()
        for one, (_, code, reason) in zip(tasks, wrong, strict=True):
            frame = driver.spawn(one.name)
            assert frame.type == "exited"
            assert (frame.header["code"], frame.header["stopped"]) == (code, False)
            assert reason in str(frame.header["reason"])
        assert driver.finish() == 0


@pytest.mark.parametrize(("is_file", "reason"), [(False, "does not exist"), (True, "is not a folder")])
def test_task_whose_folder_went_away_after_the_start_says_so(tmp_path: Path, is_file: bool, reason: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    with agent(task(["true"], cwd=str(folder))) as driver:
        driver.begin()
        folder.rmdir()
        if is_file:
            folder.write_text("")
        frame = driver.spawn()
        assert (frame.type, frame.header["code"]) == ("exited", 126)
        assert frame.header["reason"] == "the working folder %s %s on this host" % (folder, reason)


def test_script_with_a_missing_interpreter_or_none_is_not_executable(tmp_path: os.PathLike[str]) -> None:
    for text, words in (("#!/no/such/interpreter\n", "interpreter"), ("\x00\x01\x02", "neither a program")):
        script = os.path.join(tmp_path, "script")
        with open(script, "w") as file:
            file.write(text)
        os.chmod(script, 0o755)
        with agent(task([script])) as driver:
            driver.begin()
            header = driver.spawn().header
            assert header["code"] == 126
            assert words in str(header["reason"])


def test_program_is_found_in_the_tasks_own_path(tmp_path: os.PathLike[str]) -> None:
    program = os.path.join(tmp_path, "only-here")
    with open(program, "w") as file:
        file.write("#!/bin/sh\necho found\n")
    os.chmod(program, 0o755)
    with agent(task(["only-here"])) as driver:
        driver.begin()
        driver.spawn(PATH="%s:/usr/bin:/bin" % tmp_path)
        assert driver.exited()["code"] == 0
        assert driver.text() == b"found\n"


# What tasks are given


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8"])
def test_bytes_are_exact_whatever_the_locale(locale: str) -> None:
    word = os.fsdecode(b"\xff\xc3\xa9 \xe9")
    with agent(task(["printf", "%s", word]), env={"LC_ALL": locale, "PYTHONUTF8": "0"}) as driver:
        driver.begin()
        driver.spawn()
        driver.exited()
        assert driver.text() == os.fsencode(word)


def test_environment_is_the_agents_without_stale_names_and_with_what_was_sent() -> None:
    outer = {"RANK": "9", "SLURM_JOB_ID": "4", "SLURMX": "stays", "KEPT": "yes", "DISTRUN_JOB_ID": "outer"}
    one = task(["env", "-0"], secret_env=("API_TOKEN",))
    with agent(one, env=outer, unset=["RANK", "SLURM_*", "DISTRUN_JOB_ID"]) as driver:
        driver.begin(secret_env={"API_TOKEN": "s3cret", "NOT_OURS": "x"})
        driver.spawn(RANK="0", DISTRUN_HOST="forged")
        driver.exited()
        env = dict(entry.split(b"=", 1) for entry in driver.text().split(b"\0") if entry)
        assert env[b"KEPT"] == b"yes"
        assert env[b"RANK"] == b"0"
        assert env[b"SLURMX"] == b"stays"
        assert b"SLURM_JOB_ID" not in env
        assert env[b"API_TOKEN"] == b"s3cret"
        assert b"NOT_OURS" not in env
        assert env[b"DISTRUN_JOB_ID"] == driver.job.encode()
        assert env[b"DISTRUN_HOST"] == agentkit.HOST.encode()
        assert (env[b"DISTRUN_ROLE"], env[b"DISTRUN_RANK"]) == (b"worker", b"0")


def test_token_reaches_tasks_in_a_private_file_and_nowhere_else() -> None:
    script = 'cat "$DISTRUN_TOKEN_FILE"; stat -c %a "$DISTRUN_TOKEN_FILE" "$(dirname "$DISTRUN_TOKEN_FILE")"; env'
    with agent(shell(script)) as driver:
        driver.begin(token="feedface")
        folder = share.folders_of(driver.job)[0]
        driver.spawn()
        driver.exited()
        lines = driver.text().split(b"\n")
        assert lines[0].startswith(b"feedface")
        assert driver.text().count(b"feedface") == 1
        assert b"700" in lines
        driver.finish()
        assert not os.path.exists(folder)
        assert not os.path.exists(os.path.dirname(folder))


def test_tasks_get_default_signals_no_input_and_no_stray_descriptors() -> None:
    code = (
        "import os,signal\n"
        "print(sorted(s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN))\n"
        "print(os.read(0, 10), sorted(int(n) for n in os.listdir('/proc/self/fd')), os.environ['DISTRUN_PUBLISH_FD'])\n"
        "print(os.getpid() == os.getsid(0) == os.getpgid(0))\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    with agent(python(code)) as driver:
        driver.begin()
        driver.spawn()
        assert driver.exited()["code"] == 0, driver.text(stream="err")
        ignored, descriptors, leads, mask = driver.text().decode().splitlines()
        assert ignored == "['SIGPIPE', 'SIGXFSZ']"  # Python's own doing, in the task
        number = int(descriptors.split()[-1])
        assert descriptors in ("b'' [0, 1, 2, %d, %d] %d" % (*sorted((number, each)), number) for each in (3, 4))
        assert leads == "True"
        assert mask == "set()"


# Output


@both_ways
def test_output_of_both_streams_arrives_whole(way: Mapping[str, str]) -> None:
    code = "import os\nfor i in range(300): os.write(1, b'%07d' % i * 1000); os.write(2, b'e' * 999)"
    with agent(python(code), env=way) as driver:
        driver.begin()
        driver.spawn()
        exited = driver.exited()
        assert driver.text() == b"".join(b"%07d" % i * 1000 for i in range(300))
        assert driver.text(stream="err") == b"e" * 999 * 300
        assert (exited["out"], exited["err"]) == (2_100_000, 299_700)


def test_end_hands_over_all_output_even_without_acknowledgements() -> None:
    with agent(python("import os; os.write(1, b'x' * 5_000_000)")) as driver:
        driver.acks = False
        driver.begin()
        driver.spawn()
        driver.wait("exited")
        assert driver.finish() == 0
        assert len(driver.text()) == 5_000_000


def test_output_of_an_escaped_child_still_arrives_after_the_task_ended() -> None:
    with agent(shell("(sleep 0.3; echo late) & echo early")) as driver:
        driver.begin()
        driver.spawn()
        assert driver.exited()["code"] == 0
        driver.hear_until(lambda: driver.text() == b"early\nlate\n", "the child's words")


@on_linux
def test_full_disk_makes_one_warning_and_loses_nothing() -> None:
    code = "import os\nfor i in range(60): os.write(1, b'%05d' % i * 20000)"
    with agent(python(code)) as driver:
        driver.acks = False
        driver.begin()
        # A folder without spool is a disk that takes nothing, for root as well.
        os.rmdir(os.path.join(share.folders_of(driver.job)[0], "spool"))
        driver.spawn()
        warning = driver.wait("warning").header
        assert "disk" in str(warning["text"])
        driver.hear_until(lambda: len(driver.text()) >= 1024 * 1024, "the window's worth of output")
        driver.acks = True
        driver.say("ack", task="worker-0", stream="out", offset=len(driver.text()))
        assert driver.exited()["code"] == 0
        assert driver.text() == b"".join(b"%05d" % i * 20000 for i in range(60))
        assert not any(frame.type == "warning" for frame in driver.frames)


# Facts


def test_what_a_task_publishes_is_stamped_and_says_whether_we_had_signalled_it() -> None:
    code = (
        "import os,signal,time\nfd=int(os.environ['DISTRUN_PUBLISH_FD'])\n"
        'signal.signal(signal.SIGTERM, lambda *_: os.write(fd, b\'{"failed": "late"}\\n\') and os._exit(1))\n'
        'os.write(fd, b\'{"failed": "mine"}\\n\')\ntime.sleep(60)'
    )
    with agent(python(code)) as driver:
        driver.begin()
        before = time.time()
        driver.spawn()
        first = driver.wait("published").header
        assert (first["values"], first["stopped"]) == ({"failed": "mine"}, False)
        assert before <= float(str(first["time"])) <= time.time()
        driver.say("stop", tasks=["worker-0"], steps=[["TERM", 10.0], ["KILL", 0]])
        second = driver.wait("published").header
        assert (second["values"], second["stopped"]) == ({"failed": "late"}, True)
        driver.exited()


def test_what_a_task_publishes_is_passed_on_and_nonsense_is_warned_of() -> None:
    code = (
        "import os,json\nfd=int(os.environ['DISTRUN_PUBLISH_FD'])\n"
        "os.write(fd, json.dumps({'address':'10.0.0.1','port':4711}).encode()+b'\\nrubbish\\n')\n"
        'os.write(fd, b\'{"no": "newline"}\')'
    )
    with agent(python(code)) as driver:
        driver.begin()
        driver.spawn()
        first = driver.wait("published").header
        assert first["values"] == {"address": "10.0.0.1", "port": "4711"}
        assert "rubbish" in str(driver.wait("warning").header["text"])
        assert driver.wait("published").header["values"] == {"no": "newline"}
        driver.exited()


@on_linux
def test_a_task_that_is_stopped_is_told_of_with_what_lets_it_go_on() -> None:
    with agent(shell("echo ready; kill -STOP $$; exit 5"), limits=SHORT) as driver:
        pid = driver.begin() and driver.spawn().header["pid"]
        text = str(driver.wait("warning").header["text"])
        assert text == f"worker-0 is stopped, as by SIGSTOP; to let it go on, there: kill -CONT {pid}"
        os.kill(pid, signal.SIGCONT)
        assert driver.wait("exited").header["code"] == 5


def test_held_ports_are_given_to_nobody_but_who_names_them() -> None:
    with agent(ports=["master", "jax"]) as driver:
        ready = driver.begin().header
        held = ready["ports"]
        assert set(held) == {"master", "jax"}
        assert len(set(held.values())) == 2
        for port in held.values():
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as server:  # create_server sets SO_REUSEADDR
                with socket.create_connection(("127.0.0.1", port)) as client:
                    assert client.getpeername()[1] == port
                server.close()
        driver.finish()
        with socket.socket() as plain:
            plain.bind(("127.0.0.1", held["master"]))


def test_hello_introduces_agent_and_guard() -> None:
    driver = AgentDriver(shell("true"))
    try:
        hello = driver.hello()
        assert driver.banner.startswith(b"DISTRUN/3 ")
        assert hello["seq"] == 1
        for name in ("agent", "guard"):
            who = hello[name]
            assert process.is_alive(Identity(who["pid"], who["start"]))
        assert hello["guard"]["pid"] == driver.child.pid  # type: ignore[index]
        assert hello["host"] == socket.gethostname()
        driver.say("ping", n=5)
        assert driver.wait("pong").header["n"] == 5
        assert driver.finish() == 0
    finally:
        driver.child.kill()
        driver.child.wait()
        for pipe in (driver.child.stdin, driver.child.stdout):
            pipe.close()


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"version": 99}, "speaks version 99"),
        ({"host": "elsewhere"}, "no host 'elsewhere'"),
        ({"plan": {"version": 7}}, "plan version 7"),
    ],
)
def test_begin_that_does_not_fit_is_refused_with_the_reason(members: Mapping[str, object], reason: str) -> None:
    with agent(shell("true")) as driver:
        answer = driver.begin(**members)
        assert answer.type == "refused"
        assert reason in str(answer.header["reason"])
        driver.wait("bye")
        assert driver.child.wait(scaled(agentkit.WAIT_S)) == 6


def test_unknown_and_malformed_frames_are_warned_of_and_do_no_harm() -> None:
    with agent(shell("echo fine")) as driver:
        driver.say("dance")
        assert "dance" in str(driver.wait("warning").header["text"])
        driver.begin()
        for broken in ({"type": "spawn"}, {"type": "stop", "tasks": ["worker-0"], "steps": []}, {"type": "ack"}):
            driver.say(str(broken.pop("type")), **broken)
            assert "malformed" in str(driver.wait("warning").header["text"])
        driver.spawn("worker-0")
        assert driver.exited()["code"] == 0


# The end of everything


def close_input(driver: AgentDriver) -> None:
    driver.close_input()


def lease_ends(driver: AgentDriver) -> None:
    """Say nothing any more."""


def stop(driver: AgentDriver) -> None:
    driver.stop(*(one.name for one in STUBBORN), steps=[("TERM", 0.5), ("KILL", 0)])


def end(driver: AgentDriver) -> None:
    driver.say("end")


def terminate_guard(driver: AgentDriver) -> None:
    os.kill(driver.child.pid, signal.SIGTERM)


def kill_agent(driver: AgentDriver) -> None:
    os.kill(driver.agent_pid(), signal.SIGKILL)


def freeze_agent(driver: AgentDriver) -> None:
    os.kill(driver.agent_pid(), signal.SIGSTOP)


def kill_guard(driver: AgentDriver) -> None:
    os.kill(driver.child.pid, signal.SIGKILL)


ENDS = [close_input, lease_ends, stop, end, terminate_guard, kill_agent, freeze_agent, kill_guard]


@both_ways
@pytest.mark.parametrize("finish", ENDS, ids=lambda finish: finish.__name__)
def test_nothing_of_the_job_is_left(way: Mapping[str, str], finish: Callable[[AgentDriver], None]) -> None:
    """Row of the issue: tasks that ignore SIGTERM, setsid, double-fork or nohup, whatever ends the job."""
    limits = Limits(grace_s=0.5, lease_s=6.0) if finish in (lease_ends, freeze_agent) else SHORT
    with agent(*STUBBORN, env=way, limits=limits) as driver:
        driver.begin()
        for one in STUBBORN:
            driver.spawn(one.name)
            driver.hear_until(lambda name=one.name: driver.text(name), "%s's first words" % one.name)  # type: ignore[misc]
        assert len(driver.leftovers()) >= len(STUBBORN)
        finish(driver)
        nothing_left(driver)


@on_linux
@pytest.mark.parametrize("finish", [kill_agent, kill_guard, close_input], ids=lambda finish: finish.__name__)
def test_private_folder_goes_with_the_job(finish: Callable[[AgentDriver], None]) -> None:
    with agent(shell("echo ready; sleep 600"), limits=SHORT) as driver:
        run(driver)
        assert share.folders_of(driver.job)
        finish(driver)
        poll(lambda: not share.folders_of(driver.job), "the private folder is removed")


@on_linux
def test_guard_ends_what_carries_the_jobs_marks_and_was_started_by_another_process() -> None:
    with agent(shell("true"), limits=SHORT) as driver:
        driver.begin()
        driver.spawn()
        assert driver.exited()["code"] == 0
        marks = process.marks(driver.job, driver.plan.nonce, agentkit.HOST, agentkit.HOST)
        with subprocess.Popen(["sleep", "600"], env={**os.environ, **marks}) as elsewhere:  # as `at` would do it
            try:
                assert driver.finish() == 0
                assert elsewhere.wait(scaled(WAIT_S)) == -signal.SIGTERM
            finally:
                elsewhere.kill()
        assert not share.folders_of(driver.job)


@on_linux
@pytest.mark.slow
def test_agent_and_guard_that_were_stopped_for_longer_than_the_lease_go_on() -> None:
    with agent(shell("echo ready; sleep 600"), limits=Limits(grace_s=0.5, lease_s=3.0)) as driver:
        run(driver)
        pids = [driver.agent_pid(), driver.child.pid]
        for pid in reversed(pids):  # the guard first, as it watches the agent
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5.0)  # the machine sleeps
        driver.say("ping", n=1)  # a coordinator that slept as well
        os.kill(driver.child.pid, signal.SIGCONT)
        time.sleep(0.2)
        os.kill(pids[0], signal.SIGCONT)
        driver.wait("pong", n=1)
        assert process.is_alive(driver.guard)
        assert driver.finish() == 0


@both_ways
def test_deaf_task_is_asked_first_and_killed_after_the_grace_time(way: Mapping[str, str]) -> None:
    with agent(python(DEAF), env=way) as driver:
        run(driver)
        began = time.monotonic()
        driver.stop("worker-0", steps=[("TERM", 0.7), ("KILL", 0)])
        exited = driver.exited()
        assert (exited["signal"], exited["stopped"]) == ("KILL", True)
        assert time.monotonic() - began >= 0.7
        assert driver.wait("cleared").header["left"] == []


def test_task_that_ended_before_we_spoke_was_not_stopped_by_us() -> None:
    with agent(shell("read x < /dev/zero; exit 4", cwd="/"), shell("echo ready; sleep 600", "worker-1")) as driver:
        run(driver, "worker-1")
        started = driver.spawn("worker-0").header
        who = Identity(int(started["pid"]), str(started["start"]))
        os.kill(who.pid, signal.SIGKILL)  # as a crash would
        poll(lambda: not process.is_alive(who), "worker-0 is dead")
        driver.stop("worker-0", "worker-1")
        assert driver.exited("worker-0")["stopped"] is False
        assert driver.exited("worker-1")["stopped"] is True


def test_signal_reaches_the_first_process_of_the_named_tasks_only_and_their_end_is_their_own() -> None:
    trap = "trap 'echo got; exit 5' USR1; sleep 600 & echo $!; while :; do sleep 0.05; done"
    with agent(shell(trap), shell(trap, "worker-1")) as driver:
        run(driver)
        driver.spawn("worker-1")
        driver.hear_until(lambda: driver.text("worker-1"), "its first words")
        other = int(driver.text("worker-1"))
        driver.say("signal", tasks=["worker-1"], signal="USR1")
        exited = driver.exited("worker-1")
        assert (exited["code"], exited["stopped"]) == (5, False)
        assert process.is_alive(process.identity(other))
        assert b"got" not in driver.text("worker-0")
        driver.finish()


@pytest.mark.parametrize("forwarded", [(), ("USR1",)])
def test_signals_for_tasks_end_neither_guard_nor_agent_which_give_workers_those_that_are_wanted(
    forwarded: tuple[str, ...],
) -> None:
    trap = "trap 'echo USR1' USR1; trap 'echo USR2' USR2; echo ready; while :; do sleep 0.05; done"
    with agent(shell(trap), shell(trap, "server-0"), forward_signals=forwarded) as driver:
        run(driver)
        driver.spawn("server-0")
        driver.hear_until(lambda: driver.text("server-0"), "its first words")
        for who, expected in ((driver.child.pid, b"USR1\n"), (driver.agent_pid(), b"USR1\nUSR1\n")):
            for number in (signal.SIGUSR2, signal.SIGUSR1):
                os.kill(who, number)
            words = b"ready\n" + (expected if forwarded else b"")
            driver.hear_until(lambda words=words: driver.text() == words, "the worker has got what is wanted")
        driver.say("ping", n=1)
        driver.wait("pong")
        assert driver.text() == words
        assert driver.text("server-0") == b"ready\n"
        driver.finish()


def test_a_signal_that_comes_here_and_from_the_coordinator_is_given_once_and_told() -> None:
    trap = "trap 'echo USR1' USR1; echo ready; while :; do sleep 0.05; done"
    with agent(shell(trap), shell(trap, "worker-1"), forward_signals=("USR1",)) as driver:
        run(driver, "worker-1")
        driver.spawn()
        driver.hear_until(driver.text, "the other task's first words")
        for words in (b"ready\nUSR1\n", b"ready\nUSR1\nUSR1\n"):  # two warnings are two
            os.kill(driver.agent_pid(), signal.SIGUSR1)
            assert driver.wait("signalled").header["signal"] == "USR1"
            driver.say("signal", tasks=["worker-0", "worker-1"], signal="USR1")
            driver.say("ping", n=1)
            driver.wait("pong")
            for name in ("worker-0", "worker-1"):
                driver.hear_until(lambda name=name, words=words: driver.text(name) == words, "it got it once")
        driver.finish()


def test_stopping_one_task_leaves_the_others_and_their_helpers_alone() -> None:
    helper = "setsid sleep 600 & echo ready; wait"
    with agent(shell(helper), shell(helper, "worker-1")) as driver:
        run(driver)
        driver.spawn("worker-1")
        driver.hear_until(lambda: driver.text("worker-1"), "ready")
        driver.stop("worker-0", steps=[("TERM", 1.0), ("KILL", 0)])
        driver.exited("worker-0")
        poll(lambda: len(driver.leftovers()) == 2, "worker-0's helper ended, worker-1 and its helper live")
        assert not any(frame.type in ("cleared", "exited") for frame in driver.frames)
        driver.finish()


def pids(leftovers: list[str]) -> list[str]:
    """Return the pids of `PID COMMAND` lines: a command line changes when the process execs."""
    return [line.split()[0] for line in leftovers]


@both_ways
def test_two_jobs_at_once_do_not_touch_each_other(way: Mapping[str, str]) -> None:
    script = shell("setsid sleep 600 & echo ready; wait")
    with agent(script, env=way, limits=SHORT) as one, agent(script, env=way, limits=SHORT) as other:
        run(one)
        run(other)
        before = pids(other.leftovers())
        kill_agent(one)
        nothing_left(one)
        assert pids(other.leftovers()) == before
        assert len(before) == 2
        other.say("ping", n=1)
        other.wait("pong")


def test_pings_renew_the_lease() -> None:
    with agent(shell("echo ready; sleep 600"), limits=Limits(grace_s=0.5, lease_s=4.0)) as driver:
        run(driver)
        deadline = time.monotonic() + 6.0
        n = 0
        while time.monotonic() < deadline:
            n += 1
            driver.say("ping", n=n)
            driver.wait("pong", n=n)
            time.sleep(0.1)
        assert driver.leftovers()


def test_agent_is_deaf_to_the_terminals_signals() -> None:
    with agent(shell("echo ready; sleep 600")) as driver:
        run(driver)
        for pid in (driver.child.pid, driver.agent_pid()):
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP):
                os.kill(pid, number)
        assert os.getsid(driver.child.pid) == driver.child.pid != os.getsid(0)
        driver.say("ping", n=1)
        driver.wait("pong")
        assert driver.leftovers()


def test_agent_whose_pipes_are_closed_before_it_says_hello_ends() -> None:
    argv = [sys.executable, "-m", "distrun_runtime.agent"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for pipe in (child.stdin, child.stdout):
            pipe.close()
        assert child.wait(scaled(WAIT_S)) == facts.EXIT_TERMINATED
    finally:
        child.terminate()  # the guard passes it on to the agent
        child.wait(scaled(WAIT_S))


def test_garbage_on_the_channel_ends_the_job_instead_of_hanging() -> None:
    with agent(shell("echo ready; sleep 600"), limits=SHORT) as driver:
        run(driver)
        driver.child.stdin.write(b"\xff" * 64)
        assert "cannot be read on" in str(driver.wait("warning").header["text"])
        driver.exited()
        nothing_left(driver)


# What is done when guard and agent are both gone


@both_ways
def test_sweep_ends_what_a_dead_agent_and_guard_left(way: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with agent(shell("setsid sleep 600 & echo ready; wait"), env=way, limits=SHORT) as driver:
        run(driver)
        agent_pid = driver.agent_pid()
        # Frozen first, so that neither can still do the other's work.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(driver.child.pid, number)
            os.kill(agent_pid, number)
        driver.child.wait(scaled(agentkit.WAIT_S))
        assert driver.leftovers()
        with monkeypatch.context() as patch:
            for name, value in way.items():
                patch.setenv(name, value)
            report = stopping.sweep(driver.job, 0.5)
            assert report.left == []
            assert len(report.ended) >= 2
            assert share.folders_of(driver.job) == []
            assert stopping.sweep(driver.job, 0.5).ended == []
        assert driver.leftovers() == []


def test_sweep_asks_a_living_agent_to_end_its_job() -> None:
    with agent(shell("trap 'echo gently; exit 0' TERM; echo ready; while :; do sleep 0.05; done")) as driver:
        run(driver)
        report = stopping.sweep(driver.job, 30.0)
        assert report.left == []
        assert b"gently" in driver.text() or driver.exited()
        assert driver.child.wait(scaled(agentkit.WAIT_S)) == 143
