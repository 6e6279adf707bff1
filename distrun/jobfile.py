"""Reads and writes job files: the options of `distrun launch`, its command and its variables as TOML.

    workers = 4
    hosts = ["h1", "h2"]
    run = '''
    python train.py
    '''
    [worker]
    gpus = 1
    [env]
    OMP_NUM_THREADS = 4
    HF_TOKEN = {file = "~/.config/hf-token"}
    [profile.small]
    workers = 1

The keys are those of the table of options (`Option.path`). The same form is read from `[tool.distrun]` of a
pyproject.toml and from the user's `$XDG_CONFIG_HOME/distrun/config.toml` (`~/.config` where that is unset), which has
a section for each engine besides. All errors of a file are found, each with its line and column.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distrun.errors import HostsError, PlacedError, UsageError
from distrun.formats import exact
from distrun.hosts.grammar import Finding, error_of
from distrun.options import (
    BY_KEY,
    COUNT,
    FLAG,
    MERGED,
    ROWS,
    SECONDS,
    SIZE,
    SWITCH,
    TIMES,
    WORDS,
    Layer,
    Option,
    Sourced,
    user_path,
)
from distrun.request import FILED, setting
from distrun_runtime.contract.plan import ROLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOOL = ("tool", "distrun")
"""The table of a pyproject.toml."""

_KEYS = {row.path: row for row in ROWS if not row.typed_only}
_COMMANDS = (("command",), ("run",))
_OF_SECTIONS = ("gpu_resource", "image", "memory", "mpirun", "pe", "python", "shell")
"""Keys of engines' sections that are called as options."""
_OF_E115 = ("workers", "hosts", "hostfile", "servers")
"""Options of which one has to change if a job does not fit on its hosts, the first that a file gives."""
_TYPED = {name: row for row in ROWS for name in (row.name, *row.name.split("/"))}
_SOUGHT = "distrun-sought-key"
_BARE = r"[A-Za-z0-9_-]+"
_CLEARER = {
    "Invalid value": "expected a text in straight quotes, a number, true, false, [ or {",
    "Cannot overwrite a value": "this key is already above",
    "Illegal character '\\n'": "expected a quote before the end of the line",
    "Unclosed array": "expected a comma or ]",
    "Expected '=' after a key in a key/value pair": "expected KEY = VALUE",
    "Expected newline or end of document after a statement": "expected the end of the line after the value",
}
"""What the parser says, in other words."""


class JobFile(NamedTuple):
    """What one file gives."""

    layer: Mapping[str, Sourced]
    profiles: Mapping[str, Mapping[str, Sourced]]
    engines: Mapping[str, Mapping[str, str]]
    """The sections of engines; only the user's file has them."""


class _InvalidFileError(PlacedError):
    what = "the job file or configuration"


def configured(section: str, env: Mapping[str, str], engines: Callable[[], Collection[str]]) -> Mapping[str, str]:
    """Return the values of an engine's section of the user's file; none if there is no file, or no such section.

    Raises:
        UsageError: the file cannot be read or understood.
    """
    path = Path(user_path(env))
    return load(path, engines=engines).engines.get(section, {}) if path.is_file() else {}


def load(
    path: Path,
    below: tuple[str, ...] = (),
    engines: Callable[[], Collection[str]] | None = None,
    content: bytes | None = None,
) -> JobFile:
    """Read a file.

    Arguments:
        path: the file.
        below: the table that holds everything, `TOOL`; empty: the whole file.
        engines: gives the names that sections of engines may have; None: it may have none.
        content: what was read of it; None: it is read here.

    Raises:
        UsageError: it cannot be read or understood.
    """
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
    except (OSError, ValueError) as err:
        raise UsageError(f"cannot read {path}: {getattr(err, 'strerror', None) or err}") from err
    return parse(text, str(path), path.absolute().parent, below, engines)


def layers(file: str | os.PathLike[str], profile: str, others: Sequence[JobFile] = ()) -> list[Layer]:
    """Return what a job file and other files give, the best first; a profile is better than the rest of its file.

    Arguments:
        file: the job file; empty: there is none.
        profile: the name of a profile, which at least one file has; empty: none is wanted.

    Raises:
        UsageError: the job file cannot be read or understood, or there is no such profile.
    """
    mine = [load(Path(file))] if file else []
    names = {name for each in (*mine, *others) for name in each.profiles}
    if profile and profile not in names:
        known = f"the files have {', '.join(sorted(names))}" if names else "no file has any"
        hint = f"name one of these, or add a table [profile.{profile}]"
        raise UsageError(f"--profile: there is no profile {profile!r}; {known}", hint)
    return [
        layer
        for files in (mine, others)
        for layer in (*(each.profiles.get(profile, {}) for each in files), *(each.layer for each in files))
    ]


