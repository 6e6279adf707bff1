"""The grammar of hosts files: words of a line, names, attributes and their values. No side effects.

    file   := { line NEWLINE }
    line   := [ entry ] [ WS* ('#' | '//') text ]        a comment begins at the line's start or after white space
    entry  := target { WS+ attr }  |  '@include' WS+ path
    target := [ user '@' ] name [ ':' INT ]              INT: the ssh port, see `HostPattern` in parse.py
    name   := host name or ssh alias | IPv4 | '[' IPv6 [ '%' zone ] ']' | IPv6 (no port)  |  gpu[01-16,20]n[1-8/2]
    attr   := key '=' value
    value  := word | '"' text '"'                        in quotes \\" and \\\\ mean " and \\
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import unicodedata
from collections.abc import Sequence

from distrun.errors import HostsError
from distrun_runtime.contract import gpus
from distrun_runtime.contract.dataclass import dataclass

FORMATS = ("auto", "dmlc", "mpich", "horovod", "sge")
"""What the lines are: ours; ours with `:N` a port; with `:N` slots (two names); Grid Engine's $PE_HOSTFILE."""

SYNONYMS = {
    "slots": ("cpu", "count"),
    "max_slots": ("max-slots", "slots_max", "slots-max", "cpu_max", "cpu-max", "count_max", "count-max"),
    "port": (),
    "user": ("username", "user-name", "user_name"),
    **dict.fromkeys(("addr", "iface", "gpus", "role", "labels", "python", "workdir", "identity", "jump"), ()),
}
"""Attributes, and what else they are called in the files of other programs."""

KEYS = {name: key for key, others in SYNONYMS.items() for name in (key, *others)}
ROLES = ("server", "worker", "scheduler", "any")

_NAME = r"[A-Za-z0-9._-]+"
_USER = r"[A-Za-z0-9._][A-Za-z0-9._\\$+-]*"
_IFACE = r"[A-Za-z0-9._:@-]{1,15}"
_NUMBER = r"[0-9]{1,9}"
_LABELS = r"[^\s,]+(,[^\s,]+)*"
_JUMP = r"[A-Za-z0-9._\[][^\s,]*(,[A-Za-z0-9._\[][^\s,]*)*"
_DOTTED = r"[0-9]+(\.[0-9]+){3}"
_LONGEST = 253
SHOWN = 200
"""Errors of one file that are printed; of a file that is none, every line is one."""
WIDE = 120
"""Characters of a line that are shown; of a longer one the surroundings of the caret."""
BLANKS = " \t\r"


