"""A process group of torch whose collectives are made by a store: `init_process_group("distrun")`.

torch calls the methods of `StoreGroup`. Each tells a thread of the group how the call is made, and returns a
`TorchWork`, on which torch waits. So a group makes its calls one after the other, in the order in which the program
made them, as all its ranks do; and as the thread waits for each of them, those that come again are made by the store's
plans.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch.futures import Future

from distrun_runtime import kvstore
from distrun_runtime.errors import KVError, RuntimeFault, StoreClosed, TimedOut, explain
from distrun_runtime.protocol.message import GROUP_LETTERS
from distrun_runtime.torch import job

Tensors = Sequence[torch.Tensor]

OPERATIONS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max"}
"""What torch calls an operation, to what a store calls it."""
BESIDE = "fix: make a group for it beside this one, new_group(backend='gloo'), and give it to the call"


def make(group: Any, options: object) -> StoreGroup:
    """Return the process group that torch asks for, with a store of its own. All its ranks call it.

    Arguments:
        group: torch's description of it: ranks, name, timeout.

    Raises:
        KVError: the job has no servers, or other ranks than the group says; or there are options.
    """
    if options is not None:
        raise KVError(f"the backend 'distrun' has no options, not {type(options).__name__}; fix: leave pg_options out")
    rank, size, members = group.group_rank, group.group_size, list(group.global_ranks_in_group)
    shared = job.store()
    if not members and (shared.rank, shared.num_workers) != (rank, size):
        raise KVError(
            f"init_process_group: rank {rank} of {size} is worker {shared.rank} of {shared.num_workers} in this job;"
            " fix: leave rank and world_size out, distrun launch has set them"
        )
    # Of its own: its calls are in no order with those of others, and it ends before the job's.
    if size == 1:
        kv = kvstore.create("local")
    elif members:
        # Later groups of other members may have the same number.
        ours = f"torch {crc32(repr(members).encode()):08x} {group.group_id}"[:GROUP_LETTERS].strip()
        kv = kvstore.create("dist_sync", group=ours, members=members)
    else:
        kv = shared.companion()
    name = f"process group {group.group_id!r}" if members else "the default process group"
    return StoreGroup(kv, group.store, rank, size, name=name, timeout=group.timeout)


class TorchWork(dist._Work):  # type: ignore[misc]
    """A call that torch waits for, and its future, whose value is `result`.

    Arguments:
        call: its name and size.
        where: the group.
        number: how many calls its group has made, with this one.
        body: makes the call.
    """

    def __init__(self, call: str, where: str, number: int, body: Callable[[], None], result: Any) -> None:
        super().__init__()
        self.call = call
        self.what = f"{call} in {where}"
        self.number = number
        self._body = body
        self._result = result
        self._end: Future[None] = Future()
        # A future that torch's C++ can wait for fails by a callback that raises, and in no other way.
        self._future: Future[Any] = self._end.then(self._outcome)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.begun = time.monotonic()

    def make(self) -> BaseException | None:
        """Make the call; return what it raised."""
        try:
            with torch.no_grad():
                self._body()
        except BaseException as err:
            if isinstance(err, RuntimeFault):
                explain(err, self.what)
            return err
        finally:
            del self._body  # It holds the arguments of the call.
        return None

    def end(self, error: BaseException | None) -> None:
        """Let those who wait go on: the call is done, or failed. Only the first end counts."""
        with self._lock:
            if self._over.is_set():
                return
            self._error = error
            self._over.set()
        self._end.set_result(None)

    def _outcome(self, _: object) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)  # What torch says of it has our lines in it.
        return self._result

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Return True when the call is done.

        Arguments:
            timeout: none waits as long as the group does.

        Raises:
            TimedOut: it took longer.
            RuntimeFault: what went wrong.
        """
        limit_s = timeout.total_seconds()
        if not self._over.wait(limit_s if limit_s > 0 else None):
            raise TimedOut(f"{self.what}: not done after {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def join(self) -> None:
        """Return when it is over, well or not."""
        self._over.wait()

    def is_completed(self) -> bool:
        """Tell whether it is over, well or not."""
        return self._over.is_set()

    def is_success(self) -> bool:
        """Tell whether it is done."""
        return self._over.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self._error

    def result(self) -> Any:
        """Return the outputs."""
        return self._result

    def get_future(self) -> Future[Any]:
        """Return what holds the outputs when the call is done."""
        return self._future


class StoreGroup(dist.ProcessGroup):  # type: ignore[misc]
    """torch's process group over a store. Its methods are documented by torch; tensors are in the host's memory.

    Arguments:
        kv: the group's own store, without a rule, which it closes.
        facts: torch's store of the group, in which ranks tell in which call they wait for long.
        name: of the group, for people.
        timeout: how long a call may take from when it was made.
    """

    def __init__(
        self, kv: kvstore.KVStore, facts: dist.Store, rank: int, size: int, *, name: str, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._kv = kv
        self._facts = facts
        self._where = f"{name} (rank {rank} of {size})"
        self._names: dict[str, str] = {}
        """torch's own."""
        self._timeout_s = timeout.total_seconds()
        self._works: queue.SimpleQueue[TorchWork | None] = queue.SimpleQueue()
        self._count = 0
        self._current: TorchWork | None = None
        self._error: BaseException | None = None
        """Why no call can be made any more."""
        self._lock = threading.Lock()
        """Held while calls are put into the queue, and while they cease to be."""
        self._is_closed = threading.Event()
        self._turn = threading.Lock()
        """Held while calls are taken from the queue, one by one, and made."""
        self._followers = 0
        """Threads that wait for it."""
        self._start(self._make_calls)
        self._start(self._watch)

    # Calls

    def _call(
        self, name: str, tensors: Iterable[torch.Tensor], result: list[Any], body: Callable[[], None]
    ) -> TorchWork:
        """Have the thread call `body`; return the work."""
        tensors = list(tensors)
        size = sum(each.numel() * each.element_size() for each in tensors)
        call = f"{name} of {size / 1e6:.3g} MB" if size >= 1000 else f"{name} of {size} bytes" if tensors else name
        what = f"{call} in {self._where}"
        for each in tensors:
            if each.device.type != "cpu":
                raise KVError(
                    f"{what}: a tensor is on {each.device}, not in the host's memory; fix: the backend 'nccl'"
                )
            if each.layout != torch.strided:
                raise KVError(f"{what}: a tensor is {each.layout}, and only dense ones travel; fix: sparse=False")
        with self._lock:
            if self._error is not None:
                raise self._error
            self._count += 1
            work = TorchWork(call, self._where, self._count, body, result)
            self._works.put(work)
        return work

    def _start(self, body: Callable[[], None]) -> None:
        threading.Thread(target=body, name=f"distrun-torch{body.__name__}", daemon=True).start()

    def _make_calls(self) -> None:
        """Make calls, as one of several threads that take turns.

        What a program has chained to a future runs in the thread that completes it, and may wait for later calls of
        the group (PowerSGD's hook does): these another thread must make meanwhile. It ends when enough others are free.
        """
        while True:
            with self._lock:
                if self._followers > 1:
                    return
                self._followers += 1
            with self._turn:
                with self._lock:
                    self._followers -= 1
                work = self._works.get()
                if work is None:
                    self._works.put(None)  # for the others
                    return
                self._current = work
                error = self._error or work.make()
                self._current = None
                if not self._followers:
                    self._start(self._make_calls)
            work.end(error)

    def _watch(self) -> None:
        """End what takes longer than the group's timeout, and all that comes after it."""
        told: TorchWork | None = None
        while not self._is_closed.wait(min(1.0, self._timeout_s / 10)):
            work = self._current
            waited_s = 0.0 if work is None else time.monotonic() - work.begun
            if work is not None and work is not told and waited_s > self._timeout_s / 2:
                if told is None and hasattr(self._facts, "clone"):  # torch 2.6
                    # A connection of its own: on that of the group the program may be waiting.
                    with suppress(RuntimeError):
                        self._facts = self._facts.clone()
                told = work
                with suppress(RuntimeError):  # torch's store is lost with rank 0
                    self._facts.set(f"{work.number} {self.rank()}", work.call)
            if work is not None and waited_s > self._timeout_s:
                self._fail(work)
                return

    def _fail(self, work: TorchWork) -> None:
        """End a call that has taken too long, and those behind it: this group can make no more calls."""
        absent: list[str] = []
        others: list[str] = []
        with suppress(RuntimeError):
            for rank in range(self.size()):
                key = f"{work.number} {rank}"
                call = self._facts.get(key).decode() if self._facts.check([key]) else ""
                if not call:
                    absent.append(str(rank))
                elif call != work.call:
                    others.append(f"rank {rank} calls {call}")
        who = f"rank {', '.join(absent)} did not make this call in time" if absent else "all ranks wait in it"
        who = ", ".join(others) or who
        text = f"{work.what}: not done after {self._timeout_s:g} s, the timeout of the group: {who}"
        with self._lock:
            self._error = TimedOut(f"{text}; fix: make the same calls on all ranks, or init_process_group(timeout=...)")
        work.end(self._error)
        while not self._works.empty():
            behind = self._works.get()
            if behind is not None:
                behind.end(self._error)

    def shutdown(self) -> None:
        """Finish what is under way and close the store."""
        if self._error is None:
            self._end_coalescing().join()
        self._end(StoreClosed(f"{self._where} was destroyed"))

    def abort(self) -> None:
        """Close the store at once; other ranks that wait for this one get an error."""
        self._error = self._error or StoreClosed(f"{self._where} was aborted")
        self._end(self._error)

    def _end(self, error: BaseException) -> None:
        failed, self._error = self._error, error
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._works.put(None)
            if failed is None:
                self._kv.close()
            else:
                self._kv.give_up(failed)

    # Collectives: each of them names what it moves, and what moves it.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        operation = self._operation("allreduce", opts)

        def body() -> None:
            flats = [_flat(each) for each in tensors if each.numel()]
            if flats:
                self._reduce(flats, operation)
            _put(flats, [each for each in tensors if each.numel()])

        return self._call("allreduce", tensors, list(tensors), body)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> TorchWork:
        operation, is_root = self._operation("reduce", opts), self.rank() == opts.rootRank

        def body() -> None:
            sums = [_flat(each).clone() for each in tensors]
            self._reduce(sums, operation)
            if is_root:
                _put(sums, tensors)

        return self._call("reduce", tensors, list(tensors), body)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> TorchWork:
        root = 0 if opts is None else opts.rootRank

        def body() -> None:
            filled = [each for each in tensors if each.numel()]
            flats = [_bytes(each) for each in filled]
            if flats:
                self._kv.broadcast(None, flats, out=flats, root=root)
            _put(flats, filled)

        return self._call("broadcast", tensors, list(tensors), body)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        for outs, own in zip(outputs, inputs, strict=True):
            if {each.shape for each in outs} != {own.shape}:
                raise KVError(f"all_gather in {self._where}: outputs have the input's shape, {tuple(own.shape)}")

        def body() -> None:
            for outs, rows in zip(outputs, self._gathered(inputs), strict=True):
                _put(rows, outs)

        return self._call("allgather", inputs, list(outputs), body)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> TorchWork:
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        def body() -> None:
            whole = [_bytes(each) for each in outputs]
            rows = [each.view(self.size(), -1) for each in whole]
            self._kv.allgather([_bytes(each) for each in inputs], out=rows)
            _put(whole, outputs)

        return self._call("all_gather_single", inputs, list(outputs), body)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> TorchWork:
        operation = self._operation("reduce_scatter", opts)

        def body() -> None:
            rows = [torch.stack([_flat(each) for each in parts]) for parts in inputs]
            self._scatter_sums(outputs, rows, operation)

        return self._call("reduce_scatter", outputs, list(outputs), body)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        operation = self._operation("reduce_scatter_single", opts)

        def body() -> None:
            self._scatter_sums(outputs, [_flat(each).view(self.size(), -1) for each in inputs], operation)

        return self._call("reduce_scatter_single", outputs, list(outputs), body)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> TorchWork:
        def body() -> None:
            for outs, rows in zip(outputs, self._gathered(inputs), strict=False):
                _put(rows, outs)

        return self._call("gather", inputs, list(outputs), body)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> TorchWork:
        def body() -> None:
            for number, out in enumerate(outputs):
                rows = torch.empty(self.size(), out.numel() * out.element_size(), dtype=torch.uint8)
                if self.rank() == opts.rootRank:
                    torch.stack([_bytes(each) for each in inputs[number]], out=rows)
                self._kv.broadcast(None, rows, out=rows, root=opts.rootRank)
                _put([rows[self.rank()]], [out])

        return self._call("scatter", outputs, list(outputs), body)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> TorchWork:
        if len({each.shape for each in (*outputs, *inputs)}) > 1:
            raise KVError(f"all_to_all in {self._where}: tensors of one shape, not of several; {BESIDE}")

        def body() -> None:
            (rows,) = self._gathered([torch.stack([_bytes(each) for each in inputs])])
            _put([row.view(self.size(), -1)[self.rank()] for row in rows], outputs)

        return self._call("all_to_all", inputs, list(outputs), body)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> TorchWork:
        if len({*(output_splits or []), *(input_splits or [])}) > 1:
            raise KVError(f"all_to_all_single in {self._where}: equal parts, not of several sizes; {BESIDE}")
        return self.alltoall(output.chunk(self.size()), input.chunk(self.size()), opts)

    def barrier(self, opts: Any = None) -> TorchWork:
        return self._call("barrier", [], [], self._barrier)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    """Names of the same calls before torch 2.13."""

    def _barrier(self) -> None:
        self._kv.barrier()

    def _reduce(self, flats: Tensors, operation: str) -> None:
        """Make a call in place. Means of whole numbers are cut towards zero, as NCCL does; Lightning asks for them."""
        whole = [] if operation != "mean" else [each for each in flats if not each.is_floating_point()]
        self._kv.allreduce(flats, out=flats, op="sum" if whole else operation)
        for each in whole and flats:
            each.div_(self.size(), rounding_mode=None if each.is_floating_point() else "trunc")

    def _gathered(self, inputs: Tensors) -> list[torch.Tensor]:
        """Return for each input the bytes of all ranks' (ranks, bytes)."""
        flats = [_bytes(each) for each in inputs]
        rows = [torch.empty(self.size(), len(each), dtype=torch.uint8) for each in flats]
        self._kv.allgather(flats, out=rows)
        return rows

    def _scatter_sums(self, outputs: Tensors, rows: Tensors, operation: str) -> None:
        flats = [_flat(each) for each in outputs]
        self._kv.reduce_scatter(rows, out=flats, op=operation)
        _put(flats, outputs)

    def _operation(self, call: str, opts: Any) -> str:
        """Return what the store calls the operation of a call."""
        asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for name, ours in OPERATIONS.items():
            if asked == getattr(dist.ReduceOp, name):
                return ours
        raise KVError(f"{call} in {self._where}: operations are {', '.join(OPERATIONS)}, not {asked.op.name}; {BESIDE}")

    # Several calls as one are done when what comes after them is.

    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        return self._call("the calls before", [], [], lambda: None)

    def _refused(self, call: str) -> TorchWork:
        raise KVError(f"{call} in {self._where}: the backend 'distrun' has no such call; {BESIDE}")

    def send(self, *_: object) -> TorchWork:
        return self._refused("send")

    def recv(self, *_: object) -> TorchWork:
        return self._refused("recv")

    def recv_anysource(self, *_: object) -> TorchWork:
        return self._refused("recv without a source")

    # What torch asks of a group, by the names of its C++ class.

    def getBackendName(self) -> str:
        return "distrun"

    def setGroupName(self, name: str) -> None:
        self._names["name"] = name

    def getGroupName(self) -> str:
        return self._names["name"]

    def setGroupDesc(self, text: str) -> None:
        self._names["description"] = text

    def getGroupDesc(self) -> str:
        return self._names["description"]

    def setTimeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in a row: in the tensor's own memory if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """As `_flat`, the bytes of the elements: what is only moved has any type."""
    return _flat(tensor).view(torch.uint8)


def _put(flats: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
    """Write elements, or their bytes, into tensors in whose memory they are not."""
    for flat, tensor in zip(flats, tensors, strict=True):
        if flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
