"""Runs a job: the supervisor on the loop, and what the supervisor need not know.

That is what is kept and shown of a job: its log files, its folder with states and events, the messages to the user.
"""

from __future__ import annotations

import functools
import time
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ClassVar,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from distrun_runtime.contract import agent_messages, facts
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.agent_messages import StackFound
from distrun_runtime.contract.control import TaskStack
from distrun_runtime.contract.plan import WORKER, Plan, Secrets
from distrun_runtime.coordinator import jobfolder, loop, messages
from distrun_runtime.coordinator.channel import AgentChannel, Put
from distrun_runtime.coordinator.failures import Outcome, Survivor, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.logs import Spool
from distrun_runtime.coordinator.messages import AskStack, StackWanted
from distrun_runtime.coordinator.supervisor import Supervisor
from distrun_runtime.errors import ContractError

if TYPE_CHECKING:  # what is only imported where it is used
    from distrun_runtime.coordinator.conditions import JobMeasurement
    from distrun_runtime.coordinator.prometheus import MetricsPort
    from distrun_runtime.coordinator.service import Service


# Gets the stacks of tasks for clients: asks the agents and always answers. No side effects.
#
# A client asks for a task, a role or all workers. It gets one answer per task: the stacks, or why there are none and
# how to fix that. If an agent does not answer in time, the coordinator answers in its place.


ANSWER_S = 10.0
"""How long an agent may take."""
MOST = 1024
"""Tasks that are asked for at a time."""


StackAnswers = List[Tuple[int, TaskStack]]
"""Answers for clients, each after the number of the question."""


class StackQueries:
    """The questions that are not answered yet.

    Arguments:
        places: the place of each task.
    """

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places
        self._asked = 0
        self._open: Dict[int, Tuple[int, str, float]] = {}
        """By the number that the agent answers with: the question, the task, and until when it may answer."""
        self._left: Dict[int, int] = {}
        """Question to the answers that are still to come."""

    def wanted(
        self, event: StackWanted, tasks: Mapping[str, TaskResult], reached: Set[str], now: float
    ) -> Tuple[List[AskStack], StackAnswers]:
        """Take a client's question; return what agents are asked, and what can be answered now.

        Arguments:
            tasks: all tasks of the job, as they stand.
            reached: places whose agents can be asked.
        """
        names = matching(event.task, tasks)
        if not names:
            known = ", ".join(list(tasks)[:8]) + (", ..." if len(tasks) > 8 else "")
            error = f"no task {event.task!r} in this job; there is: {known}" if event.task else "the job has no workers"
            return [], [(event.number, TaskStack(event.task, 0, error=error))]
        self._left[event.number] = len(names)
        asked: List[AskStack] = []
        told: StackAnswers = []
        for name in names:
            place = self._places[name]
            error, fix = _why_not(tasks[name])
            if not error and place not in reached:
                error = f"the agent of {place} cannot be reached"
            if not error and len(self._open) >= MOST:
                error, fix = f"more than {MOST} stacks are asked for at a time", "name the task"
            if error:
                told.append(self._told(event.number, name, error=error, fix=fix))
            else:
                self._asked += 1
                self._open[self._asked] = (event.number, name, now + ANSWER_S)
                asked.append(AskStack(place, self._asked, name))
        return asked, told

    def heard(self, event: StackFound) -> StackAnswers:
        """Take an agent's answer."""
        number, task, _ = self._open.get(event.id, (0, "", 0.0))
        if event.host != self._places.get(task):
            return []
        del self._open[event.id]
        return [self._told(number, task, text=event.text, how=event.how, error=event.error, fix=event.fix)]

    def expired(self, now: float) -> StackAnswers:
        """Answer for agents that have not answered in time."""
        told = []
        for asked in [asked for asked, (_, _, until) in self._open.items() if now >= until]:
            number, task, _ = self._open.pop(asked)
            error = f"the agent of {self._places[task]} did not answer within {ANSWER_S:g} s"
            told.append(self._told(number, task, error=error))
        return told

    def _told(self, number: int, task: str, **members: str) -> Tuple[int, TaskStack]:
        self._left[number] -= 1
        left = self._left[number]
        if not left:
            del self._left[number]
        return number, TaskStack(task, left, **members)


