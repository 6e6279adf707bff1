"""MNIST's idx files and CIFAR-10's binary files: read as described, refused with file and offset when damaged."""

from __future__ import annotations

import gzip
import re
import struct
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from distrun_runtime.data import CIFAR10, MNIST, Reader, cifar10_files, mnist_files, read_idx
from distrun_runtime.errors import DataError

IDX_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""Element types by their code, from the description."""

GOLDEN = bytes.fromhex("00000803 00000002 00000002 00000003 000102030405 fa0080ff4001")
"""Two images of 2 x 3, written by hand after the description."""


def idx(array: np.ndarray) -> bytes:
    code = next(code for code, name in IDX_DTYPES.items() if np.dtype(name) == array.dtype.newbyteorder(">"))
    head = bytes([0, 0, code, array.ndim]) + struct.pack(">%dI" % array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(folder: Path, images: np.ndarray, labels: np.ndarray) -> tuple[Path, Path]:
    for name, array in (("images", images), ("labels", labels)):
        (folder / name).write_bytes(idx(array))
    return folder / "images", folder / "labels"


def test_the_golden_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(GOLDEN)
    expected = [[[0, 1, 2], [3, 4, 5]], [[250, 0, 128], [255, 64, 1]]]
    np.testing.assert_array_equal(read_idx(tmp_path / "x"), np.array(expected, np.uint8))


SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)


@settings(deadline=None)
@given(st.sampled_from(sorted(IDX_DTYPES.values())).flatmap(lambda name: hnp.arrays(np.dtype(name), SHAPES)))
def test_every_element_type_is_read_back(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray) -> None:
    path = tmp_path_factory.mktemp("idx") / "x"
    path.write_bytes(idx(array))
    found = read_idx(path)
    assert found.dtype == array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"offset 0: expected the head of an idx file .* found nothing"),
        (b"\0\1\x08\1", "offset 0: expected the head of an idx file .* found 00 01 08 01"),
        (b"\0\0\x07\1" + bytes(8), "offset 0: .* 0x08, 0x09, .* found 00 00 07 01"),
        (GOLDEN[:10], "offset 4: expected 3 sizes of 4 bytes, found 6 bytes"),
        (GOLDEN[:-1], r"offset 16: expected 12 bytes of elements for shape \(2, 2, 3\), found 11"),
        (GOLDEN + b"x", "offset 16: expected 12 bytes .* found 13"),
        (gzip.compress(GOLDEN, mtime=0)[:-9], "offset 0: expected a whole gzip file, found a damaged one"),
    ],
)
def test_a_damaged_file_is_named_with_offset_expected_and_found(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "bad")) + ", " + message):
        read_idx(tmp_path / "bad")


def test_pixels_are_divided_by_256_and_labels_are_integers(tmp_path: Path) -> None:
    images = np.arange(24, dtype=np.uint8).reshape(4, 2, 3) * 10
    files = write(tmp_path, images, np.array([3, 1, 4, 1], np.uint8))
    (data, label), *_ = Reader(MNIST(*files), 3)
    assert (data.shape, data.dtype, label.dtype) == ((3, 1, 2, 3), np.float32, np.int64)
    np.testing.assert_array_equal(data[:, 0] * 256, images[:3])
    assert label.tolist() == [3, 1, 4]
    (flat, _), *_ = Reader(MNIST(*files, flat=True), 3)
    np.testing.assert_array_equal(flat, data.reshape(3, 6))
    example, number = MNIST(*files)[2]
    assert (example.shape, number) == ((1, 2, 3), 4)


def test_parts_are_those_of_mxnets_iterator(tmp_path: Path) -> None:
    """From floor(10 / 4 * i): 0, 2, 5, 7."""
    dataset = MNIST(*write(tmp_path, np.zeros((10, 1, 1), np.uint8), np.arange(10, dtype=np.uint8)))
    first = [next(iter(Reader(dataset, 1, num_parts=4, part_index=i)))[1][0] for i in range(4)]
    assert first == [0, 2, 5, 7]


def test_mnists_batches_are_those_of_mxnet(tmp_path: Path, run_by_peer: Callable[..., str]) -> None:
    rng = np.random.default_rng(4)
    files = write(tmp_path, rng.integers(256, size=(11, 28, 28), dtype=np.uint8), np.arange(11, dtype=np.uint8))
    text = """\
import mxnet as mx, numpy as np
for part in range(3):
    batches = mx.io.MNISTIter(image="images", label="labels", batch_size=1, shuffle=False, silent=True, num_parts=3,
        part_index=part)
    pairs = [(batch.data[0].asnumpy(), batch.label[0].asnumpy()) for batch in batches]
    data, label = (np.concatenate(arrays) for arrays in zip(*pairs))
    np.savez("part-%d.npz" % part, data=data, label=label)
