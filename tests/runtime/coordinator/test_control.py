"""The control socket: its folder, its clients, and what a slow one costs."""

from __future__ import annotations

import errno
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from distrun_cli import wait_until
from serviceclient import LIMIT_S, ServiceClient
from slowness import scaled

from distrun_runtime.contract import control as frames
from distrun_runtime.contract import private, session
from distrun_runtime.coordinator import clients, messages, service
from distrun_runtime.coordinator.service import ControlSocket, Service
from distrun_runtime.errors import ContractError

STATE = {"id": "calm-otter-7f3", "state": "running"}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[str]:
    """A folder for sockets with a short path: that of a socket is limited."""
    made = Path("/tmp") / ("distrun-test-%d" % os.getpid())
    made.mkdir(mode=0o700)
    yield str(made)
    for each in made.iterdir():
        each.unlink()
    made.rmdir()


OPEN: list[socket.socket] = []


@pytest.fixture(autouse=True)
def no_client_stays() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Client(ServiceClient):
    """One that has connected to the control socket."""

    def __init__(self, path: str, version: tuple[int, int] | None = (1, 0)) -> None:
        super().__init__(socket.socket(socket.AF_UNIX))
        OPEN.append(self.socket)
        self.socket.connect(path)
        if version is not None:
            self.hello = self.ask("hello", version=list(version))

    def subscribe(self, **wanted: Any) -> None:
        """Subscribe, and return when that is done."""
        self.send("subscribe", **wanted)
        self.ask("state")


class Numbers:
    """Output that never ends: the reader of a job that prints without a pause."""

    has_more = True
    is_over = False
    made: list[Numbers]

    def __init__(self, wanted: frames.Output) -> None:
        self.cursor = wanted.cursor or 0
        self.read_bytes = 0
        self.closed = False

    def read(self, limit: int) -> bytes:
        data = b"x" * limit
        chunk = frames.Chunk("worker-0", "d1", "out", self.cursor, limit, data, self.cursor + limit)
        self.cursor += limit
        self.read_bytes += limit
        return frames.encode(chunk)

    def close(self) -> None:
        self.closed = True


