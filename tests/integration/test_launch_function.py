"""Functions that are launched on the workers of a job, by `launch_function`."""

from __future__ import annotations

import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import calledfunctions as called
import numpy as np
import pytest

from distrun import DistrunError, FunctionError, FunctionJob, Jobs, UsageError, launch_function
from distrun_runtime import calling

LIMIT_S = 100.0


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return Jobs(say=lambda text, level: None)


def launched(function: Callable[..., Any], *args: Any, **more: Any) -> FunctionJob[Any]:
    return launch_function(function, *args, jobs=Jobs(say=lambda text, level: None), **more)


def test_results_come_by_rank_with_arrays_and_also_later_by_the_jobs_id(jobs: Jobs) -> None:
    value = np.arange(3, dtype=np.int16)
    with launched(called.described, value, kwargs={"factor": 2}, workers=2) as job:
        first, second = job.results(LIMIT_S)
    assert (first["rank"], second["rank"], first["none"], first["pair"]) == (0, 1, None, [1, b"\0"])
    assert first["value"].dtype == np.int16
    assert np.array_equal(first["value"], [0, 2, 4])
    assert (second["large"].dtype, second["large"].shape) == (np.float32, (300_000,))
    assert FunctionJob(jobs.get(job.id).folder).results()[1]["rank"] == 1


def test_a_function_pushes_and_pulls() -> None:
    assert launched(called.summed, np.ones(4, np.float32), workers=2, servers=1).results(LIMIT_S) == [8.0, 8.0]


def test_the_exception_of_the_worker_that_failed_first_comes_as_type_text_and_traceback() -> None:
    with pytest.raises(FunctionError, match=r"worker-1 on .*: ValueError: no") as caught:
        launched(called.failing, 1, workers=2, servers=1, grace=0.5).results(LIMIT_S)
    assert (caught.value.rank, caught.value.type, caught.value.text) == (1, "ValueError", "no\nsuch number")
    assert 'raise ValueError("no\\nsuch number")' in caught.value.traceback


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (called.ends, (3,), "worker-0 .*exit code 3"),
        (called.ends, (0,), "worker-0 has told no result, and ended with code 0"),
        (called.odd, (), r"KVError: the result of calledfunctions:odd\['value'\]: found set"),
    ],
)
def test_a_worker_without_a_result_is_an_error(function: Callable[..., Any], args: tuple[int], message: str) -> None:
    with pytest.raises(DistrunError, match=message):
        launched(function, *args).results(LIMIT_S)


def test_a_module_that_hosts_lack_is_an_error_with_how_to_copy_it() -> None:
    told = {"type": "ModuleNotFoundError", "text": "No module named 'work'", "traceback": ""}
    error = FunctionError(0, "worker-0 on h1", told)
    assert "sync_dst_dir='~/job' copies this folder to hosts" in "".join(traceback.format_exception(error))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, "a lambda has no name"),
        (called.nested(), r"nested.<locals>.inner, which is defined within a function, has no name"),
        (called.bound, "expected a function that workers can import by its name, found functools.partial"),
        ([].append, "expected a function that workers can import by its name"),
    ],
)
def test_a_function_that_workers_could_not_import_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        launched(function)


def test_a_function_of_the_program_itself_is_refused_with_what_to_type() -> None:
    code = "from distrun import launch_function\ndef f(): pass\nlaunch_function(f)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot import f from __main__" in done.stderr


def test_arguments_that_are_no_json_or_too_large_are_refused() -> None:
    with pytest.raises(UsageError, match=r"the arguments of calledfunctions:ends\[0\]\[0\]: found set"):
        launched(called.ends, {1})
    with pytest.raises(UsageError, match="bytes when packed, expected at most 120000"):
        launched(called.ends, np.random.default_rng(0).random(50_000))


def test_text_that_is_no_result_is_an_error_and_parts_of_one_are_none() -> None:
    for text in ("", "x", "AAAA", calling.pack([1], "it")[:-4]):
        with pytest.raises(calling.KVError, match="found "):
            calling.unpack(text, "it")
    reader = calling.ResultReader()
    reader.feed(b"half distrun-result 1/2 QUJD\ndistrun-result 3/2 QUJD\ndistrun-result 2/2 QU")
    assert reader.text() is None
    reader.feed(b"JD\n")
    assert reader.text() == b"QUJDQUJD"
