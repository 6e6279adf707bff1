"""The binary files of CIFAR-10."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from distrun_runtime.data import CIFAR10, Reader, cifar10_files
from distrun_runtime.errors import DataError


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


def test_damaged_files_are_named_with_offset_expected_and_found(tmp_path: Path) -> None:
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
