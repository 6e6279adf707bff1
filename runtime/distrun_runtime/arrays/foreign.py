"""Recognizes arrays in GPU memory, of any library, and says what they are; and why an array cannot be used.

    torch     by its own methods                             read and written
    cupy      by its own attributes                          read and written
    jax       by DLPack: jax orders its work before ours     read: jax arrays never change
    others    by `__cuda_array_interface__` (2 and 3)        read, and written unless read-only
              else by DLPack: CUDA and managed memory        read

No library is ever imported here: a value of one can only come from a module that is loaded. The caller's stream is that
of the library in the calling thread, now: call `device_array` and `device_output` from the thread that has the array,
at each use, and keep no view, and no stream, for later calls.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from distrun_runtime.arrays import dlpack, dtypes
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.errors import KVError

if TYPE_CHECKING:
    from distrun_runtime.arrays.cuda import Cuda, Stream


LEGACY, PER_THREAD = 1, 2
"""cudaStreamLegacy, cudaStreamPerThread: the default streams by handle. Libraries write the first one as 0, too."""

_BY_NAME: dict[object, DType] = {name: dtypes.parse(name) for name in dtypes.NAMES}
"""By name; and by torch's and cupy's dtypes that were met."""
_GPUS = (dlpack.CUDA, dlpack.CUDA_MANAGED)

_CUDA_ONLY = "distrun uses GPUs by CUDA"
_SPREAD = (
    "%s is traced by jax.jit, was donated, or is spread over devices; fix: give it outside of jit, on one device or as"
    " numpy.asarray(value)"
)
_CAPTURING = (
    "%s's current stream is capturing a CUDA graph, and no graph can hold what a store does; fix: call the store"
    " outside of the capture"
)


StreamOf = Callable[[str, int], Union[int, None]]
"""Returns what `current_stream` does; one that a call caches asks a library once for a device."""


@dataclass(eq=False, slots=True)
class DeviceView:
    """An array of another library in the memory of a GPU, as it is now."""

    library: str
    """`torch`, `cupy`, `jax`, else the package that the array's class is from."""
    device: int
    """CUDA's number of the device, in this process."""
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    dtype: DType
    """One of `dtypes.NAMES`; bfloat16 is `dtypes.BFLOAT16`."""
    stream: int | None
    """Handle of the stream that the caller works on; None: it is not known, and nothing has to be waited for: the
    library has ordered its own work before that of our stream, or says that all of it is done."""
    owner: object
    """Keeps the memory as long as something refers to it."""
    is_readonly: bool = False
    """It must not be written."""
    is_immutable: bool = False
    """Nothing will ever write it: it only has to be kept until it was read."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie row by row without a gap."""
        expected = self.dtype.itemsize
        for length, step in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length > 1 and step != expected:
                return not self.size
            expected *= length
        return True


def is_on_gpu(value: Any) -> bool:
    """Tell whether a value is an array in the memory of a GPU that CUDA knows: `device_array` says what it is.

    Of what is on other devices, and of what no GPU can hold as plain elements, `refusal` says why it cannot be used.
    """
    if isinstance(value, np.ndarray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.device.type == "cuda" and _tensor_refusal(value, torch, is_output=False) is None
    cupy, jax = sys.modules.get("cupy"), sys.modules.get("jax")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return not cupy.cuda.runtime.is_hip
    if not (jax is not None and isinstance(value, jax.Array)) and _has_interface(value):
        return True
    if not (hasattr(value, "__dlpack_device__") and hasattr(value, "__dlpack__")):
        return False
    place = dlpack.device_of(value)
    return place is not None and place[0] in _GPUS


def dtype_met(given: Any) -> DType | None:
    """Return the dtype for one of torch's or cupy's that an array was met with; None: none was."""
    return _BY_NAME.get(given)


def current_device() -> int | None:
    """Return the GPU on which torch, or else cupy, works in this thread; None: neither has used one so far.

    No library opens CUDA for it.
    """
    torch, cupy = (sys.modules.get(name) for name in ("torch", "cupy"))
    if torch is not None and torch.version.hip is None and torch.cuda.is_initialized():
        return int(torch.cuda.current_device())
    if cupy is None or cupy.cuda.runtime.is_hip:
        return None
    try:
        is_used = bool(cupy.cuda.driver.ctxGetCurrent())
    except cupy.cuda.driver.CUDADriverError:  # the driver is not initialised
        is_used = False
    return int(cupy.cuda.runtime.getDevice()) if is_used else None


def current_stream(library: str, device: int) -> int | None:
    """Return the handle of the stream on which a library works on a device in this thread; None: it does not say.

    Raises:
        KVError: it is capturing a CUDA graph.
    """
    module = sys.modules.get(library)
    if library == "torch" and module is not None:
        with module.cuda.device(device):  # torch asks about the current one
            is_capturing = module.cuda.is_current_stream_capturing()
        if is_capturing:
            raise KVError(_CAPTURING % "torch")
        return module.cuda.current_stream(device).cuda_stream or LEGACY
    if library == "cupy" and module is not None:
        stream = module.cuda.get_current_stream(device)
        if stream.is_capturing():
            raise KVError(_CAPTURING % "cupy")
        return stream.ptr or LEGACY
    return None


def device_array(
    value: object, cuda: Cuda, ours: Callable[[int], Stream], stream_of: StreamOf = current_stream
) -> DeviceView | None:
    """Return a value in GPU memory as a contiguous view to read; None if it is in the host's memory, or no array.

    Elements of torch's and cupy's arrays that are not contiguous are copied, by the library on the caller's stream.

    Arguments:
        cuda: asked for the device of an address, if the value does not tell.
        ours: gives the stream of ours that will read, by device: some libraries let it wait themselves.
        stream_of: as `current_stream`.

    Raises:
        KVError: it is in memory of another kind of device, or cannot be read there; says what to do.
        StoreClosed: it is on a GPU, and this process was forked from the one that opened CUDA.
    """
    view = _device_view(value, cuda, ours, stream_of)
    if view is not None and not view.is_contiguous:
        raise KVError(_not_contiguous(value, view, "a contiguous copy"))
    return view


def device_output(value: object, cuda: Cuda, stream_of: StreamOf = current_stream) -> DeviceView | None:
    """Return a value in GPU memory as a contiguous view to write; None if it is in the host's memory, or no array.

    Arguments:
        cuda, stream_of: as for `device_array`.

    Raises:
        KVError: it cannot be written there, or is no array in CUDA memory; says what to do.
        StoreClosed: as `device_array`.
    """
    view = _device_view(value, cuda, None, stream_of)
    if view is None:
        return None
    if view.is_readonly:
        raise KVError(f"{named(value)} is read-only; fix: give an array that can be written, such as a copy")
    if not view.is_contiguous:
        if any(not step and length > 1 for step, length in zip(view.strides, view.shape, strict=True)):
            raise KVError(
                f"elements of {named(value)} share memory (shape {view.shape}, strides {view.strides}), as in a"
                " broadcast or expanded array; fix: give an array without repeats"
            )
        raise KVError(_not_contiguous(value, view, "a contiguous array, and copy it to where it belongs"))
    return view


# What scripts for MXNet ask for by other names, or bring along.

MXNET_MEMBERS = {
    "_barrier": "barrier()",
    "_set_updater": "set_updater(function)",
    "save_optimizer_states": "save_states(folder)",
    "load_optimizer_states": "load_states(folder)",
    "_send_command_to_servers": "set_optimizer(name, ...), profile(folder) or stats()",
    "_set_optimizer": "set_optimizer(name, ...)",
    "get_num_dead_node": "num_dead_node(node_id, timeout)",
    "local_rank": "the variable DISTRUN_LOCAL_RANK",
}
"""What MXNet's stores have by other names, to what it is here."""

MXNET_KINDS = {
    "local_update_cpu": "create('local')",
    "local_allreduce_cpu": "create('local')",
    "local_allreduce_device": "create('device')",
    "nccl": "create('device')",
    "horovod": "a store that a package registers (KVStoreBase.register), or create('dist_device_sync')",
    "byteps": "a store that a package registers (KVStoreBase.register), or create('dist_device_sync')",
}
"""MXNet's kinds that have other names here, to what to call."""


def of_mxnet(value: object, is_output: bool = False) -> str | None:
    """Return what to do about an array of MXNet, which shows its memory to no other library; None: it is none."""
    if isinstance(value, np.ndarray) or not hasattr(value, "asnumpy"):
        return None
    fix = "pull into an array of numpy, and then x[:] = array" if is_output else "call .asnumpy()"
    return f"found {named(value)}, an array of MXNet, which only MXNet can read; fix: {fix}"


def not_of_torch(found: object) -> str:
    """Return what to do about something of MXNet's in place of parameters; empty: it is not MXNet's."""
    if type(found).__module__.partition(".")[0] != "mxnet":
        return ""
    return (
        ", but of MXNet; fix: give the parameters of a torch network, or Parameter(x.asnumpy(), gradient), whose weight"
        " and gradient are arrays of numpy"
    )


def refusal(value: object, is_output: bool = False) -> str | None:
    """Return why a store cannot use an array that is in no memory of the host or of a CUDA device, and what to do.

    None if nothing is known. The text has no key. It is asked for when numpy could not read the value.
    """
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(value, torch.Tensor):
        return _tensor_refusal(value, torch, is_output)
    if jax is not None and is_output and isinstance(value, jax.Array):
        return (
            f"found {named(value)}, which cannot be written; fix: pull into an array of numpy, and give that to"
            " jax.numpy.asarray"
        )
    if jax is not None and isinstance(value, jax.Array) and dlpack.device_of(value) is None:
        return _SPREAD % named(value)
    where = _place(value)
    if where is None:
        return of_mxnet(value, is_output)
    found = f"found {named(value)} in memory of {where}; {_CUDA_ONLY}"
    if is_output:
        return f"{found}; fix: give an array of numpy, and copy it to the GPU"
    return f"{found}; fix: {_to_host(value)}"


# By library


def _device_view(
    value: Any, cuda: Cuda, ours: Callable[[int], Stream] | None, stream_of: StreamOf
) -> DeviceView | None:
    view = _unchecked(value, cuda, ours, stream_of)
    if view is not None and not view.address and 0 not in view.shape:
        raise KVError(f"{named(value)} has no memory of its own; fix: give an array with values")
    return view


def _unchecked(value: Any, cuda: Cuda, ours: Callable[[int], Stream] | None, stream_of: StreamOf) -> DeviceView | None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_torch(value, torch, cuda, stream_of, is_output=ours is None)
    cupy, jax = sys.modules.get("cupy"), sys.modules.get("jax")
    if cupy is not None and isinstance(value, cupy.ndarray):
        cuda.check()
        return _of_cupy(value, cupy, stream_of, is_output=ours is None)
    if jax is not None and isinstance(value, jax.Array):
        if ours is None:
            raise KVError(str(refusal(value, is_output=True)))
        return _of_dlpack(value, cuda, ours)
    if _has_interface(value):
        cuda.check()
        return _of_interface(value, cuda)
    if hasattr(value, "__dlpack_device__") and hasattr(value, "__dlpack__"):
        return _of_dlpack(value, cuda, ours)
    return None


def _of_torch(tensor: Any, torch: Any, cuda: Cuda, stream_of: StreamOf, is_output: bool) -> DeviceView | None:
    place = tensor.device
    if place.type == "cpu":
        return None
    why = _tensor_refusal(tensor, torch, is_output)
    if why is not None:
        raise KVError(why)
    cuda.check()
    device = place.index
    stream = stream_of("torch", device)
    # A parameter without its gradient's history. What is lazily negated or not contiguous is copied on torch's stream.
    plain = tensor.detach()
    if plain.is_neg():
        plain = plain.resolve_neg()
    if not is_output and not plain.is_contiguous():
        plain = plain.contiguous()
    dtype = _BY_NAME.get(plain.dtype)
    if dtype is None:
        dtype = _BY_NAME[plain.dtype] = _dtype(tensor, str(plain.dtype).rpartition(".")[2])
    size = dtype.itemsize
    return DeviceView(
        library="torch",
        device=device,
        address=plain.data_ptr(),
        shape=tuple(plain.shape),
        strides=tuple([step * size for step in plain.stride()]),
        dtype=dtype,
        stream=stream,
        owner=plain,
    )


def _of_cupy(array: Any, cupy: Any, stream_of: StreamOf, is_output: bool) -> DeviceView:
    if cupy.cuda.runtime.is_hip:
        raise KVError(f"found {named(array)} in memory of ROCm; {_CUDA_ONLY}; fix: {_to_host(array)}")
    device = int(array.device.id)
    stream = stream_of("cupy", device)
    if not is_output and not array.flags.c_contiguous:
        with array.device:
            array = cupy.ascontiguousarray(array)
    dtype = _BY_NAME.get(array.dtype)
    if dtype is None:
        dtype = _BY_NAME[array.dtype] = _dtype(array, array.dtype)
    return DeviceView(
        library="cupy",
        device=device,
        address=int(array.data.ptr),
        shape=tuple(array.shape),
        strides=tuple(array.strides),
        dtype=dtype,
        stream=stream,
        owner=array,
    )


def _of_interface(value: Any, cuda: Cuda) -> DeviceView:
    found = value.__cuda_array_interface__
    if found.get("mask") is not None:
        raise KVError(f"{named(value)} has a mask, and no mask is stored or sent; fix: give it without")
    address, is_readonly = found["data"]
    # Version 2 says nothing of streams: the default one is that of most programs. In version 3, None means that nothing
    # has to be waited for.
    stream = found.get("stream") if found["version"] >= 3 else LEGACY
    if stream == 0:
        raise KVError(
            f"{named(value)} gives 0 as its stream in __cuda_array_interface__, which may be either default stream;"
            " fix: 1 (legacy) or 2 (per thread) there"
        )
    shape = tuple(found["shape"])
    # Of types that numpy does not know, it only has the size: the array's own dtype says the name.
    own = getattr(getattr(value, "dtype", None), "name", None)
    dtype = _dtype(value, own if own == "bfloat16" and found["typestr"][1:] in {"V2", "u2"} else found["typestr"])
    strides = found.get("strides")
    device = cuda.device_of(int(address)) if address and math.prod(shape) else 0
    if device < 0:
        raise KVError(
            f"{named(value)} has __cuda_array_interface__, which is for memory of a GPU, but CUDA knows no memory at"
            f" its address {address:#x}; fix: give what is in host memory as an array of numpy"
        )
    return DeviceView(
        library=_library(value),
        device=device,
        address=int(address or 0),
        shape=shape,
        strides=tuple(strides) if strides is not None else dlpack.compact_strides(shape, dtype.itemsize),
        dtype=dtype,
        is_readonly=bool(is_readonly),
        stream=stream,
        owner=value,
    )


def _of_dlpack(value: Any, cuda: Cuda, ours: Callable[[int], Stream] | None) -> DeviceView | None:
    place = dlpack.device_of(value)
    jax = sys.modules.get("jax")
    is_jax = jax is not None and isinstance(value, jax.Array)
    if place is None:
        if is_jax:
            raise KVError(_SPREAD % named(value))
        return None
    kind, device = place
    if kind in dlpack.HOSTS:
        return None
    if kind not in _GPUS:
        raise KVError(f"found {named(value)} in memory of {dlpack.name_of(kind)}; {_CUDA_ONLY}; fix: {_to_host(value)}")
    if ours is None:
        raise KVError(
            f"{named(value)} only has DLPack, by which an array is read and not written; fix: give an array of torch,"
            " cupy or numpy"
        )
    cuda.check()
    try:
        found = dlpack.export(value, ours(device).handle)
    except (BufferError, TypeError, ValueError, RuntimeError) as err:
        raise KVError(f"{named(value)} cannot be read by DLPack ({err}); fix: {_to_host(value)}") from err
    return DeviceView(
        library=_library(value),
        device=device,
        address=found.address,
        shape=found.shape,
        strides=found.strides,
        dtype=_dtype(value, found.dtype),
        is_readonly=True,
        stream=None,
        is_immutable=is_jax,
        owner=(value, found.owner),
    )


def _dtype(value: object, given: Any) -> DType:
    """Return a dtype of `dtypes.NAMES` for a name, a numpy dtype or a type string."""
    if type(given) is str and given in _BY_NAME:
        return _BY_NAME[given]
    if given == "bfloat16" or getattr(given, "name", None) == "bfloat16":
        return dtypes.BFLOAT16
    try:
        found = np.dtype(given)
    except TypeError:  # one that only this library knows
        name = str(given)
    else:
        if not found.isnative:
            raise KVError(
                f"{named(value)} has foreign byte order ({found.str}), which is not changed on a GPU; fix: give a"
                " native one"
            )
        name = found.name
    if name not in dtypes.NAMES:
        raise KVError(f"{named(value)} has dtype {name}, expected one of {', '.join(dtypes.NAMES)}")
    return dtypes.parse(name)


# Messages


def _not_contiguous(value: object, view: DeviceView, what: str) -> str:
    return f"{named(value)} is not contiguous (shape {view.shape}, strides {view.strides}); fix: give {what}"


def _tensor_refusal(tensor: Any, torch: Any, is_output: bool) -> str | None:
    kind = tensor.device.type
    if kind == "meta":
        return f"found {named(tensor)} on the meta device, which has no values; fix: give a tensor with values"
    if tensor.is_quantized:
        return f"found {named(tensor)} of quantized dtype {tensor.dtype}; fix: give tensor.dequantize()"
    if tensor.layout is not torch.strided:
        return f"found {named(tensor)} of layout {tensor.layout}; fix: give tensor.to_dense()"
    if is_output and (tensor.is_neg() or tensor.is_conj()):
        return (
            f"found {named(tensor)} whose memory has other numbers than it shows (its negative or conjugate bit is"
            " set), so it cannot be written; fix: give a tensor of its own, such as torch.empty_like(tensor)"
        )
    if kind == "cpu":
        return None
    if kind == "cuda" and torch.version.hip is None:
        return None
    place = f"ROCm ({tensor.device})" if kind == "cuda" else str(tensor.device)
    if is_output:
        return (
            f"found {named(tensor)} on {place}; {_CUDA_ONLY}; fix: give a tensor in host memory, and copy it with"
            " tensor.copy_()"
        )
    return f"found {named(tensor)} on {place}; {_CUDA_ONLY}; fix: give tensor.cpu()"


def _place(value: Any) -> str | None:
    """Return the name of the device that has an array's memory; None if it is the host's or CUDA's, or not known."""
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return f"ROCm (device {value.device.id})" if cupy.cuda.runtime.is_hip else None
    place = dlpack.device_of(value)
    if place is None or place[0] in (*dlpack.HOSTS, *_GPUS):
        return None
    return f"{dlpack.name_of(place[0])} (device {place[1]})"


def _has_interface(value: object) -> bool:
    try:
        return hasattr(value, "__cuda_array_interface__")
    # A property of the library's own: of an array that is not on a GPU it raises whatever it likes.
    except Exception:
        return False


def _to_host(value: object) -> str:
    known = {"cupy": "value.get()", "jax": "numpy.asarray(value)", "numba": "value.copy_to_host()"}
    found = known.get(_library(value))
    return f"give {found}" if found else "bring it to host memory as an array first"


def _library(value: object) -> str:
    # jax's class is of jaxlib; others may be derived by programs.
    for name, kind in (("torch", "Tensor"), ("cupy", "ndarray"), ("jax", "Array")):
        module = sys.modules.get(name)
        if module is not None and isinstance(value, getattr(module, kind)):
            return name
    return type(value).__module__.partition(".")[0]


def named(value: object) -> str:
    """Return an array's library and class: `a torch Tensor`."""
    library = _library(value)
    return f"a {library} {'Array' if library == 'jax' else type(value).__name__}"


# What numpy sees


def tensor_output(tensor: object, what: str) -> Array:
    """Return a torch tensor's host memory, to be written.

    Raises:
        KVError: as `host_array`; a tensor that torch negates or conjugates lazily, too.
    """
    try:
        return tensor_memory(tensor)
    except (TypeError, ValueError, RuntimeError) as err:
        why = refusal(tensor, is_output=True) or unreadable(tensor, err)
        raise KVError(f"{what}: {why}") from err


def unreadable(value: object, error: Exception) -> str:
    """Return why numpy cannot read a value that is not known, and what to do."""
    return f"numpy cannot read a {type(value).__name__} ({error}); bring it to host memory as an array first"


def memory_of(value: object) -> Array:
    """Return what numpy sees of a value: the same memory, if numpy can see it. bfloat16 becomes `dtypes.BFLOAT16`.

    Raises:
        TypeError, ValueError, RuntimeError, BufferError: what the value raises when it is asked for its memory, such
            as a tensor on a device.
    """
    if is_tensor(value):
        return _tensor_values(value)
    if not hasattr(value, "__array__") and hasattr(value, "__dlpack__"):
        # numpy would take managed memory, too, and not wait for the GPU that writes it.
        place = dlpack.device_of(value)
        if place is not None and place[0] not in dlpack.HOSTS:
            raise BufferError("it is not in host memory")
        shared: Array = np.from_dlpack(value)
        return own_bfloat16(shared)
    return own_bfloat16(np.asarray(value))


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_torch_dtype(dtype: object) -> bool:
    """Tell whether it is an element type of torch's."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dtype, torch.dtype)


def _tensor_values(tensor: Any) -> Array:
    try:
        return tensor_memory(tensor)
    except (TypeError, RuntimeError):
        # torch negates and conjugates by a bit, and leaves the memory as it was.
        if not (tensor.is_neg() or tensor.is_conj()):
            raise
    return tensor_memory(tensor.detach().resolve_conj().resolve_neg())


def tensor_memory(tensor: Any) -> Array:
    """Return a dense torch tensor's host memory as an array; a parameter's too, without its gradient's history.

    It may be what only looks like a tensor: a trainer takes that, without torch too.
    """
    plain = tensor.detach()
    if str(plain.dtype) == "torch.bfloat16":
        import torch  # it is there: the dtype is one of its

        halves: Array = plain.view(torch.int16).numpy()
        return halves.view(dtypes.BFLOAT16)
    array: Array = plain.numpy()
    return array


def tensor_over(array: Array) -> Any:
    """Return a torch tensor in the memory of an array of a dtype that torch has."""
    torch = sys.modules["torch"]
    if array.dtype == dtypes.BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def own_bfloat16(array: Array) -> Array:
    """Return an array of ml_dtypes' bfloat16 as one of `dtypes.BFLOAT16`, in the same memory; any other as it is."""
    # Known by name and form: the package need not be there.
    if array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.name == "bfloat16":
        return array.view(dtypes.BFLOAT16)
    return array
