"""A stream on disk, by byte offset."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distrun_runtime.agent import spool as spools
from distrun_runtime.agent.spool import Spool


def whole(spool: Spool, offset: int, limit: int = 7) -> bytes:
    data = b""
    while piece := spool.read(offset + len(data), limit):
        data += piece
    return data


@settings(max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=30), max_size=12), st.integers(0, 200), st.booleans())
def test_bytes_come_back_at_their_offsets(pieces: list[bytes], cut: int, on_disk: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(os.path.join(folder, "x" if on_disk else "missing/x"), segment_bytes=16)
        for piece in pieces:
            spool.append(piece)
        data = b"".join(pieces)
        assert spool.end == len(data)
        assert bool(spool.failure) == (not on_disk and bool(data))
        for offset in range(len(data) + 1):
            assert whole(spool, offset) == data[offset:]
        spool.forget(cut)
        assert whole(spool, min(cut, len(data))) == data[cut:]
        spool.close()
        assert os.listdir(folder) == []


def test_acknowledged_segments_are_given_back_to_the_disk(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path / "x"), segment_bytes=10)
    spool.append(b"a" * 35)
    assert len(list(tmp_path.iterdir())) == 4
    spool.forget(20)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.2", "x.3"]
    spool.forget(35)
    assert [each.name for each in tmp_path.iterdir()] == ["x.3"], "the one that grows stays"
    spool.append(b"b" * 5)
    assert spool.read(35, 99) == b"bbbbb"
    assert oct((tmp_path / "x.3").stat().st_mode)[-3:] == "600"
    spool.close()


def test_full_disk_sends_the_stream_to_memory_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool(str(tmp_path / "x"), memory_bytes=10)
    spool.append(b"on disk ")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spools.os, "pwrite", full)
    spool.append(b"in memory")
    assert spool.failure.endswith("No space left on device")
    assert not spool.is_full
    spool.append(b"!!")
    assert spool.is_full
    assert whole(spool, 0) == b"on disk in memory!!"
    spool.forget(17)
    assert not spool.is_full
    assert list(tmp_path.iterdir()) == []
    assert whole(spool, 17) == b"!!"
    spool.close()
