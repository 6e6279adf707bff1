"""Rules, multipliers, functions, scales, assigned values, element types and staleness on a distributed store."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, run_job
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_of_users import Choosy

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError, RuleError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops import schedules as schedule
from distrun_runtime.store.values import RowSparse

pytestmark = pytest.mark.usefixtures("placement")

SHAPE = (2, 3)
WIDE = (40, 40)
BOUND = 1000
HERE = __name__


def full(value: float, shape: tuple[int, ...] = SHAPE, dtype: str = "float32") -> Any:
    kind = dtypes.parse(dtype)
    return dtypes.narrow(np.full(shape, value, dtypes.work_dtype(kind)), kind)


def pulled(kv: KVStore, key: Any, shape: tuple[int, ...] = SHAPE) -> Any:
    out = full(-1, shape)
    kv.pull(key, out)
    return out


def halve(key: Any, received: Any, stored: Any) -> None:
    """An updater as a user would write one."""
    assert key in ("w", "v", "e", 3)
    stored *= 0.5
    stored += received


def test_a_learning_rate_changed_while_running_reaches_all_servers_before_the_call_returns() -> None:
    """In MXNet it never reached them."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0, WIDE)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push(["w", "v"], [full(0.5), full(0.5, WIDE)])
        assert (pulled(kv, "w") == -1).all()
        kv.barrier()
        if kv.rank == 0:
            kv.set_learning_rate(0.1)
        kv.barrier()
        kv.push(["w", "v"], [full(0.5), full(0.5, WIDE)])
        # The momentum stays: v = 0.5 * -1 - 0.1 * 1.
        assert np.allclose(pulled(kv, "w"), -1.6)
        assert np.allclose(pulled(kv, "v", WIDE), -1.6)
        if kv.rank == 1:
            kv.set_optimizer_params(learning_rate=0.5, momentum=0.0)
        kv.barrier()
        kv.push("w", full(0.5))
        assert np.allclose(pulled(kv, "w"), -2.1)

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("type_name", ["local", "dist_sync", "dist_async"])
def test_a_momentum_that_is_set_while_running_counts_from_then_on(type_name: str) -> None:
    """On servers it had no effect on weights that had been updated without one."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0, WIDE)])
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.push("w", full(1))
        assert (pulled(kv, "w") == -1).all()
        kv.set_optimizer_params(momentum=0.5)
        for expected in (-2, -3.5, -5.25):
            kv.push(["w", "v"], [full(1), full(1, WIDE)])
            assert (pulled(kv, "w") == expected).all()
        assert (pulled(kv, "v", WIDE) == -4.25).all()

    if type_name == "local":
        with kvstore.create("local") as kv:
            script(kv)
    else:
        run_job(script, 1, 1, type_name=type_name)


@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async"])
def test_init_refuses_values_that_the_rule_does_not_take(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a local store does. They were taken, each push of them failed, and no rule could be changed any more."""
    monkeypatch.setattr(Choosy, "refused", 5)

    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.barrier()
        with pytest.raises(KVError, match="key 'i': rule 'sgd' updates float weights, not int64"):
            kv.init(["v", "i"], [full(0), np.zeros(3, np.int64)])
        kv.set_learning_rate(0.5)
        kv.init("i", full(0))
        kv.pushpull("i", full(1), full(0))
        kv.barrier()
        kv.set_optimizer("rules_of_users:Choosy", replace=True)
        with pytest.raises(RuleError if kv.rank == 0 else KVError, match="ValueError: 5 elements are too many"):
            kv.init("five", np.zeros(5))
        with pytest.raises(KVError, match="'five' was never initialised"):
            kv.push("five", np.zeros(5))
        kv.init("six", np.zeros(6))
        kv.set_updater(None)
        kv.init("n", np.zeros(3, np.int64))
        with pytest.raises(KVError, match="key 'n': rule 'adam' updates float weights, not int64"):
            kv.set_optimizer("adam")

    run_job(script, 2, 1, type_name=type_name, imports=("rules_of_users",))


