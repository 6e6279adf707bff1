"""Order and lifetime of other libraries' arrays, on devices that do their work as late as events allow.

A library is played by a stream of the stand-in: it writes an array, lends it to a store, goes on with it at once, or
frees it with the last reference. Each guard that is taken away is found by the stand-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from cudastandin import Mistake, StandIn
from fakearrays import CupyArray, FakeCupyArrays, FakeJax, FakeTorch, Interface, JaxArray, Memory, Tensor, put

from distrun_runtime.arrays import borrowing, foreign
from distrun_runtime.arrays.borrowing import Keeper
from distrun_runtime.arrays.cuda import Cuda, CudaError, Event, Host, Pointer, Stream
from distrun_runtime.errors import StoreClosed

SEEDS = pytest.mark.parametrize("seed", range(4))
NBYTES = 24
STREAMS = ("torch", "cupy", "interface")
"""Kinds of arrays whose caller's stream is known."""
READ = (*STREAMS, "no stream", "jax")
WRITTEN = (*STREAMS, "no stream")


class Library:
    """Makes arrays on a stream of its own."""

    def __init__(self, kind: str, cuda: Cuda, modules: dict[str, Any]) -> None:
        self.kind = kind
        self.cuda = cuda
        self.stream = cuda.stream(0)
        self.memory = cuda.alloc(0, NBYTES)
        self._modules = modules

    def array(self) -> Any:
        """Return a new array that its stream fills with 7; it is freed with the last reference."""
        pointer = self.cuda.alloc(0, NBYTES)
        self.fill(pointer, 7)
        made = self._lent(Memory((2, 3), address=pointer.address))
        made.pointer = pointer
        weakref.finalize(made, self._free, pointer).atexit = False
        return made

    def _lent(self, memory: Memory) -> Any:
        if self.kind == "torch":
            self._modules["torch"].streams[0] = self.stream.handle
            return Tensor(memory)
        if self.kind == "cupy":
            self._modules["cupy"].streams[0] = self.stream.handle
            return CupyArray(memory)
        if self.kind == "jax":
            written = self.cuda.event(0)
            self.cuda.record(written, self.stream)
            return JaxArray(memory, before=lambda ours: self.cuda.wait(Stream(0, ours), written))
        if self.kind == "no stream":  # then its work has to be done
            self.wait()
            return Interface(memory)
        return Interface(memory, stream=self.stream.handle)

    def _free(self, pointer: Pointer) -> None:
        # A mistake in a destructor would only be printed: `finish` raises it.
        with contextlib.suppress(Mistake):
            self.cuda.free(pointer)

    def fill(self, pointer: Pointer, byte: int) -> None:
        self.cuda.fill(pointer, byte, NBYTES, self.stream)

    def read(self, pointer: Pointer) -> None:
        self.cuda.copy(self.memory, pointer, NBYTES, self.stream)

    def wait(self) -> None:
        event = self.cuda.event(0)
        self.cuda.record(event, self.stream)
        self.cuda.synchronize(event)


