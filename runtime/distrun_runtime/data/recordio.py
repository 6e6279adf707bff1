"""MXNet's record files (.rec) and their index files (.idx): any bytes, and labelled images among them.

A record is cut into parts at each occurrence of the magic number at a multiple of 4 bytes, which is left out; so the
magic never occurs at such a place except before a part, and a reader may begin anywhere. Each part is

    magic 0xced7230a (u4) | flag << 29 | length (u4) | length bytes | zeros up to a multiple of 4

all little-endian; flag 0 is a whole record, 1, 2 and 3 the first, middle and last parts of one. Parts of a file are
cut by bytes as there. Source: dmlc-core's recordio and input split, MXNet 1.9.1's mx.recordio; byte for byte.
"""

from __future__ import annotations

import io
import mmap
import numbers
import os
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Iterator, Sequence, Union

import numpy as np
from numpy.typing import NDArray

from distrun_runtime.data.sampling import whole
from distrun_runtime.errors import DataError

if TYPE_CHECKING:
    from distrun_runtime.data.remote import RemoteBytes

Content = Union[bytes, mmap.mmap, "RemoteBytes"]

MAGIC = 0xCED7230A
MAGIC_BYTES = struct.pack("<I", MAGIC)
LIMIT_BYTES = 1 << 29
"""A part is shorter than this: its length has 29 bits."""
EXPECTED_BYTES = 1 << 20
"""So much of a record, at most, is fetched before it is read."""

WHOLE, FIRST, MIDDLE, LAST = range(4)
_HEAD = struct.Struct("<II")
_IMAGE_HEAD = struct.Struct("<IfQQ")


def is_address(path: object) -> bool:
    """Return whether it is an address such as `s3://bucket/key`, and no path of this machine.

    Raises:
        FileNotFoundError: an address that `pathlib.Path` has made a path of.
    """
    if re.match("(s3|gs|az|https?):/[^/]", str(path)):
        from distrun_runtime.data import objectstores

        shown = objectstores.redacted(str(path).replace(":/", "://", 1)).replace("://", ":/", 1)
        raise FileNotFoundError(
            f"{shown} has one slash, expected an address such as s3://bucket/key. fix: give it as a str;"
            " pathlib.Path (argparse: type=Path) removes a slash"
        )
    scheme, colon, _ = str(path).partition("://")
    return bool(colon) and scheme.isalnum()