def test_multipliers_are_those_of_each_key() -> None:
    def script(kv: KVStore) -> None:
        kv.init([3, 4, 5], [full(1), full(1), full(1, WIDE)])
        kv.set_optimizer("sgd", learning_rate=1.0, wd=0.5)
        kv.set_multipliers(lr={3: 0.5, 5: 0.0}, wd={4: 0.0})
        kv.push([3, 4, 5], [full(0.5), full(0.5), full(0.5, WIDE)])
        assert np.allclose(pulled(kv, 3), 1 - 0.5 * (1 + 0.5))
        assert np.allclose(pulled(kv, 4), 1 - 1)
        assert np.allclose(pulled(kv, 5, WIDE), 1)

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("name", ["nag", "adamw", "rmsprop", "adagrad", "ftrl", "lamb", "lars"])
def test_rules_on_servers_do_what_they_do_in_one_place(name: str) -> None:
    """Also those that need norms of a value that lies in pieces on all servers."""

    def script(kv: KVStore) -> None:
        random = np.random.default_rng(0)
        weights = {"w": random.normal(size=SHAPE).astype("float32"), "v": random.normal(size=WIDE).astype("float32")}
        kv.init(list(weights), list(weights.values()))
        kv.set_optimizer(name, learning_rate=0.1)
        rule = rules.make(name, {"learning_rate": 0.1})
        states = {key: rule.new_state(weight.reshape(-1)) for key, weight in weights.items()}
        for _ in range(3):
            for key, weight in weights.items():
                gradient = random.normal(size=weight.shape).astype("float32")
                kv.push(key, gradient * (0.25 if kv.rank else 0.75))
                rule.step(weight.reshape(-1), gradient.reshape(-1), states[key])
                assert np.allclose(pulled(kv, key, weight.shape), weight, rtol=2e-4, atol=1e-5)

    run_job(script, bigarray_bound=BOUND)


def test_a_function_of_a_module_updates_on_the_servers() -> None:
    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(1), full(1, WIDE)])
        kv.set_updater(halve)
        for value in (2.5, 3.25):
            kv.push(["w", "v"], [full(1), full(1, WIDE)])
            assert (pulled(kv, "w") == value).all()
            assert (pulled(kv, "v", WIDE) == value).all()
        kv.barrier()
        kv.set_updater(None)
        kv.barrier()
        kv.push("w", full(1))
        assert (pulled(kv, "w") == 2).all()

    run_job(script, bigarray_bound=BOUND, imports=(HERE,))


def test_a_rule_of_the_users_own_steps_on_the_servers_and_one_of_another_module_is_refused() -> None:
    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0, WIDE)])
        with pytest.raises(KVError, match="--server-import"):
            kv.set_optimizer("test_dist_rules:Missing")
        kv.barrier()  # or this one's rule would be what the other's is compared with
        kv.set_optimizer("rules_of_users:Sign", lr=2)
        kv.push(["w", "v"], [full(3), full(-3, WIDE)])
        assert (pulled(kv, "w") == -2).all()
        assert (pulled(kv, "v", WIDE) == 2).all()

    run_job(script, bigarray_bound=BOUND, imports=("rules_of_users",))


def test_a_schedule_counts_the_updates_of_each_weight() -> None:
    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0)])
        kv.set_optimizer("sgd", lr_scheduler=schedule.Factor(step=2, factor=0.5, base_lr=1.0))
        value = 0.0
        local = rules.make("sgd", {"lr_scheduler": schedule.Factor(step=2, factor=0.5, base_lr=1.0)})
        weight, state = np.zeros(1, "float32"), local.new_state(np.zeros(1, "float32"))
        for _ in range(7):
            kv.push("w", full(0.5))
            local.step(weight, np.ones(1, "float32"), state)
            value = float(pulled(kv, "w")[0, 0])
            assert value == weight[0]
        kv.push("v", full(0.5))
        assert (pulled(kv, "v") == -1).all()

    run_job(script)


