"""What an agent does between `begin` and `ready`, and for `settle`, step by step, without ever waiting.

What `--activate` names, and interpreters, may be among the files that are copied to the host. Then they are seen to
after the copy: that is `settle`. Otherwise they are seen to before it, so that nothing is copied in vain.

`steps` and `settle` are generators: each yields what it wants (a `Command` to be run, a runtime to be sent) and is sent
what came of it. `Opening` does these things for the agent's loop. A step's module is imported when the plan asks for
it.
"""

from __future__ import annotations

import dataclasses
import math
import os
import selectors
from typing import TYPE_CHECKING, Any, Callable, Generator, NamedTuple, Optional, Union

from distrun_runtime.agent.share import Share
from distrun_runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from distrun_runtime.agent.errand import Command, Done, Errand


class Need(NamedTuple):
    """The runtime's archive is wanted; it is sent as bytes."""

    digest: str


Steps = Generator["Union[Command, Need]", Any, Share]


def steps(share: Share) -> Steps:
    """Make and check what the plan asks of this host before files are copied; return the share with what was found.

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
    return share if _may_be_copied(share) else (yield from _environment(share))


def settle(share: Share) -> Steps:
    """Activate and check what may have come with the files. Returns and raises as `steps`."""
    plan = share.plan
    if plan.sync is not None:
        from distrun_runtime.agent import places

        places.check_copied(plan, share.host)
    return share if share.has_environment else (yield from _environment(share))


def _may_be_copied(share: Share) -> bool:
    """Return whether the environment of tasks, or an interpreter with its modules, may come with the files."""
    plan = share.plan
    if plan.sync is None or not (plan.activate or any(task.needs for task in plan.tasks)):
        return False
    if plan.sync.brings:
        return True
    from distrun_runtime.agent import places

    found = [path for path in plan.sync.activated if places.is_copied(path, plan)]
    for task in plan.tasks:
        if task.needs:
            env = share.environment(task, task.env)
            lists = [env.get(name, b"").split(b":") for name in (b"PATH", b"PYTHONPATH")]
            named = [os.fsdecode(path) for paths in lists for path in paths if path]
            named += [task.argv[0]] if "/" in task.argv[0] else []
            found += [path for path in named if places.is_copied(path, plan)]
    return bool(found)


def _environment(share: Share) -> Steps:
    plan = share.plan
    if plan.activate:
        from distrun_runtime.agent import activation

        command = activation.command(plan.activate, share.base, share.marks, activation.folder(share.cwd))
        share = dataclasses.replace(share, base=activation.environment((yield command), command, share.host))
    if any(task.needs for task in plan.tasks):
        from distrun_runtime.agent import interpreters

        share = yield from interpreters.chosen(share)
    return dataclasses.replace(share, has_environment=True)


class Opening:
    """The steps of one agent, to `ready` or to `settled`, and the errand that the present one waits for."""

    def __init__(
        self,
        todo: Steps,
        selector: selectors.BaseSelector,
        *,
        ask_for: Callable[[str], None],
        on_done: Callable[[Share], None],
        on_refused: Callable[[Exception], None],
    ) -> None:
        """`ask_for` is given the digest of a runtime; one of the others is called at the end, and nothing after it."""
        self._steps: Optional[Steps] = todo
        self._selector = selector
        self._ask_for = ask_for
        self._on_over = on_done
        self._on_refused = on_refused
        self._errand: Optional[Errand] = None
        self._needed = ""

    @property
    def is_over(self) -> bool:
        """Whether it came to an end, this way or that."""
        return self._steps is None

    @property
    def deadline(self) -> float:
        """When `expire` is to be called; infinite: no errand is under way."""
        return self._errand.deadline if self._errand is not None else math.inf

    def go_on(self, what: Any = None) -> None:
        """Take the next step, given what came of the last one."""
        if self._steps is None:
            return
        try:
            wanted = self._steps.send(what)
        except StopIteration as end:
            self._steps = None
            self._on_over(end.value)
        except (RuntimeFault, OSError) as err:
            self._steps = None
            self._on_refused(err)
        else:
            if isinstance(wanted, Need):
                self._needed = wanted.digest
                self._ask_for(wanted.digest)
            else:
                from distrun_runtime.agent.errand import Errand

                self._errand = Errand(wanted, self._selector, self._on_done)
                self._errand.start()

    def take_runtime(self, digest: str, archive: bytes) -> bool:
        """Take the archive that was asked for; return False if none was, or another."""
        if self._steps is None or not self._needed or digest != self._needed:
            return False
        self._needed = ""
        self.go_on(archive)
        return True

    def reaped(self, pid: int, status: int) -> None:
        """Take note of the end of a child, if it was the errand's."""
        if self._errand is not None:
            self._errand.reaped(pid, status)

    def expire(self) -> None:
        """The errand's time is over."""
        if self._errand is not None:
            self._errand.expire()

    def cancel(self) -> None:
        """Take no further step; the errand is killed."""
        self._steps = None
        if self._errand is not None:
            self._errand.cancel()
            self._errand = None

    def _on_done(self, done: Done) -> None:
        self._errand = None
        self.go_on(done)
