"""Runs a planned job to its end.

`launch` forks. The child is the coordinator: in a session of its own it opens the channels to the agents, runs the loop
and clears up. This process stays the terminal's client: it prints what the coordinator sends, forwards signals, asks
for passwords, and returns the outcome. When the client ends, the coordinator stops the job.

A detached job's coordinator survives its terminal: it is a daemon here, or on one of the job's hosts
(`_leave`). This process leaves it when all tasks run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from distrun import backends, client
from distrun.backends.base import Swept
from distrun.client import ControlConnection, CoordinatorError, CoordinatorLost, Detached, Follower, FollowerOutput
from distrun.errors import DistrunError, UsageError
from distrun.planning import PlannedJob, QueuedJob
from distrun_runtime.contract import control, daemon, facts, process
from distrun_runtime.contract.dataclass import read
from distrun_runtime.contract.facts import duration
from distrun_runtime.contract.plan import STOP, Sync
from distrun_runtime.coordinator.failures import Outcome, Problem, Survivor, TaskResult
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.errors import ContractError, JobStoreError

if TYPE_CHECKING:
    from distrun.fleet import HostAnswer
    from distrun.sync.copier import FileCopier
    from distrun.sync.rules import CopyRules
    from distrun_runtime.contract.plan import Host
    from distrun_runtime.coordinator.channel import AgentChannel
    from distrun_runtime.coordinator.jobstore import JobStore
    from distrun_runtime.coordinator.service import Service

Ready = PlannedJob | QueuedJob
"""A job that is ready to be launched, or to be submitted to an engine."""
HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that wait while the coordinator's process is made: the client can forward them, and it can report them.

They also wait while it starts what agents it can, which takes milliseconds, and a fifth of a second when their program
is not in the cache yet. No agent inherits that (`shipping.BOOT`).
"""
POLL_S = 0.02
SYNC_S = 0.5
"""Between two reports of a copy to a terminal that shows them in place."""
SHOWN = 60
"""Characters of a process that was ended which are shown."""
READY_S = 30.0
"""How long the coordinator of a job that is left to a host may take to listen there."""
ASK_S = 20.0
"""How long an agent may take to start a process."""
SECRET = "DISTRUN_ENROLMENT"
"""Variable by which a bootstrap gets the enrolment secret; it is removed before anything else runs."""
RELEASE_S = 3.0
"""How long, past the grace time, the end of agents on this machine is waited for. They need milliseconds, unless one
was killed: then its guard ends the tasks first."""


