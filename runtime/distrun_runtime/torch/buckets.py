"""Averages gradients over workers in flat buckets: the means are in `p.grad` when `backward()` returns.

A bucket has the gradients of many parameters side by side, in memory that servers on this host read without a copy, so
that one call of the store exchanges all of them. From an exchange to the next `zero_grad()`, `p.grad` of a parameter is
a view of its bucket.

A hook of each parameter notes that it got a gradient, and has autograd call `_finish` at the end of the backward, or
`_fail` if the backward fails (`_End`). The hook copies a large gradient into its bucket, while it is in the processor's
cache, and so frees its memory for the next one. Small gradients are copied at the end, by one call for all.

Gradients are multiplied by 1/n as they are copied, as DDP does it, and the store only adds them up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction

from distrun_runtime.errors import KVError, PeerLost, explain
from distrun_runtime.kvstore import KVStore, Pending
from distrun_runtime.torch.buffers import BufferRow, give_rank_0s
from distrun_runtime.torch.rows import average_rows, sparse_names
from distrun_runtime.transport.zeromq import keep_freed_memory

LARGE_BYTES = 64 * 1024
"""From this size on a gradient is copied by the hook."""
OVERLAP_BYTES = 4 * 1024 * 1024
"""Size of the buckets that are sent during a backward."""
KEPT_BYTES = 64 * 1024 * 1024
"""How much freed memory the C library keeps beside that of the gradients: the most that glibc comes to by itself."""
ALIGNED = 16
"""Elements: each gradient begins at a multiple of it."""

_current_task = torch._C._current_graph_task_id
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_APPLY = (BackwardCFunction.apply.__code__, BackwardCFunction.apply_boxed.__code__)
_numbers: WeakKeyDictionary[KVStore, Iterator[int]] = WeakKeyDictionary()
"""Of each store: the numbers of what averages over it, which keys begin with."""
_order = count()
"""Of what averages, over any store: workers make it in the same order."""
_due: dict[int, list[Averaging]] = {}
"""What exchanges at the end of a backward, by the number of autograd's task."""

UNEVEN = (
    "gradients of a model are averaged over all workers in each backward; fix: give the workers equally many batches"
    " (docs/torch.md: Uneven data)"
)


class GradientSlot:
    """A parameter and its place in a bucket."""

    __slots__ = ("bucket", "index", "is_early", "is_moved", "name", "param", "view")

    def __init__(self, index: int, name: str, param: Any, is_early: bool) -> None:
        self.index, self.name, self.param = index, name, param
        self.is_early = is_early
        """The hook moves the gradient into the bucket."""
        self.is_moved = False
        """The bucket has this worker's part of the mean, and `param.grad` is None until the exchange is done."""
        self.bucket: GradientBucket
        self.view: Any = None
        """The part of the bucket, with the parameter's shape and strides."""

    def move(self, share: float) -> None:
        """Bring the gradient into the bucket, multiplied by `share`; add it to what was moved in this backward."""
        grad, self.param.grad = self.param.grad.detach(), None
        if self.is_moved:
            self.view.add_(grad, alpha=share)
        else:
            torch.mul(grad.to_dense() if grad.is_sparse else grad, share, out=self.view)


