"""Threads that share copies and sums: how many there are, that each element is done once, and what ends them."""

from __future__ import annotations

import mmap
import os
import queue
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from slowness import scaled

from distrun_runtime.arrays import cores
from distrun_runtime.arrays.cores import Pieces, Threads, pieces_of, threads_for
from distrun_runtime.errors import ContractError


@pytest.mark.parametrize(
    ("cores_here", "processes", "limit", "wanted", "expected"),
    [
        *((2, 2, 0, 0, 1), (1, 1, 0, 0, 1), (2, 1, 0, 0, 2), (16, 2, 0, 0, 8), (64, 2, 0, 0, 8)),
        *((16, 4, 0, 0, 4), (16, 3, 0, 0, 5), (4, 16, 0, 0, 1), (3.5, 1, 0, 0, 3), (0.5, 1, 0, 0, 1)),
        *((16, 2, 3, 0, 3), (16, 2, 1, 0, 1), (16, 2, 99, 0, 8), (2, 2, 1, 3, 3), (64, 1, 0, 12, 12)),
    ],
)
def test_a_process_has_its_share_of_the_cores_unless_it_is_told_a_number(
    cores_here: float, processes: int, limit: int, wanted: int, expected: int
) -> None:
    assert threads_for(cores_here, processes, limit, wanted) == expected


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"DISTRUN_LOCAL_SIZE": "2", "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "8"}, 6),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "1"}, 3),
        ({"DMLC_ROLE": "server", "DMLC_NUM_WORKER": "4", "DMLC_NUM_SERVER": "2"}, 6),
        ({"OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "1", "DMLC_ROLE": "server", "DISTRUN_LOCAL_SIZE": "2"}, 6),
        ({"DISTRUN_COPY_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
    ],
)
def test_the_processes_of_a_role_on_this_host_share_its_cores(
    env: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISTRUN_LOCAL_SIZE", "DMLC_ROLE", "DISTRUN_COPY_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores, "usable_cores", lambda: 12.0)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert cores.threads_here() == expected


def test_a_wrong_number_of_threads_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTRUN_COPY_THREADS", "-1")
    with pytest.raises(ContractError, match="DISTRUN_COPY_THREADS='-1'"):
        Threads().count()


def test_control_groups_of_both_versions_and_those_above_limit_the_cores(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "groups"
    own.write_text("4:memory:/x\n3:cpu,cpuacct:/box/job\n0::/slice/job\n")
    for name, text in {
        "slice/job/cpu.max": "max 100000",
        "slice/cpu.max": "250000 100000",
        "cpu/box/job/cpu.cfs_quota_us": "150000",
        "cpu/box/job/cpu.cfs_period_us": "100000",
        "cpu/box/cpu.cfs_quota_us": "-1",
        "cpu/box/cpu.cfs_period_us": "100000",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    assert sorted(cores._quotas(str(root), str(own))) == [1.5, 2.5]
    assert 0 < cores.usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("sizes", [[1 << 20], [0, 5, 100_000, 0, 77], [4096] * 40, [12_289, 4095, 300_001], []])
@pytest.mark.parametrize("about", [0, 5000, 40_000])
def test_pieces_have_each_element_once_and_are_about_as_large_as_wanted(sizes: list[int], about: int) -> None:
    found: list[Pieces] = pieces_of(sizes, about)
    counts = [np.zeros(size, int) for size in sizes]
    for piece in found:
        for number, run in piece:
            counts[number][run] += 1
            assert run.start % cores.UNIT == 0
        assert sum(run.stop - run.start for _, run in piece) <= max(about, cores.UNIT) + 2 * cores.UNIT
    assert all((each == 1).all() for each in counts)


def test_work_below_the_bound_is_the_callers_and_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_threads", {})
    who: set[str] = set()
    Threads(3, bound=40).share([9], lambda _, run: who.add(threading.current_thread().name))
    Threads(1, bound=0).share([9, 0], lambda _, run: who.add(threading.current_thread().name))
    assert who == {threading.current_thread().name}
    assert not cores._threads


def test_each_of_the_threads_takes_pieces_and_a_thread_of_theirs_may_share_work_again() -> None:
    met = threading.Barrier(3, timeout=scaled(60))
    threads, found = Threads(3, bound=1), []

    def work(_: int, run: slice) -> None:
        if run.start in {0, 1 << 16, 2 << 16}:
            met.wait()  # three pieces are under way at the same time
        threads.share([8192], lambda _, inner: found.append(inner.stop - inner.start))

    threads.share([12 << 16], work)
    assert sum(found) == 8192 * 12


@pytest.mark.parametrize("at", [0, 1 << 16, 11 << 16])
def test_what_goes_wrong_in_a_piece_is_raised_when_no_thread_works_any_more(at: int) -> None:
    under_way: list[int] = []

    def work(_: int, run: slice) -> None:
        under_way.append(run.start)
        if run.start == at:
            raise ZeroDivisionError(at)
        under_way.append(-run.start)

    with pytest.raises(ZeroDivisionError):
        Threads(3, bound=1).share([12 << 16], work)
    assert sum(under_way) == at


def test_a_thread_that_does_not_come_back_is_not_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "LIMIT_S", 0.01)
    begun, goes_on, me = threading.Event(), threading.Event(), threading.current_thread()

    def work(_: int, run: slice) -> None:
        if threading.current_thread() is me:
            assert begun.wait(scaled(60))
        else:
            begun.set()
            goes_on.wait(scaled(60))

    with pytest.raises(cores.RuntimeFault, match=r"waited 0\.01 s for a thread that copies"):
        Threads(2, bound=1).share([8 << 16], work)
    goes_on.set()


def test_a_piece_that_was_begun_before_the_caller_comes_to_its_own_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, me = threading.Event(), threading.Event(), threading.current_thread()

    class Asked(queue.SimpleQueue[object]):
        def put(self, item: object, *_: object) -> None:
            super().put(item)
            assert begun.wait(scaled(60))

    def work(_: int, run: slice) -> None:
        if threading.current_thread() is not me:
            begun.set()
            assert goes_on.wait(scaled(60))
            raise ZeroDivisionError
        if run.stop == 8 << 16:
            goes_on.set()

    own = cores._ThreadSet()
    own._asked = Asked()  # type: ignore[assignment]
    monkeypatch.setattr(cores, "_threads", {os.getpid(): own})
    with pytest.raises(ZeroDivisionError):
        Threads(2, bound=1).share([8 << 16], work)


def test_what_a_handler_raises_in_a_call_is_raised_when_no_thread_works_any_more() -> None:
    begun, is_last, is_heard, has_returned = (threading.Event() for _ in range(4))
    late: list[bool] = []

    def handle(*_: object) -> None:
        if not is_heard.is_set():
            is_heard.set()
            raise KeyboardInterrupt

    def work(_: int, run: slice) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(scaled(60))
            if run.stop == 8 << 16:
                is_last.set()
            return
        begun.set()
        assert is_last.wait(scaled(60))
        while not is_heard.wait(0.01):  # one that comes just before a wait does not end it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        late.append(has_returned.wait(0.3))
        raise ZeroDivisionError  # an interrupt is more than an error

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            Threads(2, bound=1).share([8 << 16], work)
    finally:
        has_returned.set()
        signal.signal(signal.SIGUSR1, before)
    assert late == [False]


def test_beside_a_backward_half_of_the_threads_are_used() -> None:
    threads = Threads(5)
    with cores.beside_backward():
        assert (threads.count(), Threads(1).count()) == (2, 1)
    assert threads.count() == 5


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_fresh_is_copied_whole_by_any_number_of_threads(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(cores, "SHARED", Threads(threads))
    sources = [np.arange(size, dtype=np.float32) for size in (3 << 20, 5, 1 << 20)]
    targets = list(map(np.zeros_like, sources))
    cores.copy_all(list(zip(sources, targets, strict=True)), are_fresh=True)
    assert all(map(np.array_equal, targets, sources))


def test_a_forked_child_starts_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "SHARED", Threads(3))
    source = np.arange(3 << 20, dtype=np.float32)

    def is_copied() -> bool:
        targets = [np.zeros(2 << 20, np.float32), np.zeros(1 << 20, np.float32)]
        cores.copy_all([(source[: 2 << 20], targets[0]), (source[2 << 20 :], targets[1])])
        return bool(np.array_equal(np.concatenate(targets), source))

    assert is_copied()
    child = os.fork()
    if not child:
        os._exit(0 if is_copied() and set(cores._threads) >= {os.getpid(), os.getppid()} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_copied()


def test_long_work_lets_who_waits_for_its_core_run_first_and_short_work_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = list[int]()
    monkeypatch.setattr(os, "sched_yield", lambda: given.append(1))
    cores.give_way(cores.LONG_BYTES - 1)
    assert not given
    cores.give_way(cores.LONG_BYTES)
    assert given == [1]


@pytest.mark.parametrize("count", [1, 3])
def test_touched_memory_costs_no_page_faults_when_it_is_used(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "SHARED", Threads(count))
    size, faults = 32 << 20, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fd = os.memfd_create("touched")
    os.posix_fallocate(fd, 0, size)
    written, read = (np.frombuffer(mmap.mmap(fd, size, prot=prot), np.uint8) for prot in (3, mmap.PROT_READ))
    os.close(fd)
    for memory, is_written in ((written, True), (read, False)):
        cores.touch(memory, is_written=is_written)
        before = faults()
        assert not memory.any()
        if is_written:
            memory.fill(0)
        assert faults() - before < size // mmap.PAGESIZE // 8
