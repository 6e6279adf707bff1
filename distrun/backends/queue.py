"""The backend of all engines: submits a job, waits for its places, lets in the agents that dial from them, clears up.

What one engine does is behind `engine.Engine`; here is what they share. The coordinator's process has one of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from distrun import shipping
from distrun.backends import bootstrap
from distrun.backends import engine as engines
from distrun.backends.base import Backend, Swept
from distrun.backends.bootstrap import Bootstrap
from distrun.backends.engine import (
    ENDED,
    RUNNING,
    Engine,
    EngineError,
    Explanation,
    Grant,
    Handle,
    QueueStatus,
    RoleGroup,
    Script,
    Submission,
)
from distrun.backends.local import ChildChannel
from distrun.errors import UsageError
from distrun.hosts import Inventory
from distrun.placement import Slot, slots_in
from distrun.request import EngineOptions, JobRequest, Needs
from distrun_runtime.contract import address, enrolment, facts
from distrun_runtime.contract.dataclass import read, written
from distrun_runtime.contract.enrolment import with_port
from distrun_runtime.contract.plan import SCHEDULER, SERVER, WORKER, Host, Plan
from distrun_runtime.coordinator.failures import Culprit, Outcome
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.listener import OPEN, DialBack
from distrun_runtime.coordinator.messages import EngineTold, Event
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.sync.copier import CopyRequest, FileCopier, Says
    from distrun.sync.tree import Snapshot
    from distrun_runtime.coordinator.channel import AgentChannel

FOLDER = "engine"
"""In the job's folder, mode 0700: the script, the secret, what the engine wrote."""

LOOK_S = 2.0
"""How often the engine is asked while the job waits, at first."""
LATER_S = 5.0
PATIENT_S = 60.0
"""After so long it is asked less often."""
WATCH_S = 10.0
"""How often it is asked while the job runs and all agents are connected."""
CUT_S = 2.0
"""How often it is asked while an agent is not."""
BYE_S = 2.0
"""How long the last words of agents are awaited whose places have ended."""
EXPLAIN_S = 5.0
"""How long the engine may take to say why it ended a place."""
END_S = 15.0
"""How long the engine may take to notice that all agents have gone."""
CANCEL_S = 60.0
"""How long it may take to end a job that was cancelled."""
DIAL_S, ADDRESS_S = 10.0, 5.0
"""An agent that reaches one of its addresses does so within DIAL_S and ADDRESS_S for each one that does not answer."""

T = TypeVar("T")


def listen(
    job: str,
    secret: str,
    limit_s: float,
    addresses: Sequence[str] = (),
    port_range: str = "",
    *,
    dial_s: float | None = None,
    fix: str = OPEN,
) -> tuple[DialBack, Bootstrap]:
    """Listen for the agents of one job, which an engine starts; return them, and what starts one that dials back.

    Args:
        job: its id.
        secret: the enrolment secret: agents get it in a file or by the engine's own means, never on a command line.
        limit_s: how long an agent that was started tries to reach this process.
        addresses: what the agents are told to dial: addresses or names; empty: every address of this machine.
        port_range: `A-B`; empty: any port.
        dial_s, fix: `Engine.dial_s`, `Engine.unreachable`.

    Raises:
        ContractError: no port is free.
    """
    pem = bootstrap.certificate(job)
    known = addresses or address.own()
    agents = DialBack(
        job,
        secret,
        pem,
        (),
        program=shipping.dialed,
        port_range=port_range,
        limit_s=dial_s and max(dial_s, DIAL_S + ADDRESS_S * len(known)),
        addresses=known,
        fix=fix,
    )
    return agents, Bootstrap(job, agents.pin, tuple(with_port(each, agents.port) for each in known), limit_s)


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that is not there yet. Raises OSError: also if it is there, or is a link."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)


