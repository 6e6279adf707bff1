"""Who is named: one worker fails for a reason of its own, the others lose it; told in every order."""

from __future__ import annotations

import re

import pytest
from history import WALL, History
from sample_plan import sample_plan

from distrun_runtime.coordinator.messages import StopTasks

MISSING = "%s did not answer the other tasks, although it ran (frozen, still busy, or cut off from them?): "


def running(workers: int = 2, **more: bool) -> History:
    return History(sample_plan(workers=workers), **more).start().beat_to(5)


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
    assert "worker-1 on d1 does not answer the other tasks; stopping the job" in history.said()
    outcome = history.end()
    assert outcome.exit_code == 1
    assert outcome.message == MISSING % "worker-1 on d1" + "worker-0 on d1 says: worker-1 is lost"


def test_a_consequence_that_a_signal_ended_says_so() -> None:
    history = running().publish("worker-0", lost_peer="a peer").killed("worker-0", "ABRT")
    assert "was ended by signal ABRT after it lost a peer" in history.end().message
    named = running().publish("worker-0", lost_peer="server-0").killed("worker-0", "ABRT").end()
    assert (named.exit_code, named.culprit and named.culprit.task) == (134, "server-0")


def test_who_said_that_it_fails_has_5_seconds_to_end() -> None:
    history = running().fails("worker-1").loses("worker-0", "worker-1").beat_to(9.5)
    assert history.did(StopTasks) == []
    outcome = history.exited("worker-1", 4).end()
    culprit = history.culprit()
    assert outcome.exit_code == 4
    assert outcome.message == "worker-1 on d1 failed with exit code 4: ValueError: my bug"
    assert (culprit.task, culprit.reason) == ("worker-1", "ValueError: my bug")


@pytest.mark.parametrize("obedient", [True, False])
def test_who_said_that_it_fails_and_does_not_end_is_the_culprit_with_1(obedient: bool) -> None:
    history = running(obedient=obedient).fails("worker-1").loses("worker-0", "worker-1").beat_to(10)
    assert len(history.did(StopTasks)) == 1
    if not obedient:
        history.beat_to(15).killed("worker-1", "KILL", stopped=True)
    outcome = history.end()
    culprit = history.culprit()
    assert outcome.exit_code == 1
    assert outcome.message == "worker-1 on d1 failed: ValueError: my bug; it was stopped before it had ended"
    assert (culprit.task, culprit.consequence) == ("worker-1", False)


def test_the_word_that_it_fails_may_come_after_the_consequence() -> None:
    history = running().loses("worker-0", "worker-1").beat_to(5.5).fails("worker-1").beat_to(9.5)
    assert history.did(StopTasks) == []
    assert history.culprit().task == "worker-1"


def test_the_word_may_come_after_the_stop_if_no_signal_had_reached_the_task() -> None:
    history = running(obedient=False).loses("worker-0", "worker-1").beat_to(6)
    history.fails("worker-1").killed("worker-1", "TERM", stopped=True)
    assert history.culprit().task == "worker-1"


def test_what_a_task_says_once_we_have_signalled_it_is_no_failure_of_its_own() -> None:
    history = running(obedient=False).loses("worker-0", "server-0").beat_to(6)
    history.fails("worker-1", "SystemExit", stopped=True).exited("worker-1", 1, stopped=True)
    assert history.culprit().task == "server-0"


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
    history = running().exited("server-0", 0).loses("worker-0", "server-0", 9)
    assert len(history.did(StopTasks)) == 1
    outcome = history.end()
    assert (outcome.exit_code, outcome.culprit and outcome.culprit.task) == (1, "server-0")


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


@pytest.mark.parametrize("jump_s", [43200.0, -43200.0], ids=["forward", "back"])
def test_a_clock_that_is_set_while_the_job_runs_does_not_hide_the_first_failure(jump_s: float) -> None:
    """d2 fails first. By its clock that was half a day later, or d1's consequence half a day after it."""
    first, second = ("worker-1", "worker-0") if jump_s > 0 else ("worker-0", "worker-1")
    history = History(sample_plan(workers=2, hosts=("d1", "d2")), obedient=False).start().beat_to(5)
    off = {"worker-1": jump_s, "worker-0": 0.0}
    history.exited(first, 5, at=5 + off[first], arrived=WALL + 5.1)
    history.exited(second, 6, at=5.2 + off[second], arrived=WALL + 5.3)
    outcome = history.end()
    assert (outcome.exit_code, outcome.culprit and outcome.culprit.task) == (5, first)
    assert f"the clock of d2 (or of this machine) was set by {jump_s:+.0f} s" in history.said()
    ended = [task.ended for task in outcome.tasks if task.name == "worker-1"]
    assert ended == [pytest.approx(WALL + 5, abs=0.4)]


