"""The forms in which keys and values may be given, brought to one form. No side effects.

    one key        one array, or a list of arrays: one for each device
    list of keys   a list of as many items, each an array or such a list

A key repeated in one call is one key with all its values, at the place of its first mention. Keys are int or str;
numpy's integers are ints. Values are what numpy can see without a copy: arrays, numpy scalars, memory views, and
arrays of other libraries in host memory by their array interfaces or DLPack; a Python float or int is a 0-d float64
or int64 array. bfloat16 arrays of ml_dtypes and torch are viewed as `BFLOAT16`. Sparse values (ours, scipy's, torch's)
are a RowSparse. An array in GPU memory is a `gpu.GpuArray` in the same memory, which is to be borrowed before it is
used (`arrays.gpu_devices`); where host memory is needed it is copied there.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any, Union, cast

import numpy as np

from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.device import DeviceArray, is_on_host
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.arrays.shared_memory import address_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops.reduce import ascending
from distrun_runtime.store.keys import ROW_SPARSE, Key, KeyRecord, Zeros

# Row-sparse values, and the row pulls of row-sparse keys.
#
# A RowSparse is some rows of a value, by number: the gradient of an embedding, or what `row_sparse_pull` returns.


class RowSparse:
    """Rows of a value of `shape`; all others are zero.

    Attributes:
        values: (n, *shape[1:]) in one of the store's dtypes.
        rows: int64 of shape (n,), each from 0 to shape[0] - 1; any order, and rows that are named more than once are
            summed (`canonical` does it).
        shape: of the whole value, at least one dimension.

    The arrays are not copied. `fill` exchanges them: that is how a pull writes into one.
    """

    stype = ROW_SPARSE

    def __init__(self, values: object, rows: object, shape: Sequence[int]) -> None:
        self.shape: tuple[int, ...] = _shape(shape)
        if not self.shape or min(self.shape) < 0:
            raise KVError(f"a RowSparse has a shape of at least one dimension, found {self.shape}")
        refuse_mask(values, "the values of a RowSparse")
        self.values: Array = devices.host_array(values, "the values of a RowSparse")
        self.rows: Array = row_numbers(rows, self.shape[0], "RowSparse")
        expected = (len(self.rows), *self.shape[1:])
        if self.values.shape != expected:
            raise KVError(
                f"a RowSparse of shape {self.shape} with {len(self.rows)} rows has values of shape {expected},"
                f" found {self.values.shape}"
            )

    def __repr__(self) -> str:
        return f"RowSparse({len(self.rows)} of {self.shape[0]} rows, shape {self.shape}, {dtypes.name_of(self.dtype)})"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self.values.dtype

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: object = "float32") -> RowSparse:
        """Return one without rows: a contribution of nothing, or an output for `row_sparse_pull`.

        Raises:
            KVError: a shape of no dimension.
            ValueError, TypeError: no such dtype.
        """
        kind = dtypes.parse(dtype) if isinstance(dtype, str) else np.dtype(dtype)  # type: ignore[call-overload]
        return cls(np.empty((0, *_shape(shape)[1:]), kind), np.empty(0, np.int64), shape)

    @classmethod
    def from_dense(cls, array: object) -> RowSparse:
        """Return the rows of an array that are not all zero, as a copy.

        Raises:
            KVError: an array of no dimension, or a masked array.
        """
        refuse_mask(array, "the array of a RowSparse")
        dense = devices.host_array(array, "the array of a RowSparse")
        if not dense.ndim:
            raise KVError("a RowSparse has a shape of at least one dimension, found ()")
        flat = dtypes.widen(dense).reshape(dense.shape[0], math.prod(dense.shape[1:]))
        rows = np.flatnonzero(flat.any(axis=1))
        return cls(dense[rows], rows, dense.shape)

    @classmethod
    def from_scipy(cls, matrix: Any) -> RowSparse:
        """Return the rows of a scipy.sparse matrix or array that have stored elements; each row becomes dense.

        One of cupyx.scipy.sparse is copied to the host first.
        """
        if type(matrix).__module__.partition(".")[0] == "cupyx":
            matrix = matrix.get()  # a copy in host memory, of scipy
        table = matrix.tocsr()
        rows = np.flatnonzero(np.diff(table.indptr))
        return cls(table[rows].toarray(), rows, table.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> RowSparse:
        """Return the rows of a sparse torch tensor, such as the gradient of `Embedding(sparse=True)`.

        A COO tensor of one sparse dimension in host memory is taken as it is, without a copy; any other becomes rows
        first. One on a device is copied to the host before.
        """
        table = tensor.detach()
        if table.device.type != "cpu":
            table = table.cpu()
        if not table.is_sparse:
            table = table.to_sparse_coo()
        if table.sparse_dim() == 1:
            # Uncoalesced as it may be: rows named twice are ours to sum.
            return cls(foreign.tensor_memory(table._values()), table._indices()[0].numpy(), table.shape)
        table = table.coalesce()
        rows, place = np.unique(table.indices()[0].numpy(), return_inverse=True)
        found = foreign.tensor_memory(table.values())
        values = np.zeros((len(rows), *table.shape[1:]), found.dtype)
        where = (place.reshape(-1), *(axis.numpy() for axis in table.indices()[1:]))
        values[where] = found
        return cls(values, rows, table.shape)

    @classmethod
    def of(cls, value: object) -> RowSparse | None:
        """Return a value as RowSparse if it is sparse - one of ours, scipy's or torch's -, None if it is not."""
        if isinstance(value, RowSparse):
            return value
        if hasattr(value, "tocsr") and hasattr(value, "nnz"):
            return cls.from_scipy(value)
        if hasattr(value, "to_sparse_coo") and "sparse" in str(getattr(value, "layout", "")):
            return cls.from_torch(value)
        return None

    @classmethod
    def total(cls, values: Sequence[RowSparse], dtype: DType | None = None) -> RowSparse:
        """Return the canonical sum of at least one, all of one shape and dtype; 16-bit floats are added in float32.

        Arguments:
            dtype: of the sum: their own, or its work dtype. A single one that is canonical is returned as it is.
        """
        first = values[0]
        if len(values) > 1:
            joined = np.concatenate([value.values for value in values])
            first = cls(joined, np.concatenate([value.rows for value in values]), first.shape)
        return first.canonical(dtype)

    def canonical(self, dtype: DType | None = None) -> RowSparse:
        """Return the same with rows in ascending order, each once; itself if it is so already.

        Arguments:
            dtype: of rows that are summed: as for `total`.
        """
        if (self.rows[1:] > self.rows[:-1]).all():
            return self
        order = np.argsort(self.rows, kind="stable")
        rows = self.rows[order]
        starts = np.flatnonzero(np.concatenate(([True], rows[1:] != rows[:-1])))
        values = self.values[order]
        if len(starts) < len(rows):
            with np.errstate(over="ignore", invalid="ignore"):
                wide = dtypes.widen(values)
                sums = np.add.reduceat(wide, starts, axis=0, dtype=wide.dtype)
            values = dtypes.narrow(sums, self.dtype if dtype is None else dtype)
        return RowSparse(values, rows[starts], self.shape)

    def to_dense(self) -> Array:
        """Return the whole value as a new array."""
        one = self.canonical()
        dense = np.zeros(self.shape, self.dtype)
        dense[one.rows] = one.values
        return dense

    def fill(self, values: Array, rows: Array) -> None:
        """Exchange the rows: `values` (n, *shape[1:]) of the same dtype for `rows` int64 (n,). Not copied."""
        if values.dtype != self.dtype or values.shape != (len(rows), *self.shape[1:]):
            raise KVError(
                f"{self!r} cannot be filled with {len(rows)} rows from values of shape {values.shape} and"
                f" dtype {dtypes.name_of(values.dtype)}"
            )
        self.values, self.rows = values, row_numbers(rows, self.shape[0], "RowSparse")


class Lookup:
    """The row pull of one key: the rows to ask for, and the outputs that take them.

    The row numbers of an output are whole numbers in any order, also repeated. Each row travels once.

    Arguments:
        pairs: each output with its row numbers. A RowSparse gets its rows ascending, each once; an array of shape
            (n, *shape[1:]) or (*row_ids.shape, *shape[1:]) gets one row for each of the n numbers, in their order.

    Raises:
        KVError: the key is not row-sparse, a row is out of range, or an output does not fit.
    """

    def __init__(self, record: KeyRecord, pairs: Sequence[tuple[Union[Array, RowSparse], Array]]) -> None:
        if not record.is_sparse:
            raise KVError(
                f"key {record.key!r} is not row-sparse: pull it as a whole, or give init a RowSparse to make it so"
            )
        self.outputs = [(out, _numbers_for(record, out, ids)) for out, ids in pairs]
        """Each output with its row numbers: int64, of one dimension, in the order given."""
        self.rows: Array = ascending(np.concatenate([numbers for _, numbers in self.outputs]))
        """What to ask for: int64, ascending, each once."""

    def take(self, found: Array) -> None:
        """Fill the outputs; `found` (n, *shape[1:]) has the values of `rows`. The outputs may keep it."""
        for place, (out, numbers) in enumerate(self.outputs):
            if isinstance(out, RowSparse):
                # An output keeps its rows: they must not be the caller's array, nor another output's.
                rows = self.rows if len(self.outputs) == 1 else ascending(numbers.copy())
                picked = found if len(rows) == len(self.rows) and place == 0 else found[self._at(rows)]
                out.fill(picked, rows)
            else:
                picked = found if np.array_equal(numbers, self.rows) else found[self._at(numbers)]
                out[...] = picked.reshape(out.shape)

    def _at(self, numbers: Array) -> Array:
        """Return the place of each of these among `rows`."""
        order = np.argsort(numbers)  # To look up ascending numbers is several times as fast.
        places = np.empty(len(numbers), np.intp)
        places[order] = np.searchsorted(self.rows, numbers[order])
        return places


def _numbers_for(record: KeyRecord, out: Array | RowSparse, ids: Array) -> Array:
    """Return row numbers in one dimension, if they and the output fit the key."""
    numbers = row_numbers(ids, record.shape[0], f"key {record.key!r}")
    if isinstance(out, RowSparse):
        record.fit(out, "output")
        return numbers
    tail = record.shape[1:]
    if out.dtype != record.dtype or out.shape not in {(numbers.size, *tail), (*ids.shape, *tail)}:
        raise KVError(
            f"key {record.key!r}: the output has shape {out.shape} and dtype {dtypes.name_of(out.dtype)}, but"
            f" {numbers.size} rows of it have shape {(numbers.size, *tail)} and dtype {dtypes.name_of(record.dtype)}"
        )
    return numbers


def refuse_mask(value: object, what: str) -> None:
    """Return unless the value is a masked array; `what` is its name in the message.

    Raises:
        KVError: it is one. numpy would give its masked elements as if they were not masked.
    """
    # Where numpy.ma was not imported there is no such array, and to import it takes several milliseconds.
    if isinstance(value, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        raise KVError(
            f"{what}: found a masked array, expected an array without a mask, as no mask is stored or sent;"
            " fix: give array.filled(0) to use 0 for the masked elements, or array.data to ignore the mask"
        )


def row_numbers(rows: object, count: int, what: str) -> Array:
    """Return row numbers as an int64 array of one dimension, in the order given; not copied where possible.

    Arguments:
        rows: whole numbers in an array of any shape and dtype, or a list.
        count: rows of the value.
        what: whose they are, for messages, such as "key 'a'".

    Raises:
        KVError: numbers that are not whole, below 0, not below `count`, or so large that their type rounds whole
            numbers; names the first such.
    """
    refuse_mask(rows, f"{what}: the row numbers")
    given = devices.host_array(rows, f"{what}: the row numbers")
    array = dtypes.widen(given)
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iuf":
        raise KVError(f"{what}: row numbers are whole numbers, found dtype {array.dtype}")
    flat = array.reshape(-1)
    wrong = (flat < 0) | (flat >= count) | ((flat != np.floor(flat)) if flat.dtype.kind == "f" else False)
    if array.dtype.kind == "f":
        wrong |= ~np.isfinite(flat)
    if wrong.any():
        raise KVError(
            f"{what}: row {flat[int(np.argmax(wrong))]}, expected whole numbers from 0 to {count - 1}: the"
            f" value has {count} rows"
        )
    if array.dtype.kind == "f" and flat.max() >= dtypes.exact_below(given.dtype):
        raise KVError(
            f"{what}: row {int(flat.max())} is given as {dtypes.name_of(given.dtype)}, which rounds whole numbers from"
            f" {dtypes.exact_below(given.dtype)} on, so that another row may be meant; fix: give row numbers as"
            " integers, such as int64"
        )
    return flat.astype(np.int64, copy=False)


def _shape(value: object) -> tuple[int, ...]:
    """Return the shape of a whole value as it was given.

    Raises:
        KVError: no sequence of whole numbers.
    """
    if not isinstance(value, (Sequence, np.ndarray)) or not all(hasattr(length, "__index__") for length in value):
        raise KVError(f"a RowSparse's shape is that of the whole value, such as (6, 2), not {value!r}")
    return tuple(int(length) for length in value)


Value = Union[DeviceArray, RowSparse]
"""What is given for one key from one device."""

First = Union[Value, Zeros]
"""The first value of a key."""

Output = Union[Array, RowSparse]
"""What a row pull writes to."""

KEY_BYTES = 4096
"""The longest str key in UTF-8; a message holds many of them."""

NO_LISTS = (str, bytes, bytearray, memoryview)
"""Sequences that are no lists of keys."""


def key_of(key: object) -> Key:
    """Return one key as int or str.

    Raises:
        KVError: it is neither, or an int of more than 64 bits, or a str that is too long or not valid Unicode.
    """
    if isinstance(key, str):
        try:
            size = len(key.encode("utf-8"))
        except UnicodeEncodeError:
            raise KVError(f"key {key!r} holds a surrogate and cannot be sent; use valid Unicode") from None
        if size > KEY_BYTES:
            raise KVError(f"key {key!r:.60}... has {size} bytes, expected at most {KEY_BYTES}")
        return str(key)
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -(2**63) <= int(key) < 2**63:
            raise KVError(f"key {int(key)} does not fit into 64 bits; use a str key")
        return int(key)
    raise KVError(f"a key is an int or a str, not {_kind(key)}: {key!r:.60}")


def one_kind(keys: Sequence[Key], first: Key | None = None) -> None:
    """Return if all keys are of one kind, that of `first` if given.

    Raises:
        KVError: an int and a str key meet; both are named.
    """
    for key in keys:
        first = key if first is None else first
        if type(key) is not type(first):
            raise KVError(
                f"key {key!r} is {_kind(key)}, key {first!r} is {_kind(first)}: the keys of one store are all"
                " ints or all strs"
            )


def keys_of(keys: object) -> list[Key]:
    """Return one key or a list of keys as a list, each once.

    Raises:
        KVError: a key of another kind.
    """
    if not isinstance(keys, Sequence) or isinstance(keys, NO_LISTS):
        return [key_of(keys)]
    names = list(dict.fromkeys(key_of(item) for item in keys))
    one_kind(names)
    return names


def contributions(key: object, value: object, *, on_host: bool = False) -> list[tuple[Key, list[Value]]]:
    """Return each key once with all values pushed to it, in the order given. Arrays are not copied if avoidable.

    Arguments:
        on_host: all are to be in the host's memory.

    Raises:
        KVError: a key or value of another kind; as many values as keys were expected.
    """
    gpus = devices.GpuArrays()
    return [
        (name, [value_of(name, item, on_host=on_host, gpus=gpus) for item in items])
        for name, items in grouped(key, value, "value")
    ]


def declared(key: object, shape: object, dtype: object) -> list[tuple[Key, Zeros]]:
    """Return each key with the shape and dtype that it is declared with.

    Arguments:
        shape: for all keys; or, for a list of keys, a list of as many, or a tuple of such. Of collective calls, Zeros.
        dtype: by name or as numpy's or torch's; likewise.

    Raises:
        KVError: a key of another kind or given twice, no shape, no such dtype; or not as many as keys.
    """
    names = keys_of(key)
    is_list = isinstance(key, Sequence) and not isinstance(key, NO_LISTS)
    if is_list and len(names) < len(cast("Sequence[object]", key)):
        raise KVError("declare: each key once")
    is_each = isinstance(shape, list) or (isinstance(shape, tuple) and isinstance(next(iter(shape), 0), (list, tuple)))
    shapes = list(cast("Sequence[object]", shape)) if is_list and is_each else [shape] * len(names)
    kinds = list(dtype) if is_list and isinstance(dtype, (list, tuple)) else [dtype] * len(names)
    if not len(shapes) == len(kinds) == len(names):
        raise KVError(f"declare: {len(names)} keys, {len(shapes)} shapes and {len(kinds)} dtypes; expected as many")
    found = []
    for name, sides, kind in zip(names, shapes, kinds, strict=True):
        whose = f"key {name!r}"
        made = sides if isinstance(sides, Zeros) else Zeros(shape_of(sides, whose), dtype_of(kind, whose))
        found.append((name, made))
    return found


def shape_of(shape: object, what: str) -> tuple[int, ...]:
    """Return the shape of an array; a whole number is that of one dimension.

    Raises:
        KVError: it is none; `what` is whose.
    """
    try:
        sides = (shape,) if isinstance(shape, (int, np.integer)) else tuple(cast(Any, shape))
        found = tuple(operator.index(side) for side in sides)
    except TypeError:
        found = (-1,)
    if any(side < 0 for side in found):
        raise KVError(f"{what}: shape {shape!r:.80}: expected whole numbers from 0, such as (2, 3)")
    return found


def dtype_of(dtype: object, what: str) -> DType:
    """Return an element type that a store holds, given by its name, or as numpy's or torch's.

    Raises:
        KVError: there is none; `what` is whose.
    """
    name = str(dtype).removeprefix("torch.") if foreign.is_torch_dtype(dtype) else dtype
    try:
        kind = dtypes.parse(name) if isinstance(name, str) else np.dtype(cast(Any, name))
    except (TypeError, ValueError) as err:
        raise KVError(f"{what}: {err}") from None
    if dtypes.name_of(kind) not in dtypes.NAMES:
        raise KVError(f"{what}: no element type {kind}; known are {', '.join(dtypes.NAMES)}")
    return kind


def initial(key: object, value: object) -> list[tuple[Key, First]]:
    """Return each key with its one value, in the host's memory.

    Raises:
        KVError: as `contributions`; a key given twice, or with several values.
    """
    result: list[tuple[Key, First]] = []
    for name, arrays in contributions(key, value, on_host=True):
        if len(arrays) != 1:
            raise KVError(
                f"key {name!r} has {len(arrays)} values in one init, expected one: a key is initialised"
                f" once{list_hint(arrays)}"
            )
        result.append((name, arrays[0]))
    return result


def outputs(key: object, out: object) -> list[tuple[Key, list[DeviceArray]]]:
    """Return each key once with all arrays that its value is to be written to.

    Raises:
        KVError: a key of another kind, another number of outputs than keys, an output that cannot be written, or
            outputs that share memory.
    """
    gpus = devices.GpuArrays()
    found = [(name, [output_of(name, item, gpus) for item in items]) for name, items in grouped(key, out, "output")]
    apart([(name, None, array) for name, arrays in found for array in arrays])
    return found


def row_outputs(key: object, out: object) -> list[tuple[Key, RowSparse]]:
    """Return each key with the RowSparse that its rows go to; empty: the outputs are arrays.

    Raises:
        KVError: some are arrays, or a key has several.
    """
    outs = out if isinstance(out, (list, tuple)) else (out,)
    if not any(type(each) is RowSparse for each in outs):
        return []
    found = []
    for name, its in grouped(key, out, "output"):
        if len(its) != 1 or not isinstance(its[0], RowSparse):
            raise KVError(f"key {name!r}: expected one RowSparse as output, as of the other keys, or arrays for all")
        found.append((name, its[0]))
    return found


def wanted(key: object, out: object, row_ids: object) -> list[tuple[Key, list[tuple[Output, Array]]]]:
    """Return each key of a row pull once, with its outputs and the row numbers of each: any shape, not checked.

    Arguments:
        key, out: as for `outputs`, but an output may be a RowSparse.
        row_ids: an array or a list of ints, for all outputs; or a list in the form of `out` with one for each output.

    Raises:
        KVError: a key of another kind, another number of outputs or of row numbers than expected, an output that
            cannot be written, or row numbers that are a mask or no array.
    """
    if out is None or row_ids is None:
        raise KVError("row_sparse_pull needs out and row_ids")
    outs = grouped(key, out, "output")
    numbers = _arrays(row_ids)
    if isinstance(numbers, list):
        ids = [each for _, each in grouped(key, numbers, "row_id")]
    else:
        ids = [[numbers] for _ in outs]
    result = []
    for (name, items), each in zip(outs, ids, strict=True):
        if len(each) not in (1, len(items)):
            raise KVError(
                f"key {name!r}: {len(items)} outputs, but {len(each)} row_ids: expected one for each, or one for all"
            )
        targets = [item if isinstance(item, RowSparse) else _host_output(name, item) for item in items]
        given = [_row_ids(name, item) for item in each]
        result.append((name, list(zip(targets, given * len(items) if len(given) == 1 else given, strict=True))))
    return result


def _host_output(key: Key, out: object) -> Array:
    if foreign.is_on_gpu(out):
        why = foreign.refusal(out, is_output=True) or (
            f"found {foreign.named(out)} in the memory of a GPU, but rows are written into host memory; fix:"
            " give an array of numpy, and copy it to the GPU"
        )
        raise KVError(f"key {key!r}: the output: {why}")
    array: Array = output_of(key, out)
    return array


def _arrays(row_ids: object) -> object:
    """Return row numbers with every list of numbers as an array: a list that is left is one of several of them."""
    if not isinstance(row_ids, (list, tuple)):
        return row_ids
    if all(isinstance(item, (int, float, np.integer, np.floating)) for item in row_ids):
        return np.asarray(row_ids)
    return [_arrays(item) for item in row_ids]


def _row_ids(key: Key, ids: object) -> Array:
    if isinstance(ids, (str, bytes)) or str(getattr(ids, "dtype", "")).endswith("bool"):
        raise KVError(
            f"key {key!r}: row_ids are whole numbers, not"
            f" {_kind(ids) if isinstance(ids, (str, bytes)) else 'bool'}; for a mask give np.flatnonzero(mask)"
        )
    array: Array = array_of(key, ids, on_host=True)
    return array


def apart(outs: Sequence[tuple[Key, object, DeviceArray]]) -> None:
    """Return if no output would overwrite another.

    Arguments:
        outs: key, content and array of each. Outputs of one key and one content may be the same array. Those in GPU
            memory are contiguous.

    Raises:
        KVError: two outputs share memory, or an output does with itself; names the keys.
    """
    if len(outs) == 1 and (not is_on_host(outs[0][2]) or outs[0][2].flags.c_contiguous):
        return
    # Addresses tell memories apart: no two, of the host or of a GPU, are at the same one.
    spans = sorted((_span(key, array), number) for number, (key, _, array) in enumerate(outs) if array.size)
    reached: list[tuple[int, int]] = []
    for (start, end), number in spans:
        # Those that end before this one starts cannot meet any that follows.
        reached = [pair for pair in reached if pair[0] > start]
        for _, other in reached:
            _apart(outs[min(other, number)], outs[max(other, number)])
        reached.append((end, number))


def apart_in_rows(outs: Sequence[tuple[Key, Output, Array]]) -> None:
    """Return if no output of a row pull would overwrite another.

    Arguments:
        outs: key, output and row numbers of each. One array or RowSparse may be given twice for the same rows.

    Raises:
        KVError: two outputs are one RowSparse, or share memory; names the keys.
    """
    if len(outs) == 1:
        return
    sparse: dict[int, tuple[Key, Array]] = {}
    for key, out, numbers in outs:
        if not isinstance(out, RowSparse):
            continue
        other, rows = sparse.setdefault(id(out), (key, numbers))
        if other != key or not np.array_equal(rows, numbers):
            whose = f"keys {other!r} and {key!r} have" if other != key else f"key {key!r} has"
            raise KVError(
                f"{whose} one RowSparse as output for different rows, so one result would replace the other;"
                " fix: give each a RowSparse of its own"
            )
    arrays = [(key, numbers.tobytes(), out) for key, out, numbers in outs if not isinstance(out, RowSparse)]
    if arrays:
        apart(arrays)


def _apart(one: tuple[Key, object, DeviceArray], other: tuple[Key, object, DeviceArray]) -> None:
    if one[:2] == other[:2] and _layout(one[2]) == _layout(other[2]):
        return
    # Contiguous ones do, as they meet.
    if is_on_host(one[2]) and is_on_host(other[2]) and not np.shares_memory(one[2], other[2]):
        return
    if one[0] != other[0]:
        raise KVError(
            f"keys {one[0]!r} and {other[0]!r}: their outputs share memory, so one value would overwrite the"
            " other; fix: give each key an array of its own"
        )
    raise KVError(
        f"key {one[0]!r}: two of its outputs share memory, so one would overwrite the other; fix: give each an"
        " array of its own"
    )


def _layout(array: DeviceArray) -> object:
    """Return what two arrays of the same elements have in common."""
    return _address(array), array.strides if is_on_host(array) else array.shape


def _span(key: Key, array: DeviceArray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and behind its last one.

    Raises:
        KVError: some of its elements share memory.
    """
    start = _address(array)
    if not is_on_host(array) or array.flags.c_contiguous:
        return start, start + array.nbytes
    end = start + array.itemsize
    extent = array.itemsize
    for step, length in sorted((abs(step), length) for step, length in zip(array.strides, array.shape, strict=True)):
        if length > 1 and step < extent:
            raise KVError(
                f"key {key!r}: elements of the output share memory (shape {array.shape}, strides"
                f" {array.strides}), as in a broadcast or expanded array; fix: give an array without repeats,"
                f" such as np.empty({array.shape})"
            )
        extent += step * (length - 1)
    for step, length in zip(array.strides, array.shape, strict=True):
        start, end = start + min(step * (length - 1), 0), end + max(step * (length - 1), 0)
    return start, end


