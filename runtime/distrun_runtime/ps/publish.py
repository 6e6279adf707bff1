"""Facts that a task tells its agent: one JSON object a line on the descriptor DISTRUN_PUBLISH_FD."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping

from distrun_runtime.contract import environ


def publish(facts: Mapping[str, str]) -> None:
    """Tell the agent `facts`; without an agent, do nothing.

    A line is shorter than PIPE_BUF (4096 on Linux), so lines of several threads do not mix (POSIX write(2)).
    """
    descriptor = environ.read("DISTRUN_PUBLISH_FD")
    if descriptor is None or not facts:
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
