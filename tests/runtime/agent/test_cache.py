"""The runtime on a host: unpacked whole, once, where nobody else can write, and nowhere outside."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import time
import zipfile
from pathlib import Path

import pytest
from slowness import scaled

from distrun_runtime.agent import cache
from distrun_runtime.errors import PreflightFailure


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def archive(**files: str) -> tuple[str, bytes]:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as whole:
        for name, text in {"distrun_runtime/__init__.py": "X = 1\n", **files}.items():
            whole.writestr(name, text)
    return hashlib.sha256(content.getvalue()).hexdigest(), content.getvalue()


def test_a_version_is_unpacked_once_and_found_from_then_on(home: Path) -> None:
    digest, data = archive(**{"distrun_runtime/net/wire.py": "Y = 2\n"})
    assert cache.find(digest) == ""
    folder = cache.keep(digest, data, str(home))
    assert folder == str(home / "cache" / "distrun" / "runtime" / digest) == cache.find(digest)
    assert Path(folder, "distrun_runtime", "net", "wire.py").read_text() == "Y = 2\n"
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.listdir(os.path.dirname(folder)) == [digest]


def test_agents_that_share_a_home_may_unpack_at_the_same_time(home: Path) -> None:
    digest, data = archive(**{"distrun_runtime/m%d.py" % number: "x" * 1000 for number in range(50)})
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(cache.keep(digest, data, str(home)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scaled(60))
    assert found == [cache.find(digest)] * 8
    assert os.listdir(home / "cache" / "distrun" / "runtime") == [digest]


def test_where_the_cache_cannot_be_written_the_jobs_own_folder_does(home: Path) -> None:
    (home / "cache").write_text("no folder")
    digest, data = archive()
    assert cache.keep(digest, data, str(home)) == str(home / "runtime")
    assert (home / "runtime" / "distrun_runtime" / "__init__.py").exists()


def test_a_folder_that_others_may_write_to_is_not_trusted(home: Path) -> None:
    digest, data = archive()
    folder = cache.keep(digest, data, str(home))
    os.chmod(folder, 0o777)
    assert cache.find(digest) == ""
    assert cache.keep(digest, data, str(home)) == folder
    assert os.stat(folder).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("which", ["distrun", "distrun/runtime"])
def test_a_folder_of_ours_that_others_may_write_to_is_mended(home: Path, which: str) -> None:
    digest, data = archive()
    place = home / "cache" / which
    place.mkdir(parents=True)
    place.chmod(0o775)
    folder = cache.keep(digest, data, str(home))
    assert folder == str(home / "cache" / "distrun" / "runtime" / digest)
    assert place.stat().st_mode & 0o777 == 0o755
    place.chmod(0o777)
    assert cache.find(digest) == folder
    assert place.stat().st_mode & 0o777 == 0o755


def test_a_folder_of_somebody_else_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, data = archive()
    cache.keep(digest, data, str(home))
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    assert cache.find(digest) == ""
    assert cache.keep(digest, data, str(home)) == str(home / "runtime")


def test_a_version_under_the_name_of_another_is_not_believed(home: Path) -> None:
    digest, data = archive()
    other, _ = archive(**{"distrun_runtime/b.py": "x"})
    folder = Path(cache.keep(digest, data, str(home)))
    folder.rename(folder.with_name(other))
    assert cache.find(other) == ""


@pytest.mark.parametrize("damage", ["removed", "emptied", "linked", "list removed", "list emptied"])
@pytest.mark.parametrize("name", ["distrun_runtime/__init__.py", "distrun_runtime/net/wire.py"])
def test_a_version_of_which_a_part_was_removed_is_unpacked_again(home: Path, damage: str, name: str) -> None:
    digest, data = archive(**{"distrun_runtime/net/wire.py": "Y = 2\n"})
    folder = cache.keep(digest, data, str(home))
    file = Path(folder, cache.LIST if damage.startswith("list") else name)
    content = file.read_bytes()
    file.unlink()
    if damage == "linked":
        (home / "same").write_bytes(content)
        file.symlink_to(home / "same")
    elif damage.endswith("emptied"):
        file.write_bytes(b"")
    assert cache.find(digest) == ""
    assert cache.keep(digest, data, str(home)) == cache.find(digest) == folder
    assert file.read_bytes() == content


def test_versions_that_were_not_used_for_long_go_when_another_comes(home: Path) -> None:
    place = home / "cache" / "distrun" / "runtime"
    kept = [archive(**{"distrun_runtime/a.py": "%d" % number}) for number in range(4)]
    for digest, data in kept[:3]:
        cache.keep(digest, data, str(home))
    long_ago = time.time() - cache.UNUSED_S - 60
    for digest, _ in kept[:2]:
        os.utime(place / digest, (long_ago, long_ago))
    assert cache.find(kept[0][0])  # used now
    for name, age_s in ((".new-old", cache.STALE_S + 60), (".new-now", 0)):
        (place / name / "tree").mkdir(parents=True)
        os.utime(place / name, (time.time() - age_s, time.time() - age_s))
    (place / "of the user").mkdir()
    os.utime(place / "of the user", (long_ago, long_ago))
    cache.keep(*kept[3], str(home))
    assert {path.name for path in place.iterdir()} == {
        kept[0][0],
        kept[2][0],
        kept[3][0],
        ".new-now",
        "of the user",
    }


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "a/../../evil", "a//b", "./x", "a\\..\\b"])
def test_an_archive_that_names_files_outside_is_refused_and_leaves_nothing(home: Path, name: str) -> None:
    digest, data = archive(**{name: "evil"})
    with pytest.raises(PreflightFailure, match="names a file"):
        cache.keep(digest, data, str(home))
    assert os.listdir(home / "cache" / "distrun" / "runtime") == []
    assert not list(home.rglob("evil*"))


def test_only_what_the_digest_says_is_unpacked(home: Path) -> None:
    digest, data = archive()
    with pytest.raises(PreflightFailure, match="digest differs"):
        cache.keep(digest, data + b"x", str(home))
    with pytest.raises(PreflightFailure, match="not an archive"):
        cache.keep(hashlib.sha256(b"rubbish").hexdigest(), b"rubbish", str(home))
    for wrong in ("..", "../../x", "A" * 64, ""):
        with pytest.raises(PreflightFailure, match="no digest"):
            cache.find(wrong)


def test_without_its_variable_the_cache_is_below_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(home))
    digest, data = archive()
    assert cache.keep(digest, data, str(home)) == str(home / ".cache" / "distrun" / "runtime" / digest)
