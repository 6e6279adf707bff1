"""examples/lstm_ptb.py: with its layers on several devices or workers it learns what it learns on one.

It runs by the interpreter of `.peers/torch`, which `scripts/install peers` makes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers import python_of
from slowness import scaled

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "lstm_ptb.py")
SMALL = ("--train-size", "160", "--hidden", "24", "--batch-size", "16")

pytestmark = pytest.mark.peers


def run(folder: Path, argv: list[str], code: int = 0) -> str:
    """Run a command with a job store of its own; return what it prints, for a wrong end what it says of it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DISTRUN_"))}
    env |= {"XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(110), check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def alone(folder: Path, *options: str, code: int = 0) -> str:
    return run(folder, [python_of("torch"), SCRIPT, *options], code)


def launched(folder: Path, *options: str, workers: int, servers: int = 0) -> str:
    launch = [sys.executable, "-m", "distrun", "launch", "-n", str(workers), "-s", str(servers)]
    return run(folder, [*launch, "--launcher", "local", "--no-prefix", python_of("torch"), SCRIPT, *options])


def perplexity(output: str) -> float:
    """Return what is said of the only epoch; the last line says it rounded."""
    found = re.search(r"^Epoch 0: perplexity (\d+\.\d{6}), \d+ words a second$", output, re.MULTILINE)
    assert found, output
    assert output.splitlines()[-1] == f"perplexity {float(found[1]):.1f}"
    return float(found[1])


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return the perplexity of the run on one device."""
    return perplexity(alone(tmp_path_factory.mktemp("one"), *SMALL))


@pytest.mark.parametrize("options", ["--stages 2", "--stages 4 --placement naive --micro-batches 2 --time-chunks 3"])
def test_stages_on_threads_learn_what_one_device_learns(tmp_path: Path, of_one_device: float, options: str) -> None:
    output = alone(tmp_path, *SMALL, *options.split())
    assert perplexity(output) == pytest.approx(of_one_device, rel=1e-4)
    assert "stage  layers" in output


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_stages_on_workers_learn_what_one_device_learns(tmp_path: Path, of_one_device: float, schedule: str) -> None:
    output = launched(tmp_path, *SMALL, "--stages", "2", "--schedule", schedule, workers=2)
    assert perplexity(output) == pytest.approx(of_one_device, rel=1e-4)


def test_two_replicas_of_two_stages_learn_what_one_device_learns_from_their_batches_together(
    tmp_path: Path, of_one_device: float
) -> None:
    options = (*SMALL, "--batch-size", "8", "--stages", "2")
    assert perplexity(launched(tmp_path, *options, workers=4, servers=1)) == pytest.approx(of_one_device, rel=1e-4)


def test_the_sentences_of_the_penn_treebank_are_read_from_the_folder_that_is_given(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        (tmp_path / f"ptb.{part}.txt").write_text(" the cat sat \n the <unk> sat \n the cat <unk> there \n")
    output = alone(tmp_path, *SMALL, "--data-dir", str(tmp_path), "--buckets", "3,8")
    assert "3 sentences, 5 words; buckets [8]" in output
    assert perplexity(output) < 10


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--stages 2 --micro-batches 3", "--batch-size 32 is no multiple of --micro-batches 3"),
        ("--stages 4 --layers 2", "--layers 2 are too few for --stages 4"),
        ("--buckets 5,x", "--buckets 5,x is neither a number nor lengths such as 10,20,40"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: str, expected: str) -> None:
    assert expected in alone(tmp_path, *options.split(), code=2)
