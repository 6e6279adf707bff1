"""Waits until an engine has given a job its places; then the job is planned and runs as any other.

The coordinator's process does this first. Clients are served meanwhile: the job is `submitting`, then `queued`, and can
be stopped. No limit of time runs yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from distrun.backends.engine import ANSWER_S, ENDED, QUEUED, RUNNING, QueueStatus
from distrun.backends.queue import CANCEL_S, Submitting, with_explanation
from distrun.errors import DistrunError
from distrun.planning import PlannedJob, QueuedJob
from distrun_runtime.contract import facts
from distrun_runtime.contract.daemon import Interrupts
from distrun_runtime.contract.facts import duration
from distrun_runtime.coordinator import jobfolder, loop, messages
from distrun_runtime.coordinator.failures import Culprit, Outcome
from distrun_runtime.coordinator.service import raise_signal
from distrun_runtime.errors import ContractError

if TYPE_CHECKING:
    from distrun_runtime.coordinator.jobfolder import JobFolder
    from distrun_runtime.coordinator.messages import AgentAction
    from distrun_runtime.coordinator.service import Service

WAKE_S = 2.0
WITHDRAW_S = 2 * ANSWER_S + 2 * ANSWER_S + CANCEL_S
"""How long an engine may take to end a job: what it is doing just now, two questions, and the job's end."""
HURRY_S = 15.0
"""The same after another Ctrl-C."""
HURRY_WAKE_S = 0.5
SILENT_S = 60.0
"""An engine that does not answer for so long is told of; it may do so again later."""
_STOPPED = {"INT": "interrupted", "TERM": "terminated", "HUP": "terminal or launch ended", "PIPE": "stdout is closed"}


def allocate(job: QueuedJob, folder: JobFolder, service: Service) -> PlannedJob | Outcome:
    """Submit a job and wait for its places; return its plan, or how it ended without any.

    What the engine has of a job that ends here is cancelled. The folder says how the job stands, and how it ended.

    Raises:
        UsageError, EngineError: the engine cannot do what is asked for.
        ContractError: no port is free to listen for agents.
    """
    between: list[messages.Interrupt] = []

    def keep(name: str) -> None:
        if name in _STOPPED:
            between.append(messages.Interrupt(name, time.time()))

    # A signal between two loops must not end this process: the engine would keep the job.
    with Interrupts(keep):
        found = _allocate(job, folder, service, between)
    if isinstance(found, PlannedJob):
        for event in between:
            raise_signal(event.signal)
    return found


def _allocate(
    job: QueuedJob, folder: JobFolder, service: Service, between: list[messages.Interrupt]
) -> PlannedJob | Outcome:
    """As `allocate`. `between` gets the signals that come while no loop runs; they stop the job."""
    submitting: list[Submitting] = []
    try:
        waiting = _wait(job, folder, service, submitting, between)
        if waiting.granted is not None:
            submitting[0].close()
            for signal in between:
                waiting.handle(signal, 0.0)
        if waiting.granted is not None:
            planned = job.planned(waiting.granted.grants)
            job.backend.claims = planned.allocation.claims
            folder.allocate(planned.allocation.to_json())
            folder.start(planned.plan)
            service.state(folder.written)
            return planned
    except (DistrunError, ContractError, OSError) as err:
        code = err.exit_code if isinstance(err, DistrunError) else facts.EXIT_SUBMIT
        _end(job, folder, service, Outcome(code, facts.SUBMIT, str(err), job=job.setup.job_id), submitting)
        raise
    return _end(job, folder, service, folder.explained(waiting.outcome(job.setup.job_id)), submitting)


