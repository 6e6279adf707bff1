"""What both sides of a job have to know alike: exit codes, states, and how long is waited. Each is said here once.

The table of exit codes for users is in docs/overview.md, "Deaths and exit codes".
"""

from __future__ import annotations

import signal as signals
from typing import Optional

# Exit codes of distrun. Tasks have their own: the first one that fails gives the job its code.

EXIT_LEFT = 1
"""Processes are left that were to be ended."""
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
"""A host cannot be used."""
EXIT_SYNC = 4
EXIT_SUBMIT = 5
EXIT_START_FAILED = 6
EXIT_HOST_LOST = 7
EXIT_INTERNAL = 8
EXIT_TIMEOUT = 124
EXIT_INTERRUPTED = 128 + int(signals.SIGINT)
EXIT_TERMINATED = 128 + int(signals.SIGTERM)


def exit_code(code: Optional[int], signal: Optional[str]) -> int:
    """Return what a shell would: the code, or 128 + the number of the signal `signal` (1 if it is unknown here)."""
    if signal is None:
        return 0 if code is None else code
    name = signal if signal.startswith("SIG") else "SIG" + signal
    try:
        return 128 + signals.Signals[name].value
    except KeyError:
        return 128 + int(signal) if signal.isdigit() else 1


# Why a job ended.

SUCCEEDED = "succeeded"
TASK_FAILED = "task_failed"
INTERRUPTED = "interrupted"
TERMINATED = "terminated"
TIMEOUT = "timeout"
START_FAILED = "start_failed"
HOST_LOST = "host_lost"
PREFLIGHT = "preflight"
SYNC = "sync"
INTERNAL = "internal"
REASONS = (
    SUCCEEDED,
    TASK_FAILED,
    INTERRUPTED,
    TERMINATED,
    TIMEOUT,
    START_FAILED,
    HOST_LOST,
    PREFLIGHT,
    SYNC,
    INTERNAL,
)

# States of tasks and jobs.

PENDING = "pending"
STARTING = "starting"
RUNNING = "running"
EXITED = "exited"
FAILED = "failed"
STOPPED = "stopped"
TASK_STATES = (PENDING, STARTING, RUNNING, EXITED, FAILED, STOPPED)
"""exited: by itself with 0. failed: by itself otherwise, or its host was lost. stopped: we ended it."""

STOPPING = "stopping"
KILLED = "killed"
LOST = "lost"
JOB_STATES = (STARTING, RUNNING, STOPPING, SUCCEEDED, FAILED, KILLED, LOST)
"""killed: interrupted or terminated. lost: the launcher died and nobody finished the job."""
UNKNOWN = "unknown"
"""In place of the state of a job that another machine runs, and that has told nothing for UNKNOWN_S."""
LIVE = (STARTING, RUNNING, STOPPING)
"""States of a job that goes on."""
GOING = (*LIVE, UNKNOWN)
"""What is said of a job that goes on, as far as is known."""
OVER = (SUCCEEDED, FAILED, KILLED)
"""States of a job that has an outcome."""
DAMAGED = "damaged"
"""In place of the state of a job whose files cannot be read."""

# How long is waited, in seconds, unless the user says otherwise (`plan.Limits`).

GRACE_S = 10.0
START_S = 120.0
SUSPECT_S = 15.0
LOST_S = 30.0
LEASE_S = 45.0
"""Longer than LOST_S: a host is given up before its agent ends what it runs."""
UNKNOWN_S = 30.0
"""After so long without a word of a job, another machine that shares its folder does not know whether it runs."""
GIVE_UP_S = 3.0
"""What still exists so long after the first KILL (uninterruptible, or another user's) is reported and left."""
