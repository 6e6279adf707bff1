"""What is typed to get into a host is good for the copy too, and is asked for once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakehosts import tree, write
from slowness import scaled
from sshd import PasswordServer, key, running
from terminal import Terminal

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = scaled(90.0)
LAUNCH = ("launch", "-n", "1", "-s", "0", "--interface", "lo")


class Typed:
    """`distrun WORDS` with a terminal of its own."""

    def __init__(self, terminal: Terminal, *words: str, cwd: Path) -> None:
        # The first terminal that the leader of a session opens is its own.
        take = ("sh", "-c", 'exec 3<>"$0"; exec "$@"', terminal.path)
        self._child = subprocess.Popen(
            [*take, sys.executable, "-m", "distrun", *words],
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": "%s:%s/runtime" % (ROOT, ROOT), "XDG_STATE_HOME": str(cwd.parent)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def finish(self) -> tuple[int, str]:
        out, _ = self._child.communicate(timeout=WAIT_S)
        return self._child.returncode, out.decode()


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("command", ["launch", "sync"])
def test_a_password_that_is_typed_once_is_good_for_the_copy_too(
    tmp_path: Path, ssh_config: str, terminal: Terminal, command: str, interactive: bool
) -> None:
    server = PasswordServer(tmp_path, "secret word", interactive)
    source = write(tmp_path / "source", x="1")
    hosts = (
        "--hosts",
        "me@d1:%d" % server.port,
        "--ssh-config",
        ssh_config,
        "--sync-dst-dir",
        str(tmp_path / "there"),
    )
    words = (*LAUNCH, *hosts, "cat", "x") if command == "launch" else ("sync", *hosts)
    typed = Typed(terminal, *words, cwd=source)
    terminal.expect("Password of me@d1: ")
    terminal.type("secret word\n")
    code, out = typed.finish()
    server.close()
    assert code == 0, out
    assert tree(tmp_path / "there") == {"x": "1"}
    assert terminal.read_rest().count("Password of") == 1
    assert "secret" not in terminal.shown + out
    assert set(server.tries) == {"secret word"}


@pytest.mark.ssh
def test_a_passphrase_that_is_typed_once_is_good_for_the_copy_too(
    tmp_path: Path, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    source = write(tmp_path / "source", x="1")
    with running(tmp_path / "sshd", SetEnv="SHLVL=9") as server:
        locked = key(tmp_path / "locked", "-N", "open sesame")
        server.authorized.write_text((tmp_path / "locked.pub").read_text())
        ssh_config = server.config("IdentityFile %s" % locked, identity=False)
        hosts = ("--hosts", "d1", "--ssh-config", ssh_config, "--sync-dst-dir", str(tmp_path / "there"))
        typed = Typed(terminal, *LAUNCH, *hosts, "cat", "x", cwd=source)
        terminal.expect("Passphrase of %s: " % locked)
        terminal.type("open sesame\n")
        code, out = typed.finish()
    assert code == 0, out
    assert tree(tmp_path / "there") == {"x": "1"}
    assert terminal.read_rest().count("Passphrase of") == 1
    assert "sesame" not in terminal.shown + out
