from __future__ import annotations

import snapshots
from snapshots import NOW

from distrun.dashboard.model import Model, Plain


def take(model: Model, kind: str, value: object, when: float = NOW) -> None:
    model.take(kind, {kind: value}, when)
    model.settle(when)


def said(plain: Plain, model: Model, when: float = NOW) -> list[str]:
    return [line.partition(" ")[2] for line in plain.changes(model, when)]


def test_each_change_is_one_line_and_what_is_alike_is_folded() -> None:
    model, plain = Model("calm-otter-7f3"), Plain()
    assert said(plain, model) == []
    state = snapshots.state(8)
    take(model, "state", state)
    assert said(plain, model) == [
        "scheduler,server-[0-1],worker-[0,2-7] on gpu[01-04]: running",
        "worker-1 on gpu02: failed (1)",
        "job calm-otter-7f3: running after 0:12:10",
    ]
    assert said(plain, model) == []
    take(model, "metrics", snapshots.metrics(8))
    assert said(plain, model) == [
        "worker-3 on gpu04: stalled: no output, step, store call or CPU for 5m40s",
        "worker-4 on gpu01: straggler: last in 14 of 20 rounds, 0.31 s behind",
        "progress: step 610/1000 (61 %), 0.84 steps/s, ETA 0:07:42, loss 0.4123",
    ]
    take(model, "event", {"event": "lost", "host": "gpu03", "reason": "silent for 30 s"})
    assert said(plain, model) == ["host gpu03: lost", "gpu03: host lost: silent for 30 s"]
    outcome = {"exit_code": 1, "reason": "task_failed", "message": "worker-1 failed", "culprit": None, "tasks": []}
    take(model, "outcome", outcome)
    assert said(plain, model)[-1] == "job calm-otter-7f3: failed after 0:12:10, exit code 1: worker-1 failed"


def test_progress_is_told_now_and_then() -> None:
    model, plain = Model("calm-otter-7f3"), Plain()
    take(model, "state", snapshots.state(8))
    metrics = snapshots.metrics(8)
    told = []
    for second in range(40):
        metrics["progress"].update(step=610 + second, fraction=0.61 + second / 1000)
        take(model, "metrics", metrics, NOW + second)
        told += [line for line in said(plain, model, NOW + second) if line.startswith("progress")]
    assert [line.split(",")[0] for line in told] == ["progress: step 610/1000 (61 %)", "progress: step 640/1000 (64 %)"]


def test_a_coordinator_that_is_gone_and_comes_back_is_told() -> None:
    model, plain = Model("calm-otter-7f3"), Plain()
    take(model, "state", snapshots.state(2))
    said(plain, model)
    model.link = "its coordinator is gone"
    assert said(plain, model) == ["its coordinator is gone"]
    model.link = ""
    assert said(plain, model) == ["the coordinator is connected again"]
