"""A hosts file read: its text in, an inventory or all its errors out. Pure, but for `read`, which is given."""

from __future__ import annotations

import os.path
from collections.abc import Callable
from dataclasses import dataclass, field

from distrun.hosts import grammar, ranges, words
from distrun.hosts.findings import Fault, Finding, error_of
from distrun.hosts.merge import Entry, Merger
from distrun.hosts.spec import HostSpec, Inventory
from distrun.hosts.target import Target, read_target
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
            target = read_target(spec, state.form, state.saw, brief=True)
            if count is not None and target.slots is not None:
                raise Fault(star, "E116", "slots given twice: %d and %d" % (target.slots, count))
            _add(target, {**target.given, "slots": count or target.slots}, Entry(source, 1, at + 1, text), state)
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


def _add(target: Target, given: dict[str, object], entry: Entry, state: _State) -> None:
    total = len(state.merger.order) + target.count
    if total > ranges.LIMIT:
        raise Fault(0, "E110", ranges.too_many(total))
    kept = {key: value for key, value in given.items() if value is not None}
    for name in target.names:
        state.merger.add(HostSpec(name, **kept), entry)  # type: ignore[arg-type]


def _sge(found: list[Word], entry: Entry, state: _State) -> None:
    """Read `host slots [queue [processors]]`. Queue and processors say nothing that we use."""
    try:
        target = read_target(found[0].text, state.form, state.saw)
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
        circle = " -> ".join(grammar.quote(each) for each in [*chain[chain.index(path) :], path])
        raise Fault(0, "E117", "@include: a file includes itself: %s" % circle)
    state.files += 1
    if len(chain) >= DEEPEST:
        raise Fault(0, "E117", "@include: deeper than %d files" % DEEPEST)
    if state.files > MOST:
        raise Fault(0, "E117", "@include: more than %d files" % MOST)
    return state.read(path), path
