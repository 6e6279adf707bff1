"""The rule that a trainer runs itself, with its states; and the file that both are saved in.

The file is numpy's npz, without pickles: `manifest` is JSON as bytes, `INDEX.DEVICE.weight` and
`INDEX.DEVICE.state.NAME` are arrays, and so is `buffer.INDEX`; bfloat16 ones as uint16. Counters of the rule stand in
the manifest:

    {"format": 1, "rule": {...}, "steps": 10, "parameters": [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "devices": [{"updates": 10}]}, ...],
     "buffers": [{"name": "1.running_mean", "shape": [3], "dtype": "float32"}, ...]}
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.device import DeviceArray, copy, is_on_host
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import RowSparse
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import Rule, RuleSpec, State
from distrun_runtime.ops.reduce import scaled
from distrun_runtime.ops.update import (
    WeightStep,
    can_fuse,
    new_state,
    prepare,
    state_on,
    state_on_host,
    step_all,
    update,
)
from distrun_runtime.store.keys import named
from distrun_runtime.store.pending import BorrowedArrays
from distrun_runtime.store.weights import COPIED_BYTES
from distrun_runtime.trainer.model import Buffers
from distrun_runtime.trainer.parameters import Buffer, Gradient, Parameter, Replica, is_near, on_host, write_weight

if TYPE_CHECKING:  # Most processes use no GPU.
    from distrun_runtime.arrays.gpu import GpuArray, GpuDevice


FORMAT = 1

Place = tuple[int, int]
"""A parameter's index, and a device."""

SavedRule = tuple[RuleSpec, int]
"""A rule, and the steps that were made."""


@dataclass(frozen=True)
class _WeightUpdate:
    """One update of a weight."""

    place: Place
    grad: Gradient
    scale: float
    """What the gradient is multiplied by."""
    others: Sequence[Replica] = ()
    """Other devices that get a copy of the weight."""


@dataclass(frozen=True)
class _GpuStep:
    """A step that is made on a GPU."""

    step: _WeightUpdate
    grad: GpuArray
    weights: Sequence[DeviceArray]
    """The weight, and its copies on other devices."""
    buffers: Sequence[tuple[Replica, Buffer]]
    """What they are, for the message that they were written."""


