"""Serves one host of a job over standard input and output: `python -m distrun_runtime.agent`, or from a blob."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Callable, Optional

if TYPE_CHECKING:
    from distrun_runtime.agent.channel import Channel, MakeReconnector
    from distrun_runtime.agent.guard import GuardLink, Wakeup
    from distrun_runtime.contract.process import Identity


def main(first: bytes = b"", idle: Callable[[], None] = lambda: None) -> int:
    """Serve; return the exit code. `first`: bytes of the channel that were read ahead. `idle`: see `guard.serve`."""
    from distrun_runtime.agent import guard

    return guard.serve(run_agent, first, idle)


def run_agent(
    channel: Channel,
    guard: GuardLink,
    me: Identity,
    wakeup: Wakeup,
    *,
    is_subreaper: bool,
    make_reconnector: Optional[MakeReconnector],
    first: bytes,
) -> int:
    """Run the agent in its process, once it has said hello; return its exit code."""
    from distrun_runtime.agent.agent import Agent  # after the hello: the coordinator need not wait for this

    return Agent(channel, guard, me, wakeup, is_subreaper, make_reconnector=make_reconnector).run(first)


if __name__ == "__main__":
    sys.exit(main())
