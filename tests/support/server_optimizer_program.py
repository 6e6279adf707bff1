"""What a ServerOptimizer does, run by an interpreter that has torch: prints what became of each case, as JSON."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cases import run_cases
from cluster import Cluster
from torch import nn
from torch.optim import lr_scheduler

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.torch.server_optimizer import ServerOptimizer

WORKERS = 2
X = torch.linspace(-1, 1, 96).reshape(2, 12, 4)
Y = (X.sum(2, keepdim=True) * 3).sin()
Steps = Callable[[Any], None]


def network(seed: int = 0) -> nn.Sequential:
    """Return a network with weights that are the same in every thread, as torch's generator is not."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    for each in net.parameters():
        each.data = (torch.arange(float(each.numel())) * 1.7 + seed).sin().mul(0.5).reshape(each.shape)
    return net


def groups(net: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(net[0].parameters()), "weight_decay": 0.2},
        {"params": list(net[2].parameters()), "lr": 0.003},
    ]


def loss_of(net: nn.Module, part: int) -> Any:
    return ((net(X[part]) - Y[part]) ** 2).mean()


def backward(net: nn.Module, part: int) -> None:
    loss_of(net, part).backward()


def alone(optimizer: Any, net: nn.Module) -> None:
    """Make a step of torch by the mean of the parts' gradients."""
    grads = [torch.autograd.grad(loss_of(net, part), list(net.parameters())) for part in range(WORKERS)]
    for each, *given in zip(net.parameters(), *grads, strict=True):
        each.grad = (given[0] + given[1]) / 2
    optimizer.step()


def job(script: Callable[[Any], Any], kind: str = "dist_sync", staleness: int | None = None) -> list[Any]:
    with Cluster(WORKERS, over="inproc") as cluster:
        return cluster.run(script, kind, staleness)


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in net.parameters()]


def same(got: list[torch.Tensor], expected: list[torch.Tensor], **limits: float) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **{"rtol": 0.0, "atol": 0.0, **limits})


def refused(act: Callable[[], Any], *said: str, error: type[Exception] = KVError) -> None:
    found = "nothing"
    try:
        act()
    except error as err:
        found = str(err)
    assert all(each in found for each in said), found


# --- the cases


def fifty_steps_under_a_scheduler_are_those_of_torch_optim() -> None:
    cosine, cycle = lr_scheduler.CosineAnnealingLR, lr_scheduler.OneCycleLR
    for name, torchs, options, schedule, more in (
        ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, cosine, {"T_max": 50}),
        ("sgd", torch.optim.SGD, {"momentum": 0.9}, cycle, {"max_lr": [0.1, 0.05], "total_steps": 51}),
        ("adam", torch.optim.Adam, {"amsgrad": True}, lr_scheduler.StepLR, {"step_size": 9, "gamma": 0.5}),
        ("adamw", torch.optim.AdamW, {"betas": (0.8, 0.99)}, cycle, {"max_lr": 0.01, "total_steps": 51}),
        ("rmsprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, cosine, {"T_max": 40}),
    ):
        mine = network()
        reference = torchs(groups(mine), **options)
        schedules = [schedule(reference, **more)]
        for _ in range(50):
            alone(reference, mine)
            schedules[0].step()

        def script(
            kv: Any, name: str = name, options: Any = options, schedule: Any = schedule, more: Any = more
        ) -> Any:
            net = network(kv.rank)
            optimizer = ServerOptimizer(groups(net), name, store=kv, **options)
            assert len(optimizer._flats) == 2
            scheduler = schedule(optimizer, **more)
            for _ in range(50):
                optimizer.zero_grad()
                backward(net, kv.rank)
                optimizer.step()
                scheduler.step()
            return weights(net)

        first, second = job(script)
        same(first, second)
        same(first, weights(mine), rtol=1e-6, atol=1e-6)


