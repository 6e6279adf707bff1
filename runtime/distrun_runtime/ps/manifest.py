"""What a manifest of saved states may say (docs/states.md): looked at as a whole before anybody acts on it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from distrun_runtime.arrays import dtypes
from distrun_runtime.errors import KVError
from distrun_runtime.ops.optimizers import RuleSpec

__all__ = ["against"]

_MOST = 2**63 - 1
"""What a number of rounds or of elements is at most: it has to fit into a message."""
_STYPES = ("default", "row_sparse")


def against(manifest: Mapping[str, Any]) -> str:
    """Return what is wrong with a manifest: member, what was expected, what was found; empty: nothing."""
    for member, (is_right, expected) in _MEMBERS.items():
        if member not in manifest:
            return "it has no member %r" % member
        if not is_right(manifest[member]):
            return "%s: expected %s, found %.80r" % (member, expected, manifest[member])
    numbers = [each["number"] for each in manifest["keys"]]
    keys = [(type(each["key"]), each["key"]) for each in manifest["keys"]]
    if len(set(numbers)) < len(numbers) or len(set(keys)) < len(keys):
        return "keys: a key or number is there twice"
    for name, holds in manifest["files"].items():
        wrong = _against_file(holds)
        if wrong:
            return "files: %s: %s" % (name, wrong)
    if manifest["rule"] is not None:
        try:
            RuleSpec.from_json(manifest["rule"])
        except KVError as err:
            return "rule: %s" % err
    return ""


def _against_file(holds: Mapping[str, Any]) -> str:
    for member, (is_right, expected) in _HOLDS.items():
        if member in holds and not is_right(holds[member]):
            return "%s: expected %s, found %.80r" % (member, expected, holds[member])
    for piece, counters in holds.get("counters", {}).items():
        for name, value in counters.items():
            if name == "updates" and not _is_whole(value):
                return "counters of %s: updates=%.80r: expected a whole number, at least 0" % (piece, value)
    return ""


def _is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _is_key(value: object) -> bool:
    return (
        isinstance(value, dict)
        and (isinstance(value.get("key"), str) or _is_whole(value.get("key"), -_MOST - 1))
        and _is_whole(value.get("number"))
        and _is_whole(value.get("index"), -_MOST - 1)
        and _is_list(value.get("shape"), _is_whole)
        and value.get("dtype") in dtypes.NAMES
        and value.get("stype") in _STYPES
    )


def _is_list(value: object, is_right: Callable[[Any], bool], length: int | None = None) -> bool:
    """Whether it is a list of such items; a tuple will be one in the file."""
    return isinstance(value, (list, tuple)) and (length is None or len(value) == length) and all(map(is_right, value))


def _is_dict(value: object, is_right: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) and is_right(each) for name, each in value.items())


def _lists_of(length: int) -> Callable[[object], bool]:
    return lambda value: _is_list(value, lambda each: _is_list(each, _is_whole, length))


_Form = tuple[Callable[[object], bool], str]
"""Whether a value is right, and what is, in words."""

_MEMBERS: dict[str, _Form] = {
    "type": (lambda value: isinstance(value, str), "a type of store"),
    "keys": (lambda value: _is_list(value, _is_key), "a list of keys with number, shape, dtype, stype and index"),
    "rule": (lambda value: value is None or isinstance(value, dict), "a rule or null"),
    "workers": (lambda value: _is_whole(value, 1), "a whole number, at least 1"),
    "servers": (lambda value: _is_whole(value, 1), "a whole number, at least 1"),
    "rounds": (_lists_of(2), "pairs of whole numbers, at least 0"),
    "files": (lambda value: _is_dict(value, lambda holds: isinstance(holds, dict)), "names of files, each with facts"),
}

_HOLDS: dict[str, _Form] = {
    "bytes": (_is_whole, "a whole number, at least 0"),
    "bfloat16": (lambda value: _is_list(value, lambda name: isinstance(name, str)), "a list of names"),
    "pieces": (_lists_of(3), "lists of key number, offset and length"),
    "counters": (
        lambda value: _is_dict(value, lambda names: _is_dict(names, _is_plain)),
        "for each piece names with a number, text or null",
    ),
}