class LocalRule:
    """A rule that a trainer runs itself, with its states by parameter and device.

    Where the weight and its gradient are in the memory of a GPU, so is the state, and a kernel makes the step there.
    Steps of rules that need more than the elements, and of the user's own, are made in host memory. The results are the
    same.
    """

    def __init__(self, spec: RuleSpec, params: list[Parameter]) -> None:
        self.spec = spec
        self._params = params
        self.states: dict[Place, State] = {}
        """All devices share the first one's where gradients are summed over them. `saved_state` has one on the host."""
        # A rule of the user's own runs in the user's own process here: any module may be imported.
        self._rule = rules.rule_of(spec, None)

    def change(self, spec: RuleSpec) -> None:
        """Take other parameters or multipliers; the states stay.

        Raises:
            KVError: they are not right.
        """
        rule = rules.rule_of(spec, None)
        self._prepare(rule)
        self.states.update([(place, self._carried(rule, place, state)) for place, state in self.states.items()])
        self.spec, self._rule = spec, rule

    def prepare(self) -> None:
        """Have ready what steps on GPUs need, so that none waits for a compiler while other workers wait for it."""
        self._prepare(self._rule)

    def update(self, sums: Iterable[tuple[int, Gradient, float]]) -> None:
        """Update parameters by one gradient each, times a number, on the first device; the others get a copy."""
        self._make(
            [_WeightUpdate((index, 0), grad, scale, self._params[index].replicas[1:]) for index, grad, scale in sums]
        )

    def update_each_device(self, indices: Iterable[int], scale: float) -> None:
        """Update each device of parameters by its own gradient, where that is fresh."""
        steps = []
        for index in indices:
            for device, replica in enumerate(self._params[index].replicas):
                grad = replica.gradient() if replica.is_fresh else None
                if grad is not None:
                    steps.append(_WeightUpdate((index, device), grad, scale))
        self._make(steps)

    def renew_masters(self, index: int) -> None:
        """Note that a weight was written by other means: its float32 master, if there is one, follows."""
        for device, replica in enumerate(self._params[index].replicas):
            if "master" in self.states.get((index, device), {}):
                state = self.states[index, device] = self.saved_state((index, device))
                rules.renew_master(replica.weight(), state)

    def saved_state(self, place: Place) -> State:
        """Return a state with its arrays in host memory; empty if there is none."""
        state = self.states.get(place, {})
        return state_on_host(state) if _is_on_gpu(state) else state

    def digest(self) -> str:
        """Return a digest of all weights and states, to compare workers by."""
        arrays = [one.replicas[0].weight() for one in self._params]
        counters: dict[str, object] = {}
        for place in sorted(self.states):
            for name, part in sorted(self.saved_state(place).items()):
                if isinstance(part, np.ndarray):
                    arrays.append(part)
                counters[f"{place[0]}.{place[1]}.{name}"] = None if isinstance(part, np.ndarray) else str(part)
        return digest(arrays) + json.dumps(counters, sort_keys=True)

    def _make(self, steps: Iterable[_WeightUpdate]) -> None:
        on_gpus = []
        for step in steps:
            if is_near(step.grad) and can_fuse(self._rule):
                on_gpus.append(step)
            else:
                self._make_on_host(step)
        if on_gpus:
            self._make_on_gpus(on_gpus)

    def _make_on_host(self, step: _WeightUpdate) -> None:
        replica = self._replica(step.place)
        weight = replica.weight()
        if step.place not in self.states:
            self.states[step.place] = self._rule.new_state(weight)
        state = self.states[step.place] = self.saved_state(step.place)
        knobs = self.spec.knobs(step.place[0])
        grad = on_host(step.grad) if is_near(step.grad) else step.grad
        rows: Array | None = None
        if isinstance(grad, RowSparse):
            some = grad.canonical()
            grad, rows = some.values, some.rows
        if step.scale != 1.0 and not dtypes.is_float(grad.dtype):
            name, kind = self._params[step.place[0]].name, dtypes.name_of(grad.dtype)
            raise KVError(f"parameter {name!r}: {kind} gradients are taken with scale 1, not {step.scale:g}")
        given = grad if step.scale == 1.0 else scaled(dtypes.widen(grad), step.scale)
        update(self._rule, weight, given, state, knobs, rows=rows)
        replica.weight_written(weight)
        for other in step.others:
            write_weight(other, weight)

    def _make_on_gpus(self, steps: Sequence[_WeightUpdate]) -> None:
        """Make steps whose gradients, and so their weights, are on GPUs: one kernel for all that are alike."""
        borrowing, stream_of = devices.gpus().borrowing, cache(foreign.current_stream)
        buffers = [
            [(replica, replica.weight_buffer()) for replica in (self._replica(step.place), *step.others)]
            for step in steps
        ]
        made: list[tuple[Replica, Buffer]] = []
        try:
            with BorrowedArrays() as borrowed:
                given = [
                    _GpuStep(
                        step,
                        borrowing.value(step.grad, stream_of),
                        [borrowing.output(each, stream_of) if is_near(each) else each for _, each in its],
                        its,
                    )
                    for step, its in zip(steps, buffers, strict=True)
                ]
                borrowed.take([each for one in given for each in (one.grad, *one.weights) if not is_on_host(each)])
                self._make_groups(given, made)
                borrowed.give_back()
        except BaseException:
            for replica, buffer in made:
                with suppress(Exception):  # The first error says what is wrong.
                    replica.weight_written(buffer)
            raise
        for replica, buffer in made:
            replica.weight_written(buffer)

    def _make_groups(self, steps: Sequence[_GpuStep], made: list[tuple[Replica, Buffer]]) -> None:
        """Make steps in groups that need little memory at a time; `made` gets what was written, after an error too."""
        group: list[_GpuStep] = []
        items: list[WeightStep] = []
        copied = 0
        for number, each in enumerate(steps, 1):
            with self._naming([each]):
                item = self._item(each)
            copied += each.grad.nbytes if item.parts[0] is not each.grad else 0
            group.append(each)
            items.append(item)
            if copied < COPIED_BYTES and number < len(steps):
                continue
            self._make_group(group, items, made)
            group, items, copied = [], [], 0

    def _make_group(
        self, group: Sequence[_GpuStep], items: Sequence[WeightStep], made: list[tuple[Replica, Buffer]]
    ) -> None:
        before = [item.state["updates"] for item in items]
        try:
            with self._naming(group):
                step_all(self._rule, items)
        finally:
            # Also after an error: some may be made.
            over = [
                one for one, item, count in zip(group, items, before, strict=True) if item.state["updates"] != count
            ]
            made += [one.buffers[0] for one in over]
            for one in over:
                with self._naming([one]):
                    for other in one.weights[1:]:
                        copy(one.weights[0], other)
                made += one.buffers[1:]

    def _item(self, each: _GpuStep) -> WeightStep:
        """Return what a step takes; its state is brought to the weight's GPU."""
        step, weight, grad = each.step, each.weights[0], each.grad
        gpu, state = weight.device, self.states.get(step.place)
        if state is None:
            state = new_state(self._rule, weight)
        elif not _is_on(gpu, state):
            state = state_on(state, gpu)
        state.setdefault("updates", 0)
        self.states[step.place] = state
        if step.scale != 1.0:
            # As on the host: 16-bit floats are not rounded in between.
            wide = gpu.empty(grad.shape, dtypes.work_dtype(grad.dtype))
            gpu.sum([grad.reshape(-1)], wide.reshape(-1))
            gpu.scale(wide, step.scale)
            grad = wide
        return WeightStep(weight, [grad], state, self.spec.knobs(step.place[0]))

    @contextmanager
    def _naming(self, steps: Sequence[_GpuStep]) -> Iterator[None]:
        """Name the parameters in errors."""
        try:
            yield
        except KVError as err:
            names = [self._params[each.step.place[0]].name for each in steps]
            raise KVError(f"{named(names, 'parameter')}: {err}") from err

    def _prepare(self, rule: Rule) -> None:
        found: dict[int, set[DType]] = {}
        for parameter in self._params:
            for number in [replica.gpu for replica in parameter.replicas] if parameter.trains else ():
                if number is not None:
                    found.setdefault(number, set()).add(parameter.dtype)
        for number, kinds in found.items() if found and can_fuse(rule) else ():
            gpu = devices.gpu(number)
            gpu.prepare(
                kinds | {dtypes.work_dtype(kind) for kind in kinds}
            )  # for gradients that are scaled, and masters
            prepare(rule, kinds, gpu)

    def _carried(self, rule: Rule, place: Place, state: State) -> State:
        """Return the state that a rule in place of the present one goes on with."""
        parameter = self._params[place[0]]
        if _is_on_gpu(state):
            begun = rule.new_state(np.zeros(1, parameter.dtype))
            if begun.keys() <= state.keys():  # Nothing starts anew, so it stays where it is.
                return {name: state[name] for name in begun}
        return rules.carry_state(rule, self._replica(place).weight(), self.saved_state(place))

    def _replica(self, place: Place) -> Replica:
        return self._params[place[0]].replicas[place[1]]


