"""The table of backends: name -> "module:Class", loaded on demand; others register by entry point."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from distrun.errors import DistrunError, UsageError

if TYPE_CHECKING:
    from distrun.backends.base import Backend

ENTRY_POINTS = "distrun.backends"

_ENGINES = {
    "kubernetes": "distrun.backends.kubernetes:Kubernetes",
    "mpi": "distrun.backends.mpi:Mpi",
    "sge": "distrun.backends.sge:Sge",
    "slurm": "distrun.backends.slurm:Slurm",
    "yarn": "distrun.backends.yarn:Yarn",
}
_BUILT_IN = {"local": "distrun.backends.local:Local", "ssh": "distrun.backends.ssh:Ssh", **_ENGINES}
ENGINES = tuple(_ENGINES)
"""Queue systems and launchers of processes that find room for a job."""


def names() -> tuple[str, ...]:
    """Return the names that `load` knows, the built-in ones first."""
    return tuple(_BUILT_IN) + tuple(sorted(set(_registered()) - set(_BUILT_IN)))


def load(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        UsageError: there is none; the message lists what there is.
        DistrunError: another distribution's backend cannot be imported.
    """
    path = _BUILT_IN.get(name) or _registered().get(name)
    if path is None:
        raise _unknown(name)
    module, _, member = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), member)()
    except (ImportError, AttributeError) as err:
        raise DistrunError(
            f"--launcher {name}: {path} cannot be loaded: {err}", "install the package that brings it again"
        ) from err
    from distrun.backends.base import Backend

    if isinstance(made, Backend):
        return made
    from distrun.backends.queue import QueueBackend  # not for every launch

    return QueueBackend(made)


def _registered() -> dict[str, str]:
    import importlib.metadata  # with its messages of e-mail: not for the built-in ones

    return {entry.name: entry.value for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}


def _unknown(name: str) -> UsageError:
    import difflib

    known = names()
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {near[0]}?" if near else ""
    return UsageError(f"--launcher: there is no launcher {name!r}; known: {', '.join(known)}", guess)
