"""Scripted histories of starts: every host answers before anything runs, and all bad ones are told at once."""

from __future__ import annotations

import pytest
from history import WALL, History
from sample_plan import sample_plan

from distrun import report
from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.plan import Sync
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.messages import Begin, Drop, EndAgent, Prepare, SendRuntime, Settle, Spawn

HOSTS = ("d1", "d2", "d3", "d4", "d5")


def gathering(hosts: tuple[str, ...] = HOSTS, **limits: float) -> History:
    return History(sample_plan(workers=len(hosts), servers=0, hosts=hosts, **limits))


def prepared(**limits: float) -> History:
    """All hosts ready, and the preparation begun."""
    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"), **limits)
    return History(plan, has_preparation=True).gather()


def settling(**limits: float) -> History:
    """Files are on all hosts, and what came with them is to be activated and looked at."""
    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"), **limits)
    plan = plan._replace(sync=Sync("/src", 1, 1), activate=". ./env.sh")
    return History(plan, has_preparation=True).gather().beat_to(200).tell(messages.AllPrepared())


# ---------------------------------------------------------------------- hosts


def test_nothing_is_spawned_before_the_last_host_is_ready() -> None:
    history = gathering(("d1", "d2"))
    assert history.hello("d1").ready("d1").hello("d2").beat_to(8).did(Spawn) == []
    assert len(history.ready("d2").did(Spawn)) == 2


def test_hosts_without_the_gpus_that_were_asked_for_are_a_mistake_in_what_was_typed() -> None:
    history = gathering(("d1", "d2")).hello("d1").ready("d1").hello("d2")
    outcome = history.bad("d2", "gpus", "gpus=4 for d2 (hosts:2), but there are 2 GPUs", fix="correct gpus=").end()
    assert (outcome.exit_code, outcome.reason) == (2, "preflight")
    assert outcome.message == "d2 cannot be used: gpus=4 for d2 (hosts:2), but there are 2 GPUs"
    both = gathering(("d1", "d2")).bad("d1", "gpus", "too few").bad("d2", "auth", "Permission denied").end()
    assert both.exit_code == 3


def test_all_bad_hosts_are_told_at_once_and_nothing_was_started_anywhere() -> None:
    history = gathering().hello("d1").ready("d1").hello("d3").ready("d3").hello("d5")
    history.bad("d4", "timeout", "no answer within 10 s", fix="ping d4").bad("d2", "auth", "Permission denied")
    assert history.outcome is None
    outcome = history.ready("d5").end()
    assert (outcome.exit_code, outcome.reason) == (3, "preflight")
    assert outcome.message == "2 of 5 hosts cannot be used: d2 (auth), d4 (timeout)"
    assert outcome.problems == (
        Problem("d2", "auth", "Permission denied"),
        Problem("d4", "timeout", "no answer within 10 s", "ping d4"),
    )
    assert history.did(Spawn) == []
    assert {end.host for end in history.did(EndAgent)} == {"d1", "d3", "d5"}
    assert {drop.host for drop in history.did(Drop)} == {"d2", "d4"}
    assert outcome.survivors == ()


def test_the_other_hosts_are_waited_for_15_seconds_after_the_first_bad_one() -> None:
    history = gathering().beat_to(3).bad("d2", "auth").hello("d1").ready("d1").hello("d3")
    assert "waiting" not in history.said()
    history.beat_to(4.5, "d1", "d3")
    assert "d2 cannot be used; waiting up to 15 s to hear from d3, d4, d5" in history.said()
    assert history.beat_to(17.5, "d1", "d3").outcome is None
    outcome = history.beat_to(22, "d1", "d3").end()
    assert history.now < 22
    assert outcome.exit_code == 3
    assert outcome.message == "d2 cannot be used: no route to host; not heard of by then: d3, d4, d5"
    assert [problem.host for problem in outcome.problems] == ["d2"]


def test_the_wait_for_the_others_ends_with_the_time_for_the_start() -> None:
    history = gathering(("d1", "d2"), start_s=5.0).bad("d2", "auth").beat_to(6.5)
    assert history.end().exit_code == 3
    assert history.now < 9


