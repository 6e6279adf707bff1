"""CUDA's calls: errors by name, and forked children."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from children import exit_code_of
from cudastandin import StandIn

from distrun_runtime.arrays.cuda import Cuda, CudaError, CudaOutOfMemory, HostMemory
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


def test_out_of_memory_says_what_was_wanted_and_what_is_free() -> None:
    cuda = Cuda(StandIn(1, memory=1000))
    cuda.alloc(0, 400)
    with pytest.raises(CudaOutOfMemory, match="wanted 700 bytes, free are 600 of 1000") as caught:
        cuda.alloc(0, 700)
    assert (caught.value.wanted, caught.value.free, caught.value.total) == (700, 600, 1000)
    assert cuda.alloc(0, 600).nbytes == 600


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


@pytest.mark.parametrize(
    "name",
    ["count", "alloc", "free", "copy", "copy_peer", "fill", "record", "wait", "query", "synchronize", "register"],
)
def test_any_call_can_fail(name: str) -> None:
    standin = StandIn(2)
    cuda = Cuda(standin)
    a, b, stream, event = cuda.alloc(0, 8), cuda.alloc(1, 8), cuda.stream(0), cuda.event(0)
    memory = np.zeros(8, np.uint8)
    calls = {
        "count": cuda.count,
        "alloc": lambda: cuda.alloc(0, 8),
        "free": lambda: cuda.free(a),
        "copy": lambda: cuda.copy(a, a, 8, stream),
        "copy_peer": lambda: cuda.copy_peer(a, b, 8, stream),
        "fill": lambda: cuda.fill(a, 0, 8, stream),
        "record": lambda: cuda.record(event, stream),
        "wait": lambda: cuda.wait(stream, event),
        "query": lambda: cuda.query(event),
        "synchronize": lambda: cuda.synchronize(event),
        "register": lambda: cuda.register(HostMemory(memory.ctypes.data, 8)),
    }
    standin.fail(name, code=719)
    with pytest.raises(CudaError, match="%s.* failed: cudaErrorLaunchFailure" % name):
        calls[name]()


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
