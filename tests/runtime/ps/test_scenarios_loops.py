"""Jobs on every path that push and pull key by key: after some rounds, a push asks for its result at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import DEADLINE_S, open_store

from distrun_runtime.errors import KVError
from distrun_runtime.protocol.message import Kind
from distrun_runtime.transport.resend import kind_of

pytestmark = pytest.mark.usefixtures("engine", "server_device")

Run = Callable[..., list[Any]]

SHAPES = {"small": (5,), "medium": (300, 70), "large": (500, 500)}
COUNTS_MESSAGES = True
HABIT = 3
"""Rounds after which pushes ask for their result."""


def start(kv: Any, rounds: int = HABIT) -> None:
    """Initialise the keys and make so many rounds; then pushes ask for their results."""
    for key, shape in SHAPES.items():
        kv.init(key, np.zeros(shape, np.float32))
    for number in range(rounds):
        round_of(kv, number)


def round_of(kv: Any, number: int) -> None:
    """Push and pull each key; check the sum of two workers."""
    for place, (key, shape) in enumerate(SHAPES.items()):
        kv.push(key, np.full(shape, number + kv.rank, np.float32), priority=-place)
        out = np.zeros(shape, np.float32)
        kv.pull(key, out, priority=-place)
        assert (out == 2 * number + 1).all(), (key, out.reshape(-1)[:3])


def counting(session: Any) -> Counter[Any]:
    """Return what counts the messages of a session from now on, by their kinds."""
    counts: Counter[Any] = Counter()
    ask = session.ask

    def counted(what: str, messages: Any, *others: Any, **more: Any) -> Any:
        counts.update(message.kind for _, message in messages)
        return ask(what, messages, *others, **more)

    exchange = session.exchange

    def exchanged(sends: Any, *others: Any, **more: Any) -> Any:
        # What it cannot send by itself it asks for.
        session.ask = ask
        counts.update(kind_of(send.frames) for send in sends)
        try:
            return exchange(sends, *others, **more)
        finally:
            session.ask = counted

    session.ask, session.exchange = counted, exchanged
    return counts


def test_a_loop_over_keys_gives_every_rounds_sum_and_soon_sends_one_message_a_key(run_sessions: Run) -> None:
    def script(session: Any) -> None:
        kv = open_store("dist_sync", session)
        start(kv)
        counts = counting(session)
        for number in range(5):
            round_of(kv, 100 * number)
        assert counts[Kind.PUSH] == counts[Kind.PULL] == 0
        assert counts[Kind.PUSHPULL] >= 5 * len(SHAPES)

    run_sessions(script)


def test_in_an_async_store_a_push_waits_for_nobody_in_a_loop_either(run_sessions: Run) -> None:
    def script(session: Any) -> None:
        kv = open_store("dist_async", session)
        start(kv, rounds=0)
        kv.set_optimizer("sgd", learning_rate=1.0)
        counts = counting(session)
        out = np.zeros(SHAPES["small"], np.float32)
        for _ in range(8):
            kv.push("small", np.ones(SHAPES["small"], np.float32))
            kv.pull("small", out)
        assert counts[Kind.PUSHPULL] == 0
        assert (out <= -8).all()

    run_sessions(script)


@pytest.mark.parametrize("waits", [True, False])
def test_a_push_that_no_pull_follows_for_once_keeps_nobody_waiting_in_a_barrier(run: Run, waits: bool) -> None:
    """Worker 1 comes to the barrier before it pushes."""

    def script(kv: Any) -> None:
        start(kv)
        ones = np.ones(SHAPES["large"], np.float32)
        if kv.rank == 0:
            kv.push("large", ones).wait()
        if waits:
            kv.barrier()
        else:
            kv.barrier(wait=False).wait(DEADLINE_S)
        if kv.rank == 1:
            kv.push("large", ones)
        out = np.zeros(SHAPES["large"], np.float32)
        kv.pull("large", out)
        assert (out == 2).all()
        kv.barrier()
        for number in range(HABIT):
            round_of(kv, number)

    run(script)


@pytest.mark.parametrize("is_idle", [False, True], ids=["at once", "after a pull"])
def test_after_such_a_push_only_many_more_rounds_let_pushes_ask_for_their_results_again(
    run_sessions: Run, is_idle: bool
) -> None:
    def script(session: Any) -> None:
        kv = open_store("dist_sync", session)
        start(kv)
        kv.push("small", np.ones(SHAPES["small"], np.float32))
        if is_idle:
            # Then the next push goes by itself; otherwise it is gathered, as the end of the one before is under way.
            kv.pull("large", np.zeros(SHAPES["large"], np.float32))
        kv.push("small", np.ones(SHAPES["small"], np.float32))
        counts = counting(session)
        for number in range(10):
            round_of(kv, number)
        assert counts[Kind.PULL] == 10
        for number in range(10):
            round_of(kv, number)
        assert counts[Kind.PULL] < 20

    run_sessions(script)


def test_what_was_assigned_after_a_push_is_pulled(run: Run) -> None:
    def script(kv: Any) -> None:
        start(kv)
        kv.push("medium", np.ones(SHAPES["medium"], np.float32))
        kv.assign("medium", np.full(SHAPES["medium"], 77, np.float32))
        out = np.zeros(SHAPES["medium"], np.float32)
        kv.pull("medium", out)
        assert (out == 77).all()

    run(script)


def test_a_pull_of_other_keys_or_into_several_outputs_gets_its_own_values(run: Run) -> None:
    def script(kv: Any) -> None:
        start(kv)
        kv.push("small", np.full(SHAPES["small"], 5, np.float32))
        other, out = np.zeros(SHAPES["medium"], np.float32), np.zeros(SHAPES["small"], np.float32)
        kv.pull("medium", other)
        assert (other == 2 * (HABIT - 1) + 1).all()
        kv.pull("small", out)
        assert (out == 10).all()
        for number in range(20):
            round_of(kv, number)
        outs = [np.zeros(SHAPES["small"], np.float32), np.zeros((5, 2), np.float32)[:, 0]]
        kv.push("small", np.full(SHAPES["small"], 6, np.float32))
        pending = kv.pull("small", outs, wait=False)
        pending.wait(DEADLINE_S)
        assert all((each == 12).all() for each in outs)

    run(script)


def test_a_pull_of_a_round_that_another_worker_skipped_gets_what_the_servers_have(run: Run) -> None:
    def script(kv: Any) -> None:
        start(kv)
        if kv.rank == 0:
            kv.push("small", np.full(SHAPES["small"], 9, np.float32))
        else:
            kv.skip_round("small", {"why": "nan"})
        out = np.zeros(SHAPES["small"], np.float32)
        kv.pull("small", out)
        assert (out == 2 * (HABIT - 1) + 1).all()

    run(script)


def test_what_a_rule_says_against_such_a_push_is_raised_once(run: Run) -> None:
    def script(kv: Any) -> None:
        start(kv)
        kv.set_updater(refusing)
        for _ in range(2):
            kv.push("small", np.ones(SHAPES["small"], np.float32))
            with pytest.raises(KVError, match="refused by the updater"):
                kv.pull("small", np.zeros(SHAPES["small"], np.float32))
        kv.barrier()

    run(script, 2, 1, imports=(__name__,))


def refusing(key: Any, received: Any, stored: Any) -> None:
    raise ValueError("refused by the updater")
