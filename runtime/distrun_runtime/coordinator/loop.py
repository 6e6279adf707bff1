"""The coordinator's one loop: channels and signals put events on a queue; this thread asks the supervisor and acts.

It also keeps what the supervisor need not know: log files, acks, the job's folder, pings. It never waits for
anything but the queue, and there never longer than the supervisor's next tick.
"""

from __future__ import annotations

import queue
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from distrun_runtime.contract import facts
from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.coordinator import actions, events, frames
from distrun_runtime.coordinator.channel import Channel, Put
from distrun_runtime.coordinator.interrupts import Interrupts
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.outcome import Outcome
from distrun_runtime.coordinator.output import Sink
from distrun_runtime.coordinator.spool import Spool
from distrun_runtime.coordinator.supervisor import Supervisor
from distrun_runtime.errors import ContractError

PING_S = 2.0
STATE_S = 0.25
"""state.json is replaced at most so often."""
BATCH = 256
"""Events that are taken from the queue before acks, pings and ticks have their turn."""
TRACE = 2
"""From this verbosity on every frame is said."""


def _no_runtime() -> bytes:
    raise ContractError("an agent asks for the runtime, and there is none to send")


def run(
    plan: Plan,
    secrets: Secrets,
    channels: Sequence[Channel],
    folder: JobFolder,
    sink: Sink,
    *,
    verbosity: int = 0,
    runtime: Callable[[], bytes] = _no_runtime,
    prepare: Optional[Callable[[Put], None]] = None,
) -> Outcome:
    """Run a job to its end: one channel for each host of the plan. Blocks; returns when no agent is left.

    Called in the main thread it takes over INT, TERM, HUP and TSTP and gives them back; a signal that was ignored
    stays ignored. `verbosity` >= 2 says every frame at level debug. The outcome is also in the folder
    (state.json, outcome.json).

    `runtime()` returns the archive (a zip) whose digest the plan names; it is called when the first agent asks for it.
    `prepare(put)` is called once, when every host is ready, and before any task is spawned: it begins, in a thread of
    its own, what is to be done by then, returns at once, and puts `Prepared` or `PrepareFailed` at its end.

    Should the loop itself fail, the agents are let go (they end their tasks), the folder says so, and the error
    is raised.

    Raises:
        ContractError: channels and hosts of the plan do not match.
    """
    named = sorted(channel.host for channel in channels)
    if named != sorted(host.name for host in plan.hosts):
        wanted = ", ".join(host.name for host in plan.hosts)
        raise ContractError("channels to %s were given for a plan of hosts %s" % (", ".join(named), wanted))
    return _Loop(plan, secrets, channels, folder, sink, verbosity=verbosity, runtime=runtime, prepare=prepare).run()