def _is_on_gpu(state: State) -> bool:
    """Tell whether a state has arrays on a GPU."""
    return any(hasattr(part, "memory") for part in state.values())


def _is_on(gpu: GpuDevice, state: Mapping[str, Any]) -> bool:
    """Tell whether the arrays of the state of a rule that can be fused are on a GPU."""
    return all(name == "updates" or (not is_on_host(part) and part.device is gpu) for name, part in state.items())


def check_rule(spec: RuleSpec, params: list[Parameter]) -> None:
    """Return if a built-in rule can update parameters of these dtypes. Another rule is not looked at.

    Raises:
        KVError: it cannot; the parameter is named.
    """
    if spec.name in rules.RULES:
        rules.check_keys(rules.rule_of(spec), ((one.name, one.dtype) for one in params), "parameter")


def digest(arrays: Iterable[Array]) -> str:
    """Return a digest of the contents of arrays."""
    state = hashlib.blake2b(digest_size=16)
    for array in arrays:
        state.update(bits_of(array).data)
    return state.hexdigest()


def bits_of(array: Array) -> Array:
    """Return an array's bytes, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# --- the file


def save(path: str, rule: LocalRule, params: list[Parameter], buffers: Buffers, steps: int) -> None:
    """Write weights, buffers, rule and states into a file; what was there is replaced when the new one is whole.

    Several processes may write the same file at the same time, as the workers of one host do.

    Raises:
        KVError: there is a folder in its place.
        OSError: it cannot be written.
    """
    _refuse_folder(path)
    arrays: dict[str, Array] = {}
    described = []
    for index, parameter in enumerate(params):
        counters = []
        for device, replica in enumerate(parameter.replicas):
            state = rule.saved_state((index, device))
            if device and not state:
                continue  # it shares the first device's
            arrays[f"{index}.{device}.weight"] = replica.weight()
            parts = {name: part for name, part in state.items() if isinstance(part, np.ndarray)}
            arrays.update({f"{index}.{device}.state.{name}": part for name, part in parts.items()})
            counters.append({name: int(part) for name, part in state.items() if name not in parts})
        described.append({**_facts(parameter.name, parameter), "devices": counters})
    held = dict(zip(buffers.names, buffers.arrays(), strict=True))
    arrays.update({f"buffer.{index}": array for index, array in enumerate(held.values())})
    manifest = {
        **{"format": FORMAT, "rule": rule.spec.to_json(), "steps": steps, "parameters": described},
        "buffers": [_facts(name, array) for name, array in held.items()],
    }
    plain = {name: array.view(np.uint16) if array.dtype == dtypes.BFLOAT16 else array for name, array in arrays.items()}
    text = np.frombuffer(json.dumps(manifest).encode("utf-8"), np.uint8)
    new = f"{path}.{uuid.uuid4().hex}.new"
    try:
        with open(new, "wb") as file:
            np.savez(file, allow_pickle=False, manifest=text, **plain)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException as err:
        with suppress(OSError):
            os.remove(new)
        if isinstance(err, OSError):
            raise OSError(err.errno, err.strerror or str(err), path) from err
        raise


def load(path: str, rule: LocalRule, params: list[Parameter], buffers: Buffers) -> SavedRule:
    """Write saved weights and buffers and take up the states; return the rule, for the trainer to take.

    Raises:
        KVError: no whole file of this format, or other parameters', buffers' or another rule's. Nothing was changed.
        OSError: it cannot be read.
    """
    _refuse_folder(path)
    try:
        # Opened here: numpy leaves a file open that turns out to be no archive.
        with open(path, "rb") as raw:
            if not zipfile.is_zipfile(raw):  # of anything else, numpy says how to unpickle it
                raise KVError(f"{path} does not hold complete states of a trainer: it is not an npz file")
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        manifest = json.loads(arrays.pop("manifest").tobytes().decode("utf-8"))
        if manifest["format"] != FORMAT:
            raise KVError(f"{path} has format {manifest['format']}, this version reads {FORMAT}")
        _fit(path, manifest["parameters"], params)
        weights, kept = _parts(arrays, manifest["parameters"], params)
        held = _held(path, arrays, manifest.get("buffers", []), buffers)
        spec, steps = RuleSpec.from_json(manifest["rule"]), int(manifest["steps"])
        # Made here, so that one that cannot be is refused before a weight is written.
        rules.rule_of(spec, None)
        if spec.name != rule.spec.name:
            raise KVError(
                f"the states in {path} were saved under the rule {spec.name!r}, the trainer has {rule.spec.name!r}"
            )
    except KVError:
        raise
    except (ValueError, LookupError, zipfile.BadZipFile, EOFError, TypeError, AttributeError) as err:
        raise KVError(f"{path} does not hold complete states of a trainer: {err}") from err
    for index, parameter in enumerate(params):
        for device, replica in enumerate(parameter.replicas):
            write_weight(replica, weights.get((index, device), weights[index, 0]))
    buffers.write(held)
    rule.states.clear()
    rule.states.update(kept)
    return spec, steps


def rule_of_folder(folder: str) -> SavedRule | None:
    """Return the rule of a folder that a store wrote, and the steps made; None where this host does not have it."""
    path = os.path.join(folder, "manifest.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        manifest = json.load(file)
    done = [int(pair[1]) for pair in manifest["rounds"]]
    # Stores without rounds have counted rule.
    counters = [each for holds in manifest["files"].values() for each in holds.get("counters", {}).values()]
    return RuleSpec.from_json(manifest["rule"]), max(
        [*done, *(int(each.get("updates", 0)) for each in counters)], default=0
    )


def _refuse_folder(path: str) -> None:
    if os.path.isdir(path):
        raise KVError(
            f"{path} is a folder, as it is written where the store updates; this trainer updates by itself"
            " (update_on_kvstore=False) and keeps a file"
        )


def _parts(
    arrays: Mapping[str, Array], described: list[dict[str, Any]], params: list[Parameter]
) -> tuple[dict[tuple[int, int], Array], dict[tuple[int, int], State]]:
    """Return saved weights and states by parameter's index and device."""
    weights: dict[tuple[int, int], Array] = {}
    kept: dict[tuple[int, int], State] = {}
    for index, (parameter, each) in enumerate(zip(params, described, strict=True)):
        for device, counters in enumerate(each["devices"][: len(parameter.replicas)]):
            found = arrays[f"{index}.{device}.weight"]
            weights[index, device] = _as(found, parameter, f"the weight of parameter {parameter.name!r}")
            prefix = f"{index}.{device}.state."
            state: State = {name: int(number) for name, number in counters.items()}
            state.update({name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)})
            if state:
                kept[index, device] = state
    return weights, kept


