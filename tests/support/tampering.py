"""Damages the files of a job's folder at random: types, nesting, truncation, bytes, numbers, what is there at all."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEEP = 100_000
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**31,
        2**63,
        2**64,
        -(2**64),
        10**400,
        0.5,
        -0.5,
        1e308,
        float("inf"),
        float("nan"),
    ),
    *("", "x", "\0", "\ud800", "\udcff", "../../../etc/passwd", "a\nb", "\x1b[2J", "é" * 5000, "0" * 5000),
    *("2026-13-45T99:99:99.000Z", "0001-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "running", "lost", "local"),
    *([], {}, [None], [[]], {"a": None}, [1, "x", {}], {"": {}}, [{"name": 1}], "worker-0", "scheduler", "ssh"),
)
"""Values that take the place of others."""


def tamper(folder: Path, random_: random.Random) -> str:
    """Damage one file of a job's folder; return what was done."""
    weights = {
        **{"state.json": 8, "plan.json": 6, "launcher.json": 5, "outcome.json": 4, "kill.json": 1, "request.json": 2},
        **{"allocation.json": 2, "events.jsonl": 1, "reserve": 1, "logs": 2},
    }
    logs = [path for path in folder.glob("logs/*") if path.is_file()]
    path = folder / random_.choices(list(weights), weights=list(weights.values()))[0]
    if path.name == "logs" and logs and random_.random() < 0.7:
        path = random_.choice(logs)
    is_json = path.suffix == ".json" and path.is_file()
    ways = [*(_JSON_WAYS * 3 if is_json else ()), *_WAYS]
    way = random_.choice(ways)
    way(path, random_)
    return "%s of %s" % (way.__name__, path.name)


def _replaced_member(path: Path, random_: random.Random) -> None:
    _edit(path, random_, lambda parent, key: parent.__setitem__(key, random_.choice(ODD)))


def _removed_member(path: Path, random_: random.Random) -> None:
    _edit(path, random_, lambda parent, key: parent.__delitem__(key))


def _doubled_member(path: Path, random_: random.Random) -> None:
    def double(parent: Any, key: Any) -> None:
        if isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[str(key) + "x"] = parent[key]

    _edit(path, random_, double)


def _swapped_members(path: Path, random_: random.Random) -> None:
    def swap(parent: Any, key: Any) -> None:
        other = random_.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[key], parent[other] = parent[other], parent[key]

    _edit(path, random_, swap)


def _deep_member(path: Path, random_: random.Random) -> None:
    depth = random_.choice([10, 900, 1100, DEEP])
    opening, closing = random_.choice([("[", "]"), ('{"a":', "}")])
    deep = opening * depth + "1" + closing * depth
    mark = "@deep@"
    _edit(path, random_, lambda parent, key: parent.__setitem__(key, mark))
    path.write_bytes(path.read_bytes().replace(b'"%s"' % mark.encode(), deep.encode()))


def _whole_value(path: Path, random_: random.Random) -> None:
    path.write_text(json.dumps(random_.choice(ODD)))


def _edit(path: Path, random_: random.Random, act: Callable[[Any, Any], None]) -> None:
    """Act on a random member, however deep it is."""
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError, RecursionError):
        return  # it was damaged before
    here: Any = value
    while isinstance(here, (dict, list)) and here:
        key = random_.choice(list(here) if isinstance(here, dict) else range(len(here)))
        below = here[key]
        if not (isinstance(below, (dict, list)) and below) or random_.random() < 0.35:
            act(here, key)
            break
        here = below
    path.write_text(json.dumps(value))


def _cut(path: Path, random_: random.Random) -> None:
    data = _bytes(path)
    _put(path, data[: random_.randrange(len(data) + 1)])


def _flipped_bytes(path: Path, random_: random.Random) -> None:
    data = bytearray(_bytes(path) or b"{}")
    for _ in range(random_.randrange(1, 8)):
        data[random_.randrange(len(data))] = random_.randrange(256)
    _put(path, bytes(data))


def _binary(path: Path, random_: random.Random) -> None:
    _put(path, random_.randbytes(random_.choice([0, 1, 64, 5000])))


def _nothing(path: Path, random_: random.Random) -> None:
    _remove(path)


def _folder(path: Path, random_: random.Random) -> None:
    _remove(path)
    path.mkdir()


def _file(path: Path, random_: random.Random) -> None:
    _remove(path)
    path.write_text("x")


def _pipe(path: Path, random_: random.Random) -> None:
    _remove(path)
    os.mkfifo(path)


def _link_to_itself(path: Path, random_: random.Random) -> None:
    _remove(path)
    path.symlink_to(path.name)


def _of_another_job(path: Path, random_: random.Random) -> None:
    others = [each / path.name for each in path.parent.parent.iterdir() if (each / path.name).is_file()]
    if others:
        _put(path, random_.choice(others).read_bytes())


_JSON_WAYS = [
    _replaced_member,
    _replaced_member,
    _removed_member,
    _doubled_member,
    _swapped_members,
    _deep_member,
    _whole_value,
]
_WAYS = [_cut, _flipped_bytes, _binary, _nothing, _folder, _file, _pipe, _link_to_itself, _of_another_job]


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _put(path: Path, data: bytes) -> None:
    _remove(path)
    path.write_bytes(data)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()
