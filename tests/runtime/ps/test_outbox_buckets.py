"""Messages that name a bucket in place of entries: they keep their order with others on the same keys."""

from __future__ import annotations

from typing import Any

import pytest

from distrun_runtime.protocol.message import Entry, Kind, Message, Payload, entries_of
from distrun_runtime.ps.worker import Outbox


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
