"""Scripted histories: events at times, then what the supervisor did. No process, no clock, no sleep."""

from __future__ import annotations

import pytest
from history import WALL, History
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages, facts
from distrun_runtime.coordinator import failures, messages
from distrun_runtime.coordinator.messages import Announce, Begin, Drop, EndAgent, SignalTasks, Spawn, StopTasks
from distrun_runtime.coordinator.supervisor import Supervisor

TERM = (("TERM", 10.0), ("KILL", 0.0))
INT = (("INT", 7.0), ("TERM", 2.0), ("KILL", 0.0))
KILL = (("KILL", 0.0),)


# ---------------------------------------------------------------------- start


def test_an_agent_that_answers_is_given_its_share_of_the_plan() -> None:
    assert History(sample_plan()).hello("d1").did(Begin) == [Begin("d1")]


def test_a_task_is_spawned_when_its_references_are_known_and_not_before() -> None:
    history = History(sample_plan(workers=1, servers=1)).hello("d1").ready("d1")
    assert [spawn.task for spawn in history.did(Spawn)] == ["scheduler"]
    history.started("scheduler").publish("scheduler", address="10.0.0.1", port=9091)
    assert [spawn.task for spawn in history.did(Spawn)] == ["scheduler", "server-0", "worker-0"]
    assert history.did(Spawn)[-1].env == {"DMLC_NODE_HOST": "10.0.0.1", "DMLC_PS_ROOT_PORT": "9091"}


def test_a_port_that_an_agent_holds_is_a_fact_for_tasks_on_other_hosts() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2"))).hello("d1").hello("d2")
    history.ready("d1", master=4000)
    assert history.supervisor.roster.facts["d1/port:master"] == "4000"
    assert [spawn.task for spawn in history.ready("d2").did(Spawn)] == ["worker-0", "worker-1"]


def test_what_does_not_start_in_time_is_named_and_the_code_is_6() -> None:
    history = History(sample_plan(workers=2, servers=1, hosts=("d1", "d2"), start_s=20.0)).gather()
    outcome = history.started("scheduler").beat_to(25).end()
    assert (outcome.exit_code, outcome.reason) == (6, "start_failed")
    assert outcome.message.endswith("(--start-timeout): scheduler on d1 (server-0 on d1 and 2 more need its address)")
    assert "--start-timeout" in outcome.message


def test_agents_that_do_not_answer_in_time_are_named_and_the_code_is_6() -> None:
    history = History(sample_plan(hosts=("d1", "d2", "d3"), start_s=20.0)).hello("d1").ready("d1").hello("d3")
    outcome = history.beat_to(25, "d1", "d3").end()
    assert (outcome.exit_code, outcome.reason) == (6, "start_failed")
    assert outcome.message == "not started within 20 s (--start-timeout): the agent on d2; the preparation of d3"


def test_a_slow_start_says_what_it_waits_for() -> None:
    history = History(sample_plan()).beat_to(4.5)
    assert history.said() == ""
    assert "waiting for the agent on d1" in history.beat_to(5.5).said()


def test_an_agent_that_ends_before_its_hello_is_a_failed_start() -> None:
    outcome = History(sample_plan()).lost("d1").end()
    assert (outcome.exit_code, outcome.reason) == (6, "start_failed")


def test_an_agent_of_another_protocol_version_is_refused() -> None:
    outcome = History(sample_plan()).hello("d1", version=99).end()
    assert (outcome.exit_code, outcome.reason) == (3, "preflight")
    assert "version 99" in outcome.message


def test_an_agent_that_refuses_the_job_is_a_failed_preflight_and_says_why() -> None:
    history = History(sample_plan(hosts=("d1", "d2"))).hello("d1").ready("d1").hello("d2")
    outcome = history.tell(agent_messages.StartFailed("d2", "no interface is called x9", WALL, refused=True)).end()
    assert (outcome.exit_code, outcome.reason) == (3, "preflight")
    assert outcome.message == "d2 cannot be used: no interface is called x9"
    assert "no interface" not in history.said()


