"""Symbolic arrays: run a rule's numpy code once and record what it calculates for each element.

A rule gets `Symbol`s in place of its arrays. Every operation on them is appended to a `RuleTrace`, with numpy's rules
for types and order. So the record has exactly the roundings that numpy would make, and `fuse` can write it as a loop.

An in-place operation gives a `Symbol` another value: all names that the rule has for this array see it, as they see
what numpy writes into it. Scalars that meet an array are recorded as places for arguments, not as numbers. The record
of the next step, with another learning rate, is therefore equal to this one.

What cannot be recorded raises `Untraceable`: decisions by values, masked assignments, shapes and single elements, sums
over elements, functions that are not rounded alike everywhere (exp, pow), and arrays that are none of the rule's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Dict, NoReturn, Tuple, Union, cast

import numpy as np

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
_WEAK = (float, int, bool)


class Untraceable(KVError):
    """Code of a rule that cannot become a kernel: what it does, and where."""


def kind_of(dtype: DType) -> str:
    """Return the name of a dtype in kernels.

    Raises:
        Untraceable: kernels have no such elements.
    """
    found = _NAMES.get(dtype)
    if found is None:
        refuse(f"it calculates with elements of type {dtype}")
    return found


def refuse(reason: str) -> NoReturn:
    """Raise `Untraceable` with a reason, naming the line of the rule that is at work."""
    raise Untraceable(f"{reason} ({_place()})")


def _place() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] != "numpy":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown place"


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


# What numpy's functions do, by name. Beside each: the kinds that it takes, and whether it says yes or no.

_ARITHMETIC, _OF_FLOATS, _COMPARISON, _TEST, _LOGIC = range(5)

_OPERATIONS: Dict[str, Tuple[str, int]] = {
    name.rpartition("=")[2]: (name.partition("=")[0], takes)
    for takes, names in (
        (_ARITHMETIC, "add subtract multiply negative positive square"),
        (_OF_FLOATS, "divide divide=true_divide sqrt reciprocal absolute absolute=fabs sign copysign maximum minimum"),
        (_COMPARISON, "less less_equal greater greater_equal equal not_equal"),
        (_TEST, "isnan isinf isfinite"),
        (_LOGIC, "logical_and logical_or logical_xor logical_not"),
        (_LOGIC, "logical_and=bitwise_and logical_or=bitwise_or logical_xor=bitwise_xor logical_not=invert"),
    )
    for name in names.split()
}


class Symbol:
    """An array in a rule's code, or an intermediate result; stands for each of its elements at once.

    Attributes:
        trace: where operations on it are recorded.
        node: its present value; None if it has none yet (`np.empty_like`).
        kind: of its elements.
        is_fixed: whether the rule may only read it.
    """

    __slots__ = ("is_fixed", "kind", "node", "trace")

    __hash__ = None  # type: ignore[assignment]  # `==` compares elements

    def __init__(self, trace: RuleTrace, node: int | None, kind: str, *, is_fixed: bool = False) -> None:
        self.trace = trace
        self.node = node
        self.kind = kind
        self.is_fixed = is_fixed

    def __repr__(self) -> str:
        return f"<Symbol {self.kind} {self.node}>"

    @property
    def dtype(self) -> DType:
        """Element type, as an array has it."""
        return KINDS[self.kind]

    def copy(self) -> Symbol:
        """Return a new array with the present value."""
        return Symbol(self.trace, self.value(), self.kind)

    def astype(self, dtype: Any, *, copy: bool = True) -> Symbol:
        """Return the value in another type."""
        kind = kind_of(np.dtype(dtype))
        return self if kind == self.kind and not copy else Symbol(self.trace, self.value(kind), kind)

    def clip(self, low: object, high: object, out: Symbol | None = None) -> Symbol:
        """Do what `np.clip` does."""
        return _clip(self, low, high, out)

    def fill(self, value: object) -> None:
        """Assign a scalar to all elements."""
        self.assign(value)

    def value(self, kind: str = "") -> int:
        """Return the node of the present value, converted to a kind if one is given."""
        if self.node is None:
            refuse("it reads an array of np.empty_like before it is written")
        if not kind or kind == self.kind:
            return self.node
        is_known = kind in _FLOATS and self.kind in ("bool", *_FLOATS)
        if not is_known:
            refuse(f"it converts {self.kind} to {kind}")
        return self.trace.add("cast", kind, self.node)

    def write(self, node: int, kind: str, casting: Any = "same_kind") -> None:
        """Take a node of a kind as the new value."""
        if self.is_fixed:
            refuse("it writes into the gradient, which it may only read")
        if kind != self.kind:
            if not np.can_cast(KINDS[kind], self.dtype, casting):
                refuse(f"it writes {kind} into an array of {self.kind}")
            node = Symbol(self.trace, node, kind).value(self.kind)
        self.node = node

    def assign(self, value: object, casting: Any = "unsafe") -> None:
        """Copy another array or a scalar into this one."""
        if isinstance(value, Symbol):
            self.write(value.value(), value.kind, casting)
        else:
            self.write(self.trace.scalar(_scalar(value), self.kind), self.kind)

    # --- numpy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **options: object) -> Symbol:
        """Record a call of a ufunc."""
        name: str = ufunc.__name__
        if method != "__call__":
            refuse(f"it uses np.{name}.{method}")
        out = options.pop("out", None)
        if options:
            which = ", ".join(f"{word}=" for word in options)
            hint = "; np.where and np.copyto(..., where=) can be recorded" if "where" in options else ""
            refuse(f"it uses np.{name} with {which}{hint}")
        return apply(name, inputs, out[0] if isinstance(out, tuple) else out)

    def __array_function__(self, function: Any, types: object, args: Any, options: Any) -> object:
        """Record a call of another function of numpy."""
        known = _FUNCTIONS.get(function)
        if known is None:
            refuse(f"it uses np.{function.__name__}")
        return known(*args, **options)

    # --- elements

    def __getitem__(self, place: object) -> Symbol:
        """Return the array itself for `x[...]` and `x[:]`."""
        if not _is_whole(place):
            refuse("it picks elements by their place or by a mask")
        return self

    def __setitem__(self, place: object, value: object) -> None:
        """Assign to all elements."""
        if isinstance(place, Symbol):
            refuse("it assigns under a mask; np.copyto(array, value, where=mask) can be recorded")
        if not _is_whole(place):
            refuse("it assigns to elements by their place")
        if value is not self:  # what `x[...] += y` ends with
            self.assign(value)

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what depends on shape, memory or all elements."""
        if name.startswith("_"):  # numpy looks whether there are protocols
            raise AttributeError(name)
        refuse(f"it uses .{name} of an array")

    def _number(self) -> NoReturn:
        refuse("it takes an array as one number")

    def _places(self) -> NoReturn:
        refuse("it goes over an array's elements, or asks for their number")

    def _decision(self) -> NoReturn:
        refuse("it decides by values of an array")

    def __array__(self, *args: object, **options: object) -> NoReturn:
        """Refuse to be numbers."""
        refuse("it makes an array of numpy from an array of the rule")

    __bool__ = _decision
    __float__ = __int__ = __index__ = __complex__ = _number
    __len__ = __iter__ = _places

    def __pow__(self, exponent: object) -> Symbol:
        """Square or root, as numpy does for these exponents."""
        if isinstance(exponent, _WEAK) and exponent in (2, 0.5) and self.kind in _FLOATS:
            return apply("square" if exponent == 2 else "sqrt", (self,))
        refuse("it uses ** with an exponent that is not 2 or 0.5, which is not rounded alike everywhere")

    def __ipow__(self, exponent: object) -> Symbol:
        """Square or root in place."""
        result = self.__pow__(exponent)
        self.write(result.value(), result.kind)
        return self

    def __rpow__(self, base: object) -> NoReturn:
        """Refuse powers."""
        refuse("it uses np.power, which is not rounded alike everywhere")


