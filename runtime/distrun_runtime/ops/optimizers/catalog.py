"""Which rules there are, and how one is made from its name and parameters."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Dict, Tuple, Type, Union, cast

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.contract.dataclass import dataclass
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
from distrun_runtime.ops.optimizers.base import Key, Knobs, Rule, State
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


# A rule as it travels: its name, its parameters and the multipliers of keys. Pure; JSON both ways.


Multipliers = Tuple[Tuple[Key, float], ...]


@dataclass(frozen=True)
class RuleSpec:
    """Which rule a store has; two specs are equal if they say the same.

    `params` are complete. Multipliers are kept in one order and without those that are 1, see `of`.
    """

    name: str
    params: dict[str, Json]
    lr_mult: Multipliers = ()
    wd_mult: Multipliers = ()

    @staticmethod
    def of(name: str, params: Mapping[str, object], lr_mult: object = (), wd_mult: object = ()) -> RuleSpec:
        """Return the spec with these parameters, checked and completed.

        Arguments:
            lr_mult: a mapping from keys to numbers, or pairs of them.
            wd_mult: the same.

        Raises:
            KVError: an unknown rule or parameter, or a value or multiplier that is not right.
        """
        name, complete = completed(name, params)
        return RuleSpec(name, complete, _merged((), "lr", lr_mult), _merged((), "wd", wd_mult))

    def to_json(self) -> dict[str, Json]:
        """Return the spec as JSON."""
        return {
            "name": self.name,
            "params": dict(self.params),
            "lr_mult": [[key, number] for key, number in self.lr_mult],
            "wd_mult": [[key, number] for key, number in self.wd_mult],
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RuleSpec:
        """Return the spec of such JSON.

        Raises:
            KVError: it is none.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("params"), Mapping):
            raise KVError(f"not a rule: {value!r}")
        return RuleSpec.of(value.get("name", ""), value["params"], value.get("lr_mult", ()), value.get("wd_mult", ()))

    def knobs(self, key: Key, offset: int = 0) -> Knobs:
        """Return what this key has for itself.

        Arguments:
            offset: place of the first element in the key's value, of a weight that is a slice of it.
        """
        lr_mult, wd_mult = self._by_key
        return Knobs(lr_mult.get(key, 1.0), wd_mult.get(key, 1.0), key, offset)

    def changed(self, change: Mapping[str, Any]) -> RuleSpec:
        """Return the spec after a change: the given parameters and multipliers replace those of the same name or key.

        Arguments:
            change: {"params": {name: value}, "lr_mult": [[key, number], ...], "wd_mult": [[key, number], ...]}; each
                may be missing.

        Raises:
            KVError: an unknown parameter, a value that is not right, or a learning rate while there is a schedule.
        """
        params = updated(self.name, self.params, change.get("params") or {})
        lr_mult = _merged(self.lr_mult, "lr", change.get("lr_mult") or ())
        wd_mult = _merged(self.wd_mult, "wd", change.get("wd_mult") or ())
        return replace(self, params=params, lr_mult=lr_mult, wd_mult=wd_mult)

    @cached_property
    def _by_key(self) -> tuple[dict[Key, float], dict[Key, float]]:
        return dict(self.lr_mult), dict(self.wd_mult)


def spec_of(name: str, params: Mapping[str, object]) -> RuleSpec:
    """Return the spec of a rule, its parameters checked and completed; those of a user's rule only as JSON.

    Raises:
        KVError: unknown name, unknown parameter, or a value that is not right.
    """
    return RuleSpec.of(name, params)


def rule_of(spec: RuleSpec, imports: Sequence[str] | None = ()) -> Rule:
    """Return the rule that a spec says; `make` has the arguments and errors."""
    return make(spec.name, spec.params, imports)


