"""Record files: byte for byte those of MXNet, in both directions; damaged ones are named."""

from __future__ import annotations

import copy
import pickle
import struct
from pathlib import Path
from typing import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.data import CIFAR10, IRHeader, RecordFile, RecordWriter, pack, pack_image, read_idx, unpack
from distrun_runtime.errors import DataError

MAGIC_BYTES = bytes.fromhex("0a23d7ce")

RECORDS = [
    b"",
    b"a",
    b"abcd",
    MAGIC_BYTES,
    MAGIC_BYTES * 2,
    b"abcd" + MAGIC_BYTES + b"efgh" + MAGIC_BYTES + b"ij",
    b"x" + MAGIC_BYTES + b"yz",  # not at a multiple of 4: no cut
    b"abcd" + MAGIC_BYTES,
    pack(IRHeader(0, 3.0, 7, 0), b"jpeg"),
    pack(IRHeader(0, np.array([1, 2.5, -3], np.float32), 2**40, 5), b"png"),
]
# What mx.recordio.MXIndexedRecordIO of MXNet 1.9.1 wrote for them, with keys 0, 10, 20, ...
GOLDEN = bytes.fromhex(
    "0a23d7ce00000000 0a23d7ce0100000061000000 0a23d7ce0400000061626364"
    "0a23d7ce00000020 0a23d7ce00000060"
    "0a23d7ce00000020 0a23d7ce00000040 0a23d7ce00000060"
    "0a23d7ce0400002061626364 0a23d7ce0400004065666768 0a23d7ce02000060696a0000"
    "0a23d7ce07000000780a23d7ce797a00"
    "0a23d7ce0400002061626364 0a23d7ce00000060"
    "0a23d7ce1c000000 000000000000404007000000000000000000000000000000 6a706567"
    "0a23d7ce27000000 030000000000000000000000000100000500000000000000 0000803f00002040000040c0 706e6700"
)
MAGIC_RECORD = GOLDEN[32:48]
"""The record of the magic number: two empty parts."""

GOLDEN_INDEX = "0\t0\n10\t8\n20\t20\n30\t32\n40\t48\n50\t72\n60\t108\n70\t124\n80\t144\n90\t180\n"

contents = st.lists(st.one_of(st.just(MAGIC_BYTES), st.binary(max_size=9)), max_size=6).map(b"".join)


def write(folder: Path, records: list[bytes], name: str = "a.rec") -> Path:
    with RecordWriter(folder / name) as writer:
        for record in records:
            writer.write(record)
    return folder / name


def test_what_is_written_is_what_mxnet_writes(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "a.rec", tmp_path / "a.idx") as writer:
        places = [writer.write(record, key=10 * i) for i, record in enumerate(RECORDS)]
    assert (tmp_path / "a.rec").read_bytes() == GOLDEN
    assert (tmp_path / "a.idx").read_text() == GOLDEN_INDEX
    assert places == RecordFile(tmp_path / "a.rec").offsets.tolist()


def test_what_mxnet_wrote_is_read_in_order_by_number_and_by_index(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(GOLDEN)
    (tmp_path / "a.idx").write_text(GOLDEN_INDEX)
    assert list(RecordFile(tmp_path / "a.rec")) == RECORDS
    for file in (RecordFile(tmp_path / "a.rec"), RecordFile(tmp_path / "a.rec", tmp_path / "a.idx")):
        assert len(file) == len(RECORDS)
        assert [file[i] for i in (9, 5, 0)] == [RECORDS[i] for i in (9, 5, 0)]


def test_mxnet_reads_ours_and_we_read_mxnets(tmp_path: Path, run_by_peer: Callable[..., str]) -> None:
    rng = np.random.default_rng(1)
    words = [MAGIC_BYTES, b"abcd", b"xyz", b"\n"]
    records = [b"".join(words[i] for i in rng.integers(4, size=rng.integers(9))) for _ in range(200)]
    with RecordWriter(tmp_path / "ours.rec", tmp_path / "ours.idx") as writer:
        for record in [*records, pack(IRHeader(0, np.array([4, 5], np.float32), 6, 7), b"image")]:
            writer.write(record)
    text = """\
import mxnet as mx
ours = mx.recordio.MXIndexedRecordIO("ours.idx", "ours.rec", "r")
theirs = mx.recordio.MXRecordIO("theirs.rec", "w")
for key in ours.keys:
    theirs.write(ours.read_idx(key))
header, content = mx.recordio.unpack(ours.read_idx(ours.keys[-1]))
print(header.flag, header.label.tolist(), header.id, header.id2, content)
theirs.close()
"""
    assert run_by_peer("mxnet", text) == "2 [4.0, 5.0] 6 7 b'image'\n"
    assert list(RecordFile(tmp_path / "theirs.rec"))[:-1] == records
    assert (tmp_path / "theirs.rec").read_bytes() == (tmp_path / "ours.rec").read_bytes()


@settings(deadline=None)
@given(st.lists(contents, max_size=8))
def test_any_bytes_come_back_also_with_the_magic_inside(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes]
) -> None:
    file = RecordFile(write(tmp_path_factory.mktemp("rec"), records))
    assert list(file) == records == [file[i] for i in range(len(file))]


