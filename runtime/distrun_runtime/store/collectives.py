"""Collective calls without keys: every worker gives arrays, and every worker gets what comes of all of them.

They go through a store of the same workers, with rounds and without a rule (`KVStore.companion`), so that the user's
keys, rule, compression and saved states play no part. Calls of one kind - the same operation on arrays of the same
shapes and dtypes - share keys there, which the first of them declares. Each call is a round of these keys:

* allreduce: a key for each array. A call is a `pushpull`.
* broadcast: a key for each array. The root pushes; the others contribute nothing and receive the round.
* allgather: a key for each array of each worker. A worker pushes its own and receives those of the others.
* reduce_scatter: a key for each worker's part of each array. A worker pushes all and receives its own.

So a byte goes to the servers once, and once to each worker that wants it. A call contributes to all its keys by one
request: if it is refused or interrupted, all of them have its round, or none has. So no later call gets its values.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from distrun_runtime.arrays import dtypes, foreign
from distrun_runtime.arrays.device import is_on_host
from distrun_runtime.arrays.dtypes import Array, DType
from distrun_runtime.errors import KVError
from distrun_runtime.store.keys import Zeros
from distrun_runtime.store.objects import OBJECT_BYTES, decode, encode
from distrun_runtime.store.pending import CompletedCall, Pending, awaited
from distrun_runtime.store.values import array_of, output_of, outputs

OPS = ("sum", "mean", "min", "max")
BOOL: DType = np.dtype(np.bool_)
BLOCK_BYTES = 1024
"""So much of an object travels at once."""

_SIZE = struct.Struct("<Q")
_NO_OBJECT = 2**64 - 1
"""In place of the size of an object that could not be encoded; the reason follows."""


class RoundsStore(Protocol):
    """What the calls need of the store that they go through: see KVStore."""

    def declare(self, key: Any, shape: object) -> Pending: ...  # noqa: D102

    def push(self, key: Any, value: object, *, scale: float = 1.0) -> Pending: ...  # noqa: D102

    def pushpull(  # noqa: D102
        self, key: Any, value: object, out: object, priority: int = 0, *, wait: bool = True, scale: float = 1.0
    ) -> Pending: ...

    def exchange(  # noqa: D102
        self, key: Any, value: object, asked: Any, out: object, *, wait: bool = True, scale: float = 1.0
    ) -> Pending: ...


class _ScriptArray(NamedTuple):
    """An array of a script's."""

    array: Any
    """What the store is given: a numpy array in the same memory, or the array on a GPU; of bool as uint8."""
    shape: tuple[int, ...]
    dtype: DType
    source: Any
    """The array as the script gave it."""

    @property
    def stored(self) -> DType:
        """The dtype of keys for it."""
        return np.dtype(np.uint8) if self.dtype == BOOL else self.dtype

    def __str__(self) -> str:
        return f"shape {self.shape} and dtype {dtypes.name_of(self.dtype)}"