class QueueBackend(Backend):
    """An engine as a backend."""

    is_engine = True
    copies_over_channels = True

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.name = engine.name
        self.needs_hosts = engine.needs_hosts
        self._agents: DialBack | None = None
        self._submission: Submission | None = None
        self._plan: Plan | None = None
        self._snapshot: Snapshot | None = None
        self.claims: Mapping[str, str] = {}
        """What the engine calls the plan's places."""
        self._handle: Handle | None = None
        self._watch: _PlacesWatch | None = None

    def inventory(self, found: Inventory | None) -> Inventory:
        """Return the hosts that the user named; none, if the engine chooses them.

        Raises:
            UsageError: the engine is given none, and some were named; or the reverse.
        """
        if found is not None and not (self.engine.takes_hosts or self.needs_hosts):
            raise UsageError(
                f"--launcher {self.name}: it chooses the hosts itself, and some were named ({found.source})",
                "leave -H and --hosts out; --queue and --engine-arg say where the job may run",
            )
        return found or Inventory(self.name, (), ())

    def connect(
        self, hosts: Sequence[Host], job: str = "", nonce: str = "", holds_s: float = 0.0
    ) -> tuple[AgentChannel, ...]:
        """Return channels to agents that are asked something, if the engine can start one on a node it is told.

        Raises:
            UsageError: it cannot: agents come when a job is submitted.
        """
        python = self.engine.options.config.get("python", "python3")
        argvs = {host.name: self.engine.on_node(host.name, shipping.command(python)) for host in hosts}
        if all(argvs.values()):
            return tuple(ChildChannel(name, argv) for name, argv in argvs.items())
        raise UsageError(
            f"--launcher {self.name}: its nodes cannot be asked one by one", "name them with -H, to ask them by ssh"
        )

    # ------------------------------------------------------------------ before there is a plan

    def script(self, request: JobRequest, job: str, nonce: str, folder: Path) -> tuple[Submission, Script]:
        """Return what would be submitted, with names for what is not known yet. Changes nothing anywhere."""
        start = Bootstrap(job, "{certificate}", ("{address}:{port}",), request.limits.start_s)
        return self._rendered(request, nonce, folder, start, secret=engines.SECRET, is_dry=True)

    def open(self, request: JobRequest, job: str, nonce: str, folder: Path) -> tuple[Submission, Script]:
        """Begin to listen for agents, and return what is to be submitted, written to `folder`/engine.

        Raises:
            UsageError, EngineError: the engine cannot do what is asked for.
            ContractError: no port is free.
            OSError: the folder cannot be written.
        """
        secret = os.urandom(enrolment.SECRET_BYTES).hex()
        where = (request.coordinator_addresses, request.port_range)
        dial_s, fix = self.engine.dial_s, self.engine.unreachable
        self._agents, start = listen(job, secret, request.limits.start_s, *where, dial_s=dial_s, fix=fix)
        submission, script = self._rendered(request, nonce, folder / FOLDER, start, secret=secret)
        os.mkdir(submission.folder, 0o700)
        write_new(submission.secret_file, secret + "\n", 0o600)
        for name, text in script.files.items():
            write_new(submission.folder / name, text, 0o700)
        self._submission = submission
        handle = self.engine.handle(submission)
        JobFolder(folder).note_engine(submission.marker, None if handle is None else written(handle))
        return submission, script

    def keep_files(self, request: JobRequest) -> None:
        """Keep the files that are to be copied as they are now: the job may wait for days.

        Raises:
            SyncError: one cannot be read, or there is no room for them.
        """
        if request.sync_rules is not None and request.sync_dst_dir:
            from distrun.sync.tree import take_snapshot

            self._snapshot = take_snapshot(request.cwd, request.sync_rules)

    def submit(self, submission: Submission, script: Script) -> None:
        """Submit what `open` returned; from now on `look` tells how it stands. Raises EngineError."""
        self._handle = self.engine.submit(submission, script)
        JobFolder(submission.folder.parent).note_engine(submission.marker, written(self._handle))

    def look(self) -> QueueStatus:
        """Return how the job stands. Raises EngineError."""
        assert self._handle is not None, "nothing was submitted"
        return self.engine.look(self._handle)

    def withdraw(self, folder: Path) -> Mapping[str, Swept]:
        """Have the engine end the job whose folder this is, whatever became of its coordinator."""
        try:
            note = JobFolder(folder).engine()
            if note is None:
                return {}  # it was not submitted
            if self._submission is None:
                self.engine.options = _asked(JobFolder(folder))
            if note["handle"] is not None:
                handles = [read(Handle, note["handle"])]
            else:
                handles = [each.handle for each in self.engine.find() if each.marker == note["marker"]]
            ended = [f"{self.name} job {each.id}" for each in handles if self.cancelled(each)]
        except (EngineError, JobStoreError, OSError) as err:
            return {self.name: Swept(problem=str(err))}
        except (KeyError, TypeError, ValueError) as err:
            return {self.name: Swept(problem=f"{folder / 'engine.json'} is damaged: {err}")}
        with contextlib.suppress(OSError):
            os.unlink(folder / FOLDER / "secret")
        return {self.name: Swept(tuple(ended))}

    def cancelled(self, handle: Handle) -> bool:
        """End a job; return whether there was something to end.

        Raises:
            EngineError: it does not answer, or the job does not end.
        """
        if self.engine.is_gone(handle):
            return False
        self.engine.cancel(handle)
        if not self._becomes(lambda: self.engine.is_gone(handle), CANCEL_S):
            raise EngineError(
                f"{self.name} job {handle.id} was cancelled and has not ended after {CANCEL_S:g} s",
                "ask again with the engine's own commands, or the administrators",
            )
        return True

    def _becomes(self, is_true: Callable[[], bool], limit_s: float) -> bool:
        """Ask the engine until something is true, at most so long; return whether it is."""
        for _ in engines.tries(limit_s):
            with contextlib.suppress(EngineError):
                if is_true():
                    return True
        return False

    def _rendered(
        self,
        request: JobRequest,
        nonce: str,
        folder: Path,
        start: Bootstrap,
        *,
        secret: str,
        is_dry: bool = False,
    ) -> tuple[Submission, Script]:
        submission = Submission(
            job=start.job,
            marker=engines.marker(start.job, nonce),
            groups=groups_of(request),
            options=request.engine,
            bootstrap=start,
            folder=folder,
            cwd=request.sync_dst_dir or request.cwd,
            python=request.engine.config.get("python", "python3"),
            secret=secret,
            hosts=request.hosts,
            outer=request.outer,
            oversubscribe=request.oversubscribe,
            is_dry=is_dry,
        )
        submission = dataclasses.replace(submission, found=self.engine.prepare(submission))
        return submission, self.engine.render(submission)

    # ------------------------------------------------------------------ while the job runs

    def channels(self, plan: Plan) -> tuple[AgentChannel, ...]:
        """Return one channel for each place; agents are let in when these are started."""
        assert self._agents is not None
        self._plan = plan
        self._agents.expect((place.name for place in plan.all_places), self.claims)
        self._watch = _PlacesWatch(self, self._agents)
        return self._agents.channels

    def boot(self, channels: Sequence[AgentChannel]) -> None:
        """Begin to look after the places."""
        if self._watch is not None:
            self._watch.start()

    def copier(self, hosts: Sequence[Host], request: CopyRequest, sink: Says) -> FileCopier:
        """Return what sends the files over the agents' channels, as they were when the job was submitted."""
        from distrun.sync.channels import ChannelCopier

        assert self._agents is not None
        assert self._plan is not None
        return ChannelCopier(self._plan, request, sink, self._agents.channels, snapshot=self._snapshot)

    def explained(self, outcome: Outcome) -> Outcome:
        """Return an outcome that says what the engine knows of a failure: asks it, at most EXPLAIN_S."""
        handle = self._handle
        if handle is None or not _may_be_explained(outcome):
            return outcome
        place = outcome.culprit.host if outcome.culprit is not None else ""
        place = self.claims.get(place, place)
        found = within(EXPLAIN_S, lambda: self.engine.explain(handle, place))
        return with_explanation(outcome, found, self.name)

    def release(self, channels: Sequence[AgentChannel], limit_s: float) -> tuple[str, ...]:
        """Wait until the engine says that the job has ended; cancel what it then keeps of it. Returns what is left."""
        if self._watch is not None:
            self._watch.close(engines.ANSWER_S)
        if self._agents is not None:
            self._agents.close()
        if self._submission is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._submission.secret_file)
        if self._handle is None:
            return ()
        has_ended = self._becomes(lambda: self.look().state == ENDED, min(limit_s, END_S))
        if has_ended and not self.engine.keeps_ended:
            return ()
        try:
            self.cancelled(self._handle)
        except EngineError:
            return (self.name,)
        return ()

    def sweep(self, plan: Plan, grace_s: float, hosts: Sequence[str] | None = None) -> Mapping[str, Swept]:
        """Cancel the job in the engine, which ends all its processes on the nodes."""
        if self._submission is not None:
            return self.withdraw(self._submission.folder.parent)
        from distrun_runtime.coordinator.jobstore import JobStore

        return self.withdraw(JobStore().find(plan.job).path)


