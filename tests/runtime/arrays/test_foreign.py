"""Arrays of other libraries in GPU memory: what each is, whose stream its caller works on, and what is refused."""

from __future__ import annotations

import re
import sys
import threading
from typing import Any

import numpy as np
import pytest
from cudastandin import StandIn
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

from distrun_runtime.arrays import dlpack, dtypes, foreign
from distrun_runtime.arrays.cuda import Cuda, Stream
from distrun_runtime.arrays.foreign import (
    LEGACY,
    PER_THREAD,
    DeviceView,
    current_device,
    current_stream,
    device_array,
    device_output,
    is_on_gpu,
)
from distrun_runtime.errors import KVError, StoreClosed

OURS = 77
"""The handle of our stream."""


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> tuple[FakeTorch, FakeCupyArrays, FakeJax]:
    made = FakeTorch(), FakeCupyArrays(), FakeJax()
    put(monkeypatch, *made)
    return made


@pytest.fixture
def cuda() -> Cuda:
    return Cuda(StandIn(2))


def seen(value: object, cuda: Cuda | None = None) -> DeviceView:
    found = device_array(value, cuda or Cuda(StandIn(2)), lambda device: Stream(device, OURS))
    assert found is not None
    return found


def refused(value: object, words: str, is_output: bool = False) -> None:
    with pytest.raises(KVError, match=re.escape(words)):
        if is_output:
            device_output(value, Cuda(StandIn(2)))
        else:
            seen(value)


MEMORY = Memory((4, 6), "float16", device=1, address=0x5000)


@pytest.mark.parametrize("make", [Tensor, CupyArray, JaxArray, Exporter])
@pytest.mark.usefixtures("libraries")
def test_a_view_says_where_the_elements_are(make: Any) -> None:
    view = seen(make(MEMORY))
    assert (view.device, view.address, view.shape) == (1, 0x5000, (4, 6))
    assert (view.strides, view.dtype, view.nbytes) == ((12, 2), np.dtype(np.float16), 48)
    assert view.is_contiguous
    assert view.library == {Tensor: "torch", CupyArray: "cupy", JaxArray: "jax", Exporter: "fakearrays"}[make]


@pytest.mark.usefixtures("libraries")
def test_an_interface_says_where_the_elements_are_and_cuda_on_which_device(cuda: Cuda) -> None:
    pointer = cuda.alloc(1, 48)
    view = seen(Interface(Memory((4, 6), "float16", address=pointer.address)), cuda)
    assert (view.device, view.address, view.strides, view.library) == (1, pointer.address, (12, 2), "fakearrays")
    assert seen(Interface(Memory((0, 6), address=0)), cuda).size == 0


@pytest.mark.parametrize("dtype", dtypes.NAMES)
@pytest.mark.parametrize("make", [Tensor, CupyArray, JaxArray])
@pytest.mark.usefixtures("libraries")
def test_every_dtype_of_a_store_is_seen(make: Any, dtype: str) -> None:
    view = seen(make(Memory((3, 2), dtype)))
    assert view.dtype == dtypes.parse(dtype)
    assert view.strides == (2 * view.dtype.itemsize, view.dtype.itemsize)


@pytest.mark.parametrize("dtype", ["complex64", "bool"])
@pytest.mark.parametrize("make", [Tensor, CupyArray, JaxArray])
@pytest.mark.usefixtures("libraries")
def test_other_dtypes_are_refused_with_those_that_are_known(make: Any, dtype: str) -> None:
    refused(make(Memory(dtype=dtype)), f"has dtype {dtype}, expected one of float16, bfloat16, float32")


@pytest.mark.usefixtures("libraries")
def test_dtypes_that_numpy_does_not_know_are_refused_by_name(cuda: Cuda) -> None:
    refused(Tensor(Memory(), dtype="float8_e4m3fn"), "a torch Tensor has dtype float8_e4m3fn, expected one of")
    memory = Memory(address=cuda.alloc(0, 64).address, dtype="uint16")
    interface = Interface(memory, more={"typestr": "<V2"})
    with pytest.raises(KVError, match="expected one of"):
        seen(interface, cuda)
    interface.dtype = np.dtype(CupyArray(Memory(dtype="bfloat16")).dtype)  # type: ignore[attr-defined]
    assert seen(interface, cuda).dtype == dtypes.BFLOAT16
    swapped = Interface(memory, more={"typestr": ">u2"})
    with pytest.raises(KVError, match="foreign byte order"):
        seen(swapped, cuda)


