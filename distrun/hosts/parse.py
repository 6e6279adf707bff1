"""A hosts file read: its text in, an inventory or all its errors out. Pure, but for `read`, which is given.

Rule R1, `:N` behind a name: with dmlc it was the ssh port, with MPICH and Horovod the number of slots. So 22 and
1024 and above are ports, all else is refused as ambiguous (E105) unless the user says whose file it is.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from distrun.hosts import grammar, ranges, words
from distrun.hosts.findings import Fault, Finding, error_of
from distrun.hosts.merge import Entry, Merger
from distrun.hosts.spec import HostSpec, Inventory
from distrun.hosts.words import Word

Reader = Callable[[str], str]
"""Gives the text of an included file.

Raises:
    Fault: E100, E118.
"""
DEEPEST = 10
MOST = 1000
"""Files that may be included in each other, and in all."""


@dataclass
class _State:
    """What the files of one inventory have in common."""

    form: str
    read: Reader | None
    merger: Merger
    saw: set[str] = field(default_factory=set)
    """Forms of the grammar that were met."""
    findings: list[Finding] = field(default_factory=list)
    files: int = 0


@dataclass(frozen=True)
class _Target:
    """The first word of an entry, read."""

    names: Iterable[str]
    count: int
    user: str = ""
    port: int | None = None
    slots: int | None = None


def parse(
    text: str,
    source: str,
    *,
    form: str = "auto",
    read: Reader | None = None,
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
    state = _State(form, read, merger)
    _file(text, source, state, ())
    if not merger.order and not state.findings:
        lines = text.count("\n") + (not text.endswith("\n") and bool(text))
        what = "%d line%s, all blank or comments" % (lines, "" if lines == 1 else "s")
        raise error_of([Finding(source, 0, 0, "E101", "no hosts in file (%s)" % what)])
    return _finish(source, state, saw)


def parse_list(text: str, source: str = "--hosts", *, form: str = "auto") -> Inventory:
    """Return the hosts of a command line's list: `a,b`, `gpu[1-4]`, `a:2222`; `a*4` gives it four slots.

    Raises:
        HostsError: all errors of it.
    """
    merger = Merger()
    state = _State(form, None, merger)
    for at, item in ranges.split(text, ",\n"):
        try:
            star = item.rfind("*")
            spec = item if star < 0 else item[:star]
            count = None if star < 0 else grammar.slots(item[star + 1 :], at=star)
            target = _target(spec, state, brief=True)
            if count is not None and target.slots is not None:
                raise Fault(star, "E116", "slots given twice: %d and %d" % (target.slots, count))
            _add(target, {"slots": count or target.slots}, Entry(source, 1, at + 1, text), state)
        except Fault as fault:
            state.findings.append(Finding(source, 1, at + fault.at + 1, fault.code, fault.text, text))
    if not merger.order and not state.findings:
        raise error_of([Finding(source, 0, 0, "E101", "no hosts in %s" % grammar.quote(text))])
    return _finish(source, state, None)


def _finish(source: str, state: _State, saw: set[str] | None) -> Inventory:
    found = [*state.findings, *state.merger.errors()]
    if found:
        files = list(dict.fromkeys(each.source for each in found))
        raise error_of(sorted(found, key=lambda each: (files.index(each.source), each.line, each.column)))
    if saw is not None:
        saw |= state.saw | ({"duplicate"} if state.merger.has_duplicates else set())
    # Grid Engine names a host once for each of its queues: no surprise to anybody.
    warnings = () if state.form == "sge" else tuple(each.head for each in state.merger.warnings())
    return Inventory(source, state.merger.specs, tuple(state.merger.order), warnings)


def _file(text: str, source: str, state: _State, chain: tuple[str, ...]) -> None:
    chain = (*chain, os.path.normpath(source))
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = line.rstrip("\r")
        found, comment = words.cut(line)
        if not found:
            state.saw.add("comment.hash" if comment == "#" else "comment.slashes" if comment else "blank")
            continue
        if comment:
            state.saw.add("comment.behind")
        entry = Entry(source, number, found[0].at + 1, line)
        if state.form == "sge":
            _sge(found, entry, state)
        elif found[0].text.startswith("@"):
            _directive(found, entry, state, chain)
        else:
            _entry(found, entry, state)


def _entry(found: list[Word], entry: Entry, state: _State) -> None:
    """Read `target attr...`; every error of the line is found."""
    target = None
    try:
        target = _target(found[0].text, state)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))
    given: dict[str, object] = {}
    if target is not None:
        given = {"user": target.user or None, "port": target.port, "slots": target.slots}
    before = len(state.findings)
    said_text = False
    for word in found[1:]:
        name, equals, raw = word.text.partition("=")
        try:
            if not name or not equals:
                if not said_text:
                    said_text = True
                    text = "text after host is not key=value: %s" % grammar.quote(word.text)
                    raise Fault(0, "E113", text)
                continue
            key = grammar.key(name)
            text, quoted = words.unquote(raw)
            value = grammar.value(key, text)
            if given.get(key) not in (None, value):
                raise Fault(0, "E116", "%s given twice: %r and %r" % (key, str(given[key]), text))
            given[key] = value
            state.saw |= {"key." + name, "quoted"} if quoted else {"key." + name}
            if key == "gpus":
                state.saw.add("gpus.list" if "," in text else "gpus.count")
        except Fault as fault:
            state.findings.append(entry.finding(fault, word.at))
    if target is None or len(state.findings) > before:
        return
    try:
        if target.count > 1 and given.get("addr"):
            text = "addr=%s would be the address of %d hosts" % (given["addr"], target.count)
            raise Fault(0, "E116", text)
        _add(target, given, entry, state)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))


def _add(target: _Target, given: dict[str, object], entry: Entry, state: _State) -> None:
    total = len(state.merger.order) + target.count
    if total > ranges.LIMIT:
        raise Fault(0, "E110", ranges.too_many(total))
    kept = {key: value for key, value in given.items() if value is not None}
    for name in target.names:
        state.merger.add(HostSpec(name, **kept), entry)  # type: ignore[arg-type]


def _sge(found: list[Word], entry: Entry, state: _State) -> None:
    """Read `host slots [queue [processors]]`. Queue and processors say nothing that we use."""
    try:
        target = _target(found[0].text, state)
        at = found[1].at - found[0].at if len(found) > 1 else 0
        count = grammar.slots(found[1].text if len(found) > 1 else "", at=at)
        if len(found) > 4:
            text = "text after host is not slots, queue, processors: %s" % grammar.quote(found[4].text)
            raise Fault(found[4].at - found[0].at, "E113", text)
        _add(target, {"slots": count}, entry, state)
    except Fault as fault:
        state.findings.append(entry.finding(fault, found[0].at))


def _directive(found: list[Word], entry: Entry, state: _State, chain: tuple[str, ...]) -> None:
    """Read `@include PATH`."""
    try:
        if found[0].text != "@include":
            text = "expected '@include' or a host, got %s" % grammar.quote(found[0].text)
            raise Fault(found[0].at, "E117", text)
        if len(found) != 2:
            raise Fault(found[0].at, "E117", "@include: expected one path, got %d" % (len(found) - 1))
        try:
            path = words.unquote(found[1].text)[0]
            text, path = _included(path, entry.source, state, chain)
        except Fault as fault:
            raise Fault(found[1].at, fault.code, fault.text) from None
    except Fault as fault:
        state.findings.append(entry.finding(fault, 0))
        return
    state.saw.add("include")
    _file(text, path, state, chain)


def _included(path: str, source: str, state: _State, chain: tuple[str, ...]) -> tuple[str, str]:
    """Return text and path of a file that another includes."""
    if state.read is None:
        raise Fault(0, "E117", "@include: not possible here")
    if not path.startswith("~"):
        path = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if path in chain:
        circle = " -> ".join([*chain[chain.index(path) :], path])
        raise Fault(0, "E117", "@include: %s is included by itself" % circle)
    state.files += 1
    if len(chain) >= DEEPEST:
        raise Fault(0, "E117", "@include: deeper than %d files" % DEEPEST)
    if state.files > MOST:
        raise Fault(0, "E117", "@include: more than %d files" % MOST)
    return state.read(path), path


def _target(text: str, state: _State, brief: bool = False) -> _Target:
    """Read `[user@]name[:N]`. `brief`: of a command line, where attributes cannot be written.

    Raises:
        Fault: its place is counted from the beginning of the text.
    """
    saw = set()
    if text.count("@") > 1:
        raise Fault(0, "E111", "two '@' in %s" % grammar.quote(text))
    user, sign, rest = text.rpartition("@")
    start = len(user) + len(sign)
    if sign:
        grammar.user(user)
        saw.add("user")
    end = rest.find("]") if rest.startswith("[") else -1
    if rest.startswith("[") and end < 0:
        raise Fault(start, "E109", "unclosed '[' in %s" % grammar.quote(rest))
    if end > 0 and ":" in rest[:end]:
        name = rest[1:end]
        if not grammar.ipv6(name):
            raise Fault(start, "E102", "invalid host name %s: it is not an IPv6 address" % grammar.quote(name))
        if rest[end + 1 :] and rest[end + 1] != ":":
            tail = grammar.quote(rest[end + 1 :])
            raise Fault(start + end + 1, "E104", "expected ':' and a port number after ']', got %s" % tail)
        saw.add("ipv6.zone" if "%" in name else "ipv6.brackets")
        target = _Target((name,), 1, user)
        colon = end + 1 if rest[end + 1 :] else -1
    elif rest.count(":") > 1 and grammar.ipv6(rest):
        saw.add("ipv6.bare")
        target, colon = _Target((rest,), 1, user), -1
    else:
        colon = rest.find(":")
        name = rest if colon < 0 else rest[:colon]
        try:
            target = _names(name, user, saw)
        except Fault as fault:
            raise Fault(start + fault.at, fault.code, fault.text) from None
    if colon >= 0:
        port, slots = _number(text, start + colon, state.form, brief)
        target = _Target(target.names, target.count, user, port, slots)
        saw.add("port")
    state.saw |= saw
    return target


def _names(text: str, user: str, saw: set[str]) -> _Target:
    found = ranges.pattern(text)
    if not found.ranges:
        saw.add(grammar.name(text))
        return _Target((text,), 1, user)
    try:
        grammar.name(found.sample)
    except Fault as fault:
        raise Fault(0, fault.code, fault.text.replace(repr(found.sample), grammar.quote(text))) from None
    items = [item for each in found.ranges for item in each]
    saw.add("range")
    saw |= {"range.padded"} if any(item.width for item in items) else set()
    saw |= {"range.list"} if len(items) > len(found.ranges) else set()
    saw |= {"range.step"} if any(item.step > 1 for item in items) else set()
    saw |= {"range.several"} if len(found.ranges) > 1 else set()
    return _Target(found.names(), found.count, user)


def _number(text: str, colon: int, form: str, brief: bool) -> tuple[int | None, int | None]:
    """Return port and slots of the `:N` at the end of a target, one of them None."""
    digits, name = text[colon + 1 :], text[:colon]
    if form in ("mpich", "horovod"):
        return None, grammar.slots(digits, at=colon + 1)
    if not digits.isdecimal() or not digits.isascii():
        advice = "For several IPv6 colons use [addr]:port"
        text = "expected a port number after ':', got %s. %s" % (grammar.quote(digits), advice)
        raise Fault(colon + 1, "E104", text)
    port = grammar.port(digits, colon + 1)
    if form == "dmlc" or port == 22 or port >= 1024:
        return port, None
    how = "Write '%s slots=%d' or '%s port=%d', or pass --hostfile-format" % (name, port, name, port)
    if brief:
        how = "Write '%s*%d' for slots, or pass --hostfile-format dmlc for the port" % (name, port)
    what = "port %d (dmlc style) or %d slots (MPI style)" % (port, port)
    raise Fault(colon, "E105", "%s is ambiguous: %s? %s" % (grammar.quote(text), what, how))
