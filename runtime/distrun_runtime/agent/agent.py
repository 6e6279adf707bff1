"""The agent: one loop, one thread, that starts, watches, reaps and ends this host's tasks and never waits.

It is the only reader and writer of the channel. Messages: `docs/protocol.md`. `guard.py` is its parent.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any, Callable, ClassVar, Dict, List, Optional

from distrun_runtime.agent import ending, ladder, opening, record
from distrun_runtime.agent.channel import Channel
from distrun_runtime.agent.crew import Crew
from distrun_runtime.agent.ending import Ending, Marks
from distrun_runtime.agent.ladder import Ladder
from distrun_runtime.agent.reaper import Wakeup
from distrun_runtime.agent.record import Record
from distrun_runtime.agent.refusal import Refusal
from distrun_runtime.agent.share import Share, take
from distrun_runtime.contract import facts, process, wire
from distrun_runtime.contract.plan import STOP
from distrun_runtime.contract.process import Identity
from distrun_runtime.errors import RuntimeFault

FIRST_LEASE_S = 45.0
"""How long the agent waits for `begin`, and between frames until then."""
GUARD_LOST_GRACE_S = 2.0
"""Without its guard the agent hurries: nobody would clean up after it."""
FLUSH_S = 10.0
"""At the end, output that nobody takes is given up after so long without progress."""
LOST_FLUSH_S = 1.0
"""The same when the coordinator closed its end."""
REMEMBER_S = 5.0
"""Without a subreaper, so often the tasks' processes are remembered, before they could slip away."""
OTHER = "other"
"""Kind of a refusal for which there is no better word."""