def test_an_exit_that_waited_while_a_connection_was_cut_keeps_its_time() -> None:
    history = History(sample_plan(workers=2, hosts=("d1", "d2")), obedient=False).start().beat_to(5)
    history.exited("worker-1", 5, at=5, arrived=WALL + 1000)
    assert "was set" not in history.said()
    assert [task.ended for task in history.supervisor.roster.tasks.values() if task.name == "worker-1"] == [WALL + 5]


# ---------------------------------------------------------------------- who was lost first


def on_hosts(*names: str, **limits: float) -> History:
    """Scheduler and server-0 on the first host, worker N on host N."""
    return History(sample_plan(workers=len(names), hosts=names, **limits), obedient=False).start().beat_to(5)


def test_a_healthy_server_that_lost_the_scheduler_is_not_named_but_the_scheduler() -> None:
    history = on_hosts("d1", "d2").loses("server-0", "scheduler").loses("worker-1", "server-0").beat_to(8)
    outcome = history.end()
    culprit = history.culprit()
    assert (culprit.task, culprit.host, culprit.missing) == ("scheduler", "d1", True)
    assert (culprit.code, culprit.signal, outcome.exit_code) == (None, None, 1)
    assert outcome.message == MISSING % "scheduler on d1" + "server-0 on d1 says: scheduler is lost"


@pytest.mark.parametrize("frozen_s", [2.0, 5.0, 9.0, 20.0])
def test_tasks_that_were_lost_on_a_silent_host_are_explained_by_it_however_early_that_is_noticed(
    frozen_s: float,
) -> None:
    """With a short heartbeat tasks give up on their peers long before a host is suspect."""
    plan = sample_plan(workers=2, hosts=("d1", "d2"))
    history = History(plan, obedient=False).start().beat_to(5).beat_to(5 + frozen_s, "d2")
    history.loses("worker-1", "server-0").beat_to(100, "d2")
    outcome = history.end()
    culprit = history.culprit()
    assert "s, and tasks on other hosts lost those on it; stopping the job" in history.said()
    assert (outcome.exit_code, outcome.reason) == (7, "host_lost")
    assert (culprit.task, culprit.host) == ("", "d1")


def test_a_host_that_answers_after_all_explains_nothing() -> None:
    history = on_hosts("d1", "d2").beat_to(11, "d2").loses("worker-1", "server-0").beat_to(12.5, "d2")
    assert history.did(StopTasks) == []
    history.beat_to(14)
    assert history.culprit().task == "server-0"


def test_a_silent_host_whose_tasks_nobody_lost_does_not_explain_a_frozen_task_elsewhere() -> None:
    history = on_hosts("d1", "d2", "d3").beat_to(16, "d1", "d2")
    history.loses("scheduler", "server-0").loses("worker-1", "server-0").beat_to(40, "d1", "d2")
    outcome = history.end()
    culprit = history.culprit()
    assert (culprit.task, culprit.missing) == ("server-0", True)
    assert "lost those on it" not in outcome.message


def test_a_host_that_was_silent_and_answers_again_explains_nothing_later() -> None:
    history = on_hosts("d1", "d2", "d3").beat_to(16, "d1", "d3").loses("worker-2", "worker-1").beat_to(16.5, "d1", "d3")
    assert list(history.supervisor.roster.silent) == ["d2"]
    history.beat_to(17)
    assert history.supervisor.roster.silent == {}


def test_the_silence_that_is_told_at_the_end_is_the_longest() -> None:
    history = on_hosts("d1", "d2").beat_to(15, "d2").loses("worker-1", "server-0").beat_to(60, "d2")
    outcome = history.end()
    told = [int(seconds) for seconds in re.findall(r"silent for (\d+) s", history.said() + outcome.message)]
    assert told == sorted(told)
    assert outcome.message == "lost d1: silent for %d s" % told[-1]
    assert "it counts as lost" not in history.said()
    assert {task.state for task in outcome.tasks if task.host == "d1"} == {"failed"}