def _address(array: DeviceArray) -> int:
    return address_of(array) if is_on_host(array) else int(array.address)


def list_hint(found: Sequence[Value], dtype: str = "") -> str:
    """Return what to say of a key's values where one array was expected and a list of numbers may have been given.

    Arguments:
        found: the key's values, one for each device.
        dtype: of the array that was expected.
    """
    if any(value.shape != () for value in found):
        return ""
    shown = ", ".join([str(value) for value in found[:3]] + ["..."] * (len(found) > 3))
    text = "; a list has one value for each device, and each is a single number here; fix: give one array, np.array(%s)"
    return text % (f"[{shown}]" + (f", np.{dtype}" if dtype and dtype != "bfloat16" else ""))


def value_of(key: Key, value: object, *, on_host: bool = False, gpus: devices.GpuArrays | None = None) -> Value:
    """Return one value: a RowSparse, which is in host memory, if it is sparse, else an array.

    Arguments:
        on_host, gpus: as for `array_of`.

    Raises:
        KVError: as `array_of`.
    """
    try:
        sparse = RowSparse.of(value)
    except (TypeError, ValueError, RuntimeError) as err:
        raise KVError(f"key {key!r}: {err}") from err
    if sparse is None:
        return array_of(key, value, on_host=on_host, gpus=gpus)
    checked = array_of(key, sparse.values)
    return sparse if checked is sparse.values else RowSparse(checked, sparse.rows, sparse.shape)


