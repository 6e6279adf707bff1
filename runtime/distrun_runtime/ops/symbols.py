"""Symbolic arrays: run a rule's numpy code once and record what it calculates for each element.

A rule gets `Symbol`s in place of its arrays. Every operation on them is appended to a `RuleTrace`, with numpy's rules
for types and order. So the record has exactly the roundings that numpy would make, and `fuse` can write it as a loop.

An in-place operation gives a `Symbol` another value: all names that the rule has for this array see it, as they see
what numpy writes into it. Scalars that meet an array are recorded as places for arguments, not as numbers. The record
of the next step, with another learning rate, is therefore equal to this one.

What distrun's own rules use is recorded, and they all are, by the tests. Of everything else nothing is: a decision by
values, masked assignments, shapes and single elements, sums over elements, functions that are not rounded alike
everywhere (exp, pow), arrays that are none of the rule's own. It raises `Untraceable` or another error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Dict, NoReturn, Tuple, Union, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from distrun_runtime.arrays.dtypes import BFLOAT16, DType
from distrun_runtime.errors import KVError

Node = Tuple[str, str, Tuple[int, ...]]
"""Operation, kind of the result, and the numbers of the nodes that are its arguments."""

Scalar = Union[float, int, bool, np.generic]
"""What may meet an array besides other arrays."""

KINDS: Dict[str, DType] = {
    **{"f32": np.dtype(np.float32), "f64": np.dtype(np.float64), "f16": np.dtype(np.float16), "bf16": BFLOAT16},
    **{f"{letter}{bits}": np.dtype(f"{letter}{bits // 8}") for letter in "iu" for bits in (8, 16, 32, 64)},
    "bool": np.dtype(np.bool_),
}
"""Kinds of elements by their name in kernels."""

_NAMES = {dtype: kind for kind, dtype in KINDS.items()}
_FLOATS = ("f32", "f64")
_OF_NUMBERS = ("add", "subtract", "multiply", "negative")
_COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")
_OF_FLOATS = ("divide", "sqrt", "absolute", "sign", "maximum", "minimum", *_COMPARISONS)


class Untraceable(KVError):
    """Code of a rule that cannot become a kernel, and why."""


def kind_of(dtype: DType) -> str:
    """Return the name of a dtype in kernels.

    Raises:
        Untraceable: kernels have no such elements.
    """
    found = _NAMES.get(dtype)
    if found is None:
        raise Untraceable(f"it calculates with elements of type {dtype}")
    return found


class RuleTrace:
    """The record of one run of a rule.

    Attributes:
        nodes: in order; a node's arguments come before it. Equal nodes and arrays mean the same calculation.
        arrays: names of the nodes whose operation is "load", in their order.
        scalars: values of the nodes whose operation is "scalar", in their order.
    """

    __slots__ = ("arrays", "nodes", "scalars")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.arrays: list[str] = []
        self.scalars: list[Scalar] = []

    def load(self, name: str, kind: str) -> int:
        """Return the number of the node that is an element of the array `name`."""
        self.arrays.append(name)
        return self.add("load", kind)

    def add(self, operation: str, kind: str, *arguments: int) -> int:
        """Append a node and return its number."""
        self.nodes.append((operation, kind, arguments))
        return len(self.nodes) - 1

    def scalar(self, value: Scalar, kind: str) -> int:
        """Return the number of a node that is an argument of this kind."""
        self.scalars.append(value)
        return self.add("scalar", kind)


@dataclass(eq=False)
class Symbol(NDArrayOperatorsMixin):
    """An array in a rule's code, or an intermediate result; stands for each of its elements at once.

    Attributes:
        trace: where operations on it are recorded.
        node: its present value.
        kind: of its elements.
        is_fixed: whether the rule may only read it.
    """

    trace: RuleTrace
    node: int
    kind: str
    is_fixed: bool = False

    @property
    def dtype(self) -> DType:
        """Element type, as an array has it."""
        return KINDS[self.kind]

    def copy(self) -> Symbol:
        """Return a new array with the present value."""
        return Symbol(self.trace, self.node, self.kind)

    def value(self, kind: str) -> int:
        """Return the node of the present value, converted to a kind."""
        if kind == self.kind:
            return self.node
        if kind not in _FLOATS or self.kind not in _FLOATS:
            raise Untraceable(f"it converts {self.kind} to {kind}")
        return self.trace.add("cast", kind, self.node)

    def write(self, node: int, kind: str) -> None:
        """Take a node of a kind as the new value."""
        if self.is_fixed:
            raise Untraceable("it writes into the gradient, which it may only read")
        self.node = Symbol(self.trace, node, kind).value(self.kind)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **options: Any) -> Symbol:
        """Record a call of a ufunc."""
        (out,) = options.pop("out", (None,))
        if method != "__call__" or options:
            raise Untraceable(f"it uses np.{ufunc.__name__}.{method} with {', '.join(options) or 'nothing else'}")
        return apply(ufunc.__name__, inputs, out)

    def __array_function__(self, function: Any, types: object, args: Any, options: Any) -> object:
        """Record a call of another function of numpy."""
        if function not in _FUNCTIONS:
            raise Untraceable(f"it uses np.{function.__name__}")
        return _FUNCTIONS[function](*args, **options)

    def __setitem__(self, place: object, value: object) -> None:
        """Assign to all elements: `x[...] = y`."""
        if place is not Ellipsis:
            raise Untraceable("it assigns to some elements; np.copyto(array, value, where=mask) can be recorded")
        _copyto(self, value)

    def __bool__(self) -> NoReturn:
        """Refuse a decision."""
        raise Untraceable("it decides by values of an array")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse to be numbers."""
        raise Untraceable("it makes an array of numpy from an array of the rule")


