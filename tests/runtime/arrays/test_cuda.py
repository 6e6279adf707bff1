"""CUDA's calls: errors by name, and forked children."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from children import exit_code_of
from cudastandin import StandIn

from distrun_runtime.arrays.cuda import Cuda, CudaError
from distrun_runtime.errors import KVError, StoreClosed


def test_an_error_says_call_device_name_and_code() -> None:
    standin = StandIn(2)
    cuda = Cuda(standin)
    standin.fail("make_event", code=400)
    with pytest.raises(CudaError) as caught:
        cuda.event(1)
    error = caught.value
    assert (
        str(error) == "event on gpu:1 failed: cudaErrorInvalidResourceHandle (CUDA error 400: invalid resource handle)"
    )
    assert (error.call, error.device, error.code, error.name) == ("event", 1, 400, "cudaErrorInvalidResourceHandle")
    assert not error.is_sticky
    assert isinstance(error, KVError)
    assert cuda.event(1).device == 1  # it was only that one
    assert str(error.about("key 'w'")).startswith("key 'w': event on gpu:1 failed")


@pytest.mark.parametrize("how", ["call", "operation"])
def test_after_an_illegal_address_every_call_raises_that_error(how: str) -> None:
    standin = StandIn(2)
    cuda = Cuda(standin)
    pointer = cuda.alloc(0, 8)
    stream: Any = cuda.stream(0)
    event: Any = cuda.event(0)
    if how == "call":
        standin.fail("fill", code=700)
        with pytest.raises(CudaError, match="fill on gpu:0 failed: cudaErrorIllegalAddress"):
            cuda.fill(pointer, 0, 8, stream)
        first = "fill"
    else:
        standin.fail_operation()
        cuda.fill(pointer, 0, 8, stream)
        cuda.record(event, stream)
        with pytest.raises(CudaError, match="synchronize on gpu:0 failed: cudaErrorIllegalAddress"):
            cuda.synchronize(event)
        first = "synchronize"
    assert cuda.failed is not None
    before = sum(standin.calls.values())
    calls = [
        cuda.count,
        lambda: cuda.alloc(1, 8),
        lambda: cuda.free(pointer),
        lambda: cuda.stream(1),
        lambda: cuda.query(event),
        lambda: cuda.synchronize(event),
        lambda: cuda.copy(pointer, pointer, 8, stream),
    ]
    for call in calls:
        with pytest.raises(CudaError, match=first + " on gpu:0 failed: .*cannot use the GPU any more") as caught:
            call()
        assert caught.value.is_sticky
    calls.clear()
    stream = event = None
    gc.collect()
    assert sum(standin.calls.values()) == before  # nothing is asked of a dead device


def test_streams_and_events_end_when_nothing_refers_to_them() -> None:
    standin = StandIn(1)
    cuda = Cuda(standin)
    stream, event = cuda.stream(0), cuda.event(0)
    cuda.record(event, stream)
    del stream, event
    gc.collect()
    assert (standin.calls["end_stream"], standin.calls["end_event"]) == (1, 1)


def test_a_forked_child_calls_nothing_and_its_destructors_do_not_either() -> None:
    standin = StandIn(1)
    cuda = Cuda(standin)
    kept = [cuda.stream(0), cuda.event(0)]

    def child() -> None:
        kept.clear()
        gc.collect()
        for call in (cuda.count, lambda: cuda.alloc(0, 8), lambda: cuda.stream(0)):
            with pytest.raises(StoreClosed, match="forked from process %d" % os.getppid()):
                call()
        assert not standin.mistakes

    assert exit_code_of(child) == 0
    assert cuda.count() == 1
