"""Rows of gradient compression, against quantisers written out here for float32, not against those of the store."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.kvstore import KVStore

RATE = 2
REPEAT = 7
REPEAT_LARGE = 2
SHAPES = {"1000": (2, 3), "1200": (1200, 1200), "irregular": (1211, 1211)}
Quantiser = Callable[[Any, Any], Any]


def two_bit(gradient: Any, residual: Any, threshold: float = 0.5) -> Any:
    """Return what arrives of a gradient; what does not stays in the residual."""
    residual += gradient
    sent = np.where(residual >= threshold, threshold, np.where(residual <= -threshold, -threshold, 0))
    residual -= sent.astype("float32")
    return sent.astype("float32")


def one_bit(gradient: Any, residual: Any, threshold: float = 0.0) -> Any:
    """Return what arrives of a gradient; what does not stays in the residual."""
    residual += gradient
    sent = np.where(residual > threshold, 1, -1).astype("float32")
    residual -= sent
    return sent


def scaled_one_bit(gradient: Any, residual: Any) -> Any:
    """Return what arrives of a gradient: signs times the mean magnitude; what does not stays in the residual."""
    residual += gradient
    sent = np.where(residual >= 0, 1, -1).astype("float32") * np.abs(residual).mean(dtype="float64").astype("float32")
    residual -= sent
    return sent


def top(gradient: Any, residual: Any, ratio: float = 0.1) -> Any:
    """Return what arrives of a gradient: its largest elements; what does not stays in the residual."""
    residual += gradient
    sent = np.zeros_like(residual)
    places = np.argsort(np.abs(residual), axis=None)[-math.ceil(ratio * residual.size) :]
    sent.flat[places] = residual.flat[places]
    residual.flat[places] = 0
    return sent


def half(gradient: Any, residual: Any) -> Any:
    """Return what arrives of a gradient; nothing stays."""
    return gradient.astype("float16").astype("float32")


def opened(shapes: Mapping[str, tuple[int, ...]] = SHAPES, **setting: object) -> KVStore:
    """Return a store of ones, compressed from the first element on, under the rule of the tests."""
    kv = kvstore.create("dist_sync")
    kv.set_gradient_compression({"min_size": 0, **setting})
    kv.init(list(shapes), [np.ones(shape, "float32") for shape in shapes.values()])
    kv.set_optimizer("test", rescale_grad=RATE)
    return kv


def check(kv: KVStore, key: str, expected: Any) -> None:
    """Compare what is stored."""
    out = np.full(np.shape(expected) or SHAPES[key], -1, "float32")
    kv.pull(key, out)
    assert np.abs(out - expected).max() < 1e-5 * max(1.0, np.abs(expected).max()), (key, out.ravel()[0], expected)


def steps(kv: KVStore, key: str, value: float, pushed: list[tuple[float, float]]) -> float:
    """Push constants, each with what it moves the value by, in units of the rate and all workers; return the value."""
    for constant, moves in pushed:
        kv.push(key, np.full(SHAPES[key], constant, "float32"))
        value += moves * RATE * kv.num_workers
        check(kv, key, value)
    return value


def random_rounds(kv: KVStore, key: str, value: float, quantise: Quantiser) -> None:
    """All workers push the same random gradients; the residual goes on from round to round. Three look at the sums."""
    random, residual = np.random.default_rng(123), np.zeros(SHAPES[key], "float32")
    expected = np.full(SHAPES[key], value, "float32")
    for _ in range(REPEAT if key == "1000" else REPEAT_LARGE):
        gradient = random.standard_normal(SHAPES[key], "float32")
        kv.push(key, gradient)
        if kv.rank % 3 == 0:
            expected += RATE * kv.num_workers * quantise(gradient, residual)
            check(kv, key, expected)


def compressed_cpu_2bit() -> KVStore:
    """Pull before push, zeros, residuals, thresholds, and random gradients against the simulation."""
    kv = opened(type="2bit", threshold=0.5)
    t = 0.5
    for key in SHAPES:
        check(kv, key, 1)
        value = steps(kv, key, 1, [(0.0, 0)] * 2 + [(0.4, 0), (0.1, t), (0.2, 0), (0.3, t), (0.0, 0), (0.5, t)])
        random_rounds(kv, key, value, two_bit)
    return kv


def compressed_cpu_1bit() -> KVStore:
    """Pull before push, ones, minus ones, the residuals of 2, 0 and -2, and random gradients against the simulation."""
    kv = opened(type="1bit", threshold=0.0)
    for key in SHAPES:
        check(kv, key, 1)
        repeat = REPEAT if key == "1000" else REPEAT_LARGE
        value = steps(kv, key, 1, [(1, 1)] * repeat + [(-1, -1)] * repeat + [(2, 1), (0, 1), (-2, -1)])
        # The residual is -1; 1 brings it to 0, which is not above the threshold: -1 is sent, and 1 stays.
        value = steps(kv, key, value, [(1, -1), (-2, -1)])
        random_rounds(kv, key, value, one_bit)
    return kv


def compressed_own() -> KVStore:
    """As BytePS's tests: each of the other codecs, every worker with random gradients of its own."""
    ways: tuple[tuple[dict[str, object], Quantiser], ...] = (
        ({"type": "fp16"}, half),
        ({"type": "topk", "ratio": 0.1}, top),
        ({"type": "1bit_scaled"}, scaled_one_bit),
    )
    shapes = {"small": (3, 5), "large": (120, 130)}
    for setting, quantise in ways:
        kv = opened(shapes, **setting)
        for key, shape in shapes.items():
            expected = np.ones(shape, "float32")
            sources = [(np.random.default_rng(rank), np.zeros(shape, "float32")) for rank in range(kv.num_workers)]
            for _ in range(REPEAT):
                gradients = [random.standard_normal(shape, "float32") for random, _ in sources]
                out = gradients[kv.rank].copy()
                kv.pushpull(key, out)
                for gradient, (_, residual) in zip(gradients, sources, strict=True):
                    expected += RATE * quantise(gradient, residual)
                assert np.abs(out - expected).max() < 1e-4, (setting, key)
                check(kv, key, out)
    return kv


PARTS = {
    "compressed_cpu_2bit": compressed_cpu_2bit,
    "compressed_cpu_1bit": compressed_cpu_1bit,
    "compressed_own": compressed_own,
}
