"""One update of a weight by a rule, for servers, local stores and trainers.

A rule's arithmetic takes several passes over weight, gradient and state. Where it is element by element, it is done
in chunks that stay in the processor's cache, so that memory is read and written once. On a GPU it is
one kernel (`fuse`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Tuple, cast
from weakref import WeakKeyDictionary

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.device import CpuDevice, Device, DeviceArray, is_on_host, on_host
from distrun_runtime.arrays.dtypes import Array, DType, name_of, work_dtype
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import PLAIN, RULES, Knobs, NormRule, Rule, State

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuDevice, TensorColumn
    from distrun_runtime.arrays.gpu_programs import Program
    from distrun_runtime.ops.fuse import Fused, FusedStep


CHUNK = 1 << 16
"""Elements of a chunk: what a step costs beside its arithmetic is spread over many elements, and weight, gradient,
state and intermediate results stay in the processor's cache."""
KEPT_BYTES = 4 * 1024 * 1024
"""More than the intermediate results of a chunk take."""

_FLAT: WeakKeyDictionary[Rule, dict[DType, bool]] = WeakKeyDictionary()


def is_flat(rule: Rule, dtype: DType) -> bool:
    """Tell whether a rule may step over any run of elements of a dtype, whatever values they belong to.

    So do the built-in rules that work element by element and keep nothing but arrays and the number of updates.
    """
    known = _FLAT.setdefault(rule, {})
    if dtype not in known:
        is_plain = rule.name in RULES and rule.is_elementwise and not isinstance(rule, NormRule)
        known[dtype] = is_plain and all(
            name == "updates" or getattr(value, "shape", None) == (1,)
            for name, value in rule.new_state(devices.get("cpu:0").empty((1,), dtype)).items()
        )
    return known[dtype]


def can_fuse(rule: Rule) -> bool:
    """Tell whether a kernel can make a rule's steps. Called if there is a GPU."""
    from distrun_runtime.ops import fuse

    return not fuse.why_not(rule)


def prepare(rule: Rule, dtypes: Iterable[DType], device: Device) -> None:
    """Have ready what a device needs to update weights of these dtypes, so that no round waits for it.

    On GPUs, kernels for a sum and for one that is made with the step are compiled and loaded; the rule can be fused.
    """
    if device.is_gpu:
        for dtype in dtypes:
            cast("GpuDevice", device).load(_program(rule, dtype))


def new_state(rule: Rule, weight: DeviceArray, place: Callable[[str, DType], DeviceArray] | None = None) -> State:
    """Return the state for a weight that was never updated, on its device: what `Rule.new_state` returns.

    Arguments:
        place: returns where an array of the state is to be, of the weight's shape, by its name and dtype; None: it is
            new.

    Raises:
        KVError: weights of this dtype cannot be updated.
        Untraceable: the weight is on a GPU, and the rule cannot be fused.
    """
    if is_on_host(weight):
        state = rule.new_state(weight)
        for name, value in state.items() if place is not None else ():
            if isinstance(value, np.ndarray):
                assert place is not None
                state[name] = there = place(name, value.dtype)
                np.copyto(there, value)
        return state
    device: GpuDevice = weight.device
    state = {"updates": 0}
    for each in _fused(rule, weight.dtype, (weight.dtype,)).states:
        made = place or (lambda _, dtype: device.empty(weight.shape, dtype))
        array: DeviceArray = made(each.name, each.dtype)
        if each.is_weight:
            device.sum([weight.reshape(-1)], array.reshape(-1))
        else:
            device.clear(array)
        state[each.name] = array
    return state


def state_on(state: Mapping[str, Any], device: Device) -> State:
    """Return a copy of the state of a rule that can be fused, with its arrays on a device."""
    return {name: value if name == "updates" else device.put(value) for name, value in state.items()}


