"""Arrays in shared memory: what is given out, when it is used again, and what another process can do with it."""

from __future__ import annotations

import gc
import mmap
import os
import random
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.arrays import shared_memory
from distrun_runtime.arrays.dtypes import NAMES, parse
from distrun_runtime.arrays.shared_memory import PAGE, Pool, Stitched, address_of, stitched

FLOAT = np.dtype(np.float32)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7,), (2, 3, 5), (300, 400)])
def test_an_array_has_the_shape_and_dtype_that_were_asked_for(shape: tuple[int, ...], dtype: str) -> None:
    array = Pool().empty(shape, parse(dtype))
    assert array is not None
    assert (array.shape, array.dtype, array.flags.c_contiguous) == (shape, parse(dtype), True)
    assert array.flags.writeable


def test_arrays_of_a_page_begin_with_one_and_smaller_ones_with_a_line_of_the_cache() -> None:
    pool = Pool()
    kept = [pool.empty((size,), np.dtype(np.uint8)) for size in (1, 5000, 70, PAGE, 3, PAGE + 1)]
    for array in kept:
        assert array is not None
        assert address_of(array) % (PAGE if len(array) >= PAGE else 64) == 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 120))
def test_no_two_arrays_share_memory_whatever_was_given_back_meanwhile(seed: int, count: int) -> None:
    chance, pool = random.Random(seed), Pool()
    kept: list[tuple[np.ndarray, int]] = []
    for number in range(count):
        array = pool.empty((chance.choice([1, 60, 64, 1000, 5000, 300_000]),), np.dtype(np.int64))
        assert array is not None
        array[...] = number
        kept.append((array, number))
        while kept and chance.random() < 0.4:
            kept.pop(chance.randrange(len(kept)))
    assert all((array == number).all() for array, number in kept)


def test_memory_is_used_again_when_the_last_view_of_it_is_gone() -> None:
    pool = Pool()
    array = pool.empty((100_000,), FLOAT)
    assert array is not None
    where, size = address_of(array), pool.size
    view = array[10:].view(np.uint8).data
    del array
    other = pool.empty((100_000,), FLOAT)
    assert other is not None
    assert address_of(other) != where
    del view, other
    gc.collect()
    again = pool.empty((200_000,), FLOAT)
    assert again is not None
    assert (address_of(again), pool.size) == (where, size)


def test_an_array_larger_than_a_segment_has_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FIRST_BYTES", 1 << 16)
    monkeypatch.setattr(shared_memory, "SEGMENT_BYTES", 1 << 17)
    pool = Pool()
    small, large = pool.empty((10,), FLOAT), pool.empty((1 << 18,), FLOAT)
    assert small is not None
    assert large is not None
    assert pool.size == (1 << 16) + (1 << 20)


def test_threads_that_allocate_and_drop_at_once_never_get_the_same_memory() -> None:
    pool = Pool()
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(300):
            array = pool.empty((1 + (number * 37 + turn) % 5000,), np.dtype(np.int64))
            assert array is not None
            array[...] = number
            if not (array == number).all():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_lies_in_a_segment_is_found_and_nothing_else_is() -> None:
    pool = Pool()
    array = pool.empty((1000,), FLOAT)
    assert array is not None
    found = pool.find(address_of(array[10:]), 40)
    assert found is not None
    segment, offset = found
    assert segment.address + offset == address_of(array) + 40
    assert pool.find(segment.address + segment.size - 4, 8) is None
    assert pool.find(address_of(np.empty(10)), 80) is None
    assert Pool().find(address_of(array), 4) is None


def test_another_process_can_neither_write_nor_shrink_a_segment() -> None:
    """Even this one cannot, by its descriptor."""
    pool = Pool()
    array = pool.empty((1000,), FLOAT)
    assert array is not None
    found = pool.find(address_of(array), 4000)
    assert found is not None
    fd = found[0].fd
    array[...] = 7.0
    seen = mmap.mmap(fd, PAGE, prot=mmap.PROT_READ)
    assert (np.frombuffer(seen, FLOAT, 1000) == 7.0).all()
    with pytest.raises(PermissionError):
        mmap.mmap(fd, PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, PAGE)
    with pytest.raises(PermissionError):
        os.write(fd, b"x")


