"""`DistributedOptimizer`: what it does by itself; and beside DDP, in a job of torch_optimizer_program.py."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import cases_of, outcomes_of, run_script
from slowness import scaled

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "torch_optimizer_program.py"
CASES = PROGRAM.with_name("torch_optimizer_cases.py")
OTHERS = cases_of(CASES)
NAMES = re.findall(r"^def (\w+)\(way: Way", PROGRAM.read_text("utf-8"), re.MULTILINE)


@functools.cache
def outcomes(workers: int, folder: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "distrun", "launch", "-q", "-n", str(workers), "-s", "1", "--no-prefix"]
    command += ["--launcher", "local", "--run-dir", str(folder), "--env", "OMP_NUM_THREADS=1"]
    command += ["--timeout", "%g" % scaled(240)]
    done = subprocess.run([*command, python_of("torch"), str(PROGRAM)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.mark.peers
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_program_trains_as_by_ddp(folder: Path, name: str, workers: int) -> None:
    """With two workers to the bit, also with overlap."""
    found = {case: said for case, said in outcomes(workers, folder).items() if case.split()[0] == name}
    assert found
    assert not any(found.values()), found


@pytest.fixture(scope="module")
def others() -> dict[str, str]:
    return outcomes_of(CASES, python_of("torch"))


@pytest.mark.peers
@pytest.mark.parametrize("case", OTHERS)
def test_beside_training(others: dict[str, str], case: str) -> None:
    assert others[case] == "", others[case]


@pytest.mark.peers
@pytest.mark.parametrize("number", [0, 1])
def test_programs_of_the_page_run(tmp_path: Path, number: int) -> None:
    section = (
        (ROOT / "docs" / "torch.md").read_text("utf-8").partition("## Optimizers of torch")[2].partition("\n## ")[0]
    )
    program = section.split("```python\n")[number + 1].partition("```")[0]
    told = 'print("same", [round(float(p.sum()), 6) for p in net.parameters()], flush=True)'
    done = run_script(tmp_path, program + told, python=python_of("torch"), servers=1)
    lines = [line for line in done.stdout.splitlines() if line.startswith("same")]
    assert done.returncode == 0, done.stderr
    assert len(lines) == 2
    assert lines[0] == lines[1]


@pytest.mark.peers
def test_gradients_of_each_backward_use_memory_that_is_there(tmp_path: Path) -> None:
    """Counted in page faults: gradients of 96 MiB take 24,000 of them if their memory is new."""
    program = """\
import resource, statistics, torch
import distrun_runtime.torch as dt

torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(24)])
opt = dt.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net)
faults = []
for _ in range(20):
    opt.zero_grad()
    loss = net(torch.randn(16, 1024)).square().mean()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    loss.backward()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print("mean", sum(faults[10:]) / 10, faults, flush=True)
"""
    done = run_script(tmp_path, program, python=python_of("torch"), servers=1)
    means = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("mean")]
    assert done.returncode == 0, done.stderr
    assert len(means) == 2
    assert max(means) < 1000, done.stdout
