from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distrun_runtime.agent import ending, ladder
from distrun_runtime.agent.ending import Ending, Marks


def crew(*names: str) -> dict[str, Any]:
    return {
        name: SimpleNamespace(task=SimpleNamespace(name=name, role=name.split("-")[0]), is_reaped=False)
        for name in names
    }


@pytest.mark.parametrize("asked", [["scheduler", "worker-0", "server-0", "worker-1"], ["server-0", "scheduler"]])
def test_signals_go_to_workers_first_then_servers_then_the_scheduler(
    asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = crew("scheduler", "server-0", "worker-0", "worker-1")
    order: list[Any] = []
    monkeypatch.setattr(ending, "deliver", lambda task, rows, number: order.append(task and task.task.name))
    end = Ending(Marks("j", "h"), running, is_subreaper=True)
    monkeypatch.setattr(end, "look", dict)
    end.stop(asked, ladder.at_once(0.0))
    end.step(0.0)
    whole = ["worker-0", "worker-1", "server-0", "scheduler", None]
    assert order == (whole if len(asked) == 4 else ["server-0", "scheduler"])
