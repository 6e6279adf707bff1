"""Reads and writes sizes, times, numbers with units and words for a shell; groups what is alike. No side effects.

An unknown number is None and formatted as an empty text. Numbers that JSON cannot represent are the texts `nan`, `inf`
and `-inf`.
"""

from __future__ import annotations

import datetime
import math
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import TypeVar, Union

from distrun.errors import UsageError

Key = TypeVar("Key")
Value = TypeVar("Value")
Number = Union[float, str]
"""A number, or `nan`, `inf`, `-inf`."""

LONG_S = 10 * 365 * 86400.0
"""A script may report any number of steps to do: the time that is left may be anything."""
_BYTES = ("KiB", "MiB", "GiB", "TiB")
_SHORT = ("", "K", "M", "G", "T")
_COUNTS = ("", "k", "M", "G", "T")


def size(count: float | None) -> str:
    """Return a number of bytes: `512 B`, `3.4 MiB`."""
    if count is None:
        return ""
    if count < 1024:
        return f"{int(count)} B"
    for unit in _BYTES:
        count /= 1024
        if count < 1024 or unit == _BYTES[-1]:
            break
    return f"{count:.1f} {unit}"


def short_size(count: float | None) -> str:
    """Return a number of bytes in at most 5 characters, for a column: `512`, `3.4M`, `128G`."""
    return "" if count is None else _scaled(count, 1024, _SHORT)


def used(part: float | None, whole: float | None) -> str:
    """Return used and total bytes: `3.4 of 16.0 GiB`; without a total, the same as `size`."""
    if part is None or not whole:
        return size(part)
    text = size(whole)
    number, unit = text.split(" ")
    power = 1024 ** (0 if unit == "B" else _BYTES.index(unit) + 1)
    return f"{part / power:.1f} of {number} {unit}" if power > 1 else f"{int(part)} of {text}"


def percent(fraction: float | None) -> str:
    """Return a share: `87 %` of 0.874; a share below a half per cent that is not nothing is `0.3 %`."""
    if fraction is None:
        return ""
    value = 100 * fraction
    return f"{value:.1f} %" if 0.05 <= value < 0.5 else f"{value:.0f} %"


def count(number: float | None) -> str:
    """Return a number of things in at most 5 characters: `12`, `3.4k`, `128M`."""
    return "" if number is None else _scaled(number, 1000, _COUNTS)


def per_second(number: float | None) -> str:
    """Return how many things a second: `12.5/s`, `3.4k/s`."""
    if number is None:
        return ""
    return f"{number:.3g}/s" if 0 < number < 100 else f"{count(number)}/s"


def value(number: Number | None) -> str:
    """Return a number that a script reported, such as a loss: `0.3712`, `1.2e-05`, `nan`."""
    if number is None or isinstance(number, str):
        return number or ""
    return f"{number:.4g}" if math.isfinite(number) else str(number)


def age(seconds: float | None) -> str:
    """Return how long ago something was: `59 s`, `12 min`, `3:05 h`, `12 d`."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    if seconds < 100 * 3600:
        return f"{int(seconds // 3600)}:{int(seconds % 3600 // 60):02d} h"
    return f"{seconds / 86400:.0f} d"


def elapsed(seconds: float | None) -> str:
    """Return how long something takes: `0:01:05`, `3 days, 1:02:03`, and from LONG_S on `over 10 years`."""
    if seconds is None:
        return ""
    return str(datetime.timedelta(seconds=max(0, int(seconds)))) if seconds < LONG_S else "over 10 years"


def steps(step: int | None, total: int | None) -> str:
    """Return how far something is: `1200/5000`, `1200`."""
    return "" if step is None else str(step) if not total else f"{step}/{total}"


def number_of(number: int, noun: str) -> str:
    """Return a number of things: `1 host`, `3 hosts`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def counted(whole: int, parts: Iterable[tuple[int, str]]) -> str:
    """Return how many things there are, and how many of which kind: `5 (4 running, 1 failed)`."""
    extra = ", ".join(f"{number} {word}" for number, word in parts if number)
    return f"{whole} ({extra})" if extra else str(whole)


def grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in the order in which they first come. No side effects."""
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    if number < base:
        return f"{number:.0f}"
    for unit in units[1:]:
        number /= base
        if number < 999.5 or unit == units[-1]:
            break
    return f"{number:.1f}{unit}" if number < 9.95 else f"{number:.0f}{unit}"


def exact(number: float) -> str:
    """Return a number as text that gives the same number back, without a needless point. No side effects."""
    return f"{int(number)}" if number == int(number) else repr(number)


# Points in time and sizes as a user types them. No side effects.


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = r"(?a)(?:\d+(?:\.\d+)?\s*(?:ms|s|min|m|h|d|w)\s*)+"
_PART = r"(?a)(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)"
_CLOCK = r"(?a)(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?"
_HOURS = r"(?a)(\d{1,6}):([0-5]\d):([0-5]\d)"
_SIZE = r"(?ai)(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?"
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SHOWN = 40


def point_in_time(option: str, text: str, now: float) -> float:
    """Return a time in seconds since 1970: `10m` (so long before `now`), `2026-11-24T10:00`, `10:00` (the last one).

    Without an offset or Z a time is local.

    Raises:
        UsageError: it is none of these.
    """
    word = text.strip()
    try:
        if re.fullmatch(_DURATION, word):
            return now - sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, word))
        clock = re.fullmatch(_CLOCK, word)
        if clock is not None:
            return _last(int(clock[1]), int(clock[2]), float(clock[3] or 0), now)
        return datetime.datetime.fromisoformat(re.sub(r"[zZ]\Z", "+00:00", word)).timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{option}: expected a duration (10m, 1h30m), a time (10:00) or a date (2026-11-24T10:00), "
            f"found {text[:_SHOWN]!r}"
        ) from None


def _last(hour: int, minute: int, second: float, now: float) -> float:
    today = datetime.datetime.fromtimestamp(now)
    time = today.replace(hour=hour, minute=minute, second=int(second), microsecond=int(second % 1 * 1_000_000))
    return (time if time <= today else time - datetime.timedelta(days=1)).timestamp()


def lasting(option: str, text: str) -> float:
    """Return a time in seconds, more than 0: `90m`, `1h30m`, `1:30:00`, or a number of seconds.

    Raises:
        UsageError: it is none of these.
    """
    found = seconds_of(text)
    if not found:
        raise UsageError(
            f"{option}: expected a time such as 90m, 1h30m, 1:30:00 or 5400 (seconds), found {text[:_SHOWN]!r}"
        )
    return found


def seconds_of(text: str) -> float | None:
    """Return a time in seconds: `90m`, `1h30m`, `1:30:00`, or a number of seconds; None if it is none of these."""
    word = text.strip()
    if re.fullmatch(_DURATION, word):
        return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, word))
    if clock := re.fullmatch(_HOURS, word):
        return int(clock[1]) * 3600 + int(clock[2]) * 60 + int(clock[3])
    return float(word) if re.fullmatch(r"\d{1,9}(\.\d+)?", word, re.ASCII) else None


def parse_size(option: str, text: str, low: int) -> int:
    """Return a number of bytes, from `low` on: `500000`, `100M`, `1.5GiB`; units are powers of 1024.

    Raises:
        UsageError: it is none, or less.
    """
    found = re.fullmatch(_SIZE, text.strip())
    number = int(float(found[1]) * 1024 ** _POWERS[found[2].lower()]) if found else 0
    if found is None or not low <= number < 2**62:
        least = size(low)
        raise UsageError(f"{option}: expected a size from {least} on, such as 100M or 2G, found {text[:_SHOWN]!r}")
    return number


# Words and shells: when a command needs one, and how words are quoted for a reader. No side effects.
#
# Nothing that distrun executes passes through a shell unless the user's own command is shell text. Quoting here is
# for what is shown (the dry run, reports): pasted into bash, it gives the same words.


SHELL_CHARACTERS = frozenset(" \t\n\r|&;<>()$`\\\"'*?[]{}~!#")
"""Any of these in the only word of a command makes it shell text."""

BUILTINS = frozenset(("alias", "cd", "eval", "exit", "export", "set", "shopt", "source", "ulimit", "umask", "unset"))
"""Commands that only a shell has."""

PYTHON = r"(?:.*/)?(?:python|pypy)[\d.]*\Z"
"""Names of interpreters of Python."""

_QUIET = {
    "bash": "put this first into ~/.bashrc there: case $- in *i*) ;; *) return ;; esac",
    "zsh": "put this first into ~/.zshenv there: [[ -o interactive ]] || return",
    "csh": "put this first into ~/.cshrc there: if (! $?prompt) exit",
    "tcsh": "put this first into ~/.tcshrc there (~/.cshrc if there is none): if (! $?prompt) exit",
    "fish": "in ~/.config/fish/config.fish there, put what prints between these lines: if status is-interactive; end",
}

_CONTROL = "[\x00-\x1f\x7f\udc80-\udcff]"


def to_argv(words: Sequence[str], shell: bool | None = None) -> tuple[str, ...]:
    """Return what is executed for the words that the user typed. No side effects.

    Several words are executed exactly as they stand. A single word with white space or shell characters is the
    quoted form of launch.py and runs by `bash -c`. `shell` True (--shell) gives the words, joined by blanks, to
    `bash -c` in any case; False (--no-shell) executes them exactly in any case.
    """
    if shell is None:
        shell = len(words) == 1 and bool(SHELL_CHARACTERS & set(words[0]))
    if shell:
        return ("bash", "-c", " ".join(words))
    return tuple(words)


def python_words(words: Sequence[str], shell: bool | None = None) -> Sequence[str]:
    """Return the words of a command as they are executed; of shell text only if it is a Python and plain words.

    Of other shell text it is not known what is executed: then there are none. No side effects.
    """
    argv = to_argv(words, shell)
    if argv[:2] != ("bash", "-c") or argv == tuple(words):
        return argv
    found = argv[2].split()
    is_plain = not (SHELL_CHARACTERS - {" ", "\t"}) & set(argv[2].strip())
    return found if is_plain and found and re.match(PYTHON, found[0]) else ()


def python_script(words: Sequence[str], shell: bool | None = None) -> str:
    """Return the script of a command `python [options] SCRIPT ...`; empty if it is something else. No side effects."""
    rest = iter(python_words(words, shell))
    if not re.match(PYTHON, next(rest, "")):
        return ""
    for word in rest:
        if not word.startswith("-"):
            return word
        if re.fullmatch("-[bBdEiIOPqRsSuv]*[WX]|--check-hash-based-pycs", word):
            next(rest, "")
        elif word == "-" or (not word.startswith("--") and re.search("[cmhVx?]", word)):
            return ""
    return ""


def quiet(shell: str) -> str:
    """Return how to keep a login shell, a path or empty, from printing where there is no terminal. No side effects."""
    name = shell.rpartition("/")[2]
    other = f"let the start-up files of {name or 'the login shell'} there print only where there is a terminal"
    return _QUIET.get(name, other)


def quote(word: str) -> str:
    """Return `word` so that bash reads it back as the same bytes; control characters and stray bytes as $'..'."""
    if not re.search(_CONTROL, word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{re.sub(_CONTROL, _escape, escaped)}'"


def join(words: Iterable[str]) -> str:
    """Return a command as one line that bash reads back as the same words."""
    return " ".join(map(quote, words))


def _escape(match: re.Match[str]) -> str:
    character = match.group(0)
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in known:
        return known[character]
    code = ord(character)
    # A lone surrogate stands for a byte that was no UTF-8 (os.fsdecode); three octal digits, so that a digit
    # that follows is not taken for a part of it.
    return f"\\{(code - 56320 if code >= 56448 else code):03o}"