"""
    run_by_peer("mxnet", text)
    for i in range(3):
        ((data, label),) = Reader(MNIST(*files), 99, num_parts=3, part_index=i)
        with np.load(tmp_path / ("part-%d.npz" % i)) as theirs:
            np.testing.assert_array_equal(data, theirs["data"])
            np.testing.assert_array_equal(label, theirs["label"])


def test_images_and_labels_of_different_numbers_or_kinds_are_refused(tmp_path: Path) -> None:
    images, labels = write(tmp_path, np.zeros((3, 1, 1), np.uint8), np.zeros(2, np.uint8))
    with pytest.raises(DataError, match=r"labels, offset 4: expected as many labels as .* 3, found 2"):
        MNIST(images, labels)
    with pytest.raises(DataError, match="labels, offset 2: expected bytes along 3 axes, found uint8 along 1"):
        MNIST(labels, images)


def test_the_files_are_found_under_the_names_of_the_database(tmp_path: Path) -> None:
    names = ["train-images-idx3-ubyte.gz", "train-labels.idx1-ubyte", "t10k-images-idx3-ubyte"]
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in mnist_files(tmp_path)] == names[:2]
    with pytest.raises(FileNotFoundError, match=r"no t10k-labels-idx1-ubyte or t10k-labels.idx1-ubyte"):
        mnist_files(tmp_path, train=False)


# --- CIFAR-10


def record(label: int, red: int = 0) -> bytes:
    return bytes([label]) + bytes([red]) * 1024 + bytes(2048)


def test_a_record_is_a_label_and_three_planes(tmp_path: Path) -> None:
    pixels = np.arange(3072) % 251
    (tmp_path / "a.bin").write_bytes(b"\x07" + pixels.astype(np.uint8).tobytes() + record(9, 255))
    ((data, label),) = Reader(CIFAR10([tmp_path / "a.bin"]), 2)
    assert (data.shape, data.dtype, label.dtype) == ((2, 3, 32, 32), np.float32, np.int64)
    np.testing.assert_allclose(data[0] * 255, pixels.reshape(3, 32, 32), rtol=1e-6)
    assert label.tolist() == [7, 9]
    assert (data[1, 0] == 1).all()
    assert not data[1, 1:].any()


def test_files_follow_one_another_and_parts_cover_them(tmp_path: Path) -> None:
    for name, labels in (("a", range(3)), ("b", range(3, 10))):
        (tmp_path / name).write_bytes(b"".join(map(record, labels)))
    dataset = CIFAR10([tmp_path / "a", tmp_path / "b"])
    assert len(dataset) == 10
    read = [[int(i) for _, label in Reader(dataset, 2, num_parts=3, part_index=p) for i in label] for p in range(3)]
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert dataset[4][1] == 4


def test_a_damaged_file_of_cifar10_is_named_with_offset_expected_and_found(tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    path.write_bytes(record(1) + b"xy")
    with pytest.raises(DataError, match=r"bad.bin, offset 3073: expected records of 3073 bytes, found 2 bytes after"):
        CIFAR10([path])
    path.write_bytes(b"")
    with pytest.raises(DataError, match="offset 0: expected records of 3073 bytes, found 0 bytes"):
        CIFAR10([path])
    path.write_bytes(record(1) + record(10))
    with pytest.raises(DataError, match="offset 3073: expected a label from 0 to 9, found 10"):
        CIFAR10([path])


def test_the_files_are_found_in_the_folder_or_the_archives_folder_in_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no data_batch_1.bin in .* \(the binary version of CIFAR-10\)"):
        cifar10_files(tmp_path)
    inner = tmp_path / "cifar-10-batches-bin"
    for folder in (tmp_path, inner):
        folder.mkdir(exist_ok=True)
        for name in ["test_batch.bin", *("data_batch_%d.bin" % i for i in range(1, 6))]:
            (folder / name).touch()
        assert [path.parent for path in cifar10_files(tmp_path)] == [folder] * 5
    assert cifar10_files(tmp_path, train=False) == [inner / "test_batch.bin"]


@pytest.mark.parametrize("pickled", ["cifar-10-batches-py/data_batch_1", "data_batch_1"])
def test_the_pickled_files_of_cifar10_are_named_and_not_read(tmp_path: Path, pickled: str) -> None:
    (tmp_path / pickled).parent.mkdir(exist_ok=True)
    (tmp_path / pickled).write_bytes(b"cos\nsystem\n")
    with pytest.raises(FileNotFoundError, match=r"no data_batch_1.bin in .*; the version for Python is pickles, which"):
        cifar10_files(tmp_path)
