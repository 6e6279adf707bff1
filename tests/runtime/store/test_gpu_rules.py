"""A `device` store whose values come from GPUs: weights and states are there, with the bytes of a `local` store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakearrays import FakeTorch
from fakearrays import put as libraries
from gpukit import Machine, gpus_of_process, values
from gpustores import Store, put
from slowness import scaled

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.device import is_on_host
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import RowSparse
from distrun_runtime.ops import fuse
from distrun_runtime.ops.optimizers import RULES, RuleSpec, change_of, make
from distrun_runtime.store import weights
from distrun_runtime.store.base import CallOptions
from distrun_runtime.store.compress import Compression
from distrun_runtime.store.keys import KeyRecord
from distrun_runtime.store.local import LocalBackend
from distrun_runtime.store.reducer import reducer_for

F32 = np.dtype(np.float32)
SHAPES = {"w": (7, 3), "b": (5,)}


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine(2)
    yield machine
    machine.finish()


class Pair:
    """A `device` store that gets values from GPUs, and a `local` one that gets the same from host memory."""

    def __init__(self, machine: Machine, dtype: Any = F32) -> None:
        self.machine = machine
        first = {key: values(shape, dtype, number) for number, (key, shape) in enumerate(SHAPES.items())}
        self.device, self.local = (Store(LocalBackend(kind), dict(first)) for kind in ("device", "local"))
        self.dtype = dtype
        self.turn = 0

    def both(self, work: Callable[[LocalBackend], object]) -> None:
        for store in (self.device, self.local):
            assert isinstance(store.backend, LocalBackend)
            work(store.backend)

    def push(self, *places: str, scale: float = 1.0) -> None:
        self.turn += 1
        given = [
            [values(shape, self.dtype, 100 * self.turn + 10 * number + k) for k in range(len(places))]
            for number, shape in enumerate(SHAPES.values())
        ]
        self.local.push(*given, scale=scale)
        moved = [[put(self.machine, place, each) for place, each in zip(places, its, strict=True)] for its in given]
        self.device.push(*moved, scale=scale)

    @property
    def weights(self) -> Any:
        backend: Any = self.device.backend
        return backend._weights

    @property
    def where(self) -> set[str]:
        """Names of the devices that have the weights, and the states, of the `device` store."""
        arrays = []
        for place in self.weights.kept.values():
            state = place.values.state_of(place.shard) or {}
            arrays += [place.array, *(part for part in state.values() if hasattr(part, "nbytes"))]
        return {"host" if is_on_host(array) else array.device.name for array in arrays}

    def kept(self, store: Store, key: str) -> list[object]:
        """Return the bytes of a key's weight and state."""
        weight, state = self._kept(store)[key]
        parts = [state[name] for name in sorted(state)]
        return [part.tobytes() if isinstance(part, np.ndarray) else part for part in (weight, *parts)]

    def _kept(self, store: Store) -> dict[str, tuple[Any, dict[str, Any]]]:
        """Return each key's weight and state, in host memory."""
        backend: Any = store.backend
        saved = [each.on_host() for each in backend._weights.saved()]
        return {key: (each.weight, each.state or {}) for key, each in zip(backend._weights.kept, saved, strict=True)}

    def take_over(self, key: str) -> None:
        """Let the `local` store have what the `device` store has of a key."""
        other: Any = self.local.backend
        place = other._weights.kept[key]
        weight, state = self._kept(self.device)[key]
        place.array[...] = weight.reshape(place.array.shape)
        place.values.set_state(place.shard, state)

    def check(self) -> None:
        for found, right in zip(self.device.pulled(), self.local.pulled(), strict=True):
            assert found.tobytes() == right.tobytes()
        mine, others = self._kept(self.device), self._kept(self.local)
        for key, (_, state) in others.items():
            assert mine[key][1].keys() == state.keys()
            for name, part in state.items():
                found = mine[key][1][name]
                same = found.tobytes() == part.tobytes() if isinstance(part, np.ndarray) else found == part
                assert same, name


FUSED = [name for name in RULES if not fuse.why_not(make(name, {}))]


@pytest.mark.parametrize("name", FUSED)
def test_rules_have_the_same_bytes_on_gpus(machine: Machine, name: str) -> None:
    pair = Pair(machine)
    pair.both(lambda backend: backend.set_rule(RuleSpec.of(name, {}), False))
    pair.push("gpu:0")
    assert pair.where == {"gpu:0"}
    pair.push("gpu:0", "gpu:1", "gpu:0/1")
    pair.push("gpu:1", scale=0.5)
    pair.both(lambda backend: backend.change_rule(change_of({"rescale_grad": 0.25})))
    pair.push("gpu:0")
    assert pair.where == {"gpu:0"}
    pair.check()


