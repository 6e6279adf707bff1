"""Stages on workers of a job: real processes over gloo, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import run_script

TRAINING = """\
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn

from distrun_runtime.parallel import WorkerPipeline, place

WORDS, STEPS = 11, 4
torch.manual_seed(0)


class Turn(nn.Module):
    # What it returns is not contiguous, nor is the gradient of its input.
    def forward(self, value):
        return value.transpose(1, 2)


layers = [nn.Embedding(WORDS, 6), nn.LSTM(6, 5), Turn(), Turn(), nn.LayerNorm(5), nn.GRU(5, 5), nn.Linear(5, WORDS)]
names = ["embed", "rnn.0", "turn", "back", "rnn.1", "rnn.2", "decode"]
model = {name: layer.double() for name, layer in zip(names, layers, strict=True)}
reference = copy.deepcopy(model)
plan = place(model, {name: f"cpu:{int(number > 2)}" for number, name in enumerate(names)})


def loss_of(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def whole(batch):
    for layer in reference.values():
        batch = layer(batch)
        batch = batch[0] if isinstance(batch, tuple) else batch
    return batch


dist.init_process_group("gloo", init_method="env://")
pipeline = WorkerPipeline(model, plan, loss_of, micro_batches=4, schedule=sys.argv[1], layout="TN")
own = pipeline.stage_rank
size = own.replicas * own.stages
weights = [weight for layer in reference.values() for weight in layer.parameters()]
optimizers = [torch.optim.SGD(params, lr=0.5) for params in (pipeline.module.parameters(), weights)]
for step in range(STEPS):
    # Batches of two lengths; each replica has a part of each.
    batch = torch.randint(0, WORDS, (3 + step % 2, 8 * own.replicas))
    mine = batch.tensor_split(own.replicas, 1)[own.replica]
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = pipeline.step(mine, mine)
    pipeline.average_gradients()
    loss_of(whole(batch), batch).backward()
    assert (loss is None) == (own.stage == 0), loss
    if loss is not None:
        torch.testing.assert_close(loss, loss_of(whole(mine), mine).detach())
    for optimizer in optimizers:
        optimizer.step()
expected = {f"{name}.{key}": value for name, layer in reference.items() for key, value in layer.state_dict().items()}
for name, value in pipeline.module.state_dict().items():
    torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-11)
output = pipeline.forward(mine)
if own.stage:
    torch.testing.assert_close(output, whole(mine))
    assert not output.requires_grad
print("stage", own.stage, "replica", own.replica, "layers", ",".join(plan.stages[own.stage].layers), flush=True)
dist.destroy_process_group()
"""

STATISTICS = """\
import copy

import torch
import torch.distributed as dist
from torch import nn

from distrun_runtime.parallel import WorkerPipeline, place

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
reference, batch = copy.deepcopy(model), torch.randn(8, 3, dtype=torch.float64)
dist.init_process_group("gloo", init_method="env://")
plan = place(model, ["cpu:0", "cpu:0", "cpu:1", "cpu:1"])
mean = nn.functional.mse_loss
pipeline = WorkerPipeline(model, plan, mean, micro_batches=2)
pipeline.step(batch, torch.zeros(8, 4, dtype=torch.float64))
for part in batch.tensor_split(2):
    reference(part)
for name, value in pipeline.module.named_buffers():
    torch.testing.assert_close(value, reference.state_dict()[name])


def refused(act, said):
    try:
        act()
    except ValueError as err:
        assert said in str(err), err
    else:
        raise AssertionError(said)


refused(lambda: pipeline.step(batch[:5], batch[:5]), "a batch of shape (5, 3) cannot be cut into 2 equal micro-batches")
refused(lambda: pipeline.step(batch[:0], batch[:0]), "a batch of shape (0, 3) cannot be cut")
refused(lambda: WorkerPipeline(model, plan, mean, micro_batches=1), "1f1b needs at least 2, found 1")
refused(
    lambda: WorkerPipeline(model, plan, mean, micro_batches=2, schedule="gpip"),
    "unknown schedule 'gpip'; did you mean 'gpipe'?; known are gpipe, 1f1b",
)
refused(lambda: WorkerPipeline(model, place(model, ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]), mean, micro_batches=4),
        "2 workers cannot run replicas of 4 stages")
print("statistics", sorted(pipeline.module.state_dict())[0], flush=True)
dist.destroy_process_group()
"""

STEPS = """\
import copy
import sys

import torch
import torch.distributed as dist
from torch import nn

from distrun_runtime.parallel import WorkerPipeline, place, workers

torch.manual_seed(0)
mean = nn.functional.mse_loss
model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
reference, batch, target = copy.deepcopy(model), torch.randn(8, 3), torch.zeros(8, 2)
dist.init_process_group("gloo", init_method="env://")
pipeline = WorkerPipeline(
    model, place(model, ["cpu:0", "cpu:1"]), lambda output, target: mean(output.float(), target), micro_batches=4,
    schedule=sys.argv[1]
)
for _ in range(2):  # without zero_grad between them: gradients add up
    loss = pipeline.step(batch, target)
    expected = mean(reference(batch), target)
    expected.backward()
    if loss is not None:
        torch.testing.assert_close(loss, expected.detach())
for name, value in pipeline.module.named_parameters():
    torch.testing.assert_close(value.grad, reference.get_parameter(name).grad)


