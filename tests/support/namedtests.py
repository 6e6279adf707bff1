"""Tests that pages name as `path::name` or `path::name[case]`: that they exist is checked without running them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`")


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


@cache
def functions_of(path: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)}


def parameters(path: str, name: str) -> set[str]:
    """Return what may stand in a test's brackets: the constants of its decorators, and of lists that these name."""
    decorators: list[ast.AST] = list(functions_of(path)[name].decorator_list)
    names = {node.id for one in decorators for node in ast.walk(one) if isinstance(node, ast.Name)}
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and names & {one.id for one in node.targets if isinstance(one, ast.Name)}:
            decorators.append(node.value)
    return {str(node.value) for one in decorators for node in ast.walk(one) if isinstance(node, ast.Constant)}


def check_named_tests(cell: str) -> int:
    """Check that each test that a cell of a table names exists; return how many it names."""
    named = NAMED.findall(cell)
    assert len(named) == cell.count("::"), "a test is not written `path::name`"
    for path, name, parameter in named:
        assert (ROOT / path).is_file(), path
        assert name in functions_of(path), "%s has no %s" % (path, name)
        assert not parameter or parameter in parameters(path, name), "%s has no case %r" % (name, parameter)
    return len(named)
