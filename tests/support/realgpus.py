"""Tests that run on a real GPU, where there is one, and on the stand-in as well."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

REAL = pytest.param("gpu", marks=pytest.mark.gpu)
ON_BOTH = pytest.mark.parametrize("kind_of_gpu", ["stand-in", REAL], indirect=True)
ON_REAL = pytest.mark.parametrize("kind_of_gpu", [REAL], indirect=True)


@pytest.fixture
def kind_of_gpu(request: pytest.FixtureRequest) -> Iterator[str]:
    """Whether the process's GPUs are real ones (`gpu`) or two of the stand-in's: `devices.gpu(0)` is one of them."""
    from gpukit import Machine, gpus_of_process

    from distrun_runtime.arrays import cupy_driver
    from distrun_runtime.arrays.cuda import CudaMissing

    if request.param == "gpu":
        try:
            cupy_driver.of_process()
        except CudaMissing as err:
            pytest.skip(str(err))
        yield "gpu"
        return
    with gpus_of_process(Machine(2)) as machine:
        yield "stand-in"
        machine.finish()
