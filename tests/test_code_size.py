"""scripts/size: what it counts, and how it holds the limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "size"


class Checkout:
    """A checkout with modules of a test."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, **modules: str) -> None:
        """Write modules of the package distrun, by name."""
        for name, text in modules.items():
            self.file(f"distrun/{name}.py", text)

    def file(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(dedent(text))

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *words, str(self.root)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def numbers(self) -> dict[str, int]:
        """What it prints."""
        done = self.run()
        assert done.returncode == 0, done.stderr
        return {name: int(number) for name, number in map(str.split, done.stdout.splitlines())}

    def details(self) -> list[str]:
        """The circles and double names that it lists."""
        return [line.strip() for line in self.run("--list").stdout.splitlines() if line.startswith(" ")]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_modules_of_both_trees_are_counted_but_no_package_and_nothing_beside_them(checkout: Checkout) -> None:
    for path in ("distrun/__init__.py", "distrun/a.py", "runtime/distrun_runtime/b/__init__.py", "tests/test_a.py"):
        checkout.file(path, "x = 1\n")
    checkout.file("runtime/distrun_runtime/b/c.py", "x = 1\n")
    assert checkout.numbers()["modules"] == 2


def test_docstrings_comments_imports_and_blank_lines_are_no_lines_of_code(checkout: Checkout) -> None:
    checkout.write(
        a='''\
        """A docstring
        of two lines."""

        from a import (
            b,
        )
        import os  # os

        # a comment
        X = """text  # 1
        # of two lines"""  # 2
        """A docstring of a variable."""


        class A:  # 3
            """A docstring."""

            def call(self):  # 4
                """A docstring."""
                import sys

                return (  # 5
                    # a comment
                    1  # 6
                )  # 7
        '''
    )
    assert checkout.numbers()["code_lines"] == 7


def test_a_circle_may_go_through_an_import_in_a_function_and_through_several_modules(checkout: Checkout) -> None:
    checkout.write(
        a="from distrun import b\n",
        b="import distrun.c\n",
        c="def call():\n    from distrun.a import x\n",
        d="import distrun.a\n",
    )
    assert checkout.numbers()["circles"] == 1
    assert checkout.details() == ["circle: distrun.a distrun.b distrun.c"]


def test_an_import_for_type_checkers_only_closes_a_circle(checkout: Checkout) -> None:
    checkout.write(
        a="from typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    from distrun.b import B\n",
        b="from distrun.a import A\n",
    )
    assert checkout.details() == ["circle: distrun.a distrun.b"]


def test_a_name_imported_from_a_package_is_its_module_or_else_the_package(checkout: Checkout) -> None:
    checkout.file("distrun/p/__init__.py", "from distrun.p import a\n")
    checkout.file("distrun/p/a.py", "import os\n")
    checkout.file("distrun/p/b.py", "from distrun.p import a\n")
    assert checkout.details() == []
    checkout.file("distrun/p/a.py", "from distrun.p import something\n")
    assert checkout.details() == ["circle: distrun.p distrun.p.a"]


def test_a_class_name_of_several_files_is_double_whatever_underscores_it_has(checkout: Checkout) -> None:
    checkout.write(a="class _Found: ...\n", b="class Found:\n    class Inner: ...\n")
    checkout.file("runtime/distrun_runtime/c.py", "class Inner: ...\n")
    assert checkout.numbers()["double_names"] == 2
    assert checkout.details() == [
        "double name: Found in distrun/a.py distrun/b.py",
        "double name: Inner in distrun/b.py runtime/distrun_runtime/c.py",
    ]


def test_a_class_name_that_one_file_has_twice_is_not_double(checkout: Checkout) -> None:
    checkout.write(a="class Found: ...\n\n\nclass Other:\n    class _Found: ...\n")
    assert checkout.numbers()["double_names"] == 0


def test_a_number_above_its_limit_ends_the_check_and_is_shown_with_what_it_counts(checkout: Checkout) -> None:
    checkout.file("limits.toml", "[size]\nmodules = 2\ncode_lines = 2\ncircles = 0\ndouble_names = 0\n")
    checkout.write(a="import distrun.b\nx = 1\n", b="y = 1\n")
    assert checkout.run("--check").returncode == 0
    checkout.write(b="import distrun.a\ny = 1\nz = 1\n")
    done = checkout.run("--check")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "size: code_lines is 3, expected at most 2",
        "circle: distrun.a distrun.b",
        "size: circles is 1, expected at most 0",
        "size: make it smaller, or raise the limit in limits.toml and say why in the commit",
    ]