def _unary(name: str) -> Callable[[Symbol], Symbol]:
    return lambda self: apply(name, (self,))


def _binary(name: str) -> Callable[[Symbol, object], Symbol]:
    return lambda self, other: apply(name, (self, other))


def _reflected(name: str) -> Callable[[Symbol, object], Symbol]:
    return lambda self, other: apply(name, (other, self))


def _in_place(name: str) -> Callable[[Symbol, object], Symbol]:
    return lambda self, other: apply(name, (self, other), self)


for _word, _name in (
    *(("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("truediv", "divide")),
    *(("and", "bitwise_and"), ("or", "bitwise_or"), ("xor", "bitwise_xor")),
    *(("floordiv", "floor_divide"), ("mod", "remainder"), ("matmul", "matmul")),
):
    setattr(Symbol, f"__{_word}__", _binary(_name))
    setattr(Symbol, f"__r{_word}__", _reflected(_name))
    setattr(Symbol, f"__i{_word}__", _in_place(_name))
for _word, _name in (
    *(("lt", "less"), ("le", "less_equal"), ("gt", "greater"), ("ge", "greater_equal")),
    *(("eq", "equal"), ("ne", "not_equal")),
):
    setattr(Symbol, f"__{_word}__", _binary(_name))
for _word, _name in (("neg", "negative"), ("pos", "positive"), ("abs", "absolute"), ("invert", "invert")):
    setattr(Symbol, f"__{_word}__", _unary(_name))


def apply(name: str, inputs: tuple[object, ...], out: object = None) -> Symbol:
    """Record a ufunc by its name in numpy.

    Arguments:
        inputs: arrays and scalars, at least one array.
        out: the array that takes the result; None: a new one.

    Raises:
        Untraceable: it cannot be recorded for these inputs.
    """
    known = _OPERATIONS.get(name)
    if known is None:
        refuse(f"it uses np.{name}")
    operation, takes = known
    trace, kind = _common(inputs)
    if kind not in _FLOATS or takes == _LOGIC:
        is_known = kind == "bool" if takes == _LOGIC else kind != "bool" and takes in (_ARITHMETIC, _COMPARISON)
        if not is_known:
            refuse(f"it uses np.{name} on {kind}")
    result = "bool" if takes >= _COMPARISON else kind
    node = trace.add(operation, result, *_nodes(trace, inputs, kind))
    if out is None:
        return Symbol(trace, node, result)
    if not isinstance(out, Symbol):
        refuse("it writes into an array that is none of the rule's")
    out.write(node, result)
    return out


def _nodes(trace: RuleTrace, inputs: tuple[object, ...], kind: str) -> list[int]:
    """Return the nodes of inputs after their conversion to a kind."""
    result = []
    for each in inputs:  # the usual cases first: a rule is recorded at each step
        if type(each) is float:
            result.append(trace.scalar(each, kind))
        elif isinstance(each, Symbol):
            result.append(each.value(kind) if each.kind != kind or each.node is None else each.node)
        else:
            result.append(trace.scalar(_scalar(each), kind))
    return result


def _common(inputs: tuple[object, ...], trace: RuleTrace | None = None) -> tuple[RuleTrace, str]:
    """Return the kind that numpy calculates in: Python's numbers have that of the arrays, others have their own."""
    kind, is_plain = "", True
    for each in inputs:
        if type(each) is Symbol:
            is_plain = is_plain and kind in ("", each.kind)
            trace, kind = each.trace, each.kind
        elif type(each) is not float:
            is_plain = False
    if trace is None:
        refuse("it calculates without an array of its own")
    if not is_plain or kind not in _FLOATS:  # what numpy says; Python's numbers are weak
        kind = kind_of(np.result_type(*(each.dtype if isinstance(each, Symbol) else _scalar(each) for each in inputs)))
    return trace, kind


def _scalar(value: object) -> Scalar:
    if isinstance(value, (float, int, np.generic)):
        return value
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            return cast(Scalar, value[()])
        refuse(f"it uses an array of numpy of shape {value.shape}, which is none of the rule's")
    refuse(f"it calculates with an object of type {type(value).__name__}")


def _is_whole(place: object) -> bool:
    return place is Ellipsis or (isinstance(place, slice) and place == slice(None))


# Functions of numpy that are no ufuncs


def _clip(array: object, a_min: object = None, a_max: object = None, out: object = None, **options: object) -> Symbol:
    low, high = options.pop("min", a_min), options.pop("max", a_max)
    if options:
        refuse(f"it uses np.clip with {', '.join(options)}")
    if low is None or high is None:
        if low is None and high is None:
            refuse("it uses np.clip without limits")
        return apply("minimum" if low is None else "maximum", (array, high if low is None else low), out)
    if not isinstance(array, Symbol) or isinstance(low, Symbol) or isinstance(high, Symbol):
        refuse("it uses np.clip with limits that are arrays; np.minimum and np.maximum can be recorded")
    inputs = (array, low, high)
    trace, kind = _common(inputs)
    if kind not in _FLOATS:
        refuse(f"it uses np.clip on {kind}")
    result = Symbol(trace, None, kind) if out is None else out
    if not isinstance(result, Symbol):
        refuse("it writes into an array that is none of the rule's")
    result.write(trace.add("clip", kind, *_nodes(trace, inputs, kind)), kind)
    return result


def _where(condition: object, *values: object) -> Symbol:
    if not isinstance(condition, Symbol) or condition.kind != "bool" or len(values) != 2:
        refuse("it uses np.where without a condition of elements and two values")
    trace, kind = _common(values, condition.trace)
    return Symbol(trace, trace.add("where", kind, condition.value(), *_nodes(trace, values, kind)), kind)


def _copyto(dst: object, src: object, casting: str = "same_kind", where: object = True) -> None:
    if not isinstance(dst, Symbol):
        refuse("it writes into an array that is none of the rule's")
    if where is True:
        dst.assign(src, casting)
        return
    if not isinstance(where, Symbol) or where.kind != "bool":
        refuse("it uses np.copyto with a mask that is none of the rule's")
    given = Symbol(dst.trace, None, dst.kind)
    given.assign(src, casting)
    dst.write(dst.trace.add("where", dst.kind, where.value(), given.value(), dst.value()), dst.kind)


def _like(fill: object) -> Callable[..., Symbol]:
    def make(array: Symbol, fill_value: object = fill, dtype: Any = None, **options: object) -> Symbol:
        if set(options) - {"order", "subok"}:
            refuse(f"it makes an array with {', '.join(options)}")
        result = Symbol(array.trace, None, array.kind if dtype is None else kind_of(np.dtype(dtype)))
        if fill_value is not None:
            result.assign(fill_value)
        return result

    if fill is not None:
        return lambda array, dtype=None, **options: make(array, fill, dtype, **options)
    return make


_FUNCTIONS: Dict[Any, Callable[..., Any]] = {
    np.clip: _clip,
    np.where: _where,
    np.copyto: _copyto,
    np.zeros_like: _like(0),
    np.ones_like: _like(1),
    np.empty_like: lambda prototype, dtype=None, **options: _like(None)(prototype, None, dtype, **options),
    np.full_like: _like(None),
    np.copy: lambda array, **options: array.copy(),
}
