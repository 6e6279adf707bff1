"""Order and lifetime of other libraries' arrays, on devices that do their work as late as events allow.

A library is played by a stream of the stand-in: it writes an array, lends it to a store, goes on with it at once, or
frees it with the last reference. Each guard that is taken away is found by the stand-in.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cudastandin import Mistake, StandIn
from fakearrays import NBYTES, FakeCupyArrays, FakeJax, FakeTorch, Library, filled, put

from distrun_runtime.arrays import foreign
from distrun_runtime.arrays.cuda import Cuda, CudaError, Stream
from distrun_runtime.arrays.gpu_devices import Borrowed, Borrowing, Gpus, Keeper, Loan
from distrun_runtime.arrays.gpu_order import StreamOrdering, StreamQueue, Uses
from distrun_runtime.errors import KVError, StoreClosed

SEEDS = pytest.mark.parametrize("seed", range(4))
F32 = np.dtype(np.float32)
STREAMS = ("torch", "cupy", "interface")
"""Kinds of arrays whose caller's stream is known."""
READ = (*STREAMS, "no stream", "jax")
WRITTEN = (*STREAMS, "no stream")


class Store:
    """Copies arrays of libraries to memory of its own, and back."""

    def __init__(self, gpus: Gpus) -> None:
        self.borrowing = gpus.borrowing
        self.device = gpus.get(0)
        self.mine = self.device.put(filled(5))

    def push(self, array: Any) -> None:
        given = self.borrowing.value(array)
        loan = self.borrowing.borrow([given])
        self.device.write(self.mine, given)
        loan.end()

    def pull(self, array: Any) -> None:
        self.begin_pull(array)()

    def begin_pull(self, array: Any, *, notes_reads: bool = False) -> Callable[[], None]:
        out = self.borrowing.output(array)
        loan = self.borrowing.borrow([out])

        def end() -> None:
            if notes_reads:
                loan.note_reads()
            self.device.write(out, self.mine)
            loan.end()

        return end

    def pushpull(self, array: Any) -> None:
        """Read an array late, and write into the same memory at once."""
        given = self.borrowing.value(array)
        loan = self.borrowing.borrow([given])
        self.device.write(self.mine, given)
        out = self.borrowing.output(array)
        loan.add([out])
        self.device.write(out, filled(3))
        loan.end()


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
        return standin, Library(kind, cuda, modules), Store(Gpus(cuda, wait_s=60))

    return make


# What programs do


def overwritten_after_push(library: Library, store: Store) -> None:
    array = library.array()
    store.push(array)
    if library.kind != "jax":  # whose arrays never change
        library.fill(array.pointer, 9)
    assert store.device.host(store.mine).tobytes() == b"\7" * NBYTES
    library.wait()


def used_after_pull(library: Library, store: Store) -> None:
    array = library.array()
    library.read(array.pointer)
    if library.kind == "no stream":
        library.wait()
    store.pull(array)
    library.read(array.pointer)
    assert library.found().tobytes() == b"\5" * NBYTES


def used_on_another_stream_after_pull(library: Library, store: Store) -> None:
    array = library.array()
    end = store.begin_pull(array)
    library.works_on(library.cuda.stream(0))
    end()
    library.read(array.pointer)
    assert library.found().tobytes() == b"\5" * NBYTES


def read_until_the_pull_ends(library: Library, store: Store) -> None:
    array = library.array()
    end = store.begin_pull(array, notes_reads=True)
    library.read(array.pointer)
    end()
    assert library.found().tobytes() == b"\7" * NBYTES


def read_on_another_stream_until_the_pull_ends(library: Library, store: Store) -> None:
    array = library.array()
    library.wait()
    end = store.begin_pull(array, notes_reads=True)
    library.works_on(library.cuda.stream(0))
    library.read(array.pointer)
    end()
    assert library.found().tobytes() == b"\7" * NBYTES


def pulled_into_what_was_pushed(library: Library, store: Store) -> None:
    array = library.array()
    store.pushpull(array)
    library.read(array.pointer)
    assert library.found().tobytes() == b"\3" * NBYTES
    assert store.device.host(store.mine).tobytes() == b"\7" * NBYTES


def dropped_after_push(library: Library, store: Store) -> None:
    store.push(library.array())


def dropped_after_pull(library: Library, store: Store) -> None:
    store.pull(library.array())


Use = Callable[[Library, Store], None]
USES: list[tuple[Use, str]] = [
    *((overwritten_after_push, kind) for kind in READ),
    *((dropped_after_push, kind) for kind in READ),
    *((use, kind) for use in (used_after_pull, dropped_after_pull) for kind in WRITTEN),
    *((pulled_into_what_was_pushed, kind) for kind in WRITTEN),
    *((read_until_the_pull_ends, kind) for kind in STREAMS),
    *(
        (use, kind)
        for use in (used_on_another_stream_after_pull, read_on_another_stream_until_the_pull_ends)
        for kind in STREAMS[:2]
    ),
]


