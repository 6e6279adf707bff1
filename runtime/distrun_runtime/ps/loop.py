"""THE loop of a node: receive, let the role decide, act. One per process, passed in, never global.

It owns the transport, proves connections (HELLO) before any role hears of them, drives the engine of a server,
and traces what PS_VERBOSE asks for. Nothing is sent on a connection before it is welcome.
"""

from __future__ import annotations

import logging
import secrets
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field, replace
from typing import Protocol

import numpy as np

from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import WireError
from distrun_runtime.protocol import handshake, message
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.engine import Reply, WorkEngine
from distrun_runtime.ps.replies import ReplyValues, refusal
from distrun_runtime.ps.trace import Trace
from distrun_runtime.transport.base import (
    COPIED,
    Arrived,
    Down,
    Event,
    Form,
    Lease,
    PathChosen,
    Rejected,
    Released,
    Stranger,
    Transport,
    Up,
)

logger = logging.getLogger(__name__)

ROLE_CODES = {"scheduler": 1, "server": 2, "worker": 3}
"""Roles in a message's head."""

TICK_S = 0.25
LINGER_S = 2.0
"""How long the scheduler's last words have to leave."""
STRANGER_S = 10.0
"""How long a connection in may stay without proof."""


@dataclass
class _Gate:
    """A connection on its way to being welcome."""

    opener: handshake.Opener | None = None
    acceptor: handshake.Acceptor | None = None
    is_open: bool = False
    is_refused: bool = False
    """The other side was told why; nothing more is heard on it."""
    since: float = 0.0
    held: list[Message] = field(default_factory=list)


@dataclass
class _Hold:
    """A link whose events wait for the engine."""

    count: int = 0
    """How much work it waits for."""
    events: deque[Arrived | Down] = field(default_factory=deque)


class KnownMessages(Protocol):
    """Returns what follows from a message at a time; None: its bytes are not known (`ps.steady`)."""

    def take(self, link: str, frames: Sequence[Buffer], now: float) -> list[role.Action] | None:
        """For its frames."""

    def take_bytes(self, link: str, data: bytes, now: float) -> list[role.Action] | None:
        """For what was received from a link at once, which may be more or less than a message."""


