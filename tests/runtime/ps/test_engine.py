"""The engine: what is done at once and what later, in which order, and what its end leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from gated_rules import Gate
from history_server import Piece, data, raw
from slowness import scaled

from distrun_runtime.arrays import device as devices
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec
from distrun_runtime.ops.partition import Shard
from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import engine as engines
from distrun_runtime.ps import role
from distrun_runtime.ps.engine import Reply, WorkEngine
from distrun_runtime.ps.shards import Store

LIMIT_S = 60.0
LENGTH = 1024
MUCH = 4 * LENGTH


class Bench:
    """An engine with one store of two keys: `a` of `LENGTH` elements, much work, and `b` of two, little."""

    def __init__(self, rule: str = "") -> None:
        self.engine = WorkEngine(devices.get("cpu:0"), imports=("gated_rules",), much_bytes=MUCH)
        self.woken = threading.Semaphore(0)
        self.engine.wakes(self.woken.release)
        self.store = Store(1, workers=1)
        pieces = [Piece(0, length=LENGTH, payload=raw(np.zeros(LENGTH, np.float32))), self._small(0, 0)]
        message = data(Kind.INIT, pieces)
        shards = self.store.add([Shard(0, 0, LENGTH, key=0), Shard(0, 0, 2, key=1)])
        self.take(self.engine.do(role.Fill(role.Batch(self.store, shards, message, message.entries))))
        if rule:
            spec = RuleSpec(rule, {}).to_json()
            self.take(self.engine.do(role.SetRule(1, spec, message)))

    def _small(self, number: int, value: float) -> Piece:
        return Piece(1, 0, 2, number, payload=raw(np.full(2, value, np.float32)))

    def take(self, done: Any) -> Any:
        """Return what came of work, now or when it is done."""
        done = self.engine.result(waits=True) if done is None else done
        if done.error is not None:
            raise done.error
        return done.value

    def apply(self, number: int, *, is_much: bool, value: float = 1) -> role.Apply:
        """Return the work of one round of one key, to which one worker gave a value."""
        payload = raw(np.full(LENGTH, value, np.float32))
        piece = Piece(0, 0, LENGTH, number, payload=payload) if is_much else self._small(number, value)
        message = data(Kind.PUSH, [piece])
        shards = np.array([0 if is_much else 1])
        return role.Apply(
            self.store, number, shards, rank=0, last=role.Batch(self.store, shards, message, message.entries)
        )

    def ask(self, ticket: int, shard: int) -> list[role.EngineWork]:
        """Return the work of a pull."""
        entries = data(Kind.PULL, [Piece(shard, 0, 2 if shard else LENGTH)]).entries
        message = data(Kind.PULL, [])
        lend = role.Lend(ticket, self.store, np.array([shard]), np.array([0]))
        return [lend, role.Deliver(ticket, "w0", message, entries)]


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Make engines, and end them."""
    made: list[Bench] = []

    def make(rule: str = "") -> Bench:
        made.append(Bench(rule))
        return made[-1]

    yield make
    Gate.leave.set()
    for each in made:
        each.engine.close()


GATED = "gated_rules:Gated"


def values(reply: Reply) -> list[float]:
    return [float(each) for frame in reply.message.payloads for each in np.frombuffer(frame, np.float32)[:2]]


def test_little_work_is_done_at_once_and_much_work_later(bench: Callable[..., Bench]) -> None:
    one = bench()
    little = one.engine.do(one.apply(1, is_much=False))
    assert little.error is None
    assert one.engine.do(one.apply(1, is_much=True)) is None
    assert one.engine.under_way == 1
    done = one.engine.result(waits=True)
    assert done.error is None
    assert one.engine.under_way == 0


def test_results_come_in_the_order_of_the_work_whatever_its_size(bench: Callable[..., Bench]) -> None:
    one = bench()
    asked = [one.apply(1, is_much=True), one.apply(1, is_much=False), *one.ask(1, 0), *one.ask(2, 1)]
    assert [one.engine.do(each) for each in asked] == [None] * len(asked)
    done = [one.engine.result(waits=True) for _ in asked]
    assert [each.work for each in done if each is not None] == asked
    assert one.engine.result() is None


