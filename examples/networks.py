"""The networks of the examples, in torch, and the devices they run on.

Sources: mlp and lenet as in MXNet's train_mnist.py (LeCun et al. 1998); vgg11 of Simonyan and Zisserman 2014, with
batch normalisation; resnet18 of He et al. 2015, in the form for images of 32 x 32.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from distrun_runtime.data.reader import Batch


def devices_of(gpus: str | None) -> list[str]:
    """Return the devices for --gpus, such as `0,2`; the CPU without it."""
    if not gpus:
        return ["cpu"]
    there = torch.cuda.device_count()
    for number in gpus.split(","):
        if int(number) >= there:
            sys.exit(
                "--gpus %s: torch sees %d GPUs here and none is %s; to train on the CPU leave --gpus out"
                % (gpus, there, number)
            )
    return ["cuda:%d" % int(number) for number in gpus.split(",")]


def replicas_of(net: nn.Module, devices: list[str]) -> tuple[list[nn.Module], list[list[nn.Parameter]]]:
    """Return a copy of the network on each device, and each parameter as the list of its copies."""
    nets = [copy.deepcopy(net).to(device) for device in devices]
    return nets, [list(copies) for copies in zip(*(one.parameters() for one in nets), strict=True)]


def accuracy(net: nn.Module, batches: Iterable[Batch]) -> float:
    """Return the share of images whose highest score is their label."""
    first = next(net.parameters())
    right = count = 0
    net.eval()
    with torch.no_grad():
        for images, labels in batches:
            scores = net(torch.as_tensor(images).to(first.device, first.dtype)).float().cpu()
            right += int((scores.argmax(1) == torch.as_tensor(labels)).sum())
            count += len(labels)
    net.train()
    return right / count


def mlp() -> nn.Module:
    """Return three fully connected layers for images of 28 x 28."""
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(nn.Flatten(), *layers)


def lenet() -> nn.Module:
    """Return LeNet for images (1, 28, 28)."""
    convolutions = [nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10))


def vgg11(width: int = 64) -> nn.Module:
    """Return VGG-11 for images (3, 32, 32); its first layer has `width` channels."""
    layers: list[nn.Module] = []
    channels = 3
    for factor in (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0):
        if factor:
            layers += [nn.Conv2d(channels, factor * width, 3, padding=1), nn.BatchNorm2d(factor * width), nn.ReLU()]
            channels = factor * width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


class Block(nn.Module):
    """Two convolutions and a short cut around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.second, self.second_norm = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        straight = stride == 1 and channels == out
        conv = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.short = nn.Identity() if straight else nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, images: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.short(images))


def resnet18(width: int = 64) -> nn.Module:
    """Return ResNet-18 for images (3, 32, 32); its first layer has `width` channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for factor, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)):
        layers.append(Block(channels, factor * width, stride))
        channels = factor * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
