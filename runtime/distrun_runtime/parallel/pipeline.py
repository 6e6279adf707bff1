"""The pipeline in one process: the stages of a model work on different parts of a batch at the same time.

A batch is cut into micro-batches (along the batch), time chunks (along the sequence), or both. Stage k works on a part
while stage k - 1 works on the next one. A recurrent layer gives its state from one time chunk to the next, so an LSTM
of many layers runs as a wave: layer group k at step t beside group k - 1 at step t + 1.

* If all stages are on CPUs, each has a thread for the time of a forward or backward (`_ThreadedBatch`). An edge between
  two stages is cut out of autograd's graph, and each thread runs backward through its own part.
* If a stage is on a GPU, the calling thread queues the work of all stages on the GPUs' streams (`_Lane`), and
  autograd's graph is one, as without a pipeline. Its backward runs each operation on the stream of its forward.

All parts go forward, then all go backward, as in GPipe.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019; the time
steps: MXNet's example/model-parallel/lstm.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from distrun_runtime.errors import StageError, TimedOut
from distrun_runtime.parallel.stages import Stage, StageDevice, StagePlan, check_present, named_layers, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

LAYOUTS = ("N", "NT", "TN")
"""What the first dimensions of a batch are: N is the batch, T is time."""
INTERRUPTED_S = 5.0
"""How long an interrupt, such as Ctrl-C, waits for the stages to end their parts; no longer than `timeout_s`."""


class BatchPart(NamedTuple):
    """One part of a batch."""

    micro_batch: int
    time_chunk: int

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch}" + (f", time chunk {self.time_chunk}" if self.time_chunk else "")


class Pipeline:
    """Runs a model whose stages are on several devices of this process: `pipeline(batch)` is `model(batch)`.

    The output has a gradient function: `loss.backward()` runs the stages' backward as a pipeline too, and gradients are
    added to the parameters' `.grad` as always. Results equal those of the model on one device, up to the rounding of
    sums whose order differs, with these exceptions:

    * **BatchNorm**, in training, normalizes by the mean and variance of each part, and updates its running statistics
      once for each part. In evaluation nothing differs.
    * **Dropout** draws a mask for each part, so masks are not those of one device. On GPUs, runs with the same seed
      have the same masks. On CPU threads, all stages draw from torch's one generator, in the order in which they come
      to it; runs that are to be repeated exactly need dropout in at most one stage.
    * With time chunks, a layer that is not recurrent sees one chunk at a time. It must treat each time step for itself,
      as `nn.Linear`, `nn.Embedding` and `nn.LayerNorm` do and attention and convolution over time do not.

    On CPU threads, the gradient of a batch can be taken once, and has no gradient of its own. `backward` and
    `torch.autograd.grad` add to `.grad` of all parameters, whatever inputs they are called for, and the latter finds no
    gradients of parameters. Hooks of parameters run once for each part. Hooks of saved tensors and modes of torch
    functions are not seen by the stages. A stage must not begin with a layer that writes into its input, except a layer
    with `inplace=True`, such as `nn.ReLU`, which works on a copy: torch refuses others.

    The model's modules are used as they are: `model.parameters()`, `model.train()` and `model.state_dict()` stay right.
    Not thread-safe: one batch at a time goes forward.

    Arguments:
        model: the model that the plan was made for; its layers are moved to their devices. A layer takes what the one
            before returns, a tensor or a tuple of tensors. `nn.RNN`, `nn.LSTM` and `nn.GRU` are recurrent, and so is
            any module with the attribute `is_recurrent = True`: it is called as `layer(input, state)`, where state is
            None or what it returned before, and returns `(output, state)`. Dimension 1 of a state is the batch.
        plan: from `place` or `balance`.
        micro_batches: parts along the batch; at most its size.
        time_chunks: parts along time; at most the number of time steps.
        layout: the first dimensions of inputs and outputs: `N` batch, `TN` time and batch (as torch's recurrent layers
            take it), `NT` batch and time.
        timeout_s: limit for the next result of the last stage, on CPU threads, and then for the other stages to end the
            parts that they work on. Work on GPUs is queued, not waited for.

    Raises:
        ValueError: the plan has other layers than the model; a device is not there; a number is less than 1; an
            unknown layout; time chunks without T in the layout; a recurrent layer that takes its input in another
            layout, or that cannot be cut along time because it is bidirectional or a cell.
    """

    states: dict[str, Any]
    """The states of the recurrent layers after the last batch, by layer, without a gradient. Pass them with the next
    batch to go on from them."""
    busy_s: list[float]
    """Seconds that each stage has computed for the last batch, forward and backward; only measured on CPU threads."""

    def __init__(
        self,
        model: object,
        plan: StagePlan,
        *,
        micro_batches: int = 1,
        time_chunks: int = 1,
        layout: str = "N",
        timeout_s: float = 600.0,
    ) -> None:
        layers = layers_of_plan(model, plan)
        for name, number in (("micro_batches", micro_batches), ("time_chunks", time_chunks)):
            if number < 1:
                raise ValueError(f"{name}: expected at least 1, found {number}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s: expected more than 0 seconds, found {timeout_s}")
        check_layout(layers, layout, is_cut_along_time=time_chunks > 1)
        for stage in plan.stages:
            check_present(stage.device)
        self.plan = plan
        self._micro_batches, self._time_chunks = micro_batches, time_chunks
        self._layout = layout
        self._batch_dim = layout.index("N")
        self._time_dim = layout.find("T")
        self._timeout_s = timeout_s
        self._runners = [StageRunner(stage, layers) for stage in plan.stages]
        self._lanes = [_Lane(stage.device) for stage in plan.stages]
        self._is_threaded = len(plan.stages) > 1 and all(stage.device.kind == "cpu" for stage in plan.stages)
        self.states = {}
        self.busy_s = [0.0] * len(plan.stages)
        self._left: list[threading.Thread] = []

    def __call__(self, batch: Any, states: Mapping[str, Any] | None = None) -> Any:
        """Run the model forward.

        Arguments:
            batch: a tensor or a tuple of tensors, on any device; all with the dimensions of the layout.
            states: states of recurrent layers to begin with, by layer; dimension 1 is the batch, as in torch's. Zeros
                for layers that are not named. No gradient flows into them.

        Returns:
            The output of the last layer, on the device of the last stage.

        Raises:
            StageError: a layer failed; names stage and micro-batch. Its cause is the layer's exception. Or a stage
                still works on a part of an earlier batch, which timed out or was interrupted.
            TimedOut: the last stage had no result in time; names the stage and part that were waited for.
            ValueError: a state is of no recurrent layer, or has no dimension for the batch; the batch is empty; what
                the last layer returned for the parts cannot be put together.
        """
        parts, values = self._split(batch)
        sizes = [tensors_of(value)[0].shape for value in values]
        states_of_stages = self._split_states(states or {}, len({part.micro_batch for part in parts}))
        self.busy_s = [0.0] * len(self._runners)
        if self._is_threaded:
            values = [map_tensors(lambda tensor: tensor.to("cpu"), value) for value in values]
            on_way = _ThreadedBatch(
                self._runners, parts, states_of_stages, self.busy_s, self._timeout_s, left=self._left
            )
            outputs = on_way.forward(values)
        else:
            outputs = self._queue(parts, values, states_of_stages)
        self.states = _merge_states(states_of_stages)
        return self._merge(parts, sizes, outputs)

    # --- parts of a batch

    def _split(self, batch: Any) -> tuple[list[BatchPart], list[Any]]:
        """Cut a batch; return the parts in the order in which each stage takes them, and their values."""
        dims = 1 + max(self._batch_dim, self._time_dim)
        sizes = {tuple(tensor.shape[:dims]) for tensor in tensors_of(batch)}
        size = min(sizes, default=())
        if len(sizes) != 1 or len(size) < dims or 0 in size:
            found = ", ".join(map(str, sorted(sizes))) or "no tensor"
            raise ValueError(f"a batch is tensors whose first {dims} dimensions are equal and not 0; found {found}")
        micro_batches = min(self._micro_batches, size[self._batch_dim])
        time_chunks = min(self._time_chunks, size[self._time_dim]) if self._time_dim >= 0 else 1
        parts, values = [], []
        for micro_batch, rows in enumerate(cut(batch, micro_batches, self._batch_dim)):
            for time_chunk, value in enumerate(cut(rows, time_chunks, self._time_dim)):
                parts.append(BatchPart(micro_batch, time_chunk))
                values.append(value)
        return parts, values

    def _merge(self, parts: Sequence[BatchPart], sizes: Sequence[Sequence[int]], outputs: Sequence[Any]) -> Any:
        """Put the outputs of all parts together, as the model returns them for the batch; `sizes` are of the inputs."""
        # An output with fewer dimensions, such as that of the last time step, would be joined along a wrong one. Those
        # behind the last that was cut may differ.
        was_cut = {self._batch_dim: parts[-1].micro_batch > 0, self._time_dim: parts[-1].time_chunk > 0}
        dims = 1 + max((dim for dim, is_cut in was_cut.items() if is_cut), default=-1)
        for size, output in zip(sizes, outputs, strict=True):
            check_sizes(output, size[:dims], self.plan.stages[-1].layers[-1], self._layout)
        rows: defaultdict[int, list[Any]] = defaultdict(list)
        for part, output in zip(parts, outputs, strict=True):
            rows[part.micro_batch].append(output)
        return joined([joined(chunks, self._time_dim) for chunks in rows.values()], self._batch_dim)

    def _split_states(self, states: Mapping[str, Any], micro_batches: int) -> list[StageStates]:
        """Return for each stage, micro-batch and recurrent layer the state to begin with."""
        recurrent = [name for runner in self._runners for name, layer in runner.layers.items() if is_recurrent(layer)]
        for name in states:
            if name not in recurrent:
                raise ValueError(
                    f"a state is given for {name!r}, which is no recurrent layer{nearest(name, recurrent)}"
                )
        result: list[StageStates] = [[{} for _ in range(micro_batches)] for _ in self._runners]
        for runner, by_micro_batch in zip(self._runners, result, strict=True):
            for name in runner.layers.keys() & states.keys():
                own = map_tensors(runner.received, states[name])
                if micro_batches > 1:
                    _check_state(name, own)
                for states_of_part, state in zip(by_micro_batch, cut(own, micro_batches, 1), strict=True):
                    states_of_part[name] = state
        return result

    # --- on GPUs' streams

    def _queue(self, parts: Sequence[BatchPart], values: Sequence[Any], states: Sequence[StageStates]) -> list[Any]:
        """Run all parts forward in the calling thread, each stage's work on its stream; return the outputs.

        The order is that of a pipeline's clock: stage k has part i at tick i + k. Within a tick the last stage comes
        first, so that a copy to it does not queue behind the next part of the stage before.
        """
        for lane in self._lanes:
            lane.begin()
        passed = [_Queued(value) for value in values]
        outputs: list[Any] = []
        try:
            for tick in range(len(parts) + len(self._runners) - 1):
                for index in reversed(range(len(self._runners))):
                    number = tick - index
                    if 0 <= number < len(parts):
                        runner, lane = self._runners[index], self._lanes[index]
                        micro_batch = parts[number].micro_batch
                        try:
                            value = lane.take(passed[number], self._lanes[index - 1] if index else None)
                            queued, states[index][micro_batch] = lane.run(runner, value, states[index][micro_batch])
                        except Exception as err:
                            raise _failure(runner.stage, "forward", parts[number], err) from err
                        passed[number] = queued
            outputs = [queued.value for queued in passed]
        finally:
            # Also of a failed batch: what the caller queues next waits for the work on its tensors and weights.
            for index, lane in enumerate(self._lanes):
                lane.end([outputs if lane is self._lanes[-1] else [], states[index]])
        return outputs


StageStates = list[dict[str, Any]]
"""The states of a stage's recurrent layers: for each micro-batch, by layer."""


