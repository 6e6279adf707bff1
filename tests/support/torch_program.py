"""What a trainer does with torch, run by an interpreter that has it: prints what became of each case, as JSON."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import traceback
from pathlib import Path

import numpy as np
import torch
from cluster import Cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distrun_runtime import kvstore
from distrun_runtime.data import SplitSampler
from distrun_runtime.errors import KVError
from distrun_runtime.trainer import Parameter, Trainer, fit

X = torch.linspace(-1, 1, 96).reshape(24, 4)
Y = (X.sum(1, keepdim=True) * 3).sin()
SGD = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.01}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def backward(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    ((net(x) - y) ** 2).sum().backward()


def reference(steps: int = 6, size: int = 12) -> list[torch.Tensor]:
    """Return the weights after steps of torch's own optimizer; its momentum is ours for a constant learning rate."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        part = slice(number % 2 * size, number % 2 * size + size)
        (((net(X[part]) - Y[part]) ** 2).sum() / size).backward()
        optimizer.step()
    return list(net.parameters())


def agree(net: nn.Module, expected: list[torch.Tensor]) -> None:
    for got, one in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-6)  # float32 and another order of additions


def train(trainer: Trainer, nets: list[nn.Module], steps: int = 6, size: int = 12) -> None:
    for number in range(steps):
        trainer.zero_grad()
        each = size // len(nets)
        for device, net in enumerate(nets):
            start = number % 2 * size + device * each
            backward(net, X[start : start + each], Y[start : start + each])
        trainer.step(size)


def refused(act, said: str, error: type[Exception] = KVError) -> None:
    found = "nothing"
    try:
        act()
    except error as err:
        found = str(err)
    assert said in found, found


# --- the cases


def the_two_calls_of_the_tutorials() -> None:
    net, kv = network(), kvstore.create("local")
    trainer = Trainer(
        net.parameters(),
        optimizer="sgd",
        optimizer_params={"learning_rate": 0.05, "wd": 0.01, "momentum": 0.9, "multi_precision": True},
        kvstore=kv,
        update_on_kvstore=True,
    )
    train(trainer, [net])
    agree(net, reference())
    with kvstore.create("local") as store:
        trainer = Trainer(dict(network().named_parameters()), "adam", {"learning_rate": 0.001}, kvstore=store)
        assert [one.name for one in trainer.params] == ["0.bias", "0.weight", "2.bias", "2.weight"]


def steps_are_those_of_torchs_sgd() -> None:
    for params in (lambda net: net, lambda net: net.named_parameters(), lambda net: list(net.parameters())):
        net = network()
        train(Trainer(params(net), "sgd", SGD, kvstore=None), [net])
        agree(net, reference())


def weights_are_written_in_place_without_a_copy() -> None:
    for kind in (None, "local"):
        net = network()
        places = [one.data_ptr() for one in net.parameters()]
        trainer = Trainer(net.parameters(), "sgd", SGD, kvstore=kind, update_on_kvstore=kind and True)
        train(trainer, [net])
        assert [one.data_ptr() for one in net.parameters()] == places
        for parameter, tensor in zip(trainer.params, net.parameters(), strict=True):
            assert parameter.replicas[0].weight().__array_interface__["data"][0] == tensor.data_ptr()
            assert parameter.replicas[0].gradient().__array_interface__["data"][0] == tensor.grad.data_ptr()


def any_number_of_replicas_trains_to_the_same_weights() -> None:
    for count in (1, 2, 4):
        for update in (True, False):
            nets = [network(seed) for seed in range(count)]  # the first one's weights are taken
            params = list(zip(*(net.parameters() for net in nets), strict=True))
            with kvstore.create("device") as kv:
                train(Trainer([list(one) for one in params], "sgd", SGD, kvstore=kv, update_on_kvstore=update), nets)
            for net in nets:
                agree(net, reference())


def n_workers_train_as_one_with_n_times_the_batch() -> None:
    for update in (True, False):
        nets = [network(rank) for rank in range(2)]

        def script(kv, nets=nets, update=update):
            net = nets[kv.rank]
            trainer = Trainer(net.named_parameters(), "sgd", SGD, kvstore=kv, update_on_kvstore=update)
            for number in range(6):
                trainer.zero_grad()
                start = number % 2 * 12 + kv.rank * 6
                backward(net, X[start : start + 6], Y[start : start + 6])
                trainer.step(6 * kv.num_workers)
            return net

        with Cluster(2, over="inproc") as job:
            for net in job.run(script):
                agree(net, reference())


