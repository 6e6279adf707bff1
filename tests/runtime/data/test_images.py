"""Images in record files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distrun_runtime.data import (
    ImageRecords,
    IRHeader,
    Reader,
    RecordFile,
    RecordWriter,
    pack,
    pack_image,
    unpack_image,
)
from distrun_runtime.errors import DataError

pytest.importorskip("PIL", reason="images are read by Pillow: pip install pillow")

RNG = np.random.default_rng(3)


def images(count: int, rows: int = 6, columns: int = 8) -> list[np.ndarray]:
    return [RNG.integers(256, size=(rows, columns, 3), dtype=np.uint8) for _ in range(count)]


def write(folder: Path, pictures: list[np.ndarray]) -> RecordFile:
    """Write images without loss, numbered by their labels."""
    with RecordWriter(folder / "a.rec") as file:
        for i, picture in enumerate(pictures):
            file.write(pack_image(IRHeader(0, float(i), i), picture, form="PNG"))
    return RecordFile(folder / "a.rec")


def test_an_image_comes_back_nearly_by_jpeg_and_exactly_by_png() -> None:
    smooth = np.add.outer(np.arange(16), np.arange(24))[:, :, None] * np.array([1, 2, 3])
    picture = smooth.astype(np.uint8)
    header, found = unpack_image(pack_image(IRHeader(0, 4.0, 5), picture, form="PNG"))
    assert (header.label, header.id) == (4.0, 5)
    np.testing.assert_array_equal(found, picture)
    _, found = unpack_image(pack_image(IRHeader(0, 4.0, 5), picture))
    # JPEG at quality 95 of a smooth picture: a few grey levels.
    assert abs(found.astype(int) - picture).mean() < 4
    _, grey = unpack_image(pack_image(IRHeader(0, 4.0, 5), picture[:, :, 0], form="PNG"))
    np.testing.assert_array_equal(grey, picture[:, :, :1].repeat(3, axis=2))


def test_batches_have_the_middle_of_the_images_colours_first(tmp_path: Path) -> None:
    pictures = images(5)
    reader = Reader(ImageRecords(write(tmp_path, pictures), (3, 4, 4)), 2, num_parts=2, part_index=1)
    batches = list(reader)
    assert [label.tolist() for _, label in batches] == [[2, 3], [4]]
    data, label = batches[0]
    assert (data.shape, data.dtype, label.dtype) == ((2, 3, 4, 4), np.float32, np.float32)
    np.testing.assert_array_equal(data[1], pictures[3][1:5, 2:6].transpose(2, 0, 1))


def test_parts_by_bytes_are_read_too(tmp_path: Path) -> None:
    dataset = ImageRecords(write(tmp_path, images(7)), (3, 4, 4))
    found = [
        float(i)
        for p in range(3)
        for _, label in Reader(dataset, 4, num_parts=3, part_index=p, by="bytes")
        for i in label
    ]
    assert found == list(range(7))


def test_small_images_are_enlarged_and_the_shorter_side_resized(tmp_path: Path) -> None:
    flat = np.full((3, 5, 3), 77, np.uint8)
    file = write(tmp_path, [flat])
    data, label = ImageRecords(file, (3, 8, 8))[0]
    assert data.shape == (3, 8, 8)
    assert (data == 77).all()
    assert label == 0
    # 10 x 20 with the shorter side at 5 is 5 x 10; its middle has the border of the two halves.
    halves = np.zeros((10, 20, 3), np.uint8)
    halves[:, 10:] = 200
    data, _ = ImageRecords(write(tmp_path, [halves]), (3, 5, 6), resize=5)[0]
    assert (data[:, :, 0] < 20).all()
    assert (data[:, :, -1] > 180).all()


def test_random_cuts_and_mirrors_follow_the_seed(tmp_path: Path) -> None:
    (picture,) = images(1, 6, 6)
    file = write(tmp_path, [picture])

    def draws(seed: int) -> list[np.ndarray]:
        dataset = ImageRecords(file, (3, 4, 4), random_crop=True, random_mirror=True, seed=seed)
        return [dataset[0][0] for _ in range(8)]

    np.testing.assert_array_equal(draws(1), draws(1))
    assert len({draw.tobytes() for draw in draws(1)}) > 2
    planes = picture.transpose(2, 0, 1).astype(np.float32)
    possible = {
        cut[:, :, ::step].tobytes()
        for top in range(3)
        for left in range(3)
        for cut in [planes[:, top : top + 4, left : left + 4]]
        for step in (1, -1)
    }
    assert {draw.tobytes() for draw in draws(1)} <= possible


def cuts(dataset: ImageRecords, positions: list[int]) -> list[bytes]:
    return [example.tobytes() for example in dataset.read(np.array(positions))[0]]


def test_every_image_draws_its_own_numbers_and_other_ones_each_time(tmp_path: Path) -> None:
    (picture,) = images(1, 40, 40)
    file = write(tmp_path, [picture] * 6)
    for seed in (None, 7):
        dataset = ImageRecords(file, (3, 8, 8), random_crop=True, seed=seed)
        # 33 * 33 places: that two of 12 cuts are alike is less than one in ten, but these are fixed by the seed.
        found = cuts(dataset, list(range(6)) * 2)
        assert len(set(found)) > 10, "the same cut came twice"
        if seed is not None:
            assert cuts(ImageRecords(file, (3, 8, 8), random_crop=True, seed=seed), list(range(6)) * 2) == found


def test_numbers_do_not_depend_on_the_order_in_which_images_are_read(tmp_path: Path) -> None:
    (picture,) = images(1, 40, 40)
    file = write(tmp_path, [picture] * 6)

    def dataset() -> ImageRecords:
        return ImageRecords(file, (3, 8, 8), random_crop=True, random_mirror=True, seed=7)

    straight = cuts(dataset(), [0, 1, 2, 3, 4, 5])
    assert cuts(dataset(), [5, 4, 3, 2, 1, 0]) == straight[::-1]
    # Parts of the file, cut by bytes, have positions of their own: their images are still other images.
    first, second = (cuts(dataset().cut(2, part), [0, 1, 2]) for part in range(2))
    assert first + second == straight


def test_another_reader_of_the_same_images_does_not_change_a_readers_numbers(tmp_path: Path) -> None:
    (picture,) = images(1, 40, 40)
    file = write(tmp_path, [picture] * 4)

    def trained(is_tested_meanwhile: bool) -> list[bytes]:
        dataset = ImageRecords(file, (3, 8, 8), random_crop=True, seed=7)
        train, test = Reader(dataset, 1, epoch_size=3), Reader(dataset, 1)
        found = []
        for _ in range(4):  # an epoch of the training ends amidst a pass over the images
            found += [data.tobytes() for data, _ in train]
            if is_tested_meanwhile:
                list(test)
        return found

    assert trained(True) == trained(False)


def test_a_run_that_was_stopped_goes_on_with_the_numbers_of_its_epoch(tmp_path: Path) -> None:
    (picture,) = images(1, 40, 40)
    file = write(tmp_path, [picture] * 4)

    def reader() -> Reader:
        dataset = ImageRecords(file, (3, 8, 8), random_crop=True, seed=7)
        return Reader(dataset, 2, shuffle=True, seed=1)

    def epoch(batches: Reader) -> list[bytes]:
        return [data.tobytes() for data, _ in batches]

    whole = reader()
    epochs = [epoch(whole) for _ in range(3)]
    assert len({cut for one in epochs for cut in one}) == 6
    again = reader()
    again.set_epoch(2)
    assert epoch(again) == epochs[2]
    with pytest.raises(ValueError, match="epoch is a number from 0, not -1"):
        again.set_epoch(-1)
    with pytest.raises(ValueError, match="epoch is a number from 0, not -2"):
        ImageRecords(file, (3, 8, 8)).set_epoch(-2)


LOADERS = """\
import sys
import numpy as np
import torch
from torch.utils.data import DataLoader
from distrun_runtime.data import ImageRecords, RecordFile

