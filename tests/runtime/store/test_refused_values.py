"""Values and outputs that no store takes: masked arrays, outputs in the same memory, lists of numbers for an array.

On a store of one process and in a job: the checks are made before anything is sent.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import Cluster

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.store.values import RowSparse

STORES = ("local", "device", "dist_sync", "dist_async")


@pytest.fixture(params=STORES)
def on_store(request: pytest.FixtureRequest) -> Callable[[Callable[[KVStore], Any]], Any]:
    """Return a function that calls a script with a store of one worker, and returns what the script does."""

    def run(script: Callable[[KVStore], Any]) -> Any:
        if "dist" not in request.param:
            with kvstore.create(request.param) as kv:
                return script(kv)
        with Cluster(1, servers=1, over="inproc") as job:
            return job.run(script, request.param)[0]

    return run


def two_keys(kv: KVStore) -> None:
    kv.init(["a", "b"], [np.full(4, 1.0), np.full(4, 2.0)])
    kv.set_optimizer("sgd", learning_rate=1.0)


def refused(text: str) -> Any:
    return pytest.raises(KVError, match=re.escape(text))


def test_one_output_for_two_keys_is_refused_with_both_keys(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        two_keys(kv)
        out, gradient = np.zeros(4), np.ones(4)
        with refused("keys 'a' and 'b': their outputs share memory"):
            kv.pull(["a", "b"], out=[out, out])
        with refused("keys 'b' and 'a': their outputs share memory"):
            kv.pushpull(["b", "a"], [gradient, gradient], out=[out, [np.zeros(4), out]])
        with refused("keys 'a' and 'b': their outputs share memory"):
            kv.pushpull(["a", "b"], [gradient, gradient])
        with refused("keys 'c' and 'd': their outputs share memory"):
            kv.broadcast(["c", "d"], [gradient, gradient], out=[out, out])
        assert out.tolist() == [0] * 4
        assert gradient.tolist() == [1] * 4
        # Nothing was pushed or initialised: the keys are as they were.
        kv.pull("a", out=out)
        assert out.tolist() == [1] * 4
        kv.broadcast(["c", "d"], [gradient, gradient], out=[out, np.zeros(4)])

    on_store(script)


def test_overlapping_views_of_one_array_are_refused_and_others_are_filled(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        two_keys(kv)
        line, table = np.zeros(9), np.zeros((4, 2))
        for one, other in ((line[:4], line[3:7]), (line[4:0:-1], line[:4]), (line[:4], line[0:7:2])):
            with refused("keys 'a' and 'b': their outputs share memory"):
                kv.pull(["a", "b"], out=[one, other])
        with refused("key 'a': two of its outputs share memory"):
            kv.pull("a", out=[line[:4], line[2:6]])
        assert not line.any()
        kv.pull(["a", "b"], out=[table[:, 0], table[:, 1]])
        assert table.tolist() == [[1, 2]] * 4
        kv.pull(["a", "b"], out=[line[:4], line[4:8]])
        assert line.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0]
        kv.pull("a", out=[line[4:8], line[4:8]])  # One key, one array: both want the same.
        assert line[4:8].tolist() == [1] * 4

    on_store(script)


def test_an_output_whose_elements_share_memory_is_refused(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", np.arange(6.0).reshape(2, 3))
        expanded = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 3), (0, 8))
        windows = np.lib.stride_tricks.sliding_window_view(np.zeros(4), 3, writeable=True)
        for out in (expanded, windows):
            with refused("key 'w': elements of the output share memory (shape (2, 3)"):
                kv.pull("w", out=out)
        whole = np.zeros((3, 2))
        kv.pull("w", out=whole.T)
        assert whole.T.tolist() == [[0, 1, 2], [3, 4, 5]]

    on_store(script)


def test_rows_are_not_written_twice_into_one_output(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        table = RowSparse.from_dense(np.arange(1.0, 7).reshape(3, 2))
        kv.init(["e", "f"], [table, table])
        rows, one = np.zeros((2, 2)), RowSparse.empty((3, 2), "float64")
        with refused("keys 'e' and 'f': their outputs share memory"):
            kv.row_sparse_pull(["e", "f"], out=[rows, rows], row_ids=[0, 1])
        with refused("key 'e': two of its outputs share memory"):
            kv.row_sparse_pull("e", out=[rows, rows], row_ids=[np.array([0, 1]), np.array([1, 2])])
        with refused("keys 'e' and 'f' have one RowSparse as output"):
            kv.row_sparse_pull(["e", "f"], out=[one, one], row_ids=[0, 1])
        with refused("key 'e' has one RowSparse as output for different rows"):
            kv.row_sparse_pull("e", out=[one, one], row_ids=[np.array([0]), np.array([1])])
        assert not rows.any()
        assert not one.rows.size
        kv.row_sparse_pull(["e", "f"], out=[[one, one], [rows, rows]], row_ids=[1, 2])
        assert one.values.tolist() == rows.tolist() == [[3, 4], [5, 6]]

    on_store(script)


def test_masked_arrays_are_refused_as_values_and_as_outputs(on_store: Any) -> None:
    """numpy would have taken masked elements for numbers, and have left the mask of an output as it was."""
    masked = np.ma.masked_array([1.0, 2, 3, 4], [0, 1, 0, 0])

    def script(kv: KVStore) -> None:
        two_keys(kv)
        out = np.zeros(4)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("key 'c': found a masked array", lambda: kv.init("c", masked)),
            ("key 'c': found a masked array", lambda: kv.broadcast("c", masked, out=out)),
            ("key 'a': found a masked array", lambda: kv.push("a", masked)),
            ("key 'b': found a masked array", lambda: kv.push(["a", "b"], [out, [out, masked]])),
            ("key 'a': found a masked array", lambda: kv.assign("a", masked)),
            ("key 'a': the output: found a masked array", lambda: kv.pull("a", out=masked)),
            ("key 'a': the output: found a masked array", lambda: kv.pushpull("a", out, out=masked)),
            ("key 'a': found a masked array", lambda: kv.pushpull("a", masked)),
            ("the values of a RowSparse: found a masked array", lambda: RowSparse(masked, range(4), (4,))),
            ("RowSparse: the row numbers: found a masked array", lambda: RowSparse(out, masked - 1, (4,))),
            ("the array of a RowSparse: found a masked array", lambda: RowSparse.from_dense(masked)),
        ]
        for words, call in calls:
            with refused(words) as error:
                call()
            assert "fix: give array.filled(0)" in str(error.value)
        kv.pull("a", out=out)
        assert out.tolist() == [1] * 4
        kv.pull("a", out=masked.data)

    on_store(script)


def test_row_numbers_in_a_masked_array_are_refused(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        kv.init("e", RowSparse.from_dense(np.ones((3, 2))))
        with refused("key 'e': found a masked array"):
            kv.row_sparse_pull("e", out=np.zeros((2, 2)), row_ids=np.ma.masked_array([0, 1], [0, 1]))

    on_store(script)


def test_a_list_of_numbers_for_an_array_is_told_that_a_list_means_devices(on_store: Any) -> None:
    def script(kv: KVStore) -> None:
        kv.init(["w", "v"], [np.zeros(3, np.float32)] * 2)
        hint = "; a list has one value for each device, and each is a single number here; fix: give one array, "
        fits = "key 'w': the pushed value has shape () and dtype int64, but the key has shape (3,) and dtype float32"
        with refused("%s since its init%snp.array([1, 2, 3], np.float32)" % (fits, hint)):
            kv.push("w", [1, 2, 3])
        with refused("np.array([1, 2, 3, ...], np.float32)"):
            kv.pushpull(["v", "w"], [np.zeros(3, np.float32), (1, 2, 3, 4)])
        with refused(
            "key 'n' has 3 values in one init, expected one: a key is initialised once%snp.array([1, 2, 3])" % hint
        ):
            kv.init("n", [1, 2, 3])
        with refused("key 'w': a list in a list; expected an array, or a list of arrays, one for each device; fix: "):
            kv.push("w", [[1, 2, 3]])
        # Another mistake is not taken for this one.
        with pytest.raises(KVError, match=r"since its init$"):
            kv.push("w", [np.zeros(2, np.float32), np.zeros(3, np.float32)])

    on_store(script)


def test_single_numbers_of_several_devices_are_added_up_for_a_key_that_is_one() -> None:
    with kvstore.create("local") as kv:
        kv.init("n", 0.0)
        kv.push("n", [1.0, 2.0])
        out = np.zeros(())
        kv.pull("n", out=out)
        assert out == 3
