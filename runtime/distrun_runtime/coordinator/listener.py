"""The coordinator's listener: lets in the agents that dial back, and hands each connection to its place.

`Register` decides who is let in, from what an agent says. `AgentListener` is one thread that leads the conversations
(`contract/enrolment.py`) over TLS, on one port for IPv4 and IPv6. Until an agent has proven that it belongs to the
job, it gets little: HANDSHAKE_S seconds, LINE_BYTES bytes, and one of UNPROVEN_LIMIT connections.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import selectors
import socket
import ssl
import threading
import time
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, Dict, FrozenSet, Iterable, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from distrun_runtime.contract import enrolment
from distrun_runtime.contract.address import ports_to_try
from distrun_runtime.contract.agent_messages import StartFailed, Warned
from distrun_runtime.contract.enrolment import AGENT, CLAIM, COORDINATOR, REDIAL, Claim, Talk, with_port
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator.channel import Put, SessionChannel, SocketConnection
from distrun_runtime.coordinator.messages import AgentLost, PlaceClaimedTwice
from distrun_runtime.errors import ContractError, WireError

HANDSHAKE_S = 10.0
"""How long a connection may take to prove that it is an agent's of this job."""
PROGRAM_S = 60.0
"""How long an agent may take to receive its program."""
UNPROVEN_LIMIT = 256
"""So many connections at once may be about to prove themselves; further ones wait to be accepted."""
BACKLOG = 1024
_SLOW = f"it had not proven itself after {HANDSHAKE_S:.0f} s"
ACCEPT_AGAIN_S = 0.5
"""How long no connection is accepted if the system has no descriptors left."""


class Connected(NamedTuple):
    """A connection of an agent that has proven itself."""

    socket: ssl.SSLSocket
    """It does not block."""
    first: bytes
    """What came after the enrolment already."""
    address: str
    """From where the agent dialled, `10.0.0.7:41234`."""


# ---------------------------------------------------------------------- who is let in


class Admitted(NamedTuple):
    """The agent of `place` is let in."""

    place: str
    reply: bytes
    wants_program: bool = False


class ConnectionRejected(NamedTuple):
    """The connection is closed after `reply`; nothing else follows."""

    reason: str
    reply: bytes
    is_claim: bool = True
    """It said something that only agents say."""


class ClaimedTwice(NamedTuple):
    """Another agent, which knows the secret too, claims a place that has its agent. The job must end."""

    place: str
    first: str
    """The address of the agent that has the place."""
    second: str
    reply: bytes


Decision = Union[Admitted, ConnectionRejected, ClaimedTwice]


@dataclass
class _Holder:
    """The agent that has a place."""

    nonce: str
    key: str
    address: str


class Register:
    """The places of a job and who claimed them. No clock, no socket; any thread may call it, one at a time.

    Arguments:
        job: its id.
        secret: the enrolment secret, which every agent of the job has.
        pin: of the listener's certificate.
        places: their names.
        make_key: returns a new random key, hex.
    """

    def __init__(
        self,
        job: str,
        secret: str,
        pin: str,
        places: Iterable[str],
        make_key: Callable[[], str] = lambda: os.urandom(enrolment.SECRET_BYTES).hex(),
    ) -> None:
        self._job = job
        self._secret = secret
        self._pin = pin
        self._places: FrozenSet[str] = frozenset(places)
        self._make_key = make_key
        self._holders: Dict[str, _Holder] = {}

    def expect(self, places: Iterable[str]) -> None:
        """Let the agents of these places in, and no others. Before any agent is."""
        self._places = frozenset(places)

    def decide(self, line: bytes, nonce: str, address: str) -> Decision:
        """Return what becomes of an agent that says `line` on a connection from `address` whose nonce is `nonce`."""
        try:
            claim = enrolment.claim_of(line)
        except WireError as err:
            return _denied(str(err), is_claim=False)
        holder = self._holders.get(claim.place)
        kind = REDIAL if claim.is_redial else CLAIM
        key = self._secret if not claim.is_redial else holder.key if holder is not None else ""
        # Without a proof a connection learns nothing, not even which places there are.
        if not key or not enrolment.is_same(claim.proof, self._proof(key, AGENT, kind, claim, nonce)):
            return _denied("the proof is wrong: the secret, the key or the certificate is not that of this job")
        proven = self._proof(key, COORDINATOR, kind, claim, nonce)
        if claim.is_redial and holder is not None:
            holder.address = address
            return Admitted(claim.place, enrolment.welcome(proven), claim.program)
        if claim.place not in self._places:
            return _denied(f"job {self._job} has no place {claim.place!r}")
        if holder is not None and holder.nonce != claim.nonce:
            reply = enrolment.denied(f"place {claim.place!r} has its agent already, at {holder.address}; the job ends")
            return ClaimedTwice(claim.place, holder.address, address, reply)
        if holder is None:
            holder = self._holders[claim.place] = _Holder(claim.nonce, self._make_key(), address)
        holder.address = address  # the same agent again: its first answer was lost
        return Admitted(claim.place, enrolment.welcome(proven, holder.key), claim.program)

    def _proof(self, key: str, side: str, kind: str, claim: Claim, nonce: str) -> str:
        # With our job and pin: a claim for another job, or over another certificate, has another proof.
        return enrolment.proof(
            key, side, kind, job=self._job, place=claim.place, pin=self._pin, nonces=(nonce, claim.nonce)
        )