def run(use: Use, world: World) -> None:
    standin, library, store = world
    use(library, store)
    for _ in range(100):  # the stand-in's events are not done when they are asked first
        if not store.borrowing.keeper.collect():
            break
    assert store.borrowing.keeper.collect() == 0
    store.device.pool.trim()
    standin.finish()
    assert standin.used == [NBYTES + 512]  # the library's and the store's own


@SEEDS
@pytest.mark.parametrize(("use", "kind"), USES)
def test_an_array_may_be_used_or_dropped_as_soon_as_the_call_returns(
    use: Use, kind: str, seed: int, world: Make
) -> None:
    run(use, world(kind, seed))


# Without a guard


def no_wait_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamOrdering, "note_program_use", lambda *_: None)


def no_wait_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loan, "_let_follow", lambda *_: None)


def reads_are_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loan, "note_reads", lambda self: None)


def only_reads_on_the_stream_of_the_beginning_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Loan, "note_reads", without(Loan.note_reads, foreign, "current_stream", lambda library, device: None)
    )


def no_wait_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Borrowed.__init__

    def careless(self: Borrowed, *args: Any) -> None:
        made(self, *args)
        self.is_awaited = False

    monkeypatch.setattr(Borrowed, "__init__", careless)


def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Keeper, "keep", lambda self, kept: setattr(kept, "owner", None) or id(kept))
    monkeypatch.setattr(Keeper, "collect", lambda self: 0)


def a_reference_until_nothing_of_ours_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamOrdering, "marks", lambda self, uses: [])


def only_the_stream_of_the_beginning_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loan, "end", without(Loan.end, foreign, "current_stream", lambda library, device: None))


def without(method: Any, owner: Any, name: str, careless: Any) -> Any:
    """Return a method that runs with something else in a place of a module."""

    def called(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, careless)
            return method(*args)

    return called


def the_stream_that_was_given_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    using = StreamOrdering.using
    monkeypatch.setattr(
        Borrowing,
        "value",
        without(Borrowing.value, StreamOrdering, "using", lambda self, queue, writes: using(self, queue)),
    )


def arrays_in_the_same_memory_are_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loan, "_share", lambda self: None)