class _ArraysOfCall:
    """A call with its arrays, in one form.

    Arguments:
        what: the call, for people.
        value, out, wait: as they were given.
        shape_of: from the shape of an array to that of its result.

    Raises:
        KVError: an array cannot be used, or the outputs do not fit.
    """

    def __init__(
        self, what: str, value: object, out: object, wait: bool, shape_of: Callable[[tuple[int, ...]], tuple[int, ...]]
    ) -> None:
        self.what, self._wait = what, wait
        is_list = isinstance(value, (list, tuple))
        self.given = [_given(what, each) for each in _listed(value)]
        if out is None and not wait:
            raise KVError(f"{what}: with wait=False it needs out, such as out=value, for its result")
        if out is not None and is_list != isinstance(out, (list, tuple)):
            raise KVError(f"{what}: value and out are both an array, or both a list of arrays")
        self.result: Any = out
        if out is None:
            made = [_new(each, shape_of(each.shape)) for each in self.given]
            self.result = made if is_list else made[0]
        self.outs = [_given(f"{what}: out", each, is_output=True) for each in _listed(self.result)]
        if len(self.outs) != len(self.given):
            raise KVError(f"{what}: {len(self.given)} arrays and {len(self.outs)} outputs; expected as many")
        for number, (each, to) in enumerate(zip(self.given, self.outs, strict=True)):
            expected = each._replace(shape=shape_of(each.shape))
            if (to.shape, to.dtype) != (expected.shape, expected.dtype):
                which = f"output {number}" if is_list else "out"
                raise KVError(f"{what}: {which} has {to}, expected {expected}")

    @property
    def arrays(self) -> list[Any]:
        """The arrays that are given to the store."""
        return [each.array for each in self.given]

    @property
    def targets(self) -> list[Any]:
        """The outputs that are given to the store."""
        return [each.array for each in self.outs]

    def zeros(self, op: str = "sum", times: int = 1, parts: int = 0) -> list[Zeros]:
        """Return what keys for the arrays are declared with, so many times.

        Arguments:
            op: what becomes of the contributions.
            parts: how many sides of the shapes are left out.

        Raises:
            KVError: no such operation, or it is not for this dtype.
        """
        if op not in OPS:
            raise KVError(f"{self.what}: no operation {op!r:.60}; known are {', '.join(OPS)}")
        for each in self.given:
            if op == "mean" and not dtypes.is_float(each.dtype):
                raise KVError(f"{self.what}: a mean is of floats, not of {each.dtype}; fix: op='sum', or give floats")
        # Of bools the sum is whether any is true, as numpy has it.
        ops = ["sum" if op == "mean" else "max" if (op, each.dtype) == ("sum", BOOL) else op for each in self.given]
        return [
            Zeros(each.shape[parts:], each.stored, its, self.what) for each, its in zip(self.given, ops, strict=True)
        ] * times

    def copied(self) -> CompletedCall:
        """Write the arrays to the outputs."""
        _copy(self.arrays, self.targets)
        return CompletedCall(self.what)

    def made(self, pending: Pending) -> Any:
        """Return what the script is given: the result, or what becomes of the call."""
        awaited(pending, self._wait)
        return self.result if self._wait else pending


class _CallKind:
    """Calls that share keys. Their names are made of what the workers have to call alike, and of nothing else."""

    def __init__(self, items: Sequence[Zeros]) -> None:
        said = [f"{each.call} of shape {each.shape} {dtypes.name_of(each.dtype)}, {each.op}" for each in items]
        kind = hashlib.sha256("; ".join(said).encode()).hexdigest()[:16]
        self.keys: list[Any] = [f"array {at} of {len(said)} of {one} ({kind})" for at, one in enumerate(said)]
        self.items = list(items)
        self.lock = threading.Lock()
        """Held while the keys are declared."""
        self.is_declared = False


