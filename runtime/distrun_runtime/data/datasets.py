"""Data sets of images in files of fixed forms: MNIST, Fashion-MNIST and KMNIST (idx files), CIFAR-10 (binary files).

Sources: the idx format is described with the MNIST database (Y. LeCun, C. Cortes, C. Burges); pixels and parts are
those of MXNet's MNISTIter, except that labels are integers here. The binary version of CIFAR-10 is described on the
data set's page (A. Krizhevsky, 2009).
"""

from __future__ import annotations

import copy
import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.recordio import IRHeader, RecordFile, content_of, damaged, is_address, name_of, pack, unpack
from distrun_runtime.data.sampling import Positions, loading_process, seed_of, whole
from distrun_runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


File = Union[Path, str]
"""A file of this machine, or the address of an object."""

IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Element types of idx files by their code, the third byte."""

MNIST_NAMES = {True: ("train-images", "train-labels"), False: ("t10k-images", "t10k-labels")}
MNIST_ENDINGS = (("-idx3-ubyte", ".idx3-ubyte"), ("-idx1-ubyte", ".idx1-ubyte"))

CIFAR10_SHAPE = (3, 32, 32)
"""A CIFAR-10 image: red, green and blue planes, each row by row from the top."""

CIFAR10_BYTES = 1 + 3 * 32 * 32
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_NAMES = {True: tuple(f"data_batch_{i}.bin" for i in range(1, 6)), False: ("test_batch.bin",)}


def read_idx(path: str | os.PathLike[str]) -> NDArray[Any]:
    """Return the array in an idx file, read-only, in native byte order.

    Raises:
        DataError: no idx file, or one of another length than its head says.
        OSError: the file cannot be read.
    """
    content = _decompressed(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in IDX_DTYPES:
        codes = ", ".join(f"{code:#04x}" for code in IDX_DTYPES)
        head = f"the head of an idx file (0, 0, a type code of {codes})"
        raise damaged(path, 0, head, content[:4].hex(" ") or "nothing")
    dtype, axes = np.dtype(IDX_DTYPES[content[2]]), content[3]
    begin = 4 + 4 * axes
    if len(content) < begin:
        raise damaged(path, 4, f"{axes} sizes of 4 bytes", f"{len(content) - 4} bytes")
    shape = struct.unpack_from(f">{axes}I", content, 4)
    expected = math.prod(shape) * dtype.itemsize
    if len(content) != begin + expected:
        raise damaged(path, begin, f"{expected} bytes of elements for shape {shape}", len(content) - begin)
    array = np.frombuffer(content, dtype, offset=begin).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def mnist_files(folder: str | os.PathLike[str], train: bool = True) -> tuple[File, File]:
    """Return the files of images and of labels in a folder, under the names of the database, also with .gz.

    A folder of an object store, such as `s3://bucket/mnist`, has addresses as files.

    Raises:
        FileNotFoundError: one is missing; the names that were looked for.
        PermissionError: one is missing or may not be read; object stores do not always tell which.
    """
    images, labels = (
        _mnist_file(folder, [name + ending for ending in endings])
        for name, endings in zip(MNIST_NAMES[train], MNIST_ENDINGS, strict=True)
    )
    return images, labels


class _Images:
    """Images with whole numbers as labels, held in memory as bytes.

    Arguments:
        images: bytes (n, ...).
        labels: (n,).
        shape: of an example; -1 stands for what is left over.
        divisor: of the pixels.
    """

    def __init__(self, images: NDArray[Any], labels: NDArray[Any], shape: tuple[int, ...], divisor: int) -> None:
        self._images, self._labels = images, labels.astype(np.int64)
        self._shape, self._divisor = shape, np.float32(divisor)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], int]:
        """Return one image and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], int(label[0])

    def read(self, positions: Positions) -> Batch:
        """Return images, float32 (n, ...), and labels, int64 (n,)."""
        images = self._images[positions].astype(np.float32) / self._divisor
        return images.reshape((len(positions), *self._shape)), self._labels[positions]


