"""A real agent whose connection is cut, or slow: nothing is lost, nothing is done twice, and nobody else gets in."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkit import WAIT_S, AgentDriver, agent, poll, shell, task
from slowness import scaled

from distrun_runtime.contract import session
from distrun_runtime.contract.plan import HOLD, Limits, Runtime
from distrun_runtime.coordinator import messages

KEY = "00ff" * 16
LINES = "for i in $(seq 2000); do echo line $i; done; sleep 600"
EXPECTED = b"".join(b"line %d\n" % (i + 1) for i in range(2000))


@contextlib.contextmanager
def holding(script: str, **limits: float) -> Iterator[tuple[AgentDriver, Path]]:
    """An agent that holds its one task without a connection, and where it waits for another one."""
    members = {"on_eof": HOLD, "forward_signals": ("USR1",)}
    with agent(shell(script), limits=Limits(grace_s=1.0, **limits), **members) as driver:
        assert driver.begin(resume_key=KEY).type == "ready"
        yield driver, Path(str(driver.wait("holding").header["path"]))


def connected(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(scaled(WAIT_S))
    sock.connect(str(path))
    return sock


def proves(sock: socket.socket, key: str) -> bool:
    """Prove that we know `key`; return whether the agent believes it, and proves that it knows it.

    Nothing that comes after it is read.
    """
    line = b""
    while not line.endswith(b"\n"):
        line += sock.recv(1)
    nonce = line.split()[1].decode()
    proof = session.proof(key, session.COORDINATOR, nonce, "11")
    sock.sendall(session.encode({"type": "prove", "nonce": "11", "proof": proof}))
    answer: list[session.Frame] = []
    decoder = session.Decoder()
    while not answer:
        data = sock.recv(1)
        if not data:
            return False
        answer = decoder.feed(data)
    return session.is_proof(answer[0].header["proof"], key, session.AGENT, nonce, "11")


def test_a_session_goes_on_over_the_socket_of_the_job(tmp_path: Path) -> None:
    go = tmp_path / "go"
    with holding(f"{LINES[: -len('; sleep 600')]}; until [ -e '{go}' ]; do sleep 0.05; done; echo end") as (
        driver,
        path,
    ):
        driver.acks = False  # so that some of the output is neither sent nor acknowledged
        driver.spawn()
        driver.cut()
        for _ in range(2):
            sock = connected(path)
            assert proves(sock, KEY)
            driver.resume(sock)
            driver.acks = True
            driver.say("ping", n=1)
            driver.wait("pong", n=1)
        go.touch()
        assert driver.exited()["code"] == 0
        assert driver.text() == EXPECTED + b"end\n"
        driver.say("ack", task="worker-0", stream="out", offset=len(driver.text()))
        assert driver.finish() == 0
        assert not path.exists()


def test_the_socket_is_for_its_user_only(tmp_path: Path) -> None:
    with holding("sleep 600") as (driver, path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert path.name == "agent.s"
        driver.finish()


def test_who_does_not_know_the_key_is_turned_away_and_disturbs_nothing() -> None:
    with holding("sleep 600") as (driver, path):
        driver.spawn()
        with connected(path) as sock:
            assert not proves(sock, "another key")
            assert sock.recv(1) == b""
        with connected(path) as sock:
            sock.sendall(b"\xff" * 100)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(100):
                    pass
        idle = []
        for _ in range(12):
            idle.append(connected(path))
            assert idle[-1].recv(1) == b"D", "the latest is let in"
        driver.say("ping", n=7)
        assert driver.wait("pong").header["n"] == 7
        for sock in idle:
            sock.close()
        assert driver.finish() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_is_turned_away_even_with_the_key() -> None:
    with holding("sleep 600") as (driver, path):
        path.parent.chmod(0o777)  # what keeps others out as a rule; the folders above are those of other jobs, too
        path.chmod(0o666)
        pid = os.fork()
        if not pid:
            os.chdir(path.parent)
            os.setuid(65534)
            try:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(path.name)
                    os._exit(1 if sock.recv(1) else 0)
            except ConnectionResetError:
                os._exit(0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        driver.finish()


def test_an_agent_that_nobody_comes_back_to_ends_its_tasks_with_its_lease() -> None:
    with holding("echo up; sleep 600", lease_s=2.0) as (driver, path):
        driver.spawn()
        driver.cut()
        poll(lambda: not driver.leftovers(), "the lease has ended")
        assert driver.child.wait(scaled(WAIT_S)) == 143
        assert not path.parent.exists()


def test_a_warning_reaches_the_tasks_of_an_agent_that_holds_and_later_the_coordinator(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with holding(f"trap 'touch {shlex.quote(str(saved))}' USR1; echo up; while :; do sleep 0.05; done") as (
        driver,
        path,
    ):
        driver.spawn()
        driver.hear_until(driver.text, "the task is up")
        driver.cut()
        os.kill(driver.agent_pid(), signal.SIGUSR1)
        poll(saved.exists, "the task is warned")
        sock = connected(path)
        assert proves(sock, KEY)
        driver.resume(sock)
        assert driver.wait("signalled").header["signal"] == "USR1"
        assert driver.finish() == 0


def test_leave_ends_the_tasks_of_an_agent_that_holds() -> None:
    with holding("sleep 600") as (driver, _):
        driver.spawn()
        driver.say("leave")
        assert driver.exited()["signal"] == "TERM"
        driver.wait("bye")
        driver.cut()
        assert driver.child.wait(scaled(WAIT_S)) == 143


def test_a_bye_that_a_cut_swallowed_is_said_again() -> None:
    with holding("sleep 600") as (driver, path):
        driver.say("end")
        driver.cut()  # before anything was heard
        sock = connected(path)
        assert proves(sock, KEY)
        driver.resume(sock)
        driver.wait("bye")
        assert driver.child.wait(scaled(WAIT_S)) == 0


def test_a_spawn_that_comes_again_starts_nothing_and_is_answered_as_the_first() -> None:
    with agent(shell("echo once; exit 3"), task(["/no/such/program"], "worker-1")) as driver:
        driver.begin()
        first = driver.spawn().header
        assert first["attempt"] == 0
        ended = driver.exited()
        for name in ("started", "exited"):
            driver.say("spawn", task="worker-0", attempt=0, env={})
            again = driver.wait(name, task="worker-0").header
            for member in ("pid", "start", "time", "code", "out"):
                assert again.get(member) == (first if name == "started" else ended).get(member)
        refused = driver.spawn("worker-1").header
        again = driver.spawn("worker-1").header
        assert (refused["code"], refused["reason"]) == (again["code"], again["reason"])
        assert driver.text() == b"once\n"
        driver.say("spawn", task="worker-0", attempt=1, env={})
        assert "as another attempt" in str(driver.wait("warning").header["text"])
        driver.finish()


def test_a_begin_that_comes_again_is_answered_again_and_another_one_ignored() -> None:
    with agent(shell("true")) as driver:
        first = driver.begin().header
        again = driver.begin().header
        assert {**first, "seq": 0} == {**again, "seq": 0}
        driver.plan = driver.plan._replace(name="another")
        driver.say("begin", version=session.VERSION, plan={}, token="", secret_env={}, host="here")
        assert "second `begin`" in str(driver.wait("warning").header["text"])
        driver.finish()


def test_a_begin_whose_interval_is_no_number_is_refused() -> None:
    with agent(shell("true")) as driver:
        driver.say_begin(sample_s="often")
        assert "'often'" in str(driver.wait("refused").header["reason"])


def test_pongs_come_while_an_agent_receives_80_mib() -> None:
    digest = "ab" * 32
    with agent(shell("true")) as driver:
        driver.plan = driver.plan._replace(runtime=Runtime(digest=digest))
        driver.say_begin()
        assert driver.wait("need").header["digest"] == digest
        pieces = (bytes(1024 * 1024) for _ in range(80))
        driver.send(messages.Large({"type": "runtime", "digest": digest}, pieces))
        answered = 0
        while True:
            with contextlib.suppress(BrokenPipeError):  # it has refused just now, and gone
                driver.say("ping", n=answered)
            frame = driver.wait("pong", "refused")
            if frame.type == "refused":
                break
            answered += 1
        assert answered > 20
        assert "digest" in str(frame.header["reason"])
