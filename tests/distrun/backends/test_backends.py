"""Every backend of the registry keeps the same promises; the local one besides."""

from __future__ import annotations

import ast
import dataclasses
import json
import queue
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from distrun import backends, hosts, launching, shipping
from distrun.backends import local
from distrun.backends.base import Backend, Swept
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import Handle, RoleGroup, Submission, marker
from distrun.backends.queue import QueueBackend
from distrun.errors import DistrunError, UsageError
from distrun.request import EngineOptions, Needs
from distrun.sync.copier import CopyRequest
from distrun.sync.rules import CopyRules
from distrun_runtime.contract import process, session
from distrun_runtime.contract.agent_messages import AgentHello, StartFailed
from distrun_runtime.contract.dataclass import read, written
from distrun_runtime.contract.plan import Host, Plan, Task
from distrun_runtime.coordinator.messages import AgentLost, Event

PLAN = Plan(
    job="calm-otter-7f3",
    name="",
    backend="local",
    command=("true",),
    cwd="/",
    hosts=(Host("here"),),
    tasks=(Task("worker-0", "worker", 0, "here", ("true",), "/", env={"A": "user's value"}),),
)


STARTED_HERE = [name for name in backends.names() if name not in backends.ENGINES]


@pytest.mark.parametrize("name", STARTED_HERE)
def test_every_backend_renders_without_effects_and_shows_nothing_of_the_users(name: str) -> None:
    backend = backends.load(name)
    assert isinstance(backend, Backend)
    assert backend.name == name
    rendered = backend.render(PLAN)
    assert rendered == backend.render(PLAN)
    assert set(rendered.commands) == {"here"}
    assert "user's value" not in " ".join(rendered.commands["here"])


@pytest.mark.parametrize("name", STARTED_HERE)
def test_every_backend_connects_nothing_before_it_is_told_to(name: str) -> None:
    backend = backends.load(name)
    channels = backend.connect(PLAN.hosts)
    assert [channel.host for channel in channels] == ["here"]
    for channel in channels:
        channel.close()
        channel.kill()
    assert backend.release(channels, 1.0) == ()


def test_a_backend_that_copies_no_files_says_so() -> None:
    class Says:
        def say(self, text: str, level: str, progress: object = None) -> None:
            raise AssertionError(text)

    with pytest.raises(UsageError, match="--launcher local copies no files") as caught:
        backends.load("local").copier(PLAN.hosts, CopyRequest("/", "job", CopyRules()), Says())
    assert "--sync-dst-dir" in caught.value.hint


def test_only_backends_read_how_a_host_is_reached() -> None:
    """Planning hands on what a backend made of the user's options; the dry run prints it."""
    root = Path(backends.__file__).parent.parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr == "reach" and node not in called:
                found.add((path.relative_to(root).as_posix(), ast.unparse(node)))
    assert {(name, text) for name, text in found if not name.startswith("backends/")} == {
        ("cli/dryrun.py", "host.reach"),
        ("planning.py", "allocation.reach"),
        ("planning.py", "request.reach"),
        ("planning.py", "self.reach"),  # into allocation.json
        ("request.py", "self.reach"),  # into request.json
    }


def submission(name: str, **more: Any) -> Submission:
    """Return what an engine would be asked for, for 4 workers and 2 servers, on two hosts where it takes any."""
    backend = backends.load(name)
    assert isinstance(backend, QueueBackend)
    inventory = hosts.named(["h1", "h2"], "--hosts")
    groups = (RoleGroup("server", 2, Needs()), RoleGroup("worker", 4, Needs(cores=2, memory=1 << 30)))
    found = Submission(
        job="calm-otter-7f3",
        marker=marker("calm-otter-7f3", "00112233445566aa"),
        groups=groups,
        options=EngineOptions(own={"image": "python:3.12"}),
        bootstrap=Bootstrap("calm-otter-7f3", "ab" * 32, ("10.0.0.1:4000",), 120.0),
        folder=Path("/nowhere/engine"),
        cwd="/home/o'neil/$HOME `x`",
        hosts=inventory if backend.engine.takes_hosts else None,
        is_dry=True,
        **more,
    )
    return dataclasses.replace(found, found=backend.engine.prepare(found))


@pytest.mark.parametrize("name", backends.ENGINES)
def test_every_engine_renders_without_effects_and_shows_nothing_of_the_users(name: str) -> None:
    backend = backends.load(name)
    assert isinstance(backend, QueueBackend)
    assert backend.name == name
    asked = submission(name)
    script = backend.engine.render(asked)
    assert script == backend.engine.render(asked)
    shown = "\n".join([*script.files.values(), *(" ".join(argv) for argv in script.commands)])
    assert asked.marker in shown
    assert "o'neil" not in shown


@pytest.mark.parametrize("name", backends.ENGINES)
def test_every_engine_keeps_the_secret_out_of_its_commands(name: str) -> None:
    backend = backends.load(name)
    assert isinstance(backend, QueueBackend)
    script = backend.engine.render(submission(name, secret="5ec2e7" * 8))
    assert not [argv for argv in script.commands if "5ec2e7" in " ".join(argv)]


def test_a_handle_survives_json() -> None:
    handle = Handle("slurm", "12", {"cluster": "c1"})
    assert read(Handle, json.loads(json.dumps(written(handle)))) == handle


def test_a_marker_is_short_plain_and_ends_with_the_nonce() -> None:
    made = marker("My_job.with+odd@signs:and-a-very-long-name-7f3", "00112233445566aa")
    assert re.fullmatch(r"[a-z][a-z0-9-]{1,55}", made)
    assert made.endswith("-00112233445566aa")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no launcher 'xyz'; known: local, ssh"):
        backends.load("xyz")
    with pytest.raises(UsageError) as caught:
        backends.load("slrum")
    assert caught.value.hint == "did you mean slurm?"


