from __future__ import annotations

import pytest

from distrun_runtime.arrays import find
from distrun_runtime.errors import KVError


def test_cpu_devices_are_found_by_number() -> None:
    assert [find.get(name).name for name in ("cpu", "cpu:0", "cpu:7")] == ["cpu:0", "cpu:0", "cpu:7"]


@pytest.mark.parametrize("name", ["gpu:0", "cuda:1", "gpu"])
def test_a_gpu_is_refused_as_not_in_this_version(name: str) -> None:
    with pytest.raises(KVError, match="GPU aggregation is not in this version; there are cpu:0"):
        find.get(name)


@pytest.mark.parametrize("name", ["", "cpu:", "cpu:-1", "tpu:0", "cpu:0 "])
def test_an_unknown_device_is_refused(name: str) -> None:
    with pytest.raises(KVError, match="no device"):
        find.get(name)
