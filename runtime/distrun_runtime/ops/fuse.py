"""Makes one kernel of a rule: what a step does to each element, written as C from the rule's own numpy code.

`Fused(rule, dtype, parts)` is a rule for weights of one dtype. Its `step(rates)` runs `Rule.update` with symbolic
arrays (`symbols`) and returns the kernel that does the same, with the step's numbers as arguments. The kernel does what
`update.step` does on a CPU: it adds up the gradient's parts, first to last, widens 16-bit floats, updates weight and
state, and rounds the weight once. The results are the same bits, except for the payloads of NaN.

Kernels are cached by structure: another learning rate or number of updates is another argument of the same kernel. Only
a decision in the rule, such as `if rates.wd`, gives another structure. The ones to expect are in `Fused.program`, to be
compiled before the first step. Each goes over a list of weights that take the same step.

Only built-in rules are fused. Rules and updaters of users run on a CPU, because nothing proves that a recorded run of
them says everything. Of the built-in rules these are not fused:

* `lamb` and `lars`, which need norms over the whole value;
* `sgld`, which draws a random number for each element by its place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Dict, List, Tuple, cast

import numpy as np

from distrun_runtime.arrays.cuda import Read, Update, Use, Write
from distrun_runtime.arrays.dtypes import Array, DType, name_of, work_dtype
from distrun_runtime.arrays.gpu_programs import Access, Kernel, KernelParameter, Program, program
from distrun_runtime.ops.optimizers import RULES, NormRule, Rates, Rule, State
from distrun_runtime.ops.symbols import KINDS, Node, RuleTrace, Symbol, Untraceable, apply, kind_of

Outputs = Tuple[Tuple[str, int], ...]
"""Arrays that get a new value, by the parameter's name, and the node of that value."""

WEIGHT, PART, STATE = "weight", "part_%d", "state_%s"
"""Names of a kernel's arrays: of the weight, of a part of the gradient by its number, of a state array by its name."""


TABLE = KernelParameter("table", "u8", Access.TABLE)
"""Of a list of weights: the addresses of the first array of each weight, then of the second ones, and so on."""
OFFSETS, TENSORS = KernelParameter("offsets", "i64", Access.READ), KernelParameter("tensors", "i64", Access.SCALAR)
"""Weight t has the elements from offsets[t] to before offsets[t + 1] of the list; and how many weights there are."""

_PIECE_BYTES = 8192
"""Of the finest array of a list, that a block goes over before it takes others: it divides by all runs of 16 bytes."""
_RECENT = 64
"""Steps that are remembered; keys may differ in their multipliers and numbers of updates."""


USES: Dict[Access, Use] = {Access.READ: Read, Access.WRITE: Write, Access.UPDATE: Update}
"""What a step does with an array, by how the kernel's parameter says it."""


@dataclass(frozen=True)
class StateArray:
    """One array of a weight's state, of the weight's length."""

    name: str
    dtype: DType
    is_weight: bool
    """Whether it starts as a copy of the weight, widened; otherwise it starts as zeros."""


@dataclass(frozen=True, eq=False)
class FusedStep:
    """What to launch for one step of weights, or of any runs of their elements."""

    program: Program
    kernel: Kernel
    """For a list of weights: `gpu.ListLaunch` takes it."""
    arrays: tuple[KernelParameter, ...]
    """The columns of its table, named `WEIGHT`, `PART % number` and `STATE % name`; those that the step does not need
    are missing."""
    scalars: tuple[np.generic, ...]
    """In the order of the kernel's parameters, each of its parameter's type."""


@dataclass(frozen=True)
class _Code:
    kernel: Kernel
    arrays: tuple[KernelParameter, ...]
    body: str
    places: tuple[int, ...]
    """Which of the recorded scalars are the kernel's arguments."""


def why_not(rule: Rule) -> str:
    """Return why a rule's steps cannot be made by a kernel, whatever their dtype; "" if they can."""
    if RULES.get(rule.name) is not type(rule):
        return f"rule {rule.name!r} is not one of distrun's own"
    if isinstance(rule, NormRule):
        return f"rule {rule.name!r} needs norms over the whole value"
    if not rule.is_elementwise:
        return f"rule {rule.name!r} depends on the place of each element"
    return ""


