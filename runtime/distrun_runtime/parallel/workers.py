"""Stages on workers: a stage of the model in each process of a job, run by `torch.distributed.pipelining`.

`distrun launch -n 4 -s 0` starts the processes and gives each its rank. This module maps ranks to stages and replicas
(`stage_rank`) and builds torch's stage and schedule from a plan (`WorkerPipeline`); torch sends activations and
gradients, by gloo or NCCL.

Source of the schedules: `gpipe`: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019; `1f1b`: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distrun_runtime.parallel.pipeline import (
    StageRunner,
    check_layout,
    check_sizes,
    cut,
    joined,
    layers_of_plan,
    map_tensors,
    tensors_of,
)
from distrun_runtime.parallel.stages import Stage, StagePlan, check_present, nearest

if TYPE_CHECKING:
    import torch
    from torch import nn

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
"""Names of schedules, and of their classes in torch.distributed.pipelining."""
OLDEST_TORCH = (2, 13)
"""The oldest torch with which `WorkerPipeline` was run: what older ones do with shapes and gradients differs."""
KEPT_SCHEDULES = 16
"""How many schedules a worker keeps, of the forms of batches that came last: each has buffers for what it is sent."""


@dataclass(frozen=True)
class StageRank:
    """What a worker does in a job of several stages and replicas."""

    rank: int
    stage: int
    """Which stage of the model it runs, from 0."""
    replica: int
    """Which copy of the model its stage belongs to, from 0."""
    stages: int
    replicas: int

    @property
    def pipeline(self) -> list[int]:
        """The ranks of the same replica, in the order of their stages."""
        return [self.replica * self.stages + stage for stage in range(self.stages)]

    @property
    def members(self) -> list[int]:
        """The ranks that run the same stage, in the order of their replicas: these average their gradients."""
        return [replica * self.stages + self.stage for replica in range(self.replicas)]


def stage_rank(rank: int, world_size: int, stages: int) -> StageRank:
    """Return the stage and replica of a worker. Adjacent ranks are adjacent stages of a replica.

    Raises:
        ValueError: the workers cannot be divided into replicas of all stages; the rank is none of theirs.

    Examples:
        >>> stage_rank(rank=3, world_size=4, stages=2)
        StageRank(rank=3, stage=1, replica=1, stages=2, replicas=2)
    """
    if stages < 1 or world_size < 1 or world_size % stages:
        raise ValueError(
            f"{world_size} workers cannot run replicas of {stages} stages; fix: distrun launch -n with a multiple of"
            f" {stages}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"expected 0 <= rank < {world_size}, found {rank}")
    return StageRank(rank, rank % stages, rank // stages, stages, world_size // stages)


class WorkerPipeline:
    """This worker's stage of a model, and the schedule by which it works with the other stages.

    Making one is collective: all workers of the job make it, with the same plan, after
    `torch.distributed.init_process_group`. If there are several replicas, each trains on its own batches, and
    `average_gradients` or a store of `stage_rank.members` averages the gradients of a stage.

    As in `Pipeline`, BatchNorm and dropout see each micro-batch for itself. Recurrent layers begin each of them without
    a state.

    Arguments:
        model: as for `named_layers`. Only this worker's layers are used and moved. Stages pass on a tensor or a tuple
            of tensors, with no other tuple in it.
        plan: from `place` or `balance`; each stage's device is that of its worker, so often the same for all.
        loss: `loss(output, target)`, the mean over a micro-batch, as a tensor. Used on the last stage.
        micro_batches: parts of a batch, all equally long; for `1f1b` at least as many as stages.
        schedule: `gpipe`: all micro-batches go forward, then all backward; `1f1b`: each stage alternates, so it keeps
            the activations of at most as many micro-batches as there are stages.
        layout: as for `Pipeline`.

    Raises:
        RuntimeError: there is no process group; torch is older than `OLDEST_TORCH`.
        ValueError: the workers do not match the stages; the plan has other layers than the model; the device is not
            there; too few micro-batches; an unknown schedule or layout.
    """

    stage_rank: StageRank
    """This worker's stage and replica."""
    module: nn.Module
    """The layers of this worker's stage, on its device: `module.parameters()` is what its optimizer updates."""

    def __init__(
        self,
        model: object,
        plan: StagePlan,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        micro_batches: int,
        schedule: str = "1f1b",
        layout: str = "N",
    ) -> None:
        import torch
        import torch.distributed as dist

        if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            raise RuntimeError(
                f"torch {torch.__version__}: stages on workers need torch {oldest} or newer; fix: pip install -U torch"
            )
        if schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise ValueError(f"unknown schedule {schedule!r}{nearest(schedule, SCHEDULES)}; known are {known}")
        if not dist.is_initialized():
            raise RuntimeError(
                "no process group; fix: call torch.distributed.init_process_group('gloo') in a job of distrun launch"
            )
        layers = layers_of_plan(model, plan)
        check_layout(layers, layout, is_cut_along_time=False)
        self.stage_rank = stage_rank(dist.get_rank(), dist.get_world_size(), len(plan.stages))
        least = self.stage_rank.stages if schedule == "1f1b" else 1
        if micro_batches < least:
            raise ValueError(f"micro_batches: {schedule} needs at least {least}, found {micro_batches}")
        stage = plan.stages[self.stage_rank.stage]
        check_present(stage.device)
        self.module = _stage_module(StageRunner(stage, layers), layout)
        self._device = stage.device.torch_name
        self._loss, self._schedule = loss, schedule
        self._micro_batches, self._batch_dim = micro_batches, layout.index("N")
        self._schedules: dict[Any, Any] = {}
        self._group, self._replica_group = _own_groups(self.stage_rank)

    def step(self, batch: Any, target: torch.Tensor) -> torch.Tensor | None:
        """Run a batch forward and backward; gradients are added to `.grad`. All workers of the replica call it.

        All workers pass the same batch and target, as all read the same data: the first stage uses the batch, the last
        stage the target, and the others only the batch's shape. Batches may differ in shape from call to call; torch
        exchanges the shapes between stages at the first batch of each.

        Arguments:
            batch: a tensor or a tuple of tensors, as the model takes it; on any device.
            target: a tensor with the dimensions of the layout.

        Returns:
            On the last stage the mean of the micro-batches' losses, without a gradient; None on the others.

        Raises:
            ValueError: the batch cannot be cut into equally long micro-batches.
        """
        import torch

        inputs = self._inputs(batch)
        if self.stage_rank.stage < self.stage_rank.stages - 1:
            self._run(inputs, is_training=True, return_outputs=False)
            return None
        losses: list[torch.Tensor] = []
        # torch cuts a target along its first dimension.
        own = target.to(self._device).movedim(self._batch_dim, 0)
        self._run(inputs, is_training=True, target=own, losses=losses, return_outputs=False)
        return torch.stack(losses).sum().detach()

    def forward(self, batch: Any) -> Any:
        """Run a batch forward, without gradients. All workers of the replica call it, with the same batch.

        Returns:
            On the last stage the output; None on the others.

        Raises:
            ValueError: the batch cannot be cut into equally long micro-batches, or what the last layer returns for them
                cannot be put together.
        """
        import torch

        inputs = self._inputs(batch)
        with torch.no_grad():
            output = self._run(inputs, is_training=False)
        # torch puts the parts together along the first dimension.
        return None if output is None else joined(cut(output, self._micro_batches, 0), self._batch_dim)

    def average_gradients(self) -> None:
        """Replace the gradients of this stage by their mean over its replicas. All workers of the stage call it.

        A parameter without a gradient counts as zero. With a store or a trainer for `stage_rank.members`, which average
        themselves, do not call it.
        """
        import torch
        import torch.distributed as dist

        if self.stage_rank.replicas == 1:
            return
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=self._replica_group)
                parameter.grad /= self.stage_rank.replicas

    def _inputs(self, batch: Any) -> list[torch.Tensor]:
        """Return the batch's tensors, which can be cut into equally long micro-batches."""
        inputs = tensors_of(batch)
        for tensor in inputs:
            size = tensor.shape[self._batch_dim] if tensor.dim() > self._batch_dim else 0
            if not size or size % self._micro_batches:
                raise ValueError(
                    f"a batch of shape {tuple(tensor.shape)} cannot be cut into {self._micro_batches} equal"
                    f" micro-batches along dimension {self._batch_dim}; drop or pad the last batch of an epoch"
                )
        return inputs

    def _run(self, inputs: Sequence[torch.Tensor], is_training: bool, **options: Any) -> Any:
        """Run torch's schedule for batches of this form, which is made at the first of them."""
        key = is_training, tuple((tensor.shape, tensor.dtype) for tensor in inputs), self._modes()
        schedule = self._schedules.pop(key, None) or self._new_schedule(len(inputs), is_training)
        self._schedules[key] = schedule  # behind those that were not used since
        if len(self._schedules) > KEPT_SCHEDULES:
            del self._schedules[next(iter(self._schedules))]
        # The batch is only for the first stage; the others are sent theirs.
        own = [] if self.stage_rank.stage else [tensor.to(self._device) for tensor in inputs]
        self.module.sizes = ()
        if not is_training and self._micro_batches > 1 and self.stage_rank.stage == self.stage_rank.stages - 1:
            whole = inputs[0].shape
            self.module.sizes = (*whole[: self._batch_dim], whole[self._batch_dim] // self._micro_batches)
        return schedule.step(*own, **options)

    def _modes(self) -> tuple[Any, ...]:
        """Return what else, beside the batch's form, decides what the stages send: torch's modes, and the dtypes."""
        import torch

        kind = torch.device(self._device).type
        autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        dtypes = tuple(parameter.dtype for parameter in self.module.parameters())
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, dtypes

    def _new_schedule(self, tensors: int, is_training: bool) -> Any:
        """Return torch's schedule for batches of so many tensors; its first batch finds the shapes between stages."""
        from torch.distributed import pipelining
        from torch.distributed.pipelining.microbatch import TensorChunkSpec

        made = getattr(pipelining, SCHEDULES[self._schedule if is_training else "gpipe"])
        # With `scale_grads`, torch divides the whole `.grad` after each step, also what was there before.
        options = {"scale_grads": False} if "scale_grads" in inspect.signature(made).parameters else {}
        own = self.stage_rank
        stage = _stage_class()(self.module, own.stage, own.stages, self._device, group=self._group)
        self.module.is_probed = True
        return made(
            stage,
            self._micro_batches,
            loss_fn=self._loss_of_micro_batch if is_training else None,
            args_chunk_spec=tuple(TensorChunkSpec(self._batch_dim) for _ in range(tensors)),
            **options,
        )

    def _loss_of_micro_batch(self, output: Any, target: torch.Tensor) -> torch.Tensor:
        """Return a micro-batch's share of the batch's loss; the shares, and their gradients, add up to the whole."""
        return self._loss(output, target.movedim(0, self._batch_dim)) / self._micro_batches


def _own_groups(own: StageRank) -> tuple[Any, Any]:
    """Return the process groups of a worker's replica and of its stage.

    All workers make all groups, in the same order, as torch asks for.
    """
    import torch.distributed as dist

    if own.replicas == 1:
        return None, None  # the first is the group of all, the second of this worker alone
    size = own.replicas * own.stages
    pipelines = [dist.new_group(stage_rank(first, size, own.stages).pipeline) for first in range(0, size, own.stages)]
    members = [dist.new_group(stage_rank(first, size, own.stages).members) for first in range(own.stages)]
    return pipelines[own.replica], members[own.stage]


def _with_contiguous_gradient(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    # A hook of a view, as torch uses the tensor itself again, and its hooks would become more and more.
    view = tensor.view_as(tensor)
    view.register_hook(lambda gradient: gradient.contiguous())
    return view


@functools.cache
def _stage_class() -> Any:
    """Return torch's stage, made to tell its module of the first micro-batch. torch is imported at the first use."""
    from torch.distributed import pipelining

    class ModuleStage(pipelining.PipelineStage):  # type: ignore[misc]
        def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
            self.submod.is_probed = False
            return super().forward_one_chunk(*args, **options)

    return ModuleStage


def _check_flat(output: Any, stage: Stage) -> None:
    """Return if torch can send a stage's output: a tensor, or a tuple or list of tensors.

    Raises:
        TypeError: it is something else; names the stage and its last layer.
    """
    import torch

    ends = output if isinstance(output, (tuple, list)) else [output]
    if not all(isinstance(one, torch.Tensor) for one in ends):
        inner = ", ".join(type(one).__name__ for one in ends)
        found = type(output).__name__ + ("" if ends is not output else f" of {inner}")
        raise TypeError(
            f"{stage}: layer {stage.layers[-1]!r} returned a {found}; stages on workers pass on a tensor or a flat"
            " tuple of tensors"
        )


def _stage_module(runner: StageRunner, layout: str) -> nn.Module:
    """Return a module of a stage's layers; names of its parameters are those of the whole model.

    Recurrent layers begin each micro-batch without a state. What leaves the module, forward and backward, is
    contiguous, because torch sends nothing else.
    """
    import torch
    from torch import nn

    class StageModule(nn.Module):  # type: ignore[misc]
        is_probed = False
        """Whether torch calls it for the shapes of its outputs, with an input that may be of any values."""
        sizes: Sequence[int] = ()
        """What the first dimensions of its output have to be, so that micro-batches can be put together."""

        def forward(self, *values: torch.Tensor) -> Any:
            if self.is_probed:
                if runner.stage.index:
                    # Zeros, because a layer may use them as an index.
                    with torch.no_grad():
                        map_tensors(torch.Tensor.zero_, values)
                # Into copies, because running statistics of such values, which may be NaN, would be of no use.
                self.is_probed = False
                copies = {name: buffer.clone() for name, buffer in self.named_buffers()}
                try:
                    return torch.func.functional_call(self, copies, values)
                finally:
                    self.is_probed = True
            own = map_tensors(_with_contiguous_gradient, values)
            output, _ = runner(own[0] if len(own) == 1 else own, {})
            _check_flat(output, runner.stage)
            check_sizes(output, self.sizes, runner.stage.layers[-1], layout)
            return map_tensors(torch.Tensor.contiguous, output)

    module = StageModule()
    for name, layer in runner.layers.items():
        *above, last = name.split(".")
        parent: nn.Module = module
        for part in above:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, layer)
    return module
