"""`--wait-for-hosts`: waits until the hosts of a launch are up, before anything of the job is made.

They are asked by `distrun status -H`, in a process of its own: what asks hosts has threads, and a launch forks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distrun.cli.common import typed
from distrun.errors import PreflightError
from distrun.hosts import Inventory
from distrun.hosts.parse import FILES
from distrun.hosts.ranges import fold
from distrun.options import HOSTS
from distrun_runtime.contract.facts import duration

RETRY_S = 5.0
"""Between two looks."""
LOOK_S = 120.0
"""How long one look may take, beyond what is left of the time."""
DOWN = ("dns", "refused", "timeout", "unreachable", "busy")
"""Kinds of problems that a host has which is not up yet. Others are the launch's to report."""


def question(options: Mapping[str, Any], found: Inventory, env: Mapping[str, str]) -> list[str]:
    """Return the command that asks the hosts of a launch. No side effects.

    Arguments:
        options: those of the launch, by key.
        found: its hosts.
        env: its environment, which may name a hosts file.
    """
    if options["hostfile"] is None and options["hosts"] is None:
        file = next((env[name] for name in FILES if env.get(name)), None)
        options = {**options, "hostfile": file, "hosts": None if file else fold(list(found.names))}
    return [sys.executable, "-m", "distrun", "status", "--json", *typed(options, found, HOSTS)]


def wait(used: Sequence[str], argv: Sequence[str], limit_s: float, say: Callable[[str], None]) -> None:
    """Return when none of the hosts `used` is down any more; say which are. `argv`: asks them (`question`).

    Raises:
        PreflightError: some are down after `limit_s` seconds.
    """
    until, told = time.monotonic() + limit_s, ""
    while True:
        down = _down(argv, max(0.0, until - time.monotonic()) + LOOK_S, used)
        if not down:
            return
        names, why = fold(list(down)), next(iter(down.values()))
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise PreflightError(
                f"--wait-for-hosts: not up after {duration(limit_s)}: {names} ({why})",
                "distrun doctor with the same hosts says more",
            )
        if names != told:
            told = names
            say(f"waiting for {names}: {why}")
        time.sleep(min(RETRY_S, left_s))


def _down(argv: Sequence[str], limit_s: float, used: Sequence[str]) -> dict[str, str]:
    """Return the hosts that are down, and why; none if they cannot be asked at all, which the launch reports."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False)
        rows = json.loads(done.stdout)["hosts"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired):
        return {}
    problems = {row["host"]: row["problem"] for row in rows if row["problem"]}
    return {host: each["text"] for host, each in problems.items() if host in used and each["kind"] in DOWN}