def launch(job: Ready, folder: JobFolder, terminal: FollowerOutput, verbosity: int) -> Outcome | Detached:
    """Run a job to its end. Whatever happens, its folder says how it ended.

    Returns before the end, what `Detached` says, if the job is detached meanwhile; with --detach, when all its tasks
    run, or when an engine has taken it. Forks, so no thread may run in this process.

    Raises:
        DistrunError: the coordinator failed; the message says how.
        KeyboardInterrupt: the job was interrupted before anything was started.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        pid, ours = _fork(job, folder, verbosity)
        with ControlConnection(ours) as connection:
            if not job.request.detach:
                terminal.when_unread(lambda: connection.send("signal", name="PIPE"))
            outcome = _follow(connection, job, folder, terminal, pid=pid, verbosity=verbosity)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    if job.is_hosted and isinstance(outcome, Outcome) and not outcome.exit_code:
        return _await_tasks(job, folder, terminal, verbosity)
    return outcome


def _await_tasks(job: Ready, folder: JobFolder, terminal: FollowerOutput, verbosity: int) -> Outcome | Detached:
    """Wait until all tasks of a job run whose coordinator is on a host; return its outcome if it ends before."""
    from distrun import remote_jobs

    states: list[str] = []
    found: Follower | None = None
    lost: CoordinatorLost | None = None
    try:
        with client.connect(folder) as connection:

            def on_state(state: str) -> None:
                states.append(state)
                if state == facts.RUNNING:
                    connection.end()

            found = Follower(connection, terminal, has_output=False, on_state=on_state)
            connection.send("subscribe", events=True, metrics=terminal.draws)
            connection.send("state")
            found.run(_silence_s(job))
    except TimeoutError:
        raise client.unanswering(folder, _silence_s(job)) from None
    except CoordinatorLost as err:  # the job may be over already
        lost = err
    if found is not None and found.failure is not None:
        raise client.raised(found.failure, terminal.say, verbosity)
    warning = remote_jobs.refreshed(folder)
    if warning:
        terminal.say(warning, "warning")
    if facts.RUNNING in states:
        return Detached(None)
    outcome = (found.outcome if found is not None else None) or folder.ended()
    if outcome is None:
        raise lost or client.gone(folder)
    return outcome


def _silence_s(job: Ready) -> float:
    """Return how long a coordinator may be silent while its job starts."""
    return max(job.request.limits.start_s, client.ANSWER_S)


def _fork(job: Ready, folder: JobFolder, verbosity: int) -> tuple[int, socket.socket]:
    """Start the coordinator of a job as a child of this process, or, if it stays for a detached job, as a daemon.

    Returns its process id and the connection to it.
    """
    stays = job.request.detach and not job.is_hosted
    ours, its = socket.socketpair()
    try:
        pid = daemon.fork(keep=[its.fileno()]) if stays else os.fork()
    except (ContractError, OSError) as err:
        raise DistrunError(f"the coordinator's process cannot be started: {err}") from err
    if not pid:
        if not stays:
            daemon.close_all_but({0, 1, 2, its.fileno()})  # it may be detached later
            os.setsid()  # Ctrl-C and the end of the terminal reach the client, which tells us
        _coordinator_process(job, folder, its, verbosity)
    its.close()
    return pid, ours


def create(store: JobStore, job: Ready) -> JobFolder:
    """Make the folder of a job.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        if isinstance(job, QueuedJob):
            return store.submit(job.setup.job_id, job.request.to_json(), job.request.run_dir)
        return store.create(job.plan, job.request.run_dir, job.request.to_json(), job.allocation.to_json())
    except JobStoreError as err:
        raise UsageError(str(err)) from err


def spawn(job: Ready, folder: JobFolder, say: Callable[[str, str], None]) -> None:
    """Start the coordinator of a job in an interpreter of its own, from any thread; as `Jobs.launch` says.

    Returns when clients can reach it, or, of a detached job, when it does not need this process any more.
    """
    import pickle  # noqa: TID251  (it goes by a pipe to our own child)
    import subprocess
    import threading

    ours, its = socket.socketpair()
    # It finds what this process finds, and nothing of the folder that it is started in.
    script = f"import sys; sys.path[:] = {sys.path!r}; from distrun import launching"
    argv = [sys.executable, "-c", f"{script}; launching.coordinator_of_stdin({its.fileno()})"]
    with its:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[its.fileno()], start_new_session=True)
    assert child.stdin is not None  # asked for above
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pickler = pickle.Pickler(pipe)
        pickler.dispatch_table = {
            # It keeps nothing else before its job starts.
            type(job.backend): lambda each: (backends.load, (each.name,))
        }
        pickler.dump((job, folder.path))
    failures: list[control.CoordinatorFailed] = []
    is_detached, is_left = job.request.detach, threading.Event()

    def attend() -> None:
        try:
            with ControlConnection(ours) as connection, contextlib.suppress(CoordinatorLost), client.reading():
                connection.send("subscribe", events=True)
                for frame in connection.frames():
                    match frame.type, frame.header:
                        case "said", {"text": text, "level": level}:
                            with contextlib.suppress(Exception):  # of the caller's: the job does not end by it
                                say(text, level)
                        case "prompt", {"id": number}:
                            connection.send("answer", id=number, given=False)
                        case "event", {"event": {"event": "state", "state": facts.QUEUED | facts.RUNNING}}:
                            if is_detached:
                                connection.send("detach")
                        case "failed", _:
                            failures.append(read(control.CoordinatorFailed, frame.header))
        finally:
            is_left.set()
            child.wait()

    threading.Thread(target=attend, name="launched", daemon=True).start()
    while not is_left.wait(POLL_S) and (is_detached or folder.control() is None):
        pass
    if failures:
        raise client.raised(failures[0], say)
    if folder.control() is None:
        raise CoordinatorError(
            f"job {folder.id}: its coordinator (pid {child.pid}) ended with code {child.wait()}",
            f"what it wrote: {folder.path}",
            facts.EXIT_INTERNAL,
        )


