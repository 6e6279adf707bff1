from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from distrun import formats


@pytest.mark.parametrize(
    ("words", "argv"),
    [
        (["python", "train.py", "--lr", ".1"], ("python", "train.py", "--lr", ".1")),
        (["python", "a b.py", "$HOME"], ("python", "a b.py", "$HOME")),
        (["python /x/y.py"], ("bash", "-c", "python /x/y.py")),
        (["a&&b"], ("bash", "-c", "a&&b")),
        (["./train.py"], ("./train.py",)),
        (["/opt/x-1.2_3/run+it@home:%,="], ("/opt/x-1.2_3/run+it@home:%,=",)),
    ],
)
def test_only_a_single_word_with_shell_characters_is_shell_text(words: list[str], argv: tuple[str, ...]) -> None:
    assert formats.to_argv(words) == argv


def test_shell_and_no_shell_force_it() -> None:
    assert formats.to_argv(["echo", "$HOME"], shell=True) == ("bash", "-c", "echo $HOME")
    assert formats.to_argv(["my prog"], shell=False) == ("my prog",)


@pytest.mark.parametrize(
    "word",
    [
        "",
        "plain",
        "two words",
        "it's",
        'say "hi"',
        "$HOME `id` $(id)",
        "a\nb\tc\rd",
        "ü ß 漢字 🚀",
        "\\n\n'",
        "\x01\x7f12",
        "#x",
    ],
)
def test_quoted_words_come_back_from_bash_byte_for_byte(word: str) -> None:
    out = subprocess.run(["bash", "-c", "printf %s " + formats.quote(word)], stdout=subprocess.PIPE, check=True).stdout
    assert out == word.encode()


def test_bytes_that_are_no_utf8_come_back_too() -> None:
    raw = b"\xff7\xfe'\n\\x"
    quoted = formats.join(["printf", "%s", os.fsdecode(raw)])
    assert subprocess.run(["bash", "-c", quoted], stdout=subprocess.PIPE, check=True).stdout == raw


@pytest.mark.parametrize(("name", "file"), [("bash", ".bashrc"), ("tcsh", ".cshrc"), ("zsh", ".zshenv")])
def test_a_login_shell_prints_nothing_with_the_line_that_is_shown(name: str, file: str, tmp_path: Path) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip("there is no %s here" % name)
    # As below sshd, where bash reads ~/.bashrc too.
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SSH_CLIENT": "192.0.2.1 1 22"}

    def printed(*lines: str) -> bytes:
        (tmp_path / file).write_text("".join(line + "\n" for line in (*lines, "echo Welcome")))
        return subprocess.check_output([program, "-c", "echo hi"], env=env, cwd=tmp_path)

    assert printed() == b"Welcome\nhi\n"
    advice = formats.quiet("/bin/" + name)
    assert file in advice
    assert printed(advice.partition(": ")[2]) == b"hi\n"


def test_an_unknown_login_shell_is_named() -> None:
    assert formats.quiet("/usr/bin/elvish").startswith("let the start-up files of elvish there print only")
    assert "the login shell" in formats.quiet("")
