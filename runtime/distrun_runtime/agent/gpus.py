"""The GPUs of this agent's place: asks the driver, and decides which of them the tasks may see.

The driver may hang, so it is asked in a process of its own (`hardware.py`), once, before the first task; and only if
the plan gives tasks some of the GPUs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, Dict, Generator, Mapping

from distrun_runtime.agent.commands import FD, SCRIPT, TIMED_OUT, Command, CommandResult
from distrun_runtime.agent.helper import source
from distrun_runtime.contract import environ, gpus
from distrun_runtime.contract.plan import WORKER
from distrun_runtime.errors import PreflightFailure

if TYPE_CHECKING:
    from distrun_runtime.agent.share import Share

LIMIT_S = 25.0
"""How long the driver may take: its library, or two calls of nvidia-smi."""


def looked(share: Share) -> Generator[Command, CommandResult, Share]:
    """Ask the driver; return the share with what it tells, and with the GPUs that tasks may see.

    Raises:
        PreflightFailure: kind gpus: the host has not what the hosts file says, or too few for its workers.
    """
    return chosen(share._replace(devices=told((yield command(share.marks)))))


def command(marks: Mapping[str, str]) -> Command:
    """Return the command that asks the driver; `told` reads its result. `marks`: variables that identify it."""
    env = environ.snapshot_bytes()
    env.update((os.fsencode(name), os.fsencode(value)) for name, value in {**marks, "LC_ALL": "C"}.items())
    argv = (os.fsencode(sys.executable), b"-I", b"-S", b"/dev/fd/" + SCRIPT, b"devices", FD)
    return Command(argv, env, b"/", LIMIT_S, source().encode())


def told(done: CommandResult) -> gpus.Found:
    """Return what the driver tells."""
    if done.code == 0:
        try:
            return gpus.found_of(json.loads(done.result.decode("utf-8", "replace")))
        except ValueError:
            pass
    how = f"did not answer within {LIMIT_S:g} s" if done.fault == TIMED_OUT else "cannot be asked"
    return gpus.Found(error=f"NVIDIA's driver {how}")


def chosen(share: Share) -> Share:
    """Return the share with the GPUs that tasks may see, in the environment they will start from. No side effects.

    Raises:
        PreflightFailure: as `looked`.
    """
    plan, found = share.plan, share.devices
    if found is None:
        return share
    base = share.base.get(os.fsencode(gpus.VISIBLE))
    inherited = None if base is None else os.fsdecode(base)
    host = next(each for each in plan.hosts if each.name == share.host)
    try:
        seen = gpus.view(host.gpus, inherited, found, host.name, host.named)
        workers = sum(task.role == WORKER and task.gpus is not None for task in plan.tasks)
        if plan.gpus_per_worker and workers:
            _check_known(seen, found, host.name)
            gpus.check_room(host.name, workers, plan.gpus_per_worker, seen)
    except gpus.Unfit as err:
        raise PreflightFailure(gpus.KIND, str(err), err.fix) from None
    return share._replace(sees=seen)


def _check_known(seen: gpus.View, found: gpus.Found, host: str) -> None:
    """Raises Unfit: nobody knows how many GPUs there are."""
    if not seen.source:
        why = found.error or gpus.NO_DRIVER
        raise gpus.Unfit(
            f"nobody says how many GPUs {host} has: {why}",
            "leave --gpus-per-worker out, or name them: gpus= in the hosts file, or CUDA_VISIBLE_DEVICES there",
        )


def report(share: Share) -> Dict[str, Any]:
    """Return what `ready` says of the GPUs; nothing if no task gets any."""
    found, seen = share.devices, share.sees
    if found is None or seen is None:
        return {}
    told = {"how": found.how, "driver": found.driver, "kinds": found.kinds, "error": found.error}
    return {**told, "visible": list(seen.names)}
