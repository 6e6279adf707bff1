"""Every wait and every lifetime guard of the GPU's devices is needed: without any one of them the stand-in says so.

Each history is run as it is, then once more for each guard, without that one: a call that is left out, a use of memory
that is not told, or a part of the code that is replaced by one that does not care.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cudastandin import StandIn
from gpuhistories import EACH_HISTORY, HISTORIES, arrays_come_and_go
from gpukit import Machine

from distrun_runtime.arrays import gpu, gpu_codecs, gpu_memory, gpu_order
from distrun_runtime.arrays.cuda import Driver, Event
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice
from distrun_runtime.arrays.gpu_memory import GpuPool, Memory, Staging
from distrun_runtime.arrays.gpu_order import Mark, StreamOrdering, StreamQueue, Uses

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pieces, so that small arrays have several; waits ask once, so that most of them are left to a sleeper."""
    monkeypatch.setattr(gpu, "RING_BYTES", 2048)
    monkeypatch.setattr(gpu, "PIECE_BYTES", 512)
    monkeypatch.setattr(gpu_codecs, "_DIGITS", ((25, 6), (20, 5), (15, 5), (10, 5), (5, 5), (0, 5)))
    monkeypatch.setattr(gpu_order, "ASKS", 1)
    monkeypatch.setattr(Staging.__init__, "__defaults__", (512, 2))


def run(history: Callable[[Machine], None], **options: Any) -> Machine:
    machine = Machine(**options)
    history(machine)
    machine.finish()
    return machine


def is_found(history: Callable[[Machine], None], **options: Any) -> bool:
    """Tell whether a history fails: by the stand-in, or because a value is wrong."""
    try:
        run(history, **options)
    except AssertionError:
        return True
    return False


@EACH_HISTORY
def test_every_history_is_right_as_it_is(history: Callable[[Machine], None]) -> None:
    for seed in range(4):
        run(history, seed=seed)


# Calls


class Without:
    """A driver that leaves out one call; instead of asking whether an event has completed it says yes."""

    def __init__(self, standin: StandIn, name: str, nth: int) -> None:
        self._standin = standin
        self._name = name
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._standin, name)
        if name != self._name:
            return method

        def called(*arguments: object) -> object:
            self._left -= 1
            return name == "query" if self._left == 0 else method(*arguments)

        return called


class Noted:
    """A driver that notes which events are recorded and waited for."""

    def __init__(self, standin: StandIn) -> None:
        self._standin = standin
        self.calls: list[tuple[str, Event]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._standin, name)

        def called(*arguments: Any) -> object:
            if name in ("record", "wait", "synchronize"):
                self.calls.append((name, arguments[1] if name == "wait" else arguments[0]))
            return method(*arguments)

        return called

    def needed_records(self) -> list[int]:
        """Return which records are waited for, counted from 1: a mark may never be."""
        needed, last, count = set(), {}, 0
        for name, event in self.calls:
            if name == "record":
                count += 1
                last[id(event)] = count
            else:
                needed.add(last[id(event)])
        return sorted(needed)


@EACH_HISTORY
@pytest.mark.parametrize("name", ["wait", "record", "synchronize", "query"])
def test_no_call_that_orders_work_can_be_left_out(history: Callable[[Machine], None], name: str) -> None:
    noted: list[Noted] = []

    def note(standin: StandIn) -> Driver:
        noted.append(Noted(standin))
        return noted[0]

    count = run(history, driver=note).standin.calls[name]
    tried = noted[0].needed_records() if name == "record" else range(1, count + 1)

    def without(nth: int) -> Callable[[StandIn], Driver]:
        return lambda standin: Without(standin, name, nth)

    needless = [nth for nth in tried if not is_found(history, driver=without(nth))]
    assert not needless, "%s: of %d calls these are not missed" % (name, count)


def test_the_histories_have_waits_of_every_kind() -> None:
    counts: Counter[str] = Counter()
    for history in HISTORIES.values():
        counts += run(history).standin.calls
    assert min(counts[name] for name in ("wait", "record", "synchronize", "query")) > 20


# Uses that are not told


def function_of(frame: FrameType) -> str:
    """Return which function tells a use: who calls `launch`, if that does it for others."""
    code = frame.f_code
    if code is GpuDevice.launch.__code__ and frame.f_back is not None:
        return frame.f_back.f_code.co_name
    return code.co_name


KINDS = ("reads", "writes")


