"""Metrics, reports and stacks of the tasks on this host. A fault in any of them does not affect the job.

`HostMeasurement` drives `metrics.Metrics`, `metrics.Reports` and `stacks.StackReader` for the agent's loop. If one of
them raises an exception, the agent stops measuring for AGAIN_S and then starts again. After TRIES faults it stops for
good. The first fault is reported as a warning.
"""

from __future__ import annotations

import contextlib
import math
import selectors
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, NamedTuple, Optional

from distrun_runtime.agent.share import Share
from distrun_runtime.contract.facts import duration

if TYPE_CHECKING:
    from distrun_runtime.agent.metrics import Metrics, Reports
    from distrun_runtime.agent.procfs import Running
    from distrun_runtime.agent.stacks import Give, StackReader

AGAIN_S = 60.0
"""After a fault nothing is measured for so long."""
TRIES = 5
"""After so many faults nothing is measured any more."""


class Hooks(NamedTuple):
    """What measuring needs of the agent."""

    say: Callable[..., None]
    """Sends a frame to the coordinator: its type, and members by name."""
    takes_metrics: Callable[[], bool]
    """Returns whether the connection takes a frame `metrics` now."""
    task_of: Callable[[int], str]
    """Returns the task that a process belongs to by its environment; empty: none."""
    may_help: Callable[[], bool]
    """Returns whether a helper may be started."""


class HostMeasurement:
    """The numbers of one host.

    Arguments:
        tasks: those that were started here, by name.
        selector: the agent's.
        agent: the rest of it.
        clock: monotonic, seconds.
    """

    def __init__(
        self,
        tasks: Mapping[str, Running],
        selector: selectors.BaseSelector,
        agent: Hooks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tasks = tasks
        self._selector = selector
        self._agent = agent
        self._clock = clock
        self._share: Optional[Share] = None
        """None before the job has begun."""
        self._reports: Optional[Reports] = None
        """None before the job has begun."""
        self._stacks: Optional[StackReader] = None
        """None as long as no task has said anything of its stacks, and no client has asked for them."""
        self._metrics: Optional[Metrics] = None
        """None until the coordinator asks for samples."""
        self._interval_s = 0.0
        """The interval that the coordinator asked for; 0: no samples."""
        self._again_at: Optional[float] = None
        """After a fault: when it is tried again; infinite: never. None: nothing has failed."""
        self._faults = 0

    # What the loop calls

    @property
    def next_at(self) -> float:
        """When `tick` has something to do (monotonic clock); infinite: never."""
        if self._again_at is not None:
            return self._again_at
        parts = (self._metrics, self._reports, self._stacks)
        return min((each.next_at for each in parts if each is not None), default=math.inf)

    def listen(self, share: Share) -> None:
        """Be ready for what tasks report: the job has begun."""
        self._share = share
        self._shielded(lambda: self._listen(share))

    def open_socket(self, task: str) -> str:
        """Listen to a task that is about to start; return what it calls its socket by, empty if there is none."""
        if self._reports is not None:
            with contextlib.suppress(OSError):  # there is no way to name a socket: the task reports nothing
                return self._reports.open(task)
        return ""

    def set_interval(self, interval_s: float, now: float) -> None:
        """Sample each `interval_s` seconds from now on; 0: no more."""
        self._interval_s = interval_s
        if self._share is not None and self._again_at is None:
            self._shielded(lambda: self._set_interval(now))

    def ask_stack(self, task: str, give: Give) -> None:
        """Have the stacks of a task given, now or later."""
        from distrun_runtime.agent.stacks import StackAnswer

        if self._again_at is not None:
            fix = f"py-spy dump --pid PID, on the host of {task}"
            give(StackAnswer(task, error="the agent itself has failed to measure", fix=fix))
            return
        self._shielded(lambda: self._ask_stack(task, give))

    def reaped(self, pid: int, status: int) -> None:
        """Take note that a child of the agent that is no task has ended."""
        self._shielded(lambda: self._reaped(pid, status))

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._again_at is not None and now >= self._again_at:
            self._again_at = None
            self._shielded(lambda: self._set_interval(now))
        if self._again_at is None:
            self._shielded(lambda: self._tick(now))

    def stop(self) -> None:
        """Sample no more and end what was started for it: the job ends here. What tasks report is still taken."""
        for each in (self._metrics, self._stacks):
            if each is not None:
                each.close()

    def close(self) -> None:
        """Remove the tasks' sockets."""
        if self._reports is not None:
            self._reports.close()

    # What may fail

    def _shielded(self, act: Callable[[], None]) -> None:
        """Do something. After a fault begin anew later; the job goes on."""
        try:
            act()
        except Exception as err:
            self._faults += 1
            self._again_at = self._clock() + AGAIN_S if self._faults < TRIES else math.inf
            for each in (self._metrics, self._stacks):
                with contextlib.suppress(Exception):
                    if each is not None:
                        each.close()
            self._metrics = None  # stacks know what tasks have offered
            if self._faults == 1:
                again = f"it tries again after {duration(AGAIN_S)}, {TRIES - 1} times at most"
                text = f"the agent itself failed to measure: {type(err).__name__}: {err}; {again}"
                self._agent.say("warning", text=text)

    def _listen(self, share: Share) -> None:
        from distrun_runtime.agent.metrics import Reports  # `hello` and `ready` do not need it

        self._reports = Reports(share.folder, self._selector)
        self._reports.on_stacks = self._heard_of_stacks

    def _heard_of_stacks(self, task: str, told: Mapping[str, object]) -> None:
        self._shielded(lambda: self._made_stacks().heard(task, told))

    def _made_stacks(self) -> StackReader:
        from distrun_runtime.agent.stacks import StackReader  # only once a task has said something of them

        if self._stacks is None:
            assert self._share is not None
            self._stacks = StackReader(self._share.folder, self._tasks, self._selector)
        return self._stacks

    def _ask_stack(self, task: str, give: Give) -> None:
        if self._reports is not None:
            self._reports.drain()  # what a task has said before
        self._made_stacks().ask(task, give)

    def _set_interval(self, now: float) -> None:
        if self._metrics is None:
            if not self._interval_s > 0:
                return
            from distrun_runtime.agent import metrics  # not before the tasks have started, as a rule

            share = self._share
            assert share is not None
            self._metrics = metrics.Metrics(
                lambda: metrics.helper_of(share, self._selector),
                self._agent.task_of,
                self._agent.may_help,
                self._say_metrics,
            )
        self._metrics.set_interval(self._interval_s, now)

    def _say_metrics(self, frame: Dict[str, Any]) -> None:
        self._agent.say("metrics", **frame)

    def _tick(self, now: float) -> None:
        if self._metrics is not None and now >= self._metrics.next_at:
            self._sample(self._metrics, now)  # it takes the reports, too
        if self._reports is not None and now >= self._reports.next_at:
            self._reports.tick(now)
        if self._stacks is not None and now >= self._stacks.next_at:
            self._stacks.tick(now)

    def _sample(self, metrics: Metrics, now: float) -> None:
        """Say how things are here, unless the connection takes nothing now: the next sample says it."""
        if not self._agent.takes_metrics():
            metrics.skip(now)
            return
        if self._reports is None:
            metrics.sample(self._tasks, {}, {}, now)
            return
        self._reports.fetch(now)
        metrics.sample(self._tasks, self._reports.last, self._reports.sizes, now)

    def _reaped(self, pid: int, status: int) -> None:
        if self._metrics is not None:
            self._metrics.reaped(pid)
        if self._stacks is not None:
            self._stacks.reaped(pid, status)
