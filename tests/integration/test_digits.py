"""The example on real images: alone and with the launcher, synchronous and asynchronous."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from slowness import scaled

pytestmark = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="the digits come with scikit-learn: pip install scikit-learn"
)

ROOT = Path(__file__).resolve().parents[2]
EPOCH = re.compile(r"Epoch (\d+): Test_acc (\d\.\d{4})$", re.MULTILINE)


def run(argv: list[str], tmp_path: Path) -> str:
    """Run a command with a job store of its own and return its standard output; it must end with code 0."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "DISTRUN_"))}
    env["XDG_STATE_HOME"] = str(tmp_path / "state")
    env["OMP_NUM_THREADS"] = env["OPENBLAS_NUM_THREADS"] = "1"
    result = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=scaled(100), check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def alone(tmp_path: Path, *options: str) -> str:
    return run([sys.executable, str(ROOT / "examples" / "digits.py"), *options], tmp_path)


def launched(tmp_path: Path, *options: str) -> str:
    launch = [sys.executable, "-m", "distrun", "launch", "-n", "2", "-s", "2", "--launcher", "local"]
    return run([*launch, sys.executable, str(ROOT / "examples" / "digits.py"), *options], tmp_path)


def accuracies(output: str, worker: str = "") -> list[float]:
    """Return the accuracy of each epoch that the worker printed (the only process, when none is named)."""
    lines = [line.partition(" | ")[2] if worker else line for line in output.splitlines() if line.startswith(worker)]
    found = EPOCH.findall("\n".join(lines))
    assert [int(epoch) for epoch, _ in found] == list(range(len(found)))
    return [float(value) for _, value in found]


@pytest.mark.parametrize("spelling", ["--kv-store", "--kvstore"])
def test_digits_alone_prints_rank_and_workers_and_reaches_its_accuracy(spelling: str, tmp_path: Path) -> None:
    output = alone(tmp_path, spelling, "local", "--epochs", "5", "--batch-size", "64", "--gpus", "0,1")
    assert "Total number of workers: 1" in output
    assert "This worker's rank: 0" in output
    assert len(accuracies(output)) == 5
    assert accuracies(output)[-1] >= 0.95


@pytest.mark.slow
def test_two_workers_and_two_servers_reach_95_percent_in_dist_sync(tmp_path: Path) -> None:
    output = launched(tmp_path, "--kv-store", "dist_sync", "--epochs", "5")
    for rank in (0, 1):
        assert re.search(r"^worker-%d@\S+ \| This worker's rank: %d$" % (rank, rank), output, re.MULTILINE)
        assert re.search(r"^worker-%d@\S+ \| Total number of workers: 2$" % rank, output, re.MULTILINE)
        assert len(accuracies(output, "worker-%d@" % rank)) == 5
        assert accuracies(output, "worker-%d@" % rank)[-1] >= 0.95


@pytest.mark.slow
def test_dist_sync_of_two_workers_equals_local_with_twice_the_batch(tmp_path: Path) -> None:
    """The promise of dist_sync: with n workers and batch b it behaves like local with batch n*b."""
    common = ("--epochs", "1", "--save-weights")
    alone(tmp_path, "--kv-store", "local", "--batch-size", "64", *common, str(tmp_path / "one.npz"))
    launched(tmp_path, "--kv-store", "dist_sync", "--batch-size", "32", *common, str(tmp_path / "two.npz"))
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        assert sorted(one.files) == sorted(two.files)
        for name in one.files:
            # 1e-5 is what is asked for; in float64 only the order of the sums differs.
            np.testing.assert_allclose(two[name], one[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_dist_async_trains(tmp_path: Path) -> None:
    output = launched(tmp_path, "--kv-store", "dist_async", "--epochs", "5", "--momentum", "0.5")
    for rank in (0, 1):
        # Below the synchronous 0.95: the order of updates is not fixed.
        assert accuracies(output, "worker-%d@" % rank)[-1] >= 0.9


@pytest.mark.slow
def test_manual_start_of_the_readme_trains_with_the_same_command_in_every_role(tmp_path: Path) -> None:
    """The seed's manual start: five DMLC_* variables, no launcher."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (block,) = [text for text in re.findall(r"^```sh\n(.*?)^```", readme, re.M | re.S) if "DMLC_ROLE=scheduler" in text]
    # Started by hand, the scheduler binds exactly the port it is told.
    block = block.replace("DMLC_PS_ROOT_PORT=9091", "DMLC_PS_ROOT_PORT=%d" % free_port())
    # The words are split at blanks, which the true paths may have.
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    block = block.replace("python examples/digits.py", "its_python examples/digits.py --epochs 5")
    start = 'its_python() { %s "$@"; }\n' % shlex.quote(sys.executable)
    output = run(["bash", "-c", start + block], tmp_path)
    assert sorted(re.findall(r"This worker's rank: (\d)", output)) == ["0", "1"]
    # Two processes on one pipe may run their lines together, so these are not looked for at the ends of lines.
    last = re.findall(r"Epoch 4: Test_acc (\d\.\d{4})", output)
    assert len(last) == 2
    assert min(float(value) for value in last) >= 0.95


def test_digits_says_what_to_install_when_scikit_learn_is_missing(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError('hidden by the test')\n", encoding="utf-8")
    # PYTHONPATH goes before site-packages, so this sklearn is found first.
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / "digits.py")]
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "pip install scikit-learn" in result.stderr