def parse(
    text: str,
    source: str,
    folder: Path,
    below: tuple[str, ...] = (),
    engines: Callable[[], Collection[str]] | None = None,
) -> JobFile:
    """Return what a file says. No side effects.

    Arguments:
        text: the file.
        source: what the file is called in messages and as an origin.
        folder: what relative paths in it are relative to.
        below, engines: as of `load`.

    Raises:
        UsageError: all that is wrong in it.
    """
    try:
        data: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        at = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)\Z", str(err))
        lines = text.split("\n")
        line, column = (int(at[1]), int(at[2])) if at and at[1] else (len(lines), len(lines[-1]) + 1)
        what = str(err)[: at.start()] if at else str(err)
        raise _error([Finding(source, line, column, "", _CLEARER.get(what, what), lines[line - 1])]) from None
    for name in below:
        data = data.get(name, {}) if isinstance(data, dict) else {}
    reader = _TableReader(text, source, folder)
    if not isinstance(data, dict):
        reader.wrong(below, "expected a table", is_value=True)
        data = {}
    profiles = data.pop("profile", {})
    sections: dict[str, dict[str, str]] = {}
    if engines is not None and any(isinstance(each, dict) for each in data.values()):
        for name in engines():
            if isinstance(data.get(name), dict):
                sections[name] = reader.section((*below, name), data.pop(name))
    layer = reader.layer(data, below, source)
    found = {}
    if not isinstance(profiles, dict):
        reader.wrong((*below, "profile"), "expected tables, such as [profile.lab]", is_value=True)
        profiles = {}
    for name, each in profiles.items():
        if isinstance(each, dict):
            found[name] = reader.layer(each, (*below, "profile", name), f"{source} [profile.{name}]")
        else:
            reader.wrong((*below, "profile", name), f"expected a table: [profile.{name}]", is_value=True)
    if reader.findings:
        raise _error(sorted(reader.findings, key=lambda each: (each.line, each.column)))
    return JobFile(layer, found, sections)


def layer(data: Mapping[str, Any], origin: str) -> Mapping[str, Sourced]:
    """Return what a table gives that is in no file, with the types of TOML. Paths are relative to the current folder.

    Raises:
        UsageError: all that is wrong in it.
    """
    reader = _TableReader("", "", Path.cwd())
    found = reader.layer(data, (), origin)
    if reader.findings:
        raise UsageError("\n".join(f"{origin}: {each.text}" for each in reader.findings))
    return found


def placed(err: UsageError, given: Layer) -> UsageError:
    """Return an error of options with its place in the file that gives the option; the same error if no file does."""
    if isinstance(err, HostsError):
        return error_of([_placed_host(each, given) for each in err.findings], err.hint) if err.findings else err
    if str(err).startswith("E115: "):
        places = [given[key].places[-1] for key in _OF_E115 if key in given and given[key].places]
        return _error([reader.finding(path, str(err), is_value=True) for reader, path in places[:1]]) if places else err
    # The message begins with an option, with --env and a variable, or with a variable.
    text, (first, second, *_) = str(err), [*re.findall(r"-[\w/-]+|\w+", str(err)), "", ""]
    row = _TYPED.get(first)
    for key in MERGED if row is None else (row.key,):
        for reader, path in reversed(given[key].places if key in given else ()):
            own = (*path, first if row is None else second)
            if key in MERGED and reader.position(own) is not None:
                path = own
            elif row is None:
                continue
            text = text if row is None else row.path[-1] + text.removeprefix(first)
            return _error([reader.finding(path, text, is_value=True)], err.hint)
    return err


def unused(given: Layer) -> PlacedError | None:
    """Return the error that what a launch lacks, its size or command, is in profiles of its file that are not used.

    None if it lacks neither, or no profile has it. Reads the file again.
    """
    lacking = {"workers"} - {*given}
    if given.keys().isdisjoint({"command", "run"}):
        lacking |= {"command", "run"}
    if "file" not in given or not lacking:
        return None
    findings = []
    for name, profile in load(Path(given["file"].value)).profiles.items():
        for key in lacking & profile.keys():
            reader, path = profile[key].places[-1]
            use = f"move it above that table, or type --profile {name}"
            findings.append(reader.finding(path, f"{key} is in [profile.{name}], which is not used: {use}"))
    return _error(sorted(findings, key=lambda each: each.line)) if findings else None