def test_a_command_that_does_not_exist_gives_127_and_the_reason() -> None:
    history = History(sample_plan(workers=1, servers=0)).hello("d1").ready("d1")
    outcome = history.exited("worker-0", 127, reason="nosuch: not found in PATH").end()
    assert outcome.exit_code == 127
    assert outcome.message == "worker-0 on d1 could not run (exit code 127): nosuch: not found in PATH"
    assert "worker-0 on d1: exit code 127; stopping the job" in history.said()
    assert "nosuch" not in history.said()


# ---------------------------------------------------------------------- success


def test_all_workers_with_0_succeed_and_servers_are_asked_to_stop_at_once() -> None:
    history = History(sample_plan()).start().exited("worker-0").exited("worker-1")
    outcome = history.end()
    assert history.stops() == [(("worker-0", "worker-1", "server-0", "scheduler"), TERM)]
    assert (outcome.exit_code, outcome.reason) == (0, "succeeded")
    assert history.now < 1
    assert [task.state for task in outcome.tasks] == ["stopped", "stopped", "exited", "exited"]


def test_a_server_that_we_stopped_is_no_failure_whatever_its_code() -> None:
    history = History(sample_plan(), obedient=False).start().exited("worker-0").exited("worker-1")
    history.killed("server-0", "KILL", stopped=True).exited("scheduler", 3, stopped=True)
    history.tell(agent_messages.Cleared("d1")).tell(agent_messages.Bye("d1"))
    assert history.end().exit_code == 0


def test_servers_that_are_the_users_own_command_may_end_by_themselves_for_3_seconds() -> None:
    history = History(sample_plan(own_servers=False)).start().exited("worker-0").exited("worker-1")
    assert history.beat_to(2.5).stops() == []
    history.exited("server-0").exited("scheduler")
    assert history.end().exit_code == 0
    assert history.now < 3
    slow = History(sample_plan(own_servers=False)).start().exited("worker-0").exited("worker-1").beat_to(3.5)
    assert len(slow.stops()) == 1
    assert slow.end().exit_code == 0


def test_a_server_that_crashes_after_the_workers_are_done_changes_nothing() -> None:
    history = History(sample_plan(own_servers=False)).start().exited("worker-0").exited("worker-1")
    assert history.killed("server-0", "SEGV").end().exit_code == 0
    assert "after the workers were done" in history.said()


def test_a_server_death_reported_before_but_stamped_after_the_last_worker_changes_nothing() -> None:
    history = History(sample_plan(hosts=("d1", "d2")), obedient=False).start().exited("worker-0", at=1)
    history.now = 2
    history.killed("server-0", "SEGV", at=1.6).exited("worker-1", at=1.5)
    assert history.end().exit_code == 0


# ---------------------------------------------------------------------- failure


def test_first_failing_task_gives_the_exit_code_and_stops_everything_at_once() -> None:
    history = History(sample_plan()).start().exited("worker-1", 3)
    assert history.stops() == [(("worker-0", "worker-1", "server-0", "scheduler"), TERM)]
    outcome = history.end()
    culprit = history.culprit()
    assert (outcome.exit_code, outcome.reason) == (3, "task_failed")
    assert (culprit.task, culprit.host) == ("worker-1", "d1")
    assert outcome.message == "worker-1 on d1 failed with exit code 3"
    assert [task.state for task in outcome.tasks] == ["stopped", "stopped", "stopped", "failed"]


def test_a_signal_gives_128_and_its_number() -> None:
    outcome = History(sample_plan()).start().killed("worker-0", "SEGV").end()
    assert outcome.exit_code == 139
    assert outcome.message == "worker-0 on d1 was ended by signal SEGV"


def test_the_earliest_stamp_is_the_culprit_even_if_it_is_reported_later() -> None:
    history = History(sample_plan(hosts=("d1", "d2")), obedient=False).start()
    history.now = 10
    history.exited("worker-0", 5, at=9.9).exited("worker-1", 4, at=9.5)
    assert history.end().exit_code == 4
    assert "worker-0 on d1: exit code 5; stopping the job" in history.said()
    assert "worker-1 on d2 failed before worker-0 on d1, but the report of it came later" in history.said()
    told = [(each.tasks, each.repeats) for each in history.did(Announce) if each.tasks]
    assert told == [(("worker-0",), "worker-0"), (("worker-1", "worker-0"), "")]


