"""Runs a planned job to its end."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distrun.backends.base import Swept
from distrun.planning import PlannedJob
from distrun_runtime.contract import facts
from distrun_runtime.contract.duration import duration
from distrun_runtime.coordinator import loop
from distrun_runtime.coordinator.failures import listed
from distrun_runtime.coordinator.jobstore import JobFolder
from distrun_runtime.coordinator.outcome import Outcome, TaskResult
from distrun_runtime.coordinator.output import Sink

if TYPE_CHECKING:
    from distrun.sync import Copier
    from distrun_runtime.coordinator.channel import Channel

SHOWN = 60
"""Characters of a process that was ended which are shown."""
RELEASE_S = 3.0
"""How long, past the grace time, the end of agents on this machine is waited for. They need milliseconds, unless one
was killed: then its guard ends the tasks first."""


def launch(job: PlannedJob, folder: JobFolder, sink: Sink, verbosity: int = 0) -> Outcome:
    """Run a prepared job to its end in this process. Whatever happens, its folder says how it ended."""
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
    channels = job.backend.connect(job.plan.hosts, job.plan.job)
    copier = _copier(job, sink)
    try:
        outcome = loop.run(
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
    plan = job.plan
    left: tuple[str, ...] = ()
    try:
        left = job.backend.release(channels, plan.limits.grace_s + RELEASE_S)
        if not left:
            return {}
        sink.say("ending what may be left on %s" % listed(left), "info")
        swept = job.backend.sweep(plan, plan.limits.grace_s, left)
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


def _copier(job: PlannedJob, sink: Sink) -> Copier | None:
    sync, rules = job.plan.sync, job.request.sync_rules
    if sync is None or rules is None:
        return None
    from distrun.ssh.target import Target
    from distrun.sync import Copier

    targets = {host.name: Target.from_reach(host.reach) for host in job.plan.hosts}
    return Copier(targets, sync.source, job.plan.cwd, rules, sync.delete, sink, tree=job.tree, asker=job.backend.asker)
