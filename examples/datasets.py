"""The images that the examples train on: real ones from a folder, or small sets that need no download.

Without a folder, MNIST is replaced by scikit-learn's 1,797 handwritten digits, enlarged to the size of MNIST's, and
CIFAR-10 by patterns that are made up here. That is said on stderr.
"""

from __future__ import annotations

import sys

import numpy as np

from distrun_runtime.data import CIFAR10, MNIST, Arrays, cifar10_files, mnist_files
from distrun_runtime.data.reader import Batch, Dataset

TEST_DIGITS = 360
TRAIN_PATTERNS, TEST_PATTERNS = 2000, 500


def mnist(folder: str | None, train_size: int | None) -> tuple[Dataset, Dataset]:
    """Return data sets for training and for the test: float32 (1, 28, 28), labels 0 to 9."""
    if folder:
        return first(MNIST(*mnist_files(folder)), train_size), MNIST(*mnist_files(folder, train=False))
    images, labels = digits()
    train = Arrays(images[TEST_DIGITS:], labels[TEST_DIGITS:])
    return first(train, train_size), Arrays(images[:TEST_DIGITS], labels[:TEST_DIGITS])


def cifar10(folder: str | None, train_size: int | None) -> tuple[Dataset, Dataset]:
    """Return data sets for training and for the test: float32 (3, 32, 32), labels 0 to 9."""
    if folder:
        return first(CIFAR10(cifar10_files(folder)), train_size), CIFAR10(cifar10_files(folder, train=False))
    say("no --data-dir: made-up patterns in 10 classes stand in for the images of CIFAR-10")
    return first(patterns(TRAIN_PATTERNS, seed=1), train_size), patterns(TEST_PATTERNS, seed=2)


def first(dataset: Dataset, count: int | None) -> Dataset:
    """Return the first examples of a data set; all, if no count is given."""
    return dataset if count is None else Arrays(*dataset.read(np.arange(min(count, len(dataset)))))


def digits() -> Batch:
    """Return scikit-learn's digits (8 x 8, 0 to 16) as images of 28 x 28 with pixels from 0 to 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("no --data-dir, and no scikit-learn to take digits from. Type:  pip install 'distrun[examples]'")
    say("no --data-dir: the 1797 digits of scikit-learn stand in for MNIST")
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    large = images.reshape(-1, 1, 8, 8).repeat(3, axis=2).repeat(3, axis=3) / 16
    padded = np.pad(large, ((0, 0), (0, 0), (2, 2), (2, 2)))
    return padded[order].astype(np.float32), labels[order].astype(np.int64)


def patterns(count: int, seed: int) -> Arrays:
    """Return images of 10 classes: each is its class's 4 x 4 coarse pattern of colours, shifted a little, in noise."""
    classes = np.random.default_rng(10).uniform(0.2, 0.8, (10, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)
    rng = np.random.default_rng(seed)
    labels = rng.integers(10, size=count)
    shifts = rng.integers(-2, 3, size=(count, 2))
    images = [np.roll(classes[label], shift, axis=(1, 2)) for label, shift in zip(labels, shifts, strict=True)]
    return Arrays((images + rng.normal(0, 0.2, (count, 3, 32, 32))).astype(np.float32), labels)


def say(line: str) -> None:
    """Say something about the data to the user."""
    print(line, file=sys.stderr, flush=True)
