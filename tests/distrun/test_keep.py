"""What is kept is what was made, never needed, and read only where nobody else can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrun import shipping


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "distrun" / "launcher"


def test_what_was_made_once_is_not_made_again(place: Path) -> None:
    assert shipping.kept("one", ".x", lambda: b"made") == b"made"
    assert shipping.kept("one", ".x", lambda: b"again") == b"made"
    assert shipping.kept("two", ".x", lambda: b"other") == b"other"
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_may_write_to_is_not_believed(place: Path) -> None:
    shipping.kept("one", ".x", lambda: b"made")
    (place / "one.x").chmod(0o666)
    assert shipping.kept("one", ".x", lambda: b"again") == b"again"


@pytest.mark.parametrize("which", ["", "distrun"])
def test_folders_of_ours_that_others_may_write_to_are_mended(which: str, place: Path) -> None:
    shipping.kept("one", ".x", lambda: b"made")
    folder = place.parent if which else place
    folder.chmod(0o777)
    assert shipping.kept("one", ".x", lambda: b"again") == b"made"
    assert folder.stat().st_mode & 0o777 == 0o755


def test_what_was_damaged_or_bears_another_name_is_made_again(place: Path) -> None:
    shipping.kept("one", ".x", lambda: b"made")
    file = place / "one.x"
    whole = file.read_bytes()
    for content in (b"\0" * len(whole), whole[:-1], whole + b"x", b"", b"made", whole.replace(b"made", b"fake")):
        file.write_bytes(content)
        assert shipping.kept("one", ".x", lambda: b"anew") == b"anew", content
        assert shipping.kept("one", ".x", lambda: b"never") == b"anew"
    file.rename(place / "two.x")
    assert shipping.kept("two", ".x", lambda: b"other") == b"other"


def test_what_is_damaged_goes_even_where_it_cannot_be_made(place: Path) -> None:
    shipping.kept("one", ".x", lambda: b"made")
    (place / "one.x").write_bytes(b"\0" * 100)

    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        shipping.kept("one", ".x", fail)
    assert list(place.iterdir()) == []


def test_a_link_is_not_followed(place: Path, tmp_path: Path) -> None:
    shipping.kept("one", ".x", lambda: b"made")
    (tmp_path / "theirs").write_bytes(b"theirs")
    (tmp_path / "theirs").chmod(0o666)
    (place / "one.x").unlink()
    (place / "one.x").symlink_to(tmp_path / "theirs")
    assert shipping.kept("one", ".x", lambda: b"again") == b"again"
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_without_a_place_it_is_made_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert shipping.kept("one", ".x", lambda: b"made") == b"made"
    assert shipping.kept("one", ".x", lambda: b"again") == b"again"


def test_only_the_latest_of_a_kind_stay(place: Path) -> None:
    for number in range(7):
        shipping.kept("n%d" % number, ".x", lambda: b"x")
    shipping.kept("one", ".y", lambda: b"y")
    assert len(list(place.glob("*.x"))) == shipping.COPIES
    assert [path.name for path in place.iterdir() if path.suffix != ".x"] == ["one.y"]


def test_the_agent_of_the_cache_is_the_one_of_the_sources(place: Path) -> None:
    shipping.agent.cache_clear()
    made = shipping.agent()
    shipping.agent.cache_clear()
    assert len(list(place.iterdir())) == 1
    assert shipping.agent() == made
