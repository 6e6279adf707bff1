"""The systems that tests run beside ours, each in an environment of its own: `scripts/install peers` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sizes

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"


def folder_of(peer: str) -> Path:
    """Return the environment of a peer, such as `torch`.

    Without it the test is skipped, or fails with DISTRUN_PEERS=required: `scripts/test peers` sets that once it has
    installed all of them.
    """
    sizes.require("peers")
    folder = PEERS / peer
    if not (folder / "installed").exists():
        if os.environ.get("DISTRUN_PEERS") == "required":
            pytest.fail("there is no %s" % folder)
        pytest.skip("there is no %s; to have it:  scripts/install peers" % folder)
    return folder


def python_of(peer: str) -> str:
    """Return the interpreter of a peer; see `folder_of`."""
    return str(folder_of(peer) / "bin" / "python")
