"""Rules and updaters of users: imported by name on the servers, from modules that were named at launch.

Code never travels. A rule of yours is "module:Class", a class derived from `Rule`; a function is
`updater(key, received, stored)`, known as "module:name". Only modules that the job's start named are imported:
`distrun launch --server-import MODULE`, or by hand DISTRUN_SERVER_IMPORT=MODULE for every server.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from distrun_runtime.arrays.dtypes import BFLOAT16, Array, narrow, widen, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers.base import PLAIN, Knobs, Rates, Rule, State, spread
from distrun_runtime.ops.params import Json, to_json

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


def complete(name: str, params: Mapping[str, object]) -> dict[str, Json]:
    """Return the parameters of a user's rule as they are, if name and parameters can travel; nothing is imported.

    Raises:
        KVError: the name has not the form module:Class, or a parameter is not JSON.
    """
    if name == UPDATER:
        _split(UPDATER, params.get("function"))
    else:
        _split("rule", name)
    result: dict[str, Json] = {}
    for word, value in params.items():
        try:
            result[word] = to_json(value)
        except ValueError as err:
            raise KVError(f"rule {name!r}: {word}={value!r}: {err}") from None
    return result


def make(name: str, params: Mapping[str, object], imports: Sequence[str] | None) -> Rule:
    """Return the rule of a user, or the one that calls a user's function.

    Arguments:
        imports: the modules that may be imported; None for all.

    Raises:
        KVError: a module that may not or cannot be imported, no such name in it, or one that is not what it should be.
            What the module or the rule's constructor raises otherwise is not caught.
    """
    given = complete(name, params)
    if name == UPDATER:
        return _Updater(_load(UPDATER, cast(str, given["function"]), imports), given)
    found = _load("rule", name, imports)
    if not (isinstance(found, type) and issubclass(found, Rule)):
        raise KVError(f"rule {name!r}: not a class derived from distrun_runtime.ops.optimizers.Rule")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise KVError(f"rule {name!r}: the class does not define {missing}")
    rule = found(given)
    rule.name = name
    return rule


class _Updater(Rule):
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

    def start(self, weight: Array) -> State:
        """Return no state."""
        return {}

    def step(self, weight: Array, grad: Array, state: State, knobs: Knobs = PLAIN, rows: Array | None = None) -> None:
        """Call the function once."""
        self.rates(state, knobs)
        received = grad if rows is None else spread(weight, grad, rows)
        dtype = work_dtype(weight.dtype) if weight.dtype == BFLOAT16 else weight.dtype
        received = np.array(narrow(widen(received), dtype))
        stored = widen(weight) if weight.dtype == BFLOAT16 else weight
        self._function(knobs.key, received, stored)
        if stored is not weight:
            weight[...] = narrow(stored, weight.dtype)

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
        text = "%s %r: this server may not import %s, %s; start the job with --server-import %s "
        text += "(by hand: DISTRUN_SERVER_IMPORT=%s for every server)"
        raise KVError(text % (kind, name, module, allowed, module, ",".join([*imports, module])))
    try:
        there = importlib.import_module(module)
    except ModuleNotFoundError as err:
        text = "%s %r: %s; the module must be where servers look for it: %s"
        raise KVError(text % (kind, name, err, ", ".join(path or "." for path in sys.path))) from None
    if not hasattr(there, word):
        raise KVError(f"{kind} {name!r}: {module} has no {word}")
    return cast(object, getattr(there, word))