# ---------------------------------------------------------------------- the coordinator's process


def _coordinator_process(job: Ready, folder: JobFolder, connection: socket.socket, verbosity: int) -> NoReturn:
    """Run the job in this process, the forked child, tell the client how it ended, and exit."""
    code = facts.EXIT_INTERNAL
    begun = job if isinstance(job, PlannedJob) and not job.is_hosted else None
    try:
        if begun is not None:
            with contextlib.suppress(Exception):  # `coordinate` meets it again, and can say so
                begun.backend.start_agents(begun.plan)
        from distrun_runtime.coordinator import service as serving  # agents start while this is imported

        serving.leave_streams(folder)
        service = serving.service_of(folder, connection)
        if job.backend.asker is not None:
            job.backend.asker.by(service.ask)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
            folder.take_over()
            _listen(service, folder, job.request.detach)
            service.finish(control.JobEnded(folder.outcome_json(_coordinate(job, folder, service, verbosity))))
            code = 0
        except BaseException as err:
            service.finish(_error(err))
            _let_go(begun)  # before the client is: it may not wait for the end of this process
        service.close()
    except BaseException:
        import traceback

        traceback.print_exc()
        _let_go(begun)
    finally:
        os._exit(code)


def _let_go(begun: PlannedJob | None) -> None:
    """End agents that were started for a job, if any were: `coordinate` may not have come to them."""
    if begun is not None:
        with contextlib.suppress(BaseException):
            begun.backend.release((), RELEASE_S)


def coordinator_of_stdin(connection: int) -> NoReturn:
    """Coordinate, in a new interpreter, the job that `spawn` writes to stdin. `connection`: its client's socket."""
    import pickle  # noqa: TID251  (it comes from `spawn`, by a pipe)

    process.outlive_tasks_signals()
    job, path = pickle.load(sys.stdin.buffer)
    _coordinator_process(job, JobFolder(path), socket.socket(fileno=connection), 0)


def _listen(service: Service, folder: JobFolder, is_needed: bool) -> None:
    """Let clients in by the control socket. An attached job (not `is_needed`) does without, if it has to."""
    from distrun_runtime.coordinator import service as serving

    path = ""
    try:
        path = serving.listen(service, folder)
    except (OSError, ContractError) as err:
        why = f"there is no control socket for this job: {err}"
        if is_needed:
            raise UsageError(why) from err
        service.say(f"{why}; distrun attach and detach will not find it", "warning")
    with contextlib.suppress(OSError):  # a full disk; the loop says so
        folder.write_control(path)


def _error(err: BaseException) -> control.CoordinatorFailed:
    """Return what the client is told of an error."""
    if isinstance(err, DistrunError):
        return control.failure(err, err.exit_code, err.hint)
    return control.failure(err, facts.EXIT_INTERRUPTED) if isinstance(err, KeyboardInterrupt) else control.failure(err)


