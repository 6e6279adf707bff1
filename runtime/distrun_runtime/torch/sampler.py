"""A sampler for torch's DataLoader: each worker's part of a data set, and where in it a stopped run goes on."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distrun_runtime.errors import KVError
from distrun_runtime.torch import job


class DistributedSampler(data.DistributedSampler):  # type: ignore[misc]  # torch is not where types are checked
    """torch's DistributedSampler: the same positions, in the same order; `state_dict` tells how far the loop has come.

    Call `set_epoch` before each epoch, as with torch's: otherwise all epochs have the same order.

    Arguments:
        dataset: anything with a length, which is the same on all workers.
        num_replicas, rank: the number of parts and which of them to give, from 0. None: this job's workers, and this
            one.
        shuffle: whether to shuffle all positions for each epoch, before they are dealt out.
        seed: of the orders, the same on all workers.
        drop_last: leave out what is left over when the parts divide the data set; else some positions come twice.

    Raises:
        ValueError: a rank that is none of the replicas'.
        KVError, ContractError, TimedOut, PeerLost: this job has no store (`job.store`).
    """

    def __init__(  # noqa: PLR0917  # torch's arguments, in its order
        self,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        num_replicas = job.world_size() if num_replicas is None else num_replicas
        rank = job.rank() if rank is None else rank
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self._begin = 0
        """How many positions of the epoch's order, those of all workers, came before this pass, or before the next."""
        self._drawn = 0
        """How many positions of its part this pass has given."""
        self._loading: Mapping[str, Any] = {}
        """The attributes of the DataLoader's iterator that draws from this pass; empty if there is none."""
        self._resumes: Callable[[], object] | None = None
        """What to call when the next pass begins, if it goes on where another run has stopped."""
        self._is_set = False
        """Whether the epoch was set after the state that the next pass goes on from was loaded."""

    def __iter__(self) -> Iterator[int]:
        """Yield this worker's positions; the first time after `load_state_dict`, those that are left."""
        # Code of a generator runs when the first position is drawn, by the DataLoader's iterator if there is one.
        resumes, self._resumes = self._resumes, None
        if resumes and not self._is_set and not self._part(self._begin):
            resumes = None  # that pass was at its end, and this one is another
        self._begin, self._drawn, self._loading = self._begin if resumes else 0, 0, _drawing_iterator()
        if resumes:
            resumes()
        for position in self._part(self._begin):
            self._drawn += 1
            yield position

    def _part(self, begin: int) -> list[int]:
        """Return this worker's positions of an epoch of which `begin` positions have been dealt out already."""
        length = len(self.dataset)
        if self.shuffle:
            order = torch.randperm(length, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        else:
            order = list(range(length))
        rest = order[begin:]
        extra = len(rest) % self.num_replicas
        if extra and self.drop_last:
            rest = rest[:-extra]
        elif extra:
            rest += itertools.islice(itertools.cycle(order), self.num_replicas - extra)
        part: list[int] = rest[self.rank :: self.num_replicas]
        return part

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that of epoch `epoch`, from its beginning, or from where a loaded state is in it."""
        self._is_set = True
        if epoch != self.epoch:
            self._begin, self._drawn, self._loading, self._resumes = 0, 0, {}, None
        super().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many of its positions the loops of all workers have taken: `consumed`.

        What a DataLoader has fetched in advance does not count. All workers must have taken equally many.

        Raises:
            KVError: that cannot be told, for a DataLoader with a batch sampler without a `batch_size`.
        """
        consumed = self._begin + self._taken() * self.num_replicas
        return {"epoch": self.epoch, "consumed": consumed, **self._order()}

    def _order(self) -> dict[str, Any]:
        """Return what the orders of all epochs follow from."""
        return {"length": len(self.dataset), "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any], resumes: Callable[[], object] = lambda: None) -> None:
        """Let the next pass go on where the state's was, also with another number of workers.

        Arguments:
            state: what `state_dict` returned.
            resumes: called when that pass begins, after the DataLoader has drawn a seed for its processes; not if the
                state is of the beginning of an epoch, which no DataLoader had begun.

        Raises:
            KVError: it is the state of another data set or of another order. Nothing was changed.
        """
        for name, own in self._order().items():
            if state[name] != own:
                raise KVError(f"the sampler's {name} is {own}, but {state[name]} in the state that is loaded")
        super().set_epoch(state["epoch"])
        self._begin, self._drawn, self._loading, self._is_set = state["consumed"], 0, {}, False
        self._resumes = resumes if self._begin else None

    def _taken(self) -> int:
        """Return how many positions of this pass the loop over the data has taken."""
        if not self._loading:
            return self._drawn
        batches = self._loading["_index_sampler"]
        size = 1 if batches is self else getattr(batches, "batch_size", None)
        if not isinstance(size, int):
            raise KVError(
                f"the batches of a {type(batches).__name__} without a batch_size cannot be counted; fix: give it a"
                " batch_size, or save between epochs without the sampler"
            )
        taken: int = min(self._drawn, self._loading["_num_yielded"] * size)
        return taken


def _drawing_iterator() -> Mapping[str, Any]:
    """Return the attributes of the DataLoader's iterator that draws the first position; empty if none does.

    A sampler is not told who draws from it, and only this iterator knows how many batches it has handed to the loop:
    processes and batch samplers draw in advance. Only its attributes are kept: its end still ends the processes.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, _BaseDataLoaderIter):
            attributes: dict[str, Any] = vars(iterator)
            return attributes
        frame = frame.f_back
    return {}