def _denied(reason: str, is_claim: bool = True) -> ConnectionRejected:
    return ConnectionRejected(reason, enrolment.denied(reason), is_claim)


# ---------------------------------------------------------------------- the sockets


class _Caller:
    """One connection before it is an agent's."""

    def __init__(self, raw: socket.socket, address: str, until: float) -> None:
        self.socket = raw
        """The TCP socket, later the TLS socket around it."""
        self.address = address
        self.until = until
        self.is_proven = False
        self.talk: Talk[Optional[Tuple[Admitted, bytes]]]


class AgentListener:
    """Accepts agents of one job. Made: it is bound, and agents may dial. `start`: they are let in.

    Arguments:
        register: decides.
        pem: certificate and key of the listener.
        program: returns what is sent to an agent that asks for its program; it may take a while the first time.
        port_range: `A-B`, ports to listen on; empty: any.

    Raises:
        ContractError: there is no free port in the range, or the certificate cannot be used.
    """

    def __init__(self, register: Register, pem: bytes, program: Callable[[], bytes], port_range: str = "") -> None:
        self._register = register
        self._program = program
        self._context = server_context(pem)
        self._listening = _bound(port_range)
        self._selector = selectors.DefaultSelector()
        self._guests: Set[_Caller] = set()
        self._wake, self._waker = os.pipe()
        self._is_accepting = False
        self._accept_at = 0.0
        self._is_closed = False
        self._thread: Optional[threading.Thread] = None
        self._on_agent: Callable[[str, Connected], None]
        self._on_claimed_twice: Callable[[ClaimedTwice], None]
        self._on_denied: Callable[[str, str, bool], None]

    @property
    def port(self) -> int:
        """The port that agents dial."""
        return int(self._listening.getsockname()[1])

    def start(
        self,
        on_agent: Callable[[str, Connected], None],
        on_claimed_twice: Callable[[ClaimedTwice], None],
        on_denied: Callable[[str, str, bool], None] = lambda address, reason, is_claim: None,
    ) -> None:
        """Begin to let agents in. All three are called in the listener's thread, and must not wait.

        Args:
            on_agent: gets a place and a connection to its agent; it owns the connection from then on.
            on_claimed_twice: a second agent has claimed a place.
            on_denied: gets the address of a refused connection, why, and whether it claimed to be an agent.
        """
        self._on_agent, self._on_claimed_twice, self._on_denied = on_agent, on_claimed_twice, on_denied
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and drop the connections that are not handed over. May be repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        os.write(self._waker, b"x")
        if self._thread is not None:
            self._thread.join()
        for guest in list(self._guests):
            self._drop(guest)
        self._listening.close()
        self._selector.close()
        os.close(self._wake)
        os.close(self._waker)

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ)
        while not self._is_closed:
            self._accept_or_not()
            for key, _ in self._selector.select(self._wait_s()):
                if key.data is not None:
                    key.data()
            now = time.monotonic()
            for guest in [each for each in self._guests if now >= each.until]:
                self._deny(guest, "it takes too long to receive its program" if guest.is_proven else _SLOW)

    def _wait_s(self) -> Optional[float]:
        due = min([guest.until for guest in self._guests] + ([self._accept_at] if self._accept_at else [math.inf]))
        return None if due == math.inf else max(0.0, due - time.monotonic())

    def _accept_or_not(self) -> None:
        """Accept connections while there is room for them."""
        if self._accept_at and time.monotonic() >= self._accept_at:
            self._accept_at = 0.0
        unproven = sum(not guest.is_proven for guest in self._guests)
        wanted = unproven < UNPROVEN_LIMIT and not self._accept_at
        if wanted and not self._is_accepting:
            self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        elif not wanted and self._is_accepting:
            self._selector.unregister(self._listening)
        self._is_accepting = wanted

    def _accept(self) -> None:
        try:
            raw, peer = self._listening.accept()
        except (BlockingIOError, ConnectionError):  # it has gone again
            return
        except OSError:  # no descriptors, no memory
            self._accept_at = time.monotonic() + ACCEPT_AGAIN_S
            return
        raw.setblocking(False)
        guest = _Caller(raw, shown(peer), time.monotonic() + HANDSHAKE_S)
        guest.talk = self._talk(guest)
        self._guests.add(guest)
        self._proceed(guest)

    def _proceed(self, guest: _Caller) -> None:
        """Go on with a conversation as far as its socket allows."""
        try:
            wanted = next(guest.talk)
        except StopIteration as end:
            self._forget(guest)
            if end.value is None:
                guest.socket.close()
                return
            admitted, first = end.value
            assert isinstance(guest.socket, ssl.SSLSocket)
            self._on_agent(admitted.place, Connected(guest.socket, first, guest.address))
        except (OSError, WireError) as err:
            self._deny(guest, str(err))
        else:
            enrolment.await_socket(self._selector, guest.socket, wanted, functools.partial(self._proceed, guest))

    def _talk(self, guest: _Caller) -> Talk[Optional[Tuple[Admitted, bytes]]]:
        """Lead one conversation; return who was let in, and what came after it already."""
        guest.socket = tls = self._context.wrap_socket(guest.socket, server_side=True, do_handshake_on_connect=False)
        yield from enrolment.retried(tls.do_handshake)
        nonce = os.urandom(enrolment.NONCE_BYTES).hex()
        yield from enrolment.sent(tls, enrolment.enrol(nonce))
        line, first = yield from enrolment.line(tls)
        decision = self._register.decide(line, nonce, guest.address)
        if isinstance(decision, Admitted):
            guest.is_proven = True
            guest.until = time.monotonic() + PROGRAM_S
            yield from enrolment.sent(tls, decision.reply)
            if decision.wants_program:
                yield from enrolment.sent(tls, self._program())
            return decision, first
        if isinstance(decision, ClaimedTwice):
            self._on_claimed_twice(decision)
        else:
            self._on_denied(guest.address, decision.reason, decision.is_claim)
        yield from enrolment.sent(tls, decision.reply)
        return None

    def _deny(self, guest: _Caller, reason: str) -> None:
        self._drop(guest)
        self._on_denied(guest.address, reason, False)

    def _drop(self, guest: _Caller) -> None:
        self._forget(guest)
        guest.socket.close()

    def _forget(self, guest: _Caller) -> None:
        self._guests.discard(guest)
        with contextlib.suppress(KeyError, ValueError):  # it never had to wait
            self._selector.unregister(guest.socket)