@pytest.mark.parametrize(
    ("shape", "strides", "is_contiguous"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), False),
        ((2, 3), (6, 2), False),
        ((2, 3), (0, 0), False),
        ((1, 3), (99, 1), True),
        ((2, 1), (1, 99), True),
        ((), (), True),
        ((0, 3), (1, 1), True),
        ((3,), (2,), False),
    ],
)
@pytest.mark.usefixtures("libraries")
def test_what_is_not_contiguous_is_copied_by_torch_and_cupy_and_refused_of_others(
    shape: tuple[int, ...], strides: tuple[int, ...], is_contiguous: bool
) -> None:
    memory = Memory(shape, "float32", 1, 0x5000, strides)
    for make in (Tensor, CupyArray):
        value = make(memory)
        view = seen(value)
        assert view.is_contiguous
        assert view.address == (memory if is_contiguous else memory.copied()).address
        assert (view.owner is value) is (make is CupyArray and is_contiguous)
        if is_contiguous:  # an output is written where it is
            out = device_output(value, Cuda(StandIn(2)))
            assert out is not None
            assert out.strides == tuple(4 * step for step in strides)
        elif 0 not in strides:
            refused(value, "is not contiguous (shape", is_output=True)
    if is_contiguous:
        assert seen(JaxArray(memory)).strides == tuple(4 * step for step in strides)
    else:
        refused(JaxArray(memory), "a jax Array is not contiguous (shape")


@pytest.mark.usefixtures("libraries")
def test_arrays_in_host_memory_and_what_is_no_array_are_left_to_numpy(cuda: Cuda) -> None:
    host = np.zeros(2)
    for value in (
        *(host, 1.0, [host], "text", None, object()),
        *(Tensor(array=host), JaxArray(MEMORY, dlpack.CPU)),
        *(Exporter(MEMORY, dlpack.CUDA_HOST), Exporter(MEMORY, dlpack.ROCM_HOST)),
    ):
        assert device_array(value, cuda, lambda device: Stream(device, OURS)) is None
        if not isinstance(value, JaxArray):
            assert device_output(value, cuda) is None
        assert not is_on_gpu(value)


def test_what_is_on_a_gpu_is_known_before_cuda_is_opened(libraries: Any) -> None:
    for value in (
        *(make(MEMORY) for make in (Tensor, CupyArray, JaxArray, Exporter, Interface)),
        Exporter(MEMORY, dlpack.CUDA_MANAGED),
    ):
        assert is_on_gpu(value)
    libraries[0].version.hip, libraries[1].cuda.runtime.is_hip = "6.2", True
    for value, words in (
        (Tensor(MEMORY), "a torch Tensor on ROCm (cuda:1); distrun uses GPUs by CUDA; fix: give tensor.cpu()"),
        (CupyArray(MEMORY), "a cupy ndarray in memory of ROCm (device 1); distrun uses GPUs by CUDA"),
        (Tensor(device=Device("mps", 0)), "a torch Tensor on mps:0; distrun uses GPUs by CUDA"),
        (Tensor(MEMORY, layout="torch.sparse_csr"), "of layout torch.sparse_csr"),
        (JaxArray(MEMORY, 10), "a jax Array in memory of ROCm (device 1); distrun uses GPUs by CUDA"),
        (Exporter(MEMORY, 14), "in memory of oneAPI (device 1); distrun uses GPUs by CUDA"),
    ):
        assert not is_on_gpu(value)
        assert words in str(foreign.refusal(value))


# The caller's stream


def test_the_stream_is_the_librarys_current_one_of_the_arrays_device_at_each_call(libraries: Any) -> None:
    for module, make in zip(libraries[:2], (Tensor, CupyArray), strict=True):
        array = make(MEMORY)
        assert seen(array).stream == LEGACY  # 0, in both libraries
        module.streams[1] = 41
        assert seen(array).stream == 41
        module.streams.update({0: 9, 1: PER_THREAD})
        assert seen(array).stream == PER_THREAD
        assert device_output(array, Cuda(StandIn(1))).stream == PER_THREAD  # type: ignore[union-attr]


