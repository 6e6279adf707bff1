"""MNIST and its kin (Fashion-MNIST, KMNIST): images and labels in idx files, plain or compressed by gzip.

Source: the format is described with the MNIST database (Y. LeCun, C. Cortes, C. Burges); pixels and parts are those
of MXNet's MNISTIter, except that labels are integers here.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.sampler import Positions
from distrun_runtime.errors import DataError

DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Element types of idx files by their code, the third byte."""

NAMES = {True: ("train-images", "train-labels"), False: ("t10k-images", "t10k-labels")}
ENDINGS = (("-idx3-ubyte", ".idx3-ubyte"), ("-idx1-ubyte", ".idx1-ubyte"))


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in an idx file, read-only, in native byte order.

    Raises:
        DataError: no idx file, or one of another length than its head says.
        OSError: the file cannot be read.
    """
    content = _content(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in DTYPES:
        raise DataError(
            "%s, offset 0: expected the head of an idx file (0, 0, a type code of %s), found %s"
            % (os.fspath(path), ", ".join("%#04x" % code for code in DTYPES), content[:4].hex(" ") or "nothing")
        )
    dtype, axes = np.dtype(DTYPES[content[2]]), content[3]
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
        _find(Path(folder), [name + ending for ending in endings])
        for name, endings in zip(NAMES[train], ENDINGS, strict=True)
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
        self._images, self._labels = _bytes(images, 3), _bytes(labels, 1)
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


def _content(path: str | os.PathLike[str]) -> bytes:
    """Return a file's bytes, decompressed if it is a gzip file whatever its name."""
    content = Path(path).read_bytes()
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            "%s, offset 0: expected a whole gzip file, found a damaged one of %d bytes (%s)"
            % (os.fspath(path), len(content), error)
        ) from error


def _bytes(path: str | os.PathLike[str], axes: int) -> NDArray[np.uint8]:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.ndim != axes:
        raise DataError(
            "%s, offset 2: expected bytes along %d axes, found %s along %d"
            % (os.fspath(path), axes, array.dtype, array.ndim)
        )
    return array


def _find(folder: Path, names: list[str]) -> Path:
    for name in names:
        for path in (folder / name, folder / (name + ".gz")):
            if path.is_file():
                return path
    raise FileNotFoundError("there is no %s (nor with .gz) in %s" % (" or ".join(names), folder))
