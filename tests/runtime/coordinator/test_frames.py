from __future__ import annotations

from typing import Any

import pytest
from sample_plan import sample_plan

from distrun_runtime.contract import agent_messages, session
from distrun_runtime.contract import plan as plans
from distrun_runtime.contract.plan import Secrets
from distrun_runtime.contract.session import Frame
from distrun_runtime.coordinator import messages
from distrun_runtime.coordinator.messages import Ack, EndAgent, Spawn, StopTasks
from distrun_runtime.errors import ContractError


def decoded(sent: Frame) -> dict[str, Any]:
    [frame] = session.Decoder().feed(session.encode(*sent))
    return frame.header


@pytest.mark.parametrize(
    ("header", "event"),
    [
        ({"type": "ready", "address": "::1", "ports": {"jax": 5}}, agent_messages.AgentReady("d1", "::1", {"jax": 5})),
        (
            {"type": "started", "task": "worker-0", "pid": 7, "start": "x", "time": 2},
            agent_messages.Started("d1", "worker-0", 7, "x", 2.0, arrived=9.0),
        ),
        (
            {"type": "published", "task": "s", "values": {"port": 1}},
            agent_messages.Published("d1", "s", {"port": 1}, 9.0, arrived=9.0),
        ),
        (
            {"type": "published", "task": "w", "values": {"failed": "x"}, "time": 1.5, "stopped": True},
            agent_messages.Published("d1", "w", {"failed": "x"}, 1.5, True, arrived=9.0),
        ),
        (
            {"type": "exited", "task": "w", "code": None, "signal": "KILL", "time": 1.5, "stopped": True, "out": 3},
            agent_messages.Exited("d1", "w", None, "KILL", 1.5, True, out=3, arrived=9.0),
        ),
        (
            {"type": "exited", "task": "w", "code": 127, "reason": "no"},
            agent_messages.Exited("d1", "w", 127, time=9.0, reason="no", arrived=9.0),
        ),
        ({"type": "cleared", "left": [{"pid": 3, "command": "sh"}]}, agent_messages.Cleared("d1", ((3, "sh"),))),
        ({"type": "folder", "state": "mine", "notes": ["n"]}, agent_messages.FolderFound("d1", "mine", ("n",))),
        ({"type": "copying", "files": 7}, agent_messages.Copying("d1", 7)),
        ({"type": "copied", "files": 7, "bytes": 9}, agent_messages.Copied("d1", 7, 9)),
        (
            {"type": "copy_failed", "reason": "full", "kind": "disk", "fix": "x"},
            agent_messages.CopyFailed("d1", "full", "disk", "x"),
        ),
        ({"type": "warning", "text": "hm"}, agent_messages.Warned("d1", "hm")),
        ({"type": "pong", "n": 4}, agent_messages.Pong("d1", 4)),
        ({"type": "refused", "reason": "version"}, agent_messages.StartFailed("d1", "version", 9.0, refused=True)),
        (
            {"type": "refused", "reason": "no numpy", "kind": "module", "fix": "pip install numpy"},
            agent_messages.StartFailed("d1", "no numpy", 9.0, True, "module", "pip install numpy"),
        ),
        ({"type": "need", "digest": "ab"}, agent_messages.Needed("d1", "ab")),
        ({"type": "answer", "id": 3, "value": {"jobs": []}}, agent_messages.Answered("d1", 3, {"jobs": []})),
        ({"type": "answer", "id": 3, "error": "no such tool"}, agent_messages.Answered("d1", 3, None, "no such tool")),
        ({"type": "bye"}, agent_messages.Bye("d1")),
        ({"type": "hello", "version": 1}, agent_messages.AgentHello("d1", {"version": 1}, 9.0)),
    ],
)
def test_a_frame_becomes_an_event(header: dict[str, Any], event: messages.Event) -> None:
    assert messages.to_event("d1", Frame(header), 9.0) == event


