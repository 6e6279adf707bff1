"""The straight paths of the commands: launch, kill. Each step is one function; nothing calls upwards."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distrun import backends, ship
from distrun.backends.base import Backend, Rendered
from distrun.errors import UsageError
from distrun.hosts import named
from distrun.job import BUNDLED, Job, check_tuning, given
from distrun.placement import place
from distrun.plan import Site, check_ports, make_plan
from distrun_runtime.contract import process
from distrun_runtime.contract.plan import SERVER, Plan, Secrets
from distrun_runtime.coordinator import loop
from distrun_runtime.coordinator.jobstore import JobFolder, JobStore
from distrun_runtime.coordinator.outcome import Outcome
from distrun_runtime.coordinator.sink import Sink

DRY_RUN_ID = "dry-run"
OVER = ("succeeded", "failed", "killed")
"""States that a job does not leave."""
POLL_S = 0.05
RELEASE_S = 3.0
"""How long, past the grace time, the end of agents on this machine is waited for. They need milliseconds, unless one
was killed: then its guard ends the tasks first."""


@dataclass(frozen=True)
class Prepared:
    """A job that is ready to run, and nothing of it has happened."""

    plan: Plan
    secrets: Secrets
    backend: Backend

    def rendered(self) -> Rendered:
        """Return what the backend would execute."""
        return self.backend.render(self.plan)


def prepare(
    job: Job,
    launcher: str,
    *,
    env: Mapping[str, str],
    hosts: Sequence[str] = (),
    store: JobStore,
    run_dir: Path | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Make the plan. For a dry run the id is a placeholder, there is no token and nothing is written.

    Raises:
        UsageError: anything that the user got wrong, before anything happened.
    """
    backend = backends.load(launcher)
    check_tuning(job.settings, env)
    if not backend.needs_hosts:
        _check_python(job, env)
    names = backend.hosts(hosts)
    slots = place(
        job.workers, job.servers, named(names), scheduler=job.has_servers, scheduler_host=job.scheduler_host
    )
    job_id = DRY_RUN_ID if dry_run else store.new_id(job.name)
    site = Site(
        job_id=job_id,
        backend=launcher,
        hosts=names,
        run_dir=os.path.abspath((run_dir or store.jobs) / job_id),
        runtime_root=str(ship.runtime_root(env, copy=not dry_run)),
        python=sys.executable,
        outer=env,
        addresses={} if job.interface or job.subnet else backend.addresses(names),
        token="" if dry_run else secrets.token_hex(32),
    )
    plan, values = make_plan(job, slots, site)
    check_ports(job, plan)
    return Prepared(plan, values, backend)


def launch(ready: Prepared, folder: JobFolder, sink: Sink, verbosity: int = 0) -> Outcome:
    """Run a prepared job to its end in this process."""
    channels = ready.backend.connect(ready.plan)
    try:
        return folder.explained(loop.run(ready.plan, ready.secrets, channels, folder, sink, verbosity=verbosity))
    finally:
        ready.backend.release(ready.plan, channels, ready.plan.limits.grace_s + RELEASE_S)


def kill(folder: JobFolder, grace_s: float | None = None, wait_s: float = 10.0) -> list[str]:
    """Stop a job, from any terminal of its machine; return what was done, a line each.

    Its launcher is asked (SIGTERM) and given the grace time and `wait_s`. Then what is left is found by what was
    recorded and by the job's mark, and ended. Never by name. A job that had lost its launcher is then `killed`.

    Raises:
        UsageError: the job was launched on another machine.
    """
    state = str(folder.state()["state"])
    if state in OVER:
        # Its end may have left something that would not die then.
        swept = backends.load(folder.plan().backend).sweep(folder.plan().job, grace_s or 0.0)
        return ["is over already: %s" % state, *(swept.lines() if swept.ended or swept.left else [])]
    plan, launcher = folder.plan(), folder.launcher()
    here = socket.gethostname()
    if launcher.get("host", here) != here:
        raise UsageError("job %s was launched on %s" % (folder.id, launcher["host"]), "type this command there")
    grace_s = plan.limits.grace_s if grace_s is None else grace_s
    done: list[str] = []
    who = process.Identity(int(launcher["pid"]), str(launcher["start"]))
    if process.is_alive(who):
        with contextlib.suppress(OSError):  # it is for a message only
            folder.ask_to_end()
        process.send_signal(who, signal.SIGTERM)
        done.append("asked its launcher (pid %d) to stop the job" % who.pid)
        if _wait_gone(who, grace_s + wait_s):
            done.append("the launcher has ended")
        else:
            process.send_signal(who, signal.SIGKILL)
            _wait_gone(who, wait_s)
            done.append("killed the launcher, which had not ended after %g s" % (grace_s + wait_s))
    else:
        done.append("its launcher (pid %d) is gone" % who.pid)
    swept = backends.load(plan.backend).sweep(plan.job, grace_s)
    try:
        folder.bury(swept.left)
    except OSError as err:
        done.append("its end could not be noted: %s" % err)
    return done + swept.lines()


def _check_python(job: Job, env: Mapping[str, str]) -> None:
    """Look for --python on this machine, where the servers will run."""
    if job.python and job.has_servers and job.ps == BUNDLED:
        folders = given(job.settings, SERVER).get("PATH")
        path = env.get("PATH", os.defpath) if folders is None else folders.value
        if shutil.which(job.python, path=path) is None:
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
