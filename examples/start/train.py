"""Train a small network to tell three spirals of points apart. The points are made here.

Alone:     python3 train.py
As a job:  distrun launch -f job.toml
"""

from __future__ import annotations

import os

import numpy as np

from distrun_runtime import kvstore

POINTS, SPIRALS, HIDDEN = 4000, 3, 64
EPOCHS, BATCH = 10, 50
KEYS = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]


def spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points (count, 2) and the number of each one's spiral (count,)."""
    rng = np.random.default_rng(seed)
    spiral, radius = rng.integers(SPIRALS, size=count), rng.random(count)
    angle = 4 * radius + spiral * 2 * np.pi / SPIRALS + rng.normal(0, 0.15, count)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), spiral


def forward(weights: list[np.ndarray], points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden layer's outputs (n, HIDDEN) and the probabilities of the spirals (n, SPIRALS)."""
    hidden = np.maximum(points @ weights[0] + weights[1], 0)
    scores = np.exp(hidden @ weights[2] + weights[3])
    return hidden, scores / scores.sum(axis=1, keepdims=True)


def gradients(weights: list[np.ndarray], points: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return the mean loss of a batch and its gradients, in the order of KEYS."""
    hidden, error = forward(weights, points)
    rows = np.arange(len(labels))
    loss = -np.log(error[rows, labels]).mean()
    error[rows, labels] -= 1
    error /= len(labels)
    back = (error @ weights[2].T) * (hidden > 0)
    return float(loss), [points.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def main() -> None:
    # A job's tasks share the weights, which the servers keep; a program that runs alone has them for itself.
    with kvstore.create("dist_sync" if "DMLC_ROLE" in os.environ else "local") as kv:
        points, labels = spirals(POINTS // kv.num_workers, seed=kv.rank)  # this worker's
        test_points, test_labels = spirals(1000, seed=1000)
        rng = np.random.default_rng(0)
        sizes = [(2, HIDDEN), (HIDDEN,), (HIDDEN, SPIRALS), (SPIRALS,)]
        weights = [rng.normal(0, 0.5, size) for size in sizes]
        kv.init(KEYS, weights)
        kv.set_optimizer("adam", learning_rate=0.02, rescale_grad=1 / kv.num_workers)
        kv.pull(KEYS, out=weights)
        steps = len(points) // BATCH
        for epoch in range(EPOCHS):
            for step in range(steps):
                batch = slice(step * BATCH, (step + 1) * BATCH)
                loss, grads = gradients(weights, points[batch], labels[batch])
                kv.push(KEYS, grads)
                kv.pull(KEYS, out=weights)
                kv.report(step=epoch * steps + step + 1, total=EPOCHS * steps, loss=loss)
            accuracy = np.mean(forward(weights, test_points)[1].argmax(axis=1) == test_labels)
            kv.report(accuracy=accuracy)
            if kv.rank == 0:
                print("epoch %2d of %d: loss %.3f, accuracy %.3f" % (epoch + 1, EPOCHS, loss, accuracy), flush=True)


if __name__ == "__main__":
    main()