@pytest.mark.parametrize("left", [0, shared_memory.FIRST_BYTES // 4])
def test_no_more_than_half_of_the_memory_that_is_left_is_taken(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    monkeypatch.setattr(shared_memory, "memory_left", lambda: left)
    pool = Pool()
    assert pool.empty((left // 4 + 1000,), FLOAT) is None
    assert "%d bytes of memory are left here" % left in pool.why_not
    small = pool.empty((100,), FLOAT)
    assert (small is not None) == (left > 0)


def test_a_system_without_memfd_has_no_shared_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    pool = Pool()
    assert pool.empty((10,), FLOAT) is None
    assert pool.why_not == "this system has no memfd_create"


def test_a_forked_child_gets_no_shared_arrays_and_gives_none_of_its_parents_back() -> None:
    pool = Pool()
    array = pool.empty((1000,), FLOAT)
    child = os.fork()
    if not child:
        os._exit(0 if pool.empty((10,), FLOAT) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert array is not None


def test_the_limits_of_control_groups_above_count_too(tmp_path: Path) -> None:
    """Version 2, and version 1 with its own names."""
    own = tmp_path / "own"
    own.write_text("3:cpu:/a\n2:memory:/box/job\n0::/slice/job\n")
    root = tmp_path / "cgroup"
    for folder, names in {
        "slice/job": {"memory.max": "max", "memory.current": "5"},
        "slice": {"memory.max": "1000", "memory.current": "400"},
        "memory/box/job": {"memory.limit_in_bytes": "900", "memory.usage_in_bytes": "950"},
    }.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, text in names.items():
            (root / folder / name).write_text(text + "\n")
    assert sorted(shared_memory._groups_left(str(root), str(own))) == [0, 600]
    assert shared_memory.memory_left() > 0


# Several pieces as one


def pages(pool: Pool, *sizes: int) -> list[np.ndarray]:
    """Return arrays of so many float32 elements, each at a page, filled with 0, 1, 2 ..."""
    found = []
    for number, size in enumerate(sizes):
        array = pool.empty((max(size, PAGE // 4),), FLOAT)
        assert array is not None
        array[...] = number
        found.append(array[:size])
    return found


def test_pieces_that_are_whole_pages_become_one_array_without_a_copy() -> None:
    pool = Pool()
    pieces = pages(pool, PAGE, 2 * PAGE, 100)[::-1][1:] + pages(pool, 100)
    whole = stitched(pieces, OrderedDict())
    assert whole is not None
    assert np.array_equal(whole, np.concatenate(pieces))
    pieces[1][5] = 42.0
    assert whole[len(pieces[0]) + 5] == 42.0


def test_pieces_that_do_not_fit_together_are_left_to_whoever_copies() -> None:
    pool = Pool()
    first, second = pages(pool, PAGE, PAGE)
    assert stitched([first[: PAGE - 1], second], OrderedDict()) is None  # ends within a page
    assert stitched([first, second[1:]], OrderedDict()) is None  # begins within one
    private = np.empty(3 * PAGE, np.uint8)
    start = -address_of(private) % PAGE
    assert stitched([private[start : start + PAGE].view(FLOAT), second], OrderedDict()) is None  # no shared memory


def test_pieces_stay_in_use_as_long_as_the_array_that_was_made_of_them() -> None:
    pool = Pool()
    pieces = pages(pool, PAGE, PAGE)
    places = {address_of(piece) for piece in pieces}
    whole = stitched(pieces, OrderedDict())
    assert whole is not None
    part = whole.reshape(2, PAGE)[1:]
    del pieces, whole
    gc.collect()
    assert not places & {address_of(each) for each in pages(pool, PAGE, PAGE, PAGE)}
    del part
    gc.collect()
    assert places & {address_of(each) for each in pages(pool, PAGE, PAGE, PAGE)}


def test_the_same_pieces_are_mapped_once() -> None:
    pool = Pool()
    pieces = pages(pool, PAGE, PAGE)
    kept: Stitched = OrderedDict()
    one, two = stitched(pieces, kept), stitched(pieces, kept)
    assert one is not None
    assert two is not None
    assert address_of(one) == address_of(two)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30 * PAGE), min_size=1, max_size=30), st.booleans())
def test_arrays_of_what_was_reserved_need_no_new_segment(sizes: list[int], is_one: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "FIRST_BYTES", 16 * PAGE)
        patch.setattr(shared_memory, "SEGMENT_BYTES", 64 * PAGE)
        pool = Pool()
        assert pool.reserve(sum(sizes), len(sizes)) if is_one else all(pool.reserve(size) for size in sizes)
        before = pool.size
        assert sum(segment.size for segment in pool.ahead) == before
        for _ in range(3):
            kept = [pool.empty((size,), np.dtype(np.uint8)) for size in sizes]
            assert all(each is not None for each in kept)
            del kept
        assert pool.size == before


def test_where_no_memory_is_left_nothing_is_reserved_and_arrays_come_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool()
    monkeypatch.setattr(shared_memory, "memory_left", lambda: 1 << 20)
    assert not pool.reserve(1 << 24)
    assert "1048576 bytes of memory are left" in pool.why_not
    monkeypatch.undo()
    assert pool.empty((1 << 20,), FLOAT) is not None


def test_what_is_reserved_is_at_most_half_of_the_memory_and_a_refusal_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However often it is asked for, by whichever store."""
    pool, host = Pool(), 64 << 20
    monkeypatch.setattr(shared_memory, "memory_left", lambda: host - pool.size)
    answers = [pool.reserve(4 << 20, times=2, store=number % 2) for number in range(8)]
    assert answers == [True] * 4 + [False] * 4
    assert pool.size <= host // 2 + shared_memory.FIRST_BYTES
    before, reserved = pool.size, dict(pool._reserved)
    assert not pool.reserve(40 << 20, store=7)
    assert (pool.size, pool._reserved) == (before, reserved)
    assert "bytes of memory are left here" in pool.why_not
    pool.unreserve(0)
    assert pool.reserve(4 << 20, times=2, store=7)
    assert pool.size == before


def test_a_closed_pool_makes_no_arrays_and_those_in_use_stay_valid() -> None:
    pool = Pool()
    array = pool.empty((5000,), FLOAT)
    assert array is not None
    array[...] = 3
    descriptor = pool.find(address_of(array), array.nbytes)
    assert descriptor is not None
    fd = descriptor[0].fd
    del descriptor
    pool.close()
    pool.close()
    assert pool.empty((3,), FLOAT) is None
    assert not pool.reserve(3)
    assert (pool.size, pool.find(address_of(array), array.nbytes)) == (0, None)
    gc.collect()
    assert os.fstat(fd).st_size  # its memory is still there
    assert (array == 3).all()
    del array
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_pool_gives_back_segments_that_have_no_array_and_goes_on_until_it_needs_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "FIRST_BYTES", 4 * PAGE)
    monkeypatch.setattr(shared_memory, "SEGMENT_BYTES", 4 * PAGE)
    pool = Pool()
    before = len(os.listdir("/proc/self/fd"))
    kept: list[Any] = [pool.empty((4 * PAGE,), np.dtype(np.uint8)) for _ in range(4)]
    first, *others = sorted(pool.numbers)
    kept[3].fill(7)
    part = kept[3][5:]
    del kept[3], kept[1]
    pool.collect()
    assert pool.numbers == {first, *others}, "nobody asked for it"
    pool.trim()
    assert (pool.numbers, pool.size) == ({first, others[1], others[2]}, 12 * PAGE)
    kept.clear()
    pool.collect()
    assert pool.numbers == {first, others[2]}, "the first one stays"
    assert (part == 7).all()
    del part
    pool.collect()
    assert (pool.numbers, pool.given_back) == ({first}, 3)
    assert len(os.listdir("/proc/self/fd")) == before + 2, "its own, and that of its mapping"
    kept = [pool.empty((4 * PAGE,), np.dtype(np.uint8)) for _ in range(2)]
    kept.clear()
    pool.collect()
    assert len(pool.numbers) == 2, "a new one was needed since"


def test_a_pool_with_reserved_room_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FIRST_BYTES", 4 * PAGE)
    pool = Pool()
    assert pool.reserve(64 * PAGE, store=1)
    assert pool.reserve(64 * PAGE, store=2)
    before = pool.numbers
    pool.unreserve(1)
    pool.trim()
    assert pool.numbers == before
    pool.unreserve(2)
    pool.trim()
    assert pool.numbers < before
    assert {segment.number for segment in pool.ahead} == pool.numbers
