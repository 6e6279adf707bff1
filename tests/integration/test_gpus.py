"""Real workers that say which GPUs they see, on this machine, with a stand-in of NVIDIA's library."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import nvidia
import pytest
from distrun_cli import Distrun, wait_until

SHOW = (
    "import os; print(*(os.environ.get(name) for name in ('DISTRUN_ROLE', 'LOCAL_RANK', 'CUDA_VISIBLE_DEVICES',"
    " 'CUDA_DEVICE_ORDER')), flush=True)"
)


@pytest.fixture
def distrun(tmp_path: Path) -> Iterator[Distrun]:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    nvidia.library(libraries)
    made = Distrun(tmp_path, LD_LIBRARY_PATH=str(libraries), NVML_GPUS="4", CUDA_VISIBLE_DEVICES="3,1,2")
    yield made
    wait_until(lambda: not made.left(), 60, "nothing is left; left: %s" % made.left())


def test_a_worker_sees_its_own_gpus_and_too_few_are_refused_before_anything_starts(distrun: Distrun) -> None:
    words = ("-n", "2", "-s", "0", "--gpus-per-worker")
    done = distrun.launch("-v", *words, "1", sys.executable, "-c", SHOW)
    assert done.returncode == 0, done.stderr.decode()
    assert [distrun.log(f"worker-{rank}").decode() for rank in (0, 1)] == [
        "worker 0 3 PCI_BUS_ID\n",
        "worker 1 1 PCI_BUS_ID\n",
    ]
    told = done.stderr.decode()
    assert ": GPUs: 4 x NVIDIA A100, 40 GiB, driver 550.54.15; tasks see 3,1,2\n" in told
    assert "distrun: --gpus-per-worker: each worker sees its own GPU as cuda:0, whatever its LOCAL_RANK\n" in told
    refused = distrun.launch(*words, "2", sys.executable, "-c", SHOW)
    assert (refused.returncode, refused.stdout) == (2, b"")
    assert "2 workers on " in refused.stderr.decode()
    assert (
        "need 4 GPUs, but there are 3 GPUs (3,1,2, CUDA_VISIBLE_DEVICES=3,1,2 of its agent)" in refused.stderr.decode()
    )
    assert "-> --gpus-per-worker 1, or at most 1 worker there" in refused.stderr.decode()


def test_a_device_that_is_chosen_as_for_torchrun_is_one_that_the_worker_sees(distrun: Distrun) -> None:
    """torch is not needed for that: it counts what CUDA_VISIBLE_DEVICES lists."""
    count = "len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))"
    program = f"import os; print('cuda:%d of %d' % (int(os.environ['LOCAL_RANK']) % {count}, {count}))"
    done = distrun.launch("-n", "3", "-s", "0", "--gpus-per-worker", "1", "--no-prefix", sys.executable, "-c", program)
    assert (done.returncode, done.stdout) == (0, b"cuda:0 of 1\n" * 3), done.stderr.decode()
