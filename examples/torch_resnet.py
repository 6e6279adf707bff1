"""Train a small residual network (He et al. 2015) on made-up images. Five lines are distrun's (docs/torch.md).

Alone:            python examples/torch_resnet.py
With a launcher:  distrun launch -n 2 -s 2 --launcher local python examples/torch_resnet.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

import distrun_runtime.torch as dt


class Block(nn.Module):
    """Two convolutions and a short cut around them."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.second_norm = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, 2)

    def forward(self, images: Tensor) -> Tensor:
        hidden = relu(self.first_norm(self.first(images)))
        return relu(self.second_norm(self.second(hidden)) + self.short(images))


def resnet(width: int) -> nn.Module:
    blocks = [Block(3, width), Block(width, 2 * width), Block(2 * width, 4 * width)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def patterns(count: int, seed: int) -> TensorDataset:
    """Return images (3, 16, 16) of 10 classes: each is its class's coarse pattern of colours, in noise."""
    classes = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(10)).repeat_interleave(4, 2)
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 3, 16, 16, generator=generator)
    return TensorDataset(classes.repeat_interleave(4, 3)[labels] + 1.5 * noise, labels)


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images whose highest score is their label."""
    net.eval()
    with torch.no_grad():
        return float((net(images).argmax(1) == labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes for a step (default 32)")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate (default 0.1)")
    options = parser.parse_args()

    torch.manual_seed(0)
    train, test = patterns(2000, seed=1), patterns(500, seed=2)
    loader = DataLoader(train, options.batch_size, sampler=dt.DistributedSampler(train))
    net = resnet(8)
    opt = torch.optim.SGD(net.parameters(), options.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, options.lr, total_steps=options.epochs * len(loader))
    opt = dt.DistributedOptimizer(opt, net)
    for epoch in range(options.epochs):
        loader.sampler.set_epoch(epoch)
        net.train()
        for images, labels in loader:
            cross_entropy(net(images), labels).backward()
            opt.step()
            sched.step()
            opt.zero_grad()
        found = dt.mean(accuracy(net, *test.tensors))
        print("Epoch %d: Test_acc %.6f" % (epoch, found), flush=True)


if __name__ == "__main__":
    main()
