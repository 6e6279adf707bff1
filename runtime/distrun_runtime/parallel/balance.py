"""Balanced placement: what each layer costs, and the cut into stages of which the slowest is fastest.

`measure` runs each layer a few times, `balance` places the layers by their costs, `partition` decides where to cut.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distrun_runtime.errors import StageError
from distrun_runtime.parallel.pipeline import call_layer, map_tensors, tensors_of
from distrun_runtime.parallel.stages import (
    LayerCost,
    StageDevice,
    StagePlan,
    check_present,
    copy_rate,
    copy_seconds,
    layer_costs,
    named_layers,
    plan_of,
)

if TYPE_CHECKING:
    from torch import nn


def balance(
    model: object,
    devices: Sequence[str],
    costs: Mapping[str, LayerCost | float],
    *,
    bytes_per_s: float | None = None,
) -> StagePlan:
    """Place a model's layers on devices, a stage each, so that the slowest stage is as fast as possible.

    A stage's time is that of its layers and of the copies of its input and of that input's gradient.

    Arguments:
        model: as for `named_layers`.
        devices: the device of each stage, in order, as for `StageDevice.parse`. A device may come several times:
            stages on workers, each of which calls its GPU `cuda:0`.
        costs: of each layer: what `measure` returns, or seconds (or any other unit, if there are no bytes).
        bytes_per_s: the rate of a copy from one stage to the next. Default: 10 GB/s between devices, and no copy
            between stages on the same GPU or in the host's memory. For stages on several hosts, give that of the
            network: 1.25e9 for 10 Gbit/s.

    Raises:
        ValueError: more devices than layers, a layer without a cost, a cost of no layer, a text that is no device,
            a parameter that layers of two stages share.
    """
    layers = named_layers(model)
    if isinstance(devices, str):
        raise TypeError(f"devices: expected a list with a device for each stage, found {devices!r}")
    places = [StageDevice.parse(text) for text in devices]
    known = list(layer_costs(list(layers), costs).values())
    rates = [copy_rate(source, target, bytes_per_s) for source, target in itertools.pairwise(places)]
    lengths = partition(
        [cost.seconds for cost in known],
        len(places),
        [cost.bytes_out for cost in known],
        [copy_seconds(1, rate) for rate in rates],
    )
    return plan_of(layers, lengths, places, costs, bytes_per_s)


def partition(
    costs: Sequence[float],
    stages: int,
    sizes: Sequence[int] | None = None,
    seconds_per_byte: Sequence[float] | None = None,
) -> list[int]:
    """Cut a sequence of layers into stages so that the slowest stage is as fast as possible. No side effects.

    Among the cuts that are equally good, one with the fewest bytes between stages is taken. The time is proportional to
    stages x layers².

    Arguments:
        costs: the time of each layer.
        stages: how many to make, each of at least one layer.
        sizes: the bytes that each layer puts out. Default: none.
        seconds_per_byte: what a byte from stage k to stage k + 1 costs stage k + 1; one number less than stages.
            Default: nothing.

    Returns:
        The number of layers in each stage.

    Raises:
        ValueError: there are fewer layers than stages, or no stages.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot be cut into {stages} stages of at least one layer")
    sizes = sizes or [0] * len(costs)
    rates = seconds_per_byte or [0.0] * (stages - 1)
    upto = [0.0, *itertools.accumulate(costs)]

    def seconds(stage: int, begin: int, end: int) -> float:
        return upto[end] - upto[begin] + (sizes[begin - 1] * rates[stage - 1] if stage else 0.0)

    slowest, _ = _cheapest(len(costs), stages, seconds, max)

    def crossing(stage: int, begin: int, end: int) -> float:
        if seconds(stage, begin, end) > slowest:
            return math.inf
        return sizes[begin - 1] if stage else 0

    return _cheapest(len(costs), stages, crossing, operator.add)[1]


def _cheapest(
    count: int,
    stages: int,
    price: Callable[[int, int, int], float],
    combine: Callable[[float, float], float],
) -> tuple[float, list[int]]:
    """Cut `count` layers into stages with the least price of all stages together.

    Arguments:
        price: of a stage: its number, its first layer, the layer behind its last.
        combine: the price of two things together; it does not fall when one of them rises.

    Returns:
        The price, and the number of layers in each stage.
    """
    # best[end]: the least price of the first layers up to `end` in the stages so far, and where these stages end.
    best: dict[int, tuple[float, list[int]]] = {end: (price(0, 0, end), [end]) for end in range(1, count + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (combine(best[begin][0], price(stage, begin, end)), [*best[begin][1], end])
                for begin in range(stage, end)
            )
            for end in range(stage + 1, count + 1)
        }
    total, ends = best[count]
    return total, [end - begin for begin, end in itertools.pairwise([0, *ends])]


def measure(model: object, example: Any, *, device: str = "cpu", repeats: int = 3) -> dict[str, LayerCost]:
    """Run each layer of a model forward and backward a few times, and return what it costs.

    A copy of each layer is run, one at a time, so the model's weights, gradients and running statistics stay as they
    are, the generators of random numbers too, and the whole model need not fit the device.

    Arguments:
        model: as for `named_layers`.
        example: a batch as the model takes it: a tensor or a tuple of tensors. Costs grow with its size; give it the
            size of the batches that you will train with.
        device: where to run, as for `StageDevice.parse`.
        repeats: how many runs to make, of which the fastest counts, after one that does not count.

    Raises:
        StageError: a layer failed; names it. Its cause is the layer's exception.
        ValueError: the text is no device, or the device is not there; repeats is less than 1.
    """
    import torch

    place = StageDevice.parse(device)
    check_present(place)
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, found {repeats}")
    value = map_tensors(lambda tensor: tensor.detach().to(place.torch_name), example)
    costs = {}
    with torch.random.fork_rng([place.index] if place.kind == "cuda" else []), torch.enable_grad():
        for name, layer in named_layers(model).items():
            own = copy.deepcopy(layer).to(place.torch_name)
            try:
                runs = [_timed(own, value, place) for _ in range(repeats + 1)]
            except Exception as err:
                said = f"layer {name!r} failed while it was measured: {type(err).__name__}: {err}"
                raise StageError(said) from err
            value = runs[-1][1]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
            costs[name] = LayerCost(min(seconds for seconds, _ in runs[1:]), size)
    return costs


def _timed(layer: nn.Module, value: Any, device: StageDevice) -> tuple[float, Any]:
    """Run a layer forward and backward; return the seconds that this took, and its output."""
    import torch

    def own(tensor: torch.Tensor) -> torch.Tensor:
        # A copy, because the layer may write into its input, and torch refuses that for a leaf of the graph.
        return tensor.detach().requires_grad_(tensor.is_floating_point()).clone()

    value = map_tensors(own, value)
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch_name)
    begin = time.perf_counter()
    output, _ = call_layer(layer, value, None)
    ends = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(tensor) for tensor in ends])
    if device.kind == "cuda":
        torch.cuda.synchronize(device.torch_name)
    return time.perf_counter() - begin, map_tensors(lambda tensor: tensor.detach(), output)
