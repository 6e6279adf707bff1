"""A process group of torch over the store: programs of torch that differ in the name of the backend only."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from peers import python_of
from scriptjobs import run_script

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = (ROOT / "tests" / "support" / "torch_group_program.py").read_text("utf-8")


def lines_of(folder: Path, backend: str, case: str, *words: str, workers: int = 2, servers: int = 2) -> list[str]:
    """Return what the ranks printed, sorted."""
    python = python_of("torch")
    folder.mkdir()
    done = run_script(folder, PROGRAM, backend, case, *words, python=python, workers=workers, servers=servers)
    assert done.returncode == 0 or case in ("failing", "differing"), done.stderr
    return sorted(line for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 ", "2 "))


@pytest.mark.peers
@pytest.mark.parametrize("case", ["by_ddp", "by_fsdp", "by_accelerate", "by_lightning", "by_collectives"])
def test_a_program_gets_what_it_gets_over_gloo(tmp_path: Path, case: str) -> None:
    workers = 3 if case == "by_collectives" else 2
    expected = lines_of(tmp_path / "gloo", "gloo", case, workers=workers, servers=0)
    assert lines_of(tmp_path / "distrun", "distrun", case, workers=workers) == expected
    assert len(expected) >= 2


@pytest.mark.peers
def test_a_group_ends_and_another_may_be_made(tmp_path: Path) -> None:
    found = lines_of(tmp_path / "job", "distrun", "again")
    assert found == [f"{rank} {number} [2.0, 2.0] False" for rank in (0, 1) for number in (0, 1)]


@pytest.mark.peers
def test_what_a_group_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    found = "\n".join(lines_of(tmp_path / "job", "distrun", "refused"))
    for words in (
        "allreduce in the default process group (rank 1 of 2): operations are SUM, AVG, MIN, MAX, not PRODUCT",
        "send in the default process group (rank 0 of 2): the backend 'distrun' has no such call; fix: make a group",
        "recv without a source in the default",
        "a tensor is torch.sparse_coo, and only dense ones travel; fix: sparse=False",
        "a tensor is on meta, not in the host's memory; fix: the backend 'nccl'",
        "all_to_all_single in the default process group (rank 0 of 2): equal parts, not of several sizes",
        "the backend 'distrun' has no options, not int",
        "0 [2.0, 2.0, 2.0, 2.0]",
        "1 [2.0, 2.0, 2.0, 2.0]",
    ):
        assert words in found, found
    assert "not refused" not in found


@pytest.mark.peers
def test_what_a_hook_of_ddp_leaves_out_comes_with_later_steps_in_other_buckets_too(tmp_path: Path) -> None:
    """Ranks' gradients are 0.25 and 0.5 everywhere: 2bit sends 0.5 of what has come together, topk half of a tensor."""
    found = lines_of(tmp_path / "job", "distrun", "hooked")
    mean = 0.375
    for rank in (0, 1):
        halves = [(mean, mean / 2), *[(mean, mean)] * 4]
        assert f"{rank} by fp16 {[(mean, mean)] * 5}" in found
        assert f"{rank} by topk {halves}" in found
        assert f"{rank} by 2bit {[(sent, sent) for sent in (0.0, 0.5, 0.5, 0.5, 0.0)]}" in found
        assert any(line.startswith(f"{rank} unknown compression type '3bit'") for line in found)
        assert any(line.startswith(f"{rank} key ") and "element 0 is nan" in line for line in found), found


@pytest.mark.peers
def test_a_rank_that_is_killed_in_mid_step_is_named(tmp_path: Path) -> None:
    first, again = lines_of(tmp_path / "job", "distrun", "failing", "killed")
    assert "PeerLost: allreduce of 228 bytes in the default process group (rank 0 of 2): " in first
    assert "worker-1@" in first
    assert "is lost" in first
    assert "worker-1@" in again


@pytest.mark.peers
def test_a_rank_that_stays_away_is_named_after_the_timeout_of_the_group(tmp_path: Path) -> None:
    first, again = lines_of(tmp_path / "job", "distrun", "failing", "away")
    assert "not done after 1 s, the timeout of the group: rank 1 did not make this call in time" in first
    assert "the timeout of the group" in again


@pytest.mark.peers
def test_calls_that_differ_are_named(tmp_path: Path) -> None:
    first, second = lines_of(tmp_path / "job", "distrun", "differing")
    assert "not done after 2 s, the timeout of the group: rank 1 calls allreduce of 16 bytes; fix" in first
    assert "the timeout of the group: rank 0 calls allreduce of 12 bytes; fix" in second


@pytest.mark.peers
@pytest.mark.parametrize("title", ["A process group: DDP, accelerate, Lightning", "Compressed gradients under DDP"])
def test_the_program_on_the_page_prints_what_it_says(tmp_path: Path, title: str) -> None:
    section = (ROOT / "docs" / "torch.md").read_text("utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    done = run_script(tmp_path, program, python=python_of("torch"), servers=2)
    assert done.stdout.splitlines() == re.findall(r"# prints (.*)", program) * 2, done.stderr


@pytest.mark.peers
def test_a_job_without_servers_is_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, PROGRAM, "distrun", "by_ddp", python=python_of("torch"))
    assert "whose job has no servers" in done.stderr
    assert "fix: distrun launch -s 1" in done.stderr


@pytest.mark.peers
def test_torch_knows_the_backend_of_an_installed_distribution_and_loads_nothing_for_it(tmp_path: Path) -> None:
    point = re.search(r'"torch.backends"\].*\n(.+)"', (ROOT / "pyproject.toml").read_text("utf-8")).group(1)
    info = tmp_path / "distrun-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: distrun\nVersion: 1\n", "utf-8")
    (info / "entry_points.txt").write_text("[torch.backends]\n%s\n" % point.replace('"', ""), "utf-8")
    program = """
import sys, torch, torch.distributed as dist
print(dist.is_backend_available("distrun"), [name for name in sys.modules if name.startswith("distrun_runtime.")])
dist.init_process_group("distrun", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
one = torch.ones(2)
dist.all_reduce(one)
print(dist.get_backend(), one.tolist())
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "runtime")])}
    command = [python_of("torch"), "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["True ['distrun_runtime.torch_backend']", "distrun [1.0, 1.0]"], done.stderr
