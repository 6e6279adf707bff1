"""Lines that name the same host, and hosts that cannot be in one job. Pure.

A host that stands twice with the same attributes is one host: its slots add up, one where a line says nothing, and it
keeps both places in the order. With different ones it is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from distrun.hosts.findings import Fault, Finding
from distrun.hosts.spec import HostSpec, is_loopback, key_of


@dataclass(frozen=True)
class Entry:
    """Where a host is named."""

    source: str
    line: int
    column: int
    """From 1."""
    shown: str

    def finding(self, fault: Fault, at: int) -> Finding:
        """Return the fault of a piece of this line that begins at `at`, from 0."""
        return Finding(self.source, self.line, at + fault.at + 1, fault.code, fault.text, self.shown)

    def here(self, code: str, text: str) -> Finding:
        """Return an error at the host's name."""
        return Finding(self.source, self.line, self.column, code, text, self.shown)


class Merger:
    """Collects the hosts of a file line by line."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self._specs: dict[str, HostSpec] = {}
        self._first: dict[str, Entry] = {}
        self._errors: list[Finding] = []
        self._repeated: dict[str, Entry] = {}

    @property
    def specs(self) -> tuple[HostSpec, ...]:
        """Each host once."""
        return tuple(self._specs.values())

    @property
    def has_duplicates(self) -> bool:
        """Whether a host stood twice."""
        return bool(self._repeated)

    def add(self, spec: HostSpec, entry: Entry) -> None:
        """Take a host. A conflict is kept for `errors`."""
        key = key_of(spec.name)
        known = self._specs.get(key)
        if known is None:
            self._specs[key], self._first[key] = spec, entry
            self.order.append(spec.name)
            return
        for each in dataclasses.fields(HostSpec)[1:]:
            ours, theirs = getattr(known, each.name), getattr(spec, each.name)
            if each.name != "slots" and ours != theirs:
                difference = "%s (%s vs %s)" % (each.name, _shown(ours), _shown(theirs))
                text = "%r already listed on %s with different %s" % (spec.name, self._where(key, entry), difference)
                self._errors.append(entry.here("E108", text))
                return
        self._specs[key] = dataclasses.replace(known, slots=(known.slots or 1) + (spec.slots or 1))
        self._repeated[key] = entry
        self.order.append(known.name)

    def errors(self) -> list[Finding]:
        """Return what only all hosts together show."""
        return [*self._errors, *self._too_many_slots(), *self._unreachable()]

    def warnings(self) -> Sequence[Finding]:
        """Return a warning for each host that stood twice, at its last place."""
        return [
            entry.here(
                "W120",
                "duplicate host %r (%s): slots added, now %d"
                % (self._specs[key].name, self._where(key, entry).removeprefix("on "), self._specs[key].slots or 1),
            )
            for key, entry in self._repeated.items()
        ]

    def _where(self, key: str, entry: Entry) -> str:
        first = self._first[key]
        return "line %d%s" % (first.line, "" if first.source == entry.source else " of " + first.source)

    def _too_many_slots(self) -> list[Finding]:
        return [
            self._first[key].here("E116", "slots must be at most max_slots=%d, got '%d'" % (spec.max_slots, spec.slots))
            for key, spec in self._specs.items()
            if spec.max_slots is not None and spec.slots is not None and spec.slots > spec.max_slots
        ]

    def _unreachable(self) -> list[Finding]:
        """Return the hosts that mean this machine to everybody, where there are others."""
        remote = next((spec.name for spec in self._specs.values() if not is_loopback(spec.name)), None)
        if remote is None:
            return []
        advice = "other hosts cannot reach it. Use this machine's name or addr="
        return [
            self._first[key].here("E112", "%r mixed with remote host %r: %s" % (spec.name, remote, advice))
            for key, spec in self._specs.items()
            if is_loopback(spec.name) and not spec.addr
        ]


def _shown(value: object) -> str:
    return "none" if value in (None, "", ()) else ",".join(value) if isinstance(value, tuple) else str(value)
