"""The weights, buffers and states of a trainer beside its steps: read, replaced, saved and loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Type, Union, cast

import numpy as np

from distrun_runtime.errors import KVError, StoreClosed
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.sparse import row_numbers
from distrun_runtime.trainer import states
from distrun_runtime.trainer.agreement import Agreement
from distrun_runtime.trainer.buffers import Buffers
from distrun_runtime.trainer.changes import STORE_HARM, Changed, Changes, alone, chosen, is_skip
from distrun_runtime.trainer.exchange import Exchange
from distrun_runtime.trainer.naming import naming
from distrun_runtime.trainer.opening import Opened, leave
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.settings import Settings
from distrun_runtime.trainer.updates import Updates

__all__ = ["Keeping"]

Path = Union[str, "os.PathLike[str]"]


class Keeping(Settings):
    """The part of a trainer that is about what it keeps."""

    def __init__(
        self, params: list[Parameter], buffers: Buffers, spec: RuleSpec, opened: Opened, updates: Updates | None
    ) -> None:
        super().__init__(params, spec, opened, updates)
        self._buffers = buffers
        self._exchange = opened.exchange
        self._changes = Changes(params)
        self._divided: float | None = None
        """Where the trainers update: what the sums of the last update were multiplied by here."""
        self._agreement: Agreement | None = None
        """With the trainers of the other workers, where these update and have rounds."""
        if updates is not None and opened.has_rounds and isinstance(opened.exchange, Exchange):
            self._agreement = Agreement(params, updates, opened.exchange)
        self._is_closed = False

    def pull_rows(self, parameter: Parameter | str | int, ids: object = None) -> None:
        """Bring rows of a row-sparse weight up to date, before they are used.

        Arguments:
            parameter: itself, its name or index.
            ids: row numbers in any order and shape, also repeated; None for all rows.

        Raises:
            KVError: its weight is not row-sparse, or a row is out of range.
        """
        self._needs_open()
        index = self._index(parameter)
        one = self._params[index]
        if one.stype != "row_sparse" or self._exchange is None:
            raise KVError("parameter %r is not row-sparse: step brings all of it" % one.name)
        rows = np.arange(one.shape[0]) if ids is None else row_numbers(ids, one.shape[0], "parameter %r" % one.name)
        if one.written_devices():
            # Rows of the store would be mixed with those of the user.
            self._take_alone(Changed((index,)), "pull_rows would undo a part of it")
        skipped = self._exchange.pull_rows(index, rows)
        if skipped and not is_skip(skipped):
            chosen(skipped, range(self._workers()), self._names(), STORE_HARM)

    def assign(self, parameters: Iterable[Parameter | str | int] | None = None) -> None:
        """Give all workers and the store rank 0's present weights, such as those that it has just read from a file.

        Collective. The rule's state stays. Without `parameters`, all that are not row-sparse, and the buffers of the
        module that the trainer was made from.

        Raises:
            KVError: no such parameter; or the store is of another maker, which cannot.
        """
        self._needs_open()
        if parameters is not None and (not isinstance(parameters, Iterable) or isinstance(parameters, str)):
            raise KVError(
                "assign takes a list of parameters, such as [%r], not %.60r" % (self._params[0].name, parameters)
            )
        some = [one for one in self._params if one.stype == "default"] if parameters is None else parameters
        indices = [self._index(one) for one in some]
        if self._exchange is not None:
            self._exchange.assign(indices)
            if parameters is None:
                self._exchange.store_buffers()
                self._exchange.pull_buffers()
        self._accept(indices)
        self._divided = None

    def average_buffers(self) -> None:
        """Replace the buffers of float types by their mean over all workers, for instance before an evaluation.

        All workers call it. Integer buffers stay. Without other workers, or buffers, it does nothing.

        Raises:
            KVError: a worker has joined instead.
        """
        self._needs_open()
        if self._exchange is not None and self._buffers:
            self._exchange.average_buffers()

    # --- states

    def save_states(self, path: Path) -> None:
        """Write weights, buffers, the rule and its states, so that `load_states` goes on from here.

        Where the store updates, that is a folder as `KVStore.save_states` makes it, and all workers call it; the
        buffers are rank 0's. Else it is a file, with this worker's buffers and all else the same on every worker.

        Raises:
            KVError: it cannot be written, or there is a file in the folder's place or a folder in the file's; or
                weights were changed that the store does not have.
            OSError: a file that cannot be written.
        """
        self._needs_open()
        if self._updates is None:
            _no_file(path)
            self._settle("save_states would leave it out")
            cast(Exchange, self._exchange).store_buffers()
            with naming(self._params, self._buffers.names):
                cast(KVStore, self.kvstore).save_states(path)
        else:
            states.save(os.fspath(path), self._updates, self._params, self._buffers, self._steps)

    def load_states(self, path: Path) -> None:
        """Take up what `save_states` wrote: all weights and buffers, the rule with its parameters, and its states.

        Raises:
            KVError: it is not whole, or other parameters' or buffers' (names, shapes, dtypes), or of another rule.
            OSError: a file that cannot be read.
        """
        self._needs_open()
        if self._updates is None:
            _no_file(path)
            with naming(self._params, self._buffers.names):
                cast(KVStore, self.kvstore).load_states(path)
            found = states.rule_of(os.fspath(path))
            if found is not None:
                self._loaded(*found)
            cast(Exchange, self._exchange).pull()
            cast(Exchange, self._exchange).pull_buffers()
        else:
            self._loaded(*states.load(os.fspath(path), self._updates, self._params, self._buffers))
            if self._agreement is not None:
                self._agreement.loaded()
        self._changes.accept()

    # --- the end

    def close(self) -> None:
        """Give the parameters back, and close the store if the trainer made it. A second close does nothing."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: Type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Close; after an error, without waiting for other workers."""
        if self._is_closed:
            return
        self._is_closed = True
        for parameter in self._params:
            if parameter.owner is self:
                parameter.owner = None
        if isinstance(self.kvstore, KVStore):
            self.kvstore.joins_by(None)
        if self._exchange is not None and error is None:
            self._exchange.close()
        if self._opened.is_own and self.kvstore is not None:
            leave(self.kvstore, error)

    # --- what a parameter asks of its trainer

    def may_replace(self, parameter: Parameter) -> None:
        """Return if a parameter's weight may be written by this worker alone.

        Raises:
            RuntimeError: the store has it, and shares it with other workers.
        """
        if self.update_on_kvstore and self.kvstore is not None and "dist" in self.kvstore.type:
            raise RuntimeError(
                "parameter %r is kept in the distributed store %r, which cannot be reset by one worker: write the"
                " weight in place on rank 0 and call trainer.assign() on all" % (parameter.name, self.kvstore.type)
            )

    def replaced(self, parameter: Parameter) -> None:
        """Take a weight that was written into all devices."""
        index = self._index(parameter)
        if self._updates is not None:
            self._updates.replaced(index)
            self._changes.mark([index])
        elif self._exchange is not None:
            self._exchange.replaced(index)

    # --- weights that were changed outside of steps

    def _changed(self) -> Changed:
        """Return which weights are others than the store's; where the store updates."""
        suspects = self._changes.suspects()
        dense = [index for index in suspects if self._params[index].stype == "default"]
        if self._changes.misfit(suspects):
            dense = []
        found = cast(Exchange, self._exchange).stored(dense)
        return self._changes.against(suspects, dict(zip(dense, found, strict=True)))

    def _settle(self, harm: str) -> None:
        """Take changed weights if no other worker has to; otherwise refuse them. Where the store updates.

        Raises:
            KVError: there are some, and others would have to take them; `harm` is what would come of it.
        """
        changed = self._changed()
        if changed:
            self._take_alone(changed, harm)

    def _take_alone(self, changed: Changed, harm: str) -> None:
        if changed.wrong or self._workers() > 1:
            raise alone(changed, self._names(), harm)
        cast(Exchange, self._exchange).assign(changed.indices)
        self._changes.accept(changed.indices)

    def _accept(self, indices: Iterable[int]) -> None:
        """Take weights as they are now, in this process."""
        for index in indices:
            if self._updates is not None:
                self._updates.replaced(index)
            self._changes.accept([index])

    def _workers(self) -> int:
        return 1 if self.kvstore is None else self.kvstore.num_workers

    def _names(self) -> list[str]:
        return [one.name for one in self._params]

    # --- checks

    def _index(self, parameter: Parameter | str | int) -> int:
        for index, one in enumerate(self._params):
            if one is parameter or parameter in (index, one.name):
                return index
        raise KVError("the trainer has no parameter %r" % (parameter,))

    def _needs_open(self) -> None:
        if self._is_closed:
            raise StoreClosed("the trainer was closed; make another one")


def _no_file(path: Path) -> None:
    if os.path.isfile(path):
        raise KVError(
            "%s is a file, as it is written where a trainer updates by itself; the store of this trainer updates"
            " (update_on_kvstore=True) and keeps a folder" % os.fspath(path)
        )