def test_a_failure_reported_after_the_deadline_changes_nothing() -> None:
    history = History(sample_plan(hosts=("d1", "d2")), obedient=False).start().beat_to(10)
    history.exited("worker-0", 5, at=9.9).beat_to(11.5).exited("worker-1", 4, at=9.5)
    assert history.end().exit_code == 5


def test_stamps_of_a_host_whose_clock_is_wrong_are_corrected() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2")), obedient=False)
    history.hello("d1").hello("d2", time=WALL - 200).ready("d1").ready("d2")
    history.started("worker-0").started("worker-1").beat_to(10)
    history.exited("worker-0", 5, at=9.0).exited("worker-1", 4, at=9.5 - 200)
    assert history.end().exit_code == 5
    assert "clock of d2 is off by -200.0 s" in history.said()


def test_a_consequence_is_the_culprit_when_it_lost_no_task_of_the_job_and_says_so() -> None:
    history = History(sample_plan()).start().publish("worker-0", lost_peer="a peer", message="no beat")
    outcome = history.exited("worker-0", 1).end()
    culprit = history.culprit()
    assert outcome.exit_code == 1
    assert (culprit.consequence, culprit.lost_peer) == (True, "a peer")
    assert "after it lost a peer; no other failure is known" in outcome.message
    assert "worker-0 on d1: exit code 1 (it lost a peer); stopping the job" in history.said()


@pytest.mark.parametrize(("code", "signal", "expected"), [(1, None, 1), (None, "KILL", 137)])
def test_a_server_that_dies_before_the_workers_fails_the_job_at_once(
    code: int | None, signal: str | None, expected: int
) -> None:
    history = History(sample_plan()).start().exited("server-0", code, signal=signal)
    assert len(history.stops()) == 1
    outcome = history.end()
    assert outcome.exit_code == expected
    assert history.culprit().task == "server-0"


def test_a_server_that_ends_with_0_fails_the_job_with_1_after_10_seconds() -> None:
    history = History(sample_plan()).start().exited("server-0", 0).beat_to(9.5)
    assert history.stops() == []
    outcome = history.beat_to(10.5).end()
    assert (outcome.exit_code, outcome.reason) == (1, "task_failed")
    assert history.culprit().task == "server-0"
    assert "ended before the workers" in outcome.message


def test_a_server_that_ends_with_0_just_before_the_workers_is_no_failure() -> None:
    history = History(sample_plan()).start().exited("server-0", 0).beat_to(8)
    assert history.exited("worker-0").exited("worker-1").end().exit_code == 0


def test_a_worker_that_fails_for_itself_after_a_servers_early_end_is_the_culprit() -> None:
    history = History(sample_plan()).start().exited("server-0", 0).beat_to(2)
    assert history.exited("worker-0", 9).end().exit_code == 9


def test_tasks_that_we_stopped_are_no_failures() -> None:
    history = History(sample_plan(), obedient=False).start()
    history.now = 5
    history.exited("worker-0", 3, at=5).killed("worker-1", "TERM", at=4.9, stopped=True)
    history.exited("server-0", 1, at=4.8, stopped=True)
    assert history.end().exit_code == 3


# ---------------------------------------------------------------------- interrupts and limits


def test_first_interrupt_goes_to_the_workers_and_servers_stay_until_those_ended() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("INT")
    assert history.stops() == [(("worker-0", "worker-1"), INT)]
    history.exited("worker-0", 0, stopped=True)
    assert len(history.stops()) == 1
    history.killed("worker-1", "INT", stopped=True)
    assert history.stops()[1:] == [(("worker-0", "worker-1", "server-0", "scheduler"), TERM)]
    outcome = history.end()
    assert (outcome.exit_code, outcome.reason, outcome.job_state) == (130, "interrupted", "killed")


def test_second_interrupt_kills_everything() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("INT").beat_to(1).interrupt("INT")
    assert history.stops()[1:] == [(("worker-0", "worker-1", "server-0", "scheduler"), KILL)]
    assert history.end().exit_code == 130


def test_a_signal_that_is_forwarded_is_given_to_workers_that_run() -> None:
    plan = sample_plan(hosts=("d1", "d2"))._replace(forward_signals=("USR1",))
    history = History(plan).start().exited("worker-0").tell(agent_messages.TasksSignal("", "USR1"))
    assert history.did(SignalTasks) == [SignalTasks(plan.task("worker-1").host, ("worker-1",), "USR1")]
    assert "SIGUSR1 was given to worker-1" in history.said()
    assert history.exited("worker-1").end().exit_code == 0