class GradientBucket:
    """Memory for the gradients of some parameters of one dtype and device, and for `extra` numbers behind them."""

    def __init__(self, store: KVStore, key: str, slots: Sequence[GradientSlot], like: Any, extra: int = 0) -> None:
        self.key, self.slots = key, slots
        lengths = [slot.param.numel() * (1 + slot.param.is_complex()) for slot in slots]
        places = [-(-length // ALIGNED) * ALIGNED for length in lengths]
        self.tensor, self.array = memory(store, sum(places) + extra, like)
        self.tensor.zero_()
        at = 0
        for slot, length, place in zip(slots, lengths, places, strict=True):
            slot.bucket, slot.view = self, _view(self.tensor[at : at + length], slot.param)
            at += place
        self.extra = self.tensor[at:]
        self.missing = len(slots)
        """With overlap: how many gradients are to come before it is sent."""
        self.small = self.tensor[: sum(place for slot, place in zip(slots, places, strict=True) if not slot.is_early)]
        """The part of those that are moved at the end; they come first."""
        self.pending: Pending | None = None

    def fill(self, share: float, used: Any) -> None:
        """Bring in the gradients that were not moved before, multiplied by `share`; zeros where there is none.

        Arguments:
            used: gets 1 for each slot that has a gradient.
        """
        given, targets = [], []
        for slot in self.slots:
            if slot.is_moved:
                continue
            grad = slot.param.grad
            if grad is None:
                slot.view.zero_()
                continue
            used[slot.index] = 1.0
            if slot.is_early:
                slot.move(share)
            elif grad is not slot.view:
                given.append(grad.to_dense() if grad.is_sparse else grad)
                targets.append(slot.view)
        if given:
            torch._foreach_copy_(targets, given)
        self.small.mul_(share)


def memory(store: KVStore, size: int, like: Any) -> tuple[Any, Any]:
    """Return new memory, of undefined content, that the store moves fastest.

    Returns:
        A tensor of the device of `like` and of its dtype (of complex ones, of their parts), and what the store takes:
        a numpy array of the same memory, or on other devices the tensor.
    """
    dtype = torch.view_as_real(like.detach()).dtype if like.is_complex() else like.dtype
    if like.device.type != "cpu":
        tensor = torch.empty(size, dtype=dtype, device=like.device)
        return tensor, tensor
    array = store.empty(size, str(dtype).rpartition(".")[2])
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(dtype), array  # numpy has no bfloat16


def _view(part: Any, param: Any) -> Any:
    """Return a part of a bucket with the parameter's shape and, where these fill its memory, its strides."""
    part = torch.view_as_complex(part.view(-1, 2)) if param.is_complex() else part
    if torch.ops.aten.is_non_overlapping_and_dense(param.detach()):
        return part.as_strided(param.shape, param.stride())
    return part.view(param.shape)


class Averaging:
    """Replaces the gradients of a model's parameters by their means over workers, at the end of each backward.

    Arguments:
        compression: what the store does to gradients (`KVStore.set_gradient_compression`); None: nothing.
        overlap: buckets are sent during the backward, each when it has all its gradients.
        buffers: what becomes of the model's buffers (`MODES`).

    One backward at a time, in any thread. It is there as long as the model, which it does not keep.
    """

    def __init__(
        self, store: KVStore, model: Any, *, compression: Mapping[str, object] | None, overlap: bool, buffers: str
    ) -> None:
        self._handles: list[Any] = []
        """What removes its hooks."""
        self.store, self._model = store, ref(model)
        store.needs_all(self, UNEVEN)
        self.options = {"compression": compression, "overlap": overlap, "buffers": buffers}
        self.is_syncing = True
        """Gradients are exchanged; False within `no_sync`."""
        self._compression, self._overlap = compression, overlap
        self._mode = buffers
        self._given: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        """Of each module the buffers that have got rank 0's values."""
        self._share = 1.0 / store.num_workers
        self._number = next(_numbers.setdefault(store, count()))
        self.order = next(_order)
        self._layouts = 0
        self._hook = _noting(self)
        self._tasks: set[int] = set()
        """The backwards at whose end `_finish` is called."""
        self._moved: list[GradientSlot] = []
        self._slots: list[GradientSlot] = []
        self._early: dict[int, GradientSlot] = {}
        """By their parameters' ids those that hooks move."""
        self._buckets: list[GradientBucket] = []
        self._keys: list[str] = []
        """Of the buckets."""

    @property
    def is_laid_out(self) -> bool:
        """Whether it averages; not if the workers differed."""
        return bool(self._buckets)

    def stop(self) -> None:
        """Leave the gradients alone from now on."""
        for handle in self._handles:
            handle.remove()

    def __del__(self) -> None:
        self.stop()
        for bucket in getattr(self, "_buckets", ()):
            bucket.slots = ()  # They refer to it; its memory is free at once.

    # --- layout

    def lay_out(self, facts: Mapping[str, str]) -> None:
        """Make buckets for all parameters that require gradients now, and give new ones rank 0's values. Collective.

        Arguments:
            facts: what else has to be alike on all workers.

        Raises:
            KVError: the workers' parameters or facts differ.
        """
        model: Any = self._model()
        params = dict(model.named_parameters())
        self._check_hooks(params)
        trained = [(name, param) for name, param in params.items() if param.requires_grad]
        shapes = {f"parameter {at}": _described(*each) for at, each in enumerate(params.items())}
        frozen = ", ".join(name for name, param in params.items() if not param.requires_grad) or "nothing"
        new = self._new_buffers(model)
        buffers = new if self._mode == "own" else dict(model.named_buffers())
        shapes.update({f"buffer {at}": _described(*each) for at, each in enumerate(buffers.items())})
        counts = {"the number of parameters": len(params), "the number of buffers": len(buffers)}
        alike = {**counts, **shapes, "what is frozen": frozen, **facts, **self.options}
        self.store.agree({name: str(each) for name, each in alike.items()}, "optimizers")
        self._start(params, new)
        self._given.update((module, {*module._buffers}) for module in model.modules())
        self._buffers = BufferRow(model, self._mode, self.store.rank)
        sparse = sparse_names(model)
        self._tables = {name: param for name, param in trained if name in sparse}
        dense = [(name, param) for name, param in trained if name not in sparse]
        self._slots = [GradientSlot(at, name, param, self._is_early(param)) for at, (name, param) in enumerate(dense)]
        self._early = {id(slot.param): slot for slot in self._slots if slot.is_early}
        self._hooks = [slot.param._post_accumulate_grad_hooks for slot in self._slots]
        """Of each slot its parameter's hooks: one, which is ours."""
        self._frozen = [param for param in params.values() if not param.requires_grad]
        self._used = np.zeros(len(dense), np.float32)
        """Of each slot 1 if this worker has a gradient for the exchange."""
        if self._buckets:
            self.store.delete(self._keys)
        self._buckets = self._buckets_of(self._slots)
        self._keys = [bucket.key for bucket in self._buckets]
        self._arrays = [bucket.array for bucket in self._buckets]
        dtypes = [str(bucket.tensor.dtype).rpartition(".")[2] for bucket in self._buckets]
        self.store.declare(self._keys, [tuple(array.shape) for array in self._arrays], dtypes)

    def _new_buffers(self, model: Any) -> dict[str, Any]:
        return {
            f"{path}.{name}".lstrip("."): buffer
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in self._given.get(module, ())
        }

    def _check_hooks(self, params: Mapping[str, Any]) -> None:
        """Return if no hook but ours would get the gradients, of which it would see no means."""
        for name, param in params.items():
            hooks = param._post_accumulate_grad_hooks or {}
            if len(hooks) > (self._hook in hooks.values()):
                raise KVError(
                    f"parameter {name!r} has another hook of register_post_accumulate_grad_hook, which would not see"
                    " the mean over the workers; fix: do it after backward(), or use param.register_hook"
                )

    def _start(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        """Give parameters that are new, and buffers, rank 0's values; hook the parameters."""
        new = [
            param for param in params.values() if self._hook not in (param._post_accumulate_grad_hooks or {}).values()
        ]
        give_rank_0s(self.store, [*new, *buffers.values()])
        if new:
            # The same memory for the gradients of every backward; else page faults take as long as their arithmetic. It
            # may be as large as all of them: a block that a hook frees is often not taken for the next gradient.
            keep_freed_memory(KEPT_BYTES + sum(map(_size_bytes, params.values())))
        self._handles += [_hook(param, self._hook) for param in new if param.is_floating_point() or param.is_complex()]

    def _buckets_of(self, slots: Sequence[GradientSlot]) -> list[GradientBucket]:
        kinds: dict[Any, list[list[GradientSlot]]] = {}
        for slot in reversed(slots):  # as a backward goes
            groups = kinds.setdefault((slot.param.device, slot.param.dtype), [[]])
            if self._overlap and sum(map(_size_bytes, groups[-1])) >= OVERLAP_BYTES:
                groups.append([])
            groups[-1].append(slot)
        groups = [sorted(group, key=lambda slot: slot.is_early) for some in kinds.values() for group in some]
        # What every exchange has besides gradients goes with a bucket whose sum is exact; else in one of its own.
        extra = 1 + len(slots) + self._buffers.size
        rides = not self._compression and not self._overlap
        carriers = [at for at, group in enumerate(groups) if rides and group[0].param.dtype == self._buffers.dtype]
        carrier = carriers[0] if carriers else len(groups)
        self._layouts += 1
        ends = [(min(group, key=_index_of).name, max(group, key=_index_of).name) for group in groups]
        names = [f"gradients of {first!r} to {last!r}" for first, last in ends]
        keys = [f"{name}, bucket {self._number}.{self._layouts}.{at}" for at, name in enumerate([*names, "buffers"])]
        if self._compression:
            self.store.set_gradient_compression(self._compression, keys[:-1])
        buckets = [
            GradientBucket(self.store, key, group, group[0].param, extra if at == carrier else 0)
            for at, (key, group) in enumerate(zip(keys, groups, strict=False))
        ]
        if not carriers:
            like = torch.empty(0, dtype=self._buffers.dtype, device=slots[0].param.device if slots else "cpu")
            buckets.append(GradientBucket(self.store, keys[-1], [], like, extra))
        self._wants, self._flags, self._row = buckets[carrier].extra.split([1, len(slots), self._buffers.size])
        return buckets

    def _is_early(self, param: Any) -> bool:
        return self._overlap or _size_bytes(param) >= LARGE_BYTES

    # --- in a backward

    def _begin(self, task: int, is_outer: bool = False) -> None:
        """Have `_finish` called at the end of the backward under way; `is_outer`: one within it has just ended."""
        if not is_outer and _outer_node() is None:
            if self._tasks:
                raise KVError(
                    "a backward within a backward of the same model; fix: call it when the first has returned"
                )
            if self._moved:
                self._reset()  # A backward before has failed.
            if sum(map(len, self._hooks)) > len(self._hooks):
                self._check_hooks({slot.name: slot.param for slot in self._slots})
        self._tasks.add(task)
        due = _due.setdefault(task, [])
        due.append(self)
        if len(due) == 1:
            _queue_callback(_End(task))

    def _move(self, slot: GradientSlot) -> None:
        bucket = slot.bucket
        if bucket.pending is not None:
            raise KVError(
                f"parameter {slot.name!r} gets a second gradient in one backward, when the first one was sent;"
                " fix: overlap=False, or torch.utils.checkpoint with use_reentrant=False"
            )
        slot.move(self._share)
        if not slot.is_moved:
            slot.is_moved = True
            self._used[slot.index] = 1.0
            self._moved.append(slot)
            bucket.missing -= 1
            if self._overlap and not bucket.missing:
                self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        priority = -self._buckets.index(bucket)
        with self._naming():
            bucket.pending = self.store.pushpull(bucket.key, bucket.array, priority=priority, wait=False)

    def _reset(self) -> None:
        for slot in self._slots:
            slot.is_moved = False
        self._moved = []
        self._used.fill(0.0)
        for bucket in self._buckets:
            bucket.missing, bucket.pending = len(bucket.slots), None

    def _finish(self, task: int) -> None:
        """Exchange, if the backward is over."""
        self._tasks.discard(task)
        outer = _outer_node()
        if outer is not None:
            # A backward within a backward, as of reentrant checkpoints: what it was called by goes on.
            outer.register_hook(self._continue)
            return
        with torch.no_grad():
            self._average()

    def _continue(self, *_: object) -> None:
        if _current_task() not in self._tasks:
            self._begin(_current_task(), is_outer=True)

    def _fail(self, task: int) -> None:
        """Give gradients that were moved back: the backward has failed. Those that were sent are lost."""
        self._tasks.discard(task)
        with torch.no_grad():
            for slot in self._moved:
                if slot.bucket.pending is None:
                    param, grad = slot.param, slot.view / self._share
                    param.grad = grad if param.grad is None else grad.add_(param.grad)
        self._reset()

    def _average(self) -> None:
        for bucket in self._buckets:
            if bucket.pending is None:
                bucket.fill(self._share, self._used)
        self._wants.fill_(any(param.requires_grad and param.grad is not None for param in self._frozen))
        self._flags.copy_(torch.from_numpy(self._used))
        self._buffers.fill(self._row, self._share)
        self._moved = []  # From here on buckets have sums.
        self._exchange()
        self._buffers.take(self._row)
        unused = set() if self._used.all() else self._unused()
        for slot in self._slots:
            if slot.index not in unused:
                try:
                    slot.param.grad = slot.view
                except RuntimeError as err:
                    raise KVError(_changed(slot)) from err
        self._reset()
        average_rows(self.store, self._tables)
        if self._wants.item():
            self.lay_out({})
            self._average()

    def _exchange(self) -> None:
        if not self._overlap:
            with self._naming():
                self.store.pushpull(self._keys, self._arrays)
            return
        for bucket in self._buckets:
            if bucket.pending is None:
                self._send(bucket)
        with self._naming():
            for bucket in self._buckets:
                assert bucket.pending is not None
                bucket.pending.wait()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Add to what is raised inside which parameters have gradients that compression cannot take; or what to do."""
        try:
            yield
        except PeerLost as err:
            explain(err, "backward()", f"; {UNEVEN}")
            raise
        except KVError as err:
            wrong = [repr(slot.name) for slot in self._slots if not slot.view.isfinite().all()]
            if self._compression and wrong:
                explain(err, f"worker-{self.store.rank}: gradient of {', '.join(wrong[:3])}")
            raise

    def _unused(self) -> set[int]:
        """Return the slots whose parameters got no gradient on any worker."""
        return set(np.flatnonzero(self._flags.cpu().numpy() == 0).tolist())


_index_of = attrgetter("index")


def _size_bytes(of: Any) -> int:
    param = of.param if isinstance(of, GradientSlot) else of
    size: int = param.numel() * param.element_size()
    return size


def _described(name: str, param: Any) -> str:
    dtype, layout = str(param.dtype).rpartition(".")[2], "" if param.is_contiguous() else f" strides {param.stride()}"
    return f"{name!r} {dtype} {tuple(param.shape)}{layout}"


def _changed(slot: GradientSlot) -> str:
    now, then = _described(slot.name, slot.param), _described(slot.name, slot.view)
    return f"parameter {now} was {then} when the optimizer was wrapped; fix: wrap after net.to(), net.double()"


def _noting(averaging: Averaging) -> Callable[[Any], None]:
    """Return the hook of its parameters, which does not keep it: Python's collector does not see what hooks keep."""
    found = ref(averaging)

    def _accumulated(param: Any) -> None:
        averaging = found()
        if averaging is not None and averaging.is_syncing:
            task = _current_task()
            if task not in averaging._tasks:
                averaging._begin(task)
            slot = averaging._early.get(id(param))
            if slot is not None:
                averaging._move(slot)

    return _accumulated


class _End:
    """Called at the end of a backward: makes the exchanges that are due. Deleted before: the backward has failed."""

    def __init__(self, task: int) -> None:
        self._task = task

    def __call__(self) -> None:
        due = _due[self._task]
        # Not as the backward went, which may have been another way on another worker.
        due.sort(key=attrgetter("order"))
        while due:
            due[0]._finish(self._task)
            del due[0]
        del _due[self._task]

    def __del__(self) -> None:
        for each in _due.pop(self._task, ()):
            each._fail(self._task)


def _hook(param: Any, function: Callable[[Any], None]) -> Any:
    """Have autograd call `function(param)` when the parameter has got a gradient, also one that is frozen now."""
    requires_grad = param.requires_grad
    handle = param.requires_grad_(True).register_post_accumulate_grad_hook(function)
    param.requires_grad_(requires_grad)
    return handle


def _outer_node() -> Any:
    """Return the node of a backward that has called the one under way; None: the program has called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _APPLY:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
