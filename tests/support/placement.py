"""Runs a module's tests twice: with values cut and placed as distrun does by default, and as MXNet does."""

from __future__ import annotations

from collections.abc import Iterator

import cluster
import pytest

from distrun_runtime.arrays import cores
from distrun_runtime.ps import routing

SHARD_BYTES = 2048
"""The most that a shard has in these tests, unless the module's own `SHARD_BYTES` says something else."""


@pytest.fixture(scope="module", params=["size", "mxnet"])
def placement(request: pytest.FixtureRequest) -> Iterator[str]:
    """Place the values of all jobs of a module in each of the two ways.

    By size, values above a small limit have several shards. As MXNet does, those of `bigarray_bound` elements or more
    are on all servers. Servers do all their work later there (see `engines`), and three threads share what is copied
    and added, however little it is, so that two runs show both of each.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "PARTITION", request.param)
        if request.param == "size":
            patch.setattr(routing, "SHARD_BYTES", getattr(request.module, "SHARD_BYTES", SHARD_BYTES))
        else:
            patch.setattr(cluster, "MUCH_BYTES", 0)
            patch.setattr(cores, "UNIT", 8)
            patch.setattr(cores.SHARED, "wanted", 3)
            patch.setattr(cores.SHARED, "bound", 1)
        yield str(request.param)