class _EngineThread(threading.Thread):
    """Asks the engine again and again until it is closed."""

    def __init__(self, backend: QueueBackend) -> None:
        super().__init__(name="engine", daemon=True)
        self._backend = backend
        self._is_closing = threading.Event()

    def close(self, limit_s: float = 2 * engines.ANSWER_S) -> None:
        """Ask no more; what the engine is doing just now is waited for."""
        self._is_closing.set()
        if self.is_alive():
            self.join(limit_s)


class _PlacesWatch(_EngineThread):
    """Looks how the places stand, so that no wait is for an agent that cannot come back."""

    def __init__(self, backend: QueueBackend, agents: DialBack) -> None:
        super().__init__(backend)
        self._channels = {channel.host: channel for channel in agents.channels}
        self._lose = agents.lose

    def run(self) -> None:
        """Do so until it is closed."""
        asked = time.monotonic()
        while not self._is_closing.wait(CUT_S / 2):
            pause = WATCH_S if all(each.is_connected for each in self._channels.values()) else CUT_S
            if time.monotonic() < asked + pause:
                continue
            try:
                self._judge(self._backend.look())
            except EngineError:
                pass  # it may answer the next time
            except Exception:
                traceback.print_exc()
            asked = time.monotonic()

    def _judge(self, standing: QueueStatus) -> None:
        """Give up the places that have ended, if their agents have not said so themselves by now."""
        names = {claim: name for name, claim in self._backend.claims.items()}
        gone = {names.get(claim, claim): why for claim, why in standing.gone.items()}
        if standing.state == ENDED:
            # The places that the engine names come first: the first one that is lost is the culprit.
            gone.update({place: standing.text for place in self._channels if place not in gone})
        if not gone or self._is_closing.wait(BYE_S):
            return
        for place, why in gone.items():
            if place in self._channels:
                self._lose(place, f"{self._backend.name} has ended it" + (f": {why}" if why else ""))


