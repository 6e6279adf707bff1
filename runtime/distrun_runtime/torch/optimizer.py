"""`DistributedOptimizer`: any optimizer of torch, whose gradients are the means over all workers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops.params import did_you_mean
from distrun_runtime.torch import job
from distrun_runtime.torch.buckets import Averaging
from distrun_runtime.torch.buffers import MODES

_AVERAGED: weakref.WeakKeyDictionary[Any, Averaging] = weakref.WeakKeyDictionary()
"""Of each model what averages its gradients as long as the model is there: two optimizers of one model share it."""


class DistributedOptimizer:
    """An optimizer of torch whose gradients are means over all workers: `opt = DistributedOptimizer(opt, model)`.

    The optimizer itself is returned, in a class derived from its own and from this one. When a `backward()` returns,
    `p.grad` of all parameters of the model holds the mean over the workers. Parameters and buffers of the model become
    rank 0's at once. All workers call it, `add_param_group` and as many backwards. In a program that runs by itself it
    changes nothing.

    Arguments:
        optimizer: any `torch.optim.Optimizer`; its parameters are the model's.
        model: the module; all of its parameters that require gradients are averaged.
        compression: how gradients are compressed, `{"type": "2bit", "threshold": 0.5}`, as
            `KVStore.set_gradient_compression` takes it. Default: not at all.
        overlap: gradients are sent during the backward. Default: at its end, in one call.
        buffers: what each exchange makes of the model's buffers: `rank0`, rank 0's for all; `mean`, the mean of those
            of floating-point types and rank 0's of the others; `own`, nothing.
        kvstore: a store of its own, `dist_sync` and without a rule. Default: the one that `dt.store()` returns.

    Raises:
        KVError: an argument is of another kind; the optimizer has a parameter that is not the model's; no parameter
            requires a gradient; or the workers' parameters or arguments differ, which are then named.
    """

    param_groups: list[dict[str, Any]]
    _model: Any
    _averaging: Averaging | None

    def __new__(cls, optimizer: Any, *_: object, **__: object) -> Any:
        """Return the optimizer, in its new class."""
        if isinstance(optimizer, DistributedOptimizer):
            raise KVError("DistributedOptimizer: this optimizer is one already; give the optimizer of torch.optim")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise KVError(
                f"DistributedOptimizer: the optimizer is one of torch.optim, not {type(optimizer).__name__};"
                " fix: DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)"
            )
        base = type(optimizer)
        vars(optimizer)["_base"] = base
        optimizer.__class__ = type(base.__name__, (cls, base), {"__module__": base.__module__})
        return optimizer

    def __init__(
        self,
        optimizer: Any,
        model: Any,
        compression: Mapping[str, object] | None = None,
        overlap: bool = False,
        buffers: str = "rank0",
        *,
        kvstore: KVStore | None = None,
    ) -> None:
        try:
            _check(model, overlap, buffers)
            store = job.store() if kvstore is None else _checked(kvstore)
            self._model, self._averaging = model, None
            self._check_params(group["params"] for group in self.param_groups)
            if store.num_workers > 1:
                options = {"compression": compression, "overlap": overlap, "buffers": buffers}
                self._averaging = _averaging_of(model, store, options)
                self._averaging.lay_out({"the optimizer": vars(optimizer)["_base"].__name__})
        except BaseException:
            optimizer.__class__ = vars(optimizer)["_base"]
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what a copy is made of: it is the optimizer without this class."""
        # Not `copyreg.__newobj__`: pickle takes that for objects of exactly this class only.
        return object.__new__, (vars(self)["_base"],), self.__getstate__()  # type: ignore[attr-defined]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to the optimizer, as torch does it; and to what is averaged. Collective.

        Raises:
            KVError: one is not the model's.
        """
        params = param_group["params"]
        param_group["params"] = params = [params] if isinstance(params, torch.Tensor) else list(params)
        self._check_params([params])
        super().add_param_group(param_group)  # type: ignore[misc]  # torch's
        if self._averaging is not None:
            self._averaging.lay_out({})

    @contextmanager
    def no_sync(self, unless: bool = False) -> Iterator[None]:
        """Within the block a backward exchanges nothing: gradients add up, and the next exchange is of their sums.

        Arguments:
            unless: do nothing if it is true, as for the last of several backwards:
                `with opt.no_sync(unless=last): loss.backward()`. The same on all workers.
        """
        averaging = self._averaging
        if averaging is None or unless:
            yield
            return
        before, averaging.is_syncing = averaging.is_syncing, False
        try:
            yield
        finally:
            averaging.is_syncing = before

    def _check_params(self, groups: Any) -> None:
        known = {id(param) for param in self._model.parameters()}
        for number, params in enumerate(groups):
            for at, param in enumerate(params):
                tensor = param[1] if isinstance(param, tuple) else param
                if id(tensor) not in known:
                    raise KVError(
                        f"DistributedOptimizer: parameter {at} of the optimizer's group {number}, of shape"
                        f" {tuple(tensor.shape)}, is not the model's, so its gradients would not be averaged;"
                        " fix: give the module that has all parameters of the optimizer"
                    )


def _check(model: Any, overlap: object, buffers: object) -> None:
    """Return if these arguments can be used."""
    if not isinstance(model, torch.nn.Module):
        raise KVError(f"DistributedOptimizer: the model is a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise KVError("DistributedOptimizer: this model averages gradients already; fix: give the module within DDP")
    if not any(param.requires_grad for param in model.parameters()):
        raise KVError("DistributedOptimizer: the model has no parameter that requires a gradient (requires_grad)")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise KVError(
                f"DistributedOptimizer: parameter {name!r} has no shape yet; fix: call the model once, then wrap"
            )
    if not isinstance(overlap, bool):
        raise KVError(f"DistributedOptimizer: overlap is True or False, not {overlap!r:.60}")
    if buffers not in MODES:
        guess = did_you_mean(buffers, MODES) if isinstance(buffers, str) else ""
        raise KVError(f"DistributedOptimizer: buffers is one of {', '.join(MODES)}, not {buffers!r:.60}{guess}")


def _checked(store: object) -> KVStore:
    """Return a store of the kind that sums gradients."""
    if not isinstance(store, KVStore) or "async" in store.type:
        kind = f"a {store.type!r} store" if isinstance(store, KVStore) else type(store).__name__
        raise KVError(
            f"DistributedOptimizer: the store is one with rounds, not {kind}; fix: kvstore.create('dist_sync')"
        )
    return store


def _averaging_of(model: Any, store: KVStore, options: dict[str, Any]) -> Averaging:
    """Return what averages the model's gradients, made by the first optimizer of the model."""
    found = _AVERAGED.get(model)
    if found is not None and (found.store is not store or not found.is_laid_out):
        found.stop()
        found = None
    if found is None:
        found = _AVERAGED[model] = Averaging(store, model, **options)
    if found.options != options:
        raise KVError(
            f"DistributedOptimizer: another optimizer of this model has {found.options}, this one {options};"
            " they share the exchange; fix: give both the same"
        )
    return found
