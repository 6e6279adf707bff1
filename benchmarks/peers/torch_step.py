"""One rank of training steps with torch, on its own part of the data: MODEL STEPS FORM.

`ddp`: torch's DistributedDataParallel over gloo, and its SGD. `opt`: torch's SGD in distrun's DistributedOptimizer.
`trainer`: distrun's Trainer. `opt-overlap`, `overlap`: the same two with overlap=True. `none`: torch's SGD without
other ranks: what the step takes without communication.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from functools import partial
from typing import Any, Callable, List, Tuple

import torch
from report import WARM_UP, report

BATCH = 16
RATE, MOMENTUM = 1e-2, 0.9
"""Of both optimizers."""

MODELS: dict[str, List[int]] = {
    "1M": [512] * 5,
    "10M": [1024] * 11,
    "25M": [1024] * 25,
    "300 small": [16] * 151,
}
"""Widths of the layers of a perceptron: a weight and a bias between any two."""

Step = Tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], Any], Callable[[], Any], Callable[[], None]]
"""Forward, forgetting the gradients, the update, and the end."""


def network(widths: List[int]) -> torch.nn.Sequential:
    """Return the perceptron, with the same weights on every rank."""
    torch.manual_seed(1)
    layers: List[torch.nn.Module] = []
    for inner, outer in itertools.pairwise(widths):
        layer = torch.nn.Linear(inner, outer)
        # With nearly linear ones behind: so the first layers have as large gradients as the last ones.
        torch.nn.init.orthogonal_(layer.weight)
        layers += [layer, torch.nn.LeakyReLU(0.99)]
    return torch.nn.Sequential(*layers)


def by_ddp(net: torch.nn.Module) -> Step:
    """Train with torch alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    wrapped = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE, momentum=MOMENTUM)
    return wrapped, optimizer.zero_grad, optimizer.step, dist.destroy_process_group


def by_trainer(net: torch.nn.Module, overlap: bool) -> Step:
    """Train with distrun's Trainer."""
    from distrun_runtime.trainer import Trainer

    rule = {"learning_rate": RATE, "momentum": MOMENTUM}
    trainer = Trainer(net, "sgd", rule, kvstore="dist_sync", **({"overlap": True} if overlap else {}))
    return net, trainer.zero_grad, trainer.step, trainer.close


def by_optimizer(net: torch.nn.Module, overlap: bool) -> Step:
    """Train with torch's SGD, whose gradients distrun averages."""
    import distrun_runtime.torch as dt

    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    optimizer = dt.DistributedOptimizer(optimizer, net, overlap=overlap)
    return net, optimizer.zero_grad, optimizer.step, dt.store().close


def by_itself(net: torch.nn.Module) -> Step:
    """Train without other ranks."""
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=MOMENTUM)
    return net, optimizer.zero_grad, optimizer.step, lambda: None


def main() -> None:
    """Make the steps, and print the report."""
    model, steps, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    net = network(MODELS[model])
    forms = {
        **{"ddp": by_ddp, "none": by_itself},
        **{"trainer": partial(by_trainer, overlap=False), "overlap": partial(by_trainer, overlap=True)},
        **{"opt": partial(by_optimizer, overlap=False), "opt-overlap": partial(by_optimizer, overlap=True)},
    }
    forward, zero_grad, update, close = forms[form](net)
    rank = int(os.environ["RANK"])
    data = torch.randn(BATCH, MODELS[model][0], generator=torch.Generator().manual_seed(rank))
    times = []
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for _ in range(steps + WARM_UP):
        begin = time.perf_counter()
        zero_grad()
        forward(data).square().mean().backward()
        update()
        times.append(time.perf_counter() - begin)
    moved = all(bool((new != old).any()) for new, old in zip(net.parameters(), before, strict=True))
    if not moved:
        sys.exit("torch_step.py: a parameter was not trained")
    report(form, model, rank, times)
    close()


if __name__ == "__main__":
    main()
