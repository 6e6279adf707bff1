"""What placement and pipeline do with torch, run by an interpreter that has it: prints each case's outcome as JSON."""

from __future__ import annotations

import _thread
import contextlib
import copy
import re
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cases import run_cases
from slowness import scaled
from torch import nn

from distrun_runtime.errors import StageError, TimedOut
from distrun_runtime.parallel import LayerCost, Pipeline, StagePlan, balance, measure, named_layers, place
from distrun_runtime.parallel import pipeline as module

WORDS = 11
LIMIT_S = scaled(30.0)


def text_model(recurrent: type[nn.RNNBase] = nn.LSTM, *, batch_first: bool = False) -> nn.Sequential:
    """Return a small language model in float64, with weights that are always the same."""
    torch.manual_seed(0)
    layers = [recurrent(6 if not one else 5, 5, batch_first=batch_first) for one in range(3)]
    stack = OrderedDict(embed=nn.Embedding(WORDS, 6), rnn=nn.Sequential(*layers), decode=nn.Linear(5, WORDS))
    return nn.Sequential(stack).double()


def words(time: int, batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, WORDS, (time, batch), generator=torch.Generator().manual_seed(seed))


def whole(model: nn.Sequential, batch: Any, states: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """Run a model on one device, layer after layer."""
    after = {}
    for name, layer in named_layers(model).items():
        if module.is_recurrent(layer):
            batch, after[name] = layer(batch, (states or {}).get(name))
        else:
            batch = layer(batch)
    return batch, after


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def on_cpus(model: Any, stages: int) -> StagePlan:
    return balance(model, [f"cpu:{index}" for index in range(stages)], dict.fromkeys(named_layers(model), 1.0))


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def same_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            same(found.grad, expected.grad)


def refused(act: Callable[[], Any], *said: str, error: type[BaseException] = ValueError) -> BaseException:
    found: BaseException | None = None
    try:
        act()
    except error as err:
        found = err
    assert found is not None, "nothing was raised"
    for each in said:
        assert each in str(found), str(found)
    return found


def no_threads_of_stages() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]