def _held(
    path: str, arrays: Mapping[str, Array], described: list[dict[str, Any]], buffers: Buffers
) -> dict[str, Array]:
    """Return the saved buffers by name."""
    here = dict(zip(buffers.names, buffers.arrays(), strict=True))
    own = [_facts(name, array) for name, array in here.items()]
    if described != own:
        raise KVError(
            f"{path} has the buffers {_shown(described)}, the trainer {_shown(own)}; fix: make the trainer of"
            " the same module as when the states were saved, or of named_parameters() if it was made of these"
        )
    return {
        name: _as(arrays[f"buffer.{index}"], mine, f"buffer {name!r}")
        for index, (name, mine) in enumerate(here.items())
    }


def _shown(buffers: list[dict[str, Any]]) -> str:
    names = [f"{each['name']!r} ({tuple(each['shape'])}, {each['dtype']})" for each in buffers[:3]]
    return ", ".join([*names, *([f"... ({len(buffers)})"] if len(buffers) > 3 else [])]) or "none"


def _as(array: Array, like: Parameter | Array, what: str) -> Array:
    """Return a saved array, which has shape and dtype of what it is for."""
    typed = array.view(dtypes.BFLOAT16) if like.dtype == dtypes.BFLOAT16 else array
    if typed.shape != like.shape or typed.dtype != like.dtype:
        raise ValueError(f"{what} has shape {typed.shape} and dtype {dtypes.name_of(typed.dtype)}")
    return typed


def _facts(name: str, of: Parameter | Array) -> dict[str, Any]:
    return {"name": name, "shape": list(of.shape), "dtype": dtypes.name_of(of.dtype)}


def _fit(path: str, described: list[dict[str, Any]], params: list[Parameter]) -> None:
    if len(described) != len(params):
        raise KVError(f"{path} has states of {len(described)} parameters, the trainer has {len(params)}")
    for saved, parameter in zip(described, params, strict=True):
        expected = _facts(parameter.name, parameter)
        found = {name: saved.get(name) for name in expected}
        if found != expected:
            raise KVError(f"{path}: parameter {parameter.name!r} has there {found}, here {expected}")
