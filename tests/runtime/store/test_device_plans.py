"""Calls of a `device` store that come again with the same tensors of a GPU: planned once, and as in host memory."""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fakearrays import put
from gpukit import Machine, gpus_of_process, values
from gputensors import GpuTensor, Torch
from peers import python_of
from slowness import scaled

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes, plans
from distrun_runtime.arrays.dtypes import Array
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.ps.values import Values
from distrun_runtime.store import weights

SHAPES = [(7, 3), (300,), (1,), (), (64, 2)]
RULES: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.1},
    "adamw": {"learning_rate": 0.1, "wd": 0.1},
}
SEEDS = pytest.mark.parametrize("seed", range(3))


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    seed = request.node.callspec.params.get("seed", 0) if hasattr(request.node, "callspec") else 0
    with gpus_of_process(Machine(2, seed=seed)) as machine:
        yield machine
        machine.finish()


@pytest.fixture
def torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Torch:
    torch = Torch(machine)
    put(monkeypatch, torch)
    return torch


class Pair:
    """A `device` store that is given tensors of a GPU, and a `local` one that is given the same in host memory.

    Arguments:
        kinds: dtypes of the keys, in turn.
        gpus: the tensors of a key are on so many, in turn.
    """

    def __init__(self, torch: Torch, kinds: Any = ("float32",), rule: str = "", *, gpus: int = 1) -> None:
        self.torch, self.gpus = torch, gpus
        kinds = itertools.cycle(map(dtypes.parse, kinds))
        self.keys = [f"k{number}" for number in range(len(SHAPES))]
        first = [values(shape, next(kinds), number) for number, shape in enumerate(SHAPES)]
        self.kinds = [each.dtype for each in first]
        self.stores = [kvstore.create("device"), kvstore.create("local")]
        for each in self.stores:
            each.init(self.keys, first)
            if rule:
                each.set_optimizer(rule, **RULES[rule])
        self.given: list[list[GpuTensor]] = []
        self.outs = self.tensors(1)
        self.turn = 0

    def tensors(self, k: int) -> list[list[GpuTensor]]:
        """Return k new tensors of each key."""
        return [
            [GpuTensor(self.torch, shape, kind, part % self.gpus) for part in range(k)]
            for shape, kind in zip(SHAPES, self.kinds, strict=True)
        ]

    def numbers(self, k: int) -> list[list[Array]]:
        """Return other numbers with each call."""
        self.turn += 1
        return [
            [values(shape, kind, 1000 * self.turn + 10 * number + part) for part in range(k)]
            for number, (shape, kind) in enumerate(zip(SHAPES, self.kinds, strict=True))
        ]

    def fill(self, k: int, *, is_fresh: bool = False) -> list[list[Array]]:
        """Write other numbers to the tensors that are pushed, which are the same unless they are to be fresh."""
        if is_fresh or not self.given or len(self.given[0]) != k:
            self.given = self.tensors(k)
        numbers = self.numbers(k)
        for some, arrays in zip(self.given, numbers, strict=True):
            for each, array in zip(some, arrays, strict=True):
                each.set(array)
        return numbers

    def push(self, k: int, *, scale: float = 1.0, wait: bool = True, **how: bool) -> None:
        numbers = self.fill(k, **how)
        self.stores[0].push(self.keys, self.given, scale=scale, wait=wait).wait()
        self.stores[1].push(self.keys, numbers, scale=scale)

    def pushpull(self, k: int, *, in_place: bool) -> None:
        numbers = self.fill(k)
        self.stores[0].pushpull(self.keys, self.given, None if in_place else self.outs)
        expected = [np.empty(shape, kind) for shape, kind in zip(SHAPES, self.kinds, strict=True)]
        self.stores[1].pushpull(self.keys, numbers, expected)
        self.check(expected, self.given if in_place else self.outs)

    def pull(self, k: int = 1, *, is_fresh: bool = False) -> None:
        if is_fresh or len(self.outs[0]) != k:
            self.outs = self.tensors(k)
        self.stores[0].pull(self.keys, out=self.outs)
        expected = [np.empty(shape, kind) for shape, kind in zip(SHAPES, self.kinds, strict=True)]
        self.stores[1].pull(self.keys, out=expected)
        self.check(expected, self.outs)

    def check(self, expected: list[Array], found: list[list[GpuTensor]]) -> None:
        for array, some in zip(expected, found, strict=True):
            for each in some:
                assert each.get().tobytes() == array.tobytes()

    @property
    def kept(self) -> list[Any]:
        backend: Any = self.stores[0]._backend
        return list(backend._weights.kept.values())

    @property
    def plans(self) -> int:
        backend: Any = self.stores[0]._backend
        return len(backend._weights.plans._plans)


