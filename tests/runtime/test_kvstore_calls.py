"""The arguments of a store's public calls: what is taken, and what is refused before anything changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrun_runtime import kvstore
from distrun_runtime.arrays.dtypes import BFLOAT16, Array
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore, RowSparse

SHAPES = {"a": (2,), "b": (), "t": (4, 2)}
DTYPES = {"a": np.float32, "b": np.int64, "t": np.float32}


@pytest.fixture
def kv() -> KVStore:
    """A store with zeros: `a` (2 float32), `b` (an int64) and `t` (row-sparse, 4 rows of 2 float32)."""
    store = kvstore.create("local")
    store.init(["a", "b", "t"], [np.zeros(2, np.float32), np.zeros((), np.int64), RowSparse.empty((4, 2))])
    return store


def pulled(kv: KVStore, key: str) -> Any:
    out = np.full(SHAPES[key], -1, DTYPES[key])
    kv.pull(key, out)
    return out.tolist()


def is_unchanged(kv: KVStore) -> bool:
    return bool(kv.stats()[0]["updates"] == 0 and kv.stats()[0]["keys"] == 3 and kv.stats()[0]["bytes_out"] == 0)


# Values and outputs


def test_values_of_one_key_are_summed_also_if_the_key_is_repeated_and_left_as_they_are(kv: KVStore) -> None:
    values = [np.ones(2, np.float32), np.full(2, 2, np.float32)]
    kv.push(["a", "b", "a"], [values[0], np.int64(5), values[1]])
    assert (pulled(kv, "a"), pulled(kv, "b")) == ([3, 3], 5)
    assert [value.tolist() for value in values] == [[1, 1], [2, 2]]


def test_pushpull_without_out_writes_into_the_pushed_arrays(kv: KVStore) -> None:
    values = [np.ones(2, np.float32), np.ones(2, np.float32)]
    kv.pushpull("a", values)
    assert [value.tolist() for value in values] == [[2, 2], [2, 2]]
    with pytest.raises(KVError, match=r"key 'b': an output is a numpy array that can be written, .*, not int64"):
        kv.pushpull("b", np.int64(1))
    assert pulled(kv, "b") == 0


def test_pushpull_with_out_pairs_repeated_keys(kv: KVStore) -> None:
    one = np.ones(2, np.float32)
    outs = [np.zeros(2, np.float32) for _ in range(3)]
    kv.pushpull(["a", "a"], [one, one], out=[outs[0], outs[1:]])
    assert [out.tolist() for out in outs] == [[2, 2]] * 3
    assert one.tolist() == [1, 1]


def test_a_broadcast_that_does_not_fit_initialises_nothing(kv: KVStore) -> None:
    with pytest.raises(KVError, match=r"key 'c': the output has shape \(3,\)"):
        kv.broadcast("c", np.ones(2), np.zeros(3))
    with pytest.raises(KVError, match="2 keys, but 1 outputs"):
        kv.broadcast(["c", "d"], [np.ones(2), np.ones(2)], [np.zeros(2)])
    assert is_unchanged(kv)
    kv.init("c", np.ones(2))


def test_a_call_without_keys_is_done_and_does_nothing(kv: KVStore) -> None:
    for pending in (
        kv.init([], []),
        kv.assign([], []),
        kv.broadcast([], [], []),
        kv.push([], [], wait=False),
        kv.pull([], []),
        kv.pushpull([], []),
        kv.skip_round([], {}),
        kv.row_sparse_pull([], [], row_ids=[1]),
    ):
        assert pending.is_done
        pending.wait(0)
    assert is_unchanged(kv)


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "assign"])
def test_a_key_never_initialised_is_an_error_that_names_the_near_one(kv: KVStore, call: str) -> None:
    with pytest.raises(KVError, match=r"key 'aa' was never initialised in this store of 3 keys \(near: 'a'\)"):
        getattr(kv, call)(["a", "aa"], [np.ones(2, np.float32), np.ones(2, np.float32)])
    assert is_unchanged(kv)
    assert pulled(kv, "a") == [0, 0]
    with pytest.raises(KVError, match="in this store of 3 keys; call init first"):
        getattr(kv, call)("weight", np.ones(2, np.float32))


def test_an_int_key_that_is_missing_names_the_near_one() -> None:
    kv = kvstore.create("local")
    kv.init([12, 7], [np.zeros(1), np.zeros(1)])
    with pytest.raises(KVError, match=r"key 2 was never initialised in this store of 2 keys \(near: 12\)"):
        kv.push(2, np.zeros(1))


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "init"])
def test_a_key_of_the_other_kind_is_an_error_that_names_both(kv: KVStore, call: str) -> None:
    with pytest.raises(KVError, match="key 3 is int, key 'a' is str"):
        getattr(kv, call)(3, np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("call", "noun"),
    [("push", "pushed value"), ("pull", "output"), ("pushpull", "pushed value"), ("assign", "assigned value")],
)
@pytest.mark.parametrize("value", [np.ones(3, np.float32), np.ones(2), np.ones((2, 1), np.float32)])
def test_another_shape_or_dtype_is_an_error_that_names_both(kv: KVStore, call: str, noun: str, value: Array) -> None:
    words = r"key 'a': the %s has shape .* and dtype .*, but the key has shape \(2,\) and dtype float32 since" % noun
    with pytest.raises(KVError, match=words):
        getattr(kv, call)(["b", "a"], [np.array(1), value])
    assert is_unchanged(kv)
    assert pulled(kv, "b") == 0


def test_an_array_that_only_has_the_keys_memory_layout_does_not_fit_but_its_shape_does() -> None:
    kv = kvstore.create("local")
    kv.init("w", np.zeros((2, 3)))
    kv.push("w", np.ones((3, 2)).T)
    with pytest.raises(KVError, match=r"the pushed value has shape \(6,\)"):
        kv.push("w", np.ones(6))


def test_bfloat16_is_called_by_its_name() -> None:
    kv = kvstore.create("local")
    kv.init("w", np.zeros(2, BFLOAT16))
    with pytest.raises(KVError, match=r"and dtype uint16, but the key has .* and dtype bfloat16 since its init"):
        kv.push("w", np.zeros(2, np.uint16))
    with pytest.raises(KVError, match=r"and dtype float16, but the key has .* and dtype bfloat16 since its init"):
        kv.push("w", np.zeros(2, np.float16))
    with pytest.raises(KVError, match=r"already initialised with shape \(2,\) and dtype bfloat16"):
        kv.init("w", np.zeros(2, BFLOAT16))


def test_a_second_init_is_an_error_that_says_what_the_first_one_set(kv: KVStore) -> None:
    with pytest.raises(KVError, match=r"key 'a' was already initialised with shape \(2,\) and dtype float32; init "):
        kv.init(["c", "a"], [np.zeros(1), np.zeros(2)])
    with pytest.raises(KVError, match="key 'a' was already initialised"):
        kv.broadcast("a", np.zeros(2), np.zeros(2))
    kv.init("c", np.zeros(1))


@pytest.mark.parametrize("priority", [1.5, "1", None])
def test_a_priority_is_an_int(kv: KVStore, priority: Any) -> None:
    with pytest.raises(KVError, match="priority is an int"):
        kv.push("a", np.ones(2, np.float32), priority=priority)
    assert is_unchanged(kv)
    kv.push("a", np.ones(2, np.float32), priority=np.int32(4))  # type: ignore[arg-type]  # taken as an int
    assert pulled(kv, "a") == [1, 1]


@pytest.mark.parametrize("call", ["push", "pushpull"])
def test_a_scale_multiplies_the_contribution(kv: KVStore, call: str) -> None:
    getattr(kv, call)("a", np.ones(2, np.float32), scale=0.25)
    assert pulled(kv, "a") == [0.25, 0.25]
    getattr(kv, call)("b", np.array(1), scale=1)
    with pytest.raises(KVError, match=r"key 'b': int64 values are pushed with scale 1, not 0\.5"):
        getattr(kv, call)(["a", "b"], [np.ones(2, np.float32), np.array(1)], scale=0.5)
    for wrong in (float("nan"), "x", "2", None):
        with pytest.raises(KVError, match="scale is a finite number"):
            getattr(kv, call)("a", np.ones(2, np.float32), scale=wrong)
    assert pulled(kv, "a") == [0.25, 0.25]


# Row-sparse values


def test_a_row_sparse_value_for_a_dense_key_is_its_dense_value() -> None:
    kv = kvstore.create("local")
    kv.init("m", np.zeros((3, 2)))
    kv.push("m", [RowSparse(np.ones((1, 2)), [2], (3, 2)), np.ones((3, 2))])
    out = np.empty((3, 2))
    kv.pull("m", out)
    assert out.tolist() == [[1, 1], [1, 1], [2, 2]]


def test_an_array_for_a_row_sparse_key_has_all_its_rows_and_repeated_rows_are_summed(kv: KVStore) -> None:
    kv.push("t", [np.ones((4, 2), np.float32), RowSparse(np.ones((2, 2), np.float32), [1, 1], (4, 2))])
    assert pulled(kv, "t") == [[1, 1], [3, 3], [1, 1], [1, 1]]
    kv.push("t", RowSparse(np.ones((3, 2), np.float32), [3, 0, 3], (4, 2)))
    assert pulled(kv, "t") == [[1, 1], [0, 0], [0, 0], [2, 2]]


def test_a_row_sparse_value_that_does_not_fit_is_an_error(kv: KVStore) -> None:
    with pytest.raises(KVError, match=r"key 't': the pushed value has shape \(5, 2\)"):
        kv.push("t", RowSparse.empty((5, 2)))
    with pytest.raises(KVError, match="key 't': a RowSparse is filled by row_sparse_pull; pull writes whole arrays"):
        kv.pull("t", RowSparse.empty((4, 2)))
    assert is_unchanged(kv)


def test_assigned_rows_replace_the_whole_value(kv: KVStore) -> None:
    kv.push("t", np.ones((4, 2), np.float32))
    kv.assign(["a", "t"], [np.ones(2, np.float32), RowSparse(np.ones((1, 2), np.float32), [1], (4, 2))])
    assert (pulled(kv, "a"), pulled(kv, "t")) == ([1, 1], [[0, 0], [1, 1], [0, 0], [0, 0]])


# Rules


def floats() -> KVStore:
    """Return a store with the key `a`: zeros, 2 float32."""
    kv = kvstore.create("local")
    kv.init("a", np.zeros(2, np.float32))
    return kv


def test_a_rule_is_known_by_its_name_in_any_case_and_torchs_parameter_names() -> None:
    kv = floats()
    kv.set_optimizer("SGD", lr=0.5)
    kv.push("a", np.ones(2, np.float32))
    assert pulled(kv, "a") == [-0.5, -0.5]
    kv.set_optimizer("test", rescale=2, replace=True)
    kv.push("a", np.ones(2, np.float32))
    assert pulled(kv, "a") == [1.5, 1.5]


def test_an_unknown_rule_or_parameter_or_updater_changes_nothing(kv: KVStore) -> None:
    with pytest.raises(KVError, match="unknown rule 'lion'; known are adadelta, adagrad, adam, "):
        kv.set_optimizer("lion")
    with pytest.raises(KVError, match="did you mean 'momentum'"):
        kv.set_optimizer("sgd", momemtum=0.9)
    with pytest.raises(KVError, match="an updater is a function"):
        kv.set_updater("sgd")  # type: ignore[arg-type]  # what is tested
    kv.push("a", np.ones(2, np.float32))
    assert pulled(kv, "a") == [1, 1]  # the sum itself: there is no rule


def test_multipliers_are_a_dict_of_keys_which_may_come_later() -> None:
    kv = floats()
    kv.set_optimizer("sgd", lr=1.0)
    kv.set_multipliers(lr={"a": 2, "later": 0.5})
    for key in ("a", "later"):
        if key == "later":
            kv.init(key, np.zeros(2, np.float32))
        kv.push(key, np.ones(2, np.float32))
    out = np.empty(2, np.float32)
    kv.pull("later", out)
    assert (pulled(kv, "a"), out.tolist()) == ([-2, -2], [-0.5, -0.5])
    with pytest.raises(KVError, match="multipliers are a dict of key to number, not list"):
        kv.set_multipliers(lr=[1])  # type: ignore[arg-type]  # what is tested
    with pytest.raises(KVError, match="a key is an int or a str"):
        kv.set_multipliers(wd={1.5: 2})  # type: ignore[dict-item]  # what is tested


def test_compression_is_set_for_some_keys_or_for_all_others() -> None:
    kv = kvstore.create("device")
    for wrong in ({}, {"type": "3bit"}, {"type": "2bit", "treshold": 1}, "2bit"):
        with pytest.raises(KVError, match="compression"):
            kv.set_gradient_compression(wrong)  # type: ignore[arg-type]  # what is tested
    kv.set_gradient_compression({"type": "2bit", "min_size": 0})
    kv.set_gradient_compression({"type": "none"}, keys="x")
    kv.set_gradient_compression({"type": "none"}, keys=["y", "y"])
    kv.init(["x", "y", "z"], [np.zeros(2, np.float32)] * 3)
    kv.push(["x", "y", "z"], [np.full(2, 0.25, np.float32)] * 3)
    outs = [np.empty(2, np.float32) for _ in range(3)]
    kv.pull(["x", "y", "z"], outs)
    # 0.25 is below the threshold, 0.5 if none is given: a compressed push leaves it in the residual.
    assert [out[0] for out in outs] == [0.25, 0.25, 0]


# Facts and folders


def test_folders_may_be_paths_or_text(kv: KVStore, tmp_path: Path) -> None:
    kv.save_states(tmp_path / "states")
    kv.load_states(str(tmp_path / "states"))
    with kv.profile(tmp_path / "trace"):
        pass
    assert (tmp_path / "trace" / "worker-0.json").is_file()


@pytest.mark.parametrize("folder", [None, 3, b"states", ""])
def test_a_folder_that_is_no_path_is_refused(kv: KVStore, folder: Any) -> None:
    calls: list[Callable[[Any], object]] = [kv.save_states, kv.load_states, kv.profile]
    for call in calls:
        with pytest.raises(KVError, match="a folder is a path, such as 'states'"):
            call(folder)


@pytest.mark.parametrize("node_id", [0, 8, -1, "workers", None, 1.5])
def test_roles_that_are_none_are_refused(kv: KVStore, node_id: Any) -> None:
    with pytest.raises(KVError, match=r"a sum of 1 \(scheduler\), 2 \(servers\), 4 \(workers\), not "):
        kv.num_dead_node(node_id)
    assert kv.num_dead_node(np.int64(4), timeout=1) == 0  # type: ignore[arg-type]  # taken as an int


def test_a_store_is_capable_of_optimizers_and_knows_nothing_else(kv: KVStore) -> None:
    assert kv.is_capable("optimizer")
    unknown: Any
    for unknown in ("Optimizer", "flying", None):
        with pytest.raises(KVError, match=r"no capability .* is known"):
            kv.is_capable(unknown)


@pytest.mark.parametrize("keys", [[0, 1, 2], ["fc_weight", "fc_bias", "bn_gamma"]])
def test_names_decide_on_weight_decay_as_mxnets_param_idx2name_does(keys: list[Any]) -> None:
    names = {0: "fc_weight", 1: "fc_bias", 2: "bn_gamma"}
    for rule, expected in (("sgd", [0.5, 1, 0.5]), ("lars", [0.5, 1, 1])):
        with kvstore.create("local") as kv:
            kv.init(keys, [np.ones(1)] * 3)
            kv.set_optimizer(rule, learning_rate=1.0, wd=0.5, param_idx2name=names)
            kv.set_optimizer(rule, learning_rate=1.0, wd=0.5, param_idx2name=names)
            found = [np.empty(1) for _ in keys]
            kv.pushpull(keys, [np.zeros(1)] * 3, out=found)
            assert [float(one[0]) for one in found] == expected, rule


# Names of MXNet


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("_barrier", r"barrier\(\)"),
        ("_set_updater", r"set_updater\(function\)"),
        ("save_optimizer_states", r"save_states\(folder\)"),
        ("load_optimizer_states", r"load_states\(folder\)"),
        ("_send_command_to_servers", "set_optimizer"),
    ],
)
def test_an_old_name_of_a_call_is_an_error_that_says_the_present_one(kv: KVStore, name: str, now: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; MXNet's {name} is {now}.* here"):
        getattr(kv, name)
    assert not hasattr(kv, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'pusch'$"):
        kv.pusch  # noqa: B018


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("nccl", "device"),
        ("local_allreduce_device", "device"),
        ("local_update_cpu", "local"),
        ("local_allreduce_cpu", "local"),
        ("horovod", "dist_device_sync"),
        ("byteps", "dist_device_sync"),
    ],
)
def test_an_old_name_of_a_kind_is_an_error_that_says_the_present_one(name: str, now: str) -> None:
    with pytest.raises(KVError, match=rf"store type '{name}' is MXNet's; fix: .*create\('{now}'\); known are local, "):
        kvstore.create(name)


class NDArray:
    """As MXNet's: only `asnumpy` shows what is in it."""

    shape = (2,)
    dtype = np.float32

    def asnumpy(self) -> Array:
        return np.ones(2, np.float32)


def test_an_array_of_mxnet_is_refused_with_what_to_call(kv: KVStore) -> None:
    said = r"NDArray.*, an array of MXNet, which only MXNet can read; fix: call \.asnumpy\(\)"
    for call in (
        lambda: kv.init("new", NDArray()),
        lambda: kv.push("a", NDArray()),
        lambda: kv.push("a", [NDArray(), NDArray()]),
        lambda: kv.pushpull(["a", "b"], [NDArray(), np.array(1)]),
    ):
        with pytest.raises(KVError, match=said):
            call()
    with pytest.raises(KVError, match=r"pull into an array of numpy, and then x\[:\] = array"):
        kv.pull("a", out=NDArray())
    assert is_unchanged(kv)


def test_an_optimizer_that_is_given_as_an_object_is_refused_with_its_name(kv: KVStore) -> None:
    class SGD:
        """As MXNet's."""

    with pytest.raises(KVError, match=r"not as SGD; fix: give 'sgd', and its parameters by name"):
        kv.set_optimizer(SGD())  # type: ignore[arg-type]
