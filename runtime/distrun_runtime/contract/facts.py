"""Exit codes, roles, states, and the time limits that several parts of a job share. Each of these is defined here only.

The table of exit codes for users is in docs/overview.md, "Deaths and exit codes".
"""

from __future__ import annotations

import os
import signal as signals
import time
from typing import Optional, Sequence

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
EXIT_OUTPUT = 9
"""Output cannot be written."""
EXIT_TIMEOUT = 124
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127
"""A task's command cannot be executed, or was not found: as shells say it."""
SIGNAL_BASE = 128
"""A shell's exit code of what a signal ended is this and the signal's number."""
EXIT_INTERRUPTED = SIGNAL_BASE + int(signals.SIGINT)
EXIT_TERMINATED = SIGNAL_BASE + int(signals.SIGTERM)


def exit_code(code: Optional[int], signal: Optional[str]) -> int:
    """Return what a shell would: the code, or 128 + the number of the signal `signal` (1 if it is unknown here)."""
    if signal is None:
        return 0 if code is None else code
    name = signal if signal.startswith("SIG") else "SIG" + signal
    try:
        return SIGNAL_BASE + signals.Signals[name].value
    except KeyError:
        return SIGNAL_BASE + int(signal) if signal.isdigit() else 1


def exit_code_of(status: int) -> int:
    """Return a wait status as a shell's exit code: 128 + number for a signal."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else SIGNAL_BASE + os.WTERMSIG(status)


REMOVED = ".removed-"
"""Begins the name of a job's folder that is being removed: no list of jobs shows it."""


# Roles of tasks.

SCHEDULER = "scheduler"
SERVER = "server"
WORKER = "worker"
ROLES = (SCHEDULER, SERVER, WORKER)
HELPER = "helper"
"""No task: the process in which an agent reads what would hold it up. It is marked like tasks."""


def task_name(role: str, rank: object) -> str:
    """Return what a task is called: `worker-1`, or `scheduler`, of which there is one; empty without role or rank.

    An agent's helper process is called `helper`.
    """
    if role == HELPER:
        return role
    if not role or rank == "":
        return ""
    return role if role == SCHEDULER else f"{role}-{rank}"


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
SUBMIT = "submit"
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
    SUBMIT,
    INTERNAL,
)

# Kinds of what a host lacks for the command that was typed.

PROGRAM = "program"
"""There is no such program."""
SCRIPT = "script"
"""Its script is not there."""
IMPORT = "import"
"""Its Python has not all modules that its script imports."""

# States of tasks and jobs.

PENDING = "pending"
STARTING = "starting"
RUNNING = "running"
EXITED = "exited"
FAILED = "failed"
STOPPED = "stopped"
TASK_STATES = (PENDING, STARTING, RUNNING, EXITED, FAILED, STOPPED)
"""exited: by itself with 0. failed: by itself otherwise, or its host was lost. stopped: we ended it."""

# Conditions of a task that runs. They are no states: they come and go, and change nothing of how the job ends.

WAITING = "waiting"
"""A worker waits for others in the store."""
STALLED = "stalled"
"""A worker has shown no sign of life for STALL_AFTER_S."""
STRAGGLER = "straggler"
"""A worker comes last in most rounds, by far."""
CONDITIONS = (WAITING, STALLED, STRAGGLER)

SUBMITTING = "submitting"
QUEUED = "queued"
STOPPING = "stopping"
KILLED = "killed"
LOST = "lost"
JOB_STATES = (SUBMITTING, QUEUED, STARTING, RUNNING, STOPPING, SUCCEEDED, FAILED, KILLED, LOST)
"""submitting, queued: it has no allocation yet, so no limit of time runs. killed: interrupted or terminated. lost: the
coordinator died and the job was not finished."""
UNKNOWN = "unknown"
"""In place of the state of a live job that another host of a shared home runs, and has not updated for UNKNOWN_S."""
LIVE = (SUBMITTING, QUEUED, STARTING, RUNNING, STOPPING)
"""States of a job that goes on."""
GOING = (*LIVE, UNKNOWN)
"""What is said of a job that goes on, as far as is known."""
OVER = (SUCCEEDED, FAILED, KILLED)
"""States of a job that has an outcome."""
DAMAGED = "damaged"
"""In place of the state of a job whose files cannot be read."""

# States of an agent or guard that a survey of a host finds.

AGENT_ALIVE = "alive"
AGENT_DEAD = "dead"
AGENT_STOPPED = "stopped"
"""Frozen by a signal."""
AGENT_NONE = "none"
"""Nothing tells of it."""

# How long is waited, in seconds, unless the user says otherwise (`plan.Limits`).

GRACE_S = 10.0
START_S = 120.0
EARLIER_FAILURE_S = 1.0
"""After a failure: reports of an earlier one may still arrive."""
EARLY_EXIT_S = 10.0
"""Workers may take so long to end after a server or scheduler ended with 0."""
SUSPECT_S = 15.0
LOST_S = 30.0
LEASE_S = 45.0
"""Longer than LOST_S: a host is given up before its agent ends what it runs."""
UNKNOWN_S = 30.0
"""After so long without a word of a job, another machine that shares its folder does not know whether it runs."""
LEASE_FACTOR = 1.5
"""The lease is so many times the time after which a host is lost: by then the host has been given up."""
GIVE_UP_S = 3.0
"""What still exists so long after the first KILL (uninterruptible, or another user's) is reported and left."""

STALL_AFTER_S = 300.0
"""A worker without a sign of life for so long is said to be stalled."""

LOOPBACK = "127.0.0.1"
"""Where the coordinator answers Prometheus, unless the user says otherwise."""

# How much is sent.

CHANNEL_COPY_LIMIT = 1024 * 1024 * 1024
"""Bytes of a job's files that go over its agents' channels; more is refused before anything is submitted."""


# Times as a person reads them: durations such as `1 h 30 min`, and the time of day.


_DAYS_FROM = 48 * 3600
"""Shorter durations are told in hours: a day is 24 h."""


def duration(seconds: float) -> str:
    """Return a duration: `0.5 s`, `45 s`, `2 min`, `1 h 30 min`, `3 d`. From a minute on, to the nearest second."""
    if seconds < 60:
        return f"{round(seconds, 3 if seconds < 1 else 2 if seconds < 10 else 1):g} s"
    left = round(seconds)
    units = [("d", 86400)] if left >= _DAYS_FROM else []
    words = []
    for name, size in [*units, ("h", 3600), ("min", 60), ("s", 1)]:
        count, left = divmod(left, size)
        if count:
            words.append(f"{count} {name}")
    return " ".join(words)


def time_of_day(when: float) -> str:
    """Return the local time of day of a wall clock's seconds, with milliseconds: `14:30:25.299`."""
    # Cut, not rounded: 59.9996 s must not become 60.000.
    return f"{time.strftime('%H:%M:%S', time.localtime(when))}.{int(when % 1 * 1000):03d}"


# Texts as a person reads them.


def printable(text: str) -> str:
    """Return a text with ? for what would change a terminal, line ends among it."""
    return text if text.isprintable() else "".join(each if each.isprintable() else "?" for each in text)


def listed(names: Sequence[str], most: int) -> str:
    """Return names with commas between them, and of more than `most` how many are left out: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