class Submitting(_EngineThread):
    """Submits a job and asks for it until it has its places or has ended: puts `EngineTold`."""

    def __init__(self, backend: QueueBackend, submission: Submission, script: Script, put: Callable[[Event], None]):
        super().__init__(backend)
        self._submission = submission
        self._script = script
        self._put = put

    def run(self) -> None:
        """Do so, or put why it cannot be done."""
        try:
            self._ask()
        except (EngineError, OSError) as err:
            self._put(EngineTold(None, str(err), getattr(err, "hint", ""), True))
        except Exception as err:  # a fault of the engine's code must not leave the job waiting
            traceback.print_exc()
            text = f"internal error: {type(err).__name__}: {err}"
            self._put(EngineTold(None, text, "please report it; coordinator.log in the job's folder has more", True))

    def _ask(self) -> None:
        self._backend.submit(self._submission, self._script)
        began = time.monotonic()
        while True:
            try:
                standing = self._backend.look()
            except EngineError as err:
                self._put(EngineTold(None, str(err), err.hint, False))
            else:
                self._put(EngineTold(standing, "", "", False))
                if standing.state in (RUNNING, ENDED):
                    return
            if self._is_closing.wait(LOOK_S if time.monotonic() < began + PATIENT_S else LATER_S):
                return