class Agent:
    """One host's share of a job."""

    def __init__(self, channel: Channel, guard: Identity, guard_link: socket.socket, is_subreaper: bool) -> None:
        self._channel = channel
        self._guard = guard
        self._guard_link = guard_link
        self._is_subreaper = is_subreaper
        self._me = process.identity(os.getpid())
        # Not epoll: it refuses files, and somebody may well try `< /dev/null`.
        self._selector = selectors.PollSelector()
        self._wakeup = Wakeup()
        self._crew = Crew(channel, self._selector)
        self._crew.on_other = self._on_other_end
        self._ending = Ending(Marks("", ""), self._crew.running, is_subreaper)
        self._share: Optional[Share] = None
        self._opening: Optional[opening.Opening] = None
        self._is_settled = False
        self._is_leaving = False
        self._code = 0
        self._heard_at = time.monotonic()
        self._remember_at = math.inf
        self._is_writing = False

    # The loop

    def run(self, nonce: str, first: bytes = b"") -> int:
        """Serve until the job is over here; return the exit code. `first`: bytes read ahead from the channel."""
        self._channel.greet(b"DISTRUN/%d %s\n" % (wire.VERSION, nonce.encode("ascii")))
        self._send("hello", **self._facts())
        self._selector.register(self._channel.reading, selectors.EVENT_READ, self._on_input)
        self._selector.register(self._wakeup.descriptor, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._guard_link, selectors.EVENT_READ, self._on_guard)
        self._take(self._channel.feed(first))
        while not (self._is_leaving and self._ending.is_over):
            self._flush()
            ready = self._selector.select(self._timeout())
            self._reap()
            for key, _ in ready:
                # One that was closed by an earlier one of this round is no longer there.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()
            self._tick(time.monotonic())
        return self._close()

    def _timeout(self) -> float:
        lease_end = math.inf if self._is_leaving else self._lease_end()
        opening_at = self._opening.deadline if self._opening is not None else math.inf
        due = min(self._ending.next_at, self._remember_at, lease_end, opening_at)
        return max(0.0, min(due - time.monotonic(), 3600.0))

    def _lease_end(self) -> float:
        return self._heard_at + (self._share.plan.limits.lease_s if self._share else FIRST_LEASE_S)

    def _tick(self, now: float) -> None:
        if not self._is_leaving and now >= self._lease_end():
            self._say_ending("it heard nothing from the coordinator for %.1f s" % (now - self._heard_at))
            self._leave(self._gentle(), facts.EXIT_TERMINATED)
        if self._opening is not None and now >= self._opening.deadline:
            self._opening.expire()
        left = self._ending.step(now)
        if left is not None:
            self._send("cleared", left=ending.described(left))
        if now >= self._remember_at:
            self._remember_at = now + REMEMBER_S
            self._ending.look()
            self._save()

    def _flush(self) -> None:
        """Move output towards the coordinator as far as windows and the pipe allow."""
        self._crew.pump()
        self._channel.flush()
        if self._channel.is_broken and not self._channel.is_over:
            self._on_lost()
        wanted = self._channel.queued > 0
        if wanted != self._is_writing:
            self._is_writing = wanted
            if wanted:
                self._selector.register(self._channel.writing, selectors.EVENT_WRITE, self._channel.flush)
            else:
                self._selector.unregister(self._channel.writing)

    def _close(self) -> int:
        """Hand over the rest of the output, remove the job's folder, say bye."""
        self._crew.drain()
        self._hand_over(output=True)
        self._crew.close()
        if self._share is not None:
            self._share.close(process.is_alive(self._guard))
        self._send("bye")
        self._hand_over(output=False)
        return self._code

    def _hand_over(self, output: bool) -> None:
        """Write until all is written, or the other side took nothing for FLUSH_S."""
        channel = self._channel
        patience_s = LOST_FLUSH_S if channel.is_over else FLUSH_S
        deadline = time.monotonic() + patience_s
        with selectors.PollSelector() as writable:
            writable.register(channel.writing, selectors.EVENT_WRITE)
            while not channel.is_broken and time.monotonic() < deadline:
                is_all_queued = not output or self._crew.pump(whole=True)
                channel.flush()
                if is_all_queued and not channel.queued:
                    return
                if writable.select(0.5):
                    deadline = time.monotonic() + patience_s

    # What arrives

    def _on_input(self) -> None:
        self._take(self._channel.receive())
        if self._channel.is_over:
            self._on_lost()

    def _take(self, frames: List[wire.Frame]) -> None:
        for frame in frames:
            self._heard_at = time.monotonic()
            handler = self._HANDLERS.get(frame.type)
            if handler is None:
                self._warn("a frame of unknown type %r was ignored" % frame.type)
                continue
            try:
                handler(self, dict(frame.header, body=frame.body) if frame.body else frame.header)
            except (LookupError, TypeError, ValueError, AttributeError) as err:
                self._warn("a malformed %r frame was ignored: %s: %s" % (frame.type, type(err).__name__, err))

    def _on_lost(self) -> None:
        """The coordinator will send nothing any more."""
        self._channel.is_over = True
        if self._channel.reading in self._selector.get_map():
            self._selector.unregister(self._channel.reading)
        if self._channel.fault:
            self._warn("the coordinator's stream cannot be read on: %s" % self._channel.fault)
        if self._share is None or self._share.plan.on_eof == STOP:
            self._crew.is_nobody_listening = self._channel.is_broken
            self._leave(self._gentle(), facts.EXIT_TERMINATED)
        # Else they are held: the tasks go on until the lease ends.

    def _on_guard(self) -> None:
        with contextlib.suppress(ConnectionResetError):  # so it ends when the guard had not read what we told it
            if self._guard_link.recv(64):
                return
        self._selector.unregister(self._guard_link)
        self._say_ending("its guard died")
        grace_s = min(self._grace_s(), GUARD_LOST_GRACE_S)
        self._leave(ladder.gentle(grace_s, time.monotonic()), facts.EXIT_TERMINATED)

    def _on_signals(self) -> None:
        if int(signal.SIGTERM) in self._wakeup.read():
            by_user = self._share is not None and record.is_killed(self._share.folder)
            why = "distrun kill asked for it" if by_user else "it got SIGTERM, as when that machine is shut down"
            self._say_ending(why, by_user)
            self._leave(self._gentle(), facts.EXIT_TERMINATED)

    def _begin(self, header: Dict[str, Any]) -> None:
        if self._share is not None or self._is_leaving:
            self._warn("a second `begin` was ignored")
            return
        try:
            share = take(header)
        except (RuntimeFault, LookupError, TypeError, ValueError, OSError) as err:
            self._refuse(err)
            return
        self._share = share
        self._ending = Ending(Marks(share.plan.job, share.host), self._crew.running, self._is_subreaper)
        self._save()
        self._tell_guard(share)
        self._open(opening.steps(share), self._on_ready)

    def _open(self, todo: opening.Steps, on_done: Callable[[Share], None]) -> None:
        self._opening = opening.Opening(
            todo,
            self._selector,
            ask_for=lambda digest: self._send("need", digest=digest),
            on_done=on_done,
            on_refused=self._refuse,
        )
        self._opening.go_on()

    def _on_ready(self, share: Share) -> None:
        self._share = share
        self._send("ready", address=share.address, ports=share.ports(), python=dict(share.python))

    def _settle(self, header: Dict[str, Any]) -> None:
        del header
        share = self._share
        if share is None or not self._is_open or self._is_settled or self._is_leaving:
            self._warn("`settle` was ignored: nothing is to be settled")
            return
        self._is_settled = True
        self._open(opening.settle(share), self._on_settled)

    def _on_settled(self, share: Share) -> None:
        self._share = share
        self._send("settled", python=dict(share.python))

    @property
    def _is_open(self) -> bool:
        """Whether nothing is left to do of what `begin` or `settle` asked for."""
        return self._opening is not None and self._opening.is_over

    def _runtime(self, header: Dict[str, Any]) -> None:
        if self._opening is None or not self._opening.take_runtime(header["digest"], header.get("body", b"")):
            self._warn("a `runtime` that was not asked for was ignored")

    def _refuse(self, err: Exception) -> None:
        is_plain = isinstance(err, (RuntimeFault, OSError))
        reason = str(err) if is_plain else "%s: %s" % (type(err).__name__, err)
        kind, fix = (err.kind, err.fix) if isinstance(err, Refusal) else (OTHER, "")
        self._send("refused", reason=reason, kind=kind, fix=fix)
        self._leave(self._gentle(), facts.EXIT_START_FAILED)

    def _ask(self, header: Dict[str, Any]) -> None:
        """Have a tool answer. It may block: no task runs yet, so nothing waits for this loop."""
        number = int(header["id"])
        if self._share is not None or self._is_leaving:
            self._send("answer", id=number, error="tools answer only before a job begins")
            return
        from distrun_runtime.agent import tools  # most agents are never asked

        try:
            value = tools.answer(str(header["what"]), dict(header.get("args") or {}))
        except Exception as err:  # whatever a tool does wrong is its answer, not the agent's end
            text = str(err) if isinstance(err, (RuntimeFault, OSError)) else "%s: %s" % (type(err).__name__, err)
            self._send("answer", id=number, error=text or type(err).__name__)
        else:
            self._send("answer", id=number, value=value)
        self._heard_at = time.monotonic()  # it was we who did not listen

    def _spawn(self, header: Dict[str, Any]) -> None:
        share = self._share
        if share is None or not self._is_open or self._is_leaving:
            self._warn("`spawn` was ignored: the job %s here" % ("ends" if self._is_leaving else "has not begun"))
            return
        task = share.plan.task(header["task"])
        if task.name in self._crew.running:
            self._warn("`spawn` was ignored: %s was started before" % task.name)
            return
        if self._crew.spawn(task, share.environment(task, header.get("env") or {}), share.spool_folder):
            self._save()
            if not self._is_subreaper:
                self._remember_at = min(self._remember_at, time.monotonic() + 0.5)

    def _signal(self, header: Dict[str, Any]) -> None:
        self._catch_up()
        number = ladder.signal_number(header["signal"])
        for name in header["tasks"]:
            running = self._crew.running.get(name)
            if running is not None and not running.is_reaped:
                running.was_signalled = True
                ending.signal_group(running.leader.pid, number)

    def _stop(self, header: Dict[str, Any]) -> None:
        self._catch_up()
        self._ending.stop(list(header["tasks"]), ladder.make(header["ladder"], time.monotonic()))

    def _ack(self, header: Dict[str, Any]) -> None:
        self._crew.acknowledge(header["task"], header["stream"], int(header["offset"]))

    def _ping(self, header: Dict[str, Any]) -> None:
        self._send("pong", n=header.get("n", 0))
        if self._share is not None:
            record.touch(self._share.folder)

    def _end(self, header: Dict[str, Any]) -> None:
        del header
        self._catch_up()
        self._leave(ladder.at_once(time.monotonic()), 0)

    _HANDLERS: ClassVar[Dict[str, Callable[[Agent, Dict[str, Any]], None]]] = {
        "begin": _begin,
        "runtime": _runtime,
        "settle": _settle,
        "ask": _ask,
        "spawn": _spawn,
        "signal": _signal,
        "stop": _stop,
        "ack": _ack,
        "ping": _ping,
        "end": _end,
    }

    # What it does then

    def _catch_up(self) -> None:
        """Take in what came before a signal of ours: who died, or said that it fails, did so by itself."""
        self._reap()
        self._crew.hear()

    def _on_other_end(self, pid: int, status: int) -> None:
        if self._opening is not None:
            self._opening.reaped(pid, status)

    def _reap(self) -> None:
        if self._crew.reap():
            self._ending.hurry()
            self._save()

    def _leave(self, how: Ladder, code: int) -> None:
        """End everything that way, then the agent itself. The first reason gives the exit code."""
        if not self._is_leaving:
            self._is_leaving, self._code = True, code
        if self._opening is not None:
            self._opening.cancel()
        if self._share is not None:
            self._ending.stop(list(self._crew.running), how)

    def _gentle(self) -> Ladder:
        return ladder.gentle(self._grace_s(), time.monotonic())

    def _grace_s(self) -> float:
        return self._share.plan.limits.grace_s if self._share else 0.0

    def _tell_guard(self, share: Share) -> None:
        """Say what the guard must know in case it has to do our work."""
        facts = {"type": "begin", "folder": share.folder, "job": share.plan.job, "host": share.host}
        with contextlib.suppress(OSError):  # it is dead: the link says so to the loop as well
            self._guard_link.send(wire.encode(dict(facts, grace_s=self._grace_s())))

    def _save(self) -> None:
        """Bring the record up to date. A full disk only makes a later sweep less sure."""
        share, running = self._share, self._crew.running.values()
        if share is None:
            return
        leaders = tuple((each.task.name, each.leader) for each in running if not each.is_reaped)
        others = ending.known(running)
        grace_s, lease_s = self._grace_s(), share.plan.limits.lease_s
        current = Record(share.plan.job, share.host, self._guard, self._me, grace_s, leaders, others, lease_s)
        with contextlib.suppress(OSError):
            record.save(share.folder, current)

    def _facts(self) -> Dict[str, Any]:
        return {
            "version": wire.VERSION,
            "agent": self._me._asdict(),
            "guard": self._guard._asdict(),
            "host": socket.gethostname(),
            "python": sys.version.split()[0],
            "platform": sys.platform,
            "capabilities": {
                "procfs": not process.is_portable(),
                "subreaper": self._is_subreaper,
                "pidfd": process.has_pidfd(),
            },
            "time": time.time(),
        }

    def _say_ending(self, reason: str, by_user: bool = False) -> None:
        """Say that all tasks are ended here, unless the coordinator asked for it or was told before."""
        if not self._is_leaving:
            self._send("ending", reason=reason, by_user=by_user, time=time.time())

    def _warn(self, text: str) -> None:
        self._send("warning", text=text)

    def _send(self, kind: str, /, **members: Any) -> None:
        self._channel.send(dict(members, type=kind))
