"""One process of training steps of the language model of `examples/lstm_ptb.py`: STAGES PLACEMENT PARTS STEPS SCHEDULE.

SCHEDULE is `threads`: all stages in this process; or `gpipe` or `1f1b`: a stage in each worker of a job. One torch
thread a stage. Prints a line of JSON: the times of the steps, the seconds in which stages computed in each step,
what each layer costs for a part of a batch, and the memory that the process took more than before the model was made.

The costs come as the variable LAYER_SECONDS, so that all workers cut the model at the same places; without it they are
measured first.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import OrderedDict
from pathlib import Path

import torch
from report import WARM_UP
from torch import Tensor, nn

from distrun_runtime.parallel import Pipeline, StagePlan, WorkerPipeline, balance, measure, named_layers, place

WORDS, WIDTH, LAYERS, LENGTH, BATCH = 10_000, 256, 8, 32, 32
"""Of the vocabulary, of all layers, of LSTM layers; words of a sentence, sentences of a batch."""


def network() -> nn.Module:
    """Return the model, with the same weights in all processes."""
    torch.manual_seed(0)
    layers = [nn.LSTM(WIDTH, WIDTH) for _ in range(LAYERS)]
    embed, decode = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
    return nn.Sequential(OrderedDict(embed=embed, lstm=nn.Sequential(*layers), decode=decode))


def plan_of(net: nn.Module, seconds: dict[str, float], stages: int, placement: str) -> StagePlan:
    """Cut the model by costs, or as MXNet's lstm_ptb.py did: equally many LSTM layers for each stage."""
    devices = [f"cpu:{stage}" for stage in range(stages)]
    if placement == "balanced":
        return balance(net, devices, seconds)
    of_layers = [devices[layer * stages // LAYERS] for layer in range(LAYERS)]
    return place(net, [devices[0], *of_layers, devices[-1]], seconds)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a word."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def memory_mb(which: str) -> float:
    """Return the memory of this process now, `VmRSS`, or the most it had since `main` said so, `VmHWM`."""
    found = re.search(which + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    """Make the steps and print what they took."""
    stages, placement, parts, steps, schedule = int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
    torch.set_num_threads(1)
    text = torch.randint(0, WORDS, (LENGTH + 1, BATCH), generator=torch.Generator().manual_seed(1))
    data, target = text[:-1], text[1:].contiguous()
    before = memory_mb("VmRSS")
    net = network()
    given = os.environ.get("LAYER_SECONDS")
    if given:
        seconds = dict(zip(named_layers(net), map(float, given.split(",")), strict=True))
    else:
        seconds = {name: cost.seconds for name, cost in measure(net, data[:, : BATCH // parts]).items()}
    plan = plan_of(net, seconds, stages, placement)
    busy_s: list[list[float]] = []
    if schedule == "threads":
        torch.set_num_threads(stages)  # which the pipeline divides among them
        pipeline = Pipeline(net, plan, micro_batches=parts, layout="TN")
        parameters = list(net.parameters())
    else:
        torch.distributed.init_process_group("gloo")
        worker = WorkerPipeline(net, plan, loss_of, micro_batches=parts, schedule=schedule, layout="TN")
        parameters = list(worker.module.parameters())
        del net
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew

    times_s = []
    for _ in range(WARM_UP + steps):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        if schedule == "threads":
            loss_of(pipeline(data), target).backward()
            busy_s.append(pipeline.busy_s)
        else:
            worker.step(data, target)
            busy_s.append([time.process_time() - begin_cpu])
        optimizer.step()
        times_s.append(time.perf_counter() - begin)
    found = {"times_s": times_s[WARM_UP:], "busy_s": busy_s[WARM_UP:], "seconds": list(seconds.values())}
    print(json.dumps({**found, "memory_mb": memory_mb("VmHWM") - before}), flush=True)
    if schedule != "threads":
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
