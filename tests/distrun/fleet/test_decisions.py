"""Scripted histories of questions and commands: events at times, then what was decided. No process, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from distrun.cli import exec as exec_command
from distrun.fleet import commands
from distrun.fleet.commands import GRACE_S, LOST_S, SETTLE_S, Ran, RunCommand
from distrun.fleet.questions import HostAnswer, Questions
from distrun_runtime.contract import agent_messages
from distrun_runtime.contract.plan import Host
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.failures import Problem
from distrun_runtime.coordinator.messages import (
    Ack,
    AgentAction,
    AskAgent,
    Begin,
    Close,
    Drop,
    EndAgent,
    Show,
    Spawn,
    StopTasks,
)

A = TypeVar("A")
NO_ROUTE = agent_messages.StartFailed("b", "no route", 0.0, kind="unreachable", fix="ping it")


class History:
    """Questions or a command, and a clock that the test moves."""

    def __init__(self, decisions: Questions | RunCommand) -> None:
        self.decisions = decisions
        self.now = 100.0
        self.done: list[AgentAction | Show] = []
        self.tell(messages.Tick())

    def tell(self, *happened: messages.Event) -> History:
        for event in happened:
            self.done += self.decisions.handle(event, self.now)
        return self

    def wait(self, seconds: float, *heard: str) -> History:
        """Let time pass as the loop does, while the agents of `heard` answer pings."""
        until = self.now + seconds
        while self.now < until and not self.decisions.is_over:
            self.now = min(until, self.now + max(0.01, self.decisions.wake_s()))
            self.tell(*(agent_messages.Pong(host) for host in heard), messages.Tick())
        return self

    def hello(self, *hosts: str) -> History:
        return self.tell(*(agent_messages.AgentHello(host) for host in hosts))

    def did(self, kind: type[A]) -> list[A]:
        return [action for action in self.done if isinstance(action, kind)]

    def to(self, host: str) -> list[type]:
        return [type(action) for action in self.done if action.host == host]


@pytest.fixture(autouse=True)
def hello(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents have 60 s to say hello, however many they are."""
    monkeypatch.setattr("distrun.fleet.questions.HELLO_EACH_S", 0.0)


# ---------------------------------------------------------------------- questions


def asked(hosts: Sequence[str] = ("a", "b"), limit_s: float = 30.0) -> tuple[Questions, History]:
    questions = Questions(hosts)
    questions.ask("survey", {"x": 1}, limit_s)
    return questions, History(questions)


def answered(host: str, number: int = 1, value: object = "fine", **more: Any) -> agent_messages.Answered:
    return agent_messages.Answered(host, number, value, **more)


def test_an_agent_is_asked_when_it_is_there_and_the_question_ends_with_the_last_answer() -> None:
    questions, history = asked()
    assert history.done == []
    history.hello("b")
    assert history.done == [AskAgent("b", 1, "survey", {"x": 1})]
    history.tell(answered("b")).hello("a")
    assert not questions.is_over
    history.tell(answered("a", value=[2]))
    assert questions.is_over
    assert list(questions.answers().items()) == [("a", HostAnswer([2])), ("b", HostAnswer("fine"))]


def streaming() -> tuple[Questions, History]:
    questions = Questions(["a"])
    questions.ask("jobs", {}, 15.0, is_stream=True)
    return questions, History(questions).hello("a")


def test_a_stream_may_be_silent_for_long_if_its_agent_answers_pings_else_the_host_is_lost() -> None:
    questions, history = streaming()
    for _ in range(10):
        history.wait(12.0, "a")
    assert not questions.is_over
    history.wait(14.0)
    assert not questions.is_over
    history.wait(2.0)
    assert questions.is_over
    assert isinstance(questions.answers()["a"], Problem)


def test_a_reader_that_was_stopped_does_not_take_the_host_of_its_stream_for_lost() -> None:
    questions, history = streaming()
    history.now += 3600.0
    history.tell(messages.Tick())
    assert not questions.is_over
    history.wait(14.0)
    assert not questions.is_over
    assert questions.answers() == {}


def test_a_reader_that_is_slow_to_take_pieces_does_not_take_their_host_for_lost() -> None:
    questions, history = streaming()
    history.tell(*(agent_messages.AnswerPiece("a", 1, "calm-otter", "frames", b"x") for _ in range(20)))
    while questions.pieces:
        history.now += 1.0
        history.tell(messages.Tick())
        assert questions.answers() == {}
        questions.pieces.popleft()
    history.wait(14.0)
    assert not questions.is_over
    history.wait(2.0)
    assert isinstance(questions.answers()["a"], Problem)


def test_the_time_to_answer_begins_when_the_agent_is_there() -> None:
    questions, history = asked(["a"])
    history.wait(59.0).hello("a").wait(29.0)
    assert not questions.is_over
    history.wait(1.0)
    assert questions.answers() == {"a": Problem("a", "timeout", "its agent did not answer 'survey' within 30 s")}