class MNIST(_Images):
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
        pixels, classes = _idx_bytes(images, 3), _idx_bytes(labels, 1)
        if len(pixels) != len(classes):
            expected = f"as many labels as there are images in {name_of(images)}, {len(pixels)}"
            raise damaged(labels, 4, expected, len(classes))
        super().__init__(pixels, classes, (-1,) if flat else (1, *pixels.shape[1:]), 256)


def _decompressed(path: str | os.PathLike[str]) -> bytes:
    """Return a file's bytes, decompressed if it is a gzip file whatever its name."""
    content = content_of(path)
    if not content.startswith(b"\x1f\x8b"):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, 0, "a whole gzip file", f"a damaged one of {len(content)} bytes ({error})") from error


def _idx_bytes(path: str | os.PathLike[str], axes: int) -> NDArray[np.uint8]:
    array = read_idx(path)
    if array.dtype != np.uint8 or array.ndim != axes:
        raise damaged(path, 2, f"bytes along {axes} axes", f"{array.dtype} along {array.ndim}")
    return array


def _mnist_file(folder: str | os.PathLike[str], names: list[str]) -> File:
    refused: list[OSError] = []
    for name in names:
        for path in (_within(folder, name), _within(folder, name + ".gz")):
            if _is_file(path, refused):
                return path
    missing = FileNotFoundError(f"there is no {' or '.join(names)} (nor with .gz) in {name_of(folder)}")
    raise (*refused, missing)[0]


def _within(folder: str | os.PathLike[str], name: str) -> File:
    """Return the file of this name in a folder of this machine or of an object store."""
    return f"{os.fspath(folder).rstrip('/')}/{name}" if is_address(folder) else Path(folder) / name


def _is_file(path: File, refused: list[OSError]) -> bool:
    """Return whether there is such a file. A server that refuses to say so may have none: `refused` keeps its error."""
    if isinstance(path, Path):
        return path.is_file()
    from distrun_runtime.data import remote

    try:
        return remote.exists(path)
    except PermissionError as error:
        refused.append(error)
        return False


def cifar10_files(folder: str | os.PathLike[str], train: bool = True) -> list[File]:
    """Return the binary files in a folder, or in the folder `cifar-10-batches-bin` of the archive in it.

    A folder of an object store, such as `s3://bucket/cifar`, has addresses as files.

    Raises:
        FileNotFoundError: one is missing; its name.
        PermissionError: as `mnist_files`.
    """
    inner, names = _within(folder, "cifar-10-batches-bin"), CIFAR10_NAMES[train]
    has_inner = inner.is_dir() if isinstance(inner, Path) else _is_file(_within(inner, names[0]), [])
    place = inner if has_inner else folder
    for name in names:
        refused: list[OSError] = []
        if not _is_file(_within(place, name), refused):
            version = "the binary version of CIFAR-10"
            if _is_file(_within(place, Path(name).stem), []) or (Path(folder) / "cifar-10-batches-py").is_dir():
                version += "; the version for Python is pickles, which can run any program and are not read"
            raise (*refused, FileNotFoundError(f"there is no {name} in {name_of(place)} ({version})"))[0]
    return [_within(place, name) for name in names]


class CIFAR10(_Images):
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
            raise TypeError(f"files is a list of paths, as cifar10_files gives it, not {files!r}")
        records = np.concatenate([_cifar10_records(path) for path in files])
        super().__init__(records[:, 1:], records[:, 0], CIFAR10_SHAPE, 255)


def _cifar10_records(path: str | os.PathLike[str]) -> NDArray[np.uint8]:
    """Return a file's records, bytes (n, 3073)."""
    content = np.frombuffer(content_of(path), np.uint8)
    if not len(content) or len(content) % CIFAR10_BYTES:
        whole_bytes = len(content) // CIFAR10_BYTES * CIFAR10_BYTES
        rest = f"{len(content) - whole_bytes} bytes after the last"
        raise damaged(path, whole_bytes, f"records of {CIFAR10_BYTES} bytes", rest)
    records = content.reshape(-1, CIFAR10_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= len(CIFAR10_CLASSES))
    if len(wrong):
        raise damaged(path, wrong[0] * CIFAR10_BYTES, "a label from 0 to 9", records[wrong[0], 0])
    return records


