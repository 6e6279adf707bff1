"""Runs a job's tests twice: with the servers' values in host memory, and on a GPU of the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import cluster
import pytest
from gpukit import Machine, gpus_of_process


@pytest.fixture(params=["cpu", "gpu"])
def server_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the servers of a test's jobs keep values in each of the two; what they answer must not depend on it.

    At the end no work of the GPU may be without its place in an order.
    """
    if request.param == "cpu":
        yield "cpu"
        return
    with gpus_of_process(Machine(1, memory=1 << 30)) as machine:
        monkeypatch.setattr(cluster, "SERVER_DEVICE", "gpu:0")
        yield "gpu"
        machine.finish()
