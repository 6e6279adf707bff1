"""torch tensors in host memory are given and filled without a copy. Run by the interpreter that has torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[3]

SCRIPT = """
import inspect

import numpy as np
import torch
from distrun_runtime import kvstore
from distrun_runtime.arrays import foreign
from distrun_runtime.errors import KVError
from distrun_runtime.store import values

kv = kvstore.create("device")
layer = torch.nn.Linear(3, 2)
layer(torch.ones(3)).sum().backward()
weight, grad = layer.weight, layer.weight.grad

# A parameter shares its memory, with or without a gradient's history.
assert np.shares_memory(values.array_of("w", weight), weight.detach().numpy())
kv.init("w", weight)
kv.set_optimizer("sgd", learning_rate=0.5)
before = weight.detach().clone()
address = weight.data_ptr()
kv.pushpull("w", grad, out=weight)
assert weight.data_ptr() == address
assert torch.equal(weight, before - 0.5 * grad)
assert weight.requires_grad and weight.is_leaf

# bfloat16, which numpy does not know, also with strides.
half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
kv.init("h", half.T)
out = torch.zeros(2, 6, dtype=torch.bfloat16)
kv.pull("h", out.T[::2])
assert torch.equal(out[:, ::2], half)
assert not out[:, 1::2].any()
kv.set_updater(None)
kv.push("h", [half.T, half.T])
kv.pull("h", [out.T[::2], out.T[1::2]])
assert torch.equal(out[:, 1::2], 2 * half)

# Sparse gradients of embeddings, and row pulls into tensors, by tensors.
table = torch.nn.Embedding(5, 2, sparse=True)
table(torch.tensor([[1, 3], [1, 1]])).sum().backward()
kv.init("t", kvstore.RowSparse.empty((5, 2)))
kv.push("t", table.weight.grad)
rows = torch.empty(2, 2, 2)
kv.row_sparse_pull("t", rows, row_ids=torch.tensor([[3, 1], [0, 3]]))
assert rows[..., 0].tolist() == [[1, 3], [0, 1]]

# What cannot be read or written says so.
for wrong in (torch.empty(2, 3, device="meta"), torch.empty(2, 3, dtype=torch.complex64)):
    for call in (kv.push, kv.pull):
        try:
            call("w", wrong)
        except KVError as err:
            assert "key 'w'" in str(err), err
        else:
            raise AssertionError(wrong)
meta = torch.empty(2, 3, device="meta")
for call in (kv.push, kv.pull):
    try:
        call("w", meta)
    except KVError as err:
        assert "found a torch Tensor on the meta device, which has no values" in str(err), err

# A lazily negated tensor is read as what it shows, and not written.
negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
assert negated.is_neg()
kv.init("n", negated)
out = torch.empty(2)
kv.pull("n", out)
assert out.tolist() == [-2, 4]
try:
    kv.pull("n", negated)
except KVError as err:
    assert "its negative or conjugate bit is set" in str(err), err
else:
    raise AssertionError("written")
if hasattr(torch, "quantize_per_tensor"):
    try:
        kv.push("n", torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8))
    except KVError as err:
        assert "a torch Tensor of quantized dtype torch.qint8" in str(err), err

# What arrays.foreign asks of tensors on a GPU has these names; one in host memory is none.
assert foreign.device_array(weight, None, None) is None
assert not foreign.is_on_gpu(weight)
assert torch.version.hip is None
assert "device" in inspect.signature(torch.cuda.current_stream).parameters
assert callable(torch.cuda.is_current_stream_capturing)
assert callable(torch.cuda.device.__enter__)
assert (weight.layout is torch.strided, weight.is_quantized, weight.is_conj()) == (True, False, False)
assert (weight.stride(), tuple(weight.shape), weight.data_ptr() != 0) == ((3, 1), (2, 3), True)
try:
    kv.pull("w", torch.empty(2, 3, dtype=torch.float64))
except KVError as err:
    assert "the output has shape (2, 3) and dtype float64" in str(err), err
print("fits")
"""


@pytest.mark.peers
def test_tensors_are_values_and_outputs() -> None:
    command = [python_of("torch"), "-c", "import sys; sys.path.insert(0, %r)\n%s" % (str(ROOT / "runtime"), SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fits\n"


def test_a_store_loads_neither_torch_itself_nor_what_gpus_and_compiled_codecs_need() -> None:
    code = (
        "import sys, numpy as np; from distrun_runtime import kvstore; from distrun_runtime.arrays import device;"
        " import distrun_runtime.transport.host_paths; device.get('cpu:0'); kv = kvstore.create('device');"
        " kv.init('w', np.ones(2)); kv.pushpull('w', [1.0 * np.ones(2)] * 2, out=np.ones(2));"
        " kv.push('w', memoryview(np.ones(2)));"
        " loaded = {name.removeprefix('distrun_runtime.arrays.') for name in sys.modules};"
        " assert not {'torch', 'cupy', 'numba', 'cuda', 'cupy_driver', 'gpu', 'gpu_memory', 'gpu_programs'} & loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


COLLECTIVES = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from cluster import run_job

def script(kv):
    rank = kv.rank
    for _ in range(3):
        made = kv.allreduce(torch.full((3, 4), rank + 1.0))
        assert torch.equal(made, torch.full((3, 4), 3.0))
        flags = torch.tensor([rank == 0, False])
        assert kv.allreduce(flags).tolist() == [True, False]
        assert kv.allreduce(flags, op="min").tolist() == [False, False]
        half, weight = torch.ones(5, dtype=torch.bfloat16), torch.nn.Parameter(torch.full((3,), rank + 1.0))
        assert kv.allreduce(half, half, op="mean") is half and half.eq(1).all()
        kv.allreduce([weight, half], [weight, half], wait=False).wait()
        assert weight.tolist() == [3, 3, 3] and half.eq(2).all()
        assert kv.allgather(torch.tensor([rank, 5])).tolist() == [[0, 5], [1, 5]]
        assert kv.allgather(torch.tensor(rank == 0)).tolist() == [True, False]
        assert kv.broadcast(None, torch.tensor([rank]), root=1).tolist() == [1]
        assert kv.reduce_scatter(torch.arange(4.0).reshape(2, 2)).tolist() == [[0, 2], [4, 6]][rank]
        turned = torch.arange(6.0).reshape(2, 3).t()
        assert torch.equal(kv.allreduce(turned), 2 * turned)
    found = kv.allgather_object({"a": torch.full((2,), rank, dtype=torch.bfloat16)})
    assert torch.equal(found[1]["a"], torch.ones(2, dtype=torch.bfloat16))
    empty = kv.empty((3, 2), torch.bfloat16).fill_(1.5)
    kv.declare("w", (3, 2), torch.bfloat16)
    kv.pushpull("w", empty)
    assert empty.dtype == torch.bfloat16 and empty.eq(3).all()

run_job(script, 2, 1)
"""


@pytest.mark.peers
def test_tensors_go_through_collective_calls_as_arrays_do() -> None:
    words = [python_of("torch"), "-c", COLLECTIVES, str(ROOT / "tests" / "support"), str(ROOT / "runtime")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr
