from __future__ import annotations

import re
from pathlib import Path

import pytest

from distrun import hosts
from distrun.hosts import grammar

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "hosts.example").read_text("utf-8")
ALL = set(grammar.FORMS) | {"key." + name for name in grammar.KEYS}


def seen(text: str) -> set[str]:
    saw: set[str] = set()
    hosts.parse(text, "hosts.example", read=lambda path: "included", saw=saw)
    return saw


def test_the_example_is_a_hosts_file() -> None:
    found = hosts.of_file(str(ROOT / "hosts.example"))
    assert {"d1", "gpu01", "rack2n7", "rack3n2", "2001:db8::18", "localhost"} <= set(found.names)
    assert found.spec("d18").slots == 4
    assert len(found.warnings) == 1


def test_the_example_has_every_form_of_the_grammar_and_every_attribute() -> None:
    assert seen(TEXT) == ALL, "hosts.example has one line of each legal form"


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ("ipv6.zone", r".*%.*\n"),
        ("key.role", r".* role=.*\n"),
        ("include", r"\n@.*\n"),
        ("key.cpu-max", r".*cpu-max.*\n"),
    ],
)
def test_a_form_that_goes_missing_is_noticed(form: str, pattern: str) -> None:
    assert seen(re.sub(pattern, "\n", TEXT)) == ALL - {form}


def test_the_users_page_has_every_code_attribute_and_form() -> None:
    page = (ROOT / "docs" / "hosts.md").read_text("utf-8")
    for code, text in grammar.CODES.items():
        assert "| %s |" % code in page, "%s: %s" % (code, text)
    for key in grammar.KEYS:
        assert "`%s`" % key in page, key
    for name in (*hosts.VARIABLES, *hosts.FORMATS):
        assert "`%s`" % name in page, name
