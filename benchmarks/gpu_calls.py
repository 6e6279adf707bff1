"""Count what a call of a store on a GPU costs beside the GPU's own work: calls of the driver, and Python's time.

    python benchmarks/gpu_calls.py            # on any machine, in a minute; no GPU is needed
    python benchmarks/gpu_calls.py --check    # exit code 1 if a goal is missed
    python benchmarks/gpu_calls.py --counts   # the same without times

The driver below `arrays.cuda` makes nothing: its calls cost next to nothing, and are counted. Tensors are those of a
stand-in for torch that only has what a store asks for. A time is the least of several runs, divided by the least of a
plain loop that takes turns with it, over all tensors of the call, which reads `data_ptr`, `shape` and `dtype`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import shapes

from distrun_runtime import kvstore
from distrun_runtime.arrays import cupy_driver
from distrun_runtime.arrays import device as devices
from distrun_runtime.arrays.cuda import Cuda, Properties
from distrun_runtime.arrays.gpu_devices import Gpus
from distrun_runtime.arrays.shared_memory import BLOCKS, Pool
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import ENTRY, Kind, Message, Payload
from distrun_runtime.ps import role
from distrun_runtime.ps.device_choice import Placement
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.routing import DEVICE_MESSAGE_BYTES
from distrun_runtime.ps.shards import Store

MODEL = shapes.resnet50()
RUNS, CALLS, WARM_UP = 30, 20, 4
BEFORE_PLANS = 246.0
"""Plain loops that a push of addresses that never repeat, and its pull, took at f76f90d7, before calls were planned."""
RULE = ("sgd", {"learning_rate": 0.1, "momentum": 0.9})


class CountingDriver:
    """CUDA's calls, none of which does anything but count itself. Memory is addresses."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.allocated = 0
        self._next = 1 << 40

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return what counts a call; it is over, and there is nothing to return."""
        calls = self.calls

        def counted(*_: object) -> Any:
            calls[name] += 1
            return 0

        setattr(self, name, counted)
        return counted

    def count(self) -> int:
        """Return the number of GPUs."""
        return 2

    def properties(self, device: int) -> Properties:
        """Return what the GPU is."""
        return Properties("Counting", f"{device:032x}", 1 << 36, "sm_00", 100, "0000:00:00")

    def memory(self, device: int) -> tuple[int, int]:
        """Return free bytes, and all."""
        return 1 << 36, 1 << 36

    def alloc(self, device: int, nbytes: int) -> int:
        """Return an address that was never used."""
        self.calls["alloc"] += 1
        self.allocated += nbytes
        self._next += nbytes + 512 & ~511
        return self._next - (nbytes + 512 & ~511)

    def load(self, program: Any, device: int) -> dict[str, object]:
        """Return functions that cannot be called."""
        return dict.fromkeys(each.name for each in program.kernels)

    def query(self, event: Any) -> bool:
        """Return that all is over."""
        self.calls["query"] += 1
        return True


# What a store asks of torch


class Tensor(int):
    """torch.Tensor, float32 on `cuda:1`; the number is its address.

    What a store reads of each tensor is done in C, as in torch, and costs about as much: the plain loop takes 0.1 us a
    tensor here, and with torch 2.13 as well.
    """

    def __new__(cls, shape: tuple[int, ...], address: int) -> Tensor:
        """Return a tensor at an address."""
        made = super().__new__(cls, address)
        made._shape, made.dtype, made.layout, made.device = shape, "torch.float32", "torch.strided", PLACE
        made.is_quantized = False
        return made

    _shape: tuple[int, ...]
    dtype: str
    layout: str
    device: object
    is_quantized: bool
    shape = property(operator.attrgetter("_shape"))
    data_ptr = int.conjugate
    is_contiguous = get_device = int.__bool__  # True, and 1

    def is_neg(self) -> bool:
        """Return that the memory has the numbers."""
        return False

    is_conj = is_neg

    def detach(self) -> Tensor:
        """Return the tensor itself."""
        return self

    def stride(self) -> tuple[int, ...]:
        """Return its strides in elements."""
        return tuple(itertools.accumulate(self._shape[:0:-1], operator.mul, initial=1))[::-1][-len(self._shape) :]


Tensor.__module__ = "torch"
PLACE = SimpleNamespace(type="cuda", index=1)


def fake_torch() -> ModuleType:
    """Return the module."""
    torch: Any = ModuleType("torch")
    torch.Tensor, torch.strided, torch.bfloat16 = Tensor, "torch.strided", "torch.bfloat16"
    torch.version = SimpleNamespace(hip=None)
    stream = SimpleNamespace(cuda_stream=7)
    torch.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 1,
        current_stream=lambda _: stream,
        device=lambda _: nullcontext(),
        is_current_stream_capturing=lambda: False,
    )
    return torch  # type: ignore[no-any-return]


@contextmanager
def machine() -> Iterator[CountingDriver]:
    """Let this process have GPUs of the counting driver, and torch's tensors on one of them."""
    driver = CountingDriver()
    cuda = Cuda(driver)  # type: ignore[arg-type]
    before = sys.modules.get("torch"), list(cupy_driver._opened), list(devices._gpus)
    sys.modules["torch"] = fake_torch()
    cupy_driver._opened[:], devices._gpus[:] = [cuda], [Gpus(cuda, wait_s=60, blocks=BLOCKS)]
    try:
        yield driver
    finally:
        cupy_driver._opened[:], devices._gpus[:] = before[1:]
        BLOCKS.watch(None)
        del sys.modules["torch"]
        if before[0] is not None:
            sys.modules["torch"] = before[0]