for persistent, seed, start in ((False, None, "fork"), (False, 3, "fork"), (True, 3, "fork"), (True, None, "spawn")):
    torch.manual_seed(0)
    dataset = ImageRecords(RecordFile("a.rec"), (3, 8, 8), random_crop=True, random_mirror=True, seed=seed)
    loader = DataLoader(
        dataset, batch_size=2, num_workers=2, persistent_workers=persistent, multiprocessing_context=start
    )
    found = [image.numpy().tobytes() for _ in range(3) for data, _ in loader for image in data]
    del loader
    print(len(found), len(set(found)))
"""


def test_processes_of_a_data_loader_draw_different_numbers_in_each_epoch(tmp_path: Path, run_by_peer: Any) -> None:
    (picture,) = images(1, 64, 64)
    write(tmp_path, [picture] * 8)
    for line in run_by_peer("torch", 'if __name__ == "__main__":\n    exec(%r)' % LOADERS).splitlines():
        # 24 cuts out of 2 * 57 * 57: two or three of them may be alike, but not a process's or an epoch's.
        total, different = map(int, line.split())
        assert total == 24
        assert different >= 21


def test_a_data_loader_draws_the_same_numbers_again_with_both_seeds(tmp_path: Path, run_by_peer: Any) -> None:
    (picture,) = images(1, 64, 64)
    write(tmp_path, [picture] * 8)
    text = """\