def test_a_signal_that_agents_got_is_given_to_the_workers_of_other_hosts_once_and_again_if_it_is_repeated() -> None:
    plan = sample_plan(workers=3, servers=0, hosts=("d1", "d2", "d3"))._replace(forward_signals=("USR1",))
    history = History(plan).start()
    others = [SignalTasks(plan.task(name).host, (name,), "USR1") for name in ("worker-1", "worker-2")]
    assert [plan.task("worker-0").host, *(each.host for each in others)] == ["d1", "d2", "d3"]
    for host in ("d1", "d2", "", "d3"):  # the queue system signals all, and the launcher too
        history.tell(agent_messages.TasksSignal(host, "USR1")).beat_to(history.now + 2)
    assert history.did(SignalTasks) == others
    assert history.said().count("SIGUSR1 was given to worker-0") == 1
    history.tell(agent_messages.TasksSignal("d1", "USR1"))
    assert history.did(SignalTasks) == others * 2
    history.beat_to(history.now + 31).tell(agent_messages.TasksSignal("", "USR1"))
    assert [each.tasks for each in history.did(SignalTasks)[4:]] == [("worker-0",), ("worker-1",), ("worker-2",)]


def test_a_task_that_fills_the_disk_of_the_logs_ends_the_job() -> None:
    history = History(sample_plan()).start()
    history.tell(
        messages.DiskFilled(history.plan.task("worker-0").host, "worker-0", "has filled the disk", history.now)
    )
    outcome = history.end()
    assert outcome.exit_code == facts.EXIT_OUTPUT
    assert "worker-0 on d1 has filled the disk" in outcome.message


def test_a_second_claim_of_a_place_while_the_job_is_being_stopped_is_only_said() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("INT")
    history.tell(messages.PlaceClaimedTwice("d1", "10.0.0.1:5", "10.0.0.2:6", history.now))
    assert "two agents claim place d1" in history.said()
    assert history.end().exit_code == facts.EXIT_INTERRUPTED


def test_a_signal_that_client_and_coordinator_got_is_given_once_and_again_if_the_client_repeats_it() -> None:
    plan = sample_plan(workers=1, servers=0)._replace(forward_signals=("USR1",))
    history = History(plan).start()
    history.tell(agent_messages.TasksSignal("", "USR1", by="client")).tell(agent_messages.TasksSignal("", "USR1"))
    assert len(history.did(SignalTasks)) == 1
    assert len(history.tell(agent_messages.TasksSignal("", "USR1", by="client")).did(SignalTasks)) == 2


def test_a_signal_that_is_not_forwarded_changes_nothing_and_says_what_to_type() -> None:
    history = History(sample_plan()).start().tell(agent_messages.TasksSignal("", "USR2"))
    assert history.did(SignalTasks) == []
    assert "--forward-signal USR2 gives it to workers" in history.said()
    assert history.exited("worker-0").exited("worker-1").end().exit_code == 0


@pytest.mark.parametrize(("signal", "code"), [("TERM", 143), ("HUP", 129), ("", 129)])
def test_termination_asks_everything_to_go(signal: str, code: int) -> None:
    history = History(sample_plan()).start().interrupt(signal)
    assert history.stops() == [(("worker-0", "worker-1", "server-0", "scheduler"), TERM)]
    outcome = history.end()
    assert (outcome.exit_code, outcome.reason) == (code, "terminated")


def test_termination_after_an_interrupt_is_harder_but_the_interrupt_came_first() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("INT").beat_to(0.5).interrupt("TERM")
    # What is left of the grace time that began with the interrupt.
    assert [steps for _, steps in history.stops()] == [INT, (("TERM", 9.5), ("KILL", 0.0))]
    assert history.end().exit_code == 130


def test_an_interrupt_is_over_within_the_grace_time_though_workers_and_servers_are_stubborn() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("INT").beat_to(9.0)
    for name in ("worker-0", "worker-1"):
        history.killed(name, "KILL", stopped=True)
    (steps,) = [steps for _, steps in history.stops()[1:]]
    assert steps[0][0] == "TERM"
    assert steps[0][1] == pytest.approx(1.0, abs=0.2)
    assert steps[1][0] == "KILL"