# What is found


@dataclass(frozen=True)
class Found:
    """One row: a number, and the most that it may be."""

    work: str
    what: str
    number: float
    goal: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether there is a goal, and it is missed."""
        return self.goal is not None and self.number > self.goal

    def __str__(self) -> str:
        state = "" if self.goal is None else f", goal {self.goal:g}: {'missed' if self.is_missed else 'reached'}"
        return f"{self.work}: {self.number:.4g} {self.what}{state}"


class Step:
    """A push of k tensors of each key of a model, and a pull, by a `device` store.

    Arguments:
        k: tensors of each key.
        has_rule: it updates the weights by a rule.
    """

    def __init__(self, driver: CountingDriver, k: int, *, has_rule: bool) -> None:
        self._driver = driver
        self._next = itertools.count(1 << 44, 1 << 24)
        self.store = kvstore.create("device")
        self.keys = [f"layer{number}" for number in range(len(MODEL))]
        self.store.init(self.keys, [np.zeros(shape, np.float32) for shape in MODEL])
        if has_rule:
            self.store.set_optimizer(RULE[0], **RULE[1])
        self.k = k
        self.given, self.outs = self.fresh()

    def fresh(self) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Return gradients and outputs at addresses that were never used."""
        given = [[Tensor(shape, next(self._next)) for _ in range(self.k)] for shape in MODEL]
        return given, [Tensor(shape, next(self._next)) for shape in MODEL]

    def make(self) -> None:
        """Push and pull."""
        self.store.push(self.keys, self.given)
        self.store.pull(self.keys, out=self.outs)

    def make_anew(self) -> None:
        """Push and pull tensors at other addresses."""
        self.given, self.outs = self.fresh()
        self.make()

    def plain_loop(self) -> None:
        """Read what says where each tensor is, and nothing else."""
        for some in (*self.given, self.outs):
            for tensor in some:
                tensor.data_ptr()
                tensor.shape  # noqa: B018
                tensor.dtype  # noqa: B018

    def calls(self) -> float:
        """Return the driver's calls of one step."""
        for _ in range(WARM_UP):
            self.make()
        return calls_of(self._driver, self.make)


def calls_of(driver: CountingDriver, work: Callable[[], object]) -> float:
    """Return the driver's calls of some work, the mean of many times."""
    before = sum(driver.calls.values())
    for _ in range(CALLS):
        work()
    return (sum(driver.calls.values()) - before) / CALLS


def seconds(work: Callable[[], object], calls: int = CALLS) -> float:
    """Return the processor's seconds that some work takes."""
    begin = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - begin) / calls


def loops(step: Step, work: Callable[[], object]) -> float:
    """Return how many plain loops over the tensors of a step some work takes: the least time by the least time."""
    for _ in range(WARM_UP):
        work()
    runs = [(seconds(work), seconds(step.plain_loop)) for _ in range(RUNS)]
    return min(its for its, _ in runs) / min(loop for _, loop in runs)


def stores(*, has_times: bool) -> Iterator[Found]:
    """Measure `device` stores."""
    for k, has_rule in ((2, True), (1, False), (4, False)):
        with machine() as driver:
            step = Step(driver, k, has_rule=has_rule)
            work = f"`device`: push and pull of the {len(MODEL)} tensors of ResNet-50, k = {k}" + ", sgd" * has_rule
            yield Found(work, "calls of the driver", step.calls(), 12)
            if not has_times:
                continue
            yield Found(work, "plain loops over its tensors", loops(step, step.make), 4 if has_rule else None)
            yield Found(work, "ms", 1e3 * min(seconds(step.make) for _ in range(RUNS)))