def test_the_stream_is_that_of_the_calling_thread(libraries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = libraries[0]
    handles = {threading.get_ident(): 41}
    current = torch.cuda.current_stream

    def of_thread(device: int) -> Any:
        torch.streams[device] = handles.get(threading.get_ident(), 42)
        return current(device)

    monkeypatch.setattr(torch.cuda, "current_stream", of_thread)
    found = [seen(Tensor(MEMORY)).stream]
    thread = threading.Thread(target=lambda: found.append(seen(Tensor(MEMORY)).stream))
    thread.start()
    thread.join()
    assert found == [41, 42]


@pytest.mark.parametrize("is_old", [False, True])
def test_dlpack_producers_are_given_our_stream_of_their_device(is_old: bool, libraries: Any) -> None:
    for make in (JaxArray, Exporter):
        value = make(MEMORY, is_old=is_old)
        view = seen(value)
        assert (view.stream, value.asked) == (None, [OURS])
        assert view.is_readonly
        assert view.is_immutable is (make is JaxArray)
        assert view.owner[0] is value  # type: ignore[index]
    assert seen(Exporter(MEMORY, dlpack.CUDA_MANAGED)).device == 1


@pytest.mark.usefixtures("libraries")
def test_streams_of_the_interface_are_those_of_its_version(cuda: Cuda) -> None:
    memory = Memory(address=cuda.alloc(0, 64).address)
    for version, stream, found in ((3, 41, 41), (3, 1, LEGACY), (3, 2, PER_THREAD), (3, None, None), (2, None, LEGACY)):
        assert seen(Interface(memory, version, stream), cuda).stream == found
    with pytest.raises(KVError, match="gives 0 as its stream"):
        seen(Interface(memory, 3, 0), cuda)


def test_no_stream_that_captures_a_graph_is_used(libraries: Any) -> None:
    for module, make in zip(libraries[:2], (Tensor, CupyArray), strict=True):
        module.capturing.add(0)  # the current device, which is not the array's
        assert current_stream(module.__name__, 1) == LEGACY
        assert seen(make(MEMORY)).stream == LEGACY
        module.capturing = {1}
        with pytest.raises(KVError, match="is capturing a CUDA graph"):
            current_stream(module.__name__, 1)
        refused(make(MEMORY), f"{module.__name__}'s current stream is capturing a CUDA graph")


# What is read and written


@pytest.mark.usefixtures("libraries")
def test_the_owner_keeps_the_memory() -> None:
    tensor, array = Tensor(MEMORY, requires_grad=True), CupyArray(MEMORY)
    owner: Any = seen(tensor).owner
    assert owner.base is tensor
    assert not owner.requires_grad  # without the gradient's history
    assert seen(array).owner is array


@pytest.mark.usefixtures("libraries")
def test_a_lazily_negated_tensor_is_read_as_its_values_and_not_written() -> None:
    made = Tensor(Memory(address=0x9000))
    tensor = Tensor(MEMORY, negative=True, made=lambda _: made)
    view = seen(tensor)
    assert (view.address, view.owner) == (0x9000, made)
    refused(tensor, "negative or conjugate bit", is_output=True)


def test_libraries_that_can_be_written_give_an_output(cuda: Cuda, libraries: Any) -> None:
    pointer = cuda.alloc(1, 48)
    for value in (Tensor(MEMORY), CupyArray(MEMORY), Interface(Memory((4, 3), address=pointer.address))):
        view = device_output(value, cuda)
        assert view is not None
        assert (view.device, view.is_readonly) == (1, False)


@pytest.mark.usefixtures("libraries")
def test_outputs_that_cannot_be_written_are_refused_by_name(cuda: Cuda) -> None:
    read_only = Interface(Memory(address=cuda.alloc(0, 64).address), is_readonly=True)
    assert seen(read_only, cuda).is_readonly
    with pytest.raises(KVError, match="a fakearrays Interface is read-only; fix: give an array that can be written"):
        device_output(read_only, cuda)
    for kind in (dlpack.CPU, dlpack.CUDA):
        refused(JaxArray(MEMORY, kind), "found a jax Array, which cannot be written; fix: pull into", True)
    refused(Exporter(MEMORY), "only has DLPack, by which an array is read and not written", True)
    refused(Tensor(Memory((2, 3), strides=(0, 1))), "elements of a torch Tensor share memory (shape (2, 3)", True)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (Tensor(device=Device("meta")), "on the meta device, which has no values"),
        (Tensor(MEMORY, is_quantized=True, dtype="qint8"), "a torch Tensor of quantized dtype torch.qint8"),
        (Tensor(MEMORY, layout="torch.sparse_csr"), "of layout torch.sparse_csr; fix: give tensor.to_dense()"),
        (Tensor(device=Device("mps", 0)), "on mps:0; distrun uses GPUs by CUDA; fix: give tensor.cpu()"),
        (Tensor(device=Device("xpu", 1)), "on xpu:1; distrun uses GPUs by CUDA"),
        (Tensor(Memory(address=0)), "a torch Tensor has no memory of its own"),
    ],
)
@pytest.mark.usefixtures("libraries")
def test_tensors_without_elements_that_cuda_can_read_are_refused_by_name(tensor: Tensor, words: str) -> None:
    refused(tensor, words)


