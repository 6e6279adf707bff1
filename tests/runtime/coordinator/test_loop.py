"""The loop over scripted agents: real pipes, threads and signals, no processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from sample_plan import sample_plan
from scripted_agent import Script, ScriptedAgent
from slowness import scaled

from distrun_runtime.contract import facts, session
from distrun_runtime.contract.plan import Plan, Runtime, Secrets
from distrun_runtime.coordinator import jobrun, logs, loop, messages
from distrun_runtime.coordinator.channel import Put
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.jobstore import JobStore
from distrun_runtime.errors import ContractError

LIMIT_S = scaled(60.0)
SECRETS = Secrets("00ff" * 8, {})


class Notes:
    """A service without clients that remembers."""

    def __init__(self) -> None:
        self.printed: list[tuple[str, str, bytes, int | None]] = []
        self.said: list[tuple[str, str]] = []
        self.has_lost_launcher = False

    def output(self, task: str, host: str, stream: str, data: bytes, at: int | None) -> None:
        self.printed.append((task, stream, data, at))

    def say(self, text: str, level: str) -> None:
        self.said.append((text, level))

    def opened(self, put: Callable[[messages.Event], None]) -> None: ...

    def event(self, value: Mapping[str, Any]) -> None: ...

    def state(self, value: Mapping[str, Any]) -> None: ...

    def metrics(self, value: Mapping[str, Any]) -> None: ...

    @property
    def text(self) -> str:
        return "\n".join(text for text, _ in self.said)


def wait(condition: Callable[[], object]) -> None:
    """Wait until `condition()` is true, or until it is time to fail by what is asserted then."""
    until = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)


class Job:
    """One run of the loop."""

    def __init__(self, tmp_path: Path, plan: Plan, *scripts: Script, **more: Any) -> None:
        self.plan = plan
        self.sink = Notes()
        self.folder: JobFolder = JobStore(tmp_path).create(plan)
        self.agents = [
            ScriptedAgent(script, host.name, **more) for script, host in zip(scripts, plan.hosts, strict=True)
        ]

    def run(self, **more: Any) -> Outcome:
        begin = time.monotonic()
        outcome = jobrun.JobRun(
            self.plan, SECRETS, [agent.channel for agent in self.agents], self.folder, self.sink, **more
        ).run()
        self.took = time.monotonic() - begin
        for agent in self.agents:
            agent.join()
        assert self.folder.state()["state"] == outcome.job_state
        return outcome


@pytest.fixture(autouse=True)
def _signals_are_put_back() -> Iterator[None]:
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP]
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


def one_worker(**limits: Any) -> Plan:
    return sample_plan(workers=1, servers=0, **limits)


def test_the_runtime_is_sent_to_whoever_asks_and_read_once(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.say("hello", version=session.VERSION, time=time.time())
        agent.wait("begin")
        agent.say("need", digest="abc")
        frame = agent.wait("runtime")
        assert (frame.header["digest"], frame.body) == ("abc", b"PK archive")
        agent.say("ready", address="127.0.0.1", ports={}, python={"python": "3.11.2 /usr/bin/python"})
        task = agent.spawn()
        agent.ends(task)

    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"))._replace(runtime=Runtime(digest="abc"))
    read: list[int] = []

    def runtime() -> bytes:
        read.append(1)
        return b"PK archive"

    assert Job(tmp_path, plan, script, script).run(runtime=runtime).exit_code == 0
    assert read == [1]


@pytest.mark.parametrize("works", [True, False])
def test_the_preparation_runs_beside_the_loop_once_all_hosts_are_ready(tmp_path: Path, works: bool) -> None:
    pinged = threading.Event()

    def script(agent: ScriptedAgent) -> None:
        agent.begin()
        agent.wait("ping")
        pinged.set()
        if not works:
            agent.wait("end")
            agent.say("bye")
            return
        task = agent.spawn()
        agent.ends(task)

    def prepare(put: Put) -> None:
        def work() -> None:
            assert pinged.wait(LIMIT_S), "agents are pinged while the preparation goes on"
            put(messages.AllPrepared() if works else messages.PrepareFailed("d1", "disk full", time.time(), "a\nb"))

        threading.Thread(target=work, daemon=True).start()

    job = Job(tmp_path, one_worker(), script)
    outcome = job.run(prepare=prepare)
    assert (outcome.exit_code, outcome.reason) == ((0, "succeeded") if works else (4, "sync"))
    kinds = [json.loads(line)["event"] for line in (job.folder.path / "events.jsonl").read_text().splitlines()]
    assert ("prepared" if works else "prepare_failed") in kinds


def test_a_job_that_is_silent_is_noted_to_live_at_every_ping(tmp_path: Path) -> None:
    noted: list[float] = []

    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        state = job.folder.path / "state.json"
        until = time.monotonic() + LIMIT_S
        while job.folder.state()["state"] != "running" and time.monotonic() < until:
            agent.wait("ping")
        for _ in range(3):  # whatever else there was to write is written
            agent.wait("ping")
        os.utime(state, (1, 1))
        for _ in range(2):  # at the second, the first is over
            agent.wait("ping")
        noted.append(state.stat().st_mtime)
        agent.ends(task)

    job = Job(tmp_path, one_worker(suspect_s=2.0, lost_s=60.0), script)
    assert job.run().exit_code == 0
    assert noted[0] > 1e9


def test_a_job_succeeds_and_its_folder_tells_the_story(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        share = agent.begin().header
        assert share["token"] == SECRETS.token
        assert agent.spawn() == "scheduler"
        agent.say("published", task="scheduler", values={"address": "127.0.0.1", "port": 4321})
        assert agent.wait("spawn").header["env"]["DMLC_PS_ROOT_PORT"] == "4321"
        agent.say("started", task="server-0", pid=101, start="x", time=time.time())
        workers = [agent.spawn(), agent.spawn()]
        agent.ends(*workers)

    job = Job(tmp_path, sample_plan(), script)
    outcome = job.run()
    assert (outcome.exit_code, outcome.reason, outcome.survivors) == (0, "succeeded", ())
    state = job.folder.state()
    assert (state["state"], state["exit_code"]) == ("succeeded", 0)
    assert {task["name"]: task["state"] for task in state["tasks"]} == {
        "scheduler": "stopped", "server-0": "stopped", "worker-0": "exited", "worker-1": "exited",
    }  # fmt: skip
    events = [json.loads(line) for line in (job.folder.path / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[0] == "hello"
    assert kinds[-1] == "finished"
    everything = "".join(path.read_text() for path in job.folder.path.rglob("*") if path.is_file())
    assert SECRETS.token not in everything


def test_output_reaches_log_and_sink_once_and_is_acknowledged(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        agent.say("output", b"one\n", task=task, stream="out", offset=0)
        agent.say("output", b"oops\n", task=task, stream="err", offset=0)
        agent.say("output", b"one\ntwo\n", task=task, stream="out", offset=0)
        offsets: dict[str, int] = {}
        while offsets != {"out": 8, "err": 5}:
            ack = agent.wait("ack").header
            offsets[ack["stream"]] = ack["offset"]
        agent.ends(task, out=8, err=5)

    job = Job(tmp_path, one_worker(), script)
    assert job.run().exit_code == 0
    assert job.sink.printed == [
        ("worker-0", "out", b"one\n", 0),
        ("worker-0", "err", b"oops\n", 4),
        ("worker-0", "out", b"two\n", 9),
    ]
    assert job.folder.tail("worker-0", 5) == ["one", "oops", "two"]


def test_a_task_that_fills_the_disk_with_its_output_ends_the_job_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    monkeypatch.setattr(logs, "HEAD_BYTES", 0)

    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        agent.say("output", b"x", task=task, stream="out", offset=0)
        agent.wait("stop")
        agent.exited(task, None, signal="TERM", stopped=True, out=1)
        agent.leave()

    job = Job(tmp_path, one_worker(), script)
    job.folder.log_path("worker-0").symlink_to("/dev/full")
    outcome = job.run()
    assert outcome.exit_code == facts.EXIT_OUTPUT
    assert outcome.culprit.task == "worker-0"
    assert f"has filled the disk of {job.folder.logs} with 0 MiB of output: No space left" in outcome.message


def test_a_folder_that_vanishes_is_said_once_and_the_job_goes_on(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin()
        moved.rename(tmp_path / "elsewhere")
        task = agent.spawn()
        agent.ends(task)
        (tmp_path / "elsewhere").rename(moved)

    job = Job(tmp_path, one_worker(), script)
    moved = job.folder.path
    outcome = jobrun.JobRun(job.plan, SECRETS, [agent.channel for agent in job.agents], job.folder, job.sink).run()
    job.agents[0].join()
    assert outcome.exit_code == 0
    assert job.sink.text.count("cannot write to") == 1


@pytest.mark.parametrize("rubbish", [b"\xff" * 64, b"\0\0\0\x12" + b'{"type":"started"}', b"\0\0\0\x05[1,2]"])
def test_garbage_from_an_agent_is_a_lost_host_with_a_reason(tmp_path: Path, rubbish: bytes) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.begin()
        agent.spawn()
        agent.raw(rubbish)
        agent.until_end(answer=True)  # its input ends, so that a real agent would end its tasks

    job = Job(tmp_path, one_worker(), script)
    assert job.run().exit_code == 7
    assert job.took < 25  # a host that is only silent is lost after 30 s


def test_an_agent_that_never_greets_fails_the_start(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        agent.until_end(answer=True)

    job = Job(tmp_path, one_worker(start_s=0.3), script, greeting=b"")
    outcome = job.run()
    assert outcome.exit_code == 6
    assert "the agent on d1" in outcome.message
    assert job.took < 30


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_wait_at_once_and_the_job_by_its_rule(tmp_path: Path, number: int, code: int) -> None:
    """The best of three, for the machine may be busy."""
    sent: list[float] = []

    def script(agent: ScriptedAgent) -> None:
        sent.clear()
        task = agent.work()
        time.sleep(0.1)  # the loop is waiting by now; if it is not, the test still holds
        sent.append(time.monotonic())
        os.kill(os.getpid(), number)
        stop = agent.wait("stop").header
        sent.append(time.monotonic())
        assert stop["steps"][0][0] == ("INT" if number == signal.SIGINT else "TERM")
        agent.exited(task, None, signal=stop["steps"][0][0], stopped=True)
        if number == signal.SIGINT:
            agent.wait("stop")
        agent.leave()

    took = []
    for attempt in "123":
        assert Job(tmp_path / attempt, one_worker(), script).run().exit_code == code
        took.append(sent[1] - sent[0])
        if took[-1] < 0.8:
            return
    raise AssertionError("it took %s s" % took)


def test_what_comes_when_the_decisions_are_over_is_left_to_the_caller() -> None:
    class Over:
        is_over = True

        def wake_s(self) -> float:
            return 1.0

        def handle(self, event: messages.Event, now: float) -> list[messages.AgentAction]:
            assert isinstance(event, messages.Tick)
            return []

    run, late = loop.HostLoop(Over(), ()), messages.Interrupt("TERM", 1.0)
    run.put(late)
    run.run()
    assert (run.unheard(), run.unheard()) == ([late], [])


@pytest.mark.parametrize(
    ("number", "is_lost", "text"),
    [
        (signal.SIGHUP, True, "distrun launch was killed or crashed"),
        (signal.SIGTERM, True, "distrun launch was killed or crashed"),  # under nohup
        (signal.SIGHUP, False, "terminated (SIGHUP, as when the terminal closes)"),
        (signal.SIGTERM, False, "terminated (SIGTERM)"),
    ],
)
def test_the_end_of_launch_is_told_from_a_signal(tmp_path: Path, number: int, is_lost: bool, text: str) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        job.sink.has_lost_launcher = is_lost
        os.kill(os.getpid(), number)
        agent.wait("stop")
        agent.exited(task, None, signal="TERM", stopped=True)
        agent.leave()

    job = Job(tmp_path, one_worker(), script)
    outcome = job.run()
    assert (outcome.message, outcome.exit_code) == (text, 129 if is_lost else 128 + number)


def test_ctrl_z_means_nothing_and_an_ignored_signal_stays_ignored(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTSTP)
        agent.say("output", b"x", task=task, stream="out", offset=0)
        agent.wait("ack")
        agent.ends(task, out=1)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = Job(tmp_path, one_worker(), script)
        assert job.run().exit_code == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_it_runs_in_another_thread_without_signals(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        agent.ends(task)

    job = Job(tmp_path, one_worker(), script)
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(job.run()))
    thread.start()
    thread.join(LIMIT_S)
    assert outcomes[0].exit_code == 0


def test_our_own_fault_lets_the_agents_go_and_is_noted(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        agent.say("output", b"x", task=task, stream="out", offset=0)
        agent.until_end(answer=True)

    job = Job(tmp_path, one_worker(), script)

    def broken(*args: object) -> None:
        raise ZeroDivisionError("sink")

    job.sink.output = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        job.run()
    job.agents[0].join()
    state = job.folder.state()
    assert (state["state"], state["exit_code"], state["reason"]) == ("failed", 8, "internal")


def test_a_trace_says_frames_but_neither_bytes_nor_values(tmp_path: Path) -> None:
    def script(agent: ScriptedAgent) -> None:
        task = agent.work()
        agent.say("output", b"private", task=task, stream="out", offset=0)
        agent.ends(task, out=7)

    job = Job(tmp_path, one_worker(), script)
    job.run(verbosity=2)
    assert "> Spawn(host='d1', task='worker-0', env=..., attempt=0)" in job.sink.text
    assert "< Output(host='d1', task='worker-0', stream='out', offset=0, data=7 bytes, attempt=0)" in job.sink.text
    assert "private" not in job.sink.text


def test_channels_must_be_those_of_the_plan(tmp_path: Path) -> None:
    plan = sample_plan(hosts=("d1", "d2"))
    with pytest.raises(ContractError, match="places d1, d2"):
        jobrun.JobRun(plan, SECRETS, [], JobStore(tmp_path).create(plan), Notes())
