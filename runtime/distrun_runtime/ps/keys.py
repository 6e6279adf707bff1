"""The keys of one store, as all workers declared them: records, numbers and places. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distrun_runtime.ps.collective import describe

Record = Mapping[str, Any]
"""What a worker declares of a key: key, shape, dtype, stype, codec."""


@dataclass(frozen=True)
class _Known:
    record: Record
    number: int
    place: int


class Keys:
    """The declared keys of one store."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._numbers = 0
        self._texts = 0

    def against(self, records: Sequence[Record], is_assign: bool) -> str:
        """Return why these records cannot be declared, or given other values (`is_assign`); empty: they can.

        Raises:
            ValueError: these are not records.
        """
        _check(records)
        for record in records:
            known = self._known.get(_text(record["key"]))
            if known is None:
                if is_assign:
                    return "key %r doesn't exist. Did you init?" % record["key"]
            elif not is_assign:
                return "key %r was initialised before" % record["key"]
            elif any(known.record.get(name) != record.get(name) for name in ("shape", "dtype")):
                return "key %r: the store has %s, assign was given %s" % (
                    *(record["key"], describe(known.record), describe(record)),
                )
        return ""

    def declare(self, records: Sequence[Record]) -> dict[str, Any]:
        """Number new keys and return what their workers are told: `keys`, and for each its number and place.

        A key that is an int places itself, a text by its position.
        """
        for record in records:
            is_text = isinstance(record["key"], str)
            place = self._texts if is_text else int(record["key"])
            self._texts += is_text
            self._known[_text(record["key"])] = _Known(record, self._numbers, place)
            self._numbers += 1
        return self.told(records)

    def told(self, records: Sequence[Record]) -> dict[str, Any]:
        """Return what workers are told of these keys."""
        known = [self._known[_text(record["key"])] for record in records]
        return {
            "keys": [record["key"] for record in records],
            "numbers": [[each.number, each.place] for each in known],
        }

    def take_back(self, keys: Sequence[Any]) -> None:
        """Forget keys whose first values did not reach all servers.

        Their numbers are not given again: a server may hold pieces under them.
        """
        for key in keys:
            self._known.pop(_text(key), None)

    @property
    def names(self) -> list[list[Any]]:
        """(number, key) of every key, in the order of their declaration."""
        return [[known.number, known.record["key"]] for known in self._known.values()]

    def to_json(self) -> list[dict[str, Any]]:
        """Return all records with number and place, for a manifest."""
        shown = ("key", "shape", "dtype", "stype")
        return [
            {
                **{"stype": "default"},
                **{name: known.record[name] for name in shown if name in known.record},
                **{"number": known.number, "index": known.place},
            }
            for known in self._known.values()
        ]

    def differ_from(self, saved: Sequence[Mapping[str, Any]]) -> str:
        """Return how the keys of saved states differ from these; empty: they do not."""
        by_key = {_text(each["key"]): each for each in saved}
        mine = {_text(each["key"]): each for each in self.to_json()}
        for text in [*mine, *by_key]:
            ours, theirs = mine.get(text), by_key.get(text)
            if theirs is None:
                return "key %r of the store is not in the saved states" % (ours or {})["key"]
            if ours is None:
                return "key %r is in the saved states and not in the store: init it before" % theirs["key"]
            if any(ours[name] != theirs[name] for name in ("shape", "dtype", "stype")):
                return "key %r: the store has %s, the saved states have %s" % (
                    *(ours["key"], describe(ours), describe(theirs)),
                )
        return ""

    def saved_as(self, saved: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, Any]]:
        """Return (number, number in the saved states, key) of every key; they do not differ."""
        numbers = {_text(each["key"]): int(each["number"]) for each in saved}
        return [(each.number, numbers[text], each.record["key"]) for text, each in self._known.items()]


def _text(key: Any) -> str:
    return "%s:%s" % (type(key).__name__, key)


def _check(records: Sequence[Record]) -> None:
    """Refuse what a worker sent in the place of records, before anything of it is kept."""
    if not isinstance(records, list):
        raise ValueError("expected a list of records, found %.80r" % (records,))
    for record in records:
        if not isinstance(record, dict) or not all(_FITS[name](record.get(name)) for name in _FITS):
            raise ValueError("expected a record with key, shape and dtype, found %.200r" % (record,))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "key": lambda value: isinstance(value, str) or _is_whole(value),
    "shape": lambda value: isinstance(value, list) and all(_is_whole(size) and size >= 0 for size in value),
    "dtype": lambda value: isinstance(value, str),
    "stype": lambda value: value is None or isinstance(value, str),
}
"""What the members of a record must be."""
