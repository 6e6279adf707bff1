"""Whether a trainer has a store, and who updates the weights: the store's rule, or the trainer itself. Pure.

Source: MXNet's gluon Trainer and its `_create_kvstore`. We differ where it fails or trains wrongly without a word: a
store is made if the update is asked to happen there, and it is an error to ask for that without a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from distrun_runtime.errors import KVError

__all__ = ["BIG", "Case", "Decision", "decide", "wants_store"]

BIG = 16 * 1024 * 1024
"""Above so many elements in one parameter, a store named `local` only sums: its update is one thread's work."""


@dataclass(frozen=True)
class Case:
    """What the decision depends on."""

    kind: str | None
    """The store's type name; None: no store is wanted."""
    is_open: bool = False
    """An open store was given, not a name."""
    is_custom: bool = False
    """It is of another maker: it knows `broadcast` and `pushpull` of whole arrays."""
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
    update = _update(case, has_store)
    if update and not has_store:
        raise KVError("update_on_kvstore=True needs a store: give kvstore='local' or another name, not None")
    if update and not case.has_optimizer:
        if case.asked or case.is_async or _is_sparse(case):
            raise KVError("please set update_on_kvstore=False when training with %r: it cannot update" % case.kind)
        update = False
    if has_store and case.sparse_grad and case.is_custom:
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
    # One device of one machine has nothing to sum: a store by name would only copy. Any other was made to be used.
    is_alone = case.kind in ("local", "device") and not case.is_open and case.devices == 1
    return not is_alone or case.sparse_weight or case.asked is True


def _update(case: Case, has_store: bool) -> bool:
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
