"""Spans of what a node did, as Chrome's trace viewer reads them."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from slowness import scaled

from distrun_runtime.errors import KVError
from distrun_runtime.ps.trace import Recorder, now_us, prepare, write

DEADLINE_S = scaled(60.0)


def test_a_span_has_name_category_times_process_thread_and_arguments() -> None:
    recorder = Recorder()
    recorder.start()
    before_us = time.time_ns() // 1000
    with recorder.span("apply", "work", key=3):
        pass
    after_us = time.time_ns() // 1000
    process, thread, span = recorder.stop("server-0@d1")
    assert (process["ph"], process["name"], process["args"]) == ("M", "process_name", {"name": "server-0@d1"})
    assert (thread["ph"], thread["name"], thread["args"]) == ("M", "thread_name", {"name": "MainThread"})
    assert (span["ph"], span["name"], span["cat"], span["args"]) == ("X", "apply", "work", {"key": 3})
    assert (span["pid"], span["tid"]) == (process["pid"], thread["tid"])
    assert before_us <= span["ts"] <= span["ts"] + span["dur"] <= after_us + 1000, "microseconds of the wall clock"
    json.dumps([process, thread, span])


def test_nothing_is_recorded_while_it_is_off() -> None:
    recorder = Recorder()
    with recorder.span("a", "work"):
        pass
    recorder.start()
    recorder.stop("x")
    with recorder.span("b", "work"):
        pass
    recorder.add("c", "work", now_us(), 5)
    recorder.start()
    assert [event["name"] for event in recorder.stop("x")] == ["process_name"]


def test_a_span_that_ends_by_an_exception_is_recorded() -> None:
    recorder = Recorder()
    recorder.start()
    with pytest.raises(ZeroDivisionError), recorder.span("step", "work"):
        raise ZeroDivisionError
    assert [event["name"] for event in recorder.stop("x") if event["ph"] == "X"] == ["step"]


def test_spans_of_all_threads_are_kept_apart() -> None:
    recorder = Recorder()
    recorder.start()
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(DEADLINE_S)
        for _ in range(100):
            with recorder.span("push", "store"):
                pass

    threads = [threading.Thread(target=work, name="thread-%d" % number) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    events = recorder.stop("x")
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    counts = dict.fromkeys(names.values(), 0)
    for event in events:
        if event["ph"] == "X":
            counts[names[event["tid"]]] += 1
    assert counts == dict.fromkeys(("thread-0", "thread-1", "thread-2", "thread-3"), 100)


def test_beyond_its_limit_spans_are_counted_and_that_is_said() -> None:
    recorder = Recorder(limit=2)
    recorder.start()
    for _ in range(5):
        recorder.add("push", "store", 1, 1)
    events = recorder.stop("x")
    assert len([event for event in events if event["ph"] == "X"]) == 2
    assert events[-1]["name"] == "3 later spans were not kept"


def test_a_trace_is_one_json_file_and_nothing_temporary_stays(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.start()
    recorder.add("push", "store", 1, 1)
    path = write(str(tmp_path / "traces"), "worker-0.json", recorder.stop("worker-0@d1"))
    assert [each.name for each in (tmp_path / "traces").iterdir()] == ["worker-0.json"]
    assert {event["ph"] for event in json.loads(Path(path).read_text())["traceEvents"]} == {"M", "X"}


def test_a_trace_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KVError, match=r"the trace cannot be written to .*file/worker-0\.json"):
        write(str(tmp_path / "file"), "worker-0.json", [])


def test_a_folder_that_cannot_be_is_refused_beforehand(tmp_path: Path) -> None:
    prepare(str(tmp_path / "new" / "folder"))
    assert (tmp_path / "new" / "folder").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(KVError, match=r"traces cannot be written to folder .*/file: File exists"):
        prepare(str(tmp_path / "file"))
