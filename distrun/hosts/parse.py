"""Reads the hosts that the user names: an inventory, or all errors.

`find` looks for them in options, then the environment, then the queue system; it reads files and stdin. `parse` and
`parse_list` take text, and have no side effects but those of the `read` that they are given. First come files and their
lines, then the first word of a line (a host, or a pattern of several), then what happens where a host stands on several
lines, last how hosts are found.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import BinaryIO

from distrun.errors import HostsError, UsageError
from distrun.hosts import HostSpec, Inventory, grammar, ranges
from distrun.hosts.grammar import FORMATS, Fault, Finding, Word, error_of, is_loopback, key_of
from distrun_runtime.contract.dataclass import dataclass

ReadText = Callable[[str], str]
"""Gives the text of an included file.

Raises:
    Fault: E100, E118.
"""
DEEPEST = 10
MOST = 1000
"""Files that may be included in each other, and in all."""
STDIN = "<stdin>"
FILES = ("DEEPLEARNING_WORKERS_PATH", "DISTRUN_HOSTFILE")
"""Variables that name a hosts file."""
GRID_ENGINE = "PE_HOSTFILE"
SLURM_NODES = "SLURM_JOB_NODELIST"
SLURM_TASKS = "SLURM_TASKS_PER_NODE"
VARIABLES = (*FILES, GRID_ENGINE, SLURM_NODES)
"""Variables that give hosts, the first one first."""

_LARGEST = 16 * 2**20
_SLURM_COUNT = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


def parse(text: str, source: str, *, form: str = "auto", read: ReadText | None = None) -> Inventory:
    """Return the hosts that a file names.

    Arguments:
        text: the file. A byte order mark, Windows line ends and tabs are taken.
        source: what the file is called in messages; an included path is relative to it.
        form: one of `grammar.FORMATS`.
        read: gives the text of an included file; None: none can be included.

    Raises:
        HostsError: all errors of the file, and of those that it includes.
    """
    state = _ParserState(form, read)
    _file(text, source, state, ())
    lines = text.count("\n") + (not text.endswith("\n") and bool(text))
    return _finish(source, state, f"no hosts in file ({lines} line{'' if lines == 1 else 's'}, all blank or comments)")


def parse_list(text: str, source: str = "--hosts", *, form: str = "auto") -> Inventory:
    """Return the hosts of a command line's list: `a,b`, `gpu[1-4]`, `a:2222`; `a*4` gives it four slots.

    Raises:
        HostsError: all errors of it.
    """
    state = _ParserState(form)
    for at, item in ranges.split(text, ",\n"):
        try:
            star = item.rfind("*")
            given: dict[str, object] = {} if star < 0 else {"slots": grammar.slots(item[star + 1 :], at=star)}
            target = read_target(item if star < 0 else item[:star], form, brief=True)
            if given and "slots" in target.given:
                raise Fault(star, "E116", f"slots given twice: {target.given['slots']} and {given['slots']}")
            _add(target, target.given | given, HostEntry(source, 1, at + 1, text), state)
        except Fault as fault:
            state.findings.append(Finding(source, 1, at + fault.at + 1, fault.code, fault.text, text))
    return _finish(source, state, f"no hosts in {grammar.quote(text)}")


def _finish(source: str, state: _ParserState, none: str) -> Inventory:
    """Return the inventory. `none`: the error if there are no hosts in it."""
    found = [*state.findings, *state.merger.errors()]
    if not state.merger.order and not found:
        raise error_of([Finding(source, 0, 0, "E101", none)])
    if found:
        files = list(dict.fromkeys(each.source for each in found))
        raise error_of(sorted(found, key=lambda each: (files.index(each.source), each.line, each.column)))
    # Grid Engine names a host once for each of its queues: that is expected.
    warnings = () if state.form == "sge" else tuple(each.head for each in state.merger.warnings())
    return Inventory(source, state.merger.specs, tuple(state.merger.order), warnings, state.merger.where())


def _file(text: str, source: str, state: _ParserState, chain: tuple[str, ...]) -> None:
    chain = (*chain, os.path.normpath(source))
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        line = line.rstrip("\r")
        found = grammar.cut(line)
        if not found:
            continue
        entry = HostEntry(source, number, found[0].at + 1, line)
        try:
            if state.form == "sge":
                _sge(found, entry, state)
            elif found[0].text.startswith("@"):
                _directive(found, entry, state, chain)
            else:
                _entry(found, entry, state)
        except Fault as fault:
            state.findings.append(entry.finding(fault, found[0].at))


def _entry(found: list[Word], entry: HostEntry, state: _ParserState) -> None:
    """Read `target attr...`; every error of the line is found. Raises Fault."""
    target = None
    try:
        target = read_target(found[0].text, state.form)
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
            text = grammar.unquote(raw)
            value = grammar.value(key, text)
            if given.get(key) not in (None, value):
                raise Fault(0, "E116", f"{key} given twice: {str(given[key])!r} and {text!r}")
            given[key] = value
        except Fault as fault:
            state.findings.append(entry.finding(fault, word.at))
    if target is None or len(state.findings) > before:
        return
    if target.names.count > 1 and given.get("addr"):
        raise Fault(0, "E116", f"addr={given['addr']} would be the address of {target.names.count} hosts")
    _add(target, given, entry, state)


def _add(target: HostPattern, given: dict[str, object], entry: HostEntry, state: _ParserState) -> None:
    total = len(state.merger.order) + target.names.count
    if total > ranges.LIMIT:
        raise Fault(0, "E110", ranges.too_many(total))
    for name in target.names.names():
        state.merger.add(HostSpec(name, **given), entry)  # type: ignore[arg-type]


def _sge(found: list[Word], entry: HostEntry, state: _ParserState) -> None:
    """Read `host slots [queue [processors]]`. Queue and processors say nothing that we use.

    Raises:
        Fault: its place is counted from the first word; so it is for the other kinds of lines.
    """
    target = read_target(found[0].text, state.form)
    at = found[1].at - found[0].at if len(found) > 1 else 0
    count = grammar.slots(found[1].text if len(found) > 1 else "", at=at)
    if len(found) > 4:
        text = f"text after host is not slots, queue, processors: {grammar.quote(found[4].text)}"
        raise Fault(found[4].at - found[0].at, "E113", text)
    _add(target, {"slots": count}, entry, state)


def _directive(found: list[Word], entry: HostEntry, state: _ParserState, chain: tuple[str, ...]) -> None:
    """Read `@include PATH`. Raises Fault."""
    if found[0].text != "@include":
        raise Fault(0, "E117", f"expected '@include' or a host, got {grammar.quote(found[0].text)}")
    if len(found) != 2:
        raise Fault(0, "E117", f"@include: expected one path, got {len(found) - 1}")
    try:
        text, path = _included(grammar.unquote(found[1].text), entry.source, state, chain)
    except Fault as fault:
        raise Fault(found[1].at - found[0].at, fault.code, fault.text) from None
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

    names: ranges.Pattern
    given: dict[str, object]
    """What it says, as attributes."""


def read_target(text: str, form: str, brief: bool = False) -> HostPattern:
    """Read `[user@]name[:N]`.

    Arguments:
        text: the word.
        form: one of `grammar.FORMATS`.
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
    end = rest.find("]")
    if rest.startswith("[") and end < 0:
        raise Fault(start, "E109", f"unclosed '[' in {grammar.quote(rest)}")
    if rest.startswith("[") and ":" in rest[:end]:
        name = rest[1:end]
        if not grammar.ipv6(name):
            raise Fault(start, "E102", f"invalid host name {grammar.quote(name)}: it is not an IPv6 address")
        if rest[end + 1 :] and rest[end + 1] != ":":
            tail = grammar.quote(rest[end + 1 :])
            raise Fault(start + end + 1, "E104", f"expected ':' and a port number after ']', got {tail}")
        names = ranges.Pattern((name,), ())
        colon = end + 1 if rest[end + 1 :] else -1
    elif rest.count(":") > 1 and grammar.ipv6(rest):
        names, colon = ranges.Pattern((rest,), ()), -1
    else:
        colon = rest.find(":")
        name = rest if colon < 0 else rest[:colon]
        try:
            names = _names(name)
        except Fault as fault:
            raise Fault(start + fault.at, fault.code, fault.text) from None
    given: dict[str, object] = {"user": user} if user else {}
    return HostPattern(names, given | _number(text, start + colon, form, brief) if colon >= 0 else given)


