"""Calls of a store on arrays of torch or cupy in the memory of GPUs, each planned once.

In training the same tensors come again with every step. What follows from their shapes, dtypes and device (a layout),
and from their addresses (a plan: tables on the GPU, and what is launched), is kept by the store. A call that comes
again reads what it was given by a few passes in C over the whole list, compares that with the plan's, and launches:

    plans.call(keys, given, outs, planned, scale)    it is done, as far as the GPUs have been given all of it; or
                                                     None: it has no plan; look at the arrays one by one

Whatever is unusual has no plan: other libraries, or both, host memory, arrays that are not contiguous, outputs that
share memory. Nothing has been done then, and the code that looks at the arrays one by one says what is wrong.

The order with the program's work is that of `gpu_devices`: ours comes after what is queued on the library's current
stream and before what will be. One list keeps the program's arrays until our work on them is over.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple, Protocol, cast

from distrun_runtime.arrays import foreign
from distrun_runtime.arrays.cuda import Read, Write
from distrun_runtime.arrays.dtypes import DType
from distrun_runtime.arrays.gpu import GpuDevice, TensorColumn
from distrun_runtime.arrays.gpu_devices import Gpus
from distrun_runtime.arrays.gpu_order import StreamQueue
from distrun_runtime.errors import KVError

PLANS = 64
"""So many a store keeps; of more the least recently used goes."""
_LISTS = {list, tuple}
_REFUSALS = (AttributeError, BufferError, RuntimeError, TypeError, ValueError)
"""What an array raises that does not tell where it is."""

Reader = Callable[[Any], Any]


class KeyShapes(Protocol):
    """The keys of a call, the same object whenever they come again."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of each key's value."""

    @property
    def dtypes(self) -> Sequence[DType]:
        """Likewise."""


class PlannedWork(Protocol):
    """What a store does in a call, planned."""

    def is_valid(self) -> bool:
        """Tell whether the store's arrays are still those of the plan."""

    def run(self, scale: float) -> None:
        """Launch it. On each device the queue `work` alone uses arrays of the program: its streams wait for that."""


class PlacedColumn(NamedTuple):
    """An array of each key, and where each is."""

    arrays: TensorColumn
    devices: Sequence[GpuDevice]


class CallArrays(NamedTuple):
    """The arrays of a call. Of several of each key each is a column."""

    parts: Sequence[PlacedColumn]
    """To be read: none of a pull."""
    outs: Sequence[PlacedColumn]
    """To be written: none of a push."""
    are_apart: bool
    """No out shares memory with a part."""
    is_scaled: bool = False
    """The sums of the parts are multiplied by a number."""


Planned = Callable[[Any, CallArrays], "PlannedWork | None"]
"""Makes the work for a call of these keys; None: there is no plan for it."""


@dataclass(frozen=True, eq=False)
class _Library:
    """How arrays of one library are read, each by a function that `map` calls."""

    name: str
    address: Reader
    device: Reader
    is_contiguous: Reader
    is_negative: Reader
    """Whether the numbers are the negatives of those in the memory."""


_DTYPE = operator.attrgetter("dtype")


