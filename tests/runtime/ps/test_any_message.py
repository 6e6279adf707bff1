"""No message of a member ends a scheduler or a server: messages of every kind, damaged in every way."""

from __future__ import annotations

import copy
import io
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cluster import TOKEN, config, loop_of
from history_server import SCHEDULER, History, Piece, data, node, pieces_of, said, values, with_pieces
from inproc import InprocNetwork
from slowness import scaled

from distrun_runtime.protocol import message
from distrun_runtime.protocol.handshake import Opener
from distrun_runtime.protocol.message import Kind, Message
from distrun_runtime.ps import role
from distrun_runtime.ps.scheduler import Scheduler
from distrun_runtime.transport.base import Arrived, Down, Up

LIMIT_S = scaled(60.0)
MESSAGES = 1500
"""Damaged ones, for each seed."""

VALUE = np.ones(2, np.float32).tobytes()
WIDE = np.ones(12, np.float32).tobytes()
JUNK: list[Any] = [
    *(None, True, 0, -1, 1.5, 2**70, float("inf"), float("nan"), "", "x", "\ud800", "\x1b[2J", "worker-0"),
    *([], [1], [[]], [None], {}, {"x": 1}, {"": []}, {"0": "x"}),
]

TO_SERVER = [
    data(Kind.PUSH, [Piece(0, round=1, payload=VALUE)], body={"scale": 0.5}),
    data(
        Kind.PUSH,
        [Piece(0, round=1, codec=1, payload=bytes(4)), Piece(1, round=1, payload=VALUE)],
        body={"codec": {"threshold": 0.5}},
    ),
    data(Kind.PUSH, [Piece(2, 0, 12, 1, codec=4, payload=bytes(16))]),
    data(Kind.PUSH, [Piece(0, round=1)], body={"skip": {"why": [1]}}),
    data(Kind.PULL, [Piece(0), Piece(1, round=1)], body={"codec": {"threshold": 0.5}}),
    data(Kind.PULL, [Piece(0)], body={"codec": "x"}),
    data(Kind.PULL, [Piece(2, 0, 12, codec=16, payload=bytes(16))]),
    data(
        Kind.INIT,
        [Piece(3, 0, 12, payload=WIDE)],
        body={"type": "dist_sync", "names": [[3, "c"]], "shapes": {"3": [6, 2]}, "rows": {"3": 2}, "staleness": 1},
    ),
    data(Kind.INIT, [Piece(0, payload=VALUE)], body={"assign": True}),
    Message(Kind.ROUNDS),
    Message(Kind.STATS),
    Message(Kind.PROFILE, body={"action": "start"}),
    Message(Kind.NORMS, body={"script": 0, "key": 0, "rank": -1, "round": 1, "parts": [[0, [1.0]]]}),
    Message(Kind.BARRIER, body={"number": 1}),
]
SPEC = {"name": "sgd", "params": {"learning_rate": 0.1}, "lr_mult": {}, "wd_mult": {}}
RECORD = {"key": "a", "shape": [2], "dtype": "float32", "stype": "default", "codec": None}
FROM_SCHEDULER = [
    Message(Kind.RULE, request=1, body={"spec": SPEC, "check": True}),
    Message(Kind.RULE, request=1, body={"spec": SPEC}),
    Message(Kind.JOIN, request=1, body={"rank": 1}),
    Message(Kind.LEFT, request=1, body={"rank": 1}),
    Message(Kind.LEFT, body={"rank": 1, "who": "worker-1@d1"}),
    Message(Kind.LOAD, request=1, body={"action": "drop"}),
    Message(Kind.CLOSE, request=1),
]
TO_SCHEDULER = [
    Message(Kind.OPEN, body={"number": 1, "type": "dist_sync", "staleness": 2, "unused": [1]}),
    Message(Kind.BARRIER, body={"number": 1, "take_back": True}),
    Message(Kind.KEYS, body={"number": 2, "records": [RECORD]}),
    Message(Kind.KEYS, body={"number": 2, "records": [RECORD], "assign": True}),
    Message(Kind.INIT, body={"number": 2, "error": ""}),
    Message(Kind.BARRIER, body={"number": 3, "error": "no"}),
    Message(Kind.RULE, body={"spec": SPEC, "replace": True}),
    Message(Kind.RULE, body={"change": {"params": {"learning_rate": 0.2}, "lr_mult": {"a": 2.0}, "wd_mult": {}}}),
    Message(Kind.SAVE, body={"number": 4, "folder": "/nowhere/at/all", "residuals": False, "part": "p"}),
    Message(Kind.LOAD, body={"number": 5, "folder": "/nowhere/at/all", "manifest": {"keys": []}, "look": True}),
    Message(Kind.JOIN, body={"number": 6}),
    Message(Kind.LEFT, body={}),
    Message(Kind.CLOSE),
    Message(Kind.STATS),
    Message(Kind.RULE, is_reply=True, body={}),
]


