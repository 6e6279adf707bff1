"""Which rules there are, and how one is made from its name and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Type, Union

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import params as parameters
from distrun_runtime.ops.optimizers.adaptive import (
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Ftml,
    Ftrl,
    Nadam,
    RmsProp,
    TorchAdamW,
)
from distrun_runtime.ops.optimizers.base import Rule, State
from distrun_runtime.ops.optimizers.norms import Lamb, Lars
from distrun_runtime.ops.optimizers.sgd import Dcasgd, Nag, Sgd, Sgld, Signum, Test, TorchSgd
from distrun_runtime.ops.params import Json, did_you_mean

RULES: dict[str, Type[Rule]] = {
    rule.name: rule
    for rule in (
        *(Sgd, Nag, TorchSgd, Signum, Dcasgd, Sgld),
        *(Adam, AdamW, TorchAdamW, Adamax, Nadam, RmsProp, AdaGrad, AdaDelta, Ftrl, Ftml),
        *(Lamb, Lars, Test),
    )
}
"""The built-in rules by name."""


def make(name: str, params: Mapping[str, object], imports: Sequence[str] | None = ()) -> Rule:
    """Return the rule of this name with these parameters; those not given have their defaults.

    Arguments:
        name: of a built-in rule, in any case; or "module:Class", a class derived from Rule; or "updater".
        imports: the modules from which rules and updaters may come; None for all that can be imported here.

    Raises:
        KVError: unknown name, unknown parameter, or a value that is not right; a module that may not be imported.
    """
    found = _builtin(name)
    if found is not None:
        return found(params)
    from distrun_runtime.ops.optimizers import custom

    return custom.make(name, params, imports)


def completed(name: str, params: Mapping[str, object]) -> tuple[str, dict[str, Json]]:
    """Return the name as it is written in specs and all parameters; no module is imported.

    Raises:
        KVError: as `spec_of`.
    """
    found = _builtin(name)
    if found is not None:
        return found.name, found.complete(params)
    from distrun_runtime.ops.optimizers import custom

    return name, custom.complete(name, params)


def updated(name: str, present: Mapping[str, Json], given: Mapping[str, object]) -> dict[str, Json]:
    """Return complete parameters after those of `given` have been put in place of those of `present`.

    Raises:
        KVError: as `spec_of`; or a learning rate is given while a schedule stays in place.
    """
    found = _builtin(name)
    if found is None:
        return completed(name, {**present, **given})[1]
    new = parameters.canonical(name, found.table or (), given)
    merged = {**present, **new}
    if merged.get("lr_scheduler") is not None and "lr_scheduler" not in new and "learning_rate" in new:
        text = "the learning rate comes from lr_scheduler (%s); to fix it, give lr_scheduler=None and learning_rate=%s"
        raise KVError(text % (merged["lr_scheduler"], new["learning_rate"]))
    if new.get("lr_scheduler") is not None and "learning_rate" not in new:
        del merged["learning_rate"]
    return found.complete(merged)


def carry_state(rule: Rule, weight: Array, old: State, begun: State | None = None) -> State:
    """Return the state to go on with when `rule` replaces another one whose state for this weight was `old`.

    What both know by the same name goes on (a new learning rate keeps the momentum); the rest starts anew.

    Arguments:
        begun: the rule's state for a weight that was never updated, of weights that are not in the host's memory.
    """
    fresh = rule.new_state(weight) if begun is None else begun
    return {name: old.get(name, value) for name, value in fresh.items()}


def renew_master(weight: Array, state: State) -> None:
    """Take a weight that was overwritten from outside (not by a step) into its float32 master, if it has one.

    Elements that are what their master rounds to were not changed, and keep it: what many small steps have added up
    there is not lost.
    """
    master = state.get("master")
    if isinstance(master, np.ndarray):
        kept = _bits(dtypes.narrow(master, weight.dtype)) == _bits(weight)
        np.copyto(master, dtypes.widen(weight), where=~kept)


def _bits(weight: Array) -> Array:
    return np.ascontiguousarray(weight).view(np.uint16).reshape(weight.shape)


def _builtin(name: object) -> Union[Type[Rule], None]:
    """Return the built-in rule of this name in any case, or None for the form of a user's rule.

    Raises:
        KVError: neither.
    """
    if not isinstance(name, str):
        kind = type(name).__name__
        fix = f"; fix: give {kind.lower()!r}, and its parameters by name" if kind.lower() in RULES else ""
        raise KVError(f"a rule is given by name ({', '.join(sorted(RULES))}), not as {kind}{fix}")
    found = RULES.get(name.lower())
    if found is None and ":" not in name and name != "updater":
        text = "unknown rule %r%s; known are %s"
        raise KVError(text % (name, did_you_mean(name.lower(), RULES), ", ".join(sorted(RULES))))
    return found