@settings(deadline=None)
@given(st.lists(contents, max_size=12), st.integers(1, 6))
def test_parts_by_bytes_cover_the_records_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], num: int
) -> None:
    file = RecordFile(write(tmp_path_factory.mktemp("rec"), records))
    assert [record for i in range(num) for record in file.cut(num, i)] == records
    len(file)  # finds the places, so that the parts have theirs from it
    assert [record for i in range(num) for record in file.cut(num, i)] == records


def test_parts_by_bytes_are_cut_where_mxnet_cuts(tmp_path: Path, run_by_peer: Callable[..., str]) -> None:
    """Its iterator reads the same labels in each part, from images of very different sizes."""
    pytest.importorskip("PIL", reason="images are written by Pillow: pip install pillow")

    rng = np.random.default_rng(2)
    images = [rng.integers(256, size=(8, 8 * k, 3), dtype=np.uint8) for k in rng.integers(1, 20, size=40)]
    path = write(tmp_path, [pack_image(IRHeader(0, float(i), i), image) for i, image in enumerate(images)])
    text = """\
import mxnet as mx
for part in range(3):
    batches = mx.io.ImageRecordIter(path_imgrec="a.rec", data_shape=(3, 8, 8), batch_size=1, num_parts=3,
        part_index=part, preprocess_threads=1, round_batch=False, verbose=False)
    print(*sorted(int(batch.label[0].asscalar()) for batch in batches))
"""
    ours = [[int(unpack(record)[0].label) for record in RecordFile(path).cut(3, i)] for i in range(3)]
    assert [list(map(int, line.split())) for line in run_by_peer("mxnet", text).splitlines()] == ours
    assert len(set(map(len, ours))) > 1, "parts by bytes differ in their numbers of records here"


def test_headers_keep_one_label_or_several() -> None:
    header, content = unpack(pack(IRHeader(9, 2.0, 3, 4), b"x"))
    assert (header, content) == (IRHeader(0, 2.0, 3, 4), b"x")
    header, content = unpack(pack(IRHeader(0, np.array([1.5, 2]), 2**63, 0), b""))
    assert (header.flag, header.id, content) == (2, 2**63, b"")
    np.testing.assert_array_equal(header.label, np.array([1.5, 2], np.float32))
    with pytest.raises(DataError, match="offset 0 of the record: expected a header of 24 bytes, found 3"):
        unpack(b"abc")
    with pytest.raises(DataError, match="offset 24 of the record: expected 5 labels of 4 bytes, found 1 bytes"):
        unpack(struct.pack("<IfQQ", 5, 0, 0, 0) + b"x")


def test_what_is_no_header_or_no_bytes_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"expected an IRHeader.*, found NoneType"):
        pack(None, b"")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pack: expected bytes, found str"):
        pack(IRHeader(0, 1, 0), "x")  # type: ignore[arg-type]
    with RecordWriter(tmp_path / "a.rec") as file, pytest.raises(TypeError, match="expected bytes, found str"):
        file.write("x")  # type: ignore[arg-type]


