"""The answers of a server to pulls: values that are lent until the reply has left, or what a codec made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from distrun_runtime.arrays.device import DeviceArray, runs
from distrun_runtime.arrays.dtypes import Array, Buffer
from distrun_runtime.contract.dataclass import dataclass
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression as codecs
from distrun_runtime.ops import reduce
from distrun_runtime.protocol.message import DTYPE_SIZES, DTYPES, Message, Payload, size_of
from distrun_runtime.ps import role
from distrun_runtime.ps.values import Values

if TYPE_CHECKING:
    from distrun_runtime.arrays.gpu import GpuDevice
    from distrun_runtime.arrays.gpu_sharing import ReadExports

SHARED_BYTES = 32 * 1024
"""From so many bytes on, values are read on the GPU. For fewer, to order the two processes costs more than the copies.
"""


# Replies to a request: yes, and no with a reason. No side effects.


def answer(request: Message, body: Mapping[str, Any] | None = None) -> Message:
    """Return the reply that says: done."""
    return Message(request.kind, store=request.store, request=request.request, body=body or {}, is_reply=True)


def refusal(
    request: Message,
    reason: str,
    error: str = "KVError",
    traceback: str = "",
    *,
    who: str = "",
    again: bool = False,
    closed: bool = False,
) -> Message:
    """Return the reply that says why not; the caller raises `error`, a class of distrun_runtime.errors.

    Arguments:
        who: the name of the node that is lost, if that is why.
        again: nothing of the request was done, and it is to be sent again under its number, with its entries.
        closed: the store is not known, or not any more.
    """
    said = (("traceback", traceback), ("who", who), ("again", again), ("closed", closed))
    more = {name: text for name, text in said if text}
    body = {"reason": reason, "error": error, **more}
    return replace(answer(request, body), is_error=True)


def failed(request: Message, event: role.WorkDone) -> Message:
    """Return the refusal of a request whose work failed."""
    assert event.error is not None
    if isinstance(event.error, KVError):
        return refusal(request, str(event.error))
    # A user's class or function, most likely; where it failed is only known here.
    reason = f"{type(event.error).__name__}: {event.error}"
    return refusal(request, reason, "RuleError", event.traceback)


_JOINED_FRAMES = 16
_JOINED_BYTES = 64 * 1024
"""A reply of more frames than this is joined to one if it has fewer bytes than that a frame."""


@dataclass(eq=False)
class ReplyValues:
    """What one Lend keeps for a pull."""

    values: Values
    shards: Array
    at: Array
    """Numbers of the entries."""
    sides: Array
    codec: int
    payloads: list[Buffer] | None = None
    """For each shard what was made of it; None: the values themselves go out."""
    error: str = ""

    @property
    def copied_bytes(self) -> int:
        """How many bytes are copied from a GPU to be sent."""
        if self.payloads is not None or self.values.is_on_host:
            return 0
        table = self.values.store
        return sum(
            int(table.length[self.shards[table.dtype[self.shards] == code]].sum()) * DTYPES[code].itemsize
            for code in np.unique(table.dtype[self.shards]).tolist()
        )

    def keep(self) -> None:
        """The values are not written until they are given back."""
        self.values.lent[self.sides, self.shards] += 1
        self.values.lending += 1

    def give_back(self) -> None:
        """The values may be written again; once."""
        if self.payloads is None:
            self.values.lent[self.sides, self.shards] -= 1
            self.values.lending -= 1


def lend(values: Values, what: role.Lend) -> ReplyValues:
    """Keep the present values of shards for a pull: they are not written until they are given back."""
    lent = ReplyValues(values, what.shards, what.at, values.side[what.shards], what.codec)
    if not what.rows and what.codec == codecs.NONE:
        lent.keep()
        return lent
    lent.payloads = []
    try:
        codec = None if what.rows else codecs.numbered(what.codec)
        if codec is not None:
            codec.prepare(values.device, waits=False)
    except KVError as err:  # its kernels are not compiled, or find no place
        lent.error = str(err)
        return lent
    for number, shard in enumerate(what.shards.tolist()):
        try:
            if codec is None:
                asked = what.rows[number]
                table = values.weight(shard).reshape(-1, int(values.store.row_size[shard]))
                if asked == reduce.ROUND_ROWS:
                    rows = values.round_rows.get(shard)
                    wanted = np.arange(len(table)) if rows is None else rows
                    lent.payloads.append(reduce.encode(wanted, table[wanted]))
                    continue
                wanted = reduce.decode_rows(asked, values.row_count(shard))
                lent.payloads.append(values.device.frame(table[wanted].reshape(-1)))
            else:
                lent.payloads.append(_encoded(values, shard, codec, what))
        except KVError as err:
            lent.error = lent.error or f"{values.named(shard)}: {err}"
    return lent


def _encoded(values: Values, shard: int, codec: codecs.Codec, what: role.Lend) -> Buffer:
    """Return a value; the first pull of a round encodes it, and the residual takes the rest."""
    known = values.encoded.setdefault(shard, {})
    name = (what.codec, *sorted(what.params.items()))
    if name not in known:
        residual = values.residual_of(shard) if codec.has_residual else None
        known[name] = codec.encode(values.weight(shard), residual, dict(what.params))
    return known[name]


def reply_of(what: role.Deliver, lent: Sequence[ReplyValues], exports: ReadExports | None = None) -> Message:
    """Return the answer to a pull from all that was lent to it.

    Arguments:
        exports: memory of a GPU that the receiver reads where it is; None: it does not.
    """
    is_packed = True
    for each in lent:
        if each.error:
            return refusal(what.message, each.error)
        is_packed &= each.payloads is None
    body: dict[str, Any] = {"codec": dict(what.message.body["codec"])} if "codec" in what.message.body else {}
    if what.skipped:
        body["skipped"] = {
            str(key): {str(rank): note for rank, note in notes.items()} for key, notes in what.skipped.items()
        }
    entries = what.entries.copy()
    is_packed &= bool((entries["dtype"] == entries["dtype"][:1]).all())
    entries["payload"] = Payload.PACKED if is_packed else Payload.FRAME
    for each in lent:
        entries["codec"][each.at] = each.codec
    one = is_packed and len(lent) == 1
    payloads = frames_of(lent[0], exports) if one else _frames_in_order(lent, len(entries))
    is_bucket = what.message.bucket and not len(what.message.entries) and not entries["codec"].any()
    return Message(
        what.message.kind,
        is_reply=True,
        store=what.message.store,
        request=what.message.request,
        bucket=what.message.bucket if is_bucket else 0,
        step=what.message.step if is_bucket else 0,
        entries=what.message.entries if is_bucket else entries,
        body=body,
        payloads=payloads,
    )


def frames_of(lent: ReplyValues, exports: ReadExports | None = None) -> list[Buffer]:
    """Return values of one dtype, end to end in the order of the entries, in as few frames as they allow; `exports` as
    of `reply_of`."""
    values = lent.values
    if not values.is_on_host:
        is_there = exports is not None and exports.all.gpu is values.device and lent.copied_bytes >= SHARED_BYTES
        return [memory.data for _, memory in _copied(lent, exports if is_there else None)]
    found = list(map(values.device.frame, _arrays(values, lent.shards, lent.sides)))
    size = size_of(found)
    if len(found) > _JOINED_FRAMES and size < _JOINED_BYTES * len(found):
        return [b"".join(found)]
    return found


def _arrays(values: Values, shards: Array, sides: Array) -> list[DeviceArray]:
    """Return what shards have, in their order: one array for those of one dtype and side that are end to end."""
    codes = values.store.dtype[shards]
    cuts = (np.flatnonzero((sides[1:] != sides[:-1]) | (codes[1:] != codes[:-1])) + 1).tolist()
    return [
        values.arenas[int(codes[run.first])].view(run.begin, run.end, int(sides[run.first]))
        for run in runs(values.at[shards], values.store.length[shards], cuts)
    ]


def _frames_in_order(lent: Sequence[ReplyValues], count: int) -> list[Buffer]:
    payloads: list[Buffer] = [b""] * count
    for each in lent:
        found = _frames(each) if each.payloads is None else each.payloads
        for at, payload in zip(each.at.tolist(), found, strict=True):
            payloads[at] = payload
    return payloads


def _frames(lent: ReplyValues) -> list[Buffer]:
    """Return the bytes of each shard, to be sent."""
    values = lent.values
    if values.is_on_host:
        sides = zip(lent.shards.tolist(), lent.sides.tolist(), strict=True)
        return [values.device.frame(values.view(shard, side)) for shard, side in sides]
    frames: list[Buffer] = []
    for sizes, memory in _copied(lent):
        ends = np.cumsum(sizes)
        frames += [memory[begin:end].data for begin, end in zip((ends - sizes).tolist(), ends.tolist(), strict=True)]
    return frames


def _copied(lent: ReplyValues, exports: ReadExports | None = None) -> list[tuple[Array, Array]]:
    """Return what is lent of a GPU, in memory that processes of this host read where it is: the host's or, of one
    dtype, of `exports`.

    What other replies carry now, such as those to other workers in a round, is carried by this one too. The rest is
    copied; all of it if it would be many pieces.

    Returns:
        Pieces of memory in the order of the shards, each with the bytes of the shards that it has.
    """
    values, shards, sides = lent.values, lent.shards, lent.sides
    sizes = values.store.length[shards] * DTYPE_SIZES[values.store.dtype[shards]]
    copies = values.copies if exports is None else values.shared_copies
    numbers, places, memory = copies.find(shards, sides)
    for number, found in memory.items():
        if exports is not None and not exports.has(found):
            numbers[numbers == number] = 0  # It is of a segment that other workers read, but not this one.
    if len(_breaks(numbers, places, sizes)) > _JOINED_FRAMES:
        numbers[:] = 0
    new = np.flatnonzero(numbers == 0)
    if len(new):
        places[new] = np.cumsum(sizes[new]) - sizes[new]
        arrays, device = _arrays(values, shards[new], sides[new]), cast("GpuDevice", values.device)
        if exports is None:
            made: Array = values.host.empty((int(sizes[new].sum()),), np.dtype(np.uint8), is_sent=True)
            device.read_end_to_end(arrays, made)
        else:
            bucket = exports.empty((sum(map(len, arrays)),), arrays[0].dtype)
            if bucket is None:
                return _copied(lent)
            device.gather([[each] for each in arrays], bucket)
            made = exports.all.bytes_of(bucket)
        number = copies.add(shards[new], sides[new], places[new], made)
        numbers[new] = number
        memory[number] = made
    breaks = _breaks(numbers, places, sizes).tolist()
    return [
        (sizes[first:last], memory[int(numbers[first])][int(places[first]) : int(places[last - 1] + sizes[last - 1])])
        for first, last in zip([0, *breaks], [*breaks, len(shards)], strict=True)
    ]


def _breaks(numbers: Array, places: Array, sizes: Array) -> Array:
    """Return which shards do not lie behind the one before: those without a number do so among themselves."""
    follow = (numbers[1:] == 0) | (places[1:] == places[:-1] + sizes[:-1])
    return np.flatnonzero((numbers[1:] != numbers[:-1]) | ~follow) + 1
