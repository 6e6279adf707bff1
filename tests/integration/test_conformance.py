"""MXNet's own conformance set-up: seven workers and seven servers on one machine, started by the launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "conformance_dense.py"


@pytest.mark.timeout(300)
def test_seven_workers_and_seven_servers_agree_to_the_last_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row: tests/nightly/dist_sync_kvstore.py --type default_cpu, as its CI runs it: -n 7 --launcher local."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    command = [sys.executable, "-m", "distrun", "launch", "-n", "7", "--launcher", "local"]
    done = subprocess.run(
        [*command, sys.executable, str(SCRIPT), "dist_sync"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(7):
        assert "worker %d of 7: 3 steps exact" % rank in done.stdout
