"""benchmarks/gpu.py and scripts/gpu-check, where there is no GPU: every section on a stand-in, tables, time limits."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import math
import os
import site
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import drycard
import fakecupy
import numpy as np
import pytest
from gpukit import Machine, gpus_of_process
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"
FACTS = {"gpu": "NVIDIA H100 80GB HBM3", "date": "2026-11-25", "commit": "abc", "cupy": "14.2.0", "torch": ""}


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    return drycard.load()


@pytest.fixture(scope="module")
def kept(gpu: ModuleType) -> Any:
    return gpu.gpu_results


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_loader("gpu_check", SourceFileLoader("gpu_check", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


@pytest.fixture
def card(gpu: ModuleType) -> Iterator[Any]:
    """A GPU of the stand-in, without torch."""
    machine = Machine(1)
    with gpus_of_process(machine):
        yield gpu.Card(machine.gpus.get(0), drycard.cupy_of(machine), None)
    machine.finish()


def found_by(gpu: ModuleType, card: Any, name: str, **changes: Any) -> Any:
    written: list[int] = []
    part = gpu.measured(
        card, name, replace(gpu.SMALL, runs=1, calls=1, **changes), lambda part: written.append(len(part.rows))
    )
    assert written == [*range(1, len(part.rows) + 1), len(part.rows)]
    return part


# Measuring


def test_sums_beside_a_copy_have_goals_and_are_compared_with_float64(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "sums")
    assert (part.state, part.text) == ("done", "")
    *large, beyond = part.rows
    assert [row.work for row in large] == ["sum of k = %d arrays of 4000 bytes" % k for k in (2, 4, 8)]
    assert all(row.goal == 0.9 and row.against == gpu.LIMIT and row.event_s > 0 for row in large)
    assert [row.moved_bytes for row in part.rows] == [12000, 20000, 36000, 18006]
    assert 0 < large[0].error < 1e-6 < beyond.error < 1e-3


def test_a_wrong_sum_fails_its_section(gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = card.device
    monkeypatch.setattr(device, "sum", lambda parts, out: device.write(out, parts[0]))
    part = found_by(gpu, card, "sums")
    assert part.state == "failed"
    assert "sum of k = 2 arrays of 4000 bytes is wrong" in part.text
    assert part.rows == []


def test_nan_is_no_right_result(gpu: ModuleType) -> None:
    with pytest.raises(ArithmeticError):
        gpu.right(math.nan, 1.0, "this")


def test_sums_of_a_models_tensors_have_goals_by_events_and_by_the_wall(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "model")
    assert (part.state, part.text) == ("done", "")
    assert [(row.goal, row.against) for row in part.rows] == [
        *((0.75, gpu.LIMIT), (1.0, "0.3 ms"), (None, gpu.LIMIT)),
        *((0.75, gpu.LIMIT), (0.75, gpu.LIMIT)),
    ]
    assert part.rows[1].wall_s == part.rows[0].wall_s
    assert all(row.error < 1e-6 for row in part.rows if row.goal == 0.75)


def test_a_wrong_bucket_fails_its_section(gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = card.device
    monkeypatch.setattr(device, "gather", lambda lists, bucket: device.write(bucket, card.random(bucket.size)))
    part = found_by(gpu, card, "model")
    assert part.state == "failed"
    assert "is wrong" in part.text


def test_kernels_of_codecs_are_measured_beside_their_bytes(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "codecs", elements=33)
    assert (part.state, part.text) == ("done", "")
    moved = {row.work.partition(",")[0]: row.moved_bytes for row in part.rows}
    assert moved == {
        **{"two_bit_encode": 144, "two_bit_encode_keeping": 408, "two_bit_decode": 144, "two_bit_decode_adding": 276},
        **{"one_bit_encode": 140, "one_bit_encode_keeping": 404, "one_bit_decode": 140, "one_bit_decode_adding": 272},
        **{"half_encode": 198, "half_decode": 198, "half_decode_adding": 330},
    }


def test_rules_are_measured_without_torch_and_the_section_says_that_it_lacks(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "RULES", [each for each in gpu.RULES if each.rule in {"sgd", "ftrl"}])
    part = found_by(gpu, card, "rules")
    assert part.state == "failed"
    assert "torch is not installed" in part.text
    # sgd reads weight, gradient and momentum and writes two of them.
    assert [(row.moved_bytes, row.goal) for row in part.rows] == [(20 * 1000, None), (28 * 1000, None)]


def test_the_measured_rules_are_all_that_kernels_do_but_the_one_for_tests(gpu: ModuleType) -> None:
    fused = {name for name, rule in gpu.optimizers.RULES.items() if not gpu.fuse.why_not(rule({}))}
    assert {each.rule for each in gpu.RULES} == fused - {"test"}


def test_copies_are_measured_beside_plain_ones_and_those_of_4_mib_have_a_goal(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "copies", copies=(1 << 12, 1 << 22))
    assert (part.state, part.text) == ("done", "")
    assert [(row.work, row.goal) for row in part.rows if row.goal] == [
        ("4 MiB out, page-locked", 0.6),
        ("4 MiB in, page-locked", 0.6),
        ("5 tensors of 5x300 out, page-locked", 0.8),
        ("5 tensors of 5x300 in, page-locked", 0.8),
    ]
    assert all(row.event_s is None for row in part.rows)


def test_stores_are_measured_beside_each_other(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "stores", model="2x30")
    assert (part.state, part.text) == ("done", "")
    assert [row.goal for row in part.rows] == [10.0, 10.0]


@pytest.mark.slow
def test_calls_of_a_store_are_measured_beside_what_is_wanted(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "gpustandin"))
    part = found_by(gpu, card, "calls", model="2x30")
    assert [(row.against, row.goal) for row in part.rows] == [
        *(("1.5 ms", 1.0), ("1.2 ms", 1.0), ("3 ms", 1.0), ("1 s", 1.0)),
    ]
    assert (part.state, "torch is not installed" in part.text) == ("failed", True)


def test_what_a_call_costs_is_counted_without_a_gpu(check: ModuleType) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_calls.py"), "--counts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "12 calls of the driver, goal 12: reached" in done.stdout
    assert "0 of 7 goals missed" in done.stdout


def test_sums_of_cupy_are_measured_without_torch(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "peers")
    assert [row.against for row in part.rows] == ["cupy, naive"]
    assert part.state == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("section", ["jobs", "round"])
@pytest.mark.parametrize(("arrays", "device"), [("numpy", "cpu"), ("cupy", "gpu:0")])
def test_rounds_of_jobs_are_measured(
    gpu: ModuleType, card: Any, section: str, arrays: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "gpustandin"))
    part = found_by(gpu, card, section, arrays=arrays, server_device=device, job_rounds=1)
    assert (part.state, part.text) == ("done", "")
    assert {row.goal for row in part.rows} == ({1.0, 1.5} if section == "jobs" else {0.5, 1.0})


def test_rounds_on_many_cores_have_goals_and_the_first_is_compared_with_gloo(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu, "measure", lambda system, *rest: {"distrun": 0.02, "gloo": 0.07}[system.name])
    part = found_by(gpu, card, "cores")
    assert (part.state, part.text) == ("done", "")
    assert [(row.against, row.goal, row.is_reached) for row in part.rows] == [
        *(("25 ms", 1.0, True), ("gloo", 3.0, True), ("25 ms", 1.0, True), ("gloo", None, None), ("20 ms", 1.0, True)),
        *(("90 ms", 1.0, True), ("gloo", None, None), ("90 ms", 1.0, True), ("35 ms", 1.0, True), ("gloo", None, None)),
    ]
    assert part.rows[4].work == "5x300, `kv.empty`: a round of 2 workers and 2 servers on the CPU"


@pytest.mark.slow
def test_rounds_on_many_cores_are_measured_and_without_torch_the_section_says_that_it_lacks(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "CORES", [(None, 2, 1, "list", 1000), (None, 1, 1, "empty", 1000)])
    part = found_by(gpu, card, "cores")
    assert (part.state, len(part.rows)) == ("failed", 2)
    assert "torch is not installed" in part.text


@pytest.mark.slow
def test_servers_that_are_not_on_the_gpu_fail_the_section(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "reports_of", lambda command, *rest, **more: once([*command[:-1], "gpu:0"], *rest, **more))
    once = sys.modules["round"].reports_of
    part = found_by(gpu, card, "round", arrays="numpy", server_device="cpu", job_rounds=1)
    assert part.state == "failed"
    assert "expected values on gpu:0, found them on cpu:0" in capfd.readouterr().err


def test_a_failed_job_fails_its_section(gpu: ModuleType, card: Any) -> None:
    part = found_by(gpu, card, "round", arrays="nothing", server_device="cpu", job_rounds=1)
    assert part.state == "failed"
    assert "the job failed" in part.text


def test_after_its_deadline_a_section_keeps_what_it_has(gpu: ModuleType, card: Any) -> None:
    late = time.monotonic() - 1
    for name in ("sums", "jobs"):
        part = found_by(gpu, card, name, deadline=late)
        assert (part.state, part.rows) == ("out of time", [])
    ways = {"ours": gpu.Contestant(lambda _: None, None)}
    plan = replace(gpu.SMALL, deadline=time.monotonic() + 1000, runs=3)
    assert len(gpu.compare(card, plan, ways)["ours"]) == 3


def test_a_run_in_which_the_gpu_waited_is_repeated_behind_more_work_and_then_marked(
    gpu: ModuleType, kept: Any, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = type(card.cupy.cuda.runtime)
    plugs, codes = [0], iter([0, 0, 600])
    monkeypatch.setattr(runtime, "_memsetAsync", lambda *_: plugs.append(plugs.pop() + 1), raising=False)

    def query(*_: int) -> int:
        plugs.append(0)
        return next(codes)

    monkeypatch.setattr(runtime, "_eventQuery", query)
    way = gpu.Contestant(lambda _: None, card.stream)
    times = card.times(way, 0, 2, 0.0)
    assert (plugs, times.is_ahead) == ([1, 2, 4, 0], True)
    monkeypatch.setattr(runtime, "_eventQuery", lambda *_: 0)
    late = card.times(way, 0, 2, 0.0)
    assert not late.is_ahead
    found = gpu.row("sum", gpu.LIMIT, [times, times], [times, late])
    assert (found.waits, found.ours_s, len(found.their_runs_s)) == (1, [times.event] * 2, 2)
    assert " \\* | " in kept.table([found])
    assert "\\*" not in kept.table([replace(found, waits=0)])


def test_the_work_before_what_is_timed_is_timed_warm(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([5.0, 0.005, 0.01])
    monkeypatch.setattr(gpu.Card, "_timed", lambda self, stream, work: (work(), (next(seconds), True))[1])
    assert gpu.Card(card.device, card.cupy, None)._plug_s == 0.001


def test_of_large_arrays_three_parts_are_compared(gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHUNK", 10)
    found, runs = card.random(101), []

    def reference(run: slice) -> Any:
        runs.append(run)
        return card.device.host(found[run]).astype(np.float64)

    assert gpu.distance(found, reference) == 0
    assert runs == [slice(0, 10), slice(45, 55), slice(91, 101)]
    gpu.distance(found[:30], reference)
    assert runs[3:] == [slice(0, 30)]


def test_runs_of_jobs_that_have_ended_stay_when_the_time_is_over(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, plans = [0.0], []

    def job(plan: Any, store: str, k: int, device: str) -> float:
        plans.append((k, plan.deadline))
        now[0] += 10 * k
        if now[0] > plan.deadline:
            raise ChildProcessError("the job failed")
        return k * 0.1

    monkeypatch.setattr(gpu.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(gpu, "job", job)
    plan = replace(gpu.SMALL, job_runs=3, deadline=130.0)
    one, four = gpu.jobs(card, plan)
    # Two runs of k = 1 in 52 s, a third would not end; one of k = 4 ends after 120 s, a second would not.
    assert [len(one.ratios), len(four.ratios)] == [2, 1]
    assert plans == [(1, 52.0)] * 4 + [(4, 130.0)] * 2
    now[0], plan = 0.0, replace(plan, deadline=15.0)
    with pytest.raises(gpu.OutOfTime):
        list(gpu.jobs(card, plan))
    now[0], plan = 0.0, replace(plan, deadline=25.0)
    assert len(gpu.rounds_of_jobs(plan, {"dist_sync": ""}, 1)["dist_sync"]) == 2


def test_facts_say_on_what_it_was_measured(gpu: ModuleType, card: Any) -> None:
    facts = gpu.facts(card, "abc")
    assert (facts["gpu"], facts["commit"], facts["cupy"], facts["cuda"]) == ("Stand-in", "abc", "14.2.0", "13.1")
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(("nbytes", "sets"), [(306_000_000, 1), (200_000_000, 3), (10_000_000, 22), (12, 64)])
def test_inputs_rotate_over_four_times_the_cache(gpu: ModuleType, nbytes: int, sets: int) -> None:
    l2 = 50_000_000
    assert gpu.sets_needed(nbytes, l2) == sets
    if 1 < sets < gpu.MOST_SETS:
        assert (sets - 1) * nbytes > gpu.L2_TURNS * l2


def test_a_round_on_one_gpu_takes_at_least_its_bytes_over_the_bus(gpu: ModuleType) -> None:
    # Two gradients out and in at a time, 2 s, then two sums in while one goes out, 4 s.
    assert gpu.seconds_over_bus(2, 100, out=100.0, into=50.0) == 4 + 4
    assert gpu.seconds_over_bus(2, 100, out=50.0, into=100.0) == 4 + 2


def test_a_card_is_opened_with_torch_where_a_section_needs_it(
    gpu: ModuleType, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", card.cupy)
    torch = ModuleType("torch")
    torch.__spec__ = ModuleSpec("torch", None)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert gpu.open_card("peers").torch is torch
    opened = gpu.open_card("copies")
    assert opened.device is card.device
    with pytest.raises(gpu.Missing):
        opened.torch  # noqa: B018


def test_the_driver_is_what_nvidia_smi_says(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu.driver() == ""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 580.159.04\necho 580.159.04\n")
    program.chmod(0o755)
    assert gpu.driver() == "580.159.04"
    program.write_text("#!/bin/sh\necho 1980 MHz, 2619 MHz, 1980 MHz, 120.50 W, 700.00 W, 35, 5, 16, Enabled\n")
    found = gpu.condition()
    assert (found["clocks.sm"], found["power.draw"], found["ecc.mode.current"]) == ("1980 MHz", "120.50 W", "Enabled")
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML'\nexit 15\n")
    assert gpu.condition() == {}


PROGRAM = """
import json, os, sys
sys.path += json.loads(sys.argv[1])
import drycard, torch
from dataclasses import replace
from gpukit import Machine, gpus_of_process

