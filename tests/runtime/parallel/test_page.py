"""docs/parallel.md: its programs run and print what it promises, and it has every call."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import run_script
from slowness import scaled

from distrun_runtime import parallel

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "parallel.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
OF_A_JOB = "init_process_group"


@pytest.mark.peers
def test_python_of_the_page_is_one_program_that_prints_what_it_says() -> None:
    program = "\n".join(block for block in BLOCKS if OF_A_JOB not in block)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")}
    command = [python_of("torch"), "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"# prints (.*)$", program, re.MULTILINE)


@pytest.mark.peers
def test_the_program_for_workers_runs_as_a_job(tmp_path: Path) -> None:
    (block,) = (block for block in BLOCKS if OF_A_JOB in block)
    done = run_script(tmp_path, block, python=python_of("torch"))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 False", "1 True"]


def test_the_page_has_every_call() -> None:
    values = ("LayerCost", "Stage", "StageDevice", "StagePlan", "StageRank", "named_layers", "partition")
    for name in set(parallel.__all__) - set(values):
        assert re.search(r"`[^`\n]*\b%s\b[^`\n]*`" % name, TEXT), name