def test_hangup_and_termination_together_do_not_kill() -> None:
    history = History(sample_plan(), obedient=False).start().interrupt("HUP").interrupt("TERM")
    assert [steps for _, steps in history.stops()] == [TERM]


def test_a_failure_before_the_interrupt_keeps_its_code_even_if_it_is_reported_after() -> None:
    history = History(sample_plan(), obedient=False).start().beat_to(5).interrupt("INT")
    assert history.exited("worker-0", 3, at=4.9).end().exit_code == 3
    plain = History(sample_plan(), obedient=False).start().exited("worker-0", 3).interrupt("INT")
    assert plain.end().exit_code == 3
    assert len(plain.stops()) == 1  # the first Ctrl-C of a job that is being stopped only says so
    assert "again to kill" in plain.said()


def test_a_worker_that_fails_by_itself_after_the_interrupt_does_not_change_the_code() -> None:
    history = History(sample_plan(), obedient=False).start().beat_to(5).interrupt("INT").beat_to(5.5)
    assert history.exited("worker-0", 3, at=5.4).end().exit_code == 130


def test_an_interrupt_after_all_workers_succeeded_only_hurries() -> None:
    history = History(sample_plan(), obedient=False).start().exited("worker-0").exited("worker-1").interrupt("INT")
    assert history.stops()[-1][1] == KILL
    assert history.end().exit_code == 0


def test_the_time_limit_gives_124() -> None:
    history = History(sample_plan(timeout_s=30.0)).start().beat_to(29.5)
    assert history.stops() == []
    assert history.beat_to(30).stops() != []
    outcome = history.end()
    assert (outcome.exit_code, outcome.reason) == (124, "timeout")
    names = "worker-0 on d1, worker-1 on d1 had not ended"
    assert outcome.message == "the job did not end within 30 s (--timeout): " + names


def test_the_time_limit_names_only_workers_that_had_not_ended() -> None:
    history = History(sample_plan(workers=3, timeout_s=30.0)).start().exited("worker-1").beat_to(31)
    assert history.end().message.endswith("(--timeout): worker-0 on d1, worker-2 on d1 had not ended")


def test_the_time_limit_names_what_had_not_started() -> None:
    history = History(sample_plan(hosts=("d1", "d2"), timeout_s=20.0)).hello("d1").ready("d1").tick_to(21)
    assert history.end().message.endswith("(--timeout): it still waited for the agent on d2")


def test_long_limits_are_told_in_minutes_and_hours() -> None:
    history = History(sample_plan(timeout_s=3600.0)).start()
    assert "the job did not end within 1 h (--timeout)" in history.beat_to(3601.0).end().message


# ---------------------------------------------------------------------- hosts


def test_a_lost_host_gives_7_and_the_others_are_stopped() -> None:
    history = History(sample_plan(hosts=("d1", "d2"))).start().lost("d2")
    assert [stop.host for stop in history.did(StopTasks)] == ["d1"]
    outcome = history.end()
    assert (outcome.exit_code, outcome.reason) == (7, "host_lost")
    assert outcome.message == "lost d2: its connection ended"
    assert tuple(map(str, outcome.survivors)) == ("worker-1 (pid 100) on d2",)
    assert Drop("d2") in history.done
    assert {task.name: task.state for task in outcome.tasks}["worker-1"] == "failed"


def test_the_message_is_one_line_whatever_the_agent_said() -> None:
    history = History(sample_plan()).start()
    why = "it ended with code 1\nTraceback\n  File x\nKeyError: 5"
    outcome = history.tell(messages.AgentLost("d1", why, WALL)).end()
    assert outcome.message == "lost d1: it ended with code 1 ... KeyError: 5"
    assert "\n" not in outcome.message
    assert history.culprit().reason == why


def test_the_times_of_suspicion_and_loss_are_the_plans() -> None:
    history = History(sample_plan(suspect_s=2.0, lost_s=4.0, lease_s=6.0)).start().tick_to(1.5)
    assert "silent" not in history.said()
    assert "silent for 2 s (suspect); it counts as lost after 4 s" in history.tick_to(2.5).said()
    outcome = history.tick_to(4.5).end()
    assert outcome.message == "lost d1: silent for 4 s"