class _WatchedRates:
    """Rates that say whether the number of updates was asked for."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self.reads_updates = False

    def __getattr__(self, name: str) -> Any:
        self.reads_updates |= name == "updates"
        return getattr(self._rates, name)


class Fused:
    """The kernels of a rule for weights of one dtype. Threads may share it."""

    def __init__(self, rule: Rule, dtype: DType, parts: Sequence[DType]) -> None:
        """Record the rule's steps; nothing is compiled here.

        Arguments:
            dtype: of the weight.
            parts: of the gradient's parts, at least one: the weight's dtype or its work dtype.

        Raises:
            Untraceable: the rule cannot be fused; says why.
            KVError: the rule has no weights of this dtype.
        """
        reason = why_not(rule)
        if reason:
            raise Untraceable(f"cannot fuse: {reason}")
        rule.check(dtype)
        work = work_dtype(dtype)
        for each in parts:
            if each not in (dtype, work):
                text = f"a gradient of {name_of(each)} for a weight of {name_of(dtype)}: expected its dtype"
                raise Untraceable(text + ("" if work == dtype else f" or {name_of(work)}"))
        self.rule = rule
        self._kind = kind_of(dtype)
        self._kinds = tuple(kind_of(each) for each in parts)
        self._has_master = bool(rule.params.get("multi_precision")) and work != dtype
        self.states = self._started()
        """The state's arrays, in the order of `Rule.new_state`."""
        self._codes: Dict[Tuple[Tuple[Node, ...], Outputs], _Code] = {}
        self._programs: Dict[str, Program] = {}
        self._recent: Dict[Tuple[float, float, float, int], FusedStep] = {}
        self._counts = False
        """Whether a step depends on the number of updates."""
        self._expected = self._steps_to_expect()
        self.program = together(f"{rule.name}_{self._kind}", [self])
        """The kernels of all steps that the rule's parameters let expect, whatever a key's multipliers are."""

    def step(self, rates: Rates) -> FusedStep:
        """Return what to launch for a step with these numbers.

        Takes about 0.1 ms, the time to run the rule's code, and 1 us if there was a step with equal numbers shortly
        before, as there is for all keys of a round but the first, and with most rules for all of later rounds.

        Its program is `program`, except where the step has a structure that was not to be expected.

        Arguments:
            rates: what `Rule.rates` returns, which counts the update.

        Raises:
            Untraceable: the rule does in this step what cannot be recorded.
        """
        numbers = (rates.learning_rate, rates.wd, rates.base_rate, rates.updates if self._counts else 0)
        recent = self._recent.get(numbers)
        if recent is not None:
            return recent
        code, scalars = self._recorded(rates)
        name = code.kernel.name
        found = self._programs.get(name)
        if found is None:
            found = self._programs[name] = _program(name, (code,))
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        result = self._recent[numbers] = FusedStep(found, code.kernel, code.arrays, scalars)
        return result

    # --- recording

    def _recorded(self, rates: Rates) -> tuple[_Code, tuple[np.generic, ...]]:
        trace = RuleTrace()
        weight = self._loaded(trace, WEIGHT, self._kind)
        state: State = {"updates": rates.updates}
        loaded: Dict[str, Symbol] = {}
        for each in self.states:
            loaded[each.name] = self._loaded(trace, STATE % each.name, kind_of(each.dtype))
        before = {name: symbol.node for name, symbol in loaded.items()}
        state.update(cast(State, loaded))
        work = loaded["master"] if self._has_master else weight
        gradient = self._loaded(trace, PART % 0, self._kinds[0])
        for number, kind in enumerate(self._kinds[1:], 1):
            gradient = apply("add", (gradient, self._loaded(trace, PART % number, kind)))
        gradient.is_fixed = True
        try:
            with np.errstate(all="ignore"):  # as `Rule.step`, for calculations with numpy's scalars
                watched = _WatchedRates(rates)
                self.rule.update(cast(Array, work), cast(Array, gradient), state, cast(Rates, watched))
                self._counts |= watched.reads_updates
                outputs = self._outputs(dict(state), before, work)
                key = (tuple(trace.nodes), outputs)
                code = self._codes.get(key)
                if code is None:
                    code = self._codes[key] = _written(self.rule.name, self._kind, tuple(trace.arrays), *key)
                kinds = [each.kind for each in code.kernel.parameters[2:-1]]  # those of the step
                scalars = [
                    KINDS[kind].type(trace.scalars[place]) for kind, place in zip(kinds, code.places, strict=True)
                ]
        except Exception as err:  # whatever its code does that symbols have not
            raise Untraceable(f"rule {self.rule.name!r} cannot be fused: {err}") from err
        return code, tuple(scalars)

    def _loaded(self, trace: RuleTrace, name: str, kind: str) -> Symbol:
        node = trace.load(name, kind)
        if KINDS[kind].itemsize == 2 and kind in ("f16", "bf16"):
            node, kind = trace.add("widen", "f32", node), "f32"
        return Symbol(trace, node, kind)

    def _outputs(self, state: Dict[str, object], before: Dict[str, int], work: Symbol) -> Outputs:
        if state.keys() != {"updates", *before}:
            raise Untraceable("it keeps other things in the state than it started with")
        result: List[Tuple[str, int]] = []
        for each in self.states:
            symbol = state[each.name]
            if not isinstance(symbol, Symbol) or symbol.dtype != each.dtype:
                raise Untraceable(f"it puts something else in place of the state array {each.name!r}")
            if symbol.node != before[each.name]:
                result.append((STATE % each.name, symbol.node))
        return (*result, (WEIGHT, work.node))

    def _started(self) -> tuple[StateArray, ...]:
        trace = RuleTrace()
        weight = self._loaded(trace, WEIGHT, self._kind)
        node = weight.node
        result = []
        for name, symbol in cast("Dict[str, Symbol]", dict(self.rule.start(cast(Array, weight)))).items():
            is_zero = trace.nodes[symbol.node][0] == "scalar" and trace.scalars == [0] * len(trace.scalars)
            if not is_zero and symbol.node != node:
                raise Untraceable(f"{self.rule.name!r}: state {name!r} starts neither as zeros nor as the weight")
            result.append(StateArray(name, symbol.dtype, not is_zero))
        if self._has_master:
            result.append(StateArray("master", weight.dtype, is_weight=True))
        return tuple(result)

    def _steps_to_expect(self) -> tuple[_Code, ...]:
        """Record steps with and without a learning rate (schedules) and a weight decay (multipliers)."""
        decay = cast(float, self.rule.params.get("wd") or 0.0)
        for rate in (1.0, 0.0):
            for wd in (decay, 0.0) if decay else (0.0,):
                self._recorded(Rates(rate, wd, 1, rate))
        return tuple(dict.fromkeys(self._codes.values()))

    def _take(self, program: Program) -> None:
        self.program = program
        self._programs.update((code.kernel.name, program) for code in self._expected)
        self._recent.clear()


