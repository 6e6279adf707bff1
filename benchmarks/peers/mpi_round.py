"""One rank of all-reduce rounds with Open MPI: MODEL ROUNDS plain|bucket."""

from __future__ import annotations

import sys
import time
from typing import List

import numpy as np
import shapes
from mpi4py import MPI
from report import WARM_UP, report, sent, summed

BUCKET_BYTES = 25 * 2**20
"""As gloo's buckets."""


def reduce_buckets(
    world: MPI.Intracomm, gradients: List[np.ndarray], outs: List[np.ndarray], flats: np.ndarray
) -> None:
    """Sum all arrays over all ranks, packed by hand into buckets, with the copies into them and out of them."""
    packed, total = flats
    np.concatenate(gradients, axis=None, out=packed)
    size = BUCKET_BYTES // 4
    for begin in range(0, packed.size, size):
        world.Allreduce(packed[begin : begin + size], total[begin : begin + size])
    at = 0
    for out in outs:
        out[...] = total[at : at + out.size].reshape(out.shape)
        at += out.size


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    world = MPI.COMM_WORLD
    gradients = [np.ones(shape, np.float32) for shape in shapes.MODELS[model]()]
    outs = [np.zeros_like(gradient) for gradient in gradients]
    flats = np.zeros((2, sum(gradient.size for gradient in gradients)), np.float32)
    times = []
    for number in range(1, rounds + WARM_UP + 1):
        for key, gradient in enumerate(gradients):
            gradient.fill(sent(key, world.rank, number))
        world.Barrier()
        begin = time.perf_counter()
        if form == "bucket":
            reduce_buckets(world, gradients, outs, flats)
        else:
            for gradient, out in zip(gradients, outs, strict=True):
                world.Allreduce(gradient, out)
        times.append(time.perf_counter() - begin)
        for key, out in enumerate(outs):
            if not (out == summed(key, world.size, number)).all():
                sys.exit("mpi_round.py: round %d, key %d: %r" % (number, key, out))
    report("mpi" if form == "plain" else "mpi-" + form, model, world.rank, times)


if __name__ == "__main__":
    main()
