"""Users' modules on a server: imported at its start, so that a missing one is known before any worker waits."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Sequence

from distrun_runtime.errors import ContractError


def import_all(modules: Sequence[str], host: str) -> None:
    """Import the modules that users' rules come from.

    Raises:
        ContractError: one cannot be imported; names it, the host and what to do, with the traceback of what it raised.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as err:
            # A user's module may raise anything; the job cannot go on without it.
            raise ContractError(_text(name, host, err)) from err


def _text(name: str, host: str, err: Exception) -> str:
    head = "DISTRUN_SERVER_IMPORT (--server-import) names module %s, which cannot be imported on host %s: %s: %s"
    head %= (name, host, type(err).__name__, err)
    if isinstance(err, ModuleNotFoundError) and err.name in {name, name.partition(".")[0]}:
        return (
            "%s. This server started in %s: have the module there, or its folder on PYTHONPATH (distrun launch --env"
            " PYTHONPATH=DIR); --sync-dst-dir copies the current directory to other hosts" % (head, os.getcwd())
        )
    return "%s\n%s" % (head, traceback.format_exc().rstrip())