def test_a_suspected_agent_that_answers_is_trusted_again() -> None:
    history = History(sample_plan()).start().tick_to(20).tell(agent_messages.Pong("d1"))
    assert "d1 answers again" in history.said()
    assert history.tick_to(45).outcome is None


def test_agents_are_not_blamed_for_a_time_in_which_we_slept() -> None:
    history = History(sample_plan()).start()
    history.now = 600
    history.tell(messages.Tick(WALL + 600))
    assert history.outcome is None
    assert "silent" not in history.said()


def test_a_host_whose_tasks_had_all_ended_may_go() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2"))).start().exited("worker-1").lost("d2")
    assert "all its tasks had ended" in history.said()
    assert history.exited("worker-0").end().exit_code == 0


def test_tasks_that_their_agent_ended_unasked_are_a_lost_host() -> None:
    history = History(sample_plan()).start().killed("worker-0", "TERM", stopped=True)
    outcome = history.end()
    assert outcome.exit_code == 7
    assert outcome.message == "lost d1: its agent ended worker-0 without being told to, and did not say why"


def ending(why: str, by_user: bool = False) -> failures.Outcome:
    history = History(sample_plan(hosts=("d1", "d2"))).start().beat_to(5)
    history.tell(agent_messages.AgentEnding("d2", why, WALL + 5, by_user))
    assert [stop.host for stop in history.did(StopTasks)] == ["d1", "d2"]
    return history.end()


def test_a_job_that_distrun_kill_ends_on_a_host_is_no_lost_host() -> None:
    outcome = ending("distrun kill asked for it", by_user=True)
    assert (outcome.exit_code, outcome.reason, outcome.job_state) == (143, "terminated", "killed")
    assert outcome.message == "stopped by distrun kill on d2"


def test_an_agent_that_ends_its_tasks_for_another_reason_is_a_lost_host_with_that_reason() -> None:
    outcome = ending("it got SIGTERM, as when that machine is shut down")
    assert (outcome.exit_code, outcome.reason) == (7, "host_lost")
    assert outcome.message == "lost d2: it got SIGTERM, as when that machine is shut down"


def test_an_agent_that_ends_nothing_may_go() -> None:
    history = History(sample_plan(workers=2, servers=0, hosts=("d1", "d2"))).start().exited("worker-1")
    history.tell(agent_messages.AgentEnding("d2", "its guard died", WALL))
    assert history.did(StopTasks) == []
    assert history.exited("worker-0").end().exit_code == 0


# ---------------------------------------------------------------------- end


def test_an_agent_is_let_go_only_when_nothing_is_left_and_all_output_has_come() -> None:
    history = History(sample_plan(workers=1, servers=0), obedient=False).start()
    history.exited("worker-0", 0, out=10)
    assert history.did(EndAgent) == []
    history.tell(agent_messages.Cleared("d1"))
    assert history.did(EndAgent) == []
    history.tell(agent_messages.Output("d1", "worker-0", "out", 0, b"0123456789"))
    assert history.did(EndAgent) == [EndAgent("d1")]
    assert history.tell(agent_messages.Bye("d1")).outcome is not None


def test_output_that_never_comes_is_not_waited_for_longer_than_10_seconds() -> None:
    history = History(sample_plan(workers=1, servers=0), obedient=False).start().exited("worker-0", 0, out=10)
    history.tell(agent_messages.Cleared("d1")).beat_to(10.5)
    assert history.did(EndAgent) == [EndAgent("d1")]


def test_a_job_ends_although_nothing_obeys_and_names_what_may_be_left() -> None:
    history = History(sample_plan(workers=1, servers=0), obedient=False).start().interrupt("TERM")
    outcome = history.beat_to(60).end()
    assert 20 <= history.now <= 21  # grace, 5 s for the agent to report, 5 s from `end` to `bye`
    assert tuple(map(str, outcome.survivors)) == ("worker-0 (pid 100) on d1", "the agent on d1")
    assert Drop("d1") in history.done