def _coordinate(job: Ready, folder: JobFolder, service: Service, verbosity: int) -> Outcome:
    """Run a job here to its end or, if a host is to run it, until its hosts are ready and a host has it."""
    if isinstance(job, QueuedJob):
        from distrun import allocating

        found = allocating.allocate(job, folder, service)
        if isinstance(found, Outcome):
            return found
        job = found
    if not job.is_hosted:
        return coordinate(job, folder, service, verbosity)
    # These agents end with their connections; those that follow hold.
    ready = job._replace(plan=job.plan._replace(on_eof=STOP))
    outcome = coordinate(ready, folder, service, verbosity, ends_when_ready=True)
    return outcome if outcome.exit_code else _leave(job, folder, service)


def coordinate(
    job: PlannedJob, folder: JobFolder, sink: Service, verbosity: int = 0, ends_when_ready: bool = False
) -> Outcome:
    """Run a planned job to its end in this process: channels, loop, and what is left behind.

    Raises:
        Exception: anything that was not expected. The folder says so.
    """
    try:
        copier = None
        channels = job.backend.channels(job.plan)
        try:
            job.backend.boot(channels)
            from distrun_runtime.coordinator import jobrun  # the client does not need it, and agents start meanwhile

            sync, rules = job.plan.sync, job.request.sync_rules
            if sync is not None and rules is not None:
                copier = _copier(job, sync, rules, sink)
            written = jobrun.JobRun(
                job.plan,
                job.secrets,
                channels,
                folder,
                sink,
                verbosity=verbosity,
                runtime=lambda: job.runtime,
                prepare=copier.start if copier else None,
                ends_when_ready=ends_when_ready,
            ).run()
            outcome = job.backend.explained(written) if written.exit_code else written
        finally:
            if copier:
                copier.cancel()
            swept = _clear_up(job, channels, sink)
    except BaseException as err:
        _note_fault(job, folder, err)
        raise
    if swept:
        outcome = with_swept(outcome, swept, job.plan.limits.lease_s)
    if outcome != written:
        with contextlib.suppress(OSError):  # the loop has said that its folder cannot be written
            folder.finish(outcome)
    return folder.explained(outcome)


def _clear_up(job: PlannedJob, channels: Sequence[AgentChannel], sink: Service) -> Mapping[str, Swept]:
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
            shown = [text if len(text) <= SHOWN else text[:SHOWN] + "..." for text in each.ended]
            sink.say(f"{host}: {f'ended {listed(shown)}' if shown else 'nothing was left'}", "info")
    return swept


def _note_fault(job: PlannedJob, folder: JobFolder, err: BaseException) -> None:
    """Write the end of a job that we failed to run, unless the loop has done so: else it would seem to be lost."""
    if folder.is_finished:
        return
    tasks = tuple(TaskResult(task.name, task.role, task.rank, task.host) for task in job.plan.tasks)
    how = facts.EXIT_INTERNAL, facts.INTERNAL, f"distrun itself failed: {type(err).__name__}: {err}"
    if isinstance(err, KeyboardInterrupt):
        how = facts.EXIT_INTERRUPTED, facts.INTERRUPTED, "interrupted before anything was started"
    with contextlib.suppress(OSError):  # the fault may be just that
        folder.finish(Outcome(*how, tasks=tasks))


def with_swept(outcome: Outcome, swept: Mapping[str, Swept], lease_s: float) -> Outcome:
    """Return an outcome that tells what a sweep after the job has done. No side effects.

    `lease_s`: how long the agent of a lost host goes on without us.
    """
    known = {host: each for host, each in swept.items() if not each.problem}
    survivors = [each for each in outcome.survivors if each.host not in known]
    survivors += [Survivor(left, host) for host, each in known.items() for left in each.left]
    message = outcome.message
    lost = outcome.culprit.host if outcome.reason == facts.HOST_LOST and outcome.culprit is not None else ""
    if lost in swept:
        message += "; " + swept[lost].short
        if swept[lost].problem:
            message += (
                f": if that machine still runs, its agent or guard ends the tasks there within {duration(lease_s)}"
            )
            message += f"; to make sure: distrun kill {outcome.job}"
    return dataclasses.replace(outcome, message=message, survivors=tuple(survivors))