def state_on_host(state: Mapping[str, Any]) -> State:
    """Return such a state in host memory; what is there is not copied."""
    return {name: value if name == "updates" else on_host(value) for name, value in state.items()}


def update(
    rule: Rule,
    weight: DeviceArray,
    gradient: DeviceArray,
    state: State,
    knobs: Knobs = PLAIN,
    *,
    rows: Array | None = None,
) -> None:
    """Update a weight and its state in place by one summed gradient; arguments are those of `Rule.step`.

    If the weight is on a GPU, then gradient and state are there too, the rule can be fused, and there are no rows.
    """
    if not is_on_host(weight):
        if rows is not None:
            raise KVError(f"rule {rule.name!r}: rows are updated in host memory, not on {weight.device.name}")
        _steps_on_gpu(rule, [WeightStep(weight, [gradient], state, knobs)])
        return
    is_long = weight.size > CHUNK and rows is None and gradient.shape == weight.shape
    arrays = (value for value in (weight, gradient, *state.values()) if isinstance(value, np.ndarray))
    if is_long and all(each.flags.c_contiguous for each in arrays) and is_flat(rule, weight.dtype):
        views: State = {
            name: value.reshape(-1) if isinstance(value, np.ndarray) else value for name, value in state.items()
        }
        step(rule, weight.reshape(-1), [gradient.reshape(-1)], views, knobs)
        state["updates"] = views["updates"]
    else:
        rule.step(weight, gradient, state, knobs, rows)


def step(
    rule: Rule,
    weight: DeviceArray,
    parts: Sequence[DeviceArray],
    state: State,
    knobs: Knobs,
    *,
    device: Device | None = None,
) -> None:
    """Update flat `weight` and `state` in place by the sum of `parts`; only for rules that are flat.

    Arguments:
        parts: flat, of the weight's length, in its dtype or its work dtype.
        device: where the arrays are, if there are several parts or if several threads may share the work.

    Raises:
        Untraceable: the weight is on a GPU, and the rule cannot be fused.
    """
    if not is_on_host(weight):
        _steps_on_gpu(rule, [WeightStep(weight, parts, state, knobs)])
        return
    _keep_memory()
    if len(weight) <= CHUNK and len(parts) == 1:
        rule.step(weight, parts[0], state, knobs)
        return
    step_over = _by_parts(rule, WeightStep(weight, parts, state, knobs), device)
    if isinstance(device, CpuDevice) and len(weight) > CHUNK:
        device.share([len(weight)], lambda _, run: step_over(run))
    else:
        step_over(slice(0, len(weight)))


class WeightStep(NamedTuple):
    """One weight's step: what `step` takes."""

    weight: DeviceArray
    parts: Sequence[DeviceArray]
    state: State
    knobs: Knobs


def _by_parts(rule: Rule, item: WeightStep, device: Device | None) -> Callable[[slice], None]:
    """Return what makes the step over a part of the weight; threads may do so with parts that do not overlap."""
    weight, parts, state, knobs = item
    arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
    begun = {name: value for name, value in state.items() if name not in arrays}

    def step_over(run: slice) -> None:
        own: State = {**begun, **{name: value[run] for name, value in arrays.items()}}
        rule.step_chunks(_chunks(run, weight, parts, arrays, device), own, knobs)
        state["updates"] = own["updates"]

    return step_over


def step_all(rule: Rule, items: Sequence[WeightStep], *, device: Device | None = None) -> None:
    """Make the steps of several weights, all in host memory or all on GPUs, none of which overlap: as `step` does.

    On a GPU, weights that take the same step share a kernel: those of one dtype, and of one learning rate, weight decay
    and number of updates. If that raises, some weights may be updated; the `updates` of their states say which.
    """
    if items and not is_on_host(items[0].weight):
        _steps_on_gpu(rule, items)
        return
    sizes = [len(each.weight) for each in items]
    if isinstance(device, CpuDevice) and len(items) > 1 and device.shares(sum(sizes)):
        _keep_memory()
        over = [_by_parts(rule, each, device) for each in items]
        device.share(sizes, lambda number, run: over[number](run))
        return
    for each in items:
        step(rule, *each, device=device)


