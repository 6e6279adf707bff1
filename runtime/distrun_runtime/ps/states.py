"""Saved states of a store: what a server writes of its slots, and how it gets them back from any number of files.

Reading has two phases. `stage` reads and checks all that this server's slots need, makes the rule's states of it, and
puts it beside them; `commit` puts it in their places; `drop` forgets it. What can fail, fails in `stage`: so a torn
file, or a user's rule that dislikes a value, changes nothing on any server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from distrun_runtime.arrays.dtypes import Array, name_of
from distrun_runtime.errors import KVError
from distrun_runtime.ops import optimizers as rules
from distrun_runtime.ps import statefile
from distrun_runtime.ps.shelf import Shelf
from distrun_runtime.ps.statefile import StateFile
from distrun_runtime.ps.work import SlotId

Shelves = Mapping[SlotId, Shelf]

_CACHE = 16
"""Arrays that are kept while neighbouring slots read them."""


@dataclass
class Staged:
    """What was read for one slot."""

    weight: Array
    parts: list[tuple[int, int, dict[str, Array]]] = field(default_factory=list)
    """(Begin, end) within the slot to the state arrays of those elements; a part that was never updated has none."""
    counters: dict[str, Any] = field(default_factory=dict)
    residual: Array | None = None
    state: dict[str, Any] | None = None
    """What the rule makes of parts and counters, which are empty then."""


def save(body: Mapping[str, Any], shelves: Shelves) -> dict[str, Any]:
    """Write the shelves of one store and return what the manifest says of them.

    Arguments:
        body: folder, part, `names` ([number, key] of each key), file, host.

    Raises:
        KVError: the file cannot be written, or a rule's state has something else than arrays and numbers.
    """
    names = {int(number): key for number, key in body["names"]}
    arrays: dict[str, Array] = {}
    counters: dict[str, dict[str, Any]] = {}
    pieces = []
    for slot in sorted(slot for slot in shelves if slot.key in names):
        shelf = shelves[slot]
        prefix = "%d.%d" % (slot.key, slot.offset)
        pieces.append([slot.key, slot.offset, len(shelf.weight)])
        arrays[prefix + ".weight"] = shelf.weight
        if shelf.residual is not None:
            arrays[prefix + ".residual"] = shelf.residual
        for name, value in (shelf.state or {}).items():
            if isinstance(value, np.ndarray) and value.dtype != object:
                arrays["%s.state.%s" % (prefix, name)] = value
            else:
                counters.setdefault(prefix, {})[name] = _counter(names[slot.key], name, value)
    facts = statefile.write(body["folder"], body["part"], body["file"], arrays, body["host"])
    return {"file": body["file"], "holds": {**facts, "pieces": pieces, "counters": counters}}


def _counter(key: object, name: str, value: object) -> object:
    plain = value.item() if isinstance(value, np.generic) else value
    if plain is None or isinstance(plain, (bool, int, float, str)):
        return plain
    raise KVError(
        "key %r: the rule's state %r is of type %s, which cannot be saved; arrays and numbers can"
        % (key, name, type(value).__name__)
    )


def stage(body: Mapping[str, Any], shelves: Shelves, rule: rules.Rule | None = None) -> None:
    """Read what was saved of the shelves of one store, and put it beside them.

    Arguments:
        body: folder, host, manifest, and `numbers`: [number, number in the manifest, key] of each key.
        rule: the one whose states they will be.

    Raises:
        KVError: a file is missing, torn, or of another save; it does not fit the slots: names file, key and host.
    """
    drop(shelves)
    with _Source(body) as source:
        numbers = {int(number): (int(saved), key) for number, saved, key in body["numbers"]}
        staged = {
            slot: source.read(*numbers[slot.key], slot.offset, shelves[slot].weight)
            for slot in sorted(shelves)
            if slot.key in numbers
        }
    keys = {int(number): key for number, _, key in body["numbers"]}
    for slot, one in staged.items():
        try:
            one.state = _state(one, rule)
        except _Unlike as err:
            raise KVError("key %r of the states in %s: %s" % (keys[slot.key], body["folder"], err)) from None
        one.parts, one.counters = [], {}
    for slot, one in staged.items():
        shelves[slot].staged = one


def commit(shelves: Shelves) -> None:
    """Put what was staged in its place."""
    for shelf in shelves.values():
        if shelf.staged is not None:
            staged, shelf.staged = shelf.staged, None
            shelf.put(staged.weight)
            shelf.sums.clear()
            shelf.residual = staged.residual
            shelf.state = staged.state


def drop(shelves: Shelves) -> None:
    """Forget what was staged."""
    for shelf in shelves.values():
        shelf.staged = None


class _Unlike(ValueError):
    """What was saved is not of the kind that the rule has there."""


def _state(staged: Staged, rule: rules.Rule | None) -> dict[str, Any] | None:
    if rule is None or (not any(arrays for _, _, arrays in staged.parts) and not staged.counters):
        return None
    fresh = rule.new_state(staged.weight)
    names = {name for _, _, arrays in staged.parts for name in arrays}
    state: dict[str, Any] = dict(staged.counters)
    for name in names:
        like = next(arrays[name] for _, _, arrays in staged.parts if name in arrays)
        base = fresh.get(name)
        if isinstance(base, np.ndarray) and not np.can_cast(like.dtype, base.dtype, "same_kind"):
            raise _Unlike("the rule's state %r is %s, saved was %s" % (name, base.dtype, like.dtype))
        whole = np.array(base) if isinstance(base, np.ndarray) else np.zeros(len(staged.weight), like.dtype)
        for begin, end, arrays in staged.parts:
            if name in arrays:
                whole.reshape(-1)[begin:end] = arrays[name]
        state[name] = whole
    for name, value in staged.counters.items():
        if isinstance(fresh.get(name), np.ndarray):
            raise _Unlike("the rule's state %r is an array, saved was %r" % (name, value))
    return dict(rules.carry_state(rule, staged.weight, state))


class _Piece(NamedTuple):
    """One saved piece of one key; pieces sort by their offsets."""

    offset: int
    length: int
    file: str
    prefix: str
    """What its arrays' names begin with."""


