"""Checkpoints, samplers and metrics of torch: the cases of tests/support/torch_checkpoint_program.py, and jobs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import ROOT, cases_of, outcomes_of, run_script

PROGRAM = ROOT / "tests" / "support" / "torch_checkpoint_program.py"
CASES = cases_of(PROGRAM)

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return outcomes_of(PROGRAM, python_of("torch"))


@pytest.mark.parametrize("case", CASES)
def test_alone(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == "", outcomes[case]


STOPPED = """\
import random
import sys
import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
import distrun_runtime.torch as dt

DATA = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(24, 4).sin(), torch.arange(24.0).reshape(24, 1).cos())
# Each host has its own folder, or they share one: only rank 0's path is used.
PATH = sys.argv[1] if dt.rank() == 0 else "/nowhere/file"


class Run:
    def __init__(self, seed):
        torch.manual_seed(seed + dt.rank())
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.opt = torch.optim.AdamW(self.net.parameters(), 0.01)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, 0.1, total_steps=24)
        self.sampler = dt.DistributedSampler(DATA)
        self.seen = []

    def train(self, begin, save_at=None):
        loader = torch.utils.data.DataLoader(DATA, 2, sampler=self.sampler, num_workers=2)
        opt = dt.DistributedOptimizer(self.opt, self.net)
        for epoch in range(begin, 2):
            self.sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader):
                self.seen += x[:, 0].tolist()
                ((self.net(x) - y) ** 2).mean().backward()
                opt.step()
                self.sched.step()
                opt.zero_grad()
                if (epoch, number) == save_at:
                    dt.save(PATH, self.net, opt, self.sched, sampler=self.sampler, epoch=epoch)
                    self.seen = []
        return [*self.net.state_dict().values(), torch.rand(3)]


if len(sys.argv) == 2:  # with another number of workers: what is left of the epoch
    run = Run(2)
    start = dt.resume(PATH, run.net, run.opt, run.sched, sampler=run.sampler, epoch=0)
    weights = [float(each.double().sum()) for each in run.net.state_dict().values()]
    run.train(start.epoch)
    print("left", len(run.seen), len(set(run.seen)), "weights", weights)
    raise SystemExit

rank = dt.rank()
first = Run(0)
expected = first.train(0, (1, 1))
again = Run(1)
start = dt.resume(PATH, again.net, again.opt, again.sched, sampler=again.sampler, epoch=0)
print("weights", [float(each.double().sum()) for each in again.net.state_dict().values()])
found = again.train(start.epoch)
same = [torch.equal(one, other) for one, other in zip(expected, found)]
print("bit by bit", all(same), first.seen == again.seen, len(again.seen))

class Stateless:
    load_state_dict = None

    def state_dict(self):
        return {0: {}}[dt.rank()]  # fails on worker-1


net, other = nn.Linear(4, 1), nn.Linear(4, 1)
opts = [dt.ServerOptimizer(each, "adamw", states=sys.argv[1] + "-states") for each in (net, other)]
net(DATA[:][0]).sum().backward()
opts[0].step()
dt.save(PATH + "-served", net, opts[0])
dt.resume(PATH + "-served", other, opts[1])
print("bit by bit on servers", torch.equal(net.weight, other.weight))

torch.distributed.init_process_group("distrun")
sharded = fully_shard(nn.Linear(2, 2))
for act in (
    lambda: dt.save(PATH, sharded),
    lambda: dt.save(PATH, again.net, part=Stateless(), other=opts[0]),
    lambda: dt.mean(rank, weight=-rank),
    lambda: dt.save(PATH + "/x", again.net),
    lambda: dt.resume(PATH + "/x", again.net),
):
    try:
        act()
    except ValueError as err:
        print("refused", str(err).split(";")[0])

if rank == 0:  # a file of a run with one worker
    found = torch.load(PATH, weights_only=True)
    torch.save({**found, "streams": found["streams"][:1]}, PATH + "-of-one")
draws = []
for _ in range(2):
    dt.resume(PATH + "-of-one", again.net)
    draws.append([float(torch.rand(1)), float(np.random.rand()), random.random()])
print("random", draws[0] == draws[1], [dt.mean(draw) != draw for draw in draws[0]])
nothing = torch.tensor(1.0 if rank else float("nan"))
print("mean of some", dt.mean(nothing, weight=rank).item())
print("mean", dt.mean(rank), dt.mean(torch.tensor([rank, 2])).tolist(), dt.mean(rank, weight=3 if rank else 1))
print("holds", dt.any(rank == 1), dt.all(rank == 1), dt.any(torch.tensor([rank == 0, False])).tolist())
"""


def test_workers_go_on_bit_by_bit_with_random_numbers_of_their_own_and_agree_on_errors_and_metrics(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "checkpoint")
    done = run_script(tmp_path, STOPPED, path, "job", python=python_of("torch"), servers=2)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("weights")]
    texts = sorted(set(lines))
    assert sorted(lines) == sorted(texts * 2), "both workers say the same"
    assert texts[:4] == [
        "bit by bit True True 8",
        "bit by bit on servers True",
        "holds True False [True, False]",
        "mean 0.5 [0.5, 2.0] 0.75",
    ]
    assert texts[4:6] == ["mean of some 1.0", "random True [True, True, True]"]
    assert texts[6] == "refused weights are finite numbers from 0, and not all are 0"
    said = [re.match(r"refused worker-(. could not \w+) \S+: (\w+)", text).groups() for text in texts[7:]]
    assert said == [
        ("0 could not read", "NotADirectoryError"),
        ("0 could not save", "NotADirectoryError"),
        ("0 could not save", "KVError"),
        ("1 could not save", "KeyError"),
    ]

    env = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    command = [python_of("torch"), str(tmp_path / "program.py"), path]
    alone = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr
    (weights,) = {line for line in done.stdout.splitlines() if line.startswith("weights")}
    assert alone.stdout == f"left 16 16 {weights}\n"