# On GPUs

_Made = Dict[Tuple[DType, ...], "Fused"]

_FUSED: WeakKeyDictionary[Rule, _Made] = WeakKeyDictionary()
"""By the dtypes of weight and parts."""


def _fused(rule: Rule, dtype: DType, parts: tuple[DType, ...]) -> Fused:
    """Return the kernels of a rule, made once."""
    from distrun_runtime.ops.fuse import Fused

    known, place = _FUSED.setdefault(rule, {}), (dtype, *parts)
    if place not in known:
        same = type(rule)(rule.params)  # what is kept of a rule must not keep the rule
        known[place] = Fused(rule if type(rule) is not RULES.get(rule.name) else same, dtype, parts)
    return known[place]


def _program(rule: Rule, dtype: DType) -> Program:
    """Return one program for the steps of weights of a dtype by one part and by two."""
    from distrun_runtime.ops.fuse import together

    work = work_dtype(dtype)
    parts = dict.fromkeys([(dtype,), (work,), *itertools.product((dtype, work), repeat=2)])
    return together(f"{rule.name}_{name_of(dtype)}", [_fused(rule, dtype, each) for each in parts])


@dataclass(eq=False)
class _SameStep:
    """Weights on one GPU that take the same step."""

    device: GpuDevice
    fused: Fused
    knobs: Knobs
    counters: List[int]
    """Places of the weights' numbers of updates, which are all the same."""
    sizes: List[int]
    arrays: Dict[str, List[TensorColumn]]
    """For each array of the kernel one column a weight; what the kernel does with them is not said."""

    @cached_property
    def counted(self) -> Array:
        """The counters, to index an array by, once all weights are known."""
        return np.array(self.counters)


class GpuSteps:
    """Steps of different weights on GPUs, which can be made again and again.

    Those of one structure with equal numbers are made by one kernel.

    Arguments:
        items: all on one device each.
        counters: of each item, where the arrays that `make` is given have its number of updates: at all these places.
        given: in place of the items' parts: those of all items, in the weights' dtypes.
        is_work: these are in their work dtypes.

    Raises:
        KVError: an array is not where its weight is, or of another size.
    """

    def __init__(
        self,
        rule: Rule,
        items: Sequence[WeightStep],
        counters: Iterable[Sequence[int]],
        given: Sequence[TensorColumn] = (),
        *,
        is_work: bool = False,
    ) -> None:
        from distrun_runtime.arrays.cuda import Read
        from distrun_runtime.arrays.gpu import TensorColumn
        from distrun_runtime.ops.fuse import PART, STATE, WEIGHT

        self._rule = rule
        self._alike: Dict[Tuple[object, ...], _SameStep] = {}
        self._launches: Dict[object, Callable[..., None]] = {}
        """By the kernel, and the weights for which it was launched."""
        for number, (item, places) in enumerate(zip(items, counters, strict=True)):
            weight, state = item.weight, item.state
            arrays: Dict[str, Any] = {WEIGHT: weight}
            arrays.update((PART % at, part) for at, part in enumerate(item.parts))
            arrays.update((STATE % name, value) for name, value in state.items() if name != "updates")
            for name, array in arrays.items():
                if is_on_host(array) or array.device is not weight.device or array.size != weight.size:
                    found = "an array of numpy's" if is_on_host(array) else repr(array)
                    where = f"{name} with {weight.size} elements on {weight.device.name}"
                    raise KVError(f"rule {rule.name!r}: expected {where}, found {found}")
            kind = work_dtype(weight.dtype) if is_work else weight.dtype
            parts = tuple(part.dtype for part in item.parts) or (kind,) * len(given)
            knobs = item.knobs
            updates = cast(int, state.get("updates", 0))
            key = (weight.device, weight.dtype, parts, updates, knobs.lr_mult, knobs.wd_mult)
            alike = self._alike.get(key)
            if alike is None:
                fused = _fused(rule, weight.dtype, parts)
                alike = self._alike[key] = _SameStep(weight.device, fused, knobs, [], [], {})
            alike.counters += places
            alike.sizes.append(weight.size)
            columns = {name: TensorColumn.of(Read, [array]) for name, array in arrays.items()}
            columns.update((PART % at, each.some([number])) for at, each in enumerate(given))
            for name, column in columns.items():
                alike.arrays.setdefault(name, []).append(column)

    def are_in_step(self, updates: Array) -> bool:
        """Tell whether weights that took the same step have equally many updates."""
        counts = (updates[each.counted] for each in self._alike.values())
        return all((each == each[0]).all() for each in counts)

    def make(self, updates: Array) -> None:
        """Make one step of each weight, and count it in `updates`; after an error, these say which were made."""
        made: Dict[Tuple[object, ...], Tuple[FusedStep, List[_SameStep]]] = {}
        for alike in self._alike.values():
            step = alike.fused.step(self._rule.rates({"updates": int(updates[alike.counters[0]])}, alike.knobs))
            numbers = [scalar.tobytes() for scalar in step.scalars] if len(self._alike) > 1 else ()
            made.setdefault((alike.device, step.kernel.name, *numbers), (step, []))[1].append(alike)
        for step, some in made.values():
            key = (step.kernel.name, *map(id, some))
            if key not in self._launches:
                self._launches[key] = _launch_of(step, some)
            self._launches[key](step.scalars)
            for alike in some:
                updates[alike.counted] += 1


