from __future__ import annotations

import pytest

from distrun import report
from distrun_runtime.coordinator.failures import Culprit, Outcome, Survivor, TaskResult


def test_a_success_has_no_report() -> None:
    assert report.failure(Outcome(0, "succeeded", "all workers succeeded")) == ""


def test_the_report_names_task_host_code_last_lines_log_and_what_followed() -> None:
    tasks = (
        TaskResult("worker-0", "worker", 0, "d1", "failed", code=1, lost_peer="worker-1"),
        TaskResult("worker-1", "worker", 1, "d2", "failed", code=3),
        TaskResult("server-0", "server", 0, "d1", "stopped", signal="TERM"),
    )
    outcome = Outcome(3, "task_failed", "worker-1 on d2 failed with exit code 3", Culprit("worker-1", "d2", 3), tasks)
    text = report.failure(outcome, ["Traceback", "ValueError: no"], "/jobs/x/logs/worker-1.log")
    assert text.splitlines() == [
        "1 other task failed later: worker-0 (lost worker-1)",
        "first failure: worker-1 on d2: exit code 3",
        "  Its last lines (all of them: /jobs/x/logs/worker-1.log):",
        "    | Traceback",
        "    | ValueError: no",
    ]


def test_only_20_lines_are_shown_and_long_ones_are_cut() -> None:
    outcome = Outcome(1, "task_failed", "", Culprit("worker-0", "d1", 1))
    text = report.failure(outcome, [str(number) for number in range(29)] + ["x" * 5000], "log")
    assert "    | 10\n" in text
    assert "    | 9\n" not in text
    assert text.endswith("x [...]")
    assert len(text) < 2000


def traceback_of(depth: int, error: str) -> list[str]:
    frames = [line for number in range(depth) for line in ('  File "t.py", line %d, in f' % number, "    f()")]
    return ["Traceback (most recent call last):", *frames, error]


def test_a_traceback_at_the_end_of_a_log_is_shown_from_its_first_line() -> None:
    lines = ["step %d" % number for number in range(50)] + traceback_of(15, "ValueError: my bug")
    assert report.excerpt(lines) == lines[50:]


def test_a_traceback_is_shown_with_the_one_that_it_came_from() -> None:
    joint = ["", "The above exception was the direct cause of the following exception:", ""]
    lines = ["step", *traceback_of(12, "KeyError: 'w'"), *joint, *traceback_of(8, "ValueError: my bug")]
    assert report.excerpt(lines) == lines[1:]


def test_of_a_long_traceback_the_beginning_and_the_end_are_shown() -> None:
    lines = traceback_of(45, "ValueError: my bug")
    shown = report.excerpt(lines)
    assert len(shown) == report.TRACEBACK_LINES + 1
    assert shown[:40] == lines[:40]
    assert shown[40:] == ["[... 32 lines]", *lines[-20:]]


def test_lines_after_a_traceback_are_shown_too() -> None:
    lines = [*traceback_of(2, "ValueError: my bug"), *("after %d" % number for number in range(3))]
    assert report.excerpt(["before"] * 9 + lines) == ["before"] * 9 + lines
    assert report.excerpt(["before"] * 30 + lines) == ["before"] * 11 + lines


def test_a_task_that_was_missing_is_named_with_what_was_said_about_it() -> None:
    culprit = Culprit("worker-1", "d2", reason="registration ended after 8 s", missing=True)
    assert report.failure(Outcome(1, "task_failed", "", culprit)).splitlines() == [
        "first failure: worker-1 on d2: it ran, but did not answer the other tasks",
        "  registration ended after 8 s",
    ]


def test_a_signal_is_explained() -> None:
    outcome = Outcome(137, "task_failed", "", Culprit("worker-0", "d1", signal="KILL"))
    assert "out-of-memory" in report.failure(outcome)
    assert report.meaning(139, None) == "as a shell says of signal SEGV"
    assert report.meaning(127, None) == "the command was not found"
    assert report.meaning(3, None) == ""


