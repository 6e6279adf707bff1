"""Stores of others: registered in the process, or by the entry point of a distribution."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.store import base
from distrun_runtime.store.base import KVStoreBase

MODULE = """
from distrun_runtime.kvstore import KVStoreBase

class Ring(KVStoreBase):
    rank, num_workers, type = 0, 1, "ring"
    def broadcast(self, key, value, out, priority=0): out[...] = value
    def pushpull(self, key, value, out=None, priority=0): out[...] = 2 * value
    def is_capable(self, capability): return False

class NoStore:
    pass

not_a_class = 3
"""


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing that a test registers stay."""
    monkeypatch.setattr(base, "_classes", {})


def make(name: str = "Summing", **members: object) -> Any:
    """Return a new class that does the least that a store has to."""

    def broadcast(self: Any, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        for one in out if isinstance(out, list) else [out]:
            one[...] = value

    def pushpull(self: Any, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        values = value if isinstance(value, list) else [value]
        total = sum(values[1:], values[0].copy())
        for one in values if out is None else out if isinstance(out, list) else [out]:
            one[...] = total

    least = {
        "broadcast": broadcast,
        "pushpull": pushpull,
        "is_capable": lambda self, capability: False,
        "type": property(lambda self: name.lower()),
        "rank": property(lambda self: 0),
        "num_workers": property(lambda self: 1),
    }
    return type(name, (KVStoreBase,), {**least, **members})


def install(folder: Path, distribution: str, points: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a distribution with entry points importable, as pip would."""
    info = folder / ("%s-1.0.dist-info" % distribution)
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: %s\nVersion: 1.0\n" % distribution)
    (info / "entry_points.txt").write_text("[distrun.kvstores]\n%s\n" % points)
    (folder / "ring_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "ring_of_test", raising=False)
    importlib.invalidate_caches()


def test_a_registered_class_is_created_by_its_name_in_any_case() -> None:
    """Row: tests/python/unittest/test_kvstore_custom.py, the registry, type, is_capable; four devices."""
    kind = make()
    assert KVStoreBase.register(kind) is kind
    kv = kvstore.create("SUMMING")
    assert isinstance(kv, kind)
    assert (kv.type, kv.rank, kv.num_workers) == ("summing", 0, 1)
    assert not kv.is_capable(KVStoreBase.OPTIMIZER)
    values = [np.full(3, n) for n in range(1, 5)]
    kv.pushpull("w", values)
    assert all(value.tolist() == [10, 10, 10] for value in values)
    out = np.empty(3)
    kv.broadcast("w", np.ones(3), out)
    assert out.tolist() == [1, 1, 1]
    kv.close()


def test_what_a_store_leaves_out_is_not_implemented() -> None:
    """Row: tests/python/unittest/test_kvstore_custom.py, set_optimizer, save and load of a custom store."""
    kv = make()()
    for call in (
        lambda: kv.set_optimizer("sgd", learning_rate=1),
        lambda: kv.save_states("f"),
        lambda: kv.load_states("f"),
        lambda: kv.init("w", 1),
        lambda: kv.push("w", 1),
        lambda: kv.pull("w", 1),
        lambda: kv.row_sparse_pull("w", 1, row_ids=[1]),
        kv.barrier,
        kv.join,
        lambda: kv.set_gradient_compression({"type": "2bit"}),
    ):
        with pytest.raises(NotImplementedError, match="a 'summing' store has no "):
            call()


@pytest.mark.parametrize("lacks", ["broadcast", "pushpull", "is_capable", "type", "rank", "num_workers"])
def test_a_class_that_lacks_a_part_of_the_contract_cannot_be_created(lacks: str) -> None:
    kind = make(**{lacks: getattr(KVStoreBase, lacks)})
    KVStoreBase.register(kind)
    with pytest.raises(TypeError, match=lacks):
        kvstore.create("summing")


def test_our_own_stores_keep_the_contract() -> None:
    assert issubclass(KVStore, KVStoreBase)
    kv = kvstore.create("local")
    assert kv.is_capable("optimizer")
    with pytest.raises(KVError, match="no capability 'flying' is known"):
        kv.is_capable("flying")


def test_a_built_in_name_or_that_of_another_class_is_refused() -> None:
    for name in ("Local", "dist_sync", "Device"):
        with pytest.raises(KVError, match="is built in; give class %s another name" % name):
            KVStoreBase.register(make(name))
    KVStoreBase.register(make())
    KVStoreBase.register(make())  # the same class, defined again: as a notebook does
    with pytest.raises(KVError, match=r"'summing' is .*Summing already; give elsewhere\.Summing another name"):
        KVStoreBase.register(make(__module__="elsewhere"))


def test_an_entry_point_is_found_loaded_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "ring", "Ring = ring_of_test:Ring", monkeypatch)
    kv = kvstore.create("ring")
    assert kv.type == "ring"
    out = np.empty(2)
    kv.pushpull("w", np.ones(2), out)
    assert out.tolist() == [2, 2]
    with pytest.raises(KVError, match=r"store type 'rnig' \(did you mean 'ring'\?\); known are local, .*, ring"):
        kvstore.create("rnig")


def test_an_entry_point_with_a_built_in_name_is_refused_and_takes_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "thief", "Dist_Sync = ring_of_test:Ring\nring = ring_of_test:Ring", monkeypatch)
    with pytest.raises(KVError, match="'dist_sync' is built in, but ring_of_test:Ring of thief claims it too"):
        kvstore.create("ring")
    assert kvstore.create("local").type == "local"


def test_two_distributions_with_one_name_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", "one", "ring = ring_of_test:Ring", monkeypatch)
    install(tmp_path / "two", "two", "ring = ring_of_test:NoStore", monkeypatch)
    words = "more than once: .*(ring_of_test:Ring of one|ring_of_test:NoStore of two) and"
    with pytest.raises(KVError, match=words):
        kvstore.create("ring")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("ring_of_test:NoStore", "which is not derived from KVStoreBase"),
        ("ring_of_test:not_a_class", "'ring' is 3, which is not derived from KVStoreBase"),
        ("ring_of_test:Absent", "ring_of_test:Absent of ring.* cannot be loaded: .*Absent"),
        ("no_such_module_here:Ring", "cannot be loaded: No module named 'no_such_module_here'"),
    ],
)
def test_an_entry_point_that_is_no_store_says_whose_it_is(
    target: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "ring", "ring = %s" % target, monkeypatch)
    with pytest.raises(KVError, match=words):
        kvstore.create("ring")


def test_a_store_of_others_has_no_staleness_and_no_place_on_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    KVStoreBase.register(make())
    with pytest.raises(KVError, match="staleness bounds a dist_async store; a 'summing' store has none"):
        kvstore.create("summing", staleness=3)
    monkeypatch.setenv("DMLC_ROLE", "server")
    with pytest.raises(KVError, match="this process is a server"):
        kvstore.create("summing")


def test_a_store_of_ones_own_may_have_other_base_classes() -> None:
    class Other:
        def __init__(self) -> None:
            self.was_made = True

    Mixed = type("Mixed", (make(), Other), {"__init__": lambda self: super(Mixed, self).__init__()})
    assert Mixed().was_made