def test_gpus_of_other_makers_are_refused_by_name(libraries: Any) -> None:
    torch, cupy, _ = libraries
    torch.version.hip, cupy.cuda.runtime.is_hip = "6.2", True
    refused(Tensor(MEMORY), "a torch Tensor on ROCm (cuda:1); distrun uses GPUs by CUDA; fix: give tensor.cpu()")
    refused(CupyArray(MEMORY), "a cupy ndarray in memory of ROCm; distrun uses GPUs by CUDA; fix: give value.get()")
    for kind, name in ((4, "OpenCL"), (8, "Metal"), (10, "ROCm"), (14, "oneAPI"), (99, "a device of type 99")):
        for make in (JaxArray, Exporter):
            refused(make(MEMORY, kind), f"in memory of {name}; distrun uses GPUs by CUDA")


@pytest.mark.usefixtures("libraries")
def test_arrays_on_no_single_device_or_with_a_mask_are_refused(cuda: Cuda) -> None:
    class Traced(JaxArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            raise BufferError("__dlpack__ only supported for unsharded arrays.")

    refused(Traced(MEMORY), "traced by jax.jit, was donated, or is spread over devices")
    refused(Interface(MEMORY, more={"mask": object()}), "has a mask")

    class Failing(Exporter):
        def __dlpack__(self, **options: object) -> object:
            raise BufferError("deleted")

    refused(Failing(MEMORY), "cannot be read by DLPack (deleted); fix: bring it to host memory")


@pytest.mark.usefixtures("libraries")
def test_host_memory_that_claims_to_be_cudas_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    monkeypatch.setattr(cuda, "device_of", lambda address: -2)
    value = Interface(Memory(address=0x7000))
    for use in (lambda: seen(value, cuda), lambda: device_output(value, cuda)):
        with pytest.raises(
            KVError, match=r"a fakearrays Interface has __cuda_array_interface__.* CUDA knows no memory .*0x7000"
        ):
            use()
    refused(Interface(Memory(address=0)), "a fakearrays Interface has no memory of its own")


@pytest.mark.usefixtures("libraries")
def test_a_forked_child_asks_no_library_for_anything_on_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    def closed() -> None:
        raise StoreClosed("forked")

    monkeypatch.setattr(cuda, "check", closed)
    exporter = Exporter(MEMORY)
    for value in (Tensor(MEMORY), CupyArray(MEMORY), JaxArray(MEMORY), exporter, Interface(MEMORY)):
        with pytest.raises(StoreClosed, match="forked"):
            seen(value, cuda)
    assert not exporter.asked
    assert device_array(Tensor(array=np.zeros(2)), cuda, lambda device: Stream(device, OURS)) is None


def test_no_library_is_loaded_to_look_at_a_value(monkeypatch: pytest.MonkeyPatch, cuda: Cuda) -> None:
    put(monkeypatch)
    assert device_array(np.zeros(2), cuda, lambda device: Stream(device, OURS)) is None
    assert seen(Exporter(MEMORY)).device == 1
    assert foreign.refusal(np.zeros(2)) is None
    assert not {"torch", "cupy", "jax"} & set(sys.modules)


# What a program uses


def test_the_device_that_a_program_works_on_is_torchs_else_cupys(
    libraries: tuple[FakeTorch, FakeCupyArrays, FakeJax],
) -> None:
    torch, cupy, _ = libraries
    torch.device, cupy.device = 1, 2
    torch.is_used, cupy.context = True, 77
    assert current_device() == 1
    torch.is_used = False
    assert current_device() == 2
    torch.is_used, torch.version.hip = True, "6.2"  # it works on other GPUs than CUDA's
    assert current_device() == 2


@pytest.mark.parametrize("context", [None, 0])
def test_libraries_that_were_only_imported_open_no_gpu_and_have_no_device(
    libraries: tuple[FakeTorch, FakeCupyArrays, FakeJax], context: int | None
) -> None:
    libraries[1].context = context
    assert current_device() is None  # the fakes fail if they are asked for more


def test_cupy_of_rocm_has_no_device(libraries: tuple[FakeTorch, FakeCupyArrays, FakeJax]) -> None:
    libraries[1].context, libraries[1].cuda.runtime.is_hip = 77, True
    assert current_device() is None
