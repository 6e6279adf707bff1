"""Recording of rules: whatever they do with their arrays is either recorded as numpy does it or refused by name."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, ClassVar
from unittest import mock

import cxx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernelcheck import FLOATS, launch, placed, same, values

from distrun_runtime.arrays.dtypes import parse
from distrun_runtime.ops import fuse
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.symbols import Untraceable

Array = npt.NDArray[Any]


# Rules of random statements. Names of arrays: w and s are the weight and its state, g the gradient, t and u others.

ONE = ("negative", "absolute", "sqrt", "sign")
TWO = ("add", "subtract", "multiply", "divide")
COMPARISONS = ("less", "less_equal", "greater", "greater_equal", "equal", "not_equal")

own, anything = st.sampled_from("wstu"), st.sampled_from("wstug")
number = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.1, 1 / 3, 1e-8, 1e30, 1e-42, 1e300, -2.5, 3, 2**40 + 1])
strong = st.sampled_from([np.float32(0.1), np.float64(0.1), np.float64(1e300), np.array(0.3), np.float32(-0.0)])
operand = st.one_of(anything, anything, number, strong)
two = st.one_of(st.tuples(anything, operand), st.tuples(operand, anything))
statement = st.one_of(
    st.tuples(st.just("new"), own, st.sampled_from(ONE), st.tuples(anything)),
    st.tuples(st.just("new"), own, st.sampled_from(TWO), two),
    st.tuples(st.just("out"), own, st.sampled_from(ONE), st.tuples(anything)),
    st.tuples(st.just("out"), own, st.sampled_from(TWO), two),
    st.tuples(st.just("in place"), own, st.sampled_from(TWO), st.tuples(operand)),
    st.tuples(st.just("operator"), own, st.sampled_from(TWO), two),
    st.tuples(st.just("compare"), own, st.sampled_from(COMPARISONS), two),
    st.tuples(st.just("copyto"), own, st.just(""), st.tuples(operand)),
    st.tuples(st.just("assign"), own, st.just(""), st.tuples(operand)),
    st.tuples(st.just("clip"), own, st.just(""), st.tuples(anything, number, number)),
    st.tuples(st.just("clip out"), own, st.just(""), st.tuples(anything, number, number)),
    st.tuples(st.just("largest"), own, st.sampled_from(["maximum", "minimum"]), st.tuples(anything, anything)),
    st.tuples(st.just("like"), own, st.just(""), st.just(())),
    st.tuples(st.just("alias"), own, st.just(""), st.tuples(own)),
    st.tuples(st.just("copy"), own, st.just(""), st.tuples(anything)),
)
Statement = Any

OPERATORS: dict[str, Callable[..., Any]] = dict(
    zip(TWO, (operator.add, operator.sub, operator.mul, operator.truediv), strict=False)
)
IN_PLACE: dict[str, Callable[..., Any]] = dict(
    zip(TWO, (operator.iadd, operator.isub, operator.imul, operator.itruediv), strict=False)
)


def execute(statements: list[Statement], w: Array, g: Array, s: Array) -> None:
    arrays: dict[str, Any] = {"w": w, "g": g, "s": s, "t": w.copy(), "u": np.zeros_like(s)}
    mask: Any = g > 0

    def value(one: Any) -> Any:
        return arrays[one] if isinstance(one, str) else one

    for kind, name, function, arguments in statements:
        given_ = [value(one) for one in arguments]
        call: Any = getattr(np, function, None)
        if kind == "new":
            arrays[name] = call(*given_)
        elif kind == "out":
            call(*given_, out=arrays[name])
        elif kind == "in place":
            arrays[name] = IN_PLACE[function](arrays[name], *given_)
        elif kind == "operator":
            arrays[name] = OPERATORS[function](*given_)
        elif kind == "compare":
            mask = call(*given_)
        elif kind == "copyto":
            np.copyto(arrays[name], given_[0], where=mask)
        elif kind == "assign":
            arrays[name][...] = given_[0]
        elif kind == "clip":
            arrays[name] = np.clip(given_[0], *sorted(given_[1:]))
        elif kind == "clip out":
            np.clip(given_[0], *sorted(given_[1:]), out=arrays[name])
        elif kind == "largest":  # of zeros of both signs numpy's choice is not defined
            arrays[name] = call(np.abs(given_[0]), np.abs(given_[1]))
        elif kind == "like":
            arrays[name] = np.zeros_like(arrays[name])
        elif kind == "alias":
            arrays[name] = given_[0]
        elif kind == "copy":
            arrays[name] = given_[0].copy()
    w += arrays["t"]  # so that it matters what is in them
    s -= arrays["u"]
    np.copyto(s, arrays["w"], where=mask)


class Scripted(rules.Rule):
    """Does the statements of its class."""

    table: ClassVar[tuple[rules.Param, ...] | None] = ()
    script: ClassVar[list[Statement]] = []

    def start(self, weight: Array) -> rules.State:
        return {"s": np.zeros_like(weight)}

    def update(self, weight: Array, grad: Array, state: rules.State, rates: rules.Rates) -> None:
        execute(self.script, weight, grad, state["s"])  # type: ignore[arg-type]


def scripted(script: list[Statement], number: int = 0) -> rules.Rule:
    name = f"script{number}"
    kind = type(name, (Scripted,), {"name": name, "script": script})
    with mock.patch.dict(rules.RULES, {name: kind}):
        return rules.make(name, {})


scripts = st.lists(
    st.tuples(st.lists(statement, min_size=6, max_size=14), st.sampled_from(FLOATS)), min_size=10, max_size=12
)
"""So many at once, because each call of the compiler takes its time."""


DOUBLE, THIRD = np.float64(1 / 3), 1 / 3
CHOSEN: list[list[Statement]] = [
    # Python's numbers have the array's type, numpy's float64 makes it calculate in double precision.
    [("operator", "t", "multiply", ("g", THIRD)), ("in place", "w", "subtract", ("t",))],
    [("operator", "t", "multiply", ("g", DOUBLE)), ("in place", "w", "subtract", ("t",))],
    [("operator", "t", "multiply", (DOUBLE, "g")), ("in place", "s", "add", ("t",)), ("in place", "w", "add", ("s",))],
    [("new", "t", "multiply", ("g", np.array(THIRD))), ("in place", "w", "multiply", ("t",))],
    [("in place", "w", "multiply", (DOUBLE,)), ("in place", "w", "add", (np.float32(THIRD),))],
    [("operator", "t", "multiply", ("g", DOUBLE)), ("operator", "t", "add", ("t", "w")), ("assign", "w", "", ("t",))],
    [("compare", "t", "less", ("w", DOUBLE)), ("copyto", "s", "", ("g",))],
    [
        ("operator", "t", "subtract", (THIRD, "g")),
        ("operator", "w", "divide", (3, "t")),
        ("in place", "s", "add", ("w",)),
    ],
    [("operator", "t", "subtract", (1.0, "g")), ("operator", "u", "divide", (THIRD, "t")), ("assign", "w", "", ("u",))],
    [("operator", "t", "subtract", (DOUBLE, "g")), ("in place", "w", "divide", ("t",))],
    [("alias", "t", "", ("w",)), ("in place", "t", "add", ("g",)), ("operator", "s", "add", ("w", "t"))],
    [("copy", "t", "", ("w",)), ("in place", "t", "add", ("g",)), ("out", "s", "add", ("w", "t"))],
    [("alias", "t", "", ("s",)), ("out", "t", "multiply", ("g", "g")), ("out", "w", "multiply", ("s", "t"))],
    [("compare", "t", "equal", ("g", 0.0)), ("copyto", "w", "", (THIRD,))],
    [("clip out", "w", "", ("g", -0.0, 0.0)), ("clip", "t", "", ("g", -1, 1e-42)), ("in place", "s", "add", ("t",))],
    [("like", "t", "", ()), ("in place", "t", "subtract", ("g",)), ("in place", "w", "add", ("t",))],
    [("operator", "t", "add", ("g", 2**40 + 1)), ("operator", "t", "subtract", ("t", 3)), ("assign", "w", "", ("t",))],
]


def test_rules_that_were_written_for_it_give_the_bytes_of_numpy() -> None:
    check_scripts([(script, "float32") for script in CHOSEN])


@settings(max_examples=4, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(scripts=scripts)
def test_a_rule_of_any_statements_gives_the_bytes_of_numpy(scripts: list[tuple[list[Statement], str]]) -> None:
    check_scripts(scripts)


def check_scripts(scripts: list[tuple[list[Statement], str]]) -> None:
    pairs = []
    for number, (script, name) in enumerate(scripts):
        rule, dtype = scripted(script, number), parse(name)
        with mock.patch.dict(rules.RULES, {rule.name: type(rule)}):
            pairs.append((rule, dtype, fuse.Fused(rule, dtype, [dtype])))
    compiled = cxx.compiled(fuse.together("scripts", [made for _, _, made in pairs]))
    random = np.random.default_rng(1)
    for rule, dtype, made in pairs:
        weight = values(random, 61, dtype, specials=True)
        state = rule.new_state(weight)
        arrays = {fuse.WEIGHT: placed(weight, 0), fuse.STATE % "s": placed(np.asarray(state["s"]), 0)}
        counted: rules.State = {"updates": 0}
        for _ in range(3):
            gradient = values(random, 61, dtype, specials=True)
            arrays[fuse.PART % 0] = placed(gradient, 0)
            rule.step(weight, gradient, state)
            launch(made.step(rule.rates(counted, rules.PLAIN)), arrays, compiled, 61)
            same(arrays[fuse.WEIGHT], weight, "weight")
            same(arrays[fuse.STATE % "s"], state["s"], "s")


# What is refused


def decides(w: Any, g: Any, s: Any) -> None:
    if g:
        w -= g


def assigns_to_one_element(w: Any, g: Any, s: Any) -> None:
    w[0] = 0.0


def writes_the_gradient(w: Any, g: Any, s: Any) -> None:
    g *= 2.0


CASES: list[tuple[Callable[[Any, Any, Any], object], str]] = [
    (decides, "it decides by values of an array"),
    (assigns_to_one_element, "it assigns to some elements; np.copyto(array, value, where=mask) can be recorded"),
    (writes_the_gradient, "it writes into the gradient, which it may only read"),
    (lambda w, g, s: np.exp(g), "it uses np.exp"),
    (lambda w, g, s: g**2, "it uses np.power"),
    (lambda w, g, s: np.sum(g), "it uses np.sum"),
    (lambda w, g, s: np.add.reduce(g), "it uses np.add.reduce"),
    (lambda w, g, s: np.add(g, w, out=np.zeros(3, np.float32)), "it writes into an array that is none of the rule's"),
    (lambda w, g, s: np.add(g, w, dtype=np.float64), "it uses np.add.__call__ with dtype"),
    (lambda w, g, s: np.multiply(g, np.ones(3, np.float32), out=w), "it calculates with a ndarray that is none of"),
    (lambda w, g, s: np.array(g), "it makes an array of numpy from an array of the rule"),
    (lambda w, g, s: np.clip(g, s, w), "it uses np.clip on integers, or with limits that are arrays"),
    (lambda w, g, s: (g > 0) + (w > 0), "it uses np.add on bool"),
    (lambda w, g, s: w + (g > 0), "it converts bool to f32"),
    (lambda w, g, s: g * 1j, "it calculates with a complex"),
    (lambda w, g, s: len(g), "object of type 'Symbol' has no len()"),
    (lambda w, g, s: float(g), "float() argument must be"),
    (lambda w, g, s: g[0], "'Symbol' object is not subscriptable"),
    (lambda w, g, s: w.shape, "'Symbol' object has no attribute 'shape'"),
]


@pytest.mark.parametrize(("code", "words"), CASES, ids=[f"{words}-{i}" for i, (_, words) in enumerate(CASES)])
def test_what_cannot_be_recorded_is_refused(code: Callable[[Any, Any, Any], object], words: str) -> None:
    rule = scripted([])
    type(rule).update = lambda self, w, g, state, rates: code(w, g, state["s"])  # type: ignore[method-assign,assignment]
    with mock.patch.dict(rules.RULES, {rule.name: type(rule)}), pytest.raises(Untraceable) as caught:
        fuse.Fused(rule, np.dtype(np.float32), [np.dtype(np.float32)])
    assert str(caught.value).startswith(f"rule 'script0' cannot be fused: {words}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.update(more=1), "it keeps other things in the state than it started with"),
        (lambda state: state.update(s=np.zeros(3)), "it puts something else in place of the state array 's'"),
        (lambda state: state.update(s=state["s"] > 0), "it puts something else in place of the state array 's'"),
    ],
)
def test_a_state_of_another_form_is_refused(change: Callable[[Any], object], words: str) -> None:
    rule = scripted([])
    type(rule).update = lambda self, w, g, state, rates: change(state)  # type: ignore[method-assign,assignment]
    with mock.patch.dict(rules.RULES, {rule.name: type(rule)}), pytest.raises(Untraceable, match=words):
        fuse.Fused(rule, np.dtype(np.float32), [np.dtype(np.float32)])


@pytest.mark.parametrize(
    ("begun", "words"),
    [
        (lambda weight: {"s": weight * 2.0}, "state 's' starts neither as zeros nor as the weight"),
    ],
)
def test_a_state_that_starts_otherwise_is_refused(begun: Callable[[Any], object], words: str) -> None:
    rule = scripted([])
    type(rule).start = lambda self, weight: begun(weight)  # type: ignore[method-assign,assignment,return-value]
    with mock.patch.dict(rules.RULES, {rule.name: type(rule)}), pytest.raises(Untraceable, match=words):
        fuse.Fused(rule, np.dtype(np.float32), [np.dtype(np.float32)])
