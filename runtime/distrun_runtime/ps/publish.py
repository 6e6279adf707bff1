"""Facts that a task tells its agent: one JSON object a line on the descriptor DISTRUN_PUBLISH_FD.

A program that a task starts often has the task's environment, but not its descriptors. There the number may be that of
any other file. So DISTRUN_PUBLISH_PIPE says which pipe it has to be.
"""

from __future__ import annotations

import json
import os
import select
import stat
from collections.abc import Mapping

from distrun_runtime.contract import environ, process


def publish(facts: Mapping[str, str]) -> None:
    """Tell the agent `facts`; without an agent, or without the agent's pipe, do nothing.

    A line is shorter than PIPE_BUF (4096 on Linux), so lines of several threads do not mix (POSIX write(2)).
    """
    descriptor = environ.read("DISTRUN_PUBLISH_FD")
    if descriptor is None or not facts or not _is_agents(descriptor):
        return
    line = b""
    for limit in (1000, 200, 50):  # characters of a value; one may need twelve bytes
        line = (json.dumps({name: value[:limit] for name, value in facts.items()}) + "\n").encode()
        if len(line) <= select.PIPE_BUF:
            break
    try:
        os.write(descriptor, line)
    except OSError:
        # The agent is gone; it is about to end us, or we run without it.
        return


def _is_agents(descriptor: int) -> bool:
    """Return whether a descriptor is the agent's pipe, as far as the environment tells."""
    named = environ.text("DISTRUN_PUBLISH_PIPE")
    try:
        return process.pipe_identity(descriptor) == named if named else stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False
