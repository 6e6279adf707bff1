"""Sparse gradients over workers: their rows travel, and what comes back has the rows of all workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from distrun_runtime.kvstore import KVStore


def sparse_names(model: Any) -> set[str]:
    """Return the names of parameters whose gradients are sparse: tables of `nn.Embedding(sparse=True)` and the like."""
    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, kinds) and each.sparse}
    return {name for name, param in model.named_parameters() if id(param) in tables}


def average_rows(store: KVStore, params: Mapping[str, Any]) -> None:
    """Replace sparse gradients by their means over workers. Collective.

    A gradient stays None if no worker has one, and is dense if it is on one of them: with a tied weight it may be.

    Arguments:
        params: by name; their gradients are sparse in the first dimension, dense or None.
    """
    if not params:
        return
    rows = [_rows_of(param) for param in params.values()]
    dense = [param.grad is not None and not param.grad.is_sparse for param in params.values()]
    mine = np.array([[len(ids) for ids, _ in rows], [int(each) for each in dense]], np.int64)
    counts, is_dense = np.moveaxis(store.allgather(mine), 1, 0)
    for at, (param, (ids, values)) in enumerate(zip(params.values(), rows, strict=True)):
        most = int(counts[:, at].max())
        if not most and not is_dense[:, at].any():
            continue
        # Rounded up, so that there are few sizes: the store keeps memory for each.
        room = 1 << max(most - 1, 0).bit_length()
        all_ids = store.allgather(_padded(ids, room))
        all_values = store.allgather(_padded(values / store.num_workers, room))
        pairs = [
            (its[:count], some[:count]) for its, some, count in zip(all_ids, all_values, counts[:, at], strict=True)
        ]
        found = torch.sparse_coo_tensor(
            torch.cat([its for its, _ in pairs])[None], torch.cat([some for _, some in pairs]), param.shape
        ).coalesce()
        param.grad = found.to_dense() if is_dense[:, at].any() else found


def _rows_of(param: Any) -> tuple[Any, Any]:
    """Return the numbers and values of a gradient's rows."""
    grad = param.grad
    if grad is None:
        return torch.empty(0, dtype=torch.int64, device=param.device), param.detach()[:0]
    if not grad.is_sparse:
        return torch.arange(len(grad), device=grad.device), grad
    grad = grad.coalesce()
    return grad.indices()[0], grad.values()


def _padded(rows: Any, room: int) -> Any:
    result = rows.new_zeros((room, *rows.shape[1:]))
    result[: len(rows)] = rows
    return result
