"""Calls that are made by plans: watches what they exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.protocol.message import NUMBER, NUMBER_AT, Kind, encode
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.ps.session import Asked, NodeSession, PlannedSends
from distrun_runtime.transport.resend import kind_of


@dataclass
class SteadyCall:
    """What a steady call of one worker sends, and what it would send as a request."""

    rank: int
    sent: list[list[bytes]]
    asked: list[list[bytes]]
    into: list[memoryview | None]
    is_request: bool = True
    """Whether it became one."""

    @property
    def kind(self) -> Kind:
        """What all of its messages are about."""
        kind = kind_of(self.sent[0])
        assert kind is not None
        return kind


def joined(frames: Sequence[Buffer]) -> list[bytes]:
    """Return head, body and payload of a message without its number; how many frames a payload has means nothing."""
    head = bytes(frames[0])
    number = slice(NUMBER_AT, NUMBER_AT + NUMBER.size)
    return [head[: number.start] + head[number.stop :], bytes(frames[1]), b"".join(map(bytes, frames[2:]))]


def steady_calls(patch: pytest.MonkeyPatch) -> list[SteadyCall]:
    """Return the list of steady calls to come."""
    found: list[SteadyCall] = []
    exchange = NodeSession.exchange

    def watched(
        self: NodeSession, sends: PlannedSends, as_request: Callable[[], Asked], *others: Any, **more: Any
    ) -> Any:
        asked = [joined(encode(one, self.sender)) for _, one in as_request().messages]
        call = SteadyCall(self.rank, [joined(one.frames) for one in sends], asked, [one.into for one in sends])
        found.append(call)
        result = exchange(self, sends, as_request, *others, **more)
        call.is_request = isinstance(result, NodeRequest)
        return result

    patch.setattr(NodeSession, "exchange", watched)
    return found