def _placed_host(found: Finding, given: Layer) -> Finding:
    """Return an error of hosts at the place of the host in a file that lists them; as it is if it is of another."""
    key = "hosts" if found.source == BY_KEY["hosts"].name else "hostfile" if not found.line else ""
    if not (key in given and given[key].places):
        return found
    from distrun.hosts.ranges import split

    host = next((item for at, item in reversed(split(found.shown, ",\n")) if at < found.column), "")
    reader, path = given[key].places[-1]
    here: Finding = reader.finding(path, f"{found.code}: {found.text}", is_value=True, piece=host)
    return here


def _error(findings: list[Finding], hint: str = "") -> PlacedError:
    return _InvalidFileError("\n".join(map(str, findings)), hint, len(findings))


class _TableReader:
    """Turns tables of one file into values as they would be typed, and collects what is wrong."""

    def __init__(self, text: str, source: str, folder: Path) -> None:
        self.text, self.source, self.folder = text, source, folder
        self.findings: list[Finding] = []

    def layer(self, data: Mapping[str, Any], base: tuple[str, ...], origin: str) -> dict[str, Sourced]:
        """Return the values of a table, by the keys of options."""
        found: dict[str, Sourced] = {}
        for path, value in self._leaves(data, (), base):
            row = _KEYS.get(path)
            places = ((self, (*base, *path)),) if self.text else ()
            try:
                if path in _COMMANDS:
                    found[path[0]] = Sourced(_command(path[0], value), origin, places)
                elif row is None:
                    self.wrong((*base, *path), _unknown(path, isinstance(value, dict)))
                    if isinstance(value, dict):
                        for name in value:
                            self._is_misplaced((*base, *path), name, base)
                elif path[-1] == "env":
                    found[row.key] = Sourced(tuple(self._variables(value, path, base)), origin, places)
                else:
                    found[row.key] = Sourced(self._typed(row, value), origin, places)
            except UsageError as err:
                self.wrong((*base, *path), str(err), is_value=True)
        if "run" in found and "command" in found:
            self.wrong((*base, "run"), "run and command contradict each other: give one of them")
        return found

    def section(self, path: tuple[str, ...], data: Mapping[str, Any]) -> dict[str, str]:
        """Return the values of an engine's section as texts."""
        found = {}
        for key, value in data.items():
            if key not in _OF_SECTIONS and self._is_misplaced(path, key, path[:-1]):
                pass
            elif isinstance(value, (str, int)):
                found[key] = ("yes" if value else "no") if isinstance(value, bool) else str(value)
            else:
                self.wrong((*path, key), f"{key}: expected a text, found {_toml(value)}", is_value=True)
        return found

    def _leaves(
        self, data: Mapping[str, Any], at: tuple[str, ...], base: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], Any]]:
        for key, value in data.items():
            if not at and key in ROLES:
                if isinstance(value, dict):
                    yield from self._leaves(value, (key,), base)
                else:
                    text = f"{key}: expected a table, [{key}]"
                    self.wrong((*base, key), f"{text}; how many there are is {key}s = N", is_value=True)
            else:
                yield (*at, key), value

    def _typed(self, row: Option, value: Any) -> Any:
        """Return a value as it would be typed. Raises UsageError."""
        name = row.path[-1]
        if row.kind in (FLAG, SWITCH):
            return _expect(name, "true or false", value, isinstance(value, bool))
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if row.kind == TIMES:
            return _expect(name, "a whole number", value, is_number and value in range(10))
        typed: str | tuple[str, ...]
        if row.kind in (COUNT, SECONDS):
            what = "a whole number" if row.kind == COUNT else "a number of seconds"
            typed = exact(_expect(name, what, value, is_number and (row.kind == SECONDS or value == int(value))))
        elif row.kind == SIZE and is_number:
            typed = exact(value)
        elif row.kind == WORDS or (isinstance(value, list) and (row.key == "hosts" or row.default == ())):
            texts = [value] if isinstance(value, str) else value
            is_right = isinstance(texts, list) and all(isinstance(each, str) for each in texts)
            _expect(name, "texts in brackets", value, is_right)
            typed = tuple(map(self._local, texts) if row.is_path else texts) if row.kind == WORDS else ",".join(texts)
        else:
            text: str = _expect(name, "a text in quotes", value, isinstance(value, str))
            typed = self._local(text) if row.is_path else text
        row._replace(name=name).read(typed)
        return typed

    def _variables(self, value: Any, path: tuple[str, ...], base: tuple[str, ...]) -> Iterator[str]:
        """Yield the words of `--env` or `--env-ROLE` that a table means."""
        forms = 'a text, a number, {file = "PATH"} or {forward = true}' if path == ("env",) else "a text or a number"
        for name, each in _expect("env", "a table", value, isinstance(value, dict)).items():
            quoted = f'; if you mean a variable, quote its name: "{name}"'
            if self._is_misplaced((*base, *path), name, base, quoted):
                continue
            try:
                if isinstance(each, (str, int, float)) and not isinstance(each, bool):
                    text = each if isinstance(each, str) else exact(each)
                    yield f"{setting('env', name, text).name}={text}"
                elif path == ("env",) and each == {"forward": True}:
                    yield name
                elif path == ("env",) and isinstance(each, dict) and [*map(type, each.values())] == [str]:
                    _expect(name, forms, each, "file" in each)
                    yield f"{setting('env', name, '').name}@{self._local(each['file'])}"
                else:
                    _expect(name, forms, each, False)
            except UsageError as err:
                self.wrong((*base, *path, name), str(err), is_value=True)

    def _is_misplaced(self, at: tuple[str, ...], name: str, base: tuple[str, ...], more: str = "") -> bool:
        """Note an option that is in a table of other things; return whether it is one, and begins its line unquoted.

        Arguments:
            at: the table.
            name: the key.
            base: the table of all options.
            more: what else is said.
        """
        if not (self.text and (tables := _tables_of(name))):
            return False
        above = at[len(base) : -1]
        table = ".".join((*base, *(above if above in tables else tables[0])))
        move = f"move it into [{table}]" if table else "move it above all tables"
        at_key = self.finding((*at, name), f"{name} is an option: {move}{more}")
        if at_key.shown[: at_key.column - 1].strip():
            return False
        self.findings.append(at_key)
        return True

    def _local(self, path: str) -> str:
        return os.path.normpath(self.folder / os.path.expanduser(path)) if path not in ("", "-") else path

    def wrong(self, path: tuple[str, ...], text: str, is_value: bool = False) -> None:
        """Note an error at a key, or at its value."""
        self.findings.append(self.finding(path, text, is_value))

    def finding(self, path: tuple[str, ...], text: str, is_value: bool = False, piece: str = "") -> Finding:
        """Return an error at a key, at its value, or at a piece of its value."""
        place = self.position(path) or 0
        if is_value and (equals := re.compile(r"""["']?\s*=\s*""").match(self.text, place + len(path[-1]))):
            place = equals.end()
        apart = r"""[^\s"',]"""
        if piece and (found := re.compile(f"(?<!{apart}){re.escape(piece)}(?!{apart})").search(self.text, place)):
            place = found.start()
        start = self.text.rfind("\n", 0, place) + 1
        line = self.text[start:].partition("\n")[0].rstrip("\r")
        return Finding(self.source, self.text.count("\n", 0, place) + 1, place - start + 1, "", text, line)

    def position(self, path: tuple[str, ...]) -> int | None:
        """Return where the text has a key: where another key in its place makes another table of it."""
        for match in re.finditer(rf"(?<![\w-]){re.escape(path[-1])}(?![\w-])", self.text):
            try:
                found = tomllib.loads(self.text[: match.start()] + _SOUGHT + self.text[match.end() :])
            except tomllib.TOMLDecodeError:
                continue
            for name in path[:-1]:
                found = found.get(name, {}) if isinstance(found, dict) else {}
            if isinstance(found, dict) and _SOUGHT in found:
                return match.start()
        return None


