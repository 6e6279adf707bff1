"""Channels to agents that dial back: one for each place, all served by one listener.

Nothing is opened here: a channel gets its first connection when its agent dials, and another one when the agent dials
again after a cut. Until the supervisor's start limit it waits for the first, until the agent's lease ends for the next.
"""

from __future__ import annotations

import threading
import time
from types import MappingProxyType
from typing import Callable, Dict, Iterable, Mapping, Optional, Sequence, Set, Tuple

from distrun_runtime.contract.duration import duration
from distrun_runtime.coordinator.channel import Put, SessionChannel
from distrun_runtime.coordinator.connection import SocketConnection
from distrun_runtime.coordinator.events import AgentLost, PlaceClaimedTwice, StartFailed, Warned
from distrun_runtime.coordinator.listener import AgentListener, ClaimedTwice, Connected, Register, pin_of

OPEN = (
    "open that port for the job's hosts, name open ones with --port-range A-B, or say where it can be reached with "
    "--coordinator-host and --coordinator-address"
)
WARNINGS = 5
"""So many agents that were refused are told of. Who does not know the secret may try as often as they like."""


class DialBack:
    """The agents of one job that dial back.

    Made: the listener is bound, so that `port` can be told to those who start the agents. The channels' `start` lets
    agents in; those that dial before wait. Any thread.

    Arguments:
        job: its id.
        secret: the enrolment secret; every agent of the job has it.
        pem: the job's certificate and its key.
        places: the names that agents may claim, each once; `expect` tells them where they are known later.
        program: returns the agent's blob (`blob.dialed`).
        port_range: `A-B`; empty: any port.
        limit_s: how long the first connection of each agent is waited for once they are let in; None: the supervisor's
            start limit is enough. An agent that is late is a host that cannot reach us.
        addresses: what agents were told to dial, for messages.

    Raises:
        ContractError: no port is free there, or the certificate cannot be used.
    """

    def __init__(
        self,
        job: str,
        secret: str,
        pem: bytes,
        places: Iterable[str],
        *,
        program: Callable[[], bytes],
        port_range: str = "",
        limit_s: Optional[float] = None,
        addresses: Sequence[str] = (),
    ) -> None:
        self.pin = pin_of(pem)
        """What agents have to find."""
        self._channels: Dict[str, DialBackChannel] = {}
        self._register = Register(job, secret, self.pin, ())
        self._listener = AgentListener(self._register, pem, program, port_range)
        self.addresses = tuple(addresses)
        self._limit_s = limit_s
        self._late: Optional[threading.Timer] = None
        self._absent: Set[str] = set()
        """Places whose agents have not dialled yet."""
        self._put: Optional[Put] = None
        self._starting = threading.Lock()
        self._warnings = 0
        self.expect(places)

    def expect(self, places: Iterable[str], claims: Mapping[str, str] = MappingProxyType({})) -> None:
        """Have one channel for each of these places, in the place of those from before. Before `open` only.

        `claims`: what agents call their places, by place, where an engine has other names for them.
        """
        self._channels = {name: DialBackChannel(name, self) for name in places}
        self._absent = set(self._channels)
        self._names = {claims.get(name, name): name for name in self._channels}
        """Places by what their agents claim."""
        self._register.expect(self._names)

    @property
    def port(self) -> int:
        """The port that agents dial."""
        return self._listener.port

    @property
    def channels(self) -> Tuple[DialBackChannel, ...]:
        """The channels, in the order of the places."""
        return tuple(self._channels.values())

    def open(self, put: Put) -> None:
        """Let agents in from now on. Only the first call counts."""
        with self._starting:
            if self._put is None:
                self._put = put
                self._listener.start(self._attach, self._tell_claimed_twice, self._tell_denied)
                if self._limit_s is not None:
                    self._late = threading.Timer(self._limit_s, self._give_up)
                    self._late.daemon = True
                    self._late.start()

    def lose(self, place: str, reason: str) -> None:
        """Give up the agent of a place, if it has not said its last word: who started it knows that it is gone."""
        channel = self._channels[place]
        if self._put is None or channel.said_bye or channel.is_killed:
            return
        kind = AgentLost if channel.greeted else StartFailed
        channel.kill()
        self._put(kind(place, reason, time.time()))

    def close(self) -> None:
        """Listen no more. The channels keep their connections."""
        if self._late is not None:
            self._late.cancel()
        self._listener.close()

    def _give_up(self) -> None:
        """Say which agents have not dialled in time."""
        where = " or ".join(with_port(each, self.port) for each in self.addresses) or f"port {self.port}"
        for place in sorted(self._absent):
            if self._put is not None:
                reason = f"its agent did not reach the coordinator at {where} within {duration(self._limit_s or 0.0)}"
                self._put(StartFailed(place, reason, time.time(), kind="unreachable", fix=OPEN))

    def _attach(self, place: str, connected: Connected) -> None:
        name = self._names[place]
        self._absent.discard(name)
        self._channels[name].attach(SocketConnection(connected.socket), connected.first)

    def _tell_claimed_twice(self, found: ClaimedTwice) -> None:
        if self._put is not None:
            self._put(PlaceClaimedTwice(self._names[found.place], found.first, found.second, time.time()))

    def _tell_denied(self, address: str, reason: str, is_claim: bool) -> None:
        if not is_claim or self._put is None or self._warnings > WARNINGS:
            return
        self._warnings += 1
        if self._warnings > WARNINGS:
            self._put(Warned("", "more agents were refused; they are not told of any more"))
        else:
            self._put(Warned("", f"an agent that dialled from {address} was refused: {reason}"))


def with_port(host: str, port: int) -> str:
    """Return `ADDRESS:PORT`. Pure."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class DialBackChannel(SessionChannel):
    """A channel to the agent of one place, which dials back."""

    def __init__(self, place: str, agents: DialBack) -> None:
        super().__init__(place, holds=True, greets=False)
        self._agents = agents

    def start(self, put: Put) -> None:
        """Put what arrives, from now on, and let agents in."""
        super().start(put)
        self._agents.open(put)
