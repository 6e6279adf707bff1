"""Answers the shells: what may stand where the user pressed Tab.

The scripts in `completions/` call `distrun _complete SHELL WORD...`; the last word is the one before the cursor.
The answer is text. Its first line is `WHAT NUMBER`:

* `values N`: each line after it is a value, in zsh and fish with a tab and its meaning. The first N characters of the
  word stay; a value replaces the rest.
* `files N`, `dirs N`: the shell offers files or folders for what follows the first N characters of the word.
* `command N`: the N-th word, 0 being the program, begins a command that the shell completes as any other. In bash it
  is `programs 0` while that first word is typed.

This runs while the user types, so neither click nor a command is loaded: the options of all commands stand in
`completions/table.tsv` (`scripts/render-completion`). Of a job no more is read than its names. Values come from
folders and files that others may have written. Those that could change what is typed, by control characters or a
leading hyphen, are left out. zsh and fish quote what they insert; for bash it is done here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple, NoReturn

from distrun_runtime.contract import environ

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "completions")
SHELLS = ("bash", "zsh", "fish")
FLAG = "-"
"""Kind of an option that takes no value."""
DEADLINE_S = 3
"""How long the files that are read may take, on a file system that does not answer."""
NAMED = 100
"""Jobs whose names are read at most, the newest of each stem of an id."""
NESTED = 8
"""How deep files of ssh_config may include each other."""
_PLAIN = "_-+,./:=@%"
"""Characters besides letters and digits that mean nothing to bash within a word."""

Value = tuple[str, str]
"""What may be typed, and what it means."""


class OptionRow(NamedTuple):
    """A row of the table below a command."""

    names: Sequence[str]
    kind: str
    repeats: bool
    help: str


class CommandRow(NamedTuple):
    """A command of the table."""

    name: str
    help: str
    arguments: Sequence[str]
    """The kinds of its arguments; the last one may be `KIND...`, any number of them."""
    options: Sequence[OptionRow]


class Typed(NamedTuple):
    """What stands before the word that is completed."""

    values: Mapping[str, Sequence[str]]
    """By the first name of an option."""
    arguments: Sequence[str]

    def value(self, name: str) -> str:
        """Return the last value of an option; empty: none."""
        return self.values.get(name, ("",))[-1]


class Completions(NamedTuple):
    """See the module."""

    what: str
    number: int
    values: Sequence[Value] = ()


def main(words: Sequence[str]) -> NoReturn:
    """Answer `SHELL WORD...` on stdout, of bash `bash LINE`, and exit."""
    import signal

    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(DEADLINE_S)
    shell, *typed = words
    if shell == "bash":
        text = _for_bash(typed[0])
    else:
        found = answer(typed)
        escape = str.maketrans({"\\": "\\\\", ":": "\\:"}) if shell == "zsh" else {}
        mark = ":" if shell == "zsh" else "\t"
        text = _text(found, [value.translate(escape) + (help and mark + help) for value, help in found.values])
    with open(1, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    sys.exit(0)


def _text(found: Completions, lines: Iterable[str]) -> str:
    return "\n".join([f"{found.what} {found.number}", *lines, ""])


# ---------------------------------------------------------------------- bash


def _for_bash(line: str) -> str:
    words, quote, kept = split(line)
    found = answer(words[1:])
    if found == ("command", len(words) - 1, ()):  # the command's own first word
        found = Completions("programs", 0)
    lines = []
    for value, _ in found.values:
        whole = words[-1][: found.number] + value
        if not quote:
            lines.append("".join(each if each.isalnum() or each in _PLAIN else "\\" + each for each in whole[kept:]))
        elif all(each.isalnum() or each in _PLAIN for each in whole):
            lines.append(whole[kept:])
    return _text(found, lines)


def split(line: str) -> tuple[list[str], str, int]:
    """Return the words of a command line up to the cursor, without their quotes; the last one may be empty.

    Also the quote that is open at the end, and how many characters of the last word bash has put into words of its own,
    because it ends words at `=`, `:` and `@`. Nothing is expanded.
    """
    words, word, quote, kept = [], "", "", 0
    begun = False
    at = 0
    while at < len(line):
        each = line[at]
        at += 1
        if each == "\\" and quote != "'" and at < len(line):
            word, begun = word + line[at], True
            at += 1
        elif each == quote:
            quote = ""
        elif quote:
            word += each
        elif each in "'\"":
            quote, begun, kept = each, True, len(word)
        elif each.isspace():
            words += [word] if begun else []
            word, begun, kept = "", False, 0
        else:
            word, begun = word + each, True
            kept = len(word) if each in "=:@" else kept
    return [*words, word], quote, kept


# ---------------------------------------------------------------------- what may be typed


def answer(words: Sequence[str]) -> Completions:
    """Return what may stand in the place of the last of the words that follow the program's name."""
    *before, current = words or [""]
    table = _table()
    command = table["distrun"]
    values: dict[str, list[str]] = {}
    arguments: list[str] = []
    waiting: OptionRow | None = None
    is_over = False  # `--`: no options any more
    for at, word in enumerate(before, 1):
        if waiting is not None:
            values[waiting.names[0]].append(word)
            waiting = None
        elif word == "--" and not is_over:
            is_over = True
        elif len(word) > 1 and word.startswith("-") and not is_over:
            waiting = _note(command, word, values)
        elif f"{command.name} {word}" in table:
            command, values = table[f"{command.name} {word}"], {}
        elif _kind(command, len(arguments)) == "command":
            return Completions("command", at)
        else:
            arguments.append(word)
    typed = Typed(values, arguments)
    kind = _kind(command, len(arguments))
    if waiting is not None:
        return _of_kind(waiting.kind, typed, current, 0)
    if current.startswith("-") and not is_over:
        name, equals, value = current.partition("=")
        if equals:
            option = _option(command, name)
            return _of_kind(option.kind, typed, value, len(name) + 1) if option else Completions("values", 0)
        return Completions("values", 0, _begin(current, _options(command, values)))
    below = [(name.split()[-1], each.help) for name, each in table.items() if name.rpartition(" ")[0] == command.name]
    if below:  # else a word that is no command was typed
        return Completions("values", 0, () if arguments else _begin(current, below))
    if not kind:
        return Completions("values", 0, _begin(current, _options(command, values)))
    return Completions("command", len(words)) if kind == "command" else _of_kind(kind, typed, current, 0)


