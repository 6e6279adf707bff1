"""What a trainer does with torch, run by an interpreter that has it: prints what became of each case, as JSON."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from cases import run_cases
from cluster import Cluster
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distrun_runtime import kvstore
from distrun_runtime.data import SplitSampler
from distrun_runtime.errors import KVError
from distrun_runtime.trainer import Parameter, Trainer, fit, trainer

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


def what_is_called_on_gpus_has_these_names() -> None:
    assert callable(torch.cuda.Stream.wait_stream)
    assert callable(torch.cuda.Stream.__eq__)
    assert callable(torch.Tensor.record_stream)
    assert str(torch.ones(1).dtype) == "torch.float32"


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


# --- weights that were changed outside of steps


def inplace(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for one in net.parameters():
            one.fill_(value)


def loading(net: nn.Module, value: float) -> None:
    net.load_state_dict({name: torch.full_like(one, value) for name, one in net.state_dict().items()})


def memory(net: nn.Module, value: float) -> None:
    for one in net.parameters():
        one.data = torch.full_like(one, value)


CHANGES = (inplace, loading, memory)
trainer.GROUP_BYTES = 1  # Every parameter is a group.
PLAIN = {"learning_rate": 1.0}


def summed(net: nn.Module, trainer: Trainer) -> bool:
    """Make a step whose gradient is 1 for every element and worker."""
    trainer.zero_grad()
    sum(one.sum() for one in net.parameters()).backward()
    return trainer.step(2)


def jobs(script, workers: int = 2, **options):
    """Yield what each worker returns from script(kv, net, trainer), for each of those who may update."""
    for update in (True, False):

        def work(kv, update=update):
            net = nn.Linear(3, 2)
            trainer = Trainer(net, "sgd", PLAIN, kvstore=kv, update_on_kvstore=update, **options)
            return script(kv, net, trainer)

        with Cluster(workers, over="inproc") as job:
            yield job.run(work)


def said(act) -> str:
    try:
        act()
    except KVError as err:
        return str(err)
    return ""


def weights_that_all_workers_changed_are_those_of_rank_0() -> None:
    for change in CHANGES:
        for alike in (True, False):

            def script(kv, net, trainer, change=change, alike=alike):
                summed(net, trainer)
                change(net, 5.0 if alike else 5.0 + kv.rank)
                assert summed(net, trainer)
                # The sum of two gradients of 1, divided by 2.
                assert all((one == 4.0).all() for one in net.parameters()), list(net.parameters())
                assert summed(net, trainer)
                return [float(one.detach().flatten()[0]) for one in net.parameters()]

            for found in jobs(script):
                assert found == [[3.0, 3.0]] * 2, (change, alike, found)


def weights_that_one_worker_changed_are_refused_by_name_on_all() -> None:
    for change in CHANGES:
        for who in (0, 1):

            def script(kv, net, trainer, change=change, who=who):
                summed(net, trainer)
                if kv.rank == who:
                    change(net, 5.0)
                before = [one.detach().clone() for one in net.parameters()]
                texts = [said(lambda: summed(net, trainer)) for _ in range(2)]
                assert all(torch.equal(one, old) for one, old in zip(net.parameters(), before, strict=True))
                trainer.assign()
                assert summed(net, trainer)
                return texts, [one.detach().clone() for one in net.parameters()]

            for (first, weights), (second, others) in jobs(script):
                assert first == second
                assert first[0] == first[1], "it is refused as long as the weights differ"
                expected = "parameter 'weight' on worker-%d and not on worker-%d" % (who, 1 - who)
                assert expected in first[0], first
                assert "parameter 'bias'" in first[0]
                assert "call trainer.assign() on all workers" in first[0]
                assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
                assert who or all((one == 4.0).all() for one in weights)


def weights_that_are_written_back_are_not_changed() -> None:
    """As an evaluation with averaged weights on rank 0 does it."""

    def script(kv, net, trainer):
        summed(net, trainer)
        if kv.rank == 0:
            kept = {name: one.clone() for name, one in net.state_dict().items()}
            inplace(net, 9.0)
            net.load_state_dict(kept)
            net.share_memory()
        assert summed(net, trainer)
        return [one.detach().clone() for one in net.parameters()]

    for first, second in jobs(script):
        assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def a_frozen_weight_that_was_changed_is_taken_too() -> None:
    def script(kv, net, trainer):
        net.bias.requires_grad_(False)
        summed(net, trainer)
        with torch.no_grad():
            net.bias.fill_(3.0 + kv.rank)
        assert summed(net, trainer)
        return float(net.bias[0])

    for found in jobs(script):
        assert found == [3.0, 3.0]


def a_change_while_another_worker_has_joined_is_refused() -> None:
    def script(kv):
        net = nn.Linear(3, 2)
        trainer = Trainer(net, "sgd", PLAIN, kvstore=kv, update_on_kvstore=True)
        if kv.rank == 0:
            trainer.join()
            return ""
        inplace(net, 5.0)
        text = said(lambda: summed(net, trainer))
        assert "join would undo it" in said(trainer.join)
        trainer.params[0].remember(), trainer.params[1].remember()
        trainer.join()
        return text

    with Cluster(2, over="inproc") as job:
        text = job.run(script)[1]
    assert "parameter 'weight' on worker-1; parameter 'bias' on worker-1; worker-0 takes no part in steps now" in text


def where_trainers_update_a_joined_worker_hears_of_changes_too() -> None:
    def script(kv):
        net = nn.Linear(3, 2)
        trainer = Trainer(net, "sgd", PLAIN, kvstore=kv, update_on_kvstore=False)
        if kv.rank == 0:
            return said(trainer.join)
        inplace(net, 5.0)
        return said(lambda: summed(net, trainer))

    with Cluster(2, over="inproc") as job:
        first, second = job.run(script)
    assert "parameter 'weight' on worker-1 and not on worker-0" in first
    assert first == second


def without_rounds_a_change_is_refused_by_the_worker_that_made_it() -> None:
    def script(kv):
        net = nn.Linear(3, 2)
        trainer = Trainer(net, "sgd", PLAIN, kvstore=kv)
        if kv.rank:
            inplace(net, 5.0)
        text = said(lambda: summed(net, trainer))
        trainer.assign()
        assert summed(net, trainer)
        return text

    with Cluster(2, over="inproc") as job:
        first, second = job.run(script, "dist_async")
    assert first == ""
    assert "weights were changed outside of steps: parameter 'weight', parameter 'bias'. The store updates" in second


def a_change_is_not_left_out_of_saved_states() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def script(kv, net, trainer):
            name = Path(folder) / ("states" if trainer.update_on_kvstore else "states-%d" % kv.rank)
            if kv.rank or not trainer.update_on_kvstore:
                inplace(net, 5.0)
            if trainer.update_on_kvstore and kv.rank:
                text = said(lambda: trainer.save_states(name))
                assert "parameter 'weight', parameter 'bias'. save_states would leave it out" in text, text
            if trainer.update_on_kvstore:
                kv.barrier()
                trainer.assign()
            trainer.save_states(name)
            trainer.load_states(name)
            assert summed(net, trainer)

        for _ in jobs(script):
            pass


def a_change_of_the_shape_or_type_needs_another_trainer() -> None:
    net = network()
    trainer = Trainer(net, "sgd", PLAIN, kvstore=None)
    backward(net, X, Y)
    net[0].weight.grad = None
    net[0].weight.requires_grad_(False)  # another gradient would be noticed first
    net[0].weight.data = torch.zeros(2, 2)
    refused(lambda: trainer.step(24), "parameter '0.weight' has shape (2, 2) and dtype float32 now, and had (8, 4)")


def a_change_reaches_a_local_store() -> None:
    for count in (1, 2):
        nets = [nn.Linear(3, 2) for _ in range(count)]
        params = [list(copies) for copies in zip(*(net.parameters() for net in nets), strict=True)]
        for update in (True, False):
            with kvstore.create("local") as kv, Trainer(params, "sgd", PLAIN, kv, update_on_kvstore=update) as trainer:
                for net in nets:
                    inplace(net, 5.0)
                    net.zero_grad()
                    sum(one.sum() for one in net.parameters()).backward()
                trainer.step(count)
                assert all((one == 4.0).all() for net in nets for one in net.parameters()), (count, update)


def a_change_on_some_devices_only_is_refused() -> None:
    for update in (True, False):
        nets = [nn.Linear(3, 2) for _ in range(2)]
        params = [list(copies) for copies in zip(*(net.parameters() for net in nets), strict=True)]
        with kvstore.create("local") as kv, Trainer(params, "sgd", PLAIN, kv, update_on_kvstore=update) as trainer:
            inplace(nets[1], 5.0)
            for net in nets:
                net.zero_grad()
                sum(one.sum() for one in net.parameters()).backward()
            refused(lambda: trainer.step(2), "parameter '0' was changed outside of steps on 1 of its 2 devices only")
            inplace(nets[0], 7.0)
            trainer.step(2)
            # Those of the first device are taken, as after `assign`.
            assert all((one == 6.0).all() for net in nets for one in net.parameters()), update


def a_change_of_16_bit_weights_reaches_their_masters() -> None:
    """Elements that were not changed keep what their masters have beyond 16 bits."""
    for dtype in (torch.bfloat16, torch.float16):
        for kind in (None, "local"):
            weight = nn.Parameter(torch.ones(4, dtype=dtype))
            options = {"learning_rate": 1e-4, "multi_precision": True}
            with kvstore.create("local") as kv:
                update = kind and False
                trainer = Trainer([weight], "sgd", options, kvstore=kind and kv, update_on_kvstore=update)
                for number in range(200):
                    if number == 100:
                        with torch.no_grad():
                            weight[2:] = 2.0
                    weight.grad = torch.ones(4, dtype=dtype)
                    trainer.step(1)
            # 1 - 200 * 1e-4, of which each single step is less than 16 bits can show; and 2 - 100 * 1e-4.
            expected = torch.tensor([0.98, 0.98, 1.99, 1.99]).to(dtype)
            assert torch.equal(weight.detach(), expected), (weight, expected)


def a_changed_weight_of_rows_is_taken_in_one_process() -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    table = Parameter(weight, name="table", stype="row_sparse")
    with kvstore.create("local") as kv, Trainer([table], "sgd", PLAIN, kvstore=kv) as trainer:
        with torch.no_grad():
            weight.fill_(5.0)
        trainer.pull_rows(table, [1])
        assert (weight == 5.0).all()
        with torch.no_grad():
            weight.fill_(7.0)
        table.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2))
        trainer.step(1)
        trainer.pull_rows(table)
        assert weight[:, 0].tolist() == [7.0, 6.0, 7.0, 7.0]


def a_single_number_of_16_bits_has_a_master_too() -> None:
    weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float16))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1e-4, "multi_precision": True}, kvstore=None)
    for number in range(100):
        if number == 50:
            with torch.no_grad():
                weight.fill_(2.0)
        weight.grad = torch.ones_like(weight)
        trainer.step(1)
    assert weight == torch.tensor(1.995, dtype=torch.float16), weight


def rows_of_a_weight_that_was_changed_are_not_mixed_with_those_of_the_store() -> None:
    def script(kv):
        table = Parameter(nn.Parameter(torch.ones(4, 2)), name="table", stype="row_sparse")
        trainer = Trainer([table], "sgd", PLAIN, kvstore=kv)
        trainer.pull_rows(table, [1, 2])
        with torch.no_grad():
            table.data.fill_(5.0 + kv.rank)
        text = said(lambda: trainer.pull_rows(table, [1]))
        assert "weights were changed outside of steps: parameter 'table'. pull_rows would undo a part of it" in text
        ids = torch.tensor([[1, 1]])
        table.grad = torch.sparse_coo_tensor(ids, torch.ones(2, 2), (4, 2))
        trainer.step(1)
        trainer.pull_rows(table)
        assert table.data[:, 0].tolist() == [5.0, 1.0, 5.0, 5.0]
        if kv.rank:
            with torch.no_grad():
                table.data.fill_(7.0)
        table.grad = torch.sparse_coo_tensor(ids, torch.ones(2, 2), (4, 2))
        # Only row-sparse weights: who changed nothing waits for nobody in its step, and hears of it by the next rows.
        return said(lambda: (trainer.step(1), trainer.pull_rows(table, [1])))

    with Cluster(2, over="inproc") as job:
        first, second = job.run(script)
    assert "parameter 'table' on worker-1 and not on worker-0" in first
    assert first == second


# --- gradients of a mean


def a_mean_loss_takes_step_without_an_argument() -> None:
    for workers in (1, 2):
        for devices in (1, 2):
            for how in ("store", "trainer", "halves"):
                nets = [[network(10 * rank + device) for device in range(devices)] for rank in range(workers)]
                nets[0][0] = network()

                def script(kv, nets=nets, workers=workers, devices=devices, how=how):
                    mine = nets[kv.rank]
                    params = [list(copies) for copies in zip(*(net.parameters() for net in mine), strict=True)]
                    trainer = Trainer(params, "sgd", SGD, kvstore=kv, update_on_kvstore=how == "store")
                    each = 12 // (workers * devices)
                    for number in range(6):
                        trainer.zero_grad()
                        for device, net in enumerate(mine):
                            start = number % 2 * 12 + (kv.rank * devices + device) * each
                            part = slice(start, start + each)
                            nn.functional.mse_loss(net(X[part]), Y[part]).backward()
                        if how == "halves":
                            trainer.allreduce_grads()
                            trainer.update()
                        else:
                            trainer.step()

                with Cluster(workers, over="inproc") as job:
                    job.run(script)
                for net in (net for mine in nets for net in mine):
                    agree(net, reference())


def overlap_trains_to_the_same_weights() -> None:
    for workers in (1, 2):
        for devices in (1, 2):
            for update in (True, False):
                nets = [[network(10 * rank + device) for device in range(devices)] for rank in range(workers)]
                nets[0][0] = network()

                def script(kv, nets=nets, workers=workers, devices=devices, update=update):
                    mine = nets[kv.rank]
                    params = [list(copies) for copies in zip(*(net.parameters() for net in mine), strict=True)]
                    trainer = Trainer(params, "sgd", SGD, kvstore=kv, update_on_kvstore=update, overlap=True)
                    each = 12 // (workers * devices)
                    for number in range(6):
                        trainer.zero_grad()
                        for device, net in enumerate(mine):
                            start = number % 2 * 12 + (kv.rank * devices + device) * each
                            part = slice(start, start + each)
                            nn.functional.mse_loss(net(X[part]), Y[part]).backward()
                        kv.barrier()
                        # Every gradient is there already: servers have the round, and no weight has changed.
                        assert max(facts["rounds"] for facts in kv.stats()) >= number + 1
                        kv.barrier()
                        trainer.step()

                with Cluster(workers, over="inproc") as job:
                    job.run(script)
                for net in (net for mine in nets for net in mine):
                    agree(net, reference())


def overlap_hears_of_weights_that_were_changed_before_backward() -> None:
    for change in CHANGES:

        def script(kv, net, trainer, change=change):
            def step():
                trainer.zero_grad()
                sum(one.sum() for one in net.parameters()).backward()
                return trainer.step()

            step()
            change(net, 5.0)
            assert step()
            taken = [one.detach().clone() for one in net.parameters()]
            if kv.rank == 1:
                change(net, 7.0)
            text = said(step)
            trainer.assign()
            assert step()
            return text, taken, [one.detach().clone() for one in net.parameters()]

        for (first, taken, weights), (second, _, others) in jobs(script, overlap=True):
            assert first == second
            assert "parameter 'weight' on worker-1 and not on worker-0" in first, first
            assert all((one == 4.0).all() for one in taken), taken
            assert all((one == 3.0).all() for one in weights), weights
            assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))


def overlap_refuses_weights_that_were_changed_after_backward() -> None:
    def script(kv, net, trainer):
        sum(one.sum() for one in net.parameters()).backward()
        inplace(net, 5.0)
        return said(trainer.step)

    found = list(jobs(script, overlap=True))
    assert all("weights were written after their gradients had been sent: 'weight'" in text for text in found[0]), found


def a_mean_loss_in_one_process_is_divided_by_its_devices() -> None:
    for kind, devices in ((None, 1), ("local", 1), ("local", 2), ("device", 2)):
        nets = [network() for _ in range(devices)]
        params = [list(copies) for copies in zip(*(net.parameters() for net in nets), strict=True)]
        trainer = Trainer(params, "sgd", SGD, kvstore=kind)
        for number in range(6):
            trainer.zero_grad()
            for device, net in enumerate(nets):
                start = number % 2 * 12 + device * 12 // devices
                part = slice(start, start + 12 // devices)
                nn.functional.mse_loss(net(X[part]), Y[part]).backward()
            trainer.step()
        for net in nets:
            agree(net, reference())


def in_dist_async_each_worker_is_an_update_of_its_own() -> None:
    def script(kv):
        weight = nn.Parameter(torch.zeros(2))
        trainer = Trainer([weight], "sgd", PLAIN, kvstore=kv)
        weight.sum().backward()
        trainer.step()
        kv.barrier()
        out = np.zeros(2, np.float32)
        kv.pull(0, out=out)
        return float(out[0])

    with Cluster(2, over="inproc") as job:
        assert job.run(script, "dist_async") == [-2.0, -2.0]


# --- buffers


class Noted(nn.Module):
    """A linear layer and buffers of all kinds."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(start)
        self.norm.num_batches_tracked.fill_(int(start))
        self.register_buffer("mask", torch.tensor([start > 1, False]))
        self.register_buffer("short", torch.full((3,), start, dtype=torch.bfloat16))
        self.register_buffer("places", torch.full((2,), int(start) * 100_000, dtype=torch.int32))
        self.register_buffer("strided", torch.full((2, 3), start).t())
        self.register_buffer("cache", torch.full((2,), start), persistent=False)