def content_of(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a file or of an object.

    Raises:
        OSError: it cannot be read.
        ImportError: a package that reads such addresses is missing.
    """
    if not is_address(path):
        return Path(path).read_bytes()
    from distrun_runtime.data import remote

    return remote.opened(os.fspath(path))[:]


def name_of(path: str | os.PathLike[str]) -> str:
    """Return a path, or an address without password and query string."""
    if not is_address(path):
        return os.fspath(path)
    from distrun_runtime.data import objectstores

    return objectstores.redacted(os.fspath(path))


def damaged(path: str | os.PathLike[str], offset: int, expected: str, found: object) -> DataError:
    """Return the error of a damaged file."""
    return DataError(f"{name_of(path)}, offset {offset}: expected {expected}, found {found}")


@dataclass(frozen=True)
class IRHeader:
    """What stands before an image in its record.

    label: a number, or float32 (flag,) if there are several; `flag` is then their number, otherwise 0.
    id, id2: numbers of the image, from 0 to 2**64 - 1; id2 is usually 0.
    """

    flag: int
    label: float | NDArray[np.float32]
    id: int
    id2: int = 0


def pack(header: IRHeader, content: bytes) -> bytes:
    """Return the record of a header and an image file's bytes. The flag follows from the label.

    Raises:
        TypeError: a header that is no IRHeader, or content that is not bytes.
        ValueError: an id that is not a whole number of 8 bytes.
    """
    if not isinstance(header, IRHeader):
        raise TypeError(f"pack: expected an IRHeader(flag, label, id, id2), found {type(header).__name__}")
    _need_bytes("pack", content)
    _need_id("id", header.id)
    _need_id("id2", header.id2)
    if np.ndim(header.label) == 0:
        return _IMAGE_HEAD.pack(0, float(header.label), header.id, header.id2) + content
    labels = np.asarray(header.label, "<f4").ravel()
    return _IMAGE_HEAD.pack(len(labels), 0, header.id, header.id2) + labels.tobytes() + content


def unpack(record: bytes) -> tuple[IRHeader, bytes]:
    """Return a record's header and the bytes after it.

    Raises:
        DataError: the record is too short for its header.
    """
    if len(record) < _IMAGE_HEAD.size:
        raise DataError(f"offset 0 of the record: expected a header of {_IMAGE_HEAD.size} bytes, found {len(record)}")
    header = IRHeader(*_IMAGE_HEAD.unpack_from(record))
    begin = _IMAGE_HEAD.size + 4 * header.flag
    if len(record) < begin:
        raise DataError(
            f"offset {_IMAGE_HEAD.size} of the record: expected {header.flag} labels of 4 bytes, found"
            f" {len(record) - _IMAGE_HEAD.size} bytes"
        )
    if header.flag:
        labels = np.frombuffer(record, "<f4", header.flag, _IMAGE_HEAD.size).astype(np.float32)
        header = replace(header, label=labels)
    return header, record[begin:]


def encode(record: bytes) -> bytes:
    """Return a record in the format of a file: its parts, with heads and padding.

    Raises:
        TypeError: a record that is not bytes.
        ValueError: a record of 2**29 bytes or more.
    """
    _need_bytes("record", record)
    if len(record) >= LIMIT_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is not below the format's {LIMIT_BYTES}")
    cuts = list(_magics(record))
    begins = [0] + [cut + 4 for cut in cuts]
    ends = [*cuts, len(record)]
    written = bytearray()
    for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        flag = WHOLE if not cuts else FIRST if i == 0 else LAST if i == len(cuts) else MIDDLE
        written += _HEAD.pack(MAGIC, flag << 29 | end - begin) + record[begin:end]
    return bytes(written) + bytes(-len(record) % 4)


class RecordFile:
    """The records of a file, or of a part of it, by number; read through a memory map, or from an object store.

    Arguments:
        path: a .rec file, or the address of one (`s3://bucket/train.rec`), whose parts are read as needed.
        index: its .idx file, which saves looking for the records. None: they are looked for when first needed.

    Raises:
        DataError: when a record is read or looked for, one that is damaged; for an index, a line that is none.
        OSError: a file cannot be read.

    Threads: any. A copy in another process maps the file anew.
    """

    def __init__(self, path: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> None:
        self._open(_mapped(path))
        self.path = name_of(path)
        """The file as messages name it."""
        self._offsets = None if index is None else _read_index(index, self._size)

    def _open(self, content: Content) -> None:
        self._content, self._size = content, len(content)
        self._begin, self._end = 0, self._size

    def __reduce__(self) -> tuple[object, ...]:
        source = self.path if isinstance(self._content, (bytes, mmap.mmap)) else self._content
        return _reopen, (self.path, source, self._begin, self._end, self._offsets)

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, number: int) -> bytes:
        """Return a record's bytes."""
        return self._record(int(self.offsets[number]))[0]

    def __iter__(self) -> Iterator[bytes]:
        """Yield all records in the file's order, without looking for their places first."""
        self._expect_all()
        offset = self._begin
        while offset < self._end:
            record, offset = self._record(offset)
            yield record

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Where the records begin in the file; int64 (records,), ascending unless an index has another order."""
        if self._offsets is None:
            self._expect_all()
            offset, found = self._begin, []
            while offset < self._end:
                found.append(offset)
                offset = self._parts(offset)[1]
            self._offsets = np.array(found, np.int64)
        return self._offsets

    def __getitems__(self, positions: Sequence[int]) -> list[bytes]:
        """Return the records of a batch, for a torch DataLoader: they are requested at the same time."""
        self.expect(np.asarray(positions, np.int64))
        return [self[position] for position in positions]

    def cut(self, num_parts: int, part_index: int) -> RecordFile:
        """Return a part: the records that begin in the part_index-th of num_parts equal runs of bytes.

        Runs are rounded up to 4 bytes; the last may be shorter, and one in which no record begins is empty. Only the
        places of the cuts are looked at. Numbers of records differ, as in MXNet. A part may be cut again.

        Raises:
            ValueError: not 0 <= part_index < num_parts.
            TypeError: a number that is no whole one.
        """
        num_parts, part_index = whole(num_parts, "num_parts"), whole(part_index, "part_index")
        if not 0 <= part_index < num_parts:
            raise ValueError(f"expected 0 <= part_index < num_parts, found part {part_index} of {num_parts}")
        run = -(-(self._end - self._begin) // num_parts)
        run += -run % 4
        cuts = (min(self._begin + run * i, self._end) for i in (part_index, part_index + 1))
        begin, end = (self._head_from(cut) for cut in cuts)
        known = self._offsets
        offsets = None if known is None else known[(known >= begin) & (known < end)]
        return _reopen(self.path, self._content, begin, end, offsets)

    def expect(self, positions: NDArray[np.int64]) -> None:
        """Begin to fetch these records of an object store, which are read next, as fast as they are read."""
        if not isinstance(self._content, (bytes, mmap.mmap)):
            self._content.expect(_ranges(self.offsets, positions))

    def _expect_all(self) -> None:
        if not isinstance(self._content, (bytes, mmap.mmap)):
            self._content.expect_all(self._begin, self._end)

    def _head_from(self, offset: int) -> int:
        """Return where the first record begins that does not begin before the offset, a multiple of 4."""
        while self._begin < offset < self._end:
            offset = self._content.find(MAGIC_BYTES, offset)
            if offset < 0 or offset + _HEAD.size > self._end:
                return self._end
            if offset % 4 == 0 and self._head(offset)[0] in (WHOLE, FIRST):
                return offset
            offset += 1
        return offset

    def _record(self, offset: int) -> tuple[bytes, int]:
        """Return the record that begins at an offset, and where the next one does."""
        parts, after = self._parts(offset)
        return MAGIC_BYTES.join([self._content[begin:end] for begin, end in parts]), after

    def _parts(self, offset: int) -> tuple[list[tuple[int, int]], int]:
        """Return where the bytes of a record's parts begin and end, and where the next record begins."""
        parts: list[tuple[int, int]] = []
        while True:
            flag, length = self._head(offset)
            expected = (MIDDLE, LAST) if parts else (WHOLE, FIRST)
            if flag not in expected:
                raise damaged(self.path, offset + 4, f"a part with flag {expected[0]} or {expected[1]}", f"flag {flag}")
            begin = offset + _HEAD.size
            offset = begin + length + -length % 4
            if offset > self._size:
                raise damaged(self.path, begin, f"{offset - begin} bytes of a record", self._size - begin)
            parts.append((begin, begin + length))
            if flag in (WHOLE, LAST):
                return parts, offset

    def _head(self, offset: int) -> tuple[int, int]:
        """Return flag and length of the part at an offset."""
        if not 0 <= offset <= self._size - _HEAD.size:
            raise damaged(self.path, offset, f"a record's head of {_HEAD.size} bytes", max(0, self._size - offset))
        magic, word = _HEAD.unpack(self._content[offset : offset + _HEAD.size])
        if magic != MAGIC:
            raise damaged(self.path, offset, f"the magic number {MAGIC:#010x}", f"{magic:#010x}")
        return word >> 29, word & (LIMIT_BYTES - 1)


def _ranges(offsets: NDArray[np.int64], positions: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield where records begin and about where they end, computed as far as they are needed."""
    for first in range(0, len(positions), 1000):
        some = positions[first : first + 1000]
        starts = offsets[some]
        # A record ends where the next one begins, if the index has them in the file's order; else it is short.
        ends = np.clip(offsets[np.minimum(some + 1, len(offsets) - 1)], starts + _HEAD.size, starts + EXPECTED_BYTES)
        yield from zip(starts.tolist(), ends.tolist(), strict=True)


class RecordWriter:
    """Writes a record file, and its index if asked to: `with RecordWriter("a.rec", "a.idx") as file: file.write(b"x")`.

    Arguments:
        path: the .rec file; one that is there is replaced.
        index: the .idx file, one line a record: key, tab, offset.

    Raises:
        OSError: a file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], index: str | os.PathLike[str] | None = None) -> None:
        for each in (path, index):
            if is_address(each):
                raise FileNotFoundError(
                    f"{name_of(str(each))} is an address, expected a path: records are written to files. fix: write a"
                    " file, then copy it there"
                )
        self._file = open(path, "wb")  # noqa: SIM115 - closed by close
        self._index = None if index is None else open(index, "w", encoding="ascii")  # noqa: SIM115
        self._count = 0

    def write(self, record: bytes, key: int | None = None) -> int:
        """Append a record and return its offset. `key` is its number in the index; None: the next from 0."""
        offset = self._file.tell()
        self._file.write(encode(record))
        if self._index is not None:
            self._index.write(f"{self._count if key is None else key}\t{offset}\n")
        self._count += 1
        return offset

    def close(self) -> None:
        """Finish the files."""
        self._file.close()
        if self._index is not None:
            self._index.close()

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _need_bytes(what: str, content: object) -> None:
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what}: expected bytes, found {type(content).__name__}")


