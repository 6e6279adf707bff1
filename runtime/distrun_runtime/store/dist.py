"""The stores of a job: values live on the servers, cut into pieces; workers push and pull them.

A value is cut by `algo.partition`: its shards (one server each) and, within a shard, pieces of at most 4 MiB. A
piece is a slot on its server with rounds of its own. Here a call becomes messages - the pieces of its keys, by
server - and replies become values. Waiting is for `Pending`; order, priorities and deaths are the node's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from distrun_runtime.algo import partition
from distrun_runtime.algo.reduce import Array
from distrun_runtime.errors import KVError, RuntimeFault
from distrun_runtime.net.message import Buffer, Kind, Message
from distrun_runtime.node import config as configs
from distrun_runtime.node import session
from distrun_runtime.node.pending import Pending
from distrun_runtime.node.role import SCHEDULER_LINK
from distrun_runtime.node.serve import serve
from distrun_runtime.store.base import KVStore, Updater
from distrun_runtime.store.pieces import Layout, Part, Target, cut, groups
from distrun_runtime.store.record import Record
from distrun_runtime.store.values import Key

CANONICAL = {"dist": "dist_sync"}
"""Type names that mean another one; workers must agree on what they mean."""


def create_dist(type_name: str) -> KVStore:
    """Return a store of this process's job; in a server or scheduler process, serve and then end.

    Raises:
        SystemExit: this process is a server or scheduler (DMLC_ROLE) and the job has ended: with its exit code.
        ContractError, Refused, TimedOut, PeerLost: the job cannot be joined, and why.
    """
    role = configs.role_of()
    if role in ("server", "scheduler"):
        raise SystemExit(serve(role))
    return DistStore(type_name, session.current(lambda: configs.read("worker")))


class DistStore(KVStore):
    """A key-value store on the servers of the job.

    Threads: any may call; calls are ordered as they take the store's lock.
    """

    def __init__(self, type_name: str, node: session.Session) -> None:
        super().__init__(type_name)
        self._node = node
        self._number = node.next_store()
        self._is_async = "async" in type_name
        self._lock = threading.RLock()
        self._calls = 0
        self._layouts: dict[Key, Layout] = {}
        self._rounds: dict[Key, int] = {}
        """Key to the number of this worker's pushes: the round of the last one."""
        self._unheard: list[Pending] = []
        self._late: list[RuntimeFault] = []
        """Errors of pushes that nobody waited for."""
        node.before_end(self._flush_at_end)
        self._together(Kind.OPEN, "create(%r)" % type_name, type=CANONICAL.get(type_name, type_name))

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._node.rank

    @property
    def num_workers(self) -> int:
        """Number of workers of the job."""
        return self._node.config.workers

    # Hooks of KVStore

    def _init(self, items: list[tuple[Key, Array]]) -> list[Record]:
        self._raise_late()
        declared = [
            {"key": key, "shape": list(array.shape), "dtype": str(array.dtype)} for key, array in items
        ]  # fmt: skip
        what = "init of %s" % _keys(key for key, _ in items)
        with self._lock:
            number = self._next_call()
            reply = self._ask(what, Kind.KEYS, {"number": number, "records": declared})[0]
            places = {
                _text(key): (int(pair[0]), int(pair[1]))
                for key, pair in zip(reply.body["keys"], reply.body["numbers"], strict=True)
            }
            records = [self._record_of(key, array, places[_text(key)]) for key, array in items]
            if self.rank == 0:
                self._fill(what, number, records, items)
            return records

    def _push(self, items: list[tuple[Record, Array]], priority: int) -> None:
        self._raise_late()
        with self._lock:
            for record, _ in items:
                self._rounds[record.key] += 1
            parts, buffers = self._cut(items)
            messages = [message for message, _ in self._pack(Kind.PUSH, parts, buffers, priority)]
            what = "push of %s" % _keys(record.key for record, _ in items)
            pending = self._node.ask(what, messages, self._late.append)
            self._unheard = [*(old for old in self._unheard if not old.is_done), pending]

    def _pull(self, items: list[tuple[Record, list[Array]]], priority: int) -> None:
        self._raise_late()
        with self._lock:
            parts = [
                Part(record, self._layouts[record.key].number, piece)
                for record, _ in items
                for piece in self._layouts[record.key].pieces
            ]
            packed = self._pack(Kind.PULL, parts, [], priority)
            what = "pull of %s" % _keys(record.key for record, _ in items)
            pending = self._node.ask(what, [message for message, _ in packed])
        replies = pending.wait(self._node.config.op_timeout_s)
        # An earlier push may have been refused: then the servers answered that first, and what came is not its result.
        self._raise_late()
        outs = {record.key: Target(arrays) for record, arrays in items}
        for (_, held), reply in zip(packed, replies, strict=True):
            for part, payload in zip(held, reply.payloads, strict=True):
                outs[part.record.key].write(part.piece, np.frombuffer(payload, part.record.dtype))
        for target in outs.values():
            target.finish()

    def _pushpull(self, items: list[tuple[Record, Array, list[Array]]], priority: int) -> None:
        # The pull follows its push on the same connections and asks for its round.
        with self._lock:
            self._push([(record, array) for record, array, _ in items], priority)
        self._pull([(record, arrays) for record, _, arrays in items], priority)

    def _barrier(self) -> None:
        self._drain()
        self._together(Kind.BARRIER, "barrier")

    def _set_rule(self, name: str, params: dict[str, Any], replace: bool) -> None:
        self._drain()
        self._ask("set_optimizer(%r)" % name, Kind.RULE, {"name": name, "params": params, "replace": replace})

    def _set_updater(self, updater: Updater | None) -> None:
        raise KVError(
            "a %r store updates on its servers, where a function of this process cannot run: use"
            " kv.set_optimizer('sgd', learning_rate=...), or leave the rule out and update what pull returns"
            % self.type
        )

    def _join(self) -> None:
        self._drain()
        self._together(Kind.JOIN, "join")
        holders = {piece.server for layout in self._layouts.values() for piece in layout.pieces}
        messages = [("server-%d" % server, Message(Kind.ROUNDS, store=self._number)) for server in sorted(holders)]
        by_number = {layout.number: key for key, layout in self._layouts.items()}
        for reply in self._node.ask("join", messages).wait(self._node.config.op_timeout_s):
            for number, done in reply.body["rounds"]:
                # All have joined, so no round is open: the next push of everybody is the round after the last.
                self._rounds[by_number[number]] = max(self._rounds[by_number[number]], done)

    def _leave(self) -> None:
        self._drain()
        self._ask("leave", Kind.LEFT, {})

    def _close(self) -> None:
        self._drain()

    def _abort(self, error: BaseException) -> None:
        self._node.note_crash(error)

    # Calls that all workers make together

    def _together(self, kind: Kind, what: str, **body: object) -> None:
        with self._lock:
            number = self._next_call()
        self._ask(what, kind, {"number": number, **body})

    def _next_call(self) -> int:
        self._calls += 1
        return self._calls

    def _ask(self, what: str, kind: Kind, body: dict[str, Any]) -> tuple[Message, ...]:
        message = Message(kind, store=self._number, body=body)
        return self._node.ask(what, [(SCHEDULER_LINK, message)]).wait(self._node.config.op_timeout_s)

    # Keys and pieces

    def _record_of(self, key: Key, array: Array, place: tuple[int, int]) -> Record:
        number, index = place
        found = partition.shards(index, array.size, self._node.num_servers, self._node.config.bigarray_bound)
        self._layouts[key] = Layout(number, partition.pieces(found, array.dtype.itemsize))
        self._rounds[key] = 0
        return Record(key, index, array.shape, array.dtype, array.size)

    def _fill(self, what: str, number: int, records: list[Record], items: list[tuple[Key, Array]]) -> None:
        """Send rank 0's values to the servers, and tell the scheduler when they are there."""
        names = [[self._layouts[record.key].number, record.key] for record in records]
        parts, buffers = self._cut([(record, array) for record, (_, array) in zip(records, items, strict=True)])
        body = {"type": CANONICAL.get(self.type, self.type), "names": names}
        packed = self._pack(Kind.INIT, parts, buffers, 0, body)
        error = ""
        try:
            self._node.ask(what, [message for message, _ in packed]).wait(self._node.config.op_timeout_s)
        except KVError as err:
            error = str(err)
            raise
        finally:
            self._ask(what, Kind.INIT, {"number": number, "error": error})

    def _cut(self, items: Iterable[tuple[Record, Array]]) -> tuple[list[Part], list[Buffer]]:
        return cut((record, self._layouts[record.key], array) for record, array in items)

    def _pack(
        self,
        kind: Kind,
        parts: list[Part],
        buffers: Sequence[Buffer],
        priority: int,
        body: dict[str, Any] | None = None,
    ) -> list[tuple[tuple[str, Message], list[Part]]]:
        """Return the messages that carry `parts`, each with its link and what it holds."""
        packed = []
        for group in groups(parts):
            held = [parts[number] for number in group]
            message = Message(
                kind,
                store=self._number,
                priority=priority,
                entries=tuple(part.entry(self._rounds[part.record.key], bool(buffers)) for part in held),
                body=body or {},
                payloads=[buffers[number] for number in group] if buffers else [],
            )
            packed.append((("server-%d" % held[0].piece.server, message), held))
        return packed

    # Errors and ends

    def _raise_late(self) -> None:
        """Raise the error of an earlier push that nobody waited for."""
        with self._lock:
            if self._late:
                errors, self._late[:] = list(self._late), []
                raise errors[0]

    def _drain(self) -> None:
        """Wait until the servers have all that was pushed."""
        with self._lock:
            unheard, self._unheard = self._unheard, []
        for pending in unheard:
            if not pending.is_done:
                try:
                    pending.wait(self._node.config.op_timeout_s)
                except RuntimeFault:
                    break  # It is among the late ones.
        self._raise_late()

    def _flush_at_end(self) -> None:
        if not self._ended:
            self._drain()


def _keys(keys: Iterable[Key]) -> str:
    names = [repr(key) for key in keys]
    shown = ", ".join(names[:3]) + (", ... (%d keys)" % len(names) if len(names) > 3 else "")
    return "key %s" % shown if len(names) == 1 else "keys %s" % shown


def _text(key: Key) -> str:
    return "%s:%s" % (type(key).__name__, key)