def test_a_push_of_many_keys_launches_a_rule_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for copied_bytes, scale in ((1 << 20, 1.0), (1, 0.5)):
        monkeypatch.setattr(weights, "COPIED_BYTES", copied_bytes)
        pair = Pair(machine)
        pair.both(lambda backend: backend.set_rule(RuleSpec.of("adam", {}), False))
        pair.push("gpu:0", "gpu:0")
        before = machine.standin.calls["launch"]
        pair.push("gpu:0", "gpu:0", scale=scale)
        launched.append(machine.standin.calls["launch"] - before)
    assert launched == [2, 7], "sum and rule; with little room for scaled sums, two copies, scales and steps"
    pair.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_masters_of_sixteen_bit_weights_are_on_the_gpu(machine: Machine, dtype: str) -> None:
    pair = Pair(machine, dtypes.parse(dtype))
    pair.both(lambda backend: backend.set_rule(RuleSpec.of("adam", {"multi_precision": True}), False))
    pair.push("gpu:0")
    pair.push("gpu:0", "gpu:0/1")
    assert pair.where == {"gpu:0"}
    pair.check()
    assigned = [(record, values(record.shape, pair.dtype, 7)) for record in pair.device.keys.records]
    pair.both(lambda backend: backend.assign(assigned, 0))
    pair.push("gpu:0")
    pair.check()
    assert pair.where == {"gpu:0"}


@pytest.mark.parametrize("dtype", dtypes.NAMES)
def test_without_a_rule_the_scaled_sum_replaces_the_weight_on_its_gpu(machine: Machine, dtype: str) -> None:
    pair = Pair(machine, dtypes.parse(dtype))
    scale = 0.5 if dtypes.is_float(pair.dtype) else 3.0
    for places in (["gpu:1"], ["gpu:0", "host"], ["gpu:1", "gpu:0"]):
        pair.push(*places, scale=scale)
        assert pair.where == {"gpu:1"}
        pair.check()
    assigned = [(record, values(record.shape, pair.dtype, 7)) for record in pair.device.keys.records]
    pair.both(lambda backend: backend.assign(assigned, 0))
    assert pair.where == {"gpu:1"}
    pair.check()


@pytest.mark.parametrize("rule", ["", "adam"])
def test_weight_and_state_stay_on_their_gpu_whatever_their_sums_are_on(machine: Machine, rule: str) -> None:
    pair = Pair(machine)
    if rule:
        pair.both(lambda backend: backend.set_rule(RuleSpec.of(rule, {}), False))
    for places, scale in ((["gpu:0"], 1.0), (["host", "host"], 1.0), (["gpu:1"], 1.0), (["host"], 0.5)):
        pair.push(*places, scale=scale)
        assert pair.where == {"gpu:0"}
        pair.check()


def test_values_that_cannot_come_back_to_host_memory_are_named_and_stay(machine: Machine) -> None:
    pair = Pair(machine)
    pair.push("gpu:0")
    machine.standin.fail("copy", nth=2, code=1)
    with pytest.raises(KVError, match=r"keys 'w', 'b': copy on gpu:0 failed"):
        pair.device.backend.set_rule(RuleSpec.of("lamb", {}), False)
    assert pair.where == {"gpu:0"}
    pair.check()


class Halving:
    """An updater."""

    def __call__(self, key: Any, received: Any, stored: Any) -> None:
        stored += received / 2


@pytest.mark.parametrize("what", ["updater", "lamb", "sgld", "rules_of_users:Sign"])
def test_what_no_kernel_can_do_is_done_in_host_memory(machine: Machine, what: str) -> None:
    pair = Pair(machine)
    pair.push("gpu:0")
    assert pair.where == {"gpu:0"}
    if what == "updater":
        pair.both(lambda backend: backend.set_updater(Halving()))
    else:
        pair.both(lambda backend: backend.set_rule(RuleSpec.of(what, {}), True))
    pair.push("gpu:0", "gpu:1")
    pair.push("gpu:0")
    assert pair.where == {"host"}
    pair.check()


def test_a_rule_in_place_of_another_takes_over_what_both_know(machine: Machine) -> None:
    pair = Pair(machine)
    pair.both(lambda backend: backend.set_rule(RuleSpec.of("adam", {}), False))
    pair.push("gpu:0")
    for name in ("adamw", "sgd", "lamb", "adam"):
        pair.both(lambda backend, name=name: backend.set_rule(RuleSpec.of(name, {}), True))
        pair.push("gpu:0")
        assert pair.where == {"host" if name == "lamb" else "gpu:0"}
        pair.check()