def held(net: nn.Module) -> list[float]:
    """Return a number of each buffer; `cache` last."""
    names = ("norm.running_mean", "norm.num_batches_tracked", "mask", "short", "places", "strided", "cache")
    found = dict(net.named_buffers())
    return [float(found[name].flatten()[0]) for name in names]


FIRST = [1.0, 1.0, 0.0, 1.0, 100_000.0, 1.0]


def buffers_are_rank_0s_when_a_trainer_is_made_of_a_module() -> None:
    for type_name in ("dist_sync", "dist_async"):
        for update in (True, False)[: 1 if "async" in type_name else 2]:

            def script(kv, update=update):
                net = Noted(1.0 + kv.rank)
                # fp16 both ways, for all that is not told otherwise: buffers come back to the bit.
                kv.set_gradient_compression({"type": "fp16", "two_way": True, "min_size": 0})
                Trainer(net, "sgd", PLAIN, kvstore=kv, update_on_kvstore=update)
                return held(net)

            with Cluster(2, over="inproc") as job:
                assert job.run(script, type_name) == [[*FIRST, 1.0], [*FIRST, 2.0]]


def buffers_are_saved_and_loaded_with_the_states() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for update in (True, False):
            name = Path(folder) / str(update)

            def script(kv, update=update, name=name):
                net = Noted(1.0)
                trainer = Trainer(net, "sgd", PLAIN, kvstore=kv, update_on_kvstore=update)
                net.norm.running_mean.fill_(3.0 + kv.rank)
                net.norm.num_batches_tracked.fill_(17 + kv.rank)
                trainer.save_states(name if update else "%s-%d" % (name, kv.rank))
                assert held(net)[:2] == [3.0 + kv.rank, 17.0 + kv.rank], "a save changed them"
                net.norm.reset_running_stats()
                kv.barrier()
                trainer.load_states(name if update else "%s-0" % name)
                return held(net)[:6]

            with Cluster(2, over="inproc") as job:
                assert job.run(script) == [[3.0, 17.0, *FIRST[2:]]] * 2
        for kind in (None, "local"):
            net, other = Noted(1.0), Noted(2.0)
            Trainer(net, "sgd", PLAIN, kvstore=kind, update_on_kvstore=kind and True).save_states(
                Path(folder) / ("of-%s" % kind)
            )
            again = Trainer(other, "sgd", PLAIN, kvstore=kind, update_on_kvstore=kind and True)
            again.load_states(Path(folder) / ("of-%s" % kind))
            assert held(other) == [*FIRST, 2.0]


