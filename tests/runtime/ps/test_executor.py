"""The arrays of a server: sums, rules, and buffers that are lent and therefore never written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distrun_runtime.arrays.dtypes import BFLOAT16, narrow, widen
from distrun_runtime.errors import KVError
from distrun_runtime.ops import rows as rowcodec
from distrun_runtime.ops.compression import CODECS
from distrun_runtime.protocol.message import Entry, Flag, Kind, Message, Payload
from distrun_runtime.ps import work
from distrun_runtime.ps.executor import Executor
from distrun_runtime.ps.work import How, SlotId, Turn

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
    done(executor, work.SetRule(1, {"name": name, "params": params}, Message(Kind.RULE)))


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
    sums = executor.shelves[SLOT].sums
    if contributions == 1:
        assert np.shares_memory(sums[1].dense.values, given[0])
    done(executor, work.Apply(SLOT, 1))
    assert not any(np.shares_memory(executor.shelves[SLOT].weight, each) for each in given)
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
    weight = executor.shelves[SLOT].weight
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert executor.shelves[SLOT].weight is weight
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
    result = executor.do(work.SetRule(1, {"name": "sdg", "params": {}}, Message(Kind.RULE)))
    assert isinstance(result.error, KVError)
    assert "did you mean" in str(result.error)
    integers = np.dtype("int32")
    done(executor, work.Fill(OTHER, np.array([1], integers).data.cast("B"), integers))
    result = executor.do(work.SetRule(1, {"name": "sgd", "params": {}}, Message(Kind.RULE)))
    assert "updates float weights, not int32" in str(result.error)
    assert executor.rules == {}


def test_what_a_rule_raises_is_in_the_result_with_its_traceback() -> None:
    executor = filled(1, 2)
    rule(executor)
    add(executor, 1, 1, 1)

    def explode(*_: object) -> None:
        raise ZeroDivisionError("a user's rule")

    executor.rules[1].step = explode  # type: ignore[method-assign]
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
    assert np.isinf(executor.shelves[SLOT].weight).all()


def test_after_clear_nothing_is_left() -> None:
    executor = filled(1, 2)
    rule(executor)
    lend(executor, 1)
    done(executor, work.Clear())
    assert (executor.shelves, executor.rules, executor._lent) == ({}, {}, {})


def test_a_value_without_elements_makes_its_round() -> None:
    executor = filled()
    add(executor, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == []


# 16-bit floats, codecs and rows


@pytest.mark.parametrize("dtype", [np.dtype("float16"), BFLOAT16])
def test_a_round_of_16_bit_floats_is_summed_in_float32_and_rounded_once(dtype: np.dtype) -> None:
    executor = Executor()
    done(executor, work.Fill(SLOT, bytes(2), dtype))
    for number in (2048.0, *[1.0] * 16):
        given = narrow(np.array([number], np.float32), dtype)
        done(executor, work.Add(SLOT, 1, given.tobytes(), dtype))
    done(executor, work.Apply(SLOT, 1))
    weight = executor.shelves[SLOT].weight
    assert weight.dtype == dtype
    assert widen(weight).tolist() == [2064.0]


def test_a_16_bit_weight_is_stepped_in_float32_and_keeps_its_master() -> None:
    executor = Executor()
    half = np.dtype("float16")
    done(executor, work.Fill(SLOT, np.ones(1, half).tobytes(), half))
    rule(executor, "sgd", learning_rate=1e-4, multi_precision=True)
    for number in range(1, 21):
        done(executor, work.Add(SLOT, number, np.ones(1, half).tobytes(), half))
        done(executor, work.Apply(SLOT, number))
    assert executor.shelves[SLOT].weight.tolist() == [np.float16(0.998)]


def test_compressed_and_scaled_contributions_are_added_as_float32() -> None:
    executor = filled(0, 0)
    done(executor, work.Add(SLOT, 1, bytes([0xE0, 0, 0, 0]), FLOAT, How(1, {"threshold": 0.5}, 4.0)))
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [3, -1]


def sparse(executor: Executor, number: int, rows: list[int], *values: float) -> None:
    """Add some rows of a value of rows of two."""
    given = np.array(values, FLOAT).reshape(len(rows), 2)
    payload = rowcodec.encode(np.array(rows, np.int64), given)
    done(executor, work.Add(SLOT, number, payload, FLOAT, How(16)))


def embedding(*values: float) -> Executor:
    executor = Executor()
    payload = np.array(values, FLOAT).tobytes()
    done(executor, work.Fill(SLOT, payload, FLOAT, "emb", (len(values) // 2, 2), 2))
    return executor


def test_without_a_rule_a_round_of_rows_assigns_them_and_zeros_the_rest() -> None:
    executor = embedding(9, 9, 9, 9, 9, 9)
    sparse(executor, 1, [2], 1, 2)
    sparse(executor, 1, [0, 2], 5, 5, 10, 10)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [5, 5, 0, 0, 11, 12]


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad"])
def test_a_round_of_rows_touches_only_these_rows_of_weight_and_state(name: str) -> None:
    """Lazily: where a dense round would decay and move on by momentum."""
    executor = embedding(1, 1, 2, 2, 3, 3)
    params = {"momentum": 0.5} if name == "sgd" else {}
    rule(executor, name, learning_rate=0.5, wd=0.1, **params)
    sparse(executor, 1, [0, 1], 1, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    shelf = executor.shelves[SLOT]
    before = {key: np.copy(each) for key, each in shelf.state.items() if isinstance(each, np.ndarray)}
    weight = shelf.weight.copy()
    sparse(executor, 2, [1], 1, 1)
    sparse(executor, 2, [])
    done(executor, work.Apply(SLOT, 2))
    changed = (shelf.weight != weight).reshape(3, 2).any(axis=1)
    assert changed.tolist() == [False, True, False]
    for key, each in before.items():
        assert (shelf.state[key] != each).reshape(3, 2).any(axis=1).tolist() == [False, True, False], key
    assert shelf.state["updates"] == 2


def test_a_sparse_and_a_dense_contribution_make_a_dense_round() -> None:
    executor = embedding(0, 0, 0, 0)
    rule(executor, "sgd", learning_rate=1.0)
    sparse(executor, 1, [1], 1, 1)
    add(executor, 1, 2, 2, 2, 2)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [-2, -2, -3, -3]


def test_async_steps_take_rows_and_codecs() -> None:
    executor = embedding(1, 1, 2, 2)
    rule(executor, "sgd", learning_rate=1.0)
    payload = rowcodec.encode(np.array([1]), np.ones((1, 2), FLOAT))
    entry = Entry(0, 0, 4, 1, codec=16, payload=Payload.FRAME)
    push = Message(Kind.PUSH, store=1, entries=(entry,), body={"scale": 0.5}, payloads=[payload])
    done(executor, work.Steps("w0", push, (SLOT,), 0))
    assert value(executor) == [1, 1, 1.5, 1.5]


def test_rows_that_do_not_exist_are_named_with_key_and_shape() -> None:
    executor = embedding(1, 1, 2, 2)
    entry = Entry(0, 0, 4, codec=16, payload=Payload.FRAME)
    pull = Message(Kind.PULL, store=1, entries=(entry,), payloads=[rowcodec.encode_rows(np.array([0, 7]))])
    result = executor.do(work.Check("w0", 0, pull, (SLOT,)))
    assert isinstance(result.error, KVError)
    text = "key 'emb' of shape (2, 2): rows: expected ascending row numbers from 0 to 1, found [0,7]"
    assert str(result.error).replace(", 7", ",7") == text


# Assign and compressed answers


def test_assign_keeps_the_rules_state_and_renews_the_master() -> None:
    executor = Executor()
    half = np.dtype("float16")
    done(executor, work.Fill(SLOT, np.ones(1, half).tobytes(), half))
    rule(executor, "sgd", learning_rate=1.0, momentum=0.5, multi_precision=True)
    done(executor, work.Add(SLOT, 1, np.ones(1, half).tobytes(), half))
    done(executor, work.Apply(SLOT, 1))
    done(executor, work.Assign(SLOT, np.full(1, 8, half).tobytes(), half))
    assert executor.shelves[SLOT].weight.tolist() == [8]
    done(executor, work.Add(SLOT, 2, np.ones(1, half).tobytes(), half))
    done(executor, work.Apply(SLOT, 2))
    assert executor.shelves[SLOT].weight.tolist() == [6.5], "v = 0.5 * -1 - 1"


@pytest.mark.parametrize("name", ["", "test"])
def test_a_compressed_answer_is_made_anew_after_each_update(name: str) -> None:
    executor = filled(1, 2)
    if name:
        rule(executor, name)
    half = How(CODECS["fp16"].number)
    for number in (1, 2):
        done(executor, work.Lend(number, 0, SLOT, None, half))
        pull = Message(Kind.PULL, entries=(Entry(0, 0, 2, codec=half.codec),))
        reply, slots = executor.deliver(work.Deliver(number, "w0", pull))
        expected = executor.shelves[SLOT].weight.astype(np.float16)
        assert (bytes(reply.payloads[0]), slots) == (expected.tobytes(), [])
        add(executor, number, 1, 1)
        done(executor, work.Apply(SLOT, number))


# Rules that need norms


def test_a_rule_that_needs_norms_stops_halfway_and_finishes_with_the_totals() -> None:
    """Two slices of one value do what the whole one does."""
    whole, cut = filled(3, 4, 5, 6), filled(3, 4)
    done(cut, work.Fill(OTHER, np.array([5, 6], FLOAT).tobytes(), FLOAT))
    for executor in (whole, cut):
        assert executor.do(work.SetRule(1, {"name": "lamb", "params": {}}, Message(Kind.RULE))).value is True
    add(whole, 1, 1, 2, 3, 4)
    add(cut, 1, 1, 2)
    add(cut, 1, 3, 4, slot=OTHER)
    squares = [executor.do(work.Apply(slot, 1)).value for executor, slot in ((whole, SLOT), (cut, SLOT), (cut, OTHER))]
    turn = Turn(1, 0, -1, 1)
    assert value(cut) == [3, 4], "nothing has moved yet"
    assert squares[0][0] == 86
    totals = tuple(one + other for one, other in zip(squares[1], squares[2], strict=True))
    done(whole, work.Finish(SLOT, turn, squares[0]))
    for slot in (SLOT, OTHER):
        done(cut, work.Finish(slot, turn, totals))
    assert value(whole) == pytest.approx([*value(cut), *value(cut, OTHER)])
    assert value(whole) != [3, 4, 5, 6]


def test_a_second_half_spares_what_is_lent_and_one_that_is_dropped_changes_nothing() -> None:
    executor = filled(3, 4)
    rule(executor, "lars", learning_rate=1.0)
    for number, dropped in ((1, True), (2, False)):
        add(executor, number, 1, 2)
        squares = executor.do(work.Apply(SLOT, number)).value
        [out] = deliver(executor, number, lend(executor, number), Lease())
        turn = Turn(1, 0, -1, number)
        done(executor, work.Drop(SLOT, turn) if dropped else work.Finish(SLOT, turn, squares))
        assert list(out) == [3, 4]
    assert value(executor) != [3, 4]
    assert executor.shelves[SLOT].halves == {}


def test_rows_for_a_rule_that_needs_norms_are_a_dense_gradient() -> None:
    one, other = embedding(1, 2, 3, 4), embedding(1, 2, 3, 4)
    for executor in (one, other):
        rule(executor, "lamb")
    sparse(one, 1, [1], 5, 6)
    add(other, 1, 0, 0, 5, 6)
    for executor in (one, other):
        squares = executor.do(work.Apply(SLOT, 1)).value
        done(executor, work.Finish(SLOT, Turn(1, 0, -1, 1), squares))
    assert value(one) == value(other)


def test_steps_that_fail_leave_no_half_behind() -> None:
    executor = filled(3, 4, slots=(SLOT, OTHER))
    rule(executor, "lars")
    payloads = [np.ones(2, FLOAT).tobytes(), bytes(3)]
    entries = (Entry(0, 0, 2, 1, payload=Payload.FRAME), Entry(1, 0, 2, 1, codec=4, payload=Payload.FRAME))
    push = Message(Kind.PUSH, store=1, entries=entries, payloads=payloads)
    assert isinstance(executor.do(work.Steps("w0", push, (SLOT, OTHER), 0)).error, KVError)
    assert executor.shelves[SLOT].halves == {}


def test_multipliers_are_those_of_the_users_key() -> None:
    executor = Executor()
    done(executor, work.Fill(SLOT, bytes(8), FLOAT, "bias"))
    spec = {"name": "sgd", "params": {"learning_rate": 1.0}, "lr_mult": [["bias", 0.5]]}
    done(executor, work.SetRule(1, spec, Message(Kind.RULE)))
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [-0.5, -0.5]


def test_no_rule_is_a_rule_too() -> None:
    executor = filled(5, 6)
    rule(executor)
    done(executor, work.SetRule(1, None, Message(Kind.RULE)))
    add(executor, 1, 1, 1)
    done(executor, work.Apply(SLOT, 1))
    assert value(executor) == [1, 1]
