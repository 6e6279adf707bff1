"""Sums of squares from several servers: when they are complete, and what they add up to."""

from __future__ import annotations

from distrun_runtime.ps.norms import Failure, Norms, Part
from distrun_runtime.ps.work import SlotId, Turn

TURN = Turn(1, 0, -1, 5)
FIRST, SECOND = SlotId(1, 0, 0), SlotId(1, 0, 4)


def test_a_value_that_is_all_here_is_settled_at_once() -> None:
    norms = Norms()
    assert norms.mine(TURN, FIRST, 4, (1.0, 2.0)) == [Part(0, 4, (1.0, 2.0))]
    assert norms.settled(TURN, 4) == ([FIRST], (1.0, 2.0))


def test_parts_of_others_are_added_in_the_order_of_their_offsets_on_every_server() -> None:
    parts = [Part(0, 4, (1e100,)), Part(4, 4, (-1e100,)), Part(8, 4, (1.0,))]
    totals = []
    for mine in range(3):
        norms = Norms()
        for number in (2, 0, 1):
            if number != mine:
                norms.theirs(TURN, [parts[number]])
                assert norms.settled(TURN, 12) is None
        norms.mine(TURN, SlotId(1, 0, parts[mine].offset), 4, parts[mine].squares)
        totals.append(norms.settled(TURN, 12))
    assert [each and each[1] for each in totals] == [(1.0,)] * 3


def test_all_slots_of_ours_are_named() -> None:
    norms = Norms()
    norms.mine(TURN, SECOND, 4, (2.0,))
    assert norms.settled(TURN, 8) is None
    assert norms.mine(TURN, FIRST, 4, (1.0,)) == [Part(0, 4, (1.0,)), Part(4, 4, (2.0,))]
    assert norms.settled(TURN, 8) == ([SECOND, FIRST], (3.0,))


def test_a_failure_is_the_end_of_slots_that_are_ready_later_too() -> None:
    norms = Norms()
    norms.mine(TURN, FIRST, 4, (1.0,))
    norms.fail(TURN, Failure("why"))
    norms.fail(TURN, Failure("a later reason"))
    assert norms.settled(TURN, 8) == ([FIRST], Failure("why"))
    norms.mine(TURN, SECOND, 4, (1.0,))
    assert norms.settled(TURN, 8) == ([SECOND], Failure("why"))


def test_servers_with_different_rules_fail_instead_of_mixing_their_sums() -> None:
    norms = Norms()
    norms.theirs(TURN, [Part(4, 4, (1.0,))])
    norms.mine(TURN, FIRST, 4, (1.0, 2.0))
    assert norms.settled(TURN, 8) == ([FIRST], Failure("the servers applied different rules"))


def test_a_turn_that_is_closed_is_forgotten() -> None:
    norms = Norms()
    norms.theirs(TURN, [Part(4, 4, (1.0,))])
    assert norms.has(TURN)
    norms.close(TURN)
    assert not norms
    assert norms.settled(TURN, 8) is None
