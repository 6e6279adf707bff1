"""The straight paths of the commands: launch, kill. Each step is one function; nothing calls upwards."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distrun import archive, backends, ship
from distrun.backends.base import Backend, Rendered, Swept
from distrun.errors import UsageError
from distrun.hosts import Inventory
from distrun.job import BUNDLED, Job, check_tuning, given
from distrun.placement import hosts_of, place
from distrun.plan import Site, check_ports, make_plan, may_bring
from distrun_runtime.contract import facts, process
from distrun_runtime.contract.duration import duration
from distrun_runtime.contract.folder import identity
from distrun_runtime.contract.plan import SERVER, Limits, Plan, Runtime, Secrets, Sync
from distrun_runtime.coordinator import loop
from distrun_runtime.coordinator.failures import listed
from distrun_runtime.coordinator.jobstore import JobFolder, JobStore
from distrun_runtime.coordinator.outcome import Outcome, TaskResult
from distrun_runtime.coordinator.sink import Sink
from distrun_runtime.errors import JobStoreError

if TYPE_CHECKING:
    from distrun.sync import Copier, Rules, Tree
    from distrun_runtime.coordinator.channel import Channel

DRY_RUN_ID = "dry-run"
POLL_S = 0.05
SHOWN = 60
"""Characters of a process that was ended which are shown."""
RELEASE_S = 3.0
"""How long, past the grace time, the end of agents on this machine is waited for. They need milliseconds, unless one
was killed: then its guard ends the tasks first."""


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to run, and nothing of it has happened."""

    plan: Plan
    secrets: Secrets
    backend: Backend
    runtime: bytes = b""
    """The archive that hosts are sent; empty: they have the runtime."""
    rules: Rules | None = None
    """What of the current directory is copied to the hosts; None: nothing."""
    tree: Tree | None = None
    """How much that is."""

    def rendered(self) -> Rendered:
        """Return what the backend would execute."""
        return self.backend.render(self.plan)


@dataclass(frozen=True)
class Killed:
    """What `kill` did, and what came of it."""

    done: tuple[str, ...]
    """What was done before the sweep, a line each."""
    swept: Mapping[str, Swept] = field(default_factory=dict)
    """By host."""
    is_quiet: bool = False
    """The job was over already: where nothing was left, nothing is said."""

    @property
    def left(self) -> list[str]:
        """The processes that did not end, a line each."""
        return self._told(lambda each: each.told_left)

    @property
    def unasked(self) -> list[str]:
        """The hosts that did not answer, a line each."""
        return self._told(lambda each: each.told_problem)

    @property
    def lines(self) -> list[str]:
        """All that is to be told, a line each."""

        def told(each: Swept) -> list[str]:
            return [] if self.is_quiet and each == Swept() else each.lines()

        return [*self.done, *self._told(told)]

    def _told(self, of: Callable[[Swept], list[str]]) -> list[str]:
        """Return lines about each host; it is named where there are several."""
        found = [(host, line) for host, each in self.swept.items() for line in of(each)]
        return ["%s: %s" % pair for pair in found] if len(self.swept) > 1 else [line for _, line in found]