def calls_of(machine: Machine, work: Callable[[], object]) -> int:
    """Return the calls of the driver that order work or give it, without the questions whether earlier work is over."""
    names = ("launch", "record", "wait", "fill", "copy", "copy_peer", "alloc", "synchronize")
    before = [machine.standin.calls[name] for name in names]
    work()
    return sum(machine.standin.calls[name] - was for name, was in zip(names, before, strict=True))


MIXED = ("float16", "float32", "bfloat16", "float64")


@pytest.mark.parametrize(
    ("kinds", "k", "seed"),
    [(("float32",), 2, 0), (("float32",), 9, 1), ((*MIXED, "int8"), 1, 2), ((*MIXED, "int64"), 3, 0)],
)
def test_sums_without_a_rule_have_the_bytes_of_host_memory(torch: Torch, kinds: Any, k: int, seed: int) -> None:
    pair = Pair(torch, kinds)
    for turn in range(4):
        pair.push(k)
        pair.pull(1 + turn % 2)
        pair.pushpull(k, in_place=bool(turn % 2))


@pytest.mark.parametrize(
    ("rule", "kinds", "k", "seed"),
    [
        *(("sgd", ("float32",), 2, 0), ("sgd", MIXED, 1, 1), ("adam", MIXED, 2, 2), ("adamw", ("float32",), 3, 0)),
        *(("adam", ("float32",), 1, 1), ("adamw", ("float64",), 2, 2)),
    ],
)
def test_steps_of_a_rule_have_the_bytes_of_host_memory(torch: Torch, rule: str, kinds: Any, k: int, seed: int) -> None:
    pair = Pair(torch, kinds, rule)
    for each in pair.stores:
        each.set_multipliers({"k1": 0.5}, {"k0": 0.0})
    for turn in range(4):
        pair.push(k)
        pair.pull()
        pair.pushpull(k, in_place=bool(turn % 2))


@pytest.mark.parametrize(
    ("rule", "kinds", "k", "seed"),
    [("", ("float32",), 2, 0), ("", MIXED, 3, 1), ("sgd", ("float32",), 2, 2), ("adam", MIXED, 4, 0)],
)
def test_tensors_on_two_gpus_are_planned_with_a_copy_each_way(
    machine: Machine, torch: Torch, rule: str, kinds: Any, k: int, seed: int
) -> None:
    pair = Pair(torch, kinds, rule, gpus=2)
    for turn in range(4):
        pair.push(k)
        pair.pull(2)
        pair.pushpull(k, in_place=bool(turn % 2))
    assert pair.plans >= 3
    assert {each.array.device.name for each in pair.kept} == {"gpu:0", "gpu:1"}
    copied = machine.standin.calls["copy_peer"]
    pair.push(k)
    pair.pull(2)
    assert machine.standin.calls["copy_peer"] - copied <= 2 * len(set(kinds)) * k


def test_what_is_too_large_for_a_bucket_is_copied_as_without_a_plan(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "COPIED_BYTES", 64)
    pair = Pair(torch, rule="sgd", gpus=2)
    for _ in range(3):
        pair.push(2)
        pair.pull(2)
    assert pair.plans == 0


