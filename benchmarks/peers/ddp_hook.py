"""One rank that trains by DDP over gloo, with or without a hook that compresses: DATA STEPS HOW [RATE [THRESHOLD]].

HOW is `gloo`, or a compression of `ddp_hook`: `fp16`, `2bit` or `topk`. The report has the accuracy on the test images.
With a learning rate, and a threshold for `2bit`, it is for choosing these: a fifth of the images for training is left
out, and the accuracy is on that fifth. Test images have no part in that.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from report import report
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel

BATCH = 16


class Task(NamedTuple):
    """Images and their classes, and what learns them."""

    net: nn.Module
    rate: float
    threshold: float
    """Of `2bit`: about the size of the larger gradients."""
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


def digits() -> Task:
    """Return scikit-learn's scans of digits, 8 x 8, and a perceptron of 8.5 million parameters."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(classes)[order]
    layers = [nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
    layers += [nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)]
    return Task(nn.Sequential(*layers), 0.3, 0.001, (x[360:], y[360:]), (x[:360], y[:360]))


def colours() -> Task:
    """Return made images in CIFAR's form, 3 x 32 x 32 of 10 classes, and a network of 8.4 million parameters.

    Each class has four coarse patterns of colours; an image is one of them, moved, with other contrast and much noise.
    """
    draw = torch.Generator().manual_seed(0)
    patterns = interpolate(torch.randn(40, 3, 6, 6, generator=draw), 32, mode="bicubic")
    which = torch.randint(40, (3200,), generator=draw)
    x = patterns[which] * (0.5 + torch.rand(3200, 1, 1, 1, generator=draw))
    moves = torch.randint(-4, 5, (3200, 2), generator=draw).tolist()
    x = torch.stack([image.roll(move, (1, 2)) for image, move in zip(x, moves, strict=True)])
    x += 1.5 * torch.randn(x.shape, generator=draw)
    layers = [nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 10)]
    y = which % 10
    return Task(nn.Sequential(*layers), 0.1, 0.02, (x[800:], y[800:]), (x[:800], y[:800]))


def batches(images: int, size: int, rank: int) -> Iterator[torch.Tensor]:
    """Yield this rank's part of each batch, epoch after epoch without an end."""
    for epoch in itertools.count():
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, images - size * BATCH + 1, size * BATCH):
            yield order[start + rank : start + size * BATCH : size]


def main() -> None:
    """Train, and print the report."""
    data, steps, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, rate, threshold, (x, y), test = {"digits": digits, "colours": colours}[data]()
    if sys.argv[4:]:
        rate = float(sys.argv[4])
        threshold = float(sys.argv[5]) if sys.argv[5:] else threshold
        kept = len(x) * 4 // 5
        test, x, y = (x[kept:], y[kept:]), x[:kept], y[:kept]
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(net)
    if how != "gloo":
        import distrun_runtime.torch as dt

        compression = {"type": how, "threshold": threshold} if how == "2bit" else {"type": how}
        wrapped.register_comm_hook(None, dt.ddp_hook(dt.store(), compression))
    optimizer = torch.optim.SGD(wrapped.parameters(), rate)
    times = []
    for mine in itertools.islice(batches(len(x), size, rank), steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(wrapped(x[mine]), y[mine]).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    with torch.no_grad():
        accuracy = float((net(test[0]).argmax(1) == test[1]).float().mean())
    report(how, data, rank, times, accuracy=accuracy, parameters=sum(each.numel() for each in net.parameters()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
