"""Dials the coordinator, for agents whose connection it cannot open, or that was cut.

`Dialer` does it in turns of the agent's loop, and never waits: it tries all addresses of the coordinator at once,
compares the certificate's pin before it sends anything, and proves itself on one connection at a time
(`contract/enrolment.py`). If no address lets it in, it tries again after a pause.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import selectors
import socket
import ssl
import time
from typing import TYPE_CHECKING, Callable, Dict, List, NamedTuple, Sequence, Tuple

from distrun_runtime.agent.channel import Connection, StreamSocket
from distrun_runtime.contract import enrolment
from distrun_runtime.contract.enrolment import AGENT, CLAIM, COORDINATOR, REDIAL, Claim, Talk
from distrun_runtime.errors import ContractError, Refused, WireError

if TYPE_CHECKING:
    from distrun_runtime.agent.channel import MakeReconnector, OnConnection

ATTEMPT_S = 10.0
"""How long one connection may take to be made and let in."""
PAUSES_S = (0.2, 5.0)
"""The pause after the first round of attempts; each is twice as long as the one before, up to the second number."""

_TURN = 0
"""What a conversation yields that waits for another one to end."""


class Credentials(NamedTuple):
    """Whom an agent dials, as whom, and how it proves that."""

    addresses: Tuple[Tuple[str, int], ...]
    """IP address and port of the coordinator: several, if it is not known which of them this host reaches."""
    pin: str
    """SHA-256 of its certificate, hex."""
    job: str
    place: str
    nonce: str
    """This agent's own, the same for all its connections."""
    key: str
    """The enrolment secret, or the place's own key."""
    is_redial: bool = True
    """Whether `key` is the place's own."""

    def __repr__(self) -> str:
        return f"Credentials({self.addresses}, job={self.job}, place={self.place}, key=...)"


class Dialed(NamedTuple):
    """A connection on which the coordinator and this agent have proven themselves."""

    socket: ssl.SSLSocket
    """It does not block."""
    first: bytes
    """What came after the enrolment already."""
    key: str
    """What the agent proves itself with next time."""


class Dialer:
    """Dials until it is let in, refused for good, or stopped. One thread; `selector` is that of its loop.

    Every key that it registers has a function as its data, which the loop calls when the socket is ready. The loop
    also calls `tick` at `next_at` at the latest.

    Arguments:
        credentials: whom it dials.
        selector: waits for its sockets.
        on_dialed: gets the connection, within a call of the loop. The dialer has stopped by then.
    """

    def __init__(
        self, credentials: Credentials, selector: selectors.BaseSelector, on_dialed: Callable[[Dialed], None]
    ) -> None:
        self._credentials = credentials
        self._selector = selector
        self._on_dialed = on_dialed
        self._attempts: List[_Attempt] = []
        self._pause_s = PAUSES_S[0]
        self._again_at = math.inf
        self.is_dialing = False
        self.denied = ""
        """Why the coordinator refuses this agent for good; empty: it has not."""
        self.problems: Dict[str, str] = {}
        """Why the last attempt failed, by address."""

    @property
    def next_at(self) -> float:
        """When `tick` has something to do (monotonic clock)."""
        return min([self._again_at] + [attempt.until for attempt in self._attempts])

    def begin(self) -> None:
        """Dial, from now on, unless it does so already or was refused for good."""
        if self.is_dialing or self.denied:
            return
        self._pause_s = PAUSES_S[0]
        self.is_dialing = True
        self._again_at = time.monotonic()
        self.tick(self._again_at)

    def close(self) -> None:
        """Dial no more, until `begin`."""
        self.is_dialing = False
        self._again_at = math.inf
        for attempt in list(self._attempts):
            self._drop(attempt)

    def tick(self, now: float) -> None:
        """Give up attempts that take too long, and begin new ones when the pause is over."""
        for attempt in [each for each in self._attempts if now >= each.until]:
            self._fail(attempt, f"no answer within {ATTEMPT_S:.0f} s")
        if self.is_dialing and now >= self._again_at:
            self._again_at = math.inf
            for address in self._credentials.addresses:
                try:
                    attempt = _Attempt(address, now + ATTEMPT_S)
                except OSError as err:  # no such family here, or no address but a name
                    self.problems[enrolment.with_port(*address)] = str(err)
                else:
                    attempt.talk = self._talk(attempt)
                    self._attempts.append(attempt)
            for attempt in list(self._attempts):
                self._proceed(attempt)
            self._rest(now)

    def _rest(self, now: float) -> None:
        """Begin a pause when the last attempt of a round has failed."""
        if self.is_dialing and not self._attempts and self._again_at == math.inf:
            # Agents that were cut off together should not come back all in the same moment.
            self._again_at = now + self._pause_s * (0.75 + int.from_bytes(os.urandom(2), "big") / 131072)
            self._pause_s = min(2 * self._pause_s, PAUSES_S[1])

    def _proceed(self, attempt: _Attempt) -> None:
        """Go on with an attempt as far as its socket, or its turn, allows."""
        if attempt not in self._attempts:  # another one was let in before
            return
        try:
            wanted = next(attempt.talk)
        except StopIteration as end:
            self._forget(attempt)
            self.close()
            self._on_dialed(end.value)
        except Refused as err:
            self.denied = str(err)
            self.close()
        except (OSError, WireError, ValueError) as err:
            self._fail(attempt, str(err))
        else:
            enrolment.await_socket(self._selector, attempt.socket, wanted, functools.partial(self._proceed, attempt))

    def _fail(self, attempt: _Attempt, why: str) -> None:
        self.problems[attempt.name] = why
        self._drop(attempt)
        waiting = [each for each in self._attempts if each.is_waiting]
        if waiting:
            self._proceed(waiting[0])
        self._rest(time.monotonic())

    def _drop(self, attempt: _Attempt) -> None:
        self._forget(attempt)
        attempt.talk.close()
        attempt.socket.close()

    def _forget(self, attempt: _Attempt) -> None:
        if attempt in self._attempts:
            self._attempts.remove(attempt)
        with contextlib.suppress(KeyError, ValueError):  # it does not wait for its socket
            self._selector.unregister(attempt.socket)

    def _talk(self, attempt: _Attempt) -> Talk[Dialed]:
        """Lead one attempt to its end."""
        sock = attempt.socket
        result = sock.connect_ex(attempt.at)
        if result == errno.EINPROGRESS:
            yield selectors.EVENT_WRITE
            result = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if result:
            raise OSError(result, os.strerror(result))
        attempt.socket = tls = client_context().wrap_socket(sock, do_handshake_on_connect=False)
        yield from enrolment.retried(tls.do_handshake)
        check_pin(tls, self._credentials.pin)
        while any(each.has_turn for each in self._attempts):
            attempt.is_waiting = True
            yield _TURN
        attempt.is_waiting, attempt.has_turn = False, True
        return (yield from enrolled(tls, self._credentials))


