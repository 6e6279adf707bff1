"""The images and sentences that the examples train on: from a folder, or small sets that need no download.

Without a folder, MNIST is replaced by scikit-learn's 1,797 handwritten digits, enlarged to the size of MNIST's,
CIFAR-10 by patterns that are made up here, and the Penn Treebank by `alice.txt`: Lewis Carroll, "Alice's Adventures in
Wonderland", 1865, which is in the public domain. That is said on stderr.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from distrun_runtime.data import CIFAR10, MNIST, Arrays, cifar10_files, mnist_files
from distrun_runtime.data.reader import Batch, Dataset

TEST_DIGITS = 360
TRAIN_PATTERNS, TEST_PATTERNS = 2000, 500

ALICE = Path(__file__).with_name("alice.txt")
END, RARE = "<eos>", "<unk>"
"""What stands for the end of a sentence, and for words that are seldom; as in the files of the Penn Treebank."""


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


def sentences(folder: str | None) -> tuple[list[list[int]], list[list[int]], int]:
    """Return sentences for training and for validation as numbers of words, and how many different words there are.

    A sentence begins and ends with END. Words that only the validation has, or that stand once, count as RARE.

    Arguments:
        folder: has `ptb.train.txt` and `ptb.valid.txt`, a sentence a line; None: the sentences of ALICE.
    """
    if folder:
        train, valid = (_lines(Path(folder) / f"ptb.{part}.txt") for part in ("train", "valid"))
    else:
        say("no --data-dir: the sentences of alice.txt stand in for the Penn Treebank; each tenth is for validation")
        everything = _sentences_of(ALICE.read_text("utf-8"))
        train = [sentence for i, sentence in enumerate(everything) if i % 10]
        valid = everything[::10]
    counts = Counter(word for sentence in train for word in sentence)
    known = [END, RARE, *(word for word, count in counts.most_common() if count > 1 and word != RARE)]
    number = {word: i for i, word in enumerate(known)}

    def numbered(sentence: list[str]) -> list[int]:
        return [number[END], *(number.get(word, number[RARE]) for word in sentence), number[END]]

    return list(map(numbered, train)), list(map(numbered, valid)), len(known)


def _lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text("utf-8").splitlines() if line.strip()]


def _sentences_of(text: str) -> list[list[str]]:
    """Cut a text into sentences, and these into words and punctuation marks."""
    ends = re.split(r"(?<=[.!?])['\")]*\s+|\n\s*\n", text.lower())
    words = (re.findall(r"[a-z]+(?:['-][a-z]+)*|[^\sa-z]", end) for end in ends)
    return [sentence for sentence in words if sentence]