def fresh_addresses(*, has_times: bool) -> Iterator[Found]:
    """Measure a store that is given other tensors in every step."""
    with machine() as driver:
        step = Step(driver, 2, has_rule=True)
        work = "`device`: the same, k = 2, sgd, at addresses that never repeat"
        if has_times:
            made = loops(step, step.make_anew) - loops(step, step.fresh)
            what = f"of the time before calls were planned ({made:.3g} plain loops)"
            yield Found(work, what, made / BEFORE_PLANS, 1.2)
        for _ in range(3 * CALLS):  # until whatever is kept at most is there
            step.make_anew()
        gc.collect()
        bytes_before, objects_before = driver.allocated, len(gc.get_objects())
        for _ in range(3 * CALLS):
            step.make_anew()
        gc.collect()
        yield Found(work, "bytes of the GPU more after as many steps again", driver.allocated - bytes_before, 0)
        grown = len(gc.get_objects()) - objects_before
        yield Found(work, "Python objects more after as many steps again", grown, len(MODEL))


class Round:
    """A server's round: what a message of each of two workers brings to one bucket, and the answers to both."""

    def __init__(self, *, has_rule: bool) -> None:
        host = devices.get("cpu:0", memory=Pool())  # as a server has it: answers are in memory that is page-locked
        placement = Placement(host, "gpu:0")
        placement.open()
        self._engine = WorkEngine(host, placement=placement, much_bytes=1 << 40)
        self._store = Store(1, workers=2)
        sizes = [math.prod(shape) for shape in MODEL]
        ends = list(itertools.accumulate(4 * size for size in sizes))
        self.count = sum(end <= DEVICE_MESSAGE_BYTES for end in ends)
        sizes = sizes[: self.count]
        self.shards = self._store.add([Shard(0, 0, size, key, 0) for key, size in enumerate(sizes)])
        self._entries = np.zeros(self.count, ENTRY)
        self._entries["key"], self._entries["length"] = range(self.count), sizes
        self._entries["payload"] = Payload.PACKED
        self._frames = [np.zeros(sum(sizes), np.float32) for _ in range(2)]
        for each in self._frames:  # as blocks of shared memory are
            devices.gpu(0).locked.lock(each)
        self._number = 0
        self._do(role.Fill(self._batch(0)))
        if has_rule:
            self._do(role.SetRule(1, rules.RuleSpec.of(*RULE).to_json(), Message(Kind.RULE)))

    def make(self) -> None:
        """Let both workers push, and pull."""
        self._number += 1
        number = self._number
        self._do(role.Add(0, number, self._batch(0)))
        self._do(role.Apply(self._store, number, self.shards, rank=1, last=self._batch(1)))
        at = np.arange(self.count)
        for worker in range(2):
            self._do(role.Lend(2 * number + worker, self._store, self.shards, at))
        replies = [
            self._do(role.Deliver(2 * number + worker, f"w{worker}", Message(Kind.PULL), self._entries))
            for worker in range(2)
        ]
        for each in replies:
            self._engine.sent(each.lent, None)

    def _batch(self, worker: int) -> role.Batch:
        message = Message(Kind.PUSH, entries=self._entries, payloads=[self._frames[worker].data])
        return role.Batch(self._store, self.shards, message, message.entries)

    def _do(self, what: role.EngineWork) -> Any:
        done = self._engine.do(what) or self._engine.result(waits=True)
        assert done is not None
        if done.error is not None:
            raise done.error
        return done.value


def servers(*, has_times: bool) -> Iterator[Found]:
    """Measure a server on a GPU."""
    for has_rule in (True, False):
        with machine() as driver:
            one = Round(has_rule=has_rule)
            for _ in range(WARM_UP):
                one.make()
            work = f"a server's round of two workers, one message of {one.count} tensors each" + ", sgd" * has_rule
            yield Found(work, "calls of the driver", calls_of(driver, one.make), 24)
            if has_times:
                yield Found(work, "ms", 1e3 * min(seconds(one.make) for _ in range(RUNS)), 2)


def measured(*, has_times: bool) -> Iterator[Found]:
    """Yield all rows."""
    yield from stores(has_times=has_times)
    yield from fresh_addresses(has_times=has_times)
    yield from servers(has_times=has_times)


def main() -> None:
    """Print each number with its goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit code 1 if a goal is missed")
    parser.add_argument("--counts", action="store_true", help="the same for what is no time")
    options = parser.parse_args()
    found = []
    for each in measured(has_times=not options.counts):
        found.append(each)
        print(each, flush=True)
    missed: Sequence[Found] = [each for each in found if each.is_missed]
    print(f"{len(missed)} of {sum(each.goal is not None for each in found)} goals missed")
    sys.exit(1 if (options.check or options.counts) and missed else 0)


if __name__ == "__main__":
    main()
