"""Weights that were changed outside of steps: by `load_state_dict`, in place, or through `.data`.

Where a store with several workers updates, the next step would undo such a change. The worker that notices it has the
round of its step skipped, with a note that says what was changed: so all workers hear of it in this very step, and
nothing is sent for it in any other. What follows from the notes is decided alike on every worker.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.trainer.parameter import Parameter

__all__ = [
    "OWN_HARM",
    "SHOWN",
    "SKIP",
    "STORE_HARM",
    "Changed",
    "Changes",
    "alone",
    "chosen",
    "digest",
    "is_skip",
    "ranked",
    "same",
]

SHOWN = 3
"""How many parameters or settings a message names."""


@dataclass(frozen=True)
class Changed:
    """Weights of this worker that were changed outside of steps."""

    indices: tuple[int, ...] = ()
    """Of the parameters."""
    wrong: str = ""
    """Why such a change cannot be taken by anybody, in words; empty: it can."""

    def __bool__(self) -> bool:
        return bool(self.indices or self.wrong)

    def to_json(self) -> dict[str, Any]:
        """Return the note that says so."""
        return {"changed": list(self.indices), "wrong": self.wrong}


class Changes:
    """Notices weights that were changed outside of steps.

    A torch tensor counts the writes into it (`_version`) and says where its memory is. Both are compared with what
    they were when the trainer wrote the tensor last. So in-place operations are noticed (`clamp_`, `copy_`,
    `load_state_dict`), and another memory is (`.data =`, `net.to(...)`); a write past torch is not (`.data.clamp_()`,
    `.numpy()`, arrays of numpy). What was written but has the same values counts as unchanged.
    """

    def __init__(self, params: Sequence[Parameter]) -> None:
        self._params = params
        self._marked: set[int] = set()

    def mark(self, indices: Iterable[int]) -> None:
        """Take parameters for changed until they are accepted: the trainer wrote them for this worker alone."""
        self._marked.update(indices)

    def accept(self, indices: Iterable[int] | None = None) -> None:
        """Take these weights, or all, as they are now for unchanged."""
        some = list(range(len(self._params)) if indices is None else indices)
        self._marked.difference_update(some)
        for index in some:
            self._params[index].remember()

    def suspects(self) -> list[int]:
        """Return the parameters that were written; their values may be the same."""
        return [index for index, one in enumerate(self._params) if index in self._marked or one.written_devices()]

    def against(self, suspects: Sequence[int], stored: Mapping[int, Array]) -> Changed:
        """Return which of the suspects have other values than the store; accept the rest.

        Arguments:
            stored: the store's values of the suspects, but for those that are row-sparse: their local rows need not
                be the store's.
        """
        changed, wrong = [], self.misfit(suspects)
        for index in [] if wrong else suspects:
            one = self._params[index]
            devices = one.written_devices()
            if index in stored:
                devices = [i for i, each in enumerate(one.replicas) if not same(each.weight(), stored[index])]
            if not devices:
                self.accept([index])
                continue
            changed.append(index)
            wrong = wrong or _on_some(one, devices)
        return Changed(tuple(suspects if wrong else changed), wrong)

    def here(self) -> Changed:
        """Return which parameters were written, where no store has them; copies on several devices are made alike."""
        suspects = self.suspects()
        wrong = self.misfit(suspects)
        for index in [] if wrong else suspects:
            one = self._params[index]
            first, *others = [replica.weight() for replica in one.replicas]
            devices = one.written_devices()
            if all(same(first, other) for other in others):
                continue
            wrong = wrong or _on_some(one, devices)
            if not wrong:
                self.mark([index])
                one.write(first.copy())
        return Changed(tuple(suspects), wrong)

    def misfit(self, suspects: Sequence[int]) -> str:
        """Return which of the suspects has another shape or dtype than before, in words; empty: none."""
        for one in (self._params[index] for index in suspects):
            for replica in one.replicas:
                found = replica.weight()
                if found.shape != one.shape or found.dtype != one.dtype:
                    return (
                        "parameter %r has shape %s and dtype %s now, and had %s and %s when the trainer was made;"
                        " fix: close the trainer and make another one"
                        % (
                            *(one.name, found.shape, dtypes.name_of(found.dtype)),
                            *(one.shape, dtypes.name_of(one.dtype)),
                        )
                    )
        return ""


def is_skip(notes: Mapping[int, Mapping[str, Any] | None]) -> bool:
    """Tell whether a worker wanted the step to be skipped (`Trainer.skip_step`), whatever others say."""
    return any(note is not None and SKIP.items() <= note.items() for note in notes.values())


SKIP = {"skip": True}
"""The note of a worker that wants a step to be skipped."""

STORE_HARM = "The store updates the weights, and would undo the change"
OWN_HARM = "Each worker updates its own weights, so they would differ from now on"


def same(one: Array, other: Array) -> bool:
    """Tell whether two arrays have the same shape, dtype and bits."""
    return one.shape == other.shape and one.dtype == other.dtype and np.array_equal(_bits(one), _bits(other))


def digest(arrays: Iterable[Array]) -> str:
    """Return a digest of the contents of arrays."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(_bits(array).data)
    return state.hexdigest()


