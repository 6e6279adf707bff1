"""The runtime on a host: unpacked whole, once, where nobody else can write, and nowhere outside."""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from pathlib import Path

import pytest

from distrun_runtime.agent import cache
from distrun_runtime.agent.refusal import Refusal


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
        thread.join(30)
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
    os.chmod(os.path.dirname(folder), 0o777)
    assert cache.find(digest) == ""
    assert cache.keep(digest, data, str(home)) == str(home / "runtime")


def test_a_version_of_which_a_part_was_removed_is_unpacked_again(home: Path) -> None:
    digest, data = archive()
    folder = cache.keep(digest, data, str(home))
    os.remove(os.path.join(folder, "distrun_runtime", "__init__.py"))
    assert cache.find(digest) == ""
    assert cache.keep(digest, data, str(home)) == cache.find(digest) == folder


@pytest.mark.parametrize("name", ["../evil.py", "/etc/evil", "a/../../evil", "a//b", "./x", "a\\..\\b"])
def test_an_archive_that_names_files_outside_is_refused_and_leaves_nothing(home: Path, name: str) -> None:
    digest, data = archive(**{name: "evil"})
    with pytest.raises(Refusal, match="names a file"):
        cache.keep(digest, data, str(home))
    assert os.listdir(home / "cache" / "distrun" / "runtime") == []
    assert not list(home.rglob("evil*"))


def test_only_what_the_digest_says_is_unpacked(home: Path) -> None:
    digest, data = archive()
    with pytest.raises(Refusal, match="digest differs"):
        cache.keep(digest, data + b"x", str(home))
    with pytest.raises(Refusal, match="no archive"):
        cache.keep(hashlib.sha256(b"rubbish").hexdigest(), b"rubbish", str(home))
    for wrong in ("..", "../../x", "A" * 64, ""):
        with pytest.raises(Refusal, match="no digest"):
            cache.find(wrong)


def test_without_its_variable_the_cache_is_below_the_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(home))
    digest, data = archive()
    assert cache.keep(digest, data, str(home)) == str(home / ".cache" / "distrun" / "runtime" / digest)