def _wait(
    job: QueuedJob, folder: JobFolder, service: Service, begun: list[Submitting], between: Sequence[messages.Interrupt]
) -> QueueWait:
    """Submit a job and wait; return what the engine gave it, or how it ended. `begun` gets what submits."""
    submission, script = job.backend.open(job.request, job.setup.job_id, job.setup.nonce, folder.path)
    if submission.found.note:
        service.say(submission.found.note, "warning")
    job.backend.keep_files(job.request)
    kind = f" ({submission.found.kind})" if submission.found.kind else ""
    service.say(f"submitting to {job.backend.name} as {submission.marker}{kind}", "debug")
    waiting = QueueWait(job.backend.name, service.say, lambda *told: _note(folder, service, *told), folder.touch)
    run = loop.HostLoop(waiting, ())
    service.opened(run.put)
    begun.append(Submitting(job.backend, submission, script, run.put))
    begun[0].start()
    for signal in between:  # the engine was asked what the script depends on meanwhile
        run.put(signal)
    run.run()
    service.closed()
    for event in run.unheard():
        if isinstance(event, messages.Interrupt):
            waiting.handle(event, 0.0)
    return waiting


def _end(
    job: QueuedJob, folder: JobFolder, service: Service, outcome: Outcome, submitting: Sequence[Submitting]
) -> Outcome:
    """Cancel what the engine has of a job that gets no plan, and note its end.

    A job that the engine may still have gets no end: its folder shows it as lost, and `distrun kill` tries again.
    """
    withdrawing = Withdrawing(job.backend.name, job.setup.job_id, service.say)
    run = loop.HostLoop(withdrawing, ())

    def withdraw() -> None:
        problem = "it was not asked"
        try:
            for each in submitting:
                each.close()
            found = job.backend.withdraw(folder.path)
            for line in (f"ended {one}" for swept in found.values() for one in swept.ended):
                service.say(f"{job.backend.name}: {line}", "info")
            problem = "; ".join(swept.problem for swept in found.values() if swept.problem)
        except Exception as err:
            traceback.print_exc()
            problem = f"internal error: {type(err).__name__}: {err}"
        finally:
            run.put(messages.EngineLetGo(problem))

    service.opened(run.put)
    threading.Thread(target=withdraw, name="engine withdraws", daemon=True).start()
    run.run()
    if withdrawing.problem:
        return dataclasses.replace(outcome, message=f"{outcome.message}; {withdrawing.problem}")
    job.backend.release((), 0.0)
    with contextlib.suppress(OSError):  # it is told all the same
        folder.finish(outcome)
    service.state(folder.written)
    return outcome


def _note(folder: JobFolder, service: Service, state: str, message: str) -> None:
    is_new = folder.written.get("state") != state
    event = jobfolder.event("state", state=state)
    with contextlib.suppress(OSError):  # a full disk; the loop that follows says so
        folder.write_state(state, (), message=message)
        if is_new:
            folder.append(event)
    service.state(folder.written)
    if is_new:
        service.event(event)


class Withdrawing:
    """Decides how long an engine's word is awaited that it has ended a job: `loop.Decisions` without agents.

    Arguments:
        engine: its name, for messages.
        job: the job's id.
        say: takes a message and its level.
    """

    def __init__(self, engine: str, job: str, say: Callable[[str, str], None]) -> None:
        self.is_over = False
        self.problem = ""
        """Why the engine may still have the job, and what to type; empty: it has not."""
        self._engine = engine
        self._job = job
        self._say = say
        self._until: float | None = None
        self._is_hurried = False

    def wake_s(self) -> float:
        """Return how often it is looked whether the time is over."""
        return HURRY_WAKE_S

    def handle(self, event: messages.Event, now: float) -> Sequence[AgentAction]:
        """Take the engine's word, a signal or the time; no agent has anything to do."""
        if self._until is None:
            self._until = now + WITHDRAW_S
        if isinstance(event, messages.EngineLetGo):
            self.is_over = True
            self.problem = self._told(event.problem) if event.problem else ""
        elif isinstance(event, messages.Interrupt) and not self._is_hurried:
            self._is_hurried = True
            self._until = min(self._until, now + HURRY_S)
            text = f"{self._engine} is asked to end the job; its answer is awaited for {duration(HURRY_S)} more"
            self._say(text, "warning")
        if now >= self._until and not self.is_over:
            self.is_over = True
            self.problem = self._told("it has not confirmed that in time")
        return ()

    def _told(self, problem: str) -> str:
        text = f"{self._engine} was asked to end the job and may still have it: {problem}"
        return f"{text}; to make sure: distrun kill {self._job}"