def test_a_task_that_wrote_nothing_is_said_to() -> None:
    outcome = Outcome(1, "task_failed", "", Culprit("worker-0", "d1", 1), job="calm-otter-7f3")
    assert report.failure(outcome, [], "/x.log").splitlines()[-1] == "  It wrote nothing. Log: /x.log"


def test_a_consequence_says_whom_it_lost() -> None:
    culprit = Culprit("worker-0", "d1", 1, reason="no beat for 10 s", consequence=True, lost_peer="server-0")
    assert "  It had lost server-0: no beat for 10 s" in report.failure(Outcome(1, "task_failed", "", culprit))


def test_a_lost_host_and_survivors_are_named() -> None:
    outcome = Outcome(7, "host_lost", "lost d2: gone", Culprit("", "d2"), survivors=(Survivor("pid 7 (sleep)", "d2"),))
    text = report.failure(outcome)
    assert text.splitlines() == ["first failure: d2 was lost", "may still run: pid 7 (sleep) on d2"]


def test_the_last_words_of_an_agent_are_shown() -> None:
    outcome = Outcome(7, "host_lost", "lost d2: a ... b", Culprit("", "d2", reason="a\nx\nb"))
    assert report.failure(outcome).splitlines() == ["first failure: d2 was lost", "    | a", "    | x", "    | b"]


def test_a_host_that_cannot_be_used_is_no_lost_one() -> None:
    outcome = Outcome(3, "preflight", "d2 cannot be used: no port", Culprit("", "d2", reason="no port"))
    assert report.failure(outcome) == "first failure: d2 cannot be used"


@pytest.mark.parametrize(
    ("code", "reason", "text"),
    [
        (124, "timeout", "first failure: n17 was ended"),
        (143, "terminated", "first failure: n17 was ended"),
        (6, "start_failed", "first failure: n17 did not start"),
        (5, "submit", "first failure: n17 did not take the job"),
    ],
)
def test_a_place_that_an_engine_ended_is_not_said_not_to_have_started(code: int, reason: str, text: str) -> None:
    assert report.failure(Outcome(code, reason, "lost n17", Culprit("", "n17", reason="why"))) == text


def test_what_the_last_line_of_distrun_says_is_not_in_the_report_too() -> None:
    reason = "command not found: x (in no folder of the task's PATH)"
    culprit = Culprit("worker-0", "d1", 127, reason=reason)
    outcome = Outcome(127, "task_failed", "worker-0 on d1 could not run (exit code 127): " + reason, culprit)
    assert report.failure(outcome, [], "/x.log").splitlines() == [
        "first failure: worker-0 on d1: exit code 127 (the command was not found)",
        "  It wrote nothing. Log: /x.log",
    ]


def test_a_task_that_was_stopped_while_it_failed_has_no_code() -> None:
    text = report.failure(Outcome(1, "task_failed", "", Culprit("worker-1", "d1", reason="ValueError: x")))
    assert text.splitlines() == ["first failure: worker-1 on d1: it said that it fails", "  ValueError: x"]


def test_the_report_ends_with_the_command_that_shows_the_culprits_log() -> None:
    outcome = Outcome(
        1, "task_failed", "", Culprit("worker-1", "d1", 1), survivors=(Survivor("pid 7", "d1"),), job="calm-otter-7f3"
    )
    last = report.failure(outcome, ["x"], "/x.log").splitlines()[-1]
    assert last == "to read all that it wrote: distrun logs calm-otter-7f3 worker-1"


def test_many_later_failures_are_summed_up() -> None:
    tasks = tuple(TaskResult("worker-%d" % rank, "worker", rank, "d1", "failed", code=1) for rank in range(9))
    text = report.failure(Outcome(1, "task_failed", "", Culprit("worker-0", "d1", 1), tasks))
    assert text.splitlines()[0].startswith("8 other tasks failed later: worker-1 (exit code 1)")
    assert text.splitlines()[0].endswith("and 3 more")
