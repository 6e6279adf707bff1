"""The life of a store: whose it is, when it may be used, what went wrong meanwhile, how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Type

from distrun_runtime.errors import StoreClosed
from distrun_runtime.store.hooks import Hooks
from distrun_runtime.store.pending import Late, Line, Pending

Joiner = Callable[[Callable[[], None]], None]
"""joiner(join): makes a worker join, where that takes more than the store's own `join`."""


class Lifetime(Hooks):
    """A store's name, membership and end, and the calls that are under way."""

    def __init__(self, type_name: str) -> None:
        self._type = type_name
        self._registry = threading.Lock()
        """Guards what a store knows of its keys and whether it has ended."""
        self._pid = os.getpid()
        self._ended = ""
        self._late = Late()
        """What went wrong with calls that nobody has waited for."""
        self._line = Line("distrun-%s-calls" % type_name)
        """Runs calls that wait for all workers, where the caller does not."""
        self._joiner: Joiner | None = None

    @property
    def type(self) -> str:
        """The name that the store was created with, in lower case."""
        return self._type

    def barrier(self, *, wait: bool = True) -> Pending:
        """Wait until all workers have called it; what this worker pushed has reached the servers before.

        With wait=False the Pending is done then. Calls that all workers make together are finished first.
        """
        self._ready()
        self._line.finish()
        return self._awaited(self._barrier(), wait)

    def join(self) -> None:
        """Contribute nothing to all later rounds; return when all workers have joined. For a worker out of data.

        The store of an open trainer does what `Trainer.join` does: its weights are those of all workers afterwards.
        """
        self._ready()
        self._line.finish()
        if self._joiner is None:
            self._join()
        else:
            self._joiner(self._join)

    def joins_by(self, joiner: Joiner | None) -> None:
        """Have `join` made by whoever keeps weights in this store, a trainer; None: by the store alone."""
        self._joiner = joiner

    def leave(self) -> None:
        """End this worker's membership: the others go on without it. Only `close` may follow."""
        self._ready()
        self._line.finish()
        self._leave()
        self._ended = self._ended or "was left"

    def close(self) -> None:
        """Finish what is under way and give everything back. A second close does nothing.

        Raises:
            RuntimeFault: what went wrong with a call that nobody waited for. The store is closed all the same.
        """
        self._own_process()
        # Before it counts as closed: what was begun may need the store as it is.
        self._line.finish()
        if self._end():
            self._close()
            self._late.raise_first()

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; after an error, tell the other workers and wait for nothing. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._end():
            self._abort(error)

    def give_up(self, error: BaseException) -> None:
        """Close a store that cannot be used, because of `error`; the process stays in the job.

        The next call that all workers make together raises the error on the others. Then all may make another store.
        """
        if os.getpid() == self._pid and self._end():
            self._give_up(error)

    def _awaited(self, pending: Pending, wait: bool) -> Pending:
        if wait:
            try:
                pending.wait()
            except BaseException:
                if not pending.is_done:
                    pending.left_waiting()
                raise
        return pending

    def _ready(self) -> None:
        """Return if the store can be used.

        Raises:
            StoreClosed: closed, left, or inherited by a forked child.
            RuntimeFault: what went wrong with an earlier call that nobody waited for.
        """
        self._alive()
        self._late.raise_first()

    def _alive(self) -> None:
        self._own_process()
        if self._ended:
            raise StoreClosed(
                "the %r store %s; create another one with kvstore.create(%r)" % (self._type, self._ended, self._type)
            )

    def _own_process(self) -> None:
        if os.getpid() != self._pid:
            raise StoreClosed(
                "the %r store belongs to process %d, this is its forked child %d: use it in the parent, or start"
                " children with the 'spawn' method and create a store there" % (self._type, self._pid, os.getpid())
            )

    def _end(self) -> bool:
        """Mark the store as closed; tell whether it was not before."""
        with self._registry:
            before, self._ended = self._ended, "was closed"
        return before != self._ended
