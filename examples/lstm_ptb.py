"""Train a language model of eight LSTM layers whose layers are on several devices, as a pipeline.

Alone, two stages on two CPU threads:  python examples/lstm_ptb.py --stages 2
Alone, on two GPUs:                    python examples/lstm_ptb.py --stages 2 --gpus 0,1
A stage a worker:    distrun launch -n 2 -s 0 --launcher local python examples/lstm_ptb.py --stages 2
Two replicas of it:  distrun launch -n 4 -s 1 --launcher local python examples/lstm_ptb.py --stages 2

The weights are those of the run on one device, but for the rounding of sums. Replicas train on their own part of each
batch; those of a stage add their gradients in a store of their own. A sentence begins without a state, so that
sentences of one length make a batch.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections import OrderedDict
from collections.abc import Iterable

import arguments
import datasets
import networks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from distrun_runtime import kvstore
from distrun_runtime.data import BucketReader
from distrun_runtime.data.reader import Batch
from distrun_runtime.parallel import LayerCost, Pipeline, StagePlan, WorkerPipeline, balance, measure, place
from distrun_runtime.parallel import stage_rank as stage_of

IGNORE = -100
"""The label of padding."""


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data-dir", metavar="DIR", help="has ptb.train.txt and ptb.valid.txt; else alice.txt")
    parser.add_argument("--epochs", "--num-epochs", type=arguments.positive, default=1)
    parser.add_argument(
        "--batch-size", type=arguments.positive, default=32, help="sentences a replica takes for a step (default 32)"
    )
    parser.add_argument("--layers", type=arguments.positive, default=8, help="LSTM layers (default 8)")
    parser.add_argument("--hidden", type=arguments.positive, default=128, help="width of all layers (default 128)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate of Adam (default 0.003)")
    parser.add_argument("--stages", type=int, choices=[1, 2, 4], default=1, help="devices for the layers (default 1)")
    parser.add_argument(
        "--placement",
        choices=["naive", "balanced"],
        default="balanced",
        help="naive: equally many LSTM layers for each stage; balanced: by times that are measured (the default)",
    )
    parser.add_argument("--gpus", type=arguments.gpus, metavar="LIST", help="such as 0,1; without it, CPU threads")
    parser.add_argument(
        "--buckets",
        metavar="LIST",
        default="10,20,30,40,60",
        help="lengths of the buckets, to which longer sentences are cut (default 10,20,30,40,60); or their number",
    )
    parser.add_argument(
        "--micro-batches", type=arguments.positive, metavar="N", help="parts of a batch (default 2 for each stage)"
    )
    parser.add_argument(
        "--time-chunks", type=arguments.positive, metavar="N", default=1, help="parts of sentences (one process only)"
    )
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="1f1b", help="of stages on workers")
    parser.add_argument("--train-size", type=arguments.positive, metavar="N", help="train on the first N sentences")
    options = parser.parse_args()
    if options.micro_batches is None:
        options.micro_batches = 1 if options.stages == 1 else 2 * options.stages
    if not all(length.isdecimal() and int(length) for length in options.buckets.split(",")):
        parser.error(f"--buckets {options.buckets} is neither a number nor lengths such as 10,20,40")
    if options.layers < options.stages:
        parser.error(f"--layers {options.layers} are too few for --stages {options.stages}")
    if options.batch_size % options.micro_batches:
        parser.error(f"--batch-size {options.batch_size} is no multiple of --micro-batches {options.micro_batches}")
    return options


def network(words: int, options: argparse.Namespace) -> nn.Module:
    """Return the model, whose layers are `embed`, `lstm.0` to `lstm.7` and `decode`."""
    layers = [nn.LSTM(options.hidden, options.hidden) for _ in range(options.layers)]
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(words, options.hidden),
            lstm=nn.Sequential(*layers),
            decode=nn.Linear(options.hidden, words),
        )
    )


def devices_of(options: argparse.Namespace) -> list[str]:
    """Return a device for each stage: CPU threads, or the GPUs by turns, each stage with a stream of its own."""
    if not options.gpus:
        return [f"cpu:{stage}" for stage in range(options.stages)]
    gpus = networks.devices_of(options.gpus)
    return [f"{gpus[stage % len(gpus)]}/{stage // len(gpus)}" for stage in range(options.stages)]


def plan_of(net: nn.Module, example: Tensor, options: argparse.Namespace, is_job: bool) -> StagePlan:
    """Place the layers on devices as the options say."""
    devices = devices_of(options)
    costs = measure(net, example, device=devices[0])
    if is_job:
        costs = costs_of_rank_0(costs)
    if options.placement == "balanced":
        return balance(net, devices, costs)
    # As MXNet's lstm_ptb.py did: the embedding with the first layers, the decoder with the last ones.
    of_layers = [devices[layer * options.stages // options.layers] for layer in range(options.layers)]
    return place(net, [devices[0], *of_layers, devices[-1]], costs)


def costs_of_rank_0(costs: dict[str, LayerCost]) -> dict[str, LayerCost]:
    """Return what rank 0 has measured: all workers must cut the model at the same places."""
    seconds = torch.tensor([cost.seconds for cost in costs.values()], dtype=torch.float64)
    dist.broadcast(seconds, 0)
    return {
        name: LayerCost(float(time_s), cost.bytes_out)
        for (name, cost), time_s in zip(costs.items(), seconds, strict=True)
    }


def loss_of(output: Tensor, label: Tensor) -> Tensor:
    """Return the loss of a batch or of a part of it: the sum over words, divided by all places, with padding.

    So the mean of equal parts' losses is the whole batch's.
    """
    return (
        functional.cross_entropy(output.flatten(0, 1), label.flatten(), ignore_index=IGNORE, reduction="sum")
        / label.numel()
    )


class OneProcess:
    """All stages in this process."""

    def __init__(self, net: nn.Module, plan: StagePlan, options: argparse.Namespace) -> None:
        parts = {"micro_batches": options.micro_batches, "time_chunks": options.time_chunks}
        self._pipeline = Pipeline(net, plan, **parts, layout="TN")
        self.parameters = list(net.parameters())

    def step(self, data: Tensor, label: Tensor) -> None:
        """Add the gradients of a batch to the parameters'."""
        output = self._pipeline(data)
        loss_of(output, label.to(output.device)).backward()

    def output(self, data: Tensor) -> Tensor:
        """Return the scores of the next words: (length, batch, words)."""
        with torch.no_grad():
            output: Tensor = self._pipeline(data)
        return output


