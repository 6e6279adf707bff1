"""States of a trainer that updates the weights itself, in one file; and what a store's folder says of its rule.

The file is numpy's npz, without pickles: `manifest` is JSON as bytes, `INDEX.DEVICE.weight` and
`INDEX.DEVICE.state.NAME` are arrays, and so is `buffer.INDEX`; bfloat16 ones as uint16. Counters of the rule stand in
the manifest:

    {"format": 1, "rule": {...}, "steps": 10, "parameters": [
        {"name": "w", "shape": [2, 3], "dtype": "float32", "devices": [{"updates": 10}]}, ...],
     "buffers": [{"name": "1.running_mean", "shape": [3], "dtype": "float32"}, ...]}
"""

from __future__ import annotations

import json
import os
import uuid
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.optimizers import State
from distrun_runtime.trainer.buffers import Buffers
from distrun_runtime.trainer.parameter import Parameter
from distrun_runtime.trainer.updates import Updates

__all__ = ["load", "rule_of", "save"]

FORMAT = 1

Rule = tuple[Mapping[str, Any], int]
"""A rule as JSON, and the steps that were made."""


def save(path: str, updates: Updates, params: list[Parameter], buffers: Buffers, steps: int) -> None:
    """Write weights, buffers, rule and states into a file; what was there is replaced when the new one is whole.

    Several processes may write the same file at the same time, as the workers of one host do.

    Raises:
        KVError: there is a folder in its place.
        OSError: it cannot be written.
    """
    _no_folder(path)
    arrays: dict[str, Array] = {}
    described = []
    for index, parameter in enumerate(params):
        counters = []
        for device, replica in enumerate(parameter.replicas):
            state = updates.states.get((index, device), {})
            if device and not state:
                continue  # it shares the first device's
            arrays["%d.%d.weight" % (index, device)] = replica.weight()
            parts = {name: part for name, part in state.items() if isinstance(part, np.ndarray)}
            arrays.update({"%d.%d.state.%s" % (index, device, name): part for name, part in parts.items()})
            counters.append({name: int(part) for name, part in state.items() if name not in parts})
        described.append({**_described(parameter), "devices": counters})
    held = dict(zip(buffers.names, buffers.arrays(), strict=True))
    arrays.update({"buffer.%d" % index: array for index, array in enumerate(held.values())})
    manifest = {
        **{"format": FORMAT, "rule": updates.spec.to_json(), "steps": steps, "parameters": described},
        "buffers": [_facts(name, array.shape, array.dtype) for name, array in held.items()],
    }
    plain = {name: array.view(np.uint16) if array.dtype == dtypes.BFLOAT16 else array for name, array in arrays.items()}
    text = np.frombuffer(json.dumps(manifest).encode("utf-8"), np.uint8)
    new = "%s.%s.new" % (path, uuid.uuid4().hex)
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