@pytest.mark.parametrize(("rule", "gpus", "seed"), [("", 1, 0), ("sgd", 1, 1), ("adam", 2, 2)])
def test_scaled_pushes_have_plans_whatever_the_number(torch: Torch, rule: str, gpus: int, seed: int) -> None:
    pair = Pair(torch, MIXED, rule, gpus=gpus)
    for turn in range(6):
        pair.push(1 + turn % 3, scale=[1.0, 0.25, 3.0][turn // 2])
        pair.pull()
    push = pair.plans
    pair.push(3, scale=0.5)
    assert pair.plans == push
    pair.pull()


@pytest.mark.parametrize(("kinds", "scale", "k"), [(("float16", "float32"), 0.5, 1), (("float16", "bfloat16"), 1.0, 3)])
def test_keys_of_two_dtypes_and_equal_sizes_have_sums_of_their_own(
    torch: Torch, monkeypatch: pytest.MonkeyPatch, kinds: Any, scale: float, k: int
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", [(300,), (300,)])
    pair = Pair(torch, kinds, "sgd")
    for _ in range(3):
        pair.push(k, scale=scale)
        pair.pull()
    assert pair.plans == 2


def test_gradients_that_cross_between_two_gpus_reach_their_own_keys(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SHAPES", [(300,), (300,)])
    pair = Pair(torch, rule="sgd")
    for places in ((0, 1), (1, 0)):  # the first are where the values will be
        pair.given = [[GpuTensor(torch, (300,), pair.kinds[0], place)] for place in places]
        for _ in range(2):
            pair.push(1)
            pair.pull()
    assert pair.plans == 3


@pytest.mark.parametrize("rule", ["", "sgd"])
def test_scaled_sums_go_by_one_bucket_of_bounded_size(torch: Torch, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(weights, "COPIED_BYTES", 1300)  # a key has 1200, all have 1804
    pair = Pair(torch, ("float16",), rule)
    for _ in range(3):
        pair.push(1, scale=0.5)
        pair.pull()
    backend: Any = pair.stores[0]._backend
    assert [each.nbytes for each in backend._weights.buckets.values()] == [1300]


def test_updates_in_parts_leave_no_more_with_each_turn(torch: Torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "COPIED_BYTES", 600)
    pair = Pair(torch, rule="sgd")
    pair.push(1)
    there, counts = pair.kept[0].values, set()
    for turn in range(6):
        arrays = [some for [some] in pair.numbers(1)]
        for each in pair.stores:
            each.push(pair.keys, arrays, scale=0.5)
        if turn >= 2:
            counts.add((len(there.layouts), len(there.step_plans)))
    pair.pull()
    assert len(counts) == 1


def test_of_tensors_that_are_looked_at_one_by_one_no_steps_are_kept(torch: Torch, tmp_path: Path) -> None:
    pair = Pair(torch, rule="sgd")
    with pair.stores[0].profile(tmp_path):  # no call has a plan
        for _ in range(4):
            pair.push(1)
        pair.pull()
    assert not any(each.on_gpu for each in pair.kept[0].values.step_plans.values())


@SEEDS
def test_calls_that_are_not_waited_for_are_ordered_before_the_stream_that_waits(torch: Torch, seed: int) -> None:
    pair = Pair(torch, rule="sgd")
    for turn in range(5):
        pair.push(2, wait=False)
        pending = pair.stores[0].pull(pair.keys, out=pair.outs, wait=False)
        with torch.stream(torch.new_stream(0)):
            pending.wait()
            expected = [np.empty(shape, kind) for shape, kind in zip(SHAPES, pair.kinds, strict=True)]
            pair.stores[1].pull(pair.keys, out=expected)
            pair.check(expected, pair.outs)
        pending.wait()  # again, where the next pull is
        assert pair.plans == 2 or turn < 2


@SEEDS
def test_any_history_of_calls_has_the_bytes_of_host_memory(torch: Torch, seed: int, tmp_path: Path) -> None:
    pair, draw = Pair(torch, rule="adam"), random.Random(seed)

    def one_key() -> None:
        number = draw.randrange(len(SHAPES))
        array = values(SHAPES[number], pair.kinds[number], pair.turn)
        pair.stores[0].push(pair.keys[number], torch.tensor(array))
        pair.stores[1].push(pair.keys[number], array)

    def both(work: Callable[[KVStore], object]) -> None:
        for each in pair.stores:
            work(each)

    def saved_and_loaded() -> None:
        for number, each in enumerate(pair.stores):
            each.save_states(tmp_path / str(number))
            each.load_states(tmp_path / str(number))

    steps: list[Callable[[], object]] = [
        *[lambda: pair.push(draw.choice([1, 2, 2, 3]))] * 4,
        *[lambda: pair.pushpull(2, in_place=draw.random() < 0.5)] * 2,
        lambda: pair.push(2, is_fresh=True),
        lambda: pair.pull(2, is_fresh=True),
        one_key,
        saved_and_loaded,
        lambda: both(lambda kv: kv.set_learning_rate(0.1 + 0.01 * pair.turn)),
        lambda: both(lambda kv: kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.5, replace=True)),
        lambda: both(lambda kv: kv.set_optimizer("adam", learning_rate=0.1, replace=True)),
    ]
    for _ in range(20):
        draw.choice(steps)()
        pair.pull()


def test_a_function_of_the_users_and_a_profile_are_called_as_without_a_plan(torch: Torch, tmp_path: Path) -> None:
    pair = Pair(torch)
    for _ in range(2):
        pair.push(2)
        pair.pull()
    with pair.stores[0].profile(tmp_path):
        pair.push(2)
    assert "push" in next(tmp_path.glob("*.json")).read_text()
    for each in pair.stores:
        each.set_updater(lambda _, received, stored: np.add(stored, received, out=stored))
    for _ in range(2):
        pair.push(2)
        pair.pull()


def test_a_call_that_comes_again_is_five_calls_of_the_driver(machine: Machine, torch: Torch) -> None:
    pair = Pair(torch, rule="sgd")
    for _ in range(3):
        pair.push(2)
        pair.pull()
    store = pair.stores[0]
    pushed = calls_of(machine, lambda: store.push(pair.keys, pair.given))
    pulled = calls_of(machine, lambda: store.pull(pair.keys, out=pair.outs))
    assert (pushed, pulled) == (5, 5)
    assert calls_of(machine, lambda: store.pushpull(pair.keys, pair.given, pair.outs)) > 6  # its first time
    assert calls_of(machine, lambda: store.pushpull(pair.keys, pair.given, pair.outs)) == 6
    assert store.stats()[0]["rounds"] == 6


def test_a_result_without_a_rule_is_written_by_the_sums_own_kernel(machine: Machine, torch: Torch) -> None:
    pair = Pair(torch)
    for _ in range(3):
        pair.pushpull(2, in_place=False)
    before = machine.standin.calls["launch"]
    pair.pushpull(2, in_place=False)
    assert machine.standin.calls["launch"] == before + 1


@pytest.mark.parametrize("most", [2, 8])
def test_addresses_that_never_repeat_leave_nothing(
    machine: Machine, torch: Torch, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "PLANS", most)
    pair = Pair(torch, rule="sgd")
    sizes = []
    for _ in range(2 * most + 6):
        pair.push(2, is_fresh=True)
        pair.pull(1, is_fresh=True)
        sizes.append(machine.gpus.get(0).pool.size)
    assert pair.plans == most
    assert sizes[-1] == sizes[-3]


@SEEDS
def test_tensors_that_the_program_drops_at_once_are_kept_until_the_work_is_over(torch: Torch, seed: int) -> None:
    pair = Pair(torch, rule="sgd")
    other = torch.new_stream(0)
    for _ in range(4):
        with torch.stream(other):  # not the one on which the memory is used again
            pair.push(2)
        other_given, pair.given = pair.given, []
        del other_given
        pair.pull()


@SEEDS
def test_the_order_is_that_of_the_stream_that_is_current(torch: Torch, seed: int) -> None:
    pair = Pair(torch, rule="sgd")
    streams = [torch.new_stream(0), torch.cuda.current_stream(0)]
    for turn in range(6):
        stream, before = streams[turn % 2], streams[1 - turn % 2]
        stream.wait_stream(before)
        with torch.stream(stream):
            pair.push(2)
            pair.pull()


def test_a_tensor_of_other_strides_at_the_same_address_is_read_as_it_is(torch: Torch) -> None:
    with kvstore.create("device") as kv:
        kv.init("w", np.zeros((3, 3), np.float32))
        tensor = torch.tensor(np.arange(9, dtype=np.float32).reshape(3, 3))
        out = np.empty((3, 3), np.float32)
        for _ in range(3):
            kv.push("w", tensor)
        turned = GpuTensor(torch, (3, 3), tensor.kind, 0, strides=(1, 3), of=tensor)
        kv.push("w", turned)
        kv.pull("w", out=out)
        assert out.tolist() == np.arange(9).reshape(3, 3).T.tolist()


def test_a_tensor_that_shows_the_negative_of_its_memory_is_read_as_it_shows_itself(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kvstore.create("device") as kv:
        kv.init("w", np.zeros(1, np.float32))
        tensor, out = torch.tensor(np.array([3], np.float32)), np.empty(1, np.float32)
        for _ in range(3):
            kv.push("w", tensor)
        tensor._bits = (True, False)
        monkeypatch.setattr(tensor, "detach", lambda: torch.tensor(np.array([-3], np.float32)))
        kv.push("w", tensor)
        kv.pull("w", out=out)
        assert out.tolist() == [-3]


def test_tensors_that_come_from_another_gpu_are_taken_as_without_a_plan(torch: Torch) -> None:
    pair = Pair(torch, rule="sgd")
    for device in (0, 0, 1, 1, 0, 0):
        pair.given = [[GpuTensor(torch, shape, pair.kinds[0], device) for _ in range(2)] for shape in SHAPES]
        pair.push(2)
        pair.push(2)
        pair.pull()


@pytest.mark.parametrize("is_planned", [False, True])
def test_what_does_not_fit_is_refused_as_without_a_plan(torch: Torch, is_planned: bool) -> None:
    pair = Pair(torch, rule="sgd")
    for _ in range(3 if is_planned else 1):
        pair.push(2)
        pair.pull()
    store, keys = pair.stores[0], pair.keys
    wrong = torch.tensor(np.zeros(5, np.float32))
    half = torch.tensor(np.zeros(SHAPES[1], np.float16))
    for given, text in (
        ([pair.given[0], [wrong], *pair.given[2:]], "k1"),
        ([pair.given[0], [half], *pair.given[2:]], "k1"),
        (pair.given[:-1], "5 keys, but 4"),
        ([pair.given[0], [], *pair.given[2:]], "empty list"),
    ):
        with pytest.raises(KVError, match=text):
            store.push(keys, given)
    shared = [[pair.outs[1][0]] if number == 1 else some for number, some in enumerate(pair.outs)]
    shared[4] = [GpuTensor(torch, SHAPES[4], pair.kinds[4], 0, of=pair.outs[1][0])]
    with pytest.raises(KVError, match="share memory"):
        store.pull(keys, out=shared)
    torch.capturing.add(0)
    with pytest.raises(KVError, match="capturing"):
        store.push(keys, pair.given)
    torch.capturing.clear()
    pair.pull()


def test_a_kernel_that_cannot_be_launched_is_told_with_the_keys_and_the_store_goes_on(
    machine: Machine, torch: Torch
) -> None:
    pair = Pair(torch)
    for _ in range(3):
        pair.push(2)
        pair.pull()
    numbers = pair.fill(2)
    machine.standin.fail("launch", code=1)
    with pytest.raises(KVError, match=r"k0.* failed: cudaErrorInvalidValue"):
        pair.stores[0].push(pair.keys, pair.given)
    pair.stores[0].push(pair.keys, pair.given)
    pair.stores[1].push(pair.keys, numbers)
    pair.pull()


def test_a_move_to_a_gpu_that_fails_leaves_nothing_there(
    machine: Machine, torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, stores = ["a", "b"], [kvstore.create("device"), kvstore.create("local")]
    given = [np.ones(1000, np.float32)] * 2
    for each in stores:
        each.init(keys, given)
        each.set_optimizer("adam", learning_rate=0.1)
        each.push(keys, given)
    tensors, set_state = [torch.tensor(each) for each in given], Values.set_state
    backend: Any = stores[0]._backend

    def fail(of: Values, shard: int, state: Any) -> None:
        set_state(of, shard, state)
        if of.device.is_gpu and shard:
            raise KVError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(Values, "set_state", fail)
        for _ in range(3):
            with pytest.raises(KVError, match=r"a.*b.*no memory"):
                stores[0].push(keys, tensors)
            (there,) = [each for each in backend._weights._values.values() if each.device.is_gpu]
            assert (there.store.count, there.steps.max()) == (0, -1)
    outs = [[np.empty(1000, np.float32) for _ in keys] for _ in stores]
    for each, values_of_push, out in zip(stores, (tensors, given), outs, strict=True):
        each.push(keys, values_of_push)
        each.pull(keys, out=out)
    assert np.array_equal(*outs)


def test_another_learning_rate_leaves_values_on_the_gpu_beside_one_that_was_never_updated(torch: Torch) -> None:
    with kvstore.create("device") as kv:
        kv.init(["a", "frozen"], [np.ones(10, np.float32), np.ones(10, np.float16)])
        kv.push(["a", "frozen"], [torch.tensor(np.ones(10, np.float32)), torch.tensor(np.ones(10, np.float16))])
        kv.set_optimizer("sgd", learning_rate=0.1, momentum=0.9)
        kv.push("a", torch.tensor(np.ones(10, np.float32)))
        backend: Any = kv._backend
        kv.set_learning_rate(0.2)
        assert backend._weights.kept["a"].values.device.is_gpu


def test_a_rule_for_host_memory_leaves_no_plan_that_keeps_memory_of_the_gpu(torch: Torch) -> None:
    pair = Pair(torch, rule="sgd")
    for _ in range(3):
        pair.push(2)
    backend: Any = pair.stores[0]._backend
    on_gpu = weakref.ref(backend._weights.kept["k0"].values)
    pair.stores[0].set_optimizer("lamb", learning_rate=0.1, replace=True)
    gc.collect()
    assert on_gpu() is None


def test_values_that_go_to_a_gpu_and_back_have_their_old_places_in_host_memory(torch: Torch) -> None:
    pair = Pair(torch)
    backend: Any = pair.stores[0]._backend
    for each in pair.stores:
        each.init("rows", kvstore.RowSparse(np.ones((1, 2), np.float32), [0], (4, 2)))  # it stays in host memory
    extents = []
    for _ in range(3):
        for rule in ("sgd", "lamb"):
            for each in pair.stores:
                each.set_optimizer(rule, learning_rate=0.1, replace=True)
            pair.push(1)
            pair.pull()
        extents.append(backend._weights.kept["rows"].values.extent())
    assert extents[0] == extents[1] == extents[2]


def test_states_that_are_loaded_leave_no_plan(torch: Torch, tmp_path: Path) -> None:
    pair = Pair(torch, rule="sgd")
    for _ in range(3):
        pair.push(2)
    pair.stores[0].save_states(tmp_path)
    pair.stores[0].load_states(tmp_path)
    backend: Any = pair.stores[0]._backend
    assert backend._weights.plans is None


def test_a_function_that_cannot_be_put_in_place_of_a_rule_leaves_the_rule(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KVError("no memory")

    pair = Pair(torch, rule="adam")
    pair.push(2)
    with monkeypatch.context() as patch, pytest.raises(KVError, match="no memory"):
        patch.setattr(Values, "set_state", fail)
        pair.stores[0].set_updater(lambda *_: None)
    for _ in range(2):
        pair.push(2)
        pair.pull()


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_tensors_that_come_in_turn_are_planned_once_each(machine: Machine, torch: Torch, rule: str) -> None:
    pair = Pair(torch, rule=rule)
    both, counts = [pair.tensors(2), pair.tensors(2)], []
    for turn in range(8):
        pair.given = both[turn % 2]
        numbers = pair.fill(2)
        counts.append(calls_of(machine, lambda: pair.stores[0].push(pair.keys, pair.given)))
        pair.stores[1].push(pair.keys, numbers)
        pair.pull()
    assert counts[-4:] == [5] * 4


def test_lists_of_parameters_and_tensors_are_read_alike(torch: Torch) -> None:
    class Parameter(GpuTensor):
        """torch.nn.Parameter."""

    Parameter.__module__ = "torch.nn.parameter"
    pair = Pair(torch, rule="sgd")
    classes = itertools.cycle([Parameter, GpuTensor])
    pair.outs = [[kind(torch, *what, 0)] for kind, *what in zip(classes, SHAPES, pair.kinds, strict=False)]
    for _ in range(3):
        pair.push(2)
        pair.pull()


@SEEDS
def test_arrays_of_two_libraries_are_ordered_after_both_their_streams(
    machine: Machine, torch: Torch, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class ndarray:
        """cupy.ndarray, of a tensor's memory."""

        def __init__(self, tensor: GpuTensor) -> None:
            self.shape, self.dtype, self.strides = tensor.shape, tensor.kind, (tensor.kind.itemsize,)
            self.data = SimpleNamespace(ptr=tensor.data_ptr(), mem=tensor)
            self.device, self.flags = SimpleNamespace(id=0), SimpleNamespace(c_contiguous=True)

    ndarray.__module__ = "cupy"
    usual, side = torch.cuda.current_stream(0), torch.new_stream(0)
    stream = SimpleNamespace(ptr=usual.cuda_stream, is_capturing=lambda: False)
    runtime = SimpleNamespace(is_hip=False)
    cuda = SimpleNamespace(runtime=runtime, get_current_stream=lambda device: stream)
    with kvstore.create("device") as kv:
        kv.init("w", np.zeros(1000, np.float32))
        gradient = torch.tensor(np.ones(1000, np.float32))
        monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=ndarray, cuda=cuda))
        with torch.stream(side):
            out = torch.tensor(np.zeros(1000, np.float32))
        for turn in range(8):
            gradient.set(np.full(1000, turn, np.float32))
            with torch.stream(side):
                kv.pushpull("w", ndarray(gradient), out=out)
                assert set(out.get().tolist()) == {turn}


@SEEDS
def test_a_list_that_the_program_changes_after_a_call_leaves_the_tensors_kept(torch: Torch, seed: int) -> None:
    pair, other, given = Pair(torch, rule="sgd"), torch.new_stream(0), list[GpuTensor]()
    for _ in range(6):
        numbers = pair.fill(1, is_fresh=True)
        given[:], pair.given = [each for some in pair.given for each in some], []
        other.wait_stream(torch.cuda.current_stream(0))
        with torch.stream(other):  # not the one on which the memory is used again
            pair.stores[0].push(pair.keys, given)
        given.clear()
        pair.stores[1].push(pair.keys, numbers)
        pair.fill(2, is_fresh=True)
        torch.cuda.current_stream(0).wait_stream(other)
        pair.pull()


def test_the_same_tensors_in_lists_of_another_form_are_refused(torch: Torch) -> None:
    with kvstore.create("device") as kv:
        kv.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
        given = [torch.tensor(np.ones(3, np.float32)) for _ in range(4)]
        for _ in range(3):
            kv.push(["a", "b"], [given[:2], given[2:]])
        for other in ([given], [[each] for each in given], given):
            with pytest.raises(KVError, match=f"2 keys, but {len(other)}"):
                kv.push(["a", "b"], other)


def test_a_call_while_a_graph_is_captured_calls_no_driver(machine: Machine, torch: Torch) -> None:
    pair = Pair(torch)
    for _ in range(2):
        pair.push(2)
        pair.pull()
    fresh = pair.tensors(2)
    torch.capturing.add(0)

    def refused() -> None:
        with pytest.raises(KVError, match="capturing"):
            pair.stores[0].push(pair.keys, fresh)

    assert calls_of(machine, refused) == 0
    torch.capturing.clear()


READS = """
import torch

tensor = torch.Tensor
of_each = [torch.nn.Parameter(torch.zeros(3)), torch.zeros(2), torch.nn.Buffer(torch.zeros(1))]
for read in (tensor.data_ptr, tensor.get_device, tensor.is_contiguous, tensor.is_neg):
    assert len(list(map(read, of_each))) == 3
assert [torch.zeros(1, 2).shape] == [(1, 2)]
for shape in ((3,), (3, 1), (1, 3), (2, 2), (1,), ()):
    shown = torch.randn(shape, dtype=torch.complex64).conj().imag
    assert shown.is_neg()
    assert shown.is_contiguous() == (shown.numel() == 1)
for other in (torch.zeros(1).to_sparse(), 3):
    try:
        tensor.data_ptr(other)
    except (RuntimeError, TypeError):
        continue
    raise AssertionError(other)
"""


@pytest.mark.peers
def test_torch_has_what_a_plan_reads_and_negates_lazily_only_what_is_not_contiguous() -> None:
    done = subprocess.run(
        [python_of("torch"), "-c", READS], capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert done.returncode == 0, done.stderr