def _steps_on_gpu(rule: Rule, items: Sequence[WeightStep]) -> None:
    updates = np.array([each.state.get("updates", 0) for each in items])
    try:
        GpuSteps(rule, items, [(number,) for number in range(len(items))]).make(updates)
    finally:
        for each, count in zip(items, updates.tolist(), strict=True):
            each.state["updates"] = count


def _launch_of(made: FusedStep, some: Sequence[_SameStep]) -> Callable[..., None]:
    """Return what launches the kernel of a step for weights that take it, with its scalars."""
    from distrun_runtime.arrays.gpu import ListLaunch, TensorColumn
    from distrun_runtime.ops.fuse import USES

    device, sizes = some[0].device, [size for alike in some for size in alike.sizes]
    columns = [
        TensorColumn.joined(USES[each.access], [one for alike in some for one in alike.arrays[each.name]])
        for each in made.arrays
    ]
    return ListLaunch(device, made.program, made.kernel.name, columns, sizes).run


def _chunks(
    whole: slice, weight: Array, parts: Sequence[Array], arrays: Mapping[str, Array], device: Device | None
) -> Iterator[tuple[Array, Array, State]]:
    """Yield runs of the weight, of the sum of the parts and of the state."""
    size = min(CHUNK, whole.stop - whole.start)
    scratch = None if device is None or len(parts) == 1 else device.empty((size,), work_dtype(weight.dtype))
    for begin in range(whole.start, whole.stop, CHUNK):
        run = slice(begin, min(begin + CHUNK, whole.stop))
        gradient = parts[0][run]
        if device is not None and scratch is not None:
            gradient = scratch[: run.stop - run.start]
            device.sum([part[run] for part in parts], gradient)
        yield weight[run], gradient, {name: value[run] for name, value in arrays.items()}


@lru_cache(maxsize=1)
def _keep_memory() -> None:
    """Let the process keep the memory of intermediate results when they are freed.

    glibc returns the memory of large blocks to the system until a larger block was freed. Each chunk would then be
    calculated in new pages: ftrl takes four times as long with them.
    """
    np.empty(KEPT_BYTES, np.uint8)
