"""Serves one host of a job over standard input and output: `python -m distrun_runtime.agent`, or from a blob."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from distrun_runtime.agent.guard import Start


def main(first: bytes = b"", idle: Callable[[], None] = lambda: None) -> int:
    """Serve; return the exit code. `first`: bytes of the channel that were read ahead. `idle`: see `guard.serve`."""
    from distrun_runtime.agent import guard

    return guard.serve(run_agent, first, idle)


def run_agent(start: Start) -> int:
    """Run the agent in its process, once it has said hello; return its exit code."""
    from distrun_runtime.agent.agent import Agent  # after the hello: the coordinator need not wait for this

    return Agent(start).run(start.first)


if __name__ == "__main__":
    sys.exit(main())
