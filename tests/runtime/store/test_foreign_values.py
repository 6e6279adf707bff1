"""Values and outputs of other libraries that are not plain host memory: taken, or refused by library and device.

The libraries are stood in for; `test_torch.py` does the same with torch itself. In a job as in one process: the checks
are made before anything is sent.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import Any

import numpy as np
import pytest
from cluster import Cluster
from fakearrays import (
    CupyArray,
    Device,
    Exporter,
    FakeCupyArrays,
    FakeJax,
    FakeTorch,
    Interface,
    JaxArray,
    Memory,
    Tensor,
    put,
)

from distrun_runtime import kvstore
from distrun_runtime.arrays import dlpack, dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.kvstore import KVStore
from distrun_runtime.store.values import RowSparse, array_of, output_of, value_of, wanted

NO_CUPY = "a GPU needs cupy, which is not installed. fix: pip install 'distrun[cuda12]'"
BY_CUDA = "distrun uses GPUs by CUDA"


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeTorch, FakeCupyArrays, FakeJax]:
    made = FakeTorch(), FakeCupyArrays(), FakeJax()
    put(monkeypatch, *made)
    return made


def refused(words: str) -> Any:
    return pytest.raises(KVError, match=re.escape(words))


def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


ON_GPUS = [
    (Tensor(Memory(device=1)), f"found a torch Tensor in the memory of a GPU; {NO_CUPY}"),
    (Interface(Memory()), f"found a fakearrays Interface in the memory of a GPU; {NO_CUPY}"),
    (Exporter(Memory(device=3)), f"found a fakearrays Exporter in the memory of a GPU; {NO_CUPY}"),
    (Exporter(Memory(), dlpack.CUDA_MANAGED), NO_CUPY),
    (JaxArray(Memory()), f"found a jax Array in the memory of a GPU; {NO_CUPY}"),
    (Exporter(Memory(), 10), f"in memory of ROCm (device 0); {BY_CUDA}"),
    (Tensor(device=Device("mps", 0)), f"found a torch Tensor on mps:0; {BY_CUDA}; fix: give tensor.cpu()"),
]


@pytest.mark.parametrize(("value", "words"), ON_GPUS)
def test_without_cupy_a_value_on_a_gpu_is_refused_with_what_to_install(
    value: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_cupy(monkeypatch)
    for call in (array_of, value_of):
        with refused(words) as caught:
            call("w", value)
        assert str(caught.value).startswith("key 'w': ")
    with refused(words):
        RowSparse(value, [0, 1], (4, 3))
    with refused(words):
        RowSparse(np.ones((2, 3)), value, (4, 3))
    with refused(words):
        wanted("w", np.zeros((2, 3)), value)
    if isinstance(value, Tensor) or BY_CUDA in words:
        with refused(words.partition("; fix: give")[0]):
            output_of("w", value)


@pytest.mark.parametrize("make", [Tensor, CupyArray, Interface, Exporter])
def test_rows_are_not_written_to_a_gpu(make: Any) -> None:
    with refused("in the memory of a GPU, but rows are written into host memory; fix: give an array of numpy"):
        wanted("w", make(Memory()), [0, 1])


def test_tensors_in_host_memory_are_taken_without_a_copy_and_without_their_gradients_history() -> None:
    array = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    for given in (array, array.T, array[:, ::2], array[1, 1:2].reshape(())):
        tensor = Tensor(array=given, requires_grad=True)
        assert array_of("w", tensor) is given
        assert output_of("w", tensor) is given


def test_a_lazily_negated_tensor_is_taken_as_its_values() -> None:
    array = np.arange(3.0)
    assert array_of("w", Tensor(array=array, negative=True)).tolist() == [0, -1, -2]
    assert array.tolist() == [0, 1, 2]


def test_sparse_tensors_on_a_gpu_go_through_the_host() -> None:
    host = Tensor(array=np.ones((2, 3), np.float32), layout="torch.sparse_coo")
    made = RowSparse(np.ones((2, 3)), [0, 2], (4, 3))
    host.sparse_dim = lambda: 1  # type: ignore[attr-defined]
    host.shape = (4, 3)
    host._values = lambda: Tensor(array=made.values)  # type: ignore[attr-defined]
    host._indices = lambda: [Tensor(array=made.rows)]  # type: ignore[attr-defined]
    copies = []

    def copied(tensor: Tensor) -> Tensor:
        copies.append(tensor)
        return host

    found = value_of("w", Tensor(Memory((4, 3)), layout="torch.sparse_coo", made=copied))
    assert isinstance(found, RowSparse)
    assert len(copies) == 1
    assert (found.rows.tolist(), found.shape) == ([0, 2], (4, 3))


def test_sparse_matrices_of_cupyx_go_through_the_host() -> None:
    import scipy.sparse

    host = scipy.sparse.csr_matrix(np.diag([1.0, 0.0, 3.0]))

    class OnGpu:
        nnz = 2

        def tocsr(self) -> Any:
            raise AssertionError("this stays on the GPU")

        def get(self, stream: object = None) -> Any:
            return host

    OnGpu.__module__ = "cupyx.scipy.sparse._csr"
    found = value_of("w", OnGpu())
    assert isinstance(found, RowSparse)
    assert found.to_dense().tolist() == host.toarray().tolist()


def test_without_cupy_arrays_that_their_library_copies_to_the_host_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax and numba do so when numpy asks: as all versions did."""
    no_cupy(monkeypatch)

    class Copied(JaxArray):
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.full((2, 3), 5, np.float32)

    assert array_of("w", Copied(Memory())).tolist() == [[5] * 3] * 2


def test_pinned_memory_is_taken_by_dlpack_without_a_copy() -> None:
    inner = np.arange(4.0)

    class Pinned:
        def __dlpack__(self, **options: object) -> object:
            return inner.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return dlpack.CUDA_HOST, 0

    assert np.shares_memory(array_of("w", Pinned()), inner)


def test_values_of_rows_may_be_tensors_in_host_memory() -> None:
    values, rows = np.ones((2, 3), np.float32), np.array([2, 0])
    made = RowSparse(Tensor(array=values, requires_grad=True), Tensor(array=rows), (4, 3))
    assert made.values is values
    assert made.rows.tolist() == [2, 0]
    half = np.zeros((1, 3), np.uint16).view(dtypes.BFLOAT16)
    assert RowSparse(half, [1], (4, 3)).dtype == dtypes.BFLOAT16


@pytest.mark.parametrize("name", ["local", "device", "dist_sync", "dist_device_async"])
def test_without_cupy_every_store_refuses_gpu_arrays_and_goes_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_cupy(monkeypatch)
    on_gpu, array = Tensor(Memory((2,))), np.ones(2, np.float32)

    def script(kv: KVStore) -> None:
        words = f"found a torch Tensor in the memory of a GPU; {NO_CUPY}"
        with refused(f"key 'v': {words}"):
            kv.init("v", on_gpu)
        kv.init("w", array)
        for key, given in (("w", on_gpu), ("w", [array, on_gpu]), (["w"], [on_gpu])):
            with refused(f"key 'w': {words}"):
                kv.push(key, given)
        with refused(f"key 'w': the output: {words}"):
            kv.pull("w", out=on_gpu)
        with refused(f"key 'w': the output: {words}"):
            kv.pushpull("w", array, out=on_gpu)
        out = np.zeros(2, np.float32)
        kv.pull("w", out=out)
        assert out.tolist() == [1, 1]

    if "dist" not in name:
        with kvstore.create(name) as kv:
            script(kv)
    else:
        with Cluster(1, servers=1, over="inproc") as job:
            job.run(script, name)