@pytest.mark.parametrize(("name", "call"), [("adam", "load"), ("adam", "copy"), ("lamb", "copy")])
def test_a_rule_that_cannot_be_put_in_place_of_another_changes_nothing(machine: Machine, name: str, call: str) -> None:
    pair = Pair(machine)
    pair.both(lambda backend: backend.set_rule(RuleSpec.of("sgd", {"momentum": 0.9}), False))
    pair.push("gpu:0")
    for nth in (1, 2, 3, 4) if call == "copy" else (1,):
        machine.standin.fail(call, nth=nth, code=1)
        with pytest.raises(KVError, match="%s on gpu:0 failed" % call):
            pair.device.backend.set_rule(RuleSpec.of(name, {}), True)
        assert pair.weights.spec.name == "sgd"
        assert pair.where == {"gpu:0"}
        pair.check()
    pair.push("gpu:0")
    pair.check()
    pair.both(lambda backend: backend.set_rule(RuleSpec.of(name, {}), True))
    pair.push("gpu:0")
    pair.check()


def test_row_sparse_keys_stay_in_host_memory_beside_dense_ones_on_a_gpu(machine: Machine) -> None:
    store = Store(LocalBackend("device"), {"t": RowSparse.empty((4, 2), "float32"), "w": np.zeros(3, F32)})
    store.backend.set_rule(RuleSpec.of("sgd", {"learning_rate": 1.0}), False)
    rows = RowSparse(np.ones((2, 2), F32), [3, 1], (4, 2))
    store.push([rows], [machine.gpus.get(0).put(np.ones(3, F32))])
    taken: list[Any] = []
    store.backend.pull_rows([(store.records["t"], np.array([1, 2]), taken.append)], CallOptions())
    assert taken[0].tolist() == [[-1, -1], [0, 0]]
    assert store.pulled()[1].tolist() == [-1, -1, -1]
    store.backend.close()


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_states_that_are_saved_on_one_device_are_loaded_on_the_other(
    machine: Machine, name: str, tmp_path: Path
) -> None:
    folders = [str(tmp_path / "device"), str(tmp_path / "local")]
    pair = Pair(machine)
    spec = RuleSpec.of(name, {"momentum": 0.9} if name == "sgd" else {})
    pair.both(lambda backend: backend.set_rule(spec, False))
    pair.push("gpu:0", "gpu:1")
    for store, folder in zip((pair.device, pair.local), folders, strict=True):
        store.backend.save(folder)
    other = Pair(machine)
    other.push("gpu:1")
    other.device.backend.load(folders[1])
    other.local.backend.load(folders[0])
    for each in (pair, other):
        each.turn = 9
        each.push("gpu:0")
        each.check()
    for found, right in zip(other.device.pulled(), pair.device.pulled(), strict=True):
        assert found.tobytes() == right.tobytes()


def test_a_closed_store_gives_its_memory_back(machine: Machine) -> None:
    pair = Pair(machine)
    pair.both(lambda backend: backend.set_rule(RuleSpec.of("adam", {}), False))
    pair.push("gpu:0")
    pair.push("gpu:1", "gpu:0")
    assert machine.gpus.get(0).pool.size > 0
    pair.device.backend.close()
    assert machine.gpus.get(0).pool.size == 0


def test_each_gpus_values_are_compressed_with_a_residual_of_their_own(machine: Machine) -> None:
    found = []
    for kind in ("host", "gpu:1"):
        store = Store(LocalBackend("device"), {"w": np.zeros(40, F32)})
        store.backend.compress(Compression.of({"type": "2bit", "threshold": 0.5, "min_size": 0}), None)
        for _ in range(5):
            store.push([put(machine, kind, np.full(40, value, F32)) for value in (0.4, 0.1)])
        found.append(store.pulled()[0].tobytes())
        with pytest.raises(KVError, match="key 'w'"):
            store.push([put(machine, kind, np.full(40, np.nan, F32))])
    assert found[0] == found[1] == np.full(40, 1.0, F32).tobytes()


# Compiling

NAMES = ("float32", "float16", "float64")
SETTING = Compression.of({"type": "2bit", "threshold": 0.5, "min_size": 0})
STEPS: dict[str, Callable[[Store], object]] = {
    "rule": lambda store: store.backend.set_rule(RuleSpec.of("adam", {}), False),
    "codec": lambda store: store.backend.compress(SETTING, None),
}