def test_what_an_agent_could_not_end_is_named() -> None:
    history = History(sample_plan(workers=1, servers=0), obedient=False).start().exited("worker-0", 0)
    history.tell(agent_messages.Cleared("d1", ((77, "sleep"),))).tell(agent_messages.Bye("d1"))
    assert tuple(map(str, history.end().survivors)) == ("pid 77 (sleep) on d1",)


def test_frames_that_name_no_task_of_their_host_are_ignored() -> None:
    history = History(sample_plan(hosts=("d1", "d2"))).start()
    history.tell(agent_messages.Exited("d1", "worker-1", code=1)).tell(agent_messages.Exited("d1", "worker-77", code=1))
    history.tell(agent_messages.Pong("d9"))
    assert history.outcome is None
    assert history.stops() == []


def test_a_task_is_reaped_once() -> None:
    history = History(sample_plan()).start().exited("worker-0", 0).exited("worker-0", 5)
    assert history.exited("worker-1").end().exit_code == 0


def test_nothing_happens_after_the_end() -> None:
    history = History(sample_plan()).start().exited("worker-0").exited("worker-1")
    history.end()
    assert history.supervisor.handle(messages.Interrupt("INT"), 99.0) == []


def test_it_wants_a_tick_at_its_next_deadline() -> None:
    history = History(sample_plan(timeout_s=0.25))
    assert history.supervisor.wake_s() == pytest.approx(0.25)
    assert History(sample_plan()).supervisor.wake_s() == pytest.approx(1.0)


def test_it_wants_a_tick_when_the_start_is_to_be_over_and_none_for_that_later() -> None:
    history = History(sample_plan(start_s=10.0)).beat_to(9.5)
    history.now = 9.8
    history.tell(messages.Tick(WALL + 9.8))
    assert history.supervisor.wake_s() == pytest.approx(0.2)
    running = History(sample_plan(start_s=10.0)).start()
    running.now = 9.8
    running.tell(messages.Tick(WALL + 9.8))
    assert running.supervisor.wake_s() == pytest.approx(1.0)


def test_it_wants_a_tick_when_the_wait_for_other_workers_after_an_early_end_is_over() -> None:
    history = History(sample_plan()).start().exited("server-0").beat_to(9.5)
    history.now = 9.8
    history.tell(messages.Tick(WALL + 9.8))
    assert history.supervisor.wake_s() == pytest.approx(0.2)


def test_while_it_stops_the_job_it_wants_a_tick_often() -> None:
    history = History(sample_plan(), obedient=False).start().exited("worker-0", 3)
    assert history.supervisor.wake_s() == pytest.approx(0.1)


def test_what_a_task_publishes_when_it_is_over_does_not_make_it_a_consequence() -> None:
    history = History(sample_plan(), obedient=False).start().exited("worker-0", 3)
    outcome = history.publish("worker-0", lost_peer="server-0").end()
    assert outcome.message == "worker-0 on d1 failed with exit code 3"


def test_of_the_losses_that_a_task_publishes_the_first_counts() -> None:
    history = History(sample_plan()).start().publish("worker-0", lost_peer="server-0", message="server-0 is lost")
    history.loses("worker-0", "worker-1")
    assert history.culprit().task == "server-0"


def test_the_time_limit_counts_from_the_first_event_whatever_the_clock_shows() -> None:
    supervisor = Supervisor(sample_plan(timeout_s=30.0))
    for now in (100.0, 129.5):
        supervisor.handle(messages.Tick(WALL + now), now)
        assert supervisor.job_state == "starting"
    supervisor.handle(messages.Tick(WALL + 130), 130.0)
    assert supervisor.job_state == "stopping"


def test_the_state_of_a_job_is_told_in_the_words_of_the_job_store() -> None:
    history = History(sample_plan(), obedient=False)
    assert history.supervisor.job_state == "starting"
    assert history.start().supervisor.job_state == "running"
    assert history.exited("worker-0", 3).supervisor.job_state == "stopping"


def test_what_is_ignored_is_said_and_no_output_is_missed_where_all_has_come() -> None:
    history = History(sample_plan()).start().tell(agent_messages.Exited("d1", "worker-9", code=0, time=WALL))
    assert "d1 sent Exited of 'worker-9', which is not a task of that host; ignored" in history.said()
    assert history.interrupt("INT").end().exit_code == 130
    assert "is not waited for" not in history.said()