def bfloat16_and_float16_weights_train_with_masters() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for kind in (None, "local"):
            weight = nn.Parameter(torch.ones(4, dtype=dtype))
            options = {"learning_rate": 1e-3, "multi_precision": True}
            with kvstore.create("local") as kv:
                trainer = Trainer([weight], "sgd", options, kvstore=kind and kv)
                for _ in range(20):
                    weight.grad = torch.ones(4, dtype=dtype)
                    trainer.step(1)
            assert torch.equal(weight.detach(), torch.full((4,), 0.98).to(dtype)), weight


def sparse_gradients_of_an_embedding_travel_as_rows() -> None:
    ids = torch.tensor([[1, 3], [3, 2]])

    def script(kv):
        net = nn.Embedding(5, 2, sparse=True)
        trainer = Trainer(net, "sgd", {"learning_rate": 1.0}, kvstore=kv)
        assert trainer.params[0].grad_stype == "row_sparse"
        before = net.weight.detach().clone()
        net(ids[kv.rank]).sum().backward()
        assert net.weight.grad.is_sparse
        trainer.step(1)
        return (before - net.weight.detach())[:, 0]

    with Cluster(2, over="inproc") as job:
        for change in job.run(script):
            torch.testing.assert_close(change, torch.tensor([0.0, 1, 1, 2, 0]))


def sparse_gradients_work_alone_and_on_replicas() -> None:
    for count in (1, 2):
        nets = [nn.Embedding(5, 2, sparse=True) for _ in range(count)]
        before = nets[0].weight.detach().clone()
        trainer = Trainer([[net.weight for net in nets]], "sgd", {"learning_rate": 1.0}, kvstore="local")
        assert trainer.update_on_kvstore is (count == 2)
        for net in nets:
            net(torch.tensor([1, 3, 3])).sum().backward()
        trainer.step(count)
        for net in nets:
            torch.testing.assert_close((before - net.weight.detach())[:, 0], torch.tensor([0.0, 1, 0, 2, 0]))


def a_parameter_without_a_gradient_is_named() -> None:
    used, unused = nn.Linear(4, 1), nn.Linear(4, 1)
    both = nn.ModuleDict({"used": used, "unused": unused})
    before = used.weight.detach().clone()
    trainer = Trainer(both.named_parameters(), "sgd", SGD, kvstore=None)
    backward(used, X, Y)
    refused(lambda: trainer.step(24), "parameter 'unused.weight' has no new gradient")
    assert torch.equal(used.weight, before)
    trainer.step(24, ignore_stale_grad=True)
    assert not torch.equal(used.weight, before)


def a_gradient_that_was_used_is_not_used_again() -> None:
    net = network()
    trainer = Trainer(net.named_parameters(), "sgd", SGD, kvstore=None)
    backward(net, X, Y)
    trainer.step(24)
    refused(lambda: trainer.step(24), "no new gradient since the last step")
    backward(net, X, Y)  # adds to what is there
    trainer.step(24)


def a_frozen_parameter_is_left_alone() -> None:
    net = network()
    net[0].requires_grad_(False)
    before = [one.detach().clone() for one in net.parameters()]
    with kvstore.create("local") as kv:
        train(Trainer(net.named_parameters(), "sgd", SGD, kvstore=kv), [net])
    same = [torch.equal(one, old) for one, old in zip(net.parameters(), before, strict=True)]
    assert same == [True, True, False, False]


def a_tied_weight_is_updated_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    before = net[0].weight.detach().clone()
    params = list(net.named_parameters(remove_duplicate=False))
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=None)
    assert [one.name for one in trainer.params] == ["0.weight", "0.bias", "1.bias"]
    net(X).sum().backward()
    trainer.step(1)
    torch.testing.assert_close(net[0].weight.detach(), before - net[0].weight.grad)


def gradients_are_clipped_between_sum_and_update() -> None:
    nets = [network(), network()]
    params = [list(pair) for pair in zip(nets[0].parameters(), nets[1].parameters(), strict=True)]
    trainer = Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore="device", update_on_kvstore=False)
    before = [one.detach().clone() for one in nets[0].parameters()]
    for net in nets:
        backward(net, X, Y)
    trainer.allreduce_grads()
    for net in nets:
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    trainer.update(1)
    for net in nets:
        moved = torch.cat([(old - one.detach()).flatten() for old, one in zip(before, net.parameters(), strict=True)])
        torch.testing.assert_close(moved.norm(), torch.tensor(0.5), rtol=1e-4, atol=1e-5)


