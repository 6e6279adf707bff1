"""Runs a planned job to its end.

`launch` forks. The child is the coordinator: in a session of its own it opens the channels to the agents, runs the loop
and clears up. This process stays the terminal's client: it prints what the coordinator sends, forwards signals, asks
for passwords, and returns the outcome. When the client ends, the coordinator stops the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from distrun.backends.base import Swept
from distrun.errors import DistrunError
from distrun.planning import PlannedJob
from distrun_runtime.contract import facts, wire
from distrun_runtime.contract.duration import duration
from distrun_runtime.coordinator import outcome as ends
from distrun_runtime.coordinator.jobstore import JobFolder
from distrun_runtime.coordinator.outcome import Outcome, TaskResult
from distrun_runtime.coordinator.output import Piece, Sink

if TYPE_CHECKING:
    from distrun.sync import Copier
    from distrun_runtime.coordinator.channel import Channel
    from distrun_runtime.coordinator.events import Event

SHOWN = 60
"""Characters of a process that was ended which are shown."""
RELEASE_S = 3.0
"""How long, past the grace time, the end of agents on this machine is waited for. They need milliseconds, unless one
was killed: then its guard ends the tasks first."""
READ_SIZE = 256 * 1024


class Terminal(Protocol):
    """What the client needs of the terminal printer."""

    def start(self) -> None:
        """Start the threads that print."""

    def show(self, piece: Piece) -> None:
        """Take a piece of a task's output."""

    def say(self, text: str, level: str) -> None:
        """Take one message of distrun's own."""

    def toggle_pause(self) -> None:
        """Stop printing, or go on."""


def launch(job: PlannedJob, folder: JobFolder, terminal: Terminal, verbosity: int = 0) -> Outcome:
    """Run a planned job to its end. Whatever happens, its folder says how it ended.

    Forks, so no thread may run in this process.

    Raises:
        DistrunError: the coordinator failed; the message says how.
        KeyboardInterrupt: the job was interrupted before anything was started.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        _coordinator_process(job, folder, its, verbosity)
    its.close()
    with ours:
        return _Client(ours, pid, folder, terminal, verbosity).run()


# ---------------------------------------------------------------------- the coordinator's process


def _coordinator_process(job: PlannedJob, folder: JobFolder, connection: socket.socket, verbosity: int) -> NoReturn:
    """Run the job in this process, the forked child, tell the client how it ended, and exit."""
    code = facts.EXIT_INTERNAL
    try:
        os.setsid()  # Ctrl-C and the end of the terminal reach the client, which tells us
        _detach_streams(folder)
        from distrun_runtime.coordinator.service import ClientConnection

        client = ClientConnection(connection)
        client.start()
        if job.backend.asker is not None:
            job.backend.asker.by(client.ask)
        try:
            folder.take_over()
            client.finish(dataclasses.asdict(coordinate(job, folder, client, verbosity)))
            code = 0
        except BaseException as err:
            client.fail(_error(err))
        client.close()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _detach_streams(folder: JobFolder) -> None:
    """Read nothing, and write errors that nobody expected to a file of the job's folder."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = nothing
    with contextlib.suppress(OSError):  # a full disk
        path = str(folder.path / "coordinator.log")
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, to in ((0, nothing), (1, nothing), (2, log)):
        os.dup2(to, fd)
    for fd in {nothing, log}:
        os.close(fd)


def _error(err: BaseException) -> dict[str, Any]:
    """Return what the client is told of an error."""
    import traceback

    trace = "".join(traceback.format_exception(type(err), err, err.__traceback__))
    told: dict[str, Any] = {"trace": trace, "kind": type(err).__name__, "message": str(err), "hint": ""}
    if isinstance(err, DistrunError):
        return {**told, "hint": err.hint, "exit_code": err.exit_code}
    if isinstance(err, KeyboardInterrupt):
        return {**told, "exit_code": facts.EXIT_INTERRUPTED}
    hint = "please report it, with what -vv prints"
    return {
        **told,
        "message": f"internal error: {type(err).__name__}: {err}",
        "hint": hint,
        "exit_code": facts.EXIT_INTERNAL,
    }


def coordinate(job: PlannedJob, folder: JobFolder, sink: Sink, verbosity: int = 0) -> Outcome:
    """Run a planned job to its end in this process: channels, loop, and what is left behind.

    Raises:
        Exception: anything that was not expected. The folder says so.
    """
    try:
        outcome, swept = _run(job, folder, sink, verbosity)
    except BaseException as err:
        _note_fault(job, folder, err)
        raise
    swept_too = with_swept(outcome, swept, job.plan.limits.lease_s)
    if swept_too != outcome:
        with contextlib.suppress(OSError):  # the loop has said that its folder cannot be written
            folder.finish(swept_too)
    return folder.explained(swept_too)


