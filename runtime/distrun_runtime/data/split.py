"""A batch cut for several devices: evenly, or by the devices' shares of the work.

Source: `gluon.utils.split_data`, `split_and_load` and `executor_manager._split_input_slice` of MXNet 1.9.1, with the
same sizes and roundings; here for everything that has a shape and takes slices (numpy arrays, torch tensors).
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Iterable, Protocol, Sequence, TypeVar

from distrun_runtime.data.whole import whole


class Sliceable(Protocol):
    """What can be cut: numpy arrays, torch tensors and their like."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of the axes."""
        ...

    def __getitem__(self, key: Any, /) -> Any:
        """Return the part that a tuple of slices names; a view, where the library has views."""
        ...


Data = TypeVar("Data", bound=Sliceable)


def split_data(data: Data, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Data]:
    """Return the data in `num_slice` parts, in order; the parts share the data's memory.

    Arguments:
        data: array or tensor of any dtype.
        num_slice: number of parts, at least 1.
        batch_axis: the axis that is cut.
        even_split: refuse a size that `num_slice` does not divide. Otherwise the first (size mod num_slice) parts
            have one example more than the others; parts may be empty.

    Raises:
        ValueError: the parts would not be equal, with even_split.
        IndexError: the data has no such axis.
        TypeError: the data is no array, such as a list; a number that is no whole one.

    Examples:
        >>> [len(part) for part in split_data(np.zeros(8), 3, even_split=False)]
        [3, 3, 2]
    """
    num_slice = whole(num_slice, "num_slice")
    if num_slice < 1:
        raise ValueError("expected at least 1 slice, found %d" % num_slice)
    size = _size(data, batch_axis)
    each, extra = divmod(size, num_slice)
    if even_split and extra:
        raise ValueError(
            "data of shape %s has %d examples along axis %d, which %d slices do not divide; use a batch size that is a"
            " multiple of %d, or even_split=False" % (tuple(data.shape), size, batch_axis, num_slice, num_slice)
        )
    sizes = [each + 1] * extra + [each] * (num_slice - extra)
    ends = [sum(sizes[: i + 1]) for i in range(num_slice)]
    return [_part(data, slice(end - length, end), batch_axis) for end, length in zip(ends, sizes, strict=True)]


def split_and_load(
    data: Data,
    devices: Sequence[Any],
    batch_axis: int = 0,
    even_split: bool = True,
    work_load_list: Sequence[float] | None = None,
) -> list[Data]:
    """Return one part of the data for each device, on that device; with a single device all of it, uncut.

    Arguments:
        data: array or tensor. One with a method `to` (a torch tensor) is copied to each device that it is not on;
            any other (a numpy array) has to stay in host memory, as views.
        devices: what `to` takes, such as `"cuda:0"` or a torch.device; `"cpu"` for numpy arrays.
        batch_axis, even_split: as `split_data` has them.
        work_load_list: the devices' shares of the work, as `split_input_slice` has them, instead of even parts.

    Raises:
        ValueError: the parts would not be equal, with even_split and without work_load_list; no devices; a share
            for another number of devices; a numpy array for a device that is not the CPU.
        TypeError: devices that are no list; data that is no array, such as a list.
    """
    if isinstance(devices, str) or not hasattr(devices, "__len__"):
        raise TypeError("devices is a list of devices, such as [%r], not %.60r" % (str(devices), devices))
    if not len(devices):
        raise ValueError("expected at least one device to load on, found none")
    if work_load_list is not None and len(work_load_list) != len(devices):
        raise ValueError("%d shares in work_load_list for %d devices" % (len(work_load_list), len(devices)))
    if len(devices) == 1:
        parts = [data]
    elif work_load_list is None:
        parts = split_data(data, len(devices), batch_axis, even_split)
    else:
        slices = split_input_slice(_size(data, batch_axis), work_load_list)
        parts = [_part(data, part, batch_axis) for part in slices]
    return [_load(part, device) for part, device in zip(parts, devices, strict=True)]


def split_input_slice(batch_size: int, work_load_list: Sequence[float]) -> list[slice]:
    """Return which examples of a batch each device takes: its share of the work, rounded.

    A device of share w gets round(w batch_size / sum of shares) examples, halves to the even number. What is then
    missing goes to the last device; what is too much is cut off the last ones. Pure.

    Raises:
        ValueError: a device would get no example, or a share is not a number above 0.
        TypeError: shares that are no list; a batch size that is not a whole number.

    Examples:
        >>> split_input_slice(10, [3, 1])
        [slice(0, 8, None), slice(8, 10, None)]
    """
    batch_size, shares = whole(batch_size, "batch_size"), _shares(work_load_list)
    total = sum(shares)
    counts = [round(share * batch_size / total) for share in shares]
    counts[-1] += max(0, batch_size - sum(counts))
    slices, end = [], 0
    for count in counts:
        begin, end = end, min(end + count, batch_size)
        if begin >= end:
            raise ValueError(
                "Too many slices. Some splits are empty: a batch of %d for shares %s" % (batch_size, shares)
            )
        slices.append(slice(begin, end))
    return slices


def _shares(given: object) -> list[float]:
    """Return shares of the work: numbers above 0."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError("shares of the work are a list of numbers, not %.60r" % (given,))
    shares = list(given)
    if not shares or not all(isinstance(share, numbers.Real) and 0 < float(share) < math.inf for share in shares):
        raise ValueError("expected shares above 0, found %s" % shares)
    return shares


def _size(data: Sliceable, axis: int) -> int:
    if not hasattr(data, "shape"):
        raise TypeError("data is an array or a tensor, not a %s; np.asarray makes one" % type(data).__name__)
    axis = whole(axis, "batch_axis")
    if not -len(data.shape) <= axis < len(data.shape):
        raise IndexError("data of shape %s has no axis %d" % (tuple(data.shape), axis))
    return int(data.shape[axis])


def _part(data: Data, part: slice, axis: int) -> Data:
    axis %= len(data.shape)
    cut: Data = data[(slice(None),) * axis + (part,)]
    return cut


def _load(part: Data, device: Any) -> Data:
    to = getattr(part, "to", None)
    # numpy 2 arrays have `to_device`, but no `to`.
    if to is not None:
        loaded: Data = to(device)
        return loaded
    if str(device) != "cpu":
        raise ValueError(
            "a %s lives in host memory and cannot be loaded on %r; give a torch tensor, or device 'cpu'"
            % (type(part).__name__, device)
        )
    return part
