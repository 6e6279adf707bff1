"""Fit a straight line through noisy points without rounds: each worker's step is applied when it arrives (numpy).

Alone:            python examples/linear_async.py --kv-store local
With a launcher:  distrun launch -n 2 -s 2 --launcher local python examples/linear_async.py

Workers need not make equally many steps: here each has as many points as it likes.
"""

from __future__ import annotations

import argparse

import arguments
import numpy as np
from numpy.typing import NDArray

from distrun_runtime import kvstore
from distrun_runtime.data import Arrays, Reader
from distrun_runtime.trainer import Parameter, Trainer, fit

WEIGHT = np.array([2.0, -3.4])
BIAS = 4.2


def points(count: int, seed: int) -> Arrays:
    """Return inputs (n, 2) and outputs (n,): the true line with noise of 0.01."""
    rng = np.random.default_rng(seed)
    inputs = rng.standard_normal((count, 2))
    return Arrays(inputs, inputs @ WEIGHT + BIAS + rng.normal(0, 0.01, count))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-store", "--kvstore", choices=kvstore.TYPES, default="dist_async")
    parser.add_argument("--epochs", type=arguments.positive, default=5)
    parser.add_argument("--batch-size", type=arguments.positive, default=10)
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate (default 0.03)")
    return parser.parse_args()


def main() -> None:
    """Fit, print the mean squared error after each epoch, and at the end what was found."""
    options = parse()
    with kvstore.create(options.kv_store) as kv:
        # Every worker has points of its own, and not as many as the others.
        train = Reader(points(1000 + 100 * kv.rank, seed=kv.rank), options.batch_size, shuffle=True)
        weight, bias = Parameter(np.zeros(2), name="weight"), Parameter(np.zeros(()), name="bias")
        losses = []

        def step(batch: tuple[NDArray[np.float64], NDArray[np.float64]]) -> None:
            """Compute the gradients of half the squared errors, summed over the batch."""
            inputs, outputs = batch
            error = inputs @ weight.data + bias.data - outputs
            losses.append(np.mean(error**2))
            weight.grad, bias.grad = error @ inputs, error.sum()

        def report(epoch: int, _: Trainer) -> None:
            print("Epoch %d: loss %f" % (epoch, np.mean(losses)), flush=True)
            losses.clear()

        rule = {"learning_rate": options.lr}
        fit(step, [weight, bias], train, kv, "sgd", rule, epochs=options.epochs, after_epoch=report)
        print("weight %.3f %.3f, bias %.3f" % (*weight.data, bias.data), flush=True)


if __name__ == "__main__":
    arguments.run(main)
