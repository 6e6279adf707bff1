"""A server's decisions while its engine is at work: who waits for it, and who does not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import cluster
import pytest
from gated_rules import Gate
from history_server import SCHEDULER, History, said, values
from slowness import scaled

from distrun_runtime.protocol.message import Kind
from distrun_runtime.ps import role
from distrun_runtime.ps.engine import WorkEngine
from distrun_runtime.ps.server import Server

Serving = Callable[..., History]


@pytest.fixture
def busy(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """Make servers whose rule takes until `done` is called, and that do everything later."""
    monkeypatch.setattr(cluster, "MUCH_BYTES", 0)

    def make(type_name: str = "dist_sync") -> History:
        Gate.close()
        server = serving(type_name, imports=("gated_rules",))
        server.rule("gated_rules:Gated")
        server.transport.waits_for_engine = False
        return server

    yield make
    Gate.leave.set()


def done(server: History) -> list[str]:
    """Let the rule end and return what is sent then."""
    server.transport.waits_for_engine = True
    Gate.leave.set()
    return said(server.step())


def test_others_are_served_while_a_rule_takes_its_time(busy: Serving) -> None:
    server = busy("dist_async")
    assert server.push(0, 1, {"a": [1, 1]}) == []
    assert server.stats(1)["server"] == "server-0"
    assert done(server) == ["w0 PUSH"]


def test_what_a_worker_sends_behind_an_async_push_is_looked_at_when_the_push_is_applied(busy: Serving) -> None:
    server = busy("dist_async")
    server.push(0, 1, {"a": [1, 1]})
    assert server.pull(0, 1) == []
    assert server.push(0, 2, {"a": [2, 2]}) == []
    assert done(server) == ["w0 PUSH", "w0 PULL", "w0 PUSH"]
    assert values(server.pull(0, 2)) == {"a": [3, 3]}


def test_the_end_of_a_connection_counts_behind_what_came_on_it(busy: Serving) -> None:
    server = busy("dist_async")
    server.push(0, 1, {"a": [1, 1]})
    server.push(0, 2, {"b": [1, 1]})
    server.cut("w0")
    done(server)
    assert server.stats(1)["updates"] == 2
    assert server.log.count("event=work-failed") == 0


def test_a_pull_of_a_round_is_lent_it_before_the_next_one_is_applied(busy: Serving) -> None:
    server = busy()
    server.push_all(1, {"a": [1, 1]})
    assert Gate.entered.wait(scaled(60))
    assert server.pull(0, 1) == []
    server.push_all(2, {"a": [5, 5]})
    server.transport.waits_for_engine = True
    Gate.leave.set()
    sent = server.step()
    assert values([each for each in sent if each.kind is Kind.PULL]) == {"a": [2, 2]}
    assert values(server.pull(0, 2)) == {"a": [12, 12]}


def test_a_pull_that_waits_for_the_engine_says_so(busy: Serving) -> None:
    server = busy()
    server.push_all(1, {"a": [1, 1]})
    server.pull(0, 1)
    [waiting] = server.tick(3.0)
    assert waiting.body["text"] == "waiting for the update on server-0, key a, round 1"
    assert done(server) == ["w0 PULL"]


def test_a_rule_is_changed_when_updates_under_way_are_over(busy: Serving) -> None:
    server = busy("dist_async")
    server.push(0, 1, {"a": [1, 1]})
    server.push(0, 2, {"a": [1, 1]})
    opening = threading.Timer(0.05, Gate.leave.set)
    opening.start()
    server.transport.waits_for_engine = True
    server.rule("sgd", learning_rate=1.0)
    opening.join()
    server.push(0, 3, {"a": [1, 1]})
    assert values(server.pull(0, 3)) == {"a": [1, 1]}


def test_a_server_that_is_told_to_stop_does_not_wait_for_its_engine(
    busy: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distrun_runtime.ps.engine.CLOSE_S", 0.1)
    server = busy("dist_async")
    server.push(0, 1, {"a": [1, 1]})
    server.scheduler(Kind.STOP)
    assert server.finish.code == 0


def test_an_init_is_done_before_anything_else_is_taken_in(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "MUCH_BYTES", 0)
    server = serving()
    happened: list[str] = []
    handle = Server.handle

    def noted(self: Server, event: role.Event, now: float) -> list[role.Action]:
        if isinstance(event, role.MessageReceived):
            happened.append(event.message.kind.name)
        if isinstance(event, role.WorkDone):
            happened.append(type(event.work).__name__)
        return handle(self, event, now)

    monkeypatch.setattr(Server, "handle", noted)
    told = server.hear_all([("w%d" % (at % 2), server.initial({name: [1, 1]})) for at, name in enumerate("fgh")])
    assert said(told) == ["w0 INIT", "w1 INIT", "w0 INIT"]
    assert happened == ["INIT", "TryFill", "Fill"] * 3, "values that wait are in nobody's memory twice"


def test_a_server_whose_device_failed_ends_if_the_scheduler_is_gone_or_does_not_know_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered, unknown = serving(), serving(is_registered=False)
    monkeypatch.setattr(WorkEngine, "failed", "cuda:0 is lost")
    assert "scheduler ABORT" in said(registered.step())
    assert registered.push(0, 1, {"a": [1, 1]}) == []
    registered.cut(SCHEDULER)
    unknown.step()
    assert registered.end == unknown.end == (1, "cuda:0 is lost")
