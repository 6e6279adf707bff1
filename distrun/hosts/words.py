"""A line of a hosts file cut into words, and the quotes taken off. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from distrun.hosts.findings import Fault

BLANKS = " \t\r"


@dataclass(frozen=True)
class Word:
    """A piece of a line between white space; white space in quotes is part of it."""

    at: int
    """From 0."""
    text: str


def cut(line: str) -> tuple[list[Word], str]:
    """Return the words of a line, and the mark of the comment behind them: `#`, `//` or nothing."""
    words: list[Word] = []
    at = 0
    while at < len(line):
        if line[at] in BLANKS:
            at += 1
            continue
        mark = "#" if line[at] == "#" else "//" if line.startswith("//", at) else ""
        if mark:
            return words, mark
        end = _end(line, at)
        words.append(Word(at, line[at:end]))
        at = end
    return words, ""


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


def unquote(text: str) -> tuple[str, bool]:
    r"""Return a value without its quotes, and whether it had any. In quotes, `\"` and `\\` mean `"` and `\`.

    Raises:
        Fault: E116, if they are not closed or something follows; its place is the value's beginning.
    """
    if not text.startswith('"'):
        return text, False
    closing = _closing(text, 0)
    if closing >= len(text):
        raise Fault(0, "E116", "unclosed quote in %r" % text)
    if closing + 1 < len(text):
        raise Fault(0, "E116", "text after the closing quote in %r" % text)
    chars, at = [], 1
    while at < closing:
        at += text[at] == "\\" and text[at + 1] in '"\\'
        chars.append(text[at])
        at += 1
    return "".join(chars), True
