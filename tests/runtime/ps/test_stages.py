"""Where the time of pushes and pulls goes (DISTRUN_STAGES)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slowness import scaled

from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps.counters import ADD, ASKED, RULE, STAGES, Stages, Worked


def answer(**seconds: float) -> Message:
    return Message(Kind.PULL, body={ASKED: seconds})


def numbers(text: str) -> dict[str, float]:
    return {stage: float(re.search("%s ([0-9.]+) ms" % stage, text)[1]) for stage in STAGES}  # type: ignore[index]


def test_what_a_server_did_is_not_counted_as_wire() -> None:
    stages = Stages()
    stages.answered(1.0, [answer(held=0.7, add=0.2, rule=0.1)])
    found = numbers(stages.text("worker-0"))
    assert found == {"copy out": 0, "wire": 300, "wait": 400, "add": 200, "rule": 100, "copy in": 0}


def test_of_several_servers_the_one_counts_that_had_the_pull_longest() -> None:
    stages = Stages()
    stages.answered(1.0, [answer(held=0.1, add=0.1, rule=0.0), answer(held=0.9, add=0.2, rule=0.3)])
    found = numbers(stages.text("worker-0"))
    assert found == {"copy out": 0, "wire": 100, "wait": 400, "add": 200, "rule": 300, "copy in": 0}


def test_times_are_those_of_an_average_pull() -> None:
    stages = Stages()
    for _ in range(4):
        stages.answered(1.0, [answer(held=0.5, add=0.0, rule=0.0)])
    text = stages.text("worker-3")
    assert text.startswith("worker-3: 4 pulls answered, of each on average: ")
    assert numbers(text)["wire"] == 500


def test_a_worker_that_pulled_nothing_says_nothing() -> None:
    stages = Stages()
    stages.answered(1.0, [Message(Kind.PULL)])
    assert not stages.text("worker-0")


def test_work_counts_from_when_the_pull_came() -> None:
    worked = Worked()
    worked.note(ADD, 0.0, 3.0)
    worked.note(RULE, 3.0, 4.0)
    worked.note(ADD, 4.0, 4.5)
    assert worked.since(2.0, 5.0) == {"held": 3.0, ADD: 1.5, RULE: 1.0}


SCRIPT = """\
import time
import numpy as np
from distrun_runtime import kvstore

with kvstore.create("dist_sync") as kv:
    kv.init("w", np.zeros(1_000_000, np.float32))
    kv.set_optimizer("sgd", learning_rate=0.1)
    out = np.empty(1_000_000, np.float32)
    for _ in range(5):
        if kv.rank == 1:
            time.sleep(0.2)
        kv.pushpull("w", np.ones(1_000_000, np.float32), out=out)
"""


@pytest.mark.parametrize("paths", ["segments", "none"])
def test_every_worker_of_a_job_says_where_the_time_went(tmp_path: Path, paths: str) -> None:
    """Worker 1 comes 0.2 s late to every round: so worker 0 waits for it, and nobody else."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, "utf-8")
    command = [sys.executable, "-m", "distrun", "launch", "--launcher", "local", "-n", "2", "-s", "1", "--no-prefix"]
    command += ["--env", "DISTRUN_STAGES=1", "--env", "DISTRUN_DATA_PATHS=%s" % paths, sys.executable, str(script)]
    env: dict[str, Any] = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "pulls answered" in line]
    found = {re.search(r"worker-\d", line)[0]: numbers(line) for line in lines}  # type: ignore[index]
    assert sorted(found) == ["worker-0", "worker-1"], done.stderr
    assert all("5 pulls answered" in line for line in lines)
    assert found["worker-0"]["wait"] > 100
    assert found["worker-0"]["wait"] > found["worker-1"]["wait"]
    for each in found.values():
        assert all(each[stage] > 0 for stage in ("copy out", "wire", "rule", "copy in")), each