# Images in record files: decoded by Pillow, cut to one shape, in batches.
#
# Source: MXNet's ImageRecordIter (1.9.1), of which these are the steps that nearly every training uses; decoders differ
# by a rounding of pixels. Colours are in the order red, green, blue, as there.


def pack_image(header: IRHeader, image: NDArray[np.uint8], *, quality: int = 95, form: str = "JPEG") -> bytes:
    """Return the record of a header and an image.

    Arguments:
        image: bytes (rows, columns, 3) red, green, blue, or (rows, columns) grey.
        quality: of JPEG, 1 to 100.
        form: a name that Pillow has for a file format; PNG keeps every pixel as it is.

    Raises:
        ValueError: another shape or dtype, or a format that Pillow does not write.
        ImportError: Pillow is missing.
    """
    shape, dtype = getattr(image, "shape", None), getattr(image, "dtype", type(image).__name__)
    if dtype != np.uint8 or shape is None or len(shape) not in (2, 3) or shape[2:] not in ((), (3,)):
        raise ValueError(f"expected an image of bytes, (rows, columns, 3) or (rows, columns), found {dtype} {shape}")
    written = io.BytesIO()
    try:
        _pillow().fromarray(image).save(written, form, quality=quality)
    except KeyError:
        raise ValueError(f"{form!r} is not a format that Pillow writes; JPEG and PNG are") from None
    return pack(header, written.getvalue())


def unpack_image(record: bytes) -> tuple[IRHeader, NDArray[np.uint8]]:
    """Return a record's header and its image, bytes (rows, columns, 3).

    Raises:
        DataError: the bytes are no image that Pillow can read.
        ImportError: Pillow is missing.
    """
    header, content = unpack(record)
    return header, np.asarray(_decode(content))


