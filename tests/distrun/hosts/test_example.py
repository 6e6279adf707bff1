from __future__ import annotations

import re
from pathlib import Path

import pytest

from distrun.hosts import grammar, parse

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "hosts.example").read_text("utf-8")
PAGE = (ROOT / "docs" / "hosts.md").read_text("utf-8")
FORMS = {
    "a comment of each kind": r"(?m)^# (?:.*\n)*// .*\n.*// .*\n.*\n.* # ",
    "include": r"(?m)^@include \S",
    "IPv4": r"(?m)^\d+(\.\d+){3} ",
    "IPv6, in brackets and bare, with a zone": r"\[[\da-f:]+\] .*\n[\da-f:]+ .*\n\[.*%",
    "IPv6 with a port": r"\[.*\]:\d",
    "user and port": r"(?m)^\w+@\w+\n\w+:\d+ ",
    "ranges: plain, padded, a list, steps, several": r"\w\[1-4\]\n\w+\[01-16,20\] .*\n\w+\[\d-\d\]n\[1-8/2\]",
    "a quoted value": r'="\S+ \S+"',
    "GPUs: how many, which, by UUID": r"gpus=\d+ .*\n.*gpus=\d,\d .*\n.*gpus=GPU-",
    "a host on two lines": r"(?m)^(d\d+) .*\n\1 ",
}


def test_the_example_is_a_hosts_file() -> None:
    found = parse.of_file(str(ROOT / "hosts.example"))
    assert {"d1", "gpu01", "rack2n7", "rack3n2", "2001:db8::18", "localhost"} <= set(found.names)
    assert found.spec("d18").slots == 4
    assert len(found.warnings) == 1


@pytest.mark.parametrize("form", FORMS)
def test_the_example_has_every_form_of_the_grammar(form: str) -> None:
    assert re.search(FORMS[form], TEXT), "hosts.example has a line of each legal form"


def test_the_example_and_the_users_page_have_every_attribute_by_each_of_its_names() -> None:
    assert [key for key in grammar.KEYS if f" {key}=" not in TEXT] == []
    assert [key for key in grammar.KEYS if f"`{key}`" not in PAGE] == []


def test_the_users_page_has_every_code_variable_and_format() -> None:
    sources = [file.read_text("utf-8") for file in Path(grammar.__file__).parent.glob("*.py")]
    codes = re.findall(r'"([EW]1\d\d)"', "".join(sources))
    assert len(set(codes)) > 15
    assert [code for code in codes if f"| {code} |" not in PAGE] == []
    assert [name for name in (*parse.VARIABLES, *grammar.FORMATS) if f"`{name}`" not in PAGE] == []