def _copier(job: PlannedJob, sync: Sync, rules: CopyRules, service: Service) -> FileCopier:
    from distrun.sync.copier import REPORT_S, CopyRequest

    told_at = time.monotonic()

    def tell(progress: control.CopyProgress) -> None:
        """Say how far the copy is, as often as the launching client shows it."""
        nonlocal told_at
        if service.launcher_draws or time.monotonic() >= told_at + REPORT_S:
            told_at = time.monotonic()
            service.say(str(progress), "info", progress)

    request = CopyRequest(sync.source, job.plan.cwd, rules, sync.delete, job.tree, on_progress=tell, report_s=SYNC_S)
    return job.backend.copier(job.plan.hosts, request, service)


# Leaves a job to one of its hosts: `distrun launch --detach` with hosts.
#
# The launcher has checked the hosts and copied the files, as for any job, and its agents have ended. Now it starts the
# coordinator on one host, and on every host the bootstrap of an agent that dials this coordinator. It does so by agents
# that start these processes and end; nothing is left that the launcher's connections hold.


def _leave(job: PlannedJob, folder: JobFolder, sink: Service) -> Outcome:
    """Start the coordinator and the agents of a job whose hosts are ready; the folder then says where it is.

    Returns:
        A success if the job has been placed; else how it ended, which the folder says, too.
    """
    from distrun_runtime.contract import enrolment

    plan = job.plan
    host = job.request.coordinator_host or plan.hosts[0].name
    secret = os.urandom(enrolment.SECRET_BYTES).hex()
    login = next(each.login for each in plan.hosts if each.name == host)
    told = _start_coordinator(job, host, secret, login, folder)
    if isinstance(told, Problem):
        message = f"the coordinator could not be started on {host}: {told.text}"
        tasks = tuple(TaskResult(task.name, task.role, task.rank, task.host) for task in plan.tasks)
        how = facts.EXIT_START_FAILED, facts.START_FAILED, message
        outcome = Outcome(*how, tasks=tasks, job=plan.job, problems=(told,))
        folder.finish(outcome)
        return outcome
    if not told["is_shared"]:  # else the coordinator has written there who it is
        folder.place_elsewhere(told, host, login)
    sink.say(
        f"the coordinator runs on {host} (pid {told['pid']}); agents dial it at {' or '.join(told['dial'])}", "info"
    )
    for problem in _start_agents(job, secret, told):
        sink.say(f"{problem.host}: its agent could not be started: {problem.text}", "warning")
    return Outcome(0, facts.SUCCEEDED, f"the coordinator runs on {host}", job=plan.job)


def _start_coordinator(
    job: PlannedJob, host: str, secret: str, login: str, folder: JobFolder
) -> Mapping[str, Any] | Problem:
    """Start the coordinator; return what it tells of itself."""
    import json

    from distrun import shipping
    from distrun.backends import bootstrap
    from distrun_runtime.coordinator.hosted import HostedRequest

    request = job.request
    order = HostedRequest(
        plan=job.plan,
        secrets=job.secrets,
        enrolment=secret,
        pem=bootstrap.certificate(job.plan.job),
        addresses=request.coordinator_addresses,
        port_range=request.port_range,
        request=request.to_json(),
        allocation=job.allocation.to_json(),
        login=login,
        folder=str(folder.path),
        program=shipping.dialed(),
        runtime=job.runtime,
    )
    program = shipping.coordinator(shipping.START_HOSTED) + order.encode()
    hosts = [each for each in job.plan.hosts if each.name == host]
    found = _started(job, hosts, lambda _: shipping.command(daemon.PYTHON), data=program, limit_s=READY_S)[host]
    if isinstance(found, Problem):
        return found
    told: dict[str, Any] = json.loads(found.value["line"])
    return told