def _names(text: str) -> ranges.Pattern:
    found = ranges.pattern(text)
    try:
        if grammar.name(found.sample):
            for name in found.names():
                grammar.name(name)
    except Fault as fault:
        # Letters that are wrong in one name are wrong in the pattern; an address is named itself.
        raise Fault(0, fault.code, fault.text.replace(repr(found.sample), grammar.quote(text))) from None
    return found


def _number(text: str, colon: int, form: str, brief: bool) -> dict[str, object]:
    """Return port or slots of the `:N` at the end of a target."""
    digits, name = text[colon + 1 :], text[:colon]
    if form in ("mpich", "horovod"):
        return {"slots": grammar.slots(digits, at=colon + 1)}
    if not digits.isdecimal() or not digits.isascii():
        advice = "For several IPv6 colons use [addr]:port"
        text = f"expected a port number after ':', got {grammar.quote(digits)}. {advice}"
        raise Fault(colon + 1, "E104", text)
    port = grammar.port(digits, colon + 1)
    if form == "dmlc" or port == 22 or port >= 1024:
        return {"port": port}
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
        found = [
            self._first[key].here("E116", f"slots must be at most max_slots={spec.max_slots}, got '{spec.slots}'")
            for key, spec in self._specs.items()
            if spec.max_slots is not None and spec.slots is not None and spec.slots > spec.max_slots
        ]
        remote = next((spec.name for spec in self._specs.values() if not is_loopback(spec.name)), None)
        advice = "other hosts cannot reach it. Use this machine's name or addr="
        found += [
            self._first[key].here("E112", f"{spec.name!r} mixed with remote host {remote!r}: {advice}")
            for key, spec in self._specs.items()
            if remote is not None and is_loopback(spec.name) and not spec.addr
        ]
        return self._errors + found

    def warnings(self) -> Sequence[Finding]:
        """Return a warning for each host that stood twice, at its last place."""
        found = []
        for key, entry in self._repeated.items():
            spec, first = self._specs[key], self._where(key, entry)
            found.append(entry.here("W120", f"duplicate host {spec.name!r} ({first}): slots added, now {spec.slots}"))
        return found

    def _where(self, key: str, entry: HostEntry) -> str:
        first = self._first[key]
        return f"line {first.line}{'' if first.source == entry.source else ' of ' + first.source}"


