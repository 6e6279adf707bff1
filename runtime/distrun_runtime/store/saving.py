"""States on disk: the manifest, by which a folder is whole, and each worker's residuals; all of a store in a process.

Servers write `data-ID/server-I.npz` and workers `data-ID/worker-R.npz`; then rank 0 puts `manifest.json` in the place
of the old one, in one step, and only then removes what the old one named. So the folder always holds one whole state.
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError, RuntimeFault
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import statefile
from distrun_runtime.ps.agreement import Keys, rule_of
from distrun_runtime.store.keys import Key
from distrun_runtime.store.weights import Weights

if TYPE_CHECKING:
    from distrun_runtime.store.link import StoreLink


Residuals = Mapping[Key, Array]


def save(link: StoreLink, folder: str, residuals: Residuals, numbers: Mapping[Key, int]) -> None:
    """Save the store's states into `folder`, which is made if it is missing. All workers call it.

    Arguments:
        residuals: what compression has left out here, by key.
        numbers: each key's number in messages.

    Raises:
        KVError: a round is open, or a file cannot be written: says whose, and why. What was saved before stands.
    """
    what = f"save_states({folder!r})"
    folder, host = os.path.abspath(folder), link.node.config.host
    mine = {"part": statefile.new_part()} if link.rank == 0 else {}
    try:
        manifest = link.together(what, Kind.SAVE, folder=folder, residuals=bool(residuals), **mine)["manifest"]
        arrays = {f"{numbers[key]}.residual": array for key, array in residuals.items()}
        name = statefile.worker_file(link.rank)
        own = arrays and _error(lambda: statefile.write(folder, manifest["data"], name, arrays, host), link)
        # Only when every file is there the manifest may name them.
        link.together(what, Kind.BARRIER, **_said(own))
        last = link.rank == 0 and _error(lambda: statefile.write_manifest(folder, manifest, host), link)
        link.together(what, Kind.BARRIER, **_said(last))
    except (KVError, KeyboardInterrupt):
        if link.rank == 0:
            statefile.discard(folder, mine["part"])
        raise


def load(link: StoreLink, folder: str, keys: Mapping[Key, tuple[int, int]]) -> tuple[dict[Key, Array], dict[Key, int]]:
    """Have the servers take up what was saved; return this worker's residuals and all keys' rounds. All call it.

    Arguments:
        keys: each key's number in messages, and its elements.

    Raises:
        KVError: the folder is not whole, or does not fit the store's keys: says which file or key, and why. Then
            nothing was changed.
    """
    what = f"load_states({folder!r})"
    folder, host = os.path.abspath(folder), link.node.config.host
    mine: dict[str, Any] = {}
    if link.rank == 0:
        read = _error(lambda: mine.update(manifest=statefile.read_manifest(folder, host)), link, Kind.LOAD)
        mine.update(_said(read))
    facts = link.together(what, Kind.LOAD, folder=folder, look=True, **mine)
    by_number = {number: (key, size) for key, (number, size) in keys.items()}
    name = statefile.worker_file(link.rank)
    found: dict[Key, Array] = {}
    wrong = ""
    if facts["workers"] == link.workers and name in facts["residuals"]:
        saved = {old: by_number[number] for number, old in facts["numbers"]}
        part = facts["part"]
        wrong = _error(lambda: found.update(statefile.read_residuals(folder, part, name, saved, host)), link, Kind.LOAD)
    facts = link.together(what, Kind.LOAD, folder=folder, **mine, **_said(wrong))
    if facts["workers"] != link.workers and facts["residuals"] and link.rank == 0:
        _warn_of_residuals(int(facts["workers"]), facts["residuals"], str(link.workers))
    return found, {by_number[number][0]: int(done) for number, done in facts["rounds"]}


def _warn_of_residuals(workers: int, names: Collection[str], by: str) -> None:
    warnings.warn(
        (
            f"states of {workers} workers are loaded by {by}: what compression had left out in each of them"
            f" ({', '.join(names)}) is dropped"
        ),
        RuntimeWarning,
        stacklevel=5,
    )


def _error(act: Callable[[], object], link: StoreLink, kind: Kind = Kind.SAVE) -> str:
    """Do it, and return why it could not be done: the other workers must hear of it.

    Arguments:
        link: of the store whose workers wait for this one in a call that it does not make if `act` raises another
            error than KVError.
        kind: what that call belongs to.
    """
    try:
        act()
    except KVError as err:
        return str(err)
    except BaseException as err:
        name = type(err).__name__
        # The process may have lost the job: then all are told anyway.
        with suppress(RuntimeFault):
            link.give_up(f"{name}: {err}" if isinstance(err, Exception) else f"it was interrupted by {name}", kind)
        raise
    return ""


def _said(error: object) -> dict[str, str]:
    return {"error": str(error)} if error else {}


# A store in this process: the same files as those of a job with one server and one worker. So what was saved on one
# machine can be loaded in a job, and the other way round.


def save_local(folder: str, kind: str, weights: Weights, residuals: Mapping[Key, Array]) -> None:
    """Write weights, rule states and residuals into a folder, all or nothing.

    Raises:
        KVError: a file cannot be written, or a rule's state is of a kind that cannot be saved.
    """
    host, part, keys = platform.node(), statefile.new_part(), _declared(weights)
    folder = os.path.abspath(folder)
    body = {"folder": folder, "part": part, "names": keys.names, "file": statefile.server_file(0), "host": host}
    try:
        saved = statefile.save(body, weights.saved())
        files = {saved["file"]: saved["holds"]}
        arrays = {f"{number}.residual": residuals[key] for number, key in keys.names if key in residuals}
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


def load_local(folder: str, weights: Weights) -> dict[Key, Array]:
    """Take up what was saved, also by a job of any size; return the residuals, if they are one worker's.

    Raises:
        KVError: the folder is not whole, or does not fit the store. Then nothing was changed.
    """
    host, keys = platform.node(), _declared(weights)
    folder = os.path.abspath(folder)
    manifest = statefile.read_manifest(folder, host)
    wrong, rule = keys.differ_from(manifest, weights.spec), rule_of(manifest)
    if wrong:
        raise KVError(f"states in {folder}: {wrong}")
    saved = keys.saved_as(manifest["keys"])
    fresh = None if rule is None or weights.rule is not None else (rule, weights.made(rule))
    body = {"folder": folder, "host": host, "manifest": manifest, "numbers": saved}
    staged = statefile.stage(body, weights.saved(), weights.rule if fresh is None else fresh[1])
    residuals: dict[Key, Array] = {}
    names = statefile.worker_files(manifest)
    if names and manifest["workers"] != 1:
        _warn_of_residuals(int(manifest["workers"]), names, "one")
    elif names:
        mine = {old: (key, weights.kept[key].record.size) for _, old, key in saved}
        residuals = statefile.read_residuals(folder, manifest["data"], statefile.worker_file(0), mine, host)
    if fresh is not None:
        weights.install(*fresh)
    weights.restore(staged)
    return residuals


def _declared(weights: Weights) -> Keys:
    """Return the keys as workers would have declared them to a scheduler."""
    keys = Keys()
    keys.declare([each.record.to_json() for each in weights.kept.values()])
    return keys