def states_of_other_buffers_are_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for kind in (None, "local"):
            name = Path(folder) / ("of-%s" % kind)
            options = {"kvstore": kind, "update_on_kvstore": kind and True}
            net, plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Sequential(nn.Linear(2, 2))
            Trainer(net, "sgd", PLAIN, **options).save_states(name)
            mean = net[1].running_mean.clone()
            words = (
                "has the buffers '1.running_mean' ((2,), float32), "
                if kind is None
                else "make the trainer of that module"
            )
            trainer = Trainer(net.named_parameters(), "sgd", PLAIN, **options)
            refused(lambda trainer=trainer, name=name: trainer.load_states(name), words)
            Trainer(net.named_parameters(), "sgd", PLAIN, **options).save_states(str(name) + "-plain")
            trainer = Trainer(net, "sgd", PLAIN, **options)
            words = "has the buffers none, the trainer '1.running_mean'" if kind is None else "buffer '1.running_mean'"
            refused(lambda trainer=trainer, name=name: trainer.load_states(str(name) + "-plain"), words)
            assert torch.equal(net[1].running_mean, mean)
            assert not Trainer(plain, "sgd", PLAIN, **options)._buffers


def buffers_are_averaged_on_request() -> None:
    for type_name in ("dist_sync", "dist_async"):

        def script(kv):
            net = Noted(1.0)
            trainer = Trainer(net, "sgd", PLAIN, kvstore=kv)
            for number in range(2):
                net.norm.running_mean.fill_(float(number + 2 * kv.rank))
                net.short.fill_(float(3 + kv.rank))
                net.norm.num_batches_tracked.fill_(5 + kv.rank)
                trainer.average_buffers()
                seen = held(net)
                assert seen[0] == number + 1.0
            trainer.close()
            return seen[:4]

        with Cluster(2, over="inproc") as job:
            assert job.run(script, type_name) == [[2.0, 5.0, 0.0, 3.5], [2.0, 6.0, 0.0, 3.5]]
    net = Noted(1.0)
    Trainer(net, "sgd", PLAIN, kvstore=None).average_buffers()
    Trainer(net, "sgd", PLAIN, kvstore="local", update_on_kvstore=True).average_buffers()
    assert held(net) == [*FIRST, 1.0]