def matching(wanted: str, tasks: Mapping[str, TaskResult]) -> List[str]:
    """Return the names of the tasks that a client means: one, those of a role, or all workers. No side effects."""
    return [name for name, task in tasks.items() if (wanted or WORKER) in (name, task.role)]


def _why_not(task: TaskResult) -> Tuple[str, str]:
    """Return why a task has no stacks, and what would help."""
    if task.state == facts.RUNNING:
        return "", ""
    if not task.is_over:
        return f"{task.name} has not started yet", ""
    return (
        f"{task.name} has ended ({task.reason or task.how})",
        "distrun logs JOB " + task.name + " shows what it printed",
    )


INTERVAL_A_HOST_S = 0.01
"""In large jobs agents measure once in so many seconds for each of them."""
STATE_S = 0.25
"""state.json is replaced at most so often."""
STATE_A_TASK_S = 0.00025
"""... and once in so many seconds for each task of the job: writing takes about a tenth of that."""
TRACE = 2
"""From this verbosity on every frame is said."""
LET_GO_S = 5.0
"""If the loop fails: how long, past the grace time, the ends of the agents are awaited."""


def _no_runtime() -> bytes:
    raise ContractError("an agent asks for the runtime, and there is none to send")


class JobRun:
    """One job from its start to its end: `loop.Decisions` around the supervisor.

    Arguments:
        plan: of the job.
        secrets: what the plan names and does not hold.
        channels: one for each place of the plan.
        folder: of the job.
        service: takes output, messages, recorded events, states and metrics for the clients.
        verbosity: from 2 on every frame is said at level debug.
        runtime: returns the archive (a zip) whose digest the plan names; called when the first agent asks for it.
        prepare: called once, when every host is ready, and before any task is spawned. It begins, in a thread of its
            own, what is to be done by then, returns at once, and has `AllPrepared` or `PrepareFailed` put at its end.
        ends_when_ready: no task is started. If every host gets ready, the folder does not say that the job has ended.

    Raises:
        ContractError: channels and places of the plan do not match.
    """

    def __init__(
        self,
        plan: Plan,
        secrets: Secrets,
        channels: Sequence[AgentChannel],
        folder: JobFolder,
        service: Service,
        *,
        verbosity: int = 0,
        runtime: Callable[[], bytes] = _no_runtime,
        prepare: Optional[Callable[[Put], None]] = None,
        ends_when_ready: bool = False,
    ) -> None:
        named = sorted(channel.host for channel in channels)
        if named != sorted(place.name for place in plan.all_places):
            wanted = ", ".join(place.name for place in plan.all_places)
            raise ContractError(f"channels to {', '.join(named)} were given for a plan of places {wanted}")
        self._plan = plan
        self._folder = folder
        self._service = service
        self._is_traced = verbosity >= TRACE
        archive = functools.lru_cache(maxsize=None)(runtime)
        self._prepare = prepare
        self._supervisor = Supervisor(plan, prepare is not None, ends_when_ready)
        self._ends_when_ready = ends_when_ready
        self._stacks: Optional[StackQueries] = None
        """None: no client has asked for stacks."""
        is_measured = not ends_when_ready
        self._sample_s = max(messages.SAMPLE_S, INTERVAL_A_HOST_S * len(plan.all_places)) if is_measured else 0.0
        """How often agents measure; 0: nothing is measured."""
        self._measuring: Optional[JobMeasurement] = None
        """Made when there is something to count: a short job ends before that."""
        self._began: Optional[float] = None
        """When the first event came (monotonic)."""
        self._exporter: Optional[MetricsPort] = None
        self._spool = Spool(folder.logs, plan.log_limit)
        self._outcome: Optional[Outcome] = None
        # Several answers must be missing before a host is suspect.
        self._ping_s = min(loop.PING_S, plan.limits.suspect_s / 4)
        self._state_s = max(STATE_S, STATE_A_TASK_S * len(plan.tasks))
        self._touched = time.monotonic()
        """When the folder last got a sign of life; it was made, or taken over, just now."""
        self._saved = float("-inf")
        self._is_dirty = False
        self._folder_warned = False
        share_of = plans.shares(plan)
        self._loop = loop.HostLoop(
            self,
            channels,
            encoders={
                messages.Begin: lambda action: messages.begin(
                    share_of(action.host), secrets, action.host, self._sample_s
                ),
                messages.SendRuntime: lambda action: messages.runtime(plan.runtime.digest, archive()),
            },
            ping_s=self._ping_s,
            after_turn=lambda: self._warn(self._spool.flush()),
        )

    def run(self) -> Outcome:
        """Run the job to its end; return its outcome, which is also in the folder (state.json, outcome.json).

        Blocks, until no agent is left. Called in the main thread it takes over INT, TERM, HUP and TSTP and gives them
        back; a signal that was ignored stays ignored.

        Should the loop itself fail, the agents are let go (they end their tasks), the folder says so, and the error is
        raised.
        """
        self._service.opened(self._loop.put)
        try:
            if self._plan.metrics_port is not None and not self._ends_when_ready:
                self._export(self._plan.metrics_port)
            self._loop.run()
            assert self._outcome is not None
            outcome = self._outcome
        except BaseException as err:
            self._give_up(err)
            raise
        finally:
            self._loop.close()
            self._spool.close()
            if self._exporter is not None:
                self._exporter.close()
        if self._ends_when_ready and not outcome.exit_code:
            return outcome
        self._try(self._folder.finish, outcome)
        self._service.state(self._folder.written)
        self._record("finished", exit_code=outcome.exit_code, reason=outcome.reason, message=outcome.message)
        return outcome

    @property
    def is_over(self) -> bool:
        """Whether no agent is left."""
        return self._outcome is not None

    def wake_s(self) -> float:
        """Return after how many seconds at most the next Tick is wanted."""
        wake_s = self._supervisor.wake_s()
        return wake_s if self._measuring is None else min(wake_s, self._measuring.wake_s())

    def handle(self, event: messages.Event, now: float) -> List[messages.AgentAction]:
        """Note an event, have the supervisor decide, and do what concerns no agent; return the rest."""
        if isinstance(event, (messages.MetricsWanted, messages.MetricsAsked)):
            return self._measure(event, now)
        if self._is_traced and not isinstance(event, _FREQUENT):
            self._service.say(f"< {_shown(event)}", messages.DEBUG)
        if isinstance(event, messages.StackWanted):
            return self._find_stacks(event, now)
        if self._stacks is not None:
            self._tell_stacks(self._stacks.expired(now))
            if isinstance(event, agent_messages.StackFound):
                self._tell_stacks(self._stacks.heard(event))
        found: List[messages.AgentAction] = []
        if isinstance(event, messages.Interrupt) and event.signal != "INT" and self._service.has_lost_launcher:
            event = event._replace(signal="")
        if isinstance(event, agent_messages.Output):
            found += self._write(event)
        elif type(event) in _RECORDED:
            self._is_dirty = True
            members = _members(event)
            if "time" in members:
                members["stamp"] = members.pop("time")
            self._record(_RECORDED[type(event)], **members)
        before = self._supervisor.job_state
        for action in self._supervisor.handle(event, now):
            if not isinstance(action, messages.Announce):
                self._is_dirty = True
                if self._is_traced:
                    self._service.say(f"> {_shown(action)}", messages.DEBUG)
            found += self._perform(action)
        if self._supervisor.job_state != before and not self.is_over:
            self._is_dirty = True
            self._saved = float("-inf")  # at once
            self._record("state", state=self._supervisor.job_state)
        found += self._measure(event, now)
        self._keep_folder(now)
        return found

    def _find_stacks(self, event: messages.StackWanted, now: float) -> List[messages.AgentAction]:
        roster = self._supervisor.roster
        hosts = [host for host in roster.hosts.values() if host.is_ready and not host.is_gone and host.cut_at is None]
        self._stacks = self._stacks or StackQueries(roster.places)
        asked, told = self._stacks.wanted(event, roster.tasks, {host.name for host in hosts}, now)
        self._tell_stacks(told)
        return [*asked]

    def _tell_stacks(self, told: StackAnswers) -> None:
        for number, answer in told:
            self._service.stack(number, answer)

    def _measure(self, event: messages.Event, now: float) -> List[messages.AgentAction]:
        """Have decided what an event means for the job's numbers, and do it; return what is for agents.

        A fault of ours there costs the numbers only, never the job.
        """
        if not self._sample_s:
            return []
        found: List[messages.AgentAction] = []
        self._began = now if self._began is None else self._began
        try:
            if self._measuring is None and isinstance(event, _COUNTED):
                from distrun_runtime.coordinator.conditions import JobMeasurement

                self._measuring = JobMeasurement(self._plan, self._sample_s, time.time() - now, self._began)
            if self._measuring is not None:
                for action in self._measuring.handle(event, now):
                    # While tasks are stopped, it is no news that one does nothing.
                    if self._supervisor.job_state != facts.STOPPING or not isinstance(action, messages.Announce):
                        found += self._perform(action)
                for action in self._measuring.finish(now) if self.is_over else ():
                    self._perform(action)
            if self.is_over:
                self._sample_s, self._measuring = 0.0, None  # what else came at the same time is too late
        except Exception as err:
            import traceback

            traceback.print_exc()  # to coordinator.log
            self._sample_s, self._measuring = 0.0, None
            text = f"distrun itself failed to count: {type(err).__name__}: {err}; this job's numbers end here"
            self._service.say(text, messages.WARNING)
        return found

    def _export(self, port: int) -> None:
        """Answer Prometheus at a port."""
        from distrun_runtime.coordinator.prometheus import MetricsPort

        try:
            exporter = MetricsPort(self._plan, port, self._loop.put)
            exporter.start()
        except (OSError, RuntimeError) as err:  # the latter: there can be no thread
            where = f"{self._plan.metrics_address or facts.LOOPBACK} port {port}"
            why = getattr(err, "strerror", None) or err
            text = f"metrics: cannot listen at {where}: {why}; --metrics-port 0 takes any free port"
            self._perform(messages.Announce(text, messages.WARNING))
            return
        self._exporter = exporter
        self._record("metrics_port", url=exporter.url)
        self._service.say(f"metrics: {exporter.url}", messages.INFO)

    def _write(self, event: agent_messages.Output) -> List[messages.AgentAction]:
        """Log and show output; return the acknowledgement."""
        if event.task not in self._supervisor.roster.tasks:
            return []  # the supervisor says what it thinks of that
        written = self._spool.add(event.task, event.stream, event.offset, event.data, event.attempt)
        if written.fresh:
            host = self._supervisor.roster.tasks[event.task].host
            self._service.output(event.task, host, event.stream, written.fresh, written.at)
        if written.fresh and written.at is None:
            self._warn(self._spool.warning())
            flood = self._spool.flood(event.task)
            if flood:
                self._loop.put(messages.DiskFilled(event.host, event.task, flood, time.time()))
        return [messages.Ack(event.host, event.task, event.stream, written.offset)]

    def _warn(self, text: str) -> None:
        """Say what is wrong with the logs, if anything is."""
        if text:
            self._service.say(text, messages.WARNING)

    def _perform(self, action: Union[messages.Action, messages.MetricsAction]) -> List[messages.AgentAction]:
        """Do what an action says; return it if the loop does more."""
        act = self._ACTS.get(type(action))
        if act is not None:
            act(self, action)
        return [action] if isinstance(action, messages.AgentAction) else []

    def _announce(self, action: messages.Announce) -> None:
        self._service.say(action.text, action.level)
        if action.level != messages.DEBUG:
            self._record("said", **_members(action))

    def _end(self, action: messages.FinishJob) -> None:
        self._outcome = action.outcome

    def _begin_preparation(self, action: messages.Prepare) -> None:
        if self._prepare is not None:
            self._prepare(self._loop.put)

    _ACTS: ClassVar[Mapping[type, Callable[[JobRun, Any], None]]] = {
        messages.Announce: _announce,
        messages.FinishJob: _end,
        messages.Prepare: _begin_preparation,
        messages.RecordEvent: lambda self, action: self._record(action.kind, **action.members),
        messages.KeepMetrics: lambda self, action: self._try(self._folder.append_sample, action.line),
        messages.KeepReports: lambda self, action: self._try(self._folder.keep_reports, action.reports),
        messages.ShowMetrics: lambda self, action: (action.give or self._service.metrics)(action.snapshot),
    }

    def _keep_folder(self, now: float) -> None:
        """Show that this process lives, and write the states of the job and its tasks, if it is time."""
        if now >= self._touched + self._ping_s:
            self._touched = now
            self._try(self._folder.touch)
            self._warn(self._spool.filling())
        if self._is_dirty and now >= self._saved + self._state_s and not self.is_over:
            self._saved = now
            self._is_dirty = False
            tasks = self._supervisor.roster.tasks.values()
            self._try(self._folder.write_state, self._supervisor.job_state, tasks)
            self._service.state(self._folder.written)

    def _record(self, kind: str, /, **members: Any) -> None:
        event = jobfolder.event(kind, **members)
        self._try(self._folder.append, event)
        self._service.event(event)

    def _try(self, write: Callable[..., None], *what: Any) -> None:
        """Write to the job's folder; a disk that is full, or gone, is said once and stops nothing."""
        try:
            write(*what)
        except OSError as err:
            if not self._folder_warned:
                self._folder_warned = True
                text = f"cannot write to {self._folder.path}: {err}; `distrun status` will not know all"
                self._service.say(text, messages.WARNING)

    def _give_up(self, err: BaseException) -> None:
        """The loop failed: let the agents end their tasks, wait for that as long as it may take, and note it."""
        left = self._loop.let_go(self._plan.limits.grace_s + LET_GO_S)
        tasks = tuple(self._supervisor.roster.tasks.values())
        text = f"distrun itself failed: {type(err).__name__}: {err}"
        agents = tuple(Survivor("the agent", host) for host in sorted(left))
        outcome = Outcome(facts.EXIT_INTERNAL, facts.INTERNAL, text, tasks=tasks, survivors=agents)
        self._try(self._folder.finish, outcome)