def test_two_tasks_that_lost_each_other_are_told_apart_by_who_was_lost_first() -> None:
    history = on_hosts("d1", "d2").publish("worker-0", lost_peer="worker-1", message="silent for 10 s").beat_to(6)
    history.loses("worker-1", "worker-0").exited("worker-0", 1).beat_to(9)
    assert history.culprit().task == "worker-1"


def test_a_task_that_is_cut_off_is_named_and_not_those_that_it_lost_first() -> None:
    history = on_hosts("d1", "d2", "d3").publish("worker-2", lost_peer="scheduler", message="silent for 6 s").beat_to(6)
    history.publish("scheduler", lost_peer="worker-2", message="silent for 6 s")
    history.publish("server-0", lost_peer="worker-2", message="silent for 6 s")
    history.loses("worker-0", "worker-2").loses("worker-1", "worker-2").beat_to(9)
    assert history.culprit().task == "worker-2"


def test_of_tasks_that_lost_each_other_on_one_host_the_one_that_most_others_lost_is_named() -> None:
    history = running(workers=3).loses("worker-1", "worker-0").loses("worker-0", "worker-1")
    assert history.loses("worker-2", "worker-1").culprit().task == "worker-1"


def test_of_a_host_that_is_cut_off_a_task_is_named_although_several_there_lost_the_scheduler() -> None:
    plan = sample_plan(workers=6, hosts=("d1", "d2", "d3"))
    history = History(plan, obedient=False).start().beat_to(5)
    for name in ("worker-2", "worker-5"):
        history.publish(name, lost_peer="scheduler", message="silent for 6 s")
    history.beat_to(6).publish("scheduler", lost_peer="worker-2", message="silent for 6 s")
    history.loses("worker-1", "worker-5").exited("worker-2", 1).beat_to(9)
    assert history.culprit().host == "d3"


def test_a_server_that_the_scheduler_stopped_before_the_end_is_a_consequence_of_the_scheduler() -> None:
    history = on_hosts("d1", "d2").publish("scheduler", told="SIGTERM").loses("server-0", "scheduler", 0)
    history.exited("scheduler", 0).loses("worker-1", "server-0").loses("worker-0", "scheduler")
    outcome = history.end()
    culprit = history.culprit()
    assert (culprit.task, culprit.missing) == ("scheduler", False)
    assert outcome.message.startswith("scheduler on d1 ended before the workers did")
    assert outcome.message.endswith("it was asked to end by SIGTERM, not by distrun")


def test_a_scheduler_that_stopped_its_servers_is_named_also_when_no_worker_has_noticed() -> None:
    history = on_hosts("d1", "d2").publish("scheduler", told="SIGTERM").loses("server-0", "scheduler", 0)
    history.exited("scheduler", 0).beat_to(16)
    assert "scheduler on d1 ended before the workers did; stopping the job" in history.said()
    assert history.culprit().task == "scheduler"


def test_a_worker_that_ended_with_0_while_others_waited_for_it_is_named() -> None:
    history = on_hosts("d1", "d2").exited("worker-1", 0)
    history.publish("worker-0", lost_peer="worker-1", message="worker-1@d2 has ended (BYE) without pushing round 3")
    outcome = history.exited("worker-0", 1).beat_to(9).end()
    culprit = history.culprit()
    assert (culprit.task, culprit.code, outcome.exit_code) == ("worker-1", 0, 1)
    assert outcome.message.startswith("worker-1 on d2 ended with 0 while others still needed it: worker-0 on d1 says")


def test_a_task_whose_failure_is_told_much_later_is_named_all_the_same() -> None:
    history = on_hosts("d1", "d2").loses("worker-0", "worker-1").beat_to(9).exited("worker-1", 9)
    outcome = history.end()
    assert (outcome.exit_code, outcome.culprit and outcome.culprit.task) == (9, "worker-1")


def test_no_task_is_left_running_in_the_outcome_of_a_job() -> None:
    history = on_hosts("d1", "d2").beat_to(6, "d1").exited("worker-0", 3).beat_to(100, "d1")
    assert {task.name: task.state for task in history.end().tasks} == {
        "scheduler": "stopped",
        "server-0": "stopped",
        "worker-0": "failed",
        "worker-1": "stopped",
    }


def test_a_loss_is_waited_out_without_asking_all_the_time() -> None:
    history = on_hosts("d1", "d2").beat_to(7, "d2").loses("worker-1", "server-0").beat_to(9, "d2")
    assert history.did(StopTasks) == []
    assert history.supervisor.wake_s() >= 0.1