def test_other_distributions_register_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_registered", lambda: {"mine": "distrun.backends.local:Local", "bad": "no.where:X"})
    assert backends.names() == ("local", "ssh", *backends.ENGINES, "bad", "mine")
    assert isinstance(backends.load("mine"), local.Local)
    with pytest.raises(DistrunError, match=r"--launcher bad: no\.where:X cannot be loaded"):
        backends.load("bad")


def test_the_local_host_is_this_machine_by_its_short_name() -> None:
    assert local.short_name("d1.example.org") == "d1"
    assert local.short_name("d1") == "d1"
    assert local.short_name("") == "localhost"
    assert local.Local().addresses(["d1"]) == {"d1": "127.0.0.1"}
    assert len(local.Local().inventory(hosts.named(["a", "b"])).order) == 1


def test_a_python_that_is_not_there_is_a_failed_start() -> None:
    events: list[Event] = []
    channel = local.ChildChannel("here", ("/nowhere/python",))
    channel.start(events.append)
    channel.send(session.Frame({"type": "x"}))
    channel.close()
    channel.kill()
    channel.join(0.1)
    (event,) = events
    assert isinstance(event, StartFailed)
    assert "cannot start /nowhere/python: No such file" in event.reason


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("sys.stderr.write('oh dear\\n'); sys.exit(9)", ["it ended with code 9", "oh dear"]),
        ("import os; os.kill(os.getpid(), 9)", ["it was ended by signal 9"]),
    ],
)
def test_an_agent_that_dies_leaves_its_last_words(code: str, words: list[str]) -> None:
    events: queue.Queue[Event] = queue.Queue()
    channel = local.ChildChannel("here", (sys.executable, "-c", "import sys; sys.stdin.readline(); " + code))
    channel.start(events.put)
    event = events.get(timeout=scaled(60))
    assert isinstance(event, AgentLost)
    for word in words:
        assert word in event.reason
    channel.close()
    channel.kill()
    channel.join(scaled(60))


def test_an_agent_that_is_started_early_is_the_one_that_the_channel_leads_to() -> None:
    backend, events = local.Local(), queue.Queue[Event]()
    plan = PLAN._replace(job="early-otter-7f3", nonce=secrets.token_hex(8))
    backend.start_agents(plan)
    marks = process.marks(plan.job, plan.nonce)
    early = [row.pid for row in process.marked(marks)]
    (channel,) = backend.channels(plan)
    try:
        channel.start(events.put)
        hello = events.get(timeout=scaled(60))
        assert isinstance(hello, AgentHello)
        guard, agent = (hello.facts[name]["pid"] for name in ("guard", "agent"))
        assert guard in early
        assert {row.pid for row in process.marked(marks) if row.ppid != agent} == {guard, agent}
    finally:
        channel.close()
        left = backend.release([channel], 60)
    assert left == ()
    assert backend.channels(plan) != (channel,), "another job's"


def test_an_agent_that_is_started_early_and_never_asked_for_is_ended_by_the_release() -> None:
    backend = local.Local()
    plan = PLAN._replace(job="early-otter-7f4", nonce=secrets.token_hex(8))
    marks = process.marks(plan.job, plan.nonce)
    backend.start_agents(plan)
    assert process.marked(marks)
    assert backend.release((), 60) == ()
    assert not process.marked(marks)


@pytest.mark.parametrize("ends", [["close"], ["kill"], ["close", "kill"], []])
def test_an_agent_whose_channel_is_never_started_is_not_left(ends: list[str]) -> None:
    channel = local.ChildChannel("here", local._argv())
    channel.boot()
    for each in ends:
        getattr(channel, each)()
    assert channel.join(scaled(60)) == 0


def test_an_agent_whose_program_cannot_be_read_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def agent(**of: bool) -> bytes:
        raise PermissionError("unreadable")

    backend = local.Local()
    plan = PLAN._replace(job="early-otter-7f5", nonce=secrets.token_hex(8))
    monkeypatch.setattr(local.shipping, "agent", agent)
    with pytest.raises(PermissionError):
        backend.start_agents(plan)
    assert not process.marked(process.marks(plan.job, plan.nonce))
    assert backend.release(backend.channels(plan), 0) == ()


def test_an_agent_blocks_none_of_the_signals_that_its_starter_does() -> None:
    # What is started here waits for its program, of which only a part has come.
    code = "; import sys; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    boot = shipping.BOOT.replace("b=bytearray()", f"b=bytearray(){code}")
    argv = [sys.executable, "-I", "-c", boot]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, launching.HELD)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout == "set()\n"


def test_an_agent_that_has_ended_is_not_waited_for_while_another_has_its_stderr() -> None:
    other = "import subprocess; subprocess.Popen(['sleep', '600'], stdin=-3, stdout=-3); "
    argv = (sys.executable, "-c", f"import sys; sys.stdin.readline(); {other}sys.exit(9)")
    channel = local.ChildChannel("here", argv, process.marks("stderr-otter-7f6", "00112233445566aa"))
    events: queue.Queue[Event] = queue.Queue()
    channel.start(events.put)
    try:
        assert channel.join(3600) == 9
    finally:
        for row in process.marked(process.marks("stderr-otter-7f6", "00112233445566aa")):
            process.send_signal(row.identity, signal.SIGKILL)
        channel.kill()


def test_sweeping_a_job_that_never_was_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert local.Local().sweep(PLAN._replace(job="no-such-job-000"), 0.1) == {"here": Swept()}
    assert Swept().lines() == ["all its processes have ended"]
    assert Swept(("pid 1 (a)",), ("pid 2 (b)",)).lines() == ["ended pid 1 (a)", "pid 2 (b) did not end"]