def together(name: str, fused: Sequence[Fused]) -> Program:
    """Return one program for several rules, dtypes or numbers of parts, so that it is compiled at once.

    It becomes the program from which their steps are launched.
    """
    codes = {code.kernel.name: code for each in fused for code in each._expected}
    result = _program(name, tuple(codes.values()))
    for each in fused:
        each._take(result)
    return result


# Writing C

_WRITTEN = {
    **{"widen": "widen({0})", "cast": "({kind}){0}", "where": "{0} ? {1} : {2}", "clip": "clip({0}, {1}, {2})"},
    **{"divide": "{0} / {1}", "negative": "negative({0})", "sqrt": "root({0})", "absolute": "magnitude({0})"},
    **{"sign": "sign({0})", "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})"},
    **{"less": "{0} < {1}", "less_equal": "{0} <= {1}", "greater": "{0} > {1}", "greater_equal": "{0} >= {1}"},
    **{"equal": "{0} == {1}", "not_equal": "{0} != {1}"},
}
_OF_FLOATS = {"add": "{0} + {1}", "subtract": "{0} - {1}", "multiply": "{0} * {1}"}
_OF_INTEGERS = {  # unsigned: there they wrap around
    **{"add": "({kind})((u64){0} + (u64){1})", "subtract": "({kind})((u64){0} - (u64){1})"},
    **{"multiply": "({kind})((u64){0} * (u64){1})", "negative": "({kind})(0 - (u64){0})"},
}
_HELPERS = """\
/* Elements before the first one at a multiple of 16 bytes, at most n. */
template <typename T> HELPER i64 before_aligned(const T *array, i64 n)
{
    return least((i64)(-(u64)array & 15) / (i64)sizeof(T), n);
}
"""


@lru_cache(maxsize=1024)
def _program(name: str, codes: tuple[_Code, ...]) -> Program:
    return program(name, [(code.kernel, code.body) for code in codes], helpers=_HELPERS)


@lru_cache(maxsize=1024)
def _written(rule: str, kind: str, loads: tuple[str, ...], nodes: tuple[Node, ...], outputs: Outputs) -> _Code:
    """Return the code of a recorded step.

    Arguments:
        rule: its name, for that of the kernel.
        kind: of the weight, which is rounded to it.
        loads: names of the arrays that are loaded, in order.
    """
    needed = _needed(nodes, outputs)
    arrays = _arrays(loads, nodes, outputs, needed)
    scalars: List[KernelParameter] = []
    places, lines = [], []
    names, place = iter(loads), -1
    for number, (operation, result, arguments) in enumerate(nodes):
        name = next(names) if operation == "load" else f"c{len(scalars)}"
        place += operation == "scalar"
        if number not in needed:
            continue
        if operation in ("load", "scalar"):
            text = name
        else:
            form = (_OF_INTEGERS if result[0] in "iu" else _OF_FLOATS).get(operation) or _WRITTEN[operation]
            text = form.format(*(f"v{each}" for each in arguments), kind=result)
        if operation == "scalar":
            scalars.append(KernelParameter(name, result, Access.SCALAR))
            places.append(place)
        lines.append(f"const {result} v{number} = {text};")
    for name, number in outputs:
        lines.append(f"{name} = narrow<{kind}>(v{number});" if name == WEIGHT else f"{name} = v{number};")
    body = "\n".join(f"    {line}" for line in [*_one(arrays, lines), *_loops(arrays)])
    text = "\n".join([*(each.declaration() for each in (*arrays, *scalars)), body])
    kernel = Kernel(f"{rule}_{hashlib.sha256(text.encode()).hexdigest()[:16]}", (TABLE, OFFSETS, *scalars, TENSORS))
    return _Code(kernel, arrays, body, tuple(places))