def spoil(value: Any, chance: random.Random) -> Any:
    """Return a JSON value with one thing in it changed."""
    if not isinstance(value, (dict, list)) or not value or chance.random() < 0.2:
        return copy.deepcopy(chance.choice(JUNK))
    value = copy.copy(value)
    at = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
    what = chance.random()
    if what < 0.2:
        del value[at]
    elif what < 0.3 and isinstance(value, list):
        value.append(copy.deepcopy(chance.choice(JUNK)))
    else:
        value[at] = spoil(value[at], chance)
    return value


def spoil_piece(piece: Piece, chance: random.Random) -> Piece:
    name = chance.choice(["key", "offset", "length", "round", "dtype", "codec"])
    if name == "key":
        return replace(piece, key=chance.choice([0, 1, 2, 3, 99, 2**32 - 1]))
    if name in ("dtype", "codec"):
        return replace(piece, **{name: chance.choice([0, 1, 2, 3, 4, 5, 11, 16])})
    return replace(piece, **{name: chance.choice([0, 1, 2, 3, 7, 12, 2**31, 2**63])})


def damaged(good: Message, chance: random.Random, request: int) -> list[message.Buffer]:
    """Return the frames of a message with something wrong in it."""
    body: Any = dict(good.body)
    pieces = pieces_of(good)
    for _ in range(chance.choice([0, 1, 1, 2])):
        if body and chance.random() < 0.7:
            body = spoil(body, chance)
        else:
            extra = chance.choice(
                ["codec", "scale", "names", "staleness", "number", "rows", "shapes", "action", "skip"]
            )
            body = {**(body if isinstance(body, Mapping) else {}), extra: copy.deepcopy(chance.choice(JUNK))}
    if pieces and chance.random() < 0.5:
        at = chance.randrange(len(pieces))
        pieces[at] = spoil_piece(pieces[at], chance)
        if chance.random() < 0.3:
            pieces.append(pieces[at])
    carried = [at for at, piece in enumerate(pieces) if piece.payload is not None]
    if carried and chance.random() < 0.4:
        at = chance.choice(carried)
        pieces[at] = replace(pieces[at], payload=chance.randbytes(chance.choice([0, 1, 4, 8, 16, 48])))
    if not isinstance(body, Mapping):
        body = {}
    number = chance.choice([request, request, 0])
    made = replace(good, store=chance.choice([1, 1, 1, 0, 2]), request=number, body=body)
    frames = message.encode(with_pieces(made, pieces))
    if chance.random() < 0.02:
        frames[1] = chance.choice([b"[]", b"{", b"null", b'{"a":' * 2000, b"\xff"])
    if chance.random() < 0.05:
        frames = [*frames, VALUE] if chance.random() < 0.5 else frames[:-1]
    return frames


