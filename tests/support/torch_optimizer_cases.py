"""What DistributedOptimizer does beside training as DDP does, run by an interpreter that has torch: see `cases`."""

from __future__ import annotations

import copy
import io
import sys
import weakref
from collections import Counter
from contextlib import suppress

import torch
from cases import run_cases
from cluster import Cluster
from torch import nn
from torch.utils.checkpoint import checkpoint

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError, PeerLost
from distrun_runtime.torch import DistributedOptimizer


def network(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def refused(act) -> str:
    try:
        act()
    except (KVError, PeerLost) as err:
        return str(err)
    raise AssertionError("nothing was refused")


def run(script, workers: int = 2, **changes):
    with Cluster(workers, over="inproc", **changes) as job:
        return job.run(script)


# --- the cases


def what_does_not_fit_is_named_before_the_first_step() -> None:
    net = network()
    other, frozen = network(), network().requires_grad_(False)
    local = kvstore.create("local")

    def made(optimizer=None, model=net, **options) -> str:
        given = sgd(net) if optimizer is None else optimizer
        text = refused(lambda: DistributedOptimizer(given, model, kvstore=local, **options))
        assert type(given) is not DistributedOptimizer
        return text

    assert "one of torch.optim, not str" in made("sgd")
    assert "is one already" in made(DistributedOptimizer(sgd(net), net, kvstore=local))
    optimizer = sgd(net)
    assert "a torch.nn.Module, not list" in made(optimizer, list(net.parameters()))
    assert type(optimizer) is torch.optim.SGD
    assert "parameter 1 of the optimizer's group 0, of shape (2,), is not the model's" in made(
        torch.optim.SGD([net[0].weight, torch.zeros(2)], lr=0.1)
    )
    assert "parameter 0 of the optimizer's group 1" in made(
        torch.optim.SGD([{"params": net.parameters()}, {"params": other.parameters()}], lr=0.1)
    )
    assert "has no parameter that requires a gradient" in made(sgd(frozen), frozen)
    assert "overlap is True or False, not 1" in made(overlap=1)
    assert "buffers is one of rank0, mean, own, not 'men'" in made(buffers="men")
    text = refused(lambda: DistributedOptimizer(sgd(net), net, kvstore={}))
    assert "the store is one with rounds, not dict; fix: kvstore.create('dist_sync')" in text
    wrapped = DistributedOptimizer(sgd(net), net, kvstore=local)
    text = refused(lambda: wrapped.add_param_group({"params": other.parameters()}))
    assert "is not the model's" in text


def workers_that_differ_are_told_parameter_and_worker() -> None:
    def script(kv):
        found = []
        for net, overlap in ((network(3 + kv.rank), 0), (network()[: 2 - kv.rank], 0), (network(), kv.rank)):
            given = sgd(net), net, None, bool(overlap)
            found.append(refused(lambda given=given: DistributedOptimizer(*given, kvstore=kv)))
        DistributedOptimizer(sgd(net), net, buffers="own", kvstore=kv)
        return found

    shape, number, option = run(script)[0]
    assert "'0.weight' float32 (3, 2) on worker-0, '0.weight' float32 (4, 2) on worker-1" in shape
    assert "the number of parameters is 4 on worker-0, 2 on worker-1" in number, number
    assert "overlap is False on worker-0, True on worker-1" in option, option


def a_program_by_itself_is_as_without() -> None:
    net = network()
    opt = DistributedOptimizer(torch.optim.Adam(net.parameters()), net, {"type": "2bit"}, True)
    assert isinstance(opt, torch.optim.Adam)
    assert isinstance(opt, DistributedOptimizer)
    with opt.no_sync():
        net(torch.ones(1, 2)).sum().backward()
    assert not net[0].weight._post_accumulate_grad_hooks
    opt.step()
    assert type(copy.deepcopy(opt)) is torch.optim.Adam
    other = torch.optim.Adam(network().parameters())
    other.load_state_dict(opt.state_dict())
    assert other.state_dict()["state"][0]["step"] == 1


def first_values_are_rank_0s_whatever_their_types() -> None:
    def script(kv):
        net = network()
        net[0].weight.data = net[0].weight.data.t().contiguous().t() + kv.rank
        for name, value in (
            *(("flag", True), ("wave", 1 + 2j), ("count", 2**40), ("exact", 1 / 3), ("none", [])),
            ("tiny", torch.tensor(3.0).to(torch.float8_e5m2)),
        ):
            tensor = torch.as_tensor(value, dtype=torch.float64 if name == "exact" else None)
            net.register_buffer(name, tensor.clone() if kv.rank == 0 else torch.zeros_like(tensor))
        opt = DistributedOptimizer(sgd(net), net, kvstore=kv)
        first = [each.clone() for each in (net[0].weight.detach(), *net.buffers())]
        for buffer in net.buffers():
            buffer.zero_() if kv.rank else None
        net(torch.ones(1, 2)).sum().backward()
        opt.step()
        assert all(torch.equal(*pair) for pair in zip(first[1:-1], list(net.buffers())[:-1], strict=True))
        assert net.tiny.float() == 3
        return [each.tolist() for each in first[:-1]]

    one, other = run(script)
    assert one == other
    assert one[1:] == [True, 1 + 2j, 2**40, 1 / 3, []]


def buffers_are_means_or_the_workers_own_on_request() -> None:
    def script(kv, how):
        net = network()
        net.register_buffer("short", torch.tensor([1.0, 3.0]).bfloat16() + kv.rank)
        net.register_buffer("exact", torch.tensor(1 / 3 + kv.rank, dtype=torch.float64))
        net.register_buffer("count", torch.tensor(7 + kv.rank))
        DistributedOptimizer(sgd(net), net, buffers=how, kvstore=kv)
        net.short += kv.rank
        net.exact += kv.rank
        net.count += kv.rank
        net(torch.ones(1, 2)).sum().backward()
        return net.short.tolist(), net.exact.item(), net.count.item()

    assert run(lambda kv: script(kv, "mean")) == [([1.5, 3.5], 1 / 3 + 0.5, 7)] * 2
    assert run(lambda kv: script(kv, "own")) == [([1.0, 3.0], 1 / 3, 7), ([2.0, 4.0], 1 / 3 + 1, 8)]


def a_backward_that_failed_leaves_nothing_to_the_next() -> None:
    def script(kv):
        net = network(200)  # large enough to be moved by hooks
        net.insert(1, nn.Linear(200, 200))
        opt = DistributedOptimizer(sgd(net), net, kvstore=kv)

        def broken(grad: torch.Tensor) -> None:
            raise ValueError("mine")

        hidden = net[0](torch.ones(1, 2))
        hidden.register_hook(broken)
        with suppress(ValueError):
            net[1:](hidden).sum().backward()
        opt.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        found = net[1].weight.grad.clone()
        opt.zero_grad()
        net(torch.ones(1, 2)).sum().backward()
        assert torch.equal(found, net[1].weight.grad)

    run(script)


def gradients_that_no_worker_adds_to_stay_as_they_are() -> None:
    def script(kv):
        net = network(200)
        net.insert(1, nn.Linear(200, 200))
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        net(torch.ones(1, 2)).sum().backward()
        before = [param.grad.clone() for param in net.parameters()]
        net[2](torch.ones(1, 200)).sum().backward()
        same = [torch.equal(param.grad, grad) for param, grad in zip(net.parameters(), before, strict=True)]
        assert same == [True, True, True, True, False, False]

    run(script)


def a_second_gradient_in_one_backward_is_refused_with_overlap() -> None:
    def script(kv):
        net = nn.Sequential(nn.Linear(2, 2))
        DistributedOptimizer(sgd(net), net, overlap=True, kvstore=kv)
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(net, x, use_reentrant=True)
        return refused(lambda: x.sum().backward())

    assert all("gets a second gradient in one backward" in text for text in run(script))


def optimizers_of_one_model_share_the_exchange() -> None:
    def script(kv):
        net = network()
        opts = [DistributedOptimizer(sgd(part), net, kvstore=kv) for part in net]
        calls = Counter()
        kv.pushpull, pushpull = (lambda *given: (calls.update(["pushpull"]), pushpull(*given))), kv.pushpull
        net(torch.ones(1, 2) * (kv.rank + 1)).sum().backward()
        assert calls["pushpull"] == 1
        assert len({id(opt._averaging) for opt in opts}) == 1
        assert "share the exchange" in refused(lambda: DistributedOptimizer(sgd(net), net, overlap=True, kvstore=kv))
        return net[0].weight.grad.tolist()

    one, other = run(script)
    assert one == other


def compressed_gradients_are_the_same_on_all_workers() -> None:
    def script(kv, overlap):
        both = nn.ModuleDict({"net": network(), "unused": nn.Linear(2, 2)})
        net = both["net"]
        opt = DistributedOptimizer(
            sgd(both), both, {"type": "2bit", "threshold": 0.25, "min_size": 0}, overlap, kvstore=kv
        )
        for step in range(5):
            opt.zero_grad()
            net(torch.ones(1, 2) * (kv.rank + step)).sum().backward()
            opt.step()
            assert both["unused"].weight.grad is None
        grads = net[0].weight.grad
        assert set((grads / 0.25).tolist()[0]) <= {-2.0, -1.0, 0.0, 1.0, 2.0}
        if kv.rank:
            net[1].bias.register_hook(lambda grad: grad * float("nan"))
            text = refused(lambda: net(torch.ones(1, 2)).sum().backward())
            assert text.startswith("worker-1: gradient of 'net.1.bias': ")
        return [param.tolist() for param in both.parameters()]

    for overlap in (False, True):
        one, other = run(lambda kv, overlap=overlap: script(kv, overlap))
        assert one == other


def tables_that_a_worker_does_not_use_get_the_rows_of_the_others() -> None:
    def script(kv):
        net = nn.ModuleList([nn.Embedding(5, 2, sparse=True) for _ in range(3)])
        tied = nn.Linear(2, 5, bias=False)
        tied.weight = net[2].weight
        net.append(tied)
        opt = DistributedOptimizer(sgd(net), net, kvstore=kv)
        for _ in range(2):  # the second one adds to the first
            loss = (net[0] if kv.rank else net[2])(torch.tensor([1, 3, 3])).sum()
            (loss if kv.rank else loss + net[3](torch.ones(1, 2)).sum()).backward()
        opt.step()
        assert net[1].weight.grad is None
        assert net[0].weight.grad.is_sparse
        return net[0].weight.grad.to_dense()[:, 0].tolist(), net[2].weight.grad[:, 0].tolist()

    assert run(script) == [([0.0, 1.0, 0.0, 2.0, 0.0], [1.0, 2.0, 1.0, 3.0, 1.0])] * 2


def a_pickle_of_a_wrapped_optimizer_is_the_plain_one() -> None:
    net = network()
    opt = DistributedOptimizer(torch.optim.Adam(net.parameters()), net, kvstore=kvstore.create("local"))
    file = io.BytesIO()
    torch.save({"opt": opt, "schedule": torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)["opt"]) is torch.optim.Adam


def no_worker_joins_or_leaves_while_gradients_are_averaged() -> None:
    def script(kv):
        net = network()
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        for act in (kv.join, kv.leave):
            assert "equally many batches" in refused(act)
        del net
        kv.join()

    run(script)


def the_error_of_a_worker_with_more_batches_says_what_to_do() -> None:
    def script(kv):
        net = network()
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        return kv.rank or refused(lambda: net(torch.ones(1, 2)).sum().backward())

    text = run(script, op_timeout_s=5.0)[0]
    assert "equally many batches" in text
    assert "kv.join" not in text


def a_model_that_is_dropped_is_freed_with_its_buckets() -> None:
    def script(kv):
        net = network(200)
        net.append(nn.BatchNorm1d(1))
        opt = DistributedOptimizer(sgd(net), net, kvstore=kv)
        net(torch.ones(2, 2)).sum().backward()
        parts = [weakref.ref(each) for each in (net, net[2], net[0].weight, opt._averaging, opt._averaging._buckets[0])]
        weight = net[0].weight
        del net, opt
        assert [part() for part in parts if part() is not weight] == [None] * 4
        assert not weight._post_accumulate_grad_hooks

    run(script)


def buffers_of_an_added_layer_become_rank_0s_too() -> None:
    def script(kv, how):
        net = network()
        net.register_buffer("old", torch.tensor(1.0))
        opt = DistributedOptimizer(sgd(net), net, buffers=how, kvstore=kv)
        net.old += kv.rank
        net.append(nn.BatchNorm1d(1))
        net[2].running_mean += 5 + kv.rank
        opt.add_param_group({"params": net[2].parameters()})
        found = [net[2].running_mean.item(), net.old.item()]
        net(torch.rand(4, 2) + kv.rank).sum().backward()
        found.append(net[2].running_mean.item())
        if kv.rank:
            net.register_buffer("extra", torch.ones(2))
        assert "'extra' float32 (2,) on worker-1" in refused(lambda: opt.add_param_group({"params": []}))
        return found

    one, other = run(lambda kv: script(kv, "rank0"))
    assert (one[:2], other[:2]) == ([5.0, 1.0], [5.0, 2.0])
    assert one[2] == other[2]
    one, other = run(lambda kv: script(kv, "own"))
    assert (one[:2], other[:2]) == ([5.0, 1.0], [5.0, 2.0])
    assert one[2] != other[2]


def models_are_exchanged_in_one_order_whatever_the_backwards_is() -> None:
    def script(kv):
        nets = [network(), network()]
        for net in nets:
            DistributedOptimizer(sgd(net), net, kvstore=kv)
        sum(net(torch.ones(1, 2)).sum() for net in (nets if kv.rank else nets[::-1])).backward()

    run(script, op_timeout_s=5.0)


def gradients_added_up_before_are_not_lost_when_a_backward_fails() -> None:
    def script(kv):
        net = network(200)
        net.insert(1, nn.Linear(200, 200))
        opt = DistributedOptimizer(sgd(net), net, kvstore=kv)
        hidden = net[0](torch.ones(1, 2))

        def broken(grad: torch.Tensor) -> None:
            raise ValueError("mine")

        def nested(grad: torch.Tensor) -> None:
            with torch.enable_grad():
                net[2].bias.sum().backward()

        with opt.no_sync():
            net(torch.ones(1, 2)).sum().backward()
        once = [param.grad.clone() for param in net.parameters()]
        for hook in (broken, nested):
            hidden = net[0](torch.ones(1, 2))
            hidden.register_hook(hook)
            with suppress(ValueError):  # KVError is one
                net[1:](hidden).sum().backward()
                raise AssertionError("nothing was refused")
            assert torch.equal(net[1].weight.grad, once[2] * (2 if hook is broken else 3))
            assert torch.equal(net[0].weight.grad, once[0])

    run(script)


def hooks_that_would_see_no_mean_are_refused_by_name() -> None:
    def script(kv):
        net = network()
        handle = net[1].weight.register_post_accumulate_grad_hook(lambda param: None)
        first = refused(lambda: DistributedOptimizer(sgd(net), net, kvstore=kv))
        handle.remove()
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        net[0].bias.register_post_accumulate_grad_hook(lambda param: None)
        return first, refused(lambda: net(torch.ones(1, 2)).sum().backward())

    first, later = run(script)[0]
    assert "parameter '1.weight' has another hook of register_post_accumulate_grad_hook" in first
    assert "parameter '0.bias' has another hook" in later


def what_was_changed_after_the_wrap_is_named() -> None:
    def script(kv):
        net = network()
        net.register_buffer("count", torch.zeros(3))
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        net.count = torch.zeros(4)
        first = refused(lambda: net(torch.ones(1, 2)).sum().backward())
        net.count = torch.zeros(3)
        net.double()
        return first, refused(lambda: net(torch.ones(1, 2).double()).sum().backward())

    for buffer, param in run(script):
        assert "buffer 'count' has 4 values, and had 3 when the optimizer was wrapped" in buffer
        assert (
            "parameter '0.weight' float64 (3, 2) was '0.weight' float32 (3, 2) when the optimizer was wrapped" in param
        )
    lazy = nn.Sequential(nn.LazyLinear(3))
    text = refused(lambda: DistributedOptimizer(sgd(lazy), lazy, kvstore=kvstore.create("local")))
    assert "parameter '0.weight' has no shape yet" in text


def a_step_makes_few_calls_a_parameter() -> None:
    """Of Python's functions, on 300 small parameters: the hook, and no other."""

    def script(kv):
        net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(150)])
        DistributedOptimizer(sgd(net), net, kvstore=kv)
        calls: Counter[str] = Counter()

        def count(frame, event, arg) -> None:
            if event == "call" and "distrun_runtime" in frame.f_code.co_filename:
                calls[frame.f_code.co_name] += 1

        for _ in range(3):
            net.zero_grad()
            loss = net(torch.ones(1, 4)).sum()
            calls.clear()
            sys.setprofile(count)
            loss.backward()
            sys.setprofile(None)
        assert calls["_accumulated"] == 300
        assert sum(calls.values()) < 600, calls

    run(script)


CASES = [
    case for name, case in list(globals().items()) if callable(case) and case.__module__ == __name__ and "_" in name
]


def main() -> None:
    torch.set_num_threads(1)
    run_cases(CASES)


if __name__ == "__main__":
    main()
