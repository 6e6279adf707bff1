"""The agent: one loop in one thread that starts, watches, reaps and stops this host's tasks.

It never waits while a task runs, and is the only reader and writer of the channel. Messages: `docs/protocol.md`. Its
parent is the guard (`guard.py`).
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Dict, List, Optional, Sequence

from distrun_runtime.agent import preflight, stopping
from distrun_runtime.agent.channel import Connection, Reconnector
from distrun_runtime.agent.guard import Start, beat_s
from distrun_runtime.agent.preflight import Preflight
from distrun_runtime.agent.share import Record, RecordedTask, Share, is_killed, save_record, take, touch_record
from distrun_runtime.agent.stopping import Stopping, StopSequence
from distrun_runtime.agent.tasks import TaskRunner
from distrun_runtime.contract import facts, process, session
from distrun_runtime.contract.agent_messages import (
    AgentEnding,
    AgentReady,
    Answered,
    Bye,
    Cleared,
    Holding,
    LeftProcess,
    Needed,
    Pong,
    Settled,
    StackFound,
    StartFailed,
    TasksSignal,
    Warned,
)
from distrun_runtime.contract.dataclass import written
from distrun_runtime.contract.plan import HOLD, STOP, WORKER
from distrun_runtime.errors import PreflightFailure, RuntimeFault

if TYPE_CHECKING:
    from distrun_runtime.agent.measuring import HostMeasurement
    from distrun_runtime.agent.query import JobStream
    from distrun_runtime.agent.unpack import Unpacking  # most agents get no files

FIRST_LEASE_S = facts.LEASE_S
"""How long the agent waits for `begin`, and between frames until then."""
GUARD_LOST_GRACE_S = 2.0
"""Without its guard the agent hurries: if it died now, nothing would clean up after it."""
END_OUTPUT_S = 2.0
"""Told to end, output is handed over for this time at most: the coordinator has not waited for more."""
FLUSH_S = 10.0
"""At the end, output that is not taken is given up after so long without progress."""
LOST_FLUSH_S = 1.0
"""The same if the coordinator closed its end."""
REMEMBER_S = 5.0
"""Without a subreaper, the interval at which the tasks' processes are remembered, before they can lose their parent."""
PREPARING_S = 60.0
"""What the agent does before its first task may keep it from beating for so long at least."""
SILENT = 1 / 3
"""Share of the lease after which an agent that can get another connection does not wait for this one any more."""
OTHER = "other"
"""`kind` of a failure without a kind of its own."""


