from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scripted_transport import Held, Script, check_calls

from distrun_runtime.protocol import message
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.transport.base import Arrived, Down, Event, Released, Up
from distrun_runtime.transport.faults import Chance, Fate, Faults, Faulty
from distrun_runtime.transport.resend import ACK, DATA, Envelope


def arrived(number: int, kind: Kind = Kind.PUSH, link: str = "in:1") -> Arrived:
    return Arrived(link, message.encode(Message(kind, request=number)))


def faulty(text: str, **more: Any) -> tuple[Faulty, Script]:
    script = Script()
    return Faulty(script, Faults.parse(text), "server-0", clock=lambda: script.now, **more), script


def heard(events: list[Event]) -> list[int]:
    return [message.decode(event.frames).request for event in events if isinstance(event, Arrived)]


# --- what is asked for


def test_faults_are_read_from_their_text() -> None:
    assert Faults.parse("") == Faults()
    assert Faults.parse("").is_none
    found = Faults.parse("drop=5, duplicate=1,delay=20:50ms,reorder=2.5,seed=7,kinds=push+ACK")
    assert found == Faults(5, 1, 20, 0.05, 2.5, 7, frozenset({"PUSH", "ACK"}))
    assert not found.is_none
    assert Faults.parse("", drop=3) == Faults(drop=3)
    assert Faults.parse("drop=4", drop=3) == Faults(drop=4)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("drop", "'drop' is none of drop=PERCENT"),
        ("lose=5", "'lose=5' is none of"),
        ("drop=5,,", "'' is none of"),
        ("drop=101", "a percent is from 0 to 100"),
        ("drop=-1", "a percent is from 0 to 100"),
        ("drop=nan", "a percent is from 0 to 100"),
        ("drop=x", "could not convert"),
        ("drop=5:50ms", "only a delay has a time"),
        ("delay=5", "a delay needs a time in milliseconds"),
        ("delay=5:50", "a delay needs a time in milliseconds"),
        ("delay=5:-1ms", "a delay is from 0"),
        ("seed=x", "invalid literal"),
        ("kinds=PUSH+SHOVE", "no kind SHOVE, known are ABORT, ACK"),
        ("kinds=HELLO", "no kind HELLO"),
        ("kinds=", "no kind "),
    ],
)
def test_a_text_of_another_form_is_refused_with_the_form(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        Faults.parse(text)
    assert "such as drop=5,delay=20:50ms,seed=7" in str(caught.value)


def test_the_same_seed_and_name_have_the_same_chances_and_others_have_others() -> None:
    faults = Faults.parse("drop=20,duplicate=20,delay=20:50ms,reorder=20")

    def fates(name: str, seed: int) -> list[Fate]:
        chance = Chance(Faults(**{**faults.__dict__, "seed": seed}), name)
        return [chance.fate(Kind.PUSH) for _ in range(200)]

    assert fates("worker-0", 1) == fates("worker-0", 1)
    assert fates("worker-0", 1) != fates("worker-1", 1)
    assert fates("worker-0", 1) != fates("worker-0", 2)


def test_about_as_many_messages_meet_a_fault_as_were_asked_for() -> None:
    chance = Chance(Faults.parse("drop=10,duplicate=20,delay=30:1ms,reorder=40"), "x")
    fates = [chance.fate(Kind.PULL) for _ in range(20_000)]
    arriving = [fate for fate in fates if fate.copies]
    found = Counter(
        {
            10: len(fates) - len(arriving),
            20: sum(fate.copies == 2 for fate in arriving),
            30: sum(fate.delay_s > 0 for fate in arriving),
            40: sum(fate.is_overtaken for fate in arriving),
        }
    )
    for percent, count in found.items():
        assert count / (len(fates) if percent == 10 else len(arriving)) == pytest.approx(percent / 100, abs=0.02)


def test_only_the_kinds_that_are_named_meet_faults_and_the_handshake_never() -> None:
    some = Chance(Faults.parse("drop=100,kinds=PUSH+ACK"), "x")
    assert [some.fate(kind).copies for kind in (Kind.PUSH, None, Kind.PULL)] == [0, 0, 1]
    all_ = Chance(Faults.parse("drop=100"), "x")
    assert [all_.fate(kind).copies for kind in (Kind.HELLO, Kind.WELCOME, Kind.BYE, None)] == [1, 1, 0, 0]


# --- what is done


def test_dropped_and_doubled_messages_in_envelopes_or_not() -> None:
    envelope = Envelope(DATA, 0, 1).encode()
    for before in ([], [envelope]):
        lossy, script = faulty("drop=100,kinds=PUSH")
        frames = [*before, *message.encode(Message(Kind.PUSH))]
        ack = Arrived("in:1", [Envelope(ACK, 0, 1).encode()])
        script.coming.append([Arrived("in:1", frames), ack])
        assert lossy.poll(1.0) == [ack]
    double, script = faulty("duplicate=100")
    script.coming.append([arrived(1), arrived(2)])
    assert heard(double.poll(1.0)) == [1, 1, 2, 2]


def test_a_delayed_message_comes_later_and_is_overtaken() -> None:
    slow, script = faulty("delay=100:50ms,kinds=PUSH")
    script.coming.append([arrived(1), arrived(2, Kind.PULL)])
    assert heard(slow.poll(1.0)) == [2]
    script.now = 0.049
    assert heard(slow.poll(1.0)) == []
    assert script.waits[-1] == pytest.approx(0.001)
    script.now = 0.05
    assert heard(slow.poll(1.0)) == [1]


def test_where_the_order_is_kept_a_delay_delays_what_follows_on_its_connection() -> None:
    slow, script = faulty("delay=100:50ms,kinds=PUSH", keeps_order=True)
    script.coming.append([arrived(1), arrived(2, Kind.PULL), arrived(3, Kind.PULL, "in:2")])
    assert heard(slow.poll(1.0)) == [3]
    script.now = 0.05
    script.coming.append([arrived(4, Kind.PULL)])
    assert heard(slow.poll(1.0)) == [1, 2, 4]


def test_the_next_message_overtakes_one_or_it_comes_after_a_moment() -> None:
    mixed, script = faulty("reorder=100")
    script.coming.append([arrived(1), arrived(2, link="in:2"), arrived(3)])
    assert heard(mixed.poll(1.0)) == [3, 1]
    script.now = 1.0
    assert heard(mixed.poll(1.0)) == [2]


def test_what_came_before_the_end_of_a_connection_is_heard_before_it() -> None:
    slow, script = faulty("delay=100:50ms,kinds=PUSH")
    end = Down("in:1", "died")
    script.coming.append([arrived(1), arrived(2), arrived(3, link="in:2")])
    script.coming.append([end, Up("x")])
    assert slow.poll(1.0) == []
    events = slow.poll(1.0)
    assert heard(events) == [1, 2]
    assert events[2:] == [end, Up("x")]


def test_what_is_late_on_a_connection_that_was_closed_is_not_heard() -> None:
    slow, script = faulty("delay=50:50ms,reorder=100")
    script.coming.append([arrived(number) for number in range(8)])
    before = slow.poll(1.0)
    slow.disconnect("in:1")
    script.now = 1.0
    assert heard(slow.poll(1.0)) == []
    assert len(before) < 8


def test_every_other_call_and_event_goes_through() -> None:
    through, script = faulty("drop=100")
    check_calls(through, script)
    script.lease = Held()
    assert through.send("x", [b"a"]) is script.lease
    assert script.sent == [("x", [b"a"])]
    script.coming.append([Released(script.lease)])
    assert through.poll(1.0) == [Released(script.lease)]
    through.close(2.0)
    assert script.closed == [2.0]