def sites() -> list[tuple[str, str, int]]:
    """Return where an operation's uses are told: function, kind of use, place in the list."""
    return [
        *(("copy_in", "reads", 0), ("copy_in", "writes", 0), ("copy_out", "reads", 0), ("copy_out", "writes", 0)),
        *(("read_all", "reads", 0), ("write_all", "writes", 0), ("scale", "writes", 0), ("clear", "writes", 0)),
        *(("_bring_from_gpu", "reads", 0), ("_bring_from_gpu", "writes", 0)),
        *(("_sums", "reads", place) for place in (0, 1, -1)),
        *(("_sum_mixed", "reads", place) for place in (0, 1, 2)),
        *(("_sums", "writes", 0), ("_sum_mixed", "writes", 0), ("_share", "writes", 0), ("_share", "writes", 1)),
        *(("__init__", kind, place) for kind in KINDS for place in (0, 1, 2, -1)),
        *((function, kind, 0) for function in ("_encode", "_decode", "top_decode") for kind in KINDS),
        *((function, kind, 0) for function in ("are_finite", "scaled_encode", "_search") for kind in KINDS),
        *(("are_finite", "reads", 1), ("scaled_encode", "reads", 1), ("_encode", "writes", 1)),
        ("_search", "reads", 1),
    ]


@pytest.mark.parametrize(("function", "kind", "place"), sites())
def test_no_use_of_memory_can_be_left_untold(
    monkeypatch: pytest.MonkeyPatch, function: str, kind: str, place: int
) -> None:
    using = StreamOrdering.using

    def told(
        self: StreamOrdering, queue: StreamQueue, reads: Sequence[Uses] = (), writes: Sequence[Uses] = (), **how: bool
    ) -> Any:
        given = {"reads": list(reads), "writes": list(writes)}
        if function_of(sys._getframe(1)) == function and -len(given[kind]) <= place < len(given[kind]):
            del given[kind][place]
        return using(self, queue, given["reads"], given["writes"], **how)

    monkeypatch.setattr(StreamOrdering, "using", told)
    assert any(is_found(history) for history in HISTORIES.values())


def test_all_places_that_tell_uses_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    using, seen = StreamOrdering.using, set()

    def told(
        self: StreamOrdering, queue: StreamQueue, reads: Sequence[Uses] = (), writes: Sequence[Uses] = (), **how: bool
    ) -> Any:
        name = function_of(sys._getframe(1))
        seen.update((name, kind) for kind, uses in (("reads", reads), ("writes", writes)) if uses)
        return using(self, queue, reads, writes, **how)

    monkeypatch.setattr(StreamOrdering, "using", told)
    for history in HISTORIES.values():
        run(history)
    assert seen == {(function, kind) for function, kind, _ in sites()}


# Guards in the code


def nothing_is_read_before(self: Uses) -> Iterator[tuple[StreamQueue, int]]:
    return iter(())


def readers_are_forgotten(self: Uses) -> Iterator[tuple[StreamQueue, int]]:
    return self.before_reading()


def a_block_forgets_its_uses(self: Memory, pool: GpuPool, block: Any) -> None:
    block.uses = Uses()
    TRUE["memory"](self, pool, block)


def the_memory_is_not_kept(self: GpuArray, device: Any, memory: Memory, *rest: Any) -> None:
    weak = SimpleNamespace(pointer=memory.pointer, uses=memory.uses)
    TRUE["array"](self, device, weak, *rest)


def nothing_is_over_before_it_is_freed(self: StreamOrdering, uses: Uses) -> None:
    pass


def a_mark_is_not_waited_for(self: StreamOrdering, mark: Mark) -> None:
    pass


def more_is_known_than_was_waited_for(counts: dict[StreamQueue, int], others: dict[StreamQueue, int]) -> None:
    counts.update((queue, queue.count + 1) for queue in others)


TRUE: dict[str, Any] = {"memory": Memory.__init__, "array": GpuArray.__init__}


@pytest.mark.parametrize(
    ("owner", "name", "careless"),
    [
        (Uses, "before_reading", nothing_is_read_before),
        (Uses, "before_writing", readers_are_forgotten),
        (Memory, "__init__", a_block_forgets_its_uses),
        (GpuArray, "__init__", the_memory_is_not_kept),
        (StreamOrdering, "finish_uses", nothing_is_over_before_it_is_freed),
        (StreamOrdering, "finish", a_mark_is_not_waited_for),
        (sys.modules[StreamOrdering.__module__], "_raise_counts", more_is_known_than_was_waited_for),
    ],
)
def test_no_guard_can_be_careless(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, careless: Any) -> None:
    monkeypatch.setattr(owner, name, careless)
    assert any(is_found(history) for history in HISTORIES.values())


def test_staging_is_registered_once_and_outlives_its_copies() -> None:
    machine = run(arrays_come_and_go)
    assert machine.standin.calls["register"] == 1
    assert machine.standin.calls["unregister"] == 0
    assert gpu_memory.SLOT_BYTES % 4096 == 0
