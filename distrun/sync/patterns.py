"""rsync's patterns as regular expressions, for hosts where no rsync matches them.

Where files go over the agents' channels, `--sync-delete` deletes on the host by what is said here. The copy itself is
listed by rsync (`tree.py`). The rules are those of "PATTERN MATCHING RULES" in rsync's manual and of its `exclude.c`;
tests compare them with the program. Patterns and paths are bytes, read as Latin-1: rsync's `?` is one byte.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from distrun_runtime.coordinator.frames import KeepRule

_EXCLUDE = "--exclude="
_PROTECT = "--filter=P "
_NOTHING = "(?!)"


def keep_rules(filters: Iterable[str]) -> list[KeepRule]:
    """Return which files of a host `--sync-delete` leaves alone, given rsync's filter options (`rules.filters`). Pure.

    What a pattern leaves out of the copy is kept. The first rule that fits decides, in rsync too.
    """
    found: list[KeepRule] = []
    for option in filters:
        if option.startswith(_PROTECT):
            found += _rules(option.removeprefix(_PROTECT), keeps=True)
            continue
        pattern, keeps = option.removeprefix(_EXCLUDE), True
        if pattern == "!":
            found.clear()
            continue
        if pattern.startswith(("+ ", "- ")):
            pattern, keeps = pattern[2:], pattern[0] == "-"
        found += _rules(pattern, keeps)
    return found


def _rules(word: str, keeps: bool) -> list[KeepRule]:
    pattern = os.fsencode(word).decode("latin-1")
    only_folders = len(pattern) > 1 and pattern.endswith("/")
    if only_folders:
        pattern = pattern[:-1]
    if not pattern:
        return []
    is_wild = any(character in pattern for character in "*?[")
    body = _translated(pattern.removeprefix("/")) if is_wild else re.escape(pattern.removeprefix("/"))
    # With a leading `**`, rsync sees the path with its first slash.
    starts = (("/", "/"), ("**", ""), ("", ".*/"))
    start = next(text for begin, text in starts if pattern.startswith(begin))
    rules = [KeepRule(start + body, only_folders, keeps)]
    if pattern.endswith("/***"):  # the folder itself, too
        rules.append(KeepRule(start + body.removesuffix("/.*"), True, keeps))
    return rules


def _translated(pattern: str) -> str:
    """Return the regular expression of a pattern with wildcards."""
    out, at = "", 0
    while at < len(pattern):
        character = pattern[at]
        at += 1
        if character == "*":
            stars = 1
            while pattern[at : at + 1] == "*":
                stars, at = stars + 1, at + 1
            out += ".*" if stars > 1 else "[^/]*"
        elif character == "?":
            out += "[^/]"
        elif character == "[":
            text, at = _class(pattern, at)
            if not text:
                return _NOTHING
            out += text
        elif character == "\\" and at < len(pattern):
            out += re.escape(pattern[at])
            at += 1
        else:
            out += re.escape(character)
    return out


_NAMED = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "blank": " \\t",
    "digit": "0-9",
    "lower": "a-z",
    "space": " \\t\\n\\r\\f\\v",
    "upper": "A-Z",
    "xdigit": "0-9A-Fa-f",
}


def _class(pattern: str, at: int) -> tuple[str, int]:
    """Return the regular expression of a `[...]` that begins at `at`, and where it ends; empty: it does not."""
    is_not = pattern[at : at + 1] in ("!", "^")
    at += is_not
    items: list[str] = []
    is_first = True
    while at < len(pattern) and (pattern[at] != "]" or is_first):
        is_first = False
        named = re.compile(r"\[:(\w+):\]").match(pattern, at)
        if named:
            if named[1] not in _NAMED:
                return "", at
            items.append(_NAMED[named[1]])
            at = named.end()
            continue
        low, at = _character(pattern, at)
        if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            high, at = _character(pattern, at + 1)
            if low <= high:
                items.append(f"{_in_class(low)}-{_in_class(high)}")
        else:
            items.append(_in_class(low))
    if at >= len(pattern):
        return "", at
    inside = "".join(items)
    if not inside:
        return ("[^/]" if is_not else _NOTHING), at + 1
    return f"(?!/)[{'^' if is_not else ''}{inside}]", at + 1


def _character(pattern: str, at: int) -> tuple[str, int]:
    if pattern[at] == "\\" and at + 1 < len(pattern):
        at += 1
    return pattern[at], at + 1


def _in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~|" else character
