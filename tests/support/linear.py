"""A small model with gradients in numpy: y = x w + b, half the sum of squared errors."""

from __future__ import annotations

import numpy as np

from distrun_runtime.trainer import Parameter

RATE = {"learning_rate": 0.05, "momentum": 0.9, "wd": 0.001}


class Linear:
    """The model on k devices; data are random, but always the same."""

    def __init__(self, devices: int = 1, dtype: str = "float64", seed: int = 3) -> None:
        random = np.random.default_rng(seed)
        first = [random.normal(size=(4, 3)).astype(dtype), random.normal(size=3).astype(dtype)]
        self.params = {
            name: Parameter([one.copy() for _ in range(devices)], [np.zeros_like(one) for _ in range(devices)])
            for name, one in zip(("weight", "bias"), first, strict=True)
        }

    def backward(self, x: np.ndarray, y: np.ndarray, device: int = 0) -> float:
        """Write the gradients of some examples; return the loss."""
        weight, bias = (self.params[name].list_data()[device] for name in ("weight", "bias"))
        error = x @ weight + bias - y
        self.params["weight"].list_grad()[device][...] = x.T @ error
        self.params["bias"].list_grad()[device][...] = error.sum(axis=0)
        return float((error * error).sum() / 2)

    @property
    def weights(self) -> list[np.ndarray]:
        """A copy of the weights of all devices."""
        return [one.copy() for name in ("weight", "bias") for one in self.params[name].list_data()]


def examples(count: int, dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    """Return x (count, 4) and y (count, 3)."""
    random = np.random.default_rng(11)
    x = random.normal(size=(count, 4))
    return x.astype(dtype), (x @ random.normal(size=(4, 3)) + 1).astype(dtype)


def trained(batches: list[tuple[np.ndarray, np.ndarray]], **options: object) -> list[np.ndarray]:
    """Return the weights after training on batches on one device, as plain as it can be: the reference."""
    from distrun_runtime.trainer import Trainer

    model = Linear(dtype=str(batches[0][0].dtype))
    trainer = Trainer(model.params, "sgd", RATE, kvstore=None, **options)  # type: ignore[arg-type]
    for x, y in batches:
        model.backward(x, y)
        trainer.step(len(x))
    return model.weights
