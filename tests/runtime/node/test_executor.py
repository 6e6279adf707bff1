"""The arrays of a server: sums, rules, and buffers that are lent and therefore never written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime.errors import KVError
from distrun_runtime.net.message import Entry, Flag, Kind, Message, Payload
from distrun_runtime.node import work
from distrun_runtime.node.executor import Executor
from distrun_runtime.node.work import SlotId

SLOT, OTHER = SlotId(1, 0, 0), SlotId(1, 1, 0)
FLOAT = np.dtype("float32")


class Lease:
    """A lease that ends when it is told to."""

    def __init__(self) -> None:
        self.is_over = False


def filled(*values: float, slots: tuple[SlotId, ...] = (SLOT,)) -> Executor:
    executor = Executor()
    for slot in slots:
        done(executor, work.Fill(slot, np.array(values, FLOAT).data.cast("B"), FLOAT))
    return executor


def done(executor: Executor, what: Any) -> None:
    result = executor.do(what)
    assert result.error is None, result.traceback


def add(executor: Executor, number: int, *values: float, slot: SlotId = SLOT) -> np.ndarray:
    given = np.array(values, FLOAT)
    done(executor, work.Add(slot, number, given.data.cast("B"), FLOAT))
    return given


def rule(executor: Executor, name: str = "test", **params: float) -> None:
    done(executor, work.SetRule(1, name, params, Message(Kind.RULE)))


def lend(executor: Executor, ticket: int, *slots: SlotId) -> Message:
    for number, slot in enumerate(slots or (SLOT,)):
        done(executor, work.Lend(ticket, number, slot))
    entries = tuple(Entry(slot.key, 0, 2) for slot in (slots or (SLOT,)))
    return Message(Kind.PULL, store=1, request=ticket, entries=entries)


def deliver(executor: Executor, ticket: int, pull: Message, lease: Lease | None = None) -> list[np.ndarray]:
    """Return views of what goes out."""
    reply, slots = executor.deliver(work.Deliver(ticket, "w0", pull))
    executor.lend(slots, lease or Lease())
    return [np.frombuffer(payload, FLOAT) for payload in reply.payloads]


def value(executor: Executor, slot: SlotId = SLOT) -> list[float]:
    over = Lease()
    over.is_over = True
    return list(deliver(executor, 999, lend(executor, 999, slot), over)[0])


def test_without_a_rule_a_round_assigns_the_sum() -> None:
    executor = filled(5, 6)
    add(executor, 1, 1, 2)
    add(executor, 1, 10, 20)
    add(executor, 1, 100, 200)
    assert value(executor) == [5, 6]
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [111, 222]


def test_with_a_rule_a_round_steps_once_by_the_sum() -> None:
    executor = filled(5, 6)
    rule(executor, "test", rescale_grad=2.0)
    add(executor, 1, 1, 1)
    add(executor, 1, 2, 3)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [11, 14]


def test_rounds_are_summed_apart() -> None:
    executor = filled(0, 0)
    add(executor, 1, 1, 1)
    add(executor, 2, 7, 7)
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [2, 2]
    done(executor, work.Apply(SLOT, 2))
    assert value(executor) == [7, 7]


@pytest.mark.parametrize("name", ["", "test", "sgd", "adam"])
@pytest.mark.parametrize("contributions", [1, 2, 3])
def test_contributions_are_never_written_to(name: str, contributions: int) -> None:
    """The first is not copied: it is the message's own frame."""
    executor = filled(1, 1)
    if name:
        rule(executor, name)
    given = [add(executor, 1, number + 1, 2) for number in range(contributions)]
    sums = executor._shelves[SLOT].sums
    if contributions == 1:
        assert np.shares_memory(sums[1], given[0])
    done(executor, work.Apply(SLOT, 1))
    assert not any(np.shares_memory(executor._shelves[SLOT].weight, each) for each in given)
    add(executor, 2, 1, 1)
    done(executor, work.Apply(SLOT, 2))
    assert [list(each) for each in given] == [[number + 1, 2] for number in range(contributions)]


@pytest.mark.parametrize("has_rule", [True, False])
def test_a_value_that_is_lent_is_not_written_by_a_later_round(has_rule: bool) -> None:
    """Before it is delivered, and while ZeroMQ still reads it."""
    executor = filled(1, 2)
    if has_rule:
        rule(executor)
    pull = lend(executor, 1)
    add(executor, 1, 10, 10)
    done(executor, work.Apply(SLOT, 1))
    lease = Lease()
    [out] = deliver(executor, 1, pull, lease)
    assert list(out) == [1, 2]
    [second] = deliver(executor, 2, lend(executor, 2), Lease())
    before = list(second)
    add(executor, 2, 10, 10)
    done(executor, work.Apply(SLOT, 2))
    assert list(out) == [1, 2]
    assert list(second) == before


