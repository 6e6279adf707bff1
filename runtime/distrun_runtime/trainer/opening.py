"""The store of a trainer: whether it has one, and whether the store's rule updates the weights.

Source: MXNet's gluon Trainer and its `_create_kvstore`. We differ where it fails or trains wrongly without a word: a
store is made if the update is asked to happen there, and it is an error to ask for that without a store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from distrun_runtime import kvstore
from distrun_runtime.contract import environ
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, KVStoreBase
from distrun_runtime.trainer.exchange import StoreExchange, ThirdPartyExchange
from distrun_runtime.trainer.model import Buffers
from distrun_runtime.trainer.parameters import Parameter

__all__ = [
    "BIG",
    "Case",
    "Decision",
    "Opened",
    "close_failed",
    "decide",
    "leave",
    "open_store",
    "updates_itself",
    "wants_store",
]

BIG = 16 * 1024 * 1024
"""Above so many elements in one parameter, a store named `local` only sums: its update is one thread's work."""


@dataclass(frozen=True)
class Case:
    """What the decision depends on."""

    kind: str | None
    """The store's type name; None: no store is wanted."""
    is_open: bool = False
    """An open store was given, not a name."""
    is_third_party: bool = False
    """It comes from another package: it knows `broadcast` and `pushpull` of whole arrays."""
    has_optimizer: bool = True
    """It can update weights: `is_capable("optimizer")`."""
    devices: int = 1
    largest: int = 0
    """Elements of the largest parameter."""
    sparse_weight: bool = False
    """Some weight is row-sparse."""
    sparse_grad: bool = False
    """Some gradient is row-sparse."""
    asked: bool | None = None
    """The argument `update_on_kvstore`; None: choose."""
    usual: bool = True
    """MXNET_UPDATE_ON_KVSTORE."""

    @property
    def is_dist(self) -> bool:
        """Tell whether several workers share the store."""
        return self.kind is not None and "dist" in self.kind

    @property
    def is_async(self) -> bool:
        """Tell whether it has no rounds."""
        return self.is_dist and "async" in (self.kind or "")


@dataclass(frozen=True)
class Decision:
    """What was decided."""

    has_store: bool
    update_on_kvstore: bool


def decide(case: Case) -> Decision:
    """Return whether there is a store and whether it updates the weights.

    Raises:
        KVError: the case asks for what cannot be; the message says what to change.
    """
    has_store = wants_store(case)
    update = _store_updates(case, has_store)
    if update and not has_store:
        raise KVError("update_on_kvstore=True needs a store: give kvstore='local' or another name, not None")
    if update and not case.has_optimizer:
        if case.asked or case.is_async or _is_sparse(case):
            raise KVError("please set update_on_kvstore=False when training with %r: it cannot update" % case.kind)
        update = False
    if has_store and case.sparse_grad and case.is_third_party:
        raise KVError(
            "store %r comes from another package and takes no row-sparse gradients; use dense ones" % case.kind
        )
    return Decision(has_store, update)


def wants_store(case: Case) -> bool:
    """Return whether there is a store; for this it need not be known what the store can.

    Raises:
        KVError: there must be one, and none is wanted.
    """
    if case.kind is None:
        if case.sparse_weight:
            raise KVError("row-sparse weights are kept in a store: give kvstore='local' or another name, not None")
        return False
    # One device of one machine has nothing to sum: a store that is made for it would only copy.
    is_alone = case.kind in ("local", "device") and not case.is_open and case.devices == 1
    return not is_alone or case.sparse_weight or case.asked is True


def _store_updates(case: Case, has_store: bool) -> bool:
    if case.asked is False:
        _may_be_refused(case)
        return False
    if case.asked is True or case.sparse_weight or case.is_async:
        return True
    if case.sparse_grad:
        return case.is_dist
    if case.kind == "local" and not case.is_open and case.largest > BIG:
        return False
    return has_store and case.usual


def _may_be_refused(case: Case) -> None:
    """Return if the update may happen outside the store."""
    if case.sparse_weight:
        raise KVError("cannot set update_on_kvstore=False when row-sparse weights are present: only the store has all")
    if case.sparse_grad and case.is_dist:
        raise KVError(
            "cannot set update_on_kvstore=False on store %r with row-sparse gradients: leave update_on_kvstore out, or"
            " use dense gradients" % case.kind
        )
    if case.is_async:
        raise KVError("please set update_on_kvstore=True when training in async mode (%r)" % case.kind)


def _is_sparse(case: Case) -> bool:
    return case.sparse_weight or (case.sparse_grad and case.is_dist)


# --- the store, opened


@dataclass(frozen=True)
class Opened:
    """A trainer's store."""

    store: KVStoreBase | None
    is_own: bool
    """The trainer made it, and closes it."""
    exchange: StoreExchange | ThirdPartyExchange | None
    updates: bool
    """The store updates the weights."""
    has_rounds: bool
    """Several workers make every step together."""


def updates_itself(params: list[Parameter], given: str | KVStoreBase | None, asked: bool | None) -> bool | None:
    """Return whether the trainer updates the weights, not the store; None: that depends on the store itself.

    Raises:
        KVError: as `open_store`.
    """
    case = _case(params, given, asked)
    if not wants_store(case):
        return True
    if case.kind not in kvstore.TYPES:
        return None
    return not decide(case).update_on_kvstore


def open_store(
    params: list[Parameter], buffers: Buffers, given: str | KVStoreBase | None, asked: bool | None
) -> Opened:
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
    if case.kind in kvstore.TYPES:
        decide(case)
    store: KVStoreBase = kvstore.create(given) if isinstance(given, str) else given  # type: ignore[assignment]
    try:
        return _opened(params, buffers, store, replace(case, kind=store.type), isinstance(given, str))
    except BaseException as err:
        if isinstance(given, str):
            close_failed(store, err)
        raise


def close_failed(store: KVStoreBase, error: BaseException) -> None:
    """Close a store that was made for a trainer which could not be made; this process stays in the job."""
    if isinstance(store, KVStore):
        store.give_up(error)
    else:
        store.close()


def leave(store: KVStoreBase, error: BaseException | None) -> None:
    """Close a store; after an error, without waiting for other workers."""
    if isinstance(store, KVStore):
        store.__exit__(None if error is None else type(error), error, None)
    else:
        store.close()


def _opened(params: list[Parameter], buffers: Buffers, store: KVStoreBase, case: Case, is_own: bool) -> Opened:
    if not isinstance(store, KVStore):
        decision = decide(replace(case, is_third_party=True, has_optimizer=False))
        third_party = ThirdPartyExchange(store, params, buffers)
        return Opened(store, is_own, third_party, decision.update_on_kvstore, store.num_workers > 1)
    decision = decide(replace(case, has_optimizer=store.is_capable("optimizer")))
    has_rounds = case.is_dist and not case.is_async
    exchange = StoreExchange(store, params, buffers, decision.update_on_kvstore, has_rounds)
    return Opened(store, is_own, exchange, decision.update_on_kvstore, has_rounds)


def _case(params: list[Parameter], given: str | KVStoreBase | None, asked: bool | None) -> Case:
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
