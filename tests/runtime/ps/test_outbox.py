"""What a worker sends first: priority, a window for pushes, and the order of each key's requests."""

from __future__ import annotations

from typing import Any

import pytest
from history_server import Piece, data, pieces_of
from hypothesis import given
from hypothesis import strategies as st

from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, entries_of
from distrun_runtime.ps.worker import Outbox


def push(request: int, *keys: int, priority: int = 0, length: int = 1) -> Message:
    pieces = [Piece(key, length=length, dtype=3, payload=bytes(length)) for key in keys]  # uint8: a byte each
    return data(Kind.PUSH, pieces, request=request, priority=priority)


def pull(request: int, *keys: int, priority: int = 0) -> Message:
    return data(Kind.PULL, [Piece(key, length=1) for key in keys], request=request, priority=priority)


def taken(outbox: Outbox) -> list[int]:
    return [message.request for message in outbox.take()]


def test_without_priorities_messages_leave_in_their_order() -> None:
    outbox = Outbox()
    for number in range(5):
        outbox.put(push(number, number))
    assert taken(outbox) == [0, 1, 2, 3, 4]
    assert taken(outbox) == []


def test_higher_priority_goes_first() -> None:
    outbox = Outbox()
    for number, priority in enumerate((-5, 0, 7, 0)):
        outbox.put(push(number, number, priority=priority))
    assert taken(outbox) == [2, 1, 3, 0]


def test_a_message_that_names_its_keys_by_a_bucket_neither_overtakes_nor_is_overtaken() -> None:
    outbox = Outbox()
    outbox.put(push(1, 7, priority=-3))
    outbox.put(Message(Kind.PUSH, request=2, bucket=4, priority=5))
    outbox.put(push(3, 9, priority=9))
    assert taken(outbox) == [1, 2, 3]


def test_the_window_holds_back_pushes_until_earlier_ones_are_answered() -> None:
    outbox = Outbox(window_bytes=10)
    for number in (1, 2, 3):
        outbox.put(push(number, number, length=5))
    assert taken(outbox) == [1, 2]
    outbox.answered(1)
    assert taken(outbox) == [3]


def test_a_later_push_of_higher_priority_overtakes_what_waits_for_the_window() -> None:
    outbox = Outbox(window_bytes=5)
    for number in (1, 2):
        outbox.put(push(number, number, length=5))
    assert taken(outbox) == [1]
    outbox.put(push(3, 3, priority=1, length=5))
    outbox.answered(1)
    assert taken(outbox) == [3]


def test_pulls_take_no_room_in_the_window() -> None:
    outbox = Outbox(window_bytes=1)
    outbox.put(push(1, 1, length=1))
    outbox.put(pull(2, 2))
    outbox.put(pull(3, 3))
    assert taken(outbox) == [1, 2, 3]


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.booleans(),
            st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
            st.integers(-3, 3),
            st.integers(1, 8),
        ),
        st.just(("take",)),
        st.just(("answer",)),
    ),
    max_size=40,
)


@given(STEPS)
def test_requests_of_one_key_keep_their_order_and_none_is_lost(steps: list[tuple[object, ...]]) -> None:
    outbox = Outbox(window_bytes=8)
    put: list[Message] = []
    out: list[Message] = []
    open_: list[int] = []

    def take() -> None:
        for message in outbox.take():
            out.append(message)
            if message.kind is Kind.PUSH:
                open_.append(message.request)
        sizes = {message.request: sum(piece.length for piece in pieces_of(message)) for message in put}
        assert len(open_) <= 1 or sum(sizes[request] for request in open_) <= 8

    for step in steps:
        if step[0] == "put":
            _, is_push, keys, priority, length = step
            make = push if is_push else pull
            extra = {"length": length} if is_push else {}
            put.append(make(len(put) + 1, *keys, priority=priority, **extra))  # type: ignore[operator]
            outbox.put(put[-1])
        elif step[0] == "take":
            take()
        elif open_:
            outbox.answered(open_.pop(0))
    while len(out) < len(put):
        while open_:
            outbox.answered(open_.pop())
        before = len(out)
        take()
        assert len(out) > before, "nothing moves though the window is empty"
    for key in range(4):
        sent = [message.request for message in out if any(piece.key == key for piece in pieces_of(message))]
        assert sent == sorted(sent)
    assert sorted(message.request for message in out) == [message.request for message in put]


def test_messages_that_are_dropped_never_leave_and_the_others_keep_their_order() -> None:
    outbox = Outbox()
    for number, urgency in enumerate((1, 5, 2, 6, 7, 3)):
        outbox.put(push(number, number, priority=-urgency))
    outbox.drop({0, 4})
    assert taken(outbox) == [2, 5, 1, 3]


# Messages that name a bucket in place of entries


def entries(kind: Kind) -> Any:
    packed = Payload.PACKED if kind is Kind.PUSH else Payload.NONE
    return entries_of(Entry(key, 0, 8, 1, payload=packed) for key in range(8))


def message(kind: Kind, request: int, priority: int = 0, **changes: Any) -> Message:
    payloads = [bytes(256)] if kind is Kind.PUSH else []
    return Message(kind, request=request, priority=priority, payloads=payloads, **changes)


def leaving(*messages: Message) -> list[int]:
    """Return the requests in the order in which they leave, behind a push that fills the window."""
    outbox = Outbox(window_bytes=256)
    outbox.put(Message(Kind.PUSH, request=1, entries=entries_of([Entry(99, 0, 64)]), payloads=[bytes(256)]))
    assert [each.request for each in outbox.take()] == [1]
    for each in messages:
        outbox.put(each)
    left = []
    outbox.answered(1)
    for _ in messages:
        for each in outbox.take():
            left.append(each.request)
            outbox.answered(each.request)
    return left


@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_a_message_with_a_bucket_never_overtakes_the_push_that_registers_it(kind: Kind) -> None:
    register = message(Kind.PUSH, 2, bucket=1, entries=entries(Kind.PUSH))
    assert leaving(register, message(kind, 3, priority=5, bucket=1, step=1)) == [2, 3]


def test_a_request_on_one_key_never_overtakes_a_push_of_a_bucket_with_that_key() -> None:
    one = message(Kind.PULL, 3, priority=5, entries=entries_of([Entry(4, 0, 8, 1)]))
    assert leaving(message(Kind.PUSH, 2, bucket=1, step=1), one) == [2, 3]


def test_a_push_that_gives_a_bucket_other_entries_never_overtakes_one_that_means_the_former() -> None:
    """The server would take the values of the former push for those of the later keys."""
    others = entries_of(Entry(key, 0, 8, 1, payload=Payload.PACKED) for key in range(20, 28))
    later = message(Kind.PUSH, 3, priority=5, bucket=1, entries=others)
    assert leaving(message(Kind.PUSH, 2, bucket=1, step=1), later) == [2, 3]
