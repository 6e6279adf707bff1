"""Declaring keys: all workers say what they have, the scheduler compares, rank 0's values go to the servers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distrun_runtime.arrays.dtypes import name_of
from distrun_runtime.errors import RuntimeFault
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import DTYPE_CODES, Flag, Kind, Message, Payload
from distrun_runtime.ps.routing import Route, mxnet_shards, shards_on
from distrun_runtime.store.compress import Compression, Compressor
from distrun_runtime.store.keys import Key, KeyRecord
from distrun_runtime.store.link import StoreLink, is_added_on_hosts
from distrun_runtime.store.sparse import RowSparse
from distrun_runtime.store.values import Value

Placed = tuple[KeyRecord, tuple[Shard, ...]]
"""A key's record and its shards."""


def declare(
    link: StoreLink,
    what: str,
    number: int,
    items: Sequence[tuple[Key, Value]],
    compressor: Compressor,
    *,
    labels: Mapping[Key, str],
) -> tuple[int, list[Placed]]:
    """Declare new keys and return what the workers agreed on: each key's record and its shards.

    Returns to rank 0 before the servers have the values, to the others after. The call's number comes first (`agree`).

    Arguments:
        labels: what this worker calls some of the keys.

    Raises:
        KVError: the workers differ; names key, workers and what each has.
    """
    records = [_described(KeyRecord.of(key, 0, value), compressor) for key, value in items]
    body = {"records": [{**one, "label": labels[one["key"]]} if one["key"] in labels else one for one in records]}
    made, reply = link.agree(what, Kind.KEYS, number, body)
    if "servers" in reply and link.node.config.partition == "mxnet":
        warnings.warn(
            "the scheduler places values by size: DISTRUN_PARTITION=mxnet or MXNET_KVSTORE_BIGARRAY_BOUND is set for"
            " this worker and not for the scheduler; fix: set it for all tasks, such as by --env",
            RuntimeWarning,
            stacklevel=4,
        )
    servers = reply.get("servers") or [None] * len(reply["keys"])
    told = zip(reply["keys"], reply["numbers"], servers, strict=True)
    places = {_text(key): (int(pair[0]), int(pair[1]), where) for key, pair, where in told}
    placed = []
    for key, value in items:
        number, index, where = places[_text(key)]
        record = KeyRecord.of(key, index, value)
        placed.append((record, _shards(link, record, number, where, compressor)))
    return made, placed


def declare_again(link: StoreLink, what: str, number: int, records: Sequence[KeyRecord], compressor: Compressor) -> int:
    """Declare that keys which exist are given another value; return the call's number.

    Raises:
        KVError: the workers differ.
    """
    described = [_described(record, compressor) for record in records]
    return link.agree(what, Kind.KEYS, number, {"records": described, "assign": True})[0]


def fill(
    link: StoreLink,
    what: str,
    number: int,
    placed: Sequence[tuple[KeyRecord, tuple[Shard, ...], Value]],
    facts: dict[str, Any],
) -> None:
    """Send rank 0's values to the servers, and tell the scheduler when they are there.

    Arguments:
        facts: what the servers have to know of the store.

    Raises:
        RuntimeFault: a server refused them (KVError), or they did not get there; the other workers are told.
    """
    error = "worker-0 was interrupted before the servers had the values"
    try:
        records = [record for record, _, _ in placed]
        values = [value.to_dense() if isinstance(value, RowSparse) else value for _, _, value in placed]
        route = Route.of([shards for _, shards, _ in placed], [record.shape for record in records])
        rounds = np.zeros(len(placed), np.int64)
        messages = []
        for portion in route.portions:
            numbered = {int(route.numbers[item]): records[item] for item in portion.items.tolist()}
            message = Message(
                Kind.INIT,
                store=link.store,
                entries=portion.entries_at(rounds, Payload.PACKED),
                body={**facts, **_facts_of(numbered)},
                payloads=portion.gather(values, lent=True),
            )
            messages.append((portion.link, message))
        link.ask(what, messages).wait(link.limit_s)
        _tell_relays(link, what, route, records, facts)
        error = ""
    except RuntimeFault as err:
        error = str(err)
        raise
    finally:
        link.settled(number, not error)
        link.scheduler(what, Kind.INIT, {"number": number, "error": error})


def _tell_relays(
    link: StoreLink, what: str, route: Route, records: Sequence[KeyRecord], facts: Mapping[str, Any]
) -> None:
    """Tell servers which shards of others they stand in for, and that the values are new."""
    messages = []
    for relays in link.node.relays_of_hosts:
        for portion in route.portions:
            if portion.server not in relays:
                continue
            some = [at for at, item in enumerate(portion.items.tolist()) if is_added_on_hosts(facts, records[item])]
            if not some:
                continue
            numbered = {int(route.numbers[item]): records[item] for item in portion.items[some].tolist()}
            message = Message(
                Kind.INIT,
                Flag.RELAYED,
                store=link.store,
                entries=portion.entries_at(np.zeros(len(records), np.int64), Payload.NONE)[some],
                body={**facts, **_facts_of(numbered), "owner": portion.server},
            )
            messages.append(("server-%d" % relays[portion.server], message))
    if messages:
        link.ask(what, messages).wait(link.limit_s)


def _shards(
    link: StoreLink, record: KeyRecord, number: int, servers: Sequence[int] | None, compressor: Compressor
) -> tuple[Shard, ...]:
    """Return a key's shards: on the servers that the scheduler says, or where MXNet has them."""
    row_size = record.row_size if record.is_sparse else 0
    value = Shard(0, 0, record.size, number, DTYPE_CODES[record.dtype], row_size)
    if servers is not None:
        return shards_on(value, servers)
    setting = compressor.of(record)
    factor = setting.codec.factor if setting is not None and setting.codec is not None else 1
    count, bound = link.node.num_servers, link.node.config.bigarray_bound
    return mxnet_shards(value, record.index, servers=count, bound=bound, factor=factor)


def _described(record: KeyRecord, compressor: Compressor) -> dict[str, Any]:
    """Return what workers have to agree on."""
    return {
        "key": record.key,
        "shape": list(record.shape),
        "dtype": name_of(record.dtype),
        "stype": record.stype,
        "codec": _compression(compressor.of(record)),
    }


def _compression(setting: Compression | None) -> str:
    if setting is None:
        return ""
    params = ["%s=%g" % pair for pair in sorted(setting.params.items())]
    return " ".join([setting.type, *params, *(["two_way"] if setting.two_way else [])])


def _facts_of(records: Mapping[int, KeyRecord]) -> dict[str, Any]:
    """Return what a server has to know of the keys of a message, by their numbers."""
    rows = {str(number): record.row_size for number, record in records.items() if record.is_sparse}
    return {
        "names": [[number, record.key] for number, record in records.items()],
        "shapes": {str(number): list(record.shape) for number, record in records.items()},
        **({"rows": rows} if rows else {}),
    }


def _text(key: Key) -> str:
    return "%s:%s" % (type(key).__name__, key)
