"""What the answers of an engine mean to a job that waits for its places."""

from __future__ import annotations

import pytest

from distrun.allocating import HURRY_S, SILENT_S, WITHDRAW_S, QueueWait, Withdrawing
from distrun.backends.engine import ENDED, QUEUED, RUNNING, Explanation, Grant, QueueStatus
from distrun_runtime.contract import facts
from distrun_runtime.coordinator.messages import EngineLetGo, EngineTold, Event, Interrupt, Tick

GRANTS = (Grant("0", "h1"),)


class Told:
    """A job that waits, and what it said and noted."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.noted: list[str] = []
        self.waiting = QueueWait(
            "slurm", lambda text, level: self.said.append(f"{level}: {text}"), self._note, self._touch
        )
        self.touched = 0

    def _note(self, state: str, text: str) -> None:
        self.noted.append(f"{state}: {text}")

    def _touch(self) -> None:
        self.touched += 1

    def hears(self, *standings: QueueStatus) -> None:
        for standing in standings:
            self.waiting.handle(EngineTold(standing), 0.0)


@pytest.fixture
def told() -> Told:
    return Told()


def test_what_a_job_waits_for_is_said_when_it_changes(told: Told) -> None:
    told.hears(*(QueueStatus(QUEUED, text) for text in ("position 2", "position 2", "position 1")))
    assert told.said == ["info: slurm: queued, position 2", "info: slurm: queued, position 1"]
    assert told.noted == ["queued: slurm: queued, position 2", "queued: slurm: queued, position 1"]
    assert not told.waiting.is_over


def test_a_job_with_its_places_is_planned_and_was_perhaps_never_queued(told: Told) -> None:
    told.hears(QueueStatus(RUNNING, "", GRANTS))
    assert told.waiting.is_over
    assert told.waiting.granted == QueueStatus(RUNNING, "", GRANTS)
    assert told.noted == []


def test_a_job_that_is_stopped_in_the_same_moment_is_not_planned(told: Told) -> None:
    told.waiting.handle(Interrupt("INT"), 0.0)
    told.hears(QueueStatus(RUNNING, "", GRANTS))
    assert told.waiting.granted is None
    outcome = told.waiting.outcome("calm-otter")
    assert (outcome.exit_code, outcome.reason) == (130, facts.INTERRUPTED)
    assert outcome.message == "interrupted before slurm gave it any place"


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("HUP", 129)])
def test_a_signal_gives_the_exit_code(signal: str, code: int, told: Told) -> None:
    told.waiting.handle(Interrupt(signal), 0.0)
    outcome = told.waiting.outcome("calm-otter")
    assert (outcome.exit_code, outcome.reason) == (code, facts.TERMINATED)


def test_a_job_that_the_engine_ended_was_not_submitted_well(told: Told) -> None:
    told.hears(QueueStatus(QUEUED, "no room"), QueueStatus(ENDED, "cancelled by ann"))
    outcome = told.waiting.outcome("calm-otter")
    assert (outcome.exit_code, outcome.reason) == (5, facts.SUBMIT)
    assert outcome.message == "slurm ended the job before it gave it any place: cancelled by ann"


def test_a_time_limit_that_was_reached_in_the_queue_gives_its_code(told: Told) -> None:
    why = Explanation(facts.EXIT_TIMEOUT, "YARN: the job's time is over (--time)")
    told.hears(QueueStatus(QUEUED, "no room"), QueueStatus(ENDED, "killed", why=why))
    outcome = told.waiting.outcome("calm-otter")
    assert (outcome.exit_code, outcome.reason) == (124, facts.TIMEOUT)
    assert outcome.message.endswith("place: killed; YARN: the job's time is over (--time)")


def test_what_an_engine_says_of_an_end_and_of_its_reason_is_told_once(told: Told) -> None:
    told.hears(QueueStatus(ENDED, "it was deleted", why=Explanation(143, "Grid Engine: it was deleted (qdel)")))
    outcome = told.waiting.outcome("calm-otter")
    assert (outcome.exit_code, outcome.reason) == (143, facts.TERMINATED)
    assert outcome.message.endswith("gave it any place; Grid Engine: it was deleted (qdel)")


def test_a_refusal_is_told_with_what_mends_it(told: Told) -> None:
    told.waiting.handle(EngineTold(None, "no such queue", "sinfo -s", True), 0.0)
    assert told.waiting.is_over
    assert told.waiting.outcome("calm-otter").message == "slurm did not take the job: no such queue; sinfo -s"


def test_silence_of_the_engine_is_told_once_until_it_answers(told: Told) -> None:
    for now in (0.0, SILENT_S - 1, SILENT_S, SILENT_S + 1):
        told.waiting.handle(EngineTold(None, "it is down"), now)
    assert [text.partition(":")[0] for text in told.said] == ["warning"]
    assert "it is down; it is asked again" in told.said[0]
    told.hears(QueueStatus(QUEUED))
    told.waiting.handle(EngineTold(None, "it is down"), SILENT_S + 2)
    assert len(told.said) == 2
    assert not told.waiting.is_over


def test_the_folder_shows_that_the_job_lives(told: Told) -> None:
    told.waiting.handle(Tick(0.0), 0.0)
    assert told.touched == 1


# ---------------------------------------------------------------------- a job that is taken back


class TakenBack:
    """A job whose end is awaited in the engine, and what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.withdrawing = Withdrawing("slurm", "calm-otter", lambda text, level: self.said.append(f"{level}: {text}"))
        self.at(0.0, Tick(0.0))

    def at(self, now: float, event: Event) -> bool:
        self.withdrawing.handle(event, now)
        return self.withdrawing.is_over


def test_a_job_that_the_engine_has_ended_needs_nothing_more() -> None:
    taken = TakenBack()
    assert not taken.at(1.0, Tick(0.0))
    assert taken.at(2.0, EngineLetGo())
    assert (taken.withdrawing.problem, taken.said) == ("", [])


def test_another_ctrl_c_does_not_end_the_wait_for_the_engine_but_shortens_it_and_says_so() -> None:
    taken = TakenBack()
    assert not taken.at(1.0, Interrupt("INT"))
    assert taken.said == ["warning: slurm is asked to end the job; its answer is awaited for 15 s more"]
    assert not taken.at(10.0, Interrupt("INT"))
    assert len(taken.said) == 1, "a third one changes nothing"
    assert not taken.at(0.9 + HURRY_S, Tick(0.0))
    assert taken.at(1.0 + HURRY_S, Tick(0.0))
    assert "may still have it" in taken.withdrawing.problem
    assert taken.withdrawing.problem.endswith("to make sure: distrun kill calm-otter")


def test_an_engine_that_never_confirms_is_not_awaited_for_ever() -> None:
    taken = TakenBack()
    assert not taken.at(WITHDRAW_S - 1, Tick(0.0))
    assert taken.at(WITHDRAW_S, Tick(0.0))
    assert "it has not confirmed that in time" in taken.withdrawing.problem


def test_what_the_engine_says_against_it_is_told() -> None:
    taken = TakenBack()
    assert taken.at(1.0, EngineLetGo("scancel says: no"))
    assert "may still have it: scancel says: no; to make sure" in taken.withdrawing.problem
