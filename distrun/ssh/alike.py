"""Asks `ssh -G` once for hosts that the user's ssh configuration does not tell apart.

A run of the program takes 5 ms of processor time, a quarter of all that a connection costs here. What it says of a host
follows from the host's name and from the patterns of `Host` lines that match it. So of the hosts that match the same
patterns two are asked for. If their answers differ in nothing but the name, those of the others are made from them.
Where a configuration decides in any other way (`Match`, CanonicalizeHostname), every host is asked for.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from distrun.ssh.target import Target

Answer = dict[str, list[str]]
"""What `ssh -G` says of a host: keywords in lower case, each with the values of its lines."""

NAMED = ("host", "hostname")
"""Keywords whose value is the host's name, unless the configuration says otherwise."""
UNUSED = ("controlpath",)
"""Keywords that may hold the name in other forms, and that nothing here reads."""
FEW = 4
"""So many hosts are asked for at once; it is not worth comparing them."""
_READ = re.compile(r"^debug1: Reading configuration data (.+)$", re.MULTILINE)
_LINE = re.compile(r"\s*(host|match)(?:\s*=\s*|\s+)(.*)", re.IGNORECASE)


class Alike:
    """What `ssh -G` says of the hosts of a launch. Of any thread's use."""

    def __init__(self, ask: Callable[[Target], Answer], read: Callable[[Target], str], few: int = FEW) -> None:
        """
        Args:
            ask: returns the program's answer for a target, or raises SshFailure.
            read: returns what the program says, with -v, while it reads the configuration for a target.
            few: so many are asked for in any case.
        """
        self._ask = ask
        self._read = read
        self._few = few
        self._lock = threading.Lock()
        self._patterns: dict[str, Patterns | None] = {}
        """By configuration file (ssh -F)."""
        self._groups: dict[tuple[Target, tuple[bool, ...]], _Group] = {}

    def options(self, target: Target) -> Answer:
        """Return the program's answer for a target. Waits for the program, at most three times.

        Raises:
            SshFailure: the configuration cannot be used.
        """
        group = self._group(target)
        return self._ask(target) if group is None else group.options(target)

    def _group(self, target: Target) -> _Group | None:
        if target.host != target.host.lower():
            return None
        with self._lock:
            if self._few:
                self._few -= 1
                return None
            if target.config not in self._patterns:
                self._patterns[target.config] = patterns(self._read(target))
            found = self._patterns[target.config]
            if found is None:
                return None
            key = (dataclasses.replace(target, host="", python=""), matches(found, target.host))
            return self._groups.setdefault(key, _Group(self._ask))


class _Group:
    """Hosts that match the same patterns."""

    def __init__(self, ask: Callable[[Target], Answer]) -> None:
        self._ask = ask
        self._lock = threading.Lock()
        self._first: tuple[str, Answer] | None = None
        self._is_alike: bool | None = None
        """None: not known before a second host was asked for."""

    def options(self, target: Target) -> Answer:
        with self._lock:
            if self._is_alike is None:
                return self._compare(target)
        if self._is_alike and self._first is not None:
            return renamed(*self._first, target.host)
        return self._ask(target)

    def _compare(self, target: Target) -> Answer:
        answer = self._ask(target)
        if self._first is None:
            self._first = (target.host, answer)
        elif target.host != self._first[0]:
            expected = renamed(*self._first, target.host)
            self._is_alike = expected == _used(answer) and _only_by_name(answer)
        return answer


Patterns = Sequence[re.Pattern[str]]


def patterns(said: str) -> Patterns | None:
    """Return the patterns of all `Host` lines of the files that `ssh -v -G` says it has read.

    None: there is more to it than such lines, or nobody knows which files count.
    """
    found: list[re.Pattern[str]] = []
    paths = _READ.findall(said)
    try:
        texts = [Path(path.strip()).read_text(encoding="utf-8", errors="surrogateescape") for path in paths]
    except OSError:
        return None
    for line in "\n".join(texts).splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        if match[1].lower() == "match":
            return None
        found += [_pattern(word) for word in match[2].replace('"', " ").split()]
    return found if texts else None


def _pattern(word: str) -> re.Pattern[str]:
    letters = {"*": ".*", "?": "."}
    return re.compile("".join(letters.get(each) or re.escape(each) for each in word.lstrip("!")), re.DOTALL)


def matches(found: Patterns, host: str) -> tuple[bool, ...]:
    """Return which patterns match a host's name. Pure."""
    return tuple(each.fullmatch(host) is not None for each in found)


def renamed(name: str, answer: Answer, host: str) -> Answer:
    """Return the answer for the host `name` as it is for another one that is alike. Pure."""
    return {
        key: [host if key in NAMED and value == name else value for value in values]
        for key, values in _used(answer).items()
    }


def _used(answer: Answer) -> Answer:
    return {key: values for key, values in answer.items() if key not in UNUSED}


def _only_by_name(answer: Answer) -> bool:
    """Return whether the answer needed no look at the network."""
    return all(value.lower() in ("no", "none", "false") for value in answer.get("canonicalizehostname", ()))
