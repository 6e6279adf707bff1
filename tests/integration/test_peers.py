"""Programs of other systems, unmodified, as jobs on hosts: MXNet's own servers, and torch without any.

They need `.peers`, which `scripts/install peers` makes (3.4 GB); without it they are skipped, or fail with
DISTRUN_PEERS=required, which `scripts/test peers` sets once it has installed all peers.
"""

from __future__ import annotations

import pytest
from hostlab.layout import address
from lab import Done, Site
from peers import python_of
from slowness import scaled

LIMIT_S = 120.0

pytestmark = pytest.mark.peers

MXNET = """\
import sys
import mxnet as mx

kv = mx.kv.create('dist_sync')
shape = (3, 4)
kv.init(7, mx.nd.zeros(shape))
kv.init(8, mx.nd.ones((2000, 1000)))
out, big = mx.nd.zeros(shape), mx.nd.zeros((2000, 1000))
for i in range(1, 4):
    kv.push(7, mx.nd.ones(shape) * i * (kv.rank + 1))
    kv.pull(7, out=out)
    expected = i * sum(r + 1 for r in range(kv.num_workers))
    assert (out.asnumpy() == expected).all(), out.asnumpy()
kv.push(8, [mx.nd.ones((2000, 1000)), mx.nd.ones((2000, 1000))])
kv.pull(8, out=big)
assert (big.asnumpy() == 2 * kv.num_workers).all(), big.asnumpy()
print('rank', kv.rank, 'of', kv.num_workers, 'sum', out.asnumpy().sum())
sys.stdout.flush()
kv._barrier()
"""
TORCH = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo", init_method="env://")
tensor = torch.arange(5.0) * (dist.get_rank() + 1)
dist.all_reduce(tensor)
expected = torch.arange(5.0) * sum(r + 1 for r in range(dist.get_world_size()))
assert torch.equal(tensor, expected), tensor
print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", tensor.sum().item(), flush=True)
dist.destroy_process_group()
"""


def run(lab: Site, text: str, *words: str, env: dict[str, str] | None = None) -> Done:
    """Run a script as a job on two hosts, which get it by --sync-dst-dir."""
    (lab.work / "train.py").write_text(text)
    options = ("-H", lab.hosts_file("h1", "h2"), "--sync-dst-dir", "/tmp/peers", "--timeout", "%g" % scaled(100))
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    return lab.distrun("launch", *options, *words, "train.py", env=env, timeout_s=LIMIT_S)


def test_an_unmodified_mxnet_program_adds_through_its_own_servers(lab: Site) -> None:
    python = python_of("mxnet")
    done = run(lab, MXNET, "-n", "2", "-s", "2", "--ps", "command", python)
    assert done.code == 0, done.out + done.err
    lines = sorted(line.split("| ")[1] for line in done.out.splitlines() if "rank" in line)
    assert lines == ["rank 0 of 2 sum 108.0", "rank 1 of 2 sum 108.0"]
    assert {line.split(" ")[0].split("@")[1] for line in done.out.splitlines() if "rank" in line} == {"h1", "h2"}


def test_an_mxnet_program_without_servers_of_its_own_is_recognised_and_ends(lab: Site) -> None:
    """It hung for ever: ours are no servers for it, and nobody said so."""
    python = python_of("mxnet")
    done = run(lab, MXNET, "-n", "2", "-s", "1", "--start-timeout", "10", "--python", python_of("torch"), python)
    assert done.code == 1, done.out + done.err
    assert "scheduler on h1 failed with exit code 1: no worker has opened a store for 10 s" in done.err
    assert "this looks like ps-lite (MXNet, BytePS)" in done.err
    assert "fix: distrun launch --ps command" in done.err


def test_mxnet_speaks_of_its_nodes_when_ps_verbose_is_exported(lab: Site) -> None:
    """Seeds export it before launch.py; there only the scheduler saw it. Nodes are at addresses of the hosts."""
    python = python_of("mxnet")
    env = {"PS_VERBOSE": "1", "DMLC_INTERFACE": "eth1"}
    done = run(lab, MXNET, "-n", "2", "-s", "2", "--ps", "command", python, env=env)
    assert done.code == 0, done.out + done.err
    said = done.out + done.err
    for task in ("worker-0@h1", "worker-1@h2", "server-0@h1", "server-1@h2", "scheduler@h1"):
        assert any(line.startswith(task) and "role=" in line for line in said.splitlines()), task
    for host in ("h1", "h2"):
        assert "ip=%s" % address(host, 1) in said


def test_an_unmodified_torch_script_reduces_over_the_hosts(lab: Site) -> None:
    python = python_of("torch")
    done = run(lab, TORCH, "-n", "4", "-s", "0", python)
    assert done.code == 0, done.out + done.err
    lines = sorted(line.split("| ")[1] for line in done.out.splitlines() if "rank" in line)
    assert lines == ["rank %d of 4 sum 100.0" % rank for rank in range(4)]


def test_a_torch_worker_that_dies_ends_the_job_on_all_hosts(lab: Site) -> None:
    python = python_of("torch")
    text = TORCH.replace("tensor =", "dist.get_rank() == 1 and __import__('os')._exit(9)\ntensor =")
    done = run(lab, text, "-n", "2", "-s", "0", python)
    assert done.code == 9, done.out + done.err
    assert "worker-1 on h2 failed with exit code 9" in done.err