@pytest.mark.parametrize(
    ("use", "kind", "take_away"),
    [
        *((use, kind, no_wait_before) for use in (overwritten_after_push, used_after_pull) for kind in STREAMS),
        *((use, kind, no_wait_after) for use in (overwritten_after_push, used_after_pull) for kind in STREAMS),
        *((use, "no stream", no_wait_of_the_host) for use in (overwritten_after_push, used_after_pull)),
        *((use, kind, no_reference) for use in (dropped_after_push, dropped_after_pull) for kind in STREAMS),
        (dropped_after_push, "jax", no_reference),
        (dropped_after_push, "jax", a_reference_until_nothing_of_ours_has_one),
        (dropped_after_pull, "torch", a_reference_until_nothing_of_ours_has_one),
        (overwritten_after_push, "jax", the_stream_that_was_given_is_not_noted),
        *((used_on_another_stream_after_pull, kind, only_the_stream_of_the_beginning_waits) for kind in STREAMS[:2]),
        *((read_until_the_pull_ends, kind, reads_are_not_noted) for kind in STREAMS),
        *(
            (read_on_another_stream_until_the_pull_ends, kind, only_reads_on_the_stream_of_the_beginning_are_noted)
            for kind in STREAMS[:2]
        ),
        *((pulled_into_what_was_pushed, kind, arrays_in_the_same_memory_are_strangers) for kind in WRITTEN),
    ],
)
def test_a_guard_that_is_taken_away_is_missed(
    use: Use, kind: str, take_away: Callable[[pytest.MonkeyPatch], None], world: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = world(kind)
    take_away(monkeypatch)
    with pytest.raises(Mistake, match=r"nothing orders|before the host knows|was freed"):
        run(use, made)


# Streams


def test_arrays_of_one_stream_share_one_event_and_one_wait(world: Make) -> None:
    standin, library, store = world("cupy")
    given = [store.borrowing.value(library.array()) for _ in range(5)]
    before = standin.calls.copy()
    loan = store.borrowing.borrow(given)
    into = [store.device.put(each) for each in given]
    loan.end()
    made = standin.calls - before
    # Ours for theirs, and theirs for ours: an event each, recorded once and waited for once.
    assert (len(into), made["make_event"], made["record"], made["wait"], made["synchronize"]) == (5, 1, 2, 2, 0)


def test_the_callers_stream_is_never_ended(world: Make) -> None:
    standin, library, store = world("torch")
    array = library.array()
    store.push(array)
    assert standin.calls["end_stream"] == 2  # those of the fixture
    library.fill(array.pointer, 1)
    del library.stream
    assert standin.calls["end_stream"] == 3


def test_a_new_stream_with_the_handle_of_an_old_one_is_not_taken_to_have_waited() -> None:
    cuda = Cuda(StandIn(1))
    order = StreamOrdering(cuda, wait_s=60)
    one, other = order.queue(0), order.queue(0)
    theirs = StreamQueue(cuda.stream(0), cuda.event(0), is_ours=False)
    pointer, mine, lent = cuda.alloc(0, 8), Uses(), Uses()
    with order.using(one, writes=[mine]):
        cuda.fill(pointer, 1, 8, one.stream)
    order.follow(theirs, mine.before_reading())
    theirs.stream = cuda.stream(0)  # the program has ended its stream, and this one has got the handle
    order.note_program_use(theirs, [lent])
    with order.using(other, reads=[lent], writes=[mine]):
        cuda.fill(pointer, 2, 8, other.stream)


def test_a_threads_own_default_stream_is_that_of_the_calling_thread(world: Make) -> None:
    standin, library, store = world("torch")
    library.works_on(Stream(0, foreign.PER_THREAD))
    seen = [store.borrowing.caller(0, foreign.PER_THREAD), store.borrowing.caller(0, foreign.LEGACY)]
    array = library.array()
    end = store.begin_pull(array)

    def elsewhere() -> None:
        seen.extend(store.borrowing.caller(0, handle) for handle in (foreign.PER_THREAD, foreign.LEGACY))
        end()

    before = standin.calls["synchronize"]
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[0] is not seen[2]
    assert seen[1] is seen[3]
    # The first thread's stream cannot be named in the other one: the host has waited.
    assert standin.calls["synchronize"] == before + 1


@pytest.mark.parametrize("kind", ["torch", "cupy"])
def test_an_array_is_given_back_although_the_current_stream_captures_a_graph_meanwhile(kind: str, world: Make) -> None:
    _, library, store = world(kind)
    array = library.array()
    end = store.begin_pull(array)
    library.modules[kind].capturing.add(0)
    with pytest.raises(KVError, match=f"{kind}'s current stream is capturing a CUDA graph"):
        end()
    library.read(array.pointer)
    assert library.found().tobytes() == b"\5" * NBYTES


def test_the_host_waits_for_no_array_whose_stream_is_told(world: Make) -> None:
    for kind in (*STREAMS, "jax"):
        standin, library, store = world(kind)
        array = library.array()
        store.push(array)
        if kind != "jax":
            store.pull(array)
        assert standin.calls["synchronize"] == 0


# The keeper


class Owner:
    """One that can be watched."""


def borrowed(borrowing: Borrowing, owner: object, address: int = 0x1000) -> Borrowed:
    view = foreign.DeviceView("numba", 0, address, (6,), (4,), F32, 1, owner)
    return Borrowed(view, borrowing.keeper)


def used(borrowing: Borrowing, queue: StreamQueue, memory: Borrowed) -> None:
    with borrowing.order.using(queue, reads=[memory.uses]):
        borrowing.order.cuda.record(borrowing.order.cuda.event(0), queue.stream)


def test_the_keeper_lets_go_of_what_is_over_and_never_waits() -> None:
    standin = StandIn(1)
    gpus = Gpus(Cuda(standin), wait_s=60)
    lending, keeper = gpus.borrowing, gpus.borrowing.keeper
    queues = [gpus.order.queue(0), gpus.order.queue(0)]
    owners = [Owner(), Owner(), Owner()]
    watched = [weakref.ref(owner) for owner in owners]
    memories = [borrowed(lending, owner) for owner in owners]
    del owners
    for place in range(2):
        used(lending, queues[place], memories[place])
    marks = [gpus.order.mark(queue) for queue in queues]
    assert keeper.collect() == 3  # they are still referred to
    del memories[1:]
    assert keeper.collect() == 2  # nothing was done with the third
    del memories[0]
    gpus.order.finish(marks[1])
    assert keeper.collect() == 1
    assert [each() is None for each in watched] == [False, True, True]
    gpus.order.finish(marks[0])
    assert keeper.collect() == 0
    assert watched[0]() is None
    assert standin.calls["synchronize"] == 2  # the test's


def test_a_destructor_may_come_back_to_the_keeper() -> None:
    gpus = Gpus(Cuda(StandIn(1)), wait_s=60)
    owner = Owner()
    weakref.finalize(owner, gpus.borrowing.keeper.collect).atexit = False
    memory = borrowed(gpus.borrowing, owner)
    del owner, memory
    assert gpus.borrowing.keeper.collect() == 0


def test_references_stay_if_cuda_fails(world: Make) -> None:
    standin, library, store = world("torch")
    array = library.array()
    watched = weakref.ref(array)
    standin.fail("wait", nth=2, code=700)  # after the copy was queued
    with pytest.raises(CudaError, match="wait on gpu:0 failed"):
        store.push(array)
    del array
    with pytest.raises(CudaError):
        store.borrowing.keeper.collect()
    assert watched() is not None


def test_a_forked_child_frees_nothing_and_calls_nothing(world: Make) -> None:
    standin, library, store = world("cupy")
    array = library.array()
    watched = weakref.ref(array)
    given = store.borrowing.value(array)
    loan = store.borrowing.borrow([given])
    store.device.write(store.mine, given)
    del array

    def child() -> None:
        for call in (loan.end, store.borrowing.keeper.collect, lambda: store.borrowing.borrow([given]), library.array):
            with pytest.raises(StoreClosed):
                call()
        store.borrowing = None  # type: ignore[assignment]
        assert (watched() is not None, standin.mistakes) == (True, [])

    assert exit_code_of(child) == 0
    loan.end()