@dataclass(frozen=True)
class Finding:
    """One error or warning."""

    source: str
    line: int
    """From 1; 0: of no line."""
    column: int
    """In characters, from 1; 0: of no line."""
    code: str
    """Empty: it has none."""
    text: str
    shown: str = ""
    """The line itself."""

    @property
    def head(self) -> str:
        """`file:line:col: CODE: text`; `file: CODE: text`, if it is of no line."""
        place = f":{self.line}:{self.column}" if self.line else ""
        return ": ".join(filter(None, (self.source + place, self.code, self.text)))

    def __str__(self) -> str:
        if not self.line:
            return self.head
        line, at = self.shown, self.column - 1
        if len(line) > WIDE:
            start = max(0, min(at - WIDE // 2, len(line) - WIDE))
            line, at = "..." + line[start : start + WIDE] + "...", at - start + 3
        line = "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in line)
        return f"{self.head}\n  {line}\n  {' ' * _width(line[:at])}^"


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


class Fault(Exception):
    """One error, found in a piece of text: its place there, from 0, its code and words."""

    def __init__(self, at: int, code: str, text: str) -> None:
        super().__init__(text)
        self.at = at
        self.code = code
        self.text = text


def error_of(findings: Sequence[Finding], hint: str = "") -> HostsError:
    """Return the error that holds all findings."""
    lines = [str(finding) for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(f"... and {len(findings) - SHOWN} more errors")
    error = HostsError("\n".join(lines), hint, len(findings))
    error.findings = findings
    return error


@dataclass(frozen=True)
class Word:
    """A piece of a line between white space; white space in quotes is part of it."""

    at: int
    """From 0."""
    text: str


def cut(line: str) -> list[Word]:
    """Return the words of a line, without the comment behind them."""
    words: list[Word] = []
    at = 0
    while at < len(line):
        if line[at] in BLANKS:
            at += 1
            continue
        if line.startswith(("#", "//"), at):
            break
        end = _end(line, at)
        words.append(Word(at, line[at:end]))
        at = end
    return words


def _end(line: str, start: int) -> int:
    """Return where the word ends. Quotes count at its beginning and behind its first equals sign."""
    at, was_equals = start, False
    while at < len(line) and line[at] not in BLANKS:
        if line[at] == '"' and (at == start or (line[at - 1] == "=" and not was_equals)):
            at = _closing(line, at) + 1
            was_equals = True
            continue
        if at > start and line[at - 1] == "=":
            was_equals = True
        at += 1
    return min(at, len(line))


def _closing(text: str, opening: int) -> int:
    """Return the place of the closing quote, or the end of the text."""
    at = opening + 1
    while at < len(text) and text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return min(at, len(text))


def unquote(text: str) -> str:
    r"""Return a value without its quotes. In quotes, `\"` and `\\` mean `"` and `\`.

    Raises:
        Fault: E116, if they are not closed or something follows; its place is the value's beginning.
    """
    if not text.startswith('"'):
        return text
    closing = _closing(text, 0)
    if closing >= len(text):
        raise Fault(0, "E116", f"unclosed quote in {text!r}")
    if closing + 1 < len(text):
        raise Fault(0, "E116", f"text after the closing quote in {text!r}")
    return re.sub(r'\\(["\\])', r"\1", text[1:closing])


def number(text: str) -> int:
    """Return a positive number of at most nine digits; 0 if it is none."""
    return int(text) if re.fullmatch(_NUMBER, text) else 0


def port(text: str, at: int = 0) -> int:
    """Return a port.

    Raises:
        Fault: E103.
    """
    value = number(text)
    if not 1 <= value <= 65535:
        raise Fault(at, "E103", f"port must be 1-65535, got {quote(text)}")
    return value


def slots(text: str, key: str = "slots", at: int = 0) -> int:
    """Return a number of slots.

    Raises:
        Fault: E106.
    """
    value = number(text)
    if not value:
        raise Fault(at, "E106", f"{key} must be a positive integer, got {quote(text)}")
    return value


def name(text: str) -> bool:
    """Check a host name, which is no IPv6 address and has no ranges; return whether it is an IPv4 address.

    Raises:
        Fault: E102.
    """
    problem, is_dotted = "", bool(re.fullmatch(_DOTTED, text))
    if len(text.split()) > 1:
        problem = "separate hosts with commas"
    elif not re.fullmatch(_NAME, text):
        problem = "allowed are letters, digits, '.', '-', '_'"
    elif not text[0].isalnum() and text[0] != "_":
        problem = f"it begins with {text[0]!r}"
    elif len(text) > _LONGEST:
        problem = f"it is longer than {_LONGEST} characters"
    elif is_dotted:
        try:
            ipaddress.IPv4Address(text)
        except ValueError:
            problem = "it is not an IPv4 address"
    if problem:
        raise Fault(0, "E102", f"invalid host name {quote(text)}: {problem}")
    return is_dotted


def ipv6(text: str) -> bool:
    """Return whether a text is an IPv6 address, with a zone or without."""
    address, percent, zone = text.partition("%")
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return not percent or bool(re.fullmatch(_NAME, zone))


def user(text: str) -> str:
    """Return a user's name.

    Raises:
        Fault: E116.
    """
    if not re.fullmatch(_USER, text):
        raise Fault(0, "E116", f"invalid user {quote(text)}: expected letters, digits, '.', '-', '_'")
    return text


def value(key: str, text: str) -> object:
    """Return the checked value of an attribute.

    Raises:
        Fault: E103, E106, E116; at the attribute's beginning.
    """
    if key in ("slots", "max_slots"):
        return slots(text, key)
    if key == "port":
        return port(text)
    if key == "user":
        return user(text)
    if key == "addr":
        try:
            return str(ipaddress.ip_address(text.removeprefix("[").removesuffix("]")))
        except ValueError:
            raise wrong(key, "an IP address", text) from None
    if key == "role":
        if text not in ROLES:
            raise wrong(key, "one of " + ", ".join(ROLES), text)
        return "" if text == "any" else text
    if key == "iface" and not re.fullmatch(_IFACE, text):
        raise wrong(key, "the name of a network interface", text)
    if key == "gpus" and not (gpus.is_count(text) or gpus.is_list(text)):
        raise wrong(key, "a number, or different numbers or UUIDs (GPU-..., MIG-...) with commas between", text)
    if key == "jump" and not re.fullmatch(_JUMP, text):
        raise wrong(key, "[user@]host[:port]", text)
    if key == "labels":
        if not re.fullmatch(_LABELS, text) or not text.isprintable():
            raise wrong(key, "words with commas between", text)
        return tuple(text.split(","))
    if not text or not text.isprintable():
        raise wrong(key, "printable text", text)
    return text


def wrong(key: str, right: str, text: str) -> Fault:
    """Return the fault of an attribute's value."""
    return Fault(0, "E116", f"{key} must be {right}, got {quote(text)}")


def key(text: str) -> str:
    """Return the attribute of that name or synonym.

    Raises:
        Fault: E107.
    """
    if text not in KEYS:
        import difflib  # for a mistake only

        near = difflib.get_close_matches(text.lower(), KEYS, n=1)
        advice = f"Did you mean {near[0]!r}? " if near else ""
        raise Fault(0, "E107", f"unknown attribute {quote(text)}. {advice}Known: {', '.join(SYNONYMS)}")
    return KEYS[text]


def quote(text: str) -> str:
    """Return what the user typed in quotes, shortened if it is long."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def key_of(name: str) -> str:
    """Return what two spellings of one host have in common: IPv6 addresses are written in several ways."""
    if ":" in name:
        with contextlib.suppress(ValueError):
            return str(ipaddress.IPv6Address(name))
    return name


def is_loopback(name: str) -> bool:
    """Return whether a name means the machine that looks it up, so that no other host can use it. No side effects."""
    if name.lower() in ("localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
