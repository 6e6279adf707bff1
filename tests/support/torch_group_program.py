"""Programs of torch that run over any backend: BACKEND CASE. Each rank prints what must not depend on the backend."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

X = torch.linspace(-1, 1, 96).reshape(24, 4)
Y = X.sum(1, keepdim=True).sin()


def tell(*words: object) -> None:
    print(int(os.environ["RANK"]), *words, flush=True)


def tell_weights(net: nn.Module) -> None:
    whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in net.state_dict().values()]
    tell([round(float(one.double().sum()), 5) for one in whole])


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 1))


def by_ddp(backend: str) -> None:
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1, bias=False))
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, 0.9)
    for number in range(4):
        optimizer.zero_grad()
        part = slice(12 * rank, 12 * rank + 12)
        if number % 2:
            with wrapped.no_sync():
                F.mse_loss(wrapped(X[part].flip(0)), Y[part]).backward()
        F.mse_loss(wrapped(X[part]), Y[part]).backward()
        optimizer.step()
    tell_weights(net)
    wide = nn.Linear(64, 64)
    wrapped = DistributedDataParallel(wide)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)  # Its callbacks wait for calls of their own.
    for _ in range(4):
        wide.zero_grad()
        wrapped(X.reshape(-1)[:64] + rank).sum().backward()
    tell(round(float(wide.weight.grad.sum()), 2))


def by_fsdp(backend: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(backend)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    for start in (0, 8, 16):
        optimizer.zero_grad()
        part = slice(start + 4 * dist.get_rank(), start + 4 * dist.get_rank() + 4)
        F.mse_loss(net(X[part]), Y[part]).backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    tell(round(float(norm.full_tensor()), 5))
    tell_weights(net)


def by_accelerate(backend: str) -> None:
    from accelerate import Accelerator

    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(TensorDataset(X, Y), batch_size=4))
    for x, y in loader:
        loss = F.mse_loss(net(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    tell(accelerator.num_processes, [round(one, 5) for one in accelerator.gather(loss.detach().reshape(1)).tolist()])
    tell_weights(accelerator.unwrap_model(net))


def by_lightning(backend: str) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1, 0.9)

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    strategy = DDPStrategy(process_group_backend=backend)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", devices=2, strategy=strategy, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=4))
    tell(trainer.world_size, dist.get_backend() == backend, round(float(trainer.callback_metrics["loss"]), 5))
    tell_weights(module.net)


def by_collectives(backend: str) -> None:
    import torch.distributed._functional_collectives as functional

    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(2.0 * size) + 10 * rank
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            one = mine.to(dtype)
            dist.all_reduce(one, operation)
            tell(dtype, operation, one.tolist())
    work = dist.all_reduce(one := mine.clone(), async_op=True)
    work.wait()
    tell("later", one.tolist(), work.is_completed())
    future = dist.all_reduce(mine.clone(), async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    tell("by a future", future.wait().tolist())
    with dist._coalescing_manager():
        first, second = torch.ones(2) * rank, torch.ones(3) * rank
        dist.all_reduce(first)
        dist.all_reduce(second)
    tell("coalesced", first.tolist(), second.tolist())
    outs = [torch.zeros(2 * size, dtype=torch.complex64) for _ in range(size)]
    dist.all_gather(outs, mine.to(torch.complex64))
    tell("all_gather", [one.tolist() for one in outs])
    for call, out in (
        (dist.all_gather_into_tensor, torch.zeros(size * 2 * size)),
        (dist.reduce_scatter_tensor, torch.zeros(2)),
    ):
        call(out, mine)
        tell(call.__name__, out.tolist())
    out = torch.zeros(2)
    dist.reduce_scatter(out, list(mine.chunk(size)), op=dist.ReduceOp.MAX)
    tell("reduce_scatter", out.tolist())
    for root in range(size):
        one, flags = mine.clone(), torch.tensor([rank == 0, True])
        dist.broadcast(one, root)
        dist.broadcast(flags, root)
        total = mine.clone()
        dist.reduce(total, root)
        parts = [torch.zeros(2 * size) for _ in range(size)] if rank == root else None
        dist.gather(mine, parts, root)
        dist.scatter(out, list(mine.chunk(size)) if rank == root else None, root)
        tell("root", root, one.tolist(), flags.tolist(), out.tolist())
        if rank == root:
            tell("at the root", total.tolist(), [each.tolist() for each in parts])
    outs = [torch.zeros(2) for _ in range(size)]
    dist.all_to_all(outs, list(mine.chunk(size)))
    whole = torch.zeros(2 * size)
    dist.all_to_all_single(whole, mine)
    tell("all_to_all", [one.tolist() for one in outs], whole.tolist())
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    tell("objects", objects)
    if rank != 1:
        empty = torch.zeros(0)
        dist.all_reduce(empty, group=(group := dist.new_group([0, 2], use_local_synchronization=True)))
        dist.all_reduce(mine, group=group)
        tell("a group of two", mine.tolist(), empty.tolist(), group.rank())
    tell("functional", functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist())
    gathered = functional.all_gather_into_tensor_coalesced([torch.ones(1) * rank] * 2, dist.group.WORLD)
    scattered = functional.reduce_scatter_tensor_coalesced([torch.ones(size)] * 2, "sum", [0, 0], dist.group.WORLD)
    tell("functional", [one.tolist() for one in (*gathered, *scattered)])
    dist.barrier()


def again(backend: str) -> None:
    """Over distrun only: a group ends with its store, the job's store remains, and another group may be made."""
    import distrun_runtime.torch as dt

    for number in range(2):
        dist.init_process_group(backend)
        total = torch.ones(2, 2)[:, 1]  # Its elements are not in a row.
        dist.all_reduce(total)
        dist.destroy_process_group()
        tell(number, total.tolist(), dt.store().is_closed)
        dt.store().barrier()  # Torch's store on rank 0 has ended with the group: no rank meets it in the next one.