def a_step_by_a_rate_and_gradients_without_rounding_is_torchs_bit_for_bit() -> None:
    def script(kv: Any) -> Any:
        net = nn.Linear(3, 2, bias=False)
        net.weight.data = torch.arange(6.0).reshape(2, 3)
        optimizer = ServerOptimizer(net, "sgd", store=kv, lr=0.25, momentum=0.5)
        for number in range(4):
            net.weight.grad = torch.full((2, 3), float(number + kv.rank))
            optimizer.step()
        return net.weight.detach().clone()

    expected = torch.arange(6.0).reshape(2, 3).requires_grad_()
    reference = torch.optim.SGD([expected], lr=0.25, momentum=0.5)
    for number in range(4):
        expected.grad = torch.full((2, 3), number + 0.5)
        reference.step()
    for got in job(script):
        same([got], [expected.detach()])


def three_hundred_tensors_of_two_dtypes_take_two_keys_and_one_call_a_step() -> None:
    calls = []
    with kvstore.create("local") as kv:
        pushpull = kv.pushpull
        kv.pushpull = lambda *words, **more: calls.append(words) or pushpull(*words, **more)
        params = [torch.ones(3, 2, dtype=kind, requires_grad=True) for kind in (torch.float32, torch.bfloat16) * 150]
        optimizer = ServerOptimizer(params, "adamw", store=kv, lr=0.1)
        assert "2 keys" in repr(kv)
        for each in params:
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert len(calls) == 1
        assert all(bool((each < 1).all()) for each in params)


def a_rule_that_treats_biases_by_their_names_finds_them() -> None:
    with kvstore.create("local") as kv:
        net = nn.Linear(1, 4)
        nn.init.ones_(net.weight), nn.init.ones_(net.bias)
        optimizer = ServerOptimizer(net, "lars", store=kv, lr=0.5)
        for each in net.parameters():
            each.grad = torch.ones_like(each)
        optimizer.step()
        assert net.bias.tolist() == [0.5] * 4
        assert (net.weight > 0.99).all()


def a_learning_rate_may_be_a_tensor_that_is_changed_in_place() -> None:
    weight = torch.ones(1, requires_grad=True)
    with kvstore.create("local") as kv:
        optimizer = ServerOptimizer([weight], "sgd", store=kv)
        optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.5)
        for expected in (0.5, 0.25):
            weight.grad = torch.ones(1)
            optimizer.step()
            assert weight.item() == expected
            rate.fill_(0.25)


def a_rule_that_needs_the_whole_value_has_a_key_for_each_parameter() -> None:
    with kvstore.create("local") as kv:
        ServerOptimizer(network(), "lamb", store=kv)
        assert "4 keys" in repr(kv)


def groups_may_be_added() -> None:
    def script(kv: Any) -> Any:
        net = network(kv.rank)
        net[2].requires_grad_(False)
        optimizer = ServerOptimizer(net, "sgd", store=kv, lr=0.1)
        net[2].requires_grad_(True)
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.5})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        backward(net, kv.rank)
        optimizer.step()
        return weights(net)

    mine = network()
    alone(torch.optim.SGD([{"params": mine[0].parameters()}, {"params": mine[2].parameters(), "lr": 0.5}], 0.1), mine)
    for got in job(script):
        same(got, weights(mine), rtol=1e-6, atol=1e-6)