def test_a_buffer_is_written_in_place_again_when_its_lease_is_over() -> None:
    executor = filled(1, 2)
    rule(executor)
    lease = Lease()
    [out] = deliver(executor, 1, lend(executor, 1), lease)
    lease.is_over = True
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert list(out) == [2, 3], "no copy was needed"


def test_a_pull_that_is_discarded_gives_its_buffers_back() -> None:
    executor = filled(1, 2)
    rule(executor)
    lend(executor, 1)
    done(executor, work.Discard(1))
    done(executor, work.Discard(1))
    weight = executor._shelves[SLOT].weight
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert executor._shelves[SLOT].weight is weight
    assert not executor._lent


def test_async_steps_apply_each_payload_to_its_slot_and_spare_what_is_lent() -> None:
    executor = filled(1, 2, slots=(SLOT, OTHER))
    rule(executor)
    [out] = deliver(executor, 1, lend(executor, 1), Lease())
    payloads = [np.array(values, FLOAT) for values in ((1, 1), (5, 5))]
    entries = tuple(Entry(key, 0, 2, 1, payload=Payload.FRAME) for key in (0, 1))
    push = Message(Kind.PUSH, store=1, entries=entries, payloads=[each.data.cast("B") for each in payloads])
    done(executor, work.Steps("w0", push, (SLOT, OTHER)))
    assert (value(executor, SLOT), value(executor, OTHER)) == ([2, 3], [6, 7])
    assert list(out) == [1, 2]
    assert [list(each) for each in payloads] == [[1, 1], [5, 5]]


def test_a_reply_carries_the_request_and_a_frame_for_each_entry() -> None:
    executor = filled(1, 2, slots=(SLOT, OTHER))
    reply, slots = executor.deliver(work.Deliver(4, "w0", lend(executor, 4, SLOT, OTHER)))
    assert (reply.kind, reply.flags, reply.request, reply.store) == (Kind.PULL, Flag.REPLY, 4, 1)
    assert [entry.payload for entry in reply.entries] == [Payload.FRAME, Payload.FRAME]
    assert slots == [SLOT, OTHER]


def test_an_unknown_rule_or_a_rule_for_integers_is_the_callers_error() -> None:
    executor = filled(1, 2)
    result = executor.do(work.SetRule(1, "sdg", {}, Message(Kind.RULE)))
    assert isinstance(result.error, KVError)
    assert "did you mean" in str(result.error)
    integers = np.dtype("int32")
    done(executor, work.Fill(OTHER, np.array([1], integers).data.cast("B"), integers))
    result = executor.do(work.SetRule(1, "sgd", {}, Message(Kind.RULE)))
    assert "updates float weights, not int32" in str(result.error)
    assert executor._rules == {}


def test_what_a_rule_raises_is_in_the_result_with_its_traceback() -> None:
    executor = filled(1, 2)
    rule(executor)
    add(executor, 1, 1, 1)

    def explode(*_: object) -> None:
        raise ZeroDivisionError("a user's rule")

    executor._rules[1].step = explode  # type: ignore[method-assign]
    result = executor.do(work.Apply(SLOT, 1))
    assert isinstance(result.error, ZeroDivisionError)
    assert "explode" in result.traceback


def test_another_rule_keeps_the_state_that_both_know() -> None:
    executor = filled(0, 0)
    rule(executor, "sgd", learning_rate=1.0, momentum=0.5)
    add(executor, 1, 4, 4)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [-4, -4]
    rule(executor, "sgd", learning_rate=0.5, momentum=0.5)
    add(executor, 2, 4, 4)
    done(executor, work.Apply(SLOT, 2))
    assert value(executor) == [-8, -8], "v = 0.5 * -4 - 0.5 * 4"


def test_half_precision_overflow_makes_no_warning() -> None:
    executor = Executor()
    half = np.dtype("float16")
    done(executor, work.Fill(SLOT, np.zeros(1, half).data.cast("B"), half))
    for _ in range(2):
        done(executor, work.Add(SLOT, 1, np.full(1, 60000, half).data.cast("B"), half))
    done(executor, work.Apply(SLOT, 1))
    assert np.isinf(executor._shelves[SLOT].weight).all()


def test_after_clear_nothing_is_left() -> None:
    executor = filled(1, 2)
    rule(executor)
    lend(executor, 1)
    done(executor, work.Clear())
    assert (executor._shelves, executor._rules, executor._lent) == ({}, {}, {})


def test_a_value_without_elements_makes_its_round() -> None:
    executor = filled()
    add(executor, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == []
