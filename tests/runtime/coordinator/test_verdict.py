"""Who is named: one worker fails for a reason of its own, the others lose it; told in every order."""

from __future__ import annotations

import pytest
from history import WALL, History
from sample_plan import sample_plan

from distrun_runtime.coordinator.actions import StopTasks


def running(workers: int = 2, **more: bool) -> History:
    return History(sample_plan(workers=workers), **more).start().beat_to(5)


def culprit(history: History) -> str:
    outcome = history.end()
    assert outcome.culprit is not None
    return outcome.culprit.task


def test_a_consequence_stops_nobody_while_the_culprit_may_still_end_by_itself() -> None:
    history = running().loses("worker-0", "worker-1").beat_to(5.5)
    assert history.did(StopTasks) == []
    assert "stopping" not in history.said()
    history.exited("worker-1", 3)
    assert len(history.did(StopTasks)) == 1
    outcome = history.end()
    assert (outcome.exit_code, outcome.message) == (3, "worker-1 on d1 failed with exit code 3")
    assert history.now < 6


def test_a_consequence_that_stays_alone_stops_the_job_after_a_second_and_says_whom_it_lost() -> None:
    history = running().loses("worker-0", "worker-1")
    assert history.supervisor.wake_s() <= 1.0
    history.beat_to(6)
    assert "worker-0 on d1: exit code 1 (it lost worker-1); stopping the job" in history.said()
    outcome = history.end()
    assert outcome.exit_code == 1
    assert outcome.message.startswith("worker-0 on d1 ended with code 1 after it lost worker-1")
    assert "could not run" not in outcome.message


def test_a_consequence_that_a_signal_ended_says_so() -> None:
    history = running().publish("worker-0", lost_peer="server-0").killed("worker-0", "ABRT")
    assert "was ended by signal ABRT after it lost server-0" in history.end().message


def test_who_said_that_it_fails_has_5_seconds_to_end() -> None:
    history = running().fails("worker-1").loses("worker-0", "worker-1").beat_to(9.5)
    assert history.did(StopTasks) == []
    outcome = history.exited("worker-1", 4).end()
    assert outcome.exit_code == 4
    assert outcome.message == "worker-1 on d1 failed with exit code 4: ValueError: my bug"
    assert outcome.culprit is not None
    assert (outcome.culprit.task, outcome.culprit.reason) == ("worker-1", "ValueError: my bug")


@pytest.mark.parametrize("obedient", [True, False])
def test_who_said_that_it_fails_and_does_not_end_is_the_culprit_with_1(obedient: bool) -> None:
    history = running(obedient=obedient).fails("worker-1").loses("worker-0", "worker-1").beat_to(10)
    assert len(history.did(StopTasks)) == 1
    if not obedient:
        history.beat_to(15).killed("worker-1", "KILL", stopped=True)
    outcome = history.end()
    assert outcome.exit_code == 1
    assert outcome.message == "worker-1 on d1 failed: ValueError: my bug; it was stopped before it had ended"
    assert outcome.culprit is not None
    assert (outcome.culprit.task, outcome.culprit.consequence) == ("worker-1", False)


def test_the_word_that_it_fails_may_come_after_the_consequence() -> None:
    history = running().loses("worker-0", "worker-1").beat_to(5.5).fails("worker-1").beat_to(9.5)
    assert history.did(StopTasks) == []
    assert culprit(history) == "worker-1"


def test_the_word_may_come_after_the_stop_if_no_signal_had_reached_the_task() -> None:
    history = running(obedient=False).loses("worker-0", "worker-1").beat_to(6)
    history.fails("worker-1").killed("worker-1", "TERM", stopped=True)
    assert culprit(history) == "worker-1"


def test_what_a_task_says_once_we_have_signalled_it_is_no_failure_of_its_own() -> None:
    history = running(obedient=False).loses("worker-0", "server-0").beat_to(6)
    history.fails("worker-1", "SystemExit", stopped=True).exited("worker-1", 1, stopped=True)
    assert culprit(history) == "worker-0"


def test_the_exit_first_and_the_consequence_later_stop_at_once() -> None:
    history = running(obedient=False).fails("worker-1").exited("worker-1", 4)
    assert len(history.did(StopTasks)) == 1
    history.loses("worker-0", "worker-1")
    assert history.end().exit_code == 4


def test_of_two_own_failures_the_one_that_was_said_or_happened_first_is_the_culprit() -> None:
    said_first = running(obedient=False).fails("worker-1", at=4.0).exited("worker-0", 9, at=4.5)
    assert said_first.exited("worker-1", 4, at=4.9).end().exit_code == 4
    stopped = running(obedient=False).fails("worker-1", at=4.0).exited("worker-0", 9, at=4.5)
    assert stopped.killed("worker-1", "TERM", stopped=True).end().exit_code == 1
    said_later = running(obedient=False).fails("worker-1", at=4.8).exited("worker-0", 9, at=4.5)
    assert said_later.killed("worker-1", "TERM", stopped=True).end().exit_code == 9


