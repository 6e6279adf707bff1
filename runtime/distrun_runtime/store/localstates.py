"""Saved states of a store in this process: the same files as those of a job with one server and one worker.

So what was saved on one machine can be loaded in a job, and the other way round.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ps import statefile
from distrun_runtime.ps.agreement import Keys
from distrun_runtime.store.keys import Key, KeyRecord
from distrun_runtime.store.weights import Weights

__all__ = ["load_local", "save_local"]


def save_local(
    folder: str, kind: str, records: Iterable[KeyRecord], weights: Weights, residuals: Mapping[Key, Array]
) -> None:
    """Write weights, rule states and residuals into a folder, all or nothing.

    Raises:
        KVError: a file cannot be written, or a rule's state is of a kind that cannot be saved.
    """
    host, part, keys = platform.node(), statefile.new_part(), _declared(records)
    folder = os.path.abspath(folder)
    body = {"folder": folder, "part": part, "names": keys.names, "file": statefile.server_file(0), "host": host}
    try:
        saved = statefile.save(body, _shards(keys, weights))
        files = {saved["file"]: saved["holds"]}
        arrays = {f"{int(number)}.residual": residuals[key] for number, key in keys.names if key in residuals}
        if arrays:
            name = statefile.worker_file(0)
            files[name] = statefile.write(folder, part, name, arrays, host)
        manifest = {
            **{"format": statefile.FORMAT, "type": kind, "data": part, "keys": keys.to_json()},
            **{"rule": weights.spec.to_json() if weights.spec else None, "workers": 1, "servers": 1},
            **{"rounds": [], "files": files},
        }
        statefile.write_manifest(folder, manifest, host)
    except BaseException:
        statefile.discard(folder, part)
        raise


def load_local(folder: str, records: Collection[KeyRecord], weights: Weights) -> dict[Key, Array]:
    """Take up what was saved, also by a job of any size; return the residuals, if they are one worker's.

    Raises:
        KVError: the folder is not whole, or does not fit the store. Then nothing was changed.
    """
    host, keys = platform.node(), _declared(records)
    folder = os.path.abspath(folder)
    manifest = statefile.read_manifest(folder, host)
    rule = None if manifest["rule"] is None else RuleSpec.from_json(manifest["rule"])
    wrong = keys.differ_from(manifest["keys"])
    if not wrong and rule is not None and weights.spec is not None and rule.name != weights.spec.name:
        wrong = f"the states were saved under the rule {rule.name!r}, the store has {weights.spec.name!r}"
    if wrong:
        raise KVError(f"states in {folder}: {wrong}")
    saved = keys.saved_as(manifest["keys"])
    has_own = weights.spec is not None or weights.has_updater
    fresh = None if rule is None or has_own else (rule, weights.made(rule))
    chosen = weights.rule if fresh is None else fresh[1]
    body = {"folder": folder, "host": host, "manifest": manifest, "numbers": saved}
    staged = statefile.stage(body, _shards(keys, weights), chosen)
    sizes = {record.key: record.size for record in records}
    residuals = _residuals(folder, manifest, host, {old: (key, sizes[key]) for _, old, key in saved})
    if fresh is not None:
        weights.install(*fresh)
    for (_, key), read in zip(keys.names, staged, strict=True):
        if read is not None:
            weights.values[key] = read.weight.reshape(weights.values[key].shape)
            weights.states.pop(key, None)
            if read.state is not None:
                weights.states[key] = read.state
    return residuals


def _declared(records: Iterable[KeyRecord]) -> Keys:
    """Return the keys as workers would have declared them to a scheduler."""
    keys = Keys()
    keys.declare(
        [
            {
                **{"key": record.key, "shape": list(record.shape)},
                **{"dtype": dtypes.name_of(record.dtype), "stype": record.stype},
            }
            for record in records
        ]
    )
    return keys


def _shards(keys: Keys, weights: Weights) -> list[statefile.Saved]:
    """Return each value as the one shard that a server would have of it."""
    return [
        statefile.Saved(number, 0, weights.on_host(key).reshape(-1), weights.state_on_host(key))
        for number, key in keys.names
    ]


def _residuals(
    folder: str, manifest: Mapping[str, Any], host: str, keys: Mapping[int, tuple[Key, int]]
) -> dict[Key, Array]:
    """Return what compression had left out in the one worker that saved; several workers' is dropped."""
    names = statefile.worker_files(manifest)
    if not names:
        return {}
    if manifest["workers"] != 1:
        warnings.warn(
            (
                f"states of {int(manifest['workers'])} workers are loaded by one: what compression had left out in"
                f" each of them ({', '.join(names)}) is dropped"
            ),
            RuntimeWarning,
            stacklevel=5,
        )
        return {}
    return statefile.read_residuals(folder, manifest["data"], statefile.worker_file(0), keys, host)
