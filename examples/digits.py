"""Train a two-layer network on the UCI handwritten digits with a key-value store.

Alone:            python examples/digits.py
With a launcher:  distrun launch -n 2 -s 2 --launcher local python examples/digits.py --kv-store dist_sync

Every worker draws the same shuffle of the training images for an epoch. Step t uses the next n*b images of it, of
which worker r takes its b: so n workers with batch size b do in `dist_sync` what one process does in `local` with
batch size n*b. In float64, the weights of the two agree to rounding.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import numpy as np

from distrun_runtime import kvstore
from distrun_runtime.errors import RuntimeFault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    Dataset = tuple[Floats, Integers]

TEST_IMAGES = 360
HIDDEN = 64
KEYS = ["hidden.weight", "hidden.bias", "output.weight", "output.bias"]


def load_digits(rng: np.random.Generator) -> tuple[Dataset, Dataset]:
    """Return images (n, 64) in 0..1 and labels (n,), for training (1,437) and for the test (360)."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        sys.exit("digits.py: the images come with scikit-learn, which is missing. Type:  pip install scikit-learn")
    images, labels = load(return_X_y=True)
    order = rng.permutation(len(images))
    images, labels = images[order] / 16.0, labels[order]
    return (images[TEST_IMAGES:], labels[TEST_IMAGES:]), (images[:TEST_IMAGES], labels[:TEST_IMAGES])


def first_weights(rng: np.random.Generator) -> list[Floats]:
    """Return random weights in the order of KEYS, scaled for ReLU (He et al. 2015)."""
    return [
        rng.standard_normal((64, HIDDEN)) * np.sqrt(2 / 64),
        np.zeros(HIDDEN),
        rng.standard_normal((HIDDEN, 10)) * np.sqrt(2 / HIDDEN),
        np.zeros(10),
    ]


def forward(weights: list[Floats], images: Floats) -> tuple[Floats, Floats]:
    """Return the hidden layer's outputs (n, HIDDEN) and the classes' scores (n, 10)."""
    hidden = np.maximum(images @ weights[0] + weights[1], 0)
    return hidden, hidden @ weights[2] + weights[3]


def gradients(weights: list[Floats], images: Floats, labels: Integers) -> list[Floats]:
    """Return the gradients of the softmax cross entropy, summed over the batch; the store's rule divides."""
    hidden, scores = forward(weights, images)
    error = np.exp(scores - scores.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    back = (error @ weights[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


def accuracy(weights: list[Floats], data: Dataset) -> float:
    """Return the share of images whose highest score is their label."""
    images, labels = data
    return float(np.mean(forward(weights, images)[1].argmax(axis=1) == labels))


def batches(count: int, size: int, rank: int, workers: int, rng: np.random.Generator) -> Iterator[Integers]:
    """Yield this worker's indices for each step of an epoch; what does not fill a step of all workers is left out."""
    order = rng.permutation(count)
    for begin in range(0, count - size * workers + 1, size * workers):
        yield order[begin + rank * size : begin + (rank + 1) * size]


def train(kv: kvstore.KVStore, options: argparse.Namespace) -> list[Floats]:
    """Train for the epochs asked for, print the test accuracy after each, and return the weights."""
    # One generator for everything that all workers must draw alike.
    rng = np.random.default_rng(options.seed)
    training, test = load_digits(rng)
    weights = first_weights(rng)
    step_size = options.batch_size * kv.num_workers
    if step_size > len(training[0]):
        sys.exit("digits.py: a step of %d images is more than the %d there are" % (step_size, len(training[0])))

    kv.init(KEYS, weights)
    kv.set_optimizer(
        "sgd",
        learning_rate=options.lr,
        momentum=options.momentum,
        # Asynchronous servers apply each worker's batch by itself.
        rescale_grad=1 / (options.batch_size if "async" in options.kv_store else step_size),
    )
    kv.pull(KEYS, out=weights)
    for epoch in range(options.epochs):
        for mine in batches(len(training[0]), options.batch_size, kv.rank, kv.num_workers, rng):
            kv.push(KEYS, gradients(weights, training[0][mine], training[1][mine]))
            kv.pull(KEYS, out=weights)
        print("Epoch %d: Test_acc %.4f" % (epoch, accuracy(weights, test)), flush=True)
    # The others may have gone on since: end with what all of them made.
    kv.barrier()
    kv.pull(KEYS, out=weights)
    return weights


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-store", "--kvstore", choices=kvstore.TYPES, default="local", help="default local")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes for a step (default 32)")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default 0.1)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--gpus", metavar="LIST", help="accepted for scripts that pass it; numpy computes on the CPU")
    parser.add_argument("--seed", type=int, default=0, help="the same on all workers (default 0)")
    parser.add_argument("--save-weights", metavar="FILE", help="worker 0 writes the last weights to FILE (.npz)")
    options = parser.parse_args(arguments)
    if min(options.epochs, options.batch_size) < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return options


def main() -> None:
    """Train with the store that was asked for."""
    options = parse()
    with kvstore.create(options.kv_store) as kv:
        print("Total number of workers: %d" % kv.num_workers, flush=True)
        print("This worker's rank: %d" % kv.rank, flush=True)
        if options.gpus and kv.rank == 0:
            print("digits.py: --gpus %s has no effect, numpy computes on the CPU" % options.gpus, file=sys.stderr)
        weights = train(kv, options)
        if options.save_weights and kv.rank == 0:
            with open(options.save_weights, "wb") as file:
                np.savez(file, **dict(zip(KEYS, weights, strict=True)))


if __name__ == "__main__":
    try:
        main()
    except (RuntimeFault, OSError) as error:  # What a user can mend is a line, no traceback.
        sys.exit("digits.py: %s" % error)