class Member:
    """A node that is proven, and sends what it likes."""

    def __init__(self, network: InprocNetwork, endpoint: str, kind: str, rank: int) -> None:
        self.network, self.endpoint, self.kind, self.rank = network, endpoint, kind, rank
        self.enter()

    def enter(self) -> None:
        self.transport = self.network.transport()
        self.transport.connect("node", self.endpoint)
        me = replace(node(self.kind, self.rank), workers=2, servers=1)
        opener = Opener(me, TOKEN, "aa")
        assert isinstance(self.event(), Up)
        self.transport.send("node", message.encode(opener.hello()))
        proof = opener.answer(self.hear())
        self.transport.send("node", message.encode(proof))
        assert self.hear().kind is Kind.WELCOME

    def event(self) -> Any:
        deadline = time.monotonic() + LIMIT_S
        self.got = getattr(self, "got", [])
        while not self.got:
            assert time.monotonic() < deadline, "nothing came"
            self.got += self.transport.poll(0.5)
        return self.got.pop(0)

    def hear(self) -> Message:
        event = self.event()
        assert isinstance(event, Arrived), event
        return message.decode(event.frames)

    def answer_to(self, sent: Message) -> Message:
        self.transport.send("node", message.encode(sent))
        while True:
            heard = self.hear()
            if heard.is_reply and heard.request == sent.request:
                return heard

    def throw_away(self) -> bool:
        """Forget what came; return whether the connection stands."""
        self.got += self.transport.poll(0)
        events, self.got = self.got, []
        return not any(isinstance(event, Down) for event in events)


class Node:
    """A scheduler with its loop in a thread."""

    def __init__(self) -> None:
        self.network = InprocNetwork()
        transport = self.network.transport()
        self.endpoint = "tcp://127.0.0.1:%d" % transport.bind("127.0.0.1")
        decides = Scheduler(config("scheduler", workers=2, servers=1), self.endpoint)
        self.loop = loop_of(decides, transport, out=io.StringIO())
        self.finish: role.Finish | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.finish = self.loop.run()

    def end(self) -> None:
        self.loop.tell(15)
        self.loop.tell(15)
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        assert self.finish.code == 0, self.finish


@pytest.fixture
def scheduler() -> Iterator[Node]:
    made = Node()
    made.thread.start()
    yield made
    made.end()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("type_name", ["dist_sync", "dist_async"])
def test_no_message_of_a_member_ends_a_server(seed: int, type_name: str, serving: Callable[..., History]) -> None:
    chance = random.Random(seed)
    server = serving(type_name, has_keys=False)
    keys, facts = {"a": [1, 1], "b": [1, 1], "c": [1] * 12}, {"shapes": {"2": [6, 2]}, "rows": {"2": 2}}
    assert said(server.init(keys, **facts)) == ["w0 INIT"]
    for number in range(MESSAGES):
        link, messages = (SCHEDULER, FROM_SCHEDULER) if chance.random() < 0.1 else ("w1", TO_SERVER)
        sent = server.hear_frames(link, damaged(chance.choice(messages), chance, 1000 + number))
        if any(each.kind is Kind.REFUSED for each in sent):
            assert server.enter("w1", node("worker", 1)) == ""
        if number % 50 == 0:
            assert server.stats(store=0)["server"] == "server-0"
    # Started anew it serves as ever, after all of this.
    server.scheduler(Kind.STOP, 1, stay=True)
    assert said(server.init(keys, **facts)) == ["w0 INIT"]
    assert values(server.pull(0, 0)) == {"a": [1, 1]}
    assert server.finish is None


@pytest.mark.parametrize("seed", range(6))
def test_no_message_of_a_member_ends_the_scheduler(scheduler: Node, seed: int) -> None:
    chance = random.Random(seed)
    server = Member(scheduler.network, scheduler.endpoint, "server", 0)
    good, bad = (Member(scheduler.network, scheduler.endpoint, "worker", rank) for rank in range(2))
    for number in range(MESSAGES):
        sender = server if chance.random() < 0.1 else bad
        sender.transport.send("node", damaged(chance.choice(TO_SCHEDULER), chance, 1000 + number))
        if number % 50 == 0:
            good.answer_to(Message(Kind.STATS, request=10 + number))
            if not (bad.throw_away() and server.throw_away()):
                break  # an answer that cannot be read is the end of its connection, and so of the job
    assert scheduler.thread.is_alive()
