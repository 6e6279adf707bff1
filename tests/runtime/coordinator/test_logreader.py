"""The index of a job's logs, and the reader that gives the output again in its order."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sample_plan import sample_plan

from distrun_runtime.contract import session
from distrun_runtime.contract.control import OutputWanted
from distrun_runtime.coordinator import logreader, logs
from distrun_runtime.coordinator.jobfolder import JobFolder
from distrun_runtime.coordinator.logreader import LoggedOutput, LogPiece, LogReader
from distrun_runtime.coordinator.logs import SIZE, IndexEntry, IndexWriter, LogFile, Spool, decode, encode, tail

Open = Callable[[Path], LogReader]
Chunk = tuple[str, str, bytes]


@pytest.fixture
def open_reader() -> Iterator[Callable[[Path], LogReader]]:
    """Make readers that are closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda folder: stack.enter_context(contextlib.closing(LogReader(folder)))


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Writing:
    """A spool, and what was written to it."""

    def __init__(self, folder: Path, limit: int = 0) -> None:
        self.folder = folder
        self.clock = Clock()
        self.limit = limit
        self.spool = Spool(folder, limit, self.clock)
        self.offsets: dict[tuple[str, str], int] = {}
        self.chunks: list[Chunk] = []

    def write(self, task: str, stream: str, data: bytes) -> None:
        key = task, stream
        at = self.offsets.get(key, 0)
        self.spool.add(task, stream, at, data)
        self.offsets[key] = at + len(data)
        self.chunks.append((task, stream, data))

    def turn(self, *chunks: Chunk) -> None:
        """One turn of the loop."""
        for chunk in chunks:
            self.write(*chunk)
        self.spool.flush()
        self.clock.now += 1.0


def everything(reader: LogReader, cursor: int = 0, limit: int = 1 << 20) -> tuple[list[LogPiece], int, int]:
    pieces: list[LogPiece] = []
    gap = 0
    while True:
        found = reader.read(cursor, limit)
        pieces += found.pieces
        gap += found.gap
        if found.cursor == cursor:
            return pieces, cursor, gap
        cursor = found.cursor


def joined(chunks: list[Chunk]) -> list[Chunk]:
    """Chunks of which those of one stream that follow each other are one."""
    found: list[Chunk] = []
    for task, stream, data in chunks:
        if found and found[-1][:2] == (task, stream):
            found[-1] = (task, stream, found[-1][2] + data)
        else:
            found.append((task, stream, data))
    return found


def read_as_chunks(pieces: list[LogPiece]) -> list[Chunk]:
    return joined([(piece.task, piece.stream, piece.data) for piece in pieces])


def test_output_is_given_in_the_order_in_which_it_came(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"one\n"), ("worker-1", "err", b"two\n"), ("worker-0", "err", b"three\n"))
    writing.turn(("worker-0", "out", b"fo"))
    writing.turn(("worker-0", "out", b"ur\n"))
    reader = open_reader(tmp_path)
    pieces, cursor, gap = everything(reader)
    assert [(piece.time, piece.task, piece.stream, piece.at, piece.data, piece.cursor) for piece in pieces] == [
        (1000.0, "worker-0", "out", 0, b"one\n", 0),
        (1000.0, "worker-1", "err", 0, b"two\n", 4),
        (1000.0, "worker-0", "err", 4, b"three\n", 8),
        (1001.0, "worker-0", "out", 10, b"fo", 14),
        (1002.0, "worker-0", "out", 12, b"ur\n", 16),
    ]
    assert (cursor, gap, reader.end(), reader.begin()) == (19, 0, 19, 0)
    writing.turn(("worker-1", "out", b"more"))
    assert [piece.data for piece in reader.read(cursor).pieces] == [b"more"]
    reader.close()
    writing.spool.close()


def test_pieces_of_one_stream_in_one_turn_are_one_record(tmp_path: Path) -> None:
    writing = Writing(tmp_path)
    writing.turn(*[("worker-0", "out", b"%d\n" % number) for number in range(1000)])
    assert (tmp_path / "index").stat().st_size == SIZE


def test_a_cursor_in_the_middle_of_a_piece_is_read_on_from_there(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"abcdef"), ("worker-1", "out", b"ghi"))
    reader = open_reader(tmp_path)
    [piece] = reader.read(2, 3).pieces
    assert (piece.cursor, piece.at, piece.data) == (2, 2, b"cde")
    assert [piece.data for piece in reader.read(5).pieces] == [b"f", b"ghi"]


