"""MXNet's names that `cifar10_gluon.py` uses, for torch and for distrun's store, trainer and data.

It shows how little a program in Gluon needs to run today. It is no copy of Gluon: names that the program does not use
are missing, and a loss is the sum over the batch instead of a value for each example.

Source: the API pages of MXNet 1.9.1.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import networks
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from distrun_runtime import data, kvstore, trainer


class CIFAR10:
    """The images of CIFAR-10's binary files, bytes (32, 32, 3), and labels from 0 to 9, each given to `transform`."""

    def __init__(self, root: str, train: bool, transform: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self._examples, self._transform = data.CIFAR10(data.cifar10_files(root, train)), transform

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, position: int) -> tuple[Any, Any]:
        image, label = self._examples[position]
        pixels = (image * 255).round().astype(np.uint8)  # gives back the bytes of the file exactly
        return self._transform(pixels.transpose(1, 2, 0), label)


class Net:
    """A torch network with a copy on each device; a call uses the copy on the device of its images."""

    recording = False
    """Whether calls are those of a training: gradients are kept, and BatchNorm uses the batch's statistics."""

    def __init__(self, net: nn.Module) -> None:
        self._net = net
        self._copies: dict[str, nn.Module] = {}

    def initialize(self, init: Callable[[Tensor], Tensor], ctx: Sequence[str]) -> None:
        for weight in self._net.parameters():
            if weight.ndim > 1:  # biases and the scales of BatchNorm stay as torch sets them
                init(weight)
        self._copies = {device: copy.deepcopy(self._net).to(device) for device in ctx}

    def collect_params(self) -> list[list[nn.Parameter]]:
        return [list(copies) for copies in zip(*(one.parameters() for one in self._copies.values()), strict=True)]

    def __call__(self, images: Tensor) -> Tensor:
        net = self._copies[str(images.device)].train(self.recording)
        with torch.set_grad_enabled(self.recording):
            scores: Tensor = net(images)
        return scores


class Trainer(trainer.Trainer):
    """A trainer after whose step the next gradients replace those before, as in Gluon; torch's are added up."""

    def __init__(self, params: list[list[nn.Parameter]], *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self._weights = [one for copies in params for one in copies]

    def step(self, *args: Any, **options: Any) -> None:
        super().step(*args, **options)
        for weight in self._weights:
            weight.grad = None


class Accuracy:
    """The share of examples whose highest score is their label."""

    def __init__(self) -> None:
        self._right = self._count = 0

    def update(self, labels: Tensor, preds: Tensor) -> None:
        self._right += int((preds.argmax(1).cpu() == labels.cpu()).sum())
        self._count += len(labels)

    def get(self) -> tuple[str, float]:
        return "accuracy", self._right / self._count


@contextlib.contextmanager
def record() -> Iterator[None]:
    """Keep what the gradients of calls of networks need."""
    Net.recording = True
    try:
        yield
    finally:
        Net.recording = False


def resnet18(block: type[nn.Module], layers: Sequence[int], channels: Sequence[int], **form: Any) -> Net:
    """Return ResNet-18 for images of 32 x 32. Its arguments are those of ResNetV1 that say just that."""
    width = channels[0]
    expected = (networks.Block, [2, 2, 2, 2], [width, width, 2 * width, 4 * width, 8 * width])
    if (block, layers, channels) != expected or form != {"classes": 10, "thumbnail": True}:
        raise ValueError("of ResNetV1 there is only the network with 18 layers for 10 classes of images of 32 x 32")
    return Net(networks.resnet18(width))


autograd = SimpleNamespace(record=record)
gluon = SimpleNamespace(
    Trainer=Trainer,
    data=SimpleNamespace(
        DataLoader=DataLoader, sampler=SimpleNamespace(Sampler=Sampler), vision=SimpleNamespace(CIFAR10=CIFAR10)
    ),
    loss=SimpleNamespace(SoftmaxCrossEntropyLoss=lambda: nn.CrossEntropyLoss(reduction="sum")),
    utils=SimpleNamespace(split_and_load=data.split_and_load),
)
init = SimpleNamespace(Xavier=lambda: nn.init.xavier_uniform_)
kv = kvstore
metric = SimpleNamespace(Accuracy=Accuracy)
nd = np
vision = SimpleNamespace(ResNetV1=resnet18, BasicBlockV1=networks.Block)


def cpu() -> str:
    """Return the device of host memory."""
    return "cpu"


def gpu(number: int) -> str:
    """Return a GPU of this machine, or end the program with what is there."""
    return networks.devices_of(str(number))[0]