def _run(job: PlannedJob, folder: JobFolder, sink: Sink, verbosity: int) -> tuple[Outcome, Mapping[str, Swept]]:
    channels = job.backend.channels(job.plan)
    job.backend.boot(channels)
    from distrun_runtime.coordinator import jobrun  # the client does not need it, and agents start meanwhile

    copier = _copier(job, sink)
    try:
        outcome = jobrun.run(
            job.plan,
            job.secrets,
            channels,
            folder,
            sink,
            verbosity=verbosity,
            runtime=lambda: job.runtime,
            prepare=copier.start if copier else None,
        )
    finally:
        if copier:
            copier.cancel()
        swept = _clear_up(job, channels, sink)
    return outcome, swept


def _clear_up(job: PlannedJob, channels: Sequence[Channel], sink: Sink) -> Mapping[str, Swept]:
    """Wait for the ends of agents and guards; end what is left on hosts where that is not known. Ctrl-C ends it."""
    from distrun_runtime.coordinator.failures import listed

    plan = job.plan
    left: tuple[str, ...] = ()
    try:
        left = job.backend.release(channels, plan.limits.grace_s + RELEASE_S)
        if not left:
            return {}
        sink.say(f"ending what may be left on {listed(left)}", "info")
        swept = job.backend.sweep(plan, plan.limits.grace_s, left)
    except KeyboardInterrupt:
        swept = {host: Swept(problem="interrupted") for host in left}
    for host, each in swept.items():
        for line in each.told_problem + each.told_left:
            sink.say(f"{host}: {line}", "warning")
        if not each.problem:
            ended = f"ended {listed([_cut(text) for text in each.ended])}" if each.ended else "nothing was left"
            sink.say(f"{host}: {ended}", "info")
    return swept


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _note_fault(job: PlannedJob, folder: JobFolder, err: BaseException) -> None:
    """Write the end of a job that we failed to run, unless the loop has done so: else it would seem to be lost."""
    if folder.is_finished:
        return
    tasks = tuple(TaskResult(task.name, task.role, task.rank, task.host) for task in job.plan.tasks)
    if isinstance(err, KeyboardInterrupt):
        outcome = Outcome(
            128 + signal.SIGINT, facts.INTERRUPTED, "interrupted before anything was started", tasks=tasks
        )
    else:
        text = f"distrun itself failed: {type(err).__name__}: {err}"
        outcome = Outcome(facts.EXIT_INTERNAL, facts.INTERNAL, text, tasks=tasks)
    with contextlib.suppress(OSError):  # the fault may be just that
        folder.finish(outcome)


def with_swept(outcome: Outcome, swept: Mapping[str, Swept], lease_s: float) -> Outcome:
    """Return an outcome that tells what a sweep after the job has done. No side effects.

    `lease_s`: how long the agent of a lost host goes on without us.
    """
    known = {host: each for host, each in swept.items() if not each.problem}
    survivors = [text for text in outcome.survivors if text.rpartition(" on ")[2] not in known]
    survivors += [f"{left} on {host}" for host, each in known.items() for left in each.left]
    message = outcome.message
    lost = outcome.culprit.host if outcome.reason == facts.HOST_LOST and outcome.culprit is not None else ""
    if lost in swept:
        message += "; " + swept[lost].short
        if swept[lost].problem:
            text = ": if that machine still runs, its agent, unless it is frozen, ends the tasks there within %s"
            message += text % duration(lease_s)
            message += f"; to make sure: distrun kill {outcome.job}"
    return dataclasses.replace(outcome, message=message, survivors=tuple(survivors))


def _copier(job: PlannedJob, sink: Sink) -> Copier | None:
    sync, rules = job.plan.sync, job.request.sync_rules
    if sync is None or rules is None:
        return None
    from distrun.ssh.target import Target
    from distrun.sync import Copier

    targets = {host.name: Target.from_reach(host.reach) for host in job.plan.hosts}
    return Copier(targets, sync.source, job.plan.cwd, rules, sync.delete, sink, tree=job.tree, asker=job.backend.asker)


# ---------------------------------------------------------------------- the client


class CoordinatorError(DistrunError):
    """The coordinator ended without an outcome."""

    def __init__(self, message: str, hint: str, exit_code: int) -> None:
        super().__init__(message, hint)
        self.exit_code = exit_code