def test_a_time_and_a_number_of_bytes_are_found(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    for number in range(100):
        writing.turn(("worker-0", "out", b"%02d\n" % number))
    reader = open_reader(tmp_path)
    assert reader.cursor_at(0.0) == 0
    assert reader.cursor_at(1050.0) == 150
    assert reader.cursor_at(1050.5) == 153
    assert reader.cursor_at(9999.0) == reader.end() == 300
    assert reader.cursor_back(30) == 270
    assert reader.cursor_back(1000) == 0


def test_a_clock_that_is_set_back_does_not_disturb_the_order(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"a"))
    writing.clock.now = 5.0
    writing.turn(("worker-0", "out", b"b"))
    times = [piece.time for piece in everything(open_reader(tmp_path))[0]]
    assert times == sorted(times)


@pytest.mark.parametrize("torn", range(1, SIZE))
def test_a_record_that_was_not_written_to_its_end_is_ignored(torn: int, tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"whole\n"))
    writing.turn(("worker-0", "out", b"lost\n"))
    os.truncate(tmp_path / "index", SIZE + torn)
    reader = open_reader(tmp_path)
    pieces, cursor, _ = everything(reader)
    assert [piece.data for piece in pieces] == [b"whole\n"]
    assert [(piece.data, piece.stream) for piece in reader.rest(["worker-0"])] == [(b"lost\n", "")]
    # Another coordinator goes on where the index is whole.
    again = Writing(tmp_path)
    again.turn(("worker-0", "out", b"new\n"))
    pieces, _, _ = everything(reader, cursor)
    assert [(piece.data, piece.stream) for piece in pieces] == [(b"lost\n", ""), (b"new\n", "out")]


def test_a_file_whose_end_is_zeros_after_a_power_failure_is_read_up_to_there(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"a"))
    with (tmp_path / "index").open("ab") as file:
        file.write(bytes(SIZE * 5 + 3))
    reader = open_reader(tmp_path)
    assert reader.end() == 1
    Writing(tmp_path).turn(("worker-1", "out", b"b"))
    assert [piece.data for piece in everything(reader)[0]] == [b"a", b"b"]


def test_a_record_in_the_middle_that_is_damaged_is_a_gap(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    for number in range(9):
        writing.turn(("worker-0", "out", b"%d\n" % number))
    with (tmp_path / "index").open("r+b") as file:
        file.seek(SIZE * 4)
        file.write(b"\xff" * 10)
    reader = open_reader(tmp_path)
    for cursor in range(18):
        pieces, end, gap = everything(reader, cursor)
        data = b"0\n1\n2\n3\n\0\x005\n6\n7\n8\n"[cursor:]
        assert b"".join(piece.data for piece in pieces) == data.replace(b"\0", b"")
        assert (end, gap) == (18, data.count(b"\0"))


def test_a_job_without_index_is_read_from_its_files(tmp_path: Path, open_reader: Open) -> None:
    (tmp_path / "worker-0.log").write_bytes(b"a\nb\n")
    reader = open_reader(tmp_path)
    assert (reader.begin(), reader.end(), reader.read(0).pieces) == (0, 0, ())
    assert [(piece.task, piece.data) for piece in reader.rest(["worker-0", "worker-1"])] == [("worker-0", b"a\nb\n")]


def test_what_the_index_had_no_room_for_is_recorded_later_without_its_stream(tmp_path: Path, open_reader: Open) -> None:
    full = [False]

    def write(fd: int, data: memoryview) -> int:
        if full[0]:
            os.write(fd, data[:7])
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, data)

    index = IndexWriter(tmp_path, write=write)
    (tmp_path / "worker-0.log").write_bytes(b"abcdefgh")
    index.add(IndexEntry(1.0, "worker-0", "out", 0, 0, 2))
    index.flush()
    full[0] = True
    index.add(IndexEntry(2.0, "worker-0", "err", 0, 2, 2))
    index.flush()
    assert index.error == "No space left on device"
    full[0] = False
    index.add(IndexEntry(3.0, "worker-0", "out", 0, 4, 2))
    index.flush({"worker-0": 8})
    assert not index.error
    index.close()
    pieces, _, gap = everything(open_reader(tmp_path))
    assert [(piece.stream, piece.data) for piece in pieces] == [
        ("out", b"ab"),
        ("", b"cd"),
        ("out", b"ef"),
        ("", b"gh"),
    ]
    assert gap == 0