class _Attempt:
    """One connection to be. Raises OSError if the address is none that this host knows how to dial."""

    def __init__(self, address: Tuple[str, int], until: float) -> None:
        self.name = enrolment.with_port(*address)
        self.until = until
        host, port = address
        family, kind, protocol, _, at = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        self.at = tuple(at)
        """The address as the system wants it."""
        self.socket = socket.socket(family, kind, protocol)
        """The TCP socket, later the TLS socket around it."""
        self.socket.setblocking(False)
        self.talk: Talk[Dialed]
        self.is_waiting = False
        """It has found the coordinator, and waits until another one has failed to prove itself."""
        self.has_turn = False
        """It proves itself."""


def redialing(
    tls: ssl.SSLSocket, peer: Tuple[str, int], words: Sequence[str], *who: str
) -> Tuple[Connection, MakeReconnector]:
    """Return the connection of an agent that has dialled (`bootstrap`), and how it gets the next one.

    Args:
        peer: the address that answered. It is dialled too: `words` may be names, and to look them up is to wait.
        words: `ADDRESS:PORT` of the coordinator.
        who: pin, job, place, nonce and the place's own key.
    """
    pin, job, place, nonce, key = who
    others = [each for each in addresses(words) if each != peer]
    credentials = Credentials((peer, *others), pin, job, place, nonce, key)

    def make_reconnector(selector: selectors.BaseSelector, on_connection: OnConnection) -> Dialer:
        return Dialer(credentials, selector, lambda dialed: on_connection(StreamSocket(dialed.socket), dialed.first))

    return StreamSocket(tls), make_reconnector


def client_context() -> ssl.SSLContext:
    """Return a TLS context for a connection whose certificate is checked by `check_pin`: no authority, name or date."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def check_pin(tls: ssl.SSLSocket, pin: str) -> None:
    """Refuse a certificate that is not the job's. Nothing has been sent before.

    Raises:
        WireError: it is another one.
    """
    found = enrolment.pin_of(tls.getpeercert(binary_form=True) or b"")
    if not enrolment.is_same(found, pin):
        raise WireError(f"its certificate is not this job's: SHA-256 {found}, expected {pin}; nothing was sent")


def enrolled(tls: ssl.SSLSocket, who: Credentials) -> Talk[Dialed]:
    """Prove both sides to each other.

    Raises:
        Refused: the coordinator refuses this agent, and will not change its mind.
        WireError: the other side is no coordinator of this job.
    """
    head, first = yield from enrolment.line(tls)
    nonces = (enrolment.nonce_of(head), who.nonce)
    kind = REDIAL if who.is_redial else CLAIM

    def proof(side: str) -> str:
        return enrolment.proof(who.key, side, kind, job=who.job, place=who.place, pin=who.pin, nonces=nonces)

    if first:
        raise WireError("it sends more than its first line before it has an answer")
    made = Claim(who.is_redial, who.job, who.place, who.nonce, proof(AGENT))
    yield from enrolment.sent(tls, enrolment.claim(made))
    head, first = yield from enrolment.line(tls)
    answer = enrolment.decode(head)
    if answer["type"] == "denied":
        raise Refused(f"the coordinator refuses this agent: {answer.get('reason')!s:.500}")
    if answer["type"] != "welcome" or not enrolment.is_same(str(answer.get("proof")), proof(COORDINATOR)):
        raise WireError("the other side does not know this job's secret")
    return Dialed(tls, first, who.key if who.is_redial else str(answer.get("key")))


def addresses(words: Sequence[str]) -> Tuple[Tuple[str, int], ...]:
    """Return address and port of each `10.0.0.1:4711` or `[fe80::1%eth0]:4711`. Raises ContractError."""
    found = []
    for word in words:
        host, colon, port = word.rpartition(":")
        if not (host and colon and port.isdigit()):
            raise ContractError(f"{word!r} is not ADDRESS:PORT")
        found.append((host.strip("[]"), int(port)))
    return tuple(found)