def states_go_on_bit_for_bit() -> None:
    folder = tempfile.mkdtemp()

    def train(kv: Any, net: nn.Module, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            backward(net, kv.rank)
            optimizer.step()

    def first(kv: Any) -> Any:
        net = network()
        optimizer = ServerOptimizer(net, "adamw", store=kv, states=folder, lr=0.1)
        optimizer.param_groups[0]["lr"] = 0.05
        train(kv, net, optimizer, 3)
        saved = optimizer.state_dict()
        train(kv, net, optimizer, 2)
        return saved, weights(net)

    def second(kv: Any) -> Any:
        net = network(3)
        optimizer = ServerOptimizer(net, "adamw", store=kv, states=folder, lr=0.1)
        optimizer.load_state_dict(found[0][0])
        assert optimizer.param_groups[0]["lr"] == 0.05
        train(kv, net, optimizer, 2)
        later = {**found[0][0], "state": {**found[0][0]["state"], "saved": "data-0"}}
        refused(lambda: optimizer.load_state_dict(later), "they were saved later")
        refused(lambda: optimizer.load_state_dict({"state": {}}), "found states of torch's")
        return weights(net)

    found = job(first)
    for got in job(second):
        same(got, found[0][1])
    with kvstore.create("local") as kv:
        refused(ServerOptimizer(network(), "adamw", store=kv).state_dict, "the states are on the servers; fix: ")


def servers_hold_each_its_part_of_weights_and_states() -> None:
    """The figures of docs/torch.md: 12 bytes for each parameter of adam over the servers, 8 on each worker."""
    folder = tempfile.mkdtemp()

    def script(kv: Any) -> Any:
        net = nn.Linear(1000, 1000, bias=False)
        optimizer = ServerOptimizer(net, "adam", store=kv, states=folder)
        for _ in range(2):
            net(torch.ones(1, 1000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.state_dict()
        (flat,) = optimizer._flats
        assert net.weight.data_ptr() == flat.weights.ctypes.data
        assert net.weight.grad.data_ptr() == flat.gradients.ctypes.data
        return flat.weights.nbytes + flat.gradients.nbytes

    with Cluster(WORKERS, servers=2, over="inproc") as cluster:
        assert cluster.run(script) == [8e6, 8e6]
    sizes = []
    for file in sorted(Path(folder).glob("data-*/server-*.npz")):
        with np.load(file) as arrays:
            sizes.append(sum(arrays[name].nbytes for name in arrays if name != "save"))
    assert sum(sizes) == 12e6
    assert max(sizes) < 6.5e6


def asynchronous_steps_are_applied_as_they_come() -> None:
    def script(kv: Any) -> Any:
        net = nn.Linear(1, 1, bias=False)
        net.weight.data.fill_(1.0)
        optimizer = ServerOptimizer(net, "sgd", asynchronous=True, store=kv, lr=0.25)
        for _ in range(2):
            net.weight.grad = torch.ones(1, 1)
            optimizer.step()
        kv.barrier()
        net.weight.grad = torch.zeros(1, 1)
        optimizer.step()
        return net.weight.item()

    assert job(script, "dist_async", 1) == [0.0, 0.0]


def an_inf_on_one_worker_skips_the_step_on_all() -> None:
    def script(kv: Any) -> Any:
        net, scaler = network(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        optimizer = ServerOptimizer(net, "sgd", store=kv, lr=0.1)
        seen = []
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, kv.rank)).backward()
            if number == 1 and kv.rank == 1:
                net[0].weight.grad[0, 0] = torch.inf
            if number == 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append(weights(net))
        return seen

    mine = network()
    reference = torch.optim.SGD(mine.parameters(), lr=0.1)
    alone(reference, mine)
    once = weights(mine)
    alone(reference, mine)
    for first, second, third in job(script):
        same(first, once, rtol=1e-6, atol=1e-6)
        same(second, first)
        same(third, weights(mine), rtol=1e-6, atol=1e-6)


def a_parameter_without_a_gradient_has_one_of_0_and_sparse_ones_are_added() -> None:
    table, unused = nn.Embedding(3, 2, sparse=True), torch.ones(2, requires_grad=True)
    nn.init.ones_(table.weight)
    with kvstore.create("local") as kv:
        optimizer = ServerOptimizer([table.weight, unused], "sgd", store=kv, lr=0.25, weight_decay=0.5)
        table(torch.tensor([1, 1])).sum().backward()
        assert optimizer.step(lambda: 7.0) == 7.0
    assert table.weight.tolist() == [[0.875] * 2, [0.375] * 2, [0.875] * 2]
    assert unused.tolist() == [0.875] * 2


def weights_that_something_else_changed_are_refused_until_assign() -> None:
    def script(kv: Any) -> Any:
        net = network()
        optimizer = ServerOptimizer(net, "sgd", store=kv, lr=0.0)
        net.load_state_dict(network(1 + kv.rank).state_dict())
        refused(optimizer.step, "parameter '0.weight' was changed by something else", "call assign() on all workers")
        optimizer.assign()
        optimizer.step()
        return weights(net)

    for got in job(script):
        same(got, weights(network(1)))


def a_parameter_that_is_frozen_or_moved_later_is_refused() -> None:
    net = network()
    with kvstore.create("local") as kv:
        optimizer = ServerOptimizer(net, "sgd", store=kv)
        net[2].requires_grad_(False)
        refused(optimizer.step, "parameter '2.weight' requires no gradient any more", "fix: ")
        net.to(torch.float64)
        refused(optimizer.step, "parameter '0.weight' was moved to other memory", "fix: ")


def workers_that_differ_are_told_before_the_first_step() -> None:
    for make, said in (
        (lambda rank: nn.Linear(2, 2, bias=rank == 0), "parameter 'bias'"),
        (lambda rank: nn.Linear(2 + rank, 2), "parameter 'weight'"),
        (lambda rank: [torch.ones(2, requires_grad=True) for _ in range(1 + rank)], "number of parameters of group 0"),
        (lambda rank: [(f"fc{rank}", torch.ones(2, requires_grad=True))], "parameter 'fc0'"),
        (lambda rank: nn.BatchNorm1d(2, track_running_stats=rank == 0), "'running_mean', which is not trained, is"),
    ):

        def script(kv: Any, make: Any = make, said: str = said) -> None:
            refused(lambda: ServerOptimizer(make(kv.rank), "sgd", store=kv), "optimizers of the workers differ", said)

        job(script)

    def rates(kv: Any) -> None:
        refused(lambda: ServerOptimizer(network(), "sgd", store=kv, lr=0.1 + kv.rank), "options of group 0", "1.1")

    job(rates)


def bad_input_is_named() -> None:
    net = network()

    def make(*words: Any, **options: Any) -> Callable[[], Any]:
        return lambda: ServerOptimizer(*words, **options)

    refused(make(net, "adamv"), "unknown rule 'adamv' (did you mean 'adam")
    refused(make(net, torch.optim.SGD), "a rule is given by name")
    refused(make(net, "mine:Rule"), "no rule 'mine:Rule'")
    refused(make(net, "adamw", beta=(0.9, 0.9)), "no parameter 'beta' (did you mean 'beta")
    refused(make(net, "adamw", lr_scheduler={"type": "factor", "step": 1}), "a scheduler of torch.optim.lr_scheduler")
    refused(make(net, "adamw", store="dist_sync"), "store is one that kvstore.create made, not str")
    refused(make(net, "adamw", staleness=1), "fix: ServerOptimizer(..., asynchronous=True)")
    complexes = [torch.ones(2, dtype=torch.complex64, requires_grad=True)]
    refused(make(complexes, "sgd"), "parameter '0.0' is of torch.complex64; servers update real floats only")
    with kvstore.create("local") as kv:
        refused(make(net, "adamw", store=kv, asynchronous=True), "a 'local' store is not for asynchronous=True")
        refused(make([{"params": net[0].parameters(), "momentun": 0.5}], "sgd", store=kv), "did you mean 'momentum'")
        refused(make([torch.ones(2)], "sgd", store=kv), "parameter '0.0' requires no gradient; leave it out")
        two = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "momentum": 0.5}]
        refused(make(two, "sgd", store=kv), "group 1 has momentum=0.5 and group 0 momentum=0.0", "fix: ")


def main() -> None:
    torch.set_num_threads(1)
    run_cases([each for name, each in globals().items() if name.count("_") > 1 and not name.startswith("_")])


if __name__ == "__main__":
    main()
