"""What an engine starts in place of an agent: small, quick to refuse, and at home in every Python from 3.8."""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from dialkit import JOB, PIN, SECRET, WAIT_S, Hall, hall, read
from pythons import TOO_OLD, VERSIONS, need

from distrun.backends import bootstrap
from distrun_runtime.contract import enrolment
from distrun_runtime.coordinator.listener import Admitted, Register, server_context

FULL = 0.97
"""Share of the limit at which something has to be left out of the program."""

PROGRAM = """\
s.sendall(json.dumps([dialed[0][0], dialed[1:], r.decode(), sorted(x for x in os.environ if "SECRET" in x)]).encode())
"""
"""In place of the agent: tell what the bootstrap leaves."""


def blob(program: str = PROGRAM) -> bytes:
    words = (binascii.b2a_base64(zlib.compress(each.encode()), newline=False) for each in (program, "{}"))
    return b" ".join(words) + b"\n"


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text(SECRET + "\n")
    return str(path)


@contextlib.contextmanager
def started(
    here: Hall | None,
    secret: str,
    *,
    python: str = sys.executable,
    place: str = "1",
    limit_s: float = 60,
    addresses: tuple[str, ...] = (),
    env: Mapping[str, str] = {},
    preexec_fn: Callable[[], None] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    at = addresses or ((f"127.0.0.1:{here.port}",) if here is not None else ())
    argv = bootstrap.Bootstrap(JOB, PIN, at, limit_s).command(python, place, secret)
    child = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
        preexec_fn=preexec_fn,  # noqa: PLW1509 - it only closes descriptors
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


def refused(child: subprocess.Popen[bytes]) -> str:
    """Wait for the end of a bootstrap that fails; return what it says."""
    out, err = child.communicate(timeout=WAIT_S)
    assert child.returncode == 6, err.decode()
    assert out == b""
    return err.decode()


@contextlib.contextmanager
def coordinator(*places: str) -> Iterator[Hall]:
    with hall(*places) as here:
        here.listener._program = blob
        yield here


def test_program_is_small_and_free_of_what_a_shell_touches() -> None:
    figure = f"the bootstrap has {len(bootstrap.PROGRAM):,} of {bootstrap.LIMIT:,} bytes"
    assert len(bootstrap.PROGRAM.encode()) <= FULL * bootstrap.LIMIT == FULL * 4096, figure
    assert len(bootstrap.source()) <= bootstrap.LIMIT
    assert not set(bootstrap.source()) & set("'\n\\!%")


def test_the_connection_gets_no_number_of_a_standard_stream_that_is_closed(secret: str) -> None:
    with hall() as here:
        here.listener._program = lambda: blob("s.sendall(bytes([s.fileno()]))")
        with started(here, secret, preexec_fn=lambda: os.closerange(0, 3)) as child:
            _, connected = here.agent()
            assert read(connected.socket, 1)[0] > 2
            assert child.wait(WAIT_S) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_dials_proves_itself_and_runs_what_it_gets(version: str, secret: str) -> None:
    python = need(version)
    with coordinator() as here, started(here, secret, python=python) as child:
        place, connected = here.agent()
        assert place == "1"
        out, err = child.communicate(timeout=WAIT_S)
        assert child.returncode == 0, err.decode()
        host, (addresses, pin, job, place, nonce, key), ahead, left = json.loads(
            read(connected.socket, connected.socket.pending() or 1) + everything(connected.socket)
        )
        assert (host, addresses, pin) == ("127.0.0.1", [f"127.0.0.1:{here.port}"], PIN)
        assert (job, place, ahead, left) == (JOB, "1", "", [])
        assert len(nonce) == 32
        assert len(key) == 64
        assert key != SECRET
        assert out == err == b""


def everything(connection: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(OSError):
        while more := connection.recv(65536):
            data += more
    return data


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_python_that_is_too_old_says_so(version: str, secret: str) -> None:
    with started(None, secret, python=need(version), addresses=("127.0.0.1:1",)) as child:
        assert f"is Python {version}" in refused(child)


def test_place_and_secret_may_be_variables_and_the_secret_goes_no_further() -> None:
    env = {"MY_SECRET": SECRET, "RANK_OF_ENGINE": "0"}
    with coordinator() as here, started(here, "env:MY_SECRET", place="env:RANK_OF_ENGINE", env=env):
        place, connected = here.agent()
        assert place == "0"
        assert json.loads(read(connected.socket, 1) + everything(connected.socket))[3] == []


def test_a_variable_that_is_not_set_is_named(secret: str) -> None:
    with started(None, secret, place="env:NO_SUCH_RANK", addresses=("127.0.0.1:1",)) as child:
        assert refused(child) == "distrun: the engine has not set NO_SUCH_RANK\n"


def test_a_secret_that_others_may_read_is_refused(secret: str) -> None:
    os.chmod(secret, 0o640)
    with started(None, secret, addresses=("127.0.0.1:1",)) as child:
        assert refused(child) == f"distrun: {secret} must be a file of your own with mode 0600\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_secret_of_somebody_else_is_refused(secret: str) -> None:
    os.chown(secret, 12345, 12345)
    with started(None, secret, addresses=("127.0.0.1:1",)) as child:
        assert "must be a file of your own" in refused(child)


def test_a_secret_behind_a_link_is_refused(secret: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(secret)
    with started(None, str(link), addresses=("127.0.0.1:1",)) as child:
        assert "the secret cannot be read" in refused(child)


def test_the_wrong_secret_is_refused_at_once(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("5f" * 32)
    with coordinator() as here, started(here, str(wrong)) as child:
        said = refused(child)
        assert said.startswith("distrun: the coordinator refuses place 1: the proof is wrong")
        assert here.agents.empty()


def test_a_place_that_the_job_does_not_have_is_named(secret: str) -> None:
    with coordinator() as here, started(here, secret, place="7") as child:
        assert refused(child) == f"distrun: the coordinator refuses place 7: job {JOB} has no place '7'\n"


def test_a_second_process_for_a_place_is_refused(secret: str) -> None:
    with coordinator() as here, started(here, secret):
        here.agent()
        with started(here, secret) as other:
            assert "has its agent already, at 127.0.0.1:" in refused(other)
        assert here.twice.get(timeout=WAIT_S).place == "1"


def test_a_man_in_the_middle_gets_nothing(secret: str) -> None:
    other = bootstrap.certificate(JOB)
    heard: list[bytes] = []

    def serve(listening: socket.socket) -> None:
        raw, _ = listening.accept()
        raw.settimeout(WAIT_S)
        with contextlib.suppress(OSError), server_context(other).wrap_socket(raw, server_side=True) as tls:
            tls.sendall(b'{"nonce":"%s","type":"enrol","version":1}\n' % (b"c" * 32))
            heard.append(tls.recv(4096))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        at = f"127.0.0.1:{listening.getsockname()[1]}"
        with started(None, secret, limit_s=0, addresses=(at,)) as child:
            said = refused(child)
        thread.join(WAIT_S)
    assert said == (
        f"distrun: place 1: no coordinator within 0 s; {at}: its certificate is not this job's; nothing was sent\n"
    )
    assert heard in ([], [b""])


def test_what_a_coordinator_sends_that_does_not_know_the_secret_is_not_run(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the right certificate, and lets everybody in."""
    anybody = Admitted("1", enrolment.welcome("0" * 64, "1d" * 32), wants_program=True)
    monkeypatch.setattr(Register, "decide", lambda self, line, nonce, address: anybody)
    with coordinator() as here, started(here, secret, limit_s=0) as child:
        assert "the other side does not know this job's secret" in refused(child)


def test_addresses_that_do_not_answer_are_passed_over(secret: str) -> None:
    with coordinator() as here, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        addresses = (f"127.0.0.1:{closed.getsockname()[1]}", "no.such.name.invalid:1", f"127.0.0.1:{here.port}")
        with started(here, secret, addresses=addresses):
            assert here.agent()[0] == "1"


def test_signals_for_tasks_do_not_end_it(secret: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, coordinator() as here:
        addresses = [f"127.0.0.1:{silent.getsockname()[1]}", f"127.0.0.1:{here.port}"]
        with started(here, secret, addresses=tuple(addresses)) as child:
            silent.settimeout(WAIT_S)
            connection, _ = silent.accept()
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                child.send_signal(number)
            connection.close()
            assert here.agent()[0] == "1"


def test_nothing_secret_is_on_the_command_line() -> None:
    argv = bootstrap.Bootstrap(JOB, PIN, ["h:1"], 120).command("python3", "env:RANK", "/srv/secret")
    assert argv[:3] == ("python3", "-I", "-c")
    assert argv[4:] == (PIN, JOB, "env:RANK", "/srv/secret", "120", "h:1")
