"""Serves one host of a job over standard input and output: `python -m distrun_runtime.agent`, or from a blob."""

from __future__ import annotations

import sys
from typing import Callable


def main(first: bytes = b"", idle: Callable[[], None] = lambda: None) -> int:
    """Serve; return the exit code. `first`: bytes of the channel that were read ahead. `idle`: see `guard.serve`."""
    from distrun_runtime.agent import guard

    return guard.serve(first, idle)


if __name__ == "__main__":
    sys.exit(main())
