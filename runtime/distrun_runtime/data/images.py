"""Images in record files: decoded by Pillow, cut to one shape, in batches.

Source: MXNet's ImageRecordIter (1.9.1), of which these are the steps that nearly every training uses; decoders differ
by a rounding of pixels. Colours are in the order red, green, blue, as there.
"""

from __future__ import annotations

import copy
import io
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.reader import Batch
from distrun_runtime.data.recordio import IRHeader, RecordFile, pack, unpack
from distrun_runtime.data.sampling import Positions, whole
from distrun_runtime.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image


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
        raise ValueError(
            "expected an image of bytes, (rows, columns, 3) or (rows, columns), found %s %s" % (dtype, shape)
        )
    written = io.BytesIO()
    try:
        _pillow().fromarray(image).save(written, form, quality=quality)
    except KeyError:
        raise ValueError("%r is not a format that Pillow writes; JPEG and PNG are" % form) from None
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
            raise TypeError("records is a RecordFile, not %.60r; RecordFile(path) opens one" % (records,))
        if not isinstance(shape, (tuple, list)) or len(shape) != 3 or shape[0] != 3:
            raise ValueError("expected a shape (3, rows, columns), found %s" % (shape,))
        self.records = records
        self._shape = (3, whole(shape[1], "rows", least=1), whole(shape[2], "columns", least=1))
        self._resize, self._label_width = whole(resize, "resize", least=0), whole(label_width, "label_width", least=1)
        self._crop, self._mirror = random_crop, random_mirror
        drawn = seed is None
        self._seed = int(np.random.default_rng().integers(1 << 62)) if drawn else whole(seed, "seed", least=0)
        self._epoch = 0
        self._reads: NDArray[np.uint32] | None = None
        """How often each image was read in this epoch, by this process."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, position: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return one example and its label, for a torch DataLoader."""
        data, label = self.read(np.array([position]))
        return data[0], label[0]

    def cut(self, num_parts: int, part_index: int) -> ImageRecords:
        """Return a part, cut by bytes as `RecordFile.cut` does it."""
        part = copy.copy(self)
        part.records = self.records.cut(num_parts, part_index)
        part._reads = None
        return part

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
                raise DataError("%s, record at offset %d: %s" % (self.records.path, place, error)) from error
        return data, label[:, 0] if self._label_width == 1 else label

    def _labels(self, header: IRHeader) -> Any:
        """Return the labels of an image, as many as there have to be."""
        found = header.flag or 1
        if found != self._label_width:
            raise DataError("expected %d labels, found %d" % (self._label_width, found))
        return header.label

    def _chance(self, position: int) -> np.random.Generator:
        """Return the random numbers of one reading of one image."""
        if self._reads is None:
            self._reads = np.zeros(len(self.records), np.uint32)
        count = int(self._reads[position])
        self._reads[position] += 1
        # The place in the file: parts of one file, cut by bytes, have positions of their own.
        place = int(self.records.offsets[position])
        return np.random.default_rng((self._seed, self._epoch, *_loader(), place, count))

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


def _loader() -> tuple[int, int]:
    """Return which worker process of a torch DataLoader this is, and the seed of its epoch; zeros if it is none.

    Such a process is a copy of the one that made the data set, new in each epoch: what it counts is soon forgotten.
    torch gives each a seed, which follows from torch's own (`torch.manual_seed`).
    """
    loading = sys.modules.get("torch.utils.data")  # a process of a DataLoader has it
    info = None if loading is None else loading.get_worker_info()
    return (0, 0) if info is None else (int(info.id) + 1, int(info.seed) % (1 << 64))


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
            "expected an image that Pillow can read, found %d bytes beginning %s (%s)"
            % (len(content), content[:4].hex(" ") or "with nothing", error)
        ) from error
    return image