def test_many_consequences_before_the_culprit_ends() -> None:
    history = running(workers=5)
    for rank in (0, 1, 3, 4):
        history.fails("worker-2") if rank == 1 else history
        history.loses("worker-%d" % rank, "worker-2")
    history.loses("server-0", "worker-2").beat_to(5.8)
    assert history.did(StopTasks) == []
    assert history.exited("worker-2", 1).end().message.startswith("worker-2 on d1 failed")


def test_there_is_nothing_to_wait_for_when_nothing_is_left() -> None:
    history = running(workers=1).loses("worker-0", "server-0").loses("server-0", "worker-0")
    history.exited("scheduler", 0)
    assert len(history.did(StopTasks)) == 1
    assert history.now == 5


def test_a_lost_peer_beside_a_known_cause_is_not_waited_for() -> None:
    history = running().exited("server-0", 0).loses("worker-0", "server-0")
    assert len(history.did(StopTasks)) == 1
    assert culprit(history) == "server-0"


def test_who_lost_a_peer_first_and_says_then_that_it_fails_is_a_consequence() -> None:
    history = running().publish("worker-0", lost_peer="worker-1").fails("worker-0", "PeerLost: worker-1")
    history.exited("worker-0", 1).beat_to(5.5)
    assert history.did(StopTasks) == []
    assert history.exited("worker-1", 7).end().exit_code == 7


def test_who_fails_first_and_says_then_that_it_lost_a_peer_is_no_consequence() -> None:
    history = running(obedient=False).fails("worker-1").publish("worker-1", lost_peer="scheduler")
    history.exited("worker-1", 1).loses("worker-0", "worker-1")
    outcome = history.end()
    assert outcome.message == "worker-1 on d1 failed with exit code 1: ValueError: my bug"


def test_who_said_that_it_fails_and_ended_with_0_is_believed_before_a_consequence() -> None:
    history = running().fails("worker-1").loses("worker-0", "worker-1").exited("worker-1", 0)
    assert len(history.did(StopTasks)) == 1
    outcome = history.end()
    assert outcome.exit_code == 1
    assert outcome.message == "worker-1 on d1 failed: ValueError: my bug; yet it ended with 0"


def test_a_word_of_failure_is_no_failure_when_all_workers_end_with_0() -> None:
    history = running().fails("worker-1").exited("worker-0").exited("worker-1")
    assert history.end().exit_code == 0
    server = running().fails("server-0").exited("worker-0").exited("worker-1")
    assert server.end().exit_code == 0


def test_an_interrupt_ends_the_wait_and_a_failure_before_it_keeps_its_code() -> None:
    history = running(obedient=False).fails("worker-1").loses("worker-0", "worker-1").beat_to(5.5).interrupt("INT")
    assert [action.tasks for action in history.did(StopTasks)] == [("worker-0", "worker-1")]
    history.exited("worker-1", 1, stopped=True)
    outcome = history.end()
    assert (outcome.exit_code, outcome.culprit and outcome.culprit.task) == (1, "worker-1")


def test_what_a_worker_says_on_an_interrupt_does_not_change_the_code() -> None:
    history = running(obedient=False).interrupt("INT").beat_to(5.5)
    history.fails("worker-1", "KeyboardInterrupt", stopped=True).exited("worker-1", 1, stopped=True)
    history.fails("worker-0", "KeyboardInterrupt").exited("worker-0", 1, stopped=True)
    assert history.end().exit_code == 130


def test_a_lost_host_ends_the_wait_and_is_the_cause() -> None:
    history = History(sample_plan(workers=2, hosts=("d1", "d2"))).start().beat_to(5)
    history.loses("worker-0", "worker-1").beat_to(5.5)
    assert history.did(StopTasks) == []
    assert history.lost("d2", at=5.2).end().exit_code == 7


def test_the_stamp_of_the_word_is_corrected_for_the_clock_of_its_host() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2")), obedient=False)
    history.hello("d1").hello("d2", time=WALL - 200).ready("d1").ready("d2")
    history.started("worker-0").started("worker-1").beat_to(10)
    history.fails("worker-1", at=9.5 - 200).exited("worker-0", 5, at=9.0)
    assert history.end().exit_code == 5


def test_workers_are_stopped_first_then_servers_then_the_scheduler() -> None:
    history = running().exited("worker-0", 1)
    assert history.stops()[0][0] == ("worker-0", "worker-1", "server-0", "scheduler")