class _Client:
    """The terminal's side of the connection to the coordinator `pid`, a child process of ours."""

    def __init__(
        self, connection: socket.socket, pid: int, folder: JobFolder, terminal: Terminal, verbosity: int
    ) -> None:
        self._connection = connection
        self._pid = pid
        self._folder = folder
        self._terminal = terminal
        self._verbosity = verbosity
        self._sending = threading.Lock()
        self._questions: dict[int, _Question] = {}
        self._outcome: Outcome | None = None
        self._failure: wire.Frame | None = None

    def run(self) -> Outcome:
        """Show what the coordinator sends until it ends; return the outcome."""
        from distrun_runtime.coordinator.interrupts import Interrupts  # while the coordinator begins its work

        self._terminal.start()
        with Interrupts(self._forward):
            try:
                self._follow()
            finally:
                for question in self._questions.values():
                    question.withdraw()
            _, status = os.waitpid(self._pid, 0)
        if self._failure is not None:
            raise self._raised(self._failure.header)
        if self._outcome is None:
            self._outcome = self._recorded()
        if self._outcome is None:
            raise self._died(status)
        return self._outcome

    def _follow(self) -> None:
        decoder = wire.Decoder()
        while True:
            try:
                data = self._connection.recv(READ_SIZE)
            except ConnectionError:
                return
            if not data:
                return
            for frame in decoder.feed(data):
                self._take(frame)

    def _take(self, frame: wire.Frame) -> None:
        header = frame.header
        if frame.type == "output":
            names = (header["task"], header["host"], header["stream"], header["at"], header["length"])
            self._terminal.show(Piece(frame.body, *names))
        elif frame.type == "said":
            self._terminal.say(header["text"], header["level"])
        elif frame.type == "prompt":
            self._ask(header["id"], header["text"], header["limit_s"])
        elif frame.type == "withdrawn":
            self._questions[header["id"]].withdraw()
        elif frame.type == "outcome":
            self._outcome = ends.from_json(header["outcome"])
        elif frame.type == "failed":
            self._failure = frame

    def _forward(self, event: Event) -> None:
        """Tell the coordinator of a signal; called in the thread that reads signals."""
        from distrun_runtime.coordinator.events import Interrupt, PauseToggled

        if isinstance(event, PauseToggled):
            self._terminal.toggle_pause()
        elif isinstance(event, Interrupt):
            self._send({"type": "signal", "name": event.signal})

    def _send(self, header: dict[str, Any], body: bytes = b"") -> None:
        with self._sending, contextlib.suppress(OSError):  # it has ended, which `_follow` sees
            self._connection.sendall(wire.encode(header, body))

    def _ask(self, number: int, prompt: str, limit_s: float) -> None:
        def answer(text: str | None) -> None:
            header = {"type": "answer", "id": number, "given": text is not None}
            self._send(header, b"" if text is None else text.encode("utf-8", "replace"))

        self._questions[number] = _Question(prompt, limit_s, answer)

    def _raised(self, told: Mapping[str, Any]) -> BaseException:
        if self._verbosity >= 2:
            self._terminal.say(told["trace"].rstrip("\n"), "error")
        if told["kind"] == KeyboardInterrupt.__name__:
            return KeyboardInterrupt()
        return CoordinatorError(told["message"], told["hint"], told["exit_code"])

    def _recorded(self) -> Outcome | None:
        """Return what the job's folder says of its end: the coordinator may have given us up."""
        found = self._folder.outcome()
        if found is None:
            return None
        return Outcome(found["exit_code"], found["reason"], found["message"], job=self._folder.id)

    def _died(self, status: int) -> CoordinatorError:
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return CoordinatorError(
            f"job {self._folder.id}: its coordinator (pid {self._pid}) {how}; its agents end the tasks",
            f"to make sure: distrun kill {self._folder.id}",
            facts.EXIT_INTERNAL,
        )


class _Question:
    """A question on the terminal, asked in a thread of its own until it is answered or withdrawn."""

    def __init__(self, prompt: str, limit_s: float, answer: Callable[[str | None], None]) -> None:
        from distrun.ssh.abort import Abort

        self._prompt = prompt
        self._limit_s = limit_s
        self._answer = answer
        self._abort = Abort()
        self._thread = threading.Thread(target=self._run, name="question", daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        """Ask no more, and give the terminal its settings back."""
        self._abort.now()
        self._thread.join()

    def _run(self) -> None:
        from distrun.ssh.abort import Aborted
        from distrun.ssh.ask import TERMINAL, read_secret

        with contextlib.suppress(Aborted):
            self._answer(read_secret(TERMINAL, self._prompt, self._limit_s, self._abort.check))
