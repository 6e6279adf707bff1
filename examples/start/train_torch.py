"""Train a small network of torch to tell three spirals of points apart. The points are made here.

Alone:     python3 train.py
As a job:  distrun launch -f job.toml
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

import distrun_runtime
import distrun_runtime.torch as dt

POINTS, SPIRALS, HIDDEN = 4000, 3, 64
EPOCHS, BATCH = 10, 50


def spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return points (count, 2) and the number of each one's spiral (count,)."""
    rng = torch.Generator().manual_seed(seed)
    spiral, radius = torch.randint(SPIRALS, (count,), generator=rng), torch.rand(count, generator=rng)
    angle = 4 * radius + spiral * 2 * torch.pi / SPIRALS + 0.15 * torch.randn(count, generator=rng)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), spiral


def main() -> None:
    rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    points, labels = spirals(POINTS // workers, seed=rank)  # this worker's
    test_points, test_labels = spirals(1000, seed=1000)
    net = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SPIRALS))
    opt = torch.optim.Adam(net.parameters(), lr=0.02)
    opt = dt.DistributedOptimizer(opt, net)  # gradients are means over all workers; alone it changes nothing
    steps = len(points) // BATCH
    for epoch in range(EPOCHS):
        for step in range(steps):
            batch = slice(step * BATCH, (step + 1) * BATCH)
            loss = nn.functional.cross_entropy(net(points[batch]), labels[batch])
            loss.backward()
            opt.step()
            opt.zero_grad()
            distrun_runtime.report(step=epoch * steps + step + 1, total=EPOCHS * steps, loss=loss.item())
        accuracy = (net(test_points).argmax(dim=1) == test_labels).float().mean().item()
        distrun_runtime.report(accuracy=accuracy)
        if rank == 0:
            print("epoch %2d of %d: loss %.3f, accuracy %.3f" % (epoch + 1, EPOCHS, loss, accuracy), flush=True)


if __name__ == "__main__":
    main()