@dataclass
class _ParserState:
    """What the files of one inventory have in common."""

    form: str
    read: ReadText | None = None
    merger: Merger = field(default_factory=Merger)
    findings: list[Finding] = field(default_factory=list)
    files: int = 0


def _shown(value: object) -> str:
    return "none" if value in (None, "", ()) else ",".join(value) if isinstance(value, tuple) else str(value)


# ---------------------------------------------------------------------- finding them


def find(hostfile: str | None, hosts: str | None, env: Mapping[str, str], *, form: str = "auto") -> Inventory | None:
    """Return the hosts of a job; None if none are named. Each file, and stdin, is read once.

    Arguments:
        hostfile: -H, a path or `-` for stdin.
        hosts: --hosts, a list.
        env: the environment.
        form: one of `grammar.FORMATS`.

    Raises:
        HostsError: all that is wrong with them.
        UsageError: both options, or an unknown form.
    """
    if form not in FORMATS:
        raise UsageError(f"--hostfile-format: expected one of {', '.join(FORMATS)}, found {form!r}")
    if hostfile is not None and hosts is not None:
        raise UsageError("-H/--hostfile and --hosts contradict each other", "give one of them")
    if hostfile is not None:
        return of_file(hostfile, form="sge" if form == "auto" and hostfile == env.get(GRID_ENGINE) else form)
    if hosts is not None:
        return parse_list(hosts, form=form)
    for name in FILES:
        if env.get(name):
            return of_file(env[name], form=form, hint=f"the file is named by the variable {name}")
    if env.get(GRID_ENGINE):
        return of_file(env[GRID_ENGINE], form="sge", hint=f"the file is named by the variable {GRID_ENGINE}")
    if env.get(SLURM_NODES):
        return _slurm(env[SLURM_NODES], env.get(SLURM_TASKS, ""))
    return None