class Loads:
    """What a machine, which is that of the process, has loaded: a program and a device for each call."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[str, int]] = []
        load = machine.standin.load

        def noted(program: Any, device: int) -> Any:
            self.found.append((program.key, device))
            return load(program, device)

        monkeypatch.setattr(machine.standin, "load", noted)

    @property
    def devices(self) -> set[int]:
        return {device for _, device in self.found}

    def check(self) -> int:
        """Return how many there are; none was loaded twice."""
        assert len(set(self.found)) == len(self.found)
        return len(self.found)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    """A torch that works on gpu:1."""
    torch = FakeTorch()
    torch.is_used, torch.device = True, 1
    libraries(monkeypatch, torch)
    return torch


def of_each_dtype(machine: Machine, place: str, value: float = 1) -> list[list[Any]]:
    return [[put(machine, place, np.full(4, value, name)) for _ in range(2)] for name in (*NAMES, *NAMES)]


def keys_of_each_dtype() -> dict[Any, Any]:
    """Return two keys of each, which can be updated by one kernel."""
    return {(name + end): np.zeros(4, name) for end in ("", " too") for name in NAMES}


@pytest.mark.parametrize("order", ["init rule codec", "rule init codec", "codec rule init", "init", "init codec"])
def test_after_init_no_push_waits_for_a_compiler(torch: FakeTorch, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    backend = LocalBackend("device")
    with gpus_of_process(Machine(2)) as machine:
        loads, store = Loads(machine, monkeypatch), Store(backend, {})
        for step in order.split():
            if step == "init":
                store = Store(backend, keys_of_each_dtype())
            else:
                STEPS[step](store)
        ready = loads.check()
        assert loads.devices == {1}
        for value in (1, 2):
            store.push(*of_each_dtype(machine, "gpu:1", value))
        store.pulled()
        assert loads.check() == ready
        # A GPU that comes with a push gets all of it with this one.
        store.push(*of_each_dtype(machine, "gpu:0"))
        assert loads.check() == 2 * ready
        backend.close()
        machine.finish()


def test_keys_that_come_later_are_prepared_with_the_rule_on_the_gpus_that_are_known(
    torch: FakeTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend("device")
    with gpus_of_process(Machine(2)) as machine:
        loads, store = Loads(machine, monkeypatch), Store(backend, {"w": np.ones(4, F32)})
        STEPS["rule"](store)
        late = Store(backend, {"h": np.ones(4, np.float16)})
        ready = loads.check()
        late.push([put(machine, "gpu:1", np.ones(4, np.float16)) for _ in range(2)])
        assert loads.check() == ready
        backend.close()
        machine.finish()


def test_a_script_whose_library_has_only_been_imported_compiles_nothing_at_init(torch: FakeTorch) -> None:
    torch.is_used = False
    with gpus_of_process(Machine(2)) as machine:
        kv = kvstore.create("device")
        kv.init("w", np.ones(4, F32))
        assert machine.standin.calls["load"] == machine.standin.calls["make_stream"] == 0
        torch.is_used = True
        kv.init("v", np.ones(4, F32))
        assert machine.standin.calls["load"] > 0
        kv.close()


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_stores_that_sum_in_host_memory_compile_nothing(torch: FakeTorch, kind: str) -> None:
    with gpus_of_process(Machine(2)) as machine:
        reducer_for(kind).prepare([KeyRecord.of("w", 0, np.ones(4, F32))])
        assert machine.standin.calls["load"] == 0


def test_a_kernel_that_does_not_compile_is_told_by_key_and_nothing_is_initialised(torch: FakeTorch) -> None:
    with gpus_of_process(Machine(2)) as machine:
        kv = kvstore.create("device")
        kv.init("a", np.ones(4, F32))
        machine.standin.fail("load", code=1)
        with pytest.raises(KVError, match=r"key 'w' \(float16\): load on gpu:1 failed"):
            kv.init(["b", "w"], [np.ones(4, F32), np.ones(4, np.float16)])
        kv.init(["b", "w"], [np.ones(4, F32), np.ones(4, np.float16)])
        out = np.zeros(4, np.float16)
        kv.pull("w", out)
        assert out.tolist() == [1] * 4
        kv.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_rule_or_codec_that_does_not_compile_leaves_the_store_as_it_was(torch: FakeTorch, step: str) -> None:
    with gpus_of_process(Machine(2)) as machine:
        store = Store(LocalBackend("device"), keys_of_each_dtype())
        machine.standin.fail("load", code=1)
        with pytest.raises(KVError, match="load on gpu:1 failed"):
            STEPS[step](store)
        assert not store.backend.compresses
        store.push(*of_each_dtype(machine, "gpu:1", 0.25))
        for found in store.pulled():
            assert found.tolist() == [0.5] * 4  # the sum, as it is
        STEPS[step](store)
        store.backend.close()
        machine.finish()


def test_a_push_whose_gpu_cannot_compile_leaves_residuals_and_weights(machine: Machine) -> None:
    store = Store(LocalBackend("device"), {"w": np.zeros(4, F32), "v": np.zeros(4, F32)})
    STEPS["codec"](store)
    store.push(*[[put(machine, "gpu:0", np.full(4, 0.3, F32))] for _ in range(2)])
    machine.standin.fail("load", nth=2, code=1)
    given = [[put(machine, "gpu:1", np.full(4, 0.3, F32))] for _ in range(2)]
    with pytest.raises(KVError, match=r"key 'w' \(float32\): load on gpu:1 failed"):
        store.push(*given)
    assert [found.tolist() for found in store.pulled()] == [[0] * 4] * 2
    store.push(*given)
    assert [found.tolist() for found in store.pulled()] == [[0.5] * 4] * 2
    store.backend.close()


@pytest.mark.parametrize("step", STEPS)
def test_a_rule_or_codec_and_a_gpu_that_come_at_once_find_each_other(
    machine: Machine, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread pushes from a new GPU first, while a rule or codec is being compiled for the one that is known."""
    store = Store(LocalBackend("device"), {"w": np.zeros(4, F32)})
    first, other = ([[put(machine, place, np.ones(4, F32))]] for place in ("gpu:0", "gpu:1"))
    store.push(*first)
    load, pushed = machine.standin.load, threading.Event()

    def push() -> None:
        store.backend.reducer.reduce([(store.records["w"], other[0])])
        pushed.set()

    pushing = threading.Thread(target=push, name="push")

    def loaded_during_a_push(program: Any, device: int) -> Any:
        if pushing.ident is None:
            pushing.start()
            pushed.wait(0.3)  # it may have to wait until this is over
        return load(program, device)

    monkeypatch.setattr(machine.standin, "load", loaded_during_a_push)
    STEPS[step](store)
    pushing.join(scaled(30))
    assert pushed.is_set()
    loads = Loads(machine, monkeypatch)
    store.push(*other)
    assert loads.check() == 0
    store.backend.close()


