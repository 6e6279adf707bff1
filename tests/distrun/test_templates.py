"""Templates: heads, values and how they are quoted; and that each template of distrun keeps the rules."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from slowness import scaled

from distrun import __version__, templates
from distrun.errors import UsageError
from distrun.request import is_secret

ROOT = Path(__file__).resolve().parents[2]
TEXT = """\
#@ [template]
#@ what = a file for tests
#@ tool = cat
#@ use =
#@     cat it
#@     pip install distrun==@{version}
#@ [user]
#@ what = the account
#@ default = train
#@ [count]
#@ what = how many
#@ accepts = a whole number
#@ pattern = [0-9]+
#@ [key]
#@ what = the key
user: @{user|yaml}
count: @{count}
key: @{key|words} ${NOT_OURS} @{version}
"""
SAMPLE = templates.parse("sample", TEXT)
ALL = templates.find_all()
PRINTABLE = st.text().filter(str.isprintable)


def complaints(*words: str) -> list[str]:
    with pytest.raises(UsageError) as caught:
        templates.render(SAMPLE, words)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_rendered_file_has_the_values_quoted_for_their_places_and_says_how_it_was_made() -> None:
    assert templates.render(SAMPLE, ["count=3", 'user=a: "b"', "key=it's one"]) == (
        f"# Made by distrun {__version__}: distrun template render sample --set 'user=a: \"b\"' --set count=3 "
        "--set 'key=it'\"'\"'s one'\n"
        'user: "a: \\"b\\""\n'
        "count: 3\n"
        "key: 'it'\"'\"'s' one ${NOT_OURS} " + __version__ + "\n"
    )


def test_the_command_in_the_first_comment_makes_the_same_file_again() -> None:
    made = templates.render(SAMPLE, ["count=3", "key=a 'b' $c"])
    command = shlex.split(made.splitlines()[0].partition(": ")[2])
    assert command[:4] == ["distrun", "template", "render", "sample"]
    assert templates.render(SAMPLE, [word for word in command[4:] if word != "--set"]) == made


def test_first_line_by_which_a_program_knows_a_file_stays_the_first() -> None:
    head, text = TEXT[: TEXT.index("user:")], "#cloud-config\nfqdn: x\n"
    lines = templates.render(templates.parse("x", head + text), ["count=3", "key=k"]).splitlines()
    assert lines[0] == "#cloud-config"
    assert lines[1].startswith("# Made by distrun ")
    assert lines[2:] == ["fqdn: x"]


def test_everything_that_is_wrong_with_values_is_said_at_once() -> None:
    assert complaints("usr=x", "count=three", "what") == [
        "template sample: 4 values to correct:",
        "  'usr': the template has no such value; did you mean user?",
        "  'what': expected NAME=VALUE",
        "  count: expected a whole number, found 'three'",
        "  key: missing: the key",
    ]


def test_default_stands_in_for_a_value_and_the_last_of_two_counts() -> None:
    lines = templates.render(SAMPLE, ["count=3", "key=k", "count=4", "key=a=b=c"]).splitlines()
    assert lines[1:3] == ['user: "train"', "count: 4"]
    assert lines[3].startswith("key: a=b=c ")


def test_words_with_an_open_quote_are_refused() -> None:
    sample = templates.parse("sample", TEXT.replace("@{user|yaml}", "@{user|args}"))
    with pytest.raises(UsageError, match='user: expected words as of a shell, found a quote without its end: "it\'s"'):
        templates.render(sample, ["count=3", "key=k", "user=it's"])


def test_message_shows_no_more_than_the_begin_of_a_long_value() -> None:
    assert complaints("count=" + "x" * 1000, "key=k")[1] == f"  count: expected a whole number, found '{'x' * 30}...'"


@pytest.mark.parametrize("words", ["{key}", "{key}==", "key={key}", "keys={key}"])
def test_private_key_in_a_wrong_place_is_not_repeated(words: str) -> None:
    key = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9u"
    shown = complaints("count=3", words.format(key=key))
    assert "b3Blb" not in "".join(shown)


@pytest.mark.parametrize("end", ["\n", "\r", "\x85", "\u2028", "\0"])
def test_value_of_more_than_one_line_is_refused(end: str) -> None:
    assert complaints("count=3", f"key=a{end}b")[1].startswith(
        "  key: expected one line of printable characters, found"
    )


def test_value_of_a_place_without_quoting_is_one_plain_word() -> None:
    plain = templates.parse("plain", TEXT.replace("@{user|yaml}", "@{user}"))
    for text in ("a b", "a: b", "$(id)", "'", '"', "a;b", "a\\"):
        with pytest.raises(UsageError, match="user: expected letters, digits"):
            templates.render(plain, ["count=3", "key=k", "user=" + text])


@given(PRINTABLE)
def test_quoted_for_yaml_any_value_is_the_same_text_again(text: str) -> None:
    assert yaml.safe_load(templates.fill("a: @{x|yaml} # c", {"x": text})) == {"a": text}


@given(PRINTABLE)
def test_quoted_for_compose_any_value_is_the_same_text_once_compose_has_replaced_its_variables(text: str) -> None:
    assert yaml.safe_load(templates.fill("@{x|compose}", {"x": text})).replace("$$", "$") == text


@given(st.lists(PRINTABLE))
def test_arguments_for_kubernetes_are_the_words_of_a_shell(words: list[str]) -> None:
    found = yaml.safe_load(templates.fill("@{x|args}", {"x": shlex.join(words)}))
    assert [word.replace("$$", "$") for word in found] == words


@given(PRINTABLE)
def test_words_are_quoted_for_a_shell_one_by_one(text: str) -> None:
    assert shlex.split(templates.fill("a @{x|words}", {"x": text})) == ["a", *text.split()]


@pytest.mark.parametrize("place", ["@{nothing}", "@{x|nothing}"])
def test_unknown_name_in_a_template_is_an_error_that_names_the_known_ones(place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"the template has {place}; known names: ")):
        templates.fill(place, {"x": "1"})


def test_scripts_of_the_engines_are_no_templates_for_users() -> None:
    assert "dockerfile" in ALL
    assert not {"mpi", "sge", "slurm", "yarn", "README"} & set(ALL)


def shown_commands() -> list[str]:
    """Return the commands with `template render` of the pages and of the templates' own instructions."""
    pages = "".join(path.read_text("utf-8").replace("\\\n", " ") for path in (ROOT / "docs").glob("*.md"))
    lines = [*pages.splitlines(), *(line for each in ALL.values() for line in each.use)]
    return sorted(
        {
            line.strip()
            for line in lines
            if line.strip().startswith("distrun template render") and "[OPTIONS]" not in line
        }
    )