def test_a_record_that_the_format_cannot_hold_is_refused(tmp_path: Path) -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return 1 << 29

    with RecordWriter(tmp_path / "a.rec") as file, pytest.raises(ValueError, match="a record of 536870912 bytes"):
        file.write(Long())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0" + GOLDEN[1:], r"offset 0: expected the magic number 0xced7230a, found 0xced72300"),
        (GOLDEN[:8] + b"\1\0\0\0" + GOLDEN[12:], "offset 8: expected the magic number"),
        (GOLDEN[:14], "offset 8: expected a record's head of 8 bytes, found 6"),
        (GOLDEN[:30], r"offset 28: expected 4 bytes of a record, found 2"),
        (MAGIC_RECORD[:8], "offset 8: expected a record's head of 8 bytes, found 0"),
        (MAGIC_RECORD[8:], "offset 4: expected a part with flag 0 or 1, found flag 3"),
        (MAGIC_RECORD[:8] + GOLDEN[:8], "offset 12: expected a part with flag 2 or 3, found flag 0"),
    ],
)
def test_a_damaged_file_is_named_with_offset_expected_and_found(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.rec").write_bytes(content)
    for read in (list, len):
        with pytest.raises(DataError, match=r"bad\.rec, " + message):
            read(RecordFile(tmp_path / "bad.rec"))


@pytest.mark.parametrize("line", ["7", "0\tx", "0\t-4", "0\t272"])
def test_a_line_that_is_none_of_an_index_is_named(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, [bytes(100), b"b"])
    (tmp_path / "a.idx").write_text("0\t0\n%s\n" % line)
    with pytest.raises(DataError, match=r"a\.idx, line 2: expected a key and an offset below 120, found"):
        RecordFile(path, tmp_path / "a.idx")


def test_an_index_may_name_some_records_in_another_order(tmp_path: Path) -> None:
    path = write(tmp_path, [b"a", b"b", b"c"])
    (tmp_path / "a.idx").write_text("2\t24\n0\t0\n")
    file = RecordFile(path, tmp_path / "a.idx")
    assert [file[i] for i in range(len(file))] == [b"c", b"a"]


def test_a_copy_for_another_process_has_the_same_part(tmp_path: Path) -> None:
    part = RecordFile(write(tmp_path, RECORDS)).cut(2, 1)
    # copy goes the way that a data loader's processes take.
    assert list(copy.copy(part)) == list(part)
    with pytest.raises(ValueError, match="part 2 of 2"):
        part.cut(2, 2)


def test_a_part_may_be_cut_again(tmp_path: Path) -> None:
    records = [b"record %d" % i for i in range(20)]
    half = RecordFile(write(tmp_path, records)).cut(2, 1)
    again = [record for part in range(3) for record in half.cut(3, part)]
    assert again == list(half)
    assert again == records[-len(again) :]


def test_a_copy_of_a_part_has_the_order_of_its_index(tmp_path: Path) -> None:
    path = write(tmp_path, [b"%d" % i for i in range(8)])
    offsets = RecordFile(path).offsets
    index = tmp_path / "some.idx"
    index.write_text("".join("%d\t%d\n" % (i, offsets[i]) for i in (6, 5, 1)))
    part = RecordFile(path, index).cut(2, 1)
    copied = pickle.loads(pickle.dumps(part))
    assert [copied[i] for i in range(len(copied))] == [part[i] for i in range(len(part))] == [b"6", b"5"]


@pytest.mark.parametrize("header", [IRHeader(0, 1.0, -1), IRHeader(0, 1.0, 0, 2**64), IRHeader(0, 1.0, 0.5)])  # type: ignore[arg-type]
def test_a_number_that_a_header_has_no_room_for_is_refused(header: IRHeader) -> None:
    with pytest.raises(ValueError, match=r"id2? is a whole number from 0 to 2\*\*64 - 1, not "):
        pack(header, b"")


def test_parts_to_cut_are_whole_numbers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"num_parts is a whole number, not 2\.0"):
        RecordFile(write(tmp_path, [b"a"])).cut(2.0, 0)  # type: ignore[arg-type]


def test_an_address_that_cannot_be_read_or_written_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """MXNet reads these by itself."""
    (tmp_path / "x.rec").write_bytes(b"")
    path = "hdfs://node:8020/train.rec"
    for call in (
        lambda: RecordFile(path),
        lambda: RecordFile(tmp_path / "x.rec", path),
        lambda: read_idx(path),
        lambda: CIFAR10([path]),
    ):
        with pytest.raises(
            FileNotFoundError, match=r"expected a path or one of s3://.* fix: .* hdfs dfs -get hdfs://node"
        ):
            call()
    for path in ("hdfs://node:8020/train.rec", "s3://bucket/train.rec"):
        with pytest.raises(FileNotFoundError, match="is an address, expected a path: records are written to files"):
            RecordWriter(path)
        with pytest.raises(FileNotFoundError, match="is an address, expected a path: records are written to files"):
            RecordWriter(tmp_path / "y.rec", path)