def refused(backend: str) -> None:
    """Over distrun only: what cannot be done is refused by name; nothing waits."""
    dist.init_process_group(backend)
    one, other = torch.ones(4), 1 - dist.get_rank()
    for call in (
        lambda: dist.all_reduce(one, dist.ReduceOp.PRODUCT),
        lambda: dist.send(one, other),
        lambda: dist.recv(one),
        lambda: dist.all_reduce(torch.eye(2).to_sparse()),
        lambda: dist.all_reduce(torch.ones(2, device="meta")),
        lambda: dist.all_to_all_single(one, one, [1, 3], [1, 3]),
        lambda: dist.new_group(pg_options=3),
    ):
        try:
            call()
            tell("not refused")
        except Exception as err:
            tell(str(err))
    dist.all_reduce(one)
    tell(one.tolist())


class Sums(nn.Module):
    """Its parameters' gradients are its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(40, 50))

    def forward(self, factor: float) -> torch.Tensor:
        return factor * (self.first.sum() + self.second.sum())


def hooked(backend: str) -> None:
    """Over any backend: what a hook leaves out comes with later steps, though DDP makes other buckets meanwhile."""
    import distrun_runtime.torch as dt

    dist.init_process_group(backend)
    for compression in ("fp16", {"type": "topk", "ratio": 0.5}, {"type": "2bit", "threshold": 0.5, "min_size": 0}):
        net = Sums()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.001)
        wrapped.register_comm_hook(None, dt.ddp_hook(dt.store(), compression))
        found = []
        for _ in range(5):
            net.zero_grad()
            wrapped(0.25 + 0.25 * dist.get_rank()).backward()
            found.append((float(net.first.grad.mean()), float(net.second.grad.mean())))
        tell("by", compression if compression == "fp16" else compression["type"], found)
    try:
        wrapped(float("nan")).backward()
    except Exception as err:
        tell(str(err))
    try:
        dt.ddp_hook(dt.store(), "3bit")
    except Exception as err:
        tell(str(err))


def differing(backend: str) -> None:
    """The ranks make calls of other sizes; rank 0 not for the first time."""
    dist.init_process_group(backend, timeout=timedelta(seconds=2))
    dist.all_reduce(torch.ones(3))
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except Exception as err:
        tell(str(err))
    dist.distributed_c10d._get_default_store().set(f"told {dist.get_rank()}", "")
    dist.distributed_c10d._get_default_store().wait(["told 0", "told 1"], timedelta(seconds=60))
    os._exit(0)


def failing(backend: str) -> None:
    """Rank 1 is killed, or stays away, in the middle of a step. The other tells of it though the job is stopped."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.init_process_group(backend, timeout=timedelta(seconds=60 if sys.argv[3] == "killed" else 1))
    net = DistributedDataParallel(network())
    for number in range(3):
        loss = net(X).pow(2).mean()
        if number == 2 and dist.get_rank() == 1:
            if sys.argv[3] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.distributed_c10d._get_default_store().wait(["told"], timedelta(seconds=60))
            os._exit(0)
        try:
            loss.backward()
        except RuntimeError as err:
            tell(str(err).partition("\n")[0])
            dist.distributed_c10d._get_default_store().set("told", "")
            try:
                dist.barrier()
            except Exception as again:
                tell(str(again))
            os._exit(0)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] == "distrun":
        import distrun_runtime.torch  # noqa: F401
    globals()[sys.argv[2]](sys.argv[1])
    if dist.is_initialized():
        dist.destroy_process_group()
    if sys.argv[1] == "gloo":
        os._exit(0)  # Its threads may abort the process at its end.


if __name__ == "__main__":
    main()