def _table() -> dict[str, CommandRow]:
    found: dict[str, CommandRow] = {}
    options: list[OptionRow] = []
    with open(os.path.join(FOLDER, "table.tsv"), encoding="utf-8") as file:
        for line in file:
            name, *cells = line.rstrip("\n").split("\t")
            if name:
                options = []
                found[name] = CommandRow(name, cells[0], cells[1].split(), options)
            else:
                options.append(OptionRow(cells[0].split(), cells[1], cells[2] == "+", cells[3]))
    return found


def _option(command: CommandRow, name: str) -> OptionRow | None:
    return next((option for option in command.options if name in option.names), None)


def _note(command: CommandRow, word: str, values: dict[str, list[str]]) -> OptionRow | None:
    """Note an option that was typed; return it if the next word is its value."""
    name, equals, value = word.partition("=")
    option = _option(command, name)
    if option is None and not word.startswith("--"):  # -n4, -vq
        option, equals, value = _option(command, word[:2]), "attached", word[2:]
    if option is None:
        return None
    given = values.setdefault(option.names[0], [])
    if option.kind == FLAG:
        return None
    if not equals:
        return option
    given.append(value)
    return None


def _options(command: CommandRow, values: Mapping[str, object]) -> Iterator[Value]:
    for option in command.options:
        if option.repeats or option.names[0] not in values:
            yield from ((name, option.help) for name in option.names)


def _kind(command: CommandRow, at: int) -> str:
    """Return the kind of an argument; empty: there is none any more."""
    last = command.arguments[-1] if command.arguments else ""
    kind = command.arguments[at] if at < len(command.arguments) else last if last.endswith("...") else ""
    return kind.removesuffix("...")


def _of_kind(kind: str, typed: Typed, word: str, kept: int) -> Completions:
    """Return the values of a kind that begin as the word does; `kept`: characters of the whole word in front of it."""
    if kind in ("files", "dirs"):
        return Completions(kind, kept)
    if kind.startswith("="):
        return Completions("values", kept, _begin(word, ((each, "") for each in kind[1:].split(","))))
    if kind == "hosts":
        before, comma, word = word.rpartition(",")
        kept += len(before + comma)
    from distrun_runtime.contract.facts import printable  # not for each word of a command

    values = _VALUES[kind](typed, word) if kind in _VALUES else ()
    safe = ((value, printable(help)) for value, help in values if not value.startswith("-") and value.isprintable())
    return Completions("values", kept, list(dict.fromkeys(_begin(word, safe))))


def _begin(word: str, values: Iterable[Value]) -> list[Value]:
    return [each for each in values if each[0].startswith(word)]


# ---------------------------------------------------------------------- jobs and their tasks