def _need_id(what: str, number: object) -> None:
    if not isinstance(number, numbers.Integral) or not 0 <= int(number) < 1 << 64:
        raise ValueError(f"{what} is a whole number from 0 to 2**64 - 1, not {number!r}")


def _magics(record: bytes) -> Iterator[int]:
    """Yield the positions of the magic number in a record, at multiples of 4."""
    words = np.frombuffer(record, "<u4", len(record) // 4)
    yield from (4 * np.flatnonzero(words == MAGIC)).tolist()


def _mapped(path: str | os.PathLike[str]) -> Content:
    """Return the bytes of a file, not read yet."""
    if is_address(path):
        from distrun_runtime.data import remote

        return remote.opened(os.fspath(path))
    with open(path, "rb") as file:
        # An empty file cannot be mapped.
        is_empty = not os.fstat(file.fileno()).st_size
        return b"" if is_empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _reopen(path: str, source: str | Content, begin: int, end: int, offsets: NDArray[np.int64] | None) -> RecordFile:
    """Return a part of a file. `source`: its path, or its bytes."""
    file = RecordFile.__new__(RecordFile)
    file._open(_mapped(source) if isinstance(source, str) else source)
    file.path, file._begin, file._end, file._offsets = path, begin, end, offsets
    return file


def _read_index(path: str | os.PathLike[str], size: int) -> NDArray[np.int64]:
    """Return the offsets in an index file, in its order."""
    offsets = []
    for number, line in enumerate(io.BytesIO(content_of(path)), 1):
        words = line.split()
        if len(words) < 2 or not words[-1].isdigit() or int(words[-1]) >= size:
            raise DataError(
                f"{name_of(path)}, line {number}: expected a key and an offset below {size}, found {line!r}"
            )
        offsets.append(int(words[-1]))
    return np.array(offsets, np.int64)