def test_an_agent_that_was_late_with_one_answer_is_asked_the_next_question() -> None:
    questions, history = asked(["a"])
    history.hello("a").wait(30.0)
    questions.ask("probe", lambda host: {"me": host}, 30.0)
    history.tell(messages.Tick(), answered("a", 1, "late"))
    assert history.did(AskAgent)[1:] == [AskAgent("a", 2, "probe", {"me": "a"})]
    assert not questions.is_over
    history.tell(answered("a", 2, "right"))
    assert questions.answers() == {"a": HostAnswer("right")}


def test_a_host_without_an_agent_is_closed_and_not_asked_again() -> None:
    questions, history = asked()
    history.hello("a").tell(answered("a")).wait(60.0)
    late = Problem("b", "timeout", "no agent answered within 60 s")
    assert questions.answers()["b"] == late
    assert history.did(Close) == [Close("b")]
    questions.ask("probe", {}, 30.0)
    history.tell(messages.Tick(), answered("a", 2))
    assert questions.answers() == {"a": HostAnswer("fine"), "b": late}
    assert AskAgent not in history.to("b")


def test_a_host_that_fails_or_is_lost_ends_only_its_own_part_of_the_question() -> None:
    questions, history = asked(["a", "b", "c"])
    history.tell(NO_ROUTE).hello("a", "c").tell(messages.AgentLost("a", "its connection ended"), answered("c"))
    assert questions.answers() == {
        "a": Problem("a", "other", "its connection ended"),
        "b": Problem("b", "unreachable", "no route", "ping it"),
        "c": HostAnswer("fine"),
    }


def test_agents_are_ended_and_awaited_and_channels_without_one_are_cut() -> None:
    questions, history = asked(["a", "b", "c"])
    history.hello("a", "c").tell(answered("a"), messages.AgentLost("c", "broke")).wait(60.0)
    questions.let_go(3.0)
    history.tell(messages.Tick())
    assert history.to("a")[-2:] == [EndAgent, Close]
    assert history.to("b")[-1] == Drop
    assert EndAgent not in history.to("c")
    history.tell(agent_messages.Bye("a"))
    assert not questions.is_over, "the guard still holds the connection"
    history.tell(messages.AgentLost("a", "its connection ended"))
    assert questions.is_over


def test_agents_that_do_not_go_are_awaited_for_a_limited_time() -> None:
    questions, history = asked(["a"])
    history.hello("a").tell(answered("a"))
    questions.let_go(3.0)
    history.tell(messages.Tick()).wait(2.9)
    assert not questions.is_over
    history.wait(0.1)
    assert questions.is_over


def test_ctrl_c_ends_a_question_at_once_and_also_the_wait_for_the_agents() -> None:
    questions, history = asked(["a"])
    history.hello("a").tell(messages.Interrupt("INT"))
    assert questions.is_over
    questions.agents.is_interrupted = False
    questions.let_go(3.0)
    history.tell(messages.Tick())
    assert not questions.is_over
    history.tell(messages.Interrupt("INT"))
    assert questions.is_over


# ---------------------------------------------------------------------- commands


def commanded(*hosts: str, limit_s: float | None = None, **more: Any) -> tuple[RunCommand, History]:
    plan = commands.plan_of("test", [Host(host) for host in hosts], ("true",), "")
    command = RunCommand(plan, limit_s=limit_s, **more)
    return command, History(command)


def running(*hosts: str, **more: Any) -> tuple[RunCommand, History]:
    command, history = commanded(*hosts, **more)
    history.hello(*hosts)
    return command, history.tell(*(agent_messages.AgentReady(host, "127.0.0.1") for host in hosts))


def output(offset: int, data: bytes, host: str = "a") -> agent_messages.Output:
    return agent_messages.Output(host, "worker-0", "out", offset, data)


def exited(code: int = 0, out: int = 0) -> agent_messages.Exited:
    return agent_messages.Exited("a", "worker-0", code, out=out)


def ran(command: RunCommand, host: str = "a") -> Ran:
    found = command.found[host]
    assert isinstance(found, Ran), found
    return found


def problem(command: RunCommand, host: str = "a") -> Problem:
    found = command.found[host]
    assert isinstance(found, Problem), found
    return found


def test_a_command_is_spawned_when_its_agent_is_ready_and_its_agent_ended_after_the_last_output() -> None:
    command, history = commanded("a")
    assert history.hello("a").done == [Begin("a")]
    history.tell(agent_messages.AgentReady("a", "127.0.0.1"))
    assert history.did(Spawn) == [Spawn("a", "worker-0")]
    history.tell(exited(3, out=2), output(0, b"x"))
    assert history.did(EndAgent) == []
    history.tell(output(1, b"y"))
    assert history.did(Ack)[-1] == Ack("a", "worker-0", "out", 2)
    assert history.to("a")[-2:] == [EndAgent, Close]
    assert (ran(command).code, bytes(ran(command).out), ran(command).problem) == (3, b"xy", None)
    history.tell(agent_messages.Bye("a"), messages.AgentLost("a", "its connection ended"))
    assert command.is_over