def _start_agents(job: PlannedJob, secret: str, told: Mapping[str, Any]) -> list[Problem]:
    """Start the agents' bootstraps; return what went wrong. The coordinator notices who does not dial."""
    from distrun.backends.bootstrap import Bootstrap
    from distrun_runtime.coordinator.hosted import dial_s

    plan = job.plan
    start = Bootstrap(plan.job, told["pin"], told["dial"], dial_s(plan))
    found = _started(
        job,
        plan.hosts,
        lambda host: start.command(daemon.PYTHON, host, f"env:{SECRET}"),
        env=lambda host: {**process.marks(plan.job, plan.nonce, host, host), SECRET: secret},
    )
    return [each for each in found.values() if isinstance(each, Problem)]


def _started(
    job: PlannedJob,
    hosts: Sequence[Host],
    argv: Callable[[str], Sequence[str]],
    *,
    data: bytes = b"",
    env: Callable[[str], Mapping[str, str]] = lambda host: {},
    limit_s: float = 0.0,
) -> Mapping[str, HostAnswer | Problem]:
    """Have an agent on each host start a process that goes on without it, and end; see `daemon.start`."""
    import base64

    from distrun.fleet import Fleet

    text = base64.b64encode(data).decode("ascii")
    with Fleet(job.backend, hosts) as fleet:
        return fleet.ask(
            "daemon",
            lambda host: {"argv": list(argv(host)), "input": text, "env": dict(env(host)), "limit_s": limit_s},
            limit_s + ASK_S,
        )


# ---------------------------------------------------------------------- the client


def _follow(
    connection: ControlConnection, job: Ready, folder: JobFolder, terminal: FollowerOutput, *, pid: int, verbosity: int
) -> Outcome | Detached:
    """Show what the coordinator sends until it ends, or lets us go; return the outcome.

    Of a detached job output is not shown, and the coordinator is asked to let us go when all tasks run. A coordinator
    that is silent for long while the job starts is killed.
    """
    detach, silence_s = job.request.detach and not job.is_hosted, _silence_s(job)

    def on_state(state: str) -> None:
        if detach and state in (facts.QUEUED, facts.RUNNING):
            connection.send("detach")

    def forward(name: str) -> None:
        """Tell the coordinator of a signal, before all else; called in the thread that reads signals."""
        if name == "TSTP":
            terminal.toggle_pause()
            return
        connection.send("signal", name=name)
        if name not in process.TASKS_SIGNALS:
            terminal.leave_out()

    def is_starting() -> bool:
        try:
            return folder.state()["state"] in (facts.SUBMITTING, facts.QUEUED, facts.STARTING)
        except JobStoreError:
            return True

    found = Follower(connection, terminal, has_output=not detach, on_state=on_state)
    if detach or terminal.draws:
        connection.send("subscribe", events=True, metrics=terminal.draws)
    terminal.start()
    status, silent = None, ""
    with daemon.Interrupts(forward):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
        try:
            found.run(silence_s, is_starting)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)  # it lives: the connection has not ended
            silent = f"did not answer within {duration(silence_s)} and was killed: was it stopped?"
            found.run()
        if found.detached is not None and found.outcome is None and found.failure is None:
            return found.detached
        if not detach:
            _, status = os.waitpid(pid, 0)
    if found.failure is not None:
        raise client.raised(found.failure, terminal.say, verbosity)
    # The coordinator may have given us up: then its folder says how the job ended.
    outcome = found.outcome or folder.ended()
    if outcome is None:
        raise CoordinatorError(
            f"job {folder.id}: its coordinator (pid {pid}) {silent or _ended(status)}; its agents end the tasks",
            f"to make sure: distrun kill {folder.id}",
            facts.EXIT_START_FAILED if silent else facts.EXIT_INTERNAL,
        )
    return outcome


def _ended(status: int | None) -> str:
    """Return how a child process ended, of which `waitpid` gave this status; None: it was no child."""
    if status is None:
        return "is gone"
    code = os.waitstatus_to_exitcode(status)
    return f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