def _needed(nodes: tuple[Node, ...], outputs: Outputs) -> set[int]:
    """Return the nodes on which an output depends."""
    needed = {number for _, number in outputs}
    for number in range(len(nodes) - 1, -1, -1):
        if number in needed:
            needed.update(nodes[number][2])
    return needed


def _arrays(
    loads: tuple[str, ...], nodes: tuple[Node, ...], outputs: Outputs, needed: set[int]
) -> tuple[KernelParameter, ...]:
    """Return the arrays that are read or written, in the order of their loads."""
    written = {name for name, _ in outputs}
    loaded = [number for number, node in enumerate(nodes) if node[0] == "load"]
    result = []
    for name, number in zip(loads, loaded, strict=True):
        is_read = number in needed
        if is_read or name in written:
            access = Access.READ if name not in written else Access.UPDATE if is_read else Access.WRITE
            result.append(KernelParameter(name, nodes[number][1], access))
    return tuple(result)


def _one(arrays: tuple[KernelParameter, ...], lines: Sequence[str]) -> list[str]:
    """Return a function of one element of each array that does `lines`."""
    taken = ", ".join(
        f"const {each.kind} {each.name}" if each.access is Access.READ else f"{each.kind} &{each.name}"
        for each in arrays
    )
    return [f"const auto one = [=]({taken}) {{", *(f"    {line}" for line in lines), "};"]


def _width(arrays: tuple[KernelParameter, ...]) -> int:
    """Return how many elements are read and written at once: those of which the smallest make up 16 bytes."""
    return max(1, 16 // min(KINDS[each.kind].itemsize for each in arrays))


def _wide(arrays: tuple[KernelParameter, ...], place: str) -> list[str]:
    """Return what does as many elements at once from `place` on."""
    count, runs = _width(arrays), [f"run_{each.name}" for each in arrays]
    text = []
    for each, run in zip(arrays, runs, strict=True):
        start = "" if each.access is Access.WRITE else f" = load<{count}>({each.name} + {place})"
        text.append(f"    Run<{each.kind}, {count}> {run}{start};")
    text += [f"    for (int k = 0; k < {count}; ++k)", f"        one({', '.join(f'{run}.at[k]' for run in runs)});"]
    for each, run in zip(arrays, runs, strict=True):
        if each.access is not Access.READ:
            text.append(f"    store({each.name} + {place}, {run});")
    return text


def _loops(arrays: tuple[KernelParameter, ...]) -> list[str]:
    """Return loops over the elements of a list of weights, which blocks share: by 16 bytes where a weight allows it."""
    count, names = _width(arrays), [each.name for each in arrays]
    finest = min(arrays, key=lambda each: KINDS[each.kind].itemsize)
    text = [f"PIECES (begin, end, n, {_PIECE_BYTES // KINDS[finest.kind].itemsize}) {{", "    i64 at = begin;"]
    text += ["    for (i64 t = tensor_of(offsets, tensors, begin); at < end; ++t) {"]
    inner = ["const i64 first = at - offsets[t], size = least(offsets[t + 1], end) - at;"]
    for number, each in enumerate(arrays):
        kind = f"const {each.kind}" if each.access is Access.READ else each.kind
        inner.append(f"{kind} *const {each.name} = ({kind} *)table[{number} * tensors + t] + first;")
    inner += [f"const i64 head = before_aligned({finest.name}, size);"]
    fits = " && ".join(f"is_aligned({name} + head)" for name in names)
    inner += [
        f"const i64 whole = {fits} ? (size - head) / {count} * {count} : 0;",
        f"INSIDE (j, 0, whole / {count}) {{",
    ]
    inner += [*_wide(arrays, f"head + {count} * j"), "}", "INSIDE (i, 0, size - whole) {"]
    inner += ["    const i64 place = i < head ? i : i + whole;"]
    inner += [f"    one({', '.join(f'{name}[place]' for name in names)});", "}", "at += size;"]
    return [*text, *(f"        {line}" for line in inner), "    }", "}"]
