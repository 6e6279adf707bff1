"""distrun: launch distributed training jobs. The submit side: what runs where the user types.

Importing this package does nothing; what it offers is loaded when it is first asked for (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distrun.version import __version__ as __version__

if TYPE_CHECKING:
    from distrun.errors import DistrunError as DistrunError
    from distrun.errors import UsageError as UsageError
    from distrun.functions import FunctionError as FunctionError
    from distrun.functions import FunctionJob as FunctionJob
    from distrun.functions import launch_function as launch_function
    from distrun.jobs import Job as Job
    from distrun.jobs import Jobs as Jobs
    from distrun.requesting import Request as Request

__all__ = ["DistrunError", "FunctionError", "FunctionJob", "Job", "Jobs", "Request", "UsageError", "launch_function"]
_MODULES = ("errors", "jobs", "requesting", "functions")


def __getattr__(name: str) -> Any:
    if name in __all__:
        import importlib

        modules = (importlib.import_module(f"distrun.{each}") for each in _MODULES)
        return next(getattr(module, name) for module in modules if name in vars(module))
    raise AttributeError(f"module 'distrun' has no attribute {name!r}")
