"""What `distrun logs --merge` makes of the pieces of a job's output."""

from __future__ import annotations

import json
import random
import re

import pytest

from distrun.cli.logs import Replay, Style
from distrun.cli.screen import Feed, in_order, prefix
from distrun_runtime.coordinator.logreader import LogPiece

HOSTS = {"worker-0": "d1", "worker-1": "d2", "worker-10": "d2"}


def piece(time: float, task: str, stream: str, data: bytes, at: int = 0, attempt: int = 0) -> LogPiece:
    return LogPiece(0, time, task, stream, attempt, at, data)


def printed(replay: Replay, *pieces: LogPiece) -> bytes:
    parts = [part for each in pieces for part in replay.add(each)]
    return b"".join(parts + replay.flush())


def test_lines_have_the_prefix_of_their_task_and_come_when_they_end() -> None:
    pieces = [
        piece(1.0, "worker-0", "out", b"be"),
        piece(1.0, "worker-1", "out", b"one\n"),
        piece(1.1, "worker-0", "err", b"err\n", 2),
        piece(5.0, "worker-0", "out", b"gin\nrest", 6),
    ]
    assert printed(Replay(Style(HOSTS)), *pieces) == (
        b"worker-1@d2 | one\nworker-0@d1 | err\nworker-0@d1 | begin\nworker-0@d1 | rest\n"
    )


@pytest.mark.parametrize("seed", range(40))
def test_what_is_printed_is_what_the_console_prints_from_the_same_pieces(seed: int) -> None:
    """Lines, partial lines and bars of several tasks, against a feed for each task by the same clock."""
    rng = random.Random(seed)
    texts = [
        b"a line\n",
        b"par",
        b"tial",
        b"\n",
        b"\r 10%",
        b"\r 50% of it",
        b"\rdone\n",
        b"x\r\n",
        b"\x1b[31mred\x1b[0m\n",
    ]
    replay, feeds, ends = Replay(Style(HOSTS)), dict[tuple[str, str], Feed](), dict[str, int]()
    found, expected, now = b"", b"", 0.0
    for _ in range(300):
        until = now + rng.choice([0.0, 0.01, 0.3, 2.0])
        while True:  # the console looks again when something is due
            waits = [wait_s for feed in feeds.values() if (wait_s := feed.wait_s(now)) is not None]
            if not waits or now + min(waits) > until:
                break
            now = now + min(waits) + 1e-6
            expected += b"".join(feed.due(now) for feed in feeds.values())
        now = max(now, until)
        task, stream = rng.choice(list(HOSTS)), "out"
        data = rng.choice(texts)
        before = prefix(task, HOSTS[task])
        expected += feeds.setdefault((task, stream), Feed(before)).feed(data, now)
        found += b"".join(replay.add(piece(now, task, stream, data, ends.get(task, 0))))
        ends[task] = ends.get(task, 0) + len(data)
    for key in sorted(feeds, key=lambda key: in_order(*key)):
        expected += feeds[key].flush()
    found += b"".join(replay.flush())
    assert sorted(found.splitlines()) == sorted(expected.splitlines())
    for mark in [prefix(task, host) for task, host in HOSTS.items()]:
        own = [[line for line in text.splitlines() if line.startswith(mark)] for text in (found, expected)]
        assert own[0] == own[1]


def test_lines_without_bars_are_printed_in_the_very_same_order_whatever_the_times() -> None:
    rng = random.Random(5)
    replay, feeds, ends = Replay(Style(HOSTS)), dict[tuple[str, str], Feed](), dict[str, int]()
    found, expected = b"", b""
    for number in range(2000):
        task, stream = rng.choice(list(HOSTS)), rng.choice(["out", "err"])
        data = rng.choice([b"line %d\n" % number, b"part", b"%d\nand\n" % number])
        expected += feeds.setdefault((task, stream), Feed(prefix(task, HOSTS[task]))).feed(data, 0.0)
        found += b"".join(replay.add(piece(number * rng.random(), task, stream, data, ends.get(task, 0))))
        ends[task] = ends.get(task, 0) + len(data)
    assert found == expected


