"""Programs of torch that are trained by DDP over gloo and by DistributedOptimizer, on the same seed and data.

Run by every worker of a job. Rank 0 prints an object of the cases and what went wrong in each, empty where they agree.
"""

from __future__ import annotations

import contextlib
import json
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distrun_runtime.torch as dt

STEPS = 6
X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True).sin()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's part of a step's data."""
    some = torch.arange(24 * step, 24 * step + 24).remainder(96)[dist.get_rank() :: dist.get_world_size()]
    return X[some], Y[some]


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 80), nn.Tanh(), nn.Linear(80, 1))


def backward(model: nn.Module, step: int) -> torch.Tensor:
    x, y = batch(step)
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    return loss


class Way:
    """How a program is trained: by DDP or by us."""

    def __init__(self, ours: dict[str, object] | None, **ddp: object) -> None:
        self.ours, self.ddp = ours, ddp

    def wrap(self, net: nn.Module, opt: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.ours is None:
            return DistributedDataParallel(net, **self.ddp), opt
        same = dt.DistributedOptimizer(opt, net, **self.ours)
        assert same is opt
        return net, opt

    def no_sync(self, model: nn.Module, opt: torch.optim.Optimizer, unless: bool) -> contextlib.AbstractContextManager:
        if self.ours is not None:
            return opt.no_sync(unless=unless)
        return contextlib.nullcontext() if unless else model.no_sync()


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


# --- programs: each returns the tensors that have to agree


def clipping(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        opt.step()
    return [*net.parameters(), *(param.grad for param in net.parameters())]


def grad_scaler(way: Way) -> list[torch.Tensor]:
    """An infinite loss on one rank has all ranks skip the step."""
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    scaler, skipped = torch.amp.GradScaler("cpu", init_scale=4.0), 0
    for step in range(STEPS):
        opt.zero_grad()
        x, y = batch(step)
        loss = functional.mse_loss(model(x), y) * (float("inf") if step == 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        before = net[0].weight.clone()
        scaler.step(opt)
        scaler.update()
        skipped += torch.equal(before, net[0].weight)
    assert skipped == 1, skipped
    return list(net.parameters())


def one_cycle(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    opt = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.02, total_steps=STEPS)
    model, opt = way.wrap(net, opt)
    for step in range(STEPS):
        backward(model, step)
        opt.step()
        schedule.step()
        opt.zero_grad()
    return list(net.parameters())


def lbfgs(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4))
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            opt.zero_grad()
            return backward(model, step)

        opt.step(closure)
    return list(net.parameters())


def two_backwards(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        backward(model, step + 1)
        opt.step()
    return list(net.parameters())


def accumulation(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        with way.no_sync(model, opt, unless=step % 3 == 2):
            backward(model, step)
        if step % 3 == 2:
            opt.step()
            opt.zero_grad()
    return list(net.parameters())


def zeroed_in_place(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, torch.optim.Adam(net.parameters(), fused=True))
    for step in range(STEPS):
        opt.zero_grad(set_to_none=False)
        backward(model, step)
        opt.step()
    return list(net.parameters())


class Branches(nn.Module):
    """In each step some ranks use one branch, others the other one, and none uses `never`."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 1)
        self.never = nn.Linear(8, 1)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        branch = self.one if self.step == 1 or (self.step + dist.get_rank()) % 2 else self.two
        return self.head(branch(x))


def unused(way: Way) -> list[torch.Tensor]:
    net = Branches()
    way.ddp["find_unused_parameters"] = True
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        assert (net.two.weight.grad is None) == (step == 0)
        assert net.never.weight.grad is None
        opt.step()
    return list(net.parameters())


def batch_norm(way: Way) -> list[torch.Tensor]:
    """Buffers are rank 0's: DDP gives them to the others in the next forward, we at once."""
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    net.register_buffer("mask", torch.tensor([True, False]))
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        opt.step()
    with torch.no_grad():
        model(batch(0)[0])
    return [*net.parameters(), *net.buffers()]


def half_precision(way: Way) -> list[torch.Tensor]:
    net = perceptron().bfloat16()
    net.scale = nn.Parameter(torch.ones(3))
    net.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    net.exact = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        x, y = batch(step)
        out = model(x.bfloat16()).float() * net.scale.sum() + net.exact.sum() + net.wave.sum().abs()
        functional.mse_loss(out, y).mul(0.1).backward()
        opt.step()
    return list(net.parameters())


def autocast(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            x, y = batch(step)
            loss = functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
    return list(net.parameters())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 300), nn.Linear(300, 1)
        self.blocks = nn.ModuleList(nn.Linear(300, 300) for _ in range(2))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(lambda y, block=block: block(y).tanh(), x, use_reentrant=self.reentrant)
        return self.head(x)