def _tables_of(name: str) -> list[tuple[str, ...]]:
    """Return the tables that have an option of that name; it may be that of the command line, or have `_` for `-`."""
    name = name.replace("_", "-")
    found = [path[:-1] for path, row in _KEYS.items() if name == path[-1] or f"--{name}" in row.name.split("/")]
    return [*found, *(path[:-1] for path in _COMMANDS if name == path[-1])]


def _expect(name: str, what: str, value: Any, is_right: bool) -> Any:
    if not is_right:
        quotes = " without quotes" if isinstance(value, str) and re.search("number|true", what) else ""
        raise UsageError(f"{name}: expected {what}{quotes}, found {_toml(value)}")
    return value


def _command(key: str, value: Any) -> str | tuple[str, ...]:
    """Return the words of `command`, or the script of `run`. Raises UsageError."""
    if key == "run":
        return str(_expect(key, "a text, run by bash", value, isinstance(value, str) and bool(value.strip())))
    words = [value] if isinstance(value, str) else value
    is_right = isinstance(words, list) and all(isinstance(word, str) for word in words) and words not in ([], [""])
    return tuple(_expect(key, "a command: texts in brackets, or one text", value, is_right) and words)


def _unknown(path: tuple[str, ...], is_table: bool) -> str:
    """Return the message for a key that does not exist, with what may have been meant."""
    import difflib  # for a mistake only

    if is_table and len(path) == 1:
        near = difflib.get_close_matches(path[0], [*ROLES, "env", "environment", "profile"], n=1)
        hint = (
            f"did you mean [{near[0].replace('ironment', '')}]?"
            if near
            else "an engine's section is read from ~/.config/distrun/config.toml only"
        )
        return f"unknown table [{path[0]}]: {hint}"
    table, key = path[:-1], path[-1].replace("_", "-")
    options = {name.lstrip("-"): row for row in _KEYS.values() for name in row.name.split("/")}
    known = {each[-1]: each for each in (*_KEYS, *_COMMANDS) if each[:-1] == table}
    if not table:
        known.update({role: (role,) for role in ROLES}, profile=("profile",))
    meant = options[key].path if key in options else known.get(key)
    if meant is None:
        near = difflib.get_close_matches(key, [*known, *options], n=1)
        meant = (known.get(near[0]) or options[near[0]].path) if near else None
    wrong = f"unknown key {path[-1]!r}" + (f" in [{table[0]}]" if table else "")
    if meant is None and re.fullmatch("[A-Z][A-Z0-9_]*", path[-1]):
        return f"{wrong}: variables are below [{'.'.join((*table, 'env'))}]"
    if meant in (None, path):  # A profile has no profiles.
        return wrong
    place = "" if meant[:-1] == table else f" in [{meant[0]}]" if meant[:-1] else ", above all tables"
    return f"{wrong}: did you mean {meant[-1]}{place}?"