def load(path: str, updates: Updates, params: list[Parameter], buffers: Buffers) -> Rule:
    """Write saved weights and buffers and take up the states; return the rule, for the trainer to take.

    Raises:
        KVError: no whole file of this format, or other parameters', buffers' or another rule's. Nothing was changed.
        OSError: it cannot be read.
    """
    _no_folder(path)
    try:
        # Opened here: numpy leaves a file open that turns out to be no archive.
        with open(path, "rb") as raw:
            if not zipfile.is_zipfile(raw):  # of anything else, numpy says how to unpickle it
                raise KVError("%s does not hold complete states of a trainer: it is not an npz file" % path)
            raw.seek(0)
            with np.load(raw, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
        manifest = json.loads(arrays.pop("manifest").tobytes().decode("utf-8"))
        if manifest["format"] != FORMAT:
            raise KVError("%s has format %s, this version reads %d" % (path, manifest["format"], FORMAT))
        _fit(path, manifest["parameters"], params)
        weights, kept = _parts(arrays, manifest["parameters"], params)
        held = _held(path, arrays, manifest.get("buffers", []), buffers)
        rule, steps = manifest["rule"], int(manifest["steps"])
        # Made here, so that one that cannot be is refused before a weight is written.
        spec = rules.RuleSpec.from_json(rule)
        rules.rule_of(spec, None)
        if spec.name != updates.spec.name:
            text = "the states in %s were saved under the rule %r, the trainer has %r"
            raise KVError(text % (path, spec.name, updates.spec.name))
    except KVError:
        raise
    except (ValueError, LookupError, zipfile.BadZipFile, EOFError, TypeError, AttributeError) as err:
        raise KVError("%s does not hold complete states of a trainer: %s" % (path, err)) from err
    for index, parameter in enumerate(params):
        for device, replica in enumerate(parameter.replicas):
            room = replica.room()
            np.copyto(room, weights.get((index, device), weights[index, 0]))
            replica.written(room)
    buffers.write(held)
    updates.states.clear()
    updates.states.update(kept)
    return rule, steps


def rule_of(folder: str) -> Rule | None:
    """Return the rule of a folder that a store wrote, and the steps made; None where this host does not have it."""
    path = os.path.join(folder, "manifest.json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        manifest = json.load(file)
    done = [int(pair[1]) for pair in manifest["rounds"]]
    # Stores without rounds have counted updates.
    counters = [each for holds in manifest["files"].values() for each in holds.get("counters", {}).values()]
    return manifest["rule"], max([*done, *(int(each.get("updates", 0)) for each in counters)], default=0)


def _no_folder(path: str) -> None:
    if os.path.isdir(path):
        raise KVError(
            "%s is a folder, as it is written where the store updates; this trainer updates by itself"
            " (update_on_kvstore=False) and keeps a file" % path
        )


def _parts(
    arrays: Mapping[str, Array], described: list[dict[str, Any]], params: list[Parameter]
) -> tuple[dict[tuple[int, int], Array], dict[tuple[int, int], State]]:
    """Return saved weights and states by parameter's index and device."""
    weights: dict[tuple[int, int], Array] = {}
    kept: dict[tuple[int, int], State] = {}
    for index, (parameter, each) in enumerate(zip(params, described, strict=True)):
        for device, counters in enumerate(each["devices"][: len(parameter.replicas)]):
            weights[index, device] = _typed(arrays["%d.%d.weight" % (index, device)], parameter)
            prefix = "%d.%d.state." % (index, device)
            state: State = {name: int(number) for name, number in counters.items()}
            state.update({name[len(prefix) :]: array for name, array in arrays.items() if name.startswith(prefix)})
            if state:
                kept[index, device] = state
    return weights, kept


def _held(
    path: str, arrays: Mapping[str, Array], described: list[dict[str, Any]], buffers: Buffers
) -> dict[str, Array]:
    """Return the saved buffers by name."""
    own = [_facts(name, array.shape, array.dtype) for name, array in zip(buffers.names, buffers.arrays(), strict=True)]
    if described != own:
        raise KVError(
            "%s has the buffers %s, the trainer %s; fix: make the trainer of the same module as when the states were"
            " saved, or of named_parameters() if it was made of these" % (path, _shown(described), _shown(own))
        )
    return {
        name: _as(arrays["buffer.%d" % index], mine.dtype, mine.shape, "buffer %r" % name)
        for index, (name, mine) in enumerate(zip(buffers.names, buffers.arrays(), strict=True))
    }


def _shown(buffers: list[dict[str, Any]]) -> str:
    names = ["%r (%s, %s)" % (each["name"], tuple(each["shape"]), each["dtype"]) for each in buffers[:3]]
    return ", ".join([*names, *(["... (%d)" % len(buffers)] if len(buffers) > 3 else [])]) or "none"


def _typed(array: Array, parameter: Parameter) -> Array:
    return _as(array, parameter.dtype, parameter.shape, "the weight of parameter %r" % parameter.name)


def _as(array: Array, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> Array:
    typed = array.view(dtypes.BFLOAT16) if dtype == dtypes.BFLOAT16 else array
    if typed.shape != shape or typed.dtype != dtype:
        raise ValueError("%s has shape %s and dtype %s" % (what, *_form(typed)))
    return typed


def _form(array: Array) -> tuple[tuple[int, ...], str]:
    return array.shape, dtypes.name_of(array.dtype)


def _described(parameter: Parameter) -> dict[str, Any]:
    return _facts(parameter.name, parameter.shape, parameter.dtype)


def _facts(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> dict[str, Any]:
    return {"name": name, "shape": list(shape), "dtype": dtypes.name_of(dtype)}


def _fit(path: str, described: list[dict[str, Any]], params: list[Parameter]) -> None:
    if len(described) != len(params):
        raise KVError("%s has states of %d parameters, the trainer has %d" % (path, len(described), len(params)))
    for saved, parameter in zip(described, params, strict=True):
        expected = _described(parameter)
        found = {name: saved.get(name) for name in expected}
        if found != expected:
            raise KVError("%s: parameter %r has there %s, here %s" % (path, parameter.name, found, expected))