def _slurm(nodes: str, tasks: str) -> Inventory:
    """Return the hosts of an allocation of Slurm, as of `n[01-04],x1` and `2(x3),1`.

    `tasks` says how many fit on each, in the same order; it may be empty.

    Raises:
        HostsError: the node list is none.
    """
    try:
        names = list(dict.fromkeys(ranges.expand(nodes)))
    except HostsError as err:
        raise HostsError(str(err).replace(ranges.SOURCE + ":", f"${SLURM_NODES}:"), count=err.count) from None
    counts = _per_node(tasks)
    warnings: tuple[str, ...] = ()
    if tasks.strip() and len(counts) != len(names):
        text = f"{len(counts)} values in {grammar.quote(tasks)} for {len(names)} nodes: ignored"
        warnings = (Finding("$" + SLURM_TASKS, 1, 1, "W121", text).head,)
    slots = dict(zip(names, counts, strict=True)) if len(counts) == len(names) else {}
    specs = tuple(HostSpec(name, slots=slots.get(name)) for name in names)
    return Inventory("$" + SLURM_NODES, specs, tuple(names), warnings)


def _per_node(text: str) -> list[int]:
    """Return the counts of `2(x3),1`: 2, 2, 2, 1. Empty, if it is something else. No side effects."""
    counts: list[int] = []
    for item in text.strip().split(","):
        match = re.fullmatch(_SLURM_COUNT, item)
        if match is None or not int(match[1]) or len(counts) + int(match[2] or 1) > ranges.LIMIT:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def of_file(path: str, *, form: str = "auto", hint: str = "") -> Inventory:
    """Return the hosts of a file; `-` is stdin.

    Raises:
        HostsError: it cannot be read, or all that is wrong in it.
    """
    source = STDIN if path == "-" else path
    return parse(read(path, hint), source, form=form, read=lambda each: _text(os.path.expanduser(each)))


def read(path: str, hint: str = "") -> str:
    """Return the text of a hosts file; `-` is stdin.

    Raises:
        HostsError: E100, E118.
    """
    try:
        return _decoded(sys.stdin.buffer, "stdin") if path == "-" else _text(path)
    except Fault as fault:
        advice = ". Pass -H FILE, --hosts a,b or set DISTRUN_HOSTFILE" if fault.code == "E100" else ""
        source = STDIN if path == "-" else path
        raise error_of([Finding(source, 0, 0, fault.code, fault.text + advice)], hint) from None


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return _decoded(file, path)
    except FileNotFoundError:
        raise Fault(0, "E100", f"hosts file not found: {path!r} (cwd {_cwd()})") from None
    except (OSError, ValueError) as err:
        raise _unreadable(path, getattr(err, "strerror", None) or str(err)) from None


def _decoded(file: BinaryIO, name: str) -> str:
    data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise _unreadable(name, f"it is larger than {_LARGEST // 2**20} MiB")
    if b"\0" in data:
        raise _unreadable(name, "it is not UTF-8 text")
    # Anything may stand in a comment; in a name, bytes that are no UTF-8 are refused where they stand.
    return data.decode("utf-8", "surrogateescape")


def _unreadable(name: str, why: str) -> Fault:
    return Fault(0, "E118", f"cannot read the hosts file {name!r}: {why}")


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "that does not exist any more"