class Store:
    """Reads and writes arrays of libraries on a stream of ours."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.stream = cuda.stream(0)
        self.memory = cuda.alloc(0, NBYTES)
        self.keeper = Keeper(cuda)

    def given(self, device: int) -> Stream:
        """Return the stream that producers are told of."""
        return self.stream

    def push(self, array: Any) -> None:
        view = foreign.device_array(array, self.cuda, self.given)
        self._use(view, self.memory, array.pointer)

    def pull(self, array: Any) -> None:
        self.cuda.fill(self.memory, 5, NBYTES, self.stream)
        view = foreign.device_output(array, self.cuda)
        self._use(view, array.pointer, self.memory)

    def _use(self, view: foreign.DeviceView | None, into: Pointer, source: Pointer) -> None:
        assert view is not None
        borrowing.before_read(self.cuda, [view], self.stream)
        self.cuda.copy(into, source, NBYTES, self.stream)
        event = self.cuda.event(0)
        self.cuda.record(event, self.stream)
        borrowing.after_use(self.cuda, [view], event, self.keeper)


def content(cuda: Cuda, pointer: Pointer, stream: Stream) -> bytes:
    """Return what is in memory when a stream comes to it."""
    found = (ctypes.c_char * NBYTES)()
    cuda.copy(Host(ctypes.addressof(found), NBYTES), pointer, NBYTES, stream)
    return bytes(found)


World = tuple[StandIn, Library, Store]
Make = Callable[..., World]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Make:
    modules = {"torch": FakeTorch(), "cupy": FakeCupyArrays(), "jax": FakeJax()}
    put(monkeypatch, *modules.values())

    def make(kind: str, seed: int = 0) -> World:
        standin = StandIn(1, seed=seed)
        cuda = Cuda(standin)
        # The first two streams have the handles of the default ones.
        assert [cuda.stream(0).handle for _ in range(2)] == [foreign.LEGACY, foreign.PER_THREAD]
        return standin, Library(kind, cuda, modules), Store(cuda)

    return make


# What programs do


def overwritten_after_push(library: Library, store: Store) -> None:
    array = library.array()
    store.push(array)
    if library.kind != "jax":  # whose arrays never change
        library.fill(array.pointer, 9)
    assert content(library.cuda, store.memory, store.stream) == b"\7" * NBYTES
    library.wait()


def used_after_pull(library: Library, store: Store) -> None:
    array = library.array()
    library.read(array.pointer)
    if library.kind == "no stream":
        library.wait()
    store.pull(array)
    library.read(array.pointer)
    assert content(library.cuda, library.memory, library.stream) == b"\5" * NBYTES


def dropped_after_push(library: Library, store: Store) -> None:
    store.push(library.array())


def dropped_after_pull(library: Library, store: Store) -> None:
    store.pull(library.array())


USES = [
    *((overwritten_after_push, kind) for kind in READ),
    *((dropped_after_push, kind) for kind in READ),
    *((use, kind) for use in (used_after_pull, dropped_after_pull) for kind in WRITTEN),
]


def run(use: Callable[[Library, Store], None], world: World) -> None:
    standin, library, store = world
    use(library, store)
    for _ in range(20):  # the stand-in's events are not done when they are asked first
        if not store.keeper.drop():
            break
    assert store.keeper.drop() == 0
    standin.finish()
    assert standin.used == [2 * NBYTES]  # the library's and the store's own


@SEEDS
@pytest.mark.parametrize(("use", "kind"), USES)
def test_an_array_may_be_used_or_dropped_as_soon_as_the_call_returns(
    use: Callable[[Library, Store], None], kind: str, seed: int, world: Make
) -> None:
    run(use, world(kind, seed))


# Without a guard


def no_wait_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(borrowing, "before_read", lambda *_: None)


def no_wait_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        borrowing, "after_use", lambda cuda, views, event, keeper: keeper.keep([view.owner for view in views], event)
    )


def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "keep", lambda self, owners, event: None)


def another_stream_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "given", lambda self, device: Stream(0, foreign.PER_THREAD))


@pytest.mark.parametrize(
    ("use", "kind", "take_away"),
    [
        *((use, kind, no_wait_before) for use in (overwritten_after_push, used_after_pull) for kind in STREAMS),
        *((use, kind, no_wait_after) for use in (overwritten_after_push, used_after_pull) for kind in WRITTEN),
        *((use, kind, no_reference) for use in (dropped_after_push, dropped_after_pull) for kind in STREAMS),
        (dropped_after_push, "jax", no_reference),
        (overwritten_after_push, "jax", another_stream_is_given),
    ],
)
def test_a_guard_that_is_taken_away_is_missed(
    use: Callable[[Library, Store], None],
    kind: str,
    take_away: Callable[[pytest.MonkeyPatch], None],
    world: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take_away(monkeypatch)
    with pytest.raises(Mistake, match=r"nothing orders|before the host knows"):
        run(use, world(kind))


# Several arrays, the keeper


def test_arrays_of_one_stream_share_one_event_and_one_wait(world: Make) -> None:
    standin, library, store = world("cupy")
    views = [foreign.device_array(library.array(), library.cuda, store.given) for _ in range(5)]
    arrays = [view for view in views if view is not None]
    before = standin.calls.copy()
    borrowing.before_read(library.cuda, arrays, store.stream)
    event = store.cuda.event(0)
    store.cuda.record(event, store.stream)
    borrowing.after_use(library.cuda, arrays, event, store.keeper)
    made = standin.calls - before
    assert (made["make_event"], made["record"], made["wait"], made["synchronize"]) == (2, 2, 2, 0)


def test_the_callers_stream_is_never_ended(world: Make) -> None:
    standin, library, store = world("torch")
    array = library.array()
    store.push(array)
    assert standin.calls["end_stream"] == 2  # those of the fixture
    library.fill(array.pointer, 1)
    del library.stream
    assert standin.calls["end_stream"] == 3


class Kept:
    """An owner that can be watched."""


def recorded(cuda: Cuda, stream: Stream) -> Event:
    event = cuda.event(0)
    cuda.record(event, stream)
    return event


def test_the_keeper_drops_what_is_done_and_never_waits() -> None:
    standin = StandIn(1)
    cuda = Cuda(standin)
    keeper, stream, other = Keeper(cuda), cuda.stream(0), cuda.stream(0)
    owners = [Kept(), Kept(), Kept()]
    watched = [weakref.ref(owner) for owner in owners]
    first, second = recorded(cuda, stream), recorded(cuda, other)
    keeper.keep(owners[:2], first)
    keeper.keep(owners[2:], second)
    del owners
    assert keeper.drop() == 3
    cuda.synchronize(second)
    assert keeper.drop() == 2
    assert [each() is None for each in watched] == [False, False, True]
    cuda.synchronize(first)
    assert keeper.drop() == 0
    assert not any(each() for each in watched)
    assert standin.calls["synchronize"] == 2  # ours


def test_a_destructor_may_come_back_to_the_keeper() -> None:
    cuda = Cuda(StandIn(1))
    keeper, stream = Keeper(cuda), cuda.stream(0)
    owner = Kept()
    weakref.finalize(owner, keeper.drop).atexit = False
    event = recorded(cuda, stream)
    keeper.keep([owner], event)
    del owner
    cuda.synchronize(event)
    assert keeper.drop() == 0


def test_references_stay_if_cuda_fails(world: Make) -> None:
    standin, library, store = world("torch")
    array = library.array()
    watched = weakref.ref(array)
    standin.fail("wait", nth=2, code=700)  # after the copy was queued
    with pytest.raises(CudaError, match="wait on gpu:0 failed"):
        store.push(array)
    del array
    with pytest.raises(CudaError):
        store.keeper.drop()
    assert watched() is not None


def test_a_forked_child_frees_nothing_and_calls_nothing(world: Make) -> None:
    standin, library, store = world("cupy")
    store.push(library.array())
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        said = b"failed"
        with contextlib.suppress(BaseException):
            kept = store.keeper.drop()
            store.keeper.keep([Kept()], store.keeper._kept[0][0])
            view = weakref.ref(store.keeper._kept[0][1])
            store.keeper = None  # type: ignore[assignment]
            try:
                library.array()
            except StoreClosed:
                said = f"{kept} {view() is not None} {len(standin.mistakes)}".encode()
        os.write(write, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 100) == b"1 True 0"
    os.close(read)
    os.close(write)
