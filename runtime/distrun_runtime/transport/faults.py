"""Injects faults: a transport that drops, duplicates, delays or reorders what another one receives.

For testing what a job does on a bad network, and that `transport.resend` makes its results exact. Faults are injected
where messages are received; the handshake is spared. Each process has a random generator of its own, seeded by the
seed and its name, so that the same messages in the same order meet the same faults.

Source: ps-lite's PS_DROP_MSG. There the generator was seeded by the second, for each message: a node lost all
messages of a second or none.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.protocol.message import Kind
from distrun_runtime.transport.base import Arrived, Down, Event, Link, Transport
from distrun_runtime.transport.resend import HANDSHAKE, kind_of

ACK = "ACK"
"""What acknowledgements are called where kinds of messages are named."""

FORM = (
    "drop=PERCENT, duplicate=PERCENT, delay=PERCENT:MILLISECONDSms, reorder=PERCENT, seed=NUMBER and kinds=PUSH+PULL,"
    " separated by commas, such as drop=5,delay=20:50ms,seed=7"
)
REORDER_S = 0.05
"""The longest time that a message waits for the next one to overtake it, in seconds."""


@dataclass(frozen=True)
class Faults:
    """Which faults, and how often, in percent of the messages received."""

    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.0
    reorder: float = 0.0
    seed: int = 0
    kinds: frozenset[str] = frozenset()
    """Names of kinds of messages, `ACK` among them; empty: all."""

    @classmethod
    def parse(cls, text: str, drop: float = 0.0) -> Faults:
        """Return the faults that `DISTRUN_FAULTS` asks for; none for an empty text. `drop` is its default.

        Raises:
            ValueError: the text is not of the form `FORM`; says what is wrong.
        """
        faults = cls(drop=drop)
        for part in text.split(",") if text.strip() else ():
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in ("drop", "duplicate", "delay", "reorder", "seed", "kinds"):
                raise ValueError(f"{part!r} is none of {FORM}")
            try:
                faults = replace(faults, **_read(name, value))
            except ValueError as err:
                raise ValueError(f"{part}: {err}; expected {FORM}") from None
        return faults

    @property
    def is_none(self) -> bool:
        """Whether nothing would happen."""
        return not (self.drop or self.duplicate or self.delay or self.reorder)

    def concern(self, kind: Kind | None) -> bool:
        """Return whether faults are injected into messages of this kind; None is an acknowledgement."""
        name = ACK if kind is None else kind.name
        return kind not in HANDSHAKE and (not self.kinds or name in self.kinds)


@dataclass(frozen=True)
class Fate:
    """What happens to one message."""

    copies: int = 1
    delay_s: float = 0.0
    is_overtaken: bool = False


class Chance:
    """Decides the fate of each message, by its own random generator."""

    def __init__(self, faults: Faults, name: str) -> None:
        self._faults = faults
        self._random = random.Random(f"{faults.seed} {name}")

    def fate(self, kind: Kind | None) -> Fate:
        """Return what happens to the next message; `kind` None is an acknowledgement."""
        # Always as many numbers, so that one message's fate does not depend on another's kind.
        drop, double, delay, exchange = (100 * self._random.random() for _ in range(4))
        faults = self._faults
        if not faults.concern(kind):
            return Fate()
        if drop < faults.drop:
            return Fate(copies=0)
        return Fate(
            copies=2 if double < faults.duplicate else 1,
            delay_s=faults.delay_s if delay < faults.delay else 0.0,
            is_overtaken=exchange < faults.reorder,
        )


class Faulty:
    """A transport that drops, duplicates, delays and reorders what another one receives.

    Arguments:
        inner: the transport that receives. All calls but `disconnect` and `poll` go to it as they are.
        name: this process among the job's, such as `worker-1`.
        keeps_order: a delayed message delays all that follow on its connection. False: they overtake it.
    """

    def __init__(
        self,
        inner: Transport,
        faults: Faults,
        name: str,
        *,
        keeps_order: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inner = inner
        self.bind, self.connect, self.send = inner.bind, inner.connect, inner.send
        self.admitted, self.proven, self.refused = inner.admitted, inner.proven, inner.refused
        self.shares = inner.shares
        self.wake, self.close = inner.wake, inner.close
        self._chance = Chance(faults, name)
        self._keeps_order = keeps_order
        self._clock = clock
        self._late: list[tuple[float, int, Arrived]] = []
        """A heap: when, which, what."""
        self._count = itertools.count()
        self._overtaken: dict[Link, tuple[float, list[Arrived]]] = {}
        """Messages that wait for the next one of their connection, and until when."""

    def disconnect(self, link: Link, linger_s: float = 0.0) -> None:
        """Close a connection; what is still delayed on it is dropped."""
        self._of(link)
        self._inner.disconnect(link, linger_s)

    def poll(self, timeout_s: float) -> list[Event]:
        """Wait for events and return those that were not dropped or delayed."""
        due = [at for at, _, _ in self._late[:1]] + [at for at, _ in self._overtaken.values()]
        if due:
            timeout_s = max(0.0, min(timeout_s, min(due) - self._clock()))
        arrived = self._inner.poll(timeout_s)
        now = self._clock()
        events: list[Event] = []
        for event in arrived:
            if isinstance(event, Arrived):
                events += self._met(event, now)
            else:
                # What came before the end of a connection is delivered before it.
                events += self._of(event.link) if isinstance(event, Down) else []
                events.append(event)
        while self._late and self._late[0][0] <= now:
            events.append(heapq.heappop(self._late)[2])
        for link, (at, waiting) in list(self._overtaken.items()):
            if at <= now:
                del self._overtaken[link]
                events += waiting
        return events

    def _met(self, event: Arrived, now: float) -> list[Event]:
        """Return what is delivered now of a message, and of those that waited for it."""
        fate = self._chance.fate(kind_of(event.frames))
        _, waited = self._overtaken.pop(event.link, (0.0, []))
        copies = [event] * fate.copies
        behind = [at for at, _, late in self._late if late.link == event.link] if self._keeps_order else []
        if copies and (fate.delay_s or behind):
            for late in copies:
                heapq.heappush(self._late, (max([now + fate.delay_s, *behind]), next(self._count), late))
            return list(waited)
        if copies and fate.is_overtaken and not waited:
            self._overtaken[event.link] = (now + REORDER_S, copies)
            return []
        return [*copies, *waited]

    def _of(self, link: Link) -> list[Event]:
        """Return what is delayed on a connection, and forget it."""
        mine = sorted(entry for entry in self._late if entry[2].link == link)
        self._late = [entry for entry in self._late if entry[2].link != link]
        heapq.heapify(self._late)
        return [*(entry[2] for entry in mine), *self._overtaken.pop(link, (0.0, []))[1]]


def _read(name: str, value: str) -> dict[str, Any]:
    if name == "seed":
        return {"seed": int(value)}
    if name == "kinds":
        known = {kind.name for kind in Kind if kind not in HANDSHAKE} | {ACK}
        kinds = frozenset(word.strip().upper() for word in value.split("+"))
        if not kinds <= known:
            raise ValueError(f"no kind {', '.join(sorted(kinds - known))}, known are {', '.join(sorted(known))}")
        return {"kinds": kinds}
    percent, colon, wait = value.partition(":")
    found = float(percent)
    if not 0 <= found <= 100:
        raise ValueError("a percent is from 0 to 100")
    if name != "delay":
        if colon:
            raise ValueError("only a delay has a time")
        return {name: found}
    if not wait.endswith("ms"):
        raise ValueError("a delay needs a time in milliseconds")
    milliseconds = float(wait[:-2])
    if not 0 <= milliseconds <= 3600000:
        raise ValueError("a delay is from 0 to 3600000 ms")
    return {"delay": found, "delay_s": milliseconds / 1000}