class ImageRecords:
    """The data set of a record file of images. Examples are float32 (3, rows, columns), pixels from 0 to 255.

    Arguments:
        records: the file.
        shape: (3, rows, columns) of an example: cut from the image's middle; a smaller image is enlarged first.
        resize: first bring the image's shorter side to so many pixels; 0: leave it.
        random_crop: cut anywhere instead of in the middle.
        random_mirror: exchange left and right in about every second image.
        seed: of the two; None: each run has its own. What is drawn for an image follows from the seed, the epoch (see
            `set_epoch`), how often the image was read in it, the worker process of a torch DataLoader, and the place
            of the record in the file. So the images of a file, epochs, and processes of a DataLoader share no numbers.
        label_width: labels of an image. Those of the data set are float32 (n,) for 1, otherwise (n, label_width).

    Raises:
        ValueError: not such a shape, or a number out of its range.
        TypeError: no RecordFile, or a number that is no whole one.
    """

    def __init__(
        self,
        records: RecordFile,
        shape: tuple[int, int, int],
        *,
        resize: int = 0,
        random_crop: bool = False,
        random_mirror: bool = False,
        seed: int | None = None,
        label_width: int = 1,
    ) -> None:
        if not isinstance(records, RecordFile):
            raise TypeError(f"records is a RecordFile, not {records!r:.60}; RecordFile(path) opens one")
        if not isinstance(shape, (tuple, list)) or len(shape) != 3 or shape[0] != 3:
            raise ValueError(f"expected a shape (3, rows, columns), found {shape}")
        self.records = records
        self._shape = (3, whole(shape[1], "rows", least=1), whole(shape[2], "columns", least=1))
        self._resize, self._label_width = whole(resize, "resize", least=0), whole(label_width, "label_width", least=1)
        self._crop, self._mirror = random_crop, random_mirror
        self._seed = seed_of(seed)
        self._epoch = 0
        self._reads: NDArray[np.uint32] | None = None
        """How often each image was read in this epoch, by this process."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return one example and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], label[0]

    def __getitems__(self, positions: Sequence[int]) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """Return the examples of a batch, for a torch DataLoader: they are requested at the same time."""
        self.expect(np.asarray(positions, np.int64))
        return [self[position] for position in positions]

    def cut(self, num_parts: int, part_index: int) -> ImageRecords:
        """Return a part, cut by bytes as `RecordFile.cut` does it."""
        part = copy.copy(self)
        part.records = self.records.cut(num_parts, part_index)
        part._reads = None
        return part

    def expect(self, positions: Positions) -> None:
        """Begin to fetch these images, which are read next, if the file is in an object store."""
        self.records.expect(positions)

    def set_epoch(self, epoch: int) -> None:
        """Draw the random numbers of epoch number `epoch`, from 0: to go on with a run that was stopped.

        A `Reader` calls it for each pass. Without it, an image that is read again draws other numbers all the same. In
        a DataLoader call it before the epoch's iteration; processes of `persistent_workers` do not hear of it.
        """
        self._epoch, self._reads = whole(epoch, "epoch", least=0), None

    def read(self, positions: Positions) -> Batch:
        """Return images, float32 (n, 3, rows, columns), and labels, float32 (n,) or (n, label_width).

        Raises:
            DataError: a record that is damaged, no image, or of another number of labels.
            ImportError: Pillow is missing.
        """
        data = np.empty((len(positions), *self._shape), np.float32)
        label = np.empty((len(positions), self._label_width), np.float32)
        for i, position in enumerate(positions.tolist()):
            record = self.records[position]
            try:
                header, content = unpack(record)
                label[i] = self._labels(header)
                data[i] = self._example(_decode(content), position)
            except DataError as error:
                place = int(self.records.offsets[position])
                raise DataError(f"{self.records.path}, record at offset {place}: {error}") from error
        return data, label[:, 0] if self._label_width == 1 else label

    def _labels(self, header: IRHeader) -> Any:
        """Return the labels of an image, as many as there have to be."""
        found = header.flag or 1
        if found != self._label_width:
            raise DataError(f"expected {self._label_width} labels, found {found}")
        return header.label

    def _chance(self, position: int) -> np.random.Generator:
        """Return the random numbers of one reading of one image."""
        if self._reads is None:
            self._reads = np.zeros(len(self.records), np.uint32)
        count = int(self._reads[position])
        self._reads[position] += 1
        # The place in the file: parts of one file, cut by bytes, have positions of their own.
        place = int(self.records.offsets[position])
        # A process of a DataLoader is a copy of the one that made the data set: what it counts is soon forgotten.
        process = loading_process()
        loaded = (process.index + 1, process.seed) if process.count else (0, 0)
        return np.random.default_rng((self._seed, self._epoch, *loaded, place, count))

    def _example(self, image: Image, position: int) -> NDArray[np.uint8]:
        """Return an image cut to the shape, colours first."""
        _, rows, columns = self._shape
        width, height = image.size
        scale = max(self._resize / min(width, height) or 1, columns / width, rows / height)
        if scale != 1:
            width, height = max(columns, round(width * scale)), max(rows, round(height * scale))
            image = image.resize((width, height))
        left, top = (width - columns) // 2, (height - rows) // 2
        chance = self._chance(position) if self._crop or self._mirror else None
        if chance is not None and self._crop:
            left = int(chance.integers(width - columns + 1))
            top = int(chance.integers(height - rows + 1))
        pixels: NDArray[np.uint8] = np.asarray(image)[top : top + rows, left : left + columns]
        if chance is not None and self._mirror and chance.integers(2):
            pixels = pixels[:, ::-1]
        planes: NDArray[np.uint8] = pixels.transpose(2, 0, 1)
        return planes


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "images are read and written by Pillow, which is missing. Type:  pip install pillow"
        ) from error
    return Image


def _decode(content: bytes) -> Image:
    """Return the image in a file's bytes, in colours."""
    try:
        image: Image = _pillow().open(io.BytesIO(content)).convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:
        raise DataError(
            f"expected an image that Pillow can read, found {len(content)} bytes beginning"
            f" {content[:4].hex(' ') or 'with nothing'} ({error})"
        ) from error
    return image