class QueueWait:
    """Decides what an engine's answers mean: `loop.Decisions` without agents.

    Arguments:
        engine: its name, for messages.
        say: takes a message and its level.
        note: takes the job's state, and what it waits for.
        touch: notes that the job lives.
    """

    def __init__(
        self, engine: str, say: Callable[[str, str], None], note: Callable[[str, str], None], touch: Callable[[], None]
    ) -> None:
        self.standing: QueueStatus | None = None
        """The engine's last answer."""
        self._engine = engine
        self._say = say
        self._note = note
        self._touch = touch
        self._refused: messages.EngineTold | None = None
        self._stopped = ""
        self._shown = ""
        self._silent_since: float | None = None
        self._is_silence_told = False

    @property
    def is_over(self) -> bool:
        """Whether the places are known, or the job has ended without any."""
        has_answer = self.standing is not None and self.standing.state in (RUNNING, ENDED)
        return has_answer or bool(self._stopped) or self._refused is not None

    @property
    def granted(self) -> QueueStatus | None:
        """The engine's answer that names all places, unless the job was stopped before."""
        if self._stopped or self.standing is None or self.standing.state != RUNNING:
            return None
        return self.standing

    def wake_s(self) -> float:
        """Return how often the folder is touched."""
        return WAKE_S

    def handle(self, event: messages.Event, now: float) -> Sequence[AgentAction]:
        """Take an answer, a signal or the time; no agent has anything to do."""
        match event:
            case messages.EngineTold(standing=None, is_final=True):
                self._refused = event
            case messages.EngineTold(standing=None):
                self._take_silence(event.error, now)
            case messages.EngineTold():
                self._take(event.standing)
            case messages.Interrupt():
                self._stopped = self._stopped or event.signal
            case messages.Tick():
                with contextlib.suppress(OSError):
                    self._touch()
        return ()

    def _take(self, standing: QueueStatus) -> None:
        self._silent_since, self._is_silence_told = None, False
        if standing.state == QUEUED:
            text = f"{self._engine}: {QUEUED}" + (f", {standing.text}" if standing.text else "")
            if text != self._shown:
                self._shown = text
                self._note(facts.QUEUED, text)
                self._say(text, "info")
        self.standing = standing

    def _take_silence(self, error: str, now: float) -> None:
        if self._silent_since is None:
            self._silent_since = now
        if now >= self._silent_since + SILENT_S and not self._is_silence_told:
            self._is_silence_told = True
            text = f"{self._engine} does not answer for {duration(SILENT_S)}: {error}; it is asked again"
            self._say(text, "warning")

    def outcome(self, job: str) -> Outcome:
        """Return how a job ended that got no places."""
        if self._stopped:
            code = facts.exit_code(None, self._stopped)
            reason = facts.INTERRUPTED if self._stopped == "INT" else facts.TERMINATED
            how = _STOPPED.get(self._stopped, self._stopped)
            return Outcome(code, reason, f"{how} before {self._engine} gave it any place", job=job)
        known = self.standing.why if self.standing is not None and self._refused is None else None
        if self._refused is not None:
            text = f"{self._engine} did not take the job: {self._refused.error}"
            text += f"; {self._refused.fix}" if self._refused.fix else ""
        else:
            why = self.standing.text if self.standing is not None else ""
            why = "" if known is not None and why in known.text else why  # it is said below
            text = f"{self._engine} ended the job before it gave it any place" + (f": {why}" if why else "")
        outcome = Outcome(
            facts.EXIT_SUBMIT,
            facts.SUBMIT,
            text,
            culprit=Culprit("", self._engine, time=time.time(), reason=text),
            job=job,
        )
        return outcome if known is None else with_explanation(outcome, known, self._engine)