def test_a_refusal_of_the_agent_is_a_problem_with_its_kind_and_fix() -> None:
    history = gathering(("d1", "d2")).hello("d1").ready("d1").hello("d2")
    history.bad("d2", "module", "no module numpy", refused=True, fix="pip install numpy")
    assert history.end().problems == (Problem("d2", "module", "no module numpy", "pip install numpy"),)


def test_agents_that_just_did_not_come_up_give_6_unless_another_host_has_a_known_problem() -> None:
    history = gathering(("d1", "d2", "d3")).bad("d1").hello("d3").ready("d3")
    outcome = history.bad("d2", text="exit code 9").end()
    assert (outcome.exit_code, outcome.message) == (6, "no agent on d1: no route to host")
    assert len(outcome.problems) == 2
    mixed = gathering(("d1", "d2")).bad("d1").bad("d2", "dns", "no such name").end()
    assert (mixed.exit_code, mixed.reason) == (3, "preflight")
    assert mixed.message == "2 of 2 hosts cannot be used: d1 (other), d2 (dns)"


def test_a_host_lost_before_it_was_ready_is_a_lost_host_and_the_others_are_heard_first() -> None:
    history = gathering(("d1", "d2")).hello("d1").lost("d1")
    assert history.outcome is None
    outcome = history.hello("d2").ready("d2").end()
    assert (outcome.exit_code, outcome.message) == (7, "lost d1: its connection ended")
    assert history.did(Spawn) == []


@pytest.mark.parametrize(("signal", "code"), [("INT", 130), ("TERM", 143)])
def test_an_interrupt_ends_the_wait_and_a_bad_host_known_by_then_came_first(signal: str, code: int) -> None:
    assert gathering().hello("d1").beat_to(2).interrupt(signal).end().exit_code == code
    history = gathering().hello("d1").beat_to(2).bad("d2", "auth").beat_to(3).interrupt(signal)
    outcome = history.end()
    assert history.now < 6
    assert (outcome.exit_code, [problem.host for problem in outcome.problems]) == (3, ["d2"])


def test_a_bad_host_that_is_reported_after_an_interrupt_changes_nothing() -> None:
    history = gathering(("d1", "d2")).hello("d1").beat_to(2).interrupt("INT")
    assert history.bad("d2", "auth").end().exit_code == 130


def test_a_long_list_of_bad_hosts_is_cut_in_the_message_only() -> None:
    hosts = tuple("d%d" % number for number in range(20))
    history = gathering(hosts)
    for host in hosts:
        history.bad(host, "timeout")
    outcome = history.end()
    assert outcome.message.endswith("d7 (timeout) and 12 more")
    assert len(outcome.problems) == 20


def test_an_agent_is_sent_the_runtime_that_it_asks_for() -> None:
    history = gathering(("d1",)).hello("d1").tell(agent_messages.Needed("d1", ""))
    assert history.did(Begin) == [Begin("d1")]
    assert history.did(SendRuntime) == [SendRuntime("d1")]
    assert history.tell(agent_messages.Needed("d1", "another")).did(SendRuntime) == [SendRuntime("d1")]


@pytest.mark.parametrize(("off", "words"), [(-301.0, "301 s behind"), (86400.0, "86400 s ahead of")])
def test_a_clock_that_is_minutes_off_is_a_problem_of_its_host(off: float, words: str) -> None:
    history = gathering(("d1", "d2")).hello("d1").ready("d1").hello("d2", time=WALL + off)
    outcome = history.end()
    assert outcome.exit_code == 3
    [problem] = outcome.problems
    assert (problem.host, problem.kind) == ("d2", "clock")
    assert "the clock of d2 is %s" % words in problem.text
    assert "chronyc makestep" in problem.fix
    assert "timedatectl set-ntp true" in problem.fix
    assert history.did(Begin) == [Begin("d1")]


def test_a_clock_that_is_seconds_off_is_worth_a_warning() -> None:
    history = gathering(("d1", "d2")).hello("d1").ready("d1").hello("d2", time=WALL + 299).ready("d2")
    assert "the clock of d2 is off by 299.0 s" in history.said()
    assert history.did(Spawn)


def test_a_hello_that_came_late_on_this_machine_is_no_wrong_clock() -> None:
    history = gathering(("d1",)).hello("d1", time=WALL - 1.3).ready("d1")
    assert "clock" not in history.said()


# ---------------------------------------------------------------------- preparation


