"""docs/trainer.md: its programs run and say what it promises, and it has every call."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import run_script
from slowness import scaled

from distrun_runtime.trainer import Parameter, Trainer, fit

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "trainer.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def run(python: str, program: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime")} if python != sys.executable else None
    done = subprocess.run(
        [python, "-c", program], env=env, capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_of_the_page_is_one_program_that_prints_what_it_says() -> None:
    program = "\n".join(block for block in BLOCKS if "import torch" not in block)
    assert run(sys.executable, program).splitlines() == re.findall(r"# prints (.*)$", program, re.MULTILINE)


@pytest.mark.peers
def test_the_programs_with_torch_run() -> None:
    blocks = [block for block in BLOCKS if "import torch" in block]
    assert len(blocks) == 2
    run(python_of("torch"), "\n".join(blocks))


def test_fit_of_the_page_trains_alike_on_two_workers_of_a_job(tmp_path: Path) -> None:
    """The workers have two batches and one: the second joins."""
    (loop,) = (block for block in BLOCKS if "trainer = fit(" in block)
    head = BLOCKS[0].partition("trainer = ")[0]
    text = head + loop.replace('create("local")', 'create("dist_sync")') + "print(kv.rank)\n"
    done = run_script(tmp_path, text, servers=1)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0", "1", "1.0", "1.0"]


def test_the_store_of_ones_own_on_the_stores_page_is_enough_for_a_trainer() -> None:
    page = (ROOT / "docs" / "kvstore.md").read_text("utf-8")
    found = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in found if "KVStoreBase.register" in block)
    program = """\
import numpy as np
from distrun_runtime import kvstore
from distrun_runtime.trainer import Parameter, Trainer

%s
for devices in (1, 2):
    weight = Parameter([np.zeros(2) for _ in range(devices)], [np.ones(2) for _ in range(devices)])
    Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="summing").step(1)
    print([one.tolist() for one in weight.list_data()])
"""
    assert run(sys.executable, program % block).splitlines()[1:] == [
        "[[-1.0, -1.0]]",
        "[[-2.0, -2.0], [-2.0, -2.0]]",
    ]


def test_the_page_has_every_call_and_argument() -> None:
    names = [name for name in dir(Trainer) if not name.startswith("_") and name not in OWN]
    for function in (Trainer.__init__, Parameter.__init__, fit):
        names += [name for name in inspect.signature(function).parameters if name != "self"]
    for name in names:
        assert re.search(r"`[^`]*\b%s\b[^`]*`" % name, TEXT), name


OWN = ("may_replace", "multiplied", "replaced")
"""What parameters call, not users."""
