from __future__ import annotations

from distrun_cli import Distrun

from distrun import __version__, templates


def test_list_has_each_template_with_its_tool_and_what_it_makes(distrun: Distrun) -> None:
    done = distrun.answer("template", "list")
    assert (done.returncode, done.stderr) == (0, b"")
    head, *rows = done.stdout.decode().splitlines()
    assert head.split() == ["NAME", "FOR", "WHAT", "IT", "MAKES"]
    known = templates.find_all().values()
    assert [row.split() for row in rows] == [[each.name, *each.tool.split(), *each.what.split()] for each in known]


def test_show_describes_the_values_and_has_the_text(distrun: Distrun) -> None:
    shown = distrun.answer("template", "show", "dockerfile").stdout.decode()
    head, _, text = shown.partition("\nText:\n\n")
    assert text == templates.find("dockerfile").text
    assert "  base  (default: python:" in head
    assert "  packages  (default: empty)\n      More packages that pip installs" in head
    assert f"  docker build --tag distrun:{__version__} .\n" in head


def test_render_writes_the_file_to_stdout_and_nothing_else(distrun: Distrun) -> None:
    done = distrun.answer(
        "template", "render", "dockerfile", "--set", "base=python:3.11-slim", "--set", "packages=torch>=2"
    )
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode().splitlines()
    assert lines[0] == (
        f"# Made by distrun {__version__}: distrun template render dockerfile --set base=python:3.11-slim "
        "--set 'packages=torch>=2'"
    )
    assert "ARG BASE=python:3.11-slim" in lines
    assert "#@" not in done.stdout.decode()


def test_unknown_template_is_named_with_the_nearest_one(distrun: Distrun) -> None:
    done = distrun.answer("template", "show", "Docker-File")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == (
        "distrun: error: there is no template 'Docker-File'; did you mean dockerfile?\n"
        "distrun: hint: distrun template list\n"
    )


def test_wrong_values_are_an_error_of_usage_that_writes_nothing(distrun: Distrun) -> None:
    done = distrun.answer("template", "render", "dockerfile", "--set", "bse=x", "--set", "packages=a\nb")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode() == (
        "distrun: error: template dockerfile: 2 values to correct:\n"
        "distrun: error:   'bse': the template has no such value; did you mean base?\n"
        "distrun: error:   packages: expected one line of printable characters, found 'a\\nb'\n"
        "distrun: hint: distrun template show dockerfile describes the values; give them by --set NAME=VALUE\n"
    )