def is_right(output, dtype):
    if output is not None:
        assert output.dtype == dtype, output.dtype
        torch.testing.assert_close(output.float(), whole, rtol=0.05, atol=0.05)


whole = reference(batch).detach()
is_right(pipeline.forward(batch), torch.float32)
for dtype in (torch.bfloat16, torch.float16):
    with torch.autocast("cpu", dtype=dtype):
        is_right(pipeline.forward(batch), dtype)
is_right(pipeline.forward(batch), torch.float32)
with torch.inference_mode():
    is_right(pipeline.forward(batch), torch.float32)
pipeline.module.bfloat16()
is_right(pipeline.forward(batch.bfloat16()), torch.bfloat16)
pipeline.module.float()
is_right(pipeline.forward(batch), torch.float32)
for rows in range(1, 21):
    pipeline.forward(torch.zeros(4 * rows, 3))
assert len(pipeline._schedules) == workers.KEPT_SCHEDULES
is_right(pipeline.forward(batch), torch.float32)

torch.__version__ = type(torch.__version__)("2.5.1")
try:
    WorkerPipeline(model, place(model, ["cpu:0", "cpu:1"]), mean, micro_batches=4)
except RuntimeError as err:
    assert "torch 2.5.1: stages on workers need torch" in str(err), err
else:
    raise AssertionError("an older torch was not refused")
print("steps", flush=True)
dist.destroy_process_group()
"""

PASSED_ON = """\
import sys

import torch
import torch.distributed as dist
from torch import nn

from distrun_runtime.parallel import WorkerPipeline, place

torch.manual_seed(0)
dist.init_process_group("gloo", init_method="env://")


class Apply(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act, self.linear = act, nn.Linear(3, 4)

    def forward(self, value):
        return self.act(self.linear(value))


class Embeds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(2, 4)

    def forward(self, value):
        return value[0] + self.embed(value[1])


def pipeline_of(*layers, **options):
    return WorkerPipeline(
        layers, place(layers, ["cpu:0", "cpu:1"]), nn.functional.mse_loss, micro_batches=2, **options
    )


case = sys.argv[1]
if case == "index":  # torch looks for the shapes with an input of any values, and these are no index
    pipeline = pipeline_of(Apply(lambda value: (value, (value[:, 0] > 0).long())), Embeds())
    for rows in range(1, 6):
        pipeline.step(torch.randn(4 * rows, 3), torch.zeros(4 * rows, 4))
elif case == "nested":
    pipeline = pipeline_of(Apply(lambda value: (value, (value, value))), nn.Identity())
    pipeline.step(torch.randn(4, 3), torch.zeros(4, 4))
else:
    layers = [nn.Linear(3, 3), Apply({"step": lambda value: value[-1], "scalar": torch.mean}[case])]
    pipeline = pipeline_of(*layers, layout="TN")
    if case == "scalar":  # outputs are put together only where they are wanted
        pipeline.step(torch.randn(6, 4, 3), torch.zeros(()).expand(6, 4))
    pipeline.forward(torch.randn(6, 4, 3))
print("passed on", flush=True)
dist.destroy_process_group()
"""


def launched(tmp_path: Path, text: str, workers: int, *words: str) -> list[str]:
    """Run a script as a job without servers; return what its workers print, sorted."""
    done = run_script(tmp_path, text, *words, python=python_of("torch"), workers=workers)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.mark.peers
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_two_stages_on_two_workers_train_as_one_process(tmp_path: Path, schedule: str) -> None:
    assert launched(tmp_path, TRAINING, 2, schedule) == [
        "stage 0 replica 0 layers embed,rnn.0,turn",
        "stage 1 replica 0 layers back,rnn.1,rnn.2,decode",
    ]


@pytest.mark.peers
def test_two_stages_with_two_replicas_train_as_one_process(tmp_path: Path) -> None:
    found = [line.partition(" layers")[0] for line in launched(tmp_path, TRAINING, 4, "1f1b")]
    assert found == [f"stage {stage} replica {replica}" for stage in range(2) for replica in range(2)]


@pytest.mark.peers
def test_running_statistics_are_of_the_micro_batches_and_wrong_calls_are_refused(tmp_path: Path) -> None:
    """torch runs each stage once more, with values that mean nothing, to find the shapes of its outputs."""
    assert launched(tmp_path, STATISTICS, 2) == ["statistics 0.bias", "statistics 2.bias"]


@pytest.mark.peers
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gradients_add_up_and_each_mode_of_torch_has_its_own_shapes(tmp_path: Path, schedule: str) -> None:
    assert launched(tmp_path, STEPS, 2, schedule) == ["steps", "steps"]


@pytest.mark.peers
def test_a_stage_may_pass_on_a_tuple_with_an_index(tmp_path: Path) -> None:
    assert launched(tmp_path, PASSED_ON, 2, "index") == ["passed on"] * 2


@pytest.mark.peers
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("nested", "stage 0 (0, on cpu:0): layer '0' returned a tuple of Tensor, tuple"),
        ("step", "layer '1' returned a tensor of shape (2, 4)"),
        ("scalar", "layer '1' returned a tensor of shape ()"),
    ],
)
def test_what_cannot_be_passed_on_or_put_together_names_the_layer(tmp_path: Path, case: str, said: str) -> None:
    done = run_script(tmp_path, PASSED_ON, case, python=python_of("torch"))
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
