"""States on disk, the workers' part: the manifest, by which a folder is whole, and each worker's residuals.

Servers write `data-ID/server-I.npz` and workers `data-ID/worker-R.npz`; then rank 0 puts `manifest.json` in the place
of the old one, in one step, and only then removes what the old one named. So the folder always holds one whole state.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import statefile
from distrun_runtime.store.keys import Key
from distrun_runtime.store.link import StoreLink

__all__ = ["load", "save"]

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
        own = arrays and _error(lambda: statefile.write(folder, manifest["data"], name, arrays, host))
        # Only when every file is there the manifest may name them.
        link.together(what, Kind.BARRIER, **_said(own))
        last = link.rank == 0 and _error(lambda: statefile.write_manifest(folder, manifest, host))
        link.together(what, Kind.BARRIER, **_said(last))
    except KVError:
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
        mine.update(_said(_error(lambda: mine.update(manifest=statefile.read_manifest(folder, host)))))
    facts = link.together(what, Kind.LOAD, folder=folder, look=True, **mine)
    by_number = {number: (key, size) for key, (number, size) in keys.items()}
    name = statefile.worker_file(link.rank)
    found: dict[Key, Array] = {}
    wrong = ""
    if facts["workers"] == link.workers and name in facts["residuals"]:
        saved = {old: by_number[number] for number, old in facts["numbers"]}
        wrong = _error(lambda: found.update(statefile.read_residuals(folder, facts["part"], name, saved, host)))
    facts = link.together(what, Kind.LOAD, folder=folder, **mine, **_said(wrong))
    if facts["workers"] != link.workers:
        _warn_of_residuals(facts, link)
    return found, {by_number[number][0]: int(done) for number, done in facts["rounds"]}


def _warn_of_residuals(facts: Mapping[str, Any], link: StoreLink) -> None:
    if facts["residuals"] and link.rank == 0:
        warnings.warn(
            (
                f"states of {int(facts['workers'])} workers are loaded by {link.workers}: what compression had left"
                f" out in each of them ({', '.join(facts['residuals'])}) is dropped"
            ),
            RuntimeWarning,
            stacklevel=5,
        )


def _error(act: Callable[[], object]) -> str:
    """Do it, and return why it could not be done: the other workers must hear of it."""
    try:
        act()
    except KVError as err:
        return str(err)
    return ""


def _said(error: object) -> dict[str, str]:
    return {"error": str(error)} if error else {}
