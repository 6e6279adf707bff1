"""What `distrun stack` prints, given answers."""

from __future__ import annotations

from typing import Any

from distrun.cli.stack import complaints, named, shown

BY_PY_SPY = """Process %d: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread %d (%s): "MainThread"
    pull (kvstore.py:1)
    <module> (train.py:9)"""
BY_SIGNAL = 'Current thread 0x%x (most recent call first):\n  File "train.py", line 9 in <module>'


def answer(task: str, text: str = "", how: str = "py-spy", error: str = "", fix: str = "") -> dict[str, Any]:
    return {"task": task, "text": text, "how": how, "error": error, "fix": fix}


def test_stacks_that_differ_in_ids_only_are_equal() -> None:
    same = [answer("worker-%d" % rank, BY_PY_SPY % (rank, rank, ("idle", "active")[rank % 2])) for rank in range(3)]
    other = [answer("worker-%d" % rank, BY_SIGNAL % (rank + 16), "faulthandler") for rank in (3, 4)]
    first, second = shown([*same, *other])
    assert first == "worker-0 and 2 others (py-spy)\n%s\n" % (BY_PY_SPY % (0, 0, "idle"))
    assert second == "worker-3 and worker-4 (faulthandler)\n%s\n" % (BY_SIGNAL % 19)


def test_stacks_that_stand_elsewhere_are_shown_each() -> None:
    texts = [BY_PY_SPY % (1, 1, "idle"), (BY_PY_SPY % (2, 2, "idle")).replace("py:9", "py:10")]
    assert len(shown([answer("worker-%d" % rank, text) for rank, text in enumerate(texts)])) == 2


def test_a_reason_is_said_once_with_what_would_help() -> None:
    rows = [answer("worker-%d" % rank, error="no py-spy", fix="distrun logs JOB worker-0") for rank in range(9)]
    lines = complaints([*rows, answer("worker-9", error="has ended")], "calm-otter-7f3")
    assert lines == [
        "distrun: worker-0 and 8 others: no py-spy",
        "distrun: hint: distrun logs calm-otter-7f3 worker-0",
        "distrun: worker-9: has ended",
    ]


def test_few_tasks_are_named_all() -> None:
    assert [named(["a"]), named(["a", "b"]), named(["a", "b", "c"])] == ["a", "a and b", "a and 2 others"]


def test_names_of_threads_cannot_control_the_terminal() -> None:
    [text] = shown([answer("worker-0", 'Thread 1 (idle): "\x1b[2Jmine"\n    f (a.py:1)')])
    assert text == 'worker-0 (py-spy)\nThread 1 (idle): "mine"\n    f (a.py:1)\n'
    assert complaints([answer("worker-0", error="\x1b[2Jno")], "calm-1") == ["distrun: worker-0: no"]