class Log:
    """Output of a job as a list that a test adds to."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def open(self, wanted: frames.Output) -> _LogReader:
        if wanted.tail is not None:
            return _LogReader(self, max(0, len(self.lines) - wanted.tail))
        return _LogReader(self, len(self.lines) if wanted.cursor is None else wanted.cursor)


class _LogReader:
    has_more = True
    is_over = False

    def __init__(self, log: Log, cursor: int) -> None:
        self._log = log
        self.cursor = cursor

    def read(self, limit: int) -> bytes:
        self.has_more = self.cursor < len(self._log.lines)
        if not self.has_more:
            return b""
        data = self._log.lines[self.cursor]
        self.cursor += 1
        return frames.encode(frames.Chunk("worker-0", "d1", "out", 0, len(data), data, self.cursor))

    def close(self) -> None:
        pass


class Job:
    """A service with a control socket, as the coordinator of a job has it."""

    def __init__(self, folder: str, launcher: socket.socket | None = None) -> None:
        self.log = Log()
        self.readers: list[Numbers] = []
        self.stops: list[str] = []
        self.handled: list[messages.Event] = []
        self.service = Service(launcher, "calm-otter-7f3", self.log.open, self.stops.append)
        self.service.state(STATE)
        self.service.start()
        self.listener = ControlSocket("calm-otter-7f3", folder)
        self.path = self.listener.path
        self.service.listen(self.listener)

    def prints(self, data: bytes) -> None:
        self.log.lines.append(data)
        self.service.output("worker-0", "d1", "out", data, 0)

    def opened(self) -> None:
        self.service.opened(self.handled.append)


@pytest.fixture
def job(folder: str) -> Iterator[Job]:
    made = Job(folder)
    yield made
    made.service.close()
    assert os.listdir(folder) == []


# ---------------------------------------------------------------------- the socket


def test_the_folder_of_the_sockets_is_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "sockets"
    listener = ControlSocket("j", str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(os.lstat(listener.path).st_mode) == 0o600
    listener.close()
    assert list(path.iterdir()) == []


def link(path: Path) -> None:
    path.parent.joinpath("other").mkdir(mode=0o700)
    path.symlink_to(path.parent / "other")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (link, "is not a folder"),
        (lambda path: path.write_text(""), "is not a folder"),
        (lambda path: path.mkdir(mode=0o755), "has mode 0755; fix: chmod 700"),
        pytest.param(
            lambda path: (path.mkdir(mode=0o700), os.chown(path, 4711, 4711)),
            "belongs to user 4711, expected 0",
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
        ),
    ],
    ids=["a link", "a file", "open to others", "another's"],
)
def test_a_folder_that_others_may_use_is_refused(make: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    make(tmp_path / "sockets")
    with pytest.raises(ContractError, match=message):
        ControlSocket("j", str(tmp_path / "sockets"))


def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    parent = tmp_path / "open"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(ContractError, match="is not safe: others could replace"):
        ControlSocket("j", str(parent / "sockets"))
    parent.chmod(0o1777)
    ControlSocket("j", str(parent / "sockets")).close()


def test_the_socket_of_a_dead_coordinator_is_replaced_and_those_of_others_are_removed(folder: str) -> None:
    for name in ("mine", "other"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(f"{folder}/{name}.s")
    Path(folder, "kept").touch()
    listener = ControlSocket("mine", folder)
    assert sorted(os.listdir(folder)) == ["kept", "mine.s"]
    assert private.is_live(listener.path)
    listener.close()


def test_the_socket_of_a_living_coordinator_is_never_replaced(folder: str) -> None:
    first, second = ControlSocket("same", folder), ControlSocket("same", folder)
    assert first.path != second.path
    assert private.is_live(first.path)
    second.close()
    assert private.is_live(first.path)
    first.close()


def test_a_socket_that_cannot_be_bound_is_closed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []

    def full(self: ControlSocket, job: str) -> str:
        opened.append(self.socket)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ControlSocket, "_bind", full)
    with pytest.raises(OSError, match="No space"):
        ControlSocket("j", folder)
    assert opened[0].fileno() == -1


def test_a_closed_socket_leaves_alone_what_has_its_name_by_now(folder: str) -> None:
    listener = ControlSocket("j", folder)
    os.unlink(listener.path)
    Path(listener.path).touch()
    listener.close()
    assert os.listdir(folder) == ["j.s"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_that_another_user_made_first_keeps_nobody_from_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as shared:  # its path is short
        taken = Path(shared, "distrun-0")
        taken.mkdir(mode=0o700)
        os.chown(taken, 4711, 4711)
        monkeypatch.setattr(private, "lasting_root", lambda: str(taken))
        first, second = ControlSocket("j"), ControlSocket("k")
        folder = os.path.dirname(first.path)
        assert folder == os.path.dirname(second.path)
        assert folder.startswith(f"{taken}-")
        first.socket.close()
        private.remove_dead(first.path)
        private.remove_dead(second.path)
        assert os.listdir(folder) == ["k.s"]
        second.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused(job: Job, folder: str) -> None:
    """Even if the folder's mode were changed: the kernel says who connects."""
    os.chmod(folder, 0o777)
    os.chmod(job.path, 0o777)
    code = (
        "import os, socket, sys; os.setgid(65534); os.setuid(65534); s = socket.socket(socket.AF_UNIX)\n"
        f"s.connect({job.path!r}); sys.stdout.write(repr(s.recv(10)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    os.chmod(folder, 0o700)
    assert done.stdout == "b''", done.stderr
    assert Client(job.path).hello.type == "hello"


# ---------------------------------------------------------------------- asking


def test_a_client_is_greeted_with_the_jobs_name(job: Job) -> None:
    hello = Client(job.path).hello.header
    assert hello == {
        "type": "hello",
        "version": [1, 0],
        "job": "calm-otter-7f3",
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def test_the_state_is_what_was_told_last(job: Job) -> None:
    client = Client(job.path)
    assert client.ask("state").header == {"type": "state", "state": STATE}
    job.service.state({**STATE, "state": "stopping"})
    assert client.ask("state").header["state"]["state"] == "stopping"


def test_a_client_of_another_version_can_stop_a_job_and_is_refused_anything_else(job: Job) -> None:
    job.opened()
    client = Client(job.path, (2, 5))
    assert client.hello.header["version"] == [1, 0]
    assert client.ask("state").type == "state"
    refused = client.ask("subscribe", events=True)
    assert refused.header["message"].startswith("subscribe needs control protocol 1.x")
    assert client.ask("stop").type == "stop"
    assert [type(event) for event in job.handled] == [messages.Interrupt]


@pytest.mark.parametrize(
    ("request_", "signals"),
    [
        ({"type": "stop", "by": "me"}, ["TERM"]),
        ({"type": "stop", "signal": "INT"}, ["INT"]),
        ({"type": "kill"}, ["TERM", "INT"]),
    ],
)
def test_stop_and_kill_are_signals_to_the_jobs_loop(request_: dict[str, Any], signals: list[str], job: Job) -> None:
    job.opened()
    by = request_.get("by", "")
    assert Client(job.path).ask(request_.pop("type"), **request_).type in ("stop", "kill")
    assert [event.signal for event in job.handled if isinstance(event, messages.Interrupt)] == signals
    assert job.stops == ([by] if "TERM" in signals else [])


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_stop_while_no_loop_runs_is_a_signal_to_the_process(has_ended: bool, job: Job, signals: list[str]) -> None:
    if has_ended:
        job.opened()
        job.service.closed()
    assert Client(job.path).ask("stop").type == "stop"
    wait_until(lambda: signals == ["SIGTERM"], 20)


def test_who_asks_for_stacks_gets_the_answers_to_that_question(job: Job) -> None:
    early = Client(job.path).ask("stack", task="worker-0")
    assert early.header["message"] == "the job has not started a task yet"
    job.opened()
    one, other = Client(job.path), Client(job.path)
    one.send("stack", task="worker-0")
    wait_until(lambda: len(job.handled) == 1, 20)
    other.send("stack")
    wait_until(lambda: len(job.handled) == 2, 20)
    assert job.handled == [messages.StackWanted(1, "worker-0"), messages.StackWanted(2, "")]
    job.service.stack(2, frames.TaskStack("worker-1", 1, "b"))
    job.service.stack(1, frames.TaskStack("worker-0", 0, "a"))
    job.service.stack(2, frames.TaskStack("worker-0", 0, "a"))
    assert one.next().header["text"] == "a"
    assert [other.next().header["text"] for _ in range(2)] == ["b", "a"]
    job.service.stack(2, frames.TaskStack("worker-0", 0, "late"))
    assert one.ask("state").type == "state"


def test_answers_for_a_client_that_has_gone_are_nobodys(job: Job) -> None:
    job.opened()
    client = Client(job.path)
    client.send("stack")
    wait_until(lambda: len(job.handled) == 1, 20)
    client.socket.close()
    wait_until(lambda: not job.service._asking, 20)
    job.service.stack(1, frames.TaskStack("worker-0", 0, "a"))
    assert Client(job.path).ask("state").type == "state"


@pytest.mark.parametrize("state", ["submitting", "queued"])
def test_a_job_that_waits_in_an_engine_has_no_stacks(state: str, job: Job) -> None:
    job.opened()
    job.service.state({**STATE, "state": state})
    refused = Client(job.path).ask("stack").header
    assert (refused["type"], refused["message"]) == ("refused", "the job has not started a task yet")
    assert job.handled == []


def test_a_client_that_does_not_say_hello_is_dropped(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HELLO_S", 0.2)
    assert Client(job.path, None).rest() == []


@pytest.mark.parametrize("wrong", [b"\xff" * 8, session.encode({"type": "subscribe"}), b"\0\1\0\0" + b"x" * 65536])
def test_a_client_that_speaks_otherwise_is_told_and_dropped(wrong: bytes, job: Job) -> None:
    client = Client(job.path, None)
    client.socket.sendall(wrong)
    assert [frame.type for frame in client.rest()] == ["refused"]


def test_64_clients_are_let_in_and_the_next_is_refused(job: Job) -> None:
    clients = [Client(job.path) for _ in range(service.CLIENTS)]
    one_more = Client(job.path, None)
    assert "has 64 clients already" in one_more.next().header["message"]
    assert one_more.rest() == []
    clients.pop().socket.close()
    wait_until(lambda: len(job.service._clients) < service.CLIENTS, 20)
    assert Client(job.path).hello.type == "hello"


# ---------------------------------------------------------------------- events and output


def test_events_go_to_those_who_want_them(job: Job) -> None:
    one, other = Client(job.path), Client(job.path)
    one.subscribe(events=True)
    job.service.event({"event": "started", "task": "worker-0"})
    assert one.next().header == {"type": "event", "event": {"event": "started", "task": "worker-0"}}
    assert other.ask("state").type == "state"


def test_output_is_read_from_the_logs_from_where_a_client_wants(job: Job) -> None:
    for word in (b"a\n", b"b\n", b"c\n"):
        job.prints(word)
    for output, seen in (({"cursor": 0}, b"a\nb\nc\n"), ({"tail": 1}, b"c\n"), ({"cursor": None}, b"")):
        client = Client(job.path)
        client.send("subscribe", output=output)
        got = b"".join(client.next().body for _ in range(seen.count(b"\n")))
        assert got == seen
    client.ask("state")  # what was sent before it is done
    job.prints(b"d\n")
    frame = client.next()
    assert (frame.body, frame.header["cursor"]) == (b"d\n", 4)


class Torn:
    """Output that cannot be read, or is over for who wants it from 7 on."""

    has_more = True
    cursor = 7

    def __init__(self, wanted: frames.OutputWanted) -> None:
        self.is_over = wanted.cursor == 7

    def read(self, limit: int) -> bytes:
        if self.is_over:
            return b""
        raise OSError("it is torn")

    def close(self) -> None: ...


def test_a_subscription_until_now_ends_also_if_the_logs_cannot_be_read(folder: str) -> None:
    served = Service(None, "j", Torn)
    served.start()
    listener = ControlSocket("j", folder)
    served.listen(listener)
    client = Client(listener.path)
    client.send("subscribe", output={"cursor": 0})
    said = {"type": "said", "level": "warning", "text": "the job's logs cannot be read: it is torn"}
    assert client.next().header == said
    assert client.ask("state").type == "state", "it goes on"
    client.send("subscribe", output={"cursor": 0, "until": "now"})
    assert [client.next().header for _ in range(2)] == [said, {"type": "output_end", "cursor": 7}]
    client.subscribe(output={"cursor": 7, "until": "now"})
    served.close()


def test_messages_come_with_the_output(job: Job) -> None:
    client = Client(job.path)
    client.subscribe(output={"cursor": None})
    job.service.say("not for all", "debug")
    job.service.say("a warning", "warning")
    assert client.next().header == {"type": "said", "text": "a warning", "level": "warning"}


def test_the_outcome_comes_after_all_output_and_ends_the_connection(job: Job) -> None:
    client = Client(job.path)
    client.subscribe(output={"cursor": 0})
    for number in range(50):
        job.prints(b"%d\n" % number)
    job.service.finish(frames.JobEnded({"exit_code": 3}))
    *output, last = client.rest()
    assert b"".join(frame.body for frame in output) == b"".join(b"%d\n" % number for number in range(50))
    assert last.header == {"type": "outcome", "outcome": {"exit_code": 3}}


def test_a_stopped_client_costs_nothing_and_gets_a_snapshot_for_what_it_missed(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "MAIL_LIMIT", 200_000)
    client = Client(job.path)
    client.subscribe(events=True)
    begun = time.monotonic()
    for number in range(2000):
        job.service.event({"event": "said", "number": number, "text": "x" * 1000})
    assert time.monotonic() - begun < LIMIT_S
    (served,) = job.service._clients
    assert served.mail_size <= 200_000
    assert served.missed > 1000
    seen = 0
    while (frame := client.next()).type == "event":
        assert frame.header["event"]["number"] == seen  # none is left out in between
        seen += 1
    assert frame.header == {"type": "state", "state": STATE, "missed": 2000 - seen}
    job.service.event({"event": "said", "number": 2000})
    assert client.next().header["event"]["number"] == 2000


def test_output_for_a_stopped_client_is_not_read(folder: str) -> None:
    readers: list[Numbers] = []

    def make(wanted: frames.Output) -> Numbers:
        readers.append(Numbers(wanted))
        return readers[-1]

    served = Service(None, "j", make)
    served.start()
    listener = ControlSocket("j", folder)
    served.listen(listener)
    stopped, lively = Client(listener.path), Client(listener.path)
    stopped.send("subscribe", output={"cursor": 0})
    wait_until(lambda: readers, 20)
    lively.send("subscribe", output={"cursor": 0})
    got = 0
    while got < 20_000_000:
        got += len(lively.next().body)
    assert readers[0].read_bytes < 2_000_000  # what fits into the connection
    served.close()
    assert [reader.closed for reader in readers] == [True, True]


def test_the_end_of_the_job_waits_for_no_stopped_client(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "OTHERS_END_S", 0.3)
    client = Client(job.path)
    client.send("subscribe", output={"cursor": 0})
    for _ in range(100):
        job.prints(b"x" * 100_000)
    client.socket.recv(10)
    begun = time.monotonic()
    job.service.close()
    assert 0.2 < time.monotonic() - begun < scaled(5)


def test_no_message_waits_for_another_one_to_wake_the_service(job: Job) -> None:
    """Two threads at once: each message is delivered without a later one."""
    client = Client(job.path)
    client.subscribe(events=True)
    rounds = 2000
    for number in range(rounds):
        other = threading.Thread(target=job.service.event, args=({"event": "b", "number": number},))
        other.start()
        job.service.event({"event": "a", "number": number})
        assert sorted(client.next().header["event"]["event"] for _ in range(2)) == ["a", "b"]
        other.join()


@pytest.mark.parametrize("way", [socket.SHUT_RD, socket.SHUT_RDWR])
def test_a_client_that_leaves_is_forgotten(way: int, job: Job) -> None:
    client = Client(job.path)
    client.subscribe(events=True, output={"cursor": 0})
    client.socket.shutdown(way)  # the first is seen only by who sends
    for number in range(100):
        job.prints(b"%d\n" % number)
        job.service.event({"event": "said"})
    wait_until(lambda: not job.service._clients, 20)
    client.socket.close()


# ---------------------------------------------------------------------- numbers


def wanted(job: Job) -> list[tuple[bool, tuple[str, ...]]]:
    """What the job's loop was told that clients want."""
    return [tuple(event) for event in job.handled if isinstance(event, messages.MetricsWanted)]


def test_the_loop_is_told_whether_snapshots_are_wanted_and_of_which_hosts(job: Job) -> None:
    job.opened()
    one, other = Client(job.path), Client(job.path)
    one.subscribe(metrics=True)
    other.subscribe(metrics=True, look=["d2", "d1"])
    one.subscribe(metrics=True, look=["d2"])
    other.socket.close()
    wait_until(lambda: len(wanted(job)) == 3, 20)
    one.subscribe(events=True)
    assert wanted(job) == [(True, ()), (True, ("d1", "d2")), (True, ("d2",)), (False, ())]


def test_a_loop_that_begins_later_is_told_what_is_wanted(job: Job) -> None:
    client = Client(job.path)
    client.subscribe(metrics=True)
    job.opened()
    assert wanted(job) == [(True, ())]


def test_snapshots_go_to_those_who_want_them_and_the_newest_to_who_comes_later(job: Job) -> None:
    job.opened()
    one, other = Client(job.path), Client(job.path)
    one.subscribe(metrics=True)
    job.service.metrics({"schema": "distrun.metrics/1", "time": 1})
    assert one.next().header == {"type": "metrics", "metrics": {"schema": "distrun.metrics/1", "time": 1}}
    assert other.ask("state").type == "state"
    other.send("subscribe", metrics=True)
    assert other.next().header["metrics"]["time"] == 1
    job.service.metrics({"time": 2})
    assert [client.next().header["metrics"]["time"] for client in (one, other)] == [2, 2]


def test_snapshot_that_is_too_large_for_a_frame_costs_no_client_its_connection(job: Job) -> None:
    job.opened()
    client = Client(job.path)
    client.subscribe(metrics=True)
    job.service.metrics({"filling": "x" * (session.HEADER_LIMIT + 1)})
    assert client.ask("state").type == "state"
    job.service.metrics({"time": 2})
    assert client.next().header["metrics"] == {"time": 2}


def test_a_snapshot_that_nobody_wants_is_not_kept(job: Job) -> None:
    job.service.metrics({"time": 1})
    assert job.service._snapshot is None


def test_only_the_newest_snapshot_waits_for_a_stopped_client(job: Job) -> None:
    job.opened()
    client = Client(job.path)
    client.subscribe(metrics=True, events=True)
    filling = "x" * 1_000_000
    for number in range(100):
        job.service.metrics({"time": number, "filling": filling})
    job.service.event({"event": "last"})
    (served,) = job.service._clients
    assert served.mail_size < 1000
    seen = []
    while (frame := client.next()).type == "metrics":
        seen.append(frame.header["metrics"]["time"])
    assert frame.header["event"] == {"event": "last"}
    assert len(seen) < 90
    assert seen == sorted(set(seen))
    assert seen[-1] == 99


# ---------------------------------------------------------------------- detaching


def test_after_detach_the_end_of_the_launching_client_means_nothing(folder: str, signals: list[str]) -> None:
    ours, its = socket.socketpair()
    job = Job(folder, ours)
    job.prints(b"hello\n")
    assert Client(job.path).ask("detach").header == {"type": "detach", "released": True}
    output, detached = ServiceClient(its).rest()
    assert (output.type, detached.type, detached.header["cursor"]) == ("output", "detached", 6)
    its.close()
    assert Client(job.path).ask("detach").header == {"type": "detach", "released": False}
    assert job.service.ask("Password: ", LIMIT_S, lambda: None) is None
    job.service.close()
    assert signals == []


def test_the_launching_client_may_release_itself_and_hear_events(folder: str, signals: list[str]) -> None:
    ours, its = socket.socketpair()
    job, client = Job(folder, ours), ServiceClient(its)
    client.send("subscribe", events=True)
    assert client.ask("state").type == "state"
    job.service.event({"event": "state", "state": "running"})
    assert client.next().type == "event"
    client.send("detach")
    assert [frame.type for frame in client.rest()] == ["detached", "detach"]
    its.close()
    job.service.close()
    assert signals == []
