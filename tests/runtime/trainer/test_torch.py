"""The trainer with torch: the cases of tests/support/torch_program.py, each a test here, run by one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import cases_of, outcomes_of, run_script

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "torch_program.py"
CASES = cases_of(PROGRAM)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(PROGRAM, python_of("torch"))


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_with_torch(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


@pytest.mark.peers
def test_every_case_was_run(outcomes: dict[str, str]) -> None:
    assert set(outcomes) == set(CASES)


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
    done = run_script(tmp_path, CHANGING, update_on_kvstore, python=python_of("torch"), servers=2)
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