class _Loop:
    def __init__(
        self,
        plan: Plan,
        secrets: Secrets,
        channels: Sequence[Channel],
        folder: JobFolder,
        sink: Sink,
        *,
        verbosity: int,
        runtime: Callable[[], bytes],
        prepare: Optional[Callable[[Put], None]],
    ) -> None:
        self._plan = plan
        self._secrets = secrets
        self._channels = {channel.host: channel for channel in channels}
        self._folder = folder
        self._sink = sink
        self._verbosity = verbosity
        self._runtime = runtime
        self._archive = b""
        self._prepare = prepare
        self._queue: queue.SimpleQueue[events.Event] = queue.SimpleQueue()
        self._supervisor = Supervisor(plan, has_preparation=prepare is not None)
        self._spool = Spool(folder.logs)
        self._outcome: Optional[Outcome] = None
        self._acks: Dict[Tuple[str, str, str], int] = {}
        # Several answers must be missing before a host is suspect.
        self._ping_s = min(PING_S, plan.limits.suspect_s / 4)
        self._pinged = 0.0
        self._pings = 0
        self._ticked = 0.0
        self._saved = 0.0
        self._is_dirty = False
        self._folder_warned = False

    def run(self) -> Outcome:
        try:
            with Interrupts(self._queue.put):
                self._handle(events.Tick(time.time()))
                for channel in self._channels.values():
                    channel.start(self._queue.put)
                while self._outcome is None:
                    self._turn()
            outcome = self._outcome
        except BaseException as err:
            self._give_up(err)
            raise
        finally:
            for name, channel in self._channels.items():
                channel.close()
                self._drop(name)
            self._spool.close()
        self._try(lambda: self._folder.finish(outcome))
        self._record("finished", exit_code=outcome.exit_code, reason=outcome.reason, message=outcome.message)
        return outcome

    def _turn(self) -> None:
        """Wait for one event, take what else is there, then do what time asks for."""
        now = time.monotonic()
        due = min(self._ticked + self._supervisor.wake_s(), self._pinged + self._ping_s)
        for event in self._wait(max(0.0, due - now)):
            self._take(event)
        for (host, task, stream), offset in self._acks.items():
            self._send(host, frames.ack(task, stream, offset))
        self._acks.clear()
        now = time.monotonic()
        if now >= self._ticked + self._supervisor.wake_s():
            self._handle(events.Tick(time.time()))
        if now >= self._pinged + self._ping_s:
            self._ping(now)
        if self._is_dirty and now >= self._saved + STATE_S and self._outcome is None:
            self._save(now)

    def _wait(self, limit_s: float) -> List[events.Event]:
        batch: List[events.Event] = []
        try:
            # A handler of ours puts into this queue, which also ends this wait.
            batch.append(self._queue.get(timeout=limit_s))
            while len(batch) < BATCH:
                batch.append(self._queue.get_nowait())
        except queue.Empty:
            pass
        return batch

    def _take(self, event: events.Event) -> None:
        if self._verbosity >= TRACE and not isinstance(event, (events.Tick, events.Pong)):
            self._sink.say("< %s" % _shown(event), actions.DEBUG)
        if isinstance(event, events.PauseToggled):
            self._sink.toggle_pause()
            return
        if isinstance(event, events.Output):
            self._write(event)
        elif type(event) in _RECORDED:
            self._is_dirty = True
            self._record(_RECORDED[type(event)], **_facts(event))
        self._handle(event)

    def _write(self, event: events.Output) -> None:
        if event.task not in self._supervisor.roster.tasks:
            return  # the supervisor says what it thinks of that
        written = self._spool.add(event.task, event.stream, event.offset, event.data)
        self._acks[event.host, event.task, event.stream] = written.offset
        if written.fresh:
            self._sink.output(event.task, event.host, event.stream, written.fresh, written.at)
        if written.fresh and written.at is None:
            warning = self._spool.warning()
            if warning:
                self._sink.say(warning, actions.WARNING)

    def _handle(self, event: events.Event) -> None:
        now = time.monotonic()
        if isinstance(event, events.Tick):
            self._ticked = now
        before = self._supervisor.job_state
        for action in self._supervisor.handle(event, now):
            self._perform(action)
        self._is_dirty = self._is_dirty or self._supervisor.job_state != before

    def _perform(self, action: actions.Action) -> None:
        if isinstance(action, actions.Announce):
            self._sink.say(action.text, action.level)
            if action.level != actions.DEBUG:
                self._record("said", level=action.level, text=action.text)
            return
        if self._verbosity >= TRACE:
            self._sink.say("> %s" % _shown(action), actions.DEBUG)
        self._is_dirty = True
        if isinstance(action, actions.Begin):
            self._send(action.host, frames.begin(self._plan, self._secrets, action.host))
        elif isinstance(action, actions.SendRuntime):
            self._archive = self._archive or self._runtime()
            self._send(action.host, frames.runtime(self._plan.runtime.digest, self._archive))
        elif isinstance(action, actions.Prepare):
            if self._prepare is not None:
                self._prepare(self._queue.put)
        elif isinstance(action, actions.Settle):
            self._send(action.host, frames.settle())
        elif isinstance(action, actions.Spawn):
            self._send(action.host, frames.spawn(action))
        elif isinstance(action, actions.StopTasks):
            self._send(action.host, frames.stop(action))
        elif isinstance(action, actions.EndAgent):
            self._send(action.host, frames.end(action))
        elif isinstance(action, actions.Drop):
            self._drop(action.host)
        else:
            self._outcome = action.outcome

    def _drop(self, host: str) -> None:
        """Cut a host's channel, unless its agent said `bye`: then it ends by itself, and its end tells something."""
        if not self._supervisor.roster.hosts[host].said_bye:
            self._channels[host].kill()

    def _send(self, host: str, data: bytes) -> None:
        try:
            self._channels[host].send(data)
        except OSError as err:
            self._queue.put(events.AgentLost(host, str(err), time.time()))

    def _ping(self, now: float) -> None:
        self._pinged = now
        self._pings += 1
        for host in self._supervisor.roster.hosts.values():
            if host.greeted and not host.is_gone:
                self._send(host.name, frames.ping(self._pings))
        self._try(self._folder.touch)

    def _save(self, now: float) -> None:
        self._saved = now
        self._is_dirty = False
        tasks = self._supervisor.roster.tasks.values()
        self._try(lambda: self._folder.write_state(self._supervisor.job_state, tasks))

    def _record(self, kind: str, /, **facts: Any) -> None:
        self._try(lambda: self._folder.record(kind, **facts))

    def _try(self, write: Callable[[], None]) -> None:
        """Write to the job's folder; a disk that is full, or gone, is said once and stops nothing."""
        try:
            write()
        except OSError as err:
            if not self._folder_warned:
                self._folder_warned = True
                text = "cannot write to %s: %s; `distrun status` will not know all" % (self._folder.path, err)
                self._sink.say(text, actions.WARNING)

    def _give_up(self, err: BaseException) -> None:
        """The loop failed: let the agents end their tasks, wait for that as long as it may take, and note it."""
        for channel in self._channels.values():
            channel.close()
        left = {host.name for host in self._supervisor.roster.hosts.values() if host.greeted and not host.is_gone}
        until = time.monotonic() + self._plan.limits.grace_s + 5.0
        while left and time.monotonic() < until:
            for event in self._wait(until - time.monotonic()):
                if isinstance(event, (events.AgentLost, events.Bye)):
                    left.discard(event.host)
        tasks = tuple(self._supervisor.roster.tasks.values())
        text = "distrun itself failed: %s: %s" % (type(err).__name__, err)
        outcome = Outcome(facts.EXIT_INTERNAL, facts.INTERNAL, text, tasks=tasks, survivors=tuple(sorted(left)))
        self._try(lambda: self._folder.finish(outcome))


_RECORDED = {
    events.AgentHello: "hello",
    events.AgentReady: "ready",
    events.Settled: "settled",
    events.Prepared: "prepared",
    events.PrepareFailed: "prepare_failed",
    events.StartFailed: "start_failed",
    events.Started: "started",
    events.Published: "published",
    events.Exited: "exited",
    events.Cleared: "cleared",
    events.Warned: "warning",
    events.AgentEnding: "ending",
    events.Bye: "bye",
    events.AgentLost: "lost",
    events.Interrupt: "interrupt",
}
"""What is noted in events.jsonl, and under which name."""


def _facts(event: Any) -> Dict[str, Any]:
    facts = dict(vars(event))
    if "time" in facts:
        facts["stamp"] = facts.pop("time")
    return facts


def _shown(value: Any) -> str:
    """Return an event or action in one line, without bytes of the user's or values of the environment."""
    hidden = {"data": "%d bytes" % len(getattr(value, "data", b"")), "env": "..."}
    members = ("%s=%s" % (name, hidden.get(name, repr(member))) for name, member in vars(value).items())
    return "%s(%s)" % (type(value).__name__, ", ".join(members))
