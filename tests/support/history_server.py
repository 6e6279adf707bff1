"""A server's history, scripted: messages go in on links, what the server sent comes out as values.

The server runs in the loop that is shipped, with its real arithmetic, over a transport that the test steps through. A
test sees messages and arrays only. How a message holds its entries is known to `data` and `pieces_of` here, and to
nothing else in the tests of servers.

Keys are letters here: `a` has key number 0, `b` 1. `a+2` is the piece of key `a` that begins at its element 2.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from cluster import TOKEN, config, server_loop
from scripted_transport import Stepped
from slowness import scaled

from distrun_runtime.arrays import dtypes
from distrun_runtime.arrays.dtypes import Buffer
from distrun_runtime.errors import KVError
from distrun_runtime.ops import compression, reduce
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.protocol import message as protocol
from distrun_runtime.protocol.handshake import Acceptor, NodeIdentity, Opener
from distrun_runtime.protocol.message import DTYPE_CODES, DTYPES, Entry, Kind, Message, Payload
from distrun_runtime.ps import role
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.server import Server
from distrun_runtime.transport.base import Arrived, Down, Event, Rejected, Up

Array = Any
Values = Mapping[str, Any]
"""Keys or pieces to what can be made an array of."""

SCHEDULER = role.SCHEDULER_LINK
LIMIT_S = scaled(60.0)

# Messages and what is in them


@dataclass(frozen=True)
class Piece:
    """What a message says of one piece of a value."""

    key: int
    offset: int = 0
    length: int = 2
    round: int = 0
    dtype: int = 0
    codec: int = 0
    payload: Buffer | None = None

    @property
    def name(self) -> str:
        """The key's letter and where the piece begins: `a`, `a+2`."""
        letter = chr(ord("a") + self.key) if self.key < 26 else str(self.key)
        return "%s+%d" % (letter, self.offset) if self.offset else letter

    @property
    def type(self) -> Any:
        """The dtype of its elements."""
        return DTYPES[self.dtype]


def data(kind: Kind, pieces: Iterable[Piece] = (), **head: Any) -> Message:
    """Return a message about pieces of values. The only place where a test's entries are made."""
    entries, payloads = [], []
    for piece in pieces:
        where = Payload.NONE if piece.payload is None else Payload.FRAME
        entries.append(Entry(piece.key, piece.offset, piece.length, piece.round, piece.dtype, piece.codec, where))
        if piece.payload is not None:
            payloads.append(piece.payload)
    return Message(kind, entries=protocol.entries_of(entries), payloads=payloads, **head)


def pieces_of(message: Message) -> list[Piece]:
    """Return what a message says of pieces of values. The only place where a test reads entries."""
    payloads = protocol.payloads_of(message.entries, message.payloads)
    return [
        Piece(*(entry.key, entry.offset, entry.length, entry.round, entry.dtype, entry.codec), payload)
        for entry, payload in zip(protocol.rows_of(message.entries), payloads, strict=True)
    ]


def with_pieces(message: Message, pieces: Iterable[Piece]) -> Message:
    """Return the message with other pieces."""
    made = data(message.kind, pieces)
    return replace(message, entries=made.entries, payloads=made.payloads)


def number_of(name: str) -> int:
    """Return the key number of a key or piece: 1 for `b` and `b+4`."""
    letter = name.partition("+")[0]
    return int(letter) if letter.isdigit() else ord(letter) - ord("a")


def offset_of(name: str) -> int:
    """Return where a piece begins: 4 for `b+4`."""
    return int(name.partition("+")[2] or 0)


def codec_number(name: str) -> int:
    """Return the number of a codec by its name, `rows` included; 0 for the empty name."""
    if name == "rows":
        return compression.ROWS
    return compression.CODECS[name].number if name else compression.NONE