# ---------------------------------------------------------------------- pure


def groups_of(request: JobRequest) -> tuple[RoleGroup, ...]:
    """Return what an engine is asked for: servers, if there are any, then workers."""
    groups = (
        RoleGroup(SERVER, request.servers, request.engine.server),
        RoleGroup(WORKER, request.workers, request.engine.worker),
    )
    return tuple(group for group in groups if group.count)


def place_tasks(
    groups: Sequence[RoleGroup],
    grants: Sequence[Grant],
    has_scheduler: bool,
    relays: bool = False,
    oversubscribe: bool = False,
) -> tuple[Slot, ...]:
    """Return where each task runs: servers first, then workers, one at each place in turn as there is room.

    The scheduler runs at the first place and takes no room.

    `relays`: each node that gets several workers and no server, while others have servers, gets one more server that
    keeps no values, as in `placement.place`. It takes no room, and only places that take servers have one.
    `oversubscribe`: places that are full take turns again, as hosts do in `placement.place`.

    Raises:
        EngineError: the places have too little room.
    """
    rooms = [_FreeResources(grant) for grant in grants]
    tasks = [(SCHEDULER, 0, grants[0].node, grants[0].place)] if has_scheduler and grants else []
    turns = itertools.cycle(rooms)
    for group in groups:
        for rank in range(group.count):
            room = _next(turns, rooms, group)
            if room is None and oversubscribe:
                for each in rooms:
                    each.refill()
                room = _next(turns, rooms, group)
            if room is None:
                raise EngineError(_too_little(groups, grants, group, rank))
            tasks.append((group.role, rank, room.grant.node, room.grant.place))
    if relays:
        tasks += _relays(tasks, grants)
    return slots_in(tasks)


def check_room(submission: Submission, grants: Sequence[Grant], has_scheduler: bool) -> set[str]:
    """Return the places that get a task of a job whose places are known before it is submitted.

    Raises:
        UsageError: they have too little room.
    """
    try:
        slots = place_tasks(submission.groups, grants, has_scheduler, oversubscribe=submission.oversubscribe)
    except EngineError as err:
        raise UsageError(str(err), "lower -n or -s, take more hosts, or pass --oversubscribe") from None
    return {slot.place for slot in slots}


_Placed = tuple[str, int, str, str]
"""Role, rank, node and place of a task."""


def _relays(tasks: Sequence[_Placed], grants: Sequence[Grant]) -> list[_Placed]:
    """Return the servers that only add what the workers of their node push, ranked behind the others."""
    servers = [node for role, _, node, _ in tasks if role == SERVER]
    workers = Counter(node for role, _, node, _ in tasks if role == WORKER)
    first: dict[str, str] = {}
    for grant in grants:
        if not grant.takes or SERVER in grant.takes:
            first.setdefault(grant.node, grant.place)
    several = [node for node, count in workers.items() if count > 1 and node in first and node not in servers]
    return [(SERVER, len(servers) + i, node, first[node]) for i, node in enumerate(several)] if servers else []


def place_names(grants: Sequence[Grant]) -> dict[str, str]:
    """Return what the job calls the places, by what the engine calls them.

    Messages name places, and a user knows nodes: so a place is called as its node, or `worker-3@h2` on one of several.
    """
    nodes = Counter(grant.node for grant in grants)
    claims = {grant.place for grant in grants}
    return {
        grant.place: grant.node
        if nodes[grant.node] == 1 and (grant.node not in claims or grant.node == grant.place)
        else f"{grant.place}@{grant.node}"
        for grant in grants
    }


def _next(turns: Iterator[_FreeResources], rooms: Sequence[_FreeResources], group: RoleGroup) -> _FreeResources | None:
    """Return the next place that has room for a task, which is taken."""
    return next((each for each in itertools.islice(turns, len(rooms)) if each.take(group.role, group.needs)), None)


