"""The first word of a line: user, name, address or pattern, and the number behind it. Pure.

Rule R1, `:N` behind a name: with dmlc it was the ssh port, with MPICH and Horovod the number of slots. So 22 and
1024 and above are ports, all else is refused as ambiguous (E105) unless the user says whose file it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from distrun.hosts import grammar, ranges
from distrun.hosts.findings import Fault


@dataclass(frozen=True)
class Target:
    """The word, read."""

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


def read_target(text: str, form: str, saw: set[str], brief: bool = False) -> Target:
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
        target = Target((name,), 1, user)
        colon = end + 1 if rest[end + 1 :] else -1
    elif rest.count(":") > 1 and grammar.ipv6(rest):
        saw.add("ipv6.bare")
        target, colon = Target((rest,), 1, user), -1
    else:
        colon = rest.find(":")
        name = rest if colon < 0 else rest[:colon]
        try:
            target = _names(name, user, saw)
        except Fault as fault:
            raise Fault(start + fault.at, fault.code, fault.text) from None
    if colon >= 0:
        port, slots = _number(text, start + colon, form, brief)
        target = Target(target.names, target.count, user, port, slots)
        saw.add("port")
    return target


def _names(text: str, user: str, saw: set[str]) -> Target:
    found = ranges.pattern(text)
    if not found.ranges:
        saw.add(grammar.name(text))
        return Target((text,), 1, user)
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
    return Target(found.names(), found.count, user)


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
