"""The name `distrun` for `torch.distributed.init_process_group`.

torch loads this module at the end of its own import (entry point `torch.backends`), in programs that never use it too.
So it imports nothing of this package before a process group is made.
"""

from __future__ import annotations

import importlib


def register() -> None:
    """Make `distrun` known to torch as a backend for tensors in the host's memory. A second call changes nothing."""
    import torch.distributed as dist

    if dist.is_available():
        dist.Backend.register_backend("distrun", _make, extended_api=True, devices=["cpu"])


def _make(group: object, options: object) -> object:
    return importlib.import_module("distrun_runtime.torch.process_group").make(group, options)
