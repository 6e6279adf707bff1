"""Overlap: a trainer's gradients are sent while backward still computes others.

Parameters are sent in groups, the last ones first, as backward comes to them. A group is sent when all of its gradients
are there, by the thread that backward has brought the last one of; on GPUs it waits for the streams of the others
(`Parameter.follow`). Its answers are taken in by `Trainer.step`, so that no weight changes before. The group that comes
last, of the first parameters, is left to `step`, which follows.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from distrun_runtime.errors import KVError
from distrun_runtime.trainer.exchange import Gradients, Sent
from distrun_runtime.trainer.parameters import Parameter

__all__ = ["Overlap"]

GROUP_BYTES = 16 * 1024 * 1024
"""A group has parameters of at least so many bytes, but for the last one. A call costs as much as copying some MB."""


class Overlap:
    """Sends the gradients of a step before `step` is called.

    Arguments:
        params: all parameters of the trainer.
        begins: called when the first gradients of a step could be sent; returns whether they may be. If not, `step`
            sends all of them.
        send: sends the gradients of some parameters.

    Threads: any; one at a time sends.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        begins: Callable[[], bool],
        send: Callable[[Sent, Sequence[Gradients]], None],
    ) -> None:
        self._params = params
        self._begins = begins
        self._send = send
        self._lock = threading.Lock()
        """Guards what follows."""
        self._sent = Sent()
        """What was sent of the present step."""
        self._may_send: bool | None = None
        """What `begins` has said in this step; None: it was not asked yet."""
        self._told: Counter[int] = Counter()
        """How many devices of each parameter have a gradient in this step."""
        watched = [index for index, one in enumerate(params) if one.stype == "default" and one.trains and one.tells]
        self._groups = _groups(params, watched)
        self._group_of = {index: number for number, group in enumerate(self._groups) for index in group}
        self._stop = [params[index].watch(self._watcher(index)) for index in watched]

    @property
    def has_begun(self) -> bool:
        """Whether gradients came that no step has used yet."""
        return bool(self._told)

    def take(self) -> Sent:
        """Return what was sent of the step that is being made; what comes next belongs to the next one."""
        with self._lock:
            sent, self._sent, self._may_send = self._sent, Sent(), None
            self._told.clear()
        return sent

    def stop(self) -> None:
        """Send nothing more."""
        for stop in self._stop:
            stop()

    def _watcher(self, index: int) -> Callable[[], None]:
        return lambda: self._came(index)

    def _came(self, index: int) -> None:
        """A device of a parameter has a new gradient."""
        with self._lock:
            self._told[index] += 1
            if self._told[index] > self._devices(index):
                raise KVError(
                    "parameter %r got another gradient before step: with overlap=True its first one may be on its way;"
                    " to add up the gradients of several backwards, make the trainer with overlap=False"
                    % self._params[index].name
                )
            number = self._group_of[index]
            group = self._groups[number]
            if number == len(self._groups) - 1 or any(self._told[each] < self._devices(each) for each in group):
                return
            if self._may_send is None:
                self._may_send = self._begins()
            if self._may_send:
                for each in group:
                    self._params[each].follow()
                self._send(self._sent, [(each, self._params[each].gradients()) for each in group])

    def _devices(self, index: int) -> int:
        return len(self._params[index].replicas)


def _groups(params: Sequence[Parameter], indices: Sequence[int]) -> list[list[int]]:
    """Return parameters in groups of some size, beginning from the last one; in a group in their order."""
    groups: list[list[int]] = []
    size = GROUP_BYTES
    for index in reversed(indices):
        if size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].insert(0, index)
        size += params[index].size_bytes
    return groups
