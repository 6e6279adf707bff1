"""A launched job whose nodes lose what they receive."""

from __future__ import annotations

from pathlib import Path

from distrun_cli import PYTHON, Distrun

ROUNDS = """\
import numpy as np
from distrun_runtime import kvstore

with kvstore.create("dist_sync") as kv:
    kv.init("w", np.zeros(8))
    out = np.empty(8)
    for number in range(1, 41):
        kv.push("w", np.full(8, number * (kv.rank + 1.0)))
        kv.pull("w", out=out)
        assert (out == 3 * number).all(), out
    print("exact")
"""


def test_forty_rounds_with_five_percent_lost_are_exact(tmp_path: Path) -> None:
    """The numbers of MXNet's own trial: 5 % lost, 100 ms until a message is sent again."""
    distrun = Distrun(tmp_path)
    (distrun.work / "rounds.py").write_text(ROUNDS)
    env = {"PS_RESEND": "1", "PS_RESEND_TIMEOUT": "100", "PS_DROP_MSG": "5", "DISTRUN_FAULTS": "duplicate=2,seed=3"}
    words = ["launch", "-n", "2", "-s", "2", "--launcher", "local", "--no-prefix", "-q"]
    done = distrun.run(*words, PYTHON, "rounds.py", env=env)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"exact\n" * 2
