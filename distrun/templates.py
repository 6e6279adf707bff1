"""Templates of the files that other programs read: finds them, checks the values that they take, and renders them.

A template is a file of `templates/` with placeholders `@{name}` or `@{name|quoting}`. Every other `$`, `@` or brace
belongs to the program that reads the file. A file that begins with a head is for users (`distrun template`); one
without is a part of a backend. The head is an INI file behind `#@`, and no part of what is rendered:

    #@ [template]
    #@ what = what it makes
    #@ tool = the program that reads it
    #@ use = what to type, one command a line
    #@ [user]                       one section for each value
    #@ what = the account
    #@ default = train              without it, a value has to be given; it may contain @{version}, distrun's own
    #@ accepts = a name of lower-case letters         what a message says that is expected
    #@ pattern = [a-z]+                               and the regular expression of it
"""

from __future__ import annotations

import configparser
import contextlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distrun.errors import UsageError
from distrun.version import __version__

HEAD = "#@"
SHOWN = 30
"""Characters of what is refused that a message shows: of a private key that is no more than its first words."""
VERSION = "version"
"""The placeholder of distrun's own version; no value of a template is named so."""
PLAIN = r"[A-Za-z0-9_.:/@+-]*"
"""What a value may consist of whose place has no quoting: it means nothing to a shell, in YAML or in a Dockerfile."""
_PLACE = re.compile(r"@\{(\w+)(?:\|(\w+))?\}")
_json = json.JSONEncoder(ensure_ascii=False).encode
QUOTINGS: Mapping[str, Callable[[str], str]] = {
    "": str,
    "yaml": _json,  # YAML 1.2, chapter 1.3: JSON is YAML
    # Of `$$`, Compose makes `$`, which else begins a variable of its own (compose-spec, "Interpolation").
    "compose": lambda value: _json(value).replace("$", "$$"),
    # So does Kubernetes, where `$(NAME)` is a variable ("Define Dependent Environment Variables").
    "args": lambda value: _json(shlex.split(value)).replace("$", "$$"),
    "words": lambda value: shlex.join(value.split()),  # of a shell
}
"""What is written for a value: of the name behind `|`. A rendered value has no line ends: `problems` refuses them."""


@dataclass(frozen=True)
class Value:
    """A value that a template takes. `default` is None if it has to be given; no `pattern`: any text."""

    name: str
    what: str
    default: str | None
    accepts: str
    pattern: str


@dataclass(frozen=True)
class Template:
    """A template for users: its name, the members of its head, and the text behind that."""

    name: str
    what: str
    tool: str
    use: tuple[str, ...]
    values: tuple[Value, ...]
    text: str


def folder() -> Path:
    """Return the folder of the templates: in the package, or beside it in a checkout.

    Raises:
        UsageError: there is none.
    """
    package = Path(__file__).resolve().parent
    for found in (package / "templates", package.parent / "templates"):
        if found.is_dir():
            return found
    raise UsageError("the templates are missing from this installation", "install distrun again")


def find_all() -> Mapping[str, Template]:
    """Return the templates for users by their names, sorted. Reads the files."""
    files = sorted(path for path in folder().iterdir() if path.is_file())
    return {path.stem: parse(path.stem, text) for path in files if (text := path.read_text("utf-8")).startswith(HEAD)}


def find(name: str) -> Template:
    """Return the template `name`.

    Raises:
        UsageError: there is none; names the nearest one.
    """
    known = find_all()
    if name not in known:
        raise UsageError(f"there is no template {name!r}{_near(name.lower(), known)}", "distrun template list")
    return known[name]


def parse(name: str, text: str) -> Template:
    """Split a template into its head and its text. No side effects."""
    lines = text.splitlines(keepends=True)
    size = next((at for at, line in enumerate(lines) if not line.startswith(HEAD)), len(lines))
    head = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    bare = "".join(line.removeprefix(HEAD).removeprefix(" ") for line in lines[:size])
    head.read_string(fill(bare, {VERSION: __version__}))
    about = head["template"]
    values = tuple(
        Value(name, each["what"], each.get("default"), each.get("accepts", ""), each.get("pattern", ""))
        for name, each in head.items()
        if name not in ("template", head.default_section)
    )
    return Template(
        name, about["what"], about["tool"], tuple(about["use"].strip().splitlines()), values, "".join(lines[size:])
    )


def problems(template: Template, words: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with the values given for a template (`NAME=VALUE`), one line each. No side effects."""
    known = {value.name: value for value in template.values}
    given = assigned(words)
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals:
            yield f"{_found(word)}: expected NAME=VALUE"
        elif name not in known:
            yield f"{_found(name)}: the template has no such value{_near(name, known)}"
    places = set(_PLACE.findall(template.text))
    for name, value in known.items():
        text = given.get(name, value.default)
        if text is None:
            yield f"{name}: missing: {value.what}"
        elif not text.isprintable():
            yield f"{name}: expected one line of printable characters, found {_found(text)}"
        elif value.pattern and not re.fullmatch(value.pattern, text):
            yield f"{name}: expected {value.accepts}, found {_found(text)}"
        elif (name, "") in places and not re.fullmatch(PLAIN, text):
            yield f"{name}: expected letters, digits and _ . : / @ + - only, found {_found(text)}"
        elif (name, "args") in places and not _is_split(text):
            yield f"{name}: expected words as of a shell, found a quote without its end: {_found(text)}"


def render(template: Template, words: Sequence[str] = ()) -> str:
    """Return the file that a template makes of values (`NAME=VALUE`; of a name that is given twice, the last one).

    Its first comment says by which command it was made. No side effects.

    Raises:
        UsageError: values are unknown, missing or not accepted; the message has all of them.
    """
    wrong = list(problems(template, words))
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise UsageError(
            f"template {template.name}: {len(wrong)} value{'s' if len(wrong) > 1 else ''} to correct:{lines}",
            f"distrun template show {template.name} describes the values; give them by --set NAME=VALUE",
        )
    values = {value.name: value.default or "" for value in template.values} | assigned(words)
    sets = [word for name, text in values.items() for word in ("--set", f"{name}={text}")]
    made = f"# Made by distrun {__version__}: {shlex.join(['distrun', 'template', 'render', template.name, *sets])}\n"
    text = fill(template.text, {**values, VERSION: __version__})
    # Some programs know a file by its first line: `#!/bin/sh`, `#cloud-config`.
    first = re.match(r"#\S.*\n", text)
    return text[: first.end()] + made + text[first.end() :] if first else made + text


def assigned(words: Sequence[str]) -> dict[str, str]:
    """Return names and values of words `NAME=VALUE`. No side effects."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a template's text with its placeholders replaced. No side effects.

    Raises:
        UsageError: it has a name that is not in `values`, or a quoting that is not in QUOTINGS.
    """

    def value(match: re.Match[str]) -> str:
        name, quoting = match.groups("")
        for word, known in ((name, values), (quoting, QUOTINGS)):
            if word not in known:
                names = ", ".join(sorted(filter(None, known)))
                raise UsageError(f"the template has {match.group()}; known names: {names}")
        return QUOTINGS[quoting](values[name])

    return _PLACE.sub(value, text)


def _is_split(text: str) -> bool:
    with contextlib.suppress(ValueError):
        shlex.split(text)
        return True
    return False


def _found(text: str) -> str:
    return repr(text if len(text) < SHOWN else text[:SHOWN] + "...")


def _near(word: str, known: Mapping[str, object]) -> str:
    import difflib  # for a mistake only

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known) or 'none'}"
