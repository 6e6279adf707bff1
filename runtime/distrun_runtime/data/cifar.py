"""CIFAR-10 in its binary files: records of a label and 32 x 32 pixels of three colours.

Source: the description of the binary version on the data set's page (A. Krizhevsky, 2009).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Sequence

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.sampler import Positions
from distrun_runtime.errors import DataError

SHAPE = (3, 32, 32)
"""An image: red, green and blue planes, each row by row from the top."""

RECORD_BYTES = 1 + 3 * 32 * 32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NAMES = {True: tuple("data_batch_%d.bin" % i for i in range(1, 6)), False: ("test_batch.bin",)}


def cifar10_files(folder: str | os.PathLike[str], train: bool = True) -> list[Path]:
    """Return the binary files in a folder, or in the folder `cifar-10-batches-bin` of the archive in it.

    Raises:
        FileNotFoundError: one is missing; its name.
    """
    inner = Path(folder) / "cifar-10-batches-bin"
    place = inner if inner.is_dir() else Path(folder)
    for name in NAMES[train]:
        if not (place / name).is_file():
            raise FileNotFoundError("there is no %s in %s (the binary version of CIFAR-10)" % (name, place))
    return [place / name for name in NAMES[train]]


class CIFAR10:
    """The data set in some binary files, one after the other, held in memory as bytes.

    Examples are float32 (3, 32, 32) of pixels / 255; labels are int64 from 0 to 9, named by CLASSES.

    Arguments:
        files: paths, such as `cifar10_files` gives.

    Raises:
        DataError: a file that is not a whole number of records, or has a label above 9.
        OSError: a file cannot be read.
    """

    def __init__(self, files: Sequence[str | os.PathLike[str]]) -> None:
        if isinstance(files, (str, os.PathLike)) or not len(files):
            raise TypeError("files is a list of paths, as cifar10_files gives it, not %r" % (files,))
        records = np.concatenate([_records(path) for path in files])
        self._labels = records[:, 0].astype(np.int64)
        self._images = records[:, 1:].reshape((-1, *SHAPE))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], int]:
        """Return one image and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], int(label[0])

    def read(self, positions: Positions) -> Batch:
        """Return images, float32 (n, 3, 32, 32), and labels, int64 (n,)."""
        return self._images[positions].astype(np.float32) / np.float32(255), self._labels[positions]


def _records(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Return a file's records, bytes (n, 3073)."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % RECORD_BYTES:
        raise DataError(
            "%s, offset %d: expected records of %d bytes, found %d bytes after the last"
            % (
                os.fspath(path),
                len(content) // RECORD_BYTES * RECORD_BYTES,
                RECORD_BYTES,
                len(content) % RECORD_BYTES,
            )
        )
    records = content.reshape(-1, RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= len(CLASSES))
    if len(wrong):
        raise DataError(
            "%s, offset %d: expected a label from 0 to 9, found %d"
            % (os.fspath(path), wrong[0] * RECORD_BYTES, records[wrong[0], 0])
        )
    return records
