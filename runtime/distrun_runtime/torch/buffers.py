"""What workers have alike beside gradients: the values they begin with, and the buffers of a model at each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore

MODES = ("rank0", "mean", "own")
"""What workers get at each exchange: rank 0's buffers; the mean of those that are floats, and rank 0's others; or
nothing."""

_EXACT = (torch.float32, torch.bfloat16, torch.float16)
"""Types whose values float32 has exactly."""


STAGE_BYTES = 16 * 1024 * 1024
"""How much of the first values travels at once: the store keeps memory for it."""


def give_rank_0s(store: KVStore, tensors: Sequence[Any]) -> None:
    """Replace the values of tensors by rank 0's. Collective; the tensors have the same shapes and dtypes."""
    whole = [tensor.detach().contiguous() for tensor in tensors]
    rows = [each.reshape(-1).view(torch.uint8) for each in whole if each.numel()]
    pieces = [piece for row in rows for piece in row.split(STAGE_BYTES)]
    stage = store.empty(min(STAGE_BYTES, sum(map(len, pieces))), torch.uint8)
    while pieces:
        some: list[Any] = []
        while pieces and sum(map(len, some)) + len(pieces[0]) <= len(stage):
            some.append(pieces.pop(0))
        parts = stage.split([*map(len, some), len(stage) - sum(map(len, some))])
        for piece, part in zip(some, parts, strict=False):
            part.copy_(piece)
        store.broadcast(None, stage, out=stage)
        for piece, part in zip(some, parts, strict=False):
            piece.copy_(part)
    for tensor, each in zip(tensors, whole, strict=True):
        if each.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(each)


class BufferRow:
    """The buffers of a model in a row of floats, which all workers add up.

    Workers other than rank 0 add zeros, so that the sum is rank 0's values. What float32 may not hold exactly travels
    as its bytes, one a float.
    """

    def __init__(self, model: Any, mode: str, rank: int) -> None:
        self._is_root = rank == 0
        self._places: list[tuple[ref[Any], str, str]] = []
        """Of each buffer its module, its name there, and whether its `mean`, `values` or `bytes` travel."""
        self._sizes: list[int] = []
        """Of each buffer its length in the row."""
        kinds = []
        seen: set[int] = set()
        for module in model.modules() if mode != "own" else ():
            for name, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                is_mean = mode == "mean" and buffer.is_floating_point()
                kind = "mean" if is_mean else "values" if buffer.dtype in _EXACT else "bytes"
                self._places.append((ref(module), name, kind))
                self._sizes.append(buffer.numel() * (buffer.element_size() if kind == "bytes" else 1))
                kinds.append((is_mean, buffer.dtype))
        self.dtype = torch.float64 if (True, torch.float64) in kinds else torch.float32
        """Of the row."""
        self.size = sum(self._sizes)
        """Length of the row."""

    def fill(self, row: Any, share: float) -> None:
        """Write what this worker adds; `share` is its part of a mean."""
        if not self.size:
            return
        if not self._is_root:
            row.zero_()
        for part, buffer, kind in self._parts(row):
            flat = buffer.detach().reshape(-1)
            if kind == "mean":
                torch.mul(flat, share, out=part)
            elif self._is_root:
                part.copy_(flat.view(torch.uint8) if kind == "bytes" else flat)

    def take(self, row: Any) -> None:
        """Write the sum into the buffers."""
        if not self.size:
            return
        targets, sums = [], []
        for part, buffer, kind in self._parts(row):
            if kind == "mean" or not self._is_root:
                # `.data`: a graph that has read the buffer is not told, as the statistics of a training step are no
                # part of any gradient.
                buffer = buffer.data
                if kind == "bytes":
                    buffer.copy_(part.to(torch.uint8).view(buffer.dtype).view(buffer.shape))
                else:
                    targets.append(buffer)
                    sums.append(part.view(buffer.shape))
        if targets:
            torch._foreach_copy_(targets, sums)

    def _parts(self, row: Any) -> Iterator[tuple[Any, Any, str]]:
        """Yield the part of the row, the buffer and the kind of each; nothing of a layer that is no more.

        Raises:
            KVError: a buffer has another size than at first.
        """
        for part, size, (module, name, kind) in zip(row.split(self._sizes), self._sizes, self._places, strict=True):
            if (owner := module()) is None:
                continue
            buffer = owner._buffers.get(name)
            found = 0 if buffer is None else buffer.numel() * (buffer.element_size() if kind == "bytes" else 1)
            if found != size:
                raise KVError(
                    f"buffer {name!r} has {found} {kind}, and had {size} when the optimizer was wrapped;"
                    " fix: write into the buffer, buffer.copy_(...), or buffers='own'"
                )
            yield part, buffer, kind