def prepare(
    job: Job,
    launcher: str,
    *,
    env: Mapping[str, str],
    found: Inventory | None = None,
    reach: Mapping[str, str] = MappingProxyType({}),
    rules: Rules | None = None,
    delete: bool = False,
    doctor: str = "",
    store: JobStore,
    run_dir: Path | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Make the plan. For a dry run the id is a placeholder, there is no token and nothing is written.

    Arguments:
        found: the hosts that the user named.
        reach: the user's options for getting there, as `Backend.reach` takes them.
        rules: what of `job.cwd` is copied, if `job.sync_dst_dir` is given.
        delete: what only a host has is deleted there.
        doctor: what the user types to have these hosts examined, for messages.

    Raises:
        UsageError: anything that the user got wrong, before anything happened.
    """
    backend = backends.load(launcher)
    check_tuning(job.settings, env)
    if backend.inherits_env:
        _check_python(job, env)
    hosts = backend.inventory(found)
    slots = place(
        job.workers,
        job.servers,
        hosts,
        policy=job.placement,
        scheduler=job.has_servers,
        scheduler_host=job.scheduler_host,
        oversubscribe=job.oversubscribe,
        relays=job.adds_on_hosts,
    )
    used = hosts_of(slots, hosts.order)
    job_id = DRY_RUN_ID if dry_run else store.new_id(job.name)
    runtime, data = _runtime(backend, env, dry_run)
    tree = _scan(job, rules)
    reached = {name: backend.reach(hosts.spec(name), reach) for name in used}
    site = Site(
        job_id=job_id,
        backend=launcher,
        hosts=hosts,
        run_dir=os.path.abspath((run_dir or store.jobs) / job_id),
        runtime=runtime,
        python="" if backend.ships_runtime else sys.executable,
        reach=reached,
        logins={name: backend.login(way) for name, way in reached.items()},
        doctor=doctor,
        sync=None
        if tree is None or rules is None
        else _sync(job, tree, delete, dry_run, may_bring(job, hosts.specs, _top(job, rules))),
        outer=env if backend.inherits_env else {},
        addresses={} if job.interface or job.subnet else backend.addresses(used),
        token="" if dry_run else secrets.token_hex(32),
    )
    plan, values = make_plan(job, slots, site)
    check_ports(job, plan)
    return Prepared(plan, values, backend, data, rules if tree else None, tree)


def launch(ready: Prepared, folder: JobFolder, sink: Sink, verbosity: int = 0) -> Outcome:
    """Run a prepared job to its end in this process. Whatever happens, its folder says how it ended."""
    try:
        outcome, swept = _run(ready, folder, sink, verbosity)
    except BaseException as err:
        _note_fault(ready, folder, err)
        raise
    swept_too = with_swept(outcome, swept, ready.plan.limits.lease_s)
    if swept_too != outcome:
        with contextlib.suppress(OSError):  # the loop has said that its folder cannot be written
            folder.finish(swept_too)
    return folder.explained(swept_too)


def _run(ready: Prepared, folder: JobFolder, sink: Sink, verbosity: int) -> tuple[Outcome, Mapping[str, Swept]]:
    channels = ready.backend.connect(ready.plan.hosts, ready.plan.job)
    copier = _copier(ready, sink)
    try:
        outcome = loop.run(
            ready.plan,
            ready.secrets,
            channels,
            folder,
            sink,
            verbosity=verbosity,
            runtime=lambda: ready.runtime,
            prepare=copier.start if copier else None,
        )
    finally:
        if copier:
            copier.cancel()
        swept = _clear_up(ready, channels, sink)
    return outcome, swept


def _clear_up(ready: Prepared, channels: Sequence[Channel], sink: Sink) -> Mapping[str, Swept]:
    """Wait for the ends of agents and guards; end what is left on hosts where that is not known. Ctrl-C ends it."""
    plan = ready.plan
    left: tuple[str, ...] = ()
    try:
        left = ready.backend.release(channels, plan.limits.grace_s + RELEASE_S)
        if not left:
            return {}
        sink.say("ending what may be left on %s" % listed(left), "info")
        swept = ready.backend.sweep(plan, plan.limits.grace_s, left)
    except KeyboardInterrupt:
        swept = {host: Swept(problem="interrupted") for host in left}
    for host, each in swept.items():
        for line in each.told_problem + each.told_left:
            sink.say("%s: %s" % (host, line), "warning")
        if not each.problem:
            ended = "ended %s" % listed([_cut(text) for text in each.ended]) if each.ended else "nothing was left"
            sink.say("%s: %s" % (host, ended), "info")
    return swept


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _note_fault(ready: Prepared, folder: JobFolder, err: BaseException) -> None:
    """Write the end of a job that we failed to run, unless the loop has done so: else it would seem to be lost."""
    if folder.is_finished:
        return
    tasks = tuple(TaskResult(task.name, task.role, task.rank, task.host) for task in ready.plan.tasks)
    if isinstance(err, KeyboardInterrupt):
        outcome = Outcome(
            128 + signal.SIGINT, facts.INTERRUPTED, "interrupted before anything was started", tasks=tasks
        )
    else:
        text = "distrun itself failed: %s: %s" % (type(err).__name__, err)
        outcome = Outcome(facts.EXIT_INTERNAL, facts.INTERNAL, text, tasks=tasks)
    with contextlib.suppress(OSError):  # the fault may be just that
        folder.finish(outcome)


def with_swept(outcome: Outcome, swept: Mapping[str, Swept], lease_s: float) -> Outcome:
    """Return an outcome that tells what a sweep after the job has done. No side effects.

    `lease_s`: how long the agent of a lost host goes on without us.
    """
    known = {host: each for host, each in swept.items() if not each.problem}
    survivors = [text for text in outcome.survivors if text.rpartition(" on ")[2] not in known]
    survivors += ["%s on %s" % (left, host) for host, each in known.items() for left in each.left]
    message = outcome.message
    lost = outcome.culprit.host if outcome.reason == facts.HOST_LOST and outcome.culprit is not None else ""
    if lost in swept:
        message += "; " + swept[lost].short
        if swept[lost].problem:
            text = ": if that machine still runs, its agent, unless it is frozen, ends the tasks there within %s"
            message += text % duration(lease_s)
            message += "; to make sure: distrun kill %s" % outcome.job
    return dataclasses.replace(outcome, message=message, survivors=tuple(survivors))


def kill(folder: JobFolder, grace_s: float | None = None, wait_s: float = 10.0) -> Killed:
    """Stop a job, from any terminal of its machine; return what was done.

    Its launcher is asked (SIGTERM) and given the grace time and `wait_s`. Then what is left is found by what was
    recorded and by the job's mark, and ended. Never by name. A job that had lost its launcher is then `killed`,
    unless a host could not be asked: it stays `lost`, so that this can be tried again.

    A job whose files are damaged is ended as far as they can be read.

    Raises:
        UsageError: the job was launched on another machine, or its plan cannot be read.
    """
    state = folder.standing()
    if state in facts.OVER:
        # Its end may have left something that would not die then.
        swept = backends.load(folder.plan().backend).sweep(folder.plan(), grace_s or 0.0)
        return Killed(("is over already: %s" % state,), swept, is_quiet=True)
    plan, launcher, done = _read(folder)
    here = socket.gethostname()
    if launcher.get("host", here) != here:
        raise UsageError(
            "job %s was launched on %s" % (folder.id, launcher["host"]),
            "type this command there; or name the job's hosts: distrun kill -H FILE %s" % folder.id,
        )
    if grace_s is None:
        grace_s = Limits().grace_s if plan is None else plan.limits.grace_s
    who = process.Identity(launcher.get("pid", 0), launcher.get("start", ""))
    if launcher and process.is_alive(who):
        with contextlib.suppress(OSError):  # it is for a message only
            folder.ask_to_end()
        process.send_signal(who, signal.SIGTERM)
        done.append("asked its launcher (pid %d) to stop the job" % who.pid)
        if _wait_gone(who, grace_s + wait_s):
            done.append("the launcher has ended")
        else:
            process.send_signal(who, signal.SIGKILL)
            _wait_gone(who, wait_s)
            done.append("killed the launcher, which did not end within %s" % duration(grace_s + wait_s))
    elif launcher:
        done.append("its launcher (pid %d) is gone" % who.pid)
    if plan is None:
        raise UsageError(
            "job %s: %s" % (folder.id, "; ".join(done)),
            "to end what may be left of it: distrun kill -H FILE %s, where FILE names its hosts (without -H and with"
            " --stale: this machine)" % folder.id,
        )
    swept = backends.load(plan.backend).sweep(plan, grace_s)
    if state != facts.DAMAGED and not any(each.problem for each in swept.values()):
        try:
            folder.bury(tuple(left for each in swept.values() for left in each.left))
        except OSError as err:
            done.append("its end could not be recorded: %s" % err)
    return Killed(tuple(done), swept)


def _read(folder: JobFolder) -> tuple[Plan | None, dict[str, Any], list[str]]:
    """Return a job's plan and launcher, None or empty where they cannot be read, and what is wrong, a line each."""
    plan: Plan | None = None
    launcher: dict[str, Any] = {}
    wrong = []
    try:
        plan = folder.plan()
    except JobStoreError as err:
        wrong.append(str(err))
    try:
        launcher = folder.launcher()
    except JobStoreError as err:
        wrong.append(str(err))
    return plan, launcher, wrong


def _runtime(backend: Backend, env: Mapping[str, str], dry_run: bool) -> tuple[Runtime, bytes]:
    if not backend.ships_runtime:
        return Runtime(path=str(ship.runtime_root(env, copy=not dry_run))), b""
    digest, data = archive.build()
    return Runtime(digest=digest), data


def _scan(job: Job, rules: Rules | None) -> Tree | None:
    if rules is None or not job.sync_dst_dir:
        return None
    from distrun.sync import scan  # where it is used: it is not needed for jobs that copy nothing

    return scan(job.cwd, rules)


def _sync(job: Job, tree: Tree, delete: bool, dry_run: bool, brings: bool) -> Sync:
    source = "" if dry_run else identity(job.cwd)
    return Sync(job.cwd, tree.size, tree.files, delete, source, brings=brings, activated=job.activated or ())


def _top(job: Job, rules: Rules) -> list[str]:
    """Return the names at the top of what is copied."""
    return [*os.listdir(job.cwd), *(extra.name.partition("/")[0] for extra in rules.extra)]


def _copier(ready: Prepared, sink: Sink) -> Copier | None:
    sync = ready.plan.sync
    if sync is None or ready.rules is None:
        return None
    from distrun.ssh.target import Target
    from distrun.sync import Copier

    targets = {host.name: Target.from_reach(host.reach) for host in ready.plan.hosts}
    return Copier(
        targets,
        sync.source,
        ready.plan.cwd,
        ready.rules,
        sync.delete,
        sink,
        tree=ready.tree,
        asker=ready.backend.asker,
    )


def _check_python(job: Job, env: Mapping[str, str]) -> None:
    """Look for --python on this machine, where the servers will run."""
    if job.python and job.has_servers and job.ps == BUNDLED:
        folders = given(job.settings, SERVER).get("PATH")
        path = env.get("PATH", os.defpath) if folders is None else folders.value
        if shutil.which(os.path.expanduser(job.python), path=path) is None:
            raise UsageError(
                "--python: there is no program %r on this machine" % job.python, "leave it out, or give a full path"
            )


def _wait_gone(who: process.Identity, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while process.is_alive(who):
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)
    return True