gpu = drycard.load()
machine = Machine(1)
found = {}
with gpus_of_process(machine):
    card = gpu.Card(machine.gpus.get(0), drycard.cupy_of(machine), drycard.Torch(machine, torch))
    for name in ("peers", "rules"):
        part = gpu.measured(card, name, gpu.SMALL, lambda part: None)
        found[name] = [part.state, part.text, {row.work + ": " + row.against: row.goal for row in part.rows}]
machine.finish()
print(json.dumps(found))
"""


@pytest.mark.peers
def test_sums_and_rules_beside_torch() -> None:
    path = [str(ROOT), str(ROOT / "runtime"), str(ROOT / "tests" / "support")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    others = json.dumps([str(Path(pytest.__file__).parents[1])])
    argv = [python_of("torch"), "-c", PROGRAM, others]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for state, text, _ in found.values():
        assert (state, text) == ("done", "")
    peers, rules = found["peers"][2], found["rules"][2]
    assert set(peers.values()) == {None, 0.97, 1.6, 2.0, 1.0}
    assert {work.partition(",")[0]: goal for work, goal in rules.items() if "fused" in work} == {
        **{"sgd": 1.0, "torch_sgd": 1.0, "adam": 1.0, "torch_adam": 1.0, "adamw": 1.0, "torch_adamw": 1.0}
    }
    assert sum("foreach" in work for work in rules) == 7


CUPY = (
    fakecupy.SAME_ARGUMENTS
    + """