class Collectives:
    """The collective calls of one store; the methods are those of KVStore.

    Threads: any; each worker makes the calls of one kind in the same order. The first call of a kind waits for the
    other workers, also with wait=False.

    Arguments:
        rounds: the store that they go through; None: there is one worker.
    """

    def __init__(self, rank: int, workers: int, rounds: RoundsStore | None) -> None:
        self._rank, self._workers, self._rounds = rank, workers, rounds
        self._kinds: dict[tuple[object, ...], _CallKind] = {}

    def allreduce(self, value: object, out: object, op: str, wait: bool) -> Any:
        """See KVStore."""
        call = _ArraysOfCall(f"allreduce(op={op!r})", value, out, wait, lambda shape: shape)
        zeros, rounds = call.zeros(op), self._rounds
        if rounds is None or not zeros:
            return call.made(call.copied())
        keys, scale = self._keys(zeros), self._scale(op)
        return call.made(rounds.pushpull(keys, call.arrays, call.targets, wait=wait, scale=scale))

    def broadcast(self, value: object, out: object, root: int, wait: bool) -> Any:
        """See KVStore."""
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self._workers:
            raise KVError(f"broadcast: root is a rank from 0 to {self._workers - 1}, not {root!r:.60}")
        call = _ArraysOfCall(f"broadcast(root={root})", value, out, wait, lambda shape: shape)
        zeros, rounds = call.zeros(), self._rounds
        if rounds is None or not zeros:
            return call.made(call.copied())
        keys = self._keys(zeros)
        if self._rank != root:
            return call.made(rounds.exchange([], [], keys, call.targets, wait=wait))
        outputs(keys, call.targets)  # As the others look at theirs: all make the call, or none does.
        rounds.push(keys, call.arrays)
        return call.made(call.copied())

    def allgather(self, value: object, out: object, wait: bool) -> Any:
        """See KVStore."""
        call = _ArraysOfCall("allgather", value, out, wait, lambda shape: (self._workers, *shape))
        rounds, zeros = self._rounds, call.zeros(times=self._workers)
        parts = [[to[rank, ...] for to in call.targets] for rank in range(self._workers)]
        pending: Pending = CompletedCall(call.what)
        if rounds is not None and zeros:
            keys = self._keys(zeros)
            mine = self._mine(keys)
            others = [array for rank, its in enumerate(parts) if rank != self._rank for array in its]
            theirs = [*keys[: mine.start], *keys[mine.stop :]]
            pending = rounds.exchange(keys[mine], call.arrays, theirs, others, wait=False)
        _copy(call.arrays, parts[self._rank])
        return call.made(pending)

    def reduce_scatter(self, value: object, out: object, op: str, wait: bool) -> Any:
        """See KVStore."""
        call = _ArraysOfCall(f"reduce_scatter(op={op!r})", value, out, wait, lambda shape: shape[1:])
        for each in call.given:
            if each.shape[:1] != (self._workers,):
                raise KVError(f"{call.what}: found {each}; expected {self._workers} parts, one for each worker")
        rounds, zeros = self._rounds, call.zeros(op, self._workers, 1)
        parts = [[array[rank, ...] for array in call.arrays] for rank in range(self._workers)]
        if rounds is None or not zeros:
            _copy(parts[0], call.targets)
            return call.made(CompletedCall(call.what))
        keys, given = self._keys(zeros), [array for its in parts for array in its]
        mine, scale = keys[self._mine(keys)], self._scale(op)
        return call.made(rounds.exchange(keys, given, mine, call.targets, wait=wait, scale=scale))

    def broadcast_object(self, value: object, root: int) -> Any:
        """See KVStore."""
        call = f"broadcast_object(root={root!r:.60})"
        data, block = _in_block(value, call) if root == self._rank else (b"", np.empty(BLOCK_BYTES, np.uint8))
        self.broadcast(block, block, root, True)
        (size,) = self._sizes([block], call, root)
        rest = np.empty(_capacity(size), np.uint8)
        rest[: len(data[BLOCK_BYTES:])] = np.frombuffer(data[BLOCK_BYTES:], np.uint8)
        if len(rest):
            self.broadcast(rest, rest, root, True)
        return _out_of_block(block, rest, size, call)

    def allgather_object(self, value: object) -> list[Any]:
        """See KVStore."""
        call = "allgather_object"
        data, block = _in_block(value, call)
        blocks = self.allgather(block, None, True)
        sizes = self._sizes(blocks, call, 0)
        rest = np.zeros(_capacity(max(sizes)), np.uint8)
        rest[: len(data[BLOCK_BYTES:])] = np.frombuffer(data[BLOCK_BYTES:], np.uint8)
        rests = self.allgather(rest, None, True) if len(rest) else [rest] * self._workers
        return [_out_of_block(*its, call) for its in zip(blocks, rests, sizes, strict=True)]

    def _sizes(self, blocks: Sequence[Array], call: str, first: int) -> list[int]:
        """Return the sizes of the objects that begin in blocks, those of the workers from `first` on.

        Raises:
            KVError: a worker could not encode its object; says which, and why. Or a size is too large.
        """
        sizes = [_SIZE.unpack_from(block.data)[0] for block in blocks]
        for rank, (size, block) in enumerate(zip(sizes, blocks, strict=True), first):
            if size == _NO_OBJECT:
                text = block[_SIZE.size :].tobytes().rstrip(b"\0").decode("utf-8", "replace")
                raise KVError(f"{call}: of rank {rank}: {text}")
            if size > OBJECT_BYTES:
                raise KVError(f"{call}: of rank {rank}: expected at most {OBJECT_BYTES} bytes, found {size}")
        return sizes

    def _scale(self, op: str) -> float:
        return 1 / self._workers if op == "mean" else 1.0

    def _mine(self, keys: list[Any]) -> slice:
        """Return where the keys of this worker's parts are among those of all."""
        each = len(keys) // self._workers
        return slice(self._rank * each, (self._rank + 1) * each)

    def _keys(self, items: Sequence[Zeros]) -> list[Any]:
        """Return the keys of a kind of calls, declared."""
        name = tuple(items)
        kind = self._kinds.get(name) or self._kinds.setdefault(name, _CallKind(items))
        if not kind.is_declared:
            with kind.lock:
                if not kind.is_declared:
                    assert self._rounds is not None
                    self._rounds.declare(kind.keys, kind.items)
                    kind.is_declared = True
        return kind.keys


