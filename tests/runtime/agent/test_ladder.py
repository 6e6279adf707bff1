"""Ladders: what goes out when, and which of two counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.agent import ladder
from distrun_runtime.agent.ladder import Ladder
from distrun_runtime.errors import ContractError


def history(one: Ladder, times: list[float]) -> list[str | None]:
    sent = []
    for now in times:
        one, name = ladder.due(one, now)
        sent.append(name)
    return sent


def test_steps_go_out_in_time_and_kill_repeats() -> None:
    one = ladder.make([["INT", 10.0], ["SIGTERM", 5.0], ["KILL", 0]], now=100.0)
    assert (one.next_at, one.kill_at, one.gives_up_at) == (100.0, 115.0, 118.0)
    assert history(one, [100, 105, 110, 114.9, 115, 115.1, 115.25, 115.5]) == [
        "INT", None, "TERM", None, "KILL", None, "KILL", "KILL",
    ]  # fmt: skip


def test_late_loop_sends_only_the_last_step_that_is_due() -> None:
    one = ladder.make([["INT", 1.0], ["TERM", 1.0], ["KILL", 0]], now=0.0)
    assert history(one, [50.0, 50.0]) == ["KILL", None]


def test_ladder_without_kill_ends_after_its_last_wait() -> None:
    one = ladder.make([["TERM", 4.0]], now=0.0)
    assert history(one, [0.0, 100.0]) == ["TERM", None]
    assert (one.kill_at, one.gives_up_at) == (math.inf, 4.0)


@given(
    st.lists(st.tuples(st.sampled_from(["INT", "TERM", "KILL"]), st.floats(0, 20)), min_size=1, max_size=4), st.data()
)
def test_next_is_always_later_than_now_once_it_was_asked(steps: list[tuple[str, float]], data: st.DataObject) -> None:
    one = ladder.make(steps, now=0.0)
    for now in sorted(data.draw(st.lists(st.floats(0, 100), max_size=20))):
        one, _ = ladder.due(one, now)
        assert one.next_at > now


def test_ladder_that_kills_earlier_counts() -> None:
    slow = ladder.make([["INT", 10], ["TERM", 5], ["KILL", 0]], now=0.0)
    quick = ladder.gentle(2.0, now=1.0)
    assert ladder.harsher(None, slow) is slow
    assert ladder.harsher(slow, quick) is quick
    assert ladder.harsher(quick, slow) is quick
    assert ladder.harsher(quick, ladder.at_once(1.5)).steps == (("KILL", 0.0),)
    assert ladder.harsher(slow, ladder.make([["TERM", 1]], now=0.0)) is slow


@pytest.mark.parametrize(
    "steps", [[], [["TERM"]], [["NOPE", 1]], [["TERM", -1]], [["TERM", "x"]], [["KILL", math.nan]], [5]]
)
def test_what_is_no_ladder_is_refused(steps: list[object]) -> None:
    with pytest.raises(ContractError):
        ladder.make(steps, now=0.0)


def test_signals_go_by_name() -> None:
    assert ladder.signal_number("SIGTERM") == ladder.signal_number("term") == 15
    with pytest.raises(ContractError, match="no signal is called 'SIG_IGN'"):
        ladder.signal_number("SIG_IGN")
