"""Output of tasks: windows, acknowledgements, draining, and the spool on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distrun_runtime.agent import tasks
from distrun_runtime.agent.tasks import Outlet, StreamSpool


class Rig:
    def __init__(self, folder: Path) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self.outlet = Outlet("worker-0", "out", reading, StreamSpool(str(folder / "x")))
        self.sent: list[tuple[int, bytes]] = []
        self.room = True

    def pump(self, window: int) -> bytes:
        self.outlet.pump(lambda offset, data: self.sent.append((offset, data)), lambda: self.room, window)
        return b"".join(data for _, data in self.sent)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.outlet.close()
    rig.outlet.spool.close()
    os.close(rig.writing)


def test_window_bounds_what_is_in_flight_and_acknowledgement_opens_it(rig: Rig) -> None:
    os.write(rig.writing, b"0123456789")
    assert rig.outlet.read()
    assert rig.pump(4) == b"0123"
    assert rig.pump(4) == b"0123"
    rig.outlet.acknowledge(2)
    assert rig.pump(4) == b"012345"
    rig.outlet.acknowledge(6)
    assert rig.pump(100) == b"0123456789"
    assert [offset for offset, _ in rig.sent] == [0, 4, 6]
    assert rig.outlet.is_sent


def test_acknowledgement_of_what_was_never_sent_opens_nothing(rig: Rig) -> None:
    os.write(rig.writing, b"0123456789")
    rig.outlet.read()
    rig.pump(4)
    rig.outlet.acknowledge(999)
    assert rig.outlet.acked == 4


def test_channel_without_room_waits(rig: Rig) -> None:
    os.write(rig.writing, b"abc")
    rig.outlet.read()
    rig.room = False
    assert rig.pump(100) == b""
    rig.room = True
    assert rig.pump(100) == b"abc"


def test_drain_takes_what_the_pipe_holds_and_does_not_wait(rig: Rig) -> None:
    os.write(rig.writing, b"last words")
    rig.outlet.drain()
    assert rig.pump(100) == b"last words"
    assert rig.outlet.descriptor is not None, "somebody may still write"
    assert rig.outlet.read() is False


def test_end_of_the_pipe_closes_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    outlet = Outlet("worker-0", "out", reading, StreamSpool(str(tmp_path / "x")))
    assert outlet.read() is False
    assert outlet.descriptor is None
    assert outlet.read() is False


def test_discard_forgets_all(rig: Rig) -> None:
    os.write(rig.writing, b"nobody listens")
    rig.outlet.read()
    rig.outlet.discard()
    assert rig.pump(100) == b""
    assert rig.outlet.total == 14


def whole(spool: StreamSpool, offset: int, limit: int = 7) -> bytes:
    data = b""
    while piece := spool.read(offset + len(data), limit):
        data += piece
    return data


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SEGMENT_BYTES", 10)


@pytest.mark.usefixtures("small_segments")
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=30), max_size=12), st.integers(0, 200), st.booleans())
def test_bytes_come_back_at_their_offsets(pieces: list[bytes], cut: int, on_disk: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        spool = StreamSpool(os.path.join(folder, "x" if on_disk else "missing/x"))
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


@pytest.mark.usefixtures("small_segments")
def test_acknowledged_segments_are_given_back_to_the_disk(tmp_path: Path) -> None:
    spool = StreamSpool(str(tmp_path / "x"))
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


@pytest.mark.usefixtures("small_segments")
def test_a_stream_of_which_too_much_waits_is_full_until_some_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "SPOOL_BYTES", 30)
    spool = StreamSpool(str(tmp_path / "x"))
    spool.append(b"a" * 29)
    assert not spool.is_full
    spool.append(b"b")
    assert spool.is_full
    spool.forget(1)
    assert not spool.is_full
    spool.close()


def test_full_disk_sends_the_stream_to_memory_within_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MEMORY_BYTES", 10)
    spool = StreamSpool(str(tmp_path / "x"))
    spool.append(b"on disk ")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tasks.os, "pwrite", full)
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
