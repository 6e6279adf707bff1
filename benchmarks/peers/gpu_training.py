"""One rank of training steps of ResNet-18 on a GPU, on its own batch: STEPS ddp|trainer|none DEVICE [SIZE].

`ddp`: torch's DistributedDataParallel over gloo, and its SGD. `trainer`: distrun's Trainer with `dist_device_sync`,
whose servers update the weights. `none`: torch's SGD without other ranks. DEVICE is `cuda:0`, or `cpu` for a try; SIZE
the width of the images, 64 if it is not given.

With the trainer a small network in float64 is trained first, and compared with one that torch trains on the CPU from
the gradients of all ranks: the weights are the same as without a GPU.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from typing import Any

import torch
from report import WARM_UP, report
from torch import nn
from torch_step import MOMENTUM, RATE, Step, by_ddp, by_itself

BATCH = 16
MOST = 1e-9
"""So much may weights in float64 differ: the order of sums is another one on a GPU."""


class Block(nn.Module):
    """Two convolutions, and a way past them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.past = nn.Conv2d(before, after, 1, stride) if (before, stride) != (after, 1) else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the block's features."""
        found = torch.relu(self.norms[0](self.first(images)))
        return torch.relu(self.norms[1](self.second(found)) + self.past(images))


def resnet18() -> nn.Module:
    """Return the network: 11.7 million parameters, with the same weights on every rank."""
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for before, after in ((64, 64), (64, 128), (128, 256), (256, 512)):
        layers += [Block(before, after, 1 if before == after else 2), Block(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def by_trainer(net: nn.Module) -> Step:
    """Train with distrun's Trainer."""
    from distrun_runtime.trainer import Trainer

    trainer = Trainer(net, "sgd", {"learning_rate": RATE, "momentum": MOMENTUM}, kvstore="dist_device_sync")
    return net, trainer.zero_grad, trainer.step, trainer.close


def batch(rank: int, *shape: int, **how: Any) -> torch.Tensor:
    """Return the data of a rank."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(rank), **how)


def difference(device: str, ranks: int, rank: int) -> float:
    """Train a small network in float64; return how far it is from what torch has on the CPU."""
    torch.manual_seed(2)
    expected = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)).double()
    net = copy.deepcopy(expected).to(device)
    optimizer = torch.optim.SGD(expected.parameters(), lr=RATE, momentum=MOMENTUM)
    forward, zero_grad, update, close = by_trainer(net)
    data = [batch(each, 64, dtype=torch.float64) for each in range(ranks)]
    for _ in range(4):
        zero_grad()
        forward(data[rank].to(device)).square().mean().backward()
        update()
        optimizer.zero_grad()
        (sum(expected(each).square().mean() for each in data) / ranks).backward()  # type: ignore[union-attr]
        optimizer.step()
    pairs = zip(net.parameters(), expected.parameters(), strict=True)
    found = max(float((one.detach().cpu() - other.detach()).abs().max()) for one, other in pairs)
    close()
    return found


def main() -> None:
    """Make the steps, and print the report."""
    steps, form, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    size = int(sys.argv[4]) if len(sys.argv) > 4 else 64
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if form == "trainer" and (error := difference(device, ranks, rank)) > MOST:
        sys.exit("gpu_training.py: the weights differ by %g from those without a GPU" % error)
    net, data = resnet18().to(device), batch(rank, 3, size, size).to(device)
    forward, zero_grad, update, close = {"ddp": by_ddp, "none": by_itself, "trainer": by_trainer}[form](net)
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    times = []
    for _ in range(steps + WARM_UP):
        wait()
        begin = time.perf_counter()
        zero_grad()
        forward(data).square().mean().backward()
        update()
        wait()
        times.append(time.perf_counter() - begin)
    report(form, "resnet18", rank, times)
    close()


if __name__ == "__main__":
    main()
