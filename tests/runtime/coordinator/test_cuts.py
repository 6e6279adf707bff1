"""Scripted histories of connections that are cut and made again: a cut is no loss before the lease is over."""

from __future__ import annotations

from history import History
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.plan import HOLD
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import Drop, EndAgent


def two_hosts(obedient: bool = False) -> History:
    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"), suspect_s=15, lost_s=30, lease_s=45)
    return History(plan._replace(on_eof=HOLD), obedient=obedient).start()


def cut(history: History, host: str = "d2") -> History:
    return history.tell(messages.Cut(host, "its connection ended", 0.0))


def test_a_connection_that_is_made_again_is_said_and_changes_nothing() -> None:
    history = cut(two_hosts(obedient=True)).beat_to(7, "d1")
    assert "d2: connection lost, trying again" in history.said()
    history.tell(messages.Resumed("d2"))
    assert "d2: reconnected after 7 s" in history.said()
    assert history.exited("worker-0").exited("worker-1").end().exit_code == 0
    assert "suspect" not in history.said()
    assert history.said().count("connection lost") == 1


def test_each_cut_of_a_host_is_said() -> None:
    history = cut(two_hosts()).tell(messages.Resumed("d2"))
    cut(history).tell(messages.Resumed("d2"))
    assert history.said().count("d2: connection lost, trying again") == 2
    assert history.said().count("d2: reconnected after") == 2


def test_a_host_whose_connection_is_cut_is_lost_when_its_lease_is_over_and_not_before() -> None:
    history = cut(two_hosts()).beat_to(44, "d1")
    assert history.outcome is None
    assert Drop("d2") not in history.done
    history.beat_to(46, "d1")
    assert Drop("d2") in history.done
    history.exited("worker-0", None, signal="TERM", stopped=True)
    outcome = history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1")).end()
    assert outcome.exit_code == 7
    assert "its connection was cut, and nothing came for 45 s" in outcome.message


def test_a_host_that_is_silent_without_a_cut_is_lost_when_its_lease_is_over_too() -> None:
    history = two_hosts().beat_to(44, "d1")
    assert "d2 has been silent for 15 s (suspect); it counts as lost after 45 s" in history.said()
    assert Drop("d2") not in history.done
    assert Drop("d2") in history.beat_to(46, "d1").done


def test_an_agent_that_is_gone_when_the_connection_is_made_again_is_lost_at_once() -> None:
    history = cut(two_hosts()).beat_to(3, "d1").lost("d2")
    assert Drop("d2") in history.done
    assert "failed" not in history.said()


def test_a_host_whose_connection_is_cut_as_it_is_told_to_end_is_waited_for() -> None:
    history = two_hosts().exited("worker-0").exited("worker-1")
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Cleared("d2")).tell(agent_messages.Bye("d1"))
    assert EndAgent("d2") in history.done
    cut(history).tick_to(20)
    assert history.outcome is None
    outcome = history.tell(messages.Resumed("d2")).tell(agent_messages.Bye("d2")).end()
    assert (outcome.exit_code, outcome.survivors) == (0, ())


def test_a_second_interrupt_waits_for_no_connection_to_be_made_again() -> None:
    history = cut(two_hosts().tick_to(8)).interrupt("INT").interrupt("INT")
    history.exited("worker-0", None, signal="KILL", stopped=True)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1"))
    assert history.end().exit_code == 130
    assert history.now < 40


def test_the_cut_of_a_host_that_is_gone_says_nothing() -> None:
    history = cut(two_hosts().lost("d2"))
    assert "connection lost" not in history.said()