def change_of(
    params: Mapping[str, object] | None = None,
    lr_mult: Mapping[Key, float] | None = None,
    wd_mult: Mapping[Key, float] | None = None,
) -> dict[str, Json]:
    """Return a change as `RuleSpec.changed` takes it, in JSON; whether it is right turns out there.

    Raises:
        KVError: a parameter that is no JSON.
    """
    result: dict[str, Json] = {"params": {}}
    for name, value in (params or {}).items():
        try:
            cast(Dict[str, Json], result["params"])[name] = parameters.to_json(value)
        except ValueError as err:
            raise KVError(f"parameter {name}={value!r}: {err}") from None
    for word, given in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
        try:
            result[word] = [
                [parameters.to_json(key), parameters.to_json(number)] for key, number in (given or {}).items()
            ]
        except ValueError as err:
            raise KVError(f"{word}: {err}") from None
    return result


def decays_by_name(rule: str, names: object) -> dict[Key, float]:
    """Return the multipliers of the weight decay that follow from names, by key and by name.

    Source: `Optimizer.set_wd_mult` of MXNet: what does not end in _weight or _gamma has no decay; under `lars`, gammas
    have none either.

    Arguments:
        names: key to name, MXNet's `param_idx2name`. A key may also be the name itself.

    Raises:
        KVError: it is something else.
    """
    is_right = isinstance(names, Mapping) and all(
        isinstance(key, (int, str)) and isinstance(name, str) for key, name in names.items()
    )
    if not is_right:
        raise KVError(
            f"param_idx2name is a dictionary from keys to names, such as {{0: 'fc_weight'}}, not {names!r:.60}"
        )
    ends = ("_weight",) if rule.lower() == "lars" else ("_weight", "_gamma")
    pairs = cast(Mapping[Key, str], names).items()
    return {each: 0.0 for key, name in pairs if not name.endswith(ends) for each in (key, name)}


def same(one: Rule | RuleSpec, other: Rule | RuleSpec) -> bool:
    """Tell whether two rules or specs are equal: same name, same parameters. Multipliers are not compared."""
    return one.name == other.name and one.params == other.params


def difference(old: Rule | RuleSpec, new: Rule | RuleSpec) -> str:
    """Return in words how `new` differs from `old`; for error messages."""
    if old.name != new.name:
        return f"{old.name}, not {new.name}"
    names = [*old.params, *(name for name in new.params if name not in old.params)]
    changed = [name for name in names if old.params.get(name) != new.params.get(name)]
    pairs = (f"{name}={old.params.get(name)}, not {new.params.get(name)}" for name in changed)
    return f"{old.name} with {', '.join(pairs)}"


def advice(wanted: Rule | RuleSpec, replace: bool | None) -> str:
    """Return what to do about a store that has another rule than the one that is `wanted`.

    Arguments:
        replace: as `KVStore.set_optimizer` was given it.
    """
    if replace is None:
        return "fix: give the trainer the store's rule, or another store"
    return f"set_optimizer({wanted.name!r}, ..., replace=True) puts another in its place"


def _merged(present: Multipliers, word: str, given: object) -> Multipliers:
    try:
        pairs = [(key, number) for key, number in (given.items() if isinstance(given, Mapping) else cast(Any, given))]
    except (TypeError, ValueError):
        raise KVError(f"{word} multipliers: expected pairs of key and number, not {given!r}") from None
    result: Dict[Key, float] = dict(present)
    for key, number in pairs:
        is_number = isinstance(number, numbers.Real) and not isinstance(number, bool)
        if not is_number or not math.isfinite(number) or number < 0:
            raise KVError(f"{word} multiplier of key {key!r}: expected a finite number at least 0, not {number!r}")
        if isinstance(key, bool) or not isinstance(key, (str, numbers.Integral)):
            raise KVError(f"{word} multiplier: {key!r} is not a key; keys are int or str")
        result[key if isinstance(key, str) else int(key)] = float(number)
    kept = [(key, number) for key, number in result.items() if number != 1.0]
    return tuple(sorted(kept, key=lambda pair: (isinstance(pair[0], str), pair[0])))