def _library(kind: type) -> _Library | None:
    """Return how arrays of a class are read, which raises TypeError for others; None: that is not known."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and issubclass(kind, torch.Tensor) and torch.version.hip is None:
        # A parameter is a tensor with a class of its own: lists may have both. A function of the class is called twice
        # as fast as one that is looked up for each tensor.
        plain: Any = torch.Tensor if kind.__module__.startswith("torch.") else kind
        return _Library("torch", plain.data_ptr, plain.get_device, plain.is_contiguous, plain.is_neg)
    if cupy is not None and kind is cupy.ndarray and not cupy.cuda.runtime.is_hip:
        address, device, order = map(operator.attrgetter, ("data.ptr", "device.id", "flags.c_contiguous"))
        return _Library("cupy", address, device, order, lambda _: False)
    return None


class _Given(NamedTuple):
    """What a call was given for a list of keys."""

    arrays: Sequence[Any]
    """The first array of each key, then the second ones."""
    of_each: int
    """Arrays of each key."""
    library: _Library
    addresses: tuple[int, ...]


class _GivenLayout(NamedTuple):
    """What arrays have to be like to fit a list of keys."""

    shapes: list[tuple[int, ...]]
    dtypes: list[Any]
    """The library's."""
    kinds: set[Any]
    """Those, each once."""
    places: list[int]
    """Each one's GPU."""
    devices: set[int]
    """Those, each once."""
    singles: list[int]
    """Numbers of the arrays of one element. Only these can be contiguous and show other numbers than their memory has:
    torch negates lazily what is every second element of an array of complex numbers."""

    def fits(self, given: _Given) -> bool:
        """Tell whether the arrays are so."""
        arrays, library = given.arrays, given.library
        return (
            [each.shape for each in arrays] == self.shapes
            and _are(map(_DTYPE, arrays), self.dtypes, self.kinds)
            and _are(map(library.device, arrays), self.places, self.devices)
            and all(map(library.is_contiguous, arrays))
            and not (self.singles and any(library.is_negative(arrays[number]) for number in self.singles))
        )


def _are(found: Iterable[Any], wanted: list[Any], kinds: set[Any]) -> bool:
    return set(found) == kinds if len(kinds) == 1 else list(found) == wanted


@dataclass(eq=False)
class _KeptPlan:
    layouts: Sequence[_GivenLayout]
    work: PlannedWork
    used: int = 0
    """In which call it was used last: that is quicker than to keep the plans in this order."""


