"""What an agent does between `begin` and `ready`, step by step, without ever waiting.

`steps` is a generator: it yields what it wants (a `Command` to be run, a runtime to be sent) and is sent what came of
it. The agent's loop does these things; a test does them by hand. A step's module is imported when the plan asks for it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Generator, NamedTuple, Union

from distrun_runtime.agent.share import Share

if TYPE_CHECKING:
    from distrun_runtime.agent.errand import Command


class Need(NamedTuple):
    """The runtime's archive is wanted; it is sent as bytes."""

    digest: str


Steps = Generator["Union[Command, Need]", Any, Share]


def steps(share: Share) -> Steps:
    """Make and check everything that the plan asks of this host; return the share with what was found.

    Raises:
        Refusal: the host cannot take its part.
        OSError: of the system, in a step that expected none.
    """
    plan = share.plan
    if plan.sync is not None or any(task.cwd for task in plan.tasks):
        from distrun_runtime.agent import places

        places.check(plan, share.host)
    if plan.runtime.path:
        share = dataclasses.replace(share, runtime=plan.runtime.path)
    elif plan.runtime.digest:
        from distrun_runtime.agent import cache

        folder = cache.find(plan.runtime.digest)
        if not folder:
            folder = cache.keep(plan.runtime.digest, (yield Need(plan.runtime.digest)), share.folder)
        share = dataclasses.replace(share, runtime=folder)
    if plan.activate:
        from distrun_runtime.agent import activation

        command = activation.command(plan.activate, share.base, share.marks, activation.folder(plan.cwd))
        share = dataclasses.replace(share, base=activation.environment((yield command), command, share.host))
    if any(task.needs for task in plan.tasks):
        from distrun_runtime.agent import interpreters

        found = {}
        for probe in interpreters.probes(share):
            found[probe.name] = interpreters.judge(probe, (yield probe.command), share.host)
        share = dataclasses.replace(share, python=found)
    return share
