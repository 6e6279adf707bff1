"""Seeded delays after everything that lets another thread, or another node, go on.

Code that changes its state after such a call is right only as long as nothing interrupts it between the two. Here each
of these calls may be followed by a pause, so that the other side is there first. Nothing in the runtime knows of it:
the calls are wrapped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from inproc import InprocTransport

from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.role import NodeRequest
from distrun_runtime.transport import admission, host_segments
from distrun_runtime.transport.admission import Admission
from distrun_runtime.transport.direct import DirectTransport
from distrun_runtime.transport.resend import kind_of
from distrun_runtime.transport.zeromq import ZmqTransport

POINTS: tuple[tuple[Any, str], ...] = (
    (ZmqTransport, "send"),
    (DirectTransport, "send"),
    (InprocTransport, "send"),
    (ZmqTransport, "wake"),
    (InprocTransport, "wake"),
    (NodeRequest, "resolve"),
    (host_segments, "_tell"),
    (Admission, "_answer"),
)
"""What lets others go on: messages, the wake of a node's thread, the answer to a call, a descriptor that is passed to
another process, the answer to a password."""
PERCENT = 1.0
"""How often a pause follows."""
PAUSE_S = 0.01
"""The longest one. After WELCOME, of which there are few, one always follows."""
UNPROVEN_BYTES = 2048
"""What a connection may send before it is proven: hardly more than it needs. Usually far more than these jobs send."""


def delay(patch: pytest.MonkeyPatch, seed: str, *, percent: float = PERCENT) -> None:
    """Have pauses follow; the same seed gives the same ones, as far as threads come in the same order."""
    chance = random.Random(seed)

    def paused(act: Callable[..., Any]) -> Callable[..., Any]:
        def acting(*arguments: Any, **more: Any) -> Any:
            result = act(*arguments, **more)
            is_welcome = act.__name__ == "send" and kind_of(arguments[2]) is Kind.WELCOME
            if is_welcome or 100 * chance.random() < percent:
                time.sleep(PAUSE_S * chance.random())
            return result

        return acting

    patch.setattr(admission, "UNPROVEN_BYTES", UNPROVEN_BYTES)
    patch.setattr(admission, "_SCAN_S", PAUSE_S / 10)
    for owner, name in POINTS:
        patch.setattr(owner, name, paused(getattr(owner, name)))


def delay_after(patch: pytest.MonkeyPatch, kind: Kind, pause_s: float) -> None:
    """Have a pause follow every message of a kind that is sent over TCP."""
    send = ZmqTransport.send

    def sending(self: ZmqTransport, link: str, frames: Any) -> Any:
        lease = send(self, link, frames)
        if kind_of(frames) is kind:
            time.sleep(pause_s)
        return lease

    patch.setattr(ZmqTransport, "send", sending)
