"""The coordinator's channel to an agent on another host."""

from __future__ import annotations

import contextlib
import random
import threading
import time

from distrun.ssh.abort import Abort, Aborted
from distrun.ssh.connector import Connector, Link
from distrun.ssh.failure import SshFailure, unforeseen
from distrun.ssh.target import Target
from distrun_runtime.coordinator.channel import Inlet, Outbox, Put
from distrun_runtime.coordinator.events import AgentLost, StartFailed, Warned
from distrun_runtime.errors import RuntimeFault

RETRIES = 3
"""Further attempts where the host dropped the connection before the key exchange."""
TURN_S = 15.0
"""An agent that has not greeted by then (a slow disk, a shell that waits) does not hold up other hosts any more."""
PAUSE_S = 0.5
"""Before the first further attempt, give or take half; doubled each time."""


class SshChannel:
    """One host: connects, starts the agent, and carries frames. Two threads of its own, one reads and one writes.

    Args:
        host: `Host.name` of the plan.
        target: how it is reached.
        command: starts the agent there.
        program: what the agent reads first.
        connector: shared by the channels of a launch.
    """

    def __init__(self, host: str, target: Target, command: str, program: bytes, connector: Connector) -> None:
        self._host = host
        self._target = target
        self._command = command
        self._program = program
        self._connector = connector
        self._put: Put = lambda event: None
        self._abort = Abort()
        self._link: Link | None = None
        self._inlet = Inlet(host)
        self._outbox = Outbox()
        self._changed = self._outbox.changed
        self._killed = False
        self._was_used = False
        self._ended = False
        self._reader: threading.Thread | None = None

    @property
    def host(self) -> str:
        """`Host.name` of the plan."""
        return self._host

    @property
    def ended_well(self) -> bool:
        """Nothing can be left on the host: no agent was given work there, or agent and guard have ended by themselves.

        What tells is the end of the connection: the guard holds it open until it has ended.
        """
        return not (self._inlet.greeted and self._was_used) or self._ended

    def start(self, put: Put) -> None:
        """Connect, in a thread of its own."""
        self._put = put
        self._reader = threading.Thread(target=self._run, name="ssh %s" % self._host, daemon=True)
        self._reader.start()

    def send(self, data: bytes) -> None:
        """Queue bytes for the agent. Past WRITE_LIMIT it is given up."""
        self._was_used = True
        if self._outbox.put(data):
            self._put(AgentLost(self._host, "it does not read what we send", time.time()))
            self.kill()

    def close(self) -> None:
        """Close the agent's input when everything before is written; with nothing to write, stop connecting."""
        with self._changed:
            self._outbox.close()
            gives_up = self._link is None and not self._outbox
        if gives_up:
            self._abort.now()

    def kill(self) -> None:
        """Cut the connection, or stop making it. The agent sees the end of its input."""
        with self._changed:
            if self._killed:
                return
            self._killed = True
            self._outbox.drop()
            link = self._link
        self._abort.now()
        if link is not None:
            link.kill()

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
                return
            except Aborted:
                self._put(StartFailed(self._host, "it was given up before its agent had answered", time.time()))
                return
            except Exception as err:  # whatever it is, the job must hear of it
                err = err if isinstance(err, SshFailure) else unforeseen(err)
                if not err.is_passing or attempt == RETRIES or self._abort.is_set:
                    event = StartFailed(self._host, err.text, time.time(), kind=err.kind, fix=err.fix)
                    self._put(event)
                    return
            try:
                self._abort.wait(pause_s * random.uniform(0.5, 1.5))
            except Aborted:
                continue
            pause_s *= 2

    def _serve(self) -> None:
        """Make one connection and serve it to its end.

        Raises:
            SshFailure: there is no agent.
            Aborted: it was given up.
        """
        self._abort.check()
        self._inlet = Inlet(self._host)
        reason = "its connection ended"
        is_open = True
        with contextlib.ExitStack() as turn:
            turn.enter_context(self._connector.turn(self._abort))
            link = self._connector.open(self._target, self._command, self._abort, self._warn)
            if not self._adopt(link):
                link.finish()
                raise Aborted
            threading.Thread(target=self._write, args=(link,), name="write %s" % self._host, daemon=True).start()
            patient_until = time.monotonic() + TURN_S
            try:
                while is_open:
                    is_open = self._take(link)
                    if self._inlet.greeted or time.monotonic() >= patient_until:
                        turn.close()
            except (RuntimeFault, OSError, EOFError) as err:
                reason = str(err) or reason
            except Exception as err:
                reason = unforeseen(err).text
        self._end(link, reason)

    def _warn(self, text: str) -> None:
        self._put(Warned(self._host, text))

    def _adopt(self, link: Link) -> bool:
        with self._changed:
            if not self._killed:
                self._link = link
        return not self._killed

    def _take(self, link: Link) -> bool:
        """Put what came; return whether there may be more."""
        data = link.read()
        if data:
            had_greeted = self._inlet.greeted
            for event in self._inlet.feed(data, time.time()):
                self._put(event)
            if self._inlet.greeted and not had_greeted:
                with self._changed:
                    self._changed.notify_all()
        return data is None or bool(data)

    def _end(self, link: Link, reason: str) -> None:
        now = time.time()
        with self._changed:
            self._link = None
            was_ours = self._killed
            self._changed.notify_all()
        words = link.finish()
        if not self._inlet.greeted:
            if was_ours:
                raise Aborted
            raise link.explain(words, self._inlet.noise)
        self._ended = self._inlet.is_leaving and (not was_ours or not self._inlet.said_bye)
        self._outbox.close()
        self._put(AgentLost(self._host, "%s: %s" % (reason, words) if words else reason, now))

    def _write(self, link: Link) -> None:
        """Write the agent's program, and when it has greeted the frames for it, until `link` is not ours any more."""
        try:
            self._push(link, self._program)
            while True:
                with self._changed:
                    while self._link is link and not self._is_due():
                        self._changed.wait()
                    if self._link is not link:
                        return
                    data = self._outbox.take()
                if not data:
                    link.end_input()
                    return
                self._push(link, data)
                self._outbox.written(len(data))
        except OSError:
            pass  # It takes no more. The reading thread sees why and says so.

    def _is_due(self) -> bool:
        return self._inlet.greeted and (bool(self._outbox) or self._outbox.is_closing)

    def _push(self, link: Link, data: bytes) -> None:
        while data and self._link is link:
            data = data[link.write(data) :]
