"""The page about messages: every error of the sources has a section there, and what it quotes is what they print.

A section begins with a comment that says which errors it is about, with their modules where it is not about all of
them: `errors: KVError distrun_runtime.ops distrun_runtime.store; kind dns; reason timeout`. Of several sections, the
one that names the longest part of a module's name has an error. `texts distrun.report` names where else
quotes come from.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from distrun_runtime.contract import facts

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ROOTS = {"DistrunError", "RuntimeFault", "ClickException"}
KINDS = {"SshFailure": 0, "PreflightFailure": 0, "FolderUnfit": 0, "Problem": 1, "StartFailed": 4}
"""What carries the kind of a problem with a host, and which of its arguments that is."""
CHECKS = {"CheckRow": 1, "_unusable": 1, "_space": 1}
"""The same, of the names of the doctor's checks."""
LEAST = 7
"""Characters of a quote that are the source's, at least; of a long one a quarter."""

Site = tuple[str, str]
"""An error: its class, `kind dns`, `check clock` or `reason timeout`; and the module that makes it."""


@cache
def sources() -> dict[str, list[ast.AST]]:
    """Return the syntax of the modules, by their names."""
    paths = sorted([*(ROOT / "distrun").rglob("*.py"), *(ROOT / "runtime").rglob("*.py")])
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("runtime.") for path in paths]
    return {name: list(ast.walk(ast.parse(path.read_text("utf-8")))) for name, path in zip(names, paths, strict=True)}


def last(node: ast.expr) -> str:
    """Return the last word of a dotted name."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def words(node: ast.expr, constants: Mapping[str, set[str]]) -> set[str]:
    """Return the texts that an expression may be, as far as that can be seen."""
    match node:
        case ast.Constant(str(text)) if text:
            return {text}
        case ast.IfExp():
            return words(node.body, constants) | words(node.orelse, constants)
        case ast.BoolOp():
            return {each for value in node.values for each in words(value, constants)}
    return constants.get(last(node), set())


def assigned(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """Return the texts that the names of a module are given."""
    found = {"KIND": {"gpus"}, **{name: {getattr(facts, name)} for name in ("PROGRAM", "SCRIPT", "IMPORT")}}
    for node in nodes:
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            pairs = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            for name, text in pairs:
                found.setdefault(last(name), set()).update(words(text, {}))
    return found


@cache
def errors() -> set[Site]:
    """Return every error that the sources make."""
    bases = {
        node.name: {last(base) for base in node.bases}
        for nodes in sources().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    classes = {*ROOTS, "UsageError"}  # also click's
    while more := {name for name, of in bases.items() if of & classes} - classes:
        classes |= more
    found = {(f"reason {reason}", "distrun_runtime.coordinator.failures") for reason in facts.REASONS[1:]}
    for module, nodes in sources().items():
        constants = assigned(nodes)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            name = last(call.func)
            if name in classes - {*KINDS}:
                found.add((name, module))
            is_check = name in CHECKS and ".doctor" in module and not any(last(each) == "OK" for each in call.args)
            if name in KINDS or is_check:
                at, word = (CHECKS[name], "check") if is_check else (KINDS[name], "kind")
                given = [*call.args[at : at + 1], *(each.value for each in call.keywords if each.arg == word)]
                found |= {(f"{word} {text}", module) for node in given for text in words(node, constants)}
    return found


@cache
def texts(module: str) -> list[list[str]]:
    """Return the texts of a module, each without what is put into it."""
    found = []
    parts = {id(each) for node in sources()[module] if isinstance(node, ast.JoinedStr) for each in node.values}
    for node in sources()[module]:
        match node:
            case ast.Constant() if id(node) in parts:
                continue
            case ast.JoinedStr():
                text = "".join(str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values)
            case ast.Constant(str()):
                text = str(node.value)
            case _:
                continue
        found.append(re.split(r"%[a-z]|\{[^{}]*\}", " ".join(text.split())))
    return found


def shared(text: list[str], quote: str) -> int:
    """Return how many characters of a text are in a quote, which may end with `...`; 0 if another message is quoted."""
    at, size, begun = 0, 0, quote.removesuffix(" ...")
    for piece in text:
        found = begun.find(piece, at)
        if found < 0:
            ends = [length for length in range(len(piece)) if begun[at:].endswith(piece[:length])]
            return size + max(ends) if begun != quote and max(ends) >= LEAST else 0
        at, size = found + len(piece), size + len(piece)
    return size


@cache
def sections() -> dict[str, tuple[list[str], list[str]]]:
    """Return what each section's comment names, and what the section quotes, by its heading."""
    parts = re.split(r"^##+ (.*)$", PAGE.read_text("utf-8"), flags=re.MULTILINE)[1:]
    found = {}
    for head, text in zip(parts[::2], parts[1::2], strict=True):
        comment = " ".join(" ".join(re.findall(r"<!-- errors: (.*?) -->", text, re.DOTALL)).split())
        quotes = "".join(re.findall(r"```text\n(.*?)```", text, re.DOTALL)).splitlines()
        if comment or quotes:
            found[head] = (comment.split("; "), quotes)
    return found


@cache
def sections_of(error: Site) -> list[str]:
    """Return the headings of the sections that an error belongs to: one, if the page is right."""
    name, module = error
    lengths: dict[str, int] = {}
    for head, (named, _) in sections().items():
        for known, *parts in (re.split(r" (?=distrun)", each) for each in named):
            if known == name and (fit := [len(part) for part in parts or [""] if is_part(module, part)]):
                lengths[head] = max(fit)
    return [head for head, length in lengths.items() if length == max(lengths.values())]


def is_part(module: str, package: str) -> bool:
    return not package or (module + ".").startswith(package + ".")


def test_every_error_has_one_section_of_the_page() -> None:
    wrong = {error: heads for error in errors() if len(heads := sections_of(error)) != 1}
    assert not wrong, "name these in the comment of one section of docs/troubleshooting.md"


def test_every_error_that_a_section_names_exists() -> None:
    for head, (named, _) in sections().items():
        for name, *parts in (re.split(r" (?=distrun)", each) for each in named):
            made_in = [*sources()] if name == "texts" else [module for known, module in errors() if known == name]
            assert made_in, (head, name)
            assert all(any(is_part(module, part) for module in made_in) for part in parts), (head, name, parts)
            assert not {"distrun", "distrun_runtime"} & {*parts}, "name the parts of a package"


def test_every_message_that_the_page_quotes_is_one_that_is_printed() -> None:
    wrong = []
    for head, (named, quotes) in sections().items():
        assert quotes, "%s quotes no message" % head
        more = [part for each in named if each.startswith("texts ") for part in each.split()[1:]]
        modules = {module for name, module in errors() if sections_of((name, module)) == [head]} | {*more}
        known = [text for module in modules for text in texts(module)]
        least = {quote: max(LEAST, len(quote) // 4) for quote in quotes}
        wrong += [(head, quote) for quote in quotes if not any(shared(text, quote) >= least[quote] for text in known)]
    assert not wrong


def test_every_reason_why_a_host_cannot_be_used_comes_with_what_to_do() -> None:
    """But where two releases of distrun met, or the text itself says it."""
    for module, nodes in sources().items():
        for call in (node for node in nodes if isinstance(node, ast.Call) and node.args):
            if last(call.func) in ("SshFailure", "PreflightFailure"):
                kinds = words(call.args[0], assigned(nodes))
                assert len(call.args) > 2 or kinds & {"protocol", "interface"}, ast.unparse(call) + " in " + module