class Plans:
    """The plans of one store. Threads: one at a time."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpu = cache(gpus.get)
        self._order, self._borrowing = gpus.order, gpus.borrowing
        self._library: Callable[[type], _Library | None] = cache(_library)
        self._plans: dict[Hashable, _KeptPlan] = {}
        self._calls = 0

    def call(
        self,
        keys: KeyShapes,
        given: Sequence[Any] | None,
        outs: Sequence[Any] | None,
        planned: Planned,
        scale: float = 1.0,
    ) -> Callable[[], object] | None:
        """Make a call, if it has a plan or can have one; None: it was not made.

        Returns what lets the streams that are current when and where it is called wait for the work. Those that are
        current now do so.

        Arguments:
            given: for each key an array, or a list of arrays, to be read.
            outs: likewise, to be written.
            planned: makes the work of a new plan.
            scale: what the sums are multiplied by.

        Raises:
            KVError: a GPU has failed.
        """
        try:
            read = [each for each in (given, outs) if each is not None]
            found = [each for each in map(self._given, repeat(keys), read) if each is not None]
            if len(found) < len(read) or len({each.library.name for each in found}) > 1:
                return None
            name = (keys, given is None, scale != 1, *[each.addresses for each in found])
            plan = self._plans.get(name)
            if plan is not None:
                layouts = plan.layouts
                if not all(map(_GivenLayout.fits, layouts, found)):
                    return None
            else:
                layouts = [each for each in map(_layout_of, repeat(keys), found) if each is not None]
                if len(layouts) < len(found):
                    return None
        except _REFUSALS:
            return None
        devices = layouts[0].devices if len(layouts) == 1 else layouts[0].devices | layouts[1].devices
        streams = partial(self._streams, found[0].library.name, devices)
        try:
            now = streams()
            if plan is None or not plan.work.is_valid():
                columns = self._columns(keys, layouts, found, has_parts=given is not None)
                work = None if columns is None else planned(keys, columns._replace(is_scaled=scale != 1))
                plan = None if work is None else _KeptPlan(layouts, work)
                self._keep(name, plan)
        except KVError:  # it captures a CUDA graph, or a GPU has failed
            return None
        if plan is None:
            return None
        plan.used = self._calls = self._calls + 1
        keeper = self._borrowing.keeper
        keeper.collect()
        self._order.begin_after(now)
        try:
            plan.work.run(scale)
        finally:
            keeper.keep_until(self._order.end_before(now), [each.arrays for each in found])
        return partial(self._let_follow, streams)

    def _streams(self, library: str, devices: Iterable[int]) -> list[tuple[StreamQueue, StreamQueue]]:
        """Return each device's queue, and that of the program's current stream there; torch and cupy tell theirs."""
        caller, stream = self._borrowing.caller, foreign.current_stream
        return [(self._gpu(each).work, caller(each, cast(int, stream(library, each)))) for each in devices]

    def _let_follow(self, streams: Callable[[], list[tuple[StreamQueue, StreamQueue]]]) -> None:
        with self._order.locked():
            for queue, caller in streams():
                caller.seen.clear()  # as in `StreamOrdering.note_program_use`
                self._order.follow(caller, [(queue, queue.count)])

    def _given(self, keys: KeyShapes, some: Sequence[Any]) -> _Given | None:
        of_each, arrays = 1, tuple(some)  # not the program's list, which it may change
        if not arrays or len(arrays) != len(keys.shapes):
            return None
        if type(arrays[0]) in _LISTS:
            columns = tuple(zip(*arrays, strict=True)) if set(map(type, arrays)) <= _LISTS else ()
            of_each, arrays = len(columns), tuple(chain.from_iterable(columns))
            if not arrays:
                return None
        library = self._library(type(arrays[0]))
        return None if library is None else _Given(arrays, of_each, library, tuple(map(library.address, arrays)))

    # New ones

    def _columns(
        self, keys: KeyShapes, layouts: Sequence[_GivenLayout], found: Sequence[_Given], *, has_parts: bool
    ) -> CallArrays | None:
        if any(0 in each.addresses or any(map(each.library.is_negative, each.arrays)) for each in found):
            return None
        nbytes = [math.prod(shape) * kind.itemsize for shape, kind in zip(keys.shapes, keys.dtypes, strict=True)]
        parts: list[PlacedColumn] = []
        outs: list[PlacedColumn] = []
        for number, (layout, given) in enumerate(zip(layouts, found, strict=True)):
            columns, use = (parts, Read) if has_parts and not number else (outs, Write)
            gpus = list(map(self._gpu, layout.places))
            for first in range(0, len(gpus), len(nbytes)):
                one = slice(first, first + len(nbytes))
                columns.append(PlacedColumn(TensorColumn(use, given.addresses[one], nbytes), gpus[one]))
        return CallArrays(parts, outs, _are_apart([*parts, *outs])) if _are_apart(outs) else None

    def _keep(self, name: Hashable, plan: _KeptPlan | None) -> None:
        """Keep a plan, in place of the one that was used longest ago; None: there is none of this name any more."""
        self._plans.pop(name, None)
        if plan is not None:
            if len(self._plans) >= PLANS:
                del self._plans[min(self._plans, key=lambda each: self._plans[each].used)]
            self._plans[name] = plan


def _layout_of(keys: KeyShapes, given: _Given) -> _GivenLayout | None:
    """Return the layout of arrays, which have it; None: these do not fit the keys, or are not on GPUs."""
    arrays, library = given.arrays, given.library
    shapes, kinds = [*keys.shapes] * given.of_each, [*keys.dtypes] * given.of_each
    sizes = list(map(math.prod, shapes))
    dtypes = list(map(_DTYPE, arrays))
    if 0 in sizes or list(map(foreign.dtype_met, dtypes)) != kinds:
        return None
    if library.name == "torch" and {array.device.type for array in arrays} != {"cuda"}:
        return None
    singles = [number for number, size in enumerate(sizes) if size == 1]
    places = list(map(int, map(library.device, arrays)))
    made = _GivenLayout(shapes, dtypes, set(dtypes), places, set(places), singles)
    return made if made.fits(given) else None


def _are_apart(columns: Sequence[PlacedColumn]) -> bool:
    """Tell whether no two arrays share memory."""
    spans = sorted(
        (begin, begin + size) for each, _ in columns for begin, size in zip(each.addresses, each.nbytes, strict=True)
    )
    return all(one[1] <= other[0] for one, other in pairwise(spans))
