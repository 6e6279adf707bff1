"""Facts that a task tells its agent: one JSON object a line on the descriptor DISTRUN_PUBLISH_FD."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from distrun_runtime.contract import environ


def publish(facts: Mapping[str, str]) -> None:
    """Tell the agent `facts`; without an agent, do nothing.

    A line is far below PIPE_BUF, so lines of several threads do not mix (POSIX write(2)).
    """
    descriptor = environ.read("DISTRUN_PUBLISH_FD")
    if descriptor is None or not facts:
        return
    line = json.dumps({name: value[:1000] for name, value in facts.items()}) + "\n"
    try:
        os.write(descriptor, line.encode())
    except OSError:
        # The agent is gone; it is about to end us, or we run without it.
        return
