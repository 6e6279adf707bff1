"""From a pipe to the coordinator: windows, acknowledgements, draining."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distrun_runtime.agent.outlet import Outlet
from distrun_runtime.agent.spool import Spool


class Rig:
    def __init__(self, folder: Path) -> None:
        reading, self.writing = os.pipe()
        os.set_blocking(reading, False)
        self.outlet = Outlet("worker-0", "out", reading, Spool(str(folder / "x")))
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
    outlet = Outlet("worker-0", "out", reading, Spool(str(tmp_path / "x")))
    assert outlet.read() is False
    assert outlet.descriptor is None
    assert outlet.read() is False


def test_discard_forgets_all(rig: Rig) -> None:
    os.write(rig.writing, b"nobody listens")
    rig.outlet.read()
    rig.outlet.discard()
    assert rig.pump(100) == b""
    assert rig.outlet.total == 14
