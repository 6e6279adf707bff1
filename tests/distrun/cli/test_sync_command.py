"""`distrun sync` as far as it needs no host; `tests/integration/test_sync.py` has the rest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from distrun_cli import Distrun
from fakehosts import write

from distrun.cli.sync import as_json
from distrun.sync.copier import CopyResult
from distrun.sync.rules import DEFAULT_EXCLUDES

ROOT = Path(__file__).resolve().parents[3]


def test_a_dry_run_says_how_much_and_where_to(distrun: Distrun) -> None:
    write(distrun.work, **{"a.py": "123", ".git/x": "no"})
    (distrun.home / "hosts").write_text("d1\nd2 slots=4\n")
    done = distrun.run("sync", "-H", str(distrun.home / "hosts"), "--sync-dst-dir", "~/job", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.decode().splitlines() == [
        "distrun: 1 file, 3 B to copy to each of 2 hosts",
        "distrun: rsync %s/ -> d1:~/job" % distrun.work,
        "distrun: rsync %s/ -> d2:~/job" % distrun.work,
    ]
    done = distrun.run("sync", "--hosts", "d1", "--sync-dst-dir", "~/x", "--dry-run", "--json")
    assert json.loads(done.stdout) == {
        "schema": "distrun.sync/1",
        "source": str(distrun.work),
        "destination": "~/x",
        "files": 1,
        "bytes": 3,
        "delete": False,
        "dry_run": True,
        "hosts": [{"host": "d1"}],
    }
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--hosts", "d1"], "--sync-dst-dir"),
        (["--sync-dst-dir", "/x"], "no hosts were named"),
        (["--hosts", "d1", "--sync-dst-dir", ""], "expected a directory on the hosts"),
        (["--hosts", "d1", "--sync-dst-dir", "/x", "--delete", "--sync-gitignore"], "do not go together"),
        (["--hosts", "d1", "--sync-dst-dir", "/x", "--sync-extra", "a:../b"], "below the directory of the copy"),
        (["--hosts", "d1", "--sync-dst-dir", "/x", "--sync-extra", "nothing"], "there is no "),
        (["--hosts", "d1", "--sync-dst-dir", "/x", "--sync-exclude", ""], "expected a pattern"),
    ],
)
def test_what_the_user_got_wrong_is_exit_code_2(words: list[str], expected: str, distrun: Distrun) -> None:
    done = distrun.answer("sync", *words)
    assert done.returncode == 2
    assert expected in done.stderr.decode()


def test_a_machine_without_rsync_is_exit_code_4_with_what_to_install(distrun: Distrun) -> None:
    (distrun.home / "bin").mkdir()
    done = distrun.run("sync", "--hosts", "d1", "--sync-dst-dir", "/x", env={"PATH": str(distrun.home / "bin")})
    assert done.returncode == 4
    assert b"there is no rsync on this machine" in done.stderr
    assert b"hint: install rsync" in done.stderr


def test_json_has_all_of_a_result() -> None:
    result = CopyResult("h1", ("h1", "h2"), 2, 30, 1.23456, False, "h3", 23, "why", "do this", ("said",))
    names = ["host", "names", "ok", "same", "shared", "files", "code", "reason", "fix", "words", "bytes", "seconds"]
    values = ["h1", ("h1", "h2"), False, False, "h3", 2, 23, "why", "do this", ("said",), 30, 1.235]
    assert as_json(result) == dict(zip(names, values, strict=True))


def test_the_page_has_every_default() -> None:
    text = (ROOT / "docs" / "sync.md").read_text("utf-8")
    (listed,) = re.findall(r"^4\. Left out by default.*?:(.*?)\.$", text, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == set(DEFAULT_EXCLUDES)
