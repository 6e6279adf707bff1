"""The optimizer on the servers: the cases of tests/support/server_optimizer_program.py, each a test; and a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import cases_of, outcomes_of, run_script

ROOT = Path(__file__).resolve().parents[3]
PROGRAM, PAGE = ROOT / "tests" / "support" / "server_optimizer_program.py", ROOT / "docs" / "torch.md"
CASES = cases_of(PROGRAM)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(PROGRAM, python_of("torch"))


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES)
def test_with_torch(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


JOB = """\
import copy
import sys
import torch
import distrun_runtime.torch as dt

torch.set_default_dtype(torch.float64)  # a BatchNorm layer makes much of roundings
torch.manual_seed(dt.rank())
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8))
net[0].bias.requires_grad_(False)
net[2].running_mean.fill_(dt.rank())
more = {"asynchronous": True, "staleness": 2} if "async" in sys.argv else {}
opt = dt.ServerOptimizer(net, "adamw", lr=0.1, **more)
assert not net[2].running_mean.any()
alone = copy.deepcopy(net)
reference = torch.optim.AdamW(alone.parameters(), lr=0.1)
schedules = [torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=51) for each in (opt, reference)]
trained = [each for each in alone.parameters() if each.requires_grad]
for step in range(50):
    parts = [torch.linspace(-rank - 1, step, 32).reshape(8, 4).sin() for rank in range(dt.world_size())]
    opt.zero_grad()
    net(parts[dt.rank()]).pow(3).sum().backward()
    opt.step()
    grads = [torch.autograd.grad(alone(part).pow(3).sum(), trained) for part in parts]
    for each, *given in zip(trained, *grads):
        each.grad = sum(given) / len(parts)
    reference.step()
    for each in schedules:
        each.step()
if not more:
    for one, other in zip(net.parameters(), alone.parameters()):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
opt.kvstore.barrier()
opt.assign()
print(opt.kvstore.type, [round(each.detach().sum().item(), 6) for each in net.parameters()], flush=True)
"""


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_workers_of_a_job_share_weights_which_are_torchs_if_they_have_rounds(tmp_path: Path, kind: str) -> None:
    done = run_script(tmp_path, JOB, kind, python=python_of("torch"), servers=2)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith(f"dist_{kind}")


@pytest.mark.peers
def test_the_program_of_the_page_gives_all_workers_the_same_weights(tmp_path: Path) -> None:
    text = PAGE.read_text("utf-8").partition("## Optimizers on the servers")[2]
    done = run_script(tmp_path, text.split("```python\n")[1].split("```")[0], python=python_of("torch"), servers=2)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second


@pytest.mark.peers
def test_the_same_program_runs_alone(tmp_path: Path) -> None:
    done = run_script(tmp_path, JOB, python=python_of("torch"), workers=1)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("local")