def test_rotation_keeps_offsets_and_counts_what_is_gone(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path, limit=100)
    for number in range(100):
        writing.turn(("worker-0", "out", b"%09d\n" % number))
    kept = sum(path.stat().st_size for path in tmp_path.glob("worker-0.log*"))
    assert 50 <= kept <= 100
    log = LogFile(tmp_path / "worker-0.log")
    assert log.end() == 1000
    assert log.begin() == 1000 - (kept - 20)
    assert log.read(log.begin(), 10) == b"%09d\n" % (log.begin() // 10)
    assert log.read(0, 30) == b"%09d\n%09d\n" % (0, 1), "the beginning stays: a quarter of a small limit"
    assert log.read(20, 10) == b""
    log.close()
    reader = open_reader(tmp_path)
    pieces, cursor, gap = everything(reader)
    assert cursor == 1000
    assert gap == 1000 - kept
    newest = range(2 + gap // 10, 100)
    assert b"".join(piece.data for piece in pieces) == b"".join(b"%09d\n" % n for n in (0, 1, *newest))
    assert tail(tmp_path / "worker-0.log", 100) == ["%09d" % number for number in newest]
    for path in tmp_path.glob("index*"):
        path.unlink()
    reader.close()
    assert b"".join(piece.data for piece in reader.rest(["worker-0"])).startswith(b"%09d\n%09d\n" % (0, 1))


def test_of_a_long_log_the_first_16_mib_always_stay(tmp_path: Path) -> None:
    line = b"%s\n" % (b"x" * 65535)
    spool = Spool(tmp_path, limit=1 << 27)
    for number in range(4096):  # 256 MiB
        spool.add("worker-0", "out", number * len(line), line)
    spool.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("worker-0.log*")}
    assert sizes["worker-0.log.16777216"] == 16 << 20
    assert sum(sizes.values()) <= 1 << 27


def test_the_log_of_a_rotated_task_is_continued_where_it_stood(tmp_path: Path) -> None:
    first = Writing(tmp_path, limit=100)
    for number in range(30):
        first.turn(("worker-0", "out", b"%09d\n" % number))
    first.spool.close()
    again = Spool(tmp_path, 100)
    assert again.add("worker-0", "out", 0, b"x", attempt=1).at == 300


def chunks_of(rng: random.Random) -> list[list[Chunk]]:
    """Some turns of random output."""
    turns = []
    for _ in range(rng.randint(1, 60)):
        turn = []
        for _ in range(rng.randint(1, 6)):
            task, stream = f"worker-{rng.randrange(3)}", rng.choice(["out", "err"])
            turn.append((task, stream, rng.randbytes(rng.choice([1, 5, 80, 700]))))
        turns.append(turn)
    return turns


@pytest.mark.parametrize("seed", range(60))
def test_whatever_comes_is_given_again_as_it_came(seed: int, tmp_path: Path, open_reader: Open) -> None:
    """Readers begin and go on at any time, with any limit; the index is rotated, writers are replaced."""
    rng = random.Random(seed)
    writing = Writing(tmp_path)
    reader, cursor, pieces = open_reader(tmp_path), 0, []
    for turn in chunks_of(rng):
        writing.turn(*turn)
        if rng.random() < 0.4:
            found = reader.read(cursor, rng.choice([1, 10, 1000]))
            assert not found.gap
            pieces += found.pieces
            cursor = found.cursor
        if rng.random() < 0.2:
            reader.close()
        if rng.random() < 0.1:
            writing.spool.close()
            writing.spool = Spool(tmp_path, 0, writing.clock)
            writing.offsets = {}
    writing.spool.close()
    more, cursor, gap = everything(reader, cursor, rng.choice([997, 1 << 20]))
    assert gap == 0
    assert read_as_chunks(pieces + more) == joined(writing.chunks)
    assert cursor == sum(len(data) for _, _, data in writing.chunks)
    assert not list(reader.rest(["worker-0", "worker-1", "worker-2"]))


@pytest.mark.parametrize("seed", range(60))
def test_with_rotation_everything_is_given_or_counted(
    seed: int, tmp_path: Path, open_reader: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distrun_runtime.coordinator.logs.INDEX_BYTES", 10 * SIZE)
    rng = random.Random(seed)
    writing = Writing(tmp_path, limit=2000)
    reader, cursor, pieces, gaps = open_reader(tmp_path), 0, [], 0
    places: dict[tuple[str, int], int] = {}
    ends: dict[str, int] = {}
    for turn in chunks_of(rng):
        writing.turn(*turn)
        for task, _, data in turn:
            for byte in data:
                places[task, ends.get(task, 0)] = byte
                ends[task] = ends.get(task, 0) + 1
        if rng.random() < 0.3:
            found = reader.read(cursor, rng.choice([10, 1000, 100_000]))
            pieces += found.pieces
            gaps += found.gap
            cursor = found.cursor
    writing.spool.close()
    more, cursor, gap = everything(reader, cursor)
    pieces += more
    total = sum(len(data) for _, _, data in writing.chunks)
    assert cursor == total
    assert sum(len(piece.data) for piece in pieces) + gaps + gap == total
    for piece in pieces:
        assert list(piece.data) == [places[piece.task, piece.at + number] for number in range(len(piece.data))]
    cursors = [piece.cursor for piece in pieces]
    assert cursors == sorted(cursors)
    assert len(list(tmp_path.glob("index*"))) <= 2


def test_a_record_is_read_as_it_was_written() -> None:
    entry = IndexEntry(1700000000.5, "worker-12", "err", 3, 10**12, 77, 10**13)
    assert decode(encode(entry)) == entry
    assert len(encode(entry)) == SIZE
    with pytest.raises(ValueError, match="at most 20 bytes"):
        encode(entry._replace(task="x" * 21))


def test_a_long_piece_is_several_records(tmp_path: Path, open_reader: Open) -> None:
    writing = Writing(tmp_path)
    writing.turn(("worker-0", "out", b"x" * (logs.PIECE_LIMIT * 2 + 5)))
    assert (tmp_path / "index").stat().st_size == 3 * SIZE
    assert sum(len(piece.data) for piece in everything(open_reader(tmp_path))[0]) == logs.PIECE_LIMIT * 2 + 5


def test_a_client_that_came_while_the_job_waited_in_a_queue_gets_its_output(tmp_path: Path) -> None:
    folder = JobFolder.submit(tmp_path, {"name": "", "launcher": "slurm", "command": ["true"], "cwd": "/"})
    output = LoggedOutput(folder, OutputWanted())
    assert output.read(100) == b""
    folder.start(sample_plan())
    writing = Writing(folder.logs)
    writing.turn(("worker-1", "out", b"hello\n"))
    assert b'"host":"d1"' in output.read(100).replace(b" ", b"")
    output.close()


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (OutputWanted(0, tasks=("worker-0",)), [b"a1\n", b"a2\n"]),
        (OutputWanted(tail=1, tasks=("worker-0",)), [b"a2\n"]),
        (OutputWanted(tail=1, since=0.0), [b"b3\n"]),
        (OutputWanted(tail=9), [b"a1\n", b"b1\n", b"a2\n", b"b2\n", b"b3\n"]),
        (OutputWanted(since=0.0, tasks=("worker-1",)), [b"b1\n", b"b2\n", b"b3\n"]),
    ],
)
def test_a_client_gets_the_output_of_the_tasks_that_it_names_from_where_it_says(
    wanted: OutputWanted, texts: list[bytes], tmp_path: Path
) -> None:
    folder = JobFolder.submit(tmp_path, {"name": "", "launcher": "slurm", "command": ["true"], "cwd": "/"})
    folder.start(sample_plan())
    writing = Writing(folder.logs)
    for task, text in (("0", b"a1\n"), ("1", b"b1\n"), ("0", b"a2\n"), ("1", b"b2\n"), ("1", b"b3\n")):
        writing.turn(("worker-" + task, "out", text))
    output = LoggedOutput(folder, wanted)
    frames = session.Decoder().feed(output.read(1000))
    output.close()
    assert [frame.body for frame in frames] == texts
    assert all(frame.header["time"] > 0 and frame.header["attempt"] >= 0 for frame in frames)


