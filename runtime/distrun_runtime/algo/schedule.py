"""The earlier name of `distrun_runtime.ops.schedules`. It stays importable."""

from distrun_runtime.ops.schedules import *  # noqa: F403
