"""The trainer with torch: the cases of tests/support/torch_program.py, each a test here, run by one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "torch_program.py"
CASES = re.findall(r"^def (\w+)\(\) -> None:", PROGRAM.read_text("utf-8").partition("# --- the cases")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    python = python_of("torch")
    env = {**os.environ, "PYTHONPATH": "%s:%s" % (ROOT / "runtime", PROGRAM.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, PROGRAM], env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout)
    return result


@pytest.mark.peers
@pytest.mark.parametrize("case", [case for case in CASES if case != "main"])
def test_with_torch(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


@pytest.mark.peers
def test_every_case_was_run(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == set(CASES) - {"main"}


CHANGING = """\
import sys
import torch
from distrun_runtime.trainer import Trainer

net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
trainer = Trainer(net, "sgd", {"learning_rate": 0.1}, update_on_kvstore=sys.argv[1] == "True")
rank = trainer.kvstore.rank


def step():
    trainer.zero_grad()
    torch.nn.functional.mse_loss(net(torch.randn(8, 3)), torch.zeros(8, 1)).backward()
    trainer.step()


step()
if rank == 1:
    net.load_state_dict({name: one + 1 for name, one in net.state_dict().items()})
try:
    step()
except ValueError as err:
    print("refused", err, flush=True)
trainer.assign()
step()
print("weights", [round(float(one.detach().double().sum()), 6) for one in net.parameters()], flush=True)
if rank == 1:
    with torch.no_grad():
        net[0].weight.zero_()
step()
"""


@pytest.mark.peers
@pytest.mark.parametrize("update_on_kvstore", ["True", "False"])
def test_workers_of_a_job_hear_of_a_change_on_one_of_them_and_go_on_or_end(
    tmp_path: Path, update_on_kvstore: str
) -> None:
    """The second change is not caught: the job ends with the parameter's name, and no worker waits."""
    script = tmp_path / "program.py"
    script.write_text(CHANGING, "utf-8")
    command = [sys.executable, "-m", "distrun", "launch", "-q", "-n", "2", "-s", "2", "--launcher", "local"]
    command += ["--no-prefix", "--run-dir", str(tmp_path / "jobs"), python_of("torch"), str(script), update_on_kvstore]
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    refusals = [line for line in lines if line.startswith("refused")]
    assert len(refusals) == 2
    assert refusals[0] == refusals[1]
    assert "parameter '0.weight' on worker-1 and not on worker-0" in refusals[0]
    assert "call trainer.assign() on all workers" in refusals[0]
    weights = {line for line in lines if line.startswith("weights")}
    assert len(weights) == 1, weights
    assert "parameter '0.weight' on worker-1 and not on worker-0" in done.stderr