@pytest.mark.parametrize("how", ["a round", "an assignment"])
def test_a_value_that_a_reply_reads_is_the_same_after_an_update_of_it_has_failed(
    bench: Callable[..., Bench], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KVError("the device has failed")

    one = bench()
    one.take(one.engine.do(one.apply(1, is_much=False, value=7)))
    lend, deliver = one.ask(1, 1)
    one.take(one.engine.do(lend))
    work = one.apply(2, is_much=False, value=8)
    assert work.last is not None
    with monkeypatch.context() as patch, pytest.raises(KVError, match="has failed"):
        patch.setattr(type(one.engine._device), "sums", fail)
        one.take(one.engine.do(work if how == "a round" else role.Assign(work.last)))
    for each in one.ask(2, 1):
        second = one.take(one.engine.do(each))
    assert values(one.take(one.engine.do(deliver))) == values(second) == [7, 7]


def test_the_loop_is_woken_once_for_results_that_it_has_not_taken(bench: Callable[..., Bench]) -> None:
    Gate.close()
    one = bench(GATED)
    for number in (1, 2, 3):
        one.engine.do(one.apply(number, is_much=True))
    assert Gate.entered.wait(scaled(LIMIT_S))
    assert one.engine.result() is None
    assert not one.woken.acquire(blocking=False)
    Gate.leave.set()
    assert one.woken.acquire(timeout=scaled(LIMIT_S))
    for _ in range(3):
        one.take(None)


def test_with_much_work_in_the_queue_more_is_taken_only_when_the_engine_has_caught_up(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "QUEUE_BYTES", MUCH)
    Gate.close()
    one = bench(GATED)
    one.engine.do(one.apply(1, is_much=True))
    assert Gate.entered.wait(scaled(LIMIT_S))
    taken = threading.Event()

    def ask_for_more() -> None:
        one.engine.do(one.apply(2, is_much=True))
        taken.set()

    asking = threading.Thread(target=ask_for_more, daemon=True)
    asking.start()
    assert not taken.wait(0.2)
    Gate.leave.set()
    assert taken.wait(scaled(LIMIT_S))
    asking.join(scaled(LIMIT_S))
    one.take(None)
    one.take(None)


def test_a_rule_that_ends_the_process_is_reported_to_the_loop(bench: Callable[..., Bench]) -> None:
    Gate.close(SystemExit(3))
    one = bench(GATED)
    one.engine.do(one.apply(1, is_much=True))
    Gate.leave.set()
    done = one.engine.result(waits=True)
    assert isinstance(done.error, SystemExit)


def test_the_end_of_an_engine_does_not_begin_what_waits(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    Gate.close()
    one = bench(GATED)
    one.engine.do(one.apply(1, is_much=True))
    one.engine.do(one.apply(2, is_much=True))
    assert Gate.entered.wait(scaled(LIMIT_S))
    monkeypatch.setattr(engines, "CLOSE_S", 0.0)
    one.engine.close()
    Gate.leave.set()
    monkeypatch.setattr(engines, "CLOSE_S", LIMIT_S)
    one.engine.close()
    assert Gate.updates == 1


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_contribution_that_cannot_be_added_fails_its_round_and_leaves_nothing_behind(
    bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    def full(*_: object) -> None:
        raise MemoryError("full")

    one = bench()
    applied = one.apply(1, is_much=False)
    assert applied.last is not None
    with monkeypatch.context() as patched:
        patched.setattr(one.engine._of(one.store).device, "elements", full)
        failed = one.engine.do(role.Add(0, 1, applied.last))
    assert isinstance(failed.error, MemoryError)
    if not is_alone:
        one.take(one.engine.do(role.Add(1, 1, applied.last)))
    done = one.take(one.engine.do(role.Apply(one.store, 1, applied.shards)))
    ((shard, (error, trace)),) = done.failed.items()
    assert (shard, str(error)) == (1, "full")
    assert "in full" in trace
    assert one.engine._of(one.store).rounds == {}