class Layer(nn.Module):
    """A layer that calls a function with its input; without one, it passes the input on, times its weight."""

    def __init__(self, act: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.act = act

    def forward(self, value: Any) -> Any:
        return value * self.weight if self.act is None else self.act(value) * self.weight


class Twice(torch.autograd.Function):
    """Passes a value on and calls a function in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Callable[[], None]) -> torch.Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.act()
        return gradient, None


ROWS = torch.arange(12, dtype=torch.float64).reshape(6, 2)

# --- the cases: placement


def layers_have_the_names_of_their_modules() -> None:
    assert list(named_layers(text_model())) == ["embed", "rnn.0", "rnn.1", "rnn.2", "decode"]
    one = nn.Linear(2, 2)
    nested = nn.Sequential(nn.Sequential(nn.Sequential(one), nn.ReLU()))
    assert list(named_layers(nested)) == ["0.0.0", "0.1"]
    assert list(named_layers([one, nested])) == ["0", "1.0.0.0", "1.0.1"]
    assert list(named_layers({"a": one, "b": nn.ReLU()})) == ["a", "b"]
    assert list(named_layers(nn.ModuleDict({"b": one, "a": nn.ReLU()}))) == ["b", "a"]
    assert list(named_layers(nn.ModuleList([one]))) == ["0"]


def a_module_that_comes_twice_is_two_layers() -> None:
    one = nn.Linear(2, 2)
    assert list(named_layers(nn.Sequential(one, nn.ReLU(), one))) == ["0", "1", "2"]


def a_name_that_comes_twice_is_refused() -> None:
    said = "layer 'a.0' comes twice; give its module another name"
    refused(lambda: named_layers({"a": nn.Sequential(nn.Linear(2, 2)), "a.0": nn.ReLU()}), said)


def hooks_that_nobody_would_call_are_refused() -> None:
    register: list[Callable[[nn.Module], Any]] = [
        lambda one: one.register_forward_hook(print),
        lambda one: one.register_forward_pre_hook(print),
        lambda one: one.register_full_backward_hook(print),
        lambda one: one.register_full_backward_pre_hook(print),
    ]
    for each in register:
        inner = nn.Sequential(nn.Linear(2, 2))
        each(inner)
        refused(lambda: named_layers([nn.ReLU(), inner]), "'1' has hooks, but only its layers are called")  # noqa: B023
        refused(lambda: named_layers(inner), "the model has hooks, but only its layers are called")  # noqa: B023
        layer = nn.Linear(2, 2)
        each(layer)
        assert list(named_layers([layer])) == ["0"]


def a_model_that_hides_its_layers_is_refused() -> None:
    refused(lambda: named_layers(Layer()), "Layer does not tell in which order its layers run", error=TypeError)
    refused(lambda: named_layers([nn.ReLU(), "x"]), "layer '1': expected an nn.Module, found str", error=TypeError)
    refused(lambda: named_layers(3), "found int", error=TypeError)
    refused(lambda: named_layers("net"), "found str", error=TypeError)
    refused(lambda: named_layers([]), "the model has no layers")


def groups_go_to_devices_and_neighbours_stay_together() -> None:
    model = text_model()
    plan = place(model, {"embed": "cuda:0", "rnn.[01]": "gpu:0", "rnn.2": "cuda:1", "decode": "cuda:1"})
    assert [(stage.layers, str(stage.device)) for stage in plan.stages] == [
        (("embed", "rnn.0", "rnn.1"), "cuda:0"),
        (("rnn.2", "decode"), "cuda:1"),
    ]
    assert [stage.parameters for stage in plan.stages] == [WORDS * 6 + 260 + 240, 240 + 6 * WORDS]
    assert plan.seconds is None
    plan = place(model, {"embed": "cpu:0", "rnn": "cpu:1", "decode": "cpu:2"})
    assert [stage.layers for stage in plan.stages] == [("embed",), ("rnn.0", "rnn.1", "rnn.2"), ("decode",)]


def a_list_gives_each_layer_its_device() -> None:
    plan = place([nn.ReLU(), nn.ReLU(), nn.ReLU()], ["cuda:0", "cuda:0/1", "cuda:0/1"])
    assert [(stage.layers, str(stage.device)) for stage in plan.stages] == [
        (("0",), "cuda:0"),
        (("1", "2"), "cuda:0/1"),
    ]


def a_list_may_give_each_module_of_the_model_its_device() -> None:
    encoder, decoder = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential(nn.Linear(2, 2))
    for model in ([encoder, decoder], nn.Sequential(encoder, decoder), nn.ModuleList([encoder, decoder])):
        plan = place(model, ["cpu:0", "cpu:1"])
        assert [stage.layers for stage in plan.stages] == [("0.0", "0.1"), ("1.0",)]
    named = place({"en.coder": encoder, "decoder": decoder}, ["cpu:0", "cpu:1"])
    assert [stage.layers for stage in named.stages] == [("en.coder.0", "en.coder.1"), ("decoder.0",)]
    refused(lambda: place([encoder, decoder], ["cpu"]), "1 devices for 3 layers of 2 modules")


def a_device_that_comes_again_has_another_stage() -> None:
    plan = place(text_model(), {"embed": "cpu:0", "rnn": "cpu:1", "decode": "cpu:0"})
    assert [str(stage.device) for stage in plan.stages] == ["cpu:0", "cpu:1", "cpu:0"]


def a_wrong_group_is_named_with_the_nearest_layer() -> None:
    model = text_model()
    refused(lambda: place(model, {"embd": "cpu"}), "group 'embd' names no layer; did you mean 'embed'?", "rnn.0, rnn.1")
    refused(lambda: place(model, {"rn": "cpu"}), "group 'rn' names no layer; did you mean 'rnn'?")
    refused(lambda: place(model, {"rnn.[5-9]": "cpu"}), "group 'rnn.[5-9]' names no layer")


def a_layer_in_no_group_or_in_two_is_named() -> None:
    model = text_model()
    refused(lambda: place(model, {"embed": "cpu", "decode": "cpu"}), "layer 'rnn.0' is in no group")
    refused(lambda: place(model, {"*": "cpu", "rnn.1": "cpu:1"}), "layer 'rnn.1' is in several groups: '*', 'rnn.1'")
    refused(
        lambda: place(model, {"embed": "cpu", "rnn": "cpu", "decode": "cpo"}), "device 'cpo'", "did you mean 'cpu'?"
    )


def devices_of_another_form_are_refused() -> None:
    model = text_model()
    refused(
        lambda: place(model, ["cpu", "cpu:1"]), "2 devices for 5 layers of 3 modules", "balance(model, devices, costs)"
    )
    refused(lambda: place(model, "cpu"), "expected a mapping of groups to devices or a list", error=TypeError)
    refused(lambda: balance(model, "cpu", {}), "expected a list with a device for each stage", error=TypeError)


def a_parameter_of_two_stages_is_refused() -> None:
    tied = nn.ModuleDict({"embed": nn.Embedding(4, 3), "middle": nn.Linear(3, 3), "decode": nn.Linear(3, 4)})
    tied["decode"].weight = tied["embed"].weight
    said = "'decode.weight' of stage 1 (middle to decode, on cpu:1) is 'embed.weight' of stage 0 (embed, on cpu:0)"
    refused(lambda: place(tied, ["cpu:0", "cpu:1", "cpu:1"]), said, "have to be in one stage")
    plan = place(tied, ["cpu:0", "cpu:0", "cpu:0"])
    assert plan.stages[0].parameters == 12 + 12 + 4  # the shared weight counts once


def a_plan_is_balanced_by_given_costs() -> None:
    model = [nn.Linear(2, 2) for _ in range(4)]
    costs = dict(
        zip("0123", [LayerCost(3.0, 8), LayerCost(1.0, 16), LayerCost(1.0, 24), LayerCost(1.0, 32)], strict=True)
    )
    plan = balance(model, ["cpu:0", "cpu:1"], costs)
    assert [(stage.layers, stage.seconds, stage.bytes_out) for stage in plan.stages] == [
        (("0",), 3.0, 8),
        (("1", "2", "3"), 3.0, None),
    ]
    assert plan.seconds == 3.0
    slow = balance(model, ["cpu:0", "cpu:1"], costs, bytes_per_s=16.0)  # 8 bytes there and back: 1 s
    assert [stage.seconds for stage in slow.stages] == [3.0, 4.0]
    gpus = balance(model, ["cuda:0", "cuda:1"], costs)
    assert gpus.stages[1].seconds == 3.0 + 16 / 10e9
    assert balance(model, ["cuda:0", "cuda:0/1"], costs).stages[1].seconds == 3.0


def costs_are_measured_and_the_model_stays_as_it_is() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 2))
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    costs = measure(model, torch.zeros(8, 4), repeats=2)
    assert torch.equal(torch.get_rng_state(), generator)
    assert {name: cost.bytes_out for name, cost in costs.items()} == {"0": 2048, "1": 2048, "2": 2048, "3": 64}
    assert all(cost.seconds > 0 for cost in costs.values())
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert set(measure(text_model(), words(3, 2))) == {"embed", "rnn.0", "rnn.1", "rnn.2", "decode"}
    with torch.no_grad():
        assert measure(model, torch.zeros(8, 4), repeats=1)["3"].bytes_out == 64
    refused(lambda: measure(model, torch.zeros(8, 4), repeats=0), "repeats: expected at least 1, found 0")


def layers_that_write_into_their_input_are_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    assert measure(model, torch.zeros(2, 4))["1"].bytes_out == 32
    batch = -torch.ones(2, 4)
    measure(model[1:], batch)
    assert torch.equal(batch, -torch.ones(2, 4))
    said = "layer '0' failed while it was measured: RuntimeError: mat1 and mat2"
    refused(lambda: measure(model, torch.zeros(2, 3)), said, error=StageError)


def a_device_that_is_not_there_is_named() -> None:
    if torch.cuda.is_available():
        return
    model = [nn.ReLU(), nn.ReLU()]
    said = "device cuda:1 is not there: this process has no GPU"
    refused(lambda: Pipeline(model, place(model, ["cpu", "cuda:1"])), said)
    refused(lambda: measure(model, torch.zeros(1), device="cuda:1"), said)


def a_plan_of_another_model_is_refused() -> None:
    plan = place([nn.ReLU(), nn.ReLU()], ["cpu", "cpu:1"])
    said = "the plan is not of this model: the plan is for 0, 1; the model has 0"
    refused(lambda: Pipeline([nn.ReLU()], plan), said)


# --- the cases: results


def outputs_and_gradients_are_those_of_one_device() -> None:
    reference, batch = text_model(), words(5, 4)
    expected, after = whole(reference, batch)
    loss_of(expected, batch).backward()
    for stages in (1, 2, 3, 5):
        for micro_batches in (1, 2, 3, 9):
            for time_chunks in (1, 2, 9):
                model = text_model()
                plan = on_cpus(model, stages)
                options = {"micro_batches": micro_batches, "time_chunks": time_chunks, "layout": "TN"}
                pipeline = Pipeline(model, plan, timeout_s=LIMIT_S, **options)
                output = pipeline(batch)
                loss_of(output, batch).backward()
                same(output, expected)
                same_gradients(model, reference)
                same(pipeline.states, {name: module.map_tensors(torch.detach, one) for name, one in after.items()})
    assert no_threads_of_stages()


def the_time_may_come_second() -> None:
    for recurrent in (nn.RNN, nn.GRU, nn.LSTM):
        reference = text_model(recurrent, batch_first=True)
        model, batch = copy.deepcopy(reference), words(4, 6)  # 4 sentences of 6 words
        output = Pipeline(model, on_cpus(model, 2), micro_batches=2, time_chunks=3, layout="NT")(batch)
        expected, _ = whole(reference, batch)
        same(output, expected)
        loss_of(output, batch).backward()
        loss_of(expected, batch).backward()
        same_gradients(model, reference)


def training_goes_as_on_one_device() -> None:
    model, reference = text_model(), text_model()
    pipeline = Pipeline(model, on_cpus(model, 3), micro_batches=2, time_chunks=2, layout="TN")
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.05) for one in (model, reference)]
    for step in range(6):
        batch = words(3 + step % 3, 4, seed=step)  # batches of other lengths
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(pipeline(batch), batch).backward()
        loss_of(whole(reference, batch)[0], batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def states_are_given_on_to_the_next_batch() -> None:
    model, reference, batch = text_model(), text_model(), words(6, 4)
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2, time_chunks=2, layout="TN")
    expected, _ = whole(reference, batch)
    first = pipeline(batch[:3])
    assert not any(tensor.requires_grad for tensor in module.tensors_of(pipeline.states))
    same(torch.cat([first, pipeline(batch[3:], pipeline.states)]), expected)
    pipeline(batch[:3])
    only = {"rnn.1": pipeline.states["rnn.1"]}  # the others begin with zeros
    same(pipeline(batch[3:], only), whole(reference, batch[3:], only)[0])
    loss_of(pipeline(batch[3:], only), batch[3:]).backward()
    loss_of(whole(reference, batch[3:], only)[0], batch[3:]).backward()
    same_gradients(model, reference)
    same(pipeline(batch, {"rnn.0": None}), expected)
    refused(lambda: pipeline(batch, {"rnn.3": None}), "a state is given for 'rnn.3', which is no recurrent layer")
    refused(lambda: pipeline(batch, {"embed": None}), "'embed', which is no recurrent layer")


class Counter(nn.Module):
    """A recurrent layer of a user: adds up its inputs over time, and counts the steps."""

    is_recurrent = True

    def forward(self, value: torch.Tensor, state: Any) -> Any:
        total, steps = state or (value.new_zeros(1, *value.shape[1:]), value.new_zeros(1, value.shape[1]))
        sums = total + value.cumsum(0)
        return sums, (sums[-1:], steps + value.shape[0])


def a_module_of_the_user_may_be_recurrent() -> None:
    model = [Layer(), Counter(), Layer(), Counter()]
    value = torch.randn(5, 4, 2, dtype=torch.float64, requires_grad=True)
    pipeline = Pipeline(model, place(model, ["cpu:0", "cpu:0", "cpu:1", "cpu:1"]), time_chunks=3, layout="TN")
    output = pipeline(value)
    same(output, value.cumsum(0).cumsum(0))
    assert pipeline.states["3"][1].tolist() == [[5.0] * 4]
    output.pow(2).sum().backward()
    found = value.grad.clone()
    value.grad = None
    value.cumsum(0).cumsum(0).pow(2).sum().backward()
    same(found, value.grad)


def inputs_get_their_gradients() -> None:
    for stages in (1, 2):
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        one = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
        base = (one * 2).sin()  # the graph goes on before the pipeline
        output = Pipeline(model, on_cpus(model, stages), micro_batches=3)(base)
        (output**2).sum().backward()
        found, one.grad = one.grad, None
        (model((one * 2).sin()) ** 2).sum().backward()
        same(found, one.grad)


def layers_pass_tuples_on() -> None:
    class Pair(nn.Module):
        def forward(self, value: Any) -> Any:
            left, right = value
            return [left * 2, (right + left, right.argmax(1))]

    class Join(nn.Module):
        def forward(self, value: Any) -> Any:
            left, (right, best) = value
            return left * right, best, left.detach()

    model = [Pair(), Join()]
    left, right = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found = Pipeline(model, on_cpus(model, 2), micro_batches=2)((left, right))
    expected = Join()(Pair()((left, right)))
    same(found, expected)
    assert [one.requires_grad for one in found] == [True, False, False]
    gradients = torch.autograd.grad(found[0].sum(), [left, right])
    same(gradients, torch.autograd.grad(expected[0].sum(), [left, right]))


def outputs_that_cannot_be_put_together_are_refused() -> None:
    batch = torch.arange(24.0, dtype=torch.float64).reshape(6, 4, 1).repeat(1, 1, 2)  # six time steps, four sentences
    for devices in (["cpu:0", "cpu:1"], ["cpu:0", "cpu:0"]):
        layers = [Layer(), Layer(lambda value: value[-1])]
        plan = place(layers, devices)
        said = "layer '1' returned a tensor of shape (2, 2) for a part of a batch", "layout 'TN'", "(6, 2)"
        refused(partial(Pipeline(layers, plan, micro_batches=2, layout="TN"), batch), *said)
        same(Pipeline(layers, plan, layout="TN")(batch), batch[-1])  # it was not cut
        scalar = [Layer(), Layer(torch.mean)]
        said = "layer '1' returned a tensor of shape ()", "layout 'N'", "(3,)"
        refused(partial(Pipeline(scalar, plan, micro_batches=2), batch), *said)
        last = [Layer(), Layer(lambda value: value[:, -1])]  # behind the dimension that was cut
        same(Pipeline(last, plan, micro_batches=2, layout="NT")(batch), batch[:, -1])


def outputs_without_a_gradient_stay_without() -> None:
    model, batch = text_model(), words(3, 4)
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2, layout="TN")
    with torch.no_grad():
        assert not pipeline(batch).requires_grad
    with torch.inference_mode():
        assert pipeline(batch).is_inference()
    model.requires_grad_(False)
    assert not pipeline(batch).requires_grad


def frozen_stages_get_no_gradients() -> None:
    for frozen in ("embed", "decode"):
        model, reference, batch = text_model(), text_model(), words(3, 4)
        for one in (model, reference):
            one.get_submodule(frozen).requires_grad_(False)
        loss_of(Pipeline(model, on_cpus(model, 5), micro_batches=2, layout="TN")(batch), batch).backward()
        loss_of(whole(reference, batch)[0], batch).backward()
        same_gradients(model, reference)


def autocast_of_the_caller_holds_in_the_stages() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert pipeline(torch.zeros(4, 3)).dtype == torch.bfloat16
    assert pipeline(torch.zeros(4, 3)).dtype == torch.float32


def settings_of_the_caller_hold_in_the_stages() -> None:
    found = []

    def act(value: torch.Tensor) -> torch.Tensor:
        found.append((torch.empty(1).device.type, torch.is_autocast_cache_enabled()))
        return value

    model = [Layer(act), Layer(act)]
    pipeline = Pipeline(model, on_cpus(model, 2))
    with torch.device("meta"), torch.autocast("cpu", cache_enabled=False):
        pipeline(ROWS)
    pipeline(ROWS)
    assert found == [("meta", False)] * 2 + [("cpu", True)] * 2


def a_gradient_of_a_gradient_is_refused_on_threads() -> None:
    model = [Layer(), Layer()]
    output = Pipeline(model, on_cpus(model, 2))(ROWS).sum()
    said = "create_graph=True: gradients of a pipeline on CPU threads have no gradients of their own"
    refused(lambda: output.backward(create_graph=True), said, error=RuntimeError)
    assert all(layer.weight.grad is None for layer in model)
    output.backward()
    assert all(layer.weight.grad is not None for layer in model)


def two_batches_may_be_on_their_way() -> None:
    model, reference = text_model(), text_model()
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2, layout="TN")
    batches = [words(3, 4, seed) for seed in range(2)]
    sum(loss_of(output, batch) for output, batch in [(pipeline(batch), batch) for batch in batches]).backward()
    sum(loss_of(whole(reference, batch)[0], batch) for batch in batches).backward()
    same_gradients(model, reference)


def batchnorm_sees_each_part() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    reference, batch = copy.deepcopy(model), torch.randn(6, 3, dtype=torch.float64)
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=3)
    same(pipeline(batch), torch.cat([reference(part) for part in batch.tensor_split(3)]))
    same(model.state_dict(), reference.state_dict())
    assert model[1].num_batches_tracked == 3
    model.eval()
    same(pipeline(batch), reference.eval()(batch))


def dropout_draws_for_each_part_and_not_in_evaluation() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Identity())
    pipeline, ones = Pipeline(model, on_cpus(model, 2), micro_batches=2), torch.ones(2, 400)
    torch.manual_seed(0)
    first = pipeline(ones)
    torch.manual_seed(0)
    assert torch.equal(pipeline(ones), first)  # the only stage with dropout
    assert not torch.equal(first[0], first[1])
    model.eval()
    assert torch.equal(pipeline(ones), ones)


def a_batch_goes_backward_once() -> None:
    model = [Layer(), Layer()]
    output = Pipeline(model, on_cpus(model, 2))(ROWS)
    output.sum().backward(retain_graph=True)
    refused(output.sum().backward, "backward of this batch has run already", error=RuntimeError)


def a_batch_has_no_more_parts_than_rows() -> None:
    rows = []

    def act(value: torch.Tensor) -> torch.Tensor:
        rows.append(len(value))
        return value

    for wanted, expected in ((9, [1] * 6), (4, [2, 2, 1, 1])):
        rows.clear()
        model = [Layer(), Layer(act)]
        same(Pipeline(model, on_cpus(model, 2), micro_batches=wanted)(ROWS), ROWS)
        assert rows == expected


def a_model_of_one_stage_runs_in_the_calling_thread() -> None:
    threads = []
    model = [Layer(lambda value: threads.append(threading.current_thread()) or value)]
    same(Pipeline(model, on_cpus(model, 1), micro_batches=2)(ROWS), ROWS)
    assert threads == [threading.current_thread()] * 2


# --- the cases: at the same time


def a_stage_works_on_a_part_while_the_next_one_works_on_the_part_before() -> None:
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    seen: dict[int, list[float]] = {0: [], 1: []}

    def meets(stage: int, alone: int) -> Callable[[Any], Any]:
        def act(value: torch.Tensor) -> torch.Tensor:
            seen[stage].append(float(value[0, 0].detach()))
            if len(seen[stage]) - 1 != alone:
                meeting.wait()  # passes only if the other stage is in a part of its own now
            return value

        return act

    # Of three parts, the first stage is alone with the first one, the second stage with the last one.
    model = [Layer(meets(0, alone=0)), Layer(meets(1, alone=2))]
    same(Pipeline(model, on_cpus(model, 2), micro_batches=3)(ROWS), ROWS)
    assert seen == {0: [0.0, 4.0, 8.0], 1: [0.0, 4.0, 8.0]}


def a_stage_works_on_a_time_step_while_the_next_one_works_on_the_step_before() -> None:
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    steps = [0, 0]

    class Meets(Counter):
        def __init__(self, stage: int, alone: int) -> None:
            super().__init__()
            self.stage, self.alone = stage, alone

        def forward(self, value: torch.Tensor, state: Any) -> Any:
            step, steps[self.stage] = steps[self.stage], steps[self.stage] + 1
            if step != self.alone:
                meeting.wait()
            return super().forward(value, state)

    model = [Meets(0, alone=0), Meets(1, alone=3)]
    value = torch.randn(4, 1, 2, dtype=torch.float64)
    same(Pipeline(model, on_cpus(model, 2), time_chunks=4, layout="TN")(value), value.cumsum(0).cumsum(0))
    assert steps == [4, 4]


def backward_runs_at_the_same_time_too() -> None:
    meeting = threading.Barrier(2, timeout=LIMIT_S)
    parts = [0, 0]

    def meets(stage: int, alone: int) -> Callable[[Any], Any]:
        def act() -> None:
            part, parts[stage] = parts[stage], parts[stage] + 1
            if part != alone:
                meeting.wait()

        return lambda value: Twice.apply(value, act)

    model = [Layer(meets(0, alone=2)), Layer(meets(1, alone=0))]
    value = ROWS.clone().requires_grad_()
    Pipeline(model, on_cpus(model, 2), micro_batches=3)(value).sum().backward()
    assert parts == [3, 3]
    same(value.grad, torch.ones_like(ROWS))


def threads_within_operations_are_divided_among_the_stages() -> None:
    before = torch.get_num_threads()
    found = []

    def act(value: torch.Tensor) -> torch.Tensor:
        found.append(torch.get_num_threads())
        return value

    try:
        for own, expected in ((5, 2), (1, 1)):
            found.clear()
            torch.set_num_threads(own)
            model = [Layer(act), Layer(act)]
            Pipeline(model, on_cpus(model, 2))(ROWS)
            assert found == [expected] * 2
            assert torch.get_num_threads() == own
    finally:
        torch.set_num_threads(before)


def the_time_of_each_stage_is_measured() -> None:
    model, batch = text_model(), words(3, 4)
    pipeline = Pipeline(model, on_cpus(model, 2), layout="TN")
    output = pipeline(batch)
    forward = list(pipeline.busy_s)
    assert all(one > 0 for one in forward)
    loss_of(output, batch).backward()
    assert all(both > one for both, one in zip(pipeline.busy_s, forward, strict=True))


# --- the cases: failures


def a_failure_names_stage_and_part_and_leaves_no_thread() -> None:
    def fails(value: torch.Tensor) -> torch.Tensor:
        if value[0, 0] == 8.0 and failing:
            raise KeyError("broken")
        return value

    failing = [True]
    for devices in (["cpu:0", "cpu:1", "cpu:2"], ["cpu:0"] * 3):  # on threads, and in the calling thread
        model = [Layer(), Layer(fails), Layer()]
        pipeline = Pipeline(model, place(model, devices), micro_batches=3, timeout_s=LIMIT_S)
        failing[:] = [True]
        stage = "stage 1 (1, on cpu:1)" if len(set(devices)) > 1 else "stage 0 (0 to 2, on cpu:0)"
        said = f"{stage}: forward of micro-batch 2 failed: KeyError: 'broken'"
        err = refused(lambda pipeline=pipeline: pipeline(ROWS), said, error=StageError)
        assert isinstance(err.__cause__, KeyError)
        assert no_threads_of_stages()
        failing.clear()
        same(pipeline(ROWS), ROWS)


def a_failure_names_the_time_chunk() -> None:
    class Fails(Counter):
        def forward(self, value: torch.Tensor, state: Any) -> Any:
            if state is not None:
                raise ValueError("no more")
            return super().forward(value, state)

    model = [Counter(), Fails()]
    pipeline = Pipeline(model, on_cpus(model, 2), time_chunks=3, layout="TN")
    said = "stage 1 (1, on cpu:1): forward of micro-batch 0, time chunk 1 failed: ValueError: no more"
    refused(lambda: pipeline(torch.zeros(3, 2, 1)), said, error=StageError)


def a_failure_in_backward_names_stage_and_part() -> None:
    def fails() -> None:
        raise KeyError("broken")

    model = [Layer(lambda value: Twice.apply(value, fails)), Layer()]
    output = Pipeline(model, on_cpus(model, 2), micro_batches=3)(ROWS.clone().requires_grad_())
    said = "stage 0 (0, on cpu:0): backward of micro-batch 2 failed: KeyError: 'broken'"
    err = refused(output.sum().backward, said, error=StageError)
    assert isinstance(err.__cause__, KeyError)
    assert no_threads_of_stages()
    refused(output.sum().backward, "backward of this batch has run already", error=RuntimeError)


def a_stage_may_begin_with_a_layer_of_torch_that_overwrites_its_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)).double()
    reference = copy.deepcopy(model)
    output = Pipeline(model, place(model, ["cpu:0", "cpu:1", "cpu:1"]), micro_batches=2)(ROWS)
    same(output, reference(ROWS))
    output.sum().backward()
    reference(ROWS).sum().backward()
    same_gradients(model, reference)


def an_input_that_a_stage_overwrites_is_an_error_that_names_the_stage() -> None:
    model = [nn.Linear(2, 2).double(), Layer(lambda value: value.relu_())]
    pipeline = Pipeline(model, on_cpus(model, 2))
    refused(lambda: pipeline(ROWS), "stage 1 (1, on cpu:1): forward of micro-batch 0", "in-place", error=StageError)


def a_layer_that_returns_no_tensor_is_named() -> None:
    model = [nn.Identity(), nn.Identity()]
    model[0].forward = lambda _: 3
    pipeline = Pipeline(model, on_cpus(model, 2))
    said = "expected a tensor or a tuple of tensors between layers, found int"
    refused(lambda: pipeline(ROWS), "stage 0 (0, on cpu:0): forward of micro-batch 0 failed", said, error=StageError)
    assert no_threads_of_stages()


def a_stage_that_does_not_end_is_named_in_time() -> None:
    hold = threading.Event()

    def holds(value: torch.Tensor) -> torch.Tensor:
        if value[0, 0] == 4.0:
            hold.wait(LIMIT_S)
        return value

    model = [Layer(), Layer(holds), Layer()]
    pipeline = Pipeline(model, on_cpus(model, 3), micro_batches=3, timeout_s=0.5)
    said = "waited 0.5 s for stage 1 (1, on cpu:1): forward of micro-batch 1; fix: pass a larger timeout_s"
    refused(lambda: pipeline(ROWS), said, error=TimedOut)
    (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]
    assert left.daemon
    said = "stage-1-forward of an earlier batch still works on a part; no other batch can go until it ends"
    refused(lambda: pipeline(ROWS), said, error=StageError)
    hold.set()
    left.join(LIMIT_S)
    assert no_threads_of_stages()
    same(pipeline(ROWS), ROWS)


def after_a_stage_that_does_not_end_the_others_end_their_parts_first() -> None:
    hold, waited = threading.Event(), threading.Event()

    class Tells(TimedOut):
        def __init__(self, *said: Any) -> None:
            super().__init__(*said)
            waited.set()

    def works(value: torch.Tensor) -> torch.Tensor:
        if value[0, 0] == 4.0:
            waited.wait(LIMIT_S)  # it has begun this part when the other stage is given up
        return value

    model = [Layer(works), Layer(lambda value: hold.wait(LIMIT_S) and value)]
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=3, timeout_s=2.0)
    real, module.TimedOut = module.TimedOut, Tells
    try:
        refused(lambda: pipeline(ROWS), "stage 1 (1, on cpu:1)", error=TimedOut)
        (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]
        assert left.name == "stage-1-forward"
    finally:
        module.TimedOut = real
        hold.set()
    left.join(LIMIT_S)


def an_interrupt_does_not_wait_for_a_stage_that_does_not_end() -> None:
    hold, before = threading.Event(), torch.get_num_threads()

    def holds(value: torch.Tensor) -> torch.Tensor:
        # As Ctrl-C does, and unlike `interrupt_main`, it wakes the caller up.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        hold.wait(LIMIT_S)
        return value

    model = [Layer(), Layer(holds)]
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2, timeout_s=2 * LIMIT_S)
    real, module.INTERRUPTED_S = module.INTERRUPTED_S, 0.1
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipeline(ROWS)
    except KeyboardInterrupt:
        (left,) = [thread for thread in threading.enumerate() if thread.name.startswith("stage-")]
        assert left.name == "stage-1-forward"
    else:
        raise AssertionError("the interrupt was lost")
    finally:
        module.INTERRUPTED_S = real
        signal.signal(signal.SIGINT, usual)
        hold.set()
    assert torch.get_num_threads() == before
    left.join(LIMIT_S)


def an_exit_in_a_layer_is_an_exit_of_the_caller() -> None:
    for stages in (1, 2):
        model = [Layer(), Layer(lambda _: sys.exit(3))]
        refused(partial(Pipeline(model, on_cpus(model, stages)), ROWS), "3", error=SystemExit)
        assert no_threads_of_stages()


def states_without_a_batch_are_refused() -> None:
    class Sums(nn.Module):
        is_recurrent = True

        def forward(self, value: torch.Tensor, state: Any) -> Any:
            return value, torch.ones(1) if state is None else state + 1

    model, value = [Sums(), nn.Identity()], torch.zeros(3, 4, 2)
    said = "a state of layer '0' has the shape (1,)", "dimension 1 of a state has to be the batch"
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2, layout="TN")
    refused(lambda: pipeline(value), *said)
    refused(lambda: pipeline(value, {"0": torch.zeros(1)}), *said)
    pipeline = Pipeline(model, on_cpus(model, 2), time_chunks=3, layout="TN")
    pipeline(value)
    assert pipeline.states["0"].tolist() == [3.0]  # it need not be cut


def an_interrupt_of_the_caller_leaves_no_thread() -> None:
    parts: list[torch.Tensor] = []

    def interrupts(value: torch.Tensor) -> torch.Tensor:
        if not parts:  # once: another interrupt could come while the threads are awaited
            _thread.interrupt_main()
        parts.append(value)
        return value

    model = [Layer(interrupts), Layer()]
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=3, timeout_s=LIMIT_S)
    try:
        pipeline(ROWS)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("the interrupt was lost")
    assert no_threads_of_stages()


def layouts_that_do_not_fit_are_refused() -> None:
    model = text_model()
    plan = on_cpus(model, 2)
    refused(lambda: Pipeline(model, plan, layout="TNC"), "unknown layout 'TNC'; known are N, NT, TN")
    refused(lambda: Pipeline(model, plan), "layer 'rnn.0' takes time first, the layout is 'N'; pass layout='TN'")
    first = text_model(batch_first=True)
    refused(lambda: Pipeline(first, plan, layout="TN"), "takes batch first, the layout is 'TN'; pass layout='NT'")
    plain = [nn.Linear(2, 2), nn.Linear(2, 2)]
    refused(lambda: Pipeline(plain, on_cpus(plain, 2), time_chunks=2), "layout 'N' has no time to cut into chunks")
    refused(lambda: Pipeline(plain, on_cpus(plain, 2), micro_batches=0), "micro_batches: expected at least 1, found 0")
    refused(lambda: Pipeline(plain, on_cpus(plain, 2), timeout_s=0), "timeout_s: expected more than 0 seconds, found 0")
    both = [nn.LSTM(2, 2, bidirectional=True)]
    refused(lambda: Pipeline(both, on_cpus(both, 1), time_chunks=2, layout="TN"), "layer '0' is bidirectional")
    Pipeline(both, on_cpus(both, 1), layout="TN")
    cell = [nn.GRUCell(2, 2)]
    refused(lambda: Pipeline(cell, on_cpus(cell, 1), time_chunks=2, layout="TN"), "layer '0' is a GRUCell")


def a_batch_that_cannot_be_cut_is_refused() -> None:
    model = [nn.Identity(), nn.Identity()]
    pipeline = Pipeline(model, on_cpus(model, 2), micro_batches=2)
    said = "a batch is tensors whose first 1 dimensions are equal and not 0; found"
    refused(lambda: pipeline(torch.zeros(0, 2)), said, "(0,)")
    refused(lambda: pipeline((torch.zeros(3, 2), torch.zeros(4))), said, "(3,), (4,)")
    refused(lambda: pipeline(torch.tensor(1.0)), said)
    refused(lambda: pipeline(()), said, "no tensor")


# --- the cases: streams, as far as they can be followed without a GPU


class Stream:
    """A stream that knows which parts of which stages are done when it goes on."""

    current: Stream

    def __init__(self) -> None:
        self.done: set[tuple[int, int]] = set()

    def record_event(self) -> set[tuple[int, int]]:
        return set(self.done)

    def wait_event(self, event: set[tuple[int, int]]) -> None:
        self.done |= event

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def __enter__(self) -> None:
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *_: object) -> None:
        Stream.current = self.outer


class Followed(nn.Module):
    """A layer that notes what is done on the current stream when it is called, and that it is done itself."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.found: list[set[tuple[int, int]]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.found.append(set(Stream.current.done))
        Stream.current.done.add((self.stage, len(self.found) - 1))
        return value + 1


@contextlib.contextmanager
def followed(pipeline: Pipeline, caller: Stream, streams: list[Stream]) -> Iterator[list[Stream]]:
    """Run a pipeline's stages on these streams; give the streams that were told of a tensor."""
    Stream.current = caller
    pipeline._is_threaded = False
    for lane, stream in zip(pipeline._lanes, streams, strict=True):
        lane._stream = stream
    kept: list[Stream] = []
    real = torch.cuda.stream, torch.cuda.current_stream, torch.Tensor.record_stream
    torch.cuda.stream, torch.cuda.current_stream = lambda stream: stream, lambda _: caller
    torch.Tensor.record_stream = lambda _, stream: kept.append(stream)
    try:
        yield kept
    finally:
        torch.cuda.stream, torch.cuda.current_stream, torch.Tensor.record_stream = real


def a_failed_batch_is_waited_for_too() -> None:
    model = [Followed(0), Followed(1), Layer(lambda _: 1 / 0)]
    caller, streams = Stream(), [Stream() for _ in model]
    pipeline = Pipeline(model, on_cpus(model, 3), micro_batches=2)
    with followed(pipeline, caller, streams):
        refused(lambda: pipeline(ROWS), "ZeroDivisionError", error=StageError)
    assert caller.done == {(0, 0), (1, 0), (0, 1)}  # stage 2 failed at tick 2, before stage 1 had its second part


def a_stream_waits_for_its_own_part_of_the_stage_before_and_for_no_other() -> None:
    model = [Followed(stage) for stage in range(3)]
    pipeline = Pipeline(model, on_cpus(model, 3), micro_batches=3)
    caller, streams = Stream(), [Stream() for _ in model]
    caller.done.add((-1, 0))
    with followed(pipeline, caller, streams) as kept:
        same(pipeline(ROWS), ROWS + 3)
    for stage, layer in enumerate(model):
        for part, found in enumerate(layer.found):
            own = {(stage, before) for before in range(part)}
            above = {(other, before) for other in range(stage) for before in range(part + 1)}
            assert found == {(-1, 0)} | own | above, (stage, part, found)
    assert len(caller.done) == 1 + 9
    # Each of three parts is told to the stream of each stage, and each output to the caller's.
    assert [kept.count(stream) for stream in (*streams, caller)] == [3, 3, 3, 3]


TEXT = Path(__file__).read_text("utf-8").partition("# --- the cases")[2]
CASES = [globals()[name] for name in re.findall(r"^def (\w+)\(\) -> None:", TEXT, re.MULTILINE) if name != "main"]


def main() -> None:
    torch.set_num_threads(1)
    run_cases(CASES)


if __name__ == "__main__":
    main()
