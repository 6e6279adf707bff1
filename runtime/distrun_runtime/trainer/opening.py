"""Opening: the store of a trainer, made or taken, and what was decided about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from distrun_runtime import kvstore as stores
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.store.base import KVStore
from distrun_runtime.store.contract import KVStoreBase
from distrun_runtime.trainer.buffers import Buffers
from distrun_runtime.trainer.decide import Case, decide, wants_store
from distrun_runtime.trainer.exchange import Exchange
from distrun_runtime.trainer.foreign import ForeignExchange
from distrun_runtime.trainer.parameter import Parameter

__all__ = ["AnyStore", "Opened", "give_up", "leave", "open_store", "updates_itself"]

AnyStore = KVStoreBase
"""Ours, or one of another maker."""


@dataclass(frozen=True)
class Opened:
    """A trainer's store."""

    store: AnyStore | None
    is_own: bool
    """The trainer made it, and closes it."""
    exchange: Exchange | ForeignExchange | None
    updates: bool
    """The store updates the weights."""
    has_rounds: bool
    """Several workers make every step together."""


def updates_itself(params: list[Parameter], given: str | AnyStore | None, asked: bool | None) -> bool | None:
    """Return whether the trainer updates the weights, not the store; None: that depends on the store itself.

    Raises:
        KVError: as `open_store`.
    """
    case = _case(params, given, asked)
    if not wants_store(case):
        return True
    if case.kind not in stores.TYPES:
        return None
    return not decide(case).update_on_kvstore


def open_store(params: list[Parameter], buffers: Buffers, given: str | AnyStore | None, asked: bool | None) -> Opened:
    """Return the store that parameters are to be trained with, and how.

    Arguments:
        buffers: of the module that the parameters come from.
        given, asked: the trainer's `kvstore` and `update_on_kvstore`.

    Raises:
        KVError: they do not fit the parameters.
    """
    case = _case(params, given, asked)
    if not wants_store(case):
        decide(case)
        return Opened(None, False, None, False, False)
    # Decided before a store by name is made, as far as that is known: making one of a job takes all workers.
    if case.kind in stores.TYPES:
        decide(case)
    store: AnyStore = stores.create(given) if isinstance(given, str) else given  # type: ignore[assignment]
    try:
        return _opened(params, buffers, store, replace(case, kind=store.type), isinstance(given, str))
    except BaseException as err:
        if isinstance(given, str):
            give_up(store, err)
        raise


def give_up(store: AnyStore, error: BaseException) -> None:
    """Close a store that was made for a trainer which could not be made; this process stays in the job."""
    if isinstance(store, KVStore):
        store.give_up(error)
    else:
        store.close()


def leave(store: AnyStore, error: BaseException | None) -> None:
    """Close a store; after an error without waiting for anybody."""
    if isinstance(store, KVStore):
        store.__exit__(None if error is None else type(error), error, None)
    else:
        store.close()


def _opened(params: list[Parameter], buffers: Buffers, store: AnyStore, case: Case, is_own: bool) -> Opened:
    if not isinstance(store, KVStore):
        decision = decide(replace(case, is_custom=True, has_optimizer=False))
        foreign = ForeignExchange(store, params, buffers)
        return Opened(store, is_own, foreign, decision.update_on_kvstore, store.num_workers > 1)
    decision = decide(replace(case, has_optimizer=store.is_capable("optimizer")))
    has_rounds = case.is_dist and not case.is_async
    exchange = Exchange(store, params, buffers, decision.update_on_kvstore, has_rounds)
    return Opened(store, is_own, exchange, decision.update_on_kvstore, has_rounds)


def _case(params: list[Parameter], given: str | AnyStore | None, asked: bool | None) -> Case:
    if asked is not None and not isinstance(asked, bool):
        raise KVError("update_on_kvstore is True, False or None, not %r" % (asked,))
    if given is not None and not isinstance(given, (str, KVStoreBase)):
        raise KVError("kvstore is the name of a store, an open store or None, not %s" % type(given).__name__)
    kind = given.type if isinstance(given, KVStoreBase) else given and given.lower()
    return Case(
        kind=kind,
        is_open=given is not None and not isinstance(given, str),
        devices=len(params[0].replicas),
        largest=max(one.size for one in params),
        sparse_weight=any(one.stype != "default" for one in params),
        sparse_grad=any(one.grad_stype != "default" for one in params),
        asked=asked,
        usual=environ.read("MXNET_UPDATE_ON_KVSTORE"),
    )