class Loop:
    """Runs one role over one transport.

    Threads: everything but `ask` and `tell` belongs to the thread that calls `run`.
    """

    def __init__(
        self,
        transport: Transport,
        role_: role.Role,
        token: bytes,
        trace: Trace,
        *,
        engine: WorkEngine | None = None,
        known: KnownMessages | None = None,
        publish: Callable[[Mapping[str, str]], None] = lambda facts: None,
        clock: Callable[[], float] = time.monotonic,
        turn: AbstractContextManager[object] | None = None,
        take_over: Callable[[], object] | None = None,
    ) -> None:
        """Make one.

        Arguments:
            turn: held by the thread that calls `run`, but while the transport waits.
            take_over: called when that thread has the turn again. Returns what other threads have left to do meanwhile,
                as for `ask`; None: nothing.
        """
        self._transport = transport
        self._role = role_
        self._token = token
        self._trace = trace
        self._engine = engine
        self.known = None if trace.has_messages else known
        self._unknown: Sequence[Buffer] = ()
        """The message that `take` has not taken."""
        self._publish = publish
        self.send_small: Callable[[str, Sequence[Buffer], Form], Lease]
        self.send_small = lambda link, frames, form: transport.send(link, frames)
        """Sends a message of which no frame goes by another path than the direct connection (`transport.direct`)."""
        self.metrics: Callable[[float], None] | None = None
        """Called at every turn, with the time. Set it before `run`."""
        self._clock = clock
        self._turn = turn or nullcontext()
        self._take_over = take_over
        self._gates: dict[str, _Gate] = {}
        self.asked: deque[role.Event] = deque()
        """What the process's own threads want, and the loop has not heard yet."""
        self._later: deque[tuple[role.Work, str | None, Message | None]] = deque()
        """Work that the engine has not reported yet, in order, each with the message that it follows from."""
        self._holds: dict[str, _Hold] = {}
        """By link."""
        self._looked = 0.0
        """When connections without proof were last looked for."""
        self._is_failing = False
        self._finish: role.Finish | None = None

    def ask(self, what: object) -> None:
        """Hand in what the process's own threads want. Threads: any."""
        self.asked.append(role.CallSubmitted(what))
        self._transport.wake()

    def unheard(self) -> list[object]:
        """Return what was asked too late. Call it when `run` has ended."""
        left, self.asked = self.asked, deque()
        return [event.what for event in left if isinstance(event, role.CallSubmitted)]

    @property
    def queued(self) -> int:
        """How much waits here: work that the engine has not done, and messages behind it. Threads: the loop's."""
        return len(self._later) + sum(len(hold.events) for hold in self._holds.values())

    def tell(self, signal: int) -> None:
        """Hand in a signal. Threads: any, also from a signal handler."""
        self.asked.append(role.SignalReceived(signal))
        self._transport.wake()

    def run(self) -> role.Finish:
        """Loop until the role finishes; return how. What was sent has a moment to leave."""
        with self._turn, np.errstate(over="ignore", invalid="ignore"):  # as for other sums (`arrays.device`)
            return self._run()

    def _run(self) -> role.Finish:
        if self._engine is not None:
            self._engine.wakes(self._transport.wake)
        self._perform(self._role.start(self._clock()))
        while self._finish is None:
            events = self._transport.poll(TICK_S)
            if self._take_over is not None and (left := self._take_over()) is not None:
                self._decide(role.CallSubmitted(left))
            for event in events:
                if isinstance(event, Arrived) and not self._holds:  # nearly always
                    self._received(event.link, event.frames)
                else:
                    self._arrived(event)
            if self._later:
                self._take_results()
            if self._engine is not None and self._engine.failed is not None and not self._is_failing:
                # The role is told, once, that the engine cannot use its device any more.
                self._is_failing = True
                self._decide(role.Failing(str(self._engine.failed)))
            while self.asked:
                self._decide(self.asked.popleft())
            now = self._clock()
            self._perform(self._role.tick(now))
            if self.metrics is not None:
                self.metrics(now)
            if now >= self._looked + 1.0:  # there may be thousands of connections
                self._drop_strangers(now)
        if self._engine is not None:
            self._engine.close()
        # The others have had an answer to their last words, or know that there will be none.
        self._transport.close(linger_s=LINGER_S if self._role.me.role == "scheduler" else 0.0)
        return self._finish

    # Connections

    def _arrived(self, event: Event) -> None:
        match event:
            case Arrived(link=link) | Down(link=link) if link in self._holds:
                self._holds[link].events.append(event)
            case Arrived():
                self._received(event.link, event.frames)
            case Released():
                if self._engine is not None:
                    self._engine.released(event.lease)
            case Up():
                self._say_hello(event.link)
            case Down():
                self._ended(event.link, event.reason)
            case Rejected():
                self._turned_away(event.link, event.reason)
            case Stranger():
                self._deny(role.Denied(event.reason, event.address, event.is_foreign, event.is_same_user))
            case PathChosen():
                why = f" reason={event.reason}" if event.reason else ""
                self._trace.log("INFO", f"event=path link={event.link} path={event.path}{why}")

    def _say_hello(self, link: str) -> None:
        opener = handshake.Opener(self._role.me, self._token, secrets.token_hex(16), calls=link)
        gate = self._gates.setdefault(link, _Gate())
        gate.opener, gate.is_open = opener, False
        self._transmit(link, opener.hello())

    def _ended(self, link: str, reason: str) -> None:
        gate = self._gates.get(link)
        if gate is None or (gate.opener is not None and not gate.is_open):
            return  # Not proven yet: the transport tries again, and `Up` says HELLO again.
        self._gates.pop(link, None)
        if gate.opener is not None:
            self._transport.disconnect(link)
        if gate.is_open:
            self._decide(role.Broken(link, reason))

    def take(self, link: str, frames: Sequence[Buffer]) -> Sequence[Buffer] | None:
        """Do at once what a message asks for, if its bytes are known, and return None; else the frames, which are to
        arrive. For the thread that polls, while there are no events before it (`transport.direct`)."""
        known = self._known_on(link)
        if known is None:
            return frames
        try:
            actions = known.take(link, frames, self._clock())
            if actions is None:
                self._unknown = frames
                return frames
            self._answer(actions)
        except Exception as err:
            self._malformed(link, message.decode(frames), err)
            self._transport.wake()  # What follows is for `run`.
        return None

    def take_bytes(self, link: str, data: bytes) -> bool:
        """As `take`, for what was received from a link at once; return whether it was done."""
        known = self._known_on(link)
        actions = None if known is None else known.take_bytes(link, data, self._clock())
        if actions is None:
            return False
        self._answer(actions)
        return True

    def _known_on(self, link: str) -> KnownMessages | None:
        """Return what knows messages, if those of a link may be done at once."""
        gate = self._gates.get(link)
        is_free = gate is not None and gate.is_open and not self._later and link not in self._holds
        return self.known if is_free else None

    def _answer(self, actions: Sequence[role.Action]) -> None:
        """Do what follows from a message that is known."""
        for action in actions:
            if isinstance(action, role.SendFrames):
                self._send_made(action)
            else:
                self._perform([action])

    def _received(self, link: str, frames: Sequence[Buffer]) -> None:
        gate = self._gates.get(link)
        if gate is None:
            gate = self._gates[link] = _Gate(since=self._clock())
        if gate.is_refused:
            return
        if frames is not self._unknown and self.take(link, frames) is None:
            return
        self._unknown = ()
        is_stranger = gate.opener is None and not gate.is_open
        try:
            if is_stranger:
                handshake.check_size(frames)
            arrived = message.decode(frames)
            if is_stranger:
                handshake.check_first(arrived)
            if self._trace.has_messages:
                self._trace.received(link, arrived)
            if gate.opener is not None and not gate.is_open:
                self._shake_out(link, gate, gate.opener, arrived)
                return
            if not gate.is_open:
                self._shake_in(link, gate, arrived)
                return
        except WireError as err:
            # Bad bytes end the connection they came on, never the node.
            self._trace.stranger(f"event=bad-bytes reason={err}")
            if is_stranger:
                self._refuse(link, gate, handshake.refused(str(err)))
            return
        try:
            actions = self._role.handle(role.MessageReceived(link, arrived), self._clock())
        except Exception as err:
            # A body that lacks or garbles a member is its sender's mistake. Whatever is wrong with it, this node lives.
            self._malformed(link, arrived, err)
        else:
            self._perform(actions, link, arrived)

    def _malformed(self, link: str, arrived: Message, err: Exception) -> None:
        reason = f"{arrived.kind.name} is malformed: {type(err).__name__}: {err}"
        self._trace.log("ERROR", f"event=malformed link={link} {reason} {traceback.format_exc()}")
        if not arrived.is_reply:
            self._transmit(link, refusal(arrived, reason))
            return
        # Who asked would wait for ever: a node that answers so is as good as lost.
        self._gates.pop(link, None)
        self._transport.disconnect(link)
        self._decide(role.Broken(link, f"its answer to {reason}"))

    def _shake_out(self, link: str, gate: _Gate, opener: handshake.Opener, arrived: Message) -> None:
        if arrived.kind is Kind.CHALLENGE:
            answer = opener.answer(arrived)
            if isinstance(answer, str):
                self._turned_away(link, answer)
            else:
                self._transmit(link, answer)
        elif arrived.kind is Kind.WELCOME:
            gate.is_open = True
            self._transport.proven(link)
            held, gate.held = gate.held, []
            self._decide(role.Welcomed(link, None))
            for waiting in held:
                self._transmit(link, waiting)
        elif arrived.kind is Kind.REFUSED:
            self._turned_away(link, str(arrived.body.get("reason", "no reason given")))

    def _shake_in(self, link: str, gate: _Gate, arrived: Message) -> None:
        if arrived.kind is Kind.HELLO:
            gate.acceptor = handshake.Acceptor(self._role.me, self._token, secrets.token_hex(16))
            answer = gate.acceptor.challenge(arrived)
        else:
            acceptor = gate.acceptor or handshake.Acceptor(self._role.me, self._token, "")
            answer = acceptor.verdict(arrived, self._role.admit)
        if answer.kind is Kind.REFUSED:
            self._refuse(link, gate, answer)
            self._deny(role.Denied(str(answer.body["reason"])))
            return
        if answer.kind is not Kind.WELCOME or gate.acceptor is None:
            self._transmit(link, answer)
            return
        # In this order: what the other side sends on WELCOME may be here before this thread goes on.
        self._transport.admitted(link)
        if self._transmit(link, answer) is None:
            return  # It has gone, and has heard nothing; it says HELLO again, on another connection.
        gate.is_open = True
        self._transport.proven(link)
        self._decide(role.Welcomed(link, gate.acceptor.peer))

    def _refuse(self, link: str, gate: _Gate, answer: Message) -> None:
        self._transmit(link, answer)
        gate.is_refused = True
        self._transport.refused(link)

    def _deny(self, denied: role.Denied) -> None:
        where = f" address={denied.address}" if denied.address else ""
        self._trace.stranger(f"event=denied{where} reason={denied.reason}")
        self._decide(denied)

    def _turned_away(self, link: str, reason: str) -> None:
        self._transport.disconnect(link)
        self._gates.pop(link, None)
        self._decide(role.TurnedAway(link, reason))

    def _drop_strangers(self, now: float) -> None:
        self._looked = now
        limit = now - STRANGER_S
        for link, gate in list(self._gates.items()):
            if gate.opener is None and not gate.is_open and gate.since < limit:
                del self._gates[link]

    # Acting

    def _decide(self, event: role.Event) -> None:
        self._perform(self._role.handle(event, self._clock()))

    def _perform(self, actions: list[role.Action], link: str | None = None, cause: Message | None = None) -> None:
        """Do what was decided, in order. What fails of what follows from a message, `cause`, is refused, not raised."""
        left = actions[::-1]
        while left:
            action = left.pop()
            try:
                if isinstance(action, role.Send):
                    self._send(action.link, action.message)
                # What follows from this work comes before the work after it.
                elif following := self._act(action, link, cause):
                    left += reversed(following)
            except Exception as err:
                if link is None or cause is None:
                    raise
                self._malformed(link, cause, err)

    def _act(self, action: role.Action, link: str | None, cause: Message | None) -> list[role.Action]:
        match action:
            case role.Work():
                return self._work(action, link, cause)
            case role.SendFrames():
                self._send_made(action)
            case role.Resolve():
                action.request.resolve(action.replies, action.error)
            case role.Resume():
                self._resume(action.link)
            case role.Note(request, text, awaited, key):
                request.note, request.awaited, request.awaited_key = text, awaited, key
            case role.Connect():
                self._gates[action.link] = _Gate(opener=handshake.Opener(self._role.me, self._token, ""))
                self._transport.connect(action.link, action.endpoint)
            case role.Log():
                self._trace.log(action.level, action.text)
            case role.Publish():
                self._publish(action.facts)
            case role.Finish():
                self._finish = self._finish or action
        return []

    def _work(self, action: role.Work, link: str | None, cause: Message | None) -> list[role.Action]:
        assert self._engine is not None
        while self._later and isinstance(action.what, role.ALONE):
            self._take_results(waits=True)
        if action.holds:
            self._holds.setdefault(action.holds, _Hold()).count += 1
        done = self._engine.do(action.what)
        if done is None:
            self._later.append((action, link, cause))
            return []
        return self._worked(action, done)

    def _take_results(self, waits: bool = False) -> None:
        """Go on with work that is done by now; with `waits`, at least with the first."""
        assert self._engine is not None
        while self._later:
            done = self._engine.result(waits)
            if done is None:
                return
            waits = False
            action, link, cause = self._later.popleft()
            try:
                self._perform(self._worked(action, done), link, cause)
            except Exception as err:
                if link is None or cause is None:
                    raise
                self._malformed(link, cause, err)

    def _worked(self, action: role.Work, done: role.WorkDone) -> list[role.Action]:
        """Take in what came of work, and return what follows."""
        assert self._engine is not None
        if done.error is not None and not isinstance(done.error, Exception):
            raise done.error  # A user's rule asked for the end of the process.
        if self._engine.failed is not None:
            return []  # No answer is made from what is left (`run`).
        if isinstance(done.value, Reply):
            lease = self._send(done.value.link, done.value.message)
            self._engine.sent(done.value.lent, lease)
        if done.error is not None and not action.reports:
            self._trace.log("ERROR", f"event=work-failed work={type(action.what).__name__} error={done.error}")
        actions = self._role.handle(done, self._clock()) if action.reports else []
        return [*actions, role.Resume(action.holds)] if action.holds else actions

    def _resume(self, link: str) -> None:
        """Some work that held a link is done: take in what happened there, until it is held again."""
        hold = self._holds[link]
        hold.count -= 1
        if hold.count:
            return
        del self._holds[link]
        while hold.events and link not in self._holds:
            self._arrived(hold.events.popleft())
        if hold.events:
            self._holds[link].events.extend(hold.events)

    def _send(self, link: str, out: Message) -> Lease | None:
        gate = self._gates.get(link)
        if gate is None:
            return None  # It broke or was refused; the thread that waits for the answer is told.
        if not gate.is_open:
            # Its buffers are given back now, so it gets its own.
            gate.held.append(replace(out, payloads=[bytes(payload) for payload in out.payloads]))
            return None
        return self._transmit(link, out)

    def _transmit(self, link: str, out: Message) -> Lease | None:
        me = self._role.me
        if self._trace.has_messages:
            self._trace.sent(link, out)
        return self._send_frames(link, message.encode(out, (ROLE_CODES[me.role], me.rank, me.incarnation)))

    def _send_made(self, action: role.SendFrames) -> None:
        lease = self._send_frames(action.link, action.frames, action.form)
        if lease is not COPIED and lease is not None and action.lent and not lease.is_over:
            assert self._engine is not None
            kept = ReplyValues(*action.lent)
            kept.keep()
            self._engine.sent((kept,), lease)

    def _send_frames(self, link: str, frames: Sequence[Buffer], form: Form | None = None) -> Lease | None:
        try:
            return self._transport.send(link, frames) if form is None else self.send_small(link, frames, form)
        except ConnectionError as err:
            logger.debug("send to %s failed: %s", link, err)
            return None
