"""`python -m distrun_runtime.agent`, and where the blob ends up: serve one host of a job over stdin and stdout."""

from __future__ import annotations

import sys


def main(first: bytes = b"") -> int:
    """Serve; return the exit code. `first`: bytes of the channel that were read ahead."""
    from distrun_runtime.agent import guard

    return guard.serve(first)


if __name__ == "__main__":
    sys.exit(main())