def apply(name: str, inputs: tuple[object, ...], out: object = None) -> Symbol:
    """Record a ufunc by its name in numpy.

    Arguments:
        inputs: arrays and scalars, at least one array.
        out: the array that takes the result; None: a new one.

    Raises:
        Untraceable: it cannot be recorded for these inputs.
    """
    trace, kind = _common(inputs)
    if kind == "bool" or (name not in _OF_NUMBERS and (name not in _OF_FLOATS or kind not in _FLOATS)):
        raise Untraceable(f"it uses np.{name} on {kind}")
    return _result("bool" if name in _COMPARISONS else kind, name, trace, _nodes(trace, inputs, kind), out)


def _result(kind: str, operation: str, trace: RuleTrace, nodes: list[int], out: object) -> Symbol:
    """Return the array with an operation's result: `out`, or a new one."""
    node = trace.add(operation, kind, *nodes)
    if out is None:
        return Symbol(trace, node, kind)
    if not isinstance(out, Symbol):
        raise Untraceable("it writes into an array that is none of the rule's")
    out.write(node, kind)
    return out


def _nodes(trace: RuleTrace, inputs: tuple[object, ...], kind: str) -> list[int]:
    """Return the nodes of inputs after their conversion to a kind."""
    return [
        each.value(kind) if isinstance(each, Symbol) else trace.scalar(_scalar(each), kind)
        for each in inputs  # a rule is recorded at each step
    ]


def _common(inputs: tuple[object, ...]) -> tuple[RuleTrace, str]:
    """Return the kind that numpy calculates in: Python's numbers have that of the arrays, others have their own."""
    arrays = [each for each in inputs if isinstance(each, Symbol)]
    if not arrays:
        raise Untraceable("it calculates without an array of its own")
    kind = arrays[0].kind
    others = [each for each in inputs if type(each) is not float and not (type(each) is Symbol and each.kind == kind)]
    if others or kind not in _FLOATS:  # what numpy says; Python's numbers are weak
        kind = kind_of(np.result_type(*(each.dtype if isinstance(each, Symbol) else _scalar(each) for each in inputs)))
    return arrays[0].trace, kind


def _scalar(value: object) -> Scalar:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return cast(Scalar, value[()])
    if not isinstance(value, (float, int, np.generic)):
        raise Untraceable(f"it calculates with a {type(value).__name__} that is none of the rule's arrays")
    return value


# Functions of numpy that are no ufuncs


def _clip(array: Symbol, low: object, high: object, out: object = None) -> Symbol:
    inputs = (array, low, high)
    trace, kind = _common(inputs)
    if kind not in _FLOATS or isinstance(low, Symbol) or isinstance(high, Symbol):
        raise Untraceable("it uses np.clip on integers, or with limits that are arrays")
    return _result(kind, "clip", trace, _nodes(trace, inputs, kind), out)


def _copyto(array: Symbol, value: object, where: Symbol | None = None) -> None:
    (node,) = _nodes(array.trace, (value,), array.kind)
    array.write(
        node if where is None else array.trace.add("where", array.kind, where.node, node, array.node), array.kind
    )


_FUNCTIONS: Dict[Any, Callable[..., Any]] = {
    np.clip: _clip,
    np.copyto: _copyto,
    np.copy: Symbol.copy,
    np.zeros_like: lambda array: Symbol(array.trace, array.trace.scalar(0, array.kind), array.kind),
}