class _FreeResources:
    """What of a place is free."""

    def __init__(self, grant: Grant) -> None:
        self.grant = grant
        self._most = grant.most or sys.maxsize
        self.refill()

    def refill(self) -> None:
        """Begin another turn."""
        self._cores = self.grant.cores
        self._takes = dict(self.grant.takes)

    def take(self, role: str, needs: Needs) -> bool:
        """Take the room of a task; return whether there was enough."""
        cores = max(1, needs.cores)
        if self._most < cores:
            return False
        if self.grant.takes:
            if not self._takes.get(role, 0):
                return False
            self._takes[role] -= 1
        elif self.grant.cores:
            if self._cores < cores:
                return False
            self._cores -= cores
        self._most -= cores
        return True


def _too_little(groups: Sequence[RoleGroup], grants: Sequence[Grant], group: RoleGroup, rank: int) -> str:
    wanted = " + ".join(f"{each.count} {each.role} of {max(1, each.needs.cores)} cores" for each in groups)
    given = ", ".join(
        f"{grant.place} on {grant.node}: "
        + (" + ".join(f"{n} {role}" for role, n in grant.takes.items()) or f"{grant.cores} cores")
        for grant in grants
    )
    return f"the places that were given have no room for {group.role}-{rank}: wanted {wanted}; given {given or 'none'}"


def _may_be_explained(outcome: Outcome) -> bool:
    if outcome.reason in (facts.HOST_LOST, facts.START_FAILED):
        return True
    culprit = outcome.culprit
    if outcome.reason != facts.TASK_FAILED or culprit is None:
        return False
    # A task may notice the loss of a node before the agents are told to end.
    return culprit.signal in ("KILL", "TERM", "XCPU") or culprit.consequence or culprit.missing


def with_explanation(outcome: Outcome, found: Explanation | None, engine: str) -> Outcome:
    """Return a failure as the engine explains it. No side effects."""
    if found is None:
        if outcome.reason != facts.HOST_LOST:
            return outcome
        return dataclasses.replace(outcome, message=f"{outcome.message}; {engine} has recorded no reason")
    reason = {
        facts.EXIT_TIMEOUT: facts.TIMEOUT,
        facts.EXIT_TERMINATED: facts.TERMINATED,
        facts.EXIT_HOST_LOST: facts.HOST_LOST,
    }.get(found.code, facts.TASK_FAILED)
    culprit = outcome.culprit or Culprit("", "")
    message = outcome.message if found.text in outcome.message else f"{outcome.message}; {found.text}"
    if found.lost:
        culprit, message = Culprit("", found.lost, time=culprit.time), f"lost {found.lost}: {found.text}"
    culprit = dataclasses.replace(culprit, reason=found.text)
    return dataclasses.replace(outcome, exit_code=found.code, reason=reason, message=message, culprit=culprit)


# ---------------------------------------------------------------------- helpers


def within(limit_s: float, ask: Callable[[], T]) -> T | None:
    """Return what `ask` returns; None if it fails or takes longer. It then goes on in its thread."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(ask())
        except (EngineError, OSError):
            pass
        except Exception:
            traceback.print_exc()

    thread = threading.Thread(target=run, name="engine explains", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def _asked(folder: JobFolder) -> EngineOptions:
    """Return what the user said to the engine of a job. Raises JobStoreError."""
    value = folder.request() or {}
    try:
        return EngineOptions.from_json(value["engine"]) if "engine" in value else EngineOptions()
    except (KeyError, TypeError) as err:
        raise JobStoreError(f"{folder.path / 'request.json'} is damaged: {err}") from err


def recorded_marker(folder: Path) -> str:
    """Return what the job of a folder is called in its engine; empty if it was never to be submitted to one.

    Raises:
        JobStoreError: its note is damaged, so that its job must not be taken for one without a coordinator.
    """
    note = JobFolder(folder).engine()
    return "" if note is None else str(note["marker"])
