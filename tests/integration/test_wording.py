"""What distrun does follows from facts: with every word of its messages translated it does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import wording
from slowness import scaled

from distrun import launching
from distrun.backends.base import Swept
from distrun.cli.jobline import JobLine
from distrun.dashboard.events import EventReader
from distrun_runtime.contract.control import CopyProgress
from distrun_runtime.coordinator.failures import Outcome, Survivor

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = scaled(120.0)
FAILS = """
import os, signal, sys
if os.environ["DMLC_RANK"] == "1":
    %s
signal.pause()
"""


@pytest.mark.parametrize(
    ("words", "body", "code"),
    [
        ((), "sys.exit(5)", 5),
        ((), "os.kill(os.getpid(), 9)", 137),
        (("--timeout", "1"), "pass", 124),
    ],
)
def test_a_job_ends_and_is_shown_the_same_whatever_its_messages_say(
    tmp_path: Path, words: Sequence[str], body: str, code: int
) -> None:
    plain, other = (_run(tmp_path / kind, start, words, FAILS % body, code) for kind, start in STARTS.items())
    assert plain["facts"] == other["facts"]
    assert plain["lines"] == other["lines"]
    assert plain["message"] != other["message"]


STARTS = {"plain": ("-m", "distrun"), "translated": (wording.__file__,)}


def _run(state: Path, start: Sequence[str], words: Sequence[str], script: str, code: int) -> dict[str, Any]:
    job = ("launch", "--launcher", "local", "-n", "2", "-s", "0", "--json", "--grace", "1", *words)
    done = subprocess.run(
        [sys.executable, *start, *job, sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}", "XDG_STATE_HOME": str(state)},
        capture_output=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stderr.decode()
    [folder] = (state / "distrun" / "jobs").iterdir()
    outcome = json.loads((folder / "outcome.json").read_text())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    reader = EventReader()
    lines = [line for line in map(reader.take, events) if line is not None]
    culprit = outcome["culprit"] or {}
    return {
        "facts": (
            outcome["exit_code"],
            outcome["reason"],
            [culprit.get(name) for name in ("task", "host", "code", "signal", "consequence", "missing")],
            [each["host"] for each in outcome["survivors"]],
            [(each["host"], each["kind"]) for each in outcome["problems"]],
            sorted((task["name"], task["state"], task["code"], task["signal"]) for task in outcome["tasks"]),
        ),
        "lines": sorted((line.tasks, line.style, line.is_message, line.stalled) for line in lines),
        "message": outcome["message"],
    }


def test_what_was_swept_and_how_far_a_copy_is_do_not_depend_on_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[list[str], list[str]]:
        fears = (Survivor("worker-0 (pid 7)", "d1"), Survivor("the agent", "d2"))
        swept = {"d2": Swept(("pid 8 (sleep)",), ("pid 9 (stuck)",)), "d3": Swept(problem="no route to host")}
        outcome = launching.with_swept(Outcome(7, "host_lost", "lost d2", survivors=fears), swept, 45.0)
        line = JobLine(lambda: (2, 2), 0.0)
        line.take("sync", {"text": "copying", "sync": CopyProgress(1, 2, "nothing was sent so far")._asdict()}, 1.0)
        return [each.host for each in outcome.survivors], line.text().split(" (")

    hosts, (done, detail) = found()
    wording.translate(monkeypatch.setattr)
    assert found() == (hosts, [done, detail.upper()])
    assert hosts == ["d1", "d2"]