def raw(array: Array) -> memoryview:
    """Return the bytes of an array, as a frame has them."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data


def rows_of(rows: Sequence[int], values: Any = None, dtype: Any = np.float32) -> Buffer:
    """Return the payload of a push of rows, or (without values) of a pull of them."""
    numbers = np.array(rows, np.int64)
    if values is None:
        return reduce.encode_rows(numbers)
    return reduce.encode(numbers, np.asarray(values, dtype))


@dataclass(frozen=True)
class Sent:
    """A message that the server sent."""

    link: str
    kind: Kind
    request: int
    store: int
    is_reply: bool
    is_error: bool
    body: Mapping[str, Any]
    pieces: Sequence[Piece] = field(repr=False)

    def __str__(self) -> str:
        return "%s %s%s" % (self.link, self.kind.name, "!" if self.is_error else "")

    @property
    def values(self) -> dict[str, Array]:
        """What it carries, by piece, decoded. Uncompressed values are views of what the server sent."""
        return {piece.name: self._value(piece) for piece in self.pieces if piece.payload is not None}

    @property
    def codecs(self) -> dict[str, str]:
        """How each piece is carried: `2bit`, `rows`, or empty."""
        names = {codec.number: name for name, codec in compression.CODECS.items()}
        names.update({compression.NONE: "", compression.ROWS: "rows"})
        return {piece.name: names[piece.codec] for piece in self.pieces}

    def _value(self, piece: Piece) -> Array:
        assert piece.payload is not None
        if piece.codec in (compression.NONE, compression.ROWS):
            is_empty = not memoryview(piece.payload).nbytes
            return np.empty(0, piece.type) if is_empty else np.frombuffer(piece.payload, piece.type)
        codec = compression.numbered(piece.codec)
        return codec.decode(piece.payload, piece.length, dict(codec.check(self.body.get("codec", {}))))


def said(sent: Iterable[Sent]) -> list[str]:
    """Return what was sent in short: `w0 PUSH`, `w1 PULL!` for a refusal."""
    return [str(each) for each in sent]


def reason(sent: Sequence[Sent]) -> str:
    """Return why the one reply that was sent is a refusal."""
    [one] = sent
    assert one.is_error, one
    return str(one.body["reason"])


def values(sent: Sequence[Sent]) -> dict[str, list[Any]]:
    """Return what the one reply that was sent carries."""
    [one] = sent
    assert one.is_reply, one
    assert not one.is_error, one.body
    return {name: np.asarray(dtypes.widen(value)).tolist() for name, value in one.values.items()}


# The server


class Reading:
    """A frame that somebody still reads, until the test says otherwise."""

    def __init__(self) -> None:
        self.is_over = False


def node(kind: str, rank: int, workers: int = 2, servers: int = 1) -> NodeIdentity:
    """Return a node of the test's job."""
    return NodeIdentity("test-job", kind, rank, 0, "d1", 5, "tcp://10.0.0.%d:1" % (rank + 1), workers, servers)