class Agent:
    """One host's share of a job."""

    def __init__(self, start: Start) -> None:
        self._channel = channel = start.channel
        self._make_reconnector = start.make_reconnector
        self._reconnector: Optional[Reconnector] = None
        self._guard = start.guard
        self._me = start.me
        self._wakeup = start.wakeup
        self._is_subreaper = is_subreaper = start.is_subreaper
        # Not epoll: it refuses files, and a user may well try `< /dev/null`.
        self._selector = selectors.PollSelector()
        self._runner = TaskRunner(channel, self._selector)
        self._runner.on_other = self._on_other_end
        self._stopping = Stopping({"DISTRUN_JOB_ID": ""}, self._runner.tasks, is_subreaper)  # nothing has this mark
        self._share: Optional[Share] = None
        self._preflight: Optional[Preflight] = None
        self._begun: Any = None
        """The plan of `begin`, as it came."""
        self._sample_s = 0.0
        """How often the host is measured, as `begin` says; 0: not at all."""
        self._say_ready: Optional[Callable[[], None]] = None
        """Says `ready` once more."""
        self._is_settled = False
        self._unpacking: Optional[Unpacking] = None
        """The copy of the files, if they come over the channel."""
        self._streams: List[JobStream] = []
        self._end_tools: Optional[Callable[[], None]] = None
        """What tools answer with that were asked before the job."""
        self._measuring: Optional[HostMeasurement] = None
        """None before the job has begun."""
        self._warnings: Dict[str, Any] = {}
        self._is_leaving = False
        self._code = 0
        self._heard_at = time.monotonic()
        self._asked_at = 0.0
        """When another connection was last asked for because of silence."""
        self._remember_at = math.inf
        self._beat_at = math.inf
        self._listening: Dict[int, int] = {}
        """Descriptors of the connection that are waited for, and for which events."""

    # The loop

    def run(self, first: bytes = b"") -> int:
        """Serve until the job is over here; return the exit code. `first`: bytes read ahead from the channel."""
        self._selector.register(self._wakeup.descriptor, selectors.EVENT_READ, self._on_signals)
        self._selector.register(self._guard.alive, selectors.EVENT_READ, self._on_guard_end)
        self._hear(self._channel.feed(first))
        while not self._is_done:
            self._flush()
            self._wait(self._timeout())
            self._tick(time.monotonic())
        if self._end_tools is not None:
            self._end_tools()
        return self._close()

    def _wait(self, limit_s: float) -> None:
        """Wait for something to happen, at most so long, and do what it asks for."""
        ready = self._selector.select(limit_s)
        self._reap()
        for key, _ in ready:
            # It may have been closed by an earlier one of this round.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    @property
    def _is_done(self) -> bool:
        return self._is_leaving and self._stopping.is_over

    def _timeout(self) -> float:
        if self._is_done or (self._unpacking is not None and self._unpacking.is_placing):
            return 0.0
        lease_end = math.inf if self._is_leaving else self._lease_end()
        preflight_at = self._preflight.deadline if self._preflight is not None else math.inf
        return_at = min(self._reconnector.next_at, self._silent_at()) if self._reconnector is not None else math.inf
        measure_at = self._measuring.next_at if self._measuring is not None else math.inf
        own_at = min(self._stopping.next_at, self._remember_at, self._beat_at, self._runner.look_at)
        due = min(own_at, measure_at, lease_end, preflight_at, return_at)
        return max(0.0, min(due - time.monotonic(), 3600.0))

    def _lease_end(self) -> float:
        if self._streams:
            return math.inf  # who reads may be stopped (Ctrl-Z), and is heard by the end of our input
        return self._heard_at + (self._share.plan.limits.lease_s if self._share else FIRST_LEASE_S)

    def _silent_at(self) -> float:
        """Return when another connection is wanted because the coordinator is silent: this one may be dead."""
        if self._share is None or self._is_leaving:
            return math.inf
        return max(self._heard_at, self._asked_at) + self._share.plan.limits.lease_s * SILENT

    def _tick(self, now: float) -> None:
        self._beat(now)
        if not self._is_leaving and now >= self._lease_end():
            self._say_ending(f"it heard nothing from the coordinator for {now - self._heard_at:.1f} s")
            self._leave(facts.EXIT_TERMINATED)
        if self._preflight is not None and now >= self._preflight.deadline:
            self._preflight.expire()
        if self._unpacking is not None:
            self._unpacking.proceed()
        if self._reconnector is not None:
            if now >= self._silent_at():
                self._asked_at = now
                self._reconnector.begin()
            if now >= self._reconnector.next_at:
                self._reconnector.tick(now)
        left = self._stopping.step(now)
        if left is not None:
            told = tuple(LeftProcess(row.pid, process.command_of(row.pid)) for row in left)
            self._channel.say(Cleared, left=written(told))
        if now >= self._remember_at:
            self._remember_at = now + REMEMBER_S
            self._stopping.look()
            self._save()
        if now >= self._runner.look_at:
            self._runner.look(now)
        if self._measuring is not None:
            self._measuring.tick(now)

    def _flush(self) -> None:
        """Move output towards the coordinator as far as windows and the pipe allow."""
        self._runner.pump()
        if self._streams:
            self._heard_at = time.monotonic()  # with their end, the lease begins
            self._streams = [each for each in self._streams if each.proceed()]
        self._channel.flush()
        if self._channel.is_broken and not self._channel.is_over:
            self._on_lost()
        self._listen()

    def _listen(self) -> None:
        """Wait for what the connection asks for: input until it is over, and room for what is to be written."""
        connection, wanted = self._channel.connection, {}
        if connection is not None and not self._channel.is_over:
            wanted[connection.reading] = selectors.EVENT_READ
        if connection is not None and self._channel.wants_to_write:
            wanted[connection.writing] = wanted.get(connection.writing, 0) | selectors.EVENT_WRITE
        if wanted != self._listening:
            self._unlisten()
            self._listening = wanted
            calls = {selectors.EVENT_READ: self._on_input, selectors.EVENT_WRITE: self._channel.flush}
            for descriptor, events in wanted.items():
                self._selector.register(descriptor, events, calls.get(events, self._on_both))

    def _unlisten(self) -> None:
        """Wait for nothing of the connection."""
        for descriptor in self._listening:
            self._selector.unregister(descriptor)
        self._listening = {}

    def _on_both(self) -> None:
        self._channel.flush()
        self._on_input()

    def _close(self) -> int:
        """Hand over the rest of the output, remove the job's folder, say bye."""
        self._runner.drain()
        if self._measuring is not None:
            self._measuring.close()
        self._hand_over(output=True)
        self._runner.close()
        if self._reconnector is None and self._share is not None:
            self._share.close(process.is_alive(self._guard.identity))
        self._channel.say(Bye)
        self._hand_over(output=False)
        if self._reconnector is not None and self._share is not None:
            self._reconnector.close()
            self._share.close(process.is_alive(self._guard.identity))
        return self._code

    def _hand_over(self, output: bool) -> None:
        """Write until all is written, or the other side took nothing for FLUSH_S.

        If another connection may come, everything has to be acknowledged too: what was written may have been lost.
        """
        channel = self._channel
        written, since = channel.written, time.monotonic()
        until = since + END_OUTPUT_S if output and self._code == 0 else float("inf")
        self._flush()
        while not channel.is_broken:
            self._beat(time.monotonic())
            # Told to end, the coordinator still wants to hear of it, by another connection if this one is cut.
            is_awaited = not channel.is_over and (channel.connection is not None or self._code == 0)
            limit_s = FLUSH_S if is_awaited else LOST_FLUSH_S
            is_all_queued = not output or self._runner.pump(whole=True)
            self._flush()
            may_be_lost = not output and self._reconnector is not None and not channel.is_acknowledged
            if is_all_queued and not channel.wants_to_write and not may_be_lost:
                return
            if channel.written != written:
                written, since = channel.written, time.monotonic()
            left_s = min(since + limit_s, until) - time.monotonic()
            if left_s <= 0:
                return
            self._wait(min(left_s, 0.5))

    # What arrives

    def _on_input(self) -> None:
        frames = self._channel.receive()
        if not self._channel.is_over:
            self._heard_at = time.monotonic()  # a part of a frame is a sign of life, too
        self._hear(frames)

    def _on_connection(self, connection: Connection, ahead: bytes) -> None:
        """Go on over another connection. One that seems to be there yet was cut where we cannot see it."""
        self._unlisten()
        self._channel.attach(connection)
        self._heard_at = time.monotonic()
        self._hear(self._channel.feed(ahead))

    def _hear(self, frames: List[session.Frame]) -> None:
        self._take(frames)
        if self._channel.is_over:
            self._on_lost()

    def _take(self, frames: List[session.Frame]) -> None:
        for frame in frames:
            handler = self._HANDLERS.get(frame.type)
            if handler is None:
                self._warn(f"a frame of unknown type {frame.type!r} was ignored")
                continue
            try:
                handler(self, body=frame.body, **frame.header)
            except (LookupError, TypeError, ValueError, AttributeError) as err:
                self._warn(f"a malformed {frame.type!r} frame was ignored: {type(err).__name__}: {err}")

    def _on_lost(self) -> None:
        """Stop, or hold, because the connection has ended."""
        self._unlisten()
        if self._reconnector is not None and not self._channel.fault:
            self._channel.cut()
            self._reconnector.begin()
            return  # the tasks go on until the lease ends
        self._channel.is_over = True
        if self._channel.fault:
            self._warn(f"the coordinator's stream cannot be read on: {self._channel.fault}")
        if self._share is None or self._share.plan.on_eof == STOP:
            self._runner.discards_output = self._channel.is_broken
            self._leave(facts.EXIT_TERMINATED)
        # Otherwise the tasks go on until the lease ends.

    def _on_guard_end(self) -> None:
        self._selector.unregister(self._guard.alive)
        self._say_ending("its guard died")
        grace_s = min(self._grace_s(), GUARD_LOST_GRACE_S)
        self._leave(facts.EXIT_TERMINATED, stopping.gentle(grace_s, time.monotonic()))

    def _on_signals(self) -> None:
        heard = self._wakeup.read()
        if self._share is not None:
            workers = [task.name for task in self._share.plan.of_role(WORKER)]
            for name in self._share.plan.forward_signals:
                if stopping.signal_number(name) in heard:
                    self._signal(workers, name, "")
        if int(signal.SIGTERM) in heard:
            by_user = self._share is not None and is_killed(self._share.folder)
            why = "distrun kill asked for it" if by_user else "it got SIGTERM, as when that machine is shut down"
            self._say_ending(why, by_user)
            self._leave(facts.EXIT_TERMINATED)

    # Handlers of frames: their arguments are the frame's members.

    def _begin(self, plan: Any, resume_key: Any = "", sample_s: float = 0.0, **header: Any) -> None:
        if self._share is not None or self._is_leaving:
            if self._begun != plan:
                self._warn("a second `begin` was ignored")
            elif self._say_ready is not None:
                self._say_ready()  # it is the first one again
            return
        self._begun = plan
        try:
            self._sample_s, share = float(sample_s), take(dict(header, plan=plan))
        except (RuntimeFault, LookupError, TypeError, ValueError, OSError) as err:
            self._fail(err)
            return
        self._share = share
        self._stopping = Stopping(share.marks, self._runner.tasks, self._is_subreaper)
        self._save()
        self._tell_guard(share)
        if share.plan.on_eof == HOLD:
            self._reconnector = self._reconnector_of(share, str(resume_key))
        self._prepare(preflight.steps(share), self._on_ready)

    def _reconnector_of(self, share: Share, key: str) -> Optional[Reconnector]:
        """Return how the next connection comes; None if there is no way for it: then the end of this one stops all."""
        if self._make_reconnector is not None:
            return self._make_reconnector(self._selector, self._on_connection)
        if not key:
            return None
        from distrun_runtime.agent.waiting import RedialListener  # most agents have one connection

        try:
            waiting = RedialListener(share.folder, key, self._selector, self._on_connection)
        except OSError as err:
            self._warn(f"should the connection be cut, there will be no other: {err}")
            return None
        self._channel.say(Holding, path=waiting.path)
        return waiting

    def _prepare(self, steps: preflight.Steps, on_done: Callable[[Share], None]) -> None:
        self._preflight = Preflight(
            steps,
            self._selector,
            ask_for=lambda digest: self._channel.say(Needed, digest=digest),
            on_done=on_done,
            on_failed=self._fail,
        )
        self._preflight.proceed()

    def _on_ready(self, share: Share) -> None:
        self._share = share
        address, ports, python, gpus = share.address, share.ports(), dict(share.python), {}
        if share.devices is not None:
            from distrun_runtime.agent import helper

            gpus = helper.report(share)

        self._say_ready = lambda: self._channel.say(AgentReady, address=address, ports=ports, python=python, gpus=gpus)
        self._say_ready()
        self._channel.flush()  # the coordinator need not wait for what follows
        from distrun_runtime.agent.measuring import Hooks, HostMeasurement  # `ready` need not wait for this

        hooks = Hooks(self._channel, self._stopping.task_of, self._may_help)
        self._measuring = HostMeasurement(share, self._runner.tasks, self._selector, hooks)
        self._measuring.set_interval(self._sample_s, time.monotonic())
        self._runner.on_ending = self._measuring.tell_last

    def _on_stack(self, id: int, task: str, **_: Any) -> None:
        if self._measuring is None or self._is_leaving:
            self._channel.say(StackFound, id=id, task=task, error="the job ends on this host")
            return
        self._measuring.ask_stack(task, lambda answer: self._channel.say(StackFound, id=id, **answer._asdict()))

    def _settle(self, **_: Any) -> None:
        share = self._share
        if share is None or not self._is_prepared or self._is_settled or self._is_leaving:
            self._warn("`settle` was ignored: nothing is to be settled")
            return
        self._is_settled = True
        self._prepare(preflight.settle(share), self._on_settled)

    def _on_settled(self, share: Share) -> None:
        self._share = share
        self._channel.say(Settled, python=dict(share.python))

    @property
    def _is_prepared(self) -> bool:
        """Whether everything that `begin` or `settle` asked for was done."""
        return self._preflight is not None and self._preflight.is_over

    def _runtime(
        self, digest: str, body: bytes, chunk: Optional[int] = None, last: bool = False, fault: str = "", **_: Any
    ) -> None:
        preflight, is_last = self._preflight, last or chunk is None
        if preflight is None or not preflight.take_runtime(digest, body, chunk or 0, is_last, fault):
            self._warn("a `runtime` that was not asked for was ignored")

    def _copy(self, run: str, rules: Any, **_: Any) -> None:
        share = self._share
        if share is None or not self._is_prepared or self._unpacking is not None or self._is_leaving:
            self._warn("`copy` was ignored: no files are wanted")
            return
        from distrun_runtime.agent.unpack import Unpacking

        self._unpacking = Unpacking(share.plan, f" on {share.host}", run, rules, self._channel)
        self._unpacking.begin()

    def _files(self, run: str, body: bytes, last: bool = False, fault: str = "", **_: Any) -> None:
        if self._unpacking is None or not self._unpacking.take(run, body, last, fault):
            self._warn("`files` that were not asked for were ignored")

    def _fail(self, err: Exception) -> None:
        kind, fix = (err.kind, err.fix) if isinstance(err, PreflightFailure) else (OTHER, "")
        self._channel.say(StartFailed, reason=_reason(err), kind=kind, fix=fix)
        self._leave(facts.EXIT_START_FAILED)

    def _ask(self, id: int, what: str, args: Any = None, **_: Any) -> None:
        """Answer a question. That may block: no task runs yet, so nothing waits for this loop."""
        if self._share is not None or self._is_leaving:
            self._channel.say(Answered, id=id, error="tools answer only before a job begins")
            return
        try:
            from distrun_runtime.agent import query  # most agents are never asked, and those that dial have no tools

            self._end_tools = query.end
            if what == "jobs":
                self._streams.append(query.JobStream(self._channel, id, self._selector, args))
                return
            value = query.answer(what, dict(args or {}))
        except Exception as err:  # whatever goes wrong is the answer, not the agent's end
            self._channel.say(Answered, id=id, error=_reason(err))
        else:
            self._channel.say(Answered, id=id, value=value)
        self._heard_at = time.monotonic()  # meanwhile the agent did not listen

    def _on_stream(self, taken: int = 0, job: str = "", body: bytes = b"", **_: Any) -> None:
        for each in self._streams:
            each.take(taken, job, body)

    def _spawn(self, task: str, attempt: int = 0, env: Any = None, **_: Any) -> None:
        share, measuring = self._share, self._measuring
        if share is None or measuring is None or not self._is_prepared or self._is_leaving:
            self._warn(f"`spawn` was ignored: the job {'ends' if self._is_leaving else 'has not begun'} here")
            return
        planned = share.plan.task(task)
        if self._runner.repeat(task, attempt):
            return
        variables = share.environment(planned, env or {})
        reports_to = measuring.open_socket(task)
        if reports_to:
            variables[b"DISTRUN_METRICS_SOCKET"] = os.fsencode(reports_to)
        if self._runner.spawn(planned, variables, share.spool_folder, attempt):
            self._beat_at = 0.0  # from now on the lease counts
            self._save()
            if not self._is_subreaper:
                self._remember_at = min(self._remember_at, time.monotonic() + 0.5)

    def _signal(self, tasks: Sequence[str], signal: str, source: str = "signal", **_: Any) -> None:
        """Give tasks a signal. `source`: empty if we got it ourselves; then no other host may have got it."""
        if process.is_new_warning(self._warnings, signal, source, time.monotonic()):
            self._runner.signal(tasks, stopping.signal_number(signal))
            if not source:
                self._channel.say(TasksSignal, signal=signal)

    def _stop(self, tasks: Sequence[str], steps: Any, **_: Any) -> None:
        self._catch_up()
        self._stopping.stop(list(tasks), stopping.parse(steps, time.monotonic()))

    def _on_sample(self, interval_s: float, **_: Any) -> None:
        if self._measuring is not None and not self._is_leaving:
            self._measuring.set_interval(float(interval_s), time.monotonic())

    def _may_help(self) -> bool:
        """Return whether a helper may be started: it would be left when everything is stopped."""
        runs = any(not each.is_reaped for each in self._runner.tasks.values())
        return runs and self._stopping.is_over and not self._is_leaving

    def _ack(self, task: str, stream: str, offset: int, **_: Any) -> None:
        self._runner.acknowledge(task, stream, offset)

    def _ping(self, n: int = 0, **_: Any) -> None:
        self._channel.say(Pong, n=n)
        if self._share is not None:
            from distrun_runtime.agent import cache  # loaded already, where the runtime is in it

            touch_record(self._share.folder)
            cache.note_use(self._share.runtime)

    def _on_leave(self, **_: Any) -> None:
        """The end of the connection will be no cut."""
        self._catch_up()
        self._leave(facts.EXIT_TERMINATED)

    def _end(self, **_: Any) -> None:
        self._catch_up()
        self._leave(0, stopping.kill(time.monotonic()))

    _HANDLERS: ClassVar[Dict[str, Callable[..., None]]] = {
        "begin": _begin,
        "runtime": _runtime,
        "copy": _copy,
        "files": _files,
        "settle": _settle,
        "ask": _ask,
        "stream": _on_stream,
        "spawn": _spawn,
        "signal": _signal,
        "stop": _stop,
        "sample": _on_sample,
        "stack": _on_stack,
        "ack": _ack,
        "ping": _ping,
        "leave": _on_leave,
        "end": _end,
    }

    # What follows

    def _catch_up(self) -> None:
        """Take in what happened before our signal: a task that died, or said that it fails, did so by itself."""
        self._reap()
        self._runner.read_published()

    def _on_other_end(self, pid: int, status: int) -> None:
        if self._measuring is not None:
            self._measuring.reaped(pid, status)
        if self._preflight is not None:
            self._preflight.reaped(pid, status)

    def _reap(self) -> None:
        if self._runner.reap():
            self._stopping.hurry()
            self._save()

    def _leave(self, code: int, how: Optional[StopSequence] = None) -> None:
        """Stop everything, then end the agent. The first reason gives the exit code. `how`: by the job's grace time."""
        if not self._is_leaving:
            self._is_leaving, self._code = True, code
        if self._preflight is not None:
            self._preflight.cancel()
        if self._unpacking is not None:
            self._unpacking.close()
        if self._measuring is not None:
            self._measuring.stop()
        if self._share is not None:
            how = how or stopping.gentle(self._grace_s(), time.monotonic())
            self._stopping.stop(list(self._runner.tasks), how)

    def _grace_s(self) -> float:
        return self._share.plan.limits.grace_s if self._share else 0.0

    def _tell_guard(self, share: Share) -> None:
        """Note what the guard must know to do the agent's work."""
        note = {"type": "begin", "folder": share.folder, "marks": share.marks}
        os.set_blocking(self._guard.notes, False)  # a guard that is stopped reads nothing
        with contextlib.suppress(OSError):  # it is dead: the loop will notice
            os.write(self._guard.notes, session.encode(dict(note, grace_s=self._grace_s())))
        self._beat_at = 0.0
        self._beat(time.monotonic())

    def _beat(self, now: float) -> None:
        """Show the guard that this loop goes on, if it is time."""
        if now < self._beat_at or self._share is None:
            return
        lease_s = self._share.plan.limits.lease_s
        self._beat_at = now + beat_s(lease_s)
        limit_s = lease_s if self._runner.tasks else max(lease_s, PREPARING_S)
        with contextlib.suppress(OSError):
            os.write(self._guard.notes, session.encode({"type": "beat", "limit_s": limit_s}))

    def _save(self) -> None:
        """Update the record. A full disk only makes a later sweep less reliable."""
        share, running = self._share, self._runner.tasks.values()
        if share is None:
            return
        leaders = tuple(RecordedTask(each.task.name, each.leader) for each in running if not each.is_reaped)
        others = {who for each in running for who in each.processes.known if who != each.leader}
        plan, known, both = share.plan, tuple(sorted(others)), (self._guard.identity, self._me)
        current = Record(plan.job, share.place, *both, self._grace_s(), leaders, known, plan.limits.lease_s, plan.nonce)
        with contextlib.suppress(OSError):
            save_record(share.folder, current)

    def _say_ending(self, reason: str, by_user: bool = False) -> None:
        """Say that all tasks are stopped here, unless the coordinator asked for it or was told before."""
        if not self._is_leaving:
            self._channel.say(AgentEnding, reason=reason, by_user=by_user, time=time.time())

    def _warn(self, text: str) -> None:
        self._channel.say(Warned, text=text)


def _reason(err: Exception) -> str:
    """Return an error in words; of one that was not foreseen also its type."""
    return str(err) if str(err) and isinstance(err, (RuntimeFault, OSError)) else f"{type(err).__name__}: {err}"