def chosen(
    notes: Mapping[int, Mapping[str, Any] | None], workers: Iterable[int], names: Sequence[str], harm: str
) -> list[int]:
    """Return the parameters of which all workers take rank 0's weights. No side effects.

    Arguments:
        notes: by rank, a `Changed` as JSON; None of a worker that changed nothing.
        workers: the ranks of all workers. Those without a note take no part in steps at present.
        names: of the parameters.
        harm: what would come of the change, for people.

    Raises:
        KVError: not all workers have changed the same parameters. All workers raise the same.
    """
    for rank, note in sorted(notes.items()):
        if note and note.get("wrong"):
            raise KVError("worker-%d: %s" % (rank, note["wrong"]))
    by_rank = {rank: set(note["changed"]) if note else set() for rank, note in notes.items()}
    every = sorted(set().union(*by_rank.values()))
    absent = [rank for rank in workers if rank not in notes]
    odd = [index for index in every if absent or not all(index in found for found in by_rank.values())]
    if not odd:
        return every
    parts = []
    for index in odd[:SHOWN]:
        who = [rank for rank, found in sorted(by_rank.items()) if index in found]
        rest = [rank for rank in sorted(by_rank) if rank not in who]
        parts.append(
            "parameter %r on %s%s" % (names[index], ranked(who), " and not on %s" % ranked(rest) if rest else "")
        )
    more = " and %d more" % (len(odd) - SHOWN) if len(odd) > SHOWN else ""
    gone = "; %s takes no part in steps now (it has joined or left)" % ranked(absent) if absent else ""
    raise KVError(
        "weights were changed outside of steps by only some workers: %s%s%s. %s. %s"
        % ("; ".join(parts), more, gone, harm, UNDO if absent else ASSIGN)
    )


UNDO = "fix: undo the change; make it on all workers when all of them make steps again"
"""What to do about weights that were changed while a worker takes no part in steps, nor in `assign`."""


ASSIGN = (
    "fix: make the change on all workers; or make it on rank 0 and call trainer.assign() on all workers, which gives"
    " them the weights of rank 0"
)
"""What to do about weights that were changed."""


def alone(changed: Changed, names: Sequence[str], harm: str) -> KVError:
    """Return the error of weights that were changed, where other workers cannot be asked."""
    if changed.wrong:
        return KVError(changed.wrong)
    more = " and %d more" % (len(changed.indices) - SHOWN) if len(changed.indices) > SHOWN else ""
    shown = ", ".join("parameter %r" % names[index] for index in changed.indices[:SHOWN])
    return KVError("weights were changed outside of steps: %s%s. %s. %s" % (shown, more, harm, ASSIGN))


def _on_some(parameter: Parameter, devices: Sequence[int]) -> str:
    if len(devices) == len(parameter.replicas):
        return ""
    return (
        "parameter %r was changed outside of steps on %d of its %d devices only; fix: change it on all of them, or call"
        " trainer.assign() on all workers, which gives all devices the weights of rank 0's first"
        % (parameter.name, len(devices), len(parameter.replicas))
    )


def ranked(ranks: Iterable[int]) -> str:
    """Return the names of workers."""
    return ", ".join("worker-%d" % rank for rank in ranks)


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