def test_a_command_that_takes_too_long_is_stopped_and_then_given_up() -> None:
    command, history = running("a", limit_s=20.0)
    history.wait(19.9, "a")
    assert history.did(StopTasks) == []
    history.wait(0.1, "a")
    assert history.did(StopTasks) == [StopTasks("a", ("worker-0",), (("TERM", GRACE_S), ("KILL", 0.0)))]
    history.wait(GRACE_S + SETTLE_S - 0.1, "a")
    assert not command.found
    history.wait(0.1, "a")
    assert problem(command).text == "its agent did not say that the command has ended"


def test_a_command_that_was_stopped_has_the_code_of_a_timeout() -> None:
    command, history = running("a", limit_s=20.0)
    history.wait(20.0, "a").tell(agent_messages.Exited("a", "worker-0", signal="TERM"))
    assert (ran(command).code, ran(command).is_late) == (124, True)


def test_a_host_whose_agent_does_not_come_up_or_begin_is_given_up() -> None:
    command, history = commanded("a", "b")
    history.hello("a").wait(SETTLE_S, "a").wait(60.0)
    for host in ("a", "b"):
        assert problem(command, host).text == "no agent was ready in time"


def test_a_silent_host_is_lost_and_one_that_answers_pings_is_not() -> None:
    command, history = running("a", "b")
    history.wait(LOST_S + 1.0, "b")
    assert history.did(Close) == [Close("a")]
    history.tell(agent_messages.Exited("b", "worker-1", 0))
    assert problem(command).text.startswith(f"it was silent for {LOST_S:.0f} s")
    assert problem(command).fix == "distrun kill --hosts a --stale"
    assert ran(command, "b").code == 0


def test_events_that_waited_while_this_process_slept_come_before_the_clock() -> None:
    command, history = running("a")
    history.now += 10 * LOST_S  # the loop hands over what is on its queue, then a Tick
    history.tell(agent_messages.Pong("a"), messages.Tick())
    assert history.did(Close) == []
    history.tell(exited())
    assert ran(command).code == 0


def test_output_that_does_not_come_any_more_is_no_reason_to_wait_for_ever() -> None:
    command, history = running("a")
    history.tell(output(0, b"abc"), exited(out=5)).wait(SETTLE_S, "a")
    text = f"2 bytes of its output did not arrive within {SETTLE_S:g} s"
    assert ran(command).problem == Problem("a", "timeout", text)
    assert (exec_command.exit_code(command.found), exec_command.remarks(command.found)) == (3, [f"error: a: {text}"])
    (row,) = exec_command.as_json(command.found)
    assert (row["code"], row["stdout"], row["problem"]["kind"]) == (0, "abc", "timeout")


def test_of_output_in_pieces_no_more_is_kept_than_the_limit() -> None:
    command, history = running("a", keep=3)
    history.tell(output(0, b"ab"), output(2, b"cd"), exited(out=4))
    assert (bytes(ran(command).out), ran(command).is_cut) == (b"abc", True)


def test_output_that_still_comes_after_the_end_is_waited_for() -> None:
    command, history = running("a")
    history.tell(exited(out=6), output(0, b"a"))
    for offset in range(1, 6):
        history.wait(0.8 * SETTLE_S, "a").tell(output(offset, b"x"))
    assert (bytes(ran(command).out), ran(command).problem) == (b"axxxxx", None)


def test_a_host_that_is_lost_before_all_output_came_is_told() -> None:
    command, history = running("a")
    history.tell(exited(7, out=5), messages.AgentLost("a", "its connection broke"))
    assert exec_command.exit_code(command.found) == 7
    (line,) = [line for line in exec_command.remarks(command.found) if "error" in line]
    assert line == "error: a: 5 bytes of its output did not arrive: its connection broke"


def test_no_more_is_asked_for_than_the_reader_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "UNREAD_LIMIT", 2)
    command, history = running("a", is_shown=True)
    history.tell(output(0, b"a"))
    assert history.did(Ack) == [Ack("a", "worker-0", "out", 1)]
    history.tell(output(1, b"bc"), exited(out=4)).wait(5 * SETTLE_S, "a")
    assert history.did(Show) == [Show("a", "out", b"a"), Show("a", "out", b"bc")]
    assert len(history.did(Ack)) == 1
    assert not command.found, "it is we who do not ask"
    history.tell(messages.Shown(1), messages.Shown(2))
    assert history.did(Ack)[1:] == [Ack("a", "worker-0", "out", 3)]
    history.tell(output(3, b"d"))
    assert bytes(ran(command).out) == b"abcd"


def test_ctrl_c_lets_the_commands_end_gently_and_a_second_one_does_not_wait() -> None:
    command, history = commanded("a", "b")
    history.hello("a").tell(agent_messages.AgentReady("a", "127.0.0.1"), messages.Interrupt("INT"))
    assert history.to("a")[-1] == Close, "the end of its input makes the agent end its task"
    assert history.to("b") == [Drop]
    assert history.did(EndAgent) == []
    history.wait(GRACE_S + SETTLE_S - 0.1)
    assert not command.is_over
    history.tell(messages.Interrupt("INT"))
    assert command.is_over
    assert command.agents.is_interrupted
