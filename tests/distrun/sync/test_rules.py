from __future__ import annotations

from pathlib import Path

import pytest

from distrun.errors import UsageError
from distrun.sync.rules import DEFAULT_EXCLUDES, CopyRules, Extra, filters, literal, make_rules, parse_extra, protected


def patterns(options: list[str]) -> list[str]:
    return [option.removeprefix("--exclude=") for option in options if option.startswith("--exclude=")]


def test_the_users_patterns_come_before_the_ignore_file_and_that_before_the_defaults(tmp_path: Path) -> None:
    (tmp_path / ".distrunignore").write_text("# a comment\n\n; another\r\ndata/\r\n+ venv/\n")
    found = patterns(filters(CopyRules(("*.ckpt",)), str(tmp_path)))
    assert found[:2] == ["/.distrun-sync", ".distrun-part-*"]
    assert found[2:] == ["*.ckpt", "data/", "+ venv/", *DEFAULT_EXCLUDES]


def test_git_takes_the_place_of_the_defaults(tmp_path: Path) -> None:
    assert patterns(filters(CopyRules(("x",), gitignore=True), str(tmp_path)))[2:] == ["x"]


def test_an_ignore_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ".distrunignore").mkdir()
    with pytest.raises(UsageError, match="cannot read"):
        filters(CopyRules(), str(tmp_path))


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("../lib/libmxnet.so", Extra("/a/lib/libmxnet.so", "libmxnet.so")),
        ("/x/python/mxnet/", Extra("/x/python/mxnet", "mxnet")),
        ("/x/y:lib/z", Extra("/x/y", "lib/z")),
        ("/x/y:./lib//z/", Extra("/x/y", "lib/z")),
        ("/x:y:z", Extra("/x:y", "z")),
    ],
)
def test_an_extra_says_where_it_comes_to_be(word: str, expected: Extra) -> None:
    assert parse_extra(word, "/a/b") == expected


@pytest.mark.parametrize("word", ["", ":x", "/x:/etc", "/x:../up", "/x:a/../../b", "/x:.", "/", "/x:~/a", "a\0b"])
def test_an_extra_cannot_leave_the_destination(word: str) -> None:
    with pytest.raises(UsageError, match="--sync-extra"):
        parse_extra(word, "/a/b")


@pytest.mark.parametrize("pattern", ["", " ", "a\nb"])
def test_a_pattern_must_be_one(pattern: str) -> None:
    with pytest.raises(UsageError, match="--sync-exclude"):
        make_rules([pattern], cwd="/")


def test_deleting_and_gits_list_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="do not go together"):
        make_rules(gitignore=True, delete=True, cwd="/")


def test_an_extra_and_the_folders_above_it_are_kept_from_deletion() -> None:
    assert protected(CopyRules(extra=(Extra("/x", "a/b[1]"),))) == [
        "--filter=P /a",
        "--filter=P /a/b\\[1]",
        "--filter=P /a/b\\[1]/**",
    ]


def test_a_literal_name_has_backslashes_only_where_rsync_takes_them_away() -> None:
    assert literal("a\\b") == "a\\b"
    assert literal("a\\b*") == "a\\\\b\\*"
    assert literal("a\\b", always=True) == "a\\\\b"
