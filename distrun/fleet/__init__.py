"""Many hosts at once, without a job: ask their agents, or run one command on all of them (`fleet.commands`).

Each host gives a value or a `Problem`; one that cannot be used stops no other. Every wait has a deadline, and when it
is over, agents are ended and channels closed.
"""

from __future__ import annotations

from distrun.fleet.questions import Fleet, HostAnswer
from distrun_runtime.coordinator.failures import Problem

__all__ = ["Fleet", "HostAnswer", "Problem"]