# --- layers and their values


def layers_of_plan(model: object, plan: StagePlan) -> dict[str, nn.Module]:
    """Return the layers of a model by name.

    Raises:
        ValueError: they are not those of the plan, in its order.
    """
    layers = named_layers(model)
    planned = [name for stage in plan.stages for name in stage.layers]
    if list(layers) != planned:
        found = f"the plan is for {', '.join(planned)}; the model has {', '.join(layers)}"
        raise ValueError(f"the plan is not of this model: {found}")
    return layers


def check_layout(layers: Mapping[str, nn.Module], layout: str, *, is_cut_along_time: bool) -> None:
    """Return if batches of this layout can be cut for these layers.

    Raises:
        ValueError: see `Pipeline`.
    """
    from torch import nn

    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; known are {', '.join(LAYOUTS)}")
    if is_cut_along_time and "T" not in layout:
        raise ValueError(f"layout {layout!r} has no time to cut into chunks; pass layout='TN' or layout='NT'")
    for name, layer in layers.items():
        if isinstance(layer, nn.RNNBase):
            if layer.batch_first != layout.startswith("N"):
                found = "batch first" if layer.batch_first else "time first"
                fit = "NT" if layer.batch_first else "TN"
                raise ValueError(f"layer {name!r} takes {found}, the layout is {layout!r}; pass layout={fit!r}")
            if layer.bidirectional and is_cut_along_time:
                raise ValueError(f"layer {name!r} is bidirectional: it needs all time steps at once; time_chunks=1")
        elif isinstance(layer, nn.RNNCellBase) and is_cut_along_time:
            raise ValueError(
                f"layer {name!r} is a {type(layer).__name__}, which does not loop over time itself; wrap it in a module"
                " with is_recurrent = True"
            )


