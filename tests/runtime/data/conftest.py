"""The peers: interpreters of other systems that some tests compare with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Callable

import pytest
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def run_by_peer(tmp_path: Path) -> Callable[..., str]:
    """Run a program by a peer's interpreter, in the test's folder, and return what it prints."""

    def run(name: str, text: str, *words: str) -> str:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "runtime") if name == "torch" else ""}
        command = [python_of(name), "-c", text, *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(100), check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