def server_context(pem: bytes) -> ssl.SSLContext:
    """Return a TLS context that presents the certificate of `pem`, which holds its key too.

    Raises:
        ContractError: it is no certificate with its key.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Agents keep no tickets. One that was sent to an agent that has gone would only break its last words.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_RENEGOTIATION
    # Only a file can be loaded. This one is in memory, or is removed at once.
    with contextlib.ExitStack() as stack:
        if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
            fd = os.memfd_create("certificate")
            path = f"/proc/self/fd/{fd}"
        else:
            import tempfile

            fd, path = tempfile.mkstemp()
            stack.callback(os.unlink, path)
        stack.callback(os.close, fd)
        os.write(fd, pem)
        try:
            context.load_cert_chain(path)
        except ssl.SSLError as err:
            raise ContractError(f"the certificate of the job cannot be used: {err}") from None
    return context


def pin_of(pem: bytes) -> str:
    """Return the pin of the first certificate of `pem`."""
    found = re.search(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", pem, re.DOTALL)
    if found is None:
        raise ContractError("the certificate of the job is missing")
    return enrolment.pin_of(ssl.PEM_cert_to_DER_cert(found.group().decode("ascii")))


def shown(peer: Tuple[Any, ...]) -> str:
    """Return a socket's address as it is written in messages; an IPv4 address as such, however it came."""
    host, port = peer[:2]
    if host.startswith("::ffff:") and "." in host:
        host = host[len("::ffff:") :]
    return with_port(host, port)


def _bound(port_range: str) -> socket.socket:
    """Return a listening socket for IPv4 and IPv6, or for IPv4 where the system has nothing else."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    for port in ports_to_try(port_range):
        with contextlib.suppress(OSError):  # it is taken
            return _listening(family, port)
    span = f" in {port_range}" if port_range else ""
    raise ContractError(f"no free port{span} on {socket.gethostname()} to listen on; give a wider --port-range")


def _listening(family: int, port: int) -> socket.socket:
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        found.bind(("", port))
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found


# Channels to agents that dial back: one for each place, all served by one listener.
#
# Nothing is opened here: a channel gets its first connection when its agent dials, and another one when the agent dials
# again after a cut. Until the supervisor's start limit it waits for the first, until the agent's lease ends for the
# next.


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
        fix: what to do if they do not reach it.

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
        fix: str = OPEN,
    ) -> None:
        self.pin = pin_of(pem)
        """What agents have to find."""
        self._channels: Dict[str, DialBackChannel] = {}
        self._register = Register(job, secret, self.pin, ())
        self._listener = AgentListener(self._register, pem, program, port_range)
        self.addresses = tuple(addresses)
        self._limit_s = limit_s
        self._fix = fix
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
        if self._put is None or channel.inlet.said_bye or channel.is_killed:
            return
        kind = AgentLost if channel.inlet.greeted else StartFailed
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
                self._put(StartFailed(place, reason, time.time(), kind="unreachable", fix=self._fix))

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


class DialBackChannel(SessionChannel):
    """A channel to the agent of one place, which dials back."""

    def __init__(self, place: str, agents: DialBack) -> None:
        super().__init__(place, holds=True, greets=False)
        self._agents = agents

    def start(self, put: Put) -> None:
        """Put what arrives, from now on, and let agents in."""
        super().start(put)
        self._agents.open(put)
