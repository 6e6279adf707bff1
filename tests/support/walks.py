"""Walks: which modules and functions of ours processes enter while they run, and the limits in limits.toml."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LIMITS = "limits.toml"
WALKING = Path(__file__).parent / "walking"
MAP = ROOT / "docs" / "overview.md"
IS_IMPORT = re.compile(r"class |<")
"""Names of what runs while a module is imported: classes are made, tables filled."""

Walk = dict[str, set[str]]
"""Names of functions, by module."""


def watched(out: Path, **more: str) -> dict[str, str]:
    """Return the variables by which a process writes what it enters to files that begin with `out`."""
    path = os.pathsep.join(filter(None, (str(WALKING), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "WALK_OUT": str(out), **more}


def files(out: Path, window: int | None = None) -> list[Path]:
    """Return what the processes have written: at their ends, or in a window."""
    ending = "json" if window is None else f"{window}.json"
    return list(out.parent.glob(f"{out.name}.*.{ending}"))


def walk(out: Path, window: int | None = None) -> Walk:
    """Return what all of the processes together entered until their ends, or in a window."""
    return together(json.loads(path.read_text()) for path in files(out, window))


def together(found: Iterable[Mapping[str, Iterable[str]]]) -> Walk:
    """Return what any of some walks entered."""
    entered: Walk = {}
    for each in found:
        for module, functions in each.items():
            entered.setdefault(module, set()).update(functions)
    return entered


def common(found: Sequence[Walk]) -> Walk:
    """Return what each of some walks entered."""
    shared = {
        module: names.intersection(*(each.get(module, ()) for each in found)) for module, names in found[0].items()
    }
    return {module: names for module, names in shared.items() if names}


def check(name: str, found: Walk) -> None:
    """Fail if a walk is longer than its limits."""
    limits = tomllib.loads((ROOT / LIMITS).read_text())["walks"][name]
    functions = sum(map(len, found.values()))
    entered = "\n".join(f"  {module}: {' '.join(sorted(found[module]))}" for module in sorted(found))
    assert found, f"walks.{name}: the processes entered nothing of ours"
    is_within = len(found) <= limits["modules"] and functions <= limits["functions"] * 1.1
    assert is_within, (
        f"walks.{name}: {len(found)} modules and {functions} functions are entered, expected at most"
        f" {limits['modules']} and {limits['functions']} + 10 %. Enter fewer, or raise the limit in {LIMITS} and say"
        f" why in the commit. Entered:\n{entered}"
    )


def check_map(found: Walk, *titles: str) -> None:
    """Fail if the processes entered a file that docs/overview.md does not name under these walks.

    Files that were only imported do not count.
    """
    text = MAP.read_text("utf-8")
    chapters = [text.partition(f"\n### Walk: {title}\n")[2].partition("\n#")[0] for title in titles]
    named = set(re.findall(r"`((?:distrun|distrun_runtime)/[\w/]+\.py)`", " ".join(chapters)))
    entered = {path_of(module) for module, names in found.items() if not all(map(IS_IMPORT.match, names))}
    assert all(chapters), titles
    assert entered <= named, f"{MAP.name}, walk of {titles[-1]}, does not name {' '.join(sorted(entered - named))}"


def path_of(module: str) -> str:
    """Return a module's file: below the checkout, or below `runtime/`."""
    path = module.replace(".", "/")
    is_package = any((root / path).is_dir() for root in (ROOT, ROOT / "runtime"))
    return f"{path}/__init__.py" if is_package else f"{path}.py"