def array_of(key: Key, value: object, *, on_host: bool = False, gpus: devices.GpuArrays | None = None) -> DeviceArray:
    """Return one value as an array of native byte order; the same memory where that is possible.

    Arguments:
        on_host: copy it to the host's memory, if it is in that of a GPU.
        gpus: that of the call, if it has several arrays.

    Raises:
        KVError: neither numpy nor CUDA can see it, or its dtype is none of `dtypes.NAMES`.
    """
    whose = f"key {key!r}"
    refuse_mask(value, whose)
    on_gpu = None if on_host else (gpus or devices.GpuArrays()).of(value, whose)
    return _stored(key, value, devices.host_array(value, whose)) if on_gpu is None else on_gpu


def _stored(key: Key, value: object, array: Array) -> Array:
    """Return the array of a value in native byte order, if it has one of the dtypes that a store holds."""
    if dtypes.name_of(array.dtype) not in dtypes.NAMES:
        raise KVError(
            f"key {key!r}: a {_kind(value)} gives dtype {array.dtype}, expected one of {', '.join(dtypes.NAMES)}"
        )
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def output_of(key: Key, out: object, gpus: devices.GpuArrays | None = None) -> DeviceArray:
    """Return one output as an array that shares its memory: a numpy array as it is, a torch tensor's, one on a GPU.

    Arguments:
        gpus: as for `array_of`.

    Raises:
        KVError: it is none of these, read-only, or of foreign byte order; on a GPU and not contiguous; of jax.
    """
    on_gpu = (gpus or devices.GpuArrays()).of(out, f"key {key!r}: the output", is_output=True)
    if on_gpu is not None:
        return on_gpu
    if foreign.is_tensor(out):
        return _stored(key, out, foreign.tensor_output(out, f"key {key!r}: the output"))
    if not isinstance(out, np.ndarray):
        why = foreign.refusal(out, is_output=True)
        if why is not None:
            raise KVError(f"key {key!r}: the output: {why}")
        if RowSparse.of(out) is not None:
            raise KVError(f"key {key!r}: a {_kind(out)} is filled by row_sparse_pull; pull writes whole arrays")
        raise KVError(
            f"key {key!r}: an output is a numpy array that can be written, a torch tensor, or an array in GPU"
            f" memory, not {_kind(out)}"
        )
    refuse_mask(out, f"key {key!r}: the output")
    if not out.flags.writeable:
        raise KVError(f"key {key!r}: the output is read-only; give an array that can be written, or a copy")
    if not out.dtype.isnative:
        raise KVError(f"key {key!r}: the output's byte order is foreign ({out.dtype.str}); give a native one")
    # A view of a class derived from it, such as numpy.matrix: that need not behave as an array does.
    return foreign.own_bfloat16(np.asarray(out))


