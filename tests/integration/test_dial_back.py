"""Whole jobs whose agents are started by an engine and dial back: output, ends, cuts, and who is not let in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentkit import leftovers
from fakeengine import Cable, FakeEngine, Shown, opened, planned, wait_for
from pythons import VERSIONS, need
from slowness import scaled

from distrun import launching
from distrun_runtime.coordinator.failures import Outcome
from distrun_runtime.coordinator.jobstore import JobStore

TELL = ("sh", "-c", 'echo "$DISTRUN_PLACE of $DISTRUN_RANK"')
STAY = ("sh", "-c", 'trap "echo bye; exit 0" INT TERM; echo up; while :; do sleep 0.05; done')


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    with opened(tmp_path) as found:
        yield found


class Run:
    """One job, run to its end in this thread."""

    def __init__(self, engine: FakeEngine, tmp_path: Path) -> None:
        self.engine = engine
        self.store = JobStore(tmp_path / "state")
        self.sink = Shown()

    def __call__(self, command: tuple[str, ...], *places: str, **limits: float) -> Outcome:
        job, folder = planned(self.engine, self.store, command, places or ("7", "8"), **limits)
        outcome = launching.coordinate(job, folder, self.sink)
        assert leftovers(job.plan.job) == []
        assert not self.engine.secret_file.exists()
        return outcome


@pytest.fixture
def run(engine: FakeEngine, tmp_path: Path) -> Run:
    return Run(engine, tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_agent_that_is_downloaded_runs_under_every_python(version: str, run: Run) -> None:
    run.engine.python = need(version)
    outcome = run(TELL, "7")
    assert (outcome.exit_code, outcome.reason) == (0, "succeeded"), run.sink.said
    assert run.sink.text == {"worker-0": "7 of 0\n"}


def test_an_agent_that_never_dials_is_named_when_the_start_limit_is_over(run: Run) -> None:
    run.engine.skipped.add("8")
    outcome = run(TELL, start_s=2.0)
    assert (outcome.exit_code, outcome.reason) == (6, "start_failed")
    assert "the agent on 8" in outcome.message


def test_the_wrong_secret_is_told_of_and_the_job_goes_on(run: Run, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.touch(0o600)
    wrong.write_text("5f" * 32)
    stranger: list[subprocess.Popen[bytes]] = []

    def let_in(task: str) -> None:
        if not stranger:
            stranger.append(run.engine.start("7", str(wrong)))
            assert b"the proof is wrong" in stranger[0].communicate(timeout=scaled(60))[1]
            run.sink.on_output = stop

    def stop(task: str) -> None:
        pass

    run.sink.on_output = let_in
    outcome = run(("sh", "-c", "echo up; sleep 1"))
    assert outcome.exit_code == 0
    assert stranger[0].returncode == 6
    [said] = [text for text in run.sink.said if "was refused" in text]
    assert said.startswith("warning: an agent that dialled from 127.0.0.1:")


def test_a_second_agent_for_a_place_ends_the_job_and_both_addresses_are_named(run: Run) -> None:
    second: list[subprocess.Popen[bytes]] = []

    def again(task: str) -> None:
        if not second:
            second.append(run.engine.start("7"))

    run.sink.on_output = again
    outcome = run(STAY)
    assert (outcome.exit_code, outcome.reason) == (6, "start_failed")
    assert outcome.message.startswith("two agents claim place 7: one from 127.0.0.1:")
    assert outcome.message.count("127.0.0.1:") == 2
    assert b"has its agent already" in second[0].communicate(timeout=scaled(60))[1]


def test_a_connection_that_is_cut_is_dialled_again_and_nothing_is_lost(run: Run) -> None:
    cable = run.engine.cable = Cable()
    cuts: list[int] = []

    def cut(task: str) -> None:
        """After the first output of a worker, and once more later."""
        lines = run.sink.text.get("worker-0", "").count("\n")
        if len(cuts) < 3 and lines > 40 * len(cuts):
            cuts.append(cable.made)
            cable.cut()

    run.sink.on_output = cut
    outcome = run(("sh", "-c", "i=0; while [ $i -lt 200 ]; do echo $i; i=$((i+1)); sleep 0.01; done"))
    assert (outcome.exit_code, outcome.reason) == (0, "succeeded"), run.sink.said
    whole = "".join(f"{number}\n" for number in range(200))
    assert run.sink.text == {"worker-0": whole, "worker-1": whole}
    assert len(cuts) == 3
    assert cable.made > 2


def test_a_connection_that_falls_silent_is_replaced_by_the_agent(run: Run) -> None:
    """The coordinator does not know where it is. The agent does not wait for the end of its lease."""
    cable = run.engine.cable = Cable()

    def freeze(task: str) -> None:
        if cable.made == 1:
            cable.freeze()

    run.sink.on_output = freeze
    outcome = run(("sh", "-c", "for i in 1 2 3 4 5 6; do echo $i; sleep 0.4; done"), "7", lease_s=4.5, suspect_s=0.5)
    assert (outcome.exit_code, outcome.reason) == (0, "succeeded"), run.sink.said
    assert run.sink.text == {"worker-0": "1\n2\n3\n4\n5\n6\n"}
    assert cable.made >= 2
    assert any("reconnected" in text or "answers again" in text for text in run.sink.said)


def test_agents_end_their_tasks_when_the_coordinator_does_not_come_back(run: Run, engine: FakeEngine) -> None:
    """The lease ends: nothing stays."""
    cable = engine.cable = Cable()

    def vanish(task: str) -> None:
        if len(run.sink.text) == 2:
            engine.agents.close()
            cable.cut()

    run.sink.on_output = vanish
    outcome = run(STAY, lease_s=3.0, lost_s=2.0, suspect_s=1.0)
    assert (outcome.exit_code, outcome.reason) == (7, "host_lost")
    wait_for(lambda: all(child.poll() is not None for child in engine.children.values()), "the agents end")
