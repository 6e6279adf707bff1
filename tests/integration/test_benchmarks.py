"""The benchmark runs, checks what it pulls, and computes the ratios it prints."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from math import prod
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_" + Path(name).stem, BENCHMARKS / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("model", "tensors", "megabytes"), [("resnet50", 161, 102), ("vgg16", 32, 553), ("one", 1, 67), ("small", 1000, 1)]
)
def test_models_have_the_tensors_that_the_page_says(model: str, tensors: int, megabytes: int) -> None:
    shapes = load("peers/shapes.py").MODELS[model]()
    assert len(shapes) == tensors
    assert round(sum(prod(shape) * 4 for shape in shapes) / 1e6) == megabytes


def test_ratio_is_ours_divided_by_the_peers_and_a_failed_run_says_so() -> None:
    bench = load("round.py")
    columns = [bench.System(name, "python", "", ()) for name in ("distrun", "mxnet", "gloo")]
    text = bench.table(columns, ["one"], {("one", "distrun"): 0.030, ("one", "mxnet"): 0.060})
    assert text.splitlines()[-1] == "| one | 30.0 | 60.0 (0.50) | failed |"


def test_a_round_runs_on_this_machine_and_names_the_peers_that_are_missing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "round.py"), "--models", "small", "--runs", "1", "--rounds", "1"]
    command += ["--systems", "distrun", "--peers", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "| model | distrun |"
    assert "mxnet is left out" in result.stderr
    assert "scripts/install peers" in result.stderr