# ---------------------------------------------------------------------- writing


def write(given: Mapping[str, Sourced], has_origins: bool = False) -> str:
    """Return the job file that gives these values. No side effects.

    `has_origins`: each line ends with a comment that says where the value was given.

    Raises:
        UsageError: a value holds bytes that are no UTF-8.
    """
    tables: dict[tuple[str, ...], list[str]] = {}

    def add(table: tuple[str, ...], name: str, value: Any, origin: str) -> None:
        is_long = isinstance(value, str) and "\n" in value
        is_like_option = table[-1:] == ("env",) and _tables_of(name)
        key = _toml(name) if is_like_option else _key(name)
        text = f"{key} = {_script(value) if is_long else _toml(value)}"
        tables.setdefault(table, []).append(f"{text}  # {origin}" if has_origins else text)

    for path, key in ((("command",), "command"), (("run",), "run"), *((row.path, row.key) for row in ROWS)):
        if key not in given:
            continue
        value, origin, _ = given[key]
        if key in MERGED:
            for name, each in dict(map(_variable, value)).items():  # the last word wins
                add(path, name, each, origin)
        else:
            add(path[:-1], path[-1], _natural(key, value), origin)
    parts = []
    for table, lines in sorted(tables.items()):  # those above all tables first
        parts.append("\n".join([*([f"[{'.'.join(table)}]"] if table else []), *lines]) + "\n")
    return "\n".join(parts)


def _natural(key: str, value: Any) -> Any:
    """Return a value that was typed as TOML has it: numbers as numbers."""
    if key in BY_KEY and BY_KEY[key].kind in (COUNT, SECONDS):
        return int(value) if BY_KEY[key].kind == COUNT else float(value)
    return value


def _variable(word: str) -> tuple[str, Any]:
    """Return the name and the value in a table of variables that a word of `--env` or `--env-ROLE` means."""
    if filed := re.match(FILED, word, re.DOTALL):
        return filed[1], {"file": filed[2]}
    if pair := re.match(r"([^=:]*)[=:](.*)\Z", word, re.DOTALL):
        return pair[1], pair[2]
    return word, {"forward": True}


def _key(name: str) -> str:
    return name if re.fullmatch(_BARE, name) else _toml(name)


def _toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, str):
        return f'"{_escaped(value)}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return exact(value) if math.isfinite(value) else str(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{%s}" % ", ".join(f"{_key(name)} = {_toml(each)}" for name, each in value.items())
    return str(value)  # a date


def _script(text: str) -> str:
    """Return a text over several lines."""
    lines = re.sub(r'"(?=""|\Z)', r'\\"', _escaped(text, keeps='\n\t"'))
    return f'"""\n{lines}"""'


def _escaped(text: str, keeps: str = "") -> str:
    short = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"a job file cannot hold bytes that are no UTF-8: {text!r}") from None

    def escape(match: re.Match[str]) -> str:
        character = match[0]
        return character if character in keeps else short.get(character, f"\\u{ord(character):04x}")

    return re.sub(r'[\x00-\x1f\x7f"\\]', escape, text)