class History:
    """Server 0 of a job in its loop. Workers are the links `w0`, `w1`; other servers call on `s1` and are `server-1`.

    Store 1 has the keys `a` and `b` of two float32 each, all 0. With `has_keys=False` it has none, and with
    `is_registered=False` nobody has answered the server yet.

    Arguments:
        imports: modules that users' rules may come from.
        facts: added to the body of the first INIT: shapes, rows, staleness.
    """

    def __init__(
        self,
        type_name: str = "dist_sync",
        workers: int = 2,
        servers: int = 1,
        *,
        imports: Sequence[str] = ("rules_of_users", "norm_rules"),
        is_registered: bool = True,
        has_keys: bool = True,
        settings: Mapping[str, Any] | None = None,
        **facts: Any,
    ) -> None:
        self.workers, self.servers, self.type_name = workers, servers, type_name
        self.now = 0.0
        self.transport = Stepped()
        self.published: list[Mapping[str, str]] = []
        self.readings: list[Reading] = []
        """Of the frames sent since `read_slowly`."""
        self.finish: role.Finish | None = None
        self._out = io.StringIO()
        self._error: BaseException | None = None
        self._requests = 100
        self._seen = 0
        self._answered = 0
        """How many of the server's calls were answered."""
        self._is_answering = is_registered
        self._types: dict[int, Any] = {}
        self._lengths: dict[str, int] = {}
        own = config("server", **{"rank": 0, "workers": workers, "servers": servers, **(settings or {})})
        self._loop = server_loop(
            own,
            self.transport,
            "tcp://127.0.0.1:7",
            imports,
            out=self._out,
            publish=self.published.append,
            clock=lambda: self.now,
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.transport.settle()
        if is_registered:
            self._register()
        if is_registered and has_keys:
            assert said(self.init({"a": [0, 0], "b": [0, 0]}, **facts)) == ["w0 INIT"]

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def counters(self) -> dict[str, float]:
        """Return what the server counts for its agent."""
        server = self._loop._role
        assert isinstance(server, Server)
        return server.counters()

    def devices(self) -> Mapping[str, str]:
        """Return where its values are, as the server tells its agent."""
        server = self._loop._role
        assert isinstance(server, Server)
        return server.devices()

    def close(self) -> None:
        """End the loop."""
        self._loop.tell(15)
        self._loop.tell(15)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    @property
    def end(self) -> tuple[int, str]:
        """The code and the reason with which the server has ended."""
        assert self.finish is not None, "it has not ended"
        return self.finish.code, self.finish.reason

    @property
    def log(self) -> str:
        """What the server has logged."""
        return self._out.getvalue()

    @property
    def calls(self) -> list[str]:
        """Whom the server has called, in order."""
        return [link for link, _ in self.transport.opened]

    # Events

    def step(self, *events: Event) -> list[Sent]:
        """Let events happen and return what the server sent then. Whom it calls, answers."""
        self.transport.step(*events)
        self._answer_calls()
        if self._error is not None:
            raise self._error
        return self._sent()

    def tick(self, now: float) -> list[Sent]:
        """Let time pass; `now` is in seconds."""
        self.now = now
        return self.step()

    def signal(self, number: int = 15) -> list[Sent]:
        """Send the process a signal."""
        self._loop.tell(number)
        self.transport.settle()
        return self._sent()

    def hear(self, link: str, message: Message) -> list[Sent]:
        """Let a message arrive; without a request number it gets the next one."""
        return self.hear_all([(link, message)])

    def hear_all(self, messages: Iterable[tuple[str, Message]]) -> list[Sent]:
        """Let messages arrive at once, each on its link."""
        events = []
        for link, message in messages:
            self._requests += 1
            whole = replace(message, store=message.store or 1, request=message.request or self._requests)
            events.append(Arrived(link, self._frames(whole)))
        return self.step(*events)

    @property
    def last_request(self) -> int:
        """The request number of the last message that arrived."""
        return self._requests

    def hear_frames(self, link: str, frames: Sequence[Buffer]) -> list[Sent]:
        """Let frames arrive that need not be a message."""
        return self.step(Arrived(link, list(frames)))

    def cut(self, link: str, why: str = "its connection closed") -> list[Sent]:
        """Break a connection."""
        return self.step(Down(link, why))

    def turn_away(self, link: str, why: str) -> list[Sent]:
        """Whom the server called does not take its credentials."""
        return self.step(Rejected(link, why))

    def enter(self, link: str, who: NodeIdentity) -> str:
        """Let a node connect and prove itself; return why it was refused, or an empty text."""
        opener = Opener(who, TOKEN, "aa")
        [challenge] = self.step(Arrived(link, self._frames(opener.hello())))
        proof = opener.answer(Message(Kind.CHALLENGE, body=challenge.body))
        assert isinstance(proof, Message), proof
        [verdict] = self.step(Arrived(link, self._frames(proof)))
        return "" if verdict.kind is Kind.WELCOME else str(verdict.body["reason"])

    def read_slowly(self) -> None:
        """From now on what is sent is still being read until its `Reading` is over."""

        def lease() -> Reading:
            self.readings.append(Reading())
            return self.readings[-1]

        self.transport.make_lease = lease

    # Workers

    def init(self, given: Values, rank: int = 0, *, dtype: Any = np.float32, **body: Any) -> list[Sent]:
        """Let a worker initialise keys. The body says what is not given otherwise: type and names."""
        return self.hear("w%d" % rank, self.initial(given, dtype=dtype, **body))

    def initial(self, given: Values, *, dtype: Any = np.float32, **body: Any) -> Message:
        """Return the message by which a worker initialises keys."""
        names = [[number_of(name), name.partition("+")[0]] for name in given]
        self._types.update({number_of(name): np.dtype(dtype) for name in given})
        self._lengths.update({name: np.size(value) for name, value in given.items()})
        return data(Kind.INIT, self._pieces(given, 0), body={"type": self.type_name, "names": names, **body})

    def assign(self, given: Values, rank: int = 0) -> list[Sent]:
        """Let a worker replace values."""
        return self.hear("w%d" % rank, data(Kind.INIT, self._pieces(given, 0), body={"assign": True}))

    def push(
        self,
        rank: int,
        number: int,
        given: Values,
        *,
        codec: str = "",
        changes: Any = None,
        request: int = 0,
        **body: Any,
    ) -> list[Sent]:
        """Let a worker push values for a round. With a codec they are encoded, or are payloads already (bytes).

        Arguments:
            changes: fields of all pieces to be replaced: what a mistaken worker would send.
            request: number of a request that is sent again.
        """
        pieces = self._pieces(given, number, codec, body.get("codec", {}), changes)
        return self.hear("w%d" % rank, data(Kind.PUSH, pieces, body=body, request=request))

    def push_all(self, number: int, given: Values) -> None:
        """Let both workers push the same values for a round."""
        for rank in (0, 1):
            self.push(rank, number, given)

    def skip(self, rank: int, number: int, *names: str, note: Any = None, changes: Any = None) -> list[Sent]:
        """Let a worker skip a round of keys."""
        body = {"skip": {"why": rank} if note is None else note}
        pieces = [replace(self._piece(name, number), **(changes or {})) for name in names or ("a",)]
        return self.hear("w%d" % rank, data(Kind.PUSH, pieces, body=body))

    def pull(
        self,
        rank: int,
        number: int,
        *names: str,
        codec: str = "",
        rows: Sequence[int] | None = None,
        changes: Any = None,
        request: int = 0,
        **body: Any,
    ) -> list[Sent]:
        """Let a worker pull keys as of a round; with `rows` only these. `request` is as for `push`."""
        carried = codec_number("rows" if rows is not None else codec)
        payload = None if rows is None else rows_of(rows)
        pieces = [
            replace(self._piece(name, number), **{"codec": carried, "payload": payload, **(changes or {})})
            for name in names or ("a",)
        ]
        return self.hear("w%d" % rank, data(Kind.PULL, pieces, body=body, request=request))

    def by_bucket(
        self, kind: Kind, rank: int, bucket: int, step: int, values: Any = None, *, request: int = 0
    ) -> list[Sent]:
        """Let a worker push or pull the entries of a bucket, so many rounds later; `values` are end to end."""
        payloads = [] if values is None else [raw(np.asarray(values, np.float32))]
        return self.hear("w%d" % rank, Message(kind, bucket=bucket, step=step, payloads=payloads, request=request))

    def register(self, rank: int, bucket: int, number: int, given: Values, *, request: int = 0) -> list[Sent]:
        """Let a worker push values for a round, and have their entries remembered as a bucket."""
        pieces = self._pieces(given, number)
        return self.hear("w%d" % rank, data(Kind.PUSH, pieces, bucket=bucket, request=request))

    def ask(self, rank: int, kind: Kind, store: int = 1, **body: Any) -> list[Sent]:
        """Let a worker ask for something that is about no key: STATS, ROUNDS, PROFILE."""
        return self.hear("w%d" % rank, data(kind, store=store, body=body))

    def rounds(self, rank: int = 0) -> dict[str, int]:
        """Return how many rounds of each key are over, as a worker that joins is told."""
        [reply] = self.ask(rank, Kind.ROUNDS)
        return {chr(ord("a") + key): number for key, number in reply.body["rounds"]}

    def stats(self, rank: int = 0, store: int = 1) -> Mapping[str, Any]:
        """Return what the server counts."""
        [reply] = self.ask(rank, Kind.STATS, store)
        return reply.body

    # Other servers

    def norms(self, number: int, key: str = "a", *, rank: int = -1, script: int = 0, **body: Any) -> list[Sent]:
        """Let NORMS of server 1 arrive: of a round, or in async of a worker's push.

        Arguments:
            body: parts ([offset, length, squares]), or error and traceback.
        """
        facts = {"script": script, "key": number_of(key), "rank": rank, "round": number}
        return self.hear("s1", data(Kind.NORMS, body={**facts, **body}))

    # The scheduler

    def scheduler(self, kind: Kind, request: int = 0, *, store: int = 1, **body: Any) -> list[Sent]:
        """Let a message of the scheduler arrive."""
        return self.step(Arrived(SCHEDULER, self._frames(data(kind, store=store, request=request, body=body))))

    def rule(self, name: str | None, **params: Any) -> list[Sent]:
        """Let the scheduler set the store's rule; None: it has none from now on."""
        spec = None if name is None else dict(RuleSpec.of(name, params).to_json())
        return self.scheduler(Kind.RULE, 7, spec=spec)

    def join(self, rank: int, *, is_last: bool = False) -> list[Sent]:
        """Let the scheduler say that a worker joined; the last one ends the joining."""
        return self.scheduler(Kind.JOIN, 3, rank=rank, **({"all": True} if is_last else {}))

    def leave(self, rank: int) -> list[Sent]:
        """Let the scheduler say that a worker left the store."""
        return self.scheduler(Kind.LEFT, 6, rank=rank)

    def bye(self, rank: int, who: str = "") -> list[Sent]:
        """Let the scheduler say that a worker has ended."""
        return self.scheduler(Kind.LEFT, rank=rank, who=who or "worker-%d" % rank)

    def lost(self, who: str, why: str) -> list[Sent]:
        """Let the scheduler say that a node is lost."""
        return self.scheduler(Kind.LOST, who=who, reason=why)

    def breaks(self, why: str) -> list[Sent]:
        """Let the server's device fail for good."""
        engine = self._loop._engine
        assert isinstance(engine, WorkEngine)
        engine._placement.failed = KVError(why)
        return self.step()

    # Inside

    def _run(self) -> None:
        try:
            self.finish = self._loop.run()
        except BaseException as err:
            self._error = err
        finally:
            self.transport.end()

    def _register(self) -> None:
        self.step()
        nodes = [node("server", rank, self.workers, self.servers) for rank in range(self.servers)]
        nodes += [node("worker", rank, self.workers, self.servers) for rank in range(self.workers)]
        self.scheduler(Kind.ROSTER, nodes=[asdict(each) for each in nodes], rank=0)
        for each in nodes:
            link = ("w%d" if each.role == "worker" else "s%d") % each.rank
            if link != "s0":
                assert not self.enter(link, each)

    def _answer_calls(self) -> None:
        """Be whom the server called: prove ourselves, and welcome it."""
        while self._is_answering and self._answered < len(self.transport.opened):
            link, _ = self.transport.opened[self._answered]
            self._answered += 1
            role_, _, rank = link.partition("-")
            acceptor = Acceptor(replace(config(role_).identity(""), rank=int(rank or -1)), TOKEN, "bb")
            self.transport.step(Up(link))
            [hello] = self._take(link)
            self.transport.step(Arrived(link, self._frames(acceptor.challenge(hello))))
            [proof] = self._take(link)
            self.transport.step(Arrived(link, self._frames(acceptor.verdict(proof, lambda peer: ""))))

    def _take(self, link: str) -> list[Message]:
        """Take out what was sent on a link since the test last looked."""
        new = self.transport.sent[self._seen :]
        self.transport.sent[self._seen :] = [each for each in new if each[0] != link]
        return [protocol.decode(frames) for where, frames in new if where == link]

    def _sent(self) -> list[Sent]:
        new, self._seen = self.transport.sent[self._seen :], len(self.transport.sent)
        return [self._of(link, protocol.decode(frames)) for link, frames in new]

    def _of(self, link: str, message: Message) -> Sent:
        return Sent(
            *(link, message.kind, message.request, message.store, message.is_reply, message.is_error),
            *(message.body, pieces_of(message)),
        )

    def _frames(self, message: Message) -> list[Buffer]:
        # As from a socket: bytes of their own, which nobody else writes.
        return [bytes(memoryview(frame)) for frame in protocol.encode(message)]

    def _pieces(
        self, given: Values, number: int, codec: str = "", params: Any = None, changes: Any = None
    ) -> list[Piece]:
        found = []
        for name, value in given.items():
            piece = self._piece(name, number)
            if isinstance(value, (bytes, memoryview)):
                piece = replace(piece, payload=value, codec=codec_number(codec))
            elif codec:
                of = compression.CODECS[codec]
                flat = np.asarray(value, np.float32).reshape(-1)
                payload = of.encode(flat, None, dict(of.check(params or {})))
                piece = replace(piece, length=len(flat), payload=payload, codec=of.number)
            else:
                array = dtypes.narrow(np.asarray(value, dtypes.work_dtype(piece.type)), piece.type)
                piece = replace(piece, length=array.size, payload=raw(array))
            found.append(replace(piece, **(changes or {})))
        return found

    def _piece(self, name: str, number: int) -> Piece:
        dtype = self._types.get(number_of(name), np.dtype(np.float32))
        length = self._lengths.get(name, 2)
        return Piece(number_of(name), offset_of(name), length, number, DTYPE_CODES[dtype])
