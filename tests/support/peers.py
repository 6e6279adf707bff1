"""The systems that tests run beside ours, each in an environment of its own: `scripts/install peers` makes them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import sizes

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
ENDED = PEERS / "ended"
"""Where DISTRUN_PEERS is `installing`, `scripts/install peers` runs beside the tests; this will be its exit code."""
LIMIT_S = 100.0
"""How long a test waits for it. Files that need peers are run late (`sizes`), so that hardly any has to."""


def folder_of(peer: str) -> Path:
    """Return the environment of a peer, such as `torch`; without it, skip the test, or fail on CI."""
    sizes.require("peers")
    folder, mode = PEERS / peer, os.environ.get("DISTRUN_PEERS")
    if mode == "installing":
        end = time.monotonic() + LIMIT_S
        while not ENDED.exists():  # until then even one that is here may be replaced
            assert time.monotonic() < end, "scripts/install peers has not ended yet"
            time.sleep(0.2)
        mode = "" if ENDED.read_text().strip() != "0" else "required"
    if not (folder / "installed").exists():
        if mode == "required":
            pytest.fail("there is no %s" % folder)
        pytest.skip("there is no %s; to have it:  scripts/install peers" % folder)
    return folder


def python_of(peer: str) -> str:
    """Return the interpreter of a peer; see `folder_of`."""
    return str(folder_of(peer) / "bin" / "python")