_COUNTED = (agent_messages.Measured, messages.MetricsWanted, messages.MetricsAsked)
"""Events for which the job's numbers are begun."""
_FREQUENT = (messages.Tick, agent_messages.Pong, agent_messages.Measured)
"""What is not said, however much is to be said."""
_FRAMES = ("hello", "ready", "settled", "started", "published", "exited", "cleared", "warning", "ending", "bye")
_RECORDED = {
    **{agent_messages.FROM_AGENT[kind]: kind for kind in _FRAMES},
    messages.AllPrepared: "prepared",
    messages.PrepareFailed: "prepare_failed",
    agent_messages.StartFailed: "start_failed",
    messages.Cut: "cut",
    messages.Resumed: "resumed",
    messages.AgentLost: "lost",
    messages.PlaceClaimedTwice: "claimed_twice",
    messages.Interrupt: "interrupt",
    messages.DiskFilled: "disk_filled",
}
"""What is noted in events.jsonl, and under which name."""


def _shown(value: Any) -> str:
    """Return an event or action in one line, without bytes of the user's or values of the environment."""
    hidden = {"data": f"{len(getattr(value, 'data', b''))} bytes", "env": "..."}
    members = (f"{name}={hidden.get(name, repr(member))}" for name, member in _members(value).items())
    return f"{type(value).__name__}({', '.join(members)})"


def _members(value: Any) -> Dict[str, Any]:
    """Return the members of an event or action."""
    return dict(value._asdict() if hasattr(value, "_asdict") else vars(value))
