from __future__ import annotations

import errno
import io
import selectors
import socket
from pathlib import Path
from typing import Any

import pytest

from distrun_runtime.agent import query
from distrun_runtime.contract.agent_messages import AnswerPiece
from distrun_runtime.errors import ContractError


def target(host: str, port: int, nonce: str, address: str = "127.0.0.1") -> dict[str, object]:
    return {"host": host, "address": address, "port": port, "nonce": nonce}


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_nonces_that_were_left_are_told_when_listening_ends(address: str) -> None:
    try:
        port = query.answer("listen", {"address": address})["port"]
    except ContractError:
        pytest.skip("no %s here" % address)
    targets = [target("a", port, "first", address), target("b", port, "second", address)]
    told = query.answer("connect", {"targets": targets, "limit_s": 60.0})
    assert told == {"results": {"a": "", "b": ""}}
    assert sorted(query.answer("close", {})["nonces"]) == ["first", "second"]
    assert query.answer("close", {}) == {"nonces": []}
    assert query.connect([target("a", port, "x", address)], 60.0) == {"a": "Connection refused"}


def test_what_answers_nothing_is_late_and_delays_no_other() -> None:
    port = query.listen("127.0.0.1")
    with socket.socket() as full:
        # A queue of one that is full: the system drops what comes then.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        silent = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for each in fillers:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", silent))
        told = query.connect([target("a", silent, "x"), target("b", port, "y")], 3.0)
        for each in fillers:
            each.close()
    assert told == {"a": "no answer within 3 s", "b": ""}
    assert query.close() == ["y"]


def test_ports_come_from_the_range_and_an_address_of_another_host_is_refused() -> None:
    port = query.listen("127.0.0.1")
    query.close()
    assert query.answer("listen", {"address": "127.0.0.1", "port_range": "%d-%d" % (port, port)}) == {"port": port}
    with pytest.raises(ContractError, match="Address already in use"):
        query.listen("127.0.0.1", "%d-%d" % (port, port))
    query.close()
    with pytest.raises(ContractError, match=r"cannot listen on 192\.0\.2\.77"):
        query.listen("192.0.2.77")


class Said:
    """A channel that keeps what was said: name and `left` of each piece, and how many bytes it has."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int, int]] = []
        self.flushed = 0
        """How many pieces had been said at the last flush."""

    def say(self, kind: object, **members: Any) -> None:
        if kind is AnswerPiece:
            self.pieces.append((members["name"], members["left"], len(members["data"])))

    def flush(self) -> None:
        self.flushed = len(self.pieces)


def stream(jobs: list[list[str]], files: list[list[object]], asked: bytes = b"") -> tuple[query.JobStream, Said]:
    said = Said()
    args = {"jobs": jobs, "files": files, "asked": asked.hex()}
    return query.JobStream(said, 1, selectors.DefaultSelector(), args), said  # type: ignore[arg-type]


class Unreadable(io.FileIO):
    """A file on a broken disk."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_log_that_cannot_be_read_is_told_as_cut_and_what_is_no_file_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = {"broken": Unreadable}
    monkeypatch.setattr(query, "open", lambda path, how: opens.get(Path(path).name, open)(path, how), raising=False)
    logs = tmp_path / "logs"
    (logs / "folder").mkdir(parents=True)
    (logs / "broken").write_text("x")
    (logs / "circle").symlink_to(logs / "circle")  # it does not open
    (logs / "gone").symlink_to(logs / "nowhere")
    (logs / "whole").write_text("x")
    told, said = stream([["j", str(tmp_path), ""]], [["logs/*", 0]])
    assert not told.proceed()
    assert sorted(said.pieces) == [("logs/broken", 1, 0), ("logs/circle", 1, 0), ("logs/whole", 0, 1)]


def listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_a_coordinator_that_takes_only_a_part_of_a_frame_is_sent_no_more(tmp_path: Path) -> None:
    with listening(tmp_path / "c.s") as listener:
        told, said = stream([["j", "", str(tmp_path / "c.s")]], [])
        assert told.proceed()
        peer, _ = listener.accept()
        told.take(0, "j", bytes(8 << 20))
        assert said.pieces == [("", 0, 0)]
        told.take(0, "j", b"a frame that would not be understood")
        came = 0
        while data := peer.recv(1 << 20):
            came += data.count(0)
            assert data.count(0) == len(data)
        assert 0 < came < 8 << 20
        peer.close()
        assert not told.proceed()


def test_what_one_coordinator_said_is_not_held_up_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[int] = []
    paths = [str(tmp_path / f"{number}.s") for number in range(3)]  # nobody is there
    told, said = stream([[path, "", path] for path in paths], [])
    monkeypatch.setattr(said, "flush", lambda: flushed.append(len(said.pieces)))
    assert not told.proceed()
    assert flushed == [1, 2, 3]