def test_a_bar_is_a_line_once_a_second_of_the_recorded_time() -> None:
    replay = Replay(Style(HOSTS))
    pieces, at = [], 0
    for step in range(100):
        data = b"\r step %02d" % step
        pieces.append(piece(1000 + step / 10, "worker-0", "err", data, at))
        at += len(data)
    lines = printed(replay, *pieces).splitlines()
    assert 9 <= len(lines) <= 12
    assert lines[-1] == b"worker-0@d1 |  step 99"


def test_only_lines_in_which_the_expression_is_found() -> None:
    style = Style(HOSTS, pattern=re.compile(b"^lo+ss=\xff"))
    pieces = [
        piece(1.0, "worker-0", "out", b"loss=\xff 1\nworker\nlooss=\xff"),
        piece(1.0, "worker-1", "out", b"x loss=\xff\n"),
    ]
    assert printed(Replay(style), *pieces) == b"worker-0@d1 | loss=\xff 1\nworker-0@d1 | looss=\xff\n"
    alone = Style(HOSTS, prefixed=False, pattern=re.compile(b"^lo+ss"))
    assert printed(Replay(alone), pieces[0]) == b"loss=\xff 1\nlooss=\xff\n"


def test_json_has_an_object_for_each_line() -> None:
    pieces = [
        piece(1700000000.5, "worker-0", "out", b"caf\xc3\xa9 \xff\r\nlast", attempt=2),
        piece(1700000001.0, "worker-1", "", b"\x1b[31mred\n"),
        piece(1700000001.0, "worker-1", "note", b"\n[distrun: 5 bytes are missing here: full]\n", 9),
    ]
    lines = [json.loads(line) for line in printed(Replay(Style(HOSTS, as_json=True)), *pieces).splitlines()]
    assert lines[0] == {
        "schema": "distrun.log/1",
        "time": "2023-11-14T22:13:20.500Z",
        "task": "worker-0",
        "host": "d1",
        "stream": "out",
        "attempt": 2,
        "text": "caf\xe9 \ufffd",
    }
    assert [(line["task"], line["stream"], line["time"] is None, line["text"]) for line in lines[1:]] == [
        ("worker-1", None, True, "\x1b[31mred"),
        ("worker-1", "note", False, "[distrun: 5 bytes are missing here: full]"),
        ("worker-0", "out", False, "last"),
    ]


def test_what_is_gone_is_said_once_before_what_is_left() -> None:
    pieces = [
        piece(1.0, "worker-0", "out", b"a\n", 12_897_485),
        piece(1.0, "worker-0", "out", b"b\n", 12_897_487),
        piece(2.0, "worker-1", "out", b"c\n", 0),
        piece(2.0, "worker-0", "out", b"d\n", 12_899_489),
    ]
    assert printed(Replay(Style(HOSTS)), *pieces).decode().splitlines() == [
        "worker-0@d1 | [distrun: 12.3 MiB before this are gone: --log-limit]",
        "worker-0@d1 | a",
        "worker-0@d1 | b",
        "worker-1@d2 | c",
        "worker-0@d1 | [distrun: 2.0 KiB before this are gone: --log-limit]",
        "worker-0@d1 | d",
    ]
    assert b"gone" not in printed(Replay(Style(HOSTS), from_start=False), *pieces[:3])


def test_without_prefixes_bytes_are_unchanged() -> None:
    style = Style(HOSTS, prefixed=False)
    pieces = [piece(1.0, "worker-0", "out", b"a\r\xff b"), piece(2.0, "worker-0", "err", b"c\n\x1b[2J", 5)]
    assert printed(Replay(style), *pieces) == b"a\r\xff bc\n\x1b[2J"
