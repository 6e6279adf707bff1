from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.transport.window import BATCH, LIMIT, Incoming, Outgoing


def test_messages_are_numbered_from_one() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    assert [out.put("a", 0.0), out.put("b", 0.0)] == [1, 2]


def test_a_message_is_sent_again_after_the_timeout_and_then_each_time_later() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    out.put("a", 0.0)
    sent = [(0.9, []), (1.0, [(1, "a")]), (2.9, []), (3.0, [(1, "a")]), (5.9, []), (6.0, [(1, "a")])]
    for now, expected in sent:
        assert out.due(now) == expected, now


def test_what_was_acknowledged_is_not_sent_again() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    for item in "abcde":
        out.put(item, 0.0)
    assert out.acknowledge(2, (4,)) == ["a", "b", "d"]
    assert out.due(1.0) == [(3, "c"), (5, "e")]
    assert out.acknowledge(2, (4, 9)) == []
    assert out.acknowledge(5) == ["c", "e"]
    assert out.is_empty
    assert out.next_due == float("inf")
    assert out.due(100.0) == []


def test_what_has_not_left_and_all_behind_it_is_neither_sent_again_nor_lost() -> None:
    """A slow network is not a broken one: a queue of repeats would make it slower still."""
    queued = {"b"}
    out: Outgoing[str] = Outgoing(1.0, lambda item: item not in queued)
    for item in "abc":
        out.put(item, 0.0)
    assert out.due(1.0) == [(1, "a")]
    out.acknowledge(1)
    for now in range(2, 100):
        assert out.due(now) == []
        assert out.lost(now) is None
    queued.clear()
    assert out.due(100.0) == [(2, "b"), (3, "c")]


def test_next_due_is_when_the_first_message_is_to_be_sent_again() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    assert out.next_due == float("inf")
    out.put("a", 5.0)
    out.put("b", 5.5)
    assert out.next_due == 6.0
    out.due(6.0)
    assert out.next_due == 6.5


def test_a_message_is_lost_after_the_last_repeat_was_in_vain() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    out.put("a", 0.0)
    now = 0.0
    for _ in range(LIMIT):
        now = out.next_due
        assert out.lost(now) is None
        assert out.due(now) == [(1, "a")]
    assert now == sum(range(1, LIMIT + 1))
    assert out.lost(out.next_due - 0.01) is None
    assert out.lost(out.next_due) == ("a", now + LIMIT + 1)


def test_only_so_many_are_sent_again_at_once_and_the_others_wait_as_long_again() -> None:
    out: Outgoing[int] = Outgoing(1.0)
    for number in range(BATCH + 5):
        out.put(number, 0.0)
    assert [number for number, _ in out.due(1.0)] == list(range(1, BATCH + 1))
    assert out.due(1.0) == []
    assert [number for number, _ in out.due(2.0)] == list(range(BATCH + 1, BATCH + 6))


def test_when_time_is_short_everything_is_due_soon() -> None:
    out: Outgoing[str] = Outgoing(10.0)
    out.put("a", 0.0)
    out.hasten(1.0, 0.5)
    assert out.due(1.5) == [(1, "a")]
    assert out.next_due == 2.5


def test_cleared_is_empty_and_goes_on_counting() -> None:
    out: Outgoing[str] = Outgoing(1.0)
    out.put("a", 0.0)
    assert out.clear() == ["a"]
    assert out.is_empty
    assert out.put("b", 0.0) == 2


def test_messages_are_delivered_in_order_and_once() -> None:
    into: Incoming[str] = Incoming()
    assert into.take(2, "b") == []
    assert into.acknowledged == (0, (2,))
    assert into.take(2, "b") == []
    assert into.take(1, "a") == ["a", "b"]
    assert into.take(1, "a") == []
    assert into.take(3, "c") == ["c"]
    assert into.acknowledged == (3, ())


@pytest.mark.parametrize(("window", "window_bytes"), [(3, 1000), (100, 20)])
def test_what_is_too_far_ahead_is_taken_as_lost(window: int, window_bytes: int) -> None:
    into: Incoming[int] = Incoming(window, window_bytes)
    for number in (2, 3, 4, 5):
        into.take(number, number, 10)
    through, others = into.acknowledged
    assert through == 0
    assert others == (2, 3)
    assert into.take(1, 1, 10) == [1, 2, 3]
    assert into.take(4, 4, 10) == [4]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(1, 40), loss=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_whatever_is_lost_doubled_or_exchanged_all_arrives_in_order_once(count: int, loss: int, seed: int) -> None:
    chance = random.Random(seed)
    out: Outgoing[int] = Outgoing(1.0)
    into: Incoming[int] = Incoming(window=8)
    on_the_way = [(out.put(item, 0.0), item) for item in range(count)]
    delivered: list[int] = []
    now = 0.0
    for _ in range(10_000):
        chance.shuffle(on_the_way)
        for number, item in on_the_way + on_the_way[: len(on_the_way) // 3]:
            if chance.random() * 100 >= loss:
                delivered += into.take(number, item)
                if chance.random() * 100 >= loss:
                    out.acknowledge(*into.acknowledged)
        if out.is_empty:
            break
        now = out.next_due
        on_the_way = out.due(now)
    assert delivered == list(range(count))
    assert out.is_empty
