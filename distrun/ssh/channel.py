"""The coordinator's channel to an agent on another host."""

from __future__ import annotations

import contextlib
import math
import random
import secrets
import threading
import time

from distrun.ssh.ask import Abort, Aborted
from distrun.ssh.connector import Connector, Link
from distrun.ssh.failure import SshFailure, unforeseen
from distrun.ssh.resolve import GONE, RELAY, Target, remote_command
from distrun_runtime.contract import session
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator.channel import Greeting, Put, SessionChannel
from distrun_runtime.coordinator.messages import StartFailed, Warned
from distrun_runtime.errors import WireError

RETRIES = 3
"""Further attempts where the host dropped the connection before the key exchange."""
TURN_S = 15.0
"""An agent that has not greeted by then (a slow disk, a shell that waits) does not hold up other hosts any more."""
PAUSE_S = 0.5
"""Before the first further attempt, give or take half; doubled each time."""
PAUSE_LIMIT_S = 5.0
"""The longest pause while an agent is dialled again."""
SILENCE = 3
"""A connection is given up for another one when nothing came for this part of the lease."""


class SshChannel(SessionChannel):
    """One host: connects, starts the agent, and carries frames. Two threads of its own, one reads and one writes.

    If the agent holds, it is dialled again when its connection is cut, until it leaves or the channel is killed.

    Args:
        host: `Host.name` of the plan.
        target: how it is reached.
        command: starts the agent there.
        program: what the agent reads first.
        connector: shared by the channels of a launch.
        holds_s: how long the agent goes on without a connection; 0: its end is the agent's.
    """

    def __init__(
        self, host: str, target: Target, command: str, program: bytes, connector: Connector, *, holds_s: float = 0.0
    ) -> None:
        super().__init__(host, holds=holds_s > 0)
        self._silence_s = holds_s / SILENCE if holds_s else math.inf
        self._key = secrets.token_hex(32) if holds_s else ""
        self._target = target
        self._command = command
        self._program = program
        self._connector = connector
        self._abort = Abort()
        self._ended = False
        self._reader: threading.Thread | None = None

    @property
    def ended_well(self) -> bool:
        """Nothing can be left on the host: no agent was given work there, or agent and guard have ended by themselves.

        What tells is the end of the connection: the guard holds it open until it has ended.
        """
        return not (self.inlet.greeted and self.was_used) or self._ended

    @property
    def holds(self) -> bool:
        """Whether the agent can be reached again when this connection ends."""
        return super().holds and bool(self.waiting_at)

    def send(self, frame: Frame) -> None:
        """Send a frame. The agent is told by what it will know another connection."""
        if self._key and frame.type == "begin":
            frame = Frame(dict(frame.header, resume_key=self._key), frame.body)
        super().send(frame)

    def start(self, put: Put) -> None:
        """Connect, in a thread of its own."""
        super().start(put)
        self._reader = threading.Thread(target=self._run, name=f"ssh {self.host}", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Close the agent's input when everything before is written; with nothing to write, stop connecting."""
        super().close()
        if self.is_idle:
            self._abort.now()

    def kill(self) -> None:
        """Cut the connection, or stop making it. The agent sees the end of its input."""
        super().kill()
        self._abort.now()

    def join(self, limit_s: float) -> bool:
        """Wait, at most so long, until the connection has ended; return whether it has."""
        if self._reader is not None:
            self._reader.join(max(limit_s, 0.0))
            return not self._reader.is_alive()
        return True

    def _run(self) -> None:
        pause_s = PAUSE_S
        for attempt in range(RETRIES + 1):
            try:
                self._serve()
                break
            except Aborted:
                self._say(StartFailed(self.host, "it was given up before its agent had answered", time.time()))
                return
            except Exception as err:  # whatever it is, the job must hear of it
                err = err if isinstance(err, SshFailure) else unforeseen(err)
                if not err.is_passing or attempt == RETRIES or self._abort.is_set:
                    event = StartFailed(self.host, err.text, time.time(), kind=err.kind, fix=err.fix)
                    self._say(event)
                    return
            try:
                self._abort.wait(pause_s * random.uniform(0.5, 1.5))
            except Aborted:
                continue
            pause_s *= 2
        self._redial()

    def _serve(self) -> None:
        """Make one connection and serve it to its end.

        Raises:
            SshFailure: there is no agent.
            Aborted: it was given up.
        """
        self._abort.check()
        self.restart()
        with contextlib.ExitStack() as turn:
            turn.enter_context(self._connector.turn(self._abort))
            link = self._connector.open(self._target, self._command, self._abort, self._warn)
            if self.is_killed:
                link.finish()
                raise Aborted
            turn_until = time.monotonic() + TURN_S

            def check() -> None:
                if self.inlet.greeted or time.monotonic() >= turn_until:
                    turn.close()
                self._check_silence()

            try:
                reason = self.serve(link, self._program, check=check)
            except Exception as err:
                reason = unforeseen(err).text
        self._end(link, reason)

    def _check_silence(self) -> None:
        """Give up a connection that brings nothing, where another can be made: it may be cut where we do not see it."""
        silence_s = time.monotonic() - self.heard_at
        if silence_s >= self._silence_s and self.holds:
            raise OSError(f"nothing came for {silence_s:.0f} s")

    def _redial(self) -> None:
        """Make one connection after another while the agent holds."""
        pause_s = PAUSE_S
        is_cut = False
        with contextlib.suppress(Aborted):
            while self.holds:
                is_cut = True
                self._abort.wait(pause_s * random.uniform(0.75, 1.25))
                is_cut = not self._return()
                pause_s = min(2 * pause_s, PAUSE_LIMIT_S) if is_cut else PAUSE_S
        if is_cut:
            self.ended("it was given up while its connection was cut", when=time.time())

    def _return(self) -> bool:
        """Make one connection to the agent that waits, and serve it to its end; return whether one could be made.

        It is also True if there is no agent any more. What followed was put.

        Raises:
            Aborted: it was given up.
        """
        command = remote_command(RELAY, self._target.python, [self.waiting_at])
        with self._connector.turn(self._abort):
            try:
                link = self._connector.open(self._target, command, self._abort)
            except Aborted:
                raise
            except Exception:  # whatever it is this time, the next time may be another
                return False
            ahead, fault = b"", ""
            try:
                ahead = prove(link, self._key, TURN_S, self._abort)
            except Exception as err:
                fault = str(err) or type(err).__name__
        if fault:
            words = link.finish()
            self._abort.check()
            if GONE in words:
                self.is_over = True
                self.ended("its agent ended while its connection was cut", when=time.time())
                return True
            return False
        try:
            reason = self.serve(link, ahead=ahead, check=self._check_silence)
        except Exception as err:
            reason = unforeseen(err).text
        self._end(link, reason)
        return True

    def _warn(self, text: str) -> None:
        self._say(Warned(self.host, text))

    def _end(self, link: Link, reason: str) -> None:
        now = time.time()
        was_ours = self.is_killed
        words = link.finish()
        if not self.inlet.greeted:
            if was_ours:
                raise Aborted
            raise link.explain(words, self.inlet.noise)
        # After `bye` only the end of the connection tells of the guard's, and we cut it. Who refused started nothing.
        self._ended = self.inlet.is_leaving and (not was_ours or not self.inlet.said_bye or self.inlet.has_refused)
        if not self.holds:
            self.close()
        self.ended(reason, words, now)


def prove(link: Link, key: str, limit_s: float, abort: Abort) -> bytes:
    """Prove over a relay that we know the key of the session, and check that its agent does; return what came after.

    Raises:
        WireError: it is not our agent, or it did not answer within `limit_s`.
        OSError: the connection broke.
        Aborted: it was given up.
    """
    until = time.monotonic() + limit_s
    greeting = Greeting()

    def read() -> bytes:
        data = link.read()
        abort.check()
        if data == b"":
            raise EOFError("the relay ended")
        if not data and time.monotonic() >= until:
            raise WireError("its agent does not answer")
        return data or b""

    rest = None
    while rest is None:
        rest = greeting.feed(read())
    nonce = secrets.token_hex(16)
    proof = session.proof(key, session.COORDINATOR, greeting.nonce, nonce)
    data = session.encode({"type": "prove", "nonce": nonce, "proof": proof})
    while data:
        data = data[link.write(data) :]
        abort.check()
    frame, rest = session.first(rest)
    while frame is None:
        frame, rest = session.first(rest + read())
    given = str(frame.header.get("proof", ""))
    if not session.is_proof(given, key, session.AGENT, greeting.nonce, nonce):
        raise WireError("it is not the agent of this job that answers")
    return rest
