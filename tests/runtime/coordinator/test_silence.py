"""Scripted histories of hosts that fall silent, and may come back: nothing of what they wrote is given up too early."""

from __future__ import annotations

from history import WALL, History
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages
from distrun_runtime.coordinator.messages import Drop, EndAgent


def two_hosts(obedient: bool = False) -> History:
    return History(sample_plan(workers=2, servers=0, hosts=("d1", "d2")), obedient=obedient).start()


def test_a_host_that_comes_back_in_time_is_waited_for_with_the_rest_of_its_output() -> None:
    history = two_hosts().exited("worker-1", 0, out=10).exited("worker-0", 0)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Cleared("d2")).tell(agent_messages.Bye("d1"))
    history.tell(agent_messages.Output("d2", "worker-1", "out", 0, b"01234"))
    history.beat_to(29, "d1")
    assert "d2 has been silent for 15 s" in history.said()
    assert EndAgent("d2") not in history.done
    history.tell(agent_messages.Output("d2", "worker-1", "out", 5, b"56789"))
    assert "d2 answers again" in history.said()
    assert EndAgent("d2") in history.done
    outcome = history.tell(agent_messages.Bye("d2")).end()
    assert (outcome.exit_code, outcome.survivors) == (0, ())


def test_a_host_lost_while_the_job_drains_is_still_a_success_and_says_what_output_is_missing() -> None:
    history = two_hosts().exited("worker-1", 0, out=10).exited("worker-0", 0)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Cleared("d2")).tell(
        agent_messages.Bye("d1")
    ).beat_to(31, "d1")
    assert Drop("d2") in history.done
    assert history.end().exit_code == 0
    assert "the last lines of worker-1 were lost with d2" in history.said()


def test_a_host_that_is_silent_when_another_fails_may_come_back_and_clear_up() -> None:
    history = two_hosts().beat_to(10, "d1").exited("worker-0", 3)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1")).tick_to(20)
    history.killed("worker-1", "TERM", stopped=True).tell(agent_messages.Cleared("d2")).tell(agent_messages.Bye("d2"))
    outcome = history.end()
    assert (outcome.exit_code, outcome.survivors) == (3, ())


def test_a_silent_host_that_stays_away_after_a_failure_is_lost_at_30_seconds_and_changes_no_code() -> None:
    history = two_hosts().beat_to(10, "d1").exited("worker-0", 3)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1"))
    outcome = history.end()
    assert 30 <= history.now <= 31
    assert outcome.exit_code == 3
    assert tuple(map(str, outcome.survivors)) == ("worker-1 (pid 100) on d2",)


def test_after_an_interrupt_the_rest_of_a_flood_is_waited_for_3_seconds() -> None:
    history = two_hosts().interrupt("TERM")
    began = history.now
    for task, host in (("worker-0", "d1"), ("worker-1", "d2")):
        history.killed(task, "TERM", stopped=True, out=1 << 30).tell(agent_messages.Cleared(host))
    offset = 0
    while history.outcome is None and history.now < 60:
        history.tell(agent_messages.Output("d1", "worker-0", "out", offset, b"x" * 1000)).beat_to(history.now + 0.5)
        offset += 1000
        assert (EndAgent("d1") in history.done) == (history.now >= began + 3)
        for host in ("d1", "d2"):
            if EndAgent(host) in history.done:
                history.tell(agent_messages.Bye(host))
    assert history.end().exit_code == 143
    assert history.now < 5
    assert "the last output of worker-0 is not waited for" in history.said()


def test_a_second_interrupt_waits_for_no_silent_host() -> None:
    history = two_hosts().tick_to(8).interrupt("INT").interrupt("INT")
    assert history.end().exit_code == 130
    assert history.now < 30


def test_a_host_that_stays_silent_while_the_workers_are_asked_to_end_leaves_its_tasks_to_its_agent() -> None:
    history = two_hosts().interrupt("INT").killed("worker-0", "INT", stopped=True)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1"))
    outcome = history.end()
    assert history.now <= 31
    assert (outcome.exit_code, str(outcome.survivors[0])) == (130, "worker-1 (pid 100) on d2")


def test_a_suspect_host_is_believed_before_a_task_that_lost_a_peer_on_it_also_with_short_times() -> None:
    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"), suspect_s=2.0, lost_s=20.0)
    history = History(plan, obedient=False).start().beat_to(4, "d1").loses("worker-0", "worker-1")
    assert history.end().exit_code == 7


def test_answers_of_a_host_that_counts_as_lost_change_nothing() -> None:
    history = two_hosts(obedient=True).beat_to(31, "d1")
    history.tell(agent_messages.Exited("d2", "worker-1", code=0, time=WALL + 20)).tell(agent_messages.Pong("d2"))
    outcome = history.end()
    assert outcome.exit_code == 7
    assert {task.name: task.state for task in outcome.tasks}["worker-1"] == "failed"