def grouped(key: object, given: object, noun: str) -> list[tuple[Key, list[object]]]:
    """Return each key once with all that was given for it. `noun` is what that is, for messages."""
    if not isinstance(key, Sequence) or isinstance(key, NO_LISTS):
        return [(key_of(key), _devices(key_of(key), given, noun))]
    keys = [key_of(item) for item in key]
    one_kind(keys)
    if not isinstance(given, (list, tuple)):
        raise KVError(f"{len(keys)} keys, but one {_kind(given)} instead of a list of {noun}s")
    if len(given) != len(keys):
        raise KVError(f"{len(keys)} keys, but {len(given)} {noun}s: expected one (or one list) for each key")
    groups: dict[Key, list[object]] = {}
    for name, item in zip(keys, given, strict=True):
        groups.setdefault(name, []).extend(_devices(name, item, noun))
    return list(groups.items())


def _devices(key: Key, given: object, noun: str) -> list[object]:
    """Return what was given for one key as a list with an item for each device."""
    if not isinstance(given, (list, tuple)):
        return [given]
    if not given:
        raise KVError(f"key {key!r}: an empty list, expected at least one {noun}")
    if any(isinstance(item, (list, tuple)) for item in given):
        raise KVError(
            f"key {key!r}: a list in a list; expected an array, or a list of arrays, one for each device; fix:"
            " give np.array(...) for an array of numbers"
        )
    return list(given)


def _kind(value: object) -> str:
    return type(value).__name__
