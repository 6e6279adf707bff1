"""Measure sums, rules, codecs, copies and stores on a GPU, each beside a limit or a peer; write the tables of the page.

    python benchmarks/gpu.py --minutes 6                # this machine's GPU: benchmarks/results/gpu-NAME-DATE.json
    python benchmarks/gpu.py --sections copies stores   # only these
    python benchmarks/gpu.py --tables                   # docs/benchmarks.md, from the newest results of each GPU

Needs an NVIDIA GPU and cupy; peers of torch are left out without torch. `scripts/gpu-check` runs this after it has
checked that results are right.

Each section is a process of its own with a time limit: one that fails or hangs leaves the others. Ours and what it is
compared with take turns, and a ratio is that of two times of one run. Times are of two kinds: between two events on the
GPU, behind other work, so that the GPU does not wait for the program; and of the wall clock, of one call and the wait
for its end. Inputs rotate over more than four times what the L2 cache holds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # first: both have a module `report`

import gpu_results
import numpy as np
import report
import shapes
from gpu_results import CUT, DONE, FAILED, GOALS, Part, Results, Row
from round import OURS, System, Work, measure, reports_of, slowest

from distrun_runtime import kvstore
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays import gpu_programs
from distrun_runtime.arrays.cuda import Argument, Read, Update, Write
from distrun_runtime.arrays.gpu import GpuArray, GpuDevice, ListLaunch, TensorColumn
from distrun_runtime.arrays.gpu_programs import Access
from distrun_runtime.errors import KVError
from distrun_runtime.ops import fuse, optimizers

ROOT = Path(__file__).resolve().parent.parent
F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
CHUNK = 1 << 24
"""Elements that are compared with a reference at a time."""
RANDOM = 1 << 22
"""Random elements, from which arrays are made."""
WARM_UP = 2
NO_GPU = 2
"""Exit code: there is no GPU, or no cupy."""
L2_TURNS, MOST_SETS = 4, 64
PLUG_BYTES = 1 << 28
PLUGS = 1000
"""At most so many of them are put before what is timed."""
TRIES = 4
"""A run in which the GPU waited for the program is repeated, so that there are at most so many."""
FIRST_JOBS = 0.4
"""Jobs of k = 1 have at most this part of the time."""
WALL_GOAL_S = 0.0003
"""Of the sum of ResNet-50's tensors at k = 2."""
CONDITION = (
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu"),
    *("pcie.link.gen.current", "pcie.link.width.current", "ecc.mode.current"),
)
"""What nvidia-smi is asked before and after."""
SCALARS = {"quantum": np.float32(0.5), "threshold": np.float32(0), "step": np.float32(0.5), "inclusive": np.uint32(1)}


@dataclass(frozen=True)
class Plan:
    """How much is measured; all sizes may be small, for a try."""

    runs: int = 5
    calls: int = 5
    """Of each contestant in a run."""
    giga: int = 10**9
    """Bytes of a large array."""
    beyond: int = 2**31 + 2**20 + 3
    """Elements of the array of more than 2^31."""
    elements: int = 1 << 26
    """Of what codecs and rules work on."""
    counts: tuple[int, ...] = (2, 4, 8)
    model: str = "resnet50"
    copies: tuple[int, ...] = tuple(1 << power for power in (20, 22, 24, 26, 28))
    """Bytes of arrays that go over the bus."""
    job_rounds: int = 8
    job_runs: int = 3
    arrays: str = "cupy"
    """Whose arrays a job's workers have."""
    server_device: str = "gpu:0"
    """Of jobs with a `dist_device_sync` store; empty: what the launcher chooses."""
    env: tuple[str, ...] = ()
    """Of jobs: variables and their values."""
    steps: int = 20
    """Of training, in a run."""
    width: int = 64
    """Of the images."""
    device: str = "cuda:0"
    """On which torch trains."""
    deadline: float = math.inf
    """By time.monotonic(): no run begins after it."""
    is_small: bool = False
    """All models are the plan's."""

    def shapes(self) -> list[tuple[int, ...]]:
        """Return the shapes of the model's tensors."""
        return shapes.named(self.model)


SMALL = Plan(2, 2, 4000, 3001, 1000, (2, 4, 8), "5x300", (1 << 10, 1 << 12), 2, 1, is_small=True)
"""For a try, and for tools that make everything slow."""


class OutOfTime(Exception):
    """The section's time is over; what was measured stands."""


class Missing(Exception):
    """A peer is not installed."""


NO_TORCH = "torch is not installed, so nothing is compared with it"


# Times


def sets_needed(nbytes: int, l2: int) -> int:
    """Return how many sets of inputs take turns, so that a call finds nothing of its set in the L2 cache.

    Of less than a 64th of that there are 64 sets: a try with small arrays.

    Arguments:
        nbytes: that a call reads and writes.
        l2: bytes of the cache.
    """
    return 1 if nbytes > L2_TURNS * l2 else min(MOST_SETS, L2_TURNS * l2 // max(1, nbytes) + 2)


@dataclass(frozen=True)
class Contestant:
    """One of those that take turns."""

    way: Callable[[int], object]
    """Does the work; takes the number of the call, by which inputs rotate."""
    stream: int | None
    """The handle of the stream on which it works; None: the call itself waits, so that no events are used."""


@dataclass(frozen=True)
class Times:
    """Of one run, in seconds a call."""

    wall: float
    event: float | None = None
    is_ahead: bool = True
    """Whether the program had given all calls to the GPU before it began with the first."""


class Shared:
    """An array of ours for other libraries: they look into the same memory."""

    def __init__(self, array: GpuArray) -> None:
        self.array = array
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.pointer.address, False),
            "version": 3,
            "stream": None,
        }


