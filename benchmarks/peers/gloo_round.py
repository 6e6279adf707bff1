"""One rank of all-reduce rounds with torch.distributed and gloo: MODEL ROUNDS plain|bucket."""

from __future__ import annotations

import sys
import time
from typing import List

import shapes
import torch
import torch.distributed as dist
from report import WARM_UP, report, sent, summed

BUCKET_BYTES = 25 * 2**20
"""What DistributedDataParallel gathers before it sends."""


def all_reduce_each(gradients: List[torch.Tensor]) -> None:
    """Sum every tensor over all ranks, one operation a tensor."""
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()


def all_reduce_buckets(buckets: List[List[torch.Tensor]]) -> None:
    """Sum every tensor over all ranks, one operation a bucket, with the copies into it and out of it."""
    flats = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for flat, bucket, work in zip(flats, buckets, works, strict=True):
        work.wait()
        begin = 0
        for tensor in bucket:
            tensor.copy_(flat[begin : begin + tensor.numel()].view_as(tensor))
            begin += tensor.numel()


def fill_buckets(gradients: List[torch.Tensor]) -> List[List[torch.Tensor]]:
    """Cut the list where a bucket has reached its size."""
    buckets: List[List[torch.Tensor]] = [[]]
    size = 0
    for gradient in gradients:
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel() * 4
    return buckets


def main() -> None:
    """Run the rounds, read every result, and print the report."""
    model, rounds, form = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gradients = [torch.ones(shape) for shape in shapes.named(model)]
    buckets = fill_buckets(gradients)
    times = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(1, rounds + WARM_UP + 1):
        for key, gradient in enumerate(gradients):
            gradient.fill_(sent(key, rank, number))
        dist.barrier()
        begin = time.perf_counter()
        if form == "bucket":
            all_reduce_buckets(buckets)
        else:
            all_reduce_each(gradients)
        times.append(time.perf_counter() - begin)
        for key, gradient in enumerate(gradients):
            if not bool((gradient == summed(key, world, number)).all()):
                sys.exit("gloo_round.py: round %d, key %d: %r" % (number, key, gradient))
    report("gloo" if form == "plain" else "gloo-" + form, model, rank, times)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