def test_the_preparation_begins_when_all_hosts_are_ready_and_tasks_when_it_is_done() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2")), has_preparation=True)
    assert history.hello("d1").ready("d1").hello("d2").did(Prepare) == []
    assert history.ready("d2").did(Prepare) == [Prepare()]
    assert history.beat_to(300).did(Spawn) == []
    assert len(history.tell(messages.AllPrepared()).did(Spawn)) == 2
    assert history.did(Prepare) == [Prepare()]


def test_the_time_for_the_start_counts_from_the_end_of_the_preparation() -> None:
    history = prepared(start_s=20.0).beat_to(100).tell(messages.AllPrepared()).beat_to(115)
    assert history.outcome is None
    assert history.beat_to(121).end().exit_code == 6


def test_a_preparation_that_failed_gives_4_and_nothing_was_started() -> None:
    history = prepared().beat_to(3)
    history.tell(messages.PrepareFailed("d2", "rsync: No space left on device", WALL + 3, "a\nb"))
    outcome = history.end()
    culprit = history.culprit()
    assert (outcome.exit_code, outcome.reason) == (4, "sync")
    assert outcome.message == "the files did not reach d2: rsync: No space left on device"
    assert (culprit.host, culprit.reason) == ("d2", "a\nb")
    assert history.did(Spawn) == []
    assert len(history.did(EndAgent)) == 2


def test_a_preparation_may_fail_on_no_host_in_particular() -> None:
    outcome = prepared().tell(messages.PrepareFailed("", "there is no rsync here", WALL)).end()
    assert (outcome.exit_code, outcome.message) == (4, "the files did not reach the hosts: there is no rsync here")


def test_an_interrupt_during_the_preparation_ends_the_job_and_what_it_broke_is_no_cause() -> None:
    history = prepared().beat_to(3).interrupt("INT").tell(messages.PrepareFailed("d1", "cancelled", WALL + 3.1))
    outcome = history.end()
    assert (outcome.exit_code, outcome.reason) == (130, "interrupted")
    assert history.now < 4
    assert prepared().interrupt("INT").tell(messages.AllPrepared()).did(Spawn) == []


def test_a_preparation_that_failed_before_the_interrupt_is_the_cause_though_reported_after_it() -> None:
    history = History(sample_plan(workers=1, servers=0), obedient=False, has_preparation=True).gather().beat_to(3)
    history.interrupt("INT").tell(messages.PrepareFailed("d1", "disk full", WALL + 2.9)).tell(agent_messages.Bye("d1"))
    assert history.end().exit_code == 4


def test_a_host_lost_during_the_preparation_gives_7() -> None:
    assert prepared().lost("d2").end().exit_code == 7
    silent = prepared().beat_to(31, "d1")
    assert "d2 has been silent for 15 s" in silent.said()
    assert silent.end().exit_code == 7


def test_the_time_limit_of_the_job_counts_during_the_preparation() -> None:
    assert prepared(timeout_s=10.0).beat_to(10.5).end().exit_code == 124


# ---------------------------------------------------------------------- the report


def test_the_report_is_a_table_of_bad_hosts_with_what_to_type() -> None:
    history = gathering(("d1", "d2", "d3", "d4"))
    history.bad("d1", "auth", "Permission denied (publickey)", fix="ssh-copy-id d1")
    history.bad("d2", "timeout", "no answer within 10 s").bad("d3", "timeout", "no answer within 10 s")
    history.bad("d4", "activation", "it failed:\nconda: not found")
    assert report.failure(history.end()).splitlines() == [
        "host    kind        what was found",
        "d1      auth        Permission denied (publickey)",
        "                    -> ssh-copy-id d1",
        "d2, d3  timeout     no answer within 10 s",
        "d4      activation  it failed:",
        "                    conda: not found",
        "nothing was started on any host",
    ]


def test_what_differs_in_the_hosts_name_only_is_one_row() -> None:
    history = gathering(("d1", "d2", "d11"))
    for host in ("d1", "d2", "d11"):
        history.bad(host, "folder", "/x does not exist on %s" % host, fix="mount it on %s" % host)
    assert report.failure(history.end()).splitlines() == [
        "host         kind    what was found",
        "d1, d2, d11  folder  /x does not exist on HOST",
        "                     -> mount it on HOST",
        "nothing was started on any host",
    ]