def a_worker_that_has_joined_cannot_average() -> None:
    def script(kv):
        trainer = Trainer(Noted(1.0), "sgd", PLAIN, kvstore=kv)
        return said(trainer.average_buffers if kv.rank else trainer.join)

    with Cluster(2, over="inproc") as job:
        found = job.run(script)
    assert found[1].startswith("average_buffers: all workers call it together: barrier: "), found
    assert "worker-0 calls join" in found[1], found


def assign_gives_rank_0s_buffers_too() -> None:
    def script(kv):
        net = Noted(1.0)
        trainer = Trainer(net, "sgd", PLAIN, kvstore=kv)
        net.norm.running_mean.fill_(7.0 + kv.rank)
        trainer.assign(["layer.weight"])
        assert held(net)[0] == 7.0 + kv.rank
        trainer.assign()
        return held(net)[0]

    with Cluster(2, over="inproc") as job:
        assert job.run(script) == [7.0, 7.0]


def a_module_may_put_another_tensor_in_a_buffers_place() -> None:
    with tempfile.TemporaryDirectory() as folder:
        net = Noted(1.0)
        trainer = Trainer(net, "sgd", PLAIN, kvstore=None)
        net.norm.running_mean = torch.full((2,), 8.0)
        trainer.save_states(Path(folder) / "s")
        net.norm.running_mean = torch.zeros(2)
        trainer.load_states(Path(folder) / "s")
        assert held(net)[0] == 8.0
        net.norm.running_mean = None
        refused(lambda: trainer.save_states(Path(folder) / "s"), "has no buffer 'norm.running_mean' any more")


