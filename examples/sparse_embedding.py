"""Train an embedding of which a step needs few rows: only these are fetched, and only these are sent (numpy).

Alone:            python examples/sparse_embedding.py
With a launcher:  distrun launch -n 2 -s 2 --launcher local python examples/sparse_embedding.py --kv-store dist_sync

Made-up documents of 20 words out of 10,000 are to be told from the others, by the mean of their words' vectors.
"""

from __future__ import annotations

import argparse

import arguments
import numpy as np
from numpy.typing import NDArray

from distrun_runtime import kvstore
from distrun_runtime.data import Arrays, Reader, epoch_size
from distrun_runtime.kvstore import RowSparse
from distrun_runtime.trainer import Parameter, Trainer

WORDS, LENGTH, WIDTH = 10_000, 20, 8


def documents(count: int, seed: int) -> Arrays:
    """Return words (n, LENGTH), a few of them frequent and most of them rare, and kinds (n,), 0 or 1."""
    meaning = np.random.default_rng(0).standard_normal(WORDS)
    words = (WORDS * np.random.default_rng(seed).random((count, LENGTH)) ** 8).astype(np.int64)
    return Arrays(words, (meaning[words].sum(axis=1) > 0).astype(np.float32))


def chances(vectors: NDArray[np.float32], output: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the chance of kind 1 for documents whose words have these vectors, (n, LENGTH, WIDTH)."""
    chance: NDArray[np.float32] = 1 / (1 + np.exp(-(vectors.mean(axis=1) @ output)))
    return chance


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kv-store", "--kvstore", choices=kvstore.TYPES, default="local", help="default local")
    parser.add_argument("--epochs", type=arguments.positive, default=5)
    parser.add_argument("--batch-size", type=arguments.positive, default=100)
    parser.add_argument("--lr", type=float, default=0.3, help="learning rate (default 0.3)")
    return parser.parse_args()


def main() -> None:
    """Train, and print the test accuracy after each epoch."""
    options = parse()
    rng = np.random.default_rng(0)
    train_set, test_set = documents(20_000, seed=1), documents(1000, seed=2)
    embedding = Parameter(rng.normal(0, 0.1, (WORDS, WIDTH)).astype(np.float32), name="embedding", stype="row_sparse")
    output = Parameter(rng.normal(0, 1, WIDTH).astype(np.float32), name="output")
    with kvstore.create(options.kv_store) as kv:
        size = epoch_size(len(train_set), options.batch_size, kv.num_workers)
        train = Reader(
            train_set, options.batch_size, num_parts=kv.num_workers, part_index=kv.rank, epoch_size=size, shuffle=True
        )
        trainer = Trainer([embedding, output], "adagrad", {"learning_rate": options.lr}, kvstore=kv)
        workers = 1 if "async" in options.kv_store else kv.num_workers
        for epoch in range(options.epochs):
            for words, kinds in train:
                trainer.pull_rows(embedding, words)
                vectors = embedding.data[words]
                error = chances(vectors, output.data) - kinds
                output.grad = error @ vectors.mean(axis=1)
                # One row for each word of each document; words that come twice are added up.
                rows = np.outer(error / LENGTH, output.data).repeat(LENGTH, axis=0)
                embedding.grad = RowSparse(rows, words.ravel(), (WORDS, WIDTH))
                trainer.step(len(kinds) * workers)
            trainer.pull_rows(embedding, test_set.data)
            right = (chances(embedding.data[test_set.data], output.data) > 0.5) == test_set.label
            print("Epoch %d: Test_acc %f" % (epoch, right.mean()), flush=True)


if __name__ == "__main__":
    arguments.run(main)
