"""The systems that tests run beside ours, each in an environment of its own: `scripts/install peers` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sizes

ROOT = Path(__file__).resolve().parents[2]


def python_of(peer: str) -> str:
    """Return the interpreter of a peer, such as `torch`; without it, skip the test, or fail on CI."""
    sizes.require("peers")
    path = ROOT / ".peers" / peer / "bin" / "python"
    if not (path.parent.parent / "installed").exists():
        if os.environ.get("DISTRUN_PEERS") == "required":
            pytest.fail("there is no %s" % path)
        pytest.skip("there is no %s; to have it:  scripts/install peers" % path)
    return str(path)
