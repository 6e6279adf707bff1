"""distrun_runtime: what runs on every host of a job - agent, coordinator and parameter server.

Importing this package does nothing; `kvstore` and `report` are loaded when they are first asked for, so that the agent
and the command line never pay for numpy or ZeroMQ (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distrun_runtime import kvstore as kvstore
    from distrun_runtime.reporting import report as report

__all__ = ["kvstore", "report"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        if name == "report":
            return importlib.import_module("distrun_runtime.reporting").report
        return importlib.import_module("distrun_runtime." + name)
    raise AttributeError(f"module 'distrun_runtime' has no attribute {name!r}")
