from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from distrun.errors import SyncError
from distrun.sync import rsync
from distrun.sync.rsync import Tool

NEW = Tool(
    "rsync",
    "3.2.7",
    frozenset(
        {
            "--executability",
            "--omit-dir-times",
            "--8-bit-output",
            "--delay-updates",
            "--partial-dir",
            "--delete-delay",
            "--info",
            "--out-format",
        }
    ),
)
OLD = Tool("rsync", "openrsync", frozenset())


def sending(program: Tool, **more: object) -> list[str]:
    given: dict[str, object] = {"shell": ["ssh"], "rsync_path": "P", "partial": ".p", "stall_s": 60.0, **more}
    return rsync.sending(program, ["--exclude=x"], "/src/", "h", **given)  # type: ignore[arg-type]


def test_updates_are_delayed_and_nothing_is_deleted_unless_asked() -> None:
    argv = sending(NEW)
    assert "--delay-updates" in argv
    assert not [word for word in argv if word.startswith("--delete")]
    assert {"--delete", "--delete-delay"} < set(sending(NEW, delete=True))
    assert argv[-3:] == ["--", "/src/", "h:./"]


def test_owner_and_group_stay_the_hosts() -> None:
    for program in (NEW, OLD):
        words = [word for word in sending(program) if not word.startswith("--") and word.startswith("-")]
        assert not {"a", "o", "g"} & set("".join(words))


def test_an_rsync_that_knows_little_is_given_little() -> None:
    argv = sending(OLD, delete=True)
    assert {word.partition("=")[0] for word in argv if word.startswith("--")} == {
        "--", "--rsh", "--rsync-path", "--timeout", "--delete", "--delete-after", "--exclude", "--stats",
    }  # fmt: skip
    assert "-p" in argv
    assert rsync.listing(OLD, [], "/src/", "/empty/")[-4:] == ["--stats", "--", "/src/", "/empty/"]


def test_an_ipv6_address_stands_in_brackets() -> None:
    assert rsync.sending(NEW, [], "/s/", "fe80::1", shell=["ssh"], rsync_path="", partial="", stall_s=1)[-1] == (
        "[fe80::1]:./"
    )


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_rsync_gets_the_words_of_the_shell_back(tmp_path: Path) -> None:
    program = script(tmp_path / "show me", 'printf "%s\\n" "$@" >"$OUT"; exit 9')
    words = [program, "-o", "ProxyCommand=nc 'a b' \"c\"", "", "it's", "plain"]
    command = [rsync.find().program, "-r", "--rsh=" + rsync.join(words), "--", "%s/" % tmp_path, "host:./"]
    env = {"OUT": str(tmp_path / "out"), "PATH": "/usr/bin:/bin"}
    subprocess.run(command, env=env, capture_output=True, check=False)
    assert (tmp_path / "out").read_text().splitlines()[:5] == [*words[1:], "host"][:5]


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("rsync  version 3.2.7  protocol version 31", "3.2.7"),
        ("rsync  version v3.1.3  protocol version 31", "3.1.3"),
        ("openrsync: protocol version 29\nrsync version 2.6.9 compatible", "openrsync"),
        ("?", ""),
    ],
)
def test_an_rsync_is_asked_what_it_is(said: str, version: str, tmp_path: Path) -> None:
    program = script(tmp_path / "rsync", 'case $1 in --version) echo "%s";; *) echo "[--info=FLAGS]" >&2;; esac' % said)
    found = rsync.probe(program)
    assert (found.version, found.options) == (version, frozenset({"--info"}))


def test_a_missing_rsync_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SyncError, match="there is no rsync on this machine") as caught:
        rsync.find()
    assert caught.value.hint.startswith("install rsync")
    assert caught.value.exit_code == 4


def test_codes_are_words() -> None:
    assert rsync.meaning(23) == "some files were not copied (code 23)"
    assert rsync.meaning(99) == "code 99"
    assert rsync.meaning(-9) == "ended by signal 9"
