"""Data of a training: cut for workers and devices, read in batches; numpy only, Pillow for images.

from distrun_runtime.data import MNIST, Reader, epoch_size, mnist_files

dataset = MNIST(*mnist_files("mnist"))
size = epoch_size(len(dataset), 32, kv.num_workers)
for data, label in Reader(dataset, 32, num_parts=kv.num_workers, part_index=kv.rank, epoch_size=size):
    ...
"""

from __future__ import annotations

from distrun_runtime.data.buckets import BucketReader
from distrun_runtime.data.datasets import (
    CIFAR10,
    MNIST,
    ImageRecords,
    cifar10_files,
    mnist_files,
    pack_image,
    read_idx,
    unpack_image,
)
from distrun_runtime.data.reader import Arrays, Dataset, Reader
from distrun_runtime.data.recordio import IRHeader, RecordFile, RecordWriter, pack, unpack
from distrun_runtime.data.sampling import (
    Epochs,
    GlobalShuffleSampler,
    SplitSampler,
    epoch_size,
    part,
    split_and_load,
    split_data,
    split_input_slice,
)

__all__ = [
    "CIFAR10",
    "MNIST",
    "Arrays",
    "BucketReader",
    "Dataset",
    "Epochs",
    "GlobalShuffleSampler",
    "IRHeader",
    "ImageRecords",
    "Reader",
    "RecordFile",
    "RecordWriter",
    "SplitSampler",
    "cifar10_files",
    "epoch_size",
    "mnist_files",
    "pack",
    "pack_image",
    "part",
    "read_idx",
    "split_and_load",
    "split_data",
    "split_input_slice",
    "unpack",
    "unpack_image",
]
