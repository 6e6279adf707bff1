"""Reads hosts files: the text in, an inventory or all its errors out. Pure, but for `read`, which is given.

First come files and their lines, then the first word of a line (a host, or a pattern of several), then what happens
where a host stands on several lines.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field

from distrun.hosts import grammar, ranges
from distrun.hosts.grammar import Fault, Finding, HostSpec, Inventory, Word, error_of, is_loopback, key_of
from distrun_runtime.contract.dataclass import dataclass

ReadText = Callable[[str], str]
"""Gives the text of an included file.

Raises:
    Fault: E100, E118.
"""
DEEPEST = 10
MOST = 1000
"""Files that may be included in each other, and in all."""


@dataclass
class _ParserState:
    """What the files of one inventory have in common."""

    form: str
    read: ReadText | None
    merger: Merger
    saw: set[str] = field(default_factory=set)
    """Forms of the grammar that were met."""
    findings: list[Finding] = field(default_factory=list)
    files: int = 0


def parse(
    text: str,
    source: str,
    *,
    form: str = "auto",
    read: ReadText | None = None,
    saw: set[str] | None = None,
) -> Inventory:
    """Return the hosts that a file names.

    Arguments:
        text: the file. A byte order mark, Windows line ends and tabs are taken.
        source: what the file is called in messages; an included path is relative to it.
        form: one of `grammar.FORMATS`.
        read: gives the text of an included file; None: none can be included.
        saw: gets the forms of the grammar that were met, of `grammar.FORMS`, and `key.NAME` for attributes.

    Raises:
        HostsError: all errors of the file, and of those that it includes.
    """
    merger = Merger()
    state = _ParserState(form, read, merger)
    _file(text, source, state, ())
    if not merger.order and not state.findings:
        lines = text.count("\n") + (not text.endswith("\n") and bool(text))
        what = f"{lines} line{'' if lines == 1 else 's'}, all blank or comments"
        raise error_of([Finding(source, 0, 0, "E101", f"no hosts in file ({what})")])
    return _finish(source, state, saw)


def parse_list(text: str, source: str = "--hosts", *, form: str = "auto") -> Inventory:
    """Return the hosts of a command line's list: `a,b`, `gpu[1-4]`, `a:2222`; `a*4` gives it four slots.

    Raises:
        HostsError: all errors of it.
    """
    merger = Merger()
    state = _ParserState(form, None, merger)
    for at, item in ranges.split(text, ",\n"):
        try:
            star = item.rfind("*")
            spec = item if star < 0 else item[:star]
            count = None if star < 0 else grammar.slots(item[star + 1 :], at=star)
            target = read_target(spec, state.form, state.saw, brief=True)
            if count is not None and target.slots is not None:
                raise Fault(star, "E116", f"slots given twice: {target.slots} and {count}")
            _add(target, {**target.given, "slots": count or target.slots}, HostEntry(source, 1, at + 1, text), state)
        except Fault as fault:
            state.findings.append(Finding(source, 1, at + fault.at + 1, fault.code, fault.text, text))
    if not merger.order and not state.findings:
        raise error_of([Finding(source, 0, 0, "E101", f"no hosts in {grammar.quote(text)}")])
    return _finish(source, state, None)


def _finish(source: str, state: _ParserState, saw: set[str] | None) -> Inventory:
    found = [*state.findings, *state.merger.errors()]
    if found:
        files = list(dict.fromkeys(each.source for each in found))
        raise error_of(sorted(found, key=lambda each: (files.index(each.source), each.line, each.column)))
    if saw is not None:
        saw |= state.saw | ({"duplicate"} if state.merger.has_duplicates else set())
    # Grid Engine names a host once for each of its queues: no surprise to anybody.
    warnings = () if state.form == "sge" else tuple(each.head for each in state.merger.warnings())
    return Inventory(source, state.merger.specs, tuple(state.merger.order), warnings, state.merger.where())


def _file(text: str, source: str, state: _ParserState, chain: tuple[str, ...]) -> None:
    chain = (*chain, os.path.normpath(source))
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = line.rstrip("\r")
        found, comment = grammar.cut(line)
        if not found:
            state.saw.add("comment.hash" if comment == "#" else "comment.slashes" if comment else "blank")
            continue
        if comment:
            state.saw.add("comment.behind")
        entry = HostEntry(source, number, found[0].at + 1, line)
        if state.form == "sge":
            _sge(found, entry, state)
        elif found[0].text.startswith("@"):
            _directive(found, entry, state, chain)
        else:
            _entry(found, entry, state)


def _entry(found: list[Word], entry: HostEntry, state: _ParserState) -> None:
    """Read `target attr...`; every error of the line is found."""
    target = None
    try:
        target = read_target(found[0].text, state.form, state.saw)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))
    given = {} if target is None else target.given
    before = len(state.findings)
    said_text = False
    for word in found[1:]:
        name, equals, raw = word.text.partition("=")
        try:
            if not name or not equals:
                if not said_text:
                    said_text = True
                    text = f"text after host is not key=value: {grammar.quote(word.text)}"
                    raise Fault(0, "E113", text)
                continue
            key = grammar.key(name)
            text, quoted = grammar.unquote(raw)
            value = grammar.value(key, text)
            if given.get(key) not in (None, value):
                raise Fault(0, "E116", f"{key} given twice: {str(given[key])!r} and {text!r}")
            given[key] = value
            state.saw |= {"key." + name, "quoted"} if quoted else {"key." + name}
            if key == "gpus":
                state.saw.add("gpus.count" if text.isdigit() else "gpus.list" if text[0].isdigit() else "gpus.uuid")
        except Fault as fault:
            state.findings.append(entry.finding(fault, word.at))
    if target is None or len(state.findings) > before:
        return
    try:
        if target.count > 1 and given.get("addr"):
            text = f"addr={given['addr']} would be the address of {target.count} hosts"
            raise Fault(0, "E116", text)
        _add(target, given, entry, state)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))


def _add(target: HostPattern, given: dict[str, object], entry: HostEntry, state: _ParserState) -> None:
    total = len(state.merger.order) + target.count
    if total > ranges.LIMIT:
        raise Fault(0, "E110", ranges.too_many(total))
    kept = {key: value for key, value in given.items() if value is not None}
    for name in target.names:
        state.merger.add(HostSpec(name, **kept), entry)  # type: ignore[arg-type]


def _sge(found: list[Word], entry: HostEntry, state: _ParserState) -> None:
    """Read `host slots [queue [processors]]`. Queue and processors say nothing that we use."""
    try:
        target = read_target(found[0].text, state.form, state.saw)
        at = found[1].at - found[0].at if len(found) > 1 else 0
        count = grammar.slots(found[1].text if len(found) > 1 else "", at=at)
        if len(found) > 4:
            text = f"text after host is not slots, queue, processors: {grammar.quote(found[4].text)}"
            raise Fault(found[4].at - found[0].at, "E113", text)
        _add(target, {"slots": count}, entry, state)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))


def _directive(found: list[Word], entry: HostEntry, state: _ParserState, chain: tuple[str, ...]) -> None:
    """Read `@include PATH`."""
    try:
        if found[0].text != "@include":
            text = f"expected '@include' or a host, got {grammar.quote(found[0].text)}"
            raise Fault(found[0].at, "E117", text)
        if len(found) != 2:
            raise Fault(found[0].at, "E117", f"@include: expected one path, got {len(found) - 1}")
        try:
            path = grammar.unquote(found[1].text)[0]
            text, path = _included(path, entry.source, state, chain)
        except Fault as fault:
            raise Fault(found[1].at, fault.code, fault.text) from None
    except Fault as fault:
        state.findings.append(entry.finding(fault, 0))
        return
    state.saw.add("include")
    _file(text, path, state, chain)


def _included(path: str, source: str, state: _ParserState, chain: tuple[str, ...]) -> tuple[str, str]:
    """Return text and path of a file that another includes."""
    if state.read is None:
        raise Fault(0, "E117", "@include: not possible here")
    if not path.startswith("~"):
        path = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if path in chain:
        circle = " -> ".join(grammar.quote(each) for each in [*chain[chain.index(path) :], path])
        raise Fault(0, "E117", f"@include: a file includes itself: {circle}")
    state.files += 1
    if len(chain) >= DEEPEST:
        raise Fault(0, "E117", f"@include: deeper than {DEEPEST} files")
    if state.files > MOST:
        raise Fault(0, "E117", f"@include: more than {MOST} files")
    return state.read(path), path


@dataclass(frozen=True)
class HostPattern:
    """The first word of a line, read: user, name, address or pattern, and the number behind it.

    Rule R1, `:N` behind a name: with dmlc it was the ssh port, with MPICH and Horovod the number of slots. So 22 and
    1024 and above are ports, all else is refused as ambiguous (E105) unless the user says whose file it is.
    """

    names: Iterable[str]
    """Can be gone through once."""
    count: int
    """How many names there are."""
    user: str = ""
    port: int | None = None
    slots: int | None = None

    @property
    def given(self) -> dict[str, object]:
        """What it says, as attributes."""
        return {"user": self.user or None, "port": self.port, "slots": self.slots}


def read_target(text: str, form: str, saw: set[str], brief: bool = False) -> HostPattern:
    """Read `[user@]name[:N]`.

    Arguments:
        text: the word.
        form: one of `grammar.FORMATS`.
        saw: gets the forms that were met, of `grammar.FORMS`.
        brief: whether it is of a command line, where attributes cannot be written.

    Raises:
        Fault: its place is counted from the beginning of the text.
    """
    if text.count("@") > 1:
        raise Fault(0, "E111", f"two '@' in {grammar.quote(text)}")
    user, sign, rest = text.rpartition("@")
    start = len(user) + len(sign)
    if sign:
        grammar.user(user)
        saw.add("user")
    end = rest.find("]") if rest.startswith("[") else -1
    if rest.startswith("[") and end < 0:
        raise Fault(start, "E109", f"unclosed '[' in {grammar.quote(rest)}")
    if end > 0 and ":" in rest[:end]:
        name = rest[1:end]
        if not grammar.ipv6(name):
            raise Fault(start, "E102", f"invalid host name {grammar.quote(name)}: it is not an IPv6 address")
        if rest[end + 1 :] and rest[end + 1] != ":":
            tail = grammar.quote(rest[end + 1 :])
            raise Fault(start + end + 1, "E104", f"expected ':' and a port number after ']', got {tail}")
        saw.add("ipv6.zone" if "%" in name else "ipv6.brackets")
        target = HostPattern((name,), 1, user)
        colon = end + 1 if rest[end + 1 :] else -1
    elif rest.count(":") > 1 and grammar.ipv6(rest):
        saw.add("ipv6.bare")
        target, colon = HostPattern((rest,), 1, user), -1
    else:
        colon = rest.find(":")
        name = rest if colon < 0 else rest[:colon]
        try:
            target = _names(name, user, saw)
        except Fault as fault:
            raise Fault(start + fault.at, fault.code, fault.text) from None
    if colon >= 0:
        port, slots = _number(text, start + colon, form, brief)
        target = HostPattern(target.names, target.count, user, port, slots)
        saw.add("port")
    return target


def _names(text: str, user: str, saw: set[str]) -> HostPattern:
    found = ranges.pattern(text)
    if not found.ranges:
        saw.add(grammar.name(text))
        return HostPattern((text,), 1, user)
    try:
        if grammar.name(found.sample) == "ipv4":
            for name in found.names():
                grammar.name(name)
    except Fault as fault:
        # Letters that are wrong in one name are wrong in the pattern; an address is named itself.
        raise Fault(0, fault.code, fault.text.replace(repr(found.sample), grammar.quote(text))) from None
    items = [item for each in found.ranges for item in each]
    saw.add("range")
    saw |= {"range.padded"} if any(item.width for item in items) else set()
    saw |= {"range.list"} if len(items) > len(found.ranges) else set()
    saw |= {"range.step"} if any(item.step > 1 for item in items) else set()
    saw |= {"range.several"} if len(found.ranges) > 1 else set()
    return HostPattern(found.names(), found.count, user)


def _number(text: str, colon: int, form: str, brief: bool) -> tuple[int | None, int | None]:
    """Return port and slots of the `:N` at the end of a target, one of them None."""
    digits, name = text[colon + 1 :], text[:colon]
    if form in ("mpich", "horovod"):
        return None, grammar.slots(digits, at=colon + 1)
    if not digits.isdecimal() or not digits.isascii():
        advice = "For several IPv6 colons use [addr]:port"
        text = f"expected a port number after ':', got {grammar.quote(digits)}. {advice}"
        raise Fault(colon + 1, "E104", text)
    port = grammar.port(digits, colon + 1)
    if form == "dmlc" or port == 22 or port >= 1024:
        return port, None
    forms = "--hostfile-format mpich for slots, dmlc for ports"
    how = f"Write '{name} slots={port}' or '{name} port={port}', or pass {forms}"
    if brief:
        how = f"Write '{name}*{port}' for slots, or pass --hostfile-format dmlc for the port"
    what = f"port {port} (dmlc style) or {port} slots (MPI style)"
    raise Fault(colon, "E105", f"{grammar.quote(text)} is ambiguous: {what}? {how}")


@dataclass(frozen=True)
class HostEntry:
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
    """Collects the hosts of a file line by line.

    A host that stands twice with the same attributes is one host: its slots add up, one where a line says nothing, and
    it keeps both places in the order. With different ones it is an error.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self._specs: dict[str, HostSpec] = {}
        self._first: dict[str, HostEntry] = {}
        self._errors: list[Finding] = []
        self._repeated: dict[str, HostEntry] = {}

    @property
    def specs(self) -> tuple[HostSpec, ...]:
        """Each host once."""
        return tuple(self._specs.values())

    @property
    def has_duplicates(self) -> bool:
        """Whether a host stood twice."""
        return bool(self._repeated)

    def add(self, spec: HostSpec, entry: HostEntry) -> None:
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
                difference = f"{each.name} ({_shown(ours)} vs {_shown(theirs)})"
                text = f"{spec.name!r} already listed on {self._where(key, entry)} with different {difference}"
                self._errors.append(entry.here("E108", text))
                return
        self._specs[key] = dataclasses.replace(known, slots=(known.slots or 1) + (spec.slots or 1))
        self._repeated[key] = entry
        self.order.append(known.name)

    def where(self) -> dict[str, str]:
        """Return where each host stands first, `hosts:3`, by name."""
        return {spec.name: f"{self._first[key].source}:{self._first[key].line}" for key, spec in self._specs.items()}

    def errors(self) -> list[Finding]:
        """Return what only all hosts together show."""
        return [*self._errors, *self._too_many_slots(), *self._unreachable()]

    def warnings(self) -> Sequence[Finding]:
        """Return a warning for each host that stood twice, at its last place."""
        return [
            entry.here(
                "W120",
                "duplicate host {!r} ({}): slots added, now {}".format(
                    self._specs[key].name, self._where(key, entry).removeprefix("on "), self._specs[key].slots or 1
                ),
            )
            for key, entry in self._repeated.items()
        ]

    def _where(self, key: str, entry: HostEntry) -> str:
        first = self._first[key]
        return f"line {first.line}{'' if first.source == entry.source else ' of ' + first.source}"

    def _too_many_slots(self) -> list[Finding]:
        return [
            self._first[key].here("E116", f"slots must be at most max_slots={spec.max_slots}, got '{spec.slots}'")
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
            self._first[key].here("E112", f"{spec.name!r} mixed with remote host {remote!r}: {advice}")
            for key, spec in self._specs.items()
            if is_loopback(spec.name) and not spec.addr
        ]


def _shown(value: object) -> str:
    return "none" if value in (None, "", ()) else ",".join(value) if isinstance(value, tuple) else str(value)