def test_functions_that_servers_cannot_import_are_refused_with_the_fix() -> None:
    def script(kv: KVStore) -> None:
        def nested(key: Any, received: Any, stored: Any) -> None: ...

        own = type(lambda: None)(halve.__code__, {}, "own")
        own.__module__ = "__main__"
        own.__qualname__ = "own"
        for function in (lambda key, received, stored: None, nested, own, np.add):
            with pytest.raises(KVError, match="--server-import"):
                kv.set_updater(function)
        kv.init("w", full(1))
        with pytest.raises(KVError, match="import"):
            kv.set_updater(halve)  # This job's servers were not told of the module.

    run_job(script)


def test_an_assigned_value_replaces_what_is_stored_and_the_rules_state_goes_on() -> None:
    """In MXNet a value could not be set again."""

    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [full(0), full(0, WIDE)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push(["w", "v"], [full(0.5), full(0.5, WIDE)])
        kv.assign(["w", "v"], [full(10 + kv.rank), full(10, WIDE)])
        assert (pulled(kv, "w") == 10).all()
        kv.push(["w", "v"], [full(0.5), full(0.5, WIDE)])
        assert (pulled(kv, "w") == 10 - 1.5).all()
        assert (pulled(kv, "v", WIDE) == 10 - 1.5).all()
        with pytest.raises(KVError, match="never"):
            kv.assign("u", full(0))

    run_job(script, bigarray_bound=BOUND)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_steps_are_not_lost_with_multi_precision(dtype: str) -> None:
    """MXNet's vector: 20 steps of 1e-4 move a float16 weight of 1 to 0.998, and without masters they do not."""

    def script(kv: KVStore) -> None:
        kv.init("w", full(1, dtype=dtype))
        kv.set_optimizer("sgd", learning_rate=1e-4 if dtype == "float16" else 1e-3, multi_precision=True)
        out = full(0, dtype=dtype)
        for _ in range(20):
            kv.pushpull("w", full(1, dtype=dtype), out)
        expected = dtypes.widen(full(0.998 if dtype == "float16" else 0.98, dtype=dtype))
        assert np.allclose(dtypes.widen(out), expected, atol=1e-3)
        assert (dtypes.widen(out) < 1).all()

    run_job(script, 1, 1)


def test_device_types_sum_buffers_first_and_are_what_the_plain_types_are() -> None:
    def script(kv: KVStore) -> str:
        kv.init("w", full(0, WIDE))
        values = [full(kv.rank + 1, WIDE) for _ in range(3)]
        kv.pushpull("w", values)
        assert all((value == 9).all() for value in values)
        return kv.type

    for name in ("dist_device_sync", "dist_sync_device"):
        assert run_job(script, type_name=name, bigarray_bound=BOUND) == [name, name]


def test_async_device_types_apply_on_arrival() -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", full(0))
        kv.set_optimizer("test", rescale_grad=1)
        kv.push("w", [full(1), full(1)])
        kv.barrier()
        assert (pulled(kv, "w") == 4).all()

    for name in ("dist_device_async", "dist_async_device"):
        run_job(script, type_name=name)


@settings(max_examples=4, deadline=None)
@given(bound=st.integers(0, 3), seed=st.integers(0, 100))
def test_no_pull_is_further_ahead_of_the_slowest_than_the_bound(bound: int, seed: int) -> None:
    steps = 8

    def script(kv: KVStore) -> None:
        random = np.random.default_rng([seed, kv.rank])
        kv.init("w", full(0))
        kv.set_optimizer("test", rescale_grad=1)
        kv.barrier()
        for own in range(1, steps + 1):
            if random.random() < 0.3:
                threading.Event().wait(0.01 * float(random.random()))
            kv.push("w", full(1))
            out = pulled(kv, "w")
            # Of the others, what is in the value is at least this worker's own count less the bound.
            assert out[0, 0] >= own + 2 * max(0, own - bound)
        kv.join()

    run_job(script, 3, 2, type_name="dist_async", staleness=bound)


# What makes a rule use all of its state, and moves float32 weights within a few steps.
EVERY: dict[str, dict[str, Any]] = {
    **{name: {"lr": 0.1} for name in sorted(set(rules.RULES) - {"test", "lamb", "lars"})},
    **{name: {"lr": 0.1, "momentum": 0.9} for name in ("sgd", "nag", "dcasgd")},
    "rmsprop": {"lr": 0.1, "centered": True},
}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_a_rule_gives_the_same_weights_whatever_the_number_of_servers_and_in_a_local_store(name: str) -> None:
    """Dense values and rows, bit for bit; also the noise of sgld."""
    random = np.random.default_rng(5)
    grads = [random.normal(size=(2, *WIDE)).astype(np.float32) for _ in range(3)]
    rows = [np.unique(random.integers(0, 40, 9)) for _ in range(3)]

    def train(kv: KVStore, parts: list[int]) -> Any:
        kv.init(["w", "e"], [full(1, WIDE), RowSparse.from_dense(full(1, WIDE))])
        kv.set_optimizer(name, **EVERY[name])
        for grad, some in zip(grads, rows, strict=True):
            kv.push("w", [grad[part] for part in parts])
            kv.push("e", [RowSparse(grad[part][some], some, WIDE) for part in parts])
        return np.stack([pulled(kv, "w", WIDE), pulled(kv, "e", WIDE)])

    with kvstore.create("local") as kv:
        expected = train(kv, [0, 1])
    assert np.isfinite(expected).all()
    assert (expected != 1).any(axis=(1, 2)).all()
    for servers in (1, 3):
        with Cluster(2, servers, over="inproc", bigarray_bound=BOUND) as job:
            for found in job.run(lambda kv: train(kv, [kv.rank])):
                assert np.array_equal(found, expected), servers


SIXTEEN: dict[str, dict[str, Any]] = {
    "none": {},
    "sgd": {"lr": 0.1},
    "sgd momentum": {"lr": 0.1, "momentum": 0.9, "wd": 0.01},
    "sgd masters": {"lr": 0.001, "momentum": 0.9, "multi_precision": True},
    "adam": {"lr": 0.1},
    "lamb": {"lr": 0.1},
    "updater": {},
    "rules_of_users:Sign": {"lr": 0.1},
}


@pytest.mark.parametrize(("count", "scale"), [(2, 1.0), (1, 0.3)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("what", SIXTEEN)
def test_sixteen_bit_weights_have_the_same_bits_on_a_server_and_in_one_process(
    what: str, dtype: str, count: int, scale: float
) -> None:
    """Sum, scale and rule are float32 until the weight is written. `count` workers, or devices."""
    kind = dtypes.parse(dtype)
    random = np.random.default_rng(11)
    first = dtypes.narrow(random.normal(size=1000).astype(np.float32), kind)
    grads = [dtypes.narrow(random.normal(size=(2, 1000)).astype(np.float32), kind) for _ in range(3)]
    rows = [[np.unique(random.integers(0, 100, 30)) for _ in range(2)] for _ in range(3)]

    def train(kv: KVStore, parts: list[int]) -> list[bytes]:
        kv.init(["w", "v", "e"], [first, first[:1], RowSparse.from_dense(first.reshape(100, 10))])
        if what == "updater":
            kv.set_updater(halve)
        elif what != "none":
            kv.set_optimizer(what.split(maxsplit=1)[0], **SIXTEEN[what])
        for grad, some in zip(grads, rows, strict=True):
            kv.push(["w", "v"], [[grad[part] for part in parts], [grad[part][:1] for part in parts]], scale=scale)
            tables = [(grad[part].reshape(100, 10), some[part]) for part in parts]
            kv.push("e", [RowSparse(table[its], its, table.shape) for table, its in tables], scale=scale)
        outs = [np.empty_like(first), np.empty_like(first[:1]), np.empty_like(first).reshape(100, 10)]
        kv.pull(["w", "v", "e"], outs)
        return [out.tobytes() for out in outs]

    with Cluster(count, 1, over="inproc", imports=(HERE, "rules_of_users")) as job:
        expected = job.run(lambda kv: train(kv, [kv.rank]))[0]
    for type_name in ("local", "device"):
        with kvstore.create(type_name) as kv:
            assert train(kv, [*range(count)]) == expected, type_name