import torch
from torch.utils.data import DataLoader
from distrun_runtime.data import ImageRecords, RecordFile

seen = []
for torchs, ours, epoch in ((0, 3, 0), (0, 3, 0), (1, 3, 0), (0, 4, 0), (0, 3, 1)):
    torch.manual_seed(torchs)
    dataset = ImageRecords(RecordFile("a.rec"), (3, 8, 8), random_crop=True, seed=ours)
    dataset.set_epoch(epoch)
    loader = DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork")
    seen.append(b"".join(data.numpy().tobytes() for data, _ in loader))
print([one == seen[0] for one in seen])
"""
    assert run_by_peer("torch", text) == "[True, True, False, False, False]\n"


def test_several_labels_an_image(tmp_path: Path) -> None:
    (picture,) = images(1)
    with RecordWriter(tmp_path / "a.rec") as file:
        file.write(pack_image(IRHeader(0, np.array([1, 2], np.float32), 0), picture))
    records = RecordFile(tmp_path / "a.rec")
    assert ImageRecords(records, (3, 4, 4), label_width=2)[0][1].tolist() == [1, 2]
    with pytest.raises(DataError, match=r"a\.rec, record at offset 0: expected 1 labels, found 2"):
        ImageRecords(records, (3, 4, 4))[0]


def test_what_is_no_image_is_named_with_its_place(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec") as file:
        file.write(pack_image(IRHeader(0, 1.0, 0), images(1)[0]))
        place = file.write(pack(IRHeader(0, 1.0, 0), b"no image"))
    with pytest.raises(DataError, match=r"a\.rec, record at offset %d: .* Pillow can read, found 8 bytes" % place):
        list(Reader(ImageRecords(RecordFile(tmp_path / "a.rec"), (3, 4, 4)), 2))
    with pytest.raises(ValueError, match=r"expected a shape \(3, rows, columns\), found \(1, 4, 4\)"):
        ImageRecords(RecordFile(tmp_path / "a.rec"), (1, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"shape": (3, 4.0, 4)}, TypeError, r"rows is a whole number, not 4\.0"),
        ({"shape": "abc"}, ValueError, r"expected a shape \(3, rows, columns\), found abc"),
        ({"shape": 7}, ValueError, r"expected a shape \(3, rows, columns\), found 7"),
        ({"resize": -1}, ValueError, "resize is a number from 0, not -1"),
        ({"label_width": 0}, ValueError, "label_width is a number from 1, not 0"),
        ({"seed": -1}, ValueError, "seed is a number from 0, not -1"),
    ],
    ids=str,
)
def test_arguments_are_checked_before_an_image_is_read(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ImageRecords(write(tmp_path, []), **{"shape": (3, 4, 4), **arguments})


@pytest.mark.parametrize("image", [np.zeros((4, 4, 3)), np.zeros(4, np.uint8), np.zeros((4, 4, 2), np.uint8), "x"])
def test_what_is_no_array_of_pixels_is_not_packed(image: Any) -> None:
    with pytest.raises(
        ValueError, match=r"expected an image of bytes, \(rows, columns, 3\) or \(rows, columns\), found"
    ):
        pack_image(IRHeader(0, 1.0, 0), image)


def test_a_format_that_pillow_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="'JPG2' is not a format that Pillow writes"):
        pack_image(IRHeader(0, 1.0, 0), images(1)[0], form="JPG2")


def test_without_pillow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = pack_image(IRHeader(0, 1.0, 0), images(1)[0])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"Pillow, which is missing. Type:  pip install pillow"):
        unpack_image(record)
