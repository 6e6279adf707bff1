"""Which of the launcher's variables go to the tasks on other hosts without being named. Pure.

Over ssh a task starts with what its host's login gives it. What tunes a parameter server, a collective library or a
thread pool is set where the job is launched, so it goes along, and so does what launch.py gave its tasks. Other
variables that say where things are on this machine (PATH, HOME) stay here, and so do other secrets: those are forwarded
only by name, with --env.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from distrun.job import Setting, is_ours, is_secret
from distrun_runtime.contract import environ

PREFIXES = (
    "BYTEPS_",
    "DMLC_",
    "GLOO_",
    "JAX_",
    "KMP_",
    "MXNET_",
    "NCCL_",
    "OMP_",
    "PS_",
    "TORCH_",
    "UCX_",
    "XLA_",
)
"""Beginnings of the names that are forwarded; and the tuning rows of the table of variables."""

JOINED = ("LD_LIBRARY_PATH",)
"""Lists of folders: they do not replace what a host has (`Plan.joined`)."""
NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", *JOINED)
"""What launch.py gave its tasks over ssh besides; with the session token, without which temporary keys do not work."""


def forwarded(outer: Mapping[str, str]) -> list[Setting]:
    """Return what goes to every task from the environment `outer`, by name. Pure.

    Put them before the user's own settings, so that those win. Values are hidden: they travel beside the plan and
    are never shown. Left out: secrets but for those of `NAMES`, what distrun sets itself, and what describes one task
    of an outer job.
    """
    return [
        Setting(name, outer[name], hidden=True, joins=name in JOINED) for name in sorted(outer) if is_forwarded(name)
    ]


def is_forwarded(name: str) -> bool:
    """Return whether a variable of that name is forwarded without being named. Pure."""
    if name in NAMES:
        return True
    row = environ.BY_NAME.get(name)
    wanted = name.startswith(PREFIXES) or (row is not None and row.group == "tuning")
    return wanted and not (is_ours(name) or is_secret(name) or _is_stale(name))


def _is_stale(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in environ.stale_names())