def buffers_of_any_type_reach_all_workers_exactly() -> None:
    def script(kv):
        net = nn.Linear(2, 2)
        net.register_buffer("complex", torch.full((3, 1), complex(kv.rank + 1, -2), dtype=torch.complex64))
        net.register_buffer("large", torch.tensor([2**62 + kv.rank + 1, -5, 0]))
        net.register_buffer("count", torch.tensor(7 + kv.rank))
        net.register_buffer("bytes", torch.tensor([kv.rank, 255], dtype=torch.uint8))
        Trainer(net, "sgd", kvstore=kv, update_on_kvstore=True)
        return net.complex.tolist(), net.large.tolist(), net.count.tolist(), net.bytes.tolist()

    with Cluster(2, over="inproc") as job:
        assert job.run(script) == [([[1 - 2j]] * 3, [2**62 + 1, -5, 0], 7, [0, 255])] * 2


def a_buffer_that_numpy_cannot_read_is_named() -> None:
    net = nn.Linear(2, 2)
    net.register_buffer("odd", torch.zeros(2).to(torch.float8_e5m2))
    words = "buffer 'odd' cannot be read as an array"
    refused(lambda: Trainer(net, "sgd", kvstore="local", update_on_kvstore=True), words)
    Trainer(net, "sgd", kvstore=None)  # nothing is stored


CASES = [
    case for name, case in list(globals().items()) if callable(case) and case.__module__ == __name__ and "_" in name
]


def main() -> None:
    torch.set_num_threads(1)
    np.seterr(all="raise")
    run_cases(CASES)


if __name__ == "__main__":
    main()