def test_the_report_of_files_that_did_not_arrive_has_the_last_words() -> None:
    history = prepared().tell(messages.PrepareFailed("d2", "code 11", WALL, "rsync: write failed\nNo space left"))
    assert report.failure(history.end()).splitlines() == [
        "first failure: d2 did not get the files",
        "    | rsync: write failed",
        "    | No space left",
    ]


def test_two_machines_with_one_address_for_data_cannot_take_part_in_a_job_with_a_scheduler() -> None:
    history = History(sample_plan(hosts=("d1", "d2")))
    history.hello("d1", host="one").hello("d2", host="two").ready("d1")
    history.tell(agent_messages.AgentReady("d2", "10.0.0.1"))
    outcome = history.end()
    assert (outcome.exit_code, outcome.problems[0].kind) == (3, "interface")
    assert "d2 and d1 both have 10.0.0.1 as their address for data" in outcome.message
    assert "--subnet CIDR" in outcome.problems[0].fix


def test_two_names_of_one_machine_may_have_one_address_and_without_servers_it_is_a_warning() -> None:
    history = History(sample_plan(hosts=("d1", "d2")))
    history.hello("d1", host="one").hello("d2", host="one").ready("d1").tell(
        agent_messages.AgentReady("d2", "10.0.0.1")
    )
    assert history.did(Spawn)
    history = History(sample_plan(servers=0, hosts=("d1", "d2")))
    history.hello("d1", host="one").hello("d2", host="two").ready("d1").tell(
        agent_messages.AgentReady("d2", "10.0.0.1")
    )
    assert history.did(Spawn)
    assert "both have 10.0.0.1" in history.said()


# ---------------------------------------------------------------------- what came with the files


def test_tasks_start_when_every_host_has_settled_with_what_was_copied() -> None:
    history = settling()
    assert history.did(Settle) == [Settle("d1"), Settle("d2")]
    assert history.settled("d1").beat_to(210).did(Spawn) == []
    assert "waiting for the preparation of d2" in history.said()
    assert len(history.settled("d2").did(Spawn)) == 2
    assert history.settled("d2").did(Settle) == [Settle("d1"), Settle("d2")]


def test_without_anything_to_activate_or_to_import_no_host_is_asked_again() -> None:
    plan = sample_plan(workers=2, servers=0, hosts=("d1", "d2"))._replace(sync=Sync("/src", 1, 1))
    history = History(plan, has_preparation=True).gather().tell(messages.AllPrepared())
    assert history.did(Settle) == []
    assert len(history.did(Spawn)) == 2


def test_hosts_that_do_not_settle_are_told_together_and_nothing_was_started() -> None:
    history = settling().bad("d2", "activation", "it failed", refused=True).beat_to(203)
    assert "d2 cannot be used; waiting up to 15 s to hear from d1" in history.said()
    outcome = history.bad("d1", "module", "no zmq", fix="pip", refused=True).end()
    assert (outcome.exit_code, outcome.reason) == (3, "preflight")
    assert outcome.problems == (Problem("d1", "module", "no zmq", "pip"), Problem("d2", "activation", "it failed"))
    assert history.did(Spawn) == []


def test_settling_has_its_time_as_the_start_has() -> None:
    history = settling(start_s=20.0).settled("d1").beat_to(219)
    assert history.outcome is None
    assert history.beat_to(221).end().exit_code == 6


def test_a_host_lost_while_it_settles_and_an_interrupt_end_the_job() -> None:
    assert settling().settled("d1").lost("d2").end().exit_code == 7
    history = settling().bad("d2", "activation", refused=True).interrupt("INT")
    assert history.end().exit_code == 3
    assert settling().interrupt("INT").settled("d1").settled("d2").did(Spawn) == []


def test_an_agent_that_cannot_be_reached_any_more_during_the_preparation_ends_the_job() -> None:
    outcome = prepared().bad("d2").end()
    assert (outcome.exit_code, outcome.message) == (6, "no agent on d2: no route to host")


def test_the_wait_for_other_hosts_runs_from_the_first_that_cannot_be_used() -> None:
    history = gathering(start_s=100.0).beat_to(40).bad("d1").beat_to(50).bad("d2").beat_to(54.5)
    assert history.supervisor.wake_s() == pytest.approx(0.5)
    assert history.outcome is None
    assert history.beat_to(60).outcome is not None