class Worker:
    """One stage, in a process of a job."""

    def __init__(self, net: nn.Module, plan: StagePlan, options: argparse.Namespace) -> None:
        parts = {"micro_batches": options.micro_batches, "schedule": options.schedule}
        self._pipeline = WorkerPipeline(net, plan, loss_of, **parts, layout="TN")
        self.parameters = list(self._pipeline.module.parameters())
        own = self._pipeline.stage_rank
        self._replicas, self._keys = own.replicas, list(range(len(self.parameters)))
        if self._replicas > 1:
            self._store = kvstore.create("dist_sync", group=f"stage-{own.stage}", members=own.members)
            self._store.init(self._keys, [parameter.detach() for parameter in self.parameters])

    def step(self, data: Tensor, label: Tensor) -> None:
        """Add the gradients of a batch to the parameters', averaged over all replicas of this stage."""
        self._pipeline.step(data, label)
        if self._replicas > 1:
            gradients = [parameter.grad for parameter in self.parameters]
            self._store.pushpull(self._keys, gradients, out=gradients)
            for gradient in gradients:
                gradient /= self._replicas

    def output(self, data: Tensor) -> Tensor | None:
        """Return the scores of the next words on the last stage; None on the others."""
        output: Tensor | None = self._pipeline.forward(data)
        return output


def train_epoch(model: OneProcess | Worker, batches: Iterable[Batch], optimizer: torch.optim.Optimizer) -> float:
    """Make a step for each batch; return the words a second."""
    begin, words = time.monotonic(), 0
    for data, label in batches:
        optimizer.zero_grad()
        model.step(torch.from_numpy(data), torch.from_numpy(label))
        optimizer.step()
        words += int((label != IGNORE).sum())
    return words / (time.monotonic() - begin)


def perplexity(model: OneProcess | Worker, batches: Iterable[Batch]) -> float | None:
    """Return e to the mean loss of a word; None on a worker without the last stage."""
    total, words = 0.0, 0
    for data, label in batches:
        output = model.output(torch.from_numpy(data))
        if output is not None:
            total += float(loss_of(output, torch.from_numpy(label).to(output.device))) * label.size
            words += int((label != IGNORE).sum())
    return math.exp(total / words) if words else None


def main() -> None:
    """Train with the stages in this process, or with one in each worker of a job."""
    options = parse()
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    is_job = workers > 1
    if is_job:
        # gloo beside NCCL: what the workers agree on is in host memory.
        dist.init_process_group("cpu:gloo,cuda:nccl" if options.gpus else "gloo")
    own = stage_of(dist.get_rank() if is_job else 0, workers, options.stages if is_job else 1)

    train, valid, words = datasets.sentences(options.data_dir)
    buckets = [int(length) for length in options.buckets.split(",")]
    cut = {"buckets": buckets if "," in options.buckets else buckets[0], "too_long": "cut", "ignore": IGNORE}
    train_set = BucketReader(
        train[: options.train_size], options.batch_size, **cut, num_parts=own.replicas, part_index=own.replica
    )
    # Each replica validates by itself: all have the same weights.
    valid_set = BucketReader(valid, options.batch_size, **cut, shuffle=False)

    torch.manual_seed(0)
    net = network(words, options)
    example, _ = next(iter(valid_set))
    plan = plan_of(net, torch.from_numpy(example), options, is_job)
    if own.rank == 0:
        print(f"{len(train)} sentences, {words} words; buckets {train_set.buckets}, {train_set.padding:.0%} padding")
        print(plan, flush=True)
    model = Worker(net, plan, options) if is_job else OneProcess(net, plan, options)
    optimizer = torch.optim.Adam(model.parameters, lr=options.lr)
    for epoch in range(options.epochs):
        speed = train_epoch(model, train_set, optimizer)
        found = perplexity(model, valid_set)
        if found is not None and own.replica == 0:
            print(f"Epoch {epoch}: perplexity {found:.6f}, {speed:.0f} words a second", flush=True)
    if is_job:
        dist.all_reduce(torch.zeros(1))  # a barrier in host memory: a worker that leaves early breaks the others' links
        dist.destroy_process_group()
    if found is not None and own.replica == 0:
        print(f"perplexity {found:.1f}", flush=True)


if __name__ == "__main__":
    arguments.run(main)