def strided_weights_are_trained_too() -> None:
    for kind in (None, "local"):
        weight = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        assert not weight.is_contiguous()
        expected = weight.detach() - 1
        with kvstore.create("local") as kv:
            trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=kind and kv)
            weight.sum().backward()
            trainer.step(1)
        torch.testing.assert_close(weight.detach(), expected)


def states_go_on_and_gradients_do_not_hinder_copies() -> None:
    net = network()
    trainer = Trainer(net.named_parameters(), "adam", {"learning_rate": 0.01}, kvstore=None)
    train(trainer, [net], 2)
    other = copy.deepcopy(net)
    with tempfile.TemporaryDirectory() as folder:
        torch.save(net, Path(folder) / "net")
        trainer.save_states(Path(folder) / "states")
        again = Trainer(other.named_parameters(), "adam", kvstore=None)
        again.load_states(Path(folder) / "states")
    train(trainer, [net], 2)
    train(again, [other], 2)
    agree(other, list(net.parameters()))


def set_data_takes_a_tensor() -> None:
    weight = nn.Parameter(torch.zeros(3))
    one = Parameter(weight, name="w")
    Trainer([one], "sgd", kvstore=None)
    one.set_data(torch.arange(3.0))
    assert torch.equal(weight.detach(), torch.arange(3.0))
    one.set_data(torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(weight.detach(), torch.ones(3))


def fit_takes_a_data_loader_with_a_part_for_each_worker() -> None:
    nets = [network(rank) for rank in range(2)]

    def script(kv):
        net = nets[kv.rank]
        sampler = SplitSampler(len(X), kv.num_workers, kv.rank, shuffle=False)
        data = DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)
        fit(lambda batch: backward(net, *batch), net.named_parameters(), data, kv, "sgd", SGD, epochs=2)
        return net

    single = network()
    order = [index for step in range(3) for start in (0, 12) for index in range(start + step * 4, start + step * 4 + 4)]
    whole = DataLoader(TensorDataset(X[order], Y[order]), batch_size=8)
    fit(lambda batch: backward(single, *batch), single.named_parameters(), whole, None, "sgd", SGD, epochs=2)
    with Cluster(2, over="inproc") as job:
        for net in job.run(script):
            agree(net, list(single.parameters()))


def a_parameter_without_memory_is_named() -> None:
    try:
        Trainer([("w", torch.zeros(2, device="meta", requires_grad=True))], "sgd")
    except KVError as err:
        message = str(err)
    else:
        message = ""
    assert "parameter 'w' is on the device 'meta': it has no memory" in message


def a_tensor_that_cannot_be_trained_is_named() -> None:
    for tensor, said in (
        (torch.zeros(2).to(torch.float8_e4m3fn), "parameter 'w' cannot be read as an array: "),
        (torch.eye(2).to_sparse(), "parameter 'w' cannot be read as an array: "),
        (nn.LazyLinear(3).weight, "parameter 'w' cannot be read as an array: Attempted to use an uninitialized"),
        (torch.zeros(2, requires_grad=True) * 2, "parameter 'w' is computed from other tensors"),
    ):
        refused(lambda tensor=tensor: Trainer([("w", tensor)], "sgd", kvstore=None), said)


def weights_that_share_their_storage_are_refused() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight.data = net[0].weight.data
    refused(lambda: Trainer(net, "sgd", kvstore=None), "parameters '0.weight' and '1.weight' are in the same memory")


def a_graph_of_before_a_step_is_refused_by_torch_as_after_its_own_optimizers() -> None:
    for kind in (None, "local"):
        net = network()
        trainer = Trainer(net, "sgd", SGD, kvstore=kind, update_on_kvstore=kind and True)
        backward(net, X, Y)
        loss = net(X).sum()
        trainer.step(24)
        refused(loss.backward, "modified by an inplace operation", RuntimeError)


CASES = [
    case for name, case in list(globals().items()) if callable(case) and case.__module__ == __name__ and "_" in name
]


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="raise")
    result = {}
    for case in CASES:
        try:
            case()
            result[case.__name__] = ""
        except BaseException:
            result[case.__name__] = traceback.format_exc()
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