class _Source:
    """The files of one save, opened as they are needed."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._folder, self._host, manifest = str(body["folder"]), str(body["host"]), body["manifest"]
        self._part = str(manifest["data"])
        self._holds: Mapping[str, Mapping[str, Any]] = manifest["files"]
        self._pieces: dict[int, list[_Piece]] = {}
        for name, holds in self._holds.items():
            for number, offset, length in holds.get("pieces", ()):
                piece = _Piece(int(offset), int(length), name, "%d.%d" % (number, offset))
                self._pieces.setdefault(int(number), []).append(piece)
        self._files: dict[str, StateFile] = {}
        self._cache: dict[tuple[str, str], Array] = {}

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, number: int, key: object, offset: int, weight: Array) -> Staged:
        """Return what was saved of `len(weight)` elements of a key from `offset` on, from whatever pieces have it."""
        staged = Staged(np.empty_like(weight))
        at, end = offset, offset + len(weight)
        for piece in sorted(self._pieces.get(number, ())):
            if piece.offset <= at < min(end, piece.offset + piece.length):
                upto = min(end, piece.offset + piece.length)
                self._take(staged, piece, slice(at - offset, upto - offset), at - piece.offset, key)
                at = upto
        if at < end:
            raise KVError(
                "key %r: elements %d to %d are in none of the files of %s/%s on host %s"
                % (key, at, end - 1, self._folder, self._part, self._host)
            )
        return staged

    def _take(self, staged: Staged, piece: _Piece, target: slice, begin: int, key: object) -> None:
        """Copy elements of one saved piece, from its element `begin` on, to their place in a slot."""
        source = slice(begin, begin + target.stop - target.start)
        saved = self._elements(piece, "weight", key)
        if saved.dtype != staged.weight.dtype:
            words = (key, name_of(saved.dtype), name_of(staged.weight.dtype))
            raise self._file(piece.file).wrong("has key %r as %s; expected %s" % words)
        staged.weight[target] = saved[source]
        arrays: dict[str, Array] = {}
        for member in self._file(piece.file).members(piece.prefix):
            kind, _, name = member.partition(".")
            if kind == "state":
                arrays[name] = self._elements(piece, member, key)[source]
            elif kind == "residual":
                if staged.residual is None:
                    staged.residual = np.zeros(len(staged.weight), np.float32)
                staged.residual[target] = self._elements(piece, member, key)[source]
        staged.parts.append((target.start, target.stop, arrays))
        for name, value in self._holds[piece.file].get("counters", {}).get(piece.prefix, {}).items():
            known = staged.counters.get(name)
            staged.counters[name] = max(known, value) if isinstance(known, (int, float)) else value

    def _elements(self, piece: _Piece, member: str, key: object) -> Array:
        """Return one array of a piece, flat."""
        found = self._array(piece.file, "%s.%s" % (piece.prefix, member)).reshape(-1)
        if len(found) != piece.length:
            words = (key, len(found), member, piece.length)
            raise self._file(piece.file).wrong("has for key %r %d elements of its %s; expected %d" % words)
        return found

    def _file(self, name: str) -> StateFile:
        if name not in self._files:
            self._files[name] = StateFile(self._folder, self._part, name, self._holds[name], self._host)
        return self._files[name]

    def _array(self, name: str, member: str) -> Array:
        if (name, member) not in self._cache:
            if len(self._cache) >= _CACHE:
                self._cache.clear()
            self._cache[name, member] = self._file(name).array(member)
        return self._cache[name, member]