def _in_block(value: object, call: str) -> tuple[bytes, Array]:
    """Return an object as bytes that begin with its size, and their first block: others have to know how many come.

    The bytes say why if there is something in the object that cannot be sent: it is told to all.
    """
    try:
        data = encode(value, "value")
        data = _SIZE.pack(len(data)) + data
    except KVError as err:
        data = (_SIZE.pack(_NO_OBJECT) + str(err).encode())[:BLOCK_BYTES]
    block = np.zeros(BLOCK_BYTES, np.uint8)
    block[: len(data)] = np.frombuffer(data[:BLOCK_BYTES], np.uint8)
    return data, block


def _capacity(size: int) -> int:
    """Return the bytes that travel behind the blocks of objects of at most so many: few sizes, as each has its keys."""
    left = size - (BLOCK_BYTES - _SIZE.size)
    return 0 if left <= 0 else max(4 * BLOCK_BYTES, 1 << (left - 1).bit_length())


def _out_of_block(block: Array, rest: Array, size: int, call: str) -> Any:
    return decode((block[_SIZE.size :].tobytes() + rest.tobytes())[:size], call)


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _given(what: str, value: Any, *, is_output: bool = False) -> _ScriptArray:
    """Return an array in the form in which the store is given it."""
    if type(value) is np.ndarray and (value.flags.writeable or not is_output) and value.dtype.isnative:
        array, dtype = value, value.dtype
        if dtype == BOOL:
            return _ScriptArray(array.view(np.uint8), array.shape, BOOL, value)
        if dtypes.name_of(dtype) in dtypes.NAMES:
            return _ScriptArray(array, array.shape, dtype, value)
    is_bool = str(getattr(value, "dtype", type(value).__name__)) in ("bool", "torch.bool")
    seen = value
    if is_bool and foreign.is_tensor(value):
        seen = value.detach().view(sys.modules["torch"].uint8)
    elif is_bool:
        seen = value.view(np.uint8) if hasattr(value, "view") else np.asarray(value).view(np.uint8)
    found = output_of(what, seen) if is_output else array_of(what, seen)
    return _ScriptArray(found if is_on_host(found) else seen, found.shape, BOOL if is_bool else found.dtype, value)


def _new(like: _ScriptArray, shape: tuple[int, ...]) -> Any:
    """Return a new array of a shape, of the library and dtype of another one, and where that is."""
    if foreign.is_tensor(like.source):
        return like.source.new_empty(shape)
    if type(like.source).__module__.partition(".")[0] == "cupy":
        return sys.modules["cupy"].empty(shape, like.source.dtype)
    return np.empty(shape, like.dtype)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    """Copy arrays to others of the same library."""
    for source, target in zip(sources, targets, strict=True):
        if foreign.is_tensor(target):
            target.copy_(source)
        elif source is not target:
            target[...] = source
