"""Arrays of other libraries in GPU memory, as a script gives them to a store: order, lifetime, checks, errors.

The libraries and the GPU are stood in for: it does its work as late as events allow, and finds what is not ordered.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cluster import Cluster, open_store
from fakearrays import FakeCupyArrays, FakeJax, FakeTorch, Interface, Library, Memory, Tensor, filled, put
from gpukit import Machine, gpus_of_process

from distrun_runtime import kvstore
from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.cuda import CudaError
from distrun_runtime.arrays.gpu import GpuArray
from distrun_runtime.errors import KVError, RuntimeFault, StoreClosed
from distrun_runtime.kvstore import KVStore, RowSparse
from distrun_runtime.ps.session import NodeSession
from distrun_runtime.store import values
from distrun_runtime.store.base import CallOptions, Selection
from distrun_runtime.store.local import LocalBackend
from distrun_runtime.store.pending import CompletedCall, Pending
from distrun_runtime.store.values import Value

KINDS = ("torch", "cupy", "interface", "no stream")
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
Make = Callable[[str], Library]


@pytest.fixture
def machine() -> Iterator[Machine]:
    with gpus_of_process(Machine(2)) as machine:
        yield machine
        machine.finish()


@pytest.fixture
def library(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Make:
    modules = {"torch": FakeTorch(), "cupy": FakeCupyArrays(), "jax": FakeJax()}
    put(monkeypatch, *modules.values())
    return lambda kind: Library(kind, machine.cuda, modules)


class Later(Pending):
    """A call that is made when it is waited for."""

    what = "a call"

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._is_done = False

    @property
    def is_done(self) -> bool:
        return self._is_done

    def wait(self, timeout_s: float | None = None) -> None:
        if not self._is_done:
            self._work()
            self._is_done = True

    def when_done(self, act: Callable[[], None]) -> None:
        act()


class Copies(LocalBackend):
    """Keeps on the GPU what is pushed, late; what is pushed to several devices, of the last one."""

    def __init__(self, is_late: bool = False) -> None:
        super().__init__("device")  # whose reducer gives a single value as it is
        self.kept: dict[Any, GpuArray] = {}
        self.error: Exception | None = None
        self._is_late = is_late

    def push(self, keys: Selection, values: Sequence[Value], call: CallOptions) -> Pending:
        def work() -> None:
            for record, value in zip(keys.records, values, strict=True):
                self.kept[record.key] = value.device.put(value)
            if self.error is not None:
                raise self.error

        return self._made_later(work, call)

    def pull(self, keys: Selection, outs: Sequence[Sequence[Any]], call: CallOptions) -> Pending:
        def work() -> None:
            for record, arrays in zip(keys.records, outs, strict=True):
                kept = self.kept[record.key]
                for out in arrays:
                    if isinstance(out, np.ndarray):
                        kept.device.read(kept, out)
                    else:
                        out.device.write(out, kept)

        return self._made_later(work, call)

    def pushpull(
        self, keys: Selection, values: Sequence[Value], outs: Sequence[Sequence[Any]], call: CallOptions
    ) -> Pending:
        def work() -> None:
            self.push(keys, values, CallOptions()).wait()
            for arrays in outs:
                for out in arrays:
                    out.device.write(out, filled(3))  # by another queue than that which reads the values

        return self._made_later(work, call)

    def _made_later(self, work: Callable[[], None], call: CallOptions) -> Pending:
        if self._is_late and not call.waits:
            return Later(work)
        work()
        return CompletedCall("a call")


def store(is_late: bool = False) -> tuple[KVStore, Copies]:
    backend = Copies(is_late)
    kv = KVStore(backend)
    kv.init("w", np.zeros((2, 3), np.float32))
    return kv, backend


def mine(backend: Copies) -> bytes:
    kept = backend.kept["w"]
    return kept.device.host(kept).tobytes()


# What scripts do


def overwritten_after_push(library: Library, wait: bool) -> None:
    kv, backend = store(is_late=True)
    array = library.array()
    pending = kv.push("w", array, wait=wait)
    if not wait:
        pending.wait()
    library.fill(array.pointer, 9)
    assert mine(backend) == b"\7" * 24


def used_after_pull(library: Library, wait: bool) -> None:
    kv, _ = store(is_late=True)
    kv.push("w", library.array())
    out, host = library.array(), np.zeros((2, 3), np.float32)
    library.fill(out.pointer, 1)
    if library.kind == "no stream":
        library.wait()
    pending = kv.pull("w", [host, out], wait=wait)
    if not wait:
        assert not pending.is_done
        pending.wait()
        pending.wait()
        assert pending.is_done
    library.read(out.pointer)
    assert library.found().tobytes() == host.tobytes() == b"\7" * 24


def pushed_and_pulled_in_place(library: Library, wait: bool) -> None:
    kv, backend = store(is_late=True)
    array = library.array()
    pending = kv.pushpull("w", array, wait=wait)
    if not wait:
        pending.wait()
    library.read(array.pointer)
    assert library.found().tobytes() == b"\3" * 24
    assert mine(backend) == b"\7" * 24


USES = (overwritten_after_push, used_after_pull, pushed_and_pulled_in_place)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("wait", [True, False])
@EACH_KIND
def test_an_array_may_be_used_as_soon_as_it_is_given_back(
    use: Callable[[Library, bool], None], wait: bool, kind: str, library: Make
) -> None:
    use(library(kind), wait)


def test_values_of_jax_are_read_and_never_written(library: Make) -> None:
    jax = library("jax")
    kv, backend = store()
    array = jax.array()
    kv.push("w", array)
    assert mine(backend) == b"\7" * 24
    for call in (lambda: kv.pull("w", array), lambda: kv.pushpull("w", array)):
        with pytest.raises(KVError, match="key 'w': the output: found a jax Array, which cannot be written"):
            call()
    jax.wait()


def test_a_call_that_fails_gives_the_arrays_back(library: Make) -> None:
    torch = library("torch")
    kv, backend = store()
    backend.error = KVError("no")
    array = torch.array()
    with pytest.raises(KVError, match="no"):
        kv.push("w", array)
    torch.fill(array.pointer, 9)  # would be found to be unordered


@EACH_KIND
def test_outputs_of_a_pull_that_is_waited_for_twice_are_given_back_when_they_are_filled(
    kind: str, library: Make
) -> None:
    its = library(kind)

    def script(kv: KVStore) -> None:
        kv.init("w", filled(5))
        out, host = its.array(), np.zeros((2, 3), np.float32)
        if kind == "no stream":
            its.wait()
        pending = kv.pull("w", out, wait=False)
        kv.pull("w", host)
        assert pending.is_done
        with pytest.raises(KVError, match="timeout_s"):
            pending.wait("soon")  # type: ignore[arg-type]
        pending.wait()
        its.read(out.pointer)
        assert its.found().tobytes() == host.tobytes() == filled(5).tobytes()

    with Cluster(1, servers=1, over="inproc") as job:
        job.run(script, "dist_sync")


def test_a_pending_that_borrows_is_what_it_is_without(library: Make) -> None:
    torch = library("torch")
    kv, _ = store(is_late=True)
    kv.push("w", torch.array())
    pending = kv.pull("w", torch.array(), wait=False)
    assert (pending.what, pending.is_done, pending.skipped) == ("a call", False, {})
    pending.wait()
    assert repr(pending) == "<Pending a call: done>"


def test_a_forked_child_is_refused_before_any_call_of_cuda(library: Make, machine: Machine) -> None:
    its = library("torch")
    kv, _ = store(is_late=True)
    array = its.array()
    kv.push("w", array)
    pending = kv.pull("w", array, wait=False)
    calls = [lambda: kv.push("w", array), lambda: kvstore.create("device").init("w", array), kv.close]

    def child() -> None:
        for call in calls:
            with pytest.raises(StoreClosed):
                call()
        assert not machine.standin.mistakes

    assert exit_code_of(child) == 0
    pending.wait()


# Values that go through the host


@EACH_KIND
@pytest.mark.parametrize("name", ["local", "device"])
def test_a_first_value_is_copied_to_the_host(kind: str, name: str, library: Make) -> None:
    its = library(kind)
    kv, array, out = kvstore.create(name), its.array(), np.zeros((2, 3), np.float32)
    kv.init("w", array)
    its.fill(array.pointer, 9)
    kv.pull("w", out)
    assert out.tobytes() == b"\7" * 24
    if kind == "no stream":
        its.wait()
    kv.assign("w", array)
    its.fill(array.pointer, 1)
    kv.pull("w", out)
    assert out.tobytes() == b"\x09" * 24
    assert kv._backend.check([]) is None


def test_rows_on_a_gpu_go_through_the_host(library: Make, machine: Machine) -> None:
    its = library("torch")
    array = its.array()
    numbers = Tensor(Memory((2,), "int64", address=machine.cuda.alloc(0, 16).address))
    numbers.pointer = its.cuda.alloc(0, 16)  # type: ignore[attr-defined]
    its.cuda.fill(numbers.pointer, 0, 16, its.stream)  # type: ignore[attr-defined]
    numbers.memory.address = numbers.pointer.address  # type: ignore[attr-defined,union-attr]
    kv = kvstore.create("local")
    kv.init("t", RowSparse.empty((2, 3)))
    kv.push("t", array)
    rows = RowSparse.empty((2, 3))
    kv.row_sparse_pull("t", rows, row_ids=numbers)
    assert (rows.rows.tolist(), rows.values.tobytes()) == ([0], b"\7" * 12)
    kv.push("t", RowSparse(array, numbers, (2, 3)))
    kv.row_sparse_pull("t", rows, row_ids=[0])
    assert rows.values.tobytes() == (filled(7)[0] * 2).tobytes()
    with pytest.raises(KVError, match="rows are written into host memory"):
        kv.row_sparse_pull("t", array, row_ids=[0, 1])


# Checks


def lent(machine: Machine, shape: tuple[int, ...], dtype: str = "float32", offset: int = 0, **options: Any) -> Tensor:
    base = options.pop("base", None) or machine.cuda.alloc(0, 4096)
    return Tensor(Memory(shape, dtype, address=base.address + offset, **options))


def test_shape_dtype_and_strides_are_checked_as_of_arrays_in_host_memory(library: Make, machine: Machine) -> None:
    library("torch")
    kv, _ = store()
    kv.init("h", np.zeros((2, 3), np.uint16).view(dtypes.BFLOAT16))
    for noun, call in (("pushed value", kv.push), ("output", kv.pull)):
        for wrong in (lent(machine, (3, 2)), lent(machine, (2, 3), "float64")):
            with pytest.raises(KVError, match=r"key 'w': the %s has shape .* but the key has shape \(2, 3\)" % noun):
                call("w", wrong)
    with pytest.raises(KVError, match=r"key 'w': the output: a torch Tensor is not contiguous \(shape \(2, 3\)"):
        kv.pull("w", lent(machine, (2, 3), strides=(1, 2)))
    half = values.array_of("h", lent(machine, (2, 3), "bfloat16"))
    assert isinstance(half, GpuArray)
    assert half.dtype == dtypes.BFLOAT16
    kv.init("i", np.zeros(2, np.int32))
    with pytest.raises(KVError, match="key 'i': int32 values are pushed with scale 1"):
        kv.push("i", lent(machine, (2,), "int32"), scale=0.5)


def test_a_call_asks_a_library_once_for_its_stream_and_the_next_call_asks_again(
    library: Make, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("torch")
    torch, asked = sys.modules["torch"].cuda, []
    current_stream = torch.current_stream

    def counted(device: int) -> Any:
        asked.append(device)
        return current_stream(device)

    monkeypatch.setattr(torch, "current_stream", counted)
    tensors = [lent(machine, (2, 3)) for _ in range(5)]
    for calls, use in enumerate((values.contributions, values.outputs, values.outputs)):
        sys.modules["torch"].streams[0] = 40 + calls
        found = use(list("abcde"), tensors)
        assert {array.memory.stream for _, (array,) in found} == {40 + calls}
        assert asked == [0] * (calls + 1)


def test_outputs_that_share_memory_on_a_gpu_are_refused(library: Make, machine: Machine) -> None:
    library("torch")
    base = machine.cuda.alloc(0, 4096)

    def out(offset: int, shape: tuple[int, ...] = (2, 3)) -> Tensor:
        return lent(machine, shape, offset=offset, base=base)

    host = np.zeros((2, 3), np.float32)
    values.outputs(["a", "b", "c"], [[out(0), out(0), host], out(24), out(48)])
    with pytest.raises(KVError, match="keys 'a' and 'b': their outputs share memory"):
        values.outputs(["a", "b"], [[out(0), host], out(20)])
    for other in (out(4), out(0, (6,)), out(0, (1, 3))):
        with pytest.raises(KVError, match="key 'a': two of its outputs share memory"):
            values.outputs("a", [out(0), host, other])


def test_an_array_that_cannot_be_used_is_refused_by_key(library: Make, machine: Machine) -> None:
    its = library("interface")
    kv, _ = store()
    address = machine.cuda.alloc(0, 24).address
    with pytest.raises(KVError, match="key 'w': a fakearrays Interface has a mask"):
        kv.push("w", Interface(Memory(address=address), more={"mask": object()}))
    with pytest.raises(KVError, match="key 'w': the output: a fakearrays Interface is read-only"):
        kv.pull("w", Interface(Memory(address=address), is_readonly=True))
    machine.standin.fail("record", code=2)
    with pytest.raises(KVError, match=re.escape("record on gpu:0 failed")):
        kv.push("w", Interface(Memory(address=address), stream=its.stream.handle))


def test_streams_of_two_libraries_in_one_call_are_both_waited_for(library: Make) -> None:
    torch, cupy = library("torch"), library("cupy")
    kv, backend = store()
    kv.init("v", np.zeros((2, 3), np.float32))
    first, second = torch.array(), cupy.array()
    torch.modules["torch"].streams[0] = torch.stream.handle
    kv.push(["w", "v"], [first, second])
    torch.fill(first.pointer, 1)
    cupy.fill(second.pointer, 2)
    assert mine(backend) == b"\7" * 24


# Every store


def trains(kv: KVStore, library: Library) -> None:
    """Use a store as scripts do, and each array again as soon as it was given back."""
    outs = [library.array() for _ in range(2)]
    host = np.zeros((2, 3), np.float32)
    kv.broadcast(["w", "v"], [library.array(), filled(1)], [[outs[0], host], outs[1]])
    assert host.tobytes() == b"\7" * 24
    for turn in range(2):
        given = [library.array(), library.array()]
        pending = kv.push(["w", "v"], [given, filled(2)], wait=turn == 0)
        pending.wait()
        for array in given:
            library.fill(array.pointer, 9)
        if library.kind == "no stream":
            library.wait()
        kv.pull(["w", "v"], [[outs[0], host], outs[1]], wait=turn == 1).wait()
        assert host.tobytes() == (2 * filled(7)).tobytes()
        for out, expected in zip(outs, (2 * filled(7), filled(2)), strict=True):
            library.read(out.pointer)
            assert library.found().tobytes() == expected.tobytes()
        if library.kind == "no stream":
            library.wait()
        kv.pushpull("v", outs[1], wait=turn == 0).wait()
        library.read(outs[1].pointer)
        assert library.found().tobytes() == filled(2).tobytes()
        library.fill(outs[0].pointer, 9)
        library.wait()  # for what it frees now


@pytest.mark.parametrize("name", ["local", "device", "dist_sync", "dist_device_sync"])
@EACH_KIND
def test_every_store_takes_arrays_on_gpus_and_fills_them(name: str, kind: str, library: Make) -> None:
    its = library(kind)
    if "dist" not in name:
        with kvstore.create(name) as kv:
            trains(kv, its)
    else:
        with Cluster(1, servers=1, over="inproc") as job:
            job.run(lambda kv: trains(kv, its), name)


def test_values_of_several_libraries_and_the_host_are_summed(library: Make, machine: Machine) -> None:
    makers = [library(kind) for kind in ("torch", "cupy", "interface", "jax")]
    for name in ("local", "device"):
        kv, out = kvstore.create(name), np.zeros((2, 3), np.float32)
        kv.init("w", out)
        given = []
        for its in makers:
            given.append(its.array())
            its.wait()
        kv.push("w", [filled(7), *given])
        kv.pull("w", out)
        assert out.tobytes() == (5 * filled(7)).tobytes()


# A GPU that fails for good


@pytest.mark.parametrize("call", ["copy", "wait"])
def test_a_gpu_that_fails_for_good_leaves_the_store_failed_and_it_closes(
    machine: Machine, library: Make, call: str
) -> None:
    """Every later call says the same. Who waits for this worker hears that it is gone: nobody hangs."""

    def script(session: NodeSession) -> str:
        kv = open_store("dist_sync", session)
        kv.init("w", np.zeros((2, 3), np.float32))
        if kv.rank == 1:
            with pytest.raises(RuntimeFault) as caught:
                kv.pushpull("w", np.ones((2, 3), np.float32))
            return str(caught.value)
        given = library("torch").array()
        machine.standin.fail(call)
        out = np.ones((2, 3), np.float32)
        for each in (lambda: kv.push("w", given), lambda: kv.push("w", out), lambda: kv.pull("w", out), kv.stats):
            with pytest.raises(CudaError, match=f"{call} on gpu:0 failed: cudaErrorIllegalAddress"):
                each()
        kv.close()
        session.end()
        return "closed"

    with Cluster(2, 1) as made:
        closed, told = made.run_sessions(script)
    assert closed == "closed"
    assert "worker-0" in told
