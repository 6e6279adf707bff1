"""What ssh is answered for rsync, and what it is not."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from distrun.sync.remote_shell import Helpers, passphrases, passwords

TYPED = {"password of ann": "secret", "key /keys/ann": "open sesame"}


def ask(env: dict[str, str], prompt: str) -> tuple[int, str]:
    done = subprocess.run(
        [env["SSH_ASKPASS"], prompt],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("ann@d1's password: ", "secret"),
        ("(ann@D1) Password: ", "secret"),
        ("(ann@10.0.0.1) Password: ", "secret"),
        ("Password: ", "secret"),
        ("ann@jump's password: ", None),
        ("bob@d1's password: ", None),
        ("(ann@jump) ann@d1's password: ", None),
        ("Enter passphrase for key '/keys/ann': ", None),
        ("Are you sure you want to continue connecting (yes/no/[fingerprint])? ", None),
    ],
)
def test_a_password_is_for_the_host_it_was_typed_for(prompt: str, answer: str | None) -> None:
    assert passwords(TYPED.get, "ann", ("d1", "10.0.0.1"), is_direct=True)(prompt) == answer


def test_a_question_that_does_not_say_whose_it_is_is_not_answered_where_it_may_be_anothers() -> None:
    rule = passwords(TYPED.get, "ann", ("d1",), is_direct=False)
    assert rule("Password: ") is None
    assert rule("ann@d1's password: ") == "secret"


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("Enter passphrase for key '/keys/ann': ", "open sesame"),
        ("Enter passphrase for key '/keys/other': ", None),
        ("(ann@d1) Enter passphrase for key '/keys/ann': ", None),
        ("ann@d1's password: ", None),
    ],
)
def test_a_passphrase_is_for_its_file(prompt: str, answer: str | None) -> None:
    assert passphrases(TYPED.get)(prompt) == answer


def test_a_helper_answers_as_long_as_the_copy_lasts_and_no_secret_is_in_its_folder() -> None:
    with Helpers() as helpers:
        first = helpers.env(passwords(TYPED.get, "ann", ("d1",), is_direct=True), {})
        second = helpers.env(passphrases(TYPED.get), {"DISPLAY": ":7"})
        assert ask(first, "ann@d1's password: ") == (0, "secret\n")
        assert ask(first, "bob@d1's password: ") == (1, "")
        assert ask(second, "Enter passphrase for key '/keys/ann': ") == (0, "open sesame\n")
        assert ask(second, "ann@d1's password: ") == (1, "")
        assert (first["SSH_ASKPASS_REQUIRE"], second["DISPLAY"]) == ("force", ":7")
        folder = Path(first["SSH_ASKPASS"]).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        texts = [path.read_text() for path in folder.iterdir() if path.is_file()] + [str({**first, **second})]
        assert not any("secret" in text or "sesame" in text for text in texts)
    assert not folder.exists()