def _folders() -> list[str]:
    """Return the ids of all jobs, those first that changed last. They are not loaded: there may be a thousand."""
    times = {}
    try:
        with os.scandir(os.path.join(environ.state_folder(), "jobs")) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    times[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        pass
    return sorted(times, key=times.__getitem__, reverse=True)


def _file(job: str, name: str) -> str:
    return os.path.join(environ.state_folder(), "jobs", job, name)


def _is_over(job: str) -> bool:
    return os.path.exists(_file(job, "outcome.json"))


def _names(jobs: Iterable[str], word: str) -> Iterator[Value]:
    """Return the names of jobs, each with the id of the newest: an id begins with the name, see `JobStore.new_id`."""
    plain = takewhile(lambda each: each.isascii() and (each.isalnum() or each in "._"), word.lstrip("-._"))
    begin = "".join(plain)[:40].rstrip("._")
    newest: dict[str, str] = {}
    for job in jobs:
        stem = job.rpartition("-")[0]
        if stem.startswith(begin):
            newest.setdefault(stem, job)
    for job in list(newest.values())[:NAMED]:
        name = _json(_file(job, "request.json")).get("name")
        if isinstance(name, str) and name:
            yield name, f"the newest is {job}"


def _json(path: str) -> dict[str, object]:
    import json

    try:
        with open(path, "rb") as file:
            found = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _jobs(is_wanted: Callable[[bool], bool], typed: Typed, word: str) -> Iterator[Value]:
    states = {job: _is_over(job) for job in _folders()}
    chosen = {job: is_over for job, is_over in states.items() if is_wanted(is_over)} or states
    known = [(job, "over" if is_over else "not over") for job, is_over in chosen.items() if job not in typed.arguments]
    yield from known
    yield from _names(chosen, word)


def _tasks(typed: Typed, word: str) -> Iterator[Value]:
    """Return the tasks of the job that was typed, or of the latest one, and their roles."""
    jobs = _folders()
    wanted = typed.arguments[0] if typed.arguments else ""
    found = [job for job in jobs if job == wanted]
    found = found or [each.rpartition(" ")[2] for name, each in _names(jobs, wanted) if wanted and name == wanted]
    found = found or [job for job in jobs if job.startswith(wanted)]
    tasks = _json(_file(found[0], "state.json")).get("tasks") if found else ()
    rows = [row for row in tasks if isinstance(row, dict)] if isinstance(tasks, list) else []
    yield from ((str(row.get("name")), f"on {row.get('host')}") for row in rows)
    yield from ((str(row.get("role")), "all of the role") for row in rows)


# ---------------------------------------------------------------------- hosts, launchers, templates


def _hosts(typed: Typed, word: str) -> Iterator[Value]:
    from distrun.errors import HostsError
    from distrun.hosts import parse

    paths = [*typed.values.get("--hostfile", ()), *map(environ.text, parse.FILES)]
    for path in filter(None, paths):
        path = _expanded(path)
        try:
            found = parse.parse(_text_of(path), path, form=typed.value("--hostfile-format") or "auto", read=_text_of)
        except (HostsError, KeyError):
            continue
        yield from ((name, f"of {path}") for name in found.names)
    config = typed.value("--ssh-config")
    yield from _configured(_expanded(config or "~/.ssh/config"), [])


def _text_of(path: str) -> str:
    """Return the text of a file; of what is none, or cannot be read, an empty one."""
    path = _expanded(path)
    try:
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="surrogateescape") as file:
                return file.read()
    except OSError:
        pass
    return ""


def _configured(path: str, outer: list[str]) -> Iterator[Value]:
    """Return the hosts that an ssh_config and what it includes call by name."""
    import glob

    for line in _text_of(path).splitlines():
        keyword, *words = line.replace("=", " ", 1).replace('"', " ").split() or [""]
        if keyword.lower() == "host":
            yield from ((name, f"of {path}") for name in words if not set(name) & set("*?!"))
        elif keyword.lower() == "include" and len(outer) < NESTED:
            for word in words:  # a relative one is below ~/.ssh
                for each in sorted(glob.glob(os.path.join(_expanded("~/.ssh"), _expanded(word)))):
                    yield from _configured(each, [*outer, path])


def _expanded(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))


def _launchers(typed: Typed, word: str) -> Iterator[Value]:
    from distrun import backends

    names = backends.names() if _is_registered(backends.ENTRY_POINTS) else ("local", "ssh", *backends.ENGINES)
    return ((name, "") for name in names)


def _is_registered(group: str) -> bool:
    """Whether any distribution has entry points of a group. To load them all takes longer than a user waits."""
    for folder in sys.path:
        try:
            names = [name for name in os.listdir(folder) if name.endswith(".dist-info")]
        except OSError:
            continue
        if any(f"[{group}]" in _text_of(os.path.join(folder, name, "entry_points.txt")) for name in names):
            return True
    return False


def _templates(typed: Typed, word: str) -> Iterator[Value]:
    from distrun import templates

    return ((each.name, each.what) for each in templates.find_all().values())


_VALUES: Mapping[str, Callable[[Typed, str], Iterable[Value]]] = {
    "job": lambda typed, word: _jobs(lambda is_over: True, typed, word),
    "living": lambda typed, word: _jobs(lambda is_over: not is_over, typed, word),
    "ended": lambda typed, word: _jobs(lambda is_over: is_over, typed, word),
    "name": lambda typed, word: _names(_folders(), word),
    "task": _tasks,
    "host": _hosts,
    "hosts": _hosts,
    "launcher": _launchers,
    "template": _templates,
}
