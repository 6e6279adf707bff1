"""Declaring keys: all workers say what they have, the scheduler compares, rank 0's values go to the servers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.errors import RuntimeFault
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps.routing import Layout, Shape, cut, mxnet_layout
from distrun_runtime.store.base import Record, Value
from distrun_runtime.store.compress import Compressor, Setting
from distrun_runtime.store.link import Link
from distrun_runtime.store.pieces import Part, whole
from distrun_runtime.store.requests import pack
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Key

Placed = tuple[Record, Layout]


def declare(
    link: Link, what: str, number: int, items: Sequence[tuple[Key, Value]], compressor: Compressor
) -> tuple[int, list[Placed]]:
    """Declare new keys and return what the workers agreed on: each key's record, and where its pieces are.

    Returns to rank 0 before the servers have the values, to the others after. The call's number comes first (`agree`).

    Raises:
        KVError: the workers differ; names key, workers and what each has.
    """
    records = [Record.of(key, 0, value) for key, value in items]
    body = {"records": [_described(record, compressor) for record in records]}
    made, reply = link.agree(what, Kind.KEYS, number, body)
    servers = reply.get("servers") or [None] * len(reply["keys"])
    told = zip(reply["keys"], reply["numbers"], servers, strict=True)
    places = {_text(key): (int(pair[0]), int(pair[1]), where) for key, pair, where in told}
    placed = []
    for key, value in items:
        number, index, where = places[_text(key)]
        record = Record.of(key, index, value)
        placed.append((record, _layout(link, record, number, where, compressor)))
    return made, placed


def declare_again(link: Link, what: str, number: int, records: Sequence[Record], compressor: Compressor) -> int:
    """Declare that keys which exist are given another value; return the call's number.

    Raises:
        KVError: the workers differ.
    """
    described = [_described(record, compressor) for record in records]
    return link.agree(what, Kind.KEYS, number, {"records": described, "assign": True})[0]


def fill(
    link: Link, what: str, number: int, placed: Iterable[tuple[Record, Layout, Value]], facts: dict[str, Any]
) -> None:
    """Send rank 0's values to the servers, and tell the scheduler when they are there.

    Arguments:
        facts: what the servers have to know of the store.

    Raises:
        RuntimeFault: a server refused them (KVError), or they did not get there; the other workers are told.
    """
    error = "worker-0 was interrupted before the servers had the values"
    try:
        parts = [
            part
            for record, layout, value in placed
            for part in whole(record, layout, value.to_dense() if isinstance(value, RowSparse) else value)
        ]
        rounds = [0] * (1 + max((part.number for part in parts), default=0))
        packed = pack(Kind.INIT, link.store, parts, rounds, body_of=lambda held: {**facts, **_facts_of(held)})
        link.send(what, packed).wait(link.limit_s)
        error = ""
    except RuntimeFault as err:
        error = str(err)
        raise
    finally:
        link.settled(number, not error)
        link.scheduler(what, Kind.INIT, {"number": number, "error": error})


def _layout(link: Link, record: Record, number: int, servers: Sequence[int] | None, compressor: Compressor) -> Layout:
    """Return where a key's shards are: on the servers that the scheduler says, or where MXNet has them."""
    row_size = record.row_size if record.is_sparse else 0
    if servers is not None:
        pieces = cut(record.size, record.dtype.itemsize, row_size)
        return Layout(number, tuple(Shard(int(server), *piece) for server, piece in zip(servers, pieces, strict=True)))
    setting = compressor.of(record)
    factor = setting.codec.factor if setting is not None and setting.codec is not None else 1
    shape = Shape(record.size, record.dtype.itemsize, row_size, record.shape[0] if record.is_sparse else 0)
    count, bound = link.node.num_servers, link.node.config.bigarray_bound
    return mxnet_layout(number, record.index, shape, servers=count, bound=bound, factor=factor)


def _described(record: Record, compressor: Compressor) -> dict[str, Any]:
    """Return what workers have to agree on."""
    return {
        "key": record.key,
        "shape": list(record.shape),
        "dtype": name_of(record.dtype),
        "stype": record.stype,
        "codec": _compression(compressor.of(record)),
    }


def _compression(setting: Setting | None) -> str:
    if setting is None:
        return ""
    params = ["%s=%g" % pair for pair in sorted(setting.params.items())]
    return " ".join([setting.type, *params, *(["two_way"] if setting.two_way else [])])


def _facts_of(parts: list[Part]) -> dict[str, Any]:
    """Return what a server has to know of the keys of a message."""
    records = {part.number: part.record for part in parts}
    rows = {str(number): record.row_size for number, record in records.items() if record.is_sparse}
    return {
        "names": [[number, record.key] for number, record in records.items()],
        "shapes": {str(number): list(record.shape) for number, record in records.items()},
        **({"rows": rows} if rows else {}),
    }


def _text(key: Key) -> str:
    return "%s:%s" % (type(key).__name__, key)