def is_recurrent(layer: nn.Module) -> bool:
    """Tell whether a layer is called as `layer(input, state)` and returns `(output, state)`."""
    from torch import nn

    return isinstance(layer, nn.RNNBase) or getattr(layer, "is_recurrent", False) is True


def call_layer(layer: nn.Module, value: Any, state: Any) -> tuple[Any, Any]:
    """Call a layer; return its output, and its new state, which is None if it is not recurrent."""
    return layer(value, state) if is_recurrent(layer) else (layer(value), None)


class StageRunner:
    """The layers of one stage, on its device.

    Arguments:
        stage: whose layers to take.
        layers: of the whole model, by name; those of the stage are moved to its device.
    """

    def __init__(self, stage: Stage, layers: Mapping[str, nn.Module]) -> None:
        self.stage = stage
        self.layers = {name: layers[name].to(stage.device.torch_name) for name in stage.layers}

    def received(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the stage's device, cut off autograd's graph."""
        return tensor.detach().to(self.stage.device.torch_name)

    def __call__(self, value: Any, states: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Run a part through the layers.

        Arguments:
            value: a tensor or a tuple of tensors, on the stage's device.
            states: by recurrent layer; those that are not named begin with None.

        Returns:
            The output of the last layer, and the new states by layer.
        """
        after = {}
        for name, layer in self.layers.items():
            value, state = call_layer(layer, value, states.get(name))
            if state is not None:
                after[name] = state
        return value, after


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value in order: a tensor, None, or a tuple, list or mapping of values.

    Raises:
        TypeError: something else is in it.
    """
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a value of the same form with each of its tensors changed; lists and named tuples become tuples.

    Raises:
        TypeError: something else than for `tensors_of`.
    """
    import torch

    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(change, one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map_tensors(change, one) for one in value)
    raise TypeError(f"expected a tensor or a tuple of tensors between layers, found {type(value).__name__}")


def cut(value: Any, count: int, dim: int) -> list[Any]:
    """Cut all tensors of a value along a dimension into `count` parts whose lengths differ by at most 1."""
    if count == 1:
        return [value]
    pieces = [tensor.tensor_split(count, dim) for tensor in tensors_of(value)]
    return [_with(value, [each[number] for each in pieces]) for number in range(count)]


def joined(values: Sequence[Any], dim: int) -> Any:
    """Put values of the same form together along a dimension."""
    import torch

    if len(values) == 1:
        return values[0]
    together = zip(*map(tensors_of, values), strict=True)
    return _with(values[0], [torch.cat(pieces, dim) for pieces in together])


def check_sizes(output: Any, sizes: Sequence[int], layer: str, layout: str) -> None:
    """Return if the output for a part of a batch can be put together with those for the other parts.

    Arguments:
        output: of the last layer, of this name.
        sizes: of the part's first dimensions; the output has to have the same.

    Raises:
        ValueError: it has other sizes, or fewer dimensions.
    """
    for tensor in tensors_of(output):
        if tuple(tensor.shape[: len(sizes)]) != tuple(sizes):
            raise ValueError(
                f"layer {layer!r} returned a tensor of shape {tuple(tensor.shape)} for a part of a batch; to put the"
                f" parts together in layout {layout!r}, its first dimensions have to be the part's, {tuple(sizes)}"
            )


def _with(value: Any, tensors: Sequence[Any]) -> Any:
    """Return a value of the same form with these in place of its tensors."""
    left = iter(tensors)
    return map_tensors(lambda _: next(left), value)


def _merge_states(states: Sequence[StageStates]) -> dict[str, Any]:
    """Return the states of all micro-batches by layer, without gradients."""
    merged = {}
    for by_micro_batch in states:
        for name in by_micro_batch[0]:
            if len(by_micro_batch) > 1:
                _check_state(name, [each[name] for each in by_micro_batch])
            whole = joined([each[name] for each in by_micro_batch], 1)
            merged[name] = map_tensors(lambda tensor: tensor.detach(), whole)
    return merged


def _check_state(layer: str, state: Any) -> None:
    """Return if the state of a layer can be cut into micro-batches.

    Raises:
        ValueError: it has no dimension 1.
    """
    for tensor in tensors_of(state):
        if tensor.dim() < 2:
            raise ValueError(
                f"a state of layer {layer!r} has the shape {tuple(tensor.shape)}; with micro-batches, dimension 1 of a"
                " state has to be the batch"
            )


def _failure(stage: Stage, what: str, part: BatchPart, err: BaseException) -> StageError:
    """Return the error that names where `err` was raised; it is its cause."""
    failure = StageError(f"{stage}: {what} of {part} failed: {type(err).__name__}: {err}")
    failure.__cause__ = err
    return failure


# --- on CPU threads


@dataclass
class _Kept:
    """What a stage keeps of a part from forward to backward."""

    inputs: list[torch.Tensor]
    """Leaves of autograd's graph: the part's input, cut off the graph of the stage before."""
    states: list[torch.Tensor]
    """Leaves: the states before the part, cut off the graph of the time chunk before."""
    outputs: list[torch.Tensor]
    states_after: list[torch.Tensor]


class _ThreadedBatch:
    """One batch on its way through stages on threads: forward, and when autograd calls, backward.

    Arguments:
        runners: the stages.
        parts: of the batch, in the order in which each stage takes them.
        states: for each stage those to begin with; `forward` puts those after the batch in their place.
        busy_s: for each stage; what it computes is added.
        timeout_s: as for `Pipeline`.
        left: as for `_StageThreads`.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        parts: Sequence[BatchPart],
        states: Sequence[StageStates],
        busy_s: list[float],
        timeout_s: float,
        *,
        left: list[threading.Thread],
    ) -> None:
        self._runners, self._parts, self._states = runners, parts, states
        self._busy_s, self._timeout_s, self._left = busy_s, timeout_s, left
        self._kept: list[dict[BatchPart, _Kept]] = [{} for _ in runners]
        # Of the states before the time chunk that went backward last; for each stage, by micro-batch.
        self._state_gradients: list[dict[int, list[torch.Tensor | None]]] = [{} for _ in runners]
        self._widths: list[int] = []

    def forward(self, values: Sequence[Any]) -> list[Any]:
        """Run all parts forward; return the outputs, which autograd's graph connects with the values."""
        import torch

        stages = [runner.stage for runner in self._runners]
        threads = _StageThreads(stages, self._parts, self._forward, "forward", self._busy_s, left=self._left)
        outputs = threads.run(values, self._timeout_s)
        ends = tensors_of(outputs)
        if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in ends):
            return outputs
        self._widths = [len(tensors_of(output)) for output in outputs]
        # The anchor has a gradient, so that backward is called also if no value has one, such as numbers of words.
        anchor = torch.zeros((), requires_grad=True, device="cpu")
        own: list[Any] = _with(outputs, _edge().apply(self, ends, anchor, *tensors_of(values)))
        return own

    def _forward(self, stage: Stage, part: BatchPart, value: Any) -> Any:
        import torch

        states = self._states[stage.index]
        value, before = map_tensors(_leaf, value), map_tensors(_leaf, states[part.micro_batch])
        runner = self._runners[stage.index]
        # A layer that writes into its input gets a copy: torch refuses that for a leaf of the graph.
        is_written = getattr(runner.layers[stage.layers[0]], "inplace", False) is True
        output, after = runner(map_tensors(torch.Tensor.clone, value) if is_written else value, before)
        states[part.micro_batch] = after
        if torch.is_grad_enabled():
            kept = _Kept(tensors_of(value), tensors_of(before), tensors_of(output), tensors_of(after))
            self._kept[stage.index][part] = kept
        return output

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Run all parts backward, the last first; return the gradients of the values' tensors.

        Arguments:
            gradients: of the outputs' tensors.
        """
        if not self._kept[0]:
            raise RuntimeError("backward of this batch has run already; run the batch forward again")
        left = iter(gradients)
        values = [[next(left) for _ in range(width)] for width in self._widths]
        stages = [runner.stage for runner in reversed(self._runners)]
        threads = _StageThreads(stages, self._parts[::-1], self._backward, "backward", self._busy_s, left=self._left)
        try:
            found = threads.run(values[::-1], self._timeout_s)
        finally:
            self._kept = [{} for _ in self._runners]
        return [gradient for gradients in reversed(found) for gradient in gradients]

    def _backward(self, stage: Stage, part: BatchPart, gradients: list[Any]) -> list[Any]:
        import torch

        kept = self._kept[stage.index].pop(part)
        of_states = self._state_gradients[stage.index]
        later = of_states.get(part.micro_batch, [None] * len(kept.states_after))
        ends = zip([*kept.outputs, *kept.states_after], [*gradients, *later], strict=True)
        known = [(tensor, one) for tensor, one in ends if one is not None and tensor.requires_grad]
        if known:
            torch.autograd.backward(*zip(*known, strict=True))
        of_states[part.micro_batch] = [leaf.grad for leaf in kept.states]
        return [leaf.grad for leaf in kept.inputs]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values cut off the graph that made them; the gradient is left in `.grad`."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


@functools.cache
def _edge() -> Any:
    """Return the function by which autograd's graph enters a batch behind its outputs and leaves it before its values.

    It is made at the first use, because torch is imported where it is used.
    """
    import torch

    class Edge(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, batch: _ThreadedBatch, ends: Sequence[torch.Tensor], *_: torch.Tensor) -> Any:
            ctx.batch = batch
            ctx.set_materialize_grads(False)
            own = tuple(tensor.detach() for tensor in ends)
            ctx.mark_non_differentiable(*(new for new, end in zip(own, ends, strict=True) if not end.requires_grad))
            return own

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "create_graph=True: gradients of a pipeline on CPU threads have no gradients of their own; fix: put"
                    " all layers into one stage"
                )
            return None, None, None, *ctx.batch.backward(gradients)

    return Edge


_END = object()
"""Put in a queue: nothing more comes."""


class _StageThreads:
    """Runs stages on a thread each; all take the parts in the same order, and each gives its results to the next.

    Arguments:
        stages: in the order in which a part passes.
        parts: in the order in which a stage takes them.
        work: what a stage does with a part: called with the stage, the part and the result of the stage before.
        what: the work's name in errors.
        busy_s: seconds by the stages' index; the time of the work is added.
        left: threads of earlier batches that had not ended; those of this one take their place.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        parts: Sequence[BatchPart],
        work: Callable[[Stage, BatchPart, Any], Any],
        what: str,
        busy_s: list[float],
        *,
        left: list[threading.Thread],
    ) -> None:
        import torch

        self._stages, self._parts, self._work, self._what, self._busy_s = stages, parts, work, what, busy_s
        self._left = left
        self._queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(len(stages) + 1)]
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._doing: list[BatchPart | None] = [None] * len(stages)
        self._modes = _Modes.current()
        self._torch_threads = torch.get_num_threads()

    def run(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        """Give the first stage a value for each part; return the results of the last stage.

        No thread runs when it returns or raises, except one whose work did not end within the limit. Meanwhile the
        threads that torch uses within operations are divided among the stages: with all of them for each stage, every
        operation would wait for processors that the others use.

        Raises:
            StageError: the first failure; the other stages end after the part that they work on. Or a thread of an
                earlier batch has not ended.
            TimedOut: the last stage had no result for `timeout_s`. The other stages have ended, unless they take as
                long again; the one that was waited for may still write into gradients.
        """
        import torch

        alive = [thread.name for thread in self._left if thread.is_alive()]
        if alive:
            raise StageError(
                f"{', '.join(alive)} of an earlier batch still works on a part; no other batch can go until it ends"
            )
        names = [f"stage-{stage.index}-{self._what}" for stage in self._stages]
        threads = [
            threading.Thread(target=self._loop, args=(position,), name=name, daemon=True)
            for position, name in enumerate(names)
        ]
        for value in values:
            self._queues[0].put(value)
        results: list[Any] = []
        join_s, hung = timeout_s, None
        try:
            for thread in threads:
                thread.start()
            while len(results) < len(self._parts):
                result = self._queues[-1].get(timeout=timeout_s)
                if result is _END:
                    break
                results.append(result)
        except queue.Empty:
            hung, awaited = self._awaited(len(results))
            raise TimedOut(f"waited {timeout_s:g} s for {awaited}; fix: pass a larger timeout_s") from None
        except KeyboardInterrupt:
            join_s = min(join_s, INTERRUPTED_S)
            raise
        finally:
            self._end()
            started = [thread for thread in threads if thread.ident is not None]
            end = time.monotonic() + join_s
            try:
                for thread in started:
                    if hung is None or thread is not threads[hung]:
                        thread.join(max(0.0, end - time.monotonic()))
            finally:
                self._left[:] = [thread for thread in started if thread.is_alive()]
                torch.set_num_threads(self._torch_threads)
        if self._failure is not None:
            raise self._failure
        return results

    def _loop(self, position: int) -> None:
        """Do a stage's work on all parts."""
        import torch

        stage = self._stages[position]
        # Each thread has to be told: a new one begins with OpenMP's number, whatever `set_num_threads` was called with.
        torch.set_num_threads(max(1, self._torch_threads // len(self._stages)))
        with self._modes.entered():
            for part in self._parts:
                value = self._queues[position].get()  # the stage before puts a result, or the caller _END
                if self._is_over.is_set():
                    return
                self._doing[position] = part
                begin = time.perf_counter()
                try:
                    result = self._work(stage, part, value)
                except BaseException as err:
                    # Not a failure of the stage: the caller gets `SystemExit` as it is.
                    own = _failure(stage, self._what, part, err) if isinstance(err, Exception) else err
                    self._failure = self._failure or own
                    self._end()
                    return
                self._busy_s[stage.index] += time.perf_counter() - begin
                self._doing[position] = None
                self._queues[position + 1].put(result)

    def _end(self) -> None:
        """Let all threads end after the part that they work on, and the caller stop waiting."""
        self._is_over.set()
        for each in self._queues:
            each.put(_END)

    def _awaited(self, done: int) -> tuple[int | None, str]:
        """Return the place of the stage that the result behind `done` others waits for, and name it and the part.

        The place is None if all stages are between two parts.
        """
        for position in reversed(range(len(self._stages))):
            part = self._doing[position]
            if part is not None:
                return position, f"{self._stages[position]}: {self._what} of {part}"
        return None, f"{self._stages[-1]}: {self._what} of {self._parts[done]}"


@dataclass(frozen=True)
class _Modes:
    """Settings of torch that each thread has for itself, as the caller has them."""

    is_grad_enabled: bool
    is_inference: bool
    is_autocast: bool
    autocast_dtype: Any
    is_autocast_cached: bool
    device: Any
    """Where new tensors are made."""

    @classmethod
    def current(cls) -> _Modes:
        """Return those of this thread."""
        import torch

        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_default_device(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Set them in this thread for a while."""
        import torch

        with (
            torch.inference_mode(self.is_inference),
            torch.set_grad_enabled(self.is_grad_enabled),
            torch.autocast("cpu", self.autocast_dtype, self.is_autocast, self.is_autocast_cached),
            # Not for the CPU, where new threads make them anyway: each call of torch would take longer.
            contextlib.nullcontext() if self.device.type == "cpu" else self.device,
        ):
            yield


# --- on GPUs


class _Queued(NamedTuple):
    """A part's value that a GPU may not have computed yet."""

    value: Any
    ready: Any = None
    """The event behind it on its stream; None: it is there."""


class _Lane:
    """Where a stage's work is queued: a stream of its GPU. A CPU stage beside GPUs works at once, without a stream.

    It keeps to what torch says of streams ("CUDA semantics": streams, memory, backward passes):

    * Work on one stream waits for another's only where it is told to: by the event that the stage before records behind
      each part; at begin and end by `wait_stream`, for the streams that the caller uses.
    * A tensor's memory goes back to the stream on which it was made, and is used again from there. So the allocator is
      told by `record_stream` of a tensor that another stream reads.
    * A copy between GPUs runs on the source's current stream and waits for the target's; so both lanes are current. A
      stage gives a part away when the next stage has done with the part before.
    * The backward of an operation runs on the stream of its forward, and autograd lets one stream wait for another
      where they differ. After `backward`, the caller's streams have waited for the gradients.
    """

    def __init__(self, device: StageDevice) -> None:
        import torch

        self._device = torch.device(device.torch_name)
        self._stream = torch.cuda.Stream(self._device) if device.kind == "cuda" else None

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """Make the stream the current one of its GPU."""
        import torch

        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self) -> None:
        """Wait for what the caller has queued: the batch, and weights that an optimizer has updated."""
        import torch

        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def take(self, queued: _Queued, source: _Lane | None) -> Any:
        """Return a part's value for use on this lane; the source is the lane that made it, None: the caller."""
        with contextlib.nullcontext() if source is None else source.current(), self.current():
            if self._stream is not None and queued.ready is not None:
                self._stream.wait_event(queued.ready)
            return map_tensors(self._here, queued.value)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device != self._device:
            # To the CPU, the call waits for the copy; to a GPU, the work that is queued behind it does.
            return tensor.to(self._device, non_blocking=self._stream is not None)
        if self._stream is not None:
            tensor.record_stream(self._stream)
        return tensor

    def run(self, runner: StageRunner, value: Any, states: Mapping[str, Any]) -> tuple[_Queued, dict[str, Any]]:
        """Queue a part's forward; return its output and the states after it."""
        with self.current():
            output, after = runner(value, map_tensors(self._here, states))
            return _Queued(output, None if self._stream is None else self._stream.record_event()), after

    def end(self, values: Sequence[Any]) -> None:
        """Let the caller's stream wait for all that is queued here; `values`, made here, are the caller's now."""
        import torch

        if self._stream is not None:
            callers = torch.cuda.current_stream(self._device)
            callers.wait_stream(self._stream)
            for tensor in tensors_of(values):
                if tensor.device == self._device:  # not of a layer that made it elsewhere, such as on the CPU
                    tensor.record_stream(callers)
