"""Which rules there are, and how one is made from its name and parameters.

Code never travels. A rule of a user is "module:Class", a class derived from `Rule`; a function is
`updater(key, received, stored)`, known as "module:name". Only modules that the job's start named are imported:
`distrun launch --server-import MODULE`, or by hand DISTRUN_SERVER_IMPORT=MODULE for every server.
"""

from __future__ import annotations

import importlib
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
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
)
from distrun_runtime.ops.optimizers.base import PLAIN, Key, Knobs, Rates, Rule, State, spread
from distrun_runtime.ops.optimizers.norms import Lamb, Lars
from distrun_runtime.ops.optimizers.sgd import Dcasgd, Nag, Sgd, Sgld, Signum, Test
from distrun_runtime.ops.optimizers.torchs import TorchAdam, TorchAdamW, TorchRmsProp, TorchSgd
from distrun_runtime.ops.params import Json, did_you_mean

RULES: dict[str, Type[Rule]] = {
    rule.name: rule
    for rule in (
        *(Sgd, Nag, Signum, Dcasgd, Sgld),
        *(Adam, AdamW, Adamax, Nadam, RmsProp, AdaGrad, AdaDelta, Ftrl, Ftml),
        *(Lamb, Lars, Test),
        *(TorchSgd, TorchAdam, TorchAdamW, TorchRmsProp),
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
    return _make_custom(name, params, imports)


def completed(name: str, params: Mapping[str, object]) -> tuple[str, dict[str, Json]]:
    """Return the name as it is written in specs and all parameters; no module is imported.

    Raises:
        KVError: as `RuleSpec.of`.
    """
    found = _builtin(name)
    if found is None:
        return name, _complete_custom(name, params)
    try:
        return found.name, found.complete(params)
    except KVError as err:
        torchs = f"torch_{found.name}"
        if _takes(torchs, params):
            raise KVError(f"{err}. fix: use {torchs!r}, which has torch's parameters and arithmetic") from None
        raise


def _takes(name: str, params: Mapping[str, object]) -> bool:
    """Return whether there is a built-in rule of this name that these parameters are right for."""
    try:
        RULES[name].complete(params)
    except (KeyError, KVError):
        return False
    return True


def updated(name: str, present: Mapping[str, Json], given: Mapping[str, object]) -> dict[str, Json]:
    """Return complete parameters after those of `given` have been put in place of those of `present`.

    Raises:
        KVError: as `RuleSpec.of`; or a learning rate is given while a schedule stays in place.
    """
    found = _builtin(name)
    if found is None:
        return completed(name, {**present, **given})[1]
    new = parameters.canonical(f"rule {name!r}", found.table or (), given)
    merged = {**present, **new}
    if merged.get("lr_scheduler") is not None and "lr_scheduler" not in new and "learning_rate" in new:
        raise KVError(
            f"the learning rate comes from lr_scheduler ({merged['lr_scheduler']}); to fix it, give lr_scheduler=None"
            f" and learning_rate={new['learning_rate']}"
        )
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
        near = did_you_mean(name.lower(), RULES)
        raise KVError(f"unknown rule {name!r}{near}; known are {', '.join(sorted(RULES))}")
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
    result: dict[str, Json] = {
        "params": {name: _json(f"parameter {name}={value!r}", value) for name, value in (params or {}).items()}
    }
    for word, given in (("lr_mult", lr_mult), ("wd_mult", wd_mult)):
        result[word] = [[_json(word, key), _json(word, number)] for key, number in (given or {}).items()]
    return result


def _json(what: str, value: object) -> Json:
    """Return a value as JSON; `what` it is, for the message."""
    try:
        return parameters.to_json(value)
    except ValueError as err:
        raise KVError(f"{what}: {err}") from None


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


def agreed(present: RuleSpec | None, wanted: RuleSpec, replace: bool | None, who: str = "") -> RuleSpec:
    """Return the rule of a store for which one is wanted: the present one if they are equal but for multipliers.

    Arguments:
        replace: as `KVStore.set_optimizer` was given it.
        who: who has set the present one and who wants the other, for the message.

    Raises:
        KVError: the store has another rule, which is to stay.
    """
    if present is None:
        return wanted
    if present.name == wanted.name and present.params == wanted.params:
        return present
    if not replace:
        fix = f"set_optimizer({wanted.name!r}, ..., replace=True) puts another in its place"
        if replace is None:
            fix = "fix: give the trainer the store's rule, or another store"
        raise KVError(f"the store has the rule {difference(present, wanted)}{who}; {fix}")
    return wanted


def difference(old: Rule | RuleSpec, new: Rule | RuleSpec) -> str:
    """Return in words how `new` differs from `old`; for error messages."""
    if old.name != new.name:
        return f"{old.name}, not {new.name}"
    names = [*old.params, *(name for name in new.params if name not in old.params)]
    changed = [name for name in names if old.params.get(name) != new.params.get(name)]
    pairs = (f"{name}={old.params.get(name)}, not {new.params.get(name)}" for name in changed)
    return f"{old.name} with {', '.join(pairs)}"


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


# Rules and updaters of users: imported by name on the servers, from modules that were named at launch.

UPDATER = "updater"
"""The name of the rule that calls a user's function; its one parameter is `function`."""

Function = Callable[[Any, Array, Array], object]


def importable(function: object) -> str:
    """Return "module:name" of a function that servers can import; `sys.modules` is looked at, nothing is imported.

    Raises:
        KVError: a lambda, a nested function, a method, a function of `__main__` or something else; with the fix.
    """
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "") or ""
    if not inspect.isroutine(function):
        kind = f"no function but an object of type {type(function).__name__}"
    elif name == "<lambda>":
        kind = "a lambda"
    elif "<locals>" in name:
        kind = "defined inside another function"
    elif "." in name or inspect.ismethod(function):
        kind = "a method"
    elif module == "__main__":
        kind = "of the script itself"
    elif getattr(sys.modules.get(module), name, None) is not function:
        kind = f"not what {module}.{name} is"
    else:
        return f"{module}:{name}"
    fix = "put a function into a module of its own, say updates.py, import it from there, and start the job with "
    fix += "--server-import updates (by hand: DISTRUN_SERVER_IMPORT=updates for every server)"
    raise KVError(f"updater {name or function} cannot be imported by the servers, it is {kind}: {fix}")


def _complete_custom(name: str, params: Mapping[str, object]) -> dict[str, Json]:
    """Return the parameters of a user's rule as they are, if name and parameters can travel; nothing is imported.

    Raises:
        KVError: the name has not the form module:Class, or a parameter is not JSON.
    """
    if name == UPDATER:
        _split(UPDATER, params.get("function"))
    else:
        _split("rule", name)
    return {word: _json(f"rule {name!r}: {word}={value!r}", value) for word, value in params.items()}


def _make_custom(name: str, params: Mapping[str, object], imports: Sequence[str] | None) -> Rule:
    """Return the rule of a user, or the one that calls a user's function.

    Arguments:
        imports: the modules that may be imported; None for all.

    Raises:
        KVError: a module that may not or cannot be imported, no such name in it, or one that is not what it should be.
            What the module or the rule's constructor raises otherwise is not caught.
    """
    given = _complete_custom(name, params)
    if name == UPDATER:
        return UpdaterRule(_load(UPDATER, cast(str, given["function"]), imports), given)
    found = _load("rule", name, imports)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise KVError(f"rule {name!r}: not a class derived from distrun_runtime.ops.optimizers.Rule")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise KVError(f"rule {name!r}: the class does not define {missing}")
    rule = found(given)
    rule.name = name
    return rule


class UpdaterRule(Rule):
    """Calls `function(key, received, stored)`, which changes `stored` in place.

    `stored` is the value, or on a server a flat slice of it, in its own dtype (float32 for bfloat16); `received` is
    the function's own, alike in shape and dtype. Rows that a row-sparse gradient does not have are 0.
    """

    name = UPDATER

    def __init__(self, function: object, params: Mapping[str, Json]) -> None:
        super().__init__(params)
        if not callable(function):
            raise KVError(f"updater {params['function']!r}: not a function (key, received, stored)")
        self._function = cast(Function, function)

    def check(self, dtype: np.dtype[Any]) -> None:
        """Return: a function takes what it takes."""

    def step(self, weight: Array, grad: Array, state: State, knobs: Knobs = PLAIN, rows: Array | None = None) -> None:
        """Call the function once."""
        self.rates(state, knobs)  # It counts the updates.
        received = grad if rows is None else spread(weight, grad, rows)
        dtype = dtypes.work_dtype(weight.dtype) if weight.dtype == dtypes.BFLOAT16 else weight.dtype
        received = np.array(dtypes.narrow(dtypes.widen(received), dtype))
        stored = dtypes.widen(weight) if weight.dtype == dtypes.BFLOAT16 else weight
        self._function(knobs.key, received, stored)
        if stored is not weight:
            weight[...] = dtypes.narrow(stored, weight.dtype)

    def update(self, weight: Array, grad: Array, state: State, rates: Rates) -> None:
        """Not used: `step` calls the function itself."""
        raise NotImplementedError


def _split(kind: str, name: object) -> tuple[str, str]:
    words = name.split(":") if isinstance(name, str) else []
    parts = [*words[0].split("."), words[1]] if len(words) == 2 else [""]
    if not all(part.isidentifier() for part in parts):
        raise KVError(f'{kind} {name!r}: expected "module:{"name" if kind == UPDATER else "Class"}"')
    return words[0], words[1]


def _load(kind: str, name: str, imports: Sequence[str] | None) -> object:
    module, word = _split(kind, name)
    if imports is not None and module not in imports:
        allowed = f"it was started with {', '.join(imports)}" if imports else "it was started with none"
        raise KVError(
            f"{kind} {name!r}: this server may not import {module}, {allowed}; start the job with --server-import"
            f" {module} (by hand: DISTRUN_SERVER_IMPORT={','.join([*imports, module])} for every server)"
        )
    try:
        there = importlib.import_module(module)
    except ModuleNotFoundError as err:
        places = ", ".join(path or "." for path in sys.path)
        raise KVError(f"{kind} {name!r}: {err}; the module must be where servers look for it: {places}") from None
    if not hasattr(there, word):
        raise KVError(f"{kind} {name!r}: {module} has no {word}")
    return cast(object, getattr(there, word))