@pytest.mark.parametrize("line", shown_commands())
def test_every_command_that_is_shown_renders(line: str) -> None:
    key = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEXAMPLE ann@desk"
    line = line.replace("$(cat ~/.ssh/id_ed25519.pub)", key).partition(" > ")[0]
    name, *words = shlex.split(line, comments=True)[3:]
    assert words[::2] == ["--set"] * (len(words) // 2)
    templates.render(templates.find(name), words[1::2])


@pytest.mark.parametrize("name", ALL)
def test_template_declares_what_it_uses_and_takes_no_secret(name: str) -> None:
    found = ALL[name]
    used = {place for place, _ in re.findall(r"@\{(\w+)(\|\w+)?\}", found.text)}
    assert used - {templates.VERSION} == {value.name for value in found.values}
    assert found.use[0].startswith(f"distrun template render {name}")
    for value in found.values:
        assert not is_secret(value.name)
        assert bool(value.pattern) == bool(value.accepts)
        assert value.default is None or re.fullmatch(value.pattern or ".*", value.default)


def test_quotings_are_those_that_the_programs_understand() -> None:
    """By the programs themselves: the module's own functions could be wrong in the same way as the test."""
    text = """ a'b"c\\ $HOME `id` !x : # % é😀 """
    script = "printf '%s ' " + templates.fill("@{x|words}", {"x": text})
    printed = subprocess.run(["sh", "-c", script], capture_output=True, check=True, timeout=scaled(30))
    assert printed.stdout.decode().split() == text.split()
    assert json.loads(templates.fill("@{x|yaml}", {"x": text})) == text
