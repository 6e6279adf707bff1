"""What a trainer takes as parameters, brought to one form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from distrun_runtime.errors import KVError
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.replica import is_tensor, place_of

__all__ = ["collect"]


def collect(params: object) -> list[Parameter]:
    """Return parameters in order, each once, all on as many devices.

    Arguments:
        params: a list of items, a dict of them by name (taken in order of name), or a torch module. An item is a
            Parameter, a torch tensor, a list of these for several devices, or a pair (name, one of these):
            `net.parameters()`, `net.named_parameters()`.

    Raises:
        KVError: something else; none at all; parameters on unequal numbers of devices; a name that is used twice;
            several parameters or devices in the same memory.
    """
    result: list[Parameter] = []
    seen: dict[int, Parameter] = {}
    sparse = _sparse_weights(params)
    for name, item in _items(params):
        parameter = _parameter(name, item, sparse, str(len(result)))
        source = id(parameter.data)
        if source in seen:
            continue
        seen[source] = parameter
        parameter.name = parameter.name or str(len(result))
        result.append(parameter)
    if not result:
        raise KVError("a trainer without parameters has nothing to do")
    _check(result)
    _check_memory(result)
    return result


def _check(params: list[Parameter]) -> None:
    first, names = params[0], set()
    for parameter in params:
        if len(parameter.replicas) != len(first.replicas):
            raise KVError(
                "all parameters must be on the same devices: %r is on %d, %r on %d"
                % (first.name, len(first.replicas), parameter.name, len(parameter.replicas))
            )
        if parameter.name in names:
            raise KVError("two parameters have the name %r" % parameter.name)
        names.add(parameter.name)


def _check_memory(params: list[Parameter]) -> None:
    """Return if no weight begins where another does."""
    names: dict[tuple[str, int], str] = {}
    for parameter in params:
        for place in map(place_of, parameter.list_data()):
            if place in names:
                both = (names[place], parameter.name)
                if both[0] == both[1]:
                    raise KVError("two devices of parameter %r are in the same memory" % parameter.name)
                raise KVError("parameters %r and %r are in the same memory; give one of them" % both)
            if place[1]:
                names[place] = parameter.name


def _items(params: object) -> list[tuple[str, object]]:
    if hasattr(params, "named_parameters"):
        return list(params.named_parameters())
    if isinstance(params, Mapping):
        return sorted(((str(name), item) for name, item in params.items()), key=lambda pair: pair[0])
    if not isinstance(params, Iterable) or is_tensor(params) or isinstance(params, (str, bytes, np.ndarray)):
        raise KVError("parameters are a list or dict of Parameter or torch tensors, not %s" % type(params).__name__)
    return [
        (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) else ("", item)
        for item in params
    ]


def _parameter(name: str, item: object, sparse: set[int], index: str) -> Parameter:
    if isinstance(item, Parameter):
        item.name = item.name or name
        return item
    name = name or index
    one = item[0] if isinstance(item, (list, tuple)) and item else item
    if isinstance(one, np.ndarray):
        raise KVError("parameter %r: a numpy array has no gradient; give Parameter(data, grad)" % name)
    if not is_tensor(one):
        raise KVError("parameter %r is a %s, neither Parameter nor torch tensor" % (name, type(one).__name__))
    return Parameter(item, name=name, grad_stype="row_sparse" if id(one) in sparse else "default")


def _sparse_weights(params: object) -> set[int]:
    """Return the ids of the weights of a torch module's layers that make sparse gradients."""
    modules = params.modules() if hasattr(params, "modules") and hasattr(params, "named_parameters") else ()
    return {id(one.weight) for one in modules if getattr(one, "sparse", False) is True and hasattr(one, "weight")}
