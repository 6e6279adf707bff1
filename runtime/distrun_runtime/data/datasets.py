"""Data sets of images in files of fixed forms: MNIST, Fashion-MNIST and KMNIST (idx files), CIFAR-10 (binary files).

Sources: the idx format is described with the MNIST database (Y. LeCun, C. Cortes, C. Burges); pixels and parts are
those of MXNet's MNISTIter, except that labels are integers here. The binary version of CIFAR-10 is described on the
data set's page (A. Krizhevsky, 2009).
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.recordio import local_path
from distrun_runtime.data.sampling import Positions
from distrun_runtime.errors import DataError

IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Element types of idx files by their code, the third byte."""

MNIST_NAMES = {True: ("train-images", "train-labels"), False: ("t10k-images", "t10k-labels")}
MNIST_ENDINGS = (("-idx3-ubyte", ".idx3-ubyte"), ("-idx1-ubyte", ".idx1-ubyte"))

CIFAR10_SHAPE = (3, 32, 32)
"""A CIFAR-10 image: red, green and blue planes, each row by row from the top."""

CIFAR10_BYTES = 1 + 3 * 32 * 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_NAMES = {True: tuple("data_batch_%d.bin" % i for i in range(1, 6)), False: ("test_batch.bin",)}


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in an idx file, read-only, in native byte order.

    Raises:
        DataError: no idx file, or one of another length than its head says.
        OSError: the file cannot be read.
    """
    content = _decompressed(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_DTYPES:
        raise DataError(
            "%s, offset 0: expected the head of an idx file (0, 0, a type code of %s), found %s"
            % (os.fspath(path), ", ".join("%#04x" % code for code in IDX_DTYPES), content[:4].hex(" ") or "nothing")
        )
    dtype, axes = np.dtype(IDX_DTYPES[content[2]]), content[3]
    begin = 4 + 4 * axes
    if len(content) < begin:
        raise DataError(
            "%s, offset 4: expected %d sizes of 4 bytes, found %d bytes" % (os.fspath(path), axes, len(content) - 4)
        )
    shape = struct.unpack_from(">%dI" % axes, content, 4)
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != begin + expected:
        raise DataError(
            "%s, offset %d: expected %d bytes of elements for shape %s, found %d"
            % (os.fspath(path), begin, expected, shape, len(content) - begin)
        )
    array = np.frombuffer(content, dtype, offset=begin).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def mnist_files(folder: str | os.PathLike[str], train: bool = True) -> tuple[Path, Path]:
    """Return the files of images and of labels in a folder, under the names of the database, also with .gz.

    Raises:
        FileNotFoundError: one is missing; the names that were looked for.
    """
    images, labels = (
        _mnist_file(Path(folder), [name + ending for ending in endings])
        for name, endings in zip(MNIST_NAMES[train], MNIST_ENDINGS, strict=True)
    )
    return images, labels


class MNIST:
    """The data set in two idx files, held in memory as bytes.

    Examples are float32 (1, rows, columns) of pixels / 256, or (rows * columns,) with flat; labels are int64.

    Arguments:
        images: idx file of bytes (n, rows, columns).
        labels: idx file of bytes (n,).
        flat: each image as one row.

    Raises:
        DataError: not such files, or of different n.
        OSError: a file cannot be read.
    """

    def __init__(self, images: str | os.PathLike[str], labels: str | os.PathLike[str], *, flat: bool = False) -> None:
        self._images, self._labels = _idx_bytes(images, 3), _idx_bytes(labels, 1)
        if len(self._images) != len(self._labels):
            raise DataError(
                "%s, offset 4: expected as many labels as there are images in %s, %d, found %d"
                % (os.fspath(labels), os.fspath(images), len(self._images), len(self._labels))
            )
        self._shape = (-1,) if flat else (1, *self._images.shape[1:])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], int]:
        """Return one image and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], int(label[0])

    def read(self, positions: Positions) -> Batch:
        """Return images, float32 (n, 1, rows, columns) or (n, rows * columns), and labels, int64 (n,)."""
        images = self._images[positions].astype(np.float32) / np.float32(256)
        return images.reshape((len(positions), *self._shape)), self._labels[positions].astype(np.int64)


def _decompressed(path: str | os.PathLike[str]) -> bytes:
    """Return a file's bytes, decompressed if it is a gzip file whatever its name."""
    content = Path(local_path(path)).read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "%s, offset 0: expected a whole gzip file, found a damaged one of %d bytes (%s)"
            % (os.fspath(path), len(content), error)
        ) from error


def _idx_bytes(path: str | os.PathLike[str], axes: int) -> NDArray[np.uint8]:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.ndim != axes:
        raise DataError(
            "%s, offset 2: expected bytes along %d axes, found %s along %d"
            % (os.fspath(path), axes, array.dtype, array.ndim)
        )
    return array


def _mnist_file(folder: Path, names: list[str]) -> Path:
    for name in names:
        for path in (folder / name, folder / (name + ".gz")):
            if path.is_file():
                return path
    raise FileNotFoundError("there is no %s (nor with .gz) in %s" % (" or ".join(names), folder))


def cifar10_files(folder: str | os.PathLike[str], train: bool = True) -> list[Path]:
    """Return the binary files in a folder, or in the folder `cifar-10-batches-bin` of the archive in it.

    Raises:
        FileNotFoundError: one is missing; its name.
    """
    inner = Path(folder) / "cifar-10-batches-bin"
    place = inner if inner.is_dir() else Path(folder)
    for name in CIFAR10_NAMES[train]:
        if not (place / name).is_file():
            raise FileNotFoundError("there is no %s in %s (the binary version of CIFAR-10)" % (name, place))
    return [place / name for name in CIFAR10_NAMES[train]]


class CIFAR10:
    """The data set in some binary files, one after the other, held in memory as bytes.

    Examples are float32 (3, 32, 32) of pixels / 255; labels are int64 from 0 to 9, named by CIFAR10_CLASSES.

    Arguments:
        files: paths, such as `cifar10_files` gives.

    Raises:
        DataError: a file that is not a whole number of records, or has a label above 9.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Sequence[str | os.PathLike[str]]) -> None:
        if isinstance(files, (str, os.PathLike)) or not len(files):
            raise TypeError("files is a list of paths, as cifar10_files gives it, not %r" % (files,))
        records = np.concatenate([_cifar10_records(path) for path in files])
        self._labels = records[:, 0].astype(np.int64)
        self._images = records[:, 1:].reshape((-1, *CIFAR10_SHAPE))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], int]:
        """Return one image and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], int(label[0])

    def read(self, positions: Positions) -> Batch:
        """Return images, float32 (n, 3, 32, 32), and labels, int64 (n,)."""
        return self._images[positions].astype(np.float32) / np.float32(255), self._labels[positions]


def _cifar10_records(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Return a file's records, bytes (n, 3073)."""
    content = np.fromfile(local_path(path), np.uint8)
    if not len(content) or len(content) % CIFAR10_BYTES:
        raise DataError(
            "%s, offset %d: expected records of %d bytes, found %d bytes after the last"
            % (
                os.fspath(path),
                len(content) // CIFAR10_BYTES * CIFAR10_BYTES,
                CIFAR10_BYTES,
                len(content) % CIFAR10_BYTES,
            )
        )
    records = content.reshape(-1, CIFAR10_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= len(CIFAR10_CLASSES))
    if len(wrong):
        raise DataError(
            "%s, offset %d: expected a label from 0 to 9, found %d"
            % (os.fspath(path), wrong[0] * CIFAR10_BYTES, records[wrong[0], 0])
        )
    return records