class Card:
    """A GPU with its libraries and its clock.

    Arguments:
        device: as distrun has it.
        cupy: the module.
        torch: the module; None: it is not installed.
    """

    def __init__(self, device: GpuDevice, cupy: Any, torch: Any) -> None:
        self.device = device
        self.cupy = cupy
        self._torch = torch
        self._runtime = cupy.cuda.runtime
        self.l2 = int(self._runtime.getDeviceProperties(device.physical)["l2CacheSize"])
        self.stream = int(device.work.stream.handle)
        self._plug = self._runtime.malloc(PLUG_BYTES)
        self._fill_plugs(self.stream, WARM_UP)
        filling = [self._timed(self.stream, lambda: self._fill_plugs(self.stream, 5))[0] / 5 for _ in range(3)]
        self._plug_s = max(1e-5, min(filling))
        random = np.random.default_rng(0).normal(0, 1, RANDOM).astype(F32)
        self._random = {F32: device.put(random), F16: device.put(random.astype(F16))}

    @property
    def has_torch(self) -> bool:
        """Whether torch is installed."""
        return self._torch is not None

    @property
    def torch(self) -> Any:
        """The module.

        Raises:
            Missing: it is not installed.
        """
        if self._torch is None:
            raise Missing(NO_TORCH)
        return self._torch

    @property
    def torch_stream(self) -> int:
        """The handle of torch's current stream."""
        return int(self.torch.cuda.current_stream().cuda_stream)

    @property
    def cupy_stream(self) -> int:
        """The handle of cupy's current stream."""
        return int(self.cupy.cuda.get_current_stream().ptr)

    # Arrays

    def random(self, shape: int | Sequence[int], dtype: Any = F32, seed: int = 0) -> GpuArray:
        """Return an array of random numbers."""
        result = self.device.empty((shape,) if isinstance(shape, int) else shape, np.dtype(dtype))
        flat, source = result.reshape(-1), self._random[np.dtype(dtype)]
        begin = seed * 7919 % (len(source) // 2)
        step = len(source) - begin
        for at in range(0, result.size, step):
            run = slice(at, min(at + step, result.size))
            self.device.write(flat[run], source[begin : begin + run.stop - run.start])
        return result

    def of_torch(self, array: GpuArray) -> Any:
        """Return a tensor that is the same memory."""
        return self.torch.as_tensor(Shared(array), device="cuda")

    def of_cupy(self, array: GpuArray) -> Any:
        """Return cupy's array that is the same memory."""
        return self.cupy.asarray(Shared(array))

    def locked(self, nbytes: int) -> Any:
        """Return page-locked memory of the host, as bytes.

        Raises:
            OSError: the system allows none.
        """
        result = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        result[:] = 1
        if not self.device.locked.lock(result):
            raise OSError("no memory can be page-locked here: see 'ulimit -l'")
        return result

    # Time

    def synchronize(self) -> None:
        """Return when the GPU has nothing left to do, for any library."""
        self._runtime.deviceSynchronize()

    def times(self, contestant: Contestant, first: int, calls: int, host_s: float = 0.0) -> Times:
        """Return the times of some calls of a contestant.

        Arguments:
            first: number of the first call.
            host_s: how long the program takes to give the calls to the GPU, which works on other things meanwhile.
        """
        self.synchronize()
        event, is_ahead = None, True
        turns = itertools.count(first)
        if contestant.stream is not None:

            def all_calls() -> None:
                for _ in range(calls):
                    contestant.way(next(turns))

            plugs = 1 + int(1.5 * host_s / self._plug_s)
            for _ in range(TRIES):
                self._fill_plugs(contestant.stream, min(PLUGS, plugs))
                seconds, is_ahead = self._timed(contestant.stream, all_calls)
                self.synchronize()
                if is_ahead:
                    break
                plugs *= 2
            event = seconds / calls
        wall = []
        for _ in range(calls):
            begin = time.perf_counter()
            contestant.way(next(turns))
            self.synchronize()
            wall.append(time.perf_counter() - begin)
        return Times(statistics.median(wall), event, is_ahead)

    def warmed_up(self, contestant: Contestant, calls: int) -> float:
        """Let a contestant do its work until all is compiled; return the program's seconds for so many calls."""
        for number in range(WARM_UP):
            contestant.way(number)
        self.synchronize()
        begin = time.perf_counter()
        contestant.way(WARM_UP)
        host_s = time.perf_counter() - begin
        self.synchronize()
        return host_s * calls

    def _timed(self, stream: int, work: Callable[[], object]) -> tuple[float, bool]:
        """Return the seconds that some work takes on a stream, and whether all was given before the first began."""
        begin, end = self._runtime.eventCreate(), self._runtime.eventCreate()
        self._runtime.eventRecord(begin, stream)
        work()
        is_ahead = self._runtime.eventQuery(begin) != 0
        self._runtime.eventRecord(end, stream)
        self._runtime.eventSynchronize(end)
        seconds = float(self._runtime.eventElapsedTime(begin, end)) / 1e3
        for each in (begin, end):
            self._runtime.eventDestroy(each)
        return max(seconds, 1e-9), is_ahead

    def _fill_plugs(self, stream: int, count: int) -> None:
        for _ in range(count):
            self._runtime.memsetAsync(self._plug, 0, PLUG_BYTES, stream)


def compare(card: Card, plan: Plan, contestants: Mapping[str, Contestant]) -> dict[str, list[Times]]:
    """Let all take turns; return each one's times, run by run.

    Raises:
        OutOfTime: there is no time for a first run; with fewer runs than wanted it returns those.
    """
    in_time(plan)
    host_s = {name: card.warmed_up(each, plan.calls) for name, each in contestants.items()}
    found: dict[str, list[Times]] = {name: [] for name in contestants}
    for run in range(plan.runs):
        if run and time.monotonic() > plan.deadline:
            break
        for name, each in contestants.items():
            found[name].append(card.times(each, 2 * run * plan.calls, plan.calls, host_s[name]))
    return found


def in_time(plan: Plan) -> None:
    """Raise OutOfTime if the section's time is over."""
    if time.monotonic() > plan.deadline:
        raise OutOfTime


def row(work: str, against: str, ours: Sequence[Times], theirs: Sequence[Times], **more: Any) -> Row:
    """Return what a comparison has found: by events, if both have them.

    Arguments:
        more: other fields of the row.
    """
    has_events = all(each.event is not None for each in (*ours, *theirs))
    mine, other = ([each.event if has_events else each.wall for each in times] for times in (ours, theirs))
    return Row(
        work,
        against,
        wall_s=statistics.median(each.wall for each in ours),
        theirs_s=statistics.median(other),
        ratios=[their / my for my, their in zip(mine, other, strict=True)],
        event_s=statistics.median(mine) if has_events else None,
        ours_s=mine,
        their_runs_s=other,
        theirs_wall_s=statistics.median(each.wall for each in theirs),
        waits=sum(not (my.is_ahead and their.is_ahead) for my, their in zip(ours, theirs, strict=True)),
        **more,
    )


def limit(card: Card, moved: int) -> Contestant:
    """Return a copy within the GPU that reads and writes as many bytes in all, over rotating memory."""
    half = max(4, moved // 2 // 4 * 4)
    pairs = [(card.random(half // 4), card.random(half // 4)) for _ in range(sets_needed(moved, card.l2))]

    def copy(turn: int) -> None:
        into, source = pairs[turn % len(pairs)]
        card.device.write(into, source)

    return Contestant(copy, card.stream)


LIMIT = "a copy of the same bytes"


# Right results


def distance(found: GpuArray, reference: Callable[[slice], Any], runs: Sequence[slice] | None = None) -> float:
    """Return how far a flat array is from its reference, relative to that. Of a large one three chunks are compared.

    Arguments:
        reference: returns elements as float64.
        runs: which are compared, instead.
    """
    if runs is None:
        size, middle = found.size, (found.size - CHUNK) // 2
        runs = [slice(at, at + CHUNK) for at in (0, middle, size - CHUNK)] if size > 3 * CHUNK else [slice(0, size)]
    squares, whole = 0.0, 0.0
    for run in runs:
        expected = reference(run)
        with np.errstate(invalid="ignore"):
            difference = found.device.host(found[run]).astype(np.float64) - expected
        squares += float(np.dot(difference, difference))
        whole += float(np.dot(expected, expected))
    return math.sqrt(squares / whole) if whole else squares


def right(error: float, most: float, what: str) -> float:
    """Return an error that is small enough.

    Raises:
        ArithmeticError: it is not, or is NaN.
    """
    if not error <= most:
        raise ArithmeticError("%s is wrong: %g from its float64 reference, expected at most %g" % (what, error, most))
    return error


def sum_of(parts: Sequence[GpuArray]) -> Callable[[slice], Any]:
    """Return the reference of a sum."""

    def reference(run: slice) -> Any:
        total = np.zeros(run.stop - run.start)
        for part in parts:
            total += part.device.host(part[run])
        return total

    return reference


# Sections


def sums(card: Card, plan: Plan) -> Iterator[Row]:
    """Sums of large arrays, one kernel each."""
    device, n = card.device, plan.giga // 4
    for k in plan.counts:
        parts, out, moved = [card.random(n, F32, seed) for seed in range(k)], device.empty((n,), F32), (k + 1) * 4 * n
        ways = {
            "ours": Contestant(lambda _, parts=parts, out=out: device.sum(parts, out), card.stream),
            "copy": limit(card, moved),
        }
        times = compare(card, plan, ways)
        work = "sum of k = %d arrays of %s" % (k, size_of(4 * n))
        error = right(distance(out, sum_of(parts)), 1e-6, work)
        yield row(work, LIMIT, times["ours"], times["copy"], goal=0.9, moved_bytes=moved, error=error)
        del parts, out, ways
        device.pool.trim()
    yield beyond(card, plan)


def beyond(card: Card, plan: Plan) -> Row:
    """Return the sum of two arrays of more than 2^31 elements."""
    n, device = plan.beyond, card.device
    parts, out = [card.random(n, F16, seed) for seed in range(2)], device.empty((n,), F16)
    ways = {"ours": Contestant(lambda _: device.sum(parts, out), card.stream), "copy": limit(card, 6 * n)}
    times = compare(card, plan, ways)
    work = "sum of k = 2 arrays of %d float16" % n
    middle = min(2**31, n // 2)
    runs = [slice(max(0, at - 1000), min(n, at + CHUNK)) for at in (0, n // 4, middle, n - CHUNK // 2)]
    error = right(distance(out, sum_of(parts), runs), 1e-3, work)
    return row(work, LIMIT, times["ours"], times["copy"], moved_bytes=6 * n, error=error)


def model(card: Card, plan: Plan) -> Iterator[Row]:
    """Sums of a model's tensors, as a push has them: one kernel for all, into one bucket."""
    device, sizes = card.device, [math.prod(shape) for shape in plan.shapes()]
    total = sum(sizes)
    for k in plan.counts:
        moved = (k + 1) * 4 * total
        # For what the way back reads and writes, which is less.
        sets = [model_set(card, plan, k, number) for number in range(sets_needed(2 * 4 * total, card.l2))]

        def gather(turn: int, sets: Any = sets) -> None:
            device.gather(*sets[turn % len(sets)])

        times = compare(card, plan, {"ours": Contestant(gather, card.stream), "copy": limit(card, moved)})
        work = "sum of k = %d lists of the %d tensors of %s" % (k, len(sizes), plan.model)
        error = 0.0
        lists, bucket = sets[0]
        begin = 0
        for arrays, size in zip(lists, sizes, strict=True):
            found = distance(bucket[begin : begin + size], sum_of([each.reshape(-1) for each in arrays]))
            error, begin = max(error, right(found, 1e-6, work)), begin + size
        yield row(work, LIMIT, times["ours"], times["copy"], goal=0.75, moved_bytes=moved, error=error)
        if k == 2:
            wall, wanted = [Times(each.wall) for each in times["ours"]], [Times(WALL_GOAL_S)] * len(times["ours"])
            yield row(work + ", wall", "%g ms" % (WALL_GOAL_S * 1e3), wall, wanted, goal=1.0, moved_bytes=moved)
            yield scatter(card, plan, sets)
        del sets, gather, lists, bucket
        device.pool.trim()


def model_set(card: Card, plan: Plan, k: int, number: int) -> tuple[list[list[GpuArray]], GpuArray]:
    """Return k arrays of each tensor, and a bucket for their sums."""
    lists = [
        [card.random(shape, F32, number * 1000 + 10 * tensor + part) for part in range(k)]
        for tensor, shape in enumerate(plan.shapes())
    ]
    return lists, card.device.empty((sum(arrays[0].size for arrays in lists),), F32)


def scatter(card: Card, plan: Plan, sets: Sequence[tuple[list[list[GpuArray]], GpuArray]]) -> Row:
    """Return the way back: a bucket to all tensors."""
    moved = 2 * sets[0][1].nbytes

    def way(turn: int) -> None:
        lists, bucket = sets[turn % len(sets)]
        card.device.scatter(bucket, [arrays[0] for arrays in lists])

    times = compare(card, plan, {"ours": Contestant(way, card.stream), "copy": limit(card, moved)})
    work = "a bucket to the %d tensors of %s" % (len(sets[0][0]), plan.model)
    return row(work, LIMIT, times["ours"], times["copy"], moved_bytes=moved)


def peers(card: Card, plan: Plan) -> Iterator[Row]:
    """Sums beside those of torch and cupy."""
    device, n = card.device, plan.giga // 4
    for k in plan.counts:
        parts, out, moved = [card.random(n, F32, seed) for seed in range(k)], device.empty((n,), F32), (k + 1) * 4 * n
        work = "sum of k = %d arrays of %s" % (k, size_of(4 * n))
        ours = Contestant(lambda _, parts=parts, out=out: device.sum(parts, out), card.stream)
        mine = [card.of_cupy(each) for each in parts]
        goal = {4: 1.6, 8: 2.0}.get(k)
        naive = Contestant(lambda _, mine=mine: added_up(mine), card.cupy_stream)
        times = compare(card, plan, {"ours": ours, "theirs": naive})
        yield row(work, "cupy, naive", times["ours"], times["theirs"], goal=goal, moved_bytes=moved)
        tensors, into = [card.of_torch(each) for each in parts], card.of_torch(out)
        if k == 2:
            add = Contestant(lambda _, t=tensors, o=into: card.torch.add(t[0], t[1], out=o), card.torch_stream)
            times = compare(card, plan, {"ours": ours, "theirs": add})
            yield row(work, "torch.add(out=)", times["ours"], times["theirs"], goal=0.97, moved_bytes=moved)
        naive = Contestant(lambda _, tensors=tensors: added_up(tensors), card.torch_stream)
        times = compare(card, plan, {"ours": ours, "theirs": naive})
        yield row(work, "torch, naive", times["ours"], times["theirs"], goal=goal, moved_bytes=moved)
        del parts, out, ours, mine, naive, tensors, into
        device.pool.trim()
    yield lists_beside_torch(card, plan)


def added_up(arrays: Sequence[Any]) -> Any:
    """Return the sum as one writes it without thinking: a new array for each addition."""
    total = arrays[0]
    for each in arrays[1:]:
        total = total + each
    return total


def lists_beside_torch(card: Card, plan: Plan) -> Row:
    """Return two lists of a model's tensors, added by one kernel and by torch's."""
    total = sum(math.prod(shape) for shape in plan.shapes())
    # torch's sums are in the first list.
    sets = [model_set(card, plan, 2, number) for number in range(sets_needed(2 * 4 * total, card.l2))]
    theirs = [[[card.of_torch(arrays[part]) for arrays in lists] for part in range(2)] for lists, _ in sets]

    def add(turn: int) -> None:
        card.torch._foreach_add_(*theirs[turn % len(theirs)])

    def gather(turn: int) -> None:
        card.device.gather(*sets[turn % len(sets)])

    ways = {"ours": Contestant(gather, card.stream), "theirs": Contestant(add, card.torch_stream)}
    times = compare(card, plan, ways)
    work = "sum of k = 2 lists of the %d tensors of %s" % (len(sets[0][0]), plan.model)
    return row(work, "torch._foreach_add_", times["ours"], times["theirs"], goal=1.0, moved_bytes=3 * 4 * total)


def codecs(card: Card, plan: Plan) -> Iterator[Row]:
    """Kernels of the codecs."""
    program, n = gpu_programs.codecs(), plan.elements
    for kind, part, numbers in (
        ("two_bit", -(-n // 16) * 4, {"encode": ["quantum"], "decode": ["quantum"]}),
        ("one_bit", -(-n // 32) * 4, {"encode": ["threshold", "step", "inclusive"], "decode": ["step"]}),
        ("half", 2 * n, {"encode": [], "decode": []}),
    ):
        for name in ("encode", "encode_keeping", "decode", "decode_adding"):
            kernel = "%s_%s" % (kind, name)
            if kernel not in {each.name for each in program.kernels}:
                continue
            scalars = [SCALARS[each] for each in numbers[name.partition("_")[0]]]
            moved = part + 4 * n * {"encode_keeping": 3, "decode_adding": 2}.get(name, 1)
            sets = [Coded(card, n, part, number) for number in range(sets_needed(moved, card.l2))]

            way = functools.partial(launch_one_of, sets, kernel, name, scalars)
            times = compare(card, plan, {"ours": Contestant(way, card.stream), "copy": limit(card, moved)})
            work = "%s, %d elements" % (kernel, n)
            yield row(work, LIMIT, times["ours"], times["copy"], goal=0.8, moved_bytes=moved)


class Coded:
    """Values, what payloads left out, a payload and values again."""

    def __init__(self, card: Card, n: int, part: int, seed: int) -> None:
        self._device = card.device
        self.values, self.out = card.random(n, F32, seed), card.random(n, F32, seed + 1)
        self.residual = card.device.zeros((n,), F32)
        self.payload = card.device.zeros((part,), np.dtype(np.uint8))

    def launch(self, kernel: str, name: str, scalars: Sequence[Any]) -> None:
        """Launch one of the kernels of a codec."""
        out, payload, n = self.out, self.payload, self.values.size
        if name.startswith("encode"):
            kept = [self.residual] if name == "encode_keeping" else []
            arguments: list[Argument] = [Read(self.values.pointer, self.values.nbytes)]
            arguments += [Update(each.pointer, each.nbytes) for each in kept]
            arguments += [*scalars, Write(payload.pointer, payload.nbytes)]
            reads, writes = [self.values], [*kept, payload]
        else:
            added = Update if name == "decode_adding" else Write
            arguments = [Read(payload.pointer, payload.nbytes), *scalars, added(out.pointer, out.nbytes)]
            reads, writes = [payload], [out]
        self._device.launch(gpu_programs.codecs(), kernel, arguments, n, reads=reads, writes=writes)


def launch_one_of(sets: Sequence[Coded], kernel: str, name: str, scalars: Sequence[Any], turn: int) -> None:
    """Launch a kernel on the set whose turn it is."""
    sets[turn % len(sets)].launch(kernel, name, scalars)


@dataclass(frozen=True)
class Beside:
    """A rule, and the optimizer of torch that does as much."""

    rule: str
    params: Mapping[str, object]
    optimizer: str = ""
    """In torch.optim; empty: there is none."""
    options: Mapping[str, object] | None = None


MOMENTUM = {"momentum": 0.9}
RULES = (
    *(Beside(rule, MOMENTUM, "SGD", {"lr": 0.01, **MOMENTUM, "fused": True}) for rule in ("sgd", "torch_sgd")),
    *(Beside(rule, {}, "Adam", {"fused": True}) for rule in ("adam", "torch_adam")),
    *(Beside(rule, {}, "AdamW", {"fused": True}) for rule in ("adamw", "torch_adamw")),
    Beside("nag", MOMENTUM, "SGD", {"lr": 0.01, **MOMENTUM, "nesterov": True, "foreach": True}),
    *(
        Beside(rule, {}, name, {"foreach": True})
        for rule, name in (
            *(("adamax", "Adamax"), ("nadam", "NAdam"), ("rmsprop", "RMSprop")),
            *(("torch_rmsprop", "RMSprop"), ("adagrad", "Adagrad"), ("adadelta", "Adadelta")),
        )
    ),
    *(Beside(rule, {}) for rule in ("signum", "dcasgd", "ftrl", "ftml")),
)


def rules(card: Card, plan: Plan) -> Iterator[Row]:
    """Steps of rules on one array, each one kernel; those that torch has beside its own."""
    for each in RULES:
        ours = Stepping(card, each.rule, each.params, plan.elements)
        has_peer = bool(each.optimizer) and card.has_torch
        theirs = stepping_torch(card, each, ours) if has_peer else limit(card, ours.moved)
        times = compare(card, plan, {"ours": Contestant(ours.step, card.stream), "theirs": theirs})
        how = "fused" if each.options and "fused" in each.options else "foreach"
        against = "torch.optim.%s, %s" % (each.optimizer, how) if has_peer else LIMIT
        work = "%s, %d elements" % (each.rule, plan.elements)
        goal = 1.0 if has_peer else None
        yield row(work, against, times["ours"], times["theirs"], goal=goal, moved_bytes=ours.moved)
        del ours, theirs
        card.device.pool.trim()
    if not card.has_torch:
        raise Missing(NO_TORCH)


class Stepping:
    """A weight with its gradient and state, updated by a rule."""

    def __init__(self, card: Card, name: str, params: Mapping[str, object], n: int) -> None:
        self._device = card.device
        self._rule = optimizers.RULES[name](params)
        self._fused = fuse.Fused(self._rule, F32, [F32])
        self._updates: optimizers.State = {"updates": 0}
        self.weight, self.gradient = card.random(n, F32, 1), card.random(n, F32, 2)
        self._arrays = {fuse.WEIGHT: self.weight, fuse.PART % 0: self.gradient}
        for each in self._fused.states:
            made = card.random(n, F32, 1) if each.is_weight else card.device.zeros((n,), each.dtype)
            self._arrays[fuse.STATE % each.name] = made
        self._launch: ListLaunch | None = None
        self.moved = 0
        """Bytes that a step reads and writes."""
        self.step(0)

    def step(self, _: int) -> None:
        """Make one step."""
        step = self._fused.step(self._rule.rates(self._updates, optimizers.PLAIN))
        if self._launch is None:
            both = [self._arrays[each.name].nbytes * (1 + (each.access is Access.UPDATE)) for each in step.arrays]
            self.moved = sum(both)
            columns = [TensorColumn.of(fuse.USES[each.access], [self._arrays[each.name]]) for each in step.arrays]
            self._launch = ListLaunch(self._device, step.program, step.kernel.name, columns, [self.weight.size])
        self._launch.run(step.scalars)


def stepping_torch(card: Card, beside: Beside, ours: Stepping) -> Contestant:
    """Return what makes a step of torch's optimizer, on a weight of its own."""
    parameter = card.torch.nn.Parameter(card.of_torch(ours.weight).clone())
    parameter.grad = card.of_torch(ours.gradient)
    optimizer = getattr(card.torch.optim, beside.optimizer)([parameter], **(beside.options or {}))
    return Contestant(lambda _: optimizer.step(), card.torch_stream)


COPY_GOALS = {1 << 26: 0.9, 1 << 24: 0.8, 1 << 22: 0.6}
"""Parts of the bus that are wanted, from so many bytes on."""


def copies(card: Card, plan: Plan) -> Iterator[Row]:
    """Copies between host and GPU, beside one plain copy of as many bytes from page-locked memory."""
    device = card.device
    for nbytes in plan.copies:
        array, host = card.random(nbytes // 4), card.locked(nbytes)
        plain = np.ones(nbytes, np.uint8)
        ways = {
            "bus out": bus(card, array, host, is_out=True),
            "bus in": bus(card, array, host, is_out=False),
            "out": Contestant(lambda _, a=array, h=host: device.read(a, h.view(F32)), None),
            "in": Contestant(lambda _, a=array, h=host: device.write(a, h.view(F32)), None),
            "out, other": Contestant(lambda _, a=array, h=plain: device.read(a, h.view(F32)), None),
            "in, other": Contestant(lambda _, a=array, h=plain: device.write(a, h.view(F32)), None),
        }
        times = compare(card, plan, ways)
        for name in ("out", "in"):
            work = "%s %s" % (size_of(nbytes), name)
            goal = next((goal for size, goal in COPY_GOALS.items() if nbytes >= size), None)
            against = "a plain copy of page-locked memory"
            locked, other, least = times[name], times[name + ", other"], times["bus " + name]
            yield row(work + ", page-locked", against, locked, least, goal=goal, moved_bytes=nbytes)
            yield row(work + ", other memory", against, other, least, moved_bytes=nbytes)
    yield from model_copies(card, plan)


def model_copies(card: Card, plan: Plan) -> Iterator[Row]:
    """Copies of all of a model's tensors by one call, as a store makes them, to page-locked memory and from there."""
    device, sizes = card.device, [math.prod(shape) for shape in plan.shapes()]
    total = sum(sizes)
    array, host = card.random(total), card.locked(4 * total)
    ends = list(itertools.accumulate(sizes))
    flat = host.view(F32)
    pairs = [(card.random(size, F32, end), flat[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    ways = {
        "bus out": bus(card, array, host, is_out=True),
        "bus in": bus(card, array, host, is_out=False),
        "out": Contestant(lambda _: device.read_all(pairs), None),
        "in": Contestant(lambda _: device.write_all(pairs), None),
    }
    times = compare(card, plan, ways)
    for name in ("out", "in"):
        work = "%d tensors of %s %s, page-locked" % (len(sizes), plan.model, name)
        against = "a plain copy of as many bytes"
        yield row(work, against, times[name], times["bus " + name], goal=0.8, moved_bytes=4 * total)


def bus(card: Card, array: GpuArray, host: Any, *, is_out: bool) -> Contestant:
    """Return one copy by CUDA between an array and page-locked memory, and the wait for it."""
    runtime, here = card.cupy.cuda.runtime, array.pointer.address
    there = int(host.ctypes.data)
    into, source = (there, here) if is_out else (here, there)
    direction = runtime.memcpyDeviceToHost if is_out else runtime.memcpyHostToDevice

    def copy(_: int) -> None:
        runtime.memcpyAsync(into, source, array.nbytes, direction, card.stream)
        card.synchronize()

    return Contestant(copy, None)


def bus_rates(card: Card, plan: Plan) -> tuple[float, float]:
    """Return bytes a second out of the GPU and in, of the largest copies."""
    nbytes = max(plan.copies)
    array, host = card.random(nbytes // 4), card.locked(nbytes)
    ways = {name: bus(card, array, host, is_out=name == "out") for name in ("out", "in")}
    times = compare(card, plan, ways)
    out, into = (nbytes / statistics.median(each.wall for each in times[name]) for name in ("out", "in"))
    return out, into


def stores(card: Card, plan: Plan) -> Iterator[Row]:
    """Rounds of stores in one process, from arrays on the GPU and back, with sgd."""
    for k in (1, 4):
        ways = {}
        opened = []
        for name in ("device", "local"):
            store = kvstore.create(name)
            opened.append(store)
            ways[name] = Contestant(round_of(card, plan, store, k), None)
        try:
            times = compare(card, plan, ways)
        finally:
            for store in opened:
                store.close()
        work = "push and pull of k = %d lists of the %d tensors of %s" % (k, len(plan.shapes()), plan.model)
        yield row("`device`: " + work, "`local`", times["device"], times["local"], goal=10.0)


def round_of(card: Card, plan: Plan, store: Any, k: int, rule: str = "sgd") -> Callable[[int], object]:
    """Return a round of a store, with arrays of cupy."""
    cupy, sizes = card.cupy, plan.shapes()
    gradients = [[cupy.full(shape, 0.001, "float32") for _ in range(k)] for shape in sizes]
    outs = [[cupy.zeros(shape, "float32") for _ in range(k)] for shape in sizes]
    keys = list(range(len(sizes)))
    if rule:
        store.set_optimizer(rule, learning_rate=0.01, momentum=0.9)
    store.init(keys, [cupy.zeros(shape, "float32") for shape in sizes])

    def way(_: int) -> None:
        store.push(keys, gradients)
        store.pull(keys, out=outs)
        card.synchronize()

    return way


def calls(card: Card, plan: Plan) -> Iterator[Row]:
    """Calls of a `device` store in one process that come again with the same arrays of one GPU, and its first one."""
    tensors = "the %d tensors of %s" % (len(plan.shapes()), plan.model)
    for k, rule, wanted in ((2, "sgd", 0.0015), (1, "", 0.0012), (4, "", 0.003)):
        with kvstore.create("device") as store:
            way = Contestant(round_of(card, plan, store, k, rule), None)
            found = compare(card, plan, {"ours": way})["ours"]
        work = "`device`: push and pull of k = %d lists of %s, %s" % (k, tensors, rule or "no rule")
        yield row(work, "%g ms" % (wanted * 1e3), found, [Times(wanted)] * len(found), goal=1.0)
    yield row("the first `init`, nothing compiled before", "1 s", [Times(first_init(plan))], [Times(1.0)], goal=1.0)
    yield pair_beside_torch(card, plan)


def pair_beside_torch(card: Card, plan: Plan) -> Row:
    """Return the sum of two large arrays and its pull, by a store and by torch."""
    torch, n = card.torch, plan.giga // 4
    parts, out = [card.of_torch(card.random(n, F32, seed)) for seed in range(2)], card.of_torch(card.random(n))
    total = torch.empty_like(out)

    def theirs(_: int) -> None:
        torch.add(parts[0], parts[1], out=total)
        out.copy_(total)
        card.synchronize()

    with kvstore.create("device") as store:
        store.init("w", out)

        def ours(_: int) -> None:
            store.push("w", parts)
            store.pull("w", out=out)
            card.synchronize()

        times = compare(card, plan, {"ours": Contestant(ours, None), "theirs": Contestant(theirs, None)})
    work = "`device`: push of a pair of arrays of %s, and pull" % size_of(4 * n)
    return row(work, "torch.add(out=), copy_", times["ours"], times["theirs"], goal=1.0, moved_bytes=20 * n)


FIRST_INIT = """
import sys, time
import cupy
import numpy
from distrun_runtime import kvstore

arrays = [cupy.asarray(numpy.zeros(int(size), "float32")) for size in sys.argv[1:]]
begin = time.perf_counter()
with kvstore.create("device") as store:
    store.set_optimizer("sgd", learning_rate=0.01, momentum=0.9)
    store.init(list(range(len(arrays))), arrays)
    print(time.perf_counter() - begin)
"""


def first_init(plan: Plan) -> float:
    """Return the seconds of a first `init` in a process of its own that finds no compiled kernels.

    Raises:
        ChildProcessError: it failed.
    """
    sizes = [str(math.prod(shape)) for shape in plan.shapes()]
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "XDG_CACHE_HOME": folder, "CUPY_CACHE_DIR": folder}
        code, text = gpu_results.run_limited([sys.executable, "-c", FIRST_INIT, *sizes], 60.0, env=env)
    if code != 0:
        raise ChildProcessError("the first init failed: " + text.strip())
    return float(text.split()[-1])


def jobs(card: Card, plan: Plan) -> Iterator[Row]:
    """Rounds of whole jobs: servers and processes on GPUs beside those that add on the host."""
    for k, goal, share in ((1, 1.0, FIRST_JOBS), (4, 1.5, 1.0)):
        own = replace(plan, deadline=time.monotonic() + share * (plan.deadline - time.monotonic()))
        found = rounds_of_jobs(own, {"dist_device_sync": plan.server_device, "dist_sync": ""}, k)
        work = "`dist_device_sync`: a round of %s, k = %d, 2 workers and 2 servers" % (plan.model, k)
        yield row(work, "`dist_sync`", found["dist_device_sync"], found["dist_sync"], goal=goal)


def rounds_of_jobs(plan: Plan, stores: Mapping[str, str], k: int) -> dict[str, list[Times]]:
    """Let jobs take turns; return each one's times of a round, of the runs that all have ended.

    No run is begun that cannot end in time, if it takes as long as the longest before it.

    Arguments:
        stores: the device of the servers, by the store.

    Raises:
        OutOfTime: there was no time for a first run.
    """
    found: dict[str, list[Times]] = {store: [] for store in stores}
    longest = 0.0
    for _ in range(plan.job_runs):
        begin = time.monotonic()
        if begin + longest > plan.deadline:
            break
        try:
            run = {store: Times(job(plan, store, k, device)) for store, device in stores.items()}
        except ChildProcessError:
            if time.monotonic() < plan.deadline:
                raise
            break  # it was ended
        for store, each in run.items():
            found[store].append(each)
        longest = max(longest, time.monotonic() - begin)
    if not all(found.values()):
        raise OutOfTime
    return found


def round_beside_bus(card: Card, plan: Plan) -> Iterator[Row]:
    """A round of a job on one GPU, beside what its bytes take over the bus."""
    out, into = bus_rates(card, plan)
    workers, nbytes = 2, 4 * sum(math.prod(shape) for shape in plan.shapes())
    least = seconds_over_bus(workers, nbytes, out, into)
    times = rounds_of_jobs(plan, {"dist_device_sync": plan.server_device}, 1)["dist_device_sync"]
    work = "`dist_device_sync`: a round of %s, 2 workers and 2 servers on one GPU" % plan.model
    against = "its bytes over the bus (%.1f GB/s out, %.1f in)" % (out / 1e9, into / 1e9)
    moved = (3 * workers + 1) * nbytes
    yield row(work, against, times, [Times(least)] * len(times), goal=0.5, moved_bytes=moved)

    for wanted, words in ((0.008, ""), (0.015, ", by way of the host")):
        if words:
            own = replace(plan, env=("DISTRUN_DATA_PATHS=host",))
            times = rounds_of_jobs(own, {"dist_device_sync": plan.server_device}, 1)["dist_device_sync"]
        yield row(work + words, "%g ms" % (wanted * 1e3), times, [Times(wanted)] * len(times), goal=1.0)


def seconds_over_bus(workers: int, nbytes: int, out: float, into: float) -> float:
    """Return what a round takes at least whose workers and servers are on one GPU.

    Every gradient leaves it and comes to a server on it; then the sums leave it once and come to each worker. Both
    directions work at a time.
    """
    push = max(workers * nbytes / out, workers * nbytes / into)
    pull = max(nbytes / out, workers * nbytes / into)
    return push + pull


def job(plan: Plan, store: str, k: int, server_device: str) -> float:
    """Run a job of two workers and two servers; return the median seconds of a round.

    Raises:
        ChildProcessError: it failed, or gave wrong results.
    """
    left = 600 if math.isinf(plan.deadline) else max(1, math.ceil(plan.deadline - time.monotonic()))
    command = [sys.executable, "-m", "distrun", "launch", "-q", "--no-prefix", "--launcher", "local", "-n", "2"]
    command += ["-s", "2", "--timeout", str(left), *(["--server-device", server_device] if server_device else [])]
    command += [word for each in plan.env for word in ("--env", each)]
    command += [sys.executable, str(ROOT / "benchmarks" / "peers" / "gpu_round.py")]
    expected = {"cpu": "cpu:0", "": "any"}.get(server_device, server_device)
    command += [plan.model, str(plan.job_rounds), store, str(k), plan.arrays, expected]
    reports = reports_of(command, "%s, k = %d" % (store, k), 2, on_hosts=False)
    if reports is None:
        raise ChildProcessError("%s, k = %d: the job failed; its output says why" % (store, k))
    return slowest([each["times_s"] for each in reports])


CORES = (
    *((None, 2, 2, "list", 25), (None, 2, 8, "list", 25), (None, 2, 2, "empty", 20)),
    *(("vgg16", 2, 2, "list", 90), ("vgg16", 2, 2, "empty", 90), (None, 4, 4, "list", 35)),
)
"""Model (None: the plan's), workers, servers, form of `round.Work`, and the goal in milliseconds, on 16 cores."""
GLOO_GOAL = 3.0
"""Of the first of them, beside gloo."""


def cores(card: Card, plan: Plan) -> Iterator[Row]:
    """Rounds of jobs in host memory, which have a goal and are compared with gloo: what many cores give."""
    has_torch = importlib.util.find_spec("torch") is not None
    for number, (model, workers, servers, form, goal_ms) in enumerate(CORES):
        options = argparse.Namespace(hosts="", rounds=plan.job_rounds, workers=workers)
        name = plan.model if model is None or plan.is_small else model
        mine = System(OURS, sys.executable, "distrun_round.py", ("-s", str(servers)))
        gloo = System("gloo", sys.executable, "gloo_round.py", ("-s", "0"), ("plain",))
        found: dict[str, list[Times]] = {}
        for _ in range(plan.job_runs):
            for each in (mine, gloo) if has_torch and form == "list" else (mine,):
                in_time(plan)
                seconds = measure(each, Work(name, form), options, min(600, plan.deadline - time.monotonic()))
                if seconds is None:
                    in_time(plan)
                    raise ChildProcessError("%s, %s: the job failed; its output says why" % (each.name, name))
                found.setdefault(each.name, []).append(Times(seconds))
        how = ", `kv.empty`" if form == "empty" else ""
        work = "%s%s: a round of %d workers and %d servers on the CPU" % (name, how, workers, servers)
        ours = found[OURS]
        yield row(work, "%d ms" % goal_ms, ours, [Times(goal_ms / 1e3)] * len(ours), goal=1.0)
        if "gloo" in found:
            yield row(work, "gloo", ours, found["gloo"], goal=GLOO_GOAL if number == 0 else None)
    if not has_torch:
        raise Missing(NO_TORCH)


def training(card: Card, plan: Plan) -> Iterator[Row]:
    """Training steps of two workers on one GPU: the trainer beside DistributedDataParallel; and alone, to be shown.

    A run fails if the weights are others than without a GPU.
    """
    if card.torch is None:
        raise Missing(NO_TORCH)
    found: dict[str, list[Times]] = {"trainer": [], "ddp": [], "none": []}
    for _ in range(plan.job_runs):
        if found["none"] and time.monotonic() > plan.deadline:
            break
        for form, times in found.items():
            times.append(Times(steps_of_job(plan, form)))
    work = "ResNet-18, batches of 16 images, 2 workers on one GPU: a step"
    yield row(
        work + " with the trainer", "DistributedDataParallel over gloo", found["trainer"], found["ddp"], goal=1 / 0.6
    )
    yield row(work + " with the trainer", "the same without communication", found["trainer"], found["none"])


def steps_of_job(plan: Plan, form: str) -> float:
    """Run a job of two ranks of `peers/gpu_training.py`; return the median seconds of a step.

    Raises:
        ChildProcessError: it failed, or the weights are wrong.
    """
    left = 600 if math.isinf(plan.deadline) else max(1, math.ceil(plan.deadline - time.monotonic()))
    servers = ["-s", "2", "--server-device", plan.server_device] if form == "trainer" else ["-s", "0"]
    command = [
        sys.executable,
        "-m",
        "distrun",
        "launch",
        "-q",
        "--no-prefix",
        "--launcher",
        "local",
        "-n",
        "2",
        *servers,
    ]
    command += ["--timeout", str(left), sys.executable, str(ROOT / "benchmarks" / "peers" / "gpu_training.py")]
    command += [str(plan.steps), form, plan.device, str(plan.width)]
    reports = reports_of(command, "training, %s" % form, 2, on_hosts=False)
    if reports is None:
        raise ChildProcessError("training, %s: the job failed; its output says why" % form)
    return slowest([each["times_s"] for each in reports])


SECTIONS: dict[str, Callable[[Card, Plan], Iterator[Row]]] = {
    "sums": sums,
    "model": model,
    "peers": peers,
    "codecs": codecs,
    "rules": rules,
    "copies": copies,
    "stores": stores,
    "calls": calls,
    "jobs": jobs,
    "round": round_beside_bus,
    "cores": cores,
    "training": training,
}
WITH_TORCH = ("peers", "rules", "calls", "training")
SHARES = {"sums": 1.5, "peers": 1.5, "rules": 1.5, "jobs": 4.0, "round": 3.0, "training": 3.0}
"""Of the time that is left; the others have 1."""


def size_of(nbytes: int) -> str:
    """Return bytes in words."""
    if nbytes % 10**6 == 0:
        return "%g GB" % (nbytes / 1e9)
    return "%d MiB" % (nbytes >> 20) if nbytes >= 1 << 20 else "%d bytes" % nbytes


# Running


def open_card(section: str = "") -> Card:
    """Return this machine's GPU, with torch if the section compares with it.

    Raises:
        KVError: cupy, a driver or a GPU is missing; says what to do.
    """
    device = devices.gpu(0)
    has_torch = section in WITH_TORCH and importlib.util.find_spec("torch") is not None
    return Card(device, importlib.import_module("cupy"), importlib.import_module("torch") if has_torch else None)


def measured(card: Card, name: str, plan: Plan, written: Callable[[Part], None]) -> Part:
    """Run a section; return what it has found, whatever ended it.

    Arguments:
        written: called with what there is after each row.
    """
    part, begin = Part(name), time.monotonic()
    try:
        for each in SECTIONS[name](card, plan):
            part.rows.append(each)
            part.seconds = time.monotonic() - begin
            say(described(each))
            written(part)
        part.state = DONE
    except OutOfTime:
        part.state = CUT
    except Exception as err:  # the other sections go on
        part.state, part.text = FAILED, "%s: %s" % (type(err).__name__, err)
        say("%s: %s" % (name, part.text))
    part.seconds = time.monotonic() - begin
    written(part)
    return part


def described(found: Row) -> str:
    """Return a row in one line."""
    taken = found.wall_s if found.event_s is None else found.event_s
    state = {True: "PASS", False: "goal missed", None: "no goal"}[found.is_reached]
    goal = "" if found.goal is None else ", goal %g" % found.goal
    numbers = (found.work, gpu_results.milliseconds(taken), found.ratio, found.against, goal, state)
    return "%s: %s ms, %.2f of %s%s: %s" % numbers


def facts(card: Card, commit: str) -> dict[str, Any]:
    """Return on what is measured."""
    from distrun import __version__

    runtime = card.cupy.cuda.runtime
    found = card.device._cuda.properties(card.device.physical)
    free, total = card.device._cuda.memory(card.device.physical)
    cuda = int(runtime.driverGetVersion())
    return {
        "gpu": found.name,
        "date": gpu_results.today(),
        "commit": commit,
        "distrun": __version__,
        "driver": driver(),
        "cuda": "%d.%d" % (cuda // 1000, cuda % 1000 // 10),
        "cupy": str(card.cupy.__version__),
        "torch": version_of("torch"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "architecture": found.architecture,
        "processors": found.processors,
        "l2": card.l2,
        "memory": total,
        "free": free,
        "machine": report.machine(),
        "before": condition(),
    }


def version_of(package: str) -> str:
    """Return the version of a package that is installed; empty: it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    """Return the version of the driver, as nvidia-smi says it; empty: it does not."""
    return (asked(["driver_version"]) or [""])[0]


def condition() -> dict[str, str]:
    """Return the GPU's clocks, power, bus and memory's checks as nvidia-smi says them; nothing: it does not."""
    return dict(zip(CONDITION, asked(CONDITION), strict=False))


def asked(fields: Sequence[str]) -> list[str]:
    """Return what nvidia-smi says of the first GPU, field by field; nothing: it does not."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=" + ",".join(fields), "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = done.stdout.splitlines()
    return [each.strip() for each in found[0].split(",")] if found and done.returncode == 0 else []


def run_all(names: Sequence[str], path: Path, results: Results, seconds: float, *, is_small: bool) -> bool:
    """Run each section in a process of its own, and write the results after each; tell whether all were done."""
    deadline, are_done = time.monotonic() + seconds, True
    for at, name in enumerate(names):
        share = SHARES.get(name, 1.0) / sum(SHARES.get(each, 1.0) for each in names[at:])
        limit_s = (deadline - time.monotonic()) * share
        part = run_section(name, limit_s, is_small=is_small)
        results.parts[name] = part
        results.write(path)
        are_done = are_done and part.state == DONE
        say("section %s: %s; goal %s" % (name, part.state, gpu_results.goal_state(part)))
    results.facts["after"] = condition()
    results.write(path)
    return are_done


def run_section(name: str, limit_s: float, *, is_small: bool = False) -> Part:
    """Run a section in a process of its own; return what it has found, also if it had to be ended."""
    part = Part(name)
    if limit_s < gpu_results.GRACE_S:
        return part
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "part.json")
        command = [sys.executable, __file__, "--section", name, "--part", str(kept)]
        command += ["--seconds", str(limit_s - gpu_results.GRACE_S), *(["--small"] if is_small else [])]
        code, output = gpu_results.run_limited(command, limit_s)
        if kept.exists():
            part = Part.of(json.loads(kept.read_text(encoding="utf-8")))
    print(output, file=sys.stderr, end="", flush=True)
    if code is None:
        part.state = CUT
    elif code != 0:
        part.state, part.text = FAILED, part.text or output
    return part


def run_alone(options: argparse.Namespace) -> None:
    """Run one section in this process, for `run_section`."""
    plan = SMALL if options.small else Plan()
    plan = replace(plan, deadline=time.monotonic() + options.seconds)

    def written(part: Part) -> None:
        fresh = options.part.with_suffix(".new")
        fresh.write_text(json.dumps(part.as_json()), encoding="utf-8")
        fresh.replace(options.part)

    measured(open_card(options.section), options.section, plan, written)


HEADING = "GPUs"
ABOUT = """\
Measured by `benchmarks/gpu.py`, which `scripts/gpu-check` runs ([how](gpu.md#check-a-machine)), on machines with one
GPU; continuous integration has none. Every ratio is theirs divided by ours: against a limit, which part of it is
reached; against a peer, how many times as fast we are. It is the median of the runs' ratios with their range, and ours
and theirs take turns in each run. *GPU* is the time between two events on the GPU, behind other work, so that it does
not wait for the program (with \\*, it may have waited in some run); *wall* is one call and the wait for its end. Where
there is a time by events, GB/s and ratio are of it. *A copy of the same bytes*: one copy within the GPU's memory that
reads and writes as many bytes in all. Inputs rotate over more than four times what the L2 cache holds. Sums are
compared with float64, of large arrays the first, middle and last elements.

Kernels of lists, decoders of codecs and calls of stores were changed after 2026-11-26, and are not measured since: no
GPU was at hand. So were rounds of jobs whose processes use one GPU: since 2026-11-28 they
[share its memory](gpu.md#several-processes-on-one-gpu), and the rows below are of before. What a call of a store costs
beside the work of the GPU, in calls of the driver and in Python's time, is counted on any machine by
`benchmarks/gpu_calls.py`.

Rounds of jobs are of 2 workers and 2 servers in four processes, from cupy's arrays to cupy's arrays. Processes that
share a GPU work on it by turns, each for a slice of time, not at once: several GPUs would do better, and the ratios of
these rows say nothing of them. *Its bytes over the bus*: every gradient leaves the GPU and comes to a server on it,
every sum leaves it and comes to each worker; both directions work at a time, as fast as the largest plain copies."""


def write_tables(paths: Sequence[Path]) -> None:
    """Write the page's section from these results, or from the newest of each GPU."""
    report.write(HEADING, gpu_results.page([Results.read(path) for path in paths or gpu_results.newest()], ABOUT))


def say(text: str) -> None:
    """Tell how far the measurement is."""
    print("gpu.py: " + text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure and write the results, or write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=list(GOALS), default=list(GOALS), help="default: all")
    parser.add_argument("--minutes", type=float, default=7.0, help="for all sections together (default 7)")
    parser.add_argument("--small", action="store_true", help="small arrays: a try (try-NAME-DATE.json), not for tables")
    parser.add_argument("--results", type=Path, help="the file; other parts of the same commit stay in it")
    parser.add_argument("--commit", default="", help="the commit of these files, where there is no .git")
    parser.add_argument("--facts", action="store_true", help="only print what GPU and software there is, as JSON")
    parser.add_argument("--tables", nargs="*", type=Path, metavar="FILE", help="only write docs/benchmarks.md")
    parser.add_argument("--same-run", action="store_true", help=argparse.SUPPRESS)  # other parts are of this run
    parser.add_argument("--section", choices=list(GOALS), help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tables is not None:
        write_tables(options.tables)
        return
    if options.section:
        run_alone(options)
        return
    try:
        found = facts(open_card(), options.commit or gpu_results.commit_here())
        found.update({"small": True} if options.small else {})
    except KVError as err:
        say(str(err))
        sys.exit(NO_GPU)
    if options.facts:
        print(json.dumps(found))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the section's processes are ended
    path = options.results or gpu_results.path_of(found)
    results = Results.begun(path, found, options.sections, is_same_run=options.same_run)
    are_done = run_all(options.sections, path, results, options.minutes * 60, is_small=options.small)
    say("results: %s" % path)
    sys.exit(0 if are_done else 1)


if __name__ == "__main__":
    main()