def test_output_carries_its_bytes() -> None:
    frame = Frame({"type": "output", "task": "w", "stream": "err", "offset": 5}, b"\xff\n")
    assert messages.to_event("d1", frame, 9.0) == agent_messages.Output("d1", "w", "err", 5, b"\xff\n")


@pytest.mark.parametrize(
    "header",
    [
        {"type": "started", "task": "w"},
        {"type": "started", "task": "w", "pid": "seven"},
        {"type": "started", "task": "w", "pid": True},
        {"type": "started", "task": ["w"], "pid": 7},
        {"type": "ready", "address": "x", "ports": {"jax": "5"}},
        {"type": "folder", "state": "mine", "notes": "n"},
        {"type": "cleared", "left": [{"command": "sh"}]},
        {"type": "output", "task": "w", "stream": "log", "offset": 0},
        {"type": "output", "task": "w", "stream": "out", "offset": -1},
        {"type": "published", "task": "w", "values": 5},
        {"type": "ready", "address": "x", "ports": []},
        {"type": "cleared", "left": [7]},
    ],
)
def test_a_malformed_frame_is_an_error_that_names_its_type(header: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match="malformed '%s'" % header["type"]):
        messages.to_event("d1", Frame(header), 9.0)


def test_a_malformed_frame_is_an_error_that_says_what_was_expected() -> None:
    with pytest.raises(ContractError, match=r"'started': expected the members task, pid, .*, found task, host"):
        messages.to_event("d1", Frame({"type": "started", "task": "w", "host": "d2"}), 9.0)
    with pytest.raises(ContractError, match="'started': pid: expected a whole number, found 'seven'"):
        messages.to_event("d1", Frame({"type": "started", "task": "w", "pid": "seven"}), 9.0)


def test_no_frame_speaks_for_another_host_or_sets_what_is_ours() -> None:
    said = {"type": "warning", "text": "hm", "host": "d2", "arrived": 1.0, "refused": False}
    assert messages.to_event("d1", Frame(said), 9.0) == agent_messages.Warned("d1", "hm")
    said.update(type="refused", reason="no", time=5.0)
    assert messages.to_event("d1", Frame(said), 9.0) == agent_messages.StartFailed("d1", "no", 5.0, refused=True)


def test_an_unknown_frame_is_only_a_warning() -> None:
    assert isinstance(messages.to_event("d1", Frame({"type": "gossip"}), 9.0), agent_messages.Warned)


def test_begin_carries_the_hosts_own_tasks_and_only_their_secrets() -> None:
    plan = sample_plan(hosts=("d1", "d2"))
    value = decoded(messages.begin(plans.shares(plan)("d2"), Secrets("abc", {"MY_TOKEN": "s", "OTHER": "t"}), "d2"))
    assert (value["token"], value["host"], value["secret_env"]) == ("abc", "d2", {})
    assert [task.name for task in plans.from_json(value["plan"]).tasks] == ["worker-1"]


def test_actions_become_frames() -> None:
    assert decoded(messages.to_frame(Spawn("d1", "w", {"A": "ü\udcff"}))) == {
        "type": "spawn",
        "task": "w",
        "attempt": 0,
        "env": {"A": "ü\udcff"},
    }
    stop = decoded(messages.to_frame(StopTasks("d1", ("w",), (("TERM", 2.5), ("KILL", 0.0)))))
    assert stop == {"type": "stop", "tasks": ["w"], "steps": [["TERM", 2.5], ["KILL", 0.0]]}
    assert decoded(messages.to_frame(EndAgent("d1"))) == {"type": "end"}
    assert decoded(messages.to_frame(Ack("d1", "w", "out", 7))) == {
        "type": "ack",
        "task": "w",
        "stream": "out",
        "offset": 7,
    }
    assert decoded(messages.to_frame(messages.Ping("d1", 3))) == {"type": "ping", "n": 3}