for name, value in json.loads(sys.argv[2]).items():
    assert getattr(runtime, name) == value, name
for name in ("asarray", "full", "zeros", "ones"):
    assert callable(getattr(cupy, name)), name
assert hasattr(cupy.ndarray, "fill")
assert callable(cupy.cuda.Stream.synchronize)
"""
)


@pytest.mark.peers
def test_cupy_has_what_the_benchmark_calls() -> None:
    argv = [python_of("cupy"), "-c", CUPY, json.dumps(drycard.SIGNATURES), json.dumps(drycard.CONSTANTS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(100), check=False)
    assert done.returncode == 0, done.stderr


# Results and tables


def part_of(kept: Any, *rows: Any, state: str = "done", name: str = "sums") -> Any:
    return kept.Part(name, state, 1.0, "", list(rows))


def a_row(kept: Any, ratio: float, **more: Any) -> Any:
    values = {"goal": 0.9, "event_s": 0.001, "moved_bytes": 3 * 10**9, **more}
    return kept.Row("sum of two", "a copy", 0.002, 0.0009, [ratio - 0.1, ratio, ratio + 0.2], **values)


def test_results_are_what_was_written(kept: Any, tmp_path: Path) -> None:
    results = kept.Results(FACTS, {"sums": part_of(kept, a_row(kept, 0.95))})
    path = kept.path_of(FACTS, tmp_path / "new")
    assert path.name == "gpu-nvidia-h100-80gb-hbm3-2026-11-25.json"
    results.write(path)
    assert kept.Results.read(path) == results
    path.write_text('{"format": 7}')
    with pytest.raises(ValueError, match="expected results of format 1, found 7"):
        kept.Results.read(path)


def test_parts_of_the_same_commit_stay_in_the_file(kept: Any, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    facts = {**FACTS, "commit": "0a" * 20}
    parts = {name: part_of(kept, name=name) for name in ("sums", "copies")}
    kept.Results(facts, parts).write(path)
    assert set(kept.Results.begun(path, facts, ["sums"]).parts) == {"copies"}
    assert kept.Results.begun(path, {**facts, "commit": "def"}, ["sums"]).parts == {}
    assert kept.Results.begun(path, {**facts, "small": True}, ["sums"]).parts == {}
    assert kept.Results.begun(tmp_path / "none.json", facts, ["sums"]).parts == {}
    # Of which files these are, nobody knows.
    for commit in ("unknown", "0a" * 20 + "+changes"):
        facts = {**FACTS, "commit": commit}
        kept.Results(facts, parts).write(path)
        assert kept.Results.begun(path, facts, ["sums"]).parts == {}
        assert set(kept.Results.begun(path, facts, ["sums"], is_same_run=True).parts) == {"copies"}


def test_results_of_small_arrays_have_a_name_of_their_own(kept: Any, tmp_path: Path) -> None:
    path = kept.path_of({**FACTS, "small": True}, tmp_path)
    assert path.name == "try-nvidia-h100-80gb-hbm3-2026-11-25.json"
    path.write_text("")
    assert kept.newest(tmp_path) == []


def test_results_have_no_paths_of_the_machine(kept: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/a/place")
    monkeypatch.setenv("HOME", "/users/who")
    text = "%s/tests/conftest.py /a/place/distrun-gpu-check-x1/venv /users/who/.cache" % ROOT
    kept.Results(FACTS, {"smoke": kept.Part("smoke", text=text)}).write(tmp_path / "found.json")
    found = kept.Results.read(tmp_path / "found.json").parts["smoke"].text
    assert found == "CHECKOUT/tests/conftest.py TEMPORARY/venv HOME/.cache"


def test_the_newest_results_of_each_gpu_are_shown(kept: Any, tmp_path: Path) -> None:
    for name in ("gpu-b-2026-01-02", "gpu-a-2026-01-03", "gpu-a-2025-12-31"):
        (tmp_path / (name + ".json")).write_text("")
    assert [path.stem for path in kept.newest(tmp_path)] == ["gpu-a-2026-01-03", "gpu-b-2026-01-02"]


def test_a_verdict_says_what_was_reached_missed_and_not_measured(kept: Any) -> None:
    good, bad, shown = a_row(kept, 0.9), a_row(kept, 0.8), a_row(kept, 0.1, goal=None)
    assert kept.goal_state(part_of(kept, good, shown)) == "reached"
    assert kept.goal_state(part_of(kept, good, bad)) == "1 of 2 missed"
    assert kept.goal_state(part_of(kept, good, state="out of time")) == "not all measured (1 reached): out of time"
    assert kept.goal_state(part_of(kept, good, bad, state="failed")) == "not all measured (1 reached, 1 missed): failed"
    assert kept.goal_state(part_of(kept, state="failed")) == "not measured: failed"
    assert kept.goal_state(part_of(kept, shown)) == kept.goal_state(None) == "not measured"


def test_the_page_has_goals_without_results_and_rows_with_them(kept: Any) -> None:
    empty = kept.page([], "About.")
    assert empty.count("| not measured |") == len(kept.GOALS)
    results = kept.Results(FACTS, {"sums": part_of(kept, a_row(kept, 0.95))})
    text = kept.page([results], "About.")
    assert "| work | goal | NVIDIA H100 80GB HBM3 |" in text
    assert "### NVIDIA H100 80GB HBM3, 2026-11-25\n\nCommit `abc`. cupy 14.2.0." in text
    row = "| sum of two | 1.000 | 2.000 | 3000 | a copy | 0.900 | 0.95 (0.85-1.15) | 0.9 | reached |"
    assert row in text.splitlines()


def test_the_page_in_docs_is_what_the_committed_results_give(
    gpu: ModuleType, kept: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = ROOT / "docs" / "benchmarks.md"
    copy = tmp_path / "benchmarks.md"
    copy.write_text(page.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(gpu.report, "TARGET", copy)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--tables"])
    gpu.main()
    assert copy.read_text("utf-8") == page.read_text("utf-8")


def test_a_commit_is_that_of_the_checkout_and_unknown_without_one(kept: Any, tmp_path: Path) -> None:
    assert kept.commit_here(tmp_path) == "unknown"
    (ROOT / ".git").exists() or pytest.skip("this is no checkout")
    assert len(kept.commit_here().partition("+")[0]) == 40


# Processes and their limits


def test_a_process_beyond_its_limit_is_ended_with_its_children(kept: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = kept.run_limited(["sh", "-c", "echo begun; sleep 1000 & sleep 1000"], 0.3)
    assert (code, text) == (None, "begun\n")
    assert kept.run_limited(["sh", "-c", "echo over; exit 3"], 60) == (3, "over\n")
    # One that is not told by the end of its output, and does not end when it is told to.
    script = "(trap '' TERM; exec >/dev/null 2>&1; exec sleep 1000) & echo $!; exec sleep 1000"
    monkeypatch.setattr(kept, "GRACE_S", 0.3)
    code, text = kept.run_limited(["sh", "-c", script], 0.3)
    assert code is None
    state = Path("/proc", text.strip(), "stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_section_without_a_gpu_fails_by_name_and_the_next_is_run(
    gpu: ModuleType, kept: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    results, path = kept.Results(FACTS), tmp_path / "found.json"
    assert not gpu.run_all(["copies"], path, results, 60, is_small=True)
    part = kept.Results.read(path).parts["copies"]
    assert part.state == "failed"
    assert "cupy" in part.text
    assert "section copies: failed" in capfd.readouterr().err
    assert gpu.run_section("sums", 1.0).state == "out of time"


def test_a_section_keeps_what_its_process_had_found_when_it_is_ended(
    gpu: ModuleType, kept: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(command: list[str], limit_s: float) -> tuple[None, str]:
        path = Path(command[command.index("--part") + 1])
        path.write_text(json.dumps(part_of(kept, a_row(kept, 1.0)).as_json()))
        return None, "hung\n"

    monkeypatch.setattr(kept, "run_limited", ended)
    part = gpu.run_section("sums", 60)
    assert (part.state, len(part.rows)) == ("out of time", 1)


def test_one_section_is_run_and_written_by_a_process(
    gpu: ModuleType, kept: Any, card: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu, "open_card", lambda section: card)
    monkeypatch.setattr(gpu, "SMALL", replace(gpu.SMALL, counts=(2,), runs=1, calls=1))
    path = tmp_path / "part.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--section", "sums", "--small", "--part", str(path)])
    gpu.main()
    assert kept.Part.of(json.loads(path.read_text())).state == "done"


def test_the_benchmark_writes_results_by_the_name_of_the_gpu(
    gpu: ModuleType,
    kept: Any,
    card: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(gpu, "open_card", lambda: card)
    monkeypatch.setattr(gpu, "run_section", lambda name, limit_s, is_small: part_of(kept, name=name))
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    path = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--results", str(path), "--commit", "abc"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 0
    assert kept.Results.read(path).parts.keys() == gpu.GOALS.keys() == gpu.SECTIONS.keys()
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--facts", "--commit", "abc"])
    gpu.main()
    assert json.loads(capsys.readouterr().out)["commit"] == "abc"


# scripts/gpu-check


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.skipif(has_driver(), reason="there is a driver here")
def test_without_a_gpu_the_check_says_what_is_missing_and_ends_with_code_2() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no NVIDIA driver is found here" in done.stderr


def test_without_cupy_the_benchmark_says_what_to_install_and_ends_with_code_2(check: ModuleType) -> None:
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("cupy is installed")
    with pytest.raises(check.NoFacts, match="a GPU needs cupy, which is not installed") as raised:
        check.facts(sys.executable, dict(os.environ), "abc", 60.0)
    assert raised.value.code == 2


@pytest.fixture
def checked(check: ModuleType, kept: Any, tmp_path: Path) -> Callable[[str], Any]:
    """Makes a check whose interpreter is a shell script."""

    def make(script: str) -> Any:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\n" + script)
        python.chmod(0o755)
        env = {"PATH": os.environ["PATH"]}
        path = tmp_path / "found.json"
        return check.Check(str(python), env, path, kept.Results(FACTS), time.monotonic() + 1000)

    return make


@pytest.mark.parametrize(
    ("script", "state"),
    [("echo '3 passed in 1s'", "done"), ("echo '3 skipped in 1s'", "failed"), ("echo '3 passed'; exit 1", "failed")],
)
def test_tests_that_were_all_skipped_are_no_success(
    checked: Callable[[str], Any], kept: Any, script: str, state: str
) -> None:
    run = checked(script)
    run.run("correctness")
    found = kept.Results.read(run._path).parts["correctness"]
    assert found.state == state
    assert run.code(["correctness"]) == (0 if state == "done" else 1)


def test_the_tests_for_gpus_are_found(check: ModuleType) -> None:
    assert str(ROOT / "tests" / "runtime" / "arrays" / "test_gpu_real.py") in check.gpu_tests()


def test_a_missing_sanitizer_is_told_and_is_no_failure(
    check: ModuleType, checked: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "sanitizer", lambda: None)
    run = checked("")
    run.run("sanitizer")
    assert run.results.parts["sanitizer"].state == "missing"
    assert run.code(["sanitizer"]) == 0
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "$2"; [ "$2" = memcheck ] && echo "3 passed" && exit 0\nexit 9\n')
    program.chmod(0o755)
    monkeypatch.setattr(check, "sanitizer", lambda: str(program))
    run.run("sanitizer")
    found = run.results.parts["sanitizer"]
    assert (found.state, found.text) == (
        "failed",
        "memcheck: done, memcheck\n3 passed\n\nracecheck: failed, racecheck\n",
    )


def test_races_are_looked_for_also_if_the_time_for_memory_was_over(
    check: ModuleType, checked: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = checked(""), []

    def tests(name: str, before: Any, more: Any, limit_s: float, **env: str) -> Any:
        asked.append((before[2], env))
        return check.Part(name, "out of time" if before[2] == "memcheck" else "done", text="3 passed")

    monkeypatch.setattr(check, "sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(run, "_tests", tests)
    run.run("sanitizer")
    small = {"DISTRUN_TEST_SMALL_ARRAYS": "1"}
    assert asked == [("memcheck", small), ("racecheck", small)]
    assert run.results.parts["sanitizer"].state == "out of time"


def test_warnings_of_other_versions_are_no_errors_of_the_tests(checked: Callable[[str], Any]) -> None:
    run = checked('echo "$@"; echo 3 passed')
    run.run("correctness")
    assert " -W default " in run.results.parts["correctness"].text


def test_smoke_is_what_the_small_section_says(checked: Callable[[str], Any], kept: Any) -> None:
    done = json.dumps(part_of(kept).as_json())
    run = checked('while [ "$1" != --part ]; do shift; done\ncat >"$2" <<E\n%s\nE\n' % done)
    run.run("smoke")
    assert run.code(["smoke"]) == 0
    run = checked("echo broken; exit 1")
    run.run("smoke")
    assert (run.code(["smoke"]), run.results.parts["smoke"].text) == (1, "broken\n")


def test_memory_that_another_process_shares_outlives_it(checked: Callable[[str], Any]) -> None:
    folder = ROOT / "tests" / "support" / "gpustandin"
    run = checked('PYTHONPATH=%s exec %s "$@"\n' % (folder, sys.executable))
    run.run("sharing")
    assert run.code(["sharing"]) == 0
    assert "after kill -9 of the other process: its memory" in run.results.parts["sharing"].text


def test_missed_goals_have_an_exit_code_of_their_own(
    check: ModuleType, checked: Callable[[str], Any], kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = checked('shift\necho "$@" >&2')
    run.run("benchmarks", is_small=True)
    said = capfd.readouterr().err
    assert "--results %s --commit abc --same-run --minutes " % run._path in said
    minutes = float(said.partition("--minutes ")[2].split()[0])
    assert minutes * 60 + check.INNER_S + check.LAST_S < 1000  # it ends before it would be ended
    assert run.code(["benchmarks"]) == 1  # nothing was measured
    run.results.parts = {name: part_of(kept, a_row(kept, 0.95), name=name) for name in kept.GOALS}
    assert run.code(["benchmarks"]) == 0
    run.results.parts["sums"] = part_of(kept, a_row(kept, 0.5))
    assert run.code(["benchmarks"]) == 3
    run.results.parts["copies"] = part_of(kept, state="out of time")
    assert run.code(["benchmarks"]) == 1


def test_calls_are_measured_and_counted(
    checked: Callable[[str], Any], kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = checked('shift\necho "$@" >&2\n[ "$1" = --check ] && echo "k = 2: 12 calls, goal 12: reached"\nexit 0')
    run.run("calls")
    assert "--sections calls" in capfd.readouterr().err
    assert run.results.parts["counts"].state == "done"
    assert "goal 12: reached" in run.results.parts["counts"].text
    run.results.parts["calls"] = part_of(kept, a_row(kept, 0.95), name="calls")
    assert run.code(["calls"]) == 0
    run = checked('[ "$2" = --check ] && exit 1\nexit 0')
    run.run("calls")
    assert run.code(["calls"]) == 1


def test_the_rounds_on_many_cores_are_run_by_themselves(
    check: ModuleType, checked: Callable[[str], Any], kept: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = checked('shift\necho "$@" >&2\nexit 0')
    run.run("cores")
    assert "--sections cores" in capfd.readouterr().err
    assert "cores" not in check.parts_of("benchmarks")
    run.results.parts["cores"] = part_of(kept, a_row(kept, 0.5), name="cores")
    assert run.code(["cores"]) == 3


def test_an_environment_of_this_checkout_is_made_and_what_is_missing_is_told(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.interpreter(tmp_path / "none", None) == sys.executable
    monkeypatch.setattr(check, "missing", lambda required: ["pyzmq"])
    python = check.interpreter(tmp_path / "venv", None)
    assert "not installed: pyzmq" in capsys.readouterr().err
    text = "import distrun_runtime, numpy, site; print(distrun_runtime.__file__, *site.getsitepackages(), sep='\\n')"
    done = subprocess.run([python, "-c", text], capture_output=True, text=True, check=True, cwd=tmp_path)
    place, *packages = done.stdout.splitlines()
    assert Path(place).is_relative_to(ROOT)
    assert set(site.getsitepackages()) <= set(packages)  # where cupy looks for CUDA's libraries


def test_the_wheels_that_are_there_are_installed_and_what_still_lacks_is_told(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "missing", lambda required: ["some-thing", "pyzmq"])
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    check.interpreter(tmp_path / "none", wheels)
    assert "not installed: some-thing, pyzmq;" in capsys.readouterr().err
    with zipfile.ZipFile(wheels / "some_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("some_thing.py", "")
        folder = "some_thing-1.0.dist-info/"
        wheel.writestr(
            folder + "METADATA", "Metadata-Version: 2.1\nName: some-thing\nVersion: 1.0\nRequires-Dist: absent"
        )
        wheel.writestr(folder + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(folder + "RECORD", "")
    (wheels / "broken-1.0-py3-none-any.whl").write_text("")
    python = check.interpreter(tmp_path / "venv", wheels)
    said = capsys.readouterr().err
    assert "broken-1.0-py3-none-any.whl could not be installed" in said
    assert "not installed: pyzmq;" in said
    subprocess.run([python, "-c", "import some_thing"], check=True, cwd=tmp_path)


def test_what_is_needed_is_what_the_project_says(check: ModuleType) -> None:
    required = check.requirements((ROOT / "pyproject.toml").read_text("utf-8"))
    assert {"numpy", "pyzmq", "click", "pytest", "pytest-timeout", "hypothesis"} == set(map(check.name_of, required))
    assert check.missing(["numpy>=1", "no-such-package>=2"]) == ["no-such-package"]


def test_a_home_that_cannot_be_written_is_replaced(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    assert check.environment(tmp_path)["HOME"] == str(tmp_path)
    monkeypatch.setenv("HOME", str(ROOT))
    env = check.environment(tmp_path)
    assert env["HOME"] == str(ROOT)
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME", "CUPY_CACHE_DIR"):
        assert Path(env[name]).parent == tmp_path


def test_the_check_runs_what_it_is_asked_for_and_writes_it(
    check: ModuleType,
    kept: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = check.facts
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho '3 passed in 1s'\n")
    python.chmod(0o755)
    monkeypatch.setattr(check, "missing_driver", lambda: "")
    monkeypatch.setattr(check, "interpreter", lambda folder, wheels: str(python))
    monkeypatch.setattr(check, "facts", lambda python, env, commit, limit_s: {**FACTS, "commit": commit})
    monkeypatch.setattr(sys, "argv", ["gpu-check", "--only", "correctness", "--into", str(tmp_path), "--commit", "x"])
    assert check.main() == 0
    results = kept.Results.read(kept.path_of(FACTS, tmp_path))
    assert (results.facts["commit"], set(results.parts)) == ("x", {"correctness"})
    for code in (1, 2):
        python.write_text("#!/bin/sh\necho something is wrong; exit %d\n" % code)
        monkeypatch.setattr(check, "facts", facts)
        assert check.main() == code
        assert ("no GPU can be used here" in capsys.readouterr().err) == (code == 2)


def test_facts_are_the_last_line_of_what_the_benchmark_prints(check: ModuleType, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'a warning'\necho '{\"gpu\": \"x\"}'\n")
    python.chmod(0o755)
    assert check.facts(str(python), dict(os.environ), "abc", 60.0) == {"gpu": "x"}
