"""The earlier name of `distrun_runtime.ops.params`. It stays importable."""

from distrun_runtime.ops.params import Param

__all__ = ["Param"]
