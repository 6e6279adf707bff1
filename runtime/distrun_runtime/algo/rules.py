"""The earlier name of `distrun_runtime.ops.optimizers`. It stays importable."""

from distrun_runtime.ops.optimizers import *  # noqa: F403
