"""Words and shells: when a command needs one, and how words are quoted for a reader. Pure.

Nothing that distrun executes passes through a shell unless the user's own command is shell text. Quoting here is
for what is shown (the dry run, reports): pasted into bash, it gives the same words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

SHELL_CHARACTERS = frozenset(" \t\n\r|&;<>()$`\\\"'*?[]{}~!#")
"""Any of these in the only word of a command makes it shell text."""

BUILTINS = frozenset(("alias", "cd", "eval", "exit", "export", "set", "shopt", "source", "ulimit", "umask", "unset"))
"""Commands that only a shell has."""

_QUIET = {
    "bash": "put this first into ~/.bashrc there: case $- in *i*) ;; *) return ;; esac",
    "zsh": "put this first into ~/.zshenv there: [[ -o interactive ]] || return",
    "csh": "put this first into ~/.cshrc there: if (! $?prompt) exit",
    "tcsh": "put this first into ~/.tcshrc there (~/.cshrc if there is none): if (! $?prompt) exit",
    "fish": "in ~/.config/fish/config.fish there, put what prints between these lines: if status is-interactive; end",
}

_CONTROL = re.compile("[\x00-\x1f\x7f\udc80-\udcff]")


def to_argv(words: Sequence[str], shell: bool | None = None) -> tuple[str, ...]:
    """Return what is executed for the words that the user typed. Pure.

    Several words are executed exactly as they stand. A single word with white space or shell characters is the
    quoted form of launch.py and runs by `bash -c`. `shell` True (--shell) gives the words, joined by blanks, to
    `bash -c` in any case; False (--no-shell) executes them exactly in any case.
    """
    if shell is None:
        shell = len(words) == 1 and bool(SHELL_CHARACTERS & set(words[0]))
    if shell:
        return ("bash", "-c", " ".join(words))
    return tuple(words)


def quiet(shell: str) -> str:
    """Return how to keep a login shell, a path or empty, from printing where there is no terminal. Pure."""
    name = shell.rpartition("/")[2]
    other = f"let the start-up files of {name or 'the login shell'} there print only where there is a terminal"
    return _QUIET.get(name, other)


def quote(word: str) -> str:
    """Return `word` so that bash reads it back as the same bytes; control characters and stray bytes as $'..'."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_CONTROL.sub(_escape, escaped)}'"


def join(words: Iterable[str]) -> str:
    """Return a command as one line that bash reads back as the same words."""
    return " ".join(quote(word) for word in words)


def _escape(match: re.Match[str]) -> str:
    character = match.group(0)
    known = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
    if character in known:
        return known[character]
    code = ord(character)
    # A lone surrogate stands for a byte that was no UTF-8 (os.fsdecode); three octal digits, so that a digit
    # that follows is not taken for a part of it.
    return "\\%03o" % (code - 0xDC00 if code >= 0xDC80 else code)