def checkpoints(way: Way, reentrant: bool = False) -> list[torch.Tensor]:
    net = Checkpointed(reentrant and way.ours is not None)
    model, opt = way.wrap(net, sgd(net))
    exchanges = 0
    if way.ours is not None:
        average = opt._averaging._average

        def counted() -> None:
            nonlocal exchanges
            exchanges += 1
            average()

        opt._averaging._average = counted
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        opt.step()
    assert exchanges in (0, STEPS), exchanges
    return list(net.parameters())


def reentrant_checkpoints(way: Way) -> list[torch.Tensor]:
    """A backward within a backward is no end of it: there is one exchange a step."""
    return checkpoints(way, reentrant=True)


def compiled(way: Way) -> list[torch.Tensor]:
    net = perceptron()
    model, opt = way.wrap(net, sgd(net))
    model = torch.compile(model, backend="aot_eager")
    for step in range(STEPS):
        opt.zero_grad()
        backward(model, step)
        opt.step()
    return list(net.parameters())


class Tied(nn.Module):
    """An embedding whose weight is the output's, and a convolution whose weight has other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 16), nn.Linear(16, 10, bias=False)
        self.out.weight = self.embed.weight
        self.conv = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        images = self.embed(ids).view(-1, 4, 4, 6).to(memory_format=torch.channels_last)
        return self.out(self.conv(images).flatten(1)[:, :16])


def shared_weights(way: Way) -> list[torch.Tensor]:
    net = Tied()
    model, opt = way.wrap(net, sgd(net))
    for step in range(STEPS):
        opt.zero_grad()
        ids = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
        model(ids).square().mean().backward()
        opt.step()
    assert net.conv.weight.grad.stride() == net.conv.weight.stride()
    return list(net.parameters())


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=True)
        self.bag, self.out = nn.EmbeddingBag(30, 3, sparse=True), nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).sum(1) + self.bag(ids))


def sparse_gradients(way: Way) -> list[torch.Tensor]:
    net = Sparse()
    model, opt = way.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in range(STEPS):
        opt.zero_grad()
        ids = torch.randint(0, 20, (4, 3 + dist.get_rank()), generator=torch.Generator().manual_seed(step))
        model(ids).square().mean().backward()
        assert net.table.weight.grad.is_sparse
        opt.step()
    return list(net.parameters())


def unfrozen_and_added(way: Way) -> list[torch.Tensor]:
    """DDP has to be made again for that."""
    net = perceptron()
    net[2].requires_grad_(False)
    model, opt = way.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    for step in range(STEPS):
        if step == 2:
            net[2].requires_grad_(True)
        if step == 4:
            net[0].requires_grad_(False)
            torch.manual_seed(dist.get_rank())
            net.append(nn.Linear(1, 1))
        if way.ours is None and step in (2, 4):
            model = DistributedDataParallel(net)
        if step == 4:
            opt.add_param_group({"params": net[5].parameters(), "lr": 0.01})
        opt.zero_grad()
        backward(model, step)
        opt.step()
    return list(net.parameters())


PROGRAMS = [
    *(clipping, grad_scaler, one_cycle, lbfgs, two_backwards, accumulation, zeroed_in_place, unused, batch_norm),
    *(half_precision, autocast, checkpoints, reentrant_checkpoints, compiled, shared_weights),
    *(sparse_gradients, unfrozen_and_added),
]
NO_OVERLAP = (reentrant_checkpoints,)


def difference(program, ours: dict[str, object]) -> str:
    """Return what differs between DDP and us: nothing with two ranks, else what another order of additions makes."""
    found = []
    for way in (Way(None), Way(ours)):
        torch.manual_seed(dist.get_rank())  # rank 0's parameters are taken
        found.append([tensor.detach().clone() for tensor in program(way)])
    for at, (theirs, mine) in enumerate(zip(*found, strict=True)):
        if dist.get_world_size() == 2:
            same = torch.equal(theirs, mine)
        else:
            rtol, atol = (0.02, 0.01) if program is half_precision else (1e-4, 1e-5)
            same = torch.allclose(theirs, mine, rtol, atol)
        if not same:
            return f"tensor {at} of {tuple(theirs.shape)} differs by {(theirs.double() - mine.double()).abs().max()}"
    return ""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = {}
    for ours in ({}, {"overlap": True}):
        for program in PROGRAMS if not ours else [each for each in PROGRAMS if each not in NO_OVERLAP]:
            try:
                said = difference(program, ours)
            except Exception:
                said = traceback.format_exc()
            everywhere = [None] * dist.get_world_size()
            dist.all_gather_object(everywhere, said)
            result[f"{program.__name__} {ours}"] = "\n".join(filter(None, everywhere))
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