@pytest.mark.parametrize("limit", [1, 3, 1000])
@pytest.mark.parametrize("tasks", [None, ("worker-1",)])
def test_output_until_now_ends_with_what_there_was_when_it_was_asked_for(
    tasks: tuple[str, ...] | None, limit: int, tmp_path: Path
) -> None:
    folder = JobFolder.submit(tmp_path, {"name": "", "launcher": "slurm", "command": ["true"], "cwd": "/"})
    folder.start(sample_plan())
    writing = Writing(folder.logs)
    writing.turn(("worker-1", "out", b"one\n"), ("worker-0", "out", b"of another\n"))
    output = LoggedOutput(folder, OutputWanted(0, tasks=tasks, until="now"))
    writing.turn(("worker-1", "out", b"too late\n"))
    found = b""
    while not output.is_over:
        found += output.read(limit)
    output.close()
    *pieces, end = session.Decoder().feed(found)
    assert b"".join(frame.body for frame in pieces) == (b"one\n" if tasks else b"one\nof another\n")
    assert end.header == {"type": "output_end", "cursor": 15}


def test_one_read_for_a_client_looks_at_a_bounded_part_of_a_long_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logreader, "_SCAN", 10)
    folder = JobFolder.submit(tmp_path, {"name": "", "launcher": "slurm", "command": ["true"], "cwd": "/"})
    folder.start(sample_plan())
    writing = Writing(folder.logs)
    for _ in range(50):
        writing.turn(("worker-1", "out", b"of another\n"))
    writing.turn(("worker-0", "out", b"mine\n"))
    output = LoggedOutput(folder, OutputWanted(0, tasks=("worker-0",)))
    found = [output.read(1000)]
    while output.has_more:
        found.append(output.read(1000))
    output.close()
    assert [bool(each) for each in found[:6]] == [False] * 5 + [True]
    assert [frame.body for frame in session.Decoder().feed(b"".join(found))] == [b"mine\n"]