# Failures


def test_too_little_memory_fails_by_keys_of_which_none_is_updated_and_the_store_goes_on(machine: Machine) -> None:
    gpu = machine.gpus.get(0)
    gpu.pool.limit = 40 * 1024
    store = Store(LocalBackend("device"), {"small": np.zeros(100, F32), "large": np.zeros(7000, F32)})
    store.backend.set_rule(RuleSpec.of("adam", {}), False)
    given = [[gpu.put(np.ones(100, F32))], [gpu.put(np.ones(7000, F32))]]
    for _ in range(2):
        with pytest.raises(KVError, match=r"keys 'small', 'large': alloc on gpu:0 failed: .* wanted \d+ bytes"):
            store.push(*given)
    with pytest.raises(KVError, match=r"key 'large': alloc on gpu:0 failed"):
        store.backend.reducer.reduce([(store.records["large"], given[1] * 2)])
    assert not any(found.any() for found in store.pulled())
    store.push([np.ones(100, F32)], [np.ones(7000, F32)])  # in host memory there is room
    assert all(found.any() for found in store.pulled())
    gpu.pool.limit = 64 * 1024 * 1024
    store.push(*given)
    assert all(found.any() for found in store.pulled())
    store.backend.close()


@pytest.mark.parametrize("call", ["copy", "launch", "record", "wait", "alloc"])
def test_a_call_that_fails_once_leaves_the_store_usable(call: str) -> None:
    told: list[str] = []
    for nth in range(1, 100):
        machine = Machine(2)
        pair = Pair(machine)
        pair.both(lambda backend: backend.set_rule(RuleSpec.of("sgd", {"momentum": 0.9}), False))
        pair.push("gpu:0")
        before = {key: pair.kept(pair.device, key) for key in SHAPES}
        machine.standin.fail(call, nth=nth, code=1)
        try:
            pair.push("gpu:0", "gpu:1")
        except KVError as err:
            told.append(str(err))
        if len(told) < nth:
            break
        # Each key was updated, or was not; the other store goes on from there.
        for key, kept in before.items():
            now = pair.kept(pair.device, key)
            assert now in (kept, pair.kept(pair.local, key))
            pair.take_over(key)
        pair.push("gpu:0")
        assert pair.where == {"gpu:0"}
        pair.check()
        pair.device.backend.close()
        machine.finish()
    assert len(told) > 2
    assert all("on gpu:" in text and "invalid argument" in text for text in told)
